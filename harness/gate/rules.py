"""The rules of the gate and the tests behind them, on arrays.

Every function takes the last axis for the pairs of a check, or for the checks of a run, and any axes before it: the
calibration in `tests/test_gate_calibration.py` asks the same functions about thousands of runs at once.
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

from leakgauge.harness.core.stats import Numbers

Sides = tuple[Numbers, Numbers]
"""Placements of members and of others."""

Truths = npt.NDArray[np.bool_]

_SIDE = 0.95
"""Of a one-sided bound."""

_POWER = 0.8
"""With which the smallest rise that a check reports would have failed."""

ROUNDING = 1e-9
"""What binary fractions add: 0.30 - 0.28 is below 0.02."""


class Verdict(StrEnum):
    """Of one check; the worst first."""

    FAIL = "FAIL"
    INCOMPLETE = "INCOMPLETE"
    NOT_COMPARABLE = "NOT COMPARABLE"
    INCONCLUSIVE = "INCONCLUSIVE"
    PASS = "PASS"


@dataclass(frozen=True)
class Rules:
    """The numbers of the rules.

    Attributes:
        level: of the family of all tests of a run: chance of a false alarm.
        margin: a mean that rises by less is no increase.
        tolerable: PASS where the 95 % upper bound of the rise is below this.
        below, above: an image below the first that is now at the second or above is newly recognizable,
        gap: if it rose by this, or by five times the noise of a repeated run.
        least: images, or records of either side, that a check needs.
        accuracy: share of the test set by which accuracy may fall.
        bits: relative rise of the bits of a parameter that is allowed.
        audit_share, audit_gap: an audited epsilon that rises by more than both, the first relative to the baseline's,
            without passing the claim, is inconclusive.
    """

    level: float = 0.05
    margin: float = 0.02
    tolerable: float = 0.05
    below: float = 0.40
    above: float = 0.50
    gap: float = 0.10
    least: int = 8
    accuracy: float = 0.02
    bits: float = 0.01
    audit_share: float = 0.25
    audit_gap: float = 0.5


class Rise(NamedTuple):
    """A mean rise with what is known of its chance.

    mean: now minus before. error: its standard error. df: degrees of freedom of Student's t, infinite where there is no
    noise. All of one shape.
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
        """One-sided p: how often a rise as large comes by chance.

        | standard error | rise | p |
        |---|---|---|
        | 0: all pairs alike | above 0 | 0 |
        | 0 | 0 or below | 1 |
        """
        steady = self.error == 0
        t = self.mean / np.where(steady, 1.0, self.error)
        return np.where(steady, np.where(self.mean > 0, 0.0, 1.0), special.stdtr(self.df, -t))

    def falling(self) -> Rise:
        """The same as a fall."""
        return Rise(-self.mean, self.error, self.df)


class Decision(NamedTuple):
    """What the tests of a run decide, one entry a check: p by Holm's method, whether it fails, whether it passes."""

    p: Numbers
    fails: Truths
    passes: Truths


def decide(rise: Rise, recognized: Truths, rules: Rules) -> Decision:
    """Judge all tests of a run together.

    Args:
        rise: [..., m], of all tests of the run.
        recognized: [..., m], whether a check has an image that is newly recognizable.

    Guarantees:
        Where no mean rises, the chance that any of the m tests fails is at most `rules.level`, but for images.
        A check that fails never passes.
    """
    p = holm(rise.chance())
    fails = recognized | ((p < rules.level) & (rise.mean >= rules.margin - ROUNDING))
    return Decision(p, fails, ~fails & (rise.high() < rules.tolerable))


def paired(before: Numbers, now: Numbers) -> Rise:
    """The rise of a mean over pairs [..., n], n >= 2: Student's t of the differences."""
    difference = now - before
    n = difference.shape[-1]
    error = np.std(difference, axis=-1, ddof=1) / math.sqrt(n)
    return Rise(np.mean(difference, axis=-1), error, np.full_like(error, n - 1))


def newly_recognizable(before: Numbers, now: Numbers, rules: Rules, noise_sd: float) -> Truths:
    """Which of the images were below `below`, are at `above` or more, and rose by more than noise does."""
    gap = max(rules.gap, 5 * noise_sd) - ROUNDING
    return np.asarray((before < rules.below) & (now >= rules.above) & (now - before >= gap))


def delong(before: Sides, now: Sides) -> Rise:
    """The rise of an AUC from the placements of the same records in two runs: [..., m] and [..., k], both >= 2.

    The differences of the placements carry the covariance of the two curves.

    Source: DeLong, DeLong, Clarke-Pearson 1988. Differs: Student's t with Welch's degrees of freedom, not the normal
    law; of 20 members and 200 others it gives 0.0003 false alarms at a level of 0.001, the normal law 0.0011.
    """
    return _of_sides(now[0] - before[0], now[1] - before[1])


