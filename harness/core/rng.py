"""Randomness as a tree of named keys.

A key is a name, not a stream: its numbers depend on the seed and the path alone, not on the order of work, resuming,
chunking or the number of processes. Draws come from numpy's Philox, keyed with 128 bits of SHA-256(seed, path). A CPU
`torch.Generator` uses only 32 bits of its seed: two of 10^5 hashed streams would collide with probability 0.69.

Use each key for one draw; for two draws take two children.

`uniform32` and `signed_exponential` are faster than `uniform` and `laplace` but draw other numbers. `uniform32`,
`signed_exponential`, `gamma` and `chisquare` avoid vectorized logarithms, whose last bit depends on the processor; they
use arithmetic and numpy's rejection samplers, so client and server get the same bits from the same key.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from numpy.random import bit_generator
from torch import Tensor

_NUMPY = {torch.float32: np.float32, torch.float64: np.float64}

LARGE = 1 << 20
"""Number of elements above which a subset is drawn block by block; smaller subsets are drawn as before."""

_BLOCK = 1 << 15  # numbers drawn at a time; small enough that intermediate results stay in the processor's cache


@dataclass(frozen=True)
class Key:
    """A name in the tree of randomness.

    One client knows its `private` keys; client and server know the `shared` keys. Parameters that take a key have these
    names. Equal keys draw equal numbers on every machine with the same numpy.
    """

    seed: int
    path: tuple[str | int, ...] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.seed, int) or isinstance(self.seed, bool):
            raise TypeError(f"expected an integer seed, got {self.seed!r}")

    def child(self, *parts: str | int) -> Key:
        """The key named `parts` below this one."""
        child = object.__new__(Key)  # skips the seed check for speed: a federation makes several keys per message
        content = child.__dict__
        content["seed"], content["path"] = self.seed, self.path + parts
        content["text"] = self.text + "".join(map(_text, parts))
        return child

    @functools.cached_property
    def text(self) -> str:
        """The path as entries of a JSON list, each followed by a comma: different paths have different texts."""
        return "".join(map(_text, self.path))


@functools.lru_cache(1 << 16, typed=True)
def _text(part: str | int) -> str:
    """A part of a path as JSON, which distinguishes 1 from "1", and a comma."""
    return f"{json.dumps(part)},"


class _Streams(threading.local):
    """The generator of a thread; setting its state takes a third of the time of making a new generator."""

    def __init__(self) -> None:
        self.generator = np.random.Generator(np.random.Philox(0))
        self.start = self.generator.bit_generator.state
        self.shared = np.random.Generator(np.random.SFC64(0))
        self.shared_start = self.shared.bit_generator.state
        self.recorded: set[Key] | None = None


_STREAMS = _Streams()


def _digest(key: Key) -> bytes:
    """128 bits of SHA-256(seed, path)."""
    if _STREAMS.recorded is not None:
        _STREAMS.recorded.add(key)
    return hashlib.sha256(f"[{key.seed},[{key.text[:-1]}]]".encode()).digest()[:16]


@contextmanager
def recorded() -> Iterator[set[Key]]:
    """The keys from which this thread draws inside the block."""
    outer, _STREAMS.recorded = _STREAMS.recorded, set()
    try:
        yield _STREAMS.recorded
    finally:
        _STREAMS.recorded = outer


def _generator(key: Key) -> np.random.Generator:
    """The stream of `key`: Philox with a 128-bit key. The next call in this thread reuses the same generator."""
    state = _STREAMS.start
    state["state"]["key"] = np.frombuffer(_digest(key), "<u8")
    _STREAMS.generator.bit_generator.state = state
    return _STREAMS.generator


def shared_stream(key: Key) -> np.random.Generator:
    """A stream for numbers that the adversary may know, such as shared dithers: SFC64, in .4 to .7 of Philox's time.

    The next call in this thread reuses the same generator.
    """
    state = _STREAMS.shared_start
    words = np.frombuffer(_digest(key) + _digest(key.child("shared")), "<u8")
    state["state"]["state"] = np.concatenate([words[:3], np.ones(1, np.uint64)])
    _STREAMS.shared.bit_generator.state = state
    _STREAMS.shared.bit_generator.random_raw(12, output=False)  # as numpy does after seeding
    return _STREAMS.shared


def _tensor(drawn: npt.NDArray[np.float64], dtype: torch.dtype) -> Tensor:
    """The draws as a tensor; for few numbers, numpy casts in a third of torch's time."""
    return torch.from_numpy(drawn.astype(_NUMPY[dtype], copy=False))


