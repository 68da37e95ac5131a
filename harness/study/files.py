"""Stored files: one place that reads them and reports damage, and JSON that holds its own digest."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from leakgauge.harness.core.files import content
from leakgauge.harness.core.stored import StoredVersionError

T = TypeVar("T")

MISSING = "is missing"


class Damaged(ValueError):
    """A stored file is not what was written; the text states the reason and follows the file's name."""


def load(path: Path, parse: Callable[[bytes], T], faults: dict[str, str]) -> T | None:
    """The result of `parse` on a stored file, or None with the reason in `faults`; only this reads stored files."""
    try:
        return parse(content(path, 2**28 if path.suffix == ".json" else 2**40))
    except FileNotFoundError:
        faults[path.name] = MISSING
    except (Damaged, StoredVersionError) as error:
        faults[path.name] = str(error)
    except Exception as error:  # a damaged file may raise anything in its decoder: zlib.error, RecursionError, ...
        faults[path.name] = f"is damaged: {' '.join(f'{type(error).__name__}: {error}'.split())[:200]}"
    return None


def to_json(data: Any) -> bytes:
    """Indented JSON with sorted keys: equal values give equal text. NaN is refused."""
    return (json.dumps(data, sort_keys=True, indent=1, ensure_ascii=False, allow_nan=False) + "\n").encode()


def sealed(data: dict[str, Any]) -> bytes:
    """JSON that holds its own digest."""
    return to_json({**data, "digest": hashlib.sha256(to_json(data)).hexdigest()})


def unsealed(content: bytes) -> dict[str, Any]:
    """The data of `sealed`.

    Raises:
        Damaged: the content is not what was written, or an older version wrote it, without a digest.
    """
    data: dict[str, Any] = json.loads(content)
    if "digest" not in data:
        raise Damaged("holds no digest: it was changed, or made by a version of leakgauge that is too old to be read")
    del data["digest"]
    if content != sealed(data):
        raise Damaged("is not what was written")
    return data
