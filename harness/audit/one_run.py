"""Audits of a single run with many canaries: bounds from guesses about coins, and an estimate from cosines.

Each of m canaries is in the run or not by a fair coin of its own. The auditor guesses r of the coins, those it is
surest of, and v guesses are right. r is fixed before the run: the best of several is a bound only after a correction
(`corrected_steinke`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist
from typing import Literal, NamedTuple

import numpy as np
from scipy import optimize, special

from leakgauge.harness.core.gaussian import check_delta, check_nonnegative, gaussian_epsilon
from leakgauge.harness.core.stats import Numbers

_INVERSE = NormalDist().inv_cdf


class CosineAudit(NamedTuple):
    """What the cosines of canaries with the sum of the updates say: an estimate, and no bound in either direction."""

    epsilon: float
    mu: float
    """Mean of the cosines in standard deviations of the null, 0 where it is negative."""

    k: int
    """Canaries."""

    d: int
    """Coordinates of an update."""

    mean: float
    std: float
    """Of the cosines of canaries that took part: fitted, or that of the null."""

    null: Literal["known", "fitted"]
    kind: Literal["estimate"] = "estimate"


def p_value(m: int, r: int, v: int, epsilon: float, delta: float) -> float:
    """Probability that any (epsilon, delta)-DP mechanism lets v or more of r guesses be right, or an upper bound of it.

    min(1, beta + 2 m delta alpha), with q = e^epsilon / (1 + e^epsilon), beta = P[Bin(r, q) >= v] and
    alpha = max over 1 <= i <= v of P[v > Bin(r, q) >= v - i] / i.

    Guarantees:
        Does not fall with epsilon where 2 m delta <= 1: the i-th term of alpha falls no faster than beta / i rises.
        (Seen on a grid for all delta; where it fell, `steinke_epsilon` could find a crossing that is not the first.)

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
    """A lower bound of epsilon at `delta` from one run: the epsilon up to which `p_value` lies below 1 - confidence.

    Guarantees:
        Above the true epsilon with probability at most 1 - confidence, for any mechanism, if r does not depend on the
        run.
        0 where no epsilon is refuted.

    Raises:
        ValueError: as `p_value`; confidence outside (0, 1).

    Source: Steinke, Nasr, Jagielski 2023 (arXiv 2305.08846), appendix D.
    """
    _check_confidence(confidence)
    if p_value(m, r, v, 0.0, delta) >= 1 - confidence:
        return 0.0
    high = 1.0
    while p_value(m, r, v, high, delta) < 1 - confidence:
        high *= 2
    return float(optimize.brentq(_p_excess, 0.0, high, (m, r, v, delta, 1 - confidence), xtol=1e-12))


def corrected_steinke(m: int, guesses: Sequence[tuple[int, int]], delta: float, confidence: float = 0.95) -> float:
    """The largest `steinke_epsilon` of a few numbers of guesses, each at 1 - (1 - confidence) / how many there are.

    Args:
        guesses: (r, v) for each r. The r's, and how many, are fixed before the run.

    Guarantees:
        As `steinke_epsilon`, by the union bound.

    Raises:
        ValueError: no guesses, or as `steinke_epsilon`.
    """
    if len(guesses) == 0:
        raise ValueError("expected at least one pair (r, v), got none")
    _check_confidence(confidence)
    each = 1 - (1 - confidence) / len(guesses)
    return max(steinke_epsilon(m, r, v, delta, each) for r, v in guesses)


