"""One gradient-matching evaluation: our batched kernel against the usual loop, interleaved in one process.

The LeNet of DLG on 32x32 colour images with ten classes. Prints milliseconds an evaluation and image, and the ratio to
the loop (a module-free double backward, one image at a time).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from harness import rng
from harness.matching import SquaredDistance, evaluator, gradients
from harness.models import build
from harness.rng import Key
from harness.tasks import ModelTask

REPEATS = 30


def loop(task: ModelTask, params: Tensor, x: Tensor, y: Tensor, targets: Tensor) -> None:
    """The usual way: differentiate the loss with a graph, then the distance, one image at a time."""
    for image, label, target in zip(x, y, targets, strict=True):
        leaf, dummy = params.clone().requires_grad_(), image[None].clone().requires_grad_()
        (gradient,) = torch.autograd.grad(task.loss(leaf, dummy, label[None]), leaf, create_graph=True)
        torch.autograd.grad((gradient - target).square().sum(), dummy)


def main() -> None:
    """Print the table."""
    torch.set_num_threads(1)
    task = ModelTask(build("lenet-dlg", (3, 32, 32), 10), "dlg")
    params = task.init(Key(0))
    print(f"{'images':>6} {'loop ms':>8} {'ours ms':>8} {'ratio':>6}")
    for n in (1, 4, 8, 16, 32):
        x = rng.uniform(Key(1), (n, 3, 32, 32))
        y = one_hot(torch.arange(n) % 10, 10).float()
        targets = gradients(task, params, rng.uniform(Key(2), (n, 1, 3, 32, 32)), y[:, None]).detach()
        function = evaluator(task, params, SquaredDistance(targets), images=1, labels=y[:, None])
        ways: tuple[Callable[[], object], ...] = (
            partial(loop, task, params, x, y, targets),
            partial(function, x.flatten(1), torch.arange(n)),
        )
        seconds: list[list[float]] = [[], []]
        for repeat in range(REPEATS + 1):
            for way, go in enumerate(ways):
                start = time.perf_counter()
                go()
                if repeat:  # the first warms up
                    seconds[way].append((time.perf_counter() - start) / n)
        ratio = statistics.median(a / b for a, b in zip(*seconds, strict=True))
        first, second = (1000 * statistics.median(taken) for taken in seconds)
        print(f"{n:6} {first:8.2f} {second:8.2f} {ratio:6.2f}")


if __name__ == "__main__":
    main()
