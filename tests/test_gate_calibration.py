"""False alarms and power of the gate, on simulated runs whose truth is known.

The model: 50 checks a run; a check has a level, its images lie about it with a standard deviation, and every run adds
its own noise to each image. `DESIGN` is the noise that gives the figures of the design's simulation with a total
deviation of 0.05 (3 % false alarms and 2 % missed with 16 images, 1 % and 0 % with 32); `SEEDS` is the largest that was
measured between seeds.
"""

from __future__ import annotations

import math
from functools import cache

import numpy as np
import pytest
from scipy import stats as scipy_stats

from leakgauge.harness.core import stats
from leakgauge.harness.core.result import Scores
from leakgauge.harness.core.rng import Key, normal, uniform
from leakgauge.harness.gate import rules as tests
from leakgauge.harness.gate.judge import Rules, Verdict, judge
from leakgauge.harness.gate.measure import placements
from tests.gate_case import measure, measured
from tests.oracles import ALPHA

ROOT = Key(20261121, ("test_gate_calibration",))
RULES = Rules()
RUNS, CHECKS = 1000, 50
SEEDS = 0.012
DESIGN = 0.05 * math.sqrt(0.2)


@cache
def world(runs, n):
    """Images [runs, CHECKS, n], and the noise of two runs in units of its standard deviation."""
    shape, key = (runs, CHECKS, n), ROOT.child(runs, n)
    level = uniform(key.child("level"), (runs, CHECKS, 1), 0.05, 0.95).numpy()
    spread, before, now = (normal(key.child(part), shape).numpy().astype(np.float64) for part in ("a", "b", "c"))
    return level + math.sqrt(0.05**2 - DESIGN**2) * spread, before, now


def simulate(noise, n=16, rise=0.0, runs=RUNS):
    """Both runs, [runs, CHECKS, n]; the first check truly rises."""
    images, before, now = world(runs, n)
    truth = images.copy()
    truth[:, 0] += rise
    return np.clip(images + noise * before, 0, 1), np.clip(truth + noise * now, 0, 1)


def decide(before, now):
    """What the gate decides of many runs at once."""
    return tests.decide(tests.paired(before, now), RULES)


def most(share, cases):
    """The most hits of `cases` that a test of this level has, but for a false alarm of ALPHA."""
    return int(scipy_stats.binom.ppf(1 - ALPHA, cases, share))


@pytest.mark.parametrize("noise", [SEEDS, DESIGN])
def test_at_most_six_percent_of_runs_without_a_rise_raise_an_alarm(noise):
    alarms = decide(*simulate(noise)).fails.any(axis=-1)
    assert alarms.mean() <= 0.06
    assert noise > SEEDS or not alarms.any()


def test_the_family_holds_its_level_where_the_margin_does_not_help():
    before, now = simulate(0.05)  # a rise of 0.02 is then one standard error
    rise = tests.paired(before, now)
    alarms = tests.decide(rise, RULES).fails.any(axis=-1)
    assert alarms.sum() <= most(RULES.level, RUNS)
    each = (rise.chance() < RULES.level) & (rise.mean >= RULES.margin)
    assert each.any(axis=-1).mean() > 0.5  # what Holm is for


def test_a_rise_of_five_hundredths_is_failed_nine_times_in_ten():
    for noise in (SEEDS, DESIGN):
        decided = decide(*simulate(noise, rise=0.05))
        assert decided.fails[:, 0].mean() >= 0.90, noise
        assert decided.passes[:, 0].mean() <= 0.05


@pytest.mark.parametrize("noise", [DESIGN, 0.05])
def test_a_rise_of_what_is_tolerable_passes_one_time_in_twenty(noise):
    before, now = simulate(noise)
    decided = decide(before[:, 1:], now[:, 1:] + RULES.tolerable)  # unclipped: the rise is what it says
    assert decided.passes.sum() <= most(0.05, decided.passes.size)


def test_twice_the_images_see_more():
    few, many = (decide(*simulate(0.035, n, rise=0.05)).fails[:, 0].mean() for n in (16, 32))
    assert few < 0.75 < 0.95 < many


