"""CEPAM with Laplace noise."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from leakgauge.defenses._cepam.claim import norm_scaled, theorem_13
from leakgauge.defenses._cepam.lrsuq import Floats, laplace_radii
from leakgauge.defenses._cepam.mechanism import Cepam
from leakgauge.harness.core.checks import positive
from leakgauge.harness.core.claim import Claim
from leakgauge.harness.core.contract import Setting
from leakgauge.harness.core.rng import Key


@dataclass(frozen=True)
class CepamLaplace(Cepam):
    """CEPAM with Laplace noise: as `cepam-gaussian`, coordinate by coordinate.

    Private randomness: none. All noise comes from the key that client and server share.

    Args:
        noise_scale: b, the noise in a coordinate has density exp(-|e|/b) / 2b, in units of |u| / gamma. The standard
            deviation is sqrt(2) times that.
        gamma: the norm that every update is scaled to. The paper does not give it; its claim of 4995 takes 16.67 with
            15 steps and b = 0.1 if it is to be just met.
        local_epsilon: the paper's epsilon tilde, of one sampled record, from which its claim follows.

    Guarantees:
        decode(encode(u)) - u is Laplace with scale noise_scale * |u| / gamma in each coordinate, independently and
        whatever u is, up to float32 rounding: unbiased.
        The norm as float32, then about the entropy of the cells given the shared randomness; see `_cepam_wire`.

    A zero update is sent as a norm of zero and nothing else. Without the shared key the estimate is zero.

    Raises:
        ValueError: a parameter out of range; in `encode`, |u| / gamma above the largest float32.

    Source: Ling, Wu, Sun, Li, Song, Xu 2025, "Communication-Efficient and Privacy-Adaptable Mechanism". Differs as
        `cepam-gaussian` does. The claim, Thm 13, takes gamma for a bound of the l1 norm; it is one of the l2 norm.
    """

    sends_norm: ClassVar[bool] = True

    noise_scale: float = 0.1
    gamma: float = 1.0
    local_epsilon: float = 5000.0

    def __post_init__(self) -> None:
        positive(noise_scale=self.noise_scale, gamma=self.gamma, local_epsilon=self.local_epsilon)

    @property
    def lattice_dimension(self) -> int:
        """1: radii whose error is Laplace are known for the line only."""
        return 1

    @property
    def bound(self) -> float:
        """gamma."""
        return self.gamma

    def radii(self, key: Key, count: int, unit: float) -> Floats:
        """b * Gamma(2, 1)."""
        return laplace_radii(key, count, self.noise_scale * unit)

    def claim(self, history: Sequence[None], setting: Setting) -> Claim:
        """Of one record and one round, by Thm 13, against those who see averages; T rounds are added up."""
        reach = self.gamma / self.noise_scale
        promise = theorem_13(self.local_epsilon, reach, setting)
        variation = -math.expm1(-reach)
        return norm_scaled(promise, "Ling et al. 2025, Thm 13", variation, 1, len(history), setting)
