"""Gives the jobs of a schedule to an engine until all are done, and handles dead workers and broken limits."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass
from typing import NamedTuple

from leakgauge.harness.study.engine import Died, Ended, Engine, Interrupted, Started
from leakgauge.harness.study.jobs import Job, Outcome
from leakgauge.harness.study.orphans import deferred_stop
from leakgauge.harness.study.schedule import Schedule

_POLL = 0.2
"""Seconds between two checks for a stop and for limits."""

_LIVES = 3
"""A job is given up after it has lost this number of workers."""


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
    """A job in a slot, and when it started."""

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
    deaths = Counter[str]()
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


def _lost(schedule: Schedule, lost: _Running, death: Died, deaths: Counter[str]) -> None:
    """Repeat a job whose worker died, or give the job up."""
    deaths[lost.job.writes] += 1
    if deaths[lost.job.writes] < _LIVES:
        schedule.again(lost.job, death.reason)
    else:
        reason = f"{death.reason}; tried {_LIVES} times"
        schedule.ended(Outcome(lost.job, lost.seconds, "", reason, kind="WorkerDied"))


def _check(schedule: Schedule, engine: Engine, running: dict[int, _Running], limits: Limits) -> None:
    """Abort the jobs that break a limit, and mark them as failed."""
    for slot, one in list(running.items()):
        if reason := limits.broken(one.seconds, engine.megabytes(slot)):
            engine.kill(slot)
            del running[slot]
            schedule.ended(Outcome(one.job, one.seconds, "", reason, kind="LimitExceeded"))
