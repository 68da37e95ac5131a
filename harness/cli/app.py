"""The command `leakgauge`. Heavy imports happen inside the commands: `--help` answers at once."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from leakgauge import __version__
from leakgauge.harness.cli.compare import compare
from leakgauge.harness.cli.gate import gate

if TYPE_CHECKING:
    from leakgauge.harness.core.result import Run
    from leakgauge.harness.study.study import Study

app = typer.Typer(
    name="leakgauge",
    help="Measures how much a federated-learning defense really leaks.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.add_typer(gate)
app.command()(compare)


def _print_version(wanted: bool) -> None:
    """The version, and nothing else."""
    if wanted:
        typer.echo(f"leakgauge {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Measure how much a federated-learning defense really leaks."""


USAGE, INCOMPLETE, INTERRUPTED = 2, 5, 130
"""Exit codes: the study or the call is wrong; a cell failed or is missing; stopped by the user."""

StudyArgument = Annotated[str, typer.Argument(help="A TOML file, or the name of a shipped study.")]
FolderArgument = Annotated[Path, typer.Argument(help="Folder of results that 'leakgauge run' made.")]
DataOption = Annotated[
    Path | None, typer.Option("--data", help="Folder of the data sets; default LEAKGAUGE_DATA or ~/.cache/leakgauge.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]


class Listed(StrEnum):
    """What `leakgauge list` lists."""

    defenses = "defenses"
    attacks = "attacks"
    tasks = "tasks"
    studies = "studies"


class Images(StrEnum):
    """Whose images the report shows."""

    public = "public"
    redact = "redact"
    none = "none"


class Format(StrEnum):
    """What `leakgauge export` writes."""

    md = "md"
    csv = "csv"
    jsonl = "jsonl"


class Layout(StrEnum):
    """How the report lies on disk."""

    file = "file"
    dir = "dir"


@contextmanager
def _usage_errors() -> Iterator[None]:
    """Turn a user's mistake into lines on standard error and exit code 2."""
    from leakgauge.harness.core.errors import StudyError, UnknownNameError
    from leakgauge.harness.gate.baseline import BaselineError
    from leakgauge.harness.study.store import StoreError

    try:
        yield
    except (StudyError, UnknownNameError, StoreError, BaselineError) as error:
        for line in str(error).splitlines():
            typer.echo(f"leakgauge: {line}", err=True)
        raise typer.Exit(USAGE) from error


@app.command()
def run(
    study: StudyArgument,
    out: Annotated[Path, typer.Option("-o", "--out", help="Folder for the results; the same command resumes.")],
    data: DataOption = None,
    workers: Annotated[
        int | None, typer.Option(min=0, help="Processes; default one a core; 0 works in this process.")
    ] = None,
    device: Annotated[str, typer.Option(help="Where clients train: cpu or cuda.")] = "cpu",
    images: Annotated[Images, typer.Option(help="Whose images the report shows.")] = Images.public,
) -> None:
    """Run a study, print its table, and write the report. The same command again resumes."""
    from leakgauge.harness.cli.progress import listener
    from leakgauge.harness.study.run import run_study
    from leakgauge.harness.study.study import load_study
    from leakgauge.harness.study.supervisor import Interrupted

    with _usage_errors():
        loaded = load_study(study)
        try:
            with listener(loaded) as listen:
                finished = run_study(loaded, out, data=data, workers=workers, device=device, listen=listen)
        except (Interrupted, KeyboardInterrupt) as error:
            typer.echo("leakgauge: stopped; what was finished is kept, the same command does the rest", err=True)
            raise typer.Exit(INTERRUPTED) from error
        _print_summary(finished)
        page = _write_report(finished, out, images)
    typer.echo(f"report: {page}")
    _exit_if_incomplete(finished)


@app.command()
def report(
    folder: FolderArgument,
    images: Annotated[Images, typer.Option(help="Whose images the page shows.")] = Images.public,
    layout: Annotated[
        Layout, typer.Option(help="file: one page; dir: a folder, for servers that forbid inline styles and scripts.")
    ] = Layout.file,
    out: Annotated[
        Path | None, typer.Option(help="The page, or the folder of it; default DIR/report.html or DIR/report.")
    ] = None,
    figures: Annotated[
        str, typer.Option(help="Formats, as in png,pdf,svg: write each chart to DIR/figures as well.")
    ] = "",
    against: Annotated[
        Path | None, typer.Option(help="A baseline, or another folder of results: a section on what changed.")
    ] = None,
) -> None:
    """Write the HTML report of a folder of results anew, and print its table."""
    from leakgauge.harness.study.store import load_run, write_atomically
    from leakgauge.reports.charts.files import figure_files, formats
    from leakgauge.reports.select import Analysis

    try:
        kinds = formats(figures)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="'--figures'") from error
    with _usage_errors():
        finished = load_run(folder)
        _print_summary(finished)
        page = _write_report(finished, folder, images, layout, out, against)
        for name, content in figure_files(Analysis(finished), kinds):
            write_atomically(folder / "figures" / name, content)
    typer.echo(f"report: {page}")
    _exit_if_incomplete(finished)


@app.command()
def export(
    folder: FolderArgument,
    to: Annotated[
        Format, typer.Option(help="md: the leakage matrix; csv, jsonl: a line a cell, with all estimates.")
    ] = Format.md,
) -> None:
    """Print the results of a folder as a table for other programs."""
    from leakgauge.harness.study.store import load_run
    from leakgauge.reports.export import to_csv, to_jsonl
    from leakgauge.reports.select import Analysis
    from leakgauge.reports.text.markdown import to_markdown

    with _usage_errors():
        analysis = Analysis(load_run(folder))
    write = {Format.md: to_markdown, Format.csv: to_csv, Format.jsonl: to_jsonl}[to]
    typer.echo(write(analysis), nl=False)


@app.command("list")
def list_(what: Annotated[Listed, typer.Argument(help="What to list.")], as_json: JsonOption = False) -> None:
    """List what there is, with a line on each."""
    from leakgauge.harness.study import study

    rows: list[dict[str, Any]]
    if what is Listed.studies:
        rows = [{"name": name, "summary": title} for name, title in study.shipped().items()]
    elif what is Listed.tasks:
        rows = _task_rows()
    else:
        from leakgauge.harness.federation import registry

        kind: Any = "defense" if what is Listed.defenses else "attack"
        rows = [
            {"name": name, "summary": registry.summary(kind, name), "parameters": registry.defaults(kind, name)}
            for name in registry.classes(kind)
        ]
    if as_json:
        typer.echo(json.dumps(rows, indent=1))
        return
    width = max(len(row["name"]) for row in rows)
    for row in rows:
        kind = f"[{row['kind']}] " if "kind" in row else ""
        typer.echo(f"{row['name']:<{width}}  {kind}{row['summary']}")
        if row.get("parameters"):
            inside = ", ".join(f"{key}={value!r}" for key, value in row["parameters"].items())
            typer.echo(f"{'':<{width}}  {inside}")


def _task_rows() -> list[dict[str, Any]]:
    """Data sets and models: a task is one of each."""
    from leakgauge.harness import data
    from leakgauge.harness.learn import models

    return [
        {"name": name, "summary": summary, "kind": kind}
        for kind, known in (("data", data.names()), ("model", models.names()))
        for name, summary in known
    ]


@app.command()
def show(study: StudyArgument, as_json: JsonOption = False) -> None:
    """Show what a study resolves to: its cells, and about how long they take."""
    from leakgauge.harness.core.result import to_data
    from leakgauge.harness.study.study import load_study

    with _usage_errors():
        loaded = load_study(study)
    if as_json:
        cells = [{"id": cell.id, **to_data(cell)} for cell in loaded.cells]
        said = {"name": loaded.name, "title": loaded.title, "hash": loaded.hash, "cells": cells}
        typer.echo(json.dumps(said, indent=1))
        return
    _print_study(loaded)


@app.command()
def claim(
    defense: Annotated[str, typer.Argument(help="Name of a defense, or of two as in laplace+sdq.")],
    set_: Annotated[list[str] | None, typer.Option("--set", help="A parameter, as key=value; may be repeated.")] = None,
    rounds: Annotated[int | None, typer.Option(help="Rounds that the claim covers.")] = None,
    delta: Annotated[float | None, typer.Option(help="Delta at which to say what holds; default the claim's.")] = None,
    setting: Annotated[
        list[str] | None,
        typer.Option(help="Of the federation, as key=value: dim, clients, participants, samples, steps, batch, lr."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Say what a defense claims, what provably holds, and the verdict."""
    from leakgauge.harness.audit.claims import ask, assignments

    with _usage_errors():
        found = ask(defense, assignments(set_ or [], "--set"), assignments(setting or [], "--setting"), rounds, delta)
    if as_json:
        typer.echo(json.dumps(found, indent=1))
        return
    _print_claim(found)


@app.command()
def audit(
    defense: Annotated[str, typer.Argument(help="Name of a defense, or of two as in laplace+sdq.")],
    set_: Annotated[list[str] | None, typer.Option("--set", help="A parameter, as key=value; may be repeated.")] = None,
    by: Annotated[
        str, typer.Option(help="trials; messages of a real training; canary clients in one-run; cosine: an estimate.")
    ] = "trials",
    rounds: Annotated[int | None, typer.Option(help="Rounds of a trial, or of the run.")] = None,
    trials: Annotated[int | None, typer.Option(help="Trials with each of the two inputs; default 1000.")] = None,
    confidence: Annotated[float | None, typer.Option(help="Of the lower bound; default 0.95.")] = None,
    threat: Annotated[
        str | None, typer.Option(help="Who looks; default the adversary of the claim who sees most.")
    ] = None,
    setting: Annotated[
        list[str] | None,
        typer.Option(help="Of the federation, as key=value: dim, clients, participants, samples, steps, batch, lr."),
    ] = None,
    seed: Annotated[int, typer.Option(help="Of everything that is drawn.")] = 0,
    as_json: JsonOption = False,
) -> None:
    """Audit a defense on two neighboring inputs, alone or inside a run: a measured lower bound under its claim."""
    from leakgauge.harness.audit.claims import assignments
    from leakgauge.harness.audit.standalone import ask_audit

    with _usage_errors():
        found = ask_audit(
            defense,
            assignments(set_ or [], "--set"),
            assignments(setting or [], "--setting"),
            rounds,
            by=by,
            trials=trials,
            confidence=confidence,
            threat=threat,
            seed=seed,
        )
    if as_json:
        typer.echo(json.dumps(found, indent=1))
        return
    _print_claim(found)


def _print_claim(found: dict[str, Any]) -> None:
    """Claimed, proved and the verdict, for people."""
    claimed, proved = found["claimed"], found["proved"]
    parameters = ", ".join(f"{key}={value}" for key, value in found["parameters"].items() if value is not None)
    typer.echo(f"{found['defense']}({parameters})")
    rows = [("claimed", claimed, f"{claimed['source']}, {claimed['adjacency']}" if claimed["source"] else "")]
    rows += [("proved", proved, proved["method"])] + [("", proof, proof["method"]) for proof in found["further"]]
    for label, row, how in rows:
        epsilon = row["epsilon"] if row["epsilon"] == "inf" else f"{row['epsilon']:.6g}"
        to = f", against {_adversaries(row['against'])}" if row["against"] else ""
        note = f": {row['reason']}" if label == "" else ""
        typer.echo(
            f"  {label:<8} epsilon {epsilon} a {row['unit']}, delta {row['delta']:g}, {claimed['horizon']}{to}"
            f"{f' ({how})' if how else ''}{note}"
        )
    if "audited" in found:
        from leakgauge.harness.audit.standalone import lines

        typer.echo("\n".join(lines(found["audited"])))
    for text in claimed["assumes"]:
        typer.echo(f"  assumes  {text}")
    typer.echo(f"  {found['verdict']}: {found['reason']}")


def _adversaries(names: list[str]) -> str:
    """Everybody, or the names."""
    from leakgauge.harness.core.threats import Threat

    return "everybody" if len(names) == len(Threat) else ", ".join(names)


def _print_study(study: Study) -> None:
    """Trainings with their cells, and the estimated cost."""
    from leakgauge.harness.study.cost import estimate

    typer.echo(f"{study.name}: {len(study.cells)} cells on {len(study.trainings)} trainings, hash {study.hash}")
    for training in study.trainings:
        where = training.federation
        typer.echo(
            f"\ntraining {training.id}  {training.task.data} {training.task.model}  {training.defense.label}  "
            f"seed {training.seed}  {where.algorithm}, {where.rounds} rounds, "
            f"{where.participants or where.clients} of {where.clients} clients"
        )
        for cell in study.cells_of[training.id]:
            at = "" if cell.target.round is None else f" at round {cell.target.round}"
            size = f"{cell.target.count} x {cell.target.batch}"
            typer.echo(f"  {cell.id}  {cell.attack.label}  {cell.target.kind}{at}, {size}, by {cell.threat}")
    typer.echo(f"\n{estimate(study)}")


def _print_summary(finished: Run) -> None:
    """The table of the results."""
    from rich.console import Console

    from leakgauge.reports.text.tables import summary

    width = None if sys.stdout.isatty() else int(os.environ.get("COLUMNS", "140"))
    Console(width=width).print(summary(finished))


def _write_report(
    finished: Run,
    folder: Path,
    images: Images,
    layout: Layout = Layout.file,
    out: Path | None = None,
    against: Path | None = None,
) -> Path:
    """Write the report, by default to DIR/report.html or DIR/report; return its page."""
    from leakgauge.harness.gate import baseline
    from leakgauge.harness.gate.judge import Rules, judge
    from leakgauge.harness.gate.measure import measured
    from leakgauge.harness.study.store import write_atomically
    from leakgauge.reports.layout import report_files, stale_pictures
    from leakgauge.reports.sections.changes import Against

    compared = None
    if against is not None:
        now, base = measured(finished), baseline.of(against)
        compared = Against(judge(now, base.measured, Rules(), noise_sd=base.noise_sd), now, base)
    place = out or folder / ("report.html" if layout is Layout.file else "report")
    files = report_files(finished, place, layout.value, images=images.value, against=compared)
    for path, content in files.items():
        write_atomically(path, content)
    for old in stale_pictures(place, files):
        old.unlink()
    return list(files)[-1]


def _exit_if_incomplete(finished: Run) -> None:
    """Say what has no result, and exit with the code for it."""
    for failure in finished.failures.values():
        typer.echo(f"leakgauge: failed: {failure.cell.label}: {failure.message}", err=True)
    if finished.missing:
        typer.echo(f"leakgauge: {len(finished.missing)} cells have no result yet", err=True)
    if finished.failures or finished.missing:
        raise typer.Exit(INCOMPLETE)


def main() -> None:
    """Entry point of the console script."""
    app()
