"""The leakage matrix as Markdown, for example for a page under version control."""

from __future__ import annotations

from leakgauge.harness.core.cases import gathered
from leakgauge.harness.core.sinks import markdown, table_head, table_row
from leakgauge.reports.sections.leakage import NO_NUMBER, Entry, leakage
from leakgauge.reports.select import Analysis
from leakgauge.reports.text.notation import fixed


def to_matrix(analysis: Analysis) -> str:
    """One table per setting: one row per defense and one for the floor, one column per attack and target.

    A cell is the headline number with its 95 % interval; the strongest attack of a row is bold. The last column names
    the strongest attack of each kind with its rating, or states why there is none, and adversaries without a promise.
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
    """The strongest attacks on a defense, or a text that no attack beats its floor or is strong enough to tell."""
    groups = [group for group in analysis.attacked if (group.setting, group.defense) == (setting, defense)]
    kinds = gathered((group.case.kind, group) for group in groups).values()
    most = [found[0] for kind in kinds if (found := analysis.strongest(kind))]
    texts = [f"{analysis.attack_text(one)} {fixed(one.value)}, {analysis.rating(one).word}" for one in most]
    ratings = [analysis.rating(group) for group in groups if group.value is not None]
    words = {rating.word for rating in ratings}
    if not texts and words:
        lacking = next((one.why for one in ratings if one.word == "not rated"), "")
        texts = [lacking or ("nothing beats the floor" if "at floor" in words else "too weak to tell")]
    return "; ".join([*texts, *dict.fromkeys(filter(None, map(analysis.unpromised, groups)))])
