"""The Skellam mechanism in a secure sum."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from leakgauge.defenses._secure_sum import RoundedSum
from leakgauge.harness.core import rng
from leakgauge.harness.core.distribution import Integers
from leakgauge.harness.core.rng import Key

_WIDE = 1e6  # the variance from which on a table of all numbers takes longer than Poisson numbers


@dataclass(frozen=True)
class Skellam(RoundedSum):
    """The Skellam mechanism: each client adds the difference of two Poisson numbers, and only the sum is seen.

    Sums of Skellam numbers are Skellam numbers, so that the sum's noise is exactly that of the proof.

    Args:
        clip: C, bound on the l2 norm of a client's update, in units of the update.
        epsilon: privacy budget of the whole run of `setting.turns` rounds, for one client, at `delta`; sets the noise.
            Default 8 unless `noise_std` is given.
        delta: delta of the guarantee for the whole run.
        noise_std: standard deviation of the noise in a coordinate of the sum of `senders` clients, in units of the
            update; replaces `epsilon`.
        bits: 2 to 20, bits of a number of a message and of the sum, which are modulo 2^bits.
        reach: the grid is as fine as 2^bits values allow that reach so many standard deviations to both sides, for a
            rotated coordinate of the sum of equal updates of norm C. Small: less privacy is lost by rounding, and more
            sums wrap around; at 2, one coordinate in 22, which adds .7 of the noise's variance.
        senders: the least number of clients on whose noise the proof relies; 0: all U clients of a round. With fewer
            than U, each client adds more noise.
        rotation: seed of the public signs of the rotation.

    Guarantees:
        Messages have ceil(n * bits / 8) bytes, where n is d, rounded up to a power of two; so has the sum.
        The sum depends on the updates only through the sum of the rounded updates.
        decode - sum(clip(u)) / U has mean 0, if no rounded vector is shortened and no sum wraps around.
        Adding or removing a client's update moves the integers of the sum by a bounded l2 norm.

    Raises:
        ValueError: a parameter is out of range; in `init`, see `RoundedSum.init`.

    Source: Agarwal, Kairouz, Liu 2021, "The Skellam mechanism for differentially private federated learning". Differs:
        see `defenses/_secure_sum.py` and `IntegerNoise`; no amplification by sampling; numbers are drawn by float64,
        from a table or by numpy's generator of Poisson numbers, so that probabilities have errors near 1e-15.
    """

    source: ClassVar[str] = "Agarwal, Kairouz, Liu 2021; comparison with normal noise by us"

    law: ClassVar[str] = "skellam"

    def draw(self, variance: float, n: int, key: Key) -> Integers:
        """Inverts the distribution function; wide noise is the difference of two Poisson numbers."""
        if variance < _WIDE:
            return super().draw(variance, n, key)
        return rng.poisson(key.child("up"), variance / 2, n) - rng.poisson(key.child("down"), variance / 2, n)
