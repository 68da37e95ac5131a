"""The privacy of sums of integers with integer noise that many clients add together."""

from __future__ import annotations

import functools
import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from scipy import optimize, special

from leakgauge.harness.core.gaussian import gaussian_epsilon
from leakgauge.harness.core.stats import Numbers

_STEPS = 20  # steps of a table in a standard deviation
_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(8)
_FAR = 400.0  # minus the logarithm of the probability of noise beyond a table
_LARGEST = 300.0  # epsilon above which this probability could count
_SPARED = 1e-9  # share of delta for all that is beyond a table
_ROUNDING = 1e-12  # error of one number's log ratio of probabilities by rounding
_EXPANDED = 1e6  # variance above which probabilities are expanded
_LEAST = 100.0  # least variance of noise that is compared with normal noise
_TILTS, _SMALL, _NEAR = (-3.0, 22.0), 30.0, {"xatol": 0.02}  # of a search for Chernoff's tilt, in its logarithm
_DELTAS = np.exp(np.arange(-70.0, 0.1, 0.5))  # at which epsilon is computed for bounds of delta
_SHARES = (0.1, 0.01, 1e-4)  # shares of delta for noise that is unlike normal noise
ORDERS = np.unique(np.geomspace(2, 1e6, 300).round())
"""The orders of Renyi divergences, whole numbers."""

_COIN_ORDERS = np.unique(np.concatenate([np.arange(2.0, 20.0), np.geomspace(20, 2e4, 40).round()]))
_RARE = 100.0  # minus the logarithm of the probability that fewer coins are fair


def renyi_epsilon(divergences: Numbers, delta: float, orders: Numbers = ORDERS) -> float:
    """Smallest epsilon at delta > 0 that follows from Renyi divergences of these orders.

    Source: Canonne, Kamath, Steinke 2020, "The discrete Gaussian for differential privacy", Prop. 12.
    """
    bounds = divergences + np.log1p(-1 / orders) - (math.log(delta) + np.log(orders)) / (orders - 1)
    return max(0.0, float(bounds.min()))


@dataclass(frozen=True)
class Summed(ABC):
    """`times` sums of vectors of `count` integers; an event of `core.accounting`."""

    count: int
    times: int = 1

    def epsilon(self, delta: float) -> float:
        """An upper bound of epsilon; infinite at delta = 0."""
        return self._epsilon(delta) if delta > 0 and self.times else 0.0 if not self.times else math.inf

    @abstractmethod
    def _epsilon(self, delta: float) -> float:
        """The same at delta > 0."""

    def delta(self, epsilon: float) -> float:
        """An upper bound of delta: between known points, delta is convex in exp(epsilon)."""
        curve = _curve(self)
        at = int(np.searchsorted(-curve, -epsilon))  # the first point whose epsilon is not above this one
        if at in (0, len(curve)):
            return float(_DELTAS[0]) if at == 0 else 1.0
        low, high = curve[at], curve[at - 1]
        share = math.expm1(epsilon - low) / math.expm1(high - low) if high - low < _FAR else 0.0
        return float(_DELTAS[at] + share * (_DELTAS[at - 1] - _DELTAS[at]))


@functools.lru_cache(maxsize=16)
def _curve(event: Summed) -> Numbers:
    """[len(_DELTAS)] decreasing epsilons."""
    return np.minimum.accumulate([event.epsilon(float(delta)) for delta in _DELTAS])


