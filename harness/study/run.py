"""Runs a study: trainings first, then the attacks on them. Running the same command again skips finished cells."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from contextlib import closing, nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from leakgauge.harness.core.cell import Cell, TrainingSpec
from leakgauge.harness.core.code import records_of
from leakgauge.harness.core.device import available
from leakgauge.harness.core.errors import StudyError
from leakgauge.harness.core.labels import Names
from leakgauge.harness.core.result import Run, TrainingRecord
from leakgauge.harness.core.stored import fingerprint, to_data
from leakgauge.harness.data import default_root
from leakgauge.harness.federation import registry
from leakgauge.harness.study.check import check_study
from leakgauge.harness.study.cost import Pace, Size
from leakgauge.harness.study.engine import Engine, Here, Open
from leakgauge.harness.study.engines.workers import Workers
from leakgauge.harness.study.environment import code_of, folders
from leakgauge.harness.study.goal import goal_of, solve
from leakgauge.harness.study.jobs import Job, Outcome, RunContext
from leakgauge.harness.study.schedule import NO_LIMITS, Limits, Listener, Progress, Schedule, supervise
from leakgauge.harness.study.store import QUARANTINE, Store, StoreError, load_run, writing
from leakgauge.harness.study.study import Study
from leakgauge.harness.study.training import keep_for, training_suffices

_ELSE = "use another folder, or --merge to keep both"


@dataclass(frozen=True)
class _Session:
    """A run of a study in a folder with no other writer; `notes` state what happens to stored results."""

    context: RunContext
    engine: Engine
    reuse: bool
    limits: Limits
    notes: list[str]
    pace: Pace

    def work(self, cells: Sequence[Cell], finished: Collection[str], listen: Listener, jobs: list[Job]) -> None:
        """Do all jobs of a study with these cells, except attacks on the `finished` cells."""
        slots = self.engine.slots
        batches = self.context.device != "cpu" and slots == 1 and self.limits == NO_LIMITS  # a limit is for one cell
        progress = Progress(len(cells), skipped=len(finished), workers=slots, notes=self.notes, names=Names(cells))
        listen(progress, None)
        schedule = Schedule(
            *(self.context.store, progress, listen, jobs),
            pace=self.pace,
            finished=finished,
            slots=slots,
            batches=batches,
        )
        supervise(schedule, self.engine, self.limits)

    def usable(self, expected: dict[Path, str], *, reuse: bool) -> set[str]:
        """The ids of the finished cells and trainings among these folders; `expected` has the code of each.

        Damaged results are set aside, and results of other code too, unless they are reused.
        """
        store, ids, others = self.context.store, set[str](), Counter[str]()
        for folder, code in expected.items():
            value, made, faults, _ = store.examine(folder)
            if made is None:
                continue
            if value is None:
                reason = "; ".join(f"{folder.parent.name}/{folder.name}/{name} {why}" for name, why in faults.items())
                store.set_aside(folder, reason)
                self.notes.append(f"damaged, set aside in {QUARANTINE}: {reason}")
                continue
            if made != code:
                with_changes = " with changes" if value.environment.dirty else ""
                source = (
                    f"{made or 'unknown code'} of commit {value.environment.commit[:12] or 'unknown'}{with_changes}"
                )
                others[source] += 1
                if not reuse:
                    store.set_aside(folder, f"made by {source}; this code is {code}")
                    continue
            ids.add(folder.name)
        if others:
            fate = "are kept" if reuse else f"are set aside in {QUARANTINE} and run again; --reuse would keep them"
            made_by = ", ".join(f"{number} by {source}" for source, number in others.items())
            self.notes.append(f"{others.total()} results of other code {fate}: {made_by}")
        return ids


def run_study(
    study: Study,
    folder: str | Path,
    *,
    data: Path | None = None,
    workers: int | None = None,
    device: str = "cpu",
    listen: Listener | None = None,
    merge: bool = False,
    part: bool = False,
    reuse: bool = False,
    limits: Limits = NO_LIMITS,
    engine: Open | None = None,
) -> Run:
    """Run the unfinished cells of a study, and return all results.

    Args:
        folder: the folder of the results; created if it is missing.
        data: folder of the data sets; default `LEAKGAUGE_DATA`, or `~/.cache/leakgauge`.
        workers: worker processes; default one per core, or one for a GPU; 0: all jobs run in this process.
        device: where clients train and searches compute, `cpu` or `cuda`; recorded with each training, not part of its
            id.
        listen: called after every change.
        merge: keep the cells of other studies, and of other versions of this study, in the folder.
        part: keep the cells of other versions of this study; for running only some of its cells.
        reuse: keep the results that other code made.
        limits: limits for each training or attack, which fails if it breaks one.
        engine: opens the engine for the jobs; default worker processes, or this process if `workers` is 0.

    Raises:
        StudyError: there is no such device, the folder has cells that would be lost, a data set has changed, or as
            `check_study`; one line for each problem, raised before anything runs.
        StoreError: the folder cannot be written, or another process writes to it.
        Interrupted: Ctrl-C, SIGTERM or SIGHUP; finished results are kept.
    """
    if engine is None and not available(device):
        raise StudyError(study.name, [f"device: got {device!r}, expected cpu, or cuda if there is one"])
    if workers is None and device != "cpu" and engine is None:
        workers = 1
    workers = _workers(study, workers, elsewhere=engine is not None)
    open_engine = engine or (Here if workers == 0 else partial(Workers, slots=workers))
    if limits != NO_LIMITS and workers == 0:
        raise StudyError(study.name, ["limits of a cell need worker processes: expected workers >= 1, got workers=0"])
    root = data if data is not None else default_root()
    context = RunContext(Path(folder), root, device)
    store, listen = context.store, listen or (lambda progress, outcome: None)
    # the engine starts while this process reads the data
    with closing(open_engine(context)) as opened, nullcontext(check_study(study, root)) as known, writing(store.folder):
        sizes = {spec.task: Size.of(spec.task, root) for spec in study.trainings}
        session = _Session(context, opened, reuse, limits, [], Pace(sizes))
        stored = _stored_study(study, session, {name: digest for name, (digest, _) in known.items()}, merge=merge)
        study = _solved(study, session, listen)
        own = {cell.id for cell in study.cells}
        others = tuple(cell for cell in (store.cells() if stored else ()) if cell.id not in own)
        if others and not (merge or part):
            text = f"{folder} holds {len(others)} cells of another version of this study: {_ELSE}"
            raise StudyError(study.name, [text])
        asked, retained = folders(store, study.cells), folders(store, others)
        usable = session.usable(asked, reuse=reuse)
        session.usable({path: code for path, code in retained.items() if path not in asked}, reuse=True)
        store.write_study(_described(study, known, stored, others))
        jobs, finished = plan(study, store, usable)
        for cell in study.cells:
            if cell.id in finished and (seconds := store.seconds(store.cell(cell.id))):
                session.pace.learn(Job("attack", cell.training, (cell,)), seconds)
        session.work(study.cells, finished, listen, jobs)
        store.drop_parts()
        return load_run(store.folder)


def _workers(study: Study, workers: int | None, *, elsewhere: bool) -> int | None:
    """The number of worker processes: 0 for a model or data that only this process has."""
    named = {name for spec in study.trainings for name in (spec.task.model, records_of(spec.task.data))}
    given = {name for name in named if name.startswith("given:")}
    if given and (workers or elsewhere):
        got = "another engine" if elsewhere else f"workers={workers}"
        raise StudyError(study.name, [f"only this process has {min(given)!r}: expected workers=0, got {got}"])
    return 0 if given else workers


def _solved(study: Study, session: _Session, listen: Listener) -> Study:
    """The study with its defenses' goals solved; the trainings of the search are stored, and cells can use them."""
    if not any(goal_of(spec.defense) for spec in study.trainings):
        return study
    store = session.context.store

    def trained(specs: list[TrainingSpec]) -> dict[str, TrainingRecord]:
        keep, errors = keep_for(study.cells), list[str]()
        distinct = {spec.id: spec for spec in specs}.values()
        session.usable({store.training(spec.id): code_of(spec) for spec in distinct}, reuse=session.reuse)
        missing = [spec for spec in distinct if not training_suffices(spec, keep, store)]

        def watch(progress: Progress, outcome: Outcome | None) -> None:
            errors.extend([outcome.error] if outcome is not None and outcome.error else [])
            listen(progress, outcome)

        if missing:
            session.work(study.cells, (), watch, [Job("trial", spec, study.cells) for spec in missing])
        records = {spec.id: record for spec in specs if (record := store.read_training(spec.id)) is not None}
        if len(records) < len(distinct):
            raise ValueError(f"target: {'; '.join(errors)}")
        return records

    try:
        cells, goals = solve(study.cells, session.context.root, trained)
    except ValueError as error:
        raise StudyError(study.name, [str(error)]) from error
    if not cells:
        raise StudyError(study.name, list(goals))
    return replace(study, cells=cells, goals=goals)


