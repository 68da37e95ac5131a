"""What each attack found: small cells for the page, and a matrix with all numbers for Markdown."""

from __future__ import annotations

from typing import Any, NamedTuple

from leakgauge.harness.core.cases import gathered
from leakgauge.harness.core.labels import counted, where
from leakgauge.harness.core.rating import Word
from leakgauge.reports.sections import Section
from leakgauge.reports.sections.checked import checked, is_broken
from leakgauge.reports.sections.ratings import STATES, WORDS, cell_of, said, trained
from leakgauge.reports.select import Analysis, Group, recognizable
from leakgauge.reports.table import Cell, Fields, Table
from leakgauge.reports.text.notation import NO_VALUE, first_line, fixed, interval, percent


class Entry(NamedTuple):
    """One value of the matrix. `word`: what it shows."""

    value: str
    interval: str = ""
    word: str = ""
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
    notes, images = [], [flag for result in group.case.results for flag in recognizable(result)]
    if best is not None:
        ends = f"{percent(best.low or 0.0, 0)} to {percent(best.high or 1.0, 0)}"
        notes.append(f"{best.text} ({ends})")
    if any(images):
        notes.append(f"{sum(images)}/{len(images)} recognizable")
    notes += _bounds(group)
    lost = (len(group.case.failures), "failed"), (group.case.missing, "missing")
    notes += [f"{counted(count, 'seed')} {what}" for count, what in lost if count]
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


def entry_of(analysis: Analysis, group: Group | None) -> Entry:
    """The entry of one group; None: the group was not planned."""
    if group is None:
        return Entry("–", word="not planned")
    if group.estimate is None or group.value is None:
        return _lacking(group)
    entry = Entry(fixed(group.value), interval(group.estimate), "", _notes(analysis, group))
    word, promise = analysis.ratings.of_case(group.case), analysis.unpromised(group)
    notes = (*filter(None, [promise]), *entry.notes)
    text = said(analysis, group) if word is None else WORDS[word].words.lower()
    return entry._replace(word=text, notes=notes)


def _floor(analysis: Analysis, sample: Group) -> Cell:
    floor = analysis.floor(sample)
    if floor is not None and floor.estimate is not None:
        return Cell(fixed(floor.value), interval(floor.estimate))
    return Cell(fixed(sample.metric.chance))


def _small(analysis: Analysis, setting: str, groups: list[Group]) -> dict[str, Any]:
    """The matrix of one setting for the page: a column an attack and adversary, in each cell what it found most.

    A cell's targets, with interval, floor and notes, are in its tooltip. `void`: the attack finds nothing undefended.
    """
    columns = gathered(((group.case.attack.key, group.case.threat), group) for group in groups)
    order = sorted(columns, key=lambda key: columns[key][0].case.kind not in ("reconstruction", "lineup"))
    heads = [
        {
            "attack": analysis.attacks[attack],
            "sub": f"{'knows the defense' if columns[attack, threat][0].case.info.aware else 'ignores it'}, {threat}",
            "void": all(map(analysis.is_void, columns[attack, threat])),
        }
        for attack, threat in order
    ]
    rows = []
    for defense in analysis.defenses_of(setting):
        cells = [_compact(analysis, [g for g in columns[key] if g.defense == defense]) for key in order]
        rated = [(one, cell_of(one)) for one in analysis.ratings.of(setting, defense)]
        trainings = analysis.trainings_of(setting, defense)
        broken = any(is_broken(claim) for training in trainings for claim in checked(training))
        row = {"defense": analysis.defenses[defense], "broken": broken, "cells": cells, "rated": rated}
        rows.append(row | {"accuracy": trained(trainings)})
    return {"setting": analysis.settings[setting], "heads": heads, "rows": rows}


def _compact(analysis: Analysis, groups: list[Group]) -> dict[str, Any]:
    """One cell: what the attack found most, its state, and a line for each target."""
    if not groups:
        return {"state": "none", "icon": "", "text": "–", "lines": ["not planned"]}
    known = [group for group in groups if group.value is not None] or groups
    first = analysis.strongest(groups) or max(known, key=lambda g: 0 if g.estimate is None else g.estimate.n)
    entry, word = entry_of(analysis, first), analysis.ratings.of_case(first.case)
    findings = analysis.ratings.findings.get(first.case.identity, ())
    shown = findings[0] if word is not None else next((one for one in findings if one.among), None)
    text = f"{shown.hits}/{shown.n}" if shown is not None and shown.n else entry.value
    text += f" {shown.what.partition(' ')[0]}" if shown is not None and shown.n and not shown.among else ""
    hidden = findings and analysis.rating(first).word is Word.HIDDEN
    word = word or (Word.HIDDEN if hidden else Word.WEAK)
    lines = []
    for group in groups:
        each = entry_of(analysis, group)
        value = f"{group.metric.words} {each.value} {each.interval}".strip()
        parts = [where(group.case.target), value, f"floor {fixed(analysis.floor_value(group))}", each.word, *each.notes]
        lines.append("; ".join(filter(None, parts)))
    return {"state": STATES[word], "icon": WORDS[word].icon, "text": text, "lines": lines}


