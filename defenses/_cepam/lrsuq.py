"""The layered rejection-sampled universal quantizer of CEPAM, on the integer lattice in one to three dimensions.

The noise distribution is a mixture of uniform distributions on balls. Client and server share the radius r of every
sub-vector and a sequence of dithers v. The client sends the number H of the first dither for which the quantizer with
cells of side 2r errs by at most r, and the cell M:

    M = the integers with x / 2r - v in M + (-1/2, 1/2]^n,    |2r (M + v) - x| <= r,    y = 2r (M + v).

Source: Ling, Wu, Sun, Li, Song, Xu 2025, "Communication-Efficient and Privacy-Adaptable Mechanism". Differs from the
    printed Algorithm 2, line 10, which tests |2r M - x| <= r. That test never accepts some sub-vectors, and the error
    of the others is neither centered nor of the stated distribution.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from leakgauge.harness.core import rng
from leakgauge.harness.core.distribution import Integers
from leakgauge.harness.core.rng import Key
from leakgauge.harness.core.stats import Numbers

Dithers = Callable[[int, Integers, int], Numbers]
"""(attempt, all sub-vectors [K] that are still open, n) -> dithers [K, n] in (-1/2, 1/2]."""

# Largest |x| in cells, for which float64 still keeps 12 bits of the dither, so that attempts differ
_FARTHEST = 2.0**40


_BLOCK = 1 << 14  # number of sub-vectors processed at a time, few enough to stay in the cache


class Encoded(NamedTuple):
    """Quantized sub-vectors.

    attempts: [N] H, from 1 on, always 1 if n = 1. cells: [N, n] M, whole numbers. dither: [N, n] v, the accepted
    dithers. cells and dither are stored column by column.
    """

    attempts: Integers
    cells: Numbers
    dither: Numbers


def gaussian_radii(key: Key, count: int, n: int, sigma: float) -> Numbers:
    """[count] sigma * sqrt(chi-square with n + 2 degrees), for an N(0, sigma^2) error in each of n coordinates."""
    drawn = rng.chisquare(key, n + 2, (count,), shared=True).numpy()
    np.sqrt(drawn, out=drawn)
    drawn *= sigma
    return drawn


def laplace_radii(key: Key, count: int, b: float) -> Numbers:
    """[count] b * Gamma(2, 1), for a Laplace error of scale b with n = 1."""
    drawn = rng.gamma(key, 2.0, (count,), shared=True).numpy()
    drawn *= b
    return drawn


def encode(x: Numbers, radii: Numbers, dithers: Dithers) -> Encoded:
    """Quantize sub-vectors; the distribution of the radii determines the distribution of the error.

    Args:
        x: [N, n]; fastest if stored column by column, like `flat.reshape(n, N).T`. Not modified.
        radii: [N], from `gaussian_radii` or `laplace_radii`; known to the server.
        dithers: known to the server, independent of the radii.

    Guarantees:
        |place(...) - x| <= r in each sub-vector, up to rounding: uniform on the ball of radius r, independent of x.
        H is geometric with mean 1, 4/pi, 6/pi for n = 1, 2, 3.

    Raises:
        ValueError: x is not finite, a radius is not positive, or x is more than 2^40 cells from 0.
    """
    count, n = x.shape
    attempts, cells, dither = np.ones(count, np.int64), np.empty((n, count)), dithers(1, np.arange(count), n).T
    # where n = 1, every dither is accepted
    rows, scaled, drawn, attempt = np.arange(count if n > 1 else 0, dtype=np.int64), np.empty((n, 0)), dither, 1
    while rows.size:
        if attempt > 1:
            drawn = dithers(attempt, rows, n).T
            for into, column in zip(dither, drawn, strict=True):  # rejected ones are written over later
                into[rows] = column
        further = []
        for block in blocks(rows.size, _BLOCK):
            given = _in_cells(x[block], radii[block]) if attempt == 1 else scaled[:, block]
            outside = _rejected(given, drawn[:, block])
            further.append((rows[block].take(outside), given.take(outside, axis=1)))
        rows, scaled, attempt = *(np.concatenate(parts, -1) for parts in zip(*further, strict=True)), attempt + 1
        attempts[rows] = attempt
    for block in blocks(count, _BLOCK):
        cells[:, block] = _nearest(_in_cells(x[block], radii[block]) - dither[:, block])
    return Encoded(attempts, cells.T, dither.T)


def blocks(count: int, size: int) -> Iterator[slice]:
    """The range 0..count-1 in blocks of `size`."""
    return (slice(start, min(start + size, count)) for start in range(0, count, size))


def place(cells: Numbers, radii: Numbers, dither: Numbers) -> Numbers:
    """The points y = 2r (M + v) of cells M and accepted dithers v: [N, n], stored column by column."""
    y = cells.T + dither.T
    y *= 2 * radii
    return y.T


def _in_cells(x: Numbers, radii: Numbers) -> Numbers:
    with np.errstate(divide="ignore", invalid="ignore"):
        scaled = np.divide(x.T, 2 * radii, order="C")
    farthest = float(np.abs(scaled).max())
    if not (farthest < _FARTHEST and radii.min() > 0):
        raise ValueError(
            f"expected finite x within 2^40 cells of 0 and radii > 0, got a coordinate {farthest} cells from 0 and a "
            f"smallest radius of {radii.min()}"
        )
    return scaled


def _nearest(shifted: Numbers) -> Numbers:
    cells = shifted - 0.5
    return np.ceil(cells, out=cells)


def _rejected(scaled: Numbers, dither: Numbers) -> Integers:
    """The indices of the sub-vectors [n, K] whose nearest cell with this dither is too far."""
    shifted = scaled - dither
    shifted -= _nearest(shifted)
    shifted *= shifted
    places: Integers = (shifted.sum(axis=0) > 0.25).nonzero()[0]
    return places
