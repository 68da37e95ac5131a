"""The input of the gate: the numbers of a run as plain data, one `Measure` for each case and gated metric.

A case is one attack by one adversary on one target of one defense, over all seeds. A training's own metrics have no
attack. `core.metrics` lists the metrics and the test of each.

| test | values |
|---|---|
| paired | one for each item, such as an image |
| DeLong | one for each record: its placement among the records of the other side |
| rate | none; the placements of the same attack's `auc` are used |
| audit, rise, fall | one for each seed |
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from leakgauge.harness.core import stats
from leakgauge.harness.core.cases import Case, identity, trainings
from leakgauge.harness.core.cell import Cell, PartSpec, TrainingSpec
from leakgauge.harness.core.labels import (
    UNDEFENDED,
    case_text,
    label_parts,
    label_settings,
    part_text,
    setting_text,
    unique,
    where,
)
from leakgauge.harness.core.metrics import GateTest, Metric, gated
from leakgauge.harness.core.rating import Ratings
from leakgauge.harness.core.result import AuditRecord, Estimate, Run, Scores, TrainingRecord

DIGITS = 8
"""Number of hex digits of a case's identity in a key."""

_OF_AUDIT = (GateTest.AUDIT, GateTest.NEVER)
"""The tests of metrics of an audit. Every other metric of a training is an attribute of its record."""


@dataclass(frozen=True)
class Measure:
    """One number of a run, with the values that it was computed from.

    Attributes:
        key: `defense/attack/adversary/metric/eight hex digits`, or `defense/metric/eight hex digits`. The digits
            identify the whole case without its seed, so the same case has the same key in every run.
        defense, attack: the parts with their parameters; no attack for a training.
        threat, target, setting: for people; the first two are empty for a training.
        aware: whether the attack is defense-aware.
        control: `ceiling` without a defense, `floor` for an attack that observes nothing, else empty.
        value: None if there is no value; `problem` then states the reason.
        low, high: ends of the 95 % interval of the value, if there is an interval.
        values: see the table of this module; None for an item that failed.
        items: one name per seed for the items behind the values: a digest of the images or of the members, else empty.
        sides: for placements, the numbers of members and of others of each seed; their values are in this order.
        limit: for an audit, the claim in the audit's federation; None for infinity.
        about: for an audit, its unit, horizon, delta and adversary.
        unseen: indices of the images that are not identified among others, so they are not recognizable at any SSIM;
            also empty for results older than `identification`.
        problem: why the measure cannot be judged: a cell failed, is missing, or gave no number. Empty: no problem.
    """

    key: str
    metric: str
    defense: PartSpec
    attack: PartSpec | None
    threat: str
    target: str
    setting: str
    aware: bool
    control: Literal["", "ceiling", "floor"]
    value: float | None
    low: float | None
    high: float | None
    values: tuple[float | None, ...]
    items: tuple[str, ...] = ()
    sides: tuple[tuple[int, int], ...] = ()
    limit: float | None = None
    about: str = ""
    problem: str = ""
    unseen: tuple[int, ...] = ()

    @property
    def n(self) -> int:
        """The number of values that are not missing."""
        return sum(value is not None for value in self.values)

    @property
    def parts(self) -> tuple[PartSpec, ...]:
        """The defense, and the attack if there is one."""
        return (self.defense,) if self.attack is None else (self.defense, self.attack)

    @property
    def name(self) -> str:
        """Defense, attack, adversary, target and metric in one phrase, with all parameters."""
        return self.named(part_text(self.defense), "" if self.attack is None else part_text(self.attack))

    def named(self, defense: str, attack: str) -> str:
        """`name`, but with these words for the defense and the attack."""
        about = f" {self.about}" if self.about else ""
        return f"{case_text(defense, attack, self.threat, self.target)}: {self.metric}{about}"


@dataclass(frozen=True)
class Measured:
    """All measures of a run, and the facts that decide whether two runs are comparable.

    Attributes:
        study, study_hash: name and fingerprint of the resolved cells.
        data: digest of each data set.
        commit, dirty: of the code; several commits are joined by a comma.
        packages: versions of the packages behind the numbers.
        machine: the kind of machine.
        numerics: the different values of `Environment.numerics` behind the numbers; none: unknown, as before 0.2.
        ratings: for people: defense, adversary and rating; empty if only a part of the study ran.
    """

    study: str
    study_hash: str
    data: dict[str, str]
    commit: str
    dirty: bool
    packages: dict[str, str]
    machine: str
    measures: tuple[Measure, ...]
    ratings: tuple[tuple[str, str, str], ...] = ()
    numerics: tuple[dict[str, str], ...] = ()

    def by_key(self) -> dict[str, Measure]:
        """The measures by their keys."""
        return {measure.key: measure for measure in self.measures}

    def source(self) -> dict[str, object]:
        """Study, commit, machine, numerics, data and packages, by name."""
        names = ("study", "study_hash", "commit", "dirty", "machine", "numerics", "data", "packages")
        return {name: getattr(self, name) for name in names}


