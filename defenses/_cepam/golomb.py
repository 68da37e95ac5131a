"""Entropy coding of signed integers and biased bits by run lengths, using only array operations.

An integer becomes a string of bits: whether it is beyond bucket 0, beyond bucket 1, and so on; then its place in its
bucket; then its sign. All answers to one question in one context form a segment, whose bits have the same distribution.
Both sides know the length of a segment. Only its number of ones is sent; this number selects the code. The decoder
derives parameters only by operations that every machine rounds alike.

| share of the rarer bit | code | length above the entropy |
|---|---|---|
| > 43.5 % | the bits themselves | < 1.25 % |
| > 31.5 % | pairs: equal or not; the first bit of unequal pairs; the common bit of equal pairs by run lengths | < 1 % |
| else | the gaps between the rarer bits by a Golomb code; the last gap follows from the length | < 1.45 % |

Golomb codes are laid out for array operations: all remainders, then all quotients in unary.

Source: Golomb 1966, "Run-length encodings"; Gallager & Van Voorhis 1975, "Optimal source codes for geometrically
distributed integer alphabets" (the parameter); Peres 1992, "Iterating von Neumann's procedure" (the pairs).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from leakgauge.harness.core.codec import BitReader, Bits, BitWriter, Integers, gaps_before
from leakgauge.harness.core.errors import MessageError

Ints = npt.NDArray[np.int64]
Symbols = npt.NDArray[Any]

# Number of buckets with one cell. The next bucket has 2 cells, and each later one twice as many as the one before
_LINEAR = 16
_SPARE = np.maximum(0, np.arange(_LINEAR + 52) - _LINEAR + 1)  # number of bits that number the cells of each bucket
_START = np.where(_SPARE > 0, _LINEAR - 2 + (1 << _SPARE), np.arange(_SPARE.size))  # first cell of each bucket
_CELLS = 256  # number of cells that the choice of a shift distinguishes; all later cells count as one cell
_BLOCK = 1 << 18  # number of symbols sorted at a time, few enough to stay in the cache
_SAMPLE = 1 << 10  # number of symbols in which the most frequent context is sought


def encode_integers(values: Integers, context: Integers) -> bytes:
    """Encode signed integers in about as many bits as their empirical entropy given the context.

    Args:
        values: [n], of magnitude below 2**53.
        context: [n] in 0..C-1. The decoder knows the contexts, so they are not sent. A context that does not occur
            costs nothing.

    Raises:
        ValueError: a value or a context is out of range, or the shapes differ.
    """
    if values.ndim != 1 or not np.issubdtype(values.dtype, np.integer):
        raise ValueError(f"expected flat integers [n], got {values.dtype} of shape {values.shape}")
    if values.max(initial=0) >= 2**53 or values.min(initial=0) <= -(2**53):
        raise ValueError(f"expected magnitudes below 2**53, got {int(values.min())}..{int(values.max())}")
    groups = _Groups(context, values.size)
    sizes, peak = groups.sizes, max(int(values.max(initial=0)), -int(values.min(initial=0)))
    # gathering small integers takes half the time
    grouped = groups.gather(values.astype(np.min_scalar_type(-peak - 1), copy=False))
    magnitudes = np.abs(grouped)
    out, shifts = BitWriter(), _choose_shifts(magnitudes, sizes, peak)
    out.put_counts(shifts, 53)
    if peak >= _LINEAR:
        spread = shifts.repeat(sizes)
        bucket = _bucket(magnitudes >> spread)
        _put_buckets(out, bucket, sizes)
        out.put_fields(magnitudes - (_START[bucket] << spread), spread + _SPARE[bucket])
    else:
        _put_buckets(out, magnitudes.astype(np.uint8, copy=False), sizes)
    _put_signs(out, grouped, sizes)
    return out.wire()


def decode_integers(wire: bytes, context: Integers) -> Integers:
    """Decode the values [n] of `encode_integers`, given the same `context` [n]; int8 if all are below 16, else int64.

    Raises:
        MessageError: not a message of `encode_integers`.
        ValueError: a context is out of range.
    """
    groups = _Groups(context, context.size)
    source, sizes = BitReader(wire), groups.sizes
    shifts = source.take_counts(sizes.size, 53)
    bucket = _take_buckets(source, sizes)
    magnitudes: Integers = bucket.view(np.int8)
    if shifts.any() or bucket.max(initial=0) >= _LINEAR:
        spread = shifts.repeat(sizes)
        widths = spread + _SPARE[bucket]
        if (top := int(widths.max(initial=0))) > 53:
            raise MessageError(f"expected integers below 2**53, got one with {top} low bits")
        magnitudes = (_START[bucket] << spread) + source.take_fields(widths)
    values = groups.scatter(_take_signs(source, magnitudes, sizes))
    source.done()
    return values


def _put_ones(out: BitWriter, ones: Ints, sizes: Ints) -> None:
    """Append the number of ones of each segment that is not empty."""
    out.put_counts(ones[sizes > 0], int(sizes.max(initial=0)))


def _take_ones(source: BitReader, sizes: Ints) -> Ints:
    ones, live = np.zeros(sizes.size, np.int64), sizes > 0
    ones[live] = source.take_counts(int(np.count_nonzero(live)), int(sizes.max(initial=0)))
    if (ones > sizes).any():
        raise MessageError(f"expected at most {int(sizes[ones > sizes][0])} ones, got {int(ones[ones > sizes][0])}")
    return ones


class _Groups:
    """Symbols grouped by their contexts [count], each group in the order of its symbols; sorted block by block.

    sizes: number of symbols of each context that occurs, in increasing order of the contexts.

    Raises:
        ValueError: a context is below 0, or their number is not `count`.
    """

    def __init__(self, context: Integers, count: int) -> None:
        if context.shape != (count,) or context.min(initial=0) < 0:
            raise ValueError(f"expected {count} contexts >= 0, got shape {context.shape} from {context.min(initial=0)}")
        # numpy sorts integers of 8 and 16 bits by radix, which is many times faster
        narrow = context.astype(np.min_scalar_type(context.max(initial=0)), copy=False)
        # more contexts would cut blocks into too many pieces
        size = _BLOCK if narrow.dtype == np.uint8 else max(count, 1)
        self._blocks = [(slice(start, start + size), narrow[start : start + size]) for start in range(0, count, size)]
        # the dominant context, if there is one
        first = np.bincount(narrow[:_SAMPLE], minlength=1)
        self._usual = int(first.argmax()) if 4 * first.max() > 3 * first.sum() else -1
        counts = [self._count(block) for _, block in self._blocks]
        self._counts = np.stack(counts) if counts else np.zeros((1, 1), np.int64)
        sizes = self._counts.sum(0)
        self.sizes: Ints = sizes[sizes > 0]

    def gather(self, values: Integers) -> Integers:
        grouped = np.empty_like(values)
        for (span, contexts), places in zip(self._blocks, self._places(), strict=False):
            _put_back(grouped, places, np.concatenate([values[span].take(order) for order in self._orders(contexts)]))
        return grouped

    def scatter(self, grouped: Integers) -> Integers:
        values = np.empty_like(grouped)
        for (span, contexts), places in zip(self._blocks, self._places(), strict=False):
            block, at = _joined(grouped, places), 0
            for order in self._orders(contexts):
                values[span][order] = block[at : (at := at + order.size)]
        return values

    def _count(self, contexts: Integers) -> Ints:
        """How often each context occurs; with a single block, only contexts that occur."""
        if contexts.dtype != np.uint8:
            return np.unique(contexts, return_counts=True)[1]
        if self._usual < 0:
            return np.bincount(contexts, minlength=256)
        others = contexts[contexts != self._usual]
        counts = np.bincount(others, minlength=256)
        counts[self._usual] = contexts.size - others.size
        return counts

    def _orders(self, contexts: Integers) -> list[Ints]:
        """The stable order of contexts, cut into pieces."""
        if self._usual < 0:
            return [np.argsort(contexts, kind="stable")]
        # in a sort, each symbol would wait for the counter of the dominant context
        usual = contexts == self._usual
        others = (~usual).nonzero()[0]
        others = others.take(np.argsort(contexts.take(others), kind="stable"))
        below = np.count_nonzero(contexts < self._usual)
        return [others[:below], usual.nonzero()[0], others[below:]]

    def _places(self) -> Iterator[list[slice]]:
        """For each block, the places of its part of each context among the grouped symbols."""
        ends = self._counts.T.cumsum().reshape(self._counts.T.shape).T
        for end, count in zip(ends, self._counts, strict=True):
            pairs = zip(end.tolist(), count.tolist(), strict=True)
            yield [slice(last - size, last) for last, size in pairs if size]


def _ones_in(sizes: Ints, at: Ints) -> Ints:
    """Number of ones in each segment, from their increasing places."""
    before = np.searchsorted(at, sizes.cumsum())
    before[1:] -= before[:-1].copy()
    return before


def _segments(mask: Bits, sizes: Ints) -> list[slice]:
    ends = sizes.cumsum()
    return [slice(start, end) for start, end in zip((ends - sizes)[mask].tolist(), ends[mask].tolist(), strict=True)]


def _joined(bits: Symbols, segments: list[slice]) -> Symbols:
    return np.concatenate([bits[segment] for segment in segments]) if segments else bits[:0]


def _put_back(bits: Symbols, segments: list[slice], joined: Symbols) -> None:
    at = 0
    for segment in segments:
        bits[segment] = joined[at : (at := at + segment.stop - segment.start)]


def _choose_shifts(magnitudes: Integers, sizes: Ints, peak: int) -> Ints:
    """How many low bits of each context's magnitudes are sent uncoded, chosen for the shortest message."""
    base = np.zeros(sizes.size, np.int64)
    if peak < _LINEAR:
        return base
    if peak >= _CELLS:
        # the mean logarithm instead of the mean, so that one outlier does not shift a context of small numbers
        logs = np.frexp(magnitudes.astype(np.float64))[1]
        base = np.maximum(0, np.add.reduceat(logs, sizes.cumsum() - sizes, dtype=np.int64) // sizes - 5)
    cells = np.minimum(magnitudes >> base.repeat(sizes), _CELLS - 1)
    cells += (np.arange(sizes.size) * _CELLS).repeat(sizes)
    counts = np.bincount(cells, minlength=sizes.size * _CELLS)
    tables = [counts.reshape(sizes.size, -1, 1 << shift).sum(-1) for shift in range(6)]
    # up to a common term: 12 bits for each number of ones, plus the entropy of the cells
    costs = [12 * np.count_nonzero(table, axis=1) - _weighted_logs(table).sum(-1) for table in tables]
    base += np.argmin(np.stack(costs) + np.outer(np.arange(6), sizes), axis=0)
    return base


def _weighted_logs(counts: Ints) -> npt.NDArray[np.float64]:
    return np.asarray(counts * np.log2(np.maximum(counts, 1)))


def _bucket(cells: Ints) -> npt.NDArray[np.uint8]:
    bucket = np.minimum(cells, _LINEAR).astype(np.uint8)
    far = (cells >= _LINEAR).nonzero()[0]
    # the exponent that frexp returns is the bit length
    bucket[far] = np.frexp((cells[far] - (_LINEAR - 2)).astype(np.float64))[1] + (_LINEAR - 2)
    return bucket


def _put_buckets(out: BitWriter, bucket: npt.NDArray[np.uint8], sizes: Ints) -> None:
    """Append the answers to "beyond bucket k?" for k = 0, 1, ..., each for the symbols beyond bucket k - 1."""
    parts, lengths = [], [sizes]
    for question in range(_SPARE.size):
        beyond = bucket > question
        at = beyond.nonzero()[0]
        ones = _ones_in(lengths[-1], at)
        _put_ones(out, ones, lengths[-1])
        if not ones.any():
            break
        parts.append(beyond)
        lengths.append(ones)
        bucket = bucket[at]
    if parts:
        _put_segments(out, np.concatenate(parts), np.concatenate(lengths[:-1]), np.concatenate(lengths[1:]))


def _take_buckets(source: BitReader, sizes: Ints) -> npt.NDArray[np.uint8]:
    lengths = [sizes]
    while (ones := _take_ones(source, lengths[-1])).any():
        lengths.append(ones)
        if len(lengths) > _SPARE.size:
            raise MessageError(f"expected at most {_SPARE.size} buckets, got more")
    bucket = np.zeros(int(lengths[-1].sum()), np.uint8)
    if len(lengths) == 1:
        return bucket
    bits = _take_segments(source, np.concatenate(lengths[:-1]), np.concatenate(lengths[1:]))
    cuts = np.cumsum([int(length.sum()) for length in lengths[:-2]])
    for beyond in reversed(np.split(bits, cuts)):
        deeper, bucket = bucket, beyond.view(np.uint8)
        bucket[beyond.nonzero()[0]] += deeper
    return bucket


def _put_signs(out: BitWriter, values: Integers, sizes: Ints) -> None:
    """Append one bit for the code of the signs, uncoded or biased, then the signs of the non-zero values."""
    live = (values != 0).nonzero()[0]
    signs = values[live] < 0
    lengths = _ones_in(sizes, live)
    ones = _ones_in(lengths, signs.nonzero()[0])
    entropy = (_weighted_logs(lengths) - _weighted_logs(ones) - _weighted_logs(lengths - ones)).sum()
    biased = 1.02 * entropy + 9 + np.log2(2 * ones + 2).sum() < signs.size
    out.put_number(int(biased), 1)
    if biased:
        _put_ones(out, ones, lengths)
        _put_segments(out, signs, lengths, ones)
    else:
        out.put(signs)


def _take_signs(source: BitReader, magnitudes: Integers, sizes: Ints) -> Integers:
    """Apply the signs that `_put_signs` wrote to the magnitudes, in place."""
    live = (magnitudes != 0).nonzero()[0]
    if source.take_number(1):
        lengths = _ones_in(sizes, live)
        signs = _take_segments(source, lengths, _take_ones(source, lengths))
    else:
        signs = source.take(live.size)
    magnitudes[live[signs.nonzero()[0]]] *= -1
    return magnitudes


def _kinds(sizes: Ints, ones: Ints) -> tuple[Bits, Bits, Bits]:
    """Masks of the segments sent uncoded, in pairs and by run lengths, by the table of the module."""
    rare = np.minimum(ones, sizes - ones)
    plain, runs = 1000 * rare > 435 * sizes, 1000 * rare <= 315 * sizes
    return plain, ~plain & ~runs, runs


def _put_segments(out: BitWriter, bits: Bits, sizes: Ints, ones: Ints) -> None:
    """Append segments of bits, each with one distribution; the decoder knows `sizes` and `ones`."""
    plain, paired, runs = _kinds(sizes, ones)
    out.put(_joined(bits, _segments(plain, sizes)))
    rest, lengths = _joined(bits, _segments(paired, sizes)), sizes[paired]
    # the last bit of a segment of odd length has no partner
    last, halves = (lengths.cumsum() - 1)[lengths % 2 == 1], lengths // 2
    first, second = np.delete(rest, last).reshape(-1, 2).T
    equal = first == second
    for coin in (rest[last], equal, first[~equal]):
        out.put(coin)
    coded = np.concatenate([_joined(bits, _segments(runs, sizes)), first[equal]])
    both, same = (_ones_in(halves, which.nonzero()[0]) for which in (first & second, equal))
    _put_runs(out, coded, np.concatenate([sizes[runs], same]), np.concatenate([ones[runs], both]))


def _take_segments(source: BitReader, sizes: Ints, ones: Ints) -> Bits:
    plain, paired, runs = _kinds(sizes, ones)
    bits = np.empty(int(sizes.sum()), np.bool_)
    _put_back(bits, _segments(plain, sizes), source.take(int(sizes[plain].sum())))
    odd, halves = sizes[paired] % 2 == 1, sizes[paired] // 2
    last = (sizes[paired].cumsum() - 1)[odd]
    single = source.take(last.size)
    equal = source.take(int(halves.sum()))
    first = np.empty(equal.size, np.bool_)
    first[~equal] = source.take(int(np.count_nonzero(~equal)))
    lengths = _ones_in(halves, equal.nonzero()[0])
    # a pair of ones counts two, and an unequal pair one
    twice = ones[paired] - (halves - lengths)
    twice[odd] -= single
    counts = np.concatenate([ones[runs], np.clip(twice // 2, 0, lengths)])
    decoded = _take_runs(source, np.concatenate([sizes[runs], lengths]), counts)
    coded, first[equal] = np.split(decoded, [int(sizes[runs].sum())])
    _put_back(bits, _segments(runs, sizes), coded)
    pairs = np.stack([first, first == equal], axis=1).reshape(-1)
    _put_back(bits, _segments(paired, sizes), np.insert(pairs, last - np.arange(last.size), single))
    if (_ones_in(sizes, bits.nonzero()[0]) != ones).any():
        raise MessageError("expected bits with the stated numbers of ones, got other numbers")
    return bits


def _put_runs(out: BitWriter, bits: Bits, sizes: Ints, ones: Ints) -> None:
    """Append the gaps between the rarer bits of each segment."""
    rare, swapped = np.minimum(ones, sizes - ones), 2 * ones > sizes
    at = (bits ^ swapped.repeat(sizes) if swapped.any() else bits).nonzero()[0]
    gaps = gaps_before(at)
    live = rare > 0
    first = (rare.cumsum() - rare)[live]
    gaps[first] = at[first] - (sizes.cumsum() - sizes)[live]
    _put_golomb(out, gaps, _gap_m(sizes, rare), rare)


def _take_runs(source: BitReader, sizes: Ints, ones: Ints) -> Bits:
    rare, swapped = np.minimum(ones, sizes - ones), 2 * ones > sizes
    m = _gap_m(sizes, rare)
    gaps = _take_golomb(source, m, rare, int((rare + (sizes - rare) // m).sum()))
    bits = np.zeros(int(sizes.sum()), np.bool_)
    live = rare > 0
    ends = (gaps + 1).cumsum()
    after = ends[rare.cumsum()[live] - 1]
    used = np.diff(after, prepend=0)
    if (used > sizes[live]).any():
        raise MessageError("expected runs that end in their segment, got a longer one")
    bits[ends - 1 + ((sizes.cumsum() - sizes)[live] - (after - used)).repeat(rare[live])] = True
    return bits ^ swapped.repeat(sizes) if swapped.any() else bits


def _gap_m(sizes: Ints, rare: Ints) -> Ints:
    """The smallest m with p^m + p^(m+1) <= 1, up to rounding; p: share of the frequent bit (Gallager & Van Voorhis)."""
    share = np.maximum(rare, 1) / np.maximum(sizes, 2)
    # log(2 - q) / -log(1 - q) for q = 1 - p, both expanded in q / 2, because logarithms differ between machines;
    # exact to a hundredth of m for all q <= 1/2
    return np.maximum(1, np.ceil((0.6931472 - share / 2 - share**2 / 8) * (1 - share / 2) / share)).astype(np.int64)


def _binary(m: Ints) -> tuple[Ints, Ints]:
    """Number of bits of every remainder modulo m, and the first remainder that needs one more bit."""
    width = np.frexp((m - 1).astype(np.float64))[1].astype(np.int64)
    return np.maximum(width - 1, 0), np.where(m == 1, 1, (1 << width) - m)


def _put_golomb(out: BitWriter, values: Ints, m: Ints, counts: Ints) -> None:
    """Append Golomb codes of values, the first counts[0] with parameter m[0], and so on."""
    width, short = (of.repeat(counts) for of in _binary(m))
    quotient, remainder = np.divmod(values, m.repeat(counts))
    long = remainder >= short
    doubled = np.where(long, remainder + short, 2 * remainder)
    out.put_fields(doubled >> 1, width)
    out.put(doubled[long] & 1 != 0)
    out.put_unary(quotient)


def _take_golomb(source: BitReader, m: Ints, counts: Ints, limit: int) -> Ints:
    """Undo `_put_golomb`, whose quotients took at most `limit` bits."""
    count = int(counts.sum())
    # checked before memory is allocated: each codeword takes at least one bit
    if count > source.left:
        raise MessageError(f"expected {count} codewords, got {source.left} bits: the message is cut off")
    width, short = (of.repeat(counts) for of in _binary(m))
    remainder = source.take_fields(width)
    long = (remainder >= short).nonzero()[0]
    remainder[long] += remainder[long] - short[long] + source.take(long.size)
    return source.take_unary(count, limit) * m.repeat(counts) + remainder
