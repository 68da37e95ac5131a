"""Grids of cells on several workers: the speed-up of two workers over one, and the overhead of the harness.

There are two studies: 48 equal cells that each compute for one second of processor time, and the demo. By default, all
jobs run in this process, one after the other, on a simulated clock of their processor seconds, which advances as if the
jobs ran on `--slots` cores. This gives the speed-up that the schedule allows, whatever else the machine does. The
processor time of all other code is added, as if all workers waited for it. With --wall, real worker processes are timed
instead, with one and two workers in turns; this needs a quiet machine.

    python benchmarks/grids.py [--study equal|demo] [--slots 2] [--seconds 1.0] [--cells 48]
    python benchmarks/grids.py --wall [--study equal|demo] [--times 3]
    python benchmarks/grids.py --first      seconds from the call to the start of the first job, in new processes
"""

from __future__ import annotations

import argparse
import heapq
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from _cells import equal

from leakgauge.harness.core.threads import one_thread
from leakgauge.harness.study.engine import Ended, Event
from leakgauge.harness.study.jobs import Job, Outcome, RunContext, perform
from leakgauge.harness.study.run import run_study
from leakgauge.harness.study.schedule import Progress
from leakgauge.harness.study.study import Study, load_study


class Clock:
    """An engine of `slots` on a simulated clock of processor seconds; jobs run one after the other in this process."""

    def __init__(self, context: RunContext, slots: int) -> None:
        self.context, self.slots = context, slots
        self.now = self.spent = 0.0
        self.queue: list[tuple[float, int, Outcome]] = []
        self.kinds = Counter[str]()

    def start(self, slot: int, job: Job) -> None:
        """Run the job at once; on the clock, it ends after its processor seconds."""
        start = time.process_time()
        with one_thread():
            outcome = perform(job, self.context)
        took = time.process_time() - start
        self.kinds[job.kind] += 1
        self.spent += took
        heapq.heappush(self.queue, (self.now + took, slot, outcome._replace(seconds=took)))

    def wait(self, seconds: float) -> list[Event]:
        """The job that ends next."""
        self.now, slot, outcome = heapq.heappop(self.queue)
        return [Ended(slot, outcome)]

    def megabytes(self, slot: int) -> float | None:
        """None: the memory is unknown."""
        return None

    def kill(self, slot: int) -> None:
        """Do nothing, because no job is ever running."""

    def close(self) -> None:
        """Do nothing."""


def on_a_clock(study: Study, slots: int) -> None:
    """Run a study on the clock, and print its line."""
    opened: list[Clock] = []

    def engine(context: RunContext) -> Clock:
        opened.append(Clock(context, slots))
        return opened[0]

    with tempfile.TemporaryDirectory() as folder:
        start = time.process_time()
        run = run_study(study, Path(folder), engine=engine)
        whole = time.process_time() - start
    clock, rest = opened[0], whole - opened[0].spent
    kinds = ", ".join(f"{number} {kind}" for kind, number in sorted(clock.kinds.items()))
    print(
        f"{study.name}: {len(run.results)} cells, {clock.spent:.1f} s of jobs ({kinds}), {rest:.2f} s of "
        f"other code ({100 * rest / whole:.1f} %); on {slots} cores {clock.now:.1f} s of jobs, "
        f"{(clock.spent + rest) / (clock.now + rest):.2f} times as fast as one core"
    )


def on_workers(make: Callable[[], Study], times: int) -> None:
    """Print the wall times of one and two workers, in turns, and the spread of their ratio."""
    ratios = []
    for number in range(times):
        took = []
        for workers in (1, 2):
            with tempfile.TemporaryDirectory() as folder:
                start = time.perf_counter()
                run_study(make(), Path(folder), workers=workers)
                took.append(time.perf_counter() - start)
        ratios.append(took[0] / took[1])
        print(f"turn {number}: one worker {took[0]:.1f} s, two {took[1]:.1f} s, ratio {ratios[-1]:.2f}", flush=True)
    print(
        f"two workers are {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f}) times as fast as one"
    )


def first(number: int) -> None:
    """Print the wall seconds from the call to the start and to the end of the first job, in new processes."""
    for _ in range(number):
        subprocess.run([sys.executable, __file__, "--one-first"], check=True)


def one_first() -> None:
    """Print the line of one new process."""
    start, seen = time.perf_counter(), list[float]()

    def listen(progress: Progress, outcome: Any) -> None:
        if progress.running or outcome is not None:
            seen.append(time.perf_counter() - start)

    with tempfile.TemporaryDirectory() as folder:
        run_study(equal(1, 0.0), Path(folder), workers=2, listen=listen)
    print(f"first job started after {seen[0]:.2f} s, ended after {seen[1]:.2f} s; all after {seen[-1]:.2f} s")


def main() -> None:
    """Print the requested measurement."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--study", choices=("equal", "demo"), default="equal")
    parser.add_argument("--slots", type=int, default=2)
    parser.add_argument("--cells", type=int, default=48)
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--wall", action="store_true")
    parser.add_argument("--times", type=int, default=3)
    parser.add_argument("--first", action="store_true")
    parser.add_argument("--one-first", action="store_true")
    given = parser.parse_args()

    def make() -> Study:
        return load_study("demo") if given.study == "demo" else equal(given.cells, given.seconds)

    if given.one_first:
        one_first()
    elif given.first:
        first(given.times)
    elif given.wall:
        on_workers(make, given.times)
    else:
        on_a_clock(make(), given.slots)


if __name__ == "__main__":
    main()
