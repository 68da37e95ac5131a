"""The leakage matrix as Markdown, for a page under version control."""

from __future__ import annotations

from leakgauge.reports.sections.leakage import Entry, matrices
from leakgauge.reports.select import Analysis, Group, surely_less
from leakgauge.reports.text.notation import fixed

_NOTHING = "nothing beats the floor"


def to_markdown(analysis: Analysis) -> str:
    """One table a setting: a row a defense and one for the floor, a column an attack and its target.

    A cell is the headline number with its 95 % interval, the strongest attack of a row in bold; the last column names
    it, or says that no attack is above its floor beyond noise, image by image.
    """
    parts = []
    for key, matrix in zip(analysis.settings, matrices(analysis) or (), strict=False):
        heads = [f"{head.attack.text}, {head.place} ({head.metric})" for head in matrix.heads]
        lines = [f"### {matrix.setting}", "", _line(["defense", *heads, "strongest"])]
        lines.append(_line(["---"] * (len(heads) + 2)))
        for row in matrix.rows:
            name = row.defense.text or "floor"
            entries = [_cell(entry) for entry in row.entries]
            lines.append(_line([name, *entries, _strongest(analysis, key, name)]))
        parts.append("\n".join(lines))
    return "\n\n".join(parts) + "\n"


def _line(cells: list[str]) -> str:
    """One row; a bar inside a cell would end it."""
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _cell(entry: Entry) -> str:
    """A number with its interval; of a failure its reason."""
    value = f"**{entry.value}**" if entry.strongest else entry.value
    if not entry.interval:
        return f"{value} ({entry.notes[0]})" if entry.notes and entry.word == "no number" else value
    return f"{value} ({entry.interval})"


def _strongest(analysis: Analysis, setting: str, name: str) -> str:
    """The attack that gets most of a defense's images, or that none gets any."""
    mine = [group for group in analysis.attacked if group.setting == setting and group.kind == "reconstruction"]
    groups = [group for group in mine if analysis.defenses[group.defense.label].text == name]
    best = analysis.best(groups)
    if best is None:
        return ""
    if not any(_beats(analysis, group) for group in groups):
        return _NOTHING
    return f"{analysis.attacks[best.column.attack.label].text} {fixed(best.value)}"


def _beats(analysis: Analysis, group: Group) -> bool:
    """Whether a group is above its floor beyond noise: image by image where the floor was measured."""
    control = analysis.floor(group)
    if control is not None:
        return surely_less(control, group)
    floor = analysis.floor_value(group)
    return floor is not None and analysis.beats_floor(group, floor)
