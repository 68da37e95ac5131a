"""What becomes of a measure, rule by rule."""

import dataclasses
import math

import numpy as np
import pytest

from leakgauge.harness.core.result import Scores
from leakgauge.harness.core.rng import Key, normal
from leakgauge.harness.gate import measure as measures
from leakgauge.harness.gate.judge import Rules, Verdict, judge
from leakgauge.harness.gate.measure import placements
from tests import report_fixtures
from tests.by_rows import by_rows
from tests.gate_case import IMAGES, measure, measured

ROOT = Key(20261121, ("test_gate_rules",))
SPREAD = np.array([-0.03, 0.02, 0.01, -0.01, 0.03, -0.02, 0.0, 0.0] * 2)
"""What 16 pairs differ by, with mean 0 and a standard deviation of 0.019."""


def outcome(now, base, rules=None, **more):
    return judge(measured(now), measured(base), rules or Rules(), **more)


def verdict(now, base, **more):
    (check,) = outcome(now, base, **more).checks
    return check


def test_the_same_images_again_are_a_pass():
    check = verdict(measure(), measure())
    assert (check.verdict, check.rise, check.low, check.high, check.p, check.n) == (Verdict.PASS, 0, 0, 0, 1, 16)
    assert check.smallest == Rules().margin
    assert check.reason.startswith("no increase detected: mean SSIM did not change")
    assert "a rise of 0.020 would have been detected" in check.reason


@by_rows(
    (0.1, Verdict.FAIL),
    (0.02, Verdict.FAIL),  # 0.3 - 0.28 < 0.02 in binary fractions
    (0.019, Verdict.PASS),
    (-0.1, Verdict.PASS),
)
def test_a_rise_of_all_images_alike_is_certain_and_the_margin_decides(rise, expected):
    check = verdict(measure(values=np.full(16, round(0.28 + rise, 6))), measure(values=np.full(16, 0.28)))
    assert check.verdict is expected
    assert check.p == pytest.approx(0 if rise > 0 else 1, abs=1e-12)
    assert check.reason.startswith("no increase of 0.02 or more detected") == (rise == 0.019)


def test_a_rise_of_the_mean_fails_and_says_by_how_much():
    check = verdict(measure(values=IMAGES + 0.04 + SPREAD), measure())
    assert check.verdict is Verdict.FAIL
    assert check.rise == pytest.approx(0.04)
    # t of 0.04 / (0.01932 / 4) with 15 degrees of freedom: p 2.6e-7; quantile 1.7531
    assert check.low == pytest.approx(0.04 - 1.7531 * 0.0193218 / 4, abs=1e-5)
    assert check.high == pytest.approx(0.04 + 1.7531 * 0.0193218 / 4, abs=1e-5)
    assert check.reason == "mean SSIM rose by 0.040 (90 %: 0.032 to 0.048) over 16 images, p < 0.0001 after Holm"


def test_what_neither_fails_nor_passes_is_inconclusive():
    check = verdict(measure(values=IMAGES + 0.03 + 4 * SPREAD), measure())
    assert check.verdict is Verdict.INCONCLUSIVE
    assert check.high > Rules().tolerable
    assert check.smallest > check.rise
    assert "not ruled out" in check.reason


def test_holm_counts_every_test_of_the_run_and_nothing_else():
    worse = [measure(values=IMAGES + 0.02 + 2 * SPREAD), measure(values=IMAGES)]  # p 0.027 by itself
    alone = judge(measured(worse[0]), measured(worse[1]), Rules())
    others = [measure("bits", [2.0]), measure("accuracy", [0.8]), measure(name="none", control="ceiling")]
    besides = judge(measured(worse[0], *others), measured(worse[1], *others), Rules())
    still = measure(name="other")
    with_another = judge(measured(worse[0], still), measured(worse[1], still), Rules())
    p = [run.checks[0].p for run in (alone, besides, with_another)]
    assert p[0] == p[1] == pytest.approx(p[2] / 2)
    assert alone.verdict is Verdict.FAIL
    assert with_another.checks[0].smallest > alone.checks[0].smallest


