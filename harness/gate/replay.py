"""Replays: the cells that a change concerns, run by the code before and after it from the same fresh keys.

The code under test runs in processes of its own, in folders whose names do not tell the two apart, without the
variables of CI, and draws from a number that nobody knew before. What it returns is read as data.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from pydantic import TypeAdapter, ValidationError

from leakgauge.harness.core.cases import training_identity
from leakgauge.harness.core.cell import Cell
from leakgauge.harness.core.errors import StudyError
from leakgauge.harness.core.files import content
from leakgauge.harness.core.fingerprints import Fingerprint
from leakgauge.harness.core.search_path import variables
from leakgauge.harness.core.stored import to_data
from leakgauge.harness.gate.changes import Behind, Changes, behind, changes_since, new_lines
from leakgauge.harness.gate.measure import Measured, measured
from leakgauge.harness.gate.rerun import Bench, copied, git, python_in, work_tree
from leakgauge.harness.study.store import Store, load_run
from leakgauge.harness.study.study import load_study

_RESOLVE = """
import json, sys
asked = json.load(sys.stdin)
sys.argv[:] = ["leakgauge", "show", asked["study"]]
from leakgauge import load_study
from leakgauge.harness.core.stored import to_data
study = load_study(asked["study"], allow_code=asked["allow_code"])
with open(asked["out"], "w") as file:
    json.dump([to_data(cell) for cell in study.cells], file)
"""

_REPLAY = """
import json, os, sys
asked = json.load(sys.stdin)
sys.argv[:] = ["leakgauge", "run", "study.toml"]
left = {file: set(lines) for file, lines in asked["lines"].items()}
found = {}
def trace(frame, event, value):
    name = frame.f_code.co_filename
    if name not in found:
        found[name] = left.get(os.path.realpath(name))
    if found[name] is not None:
        found[name].discard(frame.f_lineno)
    return trace if found[name] else None
if left:
    sys.settrace(trace)
from pathlib import Path
from pydantic import TypeAdapter
from leakgauge import Study
from leakgauge.harness.core.cases import training_identity
from leakgauge.harness.core.cell import Cell
from leakgauge.harness.study.fingerprints import take
from leakgauge.harness.study.run import run_study
cells = TypeAdapter(tuple[Cell, ...]).validate_python(asked["cells"])
data = None if asked["data"] is None else Path(asked["data"])
taken = [vars(one) for one in take(cells, data)]
if not left or asked["whole"] or any(left.values()):
    run_study(Study("replay", "", cells), asked["out"], data=data, workers=0)
sys.settrace(None)
with open(asked["taken"], "w") as file:
    json.dump({"fingerprints": taken, "left": {name: sorted(lines) for name, lines in left.items()}}, file)
