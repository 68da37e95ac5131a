"""What a `DpEvent` promises as (epsilon, delta): closed forms where they exist, privacy loss distributions elsewhere.

An event describes the law of one pair of neighbours. Which pair is the caller's business: the sensitivity goes into the
noise multiplier, z = noise_std / sensitivity; it is 2 * clip where a record is replaced, clip where it is added or
removed.

| event | epsilon at delta = 0 | epsilon at delta > 0 |
|---|---|---|
| None, `NonPrivate`, a noise multiplier of 0 | infinite | infinite |
| Gaussians, any composition | infinite | exact |
| one Laplace | exact | exact |
| one randomized response, repeated or not | exact | exact |
| any other composition of these | exact | upper bound; ValueError with a randomized response in it |
| what else `PLDAccountant` supports (add or remove) | ValueError | upper bound |
| the rest | ValueError | ValueError |
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
from scipy import optimize, special

if TYPE_CHECKING:
    from dp_accounting import DpEvent

_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(3)


def gaussian_delta(mu: float, epsilon: float) -> float:
    """Smallest delta of the Gaussian mechanism at `epsilon`.

    delta = Phi(mu/2 - eps/mu) - e^eps Phi(-mu/2 - eps/mu), with mu = sensitivity / noise_std.

    | mu | epsilon | delta |
    |---|---|---|
    | 0 | any | 0 |
    | inf | finite | 1 |
    | any | inf | 0 |

    Guarantees:
        Relative error below 1e-11 as long as delta is above the smallest float64, for mu from 1e-12 to 100.

    Raises:
        ValueError: mu or epsilon is negative or not a number.

    Source: Balle, Wang 2018 (arXiv 1805.06530), Thm 8; Dong, Roth, Su 2022, Cor. 2.13.
    """
    _check(mu=mu, epsilon=epsilon)
    return math.exp(_log_delta(mu, epsilon))


def gaussian_epsilon(mu: float, delta: float) -> float:
    """Smallest epsilon of the Gaussian mechanism at `delta`: the inverse of `gaussian_delta` in epsilon.

    | mu | delta | epsilon |
    |---|---|---|
    | 0 | any | 0 |
    | > 0 | 0 | inf |
    | inf | any | inf |
    | > 0 | >= 2 Phi(mu/2) - 1 | 0 |

    Raises:
        ValueError: mu is negative, or delta is outside [0, 1).
    """
    _check(mu=mu)
    _check_delta(delta)
    if mu == 0:
        return 0.0
    if math.isinf(mu) or delta == 0:
        return math.inf
    target = math.log(delta)
    if _log_delta(mu, 0.0) <= target:
        return 0.0
    # delta(eps) < Phi(mu/2 - eps/mu), which is delta at mu^2/2 - mu Phi^-1(delta); 1e-12 and 1 for rounding
    high = (mu * mu / 2 - mu * float(special.ndtri(delta))) * (1 + 1e-12) + 1.0
    return float(optimize.brentq(lambda eps: _log_delta(mu, eps) - target, 0.0, high, xtol=1e-15 * high))


def gaussian_mu(epsilon: float, delta: float) -> float:
    """Largest mu = sensitivity / noise_std that is (epsilon, delta)-DP: the inverse of `gaussian_delta` in mu.

    0 where delta is 0, infinite where epsilon is.

    Raises:
        ValueError: epsilon is negative, or delta is outside [0, 1).
    """
    _check(epsilon=epsilon)
    _check_delta(delta)
    if delta == 0:
        return 0.0
    if math.isinf(epsilon):
        return math.inf
    if epsilon == 0:
        return 2.0 * float(special.ndtri((1.0 + delta) / 2.0))
    target = math.log(delta)
    low = high = 1.0
    while _log_delta(low, epsilon) >= target:
        low /= 2.0
    while _log_delta(high, epsilon) <= target:
        high *= 2.0
    return float(optimize.brentq(lambda mu: _log_delta(mu, epsilon) - target, low, high, xtol=1e-15 * low))


def epsilon(event: DpEvent | None, delta: float) -> float:
    """Smallest epsilon that `event` is known to have at `delta`; infinite where nothing is promised.

    Args:
        event: sensitivities are in its noise multipliers (see the module). None promises nothing.

    Raises:
        ValueError: delta is outside [0, 1), or the event has no known law; the message names it.
    """
    _check_delta(delta)
    return math.inf if event is None else _law(event).epsilon(delta)


def delta(event: DpEvent | None, epsilon: float) -> float:
    """Smallest delta that `event` is known to have at `epsilon`; 1 where nothing is promised, 0 at an infinite epsilon.

    Raises:
        ValueError: epsilon is negative, or the event has no known law; the message names it.
    """
    _check(epsilon=epsilon)
    if math.isinf(epsilon):
        return 0.0
    return 1.0 if event is None else _law(event).delta(epsilon)


def repeat(event: DpEvent, rounds: int) -> DpEvent:
    """`event`, `rounds` times, adaptively.

    Raises:
        ValueError: rounds is negative.
    """
    from dp_accounting import SelfComposedDpEvent

    if rounds < 0:
        raise ValueError(f"expected rounds >= 0, got rounds={rounds}")
    return SelfComposedDpEvent(event, rounds)


def _check(**values: float) -> None:
    """Refuse a negative number and NaN."""
    for name, value in values.items():
        if not value >= 0:
            raise ValueError(f"expected {name} >= 0, got {name}={value}")


def _check_delta(delta: float) -> None:
    """Refuse a delta outside [0, 1)."""
    if not 0 <= delta < 1:
        raise ValueError(f"expected 0 <= delta < 1, got delta={delta}")


def _mills(x: float | npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Mills ratio Phi(-x) / phi(x)."""
    return np.asarray(math.sqrt(math.pi / 2) * special.erfcx(np.asarray(x) / math.sqrt(2)), dtype=np.float64)


