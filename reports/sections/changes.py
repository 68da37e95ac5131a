"""Section 2: what changed since the baseline, worst first, each change with its interval."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from leakgauge.harness.gate.baseline import Baseline
from leakgauge.harness.gate.judge import Check, Outcome, Verdict
from leakgauge.harness.gate.measure import Measure, Measured
from leakgauge.harness.gate.output import ICONS, headline, pictured, word
from leakgauge.reports.text.notation import NO_VALUE, fixed, metric, percent, plural, points

MOST = 200
"""Rows that a page shows; the others are counted."""

WIDTH = 180
"""Of a change's drawing, in its own units."""

_METRICS = {
    "accuracy": "final accuracy",
    "bits": "bits per parameter",
    "epsilon": "audited ε, lower bound; unit, horizon and δ with its claim",
}
_FALLS = {"accuracy": "within tolerance", "bits": "fewer bits sent", "epsilon": "audited ε fell"}
_RISES = {"accuracy": "accuracy rose"}
_TONES = {
    Verdict.FAIL: "bad",
    Verdict.INCOMPLETE: "bad",
    Verdict.NOT_COMPARABLE: "warn",
    Verdict.INCONCLUSIVE: "warn",
    Verdict.PASS: "info",
}
_SEEN = 0.0005
"""A change that is none at three decimals did not move."""


class Against(NamedTuple):
    """A finished comparison: what the gate says of a run, the run's measures, and what it was held against."""

    outcome: Outcome
    now: Measured
    base: Baseline


class Plot(NamedTuple):
    """Where zero, the change and the ends of its interval lie, of `WIDTH`; ends are None without an interval."""

    zero: str
    at: str
    low: str | None
    high: str | None
    label: str


class Scale(NamedTuple):
    """What a drawing of a metric reaches from and to."""

    low: float
    high: float

    def place(self, value: float) -> str:
        """Where a value lies in the drawing."""
        return f"{WIDTH * (value - self.low) / (self.high - self.low):.1f}"


class Change(NamedTuple):
    """One row. `tone` colors the verdict, which its icon and word say too; `case` is the attack and its target."""

    tone: str
    icon: str
    word: str
    defense: str
    case: str
    metric: str
    aware: bool
    before: str
    now: str
    rise: str
    interval: str
    plot: Plot | None
    images: str
    n: int
    smallest: str
    reason: str


class Changes(NamedTuple):
    """The section.

    Attributes:
        rows: the checks that moved, worst first.
        hidden: moved checks beyond those.
        unmoved: a sentence that counts the others.
        scales: what the drawings of each metric reach, in words.
    """

    headline: str
    icon: str
    sources: str
    reason: str
    problems: tuple[str, ...]
    warnings: tuple[str, ...]
    rows: tuple[Change, ...]
    hidden: int
    unmoved: str
    scales: tuple[str, ...]


def changes(outcome: Outcome, now: Measured, base: Baseline, *, names: Mapping[str, str] | None = None) -> Changes:
    """What moved, what did not, and what a reader must know of the comparison.

    Args:
        names: how the page calls a defense or an attack, by its full label; others keep that.

    A check moved if it is no PASS, or if the interval of its change leaves out zero; without one, if it changed at all.
    """
    found = [check for check in outcome.checks if moved(check)]
    shown, measures = found[:MOST], base.measured.by_key() | now.by_key()
    scales = _scales(shown)
    still = len(outcome.checks) - len(found)
    return Changes(
        headline=headline(outcome),
        icon=ICONS[outcome.verdict],
        sources=_sources(now, base),
        reason=base.reason,
        problems=outcome.problems,
        warnings=outcome.warnings,
        rows=tuple(_row(check, measures.get(check.key), scales.get(check.metric), names or {}) for check in shown),
        hidden=len(found) - len(shown),
        unmoved=f"{still} of {plural(len(outcome.checks), 'check')} did not move." if outcome.checks else "",
        scales=tuple(f"{_metric(name)} {_range(name, scale.low, scale.high)}" for name, scale in scales.items()),
    )


def moved(check: Check) -> bool:
    """Whether a check deserves a row."""
    if check.verdict is not Verdict.PASS:
        return True
    if check.rise is None or abs(check.rise) < _SEEN:
        return False
    return check.low is None or check.high is None or check.low > 0 or check.high < 0


