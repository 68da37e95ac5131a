"""The study of a recording; small runs choose the attacks that fit and their budgets."""

from __future__ import annotations

import dataclasses
import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch

from leakgauge.harness.audit.limit import followed
from leakgauge.harness.core.cell import Cell, PartSpec, Target, TaskSpec
from leakgauge.harness.core.code import named_code
from leakgauge.harness.core.contract import Examples, Observation
from leakgauge.harness.core.labels import counted
from leakgauge.harness.core.threads import one_thread
from leakgauge.harness.core.threats import View
from leakgauge.harness.federation import registry
from leakgauge.harness.federation.observe import observe
from leakgauge.harness.federation.recording import Recording, spec_of
from leakgauge.harness.learn.gradients import gradients, targets_of
from leakgauge.harness.study.attack import run_attack
from leakgauge.harness.study.check import check_study
from leakgauge.harness.study.cost import Rehearsal, span
from leakgauge.harness.study.jobs import Job, RunContext
from leakgauge.harness.study.prepare import StoredTraining, load_data
from leakgauge.harness.study.study import OWN, Study, resolve
from leakgauge.harness.study.training import keep_for, run_training

NAME = "inspect"
"""Name of the study."""

VICTIMS = 8

_TRIED: dict[str, dict[str, int]] = {
    "map": {"evaluations": 300, "warm": 150},
    "idlg": {"evaluations": 300, "restarts": 1},
    "analytic": {},
    "label-restoration": {},
}
"""The attacks that are tried besides the floor, with the most evaluations of each search."""

