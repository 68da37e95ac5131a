"""ROC curves of membership attacks on two log axes: how many members are found at few false alarms."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from leakgauge.harness.core import stats
from leakgauge.harness.core.result import Estimate, Scores
from leakgauge.reports.charts.figures import LEAK_BETTER, Chart, Point, Series, slug
from leakgauge.reports.charts.rounds import looks
from leakgauge.reports.pool import pool
from leakgauge.reports.select import Analysis, Group
from leakgauge.reports.text.notation import NO_VALUE, fixed, listing, plural, short, where

RATES = (0.01, 0.001)
"""False-positive rates at which a point is marked."""

LEAST_RATE = 1e-4
"""Where the axes begin at the earliest."""

_SPAN = (340.0, 190.0)
"""About the width and height of the axes, in points."""

_UNSEEN = 0.35
"""How far, in points, a line may lie off its corners: a fifth of its width."""


class Trained(NamedTuple):
    """The scores that one training was attacked with."""

    seed: int
    scores: Scores


class Line(NamedTuple):
    """One defense under its strongest attack, with the trainings whose scores can be read."""

    group: Group
    trained: tuple[Trained, ...]

    @property
    def members(self) -> int:
        """Of all trainings together."""
        return sum(len(one.scores.members) for one in self.trained)

    @property
    def outside(self) -> int:
        """Of the training with the most."""
        return max((len(one.scores.outside) for one in self.trained), default=0)


def roc_charts(analysis: Analysis, setting: str) -> list[Chart]:
    """One chart for each target: a line a defense, under the attack with the highest AUC."""
    groups = [g for g in analysis.attacked if g.setting == setting and g.metric == "auc" and g.value is not None]
    charts, targets = [], list(dict.fromkeys(group.column.target for group in groups))
    for target in targets:
        rows = [[g for g in groups if g.column.target == target and g.defense.label == d] for d in analysis.defenses]
        best = [group for group in (analysis.best(row) for row in rows) if group is not None]
        lines = [Line(group, _trained(analysis, group)) for group in best]
        if any(line.trained for line in lines):
            charts.append(_chart(analysis, lines, where(target), f" ({where(target)})" * (len(targets) > 1)))
    return charts


def _trained(analysis: Analysis, group: Group) -> tuple[Trained, ...]:
    """The trainings of a group whose scores can be read and are numbers."""
    found = [(result.cell.training.seed, analysis.run.scores(result.cell.id)) for result in group.results]
    return tuple(Trained(seed, scores) for seed, scores in found if scores is not None and _is_usable(scores))


def _is_usable(scores: Scores) -> bool:
    """Whether there are finite scores of both sides."""
    sides = (scores.members, scores.outside)
    return all(len(side) > 0 and bool(np.isfinite(side).all()) for side in sides)


def vertical_average(trained: Sequence[Scores]) -> stats.Roc:
    """The share of the members of all trainings that is found, where each training has a threshold of its own.

    Returns:
        Corners of steps: from each false-positive rate on, up to the next, that share is what a threshold attains.

    Guarantees:
        At each rate the number of members found is the sum over the trainings of what `stats.tpr_at_fpr` counts.
        Of one training the corners are those of its ROC curve, but for the lower ends of vertical steps.
    """
    curves = [stats.roc(one.members, one.outside) for one in trained]
    rates = np.unique(np.concatenate([curve.fpr for curve in curves]))
    found = np.zeros(len(rates))
    for curve, one in zip(curves, trained, strict=True):
        found += len(one.members) * curve.tpr[np.searchsorted(curve.fpr, rates, side="right") - 1]
    return stats.Roc(rates, found / sum(len(one.members) for one in trained))


def staircase(curve: stats.Roc, least: float) -> stats.Numbers:
    """The corners [k, 2] of the steps of a curve where both rates are at least `least`, for log axes."""
    rates, shares = np.maximum(curve.fpr, least), np.maximum(curve.tpr, least)
    # of the corners at or left of the edge the last one is where the line enters
    first = max(0, int(np.searchsorted(curve.fpr, least, side="right")) - 1)
    x, y = rates[first:], shares[first:]
    corners: stats.Numbers = np.stack([np.repeat(x, 2)[1:], np.repeat(y, 2)[:-1]], -1)
    moved = np.any(np.diff(corners, axis=0) != 0, axis=1)
    corners = corners[np.concatenate([[True], moved])]
    return corners[max(0, int(np.sum(corners[:, 1] <= least)) - 1) :]


def thinned(corners: stats.Numbers, tolerance: float) -> stats.Numbers:
    """Some of the corners [k, 2] of a line, the ends among them; no other lies more than `tolerance` off the new line.

    Source: Ramer 1972; Douglas, Peucker 1973.
    """
    kept = np.zeros(len(corners), dtype=bool)
    kept[[0, -1]] = True
    spans = [(0, len(corners) - 1)]
    while spans:
        first, last = spans.pop()
        if last - first < 2:
            continue
        chord, offsets = corners[last] - corners[first], corners[first + 1 : last] - corners[first]
        # both coordinates only grow: the nearest point of the chord's line is on the chord
        away = np.abs(chord[0] * offsets[:, 1] - chord[1] * offsets[:, 0]) / max(float(np.hypot(*chord)), 1e-300)
        far = int(np.argmax(away))
        if away[far] > tolerance:
            kept[first + 1 + far] = True
            spans += [(first, first + 1 + far), (first + 1 + far, last)]
    return np.asarray(corners[kept], dtype=np.float64)


def _trace(line: Line, least: float) -> tuple[tuple[float, float], ...]:
    """The line as it is drawn: few corners, the same to the eye."""
    corners = staircase(vertical_average([one.scores for one in line.trained]), least)
    scale = np.array(_SPAN) / -np.log10(least)
    drawn = 10 ** (thinned(np.log10(corners) * scale, _UNSEEN) / scale)
    return tuple((float(x), float(y)) for x, y in drawn)


def rate_of(trained: Sequence[Scores], rate: float) -> Estimate:
    """The share of members found at a false-positive rate, over all trainings; no value where one of them has none."""
    return _together([stats.tpr_at_fpr(one.members, one.outside, rate) for one in trained])


def _together(found: Sequence[Estimate]) -> Estimate:
    """One share out of those of several trainings."""
    lacking = next((estimate for estimate in found if estimate.value is None), None)
    if lacking is not None:
        return lacking
    hits = sum(round((estimate.value or 0.0) * estimate.n) for estimate in found)
    return stats.proportion(found[0].name, hits, sum(estimate.n for estimate in found), higher_leaks=True)


def _points(line: Line) -> tuple[Point, ...]:
    """The marked points of a line: those that have a value."""
    found = [(rate, rate_of([one.scores for one in line.trained], rate)) for rate in RATES]
    return tuple(Point(rate, e.value, e.low, e.high) for rate, e in sorted(found) if e.value is not None)


def _written(estimate: Estimate) -> str:
    """A value with its interval, or why there is none."""
    if estimate.value is None:
        return estimate.note or NO_VALUE
    digits = 3 if estimate.name == "auc" else 4
    value, low, high = (fixed(number, digits) for number in (estimate.value, estimate.low, estimate.high))
    return value if estimate.low is None else f"{value} ({low} to {high})"


class _Found(NamedTuple):
    """What the data table says of one training or of several."""

    seed: str
    members: int
    outside: int
    estimates: tuple[Estimate, ...]

    @property
    def row(self) -> tuple[str, ...]:
        """As it is written."""
        return self.seed, short(self.members), short(self.outside), *map(_written, self.estimates)


def _measured(trained: Trained) -> _Found:
    """AUC and rates of one training."""
    members, outside = trained.scores.members, trained.scores.outside
    rates = (stats.tpr_at_fpr(members, outside, rate) for rate in RATES)
    return _Found(str(trained.seed), len(members), len(outside), (stats.auc(members, outside), *rates))


def _rows(analysis: Analysis, line: Line) -> list[tuple[str, ...]]:
    """All trainings of a defense together, where there are several, and each."""
    names = analysis.defenses[line.group.defense.label].text, _attack(analysis, line.group)
    if not line.trained:
        return [(*names, "", "", "", NO_VALUE, *("no scores are stored" for _ in RATES))]
    found = [_measured(trained) for trained in line.trained]
    if len(found) > 1:
        aucs, *rates = zip(*(one.estimates for one in found), strict=True)
        estimates = pool(aucs), *(_together(rate) for rate in rates)
        count, outside = f"all {len(found)}", sum(one.outside for one in found)
        found.insert(0, _Found(count, line.members, outside, estimates))
    return [(*names, *one.row) for one in found]


def _attack(analysis: Analysis, group: Group) -> str:
    """The attack and who runs it."""
    return f"{analysis.attacks[group.column.attack.label].text}, {group.column.threat}"


def _chart(analysis: Analysis, lines: Sequence[Line], place: str, aside: str) -> Chart:
    """The chart of one target; its title ends with `aside`."""
    look = looks(analysis)
    drawn = [line for line in lines if line.trained and line.group.defense.label in look]
    least = max(LEAST_RATE, 1 / max((line.outside for line in drawn or lines), default=1))
    series = [
        Series(
            analysis.defenses[line.group.defense.label].text,
            _points(line),
            look[line.group.defense.label],
            _trace(line, least),
        )
        for line in drawn
    ]
    rest = f"{len(drawn)} of {len(lines)} lines are drawn; the data table has all." if len(drawn) < len(lines) else ""
    return Chart(
        name=slug(f"roc {place}"),
        title=f"ROC: members found at few false alarms{aside}",
        x_label="false-positive rate (log scale)",
        y_label="true-positive rate (log scale)",
        series=tuple(sorted(series, key=lambda one: one.look)),
        better=LEAK_BETTER,
        caption=" ".join(filter(None, (_caption(drawn, series, least), rest))),
        header=(
            "Defense",
            "Attack",
            "Seed",
            "Members",
            "Non-members",
            "AUC (95 % interval)",
            *(f"TPR at {100 * rate:g} % FPR (95 % interval)" for rate in RATES),
        ),
        rows=tuple(row for line in lines for row in _rows(analysis, line)),
        log_x=True,
        log_y=True,
        ends=(least, 1.0),
        diagonal="guessing",
    )


def _caption(drawn: Sequence[Line], series: Sequence[Series], least: float) -> str:
    """What is drawn, over which trainings, and what an interval is of."""
    parts = ["Each defense under the attack with the highest AUC; steps are what a threshold attains."]
    seeds = max((len(line.trained) for line in drawn), default=1)
    if seeds > 1:
        parts.append(
            f"Each of {plural(seeds, 'seed')} has its own threshold at a rate, as scores of different models are not "
            "on one scale, and the line is the share found of the members of all."
        )
    marked = sorted({point.x for one in series for point in one.points}, reverse=True)
    if marked:
        names = listing(f"{100 * rate:g} %" for rate in marked)
        parts.append(f"Markers: {names} false positives, with 95 % Clopper-Pearson intervals at these thresholds.")
    if any(point.y < least for one in series for point in one.points):
        parts.append("A marker at the lower edge lies below it.")
    if lacking := [rate for rate in RATES if rate not in marked]:
        parts.append(f"No marker at {listing(f'{100 * r:g} %' for r in lacking)}: too few non-members.")
    return " ".join(parts)
