"""The report as files: the folder, the charts, and the pictures that an option withholds."""

import dataclasses
import functools
import hashlib
import io
import itertools
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from leakgauge.harness.cli.options import figure_formats
from leakgauge.reports.charts.files import FORMATS, figure_files
from leakgauge.reports.export import rows_as
from leakgauge.reports.html import PAGE, folder_files, render
from leakgauge.reports.select import Analysis
from tests import report_fixtures as double
from tests.command import call
from tests.report_page import SECTIONS, Page, complete, sections, small
from tests.stored import on_disk

PNG = b"\x89PNG"


@pytest.fixture(scope="module")
def run():
    return double.make_run(small(double.NONE, *double.GAUSSIAN[:2]))


@pytest.fixture(scope="module")
def page(run):
    return render(run)


@pytest.fixture(scope="module")
def files(run):
    return folder_files(run)


@pytest.fixture(scope="module")
def charts(run):
    found = list(figure_files(Analysis(run), ["svg"]))
    assert len(dict(found)) == len(found)
    return dict(found)


def in_another_process(script):
    """What a script prints in a process with another order of sets."""
    environment, root = os.environ | {"PYTHONHASHSEED": "7"}, Path(__file__).parents[1]
    words = [sys.executable, "-c", script]
    return subprocess.run(words, capture_output=True, text=True, env=environment, cwd=root, check=True).stdout


@pytest.fixture
def stored(run, tmp_path):
    """The run without its trainings: no charts, which take most of the time."""
    return on_disk(dataclasses.replace(run, trainings={}), tmp_path / "runs")


def test_nothing_in_the_folder_s_page_is_inline_and_its_policy_allows_its_folder_only(files):
    text = files[PAGE].decode()
    page = complete(text)
    assert page.all("style") == []
    assert [attributes["src"] for attributes in page.all("script")] == ["script.js"]
    assert page.inline["script"] == []
    for tag, attributes in page.tags:
        assert not [value for value in attributes.values() if value.startswith("data:")], tag
        assert not [name for name in attributes if name == "style" or name.startswith("on")], tag
    assert page.policy == (
        "default-src 'none'; img-src 'self'; style-src 'self'; script-src 'self'; base-uri 'none'; form-action 'none'"
    )


def test_the_folder_holds_the_files_that_the_page_names_and_no_other(run, files):
    page = Page(files[PAGE].decode())
    named = {a[name] for _, a in page.tags for name in ("src", "href") if name in a and not a[name].startswith("#")}
    assert named == set(files) - {PAGE}
    with zipfile.ZipFile(io.BytesIO(files["results.zip"])) as file:
        assert file.read("results.csv") == rows_as("csv", run)
    pictures = [content for name, content in files.items() if name.startswith("pictures/")]
    assert len(pictures) >= 6
    assert all(content.startswith(PNG) for content in pictures)


def test_both_layouts_have_the_same_text_and_the_same_run_the_same_bytes(run, page, files):
    one, other = complete(page), complete(files[PAGE].decode())
    assert sections(other) == sections(one) == SECTIONS
    assert other.text.split("Made by leakgauge")[0] == one.text.split("Made by leakgauge")[0]
    assert "".join(one.inline["style"]).strip() == files["style.css"].decode().strip()
    assert folder_files(run) == files


def test_the_command_writes_the_folder_or_one_page_to_the_given_path(stored, tmp_path):
    done = call("report", stored, "--layout", "dir")
    assert done.exit_code == 0
    assert f"report: {stored / 'report' / PAGE}" in done.output
    assert call("report", stored, "--layout", "dir", "--out", tmp_path / "elsewhere").exit_code == 0
    assert contents(tmp_path / "elsewhere") == contents(stored / "report")
    assert call("report", stored, "--out", tmp_path / "one.html").exit_code == 0
    assert not (stored / "report.html").exists()
    complete((tmp_path / "one.html").read_text("utf-8"))
    done = call("report", stored, "--out", tmp_path / "elsewhere")
    assert done.exit_code == 2
    assert "Is a directory" in done.stderr


def contents(folder):
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("images", ["redact", "none"])
def test_pictures_of_an_earlier_report_go_when_this_one_withholds_them(stored, images):
    assert call("report", stored, "--layout", "dir").exit_code == 0
    pictures = stored / "report" / "pictures"
    (pictures / "logo.png").write_bytes(PNG)
    assert len(list(pictures.iterdir())) > 6
    assert call("report", stored, "--layout", "dir", "--images", images).exit_code == 0
    assert [path.name for path in pictures.iterdir()] == ["logo.png"]


@pytest.mark.matrix
def test_the_command_writes_the_charts_and_withholds_pictures_all_the_same(run, charts, tmp_path):
    folder = on_disk(run, tmp_path / "runs")
    assert call("report", folder, "--figures", "svg", "--images", "redact").exit_code == 0
    assert contents(folder / "figures") == {Path(name): content for name, content in charts.items()}
    assert b"data:image" not in (folder / "report.html").read_bytes()


def test_an_unknown_format_is_a_usage_error_before_anything_is_written(stored):
    done = call("report", stored, "--figures", "png,gif")
    assert done.exit_code == 2
    assert "expected some of png,pdf,svg, got 'gif'" in " ".join(done.stderr.replace("│", "").split())
    assert not (stored / "figures").exists()
    assert not (stored / "report.html").exists()


def test_each_chart_of_the_page_is_a_file_with_a_harmless_name(page, charts):
    assert [figure_formats(text) for text in ("", "svg, png", "png,pdf,svg")] == [(), ("svg", "png"), tuple(FORMATS)]
    assert len(charts) == page.count('<figure class="chart"')
    assert all(re.fullmatch(r"1-[a-z0-9-]+\.svg", name) for name in charts)


def test_the_files_have_the_format_of_their_name_and_no_date():
    marks = {"png": PNG, "pdf": b"%PDF", "svg": b"<?xml"}
    for name, content in first_chart():
        assert content.startswith(marks[name.rpartition(".")[2]])
        assert not re.search(rb"CreationDate|ModDate|dc:date|tIME", content)


def test_charts_are_in_the_page_s_light_colors_with_title_legend_and_direction(charts):
    text = next(content.decode() for name, content in charts.items() if "ssim" in name)
    assert "#0072b2" in text
    assert ">Leakage against claimed epsilon per record<" in text
    assert ">Lower is better for the clients: higher means that the adversary learns more.<" in text
    assert ">gaussian" in text
    for content in charts.values():
        assert not re.search(rb"#0000[ab]\d", content)


@pytest.mark.matrix
def test_a_chart_is_the_same_in_every_process():
    script = (
        "import hashlib\nfrom tests.test_report_layout import first_chart\n"
        "print([(name, hashlib.sha256(content).hexdigest()) for name, content in first_chart()])\n"
    )
    here = [(name, hashlib.sha256(content).hexdigest()) for name, content in first_chart()]
    assert in_another_process(script).strip() == repr(here)
    assert [name.rpartition(".")[2] for name, _ in here] == list(FORMATS)


@functools.cache
def first_chart():
    analysis = Analysis(double.make_run(small()))
    return list(itertools.islice(figure_files(analysis, list(FORMATS)), len(FORMATS)))
