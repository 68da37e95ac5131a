"""From the counts or scores of an audit to a lower bound of epsilon.

An audit runs a mechanism on two inputs, 0 and 1, many times each, and scores every output; a score above a threshold
says 1. The bounds hold for a threshold that does not depend on the trials they count: fixed before any trial (0 for a
log-likelihood ratio), chosen on other trials (`split_threshold`), or one of a few fixed beforehand
(`corrected_epsilon_lower`). The best of all thresholds on the same trials is no bound, and is not offered.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from scipy import optimize, special

from leakgauge.harness.core.gaussian import check_delta, check_nonnegative, gaussian_epsilon
from leakgauge.harness.core.stats import Numbers, clopper_pearson, mean_interval


class Counts(NamedTuple):
    """What one threshold says of the trials of an audit. Positive: the score lies above the threshold."""

    true_positives: int
    false_positives: int
    positives: int
    """Trials with input 1."""

    negatives: int
    """Trials with input 0."""


class Sampled(NamedTuple):
    """A number estimated from n samples, with the ends of its interval."""

    value: float
    low: float
    high: float
    n: int


def count(zero_scores: Numbers, one_scores: Numbers, threshold: float) -> Counts:
    """The counts of one threshold; a score that equals it is not above it.

    Args:
        zero_scores: [negatives] scores of the trials with input 0; infinite ones are welcome.
        one_scores: [positives] of those with input 1.

    Raises:
        ValueError: a side is empty, or a score or the threshold is not a number.
    """
    zeros, ones = _scores(zero_scores), _scores(one_scores)
    if math.isnan(threshold):
        raise ValueError(f"expected a threshold, got {threshold}")
    return Counts(int(np.sum(ones > threshold)), int(np.sum(zeros > threshold)), len(ones), len(zeros))


def epsilon_lower(counts: Counts, delta: float, confidence: float = 0.95) -> float:
    """A lower bound of the epsilon of any mechanism at `delta`.

    max(0, log((1 - FNR - delta) / FPR), log((1 - FPR - delta) / FNR)), with upper ends of Clopper-Pearson intervals of
    level `confidence` for both rates. The two directions rest on the same two events, so neither needs a correction.

    Guarantees:
        Above the true epsilon with probability at most 1 - confidence, for any mechanism, if the trials are independent
        and the threshold does not depend on them.
        0 where a direction would be negative or has no positive share left.

    Raises:
        ValueError: impossible counts, delta outside [0, 1), confidence outside (0, 1).

    Source: Nasr et al. 2021 (arXiv 2101.04535); both directions: Kairouz, Oh, Viswanath 2015.
    """
    fpr, fnr = _upper_rates(counts, confidence)
    check_delta(delta)
    return max(0.0, float(_directions(np.array(fpr), np.array(fnr), delta)))


def mu_lower(counts: Counts, confidence: float = 0.95) -> float:
    """Phi^-1(1 - FPR) - Phi^-1(FNR) at the upper ends of Clopper-Pearson intervals, 0 where that is negative.

    A lower bound of mu only where the mechanism is known to be Gaussian (its trade-off curve is that of N(0, 1) against
    N(mu, 1)); for any other mechanism an estimate.

    Guarantees:
        For a mechanism whose trade-off curve is Gaussian, above its mu with probability at most 1 - confidence.

    Raises:
        ValueError: impossible counts, confidence outside (0, 1).

    Source: Dong, Roth, Su 2022, Def. 2.6; Nasr et al. 2023 (arXiv 2302.07956).
    """
    fpr, fnr = _upper_rates(counts, confidence)
    return max(0.0, -float(special.ndtri(fpr)) - float(special.ndtri(fnr)))


def gaussian_epsilon_lower(counts: Counts, delta: float, confidence: float = 0.95) -> float:
    """The epsilon of the Gaussian mechanism of `mu_lower`; infinite where delta is 0 and mu is not.

    A lower bound of epsilon only where the mechanism is known to be Gaussian; for any other an estimate, and often far
    above the truth.

    Raises:
        ValueError: impossible counts, delta outside [0, 1), confidence outside (0, 1).
    """
    return gaussian_epsilon(mu_lower(counts, confidence), delta)


def split_threshold(zeros: Numbers, ones: Numbers, delta: float, confidence: float = 0.95) -> float:
    """The threshold whose `epsilon_lower` on these trials is largest; to be used on OTHER trials.

    It lies half-way between two neighboring scores, further apart than a millionth of their range: what is closer
    counts as equal but for rounding. Where every bound is 0, the one that is the least below 0 wins.

    Args:
        zeros: [n] scores of trials with input 0 that no bound will count.
        ones: [m] of those with input 1.

    Raises:
        ValueError: a side is empty, a score is not a number, delta outside [0, 1), confidence outside (0, 1).
    """
    low, high = np.sort(_scores(zeros)), np.sort(_scores(ones))
    check_delta(delta)
    _check_confidence(confidence)
    thresholds = _between(np.unique(np.concatenate([low, high])))
    false_positives = len(low) - np.searchsorted(low, thresholds, side="right")
    misses = np.searchsorted(high, thresholds, side="right")
    fpr = _clopper_pearson_high(false_positives, len(low), confidence)
    fnr = _clopper_pearson_high(misses, len(high), confidence)
    return float(thresholds[np.argmax(_directions(fpr, fnr, delta))])


def best_of(zeros: Numbers, ones: Numbers, delta: float, confidence: float = 0.95, share: float = 0.25) -> float:
    """`epsilon_lower` on the last trials of each side, at the threshold that was best on the first `share` of them.

    The order must be that of independent trials: neither sorted, nor with what belongs together at one end.

    Guarantees:
        As `epsilon_lower`.

    Raises:
        ValueError: fewer than two trials on a side, share outside (0, 1), or as `split_threshold`.
    """
    if not 0 < share < 1:
        raise ValueError(f"expected 0 < share < 1, got share={share}")
    if min(len(zeros), len(ones)) < 2:
        raise ValueError(f"expected two trials a side or more, got {len(zeros)} zeros and {len(ones)} ones")
    a, b = (max(1, int(share * len(side))) for side in (zeros, ones))
    threshold = split_threshold(zeros[:a], ones[:b], delta, confidence)
    return epsilon_lower(count(zeros[a:], ones[b:], threshold), delta, confidence)


def corrected_epsilon_lower(
    zeros: Numbers, ones: Numbers, thresholds: Sequence[float], delta: float, confidence: float = 0.95
) -> float:
    """The largest `epsilon_lower` of k thresholds fixed before the trials, each at 1 - (1 - confidence) / k.

    Guarantees:
        As `epsilon_lower`, by the union bound.

    Raises:
        ValueError: no threshold, or as `count` and `epsilon_lower`.
    """
    if len(thresholds) == 0:
        raise ValueError("expected at least one threshold, got none")
    _check_confidence(confidence)
    each = 1 - (1 - confidence) / len(thresholds)
    return max(epsilon_lower(count(zeros, ones, threshold), delta, each) for threshold in thresholds)


def sampled_delta(loss: Numbers, epsilon: float, log_weights: Numbers | None = None, level: float = 0.95) -> Sampled:
    """delta(epsilon) = E_P[(1 - e^(epsilon - L))_+] from samples of the privacy loss L = log p / p'.

    One direction: the larger of it and that with p and p' exchanged is the delta of the pair.

    | samples | interval |
    |---|---|
    | from P | Chernoff's, exact: {d : KL(mean, d) <= log(2 / (1 - level)) / n}; the terms lie in [0, 1] |
    | weighted | Student's, the normal approximation: too narrow where few samples carry most of the weight |
    | weighted, all terms equal (none above epsilon, or only one sample) | [0, 1]: they show no spread |

    Args:
        loss: [n] privacy losses of samples from P, or from a proposal Q; infinite ones are welcome.
        log_weights: [n] log p - log q of these samples, both densities normalized. None: Q is P.

    Raises:
        ValueError: no samples, a loss that is not a number, a weight that is not a number or infinite, another number
            of weights than of losses, epsilon negative, level outside (0, 1).

    Source: Balle, Wang 2018 (arXiv 1805.06530), Thm 5; interval: Hoeffding 1963, Thm 1, eq. (2.1).
    """
    losses = _scores(loss)
    check_nonnegative(epsilon=epsilon)
    _check_confidence(level)
    n = len(losses)
    terms = -np.expm1(np.minimum(epsilon - losses, 0.0))
    if log_weights is None:
        value = float(np.mean(terms))
        return Sampled(value, *_chernoff(value, n, level), n)
    weights = np.exp(_scores(log_weights))
    if weights.shape != terms.shape or np.isinf(weights).any():
        raise ValueError(f"expected {n} finite log weights, got {len(weights)}, largest {np.max(log_weights)}")
    terms = terms * weights
    low, high = mean_interval(terms, level)
    if low is None or high is None or low == high:
        return Sampled(float(np.mean(terms)), 0.0, 1.0, n)
    return Sampled(float(np.mean(terms)), max(0.0, low), min(1.0, high), n)


def _upper_rates(counts: Counts, confidence: float) -> tuple[float, float]:
    """Upper ends of the false-positive and the false-negative rate, each exceeded with (1 - confidence) / 2."""
    _check_confidence(confidence)
    tp, fp, positives, negatives = counts
    if not (positives >= 1 and negatives >= 1 and 0 <= tp <= positives and 0 <= fp <= negatives):
        raise ValueError(f"expected trials on both sides and no more positives than trials, got {counts}")
    fpr = clopper_pearson(fp, negatives, confidence).high
    fnr = clopper_pearson(positives - tp, positives, confidence).high
    assert fpr is not None
    assert fnr is not None
    return fpr, fnr


def _directions(fpr: Numbers, fnr: Numbers, delta: float) -> Numbers:
    """The larger of the two directions, not clamped; -inf where neither has a positive share left."""
    with np.errstate(divide="ignore"):
        forward = np.log(np.maximum(1 - fnr - delta, 0.0)) - np.log(fpr)
        backward = np.log(np.maximum(1 - fpr - delta, 0.0)) - np.log(fnr)
    return np.asarray(np.maximum(forward, backward), dtype=np.float64)


def _between(scores: Numbers) -> Numbers:
    """The middles of the gaps between increasing scores, but for gaps that are rounding."""
    if len(scores) == 1:
        return scores
    gaps = np.diff(scores)
    finite = scores[np.isfinite(scores)]
    # Laplace's log-likelihood ratio has atoms, which rounding smears out differently for each input (Mironov 2012)
    rounding = 1e-6 * float(np.ptp(finite)) if len(finite) else 0.0
    wide = gaps >= min(rounding, float(np.max(gaps)))
    low, high = scores[:-1][wide], scores[1:][wide]
    with np.errstate(invalid="ignore"):
        middles = low + (high - low) / 2
    return np.where(np.isinf(high), low, np.where(np.isinf(low), np.nextafter(high, -np.inf), middles))


def _clopper_pearson_high(successes: npt.NDArray[np.int64], n: int, confidence: float) -> Numbers:
    """[k] upper ends of `clopper_pearson`, at once."""
    k = np.minimum(successes, n - 1)
    high = special.betaincinv(k + 1, n - k, (1 + confidence) / 2)
    return np.asarray(np.where(successes < n, high, 1.0), dtype=np.float64)


def _chernoff(mean: float, n: int, level: float) -> tuple[float, float]:
    """The interval {d : KL(mean, d) <= log(2 / (1 - level)) / n} of the mean of a law on [0, 1]."""
    width = math.log(2 / (1 - level)) / n
    # as t log t >= t - 1, KL exceeds the width at these two
    floor = mean * math.exp(-1 - width / mean) if mean > 0 else 0.0
    ceiling = 1 - (1 - mean) * math.exp(-1 - width / (1 - mean)) if mean < 1 else 1.0
    low = optimize.brentq(_excess, floor, mean, (mean, width), xtol=1e-300) if floor > 0 else 0.0
    high = optimize.brentq(_excess, mean, ceiling, (mean, width), xtol=1e-300) if ceiling < 1 else 1.0
    return float(low), float(high)


def _excess(d: float, mean: float, width: float) -> float:
    """By how much KL(mean, d) exceeds the width."""
    return float(special.kl_div(mean, d) + special.kl_div(1 - mean, 1 - d)) - width


def _scores(values: Numbers) -> Numbers:
    """The scores as an array; a ValueError where there are none or one is not a number."""
    x = np.asarray(values, dtype=np.float64)
    bad = int(np.sum(np.isnan(x)))
    if x.ndim != 1 or len(x) == 0 or bad:
        raise ValueError(f"expected scores [n], n >= 1, got shape {x.shape} with {bad} not a number")
    return x


def _check_confidence(confidence: float) -> None:
    """Refuse a confidence outside (0, 1)."""
    if not 0 < confidence < 1:
        raise ValueError(f"expected 0 < confidence < 1, got confidence={confidence}")
