"""vqSGD with the cross-polytope: a few of 2d points, each told by randomized response."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from leakgauge.defenses._common.clip import clip_l2
from leakgauge.harness.core import rng
from leakgauge.harness.core.accounting import Pure, repeat
from leakgauge.harness.core.checks import check_update, positive
from leakgauge.harness.core.claim import Claim, Horizon, Proof, Relation, Unit, every_round
from leakgauge.harness.core.codec import pack_levels, unpack_levels, width_of
from leakgauge.harness.core.contract import (
    Defense,
    Likelihood,
    Link,
    Links,
    MessageError,
    Setting,
)
from leakgauge.harness.core.rng import Key
from leakgauge.harness.core.threats import Threat
from leakgauge.harness.core.vec import Vector

_FLOOR = 1e-12
"""Least chance of a point in the likelihood, in units of 1 / 2d: keeps its gradients within float32."""


@dataclass(frozen=True)
class VQSGD(Defense[None, None]):
    """vqSGD: the update as a mean of a few corners of a cross-polytope, each told by randomized response.

    v, the update clipped and divided by the clip, is the mean of a law on the 2d points +-sqrt(d) e_i. Each of the
    repetitions draws one point, and tells it truly with chance e^epsilon / (e^epsilon + 2d - 1), else any other.

    Args:
        clip: C, bound on the l2 norm, in units of the update.
        epsilon: of one repetition, as sqSGD's comparison seems to have run it. A message has about `repeats` times as
            much, which that comparison leaves out. Default 400, of sqSGD's comparison on LeNet (which has C = 10).
        repeats: b, points a message. Default 113: at d = 119,850 (18 bits a point), the 2048 bits of sqSGD's message.

    Guarantees:
        ceil(b * ceil(log2 2d) / 8) bytes.
        The estimate is unbiased for the clipped update.
        Randomized response on one point is exactly as likely to lie as stated while that chance is above 2^-53; below,
        what runs never lies, and the promise becomes (epsilon, b times that chance) instead of epsilon.

    Raises:
        ValueError: a parameter out of range.

    Source: Gandikota et al. 2019, "vqSGD: vector quantized stochastic gradient descent", cross-polytope scheme and its
        randomized response, as sqSGD's baseline. The paper's epsilon of one point is not attained: the likeliest point
        is drawn with p = 1/sqrt(d) + (1 - 1/sqrt(d)) / 2d at most, so that a repetition has ln(1 + (e^epsilon - 1) p).
    """

    clip: float = 1.0
    epsilon: float = 400.0
    repeats: int = 113

    def __post_init__(self) -> None:
        positive(clip=self.clip, epsilon=self.epsilon, repeats=self.repeats)

    def repetition_epsilon(self, dim: int) -> float:
        """Of one repetition, exactly: e_i against a vector of equal magnitudes attains it."""
        likeliest = 1 / math.sqrt(dim) + (1 - 1 / math.sqrt(dim)) / (2 * dim)
        return self.epsilon + math.log(likeliest + (1 - likeliest) * math.exp(-self.epsilon))

    def encode(self, state: None, memory: None, update: Vector, link: Link, private: Key) -> tuple[bytes, None]:
        """Clip, draw points, lie about some by the private key, send their numbers. Does not use the shared key."""
        check_update(update)
        dim = update.numel()
        told = self._respond(self._draw(update.detach().cpu(), private.child("point")), 2 * dim, private)
        return pack_levels(told, width_of(2 * dim)), None

    def estimate(self, state: None, received: bytes, link: Link) -> Vector:
        """The mean of the points that were told, stretched by what the lies take away."""
        told, dim = self._read(received, link.setting), link.setting.dim
        # the points sum to 0, so that lies shrink the mean and do not shift it
        stretch = -(1 + (2 * dim - 1) * math.exp(-self.epsilon)) / math.expm1(-self.epsilon)
        total = np.bincount(told % dim, np.where(told < dim, 1.0, -1.0), dim)
        return torch.from_numpy(self.clip * math.sqrt(dim) * stretch / self.repeats * total).float()

    def likelihood(self, state: None, received: Sequence[bytes], links: Links) -> Likelihood:
        """-sum ln P(point | update), exact down to chances of 1e-12 / 2d."""
        told, dim = (
            torch.from_numpy(np.stack([self._read(wire, links.setting) for wire in received])),
            links.setting.dim,
        )
        places, signs = told % dim, torch.where(told < dim, 1.0, -1.0).double()
        # a point is told by chance too: that share of 1 is spread evenly over all 2d
        even = math.exp(-float(np.logaddexp(self.epsilon, math.log(2 * dim - 1))))
        floor = max(even, _FLOOR / (2 * dim))

        def score(update: Tensor) -> Tensor:
            v = clip_l2(update.double(), self.clip) / self.clip
            drawn = (signs * v.gather(-1, places)).clamp(min=0) / math.sqrt(dim) + _spare(v) / (2 * dim)
            return -(floor + (1 - 2 * dim * even) * drawn).log().sum(-1).to(update.dtype)

        return score

    def claim(self, history: Sequence[None], setting: Setting) -> Claim:
        """Epsilon a message, as if it held one point; what holds is the sum over its points. T rounds add up."""
        each, dim = self.repetition_epsilon(setting.dim), setting.dim
        return Claim(
            epsilon=self.epsilon * len(history),
            delta=0.0,
            unit=Unit.MESSAGE,
            relation=Relation.ANY_TWO,
            horizon=Horizon.of(len(history)),
            against=frozenset(Threat),
            source="Gandikota et al. 2019, randomized response on one point; sqSGD, comparison at equal bits",
            assumes=every_round(len(history)),
            proved=Proof(
                repeat(Pure(each, self.repeats), len(history)),
                Unit.MESSAGE,
                "closed form",
                f"{self.repeats} points of one update are told, each with {each:.6g} at d = {dim}; they add up.",
            ),
        )

    def _draw(self, update: Tensor, key: Key) -> npt.NDArray[np.int64]:
        """[b] points: i is +e_i, d + i is -e_i."""
        dim = update.numel()
        v = clip_l2(update.double(), self.clip) / self.clip
        chances = torch.cat([v.clamp(min=0), (-v).clamp(min=0)]) / math.sqrt(dim) + _spare(v) / (2 * dim)
        rising = np.cumsum(chances.numpy())
        at = rng.uniform(key, (self.repeats,), dtype=torch.float64).numpy() * rising[-1]
        found: npt.NDArray[np.int64] = np.searchsorted(rising, at, side="right")
        return np.minimum(found, 2 * dim - 1)  # a rounded product may reach the end

    def _respond(self, points: npt.NDArray[np.int64], n: int, key: Key) -> npt.NDArray[np.int64]:
        """The points, some of them replaced by another one."""
        others = math.log(n - 1)
        chance = math.exp(others - float(np.logaddexp(self.epsilon, others)))
        lies = rng.uniform(key.child("lie"), (len(points),), dtype=torch.float64).numpy() < chance
        other = rng.integers(key.child("other"), len(points), n - 1)
        return np.where(lies, other + (other >= points), points)

    def _read(self, received: bytes, setting: Setting) -> npt.NDArray[np.int64]:
        """[b] points of a message."""
        n = 2 * setting.dim
        told = unpack_levels(received, self.repeats, width_of(n))
        if int(told.max()) >= n:
            raise MessageError(f"expected points 0 to {n - 1}, got {int(told.max())}")
        return told


def _spare(v: Tensor) -> Tensor:
    """[..., 1]: 1 - |v|_1 / sqrt(d), the share of the law that is spread evenly; 0 where rounding makes it less."""
    return (1 - v.abs().sum(-1, keepdim=True) / math.sqrt(v.shape[-1])).clamp(min=0)
