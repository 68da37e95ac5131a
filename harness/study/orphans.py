"""Stops by signals, and ends of child processes: the kernel ends a child with its run, even in a long call."""

from __future__ import annotations

import fcntl
import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""The signals that stop a study."""

PARENT = "LEAKGAUGE_PARENT"
"""The environment variable that tells the fork server which process started it."""


def ignore_stops() -> None:
    """Ignore stops, which may reach all processes of a terminal; the main process handles them and ends the others."""
    for number in STOPS:
        signal.signal(number, signal.SIG_IGN)


def end_with(pipe: int) -> None:
    """Have the kernel end this process when the only writer of a pipe dies."""
    signal.signal(signal.SIGIO, signal.SIG_DFL)
    fcntl.fcntl(pipe, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(pipe, fcntl.F_SETFL, fcntl.fcntl(pipe, fcntl.F_GETFL) | os.O_ASYNC)


def interrupt(number: int, frame: object) -> None:
    """Handle any stop like Ctrl-C."""
    raise KeyboardInterrupt


@contextmanager
def handling(stop: Callable[[int, Any], object]) -> Iterator[None]:
    """Call `stop` on Ctrl-C, SIGTERM and SIGHUP; not on SIGHUP if it is ignored, as by nohup."""
    before = {number: signal.getsignal(number) for number in STOPS}
    if before[signal.SIGHUP] == signal.SIG_IGN:
        del before[signal.SIGHUP]
    if threading.current_thread() is not threading.main_thread():
        before = {}  # only the main thread may have a signal handler
    for number in before:
        signal.signal(number, stop)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def inherited(variables: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables, which child processes inherit, and then restore them."""
    before = {name: os.environ[name] for name in variables if name in os.environ}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name in variables:
            os.environ.pop(name, None)
        os.environ.update(before)


@contextmanager
def deferred_stop() -> Iterator[Callable[[], bool]]:
    """A stop sets a flag, because an exception could come at any point, for example during a write."""
    flag = threading.Event()
    with handling(lambda number, frame: flag.set()):
        yield flag.is_set
