"""A supervisor of worker processes, one a core: a worker that dies costs the one piece of work that it held.

The standard pools would lose the batch with it. Work is handed out one piece at a time.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import os
import signal
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

from leakgauge.harness.core.cell import Cell, TrainingSpec
from leakgauge.harness.core.result import Failure
from leakgauge.harness.study.store import Store, StoreError

PRELOAD = ["torch", "leakgauge.harness.study.jobs"]
"""Imported once by the fork server: a worker then starts in milliseconds."""


class Job(NamedTuple):
    """One piece of work. `cells` are those that a training serves, or the one cell of an attack."""

    kind: Literal["training", "attack"]
    training: TrainingSpec
    cells: tuple[Cell, ...]

    @property
    def label(self) -> str:
        """For people."""
        if self.kind == "attack":
            return self.cells[0].label
        return f"training of {self.training.defense.label}, seed {self.training.seed}"


class Place(NamedTuple):
    """Where work happens: the folder of results, that of the data, and the device."""

    folder: Path
    root: Path
    device: str


class Outcome(NamedTuple):
    """How a piece of work ended: `error` is empty, or one line."""

    job: Job
    seconds: float
    headline: str
    error: str


@dataclass
class Progress:
    """What a study has done so far; handed to the listener after every change."""

    total: int
    done: int = 0
    failed: int = 0
    skipped: int = 0
    running: list[str] = field(default_factory=list)


Listener = Callable[[Progress, Outcome | None], None]


class Interrupted(Exception):
    """The user stopped the study; what was finished is kept."""


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0))


def perform(job: Job, place: Place) -> str:
    """Do one piece of work in this process; the headline of what came out."""
    from leakgauge.harness.study.jobs import keep_for, run_attack, run_training

    store = Store(place.folder)
    if job.kind == "training":
        record = run_training(job.training, keep_for(list(job.cells)), store, place.root, place.device)
        last = record.evaluations[-1]
        return f"loss {last.loss:.3f}" if last.accuracy is None else f"accuracy {last.accuracy:.3f}"
    result = run_attack(job.cells[0], store, place.root)
    first = result.estimates[0]
    return f"{first.name} {'n/a' if first.value is None else format(first.value, '.3f')}"


def _worker(pipe: Any, place: Place) -> None:
    """A worker process: work until the pipe closes. Ctrl-C is the supervisor's to handle."""
    import torch

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    while True:
        try:
            job: Job = pipe.recv()
        except EOFError:
            return
        pipe.send(_guarded(job, place))


def _guarded(job: Job, place: Place) -> Outcome:
    """Do one piece of work; an exception becomes an outcome and a stored failure of its cells."""
    start = time.perf_counter()
    try:
        headline = perform(job, place)
    except Exception as error:
        text = str(error).split("\n")[0] or type(error).__name__
        prefix = "training failed: " if job.kind == "training" else ""
        message = _store_failures(Store(place.folder), job, type(error).__name__, prefix + text, traceback.format_exc())
        return Outcome(job, time.perf_counter() - start, "", message)
    return Outcome(job, time.perf_counter() - start, headline, "")


def _store_failures(store: Store, job: Job, kind: str, message: str, trace: str) -> str:
    """Write why these cells have no result; the message, with a word more where even that could not be written."""
    try:
        for cell in job.cells:
            if store.read_result(cell.id) is None:
                store.write_failure(Failure(cell, kind, message, trace))
    except StoreError as error:
        return message if kind == "StoreError" else f"{message} (and {error})"
    return message


_POLL = 0.2
"""Seconds between looks at whether the user wants to stop."""


@contextmanager
def _deferred_interrupt() -> Iterator[Callable[[], bool]]:
    """Ctrl-C sets a flag instead of raising wherever the supervisor happens to be, in the middle of a write say."""
    flag = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield flag.is_set  # only the main thread may have a signal handler
        return
    before = signal.signal(signal.SIGINT, lambda number, frame: flag.set())
    try:
        yield flag.is_set
    finally:
        signal.signal(signal.SIGINT, before)


class _Hand(NamedTuple):
    """A worker process and our end of its pipe."""

    process: Any
    pipe: Any


