"""The layered rejection-sampled universal quantizer of CEPAM on the integer lattice, of one to three dimensions.

Ling, Wu, Sun, Li, Song, Xu 2025, "Communication-Efficient and Privacy-Adaptable Mechanism". The noise law is a mixture
of uniform laws on balls. Client and server share the radius r of every sub-vector and a sequence of dithers v; the
client sends the number H of the first dither for which the quantizer with cells of side 2r errs by no more than r, and
the cell M:

    M = the integers with x / 2r - v in M + (-1/2, 1/2]^n,    |2r (M + v) - x| <= r,    y = 2r (M + v).

Differs from the printed Algorithm 2, line 10, which tests |2r M - x| <= r: that never accepts some sub-vectors, and
the error of the others is neither centerd nor of the law.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
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

_ROW_BITS = 40
"""Of a counter: the sub-vector is below, the attempt above."""

_FARTHEST = 2.0**40
"""Largest |x| in cells: float64 then leaves the dither 12 bits, and the attempts do not all end the same."""


_BLOCK = 1 << 16
"""Sub-vectors encoded at a time: few enough that they stay in the cache."""


class Encoded(NamedTuple):
    """attempts: [N] H, from 1 on; always 1 where n = 1. cells: [N, n] M."""

    attempts: Integers
    cells: Integers


def gaussian_radii(key: Key, count: int, n: int, sigma: float) -> Floats:
    """[count]: sigma * sqrt(chi-square with n + 2 degrees), for an error of N(0, sigma^2) in each of n coordinates."""
    drawn = rng.chisquare(key, n + 2, (count,), torch.float64).numpy()
    np.sqrt(drawn, out=drawn)
    drawn *= sigma
    return drawn


def laplace_radii(key: Key, count: int, b: float) -> Floats:
    """[count]: b * Gamma(2, 1), for a Laplace error of scale b where n = 1."""
    drawn = rng.gamma(key, 2.0, (count,), torch.float64).numpy()
    drawn *= b
    return drawn


def encode(x: Floats, radii: Floats, key: Key) -> Encoded:
    """Quantize sub-vectors so that the error has the law from which the radii come.

    Args:
        x: [N, n]; fastest where it is stored column by column, as `flat.reshape(n, N).T` is. Not modified.
        radii: [N], of `gaussian_radii` or `laplace_radii`; known to the server.
        key: of the dithers; known to the server, another than that of the radii.

    Guarantees:
        |decode(...) - x| <= r in each sub-vector, up to rounding: uniform on the ball of radius r, independent of x.
        H is geometric with mean 1, 4/pi, 6/pi for n = 1, 2, 3.

    Raises:
        ValueError: x is not finite, a radius is not positive, or x is more than 2^40 cells from 0.
    """
    return encode_with(x, radii, partial(_dithers, key))


def decode(attempts: Integers, cells: Integers, radii: Floats, key: Key) -> Floats:
    """[N, n], stored column by column: what `encode` made into attempts [N] and cells [N, n], with its radii and key.

    Guarantees:
        A sub-vector depends on its own attempt, cells, radius and place alone.
    """
    rows = np.arange(len(attempts), dtype=np.int64)
    return place(cells, radii, _dithers(key, attempts, rows, cells.shape[1]))


def encode_with(x: Floats, radii: Floats, dithers: Dithers) -> Encoded:
    """`encode` with dithers from elsewhere."""
    count, n = x.shape
    encoded = Encoded(np.ones(count, np.int64), np.empty((n, count), np.int64).T)
    for start in range(0, count, _BLOCK):
        here = slice(start, min(start + _BLOCK, count))
        _encode_block(_in_cells(x[here], radii[here]), here, dithers, encoded)
    return encoded


def place(cells: Integers, radii: Floats, dither: Floats) -> Floats:
    """[N, n], stored column by column: y = 2r (M + v)."""
    y = cells.T + dither.T
    y *= 2 * radii
    return y.T


def _in_cells(x: Floats, radii: Floats) -> Floats:
    """[n, N]: x / 2r."""
    with np.errstate(divide="ignore", invalid="ignore"):
        scaled = np.divide(x.T, 2 * radii, order="C")
    farthest = float(np.abs(scaled).max(initial=0.0))
    if not (farthest < _FARTHEST and radii.min(initial=1.0) > 0):
        raise ValueError(
            f"expected finite x within 2^40 cells of 0 and radii > 0, got one {farthest} cells off, "
            f"and a smallest radius of {radii.min()}"
        )
    return scaled


def _encode_block(scaled: Floats, here: slice, dithers: Dithers, into: Encoded) -> None:
    """Encode the sub-vectors of a block, which are `scaled` [n, K] in cells."""
    n, into_cells = len(scaled), into.cells.T
    rows = np.arange(here.start, here.stop, dtype=np.int64)
    attempt = 1
    while rows.size:
        cells, distance2 = _attempt(scaled, dithers(attempt, rows, n).T)
        if n == 1:
            into_cells[:, here] = cells
            return
        accepted = distance2 <= 0.25
        # `take` with places is several times faster than a mask
        inside, outside = np.flatnonzero(accepted), np.flatnonzero(~accepted)
        done = rows.take(inside)
        into.attempts[done] = attempt
        into_cells[:, done] = cells.take(inside, axis=1)
        scaled, rows, attempt = scaled.take(outside, axis=1), rows.take(outside), attempt + 1


def _attempt(scaled: Floats, dither: Floats) -> tuple[Floats, Floats]:
    """The cells [n, K] of one dither, and the squared distances [K] in cells of the points from what they stand for."""
    shifted = scaled - dither
    cells = shifted - 0.5
    np.ceil(cells, out=cells)
    shifted -= cells
    shifted *= shifted
    return cells, shifted.sum(axis=0)


def _dithers(key: Key, attempt: int | Integers, rows: Integers, n: int) -> Floats:
    """[K, n] in (-1/2, 1/2], stored column by column: the dithers of an attempt, or of one for each row."""
    counters = (rows | (np.asarray(attempt, np.int64) << _ROW_BITS)).view(np.uint64)
    drawn = rng.uniform_at(key, counters, n)
    return np.subtract(0.5, drawn, out=drawn)
