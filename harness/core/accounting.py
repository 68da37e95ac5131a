"""The (epsilon, delta) of a `DpEvent`: closed forms where they exist, privacy loss distributions elsewhere.

An event describes the distribution of one pair of neighbors. The caller chooses the pair through the noise multiplier,
z = noise_std / sensitivity; the sensitivity is 2 * clip if a record is replaced, clip if it is added or removed.

| event | epsilon at delta = 0 | epsilon at delta > 0 |
|---|---|---|
| None, `NonPrivate`, a noise multiplier of 0 | infinite | infinite |
| Gaussians, any composition | infinite | exact |
| one Laplace | exact | exact |
| one randomized response, repeated or not | exact | exact |
| `Pure`, repeated or not | exact | exact for the worst mechanism of that epsilon; the sum above 30 |
| `Leak`, repeated or not | infinite | exact: 0 from its delta on, infinite below |
| `Quantized`, repeated or not | lower bound | lower bound |
| any other composition of these | exact | upper bound; ValueError if it contains a randomized response |
| any other event that `PLDAccountant` supports (add or remove) | ValueError | upper bound |
| any other event | ValueError | ValueError |
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
from scipy import fft, optimize, special

from leakgauge.harness.core.gaussian import check_delta, check_nonnegative, gaussian_delta, gaussian_epsilon
from leakgauge.harness.core.stats import Numbers

if TYPE_CHECKING:
    from dp_accounting import DpEvent
    from dp_accounting.pld import PLDAccountant

_FINEST = 1e-4  # step of the losses if they are not small; the default of dp_accounting
_SPREADS = 10.0  # steps in the standard deviation of a small loss of one run; the error of a step adds up over the runs
_LOSSES = 5e5  # maximum number of losses; wider steps still give an upper bound
_UNSEEN = 1e-6  # probability of the losses that are counted as infinite, relative to delta
_WIDENED = 20  # how often the grid is widened before none is taken
_USUAL = (1e-2, 1e-6, 1e-10)  # near these deltas, sums have digits for deltas to a tenth of them, the last to 1e-15
# Maximum number of steps of a privacy loss; wider steps still give an upper bound. Without this limit, noise of 0.01
# clips would take 4 GB
_POINTS = 2e6
_CELLS = 17  # maximum number of levels of a quantizer that are told apart
_BLUR = 0.05  # noise added to a sum of losses, in its spreads, so that the sum has a smooth distribution
_LINE = np.arange(1120) / 8  # nodes of an integral, in inverse spreads; exp(-(0.05 * 140)^2 / 2) is left out
_RELIABLE = 1e-14  # Renyi divergence of one run below which rounding errors count


@dataclass(frozen=True)
class Pure:
    """`times` mechanisms, each epsilon-DP: neighbors change no output's probability by more than exp(epsilon)."""

    epsilon: float
    times: int = 1


@dataclass(frozen=True)
class Leak:
    """`times` mechanisms; each reveals everything with probability `delta`, and nothing otherwise.

    Its delta is the same at every epsilon. Example: uniform noise on two overlapping intervals.
    """

    delta: float
    times: int = 1


@dataclass(frozen=True)
class Quantized:
    """`times` numbers with normal noise, each rounded after a public uniform dither: what two inputs attain.

    A number is `shift` or -shift, in standard deviations of the noise. It is rounded to 2 top + 1 levels, `step` apart.
    """

    shift: float
    step: float
    top: int
    times: int = 1

    def epsilon(self, delta: float) -> float:
        """A lower bound of epsilon."""
        return _quantized_epsilon(self, delta)

    def delta(self, epsilon: float) -> float:
        """A lower bound of delta."""
        deltas = np.exp(-np.arange(0.5, 60.0, 0.5))
        return max((float(at) for at in deltas if self.epsilon(float(at)) >= epsilon), default=0.0)


Event: TypeAlias = "DpEvent | Pure | Leak | Quantized"


def epsilon(event: Event | None, delta: float) -> float:
    """Smallest epsilon known for `event` at `delta`; infinite if `event` is None.

    Raises:
        ValueError: delta is outside [0, 1), or the event has no known distribution; the message names it.
    """
    check_delta(delta)
    return math.inf if event is None else _distribution(event).epsilon(delta)


