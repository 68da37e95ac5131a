"""What runs next: the jobs of a study in their order, and how far they are."""

from __future__ import annotations

import itertools
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from statistics import fmean

from leakgauge.harness.core.result import Failure
from leakgauge.harness.study.engine import Job, Outcome
from leakgauge.harness.study.store import Store, StoreError

_AHEAD = 64
"""Waiting attacks among which a worker finds its next one."""


@dataclass
class Progress:
    """The state of a running study, in cells; the listener receives it after every change.

    Attributes:
        waiting: the number of jobs to do, by kind (`Job.sort`).
        took: the seconds of those that ended.
        workers: how many of them run at a time.
        notes: what became of stored results, one line each, for a listener to take away.
    """

    total: int
    done: int = 0
    failed: int = 0
    skipped: int = 0
    running: list[str] = field(default_factory=list)
    waiting: Counter[str] = field(default_factory=Counter)
    took: dict[str, list[float]] = field(default_factory=dict)
    workers: int = 1
    notes: list[str] = field(default_factory=list)
    start: float = field(default_factory=time.monotonic)

    @property
    def seconds(self) -> float:
        """Since the start."""
        return time.monotonic() - self.start

    @property
    def seconds_left(self) -> float | None:
        """Until the end: each job takes the mean of its kind, or of all so far; None before the first ended."""
        if not self.took:
            return None
        mean = fmean(seconds for kind in self.took.values() for seconds in kind)
        expected = {kind: fmean(self.took[kind]) if kind in self.took else mean for kind in self.waiting}
        return sum(number * expected[kind] for kind, number in self.waiting.items()) / max(1, self.workers)

    def ended(self, job: Job, seconds: float) -> None:
        """Note the end of a running job."""
        self.running.remove(job.label)
        self.waiting[job.sort] -= 1
        self.took.setdefault(job.sort, []).append(seconds)

    @property
    def finished(self) -> int:
        """Cells that are done, failed or skipped."""
        return self.done + self.failed + self.skipped


Listener = Callable[[Progress, Outcome | None], None]


class Schedule:
    """Chooses the next job of a slot, and notes how jobs ended."""

    def __init__(
        self, store: Store, progress: Progress, listen: Listener, trainings: Iterable[Job], attacks: Iterable[Job]
    ) -> None:
        self.store, self.progress, self.listen = store, progress, listen
        self.trainings, self.attacks = deque(trainings), deque(attacks)
        progress.waiting.update(job.sort for job in (*self.trainings, *self.attacks))
        progress.waiting.update(attack.sort for job in self.trainings for attack in self._waiting(job))
        self.looks_at: dict[object, int] = {}  # the slot that has what attacks on a target have in common

    def next(self, slot: int) -> Job | None:
        """The next job of a slot: trainings first, since every attack needs one.

        Attacks on one target go to one slot, whose worker computes their limit once; a slot without one takes any.
        """
        if self.trainings or not self.attacks:
            return self.trainings.popleft() if self.trainings else None
        owners = (self.looks_at.get(_target(job), slot) for job in itertools.islice(self.attacks, _AHEAD))
        at = next((number for number, owner in enumerate(owners) if owner == slot), 0)
        job = self.attacks[at]
        del self.attacks[at]
        self.looks_at.setdefault(_target(job), slot)
        return job

    def started(self, job: Job) -> None:
        """Report the start of a job."""
        self.progress.running.append(job.label)
        self.listen(self.progress, None)

    def again(self, job: Job, reason: str) -> None:
        """Queue a job again whose worker died."""
        self.progress.running.remove(job.label)
        self.progress.notes.append(f"done again: {job.label}: {reason}")
        (self.attacks if job.kind == "attack" else self.trainings).appendleft(job)
        self.listen(self.progress, None)

    def ended(self, outcome: Outcome) -> None:
        """Report how a job ended; a finished training queues its attacks."""
        job = outcome.job
        if outcome.error:
            outcome = self._failed(outcome)
        self.progress.ended(job, outcome.seconds)
        if job.kind == "attack":
            self.progress.failed += bool(outcome.error)
            self.progress.done += not outcome.error
        elif job.kind == "training":
            waiting = self._waiting(job)
            if outcome.error:
                self.progress.failed += len(waiting)
                self.progress.waiting.subtract(attack.sort for attack in waiting)
            else:
                self.attacks.extend(waiting)
        self.listen(self.progress, outcome)

    def _failed(self, outcome: Outcome) -> Outcome:
        """Store why the cells of a failed job have no result; the outcome states if that fails too."""
        job, kind, message = outcome.job, outcome.kind, outcome.error
        try:
            for cell in job.cells if job.kind != "trial" else ():
                if self.store.read_result(cell.id) is None:
                    self.store.write_failure(Failure(cell, kind, message, outcome.trace))
        except StoreError as error:
            message = message if kind == "StoreError" else f"{message} (and {error})"
        return outcome._replace(error=message)

    def _waiting(self, training: Job) -> list[Job]:
        """The attacks to do after a training; none after a trial."""
        cells = training.cells if training.kind == "training" else ()
        return [Job("attack", training.training, (one,)) for one in cells if self.store.read_result(one.id) is None]


def _target(attack: Job) -> object:
    """Which attacks look at the same messages as this one."""
    cell = attack.cells[0]
    return attack.training.id, cell.threat, cell.target
