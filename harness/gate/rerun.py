"""Reruns for the gate: the baseline with older code, and inconclusive cells on twice as many images.

The code of another commit runs in its own process and checkout. It gets the resolved cells as JSON.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from leakgauge.harness.core.cell import Cell
from leakgauge.harness.core.code import code_allowed, named_code, task_code
from leakgauge.harness.core.errors import StudyError
from leakgauge.harness.core.labels import counted
from leakgauge.harness.core.metrics import metric
from leakgauge.harness.core.result import Run
from leakgauge.harness.core.search_path import variables
from leakgauge.harness.core.stored import to_data
from leakgauge.harness.gate.comparable import TESTED, refusal
from leakgauge.harness.gate.judge import Check, Outcome, Rules, Verdict, judge
from leakgauge.harness.gate.measure import Measured, key_end, measured
from leakgauge.harness.study.environment import folders, origin
from leakgauge.harness.study.store import Store, load_run

FRESH = 1_000_000
"""Added to a seed to get images, batches and noise that no study uses."""

_SCRIPT = """
import json, sys
from pathlib import Path
from pydantic import TypeAdapter
from leakgauge.harness.core.cell import Cell
from leakgauge.harness.study.run import run_study
from leakgauge.harness.study.study import Study
asked = json.loads(sys.stdin.read())
cells = TypeAdapter(tuple[Cell, ...]).validate_python(asked["cells"])
data = None if asked["data"] is None else Path(asked["data"])
run_study(Study("again", "", cells), asked["out"], data=data, workers=asked["workers"])
"""

_TELLING = ("BITBUCKET", "BUILDKITE", "CI", "GITEA", "GITHUB", "GITLAB", "JENKINS", "PYTEST", "RUNNER", "TF_")
"""Environment variables with these prefixes tell code that it runs in CI; it runs without them."""

_RULES = "import json; from leakgauge.harness.gate.rules import Rules; print(json.dumps(vars(Rules())))"


@dataclass(frozen=True)
class Bench:
    """Where and how reruns run.

    Attributes:
        folder: the checked run; reruns are stored in its folder `again`, which is emptied each time.
        data: folder of the data sets; None: the default folder.
        workers: processes; None: one per core.
        allow_code: whether the cells in `folder` may name code to import.
    """

    folder: Path
    data: Path | None = None
    workers: int | None = None
    allow_code: bool = False


def holds(*words: str) -> bool:
    """Whether a git command succeeds."""
    try:
        git(*words)
    except StudyError:
        return False
    return True


def again(outcome: Outcome, ref: str | None, bench: Bench, rules: Rules) -> Outcome:
    """The outcome after `settle` at `ref` if its worst verdict is INCONCLUSIVE; with a warning if it cannot run."""
    if outcome.verdict is not Verdict.INCONCLUSIVE:
        return outcome
    if ref is None:
        why = "no cell ran again: no commit of the target branch is known whose code made the baseline"
        return dataclasses.replace(outcome, warnings=(*outcome.warnings, why))
    if why := _forbidden(Store(bench.folder).cells(), bench):
        return dataclasses.replace(outcome, warnings=(*outcome.warnings, f"no cell ran again: {why}"))
    return settle(outcome, ref, bench, rules)


def about_code(now: Measured, bench: Bench) -> tuple[str, ...]:
    """Why the results are not from this code, because a resumed run may keep finished cells; empty: no reason found.

    Results state which code made them; for results that do not, commit and uncommitted changes must be equal.
    """
    store = Store(bench.folder)
    cells = store.cells()
    stored = {store.training(cell.training.id) for cell in cells} | {store.cell(cell.id) for cell in cells}
    codes = {folder: store.examine(folder, arrays=False).code for folder in stored}
    if "" not in codes.values() and not _forbidden(cells, bench):
        with suppress(LookupError):
            others = sum(codes[folder] not in (None, code) for folder, code in folders(store, cells).items())
            said = f"{counted(others, 'result')} made by other code: run the study again to check this code"
            return (said,) * bool(others)
    made_by = origin()
    if now.commit != made_by.commit:
        made = f"the results were made at {now.commit[:12] or 'an unknown commit'} and this code is at "
        return (f"{made}{made_by.commit[:12]}: run the study again, in a new folder, to check this code",)
    if made_by.dirty != now.dirty:
        return ("only one of the results and this code has uncommitted changes: run the study again, in a new folder",)
    return ()


def at_commit(ref: str, bench: Bench, held: Measured) -> Measured:
    """The measures of `held`, run now with the code of `ref`.

    A measure that the run lacks, or has for fewer items, keeps the numbers of `held`; the check then reports it.

    Raises:
        StudyError: git does not know `ref`, or its code cannot run the cells.
    """
    keys = held.by_key()
    cells = [cell for cell in Store(bench.folder).cells() if any(key.endswith(key_end(cell)) for key in keys)]
    if not cells:
        raise StudyError("run again", ["the run has no cell of the baseline"])
    rerun = measured(_run_at(ref, cells, "base", bench))
    ran = rerun.by_key()
    measures = tuple(was if refusal(ran.get(key), was, Rules()) else ran[key] for key, was in keys.items())
    data = held.data | rerun.data
    return dataclasses.replace(rerun, study=held.study, study_hash=held.study_hash, data=data, measures=measures)


def rules_at(ref: str) -> Rules:
    """The thresholds in the code of `ref`; errors as in `at_commit`."""
    with work_tree(ref) as (tree, _):
        known = json.loads(python_in(tree, _RULES, "", f"state the rules of {ref[:12]}"))
    return Rules(**{field.name: known[field.name] for field in dataclasses.fields(Rules) if field.name in known})


def settle(outcome: Outcome, ref: str, bench: Bench, rules: Rules) -> Outcome:
    """The outcome after its inconclusive checks are rerun on twice as many fresh images or records.

    The present code and the code of `ref` run on the same fresh images. The rerun is judged by the same rules at half
    the level, so it adds at most half as many false alarms. A check that is still inconclusive, or that lacks twice as
    many images, stays INCONCLUSIVE, and its reason states that.

    Raises:
        StudyError: as `at_commit`.
    """
    unsure = {
        check.key
        for check in outcome.checks
        if check.verdict is Verdict.INCONCLUSIVE and metric(check.metric).gate in TESTED
    }
    cells = [cell for cell in Store(bench.folder).cells() if any(key.endswith(key_end(cell)) for key in unsure)]
    if not cells:
        return outcome
    doubled = [_twice(cell) for cell in cells]
    renamed = {key_end(cell): key_end(twice) for cell, twice in zip(cells, doubled, strict=True)}
    run = _run(doubled, Path(__file__).parents[3], bench.folder / "again" / "now", bench)
    now = dataclasses.replace(measured(run), study_hash="")
    base = dataclasses.replace(measured(_run_at(ref, doubled, "again", bench)), study_hash="")
    again = judge(now, base, dataclasses.replace(rules, level=rules.level / 2))
    rechecked = {check.key: check for check in again.checks}
    problems, order, checks = "; ".join(again.problems), list(Verdict), []
    for check in outcome.checks:
        stem, _, end = check.key.rpartition("/")
        reran = check.key in unsure
        checks.append(_settled(check, rechecked.get(f"{stem}/{renamed[end]}"), problems) if reran else check)
    return dataclasses.replace(outcome, checks=tuple(sorted(checks, key=lambda check: order.index(check.verdict))))


def _settled(check: Check, again: Check | None, problems: str) -> Check:
    if again is None or again.verdict in (Verdict.INCOMPLETE, Verdict.NOT_COMPARABLE):
        why = problems or (again.reason if again is not None else "it gave no number")
        return dataclasses.replace(check, reason=f"{check.reason}; run again with twice as many: no result, {why}")
    reason = f"run again with twice as many, all fresh: {again.reason} (the first time: {check.reason})"
    return dataclasses.replace(again, key=check.key, name=check.name, reason=reason)


def _twice(cell: Cell) -> Cell:
    target, training = cell.target, cell.training
    outside = None if target.outside is None else 2 * target.outside
    return dataclasses.replace(
        cell,
        training=dataclasses.replace(training, seed=training.seed + FRESH, audit=0),
        target=dataclasses.replace(target, count=2 * target.count, outside=outside),
    )


def _run_at(ref: str, cells: Sequence[Cell], what: str, bench: Bench) -> Run:
    with work_tree(ref) as (tree, commit):
        return _run(cells, tree, bench.folder / "again" / f"{what}-{commit[:12]}", bench)


def _forbidden(cells: Sequence[Cell], bench: Bench) -> str:
    """Why stored cells may not run, because they name code to import; empty if they may run."""
    parts = [part for cell in cells for part in (cell.training.defense, cell.attack)]
    code = named_code(value for part in parts for value in (part.name, *part.parameters.values()))
    tasks = [cell.training.task for cell in cells]
    code += [name for task in tasks for name in task_code(task.model, task.data, task.loss)]
    return (
        f"{code[0]!r} names code to import; pass --allow-code if you trust it"
        if code and not code_allowed(bench.allow_code)
        else ""
    )


def _run(cells: Sequence[Cell], tree: Path, out: Path, bench: Bench) -> Run:
    if why := _forbidden(cells, bench):
        raise StudyError("run again", [why])
    asked = {
        "cells": [to_data(cell) for cell in cells],
        "out": str(out.resolve()),
        "data": None if bench.data is None else str(bench.data.resolve()),
        "workers": bench.workers,
    }
    # earlier results may come from other code or other packages
    shutil.rmtree(out, ignore_errors=True)
    own = tree if code_allowed(bench.allow_code) else None
    python_in(tree, _SCRIPT, json.dumps(asked), f"run {len(cells)} cells for {out.name}", own)
    return load_run(out)


def python_in(tree: Path, script: str, text: str, what: str, own: Path | None = None, cwd: Path | None = None) -> str:
    """The output of a script with the leakgauge in `tree`, and a user's code in `own`; `text` is its input."""
    safe = variables()
    kept = {name: value for name, value in os.environ.items() if not name.startswith(_TELLING)}
    with tempfile.TemporaryDirectory(prefix="leakgauge-") as path:
        (Path(path) / "leakgauge").symlink_to(tree / "leakgauge")  # nothing else in `tree` is found
        searched = os.pathsep.join(filter(None, [path, str(own or ""), safe["PYTHONPATH"]]))
        done = subprocess.run(
            [sys.executable, "-P", "-c", script],
            input=text,
            cwd=cwd or tree,
            env={**kept, **safe, "PYTHONPATH": searched},
            capture_output=True,
            text=True,
            check=False,
        )
    if done.returncode == -2:
        raise KeyboardInterrupt
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise StudyError("run again", [f"that code could not {what}: {last}"])
    return done.stdout


