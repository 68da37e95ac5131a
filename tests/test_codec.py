"""Bytes against hand-made ones and a reference in Python integers; every malformed message is refused."""

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from leakgauge.harness.core import codec
from leakgauge.harness.core.errors import MessageError
from leakgauge.harness.core.rng import Key, integers, normal
from tests.by_rows import by_rows


def levels_of(count, width):
    return integers(Key(1, ("levels", count, width)), count, 2**width)


@pytest.mark.parametrize(("levels", "width"), [(1, 0), (2, 1), (3, 2), (4, 2), (5, 3), (256, 8), (257, 9), (2**32, 32)])
def test_the_width_is_the_binary_logarithm_rounded_up(levels, width):
    assert codec.width_of(levels) == width
    with pytest.raises(ValueError, match="expected levels >= 1, got levels=0"):
        codec.width_of(0)


@by_rows(
    ([1, 2, 3], 2, "39"),  # 01 + 10 << 2 + 11 << 4
    ([5, 3], 3, "1d"),  # 101 + 011 << 3
    ([1, 0, 1, 1, 0, 0, 0, 0, 1], 1, "0d01"),
    ([0xABC, 0x123], 12, "bc3a12"),
    ([0x1FF, 0, 0x101], 9, "ff010404"),  # 9 ones, 9 zeros, 1, 7 zeros, 1
    ([0x1234], 16, "3412"),
    ([], 7, ""),
    ([0, 0, 0], 0, ""),
)
def test_levels_follow_each_other_from_the_lowest_bit(levels, width, wire):
    assert codec.pack_levels(np.array(levels, np.int64), width).hex() == wire
    assert codec.unpack_levels(bytes.fromhex(wire), len(levels), width).tolist() == levels


def test_levels_of_every_width_and_count_are_one_number_in_base_two():
    for width, count in itertools.product(range(33), (0, 1, 7, 8, 9, 64, 1001)):
        levels = levels_of(count, width)
        number = sum(level << (width * place) for place, level in enumerate(levels.tolist()))
        wire = codec.pack_levels(levels, width)
        assert wire == number.to_bytes(math.ceil(count * width / 8), "little")
        back = codec.unpack_levels(wire, count, width)
        assert np.array_equal(back, levels)
        assert back.dtype == np.int64


@pytest.mark.parametrize("dtype", [np.uint8, np.int16, np.uint32, np.int64, np.uint64])
def test_levels_may_be_integers_of_any_size_and_stride(dtype):
    levels = levels_of(200, 7).astype(dtype)
    before = levels.copy()
    assert codec.pack_levels(levels[::2], 7) == codec.pack_levels(levels[::2].astype(np.int64), 7)
    assert np.array_equal(levels, before)


@by_rows(
    ([0, 4], 2, r"expected levels in 0\.\.3, got 0\.\.4"),
    ([-1, 1], 2, r"expected levels in 0\.\.3, got -1\.\.1"),
    ([1], 0, r"expected levels in 0\.\.0, got 1\.\.1"),
    ([2**32], 32, "expected levels in 0"),
    ([[1]], 2, r"expected flat levels \[n\], got shape \(1, 1\)"),
    ([0], 33, "expected a width of 0 to 32 bits, got width=33"),
    ([0], -1, "expected a width of 0 to 32 bits, got width=-1"),
)
def test_levels_out_of_range_are_named(levels, width, message):
    with pytest.raises(ValueError, match=message):
        codec.pack_levels(np.array(levels, np.int64), width)


@pytest.mark.parametrize("width", [1, 2, 3, 5, 7, 8, 9, 17, 32])
def test_levels_of_another_length_or_with_other_bits_behind_are_refused(width):
    wire = codec.pack_levels(levels_of(11, width), width)
    for other in (wire[:-1], wire + b"\x00", b""):
        expected = rf"of {len(wire)} bytes \(11 levels of {width} bits\), got {len(other)}"
        with pytest.raises(MessageError, match=expected):
            codec.unpack_levels(other, 11, width)
    if width % 8:
        with pytest.raises(MessageError, match=f"expected zero bits after 11 levels of {width} bits"):
            codec.unpack_levels(wire[:-1] + bytes([wire[-1] | 0x80]), 11, width)


