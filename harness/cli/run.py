"""The commands `run` and `show`: run a study, or show what it resolves to."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from leakgauge.harness.cli.options import DataOption, JsonOption, StudyArgument, WorkersOption, print_json, user_errors
from leakgauge.harness.cli.report import ImagesOption, publish

if TYPE_CHECKING:
    from leakgauge.harness.study.study import Study


def run(
    study: StudyArgument,
    out: Annotated[Path, typer.Option("-o", "--out", help="Folder of the results; the same command resumes.")],
    data: DataOption = None,
    workers: WorkersOption = None,
    device: Annotated[str, typer.Option(help="Where clients train: cpu or cuda.")] = "cpu",
    images: ImagesOption = "public",
) -> None:
    """Run a study, print its table, and write the report. The same command again resumes."""
    from leakgauge.harness.cli.progress import listener
    from leakgauge.harness.study.run import run_study
    from leakgauge.harness.study.study import load_study

    with user_errors():
        loaded = load_study(study)
        with listener(loaded.name) as listen:
            finished = run_study(loaded, out, data=data, workers=workers, device=device, listen=listen)
        publish(finished, out, images)


def show(study: StudyArgument, as_json: JsonOption = False) -> None:
    """Show the cells that a study resolves to, and about how long they take."""
    from leakgauge.harness.core.result import to_data
    from leakgauge.harness.study.study import load_study

    with user_errors():
        loaded = load_study(study)
    if as_json:
        cells = [{"id": cell.id, **to_data(cell)} for cell in loaded.cells]
        print_json({"name": loaded.name, "title": loaded.title, "hash": loaded.hash, "cells": cells})
    else:
        _print_study(loaded)


def _print_study(study: Study) -> None:
    """Print the trainings with their cells, and the estimated cost."""
    from leakgauge.harness.core.labels import part_text, where
    from leakgauge.harness.study.cost import estimate

    typer.echo(f"{study.name}: {len(study.cells)} cells on {len(study.trainings)} trainings, hash {study.hash}")
    for training in study.trainings:
        federation = training.federation
        typer.echo(
            f"\ntraining {training.id}  {training.task.data} {training.task.model}  {part_text(training.defense)}  "
            f"seed {training.seed}  {federation.algorithm}, {federation.rounds} rounds, "
            f"{federation.participants or federation.clients} of {federation.clients} clients"
        )
        for cell in study.cells_of[training.id]:
            size = f"{cell.target.count} x {cell.target.batch}"
            typer.echo(f"  {cell.id}  {part_text(cell.attack)}  {where(cell.target)}, {size}, by {cell.threat}")
    typer.echo(f"\n{estimate(study)}")
