"""ROC curves of the report, and its charts against epsilon that need more than a mean SSIM."""

import dataclasses
import itertools
import math
import re

import numpy as np
import pytest

from leakgauge.harness.core import stats
from leakgauge.harness.core.cell import Target
from leakgauge.harness.core.result import Scores
from leakgauge.harness.core.stats import mean
from leakgauge.reports.charts import figures
from leakgauge.reports.charts.curves import roc_charts, staircase, vertical_average
from leakgauge.reports.charts.epsilon import MSE, leakage_charts
from leakgauge.reports.html import render
from leakgauge.reports.select import Analysis
from tests import report_fixtures as double
from tests.report_page import complete, small

MEMBERS = Target("members", count=200)


def drawn(key, members, outside, apart=1.0, scale=1.0):
    """Normal scores, `apart` apart, on a scale of their own."""
    draws = np.random.Generator(np.random.Philox(key=key))
    return Scores(scale * (apart + draws.standard_normal(members)), scale * draws.standard_normal(outside))


def membership(seeds=(0,), target=MEMBERS):
    return small(double.NONE, double.GAUSSIAN[0], attacks=[(double.THRESHOLD, target, "public")], seeds=seeds)


def only_chart(run):
    analysis = Analysis(run)
    (chart,) = roc_charts(analysis, next(iter(analysis.settings)))
    return chart


def chart_of(*scores):
    """The chart of a run whose trainings have these scores, by seed."""
    run = double.make_run(membership(tuple(range(len(scores)))))
    found = {cell.id: scores[cell.training.seed] for cell in run.cells}
    return only_chart(dataclasses.replace(run, scores=found.__getitem__))


def height(trace, x):
    """Of a line on log axes, at the right of a step."""
    left, right = next((a, b) for a, b in itertools.pairwise(trace) if a[0] <= x < b[0])
    share = math.log(x / left[0]) / math.log(right[0] / left[0])
    return math.exp((1 - share) * math.log(left[1]) + share * math.log(right[1]))


def test_the_curve_of_one_training_is_its_roc_curve():
    scores = drawn(1, 40, 60)
    curve, full = vertical_average([scores]), stats.roc(scores.members, scores.outside)
    assert curve.fpr.tolist() == sorted(set(full.fpr.tolist()))
    assert curve.tpr.tolist() == [full.tpr[full.fpr == rate].max() for rate in curve.fpr]


def test_at_each_rate_the_members_found_are_the_sum_over_the_trainings():
    trained = [drawn(2, 30, 100), drawn(3, 50, 60, 0.4)]
    curve = vertical_average(trained)
    for rate in (0.02, 0.05, 0.2, 0.5):
        found = [stats.tpr_at_fpr(one.members, one.outside, rate) for one in trained]
        hits = sum(round((estimate.value or 0.0) * estimate.n) for estimate in found)
        assert curve.tpr[np.searchsorted(curve.fpr, rate, side="right") - 1] == pytest.approx(hits / 80, abs=1e-12)


def test_trainings_whose_scores_are_on_other_scales_are_not_mixed():
    # by one threshold for both, the members of the second stand below the others of the first
    low, high = drawn(4, 100, 100, 3.0), drawn(4, 100, 100, 3.0, scale=0.01)
    members, outside = np.append(low.members, high.members), np.append(low.outside, high.outside)
    mixed = vertical_average([Scores(members, outside)])
    assert vertical_average([low, high]).tpr == pytest.approx(vertical_average([low]).tpr)
    assert mixed.tpr[np.searchsorted(mixed.fpr, 0.05, side="right") - 1] < 0.6
    both = vertical_average([low, high])
    assert both.tpr[np.searchsorted(both.fpr, 0.05, side="right") - 1] > 0.9


def test_equal_scores_are_one_step_at_the_end():
    curve = vertical_average([Scores(np.zeros(10), np.zeros(20))])
    assert (curve.fpr.tolist(), curve.tpr.tolist()) == ([0.0, 1.0], [0.0, 1.0])
    assert staircase(curve, 0.05).tolist() == [[1.0, 0.05], [1.0, 1.0]]


