"""The report in a browser: function, security policy, accessibility."""

from __future__ import annotations

import csv
import re
import zipfile

import pytest

from leakgauge.harness.core.cell import Target
from leakgauge.harness.gate.judge import Verdict
from leakgauge.reports.dossier.pages import render as dossier
from leakgauge.reports.export import rows_as
from leakgauge.reports.html import page, render
from leakgauge.reports.sections import results
from leakgauge.reports.select import Analysis
from tests import report_fixtures as double
from tests.browser_case import HOSTILE, SAME, Theme, against, chromium, few_run, started, tab, visit, whole_run

DARK, LIGHT = "rgb(20, 23, 27)", "rgb(255, 255, 255)"
THEMES: dict[Theme, str] = {"light": LIGHT, "dark": DARK}
WIDTHS = (500, 800, 1366)
FOLDS = "details.fold"
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
UNSEEN = "all => all.filter(one => !one.checkVisibility() || !one.getClientRects().length).length"
FOCUS = """() => {
    const one = document.activeElement, style = getComputedStyle(one), box = one.getBoundingClientRect();
    const bar = document.querySelector(".bar");
    const free = bar.contains(one) || one.matches(".skip") ? 0 : bar.getBoundingClientRect().bottom;
    return {name: one.outerHTML.slice(0, 80), line: style.outlineStyle === "none" ? 0 : parseFloat(style.outlineWidth),
        seen: box.bottom > free && box.top < innerHeight, end: one === document.body};
}"""


@pytest.fixture(scope="module")
def browser():
    with chromium() as found:
        yield found


