"""The commands on folders of results: `report`, `export`, `compare`, `view`, `verify` and `sign`."""

from __future__ import annotations

import threading
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from typer import Argument, Option

from leakgauge.harness.cli import options as cli
from leakgauge.harness.core.sinks import emit, say

if TYPE_CHECKING:
    from leakgauge.harness.core.result import Run
    from leakgauge.reports.sections.changes import Against

Images = Literal["public", "redact", "none"]
Layout = Literal["file", "dir"]
ImagesOption = Annotated[Images, Option(metavar="WHICH", help="public: of public data; redact: placeholders; none.")]
DetailsOption = Annotated[bool, Option("--details", help="Also print what each attack found.")]


def report(
    folder: cli.FolderArgument,
    images: ImagesOption = "public",
    layout: Annotated[Layout, Option(help="dir: a folder for servers that forbid inline styles or scripts.")] = "file",
    out: Annotated[Path | None, Option(help="The page, or its folder; default: DIR/report.html or DIR/report.")] = None,
    figures: cli.FiguresOption = "",
    against: Annotated[Path | None, Option(help="A baseline or other results: adds a section on the changes.")] = None,
    reader: Annotated[
        Literal["researcher", "officer"],
        Option("--for", help="officer: four pages in plain words on one defense, to DIR/dossier.html."),
    ] = "researcher",
    defense: Annotated[str, Option(help="The defense of the officer's pages; default: the worst-rated one.")] = "",
    details: DetailsOption = False,
) -> None:
    """Write the HTML report of a folder of results again, and print a line for each defense."""
    from leakgauge.harness.study.store import load_run, write_atomically
    from leakgauge.reports.charts.files import figure_files
    from leakgauge.reports.dossier.pages import render as dossier
    from leakgauge.reports.select import Analysis

    kinds = cli.figure_formats(figures)
    if reader == "officer":
        if kinds or against or layout != "file":
            raise cli.refusal(cli.USAGE, "--figures, --against and --layout dir need --for researcher")
        with cli.user_errors():
            finished, place = load_run(folder), out or folder / "dossier.html"
            write_atomically(place, dossier(finished, defense=defense, images=images).encode())
        say(f"dossier: {place}")
        _require_complete(finished)
        return
    if defense:
        raise cli.refusal(cli.USAGE, "--defense needs --for officer")
    with cli.user_errors():
        finished = load_run(folder)
        for name, content in figure_files(Analysis(finished), kinds) if kinds else ():
            write_atomically(folder / "figures" / name, content)
        publish(finished, folder, images, layout, out, against, details=details)


def export(
    folder: cli.FolderArgument,
    to: Annotated[
        Literal["csv", "parquet", "tex", "md", "json", "jsonl", "matrix", "wandb", "mlflow"],
        Option(
            metavar="FORMAT",
            help="csv, parquet, tex, md: one row per value; jsonl: one line per cell; matrix: Markdown by attack; "
            "json: with --table; wandb, mlflow: one run of the tracker for each training and each attack.",
        ),
    ] = "matrix",
    out: Annotated[Path | None, Option("-o", "--out", help="A file; default: standard output.")] = None,
    table: Annotated[str, Option(help="A table of the report, such as ratings or claims: csv, tex, md, json.")] = "",
    quantity: Annotated[list[str] | None, Option(help="Only rows of this quantity, such as ssim; repeatable.")] = None,
    columns: Annotated[str, Option(help="Only these columns, as in defense,attack,value,low,high.")] = "",
    items: Annotated[bool, Option("--items", help="Also one row for each victim or record.")] = False,
    digits: Annotated[int, Option(min=1, max=17, help="Significant digits in tex and md.")] = 4,
) -> None:
    """Write the results of a folder for other programs."""
    from leakgauge.harness.study.store import load_run, write_atomically
    from leakgauge.reports.export import rows_as, section_as, to_jsonl
    from leakgauge.reports.select import Analysis
    from leakgauge.reports.text.tables import to_matrix
    from leakgauge.reports.trackers import send

    names = [name for name in columns.split(",") if name]
    with cli.user_errors():
        loaded = load_run(folder)
        if table and (to not in ("csv", "tex", "md", "json") or quantity or names or items):
            raise cli.refusal(cli.USAGE, f"--table is whole, as csv, tex, md or json; got {to}")
        if to == "json" and not table:
            raise cli.refusal(cli.USAGE, "json needs --table, such as --table claims; jsonl has one line per cell")
        if to in ("jsonl", "matrix", "wandb", "mlflow") and (quantity or names or items):
            rows = "--quantity, --columns and --items need a format with rows: csv, parquet, tex or md"
            raise cli.refusal(cli.USAGE, f"{rows}; got {to}")
        try:
            if to == "wandb" or to == "mlflow":
                say(f"{to}: {send(to, loaded)} runs of {loaded.name}")
                return
            if to == "jsonl" or to == "matrix":
                content = (to_jsonl if to == "jsonl" else to_matrix)(Analysis(loaded)).encode()
            elif to == "json" or (table and to != "parquet"):
                content = section_as(to, loaded, table)
            else:
                content = rows_as(to, loaded, quantity or (), names, items=items, digits=digits)
        except (ValueError, ImportError) as error:
            raise cli.refusal(cli.USAGE, str(error)) from error
        if out is not None:
            write_atomically(out, content)
        else:
            emit(content)


