"""A normal distribution of inputs, fitted to data, with standard normal coordinates."""

from __future__ import annotations

import functools
import hashlib
import math
from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch
from torch import Tensor

_FLOOR = 2e-4
"""Smallest variance in any direction, in squared pixel ranges: auxiliary data are few, and victims have more detail."""

MOST = 3000
"""Maximum number of auxiliary inputs; the time grows with its third power."""

_COMPONENTS = 1000
"""Maximum number of components. For CIFAR-10, 1,500 exceed the floor; SSIM with all, 1,000 and 500 of them: 0.937,
0.932 and 0.915 behind noise of 0.003, equal behind noise of 0.03, in 1, 0.65 and 0.55 of the time."""

_AXES = 4096  # maximum number of entries of an input for which all directions are computed
_ENTRIES = 2**24  # maximum number of entries of the basis; for 3 x 224 x 224 pixels, 111 components are kept


@dataclass(frozen=True, eq=False)
class GaussianPrior:
    """-log p(x) up to a constant, for x ~ N(mean, S), with a penalty on entries outside [0, 1].

    S = F F^T + least I with orthogonal columns of F, and x = mean + F a + sqrt(least) b. The coordinates z = (a, b) are
    standard normal, so a search has the same scale in every direction of the prior. There are k more coordinates than
    entries of an input; the energy of an input is the least energy of its coordinates.

    Attributes:
        mean: [p].
        factor: F, [p, k].
        least: the smallest variance of any direction.
        box: weight of the squared distance to [0, 1].

    Source: Tipping and Bishop 1999, "Probabilistic principal component analysis", eq. (2), for the coordinates.
    """

    centered: ClassVar[bool] = True

    mean: Tensor = field(repr=False)
    factor: Tensor = field(repr=False)
    least: float
    box: float
    words: str = ""

    def inputs(self, z: Tensor) -> Tensor:
        """Implement `Prior`."""
        a, b = z.tensor_split([self.factor.shape[1]], dim=-1)
        return torch.add(self.mean + a @ self.factor.T, b, alpha=math.sqrt(self.least))

    def coordinates(self, x: Tensor) -> Tensor:
        """Implement `Prior`, by the coordinates of least energy: F^T S^-1 and sqrt(least) S^-1, times x - mean."""
        off = x - self.mean
        a = (off @ self.factor) / (self.factor.square().sum(0) + self.least)
        return torch.cat([a, (off - a @ self.factor.T) / math.sqrt(self.least)], dim=-1)

    @functools.cached_property
    def axes(self) -> tuple[Tensor, Tensor]:
        """Orthonormal directions [p, k], and the variances [k] along them, float64.

        First come the directions of `factor`, by decreasing variance, then the rest of the p directions, all with the
        variance `least`; the rest is left out if an input has more than `_AXES` entries.
        """
        squares, order = self.factor.double().square().sum(0).sort(descending=True)
        basis = self.factor.double()[:, order] / squares.sqrt()
        p, k = self.factor.shape
        if p <= _AXES:
            rest = torch.linalg.qr(basis, mode="complete").Q[:, k:]
            basis, squares = torch.cat([basis, rest], 1), torch.cat([squares, squares.new_zeros(p - k)])
        return basis, squares + self.least

    def energy(self, z: Tensor, x: Tensor) -> Tensor:
        """Implement `Prior`."""
        return 0.5 * z.square().sum((1, 2)) + self.box * outside(x)

    def pull(self, z: Tensor, x: Tensor, slope: Tensor, weight: float) -> Tensor:
        """[m, b, k]: the slope in z of `weight` times the energy plus a function of x = inputs(z), by hand.

        Autograd takes a tenth of the time of a search of small images.

        Args:
            x, slope: [m, b, p], the inputs, and the function's slope in them.
        """
        whole = torch.add(slope, x - x.clamp(0, 1), alpha=2 * weight * self.box)
        pulled = torch.cat([whole @ self.factor, whole * math.sqrt(self.least)], dim=-1)
        return pulled.add_(z, alpha=weight)


def gaussian_prior(x: Tensor, box: float) -> GaussianPrior:
    """The prior with the mean and the covariance of the first 3,000 inputs [n, *input_shape]; the last fits are cached.

    For large inputs, only the leading principal components are kept; the other directions share the remaining variance.

    Raises:
        ValueError: there are fewer than two inputs, or one is not finite.
    """
    if len(x) < 2 or not bool(x.isfinite().all()):
        raise ValueError(f"a Gaussian prior needs at least two finite auxiliary inputs, got {len(x)}")
    used = x[:MOST].flatten(1).contiguous()
    fitted = _fit(_Data(hashlib.blake2b(used.cpu().numpy().tobytes()).digest(), used.cpu()), box)
    if x.device.type == "cpu":
        return fitted
    return replace(fitted, mean=fitted.mean.to(x.device), factor=fitted.factor.to(x.device))


@dataclass(frozen=True)
class _Data:
    """Inputs [n, p]; two are equal if their digests are equal."""

    digest: bytes
    x: Tensor = field(compare=False)


@functools.lru_cache(maxsize=4)
def _fit(data: _Data, box: float) -> GaussianPrior:
    """The prior from the eigenvectors of the smaller of the two products of the centered inputs."""
    n, p = data.x.shape
    mean = data.x.double().mean(0)
    off = (data.x.double() - mean) / math.sqrt(n - 1)
    values, vectors = torch.linalg.eigh(off.T @ off if p <= n else off @ off.T)
    first = max(len(values) - min(_COMPONENTS, _ENTRIES // p), 0)
    least = max(_FLOOR, float(values[:first].sum()) / max(p - len(values) + first, 1))
    chosen = values > least
    chosen[:first] = False
    basis = vectors[:, chosen] if p <= n else off.T @ vectors[:, chosen] / values[chosen].sqrt()
    factor = basis * (values[chosen] - least).sqrt()
    dtype, few = data.x.dtype, ", fewer than the entries of one" if n < p else ""
    words = f"normal distribution of {n:,} auxiliary inputs{few}"
    return GaussianPrior(mean.to(dtype), factor.to(dtype).contiguous(), least, box, words)


def outside(x: Tensor) -> Tensor:
    """[m], the squared distance of x [m, ...] to [0, 1]."""
    return (x - x.clamp(0, 1)).square().flatten(1).sum(1)
