"""Estimates with their intervals, from plain numbers.

Every interval is two-sided. If items are not independent (such as images of one batch), `over_batches` replaces the
interval. Unit and direction of an estimate come from `core.metrics`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from scipy import special

from leakgauge.harness.core.metrics import metric
from leakgauge.harness.core.result import Estimate

STRICT = 0.999
"""Confidence of an audit's bound that decides on verdicts: others may err in 1 of 20 audits, verdicts may not."""

Numbers = npt.NDArray[np.float64]
Values = Sequence[float | None]


class Interval(NamedTuple):
    """Ends of an interval; both are None without an interval."""

    low: float | None
    high: float | None


class Roc(NamedTuple):
    """The corners [k] of a ROC curve from (0, 0) to (1, 1), with one step per distinct score."""

    fpr: Numbers
    tpr: Numbers


@functools.lru_cache(1 << 14)  # the rows of a run ask for the same intervals again
def clopper_pearson(successes: int, n: int, level: float = 0.95) -> Interval:
    """The exact interval of a proportion.

    Guarantees:
        Covers every true proportion with probability at least `level`.

    Raises:
        ValueError: not 0 <= successes <= n with n >= 1, or level outside (0, 1).

    Source: Clopper, Pearson 1934.
    """
    _check_level(level)
    if not (n >= 1 and 0 <= successes <= n):
        raise ValueError(f"expected 0 <= successes <= n and n >= 1, got successes={successes} and n={n}")
    tail = (1 - level) / 2
    low = float(special.betaincinv(successes, n - successes + 1, tail)) if successes > 0 else 0.0
    high = float(special.betaincinv(successes + 1, n - successes, 1 - tail)) if successes < n else 1.0
    return Interval(low, high)


def mean_interval(values: Sequence[float] | Numbers, level: float = 0.95) -> Interval:
    """Student's interval of a mean: exact for normal values, approximate for others.

    | values | interval |
    |---|---|
    | fewer than two | none |
    | all equal | of width zero |
    """
    _check_level(level)
    x = _finite(values)
    if len(x) < 2:
        return Interval(None, None)
    half = float(special.stdtrit(len(x) - 1, (1 + level) / 2)) * float(np.std(x, ddof=1)) / math.sqrt(len(x))
    return Interval(float(np.mean(x)) - half, float(np.mean(x)) + half)


def median_interval(values: Sequence[float] | Numbers, level: float = 0.95) -> Interval:
    """The narrowest symmetric pair of order statistics that covers the median: the inverted sign test.

    The ends are None if even (smallest, largest) covers less than `level`: at 0.95, with fewer than 6 values.

    Guarantees:
        Covers the median of any continuous distribution with probability at least `level`.

    Source: David, Nagaraja 2003, section 7.1.
    """
    _check_level(level)
    x = np.sort(_finite(values))
    n = len(x)
    # P[Bin(n, 1/2) < k] <= tail for all k up to `k`; then [x_(k), x_(n+1-k)] misses with at most 2 tail
    k = int(np.searchsorted(special.bdtr(np.arange(n), n, 0.5), (1 - level) / 2, side="right"))
    return Interval(float(x[k - 1]), float(x[n - k])) if k > 0 else Interval(None, None)


def proportion(name: str, successes: int, n: int, *, values: Values = (), note: str = "") -> Estimate:
    """A share of `n` items of the metric `name`, with its Clopper-Pearson interval; no value if n is 0."""
    if n == 0:
        value, interval, note = None, Interval(None, None), joined("no item to judge", note)
    else:
        value, interval = successes / n, clopper_pearson(successes, n)
    return _estimate(name, value, interval, n, "Clopper-Pearson", values, note)


def mean(name: str, values: Values, *, note: str = "") -> Estimate:
    """The mean of the values that are not None (a failed item), with Student's interval."""
    x = _present(values)
    value = float(np.mean(x)) if len(x) else None
    note = note if len(x) else joined("no item finished", note)
    return _estimate(name, value, mean_interval(x), len(x), "mean, Student t", values, note)


def median(name: str, values: Values, *, note: str = "") -> Estimate:
    """The median of the values that are not None (a failed item), with its order-statistic interval."""
    x = _present(values)
    value = float(np.median(x)) if len(x) else None
    note = note if len(x) else joined("no item finished", note)
    return _estimate(name, value, median_interval(x), len(x), "median, order statistics", values, note)


def of_items(name: str, values: Values, *, note: str = "") -> Estimate:
    """The mean of items, with Clopper-Pearson's interval for a share of items that are 0 or 1, else Student's."""
    x = _present(values)
    is_share = metric(name).interval == "Clopper-Pearson"
    if is_share and len(x) and bool(np.isin(x, (0.0, 1.0)).all()):
        return proportion(name, round(float(x.sum())), len(x), values=values, note=note)
    return mean(name, values, note=note)


