"""Run recipes, check their claims and compute their figures."""

from __future__ import annotations

import dataclasses
import json
import math
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from leakgauge.harness.core.cell import Size
from leakgauge.harness.core.lines import Panel, draw
from leakgauge.harness.core.points import Value, values
from leakgauge.harness.core.statements import Judged, Statement, Verdict, judge
from leakgauge.harness.study.recipes import Recipe, recipe
from leakgauge.harness.study.run import run_study
from leakgauge.harness.study.schedule import Listener
from leakgauge.harness.study.store import write_atomically

NAME = "reproduce.json"


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The result of a recipe. `figures`: the panels of each figure, or why the figure could not be drawn."""

    recipe: Recipe
    size: Size
    judged: tuple[Judged, ...]
    figures: tuple[tuple[Panel, ...] | str, ...]
    failures: tuple[str, ...] = ()

    @property
    def verdicts(self) -> Counter[Verdict]:
        """The number of claims with each verdict."""
        return Counter(one.verdict for one in self.judged)

    @property
    def shown(self) -> dict[str, Any]:
        """The content of the recipe's section on the page."""
        made, drawn = self.recipe, zip(self.recipe.study.figures, self.figures, strict=True)
        return {
            "name": made.name,
            "title": made.study.title,
            "source": made.source,
            "size": self.size,
            "unstated": made.unstated,
            "notes": made.notes,
            "missing": made.missing,
            "failures": self.failures,
            "judged": self.judged,
            "figures": tuple(drawn),
        }

    @property
    def data(self) -> dict[str, Any]:
        """The outcome as plain data for JSON; the same recipe, code and data give the same bytes."""
        rest = {name: value for name, value in self.shown.items() if name not in ("judged", "figures")}
        figures = [
            {
                "title": figure.title,
                **({"error": found} if isinstance(found, str) else {"panels": list(map(_panel, found))}),
            }
            for figure, found in self.shown["figures"]
        ]
        return {**rest, "claims": [_claim(one) for one in self.judged], "figures": figures}


def _claim(one: Judged) -> dict[str, Any]:
    """A claim as plain data."""
    return {
        "text": one.statement.text,
        "where": one.where,
        "verdict": str(one.verdict),
        "measured": one.measured,
        "printed": one.statement.printed,
        "p": one.p,
        "seeds_needed": one.seeds,
    }


def _panel(panel: Panel) -> dict[str, Any]:
    """A panel as plain data; JSON has no infinity."""
    lines = [
        {
            "label": line.label,
            "level": _finite(line.level),
            "spots": [[_finite(part) for part in spot] for spot in line.spots],
        }
        for line in panel.lines
    ]
    return {"title": panel.title, "names": list(panel.names), "lines": lines}


def _finite(value: float | None) -> float | str | None:
    """The number in a form that JSON can hold."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def evaluate(made: Recipe, size: Size, found: Sequence[Value], failures: Sequence[str] = ()) -> Outcome:
    """The claims and figures of a recipe on the values of its study."""
    known = [*found, *made.computed()] if not made.missing else []
    claims = made.study.claims
    if made.missing:
        claims = tuple(dataclasses.replace(one, missing=made.missing) for one in claims)
    judged, panels = judge(claims, known), []
    for figure in made.study.figures:
        try:
            panels.append(tuple(draw(figure, known)) or "no value for it")
        except ValueError as error:
            panels.append(str(error))
    return Outcome(made, size, tuple(judged), tuple(panels), tuple(failures))


def reproduce(
    names: Sequence[str],
    size: Size,
    out: Path,
    root: Path,
    *,
    workers: int | None = None,
    listen: Callable[[str], Listener],
) -> list[Outcome]:
    """Run recipes and write `reproduce.json`; the recipes of a paper share a folder, which keeps finished cells.

    Args:
        listen: gives the listener for the progress of a study, by the study's name.

    Raises:
        StudyError: a recipe is invalid; raised before anything runs.
    """
    made = [recipe(name, size, root) for name in names]
    outcomes = []
    for one in made:
        found, failures = list[Value](), list[str]()
        if one.trains and not one.missing:
            folder = out / size / one.name.partition("/")[0]
            run = run_study(one.study, folder, data=root, workers=workers, listen=listen(one.name), merge=True)
            run = dataclasses.replace(run, cells=one.study.cells)
            found = values(run, quantities(one))
            failed = [run.failures[cell.id] for cell in run.cells if cell.id in run.failures]
            failures = [f"{failure.kind}: {failure.message}" for failure in failed]
        outcomes.append(evaluate(one, size, found, tuple(dict.fromkeys(failures))))
        write(outcomes, out)
    return outcomes


def quantities(made: Recipe) -> set[str]:
    """The quantities that the recipe's figures and claims use."""
    claims: tuple[Statement, ...] = made.study.claims
    return {one.y for one in claims} | {name for figure in made.study.figures for name in figure.quantities}


def write(outcomes: Sequence[Outcome], out: Path) -> None:
    """Write the outcomes so far as JSON."""
    text = json.dumps([one.data for one in outcomes], indent=1, sort_keys=True) + "\n"
    write_atomically(out / NAME, text.encode())
