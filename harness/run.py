"""Runs a study: trainings first, then the attacks on them, a process a core, and nothing that was finished is lost.

A supervisor of our own hands one piece of work at a time to each worker process. A worker that dies (out of memory, a
kill) costs the one cell that it held; the standard pools would lose the batch. The same command again skips what is
done.
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

from harness import registry
from harness.errors import StudyError
from harness.result import Cell, Failure, Run, TrainingSpec, to_data
from harness.store import Store, StoreError, load_run
from harness.study import Study

PRELOAD = ["torch", "harness.work"]
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


def run_study(
    study: Study,
    folder: str | Path,
    *,
    data: Path | None = None,
    workers: int | None = None,
    device: str = "cpu",
    listen: Listener | None = None,
) -> Run:
    """Run what is not yet done of a study, and return all results.

    Args:
        folder: of the results; made where it is missing.
        data: folder of the data sets; default `LEAKGAUGE_DATA`, or `~/.cache/leakgauge`.
        device: where clients train, `cpu` or `cuda`; recorded with each result, not part of its id.
        workers: processes; default one a core; 0 works in this process.
        listen: called after every change.

    Raises:
        StudyError: the device is not there, a data set is missing or does not fit a model; one line each, before
            anything runs.
        StoreError: the folder cannot be written, or holds a study.json that cannot be read.
        Interrupted: Ctrl-C; what was finished is kept.
    """
    from harness.data import default_root

    if device != "cpu" and not _has(device):
        raise StudyError(study.name, [f"device: got {device!r}, expected cpu, or cuda where there is one"])
    root = data if data is not None else default_root()
    store = Store(Path(folder))
    hashes, public = check_data(study, root)
    _check_same_data(study, store, hashes)
    store.write_study(
        {
            "name": study.name,
            "title": study.title,
            "hash": study.hash,
            "cells": [to_data(cell) for cell in study.cells],
            "data": hashes,
            "public": sorted(public),
            "attacks": {
                label: to_data(registry.describe(spec))
                for label, spec in sorted({cell.attack.label: cell.attack for cell in study.cells}.items())
            },
        }
    )
    jobs, ready, skipped = plan(study, store)
    progress = Progress(total=len(study.cells), skipped=skipped)
    count = min(workers if workers is not None else cores(), max(1, len(jobs) + len(ready)))
    place = Place(store.folder, root, device)
    supervisor = _Supervisor(place, progress, listen or (lambda progress, outcome: None))
    supervisor.run(jobs, ready, count)
    return load_run(store.folder)


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0))


def _has(device: str) -> bool:
    """Whether torch can compute there."""
    import torch

    return device.split(":")[0] == "cuda" and torch.cuda.is_available()


def check_data(study: Study, root: Path) -> tuple[dict[str, str], set[str]]:
    """Digest of each data set, and the names of those that may be shown; every model is built once on its data.

    Raises:
        StudyError: what is missing, unreadable or does not fit; one line each.
    """
    from harness.work import load_data, make_task

    load_data.cache_clear()  # a file may have changed since this process last read it
    hashes: dict[str, str] = {}
    public: set[str] = set()
    problems = []
    for task in dict.fromkeys(training.task for training in study.trainings):
        try:
            loaded = load_data(task.data, root)
            make_task(task, loaded)
        except (LookupError, ValueError, OSError) as error:
            problems.append(str(error))
            continue
        hashes[task.data] = loaded.digest
        if loaded.public:
            public.add(task.data)
    if problems:
        raise StudyError(study.name, problems)
    return hashes, public


def _check_same_data(study: Study, store: Store, hashes: dict[str, str]) -> None:
    """Refuse to mix results on two versions of one data set, which have the same ids."""
    if not (store.folder / "study.json").exists():
        return
    before = store.read_study().get("data", {})
    changed = [name for name, digest in hashes.items() if before.get(name, digest) != digest]
    if changed:
        lines = [
            f"data set {name!r} is not the one of the results in {store.folder}: use another folder" for name in changed
        ]
        raise StudyError(study.name, lines)


def plan(study: Study, store: Store) -> tuple[list[Job], list[Job], int]:
    """(trainings to run, attacks whose training is there, cells that are done)."""
    from harness.work import keep_for, training_suffices

    trainings, ready, skipped = [], [], 0
    for training in study.trainings:
        mine = study.cells_of[training.id]
        open_cells = [cell for cell in mine if store.read_result(cell.id) is None]
        skipped += len(mine) - len(open_cells)
        has_record = store.read_training(training.id) is not None
        if has_record and not open_cells:
            continue
        if training_suffices(training, keep_for(open_cells), store):
            ready += [Job("attack", training, (cell,)) for cell in open_cells]
        else:
            # keep what all of its cells need, so that a cell added later finds it
            trainings.append(Job("training", training, tuple(mine)))
    return trainings, ready, skipped


def perform(job: Job, place: Place) -> str:
    """Do one piece of work in this process; the headline of what came out."""
    from harness.work import keep_for, run_attack, run_training

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


class _Supervisor:
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
