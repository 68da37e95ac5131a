"""Dithered quantizers of one and two dimensions, as in the reference code of JoPEQ, and the radii that set their step.

Lang, Sofer, Shaked, Shlezinger 2022, "Joint Privacy Enhancement and Quantization in Federated Learning". The text and
the reference code disagree on the radius gamma and on the step; both are here, and the reference reproduces Table II.

| | reference code | text |
|---|---|---|
| gamma, no noise | 1.5 | - |
| gamma, L = 1, Laplace noise of scale 2/epsilon | 1.5 sqrt(1 + variance) | 2 R + 1/epsilon |
| gamma, L = 2, t noise | 1.5 sqrt(1 + variance) | 1.5 (1 + variance) |
| step | 2 gamma / (2^R + 1) | 2 gamma / 2^R |
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

_SQRT3 = math.sqrt(3.0)


@dataclass(frozen=True)
class Lattice:
    """Rounding in lattice coordinates: q = clip(round(G^-1 x / step + dither)), sent as integers.

    Args:
        step: Delta, length of a cell along a generator.
        bits: R, 1 to 32. The levels are -2^(R-1)..2^(R-1): one more than R bits can say.
        dimension: L. 1: the integers, G = 1. 2: the hexagonal lattice, G = [[1, 0], [1/sqrt 3, 2/sqrt 3]].

    Guarantees:
        restore(quantize(x, dither), dither) - x is uniform on the cell step * G [-1/2, 1/2)^L and independent of x
        wherever no coordinate is clipped (dither of `draw_dither`; up to float32 rounding, 2^-21 of the edge).
        Beyond the outermost cell every coordinate is clipped by itself.

    Raises:
        ValueError: a parameter out of range.

    Source: the reference code of Lang et al. 2022. Differs from the text: the cell is the parallelogram, not the
        hexagon, and coordinates are clipped, not norms.
    """

    step: float
    bits: int
    dimension: int = 1

    def __post_init__(self) -> None:
        if not 0 < self.step < math.inf:
            raise ValueError(f"expected a finite step > 0, got step={self.step}")
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
        """[L, L] float64: of a uniform draw from the cell, step^2 / 12 * G G^T."""
        generator = self._place(torch.eye(self.dimension, dtype=torch.float64))
        return generator @ generator.T / 12

    def quantize(self, x: Tensor, dither: Tensor) -> Tensor:
        """The level of every lattice coordinate of x, in the smallest signed integer type that holds them all.

        Args:
            x: [M], or [2, M] where L = 2. Finite. Not modified.
            dither: of the same shape, in cells.
        """
        cells = x / self.step
        if self.dimension == 2:
            # G^-1 = [[1, 0], [-1/2, sqrt(3)/2]]
            cells[1].mul_(_SQRT3).sub_(cells[0]).mul_(0.5)
        return cells.add_(dither).round_().clamp_(-self.top, self.top).to(self._integer)

    def restore(self, levels: Tensor, dither: Tensor) -> Tensor:
        """The points of the levels without their dither, in the type of the dither."""
        return self._place(levels - dither)

    def point(self, levels: Tensor) -> Tensor:
        """The lattice points of the levels, float32."""
        return self._place(levels.float())

    @property
    def _integer(self) -> torch.dtype:
        """The smallest signed type that holds the outermost level."""
        return next(kind for kind in (torch.int8, torch.int16, torch.int32, torch.int64) if self.top <= _largest(kind))

    def _place(self, cells: Tensor) -> Tensor:
        """step * G cells, in place."""
        cells.mul_(self.step)
        if self.dimension == 2:
            cells[1].mul_(2.0).add_(cells[0]).div_(_SQRT3)
        return cells


def _largest(kind: torch.dtype) -> int:
    """The largest number of an integer type."""
    return int(torch.iinfo(kind).max)


def laplace_variance(epsilon: float) -> float:
    """Of Laplace noise of scale 2/epsilon."""
    return 2 * (2 / epsilon) ** 2


def student_variance(scale: float, degrees: float) -> float:
    """Of a coordinate of multivariate t noise with scale matrix `scale` * I: scale * nu / (nu - 2).

    Raises:
        ValueError: there are no more than 2 degrees of freedom, and no variance.
    """
    if not degrees > 2:
        raise ValueError(f"expected more than 2 degrees of freedom, got degrees={degrees}")
    return scale * degrees / (degrees - 2)


def reference_gamma(variance: float) -> float:
    """Radius of the reference code for noise of that variance in a coordinate, L = 1 or 2; 0 where there is none."""
    return 1.5 * math.sqrt(1 + variance)


def paper_scalar_gamma(bits: int, epsilon: float) -> float:
    """Radius of the text for L = 1."""
    return 2 * bits + 1 / epsilon


def paper_lattice_gamma(variance: float) -> float:
    """Radius of the text for L = 2 and noise of that variance in a coordinate."""
    return 1.5 * (1 + variance)


def reference_step(gamma: float, bits: int) -> float:
    """Delta of the reference code: 2^R + 1 cells from -gamma to gamma."""
    return 2 * gamma / (2.0**bits + 1)


def paper_step(gamma: float, bits: int) -> float:
    """Delta of the text: 2^R steps from -gamma to gamma; the outermost points are at +-gamma."""
    return 2 * gamma / 2.0**bits
