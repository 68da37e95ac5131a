"""CEPAM with a public bound in place of the update's own norm."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from leakgauge.defenses._cepam.claim import clipped, theorem_12
from leakgauge.defenses._cepam.lrsuq import Floats, gaussian_radii
from leakgauge.defenses._cepam.mechanism import Cepam, check_dimension
from leakgauge.harness.core.checks import positive
from leakgauge.harness.core.claim import Claim
from leakgauge.harness.core.contract import Setting
from leakgauge.harness.core.rng import Key


@dataclass(frozen=True)
class CepamClip(Cepam):
    """CEPAM on a clipped update: the noise has one size whatever the update, and no norm is sent.

    Private randomness: none. All noise comes from the key that client and server share.

    Args:
        noise_std: sigma, of the noise in each coordinate, in units of the update.
        clip: C, bound on the l2 norm, in units of the update.
        dimension: n, 1 to 3, coordinates quantized together; see `cepam-gaussian`.
        local_epsilon: epsilon tilde, of one sampled record, from which the claim follows.

    Guarantees:
        decode(encode(u)) - clip(u) is normal with standard deviation noise_std in each coordinate, independently and
        whatever u is, up to float32 rounding.
        About the entropy of the message given the shared randomness, least where |u| is about C; see `_cepam_wire`.

    A zero update is quantized as any other. Without the shared key the estimate is zero.

    Raises:
        ValueError: a parameter out of range.

    Source: the code that an author of CEPAM published for a follow-up, which clips in place of Algorithm 1's division
        by the norm. Differs from it: client and server share radii and dithers, as in the paper; there the server
        draws its own, and the error is neither centerd nor normal. The claim is the paper's with C for gamma.
    """

    sends_norm: ClassVar[bool] = False

    noise_std: float = 0.1
    clip: float = 1.0
    dimension: int = 1
    local_epsilon: float = 5.9

    def __post_init__(self) -> None:
        positive(noise_std=self.noise_std, clip=self.clip, local_epsilon=self.local_epsilon)
        check_dimension(self.dimension)

    @property
    def lattice_dimension(self) -> int:
        """n."""
        return self.dimension

    @property
    def bound(self) -> float:
        """C."""
        return self.clip

    def radii(self, key: Key, count: int, unit: float) -> Floats:
        """sigma * sqrt(chi-square with n + 2 degrees)."""
        return gaussian_radii(key, count, self.dimension, self.noise_std * unit)

    def claim(self, history: Sequence[None], setting: Setting) -> Claim:
        """Of one record and one round, by Thm 12, against those who see averages; T rounds are added up."""
        reach = self.clip / self.noise_std
        promise = theorem_12(self.local_epsilon, reach, setting)
        source = "Ling et al. 2025, Thm 12, with C for gamma"
        return clipped(promise, source, reach, self.dimension, len(history), setting)