def test_the_gate_decides_as_simulated():
    before, now = simulate(DESIGN, rise=0.05)
    now[:, 1:3] += 0.04 * np.linspace(0, 2, 16)
    decided = decide(before[:8], now[:8])
    seen = set()
    for run in range(8):
        pair = [
            measured(*(measure(values=values, name=f"d{check:02}") for check, values in enumerate(one[run])))
            for one in (now, before)
        ]
        checks = {check.key: check for check in judge(*pair, RULES).checks}
        for number, key in enumerate(sorted(checks)):
            otherwise = Verdict.PASS if decided.passes[run, number] else Verdict.INCONCLUSIVE
            expected = Verdict.FAIL if decided.fails[run, number] else otherwise
            assert checks[key].verdict is expected
            assert checks[key].p == pytest.approx(decided.p[run, number], rel=1e-9)
            seen.add(expected)
    assert seen == {Verdict.FAIL, Verdict.PASS, Verdict.INCONCLUSIVE}


def test_holm_is_the_textbook_one():  # Holm 1979: ordered p times 4, 3, 2, 1, never falling
    p = np.array([[0.01, 0.04, 0.03, 0.005], [0.5, 0.001, 0.9, 0.5]])
    assert tests.holm(p) == pytest.approx(np.array([[0.03, 0.06, 0.06, 0.02], [1.0, 0.004, 1.0, 1.0]]))


def test_the_paired_test_is_that_of_scipy():
    before, now = (one[0] for one in simulate(DESIGN, runs=20))
    expected = scipy_stats.ttest_rel(now, before, axis=-1, alternative="greater")
    found = tests.paired(before, now)
    assert found.chance() == pytest.approx(expected.pvalue, rel=1e-9)
    assert found.low() == pytest.approx(expected.confidence_interval(0.95).low, rel=1e-9)


@pytest.mark.parametrize("family", [1, 50])
def test_the_smallest_rise_is_failed_four_times_in_five(family):
    error = 0.05  # so large that the margin does not count
    found = tests.smallest(error, 15, family, RULES)
    critical = scipy_stats.t.isf(RULES.level / family, 15)
    assert scipy_stats.nct.sf(critical, 15, found / error) == pytest.approx(0.8, abs=0.005)


def test_the_smallest_rise_knows_the_margin():
    found = tests.smallest(0.004, math.inf, 1, RULES)  # the bar is the margin: 0.8416 standard errors above it
    assert found == pytest.approx(0.02 + 0.8416 * 0.004, abs=1e-5)
    assert tests.smallest(0.0, 15, 50, RULES) == RULES.margin


def test_a_check_reports_what_it_would_have_seen():
    before, now = simulate(DESIGN, runs=20)
    check = judge(measured(measure(values=now[0, 0])), measured(measure(values=before[0, 0])), RULES).checks[0]
    error = float(tests.paired(before[0, 0], now[0, 0]).error)
    assert check.smallest == pytest.approx(tests.smallest(error, 15, 1, RULES))


def normals(key, *shape):
    return normal(key, shape).numpy().astype(np.float64)


def curves(name, cases, sides, shifts, share):
    """Placements of the same records in two runs, whose scores correlate by `share`."""
    key = ROOT.child(name)
    drawn = {
        part: [normals(key.child(part, side), cases, size) for side, size in enumerate(sides)]
        for part in ("common", "before", "now")
    }
    made: list[list[tests.Sides]] = []
    for part, shift in zip(("before", "now"), shifts, strict=True):
        members, others = (
            math.sqrt(share) * common + math.sqrt(1 - share) * own
            for common, own in zip(drawn["common"], drawn[part], strict=True)
        )
        made.append([placements(Scores(a, b)) for a, b in zip(members + shift, others, strict=True)])
    return [*zip(*made, strict=True)]


def stacked(rises):
    """Many rises as one of arrays."""
    return tests.Rise(*(np.array(column, dtype=np.float64) for column in zip(*rises, strict=True)))


