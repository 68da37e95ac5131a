"""Charts with a line per defense: leakage and training over the rounds, and ROC curves on two log axes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from leakgauge.harness.core import stats
from leakgauge.harness.core.cases import gathered
from leakgauge.harness.core.labels import UNDEFENDED, counted, where
from leakgauge.harness.core.metrics import RECOGNIZABLE
from leakgauge.harness.core.result import Estimate, Scores, TrainingRecord
from leakgauge.harness.core.stats import Interval, mean_interval
from leakgauge.reports.charts.figures import ACCURACY_BETTER, LEAK_BETTER, MOST_SERIES, Chart, Point, Series, slug
from leakgauge.reports.select import Analysis, Group, accuracy_of, best
from leakgauge.reports.text.notation import NO_VALUE, fixed, interval, listing, percent, short, spread

_ATTACKED = (
    *("rounds", "Leakage by attacked round", "attacked round", "Round"),
    "The strongest attack at each round. Bars: 95 % intervals.",
)
_WATCHED = (
    *("watched", "Leakage over the rounds watched", "rounds in which the same images were sent", "Rounds watched"),
    "The adversary combines all watched rounds. The strongest attack at each number of rounds. Bars: 95 % intervals.",
)
"""The name of a chart, its title, its axis, the column of its table, and its caption."""


def attack_charts(analysis: Analysis, setting: str) -> list[Chart]:
    """SSIM of the strongest attack by attacked round, and by number of watched rounds, one line per defense."""
    charts = []
    groups = [
        g for g in analysis.attacked if g.setting == setting and g.case.kind == "reconstruction" and g.value is not None
    ]
    for kind, alike in gathered((group.case.target.kind, group) for group in groups).items():
        alone = [group for group in alike if group.case.target.users == 1]
        single = [group for group in alone if group.case.target.rounds == 1]
        # a chart of watched rounds begins at a round from which several rounds are watched
        starts = {group.case.target.round for group in alone if group.case.target.rounds > 1}
        watched = [group for group in alone if group.case.target.round in starts]
        first = [(group.case.target.round or 0, group) for group in single]
        number = [(group.case.target.rounds, group) for group in watched]
        for words, those in ((_ATTACKED, first), (_WATCHED, number)):
            if len({at for at, _ in those}) > 1:
                charts.append(_chart(analysis, kind, words, those))
    return charts


def _chart(analysis: Analysis, kind: str, words: tuple[str, ...], groups: Sequence[tuple[int, Group]]) -> Chart:
    name, title, x_label, column, caption = words
    series, rows = [], []
    for defense, label in analysis.defenses.items():
        points = []
        places = gathered((at, group) for at, group in groups if group.defense == defense)
        for at, row in sorted(places.items()):
            group = best(row)
            assert group is not None
            e = group.estimate
            assert e is not None
            points.append(Point(float(at), e.value or 0.0, e.low, e.high))
            rows.append((label.text, str(at), analysis.attack_text(group), fixed(e.value), interval(e)))
        if points:
            series.append((defense, tuple(points)))
    shown, rest = _drawn(analysis, series)
    return Chart(
        name=slug(f"{name} {kind}"),
        title=f"{title} ({kind})",
        x_label=x_label,
        y_label="mean SSIM, strongest attack",
        series=shown,
        better=LEAK_BETTER,
        caption=f"{caption} {rest}".strip(),
        header=("Defense", column, "Attack", "Mean SSIM", "95 % interval"),
        rows=tuple(rows),
        lines=((RECOGNIZABLE, f"recognizable from {RECOGNIZABLE}"),),
        whole_x=True,
    )


def looks(analysis: Analysis) -> dict[str, int]:
    """The look of each drawn defense, the same on all charts; -1 is no defense.

    First one defense of each name is drawn, in the study's order, then further ones, up to the number of looks.
    """
    names = gathered((label.name, defense) for defense, label in analysis.defenses.items() if defense != UNDEFENDED)
    turns = [d for turn in itertools.zip_longest(*names.values()) for d in turn if d is not None][:MOST_SERIES]
    drawn = [UNDEFENDED, *(defense for defense in analysis.defenses if defense in turns)]
    return {defense: at - 1 for at, defense in enumerate(drawn)}


def lines_drawn(drawn: Sequence[object], lines: Sequence[object]) -> str:
    """A sentence if not all lines are drawn; otherwise empty."""
    return f"{len(drawn)} of {len(lines)} lines are drawn; the data table lists all." if len(drawn) < len(lines) else ""


def _drawn(analysis: Analysis, lines: Sequence[tuple[str, tuple[Point, ...]]]) -> tuple[tuple[Series, ...], str]:
    """The drawn series, with no defense first and gray, and the sentence of `lines_drawn`."""
    look = looks(analysis)
    drawn = sorted(
        (look[defense], analysis.defenses[defense].text, points) for defense, points in lines if defense in look
    )
    return tuple(Series(name, points, at) for at, name, points in drawn), lines_drawn(drawn, lines)


def _curve(
    trainings: Sequence[TrainingRecord], name: str
) -> Iterator[tuple[int, float, float | None, float | None, int]]:
    """Each evaluated round, its mean of `name` over the seeds, the ends of its interval, and a seed's test samples."""
    every = (evaluation for training in trainings for evaluation in training.evaluations)
    known = ((one.round, getattr(one, name), one.samples) for one in every)
    by_round = gathered((at, (value, n)) for at, value, n in known if value is not None and math.isfinite(value))
    for at, found in sorted(by_round.items()):
        values, samples = [value for value, _ in found], min(n for _, n in found)
        ends: Estimate | Interval = accuracy_of(values, samples) if name == "accuracy" else mean_interval(values)
        yield at, float(np.mean(values)), ends.low, ends.high, samples


