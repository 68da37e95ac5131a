"""What an attacker believes about inputs before a message: a law of coordinates, in which a search moves."""

from __future__ import annotations

import functools
import hashlib
import importlib
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from leakgauge.attacks._engine.matching import Evaluation, Function
from leakgauge.harness.core.errors import suggestion

_SMOOTH = 1e-2
"""Width of the rounded tip of |difference|, in units of the pixel range: L-BFGS needs a gradient at zero."""

_FLOOR = 2e-4
"""Smallest variance in any direction, in squared pixel ranges: auxiliary data are few, and victims have more detail."""

_MOST = 3000
"""Auxiliary inputs that are used: more take time with the third power."""

_COMPONENTS = 1000
"""Components that are kept, at most. For CIFAR-10, 1,500 exceed the floor; SSIM with all, 1,000 and 500 of them: 0.937,
0.932 and 0.915 behind noise of 0.003, the same behind noise of 0.03, in 1, 0.65 and 0.55 of the time."""

_ENTRIES = 2**24
"""Entries of the basis, at most: of 3 x 224 x 224 pixels 111 components are kept."""


class Prior(Protocol):
    """A law of independent inputs: x = inputs(z), where z has a density."""

    @property
    def words(self) -> str:
        """What it is and what it was fitted to, for the report."""

    @property
    def centered(self) -> bool:
        """Whether z is about standard normal, and a search begins at 0; otherwise at random inputs."""

    def inputs(self, z: Tensor) -> Tensor:
        """[..., p] the inputs at z [..., k]; differentiable."""

    def coordinates(self, x: Tensor) -> Tensor:
        """[..., k] the coordinates of inputs [..., p]."""

    def energy(self, z: Tensor, x: Tensor) -> Tensor:
        """[m]: -log p(z) up to a constant, for z [m, b, k] at x = inputs(z) [m, b, *input_shape]; differentiable."""


@dataclass(frozen=True)
class ImagePrior:
    """-log p(x) up to a constant: neighboring pixels are alike, and all pixels are in [0, 1]; the coordinates are x.

    Attributes:
        tv: weight of the total variation: a Laplace law of scale 1/tv for differences of neighboring pixels.
        box: weight of the squared distance to [0, 1].
    """

    words: ClassVar[str] = "total variation"
    centered: ClassVar[bool] = False

    tv: float
    box: float

    def __post_init__(self) -> None:
        for name, value in (("tv", self.tv), ("box", self.box)):
            if not 0 <= value < float("inf"):
                raise ValueError(f"expected {name} >= 0, got {name}={value}")

    def inputs(self, z: Tensor) -> Tensor:
        """Implement `Prior`."""
        return z

    def coordinates(self, x: Tensor) -> Tensor:
        """Implement `Prior`."""
        return x

    def energy(self, z: Tensor, x: Tensor) -> Tensor:
        """Implement `Prior`; for inputs without height and width, the box term alone."""
        outside = self.box * _outside(x)
        if x.ndim != 5:
            return outside
        across = (x[..., :, 1:] - x[..., :, :-1]).flatten(1)
        down = (x[..., 1:, :] - x[..., :-1, :]).flatten(1)
        differences = torch.cat([across, down], 1)
        variation = ((differences.square() + _SMOOTH**2).sqrt() - _SMOOTH).sum(1)
        return self.tv * variation + outside


@dataclass(frozen=True, eq=False)
class GaussianPrior:
    """-log p(x) up to a constant, for x ~ N(mean, S), and all entries in [0, 1].

    S = F F^T + least I with orthogonal columns of F, and x = mean + F a + sqrt(least) b. The coordinates z = (a, b) are
    standard normal: a search has one scale in every direction that the prior knows. They are k more than the entries of
    an input, whose energy is the least energy of its coordinates.

    Attributes:
        mean: [p].
        factor: F, [p, k].
        least: the variance that every direction has.
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
        """Implement `Prior`, by those of the least energy: F^T S^-1 and sqrt(least) S^-1, times x - mean."""
        off = x - self.mean
        a = (off @ self.factor) / (self.factor.square().sum(0) + self.least)
        return torch.cat([a, (off - a @ self.factor.T) / math.sqrt(self.least)], dim=-1)

    def energy(self, z: Tensor, x: Tensor) -> Tensor:
        """Implement `Prior`."""
        return 0.5 * z.square().sum((1, 2)) + self.box * _outside(x)


def gaussian_prior(x: Tensor, box: float) -> GaussianPrior:
    """The prior with the mean and the covariance of the first 3,000 inputs [n, *input_shape]; the last fits are kept.

    Of large inputs only the leading principal components are kept; the other directions share what variance is left.

    Raises:
        ValueError: fewer than two inputs, or one that is not finite.
    """
    if len(x) < 2 or not bool(x.isfinite().all()):
        raise ValueError(f"a Gaussian prior needs at least two finite auxiliary inputs, got {len(x)}")
    used = x[:_MOST].flatten(1).contiguous()
    return _fit(_Data(hashlib.blake2b(used.numpy().tobytes()).digest(), used), box)


PRIORS: dict[str, Callable[[Tensor, float], Prior]] = {"gaussian": gaussian_prior}
"""Priors that are fitted to auxiliary inputs [n, *input_shape], with the weight of the box; besides `module:function`
of somebody's own."""


def fitting(name: str) -> Callable[[Tensor, float], Prior]:
    """The function that fits the prior called `name`, which may be `module:function`.

    Raises:
        ValueError: there is none.
    """
    if name in PRIORS:
        return PRIORS[name]
    module, _, attribute = name.partition(":")
    if not attribute:
        raise ValueError(f"no prior {name!r}{suggestion(name, ['tv', *PRIORS, 'module:function'])}")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"no prior {name!r}: {error}") from error
    if not callable(found):
        raise ValueError(f"expected a function of auxiliary inputs for prior {name!r}, got {found!r}")
    return found  # type: ignore[no-any-return]


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
    first = max(len(values) - min(_COMPONENTS, _ENTRIES // p), 0)
    least = max(_FLOOR, float(values[:first].sum()) / max(p - len(values) + first, 1))
    kept = values > least
    kept[:first] = False
    basis = vectors[:, kept] if p <= n else off.T @ vectors[:, kept] / values[kept].sqrt()
    factor = basis * (values[kept] - least).sqrt()
    dtype, few = data.x.dtype, ", fewer than the entries of one" if n < p else ""
    words = f"normal law of {n:,} auxiliary inputs{few}"
    return GaussianPrior(mean.to(dtype), factor.to(dtype).contiguous(), least, box, words)


@dataclass(frozen=True, eq=False)
class Believed:
    """A function of inputs plus `weight` times the energy, as a function of the prior's coordinates [m, images k]."""

    function: Function
    prior: Prior
    shape: tuple[int, ...]
    images: int
    weight: float = 1.0

    def __call__(self, candidates: Tensor, instances: Tensor) -> Evaluation:
        """Implement `Function`."""
        z = candidates.detach().view(len(candidates), self.images, -1).requires_grad_()
        x = self.prior.inputs(z)
        energy = self.weight * self.prior.energy(z, x.view(len(x), self.images, *self.shape))
        value, slope = self.function(x.detach().flatten(1), instances)
        (pulled,) = torch.autograd.grad([energy, x], z, [torch.ones_like(energy), slope.view(x.shape)])
        return Evaluation(value + energy.detach(), pulled.flatten(1))


def _outside(x: Tensor) -> Tensor:
    """[m], the squared distance of x [m, ...] to [0, 1]."""
    return (x - x.clamp(0, 1)).square().flatten(1).sum(1)
