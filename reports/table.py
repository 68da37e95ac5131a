"""One table, and its six writers: `table` in `templates/macros.html` for the page, and those below."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from rich import box
from rich.table import Table as RichTable

from leakgauge.harness.core.cell import Scalar
from leakgauge.harness.core.sinks import harmless, latex, markdown, spelled, styled, table_head, table_row


def plain(text: str) -> str:
    """A text as literal Markdown."""
    return markdown(text, bare=True)


class Cell(NamedTuple):
    """A field of a table.

    Attributes:
        ends: an interval or a reason, in brackets after the text.
        below: smaller lines below the text, on the page.
        strong: whether the field stands out; in the terminal its whole row does.
        tone: color of a verdict on the page: `good`, `bad`, `warn` or `none`.
        link: id of the section to which the text links on the page, or an address with a `/`.
    """

    text: str
    ends: str = ""
    below: tuple[str, ...] = ()
    strong: bool = False
    tone: str = ""
    link: str = ""


class Column(NamedTuple):
    """A column: short words, numbers, long texts, digests, or bars of up to 100, which only the page shows."""

    name: str
    kind: Literal["", "num", "text", "mono", "bar"] = ""


Fields = tuple[Cell | str, ...]


@dataclass(frozen=True)
class Table:
    """A table with its title, a paragraph above it and notes below it. The first field of a row names the row."""

    title: str
    columns: tuple[Column | str, ...]
    rows: tuple[Fields, ...]
    lead: str = ""
    notes: tuple[str, ...] = ()

    @property
    def heads(self) -> list[Column]:
        """The columns."""
        return [Column(column) if isinstance(column, str) else column for column in self.columns]

    @property
    def cells(self) -> list[list[Cell]]:
        """The rows."""
        return [[Cell(field) if isinstance(field, str) else field for field in row] for row in self.rows]

    @property
    def _shown(self) -> list[int]:
        return [at for at, column in enumerate(self.heads) if column.kind != "bar"]

    def markdown(self, write: Callable[[str], str] = plain) -> str:
        """The table as Markdown, with its notes as a list. `write` escapes a text."""
        shown = self._shown
        lines = [f"### {write(self.title)}", ""] if self.title else []
        lines += [write(self.lead), ""] if self.lead else []
        lines += table_head([write(self.heads[at].name) for at in shown])
        lines += [table_row(_marked(row[at], write) for at in shown) for row in self.cells]
        return "\n".join([*lines, "", *(f"- {write(note)}" for note in self.notes)])

    def latex(self) -> str:
        """The table as a `longtable` (packages longtable and booktabs): title and lead are its caption."""
        shown, caption = self._shown, " ".join(filter(None, (self.title and f"{self.title.rstrip('.')}.", self.lead)))
        sides = "".join("r" if self.heads[at].kind == "num" else "l" for at in shown)
        lines = [rf"\begin{{longtable}}{{{sides}}}", *([rf"\caption{{{latex(caption)}}} \\"] if caption else [])]
        texts = [[self.heads[at].name for at in shown]]
        texts += [[row[at].text + _bracketed(row[at].ends) for at in shown] for row in self.cells]
        head, *rows = (rf"{' & '.join(map(latex, line))} \\" for line in texts)
        lines += [r"\toprule", head, r"\midrule", r"\endhead", *rows, r"\bottomrule", r"\end{longtable}"]
        return "\n".join([*lines, *map(latex, self.notes)]) + "\n"

    def records(self) -> list[dict[str, str]]:
        """One record per row: its fields by column; `COLUMN, ends` holds what the page shows in brackets."""
        heads = [self.heads[at].name for at in self._shown]
        names = [name if name not in heads[:at] else f"{name} ({at})" for at, name in enumerate(heads)]
        columns = list(zip(self._shown, names, strict=True))
        whole = {at for at in self._shown if any(row[at].ends for row in self.cells)}
        records = [dict[str, str]() for _ in self.rows]
        for record, row in zip(records, self.cells, strict=True):
            for at, name in columns:
                record |= {name: row[at].text} | ({f"{name}, ends": row[at].ends} if at in whole else {})
        return records

    def terminal(self, width: int = 80) -> RichTable:
        """The table for a terminal of this many characters, with its notes below it.

        No word is broken: where the columns do not fit, each row is a block of lines.
        """
        shown = self._shown
        drawn = RichTable(
            title=styled("\n".join(filter(None, (self.title, self.lead)))),
            caption=styled("\n".join(self.notes)),
            caption_justify="left",
            box=box.SIMPLE_HEAD,
            padding=(0, 1),
        )
        texts = [[f"{row[at].text}{_bracketed(row[at].ends)}" for at in shown] for row in self.cells]
        heads = [self.heads[at].name for at in shown]
        columns = list(zip(heads, *texts, strict=True))
        least = [max(len(word) for text in column for word in text.split() or [""]) for column in columns]
        most = [max(map(len, column)) for column in columns]
        room = width - (sum(least) + 3 * len(least) + 1)
        narrow = room < 0
        for name, at, wide in [] if narrow else zip(heads, shown, _widths(least, most, room), strict=True):
            side: Literal["left", "right"] = "right" if self.heads[at].kind == "num" else "left"
            drawn.add_column(name, overflow="fold", justify=side, width=wide)
        if narrow:
            drawn.show_header = False
            drawn.add_column(overflow="fold")
        for row, line in zip(self.cells, texts, strict=True):
            styles = [_STYLES.get(row[at].tone, "") or ("bold" if any(c.strong for c in row) else "") for at in shown]
            fields = [styled(text, style) for text, style in zip(line, styles, strict=True)]
            if narrow:
                named = [styled(f"{name}: ") + text for name, text in zip(heads[1:], fields[1:], strict=True) if text]
                drawn.add_row(styled("\n").join([fields[0], *named]), end_section=True)
            else:
                drawn.add_row(*fields)
        return drawn


def written(tables: Sequence[Table], to: Literal["md", "tex", "csv", "json"]) -> str:
    """Tables as one document; as CSV, the column `table` has their titles if there are several."""
    if to == "md" or to == "tex":
        return "\n".join(table.markdown() if to == "md" else table.latex() for table in tables)
    if to == "json":
        objects = [{"title": one.title, "lead": one.lead, "rows": one.records(), "notes": one.notes} for one in tables]
        return spelled(json.dumps(objects, indent=2)) + "\n"
    several = len(tables) > 1
    rows = [({"table": one.title} if several else {}) | row for one in tables for row in one.records()]
    return comma_separated([*dict.fromkeys(name for row in rows for name in row)], rows)


def comma_separated(names: Sequence[str], rows: Iterable[Mapping[str, Scalar]]) -> str:
    """RFC 4180 with a header, safe to open in a spreadsheet; a missing field is empty."""
    buffer = io.StringIO()
    writer = csv.writer(buffer)
    writer.writerow(map(harmless, names))
    writer.writerows([harmless(row.get(name)) for name in names] for row in rows)
    return buffer.getvalue()


_STYLES = {"bad": "bold red", "warn": "yellow", "good": "green"}


def _widths(least: Sequence[int], most: Sequence[int], room: int) -> list[int]:
    """The least width of each column and what more it needs, or a fair share of the room."""
    widths, order = [*least], sorted(range(len(least)), key=lambda at: most[at] - least[at])
    for left, at in zip(range(len(order), 0, -1), order, strict=True):
        more = min(most[at] - least[at], room // left)
        widths[at], room = widths[at] + more, room - more
    return widths


def _bracketed(text: str) -> str:
    return f" ({text})" if text else ""


def _marked(cell: Cell, write: Callable[[str], str]) -> str:
    text = write(cell.text)
    return f"{f'**{text}**' if cell.strong else text}{_bracketed(write(cell.ends))}"
