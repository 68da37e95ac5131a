"""JoPEQ with Laplace noise: dithered quantization, and private noise reduced by the variance of its error."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from leakgauge.defenses._common.reference import scaled
from leakgauge.defenses._common.scale import Mode, unclipped
from leakgauge.defenses._jopeq import privacy
from leakgauge.defenses._jopeq.distribution import leveled
from leakgauge.defenses._jopeq.quantizer import CLEAR, Radius, ScalarJoPEQ, message_bits
from leakgauge.harness.core.claim import Claim, Proof, Unit, added_up, claim_over
from leakgauge.harness.core.contract import Link, Setting
from leakgauge.harness.core.distribution import Laplacian, MessageDistribution
from leakgauge.harness.core.vec import Vector

_CUBE = "closed form, coordinates in [-1, 1]"


@dataclass(frozen=True)
class JoPEQ(ScalarJoPEQ):
    """JoPEQ on single coordinates: scale, add reduced Laplace noise, quantize with a shared dither.

    The noise of Theorems III.1 and III.2 does not exist: its characteristic function would be unbounded where that of
    the quantization error is zero. This class draws the surrogate of the reference code, which has only the right
    variance.

    Args:
        epsilon: nominal privacy budget of one coordinate of one message; noise plus error should have scale b =
            2/epsilon.
        bits: R, 1 to 16; the quantizer has 2^R + 1 levels.
        gamma: radius of the quantizer: `reference` is 1.5 sqrt(1 + 2 b^2) with step Delta = 2 gamma/(2^R + 1); `paper`
            is 2 R + 1/epsilon with step 2 gamma/2^R; a number has the step of `reference`.
        scale: `tensor` (the reference code) and `vector` (the text) divide by a norm of the update and send the norm;
            `public` uses no norm and clamps coordinates to [-clip, clip].
        clip: C, for `scale = "public"`, in units of the update.

    Guarantees:
        Messages hold the scales (8 bytes per tensor, 4 for `vector`, none for `public`), then ceil(d * ceil(log2(2^R +
        1)) / 8) bytes.
        The rate of 2^R + 1 levels is log2(2^R + 1) bits per coordinate, not R.
        Without overload, decode(encode(u)) - u is Laplace(b') plus Uniform(-Delta/2, Delta/2), times the scale, in each
        coordinate, independent of the other coordinates and of u; b'^2 = b^2 - Delta^2/24.

    | case | what happens |
    |---|---|
    | Delta^2 >= 24 b^2 | b' = 0: no private noise; `randomized` has no effect in that case |
    | a zero tensor | its scale is 0: it decodes to its mean |
    | a value beyond the outermost level | clipped to it |

    Raises:
        ValueError: a parameter is out of range.

    Source: Lang, Sofer, Shaked, Shlezinger 2022, Algorithm 1 and Thm III.2, with noise, levels and clipping of the
        reference code. Differs: the private noise has its own random stream, separate from the dither's.
    """

    epsilon: float = 4.0
    bits: int = 1
    gamma: Radius = "reference"
    scale: Mode = "tensor"
    clip: float = 1.0

    @property
    def noise_scale(self) -> float:
        """b', the scale of the private Laplace noise, in units of the scaled coordinates; 0 means no noise."""
        return privacy.surrogate_scale(self.epsilon, self.lattice.step)

    def message_distribution(self, state: None, memory: None, update: Vector, link: Link) -> MessageDistribution:
        """The levels of the scaled update plus Laplace(b') noise, given the dither."""
        reduced = math.sqrt(max(0.0, (2 / self.epsilon) ** 2 - self.lattice.step**2 / 24))
        numbers = scaled(update, link.setting.layout, self.scale, 1, self.clip)
        return leveled(numbers, Laplacian(), reduced * np.eye(2), self.lattice, link.key)

    def low_noise_variant(self) -> JoPEQ:
        """The same with a noise scale of 0.001, and steps small enough that private noise remains."""
        return replace(self, epsilon=2000.0, bits=16, gamma="reference")

    def claim(self, history: Sequence[None], setting: Setting) -> Claim:
        """Epsilon for one coordinate of one message; we add up the epsilons of T rounds."""
        rounds, theorem = len(history), "III.2" if self.noise_scale > 0 else "III.3"
        source = added_up(f"Lang et al. 2022, Thm {theorem} and Cor. 1", rounds)
        proved, further, assumes = self._coordinate(rounds), self._messages(setting, rounds), unclipped(self.scale)
        return claim_over(rounds, self.epsilon * rounds, proved, source=source, assumes=assumes, further=further)

    @property
    def _known(self) -> float:
        """Epsilon of one coordinate against an adversary that knows the dither, as the server does."""
        return privacy.scalar_epsilon(self.epsilon, self.lattice.step, self.lattice.edge)

    def _coordinate(self, rounds: int) -> Proof:
        if self.noise_scale > 0:
            why = (
                f"given the dither, which a server knows, only the private noise protects the update, with scale "
                f"{self.noise_scale:.6g} instead of {2 / self.epsilon:.6g}; the error is bounded and hides nothing."
            )
            return Proof.pure(self._known, rounds, Unit.COORDINATE, why)
        chance = privacy.uniform_delta(self.lattice.step)
        why = (
            "there is no private noise: given the dither, which a server knows, a message is a function of the update, "
            f"and the two ends of a coordinate's range differ in it with probability {chance:.3g}."
        )
        return Proof.leak(chance, rounds, Unit.COORDINATE, why)

    def _messages(self, setting: Setting, rounds: int) -> tuple[Proof, ...]:
        dim, given = setting.dim, "" if self.scale == "public" else "given the scale, "
        if self.noise_scale == 0:
            why = f"{given}each of {dim} coordinates may reveal the change, because there is no private noise."
            cube = Proof.leak(privacy.uniform_delta(self.lattice.step), dim * rounds, Unit.MESSAGE, why, _CUBE)
        else:
            why = f"{given}all {dim} coordinates may change across their whole range at once."
            cube = Proof.pure(dim * self._known, rounds, Unit.MESSAGE, why, _CUBE)
        if self.scale == "public":
            return (cube,)
        complete = Proof.none(Unit.MESSAGE, CLEAR)
        if self.noise_scale == 0:
            return cube, complete
        # (1/3, ..., 1/3) and its negative are farthest apart; if the mean is subtracted, half the signs must differ
        even = self.scale == "vector" or all(size % 2 == 0 for size in setting.layout.sizes)
        why = f"given the scale, all {dim} coordinates lie on a sphere; the bound does not use clipping."
        total = privacy.sphere_epsilon(2 / self.noise_scale, dim)
        tight = even and self.lattice.edge >= 1 / 3
        return cube, Proof.pure(total, rounds, Unit.MESSAGE, why, "closed form, on the sphere", tight=tight), complete


def noise_scale(epsilon: float, bits: int, gamma: Radius = "paper") -> float:
    """b' of the private noise."""
    return JoPEQ(epsilon=epsilon, bits=bits, gamma=gamma).noise_scale


FORMULAS = {"noise_scale": noise_scale, "message_bits": message_bits}
"""Formulas of the paper that recipes draw."""
