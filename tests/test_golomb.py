"""Round trips, lengths against exact entropies and printed codes, and wires that nobody wrote."""

import math
import tracemalloc

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from leakgauge.defenses._cepam import golomb
from leakgauge.harness.core.codec import BitWriter
from leakgauge.harness.core.errors import MessageError
from leakgauge.harness.core.rng import Key, integers, uniform
from tests.by_rows import by_rows

ROOT = Key(20250301, ("test_golomb",))
N = 200_000
SLACK = 1.02
"""Lengths may exceed the information of what was coded, -log2 of its probability, by this factor."""


def draws(key, n):
    return uniform(key, (n,), dtype=torch.float64).numpy()


def laplace_distribution(zero):
    """A Laplace variable rounded to integers, 0 with probability `zero`."""
    scale = -0.5 / math.log(1 - zero)
    return rounded(stats.laplace(scale=scale), math.ceil(40 * scale) + 2)


def normal_distribution(zero):
    """A normal variable rounded to integers, 0 with probability `zero`."""
    return rounded_normal(0.5 / stats.norm.isf((1 - zero) / 2))


def rounded_normal(std):
    return rounded(stats.norm(scale=std), math.ceil(9 * std) + 2)


def geometric_distribution(std):
    """P(k) ~ t^|k|, of this standard deviation: std^2 = 2 t / (1 - t)^2."""
    t = (1 + std**2 - math.sqrt(1 + 2 * std**2)) / std**2
    last = math.ceil(30 / -math.log(t)) + 2
    weights = t ** np.abs(np.arange(-last, last + 1))
    return weights / weights.sum()


def rounded(distribution, last):
    """Probabilities of -last..last, from the tail that is exact."""
    below = distribution.cdf(np.arange(-last, 1) - 0.5)
    left = np.diff(below)
    weights = np.concatenate([left, [1 - 2 * below[-1]], left[::-1]])
    return weights / weights.sum()


def sample(distributions, n, name):
    """Values, their contexts, the information in the values in bits, its expectation and standard deviation."""
    context = integers(ROOT.child(name, "context"), n, len(distributions))
    u = draws(ROOT.child(name, "values"), n)
    values, bits, mean, variance = np.zeros(n, np.int64), 0.0, 0.0, 0.0
    for number, distribution in enumerate(distributions):
        own = context == number
        index = np.minimum(np.searchsorted(np.cumsum(distribution), u[own]), distribution.size - 1)
        values[own] = index - distribution.size // 2
        cost = -np.log2(distribution, where=distribution > 0, out=np.zeros_like(distribution))
        bits += cost[index].sum()
        entropy = (distribution * cost).sum()
        mean += own.sum() * entropy
        variance += own.sum() * ((distribution * cost**2).sum() - entropy**2)
    return values, context, bits, mean, math.sqrt(variance)


def shares(contexts, low, high):
    """P(0) from low to high, evenly in the logarithm of the rest."""
    return 1 - np.geomspace(1 - low, 1 - high, contexts)


def entropy_of(bits, p):
    """Information in bits of probability p."""
    return -(bits.sum() * math.log2(p) + (~bits).sum() * math.log2(1 - p))


def encode_bits(bits):
    """Bits as integers of one context; checked to come back."""
    context = np.zeros(bits.size, np.int64)
    wire = golomb.encode_integers(bits.astype(np.int64), context)
    assert np.array_equal(golomb.decode_integers(wire, context), bits)
    return wire


def test_bits_cost_at_most_1_45_percent_more_than_their_information():
    for index, p in enumerate([*np.arange(0.02, 1, 0.02), 0.435, 0.315, 0.2451, 0.001, 0.999]):
        bits = draws(ROOT.child("bits", index), N) < p
        # 64: the number of ones, that no integer is above 1 or negative, and the last byte
        assert 8 * len(encode_bits(bits)) - 64 < 1.0145 * entropy_of(bits, p), p


@pytest.mark.parametrize(("p", "excess"), [(1 - math.pi / 4, 0.009), (1 - math.pi / 6, 0.003)])
def test_rejections_of_a_ball_in_a_cube_cost_their_entropy(p, excess):
    # CEPAM, section 1: acceptance pi/4 and pi/6 in two and three dimensions
    bits = draws(ROOT.child("ball", str(p)), N) < p
    assert 1 - 2e-5 < 8 * len(encode_bits(bits)) / entropy_of(bits, p) < 1 + excess
    # the twin: the distribution of p = 0.2146 needs its code, that of 0.476 hardly
    assert (entropy_of(bits, p) * SLACK < N) == (p < 0.3)