class Supervisor:
    """Hands out work, and takes in outcomes."""

    def __init__(self, place: Place, progress: Progress, listen: Listener) -> None:
        self.place, self.progress, self.listen = place, progress, listen
        self.store = Store(place.folder)
        self.context = multiprocessing.get_context("forkserver")
        self.context.set_forkserver_preload(PRELOAD)
        self.trainings: deque[Job] = deque()
        self.attacks: deque[Job] = deque()

    def run(self, trainings: Iterable[Job], attacks: Iterable[Job], workers: int) -> None:
        """Until nothing is left to do."""
        self.trainings.extend(trainings)
        self.attacks.extend(attacks)
        self.listen(self.progress, None)
        if workers == 0:
            self._work_here()
            return
        hands: dict[Any, tuple[_Hand, Job | None]] = {}
        try:
            with _deferred_interrupt() as interrupted:
                for _ in range(workers):
                    hand = self._hire()
                    hands[hand.pipe] = (hand, None)
                self._supervise(hands, interrupted)
        finally:
            for hand, job in hands.values():
                if job is not None:
                    hand.process.kill()
                hand.pipe.close()
            for hand, _ in hands.values():
                hand.process.join()

    def _work_here(self) -> None:
        """All work in this process, on one thread as in a worker."""
        import torch

        before = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            while job := self._next():
                self._start(job)
                self._finish(_guarded(job, self.place))
        except KeyboardInterrupt as error:
            raise Interrupted from error
        finally:
            torch.set_num_threads(before)

    def _supervise(self, hands: dict[Any, tuple[_Hand, Job | None]], interrupted: Callable[[], bool]) -> None:
        """Keep every hand busy until all is done."""
        while True:
            if interrupted():
                raise Interrupted
            for pipe, (hand, held) in list(hands.items()):
                if held is None and (job := self._next()):
                    hands[pipe] = (hand, job)
                    self._start(job)
                    pipe.send(job)
            busy = [pipe for pipe, (_, job) in hands.items() if job is not None]
            if not busy:
                return
            for pipe in list[Any](multiprocessing.connection.wait(busy, timeout=_POLL)):
                hand, job = hands.pop(pipe)
                assert job is not None  # only busy pipes are waited for
                try:
                    outcome = pipe.recv()
                except (EOFError, ConnectionError):
                    outcome = self._died(hand, job)
                    hand = self._hire()
                hands[hand.pipe] = (hand, None)
                self._finish(outcome)

    def _next(self) -> Job | None:
        """Trainings first: every attack waits for one."""
        for queue in (self.trainings, self.attacks):
            if queue:
                return queue.popleft()
        return None

    def _hire(self) -> _Hand:
        """A new worker."""
        ours, theirs = self.context.Pipe()
        process = self.context.Process(target=_worker, args=(theirs, self.place), daemon=True)
        process.start()
        theirs.close()
        return _Hand(process, ours)

    def _died(self, hand: _Hand, job: Job) -> Outcome:
        """The outcome of work whose worker is gone."""
        hand.process.join()
        code = hand.process.exitcode
        how = f"killed by signal {-code}" if code is not None and code < 0 else f"exit code {code}"
        message = f"the worker process died ({how}); out of memory, or killed"
        return Outcome(job, 0.0, "", _store_failures(self.store, job, "WorkerDied", message, ""))

    def _start(self, job: Job) -> None:
        """Note that work began."""
        self.progress.running.append(job.label)
        self.listen(self.progress, None)

    def _finish(self, outcome: Outcome) -> None:
        """Take in an outcome; a training sets its attacks free."""
        job = outcome.job
        self.progress.running.remove(job.label)
        waiting = [cell for cell in job.cells if self.store.read_result(cell.id) is None]
        if job.kind == "training":
            if outcome.error:
                self.progress.failed += len(waiting)
            else:
                self.attacks.extend(Job("attack", job.training, (cell,)) for cell in waiting)
        elif outcome.error:
            self.progress.failed += 1
        else:
            self.progress.done += 1
        self.listen(self.progress, outcome)
