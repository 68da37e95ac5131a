"""One SGD step of several clients side by side; for dense ReLU stacks it is derived by hand."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.linalg import vector_norm

from leakgauge.harness.learn.tasks import ModelTask


class Step(NamedTuple):
    """One step of several clients, padded to one batch size.

    x: [c, b, *input_shape], y: [c, b]; weight: [c, b], 1/size on samples and 0 on padding; running: [c], 1 where the
    client still trains; keep: dropout masks [c, b, *shape].
    """

    x: Tensor
    y: Tensor
    weight: Tensor
    running: Tensor
    keep: list[Tensor] | None


Accumulate = Callable[[ModelTask, Tensor, Step, Tensor, float], None]
"""(task, local, step, velocity, momentum): velocity <- momentum * velocity + gradient, in place; both [c, d]."""

Squares = Callable[[torch.dtype], Tensor]
"""Squared norms of part of the records' gradients, as this type."""


def dense_step(task: ModelTask, local: Tensor, step: Step, velocity: Tensor, momentum: float) -> None:
    """A dense ReLU stack with cross-entropy, by hand: three batched products a layer."""
    tensors, moving = task.layout.split(local), task.layout.split(velocity)
    inputs, delta = dense_forward(tensors, step.x, step.y)
    delta *= step.weight[..., None]
    for layer in range(len(inputs) - 1, -1, -1):
        moving[2 * layer].baddbmm_(delta.transpose(1, 2), inputs[layer], beta=momentum)
        moving[2 * layer + 1].mul_(momentum).add_(delta.sum(1))
        if layer:
            delta = _pull_back(delta, tensors[2 * layer], inputs[layer])


def clipped_dense_step(
    clip: float, task: ModelTask, local: Tensor, step: Step, velocity: Tensor, momentum: float
) -> None:
    """As `dense_step`, all deltas first: a record's gradient of a layer is an outer product, and so is its norm."""
    moving = task.layout.split(velocity)
    inputs, deltas = dense_deltas(task.layout.split(local), step.x, step.y)
    squares = [partial(outer_squares, *pair) for pair in zip(deltas, inputs, strict=True)]
    factors = clip_factors(squares, local.dtype, clip) * step.weight
    for layer, (delta, entered) in enumerate(zip(deltas, inputs, strict=True)):
        delta *= factors[..., None]
        moving[2 * layer].baddbmm_(delta.transpose(1, 2), entered, beta=momentum)
        moving[2 * layer + 1].mul_(momentum).add_(delta.sum(1))


def dense_forward(tensors: Sequence[Tensor], x: Tensor, y: Tensor) -> tuple[list[Tensor], Tensor]:
    """Each layer's input [c, b, n], and the gradients of the records' losses by their scores, [c, b, classes].

    Args:
        tensors: of a dense ReLU stack with cross-entropy, with a first axis c.
        x, y: [c, b, *input_shape], [c, b].
    """
    weights, biases = tensors[0::2], tensors[1::2]
    inputs = [x.flatten(2)]
    for weight, bias in zip(weights, biases, strict=True):
        inputs.append(torch.baddbmm(bias[:, None], inputs[-1], weight.transpose(1, 2)))
        if len(inputs) <= len(weights):
            inputs[-1].relu_()
    delta = torch.softmax(inputs.pop(), -1)
    delta.scatter_add_(-1, y[..., None], torch.full_like(y[..., None], -1, dtype=delta.dtype))
    return inputs, delta


def dense_deltas(tensors: Sequence[Tensor], x: Tensor, y: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """Each layer's input, as `dense_forward`, and the gradients of the records' losses by its output, [c, b, m]."""
    inputs, delta = dense_forward(tensors, x, y)
    deltas = [delta]
    for layer in range(len(inputs) - 1, 0, -1):
        deltas.append(_pull_back(deltas[-1], tensors[2 * layer], inputs[layer]))
    return inputs, deltas[::-1]


def _pull_back(delta: Tensor, weight: Tensor, entered: Tensor) -> Tensor:
    """From a layer's output to that of the layer before it, through the ReLU between them."""
    return torch.bmm(delta, weight).mul_(entered > 0)


def clip_factors(parts: Sequence[Squares], dtype: torch.dtype, clip: float, most: float = 1.0) -> Tensor:
    """min(most, clip / norm) of each record; `most` where the norm is zero, NaN where it is.

    Args:
        parts: their sum is the squared norm.
        dtype: of the gradients. Where squares overflow in it, they are taken in float64.
    """
    squares = _sum(parts, dtype)
    if not math.isfinite(float(squares.sum())):
        squares = _sum(parts, torch.float64)
    return (squares.rsqrt() * clip).clamp(max=most).to(dtype)


def _sum(parts: Sequence[Squares], dtype: torch.dtype) -> Tensor:
    """Of the squares as this type."""
    return functools.reduce(torch.add, [part(dtype) for part in parts])


def row_squares(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """Squared l2 norms over the last axis, as this type."""
    norms: Tensor = vector_norm(rows, dim=-1, dtype=dtype)
    return norms.square()


def outer_squares(deltas: Tensor, inputs: Tensor, dtype: torch.dtype, *, bias: bool = True) -> Tensor:
    """Squared norms of the outer products of deltas [..., m] and inputs [..., n], and of the deltas, the bias's."""
    by_inputs, by_deltas = row_squares(inputs, dtype), row_squares(deltas, dtype)
    return torch.addcmul(by_deltas, by_deltas, by_inputs) if bias else by_deltas * by_inputs
