"""PrivQuant: stochastic rounding to K levels, then an exactly epsilon-LDP channel on the vectors of levels.

Counts of vectors of levels are stored as logarithms: K^d exceeds float64 at d = 256 for K = 16.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from scipy import special
from torch import Tensor

from leakgauge.harness.core import rng
from leakgauge.harness.core.checks import positive
from leakgauge.harness.core.distribution import (
    SHARES,
    Branches,
    DistributionError,
    Integers,
    MessageDistribution,
    PairLoss,
    Reading,
    outcomes,
)
from leakgauge.harness.core.rng import Key
from leakgauge.harness.core.stats import Numbers

A = TypeVar("A", Tensor, Numbers)

_DIGITS = 3  # number of 53-bit digits in a log-uniform draw: steps of 2^-159, finer than the 2^-128 of a 128-bit key
# Distance in levels beyond which `misfit` departs from the exact distribution; measured in docs/attacks.md
_KNEE = 0.97
_EXACT = 1e-9  # difference in epsilon between two thresholds' costs that rounding explains
_BLOCK = 1 << 15  # number of coordinates processed at a time, few enough to stay in the cache
# Least probability of a level in `misfit`: negligible even if the channel is the identity, but with a logarithm
_LEAST = 1e-250


@dataclass(frozen=True)
class PrivQuant:
    """A channel on {0..K-1}^d that favors the vectors with at least tau coordinates equal to those of the input.

    A match is a coordinate equal to that of the input u. With probability p, the output V is uniform on the N_hi
    vectors with at least tau matches (the favored branch), otherwise uniform on the N_lo vectors with fewer matches
    (the lesser branch).

    Args:
        d: number of coordinates.
        levels: K, at least 2.
        tau: threshold of the matches, 1 to d.
        logit: ln(p / (1 - p)), at least 0. It is used instead of p because, from a logit of 36.8 on, p is 1 in float64,
            and epsilon infinite.

    Guarantees:
        For any two inputs, the probabilities of an output differ by a factor of at most e^epsilon; some inputs attain
        this.
        E[value(V)] = normalizer * value(u), with normalizer > 0.

    | case | channel |
    |---|---|
    | tau = 1 | the lesser branch holds only the vectors without a match |
    | tau = d | the input, with probability p |
    | K = 2 | PrivUnit-infinity of Bhowmick et al. 2018 |

    Raises:
        ValueError: a parameter is out of range, or threshold and logit favor the vectors with few matches.

    Source: sqSGD (ICLR 2021 submission), Algorithm 1 and eq. (8). Differs: rejects a ratio below 1, because eq. (8)
        bounds only one direction of the ratio; the server divides by `normalizer`.
    """

    d: int
    levels: int
    tau: int
    logit: float

    def __post_init__(self) -> None:
        _at_least(1, d=self.d)
        _at_least(2, levels=self.levels)
        if not 1 <= self.tau <= self.d:
            raise ValueError(f"expected 1 <= tau <= d={self.d}, got tau={self.tau}")
        if not 0 <= self.logit < math.inf:
            raise ValueError(f"expected a finite logit >= 0, got logit={self.logit}")
        least = -self._log_ratio
        if self.logit <= least:
            raise ValueError(
                f"expected logit > {least:.6g} at d={self.d}, levels={self.levels}, tau={self.tau}, "
                f"got logit={self.logit}: the output would point away from the input or not depend on it"
            )

    @property
    def log_rest(self) -> float:
        """ln(1 - p), the log probability of the lesser branch.

        `privatize` respects this probability down to 2^-128 (logit 88), the limit of a generator with a 128-bit key.
        Below 2^-128, only the favored branch runs. The distribution is then within 1 - p of the stated distribution in
        total variation,
        but loses the guarantee: an output excludes every input with fewer than tau matches, so epsilon is infinite. The
        delta at `epsilon`, (1 + e^epsilon) (1 - p), is about N_lo / N_hi.
        """
        return float(special.log_expit(-self.logit))

    @property
    def epsilon(self) -> float:
        """Exact pure epsilon of one output: logit + ln N_lo - ln N_hi, above 0."""
        return self.logit + self._log_ratio

    @property
    def normalizer(self) -> float:
        """m in E[value(V)] = m * value(u)."""
        tails = _tails(self.d, self.levels)
        # C(d-1, tau-1) (K-1)^(d-tau) = w_tau tau / d, and p/N_hi - (1-p)/N_lo = p/N_hi (1 - e^-epsilon), which
        # neither cancels nor overflows
        log_share = tails.weight[self.tau] - tails.upper[self.tau] + math.log(self.tau / self.d)
        return -math.exp(log_share + special.log_expit(self.logit)) * math.expm1(-self.epsilon)

    def privatize(self, u: Tensor, key: Key) -> Tensor:
        """Draw one output V for the input u.

        Args:
            u: [d] integer levels. Not modified.
            key: known only to this client. It uses four children, with one draw each.

        Returns:
            [d] int64 levels.

        Guarantees:
            The output has the distribution of the class: branch and number of matches exact to 2^-128 (see `log_rest`),
            then a pseudo-random choice among equally likely vectors. Takes O(d).

        Raises:
            ValueError: u is not d integers in 0..K-1.
        """
        if u.shape != (self.d,):
            raise ValueError(f"expected levels of shape [{self.d}], got {list(u.shape)}")
        _check_levels(u, self.levels)
        given = u.cpu().long().numpy()
        log_chance = _log_uniform(rng.uniform(key.child("matches"), (_DIGITS,), dtype=torch.float64))
        log_branch = _log_uniform(rng.uniform(key.child("branch"), (_DIGITS,), dtype=torch.float64))
        matches = self._matches(log_branch < self.log_rest, log_chance)
        # for large d, a permutation waits for memory at each step; for small d, stored results need a permutation
        positions = key.child("positions")
        large = self.d > rng.LARGE
        matching = rng.subset(positions, self.d, matches) if large else rng.permutation(positions, self.d)[:matches]
        sent = rng.integers(key.child("others"), self.d, self.levels - 1)
        for start in range(0, self.d, _BLOCK):
            block = sent[start : start + _BLOCK]
            block += block >= given[start : start + _BLOCK]
        sent[matching] = given[matching]
        return torch.from_numpy(sent)

    def misfit(self, received: Tensor, y: Tensor, bound: float) -> Tensor:
        """-ln of the product of the distributions of the single coordinates of V, given values y before rounding.

        P(V_j | y_j) = (1 - m)/K + m h_j, with h_j the probability that y_j is rounded to V_j, linear in y_j between two
        levels. The product ignores the dependence between matches; up to a constant, it is a Chernoff bound on the
        exact distribution. It has no slope if y is at least one level away from the received level, which is right
        while matches occur by chance. If nearly all coordinates match, however, an optimizer that starts further away
        finds no direction. So -ln h is continued by its parabola beyond `_KNEE` of a level, with two continuous
        derivatives.

        Args:
            received: [n, d] integer levels.
            y: [n, d] values, differentiable; clamped to [-bound, bound] as in `round_levels`.
            bound: U.

        Returns:
            [n] float64.

        Guarantees:
            Exact for d = 1 if y is nearer than the knee.
            Finite, with finite gradients, for every finite y; at least 0.
        """
        offset = (_position(y.double(), bound, self.levels) - received.to(y.device)).abs()
        over = (offset - _KNEE).clamp(min=0) / (1 - _KNEE)
        unlikely = over + over.square() / 2 - (-offset.clamp(max=_KNEE)).log1p()
        background = max((1 - self.normalizer) / self.levels, _LEAST)
        matched = math.log(self.normalizer) - unlikely
        return -torch.logaddexp(torch.full_like(matched, math.log(background)), matched).sum(-1).clamp(max=0)

    @property
    def _log_ratio(self) -> float:
        tails = _tails(self.d, self.levels)
        return float(tails.lower[self.tau - 1] - tails.upper[self.tau])

    def _matches(self, lesser: bool, log_chance: float) -> int:
        """The number of matches in a branch: the inverse cdf at a log-uniform number, from the small tail."""
        tails = _tails(self.d, self.levels)
        if lesser:
            return int(np.searchsorted(tails.lower[: self.tau], tails.lower[self.tau - 1] + log_chance))
        rising = tails.upper[self.tau :][::-1]
        return self.d - int(np.searchsorted(rising, tails.upper[self.tau] + log_chance))


def choose(d: int, levels: int, epsilon: float, share: float = 0.9) -> PrivQuant:
    """The channel with the largest threshold that costs at most share * epsilon; the branch uses the rest of epsilon.

    logit = (1 - share) * epsilon, and tau is the largest threshold with ln(N_lo / N_hi) <= share * epsilon.

    Guarantees:
        0 < choose(...).epsilon <= epsilon, up to rounding (relative 1e-13).

    Raises:
        ValueError: no threshold fits; the message names the smallest epsilon with a fitting threshold.

    Source: sqSGD, section 4, with kappa = 2 tau - d - 1. Differs: the paper requires kappa in 0..d-1, which excludes
        most of its own settings (at d = 512, K = 16 and kappa = 0, ln(N_lo / N_hi) is 377.4, more than 0.9 of its
        epsilon = 400; its K = 32, and K = 8 to 128 at d = 8192, fail likewise). A negative kappa is equally sound.
        Rejects eq. (8) with a ratio below 1, because the true epsilon may then exceed the given one.
    """
    _at_least(1, d=d)
    _at_least(2, levels=levels)
    positive(epsilon=epsilon)
    if not 0 < share < 1:
        raise ValueError(f"expected 0 < share < 1, got share={share}")
    tails = _tails(d, levels)
    ratios = tails.lower[:-1] - tails.upper[1:]  # ln(N_lo / N_hi) for tau = 1..d, increasing
    logit = (1 - share) * epsilon
    tau = int(np.searchsorted(ratios, share * epsilon, side="right"))
    if tau == 0 or logit + ratios[tau - 1] <= 0:
        # 1e-6, so that the printed number is itself feasible
        first = int(np.argmax(ratios >= 0))
        smallest = float(ratios[first]) / share
        if first:  # or where the branch outweighs the last ratio below 0
            smallest = min(smallest, -float(ratios[first - 1]) / (1 - share))
        smallest *= 1 + 1e-6
        raise ValueError(
            f"expected epsilon >= {smallest:.9g} at d={d}, levels={levels}, share={share}, got epsilon={epsilon}: "
            "no threshold fits; with more coordinates or fewer levels, a smaller epsilon is enough"
        )
    return PrivQuant(d, levels, tau, logit)


def round_levels(x: Tensor, bound: float, levels: int, key: Key) -> Tensor:
    """Round each coordinate at random to one of its two nearest levels, after a clamp to [-bound, bound].

    Args:
        x: values of any shape. Not modified.
        bound: U; the levels are -U + 2 U k / (K-1), k = 0..K-1.
        levels: K.
        key: known only to this client. It is drawn from once.

    Returns:
        int64 levels k, of the shape of x.

    Guarantees:
        E[levels_to_values(round_levels(x))] = clamp(x, -U, U), up to float64 rounding.

    Raises:
        ValueError: x is not finite, or a parameter is out of range.

    Source: sqSGD, eq. (5) and (6). Differs: clamps, whereas the paper assumes that no value lies outside the range.
    """
    values = x.detach().cpu()
    finite = np.isfinite(values.numpy())
    if np.count_nonzero(finite) < finite.size:
        raise ValueError(f"expected finite values, got {int((~finite).sum())} non-finite of {finite.size}")
    return _round_by(values, bound, levels, rng.uniform(key, finite.shape, dtype=torch.float64))


def levels_to_values(index: Tensor, bound: float, levels: int) -> Tensor:
    """The values -U + 2 U k / (K-1) of integer levels k: float64, of the shape of `index`.

    Raises:
        ValueError: not integers in 0..K-1, or a parameter is out of range.
    """
    positive(bound=bound)
    _at_least(2, levels=levels)
    _check_levels(index, levels)
    # relative to the middle, so that the values are exactly symmetric
    return bound * (2 * index.long() - (levels - 1)).double() / (levels - 1)


@dataclass(frozen=True, eq=False)
class Matched(MessageDistribution):
    """The distribution of the packed levels that a channel sends for `place` after stochastic rounding.

    The rounded levels are hidden. Given the output V, coordinate j matches independently with the probability h_j that
    it is rounded to V_j, so P(V) is proportional to E g(M). M is the sum of Bernoulli(h_j); g is 1 from tau matches on,
    else e^-cost.

    Attributes:
        place: [d], positions among the levels, from 0 to levels - 1.
        levels, tau, logit: parameters of the channel.
        epsilon: the largest epsilon that the channel may have.
        hidden: the part of the channel's epsilon that no two updates are known to attain.

    Source: the distribution of Algorithm 1 of sqSGD, computed independently of `PrivQuant`; P(V_j | V_1..V_(j-1)) sums
    over later V.
    """

    place: Numbers
    levels: int
    tau: int
    logit: float
    epsilon: float
    hidden: float = 0.0
    quadratic = True

    def loss(self, other: MessageDistribution, among: Integers | None = None) -> PairLoss | None:
        """The channel's cost if an input differs: attained where all inputs are levels, and all of them differ."""
        if not isinstance(other, Matched) or _channel_of(self) != _channel_of(other):
            return None
        places = np.stack([self.place, other.place])
        attained = (places == np.rint(places)).all() and (places[0] != places[1]).all()
        differs = bool((places[0] != places[1]).any())
        return PairLoss(float(_odds(len(self.place), *_channel_of(self))[0]) * differs, attained=bool(attained))

    def read(self, wire: bytes, own: Key) -> Reading:
        """Reads by cumulative probabilities of each level given earlier levels; the nearest, likeliest one is last."""
        d, K = len(self.place), self.levels
        levels = outcomes(wire, d, (K - 1).bit_length())
        cost, odds = _odds(d, K, self.tau, self.logit)
        if not 0 < cost <= self.epsilon * (1 + 1e-9):
            raise DistributionError(f"expected a channel of epsilon at most {self.epsilon:g}, got epsilon {cost:g}")
        below = self._below
        up = self.place - below
        is_lower, is_upper = levels == below, levels == below + 1
        h, before = self._matches(levels)
        match, miss = (np.einsum("jm,jm->j", before[:-1, :-1], table[1:]) for table in (odds[:, 1:], odds[:, :-1]))
        total = match + (K - 1) * miss
        if not (total > 0).all():
            raise DistributionError("levels of probability 0")
        is_nearest = np.where(up < 0.5, is_lower, is_upper)
        neighbor = (K - 2) * miss + is_nearest * ((1 - h) * match + h * miss)
        low = np.where(is_lower | is_upper, neighbor, (levels - 2 * (levels > below)) * miss)
        chance = rng.uniform(own, (d,), dtype=torch.float64).numpy() * (h * match + (1 - h) * miss)
        return Reading((low + chance) / total, np.full(d, -1), ratios=self._ratios(before[d]))

    def branches(self, wire: bytes) -> Branches:
        """The favored branch, with at least tau matches, and the lesser branch; each is uniform on its vectors."""
        d = len(self.place)
        _, before = self._matches(outcomes(wire, d, (self.levels - 1).bit_length()))
        fewer, more = (float(logs[self.tau - 1]) for logs in _branches(d, self.levels))
        with np.errstate(divide="ignore"):
            lesser, favored = np.log([before[d, : self.tau].sum(), before[d, self.tau :].sum()])
        return Branches(float(favored) - more, float(lesser) - fewer, fewer - more - self.hidden)

    @property
    def _below(self) -> Integers:
        return np.minimum(self.place.astype(np.int64), self.levels - 2)

    def _matches(self, levels: Integers) -> tuple[Numbers, Numbers]:
        """[d]: the chance that each output matches; [d + 1, d + 1], row j: that of matches among the first j."""
        d, up = len(levels), self.place - self._below
        h = np.where(levels == self._below, 1 - up, np.where(levels == self._below + 1, up, 0.0))
        # after a first column of zeros, each row is two shifts of the previous row, times their chances, in two calls
        before, both = np.zeros((d + 1, d + 2)), np.empty((2, d + 2))
        before[0, 1] = 1.0
        stays, moves, chances = both[0, 1:], both[1, :-1], np.stack([1 - h, h], 1)[..., None]
        for row, chance, following in zip(before[:-1], chances, before[1:, 1:], strict=True):
            np.multiply(row, chance, out=both)
            np.add(stays, moves, out=following)
        return h, before[:, 1:]

    def _ratios(self, matches: Numbers) -> Numbers:
        """[len(SHARES)], from the distribution [d + 1] of the matches; alternatives are channels of another epsilon."""
        at, favored, lesser = _channels(len(matches) - 1, self.levels, self.tau, self.logit, self.epsilon)
        with np.errstate(divide="ignore"):
            below, above = np.log(np.cumsum(matches)[at]), np.log(np.cumsum(matches[::-1])[::-1][at + 1])
        each = np.logaddexp(favored + above, lesser + below)
        return np.asarray(each[1:] - each[0], np.float64)