def delta(event: Event | None, epsilon: float) -> float:
    """Smallest delta known for `event` at `epsilon`; 1 if `event` is None, 0 at an infinite epsilon.

    Raises:
        ValueError: epsilon is negative, or the event has no known distribution; the message names it.
    """
    check_nonnegative(epsilon=epsilon)
    if math.isinf(epsilon):
        return 0.0
    return 1.0 if event is None else _distribution(event).delta(epsilon)


def is_gaussian(event: Event | None) -> bool:
    """Whether the distribution is N(0, 1) against N(mu, 1) for a finite mu."""
    distribution = None if event is None else _distribution(event)
    return isinstance(distribution, _Gaussian) and math.isfinite(distribution.mu)


def is_sampled(event: Event | None) -> bool:
    """Whether the event relies on random sampling of records or clients, which may not apply to attacked ones."""
    if event is None or isinstance(event, Pure | Leak | Quantized):
        return False
    return any(hasattr(leaf, "event") for leaf, _ in _leaves(event, 1))


def sampled_gaussian(event: Event | None) -> tuple[float, int] | None:
    """The probability of a record in a step, and the number of steps, of Gaussian steps on sampled records."""
    noise = None if event is None or isinstance(event, Pure | Leak) else _noise(list(_leaves(event, 1)))
    return (noise.share, noise.runs) if noise else None


def sampled_steps(share: float, mu: float, steps: int) -> Event:
    """Steps that each take a record with probability `share`; the record then moves a normal number by mu spreads."""
    from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent

    return repeat(PoissonSampledDpEvent(share, GaussianDpEvent(1 / mu)), steps)


def repeat(event: Event, rounds: int) -> Event:
    """The adaptive composition of `rounds` copies of `event`.

    Raises:
        ValueError: rounds is negative.
    """
    if rounds < 0:
        raise ValueError(f"expected rounds >= 0, got rounds={rounds}")
    if isinstance(event, Pure | Leak | Quantized):
        return replace(event, times=event.times * rounds)
    from dp_accounting import SelfComposedDpEvent

    return SelfComposedDpEvent(event, rounds)


class _Gaussian(NamedTuple):
    """N(0, 1) against N(mu, 1); mu = 0 reveals nothing, mu = inf everything."""

    mu: float

    def epsilon(self, delta: float) -> float:
        return gaussian_epsilon(self.mu, delta)

    def delta(self, epsilon: float) -> float:
        return gaussian_delta(self.mu, epsilon)


class _Laplace(NamedTuple):
    """Two Laplace distributions of scale 1, shifted by `pure`: delta = 1 - exp((eps - pure) / 2)."""

    pure: float

    def epsilon(self, delta: float) -> float:
        return max(0.0, self.pure + 2 * math.log1p(-delta))

    def delta(self, epsilon: float) -> float:
        return max(0.0, -math.expm1((epsilon - self.pure) / 2))


class _Response(NamedTuple):
    """`times` randomized responses; the privacy loss of each is +one, 0 or -one.

    This closed form is needed because `PLDAccountant` of dp_accounting 0.6.0 counts a repeated response once. For two
    buckets it is Kairouz, Oh, Viswanath 2015, Thm 3.3.
    """

    noise: float
    buckets: int
    times: int

    @property
    def one(self) -> float:
        """Epsilon of a single response at delta = 0."""
        return math.log1p(self.buckets * (1 - self.noise) / self.noise) if self.noise > 0 else math.inf

    def epsilon(self, delta: float) -> float:
        high = self.times * self.one
        if delta == 0 or math.isinf(high):
            return high
        if self.delta(0.0) <= delta:
            return 0.0
        return float(optimize.brentq(lambda eps: self.delta(eps) - delta, 0.0, high, xtol=1e-15 * high))

    def delta(self, epsilon: float) -> float:
        if math.isinf(self.one):
            return 1.0
        loss = self.one * np.arange(-self.times, self.times + 1)
        return float(_chances(self.noise, self.buckets, self.times) @ -np.expm1(np.minimum(epsilon - loss, 0.0)))


