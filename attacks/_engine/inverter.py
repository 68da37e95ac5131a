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


class Inverter(NamedTuple):
    """The fitted network, for features x [f] that it scales to mean 0 and variance 1.

    An image is the mean [D] plus components along directions [D, k], where
    components = offset [k] + x @ linear [f, k] + relu(x @ first [f, h] + bias [h]) @ second [h, k].

    Attributes:
        center, spread: [f], of the features; a constant feature has an infinite spread.
        pixels: whether to clamp images to [0, 1].
        error: held-out mean squared error per entry.
    """

    center: Tensor
    spread: Tensor
    mean: Tensor
    directions: Tensor
    offset: Tensor
    linear: Tensor
    first: Tensor
    bias: Tensor
    second: Tensor
    pixels: bool
    error: float = math.nan

    def components(self, x: Tensor) -> Tensor:
        """[n, k]: the components for normalized features [n, f]."""
        straight = torch.addmm(self.offset, x, self.linear)
        return straight + torch.addmm(self.bias, x, self.first).relu() @ self.second

    def __call__(self, features: Tensor) -> Tensor:
        """[n, D]: the images for features [n, f]."""
        components = self.components((features - self.center) / self.spread)
        flat = torch.addmm(self.mean, components, self.directions.T)
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
    center, spread = train.features.mean(dim=0), train.features.std(dim=0, correction=0)
    spread = torch.where(spread < _CONSTANT, torch.inf, spread)
    x, held_x = ((pairs.features - center) / spread for pairs in (train, held))
    wanted, held_wanted = ((pairs.images.flatten(1) - mean) @ directions for pairs in (train, held))
    offset = wanted.mean(dim=0)
    none = (x.new_zeros(x.shape[1], 0), x.new_zeros(0), x.new_zeros(0, len(offset)))
    linear = x.new_zeros(x.shape[1], len(offset))
    network = Inverter(center, spread, mean, directions, offset, linear, *none, pixels)
    if not bool(x.isfinite().all() and held_x.isfinite().all()):
        return network
    network = network._replace(linear=_ridge(Pairs(x, wanted - offset), Pairs(held_x, held_wanted - offset)))
    if plan.hidden:
        rest, held_rest = wanted - network.components(x), held_wanted - network.components(held_x)
        first, bias, second = _learn(Pairs(x, rest), Pairs(held_x, held_rest), plan, key)
        network = network._replace(first=first, bias=bias, second=second)
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