@pytest.fixture(scope="module")
def few_page(tmp_path_factory):
    """Every section except the changes, in few cells."""
    path = tmp_path_factory.mktemp("few") / "report.html"
    path.write_text(render(few_run()), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def few_tab(browser, few_page):
    with tab(browser, few_page) as seen:
        yield seen


@pytest.fixture(scope="module")
def whole_tab(browser, tmp_path_factory):
    """Every section, with every verdict of a claim and of a change, and hostile names."""
    path, run = tmp_path_factory.mktemp("whole") / "report.html", whole_run()
    path.write_text(render(run, against=against(run)), encoding="utf-8")
    with tab(browser, path) as seen:
        yield seen


@pytest.fixture
def few(few_tab):
    """With its folded sections open."""
    few_tab.open()
    few_tab.open_details(FOLDS)
    yield few_tab
    few_tab.check()


@pytest.fixture
def whole(whole_tab):
    whole_tab.open()
    yield whole_tab
    whole_tab.check()


@pytest.mark.matrix
def test_axe_core_objects_to_nothing_at_any_width_nor_in_either_theme(whole):
    axe, found = whole.axe(), dict[tuple[int, str], list[str]]()
    whole.open_details()
    for width in WIDTHS:
        whole.resize(width)
        found[width, "without contrast"] = axe(False)
    whole.keep_text()
    whole.resize(min(WIDTHS))
    for theme, color in THEMES.items():
        assert whole.color(theme) == color
        found[min(WIDTHS), theme] = axe(True)
    assert {state: objections for state, objections in found.items() if objections} == {}


def test_every_text_stands_out_and_no_page_is_wider_than_the_window(whole):
    whole.open_details()
    for width in WIDTHS:
        whole.resize(width)
        assert whole.page.evaluate("document.documentElement.scrollWidth") == width
    for theme, color in THEMES.items():
        assert whole.color(theme) == color
        assert whole.poor_contrasts() == []


def test_changes_of_every_verdict_are_seen_whole_at_every_width(whole):
    words = [text.split(maxsplit=1)[1] for text in whole.page.locator("#changes .pill").all_inner_texts()]
    # The first two have other words here; the last is a verdict on the rules, never on a check.
    elsewhere = (Verdict.FAIL, Verdict.PASS, Verdict.NOT_ACCEPTED)
    others = [verdict.value.lower() for verdict in Verdict if verdict not in elsewhere]
    assert set(words) == {"leakage increased", "leakage decreased", *others}
    box = whole.page.locator("#changes .scroll")
    for width in WIDTHS:
        whole.resize(width)
        assert box.evaluate("one => one.scrollWidth - one.clientWidth") == 0
        assert box.locator("tbody tr > *").evaluate_all(UNSEEN) == 0


def test_defects_are_found(browser, tmp_path):
    path = tmp_path / "poor.html"
    gray = "<p style='color: #999'>gray</p><svg><text y=20 fill='#aaa'>thin</text></svg><p style='width: 600px'>wide"
    path.write_text(f"<!doctype html><title>poor</title>{gray}</p><img src='data:,'>", encoding="utf-8")
    with visit(browser, path, width=500) as seen:
        axe = seen.axe()
        assert [found.split(":")[0] for found in axe(True)] == ["color-contrast"]
        assert "image-alt: img" in axe(False)
        assert [text.split(":")[0] for text in seen.poor_contrasts()] == ["gray", "thin"]
        assert seen.page.evaluate("document.documentElement.scrollWidth") > 500


def test_everything_can_be_reached_by_keyboard_and_its_focus_is_seen(whole):
    whole.resize(800)
    whole.open_details(FOLDS)
    stops = []
    for _ in range(400):
        whole.page.keyboard.press("Tab")
        stop = whole.page.evaluate(FOCUS)
        if stop["end"]:
            break
        stops.append(stop)
    assert [stop["name"] for stop in stops if stop["line"] < 2 or not stop["seen"]] == []
    assert stop["end"]
    names = " ".join(stop["name"] for stop in stops)
    expected = ("skip", "theme", "Changes", "changes-caption", "summary", "filter", "status", "application/zip")
    assert all(name in names for name in (*expected, '<g class="pt leaks"', '<span class="cell leaks"'))


@pytest.mark.matrix
def test_a_section_that_is_jumped_to_begins_below_the_bar(few):
    links = few.page.locator("nav a")
    assert [link.inner_text() for link in links.all()] == ["Answer", "Claims", "Attacks", "More"]
    for link in links.all():
        link.click()
        address = str(link.get_attribute("href"))
        top = few.page.locator("#more summary" if address == "#more" else f"{address}-title").first.bounding_box()
        bar = few.page.locator(".bar").bounding_box()
        assert bar["y"] + bar["height"] <= top["y"] < 900


def test_a_data_table_opens_by_keyboard(few):
    details = few.page.locator("#tradeoffs details").first
    assert not details.locator("table").is_visible()
    details.locator("summary").focus()
    few.page.keyboard.press("Enter")
    assert details.locator("table").is_visible()


def test_the_policy_refuses_a_script_and_a_picture_from_elsewhere(few):
    assert few.page.evaluate(LOAD_ELSEWHERE, ELSEWHERE) == "img-src"
    few.page.evaluate(RUN_SCRIPT)
    assert few.page.evaluate("window.ran") is None
    assert ["img-src" in text or "inline script" in text for text in few.complaints] == [True, True]
    assert few.requests == [few.address, ELSEWHERE]  # requested, and refused before it left
    few.complaints.clear()
    few.requests.pop()


def test_without_the_policy_both_are_noticed(browser, few_page, tmp_path):
    path = tmp_path / "open.html"
    text = few_page.read_text(encoding="utf-8")
    path.write_text(re.sub('<meta http-equiv="Content-Security-Policy"[^>]*>', "", text), encoding="utf-8")
    with visit(browser, path) as seen:
        assert seen.page.evaluate(LOAD_ELSEWHERE, ELSEWHERE) == "none"
        seen.page.evaluate(RUN_SCRIPT)
        assert seen.page.evaluate("window.ran") == 1
        assert seen.requests.pop() == ELSEWHERE
        assert "ERR_" in seen.complaints.pop()


def test_hostile_names_are_only_names(whole):
    assert whole.page.evaluate("window.ran") is None
    whole.open_details(FOLDS)
    spelled = {name: name.translate({0x202C: r"\u202c", 0x202E: r"\u202e"}) for name in HOSTILE}
    changed = whole.page.locator("#changes th[scope=row] strong").all_inner_texts()
    assert set(spelled.values()) - {spelled[SAME]} <= set(changed)
    assert set(spelled.values()) <= {text.partition("\n")[0] for text in whole.column("Defense")}
    whole.page.locator("#filter").fill("<script>")
    assert whole.column("Status") == ["done"]


def test_numbers_sort_by_value_both_ways_and_lacking_ones_come_last(few):
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


def test_rows_beyond_the_first_hundred_sort_and_are_found_like_the_others(browser, tmp_path):
    attacks = [(double.MATCHING, Target("probe", at, 6), "server") for at in range(8)]
    run = double.make_run(double.grid([double.NONE, double.LAPLACE[0]], attacks, range(8)), pictures=lambda _: None)
    path, values = tmp_path / "many.html", [run.results[cell.id].estimates[0].value for cell in run.cells]
    path.write_text(page("many", [results.SECTION], Analysis(run)), encoding="utf-8")
    with visit(browser, path) as seen:
        seen.open_details(FOLDS)
        for ranked in (sorted(values), sorted(values, reverse=True)):
            seen.page.get_by_role("button", name="Value").click()
            assert [float(value) for value in seen.column("Value")] == ranked[:100]
        seen.page.locator("#filter").fill("laplace")
        assert len(seen.column("Status")) == 64
        assert seen.page.locator("#shown").inner_text() == "64 of 128 rows"


def test_text_sorts_both_ways_and_equal_rows_keep_their_order(few):
    order = list(zip(few.column("Attack"), few.column("Defense"), few.column("Seed"), strict=True))
    head = few.page.locator("#cells thead").get_by_role("columnheader", name="Attack")
    assert head.get_attribute("aria-sort") == "none"
    for direction in ("ascending", "descending"):
        order.sort(key=lambda row: row[0], reverse=direction == "descending")
        head.get_by_role("button").click()
        assert head.get_attribute("aria-sort") == direction
        assert list(zip(few.column("Attack"), few.column("Defense"), few.column("Seed"), strict=True)) == order
    assert len({row[0] for row in order}) == 4


def test_sorting_by_keyboard_keeps_the_focus_and_shows_the_direction(few):
    head = few.page.locator("#cells thead").get_by_role("columnheader", name="Status")
    head.get_by_role("button").focus()
    for key, direction, first in (("Enter", "ascending", "done"), ("Space", "descending", "missing")):
        few.page.keyboard.press(key)
        assert head.get_attribute("aria-sort") == direction
        assert few.page.locator("#cells [aria-sort=ascending], #cells [aria-sort=descending]").count() == 1
        assert few.column("Status")[0] == first
        assert few.page.evaluate("document.activeElement.textContent") == "Status"


def test_filter_and_status_narrow_the_rows_together_and_the_counter_shows_it(few):
    counter, words, status = (few.page.locator(f"#{name}") for name in ("shown", "filter", "status"))
    everything = list(zip(few.column("Defense"), few.column("Attack"), few.column("Status"), strict=True))
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


def test_the_download_is_the_table_however_it_is_sorted_and_filtered(few):
    titles = ("Seed", "Value", "n", "Flags", "Time")
    table = list(zip(*map(few.column, titles), strict=True))
    metrics = [metric.lower() for metric in few.column("Metric")]
    few.page.get_by_role("button", name="Value").click()
    few.page.locator("#filter").fill("gaussian")
    with few.page.expect_download() as waiting:
        few.page.get_by_role("link", name="Download CSV").click()
    assert waiting.value.suggested_filename == "results.zip"
    with zipfile.ZipFile(waiting.value.path()) as file:
        assert file.read("results.csv") == rows_as("csv", few_run())
        lines = list(csv.DictReader(file.read("results.csv").decode().splitlines()))
    found = {(line["cell"], line["quantity"]): line for line in lines}
    cells = [cell.id for cell in few_run().cells]
    assert len(cells) == len(table) == 8
    nothing = {"value": "", "n": ""}
    for row, metric, cell in zip(table, metrics, cells, strict=True):
        finished, one = found[cell, "finished"], found.get((cell, metric), nothing)
        seconds = found.get((cell, "seconds"), nothing)["value"]
        assert row == (finished["seed"], one["value"], one["n"], finished["flags"].replace(" ", ", "), seconds)


def test_the_theme_follows_the_system_until_the_button_changes_it_and_is_remembered(few):
    few.page.emulate_media(color_scheme="dark")
    button = few.page.get_by_role("button", name="Theme")
    found = [(button.inner_text(), few.style("body", "backgroundColor"))]
    for _ in range(3):
        button.click()
        found.append((button.inner_text(), few.style("body", "backgroundColor")))
    assert found == [("Theme: auto", DARK), ("Theme: light", LIGHT), ("Theme: dark", DARK), ("Theme: auto", DARK)]
    assert few.color("light") == LIGHT
    button.click()
    button.click()
    for _ in range(50):  # Chromium stores in another process, which may take longer than a reload
        few.page.reload()
        if button.inner_text() == "Theme: dark":
            break
        few.page.wait_for_timeout(200)
    assert (button.inner_text(), few.style("body", "backgroundColor")) == ("Theme: dark", DARK)


@pytest.mark.parametrize("how", ["by the system", "by the button"])
def test_print_is_light_and_holds_the_first_sections_and_the_broken_claims_whole(whole, how):
    whole.resize(800)
    if how == "by the button":
        whole.page.get_by_role("button", name="Theme").click(click_count=2)
    else:
        whole.page.emulate_media(color_scheme="dark")
    assert whole.style("body", "backgroundColor") == DARK
    broken = whole.page.locator(".printed > .inside")
    assert broken.count() >= 4
    assert not any(one.is_visible() for one in broken.all())
    assert not whole.page.locator(".beyond").first.is_visible()
    whole.page.emulate_media(media="print")
    assert whole.style("body", "backgroundColor") == "rgb(255, 255, 255)"
    assert whole.style("body", "color") == "rgb(0, 0, 0)"
    assert whole.poor_contrasts() == []
    assert broken.evaluate_all(UNSEEN) == 0
    # what is left out of print is said, and nothing of the rest is cut off
    assert all(one.is_visible() for one in whole.page.locator(".beyond").all())
    assert all(whole.page.locator(f"#{name}").is_visible() for name in ("answer", "claims", "attacks"))
    cut = "all => all.filter(one => one.checkVisibility() && getComputedStyle(one).overflow !== 'visible').length"
    assert whole.page.locator(".scroll, pre").evaluate_all(cut) == 0
    for name in (".bar nav", "#theme", ".folds", ".skip"):
        assert not whole.page.locator(name).is_visible()


@pytest.mark.parametrize("width", [500, 1366])
def test_the_tooltip_of_a_cell_is_whole_within_the_window_by_pointer_and_by_keyboard(whole, width):
    whole.resize(width)
    for cell in whole.page.locator("#attacks .cell").all():
        tip = cell.locator(".tip")
        assert not tip.is_visible()
        cell.focus()
        box = tip.bounding_box()
        assert box["x"] >= 0
        assert box["x"] + box["width"] <= width
        cell.blur()
    cell.hover()
    assert tip.is_visible()


def test_without_a_script_the_page_is_complete_and_shows_no_control_that_does_nothing(browser, few, few_page):
    with visit(browser, few_page, javascript=False) as bare:
        texts = []
        for seen, some in ((few, True), (bare, False)):
            seen.open_details(FOLDS)
            controls = seen.page.locator("button:visible, input:visible, select:visible")
            assert (controls.count() > 3) == some
            assert seen.page.get_by_role("link", name="Download CSV").is_visible()
            seen.page.evaluate("document.querySelectorAll('.tools, #theme').forEach(one => one.remove())")
            texts.append(seen.page.locator("body").inner_text())
    assert texts[0] == texts[1]
    assert len(texts[0]) > 5000


def test_a_browser_that_does_not_start_is_a_skip_with_its_reason(browser, tmp_path):
    path = tmp_path / "chromium"
    path.write_text("#!/bin/sh\necho 'cannot open library' >&2\nexit 1\n", encoding="utf-8")
    with pytest.raises(pytest.skip.Exception, match=r"chromium does not start: .*EACCES"):
        started(browser.browser_type, str(path))
    path.chmod(0o700)
    with pytest.raises(pytest.skip.Exception, match="chromium does not start: cannot open library"):
        started(browser.browser_type, str(path))


def test_the_dossier_prints_on_four_pages_and_axe_core_objects_to_nothing(browser, tmp_path):
    (tmp_path / "dossier.html").write_text(dossier(few_run()), encoding="utf-8")
    with tab(browser, tmp_path / "dossier.html") as seen:
        for width, theme in ((1366, "light"), (500, "dark")):
            seen.open(width=width, theme=theme)
            axe = seen.axe()
            assert axe(False) + axe(True) + seen.poor_contrasts() == []
            assert seen.page.evaluate("document.documentElement.scrollWidth") == width
        seen.check()
        assert len(re.findall(rb"/Type /Page\b", seen.page.pdf(prefer_css_page_size=True))) == 4