class _Numerical(NamedTuple):
    """Privacy losses on a grid, never above the Renyi bound; `pure` is epsilon at delta = 0, None if not known."""

    leaves: tuple[tuple[DpEvent, int], ...]
    pure: float | None

    def epsilon(self, delta: float) -> float:
        if delta > 0:
            bound = _numerical_epsilon(self.leaves, delta)
            return bound if self.pure is None else min(bound, self.pure)
        if self.pure is None:
            raise ValueError(f"no epsilon is known at delta = 0 for {_names(self.leaves)}; use delta > 0")
        return self.pure

    def delta(self, epsilon: float) -> float:
        if self.pure is not None and epsilon >= self.pure:
            return 0.0
        noise = _noise(self.leaves)
        return noise.delta(epsilon) if noise else float(_accountant(self.leaves).get_delta(epsilon))


@functools.lru_cache(maxsize=64)
def _numerical_epsilon(leaves: tuple[tuple[DpEvent, int], ...], delta: float) -> float:
    """The bound of epsilon; cached because a claim asks for the same bound several times, and each is slow."""
    noise = _noise(leaves)
    bound = noise.epsilon(delta) if noise else float(_accountant(leaves).get_epsilon(delta))
    return min(_renyi_epsilon(leaves, delta), bound)


def _renyi_epsilon(leaves: tuple[tuple[DpEvent, int], ...], delta: float) -> float:
    """The Renyi bound; infinite if none is known."""
    from dp_accounting.rdp import RdpAccountant
    from dp_accounting.rdp.rdp_privacy_accountant import compute_epsilon

    accountant = RdpAccountant()
    if not all(accountant.supports(leaf) for leaf, _ in leaves):
        return math.inf

    def is_shown(record: logging.LogRecord) -> bool:
        return "Excluding this order" not in record.getMessage()

    log = logging.getLogger("absl")  # dp_accounting warns about orders that it leaves out
    log.addFilter(is_shown)
    for leaf, count in leaves:
        accountant.compose(leaf, count)
    log.removeFilter(is_shown)
    # dp_accounting takes a divergence below zero, which rounding errors may cause, for perfect privacy
    known = np.where(accountant.rdp > _RELIABLE * sum(count for _, count in leaves), accountant.rdp, math.inf)
    return float(compute_epsilon(accountant.orders, known, delta)[0])


def _noise(leaves: Sequence[tuple[Any, int]]) -> _Sampled | None:
    import dp_accounting as dp

    if len(leaves) != 1:
        return None
    leaf, count = leaves[0]
    if isinstance(leaf, dp.PoissonSampledDpEvent) and isinstance(leaf.event, dp.GaussianDpEvent):
        noise, share = leaf.event.noise_multiplier, leaf.sampling_probability
        return _Sampled(noise, share, count) if 0 < noise < math.inf and share > 0 else None
    return None


@functools.lru_cache(maxsize=4)
def _accountant(leaves: tuple[tuple[DpEvent, int], ...]) -> PLDAccountant:
    """The composition of all leaves; cached because a claim evaluates it several times."""
    from dp_accounting.pld import PLDAccountant

    spreads = [(_spread(leaf), math.sqrt(count)) for leaf, count in leaves]
    widest = max(20 * spread * times + (spread * times) ** 2 / 2 for spread, times in spreads)
    finest = min([_FINEST, *(spread / 10 for spread, _ in spreads if spread > 0)])
    accountant = PLDAccountant(value_discretization_interval=max(finest, widest / _POINTS))
    unknown = [pair for pair in leaves if not accountant.supports(pair[0])]
    if unknown:
        raise ValueError(f"no distribution is known for {_names(unknown)} within {_names(leaves)} at delta > 0")
    for leaf, count in leaves:
        accountant.compose(leaf, count)
    return accountant


class _Worst(NamedTuple):
    """The worst case of epsilon-DP mechanisms: randomized responses (Kairouz et al. 2015, Thm 3.3).

    response: None if exp(-epsilon) is lost to rounding, so that the bound is the sum of the epsilons, `total`.
    """

    total: float
    response: _Response | None

    def epsilon(self, delta: float) -> float:
        return self.total if delta == 0 or self.response is None else min(self.total, self.response.epsilon(delta))

    def delta(self, epsilon: float) -> float:
        if epsilon >= self.total:
            return 0.0
        return 1.0 if self.response is None else self.response.delta(epsilon)


class _Uneven(NamedTuple):
    """Reveals everything with probability `chance`, nothing otherwise."""

    chance: float

    def epsilon(self, delta: float) -> float:
        return 0.0 if delta >= self.chance else math.inf

    def delta(self, epsilon: float) -> float:
        return self.chance


