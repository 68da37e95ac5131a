from __future__ import annotations

import base64
import csv
import dataclasses
import hashlib
import io
import itertools
import os
import re
import subprocess
import sys
import time
from html.parser import HTMLParser

import numpy as np
import pytest

from harness.cell import Cell, FederationSpec, PartSpec, Target, TaskSpec
from harness.result import Estimate, PartInfo, Pictures, Result, Run
from harness.stats import mean
from reports import figures, svg
from reports.claims import claims
from reports.export import harmless, to_csv
from reports.html import render
from reports.limits import limits
from reports.notation import epsilon, fixed, short
from reports.pictures import gallery
from reports.pool import pool
from reports.select import Analysis
from reports.tables import plain, summary
from reports.tradeoffs import charts
from reports.verdict import verdict
from tests import report_fixtures as double

SECTIONS = ["verdict", "claims", "leakage", "pictures", "tradeoffs", "results", "limits", "provenance"]
VOID = {"meta", "img", "input", "br", "hr", "link", "wbr"}


class Page(HTMLParser):
    """A page taken apart: tags with their attributes, visible text, and the contents of style and script."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, dict[str, str]]] = []
        self.words: list[str] = []
        self.inline: dict[str, list[str]] = {"style": [], "script": []}
        self.open: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, {name: value or "" for name, value in attrs}))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, {name: value or "" for name, value in attrs}))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] in self.inline:
            self.inline[self.open[-1]].append(data)
        else:
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())

    def all(self, tag: str) -> list[dict[str, str]]:
        return [attributes for name, attributes in self.tags if name == tag]


@pytest.fixture(scope="module")
def run() -> Run:
    return double.full_run()


@pytest.fixture(scope="module")
def source(run: Run) -> str:
    return render(run)


@pytest.fixture(scope="module")
def page(source: str) -> Page:
    return Page(source)


def small(
    *defenses: PartSpec, attacks: list[tuple[PartSpec, Target, str]] | None = None, seeds: tuple[int, ...] = (0,)
) -> tuple[Cell, ...]:
    asked = attacks or [(double.MATCHING, double.PROBE, "server"), (double.PRIOR, double.PROBE, "server")]
    return double.grid(defenses or (double.NONE, double.GAUSSIAN[0]), asked, seeds)


def ssim_of(table: dict[str, list[float | None]]):
    """A maker of results with the given SSIM values by the name of the defence, or of the attack for the floor."""

    def make(cell: Cell) -> Result:
        key = cell.attack.name if cell.attack.name in table else cell.training.defense.name
        return double.with_estimates(double.result_of(cell), mean("ssim", table[key], higher_leaks=True))

    return make


def complete(text: str) -> Page:
    """The page, after the checks that hold for every page."""
    page = Page(text)
    assert "could not be built" not in text
    assert not re.search(r"\b(nan|NaN|inf|None|undefined)\b", page.text)
    assert page.open == []
    return page


# the page as a whole


def test_every_section_of_a_full_run_is_there_in_order(source: str, page: Page) -> None:
    complete(source)
    assert [attributes["id"] for attributes in page.all("section")] == SECTIONS


def test_the_page_is_the_same_in_every_process_and_torch_is_never_imported(source: str) -> None:
    script = (
        "import hashlib, sys\nfrom reports.html import render\n"
        "from reports.tables import plain\nfrom tests import report_fixtures\n"
        "run = report_fixtures.full_run()\nplain(run)\n"
        "print(hashlib.sha256(render(run).encode()).hexdigest())\n"
        "print(sorted(name for name in sys.modules if name.split('.')[0] in ('torch', 'attacks', 'defenses')"
        " or name in ('harness.run', 'matplotlib.pyplot')))\n"
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


def test_headings_do_not_skip_a_level_and_tables_are_labelled(page: Page) -> None:
    levels = [int(tag[1]) for tag, _ in page.tags if re.fullmatch("h[1-6]", tag)]
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(after <= before + 1 for before, after in itertools.pairwise(levels))
    assert len(page.all("caption")) == len(page.all("table"))
    assert all(attributes.get("scope") in ("col", "row") for attributes in page.all("th"))
    assert all(attributes["alt"] for attributes in page.all("img"))
    ids = [attributes["id"] for _, attributes in page.tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    labels = {attributes["aria-labelledby"] for _, attributes in page.tags if "aria-labelledby" in attributes}
    assert labels <= set(ids)


def luminance(colour: str) -> float:
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("selector", [":root", ':root[data-theme="dark"]'])
def test_text_has_a_contrast_over_four_and_a_half_and_lines_over_three(page: Page, selector: str) -> None:
    block = page.inline["style"][0].split(f"\n{selector} {{", 1)[1].split("}", 1)[0]
    colours = dict(re.findall(r"--([a-z0-9-]+): (#[0-9a-fA-F]{6});", block))
    for ground in ("surface", "page", "soft"):
        for ink in ("ink", "muted", "link"):
            assert contrast(colours[ink], colours[ground]) > 4.5
    for tone in ("bad", "warn", "good"):
        assert contrast(colours[tone], colours[f"{tone}-soft"]) > 4.5
        assert contrast(colours["ink"], colours[f"{tone}-tint"]) > 4.5
        assert contrast(colours["muted"], colours[f"{tone}-tint"]) > 4.5
        assert contrast(colours[tone], colours["surface"]) > 4.5
    for line in ("s1", "s2", "s3", "s4", "s5", "s6"):
        assert contrast(colours[line], colours["surface"]) > 2.9


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


def test_one_defence_alone() -> None:
    page = complete(render(double.make_run(small(double.GAUSSIAN[0]))))
    assert "no ceiling measured" in page.text
    assert "not rated" in page.text


def test_only_the_undefended_gets_no_verdict_on_defences() -> None:
    page = complete(render(double.make_run(small(double.NONE))))
    assert "No defence was measured" in page.text
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
    assert "No attack on a defence gave a number" in page.text
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


def test_a_hundred_defences() -> None:
    many = [double.NONE, *(PartSpec("gaussian", {"epsilon": float(e)}) for e in range(1, 101))]
    page = complete(render(double.make_run(small(*many))))
    assert "gaussian epsilon=100" in page.text
    assert "12 of 101 defences: those that leak most by mean SSIM." in page.text
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
    start = time.perf_counter()
    text = render(made)
    assert time.perf_counter() - start < 10
    assert len(cells) > 1000
    assert len(text.encode()) < 5_000_000
    complete(text)


# verdict, ratings, pooling


@pytest.mark.parametrize(
    ("ssim", "word", "badge"),
    [(0.36, "High", "Leaks"), (0.355, "Moderate", "Leaks in part"), (0.24, "Moderate", "Leaks in part"),
     (0.235, "Low", "Nothing recognisable")],
)  # fmt: skip
def test_the_word_follows_from_the_way_between_floor_and_ceiling(ssim: float, word: str, badge: str) -> None:
    table = {"none": [0.505, 0.495], "gaussian": [ssim, ssim], "prior": [0.21, 0.21]}
    analysis = Analysis(double.make_run(small(), make=ssim_of(table)))
    group = analysis.defended("reconstruction")[0]
    assert analysis.rating(group)._replace(place=None) == (word, None, "")
    assert verdict(analysis).badge.words == badge


def test_a_single_recognisable_image_is_high_although_the_mean_is_low() -> None:
    table = {"none": [0.95] * 7 + [0.9], "gaussian": [0.1] * 7 + [0.6], "prior": [0.1] * 7 + [0.11]}
    analysis = Analysis(double.make_run(small(), make=ssim_of(table)))
    group = analysis.defended("reconstruction")[0]
    assert analysis.rating(group).word == "High"
    assert (analysis.rating(group).place or 0.0) < 0.1
    found = verdict(analysis)
    assert found.figures[1][1:3] == ("1", "of 8 defended")
    assert found.sentence == "1 of 1 defence leaks to the attacks that ran"


def test_an_attack_that_fails_without_a_defence_says_nothing_about_defences() -> None:
    table = {"none": [0.2, 0.3, 0.25], "gaussian": [0.2, 0.2, 0.2], "prior": [0.25, 0.25, 0.25]}
    made = double.make_run(small(), make=ssim_of(table))
    page = complete(render(made))
    flag = "the attack does not beat the floor without a defence: this column says nothing about the defences."
    assert f"Warning: {flag} matching, server, probe, round 0" in page.text
    assert "! does not beat the floor" in page.text
    assert "? No verdict" in page.text
    assert any("fails without a defence too" in limit for limit in limits(Analysis(made)))


def test_the_floor_is_the_best_guess_and_the_undefended_one() -> None:
    other = PartSpec("prior", {"guess": "other"})
    attacks = [(a, double.PROBE, "server") for a in (double.MATCHING, double.PRIOR, other)]

    def make(cell: Cell) -> Result:
        value = 0.9 if cell.attack == double.MATCHING else 0.3 if cell.attack == other else 0.2
        value += 0.0 if cell.training.defense == double.NONE else 0.05
        return double.with_estimates(double.result_of(cell), mean("ssim", [value] * 3, higher_leaks=True))

    analysis = Analysis(double.make_run(small(attacks=attacks), make=make))
    assert [analysis.floor_value(group) for group in analysis.attacked] == pytest.approx([0.3, 0.3])


def test_seeds_are_pooled_into_one_sample() -> None:
    one, two = mean("ssim", [0.1, 0.2, None], higher_leaks=True), mean("ssim", [0.4, 0.5], higher_leaks=True)
    pooled, direct = pool([one, two]), mean("ssim", [0.1, 0.2, 0.4, 0.5], higher_leaks=True)
    assert (pooled.value, pooled.low, pooled.high, pooled.n) == (direct.value, direct.low, direct.high, 4)
    assert pooled.values == (0.1, 0.2, None, 0.4, 0.5)


def test_numbers_without_items_are_averaged_over_the_seeds() -> None:
    aucs = [Estimate("auc", value, 0.4, 0.9, 100, "DeLong", higher_leaks=True) for value in (0.6, 0.7)]
    pooled, direct = pool(aucs), mean("auc", [0.6, 0.7], higher_leaks=True)
    assert (pooled.value, pooled.low, pooled.high) == (direct.value, direct.low, 1.0)
    assert (direct.high or 0.0) > 1.0  # Student's t does not know the range
    assert pooled.method.endswith("over the seeds")
    lost = Estimate("auc", None, None, None, 0, "", higher_leaks=True, note="no score")
    assert pool([aucs[0], lost]).note == "no value in 1 of 2 seeds"


def test_the_four_figures_are_the_numbers_of_the_run(run: Run) -> None:
    worst, images, cost, cells = verdict(Analysis(run)).figures
    assert worst.value == "0.904"
    assert "gaussian epsilon=64" in worst.detail
    assert images.unit == "of 168 defended"  # 7 defences x 6 images x 2 rounds x 2 seeds
    assert cost.value.startswith("−")
    assert (cells.value, cells.unit) == ("141", "of 144 cells")
    assert cells.detail.startswith("2 failed, 1 missing")


# claims


def test_nothing_promised_is_infinite_and_every_epsilon_has_its_scope(run: Run) -> None:
    rows = {row.defense.text: row for row in claims(Analysis(run)).rows}
    assert rows["no defence"].one_round.epsilon == "∞ (nothing promised)"
    assert rows["gaussian epsilon=4"].one_round[:2] == ("4", "per record, one round, δ = 1e−5")
    assert rows["gaussian epsilon=4"].whole_run[:2] == ("11.31", "per record, whole run, δ = 1e−5")
    assert rows["laplace scale=0.5"].whole_run[:2] == ("32", "per coordinate, whole run, δ = 0")


def test_an_epsilon_that_differs_between_seeds_is_a_range() -> None:
    claim = double.claim_of(double.GAUSSIAN[0], "one round")
    other = dataclasses.replace(claim, epsilon=1.25)
    assert epsilon([claim, other]) == "1 to 1.25 over the seeds"
    assert epsilon([claim, dataclasses.replace(claim, epsilon=None)]) == "∞ (nothing promised)"
    assert epsilon([]) == "n/a"


def test_epsilons_of_different_units_never_share_a_chart(run: Run) -> None:
    analysis = Analysis(run)
    found = [chart for chart in charts(analysis, next(iter(analysis.settings))) if "epsilon" in chart.title]
    assert len({chart.title for chart in found}) == len(found) == 6
    for chart in found:
        assert len({series.label.split()[0] for series in chart.series}) == 1
        assert ("per record" in chart.x_label) != ("per coordinate" in chart.x_label)
        assert ("one round" in chart.x_label) != ("whole run" in chart.x_label)


# pictures


def test_pictures_of_data_not_known_to_be_public_are_withheld_with_a_word() -> None:
    text = render(double.make_run(small(), public=()))
    page = complete(text)
    assert "data:image" not in text
    assert "the data set invented is not known to be public" in page.text
    assert "0.92 recognisable" in page.text
    assert "data:image" not in render(double.make_run(small()), images="redact")
    assert "by the option --images redact" in render(double.make_run(small()), images="redact")
    assert "--images none" in render(double.make_run(small()), images="none")


def test_the_attack_is_chosen_on_the_mean_and_not_image_by_image() -> None:
    attacks = [(double.MATCHING, double.PROBE, "server"), (double.MAP, double.PROBE, "server")]

    def make(cell: Cell) -> Result:
        values = [0.9, 0.1, 0.1, 0.1, 0.1, 0.1] if cell.attack == double.MATCHING else [0.3] * 5 + [None]
        return double.with_estimates(double.result_of(cell), mean("ssim", values, higher_leaks=True))

    found = gallery(Analysis(double.make_run(small(attacks=attacks), make=make)), "public")
    assert found is not None
    (grid,) = found.grids
    assert [head.attack for head in grid.heads] == ["map, server"] * 2
    assert [row[1][1].caption for row in grid.rows] == ["0.30"] * 5 + ["no reconstruction"]
    assert grid.rows[5][1][1].word == "failed"
    assert not any(tile.recognisable for _, row in grid.rows for tile in row)


def test_a_picture_is_at_its_own_size_and_a_column_of_failed_cells_says_so() -> None:
    made = double.make_run(small(), failed=lambda cell: cell.training.defense != double.NONE)
    found = gallery(Analysis(made), "public")
    assert found is not None
    first, undefended, defended, floor = found.grids[0].rows[0][1]
    content = base64.b64decode(first.source.split(",", 1)[1])
    assert content[:4] == b"\x89PNG"
    assert (int.from_bytes(content[16:20], "big"), int.from_bytes(content[20:24], "big")) == (24, 24)
    assert undefended.recognisable
    assert (defended.word, defended.source) == ("failed", "")
    assert floor.source


def test_a_guess_that_is_not_finite_is_a_failed_one_and_grey_images_are_shown() -> None:
    def grey(cell: Cell) -> Pictures:
        made = double.pictures_of(cell)
        guess = made.guess[..., :1].copy()
        guess[0] = np.nan
        return Pictures(made.original[..., :1], guess)

    found = gallery(Analysis(double.make_run(small(), pictures=grey)), "public")
    assert found is not None
    rows = found.grids[0].rows
    assert rows[0][1][1].word == "failed"
    assert rows[1][1][1].source


def test_large_pictures_are_left_out_before_the_page_grows_too_big() -> None:
    def large(cell: Cell) -> Pictures:
        images = np.random.default_rng(0).uniform(size=(6, 1, 256, 256, 3)).astype(np.float32)
        return Pictures(images, images)

    text = render(double.make_run(small(), pictures=large))
    assert len(text) < 3_000_000
    assert "of 6 images, in the order of the victims" in text


# charts


def test_charts_of_one_point_are_not_drawn() -> None:
    cells = small(double.NONE, double.GAUSSIAN[0])
    analysis = Analysis(double.make_run(cells))
    titles = [chart.title for chart in charts(analysis, next(iter(analysis.settings)))]
    assert titles == ["Test accuracy over the rounds", "Test loss over the rounds"]


def a_chart(**changes: object) -> figures.Chart:
    points = (figures.Point(1.0, 0.2, 0.1, 0.3), figures.Point(8.0, 0.6))
    chart = figures.Chart("a", "A title", "x", "y", (figures.Series("one & only", points, 0),), "B.", "C.", ("h",), ())
    return dataclasses.replace(chart, **changes)


@pytest.mark.parametrize("log", [True, False])
def test_a_chart_has_no_inline_style_and_a_tooltip_for_each_marker(log: bool) -> None:
    drawn = figures.svg(a_chart(log_x=log, lines=((0.5, "limit"),)), prefix="p-")
    assert "style" not in drawn
    assert "http" not in drawn
    assert drawn.count("<title>one &amp; only: ") == 2
    assert 'class="k-s1"' in drawn
    assert not re.findall(r'(?:fill|stroke)="#0000', drawn)
    assert 'role="img" aria-label="A title. C. B.' in drawn
    assert all(name.startswith("p-") for name in re.findall(r' id="([^"]+)"', drawn))
    ids = set(re.findall(r' id="([^"]+)"', drawn))
    assert set(re.findall(r'href="#([^"]+)"', drawn)) | set(re.findall(r"url\(#([^)]+)\)", drawn)) <= ids


def test_names_without_a_glyph_do_not_stop_a_chart() -> None:
    assert "数据" in figures.svg(a_chart(x_label="数据 $x_1$ 🙂"), prefix="p-")


def test_style_declarations_become_attributes() -> None:
    source = (
        '<svg xmlns="http://www.w3.org/2000/svg" width="10pt" height="5pt" version="1.1"><style>*{}</style>'
        "<text style=\"font: bold 9px 'Sans'; fill: #0000a1; text-anchor: middle\">a</text></svg>"
    )
    drawn = svg.embed(source, prefix="p", colours={"#0000a1": "s1"}, titles={}, label="<l>")
    assert '<text font-size="9" font-weight="bold"' in drawn.replace('text-anchor="middle" ', "")
    assert 'class="f-s1"' in drawn
    assert 'viewBox="0 0 10 5"' in drawn
    assert "&lt;l&gt;" in drawn


# all results


def test_a_text_that_begins_like_a_formula_is_quoted_and_numbers_are_left_alone() -> None:
    assert [harmless(x) for x in ("=1+1", "+a", "-a", "@a", "\ta", "a=b")] == [
        "'=1+1",
        "'+a",
        "'-a",
        "'@a",
        "'\ta",
        "a=b",
    ]
    assert [harmless(x) for x in (-0.5, 3, None, True)] == ["-0.5", "3", "", "True"]


def test_the_download_holds_every_cell_with_its_numbers(run: Run, page: Page) -> None:
    link = next(a for a in page.all("a") if "download" in a)
    text = base64.b64decode(link["href"].split(",", 1)[1]).decode()
    assert text == to_csv(Analysis(run))
    rows = list(csv.DictReader(io.StringIO(text)))
    assert [row["cell"] for row in rows] == [cell.id for cell in run.cells]
    assert {row["status"] for row in rows} == {"done", "failed", "missing"}
    first = run.results[run.cells[0].id].estimate("ssim")
    assert (float(rows[0]["ssim"]), float(rows[0]["ssim_low"])) == (first.value, first.low)
    assert rows[0]["one_round_epsilon"] == "inf"


def test_all_cells_are_readable_without_a_script(run: Run, page: Page) -> None:
    rows = [attributes for attributes in page.all("tr") if "data-status" in attributes]
    assert len(rows) == len(run.cells)
    assert not any("hidden" in attributes for attributes in rows)
    assert "RuntimeError: out of memory" in page.text
    assert "few-images" in page.text


def test_limits_name_the_attacks_that_know_the_defence(run: Run) -> None:
    said = " ".join(limits(Analysis(run)))
    assert "map uses what is known of the defence; matching and threshold ignore it" in said
    assert "no epsilon here is proved or audited" in said
    naive = " ".join(limits(Analysis(double.make_run(small()))))
    assert "matching ignores it, so each number is a lower bound" in naive
    assert "there is one seed" in naive


# the table in the terminal


def test_the_terminal_table_fits_a_hundred_columns_and_holds_the_epsilon_with_its_unit(run: Run) -> None:
    text = plain(run)
    assert max(map(len, text.splitlines())) <= 100
    assert "4 per record" in text
    assert "one round, δ 1e−5" in text
    assert "∞: nothing" in text
    assert summary(run).row_count == len(Analysis(run).attacked)


@pytest.mark.parametrize("cells", [(), small(), small(double.GAUSSIAN[0])], ids=["none", "two", "one"])
def test_the_terminal_table_of_small_runs(cells: tuple[Cell, ...]) -> None:
    assert "nan" not in plain(double.make_run(cells, failed=lambda cell: cell.training.defense != double.NONE)).lower()


def test_numbers_are_written_with_a_real_minus_and_without_minus_zero() -> None:
    assert [fixed(-0.0001), fixed(-0.5), fixed(None), short(1e-5), short(-2.5e-7), short(57934.2), short(1e300)] == [
        "0.000", "−0.500", "n/a", "1e−5", "−2.5e−7", "57\u00a0930", "1e300",
    ]  # fmt: skip


def test_an_attack_that_the_run_does_not_describe_is_taken_for_a_reconstruction() -> None:
    made = dataclasses.replace(
        double.make_run(small()), attacks={double.PRIOR.label: PartInfo("prior", "", floor=True)}
    )
    assert [group.kind for group in Analysis(made).attacked] == ["reconstruction"] * 2
    complete(render(made))
