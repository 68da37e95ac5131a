"""Run recipes, check their claims and compute their figures."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from leakgauge.harness.core.cell import Size
from leakgauge.harness.core.lines import Panel, Reproduced, panels, quantities
from leakgauge.harness.core.points import Value, values
from leakgauge.harness.core.statements import judge
from leakgauge.harness.study.environment import environment
from leakgauge.harness.study.recipes import Recipe, recipe
from leakgauge.harness.study.run import run_study
from leakgauge.harness.study.schedule import Listener
from leakgauge.harness.study.store import write_atomically

NAME = "reproduce.json"


def data(done: Reproduced) -> dict[str, Any]:
    """A recipe's result as plain data for JSON; the same recipe, code and data give the same bytes."""
    kept = ("name", "title", "source", "size", "unstated", "notes", "missing", "failures")
    figures = [
        {"title": figure.title} | ({"error": drawn} if isinstance(drawn, str) else {"panels": list(map(_panel, drawn))})
        for figure, drawn in done.figures
    ]
    claims = [
        {
            "text": judged.statement.text,
            "where": judged.where,
            "verdict": str(judged.verdict),
            "measured": judged.measured,
            "printed": judged.statement.printed,
            "p": judged.p,
            "seeds_needed": judged.seeds,
        }
        for judged in done.judged
    ]
    return {name: getattr(done, name) for name in kept} | {"claims": claims, "figures": figures}


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
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def evaluate(
    made: Recipe, size: Size, found: Sequence[Value], failures: Iterable[str] = (), made_by: Iterable[str] = ()
) -> Reproduced:
    """The claims and figures of a recipe on the values of its study."""
    known = [*found, *made.computed()] if not made.missing else []
    claims, study = made.study.claims, made.study
    if made.missing:
        claims = tuple(dataclasses.replace(claim, missing=made.missing) for claim in claims)
    return Reproduced(
        *(made.name, study.title, made.source, size, made.unstated, made.notes, made.missing),
        failures=tuple(dict.fromkeys(failures)),
        made_by=tuple(sorted(set(made_by))),
        judged=tuple(judge(claims, known)),
        figures=tuple(panels(figure, known) for figure in study.figures),
    )


def reproduce(
    names: Sequence[str],
    size: Size,
    out: Path,
    root: Path,
    *,
    workers: int | None = None,
    listen: Callable[[str], Listener],
) -> list[Reproduced]:
    """Run recipes and write `reproduce.json`; the recipes of a paper share a folder, which keeps finished cells.

    Args:
        listen: gives the listener for the progress of a study, by the study's name.

    Raises:
        StudyError: a recipe is invalid; raised before anything runs.
    """
    outcomes = []
    for made in [recipe(name, size, root) for name in names]:
        measured, failures, behind = list[Value](), list[str](), [environment()]
        if made.trains and not made.missing:
            study, folder = made.study, out / size / made.name.partition("/")[0]
            run = run_study(study, folder, data=root, workers=workers, listen=listen(made.name), merge=True)
            run = dataclasses.replace(run, cells=study.cells)
            measured = values(run, quantities(study.claims, study.figures))
            failed = [run.failures[cell.id] for cell in run.cells if cell.id in run.failures]
            failures = [f"{failure.kind}: {failure.message}" for failure in failed]
            behind = [record.environment for record in run.trainings.values()]
        made_by = (f"{each.commit[:8]}{' with changes' * each.dirty}, {each.machine}" for each in behind)
        outcomes.append(evaluate(made, size, measured, failures, made_by))
        write(outcomes, out)
    return outcomes


def write(outcomes: Sequence[Reproduced], out: Path) -> None:
    """Write the outcomes so far as JSON."""
    text = json.dumps(list(map(data, outcomes)), indent=1, sort_keys=True) + "\n"
    write_atomically(out / NAME, text.encode())
