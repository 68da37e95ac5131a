"""Which labels a gradient was computed with, read off the last layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from attacks._label_posterior import Sums, chances, joined, kinds_of, most_expected, prior
from attacks._objective import told_gradients
from harness.contract import Examples, Observation, Task
from harness.rng import Key, uniform
from harness.vec import Vector

LabelSource = Literal["inferred", "given"]

_EXAMPLES = 400
"""Auxiliary examples that are shown to the model, at most; of more, as many evenly spread ones."""

_DUMMIES = 64
"""Inputs in place of auxiliary data."""

_SURE = 4.0
"""Standard deviations below zero from which on an entry counts as negative."""

_RIDGE = 1e-2
"""Penalty of the detectors' squared length, in squares that a direction of the last layer's input has on average. From
1e-3 to 1e-2 labels were found equally often; less lets noise through."""


class LastLayer(NamedTuple):
    """first, stop: its tensors, as a range of the layout: weight [classes, m] and, where there is one, bias."""

    first: int
    stop: int

    @property
    def biased(self) -> bool:
        """Whether there is a bias."""
        return self.stop - self.first == 2


class _Examples(NamedTuple):
    """What a model makes of n examples.

    probability [n, classes]; inside [n, g]: its last layer's input h, times the mean inputs [g, m] of g groups; y [n]
    int64: the group, which are the labels in `known`, in their order; without labels it is one group, and none known.
    """

    probability: Tensor
    inside: Tensor
    means: Tensor
    y: Tensor
    known: Tensor


class _Directions(NamedTuple):
    """usual [m]: gives 1 on the usual h; own [classes, m]: on h of an input of that label, 0 on others.

    on_usual [n], on_own [n, classes]: what the examples give.
    """

    usual: Tensor
    own: Tensor
    on_usual: Tensor
    on_own: Tensor


def check_source(source: str) -> None:
    """Refuse a source of labels that there is not."""
    if source not in get_args(LabelSource):
        raise ValueError(f"expected labels 'inferred' or 'given', got {source!r}")


def needs(source: LabelSource) -> frozenset[str]:
    """What an attack on messages must see: them, the round's model, and the labels or what they are inferred with."""
    return frozenset({"messages", "models", "labels" if source == "given" else "auxiliary"})


def labels_of(seen: Observation, gradients: Tensor, source: LabelSource, key: Key) -> tuple[Tensor, ...]:
    """[b] of each victim of an observation, whose gradients [n, d] are told by their messages: granted, or restored."""
    if source == "given":
        assert seen.labels is not None
        return seen.labels
    assert seen.model is not None
    assert seen.messages is not None
    images = [message.images for message in seen.messages]
    return restore(seen.task, seen.model.params, gradients, images, key, seen.auxiliary)


def labels_over_rounds(seen: Observation, source: LabelSource, key: Key) -> tuple[Tensor, ...]:
    """`labels_of` from all rounds that are seen: the rounds' evidence is added up as if they were independent."""
    if source == "given":
        assert seen.labels is not None
        return seen.labels
    images = [message.images for message in seen.sightings[0].messages]
    rounds = []
    for number, sighting in enumerate(seen.sightings):
        told = told_gradients(seen, sighting)
        rounds.append(_chances(seen.task, sighting.model.params, told, images, key.child(number), seen.auxiliary))
    if len(rounds) == 1:
        return tuple(map(most_expected, rounds[0]))
    share = _share(seen.task, seen.auxiliary)
    victims = zip(images, zip(*rounds, strict=True), strict=True)
    return tuple(most_expected(joined(each, prior(share, size))) for size, each in victims)


def apportion(counts: Tensor, size: int) -> Tensor:
    """[size] labels as often as their counts [classes] say, which add up to `size`: the largest remainders first."""
    whole = counts.floor()
    left = size - int(whole.sum())
    whole[(counts - whole).sort(descending=True, stable=True).indices[:left]] += 1
    return torch.arange(len(counts)).repeat_interleave(whole.long())


def restore(
    task: Task,
    params: Vector,
    gradients: Tensor,
    images: Sequence[int],
    key: Key,
    auxiliary: Examples | None = None,
) -> tuple[Tensor, ...]:
    """The labels behind each gradient.

    DOC
    """
    return tuple(map(most_expected, _chances(task, params, gradients, images, key, auxiliary)))


def last_layer(task: Task) -> LastLayer:
    """Where the last layer lies.

    Raises:
        ValueError: labels cannot be read off it, see `restore`.
    """
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
    return LastLayer(first, stop)


def rows_of(task: Task, layer: LastLayer, vectors: Tensor) -> Tensor:
    """[n, classes, m + 1 or m] of vectors [n, d]: what belongs to the last layer, the bias as the last column."""
    parts = task.layout.split(vectors)[layer.first : layer.stop]
    return torch.cat([part.reshape(len(vectors), task.classes, -1) for part in parts], dim=2)


_last_layer, _rows = last_layer, rows_of


def _chances(
    task: Task, params: Vector, gradients: Tensor, images: Sequence[int], key: Key, auxiliary: Examples | None
) -> list[Tensor]:
    """[classes, images[i]] of each gradient: in [c, k - 1] the probability that label c occurs at least k times."""
    layer = last_layer(task)
    examples = _shown(task, params, layer, auxiliary, key.child("dummies"))
    sound = all(bool(part.isfinite().all()) for part in examples)
    examples = _Examples(*(part.nan_to_num() for part in examples))
    to = _directions(examples, task.classes)
    rows = rows_of(task, layer, gradients).double()
    noise = _noise(rows)
    heard = rows.isfinite().flatten(1).all(dim=1) & noise.isfinite() & sound
    rows, noise = rows.where(heard[:, None, None], 0.0), noise.where(heard, 0.0)
    share = _share(task, auxiliary)
    kinds = kinds_of(*_pretended(examples, to, task.classes), share, torch.bincount(examples.y))
    on_usual = rows @ to.usual
    value = torch.cat([on_usual, (rows * to.own).sum(dim=2)], dim=1)
    squares = torch.cat([to.usual.square().sum().expand(task.classes), to.own.square().sum(dim=1)])
    proven = _proven(rows, on_usual, noise, to, layer)
    counts = torch.tensor(images)
    found = [prior(share, size) for size in images]
    for size in counts.unique().tolist():
        which = torch.nonzero((counts == size) & heard)[:, 0]
        variance = (size * noise[which, None]).square() * squares
        sums = Sums(size * value[which], variance, proven[which])
        for i, chance in zip(which.tolist(), chances(kinds, sums, size, 2, key.child("draws", size)), strict=True):
            found[i] = chance
    return found
