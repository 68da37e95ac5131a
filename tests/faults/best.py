"""What the best of all tests would need for the faults that the battery does not see, computed without a sample.

A test that rejects honest messages with probability `LEVEL` and those of a fault with `POWER` reads n messages of
n KL(fault | honest) >= kl(POWER | LEVEL) nats, whatever it computes (data processing, Bretagnolle-Huber-Tsybakov).

The update is known to the test and is the one that says most. All that a message of `sqsgd` says of its rounded levels
is one number, the matches, so that its channel bounds KL for every update. With one bit a coordinate, rounding hides
nearly everything: KL is then that of updates with k equal coordinates and zeros, for the best k.
"""

from __future__ import annotations

import numpy as np
from scipy import special, stats

from leakgauge.defenses._mvu import design
from leakgauge.defenses._privquant import _branches, choose
from leakgauge.harness.audit.law_test import LEVEL

POWER = 0.95
SENT = tuple(1 << k for k in range(11))
"""Coordinates of a message of `sqsgd`: longer ones say less, and take seconds each."""


def divergence(fault, honest):
    """KL in nats of two laws on the same outcomes, given as logarithms."""
    return float((np.exp(fault) * (fault - honest)).sum())


def messages(nats):
    """How many messages of so many nats each any test needs at least."""
    return divergence(*np.log([[POWER, 1 - POWER], [LEVEL, 1 - LEVEL]])) / nats


def channels(levels, epsilon, other):
    """The channels of two epsilons, for each number of coordinates that has one."""
    for d in SENT:
        try:
            yield choose(d, levels, epsilon), choose(d, levels, other)
        except ValueError:
            continue  # epsilon is too small for so many


def of_channel(fault, honest):
    """KL of what two channels send of known levels: of the branch, or of the matches if their thresholds differ."""
    if fault.tau == honest.tau:
        return divergence(*(special.log_expit(np.array([one.logit, -one.logit])) for one in (fault, honest)))
    fewer, more = _branches(fault.d, fault.levels)
    k = np.arange(fault.d + 1.0)
    count = special.gammaln(k[-1] + 1) - special.gammaln(k + 1) - special.gammaln(k[-1] + 1 - k)
    count += (k[-1] - k) * np.log(fault.levels - 1)
    logs = [
        count
        + np.where(
            k >= one.tau,
            special.log_expit(one.logit) - more[one.tau - 1],
            special.log_expit(-one.logit) - fewer[one.tau - 1],
        )
        for one in (fault, honest)
    ]
    return divergence(*logs)


def of_signs(channel, k):
    """[k + 1] log densities of a message of signs, relative to fair coins, by how many of its k signs agree.

    k coordinates of the update are 1 / sqrt(k) of the range, and the others zero.
    """
    d, tilt = channel.d, 0.5 / k**0.5
    matches = np.array(
        [
            np.convolve(np.convolve(binomial(agree, 0.5 + tilt), binomial(k - agree, 0.5 - tilt)), binomial(d - k, 0.5))
            for agree in range(k + 1)
        ]
    )
    fewer, more = _branches(d, 2)
    below, above = np.log(matches[:, : channel.tau].sum(1)), np.log(matches[:, channel.tau :].sum(1))
    favored = special.log_expit(channel.logit) - more[channel.tau - 1] + above
    lesser = special.log_expit(-channel.logit) - fewer[channel.tau - 1] + below
    return d * np.log(2) + np.logaddexp(favored, lesser)


def binomial(n, chance):
    """[n + 1] probabilities of counts."""
    return stats.binom.pmf(np.arange(n + 1), n, chance)


def sqsgd(epsilon, other, bits, share=1.0):
    """The most nats that a message of `sqsgd` says of its epsilon: of `other` in a share of all messages."""
    most = 0.0
    for honest, fault in channels(1 << bits, epsilon, other):
        nats = of_channel(fault, honest) if share == 1 else np.inf
        if bits == 1:
            flat = (of_flat(fault, honest, k, share) for k in SENT if k <= honest.d)
            nats = min(nats, max(flat))
        most = max(most, nats)
    return most


def of_flat(fault, honest, k, share):
    """KL for an update with k equal coordinates."""
    coins, plain = np.log(binomial(k, 0.5)), of_signs(honest, k)
    mixed = (
        np.logaddexp(np.log(share) + of_signs(fault, k), np.log1p(-share) + plain) if share < 1 else of_signs(fault, k)
    )
    return divergence(coins + mixed, coins + plain)


def vqsgd(epsilon, other, points, repeats):
    """The most nats of a message of `vqsgd`: its points, known before randomized response."""
    errs = np.array([-np.logaddexp(0.0, one - np.log(points - 1)) for one in (other, epsilon)])
    return repeats * divergence(*np.stack([errs, np.log1p(-np.exp(errs))], 1))


def mvu(epsilon, other, share, numbers):
    """The nats of a message of `mvu` with one bit a coordinate, at the ends of the range: `other` in a share."""
    errors = np.arange(min(numbers, 2000) + 1)
    fault, honest = (stats.binom.logpmf(errors, numbers, design(one, 1, 1).P[0, 1]) for one in (other, epsilon))
    return divergence(np.logaddexp(np.log(share) + fault, np.log1p(-share) + honest), honest)
