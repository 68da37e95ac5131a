"""Sums of privacy losses over many runs of sampled Gaussian noise, on a grid that bounds them from above."""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import numpy as np
from scipy import fft, optimize, special

from leakgauge.harness.core.gaussian import gaussian_delta, gaussian_epsilon
from leakgauge.harness.core.stats import Numbers

FINEST = 1e-4  # step of the losses if they are not small; the default of dp_accounting
_SPREADS = 10.0  # steps in the standard deviation of a small loss of one run; the error of a step adds up over the runs
_LOSSES = 5e5  # maximum number of losses; wider steps still give an upper bound
_UNSEEN = 1e-6  # probability of the losses that are counted as infinite, relative to delta
_WIDENED = 20  # how often the grid is widened before none is taken
_USUAL = (1e-2, 1e-6, 1e-10)  # near these deltas, sums have digits for deltas to a tenth of them, the last to 1e-15


class Sampled(NamedTuple):
    """`runs` runs of Gaussian noise, in units of the sensitivity, on samples that hold a record with `share`.

    The losses of one run are rounded to a grid as by "connect the dots" (Doroshenko et al. 2022), which gives an upper
    bound. dp_accounting 0.6.0 takes second differences of delta, whose rounding errors add up over many runs on a fine
    grid; here, the share of an interval that moves up follows from the interval's probabilities. The sum over the runs
    is a power of a Fourier transform of tilted probabilities, so that a delta of 1e-15 has as many digits as one of
    0.1.
    """

    multiplier: float
    share: float
    runs: int

    def epsilon(self, delta: float) -> float:
        """Smallest epsilon at `delta` above zero, whether a record is removed or added."""
        sums = [_sum(self, delta, added=added) for added in (False, True)]
        bound = max(total.epsilon(delta) if total else math.inf for total in sums)
        # runs without sampling are never more private: their bound holds where no grid is taken
        return min(bound, gaussian_epsilon(math.sqrt(self.runs) / self.multiplier, delta))

    def delta(self, epsilon: float) -> float:
        """Smallest delta at `epsilon`, with digits down to 1e-15, whether a record is removed or added."""
        for near in _USUAL:
            sums = [_sum(self, near, added=added) for added in (False, True)]
            bound = max(total.delta(epsilon) if total else 1.0 for total in sums)
            if bound > near / 10:
                break
        return min(bound, gaussian_delta(math.sqrt(self.runs) / self.multiplier, epsilon))

    def outputs(self, losses: Numbers) -> Numbers:
        """The outputs with these losses, if the record is in the upper distribution; -inf below all losses."""
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            plain = losses - math.log(self.share) + np.log(-np.expm1(np.log1p(-self.share) - losses))
        return np.where(np.isnan(plain), -math.inf, self.multiplier**2 * plain + 0.5)


class _Sum(NamedTuple):
    """All runs: increasing losses, the logarithms of their probabilities, the probability of an infinite loss."""

    losses: Numbers
    logs: Numbers
    unbounded: float

    def epsilon(self, delta: float) -> float:
        """Smallest epsilon at `delta`; infinite if an infinite loss has a larger probability."""
        losses, logs, unbounded = self
        above, other = (np.logaddexp.accumulate(terms[::-1])[::-1] for terms in (logs, logs - losses))
        # delta at each loss; between two losses, it is linear in exp(epsilon)
        deltas = unbounded - np.exp(np.minimum(above, 0.0)) * np.expm1(np.minimum(losses + other - above, 0.0))
        at = int(np.argmax(np.maximum.accumulate(deltas[::-1])[::-1] <= delta))
        if deltas[at] > delta:
            return math.inf
        left = unbounded + math.exp(above[at]) - delta
        return max(0.0, math.log(left) - float(other[at]) if at and left > 0 else float(losses[at]))

    def delta(self, epsilon: float) -> float:
        """Smallest delta at `epsilon`."""
        above = self.losses > epsilon
        return min(1.0, self.unbounded - float(np.exp(self.logs[above]) @ np.expm1(epsilon - self.losses[above])))


class Run(NamedTuple):
    """One of so many runs: its losses, the logarithms of their probabilities, the probability of an infinite loss."""

    losses: Numbers
    logs: Numbers
    unbounded: float
    runs: int

    def tilted(self, tilt: float) -> tuple[Numbers, float]:
        """The probabilities times exp(tilt * loss), divided by their sum; the logarithm of this sum for all runs."""
        logs = self.logs + tilt * self.losses
        most = logs.max()
        chances = np.exp(logs - most)
        total = chances.sum()
        return chances / total, float(self.runs * (most + np.log(total)))

    def spread(self, tilt: float) -> float:
        """The standard deviation of the sum under the tilted probabilities."""
        chances, _ = self.tilted(tilt)
        return math.sqrt(self.runs * float(chances @ (self.losses - chances @ self.losses) ** 2))

    def bound(self, chance: float, sign: int) -> tuple[float, float]:
        """Chernoff's bound of the sum that is exceeded (sign 1), or undercut (-1), with `chance`, and its tilt."""
        best = optimize.minimize_scalar(
            lambda log: (self.tilted(sign * math.exp(log))[1] - math.log(chance)) * math.exp(-log),
            bounds=(-14.0, 18.0),
            options={"xatol": 0.1},
        )
        return sign * float(best.fun), math.exp(best.x)


