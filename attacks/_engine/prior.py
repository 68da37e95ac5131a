"""A normal prior of inputs, fitted to the attacker's own data, and the coordinates in which it is standard normal."""

from __future__ import annotations

import functools
import hashlib
import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from leakgauge.attacks._engine.matching import Evaluation, Function

_FLOOR = 2e-4
"""Smallest variance in any direction, in squared pixel ranges: auxiliary data are few, and victims have more detail."""

_MOST = 3000
"""Auxiliary inputs that are used: more take time with the third power."""


@dataclass(frozen=True, eq=False)
class GaussianPrior:
    """-log p(x) up to a constant, for independent inputs x ~ N(mean, S), and all entries in [0, 1].

    S = _FLOOR I + U diag(variances - _FLOOR) U^T. An input is mean + S^(1/2) v, with v standard normal: a search over v
    has the same scale in every direction that the prior knows.

    Attributes:
        mean: [p].
        basis: U, [p, k], the k directions of more variance than the floor.
        deviation: [k], the square roots of their variances.
        box: weight of the squared distance to [0, 1].
    """

    mean: Tensor = field(repr=False)
    basis: Tensor = field(repr=False)
    deviation: Tensor = field(repr=False)
    box: float

    def __call__(self, x: Tensor) -> Tensor:
        """[m] for x [m, b, *input_shape]."""
        flat = x.flatten(2)
        return 0.5 * self.coordinates(flat).square().sum((1, 2)) + self.outside(flat)

    def outside(self, x: Tensor) -> Tensor:
        """[m] for x [m, b, p]: the part of the box."""
        return self.box * (x - x.clamp(0, 1)).square().sum((1, 2))

    def root(self, v: Tensor) -> Tensor:
        """S^(1/2) v, for v [..., p]."""
        least = math.sqrt(_FLOOR)
        return least * v + ((v @ self.basis) * (self.deviation - least)) @ self.basis.T

    def inputs(self, v: Tensor) -> Tensor:
        """The inputs [..., p] at these coordinates."""
        return self.mean + self.root(v)

    def coordinates(self, x: Tensor) -> Tensor:
        """The coordinates [..., p] of inputs."""
        least, off = math.sqrt(_FLOOR), x - self.mean
        return off / least + ((off @ self.basis) * (1 / self.deviation - 1 / least)) @ self.basis.T


def fitted(x: Tensor, box: float) -> GaussianPrior:
    """The prior with the mean and the covariance of the first 3,000 inputs [n, *input_shape]; the last fits are kept.

    Raises:
        ValueError: fewer than two inputs, or one that is not finite.
    """
    if len(x) < 2 or not bool(x.isfinite().all()):
        raise ValueError(f"a Gaussian prior needs at least two finite auxiliary inputs, got {len(x)}")
    used = x[:_MOST].flatten(1).contiguous()
    return _fit(_Data(hashlib.blake2b(used.numpy().tobytes()).digest(), used), box)


@dataclass(frozen=True)
class _Data:
    """Inputs [n, p], equal if their digests are."""

    digest: bytes
    x: Tensor = field(compare=False)


@functools.lru_cache(maxsize=4)
def _fit(data: _Data, box: float) -> GaussianPrior:
    """The eigenvectors of the smaller of the two products of the centered inputs."""
    n, p = data.x.shape
    mean = data.x.double().mean(0)
    off = (data.x.double() - mean) / math.sqrt(n - 1)
    values, vectors = torch.linalg.eigh(off.T @ off if p <= n else off @ off.T)
    kept = values > _FLOOR
    basis = vectors[:, kept] if p <= n else off.T @ vectors[:, kept] / values[kept].sqrt()
    dtype = data.x.dtype
    return GaussianPrior(mean.to(dtype), basis.to(dtype), values[kept].sqrt().to(dtype), box)


@dataclass(frozen=True, eq=False)
class Whitened:
    """A function of inputs plus the prior, as a function of the prior's coordinates [m, images p]."""

    function: Function
    prior: GaussianPrior
    images: int

    def __call__(self, candidates: Tensor, instances: Tensor) -> Evaluation:
        """Implement `Function`."""
        v = candidates.view(len(candidates), self.images, -1)
        x = self.prior.inputs(v)
        value, slope = self.function(x.flatten(1), instances)
        excess = x - x.clamp(0, 1)
        slope = slope.view(x.shape) + 2 * self.prior.box * excess
        whole = value + self.prior.outside(x) + 0.5 * v.square().sum((1, 2))
        return Evaluation(whole, (self.prior.root(slope) + v).flatten(1))
