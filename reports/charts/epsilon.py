"""Charts against epsilon: one for each unit, relation and horizon; epsilons of different kinds never share an axis."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from leakgauge.harness.core.cell import PartSpec, Scalar
from leakgauge.harness.core.result import ClaimRecord, Estimate
from leakgauge.reports.charts.figures import ACCURACY_BETTER, LEAK_BETTER, Chart, Point, Series, capped, slug
from leakgauge.reports.pool import accuracy, pool
from leakgauge.reports.sections.checked import checked, severity, verdict_of
from leakgauge.reports.select import RECOGNIZABLE, Analysis, Group
from leakgauge.reports.text.labels import UNDEFENDED, varying_parameters, written
from leakgauge.reports.text.notation import INFINITE, adversaries, fixed, listing, per, percent, short

MOST_NAMES = 3
"""Defenses that a caption names."""

FAR = 100.0
"""How many times nearer the undefended attack may come before its line is left out of a chart of distances."""


class Axis(NamedTuple):
    """What an epsilon axis is about; epsilons of different axes never meet."""

    unit: str
    relation: str
    horizon: str

    @property
    def label(self) -> str:
        """For the chart."""
        return f"claimed ε per {self.unit}, {self.horizon}, {self.relation} (log scale)"


class Sample(NamedTuple):
    """One defense at one epsilon: the claim and what was measured."""

    defense: PartSpec
    claim: ClaimRecord
    estimate: Estimate


class Measure(NamedTuple):
    """What stands over epsilon: the metric, its title, its axis with the scale of the numbers, a line to read them by.

    `is_distance`: less means that the attacker is nearer; such numbers span decades.
    """

    name: str
    title: str
    y_label: str
    better: str
    scale: float = 1.0
    line: tuple[float, str] | None = None
    is_distance: bool = False

    def write(self, value: float | None) -> str:
        """A value in the data table."""
        if self.is_distance:
            return short(value, 3)
        return percent(value) if self.scale == 100.0 else fixed(value)


ACCURACY = Measure("accuracy", "Accuracy against claimed epsilon", "test accuracy, %", ACCURACY_BETTER, 100.0)
SSIM = Measure(
    "ssim",
    "Leakage against claimed epsilon",
    "mean SSIM, strongest attack",
    LEAK_BETTER,
    line=(RECOGNIZABLE, f"recognizable from {RECOGNIZABLE}"),
)
MSE = Measure(
    "mse",
    "Distance to the image against claimed epsilon",
    "median MSE, nearest attack",
    "Higher is better for the clients: a lower MSE means the attacker gets nearer to the image.",
    is_distance=True,
)
AUC = Measure(
    "auc", "Membership against claimed epsilon", "AUC, strongest attack", LEAK_BETTER, line=(0.5, "chance 0.500")
)


def _weakest(claims: Iterable[ClaimRecord]) -> ClaimRecord | None:
    """The claim with the largest epsilon over the seeds, of equals the worst; None if one promises nothing."""
    known = list(claims)
    if not known or any(claim.epsilon is None for claim in known):
        return None
    return max(known, key=lambda claim: (claim.epsilon or 0.0, severity(claim)))


def _same_kind(claim: ClaimRecord) -> bool:
    """Whether what is proved may stand on the axis of what is claimed."""
    proved = claim.proved
    return (proved.unit, proved.delta, set(proved.against)) == (claim.unit, claim.delta, set(claim.against))


def _differs(claim: ClaimRecord) -> bool:
    """Whether claimed and proved are two numbers."""
    return verdict_of(claim) != "HOLDS"


def _mark(claim: ClaimRecord) -> float | None:
    """Where a hollow marker goes."""
    return claim.proved.epsilon or None if _differs(claim) and _same_kind(claim) else None


def _unmarked(analysis: Analysis, samples: Sequence[Sample]) -> str:
    """A sentence on what differs and has no marker: infinite, zero, or of another kind."""
    lacking = [s for s in samples if _differs(s.claim) and _mark(s.claim) is None]
    names = [f"{analysis.defenses[s.defense.label].text} ({_proved(s.claim)}, {verdict_of(s.claim)})" for s in lacking]
    more = [f"{len(names) - MOST_NAMES} more"] if len(names) > MOST_NAMES else []
    return f"Without a marker for what is proved: {listing(names[:MOST_NAMES] + more)}." if names else ""


def _proved(claim: ClaimRecord) -> str:
    """The proved epsilon, with its unit and delta where these are not the claim's."""
    value = INFINITE if claim.proved.epsilon is None else short(claim.proved.epsilon)
    return value if _same_kind(claim) else f"{value} {per(claim.proved.unit, claim.proved.delta)}"


