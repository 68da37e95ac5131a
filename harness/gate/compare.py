"""Two runs side by side: every shared measure with its difference. Only the gate gives verdicts.

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
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Literal, NamedTuple

import numpy as np
from rich import box
from rich.table import Table
from scipy import special

from leakgauge.harness.core import stats
from leakgauge.harness.core.labels import counted
from leakgauge.harness.core.metrics import GateTest, metric
from leakgauge.harness.core.result import Run
from leakgauge.harness.core.sinks import styled, table_head, table_row
from leakgauge.harness.gate.comparable import numbers
from leakgauge.harness.gate.measure import Measure, Measured, by_seed, measured, titles
from leakgauge.harness.gate.output import change, escaped, json_text, number
from leakgauge.harness.gate.rules import delong, over_seeds

SCHEMA = 1
"""Version of the JSON."""

Method = Literal["pairs", "Welch", "DeLong", "Newcombe", "none"]

LEVEL = 0.95

_CAPTION = (
    "Second minus first, with a two-sided 95 % interval for each difference alone: about five in a hundred true zeros "
    "are excluded by chance. Higher means that the adversary learns more, except for accuracy and bits. "
    "This table never fails the build; 'leakgauge check' does."
)
_HEADER = ("Measure", "First", "Second", "Difference (95 %)", "n", "How")


class _Found(NamedTuple):
    """A difference with its interval and method; see `Difference`."""

    value: float | None
    low: float | None
    high: float | None
    n: tuple[int, ...]
    method: Method
    note: str


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
        remarks: differences between the runs as a whole.
    """

    first: Measured
    second: Measured
    differences: tuple[Difference, ...]
    only_first: tuple[Lone, ...]
    only_second: tuple[Lone, ...]
    remarks: tuple[str, ...]


def compare(a: Run, b: Run) -> Comparison:
    """All measures of both runs by key; the studies may differ."""
    first, second = measured(a), measured(b)
    before, after = first.by_key(), second.by_key()
    same_seeds = _seeds(a) == _seeds(b)
    names = titles([*first.measures, *second.measures])
    return Comparison(
        first=first,
        second=second,
        differences=tuple(
            _difference(measure, after[measure.key], names[measure.key], same_seeds=same_seeds)
            for measure in first.measures
            if measure.key in after
        ),
        only_first=tuple(Lone(key, names[key], one.value) for key, one in before.items() if key not in after),
        only_second=tuple(Lone(key, names[key], one.value) for key, one in after.items() if key not in before),
        remarks=_remarks(first, second, same_seeds=same_seeds),
    )


def table(comparison: Comparison) -> Table:
    """A table for a terminal; differences whose interval excludes zero are bold."""
    made = Table(
        title=styled(_title(comparison)),
        caption=styled("\n".join([*comparison.remarks, _CAPTION])),
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1),
    )
    for name in _HEADER:
        made.add_column(name, overflow="fold", justify="left" if name in ("Measure", "How") else "right")
    for fields, differs in _rows(comparison):
        made.add_row(*(styled(field, "bold" if differs else "") for field in fields))
    return made


def to_markdown(comparison: Comparison) -> str:
    """The comparison as Markdown."""
    lines = [f"### {escaped(_title(comparison))}", "", *table_head(_HEADER)]
    for row, differs in _rows(comparison):
        fields = [escaped(field) for field in row]
        fields[3] = f"**{fields[3]}**" if differs else fields[3]
        lines.append(table_row(fields))
    lines += ["", *(f"- {escaped(remark)}" for remark in comparison.remarks)]
    return "\n".join([*lines, "", _CAPTION]) + "\n"


def to_json(comparison: Comparison) -> str:
    """The comparison as JSON, with null for a missing number."""
    content = {
        "schema": SCHEMA,
        "first": comparison.first.source(),
        "second": comparison.second.source(),
        "level": LEVEL,
        "remarks": comparison.remarks,
        "differences": [{**asdict(one), "differs": one.differs} for one in comparison.differences],
        "only_first": [asdict(lone) for lone in comparison.only_first],
        "only_second": [asdict(lone) for lone in comparison.only_second],
    }
    return json_text(content)


def _difference(a: Measure, b: Measure, name: str, *, same_seeds: bool) -> Difference:
    """The difference of one measure between two runs."""
    test = metric(a.metric).gate
    found = _Found(_minus(a, b), None, None, (a.n, b.n), "none", "")
    problem = "; ".join(f"{who}: {one.problem}" for who, one in (("first", a), ("second", b)) if one.problem)
    if problem:
        found = found._replace(value=None, note=problem)
    elif test is GateTest.AUDIT:
        found = found._replace(note="no interval: the difference of two lower bounds is no bound")
    elif test is GateTest.DELONG:
        note = "" if same_seeds else "the seeds differ, so the records differ"
        found = _placed(a, b, note) if a.sides == b.sides else found._replace(note="the numbers of records differ")
    elif test is GateTest.RATE:
        found = _shares(a, b)
    elif test is GateTest.PAIRED:
        found = _images(a, b)
    elif same_seeds and len(a.values) == len(b.values):
        found = _student(numbers(a), numbers(b), "")
    else:
        found = _apart(numbers(a), numbers(b), "not paired: the seeds differ")
    if "batch" in a.target and found.method != "none":
        found = found._replace(note=stats.joined(found.note, "images of one batch are not independent: too narrow"))
    return Difference(a.key, name, a.metric, a.value, b.value, *found)


