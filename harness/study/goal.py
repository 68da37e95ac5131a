"""Goals: a defense's free parameter, solved for a proved epsilon, a loss of accuracy or the norms of updates.

In a study, a defense has `target = {proved_epsilon = 8, unit = "client", horizon = "run"}`,
`target = {accuracy_loss = 0.02}` or `target = {clip = "median"}`. `solve` replaces the parameter, so that defenses are
compared at equal guarantee or equal utility. A goal is one of the parameters of an unsolved defense (`target`, as
JSON); a solved defense has no goal.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Generator
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, median
from typing import ClassVar, Literal, NamedTuple

from leakgauge.harness.core import accounting
from leakgauge.harness.core.cases import gathered
from leakgauge.harness.core.cell import Cell, PartSpec, Scalar, TrainingSpec
from leakgauge.harness.core.claim import Relation, Unit
from leakgauge.harness.core.labels import UNDEFENDED, value_text
from leakgauge.harness.core.result import TrainingRecord
from leakgauge.harness.core.stored import canonical, to_data
from leakgauge.harness.core.threats import Threat

KEY = "target"
"""The parameter that holds the goal of an unsolved defense."""

KNOBS = ("epsilon", "noise_std", "noise_scale")
"""The free parameter is the first of these that a defense has. A larger epsilon means less noise."""

TOLERANCE = 0.01
"""Relative distance to a proved epsilon that counts as reached; the search continues to a tenth of this distance."""

_WIDEST = 1e8  # the largest factor between the default and a searched value, in both directions
_STEP = 8.0
_LEAST_STEP = 1e-3
_HALVINGS = 40
_TRAININGS = 5  # the search for an accuracy: most places before the goal lies between two, and halvings after that


Protected = Literal["coordinate", "sub-vector", "message", "record", "client"]
Adversary = Literal["server", "colluding-server", "aggregator", "eavesdropper", "participant", "public"]


@dataclass(frozen=True)
class Goal:
    """The goal of a defense: exactly one of the first three attributes.

    Attributes:
        proved_epsilon: for `unit` and `horizon`, against `adversary`, at `delta`.
        accuracy_loss: final accuracy without a defense minus the accuracy with it, mean over the seeds.
        clip: the bound on the norm of an update is the median over rounds and seeds of a round's median norm, in
            trainings without a defense (Abadi et al. 2016, section 5). The choice itself is not private.
        unit: coordinate, sub-vector, message, record or client.
        horizon: `round` or `run`.
        delta: None: the delta of the defense's claim.
        parameter: the free parameter; empty: the first of `KNOBS` that the defense has.
        relation: `add-remove`: what is proved for neighbors with and without the client or record counts, where a
            defense has such a proof; else its proofs for any two inputs, which cover it. `any-two-inputs`: no other
            proof counts. None: as each claim has it.
    """

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}
    proved_epsilon: float | None = None
    accuracy_loss: float | None = None
    clip: Literal["median"] | None = None
    unit: Protected | None = None
    horizon: Literal["round", "run"] = "run"
    adversary: Adversary = "server"
    delta: float | None = None
    parameter: str = ""
    relation: Literal["add-remove", "any-two-inputs"] | None = None

    def __post_init__(self) -> None:
        if sum(goal is not None for goal in (self.proved_epsilon, self.accuracy_loss, self.clip)) != 1:
            raise ValueError("expected proved_epsilon, accuracy_loss or clip, and only one of them")
        if self.proved_epsilon is not None and not 0 < self.proved_epsilon < math.inf:
            raise ValueError(f"expected proved_epsilon > 0, got {self.proved_epsilon}")
        if self.accuracy_loss is not None and not 0 < self.accuracy_loss < 1:
            raise ValueError(f"expected 0 < accuracy_loss < 1, got {self.accuracy_loss}")
        if self.proved_epsilon is not None and self.unit is None:
            raise ValueError("unit: missing; an epsilon has a meaning only with its unit")
        if self.delta is not None and not 0 <= self.delta < 1:
            raise ValueError(f"expected 0 <= delta < 1, got {self.delta}")

    @property
    def text(self) -> str:
        """The goal in words."""
        if self.clip is not None:
            return "clip at the median norm"
        if self.accuracy_loss is not None:
            return f"accuracy loss {value_text(self.accuracy_loss)}"
        delta = "" if self.delta is None else f", delta {value_text(self.delta)}"
        return (
            f"proved epsilon {value_text(self.proved_epsilon)} per {self.unit}, one {self.horizon}, {self.adversary}"
            f"{delta}{f', {self.relation}' if self.relation else ''}"
        )


class Answer(NamedTuple):
    """A solved defense, or None if the goal cannot be reached, and a sentence on the result."""

    defense: PartSpec | None
    note: str


Trained = Callable[[list[TrainingSpec]], dict[str, TrainingRecord]]
"""Runs trainings, or reads stored ones, and returns their records by id."""


def with_goal(name: str, parameters: dict[str, Scalar], goal: Goal) -> PartSpec:
    """A defense with a goal in place of its free parameter.

    Raises:
        ValueError: the defense has no such parameter.
    """
    knobs = KNOBS if goal.clip is None else ("clip",)
    knob = goal.parameter or next((key for knob in knobs for key in parameters if key.split(".")[-1] == knob), "")
    if knob not in parameters:
        known = ", ".join(parameters) or "no parameter"
        raise ValueError(f"target: {name} has no parameter to solve for; it has {known}")
    return PartSpec(name, parameters | {KEY: canonical(to_data(replace(goal, parameter=knob)))})


def goal_of(defense: PartSpec) -> Goal | None:
    """The goal of an unsolved defense; None for any other defense."""
    return Goal(**json.loads(str(defense.parameters[KEY]))) if KEY in defense.parameters else None


def solve(cells: tuple[Cell, ...], root: Path, trained: Trained) -> tuple[tuple[Cell, ...], tuple[str, ...]]:
    """The cells with solved defenses, and a sentence on each goal; cells with a goal out of reach are left out.

    A defense is solved for each task and federation, for all seeds together.
    """
    asked: dict[str, dict[int, TrainingSpec]] = {}
    for cell in cells:
        spec = cell.training.honest
        if KEY in spec.defense.parameters:
            asked.setdefault(_place(cell), {}).setdefault(spec.seed, spec)
    searches = {place: _search(list(specs.values()), root) for place, specs in asked.items()}
    answers: dict[str, Answer] = {}
    requested: dict[str, list[TrainingSpec]] = {}
    records: dict[str, dict[str, TrainingRecord]] = {place: {} for place in searches}
    while len(answers) < len(searches):
        for place, search in searches.items():
            if place not in answers:
                try:
                    requested[place] = search.send(records[place]) if place in requested else next(search)
                except StopIteration as stop:
                    answers[place], requested[place] = stop.value, []
        known = trained([spec for specs in requested.values() for spec in specs])
        records = {place: {spec.id: known[spec.id] for spec in specs} for place, specs in requested.items()}
    solved = []
    for cell in cells:
        answer = answers.get(_place(cell)) if KEY in cell.training.defense.parameters else None
        if answer is None:
            solved.append(cell)
        elif answer.defense is not None:
            solved.append(replace(cell, training=replace(cell.training, defense=answer.defense)))
    return tuple({cell.id: cell for cell in solved}.values()), tuple(answer.note for answer in answers.values())


def _place(cell: Cell) -> str:
    """A key of a cell's training by an honest server, without the seed and the audit."""
    return canonical(to_data(replace(cell.training.honest, audit=0)) | {"seed": None})


