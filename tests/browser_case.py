"""For the tests in a browser: Debian's Chromium, a page with a record of its requests and errors, and axe-core."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.resources import files
from pathlib import Path
from typing import Literal

import pytest
from playwright.sync_api import Browser, BrowserType, Error, Page, sync_playwright

from leakgauge.harness.core.cell import Cell, PartSpec, Target
from leakgauge.harness.core.result import Result, Run
from leakgauge.harness.core.stats import mean
from leakgauge.harness.gate.baseline import Baseline
from leakgauge.harness.gate.judge import Rules, judge
from leakgauge.harness.gate.measure import measured
from leakgauge.reports.sections.changes import Against
from tests import report_fixtures as double

Theme = Literal["light", "dark"]

FLAGS = (
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
HOSTILE = (
    "<script>window.ran = 1</script>",
    '"><img src=x onerror="window.ran = 1">',
    "</style></script><!--",
    "数据集 δ \u202eesrever\u202c",
    "=HYPERLINK(1)",
    "W" * 120,
)
LEAKING, LOST, BETTER, NEW, SAME, UNSURE = HOSTILE
"""Names of the defenses, by their change since the baseline; see `against`."""

SSIM = {
    LEAKING: ((0.3,) * 6, (0.53, 0.56, 0.58, 0.55, 0.61, 0.54)),
    BETTER: ((0.5,) * 6, (0.31, 0.35, 0.29, 0.33, 0.32, 0.36)),
    UNSURE: ((0.3,) * 6, (0.2, 0.44, 0.31, 0.43, 0.2, 0.4)),
}
"""SSIM of the images, in the baseline and now."""

AXE = """axe.run(%s, %s).then(found => found.violations.flatMap(
    rule => rule.nodes.map(node => `${rule.id}: ${node.target.join(" ")}`)))"""
CONTRAST = """() => {
    const numbers = text => { const [r, g, b, a = 1] = text.match(/[\\d.]+/g).map(Number); return [r, g, b, a]; };
    const over = (top, under) => [0, 1, 2].map(at => top[3] * top[at] + (1 - top[3]) * under[at]).concat(1);
    const linear = c => c <= 10.3 ? c / 255 / 12.92 : ((c / 255 + 0.055) / 1.055) ** 2.4;
    const light = ([r, g, b]) => 0.2126 * linear(r) + 0.7152 * linear(g) + 0.0722 * linear(b) + 0.05;
    const ground = one => {
        const color = numbers(getComputedStyle(one).backgroundColor), behind = one.parentElement;
        return color[3] === 1 ? color : over(color, behind ? ground(behind) : [255, 255, 255, 1]);
    };
    const poor = [];
    const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
    for (let text = texts.nextNode(); text; text = texts.nextNode()) {
        const one = text.parentElement;
        if (!text.data.trim() || one.closest("select, title") || !one.checkVisibility()) continue;
        const style = getComputedStyle(one);
        const ink = numbers(one.closest("svg") ? style.fill : style.color);
        for (let up = one; up; up = up.parentElement) ink[3] *= Number(getComputedStyle(up).opacity);
        const under = ground(one);
        const [a, b] = [light(over(ink, under)), light(under)];
        if (Math.max(a, b) / Math.min(a, b) < 4.5) poor.push(`${text.data.trim()}: ${Math.max(a, b) / Math.min(a, b)}`);
    }
    return poor;
}"""


@contextmanager
def chromium() -> Iterator[Browser]:
    """Chromium without a window and without network traffic of its own; skips the test if it is not installed."""
    found = shutil.which("chromium")
    if found is None:
        pytest.skip("chromium is not installed, see `make browser`")
    with sync_playwright() as driver, started(driver.chromium, found) as browser:
        yield browser


def started(kind: BrowserType, path: str) -> Browser:
    """A running browser; skips the test, with the browser's message, if it does not start."""
    try:
        return kind.launch(executable_path=path, args=FLAGS)
    except Error as error:
        lines = re.findall(r"^\s*(?:- )?\[pid=\d+\]\[err\] (.+)$", error.message, re.MULTILINE)
        pytest.skip(f"{path} does not start: {(lines or error.message.splitlines())[0]}")


