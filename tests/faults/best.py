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

from leakgauge.defenses._privquant import _branches, choose
from leakgauge.defenses.mvu import design
from leakgauge.harness.audit.goodness_of_fit import LEVEL

POWER = 0.95
SENT = tuple(1 << k for k in range(11))
"""Coordinates of a message of `sqsgd`: longer ones say less, and take seconds each."""


def divergence(fault, honest):
    """KL in nats of two distributions on the same outcomes, given as logarithms."""
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
    d, k = fault.d, np.arange(fault.d + 1.0)
    count = special.gammaln(d + 1) - special.gammaln(k + 1) - special.gammaln(d + 1 - k)
    count += (d - k) * np.log(fault.levels - 1)
    return divergence(*(count + np.where(k >= one.tau, *branches(one)) for one in (fault, honest)))


def branches(channel):
    """The log probabilities of one message in the favored branch, and in the other."""
    fewer, more = (logs[channel.tau - 1] for logs in _branches(channel.d, channel.levels))
    return special.log_expit(channel.logit) - more, special.log_expit(-channel.logit) - fewer


def of_signs(channel, k):
    """[k + 1] log densities of a message of signs, relative to fair coins, by how many of its k signs agree.

    k coordinates of the update are 1 / sqrt(k) of the range, and the others zero.
    """
    d, high, coins = channel.d, 0.5 + 0.5 / k**0.5, binomial(channel.d - k, 0.5)
    found = []
    for agree in range(k + 1):
        matches = np.convolve(np.convolve(binomial(agree, high), binomial(k - agree, 1 - high)), coins)
        with np.errstate(divide="ignore"):
            some = np.log([matches[channel.tau :].sum(), matches[: channel.tau].sum()])
        found.append(d * np.log(2) + np.logaddexp(*(some + branches(channel))))
    return np.array(found)


def of_flat(fault, honest, k, share=1.0):
    """KL of signs for an update with k equal coordinates, if the fault is in a share of all messages."""
    coins, plain = np.log(binomial(k, 0.5)), of_signs(honest, k)
    with np.errstate(divide="ignore"):
        mixed = np.logaddexp(np.log(share) + of_signs(fault, k), np.log1p(-share) + plain)
    return divergence(coins + mixed, coins + plain)


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


def vqsgd(epsilon, other, points, repeats):
    """The most nats of a message of `vqsgd`: its points, known before randomized response."""
    errs = np.array([-np.logaddexp(0.0, one - np.log(points - 1)) for one in (other, epsilon)])
    return repeats * divergence(*np.stack([errs, np.log1p(-np.exp(errs))], 1))


def mvu(epsilon, other, share, numbers):
    """The nats of a message of `mvu` with one bit a coordinate, at the ends of the range: `other` in a share."""
    errors = np.arange(min(numbers, 2000) + 1)
    fault, honest = (stats.binom.logpmf(errors, numbers, design(one, 1, 1).P[0, 1]) for one in (other, epsilon))
    return divergence(np.logaddexp(np.log(share) + fault, np.log1p(-share) + honest), honest)