class _Axis(NamedTuple):
    """A defense's free parameter as places on a logarithmic axis along which noise falls."""

    defense: PartSpec
    knob: str

    @property
    def sign(self) -> float:
        """1 for epsilon, where a larger value means less noise; -1 for any other parameter."""
        return 1.0 if self.knob.split(".")[-1] == "epsilon" else -1.0

    @property
    def start(self) -> float:
        """The place of the default."""
        value = self.defense.parameters.get(self.knob)
        return self.sign * math.log(value) if isinstance(value, int | float) and 0 < value < math.inf else 0.0

    def at(self, place: float) -> PartSpec:
        """The defense at a place, with six digits of the parameter."""
        parameters = {key: old for key, old in self.defense.parameters.items() if key != KEY}
        return PartSpec(self.defense.name, parameters | {self.knob: float(f"{math.exp(self.sign * place):.6g}")})


def first_try(spec: TrainingSpec) -> TrainingSpec:
    """The training at which the search for its defense's goal starts; without a goal, the training itself."""
    goal = goal_of(spec.defense)
    axis = _Axis(spec.defense, "" if goal is None else goal.parameter)
    return spec if goal is None else replace(spec, defense=axis.at(axis.start))


_Search = Generator[list[TrainingSpec], dict[str, TrainingRecord], Answer]
"""Yields the trainings that it needs, receives their records, and returns the answer."""


