"""The commands `run` and `show`: run a study, or show its cells and its estimated cost."""

from __future__ import annotations

from dataclasses import replace
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Option

from leakgauge.harness.cli import options as cli
from leakgauge.harness.cli.report import DetailsOption, ImagesOption, publish
from leakgauge.harness.core.sinks import say

if TYPE_CHECKING:
    from leakgauge.harness.study.study import Study


def run(
    study: cli.StudyArgument,
    out: Annotated[Path, Option("-o", "--out", help="Folder of the results; the same command resumes.")],
    data: cli.DataOption = None,
    workers: cli.WorkersOption = None,
    engine: cli.EngineOption = "workers",
    address: cli.AddressOption = None,
    device: Annotated[str, Option(help="Where clients train and attacks compute: cpu or cuda.")] = "cpu",
    images: ImagesOption = "public",
    details: DetailsOption = False,
    only: Annotated[str, Option(help="Only cells whose line in 'show' holds this, as in 'gaussian*map*seed 0'.")] = "",
    dry_run: Annotated[bool, Option("--dry-run", help="Only show the cells, and which are finished.")] = False,
    verbose: Annotated[bool, Option("--verbose", help="Also print starts, and the traces of failures.")] = False,
    allow_code: cli.AllowCodeOption = False,
    max_cells: cli.MaxCellsOption = 20_000,
    max_number: cli.MaxNumberOption = 1_000_000,
    merge: Annotated[bool, Option("--merge", help="Keep the cells of other studies in the folder.")] = False,
    reuse: Annotated[bool, Option("--reuse", help="Keep the results that other code made.")] = False,
    fresh_audits: Annotated[bool, Option("--fresh-audits", help="Reuse no audits; also LEAKGAUGE_CACHE=off.")] = False,
    cell_timeout: Annotated[float | None, Option(min=0, help="Seconds that a training or an attack may take.")] = None,
    cell_memory: Annotated[int | None, Option(min=0, metavar="MB", help="Memory limit of a worker process.")] = None,
) -> None:
    """Run a study, print a line for each defense, and write the report; DIR/run.log lists every job."""
    from leakgauge.harness.study.engines.workers import warm_up

    if workers != 0 and not dry_run:
        warm_up()  # workers import modules in parallel with this process
    from leakgauge.harness.cli.progress import listener, logged
    from leakgauge.harness.study.check import check_study
    from leakgauge.harness.study.engine import open_engine
    from leakgauge.harness.study.run import run_study
    from leakgauge.harness.study.schedule import Limits
    from leakgauge.harness.study.study import load_study

    with cli.computed_anew(fresh_audits), cli.bugs(out / "run.log", verbose=verbose), cli.user_errors():
        whole = load_study(study, allow_code=allow_code, max_cells=max_cells, max_number=max_number)
        loaded = _chosen(whole, only)
        if dry_run:
            check_study(loaded, data)
            _print_study(loaded, data, out)
            return
        opened = open_engine(engine, address, workers, allow_code=allow_code)
        with listener(loaded.name) as listen:
            heard = logged(listen, out, verbose=verbose)
            finished = run_study(
                loaded,
                out,
                data=data,
                workers=workers,
                device=device,
                listen=heard,
                merge=merge,
                part=bool(only),
                reuse=reuse,
                limits=Limits(cell_timeout, cell_memory),
                engine=opened,
            )
        publish(finished, out, images, details=details)


def _chosen(study: Study, pattern: str) -> Study:
    """The study with only the cells whose text holds the pattern, ignoring case; an empty pattern keeps all cells."""
    from leakgauge.harness.core.errors import StudyError
    from leakgauge.harness.core.labels import Names

    names = Names()
    texts = [(cell, names.cell(cell)) for cell in study.cells]
    cells = tuple(cell for cell, text in texts if fnmatch(text.casefold(), f"*{pattern.casefold()}*"))
    if not cells:
        raise StudyError(study.name, [f"--only: no cell holds {pattern!r}; the first of {len(texts)}: {texts[0][1]}"])
    return replace(study, cells=cells)


def show(
    study: cli.StudyArgument,
    data: cli.DataOption = None,
    as_json: cli.JsonOption = False,
    allow_code: cli.AllowCodeOption = False,
    max_cells: cli.MaxCellsOption = 20_000,
    max_number: cli.MaxNumberOption = 1_000_000,
) -> None:
    """Show the cells of a study and their estimated run time, which takes ten seconds; refuses what 'run' refuses."""
    from leakgauge.harness.core.stored import to_data
    from leakgauge.harness.study.check import check_study
    from leakgauge.harness.study.study import load_study

    with cli.user_errors():
        loaded = load_study(study, allow_code=allow_code, max_cells=max_cells, max_number=max_number)
        check_study(loaded, data)
    if as_json:
        cells = [{"id": cell.id, **to_data(cell)} for cell in loaded.cells]
        cli.print_json({"name": loaded.name, "title": loaded.title, "hash": loaded.hash, "cells": cells})
    else:
        _print_study(loaded, data)


def _print_study(study: Study, data: Path | None, folder: Path | None = None) -> None:
    from leakgauge.harness.core.labels import part_text, server_text, where
    from leakgauge.harness.data import default_root
    from leakgauge.harness.study.cost import estimate
    from leakgauge.harness.study.environment import code_of
    from leakgauge.harness.study.goal import goal_of
    from leakgauge.harness.study.store import Store

    store = None if folder is None else Store(folder)

    say(f"{study.name}: {len(study.cells)} cells on {len(study.trainings)} trainings, hash {study.hash}")
    for training in study.trainings:
        federation, goal = training.federation, goal_of(training.defense)
        solved = part_text(training.defense) if goal is None else f"{training.defense.name} for {goal.text}"
        clients = f"{federation.participants or federation.clients} of {federation.clients} clients"
        size = f"{federation.algorithm}, {federation.rounds} rounds, {clients}, server {server_text(training)}"
        task = f"{training.task.data} {training.task.model}"
        say("", f"training {training.id}  {task}  {solved}  seed {training.seed}  {size}")
        for cell in study.cells_of[training.id]:
            size = f"{cell.target.count} x {cell.target.batch}"
            stored = None if store is None else store.examine(store.cell(cell.id))
            other = stored and stored.code != code_of(training, cell.attack, cell.threat)
            done = f"  finished{' by other code' if other else ''}" if stored and stored.value is not None else ""
            say(f"  {cell.id}  {part_text(cell.attack)}  {where(cell.target)}, {size}, by {cell.threat}{done}")
    say("", *str(estimate(study, data or default_root())).splitlines())
