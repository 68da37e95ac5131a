"""The overhead of an engine: 48 cells of one processor second each, in worker processes and on Ray, in turns.

    python benchmarks/engines.py [--turns 3] [--cells 48] [--workers 2]

Each run has its own folder. "All" is the time from the call to the end of the run, with imports in the workers; "jobs"
is the time from the start of the first attack. Bar: Ray takes at most 1.10 times as long as worker processes. Needs
`leakgauge[ray]`.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from functools import partial
from pathlib import Path
from statistics import median

from _cells import equal

from leakgauge.harness.study.engine import Open, Outcome
from leakgauge.harness.study.run import run_study
from leakgauge.harness.study.schedule import Progress
from leakgauge.harness.study.study import Study


def timed(study: Study, workers: int, engine: Open | None) -> tuple[float, float]:
    """Seconds of a run, and of its attacks."""
    first: list[float] = []

    def listen(progress: Progress, outcome: Outcome | None) -> None:
        if progress.running and not progress.running[0].startswith("training") and not first:
            first.append(time.perf_counter())

    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        run = run_study(study, Path(folder) / "out", workers=workers, engine=engine, listen=listen)
        end = time.perf_counter()
    assert len(run.results) == len(study.cells), run.failures
    return end - start, end - first[0]


def main() -> None:
    """Print the seconds of each turn, and the ratios."""
    from leakgauge.harness.study.ray_engine import RayEngine

    parser = argparse.ArgumentParser()
    for name, default in {"turns": 3, "cells": 48, "workers": 2}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    asked = parser.parse_args()
    study, ray = equal(asked.cells, 1.0), partial(RayEngine, slots=asked.workers)
    ratios: list[tuple[float, float]] = []
    for turn in range(asked.turns):
        ours, theirs = (timed(study, asked.workers, engine) for engine in (None, ray))
        ratios.append((theirs[0] / ours[0], theirs[1] / ours[1]))
        texts = [
            f"{name} {all_:.1f} s (jobs {jobs:.1f})" for name, (all_, jobs) in {"workers": ours, "Ray": theirs}.items()
        ]
        print(f"turn {turn + 1}: {', '.join(texts)}; ratio {ratios[-1][0]:.3f} (jobs {ratios[-1][1]:.3f})", flush=True)
    both = [f"{median(part):.3f} ({min(part):.3f} to {max(part):.3f})" for part in zip(*ratios, strict=True)]
    print(f"Ray over worker processes, {asked.cells} cells, {asked.workers} workers: all {both[0]}, jobs {both[1]}")


if __name__ == "__main__":
    main()
