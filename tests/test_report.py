"""The report as a page: the whole page, and runs of unusual shapes."""

import base64
import dataclasses
import hashlib
import itertools
import re
import time

import pytest

from leakgauge.harness.core.cell import FederationSpec, PartSpec, Target
from leakgauge.harness.core.result import PartInfo
from leakgauge.reports.html import render
from leakgauge.reports.sections.tradeoffs import charts
from leakgauge.reports.select import Analysis
from tests import report_fixtures as double
from tests.report_page import SECTIONS, Page, complete, full_source, part, sections, small, with_ssim
from tests.test_report_layout import in_another_process


@pytest.fixture(scope="module")
def page():
    return Page(full_source())


def test_every_section_of_a_full_run_is_there_in_order():
    assert sections(complete(full_source())) == SECTIONS


@pytest.mark.matrix
def test_the_page_is_the_same_in_every_process_and_torch_is_never_imported():
    script = (
        "import hashlib, sys\nfrom leakgauge.reports.html import render\n"
        "from tests.terminal_text import plain\nfrom tests import report_fixtures\n"
        "run = report_fixtures.full_run()\nplain(run)\n"
        "print(hashlib.sha256(render(run).encode()).hexdigest())\n"
        "print([name for name in sys.modules if name.split('.')[0] == 'torch' or name in ('matplotlib.pyplot',"
        " 'leakgauge.attacks', 'leakgauge.defenses', 'leakgauge.harness.study.run')])\n"
    )
    assert in_another_process(script).split("\n")[:2] == [hashlib.sha256(full_source().encode()).hexdigest(), "[]"]


def test_the_page_loads_nothing(page):
    for tag, attributes in page.tags:
        assert tag not in ("link", "iframe", "object", "embed", "base", "form", "audio", "video", "use-external")
        for name, value in attributes.items():
            if name in ("src", "href", "action", "srcset", "poster", "data", "background"):
                assert value.startswith(("#", "data:image/png;base64,", "data:application/zip;")), (
                    tag,
                    name,
                    value[:60],
                )
            for reference in re.findall(r"url\(([^)]*)\)", value):
                assert reference.startswith("#")
    for content in page.inline["style"] + page.inline["script"]:
        assert not re.search(r"https?:|url\(|@import|fetch|XMLHttpRequest|import\(", content)


def test_the_policy_allows_exactly_the_one_style_and_the_one_script(page):
    assert "unsafe" not in page.policy
    assert page.policy.startswith("default-src 'none'; img-src data:;")
    assert len(page.all("style")) == len(page.all("script")) == 1
    for kind in ("style", "script"):
        digest = base64.b64encode(hashlib.sha256("".join(page.inline[kind]).encode()).digest()).decode()
        assert f"{kind}-src 'sha256-{digest}';" in page.policy
    for tag, attributes in page.tags:
        assert not [name for name in attributes if name == "style" or name.startswith("on")], tag


def test_the_page_never_says_safe_or_private(page):
    assert not re.search(r"\b(safe|safely|private|privately)\b", page.text, re.IGNORECASE)


def skips_a_heading(page):
    levels = [int(tag[1]) for tag, _ in page.tags if re.fullmatch("h[1-6]", tag)]
    return levels[0] != 1 or levels.count(1) != 1 or any(b > a + 1 for a, b in itertools.pairwise(levels))