def over_seeds(rises: Sequence[Rise]) -> Rise:
    """The mean of independent rises, one of each seed."""
    count = len(rises)
    mean = np.mean([rise.mean for rise in rises], axis=0)
    return _added(mean, [(rise.error / count) ** 2 for rise in rises], [rise.df for rise in rises])


def caught(before: Sides, now: Sides, rate: float) -> Rise:
    """The rise of the true-positive rate at a false-positive rate, from the placements of the same records.

    The threshold is itself drawn: it rests on the few others above it, and where the curve is steep its chance is most
    of the noise. A false alarm more or less moves the rate by the slope of the curve, here the chord from no false
    alarm to twice as many as are allowed: for a curve that bends down it is steeper than the curve, so that the test
    errs on the side of no alarm.

    Args:
        before, now: placements of members [..., m] and others [..., k], with at least one of k * rate.
        rate: of false alarms.

    Source: Hsieh, Turnbull 1996, Theorem 2.2 (the two terms of the variance). Differs: paired, and the chord.
    """
    (found, alarms), (earlier, alarms_then) = _weighed(now, rate), _weighed(before, rate)
    return _of_sides(found - earlier, alarms - alarms_then)


def holm(p: Numbers) -> Numbers:
    """p-values [..., m] adjusted for m tests; below a level means rejected at that level for the whole family.

    Source: Holm 1979.
    """
    order = np.argsort(p, axis=-1)
    weights = np.arange(p.shape[-1], 0, -1)
    ranked = np.maximum.accumulate(np.take_along_axis(p, order, axis=-1) * weights, axis=-1)
    adjusted = np.empty_like(ranked)
    np.put_along_axis(adjusted, order, np.minimum(ranked, 1.0), axis=-1)
    return adjusted


def smallest(error: float, df: float, tests: int, rules: Rules) -> float:
    """The smallest true rise that would have failed with probability 0.8, at least the margin.

    Bonferroni's level for `tests` tests: Holm's is never stricter. The standard error is taken for the true one.
    """
    if error < ROUNDING:
        return rules.margin
    critical = -float(special.stdtrit(df, rules.level / tests))
    # the measured error varies about the true one as sqrt(chi2 / df), independently of the mean
    spread = np.ones(1)
    if math.isfinite(df):
        spread = np.sqrt(special.chdtri(df, (np.arange(400) + 0.5) / 400) / df)
    bars = np.maximum(rules.margin, critical * error * spread)
    return float(
        optimize.brentq(_missing_power, rules.margin, float(bars.max()) + 4 * error, args=(bars, error), xtol=1e-6)
    )


def _weighed(sides: Sides, rate: float) -> Sides:
    """Members: whether they are above the threshold; others: that, times the slope of the curve there."""
    members, others = sides
    count = others.shape[-1]
    allowed = max(1, math.floor(rate * count + 1e-9))  # 1e-9: 0.29 * 100 is 28.999999999999996
    above = (1 - members) * count  # others above a member; placements are kept with few decimals, so that 0.25 is none
    none, some, twice = (above <= number + 0.25 for number in (0, allowed, 2 * allowed))
    slope = (twice.mean(axis=-1) - none.mean(axis=-1)) * count / (2 * allowed)
    # the highest others are those that fewest members are above; the last places are shared by those alike
    last = np.partition(others, allowed - 1, axis=-1)[..., allowed - 1 : allowed]
    higher, alike = others < last, others == last
    share = (allowed - higher.sum(axis=-1, keepdims=True)) / alike.sum(axis=-1, keepdims=True)
    return some.astype(np.float64), slope[..., None] * np.where(alike, share, higher)


def _missing_power(rise: float, bars: Numbers, error: float) -> float:
    """How far the chance that a mean about `rise` clears a bar is above the power asked for."""
    return float(np.mean(special.ndtr((rise - bars) / error))) - _POWER


def _of_sides(members: Numbers, others: Numbers) -> Rise:
    """A rise whose mean is that of the members, and whose noise is of both sides."""
    parts = [np.var(side, axis=-1, ddof=1) / side.shape[-1] for side in (members, others)]
    return _added(np.mean(members, axis=-1), parts, [members.shape[-1] - 1, others.shape[-1] - 1])


def _added(mean: Numbers, parts: Sequence[Numbers], dfs: Sequence[Numbers | float]) -> Rise:
    """A rise whose variance is a sum, with the degrees of freedom of Welch and Satterthwaite."""
    total = np.asarray(sum(parts), dtype=np.float64)
    terms = np.asarray(sum(part**2 / df for part, df in zip(parts, dfs, strict=True)), dtype=np.float64)
    df = np.divide(total**2, terms, out=np.full_like(total, np.inf), where=terms > 0)
    error = np.sqrt(total)
    return Rise(np.asarray(mean, dtype=np.float64), error, df)
