"""Subtractive dithered quantization of pairs of coordinates on a lattice, without noise."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from leakgauge.defenses._jopeq.quantizer import Bare, bare_claim
from leakgauge.harness.core.claim import Claim, Proof, Unit
from leakgauge.harness.core.contract import Setting


@dataclass(frozen=True)
class LatticeSDQ(Bare):
    """Subtractive dithered quantization on the hexagonal lattice: like `sdq`, but for pairs of coordinates.

    After another defense, as in `t-noise+sdq-lattice`, it encodes the numbers of that defense in neighboring pairs and
    ignores its own scale.

    Args:
        bits: R, 1 to 16; the quantizer has 2^R + 1 levels per lattice coordinate.
        gamma: radius of the quantizer, as for `sdq`; v is the variance of the noise in one coordinate.

    Guarantees:
        Messages have 12 bytes per tensor, then ceil(n * ceil(log2(2^R + 1)) / 8) bytes for n numbers: d, plus one for
        each tensor of odd length. The rate of 2^R + 1 levels is log2(2^R + 1) bits per number, not R.
        Without overload, decode(encode(u)) - u is, for each pair, uniform on the cell Delta G [-1/2, 1/2)^2, times the
        tensor's scale, independent of the other pairs and of u; G = [[1, 0], [1/sqrt 3, 2/sqrt 3]].

    Raises:
        ValueError: a parameter is out of range.

    Source: the baseline FL+SDQ (L = 2) of Lang, Sofer, Shaked, Shlezinger 2022, as in its reference code: the cell is
        the parallelogram, not the hexagon.
    """

    dimension: ClassVar[int] = 2

    bits: int = 2

    def claim(self, history: Sequence[None], setting: Setting) -> Claim:
        """No privacy is claimed."""
        chance = pair_leak(self.lattice.step)
        why = f"given the scale, two ends of the unit disc differ in a message with probability {chance:.3g}."
        return bare_claim(len(history), Proof.leak(chance, len(history), Unit.SUBVECTOR, why))


def pair_leak(step: float) -> float:
    """The largest probability, over the dither, that two points of the unit disc have different levels.

    The two ends of a diameter in direction t differ in lattice coordinates by 2 cos t and 2 cos(t - 120 degrees). In
    each coordinate, the levels differ with probability |difference| / step, at most 1.

    | step | probability |
    |---|---|
    | <= 2 | 1 |
    | <= 4/sqrt 3 | 3/4 + 1/step^2 |
    | above | 2 sqrt 3/step - 3/step^2 |
    """
    if step <= 2:
        return 1.0
    return 0.75 + 1 / step**2 if step <= 4 / 3**0.5 else 2 * 3**0.5 / step - 3 / step**2