def test_headings_do_not_skip_a_level_and_tables_are_labeled(page):
    assert not skips_a_heading(page)
    assert len(page.all("caption")) == len(page.all("table"))
    assert all(attributes.get("scope") in ("col", "row", "rowgroup") for attributes in page.all("th"))
    assert all(attributes["alt"] for attributes in page.all("img"))
    ids = [attributes["id"] for _, attributes in page.tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    labels = {attributes["aria-labelledby"] for _, attributes in page.tags if "aria-labelledby" in attributes}
    assert labels <= set(ids)


def luminance(color):
    parts = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one, other):
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("selector", [":root", ':root[data-theme="dark"]'])
def test_text_has_a_contrast_over_four_and_a_half_and_lines_over_three(page, selector):
    block = page.inline["style"][0].split(f"\n{selector} {{", 1)[1].split("}", 1)[0]
    colors = dict(re.findall(r"--([a-z0-9-]+): (#[0-9a-fA-F]{6});", block))
    for ground, ink in itertools.product(("surface", "page", "soft"), ("ink", "muted", "link")):
        assert contrast(colors[ink], colors[ground]) > 4.5
    for tone in ("bad", "warn", "good"):
        pairs = [(tone, f"{tone}-soft"), ("ink", f"{tone}-soft"), (tone, "surface")]
        assert all(contrast(colors[one], colors[other]) > 4.5 for one, other in pairs)
    for one, other in (("page", "bad"), ("page", "ink"), ("muted", "track")):  # cells, tooltips, pale ratings
        assert contrast(colors[one], colors[other]) > 4.5
    for line in ("s1", "s2", "s3", "s4", "s5", "s6"):
        assert contrast(colors[line], colors["surface"]) > 2.9


def test_a_run_that_cannot_be_grouped_still_makes_a_page():
    text = render(dataclasses.replace(double.make_run(small()), results=None))
    assert text.count("could not be built") >= 6
    assert Page(text).all("h1")


def test_one_defense_without_any_control_and_no_defense_alone():
    attacks = [(double.MAP, double.PROBE, "server")]
    source = render(double.make_run(small(double.LAPLACE[0], attacks=attacks)))
    page = complete(source)
    for text in ("1 of 1 defense leaks", "floor n/a", "Some columns have no floor", "have no ceiling"):
        assert text in page.text
    assert "ceiling" not in part(source, "answer")
    assert {"claims", "attacks", "results"} <= set(sections(page))
    page = complete(render(double.make_run(small(double.NONE))))
    for text in ("Without a defense, this training leaks", "✕ Leaks 6 of 6 people recognized among 100"):
        assert text in page.text


def test_membership_only_has_no_pictures_and_states_what_is_lacking():
    cells = small(attacks=[(double.THRESHOLD, Target("members", count=200), "public")])
    source = render(double.make_run(cells))
    page = complete(source)
    assert "pictures" not in sections(page)
    assert page.all("img") == []
    for text in ("AUC 0.756: members found", "Reconstruction of images was not measured: no such attack ran."):
        assert text in page.text
    assert "how often the best attack is right beyond chance" in part(source, "answer")


@pytest.mark.parametrize("what", ["failed", "missing"])
def test_a_run_without_any_result_is_a_page_that_names_every_cell(what):
    run = double.make_run(small(), **{what: lambda cell: True})
    text = render(run)
    page = complete(text)
    assert text.count(f'<tr data-status="{what}">') == len(run.cells) == 4
    assert page.text.count("RuntimeError: out of memory") == (5 if what == "failed" else 0)
    assert "second line" not in page.text
    counts = f"{4 if what == 'failed' else 0} failed, {4 if what == 'missing' else 0} missing"
    for words in (f"0 finished, {counts}", "No attack on a defense returned a value", "? Too weak to tell"):
        assert words in page.text
    assert f"of 1 cell, 1 {what}" in page.text
    assert "nothing beyond chance" not in part(text, "attacks")
    assert page.all("img") == []


def test_a_run_without_cells_or_without_trainings():
    empty = complete(render(double.make_run(()))).text
    assert all(words in empty for words in ("No attack ran", "? Nothing to rate", "0 finished, 0 failed, 0 missing"))
    assert not any(words in empty for words in ("Only a floor ran", "seeds Theme", "Tested attacks", "· ·"))
    page = complete(render(dataclasses.replace(double.make_run(small()), trainings={})))
    assert sections(page) == [name for name in SECTIONS if name not in ("frontier", "tradeoffs")]
    assert page.text.count("no training finished") == 2