def test_a_staircase_enters_at_the_edge_and_never_falls():
    curve = stats.Roc(np.array([0.0, 0.1, 0.4, 1.0]), np.array([0.2, 0.2, 0.7, 1.0]))
    assert staircase(curve, 0.1).tolist() == [[0.1, 0.2], [0.4, 0.2], [0.4, 0.7], [1.0, 0.7], [1.0, 1.0]]
    curve = stats.Roc(np.array([0.0, 0.25, 0.5, 1.0]), np.array([0.0, 0.0, 0.5, 1.0]))
    assert staircase(curve, 0.125).tolist() == [[0.5, 0.125], [0.5, 0.5], [1.0, 0.5], [1.0, 1.0]]


def test_markers_are_on_the_line_and_their_intervals_are_of_the_members():
    chart = chart_of(drawn(6, 2_000, 5_000, 1.5))
    undefended = chart.series[0]
    assert (undefended.label, undefended.look) == ("no defense", -1)
    assert [point.x for point in undefended.points] == [0.001, 0.01]
    for point in undefended.points:
        assert height(undefended.trace, point.x) == pytest.approx(point.y, rel=0.02)
        ends = stats.clopper_pearson(round(point.y * 2_000), 2_000)
        assert (point.low, point.high) == ends
    assert chart.ends == (1 / 5_000, 1.0)
    assert chart.series[1].trace[0][0] >= 1 / 5_000


def test_with_few_non_members_there_is_no_marker_and_the_table_says_why():
    chart = chart_of(drawn(7, 200, 60))
    assert all(series.points == () for series in chart.series)
    assert all(row[-1] == "n/a: 0.1 % of 60 non-members is less than one record" for row in chart.rows)
    assert "No marker at 1 % and 0.1 %: too few non-members." in chart.caption
    assert "Markers:" not in chart.caption


def test_over_several_seeds_the_table_has_a_row_for_all_and_one_for_each():
    scores = [drawn(8 + seed, 200, 1_000) for seed in (0, 1)]
    chart = chart_of(*scores)
    counts = [row[2:5] for row in chart.rows[:3]]
    assert counts == [("all 2", "400", "2000"), ("0", "200", "1000"), ("1", "200", "1000")]
    aucs = [stats.auc(one.members, one.outside) for one in scores]
    assert [row[5][:5] for row in chart.rows[:3]] == [
        f"{value:.3f}" for value in (np.mean([a.value for a in aucs]), *(a.value for a in aucs))
    ]
    assert chart.rows[1][5] == f"{aucs[0].value:.3f} ({aucs[0].low:.3f} to {aucs[0].high:.3f})"
    assert "Each of 2 seeds has its own threshold" in chart.caption


def test_a_defense_whose_scores_are_lost_or_not_finite_has_no_line_and_a_row_that_says_so():
    lost = Scores(np.array([0.0, np.nan]), np.zeros(3))
    for other in (None, lost, Scores(np.zeros(0), np.zeros(3))):
        run = double.make_run(membership())
        gone = [cell.id for cell in run.cells if cell.training.defense != double.NONE]
        given = {cell.id: drawn(10, 200, 200) for cell in run.cells} | dict.fromkeys(gone, other)
        chart = only_chart(dataclasses.replace(run, scores=given.__getitem__))
        assert [series.label for series in chart.series] == ["no defense"]
        assert chart.rows[1][-1] == "no scores are stored"
        assert "1 of 2 lines are drawn" in chart.caption
    complete(render(dataclasses.replace(run, scores=given.__getitem__)))


