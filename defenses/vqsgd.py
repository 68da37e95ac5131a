"""vqSGD with the cross-polytope: a message holds a few of 2d points, each sent by randomized response."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from leakgauge.defenses._common.clip import clip_l2
from leakgauge.harness.core import rng
from leakgauge.harness.core.checks import check_update, positive
from leakgauge.harness.core.claim import Arithmetic, Claim, Proof, Unit, claim_over
from leakgauge.harness.core.codec import pack_levels, unpack_levels, width_of
from leakgauge.harness.core.contract import Defense, Likelihood, Link, Links, Setting
from leakgauge.harness.core.distribution import SHARES, Choices, Integers, MessageDistribution, projected
from leakgauge.harness.core.errors import MessageError
from leakgauge.harness.core.rng import Key
from leakgauge.harness.core.vec import Vector

# Smallest probability of a point in the likelihood, in units of 1 / 2d; keeps the gradients within float32
_FLOOR = 1e-12


@dataclass(frozen=True)
class VQSGD(Defense[None, None]):
    """vqSGD: sends the update as a few corners of a cross-polytope, each by randomized response.

    v, the update clipped and divided by the clip, is the mean of a distribution on the 2d points +-sqrt(d) e_i. Each
    repetition draws one point. It sends that point with probability e^epsilon / (e^epsilon + 2d - 1), else one of the
    other points, drawn uniformly.

    Args:
        clip: C, bound on the l2 norm, in units of the update.
        epsilon: privacy budget of one repetition, as sqSGD's comparison seems to have run it. A message has about
            `repeats` times this epsilon, which that comparison ignores. Default 400, as in sqSGD's comparison on LeNet
            (which has C = 10).
        repeats: b, points per message. Default 113: at d = 119,850 (18 bits per point), the 2048 bits of sqSGD's
            message.

    Guarantees:
        Messages have ceil(b * ceil(log2 2d) / 8) bytes.
        The estimate is unbiased for the clipped update.
        Randomized response replaces a point with exactly the stated probability if that is above 2^-53. Below 2^-53,
        this implementation never replaces a point; it is then (epsilon, b times that probability)-DP.

    Raises:
        ValueError: a parameter is out of range.

    Source: Gandikota et al. 2019, "vqSGD: vector quantized stochastic gradient descent", cross-polytope scheme and its
        randomized response, as in sqSGD's baseline. The paper's epsilon of one point is not attained: the likeliest
        point has at most probability p = 1/sqrt(d) + (1 - 1/sqrt(d)) / 2d, so a repetition has the epsilon ln(1 +
        (e^epsilon - 1) p).
    """

    arithmetic: ClassVar[Arithmetic] = Arithmetic.ROUNDING_SAFE

    clip: float = 1.0
    epsilon: float = 400.0
    repeats: int = 113

    def __post_init__(self) -> None:
        positive(clip=self.clip, epsilon=self.epsilon, repeats=self.repeats)

    def repetition_epsilon(self, dim: int) -> float:
        """The exact epsilon of one repetition, which e_i against a vector of equal magnitudes attains.

        In float64, probabilities of such a vector may sum to 1 - 1e-16, and the rest hides all but about 37 of epsilon.
        """
        likeliest = 1 / math.sqrt(dim) + (1 - 1 / math.sqrt(dim)) / (2 * dim)
        return self.epsilon + math.log(likeliest + (1 - likeliest) * math.exp(-self.epsilon))

    def encode(self, state: None, memory: None, update: Vector, link: Link, private: Key) -> tuple[bytes, None]:
        """Clip, draw points, replace some at random, and send the points' numbers. Does not use the shared key."""
        check_update(update)
        dim = update.numel()
        points = self._respond(self._draw(update.detach().cpu(), private.child("point")), 2 * dim, private)
        return pack_levels(points, width_of(2 * dim)), None

    def estimate(self, state: None, received: bytes, link: Link) -> Vector:
        """The mean of the sent points, stretched to undo the shrinkage by randomized response."""
        points, dim = self._read(received, link.setting), link.setting.dim
        # all points sum to 0, so randomized response shrinks the mean without shifting it
        stretch = -(1 + (2 * dim - 1) * math.exp(-self.epsilon)) / math.expm1(-self.epsilon)
        total = np.bincount(points % dim, np.where(points < dim, 1.0, -1.0), dim)
        return torch.from_numpy(self.clip * math.sqrt(dim) * stretch / self.repeats * total).float()

    def likelihood(self, state: None, received: Sequence[bytes], links: Links) -> Likelihood:
        """-sum ln P(point | update), exact down to probabilities of 1e-12 / 2d."""
        dim = links.setting.dim
        points = torch.from_numpy(np.stack([self._read(wire, links.setting) for wire in received]))
        places, signs = points % dim, torch.where(points < dim, 1.0, -1.0).double()
        # randomized response sends each of the 2d points with at least this probability
        even = math.exp(-float(np.logaddexp(self.epsilon, math.log(2 * dim - 1))))
        floor = max(even, _FLOOR / (2 * dim))

        def score(update: Tensor) -> Tensor:
            v = clip_l2(update.double(), self.clip) / self.clip
            uniform = (1 - v.abs().sum(-1, keepdim=True) / math.sqrt(dim)).clamp(min=0)  # below 0 only by rounding
            drawn = (signs * v.gather(-1, places)).clamp(min=0) / math.sqrt(dim) + uniform / (2 * dim)
            return -(floor + (1 - 2 * dim * even) * drawn).log().sum(-1).to(update.dtype)

        return score

    def message_distribution(self, state: None, memory: None, update: Vector, link: Link) -> MessageDistribution:
        """The mixture of the clipped update's distribution on the points with the uniform distribution."""
        v, n = projected(update, self.clip) / self.clip, 2 * link.setting.dim
        spare = max(0.0, 1 - float(np.abs(v).sum()) / math.sqrt(len(v)))
        drawn = np.maximum(np.concatenate([v, -v]), 0.0) / math.sqrt(len(v)) + spare / n
        epsilon = self.epsilon / (1 - np.array([[0.0], *([share] for share in SHARES)]))
        other = np.exp(-np.logaddexp(epsilon, math.log(n - 1)))
        chances = (other + (1 - n * other) * drawn)[:, None]
        return Choices(chances[0], width_of(n), np.full(self.repeats, -1), others=chances[1:])

    def low_noise_variant(self) -> VQSGD:
        """The same with hardly any randomized response, and many points."""
        return replace(self, epsilon=400.0, repeats=1000)

    def claim(self, history: Sequence[None], setting: Setting) -> Claim:
        """Epsilon per message, as if it held one point; the proof adds the epsilons of all points and of T rounds."""
        rounds, dim = len(history), setting.dim
        each = self.repetition_epsilon(dim)
        why = f"{self.repeats} points of one update are sent; their epsilons, {each:.6g} each at d = {dim}, add up."
        source = "Gandikota et al. 2019, randomized response on one point; sqSGD, comparison at equal bits"
        proved = Proof.pure(each, self.repeats * rounds, Unit.MESSAGE, why)
        return claim_over(rounds, self.epsilon * rounds, proved, source=source)

    def _draw(self, update: Tensor, key: Key) -> Integers:
        """[b] points: i stands for +e_i, and d + i for -e_i."""
        dim = update.numel()
        clipped, root = clip_l2(update.double(), self.clip) / self.clip, math.sqrt(dim)
        v, spare = clipped.numpy(), max(0.0, 1 - float(clipped.abs().sum(-1)) / root)
        rising = np.cumsum(np.maximum(np.concatenate([v, -v]), 0.0) / root + spare / (2 * dim))
        at = rng.uniform(key, (self.repeats,), dtype=torch.float64).numpy() * rising[-1]
        points: Integers = np.searchsorted(rising, at, side="right")
        return np.minimum(points, 2 * dim - 1)  # rounding may select 2d, one past the last point

    def _respond(self, points: Integers, n: int, key: Key) -> Integers:
        """Randomized response: the points [b], some of them replaced by another of the n points."""
        others = math.log(n - 1)
        chance = math.exp(others - float(np.logaddexp(self.epsilon, others)))
        replaced = rng.uniform(key.child("lie"), (len(points),), dtype=torch.float64).numpy() < chance
        other = rng.integers(key.child("other"), len(points), n - 1)
        return np.where(replaced, other + (other >= points), points)

    def _read(self, received: bytes, setting: Setting) -> Integers:
        n = 2 * setting.dim
        points = unpack_levels(received, self.repeats, width_of(n))
        if int(points.max()) >= n:
            raise MessageError(f"expected points 0 to {n - 1}, got {int(points.max())}")
        return points
