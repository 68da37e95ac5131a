"""For the tests of the report: a parsed page, and small runs."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Sequence
from html.parser import HTMLParser
from types import SimpleNamespace
from typing import Any

from leakgauge.harness.core.cell import Cell, PartSpec, Target
from leakgauge.harness.core.result import Result, Run, TrainingRecord
from leakgauge.harness.core.stats import mean
from leakgauge.reports.html import render
from tests import report_fixtures as double

SECTIONS = ["answer", "claims", "attacks", "pictures", "frontier", "tradeoffs", "results", "limits", "glossary",
            "provenance"]  # fmt: skip
VOID = {"meta", "img", "input", "br", "hr", "link", "wbr"}


def content(data: Any) -> Any:
    """What a section gives its template, with the fields of its tables as attributes."""
    if isinstance(data, dict):
        return SimpleNamespace(**{name: content(value) for name, value in data.items()})
    return [content(value) for value in data] if isinstance(data, list) else data


class Page(HTMLParser):
    """A parsed page: tags with their attributes, visible text, and the contents of style and script."""

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

    @property
    def policy(self) -> str:
        return next(a["content"] for a in self.all("meta") if a.get("http-equiv") == "Content-Security-Policy")

    def all(self, tag: str) -> list[dict[str, str]]:
        return [attributes for name, attributes in self.tags if name == tag]


def sections(page: Page) -> list[str]:
    return [attributes["id"] for attributes in page.all("section")]


def part(source: str, name: str) -> str:
    """The text of one section of a page."""
    return Page(re.findall(rf'<section id="{name}"[^>]*>(.*?)</section>', source, re.S)[0]).text


def small(
    *defenses: PartSpec, attacks: list[tuple[PartSpec, Target, str]] | None = None, seeds: tuple[int, ...] = (0,)
) -> tuple[Cell, ...]:
    questions = attacks or [(double.MATCHING, double.PROBE, "server"), (double.PRIOR, double.PROBE, "server")]
    return double.grid(defenses or (double.NONE, double.GAUSSIAN[0]), questions, seeds)


def with_ssim(values: Callable[[Cell], Sequence[float | None]]) -> Callable[[Cell], Result]:
    """A maker of results with these SSIM values."""

    def make(cell: Cell) -> Result:
        return double.with_estimates(
            double.result_of(cell), mean("ssim", values(cell)), *double.of_lineups(values(cell))
        )

    return make


def ssim_of(table: dict[str, list[float | None]]) -> Callable[[Cell], Result]:
    """A maker of results with SSIM values by the name of the attack, or else of the defense."""
    return with_ssim(lambda cell: table.get(cell.attack.name) or table[cell.training.defense.name])


def with_trainings(run: Run, change: Callable[[TrainingRecord], TrainingRecord]) -> Run:
    return dataclasses.replace(run, trainings={key: change(record) for key, record in run.trainings.items()})


@functools.cache
def full_source() -> str:
    """The page of `full_run`."""
    return render(double.full_run())


def complete(text: str) -> Page:
    """The page, after the checks that hold for every page."""
    page = Page(text)
    assert "could not be built" not in text
    assert not re.search(r"\b(nan|NaN|inf|None|undefined)\b", page.text)
    assert page.open == []
    return page
