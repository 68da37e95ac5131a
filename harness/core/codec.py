"""Encodes numbers as bytes on the wire, and decodes them."""

from __future__ import annotations

import functools

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from leakgauge.harness.core.errors import MessageError
from leakgauge.harness.core.vec import Vector

Words = npt.NDArray[np.uint64]
Integers = npt.NDArray[np.integer]
Bits = npt.NDArray[np.bool_]


def pack_float32(vector: Vector) -> bytes:
    """4 * d bytes: little-endian IEEE single precision, the same on every machine."""
    return vector.detach().cpu().numpy().astype("<f4", copy=False).tobytes()


def unpack_float32(wire: bytes, dim: int) -> Vector:
    """The vector [dim] that `pack_float32` packed.

    Raises:
        MessageError: not 4 * dim bytes, or an entry is not finite.
    """
    return _unpack(wire, dim, np.float32, "floats")


def pack_float64(vector: Tensor) -> bytes:
    """8 * d bytes: little-endian IEEE double precision, the same on every machine."""
    return vector.detach().cpu().numpy().astype("<f8", copy=False).tobytes()


def unpack_float64(wire: bytes, dim: int) -> Tensor:
    """The vector [dim] float64 that `pack_float64` packed.

    Raises:
        MessageError: not 8 * dim bytes, or an entry is not finite.
    """
    return _unpack(wire, dim, np.float64, "doubles")


def width_of(levels: int) -> int:
    """Bits that distinguish `levels` levels: ceil(log2(levels)), in integer arithmetic; 0 for one level.

    Raises:
        ValueError: levels is not positive.
    """
    if levels < 1:
        raise ValueError(f"expected levels >= 1, got levels={levels}")
    return (levels - 1).bit_length()