def _row(check: Check, measure: Measure | None, scale: Scale | None, names: Mapping[str, str]) -> Change:
    """One row of the table."""
    defense, case = check.name, ""
    if measure is not None:
        defense, attack = (names.get(label, label) for label in (measure.defense, measure.attack))
        case = ", ".join(filter(None, (attack, measure.threat, measure.target)))
    name = check.metric
    ends = None if check.low is None or check.high is None else (check.low, check.high)
    interval = _range(name, *ends) if ends is not None else ""
    return Change(
        tone=_TONES[check.verdict],
        icon=_icon(check),
        word=_word(check),
        defense=defense,
        case=case,
        metric=_metric(name),
        aware=check.aware,
        before=_value(name, check.before),
        now=_value(name, check.now),
        rise=_rise(name, check.rise),
        interval=interval,
        plot=None if scale is None or check.rise is None else _plot(check, check.rise, ends, scale, interval),
        images=pictured(check.images, measure),
        n=check.n,
        smallest=_rise(name, check.smallest).lstrip("+") if check.smallest is not None else "",
        reason=_sentence(check.reason),
    )


def _plot(check: Check, rise: float, ends: tuple[float, float] | None, scale: Scale, interval: str) -> Plot:
    """The drawing of one change."""
    spoken = f"change {_rise(check.metric, rise)}" + (f", 90 % interval {interval}" if interval else "")
    low, high = (None, None) if ends is None else (scale.place(ends[0]), scale.place(ends[1]))
    return Plot(scale.place(0.0), scale.place(rise), low, high, spoken)


def _scales(checks: Iterable[Check]) -> dict[str, Scale]:
    """For each metric one scale around zero that holds all its changes and their ends."""
    reach: dict[str, list[float]] = {}
    for check in checks:
        if check.rise is not None:
            ends = [end for end in (check.low, check.high) if end is not None]
            reach.setdefault(check.metric, [0.0]).extend([check.rise, *ends])
    found = {}
    for name, values in reach.items():
        low, high = min(values), max(values)
        room = 0.08 * (high - low) or 1.0
        found[name] = Scale(low - room, high + room)
    return found


def _word(check: Check) -> str:
    """The verdict in words; of a pass which way it moved."""
    if check.verdict is not Verdict.PASS or check.rise is None:
        return word(check)
    if check.rise < 0:
        return _FALLS.get(check.metric, "leakage decreased")
    return _RISES.get(check.metric, "within tolerance")


def _icon(check: Check) -> str:
    """Of a pass an arrow, else the verdict's."""
    if check.verdict is not Verdict.PASS or check.rise is None:
        return ICONS[check.verdict]
    return "↓" if check.rise < 0 else "↑"


def _metric(name: str) -> str:
    """The name of a metric for people."""
    return _METRICS.get(name, metric(name))


def _value(name: str, value: float | None) -> str:
    """A value of a metric; shares of the test set as a percentage."""
    return percent(value) if name == "accuracy" else fixed(value)


def _rise(name: str, value: float | None) -> str:
    """A change of a metric with its sign; of accuracy in percentage points."""
    if value is None:
        return NO_VALUE
    if name == "accuracy":
        return f"{points(value)} points"
    text = fixed(value)
    return f"+{text}" if value > 0 and text.strip("0.") else text


def _range(name: str, low: float, high: float) -> str:
    """Two changes of a metric, their unit once."""
    return f"{_rise(name, low).removesuffix(' points')} to {_rise(name, high)}"


def _sentence(text: str) -> str:
    """With a capital and a full stop."""
    return f"{text[:1].upper()}{text[1:].rstrip('.')}." if text else ""


def _sources(now: Measured, base: Baseline) -> str:
    """Which code is held against which."""
    before = base.measured
    return f"{before.study} at commit {_commits(before)}, now {_commits(now)}"


def _commits(measured: Measured) -> str:
    """Short commits of a run, and whether they tell all of its code."""
    short: Sequence[str] = [commit[:10] for commit in measured.commit.split(", ")]
    return f"{', '.join(short) or 'unknown'}{' (dirty)' if measured.dirty else ''}"
