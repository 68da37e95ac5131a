"""Dithered rounding to lattices of one and two dimensions, as in the reference code of JoPEQ."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from leakgauge.harness.core import rng
from leakgauge.harness.core.checks import positive
from leakgauge.harness.core.rng import Key

_SQRT3 = math.sqrt(3.0)


@dataclass(frozen=True)
class Lattice:
    """Rounding in lattice coordinates: q = clip(round(G^-1 x / step + dither)), sent as integers.

    Args:
        step: Delta, the length of a cell along a generator.
        bits: R, 1 to 32. The levels are -2^(R-1)..2^(R-1): one more level than R bits can number.
        dimension: L. 1: the integers, G = 1. 2: the hexagonal lattice, G = [[1, 0], [1/sqrt 3, 2/sqrt 3]].

    Guarantees:
        restore(quantize(x, dither), dither) - x is uniform on the cell step * G [-1/2, 1/2)^L and independent of x
        where no coordinate is clipped (with a dither from `draw_dither`; up to float32 rounding, 2^-21 of the edge).
        Beyond the outermost cell, each coordinate is clipped separately.

    Raises:
        ValueError: a parameter is out of range.

    Source: the reference code of Lang et al. 2022. Differs from the text: the cell is the parallelogram, not the
        hexagon; coordinates are clipped, not norms.
    """

    step: float
    bits: int
    dimension: int = 1

    def __post_init__(self) -> None:
        positive(step=self.step)
        if not 1 <= self.bits <= 32:
            raise ValueError(f"expected 1 to 32 bits, got bits={self.bits}")
        if self.dimension not in (1, 2):
            raise ValueError(f"expected a lattice of dimension 1 or 2, got dimension={self.dimension}")

    @property
    def top(self) -> int:
        """The outermost level, 2^(R-1)."""
        return 1 << (self.bits - 1)

    @property
    def levels(self) -> int:
        """Number of levels of one coordinate, 2^R + 1."""
        return 2 * self.top + 1

    @property
    def edge(self) -> float:
        """The outermost point of a coordinate, 2^(R-1) * step."""
        return self.top * self.step

    @property
    def covariance(self) -> Tensor:
        """[L, L] float64: covariance of a uniform draw from the cell, step^2 / 12 * G G^T."""
        generator = self._place(torch.eye(self.dimension, dtype=torch.float64))
        return generator @ generator.T / 12

    def quantize(self, x: Tensor, dither: Tensor) -> Tensor:
        """The level of each lattice coordinate of x, in the smallest signed integer type that holds all levels.

        Args:
            x: [M], or [2, M] where L = 2. Finite. Not modified.
            dither: of the same shape, in cells.
        """
        cells = x.numpy() / self.step
        if self.dimension == 2:
            # G^-1 = [[1, 0], [-1/2, sqrt(3)/2]]
            cells[1] *= _SQRT3
            cells[1] -= cells[0]
            cells[1] *= 0.5
        cells += dither.numpy()
        np.rint(cells, out=cells)
        cells.clip(-self.top, self.top, out=cells)
        with np.errstate(invalid="ignore"):  # NaN comes from an infinite scale, whose message is refused
            return torch.from_numpy(cells.astype(np.min_scalar_type(-self.top - 1)))

    def restore(self, levels: Tensor, dither: Tensor) -> Tensor:
        """The points of the levels, with the dither subtracted, in the dtype of the dither."""
        return self._place(levels - dither)

    def point(self, levels: Tensor) -> Tensor:
        """The lattice points of the levels, float32."""
        return self._place(levels.float())

    def _place(self, cells: Tensor) -> Tensor:
        """step * G cells, in place."""
        cells.mul_(self.step)
        if self.dimension == 2:
            cells[1].mul_(2.0).add_(cells[0]).div_(_SQRT3)
        return cells


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


def student_variance(scale: float, degrees: float) -> float:
    """Variance of a coordinate of multivariate t noise with scale matrix `scale` * I: scale * nu / (nu - 2).

    Raises:
        ValueError: `degrees` is 2 or less, where no variance exists.
    """
    if not degrees > 2:
        raise ValueError(f"expected more than 2 degrees of freedom, got degrees={degrees}")
    return scale * degrees / (degrees - 2)