def _stored_study(study: Study, session: _Session, hashes: dict[str, str], *, merge: bool) -> dict[str, Any]:
    """The study or studies of the folder; empty if there are none. A damaged study.json is set aside."""
    store, path = session.context.store, session.context.folder / "study.json"
    if not path.exists():
        return {}
    try:
        stored = store.read_study()
    except StoreError as error:
        store.set_aside(path, str(error))
        text = "run other studies of this folder again with --merge: their results are still there"
        session.notes.append(f"damaged, set aside in {QUARANTINE} and written anew: study.json; {text}")
        return {}
    others = [other["name"] for other in stored.get("studies", [stored]) if other["name"] != study.name]
    if others and not merge:
        named = " and ".join(map(repr, others))
        raise StudyError(study.name, [f"{store.folder} holds the results of the study {named}: {_ELSE}"])
    before = stored.get("data", {})
    changed = [name for name, digest in hashes.items() if before.get(name, digest) != digest]
    if changed:
        text = f"is not the one of the results in {store.folder}: use another folder"
        raise StudyError(study.name, [f"data set {name!r} {text}" for name in changed])
    return stored


def _described(
    study: Study, known: dict[str, tuple[str, bool]], stored: dict[str, Any], others: tuple[Cell, ...]
) -> dict[str, Any]:
    this = {"name": study.name, "title": study.title, "text": study.text, "goals": list(study.goals)}
    before = [other for other in stored.get("studies", [stored] if stored else []) if other["name"] != study.name]
    studies = [*({key: other.get(key, []) for key in this} for other in before), this]
    cells = (*others, *study.cells)
    attacks = {cell.attack.key: cell.attack for cell in study.cells}
    described = stored.get("attacks", {}) | {key: to_data(registry.describe(spec)) for key, spec in attacks.items()}
    used = {cell.training.task.data for cell in cells}
    data = stored.get("data", {}) | {name: digest for name, (digest, _) in known.items()}
    public = {*stored.get("public", ()), *(name for name, (_, is_public) in known.items() if is_public)}
    return {
        "name": " + ".join(each["name"] for each in studies),
        "title": "; ".join(each["title"] for each in studies if each["title"]),
        "text": "\n".join(each["text"] for each in studies if each["text"]),
        "goals": [goal for each in studies for goal in each["goals"]],
        "hash": fingerprint([cell.id for cell in cells]),
        "cells": [to_data(cell) for cell in cells],
        "data": {name: data[name] for name in sorted(used)},
        "public": sorted(public & used),
        "attacks": {key: described[key] for key in sorted({cell.attack.key for cell in cells})},
        **({"studies": studies} if len(studies) > 1 else {}),
        **({"notes": list(study.notes)} if study.notes else {}),
        **({"figures": list(map(asdict, study.figures))} if study.figures else {}),
        **({"claims": list(map(asdict, study.claims))} if study.claims else {}),
    }


def plan(study: Study, store: Store, usable: Collection[str]) -> tuple[list[Job], set[str]]:
    """The trainings to run and then the attacks on stored trainings; and the finished cells, whose ids are usable."""
    trainings, attacks, finished = [], [], set[str]()
    for training in study.trainings:
        cells = study.cells_of[training.id]
        unfinished = [cell for cell in cells if cell.id not in usable]
        finished.update(cell.id for cell in cells if cell.id in usable)
        if not unfinished and training.id in usable:
            continue
        if training_suffices(training, keep_for(unfinished), store):
            attacks += [Job("attack", training, (cell,)) for cell in unfinished]
        else:
            # keep what all of its cells need, so that cells added later find it
            trainings.append(Job("training", training, cells))
    return [*trainings, *attacks], finished
