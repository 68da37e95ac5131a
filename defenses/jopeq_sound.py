"""JoPEQ repaired: a public scale, clamped coordinates, and the full Laplace noise."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from leakgauge.defenses._common.reference import scaled
from leakgauge.defenses._common.scale import Scaling
from leakgauge.defenses._jopeq.distribution import leveled
from leakgauge.defenses._jopeq.privacy import scalar_epsilon
from leakgauge.defenses._jopeq.quantizer import Radius, ScalarJoPEQ
from leakgauge.harness.core.claim import Claim, Proof, Unit, added_up
from leakgauge.harness.core.contract import Link, Setting
from leakgauge.harness.core.distribution import Laplacian, MessageDistribution
from leakgauge.harness.core.vec import Vector


@dataclass(frozen=True)
class SoundJoPEQ(ScalarJoPEQ):
    """JoPEQ repaired: clamp to a public bound, add the full Laplace noise, quantize with a shared dither.

    Args:
        epsilon: privacy budget of one coordinate of one message; the noise has scale 2/epsilon in units of `clip`.
        bits: R, 1 to 16; the quantizer has 2^R + 1 levels.
        clip: C, bound on the magnitude of each coordinate, in units of the update.
        gamma: radius of the quantizer, as in `jopeq`.

    Guarantees:
        Messages have ceil(d * ceil(log2(2^R + 1)) / 8) bytes.
        Without overload, decode(encode(u)) - clamp(u) is C times Laplace(2/epsilon) plus Uniform(-Delta/2, Delta/2) in
        each coordinate, independent of the other coordinates and of u.
        One coordinate of one message is epsilon-DP for any two updates: a message is a function of the noisy coordinate
        and of the dither, which does not depend on the update.

    | case | what happens |
    |---|---|
    | an outermost level within [-1, 1] (a small gamma) | clipping hides more: the true epsilon is below `epsilon` |

    Raises:
        ValueError: a parameter is out of range.

    Source: our repair of Lang, Sofer, Shaked, Shlezinger 2022: the scale does not depend on the data, and the
        quantization error does not reduce the noise.
    """

    epsilon: float = 4.0
    bits: int = 1
    clip: float = 1.0
    gamma: Radius = "reference"

    @property
    def scaling(self) -> Scaling:
        """The update divided by the public bound, and clamped."""
        return Scaling("public", 1, self.clip)

    @property
    def noise_scale(self) -> float:
        """b of the Laplace noise, in units of `clip`."""
        return 2 / self.epsilon

    def message_distribution(self, state: None, memory: None, update: Vector, link: Link) -> MessageDistribution:
        """The levels of the clamped update plus Laplace(2/epsilon) noise, in units of C, given the dither."""
        numbers = scaled(update, link.setting.layout, "public", 1, self.clip)
        return leveled(numbers, Laplacian(), 2 / self.epsilon * np.eye(2), self.lattice, link.key)

    def low_noise_variant(self) -> SoundJoPEQ:
        """The same with a noise scale of 0.001 and small steps."""
        return replace(self, epsilon=2000.0, bits=16, gamma="reference")

    def claim(self, history: Sequence[None], setting: Setting) -> Claim:
        """Pure epsilon for one coordinate; the epsilons of T rounds add up."""
        rounds, each = len(history), scalar_epsilon(self.epsilon, 0.0, self.lattice.edge)
        why = "coordinates in [-C, C] get the full Laplace noise; a message depends only on these and the dither."
        proved, source = Proof.pure(each, rounds, Unit.COORDINATE, why), "Dwork et al. 2006, and post-processing"
        return self.claim_of_each(self.epsilon, each, proved, added_up(source, rounds), rounds, setting)