_ENOUGH, _FEW = 60, 20  # evaluations of a search: the number below which victims are left out, and the minimum
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
    check_study(study, root)
    notes += [f"data: {note}" for note in [load_data(task.data, root).note] if note]
    if asked.attacks is None or (asked.limit is None and any(map(_searches, asked.attacks))):
        with one_thread(), TemporaryDirectory() as folder:  # as in a study
            first, context = _resolved(task, recording, asked, floor, False, allow_code), RunContext(Path(folder), root)
            run_training(first.trainings[0], keep_for(first.cells), context)
            limit, why = (asked.limit, []) if asked.limit is not None else _limit(first.cells[0], context, asked)
            notes += why
            own, why = _lineup(first, context, asked)
            notes += why
            if asked.attacks is None:
                alone = partial(_resolved, task, recording, asked, limit=False, allow_code=allow_code)
                attacks, why = _choose(alone, first, context, asked)
                notes += why
        study = _resolved(task, recording, asked, attacks, limit, allow_code, own)
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
        raise ValueError(recording.lacks(number))
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
    own: int = OWN,
) -> Study:
    table = {
        "name": NAME,
        "seeds": [recording.seed if recording.seed is not None else asked.seed],
        "threats": list(asked.threats),
        "audit": asked.audit,
        "limit": limit,
        "lineup": own,
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


def _first(cell: Cell, context: RunContext) -> tuple[Observation, Examples]:
    """What the adversary sees of the first victim, and its records."""
    federation = StoredTraining.of(cell.training, context).federation
    seen, truth = observe(federation, View.parse(cell.threat), dataclasses.replace(cell.target, count=1))
    return seen, truth.victims[0]


def _limit(cell: Cell, context: RunContext, asked: Asked) -> tuple[bool, list[str]]:
    """Whether the limit is useful and takes at most a third of the time asked for, and a note if not."""
    seen, victim = _first(cell, context)
    assert seen.model is not None
    entries = victim.x[0].numel()
    count = min(followed(seen.task, seen.model.params) // len(victim.y), entries)
    if count < min(_DIRECTIONS, entries):
        size = counted(seen.setting.dim, "parameter")
        text = f"memory holds the slopes of {size} along only {count} of {entries:,} directions of an image"
        return False, [f"the limit was left out: {text}"]
    x, labels = victim if seen.task.mixes else (rows[:1] for rows in victim)
    y = targets_of(seen.task, labels, torch.float64)
    start = time.perf_counter()
    gradients(seen.task, seen.model.params.double(), x[None].double(), y[None])
    needs = cell.target.count * len(victim.y) * count * (time.perf_counter() - start)
    if needs > 60 * asked.minutes / 3:
        return False, [f"the limit was left out: its {count} gradients for each record would take {span(needs)}"]
    return True, []


def _lineup(floor: Study, context: RunContext, asked: Asked) -> tuple[int, list[str]]:
    """How many own victims the lineup takes in a quarter of the time asked for, and a note if they are fewer."""
    cell = next((cell for cell in floor.cells if cell.attack.name == "lineup" and cell.target.skip), None)
    if cell is None:
        return OWN, []
    start = time.perf_counter()
    try:
        run_attack(dataclasses.replace(cell, target=dataclasses.replace(cell.target, count=_TIMED)), context)
    except Exception:  # the cell itself reports the error
        return OWN, []
    each = (time.perf_counter() - start) / _TIMED
    count = max(_TIMED, min(OWN, int(60 * asked.minutes / 4 / max(each, 1e-9))))
    text = f"the lineup takes {count} victims of its own, not {OWN}, so that it ends in time"
    return count, [text] if count < OWN else []


_TIMED = 2  # victims of a lineup that are timed


def _choose(
    alone: Callable[[list[tuple[PartSpec, Target]]], Study], floor: Study, context: RunContext, asked: Asked
) -> tuple[list[tuple[PartSpec, Target]], list[str]]:
    """The floor and the attacks that fit, with evaluations so that all attacks end in the time asked for, and notes.

    Victims are left out if a search would become too short and the user asked for no number of them.

    Args:
        alone: the study of one attack.
        floor: the study of the floor alone; its training is stored.
    """
    start, notes, cells = time.monotonic(), list[str](), list[Cell]()
    rehearsal, cell = Rehearsal(floor, context), floor.cells[0]
    single = len(_first(cell, context)[1].y) == 1
    for name, most in _TRIED.items():
        try:
            if name in ("idlg", "analytic") and not single:
                raise ValueError("it needs messages of one record")
            part = PartSpec(name, registry.defaults("attack", name) | most)
            cells.append(_fitting(alone([(part, cell.target)]).cells, name, rehearsal))
        except ValueError as error:
            notes.append(f"attack {name} was left out: {' '.join(str(error).split())}")
    count = cell.target.count
    searches = [each for each in cells if _TRIED[each.attack.name]]
    seconds = 60 * asked.minutes
    left = max(0.3 * seconds, seconds - (time.monotonic() - start))
    each = left / max(1, len(searches) * len(asked.threats))

    def takes(cell: Cell, victims: int, evaluations: int) -> float:
        changed = dataclasses.replace(
            cell, attack=_spending(cell.attack, evaluations), target=dataclasses.replace(cell.target, count=victims)
        )
        return rehearsal.pace.expected(Job("attack", cell.training, (changed,)))

    while asked.victims is None and count > 2 and any(takes(search, count, _ENOUGH) > each for search in searches):
        count -= 1
    if count < cell.target.count:
        notes.append(f"only {count} of {cell.target.count} victims were attacked, so that all attacks end in time")
    target, chosen = dataclasses.replace(cell.target, count=count), [cell.attack]
    for found in cells:
        full = _TRIED[found.attack.name].get("evaluations", 0)
        spends = next((number for number in range(full, _FEW, -1) if takes(found, count, number) <= each), _FEW)
        if spends < full:
            text = f"spends {spends} evaluations of {full}, which take about {span(takes(found, count, spends))}"
            notes.append(f"attack {found.attack.name} {text}")
        chosen.append(_spending(found.attack, spends))
    return [(attack, target) for attack in chosen], notes


def _spending(attack: PartSpec, evaluations: int) -> PartSpec:
    """The search with this many evaluations or fewer."""
    most = {name: min(value, evaluations) for name, value in _TRIED[attack.name].items() if name != "restarts"}
    return dataclasses.replace(attack, parameters=attack.parameters | most)


def _fitting(cells: Sequence[Cell], name: str, rehearsal: Rehearsal) -> Cell:
    """The cell of an attack that runs; a search is measured.

    Raises:
        ValueError: the attack does not fit, or it fails.
    """
    cell = next(cell for cell in cells if cell.attack.name == name)
    if _TRIED[name]:
        rehearsal.problem = ""
        rehearsal.measure([Job("attack", cell.training, (cell,))], rehearsal.attacks, math.inf)
        if rehearsal.problem:
            raise ValueError(rehearsal.problem)
        return cell
    few = dataclasses.replace(cell, limit=False, target=dataclasses.replace(cell.target, count=1))
    failed = [flag for flag in run_attack(few, rehearsal.context).flags if flag.code == "failed-victims"]
    if failed:
        raise ValueError(failed[0].message)
    return cell