@functools.lru_cache(maxsize=8)  # an attack's bound asks for delta at many epsilons
@np.errstate(over="ignore", invalid="ignore")
def _sum(noise: Sampled, delta: float, *, added: bool) -> _Sum | None:
    """The losses of all runs, with digits near the epsilon of `delta`; None: no grid has them."""
    if noise.share == 1:
        return None
    far = [-float(special.ndtri(min(0.5, _UNSEEN * delta / noise.runs / share))) for share in (1.0, noise.share)]
    x = np.array([-far[0] * noise.multiplier, max(far[0] * noise.multiplier, 1 + far[1] * noise.multiplier)])
    with np.errstate(divide="ignore"):
        ends = np.logaddexp(np.log1p(-noise.share), math.log(noise.share) + (x - 0.5) / noise.multiplier**2)
    spread = noise.share * math.sqrt(math.expm1(min(noise.multiplier**-2, 700.0)))
    step, low, high = min(FINEST, 1 / noise.multiplier / _SPREADS, spread / _SPREADS), *map(float, ends)
    for _ in range(_WIDENED):
        step = max(step, (high - low) / _LOSSES)
        run = _run(noise, step, ends, added=added)
        high = run.bound(_UNSEEN * delta, 1)[0]
        # a sum beyond the window returns at its other end, where a tilt magnifies it: below 0 or below the least sums
        least = run.bound(1e-9, -1)[0]
        low = min(least, max(-high, 2 * least - high))
        if high - low <= 1.01 * step * _LOSSES:
            break
        if not math.isfinite(high - low):
            return None
    else:
        return None
    # less than the best tilt, which would magnify rounding errors at losses below those that it makes most likely
    tilt = min(run.bound(delta, 1)[1] / 2, 300 / (high - low))
    chances, moment = run.tilted(tilt)
    start = math.floor(low / step)
    size = fft.next_fast_len(math.ceil(high / step) - start + 1, real=True)
    wrapped = np.bincount(np.rint(run.losses / step).astype(np.int64) % size, chances, size)
    total = np.roll(fft.irfft(fft.rfft(wrapped) ** noise.runs, size), -(start % size))
    losses = (start + np.arange(size)) * step
    # not 0, because the difference of two infinite logarithms is not a number
    logs = np.log(total.clip(1e-300)) + moment - tilt * losses
    return _Sum(losses, logs, _UNSEEN * delta - math.expm1(noise.runs * math.log1p(-run.unbounded)))


def _run(noise: Sampled, step: float, ends: Numbers, *, added: bool) -> Run:
    """The losses of one run: the upper one has the record if it is removed; if it is added, losses change sign."""
    grid = np.arange(math.floor(ends[0] / step), math.ceil(ends[1] / step) + 1) * step
    share, x = noise.share, np.concatenate([[-math.inf], noise.outputs(grid), [math.inf]])
    without, shifted = masses(x / noise.multiplier), masses((x - 1) / noise.multiplier)
    upper = without if added else (1 - share) * without + share * shifted
    # upper probability minus exp(lower end) * lower probability, over the intervals between two losses
    ratio = 1 + np.expm1(np.minimum(grid, 600.0)) / share  # below 0 beneath all losses
    if added:
        excess = share * (without[1:-1] * ratio[1:] - shifted[1:-1]) * np.exp(np.minimum(-grid[1:], 700.0))
    else:
        excess = share * (shifted[1:-1] - without[1:-1] * ratio[:-1])
    up = np.clip(excess / -math.expm1(-step), 0.0, upper[1:-1])
    rest = upper[1:-1] - up
    if added:
        grid, up, rest, upper = -grid[::-1], up[::-1], rest[::-1], upper[::-1]
    chances = np.concatenate([upper[:1], up])
    chances[:-1] += rest
    with np.errstate(divide="ignore"):
        return Run(grid, np.log(chances), float(upper[-1]), noise.runs)


def masses(x: Numbers) -> Numbers:
    """The probabilities of the intervals between increasing values under N(0, 1), without cancellation."""
    upper, low, high = x[:-1] > 0, np.minimum(x[:-1], -x[1:]), np.minimum(x[1:], -x[:-1])
    return np.asarray(np.where(upper, *(special.ndtr(b) - special.ndtr(a) for a, b in ((low, high), (x[:-1], x[1:])))))
