"""Reads files of strangers: regular files only, up to a size, and text in UTF-8."""

from __future__ import annotations

import stat
from pathlib import Path

MOST = 2**31
"""Maximum bytes of a file."""

_MOST_TEXT = 2**25


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


def content(path: Path, most: int = MOST) -> bytes:
    """The bytes of a file; errors as in `regular`."""
    size = regular(path, most)
    with path.open("rb") as file:
        return file.read(size)  # no more, although it may grow


def text(source: Path | bytes) -> str:
    """The text of a file in UTF-8, without its byte order mark; ValueError for other encodings, and as in `regular`."""
    data = source if isinstance(source, bytes) else content(source, _MOST_TEXT)
    if data.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise ValueError("expected UTF-8, got UTF-16; save the file as UTF-8")
    return data.decode("utf-8-sig")