def _log_delta(mu: float, epsilon: float) -> float:
    """log delta of the Gaussian mechanism.

    With a = eps/mu - mu/2, e^eps phi(a + mu) = phi(a), hence delta = phi(a) (R(a) - R(a + mu)), R the Mills ratio.
    """
    if mu == 0 or math.isinf(epsilon):
        return -math.inf
    if math.isinf(mu):
        return 0.0
    a = epsilon / mu - mu / 2
    if a > 1e150:  # a^2 overflows
        return -math.inf
    log_density = -a * a / 2 - math.log(2 * math.pi) / 2
    if a < -1:  # R(a) overflows at -38; 1 - delta is small and does not cancel, as mu > 2
        return math.log1p(-float(special.ndtr(a)) - math.exp(log_density) * float(_mills(a + mu)))
    if mu < 0.01 * max(1.0, a):  # the difference would cancel; three nodes integrate -R' to 1e-14
        return log_density + math.log(mu) + math.log(float(_WEIGHTS @ _descent(a + mu * (_NODES + 1) / 2)) / 2)
    return log_density + math.log(float(_mills(a) - _mills(a + mu)))


def _descent(x: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """-R'(x) = 1 - x R(x), for x >= -1."""
    # at 200 the difference has lost 4 of 16 digits, and the series is good to 105 / x^6
    far = np.maximum(x, 200.0)
    return np.where(x < 200, 1 - x * _mills(x), far**-2.0 * (1 - 3 * far**-2.0 + 15 * far**-4.0))


class _Law(Protocol):
    """The trade-off between epsilon and delta of one pair of neighbours."""

    def epsilon(self, delta: float) -> float:
        """Smallest epsilon at `delta`."""

    def delta(self, epsilon: float) -> float:
        """Smallest delta at a finite `epsilon`."""


class _Gaussian(NamedTuple):
    """N(0, 1) against N(mu, 1); mu = 0 tells nothing, mu = inf everything."""

    mu: float

    def epsilon(self, delta: float) -> float:
        return gaussian_epsilon(self.mu, delta)

    def delta(self, epsilon: float) -> float:
        return gaussian_delta(self.mu, epsilon)


class _Laplace(NamedTuple):
    """Two Laplace laws of scale 1, shifted by `pure`: delta = 1 - exp((eps - pure) / 2)."""

    pure: float

    def epsilon(self, delta: float) -> float:
        return max(0.0, self.pure + 2 * math.log1p(-delta))

    def delta(self, epsilon: float) -> float:
        return max(0.0, -math.expm1((epsilon - self.pure) / 2))


class _Response(NamedTuple):
    """`times` randomized responses; the privacy loss of each is +one, 0 or -one.

    `PLDAccountant` of dp_accounting 0.6.0 counts a repeated response once, hence this closed form; for two buckets it
    is Kairouz, Oh, Viswanath 2015, Thm 3.3.
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
    """What `PLDAccountant` makes of it; `pure` is epsilon at delta = 0, None where no closed form is known."""

    leaves: tuple[tuple[DpEvent, int], ...]
    pure: float | None

    def epsilon(self, delta: float) -> float:
        if delta > 0:
            found = float(self._accountant().get_epsilon(delta))
            return found if self.pure is None else min(found, self.pure)
        if self.pure is None:
            raise ValueError(f"no epsilon is known at delta = 0 for {_names(self.leaves)}; ask at delta > 0")
        return self.pure

    def delta(self, epsilon: float) -> float:
        if self.pure is not None and epsilon >= self.pure:
            return 0.0
        return float(self._accountant().get_delta(epsilon))

    def _accountant(self) -> Any:
        """A `PLDAccountant` that holds all leaves."""
        from dp_accounting.pld import PLDAccountant

        accountant = PLDAccountant()
        unknown = [pair for pair in self.leaves if not accountant.supports(pair[0])]
        if unknown:
            raise ValueError(f"no law is known for {_names(unknown)} within {_names(self.leaves)} at delta > 0")
        for leaf, count in self.leaves:
            accountant.compose(leaf, count)
        return accountant


def _law(event: DpEvent) -> _Law:
    """The law of `event`, in closed form where there is one."""
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
    """The mechanisms inside `event`, each with how often it ran."""
    import dp_accounting as dp

    if isinstance(event, dp.SelfComposedDpEvent):
        yield from _leaves(event.event, count * event.count)
    elif isinstance(event, dp.ComposedDpEvent):
        for part in event.events:
            yield from _leaves(part, count)
    elif not isinstance(event, dp.NoOpDpEvent) and count > 0:
        yield event, count


def _pure(leaf: Any, count: int) -> float | None:
    """Epsilon of `count` runs at delta = 0; None where it is not known."""
    import dp_accounting as dp

    if isinstance(leaf, dp.LaplaceDpEvent):
        return count * _inverse(leaf.noise_multiplier)
    if isinstance(leaf, dp.RandomizedResponseDpEvent):
        return _Response(leaf.noise_parameter, leaf.num_buckets, count).epsilon(0.0)
    if isinstance(leaf, dp.GaussianDpEvent):
        return math.inf if _inverse(leaf.noise_multiplier) > 0 else 0.0
    return None


def _inverse(noise_multiplier: float) -> float:
    """1 / z: how far apart two neighbours are, in units of the noise; no noise is infinitely far."""
    _check(noise_multiplier=noise_multiplier)
    return 1 / noise_multiplier if noise_multiplier > 0 else math.inf


@functools.lru_cache(maxsize=16)
def _chances(noise: float, buckets: int, count: int) -> npt.NDArray[np.float64]:
    """Probabilities of a sum of `count` losses -1, 0, +1 of a randomized response, from -count to count."""
    low = noise / buckets
    one = np.array([low, (buckets - 2) * low, 1 - (buckets - 1) * low])
    return functools.reduce(np.convolve, [one] * count, np.ones(1))


def _names(leaves: Sequence[tuple[Any, int]]) -> str:
    """The types of the leaves, for an error message."""
    return ", ".join(sorted({type(leaf).__name__ for leaf, _ in leaves}))
