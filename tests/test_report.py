"""The report as a page."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import itertools
import os
import re
import subprocess
import sys
import time

import pytest

from leakgauge.harness.core.cell import Cell, FederationSpec, PartSpec, Target, TaskSpec
from leakgauge.harness.core.result import Estimate, Pictures, Result, Run
from leakgauge.reports.html import render
from leakgauge.reports.select import Analysis
from leakgauge.reports.text.tables import plain
from tests import report_fixtures as double
from tests.report_page import SECTIONS, Page, complete, small


@pytest.fixture(scope="module")
def run() -> Run:
    return double.full_run()


@pytest.fixture(scope="module")
def source(run: Run) -> str:
    return render(run)


@pytest.fixture(scope="module")
def page(source: str) -> Page:
    return Page(source)


# the page as a whole


def test_every_section_of_a_full_run_is_there_in_order(source: str, page: Page) -> None:
    complete(source)
    assert [attributes["id"] for attributes in page.all("section")] == SECTIONS


def test_the_page_is_the_same_in_every_process_and_torch_is_never_imported(source: str) -> None:
    script = (
        "import hashlib, sys\nfrom reports.html import render\n"
        "from leakgauge.reports.text.tables import plain\nfrom tests import report_fixtures\n"
        "run = report_fixtures.full_run()\nplain(run)\n"
        "print(hashlib.sha256(render(run).encode()).hexdigest())\n"
        "print(sorted(name for name in sys.modules if name.split('.')[0] in ('torch', 'attacks', 'defenses')"
        " or name in ('leakgauge.harness.study.run', 'matplotlib.pyplot')))\n"
    )
    environment = os.environ | {"PYTHONHASHSEED": "7"}
    root = os.path.dirname(os.path.dirname(__file__))
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env=environment, cwd=root, check=True
    )
    assert done.stdout.split("\n")[:2] == [hashlib.sha256(source.encode()).hexdigest(), "[]"]


def test_the_page_loads_nothing(page: Page) -> None:
    for tag, attributes in page.tags:
        assert tag not in ("link", "iframe", "object", "embed", "base", "form", "audio", "video", "use-external")
        for name, value in attributes.items():
            if name in ("src", "href", "action", "srcset", "poster", "data", "background"):
                assert value.startswith(("#", "data:image/png;base64,", "data:text/csv;")), (tag, name, value[:60])
            for reference in re.findall(r"url\(([^)]*)\)", value):
                assert reference.startswith("#")
    for content in page.inline["style"] + page.inline["script"]:
        assert not re.search(r"https?:|url\(|@import|fetch|XMLHttpRequest|import\(", content)


def test_the_policy_allows_exactly_the_one_style_and_the_one_script(page: Page) -> None:
    policy = next(a["content"] for a in page.all("meta") if a.get("http-equiv") == "Content-Security-Policy")
    assert "unsafe" not in policy
    assert policy.startswith("default-src 'none'; img-src data:;")
    assert len(page.all("style")) == len(page.all("script")) == 1
    for kind in ("style", "script"):
        digest = base64.b64encode(hashlib.sha256("".join(page.inline[kind]).encode()).digest()).decode()
        assert f"{kind}-src 'sha256-{digest}';" in policy
    for tag, attributes in page.tags:
        assert not [name for name in attributes if name == "style" or name.startswith("on")], tag


def test_the_page_never_says_safe_or_private(page: Page) -> None:
    assert not re.search(r"\b(safe|safely|private|privately)\b", page.text, re.IGNORECASE)


def test_headings_do_not_skip_a_level_and_tables_are_labeled(page: Page) -> None:
    levels = [int(tag[1]) for tag, _ in page.tags if re.fullmatch("h[1-6]", tag)]
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(after <= before + 1 for before, after in itertools.pairwise(levels))
    assert len(page.all("caption")) == len(page.all("table"))
    assert all(attributes.get("scope") in ("col", "row", "rowgroup") for attributes in page.all("th"))
    assert all(attributes["alt"] for attributes in page.all("img"))
    ids = [attributes["id"] for _, attributes in page.tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    labels = {attributes["aria-labelledby"] for _, attributes in page.tags if "aria-labelledby" in attributes}
    assert labels <= set(ids)


def luminance(color: str) -> float:
    parts = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("selector", [":root", ':root[data-theme="dark"]'])
def test_text_has_a_contrast_over_four_and_a_half_and_lines_over_three(page: Page, selector: str) -> None:
    block = page.inline["style"][0].split(f"\n{selector} {{", 1)[1].split("}", 1)[0]
    colors = dict(re.findall(r"--([a-z0-9-]+): (#[0-9a-fA-F]{6});", block))
    for ground in ("surface", "page", "soft"):
        for ink in ("ink", "muted", "link"):
            assert contrast(colors[ink], colors[ground]) > 4.5
    for tone in ("bad", "warn", "good"):
        assert contrast(colors[tone], colors[f"{tone}-soft"]) > 4.5
        assert contrast(colors["ink"], colors[f"{tone}-tint"]) > 4.5
        assert contrast(colors["muted"], colors[f"{tone}-tint"]) > 4.5
        assert contrast(colors[tone], colors["surface"]) > 4.5
    for line in ("s1", "s2", "s3", "s4", "s5", "s6"):
        assert contrast(colors[line], colors["surface"]) > 2.9


def test_a_section_that_fails_prints_its_error_and_the_others_stand() -> None:
    def broken(cell: Cell) -> Pictures:
        raise OSError("arrays.npz of <b>this</b> cell is cut")

    text = render(double.make_run(small(), pictures=broken))
    page = Page(text)
    assert "OSError: arrays.npz of <b>this</b> cell is cut" in page.text
    assert "<b>this</b>" not in text
    assert [attributes["id"] for attributes in page.all("section")] == SECTIONS
    assert text.count("could not be built") == 1


def test_a_run_that_cannot_be_grouped_still_makes_a_page() -> None:
    broken = dataclasses.replace(double.make_run(small()), results=None)  # type: ignore[arg-type]
    text = render(broken)
    assert text.count("could not be built") >= 6
    assert Page(text).all("h1")


def test_names_are_escaped_everywhere() -> None:
    evil = '<script>alert("x")</script>'
    cells = double.grid(
        [double.NONE, PartSpec("gaussian", {"epsilon": 1.0, "note": evil}), PartSpec("gaussian", {"epsilon": 2.0})],
        [(double.MATCHING, double.PROBE, evil), (PartSpec("map", {"note": evil}), double.PROBE, "server")],
        (0,),
        task=TaskSpec("数据集 δ&<i>", evil),
    )
    text = render(double.make_run(cells, name=evil, failed=lambda cell: cell.attack.name == "map"))
    page = complete(text)
    assert len(page.all("script")) == 1
    assert page.all("i") == []
    assert evil in page.text
    assert "数据集 δ&<i>" in page.text
    assert evil in plain(double.make_run(cells), width=400)


# runs of unusual shapes


def test_one_defense_alone() -> None:
    page = complete(render(double.make_run(small(double.GAUSSIAN[0]))))
    assert "no ceiling measured" in page.text
    assert "not rated" in page.text


def test_only_the_undefended_gets_no_verdict_on_defenses() -> None:
    page = complete(render(double.make_run(small(double.NONE))))
    assert "No defense was measured" in page.text
    assert "? No verdict" in page.text


def test_membership_only_has_no_pictures_and_says_what_is_lacking() -> None:
    cells = small(attacks=[(double.THRESHOLD, Target("members", count=200), "public")])
    page = complete(render(double.make_run(cells)))
    assert "pictures" not in [attributes["id"] for attributes in page.all("section")]
    assert "Members identified" in page.text
    assert "Reconstruction of images: no such attack ran." in page.text
    assert "chance" in page.text


def test_a_run_in_which_all_failed() -> None:
    page = complete(render(double.make_run(small(), failed=lambda cell: True)))
    assert "No attack on a defense gave a number" in page.text
    assert page.text.count("RuntimeError: out of memory") == 4
    assert "second line" not in page.text
    assert "? No verdict" in page.text


def test_a_run_in_which_all_is_missing_and_one_without_cells() -> None:
    assert "missing" in complete(render(double.make_run(small(), missing=lambda cell: True))).text
    assert "0 of 0 cells" in complete(render(double.make_run(()))).text


def test_no_floor_means_no_rating() -> None:
    cells = small(attacks=[(double.MATCHING, double.PROBE, "server")])
    page = complete(render(double.make_run(cells)))
    assert "not measured" in page.text
    assert "not rated" in page.text
    assert "How much a guess without any message scores" in page.text


def test_a_number_that_means_nothing_is_na_with_its_reason() -> None:
    def make(cell: Cell) -> Result:
        nothing = Estimate("ssim", None, None, None, 0, "", higher_leaks=True, note="images below 7 pixels")
        return double.with_estimates(double.result_of(cell), nothing)

    page = complete(render(double.make_run(small(), make=make)))
    assert "n/a" in page.text
    assert "images below 7 pixels" in page.text


def test_a_hundred_defenses() -> None:
    many = [double.NONE, *(PartSpec("gaussian", {"epsilon": float(e)}) for e in range(1, 101))]
    page = complete(render(double.make_run(small(*many))))
    assert "gaussian epsilon=100" in page.text
    assert "12 of 101 defenses: those that leak most by mean SSIM." in page.text
    assert "6 of 101 lines are drawn; the data table has all." in page.text


def test_two_settings_are_never_mixed() -> None:
    asked = [(double.MATCHING, double.PROBE, "server"), (double.PRIOR, double.PROBE, "server")]
    one = double.grid([double.NONE, double.GAUSSIAN[0]], asked, (0,))
    two = double.grid([double.GAUSSIAN[0]], asked, (0,), federation=FederationSpec(clients=3, rounds=2, lr=0.5))
    analysis = Analysis(double.make_run([*one, *two]))
    assert list(analysis.settings.values()) == [
        "invented · lenet-dlg · 10 clients, 8 rounds, fedavg · batch=1 · lr=0.1",
        "invented · lenet-dlg · 3 clients, 2 rounds, fedavg · batch=32 · lr=0.5",
    ]
    alone = next(group for group in analysis.attacked if group.setting == list(analysis.settings)[1])
    assert analysis.ceiling(alone) is None
    page = complete(render(analysis.run))
    levels = [int(tag[1]) for tag, _ in page.tags if re.fullmatch("h[1-6]", tag)]
    assert all(after <= before + 1 for before, after in itertools.pairwise(levels))


def test_a_thousand_cells_take_under_ten_seconds_and_five_megabytes() -> None:
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
