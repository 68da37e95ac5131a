"""Folders of results, changed as faults, users and earlier versions leave them."""

import hashlib
import json
import shutil

from leakgauge.harness.core.stored import RENAMED, to_data
from leakgauge.harness.study.store import Store, sealed, to_json


def on_disk(run, folder):
    """A folder with the results of a run."""
    store = Store(folder)
    attacks = {label: to_data(info) for label, info in run.attacks.items()}
    data = {"text": "", **run.study, "name": run.name, "hash": run.study_hash, "public": sorted(run.public_data)}
    data |= {"data": run.data_hashes, "cells": [to_data(cell) for cell in run.cells], "attacks": attacks}
    store.write_study(data)
    for record in run.trainings.values():
        store.write_training(record, {}, 1.0)
    for result in run.results.values():
        seen = run.pictures(result.cell.id)
        store.write_result(result, {"original": seen.original, "guess": seen.guess} if seen else {}, 1.0)
    for failure in run.failures.values():
        store.write_failure(failure)
    return folder


def as_written_by_version_1(source, folder, version=1):
    """A copy of a folder of results with the names of version 1; its records state `version`, if it is not 1."""
    shutil.copytree(source, folder)
    stated = {} if version == 1 else {"version": version}
    for path in [*folder.glob("*/*/result.json"), *folder.glob("*/*/record.json")]:
        rewrite(path, lambda data: _as_version_1(data) | stated)
    data = json.loads((folder / "study.json").read_text("utf-8"))
    del data["digest"], data["version"]
    (folder / "study.json").write_bytes(sealed(data))
    return folder


def _as_version_1(data):
    del data["version"]
    for path, name in RENAMED[1].items():
        *above, last = path.split(".")
        place = data
        for step in above:
            place = place.get(step) if isinstance(place, dict) else None
        if isinstance(place, dict) and name in place:
            place[last] = place.pop(name)
    return data


def rewrite(path, change):
    """Change the data of a result or a record, with its manifest."""
    path.write_bytes(to_json(change(json.loads(path.read_text("utf-8")))))
    listed(path)


def listed(path):
    """List a changed file in its manifest, as if it had been written so."""
    manifest = path.parent / "manifest.json"
    data = json.loads(manifest.read_text("utf-8"))
    del data["digest"]
    data["files"][path.name] = hashlib.sha256(path.read_bytes()).hexdigest()
    manifest.write_bytes(sealed(data))


def damage(path, how, draw, others):
    """Change a file; `draw(n)` is a number below n, `others` are files to put in its place. False: nothing changed."""
    before = content = path.read_bytes()
    at = draw(len(content))
    digits = [number for number, byte in enumerate(content) if chr(byte).isdigit()]
    if how == "cut":
        content = content[:at]
    elif how == "digit" and digits and path.suffix != ".npz":
        at = digits[draw(len(digits))]
        content = content[:at] + str((int(chr(content[at])) + 1 + draw(9)) % 10).encode() + content[at + 1 :]
    elif how == "another" and others:
        content = others[draw(len(others))].read_bytes()
    else:
        content = content[:at] + bytes([content[at] ^ (1 << draw(8))]) + content[at + 1 :]
    path.write_bytes(content)
    return content != before
