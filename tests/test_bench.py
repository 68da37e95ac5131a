"""The comparison of benchmarks finds what got slower, and nothing else; its tables are those of the pages."""

import json
import time
from pathlib import Path

import numpy as np
import pytest

from leakgauge.harness.core.rng import Key, normal

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def measure():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "benchmarks"))
        import _measure

        yield _measure


def noisy(measure, ratio, key, *, spread=0.07, pairs=15):
    """A row whose pairs have this ratio and a log-normal error."""
    noise = normal(key, (2, pairs)).mul(spread).exp().tolist()
    work = measure.Work(None, None, "a reference", 1, "run")
    return measure.Row.paired(work, ([ratio * one for one in noise[0]], noise[1]))


@pytest.mark.parametrize(("times", "least", "most"), [(0.5, 0, 0), (1.15, 0, 0), (1.5, 180, 200), (1.7, 200, 200)])
def test_a_ratio_alarms_if_it_is_1_5_times_worse_and_not_if_it_is_1_15_times_worse(measure, times, least, most):
    found = 0
    for seed in range(200):
        key, late = Key(seed), 3 * times
        then, now = noisy(measure, 3.0, key.child("then"), pairs=25), noisy(measure, late, key.child("now"), pairs=5)
        again = noisy(measure, late, key.child("again"), pairs=15)
        found += bool(measure.check({"row": now}, {"row": then}, lambda name, again=again: again))
    assert least <= found <= most


def test_a_disturbed_row_is_measured_again_before_it_alarms(measure):
    then, disturbed, fine = (noisy(measure, ratio, Key(0)) for ratio in (1.0, 2.0, 1.05))
    asked = []
    assert measure.check({"row": disturbed}, {"row": then}, lambda name: asked.append(name) or fine) == []
    assert asked == ["row"]
    (fault,) = measure.check({"row": disturbed}, {"row": then}, lambda name: disturbed)
    assert "2.00 times worse" in fault


def test_a_row_that_has_gone_and_one_that_has_come_are_faults(measure):
    row = noisy(measure, 1.0, Key(0))
    faults = measure.check({"new": row}, {"old": row}, lambda name: row)
    assert [fault.split(":")[0] for fault in faults] == ["old", "new"]


def test_the_interval_of_a_median_holds_it_as_often_as_it_says(measure):
    draws = normal(Key(1), (2000, 25)).tolist()
    held = sum(low <= 0 <= high for low, high in map(measure.interval, draws))
    assert held / 2000 > measure.CONFIDENCE - 0.03  # 4.5 standard errors


def test_a_planted_slowdown_is_found_by_measuring(measure):
    def work(times):
        return measure.Work(lambda: sum(range(times * 20_000)), lambda: sum(range(20_000)), "once", 1, "run")

    then, now, again = (measure.measure(work(times), 0.05, None, 15) for times in (4, 8, 8))
    assert measure.check({"row": now}, {"row": then}, lambda name: again)


def test_the_memory_of_a_row_is_what_it_needs_at_most(measure):
    needed = measure.in_child(lambda: measure.peak_of(lambda: np.ones(10_000_000).sum()))
    assert 76 <= needed <= 90


def test_a_child_that_fails_or_cannot_run_says_so(measure, capfd):
    def skip():
        raise measure.Skipped("no Ray")

    with pytest.raises(measure.Skipped, match="no Ray"):
        measure.in_child(skip)
    with pytest.raises(RuntimeError, match="got status"):
        measure.in_child(lambda: 1 / 0)
    assert "ZeroDivisionError" in capfd.readouterr().err


def test_the_limit_is_the_slowest_of_what_is_counted(measure):
    machine = measure.Machine(10.0, 100.0, 1000.0, 1.0, 1.0, 1.0)
    work = measure.Work(None, None, "", 1, "", moved=20.0, drawn=1000.0)
    assert measure.limit_of(work, 50.0, machine) == (2.0, "memory")
    assert measure.limit_of(work, 500.0, machine) == (5.0, "FLOPs")
    assert measure.limit_of(measure.Work(None, None, "", 1, ""), 0.0, machine) == (0.0, "")


def test_a_forecast_is_a_line_through_two_sizes(measure):
    start = time.process_time()
    from forecast import Price, checks, prices

    measured = {"10": {"s": 3.0}, "20": {"s": 5.0}, "100": {"s": 20.0}}
    assert prices(measured)["s"] == Price.through((10, 20), (3.0, 5.0)) == Price(1.0, 0.2)
    assert checks({"cells": measured})[-1] == "| 100 cells | s | 21 | 20 | +5% |"
    assert time.process_time() - start < 30


def test_the_pages_have_the_tables_of_the_committed_measurement(measure):
    import bench

    data = json.loads(bench.JSON.read_text("utf-8"))
    for name, text in {"performance": bench.performance(data), "scale": bench.forecast.tables(data)}.items():
        page = (ROOT / "docs" / f"{name}.md").read_text("utf-8")
        assert bench.between(page, text) == page, f"docs/{name}.md: write it with python benchmarks/bench.py --pages"
    assert set(data["quick"]) == set(bench.builds(True))
    assert set(data["rows"]) <= set(bench.builds(False))
