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
from leakgauge.harness.core.lines import Panel, panels, quantities
from leakgauge.harness.core.points import Value, values
from leakgauge.harness.core.statements import Judged, Verdict, judge
from leakgauge.harness.study.environment import environment
from leakgauge.harness.study.recipes import Recipe, recipe
from leakgauge.harness.study.run import run_study
from leakgauge.harness.study.schedule import Listener
from leakgauge.harness.study.store import write_atomically

NAME = "reproduce.json"


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The result of a recipe.

    Attributes:
        figures: the panels of each figure, or why the figure could not be drawn.
        made_by: the commits and machines of its trainings; of the current process if nothing was trained.
    """

    recipe: Recipe
    size: Size
    judged: tuple[Judged, ...]
    figures: tuple[tuple[Panel, ...] | str, ...]
    failures: tuple[str, ...] = ()
    made_by: tuple[str, ...] = ()

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
            "made_by": self.made_by,
            "judged": self.judged,
            "figures": tuple(drawn),
        }

    @property
    def data(self) -> dict[str, Any]:
        """The outcome as plain data for JSON; the same recipe, code and data give the same bytes."""
        rest = {name: value for name, value in self.shown.items() if name not in ("made_by", "judged", "figures")}
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


def evaluate(
    made: Recipe, size: Size, found: Sequence[Value], failures: Sequence[str] = (), made_by: Sequence[str] = ()
) -> Outcome:
    """The claims and figures of a recipe on the values of its study."""
    known = [*found, *made.computed()] if not made.missing else []
    claims = made.study.claims
    if made.missing:
        claims = tuple(dataclasses.replace(one, missing=made.missing) for one in claims)
    drawn = tuple(panels(figure, known) for figure in made.study.figures)
    return Outcome(made, size, tuple(judge(claims, known)), drawn, tuple(failures), tuple(made_by))


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
        found, failures, behind = list[Value](), list[str](), [environment()]
        if one.trains and not one.missing:
            folder = out / size / one.name.partition("/")[0]
            run = run_study(one.study, folder, data=root, workers=workers, listen=listen(one.name), merge=True)
            run = dataclasses.replace(run, cells=one.study.cells)
            found = values(run, quantities(one.study.claims, one.study.figures))
            failed = [run.failures[cell.id] for cell in run.cells if cell.id in run.failures]
            failures = [f"{failure.kind}: {failure.message}" for failure in failed]
            behind = [record.environment for record in run.trainings.values()]
        made_by = sorted({f"{each.commit[:8]}{' with changes' * each.dirty}, {each.machine}" for each in behind})
        outcomes.append(evaluate(one, size, found, tuple(dict.fromkeys(failures)), made_by))
        write(outcomes, out)
    return outcomes


def write(outcomes: Sequence[Outcome], out: Path) -> None:
    """Write the outcomes so far as JSON."""
    text = json.dumps([one.data for one in outcomes], indent=1, sort_keys=True) + "\n"
    write_atomically(out / NAME, text.encode())
