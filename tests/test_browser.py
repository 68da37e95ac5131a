"""The report in a browser: what it does, what it must not do, and how it looks to those who cannot see it."""

from __future__ import annotations

import csv
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

import pytest
from playwright.sync_api import Browser

from harness.result import Run
from reports.export import to_csv
from reports.html import render
from reports.select import Analysis
from tests import report_fixtures as double
from tests.browser_case import HOSTILE, Visit, chromium, crowded_run, few_run, visit, whole_run

RUNS: dict[str, Callable[[], Run]] = {
    "full": double.full_run,
    "whole": whole_run,
    "few": few_run,
    "crowded": crowded_run,
}
DARK, LIGHT = "rgb(15, 18, 22)", "rgb(243, 245, 247)"
THEMES: dict[Literal["light", "dark"], str] = {"light": LIGHT, "dark": DARK}
ELSEWHERE = "http://127.0.0.1:9/image.png"
LOAD_ELSEWHERE = """async address => {
    const refused = new Promise(done => document.addEventListener("securitypolicyviolation", done));
    const image = new Image();
    image.src = address;
    document.body.append(image);
    const failed = new Promise(done => image.addEventListener("error", () => done({effectiveDirective: "none"})));
    return (await Promise.race([refused, failed])).effectiveDirective;
}"""
RUN_SCRIPT = "document.body.append(Object.assign(document.createElement('script'), {text: 'ran = 1'}))"
FOCUS = """() => {
    const one = document.activeElement, style = getComputedStyle(one), box = one.getBoundingClientRect();
    const bar = document.querySelector(".bar");
    const free = bar.contains(one) || one.matches(".skip") ? 0 : bar.getBoundingClientRect().bottom;
    return {name: one.outerHTML.slice(0, 80), line: style.outlineStyle === "none" ? 0 : parseFloat(style.outlineWidth),
        seen: box.bottom > free && box.top < innerHeight, end: one === document.body};
}"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as found:
        yield found


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    folder = tmp_path_factory.mktemp("pages")

    def written(name: str) -> Path:
        path = folder / f"{name}.html"
        if not path.exists():
            path.write_text(render(RUNS[name]()), encoding="utf-8")
        return path

    return written


@pytest.fixture
def few(browser: Browser, page: Callable[[str], Path]) -> Iterator[Visit]:
    with visit(browser, page("few")) as seen:
        yield seen


# for everybody


@pytest.mark.parametrize("width", [500, 800, 1366])
def test_axe_core_objects_to_nothing_in_both_themes(browser: Browser, page: Callable[[str], Path], width: int) -> None:
    with visit(browser, page("whole"), width=width) as seen:
        axe = seen.axe()
        for theme, colour in THEMES.items():
            seen.page.emulate_media(color_scheme=theme)
            assert seen.style("body", "backgroundColor") == colour
            assert axe(True) == []
        seen.open_details()
        assert axe(False) == []


@pytest.mark.parametrize("name", RUNS)
def test_every_text_stands_out_and_no_page_is_wider_than_the_window(
    browser: Browser, page: Callable[[str], Path], name: str
) -> None:
    with visit(browser, page(name), width=500) as seen:
        seen.open_details()
        assert seen.page.evaluate("document.documentElement.scrollWidth") == 500
        for theme, colour in THEMES.items():
            seen.page.emulate_media(color_scheme=theme)
            assert seen.style("body", "backgroundColor") == colour
            assert seen.poor_contrasts() == []


def test_defects_are_found(browser: Browser, tmp_path: Path) -> None:
    path = tmp_path / "poor.html"
    grey = (
        "<p style='color: #999'>grey</p><svg><text y=20 fill='#aaa'>thin</text></svg><p style='width: 600px'>wide</p>"
    )
    path.write_text(f"<!doctype html><title>poor</title>{grey}<img src='data:,'>", encoding="utf-8")
    with visit(browser, path, width=500) as seen:
        axe = seen.axe()
        assert [found.split(":")[0] for found in axe(True)] == ["color-contrast"]
        assert "image-alt: img" in axe(False)
        assert [text.split(":")[0] for text in seen.poor_contrasts()] == ["grey", "thin"]
        assert seen.page.evaluate("document.documentElement.scrollWidth") > 500


def test_everything_can_be_reached_by_keyboard_and_its_focus_is_seen(
    browser: Browser, page: Callable[[str], Path]
) -> None:
    with visit(browser, page("whole"), width=800) as seen:
        stops = []
        for _ in range(400):
            seen.page.keyboard.press("Tab")
            stop = seen.page.evaluate(FOCUS)
            if stop["end"]:
                break
            stops.append(stop)
        assert [stop["name"] for stop in stops if stop["line"] < 2 or not stop["seen"]] == []
        assert stop["end"]
        names = " ".join(stop["name"] for stop in stops)
        assert all(name in names for name in ("skip", "theme", "Claims", "summary", "filter", "status", "text/csv"))


def test_a_section_that_is_jumped_to_begins_below_the_bar(few: Visit) -> None:
    links = few.page.locator("nav a")
    assert links.count() >= 7
    for link in links.all():
        link.click()
        target = link.get_attribute("href")
        assert target is not None
        top = few.page.locator(f"{target}-title").bounding_box()
        bar = few.page.locator(".bar").bounding_box()
        assert top is not None
        assert bar is not None
        assert bar["y"] + bar["height"] <= top["y"] < 900


def test_a_data_table_opens_by_keyboard(few: Visit) -> None:
    details = few.page.locator("#tradeoffs details").first
    assert not details.locator("table").is_visible()
    details.locator("summary").focus()
    few.page.keyboard.press("Enter")
    assert details.locator("table").is_visible()


# what it must not do


def test_the_policy_refuses_a_script_and_a_picture_from_elsewhere(
    browser: Browser, page: Callable[[str], Path]
) -> None:
    with visit(browser, page("few")) as seen:
        assert seen.page.evaluate(LOAD_ELSEWHERE, ELSEWHERE) == "img-src"
        seen.page.evaluate(RUN_SCRIPT)
        assert seen.page.evaluate("window.ran") is None
        assert ["img-src" in text or "inline script" in text for text in seen.complaints] == [True, True]
        assert seen.requests == [seen.address, ELSEWHERE]  # asked for, and refused before it left
        seen.complaints.clear()
        seen.requests.pop()


def test_without_the_policy_both_are_noticed(browser: Browser, page: Callable[[str], Path], tmp_path: Path) -> None:
    path = tmp_path / "open.html"
    text = page("few").read_text(encoding="utf-8")
    path.write_text(re.sub('<meta http-equiv="Content-Security-Policy"[^>]*>', "", text), encoding="utf-8")
    with visit(browser, path) as seen:
        assert seen.page.evaluate(LOAD_ELSEWHERE, ELSEWHERE) == "none"
        seen.page.evaluate(RUN_SCRIPT)
        assert seen.page.evaluate("window.ran") == 1
        assert seen.requests.pop() == ELSEWHERE
        assert "ERR_" in seen.complaints.pop()


def test_names_that_mean_harm_are_only_names(browser: Browser, page: Callable[[str], Path]) -> None:
    with visit(browser, page("crowded")) as seen:
        assert seen.page.evaluate("window.ran") is None
        shown = seen.column("Defence")
        assert len(shown) == 202
        for name in HOSTILE:
            spelled = name.translate({0x202C: r"\u202c", 0x202E: r"\u202e"})
            assert any(text.startswith(spelled) for text in shown), name
        seen.page.locator("#filter").fill("<script>")
        assert 2 * len(range(0, 100, len(HOSTILE))) <= len(seen.column("Defence")) <= 202


# all results


def test_numbers_sort_by_value_both_ways_and_lacking_ones_come_last(few: Visit) -> None:
    for title in ("Value", "Time", "n"):
        before = few.column(title)
        present = sorted((value for value in before if value), key=float)
        lacking = [""] * (len(before) - len(present))
        assert lacking
        button = few.page.locator("#cells thead").get_by_role("button", name=title, exact=True)
        button.click()
        assert few.column(title) == present + lacking
        button.click()
        assert few.column(title) == present[::-1] + lacking


def test_text_sorts_both_ways_and_equal_rows_keep_their_order(few: Visit) -> None:
    order = list(zip(few.column("Attack"), few.column("Defence"), few.column("Seed"), strict=True))
    head = few.page.locator("#cells thead").get_by_role("columnheader", name="Attack")
    assert head.get_attribute("aria-sort") == "none"
    for direction in ("ascending", "descending"):
        order.sort(key=lambda row: row[0], reverse=direction == "descending")
        head.get_by_role("button").click()
        assert head.get_attribute("aria-sort") == direction
        assert list(zip(few.column("Attack"), few.column("Defence"), few.column("Seed"), strict=True)) == order
    assert len({row[0] for row in order}) == 4


def test_sorting_by_keyboard_keeps_the_focus_and_tells_the_direction(few: Visit) -> None:
    head = few.page.locator("#cells thead").get_by_role("columnheader", name="Status")
    head.get_by_role("button").focus()
    for key, direction, first in (("Enter", "ascending", "done"), ("Space", "descending", "missing")):
        few.page.keyboard.press(key)
        assert head.get_attribute("aria-sort") == direction
        assert few.page.locator("#cells [aria-sort=ascending], #cells [aria-sort=descending]").count() == 1
        assert few.column("Status")[0] == first
        assert few.page.evaluate("document.activeElement.textContent") == "Status"


def test_filter_and_status_narrow_the_rows_together_and_the_counter_says_so(few: Visit) -> None:
    counter, words, status = (few.page.locator(f"#{name}") for name in ("shown", "filter", "status"))
    everything = list(zip(few.column("Defence"), few.column("Attack"), few.column("Status"), strict=True))
    assert counter.inner_text() == f"{len(everything)} of {len(everything)} rows"
    words.fill("  GAUSSIAN server ")
    wanted = [row for row in everything if row[0] == "gaussian" and row[1] != "threshold"]
    assert few.column("Status") == [row[2] for row in wanted]
    assert counter.inner_text() == f"{len(wanted)} of {len(everything)} rows"
    status.select_option("missing")
    missing = [row for row in wanted if row[2] == "missing"]
    assert 0 < len(missing) < len(wanted)
    assert few.column("Status") == [row[2] for row in missing]
    few.page.get_by_role("button", name="Value").click()
    assert len(few.column("Status")) == len(missing)
    words.fill("no such thing")
    assert counter.inner_text() == f"0 of {len(everything)} rows"
    words.fill("")
    status.select_option("")
    assert len(few.column("Status")) == len(everything)


def test_the_download_is_the_table_however_it_is_sorted_and_filtered(few: Visit) -> None:
    titles = ("Seed", "Value", "n", "Flags", "Time")
    table = list(zip(*map(few.column, titles), strict=True))
    metrics = [metric.lower() for metric in few.column("Metric")]
    few.page.get_by_role("button", name="Value").click()
    few.page.locator("#filter").fill("gaussian")
    with few.page.expect_download() as waiting:
        few.page.get_by_role("link", name="Download CSV").click()
    assert waiting.value.suggested_filename == "results.csv"
    text = Path(waiting.value.path()).read_bytes().decode("utf-8")
    assert text == to_csv(Analysis(few_run()))
    lines = list(csv.DictReader(text.splitlines()))
    assert len(lines) == len(table) == 8
    for row, metric, line in zip(table, metrics, lines, strict=True):
        value, count = (line[metric], line[f"{metric}_n"]) if metric else ("", "")
        assert row == (line["seed"], value, count, line["flags"].replace(" ", ", "), line["seconds"])


# theme, print, no script


def test_the_theme_follows_the_system_until_the_button_says_otherwise_and_is_remembered(
    browser: Browser, page: Callable[[str], Path]
) -> None:
    with visit(browser, page("few"), theme="dark") as seen:
        button = seen.page.get_by_role("button", name="Theme")
        found = [(button.inner_text(), seen.style("body", "backgroundColor"))]
        for _ in range(3):
            button.click()
            found.append((button.inner_text(), seen.style("body", "backgroundColor")))
        assert found == [("Theme: auto", DARK), ("Theme: light", LIGHT), ("Theme: dark", DARK), ("Theme: auto", DARK)]
        seen.page.emulate_media(color_scheme="light")
        assert seen.style("body", "backgroundColor") == LIGHT
        button.click()
        button.click()
        seen.page.reload()
        assert (button.inner_text(), seen.style("body", "backgroundColor")) == ("Theme: dark", DARK)


@pytest.mark.parametrize("how", ["by the system", "by the button"])
def test_print_is_light_and_leaves_nothing_out(browser: Browser, page: Callable[[str], Path], how: str) -> None:
    with visit(browser, page("few"), width=800, theme="dark" if how == "by the system" else "light") as seen:
        if how == "by the button":
            seen.page.get_by_role("button", name="Theme").click(click_count=2)
        assert seen.style("body", "backgroundColor") == DARK
        closed = seen.page.locator("details > :not(summary)")
        assert not any(one.is_visible() for one in closed.all())
        seen.page.emulate_media(media="print")
        assert seen.style("body", "backgroundColor") == seen.style(".card", "backgroundColor") == "rgb(255, 255, 255)"
        assert seen.style("body", "color") == "rgb(0, 0, 0)"
        assert seen.poor_contrasts() == []
        hidden = "all => all.filter(one => !one.checkVisibility() || !one.getClientRects().length).length"
        assert closed.evaluate_all(hidden) == 0
        assert closed.count() > 5
        cut = "all => all.filter(one => getComputedStyle(one).overflow !== 'visible').length"
        assert seen.page.locator(".scroll, pre").evaluate_all(cut) == 0
        for name in (".bar", ".tools"):
            assert not seen.page.locator(name).is_visible()


def test_without_a_script_the_page_is_complete_and_shows_no_control_that_does_nothing(
    browser: Browser, page: Callable[[str], Path]
) -> None:
    texts = []
    for javascript in (True, False):
        with visit(browser, page("few"), javascript=javascript) as seen:
            controls = seen.page.locator("button:visible, input:visible, select:visible")
            assert (controls.count() > 3) == javascript
            assert seen.page.get_by_role("link", name="Download CSV").is_visible()
            seen.page.evaluate("document.querySelectorAll('.tools, #theme').forEach(one => one.remove())")
            texts.append(seen.page.locator("body").inner_text())
    assert texts[0] == texts[1]
    assert len(texts[0]) > 5000
