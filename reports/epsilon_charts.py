"""Charts against epsilon: one for each unit, relation and horizon; epsilons of different kinds never share an axis."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from harness.result import ClaimRecord, Estimate, PartSpec, Scalar
from reports.figures import ACCURACY_BETTER, LEAK_BETTER, Chart, Point, Series, capped, slug
from reports.labels import UNDEFENDED, varying_parameters
from reports.notation import fixed, interval, short
from reports.pool import accuracy
from reports.select import Analysis, Group


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
    """One defence at one epsilon: the claim, what was measured, and its place in the tables."""

    defense: PartSpec
    claim: ClaimRecord
    estimate: Estimate


def _weakest(claims: Iterable[ClaimRecord]) -> ClaimRecord | None:
    """The claim with the largest epsilon over the seeds; None if one of them promises nothing."""
    known = list(claims)
    if not known or any(claim.epsilon is None for claim in known):
        return None
    return max(known, key=lambda claim: claim.epsilon or 0.0)


def _families(samples: Sequence[Sample]) -> dict[str, list[Sample]]:
    """Samples that differ in one parameter only, by the name of their line."""
    lines: dict[str, list[Sample]] = {}
    for name in dict.fromkeys(sample.defense.name for sample in samples):
        mine = [sample for sample in samples if sample.defense.name == name]
        varying = varying_parameters([sample.defense for sample in mine])
        swept = max(varying, key=lambda p: _distinct(mine, p), default="")
        for sample in mine:
            rest = ", ".join(f"{p}={sample.defense.parameters.get(p)}" for p in varying if p != swept)
            delta = f"δ = {short(sample.claim.delta)}"
            lines.setdefault(", ".join(filter(None, (f"{name} {rest}".strip(), delta))), []).append(sample)
    return lines


def _distinct(samples: Sequence[Sample], parameter: str) -> int:
    """How many values a parameter takes; the one with most is the one that a line sweeps."""
    values: set[Scalar] = {sample.defense.parameters.get(parameter) for sample in samples}
    return len(values)


def _against_epsilon(analysis: Analysis, what: str, samples: Sequence[Sample], open_: Estimate | None) -> list[Chart]:
    """One chart an axis of at least two points; `what` is `accuracy`, `ssim` or `auc`."""
    axes: dict[Axis, list[Sample]] = {}
    for sample in samples:
        if sample.claim.epsilon is not None and sample.claim.epsilon > 0 and sample.estimate.value is not None:
            axes.setdefault(Axis(sample.claim.unit, sample.claim.relation, sample.claim.horizon), []).append(sample)
    charts = []
    for axis, found in axes.items():
        if len(found) < 2:
            continue
        series = []
        for look, (label, members) in enumerate(_families(found).items()):
            ordered = sorted(members, key=lambda s: s.claim.epsilon or 0.0)
            series.append(Series(label, tuple(_point(sample) for sample in ordered), look))
        shown, rest = capped(series)
        rows = tuple(_sample_row(analysis, sample) for sample in found)
        charts.append(_epsilon_chart(what, axis, shown, rows, open_, rest))
    return charts


def _point(sample: Sample) -> Point:
    """A sample on its chart."""
    estimate = sample.estimate
    return Point(sample.claim.epsilon or 0.0, estimate.value or 0.0, estimate.low, estimate.high)


def _sample_row(analysis: Analysis, sample: Sample) -> tuple[str, ...]:
    """A sample in the data table."""
    label = analysis.defenses[sample.defense.label].text
    claim, e = sample.claim, sample.estimate
    return label, short(claim.epsilon), short(claim.delta), ", ".join(claim.against), fixed(e.value), interval(e)


def _epsilon_chart(
    what: str,
    axis: Axis,
    series: tuple[Series, ...],
    rows: tuple[tuple[str, ...], ...],
    open_: Estimate | None,
    rest: str,
) -> Chart:
    """A chart against one kind of epsilon."""
    title, y_label, better = {
        "accuracy": ("Accuracy against claimed epsilon", "test accuracy", ACCURACY_BETTER),
        "ssim": ("Leakage against claimed epsilon", "mean SSIM, strongest attack", LEAK_BETTER),
        "auc": ("Membership against claimed epsilon", "AUC, strongest attack", LEAK_BETTER),
    }[what]
    lines = [] if open_ is None or open_.value is None else [(open_.value, f"no defence {fixed(open_.value)}")]
    if what == "auc":
        lines.append((0.5, "chance 0.500"))
    bars = "Bars: 95 % intervals." if any(p.low is not None for s in series for p in s.points) else ""
    scope = f"Epsilon as claimed, per {axis.unit}, {axis.horizon}, neighbours: {axis.relation}."
    return Chart(
        name=slug(f"{what} {axis.unit} {axis.relation} {axis.horizon}"),
        title=title,
        x_label=axis.label,
        y_label=y_label,
        series=series,
        better=better,
        caption=" ".join(filter(None, (scope, bars, rest))),
        header=("Defence", "ε claimed", "δ", "Against", y_label.capitalize(), "95 % interval"),
        rows=rows,
        lines=tuple(lines),
        log_x=True,
    )


def accuracy_charts(analysis: Analysis, setting: str) -> list[Chart]:
    """Final accuracy against the epsilon of the whole run; of one round where the run has none."""
    open_ = accuracy(analysis.trainings.get((setting, UNDEFENDED), ()))
    for whole in (True, False):
        samples = []
        for (place, _), trainings in analysis.trainings.items():
            claim = _weakest(t.whole_run if whole else t.one_round for t in trainings)
            value = accuracy(trainings)
            if place == setting and claim is not None and value is not None:
                samples.append(Sample(trainings[0].spec.defense, claim, value))
        charts = _against_epsilon(analysis, "accuracy", samples, open_)
        if charts:
            return charts
    return []


def leakage_charts(analysis: Analysis, setting: str, kind: str, what: str) -> list[Chart]:
    """The strongest attack against epsilon: of one round for messages, of the whole run for the final model."""
    best = _strongest(analysis, setting, kind)
    open_ = next((group.estimate for group in best if group.undefended), None)
    samples = []
    for group in best:
        claim = _weakest(t.one_round if kind == "reconstruction" else t.whole_run for t in analysis.of(group))
        if claim is not None and group.estimate is not None:
            samples.append(Sample(group.defense, claim, group.estimate))
    return _against_epsilon(analysis, what, samples, open_)


def _strongest(analysis: Analysis, setting: str, kind: str) -> list[Group]:
    """The strongest group of each defence."""
    groups = [g for g in analysis.attacked if g.setting == setting and g.kind == kind]
    rows = {defense: [g for g in groups if g.defense.label == defense] for defense in analysis.defenses}
    return [group for group in (analysis.best(row) for row in rows.values()) if group is not None]
