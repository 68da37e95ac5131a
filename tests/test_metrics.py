"""One table has every metric: a new row is gated, shown and exported without another change."""

import dataclasses

import pytest

from leakgauge.harness.core import metrics
from leakgauge.harness.core.metrics import METRICS, GateTest, Metric, headline, metric
from leakgauge.harness.core.result import Estimate, TrainingRecord
from leakgauge.harness.core.stats import cut, of_items
from leakgauge.harness.gate.baseline import Baseline
from leakgauge.harness.gate.judge import Rules, Verdict, judge
from leakgauge.harness.gate.measure import measured
from leakgauge.harness.gate.output import as_json, summary
from leakgauge.reports.html import render
from tests import report_fixtures as double

FOUND = Metric(
    *("resemblance", "victims recalled", "victim", "reconstruction"),
    gate=GateTest.PAIRED,
    failed="more victims recalled",
)


@pytest.fixture
def with_resemblance(monkeypatch):
    monkeypatch.setitem(metrics.METRICS, FOUND.name, FOUND)


def run_with(hits):
    """A run whose attack on `gaussian` identifies this many of twelve victims."""
    target = double.Target("probe", 0, count=12)
    run = double.make_run(double.grid([double.NONE, double.GAUSSIAN[0]], [(double.MAP, target, "server")]))
    found = {
        key: double.with_estimates(one, *one.estimates, of_items(FOUND.name, [1.0] * hits + [0.0] * (12 - hits)))
        for key, one in run.results.items()
    }
    return dataclasses.replace(run, results=found)


def test_a_new_metric_is_gated_shown_and_exported(with_resemblance):
    before, now = (measured(run_with(hits)) for hits in (1, 11))
    (measure,) = [one for one in now.measures if one.metric == FOUND.name and not one.control]
    assert (measure.value, measure.n) == (pytest.approx(11 / 12), 24)
    assert 0.7 < measure.low < measure.value < measure.high < 1.0
    outcome = judge(now, before, Rules())
    (check,) = [one for one in outcome.checks if one.metric == FOUND.name]
    assert check.verdict is Verdict.FAIL
    assert check.reason.startswith("victims recalled rose by 0.833")
    assert not check.images
    base = Baseline(before, "before")
    assert "more victims recalled" in summary(outcome, now, base)
    assert '"metric": "resemblance"' in as_json(outcome, now, base)
    run = run_with(11)
    assert "victims recalled" in render(run)
    assert "resemblance" in set(run.frame().quantity)


def test_a_new_metric_of_a_training_is_a_row_and_an_attribute_of_its_record(monkeypatch):
    slowness = Metric("slowness", "rounds with a stop", "round", "training", gate=GateTest.RISE, failed="slower")
    monkeypatch.setitem(metrics.METRICS, slowness.name, slowness)
    monkeypatch.setattr(TrainingRecord, "slowness", 2.0, raising=False)
    before = measured(run_with(1))
    monkeypatch.setattr(TrainingRecord, "slowness", 2.5)
    now = measured(run_with(1))
    assert [one.value for one in now.measures if one.metric == "slowness"] == [2.5, 2.5]
    outcome = judge(now, before, Rules())
    (check,) = [one for one in outcome.checks if one.metric == "slowness"]
    assert check.verdict is Verdict.FAIL
    assert check.reason.startswith("rounds with a stop went from 2 to 2.5, by 25 %, where 1 % is allowed")
    assert "slower" in summary(outcome, now, Baseline(before, "before"))


def test_what_the_table_does_not_know_is_not_gated():
    now = measured(run_with(11))
    assert FOUND.name not in {one.metric for one in now.measures}
    assert (metric("unheard").gate, metric("unheard").words, metric("unheard").high) == (None, "unheard", None)


def test_a_rate_at_another_threshold_is_like_those_of_the_table():
    found = metric("tpr@20%")
    assert (found.words, found.higher_leaks, found.gate) == ("TPR at 20 % FPR", True, None)


def test_every_estimate_of_a_score_is_in_the_table():
    names = {one.name for result in double.full_run().results.values() for one in result.estimates}
    assert names <= set(METRICS)


@pytest.mark.parametrize("kind", ["reconstruction", "labels", "membership"])
def test_each_kind_of_attack_has_one_headline_metric(kind):
    assert [one.name for one in METRICS.values() if one.headline and one.kind == kind] == [headline(kind)]


def test_an_interval_is_cut_to_the_range_of_its_metric():
    found = cut(Estimate("ssim", 0.9, 0.7, 1.2, 3, ""))
    assert (found.low, found.high) == (0.7, 1.0)
    assert cut(Estimate("psnr", 90.0, -5.0, 120.0, 3, "")).high == 120.0


def test_a_task_without_accuracy_has_no_measure_of_it():
    run = double.make_run(double.grid([double.NONE, double.GAUSSIAN[0]], [(double.MATCHING, double.PROBE, "server")]))
    metrics = [one.metric for one in measured(run).measures]
    assert metrics.count("accuracy") == 2
    without = {
        key: dataclasses.replace(
            record, evaluations=tuple(dataclasses.replace(one, accuracy=None) for one in record.evaluations)
        )
        for key, record in run.trainings.items()
    }
    found = measured(dataclasses.replace(run, trainings=without)).measures
    assert [one.metric for one in found] == [name for name in metrics if name != "accuracy"]
    assert not [one.problem for one in found if one.problem]
