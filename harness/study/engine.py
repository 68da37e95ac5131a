"""Where the jobs of a study run: an engine has slots, and each slot does one job at a time.

`schedule.supervise` decides which job runs next, and handles jobs whose worker died; an engine only runs jobs.

An engine is one file of the folder `engines`, named like the engine, with one public class; or a class of another
package, by an entry point of the group `leakgauge.engines` or as `module:Class`. The class is called with a
`RunContext` and `slots`, the most jobs at a time (None: as many as fit). An engine of several machines also takes
`address`.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
import os
import pkgutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from leakgauge.harness.core.code import code_allowed, import_from, imported, loaded
from leakgauge.harness.core.errors import StudyError, UnknownNameError
from leakgauge.harness.core.threads import one_thread
from leakgauge.harness.study.jobs import Job, Outcome, RunContext, perform
from leakgauge.harness.study.orphans import handling, interrupt

DEFAULT = "workers"
"""The name of the default engine."""


class Started(NamedTuple):
    """A slot's job has started; its time counts from now on."""

    slot: int


class Ended(NamedTuple):
    """A slot's job has ended, and its files are in the store; the slot is free."""

    slot: int
    outcome: Outcome


class Died(NamedTuple):
    """A slot's worker died with its job, with the reason in words; the slot is free, with a new worker."""

    slot: int
    reason: str


Event = Started | Ended | Died


class Engine(Protocol):
    """Runs jobs, one per slot.

    A job reads the folders `Job.reads` of the store at `RunContext.folder`, and writes `Job.writes` there; parts of a
    search for several cells may be missing. `perform`
    does this for workers that can access the folder; for other workers, the engine copies the files, before `Ended`.

    Attributes:
        slots: how many jobs run at a time; may change between two calls of `wait`.
    """

    @property
    def slots(self) -> int:
        """How many jobs run at a time, in the slots 0 to slots - 1."""

    def start(self, slot: int, job: Job) -> None:
        """Start a job in a free slot, whose worker caches what jobs have in common; returns before the job ends."""

    def wait(self, seconds: float) -> list[Event]:
        """The events since the last call; returns at the first event, or after this many seconds.

        Raises:
            Interrupted: the user stopped a job that runs in this process.
        """

    def megabytes(self, slot: int) -> float | None:
        """Resident memory of the worker of a busy slot; None if unknown."""

    def kill(self, slot: int) -> None:
        """Abort the job of a busy slot without an event; the slot is free, with a new worker."""

    def close(self) -> None:
        """Abort all jobs, and end all workers."""


Open = Callable[[RunContext], Engine]
"""Opens an engine whose jobs work in a context."""


class Interrupted(Exception):
    """The user stopped the study; finished results are kept."""


def open_engine(name: str, address: str | None, slots: int | None, *, allow_code: bool = False) -> Open | None:
    """Opens the engine of this name; None for the default engine, which `run_study` opens by itself.

    Args:
        address: of a cluster, if the engine has one.
        slots: the most jobs at a time; None: the engine decides.
        allow_code: whether the name may be code to import, as in `module:Class`.

    Raises:
        StudyError: no engine has this name, it cannot be imported, or its options contradict each other.
    """
    if ":" in name and not code_allowed(allow_code):
        raise StudyError("engine", [f"{name!r} names code to import; pass --allow-code if you trust it"])
    if slots == 0 and name != DEFAULT:
        raise StudyError("engine", [f"{name} needs worker processes: expected workers >= 1, got workers=0"])
    engine = None if name == DEFAULT else _engine_class(name)
    if address is not None and (engine is None or "address" not in inspect.signature(engine).parameters):
        raise StudyError("engine", [f"{name} takes no address, got --address {address}"])
    if engine is None:
        return None
    return partial(engine, slots=slots, **({} if address is None else {"address": address}))


def _engine_class(name: str) -> Any:
    """The class of an engine; raises StudyError if there is none, or it cannot be imported."""
    folder = f"{__package__}.engines"
    names = (file.name for file in pkgutil.iter_modules(importlib.import_module(folder).__path__))
    files = [file for file in names if not file.startswith("_")]
    entries = {entry.name: entry for entry in importlib.metadata.entry_points(group="leakgauge.engines")}
    try:
        if name in files:
            module = importlib.import_module(f"{folder}.{name}")
            public = [value for word, value in vars(module).items() if inspect.isclass(value) and word[0] != "_"]
            (engine,) = (value for value in public if value.__module__ == module.__name__)
            return engine
        if ":" in name:
            import_from(Path.cwd())
            return imported("engine", name)
        if name in entries:
            return loaded("engine", name, entries[name].load)
    except (ImportError, UnknownNameError) as error:
        raise StudyError("engine", [str(error)]) from error
    others = sorted({*entries, *files} - {DEFAULT})
    raise StudyError("engine", [f"expected {' or '.join([DEFAULT, *others])}, got {name!r}"])


def resident(process: int) -> float | None:
    """Resident memory of a process, in megabytes; None if it has ended."""
    try:
        return int(Path(f"/proc/{process}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6
    except (OSError, IndexError):
        return None


class Here:
    """The engine with one slot in this process; its job cannot be killed."""

    slots = 1

    def __init__(self, context: RunContext) -> None:
        self.context = context
        self.job: Job | None = None

    def start(self, slot: int, job: Job) -> None:
        """Keep the job; `wait` does it."""
        self.job = job

    def wait(self, seconds: float) -> list[Event]:
        """Do the job, on one thread as in a worker."""
        if self.job is None:
            return []
        job, self.job = self.job, None
        try:
            with handling(interrupt), one_thread():
                return [Ended(0, perform(job, self.context))]
        except KeyboardInterrupt as error:
            raise Interrupted from error

    def megabytes(self, slot: int) -> float | None:
        """None, because the memory of this process is not the memory of a job."""
        return None

    def kill(self, slot: int) -> None:
        """Forget a job that has not started."""
        self.job = None

    def close(self) -> None:
        """Do nothing: there are no workers."""
