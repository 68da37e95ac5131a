"""The page about recipes: a scoreboard, then each recipe with its claims and figures; the scoreboard as Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

from leakgauge.harness.core.cases import gathered
from leakgauge.harness.core.labels import counted
from leakgauge.harness.core.lines import Reproduced
from leakgauge.harness.core.sinks import table_head, table_row
from leakgauge.harness.core.statements import Verdict
from leakgauge.reports.charts.figures import slug
from leakgauge.reports.html import Part, page
from leakgauge.reports.sections.asked import Asked, shown
from leakgauge.reports.text.markdown import plain


class _Recipe(NamedTuple):
    """Content of a recipe's section."""

    id: str
    made: Reproduced
    asked: Asked


class _Scoreboard(NamedTuple):
    """Content of the first section."""

    sentence: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, Reproduced, list[int]], ...]


def reproduction(recipes: Sequence[Reproduced]) -> str:
    """The page; it loads nothing, and the same recipes give the same page."""
    parts: list[Part[Sequence[Reproduced]]] = [
        Part("scoreboard", "Reproduction of published tables and figures", "Scoreboard", _scoreboard, _BOARD)
    ]
    parts += [
        Part(slug(one.name), one.name, one.name, partial(_at, number=at), _RECIPE) for at, one in enumerate(recipes)
    ]
    return page("reproduction", parts, recipes)


def _at(recipes: Sequence[Reproduced], number: int) -> _Recipe:
    """The recipe with this number."""
    made = recipes[number]
    return _Recipe(slug(made.name), made, shown(made.judged, made.figures, slug(made.name)))


_BOARD, _RECIPE = ('{% include "' + name + '.html" %}' for name in ("scoreboard", "recipe"))


def _scoreboard(recipes: Sequence[Reproduced]) -> _Scoreboard:
    """The number of claims of each recipe by verdict."""
    rows = [
        (slug(one.name), one, [sum(each.verdict is kind for each in one.judged) for kind in Verdict]) for one in recipes
    ]
    totals = [sum(column) for column in zip(*(counts for _, _, counts in rows), strict=True)]
    words = ", ".join(f"{count} {str(kind).lower()}" for kind, count in zip(Verdict, totals, strict=True) if count)
    text = f"{counted(sum(totals), 'claim')} of {counted(len(recipes), 'recipe')}: {words}."
    return _Scoreboard(text, tuple(map(str, Verdict)), tuple(rows))


def scoreboard(recipes: Sequence[Reproduced]) -> str:
    """Every claim with its verdict as Markdown, one table for each paper, for a page under version control."""
    lines = [_scoreboard(recipes).sentence]
    for paper, here in gathered((one.name.partition("/")[0], one) for one in recipes).items():
        made_by = "; ".join(dict.fromkeys(text for one in here for text in one.made_by))
        lines += ["", f"### {plain(paper)}", "", f"Size {here[0].size}, code and machine: {plain(made_by)}.", ""]
        lines += table_head(["recipe", "claim", "verdict", "measured", "printed"])
        for one in here:
            rows = [(one.name, each.text, each.verdict, each.measured, each.statement.printed) for each in one.judged]
            lines += [table_row(map(plain, row)) for row in rows]
        lines += ["", *(f"- {plain(one.name)}: {plain(note)}." for one in here for note in one.notes)]
    return "\n".join(lines) + "\n"
