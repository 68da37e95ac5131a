"""Shared by the tests of the report: a page taken apart, and small runs."""

from __future__ import annotations

import re
from html.parser import HTMLParser

from leakgauge.harness.core.cell import Cell, PartSpec, Target
from leakgauge.harness.core.result import Result
from leakgauge.harness.core.stats import mean
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


def small(
    *defenses: PartSpec, attacks: list[tuple[PartSpec, Target, str]] | None = None, seeds: tuple[int, ...] = (0,)
) -> tuple[Cell, ...]:
    asked = attacks or [(double.MATCHING, double.PROBE, "server"), (double.PRIOR, double.PROBE, "server")]
    return double.grid(defenses or (double.NONE, double.GAUSSIAN[0]), asked, seeds)


def ssim_of(table: dict[str, list[float | None]]):
    """A maker of results with the given SSIM values by the name of the defense, or of the attack for the floor."""

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
