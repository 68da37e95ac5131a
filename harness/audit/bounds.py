"""Lower bounds of epsilon from the counts or scores of an audit.

An audit runs a mechanism many times on each of two inputs, 0 and 1, and scores every output. A score above a threshold
is a guess of input 1. The bounds hold for a threshold that does not depend on the counted trials: fixed before any
trial (0 for a log-likelihood ratio) or chosen on other trials (`pilot_threshold`). `best_epsilon_lower` holds for all
thresholds at once, so it may take the best one on the counted trials. Which of the two shows more is decided on other
trials too (`likely_rates`): one threshold is better if the scores have few values or hardly overlap, all thresholds if
the best one is far out, where few trials of a pilot end.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import numpy as np
from scipy import optimize, signal, special, stats

from leakgauge.harness.core import accounting, rng
from leakgauge.harness.core.distribution import Integers
from leakgauge.harness.core.gaussian import check_delta, gaussian_epsilon, gaussian_mu
from leakgauge.harness.core.rng import Key
from leakgauge.harness.core.stats import STRICT, Numbers, clopper_pearson

_OF_COUNTS = 0.1  # share of the error given to counts; Gaussian scores, which mostly show more, get the rest
_MANY = 20  # the least number of scores whose mean is taken as normal
_TAIL = 38.0  # a normal number lies beyond with probability below 1e-300

_DENSE, _RATIO = 64, 0.02  # a band has an end for each of the first ranks, then for ranks in this ratio

Rates = tuple[float, float]
"""A rate of false positives and a rate of misses, for which bounds at all thresholds are sharpest."""

_USUAL, _MORE, _CHOSEN = 0.15, 2.0, 20.0
"""The rate that matters most for moderate epsilons, and by how much more level it, or a chosen rate, gets."""

_LOGITS, _MOST_LOGIT = 0.5, 9.0
"""Chosen rates are rounded to logits in these steps, up to the farthest, so that bands can be used again."""

_REPEATS, _LUCK = 8, 0.985
"""Repeated pilots that compare one threshold with all, and the share of its bound that one threshold keeps: a pilot's
best threshold is lucky."""

_SURE = 1e-4  # the probability below which a test has too few errors for what is stated of every test

_TARGET, _MOST_TRIALS = 0.9, 1e12
"""Share of an epsilon that must be shown for trials to be enough, and the largest number of trials that is reported."""

_MOST, _STEPS = 10_000, 10
"""The largest n whose local level is computed, by so many bisections; for others, errors of all ranks add up."""

_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(8)
_GRID = np.linspace(-12.0, 12.0, 25)  # in spreads: a normal number lies beyond with probability 4e-33


class Counts(NamedTuple):
    """Outcomes of an audit's trials at one threshold. A trial is positive if its score is above the threshold.

    positives, negatives: the numbers of trials with input 1, and with input 0.
    """

    true_positives: int
    false_positives: int
    positives: int
    negatives: int


class Bound(NamedTuple):
    """A lower bound of epsilon; the fields are those of `engine.AuditResult`."""

    epsilon_lower: float
    method: str
    any_mechanism: float
    strict: float
    ceiling: float


def count(zero_scores: Numbers, one_scores: Numbers, threshold: float) -> Counts:
    """The counts at one threshold. A score equal to the threshold is not above it.

    Args:
        zero_scores: [negatives] scores of the trials with input 0; they may be infinite.
        one_scores: [positives] scores of the trials with input 1.

    Raises:
        ValueError: a side is empty, or a score or the threshold is not a number.
    """
    zeros, ones = checked_scores(zero_scores), checked_scores(one_scores)
    if math.isnan(threshold):
        raise ValueError(f"expected a threshold, got {threshold}")
    return Counts(int(np.sum(ones > threshold)), int(np.sum(zeros > threshold)), len(ones), len(zeros))


def epsilon_lower(counts: Counts, delta: float, confidence: float = 0.95) -> float:
    """A lower bound of the epsilon of any mechanism at `delta`.

    max(0, log((1 - FNR - delta) / FPR), log((1 - FPR - delta) / FNR)), with upper ends of Clopper-Pearson intervals of
    level `confidence` for both rates. Both directions use the same two intervals, so taking the larger one needs no
    correction.

    Guarantees:
        Above the true epsilon with probability at most 1 - confidence, for any mechanism, if the trials are independent
        and the threshold does not depend on them.
        0 where both logarithms are negative or undefined.

    Raises:
        ValueError: impossible counts, delta outside [0, 1), confidence outside (0, 1).

    Source: Nasr et al. 2021 (arXiv 2101.04535); both directions: Kairouz, Oh, Viswanath 2015.
    """
    fpr, fnr = _upper_rates(counts, confidence)
    check_delta(delta)
    return max(0.0, float(_directions(np.array(fpr), np.array(fnr), delta)))


def best_epsilon_lower(
    zero_scores: Numbers, one_scores: Numbers, delta: float, confidence: float = 0.95, rates: Rates | None = None
) -> float:
    """A lower bound of the epsilon of any mechanism at `delta`, by the best threshold on these trials.

    The bound of `epsilon_lower` with upper ends of both rates that hold at all thresholds at once: quantiles of Beta
    distributions at local levels, which are as large as the confidence of the whole band allows. Scores of 0 and 1 are
    decisions, which have one threshold. No threshold lies between scores whose difference may be rounding.

    Args:
        zero_scores: [n] scores of independent trials with input 0; they may be infinite.
        one_scores: [m] scores of such trials with input 1.
        rates: where the ends are sharpest, independent of these trials; None: at those of moderate epsilons.

    Guarantees:
        Above the true epsilon with probability at most 1 - confidence, for any mechanism.

    Raises:
        ValueError: as `count`; delta outside [0, 1), confidence outside (0, 1).

    Source: bands of equal local levels, Berk and Jones 1979; computed as in Moscovich and Nadler 2017.
    """
    return _best(zero_scores, one_scores, delta, confidence, rates)[0]


def best_ceiling(negatives: int, positives: int, delta: float, confidence: float, rates: Rates | None = None) -> float:
    """The bound of `best_epsilon_lower` if all scores with input 1 are above all others."""
    fpr, fnr = _bands(negatives, positives, confidence, rates)
    return max(0.0, float(_directions(fpr[0], fnr[0], delta)))


def _best(zeros: Numbers, ones: Numbers, delta: float, confidence: float, rates: Rates | None) -> tuple[float, float]:
    """The bound of `best_epsilon_lower`, and its threshold."""
    thresholds, false_positives, misses = _errors(zeros, ones)
    check_delta(delta)
    check_confidence(confidence)
    if np.isin(np.concatenate([zeros, ones]), (0.0, 1.0)).all():
        return epsilon_lower(count(zeros, ones, 0.5), delta, confidence), 0.5
    fpr, fnr = _bands(len(zeros), len(ones), confidence, rates)
    bounds = _directions(fpr[false_positives], fnr[misses], delta)
    return max(0.0, float(bounds.max())), float(thresholds[bounds.argmax()])


def _bands(negatives: int, positives: int, confidence: float, rates: Rates | None) -> tuple[Numbers, Numbers]:
    """The ends of both rates for each count of errors, all valid together."""
    errors, more = (1 - confidence) / 2, _MORE if rates is None else _CHOSEN
    fpr, fnr = (_USUAL, _USUAL) if rates is None else rates
    return _band(negatives, errors, fpr, more), _band(positives, errors, fnr, more)


@functools.cache
def _band(n: int, errors: float, likely: float = _USUAL, more: float = _MORE) -> Numbers:
    """[n + 1] for each count of n trials, an upper end of the rate; any is too low with probability at most `errors`.

    The ends have one local level, but for a factor that rises to 1 + `more` at the rates of most use, around `likely`.
    """
    ranks = np.arange(1, n + 1)
    if n > _DENSE:  # between these ranks, the end of the next one holds
        steps = math.ceil(math.log(n / _DENSE) / _RATIO)
        ranks = np.unique(np.append(ranks[:_DENSE], np.geomspace(_DENSE, n, steps).round()).astype(np.int64))
    rates = special.logit(ranks / (n + 1)) - special.logit(likely)
    weights = 1 + more * np.exp(-np.square(rates))

    def ends(level: float) -> Numbers:
        each = special.betainccinv(ranks, n - ranks + 1, np.minimum(level * weights, 0.5))
        return np.asarray(np.minimum.accumulate(each[::-1])[::-1], np.float64)

    low, high = math.log(errors / float(weights.sum())), math.log(errors)
    for _ in range(_STEPS if n <= _MOST else 0):
        middle = (low + high) / 2
        low, high = (middle, high) if _crossing(n, ranks, ends(math.exp(middle))) <= errors else (low, middle)
    reached = np.searchsorted(ranks, np.arange(1, n + 1))
    return np.append(ends(math.exp(low))[reached], 1.0)


def _crossing(n: int, ranks: Integers, ends: Numbers) -> float:
    """The probability that, for some rank j, the j-th smallest of n uniform numbers is above its end.

    Counts up to the ends are those of a Poisson process of rate n with n points in all.
    """
    weights, before = np.zeros(n + 1), 0.0
    weights[0] = 1.0
    for rank, end in zip(ranks.tolist(), ends.tolist(), strict=True):
        arriving = stats.poisson.pmf(np.arange(n + 1), n * (end - before))
        weights = np.maximum(signal.fftconvolve(weights, arriving)[: n + 1], 0.0)
        weights[:rank] = 0.0
        before = end
    rest = stats.poisson.pmf(n - np.arange(n + 1), n * (1 - before))
    return 1 - float(weights @ rest) / float(stats.poisson.pmf(n, n))


def mu_lower(counts: Counts, confidence: float = 0.95) -> float:
    """Phi^-1(1 - FPR) - Phi^-1(FNR) at the upper ends of Clopper-Pearson intervals; 0 if that is negative.

    A lower bound of mu only for a Gaussian mechanism, whose trade-off curve is that of N(0, 1) against N(mu, 1). For
    any other mechanism it is an estimate.

    Guarantees:
        For a mechanism with a Gaussian trade-off curve, above its mu with probability at most 1 - confidence.

    Raises:
        ValueError: impossible counts, confidence outside (0, 1).

    Source: Dong, Roth, Su 2022, Def. 2.6; Nasr et al. 2023 (arXiv 2302.07956).
    """
    fpr, fnr = _upper_rates(counts, confidence)
    return max(0.0, -float(special.ndtri(fpr)) - float(special.ndtri(fnr)))


def scores_epsilon_lower(zeros: Numbers, ones: Numbers, delta: float, confidence: float = 0.95) -> float:
    """The epsilon of the Gaussian mechanism whose mu is the lower confidence limit for the distance of Gaussian scores.

    mu is the difference of the means over the standard deviation, which both inputs share. The studentized difference
    has a noncentral t distribution, which gives an exact limit for mu. Counts at one threshold need more trials: 1.6
    times as many for a small mu, and arbitrarily many for a large one.

    Args:
        zeros: [n] scores of trials with input 0.
        ones: [m] scores of trials with input 1.

    Guarantees:
        For Gaussian scores of equal variance, above the true epsilon with probability at most 1 - confidence.
        0 for fewer than two trials on a side, an infinite score, or no spread.

    Raises:
        ValueError: as `count`; delta outside [0, 1), confidence outside (0, 1).

    Source: Johnson, Welch 1940 (confidence limits by the noncentral t).
    """
    low, high = checked_scores(zeros), checked_scores(ones)
    check_delta(delta)
    check_confidence(confidence)
    n, m = len(low), len(high)
    if min(n, m) < 2 or not (np.isfinite(low).all() and np.isfinite(high).all()):
        return 0.0
    spread = math.sqrt((n * float(np.var(low)) + m * float(np.var(high))) / (n + m - 2))
    gap = float(np.mean(high)) - float(np.mean(low))
    if not 0 < spread < math.inf or gap <= 0:
        return 0.0
    return gaussian_epsilon(distance_lower(gap / spread, n, m, confidence), delta)


class SampledSteps(NamedTuple):
    """Gaussian steps that each take a record with probability `share`; scores are known to be sums of such steps.

    apart: whether the adversary sees each step, not only the sum.
    """

    share: float
    steps: int
    apart: bool


def sampled_epsilon_lower(
    zeros: Numbers, ones: Numbers, sampled: SampledSteps, delta: float, confidence: float = 0.95
) -> float:
    """The epsilon of Gaussian steps on sampled records, from scores that are sums of these steps.

    With input 0, scores are N(0, 1) in some unit; with input 1, N(K m / sqrt(steps), 1) for a binomial number K of
    steps. The difference of the means, in spreads of input 0, has the mean share sqrt(steps) m; its lower confidence
    limit gives m. The epsilon is that of the composition of the steps if the adversary sees them apart, otherwise that
    of the sum, which is smaller.

    Args:
        zeros: [n] scores of trials with input 0.
        ones: [m] scores of trials with input 1.

    Guarantees:
        For such scores, above the true epsilon with probability about 1 - confidence at most: the means
        and the spread of many trials are taken as normal.
        0 for fewer than `_MANY` trials on a side, an infinite score, no spread, or delta 0.

    Raises:
        ValueError: as `count`; delta outside [0, 1), confidence outside (0, 1).
    """
    low, high = checked_scores(zeros), checked_scores(ones)
    check_delta(delta)
    check_confidence(confidence)
    share, steps, apart = sampled
    n, m, chance = len(low), len(high), share * math.sqrt(steps)
    if min(n, m) < _MANY or delta == 0 or not (np.isfinite(low).all() and np.isfinite(high).all()):
        return 0.0
    spread, far = float(np.std(low, ddof=1)), float(special.ndtri(confidence))
    distance = (float(np.mean(high)) - float(np.mean(low))) / spread if spread > 0 else 0.0

    def excess(mu: float) -> float:
        variance = 1 / n + (1 + share * (1 - share) * mu**2) / m + (chance * mu) ** 2 / (2 * (n - 1))
        return chance * mu + far * math.sqrt(variance) - distance

    if excess(0.0) >= 0:
        return 0.0
    mu = optimize.brentq(excess, 0.0, distance / chance)
    if apart:
        return accounting.epsilon(accounting.gaussian_steps(1 / mu, share, steps), delta)
    shifts = np.arange(steps + 1) * mu / math.sqrt(steps)
    logs = stats.binom.logpmf(np.arange(steps + 1), steps, share)
    return max(_sum_epsilon(shifts, logs, delta, sign) for sign in (1, -1))


def _sum_epsilon(shifts: Numbers, logs: Numbers, delta: float, sign: int) -> float:
    """The epsilon of normal numbers with these shifts and their log chances against N(0, 1), or (sign -1) reversed."""

    def loss(at: float) -> float:
        return sign * float(special.logsumexp(logs + shifts * at - shifts**2 / 2))

    def left(at: float) -> float:
        tails = special.ndtr(-sign * at), float(np.exp(logs) @ special.ndtr(sign * (shifts - at)))
        first, second = tails[::-1] if sign > 0 else tails
        return first - math.exp(min(loss(at), 700.0)) * second - delta

    least = optimize.brentq(loss, -_TAIL, _TAIL + shifts[-1])
    most = sign * _TAIL + (shifts[-1] if sign > 0 else 0.0)
    if left(least) <= 0 or left(most) > 0:
        return 0.0
    return max(0.0, loss(optimize.brentq(left, least, most)))


def bound_from_counts(counts: Counts, delta: float, confidence: float, *, gaussian: bool) -> Bound:
    """The bound from counts at one threshold; both methods use the same intervals, so the larger bound is valid."""
    method, strict = "Gaussian trade-off" if gaussian else "Clopper-Pearson", max(confidence, STRICT)

    def bound(seen: Counts, level: float) -> float:
        general = epsilon_lower(seen, delta, level)
        return max(general, gaussian_epsilon(mu_lower(seen, level), delta)) if gaussian else general

    perfect = Counts(counts.positives, 0, counts.positives, counts.negatives)
    general = epsilon_lower(counts, delta, confidence)
    return Bound(bound(counts, confidence), method, general, bound(counts, strict), bound(perfect, strict))


def bound_from_trials(
    zeros: Numbers,
    ones: Numbers,
    threshold: float,
    rates: Rates | None,
    delta: float,
    confidence: float,
    *,
    gaussian: bool,
    linear: bool,
    sampled: SampledSteps | None = None,
) -> tuple[Bound, Counts]:
    """The bound from scores [n], [m] of counted trials, and the counts at its threshold.

    The bound from scores of a known distribution is the larger one of that and of their counts; they share the error.

    Args:
        threshold: chosen on other trials; it counts alone if `rates` (`likely_rates` of other trials) is None.
        gaussian: whether the mechanism is known to be Gaussian; linear: whether its scores are Gaussian too.
        sampled: the steps, if scores are known to be sums of Gaussian steps on sampled records.
    """
    counts, strict = count(zeros, ones, threshold), max(confidence, STRICT)
    if sampled is None and rates is not None and not gaussian:
        value, best = _best(zeros, ones, delta, confidence, rates)
        surest, sizes = _best(zeros, ones, delta, strict, rates)[0], (len(zeros), len(ones))
        ceiling = best_ceiling(*sizes, delta, strict, rates)
        return Bound(value, "all thresholds", value, surest, ceiling), count(zeros, ones, best)
    if sampled is None and not (gaussian and linear):
        return bound_from_counts(counts, delta, confidence, gaussian=gaussian), counts

    def bounds(level: float) -> tuple[float, float]:
        counted, own = epsilon_lower(counts, delta, 1 - _OF_COUNTS * (1 - level)), scores_confidence(level)
        if sampled is None:
            return max(counted, scores_epsilon_lower(zeros, ones, delta, own)), counted
        return max(counted, sampled_epsilon_lower(zeros, ones, sampled, delta, own)), counted

    method = "Gaussian scores" if sampled is None else "sampled Gaussian scores"
    value, general = bounds(confidence)
    return Bound(value, method, general, bounds(strict)[0], math.inf), counts


def trials_needed(epsilon: float, delta: float, confidence: float, *, gaussian: bool) -> int | None:
    """Trials with each input whose expected bound reaches 0.9 of epsilon; None: above 10^12, or no such epsilon.

    The number is for a Gaussian mechanism of this epsilon, whose scores are known to be Gaussian, else for randomized
    response, which makes the fewest errors. Another mechanism needs more trials.
    """
    if not 0 < epsilon < math.inf:
        return None
    mu, trials = gaussian_mu(epsilon, delta) if gaussian else 0.0, 1000
    wrong = float(special.expit(-epsilon)) * (1 - delta)
    while trials <= _MOST_TRIALS:
        if gaussian:
            bound = gaussian_epsilon(distance_lower(mu, trials, trials, scores_confidence(confidence)), delta)
        else:
            errors = round(wrong * trials)
            bound = epsilon_lower(Counts(trials - errors, errors, trials, trials), delta, confidence)
        if bound >= _TARGET * epsilon:
            return trials
        trials *= 2
    return None


def too_few_errors(counts: Counts, least: float) -> bool:
    """Whether so few errors are unlikely where every test errs in `least` of trials, the mean of both of its rates.

    Valid for the best threshold on these trials. Of all pairs of rates with this mean, equal ones make few errors most
    likely.

    Source: Hoeffding 1956, "On the distribution of the number of successes in independent trials", Thm 4.
    """
    wrong, of = counts.positives - counts.true_positives + counts.false_positives, counts.positives + counts.negatives
    return float(special.bdtr(wrong, of, least)) * of < _SURE


def scores_confidence(confidence: float) -> float:
    """The confidence of the Gaussian part of `bound_from_trials` at this confidence."""
    return 1 - (1 - _OF_COUNTS) * (1 - confidence)


def distance_lower(distance: float, n: int, m: int, confidence: float) -> float:
    """The lower confidence limit for the distance of two Gaussian means, in standard deviations.

    `distance` is the distance observed between n and m numbers; 0 if it is infinite, or the limit negative.

    Guarantees:
        Never above the exact limit: 1 - confidence is taken as smaller, by more than what rounding adds to it.
    """
    scale, freedom = math.sqrt(n * m / (n + m)), n + m - 2
    t, errors = distance * scale, (1 - confidence) * (1 - 1e-9) - 1e-12
    if not 0 < t < math.inf or _noncentral(0.0, t, freedom) >= errors:
        return 0.0
    # around `high`, a t below `t` needs S above its quantile or Z below its own: at most twice confidence / 2
    high = t * math.sqrt(special.chdtri(freedom, confidence / 2) / freedom) - special.ndtri(confidence / 2)
    found = optimize.brentq(lambda c: _noncentral(c, t, freedom) - errors, 0.0, high, xtol=1e-300, maxiter=1000)
    return float(found) / scale


def _noncentral(center: float, t: float, freedom: int) -> float:
    """P(Z + center > t S) for a standard normal Z and the spread S of `freedom` degrees: the tail of a noncentral t.

    An integral over Z, in pieces that end on the scales of Z and of t S: scipy's inverse may hang, or end too high.
    """
    spreads = np.maximum(1 + _GRID / math.sqrt(2 * freedom), 0.0)
    ends = np.unique(np.clip(np.concatenate([_GRID, t * spreads - center]), _GRID[0], _GRID[-1]))
    half = np.diff(ends)[:, None] / 2
    z = ends[:-1, None] + half * (1 + _NODES)
    with np.errstate(over="ignore"):
        below = special.gammainc(freedom / 2, (np.maximum(z + center, 0.0) / t) ** 2 * freedom / 2)
    return float((half * _WEIGHTS * np.exp(-z * z / 2) * below).sum()) / math.sqrt(2 * math.pi)


def split_threshold(zeros: Numbers, ones: Numbers, delta: float, confidence: float = 0.95) -> float:
    """The threshold with the largest `epsilon_lower` on these trials, for use on OTHER trials.

    The threshold lies half-way between two neighboring scores whose gap is at least a millionth of the range of all
    scores; a smaller gap may be rounding. If every bound is 0, the largest unclamped bound wins.

    Args:
        zeros: [n] scores of trials with input 0; no bound may count these trials.
        ones: [m] scores of such trials with input 1.

    Raises:
        ValueError: a side is empty, a score is not a number, delta outside [0, 1), confidence outside (0, 1).
    """
    thresholds, false_positives, misses = _errors(zeros, ones)
    check_delta(delta)
    check_confidence(confidence)
    fpr = clopper_pearson_high(false_positives, len(zeros), confidence)
    fnr = clopper_pearson_high(misses, len(ones), confidence)
    return float(thresholds[np.argmax(_directions(fpr, fnr, delta))])


def pilot_threshold(zeros: Numbers, ones: Numbers, delta: float, confidence: float, *, gaussian: bool) -> float:
    """`split_threshold`, or half-way between the means of scores that are known to be Gaussian."""
    if gaussian:
        return (float(np.mean(_finite(zeros))) + float(np.mean(_finite(ones)))) / 2
    return split_threshold(zeros, ones, delta, confidence)


def likely_rates(
    zeros: Numbers, ones: Numbers, threshold: float, trials: int, delta: float, confidence: float, key: Key
) -> Rates | None:
    """The rates for a bound at all thresholds, if it should show more than the threshold; None if it should not.

    Repeated pilots and counted trials are drawn from the pilot's scores. Each pilot chooses its own threshold, and both
    bounds are computed from its counted trials.

    Args:
        zeros, ones: [n], [m] scores of the pilot; no bound may count these trials.
        threshold: chosen on these scores.
        trials: to be counted with each input.
    """
    counts = count(zeros, ones, threshold)
    errors = (counts.false_positives, counts.negatives), (counts.positives - counts.true_positives, counts.positives)
    logits = [special.logit((wrong + 0.5) / (of + 1)) for wrong, of in errors]
    steps = [round(float(np.clip(logit, -_MOST_LOGIT, _MOST_LOGIT)) / _LOGITS) for logit in logits]
    rates = float(special.expit(steps[0] * _LOGITS)), float(special.expit(steps[1] * _LOGITS))
    fixed, free, sides = 0.0, 0.0, list(enumerate((zeros, ones)))
    for number in range(_REPEATS):
        own = key.child(number)
        low, high = (side[rng.integers(own.child("pilot", bit), len(side), len(side))] for bit, side in sides)
        at = split_threshold(low, high, delta, confidence)
        low, high = (side[rng.integers(own.child("counted", bit), trials, len(side))] for bit, side in sides)
        fixed += epsilon_lower(count(low, high, at), delta, confidence)
        free += best_epsilon_lower(low, high, delta, confidence, rates)
    return rates if free > _LUCK * fixed else None


def separation(low: Numbers, high: Numbers) -> float:
    """The distance of the means of two sides, in standard deviations; infinite if neither side has a spread."""
    a, b = _finite(low), _finite(high)
    spread = math.sqrt((float(np.var(a)) + float(np.var(b))) / 2)
    gap = float(np.mean(b)) - float(np.mean(a))
    return gap / spread if spread > 0 else math.copysign(math.inf, gap) if gap else 0.0


def _finite(scores: Numbers) -> Numbers:
    """Infinite scores as large finite ones."""
    return np.nan_to_num(scores, posinf=1e300**0.5, neginf=-(1e300**0.5))


def check_confidence(confidence: float) -> None:
    """Refuse a confidence outside (0, 1)."""
    if not 0 < confidence < 1:
        raise ValueError(f"expected 0 < confidence < 1, got confidence={confidence}")


def _upper_rates(counts: Counts, confidence: float) -> tuple[float, float]:
    """Upper ends of the false-positive and false-negative rates, each too low with probability (1 - confidence) / 2."""
    check_confidence(confidence)
    tp, fp, positives, negatives = counts
    if not (positives >= 1 and negatives >= 1 and 0 <= tp <= positives and 0 <= fp <= negatives):
        raise ValueError(f"expected trials on both sides and no more positives than trials, got {counts}")
    ends = clopper_pearson(fp, negatives, confidence), clopper_pearson(positives - tp, positives, confidence)
    fpr, fnr = (1.0 if interval.high is None else interval.high for interval in ends)
    return fpr, fnr


def _errors(zeros: Numbers, ones: Numbers) -> tuple[Numbers, Integers, Integers]:
    """The thresholds between these scores, and false positives and misses at each."""
    low, high = np.sort(checked_scores(zeros)), np.sort(checked_scores(ones))
    thresholds = _between(np.unique(np.concatenate([low, high])))
    above = len(low) - np.searchsorted(low, thresholds, side="right")
    return thresholds, above, np.searchsorted(high, thresholds, side="right")


def _directions(fpr: Numbers, fnr: Numbers, delta: float) -> Numbers:
    """The larger of the two directions, not clamped at 0; -inf if no positive numerator is left in either."""
    with np.errstate(divide="ignore"):
        forward = np.log(np.maximum(1 - fnr - delta, 0.0)) - np.log(fpr)
        backward = np.log(np.maximum(1 - fpr - delta, 0.0)) - np.log(fnr)
    return np.asarray(np.maximum(forward, backward), dtype=np.float64)


def _between(scores: Numbers) -> Numbers:
    """The midpoints of the gaps between increasing scores, except gaps that may be rounding."""
    if len(scores) == 1:
        return scores
    gaps = np.diff(scores)
    numbers = scores[np.isfinite(scores)]
    # Laplace's log-likelihood ratio has atoms, and rounding spreads them differently for each input (Mironov 2012)
    rounding = 1e-6 * float(np.ptp(np.quantile(numbers, (0.01, 0.99)))) if len(numbers) else 0.0
    wide = gaps >= min(rounding, float(np.max(gaps)))
    low, high = scores[:-1][wide], scores[1:][wide]
    with np.errstate(invalid="ignore"):
        middles = low + (high - low) / 2
    return np.where(np.isinf(high), low, np.where(np.isinf(low), np.nextafter(high, -np.inf), middles))


def clopper_pearson_high(successes: Integers, n: int, confidence: float) -> Numbers:
    """[k] upper ends of `clopper_pearson` for an array of successes."""
    k = np.minimum(successes, n - 1)
    high = special.betaincinv(k + 1, n - k, (1 + confidence) / 2)
    return np.asarray(np.where(successes < n, high, 1.0), dtype=np.float64)


def checked_scores(values: Numbers) -> Numbers:
    """[n] the scores as a float64 array; raises ValueError for no scores or a score that is not a number."""
    x = np.asarray(values, dtype=np.float64)
    bad = int(np.sum(np.isnan(x)))
    if x.ndim != 1 or len(x) == 0 or bad:
        raise ValueError(f"expected scores [n], n >= 1, got shape {x.shape} with {bad} not a number")
    return x
