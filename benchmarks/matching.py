"""One gradient-matching evaluation by four methods, interleaved in one process and one thread.

Prints milliseconds per evaluation and instance: by hand (`harness.learn.kernels`), by `vmap`, and by the usual loop
over the instances with a torch module and a double backward; then the speedup of the first method over the others.
`published` also fills the gradients of the module's parameters, as `backward` does in the programs of DLG and iDLG;
`lean` computes only the dummy's gradient. Images are 3x32x32, and the misfit is the squared distance. Arguments choose
models; the default is all.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, one_hot
from torch.nn.utils import vector_to_parameters

from leakgauge.attacks._engine.matching import SquaredDistance, evaluator
from leakgauge.harness.core import rng
from leakgauge.harness.core.rng import Key
from leakgauge.harness.learn.gradients import gradients
from leakgauge.harness.learn.layers import Chain, Conv, Dense, Flatten, MaxPool, Sigmoid
from leakgauge.harness.learn.models import Model, build
from leakgauge.harness.learn.tasks import ModelTask

SECONDS = 2.0
"""Measuring time per row."""

MODELS = ("lenet-dlg", "mlp", "cnn2", "lenet5")


@dataclass(frozen=True)
class Mapped(ModelTask):
    """A task of another type, so that the evaluator uses `vmap` instead of the kernels for its layers."""


def module(model: Model, params: Tensor) -> nn.Sequential:
    """The same model as a torch module."""
    net = nn.Sequential(*_modules(model))
    vector_to_parameters(params.clone(), net.parameters())
    return net


def _modules(model: Model) -> Iterator[nn.Module]:
    """The torch modules of the layers, in order."""
    assert isinstance(model.apply, Chain)
    for layer in model.apply.layers:
        if isinstance(layer, Conv):
            yield nn.Conv2d(layer.inputs, layer.outputs, layer.kernel, layer.stride, layer.padding)
        elif isinstance(layer, Dense):
            yield nn.Linear(layer.inputs, layer.outputs)
        elif isinstance(layer, Sigmoid):
            yield nn.Sigmoid()
        elif isinstance(layer, MaxPool):
            yield nn.MaxPool2d(2)
        else:
            yield nn.Flatten() if isinstance(layer, Flatten) else nn.ReLU()


def loop(net: nn.Module, x: Tensor, y: Tensor, targets: Sequence[Sequence[Tensor]], lean: bool) -> None:
    """The usual loop, one instance after the other."""
    parameters = list(net.parameters())
    for images, labels, target in zip(x, y, targets, strict=True):
        net.zero_grad()
        dummy = images.clone().requires_grad_()
        loss = cross_entropy(net(dummy), labels)
        found = torch.autograd.grad(loss, parameters, create_graph=True)
        distance = torch.stack([((a - b) ** 2).sum() for a, b in zip(found, target, strict=True)]).sum()
        distance.backward(inputs=[dummy] if lean else None)  # type: ignore[no-untyped-call]


def methods(name: str, classes: int, n: int, images: int) -> list[Callable[[], object]]:
    """The four methods: by hand, by vmap, the loop as published, and the lean loop."""
    model = build(name, (3, 32, 32), classes)
    task = ModelTask(model, "dlg" if name == "lenet-dlg" else "default")
    params = task.init(Key(0))
    x, other = (rng.uniform(Key(i), (n, images, 3, 32, 32)) for i in (1, 2))
    y = one_hot(torch.arange(n * images).reshape(n, images) % classes, classes).float()
    targets = gradients(task, params, other, y)
    functions = [
        evaluator(one, params, SquaredDistance(targets), images=images, labels=y)
        for one in (task, Mapped(model, task.initialization))
    ]
    parts = [task.layout.split(target) for target in targets]
    loops = [partial(loop, module(model, params), x, y, parts, lean) for lean in (False, True)]
    return [*(partial(function, x.flatten(1), torch.arange(n)) for function in functions), *loops]


def measure(name: str, classes: int, n: int, images: int) -> str:
    """One row of the table: medians, and medians of the ratios."""
    taken: list[list[float]] = [[], [], [], []]
    chosen = methods(name, classes, n, images)
    for method in chosen:
        method()
    end = time.perf_counter() + SECONDS
    while time.perf_counter() < end or len(taken[0]) < 5:
        for method, seconds in zip(chosen, taken, strict=True):
            start = time.perf_counter()
            method()
            seconds.append(1000 * (time.perf_counter() - start) / n)
    ratios = [statistics.median(b / a for a, b in zip(taken[0], other, strict=True)) for other in taken[1:]]
    times = "".join(f"{statistics.median(seconds):10.3f}" for seconds in taken)
    return f"{name:10}{classes:8}{n:10}{images:7}{times}" + "".join(f"{ratio:10.2f}" for ratio in ratios)


def main() -> None:
    """Print the table."""
    torch.set_num_threads(1)
    columns = ("by hand", "vmap", "published", "lean", "vmap x", "publ. x", "lean x")
    print(f"{'model':10}{'classes':>8}{'instances':>10}{'images':>7}" + "".join(f"{column:>10}" for column in columns))
    for name in sys.argv[1:] or MODELS:
        for classes in (10, 100):
            for images in (1, 4):
                for n in (1, 8, 32):
                    print(measure(name, classes, n, images), flush=True)


if __name__ == "__main__":
    main()
