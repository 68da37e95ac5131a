"""The section on the changes since the baseline."""

import dataclasses
import re

import pytest

from leakgauge.harness.core.cell import PartSpec
from leakgauge.harness.gate.baseline import Baseline
from leakgauge.harness.gate.judge import Outcome, Rules, Verdict, judge
from leakgauge.harness.gate.measure import measured
from leakgauge.reports.html import _environment
from leakgauge.reports.sections.changes import MOST, WIDTH, changes, moved
from tests import gate_case
from tests import report_fixtures as double
from tests.by_rows import by_rows
from tests.report_page import complete, content


def check(verdict=Verdict.FAIL, at=0, **changed):
    return gate_case.check(verdict, at, **({"reason": f"Reason {at}."} | changed))


GAUSSIAN, MAP = PartSpec("gaussian", {"epsilon": 1.0}), PartSpec("map", {"tv": 5.0})


def still(at=0):
    return check(Verdict.PASS, at, rise=0.001, low=-0.01, high=0.012)


def measure(key, **changed):
    case = {"key": key, "defense": GAUSSIAN, "attack": MAP, "target": "probe, round 0", "aware": True}
    return gate_case.measure(**(case | changed))


def run_of(*measures, **changed):
    return gate_case.measured(*measures, **({"commit": "c" * 40} | changed))


NOW = run_of(measure("gaussian/map/server/ssim/000000"))
BASE = Baseline(run_of(commit="b" * 40), "first numbers")


def build(checks, problems=(), warnings=()):
    return content(changes(Outcome(tuple(checks), problems, warnings), NOW, BASE))


def page_of(data):
    return complete(_environment().get_template("changes.html").render(data=data, title="Changes"))


@pytest.mark.parametrize("verdict", [one for one in Verdict if one is not Verdict.PASS])
def test_what_did_not_pass_has_a_row(verdict):
    assert moved(check(verdict, rise=None, low=None, high=None))


@by_rows(
    (0.010, 0.004, 0.016, True),
    (-0.010, -0.016, -0.004, True),
    (0.010, -0.004, 0.024, False),
    (0.0, 0.0, 0.0, False),
    (0.0004, 0.0003, 0.0005, False),
    (-0.3, None, None, True),
    (0.0, None, None, False),
    (None, None, None, False),
)
def test_a_pass_has_a_row_where_its_change_is_surely_one(rise, low, high, expected):
    assert moved(check(Verdict.PASS, rise=rise, low=low, high=high)) is expected


def test_the_others_are_counted():
    found = build([check(), still(1), still(2)])
    assert [row.word for row in found.rows] == ["leakage increased"]
    assert found.unmoved == "2 of 3 checks without a clear change."
    assert found.headline == "Leakage increased in 1 of 3 checks"


def test_rows_keep_the_order_of_the_gate_and_the_last_ones_are_counted():
    found = build([check(at=at, name=f"case {at}") for at in range(1, MOST + 8)])
    assert [row.defense for row in found.rows] == [f"case {at}" for at in range(1, MOST + 1)]
    assert found.hidden == 7
    assert "7 more checks with a clear change" in page_of(found).text


def test_a_row_has_case_numbers_interval_images_n_and_the_smallest_detectable_rise():
    text = page_of(build([check(images=(2, 4))])).text
    for part in (
        "✕ leakage increased",
        "gaussian",
        "map, server, probe, round 0",
        "mean SSIM, defense-aware",
        "0.148 0.213 +0.065 +0.047 to +0.083",
        "16 detects 0.021",
        "Newly recognizable: images 3, 5. Reason 0.",
    ):
        assert part in text
    assert "Baseline: smoke at commit bbbbbbbbbb, now cccccccccc (first numbers)." in text


def test_names_are_those_of_the_page():
    outcome = Outcome((check(),), (), ())
    (row,) = content(changes(outcome, NOW, BASE)).rows
    assert (row.defense, row.case) == ("gaussian", "map, server, probe, round 0")
    other = run_of(measure("other", defense=PartSpec("gaussian", {"epsilon": 2.0})))
    (row,) = content(changes(outcome, NOW, dataclasses.replace(BASE, measured=other))).rows
    assert row.defense == "gaussian epsilon=1"


@by_rows(
    ("ssim", Verdict.PASS, -0.1, "leakage decreased", "↓"),
    ("auc", Verdict.PASS, 0.01, "within tolerance", "↑"),
    ("accuracy", Verdict.PASS, -0.01, "within tolerance", "↓"),
    ("accuracy", Verdict.PASS, 0.1, "accuracy rose", "↑"),
    ("accuracy", Verdict.FAIL, -0.1, "accuracy fell", "✕"),
    ("bits", Verdict.PASS, -1.0, "fewer bits sent", "↓"),
    ("bits", Verdict.FAIL, 1.0, "more bits sent", "✕"),
    ("epsilon", Verdict.FAIL, 1.0, "audited epsilon too high", "✕"),
    ("ssim", Verdict.INCONCLUSIVE, 0.1, "inconclusive", "?"),
    ("ssim", Verdict.INCOMPLETE, None, "incomplete", "!"),
    ("ssim", Verdict.NOT_COMPARABLE, None, "not comparable", "≠"),
)
def test_a_verdict_is_an_icon_and_words(metric, verdict, rise, word, icon):
    (row,) = build([check(verdict, metric=metric, rise=rise, low=None, high=None)]).rows
    assert (row.word, row.icon) == (word, icon)


