"""The order and the progress of the jobs of a study.

The job with the longest remaining chain starts first. Other jobs go to the slot that ran their training, whose worker
has it in memory. A long attack or a long limit is split when its turn comes. With several slots, a limit that several
attacks read is a job of its own, so no two workers compute it. Results never depend on the split. `supervise` gives
the jobs to an engine until all are done, and handles dead workers and broken limits.
"""

from __future__ import annotations

import heapq
import math
import time
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from leakgauge.harness.core.cell import Cell
from leakgauge.harness.core.labels import Names
from leakgauge.harness.core.result import Failure
from leakgauge.harness.federation import registry
from leakgauge.harness.study.cost import Pace
from leakgauge.harness.study.engine import Died, Ended, Engine, Interrupted, Started
from leakgauge.harness.study.jobs import Job, Outcome, family, limit_id, named, shares, victims_of
from leakgauge.harness.study.orphans import deferred_stop
from leakgauge.harness.study.store import Store, StoreError

_SHARED = 1.0
"""On one slot, whose worker remembers a few limits, the least seconds of a limit that is a job of its own because
several attacks read it."""

_PART = 4.0  # the least seconds of a part, because each worker observes the target again
_URGENT = 0.55  # a job is urgent if its chain takes more than this share of the work left for each slot