def _training_chart(analysis: Analysis, setting: str, name: str) -> Chart | None:
    """Accuracy or loss over the rounds; None if it was evaluated fewer than two times."""
    scale, write = (100.0, percent) if name == "accuracy" else (1.0, fixed)
    lines: list[tuple[str, tuple[Point, ...]]] = []
    rows, sizes = [], list[int]()
    for defense, label in analysis.defenses.items():
        places = list(_curve(analysis.trainings_of(setting, defense), name))
        if len(places) > 1:
            lines.append((defense, tuple(Point(float(at), scale * mean) for at, mean, *_ in places)))
            for at, mean, low, high, samples in places:
                sizes.append(samples)
                rows.append((label.text, str(at), write(mean), spread(low, high, write), f"{samples:,}"))
    if not lines:
        return None
    series, rest = _drawn(analysis, lines)
    few, most = min(sizes), max(sizes)
    if few < most:
        text = f"Points of interim rounds are of {few:,} of {most:,} test samples; the table has all intervals."
        rest = f"{text} {rest}"
    return Chart(
        name=name,
        title=f"Test {name} over the rounds",
        x_label="rounds trained",
        y_label="test accuracy, %" if name == "accuracy" else "test loss",
        series=series,
        better=ACCURACY_BETTER if name == "accuracy" else "Lower is better: the model fits the test data.",
        caption=f"Mean over the seeds. {rest}".strip(),
        header=("Defense", "Round", f"Test {name}", "95 % interval", "Test samples"),
        rows=tuple(rows),
        whole_x=True,
    )


def training_charts(analysis: Analysis, setting: str) -> list[Chart]:
    """Accuracy and loss over the rounds."""
    return [chart for name in ("accuracy", "loss") if (chart := _training_chart(analysis, setting, name)) is not None]


RATES = (0.01, 0.001)
"""False-positive rates with a marker."""

LEAST_RATE = 1e-4
"""The lowest rate at which the axes may begin."""


class Line(NamedTuple):
    """One defense under its strongest attack, with the scores of its trainings that have some, by seed."""

    group: Group
    scores: dict[int, Scores]


def roc_charts(analysis: Analysis, setting: str) -> list[Chart]:
    """One chart per target: one line per defense, under the attack with the highest AUC."""
    groups = [g for g in analysis.attacked if g.setting == setting and g.metric.name == "auc" and g.value is not None]
    charts, targets = [], gathered((group.case.target, group) for group in groups)
    for target, alike in targets.items():
        rows = [[group for group in alike if group.defense == defense] for defense in analysis.defenses]
        lines = [Line(group, _scores(analysis, group)) for row in rows if (group := best(row)) is not None]
        if any(line.scores for line in lines):
            charts.append(_roc_chart(analysis, lines, where(target), f" ({where(target)})" * (len(targets) > 1)))
    return charts


def _scores(analysis: Analysis, group: Group) -> dict[int, Scores]:
    scores = {result.cell.training.seed: analysis.run.scores(result.cell.id) for result in group.case.results}
    known = [(seed, one, (one.members, one.outside)) for seed, one in scores.items() if one]
    return {seed: one for seed, one, sides in known if all(len(side) and np.isfinite(side).all() for side in sides)}


def vertical_average(trained: Sequence[Scores]) -> stats.Roc:
    """The share of the members of all trainings that are above the threshold, with one threshold per training.

    Returns:
        Corners of steps: a threshold attains this share from a corner's false-positive rate up to the next corner's.

    Guarantees:
        At each rate the number of members is the sum over the trainings of the count in `stats.tpr_at_fpr`.
        For one training, the corners are those of its ROC curve, without the lower ends of vertical steps.
    """
    curves = [stats.roc(scores.members, scores.outside) for scores in trained]
    rates = np.unique(np.concatenate([curve.fpr for curve in curves]))
    members = np.zeros(len(rates))
    for curve, scores in zip(curves, trained, strict=True):
        members += len(scores.members) * curve.tpr[np.searchsorted(curve.fpr, rates, side="right") - 1]
    return stats.Roc(rates, members / sum(len(scores.members) for scores in trained))