def over_batches(estimate: Estimate, sizes: Sequence[int]) -> Estimate:
    """The estimate of a value per item with an interval over batches of these sizes, whose items are not independent.

    Student's t for a ratio of totals of clusters (Cochran 1977, eq. 6.12; of equal sizes: for the mean of the batches'
    means). A share of 0 or 1 has Clopper-Pearson's interval of as many items as batches; a median, the order statistics
    of the batches' medians. Other estimates and batches of one item stay as they are.
    """
    if max(sizes) == 1 or len(estimate.values) != sum(sizes) or (value := estimate.value) is None:
        return estimate
    parts = np.split(np.array(estimate.values, dtype=np.float64), np.cumsum(sizes)[:-1])
    kept = [part[~np.isnan(part)] for part in parts if not np.isnan(part).all()]
    k, name, ends = len(kept), "Student t", Interval(None, None)
    if estimate.method.startswith("median"):
        name, ends = "order statistics of medians", median_interval([float(np.median(part)) for part in kept])
    elif metric(estimate.name).interval == "Clopper-Pearson" and value in (0.0, 1.0):
        name, ends = "Clopper-Pearson", clopper_pearson(round(value * k), k)
    elif k > 1:
        off = np.array([part.sum() - value * len(part) for part in kept])
        half = float(special.stdtrit(k - 1, 0.975)) * math.sqrt(k / (k - 1) * (off @ off)) / sum(map(len, kept))
        ends = Interval(value - half, value + half)
    return cut(replace(estimate, low=ends.low, high=ends.high, method=f"{name} over {k} batches", sizes=tuple(sizes)))


def firsts(estimate: Estimate) -> list[bool]:
    """Whether the first item of each message is a hit; a failure is none."""
    return [value == 1 for value in of_messages(estimate)]


def of_messages(estimate: Estimate) -> Values:
    """The value of the first item of each message: items of one message are not independent."""
    return [estimate.values[at] for at in np.cumsum((0, *estimate.sizes[:-1]))] if estimate.sizes else estimate.values


def against(estimate: Estimate, chance: float) -> Estimate:
    """A share beside its value by guessing, with the exact binomial test that it is not higher (see `firsts`)."""
    hits = firsts(estimate)
    return replace(estimate, chance=chance, p=binomial(sum(hits), len(hits), chance))


def binomial(hits: int, n: int, chance: float) -> float:
    """The probability of at least so many hits among n independent items, each a hit by `chance`."""
    return float(special.betainc(hits, n - hits + 1, chance)) if hits else 1.0


def fisher(hits: int, n: int, others: int, m: int) -> float:
    """The one-sided p-value of Fisher's exact test that `hits` of n is no higher a share than `others` of m."""
    more = np.arange(hits, min(n, hits + others) + 1)
    logs = [-special.betaln(k + 1, of - k + 1) - np.log(of + 1) for k, of in ((more, n), (hits + others - more, m))]
    total = special.betaln(hits + others + 1, n + m - hits - others + 1) + np.log(n + m + 1)
    return min(1.0, float(np.exp(logs[0] + logs[1] + total).sum()))


def pool(estimates: Sequence[Estimate]) -> Estimate:
    """One estimate of one metric over seeds.

    | estimates | pooled |
    |---|---|
    | only one, or no value in any | the first, unchanged |
    | means of per-item values | `of_items` of all items |
    | other numbers (an AUC) | the mean of one value per seed, Student's t over the seeds |
    | p | of a share, the test of all items; of other numbers, Fisher's combination |

    `values` keeps the items of all seeds in order. Intervals are cut to the metric's range.

    Raises:
        ValueError: there is no estimate.
    """
    if not estimates:
        raise ValueError("expected at least one estimate, got none")
    first, known = estimates[0], [estimate for estimate in estimates if estimate.value is not None]
    if len(estimates) == 1 or not known:
        return cut(first)
    lost = len(estimates) - len(known)
    notes = [f"no value in {lost} of {len(estimates)} seeds"] if lost else []
    note = "; ".join(notes + list(dict.fromkeys(estimate.note for estimate in known if estimate.note)))
    values = tuple(value for estimate in estimates for value in estimate.values)
    chance = max((estimate.chance for estimate in known if estimate.chance is not None), default=None)
    if all(_is_mean(estimate) for estimate in known):
        pooled = of_items(first.name, [value for value in values if value is not None])
        sizes = [size for estimate in estimates for size in estimate.sizes or [1] * len(estimate.values)]
        pooled = cut(over_batches(replace(pooled, values=values, note=note), sizes))
    else:
        pooled = mean(first.name, [estimate.value for estimate in known])
        n, method = sum(estimate.n for estimate in known), f"{pooled.method} over the seeds"
        pooled = cut(replace(pooled, n=n, method=method, values=values, note=note))
    tested = [estimate.p for estimate in known if estimate.p is not None]
    if chance is not None and tested and is_share(pooled):
        return against(pooled, chance)
    return replace(pooled, chance=chance, p=_together(tested) if len(tested) == len(known) else None)


