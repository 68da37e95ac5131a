"""Two runs side by side: every measure of either, and how much those that both have changed.

This is the only comparison. The gate judges its rows by rules (`gate.judge`); the commands `compare` and
`baseline diff` show them, without a verdict.

| metric | change |
|---|---|
| `ssim` | Student's over pairs of images that both runs attacked; Welch's if they share no images |
| `auc` | DeLong's if both runs have the same numbers of records; else none |
| `tpr@...` | that of paired rates, which includes the noise of the threshold, under the same condition |
| `accuracy`, `bits` | Student's over pairs of seeds if the seeds are the same; else Welch's |
| `epsilon` | none: a difference of two lower bounds is not a bound |

A measure with a problem (a failed or missing cell) has no change, because its remaining cells are not comparable.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import numpy as np
from scipy import special

from leakgauge.harness.core import stats
from leakgauge.harness.core.metrics import GateTest, gated, metric
from leakgauge.harness.core.numerics import unlike
from leakgauge.harness.core.result import Run
from leakgauge.harness.gate.measure import Measure, Measured, by_seed, measured, titles
from leakgauge.harness.gate.rules import Rise, Sides, caught, delong, independent, over_seeds, paired

Method = Literal["pairs", "Welch", "DeLong", "paired rates", "none"]

LEVEL = 0.95


@dataclass(frozen=True)
class Row:
    """One measure in two runs.

    Attributes:
        key: of the measure. before, after: None if that run lacks it.
        rise: after minus before, of what is compared; None if there is no interval.
        start: the mean of what is compared, before.
        n: pairs, or records of `auc`, or members of a rate; without pairs, values of either run.
        method: how `rise` was found.
        note: a caveat, or why there is no interval.
    """

    key: str
    before: Measure | None
    after: Measure | None
    rise: Rise | None = None
    start: float | None = None
    n: tuple[int, ...] = ()
    method: Method = "none"
    note: str = ""

    @property
    def either(self) -> Measure:
        """The measure, of the later run if it has it."""
        found = self.after or self.before
        assert found is not None
        return found

    @property
    def both(self) -> tuple[Measure, Measure]:
        """The measure before and after, of a row that both runs have."""
        assert self.before is not None
        assert self.after is not None
        return self.before, self.after

    @property
    def difference(self) -> float | None:
        """After minus before; None if a run lacks the measure or a value, or has a problem with it."""
        if self.rise is not None:
            return float(self.rise.mean)
        pair = self.before, self.after
        values = [None if one is None or one.problem else one.value for one in pair]
        return None if values[0] is None or values[1] is None else values[1] - values[0]

    @property
    def interval(self) -> stats.Interval:
        """The two-sided 95 % interval of the difference."""
        if self.rise is None:
            return stats.Interval(None, None)
        middle, half = float(self.rise.mean), float(special.stdtrit(self.rise.df, (1 + LEVEL) / 2) * self.rise.error)
        return stats.Interval(middle - half, middle + half)

    @property
    def differs(self) -> bool:
        """Whether the interval excludes zero."""
        low, high = self.interval
        return low is not None and high is not None and (low > 0 or high < 0)

    @property
    def differing(self) -> tuple[int, int]:
        """How many single values differ or are in one run only, and how many there are; 0 if one run has none."""
        was, now = (() if one is None else one.values for one in (self.before, self.after))
        most = max(len(was), len(now))
        alike = sum(a == b for a, b in zip(was, now, strict=False))
        return 0 if self.before is None or self.after is None else most - alike, most

    @property
    def kind(self) -> Literal["moved", "appeared", "vanished", ""]:
        """What happened to the measure; empty if its value and its values are the same."""
        if self.before is None or self.after is None:
            return "appeared" if self.before is None else "vanished"
        return "moved" if self.before.value != self.after.value or self.before.values != self.after.values else ""


@dataclass(frozen=True)
class Comparison:
    """Two runs.

    Attributes:
        first, second: their measures.
        rows: all measures: of the first run in its order, then those that only the second has.
        names: the title of each measure, unique among both runs.
        computed: how they were computed, if that differs or is unknown.
        remarks: other differences between the runs as a whole.
    """

    first: Measured
    second: Measured
    rows: tuple[Row, ...]
    names: Mapping[str, str]
    computed: str = ""
    remarks: tuple[str, ...] = ()

    @property
    def differences(self) -> tuple[Row, ...]:
        """The rows that both runs have."""
        return tuple(row for row in self.rows if row.before is not None and row.after is not None)


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
    each = zip(later, ORDINALS[1:], [_seeds(runs[0]) == _seeds(run) for run in runs[1:]], strict=False)
    return [
        Comparison(
            *(first, one, rows(first, one, same_seeds=same, which=which), names),
            computed=unlike({"the first run was": first.numerics, f"the {which} run was": one.numerics}),
            remarks=_remarks(first, one, which, same_seeds=same),
        )
        for one, which, same in each
    ]


def rows(before: Measured, after: Measured, *, same_seeds: bool = True, which: str = "second") -> tuple[Row, ...]:
    """Every measure of two runs.

    Args:
        same_seeds: whether the trainings have the same seeds in the same order.
        which: the name of the later run in notes.
    """
    was, now = before.by_key(), after.by_key()
    found = [
        _row(key, was, now, which, same_seeds=same_seeds) if key in now else Row(key, old, None)
        for key, old in was.items()
    ]
    return (*found, *(Row(key, None, new) for key, new in now.items() if key not in was))


def _row(key: str, was: Mapping[str, Measure], now: Mapping[str, Measure], which: str, *, same_seeds: bool) -> Row:
    a, b, test = was[key], now[key], metric(was[key].metric).gate
    row = Row(key, a, b, n=(a.n, b.n))
    problem = "; ".join(f"{who}: {run.problem}" for who, run in (("first", a), (which, b)) if run.problem)
    if problem:
        row = replace(row, note=problem)
    elif test is GateTest.AUDIT:
        row = replace(row, note="no interval: the difference of two lower bounds is no bound")
    elif not all(np.isfinite(numbers(one)).all() for one in (a, b)):
        row = replace(row, note="no interval: a value is missing or not finite")
    elif test is GateTest.DELONG or test is GateTest.RATE:
        row = _placed(row, was.get(curve(key)), now.get(curve(key)))
        other = "" if same_seeds or row.rise is None else "the seeds differ, so the records differ"
        row = replace(row, note=stats.joined(row.note, other))
    elif not (a.values and b.values):
        row = replace(row, note="no interval: no value of an item is known")
    elif test is GateTest.PAIRED:
        row = _images(row, same_seeds=same_seeds)
    elif same_seeds and len(a.values) == len(b.values):
        row = _in_pairs(row, numbers(a), numbers(b), "")
    else:
        row = _apart(row, numbers(a), numbers(b), "not paired: the seeds differ")
    if "batch" in a.target and row.rise is not None:
        row = replace(row, note=stats.joined(row.note, "images of one batch are not independent: too narrow"))
    return row


def _images(row: Row, *, same_seeds: bool) -> Row:
    a, b = row.both
    stored = [bool(one.items) and all(one.items) for one in (a, b)]
    if all(stored) or (same_seeds and not any(stored) and len(a.values) == len(b.values)):
        first, second = by_image(a), by_image(b)
        shared = [item for item in first if item in second and len(first[item]) == len(second[item])]
        if shared:
            before, after = (np.concatenate([images[item] for item in shared]) for images in (first, second))
            most = max(sum(map(len, images.values())) for images in (first, second))
            note = "" if len(before) == most else f"only the {len(before)} of {most} images that are in both runs"
            return _in_pairs(row, before, after, note)
    if all(stored):
        return _apart(row, of_images(a), of_images(b), "not paired: the images differ")
    return _apart(row, numbers(a), numbers(b), "not paired: the images are not stored")


def _in_pairs(row: Row, a: stats.Numbers, b: stats.Numbers, note: str) -> Row:
    row = replace(row, start=float(np.mean(a)), n=(len(a),))
    if len(a) < 2:
        return replace(row, note=stats.joined(note, "no interval: only one pair"))
    return replace(row, rise=paired(a, b), method="pairs", note=note)


def _apart(row: Row, a: stats.Numbers, b: stats.Numbers, note: str) -> Row:
    row = replace(row, start=float(np.mean(a)), n=(len(a), len(b)))
    if min(len(a), len(b)) < 2:
        return replace(row, note=stats.joined(note, "no interval: only one value"))
    return replace(row, rise=independent(a, b), method="Welch", note=note)


def _placed(row: Row, old: Measure | None, new: Measure | None) -> Row:
    """The change of an AUC or a rate, from the placements of each seed's records in the AUC of the same attack.

    If the runs have different records, the placements are independent and give the interval of independent curves.
    """
    (a, b), known = row.both, metric(row.either.metric)
    curves = [one for one in (old, new) if one is not None and not one.problem and _whole(one)]
    if old is None or new is None or len(curves) < 2 or old.sides != new.sides:
        return replace(row, note="the numbers of records differ")
    if min((min(sides) for sides in old.sides), default=0) < 2:
        return replace(row, n=(a.n,), note="no interval: only one record on a side")
    if known.gate is GateTest.DELONG:
        return replace(row, rise=rise_of(old, new, delong), start=a.value, n=(b.n,), method="DeLong")
    assert known.false_positives is not None  # of every rate
    rise = rise_of(old, new, partial(caught, rate=known.false_positives))
    return replace(row, rise=rise, start=a.value, n=(sum(side for side, _ in new.sides),), method="paired rates")


def _whole(curve: Measure) -> bool:
    """Whether an AUC has a finite placement for each of its records."""
    return sum(map(sum, curve.sides)) == len(curve.values) and bool(np.isfinite(numbers(curve)).all())


def curve(key: str) -> str:
    """For a rate, the key of the same attack's curve, because the test needs its placements; else the key itself."""
    (placed,) = gated(GateTest.DELONG)
    for rate in gated(GateTest.RATE):
        key = key.replace(f"/{rate.name}/", f"/{placed.name}/")
    return key