@dataclass(frozen=True)
class IntegerNoise(Summed):
    """Each integer has independent noise; neighbors move the vector by integers, by at most `moved` in l2 norm.

    Two bounds are known, and the smaller one counts.

    1. Normal noise that is rounded to an integer is a function of a Gaussian mechanism's output, because the vectors
       are integers. Let L be the sum over all integers and times of ln(P / G), where P is the noise's probability and G
       that of rounded normal noise, whose variance is 1/12 less. With eta_1 and eta_2 such that L > eta_1 has
       probability at most delta_1 under P, and L < -eta_2 at most delta_2 under G (Chernoff),

           epsilon = epsilon_0 + eta_1 + eta_2,  delta = exp(eta_1) delta_0 + delta_1 + exp(epsilon_0 + eta_1) delta_2,

       for any (epsilon_0, delta_0) of the Gaussian mechanism. The law of L is the same for every update, so that this
       also holds if updates depend on earlier sums.
    2. Renyi divergences.

    Attributes:
        variance: of the noise of one integer; of a discrete Gaussian, its parameter sigma^2.
        moved: bound on the l2 norm by which neighbors differ.
        senders: the number of clients whose noise adds up to it.
        law: `skellam`, or `discrete`, the discrete Gaussian.

    Source: the Renyi bound of Skellam noise is Agarwal, Kairouz, Liu 2021, Thm 3.5; those of sums of discrete Gaussians
        are Kairouz, Liu, Steinke 2021, Thm 12 (difference of the sum from one discrete Gaussian), and Canonne et al.
        2020, Thm 14. The comparison with normal noise is ours.
    """

    variance: float = 1.0
    moved: float = 1.0
    senders: int = 1
    law: str = "skellam"

    def _epsilon(self, delta: float) -> float:
        return 0.0 if self.moved == 0 else min(self._renyi(delta), _near(self, delta))

    @property
    def uneven(self) -> float:
        """Bound on ln of the ratio of the probabilities of all numbers under the sum of discrete Gaussians and one."""
        if self.law == "skellam":
            return 0.0
        k = np.arange(1, self.senders)
        terms = np.exp(-2 * math.pi**2 * self.variance / self.senders * k / (k + 1))
        return self.count * self.times * 10 * float(terms.sum())

    def _renyi(self, delta: float) -> float:
        squared = self.moved**2
        each = ORDERS * squared / (2 * self.variance)
        if self.law == "skellam":
            # whole numbers are at most their squares
            absolute = min(squared, math.sqrt(self.count) * self.moved)
            fine = ((2 * ORDERS - 1) * squared + 6 * absolute) / (4 * self.variance**2)
            each = each + np.minimum(fine, 3 * absolute / (2 * self.variance))
        uneven = (2 * ORDERS - 1) / (ORDERS - 1) * self.uneven
        return renyi_epsilon(self.times * each + uneven, delta)


class _Table(NamedTuple):
    """Logarithms of the probabilities of integers: of noise, and of rounded normal noise.

    Of wide noise, each stands for several integers. Sums of functions that are as smooth as a normal density with 20
    steps in its standard deviation differ from their integrals by exp(-2 pi^2 20^2), whatever the step.
    """

    noise: Numbers
    normal: Numbers


def log_skellam(z: Numbers, variance: float) -> Numbers:
    """Logarithm of the probability exp(-v) I_z(v) of whole numbers z under the difference of two Poisson numbers.

    Above a variance of 1e6 by Debye's expansion of Bessel's function I, which scipy does not compute above 2e9.
    """
    if variance <= _EXPANDED:
        with np.errstate(divide="ignore"):
            return np.asarray(np.log(special.ive(np.abs(z), variance)), np.float64)
    radius = np.hypot(z, variance)
    p = np.square(z / radius)
    series = 1 + (3 - 5 * p) / (24 * radius) + (81 - 462 * p + 385 * p**2) / (1152 * radius**2)
    exponents = z * (z / (radius + variance) - np.arcsinh(z / variance))
    return np.asarray(exponents - np.log(2 * math.pi * radius) / 2 + np.log(series), np.float64)


def log_discrete_gaussian(z: Numbers, variance: float) -> Numbers:
    """Logarithm of a discrete Gaussian's probability of whole numbers z, all that count."""
    exponents = -(z**2) / (2 * variance)
    return np.asarray(exponents - special.logsumexp(exponents), np.float64)


