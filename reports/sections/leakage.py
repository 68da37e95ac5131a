"""Leakage by defense and attack: one matrix per setting, with the ceiling as first row and the floor as last row."""

from __future__ import annotations

from typing import Any, NamedTuple

from leakgauge.harness.core.cases import gathered
from leakgauge.harness.core.labels import UNDEFENDED, Label, counted, where
from leakgauge.harness.core.metrics import RECOGNIZABLE
from leakgauge.reports.sections import Section
from leakgauge.reports.sections.ratings import WORDS, cell_of, said
from leakgauge.reports.select import Analysis, Group
from leakgauge.reports.table import Cell, Fields, Table
from leakgauge.reports.text.notation import NO_VALUE, first_line, fixed, interval, percent


class Entry(NamedTuple):
    """One value of the matrix. `tone` picks the tint and `word` names it."""

    value: str
    interval: str = ""
    word: str = ""
    tone: str = "none"
    strongest: bool = False
    notes: tuple[str, ...] = ()


NO_NUMBER = "no number"
_EXACT = 1e-6
"""If the MSE of the limit is below this value, a message shows the image."""

_SHOWN = ("identification_epsilon", "named_epsilon", "membership_epsilon")


def _columns(groups: list[Group]) -> list[Group]:
    """One group of each column, with an estimate if possible; reconstruction first, then in the study's order."""
    columns: dict[object, Group] = {}
    for group in groups:
        if group.column not in columns or (columns[group.column].estimate is None and group.estimate is not None):
            columns[group.column] = group
    return sorted(columns.values(), key=lambda group: group.case.kind != "reconstruction")


def _bounds(group: Group) -> list[str]:
    if group.case.info.floor:
        return []
    notes = []
    for name, what in (("identification_bound", "identified"), ("named_bound", "named")):
        if (proved := group.pooled(name)) is not None:
            notes.append(f"proved: at most {percent(proved.value or 0.0, 0)} {what}")
    least = min((estimate.value or 0.0 for name in _SHOWN for estimate in group.case.estimates(name)), default=0.0)
    if least > 0:
        codes = {flag.code for result in group.case.results for flag in result.flags}
        against = " and ".join(what for what in ("claim", "proof") if f"{what}-contradicted" in codes)
        notes.append(f"shows ε ≥ {fixed(least, 2)}" + (f": contradicts the {against}" if against else ""))
    limit, efficiency, noticed = (group.pooled(name) for name in ("limit", "efficiency", "detectable"))
    if limit is not None and efficiency is not None and (limit.value or 0.0) >= _EXACT:
        notes.append(f"limit: MSE {fixed(limit.value or 0.0)}, efficiency {fixed(efficiency.value or 0.0, 2)}")
    if noticed is not None:
        notes.append(f"noticed by {round(noticed.n * (noticed.value or 0.0))}/{noticed.n} clients")
    return notes


def _notes(analysis: Analysis, group: Group) -> tuple[str, ...]:
    findings = analysis.ratings.findings.get(group.case.identity, ())
    best = max((one for one in findings if one.people), key=lambda one: one.among, default=None)
    notes, recognized = [], group.recognized
    if best is not None:
        ends = f"{percent(best.low or 0.0, 0)} to {percent(best.high or 1.0, 0)}"
        notes.append(f"{best.text} ({ends})")
    if recognized is not None and recognized.hits:
        notes.append(f"{recognized.hits}/{recognized.of} recognizable")
    notes += _bounds(group)
    if group.case.failures:
        notes.append(f"{counted(len(group.case.failures), 'seed')} failed")
    if group.case.missing:
        notes.append(f"{counted(group.case.missing, 'seed')} missing")
    ceiling = analysis.ceiling(group)
    if ceiling is not None and ceiling is not group and ceiling.case.results:
        seeds, there = ({result.cell.training.seed for result in control.case.results} for control in (group, ceiling))
        if seeds != there:
            notes.append("ceiling from other seeds")
    if group.estimate is not None and group.estimate.note:
        notes.append(group.estimate.note)
    return tuple(notes)


def _lacking(group: Group) -> Entry:
    if group.case.failures and not group.case.results:
        return Entry("failed", word=NO_NUMBER, notes=(first_line(group.case.failures[0].message),))
    if not group.case.results:
        return Entry("missing", word="not run")
    note = group.estimate.note if group.estimate is not None else "no such metric"
    return Entry(NO_VALUE, word=NO_NUMBER, notes=(note,) if note else ())


