"""The jobs of a study: what each reads and writes, how a process does it, and how a long job is split.

The unit of work of attacks is some victims of a cell: processes, nodes and batches on a GPU all take such parts, which
the attack of the cell joins. The groups of victims of a split do not depend on the worker.
"""

from __future__ import annotations

import itertools
import time
import traceback
from collections.abc import Hashable
from pathlib import Path
from typing import Literal, NamedTuple

from leakgauge.harness.core.cell import Cell, TrainingSpec
from leakgauge.harness.core.labels import Names
from leakgauge.harness.core.stored import fingerprint, to_data
from leakgauge.harness.study.store import Store


class Job(NamedTuple):
    """One piece of work of a study.

    Attributes:
        kind: `training`; `trial`: a training without attacks, for a goal; `attack`: the attack on a cell, its score and
            its result; `search`, `limit`: an attack's guesses for some victims, or their limit, which attacks read.
        cells: the cells that need the training; for a trial, the cells that determine the kept rounds; for a search on
            an accelerator, all cells of one family; else one cell.
        part: the victims of a search or a limit: the first, and the end.
        parts: the parts that an attack reads.
    """

    kind: Literal["training", "trial", "attack", "search", "limit"]
    training: TrainingSpec
    cells: tuple[Cell, ...]
    part: tuple[int, int] = (0, 0)
    parts: tuple[str, ...] = ()

    @property
    def trains(self) -> bool:
        """Whether the job is a training, with or without attacks."""
        return self.kind in ("training", "trial")

    @property
    def victims(self) -> range:
        """The victims of a search or a limit; all victims of an attack."""
        return range(self.cells[0].target.count) if self.kind == "attack" else range(*self.part)

    def text(self, names: Names) -> str:
        """A name for people."""
        if self.trains:
            return f"{self.kind} of {names.training(self.training)}"
        about = names.cell(self.cells[0])
        if self.kind == "attack":
            return about
        others = f" and {len(self.cells) - 1} other cells" if len(self.cells) > 1 else ""
        return f"{self.kind}, victims {self.part[0]} to {self.part[1] - 1}: {about}{others}"

    @property
    def reads(self) -> tuple[str, ...]:
        """The folders that the job reads, relative to the store; they are finished when the job starts."""
        parts = tuple(f"parts/{name}" for name in self.parts)
        trainings = dict.fromkeys(f"trainings/{cell.training.id}" for cell in self.cells)
        return () if self.trains else (*trainings, *parts)

    @property
    def writes(self) -> tuple[str, ...]:
        """The folders that only this job writes, relative to the store."""
        if self.trains:
            return (f"trainings/{self.training.id}",)
        if self.kind == "attack":
            return (f"cells/{self.cells[0].id}",)
        wholes = (cell.id if self.kind == "search" else limit_id(cell) for cell in self.cells)
        return tuple(f"parts/{named(whole, self.victims)}" for whole in wholes)


class RunContext(NamedTuple):
    """The folder of the results, the folder of the data, and the device."""

    folder: Path
    root: Path
    device: str = "cpu"

    @property
    def store(self) -> Store:
        """The folder of the results as a store."""
        return Store(self.folder)


class Outcome(NamedTuple):
    """How a job ended: `error` is one line, empty for success; `trace` is the trace of an exception of type `kind`.

    warnings: what a user must know before the next jobs run.
    """

    job: Job
    seconds: float
    headline: str
    error: str
    trace: str = ""
    kind: str = ""
    warnings: tuple[str, ...] = ()


def perform(job: Job, context: RunContext) -> Outcome:
    """Do one job in this process, which has one thread; an exception becomes an outcome."""
    start = time.perf_counter()
    try:
        from leakgauge.harness.study.attack import run_attack, run_part
        from leakgauge.harness.study.training import keep_for, run_training

        warnings = list[str]()
        if job.trains:
            trained = run_training(job.training, keep_for(job.cells), context)
            last = trained.evaluations[-1]
            warnings = [flag.message for flag in trained.flags if flag.code == "misfit"]
            headline = f"loss {last.loss:.3f}" if last.accuracy is None else f"accuracy {last.accuracy:.3f}"
        elif job.kind == "attack":
            first = run_attack(job.cells[0], context, job.parts).estimates[0]
            headline = f"{first.name} {'n/a' if first.value is None else f'{first.value:.3f} (n {first.n})'}"
        else:
            run_part(job, context)
            headline = f"{len(job.victims)} victims"
        return Outcome(job, time.perf_counter() - start, headline, "", warnings=tuple(warnings))
    except Exception as error:
        kind, prefix = type(error).__name__, "training failed: " if job.kind == "training" else ""
        message = prefix + (str(error).split("\n")[0] or kind)
        return Outcome(job, time.perf_counter() - start, "", message, traceback.format_exc(), kind)


def limit_id(cell: Cell) -> str:
    """The id of the limit of a cell's target: the same for every attack on it."""
    return fingerprint({"limit": [cell.training.id, cell.threat, to_data(cell.target)]})


def family(cell: Cell) -> Hashable | None:
    """What the cells of a batch on an accelerator have in common; None: the cell is attacked alone.

    They attack messages of round 0 that were made with the same first model; only their defenses may differ.
    """
    target, spec = cell.target, cell.training
    of_first = (target.round, target.rounds, target.users) == (0, 1, 1) and not target.whole
    if not of_first or spec.malice is not None:
        return None
    return cell.attack.key, target, cell.threat, spec.task, spec.federation, spec.seed


def named(whole: str, victims: range) -> str:
    """The name of a part."""
    return f"{whole}-{victims.start}-{victims.stop}"


def victims_of(name: str) -> range:
    """The victims of the part with this name."""
    first, end = name.split("-")[1:]
    return range(int(first), int(end))


def groups(victims: range, size: int | None) -> list[range]:
    """The victims in groups of `size`, in order; in one group if there is no size."""
    size = size or len(victims) or 1
    return [victims[first : first + size] for first in range(0, len(victims), size)]


def shares(victims: range, size: int, count: int) -> list[range]:
    """The victims in at most `count` parts of about equal size; each part has whole groups of `size`."""
    each = groups(victims, size)
    count = min(count, len(each))
    bounds = [number * len(each) // count for number in range(count + 1)]
    return [range(each[low].start, each[high - 1].stop) for low, high in itertools.pairwise(bounds)]
