"""How a process computes: on one thread, with memory that it keeps.

More threads make small computations slower, and round other sums.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager, suppress

_LARGEST = 2**30
"""Bytes of an array above which the system is asked for new memory each time."""


@contextmanager
def one_thread() -> Iterator[None]:
    """One thread for torch and for the linear algebra of numpy and scipy; also a decorator.

    The process also keeps its memory, from then on (`keep_memory`).
    """
    import torch
    from threadpoolctl import threadpool_limits

    keep_memory()
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with threadpool_limits(1):
            yield
    finally:
        torch.set_num_threads(before)


def keep_memory() -> None:
    """Let this process use freed memory again instead of giving it back to the system; only glibc can.

    The system clears each page that it hands out. With 11 million parameters, whose arrays exceed the 32 MB that glibc
    reuses by itself, that takes as long as a gradient: an evaluation of gradient matching for two images took 0.53 s,
    and takes 0.27 s. The peak of memory may rise by a fifth.
    """
    with suppress(OSError, AttributeError):
        for parameter in (-1, -3):  # M_TRIM_THRESHOLD, M_MMAP_THRESHOLD
            ctypes.CDLL(None).mallopt(parameter, _LARGEST)
