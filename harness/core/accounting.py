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
| `Concentrated`, repeated or not | the sum of `pure` | upper bound |
| one `Finite` | exact | exact |
| `Finite`, repeated | exact | upper bound by Renyi divergences, which are exact |
| `Summed`, repeated or not | infinite | upper bound |
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
from scipy import optimize, special

from leakgauge.harness.core.concentrated import Concentrated
from leakgauge.harness.core.gaussian import check_delta, check_nonnegative, gaussian_delta, gaussian_epsilon
from leakgauge.harness.core.integer_noise import Summed
from leakgauge.harness.core.privacy_losses import FINEST, Run, Sampled, masses
from leakgauge.harness.core.stats import Numbers

if TYPE_CHECKING:
    from dp_accounting import DpEvent
    from dp_accounting.pld import PLDAccountant

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


@dataclass(frozen=True)
class Finite:
    """`times` independent outcomes of a public channel with finitely many outcomes; neighbors have any two inputs each.

    rows: probabilities above 0, inputs by outcomes. Other inputs are mixtures of rows: divergences are jointly convex,
    so that two rows attain the largest one, at each order of Renyi and at each epsilon.
    """

    rows: tuple[tuple[float, ...], ...]
    times: int = 1

    @property
    def pure(self) -> float:
        """Epsilon at delta = 0, which inputs with the largest ratio of one outcome attain."""
        chances = np.array(self.rows)
        return self.times * float(np.log(chances.max(0) / chances.min(0)).max())

    def epsilon(self, delta: float) -> float:
        """Smallest epsilon known at `delta`."""
        if delta == 0 or self.times != 1:
            tilts, divergences, extra = _divergences(self.rows)
            bounds = self.times * divergences + (extra - math.log(delta)) / tilts if delta > 0 else math.inf
            return float(np.clip(np.min(bounds), 0.0, self.pure))
        if self.delta(0.0) <= delta:
            return 0.0
        return float(optimize.brentq(lambda eps: self.delta(eps) - delta, 0.0, self.pure, xtol=1e-15))

    def delta(self, epsilon: float) -> float:
        """Smallest delta known at `epsilon`."""
        if epsilon >= self.pure:
            return 0.0
        if self.times == 1:
            chances = np.array(self.rows)
            return float(np.maximum(chances[:, None] - math.exp(epsilon) * chances, 0.0).sum(-1).max())
        tilts, divergences, extra = _divergences(self.rows)
        return min(1.0, math.exp(float((tilts * (self.times * divergences - epsilon) + extra).min())))


_Own = Quantized | Concentrated | Finite | Summed  # they know their own epsilon and delta

Event: TypeAlias = "DpEvent | Pure | Leak | Quantized | Concentrated | Finite | Summed"


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
    if event is None or isinstance(event, Pure | Leak | _Own):
        return False
    return any(hasattr(leaf, "event") for leaf, _ in _leaves(event, 1))


def sampled_gaussian(event: Event | None) -> tuple[float, int] | None:
    """The probability of a record in a step, and the number of steps, of Gaussian steps on sampled records."""
    noise = None if event is None or isinstance(event, Pure | Leak | Finite) else _noise(list(_leaves(event, 1)))
    return (noise.share, noise.runs) if noise else None


def gaussian_steps(noise_multiplier: float, share: float, steps: int) -> Event:
    """Gaussian steps that each take a record with probability `share`, independently."""
    from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent

    step = GaussianDpEvent(noise_multiplier)
    return repeat(step if share == 1 else PoissonSampledDpEvent(share, step), steps)


def repeat(event: Event, rounds: int) -> Event:
    """The adaptive composition of `rounds` copies of `event`.

    Raises:
        ValueError: rounds is negative.
    """
    if rounds < 0:
        raise ValueError(f"expected rounds >= 0, got rounds={rounds}")
    if isinstance(event, Pure | Leak | _Own):
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


def _noise(leaves: Sequence[tuple[Any, int]]) -> Sampled | None:
    import dp_accounting as dp

    if len(leaves) != 1:
        return None
    leaf, count = leaves[0]
    if isinstance(leaf, dp.PoissonSampledDpEvent) and isinstance(leaf.event, dp.GaussianDpEvent):
        noise, share = leaf.event.noise_multiplier, leaf.sampling_probability
        return Sampled(noise, share, count) if 0 < noise < math.inf and share > 0 else None
    return None


@functools.lru_cache(maxsize=4)
def _accountant(leaves: tuple[tuple[DpEvent, int], ...]) -> PLDAccountant:
    """The composition of all leaves; cached because a claim evaluates it several times."""
    from dp_accounting.pld import PLDAccountant

    spreads = [(_spread(leaf), math.sqrt(count)) for leaf, count in leaves]
    widest = max(20 * spread * times + (spread * times) ** 2 / 2 for spread, times in spreads)
    finest = min([FINEST, *(spread / 10 for spread, _ in spreads if spread > 0)])
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
_Distribution = _Gaussian | _Laplace | _Response | _Numerical | _Worst | _Uneven | _Own


def _distribution(event: Event) -> _Distribution:
    if isinstance(event, _Own):
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


@functools.lru_cache(maxsize=16)
def _divergences(rows: tuple[tuple[float, ...], ...]) -> tuple[Numbers, Numbers, Numbers]:
    """Orders of Renyi minus 1, the largest divergence of two rows at each, and the terms of its conversion to delta.

    The conversion is Prop. 12 of Canonne, Kamath, Steinke 2020: delta is exp(tilt (divergence - epsilon) + extra).
    """
    logs = np.log(np.array(rows))
    center = logs.mean(0)
    ratios = logs - center
    tilts = np.geomspace(1e-4, np.clip(300 / max(float(np.abs(ratios).max()), 1e-9) - 0.5, 1e-3, 1e4), 200)
    sums = [(np.exp((1 + tilt) * ratios + center) @ np.exp(-tilt * ratios).T).max() for tilt in tilts]
    return tilts, np.log(np.maximum(sums, 1.0)) / tilts, tilts * np.log(tilts / (1 + tilts)) - np.log1p(tilts)


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


def _rounded(event: Quantized) -> Run:
    """The losses of one number at nodes of the dither; if there are too many levels, neighbors are merged."""
    places = np.unique(np.linspace(0, 2 * event.top - 1, _CELLS - 1).round()) - event.top + 0.5
    dithers, weights = np.polynomial.legendre.leggauss(8)
    ends = [np.concatenate([[-math.inf], event.step * (places - dither / 2), [math.inf]]) for dither in dithers]
    upper, lower = (np.array([masses(row - at) for row in ends]) for at in (event.shift, -event.shift))
    some = upper > 1e-250
    losses = np.log(upper[some]) - np.log(np.maximum(lower[some], 1e-300))
    return Run(losses, np.log((weights[:, None] / 2 * upper)[some]), 0.0, event.times)
