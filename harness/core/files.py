"""Reads stored files and those of strangers: regular files only, up to a size, as a list has them; text in UTF-8."""

from __future__ import annotations

import hashlib
import stat
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from leakgauge.harness.core.stored import StoredVersionError

T = TypeVar("T")

MISSING = "is missing"

MOST = 2**31
"""Maximum bytes of a file."""

_MOST_TEXT = 2**25


class Damaged(ValueError):
    """A stored file is not what was written; the text states the reason and follows the file's name."""


def regular(path: Path, most: int = MOST, *, links: bool = True) -> int:
    """The bytes of a regular file of at most `most` bytes, without opening it: a pipe would wait for its writer.

    Raises:
        OSError: there is no such file, or links go round in circles.
        ValueError: it is a folder, a pipe, a socket, a device or, without `links`, a link; or it is larger.
    """
    status = path.stat() if links else path.lstat()
    if not stat.S_ISREG(status.st_mode):
        raise ValueError("expected a regular file, got a folder, a pipe, a device or a link; copy it to a file")
    if status.st_size > most:
        raise ValueError(f"expected a file of at most {most:,} bytes, got {status.st_size:,}; give a smaller one")
    return status.st_size


def content(
    path: Path, most: int = MOST, *, links: bool = True, size: int | None = None, sha256: str | None = None
) -> bytes:
    """The bytes of a file; errors as in `regular`.

    Args:
        size, sha256: what a list says of the file, if it does; raises Damaged if the file differs.
    """
    found = regular(path, most, links=links)
    if size not in (None, found):  # before anything is read
        raise Damaged(f"has {found:,} bytes, not {size:,} as in the list")
    with path.open("rb") as file:
        data = file.read(found)  # no more, although it may grow
    if sha256 is not None and hashlib.sha256(data).hexdigest() != sha256:
        raise Damaged("has changed: its SHA-256 differs from the list")
    return data


def attempt(path: Path, read: Callable[[Path], T], faults: dict[str, str], name: str = "") -> T | None:
    """The result of `read` on a file, or None with the reason in `faults`, by `name` or the file's name."""
    try:
        return read(path)
    except FileNotFoundError:
        faults[name or path.name] = MISSING
    except (Damaged, StoredVersionError) as error:
        faults[name or path.name] = str(error)
    except Exception as error:  # a damaged file may raise anything in its decoder: zlib.error, RecursionError, ...
        faults[name or path.name] = f"is damaged: {reason(error)}"
    return None


def reason(error: BaseException) -> str:
    """An error in one line. A plain ValueError has a message of this package; others are understood by their type."""
    return " ".join((str(error) if type(error) is ValueError else f"{type(error).__name__}: {error}").split())[:300]


def text(source: Path | bytes) -> str:
    """The text of a file in UTF-8, without its byte order mark; ValueError for other encodings, and as in `regular`."""
    data = source if isinstance(source, bytes) else content(source, _MOST_TEXT)
    if data.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise ValueError("expected UTF-8, got UTF-16; save the file as UTF-8")
    return data.decode("utf-8-sig")
