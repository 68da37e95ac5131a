"""CEPAM with normal noise."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from scipy import special

from leakgauge.defenses._cepam.claim import norm_scaled, theorem_12
from leakgauge.defenses._cepam.lrsuq import Floats, gaussian_radii
from leakgauge.defenses._cepam.mechanism import Cepam, check_dimension
from leakgauge.harness.core.checks import positive
from leakgauge.harness.core.claim import Claim
from leakgauge.harness.core.contract import Setting
from leakgauge.harness.core.rng import Key


@dataclass(frozen=True)
class CepamGaussian(Cepam):
    """CEPAM: divide by the update's norm, let a randomized quantizer add normal noise, send few bits and the norm.

    Private randomness: none. All noise comes from the key that client and server share.

    Args:
        noise_std: sigma, of the noise in each coordinate, in units of |u| / gamma: the noise grows with the update.
        gamma: the norm that every update is scaled to. A recipe must name it, for results hang on gamma / noise_std;
            the paper does not. With 1 a coordinate of a large model drowns in noise; sqrt(d) / 3, as JoPEQ scales, fits
            the reported accuracy better.
        dimension: n, 1 to 3, coordinates quantized together. The noise is the same. As they are sent here, 1 takes the
            fewest bits and tells the server least; of the paper's fixed lengths, those of 3 are shortest.
        local_epsilon: the paper's epsilon tilde, of one sampled record, from which its claim follows.

    Guarantees:
        decode(encode(u)) - u is normal with standard deviation noise_std * |u| / gamma in each coordinate,
        independently and whatever u is, up to float32 rounding: unbiased.
        The norm as float32, then about the entropy of the rest given the shared randomness; see `_cepam_wire`.

    | case | what happens |
    |---|---|
    | a zero update | a norm of zero and nothing else: 4 bytes, decoded without noise |
    | d no multiple of n | zeros are added, quantized, and dropped by the server |
    | all of the update in one coordinate | some bits more; the law of the error is the same |
    | no shared key | nothing but the norm can be read: the estimate is zero |

    Raises:
        ValueError: a parameter out of range; in `encode`, |u| / gamma above the largest float32.

    Source: Ling, Wu, Sun, Li, Song, Xu 2025, "Communication-Efficient and Privacy-Adaptable Mechanism", Algorithms 1
        and 2. Differs: dithers are tested by |2r (M + v) - x| <= r as in its definition (8), not as in line 10 of
        Algorithm 2, which need not end; attempts and cells are entropy coded, not sent in fixed lengths.
    """

    sends_norm: ClassVar[bool] = True

    noise_std: float = 0.1
    gamma: float = 1.0
    dimension: int = 1
    local_epsilon: float = 5.9

    def __post_init__(self) -> None:
        positive(noise_std=self.noise_std, gamma=self.gamma, local_epsilon=self.local_epsilon)
        check_dimension(self.dimension)

    @property
    def lattice_dimension(self) -> int:
        """n."""
        return self.dimension

    @property
    def bound(self) -> float:
        """gamma."""
        return self.gamma

    def radii(self, key: Key, count: int, unit: float) -> Floats:
        """sigma * sqrt(chi-square with n + 2 degrees)."""
        return gaussian_radii(key, count, self.dimension, self.noise_std * unit)

    def claim(self, history: Sequence[None], setting: Setting) -> Claim:
        """Of one record and one round, by Thm 12, against those who see averages; T rounds are added up."""
        reach = self.gamma / self.noise_std
        promise = theorem_12(self.local_epsilon, reach, setting)
        variation = 1 - 2 * float(special.ndtr(-reach))
        return norm_scaled(promise, "Ling et al. 2025, Thm 12", variation, self.dimension, len(history), setting)
