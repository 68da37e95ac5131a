"""Charts over rounds: the leakage of the messages of each round, and the accuracy and loss of the training."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from leakgauge.harness.core.cases import gathered
from leakgauge.harness.core.cell import Target
from leakgauge.harness.core.labels import UNDEFENDED
from leakgauge.harness.core.metrics import RECOGNIZABLE
from leakgauge.harness.core.result import Estimate, TrainingRecord
from leakgauge.harness.core.stats import Interval, mean_interval
from leakgauge.reports.charts.figures import ACCURACY_BETTER, LEAK_BETTER, MOST_SERIES, Chart, Point, Series, slug
from leakgauge.reports.select import Analysis, Group, accuracy_of, best
from leakgauge.reports.text.notation import fixed, interval, percent


class _Axis(NamedTuple):
    """An x axis of targets: its texts, and the position of a target."""

    slug: str
    title: str
    x_label: str
    column: str
    caption: str
    at: Callable[[Target], int]


_ATTACKED = _Axis(
    "rounds",
    "Leakage by attacked round",
    "attacked round",
    "Round",
    "The strongest attack at each round. Bars: 95 % intervals.",
    lambda target: target.round or 0,
)
_WATCHED = _Axis(
    "watched",
    "Leakage over the rounds watched",
    "rounds in which the same images were sent",
    "Rounds watched",
    "The adversary combines all watched rounds. The strongest attack at each number of rounds. Bars: 95 % intervals.",
    lambda target: target.rounds,
)


def attack_charts(analysis: Analysis, setting: str) -> list[Chart]:
    """SSIM of the strongest attack by attacked round, and by number of watched rounds, one line per defense."""
    charts = []
    groups = [
        g for g in analysis.attacked if g.setting == setting and g.case.kind == "reconstruction" and g.value is not None
    ]
    for kind in dict.fromkeys(group.case.target.kind for group in groups):
        alone = [group for group in groups if group.case.target.kind == kind and group.case.target.users == 1]
        single = [group for group in alone if group.case.target.rounds == 1]
        # a chart of watched rounds begins at a round from which several rounds are watched
        starts = {group.case.target.round for group in alone if group.case.target.rounds > 1}
        watched = [group for group in alone if group.case.target.round in starts]
        for axis, those in ((_ATTACKED, single), (_WATCHED, watched)):
            if len({axis.at(group.case.target) for group in those}) > 1:
                charts.append(_chart(analysis, kind, axis, those))
    return charts


def _chart(analysis: Analysis, kind: str, axis: _Axis, groups: Sequence[Group]) -> Chart:
    series, rows = [], []
    for defense, label in analysis.defenses.items():
        points = []
        places = gathered((axis.at(group.case.target), group) for group in groups if group.defense == defense)
        for at, row in sorted(places.items()):
            group = best(row)
            assert group is not None
            assert group.estimate is not None
            e = group.estimate
            points.append(Point(float(at), e.value or 0.0, e.low, e.high))
            rows.append((label.text, str(at), analysis.attack_text(group), fixed(e.value), interval(e)))
        if points:
            series.append((defense, tuple(points)))
    shown, rest = _drawn(analysis, series)
    return Chart(
        name=slug(f"{axis.slug} {kind}"),
        title=f"{axis.title} ({kind})",
        x_label=axis.x_label,
        y_label="mean SSIM, strongest attack",
        series=shown,
        better=LEAK_BETTER,
        caption=f"{axis.caption} {rest}".strip(),
        header=("Defense", axis.column, "Attack", "Mean SSIM", "95 % interval"),
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


class _Place(NamedTuple):
    """A point of a curve of the training: the mean over the seeds, its interval, and the test samples of each seed."""

    round: int
    mean: float
    low: float | None
    high: float | None
    samples: int


def _curve(trainings: Sequence[TrainingRecord], name: str) -> list[_Place]:
    """`accuracy` or `loss` over the seeds, at each evaluated round."""
    by_round: dict[int, list[float]] = {}
    samples: dict[int, int] = {}
    for one in (evaluation for training in trainings for evaluation in training.evaluations):
        value = one.accuracy if name == "accuracy" else one.loss
        if value is not None and math.isfinite(value):
            by_round.setdefault(one.round, []).append(value)
            samples[one.round] = min(one.samples, samples.get(one.round, one.samples))
    places = []
    for at, values in sorted(by_round.items()):
        ends: Estimate | Interval
        ends = accuracy_of(values, samples[at]) if name == "accuracy" else mean_interval(values)
        places.append(_Place(at, float(np.mean(values)), ends.low, ends.high, samples[at]))
    return places


def _sampled(places: Sequence[_Place]) -> str:
    most, few = max(place.samples for place in places), min(place.samples for place in places)
    return f"Points of interim rounds are of {few:,} of {most:,} test samples; the table has all intervals. " * (
        few < most
    )


def _training_chart(analysis: Analysis, setting: str, name: str) -> Chart | None:
    """Accuracy or loss over the rounds; None if it was evaluated fewer than two times."""
    scale, write = (100.0, percent) if name == "accuracy" else (1.0, fixed)
    lines: list[tuple[str, tuple[Point, ...]]] = []
    rows, drawn = [], list[_Place]()
    for defense, label in analysis.defenses.items():
        places = _curve(analysis.trainings_of(setting, defense), name)
        if len(places) > 1:
            drawn += places
            lines.append((defense, tuple(Point(float(place.round), scale * place.mean) for place in places)))
            rows += [
                (
                    *(label.text, str(place.round), write(place.mean)),
                    "" if place.low is None else f"{write(place.low)} to {write(place.high)}",
                    f"{place.samples:,}",
                )
                for place in places
            ]
    if not lines:
        return None
    series, rest = _drawn(analysis, lines)
    return Chart(
        name=name,
        title=f"Test {name} over the rounds",
        x_label="rounds trained",
        y_label="test accuracy, %" if name == "accuracy" else "test loss",
        series=series,
        better=ACCURACY_BETTER if name == "accuracy" else "Lower is better: the model fits the test data.",
        caption=f"Mean over the seeds. {_sampled(drawn)}{rest}".strip(),
        header=("Defense", "Round", f"Test {name}", "95 % interval", "Test samples"),
        rows=tuple(rows),
        whole_x=True,
    )


def training_charts(analysis: Analysis, setting: str) -> list[Chart]:
    """Accuracy and loss over the rounds."""
    charts = [_training_chart(analysis, setting, name) for name in ("accuracy", "loss")]
    return [chart for chart in charts if chart is not None]