def measured(run: Run) -> Measured:
    """The measures of a run, in the study's order: first of the attacks, then of the trainings."""
    environments = run.environments
    packages, rated = dict[str, str](), Ratings(run)
    for environment in environments:
        packages |= environment.packages | {"python": environment.python}
    return Measured(
        study=run.name,
        study_hash=run.study_hash,
        data=dict(sorted(run.data_hashes.items())),
        commit=", ".join(dict.fromkeys(environment.commit for environment in environments)),
        dirty=any(environment.dirty for environment in environments),
        packages=dict(sorted(packages.items())),
        machine=", ".join(dict.fromkeys(environment.machine for environment in environments)),
        measures=(*(measure for case in rated.cases for measure in _of_case(run, case)), *_of_trainings(run)),
        ratings=tuple(_ratings(rated)),
        numerics=run.numerics,
    )


def _ratings(rated: Ratings) -> Iterable[tuple[str, str, str]]:
    """Each rating in words, with its setting if there are several."""
    run = rated.run
    defenses, settings = label_parts(cell.training.defense for cell in run.cells), label_settings(run.cells)
    for one in rated.all:
        place = f" ({settings[one.setting]})" if len(settings) > 1 else ""
        yield f"{defenses[one.defense].text}{place}", one.adversary, f"{one.text}: {one.reason}"


def key_end(cell: Cell) -> str:
    """The end of the keys of a cell's measures."""
    return identity(cell)[:DIGITS]


def titles(measures: Iterable[Measure]) -> dict[str, str]:
    """The title of each measure by its key; only parameters that differ among these measures are spelled out.

    If there are several settings, each title ends in its own; titles that are still equal end in part of the key.
    """
    known = {measure.key: measure for measure in measures}
    short = label_parts(part for measure in known.values() for part in measure.parts)
    several = len({measure.setting for measure in known.values()}) > 1
    named = {}
    for key, measure in known.items():
        name = measure.named(*(short[part.key].text for part in measure.parts), *[""] * (measure.attack is None))
        named[key] = f"{name} ({measure.setting})" if several else name
    return unique(named)


def image_names(images: Iterable[int], measure: Measure | None) -> list[str]:
    """Numbers of images as in the report: `3`, counted from 1; with several seeds `3 (seed no. 2)`."""
    size = len(measure.values) // len(measure.items) if measure is not None and len(measure.items) > 1 else 0
    return [f"{at % size + 1} (seed no. {at // size + 1})" if size else str(at + 1) for at in images]


def placements(scores: Scores) -> tuple[stats.Numbers, stats.Numbers]:
    """For each member the share of others below it, for each other the share of members above it; ties count half.

    The mean of either is the AUC; their variances are DeLong's.
    """
    return stats.placements(scores.members, scores.outside), 1 - stats.placements(scores.outside, scores.members)


def by_seed(
    values: Sequence[float | None], sides: Sequence[tuple[int, int]]
) -> Iterable[tuple[stats.Numbers, stats.Numbers]]:
    """The placements of members and of others, seed by seed."""
    x, at = np.array(values, dtype=np.float64), 0
    for members, others in sides:
        yield x[at : at + members], x[at + members : at + members + others]
        at += members + others


def _of_case(run: Run, case: Case) -> Iterable[Measure]:
    problem = _problem(case)
    for metric in gated(GateTest.PAIRED):
        if metric.kind == case.kind:
            yield from _items(run, case, metric, problem)
    if case.kind == "membership":
        yield from _membership(run, case, problem)


def _items(run: Run, case: Case, metric: Metric, problem: str) -> Iterable[Measure]:
    """A metric with a value for each item; nothing if a finished result lacks it (other inputs have other scores)."""
    estimates = case.estimates(metric.name)
    if len(estimates) < len(case.cells) and not (problem and (estimates or metric.headline)):
        return
    values = _rounded(metric, (value for estimate in estimates for value in estimate.values))
    lost = sum(value is None for value in values)
    if lost and not problem:
        problem = f"{lost} of {len(values)} {metric.items} have no number"
    pooled = stats.of_items(metric.name, values)
    items = tuple(_images(run, cell) for cell in case.cells)
    identified = [value for estimate in case.estimates("identification") for value in estimate.values]
    known = metric.recognizable is not None and len(identified) == len(values)
    unseen = tuple(at for at, value in enumerate(identified) if value != 1) if known else ()
    yield dataclasses.replace(_attacked(case, metric, pooled, problem), values=values, items=items, unseen=unseen)


