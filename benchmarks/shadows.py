"""Shadow models: time to train 64 models, each with plain SGD on 500 of 1,000 records, in two single-thread processes.

Batches of 50, 27 epochs: 270 steps with momentum, by one client in one round. Prints seconds for all 64 after the
processes have started (best of three), processor seconds of one process, processor microseconds per model and step, and
the relative time of the lean loop over single models (median of interleaved repeats). Exit code 1 if the smaller model
takes 10 s or longer; the larger model is for comparison.

    python benchmarks/shadows.py
"""

from __future__ import annotations

import functools
import multiprocessing
import statistics
import sys
import time
from concurrent.futures import ProcessPoolExecutor

import torch

from leakgauge.attacks._engine.shadows import Recipe, halves, train_shadows
from leakgauge.harness.core import rng
from leakgauge.harness.core.contract import Examples
from leakgauge.harness.core.rng import Key
from leakgauge.harness.learn.batch import Engine, LocalPlan
from leakgauge.harness.learn.models import build
from leakgauge.harness.learn.tasks import ModelTask

RUNS, RECORDS, INSIDE, PROCESSES = 64, 1000, 500, 2
PLAN = LocalPlan(gradient=False, steps=None, epochs=27, batch=50, lr=0.05, momentum=0.9)
STEPS = 27 * INSIDE // PLAN.batch
BAR = 10.0
FEW, REPEATS = 8, 3
JUDGED, LARGER = "mlp-small", "mlp"


@functools.cache
def pool() -> Examples:
    """Noise in the shape of digits; the values do not affect the time."""
    return Examples(rng.normal(Key(0).child("pool"), (RECORDS, 1, 28, 28)), torch.arange(RECORDS) % 10)


def shadows(name: str, runs: int, part: int, engine: Engine | None = None) -> float:
    """Train `runs` models; return processor seconds."""
    task = ModelTask(build(name, (1, 28, 28), 10))
    key = Key(1).child("part", part)
    inside = halves(key.child("halves"), runs, RECORDS, INSIDE)
    data = pool()
    start = time.process_time()
    train_shadows(task, Recipe(clients=1, rounds=1, plan=PLAN), data, inside, key, engine=engine)
    return time.process_time() - start


def prepare() -> None:
    """Warm up a process once."""
    torch.set_num_threads(1)
    shadows(JUDGED, 1, 0)


def ratio(name: str) -> float:
    """Processor seconds of the lean loop over those of the batched product: median of interleaved repeats."""
    pairs = [(shadows(name, FEW, i, "loop"), shadows(name, FEW, i, "dense")) for i in range(REPEATS)]
    return statistics.median(loop / dense for loop, dense in pairs)


def together(processes: ProcessPoolExecutor, name: str) -> tuple[float, float]:
    """Seconds for all shadows, and processor seconds of one process."""
    every = range(PROCESSES)
    start = time.perf_counter()
    parts = list(processes.map(shadows, [name] * PROCESSES, [RUNS // PROCESSES] * PROCESSES, every))
    return time.perf_counter() - start, sum(parts) / PROCESSES


def main() -> None:
    """Print the table."""
    prepare()
    took = {}
    print(f"{RUNS} shadows, {STEPS} steps of {PLAN.batch}, {PROCESSES} processes of one thread; bar {BAR:.0f} s")
    print(f"{'model':10} {'widths':>14} {'s in all':>9} {'CPU s':>6} {'CPU us / step':>14} {'loop to this':>13}")
    with ProcessPoolExecutor(PROCESSES, multiprocessing.get_context("spawn"), initializer=prepare) as processes:
        for name in (JUDGED, LARGER):
            together(processes, JUDGED)  # starts and warms up the processes
            took[name], busy = map(min, zip(*(together(processes, name) for _ in range(REPEATS)), strict=True))
            widths = "-".join(map(str, build(name, (1, 28, 28), 10).widths or ()))
            step = 1e6 * busy * PROCESSES / (RUNS * STEPS)
            print(f"{name:10} {widths:>14} {took[name]:9.1f} {busy:6.1f} {step:14.0f} {ratio(name):13.2f}", flush=True)
    if took[JUDGED] >= BAR:
        sys.exit(f"missed: {took[JUDGED]:.1f} s; if processor seconds are far fewer, the machine was busy")


if __name__ == "__main__":
    main()
