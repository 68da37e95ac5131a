"""Audits and claims that a study of this user has computed before, by their question and the code behind them.

A stored answer has the bytes of a fresh one, or it is not used: an entry names its question, and is under the digest
of what an answer depends on (see `_behind`). An entry that is damaged, edited or of another question is replaced.

Only shipped defenses have entries: of somebody's module neither what it imports nor whether it is the file's is known.
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

from leakgauge.harness.core.cell import PartSpec, canonical, fingerprint
from leakgauge.harness.core.result import to_data
from leakgauge.harness.study import environment
from leakgauge.harness.study.files import Damaged, load, sealed, to_json, unsealed
from leakgauge.harness.study.store import StoreError, write_atomically

T = TypeVar("T")

_WORTH = 0.02
"""Seconds: what is computed faster has no entry."""

_CODES = 8
"""Codes whose entries are kept: those written to last."""

_LOADED, _MARGIN = time.time(), 10.0
"""When this code was loaded, and the seconds before that in which its other modules were."""


def known(kind: type[T], defense: PartSpec, question: dict[str, Any], compute: Callable[[], T]) -> T:
    """The answer to a question about a defense: a stored one, or else that of `compute`, which is stored.

    Args:
        kind: of the answer, a record of `core.result`.
        question: all arguments of `compute` besides the defense, as data.
    """
    root = environment.cache_folder()
    if root is None or not all(environment.shipped("defense", name) for name in defense.name.split("+")):
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
    found = compute()
    if time.process_time() - start >= _WORTH:
        _store(path, kind, asked, found)
    return found


def _store(path: Path, kind: type[T], asked: dict[str, Any], found: T) -> None:
    """Write an entry, if reading it gives this answer with every byte; what cannot be stored is computed again."""
    with suppress(StoreError, ValueError):  # a full disk, a folder of somebody else, an infinite number
        content = sealed({"asked": asked, "answer": to_data(found)})
        if to_json(to_data(_answer(kind, asked, content))) == to_json(to_data(found)):
            _forget(path.parents[1], path.parent)
            write_atomically(path, content)


def _answer(kind: type[T], asked: dict[str, Any], content: bytes) -> T:
    """The answer in an entry.

    Raises:
        Damaged: it is not what was written, or answers another question.
    """
    data = unsealed(content)
    if canonical(data["asked"]) != canonical(asked):
        raise Damaged("answers another question")
    found: T = TypeAdapter(kind).validate_json(json.dumps(data["answer"]), strict=True)
    return found


def _behind() -> dict[str, Any] | None:
    """What an answer depends on besides its question; None if the files are newer than the code in this process."""
    root = Path(environment.__file__).parents[2]
    newest = max(path.stat().st_mtime for room in environment.SOURCES for path in (root / room).rglob("*.py"))
    if newest > _LOADED - _MARGIN:
        return None
    torch_of = f"{torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} threads"
    return {**environment.numerics(), "torch": torch_of}


def _forget(root: Path, kept: Path) -> None:
    """Remove the entries of old codes before the first one of a new code is written."""
    if kept.exists():
        return
    with suppress(OSError):
        codes = sorted((one for one in root.iterdir() if one.is_dir()), key=lambda one: one.stat().st_mtime)
        for old in codes[: 1 - _CODES]:
            shutil.rmtree(old, ignore_errors=True)
