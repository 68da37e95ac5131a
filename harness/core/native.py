"""The compiled functions of `native.c`; without a compiler at the installation, torch's operations do their work."""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

VERSION = 4
"""What `leakgauge_version` returns: a library that was compiled from an older file is not used."""

_BYTES = 32  # size of a vector; `BYTES` of `native.c`
_INTEGER, _POINTER = ctypes.c_int64, ctypes.c_void_p

_ARGUMENTS: dict[str, list[Any]] = {
    "spread": [_POINTER, _INTEGER, _POINTER, _POINTER],
    "correlate": [_POINTER, _INTEGER, *[_POINTER, _POINTER, _INTEGER] * 2, _POINTER, _INTEGER, _POINTER],
    "weights": [_POINTER, _INTEGER, _POINTER, _POINTER, _POINTER, _INTEGER],
    "subtract": [_INTEGER, _INTEGER, *[_POINTER] * 3, *[_INTEGER] * 3, _POINTER, _POINTER],
    "directions": [_INTEGER, _INTEGER, _INTEGER, ctypes.c_double, *[_POINTER] * 10],
}


class Library:
    """The functions for one type, as `native.c` describes them; pointers are those of `Tensor.data_ptr`, None: NULL."""

    def __init__(self, path: Path, real: str) -> None:
        """Load the functions for the type `real` of C from a file.

        Raises:
            OSError: the file cannot be loaded, or was compiled from an older one.
        """
        loaded = ctypes.CDLL(str(path))
        if not hasattr(loaded, "leakgauge_version") or loaded.leakgauge_version() != VERSION:
            raise OSError(f"{path} is of another version")
        functions = {name: loaded[f"leakgauge_{name}_{real}"] for name in _ARGUMENTS}
        for name, function in functions.items():
            function.argtypes, function.restype = _ARGUMENTS[name], None
        self.spread, self.correlate = functions["spread"], functions["correlate"]
        self.weights, self.directions = functions["weights"], functions["directions"]
        self.subtract = functions["subtract"]
        self.content = path.read_bytes()
        self.lanes = _BYTES // (4 if real == "float" else 8)
        """Numbers that are computed at once."""


@functools.cache
def library(real: str = "float") -> Library | None:
    """The compiled functions for `float` or `double`, if this installation has them."""
    for path in sorted(Path(__file__).parent.glob("_native*"), reverse=True):  # first `_native.so`
        try:
            return Library(path, real)
        except OSError:
            continue
    return None


def library_for(tensor: Tensor) -> Library | None:
    """The compiled functions, if they can compute with tensors like this one."""
    reals = {"torch.float32": "float", "torch.float64": "double"}
    real = reals.get(str(tensor.dtype)) if tensor.device.type == "cpu" else None
    return None if real is None else library(real)
