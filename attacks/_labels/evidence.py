"""What the last layer's gradient says of a batch's labels to somebody who has data of the same kind."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from leakgauge.attacks._labels.last_layer import LastLayer, noise_of, rows_of
from leakgauge.attacks._labels.posterior import Kinds, Sums, chances, kinds_of, prior
from leakgauge.harness.core.contract import Examples, Task
from leakgauge.harness.core.rng import Key
from leakgauge.harness.core.vec import Vector

_EXAMPLES = 400
"""Examples that are shown to the model, at most."""

_BORROWED = 64
"""Examples of other labels that stand in for a label without any, at most."""

_SURE = 4.0
"""Standard deviations below zero from which on an entry counts as negative."""

_RIDGE = 1e-2
"""Penalty of the squared length of each label's own direction, in squares that an entry of the last layer's input has
on average. From 1e-4 to 1e-1, labels were told equally often, without noise and with 0.01 and 0.1."""


class _Shown(NamedTuple):
    """What a model makes of n examples of g labels.

    probability [n, classes]; labels [g], in order; group [n] int64: which of them; means [g, m]: each label's mean
    input h of the last layer, with 1 for its bias; inside [n, g]: the products of each h and the means.
    """

    probability: Tensor
    labels: Tensor
    group: Tensor
    means: Tensor
    inside: Tensor


class _Directions(NamedTuple):
    """usual [m]: gives 1 on the usual h; own [classes, m]: on h of an input of that label, 0 on others.

    on_usual [n], on_own [n, classes]: what the examples give.
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
    auxiliary: Examples,
    key: Key,
) -> list[Tensor]:
    """[classes, images[i]] of each gradient: in [c, k - 1] the probability that label c occurs at least k times."""
    share = expected_share(auxiliary, task.classes)
    shown = _shown(task, params, layer, auxiliary)
    found = [prior(share, size) for size in images]
    if not all(bool(part.isfinite().all()) for part in shown):
        return found
    to = _directions(shown, task.classes)
    rows = rows_of(task, layer, gradients).double()
    noise = noise_of(rows)
    heard = noise.isfinite()
    rows, noise = torch.where(heard[:, None, None], rows, 0.0), torch.where(heard, noise, 0.0)
    tellings = [rows @ to.usual, (rows * to.own).sum(dim=2)]
    squares = [to.usual.square().sum().expand(task.classes), to.own.square().sum(dim=1)]
    if layer.biased:
        tellings.append(rows[..., -1])
        squares.append(torch.ones(task.classes, dtype=torch.float64))
    value, square = torch.cat(tellings, dim=1), torch.cat(squares)
    proven, kinds = _proven(rows, noise, to, layer), _kinds(shown, to, share, layer)
    for size in sorted(set(images)):
        which = [i for i, count in enumerate(images) if count == size and heard[i]]
        sums = Sums(size * value[which], (size * noise[which, None]).square() * square, proven[which])
        told = chances(kinds, sums, size, len(tellings), [key.child(i) for i in which])
        for i, chance in zip(which, told, strict=True):
            found[i] = chance
    return found


def expected_share(auxiliary: Examples, classes: int) -> Tensor:
    """[classes]: how often each label is expected; each is counted once more, as the victims may have missing ones."""
    counts = auxiliary.y.bincount(minlength=classes).double() + 1
    return counts / counts.sum()


def _proven(rows: Tensor, noise: Tensor, to: _Directions, layer: LastLayer) -> Tensor:
    """[n, classes]: which labels occur for sure, as only an input's own entry of p - e is negative."""
    proven = torch.zeros(rows.shape[:2], dtype=torch.bool)
    if layer.biased:
        proven = rows[..., -1] < -_SURE * noise[:, None]
    if bool((to.on_usual >= 0).all()):
        proven = proven | (rows @ to.usual < -_SURE * noise[:, None] * to.usual.norm())
    return proven


def _shown(task: Task, params: Vector, layer: LastLayer, auxiliary: Examples) -> _Shown:
    """What the model makes of evenly spread examples."""
    spread = torch.linspace(0, len(auxiliary.y) - 1, min(len(auxiliary.y), _EXAMPLES)).long()
    x = auxiliary.x[spread]
    labels, group = torch.unique(auxiliary.y[spread], return_inverse=True)
    means = torch.stack([_mean_input(task, params, layer, x[group == number]) for number in range(len(labels))])
    probe = params.detach().clone()
    # with the means in place of the last layer's weights, its outputs are the products
    weight, *bias = task.layout.split(probe)[layer.first : layer.stop]
    weight[: len(means)] = means[:, : weight.shape[1]]
    if bias:
        bias[0][: len(means)] = means[:, -1]
    with torch.no_grad():
        probability = task.outputs(params, x).double().softmax(dim=1)
        inside = task.outputs(probe, x)[:, : len(means)].double()
    return _Shown(probability, labels, group, means.double(), inside)


def _mean_input(task: Task, params: Vector, layer: LastLayer, x: Tensor) -> Tensor:
    """[m + 1 or m]: the mean of the last layer's inputs h, and 1 for its bias."""
    params = params.detach().requires_grad_()
    one, other = torch.eye(task.classes, dtype=params.dtype)[:2, None].expand(2, len(x), task.classes)
    # p cancels in the difference: what is left in row 0 of the last layer's gradient is the mean of h
    (gradient,) = torch.autograd.grad(task.loss(params, x, other) - task.loss(params, x, one), params)
    return rows_of(task, layer, gradient[None])[0, 0]


def _directions(shown: _Shown, classes: int) -> _Directions:
    """Of a label without examples, the usual direction is its own."""
    means, inside, n = shown.means, shown.inside, len(shown.group)
    parts = shown.group.bincount().double() / n
    usual = parts @ means
    tiny = torch.finfo(torch.float64).tiny
    square = usual.square().sum().clamp(min=tiny)
    usual, on_usual = usual / square, inside @ parts / square
    gram, normal = means @ means.T, inside.T @ inside
    ridge = _RIDGE * n * gram.diagonal().mean() / means.shape[1] * gram
    # the means may be alike, or zero
    floor = (1e-9 * normal.diagonal().mean() + tiny) * torch.eye(len(means), dtype=torch.float64)
    mix = torch.linalg.solve(normal + ridge + floor, inside.T @ one_hot(shown.group).double())
    own, on_own = usual.repeat(classes, 1), on_usual[:, None].repeat(1, classes)
    own[shown.labels], on_own[:, shown.labels] = mix.T @ means, inside @ mix
    return _Directions(usual, own, on_usual, on_own)


def _kinds(shown: _Shown, to: _Directions, share: Tensor, layer: LastLayer) -> Kinds:
    """What inputs of each label add; of a label without examples, what others would add if it were theirs."""
    n, classes = shown.probability.shape
    counts = torch.zeros(classes, dtype=torch.int64)
    counts[shown.labels] = shown.group.bincount()
    lacking, others = torch.nonzero(counts == 0)[:, 0], torch.linspace(0, n - 1, min(n, _BORROWED)).long()
    rows = torch.cat([torch.arange(n), others.repeat(len(lacking))])
    y = torch.cat([shown.labels[shown.group], lacking.repeat_interleave(len(others))])
    error = shown.probability[rows] - one_hot(y, classes)
    added = [error * to.on_usual[rows, None], error * to.on_own[rows]] + ([error] if layer.biased else [])
    return kinds_of(torch.cat(added, dim=1), y, -error[torch.arange(len(y)), y], share, counts)
