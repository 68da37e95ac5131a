"""The Walsh-Hadamard transform."""

from __future__ import annotations

import functools
import math
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Array = TypeVar("Array", Tensor, npt.NDArray[np.float32], npt.NDArray[np.float64])

_BITS = 4
"""A factor has at most 2**4 rows: measured fastest in single and double precision from n = 2**13 to 2**20."""


def fast_walsh_hadamard(x: Array) -> Array:
    """H x along the last axis, where H is Sylvester's Hadamard matrix: natural order, entries 1 and -1, not normalized.

    Args:
        x: [..., n] float32 or float64, n a power of two. Not modified.

    Returns:
        [..., n] in the dtype of x, on its device, in new memory; differentiable if x is a tensor.

    Guarantees:
        H H = n I, so that `fast_walsh_hadamard(y) / n` undoes it.
        Exact as long as all partial sums are; how others are rounded depends on the machine's matrix product.

    Raises:
        ValueError: n is not a power of two, or x is not of single or double precision.
    """
    n = x.shape[-1] if x.ndim else 0
    if n < 1 or n & (n - 1):
        raise ValueError(f"expected a last axis whose length is a power of two, got shape {tuple(x.shape)}")
    if x.dtype not in (torch.float32, torch.float64, np.float32, np.float64):
        raise ValueError(f"expected float32 or float64, got {x.dtype}")
    rows = math.prod(x.shape[:-1])
    y = x
    # H is a Kronecker product. Each turn applies one factor to the last axis and brings that axis to the front, so that
    # after all of them every axis of x is in its place again, but for the rows, which come last
    for bits in _factors(n):
        y = _matrix(bits, x) @ y.reshape(rows * n >> bits, 1 << bits).T
    return y.reshape(n, rows).T.reshape(x.shape)


def _factors(n: int) -> list[int]:
    """log2(n) as a sum of as few and as equal numbers up to 4 as can be; at least one."""
    bits = n.bit_length() - 1
    turns = max(1, -(-bits // _BITS))
    return [bits * (turn + 1) // turns - bits * turn // turns for turn in range(turns)]


def _matrix(bits: int, like: Array) -> Array:
    """Sylvester's matrix with 2**bits rows, as an array like `like`."""
    if isinstance(like, Tensor):
        return _tensor(bits, like.dtype, like.device)
    return _sylvester(bits).astype(like.dtype)


@functools.cache
def _sylvester(bits: int) -> npt.NDArray[np.float64]:
    """Sylvester's matrix with 2**bits rows."""
    matrix = np.ones((1, 1))
    for _ in range(bits):
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return matrix


@functools.cache
def _tensor(bits: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Sylvester's matrix as a tensor."""
    return torch.from_numpy(_sylvester(bits)).to(device, dtype)
