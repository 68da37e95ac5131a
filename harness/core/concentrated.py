"""Concentrated differential privacy, and Laplace noise on updates of a bounded l2 norm."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass

from scipy import optimize

from leakgauge.harness.core.gaussian import check_delta, check_nonnegative


@dataclass(frozen=True)
class Concentrated:
    """`times` mechanisms; for each, the Renyi divergence of every order a > 1 is at most a * rho (rho-zCDP).

    Normal noise with a noise multiplier of z has rho = 1 / (2 z^2), an epsilon-DP mechanism epsilon^2 / 2.

    Args:
        pure: a bound on the privacy loss of one mechanism; infinite: unknown.

    | rho | epsilon | delta |
    |---|---|---|
    | 0 | 0 | 0 |
    | infinite | the sum of `pure` | 1 below the sum of `pure`, else 0 |

    Raises:
        ValueError: a number is negative.

    Source: Bun, Steinke 2016 (arXiv 1605.02065), Def. 1.1, Prop. 1.4 and 1.6, and Lemma 2.3: rho adds up over adaptive
        rounds. Canonne, Kamath, Steinke 2020 (arXiv 2004.00010), Prop. 12: epsilon and delta of one order; we take the
        best order, where (a - 1)^2 rho = -ln(a delta), which is better than the closed form of Bun and Steinke.
    """

    rho: float
    pure: float = math.inf
    times: int = 1

    def __post_init__(self) -> None:
        check_nonnegative(rho=self.rho, pure=self.pure, times=self.times)

    def plus(self, other: Concentrated) -> Concentrated:
        """The adaptive composition of both."""
        return Concentrated(self._total + other._total, self._most + other._most)

    @property
    def _total(self) -> float:
        return self.rho * self.times if self.times else 0.0

    @property
    def _most(self) -> float:
        return self.pure * self.times if self.times else 0.0

    def epsilon(self, delta: float) -> float:
        """An upper bound of epsilon: the least over all orders a of a rho + ln(1 - 1/a) - ln(a delta) / (a - 1)."""
        check_delta(delta)
        rho = self._total
        if delta == 0 or math.isinf(rho):
            return self._most
        if rho == 0:
            return 0.0
        left = -math.log(delta)
        # y = a - 1; ln(1 + y) is between 0 and y, and a is at most 1 / delta
        low, high = 2 * left / (1 + math.sqrt(1 + 4 * rho * left)), math.expm1(min(left, 700))
        y = _root(lambda y: y * y * rho + math.log1p(y) - left, low, min(high, math.sqrt(left / rho)))
        found = (1 + y) * rho + math.log(y / (1 + y)) + (left - math.log1p(y)) / y
        return min(max(0.0, found), self._most)

    def delta(self, epsilon: float) -> float:
        """An upper bound of delta: the least over all orders a of e^((a - 1)(a rho - epsilon)) (1 - 1/a)^a / (a - 1).

        It is the inverse of `epsilon`.
        """
        check_nonnegative(epsilon=epsilon)
        rho = self._total
        if epsilon >= self._most or rho == 0:
            return 0.0
        if math.isinf(rho):
            return 1.0

        def slope(x: float) -> float:
            return (2 * math.exp(x) + 1) * rho - epsilon + x - math.log1p(math.exp(x))

        # x = ln(a - 1); the logarithm of the bound is convex in a, and each order has a bound
        x = math.log(min((epsilon + 1) / (2 * rho), 1e300) + 1)
        x = float(optimize.brentq(slope, -3 * rho - 1, x)) if slope(x) > 0 else x
        y = math.exp(x)
        log = y * ((1 + y) * rho - epsilon + x - math.log1p(y)) - math.log1p(y)
        return math.exp(min(log, 0.0))


@functools.lru_cache(maxsize=1024)  # a defense calls this once per message
def concentrated_rho(epsilon: float, delta: float) -> float:
    """The largest rho whose epsilon at `delta` is at most `epsilon`: the inverse of `Concentrated.epsilon`.

    Raises:
        ValueError: epsilon is not finite and above zero, or delta outside (0, 1).
    """
    if not (0 < epsilon < math.inf and 0 < delta < 1):
        raise ValueError(f"expected a finite epsilon > 0 and 0 < delta < 1, got epsilon={epsilon}, delta={delta}")
    left = -math.log(delta)
    most = math.expm1(min(left, 700))

    def rho(y: float) -> float:
        return (left - math.log1p(y)) / y / y

    # at the best order 1 + y, epsilon is (2 y + 1) rho + ln(1 - 1 / (1 + y)), which falls in y
    y = _root(lambda y: (2 * y + 1) * rho(y) + math.log(y / (1 + y)) - epsilon, 1e-9 * min(1.0, most), most)
    return max(0.0, rho(y))


def laplace_l2(distance: float, scale: float, dim: int) -> Concentrated:
    """Laplace noise of scale b in each of `dim` coordinates, for updates at most D apart in l2 norm.

    In any dimension, rho is D^2 / (2 b^2), that of normal noise with standard deviation b, whose variance is half of
    that of the Laplace noise.

    Proof. One coordinate: take b = 1, a shift t >= 0 (the density is symmetric), and an order a > 1. The integral of
    P^a Q^(1 - a), over the two tails and the interval of length t between the centers, is e^g(t), where
        g(t) = ln(p e^((a - 1) t) + q e^(-a t)), p = a / (2 a - 1), q = (a - 1) / (2 a - 1),
    so that the divergence is g(t) / (a - 1). Since p + q = 1 and p (a - 1) = q a, g(0) = 0 and g'(0) = 0. The second
    derivative of the logarithm of a sum of two exponentials is
        g''(t) = (2 a - 1)^2 w (1 - w), w = p / (p + q e^(-(2 a - 1) t)).
    For t >= 0, w is at least p, and p is above 1/2, so w (1 - w) is at most p q, and g''(t) is at most
    (2 a - 1)^2 p q = a (a - 1). Integrated twice, g(t) <= a (a - 1) t^2 / 2: the divergence is at most a t^2 / 2.
    All coordinates: the noises are independent, so the divergences add up to at most a |t|^2 / (2 b^2).
    Loss: |log(P / Q)| is at most the l1 norm of t / b, which is at most sqrt(dim) D / b (Cauchy-Schwarz).

    Raises:
        ValueError: a number is not above zero.

    Source: g is that of Mironov 2017 (arXiv 1702.07476), Table II; the bound by normal noise is ours.
    """
    if not (distance > 0 and scale > 0 and dim > 0):
        raise ValueError(f"expected numbers above zero, got distance={distance}, scale={scale}, dim={dim}")
    moved = distance / scale
    return Concentrated(moved**2 / 2, math.sqrt(dim) * moved)


def laplace_l2_scale(distance: float, epsilon: float, delta: float) -> float:
    """b, the least scale for which `laplace_l2` has at most `epsilon` at `delta` by its rho alone.

    Raises:
        ValueError: as `concentrated_rho`.
    """
    return distance / math.sqrt(2 * concentrated_rho(epsilon, delta))


def _root(function: Callable[[float], float], low: float, high: float) -> float:
    """The root between two positive numbers, which may miss it by rounding; on a logarithmic scale."""
    ends = math.log(low) - 1e-12, math.log(high) + 1e-12
    return math.exp(optimize.brentq(lambda x: function(math.exp(x)), *ends, xtol=1e-15))