def compare(
    first: cli.FolderArgument,
    later: Annotated[list[Path], Argument(help="Other folders; differences are these minus the first.")],
    format_: Annotated[Literal["table", "md", "json"], Option("--format", help="Output format.")] = "table",
) -> None:
    """Show how runs differ from the first, image by image if they attacked the same images. Never fails the build."""
    from leakgauge.harness.gate.compare import compare_all
    from leakgauge.harness.gate.output import escaped
    from leakgauge.harness.study.store import load_run
    from leakgauge.reports.compared import side_by_side, to_json

    with cli.user_errors():
        try:
            compared = compare_all(*map(load_run, (first, *later)))
        except ValueError as error:
            raise cli.refusal(cli.USAGE, str(error)) from error
    if format_ == "table":
        cli.print_table(side_by_side(compared).terminal)
    else:
        emit(f"{side_by_side(compared).markdown(escaped)}\n" if format_ == "md" else to_json(*compared))


def view(
    folder: Annotated[Path, Argument(help="Folder with results below it, each in its own folder.")],
    host: Annotated[str, Option(help="Address to listen at; who reaches it may read the results.")] = "127.0.0.1",
    port: Annotated[int, Option(min=0, max=65535, help="Port; 0: a free one.")] = 0,
    bundle: Annotated[Path | None, Option(help="Write the pages into this new folder, for any web server.")] = None,
    images: ImagesOption = "public",
) -> None:
    """Look at the results below a folder in a browser: ratings, cells, comparisons. Ctrl-C ends it."""
    from leakgauge.harness.cli.view import Runs, Server
    from leakgauge.harness.study.store import write_atomically
    from leakgauge.reports.view import Links

    with cli.user_errors():
        runs = Runs(folder, images)
        if not runs.found():
            raise cli.refusal(cli.USAGE, f"no results below {folder}: there is no study.json; make some with 'run'")
        if bundle is not None:
            if bundle.exists() and any(bundle.iterdir()):
                raise cli.refusal(cli.USAGE, f"expected a new or an empty folder, got {bundle}: it has files")
            for name, content in runs.files():
                write_atomically(bundle / name, content)
            say(f"bundle: {bundle / 'index.html'}")
            return
        try:
            server = Server(runs, host, port)
        except OSError as error:
            raise cli.refusal(cli.USAGE, f"cannot listen at {host}:{port}: {error.strerror or error}") from error
        with server, suppress(KeyboardInterrupt):
            say(f"view: http://{server.address}/")
            threading.Thread(target=runs.page, args=(Links(),), daemon=True).start()  # reads before it is asked for
            server.serve_forever()


