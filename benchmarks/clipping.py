"""Per-record clipping: the cost of a clipped step relative to an unclipped one, on the same batches.

Ten clients; every engine that the CPU uses. Prints milliseconds per client and step, their ratio, and whether the bars
hold: 1.2 for dense stacks, 1.6 for convolutions. Times are thread time, and the ratio is the median of interleaved
repeats in one process, so other work on the machine has little effect.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import replace
from typing import NamedTuple

import torch

from leakgauge.harness.core import rng
from leakgauge.harness.core.contract import Examples
from leakgauge.harness.core.rng import Key
from leakgauge.harness.learn.batch import Engine, LocalPlan, Work, train_clients
from leakgauge.harness.learn.models import build
from leakgauge.harness.learn.tasks import ModelTask

CLIENTS, CLIP = 10, 1.0
DENSE_BAR, CONVOLUTION_BAR = 1.2, 1.6


class Case(NamedTuple):
    """A row of the table; `repeats`: pairs of runs with `steps` steps per client."""

    model: str
    shape: tuple[int, int, int]
    engine: Engine
    batch: int
    steps: int
    repeats: int


MODELS: tuple[tuple[str, tuple[int, int, int], Engine], ...] = (
    ("mlp", (1, 28, 28), "dense"),
    ("mlp", (1, 28, 28), "loop"),
    ("cnn2", (1, 28, 28), "loop"),
    ("lenet5", (1, 28, 28), "loop"),
    ("cnn-udp", (1, 28, 28), "loop"),
    ("cnn-udp", (3, 32, 32), "loop"),
)
CASES = [
    Case(model, shape, engine, batch, steps, repeats)
    for model, shape, engine in MODELS
    for batch, steps, repeats in ((32, 5, 21), (600, 1, 7))
]


def measure(case: Case) -> tuple[list[float], list[float]]:
    """Seconds per client and step, unclipped and clipped, in pairs."""
    task = ModelTask(build(case.model, case.shape, 10))
    params = task.init(Key(0).child("init"))
    labels = torch.arange(600) % 10
    work = [
        Work(Examples(rng.normal(Key(0).child(i), (600, *case.shape)), labels), Key(1).child(i)) for i in range(CLIENTS)
    ]
    free = LocalPlan(gradient=False, steps=case.steps, epochs=None, batch=case.batch, lr=0.01, momentum=0.9)
    seconds: tuple[list[float], list[float]] = ([], [])
    for repeat in range(case.repeats + 1):
        for plan, taken in zip((free, replace(free, clip=CLIP)), seconds, strict=True):
            start = time.thread_time()
            train_clients(task, params, work, plan, case.engine)
            if repeat:  # the first run warms up
                taken.append((time.thread_time() - start) / (CLIENTS * case.steps))
    return seconds


def main() -> None:
    """Print the table, and whether each bar holds."""
    torch.set_num_threads(1)
    print(
        f"{'model':8} {'input':>8} {'engine':6} {'batch':>5} {'ms unclipped':>12} {'ms clipped':>10} {'ratio':>6}  bar"
    )
    missed = 0
    for case in CASES:
        free, clipped = measure(case)
        ratio = statistics.median(b / a for a, b in zip(free, clipped, strict=True))
        bar = DENSE_BAR if case.model == "mlp" else CONVOLUTION_BAR
        missed += ratio > bar
        print(
            f"{case.model:8} {'x'.join(map(str, case.shape)):>8} {case.engine:6} {case.batch:5}"
            f" {1000 * statistics.median(free):12.2f} {1000 * statistics.median(clipped):10.2f} {ratio:6.2f}"
            f"  {bar} {'holds' if ratio <= bar else 'MISSED'}",
            flush=True,
        )
    print(f"{len(CASES) - missed} of {len(CASES)} bars hold")


if __name__ == "__main__":
    main()
