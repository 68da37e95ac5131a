"""The page of reproduction: what holds of each paper, the statements by recipe, then each recipe with its figures.

`scoreboard` is the same without figures, as Markdown, from the data of recipes as `reproduce.json` has them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

from leakgauge.harness.core.cases import gathered
from leakgauge.harness.core.labels import counted
from leakgauge.harness.query.lines import Reproduced
from leakgauge.harness.query.statements import Judged, Verdict
from leakgauge.reports.charts.figures import Chart, slug
from leakgauge.reports.html import page
from leakgauge.reports.sections import Section
from leakgauge.reports.sections.asked import charts_of, drawing, shown
from leakgauge.reports.table import Cell, Column, Fields, Table

_HEADS = {
    Verdict.CONFIRMED: "Holds",
    Verdict.IN_PART: "Holds on average, but not everywhere",
    Verdict.EQUAL: "No difference, where one is published",
    Verdict.CONTRADICTED: "Does not hold",
}
_FEW = 3  # statements of a paper with one verdict that stand first; all are in the tables
_OPEN = (Verdict.UNRESOLVED, Verdict.NOT_RUN)
_PAPERS = """
<h2 id="papers-title">What holds, and what does not</h2>
{% from "macros.html" import chart %}
{% for name, lead, lines, picture in data %}
<div class="charts">
<div>
<h3>{{ name }}</h3>
<p class="lead">{{ lead }}</p>
<ul>{% for head, texts in lines %}<li><b>{{ head }}:</b> {{ texts }}</li>{% endfor %}</ul>
</div>
{% if picture %}{{ chart(picture, "paper-%d"|format(loop.index), "h4") }}{% endif %}
</div>
{% endfor %}
"""


def reproduction(recipes: Sequence[Reproduced]) -> str:
    """The page; it loads nothing, and the same recipes give the same page."""
    papers = Section("papers", "What holds, and what does not", "Papers", _papers, template=_PAPERS)
    board = Section("scoreboard", "Published statements by recipe", "Statements", _scoreboard)
    recipe = '{% include "recipe.html" %}'
    parts: list[Section[Sequence[Reproduced]]] = [
        Section(slug(one.name), one.name, one.name, partial(_at, number=at), template=recipe)
        for at, one in enumerate(recipes)
    ]
    return page("reproduction", [papers, board, *parts], recipes)


def by_paper(recipes: Sequence[Reproduced]) -> dict[str, list[Reproduced]]:
    """The recipes of each paper, by the first part of their names."""
    return gathered((recipe.name.partition("/")[0], recipe) for recipe in recipes)


def picture(alike: Sequence[Reproduced]) -> Chart | None:
    """The chart that stands for a paper: of its figure with `headline`, else its first; None: no figure is drawn."""
    drawn = [figure for recipe in alike for figure in recipe.figures if not isinstance(figure[1], str)]
    drawn.sort(key=lambda figure: not figure[0].headline)
    return next(iter(charts_of(drawn[:1])), None)


def _papers(recipes: Sequence[Reproduced]) -> list[tuple[str, str, list[tuple[str, str]], dict[str, Any] | None]]:
    return [
        (
            name,
            *_summed(_published(one for recipe in alike for one in recipe.judged), alike[0].size),
            None if (chart := picture(alike)) is None else drawing(chart, f"paper-{slug(name)}"),
        )
        for name, alike in by_paper(recipes).items()
    ]


def _published(judged: Iterable[Judged]) -> list[tuple[Verdict, str]]:
    return [(one.verdict, one.statement.text) for one in judged if not one.statement.own]


def _summed(published: Sequence[tuple[Verdict, str]], size: str) -> tuple[str, list[tuple[str, str]]]:
    """A paper in a sentence, and a line for each verdict with a few of its statements, spread over the recipes."""
    said = gathered(published)
    lines = [(f"{head}, {len(said[kind])}", _few(said[kind])) for kind, head in _HEADS.items() if kind in said]
    left = ", ".join(f"{len(said[kind])} {str(kind).lower()}" for kind in _OPEN if kind in said)
    lines += [("Open", f"{left}.")] if left else []
    holds = len(said.get(Verdict.CONFIRMED, ()))
    return f"Of {counted(len(published), 'published statement')}, {holds} hold at the size {size}.", lines


def _few(texts: Sequence[str]) -> str:
    some = texts[:: math.ceil(len(texts) / _FEW)]
    left = len(texts) - len(some)
    return "; ".join([*some, f"and {left} more"] if left else some) + "."


def _at(recipes: Sequence[Reproduced], number: int) -> dict[str, object]:
    made = recipes[number]
    return {"made": made, "asked": shown(made.judged, made.figures, slug(made.name))}


def _counts(published: Sequence[tuple[Verdict, str]]) -> dict[Verdict, int]:
    return {kind: sum(verdict is kind for verdict, _ in published) for kind in Verdict}


def _lead(published: Sequence[tuple[Verdict, str]], recipes: int) -> str:
    words = ", ".join(f"{count} {str(kind).lower()}" for kind, count in _counts(published).items() if count)
    return f"{counted(len(published), 'published statement')} of {counted(recipes, 'recipe')}: {words}."


def _scoreboard(recipes: Sequence[Reproduced]) -> Table:
    rows: list[Fields] = []
    for recipe in recipes:
        ours = sum(one.statement.own for one in recipe.judged)
        counts = (str(count or "") for count in (*_counts(_published(recipe.judged)).values(), ours))
        rows.append((Cell(recipe.name, link=slug(recipe.name)), recipe.title, *counts))
    lead = _lead(_published(one for recipe in recipes for one in recipe.judged), len(recipes))
    numbers = [Column(name, "num") for name in (*map(str, Verdict), "Our own")]
    return Table("Published statements by recipe", ("Recipe", "Title", *numbers), tuple(rows), lead)


def scoreboard(recipes: Sequence[dict[str, Any]], pictures: Mapping[str, str] = MappingProxyType({})) -> str:
    """What holds of each paper, then every statement with its verdict, as Markdown for a page under version control.

    Args:
        recipes: as `reproduce.json` has them, with `made_by`.
        pictures: the address of a paper's picture.
    """
    return "\n".join([_lead(_said(recipes), len(recipes)), *_scored(recipes, pictures)]) + "\n"


def _said(recipes: Sequence[dict[str, Any]]) -> list[tuple[Verdict, str]]:
    claims = (claim for recipe in recipes for claim in recipe["claims"] if not claim["own"])
    return [(Verdict(claim["verdict"]), claim["text"]) for claim in claims]


def _scored(recipes: Sequence[dict[str, Any]], pictures: Mapping[str, str]) -> Iterator[str]:
    for paper, alike in gathered((recipe["name"].partition("/")[0], recipe) for recipe in recipes).items():
        lead, lines = _summed(_said(alike), alike[0]["size"])
        made_by = "; ".join(dict.fromkeys(text for recipe in alike for text in recipe["made_by"]))
        columns = ("recipe", "statement", "verdict", "measured", "printed")
        claims = ((recipe["name"], claim) for recipe in alike for claim in recipe["claims"])
        rows = tuple(_row(name, claim) for name, claim in sorted(claims, key=lambda pair: bool(pair[1]["own"])))
        notes = tuple(f"{recipe['name']}: {note}." for recipe in alike for note in _lines(recipe))
        code = f"{lead} Code and machine: {made_by}."
        yield from ("", f"## {paper}", "", *(f"- **{head}**: {texts}" for head, texts in lines))
        yield from ("", f"![A figure of {paper}]({pictures[paper]})") if paper in pictures else ()
        yield from ("", Table(f"Statements of {paper}", columns, rows, code, notes).markdown())


def _lines(recipe: dict[str, Any]) -> list[str]:
    """What runs otherwise than printed, then what the paper leaves open, as on the recipe's own page."""
    return [*recipe["notes"], *(f"the paper leaves open: {line}" for line in recipe["unstated"])]


def _row(name: str, claim: dict[str, Any]) -> Fields:
    text = f"{claim['text']}{' (ours)' * claim['own']}"
    return name, text, claim["verdict"], claim["measured"], claim["printed"]