@by_rows((0.21, 0.83, True), (0.39, 0.50, True), (0.40, 0.83, False), (0.21, 0.49, False))
def test_one_image_that_becomes_recognizable_is_named_and_decides_nothing(before, now, named):
    old, new = np.full(16, 0.1), np.full(16, 0.1)
    old[7], new[7] = before, now
    check = verdict(measure(values=new), measure(values=old))
    assert check.images == ((7,) if named else ())
    assert check.verdict in (Verdict.PASS, Verdict.INCONCLUSIVE)
    words = f"image 8 was {before:.2f} and is {now:.2f}: newly recognizable in this one draw"
    assert check.reason.endswith(words) == named


def test_an_image_that_is_not_identified_is_not_newly_recognizable():
    old, new = np.full(16, 0.1), np.full(16, 0.1)
    new[[3, 7]] = 0.83
    assert verdict(measure(values=new, unseen=(7,)), measure(values=old)).images == (3,)
    assert verdict(measure(values=new, unseen=(3, 7)), measure(values=old)).images == ()
    # what the baseline did not identify may be recognizable now
    assert verdict(measure(values=new), measure(values=old, unseen=(3, 7))).images == (3, 7)


def test_the_measure_of_a_run_knows_which_images_are_identified():
    run = report_fixtures.make_run(report_fixtures.grid([report_fixtures.NONE, report_fixtures.GAUSSIAN[1]],
                                   [(report_fixtures.MATCHING, report_fixtures.PROBE, "server")]))  # fmt: skip
    for one in measures.measured(run).measures:
        if one.metric == "ssim":
            assert one.unseen == tuple(at for at, value in enumerate(one.values) if value < 0.3)
            assert bool(one.unseen) == (one.defense.name == "gaussian")
        else:
            assert one.unseen == ()


def test_many_recognizable_images_make_a_short_sentence():
    reason = verdict(measure(values=np.full(16, 0.9)), measure()).reason
    assert "image 1 was 0.05 and is 0.90" in reason
    assert "and 13 more: newly recognizable" in reason


def test_the_same_image_under_three_seeds_is_one_image():
    values = np.tile(IMAGES[:8], 3)
    changes = np.concatenate([SPREAD[:8], SPREAD[:8] + 0.01, SPREAD[:8] - 0.01]) + 0.03
    same = [measure(values=x, items=("a", "a", "a")) for x in (values + changes, values)]
    other = [measure(values=x, items=("a", "b", "c")) for x in (values + changes, values)]
    assert (verdict(*same).n, verdict(*other).n) == (8, 24)
    assert verdict(*same).rise == pytest.approx(verdict(*other).rise)
    assert verdict(*same).high > verdict(*other).high
    few = [measure(values=x[:12], items=("a", "a", "a")) for x in (values, values)]
    assert verdict(*few).verdict is Verdict.NOT_COMPARABLE


@by_rows(
    (measure(values=[*IMAGES[:15], None]), measure(), Verdict.INCOMPLETE, "missing"),
    (measure(values=[*IMAGES[:15], math.nan]), measure(), Verdict.INCOMPLETE, "not finite"),
    (measure(value=math.nan), measure(), Verdict.INCOMPLETE, "not finite"),
    (measure(values=()), measure(), Verdict.INCOMPLETE, "no values"),
    (measure(problem="a cell failed: OOM"), measure(), Verdict.INCOMPLETE, "a cell failed: OOM"),
    (measure(problem="a cell failed", control="ceiling"), measure(control="ceiling"), Verdict.INCOMPLETE, "failed"),
    (measure(), measure(values=[*IMAGES[:15], math.nan]), Verdict.NOT_COMPARABLE, "baseline has no number"),
    (measure(), measure(problem="a cell failed"), Verdict.NOT_COMPARABLE, "baseline has no number"),
    (measure(items=("b",)), measure(), Verdict.NOT_COMPARABLE, "different images"),
    (measure(values=IMAGES[:8]), measure(), Verdict.NOT_COMPARABLE, "8 against 16"),
    (measure(values=IMAGES[:7]), measure(values=IMAGES[:7]), Verdict.NOT_COMPARABLE, "7 images are too few"),
    (measure(control="floor"), measure(), Verdict.NOT_COMPARABLE, "floor in the run and a gated attack"),
    (measure("bits", [2.0, math.inf]), measure("bits", [2.0, 2.0]), Verdict.INCOMPLETE, "not finite"),
    (measure("accuracy", [0.5]), measure("accuracy", [0.5, 0.6]), Verdict.NOT_COMPARABLE, "different seeds"),
    (measure("epsilon", [None]), measure("epsilon", [1.0]), Verdict.INCOMPLETE, "missing"),
)
def test_what_cannot_be_judged_says_why(now, base, expected, words):
    (check,) = outcome(now, base).checks
    assert check.verdict is expected
    assert words in check.reason
    assert (check.rise, check.p, check.smallest) == (None, None, None)


