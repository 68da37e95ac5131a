"""The fast Walsh-Hadamard transform."""

from __future__ import annotations

import functools
import math

import numpy as np
import torch
from scipy.linalg import hadamard
from torch import Tensor

_LARGE = 1 << 23  # bytes of the longest axis that is transformed in one piece
_CHUNK = 1 << 17  # number of entries of a longer axis that are transformed at a time
_BITS = 4  # a factor has at most 2**4 rows, the fastest size in both precisions for n = 2**13 to 2**20 (measured)


def fast_walsh_hadamard(x: Tensor) -> Tensor:
    """H x along the last axis, with Sylvester's Hadamard matrix H: natural order, entries 1 and -1, not normalized.

    Args:
        x: [..., n] float32 or float64, n a power of two. Not modified.

    Returns:
        [..., n] in the dtype of x, on its device, in new memory; differentiable.

    Guarantees:
        H H = n I, so that `fast_walsh_hadamard(y) / n` is the inverse.
        Exact where all partial sums are exact. Elsewhere the rounding depends on the machine's matrix product.

    Raises:
        ValueError: n is not a power of two, or x is not of single or double precision.
    """
    n = x.shape[-1] if x.ndim else 0
    if n < 1 or n & (n - 1):
        raise ValueError(f"expected a last axis whose length is a power of two, got shape {tuple(x.shape)}")
    if x.dtype not in (torch.float32, torch.float64):
        raise ValueError(f"expected float32 or float64, got {x.dtype}")
    if n == 1:
        return x.clone()
    # log2(n) as a sum of as few numbers up to 4 as possible, as equal as possible
    bits = n.bit_length() - 1
    turns = -(-bits // _BITS)
    factors = [bits * (turn + 1) // turns - bits * turn // turns for turn in range(turns)]
    if n * x.element_size() <= _LARGE or x.requires_grad or x.device.type != "cpu":
        return _applied(x, factors)
    # two passes over memory: the first factors on rows, the others on columns, in chunks that fit the cache
    low = factors[: len(factors) // 2]
    width = 1 << sum(low)
    # numpy asks for large pages of memory
    y = torch.from_numpy(np.empty(x.shape, x.numpy().dtype))
    for before, after in zip(x.reshape(-1, n // width, width), y.view(-1, n // width, width), strict=True):
        several = max(1, _CHUNK // width)
        for start in range(0, n // width, several):
            chunk = slice(start, start + several)
            after[chunk] = _applied(before[chunk], low)
        several = max(1, _CHUNK * width // n)
        for start in range(0, width, several):
            columns = after[:, start : start + several].T
            columns.copy_(_applied(columns.contiguous(), factors[len(low) :]))
    return y


def _applied(x: Tensor, factors: list[int]) -> Tensor:
    n, rows, y = x.shape[-1], math.prod(x.shape[:-1]), x
    # H is a Kronecker product. Each turn applies one factor to the last axis and moves this axis to the front, so in
    # the end all axes are back in place, except the rows, which come last
    for bits in factors:
        y = _sylvester(bits, x.dtype, x.device) @ y.reshape(rows * n >> bits, 1 << bits).T
    return y.reshape(n, rows).T.reshape(x.shape)


@functools.cache
def _sylvester(bits: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.from_numpy(hadamard(1 << bits, np.float64)).to(device, dtype)
