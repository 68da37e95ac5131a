"""The distributed discrete Gaussian mechanism in a secure sum."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from leakgauge.defenses._secure_sum import Plan, RoundedSum, cumulative
from leakgauge.harness.core import rng
from leakgauge.harness.core.accounting import Event
from leakgauge.harness.core.distribution import Integers
from leakgauge.harness.core.integer_noise import IntegerNoise, log_discrete_gaussian, reach
from leakgauge.harness.core.rng import Key
from leakgauge.harness.core.stats import Numbers


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

    def draw(self, variance: float, n: int, key: Key) -> Integers:
        """Inverts the distribution function at uniform numbers."""
        ends = _ends(variance)
        return rng.inverted(key, ends, n) - len(ends) // 2

    def masses(self, variance: float) -> Numbers:
        """exp(-z^2 / (2 sigma^2)), normalized."""
        return _masses(variance)

    def event(self, plan: Plan, senders: int, rounds: int) -> Event:
        """The noise of these clients."""
        variance = plan.variance * senders / plan.senders
        return IntegerNoise(len(plan.signs), rounds, variance, plan.bound, senders, "discrete")


@functools.lru_cache(maxsize=8)
def _masses(variance: float) -> Numbers:
    most = reach(variance, 40.0)
    return np.exp(log_discrete_gaussian(np.arange(-most, most + 1.0), variance))


@functools.lru_cache(maxsize=8)
def _ends(variance: float) -> Numbers:
    """[2 k] the cumulative probabilities of -k to k - 1."""
    return cumulative(_masses(variance))