def attacks(analysis: Analysis) -> dict[str, Any] | None:
    """One matrix per setting, and the result as a sentence; None if no attack was planned."""
    if not analysis.attacked:
        return None
    grouped = {name: [g for g in analysis.attacked if g.setting == name] for name in analysis.settings}
    estimates = [g.estimate for g in analysis.attacked if g.estimate is not None and g.estimate.low is not None]
    weak = [rating for rating in analysis.ratings.all if rating.word is Word.WEAK]
    return {
        "title": _title(analysis),
        "matrices": [_small(analysis, setting, groups) for setting, groups in grouped.items() if groups],
        "methods": list(dict.fromkeys(f"{e.method} ({100 * e.level:g} %)" for e in estimates)),
        "lacks": [(f"{analysis.defenses[one.defense].text}, {one.adversary}", one.lacks) for one in weak],
    }


def _title(analysis: Analysis) -> str:
    """The largest difference between an attack that knows the defense and one that ignores it, or what leads."""
    gaps = []
    for group in analysis.defended:
        alike = [
            other
            for other in analysis.defended
            if (other.setting, other.defense, other.case.threat, other.case.target)
            == (group.setting, group.defense, group.case.threat, group.case.target)
            and other.case.kind == group.case.kind == "reconstruction"
            and not other.case.info.aware
        ]
        mine, theirs = _hits(analysis, group), [one for other in alike if (one := _hits(analysis, other))]
        if group.case.info.aware and mine and theirs:
            best = max(theirs)
            gaps.append((mine[0] - best[0], analysis.defenses[group.defense].text, mine, best))
    far, name, (hits, n), (few, m) = max(gaps, default=(0, "", (0, 1), (0, 1)))
    if far > max(2, n // 4):
        told = f"{few} of {m} identified, {hits} of {n} by one that knows it"
        return f"{name} hides people only from attacks that ignore it: {told}"
    worst = analysis.worst
    if not any(group.case.results for group in analysis.judged):
        return f"No attack{' on a defense' if analysis.defended else ''} returned a value"
    if worst is None or worst.word is Word.WEAK:
        return "The attacks found nothing beyond chance"
    return f"{analysis.defenses[worst.defense].text}: {worst.reason}"


def _hits(analysis: Analysis, group: Group) -> tuple[int, int] | None:
    findings = analysis.ratings.findings.get(group.case.identity, ())
    return next(((one.hits, one.n) for one in findings if one.people), None)


def matrices(analysis: Analysis) -> list[Table]:
    """One table per setting: one row per defense and one for the floor, one column per attack and target.

    A cell is the headline number with its 95 % interval; the strongest attack of a row is bold. The last column has
    the rating against each adversary, with its reason.
    """
    tables = []
    for setting, name in analysis.settings.items():
        groups = [group for group in analysis.attacked if group.setting == setting]
        columns, at = _columns(groups), {(group.defense, group.column): group for group in groups}
        rows = list[Fields]()
        for defense in analysis.defenses_of(setting):
            own = [group for group in groups if group.defense == defense]
            kinds = gathered((group.case.kind, group) for group in own).values()
            strong = {id(analysis.strongest(kind)) for kind in kinds if len(kind) > 1}
            entries = [at.get((defense, column.column)) for column in columns]
            fields = [_short(entry_of(analysis, g), strong=id(g) in strong and g is not None) for g in entries]
            rated = [(cell_of(one), one.adversary) for one in analysis.ratings.of(setting, defense)]
            reasons = "; ".join(f"{cell.text} ({', '.join([who, *cell.below])})" for cell, who in rated)
            rows.append((analysis.defenses[defense].text, *fields, reasons))
        rows.append(("floor", *(_floor(analysis, column) for column in columns), ""))
        heads = [f"{analysis.column_text(column)} ({column.metric.words})" for column in columns]
        if columns:
            tables.append(Table(name, ("defense", *heads, "rating"), tuple(rows)))
    return tables


def _short(entry: Entry, *, strong: bool = False) -> Cell:
    note = entry.interval or (entry.notes[0] if entry.notes and entry.word == NO_NUMBER else "")
    return Cell(entry.value, note, strong=strong)


SECTION = Section("attacks", "Attacks", "Attacks", attacks, 30, tables=matrices)