def test_a_measure_that_one_side_lacks():
    lost = judge(measured(), measured(measure()), Rules()).checks[0]
    assert (lost.verdict, lost.before) == (Verdict.INCOMPLETE, pytest.approx(0.2))
    control = judge(measured(), measured(measure(control="ceiling")), Rules())
    assert control.exit_code() == 5
    assert "removed: the run no longer has" in lost.reason
    added = judge(measured(measure(), measure(name="new"), study_hash="f" * 16), measured(measure()), Rules())
    assert ([check.key for check in added.checks], added.exit_code()) == ([measure().key], 0)
    changed, new = added.warnings
    assert changed.startswith("the study changed: smoke 1111")
    assert new.startswith("new ")
    assert "this measure is not compared: new: the baseline does not have" in new
    alone = judge(measured(measure()), measured(), Rules())
    assert (alone.checks, alone.exit_code()) == ((), 4)
    failed = judge(measured(measure(), measure(name="new", problem="a cell failed")), measured(measure()), Rules())
    assert failed.exit_code() == 5


def scores(name, shift, n=(60, 90)):
    """Placements of a run's members and others; runs share most of their noise."""
    sides = []
    for side, size, moved in (("members", n[0], shift), ("others", n[1], 0.0)):
        common, own = (normal(ROOT.child(side, one), (size,)).numpy() for one in ("common", name))
        sides.append(common.astype(np.float64) + 0.2 * own + moved)
    return placements(Scores(*sides))


def membership(name, shift, seeds=1, n=(60, 90), **changes):
    found = [scores(f"{name}{seed}", shift, n) for seed in range(seeds)]
    return measure(
        "auc",
        [value for sides in found for side in sides for value in side],
        value=float(np.mean([members.mean() for members, _ in found])),
        sides=(n,) * seeds,
        **changes,
    )


@pytest.mark.parametrize("seeds", [1, 3])
def test_an_attack_that_tells_members_better_fails(seeds):
    base = membership("base", 0.5, seeds)
    worse, same = membership("now", 1.0, seeds), membership("now", 0.5, seeds)
    found = verdict(worse, base)
    assert (found.verdict, found.n) == (Verdict.FAIL, 150 * seeds)
    assert found.now == pytest.approx(worse.value)
    assert found.rise == pytest.approx(worse.value - base.value)
    assert found.reason.startswith("AUC rose by")
    assert verdict(same, base).verdict is Verdict.PASS


def test_seeds_average_and_their_variances_add():
    base, now = membership("base", 0.5), membership("now", 0.7)
    thrice = [dataclasses.replace(one, values=one.values * 3, sides=one.sides * 3) for one in (now, base)]
    one, three = verdict(now, base), verdict(*thrice)
    assert three.rise == pytest.approx(one.rise)
    assert three.high - three.rise == pytest.approx((one.high - one.rise) / math.sqrt(3), rel=0.01)  # fewer t degrees


def test_other_sides_are_not_comparable():
    base = membership("base", 0.5)
    assert verdict(dataclasses.replace(base, sides=((90, 60),)), base).verdict is Verdict.NOT_COMPARABLE
    few = membership("few", 0.5, n=(7, 90))
    assert verdict(few, few).verdict is Verdict.NOT_COMPARABLE


def rate(curve, value):
    return measure("tpr@1%", (), value=value, sides=curve.sides)


def test_a_rate_is_judged_by_the_placements_of_its_auc():
    curves = [membership(name, shift, n=(400, 1000)) for name, shift in (("now", 3.0), ("base", 0.0))]
    rates = [rate(curve, float(np.mean(np.array(curve.values[:400]) >= 0.99))) for curve in curves]
    runs = [measured(*pair) for pair in zip(curves, rates, strict=True)]
    worse = {check.metric: check for check in judge(*runs, Rules()).checks}["tpr@1%"]
    assert (worse.verdict, worse.n) == (Verdict.FAIL, 400)
    assert worse.now == pytest.approx(rates[0].value)
    assert worse.reason.startswith("TPR at 1 % FPR rose by")
    assert {check.verdict for check in judge(runs[0], runs[0], Rules()).checks} == {Verdict.PASS}
    assert {check.verdict for check in judge(*runs[::-1], Rules()).checks} == {Verdict.PASS}


