"""A new section of the report is one file: the page, the terminal and every export show its tables."""

import csv
import html
import io
import json
import re

import pytest

from leakgauge.reports import sections
from leakgauge.reports.export import section_as
from leakgauge.reports.html import render
from leakgauge.reports.select import Analysis
from leakgauge.reports.table import Cell, Column, Table
from leakgauge.reports.text.tables import to_matrix
from tests import report_fixtures as double
from tests.report_page import SECTIONS, complete, small
from tests.report_page import sections as ids
from tests.terminal_text import plain

TOY = '''
from leakgauge.reports.sections import of_tables
from leakgauge.reports.table import Cell, Column, Table
from leakgauge.reports.text.notation import percent


def uploads(analysis):
    """Bytes of all messages, by defense."""
    rows = [
        (label.text, str(sum(sum(t.message_bytes) for t in trainings)), f"{10 * at}")
        for at, (key, label) in enumerate(analysis.defenses.items())
        for (setting, defense), trainings in analysis.trainings.items()
        if defense == key
    ]
    columns = "Defense", Column("Bytes | sent", "num"), Column("Bar", "bar")
    strong = (Cell(rows[0][0], "worst <b>", ("below it",), strong=True), *rows[0][1:]) if rows else ()
    notes = ("A note with a_name.",)
    return [Table("Uploads", columns, (strong, *rows[1:]), "Bytes of all rounds.", notes)] if rows else []


SECTION = of_tables("uploads", "What clients sent", "Uploads", 75, uploads)
'''


@pytest.fixture
def with_toy(tmp_path, monkeypatch):
    """One more file in the folder of the sections."""
    (tmp_path / "uploads.py").write_text(TOY)
    monkeypatch.setattr(sections, "__path__", [*sections.__path__, str(tmp_path)])


@pytest.mark.usefixtures("with_toy")
def test_a_section_of_tables_is_on_the_page_in_the_terminal_and_in_the_markdown():
    run = double.make_run(small())
    page = complete(render(run))
    assert ids(page) == [*SECTIONS[:6], "uploads", *SECTIONS[6:]]
    assert "What clients sent Bytes of all rounds. Uploads Defense Bytes | sent Bar no defense (worst <b>)" in page.text
    assert '<details class="fold"><summary>What clients sent</summary>' in render(run)
    assert '<th scope="row"><b>no defense</b> <span class="ends">(worst &lt;b&gt;)</span>' in render(run)
    assert "width" in {name for found in page.all("rect") for name in found}
    told = plain(run)
    assert told.index("Uploads") > told.index("Claim per round")
    assert "no defense (worst <b>)" in told
    assert "A note with a_name." in told
    assert "Bar" not in told
    text = to_matrix(Analysis(run))
    assert "### Uploads\n\nBytes of all rounds.\n\n| Defense | Bytes \\| sent |\n| --- | --- |\n" in text
    assert "| **no defense** (worst &lt;b&gt;) | " in text
    assert text.endswith("\n\n- A note with a_name.")


def test_a_section_that_fails_says_so_and_stops_nothing(tmp_path, monkeypatch):
    text = "from leakgauge.reports.sections import of_tables\nSECTION = of_tables('broken', 'Odd', 'Odd', 75, len)\n"
    (tmp_path / "broken.py").write_text(text)
    monkeypatch.setattr(sections, "__path__", [*sections.__path__, str(tmp_path)])
    run = double.make_run(small())
    for told in (render(run), plain(run)):
        assert "could not be built" in told
        assert "TypeError: object of type 'Analysis' has no len()" in html.unescape(told)


@pytest.mark.usefixtures("with_toy")
def test_the_six_forms_of_a_table_hold_the_same_fields():
    run = double.make_run(small())
    written = {to: section_as(to, run, "uploads").decode() for to in ("csv", "json", "md", "tex")}
    rows = list(csv.DictReader(io.StringIO(written["csv"])))
    assert [list(rows[0]), rows[0]["Defense"], rows[0]["Defense, ends"]] == [
        ["Defense", "Defense, ends", "Bytes | sent"],
        "no defense",
        "worst <b>",
    ]
    (table,) = json.loads(written["json"])
    assert (table["rows"], table["title"], table["notes"]) == (rows, "Uploads", ["A note with a_name."])
    lines = [line[2:-2].split(" | ") for line in written["md"].splitlines() if line.startswith("| ")]
    body = written["tex"].split("\\endhead\n")[1].split("\\bottomrule")[0]
    tex = [line.removesuffix(r" \\").split(" & ") for line in body.splitlines()]
    page, told = render(run), plain(run)
    assert len(rows) == len(tex) == len(lines[2:]) > 1
    for row, markdown, latex in zip(rows, lines[2:], tex, strict=True):
        assert markdown[1] == latex[1] == row["Bytes | sent"]
        assert row["Defense"] in markdown[0]
        assert row["Defense"] in latex[0]
        assert re.search(rf"{re.escape(row['Defense'])}.*{row['Bytes | sent']}", told)
        assert f">{row['Bytes | sent']}<" in page


@pytest.mark.parametrize("name", ["ratings", "attacks", "claims", "frontier", "tradeoffs", "provenance"])
def test_every_table_of_the_page_is_exported_whole(name):
    run = double.full_run()
    tables = {section.id: section for section in sections.sections()}[name].tables(Analysis(run))
    rows = list(csv.DictReader(io.StringIO(section_as("csv", run, name).decode())))
    objects = json.loads(section_as("json", run, name))
    assert [len(one["rows"]) for one in objects] == [len(table.rows) for table in tables]
    assert len(rows) == sum(len(table.rows) for table in tables) > 0
    shown = [len([column for column in table.heads if column.kind != "bar"]) for table in tables]
    assert all(len(row) >= n for one, n in zip(objects, shown, strict=True) for row in one["rows"])
    assert section_as("tex", run, name).decode().count(r"\begin{longtable}") == len(tables)


def test_a_table_that_is_not_there_is_named():
    run = double.make_run(small(), missing=lambda cell: True)
    with pytest.raises(ValueError, match=r"^no table 'claim'; known: ratings, claims, attacks, frontier, tradeoffs"):
        section_as("csv", run, "claim")
    with pytest.raises(ValueError, match=r"^this run has no table 'frontier'$"):
        section_as("csv", run, "frontier")


@pytest.mark.usefixtures("with_toy")
def test_a_section_without_a_table_is_nowhere():
    run = double.make_run(small(), missing=lambda cell: True)
    shown = render(run), plain(run), to_matrix(Analysis(run))
    assert not any("Uploads" in text for text in shown)


def test_without_a_new_file_the_sections_are_those_of_the_page():
    assert [s.id for s in sections.sections() if s.id not in ("ratings", "changes", "asked")] == SECTIONS
    places = [s.place for s in sections.sections()]
    assert len(set(places)) == len(places)


def test_a_table_in_the_terminal_has_bold_rows_and_numbers_on_the_right():
    table = Table("t", ("a", Column("b", "num")), (("x", "1"), ("y", Cell("2", strong=True))), notes=("n",))
    drawn = table.terminal()
    assert [column.justify for column in drawn.columns] == ["left", "right"]
    assert [str(text.style) for text in drawn.columns[0].cells] == ["", "bold"]
    assert table.markdown(str.upper) == "### T\n\n| A | B |\n| --- | --- |\n| X | 1 |\n| Y | **2** |\n\n- N"
