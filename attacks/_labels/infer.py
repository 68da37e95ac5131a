"""Inference of the labels behind a gradient from its last layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from leakgauge.attacks._engine.objective import Kind, gradients_of_round
from leakgauge.attacks._engine.prior import needs_of
from leakgauge.attacks._labels.last_layer import SURE, LastLayer, last_layer, noise_of
from leakgauge.attacks._labels.posterior import expected_share, joined, label_chances, most_expected, prior
from leakgauge.harness.core.contract import Attack, Examples, Observation, ObservedRound, Task
from leakgauge.harness.core.rng import Key, uniform
from leakgauge.harness.core.vec import Vector
from leakgauge.harness.learn.gradients import takes_numbers

LabelSource = Literal["inferred", "given"]

_DUMMIES = 64  # number of inputs behind the mean activation, a direction of projection that need not be exact
_CLEAR = 0.1  # noise of an entry, as a share of one image's contribution, up to which only the bias is used


class ByLabels(Attack):
    """The common part of reconstructions that need labels and perhaps a prior; labels None: they are searched, too."""

    kind: ClassVar[str] = "reconstruction"
    labels: LabelSource | None = None
    objective: Kind = "l2"
    prior: str = "none"

    @property
    def aware(self) -> bool:
        """True if it uses the defense's likelihood."""
        return self.objective == "likelihood"

    @property
    def needs(self) -> frozenset[str]:
        """Messages, the round's model, the labels if given, and auxiliary data to infer them or to fit the prior."""
        of_labels = {None: set[str](), "given": {"labels"}, "inferred": {"auxiliary"}}[self.labels]
        return frozenset({"messages", "models"}) | of_labels | needs_of(self.prior)


def check_source(source: str) -> None:
    """Refuse an unknown source of labels."""
    if source not in get_args(LabelSource):
        raise ValueError(f"expected labels 'inferred' or 'given', got {source!r}")


def labels_of(observation: Observation, gradients: Tensor, source: LabelSource, key: Key) -> tuple[Tensor, ...]:
    """[b] labels of each victim, granted or restored from the gradients [n, d] that the messages reveal."""
    if source == "given":
        return _granted(observation)
    return tuple(map(most_expected, _of_round(observation, observation.observed_rounds[0], gradients, key)))


def labels_over_rounds(observation: Observation, source: LabelSource, key: Key) -> tuple[Tensor, ...]:
    """Same as `labels_of`, from all observed rounds, whose evidence is added up as if they were independent."""
    if source == "given":
        return _granted(observation)
    rounds = [
        _of_round(observation, observed, gradients_of_round(observation, observed), key.child(number))
        for number, observed in enumerate(observation.observed_rounds)
    ]
    if len(rounds) == 1:
        return tuple(map(most_expected, rounds[0]))
    share = torch.full((observation.task.classes,), 1 / observation.task.classes, dtype=torch.float64)
    if observation.auxiliary is not None and len(observation.auxiliary.y):
        share = expected_share(observation.auxiliary, observation.task.classes)
    victims = zip(*rounds, strict=True)
    return tuple(most_expected(joined(each, prior(share, each[0].shape[1]))) for each in victims)


def _of_round(observation: Observation, observed: ObservedRound, gradients: Tensor, key: Key) -> list[Tensor]:
    images = [message.images for message in observed.messages]
    numbers = [message.sender.number for message in observed.messages]
    return _chances(observation.task, observed.model.params, gradients, images, key, observation.auxiliary, numbers)


def _granted(observation: Observation) -> tuple[Tensor, ...]:
    assert observation.labels is not None
    for labels in () if takes_numbers(observation.task) else observation.labels:
        wrong = labels[(labels < 0) | (labels >= observation.task.classes)]
        if len(wrong):
            raise ValueError(f"expected labels in 0 to {observation.task.classes - 1}, got {int(wrong[0])}")
    return observation.labels


def apportion(counts: Tensor, size: int) -> Tensor:
    """[size] labels by largest remainder, from fractional counts [classes] that sum to `size`."""
    whole = counts.floor()
    left = size - int(whole.sum())
    whole[(counts - whole).sort(descending=True, stable=True).indices[:left]] += 1
    return torch.arange(len(counts)).repeat_interleave(whole.long())