def test_a_number_that_means_nothing_is_na_with_its_reason():
    page = complete(render(double.make_run(small(), make=with_ssim(lambda cell: [None] * 6))))
    assert all(text in page.text for text in ("n/a", "no item finished"))


def test_an_attack_that_the_run_does_not_describe_is_taken_for_a_reconstruction():
    floor = {double.PRIOR.key: PartInfo("prior", "", floor=True)}
    made = dataclasses.replace(double.make_run(small()), attacks=floor)
    assert [group.case.kind for group in Analysis(made).attacked] == ["reconstruction"] * 2
    complete(render(made))


@pytest.mark.matrix
def test_each_of_a_hundred_defenses_is_in_every_table():
    many = [double.NONE, *(PartSpec("gaussian", {"epsilon": float(e)}) for e in range(1, 101))]
    run = double.make_run(small(*many))
    text = render(run)
    complete(text)
    for name in ("answer", "claims", "attacks", "tradeoffs", "results"):
        assert set(re.findall(r"epsilon= ?(\d+)\b", part(text, name))) == {str(e) for e in range(1, 101)}, name
    assert "12 of 101 defenses are shown: those with the highest mean SSIM." in part(text, "pictures")
    assert "6 of 101 lines are drawn; the data table lists all." in part(text, "tradeoffs")
    analysis = Analysis(run)
    for chart in charts(analysis, next(iter(analysis.settings))):
        assert len(chart.series) <= 6
        assert len(chart.series) < 6 or "the data table lists all" in chart.caption


@pytest.mark.parametrize(
    ("changes", "caution"),
    [({"dirty": True}, "The checkout differed from its commit"), ({"machine": "other"}, "from several environments")],
)
def test_the_provenance_warns_of_environments_and_cuts_a_long_study(changes, caution):
    run = double.make_run(small())
    first, *rest = run.results.values()
    other = dataclasses.replace(first, environment=dataclasses.replace(first.environment, **changes))
    results = {one.cell.id: one for one in (other, *rest)}
    page = complete(render(dataclasses.replace(run, results=results, study={"cells": ["x" * 100_000]})))
    assert caution in page.text
    assert "left out for length" in page.text
    assert "x" * 1000 not in page.text


def test_two_settings_are_never_mixed():
    questions = [(double.MATCHING, double.PROBE, "server"), (double.PRIOR, double.PROBE, "server")]
    one = double.grid([double.NONE, double.GAUSSIAN[0]], questions, (0,))
    two = double.grid([double.GAUSSIAN[0]], questions, (0,), federation=FederationSpec(clients=3, rounds=2, lr=0.5))
    analysis = Analysis(double.make_run([*one, *two]))
    assert list(analysis.settings.values()) == [
        "invented · lenet-dlg · 10 clients, 8 rounds, fedavg · batch=1 · lr=0.1",
        "invented · lenet-dlg · 3 clients, 2 rounds, fedavg · batch=32 · lr=0.5",
    ]
    alone = next(group for group in analysis.attacked if group.setting == list(analysis.settings)[1])
    assert analysis.ceiling(alone) is None
    assert not skips_a_heading(complete(render(analysis.run)))


@pytest.mark.matrix
def test_a_thousand_cells_take_under_ten_seconds_and_five_megabytes():
    many = [double.NONE, *(PartSpec("gaussian", {"epsilon": float(e)}) for e in range(1, 42))]
    attacks = [(attack, Target("probe", at, 8), "server") for attack in (double.MATCHING, double.MAP, double.PRIOR)
               for at in range(4)]  # fmt: skip
    cells = double.grid(many, attacks, (0, 1))
    made = double.make_run(cells)
    start = time.process_time()
    text = render(made)
    assert time.process_time() - start < 10
    assert len(cells) > 1000
    assert len(text.encode()) < 5_000_000
    complete(text)