def by_image(measure: Measure) -> dict[str, stats.Numbers]:
    """The values of each set of images by its digest, else by its seed; one set if they do not divide into sets.

    Values of the same images under several seeds are averaged, because they are not independent.
    """
    values, sets = numbers(measure), [item or str(seed) for seed, item in enumerate(measure.items)]
    if not sets or len(values) % len(sets):
        return {" ".join(measure.items): values}
    each = values.reshape(len(sets), -1)
    return {name: each[[at for at, other in enumerate(sets) if other == name]].mean(axis=0) for name in sets}


def of_images(measure: Measure) -> stats.Numbers:
    """The values of `by_image`, one after the other."""
    return np.concatenate(list(by_image(measure).values()))


def rise_of(before: Measure, now: Measure, test: Callable[[Sides, Sides], Rise]) -> Rise:
    """The rise by a test on the placements of the same records, over the seeds."""
    seeds = zip(by_seed(before.values, before.sides), by_seed(now.values, now.sides), strict=True)
    return over_seeds([test(*sides) for sides in seeds])


def numbers(measure: Measure) -> stats.Numbers:
    """The values of a measure without missing values."""
    return np.array(measure.values, dtype=np.float64)


def provenance(old: Measured, new: Measured) -> Iterable[str]:
    """One line for each difference between two runs, except of their measures and of how they were computed."""
    for name in ("study", "study_hash", "data", "commit", "packages", "machine"):
        was, now = getattr(old, name), getattr(new, name)
        if isinstance(was, dict):
            keys = [key for key in sorted(was.keys() | now.keys()) if was.get(key) != now.get(key)]
            yield from (f"{name}, {key}: {was.get(key, 'none')} -> {now.get(key, 'none')}" for key in keys)
        elif was != now:
            yield f"{name}: {was} -> {now}"


def _seeds(run: Run) -> tuple[int, ...]:
    return tuple(dict.fromkeys(cell.training.seed for cell in run.cells))


def _remarks(a: Measured, b: Measured, which: str, *, same_seeds: bool) -> tuple[str, ...]:
    dirty = [who for who, run in (("first", a), (which, b)) if run.dirty]
    said = (f"the {who} run's code had uncommitted changes" for who in dirty)
    return (*["the seeds differ"] * (not same_seeds), *provenance(a, b), *said)