@dataclass
class Progress:
    """The state of a running study, in cells; the listener receives it after every change.

    Attributes:
        left: seconds of the remaining jobs on one worker; None before the first job has ended.
        workers: how many jobs run at a time.
        notes: what happened to stored results, one line each; a listener may remove them.
        names: short names of the study's trainings and cells.
    """

    total: int
    done: int = 0
    failed: int = 0
    skipped: int = 0
    running: list[Job] = field(default_factory=list)
    left: float | None = None
    workers: int = 1
    notes: list[str] = field(default_factory=list)
    names: Names = field(default_factory=Names)
    start: float = field(default_factory=time.monotonic)

    @property
    def seconds(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self.start

    @property
    def finished(self) -> int:
        """Cells that are done, failed or skipped."""
        return self.done + self.failed + self.skipped


Listener = Callable[[Progress, Outcome | None], None]


@dataclass(eq=False)
class _Task:
    """A job that has not ended."""

    job: Job
    cost: float = 0.0  # the expected seconds of the job
    later: float = 0.0  # the expected seconds of the longest job that waits for it
    then: list[_Task] = field(default_factory=list)  # the attacks that wait for this training or part
    waits: int = 0  # how many jobs the task waits for
    taken: bool = False  # whether it runs or is given up
    tried: bool = False  # whether splitting was tried


class Schedule:
    """Chooses the next job of a slot, and notes how jobs ended.

    Args:
        jobs: trainings, of which each is followed by the attacks on its unfinished cells; attacks on stored trainings.
        finished: the ids of the cells that need no attack.
        pace: the expected time of jobs.
        slots: how many jobs run at a time; with one slot nothing is split, else into at most 2 * slots parts.
        batches: whether one search may take the victims of several cells. All trainings then run first.
    """

    def __init__(
        self,
        store: Store,
        progress: Progress,
        listen: Listener,
        jobs: Iterable[Job],
        *,
        pace: Pace,
        finished: Collection[str] = (),
        slots: int = 1,
        batches: bool = False,
    ) -> None:
        self.store, self.progress, self.listen = store, progress, listen
        self.finished, self.pace, self.slots, self.batches = finished, pace, slots, batches
        self.relatives: dict[Hashable, list[_Task]] = {}  # the attacks that one search may serve, by what they share
        self.heap: list[tuple[float, int, _Task]] = []  # tasks that may start, the longest chain first
        self.families: dict[str, list[tuple[float, int, _Task]]] = {}  # the attacks in the heap, by training
        self.open: dict[tuple[str, ...], _Task] = {}  # tasks that have not ended, by the folders that they write
        self.parts: dict[str, dict[str, _Task]] = {}  # parts that have not ended, by their whole and by name
        self.users: dict[str, int] = {}  # attacks that still read a limit
        self.has: dict[int, str] = {}  # the training that a slot's worker has in memory
        self.numbers, self.ended_jobs = 0, 0
        self.left = 0.0
        for job in jobs:
            self._add(job)
        self._reprice()

    def next(self, slot: int) -> Job | None:
        """The next job of a slot; None if there is none now."""
        while task := self._pick(slot):
            if self._split(task):
                continue
            task.taken = True
            self.has[slot] = task.job.training.id
            return task.job
        return None

    def started(self, job: Job) -> None:
        """Report the start of a job."""
        self.progress.running.append(job)
        self.listen(self.progress, None)

    def again(self, job: Job, reason: str) -> None:
        """Queue a job again because its worker died."""
        self.progress.running.remove(job)
        self.progress.notes.append(f"done again: {job.text(self.progress.names)}: {reason}")
        if (task := self.open.get(job.writes)) is not None:  # otherwise nobody needs the job any more
            task.taken = False
            self._push(task)
        self.listen(self.progress, None)

    def ended(self, outcome: Outcome) -> None:
        """Report how a job ended; jobs that waited for it may start."""
        job = outcome.job
        self.progress.running.remove(job)
        self.progress.notes += outcome.warnings
        task = self._close(job.writes)
        if not outcome.error:
            self.pace.learn(job, outcome.seconds)
        if task is not None:
            outcome = self._failed(task, outcome) if outcome.error else self._succeeded(task, outcome)
        self.ended_jobs += 1
        if self.ended_jobs & (self.ended_jobs - 1) == 0:
            self._reprice()
        self.progress.left = max(0.0, self.left)
        self.listen(self.progress, outcome)

    def _succeeded(self, task: _Task, outcome: Outcome) -> Outcome:
        job = task.job
        if job.kind == "attack":
            self.progress.done += 1
            self._clean(job.cells[0])
        for attack in task.then:
            attack.waits -= 1
            if not attack.waits:
                self._push(attack)
        return outcome

    def _failed(self, task: _Task, outcome: Outcome) -> Outcome:
        job, cells = task.job, list[Cell]()
        if job.kind == "limit" or (job.kind == "search" and len(job.cells) > 1):  # each attack does it by itself
            return self._succeeded(task, outcome)
        if job.kind == "attack":
            cells = list(job.cells)
        for attack in task.then:
            cells += attack.job.cells
            self._give_up(attack)
        for cell in cells:
            self._clean(cell)
        self.progress.failed += len(cells)
        kind, message = outcome.kind, outcome.error
        try:
            for cell in cells:
                self.store.write_failure(Failure(cell, kind, message, outcome.trace))
        except StoreError as error:
            message = message if kind == "StoreError" else f"{message} (and {error})"
        return outcome._replace(error=message)

    def _give_up(self, attack: _Task) -> None:
        """Remove an attack and its parts that have not started; the results of running parts are not used."""
        attack.taken = True
        self._close(attack.job.writes)
        for other in self.parts.pop(attack.job.cells[0].id, {}).values():
            other.taken = True
            self._close(other.job.writes)

    def _add(self, job: Job) -> _Task:
        """Add a job that may start; for a training, also the attacks that wait for it."""
        task = self.open[job.writes] = _Task(job)
        if job.kind == "training":
            cells = [cell for cell in job.cells if cell.id not in self.finished]
            task.then = [self._wait(_Task(Job("attack", job.training, (cell,)))) for cell in cells]
        elif job.kind == "attack":
            self._wait(task, 0)
        task.cost = self.pace.expected(job)
        self.left += task.cost
        return task

    def _wait(self, attack: _Task, waits: int = 1) -> _Task:
        self.open[attack.job.writes], attack.waits = attack, waits
        limit = limit_id(attack.job.cells[0])
        self.users[limit] = self.users.get(limit, 0) + 1
        if self.batches and (common := family(attack.job.cells[0])) is not None:
            self.relatives.setdefault(common, []).append(attack)
        return attack

    def _close(self, writes: tuple[str, ...]) -> _Task | None:
        """Remove a task and return it; None if it was already removed."""
        task = self.open.pop(writes, None)
        if task is not None:
            self.left -= task.cost
            for name in (each.removeprefix("parts/") for each in writes):
                self.parts.get(name.partition("-")[0], {}).pop(name, None)
        return task

    def _clean(self, cell: Cell) -> None:
        """Remove the parts of a cell that has ended, and its limit after the last attack on the target."""
        self.store.drop_parts(cell.id)
        limit = limit_id(cell)
        self.users[limit] -= 1
        if not self.users[limit]:
            self.store.drop_parts(limit)

    def _reprice(self) -> None:
        """Estimate the seconds of all jobs again from the ended jobs; done after 1, 2, 4, 8, ... ended jobs."""
        self.heap.clear()
        self.families.clear()
        for task in self.open.values():
            task.cost = self.pace.expected(task.job)
        for task in self.open.values():
            if task.job.trains:
                task.later = max((attack.cost for attack in task.then), default=0.0)
        self.left = math.fsum(task.cost for task in self.open.values())
        for task in self.open.values():
            if not task.taken and not task.waits:
                self._push(task)

    def _push(self, task: _Task) -> None:
        self.numbers += 1
        first = self.batches and task.job.trains
        entry = -math.inf if first else -(task.cost + task.later), self.numbers, task
        heapq.heappush(self.heap, entry)
        if not task.job.trains:
            heapq.heappush(self.families.setdefault(task.job.training.id, []), entry)

    def _pick(self, slot: int) -> _Task | None:
        """A job on the slot's training; if there is none, or another job is urgent, the job with the longest chain."""
        first, near = _top(self.heap), _top(self.families.get(self.has.get(slot, ""), []))
        if first is None or near is None or (self.batches and first.job.trains):
            return first
        return first if first.cost + first.later > _URGENT * self.left / max(1, self.slots) else near

    def _split(self, task: _Task) -> bool:
        """Split a long attack, and make its limit a separate job; returns whether the attack now waits."""
        job = task.job
        if job.kind != "attack" or task.tried:
            return False
        if self.batches and self._batch(task):
            return True
        task.tried, cell = True, job.cells[0]
        if cell.target.whole or cell.target.users > 1:
            return False
        attack, before, parts = registry.build_attack(cell.attack), list[_Task](), [*job.parts]
        if attack.kind not in ("reconstruction", "lineup"):
            return False
        dim = self.pace.dim(job.training.task)
        limit = Job("limit", job.training, (cell,), (0, cell.target.count))
        limited = cell.limit and attack.kind == "reconstruction"
        seconds = self.pace.expected(limit) if limited else 0.0
        name = limit_id(cell)
        least = 2 * _PART if self.users[name] == 1 else _SHARED if self.slots == 1 else 0.0
        if limited and (seconds >= least or self.parts.get(name) or self.store.parts_of(name)):
            self._divide(task, limit, name, 1, before, parts)
        size = attack.at_once(dim) if dim else None
        if size is not None and size < cell.target.count and self.slots > 1:
            search = Job("search", job.training, (cell,), (0, cell.target.count))
            self._divide(task, search, cell.id, size, before, parts)
        self._close(job.writes)
        task.job = job._replace(parts=tuple(parts))
        task.waits, task.cost = len(before), self.pace.expected(task.job)
        self.open[job.writes] = task
        self.left += task.cost
        return bool(before)

    def _batch(self, task: _Task) -> bool:
        """Let an attack and all like it wait for one search of their victims; False if there is none, or there was."""
        cell, dim = task.job.cells[0], self.pace.dim(task.job.training.task)
        ready = [other for other in self.relatives.pop(family(cell), []) if not (other.taken or other.waits)]
        attack = registry.build_attack(cell.attack)
        if len(ready) < 2 or attack.kind != "reconstruction" or attack.at_once(max(1, dim)) is None:
            return False
        cells, victims = tuple(other.job.cells[0] for other in ready), range(cell.target.count)
        search = self._add(Job("search", task.job.training, cells, (0, len(victims))))
        search.then = ready
        for other, own in zip(ready, cells, strict=True):
            other.job, other.waits = other.job._replace(parts=(named(own.id, victims),)), 1
            self.left -= other.cost
            other.cost = self.pace.expected(other.job)
            self.left += other.cost
        self._push(search)
        return True

    def _divide(self, task: _Task, whole: Job, name: str, size: int, before: list[_Task], parts: list[str]) -> None:
        """Let a task use the parts of `whole`: stored parts, and queued and new parts, for which it waits."""
        known, queued = self.store.parts_of(name), self.parts.setdefault(name, {})
        covered = {i for part in (*known, *queued) for i in victims_of(part)}
        seconds = self.pace.expected(whole)
        count = min(2 * self.slots, max(1, int(seconds / _PART))) if self.slots > 1 else 1
        new = [] if covered >= set(whole.victims) else shares(whole.victims, size, count)
        if whole.kind == "search" and len(new) == 1 and not known:
            return
        for victims in new:
            if not covered >= set(victims):
                queued[named(name, victims)] = self._add(whole._replace(part=(victims.start, victims.stop)))
                self._push(queued[named(name, victims)])
        for other in queued.values():  # parts of a limit also serve other attacks on the target
            other.then.append(task)
            other.later = max(other.later, task.cost)
            before.append(other)
        parts += [*known, *queued]


def _top(heap: list[tuple[float, int, _Task]]) -> _Task | None:
    """The first task of a heap that may start; tasks before it are removed."""
    while heap and (heap[0][2].taken or heap[0][2].waits):
        heapq.heappop(heap)
    return heap[0][2] if heap else None


_POLL = 0.2  # seconds between two checks for a stop and for limits
_LIVES = 3  # a job is given up after it has lost this number of workers


class Limits(NamedTuple):
    """Limits of one training or one attack; None: no limit.

    Attributes:
        seconds: of wall-clock time.
        megabytes: of resident memory of its worker process. (The system's own limit counts address space, and torch
            reserves gigabytes of that.)
    """

    seconds: float | None = None
    megabytes: int | None = None

    def broken(self, seconds: float, used: float | None) -> str:
        """The limit that a job with this time and memory breaks, as a sentence; empty if it breaks none."""
        if self.seconds is not None and seconds > self.seconds:
            return f"took longer than {self.seconds:g} s, the limit of --cell-timeout"
        if self.megabytes is None or used is None or used <= self.megabytes:
            return ""
        return f"used {used:.0f} MB, more than the {self.megabytes} MB of --cell-memory"


NO_LIMITS = Limits()


@dataclass
class _Running:
    job: Job
    since: float | None = None

    @property
    def seconds(self) -> float:
        """Seconds since the job started."""
        return 0.0 if self.since is None else time.monotonic() - self.since


def supervise(schedule: Schedule, engine: Engine, limits: Limits = NO_LIMITS) -> None:
    """Do all jobs of a schedule; jobs that still run at the end are left to `Engine.close`.

    A job whose worker died is repeated. It fails after it has lost three workers, and at once if it breaks a limit.

    Raises:
        Interrupted: Ctrl-C, SIGTERM or SIGHUP.
    """
    running: dict[int, _Running] = {}
    deaths = Counter[tuple[str, ...]]()
    with deferred_stop() as stopped:
        while not stopped():
            for slot in range(engine.slots):
                if slot not in running and (job := schedule.next(slot)):
                    running[slot] = _Running(job)
                    schedule.started(job)
                    engine.start(slot, job)
            if not running:
                return
            for event in engine.wait(_POLL):
                if isinstance(event, Started):
                    running[event.slot].since = time.monotonic()
                    continue
                ended = running.pop(event.slot)
                if isinstance(event, Ended):
                    schedule.ended(event.outcome)
                else:
                    _lost(schedule, ended, event, deaths)
            if limits != NO_LIMITS:
                _check(schedule, engine, running, limits)
    raise Interrupted


def _lost(schedule: Schedule, lost: _Running, death: Died, deaths: Counter[tuple[str, ...]]) -> None:
    deaths[lost.job.writes] += 1
    if deaths[lost.job.writes] < _LIVES:
        schedule.again(lost.job, death.reason)
    else:
        reason = f"{death.reason}; tried {_LIVES} times"
        schedule.ended(Outcome(lost.job, lost.seconds, "", reason, kind="WorkerDied"))


def _check(schedule: Schedule, engine: Engine, running: dict[int, _Running], limits: Limits) -> None:
    for slot, busy in list(running.items()):
        if reason := limits.broken(busy.seconds, engine.megabytes(slot)):
            engine.kill(slot)
            del running[slot]
            schedule.ended(Outcome(busy.job, busy.seconds, "", reason, kind="LimitExceeded"))
