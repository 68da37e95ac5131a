"""PrivUnit: the cap of the unit sphere in which vectors are denser, and the distribution of such a vector."""

from __future__ import annotations

import functools
import math
import sys
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from scipy import optimize, special
from torch import Tensor

from leakgauge.harness.core import rng
from leakgauge.harness.core.contract import Likelihood
from leakgauge.harness.core.distribution import (
    DISTINCT,
    Branches,
    DistributionError,
    Integers,
    MessageDistribution,
    PairLoss,
    Reading,
    expect_size,
    numbers,
)
from leakgauge.harness.core.rng import Key
from leakgauge.harness.core.stats import Numbers
from leakgauge.harness.core.vec import Vector

_DEEPEST = 600.0  # epsilon from which the cap shrinks no further: float64 represents its mass, and 2^-53 of it
_LEAST = -740.0  # logarithm of the smallest number above zero in float64
UNIT = 1e-6  # how far from 1 the norm of an honest message may be after rounding to float32
_ROUNDING = 2.0**-23  # how far this rounding, and that of a candidate's direction, may move a unit vector
_RESOLVED = 1e-3  # radius of the smallest cap in which float32 numbers are dense enough to test their distribution
TINY = 1e-30  # a shorter candidate counts as without direction; keeps slopes within float32


class Cap(NamedTuple):
    """The cap {v: <u, v> >= threshold} of the unit sphere around a direction u, in which vectors are denser.

    With c = 1 / (e^epsilon - 1), the density relative to the uniform one is (1 + c) / (mass + c) in the cap and
    c / (mass + c) elsewhere. Under the uniform density, (1 - <u, v>) / 2 is Beta((d - 1) / 2, (d - 1) / 2).

    Attributes:
        depth: (1 - threshold) / 2, exact for thresholds near 1.
        mass: share of the sphere in the cap.
        density: logarithm of the density in the cap; elsewhere it is epsilon less.
        mean: m = E<u, v>, so that E v = m u.
    """

    dim: int
    epsilon: float
    depth: float
    mass: float
    density: float
    mean: float

    def sample(self, key: Key) -> float:
        """(1 - <u, v>) / 2 by the inverse of its cdf, in the cap or outside."""
        chosen, place = rng.uniform(key, (2,), dtype=torch.float64).tolist()
        near, a = chosen < math.exp(self.density) * self.mass, (self.dim - 1) / 2
        if self.dim == 1:
            return float(not near)
        below = (1 - place) * (self.mass if near else 1 - self.mass)

        def excess(z: float) -> float:
            return math.log(max(special.betainc(a, a, math.exp(z)), sys.float_info.min) / below)

        # not scipy's inverse of this, which has no result for small probabilities at a = 3
        x = math.exp(optimize.brentq(excess, _LEAST, 0.0, xtol=1e-15))
        return x if near else 1 - x

    def log_density(self, t: Tensor, *, blurred: bool, rounding: float = _ROUNDING) -> Tensor:
        """Logarithm of the density at <u, v> = t; blurred: with a logistic error of threshold / max(epsilon, 1)."""
        if not blurred:
            radius = 2 * math.sqrt(self.depth) + rounding
            return self.density - self.epsilon * (t < 1 - radius**2 / 2).to(t)
        threshold = 1 - 2 * self.depth
        z = (t - threshold) * (max(self.epsilon, 1.0) / threshold)
        near, far = torch.nn.functional.logsigmoid(z), torch.nn.functional.logsigmoid(-z)
        return self.density + torch.logaddexp(near, far - self.epsilon)