def test_each_target_has_a_chart_of_its_own_with_the_strongest_attack():
    targets = [Target("members", round=0, rounds=8, count=50, client=client) for client in (0, 1)]
    attacks = [(double.THRESHOLD, target, threat) for target in targets for threat in ("public", "server")]

    def make(cell):
        value = 0.6 if cell.threat == "server" else 0.7 if cell.training.defense == double.NONE else 0.55
        return double.with_estimates(double.result_of(cell), mean("auc", [value, value]))

    analysis = Analysis(double.make_run(small(double.NONE, double.GAUSSIAN[0], attacks=attacks), make=make))
    charts = roc_charts(analysis, next(iter(analysis.settings)))
    title = "ROC: members identified at low false-positive rates (members of client {}, rounds 0 to 7)"
    assert [chart.title for chart in charts] == [title.format(client) for client in (0, 1)]
    assert [row[1] for row in charts[0].rows] == ["threshold, public", "threshold, server"]


def test_a_marker_below_the_axis_is_drawn_at_its_edge_with_its_true_value_in_words():
    chart = chart_of(Scores(np.zeros(300), np.linspace(1.0, 2.0, 200)))
    assert "A marker at the lower edge stands for a value below it." in chart.caption
    drawing = figures.svg(chart, prefix="p-")
    assert "true-positive rate (log scale) 0</title>" in drawing
    assert not re.search("nan|inf", drawing)


def test_log_log_axes_have_the_random_line_and_decades():
    chart = chart_of(drawn(11, 2_000, 10_000))
    drawing = figures.svg(chart, prefix="p-")
    assert [drawing.count(f">{tick}</text>") for tick in ("0.001", "0.01", "0.1", "1")] == [2] * 4
    assert ">chance</text>" in drawing
    assert all(len(series.trace) > 1_000 for series in chart.series)
    assert len(drawing) < 40_000
    assert drawing == figures.svg(chart, prefix="p-")


def test_two_lines_close_together_have_their_names_on_two_sides():
    points = (figures.Point(1.0, 0.2), figures.Point(8.0, 0.9))
    made = figures.Chart("a", "A", "x", "y", (figures.Series("s", points),), "B.", "C.", ("h",), ())

    def places(*lines):
        drawing = figures.svg(dataclasses.replace(made, lines=lines), prefix="p-")
        return [float(re.search(rf'y="([0-9.]+)"[^>]*>{name}<', drawing)[1]) for _, name in lines]

    apart, close = places((0.3, "low"), (0.8, "high")), places((0.5, "low"), (0.51, "high"))
    assert close[0] - close[1] > 10
    assert apart[0] > apart[1]


def distances(table):
    """The charts of a run with these mean squared errors, by defense."""

    def make(cell):
        value = table[cell.training.defense.key] * (0.5 if cell.attack == double.MAP else 1.0)
        estimates = mean("ssim", [0.5, 0.5]), mean("mse", [value, value])
        return double.with_estimates(double.result_of(cell), *estimates)

    attacks = [(attack, double.PROBE, "server") for attack in (double.MATCHING, double.MAP)]
    analysis = Analysis(double.make_run(small(double.NONE, *double.GAUSSIAN[:2], attacks=attacks), make=make))
    return leakage_charts(analysis, next(iter(analysis.settings)), MSE)


def test_the_distance_is_that_of_the_attack_that_gets_nearest():
    none, one, four = (part.key for part in (double.NONE, *double.GAUSSIAN[:2]))
    (chart,) = distances({none: 0.004, one: 0.2, four: 0.06})
    assert [point.y for point in chart.series[0].points] == pytest.approx([0.1, 0.03])
    assert chart.lines == ((0.002, "no defense 0.002"),)
    assert chart.log_y
    assert chart.better.startswith("Higher is better for the clients: a lower MSE")
    (chart,) = distances({none: 0.0004, one: 0.2, four: 0.06})
    assert chart.lines == ()
    assert "Far below the axis: no defense 0.0002." in chart.caption


def test_a_distance_of_zero_is_drawn_on_a_plain_axis():
    none, one, four = (part.key for part in (double.NONE, *double.GAUSSIAN[:2]))
    (chart,) = distances({none: 0.0, one: 0.2, four: 0.0})
    assert not chart.log_y
    assert "log scale" not in chart.y_label
    assert "p-" in figures.svg(chart, prefix="p-")