"""

_MOST = 2**28


@dataclass(frozen=True)
class Side:
    """What one version of the code gave.

    Attributes:
        folder: the run.
        left: the new lines that did not run, by file in the repository; empty if nothing was traced.
    """

    folder: Path
    measured: Measured
    fingerprints: tuple[Fingerprint, ...]
    left: dict[str, list[int]]


class Replay(NamedTuple):
    """Both sides of a replay, and what the study has.

    Attributes:
        cells: the cells of the study after the change.
        behind: the changed files behind its parts.
        before, after: None if the change concerns no cell that both versions of the study have.
    """

    cells: tuple[Cell, ...]
    behind: Behind | None
    before: Side | None
    after: Side | None


def replay(source: str, changes: Changes, number: int, bench: Bench) -> Replay:
    """Run the cells of a study that changed files are behind, by the code before and after the change.

    Args:
        source: path or name of the study.
        number: added to each seed; of cells that differ only in the seed, one runs.
        bench: `bench.folder` is for the runs, `before` and `after`.

    Raises:
        StudyError: one of the two cannot run the study; StoreError: as `load_run`.
    """
    with ExitStack() as stack:
        old, _ = stack.enter_context(work_tree(changes.before))
        new = stack.enter_context(copied())
        pool = stack.enter_context(ThreadPoolExecutor())
        waits = pool.submit(_resolved, source, bench, new, own=not (new / "leakgauge").exists())
        resolved = [_resolved(source, bench, old, own=True), waits.result()]
        cells = {cell.id: cell for cell, _ in resolved[1]}
        here = _inside(new)
        place = here / Path(source).parent if (here / source).is_file() else here
        found = behind(changes, cells.values(), [new, here, place])
        both = cells.keys() & {cell.id for cell, _ in resolved[0]}
        chosen = _first_seeds(cells[one] for one in cells if one in both and found.concerns(cells[one]))
        if not chosen:
            return Replay(tuple(cells.values()), found, None, None)
        asked = [[_fresh(data, number) for cell, data in side if cell.id in chosen] for side in resolved]
        lines, nothing = new_lines(changes, found.files), dict[str, set[int]]()
        whole = bool(found.every)  # tracing is slow: of a change that concerns all, only one run is traced
        sides = [(old, asked[0], "before", nothing), (new, asked[1], "after", lines if whole else nothing)]
        if lines and not whole:  # the traced run is another one, because code can see that it is traced
            sides.append((new, asked[1], "traced", lines))
        before, after, *traced = pool.map(lambda one: _side(bench, *one), sides)
    left = after.left
    for one in traced:
        told = all(a.like(b) for a, b in zip(one.fingerprints, after.fingerprints, strict=False))
        left = (
            one.left if told else {file: sorted(numbers) for file, numbers in lines.items()}
        )  # it hides from a tracer
    return Replay(tuple(cells.values()), found, before, dataclasses.replace(after, left=left))


def by_code_of(commit: str, words: Sequence[str]) -> int | None:
    """The exit code of this command with the code of a commit; None if this code is not part of the proposal.

    It is if it lies in the repository around the working directory and differs from the commit.
    """
    root = Path(git("rev-parse", "--show-toplevel")).resolve()
    if not Path(__file__).resolve().is_relative_to(root) or not changes_since(commit).digests:
        return None
    with work_tree(commit) as (tree, _), tempfile.TemporaryDirectory(prefix="leakgauge-") as path:
        (Path(path) / "leakgauge").symlink_to(tree / "leakgauge")
        safe = variables()
        searched = os.pathsep.join(filter(None, [path, safe["PYTHONPATH"]]))
        command = [sys.executable, "-P", "-m", "leakgauge", *words]
        return subprocess.run(command, env={**os.environ, **safe, "PYTHONPATH": searched}, check=False).returncode


def differences(before: Side, after: Side) -> Iterator[str]:
    """What differs by more than rounding between the runs of two versions: measures, and messages and models."""
    old = before.measured.by_key()
    for key, now in after.measured.by_key().items():
        was = old.get(key)
        if was is None or not _close([was.value, *was.values], [now.value, *now.values]):
            yield f"{now.name}: {None if was is None else was.value} -> {now.value}"
    stores = Store(before.folder), Store(after.folder)
    for cell in {cell.training.id: cell for cell in stores[1].cells()}.values():
        arrays = [store.read_arrays(store.training(cell.training.id) / "kept.npz") or {} for store in stores]
        names = [name for name in {**arrays[0], **arrays[1]} if not _alike(arrays[0].get(name), arrays[1].get(name))]
        if names:
            yield f"{cell.training.defense.key}: messages or models of a training ({', '.join(names[:3])})"


def _close(old: Sequence[float | None], new: Sequence[float | None]) -> bool:
    pairs = [(-math.inf if a is None else a, -math.inf if b is None else b) for a, b in zip(old, new, strict=False)]
    return len(old) == len(new) and all(math.isclose(a, b, rel_tol=1e-2, abs_tol=1e-3) for a, b in pairs)


def _alike(old: Any, new: Any) -> bool:
    if old is None or new is None or old.shape != new.shape or old.dtype != new.dtype:
        return False
    if not np.issubdtype(old.dtype, np.floating):
        return bool(np.array_equal(old, new))
    with np.errstate(all="ignore"):
        return bool(np.array_equal(old, new, equal_nan=True) or np.linalg.norm(old - new) <= 1e-3 * np.linalg.norm(old))


def _resolved(source: str, bench: Bench, tree: Path, *, own: bool) -> list[tuple[Cell, dict[str, Any]]]:
    """The cells of the study in a tree, each also as the code there wrote it.

    Args:
        own: whether the package in this tree is the one that runs here.
    """
    here = _inside(tree)
    if own and not bench.allow_code:
        study = load_study(here / source if (here / source).is_file() else source)
        return [(cell, to_data(cell)) for cell in study.cells]
    out = tree.parent / "study.json"
    asked = {"study": source, "allow_code": bench.allow_code, "out": str(out)}
    python_in(tree, _RESOLVE, json.dumps(asked), f"read the study {source}", here if bench.allow_code else None, here)
    try:
        made = json.loads(content(out, _MOST))
        return list(zip(TypeAdapter(list[Cell]).validate_python(made), made, strict=True))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise StudyError(source, [f"its cells cannot be read: {error}"]) from error


def _inside(tree: Path) -> Path:
    """The folder in a tree that the working directory is in the repository."""
    return tree / git("rev-parse", "--show-prefix")


def _first_seeds(cells: Iterable[Cell]) -> set[str]:
    """The ids of the cells; of trainings that differ only in the seed, those of the first."""
    asked = list(cells)
    first = {training_identity(cell.training): cell.training.id for cell in reversed(asked)}
    return {cell.id for cell in asked if first[training_identity(cell.training)] == cell.training.id}


def _fresh(data: dict[str, Any], number: int) -> dict[str, Any]:
    training = data["training"]
    return {**data, "training": {**training, "seed": training["seed"] + number}}


def _side(bench: Bench, tree: Path, cells: Sequence[object], name: str, lines: dict[str, set[int]]) -> Side:
    here, out = _inside(tree), tree.parent / secrets.token_hex(4)  # a name that does not tell the sides apart
    taken, root = out.with_suffix(".json"), tree.resolve()
    asked = {
        "cells": cells,
        "data": None if bench.data is None else str(bench.data.resolve()),
        "out": str(out),
        "taken": str(taken),
        "lines": {str(root / file): sorted(numbers) for file, numbers in lines.items()},
        "whole": name != "traced",
    }
    what, folder = f"replay {len(cells)} cells", bench.folder / name
    python_in(tree, _REPLAY, json.dumps(asked), what, here if bench.allow_code else None, here)
    try:
        made = json.loads(content(taken, _MOST))
        fingerprints = TypeAdapter(tuple[Fingerprint, ...]).validate_python(made["fingerprints"])
        left = {Path(file).relative_to(root).as_posix(): numbers for file, numbers in made["left"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ValidationError) as error:
        raise StudyError(what, [f"its result cannot be read: {error}"]) from error
    shutil.rmtree(folder, ignore_errors=True)
    if name == "traced":
        return Side(folder, _NOTHING, fingerprints, left)
    folder.parent.mkdir(parents=True, exist_ok=True)
    shutil.move(out, folder)
    return Side(folder, dataclasses.replace(measured(load_run(folder)), study_hash="", dirty=False), fingerprints, left)


_NOTHING = Measured("", "", {}, "", False, {}, "", ())
