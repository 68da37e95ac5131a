"""Results for other programs: a frame, CSV, Parquet, LaTeX and Markdown with a row a value, JSON with a line a cell."""

import csv
import dataclasses
import io
import json
import math
import time

import numpy as np
import pandas
import pandas.testing
import pytest

from leakgauge.harness.core.cases import cases
from leakgauge.harness.core.cell import PartSpec, Target
from leakgauge.harness.core.result import Failure, Flag
from leakgauge.harness.core.rows import COLUMNS
from leakgauge.harness.core.sinks import harmless
from leakgauge.reports.export import rows_as, to_jsonl
from leakgauge.reports.select import Analysis
from tests import report_fixtures as double
from tests.report_page import small

FORMULAS = ["=1+1", "+a", "-a", "@a", "\ta", "\ra", "\na", "＝1+1", "－a", "＋a", "＠a"]
INSIDE = [("x;=1+1;", "x;'=1+1;"), ("x\t@a", "x\t'@a"), ("x\n-a", "x\n'-a"), ("x\r\n+a", "x\r\n'+a")]
OTHERS = ["", "a=b", "a - b", "a; b", "first\r\nsecond", "1e-5"]
NUMBERS = [(-0.5, "-0.5"), (3, "3"), (None, ""), (True, "True"), (1e-300, "1e-300"), (np.float64(-0.25), "-0.25")]


def test_a_text_gets_a_quote_where_any_country_s_spreadsheet_begins_a_formula():
    quoted, plain = ((text, f"'{text}") for text in FORMULAS), ((text, text) for text in OTHERS)
    for value, field in (*quoted, *INSIDE, *plain, *NUMBERS):
        assert harmless(value) == field


def hostile():
    """A run with a formula wherever a text comes from outside."""
    evil = '=cmd|"/c calc"!A1'
    run = double.make_run(
        small(double.NONE, PartSpec(evil, {"note": evil})), failed=lambda cell: cell.attack == double.PRIOR, name=evil
    )
    flag = Flag(evil, evil)
    results = {key: dataclasses.replace(result, flags=(flag,)) for key, result in run.results.items()}
    failures = {key: Failure(failure.cell, evil, evil, "") for key, failure in run.failures.items()}
    return dataclasses.replace(run, results=results, failures=failures)


def read(text):
    return list(csv.DictReader(io.StringIO(text, newline="")))


def test_no_field_of_a_table_begins_like_a_formula():
    text = rows_as("csv", hostile()).decode()
    lines = list(csv.reader(io.StringIO(text, newline="")))
    assert len({len(line) for line in lines}) == 1
    fields = [field for line in lines for field in line if field.startswith(("=", "+", "-", "@", "\t", "\r"))]
    assert [field for field in fields if not math.isfinite(float(field))] == []
    assert "'=cmd|" in text


def test_a_negative_number_stays_a_number():
    def make(cell):
        result = double.result_of(cell)
        return double.with_estimates(result, dataclasses.replace(result.estimates[0], value=-0.25, low=-0.5, high=0.0))

    run = double.make_run(small(double.NONE), make=make)
    row = next(line for line in read(rows_as("csv", run).decode()) if line["quantity"] == "ssim")
    assert (row["value"], row["low"], row["high"]) == ("-0.25", "-0.5", "0.0")


RUNS = {"full": double.full_run(), "audited": double.audited_run(), "checked": double.checked_run()}


@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)
def test_every_format_has_the_values_of_the_frame(run):
    frame = run.frame(items=True)
    assert {name: str(kind) for name, kind in frame.dtypes.items()} == COLUMNS
    pandas.testing.assert_frame_equal(pandas.read_parquet(io.BytesIO(rows_as("parquet", run, items=True))), frame)
    again = pandas.read_csv(io.BytesIO(rows_as("csv", run, items=True)), dtype=COLUMNS, keep_default_na=False,
                            na_values={name: [""] for name, kind in COLUMNS.items() if kind != "str"})  # fmt: skip
    pandas.testing.assert_frame_equal(again, frame)
    names = [name for name in COLUMNS if name != "note"]
    markdown, tex = (rows_as(to, run, (), names, items=True, digits=17).decode() for to in ("md", "tex"))
    cells = [[cell.strip() for cell in line[2:-2].split(" | ")] for line in markdown.splitlines()]
    assert cells[0] == names
    body = tex.split("\\endhead\n")[1].split("\\bottomrule")[0].splitlines()
    lines = [line.removesuffix(r" \\").replace(r"\_", "_").replace(r"\%", "%").split(" & ") for line in body]
    assert [[cell.strip() for cell in line] for line in lines] == cells[2:]
    assert len(lines) == len(frame)
    for name, values in zip(names, zip(*cells[2:], strict=True), strict=True):
        if COLUMNS[name] == "str":
            assert list(values) == [text.replace("\\", "\\\\").strip() for text in frame[name]]
        else:
            read_back = [math.nan if value == "" else float(value) for value in values]
            np.testing.assert_array_equal(read_back, frame[name].astype("float64"))


