"""Runs side by side: the table of the command `compare` and of the page, and its JSON."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from leakgauge.harness.core.labels import counted
from leakgauge.harness.core.numerics import unlike
from leakgauge.harness.core.stats import joined
from leakgauge.harness.gate.compare import LEVEL, ORDINALS, Comparison, Row
from leakgauge.harness.gate.measure import Measure, titles
from leakgauge.harness.gate.output import change, json_text, number
from leakgauge.reports.table import Cell, Column, Fields, Table
from leakgauge.reports.text.notation import listing

SCHEMA = 1
"""Version of the JSON."""

CAPTION = (
    "A later run minus the first, with a two-sided 95 % interval for each difference alone: about five in a hundred "
    "true zeros are excluded by chance. Higher means that the adversary learns more, except for accuracy and bits. "
    "This table never fails the build; 'leakgauge check' does."
)


def side_by_side(compared: Sequence[Comparison]) -> Table:
    """One row per measure: its value in each run, and each later run minus the first, as `compare_all` gives them.

    First the measures that the first run shares, then those that it alone has, then those that it lacks. A difference
    is strong if its interval excludes zero.
    """
    two, runs = len(compared) == 1, [compared[0].first, *(one.second for one in compared)]
    columns: list[Column | str] = ["Measure", Column("First", "num")]
    for which in ORDINALS[1 : len(runs)]:
        name = "Difference" if two else f"{which.capitalize()} − first"
        columns += [Column(which.capitalize(), "num"), Column(f"{name} (95 %)", "num")]
    known, names = [run.by_key() for run in runs], titles(measure for run in runs for measure in run.measures)
    moved = [{one.key: one for one in each.differences} for each in compared]
    place = {key: 2 * (key not in known[0]) + (not any(key in each for each in known[1:])) for key in names}
    rows = tuple((names[key], *_fields(key, known, moved)) for key in sorted(names, key=place.__getitem__))
    made = [f"{run.study} at {', '.join(c[:10] for c in run.commit.split(', ')) or 'no commit'}" for run in runs]
    shared = counted(sum(all(key in each for each in known) for key in names), "measure")
    notes = tuple(note for one, which in zip(compared, ORDINALS[1:], strict=False) for note in _notes(one, which, two))
    title = f"{listing(made)}: {shared} in {'both' if two else 'all'}"
    lead = unlike({f"the {which} run was": run.numerics for which, run in zip(ORDINALS, runs, strict=False)})
    lead = f"{lead[0].upper()}{lead[1:]}." if lead else ""
    return Table(title, (*columns, Column("n", "num"), "How"), rows, lead, notes=(*notes, CAPTION))


def _notes(one: Comparison, which: str, two: bool) -> Iterator[str]:
    yield from (remark if two else f"first and {which}: {remark}" for remark in one.remarks)


def _fields(key: str, known: Sequence[Mapping[str, Measure]], moved: Sequence[Mapping[str, Row]]) -> Fields:
    values = [number(each[key].value) if key in each else "" for each in known]
    fields: list[Cell | str] = [values[0]]
    for value, each in zip(values[1:], moved, strict=True):
        one = each.get(key)
        text = "" if one is None else change(one.difference, *one.interval)
        fields += [value, Cell(text, strong=one is not None and one.differs)]
    found = {which: each[key] for which, each in zip(ORDINALS[1:], moved, strict=False) if key in each}
    n = _merged({which: " and ".join(map(str, one.n)) for which, one in found.items()})
    how = _merged({w: joined(one.method.replace("none", ""), one.note) for w, one in found.items()})
    has = [which for which, each in zip(ORDINALS, known, strict=False) if key in each]
    return (*fields, n, joined(how, f"only in the {listing(has)}" if len(has) < len(known) else ""))


def _merged(texts: Mapping[str, str]) -> str:
    """A text that all runs share, or that of each."""
    if len({*texts.values()}) <= 1:
        return next(iter(texts.values()), "")
    return "; ".join(f"{which}: {text}" for which, text in texts.items() if text)


def to_json(*comparisons: Comparison) -> str:
    """A comparison as JSON, with null for a missing number; several as a list `comparisons`."""
    each = [_content(comparison) for comparison in comparisons]
    return json_text(each[0] if len(each) == 1 else {"schema": SCHEMA, "comparisons": each})


def _content(comparison: Comparison) -> dict[str, Any]:
    names, lone = comparison.names, [row for row in comparison.rows if row.before is None or row.after is None]
    said = [{"key": row.key, "name": names[row.key], "value": row.either.value} for row in lone]
    return {
        "schema": SCHEMA,
        "first": comparison.first.source(),
        "second": comparison.second.source(),
        "level": LEVEL,
        "computed": comparison.computed,
        "remarks": comparison.remarks,
        "differences": [_as_data(row, names[row.key]) for row in comparison.differences],
        "only_first": [one for one, row in zip(said, lone, strict=True) if row.after is None],
        "only_second": [one for one, row in zip(said, lone, strict=True) if row.before is None],
    }


def _as_data(row: Row, name: str) -> dict[str, Any]:
    (before, after), (low, high) = row.both, row.interval
    said = {"key": row.key, "name": name, "metric": before.metric, "first": before.value, "second": after.value}
    numbers = {"difference": row.difference, "low": low, "high": high, "n": row.n}
    return {**said, **numbers, "method": row.method, "note": row.note, "differs": row.differs}
