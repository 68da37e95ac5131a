"""Subtractive dithered quantization of single coordinates, without noise."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from leakgauge.defenses._jopeq.privacy import uniform_delta
from leakgauge.defenses._jopeq.quantizer import Bare, bare_claim
from leakgauge.harness.core.accounting import Leak, repeat
from leakgauge.harness.core.claim import Claim, Proof, Unit
from leakgauge.harness.core.contract import Setting


@dataclass(frozen=True)
class SDQ(Bare):
    """Subtractive dithered quantization: scale, add a shared dither, round each coordinate, subtract it again.

    Behind another defense, as in `laplace+sdq`, it carries that one's numbers; its own scale is then not used.

    Args:
        bits: R, 1 to 16; 2^R + 1 levels.
        gamma: radius of the quantizer; the step is Delta = 2 gamma/(2^R + 1). None: 1.5 sqrt(1 + v), v the variance of
            the noise that comes in; 1.5 where there is none.

    Guarantees:
        8 bytes a tensor, then ceil(d * ceil(log2(2^R + 1)) / 8) bytes. An honest rate is log2(2^R + 1) bits a
        coordinate, not R.
        Without overload decode(encode(u)) - u is uniform on (-Delta/2, Delta/2), times the tensor's scale, in each
        coordinate, independently and of u.

    Raises:
        ValueError: a parameter out of range.

    Source: the baseline FL+SDQ of Lang, Sofer, Shaked, Shlezinger 2022, as in its reference code; without the shared
        key, the middle of a level is what can be said.
    """

    dimension: ClassVar[int] = 1

    def claim(self, history: Sequence[None], setting: Setting) -> Claim:
        """Nothing is promised."""
        chance = uniform_delta(self.lattice.step)
        why = f"given the scale: the ends of a coordinate's range differ in a message with probability {chance:.3g}."
        leak = Proof(repeat(Leak(chance), len(history)), Unit.COORDINATE, "closed form", why)
        return bare_claim(len(history), leak)
