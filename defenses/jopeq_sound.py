"""JoPEQ repaired: a public scale, a public bound, and the full Laplace noise."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from leakgauge.defenses._common.clip import Norm, delta_for
from leakgauge.defenses._common.reference import scaled
from leakgauge.defenses._common.scale import Scaling
from leakgauge.defenses._jopeq.distribution import leveled
from leakgauge.defenses._jopeq.privacy import scalar_epsilon
from leakgauge.defenses._jopeq.quantizer import Radius, ScalarJoPEQ
from leakgauge.harness.core.claim import Claim, Proof, Unit, added_up
from leakgauge.harness.core.concentrated import laplace_l2_scale
from leakgauge.harness.core.contract import Link, Setting
from leakgauge.harness.core.distribution import Laplacian, MessageDistribution
from leakgauge.harness.core.vec import Vector


@dataclass(frozen=True)
class SoundJoPEQ(ScalarJoPEQ):
    """JoPEQ repaired: clip to a public bound, add the full Laplace noise, quantize with a shared dither.

    Args:
        epsilon: privacy budget of one coordinate of one message, or of the message for `norm = "l2"`; sets the scale
            `noise_scale` of the noise, in units of `clip`.
        bits: R, 1 to 16; the quantizer has 2^R + 1 levels.
        clip: C, bound on the magnitude of each coordinate, or on the l2 norm, in units of the update.
        gamma: radius of the quantizer, as in `jopeq`.
        norm: what `clip` bounds: `entry`, each coordinate; `l2`, the l2 norm of the update, so that the epsilon of a
            message does not depend on its dimension.
        delta: delta of the guarantee for one message, for `norm = "l2"`. Default 1e-5.

    Guarantees:
        Messages have ceil(d * ceil(log2(2^R + 1)) / 8) bytes.
        Without overload, decode(encode(u)) - clip(u) is C times Laplace(b) plus Uniform(-Delta/2, Delta/2) in each
        coordinate, independent of the other coordinates and of u; b is `noise_scale`.
        One coordinate of one message is epsilon-DP for any two updates: a message is a function of the noisy coordinate
        and of the dither, which does not depend on the update. For `l2`, one message is (epsilon, delta)-DP for any two
        updates, for the same reason; this includes overload, because the quantizer follows the noise.

    | case | what happens |
    |---|---|
    | an outermost level within [-1, 1] (a small gamma) | clipping hides more: the true epsilon is below `epsilon` |
    | an outermost level not far above b (a small epsilon, or `l2`) | overload shrinks the expected update |

    Raises:
        ValueError: a parameter is out of range.

    Source: our repair of Lang, Sofer, Shaked, Shlezinger 2022: the scale does not depend on the data, and the
        quantization error does not reduce the noise. The epsilon for `l2`, also ours, is that of `laplace_l2`.
    """

    epsilon: float = 4.0
    bits: int = 1
    clip: float = 1.0
    gamma: Radius = "reference"
    norm: Norm = "entry"
    delta: float | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "delta", delta_for(self.norm, self.delta))
        super().__post_init__()

    @property
    def nominal(self) -> float:
        """2 / b."""
        return self.epsilon if self.delta is None else 2 / laplace_l2_scale(2.0, self.epsilon, self.delta)

    @property
    def scaling(self) -> Scaling:
        """The update divided by the public bound, and clipped."""
        return Scaling("public", 1, self.clip, self.norm)

    @property
    def noise_scale(self) -> float:
        """b of the Laplace noise, in units of `clip`: 2/epsilon, or for `l2` that of `laplace_l2_scale`."""
        return 2 / self.nominal

    def message_distribution(self, state: None, memory: None, update: Vector, link: Link) -> MessageDistribution:
        """The levels of the clipped update plus Laplace(b) noise, in units of C, given the dither."""
        numbers = scaled(update, link.setting.layout, "public", 1, self.clip, self.norm)
        return leveled(numbers, Laplacian(), 2 / self.nominal * np.eye(2), self.lattice, link.key)

    def low_noise_variant(self) -> SoundJoPEQ:
        """The same with a noise scale of 0.001 and small steps."""
        return replace(self, epsilon=2000.0 if self.delta is None else 2e6, bits=16, gamma="reference")

    def claim(self, history: Sequence[None], setting: Setting) -> Claim:
        """Pure epsilon for one coordinate, which adds up over T rounds; (epsilon, delta) of a message for `l2`."""
        if self.delta is not None:
            return self.claim_of_l2(self.noise_scale, self.delta, len(history), setting)
        rounds, each = len(history), scalar_epsilon(self.epsilon, 0.0, self.lattice.edge)
        why = "coordinates in [-C, C] get the full Laplace noise; a message depends only on these and the dither."
        proved, source = Proof.pure(each, rounds, Unit.COORDINATE, why), "Dwork et al. 2006, and post-processing"
        return self.claim_of_each(self.epsilon, each, proved, added_up(source, rounds), rounds, setting)
