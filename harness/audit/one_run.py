"""Audits of a single run with many canaries: bounds from guesses of coins, and an estimate from cosines.

An independent fair coin decides whether each of m canaries is in the run. The auditor guesses the r coins with the
clearest scores; v guesses are right. r is fixed before the run, because the best of several r gives no valid bound.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from statistics import NormalDist
from typing import NamedTuple

import numpy as np
from scipy import optimize, special

from leakgauge.harness.audit.bounds import Bound, check_confidence
from leakgauge.harness.core.gaussian import check_delta, check_nonnegative, gaussian_epsilon
from leakgauge.harness.core.stats import STRICT, Numbers

_INVERSE = NormalDist().inv_cdf


class CosineEstimate(NamedTuple):
    """An estimate of epsilon from the cosines of canaries with the sum of updates; no bound in either direction.

    Attributes:
        mu: mean cosine in standard deviations of the null; 0 if it is negative.
        canaries: k.
        dim: d, the length of an update.
    """

    epsilon: float
    mu: float
    canaries: int
    dim: int


def p_value(m: int, r: int, v: int, epsilon: float, delta: float) -> float:
    """An upper bound of the probability that v or more of r guesses are right, for any (epsilon, delta)-DP mechanism.

    min(1, beta + 2 m delta alpha), with q = e^epsilon / (1 + e^epsilon), beta = P[Bin(r, q) >= v] and
    alpha = max over 1 <= i <= v of P[v > Bin(r, q) >= v - i] / i.

    Guarantees:
        Does not fall as epsilon rises if 2 m delta <= 1, because the i-th term of alpha falls no faster than beta / i
        rises. A grid search found no fall for any delta. A fall could lead `steinke_epsilon` to a later crossing.

    Raises:
        ValueError: not 0 <= v <= r <= m with m >= 1, epsilon negative, delta outside [0, 1).

    Source: Steinke, Nasr, Jagielski 2023 (arXiv 2305.08846), appendix D.
    """
    _check_guesses(m, r, v)
    check_nonnegative(epsilon=epsilon)
    check_delta(delta)
    if v == 0:
        return 1.0
    log_q, log_rest = -math.log1p(math.exp(-epsilon)), -float(np.logaddexp(0.0, epsilon))
    beta = float(special.betainc(v, r - v + 1, math.exp(log_q)))
    below = np.arange(v - 1, -1, -1)
    log_ways = math.lgamma(r + 1) - special.gammaln(below + 1) - special.gammaln(r - below + 1)
    shares = np.cumsum(np.exp(log_ways + below * log_q + (r - below) * log_rest))
    alpha = float(np.max(shares / np.arange(1, v + 1)))
    return min(1.0, beta + 2 * m * delta * alpha)


def steinke_epsilon(m: int, r: int, v: int, delta: float, confidence: float = 0.95) -> float:
    """A lower bound of epsilon at `delta`: the epsilon up to which `p_value` is below 1 - confidence.

    Guarantees:
        Above the true epsilon with probability at most 1 - confidence, for any mechanism, if r does not depend on the
        run.
        0 if no epsilon is refuted.

    Raises:
        ValueError: as `p_value`; confidence outside (0, 1).

    Source: Steinke, Nasr, Jagielski 2023 (arXiv 2305.08846), appendix D.
    """
    check_confidence(confidence)
    return _root(lambda epsilon: 1 - confidence - p_value(m, r, v, epsilon, delta))


def fdp_mu(m: int, r: int, v: int, confidence: float = 0.95) -> float:
    """The mu up to which v right guesses of r refute mu-Gaussian differential privacy; 0 if they refute no mu.

    A lower bound of mu only for a Gaussian mechanism, whose trade-off curve is that of N(0, 1) against N(mu, 1). For
    any other mechanism it is an estimate.

    Guarantees:
        For a mechanism with a Gaussian trade-off curve, above its mu with probability at most 1 - confidence, if r does
        not depend on the run.

    Raises:
        ValueError: not 0 <= v <= r <= m with m >= 1, confidence outside (0, 1).

    Source: Mahloujifar, Melis, Chaudhuri 2024 (arXiv 2410.22235), applied to the trade-off curve of a Gaussian.
    """
    _check_guesses(m, r, v)
    check_confidence(confidence)
    return _root(lambda mu: _fdp_excess(mu, m, r, v, 1 - confidence)) if v else 0.0


def bound_from_guesses(m: int, r: int, v: int, delta: float, confidence: float, *, gaussian: bool) -> Bound:
    """The bound from v right guesses; of the two valid bounds of a Gaussian mechanism, the larger one."""
    strict = max(confidence, STRICT)

    def bound(right: int, level: float) -> float:
        general = steinke_epsilon(m, r, right, delta, level)
        return max(general, gaussian_epsilon(fdp_mu(m, r, right, level), delta)) if gaussian else general

    method = "one run, Gaussian trade-off" if gaussian else "one run"
    general = steinke_epsilon(m, r, v, delta, confidence)
    return Bound(bound(v, confidence), method, general, bound(v, strict), bound(r, strict))


def cosine_epsilon(cosines: Numbers, dim: int, delta: float) -> CosineEstimate:
    """An ESTIMATE of epsilon, not a bound, from the cosines of canaries with the sum that contains them.

    The canaries are uniform on the sphere, so the cosine of an absent canary follows N(0, 1/d). The cosines of present
    canaries are assumed to follow N(mean, 1/d); epsilon is that of these two distributions. The estimate is too low if
    the number of canaries is not small compared with d.

    Differs: the source fits the standard deviation to the cosines, which doubles the spread of the estimate and biases
    it upwards. A negative mean counts as 0, because a canary does not push the sum away from itself.

    Args:
        cosines: [k] in [-1, 1], of present canaries; k is at least 100 and at most d / 100.

    Raises:
        ValueError: fewer than two cosines, one outside [-1, 1], dim < 2, delta outside [0, 1).

    Source: Andrew et al. 2023 (arXiv 2302.03098).
    """
    x = np.asarray(cosines, dtype=np.float64)
    if x.ndim != 1 or len(x) < 2 or not np.all(np.abs(x) <= 1):
        raise ValueError(f"expected cosines [k], k >= 2, in [-1, 1], got shape {x.shape}")
    if dim < 2:
        raise ValueError(f"expected dim >= 2, got dim={dim}")
    mu = max(0.0, float(np.mean(x))) / (1 / math.sqrt(dim))
    return CosineEstimate(gaussian_epsilon(mu, delta), mu, len(x), dim)


def _root(falling: Callable[[float], float]) -> float:
    """The root of a function that falls from its value at 0; 0 if this value is not positive."""
    if falling(0.0) <= 0:
        return 0.0
    high = 1.0
    while falling(high) > 0:
        high *= 2
    return float(optimize.brentq(falling, 0.0, high, xtol=1e-12))


def _fdp_excess(mu: float, m: int, r: int, v: int, limit: float) -> float:
    """log((R + H) m / r) after the recursion, for v >= 1: positive if mu-GDP is refuted, falling in mu."""
    # scalars in a loop, for about ten values of mu, are faster than arrays of candidates for mu
    right, wrong = limit * v / m, limit * (r - v) / m
    for i in range(v - 1, -1, -1):
        if right >= 1:
            break
        grown = max(wrong, 0.5 * math.erfc((mu - _INVERSE(right)) * math.sqrt(0.5)))
        right, wrong = right + i / (r - i) * (grown - wrong), grown
    return math.log((min(right, 1.0) + wrong) * m / r)


def _check_guesses(m: int, r: int, v: int) -> None:
    if not (m >= 1 and 0 <= v <= r <= m):
        raise ValueError(f"expected 0 <= v <= r <= m and m >= 1, got m={m}, r={r} and v={v}")
