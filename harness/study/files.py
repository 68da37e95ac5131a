"""Stored files: read in one place, whatever is wrong with them, and JSON that holds its own digest."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")

MISSING = "is missing"


class Damaged(ValueError):
    """A stored file is not what was written; its text says why, after the name of the file."""


def load(path: Path, parse: Callable[[bytes], T], faults: dict[str, str]) -> T | None:
    """What `parse` makes of a stored file, or None with the reason in `faults`; nothing else reads stored files."""
    try:
        return parse(path.read_bytes())
    except FileNotFoundError:
        faults[path.name] = MISSING
    except Damaged as error:
        faults[path.name] = str(error)
    except Exception as error:  # a damaged file raises whatever its decoder meets: zlib.error, RecursionError, ...
        faults[path.name] = f"is damaged: {' '.join(f'{type(error).__name__}: {error}'.split())[:200]}"
    return None


def to_json(data: Any) -> bytes:
    """Indented JSON with sorted keys: one text for one value. NaN is refused."""
    return (json.dumps(data, sort_keys=True, indent=1, ensure_ascii=False, allow_nan=False) + "\n").encode()


def sealed(data: dict[str, Any]) -> bytes:
    """JSON that holds its own digest."""
    return to_json({**data, "digest": hashlib.sha256(to_json(data)).hexdigest()})


def unsealed(content: bytes, before: Collection[str] = ()) -> dict[str, Any]:
    """The data of `sealed`. Without a digest and with no other keys than `before`, they are from before there were any.

    Raises:
        Damaged: this is not what was written.
    """
    data: dict[str, Any] = json.loads(content)
    if not data.keys() <= set(before):
        data.pop("digest", None)
        if content != sealed(data):
            raise Damaged("is not what was written")
    return data