def reach(variance: float, exponent: float) -> int:
    """A whole number that integer noise exceeds in size with a probability below 2 exp(-exponent) (Bernstein)."""
    return math.ceil((exponent / 3 + math.sqrt(exponent**2 / 9 + 2 * exponent * variance)) * (1 + 1e-9)) + 1


LAWS = {"skellam": log_skellam, "discrete": log_discrete_gaussian}
"""Logarithms of the probabilities of whole numbers under laws of noise, by the names that `IntegerNoise` uses."""


@functools.lru_cache(maxsize=8)
def _table(law: str, variance: float) -> _Table:
    most, step = reach(variance, _FAR), max(1, int(math.sqrt(variance) / _STEPS))
    z = np.arange(-(most // step) - 1, most // step + 2.0) * step
    normal = variance - 1 / 12
    within = _NODES / 2  # the rounded normal probability is the mean density of an interval
    tilted = np.exp(-(2 * z[:, None] * within + within**2) / (2 * normal)) @ (_WEIGHTS / 2)
    log_normal = -(z**2) / (2 * normal) - math.log(2 * math.pi * normal) / 2 + np.log(tilted)
    scale = math.log(step) if law == "skellam" else 0.0  # the other is normalized over z
    return _Table(LAWS[law](z, variance) + scale, log_normal + math.log(step))


@functools.lru_cache(maxsize=1024)
def _near(event: IntegerNoise, delta: float) -> float:
    """The bound by normal noise; infinite where it is not computed."""
    if event.variance < _LEAST:
        return math.inf
    table, numbers = _table(event.law, event.variance), event.count * event.times
    ratios, uneven = table.noise - table.normal, event.uneven
    mu, best = event.moved * math.sqrt(event.times / (event.variance - 1 / 12)), math.inf
    for share in _SHARES:
        rare = -math.log(share * delta * (1 - _SPARED) / 2)
        over = _exceeded(table.noise, ratios, numbers, rare + uneven) + uneven
        least = gaussian_epsilon(mu, (1 - share) * delta * math.exp(-over)) if over < _FAR else math.inf
        if least + over + rare > _LARGEST:
            continue
        under = _exceeded(table.normal, -ratios, numbers, rare + least + over) + uneven
        best = min(best, least + over + under)
    return best


def _exceeded(logs: Numbers, values: Numbers, count: int, rare: float) -> float:
    """What the sum of `count` independent values exceeds with a probability of at most exp(-rare) (Chernoff)."""

    def bound(log_tilt: float) -> float:
        exponents = math.exp(log_tilt) * values
        # the probabilities sum to 1, and the moment differs little from it
        small = exponents < _SMALL
        moment = np.where(small, np.exp(logs) * np.expm1(np.minimum(exponents, _SMALL)), 0.0).sum()
        moment += np.exp((logs + exponents)[~small]).sum()
        return float(count * math.log1p(float(moment)) + rare) / math.exp(log_tilt)

    above = values > 0
    most = float(((_LARGEST - logs[above]) / values[above]).min(initial=math.exp(_TILTS[1])))
    found = optimize.minimize_scalar(bound, bounds=(_TILTS[0], math.log(most)), method="bounded", options=_NEAR)
    return float(found.fun) + _ROUNDING * count


@dataclass(frozen=True)
class Coins(Summed):
    """Each integer is a sum of coins: each of `senders` clients tosses `trials` coins of one chance, 1/2 + t.

    The chance shows a number of the client's vector: |t| <= `offset`, and neighbors are a vector and zero, where the
    sum of t^2 over the integers is at most `squared` times the square of `offset`.

    A coin of chance 1/2 + t is fair with probability 1 - 2 |t|, and else shows a value that the adversary may know. So
    at least n_0 of the other clients' coins are fair, up to a probability of exp(-100). Let w(z) be the ratio of the
    probabilities of z heads among the client's and these coins, with t and with 0. Both E w^a - 1 and E w^(1 - a) - 1,
    divided by t^2, grow with t. So their values at `offset` bound the sums over all integers.

    1. For whole orders a, E w^a is the mean of a product over coins of ((1 + 2t)^k + (1 - 2t)^k) / 2, where a coin is
       in k of a random sets of coins.
    2. Of z heads, a hypergeometric number is the client's. It is a sum of independent coins, so w(z) is a product of
       factors 1 + 2 r t with |r| <= 1. The power 1 - a of a factor is E exp(-2 r t U) for U of a Gamma distribution
       with shape a - 1. So E w^(1 - a) is E exp(t V) for some V. Exchanging heads and tails turns t into -t, so only
       even powers of t remain, and their coefficients are E V^2k / (2k)!, which are not negative.

    Source: Chen, Ozgur, Kairouz 2022, "The Poisson binomial mechanism for unbiased federated learning with secure
        aggregation". Differs: their bound counts each integer at the largest offset; ours counts squares. Hui and Park
        2014, "The representation of hypergeometric random variables using independent Bernoulli random variables".
    """

    trials: int = 2
    offset: float = 0.1
    senders: int = 1
    squared: float = 1.0

    def _epsilon(self, delta: float) -> float:
        each = _coins(self.trials, self.offset, self.senders)
        return renyi_epsilon(self.times * self.squared * each, delta * (1 - _SPARED), _COIN_ORDERS)


@functools.lru_cache(maxsize=256)
@np.errstate(over="ignore", invalid="ignore")
def _coins(trials: int, offset: float, senders: int) -> Numbers:
    """[len(_COIN_ORDERS)] Renyi divergences of one integer at `offset`, as a bound for sums of squares."""
    others = (senders - 1) * trials
    spread = 2 * others * offset * (1 - 2 * offset)
    fair = math.floor(others * (1 - 2 * offset) - _RARE / 3 - math.sqrt(_RARE**2 / 9 + 2 * _RARE * spread))
    fair = max(fair, 0)
    total = fair + trials
    step = max(1, int(math.sqrt(total) / 2 / _STEPS))  # as for `_Table`
    heads, own = _heads(total, 14)[::step], _heads(trials, 12 if fair else 14)
    other = heads - own[:, None]
    shares = np.where(
        (other >= 0) & (other <= fair), _log_fair(trials, own)[:, None] + _log_fair(fair, other), -math.inf
    )
    shares -= special.logsumexp(shares, axis=0)
    chances, order = step * np.exp(_log_fair(total, heads)), _COIN_ORDERS[:, None]
    tilt = own * math.log1p(2 * offset) + (trials - own) * math.log1p(-2 * offset)
    ratio = special.logsumexp(shares + tilt[:, None], axis=0)
    moved = np.expm1(ratio)  # its mean is 0
    there = (chances * (np.expm1(order * ratio) - order * moved)).sum(1)
    back = (chances * (np.expm1((1 - order) * ratio) - (1 - order) * moved)).sum(1)
    worst = np.maximum(there, back)
    # an order a makes heads likeliest that are 2 a trials offset / sqrt(total) spreads away, and the table ends at 14
    inside = (len(heads) == total + 1) | (2 * _COIN_ORDERS * trials * offset < 5 * math.sqrt(total))
    return np.asarray(np.where(np.isfinite(worst) & inside, worst, math.inf) / (_COIN_ORDERS - 1), np.float64)


def _heads(coins: int, spreads: float) -> Numbers:
    """The whole numbers of heads of fair coins within so many standard deviations, and three more."""
    reached = spreads * math.sqrt(coins) / 2 + 3
    return np.arange(max(0, math.floor(coins / 2 - reached)), min(coins, math.ceil(coins / 2 + reached)) + 1.0)


def _log_fair(coins: int, heads: Numbers) -> Numbers:
    """Logarithms of the probabilities of heads of fair coins; of no use outside of 0 to `coins`."""
    ways = special.gammaln(coins + 1) - special.gammaln(heads + 1) - special.gammaln(coins - heads + 1)
    return np.asarray(ways - coins * math.log(2), np.float64)
