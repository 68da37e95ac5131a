"""What a gate looks at: the numbers of a run as plain data, one `Measure` for each case and metric.

A case is an attack by one adversary on one target of one defense, over all seeds; or a defense's training.

| metric | of | values, one for each | more is |
|---|---|---|---|
| `ssim` | an attack that reconstructs | image | leakage |
| `auc` | an attack that tells members | record: its placement among those of the other side | leakage |
| `tpr@0.1%`, `tpr@1%` | the same, with 10,000 or 1,000 who took no part | | leakage |
| `epsilon` | a training with an audit: the audited lower bound | seed | a weaker defense |
| `bits` | a training: bits sent for a parameter | seed | traffic |
| `accuracy` | a training: of the last model | seed | use |
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from leakgauge.harness.core import stats
from leakgauge.harness.core.cell import Cell, TrainingSpec, fingerprint
from leakgauge.harness.core.result import AuditRecord, Estimate, PartInfo, Result, Run, Scores, TrainingRecord

Metric = Literal["ssim", "auc", "tpr@1%", "tpr@0.1%", "epsilon", "bits", "accuracy"]

OPEN = "none"
"""The defense that is none: the ceiling."""

OUTSIDE = {"tpr@0.1%": 10_000, "tpr@1%": 1_000}
"""Non-members that a rate at few false alarms needs; with fewer, the AUC stands alone."""

DIGITS = 8
"""Of a fingerprint, in a key."""

_DECIMALS = {"ssim": 6, "auc": 5}
"""That are kept of a value."""


@dataclass(frozen=True)
class Measure:
    """One number of a run with what it was made of.

    Attributes:
        key: `defense/attack/adversary/metric/eight hex digits`, or `defense/metric/eight hex digits`: of the whole
            question but for the seed, so that the same question has the same key in every run.
        defense, attack, threat, target: for people; the last three are empty for a training.
        setting: task and federation, for people.
        aware: whether the attack knows the defense.
        control: `ceiling` without a defense, `floor` of an attack that looks at nothing, else empty.
        value: None where there is none; then `problem` says why.
        low, high: ends of the 95 % interval of the value, where there is one.
        values: see the table of this module; None for an item that failed.
        items: what the values are of, one name each seed: a digest of the images or of who is a member, else empty.
        sides: of `auc`, members and others of each seed, whose values follow each other seed by seed.
        limit: of `epsilon`, what is claimed there, None for infinity.
        about: of `epsilon`, its unit, horizon, delta and adversary.
        problem: why the measure cannot be judged: a cell failed, is missing, or gave no number. Empty: none.
    """

    key: str
    metric: Metric
    defense: str
    attack: str
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

    @property
    def n(self) -> int:
        """Values that are there."""
        return sum(value is not None for value in self.values)

    @property
    def name(self) -> str:
        """Defense, attack, adversary, target and metric in one phrase."""
        case = f" under {self.attack}, {self.threat}, {self.target}" if self.attack else ""
        return f"{self.defense}{case}: {self.metric}{f' {self.about}' if self.about else ''}"


@dataclass(frozen=True)
class Measured:
    """All measures of a run, with what makes two runs comparable.

    Attributes:
        study, study_hash: name and fingerprint of the resolved cells.
        data: digest of each data set.
        commit, dirty: of the code; several commits are joined by a comma.
        packages: versions of what the numbers rest on.
        machine: kind of machine.
    """

    study: str
    study_hash: str
    data: dict[str, str]
    commit: str
    dirty: bool
    packages: dict[str, str]
    machine: str
    measures: tuple[Measure, ...]

    def by_key(self) -> dict[str, Measure]:
        """The measures by their keys."""
        return {measure.key: measure for measure in self.measures}


def measured(run: Run) -> Measured:
    """The measures of a run, in the study's order: those of each training behind those of its attacks."""
    environments = [record.environment for record in run.trainings.values()]
    environments += [result.environment for result in run.results.values()]
    packages: dict[str, str] = {}
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
        measures=(*_of_attacks(run), *_of_trainings(run)),
    )


def case(cell: Cell) -> str:
    """A fingerprint of a cell but for its seed; the keys of its measures end in its first `DIGITS`."""
    return _identity(cell.training, cell.attack, cell.target, cell.threat)


