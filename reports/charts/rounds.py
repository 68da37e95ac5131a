"""Charts over rounds: what an attack makes of the message of each round, and how the training went."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

from leakgauge.harness.core.cell import Target
from leakgauge.reports.charts.figures import ACCURACY_BETTER, LEAK_BETTER, MOST_SERIES, Chart, Point, Series, slug
from leakgauge.reports.pool import curve
from leakgauge.reports.select import RECOGNIZABLE, Analysis, Group
from leakgauge.reports.text.labels import UNDEFENDED
from leakgauge.reports.text.notation import fixed, interval, percent


class _Axis(NamedTuple):
    """What differs between the targets of a chart, and how it is called."""

    slug: str
    title: str
    x_label: str
    column: str
    caption: str
    at: Callable[[Target], int]


_ATTACKED = _Axis(
    "rounds",
    "Leakage over the round attacked",
    "round whose message is attacked",
    "Round",
    "At each round the attack that is strongest there. Bars: 95 % intervals.",
    lambda target: target.round or 0,
)
_WATCHED = _Axis(
    "watched",
    "Leakage over the rounds watched",
    "rounds in which the same images were sent",
    "Rounds watched",
    "The attacker takes all rounds that were watched together; at each number the attack that is strongest there. "
    "Bars: 95 % intervals.",
    lambda target: target.rounds,
)


def attack_charts(analysis: Analysis, setting: str) -> list[Chart]:
    """SSIM of the strongest attack at each attacked round, and at each number of rounds, one line a defense."""
    charts = []
    groups = [
        g for g in analysis.attacked if g.setting == setting and g.kind == "reconstruction" and g.value is not None
    ]
    for kind in dict.fromkeys(group.column.target.kind for group in groups):
        mine = [group for group in groups if group.column.target.kind == kind and group.column.target.users == 1]
        single = [group for group in mine if group.column.target.rounds == 1]
        # an axis of the rounds watched starts where several are
        starts = {group.column.target.round for group in mine if group.column.target.rounds > 1}
        watched = [group for group in mine if group.column.target.round in starts]
        for axis, those in ((_ATTACKED, single), (_WATCHED, watched)):
            if len({axis.at(group.column.target) for group in those}) > 1:
                charts.append(_chart(analysis, kind, axis, _lines(analysis, those, axis)))
    return charts


_Lines = list[tuple[str, list[tuple[int, Group]]]]
"""By defense, the strongest group at each place of an axis."""


def _lines(analysis: Analysis, groups: Sequence[Group], axis: _Axis) -> _Lines:
    """The lines of a chart, in the study's order of the defenses."""
    found = []
    for defense in analysis.defenses:
        at: dict[int, list[Group]] = {}
        for group in groups:
            if group.defense.label == defense:
                at.setdefault(axis.at(group.column.target), []).append(group)
        best = [(place, analysis.best(row)) for place, row in sorted(at.items())]
        found.append((defense, [(place, group) for place, group in best if group is not None]))
    return [(defense, line) for defense, line in found if line]


def _chart(analysis: Analysis, kind: str, axis: _Axis, lines: _Lines) -> Chart:
    """The chart of one kind of target."""
    series, rows = [], []
    for defense, line in lines:
        estimates = [(at, group, group.estimate) for at, group in line if group.estimate is not None]
        points = tuple(Point(float(at), e.value or 0.0, e.low, e.high) for at, _, e in estimates)
        series.append((defense, points))
        for at, group, e in estimates:
            attack = analysis.attacks[group.column.attack.label].text
            rows.append((analysis.defenses[defense].text, str(at), attack, fixed(e.value), interval(e)))
    shown, rest = _drawn(analysis, series)
    return Chart(
        name=slug(f"{axis.slug} {kind}"),
        title=f"{axis.title} ({kind})",
        x_label=axis.x_label,
        y_label="mean SSIM, strongest attack",
        series=shown,
        better=LEAK_BETTER,
        caption=" ".join(filter(None, (axis.caption, rest))),
        header=("Defense", axis.column, "Attack", "Mean SSIM", "95 % interval"),
        rows=tuple(rows),
        lines=((RECOGNIZABLE, f"recognizable from {RECOGNIZABLE}"),),
        whole_x=True,
    )


def looks(analysis: Analysis) -> dict[str, int]:
    """The look of each defense that is drawn, one on all charts; -1 is no defense.

    One defense of each name, in the study's order, then more, as many as there are looks.
    """
    names: dict[str, list[str]] = {}
    for defense, label in analysis.defenses.items():
        if defense != UNDEFENDED:
            names.setdefault(label.name, []).append(defense)
    turns = [d for turn in itertools.zip_longest(*names.values()) for d in turn if d is not None][:MOST_SERIES]
    drawn = [UNDEFENDED, *(defense for defense in analysis.defenses if defense in turns)]
    return {defense: at - 1 for at, defense in enumerate(drawn)}


def _drawn(analysis: Analysis, lines: Sequence[tuple[str, tuple[Point, ...]]]) -> tuple[tuple[Series, ...], str]:
    """Series with one look a defense on all charts, no defense first and gray; and a sentence on what is not drawn."""
    look = looks(analysis)
    found = sorted(
        (look[defense], analysis.defenses[defense].text, points) for defense, points in lines if defense in look
    )
    series = tuple(Series(name, points, at) for at, name, points in found)
    rest = f"{len(found)} of {len(lines)} lines are drawn; the data table has all." if len(found) < len(lines) else ""
    return series, rest


def _training_chart(analysis: Analysis, setting: str, what: str) -> Chart | None:
    """Accuracy or loss over the rounds; None if it was evaluated less than twice."""
    scale, write = (100.0, percent) if what == "accuracy" else (1.0, fixed)
    lines: list[tuple[str, tuple[Point, ...]]] = []
    rows = []
    for defense, label in analysis.defenses.items():
        found = curve(analysis.trainings.get((setting, defense), ()), what)
        if len(found) > 1:
            lines.append((defense, tuple(Point(float(at), scale * mean) for at, mean, _, _ in found)))
            rows += [
                (label.text, str(at), write(mean), f"{write(low)} to {write(high)}") for at, mean, low, high in found
            ]
    if not lines:
        return None
    series, rest = _drawn(analysis, lines)
    return Chart(
        name=what,
        title=f"Test {what} over the rounds",
        x_label="rounds trained",
        y_label="test accuracy, %" if what == "accuracy" else "test loss",
        series=series,
        better=ACCURACY_BETTER if what == "accuracy" else "Lower is better: the model fits the test data.",
        caption=" ".join(filter(None, ("Mean over the seeds.", rest))),
        header=("Defense", "Round", f"Test {what}", "Lowest to highest seed"),
        rows=tuple(rows),
        whole_x=True,
    )


def training_charts(analysis: Analysis, setting: str) -> list[Chart]:
    """Accuracy and loss over the rounds."""
    found = [_training_chart(analysis, setting, what) for what in ("accuracy", "loss")]
    return [chart for chart in found if chart is not None]