def fdp_mu(m: int, r: int, v: int, confidence: float = 0.95) -> float:
    """The mu up to which mu-Gaussian differential privacy is refuted by v right guesses of r; 0 where none is.

    A lower bound of mu only where the mechanism is known to be Gaussian (its trade-off curve is that of N(0, 1) against
    N(mu, 1)); for any other mechanism an estimate.

    Guarantees:
        For a mechanism whose trade-off curve is Gaussian, above its mu with probability at most 1 - confidence, if r
        does not depend on the run.

    Raises:
        ValueError: not 0 <= v <= r <= m with m >= 1, confidence outside (0, 1).

    Source: Mahloujifar, Melis, Chaudhuri 2024 (arXiv 2410.22235), on the trade-off curve of a Gaussian.
    """
    _check_guesses(m, r, v)
    _check_confidence(confidence)
    if v == 0 or _fdp_excess(0.0, m, r, v, 1 - confidence) <= 0:
        return 0.0
    high = 1.0
    while _fdp_excess(high, m, r, v, 1 - confidence) > 0:
        high *= 2
    return float(optimize.brentq(_fdp_excess, 0.0, high, (m, r, v, 1 - confidence), xtol=1e-12))


def fdp_epsilon(m: int, r: int, v: int, delta: float, confidence: float = 0.95) -> float:
    """The epsilon of the Gaussian mechanism of `fdp_mu`; infinite where delta is 0 and mu is not.

    A lower bound of epsilon only where the mechanism is known to be Gaussian; for any other an estimate.

    Raises:
        ValueError: as `fdp_mu`; delta outside [0, 1).
    """
    return gaussian_epsilon(fdp_mu(m, r, v, confidence), delta)


def cosine_epsilon(cosines: Numbers, dim: int, delta: float, null: Literal["known", "fitted"] = "known") -> CosineAudit:
    """An ESTIMATE of epsilon, not a bound, from the cosines of canaries with the sum that they are part of.

    The canaries lie uniformly on the sphere, so that the cosine of one that took no part follows N(0, 1/d). Those that
    took part are taken to follow N(mean, std^2), and epsilon is that of these two laws.

    | null | std |
    |---|---|
    | "fitted" | that of the cosines, over k: the source's. Biased upwards by the noise in it |
    | "known" | 1 / sqrt(d), as of the null: own variant. Half the spread; low where canaries are not few beside d |

    Differs: a negative mean counts as 0, since a canary does not push the sum away from itself.

    Args:
        cosines: [k] in [-1, 1], of canaries that took part. k at most a hundredth of d, and a hundred or more.

    Raises:
        ValueError: fewer than two cosines, one outside [-1, 1], dim < 2, delta outside [0, 1), unknown null.

    Source: Andrew et al. 2023 (arXiv 2302.03098).
    """
    x = np.asarray(cosines, dtype=np.float64)
    if x.ndim != 1 or len(x) < 2 or not np.all(np.abs(x) <= 1):
        raise ValueError(f"expected cosines [k], k >= 2, in [-1, 1], got shape {x.shape}")
    if dim < 2:
        raise ValueError(f"expected dim >= 2, got dim={dim}")
    if null not in ("known", "fitted"):
        raise ValueError(f"expected null 'known' or 'fitted', got null={null!r}")
    of_null = 1 / math.sqrt(dim)
    mean, std = float(np.mean(x)), of_null if null == "known" else float(np.std(x))
    epsilon = gaussian_pair_epsilon(0.0, of_null, max(0.0, mean), std, delta)
    return CosineAudit(epsilon, max(0.0, mean) / of_null, len(x), dim, mean, std, null)


def gaussian_pair_epsilon(m0: float, s0: float, m1: float, s1: float, delta: float) -> float:
    """Smallest epsilon at `delta` of the pair N(m0, s0^2), N(m1, s1^2), in both directions.

    | laws | delta | epsilon |
    |---|---|---|
    | equal | any | 0 |
    | not equal | 0 | inf |
    | not equal | at least their total variation distance | 0 |

    Raises:
        ValueError: a mean is not finite, a standard deviation is not positive and finite, delta outside [0, 1).
    """
    check_delta(delta)
    if not (math.isfinite(m0) and math.isfinite(m1) and 0 < s0 < math.inf and 0 < s1 < math.inf):
        raise ValueError(f"expected finite means and stds > 0, got N({m0}, {s0}^2) and N({m1}, {s1}^2)")
    if s0 == s1:
        return gaussian_epsilon(abs(m1 - m0) / s0, delta)
    if delta == 0:
        return math.inf
    return max(_one_way(abs(m1 - m0) / s0, s1 / s0, delta), _one_way(abs(m1 - m0) / s1, s0 / s1, delta))