def test_a_rate_without_its_curve_is_no_pass():
    curve = membership("now", 0.5, n=(400, 1000))
    assert outcome(rate(curve, 0.1), rate(curve, 0.1)).exit_code() == 5


@by_rows(
    ([3.0], [3.0], (8.0, 8.0), Verdict.PASS, "against the claim of 8"),
    ([3.0], [8.5], (8.0, 8.0), Verdict.FAIL, "above the claim of 8"),
    ([3.0, 3.0], [2.0, 8.5], (8.0, 8.0), Verdict.FAIL, "is 8.5 and was 3"),  # the largest over the seeds
    ([3.0], [8.5], (8.0, 16.0), Verdict.FAIL, "above the claim of 8"),  # the claim was lifted
    ([3.0], [6.0], (8.0, 5.0), Verdict.FAIL, "above the claim of 5"),  # less is promised
    ([9.0], [9.1], (8.0, 8.0), Verdict.PASS, "as it was"),
    ([9.0], [14.0], (8.0, 8.0), Verdict.INCONCLUSIVE, "does not prove an increase"),
    ([9.0], [9.0], (8.0, 10.0), Verdict.PASS, "as it was"),
    ([3.0], [3.7], (8.0, 8.0), Verdict.PASS, "no increase detected"),  # 0.7, but less than a quarter
    ([0.0], [0.4], (8.0, 8.0), Verdict.PASS, "no increase detected"),  # infinitely more, but 0.4
    ([3.0], [6.0], (8.0, 8.0), Verdict.INCONCLUSIVE, "against the claim of 8"),
    ([3.0], [3.1], (None, None), Verdict.PASS, "no finite claim"),
    ([3.0], [9.0], (None, None), Verdict.INCONCLUSIVE, "no finite claim"),
    ([9.0], [9.0], (None, 8.0), Verdict.FAIL, "above the claim of 8"),
)
def test_an_audit_fails_where_it_passes_the_claim(before, now, claims, expected, words):
    found = outcome(measure("epsilon", now, limit=claims[1]), measure("epsilon", before, limit=claims[0]))
    (check,) = found.checks
    assert check.verdict is expected
    assert words in check.reason
    assert (check.before, check.now) == (max(before), max(now))
    assert bool(found.warnings) == (claims[0] != claims[1])


@by_rows(
    ("bits", [2.0, 2.0], [2.0, 2.0], Verdict.PASS, "no increase detected: bits of a parameter went from 2 to 2"),
    ("bits", [2.0, 2.0], [2.02, 2.02], Verdict.PASS, "no increase"),
    ("bits", [2.0, 2.0], [2.0, 2.06], Verdict.FAIL, "from 2 to 2.03, by 1.5 %"),
    ("bits", [2.0], [1.0], Verdict.PASS, "no increase"),
    ("bits", [0.0], [1.0], Verdict.FAIL, "from 0 to 1, where"),
    ("accuracy", [0.80, 0.82], [0.80, 0.82], Verdict.PASS, "no loss of more than 0.02"),
    ("accuracy", [0.80, 0.82], [0.78, 0.80], Verdict.PASS, "no loss"),
    ("accuracy", [0.80, 0.82], [0.70, 0.72], Verdict.INCONCLUSIVE, "2 trainings cannot tell the fall from chance"),
    ("accuracy", [0.8] * 4, [0.1, 0.9, 0.8, 0.8], Verdict.INCONCLUSIVE, "that the seeds do not show clearly"),
    ("accuracy", [0.8] * 4, [0.70, 0.71, 0.70, 0.69], Verdict.FAIL, "from 0.800 to 0.700, a fall of more than 0.02"),
    ("accuracy", [0.80], [0.90], Verdict.PASS, "no loss"),
)
def test_traffic_may_not_rise_and_accuracy_may_not_fall(metric, before, now, expected, words):
    check = verdict(measure(metric, now), measure(metric, before))
    assert check.verdict is expected
    assert words in check.reason
    assert check.rise == pytest.approx(np.mean(now) - np.mean(before))
    assert (check.low is None) == (len(now) == 1)


