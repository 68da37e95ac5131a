"""Reads files that others wrote: regular files only, up to a size, and text in UTF-8."""

from __future__ import annotations

import codecs
import os
import stat
from pathlib import Path

MOST = 2**31
"""Maximum bytes of a file; the environment variable LEAKGAUGE_MAX_UNPACKED overrides this limit."""

MOST_TEXT = 2**25
"""Maximum bytes of a text: a parsed one takes about ten times as much."""


def regular(path: Path, most: int | None = None, *, links: bool = True) -> int:
    """The bytes of a regular file, by its directory entry: a pipe is not opened, so nothing waits for its writer.

    Args:
        most: the maximum; None: `MOST`.
        links: whether `path` may be a link to a file.

    Raises:
        OSError: there is no such file, or links go round in circles.
        ValueError: it is a folder, a pipe, a socket or a device, or it is larger.
    """
    found = path.stat() if links else path.lstat()
    if not stat.S_ISREG(found.st_mode):
        raise ValueError("expected a regular file, got a folder, a pipe, a socket, a link or a device; copy it to a file")
    limit = int(os.environ.get("LEAKGAUGE_MAX_UNPACKED") or MOST) if most is None else most
    if found.st_size > limit:
        text = f"expected at most {limit:,} bytes, got {found.st_size:,}"
        raise ValueError(text + ("" if most else "; the environment variable LEAKGAUGE_MAX_UNPACKED raises this limit"))
    return found.st_size


def content(path: Path, most: int | None = None) -> bytes:
    """The bytes of a regular file; errors as in `regular`."""
    size = regular(path, most)
    with path.open("rb") as file:
        # a file of /proc states 0 bytes, and another process may be writing to this one
        return file.read(max(size, 2**20))


def text(path: Path) -> str:
    """The text of a file in UTF-8, without its byte order mark, with line ends as they are.

    Raises:
        OSError, ValueError: as in `regular`, or the file is in another encoding.
    """
    return decoded(content(path, MOST_TEXT))


def decoded(data: bytes) -> str:
    """Bytes as `text` reads them."""
    if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise ValueError("expected UTF-8, got UTF-16; save the file as UTF-8")
    return data.decode("utf-8-sig")