def verify(
    folder: cli.FolderArgument,
    key: Annotated[Path | None, Option(help="A public key: the results are also those that its owner signed.")] = None,
    as_json: cli.JsonOption = False,
) -> None:
    """List every damaged or missing file of results or of a recording, with the reason."""
    from leakgauge.harness.core.labels import counted
    from leakgauge.harness.core.numerics import several
    from leakgauge.harness.study import store

    with cli.user_errors():
        unsigned = {} if key is None else _signing().faults_of(folder, key)
        number, faults, recordings, numerics = store.verify(folder)
    faults = unsigned | faults
    models = sum(len(one.models) for one in recordings.values())
    messages = sum(len(sent) for one in recordings.values() for sent in one.sent.values())
    cut_off = [name for name, one in recordings.items() if not one.closed]
    if as_json:
        listed = [{"file": name, "reason": reason} for name, reason in faults.items()]
        found = {"cells_and_trainings": number, "models": models, "messages": messages, "cut_off": cut_off}
        found |= {"numerics": numerics} | ({} if key is None else {"signed": not unsigned})
        cli.print_json({**found, "whole": not faults, "faults": listed})
    else:
        for name, reason in faults.items():
            say(f"{name}: {reason}")
        for name in cut_off:
            say(f"{name}: has no end: it was interrupted, or is still being written; what it names is complete")
        say(*filter(None, [several(numerics)]))
        parts = [f"{number} cells and trainings"] if number or not recordings else []
        parts += [counted(models, "recorded model"), counted(messages, "message")] if recordings else []
        good = "all whole" if key is None else "all whole and as signed"
        bad = "damaged or missing" if key is None else "damaged, missing or not as signed"
        say(", ".join([*parts, f"{len(faults)} files {bad}" if faults else good]))
    raise typer.Exit(cli.INCOMPLETE if faults else 0)


def sign(
    folder: Annotated[Path | None, Argument(help="Folder of results, all whole; none: --new-key alone.")] = None,
    key: Annotated[Path | None, Option(help="Your private key.")] = None,
    new_key: Annotated[
        Path | None, Option(dir_okay=False, help="Make a private key, and the public key beside it, before.")
    ] = None,
) -> None:
    """Sign the results of a folder in DIR/statement.json; 'verify --key' then refuses all others."""
    private = key or new_key
    if private is None or (key and new_key) or not (folder or new_key):
        raise cli.refusal(cli.USAGE, "expected DIR --key PRIVATE.pem, or --new-key PRIVATE.pem with or without DIR")
    with cli.user_errors():
        signing = _signing()
        if new_key:
            say(f"private key: {new_key}: keep it to yourself", f"public key: {signing.new_key(new_key)}")
        if folder:
            number, faults = signing.sign(folder, private)
            if faults:
                lines = [f"{name}: {reason}" for name, reason in faults.items()]
                raise cli.refusal(
                    cli.INCOMPLETE, *lines, f"nothing is signed: {len(faults)} files of {folder} are faulty"
                )
            say(f"signed: {number} files in {folder / signing.STATEMENT}")


def _signing() -> ModuleType:
    try:
        from leakgauge.harness.study import signed
    except ImportError as error:
        raise cli.refusal(cli.USAGE, str(error)) from error
    return signed


def publish(
    finished: Run,
    folder: Path,
    images: Images,
    layout: Layout = "file",
    out: Path | None = None,
    against: Path | None = None,
    *,
    details: bool = False,
) -> None:
    """Print the results and write the report; exit with code 5 if a cell failed or is missing."""
    from leakgauge.harness.study.store import write_atomically
    from leakgauge.reports.html import folder_files, render, stale_pictures
    from leakgauge.reports.text.tables import printed

    cli.print_table(lambda width: printed(finished, width, details=details))
    compared = None if against is None else _compared(finished, against)
    place = out or folder / ("report.html" if layout == "file" else "report")
    if layout == "file":
        files = {place: render(finished, images=images, against=compared).encode()}
    else:
        inside = folder_files(finished, images=images, against=compared)
        files = {place / name: content for name, content in inside.items()}
    for path, content in files.items():
        write_atomically(path, content)
    for old in stale_pictures(place, files):
        old.unlink()
    for goal in finished.study.get("goals", ()):
        say(f"goal: {goal}")
    say(f"report: {list(files)[-1]}")
    _require_complete(finished)


def _require_complete(finished: Run) -> None:
    from leakgauge.harness.core.labels import Names

    names = Names(finished.cells)
    lines = [f"failed: {names.cell(failure.cell)}: {failure.message}" for failure in finished.failures.values()]
    lines += [f"damaged: {fault}; run the study again" for fault in finished.faults]
    if finished.missing:
        lines.append(f"cells without a result: {len(finished.missing)}")
    if lines:
        raise cli.refusal(cli.INCOMPLETE, *lines)


def _compared(finished: Run, against: Path) -> Against:
    from leakgauge.harness.gate import baseline
    from leakgauge.harness.gate.judge import Rules, judge
    from leakgauge.harness.gate.measure import measured
    from leakgauge.reports.sections.changes import Against

    now, base = measured(finished), baseline.of(against)
    return Against(judge(now, base.measured, Rules(), gaps=base.gaps), now, base)