def _channel_of(stated: Matched) -> tuple[int, int, float]:
    return stated.levels, stated.tau, stated.logit


@functools.lru_cache(maxsize=8)
def _branches(d: int, levels: int) -> tuple[Numbers, Numbers]:
    """Logarithms of the numbers of vectors with fewer matches than each threshold 1 to d, and of the other vectors."""
    k = np.arange(d + 1.0)
    weight = special.gammaln(d + 1) - special.gammaln(k + 1) - special.gammaln(d + 1 - k) + (d - k) * np.log(levels - 1)
    fewer, more = np.logaddexp.accumulate(weight)[:-1], np.logaddexp.accumulate(weight[::-1])[::-1][1:]
    return np.asarray(fewer, np.float64), np.asarray(more, np.float64)


@functools.lru_cache(maxsize=8)
def _channels(d: int, levels: int, tau: int, logit: float, epsilon: float) -> tuple[Integers, Numbers, Numbers]:
    """A channel, then those of `SHARES`: [a] thresholds minus 1, and log probabilities of a vector in each branch."""
    scale = 1 / (1 - np.array([0.0, *SHARES]))
    fewer, more = _branches(d, levels)
    cost = fewer - more  # of the thresholds 1 to d
    at = np.maximum(np.searchsorted(cost, scale * (epsilon - logit) + _EXACT, side="right") - 1, 0)
    at[0] = tau - 1
    return at, special.log_expit(scale * logit) - more[at], special.log_expit(-scale * logit) - fewer[at]


