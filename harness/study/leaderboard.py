"""The leaderboard: each defense at its best, by who has to be trusted and what is protected.

Tuning is successive halving on validation records, with the same clients, batches and first weights for all settings;
early stages end a training early and compare only settings with one number of rounds. The winner is trained anew, with
other seeds, and is tested on test records.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from statistics import fmean

from leakgauge.harness.core.cell import Cell, FederationSpec, Size, TrainingSpec
from leakgauge.harness.core.code import code_allowed, named_code
from leakgauge.harness.core.errors import StudyError
from leakgauge.harness.core.labels import UNDEFENDED, part_text
from leakgauge.harness.core.rating import Ratings
from leakgauge.harness.core.result import Run, TrainingRecord
from leakgauge.harness.core.stored import to_data
from leakgauge.harness.core.threats import ThreatMismatch, View, require
from leakgauge.harness.data import DataSet
from leakgauge.harness.federation import registry
from leakgauge.harness.federation.round import participants
from leakgauge.harness.study.board import Board, Stage, Table
from leakgauge.harness.study.engine import Open
from leakgauge.harness.study.goal import Adversary, Goal, proved_at
from leakgauge.harness.study.prepare import prepare
from leakgauge.harness.study.run import run_study
from leakgauge.harness.study.schedule import Listener
from leakgauge.harness.study.standings import rank
from leakgauge.harness.study.study import Study, resolve, without
from leakgauge.harness.study.tuning import TUNING, Line, Trial, begin, delta_of, kept, lines_of

_MOST = 60  # records of a victim's message
_AGAINST: tuple[Adversary, ...] = ("server", "aggregator", "participant", "public")  # who sees less and less
_AUDITED = ("code", "strict", "proved", "unit", "horizon", "threat", "rounds", "clients", "trials")


def run_board(
    made: Board,
    out: Path,
    root: Path,
    *,
    only: Sequence[str] = (),
    tasks: Sequence[str] = (),
    workers: int | None = None,
    listen: Callable[[str], Listener],
    allow_code: bool = False,
    engine: Open | None = None,
) -> list[Table]:
    """Tune, train and attack every entry; one table of plain data for each line of the board.

    Finished trainings and attacks are kept in `out`; the same call continues there.

    Args:
        only, tasks: names of the entries and tasks to run; the undefended entries run as well. Empty: all.
        listen: gives the listener for the progress of a step, by its name.
        engine: as in `run_study`.

    Raises:
        StudyError: an entry or an attack is invalid; raised before anything runs.
        UnknownNameError: there is no such entry or task.
    """
    lines = lines_of(made, only, tasks)
    named = named_code(
        [*(line.entry.defense.get("name") for line in lines), *(one.get("name") for one in made.attacks)]
    )
    if named and not code_allowed(allow_code):  # before anything builds the defense
        text = f"{named[0]!r} names code to import; pass --allow-code if you trust it"
        raise StudyError(made.name, [text])
    for line in lines:
        begin(line, made.stages[0].settings, root, allow_code)
    ready = {(line.track.name, line.place.name): line for line in lines if line.trials}
    for line in ready.values():
        _final(made, line, line.trials[0], root, allow_code)

    def trained(name: str, cells: Iterable[Cell]) -> Run:
        asked = Study(name, made.title, tuple({cell.id: cell for cell in cells}.values()))
        own = functools.partial(run_study, asked, out / "runs", data=root, workers=workers, merge=True)
        return own(listen=listen(name), engine=engine)

    def narrow(number: int, before: Stage) -> None:
        for line in lines:
            line.left = kept(line.left, number, whole=before.rounds == 1)

    for number, stage in enumerate(made.stages):
        if number:
            narrow(stage.settings, made.stages[number - 1])
        seeds = range(TUNING, TUNING + stage.seeds)
        asked = [(trial, [trial.at(seed, stage) for seed in seeds]) for line in lines for trial in line.left]
        run = trained(f"tuning, stage {number + 1}", (plain(spec) for _, specs in asked for spec in specs))
        for trial, specs in asked:
            trial.scores.append([accuracy_of(run.trainings.get(spec.id)) for spec in specs])
    narrow(1, made.stages[-1])
    final = [[cell for trial in line.left for cell in _final(made, line, trial, root, allow_code)] for line in lines]
    run = trained("final trainings and attacks", chain(*final))
    # the folder may hold attacks of other boards and tracks on the same trainings
    its = (dataclasses.replace(run, cells=tuple(cells)) for cells in final)
    tables = [_result(made, line, own, root) for line, own in zip(lines, its, strict=True)]
    rank(tables)
    return tables


@functools.cache
def _blind() -> Cell:
    table = {"name": "x", "tasks": [{"data": "digits", "model": "linear"}], "federations": [{}]}
    return resolve({**table, "defenses": [{"name": UNDEFENDED}]}).cells[0]


def plain(spec: TrainingSpec) -> Cell:
    """A training without an attack."""
    return dataclasses.replace(_blind(), training=spec)


def _final(made: Board, line: Line, trial: Trial, root: Path, allow_code: bool) -> list[Cell]:
    """The final trainings: all seeds, and the attacks on the first of them.

    They are those of the track's adversary. One that sees too little for an attack leaves it to the adversary that the
    board states for the attack, if it does: that shows what an entry hides from nobody else.
    """
    defense = {"name": trial.training.defense.name, **trial.training.defense.parameters}
    adversary, study = line.track.adversary, {**line.table(trial.setting), "defenses": [defense]}
    first = _first(made, line, trial)
    ready, cells = prepare(first, root), list[Cell]()
    for given in made.attacks:
        built = registry.build("attack", given["name"], without(given, "name", "target", "threat"))
        needs, asked = built.needs, given.get("target", {})
        views = _seen(adversary, given), given.get("threat")
        if (threat := next((one for one in views if one and _suffices(one, needs)), None)) is None:
            continue
        drawn = ready.key.child("training"), asked.get("round", 0), sorted(ready.clients)
        if not (senders := participants(*drawn, ready.setting)):
            continue  # nobody sends in this round
        attack = {**given, "threat": threat, "target": _target(asked, first.federation, ready.data, senders)}
        crossed = resolve({**study, "lineup": False, "attacks": [attack]}, line.entry.name, allow_code=allow_code)
        cells += [dataclasses.replace(cell, training=first) for cell in crossed.cells]
    return [*cells, *(plain(first if seed == 0 else trial.at(seed)) for seed in range(made.seeds))]


def _first(made: Board, line: Line, trial: Trial) -> TrainingSpec:
    """The first final training, with the audit of a defense that has an epsilon."""
    return dataclasses.replace(trial.at(0), audit=0 if line.epsilon is None else made.audit)


def _target(given: Table, federation: FederationSpec, data: DataSet, senders: Sequence[int]) -> Table:
    """The target of an attack in this federation, which may be smaller than the attack asks for.

    Victims have as many records as a client's message, at most `_MOST`, and all victims have different ones. A client
    that does not send in the target's round is the last one before it that does, or the first. Members are at most its
    records, non-members at most half of the test records.
    """
    samples, count = federation.samples or 0, int(given.get("count", 1))
    own = samples // federation.clients
    if given.get("kind", "probe") == "probe":
        epochs = federation.algorithm == "fedavg" and federation.local_steps is None
        taken = own if epochs else (federation.batch or own) * (federation.local_steps or 1)
        size = max(1, min(taken, own, _MOST, samples // count))
        return {"batch": size, **given}
    if given["kind"] != "members":
        return given
    before = [client for client in senders if client <= given.get("client", 0)]
    fitting = {"client": (before or senders)[-1 if before else 0], "count": min(count, own)}
    return {**given, **fitting, "outside": min(given.get("outside", count), len(data.test.y) // 2)}


def _suffices(view: str, needs: frozenset[str]) -> bool:
    try:
        require(needs, "", View.parse(view))
    except ThreatMismatch:
        return False
    return True


def _seen(adversary: str, attack: Table) -> str:
    grants = attack.get("threat", "").partition("+")[2]
    return f"{adversary}+{grants}" if grants else adversary


def accuracy_of(record: TrainingRecord | None) -> float:
    """The last accuracy; 0 for a training that failed."""
    return 0.0 if record is None else record.evaluations[-1].accuracy or 0.0


def _result(made: Board, line: Line, run: Run, root: Path) -> Table:
    """One line of the board as plain data; `run` has its cells alone."""
    table: Table = {
        "task": line.place.name,
        "track": line.track.name,
        "entry": line.entry.name,
        "epsilon": line.epsilon,
        "adversary": line.track.adversary,
        "delta": line.delta,
        "note": line.note,
        "defense": line.entry.defense["name"],
        "accuracy": [],
        "trials": [
            {"setting": trial.setting, "scores": trial.scores, "kept": trial in line.left}
            for trial in sorted(line.trials, key=lambda one: one not in line.left)
        ],
    }
    if not line.left:
        return table
    trial = line.left[0]
    specs = [_first(made, line, trial), *(trial.at(seed) for seed in range(1, made.seeds))]
    records = [run.trainings.get(spec.id) for spec in specs]
    done = [record for record in records if record is not None]
    failed = [(cell, run.failures[cell.id].message) for cell in run.cells if cell.id in run.failures]
    if len(done) < len(records):
        trained = [text for cell, text in failed if cell.training.id not in run.trainings]
        return {**table, "note": trained[0] if trained else "a final training is missing"}
    lost = {f"an attack failed, {cell.attack.name}: {text}" for cell, text in failed}
    first, commit = done[0], done[0].environment.commit[:8]
    bits = 8 * fmean(first.message_bytes) / first.dim
    added = registry.build_defense(specs[0].defense).superposes or line.track.adversary != "aggregator"
    table |= {
        "accuracy": [accuracy_of(record) for record in done],
        "settings": part_text(trial.training.defense),
        "federation": {
            name: value
            for name, value in to_data(trial.training.federation).items()
            if value != getattr(FederationSpec(), name)
        },
        "bytes": fmean(first.message_bytes),
        "bits": bits if added else max(bits, 32.0),  # what cannot be added up is decoded first
        "dim": first.dim,
        "proved": {adversary: _proved(line, specs[0], adversary, root) for adversary in _AGAINST},
        "audited": None if first.audited is None else {name: getattr(first.audited, name) for name in _AUDITED},
        "found": list(_found(Ratings(run))),
        "failed": [*(flag.message for flag in first.flags if flag.code == "not-audited"), *sorted(lost)],
        "made_by": f"{commit}{' with changes' * first.environment.dirty}, {first.environment.machine}",
    }
    return table


def _found(ratings: Ratings) -> Iterator[Table]:
    for case in ratings.cases:
        adversary = View.parse(case.cells[0].threat).threat.value
        yield from ({**to_data(one), "adversary": adversary} for one in ratings.findings.get(case.identity, ()))


def _proved(line: Line, spec: TrainingSpec, adversary: Adversary, root: Path) -> float | str:
    """Epsilon of the whole run for a client, whatever the track's unit, at delta = 1 / clients^1.1; or `inf`."""
    clients, summed = line.spec["clients"], registry.build_defense(spec.defense).superposes
    if clients == 1 or (adversary == "server" and summed):
        return "inf"
    asked = Goal(1.0, unit="client", adversary=adversary, delta=delta_of(clients), relation=line.track.relation)
    epsilon = proved_at(spec, asked, root)[0]
    return epsilon if math.isfinite(epsilon) else "inf"


def as_json(made: Board, size: Size, tables: Sequence[Table]) -> str:
    """The board and its lines as JSON; the same code and data give the same bytes."""
    about = {**to_data(made), "size": size}
    return json.dumps({**about, "lines": list(tables)}, indent=1, sort_keys=True) + "\n"
