"""Two runs side by side: every measure that both have, with the difference. It informs; the gate judges.

| metric | how the difference is made |
|---|---|
| `ssim` | images that both attacked: pairs, Student's interval; none in common: Welch's |
| `auc` | as many records on each side: DeLong's interval; others: none |
| `tpr@...` | Newcombe's interval, as if the runs were independent |
| `accuracy`, `bits` | the same seeds: pairs, Student's interval; others: Welch's |
| `epsilon` | both values: a difference of two lower bounds bounds nothing |

A measure with a problem (a failed or missing cell) has no difference: the rest of it is another question.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
from rich import box
from rich.table import Table
from rich.text import Text
from scipy import special

from leakgauge.harness.core import stats
from leakgauge.harness.core.result import Run
from leakgauge.harness.gate.measure import Measure, Measured, by_seed, measured
from leakgauge.harness.gate.output import change, clean, counted, escaped, finite, number, table_head, table_row, titles
from leakgauge.harness.gate.rules import delong, over_seeds

SCHEMA = 1
"""Of the JSON."""

Method = Literal["pairs", "Welch", "DeLong", "Newcombe", "none"]

LEVEL = 0.95

_CAPTION = (
    "Second minus first, with the two-sided 95 % interval of each difference by itself: of a hundred that are zero in "
    "truth, about five leave zero out. Higher means the attacker learns more, but of accuracy and bits. This informs; "
    "'leakgauge check' judges."
)
_HEADER = ("Measure", "First", "Second", "Difference (95 %)", "n", "How")


class _Row(NamedTuple):
    """One line of a table: a text for each of `_HEADER`."""

    fields: tuple[str, ...]
    differs: bool


class _Found(NamedTuple):
    """A difference with its interval and how it was made; see `Difference`."""

    value: float | None
    low: float | None
    high: float | None
    method: Method
    n: tuple[int, ...]
    note: str


@dataclass(frozen=True)
class Difference:
    """One measure in two runs.

    Attributes:
        key, metric: of the measure. name: of it among those of both runs.
        first, second: its values, None where there is none.
        difference: second - first; of `pairs`, over the pairs alone. None where a run has a problem with it.
        low, high: two-sided 95 % interval, None where there is none.
        n: pairs, or records of `auc`; where nothing is paired, values or members of the first and of the second run.
        method: how the interval was made.
        note: what to bear in mind, or why there is no interval.
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
        """Whether the interval leaves out zero."""
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
        differences: of what both have, in the order of the first.
        only_first, only_second: measures that only one has.
        remarks: in what the runs differ as a whole.
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
    theirs, mine = second.by_key(), first.by_key()
    same_seeds = _seeds(a) == _seeds(b)
    names = titles([*first.measures, *second.measures])
    return Comparison(
        first=first,
        second=second,
        differences=tuple(
            _difference(measure, theirs[measure.key], names[measure.key], same_seeds=same_seeds)
            for measure in first.measures
            if measure.key in theirs
        ),
        only_first=tuple(Lone(key, names[key], one.value) for key, one in mine.items() if key not in theirs),
        only_second=tuple(Lone(key, names[key], one.value) for key, one in theirs.items() if key not in mine),
        remarks=_remarks(first, second, same_seeds=same_seeds),
    )


def table(comparison: Comparison) -> Table:
    """For a terminal; differences whose interval leaves out zero are bold."""
    made = Table(
        title=Text(_title(comparison)),
        caption=Text("\n".join([*comparison.remarks, _CAPTION])),
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1),
    )
    for name in _HEADER:
        made.add_column(name, overflow="fold", justify="left" if name in ("Measure", "How") else "right")
    for row in _rows(comparison):
        made.add_row(*(Text(clean(field), style="bold" if row.differs else "") for field in row.fields))
    return made


def to_markdown(comparison: Comparison) -> str:
    """The same as Markdown."""
    lines = [f"### {escaped(_title(comparison))}", "", *table_head(_HEADER)]
    for row in _rows(comparison):
        name, first, second, difference, n, how = map(escaped, row.fields)
        marked = f"**{difference}**" if row.differs else difference
        lines.append(table_row([name, first, second, marked, n, how]))
    lines += ["", *(f"- {escaped(remark)}" for remark in comparison.remarks)]
    return "\n".join([*lines, "", _CAPTION]) + "\n"