@functools.lru_cache(1 << 10)
def best_cap(dim: int, epsilon: float) -> Cap:
    """The cap with the least variance of the unbiased estimate v / m, which is 1 / m^2 - 1.

    m = E[<u, v>; cap] / (mass + c), with E under the uniform density. It is largest where the threshold equals m.
    """
    odds, a = math.exp(-epsilon) / -math.expm1(-epsilon), (dim - 1) / 2

    def excess(z: float) -> float:
        """E[<u, v> - threshold; cap] - threshold * c at the depth e^z."""
        y, least = math.exp(z), max(odds, math.exp(-_DEEPEST))
        return float(2 * y * special.betainc(a, a, y) - special.betainc(a + 1, a, y) - (1 - 2 * y) * least)

    depth, mass, beyond = 0.0, 0.5, 0.0  # d = 1: two points, of which the cap has one
    if dim > 1:
        depth = math.exp(optimize.bisect(excess, _LEAST, math.log(0.5), xtol=1e-15))
        mass, beyond = (float(special.betainc(a + more, a, depth)) for more in (0, 1))
    density = math.log1p(odds) - math.log(mass + odds)
    return Cap(dim, epsilon, depth, mass, density, (mass - beyond) / (mass + odds))


@dataclass(frozen=True, eq=False)
class OnSphere(MessageDistribution):
    """The distribution of a unit vector for the direction u [d], reversed with probability (1 - share) / 2.

    A share of 0 is that of an update of zero, whose vector is uniform.
    """

    u: Numbers
    share: float
    depth: float
    epsilon: float
    redraws = True

    @property
    def distinct(self) -> bool:
        return len(self.u) >= DISTINCT

    def loss(self, other: MessageDistribution, among: Integers | None = None) -> PairLoss | None:
        """The largest log ratio: between a cap and the rest, unless both have one axis; then in the same region."""
        if not isinstance(other, OnSphere) or among is not None or self.epsilon != other.epsilon:
            return None
        one, two, cosine = self._regions, other._regions, float(self.u @ other.u)
        if self.share and other.share and abs(cosine) > 1 - 1e-12:
            return PairLoss(float(np.abs(one - (two if cosine > 0 else two[[1, 0, 2]])).max()))
        return PairLoss(float(max(one.max() - two.min(), two.max() - one.min())))

    def branches(self, wire: bytes) -> Branches | None:
        """The vector as one from a cap, and as one from outside."""
        held = float(self._signs @ (np.array(self._places(self._sent(wire))) <= self.depth))
        with np.errstate(divide="ignore"):
            inside, outside = np.log([held / self._mass, (1 - held) / (1 - self._mass)])
        return Branches(float(inside), float(outside), -float(special.logit(self._mass))) if self.share else None

    def log_density(self, v: Numbers) -> Numbers:
        """[n] that of unit vectors [n, d], relative to the uniform density."""
        places = (1 - v @ self.u) / 2
        return np.select([places <= self.depth, 1 - places <= self.depth], self._regions[:2], self._regions[2])

    def read(self, wire: bytes, own: Key) -> Reading:
        """The cdf of <u, v>; then of each coordinate orthogonal to u, given those before; the last is a sign."""
        v, d = self._sent(wire), len(self.u)
        draw, bits = float(rng.uniform(own, (1,), dtype=torch.float64)), None
        if d == 1:
            chance, first, head = self._cdf(0.0), bool(self.u @ v > 0), np.zeros(0)
        else:
            # a reflection that moves u to the first axis
            axis = self.u + np.copysign(np.eye(1, d)[0], self.u[0])
            rest = (v - axis * (2 * (axis @ v) / (axis @ axis)))[1:]
            chance, first, a = 0.5, bool(rest[-1] < 0), np.arange(d - 2, 0, -1) / 2
            shares = rest[:-1] / np.sqrt(np.cumsum(np.square(rest[::-1]))[:0:-1])
            head = np.append(self._cdf(self._places(v)[0]), special.betainc(a, a, (1 + shares) / 2))
            bits = (np.frombuffer(wire, "<u4") & 1).astype(np.int64)
        last = chance * draw if first else chance + (1 - chance) * draw
        return Reading(np.append(head, last), np.full(d, -1), bits)

    def _uniform(self, x: float) -> float:
        """The share of the sphere whose (1 - <u, v>) / 2 is at most x."""
        a = (len(self.u) - 1) / 2
        return float(special.betainc(a, a, x)) if a else 0.5

    @property
    def _mass(self) -> float:
        return self._uniform(self.depth)

    @property
    def _signs(self) -> Numbers:
        return (1 + self.share * np.array([1.0, -1.0])) / 2

    @property
    def _levels(self) -> tuple[float, float]:
        """Logarithms of the density inside and outside, before the reversal."""
        if not self.share:
            return 0.0, 0.0
        mass = self._mass
        logit = self.epsilon + float(special.logit(mass))
        return float(special.log_expit(logit)) - math.log(mass), float(special.log_expit(-logit)) - math.log1p(-mass)

    @property
    def _regions(self) -> Numbers:
        """Logarithms of the density in the cap, in the opposite cap and elsewhere."""
        near, far = self._levels
        with np.errstate(divide="ignore"):
            signs = np.log(self._signs)
        return np.append(np.logaddexp(signs + near, signs[::-1] + far), far)

    def _sent(self, wire: bytes) -> Numbers:
        expect_size(wire, 4 * len(self.u))
        v = np.frombuffer(wire, "<f4").astype(np.float64)
        norm = float(np.linalg.norm(v))
        if not abs(norm - 1) <= UNIT:
            raise DistributionError(f"a vector of norm {norm:.9g}, expected 1")
        return v / norm

    def _places(self, v: Numbers) -> tuple[float, float]:
        """(1 -+ <u, v>) / 2."""
        return float(np.square(self.u - v).sum() / 4), float(np.square(self.u + v).sum() / 4)

    def _cdf(self, x: float) -> float:
        """Of (1 - <u, v>) / 2."""
        (near, far), mass = self._levels, self._mass
        inside, outside = math.exp(near), math.exp(far)
        below, above = (self._uniform(place) for place in (x, 1 - x))
        one, other = (inside * min(share, mass) + outside * max(share - mass, 0.0) for share in (below, above))
        return float(self._signs @ (one, 1 - other))


