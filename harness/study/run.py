"""Runs a study: trainings first, then the attacks on them. The same command again skips what is done."""

from __future__ import annotations

from pathlib import Path

from leakgauge.harness.core.errors import StudyError
from leakgauge.harness.core.result import Run, to_data
from leakgauge.harness.federation import registry
from leakgauge.harness.study.store import Store, load_run
from leakgauge.harness.study.study import Study
from leakgauge.harness.study.supervisor import Job, Listener, Place, Progress, Supervisor, cores


def run_study(
    study: Study,
    folder: str | Path,
    *,
    data: Path | None = None,
    workers: int | None = None,
    device: str = "cpu",
    listen: Listener | None = None,
) -> Run:
    """Run what is not yet done of a study, and return all results.

    Args:
        folder: of the results; made where it is missing.
        data: folder of the data sets; default `LEAKGAUGE_DATA`, or `~/.cache/leakgauge`.
        device: where clients train, `cpu` or `cuda`; recorded with each result, not part of its id.
        workers: processes; default one a core; 0 works in this process.
        listen: called after every change.

    Raises:
        StudyError: the device is not there, a data set is missing or does not fit a model; one line each, before
            anything runs.
        StoreError: the folder cannot be written, or holds a study.json that cannot be read.
        Interrupted: Ctrl-C; what was finished is kept.
    """
    from leakgauge.harness.data import default_root

    if device != "cpu" and not _has(device):
        raise StudyError(study.name, [f"device: got {device!r}, expected cpu, or cuda where there is one"])
    root = data if data is not None else default_root()
    store = Store(Path(folder))
    hashes, public = check_data(study, root)
    _check_same_data(study, store, hashes)
    store.write_study(
        {
            "name": study.name,
            "title": study.title,
            "text": study.text,
            "hash": study.hash,
            "cells": [to_data(cell) for cell in study.cells],
            "data": hashes,
            "public": sorted(public),
            "attacks": {
                label: to_data(registry.describe(spec))
                for label, spec in sorted({cell.attack.label: cell.attack for cell in study.cells}.items())
            },
        }
    )
    jobs, ready, skipped = plan(study, store)
    progress = Progress(total=len(study.cells), skipped=skipped)
    count = min(workers if workers is not None else cores(), max(1, len(jobs) + len(ready)))
    place = Place(store.folder, root, device)
    supervisor = Supervisor(place, progress, listen or (lambda progress, outcome: None))
    supervisor.run(jobs, ready, count)
    return load_run(store.folder)


def _has(device: str) -> bool:
    """Whether torch can compute there."""
    import torch

    return device.split(":")[0] == "cuda" and torch.cuda.is_available()


def check_data(study: Study, root: Path) -> tuple[dict[str, str], set[str]]:
    """Digest of each data set, and the names of those that may be shown; every model is built once on its data.

    Raises:
        StudyError: what is missing, unreadable or does not fit; one line each.
    """
    from leakgauge.harness.study.jobs import load_data, make_task

    load_data.cache_clear()  # a file may have changed since this process last read it
    hashes: dict[str, str] = {}
    public: set[str] = set()
    problems = []
    for task in dict.fromkeys(training.task for training in study.trainings):
        try:
            loaded = load_data(task.data, root)
            make_task(task, loaded)
        except (LookupError, ValueError, OSError) as error:
            problems.append(str(error))
            continue
        hashes[task.data] = loaded.digest
        if loaded.public:
            public.add(task.data)
    if problems:
        raise StudyError(study.name, problems)
    return hashes, public


def _check_same_data(study: Study, store: Store, hashes: dict[str, str]) -> None:
    """Refuse to mix results on two versions of one data set, which have the same ids."""
    if not (store.folder / "study.json").exists():
        return
    before = store.read_study().get("data", {})
    changed = [name for name, digest in hashes.items() if before.get(name, digest) != digest]
    if changed:
        lines = [
            f"data set {name!r} is not the one of the results in {store.folder}: use another folder" for name in changed
        ]
        raise StudyError(study.name, lines)


def plan(study: Study, store: Store) -> tuple[list[Job], list[Job], int]:
    """(trainings to run, attacks whose training is there, cells that are done)."""
    from leakgauge.harness.study.jobs import keep_for, training_suffices

    trainings, ready, skipped = [], [], 0
    for training in study.trainings:
        mine = study.cells_of[training.id]
        open_cells = [cell for cell in mine if store.read_result(cell.id) is None]
        skipped += len(mine) - len(open_cells)
        has_record = store.read_training(training.id) is not None
        if has_record and not open_cells:
            continue
        if training_suffices(training, keep_for(open_cells), store):
            ready += [Job("attack", training, (cell,)) for cell in open_cells]
        else:
            # keep what all of its cells need, so that a cell added later finds it
            trainings.append(Job("training", training, tuple(mine)))
    return trainings, ready, skipped