@functools.lru_cache(maxsize=8)
def _odds(d: int, levels: int, tau: int, logit: float) -> tuple[float, Numbers]:
    """The epsilon of a channel, and [d + 1, d + 1], row j, column m: E g(M) given m matches among the first j outputs.

    The later outputs are uniform. Each row is relative to its largest reachable entry.
    """
    fewer, more = _branches(d, levels)
    cost = logit + float(fewer[tau - 1] - more[tau - 1])
    rows = np.zeros((d + 1, d + 1))
    rows[d, :tau] = -cost
    for j in range(d - 1, -1, -1):
        rows[j, :-1] = np.logaddexp(np.log1p(-1 / levels) + rows[j + 1, :-1], rows[j + 1, 1:] - np.log(levels))
    return cost, np.asarray(np.exp(np.minimum(rows - np.diag(rows)[:, None], 0.0)), np.float64)


class _Tails(NamedTuple):
    """Logs of w_l = C(d,l) (K-1)^(d-l) and of its sums up to l and from l on, relative to the largest weight."""

    weight: Numbers
    lower: Numbers
    upper: Numbers


@functools.lru_cache(maxsize=4)
def _tails(d: int, levels: int) -> _Tails:
    """The `_Tails` of all thresholds; relative logarithms stay small, while log-gamma reaches 10^6 at d = 2^17."""
    count = np.arange(d, dtype=np.float64)
    step = np.log((d - count) / ((count + 1) * (levels - 1)))  # ln w_(l+1) - ln w_l
    mode = (d + 1) // levels
    below = -np.cumsum(step[:mode][::-1])[::-1]
    weight = np.concatenate([below, [0.0], np.cumsum(step[mode:])])
    lower = np.logaddexp.accumulate(weight)
    upper = np.logaddexp.accumulate(weight[::-1])[::-1]
    for array in (weight, lower, upper):
        array.flags.writeable = False  # all callers share it
    return _Tails(weight, lower, upper)


