"""CEPAM with normal noise."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from scipy import special

from leakgauge.defenses._cepam.claim import fixed_length, norm_scaled, printed, theorem_12
from leakgauge.defenses._cepam.mechanism import NormalCepam
from leakgauge.harness.core.checks import positive
from leakgauge.harness.core.claim import Claim
from leakgauge.harness.core.contract import Setting

FORMULAS = {"theorem_12": printed, "fixed_length": fixed_length}
"""Formulas of the paper that recipes draw."""


@dataclass(frozen=True)
class CepamGaussian(NormalCepam):
    """CEPAM: divides by the update's norm, adds normal noise by a randomized quantizer, sends few bits and the norm.

    There is no private randomness: all noise comes from the key that client and server share.

    Args:
        noise_std: sigma, standard deviation of the noise in each coordinate, in units of |u| / gamma: the noise grows
            with the update.
        gamma: the norm to which every update is scaled. Results depend on gamma / noise_std, so a recipe must state
            gamma; the paper does not. With gamma 1, noise dominates each coordinate of a large model; sqrt(d) / 3, the
            scale of JoPEQ, fits the reported accuracy better.
        dimension: n, 1 to 3, number of coordinates that are quantized together, with the same noise. With the entropy
            code used here, 1 takes the fewest bits and reveals the least to the server; the paper's fixed lengths are
            shortest for 3.
        local_epsilon: the paper's epsilon tilde for one sampled record, from which the claim follows.

    Guarantees:
        decode(encode(u)) - u is normal with mean 0 and standard deviation noise_std * |u| / gamma in each coordinate,
        independently and for every u, up to float32 rounding.
        Messages hold the norm as float32, then approximately as many bits as the entropy of the rest given the shared
        randomness; see `_cepam.wire`.

    | case | what happens |
    |---|---|
    | a zero update | only a norm of zero: 4 bytes, decoded without noise |
    | d is not a multiple of n | zeros are added, quantized, and dropped by the server |
    | all of the update in one coordinate | a few more bits; the distribution of the error is the same |
    | no shared key | only the norm can be read: the estimate is zero |

    Raises:
        ValueError: a parameter is out of range; in `encode`, |u| / gamma exceeds the largest float32.

    Source: Ling, Wu, Sun, Li, Song, Xu 2025, "Communication-Efficient and Privacy-Adaptable Mechanism", Algorithms 1
        and 2. Differs: dithers are tested by |2r (M + v) - x| <= r as in the paper's definition (8), not as in line 10
        of Algorithm 2, which may not terminate; attempts and cells are entropy coded, not sent in fixed lengths.
    """

    noise_std: float = 0.1
    gamma: float = 1.0
    dimension: int = 1
    local_epsilon: float = 5.9

    def __post_init__(self) -> None:
        positive(gamma=self.gamma)
        super().__post_init__()

    @property
    def bound(self) -> float:
        """gamma, the norm of every scaled update."""
        return self.gamma

    def claim(self, history: Sequence[None], setting: Setting) -> Claim:
        """Thm 12 for one record and one round, against adversaries that see only averages; T epsilons add up."""
        promise = theorem_12(self.local_epsilon, self.reach, setting)
        variation, source = 1 - 2 * float(special.ndtr(-self.reach)), "Ling et al. 2025, Thm 12"
        return norm_scaled(promise, source, variation, self.dimension, len(history), setting)
