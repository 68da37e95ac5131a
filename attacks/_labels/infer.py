"""Which labels a gradient was computed with, read off the last layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from leakgauge.attacks._engine.objective import told_gradients
from leakgauge.attacks._labels.evidence import expected_share, label_chances
from leakgauge.attacks._labels.last_layer import LastLayer, last_layer, noise_of, rows_of
from leakgauge.attacks._labels.posterior import joined, most_expected, prior
from leakgauge.harness.core.contract import Examples, Observation, Task
from leakgauge.harness.core.rng import Key, uniform
from leakgauge.harness.core.vec import Vector

LabelSource = Literal["inferred", "given"]

_DUMMIES = 64
"""Inputs behind the mean activation: it is a direction to project on, and need not be sharp."""

_SURE = 4.0
"""Standard deviations below zero from which on an entry counts as negative."""

_CLEAR = 0.1
"""Noise of an entry, in shares of one image, up to which the bias alone is asked. On fresh and trained models it was
better up to 0.1 to 0.2, the projections above."""


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
    """What an attack on messages must see: them, the round's model, and the labels or what they are inferred with."""
    return frozenset({"messages", "models", "labels" if source == "given" else "auxiliary"})


def labels_of(seen: Observation, gradients: Tensor, source: LabelSource, key: Key) -> tuple[Tensor, ...]:
    """[b] of each victim of an observation, whose gradients [n, d] are told by their messages: granted, or restored."""
    if source == "given":
        return _granted(seen)
    assert seen.model is not None
    assert seen.messages is not None
    images = [message.images for message in seen.messages]
    return restore(seen.task, seen.model.params, gradients, images, key, seen.auxiliary)


def labels_over_rounds(seen: Observation, source: LabelSource, key: Key) -> tuple[Tensor, ...]:
    """`labels_of` from all rounds that are seen: the rounds' evidence is added up as if they were independent."""
    if source == "given":
        return _granted(seen)
    images = [message.images for message in seen.sightings[0].messages]
    rounds = []
    for number, sighting in enumerate(seen.sightings):
        told = told_gradients(seen, sighting)
        rounds.append(_chances(seen.task, sighting.model.params, told, images, key.child(number), seen.auxiliary))
    if len(rounds) == 1:
        return tuple(map(most_expected, rounds[0]))
    share = torch.full((seen.task.classes,), 1 / seen.task.classes, dtype=torch.float64)
    if seen.auxiliary is not None and len(seen.auxiliary.y):
        share = expected_share(seen.auxiliary, seen.task.classes)
    victims = zip(images, zip(*rounds, strict=True), strict=True)
    return tuple(most_expected(joined(each, prior(share, size))) for size, each in victims)