def _position(x: A, bound: float, levels: int) -> A:
    """The clamped position of float64 x among the levels, in [0, K-1]."""
    positive(bound=bound)
    _at_least(2, levels=levels)
    # division first, so that x = bound gives exactly K-1; a larger value could be rounded to level K
    return ((x / bound).clip(-1, 1) + 1) * ((levels - 1) / 2)


def _round_by(x: Tensor, bound: float, levels: int, chance: Tensor) -> Tensor:
    values, chances = x.double().numpy().reshape(-1), chance.numpy().reshape(-1)
    index = np.empty(values.size, np.int64)
    for start in range(0, max(values.size, 1), _BLOCK):
        block = slice(start, start + _BLOCK)
        position = _position(values[block], bound, levels)
        floor = np.floor(position)
        position -= floor
        index[block] = floor
        index[block] += chances[block] < position
    return torch.from_numpy(index.reshape(x.shape))


def _log_uniform(digits: Tensor) -> float:
    """ln of the number in (0, 1) with these digits, multiples of 2^-53 in [0, 1), most significant first."""
    number = 0.5  # start in the middle of the last step, so that the number is never 0
    for digit in reversed(digits.tolist()):
        number = digit + number * 2.0**-53
    return math.log(number)


def _at_least(least: int, **counts: int) -> None:
    for name, count in counts.items():
        if count < least:
            raise ValueError(f"expected {name} >= {least}, got {name}={count}")


def _check_levels(index: Tensor, levels: int) -> None:
    if index.is_floating_point() or index.is_complex() or index.dtype == torch.bool:
        raise ValueError(f"expected integer levels, got {index.dtype}")
    if index.numel() and not 0 <= int(index.min()) <= int(index.max()) < levels:
        raise ValueError(f"expected levels 0 to {levels - 1}, got {int(index.min())} to {int(index.max())}")