def _membership(run: Run, case: Case, problem: str) -> Iterable[Measure]:
    """The AUC, and the rate at the lowest false positive rate for which there are enough non-members."""
    scores = [run.scores(cell.id) for cell in case.cells]
    if not problem and any(scored is None for scored in scores):
        problem = "the scores of a finished cell cannot be read"
    known = [scored for scored in scores if scored is not None]
    sides = tuple((len(scored.members), len(scored.outside)) for scored in known)
    who = tuple(scored.who for scored in known)
    outside = min((others for _, others in sides), default=0)
    for metric in gated(GateTest.DELONG):
        placed = (value for scored in known for side in placements(scored) for value in side.tolist())
        values, estimates = _rounded(metric, placed), case.estimates(metric.name)
        curve = stats.pool(estimates) if estimates else stats.of_items(metric.name, ())
        means = [float(np.mean(members)) for members, _ in by_seed(values, sides)]
        curve = dataclasses.replace(curve, value=float(np.mean(means)) if means else None)
        yield dataclasses.replace(_attacked(case, metric, curve, problem), values=values, items=who, sides=sides)
    rates = [rate for rate in gated(GateTest.RATE) if outside * (rate.false_positives or 0.0) >= 10]
    for metric in rates[:1]:
        estimates = [estimate for estimate in case.estimates(metric.name) if estimate.value is not None]
        pooled = stats.pool_shares(estimates) if estimates else stats.proportion(metric.name, 0, 0)
        yield dataclasses.replace(_attacked(case, metric, pooled, problem), items=who, sides=sides)


def _attacked(case: Case, metric: Metric, estimate: Estimate, problem: str) -> Measure:
    made = _bare(case.training, metric, estimate, case.identity, problem)
    return dataclasses.replace(
        made,
        key=f"{case.training.defense.name}/{case.attack.name}/{case.threat}/{metric.name}/{case.identity[:DIGITS]}",
        attack=case.attack,
        threat=case.threat,
        target=where(case.target),
        aware=case.info.aware,
        control="floor" if case.info.floor else made.control,
    )


def _of_trainings(run: Run) -> Iterable[Measure]:
    """Accuracy, bits and audit of each defense in each setting under an honest server, over the seeds."""
    for name, specs in trainings(run).items():
        if specs[0].malice is not None:
            continue
        records = [run.trainings.get(spec.id) for spec in specs]
        lost = sum(record is None for record in records)
        problem = f"{lost} of {len(records)} trainings not finished" if lost else ""
        known = [record for record in records if record is not None]
        audits = [record.audited for record in known if record.audited is not None]
        for metric in gated(*_OF_AUDIT, GateTest.RISE, GateTest.FALL):
            of_audit = metric.gate in _OF_AUDIT
            if of_audit and not audits:
                continue
            values = tuple(_read(metric, record) for record in known if record.spec.audit or not of_audit)
            if metric.gate is GateTest.FALL and known and not any(value is not None for value in values):
                continue  # a regression has no accuracy
            lacks = "a training has no number" if not problem and any(value is None for value in values) else problem
            made = _bare(specs[0], metric, stats.mean(metric.name, values), name, lacks)
            made = dataclasses.replace(made, values=values)
            yield _audited(made, audits) if of_audit else made


def _read(metric: Metric, record: TrainingRecord) -> float | None:
    if metric.gate not in _OF_AUDIT:
        value: float | None = getattr(record, metric.name)
        return value
    audit = record.audited
    if audit is None:
        return None
    return audit.epsilon_lower if metric.gate is GateTest.AUDIT else float(bool(audit.contradictions))


def _audited(made: Measure, audits: Sequence[AuditRecord]) -> Measure:
    limits = [audit.claimed for audit in audits if audit.claimed is not None]
    first = audits[0]
    rounds = f"{first.rounds} rounds" if first.rounds > 1 else "one round"
    codes = "/".join(dict.fromkeys(audit.code for audit in audits))
    about = f"per {first.unit}, {rounds}, delta {first.delta:.3g}, by {first.threat}; code {codes}"
    return dataclasses.replace(made, limit=min(limits) if limits else None, about=about)


def _bare(spec: TrainingSpec, metric: Metric, estimate: Estimate, name: str, problem: str) -> Measure:
    """A measure of a training, without its values."""
    return Measure(
        key=f"{spec.defense.name}/{metric.name}/{name[:DIGITS]}",
        metric=metric.name,
        defense=spec.defense,
        attack=None,
        threat="",
        target="",
        setting=setting_text(spec.task, spec.federation),
        aware=False,
        control="ceiling" if spec.defense.name == UNDEFENDED else "",
        value=estimate.value,
        low=estimate.low,
        high=estimate.high,
        values=(),
        problem=problem,
    )


def _problem(case: Case) -> str:
    for failure in case.failures:
        return f"a cell failed: {failure.kind}: {failure.message.splitlines()[0] if failure.message else ''}"
    return f"{case.missing} of {len(case.cells)} cells missing" if case.missing else ""


def _images(run: Run, cell: Cell) -> str:
    pictures = run.pictures(cell.id)
    if pictures is None:
        return ""
    return hashlib.sha256(np.ascontiguousarray(pictures.original).tobytes()).hexdigest()[:16]


def _rounded(metric: Metric, values: Iterable[float | None]) -> tuple[float | None, ...]:
    return tuple(None if value is None else round(value, metric.decimals) for value in values)
