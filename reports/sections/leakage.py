"""Leakage by defense and attack: one matrix a setting, with the ceiling on top and the floor at the bottom."""

from __future__ import annotations

from typing import NamedTuple

from leakgauge.harness.core.result import Estimate
from leakgauge.reports.select import CHANCE, Analysis, Column, Group
from leakgauge.reports.text.labels import Label
from leakgauge.reports.text.notation import first_line, fixed, interval, metric, plural, where


class Head(NamedTuple):
    """The heading of a column: attack, adversary with target, metric, and whether its numbers say nothing."""

    attack: Label
    aware: bool
    place: str
    metric: str
    flagged: bool


class Entry(NamedTuple):
    """One value of the matrix. `tone` picks the tint; the word says the same, and is empty for the ceiling."""

    value: str
    interval: str
    word: str
    tone: str
    strongest: bool
    notes: tuple[str, ...]


class Row(NamedTuple):
    """One defense, or a control (`role` says which)."""

    defense: Label
    role: str
    entries: tuple[Entry, ...]


class Matrix(NamedTuple):
    """One setting. `flags` names the columns whose attack does not beat the floor without a defense."""

    setting: str
    heads: tuple[Head, ...]
    rows: tuple[Row, ...]
    flags: tuple[str, ...]


TONES = {"High": "bad", "Moderate": "warn", "Low": "good", "not rated": "none"}
_EMPTY = Entry("–", "", "not planned", "none", False, ())
_FLOOR = Label("floor", "", "")


def _columns(groups: list[Group]) -> list[Column]:
    """The distinct columns: by kind of attack, then in the study's order."""
    distinct = {group.column.key: (group.kind, group.column) for group in groups}
    return [column for _, column in sorted(distinct.values(), key=lambda pair: pair[0] != "reconstruction")]


def _notes(analysis: Analysis, group: Group) -> tuple[str, ...]:
    """What stands under a value: recognizable images, cells that are lacking, what to bear in mind."""
    notes = []
    found = group.recognized
    if found is not None and found.hits:
        notes.append(f"{found.hits}/{found.of} recognizable")
    if group.failures:
        notes.append(f"{plural(len(group.failures), 'seed')} failed")
    if group.missing:
        notes.append(f"{plural(group.missing, 'seed')} missing")
    ceiling = analysis.ceiling(group)
    if ceiling is not None and ceiling is not group and ceiling.results:
        mine = {result.cell.training.seed for result in group.results}
        if mine != {result.cell.training.seed for result in ceiling.results}:
            notes.append("ceiling rests on other seeds")
    if group.estimate is not None and group.estimate.note:
        notes.append(group.estimate.note)
    return tuple(notes)


def _lacking(group: Group) -> Entry:
    """The entry of a group without a number."""
    if group.failures and not group.results:
        return Entry("failed", "", "no number", "none", False, (first_line(group.failures[0].message),))
    if not group.results:
        return Entry("missing", "", "not run", "none", False, ())
    note = group.estimate.note if group.estimate is not None else "no such metric"
    return Entry("n/a", "", "no number", "none", False, (note,) if note else ())


def _entry(analysis: Analysis, group: Group, strongest: bool) -> Entry:
    """The entry of one group."""
    if group.estimate is None or group.value is None:
        return _lacking(group)
    value, ends, notes = fixed(group.value), interval(group.estimate), _notes(analysis, group)
    if group.undefended:
        return Entry(value, ends, "", "none", strongest, notes)
    rating = analysis.rating(group)
    if rating.word == "not rated" and not analysis.says_nothing(group.setting, group.column):
        notes = (rating.why, *notes)
    return Entry(value, ends, rating.word, TONES[rating.word], strongest, notes)


def _strongest(analysis: Analysis, groups: list[Group]) -> set[int]:
    """Identities of the strongest group of each defense and kind of attack, of equals all."""
    by_row: dict[tuple[str, str], list[Group]] = {}
    for group in groups:
        by_row.setdefault((group.defense.label, group.kind), []).append(group)
    rows = [[group for group in row if group.value is not None] for row in by_row.values() if len(row) > 1]
    most = [max((group.value or 0.0 for group in row), default=0.0) for row in rows]
    return {id(group) for row, value in zip(rows, most, strict=True) for group in row if group.value == value}


def _floor_entry(analysis: Analysis, sample: Group) -> Entry:
    """The floor below one column."""
    control = analysis.floor(sample)
    if control is not None and control.estimate is not None:
        name = analysis.attacks[control.column.attack.label].text
        return Entry(fixed(control.value), interval(control.estimate), name, "none", False, _notes(analysis, control))
    chance = CHANCE.get(sample.metric)
    if chance is None:
        return Entry("n/a", "", "not measured", "none", False, ())
    return Entry(fixed(chance), "", "chance", "none", False, ())


def _matrix(analysis: Analysis, setting: str) -> Matrix:
    """The matrix of one setting."""
    groups = [group for group in analysis.attacked if group.setting == setting]
    columns = _columns(groups)
    at = {(group.defense.label, group.column.key): group for group in groups}
    strongest = _strongest(analysis, groups)
    heads, flags, floors = [], [], []
    for column in columns:
        sample = next((g for g in groups if g.column.key == column.key and g.estimate), None)
        sample = sample or next(g for g in groups if g.column.key == column.key)
        flagged = analysis.says_nothing(setting, column)
        label = analysis.attacks[column.attack.label]
        place = f"{column.threat} · {where(column.target)}"
        heads.append(Head(label, sample.info.aware, place, metric(sample.metric), flagged))
        floors.append(_floor_entry(analysis, sample))
        if flagged:
            flags.append(analysis.column_text(column))
    rows = []
    for defense in sorted({d: None for s, d in analysis.pairs if s == setting}, key=lambda d: d != "none"):
        found = [at.get((defense, column.key)) for column in columns]
        entries = tuple(_entry(analysis, g, id(g) in strongest) if g is not None else _EMPTY for g in found)
        rows.append(Row(analysis.defenses[defense], "ceiling" if defense == "none" else "", entries))
    rows.append(Row(_FLOOR, "the best guess that looks at nothing protected", tuple(floors)))
    return Matrix(analysis.settings[setting], tuple(heads), tuple(rows), tuple(flags))


def matrices(analysis: Analysis) -> tuple[Matrix, ...] | None:
    """One matrix a setting; None if no attack was planned."""
    if not analysis.attacked:
        return None
    return tuple(
        _matrix(analysis, setting)
        for setting in analysis.settings
        if any(group.setting == setting for group in analysis.attacked)
    )


def methods(analysis: Analysis) -> tuple[str, ...]:
    """How the intervals of the matrix were made."""
    estimates: list[Estimate] = [
        g.estimate for g in analysis.attacked if g.estimate is not None and g.estimate.low is not None
    ]
    return tuple(dict.fromkeys(f"{e.method} ({100 * e.level:g} %)" for e in estimates))