def _images(a: Measure, b: Measure) -> _Found:
    """The difference over images, paired if both runs attacked the same images."""
    first, second = _blocks(a), _blocks(b)
    shared = [item for item in first if item in second and len(first[item]) == len(second[item])]
    if shared:
        before, after = (np.concatenate([blocks[item] for item in shared]) for blocks in (first, second))
        most = max(sum(map(len, blocks.values())) for blocks in (first, second))
        note = "" if len(before) == most else f"only the {len(before)} of {most} images that are in both runs"
        return _student(before, after, note)
    if first and second:
        before, after = (np.concatenate(list(blocks.values())) for blocks in (first, second))
        return _apart(before, after, "not paired: the images differ")
    return _apart(numbers(a), numbers(b), "not paired: the images are not stored")


def _blocks(measure: Measure) -> dict[str, stats.Numbers]:
    """The values of each set of images by digest, averaged over seeds with this set; empty if a digest is missing."""
    items, values = measure.items, numbers(measure)
    if not items or not all(items) or len(values) % len(items):
        return {}
    rows = values.reshape(len(items), -1)
    return {item: rows[[at for at, one in enumerate(items) if one == item]].mean(axis=0) for item in items}


def _student(a: stats.Numbers, b: stats.Numbers, note: str) -> _Found:
    """The mean difference over pairs, with Student's interval."""
    low, high = stats.mean_interval(b - a, LEVEL)
    note = stats.joined(note, "no interval: only one pair" if low is None else "")
    return _Found(float(np.mean(b - a)), low, high, (len(a),), "none" if low is None else "pairs", note)


def _apart(a: stats.Numbers, b: stats.Numbers, note: str) -> _Found:
    """The difference of the means of independent samples, with Welch's interval."""
    low, high = welch(a, b)
    note = stats.joined(note, "no interval: only one value" if low is None else "")
    value = float(np.mean(b) - np.mean(a))
    return _Found(value, low, high, (len(a), len(b)), "none" if low is None else "Welch", note)


def _placed(a: Measure, b: Measure, note: str) -> _Found:
    """The difference of two AUCs, from the differences of the records' placements, seed by seed.

    If the runs have different records, the placements are independent and give the interval of independent curves.
    """
    if min((min(sides) for sides in a.sides), default=0) < 2:
        return _Found(_minus(a, b), None, None, (a.n,), "none", "no interval: only one record on a side")
    seeds = zip(by_seed(a.values, a.sides), by_seed(b.values, b.sides), strict=True)
    rise = over_seeds([delong(before, after) for before, after in seeds])
    value, half = float(rise.mean), float(special.stdtrit(rise.df, (1 + LEVEL) / 2) * rise.error)
    return _Found(value, value - half, value + half, (a.n,), "DeLong", note)


def _shares(a: Measure, b: Measure) -> _Found:
    """The difference of two rates. Source: Newcombe 1998, method 10, with Clopper-Pearson for Wilson intervals."""
    n = tuple(sum(members for members, _ in one.sides) for one in (a, b))
    if a.value is None or a.low is None or a.high is None or b.value is None or b.low is None or b.high is None:
        return _Found(_minus(a, b), None, None, n, "none", "no interval: one of the rates has none")
    difference = b.value - a.value
    low = difference - math.hypot(b.value - b.low, a.high - a.value)
    high = difference + math.hypot(b.high - b.value, a.value - a.low)
    return _Found(difference, low, high, n, "Newcombe", "too narrow: ignores the noise of the threshold")


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


def _minus(a: Measure, b: Measure) -> float | None:
    """Second minus first, if both have a value."""
    return None if a.value is None or b.value is None else b.value - a.value


def _seeds(run: Run) -> tuple[int, ...]:
    """The seeds of a run in the order of its cells."""
    return tuple(dict.fromkeys(cell.training.seed for cell in run.cells))


def _remarks(a: Measured, b: Measured, *, same_seeds: bool) -> tuple[str, ...]:
    """Differences between two runs, except differences of their numbers."""
    found = []
    if a.study_hash != b.study_hash:
        found.append(f"The studies differ: {a.study} ({a.study_hash[:10]}) and {b.study} ({b.study_hash[:10]}).")
    if not same_seeds:
        found.append("The seeds differ.")
    data = sorted(a.data.keys() & b.data.keys())
    found += [f"The data set {name} differs." for name in data if a.data[name] != b.data[name]]
    for name in sorted(a.packages.keys() | b.packages.keys()):
        before, after = a.packages.get(name, "none"), b.packages.get(name, "none")
        if before != after:
            found.append(f"{name} {before} and {after}.")
    if a.machine != b.machine:
        found.append(f"The machines differ: {a.machine} and {b.machine}.")
    dirty = [who for who, one in (("first", a), ("second", b)) if one.dirty]
    found += [f"The {who} run's code had uncommitted changes." for who in dirty]
    return tuple(found)


def _title(comparison: Comparison) -> str:
    """The names of the runs, and the number of shared measures."""
    runs = []
    for run in (comparison.first, comparison.second):
        commits = ", ".join(commit[:10] for commit in run.commit.split(", ")) or "no commit"
        runs.append(f"{run.study} at {commits}")
    return f"{' and '.join(runs)}: {counted(len(comparison.differences), 'measure')} in both"


def _rows(comparison: Comparison) -> Iterable[tuple[tuple[str, ...], bool]]:
    """The fields of each line, and whether it differs: the shared measures, then the measures of one run only."""
    for one in comparison.differences:
        how = stats.joined(one.method if one.method != "none" else "", one.note)
        difference = change(one.difference, one.low, one.high)
        fields = (number(one.first), number(one.second), difference, " and ".join(map(str, one.n)), how)
        yield (one.name, *fields), one.differs
    for lone in comparison.only_first:
        yield (lone.name, number(lone.value), "", "", "", "only in the first"), False
    for lone in comparison.only_second:
        yield (lone.name, "", number(lone.value), "", "", "only in the second"), False
