"""The leakage matrix as Markdown, for example for a page under version control."""

from __future__ import annotations

from leakgauge.harness.core.sinks import markdown, table_head, table_row
from leakgauge.reports.sections.leakage import NO_NUMBER, Entry, leakage
from leakgauge.reports.select import Analysis, Group, beats, best, surely_less
from leakgauge.reports.text.notation import fixed


def to_matrix(analysis: Analysis) -> str:
    """One table per setting: one row per defense and one for the floor, one column per attack and target.

    A cell is the headline number with its 95 % interval; the strongest attack of a row is bold. The last column names
    the strongest reconstruction attack, or states that no attack beats its floor beyond noise, image by image.
    """
    found, parts = leakage(analysis), []
    for matrix in found.matrices if found is not None else ():
        heads = [f"{head.attack.text}, {head.place} ({head.metric})" for head in matrix.heads]
        lines = [f"### {plain(matrix.setting)}", "", *table_head(["defense", *map(plain, heads), "strongest"])]
        for row in matrix.rows:
            entries = [_cell(entry) for entry in row.entries]
            strongest = _strongest(analysis, matrix.key, row.key)
            lines.append(table_row([plain(row.defense.text), *entries, plain(strongest)]))
        parts.append("\n".join(lines))
    return "\n\n".join(parts) + "\n"


def plain(text: str) -> str:
    """A text as literal Markdown."""
    return markdown(text, bare=True)


def _cell(entry: Entry) -> str:
    """A number with its interval, or the reason for a failure."""
    value = f"**{entry.value}**" if entry.strongest else entry.value
    note = entry.interval or (entry.notes[0] if entry.notes and entry.word == NO_NUMBER else "")
    return f"{value} ({plain(note)})" if note else value


def _strongest(analysis: Analysis, setting: str, defense: str) -> str:
    """The strongest reconstruction attack on a defense, or a text that no attack beats its floor."""
    place = setting, defense, "reconstruction"
    groups = [group for group in analysis.attacked if (group.setting, group.defense, group.case.kind) == place]
    found = best(groups)
    if found is None:
        return ""
    if not any(_beats_floor(analysis, group) for group in groups):
        return "nothing beats the floor"
    return f"{analysis.attack_text(found)} {fixed(found.value)}"


def _beats_floor(analysis: Analysis, group: Group) -> bool:
    """Whether a group is significantly above its floor; compared image by image if the floor was measured."""
    control = analysis.floor(group)
    if control is not None:
        return surely_less(control, group)
    floor = analysis.floor_value(group)
    return floor is not None and beats(group, floor)
