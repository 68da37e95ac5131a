"""Charts against epsilon: one for each unit, relation and horizon; different kinds of epsilon never share an axis."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from leakgauge.harness.core.cases import gathered
from leakgauge.harness.core.cell import PartSpec
from leakgauge.harness.core.labels import UNDEFENDED, varying_parameters, written
from leakgauge.harness.core.metrics import METRICS, Metric
from leakgauge.harness.core.result import ClaimRecord, Estimate
from leakgauge.reports.charts.figures import ACCURACY_BETTER, LEAK_BETTER, Chart, Point, Series, capped, slug
from leakgauge.reports.sections.checked import checked, severity, verdict_of
from leakgauge.reports.select import Analysis, final_accuracy
from leakgauge.reports.text.notation import adversaries, fixed, listing, number, per, percent, short, spread

MOST_NAMES = 3
"""Number of defenses that a caption names."""

FAR = 100.0
"""A chart of distances leaves out the undefended line if it is below the lowest point by more than this factor."""


class Sample(NamedTuple):
    """One defense at one epsilon: the claim and the measured value."""

    defense: PartSpec
    claim: ClaimRecord
    estimate: Estimate


class Measure(NamedTuple):
    """The y axis of a chart: its metric, and the texts of the chart."""

    metric: Metric
    title: str
    y_label: str
    better: str = LEAK_BETTER

    @property
    def scale(self) -> float:
        """Factor from the metric to the axis."""
        return 100.0 if self.metric.percent else 1.0

    @property
    def is_distance(self) -> bool:
        """Whether a lower value means that the adversary is nearer to the image; such values span decades."""
        return self.metric.higher_leaks is False

    @property
    def line(self) -> tuple[float, str] | None:
        """The reference line."""
        if self.metric.recognizable is not None:
            return self.metric.recognizable, f"recognizable from {self.metric.recognizable}"
        return None if self.metric.chance is None else (self.metric.chance, f"chance {fixed(self.metric.chance)}")

    def write(self, value: float | None) -> str:
        """A value in the data table."""
        if self.is_distance:
            return short(value, 3)
        return percent(value) if self.metric.percent else fixed(value)


ACCURACY = Measure(METRICS["accuracy"], "Accuracy against claimed epsilon", "test accuracy, %", ACCURACY_BETTER)
SSIM = Measure(METRICS["ssim"], "Leakage against claimed epsilon", "mean SSIM, strongest attack")
MSE = Measure(
    METRICS["mse"],
    "Distance to the image against claimed epsilon",
    "median MSE, nearest attack",
    "Higher is better for the clients: a lower MSE means that the adversary gets nearer to the image.",
)
AUC = Measure(METRICS["auc"], "Membership against claimed epsilon", "AUC, strongest attack")


def accuracy_charts(analysis: Analysis, setting: str) -> list[Chart]:
    """Final accuracy against the epsilon of the whole run, or of one round if the run has no finite epsilon."""
    undefended = final_accuracy(analysis.trainings_of(setting, UNDEFENDED))
    for whole in (True, False):
        samples = []
        for (place, _), trainings in analysis.trainings.items():
            claim = _weakest(checked(t)[whole] for t in trainings)
            value = final_accuracy(trainings)
            if place == setting and claim is not None and value is not None:
                samples.append(Sample(trainings[0].spec.defense, claim, value))
        if charts := _charts(analysis, ACCURACY, samples, undefended):
            return charts
    return []


def leakage_charts(analysis: Analysis, setting: str, measure: Measure) -> list[Chart]:
    """The strongest attack against epsilon: of one round for messages, of the whole run for the final model."""
    strongest, samples = _strongest(analysis, setting, measure), []
    for defense in analysis.defenses:
        trainings = analysis.trainings_of(setting, defense)
        claim = _weakest(checked(t)[measure.metric.kind != "reconstruction"] for t in trainings)
        if claim is not None and defense in strongest:
            samples.append(Sample(trainings[0].spec.defense, claim, strongest[defense]))
    return _charts(analysis, measure, samples, strongest.get(UNDEFENDED))


def _strongest(analysis: Analysis, setting: str, measure: Measure) -> dict[str, Estimate]:
    strongest: dict[str, Estimate] = {}
    for group in analysis.attacked:
        # an attack on several rounds does not belong on the axis of the epsilon of one round
        if group.setting == setting and group.case.kind == measure.metric.kind and group.case.target.rounds == 1:
            # nor does an adversary whom this epsilon does not cover
            estimate = None if analysis.unpromised(group) else group.pooled(measure.metric.name)
            if estimate is not None and estimate.value is not None:
                other = strongest.setdefault(group.defense, estimate).value or 0.0
                if estimate.value != other and (estimate.value < other) is measure.is_distance:
                    strongest[group.defense] = estimate
    return strongest


def _weakest(claims: Iterable[ClaimRecord]) -> ClaimRecord | None:
    """The claim with the largest epsilon over the seeds (of equal ones, the worst verdict); None if one is infinite."""
    known = list(claims)
    if not known or any(claim.epsilon is None for claim in known):
        return None
    return max(known, key=lambda claim: (claim.epsilon or 0.0, severity(claim)))


def _same_kind(claim: ClaimRecord) -> bool:
    """Whether the proved epsilon belongs on the axis of the claimed epsilon."""
    proved = claim.proved
    return (proved.unit, proved.delta, set(proved.against)) == (claim.unit, claim.delta, set(claim.against))


def _mark(claim: ClaimRecord) -> float | None:
    return claim.proved.epsilon or None if verdict_of(claim) != "HOLDS" and _same_kind(claim) else None


def _unmarked(analysis: Analysis, samples: Sequence[Sample]) -> str:
    """A sentence on differing proved epsilons without a marker: infinite, zero, or of another kind."""
    lacking = [s for s in samples if verdict_of(s.claim) != "HOLDS" and _mark(s.claim) is None]
    names = [f"{analysis.defenses[s.defense.key].text} ({_proved(s.claim)}, {verdict_of(s.claim)})" for s in lacking]
    more = [f"{len(names) - MOST_NAMES} more"] if len(names) > MOST_NAMES else []
    return f"No marker for the proved epsilon of {listing(names[:MOST_NAMES] + more)}." if names else ""


def _proved(claim: ClaimRecord) -> str:
    value = number(claim.proved.epsilon)
    return value if _same_kind(claim) else f"{value} {per(claim.proved.unit, claim.proved.delta)}"


def _families(samples: Sequence[Sample]) -> dict[str, list[Sample]]:
    """The lines by name: samples that differ in one parameter only; claims with other deltas form other lines."""
    several = len({sample.claim.against for sample in samples}) > 1
    lines: dict[str, list[Sample]] = {}
    for name, alike in gathered((sample.defense.name, sample) for sample in samples).items():
        varying = varying_parameters([sample.defense for sample in alike])
        # a line sweeps the parameter with the most values
        values = {key: len({sample.defense.parameters.get(key) for sample in alike}) for key in varying}
        swept = max(varying, key=values.__getitem__, default="")
        for sample in alike:
            rest = written(sample.defense.parameters, [p for p in varying if p != swept])
            against = f"against {adversaries(sample.claim.against)}" if several else ""
            pieces = f"{name} {rest}".strip(), f"δ = {short(sample.claim.delta)}", against
            lines.setdefault(", ".join(filter(None, pieces)), []).append(sample)
    return lines


def _charts(
    analysis: Analysis, measure: Measure, samples: Sequence[Sample], undefended: Estimate | None
) -> list[Chart]:
    known = [one for one in samples if (one.claim.epsilon or 0.0) > 0 and one.estimate.value is not None]
    axes = gathered(((one.claim.unit, one.claim.relation, one.claim.horizon), one) for one in known)
    return [_chart(analysis, measure, alike, undefended) for alike in axes.values() if len(alike) > 1]


def _point(sample: Sample, scale: float) -> Point:
    e = sample.estimate
    low, high = None if e.low is None else scale * e.low, None if e.high is None else scale * e.high
    return Point(sample.claim.epsilon or 0.0, scale * (e.value or 0.0), low, high, _mark(sample.claim))


def _row(analysis: Analysis, measure: Measure, sample: Sample) -> tuple[str, ...]:
    claim, e = sample.claim, sample.estimate
    name, claimed = analysis.defenses[sample.defense.key].text, short(claim.epsilon)
    rest = short(claim.delta), adversaries(claim.against), measure.write(e.value), spread(e.low, e.high, measure.write)
    return name, claimed, _proved(claim), verdict_of(claim), *rest


def _chart(analysis: Analysis, measure: Measure, samples: Sequence[Sample], undefended: Estimate | None) -> Chart:
    kind, series = samples[0].claim, []
    for look, (label, members) in enumerate(_families(samples).items()):
        ordered = sorted(members, key=lambda sample: sample.claim.epsilon or 0.0)
        series.append(Series(label, tuple(_point(sample, measure.scale) for sample in ordered), look))
    shown, rest = capped(series)
    ceiling, far = _ceiling(measure, samples, undefended)
    lines = ([] if measure.line is None else [measure.line]) + ceiling
    heights = [point.y for line in series for point in line.points] + [height for height, _ in lines]
    log_y = measure.is_distance and all(height > 0 for height in heights)
    y_label = f"{measure.y_label}{' (log scale)' if log_y else ''}"
    methods = dict.fromkeys(s.estimate.method for s in samples if s.estimate.low is not None and s.estimate.method)
    bars = f"Bars: 95 % intervals ({listing(methods)})." if methods else ""
    caption = (_scope(samples, shown), _unmarked(analysis, samples), far, bars, rest)
    value = measure.y_label[:1].upper() + measure.y_label[1:]
    return Chart(
        name=slug(f"{measure.metric.name} {kind.unit} {kind.relation} {kind.horizon}"),
        title=f"{measure.title} per {kind.unit}",
        x_label=f"claimed ε per {kind.unit}, {kind.horizon}, {kind.relation} (log scale)",
        y_label=y_label,
        series=shown,
        better=measure.better,
        caption=" ".join(filter(None, caption)),
        header=("Defense", "ε claimed", "ε proved", "Verdict", "δ", "Against", value, "95 % interval"),
        rows=tuple(_row(analysis, measure, sample) for sample in samples),
        lines=tuple(lines),
        log_x=True,
        log_y=log_y,
    )


def _scope(samples: Sequence[Sample], series: Sequence[Series]) -> str:
    kind, against = samples[0].claim, {adversaries(sample.claim.against) for sample in samples}
    scope = f"Claimed epsilon per {kind.unit}, {kind.horizon}, neighbors: {kind.relation}"
    scope += f", against {against.pop()}." if len(against) == 1 else "."
    marked = any(point.proved is not None for line in series for point in line.points)
    return f"{scope} Hollow markers: proved epsilon, if it differs." if marked else scope


def _ceiling(
    measure: Measure, samples: Sequence[Sample], undefended: Estimate | None
) -> tuple[list[tuple[float, str]], str]:
    """The undefended line, or a sentence if the line is so far below the distances that it would flatten the chart."""
    if undefended is None or undefended.value is None:
        return [], ""
    text = f"no defense {measure.write(undefended.value)}"
    if measure.is_distance and undefended.value < min(sample.estimate.value or 0.0 for sample in samples) / FAR:
        return [], f"Far below the axis: {text}."
    return [(measure.scale * undefended.value, text)], ""