def test_a_table_for_people_says_once_what_all_rows_share():
    text = rows_as("md", double.full_run(), ["ssim", "auc"]).decode()
    head, rows = text.split("| defense", 1)
    assert "data: invented;" in head
    assert "invented" not in rows
    assert "horizon" not in text
    tex = rows_as("tex", double.full_run(), ["ssim"]).decode()
    assert r"quantity: ssim" in tex
    assert tex.count(r"\begin{longtable}") == tex.count(r"\end{longtable}") == 1


def test_signs_of_markdown_and_latex_are_escaped():
    run = double.make_run(small(PartSpec("a|b_&%$#{}~^\\", {})))
    assert r"a\|b\_\&\%\$\#\{\}\textasciitilde{}\textasciicircum{}\textbackslash{}".replace(r"\|", "|") in (
        rows_as("tex", run).decode()
    )
    assert r"a\|b" in rows_as("md", run).decode()


@pytest.mark.parametrize(
    ("asked", "known"),
    [({"quantities": ["sim"]}, "no quantity 'sim'; known: "), ({"columns": ["valu"]}, "no column 'valu'; known: cell")],
)
def test_an_unknown_name_is_refused_with_the_known_ones(asked, known):
    with pytest.raises(ValueError, match=known):
        rows_as("csv", double.make_run(small()), **asked)


def test_columns_come_in_the_order_in_which_they_are_asked_for():
    text = rows_as("csv", double.full_run(), ["ssim"], ["value", "defense"]).decode()
    assert text.splitlines()[0] == "value,defense"
    assert len(text.splitlines()) == 126


def test_a_thousand_cells_are_a_frame_in_two_seconds():
    parts = [PartSpec("gaussian", {"epsilon": float(e)}) for e in range(1, 85)]
    attacks = [(attack, Target("probe", at, 8), "server") for attack in (double.MAP, double.PRIOR) for at in range(6)]
    run = double.make_run(double.grid(parts, attacks, (0,)))
    start = time.process_time()
    frame = run.frame()
    assert time.process_time() - start < 2
    assert (len(run.cells), len(frame[frame.quantity == "finished"])) == (1008, 1008)


def test_a_run_is_short_in_a_terminal_and_a_table_in_a_notebook():
    run = hostile()
    assert len(repr(double.full_run())) < 100
    assert repr(double.full_run()) == (
        "<Run 'invented-study': 141 of 144 cells on 16 trainings, 2 failed, 1 without a result>"
    )
    page = double.full_run()._repr_html_()
    assert page.count("<tr>") == 1 + len(cases(double.full_run()))
    assert "0.942" in page
    assert "<script" not in dataclasses.replace(run, name="<script>")._repr_html_()


def test_json_has_one_object_per_cell_with_all_estimates():
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


def test_json_separates_infinite_from_unknown_and_has_the_reason_of_a_failure():
    rows = [json.loads(line) for line in to_jsonl(Analysis(double.full_run())).splitlines()]
    undefended = next(row for row in rows if row["defense"]["name"] == "none" and row["status"] == "done")
    assert undefended["whole_run"]["epsilon"] == undefended["whole_run"]["proved"]["epsilon"] == "inf"
    laplace = next(row for row in rows if row["defense"]["name"] == "laplace" and row["one_round"])
    assert [proof["unit"] for proof in laplace["one_round"]["further"]] == ["message"]
    failed = next(row for row in rows if row["status"] == "failed")
    assert failed["failure"] == {"kind": "RuntimeError", "message": "out of memory\nsecond line"}
    assert failed["estimates"] == {}


def test_json_of_a_training_that_did_not_finish_and_of_an_audit():
    bare = dataclasses.replace(double.make_run(small()), trainings={})
    row = json.loads(to_jsonl(Analysis(bare)).splitlines()[0])
    assert (row["accuracy"], row["one_round"], row["whole_run"], row["audited"]) == (None, None, None, None)
    run = double.audited_run()
    unbounded = {key: dataclasses.replace(one, audited=one.audited and dataclasses.replace(one.audited, ceiling=None))
                 for key, one in run.trainings.items()}  # fmt: skip
    rows = [json.loads(line) for line in to_jsonl(Analysis(dataclasses.replace(run, trainings=unbounded))).splitlines()]
    audits = {row["defense"]["name"]: row["audited"] for row in rows}
    assert (audits["none"]["claimed"], audits["none"]["ceiling"]) == ("inf", "inf")
    assert audits["dithered"]["epsilon_lower"] == 2.8337
    assert audits["sqsgd"] is None


def test_a_line_end_of_another_script_ends_no_line():
    run = double.make_run(small(double.NONE, PartSpec("a\u2028b\x85c", {})))
    assert len(to_jsonl(Analysis(run)).splitlines()) == len(run.cells)
