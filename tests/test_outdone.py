"""The flag of an aware attack that does worse than a naive one."""

import pytest

from leakgauge.harness.core.cell import Target
from leakgauge.harness.core.stats import mean
from leakgauge.reports.html import render
from leakgauge.reports.select import Analysis
from tests import report_fixtures as double

PROBE = Target("probe", 0, count=6)
NAIVE = (0.40, 0.42, 0.38, 0.44, 0.41, 0.39)


def run_with(aware, *, of_naive="server", naive=NAIVE):
    """A naive and an aware attack, with one defense and without."""
    attacks = [(double.MATCHING, PROBE, of_naive), (double.MAP, PROBE, "server"), (double.PRIOR, PROBE, "server")]

    def make(cell):
        values = {"matching": naive, "map": aware, "prior": (0.1,) * 6}[cell.attack.name]
        return double.with_estimates(double.result_of(cell), mean("ssim", values))

    return double.make_run(double.grid([double.NONE, double.GAUSSIAN[0]], attacks, seeds=(0,)), make=make)


def flagged(run):
    """Names of defense and attack of the cells with the flag."""
    analysis = Analysis(run)
    return {
        (cell.training.defense.name, cell.attack.name)
        for cell in run.cells
        if "naive-beats-aware" in {flag.code for flag in analysis.flags_of(cell)}
    }


def test_an_aware_attack_that_does_worse_on_every_image_is_flagged_except_without_a_defense():
    run = run_with(tuple(value - 0.05 for value in NAIVE))
    assert flagged(run) == {("gaussian", "map")}
    assert "naive-beats-aware" in render(run)
    assert "matching ignores the defense and gets more: mean SSIM 0.407, here 0.357" in render(run)


@pytest.mark.parametrize(
    "aware",
    [
        pytest.param(NAIVE, id="as much"),
        pytest.param(tuple(value + 0.1 for value in NAIVE), id="more"),
        pytest.param((0.6, 0.2, 0.6, 0.2, 0.4, 0.3), id="less, but within noise"),
        pytest.param((0.3, None, None, None, None, None), id="one pair shows no spread"),
    ],
)
def test_other_attacks_are_not_flagged(aware):
    assert flagged(run_with(aware)) == set()


def test_below_the_floor_no_attack_is_flagged():
    naive = tuple(value / 5 for value in NAIVE)
    assert flagged(run_with(tuple(value - 0.05 for value in naive), naive=naive)) == set()


def test_only_attacks_with_the_same_adversary_are_compared():
    assert flagged(run_with(tuple(value - 0.05 for value in NAIVE), of_naive="eavesdropper")) == set()
