"""All results for other programs: one row per value as CSV, Parquet, LaTeX or Markdown, or JSON with one line per cell.

A CSV is safe to open in a spreadsheet.
"""

from __future__ import annotations

import base64
import io
import json
import zipfile
from collections.abc import Collection, Sequence
from typing import Literal

from leakgauge.harness.core.cell import Cell, Scalar
from leakgauge.harness.core.labels import server_text, unpromised
from leakgauge.harness.core.result import Run
from leakgauge.harness.core.rows import COLUMNS, Row, column, frame, rows
from leakgauge.harness.core.sinks import spelled
from leakgauge.harness.core.stored import to_data
from leakgauge.reports.sections import Section, sections
from leakgauge.reports.sections.checked import verdict_of
from leakgauge.reports.select import Analysis
from leakgauge.reports.table import Column, Table, comma_separated, written


def status_of(run: Run, cell: Cell) -> str:
    """`done`, `failed` or `missing`."""
    return "done" if cell.id in run.results else "failed" if cell.id in run.failures else "missing"


def rows_as(
    to: Literal["csv", "parquet", "tex", "md"],
    run: Run,
    quantities: Collection[str] = (),
    columns: Sequence[str] = (),
    *,
    items: bool = False,
    digits: int = 4,
) -> bytes:
    """The rows of `Run.frame` as a file.

    Args:
        quantities: only rows of these quantities; empty: all rows.
        columns: only these columns, in this order; empty: all columns.
        items: also one row for each victim or record.
        digits: significant digits of numbers in tex and md.

    Raises:
        ValueError: no such quantity or column; the message lists the known ones.
        ImportError: parquet without pandas or pyarrow.
    """
    every = list(rows(run, items=items))
    quantities_of_run = {row["quantity"]: None for row in every}
    for what, names, known in (("quantity", quantities, quantities_of_run), ("column", columns, COLUMNS)):
        for name in names:
            if name not in known:
                raise ValueError(f"no {what} {name!r}; known: {', '.join(known)}")
    chosen = [row for row in every if not quantities or row["quantity"] in quantities]
    if to == "csv":
        return to_csv(chosen, columns).encode()
    if to != "parquet":
        return written([listing(chosen, columns, digits)], to).encode()
    buffer = io.BytesIO()
    frame(chosen)[list(columns or COLUMNS)].to_parquet(buffer, index=False)
    return buffer.getvalue()


def to_csv(chosen: Sequence[Row], columns: Sequence[str] = ()) -> str:
    """The rows as CSV; an infinite epsilon is `inf`."""
    return comma_separated(columns or [*COLUMNS], chosen)


def section_as(to: Literal["csv", "tex", "md", "json"], run: Run, section: str) -> bytes:
    """The tables of a section of the report, such as `claims`, as a file.

    Raises:
        ValueError: no such section, the message lists the known ones; or this run has none of its tables.
    """
    known = {one.id: one for one in sections() if one.tables is not Section._field_defaults["tables"]}
    if section not in known:
        raise ValueError(f"no table {section!r}; known: {', '.join(known)}")
    if not (tables := known[section].tables(Analysis(run))):
        raise ValueError(f"this run has no table {section!r}")
    return written(tables, to).encode()


_REMARKS = ("cell", "training", "level", "method", "flags", "note")
"""Columns that a table for readers leaves out unless they are requested."""


def listing(chosen: Sequence[Row], columns: Sequence[str], digits: int) -> Table:
    """A table for readers, with numbers rounded to `digits` significant digits.

    If no columns were requested, it has the columns in which the rows differ, without ids and remarks; its lead has the
    values that all rows share.
    """
    names = columns or [name for name in COLUMNS if name not in _REMARKS]
    texts = {name: [_text(value, digits) for value in column(chosen, name)] for name in names}
    same = {name: values[0] for name, values in texts.items() if not columns and len(set(values)) == 1}
    lead = "; ".join(f"{name.replace('_', ' ')}: {value}" for name, value in same.items() if value)
    shown = [name for name in names if name not in same]
    heads = tuple(Column(name, "" if COLUMNS[name] == "str" else "num") for name in shown)
    return Table("", heads, tuple(zip(*(texts[name] for name in shown), strict=True)), lead)


def _text(value: Scalar, digits: int) -> str:
    return f"{value:.{digits}g}" if isinstance(value, float) else "" if value is None else str(value)


def _object(analysis: Analysis, cell: Cell) -> dict[str, object]:
    run, spec = analysis.run, cell.training
    result, failure, training = run.results.get(cell.id), run.failures.get(cell.id), run.trainings.get(spec.id)
    estimates = [to_data(estimate) for estimate in result.estimates] if result is not None else []
    failed = None if failure is None or result is not None else {"kind": failure.kind, "message": failure.message}
    checked = {key: getattr(training, key, None) for key in ("one_round", "whole_run", "violations", "audited")}
    checked = to_data(checked, infinity="inf")
    for claim in ("one_round", "whole_run") if training is not None else ():
        checked[claim]["verdict"] = verdict_of(getattr(training, claim))
    return {
        "cell": cell.id,
        "status": status_of(run, cell),
        "task": to_data(spec.task),
        "federation": to_data(spec.federation),
        "defense": to_data(spec.defense),
        "server": server_text(spec),
        "attack": to_data(cell.attack),
        "threat": cell.threat,
        "target": to_data(cell.target),
        "seed": spec.seed,
        "training": spec.id,
        "accuracy": None if training is None else training.accuracy,
        **checked,
        "estimates": {str(estimate.pop("name")): estimate for estimate in estimates},
        "promise": unpromised(cell, training),
        "rating": _rating(analysis, cell),
        "flags": [to_data(flag) for flag in analysis.flags_of(cell)],
        "numerics": None if result is None else result.environment.numerics,
        "seconds": run.seconds.get(cell.id),
        "failure": failed,
    }


def _rating(analysis: Analysis, cell: Cell) -> dict[str, object] | None:
    """The rating of the cell's defense against its adversary, by all attacks; None for a floor alone."""
    rating = analysis.ratings.of_cell(cell)
    if rating is None:
        return None
    best = rating.people
    people = None if best is None else {"recognized": best.hits, "of": best.n, "among": best.among}
    names = ("adversary", "word", "excluded", "reason")
    return {name: getattr(rating, name) for name in names} | {"people": people}


def to_jsonl(analysis: Analysis) -> str:
    """One line with a JSON object per cell, in the study's order, with all estimates and their values per victim.

    An infinite epsilon is `"inf"`; null means unknown. The text is ASCII, so that a line ends only where its cell does.
    """
    lines = (json.dumps(_object(analysis, cell), allow_nan=False) for cell in analysis.run.cells)
    return "".join(f"{spelled(line)}\n" for line in lines)


def data_uri(name: str, text: str) -> str:
    """A zip file with a CSV of this name, as a data URI: a tenth of the size, and it downloads without a script."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as file:
        file.writestr(zipfile.ZipInfo(name), text, zipfile.ZIP_DEFLATED, 9)  # ZipInfo has a constant date
    return "data:application/zip;base64," + base64.b64encode(buffer.getvalue()).decode()
