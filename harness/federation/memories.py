"""The memories of clients that have taken part, such as residuals; above a size limit they are stored on disk."""

from __future__ import annotations

import tempfile
import weakref
from collections.abc import Callable
from io import BufferedRandom
from typing import Any, NamedTuple

import torch
from torch import Tensor

RESIDENT = 2**27
"""Maximum bytes of tensors in main memory; further clients' tensors are stored in a temporary file.

The residual of `top-k` is dense, so the memories of all clients take clients * d floats in main memory or on disk. A
round reads and writes only the memories of its participants: 0.1 ms for 203,530 weights. Compression would reduce the
memories of MNIST to 0.6 of their size but take 13 ms; rounding would change the numbers.
"""


class _Slot(NamedTuple):
    start: int
    dtype: torch.dtype
    shape: torch.Size


class Memories:
    """The memory of each client of a defense.

    Guarantees:
        A client's memory is the last one kept, bit for bit; before that, `first()`.
        At most `resident` bytes of plain tensors are held in main memory. Memories of other types always stay there.
    """

    def __init__(self, first: Callable[[], Any], resident: int | None = None) -> None:
        """`first` makes the memory of a client before its first message; resident: None for `RESIDENT`."""
        self._first, self._left = first, RESIDENT if resident is None else resident
        self._here: dict[int, Any] = {}
        self._slots: dict[int, _Slot] = {}
        self._file: BufferedRandom | None = None

    def of(self, client: int) -> Any:
        """The memory of a client."""
        if client in self._slots:
            return self._read(self._slots[client])
        return self._here[client] if client in self._here else self._first()

    def keep(self, client: int, memory: Any) -> None:
        """Keep the memory of a client in place of its last one.

        Raises:
            OSError: the file cannot be written.
        """
        self._left += _size(self._here.pop(client, None))
        size = _size(memory)
        if size <= self._left or not size:
            self._left -= size
            self._slots.pop(client, None)
            # a view would keep its whole base tensor alive
            part = size and memory.untyped_storage().nbytes() > size
            self._here[client] = memory.clone() if part else memory
        else:
            self._write(client, memory.contiguous())

    def _write(self, client: int, memory: Tensor) -> None:
        """Write a tensor to the client's old place in the file if it fits, else at the end."""
        if self._file is None:
            self._file = tempfile.TemporaryFile()  # noqa: SIM115 - it lives as long as this object
            weakref.finalize(self, self._file.close)
        old, size = self._slots.get(client), _size(memory)
        fits = old is not None and old.dtype.itemsize * old.shape.numel() >= size
        start = old.start if old is not None and fits else self._file.seek(0, 2)
        self._file.seek(start)
        self._file.write(_bytes(memory))
        self._slots[client] = _Slot(start, memory.dtype, memory.shape)

    def _read(self, slot: _Slot) -> Tensor:
        assert self._file is not None  # there are no slots without a file
        memory = torch.empty(slot.shape, dtype=slot.dtype)
        self._file.seek(slot.start)
        self._file.readinto(_bytes(memory))
        return memory


def _bytes(memory: Tensor) -> memoryview:
    return memory.view(-1).view(torch.uint8).numpy().data


def _size(memory: Any) -> int:
    """Bytes of a plain tensor on the CPU; 0 for anything else, which is not written to a file."""
    plain = type(memory) is Tensor and memory.device.type == "cpu" and memory.layout == torch.strided
    return memory.nbytes if plain and not memory.requires_grad else 0
