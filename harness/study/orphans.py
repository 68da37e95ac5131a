"""No process outlives the run that started it: the kernel ends it, even in the middle of a long call."""

from __future__ import annotations

import fcntl
import os
import signal

STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""The signals that stop a study."""

PARENT = "LEAKGAUGE_PARENT"
"""The environment variable that tells the fork server which process started it."""


def ignore_stops() -> None:
    """Leave a stop, which may reach all processes of a terminal, to the main process, which ends the others."""
    for number in STOPS:
        signal.signal(number, signal.SIG_IGN)


def end_with(pipe: int) -> None:
    """Have the kernel end this process when nobody can write to a pipe any more, because its only writer died."""
    signal.signal(signal.SIGIO, signal.SIG_DFL)
    fcntl.fcntl(pipe, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(pipe, fcntl.F_SETFL, fcntl.fcntl(pipe, fcntl.F_GETFL) | os.O_ASYNC)
