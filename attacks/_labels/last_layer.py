"""The last layer of a model: its position, its rows in a gradient, and its inputs."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from leakgauge.harness.core.contract import Task
from leakgauge.harness.core.vec import Vector

SURE = 4.0
"""An entry counts as negative if it is at least this many standard deviations below zero."""


class LastLayer(NamedTuple):
    """first, stop: the layer's range of tensors in the layout: weight [classes, m] and the bias, if there is one."""

    first: int
    stop: int

    @property
    def biased(self) -> bool:
        """Whether the layer has a bias."""
        return self.stop - self.first == 2


def last_layer(task: Task) -> LastLayer:
    """The position of the last layer.

    Raises:
        ValueError: labels cannot be inferred for this model, see `restore`.
    """
    if not task.softmax:
        raise ValueError("expected a softmax cross-entropy loss to infer labels, got another loss")
    shapes = task.layout.shapes
    stop = len(shapes)
    first = stop - 2 if stop > 1 and shapes[-1] == (task.classes,) else stop - 1
    if len(shapes[first]) != 2 or shapes[first][0] != task.classes:
        raise ValueError(
            f"expected a dense last layer with {task.classes} rows to infer labels, "
            f"got {task.layout.names[first]!r} of shape {shapes[first]}"
        )
    return LastLayer(first, stop)


def rows_of(task: Task, layer: LastLayer, vectors: Tensor) -> Tensor:
    """[n, classes, m + 1 or m]: the last layer's part of vectors [n, d], with the bias as the last column."""
    tensors = task.layout.split(vectors)[layer.first : layer.stop]
    return torch.cat([tensor.reshape(len(vectors), task.classes, -1) for tensor in tensors], dim=2)


def noise_of(rows: Tensor) -> Tensor:
    """[n]: standard deviation of the noise in an entry; without noise, the rows of a gradient sum to zero."""
    return (rows.sum(dim=1).square().mean(dim=1) / rows.shape[1]).sqrt()


def mean_input(task: Task, params: Vector, layer: LastLayer, x: Tensor) -> Tensor:
    """[m + 1 or m]: the mean of the last layer's inputs h over inputs x, with 1 for its bias."""
    params = params.detach().requires_grad_()
    first, second = torch.eye(task.classes, dtype=params.dtype)[:2, None].expand(2, len(x), task.classes)
    # p cancels in the difference, so row 0 of the last layer's gradient is the mean of h
    (gradient,) = torch.autograd.grad(task.loss(params, x, second) - task.loss(params, x, first), params)
    return rows_of(task, layer, gradient[None])[0, 0]