def rounds_to_name(nats: float, among: int) -> int | None:
    """After how many messages a record is named among that many candidates with probability one half; None: never.

    Among two, one half is chance: None.
    The log likelihood ratio to each rival is taken as normal, with twice its mean as the variance, and as independent
    of the other ratios.
    """
    if nats <= 0 or among < 3:
        return None
    return math.ceil(2 * float(special.ndtri(0.5 ** (1 / (among - 1)))) ** 2 / nats)


def is_share(estimate: Estimate) -> bool:
    """Whether every item is a hit or none."""
    return bool(estimate.values) and all(value in (None, 0.0, 1.0) for value in estimate.values)


def _together(p: Sequence[float]) -> float:
    """One p-value of independent ones (Fisher 1925)."""
    return float(special.chdtrc(2 * len(p), -2 * np.log(np.maximum(p, np.finfo(float).tiny)).sum()))


def pool_shares(estimates: Sequence[Estimate]) -> Estimate:
    """One share pooled over several trainings; no value if one training has no value."""
    lacking = next((estimate for estimate in estimates if estimate.value is None), None)
    if lacking is not None:
        return lacking
    hits = sum(round((estimate.value or 0.0) * estimate.n) for estimate in estimates)
    return proportion(estimates[0].name, hits, sum(estimate.n for estimate in estimates))


def cut(estimate: Estimate) -> Estimate:
    """The estimate with its interval cut to the metric's range, because Student's t ignores the range."""
    low, high, range_ = estimate.low, estimate.high, metric(estimate.name)
    if low is not None and range_.low is not None:
        low = max(range_.low, low)
    if high is not None and range_.high is not None:
        high = min(range_.high, high)
    return replace(estimate, low=low, high=high)


def _is_mean(estimate: Estimate) -> bool:
    x = _present(estimate.values)
    if not len(x) or estimate.value is None:
        return False
    return math.isclose(float(np.mean(x)), estimate.value, rel_tol=1e-6, abs_tol=1e-6)


def _estimate(
    name: str, value: float | None, ends: Interval, n: int, method: str, values: Values = (), note: str = ""
) -> Estimate:
    row = metric(name)
    unit, leaks = row.unit, row.higher_leaks
    return Estimate(name, value, *ends, n, method, unit=unit, higher_leaks=leaks, values=tuple(values), note=note)


def roc(members: Numbers, nonmembers: Numbers) -> Roc:
    """The ROC curve of scores where higher means member.

    Raises:
        ValueError: a side is empty, or a score is not finite.
    """
    m, n = _sides(members, nonmembers)
    thresholds = np.unique(np.concatenate([m, n]))[::-1]
    above = [(len(x) - np.searchsorted(x, thresholds, side="left")) / len(x) for x in (np.sort(n), np.sort(m))]
    return Roc(np.concatenate([[0.0], above[0]]), np.concatenate([[0.0], above[1]]))


def auc(members: Numbers, nonmembers: Numbers) -> Estimate:
    """The probability that a member's score exceeds a non-member's, ties counting half; 0.5 is chance.

    The interval is DeLong's on the logit scale, which keeps it inside (0, 1). If DeLong's variance is zero or unknown
    (perfect separation, one record on a side), the largest possible variance, A (1 - A) / min(m, n), is used, in
    Wilson's form. p is of the rank-sum test, exact for at most 8 scores of a side without ties.

    Raises:
        ValueError: a side is empty, or a score is not finite.

    Source: DeLong, DeLong, Clarke-Pearson 1988; logit: Pepe 2003; bound: Birnbaum, Klose 1957.
    """
    m, n = _sides(members, nonmembers)
    of_members, of_nonmembers = placements(m, n), 1 - placements(n, m)
    value = float(np.mean(of_members))
    z = float(special.ndtri(0.975))
    variance = 0.0
    if min(len(m), len(n)) > 1:
        variance = float(np.var(of_members, ddof=1)) / len(m) + float(np.var(of_nonmembers, ddof=1)) / len(n)
    if variance > 0:
        center, half = float(special.logit(value)), z * math.sqrt(variance) / (value * (1 - value))
        interval = Interval(float(special.expit(center - half)), float(special.expit(center + half)))
        method = "Mann-Whitney, DeLong (logit)"
    else:
        k = min(len(m), len(n))
        center, half = value + z * z / (2 * k), z * math.sqrt(value * (1 - value) / k + z * z / (4 * k * k))
        interval = Interval(max(0.0, (center - half) / (1 + z * z / k)), min(1.0, (center + half) / (1 + z * z / k)))
        method = "Mann-Whitney, Wilson with the largest variance"
    from scipy.stats import mannwhitneyu

    p = float(mannwhitneyu(m, n, alternative="greater").pvalue)
    return replace(_estimate("auc", value, interval, len(m) + len(n), method), chance=0.5, p=p)


