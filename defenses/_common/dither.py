"""Subtractive dither that client and server share."""

from __future__ import annotations

from torch import Tensor

from leakgauge.harness.core import rng
from leakgauge.harness.core.rng import Key


def draw_dither(key: Key, shape: tuple[int, ...]) -> Tensor:
    """Float32 dither in cells: uniform on [-1/2, 1/2), a multiple of 2^-24, independent in every entry.

    Args:
        shape: (M,) for a scalar quantizer; (L, M) for a lattice, where entry l is the coordinate along the l-th
            generator. A uniform draw in these coordinates is uniform on the cell step * G [-1/2, 1/2)^L for any step
            and G, so client and server need not scale it.

    Guarantees:
        The same key draws the same bits on both sides.
    """
    return rng.uniform32(key, shape, -0.5, 0.5)
