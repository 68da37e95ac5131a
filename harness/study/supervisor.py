"""A supervisor of worker processes, one per core, with one job at a time each.

If a worker dies, only its job is lost; a standard process pool would lose all of them.
"""

from __future__ import annotations

import itertools
import multiprocessing
import multiprocessing.connection
import os
import signal
import threading
import time
import traceback
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any, Literal, NamedTuple

from leakgauge.harness.core.cell import Cell, TrainingSpec
from leakgauge.harness.core.labels import cell_text, part_text
from leakgauge.harness.core.result import Failure
from leakgauge.harness.core.threads import one_thread
from leakgauge.harness.study.orphans import PARENT, STOPS, end_with, ignore_stops
from leakgauge.harness.study.store import Store, StoreError

_POLL = 0.2
"""Seconds between two checks for a stop, and for limits."""

_AHEAD = 64
"""Waiting attacks among which a worker finds its next one."""


class Job(NamedTuple):
    """One training, or one attack. `cells`: the cells that need the training, or the one cell of the attack.

    A `trial` is a training without attacks, for a goal; `cells` then say only which rounds it keeps.
    """

    kind: Literal["training", "trial", "attack"]
    training: TrainingSpec
    cells: tuple[Cell, ...]

    @property
    def sort(self) -> str:
        """The kind; for an attack, its name."""
        return self.cells[0].attack.name if self.kind == "attack" else self.kind

    @property
    def label(self) -> str:
        """A name for people."""
        if self.kind == "attack":
            return cell_text(self.cells[0])
        return f"{self.kind} of {part_text(self.training.defense)}, seed {self.training.seed}"


class Place(NamedTuple):
    """The folder of the results, the folder of the data, and the device."""

    folder: Path
    root: Path
    device: str


class Limits(NamedTuple):
    """What one training or one attack may take; None: any amount.

    Attributes:
        seconds: of wall-clock time.
        megabytes: of resident memory of its worker process. (The system's own limit counts addresses, of which torch
            reserves gigabytes.)
    """

    seconds: float | None = None
    megabytes: int | None = None

    def broken(self, pid: int, seconds: float) -> str:
        """Which of them a worker process breaks, as a sentence; empty if none."""
        if self.seconds is not None and seconds > self.seconds:
            return f"took longer than {self.seconds:g} s, the limit of --cell-timeout"
        if self.megabytes is None:
            return ""
        try:
            pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        except (OSError, IndexError):
            return ""  # it ended
        used = pages * os.sysconf("SC_PAGE_SIZE") / 1e6
        over = used > self.megabytes
        return f"used {used:.0f} MB, more than the {self.megabytes} MB of --cell-memory" if over else ""


NO_LIMITS = Limits()


class Outcome(NamedTuple):
    """How a job ended: `error` is one line, empty for success; `trace` is the whole trace of an exception."""

    job: Job
    seconds: float
    headline: str
    error: str
    trace: str = ""


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


class Interrupted(Exception):
    """The user stopped the study; finished results are kept."""


def cores() -> int:
    """The number of cores that this process may use."""
    return len(os.sched_getaffinity(0))


def _perform(job: Job, place: Place) -> str:
    """Do one job in this process and return the headline of its result."""
    from leakgauge.harness.study.jobs import keep_for, run_attack, run_training

    store = Store(place.folder)
    if job.kind != "attack":
        record = run_training(job.training, keep_for(job.cells), store, place.root, place.device)
        last = record.evaluations[-1]
        return f"loss {last.loss:.3f}" if last.accuracy is None else f"accuracy {last.accuracy:.3f}"
    first = run_attack(job.cells[0], store, place.root).estimates[0]
    return f"{first.name} {'n/a' if first.value is None else format(first.value, '.3f')}"


@one_thread()
def _work(pipe: Any, place: Place) -> None:
    """A worker process: work until the pipe closes; tell when each job starts, and how it ended."""
    ignore_stops()
    main = multiprocessing.parent_process()
    assert main is not None
    end_with(main.sentinel)
    while main.is_alive():
        try:
            job: Job = pipe.recv()
        except EOFError:
            return
        pipe.send(time.monotonic())
        pipe.send(_guarded(job, place))


