"""One gradient-matching evaluation by four methods, interleaved in one process and one thread.

Prints processor milliseconds per evaluation and instance: by hand (`harness.learn.kernels`), by `vmap`, and by the
usual loop over the instances with a double backward; then the speedup of the first method over the others. `published`
also fills the gradients of the parameters, as `backward` does in the programs of DLG and iDLG; `lean` computes only the
dummy's gradient. Images are 3x32x32, and the misfit is the squared distance. Arguments choose models; the default is
all models. The exit code is 1 if a share of the published loop's time is above its bar.
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
from leakgauge.harness.learn.layers import Conv, Dense, Flatten, MaxPool, Sigmoid
from leakgauge.harness.learn.models import Model, build
from leakgauge.harness.learn.tasks import ModelTask

SECONDS = 2.0
"""Measuring time per row."""

MODELS = ("lenet-dlg", "mlp", "cnn2", "lenet5", "resnet20", "resnet20-bn")

BARS = {"lenet-dlg": (8, 0.12), "resnet20": (1, 0.75), "resnet20-bn": (1, 0.75)}
"""Instances of one image each, and the largest share of the published loop's time that an evaluation may take; the
first bar is for two quiet cores.
"""


@dataclass(frozen=True)
class Mapped(ModelTask):
    """A task of another type, so that the evaluator uses `vmap` instead of the kernels for the layers."""


def module(model: Model, params: Tensor) -> nn.Sequential:
    """The same model as a torch module."""
    net = nn.Sequential(*_modules(model))
    vector_to_parameters(params.clone(), net.parameters())
    return net


def _modules(model: Model) -> Iterator[nn.Module]:
    """The torch modules of the layers, in order."""
    assert model.structure is not None
    for layer in model.structure.layers:
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


def loop(
    loss_of: Callable[[Tensor, Tensor], Tensor],
    parameters: Sequence[Tensor],
    x: Tensor,
    y: Tensor,
    targets: Sequence[Sequence[Tensor]],
    lean: bool,
) -> None:
    """The usual loop, one instance after the other."""
    for images, labels, target in zip(x, y, targets, strict=True):
        for parameter in parameters:
            parameter.grad = None
        dummy = images.clone().requires_grad_()
        found = torch.autograd.grad(loss_of(dummy, labels), list(parameters), create_graph=True)
        distance = torch.stack([((a - b) ** 2).sum() for a, b in zip(found, target, strict=True)]).sum()
        distance.backward(inputs=[dummy] if lean else None)  # type: ignore[no-untyped-call]


def usual(task: ModelTask, params: Tensor) -> tuple[Callable[[Tensor, Tensor], Tensor], Sequence[Tensor]]:
    """The loss of a torch module, or of a network with residual blocks, and its parameters."""
    if task.structure is not None and task.structure.is_chain:
        net = module(task.model, params)
        return lambda x, y: cross_entropy(net(x), y), list(net.parameters())
    tensors = [part.clone().requires_grad_() for part in task.layout.split(params)]
    return lambda x, y: task.loss_at(tensors, x, y), tensors


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
    loops = [partial(loop, *usual(task, params), x, y, parts, lean) for lean in (False, True)]
    return [*(partial(function, x.flatten(1), torch.arange(n)) for function in functions), *loops]


def measure(name: str, classes: int, n: int, images: int) -> float:
    """Print medians of times and ratios as one row of the table; return the share of the published loop's time."""
    taken: list[list[float]] = [[], [], [], []]
    chosen = methods(name, classes, n, images)
    for method in chosen:
        method()
    end = time.perf_counter() + SECONDS
    while time.perf_counter() < end or len(taken[0]) < 5:
        for method, seconds in zip(chosen, taken, strict=True):
            start = time.process_time()
            method()
            seconds.append(1000 * (time.process_time() - start) / n)
    ratios = [statistics.median(b / a for a, b in zip(taken[0], other, strict=True)) for other in taken[1:]]
    times = "".join(f"{statistics.median(seconds):10.3f}" for seconds in taken)
    print(
        f"{name:12}{classes:8}{n:10}{images:7}{times}" + "".join(f"{ratio:10.2f}" for ratio in ratios),
        flush=True,
    )
    return 1 / ratios[1]


def main(models: Sequence[str]) -> int:
    """Print the table; return 1 if a bar is missed."""
    torch.set_num_threads(1)
    columns = ("by hand", "vmap", "published", "lean", "vmap x", "publ. x", "lean x")
    print(f"{'model':12}{'classes':>8}{'instances':>10}{'images':>7}" + "".join(f"{column:>10}" for column in columns))
    shares = {
        (name, classes, n, images): measure(name, classes, n, images)
        for name in models or MODELS
        for classes in (10, 100)
        for images in (1, 4)
        for n in ((1, 4) if name.startswith("resnet") else (1, 8, 32))
    }
    missed = 0
    for (name, classes, n, images), share in shares.items():
        instances, most = BARS.get(name, (0, 0.0))
        if (n, images) == (instances, 1):
            missed += not share <= most
            text = f"{name}, {classes} classes, {n} instances: {share:.3f} of the published loop, bar {most:g}"
            print(text + ("" if share <= most else "  MISSED"))
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
