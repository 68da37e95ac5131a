"""The page about recipes: a scoreboard, then each recipe with its claims and figures; the scoreboard as Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

from leakgauge.harness.core.cases import gathered
from leakgauge.harness.core.labels import counted
from leakgauge.harness.core.lines import Figure, Panel
from leakgauge.harness.core.sinks import table_head, table_row
from leakgauge.harness.core.statements import Judged, Verdict
from leakgauge.reports.charts.figures import Chart, slug
from leakgauge.reports.html import Part, page
from leakgauge.reports.sections.asked import Asked, charts_of, shown
from leakgauge.reports.text.markdown import plain


class Repeated(NamedTuple):
    """A recipe that ran: its texts, its verdicts, and its figures with their panels or an error."""

    name: str
    title: str
    source: str
    size: str
    unstated: tuple[str, ...]
    notes: tuple[str, ...]
    missing: str
    failures: tuple[str, ...]
    made_by: tuple[str, ...]
    judged: tuple[Judged, ...]
    figures: tuple[tuple[Figure, tuple[Panel, ...] | str], ...]

    @property
    def id(self) -> str:
        """Id of the recipe's section."""
        return slug(self.name)

    @property
    def asked(self) -> Asked:
        """The recipe's table of claims and its charts."""
        return shown(self.judged, self.figures, self.id)

    @property
    def charts(self) -> list[Chart]:
        """Its charts alone."""
        return charts_of(self.figures)


class _Row(NamedTuple):
    """A row of the scoreboard."""

    id: str
    name: str
    title: str
    counts: tuple[int, ...]


class _Scoreboard(NamedTuple):
    """Content of the first section."""

    sentence: str
    columns: tuple[str, ...]
    rows: tuple[_Row, ...]


def reproduction(recipes: Sequence[Repeated]) -> str:
    """The page; it loads nothing, and the same recipes give the same page."""
    parts: list[Part[Sequence[Repeated]]] = [
        Part("scoreboard", "Reproduction of published tables and figures", "Scoreboard", _scoreboard, _BOARD)
    ]
    parts += [Part(one.id, one.name, one.name, partial(_at, number=at), _RECIPE) for at, one in enumerate(recipes)]
    return page("reproduction", parts, recipes)


def _at(recipes: Sequence[Repeated], number: int) -> Repeated:
    """The recipe with this number."""
    return recipes[number]


_BOARD, _RECIPE = ('{% include "' + name + '.html" %}' for name in ("scoreboard", "recipe"))


def _scoreboard(recipes: Sequence[Repeated]) -> _Scoreboard:
    """The number of claims of each recipe by verdict."""
    rows = [
        _Row(one.id, one.name, one.title, tuple(sum(each.verdict is kind for each in one.judged) for kind in Verdict))
        for one in recipes
    ]
    totals = [sum(column) for column in zip(*(row.counts for row in rows), strict=True)]
    words = ", ".join(f"{count} {str(kind).lower()}" for kind, count in zip(Verdict, totals, strict=True) if count)
    text = f"{counted(sum(totals), 'claim')} of {counted(len(recipes), 'recipe')}: {words}."
    return _Scoreboard(text, tuple(map(str, Verdict)), tuple(rows))


def scoreboard(recipes: Sequence[Repeated]) -> str:
    """Every claim with its verdict as Markdown, one table for each paper, for a page under version control."""
    lines = [_scoreboard(recipes).sentence]
    for paper, here in gathered((one.name.partition("/")[0], one) for one in recipes).items():
        made_by = "; ".join(dict.fromkeys(text for one in here for text in one.made_by))
        lines += ["", f"### {plain(paper)}", "", f"Size {here[0].size}, code and machine: {plain(made_by)}.", ""]
        lines += table_head(["recipe", "claim", "verdict", "measured", "printed"])
        for one in here:
            rows = [(one.name, each.text, each.verdict, each.measured, each.statement.printed) for each in one.judged]
            lines += [table_row(map(plain, row)) for row in rows]
    return "\n".join(lines) + "\n"
