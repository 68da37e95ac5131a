"""The study of a recording; short trials choose the attacks that fit and their budgets."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from torch.nn.functional import one_hot

from leakgauge.harness.audit.limit import followed
from leakgauge.harness.core.cell import PartSpec, Target, TaskSpec
from leakgauge.harness.core.code import named_code
from leakgauge.harness.core.contract import Reconstruction
from leakgauge.harness.core.labels import counted
from leakgauge.harness.core.threads import one_thread
from leakgauge.harness.core.threats import View
from leakgauge.harness.federation import registry
from leakgauge.harness.federation.observe import observe
from leakgauge.harness.federation.recording import Recording, spec_of
from leakgauge.harness.learn.gradients import gradients
from leakgauge.harness.study.cost import span
from leakgauge.harness.study.jobs import RunContext
from leakgauge.harness.study.prepare import StoredTraining, attack_key, load_data, those
from leakgauge.harness.study.run import check_data
from leakgauge.harness.study.study import Study, resolve
from leakgauge.harness.study.training import keep_for, run_training

NAME = "inspect"
"""Name of the study."""

VICTIMS = 8

_TRIED: tuple[tuple[str, dict[str, int]], ...] = (
    ("map", {"evaluations": 300, "warm": 150}),
    ("idlg", {"evaluations": 300, "restarts": 1}),
    ("analytic", {}),
    ("label-restoration", {}),
)
"""The attacks that are tried besides the floor, with the most evaluations of each search."""

_ENOUGH, _FEW, _SMALL, _MORE = 60, 20, 2, 8
"""Evaluations of a search: the number below which victims are left out, the minimum, and those of the two trials."""

_SLOW = 60.0  # seconds of a first trial above which there is no second trial
_DIRECTIONS = 100  # the fewest directions of an image for a useful limit


class Asked(NamedTuple):
    """What a user asks for; None: chosen automatically.

    Attributes:
        limit: whether reconstructions are compared with the limit of any attack.
        minutes: the total time of the chosen attacks.
        batch: records of each victim, if the victims are probes.
    """

    attacks: Sequence[PartSpec] | None = None
    threats: Sequence[str] = ("server",)
    limit: bool | None = None
    minutes: float = 7.0
    victims: int | None = None
    round: int | None = None
    batch: int = 1
    audit: int = 0
    seed: int = 0


class _Price(NamedTuple):
    """Seconds for each victim: to start, and for an evaluation, which is 0 without a search."""

    start: float
    unit: float

    def of(self, victims: int, evaluations: int) -> float:
        """Total seconds."""
        return victims * (self.start + evaluations * self.unit)


def study_of(task: TaskSpec, recording: Recording, asked: Asked, root: Path, *, allow_code: bool = True) -> Study:
    """The study of one round of a recording: floor, attacks and limit; `Study.notes` states what was left out.

    Args:
        root: folder of the data sets.
        allow_code: whether model, data, defense and attacks may name code to import.

    Raises:
        StudyError: something is invalid, or does not fit the recording; one line for each problem.
        ValueError: the recording has nothing to attack in this round.
    """
    target, notes = _target(recording, asked, _sums(recording, asked, allow_code))
    floor = [(PartSpec("prior", registry.defaults("attack", "prior")), target)]
    attacks = floor if asked.attacks is None else [(attack, _for(attack, target, asked)) for attack in asked.attacks]
    study = _resolved(task, recording, asked, attacks, asked.limit is not False, allow_code)
    check_data(study, root)
    notes += [f"data: {note}" for note in [load_data(task.data, root).note] if note]
    if asked.attacks is None or (asked.limit is None and any(map(_searches, asked.attacks))):
        with one_thread():  # as in a study
            trial = _Trial(_resolved(task, recording, asked, floor, False, allow_code), root)
            limit, why = (asked.limit, []) if asked.limit is not None else trial.limit(60 * asked.minutes)
            notes += why
            if asked.attacks is None:
                attacks, why = trial.choose(60 * asked.minutes, asked.victims)
                notes += why
        study = _resolved(task, recording, asked, attacks, limit, allow_code)
    return dataclasses.replace(study, notes=tuple(notes))


def _sums(recording: Recording, asked: Asked, allow_code: bool) -> str:
    """Why only sums of messages are seen; empty if single messages are. Code that may not run is refused later."""
    for text in asked.threats:
        if "sums" in View.parse(text).sees:
            return f"{text} sees only sums of messages"
    is_known = allow_code or not named_code([recording.defense.name])
    adds = is_known and registry.build_defense(recording.defense).superposes
    return f"{recording.defense.name} adds up all messages of a round" if adds else ""


def _target(recording: Recording, asked: Asked, sums: str) -> tuple[Target, list[str]]:
    """The target: messages with known records, or probes (with a note) if there are none or only `sums` are seen.

    Raises:
        ValueError: the recording has no model, or fewer messages than asked for.
    """
    known = {number: len(sent) for number, sent in recording.rows.items() if sent}
    number = asked.round if asked.round is not None else min(known, default=min(recording.models, default=None))
    if number is None:
        raise ValueError(f"the recording in {recording.folder} has no model: there is nothing to attack")
    if number not in recording.models:
        raise ValueError(f"the recording has no model of round {number}; {those(recording.models)}")
    if number in known and not sums:
        if (asked.victims or 0) > known[number]:
            text = f"expected at most {known[number]} victims with known records in round {number}"
            raise ValueError(f"{text}, got {asked.victims}")
        return Target("messages", number, asked.victims or min(VICTIMS, known[number])), []
    notes = []
    if sums:
        notes = [f"{sums}: probes were attacked instead: records of the data set, with the same model and defense"]
    elif number in recording.sent:
        text = "the records behind the messages are unknown, so no guess could be compared with them"
        notes = [f"{text}: probes were attacked instead: records of the data set, with the same model and defense"]
    return Target("probe", number, asked.victims or VICTIMS, asked.batch), notes


def _searches(attack: PartSpec) -> bool:
    """Whether an attack reconstructs from messages, so that a limit is computed for it."""
    built = registry.build_attack(attack)
    return built.kind == "reconstruction" and not built.floor


def _for(attack: PartSpec, target: Target, asked: Asked) -> Target:
    if registry.build_attack(attack).kind != "membership":
        return target
    return Target("members", target.round, asked.victims or VICTIMS)


def _resolved(
    task: TaskSpec,
    recording: Recording,
    asked: Asked,
    attacks: Sequence[tuple[PartSpec, Target]],
    limit: bool,
    allow_code: bool,
) -> Study:
    table = {
        "name": NAME,
        "seeds": [recording.seed if recording.seed is not None else asked.seed],
        "threats": list(asked.threats),
        "audit": asked.audit,
        "limit": limit,
        "tasks": [_set(dataclasses.asdict(task))],
        "federations": [_set(dataclasses.asdict(spec_of(recording)))],
        "defenses": [{"name": recording.defense.name, **_set(recording.defense.parameters)}],
        "attacks": [
            {"name": attack.name, **_set(attack.parameters), "target": _set(dataclasses.asdict(target))}
            for attack, target in attacks
        ],
    }
    return dataclasses.replace(resolve(table, NAME, allow_code=allow_code), text=_toml(table))


def _set(table: Mapping[str, Any]) -> dict[str, Any]:
    """The table without None, which TOML cannot express and which means the default."""
    return {key: value for key, value in table.items() if value is not None}


def _toml(table: Mapping[str, Any]) -> str:
    lines = []
    for key, value in table.items():
        if isinstance(value, list) and value and isinstance(value[0], dict):
            for row in value:
                lines += [f"[[{key}]]", *(f"{name} = {_value(inner)}" for name, inner in row.items())]
        else:
            lines.append(f"{key} = {_value(value)}")
    return "\n".join(lines) + "\n"


def _value(value: Any) -> str:
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{json.dumps(name)} = {_value(inner)}" for name, inner in value.items()) + " }"
    return json.dumps(value)


class _Trial:
    """Runs attacks on the first two victims of a study's first cell, by its first adversary."""

    def __init__(self, study: Study, root: Path) -> None:
        with TemporaryDirectory() as folder:
            context, spec = RunContext(Path(folder), root), study.trainings[0]
            run_training(spec, keep_for(study.cells), context)
            federation = StoredTraining.of(spec, context).federation
        self.cell, self.threats = study.cells[0], len({cell.threat for cell in study.cells})
        self.count = min(2, self.cell.target.count)  # several victims share evaluations, at another price
        target = dataclasses.replace(self.cell.target, count=self.count)
        self.seen, self.truth = observe(federation, View.parse(self.cell.threat), target)
        self.target, self.since = target, time.perf_counter()
        self.spent = self.took = 0.0

    def limit(self, seconds: float) -> tuple[bool, list[str]]:
        """Whether the limit is useful and takes at most a third of this time, and a note if not."""
        assert self.seen.model is not None
        records = len(self.truth.victims[0].y)
        count, entries = followed(self.seen.task, self.seen.model.params), self.truth.victims[0].x[0].numel()
        count = min(count // records, entries)
        dim = self.seen.setting.dim
        if count < min(_DIRECTIONS, entries):
            text = f"along only {count} of {entries:,} directions of an image"
            return False, [f"the limit was left out: memory holds the slopes of {counted(dim, 'parameter')} {text}"]
        x, labels = (rows if self.seen.task.mixes else rows[:1] for rows in self.truth.victims[0])
        y = labels.double() if labels.is_floating_point() else one_hot(labels, self.seen.task.classes).double()
        start = time.perf_counter()
        gradients(self.seen.task, self.seen.model.params.double(), x[None].double(), y[None])
        needs = self.cell.target.count * records * count * (time.perf_counter() - start)
        if needs > seconds / 3:
            return False, [f"the limit was left out: its {count} gradients for each record would take {span(needs)}"]
        return True, []

    def choose(self, seconds: float, victims: int | None) -> tuple[list[tuple[PartSpec, Target]], list[str]]:
        """The floor and the attacks that fit, with evaluations so that all attacks end in this time, and notes.

        Args:
            victims: the number that the user asks for, which is kept; None: victims are left out if a search would
                become too short.
        """
        prices, notes = dict[str, _Price](), list[str]()
        for name, most in _TRIED:
            price, why = self._price(name, most)
            if price is None:
                notes.append(f"attack {name} was left out: {why}")
            else:
                prices[name] = price
        shared = max(1.0, self.took / max(self.spent, 1e-3))  # other processes may use this machine too
        prices = {name: _Price(shared * price.start, shared * price.unit) for name, price in prices.items()}
        count, searching = self.cell.target.count, [price for price in prices.values() if price.unit]
        left = max(0.3 * seconds, seconds - (time.perf_counter() - self.since))
        each = left / max(1, len(searching) * self.threats)

        def spends(price: _Price, victims: int) -> int:
            return max(_FEW, min(300, int((each / victims - price.start) / price.unit)))

        while victims is None and count > 2 and any(price.of(count, min(_ENOUGH, 300)) > each for price in searching):
            count -= 1
        if count < self.cell.target.count:
            notes.append(
                f"only {count} of {self.cell.target.count} victims were attacked, so that all attacks end in time"
            )
        target = dataclasses.replace(self.cell.target, count=count)
        chosen = [(self.cell.attack, target)]
        for name, most in _TRIED:
            if name not in prices:
                continue
            price, parameters = prices[name], dict(most)
            if price.unit and (spent := spends(price, count)) < most["evaluations"]:
                parameters |= {key: min(value, spent) for key, value in most.items() if key != "restarts"}
                long = price.of(count, spent) > 1.5 * each
                notes.append(
                    f"attack {name} spends {spent} evaluations of {most['evaluations']}, each takes {price.unit:.2g} s"
                    + (f"; it takes {span(price.of(count, spent))} all the same" if long else "")
                )
            full = registry.defaults("attack", name) | parameters
            chosen.append((PartSpec(name, full), target))
        return chosen, notes

    def _price(self, name: str, most: Mapping[str, int]) -> tuple[_Price | None, str]:
        """The price of an attack, or None and the reason why the attack does not fit."""
        if name in ("idlg", "analytic") and len(self.truth.victims[0].y) > 1:
            return None, "it needs messages of one record"
        try:
            few, small = self._seconds(name, most, _SMALL)  # the first run of a kind compiles
            if "evaluations" not in most:
                return _Price(few, 0.0), ""
            if few > _SLOW:
                return _Price(0.0, few / _SMALL), ""
            few, small = self._seconds(name, most, _SMALL)
            seconds, more = self._seconds(name, most, _MORE)
        except ValueError as error:
            return None, " ".join(str(error).split())
        unit = (seconds - few) / max(1, more - small)
        unit = unit if unit > 0 else few / _SMALL  # noise of a busy machine: starting counts as taking no time
        unit *= len(most.keys() - {"restarts"})  # a search with `warm` makes the same number of evaluations once more
        return _Price(max(0.0, few - _SMALL * unit), unit), ""

    def _seconds(self, name: str, most: Mapping[str, int], evaluations: int) -> tuple[float, float]:
        """Processor seconds and evaluations per victim of an attack with this small number of evaluations.

        Raises:
            ValueError: the attack does not fit, or fails.
        """
        parameters = {key: value if key == "restarts" else evaluations for key, value in most.items()}
        spec = PartSpec(name, registry.defaults("attack", name) | parameters)
        attack = registry.build_attack(spec)
        missing = sorted(attack.needs - self.seen.view.sees - ({"messages"} if self.seen.view.messages else set()))
        if missing:
            raise ValueError(f"the adversary {self.seen.view.name} does not see the {' and '.join(missing)}")
        start, before = time.process_time(), time.perf_counter()
        result = attack.run(self.seen, attack_key(self.cell.training.seed, spec, self.target))
        guesses = result.guesses if isinstance(result, Reconstruction) else ()
        if guesses and guesses[0].failure and not parameters:
            raise ValueError(guesses[0].failure)
        spent = time.process_time() - start
        self.spent, self.took = self.spent + spent, self.took + time.perf_counter() - before
        return spent / self.count, sum(guess.evaluations for guess in guesses) / self.count