# The trade-off between epsilon and delta of one pair of neighbors
_Distribution = _Gaussian | _Laplace | _Response | _Numerical | _Worst | _Uneven | Quantized


def _distribution(event: Event) -> _Distribution:
    if isinstance(event, Quantized):
        return event
    if isinstance(event, Pure):
        one, times = event.epsilon, event.times
        response = _Response(2 / (1 + math.exp(one)), 2, times) if one <= 30 and times > 0 else None
        return _Worst(one * times, response)
    if isinstance(event, Leak):
        return _Uneven(-math.expm1(event.times * math.log1p(-event.delta)) if event.delta < 1 else min(event.times, 1))
    import dp_accounting as dp

    leaves = tuple(_leaves(event, 1))
    kinds = {type(leaf) for leaf, _ in leaves}
    if dp.NonPrivateDpEvent in kinds:
        return _Gaussian(math.inf)
    if kinds <= {dp.GaussianDpEvent}:
        return _Gaussian(math.hypot(*(math.sqrt(count) * _inverse(leaf.noise_multiplier) for leaf, count in leaves)))
    if kinds == {dp.RandomizedResponseDpEvent} and len(leaves) == 1:
        leaf, count = leaves[0]
        return _Response(leaf.noise_parameter, leaf.num_buckets, count)
    if kinds == {dp.LaplaceDpEvent} and sum(count for _, count in leaves) == 1:
        return _Laplace(_inverse(leaves[0][0].noise_multiplier))
    pure = [_pure(leaf, count) for leaf, count in leaves]
    known = [value for value in pure if value is not None]
    return _Numerical(leaves, sum(known) if len(known) == len(pure) else None)


def _leaves(event: DpEvent, count: int) -> Iterator[tuple[Any, int]]:
    import dp_accounting as dp

    if isinstance(event, dp.SelfComposedDpEvent):
        yield from _leaves(event.event, count * event.count)
    elif isinstance(event, dp.ComposedDpEvent):
        for inner in event.events:
            yield from _leaves(inner, count)
    elif not isinstance(event, dp.NoOpDpEvent) and count > 0:
        yield event, count


def _pure(leaf: Any, count: int) -> float | None:
    """Epsilon of `count` runs at delta = 0; None if unknown."""
    import dp_accounting as dp

    if isinstance(leaf, dp.RandomizedResponseDpEvent):
        return _Response(leaf.noise_parameter, leaf.num_buckets, count).epsilon(0.0)
    if not isinstance(leaf, dp.LaplaceDpEvent | dp.GaussianDpEvent):
        return None
    loss = _inverse(leaf.noise_multiplier)
    return count * (loss if isinstance(leaf, dp.LaplaceDpEvent) or loss == 0 else math.inf)


def _inverse(noise_multiplier: float) -> float:
    """1 / z: the distance between two neighbors, in units of the noise; infinite without noise."""
    check_nonnegative(noise_multiplier=noise_multiplier)
    return 1 / noise_multiplier if noise_multiplier > 0 else math.inf


def _spread(leaf: Any) -> float:
    """Approximately the standard deviation of one run's privacy loss; 0 if it is not known."""
    if hasattr(leaf, "sampling_probability") and hasattr(leaf, "event"):
        inner = _spread(leaf.event)
        return float(min(inner, leaf.sampling_probability * math.expm1(min(inner, 700.0))))
    return _inverse(getattr(leaf, "noise_multiplier", math.inf))


@functools.lru_cache(maxsize=16)
def _chances(noise: float, buckets: int, count: int) -> Numbers:
    """Probabilities of the sums -count to count of `count` losses -1, 0, +1 of a randomized response."""
    low = noise / buckets
    single = np.array([low, (buckets - 2) * low, 1 - (buckets - 1) * low])
    return functools.reduce(np.convolve, [single] * count, np.ones(1))


def _names(leaves: Sequence[tuple[Any, int]]) -> str:
    return ", ".join(sorted({type(leaf).__name__ for leaf, _ in leaves}))


class _Sampled(NamedTuple):
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


