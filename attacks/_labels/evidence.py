"""The probability of each label count, from the last layer's gradient and auxiliary data of the same kind."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from leakgauge.attacks._labels.last_layer import SURE, LastLayer, mean_input, noise_of, rows_of
from leakgauge.attacks._labels.posterior import Kinds, Sums, chances, kinds_of, prior
from leakgauge.harness.core.contract import Examples, Task
from leakgauge.harness.core.rng import Key
from leakgauge.harness.core.vec import Vector

_EXAMPLES = 400
"""Maximum number of examples that are evaluated."""

_BORROWED = 64
"""Maximum number of examples of other labels that stand in for a label without examples."""

_RIDGE = 1e-2
"""Penalty on the squared length of each label's own direction, in units of the mean square of an entry of the last
layer's input. From 1e-4 to 1e-1, the same number of labels was right, without noise and with noise of 0.01 and 0.1."""


class _Shown(NamedTuple):
    """A model's outputs for n examples of g labels.

    probability [n, classes]; labels [g], sorted; group [n] int64: index of each example's label; means [g, m]: each
    label's mean input h of the last layer, with 1 for the bias; inside [n, g]: products of each h with the means.
    """

    probability: Tensor
    labels: Tensor
    group: Tensor
    means: Tensor
    inside: Tensor


class _Directions(NamedTuple):
    """usual [m]: its product with the mean h is 1; own [classes, m]: 1 with h of inputs of that label, 0 with others.

    on_usual [n], on_own [n, classes]: the products with the examples' h.
    """

    usual: Tensor
    own: Tensor
    on_usual: Tensor
    on_own: Tensor


def label_chances(
    task: Task,
    params: Vector,
    layer: LastLayer,
    gradients: Tensor,
    images: Sequence[int],
    examples: Examples,
    keys: Sequence[Key],
) -> list[Tensor]:
    """For each gradient, [classes, images[i]]: entry [c, k - 1] is the probability of at least k labels c.

    Args:
        keys: one for each gradient.
    """
    share, shown = expected_share(examples, task.classes), _shown(task, params, layer, examples)
    found = [prior(share, size) for size in images]
    if not all(bool(part.isfinite().all()) for part in shown):
        return found
    to = _directions(shown, task.classes)
    rows = rows_of(task, layer, gradients).double()
    noise = noise_of(rows)
    usable = noise.isfinite()
    rows, noise = torch.where(usable[:, None, None], rows, 0.0), torch.where(usable, noise, 0.0)
    readings = [rows @ to.usual, (rows * to.own).sum(dim=2)]
    squares = [to.usual.square().sum().expand(task.classes), to.own.square().sum(dim=1)]
    if layer.biased:
        readings.append(rows[..., -1])
        squares.append(torch.ones(task.classes, dtype=torch.float64))
    value, square = torch.cat(readings, dim=1), torch.cat(squares)
    proven, kinds = _proven(rows, noise, to, layer), _kinds(shown, to, share, layer)
    for size in sorted(set(images)):
        which = [i for i, count in enumerate(images) if count == size and usable[i]]
        sums = Sums(size * value[which], (size * noise[which, None]).square() * square, proven[which])
        sampled = chances(kinds, sums, size, len(readings), [keys[i] for i in which])
        for i, chance in zip(which, sampled, strict=True):
            found[i] = chance
    return found


def expected_share(auxiliary: Examples, classes: int) -> Tensor:
    """[classes]: expected share of each label; each count is raised by one, as victims may hold absent labels."""
    counts = auxiliary.y.bincount(minlength=classes).double() + 1
    return counts / counts.sum()


def _proven(rows: Tensor, noise: Tensor, to: _Directions, layer: LastLayer) -> Tensor:
    """[n, classes]: labels that certainly occur, because p - e is negative only at an input's own label."""
    proven = torch.zeros(rows.shape[:2], dtype=torch.bool)
    if layer.biased:
        proven = rows[..., -1] < -SURE * noise[:, None]
    if bool((to.on_usual >= 0).all()):
        proven = proven | (rows @ to.usual < -SURE * noise[:, None] * to.usual.norm())
    return proven


def _shown(task: Task, params: Vector, layer: LastLayer, auxiliary: Examples) -> _Shown:
    """The model's outputs for evenly spaced examples."""
    spread = torch.linspace(0, len(auxiliary.y) - 1, min(len(auxiliary.y), _EXAMPLES)).long()
    x = auxiliary.x[spread]
    labels, group = torch.unique(auxiliary.y[spread], return_inverse=True)
    means = torch.stack([mean_input(task, params, layer, x[group == number]) for number in range(len(labels))])
    probe = params.detach().clone()
    # with the means as the last layer's weights, its outputs are the products
    weight, *bias = task.layout.split(probe)[layer.first : layer.stop]
    weight[: len(means)] = means[:, : weight.shape[1]]
    if bias:
        bias[0][: len(means)] = means[:, -1]
    with torch.no_grad():
        probability = task.outputs(params, x).double().softmax(dim=1)
        inside = task.outputs(probe, x)[:, : len(means)].double()
    return _Shown(probability, labels, group, means.double(), inside)


def _directions(shown: _Shown, classes: int) -> _Directions:
    """The directions of projection; a label without examples gets the usual direction."""
    means, inside, n = shown.means, shown.inside, len(shown.group)
    parts = shown.group.bincount().double() / n
    usual = parts @ means
    tiny = torch.finfo(torch.float64).tiny
    square = usual.square().sum().clamp(min=tiny)
    usual, on_usual = usual / square, inside @ parts / square
    gram, normal = means @ means.T, inside.T @ inside
    ridge = _RIDGE * n * gram.diagonal().mean() / means.shape[1] * gram
    # the means may be equal or zero
    floor = (1e-9 * normal.diagonal().mean() + tiny) * torch.eye(len(means), dtype=torch.float64)
    mix = torch.linalg.solve(normal + ridge + floor, inside.T @ one_hot(shown.group).double())
    own, on_own = usual.repeat(classes, 1), on_usual[:, None].repeat(1, classes)
    own[shown.labels], on_own[:, shown.labels] = mix.T @ means, inside @ mix
    return _Directions(usual, own, on_usual, on_own)


def _kinds(shown: _Shown, to: _Directions, share: Tensor, layer: LastLayer) -> Kinds:
    """The contributions of each label's inputs; a label without examples borrows inputs of other labels."""
    n, classes = shown.probability.shape
    counts = torch.zeros(classes, dtype=torch.int64)
    counts[shown.labels] = shown.group.bincount()
    lacking, others = torch.nonzero(counts == 0)[:, 0], torch.linspace(0, n - 1, min(n, _BORROWED)).long()
    rows = torch.cat([torch.arange(n), others.repeat(len(lacking))])
    y = torch.cat([shown.labels[shown.group], lacking.repeat_interleave(len(others))])
    error = shown.probability[rows] - one_hot(y, classes)
    added = [error * to.on_usual[rows, None], error * to.on_own[rows]] + ([error] if layer.biased else [])
    return kinds_of(torch.cat(added, dim=1), y, -error[torch.arange(len(y)), y], share, counts)
