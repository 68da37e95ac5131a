"""Runs a study: trainings first, then the attacks on them. The same command again skips the finished cells."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from leakgauge.harness.core.cell import TrainingSpec
from leakgauge.harness.core.errors import StudyError
from leakgauge.harness.core.labels import part_text
from leakgauge.harness.core.result import Run, TrainingRecord, to_data
from leakgauge.harness.core.threats import View
from leakgauge.harness.federation import registry
from leakgauge.harness.study.goal import goal_of, solve
from leakgauge.harness.study.store import Store, load_run
from leakgauge.harness.study.study import Study
from leakgauge.harness.study.supervisor import Job, Listener, Outcome, Place, Progress, Supervisor, cores


def run_study(
    study: Study,
    folder: str | Path,
    *,
    data: Path | None = None,
    workers: int | None = None,
    device: str = "cpu",
    listen: Listener | None = None,
) -> Run:
    """Run the unfinished cells of a study, and return all results.

    Args:
        folder: of the results; created if it is missing.
        data: folder of the data sets; default `LEAKGAUGE_DATA`, or `~/.cache/leakgauge`.
        workers: worker processes; default one per core; 0: work in this process.
        device: where clients train, `cpu` or `cuda`; recorded with each result, not part of its id.
        listen: called after every change.

    Raises:
        StudyError: there is no such device, the folder holds another study, or a data set is missing, has changed or
            does not fit a model; one line for each problem, before anything runs.
        StoreError: the folder cannot be written, or contains an unreadable study.json.
        Interrupted: Ctrl-C; finished results are kept.
    """
    from leakgauge.harness.data import default_root

    if device != "cpu" and not _has(device):
        raise StudyError(study.name, [f"device: got {device!r}, expected cpu, or cuda if there is one"])
    root = data if data is not None else default_root()
    store = Store(Path(folder))
    found = check_data(study, root)
    hashes = {name: digest for name, (digest, _) in found.items()}
    _refuse_other_results(study, store, hashes)
    place, listen = Place(store.folder, root, device), listen or (lambda progress, outcome: None)
    study = _solved(study, store, place, listen, workers)
    attacks = {cell.attack.key: cell.attack for cell in study.cells}
    store.write_study(
        {
            "name": study.name,
            "title": study.title,
            "text": study.text,
            "goals": study.goals,
            "hash": study.hash,
            "cells": [to_data(cell) for cell in study.cells],
            "data": hashes,
            "public": sorted(name for name, (_, is_public) in found.items() if is_public),
            "attacks": {label: to_data(registry.describe(spec)) for label, spec in sorted(attacks.items())},
        }
    )
    trainings, ready, skipped = plan(study, store)
    count = min(cores() if workers is None else workers, max(1, len(trainings) + len(ready)))
    progress = Progress(total=len(study.cells), skipped=skipped)
    Supervisor(place, progress, listen, trainings, ready).run(count)
    return load_run(store.folder)


def _solved(study: Study, store: Store, place: Place, listen: Listener, workers: int | None) -> Study:
    """The study with its defenses' goals solved; each training of the search is stored, and serves its cells too.

    Raises:
        StudyError: no goal can be reached and nothing else is asked, or a training of the search failed.
    """
    from leakgauge.harness.study.jobs import keep_for, training_suffices

    if not any(goal_of(spec.defense) for spec in study.trainings):
        return study

    def trained(specs: list[TrainingSpec]) -> dict[str, TrainingRecord]:
        keep, errors = keep_for(study.cells), list[str]()
        missing = [
            spec for spec in {spec.id: spec for spec in specs}.values() if not training_suffices(spec, keep, store)
        ]

        def watch(progress: Progress, outcome: Outcome | None) -> None:
            errors.extend([outcome.error] if outcome is not None and outcome.error else [])
            listen(progress, outcome)

        count = min(cores() if workers is None else workers, len(missing))
        jobs = [Job("trial", spec, study.cells) for spec in missing]
        if jobs:
            Supervisor(place, Progress(total=len(study.cells)), watch, jobs, []).run(count)
        found = {spec.id: store.read_training(spec.id) for spec in specs}
        if None in found.values():
            raise ValueError(f"target: {'; '.join(errors)}")
        return {name: record for name, record in found.items() if record is not None}

    try:
        cells, goals = solve(study.cells, place.root, trained)
    except ValueError as error:
        raise StudyError(study.name, [str(error)]) from error
    if not cells:
        raise StudyError(study.name, list(goals))
    return replace(study, cells=cells, goals=goals)


def _has(device: str) -> bool:
    """Whether torch can compute on this device."""
    import torch

    return device.split(":")[0] == "cuda" and torch.cuda.is_available()


def check_data(study: Study, root: Path) -> dict[str, tuple[str, bool]]:
    """The digest of each data set, and whether the data set is public; builds every model once on its data.

    Raises:
        StudyError: a data set is missing or unreadable, or a model does not fit it or a defense; one line for each
            problem.
    """
    from leakgauge.harness.learn.batch import check_records
    from leakgauge.harness.study.jobs import load_data, make_task

    load_data.cache_clear()  # a file may have changed since this process last read it
    found, problems = {}, []
    for task in dict.fromkeys(training.task for training in study.trainings):
        try:
            loaded = load_data(task.data, root)
            made = make_task(task, loaded)
            found[task.data] = (loaded.digest, loaded.public)
        except (LookupError, ValueError, OSError) as error:
            problems.append(str(error))
            continue
        defenses = {
            part_text(one.defense): one.defense
            for one in study.trainings
            if one.task == task and not goal_of(one.defense)
        }
        for name, defense in defenses.items():
            try:
                check_records(made, registry.build_defense(defense).local)
            except ValueError as error:
                problems.append(f"{name}: {error}")
    for task, name in dict.fromkeys((cell.training.task, View.parse(cell.threat).other) for cell in study.cells):
        if name and task.data in found:
            try:
                other, own = load_data(name, root), load_data(task.data, root)
                if other.input_shape != own.input_shape:
                    text = f"expected inputs {own.input_shape} as in {task.data!r}, got {other.input_shape}"
                    raise ValueError(f"auxiliary={name}: {text}")
                found[name] = (other.digest, other.public)
            except (LookupError, ValueError, OSError) as error:
                problems.append(str(error))
    if problems:
        raise StudyError(study.name, problems)
    return found


def _refuse_other_results(study: Study, store: Store, hashes: dict[str, str]) -> None:
    """Refuse to mix the results of two studies, or of two versions of one data set, whose ids are the same."""
    if not (store.folder / "study.json").exists():
        return
    stored = store.read_study()
    if stored["name"] != study.name:
        text = f"{store.folder} holds the results of the study {stored['name']!r}: use another folder"
        raise StudyError(study.name, [text])
    before = stored.get("data", {})
    changed = [name for name, digest in hashes.items() if before.get(name, digest) != digest]
    if changed:
        text = f"is not the one of the results in {store.folder}: use another folder"
        raise StudyError(study.name, [f"data set {name!r} {text}" for name in changed])


def plan(study: Study, store: Store) -> tuple[list[Job], list[Job], int]:
    """(trainings to run, attacks whose training is stored, number of finished cells)."""
    from leakgauge.harness.study.jobs import keep_for, training_suffices

    trainings, attacks, skipped = [], [], 0
    for training in study.trainings:
        cells = study.cells_of[training.id]
        unfinished = [cell for cell in cells if store.read_result(cell.id) is None]
        skipped += len(cells) - len(unfinished)
        if not unfinished and store.read_training(training.id) is not None:
            continue
        if training_suffices(training, keep_for(unfinished), store):
            attacks += [Job("attack", training, (cell,)) for cell in unfinished]
        else:
            # keep what all of its cells need: a cell added later then finds it
            trainings.append(Job("training", training, cells))
    return trainings, attacks, skipped
