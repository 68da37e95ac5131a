"""Published statements, checked on the values of a run: above, below, within, equals, flat, monotone, interior minimum.

Both sides are paired over seeds and items. A statement gets one verdict; the values of its `each` are its evidence: the
mean over them decides, and one that contradicts it by itself counts. A verdict needs a test at 5 %, adjusted by Holm's
method over all published statements of a study, and apart over our own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
from scipy import special

from leakgauge.harness.core.cell import Scalar
from leakgauge.harness.core.stats import holm
from leakgauge.harness.query.points import Paths, Value, allows, check_alike, flat, grouped, path, select, varied

LEVEL = 0.05
"""Bound on the probability that any statement of a study gets a wrong verdict, if differences are normal."""

_POWER, _ROUNDING = 0.8, 1e-12
Kind = Literal["above", "below", "within", "equals", "flat", "monotone", "interior-minimum"]


class Verdict(StrEnum):
    """The result of testing a statement.

    `CONTRADICTED`: on average over `each`; or the average decides nothing, and the contrary is shown, by more than
    `Statement.equal`, at some values, and the statement at none. `IN PART`: confirmed on average, but at some values of
    `each` the mean is on the other side by more than `Statement.equal`; or the average decides nothing, and the
    contrary is shown at some values and the statement at others.
    `EQUAL`: one side should be above the other, but their difference, on average over `each`, is shown to be smaller
    than `Statement.equal`, and at no value of `each` the mean is larger.
    """

    CONFIRMED = "CONFIRMED"
    IN_PART = "IN PART"
    EQUAL = "EQUAL"
    CONTRADICTED = "CONTRADICTED"
    UNRESOLVED = "UNRESOLVED"
    NOT_RUN = "NOT RUN"


DECIDED = (Verdict.CONFIRMED, Verdict.IN_PART, Verdict.EQUAL, Verdict.CONTRADICTED)
"""The verdicts that a test shows."""


@dataclass(frozen=True)
class Best:
    """The best along a path: the place where the mean of y is least or greatest, or that mean."""

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}
    along: str
    of: Literal["min", "max"] = "min"
    show: Literal["where", "value"] = "value"


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
        each: paths; the evidence is taken at each of their values in a, and at the same in b if b has the path.
        best: side b is where the mean of y is least or greatest along a path.
        over: paths besides seed and item over which y is averaged.
        margin: in the unit of the quantity.
        value: the value of `equals`, as the source prints it; for `above` and `below`, a number instead of side b.
        direction: the direction of `monotone`.
        equal: a difference that counts as none, in the unit of the quantity.
        own: whether the statement is ours, and not published.
        quote: the source's words, and where they stand.
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
    best: Best | None = None
    margin: float = 0.0
    value: float | None = None
    direction: Literal["rising", "falling"] = "rising"
    equal: float = 0.01
    own: bool = False
    quote: str = ""
    printed: str = ""
    missing: str = ""

    def __post_init__(self) -> None:
        if (self.that in ("flat", "monotone", "interior-minimum")) != bool(self.along):
            expected = f"a path for {self.that!r}" if not self.along else f"no path for {self.that!r}"
            raise ValueError(f"expected {expected}, got along={self.along!r}")
        if self.that == "equals" and self.value is None:
            raise ValueError("expected a number for equals, got value=None")
        if self.value is not None and (self.b or self.that not in ("above", "below", "equals")):
            raise ValueError(f"expected no value with b or {self.that!r}, got value={self.value}")
        if self.that in ("above", "below", "within") and not (self.a and (self.b or self.value is not None)):
            raise ValueError(f"expected a and b for {self.that!r}, or a and a value")
        if self.best is not None and not self.b:
            raise ValueError("expected b with best: it is the side at its best")
        if not (math.isfinite(self.margin) and (self.margin >= 0 or self.that in ("above", "below"))):
            raise ValueError(f"expected margin >= 0, got margin={self.margin}")
        flat(self.a), flat(self.b), flat(self.at)  # refuse what is no filter

    @property
    def paths(self) -> set[str]:
        """The paths that the statement names."""
        named = {*self.each, *self.over, self.along, self.best.along if self.best else ""} - {""}
        return {path(name) for name in named} | {*flat(self.a), *flat(self.b), *flat(self.at)}

    def asks(self, at: Paths) -> bool:
        """Whether a question with these paths may give evidence; a filter on a path that it lacks asks nothing."""
        sides = [flat(self.at) | flat(side) for side in ((self.a, self.b) if self.b else (self.a,))]
        return any(all(name not in at or allows(asked, at[name]) for name, asked in side.items()) for side in sides)


class Evidence(NamedTuple):
    """What one value of `each` shows: this value, the numbers in words, and the verdict that it would give alone."""

    where: str
    measured: str
    verdict: Verdict


class Judged(NamedTuple):
    """A verdict. `measured`: the numbers, in words; `seeds`: how many it would take; `evidence`: by value of `each`."""

    statement: Statement
    verdict: Verdict
    measured: str
    p: float | None = None
    seeds: int | None = None
    evidence: tuple[Evidence, ...] = ()


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
    """The p-values of a statement, the numbers in words, and how many seeds a verdict would take.

    for_it: the p-value of the statement's contrary; a small value supports the statement.
    against: the p-value of the statement; a small value contradicts it.
    far: the same by more than `Statement.equal`.
    equal: the p-value of "the two sides differ"; None: the statement is not that one side is above the other.
    near: whether the mean difference is below `Statement.equal`.
    """

    for_it: float
    against: float
    measured: str
    seeds: int | None
    far: float
    equal: float | None = None
    near: bool = True


def judge(statements: Sequence[Statement], points: Sequence[Value], level: float = LEVEL) -> list[Judged]:
    """The verdict on each statement; `level` bounds the chance of a wrong one, of published statements and of ours."""
    found = [_Found.of(statement, points) for statement in statements]
    for own in (False, True):
        tested = [(one, name) for one in found if one.statement.own == own for name in one.p]
        adjusted = holm(np.array([one.p[name] for one, name in tested])) if tested else ()
        for (one, name), p in zip(tested, adjusted, strict=True):
            one.p[name] = float(p)
    return [one.judged(level) for one in found]


@dataclass
class _Found:
    """The evidence for a statement.

    Attributes:
        pooled: the tests of the mean over its cells; None: no cell can be tested.
        p: the p-values of `for_it`, `against`, and if there may be such a verdict, `equal` and `far` (of one cell).
    """

    statement: Statement
    cells: list[tuple[str, _Tests | str]]
    pooled: _Tests | None
    p: dict[str, float]

    @classmethod
    def of(cls, statement: Statement, points: Sequence[Value]) -> _Found:
        cells, sides = list[tuple[str, _Tests | str]](), list[_Sides]()
        for where, made in _places(statement, points):
            try:
                side = _sides(made, points)
                cells.append((where, _tests(made, side)))
                sides.append(side)
            except (LookupError, ValueError) as error:
                cells.append((where, str(error.args[0])))
        known = [tests for _, tests in cells if not isinstance(tests, str)]
        try:
            pooled = _pooled(statement, sides)
        except LookupError as error:
            return cls(statement, [*cells, *([("", str(error.args[0]))] if known else [])], None, {})
        p = {"for_it": pooled.for_it, "against": pooled.against}
        if statement.that in ("within", "equals", "flat"):
            p["for_it"] = max(tests.for_it for tests in known)  # differences of both signs have a mean near zero
        if pooled.equal is not None:
            p["equal"] = pooled.equal if all(tests.near for tests in known) else 1.0
        if len(known) > 1:
            p["far"] = min(1.0, len(known) * min(tests.far for tests in known))
        return cls(statement, cells, pooled, p)

    def judged(self, level: float) -> Judged:
        evidence = tuple(_evidence(where, tests, level / len(self.cells)) for where, tests in self.cells)
        lacks = dict.fromkeys(tests for _, tests in self.cells if isinstance(tests, str))
        if self.pooled is None:
            return Judged(self.statement, Verdict.NOT_RUN, "; ".join(lacks), evidence=evidence)
        shown = {name for name, p in self.p.items() if p <= level}
        off = any(not isinstance(tests, str) and tests.far < 0.5 for _, tests in self.cells)
        verdict = Verdict.UNRESOLVED
        if "for_it" in shown:
            verdict = Verdict.IN_PART if off else Verdict.CONFIRMED
        elif "equal" in shown and "far" not in shown:
            verdict = Verdict.EQUAL
        elif "against" in shown:
            verdict = Verdict.CONTRADICTED
        elif "far" in shown:
            some = any(cell.verdict is Verdict.CONFIRMED for cell in evidence)
            verdict = Verdict.IN_PART if some else Verdict.CONTRADICTED
        if lacks and verdict in (Verdict.CONFIRMED, Verdict.EQUAL):
            verdict = Verdict.UNRESOLVED
        many = len(self.cells) > 1
        counts = {kind: sum(cell.verdict is kind for cell in evidence) for kind in Verdict}
        alone = ", ".join(f"{n} {str(kind).lower()}" for kind, n in counts.items() if n)
        measured = f"{self.pooled.measured}{f'; each of {len(self.cells)} by itself: {alone}' if many else ''}"
        seeds = self.pooled.seeds if verdict is Verdict.UNRESOLVED else None
        return Judged(self.statement, verdict, measured, min(self.p.values()), seeds, evidence if many else ())


def _evidence(where: str, tests: _Tests | str, level: float) -> Evidence:
    if isinstance(tests, str):
        return Evidence(where, tests, Verdict.NOT_RUN)
    kinds = (
        (Verdict.CONFIRMED, tests.for_it),
        (Verdict.EQUAL, 1.0 if tests.equal is None else tests.equal),
        (Verdict.CONTRADICTED, tests.against),
    )
    verdict = next((kind for kind, p in kinds if 3 * p <= level), Verdict.UNRESOLVED)
    return Evidence(where, tests.measured, verdict)


def _places(statement: Statement, points: Sequence[Value]) -> list[tuple[str, Statement]]:
    if statement.missing or not statement.each:
        return [("", statement)]
    ours, other = (select(points, statement.y, statement.at, side) for side in (statement.a, statement.b))
    shared = [name for name in statement.each if statement.b and any(path(name) in value.at for value in other)]
    places = list[tuple[str, Statement]]()
    for group in grouped(ours, statement.each):
        # a parameter that was added later has no path at its default
        level = {name: "default" if value is None else value for name, value in zip(statement.each, group, strict=True)}
        where = ", ".join(f"{name} {_short(value)}" for name, value in level.items())
        b = {**statement.b, **{name: level[name] for name in shared}}
        places.append((where, replace(statement, a={**statement.a, **level}, b=b)))
    return places or [("", statement)]


_Side = dict[tuple[Scalar, ...], tuple[float, bool]]  # by seed and item: a value, and whether it is exact
_Sides = dict[Scalar, _Side]  # by the level along the statement's path; else ours and the others
_OURS = "\0"  # no level of a path has this name


def _sides(statement: Statement, points: Sequence[Value]) -> _Sides:
    if statement.missing:
        raise LookupError(statement.missing)
    if statement.along:
        ours = select(points, statement.y, statement.at, statement.a)
        levels = [level for level in varied(ours, statement.along) if level is not None]
        if len(levels) < (3 if statement.that == "interior-minimum" else 2):
            raise LookupError(f"{statement.y} has {len(levels)} values along {statement.along}; more are needed")
        return {level: _side(statement, points, {**statement.a, path(statement.along): level}) for level in levels}
    a = _side(statement, points, statement.a)
    if statement.value is not None:
        return {_OURS: a, "b": {key: (statement.value, True) for key in a}}
    if statement.best is None:
        return {_OURS: a, "b": _side(statement, points, statement.b)}
    along = path(statement.best.along)
    places = tuple(varied(select(points, statement.y, statement.at, statement.b), along))
    return {_OURS: a, **{level: _side(statement, points, {**statement.b, along: level}) for level in places}}


def _pooled(statement: Statement, sides: Sequence[_Sides]) -> _Tests:
    """The tests of the mean over cells, of the seeds and items that all of them have; LookupError if there are none."""
    if not sides:
        raise LookupError("no value")
    if any(each.keys() != sides[0].keys() for each in sides):
        raise LookupError("the points of the statement have other values along its path, so no mean is tested")
    return _tests(statement, {level: _averaged([each[level] for each in sides]) for level in sides[0]})


def _averaged(sides: Sequence[_Side]) -> _Side:
    keys = [key for key in sides[0] if all(key in side for side in sides)]
    return {
        key: (float(np.mean([side[key][0] for side in sides])), all(side[key][1] for side in sides)) for key in keys
    }


def _tests(statement: Statement, sides: _Sides) -> _Tests:
    return _levels(statement, sides) if statement.along else _compared(statement, sides)


def _compared(statement: Statement, sides: _Sides) -> _Tests:
    """The tests of a and b; with `best`, of a and each level of b: which is best is known only from these data."""
    others = {level: side for level, side in sides.items() if level != _OURS}
    if not others:
        raise LookupError(f"no {statement.y} on the other side")
    found = [_pair(statement, sides[_OURS], side) for side in others.values()]
    if statement.best is None:
        return found[0]
    means, least = list(map(_mean, others.values())), statement.best.of == "min"
    one, n = found[means.index((min if least else max)(means))], len(found)
    each, some = max(tests.for_it for tests in found), min(1.0, n * min(tests.for_it for tests in found))
    against, far = (min(1.0, n * min(getattr(tests, name) for tests in found)) for name in ("against", "far"))
    if (statement.that == "below") != least:  # to be above the least level, it is enough to be above one
        each, against, far = some, max(t.against for t in found), max(t.far for t in found)
    return one._replace(for_it=each, against=against, far=far, equal=one.equal and min(1.0, n * one.equal))


def _pair(statement: Statement, a: _Side, b: _Side) -> _Tests:
    margin, equal, difference = statement.margin, statement.equal, _paired(a, b)
    other = f", printed {statement.value:g}" if statement.that == "equals" else f" and {_mean(b):.4g}"
    text = f"{statement.y} {_mean(a):.4g}{other}; difference {_interval(difference)}"
    if statement.that in ("above", "below"):
        up = difference if statement.that == "above" else difference._replace(mean=-difference.mean)
        alike = up.within(equal) if abs(margin) < equal else None
        seeds = up.takes(up.mean - margin, LEVEL / 2)
        near = alike is not None and alike < 0.5
        return _Tests(up.above(margin), up.below(margin), text, seeds, up.below(margin - equal), alike, near)
    seeds = difference.takes(abs(difference.mean) - margin, LEVEL / 2)
    against = difference.outside(margin)
    return _Tests(difference.within(margin), against, text, seeds, difference.outside(margin + equal))


def _levels(statement: Statement, sides: _Sides) -> _Tests:
    """The tests of `flat`, `monotone` and `interior-minimum`, from the paired differences of levels along a path."""
    curve, means = list(sides.values()), [_mean(side) for side in sides.values()]
    text = f"{statement.y} along {statement.along}: "
    text += ", ".join(f"{_short(level)}: {mean:.4g}" for level, mean in zip(sides, means, strict=True))
    pairs = {(i, j): _paired(curve[j], curve[i]) for i in range(len(curve)) for j in range(len(curve)) if i != j}
    margin, far, last = statement.margin, statement.margin + statement.equal, len(curve) - 1
    if statement.that == "flat":
        ordered = [pair for (i, j), pair in pairs.items() if i < j]
        for_it = max(pair.within(margin) for pair in ordered)
        beyond = [min(1.0, len(ordered) * min(pair.outside(by) for pair in ordered)) for by in (margin, far)]
        worst = max(ordered, key=lambda pair: abs(pair.mean))
        return _Tests(for_it, beyond[0], text, worst.takes(abs(worst.mean) - margin, LEVEL / 2), beyond[1])
    if statement.that == "monotone":
        sign = 1 if statement.direction == "rising" else -1
        steps = [pairs[(i, i + 1) if sign > 0 else (i + 1, i)] for i in range(last)]
        for_it = max(step.above(-margin) for step in steps)
        beyond = [min(1.0, len(steps) * min(step.below(-by) for step in steps)) for by in (margin, far)]
        worst = min(steps, key=lambda step: step.mean)
        return _Tests(for_it, beyond[0], text, worst.takes(worst.mean + margin, LEVEL / 2), beyond[1])
    inner = range(1, last)
    lower = [max(pairs[i, 0].above(margin), pairs[i, last].above(margin)) for i in inner]
    higher = [
        max(min(1.0, 2 * min(pairs[i, 0].below(by), pairs[i, last].below(by))) for i in inner)
        for by in (margin, margin - statement.equal)
    ]
    best = min(inner, key=lambda i: means[i])
    worst = min(pairs[best, 0], pairs[best, last], key=lambda pair: pair.mean)
    for_it = min(1.0, len(lower) * min(lower))
    return _Tests(for_it, higher[0], text, worst.takes(worst.mean - margin, LEVEL / 2), higher[1])


def _side(statement: Statement, points: Sequence[Value], which: dict[str, Any]) -> _Side:
    """One side of a comparison; LookupError if it has no value, ValueError if values differ beyond seed and item."""
    values = select(points, statement.y, statement.at, which)
    if not values:
        asked = ", ".join(f"{name} is {value}" for name, value in {**statement.at, **which}.items())
        raise LookupError(f"no {statement.y} where {asked or 'anything'}")
    check_alike(values, statement.over)
    if not all(math.isfinite(value.value) for value in values if not value.exact):
        raise LookupError(f"{statement.y} is not finite in some seeds")
    groups = grouped(values, ("seed", "item"))
    return {
        key: (float(np.mean([value.value for value in group])), all(value.exact for value in group))
        for key, group in groups.items()
    }


def _paired(a: _Side, b: _Side) -> _Test:
    """The differences of the pairs that both sides have, averaged over the items of a seed if there are several seeds.

    A computed side without seeds is paired with every seed. LookupError if they have no pair.
    """
    lone = (None, None)
    keys = [key for key in a if key in b] or [key for key in (*a, *b) if lone in (*a, *b) and key != lone]
    if not keys:
        raise LookupError("no seed has a value on both sides")
    pairs = [(a.get(key) or a[lone], b.get(key) or b[lone]) for key in keys]
    differences = np.array([mine[0] - other[0] for mine, other in pairs])
    seeds = list(dict.fromkeys(seed for seed, _ in keys))
    if len(seeds) > 1:  # the items of a seed share its model
        differences = np.array([differences[[seed == key[0] for key in keys]].mean() for seed in seeds])
    size = max(abs(value) for pair in pairs for value, _ in pair)
    alike = float(np.ptp(differences)) <= _ROUNDING * size
    if alike and all(exact for pair in pairs for _, exact in pair):
        return _Test(float(differences.mean()), 0.0, math.inf, len(seeds))
    n = len(differences)
    error = 0.0 if alike and n > 1 else float(np.std(differences, ddof=1)) / math.sqrt(n) if n > 1 else math.nan
    return _Test(float(differences.mean()), error, n - 1, len(seeds))


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