def _families(samples: Sequence[Sample]) -> dict[str, list[Sample]]:
    """Samples that differ in one parameter only, by the name of their line; claims with another delta stand apart."""
    several = len({sample.claim.against for sample in samples}) > 1
    lines: dict[str, list[Sample]] = {}
    for name in dict.fromkeys(sample.defense.name for sample in samples):
        mine = [sample for sample in samples if sample.defense.name == name]
        varying = varying_parameters([sample.defense for sample in mine])
        swept = max(varying, key=lambda p: _distinct(mine, p), default="")
        for sample in mine:
            rest = written(sample.defense.parameters, [p for p in varying if p != swept])
            against = f"against {adversaries(sample.claim.against)}" if several else ""
            pieces = f"{name} {rest}".strip(), f"δ = {short(sample.claim.delta)}", against
            lines.setdefault(", ".join(filter(None, pieces)), []).append(sample)
    return lines


def _distinct(samples: Sequence[Sample], parameter: str) -> int:
    """How many values a parameter takes; the one with most is the one that a line sweeps."""
    values: set[Scalar] = {sample.defense.parameters.get(parameter) for sample in samples}
    return len(values)


def _charts(analysis: Analysis, measure: Measure, samples: Sequence[Sample], open_: Estimate | None) -> list[Chart]:
    """One chart for each axis on which there are at least two samples."""
    axes: dict[Axis, list[Sample]] = {}
    for sample in samples:
        if sample.claim.epsilon is not None and sample.claim.epsilon > 0 and sample.estimate.value is not None:
            axes.setdefault(Axis(sample.claim.unit, sample.claim.relation, sample.claim.horizon), []).append(sample)
    return [_chart(analysis, measure, axis, found, open_) for axis, found in axes.items() if len(found) > 1]


def _point(sample: Sample, scale: float) -> Point:
    """A sample on its chart."""
    e = sample.estimate
    low, high = None if e.low is None else scale * e.low, None if e.high is None else scale * e.high
    return Point(sample.claim.epsilon or 0.0, scale * (e.value or 0.0), low, high, _mark(sample.claim))


def _row(analysis: Analysis, measure: Measure, sample: Sample) -> tuple[str, ...]:
    """A sample in the data table."""
    claim, e = sample.claim, sample.estimate
    ends = "" if e.low is None or e.high is None else f"{measure.write(e.low)} to {measure.write(e.high)}"
    name, claimed = analysis.defenses[sample.defense.label].text, short(claim.epsilon)
    checked = _proved(claim), verdict_of(claim)
    return name, claimed, *checked, short(claim.delta), adversaries(claim.against), measure.write(e.value), ends


def _chart(
    analysis: Analysis, measure: Measure, axis: Axis, samples: Sequence[Sample], open_: Estimate | None
) -> Chart:
    """A chart against one kind of epsilon."""
    series = []
    for look, (label, members) in enumerate(_families(samples).items()):
        ordered = sorted(members, key=lambda sample: sample.claim.epsilon or 0.0)
        series.append(Series(label, tuple(_point(sample, measure.scale) for sample in ordered), look))
    shown, rest = capped(series)
    against = {adversaries(sample.claim.against) for sample in samples}
    scope = f"Epsilon as claimed, per {axis.unit}, {axis.horizon}, neighbors: {axis.relation}"
    scope += f", against {against.pop()}." if len(against) == 1 else "."
    hollow = ""
    if any(point.proved is not None for one in shown for point in one.points):
        hollow = "Hollow markers: epsilon as proved, where it differs."
    methods = dict.fromkeys(s.estimate.method for s in samples if s.estimate.low is not None and s.estimate.method)
    bars = f"Bars: 95 % intervals ({listing(methods)})." if methods else ""
    lines = [] if measure.line is None else [measure.line]
    ceiling, far = _ceiling(measure, samples, open_)
    lines += ceiling
    log_y = measure.is_distance and all(height > 0 for height in _heights(series, lines))
    return Chart(
        name=slug(f"{measure.name} {axis.unit} {axis.relation} {axis.horizon}"),
        title=f"{measure.title} per {axis.unit}",
        x_label=axis.label,
        y_label=f"{measure.y_label}{' (log scale)' if log_y else ''}",
        series=shown,
        better=measure.better,
        caption=" ".join(filter(None, (scope, hollow, _unmarked(analysis, samples), far, bars, rest))),
        header=(
            "Defense",
            "ε claimed",
            "ε proved",
            "Verdict",
            "δ",
            "Against",
            measure.y_label[:1].upper() + measure.y_label[1:],
            "95 % interval",
        ),
        rows=tuple(_row(analysis, measure, sample) for sample in samples),
        lines=tuple(lines),
        log_x=True,
        log_y=log_y,
    )


