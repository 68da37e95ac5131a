"""The privacy loss of many runs of Gaussian noise on Poisson samples, for adding or removing a record.

The losses of one run are rounded to a grid as by "connect the dots" (Doroshenko et al. 2022), which gives an upper
bound. dp_accounting 0.6.0 takes second differences of delta, whose rounding errors add up over many runs on a fine
grid; here, the share of an interval that moves up follows from the interval's probabilities. The sum over the runs is a
power of a Fourier transform of tilted probabilities, so that a delta of 1e-15 has as many digits as one of 0.1.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from scipy import fft, optimize, special

_Numbers = npt.NDArray[np.float64]

FINEST = 1e-4
"""Step of the losses if they are not small; the default of dp_accounting."""

_SPREADS = 10.0
"""Number of steps in the standard deviation of a small loss of one run; the error of a step adds up over the runs."""

_POINTS = 5e5
"""Maximum number of losses; wider steps still give an upper bound."""

_BELOW = 20.0
"""-ln of a bound on the probability of a sum below the computed window."""

_UNSEEN = 1e-6
"""Probability of the losses that are counted as infinite, relative to delta."""

_LEAST = 1e-20
"""`delta` is exact down to about this number."""

_STEEPEST = 300.0
"""Largest tilt times the width of the window."""

_TILTS = (-14.0, 18.0)
"""Range of the logarithm of a tilt, which is the order of a Renyi divergence minus 1."""


class Noise(NamedTuple):
    """`count` runs of Gaussian noise, in units of the sensitivity, on samples that hold a record with `share`."""

    multiplier: float
    share: float
    count: int

    @property
    def spread(self) -> float:
        """Standard deviation of a small loss of one run: share * sqrt(exp(1 / z^2) - 1), at most 1 / z."""
        return min(1 / self.multiplier, self.share * math.sqrt(math.expm1(min(self.multiplier**-2, 700.0))))

    def ends(self, delta: float) -> _Numbers:
        """Losses of one run, with the record in the upper law, that it is outside of with `_UNSEEN * delta / count`."""
        far = [-float(special.ndtri(min(0.5, _UNSEEN * delta / self.count / one))) for one in (1.0, self.share)]
        x = np.array([-far[0] * self.multiplier, max(far[0] * self.multiplier, 1 + far[1] * self.multiplier)])
        with np.errstate(divide="ignore"):
            return np.logaddexp(np.log1p(-self.share), math.log(self.share) + (x - 0.5) / self.multiplier**2)

    def outputs(self, losses: _Numbers) -> _Numbers:
        """The outputs with these losses; -inf below all losses."""
        with np.errstate(divide="ignore", invalid="ignore"):
            plain = losses - math.log(self.share) + np.log(-np.expm1(np.log1p(-self.share) - losses))
        return np.where(np.isnan(plain), -math.inf, self.multiplier**2 * plain + 0.5)


class _Side(NamedTuple):
    """One run: `logs` of the probabilities of the losses (low + k) * step, and the probability of an infinite loss."""

    low: int
    logs: _Numbers
    unbounded: float
    count: int


class _Sum(NamedTuple):
    """All runs: increasing losses, the logarithms of their probabilities, the probability of an infinite loss."""

    losses: _Numbers
    logs: _Numbers
    unbounded: float

    def epsilon(self, delta: float) -> float:
        """Smallest epsilon at `delta`; infinite if an infinite loss has a larger probability."""
        losses, logs = self.losses, np.maximum(self.logs, -1e6)  # because -inf minus -inf is not a number
        above = np.logaddexp.accumulate(logs[::-1])[::-1]
        other = np.logaddexp.accumulate((logs - losses)[::-1])[::-1]
        # delta at each loss; between two losses, it is linear in exp(epsilon)
        deltas = self.unbounded - np.exp(np.minimum(above, 0.0)) * np.expm1(np.minimum(losses + other - above, 0.0))
        deltas = np.maximum.accumulate(deltas[::-1])[::-1]
        at = int(np.argmax(deltas <= delta))
        if deltas[at] > delta:
            return math.inf
        left = self.unbounded + math.exp(above[at]) - delta
        return max(0.0, math.log(left) - float(other[at]) if at and left > 0 else float(losses[at]))

    def delta(self, epsilon: float) -> float:
        """Smallest delta at `epsilon`."""
        above = self.losses > epsilon
        return min(1.0, self.unbounded - float(np.exp(self.logs[above]) @ np.expm1(epsilon - self.losses[above])))


class _Runs(NamedTuple):
    """All runs for one direction, on a grid."""

    sides: tuple[_Side, ...]
    step: float

    def tilted(self, side: _Side, tilt: float) -> tuple[_Numbers, float]:
        """The probabilities of one run times exp(tilt * loss), divided by their sum, and the logarithm of the sum."""
        logs = side.logs + tilt * self.step * np.arange(side.low, side.low + len(side.logs))
        most = logs.max()
        found = np.exp(logs - most)
        total = found.sum()
        return found / total, float(most + np.log(total))

    def moment(self, tilt: float) -> float:
        """ln E exp(tilt * loss) of all runs, without infinite losses."""
        return sum(side.count * self.tilted(side, tilt)[1] for side in self.sides)

    def least(self, cost: Callable[[float], float]) -> tuple[float, float]:
        """The tilt of least cost, and this cost."""
        found = optimize.minimize_scalar(lambda log: cost(math.exp(log)), bounds=_TILTS, options={"xatol": 0.1})
        return math.exp(found.x), float(found.fun)

    def window(self, unseen: float) -> tuple[float, float]:
        """Chernoff bounds of the sum of finite losses: below, with probability e^-20, and above, with `unseen`."""
        low = -self.least(lambda tilt: (self.moment(-tilt) + _BELOW) / tilt)[1]
        high = self.least(lambda tilt: (self.moment(tilt) - math.log(unseen)) / tilt)[1]
        # a sum beyond the window returns at its other end, where a tilt magnifies it: below all epsilons, if at all
        return min(low, -high), high

    def sum(self, tilt: float, unseen: float, low: float, high: float) -> _Sum:
        """The sum over all runs in a window, with digits near the losses that the tilt makes most likely."""
        start = math.floor(low / self.step)
        size = fft.next_fast_len(math.ceil(high / self.step) - start + 1, real=True)
        transform = np.ones(size // 2 + 1, np.complex128)
        for side in self.sides:
            at = np.arange(side.low, side.low + len(side.logs)) % size
            transform *= fft.rfft(np.bincount(at, self.tilted(side, tilt)[0], size)) ** side.count
        chances = np.roll(fft.irfft(transform, size), -(start % size)).clip(0.0)
        losses = (start + np.arange(size)) * self.step
        with np.errstate(divide="ignore"):
            logs = np.log(chances) + self.moment(tilt) - tilt * losses
        never = sum(side.count * math.log1p(-side.unbounded) for side in self.sides)
        return _Sum(losses, logs, unseen - math.expm1(never))


def epsilon(noises: Sequence[Noise], delta: float) -> float:
    """Smallest epsilon of all runs at `delta` above zero, whether a record is removed or added."""
    both = _sums(noises, delta, lambda runs, tilt: (runs.moment(tilt) - math.log(delta)) / tilt)
    return max(total.epsilon(delta) for total in both)


def delta(noises: Sequence[Noise], epsilon: float) -> float:
    """Smallest delta of all runs at `epsilon`, whether a record is removed or added."""
    both = _sums(noises, _LEAST, lambda runs, tilt: runs.moment(tilt) - tilt * epsilon)
    return max(total.delta(epsilon) for total in both)


def _sums(noises: Sequence[Noise], delta: float, cost: Callable[[_Runs, float], float]) -> Iterator[_Sum]:
    """The losses of all runs, for a record that is removed, then for one that is added."""
    ends, unseen = [noise.ends(delta) for noise in noises], _UNSEEN * delta
    for added in (False, True):
        step, widest = (
            min(FINEST, *(noise.spread / _SPREADS for noise in noises)),
            max(high - low for low, high in ends),
        )
        while widest > 0:
            step = max(step, widest / _POINTS)
            sides = tuple(_side(noise, step, one, added=added) for noise, one in zip(noises, ends, strict=True))
            runs = _Runs(sides, step)
            low, high = runs.window(unseen)
            widest = high - low if high - low > 1.01 * step * _POINTS else 0.0
        # less than the best tilt, which would magnify rounding errors at losses below those that it makes most likely
        tilt = min(runs.least(functools.partial(cost, runs))[0] / 2, _STEEPEST / (high - low))
        yield runs.sum(tilt, unseen, low, high)


def _side(noise: Noise, step: float, ends: _Numbers, *, added: bool) -> _Side:
    """The losses of one run: the upper law has the record if it is removed; if it is added, losses change sign."""
    low, high = math.floor(ends[0] / step), math.ceil(ends[1] / step)
    grid = np.arange(low, high + 1) * step
    share, x = noise.share, np.concatenate([[-math.inf], noise.outputs(grid), [math.inf]])
    without, shifted = _masses(x / noise.multiplier), _masses((x - 1) / noise.multiplier)
    upper = without if added else (1 - share) * without + share * shifted
    # upper probability minus exp(lower end) * lower probability, over the intervals between two losses
    ratio = 1 + np.expm1(np.minimum(grid, 600.0)) / share  # below 0 beneath all losses
    if added:
        excess = share * (without[1:-1] * ratio[1:] - shifted[1:-1]) * np.exp(np.minimum(-grid[1:], 700.0))
    else:
        excess = share * (shifted[1:-1] - without[1:-1] * ratio[:-1])
    up = np.clip(excess / -math.expm1(-step), 0.0, upper[1:-1])
    rest, outer = upper[1:-1] - up, (upper[-1], upper[0]) if added else (upper[0], upper[-1])
    if added:
        low, up, rest = -high, up[::-1], rest[::-1]
    chances = np.concatenate([[outer[0]], up])
    chances[:-1] += rest
    with np.errstate(divide="ignore"):
        return _Side(low, np.log(chances), float(outer[1]), noise.count)


def _masses(x: _Numbers) -> _Numbers:
    """The probabilities of the intervals between increasing values under N(0, 1), without cancellation."""
    return np.where(
        x[:-1] > 0, special.ndtr(-x[:-1]) - special.ndtr(-x[1:]), special.ndtr(x[1:]) - special.ndtr(x[:-1])
    )