def _granted(seen: Observation) -> tuple[Tensor, ...]:
    """The labels that a study grants."""
    assert seen.labels is not None
    for labels in seen.labels:
        wrong = labels[(labels < 0) | (labels >= seen.task.classes)]
        if len(wrong):
            raise ValueError(f"expected labels in 0 to {seen.task.classes - 1}, got {int(wrong[0])}")
    return seen.labels


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

    Row i of the last layer's gradient is the mean over the inputs of (p_i - [y = i]) h, with h the layer's input, 1 for
    its bias, and p the softmax. A negative entry of the bias, or of a row's projection on the usual h, proves a label,
    where noise does not explain it. The gradient itself says how noisy it is: its rows would add up to zero.

    With auxiliary data: what inputs of each label add to the bias, to the projections of the rows on the usual h and,
    of each row, on a direction that tells its own inputs from others, is what auxiliary inputs show at these
    parameters. From it, the noise and how frequent labels are follows the probability of each count
    (`attacks._labels.posterior`); told are the labels of which most are expected to be right. Where there is nothing
    but noise, those are the usual ones. Without: see `_explained`.

    Args:
        gradients: [n, d] of the mean loss over `images[i]` inputs each.
        images: how many labels are looked for in each.
        key: draws dummy inputs, or what is needed to sum probabilities up.
        auxiliary: of the same kind; of more than 400, 400 evenly spread ones, but all labels. None or empty: without.

    Returns:
        [images[i]] int64 each, sorted.

    Guarantees:
        Every label is in range, whatever the gradient.
        One input and no noise: the label is right where h.mean(h) > 0, as behind a sigmoid or ReLU.
        Several and no noise: a label whose bias entry is negative, beyond rounding, is told.

    Cannot: count all labels of a trained model, where an input that is predicted surely and rightly leaves next to no
        trace. Of 8 digits with independent labels, 100 batches each (`benchmarks/inversion.py --part labels`), it told
        0.64 to 0.75 of those behind three trained models, where frequencies have 0.56 to 0.58, and 0.58 to 0.74 with
        noise of 0.01; all behind fresh ones. Know that labels are not independent: of 8 different ones of 10 it told
        0.75 to 0.83, where frequencies, which spread evenly, have 0.79 to 0.81; of pairs of one label behind a model
        that is nearly always right 0.66. Count in a gradient that was scaled, as by a clip; follow the model through
        the steps of an update, or undo momentum.

    Raises:
        ValueError: the loss is not softmax cross-entropy, or the last layer is not dense with one row a class.

    Source: Zhao et al. 2020 (iDLG) for one input; Wainakh et al. 2022 (LLG) for the signs of rows and what auxiliary
        data show; Ma et al. 2023 (iLRG) for p from the rows, without such data. Differs: projections of the rows in
        place of their sums; integer counts by their probability, in place of a rounded solution; the noise is
        estimated.
    """
    return tuple(map(most_expected, _chances(task, params, gradients, images, key, auxiliary)))


def _chances(
    task: Task, params: Vector, gradients: Tensor, images: Sequence[int], key: Key, auxiliary: Examples | None
) -> list[Tensor]:
    """[classes, images[i]] of each gradient: in [c, k - 1] the probability that label c occurs at least k times."""
    layer = last_layer(task)
    if auxiliary is not None and len(auxiliary.y):
        return label_chances(task, params, layer, gradients, images, auxiliary, key.child("draws"))
    counts = _explained(task, params, layer, gradients, images, key)
    return [(row[:, None] >= torch.arange(1, size + 1)).double() for row, size in zip(counts, images, strict=True)]


def _explained(
    task: Task, params: Vector, layer: LastLayer, gradients: Tensor, images: Sequence[int], key: Key
) -> Tensor:
    """[n, classes] int64 counts without auxiliary data.

    An input of class i adds p - e_i to `images` times the bias gradient, which is to be explained. Row i divided by a
    proven label's entry i is about the h of its inputs, which gives their p. Of other labels p is what dummy inputs
    show. Proven labels are taken first, then greedily those that explain most. Where noise could swallow a label, the
    projections of the rows take the place of the bias, and nothing is proven.
    """
    impact = _impact(task, params, layer, key)
    rows = rows_of(task, layer, gradients)
    projection = rows @ (impact.activation / impact.activation.square().sum())
    usual = impact.probability.expand(*projection.shape, -1)
    evidence = _Evidence(projection, usual, torch.zeros_like(projection, dtype=torch.bool))
    counts = torch.tensor(images)
    if layer.biased:
        exact = _exact_evidence(rows, rows_of(task, layer, params[None])[0], usual)
        clear = counts * noise_of(rows) <= _CLEAR
        evidence = _either(clear, exact, evidence)
    # of one input, the sign of its own p - [y = i] decides; what p usually is would only blur it
    single = one_hot(projection.argmin(dim=1), task.classes)
    return torch.where(counts[:, None] > 1, _explain(evidence, counts), single)


def _exact_evidence(rows: Tensor, weights: Tensor, usual: Tensor) -> _Evidence:
    """From a gradient's rows [n, classes, m + 1] with little noise; weights [classes, m + 1] of the layer itself."""
    bias = rows[..., -1]
    proven = bias < -_SURE * noise_of(rows)[:, None]
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


def _impact(task: Task, params: Vector, layer: LastLayer, key: Key) -> _Impact:
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
