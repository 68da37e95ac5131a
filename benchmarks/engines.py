"""The overhead of an engine: 48 cells of one processor second each, in worker processes and on Ray, in turns.

    python benchmarks/engines.py [--turns 3] [--cells 48] [--workers 2] [--cluster]

Each run has its own folder and, like a command, its own process, in which no worker is warm. "All" is the time from the
call to the end of the run, with imports in the workers; "jobs" is the time from the start of the first attack. With
`--cluster`, runs join a cluster of this machine that is already there, as with `leakgauge run --address`; without, each
run starts a Ray of its own. Bar: Ray takes at most 1.10 times as long as worker processes. Needs the environment of
`.ci/ray`.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from statistics import median

from _cells import equal

from leakgauge.harness.study.engine import Open
from leakgauge.harness.study.jobs import Outcome
from leakgauge.harness.study.run import run_study
from leakgauge.harness.study.schedule import Progress
from leakgauge.harness.study.study import Study


def timed(study: Study, workers: int, ray: bool, address: str | None) -> tuple[float, float]:
    """Seconds of a run, and of its attacks."""
    from leakgauge.harness.study.engines.ray import RayEngine

    first: list[float] = []
    engine: Open | None = partial(RayEngine, address=address, slots=workers) if ray else None

    def listen(progress: Progress, outcome: Outcome | None) -> None:
        if progress.running and not progress.running[0].startswith("training") and not first:
            first.append(time.perf_counter())

    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        run = run_study(study, Path(folder) / "out", workers=workers, engine=engine, listen=listen)
        end = time.perf_counter()
    assert len(run.results) == len(study.cells), run.failures
    return end - start, end - first[0]


@contextmanager
def cluster(wanted: bool, workers: int) -> Iterator[str | None]:
    """The address of a new cluster of this machine, which ends with the context; None if it is not wanted."""
    from ray.cluster_utils import Cluster

    if not wanted:
        yield None
        return
    nodes = Cluster(initialize_head=True, head_node_args={"num_cpus": workers, "include_dashboard": False})
    try:
        yield nodes.address
    finally:
        nodes.shutdown()


def main() -> None:
    """Print the seconds of each turn, and the ratios."""
    parser = argparse.ArgumentParser()
    for name, default in {"turns": 3, "cells": 48, "workers": 2}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--cluster", action="store_true", help="join a cluster that is already there")
    asked = parser.parse_args()
    study, ratios = equal(asked.cells, 1.0), list[tuple[float, float]]()
    fresh = ProcessPoolExecutor(1, get_context("spawn"), max_tasks_per_child=1)
    with fresh as processes, cluster(asked.cluster, asked.workers) as address:
        for turn in range(asked.turns):
            runs = (processes.submit(timed, study, asked.workers, ray, address) for ray in (False, True))
            ours, theirs = (run.result() for run in runs)
            ratios.append((theirs[0] / ours[0], theirs[1] / ours[1]))
            both = {"workers": ours, "Ray": theirs}
            texts = [f"{name} {all_:.1f} s (jobs {jobs:.1f})" for name, (all_, jobs) in both.items()]
            ratio = f"ratio {ratios[-1][0]:.3f} (jobs {ratios[-1][1]:.3f})"
            print(f"turn {turn + 1}: {', '.join(texts)}; {ratio}", flush=True)
    both = [f"{median(part):.3f} ({min(part):.3f} to {max(part):.3f})" for part in zip(*ratios, strict=True)]
    print(f"Ray over worker processes, {asked.cells} cells, {asked.workers} workers: all {both[0]}, jobs {both[1]}")


if __name__ == "__main__":
    main()
