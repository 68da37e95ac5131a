"""CEPAM with Laplace noise."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from leakgauge.defenses._cepam.claim import norm_scaled, printed_13, theorem_13
from leakgauge.defenses._cepam.distribution import scaled
from leakgauge.defenses._cepam.mechanism import Cepam
from leakgauge.defenses._cepam.wire import laplace_radii
from leakgauge.harness.core.checks import positive
from leakgauge.harness.core.claim import Claim
from leakgauge.harness.core.contract import Link, Setting
from leakgauge.harness.core.distribution import Laplacian, MessageDistribution
from leakgauge.harness.core.rng import Key
from leakgauge.harness.core.stats import Numbers
from leakgauge.harness.core.vec import Vector

FORMULAS = {"theorem_13": printed_13}
"""Formulas of the paper that recipes draw."""


@dataclass(frozen=True)
class CepamLaplace(Cepam):
    """CEPAM with Laplace noise: like `cepam-gaussian`, but each coordinate is quantized separately.

    There is no private randomness: all noise comes from the key that client and server share.

    Args:
        noise_scale: b, in units of |u| / gamma; the noise in a coordinate has density exp(-|e|/b) / 2b and standard
            deviation sqrt(2) b.
        gamma: the norm to which every update is scaled. The paper does not state gamma; with 15 steps and b = 0.1,
            gamma 16.67 just meets the condition of the paper's claim of 4995.
        local_epsilon: the paper's epsilon tilde for one sampled record, from which the claim follows.

    Guarantees:
        decode(encode(u)) - u is Laplace with mean 0 and scale noise_scale * |u| / gamma in each coordinate,
        independently and for every u, up to float32 rounding.
        Messages hold the norm as float32, then approximately as many bits as the entropy of the cells given the shared
        randomness; see `_cepam.wire`.

    A zero update is sent as a norm of zero only. Without the shared key, the estimate is zero.

    Raises:
        ValueError: a parameter is out of range; in `encode`, |u| / gamma exceeds the largest float32.

    Source: Ling, Wu, Sun, Li, Song, Xu 2025, "Communication-Efficient and Privacy-Adaptable Mechanism". Differs as
        `cepam-gaussian` does. The claim, Thm 13, treats gamma as a bound on the l1 norm, but gamma bounds the l2 norm.
    """

    noise_scale: float = 0.1
    gamma: float = 1.0
    local_epsilon: float = 5000.0

    def __post_init__(self) -> None:
        positive(noise_scale=self.noise_scale, gamma=self.gamma, local_epsilon=self.local_epsilon)

    @property
    def bound(self) -> float:
        """gamma, the norm of every scaled update."""
        return self.gamma

    def radii(self, key: Key, count: int, unit: float) -> Numbers:
        """b times draws from Gamma(2, 1)."""
        return laplace_radii(key, count, self.noise_scale * unit)

    def message_distribution(self, state: None, memory: None, update: Vector, link: Link) -> MessageDistribution:
        """A Laplace error around the scaled update."""
        return scaled(update, link, self.gamma, Laplacian(), self.noise_scale)

    def claim(self, history: Sequence[None], setting: Setting) -> Claim:
        """Thm 13 for one record and one round, against adversaries that see only averages; T epsilons add up."""
        reach = self.gamma / self.noise_scale
        promise, source = theorem_13(self.local_epsilon, reach, setting), "Ling et al. 2025, Thm 13"
        return norm_scaled(promise, source, -math.expm1(-reach), 1, len(history), setting)
