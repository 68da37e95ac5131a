"""Folders of invented results, and what may become of them, for the tests of `leakgauge check`."""

import dataclasses
import functools
import json

import numpy as np

from leakgauge.harness.core.cell import Target
from leakgauge.harness.core.result import Failure
from leakgauge.harness.core.stats import mean
from leakgauge.harness.core.stored import fingerprint, to_data
from leakgauge.harness.study.environment import environment
from leakgauge.harness.study.store import Store
from tests import report_fixtures as made
from tests.report_fixtures import GAUSSIAN, MAP, MATCHING, NONE, PRIOR, THRESHOLD, result_of, ssim_values

PROBE, MEMBERS = Target("probe", 0, 16), Target("members", count=200)
ASKED = [*((attack, PROBE, "server") for attack in (MATCHING, MAP, PRIOR)), (THRESHOLD, MEMBERS, "public")]
CELLS = made.grid([NONE, GAUSSIAN[1]], ASKED, seeds=[0])


def arrays_of(cell):
    """Scores or pictures, as a worker stores them."""
    if cell.attack == THRESHOLD:
        scores = made.scores_of(cell)
        is_member = np.repeat([True, False], [len(scores.members), len(scores.outside)])
        return {"scores": np.concatenate([scores.members, scores.outside]), "is_member": is_member}
    pictures = made.pictures_of(cell)
    return {"original": pictures.original, "guess": pictures.guess}


def here(record):
    """The record of a result or training, made by the code of this checkout."""
    return dataclasses.replace(record, environment=environment())


def write_run(folder, cells=CELLS):
    """A folder of results of a run that nobody ran."""
    store = Store(folder)
    store.write_study(
        {
            "name": "smoke",
            "title": "Invented",
            "text": "",
            "hash": fingerprint([cell.id for cell in cells]),
            "cells": [to_data(cell) for cell in cells],
            "data": {"invented": "00ff"},
            "public": ["invented"],
            "attacks": {cell.attack.key: to_data(made.ATTACKS[cell.attack.name]) for cell in cells},
        }
    )
    for spec in {cell.training.id: cell.training for cell in cells}.values():
        store.write_training(here(made.training_of(spec)), {}, 1.0)
    for cell in cells:
        store.write_result(here(result_of(cell)), arrays_of(cell), 1.0)


def one(attack, defense=GAUSSIAN[1]):
    """The cell of an attack on a defense."""
    return next(cell for cell in CELLS if cell.attack == attack and cell.training.defense == defense)


def with_values(folder, cell, values):
    """The same run with other SSIMs of a cell."""
    changed = made.with_estimates(here(result_of(cell)), mean("ssim", values))
    Store(folder).write_result(changed, arrays_of(cell), 1.0)


def shifted(folder, *, attack, steps):
    """The same run with each SSIM of an attack moved, by these steps in turn."""
    values = ssim_values(one(attack))
    with_values(folder, one(attack), [value + steps[at % len(steps)] for at, value in enumerate(values)])


worse = functools.partial(shifted, attack=MAP, steps=[0.07])
better = functools.partial(shifted, attack=MAP, steps=[-0.1])
inconclusive = functools.partial(shifted, attack=MATCHING, steps=[0.15, -0.12])


def one_image_worse(folder):
    values = list(ssim_values(one(MATCHING)))
    assert values[3] < 0.4
    values[3] = 0.75
    with_values(folder, one(MATCHING), values)


def missing_cell(folder):
    for path in Store(folder).cell(one(MAP).id).iterdir():
        path.unlink()


def failed_cell(folder):
    missing_cell(folder)
    Store(folder).write_failure(Failure(one(MAP), "RuntimeError", "out of memory", "trace"))


def failed_image(folder):
    with_values(folder, one(MAP), [None, *ssim_values(one(MAP))[1:]])


def nan_in_a_file(folder):
    path = Store(folder).cell(one(MAP).id) / "result.json"
    data = json.loads(path.read_text())
    data["estimates"][0]["values"][5] = float("nan")
    path.write_text(json.dumps(data))


def cut(path, end=500):
    path.write_bytes(path.read_bytes()[:-end])


def cut_result(folder):
    cut(Store(folder).cell(one(MAP).id) / "result.json", 40)


def cut_training(folder):
    cut(Store(folder).training(one(MAP).training.id) / "record.json", 40)


def other_images(folder):
    for attack in (MATCHING, MAP, PRIOR):
        for cell in (one(attack), one(attack, NONE)):
            arrays = arrays_of(cell)
            Store(folder).write_result(here(result_of(cell)), arrays | {"original": arrays["original"] / 2}, 1.0)


def other_study(folder):
    write_run(folder, made.grid([NONE, GAUSSIAN[2]], ASKED, seeds=[0]))


def no_results(folder):
    (folder / "study.json").unlink()
