"""The page about recipes: a scoreboard, then each recipe with its claims and figures; the scoreboard as Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from leakgauge.harness.core.cases import gathered
from leakgauge.harness.core.labels import counted
from leakgauge.harness.query.lines import Reproduced
from leakgauge.harness.query.statements import Judged, Verdict
from leakgauge.reports.charts.figures import slug
from leakgauge.reports.html import page
from leakgauge.reports.sections import Section
from leakgauge.reports.sections.asked import shown
from leakgauge.reports.table import Cell, Column, Fields, Table


def reproduction(recipes: Sequence[Reproduced]) -> str:
    """The page; it loads nothing, and the same recipes give the same page."""
    board = Section("scoreboard", "Reproduction of published tables and figures", "Scoreboard", _scoreboard)
    recipe = '{% include "recipe.html" %}'
    parts: list[Section[Sequence[Reproduced]]] = [
        Section(slug(one.name), one.name, one.name, partial(_at, number=at), template=recipe)
        for at, one in enumerate(recipes)
    ]
    return page("reproduction", [board, *parts], recipes)


def _at(recipes: Sequence[Reproduced], number: int) -> dict[str, object]:
    made = recipes[number]
    return {"made": made, "asked": shown(made.judged, made.figures, slug(made.name))}


def _scoreboard(recipes: Sequence[Reproduced]) -> Table:
    counts = [
        [sum(one.verdict is kind and not one.statement.own for one in recipe.judged) for kind in Verdict]
        + [sum(one.statement.own for one in recipe.judged)]
        for recipe in recipes
    ]
    totals = dict(zip(Verdict, map(sum, zip(*counts, strict=True)), strict=False))
    words = ", ".join(f"{count} {str(kind).lower()}" for kind, count in totals.items() if count)
    rows: list[Fields] = [
        (Cell(recipe.name, link=slug(recipe.name)), recipe.title, *(str(count or "") for count in row))
        for recipe, row in zip(recipes, counts, strict=True)
    ]
    lead = f"{counted(sum(totals.values()), 'published statement')} of {counted(len(recipes), 'recipe')}: {words}."
    columns: tuple[Column | str, ...] = (
        "Recipe",
        "Title",
        *(Column(str(kind), "num") for kind in Verdict),
        Column("Our own", "num"),
    )
    return Table("Published statements by recipe", columns, tuple(rows), lead)


def scoreboard(recipes: Sequence[Reproduced]) -> str:
    """Every statement with its verdict as Markdown, one table for each paper, for a page under version control."""
    parts = [_scoreboard(recipes).lead]
    for paper, alike in gathered((recipe.name.partition("/")[0], recipe) for recipe in recipes).items():
        made_by = "; ".join(dict.fromkeys(text for recipe in alike for text in recipe.made_by))
        columns = ("recipe", "statement", "verdict", "measured", "printed")
        claims = ((recipe.name, claim) for recipe in alike for claim in recipe.judged)
        rows = tuple(_row(name, one) for name, one in sorted(claims, key=lambda pair: pair[1].statement.own))
        notes = tuple(f"{recipe.name}: {note}." for recipe in alike for note in recipe.notes)
        lead = f"Size {alike[0].size}, code and machine: {made_by}."
        parts += ["", Table(paper, columns, rows, lead, notes).markdown()]
    return "\n".join(parts) + "\n"


def _row(name: str, one: Judged) -> Fields:
    text = f"{one.statement.text}{' (ours)' * one.statement.own}"
    return name, text, str(one.verdict), one.measured, one.statement.printed
