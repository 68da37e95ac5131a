"""CEPAM's quantizer, layered rejection sampling on the integer lattice in one to three dimensions, and its message.

The noise distribution is a mixture of uniform distributions on balls. Client and server share the radius r of every
sub-vector and a sequence of dithers v. The client sends the number H of the first dither for which the quantizer with
cells of side 2r errs by at most r, and the cell M:

    M = the integers with x / 2r - v in M + (-1/2, 1/2]^n,    |2r (M + v) - x| <= r,    y = 2r (M + v).

Source: Ling, Wu, Sun, Li, Song, Xu 2025, "Communication-Efficient and Privacy-Adaptable Mechanism". Differs from the
    printed Algorithm 2, line 10, which tests |2r M - x| <= r. That test never accepts some sub-vectors, and the error
    of the others is neither centered nor of the stated distribution.

The message has attempts and cells, in about as many bits as their entropy given the shared randomness.

Both sides know the radius r of every sub-vector and all dithers v. Where coordinates are small against a cell of side
2r, radius and dithers nearly determine the message: a dither within the ball of radius 1/2 is accepted, a dither
outside is rejected, and the cell is 0 unless the dither is near the cell's edge. So each attempt is coded as a bit,
accepted or rejected, whose context is the distance of its dither from the sphere. A cell is coded as an integer, whose
context is r and the distance of its dither from the edge. Contexts are taken from the bits of doubles, computed by
sums, products and square roots, which every machine rounds alike.

| part, with its length before it | content |
|---|---|
| far | the excess over 15 of each cell beyond 15; empty without such cells, or if the message is short |
| attempts, for n > 1 | for each attempt, a bit for every open sub-vector; then the numbers of the last few |
| cells, to the end of the message | up to 15 (any if short); positive towards the edge nearer to their dither |

Guarantees:
    The message is a function of attempts, cells and shared randomness; it reveals nothing else about the input.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from leakgauge.defenses._cepam.golomb import decode_integers, encode_integers
from leakgauge.harness.core import rng
from leakgauge.harness.core.codec import Integers, Reader
from leakgauge.harness.core.distribution import Integers as Ints
from leakgauge.harness.core.errors import MessageError
from leakgauge.harness.core.rng import Key
from leakgauge.harness.core.stats import Numbers

Dithers = Callable[[int, Ints, int], Numbers]
"""(attempt, all sub-vectors [K] that are still open, n) -> dithers [K, n] in (-1/2, 1/2]."""

# Largest |x| in cells, for which float64 still keeps 12 bits of the dither, so that attempts differ
_FARTHEST = 2.0**40
_BLOCK = 1 << 14  # number of sub-vectors processed at a time, few enough to stay in the cache


class Encoded(NamedTuple):
    """Quantized sub-vectors.

    attempts: [N] H, from 1 on, always 1 if n = 1. cells: [N, n] M, whole numbers. dither: [N, n] v, the accepted
    dithers. cells and dither are stored column by column.
    """

    attempts: Ints
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


def _rejected(scaled: Numbers, dither: Numbers) -> Ints:
    """The indices of the sub-vectors [n, K] whose nearest cell with this dither is too far."""
    shifted = scaled - dither
    shifted -= _nearest(shifted)
    shifted *= shifted
    places: Ints = (shifted.sum(axis=0) > 0.25).nonzero()[0]
    return places


Contexts = npt.NDArray[np.uint8]

_FEW = 64  # number of open sub-vectors below which contexts cost more bits than they save
_NEAR = 15  # largest cell in the part `cells` of a long message; up to this size, the integer coder takes half the time
# Number of cells from which a message is long: time then outweighs the percent that `far` adds for fine cells
_MANY = 1 << 16
_BLOCK = 1 << 15  # number of sub-vectors processed at a time, few enough to stay in the cache
# Number of sub-vectors whose attempts are processed together: late attempts are few but cost many calls each
_PART = 1 << 18
_SINGLE_PART = 1 << 15  # the same for n = 1, where the only attempt is fastest in the cache
_FURTHER = 200  # most attempts of the last few sub-vectors; one of them needs more with probability below 10^-62
# The bits of 1.0. A double's bits minus these bits are about its logarithm, in octaves from bit 52 on
_ONE = int(np.float64(1.0).view(np.int64))


def pack(x: Numbers, radii: Numbers, spread: float, key: Key) -> bytes:
    """Quantize sub-vectors and write their message.

    Args:
        x: [N, n], stored column by column.
        radii: [N], shared.
        spread: approximate root mean square of x, public. A wrong value costs only bits.
        key: of the dithers, shared.

    Guarantees:
        `unpack` returns y with |y - x| <= r in each sub-vector, uniform on that ball, independent of x.

    Raises:
        ValueError: x is not finite or more than 2^40 cells from 0, or a radius is not positive.
    """
    count, n = x.shape
    attempts, tape, limit = np.ones(count, np.int64), _Tape(key, radii, spread), _limit(x.size)
    near, contexts = np.empty((count, n), np.min_scalar_type(-limit)), np.empty((count, n), np.uint8)
    far, beyond = [], []
    for section in blocks(count, _part_size(n)):
        tape.start = section.start
        encoded = encode(x[section], radii[section], tape)
        attempts[section] = encoded.attempts
        for block in blocks(len(encoded.attempts), _BLOCK):
            rows = slice(section.start + block.start, section.start + block.stop)
            cells, dither = encoded.cells[block], encoded.dither[block]
            contexts[rows] = cell_contexts(dither, radii[rows], spread)
            folded = _folded(cells, dither)
            np.minimum(folded, limit, out=folded)
            np.maximum(folded, -limit, out=near[rows], casting="unsafe")
            outside = np.flatnonzero(np.abs(near[rows]) == limit)
            far.append(outside + rows.start * n)
            beyond.append(np.abs(cells[outside // n, outside % n]).astype(np.int64) - limit)
    where = np.concatenate(far)
    parts = [encode_integers(np.concatenate(beyond), contexts.reshape(-1)[where]) if where.size else b""]
    if n > 1:
        parts += _pack_attempts(attempts, tape.contexts)
    return b"".join([*map(_framed, parts), encode_integers(near.reshape(-1), contexts.reshape(-1))])


def unpack(wire: bytes, radii: Numbers, spread: float, key: Key, n: int) -> Numbers:
    """Decode `wire` of `pack` to [N, n], stored column by column, with the same radii [N], spread and key.

    Raises:
        MessageError: not a message of `pack`.
    """
    source = Reader(wire)
    beyond = _take_framed(source, "far cells")
    dither = dithers(key, 1, np.arange(len(radii)), n)
    if n > 1:
        _unpack_attempts(source, dither, radii, spread, key)
    contexts = np.empty((len(radii), n), np.uint8)
    for block in blocks(len(radii), _BLOCK):
        contexts[block] = cell_contexts(dither[block], radii[block], spread)
    cells = decode_integers(source.take(source.left, "cells"), contexts.reshape(-1))
    folded = _with_far(cells, beyond, contexts.reshape(-1)).reshape(-1, n)
    for block in blocks(len(radii), _BLOCK):
        # overwrites the dithers, because new memory takes longer than the arithmetic
        exact = np.array(folded[block], np.float64, order="F")
        dither[block] = place(_folded(exact, dither[block]), radii[block], dither[block])
    return dither


def dithers(key: Key, attempt: int, rows: Ints, n: int) -> Numbers:
    """[K, n] in (-1/2, 1/2], stored column by column: the dithers of an attempt, from 1 on.

    rows: [K], in increasing order, all sub-vectors of some parts of the message that the attempts before have rejected.
    Each part has a stream for each attempt, which gives its rejected sub-vectors one dither after the other.
    """
    drawn, size = np.empty((n, rows.size)), _part_size(n)
    number, start = int(rows[0]) // size if rows.size else 0, 0
    while start < rows.size:
        stop = int(np.searchsorted(rows, (number + 1) * size))
        stream = rng.shared_stream(key.child("attempt", attempt, number))
        for column in drawn:
            for block in blocks(stop - start, _BLOCK):
                into = column[start:stop][block]
                np.subtract(0.5, stream.random(out=into), out=into)
        number, start = number + 1, stop
    return drawn.T


def _part_size(n: int) -> int:
    return _SINGLE_PART if n == 1 else _PART


def cell_contexts(dither: Numbers, radii: Numbers, spread: float) -> Contexts:
    """The contexts [K, n] of cells, given accepted dithers [K, n] and radii [K]."""
    contexts = np.empty(dither.shape, np.uint8)
    width = radii * (2 / spread)
    row = _between(_logarithm(width, 1, _THIN), _WIDE - _THIN)
    row *= _DISTANCES
    for coordinate in range(dither.shape[1]):
        distance = np.abs(dither[:, coordinate])
        np.subtract(0.5, distance, out=distance)
        distance *= width
        level = _between(_logarithm(distance, 1, _CLOSE), _DISTANCES - 1)
        level += row
        np.take(_CELL_CONTEXT, level, out=contexts[:, coordinate], mode="clip")
    return contexts


def _taking_part(radii: Numbers, rows: Ints, attempt: int) -> Numbers:
    """The radii of the rows of an attempt; those of the first are a range, whose view takes no time."""
    return radii[rows[0] : rows[0] + rows.size] if attempt == 1 else radii.take(rows)


def attempt_contexts(dither: Numbers, radii: Numbers, spread: float) -> Contexts:
    """The contexts [K] of the bits that accept dithers [K, n], given radii [K].

    A context is 0 where the cell is under half a spread, so that the dither is uninformative; otherwise it is the side
    of the sphere and the distance from the sphere.
    """
    contexts = np.empty(len(radii), np.uint8)
    for block in blocks(len(radii), _BLOCK):
        norm = dither[block, 0] * dither[block, 0]
        for coordinate in range(1, dither.shape[1]):
            norm += dither[block, coordinate] * dither[block, coordinate]
        margin = np.sqrt(norm, out=norm)
        margin -= 0.5
        inside = margin < 0
        np.abs(margin, out=margin)
        widths = radii[block] * (2 / spread)
        margin *= widths
        level = contexts[block]
        np.add(_between(_logarithm(margin, 0, -2), 4), 1, out=level, casting="unsafe")
        level += np.multiply(inside, 5, dtype=np.uint8)
        level *= widths >= 0.5
    return contexts


def _logarithm(values: Numbers, halvings: int, start: int) -> Ints:
    """Logarithms of values >= 0 in octaves (halvings = 0) or half-octaves (1), rounded down, minus `start`."""
    bits = values.view(np.int64) - (_ONE + (start << (52 - halvings)))
    bits >>= 52 - halvings
    return bits


def _between(values: Ints, most: int) -> Ints:
    """The values limited to 0..most, in place; this takes half the time of `clip`."""
    np.maximum(values, 0, out=values)
    return np.minimum(values, most, out=values)


_THIN, _WIDE = -20, 4  # range of a cell's width in half-octaves; all wider cells count as one
_CLOSE, _AWAY = -4, 6  # range of the distance of a dither from the edge in half-octaves
_DISTANCES = _AWAY - _CLOSE + 1


def _cell_context(width: int, distance: int) -> int:
    """The context of a width and a distance, both in half-octaves."""
    if width < 0:
        return width - _THIN
    # each octave of widths has its own distances, up to half the width
    octave, largest = width // 2, (-1, 1, _AWAY)[width // 2]
    return -_THIN + octave * _DISTANCES + min(distance, largest) - _CLOSE


# The context of each width and distance. Below one spread the distance is uninformative, from four on the width
_CELL_CONTEXT = np.array(
    [_cell_context(width, distance) for width in range(_THIN, _WIDE + 1) for distance in range(_CLOSE, _AWAY + 1)],
    np.uint8,
)


class _Tape:
    """The dithers of sub-vectors; it records the contexts of the open sub-vectors in each attempt.

    start: the first of the sub-vectors that are being encoded.
    """

    def __init__(self, key: Key, radii: Numbers, spread: float) -> None:
        self._key, self._radii, self._spread = key, radii, spread
        self.start = 0
        self.contexts: list[list[Contexts]] = []

    def __call__(self, attempt: int, rows: Ints, n: int) -> Numbers:
        rows = rows + self.start
        drawn = dithers(self._key, attempt, rows, n)
        if n > 1:
            if attempt > len(self.contexts):
                self.contexts.append([])
            self.contexts[attempt - 1].append(
                attempt_contexts(drawn, _taking_part(self._radii, rows, attempt), self._spread)
            )
        return drawn


def _pack_attempts(attempts: Ints, contexts: list[list[Contexts]]) -> list[bytes]:
    parts, rows, attempt = [], np.arange(len(attempts)), 1
    while rows.size >= _FEW:
        accepted = attempts.take(rows) == attempt
        parts.append(encode_integers(accepted.view(np.int8), np.concatenate(contexts[attempt - 1])))
        rows, attempt = rows.take((~accepted).nonzero()[0]), attempt + 1
    return [*parts, encode_integers(attempts[rows] - attempt, np.zeros(rows.size, np.uint8))]


def _unpack_attempts(source: Reader, dither: Numbers, radii: Numbers, spread: float, key: Key) -> None:
    """Replace the dithers [N, n] of the first attempt by the accepted dithers."""
    rows, attempt, n = np.arange(len(dither), dtype=np.int64), 1, dither.shape[1]
    drawn = dither
    while rows.size >= _FEW:
        payload = _take_framed(source, f"attempt {attempt}")
        accepted = decode_integers(payload, attempt_contexts(drawn, _taking_part(radii, rows, attempt), spread))
        low, high = accepted.min(), accepted.max()
        if low < 0 or high > 1:
            raise MessageError(f"expected 1 for an accepted dither and 0 for a rejected one, got {low}..{high}")
        rows, attempt = rows.take((accepted == 0).nonzero()[0]), attempt + 1
        drawn = dithers(key, attempt, rows, n)
        for column in range(n):
            dither[:, column][rows] = drawn[:, column]
    further = decode_integers(_take_framed(source, "the last attempts"), np.zeros(rows.size, np.uint8))
    if further.min(initial=0) < 0 or further.max(initial=0) > _FURTHER:
        low, high = attempt + int(further.min()), attempt + int(further.max())
        raise MessageError(f"expected accepted attempts of {attempt}..{attempt + _FURTHER}, got {low}..{high}")
    for late in range(1, int(further.max(initial=0)) + 1):
        rows, further = rows[further >= late], further[further >= late]
        dither[rows] = dithers(key, attempt + late, rows, n)


def _with_far(cells: Integers, beyond: bytes, contexts: Contexts) -> Integers:
    limit = _limit(cells.size)
    peak = max(int(cells.max(initial=0)), -int(cells.min(initial=0)))
    if peak > limit:
        raise MessageError(f"expected cells of at most {limit} in magnitude, got {peak}")
    if peak < limit:
        if beyond:
            raise MessageError(f"expected no bytes for cells beyond {limit}, got {len(beyond)} bytes")
        return cells
    far = np.flatnonzero(np.abs(cells) == limit)
    further = decode_integers(beyond, contexts[far])
    if further.min() < 0:
        raise MessageError(f"expected distances >= 0 of cells beyond {limit}, got {int(further.min())}")
    cells = cells.astype(np.int64, copy=False)
    cells[far] += np.sign(cells[far]) * further
    return cells


def _limit(count: int) -> int:
    """The largest cell in the part `cells` of a message with `count` cells; the quantizer's cells are below 2**41."""
    return _NEAR if count >= _MANY else 1 << 53


def _folded(cells: Numbers, dither: Numbers) -> Numbers:
    """Cells [K, n] with the sign changed where the dither is negative; its own inverse."""
    # flipping the sign bits is twice as fast as a product
    signs = dither.view(np.int64) & np.iinfo(np.int64).min
    signs ^= cells.view(np.int64)
    return signs.view(np.float64)


def _framed(content: bytes) -> bytes:
    """A part preceded by its length: seven bits per byte, lowest first; the eighth bit marks a further byte."""
    length, left = bytearray(), len(content)
    while left > 127:
        length.append(left & 127 | 128)
        left >>= 7
    return bytes([*length, left]) + content


def _take_framed(source: Reader, what: str) -> bytes:
    length = 0
    for shift in range(0, 35, 7):
        (byte,) = source.take(1, f"the length of {what}")
        length |= (byte & 127) << shift
        if byte < 128:
            return source.take(length, what)
    raise MessageError(f"expected {what} of fewer than 2**35 bytes, got a longer length")
