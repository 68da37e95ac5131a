"""A small network that maps features of a message to an image: a closed-form linear part plus a hidden layer."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from leakgauge.harness.core import rng
from leakgauge.harness.core.rng import Key

_RIDGES = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.3, 1.0, 3.0, 10.0, torch.inf)
"""Candidate penalties, for features of variance 1; with the last penalty, a component stays at its mean."""

_ATLAS = 1024  # maximum number of images that define the principal components

_BATCH = 128
_PATIENCE = 3  # epochs without a lower held-out error before the training of the hidden layer ends at its best epoch
_CONSTANT = 1e-6  # spread below which a feature counts as constant and is ignored, even if a victim's value differs


class Pairs(NamedTuple):
    """features [n, f] and the inputs [n, *input_shape] behind them."""

    features: Tensor
    images: Tensor


class Scale(NamedTuple):
    """Center and spread [f] of features (infinite spread if constant), mean [D] and directions [D, k] of images."""

    center: Tensor
    spread: Tensor
    mean: Tensor
    directions: Tensor

    def inputs(self, features: Tensor) -> Tensor:
        """[n, f] normalized features: mean 0 and variance 1 on the training pairs."""
        return (features - self.center) / self.spread

    def components(self, images: Tensor) -> Tensor:
        """[n, k]: the principal components of images [n, *input_shape]."""
        return (images.flatten(1) - self.mean) @ self.directions


class Layers(NamedTuple):
    """components = offset [k] + inputs @ linear [f, k] + relu(inputs @ first [f, h] + bias [h]) @ second [h, k]."""

    offset: Tensor
    linear: Tensor
    first: Tensor
    bias: Tensor
    second: Tensor

    def __call__(self, inputs: Tensor) -> Tensor:
        """[n, k]: the components for inputs [n, f]."""
        straight = torch.addmm(self.offset, inputs, self.linear)
        return straight + torch.addmm(self.bias, inputs, self.first).relu() @ self.second


class Inverter(NamedTuple):
    """The fitted network; `error`: held-out mean squared error per entry; `pixels`: whether to clamp to [0, 1]."""

    scale: Scale
    layers: Layers
    pixels: bool
    error: float

    def __call__(self, features: Tensor) -> Tensor:
        """[n, D]: the images for features [n, f]."""
        flat = torch.addmm(self.scale.mean, self.layers(self.scale.inputs(features)), self.scale.directions.T)
        return flat.clamp(0.0, 1.0) if self.pixels else flat


class Plan(NamedTuple):
    """Maximum components of an image; hidden units, or 0; maximum epochs; and lr, the first step size."""

    components: int
    hidden: int
    epochs: int
    lr: float


def fit(train: Pairs, held: Pairs, plan: Plan, *, pixels: bool, key: Key) -> Inverter:
    """The network with the least squared error on `train`, regularized by the error on `held`.

    Images are represented by their principal components. The linear part is a ridge regression with one penalty per
    component: noise hides fine detail long before it hides color. Then the hidden layer, whose output starts at zero,
    learns the residual by Adam; the epoch (or the start) with the lowest error on `held` wins.

    Args:
        train: its first images define the principal components.
        held: pairs of images that are not in `train`.
        key: draws the first weights and the order of the examples.

    Guarantees:
        The hidden layer never raises the squared error of the held-out components.
        `error` is not finite if a feature is not finite. With one thread, the same arguments give the same numbers.
    """
    mean, directions = _principal(train.images.flatten(1)[:_ATLAS], plan.components)
    spread = train.features.std(dim=0, correction=0)
    spread = torch.where(spread < _CONSTANT, torch.inf, spread)
    scale = Scale(train.features.mean(dim=0), spread, mean, directions)
    inputs, held_inputs = scale.inputs(train.features), scale.inputs(held.features)
    wanted, held_wanted = scale.components(train.images), scale.components(held.images)
    offset = wanted.mean(dim=0)
    none = (inputs.new_zeros(inputs.shape[1], 0), inputs.new_zeros(0), inputs.new_zeros(0, len(offset)))
    layers = Layers(offset, inputs.new_zeros(inputs.shape[1], len(offset)), *none)
    if not bool(inputs.isfinite().all() and held_inputs.isfinite().all()):
        return Inverter(scale, layers, pixels, math.nan)
    layers = layers._replace(linear=_ridge(Pairs(inputs, wanted - offset), Pairs(held_inputs, held_wanted - offset)))
    if plan.hidden:
        rest = Pairs(inputs, wanted - layers(inputs)), Pairs(held_inputs, held_wanted - layers(held_inputs))
        first, bias, second = _learn(*rest, plan, key)
        layers = layers._replace(first=first, bias=bias, second=second)
    network = Inverter(scale, layers, pixels, math.nan)
    return network._replace(error=float((network(held.features) - held.images.flatten(1)).square().mean()))


def _principal(images: Tensor, components: int) -> tuple[Tensor, Tensor]:
    """Mean [D] and first principal directions [D, k] of images [n, D]; k is at most `components`, n and D."""
    mean = images.mean(dim=0)
    off = (images - mean).double()
    if len(off) < off.shape[1]:
        _, vectors = torch.linalg.eigh(off @ off.T)
        # orthonormal even if a direction has almost no variance
        directions, _ = torch.linalg.qr(off.T @ vectors.flip(1)[:, :components])
    else:
        _, vectors = torch.linalg.eigh(off.T @ off)
        directions = vectors.flip(1)[:, :components]
    return mean, directions.to(images.dtype)


def _ridge(train: Pairs, held: Pairs) -> Tensor:
    """[f, k] weights; each column has the penalty with the least error on `held`; `images` are components [n, k]."""
    inputs = train.features
    values, vectors = torch.linalg.eigh((inputs.T @ inputs).double() / len(inputs))
    rotated = vectors.T @ ((inputs.T @ train.images).double() / len(inputs))
    turned = held.features.double() @ vectors
    tried = torch.stack([rotated / (values.clamp(min=0.0) + ridge)[:, None] for ridge in _RIDGES])
    errors = (turned @ tried - held.images).square().mean(dim=1)
    columns = torch.arange(train.images.shape[1])
    chosen: Tensor = vectors @ tried[errors.argmin(dim=0), :, columns].T
    return chosen.to(inputs.dtype)


def _learn(train: Pairs, held: Pairs, plan: Plan, key: Key) -> tuple[Tensor, Tensor, Tensor]:
    """The hidden layer: weights [f, h], bias [h] and weights [h, k]; `images` are residual components [n, k]."""
    f, k = train.features.shape[1], train.images.shape[1]
    first = rng.normal(key.child("first"), (f, plan.hidden)).mul_(math.sqrt(2 / f)).to(train.features).requires_grad_()
    bias = train.features.new_zeros(plan.hidden, requires_grad=True)
    second = train.features.new_zeros(plan.hidden, k, requires_grad=True)
    weights = [first, bias, second]
    adam = torch.optim.Adam(weights, lr=plan.lr)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(adam, plan.epochs)
    lowest, best, waited = float(held.images.square().mean()), [weight.detach().clone() for weight in weights], 0
    for epoch in range(plan.epochs):
        order = torch.from_numpy(rng.permutation(key.child("order", epoch), len(train.features)))
        for rows in torch.split(order, _BATCH):
            guess = torch.addmm(bias, train.features[rows], first).relu() @ second
            adam.zero_grad()
            (guess - train.images[rows]).square().mean().backward()  # type: ignore[no-untyped-call]
            adam.step()
        schedule.step()
        with torch.no_grad():
            guess = torch.addmm(bias, held.features, first).relu() @ second
            error = float((guess - held.images).square().mean())
        waited += 1
        if error < lowest:
            lowest, best, waited = error, [weight.detach().clone() for weight in weights], 0
        if waited == _PATIENCE:
            break
    return best[0], best[1], best[2]