def to_json(comparison: Comparison) -> str:
    """The same for programs; null for a number that is none."""
    said = {
        "schema": SCHEMA,
        "first": _source(comparison.first),
        "second": _source(comparison.second),
        "level": LEVEL,
        "remarks": comparison.remarks,
        "differences": [{**asdict(one), "differs": one.differs} for one in comparison.differences],
        "only_first": [asdict(lone) for lone in comparison.only_first],
        "only_second": [asdict(lone) for lone in comparison.only_second],
    }
    return json.dumps(finite(said), indent=1, allow_nan=False) + "\n"


def _difference(a: Measure, b: Measure, name: str, *, same_seeds: bool) -> Difference:
    """What can be said of one measure in two runs."""
    found = _Found(_minus(a, b), None, None, "none", (a.n, b.n), "")
    problem = "; ".join(f"{who}: {one.problem}" for who, one in (("first", a), ("second", b)) if one.problem)
    if problem:
        found = found._replace(value=None, note=problem)
    elif a.metric == "epsilon":
        found = found._replace(note="lower bounds: their difference bounds nothing")
    elif a.metric == "auc":
        note = "" if same_seeds else "other seeds: other records"
        found = _placed(a, b, note) if a.sides == b.sides else found._replace(note="other numbers of records")
    elif a.metric.startswith("tpr"):
        found = _shares(a, b)
    elif a.attack:
        found = _images(a, b)
    elif same_seeds and len(a.values) == len(b.values):
        found = _student(_numbers(a), _numbers(b), "")
    else:
        found = _apart(_numbers(a), _numbers(b), "not paired: other seeds")
    if "batch" in a.target and found.method != "none":
        found = found._replace(note=_joined(found.note, "images of one batch hang together: too narrow"))
    low, high = found.low, found.high
    return Difference(
        a.key, name, a.metric, a.value, b.value, found.value, low, high, found.n, found.method, found.note
    )


def _images(a: Measure, b: Measure) -> _Found:
    """Image by image where both attacked the same ones."""
    mine, theirs = _blocks(a), _blocks(b)
    shared = [item for item in mine if item in theirs and len(mine[item]) == len(theirs[item])]
    if shared:
        before, after = (np.concatenate([blocks[item] for item in shared]) for blocks in (mine, theirs))
        most = max(sum(map(len, blocks.values())) for blocks in (mine, theirs))
        note = "" if len(before) == most else f"only the images that both have, {len(before)} of {most}"
        return _student(before, after, note)
    if mine and theirs:
        before, after = (np.concatenate(list(blocks.values())) for blocks in (mine, theirs))
        return _apart(before, after, "not paired: other images")
    return _apart(_numbers(a), _numbers(b), "not paired: the images are not stored")


def _blocks(measure: Measure) -> dict[str, stats.Numbers]:
    """The values of each set of images by digest, averaged over seeds that share it; empty where one is lacking."""
    items, values = measure.items, _numbers(measure)
    if not items or not all(items) or len(values) % len(items):
        return {}
    rows = values.reshape(len(items), -1)
    return {item: rows[[at for at, one in enumerate(items) if one == item]].mean(axis=0) for item in items}


def _student(a: stats.Numbers, b: stats.Numbers, note: str) -> _Found:
    """Over the pairs."""
    low, high = stats.mean_interval(b - a, LEVEL)
    note = _joined(note, "one pair has no interval" if low is None else "")
    return _Found(float(np.mean(b - a)), low, high, "none" if low is None else "pairs", (len(a),), note)


def _apart(a: stats.Numbers, b: stats.Numbers, note: str) -> _Found:
    """Of independent samples."""
    low, high = welch(a, b)
    note = _joined(note, "one value has no interval" if low is None else "")
    value = float(np.mean(b) - np.mean(a))
    return _Found(value, low, high, "none" if low is None else "Welch", (len(a), len(b)), note)


def _placed(a: Measure, b: Measure, note: str) -> _Found:
    """Of two AUCs, by the differences of the records' placements, seed by seed.

    Between other records the differences vary as much as both: then the interval is that of independent curves.
    """
    if min((min(sides) for sides in a.sides), default=0) < 2:
        return _Found(_minus(a, b), None, None, "none", (a.n,), "one record on a side has no interval")
    seeds = zip(by_seed(a.values, a.sides), by_seed(b.values, b.sides), strict=True)
    rise = over_seeds([delong(before, after) for before, after in seeds])
    value, half = float(rise.mean), float(special.stdtrit(rise.df, (1 + LEVEL) / 2) * rise.error)
    return _Found(value, value - half, value + half, "DeLong", (a.n,), note)


