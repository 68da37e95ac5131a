"""The report's charts of attacks that combine several rounds."""

from leakgauge.harness.core.cell import Target
from leakgauge.harness.core.labels import where
from leakgauge.harness.core.stats import mean
from leakgauge.reports.charts.curves import attack_charts
from leakgauge.reports.charts.epsilon import SSIM, leakage_charts
from leakgauge.reports.select import Analysis
from tests import report_fixtures as double

ROUNDS = (1, 2, 4)


def charts_of(targets):
    attacks = [(attack, target, "server") for attack in (double.MAP, double.PRIOR) for target in targets]
    run = double.make_run(double.grid([double.NONE, double.GAUSSIAN[0]], attacks, seeds=(0,)))
    analysis = Analysis(run)
    return {chart.name: chart for chart in attack_charts(analysis, next(iter(analysis.settings)))}


def test_attacks_on_several_rounds_have_their_own_chart():
    charts = charts_of([Target("probe", 0, count=6, rounds=n) for n in ROUNDS])
    assert list(charts) == ["watched-probe"]
    chart = charts["watched-probe"]
    assert chart.title == "Leakage over the rounds watched (probe)"
    assert [[point.x for point in line.points] for line in chart.series] == [[1.0, 2.0, 4.0]] * 2
    assert [row[1] for row in chart.rows] == ["1", "2", "4"] * 2


def test_the_number_of_rounds_is_not_mixed_with_the_attacked_round():
    targets = [Target("probe", 0, count=6), Target("probe", 4, count=6), Target("probe", 0, count=6, rounds=3)]
    charts = charts_of(targets)
    assert [[point.x for point in line.points] for line in charts["rounds-probe"].series] == [[0.0, 4.0]] * 2
    assert [[point.x for point in line.points] for line in charts["watched-probe"].series] == [[1.0, 3.0]] * 2


def test_attacks_on_several_rounds_are_not_compared_with_the_epsilon_of_one():
    targets = [Target("probe", 0, count=6), Target("probe", 0, count=6, rounds=3)]

    def make(cell):
        values = [0.3 if cell.target.rounds == 1 else 0.9] * 6
        return double.with_estimates(double.result_of(cell), mean("ssim", values))

    attacks = [(double.MAP, target, "server") for target in targets]
    analysis = Analysis(double.make_run(double.grid(double.GAUSSIAN[:2], attacks, seeds=(0,)), make=make))
    (chart,) = leakage_charts(analysis, next(iter(analysis.settings)), SSIM)
    assert [point.y for line in chart.series for point in line.points] == [0.3, 0.3]


def test_a_target_is_labeled_with_its_rounds_and_users():
    assert where(Target("probe", 2)) == "probe, round 2"
    assert where(Target("probe", 2, rounds=4)) == "probe, rounds 2 to 5"
    assert where(Target("probe", 0, batch=3, users=2)) == "probe, round 0, batch 3, 2 users at once"
    assert where(Target("members")) == "members"
