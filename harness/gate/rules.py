"""The rules of the gate and the tests behind them, on arrays.

The last axis of every array holds the pairs of a check, or the checks of a run. Any axes may precede it: the
calibration in `tests/test_gate_calibration.py` calls the same functions on thousands of runs at once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from scipy import optimize, special

from leakgauge.harness.core.metrics import RECOGNIZABLE
from leakgauge.harness.core.stats import Numbers, holm

Sides = tuple[Numbers, Numbers]
"""Placements of members and of non-members."""

Truths = npt.NDArray[np.bool_]

_SIDE = 0.95
"""Confidence of a one-sided bound."""

_POWER = 0.8
"""Power at which the smallest detectable rise of a check is reported."""

ROUNDING = 1e-9
"""Tolerance for binary fractions: 0.30 - 0.28 is below 0.02."""


class Verdict(StrEnum):
    """The verdict of one check, the worst first."""

    FAIL = "FAIL"
    INCOMPLETE = "INCOMPLETE"
    NOT_COMPARABLE = "NOT COMPARABLE"
    NOT_ACCEPTED = "NOT ACCEPTED"
    INCONCLUSIVE = "INCONCLUSIVE"
    PASS = "PASS"


@dataclass(frozen=True)
class Rules:
    """The thresholds of the rules.

    Attributes:
        level: family-wise probability of a false alarm over all tests of a run.
        margin: a smaller rise of a mean does not count as an increase.
        tolerable: a check passes if the 95 % upper bound of its rise is below this.
        below, above: an image is newly recognizable if it was below `below` and is now at `above` or higher. Such an
            image is named but does not decide, because one draw of the noise moves an image by more than that.
        least: the fewest images, or records on either side, for a check.
        accuracy: allowed fall of the accuracy, as a share of the test set.
        trainings: the fewest seeds for a verdict on a fall of the accuracy; fewer cannot tell it from chance.
        bits: allowed relative rise of the bits per parameter.
        audit_share, audit_gap: a rise of an audited epsilon by more than both is inconclusive, even below the claim;
            `audit_share` is relative to the baseline.
    """

    level: float = 0.05
    margin: float = 0.02
    tolerable: float = 0.05
    below: float = 0.40
    above: float = RECOGNIZABLE
    least: int = 8
    accuracy: float = 0.02
    trainings: int = 4
    bits: float = 0.01
    audit_share: float = 0.25
    audit_gap: float = 0.5


class Rise(NamedTuple):
    """A mean rise with its standard error; all arrays have the same shape.

    mean: now minus before. error: its standard error. df: degrees of freedom of Student's t, infinite without noise.
    """

    mean: Numbers
    error: Numbers
    df: Numbers

    def low(self) -> Numbers:
        """The one-sided 95 % lower bound."""
        return np.asarray(self.mean - special.stdtrit(self.df, _SIDE) * self.error)

    def high(self) -> Numbers:
        """The one-sided 95 % upper bound."""
        return np.asarray(self.mean + special.stdtrit(self.df, _SIDE) * self.error)

    def chance(self) -> Numbers:
        """One-sided p-value of the rise.

        | standard error | rise | p |
        |---|---|---|
        | 0 (all differences are equal) | above 0 | 0 |
        | 0 | 0 or below | 1 |
        """
        steady = self.error == 0
        t = self.mean / np.where(steady, 1.0, self.error)
        return np.where(steady, np.where(self.mean > 0, 0.0, 1.0), special.stdtr(self.df, -t))

    def falling(self) -> Rise:
        """The same change, read as a fall."""
        return Rise(-self.mean, self.error, self.df)


class Decision(NamedTuple):
    """The decisions on all tests of a run, one entry per check; p is adjusted by Holm."""

    p: Numbers
    fails: Truths
    passes: Truths


def decide(rise: Rise, rules: Rules) -> Decision:
    """Judge all tests of a run together.

    Args:
        rise: [..., m], one entry for each test of the run.

    Guarantees:
        If no mean rises, the probability that any of the m tests fails is at most `rules.level`.
        A check that fails never passes.
    """
    p = holm(rise.chance())
    fails = (p < rules.level) & (rise.mean >= rules.margin - ROUNDING)
    return Decision(p, fails, ~fails & (rise.high() < rules.tolerable))


def paired(before: Numbers, now: Numbers) -> Rise:
    """The rise of a mean over pairs [..., n], n >= 2: Student's t of the differences."""
    difference = now - before
    n = difference.shape[-1]
    error = np.std(difference, axis=-1, ddof=1) / math.sqrt(n)
    return Rise(np.mean(difference, axis=-1), error, np.full_like(error, n - 1))


def independent(before: Numbers, now: Numbers) -> Rise:
    """The rise of a mean from one sample to another, [..., n] and [..., m], both >= 2: Welch's."""
    parts = [np.var(sample, axis=-1, ddof=1) / sample.shape[-1] for sample in (before, now)]
    mean = np.mean(now, axis=-1) - np.mean(before, axis=-1)
    return _added(mean, parts, [before.shape[-1] - 1, now.shape[-1] - 1])