def _search(specs: list[TrainingSpec], root: Path) -> _Search:
    """The search for the goal of one defense; the trainings differ only in the seed."""
    goal = goal_of(specs[0].defense)
    assert goal is not None
    axis = _Axis(specs[0].defense, goal.parameter)
    how = _for_proof if goal.proved_epsilon else _for_accuracy if goal.accuracy_loss else _for_norm
    return how(specs, goal, axis, root)


def _for_proof(specs: list[TrainingSpec], goal: Goal, axis: _Axis, root: Path) -> _Search:
    knob, sought = axis.knob, goal.proved_epsilon or 0.0

    def proved(place: float) -> tuple[float, str]:
        each = (proved_at(replace(spec, defense=axis.at(place)), goal, root) for spec in specs)
        return max(each, key=lambda pair: pair[0])

    def reached(place: float) -> float:
        return proved(place)[0]

    low, high = _bracket(reached, axis.start, sought)
    yield from ()
    name = f"{axis.defense.name}, {goal.text}"
    if low is None:
        least = reached(high or 0.0)
        why = "infinite" if math.isinf(least) else f"at least {least:.6g}"
        return Answer(None, f"{name}: out of reach; the proved epsilon is {why} at every {knob}")
    if high is not None:
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            low, high = (middle, high) if reached(middle) <= sought else (low, middle)
            if reached(low) > sought * (1 - TOLERANCE / 10):
                break
    solved, (epsilon, unit) = axis.at(low), proved(low)
    text = f"{name}: {knob} = {value_text(solved.parameters[knob])} has {epsilon:.6g}"
    text += f" per {unit}, which covers a {goal.unit}" if unit != goal.unit else ""
    state = "" if epsilon >= sought * (1 - TOLERANCE) else "; the nearest below, for it moves in steps or has a largest"
    return Answer(solved, text + state)


def _bracket(reached: Callable[[float], float], start: float, sought: float) -> tuple[float | None, float | None]:
    """(a place at or below the goal, a place above it), each None if there is none; `reached` rises with the place."""
    most = math.log(_WIDEST)
    # from a default at which nothing is proved, down to the first place with a proof
    for _ in range(4):
        if math.isinf(reached(start)):
            start -= math.log(_STEP)
    way = 1.0 if reached(start) <= sought else -1.0
    at, step = start, math.log(_STEP)
    while abs(at - start) < most and step > _LEAST_STEP:
        value = reached(at + way * step)
        if math.isinf(value):  # nothing is proved there, or the parameter is invalid
            step /= 2
            continue
        at += way * step
        if (value <= sought) == (way < 0):
            return (at - step, at) if way > 0 else (at, at + step)
    return (at, None) if way > 0 else (None, at)


_COVERED_BY = {
    "coordinate": (Unit.COORDINATE, Unit.SUBVECTOR, Unit.MESSAGE),
    "sub-vector": (Unit.SUBVECTOR, Unit.MESSAGE),
    "message": (Unit.MESSAGE,),
    "record": (Unit.RECORD, Unit.CLIENT, Unit.MESSAGE),
    "client": (Unit.CLIENT, Unit.MESSAGE),
}
"""The units whose guarantee covers a unit: a client's data change only its own messages."""


def proved_at(spec: TrainingSpec, goal: Goal, root: Path) -> tuple[float, str]:
    """The least epsilon proved for the goal's unit or one that covers it, and that unit; infinite if none is proved."""
    from leakgauge.harness.core.contract import claim_of
    from leakgauge.harness.federation.small import Federation
    from leakgauge.harness.study.prepare import prepare

    try:
        ready = prepare(spec, root)
        states = Federation.of(ready.defense, ready.setting).history
        claim = claim_of(ready.defense, states if goal.horizon == "run" else states[:1], ready.setting)
    except ValueError:  # the parameter is out of the defense's range
        return math.inf, ""
    delta = claim.delta if goal.delta is None else goal.delta
    asked = claim.relation if goal.relation is None else Relation(goal.relation)
    epsilons: dict[Unit, float] = {}
    for unit, each in gathered((proof.unit, proof) for proof in (claim.proved, *claim.further)).items():
        # for this relation, else for the claim's; beside the claim's own proof only those that name the adversary, or
        # prove nothing: the others are about what the claim assumes; of several, the largest
        against = [p for p in each if Threat(goal.adversary) in (p.against or claim.against)]
        fitting = [p for p in against if (p.relation or claim.relation) is asked]
        chosen = fitting or [p for p in against if not p.relation and goal.relation != "any-two-inputs"]
        if any(p is claim.proved for p in chosen):
            chosen = [p for p in chosen if p is claim.proved or p.against or p.event is None]
        if goal.unit == "record" and unit is Unit.CLIENT:  # a record may move an update by twice its bound
            chosen = [p for p in chosen if (p.relation or claim.relation) is not Relation.ADD_REMOVE]
        if chosen:
            found = (math.inf if p.event is None else float(accounting.epsilon(p.event, delta)) for p in chosen)
            epsilons[unit] = max(found)
    covering = ((epsilons.get(unit, math.inf), unit.value) for unit in _COVERED_BY[str(goal.unit)])
    return min(covering, key=lambda pair: pair[0])