@by_rows(
    (codec.pack_float32, codec.unpack_float32, torch.float32, "0000803f000000c0", "floats"),
    (codec.pack_float64, codec.unpack_float64, torch.float64, "000000000000f03f00000000000000c0", "doubles"),
)
def test_floats_are_little_endian_and_come_back_bit_by_bit(pack, unpack, dtype, wire, name):
    good = pack(torch.tensor([1.0, -2.0], dtype=dtype))
    assert good.hex() == wire
    values = normal(Key(2), (100,), dtype)
    back = unpack(pack(values), 100)
    assert back.dtype == dtype
    assert torch.equal(back, values)
    with pytest.raises(MessageError, match=rf"of {len(good)} bytes \(2 {name}\), got {len(good) - 1} bytes"):
        unpack(good[:-1], 2)
    for bad in (math.nan, math.inf):
        with pytest.raises(MessageError, match="expected a finite message, got 1 non-finite entries"):
            unpack(pack(torch.tensor([1.0, bad], dtype=dtype)), 2)


def test_a_reader_cuts_a_message_into_its_parts():
    reader = codec.Reader(b"abcdef")
    assert reader.take(2, "a scale") == b"ab"
    assert reader.left == 4
    assert reader.take(0, "nothing") == b""
    with pytest.raises(MessageError, match="expected a message of 2 bytes, got 6 bytes"):
        reader.done()
    with pytest.raises(MessageError, match="expected 5 bytes of levels at byte 2, got 4 bytes"):
        reader.take(5, "levels")
    assert reader.take(4, "levels") == b"cdef"
    reader.done()


def test_bits_fields_counts_and_unary_numbers_have_the_documented_layout():
    out = codec.BitWriter()
    out.put(np.array([True, False, True]))  # 101
    out.put_number(6, 4)  # 0110, lowest first
    out.put_fields(np.array([1, 2, 0]), np.array([1, 2, 0]))  # lowest bits 1, 0; then the 1 of 2
    out.put_unary(np.array([0, 3, 1]))  # 1 0001 01
    out.put_counts(np.array([4, 6, 0]), 9)  # least length 0, range 3 in 2 bits; lengths 3, 3, 0; lower bits 00, 10
    bits = "101" + "0110" + "101" + "1000101" + "000" + "01" + "110" + "110" + "00" + "01"
    expected = int(bits[::-1], 2).to_bytes(math.ceil(len(bits) / 8), "little")
    assert out.wire() == expected
    source = codec.BitReader(expected)
    assert source.take(3).tolist() == [True, False, True]
    assert source.take_number(4) == 6
    assert source.take_fields(np.array([1, 2, 0])).tolist() == [1, 2, 0]
    assert source.take_unary(3, 7).tolist() == [0, 3, 1]
    assert source.take_counts(3, 9).tolist() == [4, 6, 0]
    source.done()


@given(st.lists(st.integers(0, 2**53 - 1), max_size=20))
def test_counts_of_any_size_come_back(counts):
    out = codec.BitWriter()
    out.put_counts(np.array(counts, np.int64), max(counts, default=0))
    source = codec.BitReader(out.wire())
    assert source.take_counts(len(counts), max(counts, default=0)).tolist() == counts
    source.done()


@pytest.mark.parametrize(("top", "overhead"), [(2047, 7), (2**20, 8), (2**40, 9)])
def test_counts_of_one_size_cost_a_bit_less_than_their_length_each(top, overhead):
    out = codec.BitWriter()
    out.put_counts(np.arange(1024, 2024), top)  # 11 bits each
    assert len(out.wire()) == math.ceil((overhead + 10 * 1000) / 8)


@by_rows(
    (b"\x10", lambda source: source.take(9), "expected 9 bits at bit 0, got 8: the message is cut off"),
    (b"\x10", lambda source: source.take_unary(2, 8), "expected 2 unary integers at bit 0, got 1"),
    (b"\x10", lambda source: source.take_unary(1, 4), "expected 1 unary integers at bit 0, got 0"),
    (b"\x0f" + bytes(20), lambda source: source.take_counts(1, 500), "at most 9 bits, got one of 15 bits"),
    (b"\x05\x00", lambda source: (source.take(3), source.done()), "of 3 bits, then zeros, got 16 bits"),
    (b"\x0d", lambda source: (source.take(3), source.done()), "of 3 bits, then zeros, got 8 bits"),
)
def test_missing_and_left_over_bits_are_refused(wire, read, message):
    with pytest.raises(MessageError, match=message):
        read(codec.BitReader(wire))