def _of_attacks(run: Run) -> Iterable[Measure]:
    """The measures of all cases, one after another."""
    cases: dict[str, list[Cell]] = {}
    for cell in run.cells:
        cases.setdefault(case(cell), []).append(cell)
    for identity, cells in cases.items():
        info = run.attacks.get(cells[0].attack.label, PartInfo(cells[0].attack.name, ""))
        results = [run.results.get(cell.id) for cell in cells]
        problem = _problem(run, cells)
        if info.kind == "membership" or (not info.kind and cells[0].target.kind == "members"):
            yield from _membership(run, cells, info, problem, identity)
            continue
        estimates = [None if result is None else _estimate(result, "ssim") for result in results]
        if info.kind == "labels" or (not problem and any(estimate is None for estimate in estimates)):
            continue  # or records that are no images
        pooled = tuple(value for estimate in estimates if estimate is not None for value in estimate.values)
        lost = sum(value is None for value in pooled)
        if lost and not problem:
            problem = f"{lost} of {len(pooled)} images have no number"
        items = tuple(_images(run, cell) for cell in cells)
        yield _attacked(cells, info, "ssim", identity, _rounded("ssim", pooled), items=items, problem=problem)


def _membership(run: Run, cells: Sequence[Cell], info: PartInfo, problem: str, identity: str) -> Iterable[Measure]:
    """AUC, and the rate at the fewest false alarms that there are enough non-members for."""
    scores = [run.scores(cell.id) for cell in cells]
    if not problem and any(one is None for one in scores):
        problem = "the scores of a finished cell cannot be read"
    known = [one for one in scores if one is not None]
    values = tuple(value for one in known for side in placements(one) for value in side.tolist())
    sides = tuple((len(one.members), len(one.outside)) for one in known)
    who = tuple(one.who for one in known)
    yield _attacked(cells, info, "auc", identity, _rounded("auc", values), items=who, sides=sides, problem=problem)
    outside = min((len(one.outside) for one in known), default=0)
    rate: Metric | None = next((name for name, least in OUTSIDE.items() if outside >= least), None)  # type: ignore[misc]
    if rate is not None:
        found = [_estimate(run.results[cell.id], rate) for cell in cells if cell.id in run.results]
        rates = [estimate for estimate in found if estimate is not None and estimate.value is not None]
        hits = sum(round((estimate.value or 0.0) * estimate.n) for estimate in rates)
        pooled = stats.proportion(rate, hits, sum(estimate.n for estimate in rates), higher_leaks=True)
        made = _attacked(cells, info, rate, identity, (), items=who, sides=sides, problem=problem)
        yield dataclasses.replace(made, value=pooled.value, low=pooled.low, high=pooled.high)


def placements(scores: Scores) -> tuple[stats.Numbers, stats.Numbers]:
    """For each member the share of the others below it, for each other the share of members above it; ties half.

    The mean of either is the AUC; their variances are DeLong's.
    """
    return stats.placements(scores.members, scores.outside), 1 - stats.placements(scores.outside, scores.members)


def _of_trainings(run: Run) -> Iterable[Measure]:
    """Accuracy, bits and audit of each defense in each setting, over the seeds."""
    groups: dict[str, list[TrainingSpec]] = {}
    for spec in {cell.training.id: cell.training for cell in run.cells}.values():
        groups.setdefault(_identity(spec), []).append(spec)
    for identity, specs in groups.items():
        records = [run.trainings.get(spec.id) for spec in specs]
        lost = sum(record is None for record in records)
        problem = f"{lost} of {len(records)} trainings not finished" if lost else ""
        known = [record for record in records if record is not None]
        # a regression has no accuracy
        if not known or any(record.accuracy is not None for record in known):
            yield _trained(specs, "accuracy", identity, known, lambda record: record.accuracy, problem)
        yield _trained(specs, "bits", identity, known, _bits, problem)
        audits = [record.audited for record in known if record.audited is not None]
        if specs[0].audit and audits:
            yield _trained(specs, "epsilon", identity, known, _audited, problem, audits)


def _trained(
    specs: Sequence[TrainingSpec],
    metric: Metric,
    identity: str,
    known: Sequence[TrainingRecord],
    read: Callable[[TrainingRecord], float | None],
    problem: str,
    audits: Sequence[AuditRecord] = (),
) -> Measure:
    """One measure of a training."""
    values = tuple(read(record) for record in known)
    if not problem and any(value is None for value in values):
        problem = "a training has no number"
    limits = [audit.claimed for audit in audits if audit.claimed is not None]
    value, (low, high) = _mean(values)
    return dataclasses.replace(
        _bare(specs[0], metric, identity, problem),
        value=value,
        low=low,
        high=high,
        values=values,
        limit=min(limits) if limits else None,
        about=_about(audits[0]) if audits else "",
    )


def _about(audit: AuditRecord) -> str:
    """What an audited epsilon is of."""
    rounds = f"{audit.rounds} rounds" if audit.rounds > 1 else "one round"
    return f"a {audit.unit}, {rounds}, delta {audit.delta:.3g}, by {audit.threat}"


