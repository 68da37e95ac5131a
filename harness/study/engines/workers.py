"""The default engine: worker processes of this machine, with one pipe each.

If a worker dies, only its job is lost; a standard process pool would lose all jobs. A fork server imports torch once,
so a worker starts in milliseconds.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import os
import threading
from contextlib import suppress
from multiprocessing import forkserver
from typing import Any, NamedTuple

from leakgauge.harness.core.search_path import variables
from leakgauge.harness.core.threads import one_thread
from leakgauge.harness.study.engine import Died, Ended, Event, Started, resident
from leakgauge.harness.study.jobs import Job, Outcome, RunContext, perform
from leakgauge.harness.study.orphans import PARENT, end_with, ignore_stops, inherited


def cores() -> int:
    """The number of cores that this process may use."""
    return len(os.sched_getaffinity(0))


def warm_up() -> None:
    """Start the fork server, which imports modules while this process continues."""
    # the kernel would end the fork server with the thread that started it
    first = [f"{__package__}._fork_server"] if threading.current_thread() is threading.main_thread() else []
    multiprocessing.get_context("forkserver").set_forkserver_preload([*first, "torch", f"{__package__}._preload"])
    with inherited({**variables(), PARENT: str(os.getpid())}):
        forkserver.ensure_running()


class _Worker(NamedTuple):
    process: Any
    pipe: Any


class Workers:
    """The engine of worker processes (default one per core); a worker starts with the first job of its slot."""

    def __init__(self, context: RunContext, slots: int | None = None) -> None:
        self.context, self.slots = context, cores() if slots is None else slots
        self.processes = multiprocessing.get_context("forkserver")
        self.workers: dict[int, _Worker] = {}
        self.busy: set[int] = set()
        warm_up()

    def start(self, slot: int, job: Job) -> None:
        """Send the job to the worker of the slot."""
        if slot not in self.workers:
            ours, theirs = self.processes.Pipe()
            process = self.processes.Process(target=_work, args=(theirs, self.context), daemon=True)
            warm_up()  # again, if the fork server has died: `start` would start it with other variables
            process.start()
            theirs.close()
            self.workers[slot] = _Worker(process, ours)
        self.busy.add(slot)
        with suppress(ConnectionError):  # the worker died while idle: `wait` notices that
            self.workers[slot].pipe.send(job)

    def wait(self, seconds: float) -> list[Event]:
        """The starts, outcomes and deaths of the busy workers."""
        pipes = {self.workers[slot].pipe: slot for slot in self.busy}
        return [self._received(pipes[pipe]) for pipe in multiprocessing.connection.wait(pipes, timeout=seconds)]

    def megabytes(self, slot: int) -> float | None:
        """Resident memory of a worker process; None if it has ended."""
        return resident(self.workers[slot].process.pid)

    def kill(self, slot: int) -> None:
        """End a worker; the next job of its slot starts another."""
        self.busy.discard(slot)
        process, pipe = self.workers.pop(slot)
        process.kill()
        process.join()
        pipe.close()

    def close(self) -> None:
        """End the workers."""
        for slot in list(self.busy):
            self.kill(slot)
        for worker in self.workers.values():
            worker.pipe.close()  # the worker then ends
        for worker in self.workers.values():
            worker.process.join()
        self.workers.clear()

    def _received(self, slot: int) -> Event:
        process, pipe = self.workers[slot]
        try:
            outcome: Outcome | None = pipe.recv()
        except (EOFError, ConnectionError):
            process.join()
            code = process.exitcode
            self.kill(slot)
            how = f"killed by signal {-code}" if code is not None and code < 0 else f"exit code {code}"
            return Died(slot, f"the worker process died ({how}); out of memory, or killed")
        if outcome is None:
            return Started(slot)
        self.busy.discard(slot)
        return Ended(slot, outcome)


@one_thread()
def _work(pipe: Any, context: RunContext) -> None:
    """A worker process: do jobs until the pipe closes, and report when each job starts and how it ended."""
    ignore_stops()
    main = multiprocessing.parent_process()
    assert main is not None
    end_with(main.sentinel)
    while main.is_alive():
        try:
            job: Job = pipe.recv()
        except EOFError:
            return
        pipe.send(None)
        pipe.send(perform(job, context))
