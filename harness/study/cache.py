"""The cache of audits and claims that this user's studies computed before, by their question and the code behind them.

A stored answer is used only if it has the bytes of a fresh one: an entry names its question and is stored under the
digest of everything that an answer depends on (see `_behind`). An entry that is damaged, edited or answers another
question is replaced. Only shipped defenses have entries: for a user's module, neither its imports nor whether it still
matches its file is known.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import torch
from pydantic import TypeAdapter

from leakgauge.harness.core.cell import PartSpec
from leakgauge.harness.core.stored import canonical, fingerprint, to_data
from leakgauge.harness.study import environment
from leakgauge.harness.study.files import Damaged, load, sealed, to_json, unsealed
from leakgauge.harness.study.store import StoreError, write_atomically

T = TypeVar("T")

_WORTH = 0.02
"""The fewest seconds of a computation that gets an entry."""

_CODES = 8
"""The number of code versions whose entries are kept; the oldest are removed first."""

_LOADED, _MARGIN = time.time(), 10.0
"""When this module was loaded, and the seconds before it in which the other modules may have been loaded."""


def known(kind: type[T], defense: PartSpec, question: dict[str, Any], compute: Callable[[], T]) -> T:
    """The answer to a question about a defense: a stored one, else the result of `compute`, which is then stored.

    Args:
        kind: type of the answer, a record of `core.result`.
        question: all arguments of `compute` besides the defense, as data.
    """
    root = environment.cache_folder()
    if root is None or not environment.shipped("defense", defense.name):
        return compute()
    behind = _behind()
    if behind is None:
        return compute()
    asked = {"kind": kind.__name__, "defense": to_data(defense), "question": question, "behind": behind}
    path = root / "audits" / fingerprint(behind) / f"{fingerprint(asked, 32)}.json"
    stored = load(path, lambda content: _answer(kind, asked, content), {})
    if stored is not None:
        return stored
    start = time.process_time()
    answer = compute()
    if time.process_time() - start < _WORTH:
        return answer
    with suppress(StoreError, ValueError):  # a full disk, another user's folder, an infinite number: computed again
        content = sealed({"asked": asked, "answer": to_data(answer)})
        if to_json(to_data(_answer(kind, asked, content))) == to_json(to_data(answer)):
            _forget(path.parents[1], path.parent)
            write_atomically(path, content)
    return answer


def _answer(kind: type[T], asked: dict[str, Any], content: bytes) -> T:
    """The answer in an entry.

    Raises:
        Damaged: the entry was changed, or answers another question.
    """
    data = unsealed(content)
    if canonical(data["asked"]) != canonical(asked):
        raise Damaged("answers another question")
    answer: T = TypeAdapter(kind).validate_json(json.dumps(data["answer"]), strict=True)
    return answer


def _behind() -> dict[str, Any] | None:
    """Everything besides the question that an answer depends on; None if files are newer than this process's code."""
    root = Path(environment.__file__).parents[2]
    newest = max(path.stat().st_mtime for room in environment.SOURCES for path in (root / room).rglob("*.py"))
    if newest > _LOADED - _MARGIN:
        return None
    torch_of = f"{torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} threads"
    return {**environment.numerics(), "torch": torch_of}


def _forget(root: Path, kept: Path) -> None:
    """Remove the entries of old code versions before the first entry of a new version is written."""
    if kept.exists():
        return
    with suppress(OSError):
        codes = sorted(filter(Path.is_dir, root.iterdir()), key=lambda folder: folder.stat().st_mtime)
        for old in codes[: 1 - _CODES]:
            shutil.rmtree(old, ignore_errors=True)
