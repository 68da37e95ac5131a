"""Estimates with their intervals, out of plain numbers.

Every interval is two-sided. Where items are not independent (images of one batch), an interval is too narrow: the
caller says so in the note.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from scipy import special

from leakgauge.harness.core.result import Estimate

Numbers = npt.NDArray[np.float64]


class Interval(NamedTuple):
    """Ends of an interval; None where there is none."""

    low: float | None
    high: float | None


class Roc(NamedTuple):
    """The corners of a ROC curve from (0, 0) to (1, 1): [k] each, one step for each distinct score, ties together."""

    fpr: Numbers
    tpr: Numbers


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
    | all equal | of width zero: they show no spread |
    """
    _check_level(level)
    x = _finite(values)
    if len(x) < 2:
        return Interval(None, None)
    half = float(special.stdtrit(len(x) - 1, (1 + level) / 2)) * float(np.std(x, ddof=1)) / math.sqrt(len(x))
    return Interval(float(np.mean(x)) - half, float(np.mean(x)) + half)


def median_interval(values: Sequence[float] | Numbers, level: float = 0.95) -> Interval:
    """The narrowest symmetric pair of order statistics that covers the median: the inverted sign test.

    None where even (smallest, largest) covers less than `level`: below 6 values at 0.95.

    Guarantees:
        Covers the median of any continuous law with probability at least `level`.

    Source: David, Nagaraja 2003, section 7.1.
    """
    _check_level(level)
    x = np.sort(_finite(values))
    n = len(x)
    # P[Bin(n, 1/2) < k] <= tail for all k up to `k`; then [x_(k), x_(n+1-k)] misses with at most 2 tail
    k = int(np.searchsorted(special.bdtr(np.arange(n), n, 0.5), (1 - level) / 2, side="right"))
    return Interval(float(x[k - 1]), float(x[n - k])) if k > 0 else Interval(None, None)


def proportion(
    name: str,
    successes: int,
    n: int,
    *,
    higher_leaks: bool | None,
    values: Sequence[float | None] = (),
    note: str = "",
    level: float = 0.95,
) -> Estimate:
    """A share of `n` items, with its Clopper-Pearson interval; no value where n is 0."""
    if n == 0:
        value, interval, note = None, Interval(None, None), _join("no item to judge", note)
    else:
        value, interval = successes / n, clopper_pearson(successes, n, level)
    return Estimate(
        name, value, *interval, n, "Clopper-Pearson", level, higher_leaks=higher_leaks, values=tuple(values), note=note
    )


def mean(
    name: str,
    values: Sequence[float | None],
    *,
    higher_leaks: bool | None,
    unit: str = "",
    note: str = "",
    level: float = 0.95,
) -> Estimate:
    """The mean of the values that are there (None: a failed item), with Student's interval."""
    x = _present(values)
    if len(x) == 0:
        note = _join("no item finished", note)
    value = float(np.mean(x)) if len(x) else None
    interval = mean_interval(x, level)
    return Estimate(
        name, value, *interval, len(x), "mean, Student t", level, unit, higher_leaks, values=tuple(values), note=note
    )


def median(
    name: str,
    values: Sequence[float | None],
    *,
    higher_leaks: bool | None,
    unit: str = "",
    note: str = "",
    level: float = 0.95,
) -> Estimate:
    """The median of the values that are there (None: a failed item), with its order-statistic interval."""
    x = _present(values)
    if len(x) == 0:
        note = _join("no item finished", note)
    value = float(np.median(x)) if len(x) else None
    interval = median_interval(x, level)
    method = "median, order statistics"
    return Estimate(name, value, *interval, len(x), method, level, unit, higher_leaks, values=tuple(values), note=note)


def roc(members: Numbers, nonmembers: Numbers) -> Roc:
    """The ROC curve of scores where higher means member.

    Raises:
        ValueError: a side is empty, or a score is not finite.
    """
    m, n = _sides(members, nonmembers)
    thresholds = np.unique(np.concatenate([m, n]))[::-1]
    above = [(len(x) - np.searchsorted(x, thresholds, side="left")) / len(x) for x in (np.sort(n), np.sort(m))]
    return Roc(np.concatenate([[0.0], above[0]]), np.concatenate([[0.0], above[1]]))