def restore(
    task: Task, params: Vector, gradients: Tensor, images: Sequence[int], key: Key, auxiliary: Examples | None = None
) -> tuple[Tensor, ...]:
    """Restore the labels behind each gradient.

    Row i of the last layer's gradient is the mean over the inputs of (p_i - [y = i]) h, with the layer's input h (1 for
    the bias) and the softmax p. A negative entry of the bias, or of a row's projection on the mean h, proves a label
    unless noise explains it. The noise is estimated from the gradient: without noise its rows sum to zero.

    With auxiliary data, auxiliary inputs at these parameters show the contribution of each label's inputs to three
    readings: the bias, the projections of the rows on the mean h, and the projection of each row on a direction that
    separates its own inputs from others. These readings, the noise and the label frequencies give the probability of
    each count (`attacks._labels.posterior`). The result maximizes the expected number of correct labels. For pure
    noise, the result is the most frequent labels. Without auxiliary data: see `_explained`.

    Args:
        gradients: [n, d] of the mean loss over `images[i]` inputs each.
        images: number of labels behind each gradient.
        key: draws dummy inputs, or the samples behind the probabilities.
        auxiliary: data of the same kind. All its labels are counted, and at most 400 evenly spaced examples are
            evaluated. None or empty: not used.

    Returns:
        [images[i]] int64 each, sorted.

    Guarantees:
        Every label is in range, for any gradient.
        One input and no noise: the label is right if h.mean(h) > 0, as behind a sigmoid or ReLU.
        Several inputs and no noise: a label with a negative bias entry, beyond rounding, is returned.

    Cannot: count all labels behind a trained model, where an input that is predicted correctly and with certainty
        leaves almost no trace; benefit from labels that depend on each other, because it assumes independent labels
        (`docs/attacks.md` has the shares of right labels); count labels in a scaled gradient, for example after a clip;
        follow the model through the steps of an update; or undo momentum.

    Raises:
        ValueError: the loss is not softmax cross-entropy, or the last layer is not dense with one row per class.

    Source: Zhao et al. 2020 (iDLG) for one input; Wainakh et al. 2022 (LLG) for the signs of rows and the use of
        auxiliary data; Ma et al. 2023 (iLRG) for p from the rows, without such data. Differs: uses projections of the
        rows instead of their sums; integer counts by their probability instead of a rounded solution; an estimate of
        the noise.
    """
    chances = _chances(task, params, gradients, images, key, auxiliary, range(len(images)))
    return tuple(map(most_expected, chances))


def _chances(
    task: Task,
    params: Vector,
    gradients: Tensor,
    images: Sequence[int],
    key: Key,
    auxiliary: Examples | None,
    numbers: Sequence[int],
) -> list[Tensor]:
    """For each gradient, [classes, images[i]]: entry [c, k - 1] is the probability of at least k labels c.

    The number of a gradient sets its draws.
    """
    layer = last_layer(task)
    if auxiliary is not None and len(auxiliary.y):
        keys = [key.child("draws", number) for number in numbers]
        return label_chances(layer, params, gradients, images, auxiliary, keys)
    counts = _explained(layer, params, gradients, images, key)
    return [(row[:, None] >= torch.arange(1, size + 1)).double() for row, size in zip(counts, images, strict=True)]


def _explained(layer: LastLayer, params: Vector, gradients: Tensor, images: Sequence[int], key: Key) -> Tensor:
    """[n, classes] int64 counts without auxiliary data.

    An input of class i adds p - e_i to `images` times the bias gradient; the counts must explain this sum. For a proven
    label i, row i divided by bias entry i is about the h of its inputs, which gives their p. For other labels, p comes
    from dummy inputs. Proven labels are taken first, then greedily the labels that explain most. If noise could hide a
    label, the projections of the rows replace the bias, and no label is proven.
    """
    task, x = layer.task, uniform(key, (_DUMMIES, *layer.task.input_shape), dtype=params.dtype)
    activation, rows, sizes = layer.mean_input(params, x), layer.rows(gradients), torch.tensor(images)
    with torch.no_grad():
        usual = task.outputs(params, x).softmax(dim=1).mean(dim=0)
    projection = rows @ (activation / activation.square().sum())
    score, proven, p = projection, torch.zeros_like(projection, dtype=torch.bool), usual.expand(*projection.shape, -1)
    if layer.biased:
        bias, noise = rows[..., -1], noise_of(rows)
        clear = (sizes * noise <= _CLEAR)[:, None]
        score, proven = torch.where(clear, bias, projection), clear & (bias < -SURE * noise[:, None])
        h = rows / torch.where(proven, bias, 1.0)[..., None]
        p = torch.where(proven[..., None], (h @ layer.rows(params[None])[0].T).softmax(dim=2), p)
    # for one input, the sign of p - [y = i] decides; subtracting the mean p would only blur it
    single = one_hot(projection.argmin(dim=1), task.classes)
    added = p - torch.eye(task.classes, dtype=score.dtype)
    return torch.where(sizes[:, None] > 1, _greedy(score, added, proven, sizes), single)


def _greedy(score: Tensor, added: Tensor, proven: Tensor, images: Tensor) -> Tensor:
    """[n, classes] int64: the counts that explain images [n] times `score` [n, classes] best.

    Args:
        added: [n, classes, classes], what an input of each class adds; proven: [n, classes], classes that occur.
    """
    fits = proven.sum(dim=1) <= images
    counts = (proven & fits[:, None]).long()
    left = images[:, None] * score - (counts[:, :, None] * added).sum(dim=1)
    every = torch.arange(len(score))
    for _ in range(int(images.max())):
        missing = (counts.sum(dim=1) < images).long()
        label = (left[:, None] - added).square().sum(dim=2).argmin(dim=1)
        left = left - missing[:, None] * added[every, label]
        counts[every, label] += missing
    return counts
