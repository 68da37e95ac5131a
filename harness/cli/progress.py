"""What a running study says: a live table on a terminal, one line a finished piece of work otherwise."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from leakgauge.harness.study.study import Study
from leakgauge.harness.study.supervisor import Listener, Outcome, Progress

_RECENT = 8
"""Finished pieces of work that the live table still shows."""


@contextmanager
def listener(study: Study, console: Console | None = None) -> Iterator[Listener]:
    """A listener for `run_study`: live on a terminal, lines on standard output otherwise."""
    console = console or Console()
    if not console.is_terminal:
        yield _lines
        return
    table = _LiveTable(study.name)
    with Live(table.view(None), console=console, refresh_per_second=4, transient=True) as live:

        def listen(progress: Progress, outcome: Outcome | None) -> None:
            table.note(outcome)
            live.update(table.view(progress))

        yield listen


def _line(outcome: Outcome) -> str:
    """One finished piece of work."""
    if outcome.error:
        return f"failed {outcome.seconds:7.1f} s  {outcome.job.label}: {outcome.error}"
    return f"done   {outcome.seconds:7.1f} s  {outcome.job.label}: {outcome.headline}"


def _lines(progress: Progress, outcome: Outcome | None) -> None:
    """One line a finished piece of work."""
    if outcome is not None:
        finished = progress.done + progress.failed + progress.skipped
        sys.stdout.write(f"[{finished}/{progress.total}] {_line(outcome)}\n")
        sys.stdout.flush()


class _LiveTable:
    """The live view: what runs now, and what finished last."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.start = time.monotonic()
        self.recent: deque[Outcome] = deque(maxlen=_RECENT)

    def note(self, outcome: Outcome | None) -> None:
        """Remember a finished piece of work."""
        if outcome is not None:
            self.recent.append(outcome)

    def view(self, progress: Progress | None) -> Group:
        """What the terminal shows."""
        table = Table(box=None, pad_edge=False, show_header=False)
        for outcome in self.recent:
            table.add_row(Text(_line(outcome), style="red" if outcome.error else "", overflow="ellipsis", no_wrap=True))
        if progress is None:
            return Group(Text(f"{self.name}: starting"))
        for label in progress.running:
            table.add_row(Text(f"runs             {label}", style="bold", overflow="ellipsis", no_wrap=True))
        finished = progress.done + progress.failed + progress.skipped
        said = f"{self.name}: {finished} of {progress.total} cells"
        if progress.skipped:
            said += f", {progress.skipped} of them from before"
        if progress.failed:
            said += f", {progress.failed} failed"
        return Group(table, Text(f"{said}, {time.monotonic() - self.start:.0f} s"))