@by_rows(
    ("ceiling", {"values": IMAGES + SPREAD - 0.05}, "the attack got weaker; a pass is then weaker evidence"),
    ("ceiling", {"values": IMAGES + SPREAD + 0.05}, "the attack got stronger"),
    ("ceiling", {"values": IMAGES + SPREAD + 0.7}, "the attack got stronger"),
    ("ceiling", {"values": IMAGES + SPREAD + 0.01}, ""),
    ("floor", {"values": IMAGES + SPREAD + 0.05}, "the images or the score have changed"),
    ("floor", {"values": IMAGES + SPREAD - 0.05}, "the images or the score have changed"),
    ("ceiling", {"items": ("b",)}, "this control is not compared: the run and the baseline have different images"),
)
def test_a_control_warns_and_never_fails(control, changes, words):
    sound = measure("bits", [2.0])
    now, old = measure(control=control, **changes), measure(control=control)
    found = judge(measured(now, sound), measured(old, sound), Rules())
    assert found.verdict is Verdict.PASS
    assert [check.metric for check in found.checks] == ["bits"]
    assert [words in warning for warning in found.warnings] == ([True] if words else [])


@by_rows(
    ({"study_hash": "f" * 16, "measures": (measure(name="new"),)}, "of different studies"),
    ({"data": {"digits": "f" * 16}}, "data of 'digits'"),
    ({"data": {"photos": "f" * 16}}, "data of 'digits'"),
    ({"packages": {"torch": "2.13.1+cpu", "numpy": "2.4.6"}}, "stale: torch 2.13.0+cpu to 2.13.1+cpu"),
    ({"packages": {"torch": "2.13.0+cpu"}}, "stale: numpy 2.4.6 to none"),
    ({"measures": (measure(), measure())}, "1 measures of the run have duplicate keys"),
    ({"measures": ()}, ""),
)
def test_runs_that_cannot_be_compared_have_no_checks(changes, words):
    base = measured(measure()) if words else measured()
    found = judge(measured(**{"measures": (measure(),), **changes}), base, Rules())
    assert found.checks == ()
    assert words in found.problems[0]
    assert (found.verdict, found.exit_code()) == (Verdict.NOT_COMPARABLE, 4)


@by_rows(
    ({"machine": "Darwin arm64"}, "another machine"),
    ({"dirty": True}, "the run was made by code that was not committed"),
    ({"commit": ""}, "does not say which commit"),
    ({"commit": "a, b"}, "several commits"),
    ({"packages": {"torch": "2.13.0+cu130", "numpy": "2.4.6"}}, "another build"),
)
def test_what_may_explain_a_difference_is_a_warning(changes, words):
    found = judge(measured(measure(), **changes), measured(measure()), Rules())
    assert found.verdict is Verdict.PASS
    assert [words in warning for warning in found.warnings] == [True]


def test_the_worst_comes_first_and_decides_the_exit_code():
    base = [measure(name=name) for name in "abcdef"]
    now = [
        measure(name="a"),
        measure(name="b", values=IMAGES + 0.03 + 4 * SPREAD),
        measure(name="c", items=("b",)),
        measure(name="d", problem="a cell failed"),
        measure(name="e", values=IMAGES + 0.1 + SPREAD),
        measure(name="f", values=IMAGES + 0.2 + SPREAD),
    ]
    found = judge(measured(*now), measured(*base), Rules())
    assert [check.key[0] for check in found.checks] == ["f", "e", "d", "c", "b", "a"]
    assert judge(measured(*now[::-1]), measured(*base), Rules()) == found
    worst = [judge(measured(*now[:n]), measured(*base[:n]), Rules()) for n in range(1, 7)]
    assert [one.exit_code() for one in worst] == [0, 0, 4, 5, 1, 1]
    assert [one.exit_code(inconclusive_fails=True) for one in worst] == [0, 3, 4, 5, 1, 1]
    changed = [dataclasses.replace(one, unaccepted=("a key",)) for one in worst]
    assert [one.exit_code(inconclusive_fails=True) for one in changed] == [6, 6, 4, 5, 1, 1]
    assert [str(one.verdict) for one in worst[:4]] == ["PASS", "INCONCLUSIVE", "NOT COMPARABLE", "INCOMPLETE"]
