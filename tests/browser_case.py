"""Shared by the tests in a browser: Debian's Chromium, a page with all that it did, and axe-core."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, sync_playwright

from harness.cell import PartSpec, Target
from harness.result import Run
from tests import report_fixtures as double

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
AXE = """axe.run(%s, %s).then(found => found.violations.flatMap(
    rule => rule.nodes.map(node => `${rule.id}: ${node.target.join(" ")}`)))"""
CONTRAST = """() => {
    const numbers = text => { const [r, g, b, a = 1] = text.match(/[\\d.]+/g).map(Number); return [r, g, b, a]; };
    const over = (top, under) => [0, 1, 2].map(at => top[3] * top[at] + (1 - top[3]) * under[at]).concat(1);
    const linear = c => c <= 10.3 ? c / 255 / 12.92 : ((c / 255 + 0.055) / 1.055) ** 2.4;
    const light = ([r, g, b]) => 0.2126 * linear(r) + 0.7152 * linear(g) + 0.0722 * linear(b) + 0.05;
    const ground = one => {
        const colour = numbers(getComputedStyle(one).backgroundColor), behind = one.parentElement;
        return colour[3] === 1 ? colour : over(colour, behind ? ground(behind) : [255, 255, 255, 1]);
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
    """Chromium without a window and without network traffic of its own; a skipped test where there is none."""
    found = shutil.which("chromium")
    if found is None:
        pytest.skip("chromium is not installed, see `make browser`")
    with sync_playwright() as driver, driver.chromium.launch(executable_path=found, args=FLAGS) as browser:
        yield browser


@dataclasses.dataclass
class Visit:
    """A page that is open, what it asked for and what the console says."""

    page: Page
    address: str
    requests: list[str] = dataclasses.field(default_factory=list)
    complaints: list[str] = dataclasses.field(default_factory=list)

    def __post_init__(self) -> None:
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.on("console", lambda message: self.complaints.append(message.text))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.goto(self.address)

    def open_details(self) -> None:
        self.page.evaluate("document.querySelectorAll('details').forEach(one => { one.open = true; })")

    def axe(self) -> Callable[[bool], list[str]]:
        """axe-core on this page: what its rule of contrast objects to if told True, what all the others if False.

        It runs in a world of its own: the policy of the page stays in force. Its contrast says nothing of the text of
        charts, nor of what a box that scrolls cuts off: see `poor_contrasts`.
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

    def poor_contrasts(self) -> list[str]:
        """Each text with less than 4.5 : 1 against what is behind it, cut off or not; no picture is behind a text."""
        return self.page.evaluate(CONTRAST)

    def column(self, title: str) -> list[str]:
        """What stands under a heading of the table of all results in the rows shown; for a number its value."""
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
def visit(
    browser: Browser, path: Path, *, width: int = 1366, theme: str = "light", javascript: bool = True
) -> Iterator[Visit]:
    """A page in a new browser; whatever is done there, nothing stands on the console and no request leaves it."""
    settings: dict[str, Any] = {"viewport": {"width": width, "height": 900}, "color_scheme": theme}
    with browser.new_context(**settings, java_script_enabled=javascript) as context:
        seen = Visit(context.new_page(), path.as_uri())
        yield seen
        assert seen.complaints == []
        assert set(seen.requests) == {seen.address}


def few_run() -> Run:
    """Every section and every kind of row, in few cells: pages with many charts are slow to open."""
    attacks = [(attack, double.PROBE, "server") for attack in (double.MATCHING, double.MAP, double.PRIOR)]
    attacks += [(double.THRESHOLD, Target("members", count=200), "public")]
    cells = double.grid([double.NONE, double.GAUSSIAN[1]], attacks, (0,))
    return double.make_run(cells, failed=lambda cell: cell == cells[-1], missing=lambda cell: cell == cells[-2])


def whole_run() -> Run:
    """The same with audits and every verdict."""
    few, audited = few_run(), double.audited_run()
    attacks = [(double.MAP, double.PROBE, "server"), (double.PRIOR, double.PROBE, "server")]
    cells = [*few.cells, *audited.cells, *double.grid([PartSpec("sampled", {"epsilon": 2.0})], attacks, (0,))]
    run = double.make_run(
        list({cell.id: cell for cell in cells}.values()),
        failed=lambda cell: cell.id in few.failures,
        missing=lambda cell: cell.id in few.missing,
    )
    return dataclasses.replace(run, trainings=run.trainings | audited.trainings)


def crowded_run() -> Run:
    """A hundred defences with names that mean harm."""
    defenses = [PartSpec(f"{HOSTILE[at % len(HOSTILE)]} {at}", {"epsilon": float(at + 1)}) for at in range(100)]
    attacks = [(double.MATCHING, double.PROBE, HOSTILE[0]), (double.PRIOR, double.PROBE, HOSTILE[0])]
    return double.make_run(double.grid([double.NONE, *defenses], attacks, (0,)), name=HOSTILE[1])