def entry_of(analysis: Analysis, group: Group | None, *, strongest: bool = False) -> Entry:
    """The entry of one group; None: the group was not planned."""
    if group is None:
        return Entry("–", word="not planned")
    if group.estimate is None or group.value is None:
        return _lacking(group)
    entry = Entry(fixed(group.value), interval(group.estimate), "", "none", strongest, _notes(analysis, group))
    word, promise = analysis.ratings.of_case(group.case), analysis.unpromised(group)
    notes = (*filter(None, [promise]), *entry.notes)
    if word is None:
        return entry._replace(word=said(analysis, group), notes=notes)
    return entry._replace(word=WORDS[word].words.lower(), tone=WORDS[word].tone, notes=notes)


def _floor_entry(analysis: Analysis, sample: Group) -> Entry:
    floor, chance = analysis.floor(sample), sample.metric.chance
    if floor is not None and floor.estimate is not None:
        name, ends = analysis.attack_text(floor), interval(floor.estimate)
        return Entry(fixed(floor.value), ends, name, notes=_notes(analysis, floor))
    return Entry(fixed(chance), word="not measured" if chance is None else "chance")


def _matrix(analysis: Analysis, setting: str, groups: list[Group]) -> dict[str, Any]:
    """The matrix of one setting. The role of a row names a control; `void`: columns whose attack fails undefended."""
    columns, rows_of = _columns(groups), gathered(((group.defense, group.case.kind), group) for group in groups)
    strongest = {id(analysis.strongest(row)) for row in rows_of.values() if len(row) > 1}
    at = {(group.defense, group.column): group for group in groups}
    heads = [
        {
            "attack": analysis.attacks[column.case.attack.key],
            "aware": column.case.info.aware,
            "place": f"{column.case.threat} · {where(column.case.target)}",
            "metric": column.metric.words,
            "void": analysis.is_void(column),
        }
        for column in columns
    ]
    rows = []
    for defense in sorted((d for s, d in analysis.pairs if s == setting), key=lambda d: d != UNDEFENDED):
        in_row = [at.get((defense, column.column)) for column in columns]
        entries = tuple(entry_of(analysis, group, strongest=id(group) in strongest) for group in in_row)
        role = "ceiling" if defense == UNDEFENDED else ""
        rated = [(one.adversary, cell_of(one)) for one in analysis.ratings.of(setting, defense)]
        row = {"key": defense, "defense": analysis.defenses[defense], "role": role, "entries": entries}
        rows.append(row | {"ratings": rated})
    floors, role = tuple(_floor_entry(analysis, column) for column in columns), "best guess without protected data"
    rows.append({"key": "", "defense": Label("floor", "", ""), "role": role, "entries": floors, "ratings": []})
    void = [analysis.column_text(column) for column in columns if analysis.is_void(column)]
    return {"key": setting, "setting": analysis.settings[setting], "heads": heads, "rows": rows, "void": void}


def leakage(analysis: Analysis) -> dict[str, Any] | None:
    """One matrix per setting, the methods of the intervals and the thresholds; None if no attack was planned."""
    if not analysis.attacked:
        return None
    grouped = {name: [g for g in analysis.attacked if g.setting == name] for name in analysis.settings}
    estimates = [g.estimate for g in analysis.attacked if g.estimate is not None and g.estimate.low is not None]
    return {
        "matrices": [_matrix(analysis, setting, groups) for setting, groups in grouped.items() if groups],
        "methods": list(dict.fromkeys(f"{e.method} ({100 * e.level:g} %)" for e in estimates)),
        "recognizable": RECOGNIZABLE,
    }


def matrices(analysis: Analysis) -> list[Table]:
    """One table per setting: one row per defense and one for the floor, one column per attack and target.

    A cell is the headline number with its 95 % interval; the strongest attack of a row is bold. The last column has
    the rating against each adversary, with its reason.
    """
    shown, tables = leakage(analysis), []
    for matrix in shown["matrices"] if shown is not None else ():
        heads = [f"{head['attack'].text}, {head['place']} ({head['metric']})" for head in matrix["heads"]]
        rows: list[Fields] = [
            (row["defense"].text, *map(_short, row["entries"]), _named(row["ratings"])) for row in matrix["rows"]
        ]
        tables.append(Table(matrix["setting"], ("defense", *heads, "rating"), tuple(rows)))
    return tables


def _short(entry: Entry) -> Cell:
    note = entry.interval or (entry.notes[0] if entry.notes and entry.word == NO_NUMBER else "")
    return Cell(entry.value, note, strong=entry.strongest)


def _named(rated: list[tuple[str, Cell]]) -> str:
    """The rating against each adversary, with its reason."""
    return "; ".join(f"{cell.text} ({', '.join([who, *cell.below])})" for who, cell in rated)


SECTION = Section("leakage", "Leakage by defense and attack", "Leakage", leakage, 30, markdown=matrices)