def _one_way(shift: float, scale: float, delta: float) -> float:
    """The epsilon at which P = N(shift, scale^2) exceeds e^epsilon times N(0, 1) by delta > 0 somewhere."""
    if _hockey_stick(0.0, shift, scale) <= delta:
        return 0.0
    high = 1.0
    while _hockey_stick(high, shift, scale) > delta:
        high *= 2
    return float(optimize.brentq(_stick_excess, 0.0, high, (shift, scale, delta), xtol=1e-12))


def _stick_excess(epsilon: float, shift: float, scale: float, delta: float) -> float:
    """By how much the hockey stick exceeds delta."""
    return _hockey_stick(epsilon, shift, scale) - delta


def _hockey_stick(epsilon: float, shift: float, scale: float) -> float:
    """P(A) - e^epsilon Q(A) of P = N(shift, scale^2) and Q = N(0, 1), A where p > e^epsilon q; shift >= 0, scale not 1.

    With x = shift + scale u, log p / q - epsilon is the parabola a u^2 + b u + c.
    """
    a, b = (scale - 1) * (scale + 1) / 2, shift * scale
    c = shift * shift / 2 - math.log(scale) - epsilon
    square = b * b - 4 * a * c
    if square <= 0:  # the parabola opens downwards: a ratio of densities is not above 1 everywhere
        return 0.0
    sum_of_terms = -(b + math.sqrt(square)) / 2  # b >= 0: nothing cancels
    u = np.sort([sum_of_terms / a, c / sum_of_terms])
    x = shift + scale * u
    log_p, log_q = (_log_outside(*u), _log_outside(*x)) if a > 0 else (_log_inside(*u), _log_inside(*x))
    return max(0.0, math.exp(log_p) - math.exp(epsilon + log_q))


def _log_outside(low: float, high: float) -> float:
    """log P[u < low or u > high] of a standard normal u."""
    return float(np.logaddexp(special.log_ndtr(low), special.log_ndtr(-high)))


def _log_inside(low: float, high: float) -> float:
    """log P[low < u < high] of a standard normal u."""
    if low > 0:  # the upper tail would round to 1
        low, high = -high, -low
    top = float(special.log_ndtr(high))
    return top + math.log1p(-math.exp(float(special.log_ndtr(low)) - top))


def _p_excess(epsilon: float, m: int, r: int, v: int, delta: float, limit: float) -> float:
    """By how much the p-value exceeds its limit."""
    return p_value(m, r, v, epsilon, delta) - limit


def _fdp_excess(mu: float, m: int, r: int, v: int, limit: float) -> float:
    """log of (R + H) m / r after the recursion: above 0 where mu-GDP is refuted. Falls with mu.

    A loop over scalars, and a root in ten or so of them, is faster than arrays of candidates for mu.
    """
    right, wrong = limit * v / m, limit * (r - v) / m
    for i in range(v - 1, -1, -1):
        if right >= 1:
            break
        grown = max(wrong, 0.5 * math.erfc((mu - _INVERSE(right)) * math.sqrt(0.5)))
        right, wrong = right + i / (r - i) * (grown - wrong), grown
    return math.log((min(right, 1.0) + wrong) * m / r)


def _check_guesses(m: int, r: int, v: int) -> None:
    """Refuse what cannot be v right guesses of r coins out of m."""
    if not (m >= 1 and 0 <= v <= r <= m):
        raise ValueError(f"expected 0 <= v <= r <= m and m >= 1, got m={m}, r={r} and v={v}")


def _check_confidence(confidence: float) -> None:
    """Refuse a confidence outside (0, 1)."""
    if not 0 < confidence < 1:
        raise ValueError(f"expected 0 < confidence < 1, got confidence={confidence}")
