"""Where the jobs of a study run: an engine has slots, and each slot does one job at a time.

`supervisor.supervise` decides which job runs next, and handles jobs whose worker died; an engine only runs jobs.
"""

from __future__ import annotations

import os
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Literal, NamedTuple, Protocol

from leakgauge.harness.core.cell import Cell, TrainingSpec
from leakgauge.harness.core.labels import cell_text, part_text
from leakgauge.harness.core.threads import one_thread
from leakgauge.harness.study.orphans import handling, interrupt
from leakgauge.harness.study.splits import limit_id, named
from leakgauge.harness.study.store import Store


class Job(NamedTuple):
    """One piece of work of a study.

    Attributes:
        kind: `training`; `trial`: a training without attacks, for a goal; `attack`: the attack on a cell, its score and
            its result; `search`, `limit`: an attack's guesses for some victims, or their limit, which attacks read.
        cells: the cells that need the training; for a trial, the cells that determine the kept rounds; else one cell.
        part: the victims of a search or a limit: the first, and the end.
        parts: the parts that an attack reads.
        beside: cells whose victims an attack on an accelerator may search in the same batch (`study.joint`).
    """

    kind: Literal["training", "trial", "attack", "search", "limit"]
    training: TrainingSpec
    cells: tuple[Cell, ...]
    part: tuple[int, int] = (0, 0)
    parts: tuple[str, ...] = ()
    beside: tuple[Cell, ...] = ()

    @property
    def victims(self) -> range:
        """The victims of a search or a limit; all victims of an attack."""
        return range(self.cells[0].target.count) if self.kind == "attack" else range(*self.part)

    @property
    def label(self) -> str:
        """A name for people."""
        if self.kind in ("training", "trial"):
            return f"{self.kind} of {part_text(self.training.defense)}, seed {self.training.seed}"
        about = cell_text(self.cells[0])
        return about if self.kind == "attack" else f"{self.kind}, victims {self.part[0]} to {self.part[1] - 1}: {about}"

    @property
    def reads(self) -> tuple[str, ...]:
        """The folders that the job reads, relative to the store; they are finished when the job starts."""
        parts = tuple(f"parts/{name}" for name in self.parts)
        trainings = (f"trainings/{one.id}" for one in (self.training, *(cell.training for cell in self.beside)))
        return () if self.kind in ("training", "trial") else (*trainings, *parts)

    @property
    def writes(self) -> str:
        """The only folder that the job writes, relative to the store."""
        if self.kind in ("training", "trial"):
            return f"trainings/{self.training.id}"
        (cell,) = self.cells
        if self.kind == "attack":
            return f"cells/{cell.id}"
        return f"parts/{named(cell.id if self.kind == 'search' else limit_id(cell), self.victims)}"


class Place(NamedTuple):
    """The folder of the results, the folder of the data, and the device."""

    folder: Path
    root: Path
    device: str


class Outcome(NamedTuple):
    """How a job ended: `error` is one line, empty for success; `trace` is the trace of an exception of type `kind`."""

    job: Job
    seconds: float
    headline: str
    error: str
    trace: str = ""
    kind: str = ""


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

    A job reads the folders `Job.reads` of the store at `Place.folder`, and writes `Job.writes` there. `perform` does
    this for workers that can access the folder; for other workers, the engine copies the files, before `Ended`.

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


Open = Callable[[Place], Engine]
"""Opens an engine whose jobs work at a place."""


class Interrupted(Exception):
    """The user stopped the study; finished results are kept."""


def perform(job: Job, place: Place) -> Outcome:
    """Do one job in this process, which has one thread; an exception becomes an outcome."""
    start = time.perf_counter()
    try:
        headline = _headline(job, place)
        return Outcome(job, time.perf_counter() - start, headline, "")
    except Exception as error:
        kind, prefix = type(error).__name__, "training failed: " if job.kind == "training" else ""
        message = prefix + (str(error).split("\n")[0] or kind)
        return Outcome(job, time.perf_counter() - start, "", message, traceback.format_exc(), kind)


def resident(process: int) -> float | None:
    """Resident memory of a process, in megabytes; None if it has ended."""
    try:
        return int(Path(f"/proc/{process}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6
    except (OSError, IndexError):
        return None


def _headline(job: Job, place: Place) -> str:
    """Do one job, and return the headline of its result."""
    from leakgauge.harness.study.jobs import keep_for, run_attack, run_limit, run_search, run_training

    store = Store(place.folder)
    if job.kind in ("training", "trial"):
        record = run_training(job.training, keep_for(job.cells), store, place.root, place.device)
        last = record.evaluations[-1]
        return f"loss {last.loss:.3f}" if last.accuracy is None else f"accuracy {last.accuracy:.3f}"
    (cell,) = job.cells
    if job.kind == "search":
        return f"{run_search(cell, job.victims, store, place.root, place.device)} victims"
    if job.kind != "attack":
        return f"{run_limit(cell, job.victims, store, place.root, place.device)} victims"
    first = run_attack(cell, store, place.root, job.parts, place.device, job.beside).estimates[0]
    return f"{first.name} {'n/a' if first.value is None else format(first.value, '.3f')}"


class Here:
    """The engine with one slot in this process; its job cannot be killed."""

    slots = 1

    def __init__(self, place: Place) -> None:
        self.place = place
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
                return [Ended(0, perform(job, self.place))]
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