def _shares(a: Measure, b: Measure) -> _Found:
    """Of two rates by their own intervals. Source: Newcombe 1998, method 10, with these for Wilson's."""
    found = _Found(_minus(a, b), None, None, "none", (_members(a), _members(b)), "")
    if a.value is None or a.low is None or a.high is None or b.value is None or b.low is None or b.high is None:
        return found._replace(note="a rate without an interval")
    difference = b.value - a.value
    low = difference - math.hypot(b.value - b.low, a.high - a.value)
    high = difference + math.hypot(b.high - b.value, a.value - a.low)
    note = "too narrow: leaves out the threshold's own chance"
    return found._replace(low=low, high=high, method="Newcombe", note=note)


def welch(a: stats.Numbers, b: stats.Numbers) -> stats.Interval:
    """Two-sided interval of mean(b) - mean(a) for independent samples; none where one has fewer than two values.

    Source: Welch 1947, degrees of freedom after Satterthwaite.
    """
    if min(len(a), len(b)) < 2:
        return stats.Interval(None, None)
    parts = [float(np.var(one, ddof=1)) / len(one) for one in (a, b)]
    middle, variance = float(np.mean(b) - np.mean(a)), sum(parts)
    if variance == 0:
        return stats.Interval(middle, middle)
    freedom = variance**2 / sum(part**2 / (len(one) - 1) for part, one in zip(parts, (a, b), strict=True))
    half = float(special.stdtrit(freedom, (1 + LEVEL) / 2)) * math.sqrt(variance)
    return stats.Interval(middle - half, middle + half)


def _minus(a: Measure, b: Measure) -> float | None:
    """Second minus first where both have a value."""
    return None if a.value is None or b.value is None else b.value - a.value


def _numbers(measure: Measure) -> stats.Numbers:
    """The values of a measure without a problem: all are there."""
    return np.array(measure.values, dtype=np.float64)


def _members(measure: Measure) -> int:
    """Members over the seeds."""
    return sum(members for members, _ in measure.sides)


def _joined(*notes: str) -> str:
    """Those that say something."""
    return "; ".join(note for note in notes if note)


def _seeds(run: Run) -> tuple[int, ...]:
    """The seeds of a run in the order of its cells."""
    return tuple(dict.fromkeys(cell.training.seed for cell in run.cells))


def _remarks(a: Measured, b: Measured, *, same_seeds: bool) -> tuple[str, ...]:
    """In what two runs differ beyond their numbers."""
    found = []
    if a.study_hash != b.study_hash:
        found.append(f"The studies differ: {a.study} ({a.study_hash[:10]}) and {b.study} ({b.study_hash[:10]}).")
    if not same_seeds:
        found.append("The seeds differ.")
    for name in sorted(a.data.keys() & b.data.keys()):
        if a.data[name] != b.data[name]:
            found.append(f"The data set {name} differs.")
    for name in sorted(a.packages.keys() | b.packages.keys()):
        mine, theirs = a.packages.get(name, "none"), b.packages.get(name, "none")
        if mine != theirs:
            found.append(f"{name} {mine} and {theirs}.")
    if a.machine != b.machine:
        found.append(f"The machines differ: {a.machine} and {b.machine}.")
    dirty = [who for who, one in (("first", a), ("second", b)) if one.dirty]
    found += [f"The {who} run's code had uncommitted changes." for who in dirty]
    return tuple(found)


def _title(comparison: Comparison) -> str:
    """Which runs they are and how much both have."""
    a, b = comparison.first, comparison.second
    of_both = counted(len(comparison.differences), "measure")
    return f"{a.study} at {_commits(a)} and {b.study} at {_commits(b)}: {of_both} in both"


def _commits(run: Measured) -> str:
    """Short names of the commits."""
    return ", ".join(commit[:10] for commit in run.commit.split(", ")) or "no commit"


def _rows(comparison: Comparison) -> Iterable[_Row]:
    """What both have, then what only one has."""
    for one in comparison.differences:
        how = _joined(one.method if one.method != "none" else "", one.note)
        difference = change(one.difference, one.low, one.high)
        fields = (number(one.first), number(one.second), difference, " and ".join(map(str, one.n)), how)
        yield _Row((one.name, *fields), one.differs)
    for lone in comparison.only_first:
        yield _Row((lone.name, number(lone.value), "", "", "", "only in the first"), False)
    for lone in comparison.only_second:
        yield _Row((lone.name, "", number(lone.value), "", "", "only in the second"), False)


def _source(run: Measured) -> dict[str, Any]:
    """Where a run comes from."""
    return {
        name: getattr(run, name) for name in ("study", "study_hash", "commit", "dirty", "machine", "data", "packages")
    }
