"""CEPAM with a public bound instead of the update's own norm."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from leakgauge.defenses._cepam.claim import ONE_WEIGHT, clipped, theorem_12
from leakgauge.defenses._cepam.mechanism import NormalCepam
from leakgauge.defenses._common.clip import normal_reach
from leakgauge.harness.core.checks import positive
from leakgauge.harness.core.claim import Claim, Proof, Unit
from leakgauge.harness.core.contract import Link, Setting


@dataclass(frozen=True)
class CepamClip(NormalCepam):
    """CEPAM on a clipped update: the noise does not depend on the update, and no norm is sent.

    There is no private randomness: all noise comes from the key that client and server share.

    Args:
        noise_std: sigma, standard deviation of the noise in each coordinate, in units of the update.
        clip: C, bound on the l2 norm, in units of the update.
        dimension: n, 1 to 3, number of coordinates that are quantized together; see `cepam-gaussian`.
        local_epsilon: epsilon tilde for one sampled record, from which the claim follows.

    Guarantees:
        decode(encode(u)) - clip(u) is normal with standard deviation noise_std in each coordinate, independently and
        for every u, up to float32 rounding.
        A message takes approximately as many bits as its entropy given the shared randomness, fewest for |u| near C;
        see `_cepam.wire`.

    A zero update is quantized like any other. Without the shared key, the estimate is zero.

    Raises:
        ValueError: a parameter is out of range.

    Source: the code that an author of CEPAM published for a follow-up. The code clips; Algorithm 1 divides by the norm.
        Differs: client and server share radii and dithers, as in the paper; in that code, the server draws its own, and
        the error is neither centered nor normal. The claim is that of the paper, with C for gamma.
    """

    sends_norm: ClassVar[bool] = False
    relies: ClassVar[str] = ONE_WEIGHT

    noise_std: float = 0.1
    clip: float = 1.0
    dimension: int = 1
    local_epsilon: float = 5.9

    def __post_init__(self) -> None:
        positive(clip=self.clip)
        super().__post_init__()

    @property
    def bound(self) -> float:
        """C, the bound on the l2 norm."""
        return self.clip

    def longest(self, state: None, link: Link) -> float:
        """C plus a bound on the norm of the noise."""
        return self.clip + normal_reach(self.noise_std, link.setting.dim)

    def summed_proof(self, history: Sequence[None], setting: Setting, senders: int) -> Proof:
        """Without the dithers, errors are normal and independent of the updates, so those of n clients add up."""
        why = "without the shared key, a decoded message is the clipped update plus normal noise."
        return Proof.gaussian(math.sqrt(senders) / self.reach, len(history), Unit.CLIENT, why)

    def claim(self, history: Sequence[None], setting: Setting) -> Claim:
        """Thm 12 for one record and one round, against adversaries that see only averages; T epsilons add up."""
        promise = theorem_12(self.local_epsilon, self.reach, setting)
        source = "Ling et al. 2025, Thm 12, with C for gamma"
        return clipped(promise, source, self.reach, self.dimension, len(history), setting)