def test_the_variance_is_that_of_one_curve_where_the_other_is_chance():
    members, others = (normals(ROOT.child("one", side), 40) for side in ("m", "o"))
    estimate = stats.auc(members + 1, others)
    chance = (np.full(40, 0.5), np.full(40, 0.5))
    rise = tests.delong(chance, placements(Scores(members + 1, others)))
    assert rise.mean == pytest.approx(estimate.value - 0.5)
    half = scipy_stats.norm.ppf(0.975) * float(rise.error) / (estimate.value * (1 - estimate.value))
    assert math.log(estimate.high / (1 - estimate.high)) - math.log(estimate.value / (1 - estimate.value)) == (
        pytest.approx(half, rel=1e-9)
    )


@pytest.mark.parametrize("shift", [0.0, 1.0])
def test_equal_curves_are_told_apart_one_time_in_twenty(shift):
    cases = 1000
    rise = stacked([tests.delong(*pair) for pair in curves(f"null{shift}", cases, (40, 60), (shift, shift), 0.7)])
    chance = rise.chance()
    assert np.sum(chance < 0.05) <= most(0.05, cases)
    assert np.sum(chance < 0.001) <= most(0.001, cases)
    missed = np.sum((rise.low() > 0) | (rise.high() < 0))
    assert cases * 0.07 < missed <= most(0.10, cases)  # 90 %: neither too narrow nor useless


def test_pairing_sees_a_rise_that_two_intervals_do_not():
    cases = 300
    pairs = curves("power", cases, (200, 200), (0.5, 0.8), 0.9)  # AUC 0.638 to 0.714
    rise = stacked([tests.delong(*pair) for pair in pairs])
    assert rise.mean.mean() == pytest.approx(
        scipy_stats.norm.cdf(0.8 / math.sqrt(2)) - scipy_stats.norm.cdf(0.5 / math.sqrt(2)), abs=0.005
    )
    assert np.mean((rise.chance() < 0.001) & (rise.mean >= RULES.margin)) > 0.9
    alone = stacked([tests.delong(pair[0], other[1]) for pair, other in zip(pairs, pairs[1:] + pairs[:1], strict=True)])
    assert np.mean(alone.chance() < 0.001) < 0.3


@pytest.mark.parametrize(("shift", "share"), [(0.0, 0.9), (2.0, 0.7)])
@pytest.mark.matrix
def test_the_chance_of_a_threshold_raises_no_alarm(shift, share):
    cases = 1000
    pairs = curves(f"rate{shift}", cases, (400, 1000), (shift, shift), share)
    rise = stacked([tests.caught(*pair, 0.01) for pair in pairs])
    chance = rise.chance()
    assert np.mean(rise.error) >= 0.93 * np.std(rise.mean)  # 2 % is the noise of 1,000 cases
    assert np.sum(chance < 0.05) <= most(0.05, cases)
    assert np.sum(chance < 0.001) <= most(0.001, cases)
    assert shift or np.mean(chance < 0.05) > 0.025  # no more careful than need be where the curve is straight
    if shift:  # members alone, as if the threshold were given, alarm ten times too often and more
        found = [np.array([side[0] >= 0.99 for side in pair], dtype=np.float64) for pair in pairs]
        blind = stacked([tests.paired(*both) for both in found]).chance()
        assert np.mean(blind < 0.001) > 0.01


def test_a_rate_is_that_of_the_scores():
    for number in range(20):
        members, others = (normals(ROOT.child("rates", number, side), n) for side, n in enumerate((300, 1000)))
        sides = placements(Scores(members + 1.5, others))
        rise = tests.caught((np.zeros(300), np.ones(1000)), tuple(side.round(5) for side in sides), 0.01)
        assert rise.mean == pytest.approx(stats.tpr_at_fpr(members + 1.5, others, 0.01).value)


def test_a_rate_that_rises_is_seen():
    pairs = curves("rising", 200, (400, 1000), (0.0, 1.5), 0.9)  # 1 % to 20 %
    rise = stacked([tests.caught(*pair, 0.01) for pair in pairs])
    assert np.mean((rise.chance() < 0.001) & (rise.mean >= RULES.margin)) > 0.9
