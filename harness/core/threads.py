"""Settings of a process: computing on one thread, and keeping freed memory.

More threads slow small computations down, and change how sums are rounded.
"""

from __future__ import annotations

import ctypes
import functools
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from threadpoolctl import ThreadpoolController

_LARGEST = 2**30  # array size in bytes above which memory always comes fresh from the system


@contextmanager
def one_thread() -> Iterator[None]:
    """Use one thread for torch and for the linear algebra of numpy and scipy; also a decorator.

    From then on, the process also keeps its freed memory (`keep_memory`).
    """
    import torch

    keep_memory()
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with linear_algebra().limit(limits=1):
            yield
    finally:
        torch.set_num_threads(before)


def linear_algebra() -> ThreadpoolController:
    """The threaded libraries of this process, as the BLAS; searched for again once more modules are imported."""
    return _libraries(len(sys.modules))


@functools.lru_cache(maxsize=1)
def _libraries(modules: int) -> ThreadpoolController:
    from threadpoolctl import ThreadpoolController

    return ThreadpoolController()


def keep_memory() -> None:
    """Let this process reuse freed memory instead of returning it to the system; works only with glibc.

    The system clears each page that it hands out. With 11 million parameters, whose arrays exceed the 32 MB that glibc
    reuses by itself, clearing takes as long as a gradient: reuse shortens an evaluation of gradient matching for two
    images from 0.53 s to 0.27 s. Peak memory may rise by a fifth.
    """
    with suppress(OSError, AttributeError):
        for parameter in (-1, -3):  # M_TRIM_THRESHOLD, M_MMAP_THRESHOLD
            ctypes.CDLL(None).mallopt(parameter, _LARGEST)