@contextmanager
def work_tree(ref: str) -> Iterator[tuple[Path, str]]:
    """A temporary worktree of a commit, and the commit's full name."""
    commit = git("rev-parse", "--verify", "--quiet", f"{ref}^{{commit}}")
    with tempfile.TemporaryDirectory(prefix="leakgauge-") as parent:
        tree = Path(parent) / "tree"
        git("worktree", "add", "--quiet", "--detach", str(tree), commit)
        _with_loops(tree)
        try:
            yield tree, commit
        finally:
            git("worktree", "remove", "--force", str(tree))


@contextmanager
def copied() -> Iterator[Path]:
    """A temporary copy of the files of the working tree that git does not ignore."""
    root = Path(git("rev-parse", "--show-toplevel"))
    names = git("ls-files", "-z", "--cached", "--others", "--exclude-standard", "--full-name", ":/").split("\0")
    with tempfile.TemporaryDirectory(prefix="leakgauge-") as parent:
        tree = Path(parent) / "tree"
        tree.mkdir()
        for name in filter(None, names):
            if (root / name).is_symlink() or (root / name).is_file():
                (tree / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(root / name, tree / name, follow_symlinks=False)
        _with_loops(tree)
        yield tree


def _with_loops(tree: Path) -> None:
    """Give a tree with the same `native.c` as this code the compiled loops of this code, so that it rounds alike."""
    own, there = Path(__file__).parents[1] / "core", tree / "harness" / "core"
    with suppress(FileNotFoundError):
        if (there / "native.c").read_bytes() == (own / "native.c").read_bytes():
            for path in own.glob("_native*"):
                shutil.copy2(path, there / path.name)


def committed(commit: str, file: str) -> bytes | None:
    """The content of a file in a commit; None: it has no such file."""
    done = subprocess.run([*_GIT, "show", f"{commit}:{file}"], capture_output=True, check=False)
    return None if done.returncode else done.stdout


_GIT = ("git", "-c", "core.hooksPath=/dev/null", "-c", "core.fsmonitor=false")
"""The command without hooks."""


def git(*words: str) -> str:
    """The output of a git command in the repository around the working directory, whose hooks do not run.

    Raises:
        StudyError: git fails, or is not installed.
    """
    try:
        done = subprocess.run([*_GIT, *words], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        said = getattr(error, "stderr", "") or str(error)
        raise StudyError("run again", [f"git {words[0]} {words[-1]}: {said.strip().splitlines()[-1]}"]) from error
    return done.stdout.strip()
