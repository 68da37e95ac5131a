"""Studies: the overhead of the harness around trainings and attacks, the speed-up by workers, and the report.

The reference of empty cells is files of the same number and size, written as safely and with their digests. The
reference of a grid of cells of one second is the same grid in one process. The reference of the report is parsing and
writing the same JSON.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.util
import json
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from _cells import equal
from _measure import MEMORY, Rows, Skipped, Work

from leakgauge.harness.core.cell import Cell, PartSpec, Target
from leakgauge.harness.core.result import Run
from leakgauge.harness.core.stored import to_data
from leakgauge.harness.study.run import run_study
from leakgauge.harness.study.store import Store, load_run, write_atomically
from leakgauge.harness.study.study import Study
from leakgauge.reports.html import render
from tests import report_fixtures as double

FILES, BYTES = 3, 2_000
"""Number of files of a finished cell, and mean bytes per file."""

CELLS, SECONDS = 48, 1.0

DEFENSES = [
    double.NONE,
    *(PartSpec("gaussian", {"clip": 1.0, "epsilon": 2.0**k, "delta": 1e-5}) for k in range(8)),
    *(PartSpec("laplace", {"scale": 0.01 * 2.0**k}) for k in range(8)),
    *(PartSpec(name, {"epsilon": epsilon}) for name in double.CHECKED for epsilon in (2.0, 8.0)),
]


def ran(study: Study, *, report: bool = False, **options: Any) -> None:
    """Run a study in a new folder, with its report if `report` is set; check that every cell has a result."""
    with tempfile.TemporaryDirectory(dir=MEMORY) as folder:
        run = run_study(study, Path(folder), **options)
        assert len(run.results) == len(run.cells), run.failures
        if report:
            render(load_run(folder))


def empty(cells: int) -> Work:
    """Empty cells that are planned, run in this process and reported."""
    return Work(
        lambda: ran(equal(cells, 0.0), report=True, workers=0),
        partial(written, cells),
        "the same files alone",
        cells,
        "cell",
        hashed=cells * FILES * BYTES,
        note="in memory, not on a disk",
    )


def written(cells: int) -> None:
    """Write and read files with their digests, as a store does for its cells."""
    content = {"value": "x" * (BYTES - 20)}
    with tempfile.TemporaryDirectory(dir=MEMORY) as folder:
        for number in range(cells):
            (place := Path(folder) / str(number)).mkdir()
            for name in map(str, range(FILES)):
                data = json.dumps(content).encode()
                write_atomically(place / name, data)
                json.loads((place / name).read_bytes())
                hashlib.sha256(data).digest()


def workers(count: int, *, ray: bool = False) -> Work:
    """Equal cells in several processes, or on a local Ray; the reference is one process."""
    engine = None
    if ray:
        if importlib.util.find_spec("ray") is None:
            raise Skipped("Ray is not installed")
        from leakgauge.harness.study.engines.ray import RayEngine

        engine = partial(RayEngine, slots=count)
    study = equal(CELLS, SECONDS)
    ours, serial = partial(ran, study, workers=count, engine=engine), partial(ran, study, workers=0)
    return Work(ours, serial, "one process", CELLS, "cell", wall=True, note="peak of the largest process")


def invented(defenses: int, seeds: tuple[int, ...]) -> Run:
    """A synthetic run with 20 cells for each defense and seed: three reconstructions and a membership attack."""
    places = range(5)
    attacks = [
        (attack, Target("probe", place, count=8), "server+labels")
        for attack in (double.MATCHING, double.MAP, double.PRIOR)
        for place in places
    ]
    attacks += [(double.THRESHOLD, Target("members", count=200, client=place), "public") for place in places]
    return double.make_run(double.grid(DEFENSES[:defenses], attacks, seeds=seeds), name="invented")


def write(run: Run, folder: Path) -> None:
    """Write the folder of a finished run, without the models and messages of its trainings."""
    store = Store(folder)
    store.write_study(
        {
            "name": run.name,
            "text": "",
            "hash": run.study_hash,
            "public": sorted(run.public_data),
            "data": run.data_hashes,
            "cells": [to_data(cell) for cell in run.cells],
            "attacks": {label: dataclasses.asdict(info) for label, info in run.attacks.items()},
        }
    )
    for identity, record in run.trainings.items():
        store.write_training(record, {"nothing": np.zeros(1)}, run.seconds.get(identity, 1.0))
    for identity, result in run.results.items():
        store.write_result(result, arrays(run, result.cell), run.seconds[identity])


def arrays(run: Run, cell: Cell) -> dict[str, np.ndarray]:
    """The arrays stored with the result of a cell."""
    pictures, scores = run.pictures(cell.id), run.scores(cell.id)
    if pictures is not None:
        return {"original": pictures.original, "guess": pictures.guess}
    assert scores is not None
    is_member = np.repeat([True, False], [len(scores.members), len(scores.outside)])
    return {"scores": np.concatenate([scores.members, scores.outside]), "is_member": is_member}


def report(defenses: int, seeds: tuple[int, ...]) -> Work:
    """Read a finished run from the disk, and render its page."""
    folder = tempfile.TemporaryDirectory(dir=MEMORY)
    run = invented(defenses, seeds)
    write(run, Path(folder.name))
    files = sorted(Path(folder.name).rglob("*.json"))

    def page() -> str:
        assert Path(folder.name).exists()  # the folder lives as long as this function
        return render(load_run(Path(folder.name)))

    size = sum(path.stat().st_size for path in Path(folder.name).rglob("*") if path.is_file())
    note = f"page of {len(page().encode()) / 1e6:.1f} MB"
    return Work(page, partial(parsed, folder, files), "its JSON alone", len(run.cells), "cell", hashed=size, note=note)


def parsed(folder: tempfile.TemporaryDirectory[str], files: list[Path]) -> str:
    """The JSON of a finished run, read and written once."""
    assert Path(folder.name).exists()
    return json.dumps([json.loads(path.read_bytes()) for path in files])


def rows(quick: bool) -> Rows:
    """Empty cells, the report, and workers."""
    if quick:
        return {"empty cells": partial(empty, 50), "report": partial(report, 1, (0,))}
    found: dict[str, Callable[[], Work]] = {
        "empty cells": partial(empty, 500),
        "report": partial(report, len(DEFENSES), (0, 1)),
        f"grid of {CELLS} cells of {SECONDS:g} s, 1 worker": partial(workers, 1),
        f"grid of {CELLS} cells of {SECONDS:g} s, 2 workers": partial(workers, 2),
        f"grid of {CELLS} cells of {SECONDS:g} s, Ray, 2 workers": partial(workers, 2, ray=True),
    }
    return found