@dataclasses.dataclass
class Visit:
    """A page, with its requests and the messages on its console."""

    page: Page
    address: str
    requests: list[str] = dataclasses.field(default_factory=list)
    complaints: list[str] = dataclasses.field(default_factory=list)

    def __post_init__(self) -> None:
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.on("console", lambda message: self.complaints.append(message.text))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))

    def open(self, *, width: int = 1366, theme: Theme = "light") -> None:
        """Open the page again, with an empty local storage."""
        if self.requests:
            self.page.evaluate("localStorage.clear()")
            self.requests.clear()
            self.complaints.clear()
        self.resize(width)
        self.page.emulate_media(media="screen", color_scheme=theme)
        self.page.goto(self.address)

    def check(self) -> None:
        """The console is empty and the page requests only itself."""
        assert self.complaints == []
        assert set(self.requests) == {self.address}

    def resize(self, width: int) -> None:
        self.page.set_viewport_size({"width": width, "height": 900})

    def color(self, theme: Theme) -> str:
        """Background of the page under this theme of the system."""
        self.page.emulate_media(color_scheme=theme)
        return self.style("body", "backgroundColor")

    def open_details(self, which: str = "details") -> None:
        self.page.evaluate("which => document.querySelectorAll(which).forEach(one => { one.open = true; })", which)

    def axe(self) -> Callable[[bool], list[str]]:
        """axe-core on this page: the violations of its contrast rule (True), or of all other rules (False).

        It runs in an isolated world, so the policy of the page stays in force. Its contrast rule skips the text of
        charts and hidden parts of scrolling boxes: see `poor_contrasts`.
        """
        session = self.page.context.new_cdp_session(self.page)
        frame = session.send("Page.getFrameTree")["frameTree"]["frame"]["id"]
        world = session.send("Page.createIsolatedWorld", {"frameId": frame, "worldName": "axe"})["executionContextId"]
        where = {"contextId": world, "awaitPromise": True, "returnByValue": True}
        source = files("axe_playwright_python").joinpath("axe.min.js").read_text(encoding="utf-8")
        session.send("Runtime.evaluate", {"expression": source, **where})

        def objections(contrast: bool) -> list[str]:
            rules = {"runOnly": ["color-contrast"]} if contrast else {"rules": {"color-contrast": {"enabled": False}}}
            about = "{exclude: [['svg']]}" if contrast else "document"
            script = AXE % (about, json.dumps({"resultTypes": ["violations"], **rules}))
            return session.send("Runtime.evaluate", {"expression": script, **where})["result"]["value"]

        return objections

    def keep_text(self) -> None:
        """Close details, and remove drawings and closed details: axe-core skips them for contrast, but slowly."""
        self.page.evaluate("""() => {
            document.querySelectorAll("details").forEach(one => { one.open = false; });
            document.querySelectorAll("svg > *, details > :not(summary)").forEach(one => one.remove());
        }""")

    def poor_contrasts(self) -> list[str]:
        """Each text with a contrast below 4.5 : 1, hidden by scrolling or not; no text is above a picture."""
        return self.page.evaluate(CONTRAST)

    def column(self, title: str) -> list[str]:
        """A column of all results in the visible rows; for a number its value."""
        script = """title => {
            const at = [...document.querySelectorAll("#cells thead th")].findIndex(head => head.innerText === title);
            const rows = [...document.querySelectorAll("#cells tbody tr")].filter(row => row.checkVisibility());
            return rows.map(row => row.cells[at].dataset.value ?? row.cells[at].innerText.trim());
        }"""
        return self.page.evaluate(script, title)

    def style(self, selector: str, name: str) -> str:
        """The computed value of a property of the first match."""
        return self.page.locator(selector).first.evaluate("(one, name) => getComputedStyle(one)[name]", name)


@contextmanager
def tab(browser: Browser, path: Path, *, javascript: bool = True) -> Iterator[Visit]:
    """A page in a fresh browser context, not opened yet."""
    with browser.new_context(java_script_enabled=javascript) as context:
        yield Visit(context.new_page(), path.as_uri())


@contextmanager
def visit(
    browser: Browser, path: Path, *, width: int = 1366, theme: Theme = "light", javascript: bool = True
) -> Iterator[Visit]:
    """The open page, which passes `Visit.check` at the end."""
    with tab(browser, path, javascript=javascript) as seen:
        seen.open(width=width, theme=theme)
        yield seen
        seen.check()


def few_run() -> Run:
    """Every section and every kind of row in few cells: pages with many charts open slowly."""
    attacks = [(attack, double.PROBE, "server") for attack in (double.MATCHING, double.MAP, double.PRIOR)]
    attacks += [(double.THRESHOLD, Target("members", count=200), "public")]
    cells = double.grid([double.NONE, double.GAUSSIAN[1]], attacks, (0,))
    return double.make_run(cells, failed=lambda cell: cell == cells[-1], missing=lambda cell: cell == cells[-2])


def whole_run() -> Run:
    """The same with a later round, audits, every verdict, and hostile names."""
    few, audited = few_run(), double.audited_run()
    named = [PartSpec(name, {"epsilon": 2.0}) for name in ("sampled", *HOSTILE)]
    later = [(double.MATCHING, Target("probe", 4, count=6), "server")]
    cells = [
        *few.cells,
        *audited.cells,
        *double.grid(named, [(double.MAP, double.PROBE, "server")], (0,)),
        *double.grid([double.NONE, double.GAUSSIAN[1]], later, (0,)),
    ]
    run = double.make_run(
        list({cell.id: cell for cell in cells}.values()),
        failed=lambda cell: cell.id in few.failures,
        missing=lambda cell: cell.id in few.missing or is_map(cell, LOST),
        make=lambda cell: result_of(cell, 1),
        name=HOSTILE[1],
    )
    return dataclasses.replace(run, trainings=run.trainings | audited.trainings)


def against(run: Run) -> Against:
    """`whole_run` and a baseline with less leakage in some cells and more in others; each lacks some cells."""
    before = double.make_run(
        run.cells, missing=lambda cell: is_map(cell, NEW), make=lambda cell: result_of(cell, 0), name=UNSURE
    )
    base = dataclasses.replace(measured(before), machine=UNSURE)
    now, rules = measured(run), Rules(least=double.PROBE.count)
    return Against(judge(now, base, rules), now, Baseline(base, f"first numbers {UNSURE}"))


def is_map(cell: Cell, name: str) -> bool:
    """Whether this is the attack `map` on the defense of this name."""
    return (cell.training.defense.name, cell.attack) == (name, double.MAP)


def result_of(cell: Cell, which: int) -> Result:
    """The result of the double, with the values in `SSIM`."""
    made, name = double.result_of(cell), cell.training.defense.name
    if name not in SSIM or not is_map(cell, name):
        return made
    return double.with_estimates(made, mean("ssim", SSIM[name][which]), *made.estimates[1:])
