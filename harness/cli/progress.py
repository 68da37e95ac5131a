"""Progress of a running study: a live table on a terminal, else one line for each finished job."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from leakgauge.harness.study.supervisor import Listener, Outcome, Progress

_RECENT = 8
"""Finished jobs in the live table."""


@contextmanager
def listener(name: str, console: Console | None = None) -> Iterator[Listener]:
    """A listener for `run_study` on the study `name`: live on a terminal, else lines on standard output."""
    console = console or Console()
    if not console.is_terminal:
        yield _print_line
        return
    start, recent = time.monotonic(), deque[Outcome](maxlen=_RECENT)
    with Live(Text(f"{name}: starting"), console=console, refresh_per_second=4, transient=True) as live:

        def listen(progress: Progress, outcome: Outcome | None) -> None:
            if outcome is not None:
                recent.append(outcome)
            live.update(_view(f"{name}: {_status(progress)}, {time.monotonic() - start:.0f} s", progress, recent))

        yield listen


def _line(outcome: Outcome) -> str:
    """The line of a finished job."""
    state, text = ("failed", outcome.error) if outcome.error else ("done  ", outcome.headline)
    return f"{state} {outcome.seconds:7.1f} s  {outcome.job.label}: {text}"


def _print_line(progress: Progress, outcome: Outcome | None) -> None:
    """Print the line of a finished job."""
    if outcome is not None:
        sys.stdout.write(f"[{progress.finished}/{progress.total}] {_line(outcome)}\n")
        sys.stdout.flush()


def _view(status: str, progress: Progress, recent: Iterable[Outcome]) -> Group:
    """The live view: the last finished jobs, the running jobs, and the status line."""
    table = Table(box=None, pad_edge=False, show_header=False)
    rows = [(_line(outcome), "red" if outcome.error else "") for outcome in recent]
    rows += [(f"running           {label}", "bold") for label in progress.running]
    for text, style in rows:
        table.add_row(Text(text, style=style, overflow="ellipsis", no_wrap=True))
    return Group(table, Text(status))


def _status(progress: Progress) -> str:
    """The counts of cells."""
    skipped = f", {progress.skipped} of them from before" if progress.skipped else ""
    failed = f", {progress.failed} failed" if progress.failed else ""
    return f"{progress.finished} of {progress.total} cells{skipped}{failed}"
