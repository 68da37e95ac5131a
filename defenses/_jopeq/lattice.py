"""Dithered rounding to lattices of one and two dimensions, as in the reference code of JoPEQ."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from leakgauge.defenses._jopeq.privacy import GENERATOR
from leakgauge.harness.core import rng
from leakgauge.harness.core.checks import positive
from leakgauge.harness.core.codec import pack_levels, unpack_levels, width_of
from leakgauge.harness.core.errors import MessageError
from leakgauge.harness.core.rng import Key

_SQRT3 = math.sqrt(3.0)
_PLACE = torch.tensor(GENERATOR, dtype=torch.float32)
_FIND = torch.tensor(np.linalg.inv(GENERATOR), dtype=torch.float32)


@dataclass(frozen=True)
class Lattice:
    """Rounding in lattice coordinates: q = clip(round(G^-1 x / step + dither)), sent as integers.

    Args:
        step: Delta, the length of a cell along a generator.
        bits: R, 1 to 32. The levels are -2^(R-1)..2^(R-1): one more level than R bits can number.
        dimension: L. 1: the integers, G = 1. 2: the hexagonal lattice, G = [[1, 0], [1/sqrt 3, 2/sqrt 3]].

    Guarantees:
        restore(quantize(x, dither), dither) - x is uniform on the cell step * G [-1/2, 1/2)^L and independent of x
        where no coordinate is clipped (with a dither uniform on [-1/2, 1/2)^L; up to float32 rounding, 2^-21 of the
        edge).
        Beyond the outermost cell, each coordinate is clipped separately.
        A message of n numbers has ceil(n * ceil(log2(2^R + 1)) / 8) bytes, with n rounded up to whole cells, in which
        neighbors are pairs: levels of R + 1 bits each. The rate of 2^R + 1 levels is log2(2^R + 1) bits per number,
        not R.

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
        generator = self._points(torch.eye(self.dimension, dtype=torch.float64))
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
        return self._points(levels - dither)

    def point(self, levels: Tensor) -> Tensor:
        """The lattice points of the levels, float32."""
        return self._points(levels.float())

    def pack(self, values: Tensor, shared: Key) -> bytes:
        """The message of values [n]: their levels."""
        short = -len(values) % self.dimension
        rows = self._rows(torch.cat([values, values.new_zeros(short)]) if short else values)
        # uniform along the generators is uniform on the cell, for any step and G
        levels = _flat(self.quantize(rows, rng.uniform32(shared, tuple(rows.shape), -0.5, 0.5))).numpy()
        # -top..top becomes 0..2 top by unsigned wrap-around, because 2 top exceeds the signed type
        unsigned = levels.view(f"u{levels.itemsize}")
        unsigned += self.top
        return pack_levels(unsigned, width_of(self.levels))

    def read(self, payload: bytes, count: int) -> Tensor:
        """The levels -top..top in a message: float32, `count` of them rounded up to whole cells.

        Raises:
            MessageError: wrong length, or a level that does not exist.
        """
        size = self.dimension
        read = unpack_levels(payload, -(-count // size) * size, width_of(self.levels))
        if read.max(initial=0) >= self.levels:
            raise MessageError(f"expected levels in 0..{self.levels - 1}, got {int(read.max())}")
        levels = read.astype(np.float32)
        levels -= self.top
        return torch.from_numpy(levels)

    def place(self, levels: Tensor, count: int, shared: Key | None) -> Tensor:
        """The values [count] of levels; without the shared key, the midpoints of their ranges."""
        rows = self._rows(levels)
        if shared is None:
            return _flat(self.point(rows))[:count]
        return _flat(self.restore(rows, rng.uniform32(shared, tuple(rows.shape), -0.5, 0.5)))[:count]

    def error_variance(self, dithered: bool) -> float:
        """Error variance of a value without overload; an unknown dither adds a second, equally distributed error."""
        once = float(self.covariance.diagonal().mean())
        return once if dithered else 2 * once

    def side(self, levels: Tensor) -> Tensor:
        """1 at the top level, whose cell has no upper end; -1 at the bottom level; else 0."""
        return (levels == self.top).float() - (levels == -self.top).float()

    def inside(self, residual: Tensor, side: Tensor) -> Tensor:
        """Candidates minus values [n, count], set to zero along a generator beyond a cell without an outer end.

        Values beyond the edge are clipped to the edge. So an outermost level is evidence only against candidates on the
        inner side of its cell, by their distance from the cell.
        """
        count, padded = residual.shape[1], side.shape[1]
        cells = self.in_cells(pad(residual, (0, padded - count)) if count < padded else residual)
        beyond = (cells * side + 0.5 * self.step).clamp(max=0.0) * side
        cells = torch.where(side == 0, cells, beyond)
        return cells if self.dimension == 1 else _turn(cells, _PLACE)[:, :count]

    def in_cells(self, residual: Tensor) -> Tensor:
        """Residuals [n, count] in coordinates along the generators of the lattice with step 1."""
        return residual if self.dimension == 1 else _turn(residual, _FIND)

    def _rows(self, values: Tensor) -> Tensor:
        """Values as [M], or as [2, M] with neighbors in one column."""
        return values if self.dimension == 1 else values.reshape(-1, 2).T

    def _points(self, cells: Tensor) -> Tensor:
        """step * G cells, in place."""
        cells.mul_(self.step)
        if self.dimension == 2:
            cells[1].mul_(2.0).add_(cells[0]).div_(_SQRT3)
        return cells


class Rounded(NamedTuple):
    """How the numbers of n messages were quantized, in units (see `cascade.Perturbs.unit`).

    side: [n, count] as in `Lattice.side`. dithered: whether the dither is known, and subtracted from restored numbers.
    """

    lattice: Lattice
    side: Tensor
    dithered: bool

    @property
    def variance(self) -> float:
        """Variance of the error of one number, apart from overload."""
        return self.lattice.error_variance(self.dithered)

    def inside(self, residual: Tensor) -> Tensor:
        """The part of candidates minus restored numbers [n, count] that overload does not hide."""
        return self.lattice.inside(residual, self.side)


def student_variance(scale: float, degrees: float) -> float:
    """Variance of a coordinate of multivariate t noise with scale matrix `scale` * I: scale * nu / (nu - 2).

    Raises:
        ValueError: `degrees` is 2 or less, where no variance exists.
    """
    if not degrees > 2:
        raise ValueError(f"expected more than 2 degrees of freedom, got degrees={degrees}")
    return scale * degrees / (degrees - 2)


def _flat(rows: Tensor) -> Tensor:
    """[n] from [M], or from [2, M] column by column."""
    return rows if rows.ndim == 1 else rows.T.reshape(-1)


def _turn(values: Tensor, matrix: Tensor) -> Tensor:
    return (values.reshape(len(values), -1, 2) @ matrix.T.to(values)).reshape(len(values), -1)
