"""Results as CSV and as JSON, one line per cell."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import math

import numpy as np
import pytest

from leakgauge.harness.core.cell import PartSpec
from leakgauge.harness.core.result import Failure, Flag, Run
from leakgauge.reports.export import harmless, to_csv, to_jsonl
from leakgauge.reports.select import Analysis
from tests import report_fixtures as double
from tests.report_page import small

FORMULAS = ["=1+1", "+a", "-a", "@a", "\ta", "\ra", "\na", "＝1+1", "－a", "＋a", "＠a"]
INSIDE = [("x;=1+1;", "x;'=1+1;"), ("x\t@a", "x\t'@a"), ("x\n-a", "x\n'-a"), ("x\r\n+a", "x\r\n'+a")]
OTHERS = ["", "a=b", "a - b", "a; b", "first\r\nsecond", "1e-5"]
NUMBERS = [(-0.5, "-0.5"), (3, "3"), (None, ""), (True, "True"), (1e-300, "1e-300"), (np.float64(-0.25), "-0.25")]


@pytest.mark.parametrize(
    ("value", "field"),
    [*((text, f"'{text}") for text in FORMULAS), *INSIDE, *((text, text) for text in OTHERS), *NUMBERS],
)
def test_a_text_gets_a_quote_where_any_country_s_spreadsheet_begins_a_formula(value, field: str) -> None:
    assert harmless(value) == field


def hostile() -> Run:
    """A run with a formula wherever a text comes from outside."""
    evil = '=cmd|"/c calc"!A1'
    run = double.make_run(
        small(double.NONE, PartSpec(evil, {"note": evil})), failed=lambda cell: cell.attack == double.PRIOR, name=evil
    )
    flag = Flag(evil, evil)
    results = {key: dataclasses.replace(result, flags=(flag,)) for key, result in run.results.items()}
    failures = {key: Failure(failure.cell, evil, evil, "") for key, failure in run.failures.items()}
    return dataclasses.replace(run, results=results, failures=failures)


def test_no_field_of_a_table_begins_like_a_formula() -> None:
    text = to_csv(Analysis(hostile()))
    rows = list(csv.reader(io.StringIO(text, newline="")))
    assert len(rows) == 5
    assert len({len(row) for row in rows}) == 1
    fields = [field for row in rows for field in row if field.startswith(("=", "+", "-", "@", "\t", "\r"))]
    assert [field for field in fields if not math.isfinite(float(field))] == []
    assert "'=cmd|" in text


def test_a_negative_number_stays_a_number() -> None:
    def make(cell):
        result = double.result_of(cell)
        return double.with_estimates(result, dataclasses.replace(result.estimates[0], value=-0.25, low=-0.5, high=0.0))

    row = next(csv.DictReader(io.StringIO(to_csv(Analysis(double.make_run(small(double.NONE), make=make))))))
    assert (row["ssim"], row["ssim_low"], row["ssim_high"]) == ("-0.25", "-0.5", "0.0")


def test_json_has_one_object_per_cell_with_all_estimates() -> None:
    run = double.full_run()
    text = to_jsonl(Analysis(run))
    assert text.isascii()
    assert text.endswith("\n")
    rows = [json.loads(line) for line in text.splitlines()]
    assert [row["cell"] for row in rows] == [cell.id for cell in run.cells]
    for row, cell in zip(rows, run.cells, strict=True):
        result = run.results.get(cell.id)
        assert row["status"] == ("done" if result else "failed" if cell.id in run.failures else "missing")
        assert row["defense"] == {"name": cell.training.defense.name, "parameters": cell.training.defense.parameters}
        assert row["target"]["count"] == cell.target.count
        assert list(row["estimates"]) == [estimate.name for estimate in result.estimates] if result else True
    first = run.results[run.cells[0].id].estimate("ssim")
    assert rows[0]["estimates"]["ssim"]["values"] == list(first.values)
    assert rows[0]["estimates"]["ssim"]["method"] == first.method


def test_json_separates_infinite_from_unknown_and_has_the_reason_of_a_failure() -> None:
    rows = [json.loads(line) for line in to_jsonl(Analysis(double.full_run())).splitlines()]
    undefended = next(row for row in rows if row["defense"]["name"] == "none" and row["status"] == "done")
    assert undefended["whole_run"]["epsilon"] == undefended["whole_run"]["proved"]["epsilon"] == "inf"
    laplace = next(row for row in rows if row["defense"]["name"] == "laplace" and row["one_round"])
    assert [proof["unit"] for proof in laplace["one_round"]["further"]] == ["message"]
    failed = next(row for row in rows if row["status"] == "failed")
    assert failed["failure"] == {"kind": "RuntimeError", "message": "out of memory\nsecond line"}
    assert failed["estimates"] == {}


def test_json_of_a_training_that_did_not_finish_and_of_an_audit() -> None:
    bare = dataclasses.replace(double.make_run(small()), trainings={})
    row = json.loads(to_jsonl(Analysis(bare)).splitlines()[0])
    assert (row["accuracy"], row["one_round"], row["whole_run"], row["audited"]) == (None, None, None, None)
    rows = [json.loads(line) for line in to_jsonl(Analysis(double.audited_run())).splitlines()]
    audits = {row["defense"]["name"]: row["audited"] for row in rows}
    assert audits["none"]["claimed"] == "inf"
    assert audits["dithered"]["epsilon_lower"] == 2.8337
    assert audits["sqsgd"] is None


def test_a_line_end_of_another_script_ends_no_line() -> None:
    run = double.make_run(small(double.NONE, PartSpec("a\u2028b\x85c", {})))
    assert len(to_jsonl(Analysis(run)).splitlines()) == len(run.cells)
