"""The changes since the baseline, worst first, each with its interval."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from leakgauge.harness.core.cases import gathered
from leakgauge.harness.core.labels import Label, counted, label_parts
from leakgauge.harness.core.metrics import metric
from leakgauge.harness.gate.baseline import Baseline
from leakgauge.harness.gate.judge import Check, Outcome, Verdict
from leakgauge.harness.gate.measure import Measure, Measured
from leakgauge.harness.gate.output import ICONS, headline, pictured, word
from leakgauge.reports.sections import Section
from leakgauge.reports.select import Analysis
from leakgauge.reports.text.notation import NO_VALUE, fixed, percent, points

MOST = 200
"""Largest number of rows that a page shows; further rows are only counted."""

WIDTH = 180
"""Width of a change's drawing, in its own units."""

_TONES = dict(zip(Verdict, ("bad", "bad", "warn", "warn", "warn", "info"), strict=True))
_SEEN = 0.0005
"""The smallest change that shows at three decimals."""


class Against(NamedTuple):
    """A finished comparison: the gate's outcome, the measures of the run, and the baseline."""

    outcome: Outcome
    now: Measured
    base: Baseline


class Scale(NamedTuple):
    """The range of a metric's drawings."""

    low: float
    high: float

    def place(self, value: float) -> str:
        """Position of a value in the drawing."""
        return f"{WIDTH * (value - self.low) / (self.high - self.low):.1f}"


def changes(outcome: Outcome, now: Measured, base: Baseline) -> dict[str, object]:
    """The checks with a clear change, the number of the other checks, and the notes on the whole comparison."""
    clear = [check for check in outcome.checks if moved(check)]
    shown, measures = clear[:MOST], base.measured.by_key() | now.by_key()
    names = label_parts(part for measure in measures.values() for part in measure.parts)
    scales = _scales(shown)
    still, total = len(outcome.checks) - len(clear), counted(len(outcome.checks), "check")
    return {
        "headline": headline(outcome),
        "icon": ICONS[outcome.verdict],
        "sources": f"{base.measured.study} at commit {_commits(base.measured)}, now {_commits(now)}",
        "reason": base.reason,
        "problems": outcome.problems,
        "warnings": outcome.warnings,
        "rows": [_row(check, measures.get(check.key), scales.get(check.metric), names) for check in shown],
        "hidden": len(clear) - len(shown),
        "unmoved": f"{still} of {total} without a clear change." if outcome.checks else "",
        "scales": [f"{metric(name).words} {_range(name, scale.low, scale.high)}" for name, scale in scales.items()],
    }


SECTION = Section[Analysis](
    "changes", "Changes since the baseline", "Changes", lambda seen: seen.against and changes(*seen.against), 10
)


def moved(check: Check) -> bool:
    """Whether a check gets a row: it did not pass, or its interval excludes zero, or it changed and has no interval."""
    if check.verdict is not Verdict.PASS:
        return True
    if check.rise is None or abs(check.rise) < _SEEN:
        return False
    return check.low is None or check.high is None or check.low > 0 or check.high < 0


def _row(check: Check, measure: Measure | None, scale: Scale | None, names: Mapping[str, Label]) -> dict[str, object]:
    """One row. `tone` colors the verdict, and icon and word repeat it; `case` is attack, adversary and target."""
    defense, case = check.name, ""
    if measure is not None:
        defense, attack = (*(names[part.key].text for part in measure.parts), "")[:2]
        case = ", ".join(filter(None, (attack, measure.threat, measure.target)))
    name = check.metric
    ends = None if check.low is None or check.high is None else (check.low, check.high)
    interval = _range(name, *ends) if ends is not None else ""
    icon, words = ICONS[check.verdict], word(check)
    if check.verdict is Verdict.PASS and check.rise is not None:  # then they give the direction of the change
        icon, words = ("↓", metric(name).fell) if check.rise < 0 else ("↑", metric(name).rose)
    plot = None
    if scale is not None and check.rise is not None:
        spoken = f"change {_rise(name, check.rise)}" + (f", 90 % interval {interval}" if interval else "")
        low, high = (None, None) if ends is None else map(scale.place, ends)
        plot = {"zero": scale.place(0.0), "at": scale.place(check.rise), "low": low, "high": high, "label": spoken}
    return {
        "tone": _TONES[check.verdict],
        "icon": icon,
        "word": words,
        "defense": defense,
        "case": case,
        "metric": metric(name).words,
        "aware": check.aware,
        "before": percent(check.before) if metric(name).percent else fixed(check.before),
        "now": percent(check.now) if metric(name).percent else fixed(check.now),
        "rise": _rise(name, check.rise),
        "interval": interval,
        "plot": plot,
        "images": pictured(check.images, measure),
        "n": check.n,
        "smallest": _rise(name, check.smallest).lstrip("+") if check.smallest is not None else "",
        "reason": f"{check.reason[:1].upper()}{check.reason[1:].rstrip('.')}." if check.reason else "",
    }


def _scales(checks: Iterable[Check]) -> dict[str, Scale]:
    """One scale per metric, which includes zero, all changes and all ends of their intervals."""
    clear = [check for check in checks if check.rise is not None]
    every = gathered((check.metric, end) for check in clear for end in (check.rise, check.low, check.high))
    scales = {}
    for name, ends in every.items():
        reach = [0.0, *(end for end in ends if end is not None)]
        room = 0.08 * (max(reach) - min(reach)) or 1.0
        scales[name] = Scale(min(reach) - room, max(reach) + room)
    return scales


def _rise(name: str, value: float | None) -> str:
    """A change of a metric with its sign; a change of a percentage is in points."""
    if value is None:
        return NO_VALUE
    if metric(name).percent:
        return f"{points(value)} points"
    text = fixed(value)
    return f"+{text}" if value > 0 and text.strip("0.") else text


def _range(name: str, low: float, high: float) -> str:
    """The range between two changes of a metric, with the unit once."""
    return f"{_rise(name, low).removesuffix(' points')} to {_rise(name, high)}"


def _commits(measured: Measured) -> str:
    short = ", ".join(commit[:10] for commit in measured.commit.split(", "))
    return f"{short or 'unknown'}{' (dirty)' if measured.dirty else ''}"
