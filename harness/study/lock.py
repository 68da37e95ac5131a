"""One writer of a folder of results at a time."""

from __future__ import annotations

import fcntl
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO

from leakgauge.harness.study.store import TEMPORARY, StoreError

LOCK = "lock"
_BEAT, _STALE = 10.0, 120.0
"""Seconds between two touches of a lock, and seconds after which an untouched lock of another host is free."""


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Write to a folder of results as its only writer. Removes the temporary files of killed writers.

    The kernel frees the lock of a process that dies. Some file systems lock for one host only, or not at all. There,
    the lock holds as long as the process that the lock file names touches the file.

    Raises:
        StoreError: another process writes to this folder, or the folder cannot be written.
    """
    path, ended = folder / LOCK, threading.Event()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = _locked(path)
        for depth in ("", "*/", "*/*/"):
            for left in folder.glob(f"{depth}.*.????????{TEMPORARY}"):
                left.unlink(missing_ok=True)
    except StoreError:
        raise
    except OSError as error:
        raise StoreError(f"cannot write {path}: {error.strerror or error}") from error
    beat = threading.Thread(target=_touch, args=(path, ended), daemon=True)
    beat.start()
    try:
        yield
    finally:
        ended.set()
        beat.join()
        with suppress(OSError):
            path.unlink()
        file.close()


def _locked(path: Path) -> TextIO:
    """The lock file, locked; it names this process."""
    host = socket.gethostname()
    while True:
        file = path.open("a+", encoding="utf-8")
        free: str | None = host  # the host whose locks the kernel knows to be free
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            free = None
        except OSError:  # a file system without locks
            free = ""
        file.seek(0)
        owner = file.read()
        fresh = time.time() - os.fstat(file.fileno()).st_mtime < _STALE
        if free is None or (owner and fresh and owner.rpartition(" on ")[2] != free):
            file.close()
            who = owner or "another process"
            raise StoreError(f"{path.parent} is being written by {who}: wait until it ends, or use another folder")
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(file.fileno()), path.stat()):
                file.truncate(0)
                file.write(f"process {os.getpid()} on {host}")
                file.flush()
                return file
        file.close()  # the last owner removed the file meanwhile


def _touch(path: Path, ended: threading.Event) -> None:
    """Touch the lock until its owner ends."""
    while not ended.wait(_BEAT):
        with suppress(OSError):
            os.utime(path)