def pack_levels(levels: Integers, width: int) -> bytes:
    """Pack integers [n] in 0..2**width-1 one after the other, least significant bit first.

    Args:
        width: bits per level, 0 to 32. Levels of width 0 are all 0 and take no bytes.

    Returns:
        ceil(n * width / 8) bytes; the bits after the last level are 0.

    Raises:
        ValueError: a level or the width is out of range, or the levels are not flat.
    """
    cell = _cell(width)
    if levels.ndim != 1:
        raise ValueError(f"expected flat levels [n], got shape {levels.shape}")
    # the union of all bits shows a negative or too large level in one pass
    union = int(np.bitwise_or.reduce(levels, initial=0))
    if union < 0 or union >> width:
        raise ValueError(f"expected levels in 0..{2**width - 1}, got {int(levels.min())}..{int(levels.max())}")
    if width in (0, cell):
        return levels.astype(f"<u{cell // 8}").tobytes() if width else b""
    if width == 1:
        return np.packbits(levels != 0, bitorder="little").tobytes()
    if cell > 8:
        bits = levels.astype(f"<u{cell // 8}")[:, None].view(np.uint8)
        return np.packbits(np.unpackbits(bits, 1, width, "little"), bitorder="little").tobytes()
    padded = np.zeros(-(-levels.size // 8) * 8, np.uint8)
    padded[: levels.size] = levels
    words = _squeeze(padded.view("<u8"), width)
    packed = words.astype(f"<u{width}") if width in (2, 4) else words[:, None].view(np.uint8)[:, :width]
    return packed.tobytes()[: -(-levels.size * width // 8)]


def unpack_levels(wire: bytes, count: int, width: int) -> npt.NDArray[np.int64]:
    """The levels [count] that `pack_levels` packed.

    Raises:
        MessageError: not ceil(count * width / 8) bytes, or a bit after the last level is not 0.
        ValueError: the width is out of range.
    """
    cell = _cell(width)
    check_length(wire, -(-count * width // 8), f"{count} levels of {width} bits")
    used = count * width % 8
    if used and wire[-1] >> used:
        raise MessageError(f"expected zero bits after {count} levels of {width} bits, got a last byte of {wire[-1]}")
    if width == 0:
        return np.zeros(count, np.int64)
    if width == cell:
        return np.frombuffer(wire, f"<u{cell // 8}").astype(np.int64)
    read = np.frombuffer(wire, np.uint8)
    if cell > 8:
        bits = np.zeros((count, cell), np.uint8)
        bits[:, :width] = np.unpackbits(read, None, count * width, "little").reshape(count, width)
        return np.packbits(bits, bitorder="little").view(f"<u{cell // 8}").astype(np.int64)
    whole, rows = len(wire) // width, np.zeros((-(-count // 8), 8), np.uint8)
    rows[:whole, :width] = read[: whole * width].reshape(whole, width)
    if whole < len(rows):
        rows[whole, : len(wire) - whole * width] = read[whole * width :]
    return _spread(rows.view("<u8").reshape(-1), width).view(np.uint8)[:count].astype(np.int64)


class Reader:
    """A cursor over a message of several parts."""

    def __init__(self, wire: bytes) -> None:
        self._wire = wire
        self._at = 0

    @property
    def left(self) -> int:
        """Number of bytes not yet taken."""
        return len(self._wire) - self._at

    def take(self, length: int, what: str) -> bytes:
        """The next `length` bytes; `what` names their content in the error.

        Raises:
            MessageError: fewer bytes are left.
        """
        if not 0 <= length <= self.left:
            raise MessageError(f"expected {length} bytes of {what} at byte {self._at}, got {self.left} bytes")
        self._at += length
        return self._wire[self._at - length : self._at]

    def done(self) -> None:
        """Check that the message ends here.

        Raises:
            MessageError: bytes are left.
        """
        if self.left:
            raise MessageError(f"expected a message of {self._at} bytes, got {len(self._wire)} bytes")


class BitWriter:
    """Writes a message whose parts are not whole bytes, least significant bit first."""

    def __init__(self) -> None:
        self._parts: list[Bits] = []

    def put(self, bits: Bits) -> None:
        """Append bits [n]."""
        self._parts.append(bits)

    def put_number(self, number: int, width: int) -> None:
        """Append one number in `width` bits."""
        self.put(_bits(number, width))

    def put_fields(self, values: Integers, widths: npt.NDArray[np.int64]) -> None:
        """Append non-negative integers [n] below 2**widths [n]: first the lowest bit of each, then the next bit, ..."""
        narrowest = int(widths.min(initial=64))
        for bit in range(int(widths.max(initial=0))):
            self.put((values if bit < narrowest else values[widths > bit]) >> bit & 1 != 0)

    def put_counts(self, counts: Integers, top: int) -> None:
        """Append integers [n] in 0..top: their bit lengths, then the bits below the highest. Best for similar sizes.

        The range of the bit lengths takes about 8 bits. If the lengths are equal, they take no further bits; otherwise
        each takes ceil(log2(range)) bits.
        """
        room = top.bit_length()
        # frexp returns the bit length as its exponent
        lengths = np.frexp(counts)[1].astype(np.int64)
        least = int(lengths.min()) if lengths.size else 0
        span = (int(lengths.max(initial=0)) - least).bit_length()
        self.put_number(least, room.bit_length())
        self.put_number(span, room.bit_length().bit_length())
        for bit in range(span):
            self.put((lengths - least) >> bit & 1 != 0)
        self.put_fields(counts, np.maximum(lengths - 1, 0))

    def put_unary(self, values: Integers) -> None:
        """Append non-negative integers [n], each encoded as that number of zeros and a one."""
        ends = values.cumsum(dtype=np.int64) + np.arange(values.size)
        bits = np.zeros(int(ends[-1]) + 1 if values.size else 0, np.bool_)
        bits[ends] = True
        self.put(bits)

    def wire(self) -> bytes:
        """The appended bits, with zero bits up to a whole byte."""
        return np.packbits(np.concatenate(self._parts), bitorder="little").tobytes() if self._parts else b""


class BitReader:
    """A cursor over the bits that a `BitWriter` wrote."""

    def __init__(self, wire: bytes) -> None:
        self._bits = np.unpackbits(np.frombuffer(wire, np.uint8), bitorder="little").view(np.bool_)
        self._at = 0

    @property
    def left(self) -> int:
        """Number of bits not yet taken."""
        return self._bits.size - self._at

    def take(self, count: int) -> Bits:
        """The next bits [count].

        Raises:
            MessageError: fewer bits are left.
        """
        if count > self.left:
            raise MessageError(f"expected {count} bits at bit {self._at}, got {self.left}: the message is cut off")
        self._at += count
        return self._bits[self._at - count : self._at]

    def take_number(self, width: int) -> int:
        """The number that `put_number` appended."""
        return sum(1 << bit for bit in self.take(width).nonzero()[0].tolist())

    def take_fields(self, widths: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """The integers [n] that `put_fields` appended with the same `widths` [n], at most 63 bits each."""
        values = np.zeros(widths.size, np.int64)
        narrowest = int(widths.min(initial=64))
        for bit in range(int(widths.max(initial=0))):
            if bit < narrowest:
                values |= self.take(widths.size).astype(np.int64) << bit
            else:
                live = (widths > bit).nonzero()[0]
                values[live] |= self.take(live.size).astype(np.int64) << bit
        return values

    def take_counts(self, count: int, top: int) -> npt.NDArray[np.int64]:
        """The integers [count] that `put_counts` appended with the same `top`, below 2**53.

        Raises:
            MessageError: an integer has more bits than `top`.
        """
        room = top.bit_length()
        least, span = self.take_number(room.bit_length()), self.take_number(room.bit_length().bit_length())
        lengths = np.full(count, least)
        for bit in range(span):
            lengths += self.take(count).astype(np.int64) << bit
        if lengths.max(initial=0) > room:
            raise MessageError(f"expected integers of at most {room} bits, got one of {int(lengths.max())} bits")
        below = np.maximum(lengths - 1, 0)
        return np.where(lengths > 0, self.take_fields(below) | (1 << below), 0)

    def take_unary(self, count: int, limit: int) -> npt.NDArray[np.int64]:
        """The integers [count] that `put_unary` appended, from at most `limit` bits in total.

        Raises:
            MessageError: these bits hold fewer than `count` integers.
        """
        ends = self._bits[self._at : self._at + limit].nonzero()[0][:count]
        if ends.size < count:
            raise MessageError(f"expected {count} unary integers at bit {self._at}, got {ends.size}")
        self._at += int(ends[-1]) + 1 if count else 0
        return gaps_before(ends)

    def done(self) -> None:
        """Check that only zero bits up to a whole byte are left.

        Raises:
            MessageError: other bits are left.
        """
        if self.left >= 8 or self._bits[self._at :].any():
            raise MessageError(f"expected a message of {self._at} bits, then zeros, got {self._bits.size} bits")


@functools.lru_cache(1 << 10)
def _bits(number: int, width: int) -> Bits:
    """The lowest bits [width] of a number; cached, so callers must not modify them."""
    return np.array([number >> bit & 1 for bit in range(width)], np.bool_)


def gaps_before(at: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """The number of zeros before each one-bit, from the one-bits' places [n]; several times faster than `np.diff`."""
    gaps = at.copy()
    gaps[1:] -= at[:-1] + 1
    return gaps


def check_length(wire: bytes, length: int, what: str) -> None:
    """Check that a message has the `length` bytes that `what` takes.

    Raises:
        MessageError: another length.
    """
    if len(wire) != length:
        raise MessageError(f"expected a message of {length} bytes ({what}), got {len(wire)} bytes")


def _unpack(wire: bytes, dim: int, dtype: type[np.floating], what: str) -> Tensor:
    """[dim] little-endian numbers, all finite, as a tensor of this type."""
    check_length(wire, dim * np.dtype(dtype).itemsize, f"{dim} {what}")
    values = np.frombuffer(wire, np.dtype(dtype).newbyteorder("<")).astype(dtype)
    if np.count_nonzero(np.isfinite(values)) < dim:
        raise MessageError(f"expected a finite message, got {int((~np.isfinite(values)).sum())} non-finite entries")
    return torch.from_numpy(values)


def _cell(width: int) -> int:
    """Bits of the smallest machine integer that holds a level."""
    if not 0 <= width <= 32:
        raise ValueError(f"expected a width of 0 to 32 bits, got width={width}")
    return 8 if width <= 8 else 16 if width <= 16 else 32


def _squeeze(words: Words, width: int) -> Words:
    """Close the gaps between the bytes of each 64-bit word, towards its low end; each pass halves their number.

    Several times as fast as `np.packbits` of the single bits, for levels of at most 8 bits: those of quantizers.
    """
    for turn in range(3):
        low, high = _masks(width << turn, 8 << turn)
        words = (words & low) | ((words >> np.uint64((8 - width) << turn)) & high)
    return words


def _spread(words: Words, width: int) -> Words:
    """Undo `_squeeze`."""
    for turn in reversed(range(3)):
        low, high = _masks(width << turn, 8 << turn)
        words = (words & low) | ((words & high) << np.uint64((8 - width) << turn))
    return words


@functools.cache
def _masks(width: int, cell: int) -> tuple[np.uint64, np.uint64]:
    """Masks of the two levels in each pair of cells: of the first, and of the second after its gap is closed."""
    low = sum((2**width - 1) << (2 * cell * pair) for pair in range(32 // cell))
    return np.uint64(low), np.uint64(low << width)