class _Run(NamedTuple):
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
def _sum(noise: _Sampled, delta: float, *, added: bool) -> _Sum | None:
    """The losses of all runs, with digits near the epsilon of `delta`; None: no grid has them."""
    if noise.share == 1:
        return None
    far = [-float(special.ndtri(min(0.5, _UNSEEN * delta / noise.runs / share))) for share in (1.0, noise.share)]
    x = np.array([-far[0] * noise.multiplier, max(far[0] * noise.multiplier, 1 + far[1] * noise.multiplier)])
    with np.errstate(divide="ignore"):
        ends = np.logaddexp(np.log1p(-noise.share), math.log(noise.share) + (x - 0.5) / noise.multiplier**2)
    spread = noise.share * math.sqrt(math.expm1(min(noise.multiplier**-2, 700.0)))
    step, low, high = min(_FINEST, 1 / noise.multiplier / _SPREADS, spread / _SPREADS), *map(float, ends)
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


def _run(noise: _Sampled, step: float, ends: Numbers, *, added: bool) -> _Run:
    """The losses of one run: the upper one has the record if it is removed; if it is added, losses change sign."""
    grid = np.arange(math.floor(ends[0] / step), math.ceil(ends[1] / step) + 1) * step
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
    rest = upper[1:-1] - up
    if added:
        grid, up, rest, upper = -grid[::-1], up[::-1], rest[::-1], upper[::-1]
    chances = np.concatenate([upper[:1], up])
    chances[:-1] += rest
    with np.errstate(divide="ignore"):
        return _Run(grid, np.log(chances), float(upper[-1]), noise.runs)


def _masses(x: Numbers) -> Numbers:
    """The probabilities of the intervals between increasing values under N(0, 1), without cancellation."""
    upper, low, high = x[:-1] > 0, np.minimum(x[:-1], -x[1:]), np.minimum(x[1:], -x[:-1])
    return np.asarray(np.where(upper, *(special.ndtr(b) - special.ndtr(a) for a, b in ((low, high), (x[:-1], x[1:])))))


@functools.lru_cache(maxsize=16)
def _quantized_epsilon(event: Quantized, delta: float) -> float:
    """By one test: whether the sum L of all losses, plus noise N, exceeds t.

    P(L + N > t) - e^epsilon Q(L + N > t) is an inverse Laplace transform on a vertical line. N makes the integrand fall
    fast; a twentieth of the spread of L costs as much as 0.13 % more noise.
    """
    run = _rounded(event)
    if delta == 0:
        return run.runs * float(run.losses.max())
    high, tilt = run.bound(delta, 1)
    tilt = min(tilt, 12 / max(run.spread(0.0), 1e-9))  # a larger one meets only the largest losses
    spread = math.hypot(run.spread(tilt), 1 / tilt)
    if spread > 100:  # epsilon is in the thousands, and numbers overflow
        return 0.0
    z = tilt + 1j * _LINE / spread
    moments = run.runs * special.logsumexp(run.logs + z[:, None] * run.losses, axis=1)

    def excess(epsilon: float) -> float:
        threshold, blur = (1 + _BLUR**2) * epsilon, (_BLUR * spread) ** 2 / 2
        values = np.exp(moments - z * threshold + blur * z**2) / z
        values -= np.exp(moments - (z + 1) * threshold + epsilon + blur * (z + 1) ** 2) / (z + 1)
        return float((values.real.sum() - values[0].real / 2) * _LINE[1] / spread / math.pi) - delta

    low, width = high, spread / 8
    while excess(low) < 0:  # from above; far below, digits are lost
        if low == 0 or moments[0].real - tilt * low > math.log(delta) + 25:
            return 0.0
        high, low, width = low, max(0.0, low - width), 2 * width
    return float(optimize.brentq(excess, low, high)) if low < high else low


def _rounded(event: Quantized) -> _Run:
    """The losses of one number at nodes of the dither; if there are too many levels, neighbors are merged."""
    places = np.unique(np.linspace(0, 2 * event.top - 1, _CELLS - 1).round()) - event.top + 0.5
    dithers, weights = np.polynomial.legendre.leggauss(8)
    ends = [np.concatenate([[-math.inf], event.step * (places - dither / 2), [math.inf]]) for dither in dithers]
    upper, lower = (np.array([_masses(row - at) for row in ends]) for at in (event.shift, -event.shift))
    some = upper > 1e-250
    losses = np.log(upper[some]) - np.log(np.maximum(lower[some], 1e-300))
    return _Run(losses, np.log((weights[:, None] / 2 * upper)[some]), 0.0, event.times)