def _guarded(job: Job, place: Place) -> Outcome:
    """Do one job; an exception becomes an outcome and a stored failure of its cells."""
    start = time.perf_counter()
    try:
        headline = _perform(job, place)
        return Outcome(job, time.perf_counter() - start, headline, "")
    except Exception as error:
        kind, prefix = type(error).__name__, "training failed: " if job.kind == "training" else ""
        message = prefix + (str(error).split("\n")[0] or kind)
        return _failed(job, time.perf_counter() - start, Store(place.folder), kind, message, traceback.format_exc())


def _failed(job: Job, seconds: float, store: Store, kind: str, message: str, trace: str = "") -> Outcome:
    """The outcome of a failed job. Stores why its cells have no result; the message states if that fails too."""
    try:
        for cell in job.cells if job.kind != "trial" else ():
            if store.read_result(cell.id) is None:
                store.write_failure(Failure(cell, kind, message, trace))
    except StoreError as error:
        message = message if kind == "StoreError" else f"{message} (and {error})"
    return Outcome(job, seconds, "", message, trace)


def _target(attack: Job) -> object:
    """Which attacks look at the same messages as this one."""
    cell = attack.cells[0]
    return attack.training.id, cell.threat, cell.target


@contextmanager
def _deferred_stop() -> Iterator[Callable[[], bool]]:
    """A stop sets a flag instead of raising anywhere in the supervisor, for example in the middle of a write."""
    flag = threading.Event()
    with handling(lambda number, frame: flag.set()):
        yield flag.is_set


def interrupt(number: int, frame: object) -> None:
    """Let any stop behave as Ctrl-C."""
    raise KeyboardInterrupt


@contextmanager
def handling(stop: Callable[[int, Any], object]) -> Iterator[None]:
    """Call `stop` on Ctrl-C, SIGTERM and SIGHUP; not on SIGHUP if it is ignored, as by nohup."""
    before = {number: signal.getsignal(number) for number in STOPS}
    if before[signal.SIGHUP] == signal.SIG_IGN:
        del before[signal.SIGHUP]
    if threading.current_thread() is not threading.main_thread():
        before = {}  # only the main thread may have a signal handler
    for number in before:
        signal.signal(number, stop)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@dataclass
class _Worker:
    """A worker process, the supervisor's end of its pipe, its job, and when it started that."""

    process: Any
    pipe: Any
    job: Job | None = None
    since: float | None = None


