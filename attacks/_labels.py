"""Which labels a gradient was computed with, read off the last layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from harness.contract import Observation, Task
from harness.rng import Key, uniform
from harness.vec import Vector

LabelSource = Literal["inferred", "given"]

_DUMMIES = 64
"""Inputs behind the mean activation: it is a direction to project on, and need not be sharp."""


class _LastLayer(NamedTuple):
    """first, stop: its tensors, as a range of the layout: weight [classes, m] and, where there is one, bias."""

    first: int
    stop: int


class _Impact(NamedTuple):
    """activation [m + 1 or m]: mean input of the last layer, 1 for its bias. probability [classes]: mean output."""

    activation: Tensor
    probability: Tensor


def check_source(source: str) -> None:
    """Refuse a source of labels that there is not."""
    if source not in get_args(LabelSource):
        raise ValueError(f"expected labels 'inferred' or 'given', got {source!r}")


def needs(source: LabelSource) -> frozenset[str]:
    """What an attack on messages must see: them, the round's model, and the labels where they are given."""
    return frozenset({"messages", "models"} | ({"labels"} if source == "given" else set()))


def labels_of(seen: Observation, gradients: Tensor, source: LabelSource, key: Key) -> tuple[Tensor, ...]:
    """[b] of each victim of an observation, whose gradients [n, d] are told by their messages: granted, or restored."""
    if source == "given":
        assert seen.labels is not None
        return seen.labels
    assert seen.model is not None
    assert seen.messages is not None
    images = [message.images for message in seen.messages]
    return restore(seen.task, seen.model.params, gradients, images, key)


def restore(task: Task, params: Vector, gradients: Tensor, images: Sequence[int], key: Key) -> tuple[Tensor, ...]:
    """The labels behind each gradient.

    Row i of the last layer's gradient is the mean over the inputs of (p_i - [y = i]) h, with h the layer's input and p
    the softmax. Its projection on the usual h averages noise over the layer's width, and says how often label i
    occurred. One input: the most negative projection. Several: greedily, the most negative one loses the share of one
    input, and the next is taken.

    Args:
        gradients: [n, d] of the mean loss over `images[i]` inputs each.
        images: how many labels are looked for in each.
        key: draws the dummy inputs that show what h and p usually are.

    Returns:
        [images[i]] int64 each, sorted.

    Guarantees:
        One input and no noise: the label is right where h.mean(h) > 0, as behind a sigmoid or ReLU.

    Raises:
        ValueError: the loss is not softmax cross-entropy, or the last layer is not dense with one row a class.

    Source: Zhao et al. 2020 (iDLG) for one input; Wainakh et al. 2022 (LLG*) for several. Differs: rows are projected
        on the mean activation instead of summed, which weighs their entries by what they tell.
    """
    layer = _last_layer(task)
    impact = _impact(task, params, layer, key)
    tensors = task.layout.split(gradients)[layer.first : layer.stop]
    rows = torch.cat([tensor.reshape(len(gradients), task.classes, -1) for tensor in tensors], dim=2)
    score = rows @ (impact.activation / impact.activation.square().sum())
    counts = torch.tensor(images)
    # of one input, the sign of its own p - [y = i] decides; what p usually is would only blur it
    score = torch.where(counts[:, None] > 1, score - impact.probability, score)
    taken = []
    for _ in range(max(images)):
        label = score.argmin(dim=1)
        score[torch.arange(len(score)), label] += 1 / counts
        taken.append(label)
    labels = torch.stack(taken, dim=1)
    return tuple(row[:count].sort().values for row, count in zip(labels, images, strict=True))


def _last_layer(task: Task) -> _LastLayer:
    """Where the last layer lies, if labels can be read off it."""
    if not task.softmax:
        raise ValueError("expected a softmax cross-entropy loss to infer labels, got another")
    shapes = task.layout.shapes
    stop = len(shapes)
    first = stop - 2 if stop > 1 and shapes[-1] == (task.classes,) else stop - 1
    if len(shapes[first]) != 2 or shapes[first][0] != task.classes:
        raise ValueError(
            f"expected a dense last layer with {task.classes} rows to infer labels, "
            f"got {task.layout.names[first]!r} of shape {shapes[first]}"
        )
    return _LastLayer(first, stop)


def _impact(task: Task, params: Vector, layer: _LastLayer, key: Key) -> _Impact:
    """What the last layer usually sees and says, by dummy inputs."""
    x = uniform(key, (_DUMMIES, *task.input_shape), dtype=params.dtype)
    params = params.detach().requires_grad_()
    one, other = torch.eye(task.classes, dtype=params.dtype)[:2, None].expand(2, _DUMMIES, task.classes)
    # p cancels in the difference: what is left in row 0 of the last layer's gradient is the mean of h
    (gradient,) = torch.autograd.grad(task.loss(params, x, other) - task.loss(params, x, one), params)
    tensors = task.layout.split(gradient)[layer.first : layer.stop]
    with torch.no_grad():
        probability = task.outputs(params, x).softmax(dim=1).mean(dim=0)
    return _Impact(torch.cat([tensor[0].reshape(-1) for tensor in tensors]), probability)
