"""The report of a thousand cells, read from disk: its time and the size of its page.

A synthetic run (`tests.report_fixtures`): 25 defenses, each with three reconstruction attacks at five rounds and one
membership attack on five clients, two seeds, 8 victims per cell; pictures and scores are stored as a run stores them.
Prints median processor seconds of `load_run` and of `render`, and the bytes of the page, beside their bars. Exit code 1
if a bar is missed.

    PYTHONPATH=. python benchmarks/report.py [--profile]
"""

from __future__ import annotations

import cProfile
import dataclasses
import pstats
import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from leakgauge.harness.core.cell import Cell, PartSpec, Target
from leakgauge.harness.core.result import Run, to_data
from leakgauge.harness.study.store import Store, load_run
from leakgauge.reports.html import render
from tests import report_fixtures as double

SECONDS, BYTES, REPEATS = 10.0, 5_000_000, 3
PLACES = range(5)
DEFENSES = [
    double.NONE,
    *(PartSpec("gaussian", {"clip": 1.0, "epsilon": 2.0**k, "delta": 1e-5}) for k in range(8)),
    *(PartSpec("laplace", {"scale": 0.01 * 2.0**k}) for k in range(8)),
    *(PartSpec(name, {"epsilon": epsilon}) for name in double.CHECKED for epsilon in (2.0, 8.0)),
]


def invented() -> Run:
    """The synthetic run of a thousand cells."""
    attacks = [
        (attack, Target("probe", place, count=8), "server+labels")
        for attack in (double.MATCHING, double.MAP, double.PRIOR)
        for place in PLACES
    ]
    attacks += [(double.THRESHOLD, Target("members", count=200, client=place), "public") for place in PLACES]
    return double.make_run(double.grid(DEFENSES, attacks, seeds=(0, 1)), name="a-thousand-cells")


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


def timed(folder: Path) -> tuple[float, float, str]:
    """Processor seconds to read and to render, and the page."""
    start = time.process_time()
    run = load_run(folder)
    read = time.process_time()
    page = render(run)
    return read - start, time.process_time() - read, page


def main(arguments: list[str]) -> int:
    """Print seconds and bytes; with `--profile`, print a profile instead."""
    with tempfile.TemporaryDirectory() as folder:
        write(invented(), Path(folder))
        if "--profile" in arguments:
            with cProfile.Profile() as profile:
                timed(Path(folder))
            pstats.Stats(profile).sort_stats("cumulative").print_stats(60)
            return 0
        rows = [timed(Path(folder)) for _ in range(REPEATS)]
        cells = len(load_run(Path(folder)).results)
    reading, rendering = (statistics.median(row[at] for row in rows) for at in (0, 1))
    size = len(rows[0][2].encode())
    assert len({row[2] for row in rows}) == 1
    print(f"{cells} cells: load_run {reading:.2f} s, render {rendering:.2f} s, page {size:,} bytes")
    missed = reading + rendering > SECONDS or size > BYTES
    print(f"bars {SECONDS:g} s and {BYTES:,} bytes: {'MISSED' if missed else 'met'}")
    return int(missed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
