"""The distributed discrete Gaussian mechanism in a secure sum."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from leakgauge.defenses._secure_sum import RoundedSum


@dataclass(frozen=True)
class DistributedGaussian(RoundedSum):
    """The distributed discrete Gaussian: each client adds discrete Gaussian numbers, and only the sum is seen.

    A sum of discrete Gaussians is no discrete Gaussian, but nearly one if each is wide: the proof adds the difference.

    Args:
        clip: C, bound on the l2 norm of a client's update, in units of the update.
        epsilon: privacy budget of the whole run of `setting.turns` rounds, for one client, at `delta`; sets the noise.
            Default 8 unless `noise_std` is given.
        delta: delta of the guarantee for the whole run.
        noise_std: the parameter sigma of the noise in a coordinate of the sum of `senders` clients, in units of the
            update; replaces `epsilon`.
        bits, reach, senders, rotation: as for `skellam`.

    Guarantees:
        As for `skellam`, with discrete Gaussian noise.

    Raises:
        ValueError: a parameter is out of range; in `init`, see `RoundedSum.init`.

    Source: Kairouz, Liu, Steinke 2021, "The distributed discrete Gaussian mechanism for federated learning with secure
        aggregation". Differs: see `defenses/_secure_sum.py` and `IntegerNoise`; no amplification by sampling; numbers
        are drawn by a table of cumulative probabilities, with absolute errors below 1e-15, and none is larger than a
        number that has a probability below 1e-16. The proof is for exact probabilities.
    """

    source: ClassVar[str] = "Kairouz, Liu, Steinke 2021; comparison with normal noise by us"
    law: ClassVar[str] = "discrete"
