"""A search by the first dense layer's inputs and slopes, which the gradient of one image shows.

The gradient of a dense layer at one image is the outer product of the loss's slopes in its outputs and its inputs. So
both factors are known before any search, up to noise, and the search can cover only the layers before: their outputs
must match the known features, and their gradients must match those of a loss that is linear in the features. Behind
ReLU and max-pooling, a wrong image then does not also have wrong slopes, which stop a search by direction.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from leakgauge.attacks._engine.closed_form import entrance
from leakgauge.attacks._engine.matching import Evaluation
from leakgauge.attacks._engine.objective import bent, unbent_errors
from leakgauge.attacks._engine.prior import Believed, Prior
from leakgauge.attacks._search.adam import Schedule, descend
from leakgauge.attacks._search.lbfgs import Minima
from leakgauge.harness.core import rng
from leakgauge.harness.core.contract import Observation, ObservedRound, Task
from leakgauge.harness.core.rng import Key
from leakgauge.harness.core.vec import Vector
from leakgauge.harness.learn.batch import EPSILON
from leakgauge.harness.learn.gradients import kernel_of
from leakgauge.harness.learn.kernels import Kernel
from leakgauge.harness.learn.layers import Flatten, Scale
from leakgauge.harness.learn.structure import Structure
from leakgauge.harness.learn.tasks import ModelTask

CLEAN = 0.15
"""Error of the features (see `Features`) above which a search by direction may be better: it was better from 0.13 on
for at least one of `lenet5`, `cnn2` and `mlp-small`, and below 0.13 never by more than 0.03 in SSIM."""

VEILED = 0.42
"""The same if softened layers are searched from the start: below this error, the direction misleads behind `jopeq`."""

_EARLIER = 0.1
"""Weight of a layer's gradient over that of the next layer; the features themselves have weight 1. This weight, the
step and the prior's weight were chosen for 96 CIFAR-10 training images behind three `lenet5` and three `cnn2`, trained
and fresh, undefended: 0.03 and 0.3 cost 0.02 in SSIM, steps of 0.3 cost 0.02, weights of 0.3 to 1 differed by 0.01."""

_PACE, _CHOICE = 1.6, 4.0
"""`Features.pace` and `choice` of batches. For 32 CIFAR-10 test images in batches of 4 behind a trained `lenet5`, a
pace of 1.5 raised the SSIM from 0.541 to 0.561, and then this choice to 0.571."""

_STEP = 0.8  # size of the first steps, in standard deviations
_WEIGHT = 0.8  # weight of the prior's mean energy, where zero features have a distance of 1
_STARTS = 3  # number of searches whose mean is returned
_SPREAD = 0.5  # distance of the other searches' starts from the first start, in standard deviations of each coordinate
_TOGETHER = 8  # number of candidates computed at once
_TURNS = 100  # of a fit to entries of different errors
_EXACT = 1e-3  # their least error, as a share of the mean entry
_TINY = 1e-14  # added to the squared distance, whose root has no slope at zero


@dataclass(frozen=True, eq=False)
class Features:
    """The known features of n gradients, and the misfit of inputs [m, D] to them: a `Function`.

    The value is the root of a weighted sum of squared distances: of the features, and of the gradients of the layers
    before them, each over the squared length of its target.

    Attributes:
        kernel: kernel of the layers before, with a linear loss; None: these have no parameters, and the features are
            inputs.
        features, slopes: [n, f].
        targets, weights: [n, d'], for the parameters of the layers before.
        error: [n], relative error of the features: the level of equal noise in all entries of the dense layer's
            gradient that would explain its distance from an outer product. Infinite if the gradient shows no features.
        trust: [n], factor of the value: 1 without noise; with noise, it adjusts the value to the prior's weight.
        shape: shape of an input.
        pace: factor by which the steps of a search are more and smaller.
        choice: power of the inverse value that weighs a minimum in the mean of a search.
    """

    kernel: Kernel | None
    features: Tensor
    slopes: Tensor
    targets: Tensor
    weights: Tensor
    error: Tensor
    trust: Tensor
    shape: tuple[int, ...]
    pace: float = 1.0
    choice: float = 0.0

    @classmethod
    def of(cls, task: Task, params: Vector, targets: Tensor) -> Features | None:
        """The features of gradients `targets` [n, d] of one image each.

        None: the layers before the first dense one are not known, or this layer has no bias.
        """
        if not isinstance(task, ModelTask) or (entry := front(task, params)) is None:
            return None
        structure = task.structure
        if structure is not None and structure.sampled is None and kernel_of(task, params, 1) is None:
            return None
        before, owned = entry
        split = task.layout.split if task.structure is None else task.structure.split
        weight, bias = split(targets)[owned : owned + 2]
        features, slopes, error = outer(torch.cat([weight, bias[:, :, None]], 2).double())
        if not before.layers:
            features = task.model.scale.stored(features.view(-1, *task.input_shape)).flatten(1)
        trust = (_WEIGHT * features.shape[1] / (2 * math.prod(task.input_shape) * error)).clamp(max=1)
        dtype, known = targets.dtype, targets[:, :0]
        weights, kernel = known, None
        if before.layers:
            known = torch.cat([gradient.flatten(1) for gradient in split(targets)[:owned]], 1)
            kernel = Kernel(before, before.layout.join(split(params)[:owned]), linear=True)
            weights = _weights(kernel, known)
        back = slopes.to(dtype) @ split(params)[owned]
        return cls(kernel, features.to(dtype), back, known, weights, error.to(dtype), trust.to(dtype), task.input_shape)

    def of_batches(self, features: Tensor) -> Features:
        """The same for images with features [n, f] of batches, whose own gradients are unknown: only features count."""
        none, ones = self.targets.new_zeros(len(features), self.targets.shape[1]), features.new_ones(len(features))
        return Features(self.kernel, features, 0 * features, none, none, 0 * ones, ones, self.shape, _PACE, _CHOICE)

    def search(self, prior: Prior, starts: Tensor, evaluations: int, key: Key) -> Minima:
        """The means, weighed by `choice`, of the minima from `starts` [n, D], in prior's coordinates, and near.

        Each search has at most `evaluations` times the pace and ends at a different pattern of active units. The means
        of 1, 2, 3 and 4 minima had an SSIM of 0.589, 0.611, 0.620 and 0.623, for 48 CIFAR-10 training images behind
        `lenet5` and `cnn2`.
        """
        whole = Believed(self, prior, self.shape, 1, _WEIGHT / math.prod(self.shape))
        # without layers before, there is a single minimum, which is found soon
        searches, most = (1, -(-evaluations // 4)) if self.kernel is None else (_STARTS, evaluations)
        schedule = Schedule(round(self.pace * most), _STEP / self.pace, signed=False)
        offsets = [_SPREAD * rng.normal(key.child(number), starts.shape[1:]) for number in range(1, searches)]
        minima = [descend(whole, start, schedule) for start in (starts, *(starts + off.to(starts) for off in offsets))]
        x, value, used = (torch.stack(parts) for parts in zip(*minima, strict=True))
        share = (value.amin(0) / value).nan_to_num(1.0) ** self.choice
        return Minima((share[:, :, None] * x).sum(0) / share.sum(0)[:, None], value.mean(0), used.sum(0))

    def __call__(self, candidates: Tensor, instances: Tensor) -> Evaluation:
        """Implement `Function`."""
        parts = zip(torch.split(candidates, _TOGETHER), torch.split(instances, _TOGETHER), strict=True)
        values, slopes = zip(*(self._evaluate(chunk, rows) for chunk, rows in parts), strict=True)
        trust = self.trust[instances]
        return Evaluation(trust * torch.cat(values), trust[:, None] * torch.cat(slopes))

    def _evaluate(self, candidates: Tensor, instances: Tensor) -> Evaluation:
        features = self.features[instances]
        scale = 1 / features.square().sum(1)
        if self.kernel is None:
            off = candidates - features
            value = (scale * off.square().sum(1) + _TINY).sqrt()
            return Evaluation(value, (scale / value)[:, None] * off)
        x = candidates.view(-1, 1, *self.shape)
        gradients, trace = self.kernel.trace(x, self.slopes[instances][:, None])
        off, misses = trace.outputs[:, 0] - features, gradients - self.targets[instances]
        weighed = self.weights[instances] * misses
        value = (scale * off.square().sum(1) + (weighed * misses).sum(1) + _TINY).sqrt()
        pulled = trace.pull(weighed / value[:, None], ((scale / value)[:, None] * off)[:, None])
        return Evaluation(value, pulled.x.flatten(1))


def front(task: ModelTask, params: Vector) -> tuple[Structure, int] | None:
    """The layers before the first dense layer (none if it takes the inputs), and the number of their tensors.

    None: these layers are not known, there is none with tensors between the inputs and other layers, or the dense layer
    has no bias. A network of unknown structure is recognized by its gradient, if its first layer is dense.
    """
    if task.structure is None:
        entry = entrance(task, params.double())
        return None if entry is None else (Structure(()), entry)
    layers, first = task.structure.layers, task.structure.first_dense
    if first is None or layers[first].owns < 2:
        return None
    owned = sum(layer.owns for layer in layers[:first])
    if owned:
        return task.structure.front(first), owned
    return (Structure(()), 0) if all(isinstance(layer, (Flatten, Scale)) for layer in layers[:first]) else None


def outer(rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The inputs [n, f] and slopes [n, o] whose outer product is nearest to `rows` [n, o, f + 1], and the error [n].

    rows: the gradients of weight and bias; the bias has input 1.
    """
    squares, vectors = torch.linalg.eigh(rows @ rows.mT)
    inputs = (rows.mT @ vectors[:, :, -1:])[:, :, 0]
    inputs = inputs / inputs[:, -1:]
    slopes = (rows @ inputs[:, :, None])[:, :, 0] / inputs.square().sum(1, keepdim=True)
    error = (squares[:, :-1].clamp(min=0).sum(1) / squares[:, -1] / rows.shape[1]).sqrt()
    return inputs[:, :-1], slopes, error.nan_to_num(nan=torch.inf)


def settled(observation: Observation, observed: ObservedRound, gradients: Tensor) -> Tensor:
    """[n, d]: received gradients; behind a step of Adam, that of the first dense layer is fitted by an outer product.

    This needs messages of one image. The fit weighs the entries by the rounding errors that it finds likely.
    """
    task, params, message = observation.task, observed.model.params, observed.messages[0]
    if not bent(observation, observed) or (message.images, message.users) != (1, 1) or not isinstance(task, ModelTask):
        return gradients
    if (entry := front(task, params)) is None:
        return gradients
    split, fitted = task.layout.split if task.structure is None else task.structure.split, gradients.clone()
    parts = [split(each)[entry[1] : entry[1] + 2] for each in (gradients, *unbent_errors(observation, observed))]
    rows, rounding, decay = (torch.cat([weight, bias[..., None]], -1).double() for weight, bias in parts)
    (_, slopes, _), seen, fit = outer(rows), EPSILON + (rows + decay).abs(), rows
    least = (_EXACT * rows.abs().mean((1, 2), keepdim=True)).square()
    for _ in range(_TURNS):
        size = (EPSILON + (fit + decay).abs()).maximum(0.3 * seen)
        sure = 1 / (seen * size**3 * (rounding / EPSILON).square() + least)
        inputs = (sure * rows).mT @ slopes[..., None] / (sure.mT @ slopes.square()[..., None])
        slopes = ((sure * rows) @ inputs / (sure @ inputs.square()))[..., 0]
        fit = slopes[..., None] * inputs.mT
    weight, bias = split(fitted)[entry[1] : entry[1] + 2]
    weight.copy_(fit[..., :-1])
    bias.copy_(fit[..., -1])
    return fitted


def _weights(kernel: Kernel, targets: Tensor) -> Tensor:
    """[n, d']: weights of squared differences from the targets; they decrease from the last layer to the first."""
    weights, strength = torch.zeros_like(targets), 1.0
    for sought, weighs in zip(reversed(kernel.split(targets)), reversed(kernel.split(weights)), strict=True):
        if sought:
            strength *= _EARLIER
            length = torch.stack([tensor.square().flatten(1).sum(1) for tensor in sought]).sum(0)
            for tensor in weighs:
                weight = (strength / length).nan_to_num(posinf=0.0)
                tensor.copy_(weight.view(-1, *[1] * (tensor.ndim - 1)).expand_as(tensor))
    return weights
