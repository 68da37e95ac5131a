"""The last dense layer of a model, whose gradient shows the labels."""

from __future__ import annotations

import itertools
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from leakgauge.harness.core import rng
from leakgauge.harness.core.contract import Task
from leakgauge.harness.core.rng import Key
from leakgauge.harness.core.vec import Vector
from leakgauge.harness.learn.layers import Dense
from leakgauge.harness.learn.tasks import ModelTask


class LastLayer(NamedTuple):
    """The last layer of a task's model; first, stop: its range of tensors in the layout.

    These are a weight [classes, m] and the bias, if there is one.
    """

    task: Task
    first: int
    stop: int

    @property
    def biased(self) -> bool:
        """Whether the layer has a bias."""
        return self.stop - self.first == 2

    def rows(self, vectors: Tensor) -> Tensor:
        """[n, classes, m + 1 or m]: the layer's part of vectors [n, d], with the bias as the last column."""
        tensors = self.task.layout.split(vectors)[self.first : self.stop]
        return torch.cat([tensor.reshape(len(vectors), self.task.classes, -1) for tensor in tensors], dim=2)

    def mean_input(self, params: Vector, x: Tensor) -> Tensor:
        """[m + 1 or m]: the mean of the layer's inputs h over inputs x of the model, with 1 for the bias."""
        params, classes = params.detach().requires_grad_(), self.task.classes
        first, second = torch.eye(classes, dtype=params.dtype)[:2, None].expand(2, len(x), classes)
        # p cancels in the difference, so row 0 of the layer's gradient is the mean of h
        difference = self.task.loss(params, x, second) - self.task.loss(params, x, first)
        (gradient,) = torch.autograd.grad(difference, params)
        return self.rows(gradient[None])[0, 0]


def last_layer(task: Task) -> LastLayer:
    """The last layer.

    Raises:
        ValueError: labels cannot be inferred for this model, see `restore`.
    """
    shapes = task.layout.shapes
    stop = len(shapes)
    first = stop - 2 if stop > 1 and shapes[-1] == (task.classes,) else stop - 1
    if isinstance(task, ModelTask) and task.structure is not None and isinstance(task.structure.core[-1], Dense):
        places = sorted(task.structure.ordered(range(stop))[-task.structure.core[-1].owns :])
        first, stop = places[0], places[-1] + 1
    elif len(shapes[first]) != 2 or shapes[first][0] != task.classes:
        last, first, stop = first, *_elsewhere(task)
        if stop == 0:
            raise ValueError(
                f"expected a dense last layer with {task.classes} rows to infer labels, "
                f"got {task.layout.names[last]!r} of shape {shapes[last]}"
            )
    return LastLayer(task, first, stop)


def _elsewhere(task: Task) -> tuple[int, int]:
    """`LastLayer` of a dense last layer with a bias whose tensors are not the last ones, by its gradient, or zeros."""
    leaf = rng.uniform(Key(0).child("last"), (task.layout.dim,), -0.5, 0.5, dtype=torch.float64).requires_grad_()
    x = rng.uniform(Key(0).child("x"), (2, *task.input_shape), dtype=torch.float64)
    y = one_hot(torch.zeros(2, dtype=torch.int64), task.classes).double()
    (gradient,) = torch.autograd.grad(task.loss(leaf, x, y[:, 0] if task.numbers and task.classes == 1 else y), leaf)
    if not task.linked:
        return 0, 0
    errors = task.slope * (task.link(task.outputs(leaf, x)) - y).mean(0)
    parts = task.layout.split(gradient)
    for first, (weight, bias) in enumerate(itertools.pairwise(parts)):
        if weight.ndim == 2 and bias.shape == errors.shape == weight.shape[:1] and torch.allclose(bias, errors):
            return first, first + 2
    return 0, 0
