"""Pages at their edges: hostile names, and sections that cannot be built."""

import dataclasses
import re

import pytest

from leakgauge.harness.core.cell import PartSpec, TaskSpec
from leakgauge.harness.core.result import Failure, Flag
from leakgauge.harness.core.sinks import visible
from leakgauge.reports.html import PAGE, folder_files, render
from tests import report_fixtures as double
from tests.by_rows import by_rows
from tests.report_page import SECTIONS, Page, complete, sections, small
from tests.terminal_text import plain

TEXT = '<script>alert("x")</script> & src="data:image/png;base64,AAAA"'
EVIL = TEXT + " \u202eneddih\nsecond line \x00\x1b[31m العربية 数据 $x_1$"
SHOWN = TEXT + " \\u202eneddih second line \\u0000\\u001b[31m العربية 数据 $x_1$"
FIRST = SHOWN.replace(" second line", "\n").split("\n")[0]


def evil_run():
    """A run with a hostile text wherever a text comes from outside."""
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
def evil():
    return render(evil_run())


def test_a_page_of_hostile_names_is_complete(evil):
    page = complete(evil)
    assert sections(page) == SECTIONS
    assert len(page.all("script")) == len(page.all("style")) == 1
    assert page.text.count(SHOWN) > 20


@pytest.mark.matrix
def test_the_folder_s_page_and_the_terminal_table_of_hostile_names_are_complete():
    page = complete(folder_files(evil_run())[PAGE].decode())
    assert page.inline["script"] == []
    assert SHOWN in page.text
    assert TEXT in plain(evil_run(), width=800)


def test_no_name_turns_the_words_around_it_or_ends_the_page(evil):
    assert not re.search("[\u202a-\u202e\u2066-\u2069\x00\x1b]", evil)
    assert visible("a\u202eb\u2066c\x00\x7f\x85\ud800") == "a\\u202eb\\u2066c\\u0000\\u007f\\u0085\\ud800"
    assert visible("tab\tline\nعربي 数据 é") == "tab\tline\nعربي 数据 é"


def test_a_failure_shows_the_first_line_of_its_message(evil):
    rows = re.findall(r'<tr data-status="failed">(.*?)</tr>', evil, re.S)
    assert len(rows) == 4
    assert all(FIRST in Page(f"<table>{row}</table>").text for row in rows)


def test_hostile_names_reach_the_charts_as_text(evil):
    labels = [attributes["aria-label"] for attributes in Page(evil).all("svg") if attributes.get("role") == "img"]
    assert len(labels) >= 3
    legend = re.findall(r'<ul class="legend">(.*?)</ul>', evil, re.S)
    assert any(SHOWN in Page(f"<ul>{part}</ul>").text for part in legend)
    points = re.findall(r'<g class="pt \w+" tabindex="0"><title>(.*?)</title>', evil, re.S)
    assert any(Page(f"<p>{point}</p>").text.startswith(SHOWN) for point in points)


def cut(*_):
    """Stands for a truncated file."""
    raise OSError("arrays.npz is <i>cut</i>")


@by_rows(
    ("pictures", "Originals and reconstructions", {"pictures": cut}, "OSError: arrays.npz is <i>cut</i>"),
    ("provenance", "Provenance", {"data_hashes": None}, "Error: "),
)
def test_a_section_that_cannot_be_built_shows_its_error_in_its_place(name, title, changes, error):
    text = render(dataclasses.replace(double.make_run(small()), **changes))
    page = Page(text)
    assert page.open == []
    assert all(icon == {"aria-hidden": "true"} for icon in page.all("i"))
    assert sections(page) == SECTIONS
    assert text.count("could not be built") == 1
    words = Page(re.search(rf'<section id="{name}"[^>]*>(.*?)</section>', text, re.S)[1]).text
    assert words.startswith(f"{title} ✕ This section could not be built.")
    assert error in words
