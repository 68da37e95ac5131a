"""Runs side by side, each with the first: every shared measure with its difference. Only the gate gives verdicts.

| metric | interval of the difference |
|---|---|
| `ssim` | Student's over pairs of images that both runs attacked; Welch's if they share no images |
| `auc` | DeLong's if both runs have the same numbers of records; else none |
| `tpr@...` | Newcombe's, as if the runs were independent |
| `accuracy`, `bits` | Student's over pairs of seeds if the seeds are the same; else Welch's |
| `epsilon` | none: a difference of two lower bounds is not a bound |

A measure with a problem (a failed or missing cell) has no difference, because its remaining cells are not comparable.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from typing import Literal

import numpy as np
from scipy import special

from leakgauge.harness.core import stats
from leakgauge.harness.core.metrics import GateTest, metric
from leakgauge.harness.core.numerics import unlike
from leakgauge.harness.core.result import Run
from leakgauge.harness.gate.baseline import provenance
from leakgauge.harness.gate.comparable import by_image, numbers, rise_of
from leakgauge.harness.gate.measure import Measure, Measured, measured, titles
from leakgauge.harness.gate.output import json_text
from leakgauge.harness.gate.rules import delong

SCHEMA = 1
"""Version of the JSON."""

Method = Literal["pairs", "Welch", "DeLong", "Newcombe", "none"]

LEVEL = 0.95

CAPTION = (
    "A later run minus the first, with a two-sided 95 % interval for each difference alone: about five in a hundred "
    "true zeros are excluded by chance. Higher means that the adversary learns more, except for accuracy and bits. "
    "This table never fails the build; 'leakgauge check' does."
)


@dataclass(frozen=True)
class Difference:
    """One measure in two runs.

    Attributes:
        key, metric: as in `Measure`. name: unique among the measures of both runs.
        first, second: its values; None if there is no value.
        difference: second - first; with `pairs`, over the pairs only. None if the measure has a problem in one run.
        low, high: two-sided 95 % interval; None if there is no interval.
        n: pairs, or records of `auc`; without pairs, values or members of the first and of the second run.
        method: method of the interval.
        note: a caveat, or why there is no interval.
    """

    key: str
    name: str
    metric: str
    first: float | None
    second: float | None
    difference: float | None
    low: float | None
    high: float | None
    n: tuple[int, ...]
    method: Method
    note: str

    @property
    def differs(self) -> bool:
        """Whether the interval excludes zero."""
        return self.low is not None and self.high is not None and (self.low > 0 or self.high < 0)


@dataclass(frozen=True)
class Lone:
    """A measure that only one run has."""

    key: str
    name: str
    value: float | None


@dataclass(frozen=True)
class Comparison:
    """Two runs.

    Attributes:
        first, second: their measures.
        differences: of the shared measures, in the order of the first run.
        only_first, only_second: measures of only one run.
        computed: how they were computed, if that differs or is unknown.
        remarks: other differences between the runs as a whole.
    """

    first: Measured
    second: Measured
    differences: tuple[Difference, ...]
    only_first: tuple[Lone, ...]
    only_second: tuple[Lone, ...]
    computed: str
    remarks: tuple[str, ...]


ORDINALS = ("first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth", "ninth", "tenth")
"""The names of the runs that are compared."""


def compare(a: Run, b: Run) -> Comparison:
    """All measures of both runs by key; the studies may differ."""
    return compare_all(a, b)[0]


def compare_all(*runs: Run) -> list[Comparison]:
    """Each later run with the first, as `compare` does; a measure has the same name in all.

    Raises:
        ValueError: fewer than two runs, or more than `ORDINALS` has names for.
    """
    if not 2 <= len(runs) <= len(ORDINALS):
        raise ValueError(f"expected 2 to {len(ORDINALS)} runs to compare, got {len(runs)}")
    first, *later = [measured(run) for run in runs]
    names = titles(measure for one in (first, *later) for measure in one.measures)
    same = [_seeds(runs[0]) == _seeds(run) for run in runs[1:]]
    each = zip(later, ORDINALS[1:], same, strict=False)
    return [_compared(first, one, names, which, same_seeds=seeds) for one, which, seeds in each]


def _compared(first: Measured, second: Measured, names: dict[str, str], which: str, *, same_seeds: bool) -> Comparison:
    before, after = first.by_key(), second.by_key()
    return Comparison(
        first=first,
        second=second,
        differences=tuple(
            _difference(measure, after[measure.key], names[measure.key], which, same_seeds=same_seeds)
            for measure in first.measures
            if measure.key in after
        ),
        only_first=tuple(Lone(key, names[key], measure.value) for key, measure in before.items() if key not in after),
        only_second=tuple(Lone(key, names[key], measure.value) for key, measure in after.items() if key not in before),
        computed=unlike({"the first run was": first.numerics, f"the {which} run was": second.numerics}),
        remarks=_remarks(first, second, which, same_seeds=same_seeds),
    )


def to_json(*comparisons: Comparison) -> str:
    """A comparison as JSON, with null for a missing number; several as a list `comparisons`."""
    each = [_content(comparison) for comparison in comparisons]
    return json_text(each[0] if len(each) == 1 else {"schema": SCHEMA, "comparisons": each})


def _content(comparison: Comparison) -> dict[str, object]:
    return {
        "schema": SCHEMA,
        "first": comparison.first.source(),
        "second": comparison.second.source(),
        "level": LEVEL,
        "computed": comparison.computed,
        "remarks": comparison.remarks,
        "differences": [{**asdict(difference), "differs": difference.differs} for difference in comparison.differences],
        "only_first": [asdict(lone) for lone in comparison.only_first],
        "only_second": [asdict(lone) for lone in comparison.only_second],
    }


def _difference(a: Measure, b: Measure, name: str, which: str, *, same_seeds: bool) -> Difference:
    test, value = metric(a.metric).gate, None if a.value is None or b.value is None else b.value - a.value
    plain = Difference(a.key, name, a.metric, a.value, b.value, value, None, None, (a.n, b.n), "none", "")
    problem = "; ".join(f"{who}: {run.problem}" for who, run in (("first", a), (which, b)) if run.problem)
    if problem:
        difference = replace(plain, difference=None, note=problem)
    elif test is GateTest.AUDIT:
        difference = replace(plain, note="no interval: the difference of two lower bounds is no bound")
    elif test is GateTest.DELONG and a.sides != b.sides:
        difference = replace(plain, note="the numbers of records differ")
    elif test is GateTest.DELONG:
        difference = _placed(plain, a, b, "" if same_seeds else "the seeds differ, so the records differ")
    elif test is GateTest.RATE:
        difference = _shares(plain, a, b)
    elif not (a.values and b.values):
        difference = replace(plain, note="no interval: no value of an item is known")
    elif test is GateTest.PAIRED:
        difference = _images(plain, a, b)
    elif same_seeds and len(a.values) == len(b.values):
        difference = _student(plain, numbers(a), numbers(b), "")
    else:
        difference = _independent(plain, numbers(a), numbers(b), "not paired: the seeds differ")
    if "batch" in a.target and difference.method != "none":
        narrow = "images of one batch are not independent: too narrow"
        difference = replace(difference, note=stats.joined(difference.note, narrow))
    return difference


def _images(plain: Difference, a: Measure, b: Measure) -> Difference:
    first, second = (by_image(run) if all(run.items) else {} for run in (a, b))
    shared = [item for item in first if item in second and len(first[item]) == len(second[item])]
    if shared:
        before, after = (np.concatenate([images[item] for item in shared]) for images in (first, second))
        most = max(sum(map(len, images.values())) for images in (first, second))
        note = "" if len(before) == most else f"only the {len(before)} of {most} images that are in both runs"
        return _student(plain, before, after, note)
    if first and second:
        before, after = (np.concatenate(list(images.values())) for images in (first, second))
        return _independent(plain, before, after, "not paired: the images differ")
    return _independent(plain, numbers(a), numbers(b), "not paired: the images are not stored")


def _student(plain: Difference, a: stats.Numbers, b: stats.Numbers, note: str) -> Difference:
    low, high = stats.mean_interval(b - a, LEVEL)
    paired = replace(plain, difference=float(np.mean(b - a)), low=low, high=high, n=(len(a),), note=note)
    lack = stats.joined(note, "no interval: only one pair")
    return replace(paired, note=lack) if low is None else replace(paired, method="pairs")


def _independent(plain: Difference, a: stats.Numbers, b: stats.Numbers, note: str) -> Difference:
    (low, high), moved = welch(a, b), float(np.mean(b) - np.mean(a))
    independent = replace(plain, difference=moved, low=low, high=high, n=(len(a), len(b)), note=note)
    lack = stats.joined(note, "no interval: only one value")
    return replace(independent, note=lack) if low is None else replace(independent, method="Welch")


def _placed(plain: Difference, a: Measure, b: Measure, note: str) -> Difference:
    """The difference of two AUCs, from the differences of the records' placements, seed by seed.

    If the runs have different records, the placements are independent and give the interval of independent curves.
    """
    if min((min(sides) for sides in a.sides), default=0) < 2:
        return replace(plain, n=(a.n,), note="no interval: only one record on a side")
    rise = rise_of(a, b, delong)
    value, half = float(rise.mean), float(special.stdtrit(rise.df, (1 + LEVEL) / 2) * rise.error)
    plain = replace(plain, difference=value, low=value - half, high=value + half, n=(a.n,))
    return replace(plain, method="DeLong", note=note)


def _shares(plain: Difference, a: Measure, b: Measure) -> Difference:
    """The difference of two rates. Source: Newcombe 1998, method 10, with Clopper-Pearson for Wilson intervals."""
    n = tuple(sum(members for members, _ in run.sides) for run in (a, b))
    if a.value is None or a.low is None or a.high is None or b.value is None or b.low is None or b.high is None:
        return replace(plain, n=n, note="no interval: one of the rates has none")
    difference = b.value - a.value
    low = difference - math.hypot(b.value - b.low, a.high - a.value)
    high = difference + math.hypot(b.high - b.value, a.value - a.low)
    note = "too narrow: ignores the noise of the threshold"
    return replace(plain, difference=difference, low=low, high=high, n=n, method="Newcombe", note=note)


def welch(a: stats.Numbers, b: stats.Numbers) -> stats.Interval:
    """Two-sided interval of mean(b) - mean(a) for independent samples; none if a sample has fewer than two values.

    Source: Welch 1947, degrees of freedom by Satterthwaite.
    """
    from scipy.stats import ttest_ind

    if min(len(a), len(b)) < 2:
        return stats.Interval(None, None)
    middle = float(np.mean(b) - np.mean(a))
    if not np.ptp(a) and not np.ptp(b):
        return stats.Interval(middle, middle)
    low, high = ttest_ind(b, a, equal_var=False).confidence_interval(LEVEL)
    return stats.Interval(float(low), float(high))


def _seeds(run: Run) -> tuple[int, ...]:
    return tuple(dict.fromkeys(cell.training.seed for cell in run.cells))


def _remarks(a: Measured, b: Measured, which: str, *, same_seeds: bool) -> tuple[str, ...]:
    remarks = [] if same_seeds else ["the seeds differ"]
    remarks += provenance(a, b)
    dirty = [who for who, run in (("first", a), (which, b)) if run.dirty]
    return (*remarks, *(f"the {who} run's code had uncommitted changes" for who in dirty))
