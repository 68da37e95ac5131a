"""Statements about a run, checked on its values: above, below, within, equals, flat, monotone, interior minimum.

Both sides are paired over seeds and items. A statement is CONFIRMED or CONTRADICTED only if a test at 5 %, adjusted by
Holm's method over all statements of a study, shows it; otherwise it is UNRESOLVED, with the number of seeds that it
would take.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
from scipy import special

from leakgauge.harness.core.cell import Scalar
from leakgauge.harness.core.points import Value, check_alike, flat, grouped, path, select, varied
from leakgauge.harness.core.stats import holm

LEVEL = 0.05
"""Bound on the probability that any statement of a study gets a wrong verdict, if differences are normal."""

_POWER = 0.8
Kind = Literal["above", "below", "within", "equals", "flat", "monotone", "interior-minimum"]


class Verdict(StrEnum):
    """The result of testing a statement."""

    CONFIRMED = "CONFIRMED"
    CONTRADICTED = "CONTRADICTED"
    UNRESOLVED = "UNRESOLVED"
    NOT_RUN = "NOT RUN"


@dataclass(frozen=True)
class Statement:
    """One statement of a source, as written in a study.

    Attributes:
        text: the statement in words.
        that: `above`: a - b is above `margin`; `below`: a - b is below -`margin`; `within`: |a - b| is at most
            `margin`; `equals`: |a - value| is at most `margin`; `flat`: no two levels along a path differ by more than
            `margin`; `monotone`: each level along a path minus the previous level is above -`margin` (rising), or
            below `margin` (falling); `interior-minimum`: some level between the ends is below both by more than
            `margin`.
        y: the quantity.
        a, b: filters of the two sides, by path.
        at: filter of both sides.
        along: the path of `flat`, `monotone` and `interior-minimum`.
        each: paths; the statement is made for each of their values in a, and for the same in b if b has the path.
        over: paths besides seed and item over which y is averaged.
        margin: in the unit of the quantity.
        value: the value of `equals`, as the source prints it.
        direction: the direction of `monotone`.
        printed: what the source prints, for readers; it enters no test.
        missing: what the statement needs but is not available; the statement is then NOT RUN.
    """

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}
    text: str
    that: Kind
    y: str
    a: dict[str, Any] = field(default_factory=dict)
    b: dict[str, Any] = field(default_factory=dict)
    at: dict[str, Any] = field(default_factory=dict)
    along: str = ""
    each: tuple[str, ...] = ()
    over: tuple[str, ...] = ()
    margin: float = 0.0
    value: float | None = None
    direction: Literal["rising", "falling"] = "rising"
    printed: str = ""
    missing: str = ""

    def __post_init__(self) -> None:
        if (self.that in ("flat", "monotone", "interior-minimum")) != bool(self.along):
            expected = f"a path for {self.that!r}" if not self.along else f"no path for {self.that!r}"
            raise ValueError(f"expected {expected}, got along={self.along!r}")
        if (self.that == "equals") != (self.value is not None):
            raise ValueError(f"expected a number for equals alone, got value={self.value}")
        if self.that in ("above", "below", "within") and not (self.a and self.b):
            raise ValueError(f"expected a and b for {self.that!r}")
        if not (math.isfinite(self.margin) and (self.margin >= 0 or self.that in ("above", "below"))):
            raise ValueError(f"expected margin >= 0, got margin={self.margin}")

    @property
    def paths(self) -> set[str]:
        """The paths that the statement names."""
        named = {*self.each, *self.over, self.along} - {""}
        return {path(name) for name in named} | {*flat(self.a), *flat(self.b), *flat(self.at)}


class Judged(NamedTuple):
    """A verdict. `where`: the values of `each`; `measured`: the numbers, in words; `seeds`: how many it would take."""

    statement: Statement
    where: str
    verdict: Verdict
    measured: str
    p: float | None = None
    seeds: int | None = None

    @property
    def text(self) -> str:
        """The statement in words, with the values of `each`."""
        return f"{self.statement.text} ({self.where})" if self.where else self.statement.text


class _Test(NamedTuple):
    """A mean difference of pairs, its standard error, its degrees of freedom, and its seeds."""

    mean: float
    error: float
    df: float
    seeds: int

    def above(self, margin: float) -> float:
        """The p-value of "the mean is at most `margin`"."""
        if self.error == 0:  # computed values, or equal differences of all pairs: then a sign test
            return float(0.5 ** (self.df + 1)) if self.mean > margin else 1.0
        if self.df < 1:
            return 1.0
        return float(special.stdtr(self.df, -(self.mean - margin) / self.error))

    def below(self, margin: float) -> float:
        """The p-value of "the mean is at least `margin`"."""
        return self._replace(mean=-self.mean).above(-margin)

    def within(self, margin: float) -> float:
        """The p-value of "the mean is further than `margin` from zero": two one-sided tests."""
        if self.error == 0 and abs(self.mean) <= margin:
            return float(0.5 ** (self.df + 1))
        return max(self.above(-margin), self.below(margin))

    def outside(self, margin: float) -> float:
        """The p-value of "the mean is within `margin`"."""
        return min(1.0, 2 * min(self.above(margin), self.below(-margin)))

    def takes(self, distance: float, level: float) -> int | None:
        """Number of seeds that would show a mean this far from a bound; None if it cannot be predicted."""
        if self.df < 1 or distance == 0 or not self.error:
            return None
        quantiles = float(special.ndtri(1 - level) + special.ndtri(_POWER))
        return max(self.seeds + 1, math.ceil(self.seeds * (quantiles * self.error / abs(distance)) ** 2))


class _Tests(NamedTuple):
    """The p-values for and against a statement, the numbers in words, and how many seeds a verdict would take.

    for_it: the p-value of the statement's contrary; a small value supports the statement.
    against: the p-value of the statement; a small value contradicts it.
    """

    for_it: float
    against: float
    measured: str
    seeds: int | None


def judge(statements: Sequence[Statement], points: Sequence[Value]) -> list[Judged]:
    """The verdict on each statement, for each value of its `each`."""
    tested: list[tuple[Statement, str, _Tests | str]] = []
    for statement in statements:
        tested += [(statement, where, _tests(made, points)) for where, made in _places(statement, points)]
    tests = [both for _, _, both in tested if not isinstance(both, str)]
    chances = np.array([min(1.0, 2 * min(both.for_it, both.against)) for both in tests])
    adjusted = iter(holm(chances) if tests else chances)
    return [_judged(statement, where, both, adjusted) for statement, where, both in tested]


def _judged(statement: Statement, where: str, tests: _Tests | str, adjusted: Iterator[float]) -> Judged:
    if isinstance(tests, str):
        return Judged(statement, where, Verdict.NOT_RUN, tests)
    p = float(next(adjusted))
    if p > LEVEL:
        return Judged(statement, where, Verdict.UNRESOLVED, tests.measured, p, tests.seeds)
    verdict = Verdict.CONFIRMED if tests.for_it <= tests.against else Verdict.CONTRADICTED
    return Judged(statement, where, verdict, tests.measured, p)


def _places(statement: Statement, points: Sequence[Value]) -> list[tuple[str, Statement]]:
    if statement.missing or not statement.each:
        return [("", statement)]
    ours, other = (select(points, statement.y, statement.at, side) for side in (statement.a, statement.b))
    shared = [name for name in statement.each if any(path(name) in value.at for value in other)]
    places = list[tuple[str, Statement]]()
    for group in grouped(ours, statement.each):
        # a parameter that was added later has no path at its default
        level = {name: "default" if value is None else value for name, value in zip(statement.each, group, strict=True)}
        where = ", ".join(f"{name} {_short(value)}" for name, value in level.items())
        b = {**statement.b, **{name: level[name] for name in shared}}
        places.append((where, replace(statement, a={**statement.a, **level}, b=b)))
    return places or [("", statement)]


def _tests(statement: Statement, points: Sequence[Value]) -> _Tests | str:
    if statement.missing:
        return statement.missing
    try:
        return _compared(statement, points) if not statement.along else _levels(statement, points)
    except (LookupError, ValueError) as error:
        return str(error.args[0])


def _compared(statement: Statement, points: Sequence[Value]) -> _Tests:
    a, margin = _side(statement, points, statement.a), statement.margin
    if statement.value is not None:
        difference = _paired(a, {key: (statement.value, True) for key in a})
        text = f"{statement.y} {_mean(a):.4g}, printed {statement.value:g}; difference {_interval(difference)}"
    else:
        b = _side(statement, points, statement.b)
        difference = _paired(a, b)
        text = f"{statement.y} {_mean(a):.4g} and {_mean(b):.4g}; difference {_interval(difference)}"
    if statement.that in ("above", "below"):
        up = difference if statement.that == "above" else difference._replace(mean=-difference.mean)
        return _Tests(up.above(margin), up.below(margin), text, up.takes(up.mean - margin, LEVEL / 2))
    seeds = difference.takes(abs(difference.mean) - margin, LEVEL / 2)
    return _Tests(difference.within(margin), difference.outside(margin), text, seeds)


def _levels(statement: Statement, points: Sequence[Value]) -> _Tests:
    """The tests of `flat`, `monotone` and `interior-minimum`, from the paired differences of levels along a path."""
    ours = select(points, statement.y, statement.at, statement.a)
    places = [level for level in varied(ours, statement.along) if level is not None]
    if len(places) < (3 if statement.that == "interior-minimum" else 2):
        raise LookupError(f"{statement.y} has {len(places)} values along {statement.along}; more are needed")
    sides = [_side(statement, points, {**statement.a, path(statement.along): level}) for level in places]
    means = [_mean(side) for side in sides]
    text = f"{statement.y} along {statement.along}: "
    text += ", ".join(f"{_short(level)}: {mean:.4g}" for level, mean in zip(places, means, strict=True))
    pairs = {(i, j): _paired(sides[j], sides[i]) for i in range(len(sides)) for j in range(len(sides)) if i != j}
    margin, last = statement.margin, len(sides) - 1
    if statement.that == "flat":
        ordered = [pair for (i, j), pair in pairs.items() if i < j]
        for_it = max(pair.within(margin) for pair in ordered)
        against = min(1.0, len(ordered) * min(pair.outside(margin) for pair in ordered))
        worst = max(ordered, key=lambda pair: abs(pair.mean))
        return _Tests(for_it, against, text, worst.takes(abs(worst.mean) - margin, LEVEL / 2))
    if statement.that == "monotone":
        sign = 1 if statement.direction == "rising" else -1
        steps = [pairs[(i, i + 1) if sign > 0 else (i + 1, i)] for i in range(last)]
        for_it = max(step.above(-margin) for step in steps)
        against = min(1.0, len(steps) * min(step.below(-margin) for step in steps))
        worst = min(steps, key=lambda step: step.mean)
        return _Tests(for_it, against, text, worst.takes(worst.mean + margin, LEVEL / 2))
    inner = range(1, last)
    lower = [max(pairs[i, 0].above(margin), pairs[i, last].above(margin)) for i in inner]
    higher = max(min(1.0, 2 * min(pairs[i, 0].below(margin), pairs[i, last].below(margin))) for i in inner)
    best = min(inner, key=lambda i: means[i])
    worst = min(pairs[best, 0], pairs[best, last], key=lambda pair: pair.mean)
    return _Tests(min(1.0, len(lower) * min(lower)), higher, text, worst.takes(worst.mean - margin, LEVEL / 2))


_Side = dict[tuple[Scalar, ...], tuple[float, bool]]  # by seed and item: a value, and whether it is exact


def _side(statement: Statement, points: Sequence[Value], which: dict[str, Any]) -> _Side:
    """One side of a comparison; LookupError if it has no value, ValueError if values differ beyond seed and item."""
    values = select(points, statement.y, statement.at, which)
    if not values:
        asked = ", ".join(f"{name} is {value}" for name, value in {**statement.at, **which}.items())
        raise LookupError(f"no {statement.y} where {asked or 'anything'}")
    check_alike(values, statement.over)
    groups = grouped(values, ("seed", "item"))
    return {
        key: (float(np.mean([value.value for value in group])), all(value.exact for value in group))
        for key, group in groups.items()
    }


def _paired(a: _Side, b: _Side) -> _Test:
    """The differences of the pairs that both sides have; LookupError if they have none in common."""
    keys = [key for key in a if key in b]
    if not keys:
        raise LookupError("no seed has a value on both sides")
    differences = np.array([a[key][0] - b[key][0] for key in keys])
    seeds = len({seed for seed, _ in keys})
    if all(a[key][1] and b[key][1] for key in keys):
        return _Test(float(differences.mean()), 0.0, math.inf, seeds)
    n = len(differences)
    error = float(np.std(differences, ddof=1)) / math.sqrt(n) if n > 1 else math.nan
    return _Test(float(differences.mean()), error, n - 1, seeds)


def _mean(side: _Side) -> float:
    return float(np.mean([value for value, _ in side.values()]))


def _interval(difference: _Test) -> str:
    mean, error, df, _ = difference
    if df < 1:
        return f"{mean:+.4g}, one seed"
    if math.isinf(df):
        return f"{mean:+.4g}, computed"
    half = float(special.stdtrit(df, 0.975)) * error
    return f"{mean:+.4g} [{mean - half:.4g}, {mean + half:.4g}], n = {df + 1:.0f}"


def _short(level: Scalar) -> str:
    return f"{level:g}" if isinstance(level, float) else str(level)