def global_states() -> dict[str, bytes]:
    """The states of this process's global generators, from which nothing may draw, by the names that users know."""
    words = np.random.get_state(legacy=False)["state"]
    return {
        "torch": torch.get_rng_state().numpy().tobytes(),
        "numpy.random": words["key"].tobytes() + bytes([words["pos"] % 256, words["pos"] // 256]),
        "random": repr(random.getstate()).encode(),
    }


def normal(key: Key, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
    """Standard normal draws of the given shape; drawn as float64, then cast."""
    return _tensor(_generator(key).standard_normal(shape), dtype)


def uniform(
    key: Key, shape: tuple[int, ...], low: float = 0.0, high: float = 1.0, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Uniform draws from [low, high) of the given shape; drawn as float64, then cast."""
    stream = _generator(key)
    # `random` draws the same numbers in half the time
    drawn = stream.random(shape) if (low, high) == (0.0, 1.0) else stream.uniform(low, high, shape)
    return _tensor(drawn, dtype)


def laplace(key: Key, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
    """Laplace draws of scale 1 (variance 2) of the given shape; drawn as float64, then cast."""
    return _tensor(_generator(key).laplace(0.0, 1.0, shape), dtype)


def uniform32(key: Key, shape: tuple[int, ...], low: float = 0.0, high: float = 1.0) -> Tensor:
    """Uniform float32 draws from [low, high): low + (high - low) * k / 2^24, k = 0..2^24-1; faster than `uniform`.

    Exact and below `high` if low = 0 or -1/2 and high - low = 1; otherwise each step rounds to float32.
    """
    drawn = _generator(key).random(shape, np.float32)
    if high - low != 1:
        drawn *= high - low
    if low != 0:
        drawn += low
    return torch.from_numpy(drawn)


def signed_exponential(key: Key, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
    """Laplace draws of scale 1 (variance 2) as float64, then cast; same distribution as `laplace`, in under half its
    time.

    The tail is correct up to 44, exceeded with probability 2^-64; inverting a 24-bit uniform would end at 16.6.
    """
    stream = _generator(key)
    drawn = stream.standard_exponential(shape)
    coins = np.unpackbits(stream.integers(0, 256, (drawn.size + 7) // 8, np.uint8), count=drawn.size).view(np.int8)
    drawn *= (2 * coins - 1).reshape(shape)
    return _tensor(drawn, dtype)


def gamma(key: Key, shape_parameter: float, shape: tuple[int, ...], *, shared: bool = False) -> Tensor:
    """Gamma draws of scale 1 (mean `shape_parameter`) of the given shape, float64.

    shared: draw from `shared_stream`, because the adversary may know the numbers.

    Raises:
        ValueError: shape_parameter is not a positive finite number.
    """
    if not 0 < shape_parameter < math.inf:
        raise ValueError(f"expected a finite shape parameter > 0, got {shape_parameter}")
    stream = shared_stream(key) if shared else _generator(key)
    # sums of exponentials and half a squared normal are faster than numpy's rejection sampler
    if shape_parameter in (1, 2):
        drawn = stream.standard_exponential(shape)
    elif shape_parameter in (0.5, 1.5):
        drawn = stream.standard_normal(shape)
    else:
        drawn = stream.standard_gamma(shape_parameter, shape)
    flat = drawn.reshape(-1)
    for start in range(0, flat.size if shape_parameter in (0.5, 1.5, 2) else 0, _BLOCK):
        block = flat[start : start + _BLOCK]
        if shape_parameter < 2:
            np.square(block, out=block)
            block *= 0.5
        if shape_parameter > 1:
            block += stream.standard_exponential(block.size)
    return torch.from_numpy(drawn)


def chisquare(key: Key, degrees: float, shape: tuple[int, ...], *, shared: bool = False) -> Tensor:
    """Chi-square draws of the given shape, float64. `shared`: as for `gamma`.

    `normal(key) / sqrt(chisquare(other_key, degrees) / degrees)` is a vector of the multivariate t distribution.

    Raises:
        ValueError: degrees is not a positive finite number.
    """
    return gamma(key, degrees / 2, shape, shared=shared).mul_(2)


def permutation(key: Key, n: int) -> npt.NDArray[np.int64]:
    """A uniform permutation of 0..n-1."""
    return _generator(key).permutation(n)


def permutations(key: Key, count: int, n: int) -> npt.NDArray[np.int64]:
    """[count, n]: `count` independent uniform permutations of 0..n-1, from one draw."""
    return _generator(key).permuted(np.broadcast_to(np.arange(n), (count, n)), axis=1)


def subset(key: Key, n: int, size: int) -> npt.NDArray[np.int64]:
    """A uniform subset of 0..n-1, in increasing order.

    If n > 2^20 and size > n / 50, the subset is drawn block by block, after the number of elements of each block, which
    follows the hypergeometric distribution. A single draw would wait for memory at each element.

    Raises:
        ValueError: size is not between 0 and n.
    """
    if not 0 <= size <= n:
        raise ValueError(f"expected a subset of 0 to {n} elements, got size={size}")
    if size == n:
        return np.arange(n)
    stream = _generator(key)
    if n <= LARGE or 50 * size <= n:
        chosen = stream.choice(n, size, replace=False)
        chosen.sort()
        return chosen
    chosen, starts = np.empty(size, np.int64), np.arange(0, n, _BLOCK)
    lengths = np.minimum(n - starts, _BLOCK)
    counts = stream.multivariate_hypergeometric(lengths, size, method="marginals")
    for start, length, end, count in zip(starts, lengths, counts.cumsum(), counts, strict=True):
        inside = np.zeros(length, np.bool_)
        inside[stream.choice(length, count, replace=False, shuffle=False)] = True
        np.add(inside.nonzero()[0], start, out=chosen[end - count : end])
    return chosen


def integers(key: Key, n: int, high: int) -> npt.NDArray[np.int64]:
    """n uniform integers from 0..high-1, with replacement."""
    return _generator(key).integers(0, high, n)


_CELLS = 1 << 14  # equal parts of [0, 1), in most of which all numbers give one draw


def inverted(key: Key, ends: npt.NDArray[np.float64], n: int) -> npt.NDArray[np.int64]:
    """n draws of 0, 1, ..., len(ends) with the cumulative probabilities `ends`, by inversion at uniform numbers."""
    drawn = _generator(key).random(n)
    first, several = _guide(ends.tobytes())
    cells = (drawn * _CELLS).astype(np.int64)
    found = first[cells].astype(np.int64)
    (unsure,) = several[cells].nonzero()
    found[unsure] = np.searchsorted(ends, drawn[unsure], "right")
    return found


@functools.lru_cache(maxsize=8)
def _guide(ends: bytes) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.bool_]]:
    """[_CELLS] the draw at the start of each cell of [0, 1), and whether the cell has other draws, too."""
    starts = np.searchsorted(np.frombuffer(ends), np.arange(_CELLS + 1) / _CELLS, "right").astype(np.int32)
    return starts[:-1], starts[:-1] != starts[1:]


def poisson(key: Key, mean: float, n: int) -> npt.NDArray[np.int64]:
    """n draws of a Poisson distribution; its mean is at most 2^62."""
    return _generator(key).poisson(mean, n)


def binomial(key: Key, trials: int, chances: npt.NDArray[np.float64]) -> npt.NDArray[np.int64]:
    """[n] draws of binomial distributions with so many trials, of chances [n]."""
    return _generator(key).binomial(trials, chances)


def dirichlet(key: Key, alpha: npt.NDArray[np.float64], n: int) -> npt.NDArray[np.float64]:
    """[n, len(alpha)] draws from a Dirichlet distribution."""
    return _generator(key).dirichlet(alpha, n)


@contextmanager
def global_generators(key: Key) -> Iterator[Callable[[], object]]:
    """Seed the global generators of torch, numpy and Python from the key, for foreign code that may draw from them.

    A generator of numpy that the code makes without a seed takes its seed from Python's, not from the system's entropy.
    Afterwards, all states are restored. Yields a function that returns their states: if two calls return the same,
    nothing was drawn in between.
    """
    before = torch.get_rng_state(), np.random.get_state(), random.getstate()
    seed = int.from_bytes(_digest(key)[:4], "big")
    torch.default_generator.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)
    entropy, bit_generator.randbits = bit_generator.randbits, random.getrandbits  # type: ignore[attr-defined]
    try:
        yield global_states
    finally:
        bit_generator.randbits = entropy  # type: ignore[attr-defined]
        torch.set_rng_state(before[0])
        np.random.set_state(before[1])
        random.setstate(before[2])