def test_accuracy_is_in_percent_and_its_change_in_points():
    (row,) = build([check(metric="accuracy", before=0.8, now=0.751, rise=-0.049, low=-0.06, high=-0.03)]).rows
    assert (row.before, row.now, row.rise) == ("80.0 %", "75.1 %", "−4.9 points")
    assert row.interval == "−6.0 to −3.0 points"


def test_a_check_that_could_not_be_made_has_no_drawing():
    gone = check(Verdict.INCOMPLETE, now=None, rise=None, low=None, high=None, p=None, n=0, smallest=None)
    (row,) = build([gone]).rows
    assert (row.now, row.rise, row.interval, row.plot, row.smallest) == ("n/a", "n/a", "", None, "")
    assert page_of(build([gone])).all("svg") == []


def test_drawings_of_a_metric_share_one_scale_with_zero_on_it():
    wide, narrow = check(at=1, rise=0.4, low=0.3, high=0.5), check(at=2, rise=-0.1, low=-0.2, high=-0.05)
    other = check(at=3, metric="auc", rise=0.01, low=0.005, high=0.015)
    first, second, third = (row.plot for row in build([wide, narrow, other]).rows)
    assert first.zero == second.zero != third.zero
    assert float(second.low or 0) < float(second.at) < float(second.high or 0) < float(first.zero) < float(first.at)
    # 0.4 and -0.1 about zero, on one scale
    right, left = float(first.at) - float(first.zero), float(second.zero) - float(second.at)
    assert right / left == pytest.approx(4, rel=0.02)
    ends = [(plot.zero, plot.at, plot.low, plot.high) for plot in (first, second, third)]
    places = [float(place) for plot in ends for place in plot if place is not None]
    assert all(0 < place < WIDTH for place in places)
    assert first.label == "change +0.400, 90 % interval +0.300 to +0.500"


def test_a_change_without_an_interval_is_a_point_and_no_change_at_all_can_be_drawn():
    found = build([check(metric="bits", rise=1.0, low=None, high=None)])
    plot = found.rows[0].plot
    assert (plot.low, plot.high) == (None, None)
    assert page_of(found).all("svg")[0]["role"] == "img"
    plot = build([check(Verdict.INCONCLUSIVE, rise=0.0, low=0.0, high=0.0)]).rows[0].plot
    assert plot.at == plot.zero == f"{WIDTH / 2:.1f}"


def test_problems_and_warnings_stand_above_the_table():
    text = page_of(build([check()], warnings=("another machine",))).text
    assert text.index("another machine") < text.index("Checks with a clear change")
    page = page_of(build([], problems=("other study",)))
    assert all(text in page.text for text in ("Not comparable: nothing was checked", "other study"))
    assert page.all("table") == []


def test_without_a_clear_change_there_is_no_table():
    page = page_of(build([still(1), still(2)]))
    for text in ("✓ No increase detected in 2 checks", "2 of 2 checks without a clear change."):
        assert text in page.text
    assert page.all("table") == []


def test_hostile_names_are_escaped_and_no_style_is_inline():
    odd = "<script>alert(1)</script>\"'&"
    now = run_of(measure("k", defense=PartSpec(odd), attack=PartSpec(odd)), study=odd, commit=odd)
    base = dataclasses.replace(BASE, reason=odd)
    page = page_of(changes(Outcome((check(key="k", reason=odd),), (), (odd,)), now, base))
    assert page.all("script") == []
    assert not any("style" in attributes for _, attributes in page.tags)
    assert "<script>alert(1)</script>" in page.text


@pytest.mark.parametrize("verdict", list(Verdict))
def test_no_text_calls_anything_safe_or_private(verdict):
    found = [check(verdict, metric=name) for name in ("ssim", "auc", "epsilon", "bits", "accuracy")]
    assert not re.search(r"\b(safe|private|secure)", page_of(build(found)).text, re.IGNORECASE)


def test_the_gate_s_outcome_on_two_runs_can_be_shown():
    cells = double.grid([double.NONE, double.GAUSSIAN[0]], [(double.MAP, double.Target("probe", 0, 12), "server")])
    before = double.make_run(cells)
    raised = {
        key: double.with_estimates(one, double.mean("ssim", [v + 0.3 for v in one.estimate("ssim").values]))
        if one.cell.training.defense.name == "gaussian"
        else one
        for key, one in before.results.items()
    }
    base, now = measured(before), measured(dataclasses.replace(before, results=raised))
    outcome = judge(now, base, Rules())
    found = content(changes(outcome, now, Baseline(base, "")))
    assert [(row.metric, row.rise) for row in found.rows] == [("mean SSIM", "+0.300")]
    assert "Baseline: invented-study at commit 4f0c2d7a4f, now 4f0c2d7a4f." in page_of(found).text