def delong(before: Sides, now: Sides) -> Rise:
    """The rise of an AUC, from the placements of the same records in two runs: [..., m] and [..., k], both >= 2.

    The paired differences of the placements include the covariance of the two curves.

    Source: DeLong, DeLong, Clarke-Pearson 1988. Differs: Student's t with Welch's degrees of freedom, not the normal
    distribution. With 20 members and 200 non-members its false-alarm rate at level 0.001 is 0.0003; the normal
    distribution has 0.0011.
    """
    return _of_sides(now[0] - before[0], now[1] - before[1])


def over_seeds(rises: Sequence[Rise]) -> Rise:
    """The mean of independent rises, one for each seed."""
    count = len(rises)
    mean = np.mean([rise.mean for rise in rises], axis=0)
    return _added(mean, [(rise.error / count) ** 2 for rise in rises], [rise.df for rise in rises])


def caught(before: Sides, now: Sides, rate: float) -> Rise:
    """The rise of the true-positive rate at a false-positive rate, from the placements of the same records.

    The threshold is random too: it depends on the few non-members above it, and it causes most of the noise where the
    curve is steep. One false positive more or less moves the rate by the slope of the curve. The slope used here is the
    chord from no false positive to twice the allowed number. The chord is steeper than a concave curve, so the test is
    conservative.

    Args:
        before, now: placements of members [..., m] and non-members [..., k], with k * rate >= 1.
        rate: the false-positive rate.

    Source: Hsieh, Turnbull 1996, Theorem 2.2 (the two terms of the variance). Differs: paired, and the chord.
    """
    (found, alarms), (earlier, alarms_then) = _weighed(now, rate), _weighed(before, rate)
    return _of_sides(found - earlier, alarms - alarms_then)


def smallest(error: float, df: float, tests: int, rules: Rules) -> float:
    """The smallest true rise that the test detects with probability 0.8; at least the margin.

    The level is Bonferroni's for `tests` tests, because Holm's is never stricter; the standard error counts as exact.
    """
    if error < ROUNDING:
        return rules.margin
    critical = -float(special.stdtrit(df, rules.level / tests))
    # the measured error varies around the true one as sqrt(chi2 / df), independently of the mean
    spread = np.ones(1)
    if math.isfinite(df):
        spread = np.sqrt(special.chdtri(df, (np.arange(400) + 0.5) / 400) / df)
    bars = np.maximum(rules.margin, critical * error * spread)

    def missing(rise: float) -> float:
        return float(np.mean(special.ndtr((rise - bars) / error))) - _POWER

    return float(optimize.brentq(missing, rules.margin, float(bars.max()) + 4 * error, xtol=1e-6))


def _weighed(sides: Sides, rate: float) -> Sides:
    """Whether each member is above the threshold; for non-members the same, times the slope of the curve there."""
    members, others = sides
    count = others.shape[-1]
    allowed = max(1, math.floor(rate * count + 1e-9))  # 1e-9: 0.29 * 100 is 28.999999999999996
    above = (1 - members) * count  # non-members above a member; placements have few decimals, so 0.25 counts as none
    none, some, twice = (above <= number + 0.25 for number in (0, allowed, 2 * allowed))
    slope = (twice.mean(axis=-1) - none.mean(axis=-1)) * count / (2 * allowed)
    # the highest non-members have the fewest members above them; tied records share the last places
    last = np.partition(others, allowed - 1, axis=-1)[..., allowed - 1 : allowed]
    higher, alike = others < last, others == last
    share = (allowed - higher.sum(axis=-1, keepdims=True)) / alike.sum(axis=-1, keepdims=True)
    return some.astype(np.float64), slope[..., None] * np.where(alike, share, higher)


def _of_sides(members: Numbers, others: Numbers) -> Rise:
    """A rise with the mean of the members and the noise of both sides."""
    parts = [np.var(side, axis=-1, ddof=1) / side.shape[-1] for side in (members, others)]
    return _added(np.mean(members, axis=-1), parts, [members.shape[-1] - 1, others.shape[-1] - 1])


def _added(mean: Numbers, parts: Sequence[Numbers], dfs: Sequence[Numbers | float]) -> Rise:
    """A rise whose variance is a sum of `parts`, with Welch-Satterthwaite degrees of freedom."""
    total = np.asarray(sum(parts), dtype=np.float64)
    terms = np.asarray(sum(variance**2 / df for variance, df in zip(parts, dfs, strict=True)), dtype=np.float64)
    df = np.divide(total**2, terms, out=np.full_like(total, np.inf), where=terms > 0)
    return Rise(np.asarray(mean, dtype=np.float64), np.sqrt(total), df)