def tpr_at_fpr(members: Numbers, nonmembers: Numbers, fpr: float) -> Estimate:
    """The share of members above the lowest threshold that at most a share `fpr` of these non-members exceeds.

    There is no value if fpr times the number of non-members is below one, because then no non-member determines the
    threshold. The Clopper-Pearson interval covers the share at this threshold, not at the true false positive rate.

    Raises:
        ValueError: a side is empty, a score is not finite, or fpr is outside [0, 1).
    """
    m, n = _sides(members, nonmembers)
    if not 0 <= fpr < 1:
        raise ValueError(f"expected 0 <= fpr < 1, got fpr={fpr}")
    name = f"tpr@{100 * fpr:g}%"
    allowed = min(math.floor(fpr * len(n) + 1e-9), len(n) - 1)  # 1e-9: 0.29 * 100 is 28.999999999999996
    if allowed < 1:
        note = f"n/a: {100 * fpr:g} % of {len(n)} non-members is less than one record"
        return _estimate(name, None, Interval(None, None), len(m), "Clopper-Pearson", note=note)
    threshold = np.sort(n)[::-1][allowed]
    note = f"{int(np.sum(n > threshold))} of {len(n)} non-members above the threshold"
    return proportion(name, int(np.sum(m > threshold)), len(m), note=note)


def balanced_accuracy(members: Numbers, nonmembers: Numbers, *, level: float = 0.95) -> Estimate:
    """The largest (TPR + 1 - FPR) / 2 over all thresholds; 0.5 is chance, and the smallest possible value.

    The threshold is chosen on the same records, so the value is optimistic. The interval covers the best balanced
    accuracy in the population. It holds for all thresholds at once, so it is wide.

    Raises:
        ValueError: a side is empty, or a score is not finite.

    Source: Massart 1990 (the constant 2 of Dvoretzky-Kiefer-Wolfowitz), half of 1 - level for each side.
    """
    _check_level(level)
    m, n = _sides(members, nonmembers)
    curve = roc(m, n)
    best = float(np.max(curve.tpr + 1 - curve.fpr)) / 2
    half = sum(math.sqrt(math.log(4 / (1 - level)) / (2 * len(side))) for side in (m, n)) / 2
    interval = Interval(max(0.5, best - half), min(1.0, best + half))
    method, note = "largest over all thresholds, DKW-Massart band", "threshold chosen on the same records: optimistic"
    return replace(_estimate("balanced_accuracy", best, interval, len(m) + len(n), method, note=note), level=level)


def placements(scores: Numbers, others: Numbers) -> Numbers:
    """For each score, the share of `others` below it, ties counting half."""
    ranked = np.sort(others)
    both = np.searchsorted(ranked, scores, side="left") + np.searchsorted(ranked, scores, side="right")
    return np.asarray(both / (2 * len(ranked)), dtype=np.float64)


def holm(p: Numbers) -> Numbers:
    """p-values [..., m] adjusted for m tests: an adjusted value below a level is rejected at that family-wise level.

    Source: Holm 1979.
    """
    order = np.argsort(p, axis=-1)
    weights = np.arange(p.shape[-1], 0, -1)
    ranked = np.maximum.accumulate(np.take_along_axis(p, order, axis=-1) * weights, axis=-1)
    adjusted = np.empty_like(ranked)
    np.put_along_axis(adjusted, order, np.minimum(ranked, 1.0), axis=-1)
    return adjusted


def joined(*notes: str) -> str:
    """The nonempty notes, in one line."""
    return "; ".join(note for note in notes if note)


def _check_level(level: float) -> None:
    if not 0 < level < 1:
        raise ValueError(f"expected 0 < level < 1, got level={level}")


def _finite(values: Sequence[float] | Numbers) -> Numbers:
    """The values as an array; raises ValueError if one is not finite."""
    x = np.asarray(values, dtype=np.float64)
    bad = int(np.sum(~np.isfinite(x)))
    if x.ndim != 1 or bad:
        raise ValueError(f"expected finite values [n], got shape {x.shape} with {bad} not finite")
    return x


def _present(values: Values) -> Numbers:
    return np.array([value for value in values if value is not None], dtype=np.float64)


def _sides(members: Numbers, nonmembers: Numbers) -> tuple[Numbers, Numbers]:
    m, n = _finite(members), _finite(nonmembers)
    if len(m) == 0 or len(n) == 0:
        raise ValueError(f"expected scores of both, got {len(m)} members and {len(n)} non-members")
    return m, n