def _attacked(
    cells: Sequence[Cell],
    info: PartInfo,
    metric: Metric,
    identity: str,
    values: tuple[float | None, ...],
    *,
    problem: str,
    items: tuple[str, ...] = (),
    sides: tuple[tuple[int, int], ...] = (),
) -> Measure:
    """One measure of a case."""
    cell = cells[0]
    target = cell.target
    place = target.kind if target.round is None else f"{target.kind} at round {target.round}"
    place += f", {target.rounds} rounds" if target.rounds > 1 else ""
    place += f", batch {target.batch}" if target.batch > 1 else ""
    made = _bare(cell.training, metric, identity, problem)
    value, (low, high) = (_auc(values, sides), stats.Interval(None, None)) if sides and values else _mean(values)
    return dataclasses.replace(
        made,
        key=f"{cell.training.defense.name}/{cell.attack.name}/{cell.threat}/{metric}/{identity[:DIGITS]}",
        attack=cell.attack.label,
        threat=cell.threat,
        target=place,
        aware=info.aware,
        control="floor" if info.floor else made.control,
        value=value,
        low=low,
        high=high,
        values=values,
        items=items,
        sides=sides,
    )


def _bare(spec: TrainingSpec, metric: Metric, identity: str, problem: str) -> Measure:
    """A measure of a training without its number."""
    federation = spec.federation
    setting = f"{spec.task.data}, {spec.task.model}, {federation.clients} clients, {federation.rounds} rounds"
    return Measure(
        key=f"{spec.defense.name}/{metric}/{identity[:DIGITS]}",
        metric=metric,
        defense=spec.defense.label,
        attack="",
        threat="",
        target="",
        setting=f"{setting}, {federation.algorithm}",
        aware=False,
        control="ceiling" if spec.defense.name == OPEN else "",
        value=None,
        low=None,
        high=None,
        values=(),
        problem=problem,
    )


def _identity(training: TrainingSpec, *rest: Any) -> str:
    """A fingerprint of the question, but for its seed."""
    parts = [dataclasses.asdict(part) if dataclasses.is_dataclass(part) else part for part in rest]  # type: ignore[arg-type]
    return fingerprint([{**training.meaning, "seed": None}, *parts])


def _mean(values: Sequence[float | None]) -> tuple[float | None, stats.Interval]:
    """The mean of what is there, with Student's interval."""
    known = [value for value in values if value is not None]
    if not known:
        return None, stats.Interval(None, None)
    return float(np.mean(known)), stats.mean_interval(known)


def _auc(values: tuple[float | None, ...], sides: Sequence[tuple[int, int]]) -> float | None:
    """The mean over the seeds of the AUC."""
    means = [float(np.mean(members)) for members, _ in by_seed(values, sides)]
    return float(np.mean(means)) if means else None


def by_seed(
    values: Sequence[float | None], sides: Sequence[tuple[int, int]]
) -> Iterable[tuple[stats.Numbers, stats.Numbers]]:
    """The placements of members and of others, of one seed after another."""
    x, at = np.array(values, dtype=np.float64), 0
    for members, others in sides:
        yield x[at : at + members], x[at + members : at + members + others]
        at += members + others


def _problem(run: Run, cells: Sequence[Cell]) -> str:
    """Why a case cannot be judged; empty where all its cells finished."""
    for cell in cells:
        if (failure := run.failures.get(cell.id)) is not None:
            return f"a cell failed: {failure.kind}: {failure.message.splitlines()[0] if failure.message else ''}"
    lost = sum(cell.id not in run.results for cell in cells)
    return f"{lost} of {len(cells)} cells missing" if lost else ""


def _images(run: Run, cell: Cell) -> str:
    """A digest of the images that a cell attacked; empty where there are none."""
    pictures = run.pictures(cell.id)
    if pictures is None:
        return ""
    return hashlib.sha256(np.ascontiguousarray(pictures.original).tobytes()).hexdigest()[:16]


def _bits(record: TrainingRecord) -> float | None:
    """Mean over the rounds of the bits of a message for each parameter."""
    return 8 * float(np.mean(record.message_bytes)) / record.dim if record.message_bytes else None


def _audited(record: TrainingRecord) -> float | None:
    """The audited lower bound."""
    return None if record.audited is None else record.audited.epsilon_lower


def _rounded(metric: str, values: Iterable[float | None]) -> tuple[float | None, ...]:
    """With as many decimals as are kept."""
    return tuple(None if value is None else round(value, _DECIMALS[metric]) for value in values)


def _estimate(result: Result, name: str) -> Estimate | None:
    """The estimate of this name, None where there is none."""
    return next((estimate for estimate in result.estimates if estimate.name == name), None)
