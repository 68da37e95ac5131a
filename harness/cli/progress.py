"""Progress of a running study: a live table on a terminal or in a notebook, else one line for each finished job."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table

from leakgauge.harness.core.labels import Names
from leakgauge.harness.core.sinks import element, line, say, styled
from leakgauge.harness.study.cost import span
from leakgauge.harness.study.jobs import Job, Outcome
from leakgauge.harness.study.schedule import Listener, Progress
from leakgauge.harness.study.store import StoreError

_RECENT = 8
"""Number of finished jobs in the live table."""

_FULL = Names()
"""The names in `run.log`, with all parameters."""


@contextmanager
def listener(name: str, console: Console | None = None) -> Iterator[Listener]:
    """A listener for `run_study` on the study `name`: live on a terminal and in a notebook, else lines of text."""
    console = console or Console()
    recent = deque[Outcome](maxlen=_RECENT)

    def status(progress: Progress, outcome: Outcome | None) -> str:
        if outcome is not None:
            recent.append(outcome)
        skipped = f", {progress.skipped} reused" if progress.skipped else ""
        failed = f", {progress.failed} failed" if progress.failed else ""
        done = f"{progress.finished} of {progress.total} cells{skipped}{failed}"
        return f"{name}: {done}, {span(progress.seconds)}{_left(progress)}"

    if console.is_jupyter:
        yield _in_notebook(status, recent)
    elif not console.is_terminal:
        yield _print_line
    else:
        with Live(styled(f"{name}: starting"), console=console, refresh_per_second=4, transient=True) as live:
            yield lambda progress, outcome: live.update(_view(status(progress, outcome), progress, recent))


def logged(listen: Listener, folder: Path, *, verbose: bool = False) -> Listener:
    """A listener that also prints notes, and appends notes, starts and ends to `folder/run.log`, with the time.

    Args:
        verbose: also print starts and traces.
    """
    known: list[Job] = []

    def write(text: str) -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with (folder / "run.log").open("a", encoding="utf-8") as file:
                file.write(f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S} {line(text)}\n")
        except OSError as error:
            raise StoreError(f"{folder} cannot be written: {error}") from error

    def heard(progress: Progress, outcome: Outcome | None) -> None:
        while progress.notes:
            note = progress.notes.pop(0)
            write(note)
            say(note)
        started = [job for job in progress.running if job not in known]
        known[:] = progress.running
        for job in started:
            write(f"start  {job.text(_FULL)}")
            if verbose:
                say(f"start  {job.text(progress.names)}")
        if outcome is not None:
            write(f"{_line(outcome, _FULL)}{_left(progress)}")
        listen(progress, outcome)
        if verbose and outcome is not None:
            say(*outcome.trace.splitlines())

    return heard


def _in_notebook(status: Callable[[Progress, Outcome | None], str], recent: Iterable[Outcome]) -> Listener:
    """A listener that shows the status and the last finished jobs in one output of the notebook's cell."""
    from IPython.display import HTML, display

    shown = display(HTML(""), display_id=True)

    def listen(progress: Progress, outcome: Outcome | None) -> None:
        lines = [status(progress, outcome), *(_line(each, progress.names) for each in recent)]
        shown.update(HTML(f"<pre>{element(chr(10).join(lines))}</pre>"))

    return listen


def _line(outcome: Outcome, names: Names) -> str:
    state, text = ("failed", outcome.error) if outcome.error else ("done  ", outcome.headline)
    return f"{state} {outcome.seconds:7.1f} s  {outcome.job.text(names)}: {text}"


def _print_line(progress: Progress, outcome: Outcome | None) -> None:
    if outcome is not None:
        say(f"[{progress.finished}/{progress.total}{_left(progress)}] {_line(outcome, progress.names)}")


def _view(status: str, progress: Progress, recent: Iterable[Outcome]) -> Group:
    table = Table(box=None, pad_edge=False, show_header=False)
    rows = [(_line(outcome, progress.names), "red" if outcome.error else "") for outcome in recent]
    rows += [(f"running           {job.text(progress.names)}", "bold") for job in progress.running]
    for text, style in rows:
        table.add_row(styled(text, style, cropped=True))
    return Group(table, styled(status))


def _left(progress: Progress) -> str:
    """The estimated time until the study is finished; empty if unknown or finished."""
    if progress.left is None or progress.finished == progress.total:
        return ""
    return f", about {span(progress.left / max(1, progress.workers))} left"
