"""Subtractive dithered quantization of single coordinates, without noise."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from leakgauge.defenses._jopeq.privacy import uniform_delta
from leakgauge.defenses._jopeq.quantizer import Bare, bare_claim
from leakgauge.harness.core.claim import Claim, Proof, Unit
from leakgauge.harness.core.contract import Setting


@dataclass(frozen=True)
class SDQ(Bare):
    """Subtractive dithered quantization: scale, add a shared dither, round each coordinate, subtract the dither.

    After another defense, as in `laplace+sdq`, it encodes the numbers of that defense and ignores its own scale.

    Args:
        bits: R, 1 to 16; the quantizer has 2^R + 1 levels.
        gamma: radius of the quantizer: a number, or `reference`, or `paper`, as for `jopeq`, where v, the variance of
            the first defense's noise or 0 without one, gives epsilon = sqrt(8/v). None: `reference`, 1.5 sqrt(1 + v)
            with step Delta = 2 gamma/(2^R + 1).

    Guarantees:
        Messages have 8 bytes per tensor, then ceil(d * ceil(log2(2^R + 1)) / 8) bytes. The rate of 2^R + 1 levels is
        log2(2^R + 1) bits per coordinate, not R.
        Without overload, decode(encode(u)) - u is uniform on (-Delta/2, Delta/2), times the tensor's scale, in each
        coordinate, independent of the other coordinates and of u.

    Raises:
        ValueError: a parameter is out of range.

    Source: the baseline FL+SDQ of Lang, Sofer, Shaked, Shlezinger 2022, as in its reference code. Without the shared
        key, the estimate is the middle of a level.
    """

    dimension: ClassVar[int] = 1

    def claim(self, history: Sequence[None], setting: Setting) -> Claim:
        """No privacy is claimed."""
        chance = uniform_delta(self.lattice.step)
        why = f"given the scale, the ends of a coordinate's range differ in a message with probability {chance:.3g}."
        return bare_claim(len(history), Proof.leak(chance, len(history), Unit.COORDINATE, why))
