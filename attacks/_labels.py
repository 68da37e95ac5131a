"""Which labels a gradient was computed with, read off the last layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from attacks._objective import told_gradients
from harness.contract import Observation, Task
from harness.rng import Key, uniform
from harness.vec import Vector

LabelSource = Literal["inferred", "given"]

_DUMMIES = 64
"""Inputs behind the mean activation: it is a direction to project on, and need not be sharp."""


_SURE = 4.0
"""Standard deviations below zero from which on an entry counts as negative."""

_CLEAR = 0.1
"""Noise of an entry, in shares of one image, up to which the bias alone is asked. On fresh and trained models it was
better up to 0.1 to 0.2, the projections above."""


class _LastLayer(NamedTuple):
    """first, stop: its tensors, as a range of the layout: weight [classes, m] and, where there is one, bias."""

    first: int
    stop: int

    @property
    def biased(self) -> bool:
        """Whether there is a bias."""
        return self.stop - self.first == 2


class _Impact(NamedTuple):
    """activation [m + 1 or m]: mean input of the last layer, 1 for its bias. probability [classes]: mean output."""

    activation: Tensor
    probability: Tensor


class _Evidence(NamedTuple):
    """What the gradients of n batches say of their labels.

    score [n, classes]: about mean of p - [y = i]; probability [n, classes, classes]: row i is the p of an input of
    class i; proven [n, classes]: whether label i occurs for sure.
    """

    score: Tensor
    probability: Tensor
    proven: Tensor


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


def labels_over_rounds(seen: Observation, source: LabelSource, key: Key) -> tuple[Tensor, ...]:
    """`labels_of` from all rounds that are seen: the labels that were restored most often."""
    if source == "given":
        assert seen.labels is not None
        return seen.labels
    images = [message.images for message in seen.sightings[0].messages]
    counts = torch.zeros(len(images), seen.task.classes)
    for number, sighting in enumerate(seen.sightings):
        told = told_gradients(seen, sighting)
        found = restore(seen.task, sighting.model.params, told, images, key.child(number))
        counts += torch.stack([labels.bincount(minlength=seen.task.classes) for labels in found])
    counts /= len(seen.sightings)
    return tuple(apportion(row, size) for row, size in zip(counts, images, strict=True))


def apportion(counts: Tensor, size: int) -> Tensor:
    """[size] labels as often as their counts [classes] say, which add up to `size`: the largest remainders first."""
    whole = counts.floor()
    left = size - int(whole.sum())
    whole[(counts - whole).sort(descending=True, stable=True).indices[:left]] += 1
    return torch.arange(len(counts)).repeat_interleave(whole.long())


def restore(task: Task, params: Vector, gradients: Tensor, images: Sequence[int], key: Key) -> tuple[Tensor, ...]:
    """The labels behind each gradient.

    Row i of the last layer's gradient is the mean over the inputs of (p_i - [y = i]) h, with h the layer's input, 1 for
    its bias, and p the softmax. One input: the label whose row has the most negative projection on the usual h.

    Several: an input of class i adds p - e_i to `images` times the bias gradient, which is to be explained. A negative
    entry i proves that label i occurs; row i divided by it is then about the h of its inputs, which gives their p. Of
    other labels p is what it usually is. Proven labels are taken first, then greedily those that explain most. Where
    noise could swallow a label, the projections of the rows, over which it averages, take the place of the bias, and
    nothing is proven. The gradient itself says how noisy it is: its rows would add up to zero.

    Args:
        gradients: [n, d] of the mean loss over `images[i]` inputs each.
        images: how many labels are looked for in each.
        key: draws the dummy inputs that show what h and p usually are.

    Returns:
        [images[i]] int64 each, sorted.

    Guarantees:
        Every label is in range, whatever the gradient.
        One input and no noise: the label is right where h.mean(h) > 0, as behind a sigmoid or ReLU.
        Several and no noise: a label whose bias entry is negative, beyond rounding, is told.

    Cannot: count all labels of a trained model, where an input that is predicted surely and rightly leaves next to no
        trace; count in a gradient that was scaled, as by a clip; follow the model through the steps of an update, or
        undo momentum. Noise of the size of a row's projection hides its label.

    Raises:
        ValueError: the loss is not softmax cross-entropy, or the last layer is not dense with one row a class.

    Source: Zhao et al. 2020 (iDLG) for one input; Wainakh et al. 2022 (LLG) for signs and sums of rows; Ma et al. 2023
        (iLRG) for p from the rows. Differs: rows are projected on the mean activation instead of summed, which weighs
        their entries by what they tell; counts are integers from the first step on, instead of a rounded
        pseudo-inverse; the noise is estimated.
    """
    layer = _last_layer(task)
    impact = _impact(task, params, layer, key)
    rows = _rows(task, layer, gradients)
    projection = rows @ (impact.activation / impact.activation.square().sum())
    usual = impact.probability.expand(*projection.shape, -1)
    evidence = _Evidence(projection, usual, torch.zeros_like(projection, dtype=torch.bool))
    counts = torch.tensor(images)
    if layer.biased:
        exact = _exact_evidence(rows, _rows(task, layer, params[None])[0], usual)
        clear = counts * _noise(rows) <= _CLEAR
        evidence = _either(clear, exact, evidence)
    # of one input, the sign of its own p - [y = i] decides; what p usually is would only blur it
    single = one_hot(projection.argmin(dim=1), task.classes)
    found = torch.where(counts[:, None] > 1, _explain(evidence, counts), single)
    return tuple(torch.arange(task.classes).repeat_interleave(row) for row in found)


def _rows(task: Task, layer: _LastLayer, vectors: Tensor) -> Tensor:
    """[n, classes, m + 1 or m] of vectors [n, d]: what belongs to the last layer, the bias as the last column."""
    parts = task.layout.split(vectors)[layer.first : layer.stop]
    return torch.cat([part.reshape(len(vectors), task.classes, -1) for part in parts], dim=2)


def _noise(rows: Tensor) -> Tensor:
    """[n] standard deviation of the noise in an entry, from sums of rows, which have no other reason not to be zero."""
    return (rows.sum(dim=1).square().mean(dim=1) / rows.shape[1]).sqrt()


def _exact_evidence(rows: Tensor, weights: Tensor, usual: Tensor) -> _Evidence:
    """From a gradient's rows [n, classes, m + 1] with little noise; weights [classes, m + 1] of the layer itself."""
    bias = rows[..., -1]
    proven = bias < -_SURE * _noise(rows)[:, None]
    embedding = rows / torch.where(proven, bias, 1.0)[..., None]
    own = (embedding @ weights.T).softmax(dim=2)
    return _Evidence(bias, torch.where(proven[..., None], own, usual), proven)


def _either(first: Tensor, one: _Evidence, other: _Evidence) -> _Evidence:
    """For each gradient one's, where `first` [n] says so, else the other's."""
    of_label, of_pair = first[:, None], first[:, None, None]
    return _Evidence(
        torch.where(of_label, one.score, other.score),
        torch.where(of_pair, one.probability, other.probability),
        torch.where(of_label, one.proven, other.proven),
    )


def _explain(evidence: _Evidence, images: Tensor) -> Tensor:
    """[n, classes] int64: how often each label occurs among the images [n] of each gradient."""
    n, classes = evidence.score.shape
    added = evidence.probability - torch.eye(classes, dtype=evidence.score.dtype)
    fits = evidence.proven.sum(dim=1) <= images
    counts = (evidence.proven & fits[:, None]).long()
    left = images[:, None] * evidence.score - (counts[:, :, None] * added).sum(dim=1)
    every = torch.arange(n)
    for _ in range(int(images.max())):
        missing = (counts.sum(dim=1) < images).long()
        label = (left[:, None] - added).square().sum(dim=2).argmin(dim=1)
        left = left - missing[:, None] * added[every, label]
        counts[every, label] += missing
    return counts


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