class Supervisor:
    """Hands out jobs and collects their outcomes."""

    def __init__(
        self,
        place: Place,
        progress: Progress,
        listen: Listener,
        trainings: Iterable[Job],
        attacks: Iterable[Job],
        limits: Limits = NO_LIMITS,
    ) -> None:
        self.place, self.progress, self.listen, self.limits = place, progress, listen, limits
        self.store = Store(place.folder)
        self.context = multiprocessing.get_context("forkserver")
        # imported once, by the fork server: a worker then starts in milliseconds
        preload = ["leakgauge.harness.study.fork_server", "torch", "leakgauge.harness.study.jobs"]
        # the kernel would end the fork server with the thread that started it
        main_thread = threading.current_thread() is threading.main_thread()
        self.context.set_forkserver_preload(preload if main_thread else preload[1:])
        os.environ[PARENT] = str(os.getpid())
        self.trainings, self.attacks = deque(trainings), deque(attacks)
        progress.waiting.update(job.sort for job in (*self.trainings, *self.attacks))
        progress.waiting.update(attack.sort for job in self.trainings for attack in self._waiting(job))
        self.workers: list[_Worker] = []
        self.looks_at: dict[object, _Worker] = {}  # who has what attacks on a target have in common

    def run(self, workers: int) -> None:
        """Do all jobs, in this process if `workers` is 0.

        Raises:
            Interrupted: Ctrl-C, SIGTERM or SIGHUP.
        """
        self.progress.workers = max(1, workers)
        self.listen(self.progress, None)
        if workers == 0:
            self._work_here()
            return
        try:
            with _deferred_stop() as interrupted:
                for _ in range(workers):
                    self.workers.append(self._hire())
                self._supervise(interrupted)
        finally:
            for worker in self.workers:
                if worker.job is not None:
                    worker.process.kill()
                worker.pipe.close()
            for worker in self.workers:
                worker.process.join()

    def _work_here(self) -> None:
        """Do all jobs in this process, on one thread as in a worker."""
        try:
            with handling(interrupt), one_thread():
                while job := self._next():
                    self._start(job)
                    self._finish(_guarded(job, self.place))
        except KeyboardInterrupt as error:
            raise Interrupted from error

    def _supervise(self, interrupted: Callable[[], bool]) -> None:
        """Keep every worker busy until all jobs are done."""
        while not interrupted():
            for worker in self.workers:
                if worker.job is None and (job := self._next(worker)):
                    worker.job, worker.since = job, None
                    self._start(job)
                    worker.pipe.send(job)
            busy = {worker.pipe: worker for worker in self.workers if worker.job is not None}
            if not busy:
                return
            for pipe in multiprocessing.connection.wait(busy, timeout=_POLL):
                self._receive(busy.pop(pipe))
            for worker in busy.values():
                seconds = time.monotonic() - worker.since if worker.since is not None else 0.0
                if reason := self.limits.broken(worker.process.pid, seconds):
                    self._replace(worker, seconds, "LimitExceeded", reason)
        raise Interrupted

    def _receive(self, worker: _Worker) -> None:
        """Take the start or the outcome of a worker's job; replace a dead worker."""
        try:
            found = worker.pipe.recv()
        except (EOFError, ConnectionError):
            worker.process.join()
            code = worker.process.exitcode
            how = f"killed by signal {-code}" if code is not None and code < 0 else f"exit code {code}"
            self._replace(worker, 0.0, "WorkerDied", f"the worker process died ({how}); out of memory, or killed")
            return
        if isinstance(found, Outcome):
            worker.job = None
            self._finish(found)
        else:
            worker.since = found

    def _replace(self, worker: _Worker, seconds: float, kind: str, reason: str) -> None:
        """Replace a worker, and fail its job."""
        job = worker.job
        assert job is not None
        worker.process.kill()
        worker.process.join()
        worker.pipe.close()
        self.workers[self.workers.index(worker)] = self._hire()
        self._finish(_failed(job, seconds, self.store, kind, reason))

    def _next(self, worker: _Worker | None = None) -> Job | None:
        """The next job: trainings first, since every attack needs one.

        Attacks on one target go to one worker, which computes their limit once; a worker without one takes any.
        """
        if self.trainings or not self.attacks:
            return self.trainings.popleft() if self.trainings else None
        owners = (self.looks_at.get(_target(job), worker) for job in itertools.islice(self.attacks, _AHEAD))
        at = next((number for number, owner in enumerate(owners) if owner is worker), 0)
        job = self.attacks[at]
        del self.attacks[at]
        if worker is not None:
            self.looks_at.setdefault(_target(job), worker)
        return job

    def _hire(self) -> _Worker:
        """Start a worker."""
        ours, theirs = self.context.Pipe()
        process = self.context.Process(target=_work, args=(theirs, self.place), daemon=True)
        process.start()
        theirs.close()
        return _Worker(process, ours)

    def _start(self, job: Job) -> None:
        """Report the start of a job."""
        self.progress.running.append(job.label)
        self.listen(self.progress, None)

    def _finish(self, outcome: Outcome) -> None:
        """Report an outcome; a finished training queues its attacks."""
        job = outcome.job
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

    def _waiting(self, training: Job) -> list[Job]:
        """The attacks to do after a training; none after a trial."""
        cells = training.cells if training.kind == "training" else ()
        return [Job("attack", training.training, (one,)) for one in cells if self.store.read_result(one.id) is None]
