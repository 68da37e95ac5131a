"""A cache of command answers, read without the imports that computing an answer takes. Imports no torch."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

from leakgauge.harness.study.environment import cache_folder, numerics
from leakgauge.harness.study.store import load, sealed, unsealed

T = TypeVar("T")

_MOST = 200
"""Number of kept answers; the oldest are deleted."""


def known(question: list[Any], answer: Callable[[], T]) -> T:
    """The answer to a command, from the cache if code, libraries, machine and question are the same.

    Args:
        question: plain data.
        answer: returns plain data that depend only on the question and the shipped code.
    """
    from leakgauge.harness.core.stored import fingerprint

    root = cache_folder()
    if root is None:
        return answer()
    asked = json.dumps([question, numerics()], sort_keys=True)
    folder = root / "answers"
    path = folder / f"{fingerprint(asked, 32)}.json"
    stored = load(path, unsealed, {})
    if stored is not None and stored.get("asked") == asked:
        cached: T = json.loads(stored["answer"])
        return cached
    given = answer()
    text = json.dumps(given)  # as text, because a sealed file sorts keys and the order of parameters matters
    if json.loads(text) == given:
        from leakgauge.harness.study.store import StoreError, write_atomically

        with suppress(StoreError, OSError):  # if the disk is full, the answer is computed again next time
            write_atomically(path, sealed({"asked": asked, "answer": text}))
            for old in sorted(folder.glob("*.json"), key=lambda file: file.stat().st_mtime)[:-_MOST]:
                old.unlink(missing_ok=True)
    return given
