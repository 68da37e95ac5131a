"""The commands `report` and `export`: results as an HTML page, or as a table for other programs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from leakgauge.harness.cli.options import (
    INCOMPLETE,
    USAGE,
    FiguresOption,
    FolderArgument,
    figure_formats,
    print_table,
    refusal,
    user_errors,
)
from leakgauge.harness.core.sinks import emit, say

if TYPE_CHECKING:
    from leakgauge.harness.core.result import Run
    from leakgauge.reports.sections.changes import Against

Images = Literal["public", "redact", "none"]
Layout = Literal["file", "dir"]
ImagesOption = Annotated[
    Images,
    typer.Option(help="Pictures in the report: public: of public data sets; redact: placeholders; none: left out."),
]


def report(
    folder: FolderArgument,
    images: ImagesOption = "public",
    layout: Annotated[
        Layout, typer.Option(help="file: one page; dir: a folder, for servers that forbid inline styles and scripts.")
    ] = "file",
    out: Annotated[
        Path | None, typer.Option(help="The page, or its folder; default: DIR/report.html or DIR/report.")
    ] = None,
    figures: FiguresOption = "",
    against: Annotated[
        Path | None, typer.Option(help="A baseline, or another folder of results: adds a section on the changes.")
    ] = None,
) -> None:
    """Write the HTML report of a folder of results again, and print its table."""
    from leakgauge.harness.study.store import load_run, write_atomically
    from leakgauge.reports.charts.files import figure_files
    from leakgauge.reports.select import Analysis

    kinds = figure_formats(figures)
    with user_errors():
        finished = load_run(folder)
        for name, content in figure_files(Analysis(finished), kinds):
            write_atomically(folder / "figures" / name, content)
        publish(finished, folder, images, layout, out, against)


def export(
    folder: FolderArgument,
    to: Annotated[
        Literal["csv", "parquet", "tex", "md", "jsonl", "matrix"],
        typer.Option(
            help="csv, parquet, tex, md: one row per value; jsonl: one line per cell; matrix: Markdown by attack."
        ),
    ] = "matrix",
    out: Annotated[Path | None, typer.Option("-o", "--out", help="A file; default: standard output.")] = None,
    quantity: Annotated[
        list[str] | None, typer.Option(help="Only rows of this quantity, such as ssim or proved_epsilon; repeatable.")
    ] = None,
    columns: Annotated[str, typer.Option(help="Only these columns, as in defense,attack,value,low,high.")] = "",
    items: Annotated[bool, typer.Option("--items", help="Also one row for each victim or record.")] = False,
    digits: Annotated[int, typer.Option(min=1, max=17, help="Significant digits in tex and md.")] = 4,
) -> None:
    """Write the results of a folder as a table for other programs."""
    from leakgauge.harness.study.store import load_run, write_atomically
    from leakgauge.reports.export import rows_as, to_jsonl
    from leakgauge.reports.select import Analysis
    from leakgauge.reports.text.tables import to_matrix

    names = [name for name in columns.split(",") if name]
    with user_errors():
        loaded = load_run(folder)
        if to == "jsonl" or to == "matrix":
            if quantity or names or items:
                raise refusal(
                    USAGE,
                    f"--quantity, --columns and --items need a format with rows: csv, parquet, tex or md; got {to}",
                )
            content = (to_jsonl if to == "jsonl" else to_matrix)(Analysis(loaded)).encode()
        else:
            try:
                content = rows_as(to, loaded, quantity or (), names, items=items, digits=digits)
            except (ValueError, ImportError) as error:
                raise refusal(USAGE, str(error)) from error
        if out is not None:
            write_atomically(out, content)
        else:
            emit(content)


def publish(
    finished: Run,
    folder: Path,
    images: Images,
    layout: Layout = "file",
    out: Path | None = None,
    against: Path | None = None,
) -> None:
    """Print the table of the results and write the report; exit with code 5 if a cell failed or is missing."""
    from leakgauge.harness.core.labels import cell_text
    from leakgauge.harness.study.store import write_atomically
    from leakgauge.reports.html import report_files, stale_pictures
    from leakgauge.reports.text.tables import printed

    print_table(lambda width: printed(finished, width))
    compared = None if against is None else _compared(finished, against)
    place = out or folder / ("report.html" if layout == "file" else "report")
    files = report_files(finished, place, layout, images=images, against=compared)
    for path, content in files.items():
        write_atomically(path, content)
    for old in stale_pictures(place, files):
        old.unlink()
    for goal in finished.study.get("goals", ()):
        say(f"goal: {goal}")
    say(f"report: {list(files)[-1]}")
    lines = [f"failed: {cell_text(failure.cell)}: {failure.message}" for failure in finished.failures.values()]
    lines += [f"damaged: {fault}; run the study again" for fault in finished.faults]
    if finished.missing:
        lines.append(f"cells without a result: {len(finished.missing)}")
    if lines:
        raise refusal(INCOMPLETE, *lines)


def _compared(finished: Run, against: Path) -> Against:
    """The comparison of a run with a baseline or with another folder of results."""
    from leakgauge.harness.gate import baseline
    from leakgauge.harness.gate.judge import Rules, judge
    from leakgauge.harness.gate.measure import measured
    from leakgauge.reports.sections.changes import Against

    now, base = measured(finished), baseline.of(against)
    return Against(judge(now, base.measured, Rules(), gaps=base.gaps), now, base)