_Loss = Generator[list[TrainingSpec], dict[str, TrainingRecord], float]
"""The loss of accuracy at a place, by trainings; infinite where the parameter is invalid."""


def _approach(
    loss: Callable[[float], _Loss], tried: dict[float, float], at: float, sought: float
) -> Generator[list[TrainingSpec], dict[str, TrainingRecord], None]:
    """Try places until the sought loss lies between two of them, then halve the interval."""
    step = math.log(_STEP)
    way = 1.0 if (yield from loss(at)) > sought else -1.0
    while step > _LEAST_STEP and len(tried) <= _TRAININGS:
        if (value := (yield from loss(at + way * step))) == math.inf:
            step /= 2
            continue
        at += way * step
        if (value > sought) == (way < 0):
            break
    above, below = ([place for place in tried if (tried[place] > sought) == side] for side in (True, False))
    if above and below:
        left, right = max(above), min(below)
        for _ in range(_TRAININGS):
            middle = (left + right) / 2
            left, right = (middle, right) if (yield from loss(middle)) > sought else (left, middle)


def _for_accuracy(specs: list[TrainingSpec], goal: Goal, axis: _Axis, root: Path) -> _Search:
    """The search for a loss of accuracy, by trainings of all seeds; the study reuses the trainings of the result."""
    sought = goal.accuracy_loss or 0.0
    from leakgauge.harness.study.prepare import prepare

    plain = [replace(spec, defense=PartSpec(UNDEFENDED)) for spec in specs]
    records = yield plain
    top = _mean_accuracy([records[spec.id] for spec in plain])
    tried: dict[float, float] = {}

    def loss(place: float) -> _Loss:
        asked = [replace(spec, defense=axis.at(place)) for spec in specs]
        try:
            for ready in (prepare(spec, root) for spec in asked):
                ready.defense.init(ready.setting)
        except ValueError:  # the parameter is out of the defense's range
            return math.inf
        if place not in tried:
            records = yield asked
            tried[place] = top - _mean_accuracy([records[spec.id] for spec in asked])
        return tried[place]

    yield from _approach(loss, tried, axis.start, sought)
    name = f"{axis.defense.name}, {goal.text}"
    if not tried:
        return Answer(None, f"{name}: out of reach; no {axis.knob} fits")
    best = min(tried, key=lambda place: (abs(tried[place] - sought), place))
    samples = sum(records[spec.id].test_samples for spec in plain)
    width = 1.96 * math.sqrt(sum(p * (1 - p) for p in (top, top - tried[best])) / max(1, samples))
    solved = axis.at(best)
    text = f"{name}: {axis.knob} = {value_text(solved.parameters[axis.knob])} loses {tried[best]:.3f} +- {width:.3f}"
    if abs(tried[best] - sought) <= width:
        return Answer(solved, text)
    if tried[best] > sought:
        return Answer(None, f"{text}: out of reach, the search found no {axis.knob} that loses less")
    return Answer(solved, f"{text}; the search found no {axis.knob} that loses more")


def _for_norm(specs: list[TrainingSpec], goal: Goal, axis: _Axis, root: Path) -> _Search:
    plain = [replace(spec, defense=PartSpec(UNDEFENDED)) for spec in specs]
    records = yield plain
    norms = [norm for spec in plain for norm in records[spec.id].state_metrics.get("update_norm", ())]
    if not norms:
        raise ValueError("target.clip: the stored trainings without a defense have no norms; use another folder")
    name = f"{axis.defense.name}, {goal.text}"
    if not (clip := median(norms)) > 0:
        return Answer(None, f"{name}: out of reach; half of the updates without a defense are zero")
    solved = axis.at(axis.sign * math.log(clip))
    text = f"{name}: {axis.knob} = {value_text(solved.parameters[axis.knob])}; this choice is not private"
    return Answer(solved, text)


def _mean_accuracy(records: list[TrainingRecord]) -> float:
    """The mean final accuracy; raises ValueError if the task has none."""
    known = [record.accuracy for record in records if record.accuracy is not None]
    if not known:
        raise ValueError("accuracy_loss: the task has no accuracy")
    return fmean(known)
