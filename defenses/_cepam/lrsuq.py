"""The layered rejection-sampled universal quantizer of CEPAM on the integer lattice of one to three dimensions.

The noise law is a mixture of uniform laws on balls. Client and server share the radius r of every sub-vector and a
sequence of dithers v. The client sends the number H of the first dither for which the quantizer with cells of side 2r
errs by at most r, and the cell M:

    M = the integers with x / 2r - v in M + (-1/2, 1/2]^n,    |2r (M + v) - x| <= r,    y = 2r (M + v).

Source: Ling, Wu, Sun, Li, Song, Xu 2025, "Communication-Efficient and Privacy-Adaptable Mechanism". Differs from the
    printed Algorithm 2, line 10, which tests |2r M - x| <= r. That test never accepts some sub-vectors, and the error
    of the others is neither centered nor of the stated law.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from leakgauge.harness.core import rng
from leakgauge.harness.core.rng import Key

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]

Dithers = Callable[[int, Integers, int], Floats]
"""(attempt, sub-vectors [K], n) -> dithers [K, n] in (-1/2, 1/2]."""

_FARTHEST = 2.0**40
"""Largest |x| in cells: float64 then keeps 12 bits of the dither, so that attempts differ."""


class Encoded(NamedTuple):
    """Quantized sub-vectors. attempts: [N] H, from 1 on, always 1 where n = 1; cells: [N, n] M."""

    attempts: Integers
    cells: Integers


def gaussian_radii(key: Key, count: int, n: int, sigma: float) -> Floats:
    """[count] sigma * sqrt(chi-square with n + 2 degrees), for an error of N(0, sigma^2) in each of n coordinates."""
    drawn = rng.chisquare(key, n + 2, (count,), torch.float64).numpy()
    np.sqrt(drawn, out=drawn)
    drawn *= sigma
    return drawn


def laplace_radii(key: Key, count: int, b: float) -> Floats:
    """[count] b * Gamma(2, 1), for a Laplace error of scale b where n = 1."""
    drawn = rng.gamma(key, 2.0, (count,), torch.float64).numpy()
    drawn *= b
    return drawn


def encode(x: Floats, radii: Floats, dithers: Dithers) -> Encoded:
    """Quantize sub-vectors so that the error has the law that belongs to the law of the radii.

    Args:
        x: [N, n]; fastest if stored column by column, like `flat.reshape(n, N).T`. Not modified.
        radii: [N], of `gaussian_radii` or `laplace_radii`; known to the server.
        dithers: known to the server, independent of the radii.

    Guarantees:
        |place(...) - x| <= r in each sub-vector, up to rounding: uniform on the ball of radius r, independent of x.
        H is geometric with mean 1, 4/pi, 6/pi for n = 1, 2, 3.

    Raises:
        ValueError: x is not finite, a radius is not positive, or x is more than 2^40 cells from 0.
    """
    scaled = _in_cells(x, radii)
    n, count = scaled.shape
    attempts, cells = np.ones(count, np.int64), np.empty((n, count), np.int64)
    rows, attempt = np.arange(count, dtype=np.int64), 1
    while rows.size:
        nearest, distance2 = _attempt(scaled, dithers(attempt, rows, n).T)
        if n == 1:
            cells[:] = nearest
            break
        accepted = distance2 <= 0.25
        # `take` with indices is several times faster than a mask
        inside, outside = np.flatnonzero(accepted), np.flatnonzero(~accepted)
        done = rows.take(inside)
        attempts[done] = attempt
        cells[:, done] = nearest.take(inside, axis=1)
        scaled, rows, attempt = scaled.take(outside, axis=1), rows.take(outside), attempt + 1
    return Encoded(attempts, cells.T)


def place(cells: Integers, radii: Floats, dither: Floats) -> Floats:
    """The points y = 2r (M + v) of cells M and accepted dithers v: [N, n], stored column by column."""
    y = cells.T + dither.T
    y *= 2 * radii
    return y.T


def _in_cells(x: Floats, radii: Floats) -> Floats:
    """x / 2r, [n, N]."""
    with np.errstate(divide="ignore", invalid="ignore"):
        scaled = np.divide(x.T, 2 * radii, order="C")
    farthest = float(np.abs(scaled).max())
    if not (farthest < _FARTHEST and radii.min() > 0):
        raise ValueError(
            f"expected finite x within 2^40 cells of 0 and radii > 0, got a coordinate {farthest} cells from 0 and a "
            f"smallest radius of {radii.min()}"
        )
    return scaled


def _attempt(scaled: Floats, dither: Floats) -> tuple[Floats, Floats]:
    """The cells [n, K] for one dither, and the squared errors [K] in cells."""
    shifted = scaled - dither
    cells = shifted - 0.5
    np.ceil(cells, out=cells)
    shifted -= cells
    shifted *= shifted
    return cells, shifted.sum(axis=0)