def auc(members: Numbers, nonmembers: Numbers, *, level: float = 0.95) -> Estimate:
    """The probability that a member's score exceeds a non-member's, ties counting half; 0.5 is chance.

    DeLong's interval, on the logit scale so that it stays inside (0, 1). Where DeLong's variance is zero or unknown
    (a perfect separation, one record on a side), it would have no width: then the variance is its largest possible
    one, A (1 - A) / min(m, n), in Wilson's form.

    Raises:
        ValueError: a side is empty, or a score is not finite.

    Source: DeLong, DeLong, Clarke-Pearson 1988; logit: Pepe 2003; bound: Birnbaum, Klose 1957.
    """
    _check_level(level)
    m, n = _sides(members, nonmembers)
    of_members, of_nonmembers = placements(m, n), 1 - placements(n, m)
    value = float(np.mean(of_members))
    z = float(special.ndtri((1 + level) / 2))
    variance = 0.0
    if min(len(m), len(n)) > 1:
        variance = float(np.var(of_members, ddof=1)) / len(m) + float(np.var(of_nonmembers, ddof=1)) / len(n)
    if variance > 0:
        center, half = float(special.logit(value)), z * math.sqrt(variance) / (value * (1 - value))
        interval = Interval(float(special.expit(center - half)), float(special.expit(center + half)))
        method = "Mann-Whitney, DeLong (logit)"
    else:
        interval = _wilson(value, min(len(m), len(n)), z)
        method = "Mann-Whitney, Wilson with the largest variance"
    return Estimate("auc", value, *interval, len(m) + len(n), method, level, higher_leaks=True)


def tpr_at_fpr(members: Numbers, nonmembers: Numbers, fpr: float, *, level: float = 0.95) -> Estimate:
    """The share of members above the lowest threshold that at most `fpr` of these non-members exceed.

    No value where fpr times the non-members is below one: the threshold would rest on no non-member at all. The
    Clopper-Pearson interval is of the share at this threshold, not of the share at the true false-positive rate.

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
        return Estimate(name, None, None, None, len(m), "Clopper-Pearson", level, higher_leaks=True, note=note)
    threshold = np.sort(n)[::-1][allowed]
    found, wrong = int(np.sum(m > threshold)), int(np.sum(n > threshold))
    return proportion(
        name, found, len(m), higher_leaks=True, note=f"{wrong} of {len(n)} non-members above the threshold", level=level
    )


def balanced_accuracy(members: Numbers, nonmembers: Numbers, *, level: float = 0.95) -> Estimate:
    """The largest (TPR + 1 - FPR) / 2 over all thresholds; 0.5 is chance, and no threshold does worse.

    The threshold is chosen on the same records, so the value is optimistic. The interval is of the best balanced
    accuracy in the population: it holds for all thresholds at once, and is therefore wide.

    Raises:
        ValueError: a side is empty, or a score is not finite.

    Source: Massart 1990 (the constant 2 of Dvoretzky-Kiefer-Wolfowitz), half of 1 - level for each side.
    """
    _check_level(level)
    m, n = _sides(members, nonmembers)
    curve = roc(m, n)
    best = float(np.max(curve.tpr + 1 - curve.fpr)) / 2
    half = sum(math.sqrt(math.log(4 / (1 - level)) / (2 * len(side))) for side in (m, n)) / 2
    return Estimate(
        "balanced_accuracy",
        best,
        max(0.5, best - half),
        min(1.0, best + half),
        len(m) + len(n),
        "largest over all thresholds, DKW-Massart band",
        level,
        higher_leaks=True,
        note="threshold chosen on the same records: optimistic",
    )


def placements(scores: Numbers, others: Numbers) -> Numbers:
    """For each score the share of the others below it, ties counting half."""
    ranked = np.sort(others)
    both = np.searchsorted(ranked, scores, side="left") + np.searchsorted(ranked, scores, side="right")
    return np.asarray(both / (2 * len(ranked)), dtype=np.float64)


def _check_level(level: float) -> None:
    """Refuse a confidence level outside (0, 1)."""
    if not 0 < level < 1:
        raise ValueError(f"expected 0 < level < 1, got level={level}")


def _finite(values: Sequence[float] | Numbers) -> Numbers:
    """The values as an array; a ValueError where one is not finite."""
    x = np.asarray(values, dtype=np.float64)
    bad = int(np.sum(~np.isfinite(x)))
    if x.ndim != 1 or bad:
        raise ValueError(f"expected finite values [n], got shape {x.shape} with {bad} not finite")
    return x


def _present(values: Sequence[float | None]) -> Numbers:
    """The values that are not None."""
    return np.array([value for value in values if value is not None], dtype=np.float64)


def _sides(members: Numbers, nonmembers: Numbers) -> tuple[Numbers, Numbers]:
    """The scores of both sides, checked."""
    m, n = _finite(members), _finite(nonmembers)
    if len(m) == 0 or len(n) == 0:
        raise ValueError(f"expected scores of both, got {len(m)} members and {len(n)} non-members")
    return m, n


def _wilson(share: float, n: int, z: float) -> Interval:
    """Wilson's interval of a share of n items."""
    center, spread = share + z * z / (2 * n), z * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    return Interval(max(0.0, (center - spread) / (1 + z * z / n)), min(1.0, (center + spread) / (1 + z * z / n)))


def _join(*notes: str) -> str:
    """Those notes that say something, in one line."""
    return "; ".join(note for note in notes if note)