def _ceiling(
    measure: Measure, samples: Sequence[Sample], open_: Estimate | None
) -> tuple[list[tuple[float, str]], str]:
    """The line of no defense, or a sentence where it is so far from a distance that it would flatten the rest."""
    if open_ is None or open_.value is None:
        return [], ""
    text = f"no defense {measure.write(open_.value)}"
    if measure.is_distance and open_.value < min(sample.estimate.value or 0.0 for sample in samples) / FAR:
        return [], f"Far below the axis: {text}."
    return [(measure.scale * open_.value, text)], ""


def _heights(series: Sequence[Series], lines: Sequence[tuple[float, str]]) -> list[float]:
    """All that is drawn, without the error bars."""
    return [point.y for one in series for point in one.points] + [height for height, _ in lines]


def accuracy_charts(analysis: Analysis, setting: str) -> list[Chart]:
    """Final accuracy against the epsilon of the whole run; of one round where the run has none."""
    open_ = accuracy(analysis.trainings.get((setting, UNDEFENDED), ()))
    for whole in (True, False):
        samples = []
        for (place, _), trainings in analysis.trainings.items():
            claim = _weakest(checked(t)[whole] for t in trainings)
            value = accuracy(trainings)
            if place == setting and claim is not None and value is not None:
                samples.append(Sample(trainings[0].spec.defense, claim, value))
        charts = _charts(analysis, ACCURACY, samples, open_)
        if charts:
            return charts
    return []


def leakage_charts(analysis: Analysis, setting: str, kind: str, measure: Measure) -> list[Chart]:
    """The strongest attack against epsilon: of one round for messages, of the whole run for the final model."""
    best = _strongest(analysis, setting, kind, measure)
    open_ = next((estimate for group, estimate in best if group.undefended), None)
    samples = []
    for group, estimate in best:
        claim = _weakest(checked(t)[kind != "reconstruction"] for t in analysis.of(group))
        if claim is not None:
            samples.append(Sample(group.defense, claim, estimate))
    return _charts(analysis, measure, samples, open_)


def _strongest(analysis: Analysis, setting: str, kind: str, measure: Measure) -> list[tuple[Group, Estimate]]:
    """The group of each defense that gets furthest by a measure, the first of equals, with what it gets."""
    found: dict[str, tuple[Group, Estimate]] = {}
    for group in analysis.attacked:
        # several rounds watched together do not belong beside the epsilon of one
        if group.setting == setting and group.kind == kind and group.column.target.rounds == 1:
            estimate, name = _estimate(group, measure), group.defense.label
            if estimate is not None and (name not in found or _is_further(measure, estimate, found[name][1])):
                found[name] = group, estimate
    return [found[defense] for defense in analysis.defenses if defense in found]


def _is_further(measure: Measure, one: Estimate, other: Estimate) -> bool:
    """Whether one estimate means more leakage than the other."""
    gap = (one.value or 0.0) - (other.value or 0.0)
    return gap < 0 if measure.is_distance else gap > 0


def _estimate(group: Group, measure: Measure) -> Estimate | None:
    """A measure of a group over its seeds; None where it has no value."""
    found = [estimate for result in group.results for estimate in result.estimates if estimate.name == measure.name]
    pooled = pool(found) if found else None
    if pooled is None or pooled.value is None:
        return None
    if measure.is_distance and pooled.low is not None:
        # Student's t does not know that a distance is not negative
        return dataclasses.replace(pooled, low=max(0.0, pooled.low))
    return pooled
