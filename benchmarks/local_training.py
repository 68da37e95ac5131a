"""Local training of a round: every engine compared with a plain module-and-optimizer loop.

Ten clients with 600 samples, five SGD steps on 32 samples. Prints milliseconds per round and the ratio to the plain
loop: medians of repeats that are interleaved in one process, so that other work on the machine slows all engines alike.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial

import torch
from torch import nn

from leakgauge.harness.core import rng
from leakgauge.harness.core.contract import Examples
from leakgauge.harness.core.rng import Key
from leakgauge.harness.learn.batch import Engine, LocalPlan, Work, plan_batches, train_clients
from leakgauge.harness.learn.models import build
from leakgauge.harness.learn.tasks import ModelTask

CLIENTS, SAMPLES, REPEATS = 10, 600, 15
PLAN = LocalPlan(gradient=False, steps=5, epochs=None, batch=32, lr=0.1, momentum=0.9)
ENGINES: dict[str, tuple[Engine, ...]] = {"mlp": ("loop", "dense", "vmap"), "cnn2": ("loop", "vmap")}


def plain(make: Callable[[], nn.Module], work: list[Work]) -> None:
    """The textbook loop: one module, optimizer and batch at a time, with the engines' shuffled indices."""
    for client in work:
        net = make()
        optimizer = torch.optim.SGD(net.parameters(), lr=PLAN.lr, momentum=PLAN.momentum)
        for index in plan_batches(SAMPLES, PLAN, client.key):
            rows = torch.from_numpy(index)
            optimizer.zero_grad()
            nn.functional.cross_entropy(net(client.data.x[rows]), client.data.y[rows]).backward()
            optimizer.step()


def mlp() -> nn.Module:
    """Dense 784-256-10 with ReLU."""
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 10))


def cnn2() -> nn.Module:
    """The 6,422-weight CNN of JoPEQ."""
    convolutions = [nn.Conv2d(1, 6, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 6, 5), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*convolutions, nn.Flatten(), nn.Linear(96, 50), nn.ReLU(), nn.Linear(50, 10))


def main() -> None:
    """Print the table."""
    torch.set_num_threads(1)
    print(f"{'model':6} {'engine':6} {'ms / round':>10} {'ratio to plain':>15}")
    for name, make in (("mlp", mlp), ("cnn2", cnn2)):
        task = ModelTask(build(name, (1, 28, 28), 10))
        params = task.init(Key(0).child("init"))
        work = [
            Work(
                Examples(rng.normal(Key(0).child(i), (SAMPLES, 1, 28, 28)), torch.arange(SAMPLES) % 10), Key(1).child(i)
            )
            for i in range(CLIENTS)
        ]
        methods: dict[str, Callable[[], object]] = {"plain": partial(plain, make, work)}
        for engine in ENGINES[name]:
            methods[engine] = partial(train_clients, task, params, work, PLAN, engine)
        seconds: dict[str, list[float]] = {method: [] for method in methods}
        for repeat in range(REPEATS + 1):
            for method, run in methods.items():
                start = time.perf_counter()
                run()
                if repeat:  # the first run warms up
                    seconds[method].append(time.perf_counter() - start)
        for method, taken in seconds.items():
            ratio = statistics.median(a / b for a, b in zip(taken, seconds["plain"], strict=True))
            print(f"{name:6} {method:6} {1000 * statistics.median(taken):10.1f} {ratio:15.2f}")


if __name__ == "__main__":
    main()
