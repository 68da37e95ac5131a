"""A second implementation of `scale.Scaling`, in numpy, for distributions that must not share code with the defense."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from leakgauge.harness.core.distribution import Integers, numbers, projected
from leakgauge.harness.core.stats import Numbers
from leakgauge.harness.core.vec import Layout, Vector


class Scaled(NamedTuple):
    """An update as unit-free numbers.

    Attributes:
        header: the numbers that are sent before the message's numbers: means, whose sums have no error and one rounding
            to float32, and lengths without their rounding, which another order of the sum changes at a tie.
        numbers: [k] in sending order; the two of a pair are neighbors.
        places: [k] the coordinate of each number; -1 for padding.
    """

    header: Numbers
    numbers: Numbers
    places: Integers


def scaled(
    update: Vector, layout: Layout, mode: str, lanes: int = 1, bound: float = 1.0, norm: str = "entry"
) -> Scaled:
    """The numbers by the table of `Scaling`."""
    values, start = projected(update, bound) if norm == "l2" else numbers(update), 0
    header: list[float] = []
    pieces: list[Numbers] = []
    places: list[Integers] = []
    for size in layout.sizes if mode == "tensor" else (layout.dim,):
        columns = -(-size // lanes)
        rows, index = np.zeros((lanes, columns)), np.full((lanes, columns), -1)
        rows.flat[:size], index.flat[:size] = values[start : start + size], np.arange(start, start + size)
        means = rows.mean(1).astype(np.float32).astype(np.float64) if mode == "tensor" else np.zeros(lanes)
        rows -= means[:, None]
        length = 3 * float(np.linalg.norm(rows)) / np.sqrt(columns)
        scale = bound if mode == "public" else float(np.float32(length))
        header += [*means, length] if mode == "tensor" else [length]
        pieces.append((rows / scale if scale > 0 else np.zeros_like(rows)).T.ravel())
        places.append(index.T.ravel())
        start += size
    flat = np.concatenate(pieces)
    if mode == "public":
        header, flat = [], _inside(flat, lanes)
    return Scaled(np.array(header), flat, np.concatenate(places))


def _inside(flat: Numbers, lanes: int) -> Numbers:
    if lanes == 1:
        return np.clip(flat, -1.0, 1.0)
    pairs = flat.reshape(-1, lanes)
    lengths = np.hypot(pairs[:, 0], pairs[:, 1])
    return np.asarray(pairs / np.maximum(lengths, 1.0)[:, None], np.float64).ravel()
