"""The sections of a report. Each is a module here with a `SECTION`; a new section is one file."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from pkgutil import iter_modules
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

from leakgauge.reports.table import Table

if TYPE_CHECKING:
    from leakgauge.reports.select import Analysis

C = TypeVar("C")

TABLES = '{% include "tables.html" %}'
"""The template of a section that only has tables."""


FOLDED = 40
"""The place from which on sections are folded behind the first three."""


class Section(NamedTuple, Generic[C]):
    """A section of a report.

    Attributes:
        id: id of the section on the page, and name of its template.
        title: heading of the section.
        short: name of the section in the navigation.
        build: returns the content that the template shows; None if this run has none.
        place: its place on the page: lower is higher up. From `FOLDED` on it is folded, and not printed.
        template: Jinja source of a short section; empty: the file `templates/ID.html`.
        tables: the section as tables, for every other form; see `reports.table`.
        brief: the terminal shows them without a request.
    """

    id: str
    title: str
    short: str
    build: Callable[[C], object | None]
    place: int = 0
    template: str = ""
    tables: Callable[[C], Sequence[Table]] = lambda _: ()
    brief: bool = False


def of_tables(
    id: str, title: str, short: str, place: int, tables: Callable[[Analysis], Sequence[Table]]
) -> Section[Analysis]:
    """A section whose tables are all that the page, the terminal and the exports show; no tables: no section."""
    return Section(id, title, short, lambda analysis: tables(analysis) or None, place, TABLES, tables, brief=True)


def sections() -> list[Section[Analysis]]:
    """Every `SECTION` of the modules in this folder, in the order of the page."""
    modules = [import_module(f"{__name__}.{module.name}") for module in iter_modules(__path__)]
    return sorted((m.SECTION for m in modules if hasattr(m, "SECTION")), key=lambda section: section.place)
