"""Computing on an accelerator, as exactly as its float32 allows."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

_T = TypeVar("_T")


def moved(tensor: Tensor, device: torch.device | str) -> Tensor:
    """The tensor on a device that computes in full float32, and by the same steps in every run.

    On a CUDA device, this switches off TF32, whose 10 bits stop a search long before it finds an image, and cuDNN's
    choice between algorithms; both settings hold for the whole process.
    """
    if torch.device(device).type == "cuda":
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
        torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic = False, True
    return tensor.to(device)


def available(device: str) -> bool:
    """Whether a study or an audit can compute on the device called so."""
    return device == "cpu" or (device.split(":")[0] == "cuda" and torch.cuda.is_available())


def capacity(device: torch.device) -> int:
    """How many float32 numbers fit in half of the free memory of an accelerator; 2^28 if that is unknown."""
    return torch.cuda.mem_get_info(device)[0] // 8 if device.type == "cuda" else 2**28


class Placed:
    """A function of one tensor that computes where this tensor is, although its own tensors are on the CPU.

    The tensors that it holds are copied once. A function that needs the CPU, for example because it uses numpy, keeps
    computing there, and its argument is copied at each call.
    """

    def __init__(self, function: Callable[[Tensor], Tensor], device: torch.device) -> None:
        self._here = function
        self._there: Callable[[Tensor], Tensor] | None = function  # None: it stays on the CPU
        if device.type != "cpu":
            self._there = _copied(function, device)

    def __call__(self, x: Tensor) -> Tensor:
        """The function's value, on the device of x."""
        if self._there is not None:
            try:
                return self._there(x)
            except (RuntimeError, TypeError):
                if x.device.type == "cpu":
                    raise
                self._there = None
        return self._here(x.cpu()).to(x.device)


def _copied(function: _T, device: torch.device) -> _T | None:
    """A copy of a function, closures included, whose tensors are on the device; None: it cannot be copied."""
    import cloudpickle  # only for accelerators

    tensors: list[Tensor] = []

    class Pickler(cloudpickle.Pickler):  # type: ignore[misc]
        def persistent_id(self, held: Any) -> int | None:
            if not isinstance(held, Tensor):
                return None
            tensors.append(held)
            return len(tensors) - 1

    class Unpickler(pickle.Unpickler):
        def persistent_load(self, number: int) -> Tensor:
            return tensors[number].to(device)

    stream = io.BytesIO()
    try:
        Pickler(stream).dump(function)
    except (pickle.PicklingError, TypeError):
        return None
    stream.seek(0)
    copy: _T = Unpickler(stream).load()
    return copy