@pytest.mark.parametrize("count", [0, 1, 2, 3, 17, 18, 1001])
def test_bits_of_every_share_and_length_come_back(count):
    for ones in {0, 1, 2, count // 4, count // 3, 2 * count // 5, count // 2, 2 * count // 3, count - 1, count}:
        encode_bits(np.argsort(draws(ROOT.child("share", count, ones), count)) < ones)


DISTRIBUTIONS = {
    **{f"Laplace in {n}": [laplace_distribution(p) for p in shares(n, 0.3, 0.999)] for n in (16, 64)},
    **{f"normal in {n}": [normal_distribution(p) for p in shares(n, 0.3, 0.999)] for n in (16, 64)},
    **{f"geometric in {n}": [geometric_distribution(std) for std in np.geomspace(0.3, 50, n)] for n in (16, 64)},
    "dense normal in 32": [rounded_normal(std) for std in np.geomspace(0.5, 50, 32)],
}


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_integers_cost_at_most_two_percent_more_than_their_information(name):
    values, context, information, entropy, std = sample(DISTRIBUTIONS[name], N, name)
    # 4.9 standard deviations: a false alarm in 1e6 samples; so the length is that close to the entropy of the
    # distribution
    assert abs(information - entropy) < 4.9 * std
    wire = golomb.encode_integers(values, context)
    assert 8 * len(wire) < SLACK * information
    assert np.array_equal(golomb.decode_integers(wire, context), values)
    # the twin: with all contexts in one, the same test fails by far
    merged = golomb.encode_integers(values, np.zeros_like(context))
    assert 8 * len(merged) > 1.15 * information
    assert np.array_equal(golomb.decode_integers(merged, np.zeros_like(context)), values)


@pytest.mark.parametrize("distribution", [0.35, 0.5, 0.6, 0.62, 0.65, 0.7, 0.755, 0.82, 0.9, 0.97, 0.995])
def test_one_distribution_costs_at_most_one_and_a_half_percent_more(distribution):
    for name, weights in (("l", laplace_distribution(distribution)), ("n", normal_distribution(distribution))):
        values, context, information, _, _ = sample([weights], N, f"{name} {distribution}")
        assert 8 * len(golomb.encode_integers(values, context)) < 1.015 * information + 40


def test_dense_integers_send_their_low_bits_as_they_are_and_cost_at_most_one_percent_more():
    distributions = [rounded_normal(std) for std in np.geomspace(20, 60, 64)]
    values, context, information, _, _ = sample(distributions, N, "dense")
    assert 8 * len(golomb.encode_integers(values, context)) < 1.01 * information


def test_signs_that_the_context_tells_cost_nothing():
    # rounding with a known dither: 0 or 1 where the dither is positive, 0 or -1 where it is negative
    sizes = (draws(ROOT.child("signs"), N) < 0.2).astype(np.int64)
    side = integers(ROOT.child("side"), N, 2)
    together = golomb.encode_integers(np.where(side == 1, sizes, -sizes), np.zeros(N, np.int64))
    apart = golomb.encode_integers(np.where(side == 1, sizes, -sizes), side)
    assert len(together) - len(apart) > 0.99 * sizes.sum() / 8
    assert len(apart) - len(golomb.encode_integers(sizes, side)) < 4


def test_one_outlier_costs_less_than_thirty_bytes():
    values = sample([normal_distribution(0.6)], 10_000, "outlier")[0]
    context = np.arange(10_000) % 4
    without = len(golomb.encode_integers(values, context))
    values[1234] = -(10**12)
    wire = golomb.encode_integers(values, context)
    assert len(wire) < without + 30
    assert np.array_equal(golomb.decode_integers(wire, context), values)


@pytest.mark.parametrize("step", [1, 3, 1000, 100_000])
def test_contexts_that_do_not_occur_cost_nothing(step):
    values, context = sample([laplace_distribution(0.9)] * 8, 3000, "empty")[:2]
    wire = golomb.encode_integers(values, context)
    assert golomb.encode_integers(values, step * context + step) == wire
    assert np.array_equal(golomb.decode_integers(wire, step * context), values)


def test_ten_thousand_zeros_in_sixteen_contexts_cost_four_bytes():
    assert len(golomb.encode_integers(np.zeros(10_000, np.int64), np.arange(10_000) % 16)) <= 4


EDGES = [[], [0], [1], [-1], [0] * 100, [7] * 9, [-3] * 50, [-127, 3], [-128, 127], [128], list(range(-40, 40))]
EDGES += [[15, 16, 17, 18, 31, 32, 33, 255, 256, 257] * 5, [0] * 1000 + [10**12], [2**53 - 1, 1 - 2**53]]
EDGES += [[2**53 - 1] * 40, [2**k for k in range(53)], [1 - 2**k for k in range(54)]]


@pytest.mark.parametrize("values", EDGES, ids=lambda values: f"{len(values)} from {min(values, default=None)}")
def test_edge_cases_come_back(values):
    values = np.array(values, np.int64)
    for contexts in (1, 3, 300, 70_000):
        kept, context = values.copy(), np.arange(values.size) * 7919 % contexts
        back = golomb.decode_integers(golomb.encode_integers(values, context), context)
        assert back.dtype == (np.int8 if np.abs(kept).max(initial=0) < 16 else np.int64)
        assert np.array_equal(back, kept)
        assert np.array_equal(values, kept)


@by_rows([0.9, 0.05, 0.05], [0.3, 0.4, 0.3], ids=["one context prevails", "none does"])
def test_blocks_change_nothing(distributions, monkeypatch):
    values = integers(ROOT.child("blocks"), 1000, 7) - 3
    context = np.searchsorted(np.cumsum(distributions), uniform(ROOT.child("blocks", "of"), (1000,)).numpy()) * 3
    wire = golomb.encode_integers(values, context)
    for block in (1, 77, 250, 999):  # a last block of each kind: whole, partial, of one symbol
        monkeypatch.setattr(golomb, "_BLOCK", block)
        assert golomb.encode_integers(values, context) == wire
        assert np.array_equal(golomb.decode_integers(wire, context), values)


@given(st.lists(st.tuples(st.sampled_from([-1, 0, 1, 1, 40, -5000]), st.integers(0, 3)), max_size=60))
def test_decoding_undoes_encoding(pairs):
    values, context = np.array(pairs, np.int64).reshape(-1, 2).T
    assert np.array_equal(golomb.decode_integers(golomb.encode_integers(values, context), context), values)


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int32, np.uint64])
def test_integers_of_any_size_are_coded_alike(dtype):
    values = integers(ROOT.child("dtypes"), 500, 100)
    context = integers(ROOT.child("context"), 500, 3)
    wire = golomb.encode_integers(values, context)
    assert golomb.encode_integers(values.astype(dtype), context.astype(dtype)) == wire