class Channel(NamedTuple):
    """PrivUnit's choice of a unit vector; parameters as in `PrivUnit`."""

    clip: float
    epsilon: float
    form: str

    def distribution(self, update: Vector) -> OnSphere | None:
        """That of the vector; None if the cap's radius is below 1e-3, where float32 numbers are too coarse."""
        values, depth = numbers(update), best_cap(update.numel(), self.epsilon).depth
        if len(values) > 1 and 2 * math.sqrt(depth) < _RESOLVED:
            return None
        norm = float(np.linalg.norm(values))
        share = min(norm / self.clip, 1.0) if self.form == "ball" else float(norm > 0)
        return OnSphere(values / norm if norm else np.eye(1, len(values))[0], share, depth, self.epsilon)

    def error_variance(self, count: int, dim: int) -> Tensor:
        """[count, dim] C^2 (1 / m^2 - 1) / d, the mean over the coordinates."""
        return torch.full((count, dim), self.clip**2 * (best_cap(dim, self.epsilon).mean ** -2 - 1) / dim)

    def log_density(self, update: Tensor, v: Tensor, *, blurred: bool, rounding: float = _ROUNDING) -> Tensor:
        """[n] logarithms of the densities of unit vectors v [n, d] for updates [n, d] or [d], as in `Cap`."""
        cap, norm = best_cap(v.shape[-1], self.epsilon), torch.linalg.vector_norm(update.double(), dim=-1)
        t = (update.double() * v).sum(-1) / norm.clamp(min=TINY)
        density = cap.log_density(t, blurred=blurred, rounding=rounding)
        if self.form == "ball":
            kept = (1 + (norm / self.clip).clamp(max=1.0)) / 2
            opposite = cap.log_density(-t, blurred=blurred, rounding=rounding)
            density = torch.logaddexp(kept.log() + density, (1 - kept).clamp(min=1e-300).log() + opposite)
        return density if blurred else torch.where(norm > 0, density, 0.0)

    def score(self, sent: Tensor, *, blurred: bool) -> Likelihood:
        """The likelihood of unit vectors [n, d] float64."""
        cap = best_cap(sent.shape[-1], self.epsilon)
        best = float(cap.log_density(torch.ones((), dtype=torch.float64), blurred=blurred))
        return lambda update: (best - self.log_density(update, sent, blurred=blurred)).to(update.dtype)
