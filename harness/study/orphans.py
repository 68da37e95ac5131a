"""No process outlives the one that started it: the kernel ends it, even in the middle of a long call."""

from __future__ import annotations

import ctypes
import signal

STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""The signals that stop a study."""

PARENT = "LEAKGAUGE_PARENT"
"""The environment variable that tells the fork server which process started it."""

_PR_SET_PDEATHSIG = 1


def end_with_parent() -> None:
    """Have the kernel kill this process when its parent dies. Ignore what stops the parent, which ends this one."""
    for number in STOPS:
        signal.signal(number, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
