"""Pages at their edges: names that would break them, runs of unusual shapes, sections that cannot be built."""

from __future__ import annotations

import dataclasses
import re

import pytest

from leakgauge.harness.core.cell import PartSpec, Target, TaskSpec
from leakgauge.harness.core.result import Failure, Flag, Run
from leakgauge.reports.html import PARTS, render, visible
from leakgauge.reports.layout import PAGE, folder_files
from leakgauge.reports.sections.tradeoffs import charts
from leakgauge.reports.select import Analysis
from tests import report_fixtures as double
from tests.report_page import SECTIONS, Page, complete, small

EVIL = '<script>alert("x")</script> & "quoted" \u202eneddih\nsecond line \x00\x1b[31m العربية 数据 $x_1$'
SHOWN = '<script>alert("x")</script> & "quoted" \\u202eneddih second line \\u0000\\u001b[31m العربية 数据 $x_1$'
FIRST = SHOWN.replace(" second line", "\n").split("\n")[0]


def sections(page: Page) -> list[str]:
    return [attributes["id"] for attributes in page.all("section")]


# names


def evil_run() -> Run:
    """A run in which every text that comes from somebody is hostile."""
    defenses = [double.NONE, PartSpec(EVIL, {"epsilon": 2.0})]
    defenses += [PartSpec("gaussian", {"epsilon": epsilon, "note": EVIL}) for epsilon in (1.0, 4.0)]
    attacks = [(double.MATCHING, double.PROBE, EVIL), (double.PRIOR, double.PROBE, "server")]
    attacks += [(PartSpec("map", {"note": EVIL}), double.PROBE, "server")]
    cells = double.grid(defenses, attacks, (0,), task=TaskSpec(EVIL, EVIL))
    run = double.make_run(cells, name=EVIL, failed=lambda cell: cell.attack.name == "map", public=[EVIL])
    flag = Flag(EVIL, EVIL)
    trainings = {
        key: dataclasses.replace(
            record,
            flags=(flag,),
            one_round=dataclasses.replace(record.one_round, source=EVIL, reason=EVIL, assumes=(EVIL,)),
        )
        for key, record in run.trainings.items()
    }
    return dataclasses.replace(
        run,
        study={**run.study, "title": EVIL, "text": EVIL},
        trainings=trainings,
        results={key: dataclasses.replace(result, flags=(flag,)) for key, result in run.results.items()},
        failures={key: Failure(failure.cell, EVIL, EVIL, EVIL) for key, failure in run.failures.items()},
        data_hashes={EVIL: EVIL},
    )


@pytest.fixture(scope="module")
def evil() -> str:
    return render(evil_run())


def test_a_page_of_hostile_names_is_complete(evil: str) -> None:
    page = complete(evil)
    assert sections(page) == SECTIONS
    assert len(page.all("script")) == len(page.all("style")) == 1
    assert page.text.count(SHOWN) > 20


def test_the_folder_s_page_of_hostile_names_is_complete() -> None:
    page = complete(folder_files(evil_run())[PAGE].decode())
    assert page.inline["script"] == []
    assert SHOWN in page.text


def test_no_name_turns_the_words_around_it_or_ends_the_page(evil: str) -> None:
    assert not re.search("[\u202a-\u202e\u2066-\u2069\x00\x1b]", evil)
    assert visible("a\u202eb\u2066c\x00\x7f\x85\ud800") == "a\\u202eb\\u2066c\\u0000\\u007f\\u0085\\ud800"
    assert visible("tab\tline\nعربي 数据 é") == "tab\tline\nعربي 数据 é"


def test_a_failure_is_told_by_the_first_line_of_its_message(evil: str) -> None:
    rows = re.findall(r'<tr data-status="failed">(.*?)</tr>', evil, re.S)
    assert len(rows) == 4
    assert all(FIRST in Page(f"<table>{row}</table>").text for row in rows)


def test_hostile_names_reach_the_charts_as_text(evil: str) -> None:
    labels = [attributes["aria-label"] for attributes in Page(evil).all("svg") if attributes.get("role") == "img"]
    assert len(labels) >= 3
    legend = re.findall(r'<ul class="legend">(.*?)</ul>', evil, re.S)
    assert any(SHOWN in Page(f"<ul>{part}</ul>").text for part in legend)


# shapes


def test_a_run_without_trainings_says_so() -> None:
    page = complete(render(dataclasses.replace(double.make_run(small()), trainings={})))
    assert sections(page) == [name for name in SECTIONS if name != "tradeoffs"]
    assert page.text.count("no training finished") == 2


def test_a_run_of_membership_alone_has_no_picture() -> None:
    cells = small(attacks=[(double.THRESHOLD, Target("members", count=50), "public")])
    page = complete(render(double.make_run(cells)))
    assert page.all("img") == []
    assert "pictures" not in sections(page)


@pytest.mark.parametrize("what", ["failed", "missing"])
def test_a_run_without_any_result_is_a_page_that_names_every_cell(what: str) -> None:
    run = double.make_run(small(), **{what: lambda cell: True})
    text = render(run)
    page = complete(text)
    assert text.count(f'<tr data-status="{what}">') == len(run.cells)
    assert f"0 finished, {4 if what == 'failed' else 0} failed, {4 if what == 'missing' else 0} missing" in page.text
    assert page.all("img") == []


def test_one_defense_without_any_control_is_a_page() -> None:
    page = complete(render(double.make_run(small(double.LAPLACE[0], attacks=[(double.MAP, double.PROBE, "server")]))))
    assert "laplace" in page.text
    assert {"claims", "leakage", "results"} <= set(sections(page))


def test_with_twenty_five_defenses_every_one_is_in_every_table() -> None:
    scales = [round(0.01 * 1.3**k, 4) for k in range(24)]
    many = [double.NONE, *(PartSpec("laplace", {"scale": scale}) for scale in scales)]
    run = double.make_run(small(*many))
    text = render(run)
    complete(text)
    bodies = dict(re.findall(r'<section id="(\w+)"[^>]*>(.*?)</section>', text, re.S))
    for name in ("claims", "leakage", "tradeoffs", "results"):
        words = Page(bodies[name]).text
        assert all(re.search(rf"scale= ?{scale:g}\b", words) for scale in scales), name
    assert "12 of 25 defenses" in Page(bodies["pictures"]).text
    analysis = Analysis(run)
    for chart in charts(analysis, next(iter(analysis.settings))):
        assert len(chart.series) <= 6
        assert len(chart.series) < 6 or "the data table has all" in chart.caption


# sections that cannot be built


def cut(*_: object) -> None:
    """Stands for a file that is cut short."""
    raise OSError("arrays.npz is <cut>")


@pytest.mark.parametrize(
    ("name", "changes", "error"),
    [("pictures", {"pictures": cut}, "OSError: arrays.npz is <cut>"), ("provenance", {"data_hashes": None}, "Error: ")],
)
def test_a_section_that_cannot_be_built_prints_its_error_in_its_place(name, changes, error) -> None:
    text = render(dataclasses.replace(double.make_run(small()), **changes))
    page = Page(text)
    assert page.open == []
    assert sections(page) == SECTIONS
    assert text.count("could not be built") == 1
    part = next(part for part in PARTS if part.id == name)
    words = Page(re.search(rf'<section id="{name}"[^>]*>(.*?)</section>', text, re.S)[1]).text
    assert words.startswith(f"{part.title} ✕ This section could not be built.")
    assert error in words
