"""The exact trade-off between epsilon and delta of the Gaussian mechanism."""

from __future__ import annotations

import functools
import math

import numpy as np
import numpy.typing as npt
from scipy import optimize, special

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
        Relative error below 1e-11 for mu from 1e-12 to 100, if delta is above the smallest float64.

    Raises:
        ValueError: mu or epsilon is negative or not a number.

    Source: Balle, Wang 2018 (arXiv 1805.06530), Thm 8; Dong, Roth, Su 2022, Cor. 2.13.
    """
    check_nonnegative(mu=mu, epsilon=epsilon)
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
    check_nonnegative(mu=mu)
    check_delta(delta)
    if mu == 0:
        return 0.0
    if math.isinf(mu * mu) or delta == 0:  # epsilon is about mu^2 / 2
        return math.inf
    target = math.log(delta)
    if _log_delta(mu, 0.0) <= target:
        return 0.0
    # delta(eps) < Phi(mu/2 - eps/mu), which equals delta at mu^2/2 - mu Phi^-1(delta); 1e-12 and 1 cover rounding
    high = (mu * mu / 2 - mu * float(special.ndtri(delta))) * (1 + 1e-12) + 1.0
    return float(optimize.brentq(lambda eps: _log_delta(mu, eps) - target, 0.0, high, xtol=1e-15 * high))


@functools.lru_cache(maxsize=1024)  # a server calls this once per round
def gaussian_mu(epsilon: float, delta: float) -> float:
    """Largest mu = sensitivity / noise_std that is (epsilon, delta)-DP: the inverse of `gaussian_delta` in mu.

    It is 0 if delta is 0, and infinite if delta > 0 and epsilon is infinite.

    Raises:
        ValueError: epsilon is negative, or delta is outside [0, 1).
    """
    check_nonnegative(epsilon=epsilon)
    check_delta(delta)
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


def check_nonnegative(**values: float) -> None:
    """Raise ValueError for a negative number or NaN."""
    for name, value in values.items():
        if not value >= 0:
            raise ValueError(f"expected {name} >= 0, got {name}={value}")


def check_delta(delta: float) -> None:
    """Raise ValueError for a delta outside [0, 1)."""
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
    if a < -1:  # R(a) overflows at -38; here mu > 2, so that 1 - delta is small and does not cancel
        return math.log1p(-float(special.ndtr(a)) - math.exp(log_density) * float(_mills(a + mu)))
    if mu < 0.01 * max(1.0, a):  # the difference would cancel; three nodes integrate -R' to 1e-14
        return log_density + math.log(mu) + math.log(float(_WEIGHTS @ _descent(a + mu * (_NODES + 1) / 2)) / 2)
    return log_density + math.log(float(_mills(a) - _mills(a + mu)))


def _descent(x: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """-R'(x) = 1 - x R(x), for x >= -1."""
    # at x = 200 the difference has lost 4 of 16 digits, and the series has an error of 105 / x^6
    far = np.maximum(x, 200.0)
    return np.where(x < 200, 1 - x * _mills(x), far**-2.0 * (1 - 3 * far**-2.0 + 15 * far**-4.0))