def staircase(curve: stats.Roc, least: float) -> stats.Numbers:
    """The corners [k, 2] of the steps of a curve, cut to rates of at least `least` for log axes."""
    rates, shares = np.maximum(curve.fpr, least), np.maximum(curve.tpr, least)
    # the line enters at the last corner at or left of the edge
    first = max(0, int(np.searchsorted(curve.fpr, least, side="right")) - 1)
    x, y = rates[first:], shares[first:]
    corners: stats.Numbers = np.stack([np.repeat(x, 2)[1:], np.repeat(y, 2)[:-1]], -1)
    moved = np.any(np.diff(corners, axis=0) != 0, axis=1)
    corners = corners[np.concatenate([[True], moved])]
    return corners[max(0, int(np.sum(corners[:, 1] <= least)) - 1) :]


def _trace(line: Line, least: float) -> tuple[tuple[float, float], ...]:
    return tuple((float(x), float(y)) for x, y in staircase(vertical_average([*line.scores.values()]), least))


def _points(line: Line) -> tuple[Point, ...]:
    """The true-positive rates at `RATES`, over all trainings; no point if one training has no rate."""
    scores, rates = line.scores.values(), sorted(RATES)
    pooled = [stats.pool_shares([stats.tpr_at_fpr(one.members, one.outside, rate) for one in scores]) for rate in rates]
    each = zip(rates, pooled, strict=True)
    return tuple(Point(rate, e.value, e.low, e.high) for rate, e in each if e.value is not None)


def _written(estimate: Estimate) -> str:
    if estimate.value is None:
        return estimate.note or NO_VALUE
    digits = 3 if estimate.name == "auc" else 4
    value, low, high = (fixed(number, digits) for number in (estimate.value, estimate.low, estimate.high))
    return value if estimate.low is None else f"{value} ({low} to {high})"


def _rows(analysis: Analysis, line: Line) -> list[tuple[str, ...]]:
    attack = f"{analysis.attack_text(line.group)}, {line.group.case.threat}"
    names = analysis.defenses[line.group.defense].text, attack
    if not line.scores:
        return [(*names, "", "", "", NO_VALUE, *("no scores are stored" for _ in RATES))]
    sides = {str(seed): (known.members, known.outside) for seed, known in line.scores.items()}
    estimates: dict[str, tuple[Estimate, ...]] = {
        seed: (stats.auc(*both), *(stats.tpr_at_fpr(*both, rate) for rate in RATES)) for seed, both in sides.items()
    }
    counts = {seed: (len(members), len(outside)) for seed, (members, outside) in sides.items()}
    if len(sides) > 1:
        aucs, *rates = zip(*estimates.values(), strict=True)
        every, (members, outside) = f"all {len(sides)}", map(sum, zip(*counts.values(), strict=True))
        counts = {every: (members, outside)} | counts
        estimates[every] = stats.pool(aucs), *(stats.pool_shares(rate) for rate in rates)
    return [(*names, seed, *map(short, counts[seed]), *map(_written, estimates[seed])) for seed in counts]


def _roc_chart(analysis: Analysis, lines: Sequence[Line], place: str, aside: str) -> Chart:
    look = looks(analysis)
    drawn = [line for line in lines if line.scores and line.group.defense in look]
    outside = [len(known.outside) for line in drawn or lines for known in line.scores.values()]
    least = max(LEAST_RATE, 1 / max(outside, default=1))
    named = [(analysis.defenses[line.group.defense].text, look[line.group.defense], line) for line in drawn]
    series = [Series(name, _points(line), at, _trace(line, least)) for name, at, line in named]
    rates = [f"TPR at {100 * rate:g} % FPR (95 % interval)" for rate in RATES]
    return Chart(
        name=slug(f"roc {place}"),
        title=f"ROC: members identified at low false-positive rates{aside}",
        x_label="false-positive rate (log scale)",
        y_label="true-positive rate (log scale)",
        series=tuple(sorted(series, key=lambda line: line.look)),
        better=LEAK_BETTER,
        caption=" ".join(filter(None, (_caption(drawn, series, least), lines_drawn(drawn, lines)))),
        header=("Defense", "Attack", "Seed", "Members", "Non-members", "AUC (95 % interval)", *rates),
        rows=tuple(row for line in lines for row in _rows(analysis, line)),
        log_x=True,
        log_y=True,
        ends=(least, 1.0),
        diagonal="chance",
    )


def _caption(drawn: Sequence[Line], series: Sequence[Series], least: float) -> str:
    seeds = max((len(line.scores) for line in drawn), default=1)
    several = f"Each of {counted(seeds, 'seed')} has its own threshold at a rate, because models differ in the scale of"
    marked = sorted({point.x for line in series for point in line.points}, reverse=True)
    lacked = [rate for rate in RATES if rate not in marked]
    names, lacking = (listing(f"{100 * rate:g} %" for rate in rates) for rates in (marked, lacked))
    below = any(point.y < least for line in series for point in line.points)
    parts = (
        "Each defense under the attack with the highest AUC. Each step belongs to one threshold.",
        f"{several} their scores. The line is the share of the members of all seeds." if seeds > 1 else "",
        f"Markers: {names} false positives, with 95 % Clopper-Pearson intervals at these thresholds." if names else "",
        "A marker at the lower edge stands for a value below it." if below else "",
        f"No marker at {lacking}: too few non-members." if lacking else "",
    )
    return " ".join(filter(None, parts))