@by_rows(
    ([2**53], [0], r"expected magnitudes below 2\*\*53, got 9007199254740992"),
    ([-(2**53)], [0], r"expected magnitudes below 2\*\*53"),
    ([0.5], [0], r"expected flat integers \[n\], got float64"),
    ([[1]], [0], r"of shape \(1, 1\)"),
    ([1, 2], [0], r"expected 2 contexts >= 0, got shape \(1,\)"),
    ([1], [-1], r"expected 1 contexts >= 0, got shape \(1,\) from -1"),
)
def test_integers_and_contexts_out_of_range_are_named(values, context, message):
    with pytest.raises(ValueError, match=message):
        golomb.encode_integers(np.array(values), np.array(context))


def wires():
    """A wire of each kind, with the function that reads it."""
    values, context = sample(
        [laplace_distribution(0.6), geometric_distribution(30.0), normal_distribution(0.95)], 600, "corrupt"
    )[:2]
    one = np.zeros(600, np.int64)
    paired = (draws(ROOT.child("corrupt bits"), 600) < 0.38).astype(np.int64)
    kinds = [(values, context), (-np.abs(values), context), (paired, one)]
    return [
        (golomb.encode_integers(*kind), lambda wire, known=kind[1]: golomb.decode_integers(wire, known))
        for kind in kinds
    ]


@pytest.mark.parametrize("kind", range(3))
def test_a_wire_that_is_cut_off_or_goes_on_is_refused(kind):
    wire, decode = wires()[kind]
    assert decode(wire).shape == (600,)
    for end in range(len(wire)):
        with pytest.raises(MessageError, match="expected"):
            decode(wire[:end])
    for more in (b"\x00", b"\x01", bytes(1000)):
        with pytest.raises(MessageError, match="expected"):
            decode(wire + more)


@pytest.mark.parametrize("kind", range(3))
def test_a_corrupt_wire_is_refused_or_decodes_to_something_of_the_right_shape(kind):
    wire, decode = wires()[kind]
    noise = integers(ROOT.child("noise", kind), 3000, 256).astype(np.uint8).tobytes()
    flipped = [bytes([*wire[:at], wire[at] ^ 1 << at % 8, *wire[at + 1 :]]) for at in range(len(wire))]
    refused = 0
    for bad in [*flipped, *(noise[start : start + 200] for start in range(0, 2800, 7)), b"\xff" * 500, bytes(500)]:
        try:
            assert decode(bad).shape == (600,)
        except MessageError:
            refused += 1
    assert refused > 100


def test_fair_bits_that_do_not_have_the_stated_number_of_ones_are_refused():
    wire = encode_bits(draws(ROOT.child("fair"), 600) < 0.5)
    for at in range(4, 78):  # after the counts, before what is coded of the signs
        with pytest.raises(MessageError, match="expected bits with the stated numbers of ones"):
            golomb.decode_integers(bytes([*wire[:at], wire[at] ^ 1, *wire[at + 1 :]]), np.zeros(600, np.int64))


@by_rows((53, 67, r"below 2\*\*53, got one with 105 low"), (0, 68, "at most 68 buckets"))
def test_an_integer_beyond_the_largest_is_refused(shift, questions, message):
    out = BitWriter()
    out.put_counts(np.array([shift]), 53)
    for answer in [1] * questions + [0]:
        out.put_counts(np.array([answer]), 1)
    with pytest.raises(MessageError, match=message):
        golomb.decode_integers(out.wire() + bytes(20), np.array([0]))


def test_a_short_wire_cannot_ask_for_much_memory():
    context = np.zeros(10**5, np.int64)
    noise = integers(ROOT.child("memory"), 4000, 256).astype(np.uint8).tobytes()
    tracemalloc.start()
    for wire in [noise[start : start + 40] for start in range(0, 4000, 40)] + [b"\xff" * 40, b"\x7f" * 40]:
        with pytest.raises(MessageError):
            golomb.decode_integers(wire, context)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 100 * context.size
