"""One estimate out of several seeds': all items in one sample, or one value a seed."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from leakgauge.harness.core.result import Estimate, Evaluation, TrainingRecord
from leakgauge.harness.core.stats import clopper_pearson, mean, mean_interval, proportion

RANGES = {"ssim": (-1.0, 1.0), "auc": (0.0, 1.0), "accuracy": (0.0, 1.0)}
"""Of the headline metrics: Student's t does not know them."""


def cut(estimate: Estimate) -> Estimate:
    """The same estimate with the ends of its interval inside the metric's range."""
    if estimate.name not in RANGES or estimate.low is None or estimate.high is None:
        return estimate
    least, most = RANGES[estimate.name]
    return dataclasses.replace(estimate, low=max(least, estimate.low), high=min(most, estimate.high))


def _is_mean(estimate: Estimate) -> bool:
    """Whether the value is the mean of the values that it came with."""
    known = [value for value in estimate.values if value is not None]
    if not known or estimate.value is None:
        return False
    return math.isclose(float(np.mean(known)), estimate.value, rel_tol=1e-6, abs_tol=1e-6)


def pool(estimates: Sequence[Estimate]) -> Estimate:
    """One estimate of one metric over seeds.

    | estimates | pooled |
    |---|---|
    | one, or none with a value | the first, as it is |
    | means of per-item values | the mean of all items, Student's t over them; of 0 and 1 only: Clopper-Pearson |
    | other numbers (an AUC) | the mean of one value a seed, Student's t over the seeds |

    `values` keeps the items of all seeds in order. Intervals are cut to the metric's range.

    Raises:
        ValueError: there is no estimate.
    """
    if not estimates:
        raise ValueError("expected at least one estimate, got none")
    first, known = estimates[0], [estimate for estimate in estimates if estimate.value is not None]
    if len(estimates) == 1 or not known:
        return cut(first)
    values = tuple(value for estimate in estimates for value in estimate.values)
    lost = len(estimates) - len(known)
    notes = [f"no value in {lost} of {len(estimates)} seeds"] if lost else []
    notes += list(dict.fromkeys(estimate.note for estimate in known if estimate.note))
    pooled = _pooled(first, known, values)
    method = pooled.method if pooled.values else f"{pooled.method} over the seeds"
    n = pooled.n if pooled.values else sum(estimate.n for estimate in known)
    return cut(dataclasses.replace(pooled, n=n, method=method, unit=first.unit, values=values, note="; ".join(notes)))


def _pooled(first: Estimate, known: Sequence[Estimate], values: tuple[float | None, ...]) -> Estimate:
    """Value and interval of the pooled estimate; `values` is empty if it rests on one value a seed."""
    name, leaks, level = first.name, first.higher_leaks, first.level
    if not all(_is_mean(estimate) for estimate in known):
        of_seeds = [estimate.value for estimate in known]
        return dataclasses.replace(mean(name, of_seeds, higher_leaks=leaks, level=level), values=())
    items = [value for value in values if value is not None]
    if all(value in (0.0, 1.0) for value in items):
        return proportion(name, round(sum(items)), len(items), higher_leaks=leaks, values=items, level=level)
    return mean(name, items, higher_leaks=leaks, level=level)


def accuracy(trainings: Sequence[TrainingRecord]) -> Estimate | None:
    """Final test accuracy: over the seeds with Student's t, of one seed with Clopper-Pearson over its test set."""
    pairs = [(training, training.accuracy) for training in trainings]
    known = [(training, value) for training, value in pairs if value is not None]
    if not known:
        return None
    values = [value for _, value in known]
    n = known[0][0].test_samples
    if len(known) > 1:
        ends, method = mean_interval(values), f"Student t over {len(values)} seeds"
    elif n:
        ends, method = clopper_pearson(round(values[0] * n), n), f"Clopper-Pearson over {n} test images"
    else:
        ends, method = mean_interval(values), ""
    return cut(Estimate("accuracy", float(np.mean(values)), *ends, len(values), method))


def curve(trainings: Sequence[TrainingRecord], what: str) -> list[tuple[int, float, float, float]]:
    """(round, mean, lowest, highest) over the seeds of `accuracy` or `loss`, at each evaluated round."""
    by_round: dict[int, list[float]] = {}
    for training in trainings:
        for evaluation in training.evaluations:
            value = _reading(evaluation, what)
            if value is not None and math.isfinite(value):
                by_round.setdefault(evaluation.round, []).append(value)
    return [(at, float(np.mean(v)), min(v), max(v)) for at, v in sorted(by_round.items())]


def _reading(evaluation: Evaluation, what: str) -> float | None:
    """Accuracy or loss of one evaluation."""
    return evaluation.accuracy if what == "accuracy" else evaluation.loss
