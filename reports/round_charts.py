"""Charts over rounds: what an attack makes of the message of each round, and how the training went."""

from __future__ import annotations

from collections.abc import Sequence

from reports.figures import ACCURACY_BETTER, LEAK_BETTER, Chart, Point, Series, capped, slug
from reports.labels import UNDEFENDED
from reports.notation import fixed, interval
from reports.pool import curve
from reports.select import RECOGNISABLE, Analysis, Group


def attack_charts(analysis: Analysis, setting: str) -> list[Chart]:
    """SSIM of the strongest attack at each attacked round, one line a defence."""
    charts = []
    groups = [
        g for g in analysis.attacked if g.setting == setting and g.kind == "reconstruction" and g.value is not None
    ]
    for kind in dict.fromkeys(group.column.target.kind for group in groups):
        mine = [group for group in groups if group.column.target.kind == kind]
        if len({group.column.target.round for group in mine}) < 2:
            continue
        found = []
        for defense in analysis.defenses:
            at: dict[int, list[Group]] = {}
            for group in mine:
                if group.defense.label == defense and group.column.target.round is not None:
                    at.setdefault(group.column.target.round, []).append(group)
            best = [(round_, analysis.best(row)) for round_, row in sorted(at.items())]
            found.append((defense, [(round_, group) for round_, group in best if group is not None]))
        charts.append(_rounds_chart(analysis, kind, [(d, line) for d, line in found if line]))
    return charts


def _rounds_chart(analysis: Analysis, kind: str, lines: list[tuple[str, list[tuple[int, Group]]]]) -> Chart:
    """The chart of one kind of target."""
    series, rows = [], []
    for defense, line in lines:
        estimates = [(at, group, group.estimate) for at, group in line if group.estimate is not None]
        points = tuple(Point(float(at), e.value or 0.0, e.low, e.high) for at, _, e in estimates)
        series.append((defense, points))
        for at, group, e in estimates:
            attack = analysis.attacks[group.column.attack.label].text
            rows.append((analysis.defenses[defense].text, str(at), attack, fixed(e.value), interval(e)))
    shown, rest = capped(_looks(analysis, series))
    return Chart(
        name=slug(f"rounds {kind}"),
        title=f"Leakage over the round attacked ({kind})",
        x_label="round whose message is attacked",
        y_label="mean SSIM, strongest attack",
        series=shown,
        better=LEAK_BETTER,
        caption=" ".join(
            filter(None, ("At each round the attack that is strongest there. Bars: 95 % intervals.", rest))
        ),
        header=("Defence", "Round", "Attack", "Mean SSIM", "95 % interval"),
        rows=tuple(rows),
        lines=((RECOGNISABLE, f"recognisable from {RECOGNISABLE}"),),
        whole_x=True,
    )


def _looks(analysis: Analysis, lines: Sequence[tuple[str, tuple[Point, ...]]]) -> list[Series]:
    """Series with the same look for the same defence; no defence first and grey."""
    defended = [defense for defense in analysis.defenses if defense != UNDEFENDED]
    ordered = sorted(lines, key=lambda line: line[0] != UNDEFENDED)
    return [
        Series(analysis.defenses[defense].text, points, -1 if defense == UNDEFENDED else defended.index(defense))
        for defense, points in ordered
    ]


def training_charts(analysis: Analysis, setting: str) -> list[Chart]:
    """Accuracy and loss over the rounds."""
    charts = []
    for what, better in (("accuracy", ACCURACY_BETTER), ("loss", "Lower is better: the model fits the test data.")):
        lines, rows = [], []
        for defense in analysis.defenses:
            found = curve(analysis.trainings.get((setting, defense), ()), what)
            if len(found) > 1:
                lines.append((defense, tuple(Point(float(at), mean) for at, mean, _, _ in found)))
                name = analysis.defenses[defense].text
                rows += [
                    (name, str(at), fixed(mean), f"{fixed(low)} to {fixed(high)}") for at, mean, low, high in found
                ]
        if not lines:
            continue
        shown, rest = capped(_looks(analysis, lines))
        charts.append(
            Chart(
                name=what,
                title=f"Test {what} over the rounds",
                x_label="rounds trained",
                y_label=f"test {what}",
                series=shown,
                better=better,
                caption=" ".join(filter(None, ("Mean over the seeds.", rest))),
                header=("Defence", "Round", f"Test {what}", "Lowest to highest seed"),
                rows=tuple(rows),
                whole_x=True,
            )
        )
    return charts
