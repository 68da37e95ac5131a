"""Randomness as a tree of named keys.

A key is a name, not a stream: the numbers drawn from it depend on the seed and the path alone, so that the order of
work, resuming, chunking and the number of processes change nothing. Draws come from numpy's Philox, keyed with 128 bits
of SHA-256(seed, path); a CPU `torch.Generator` uses only the low 32 bits of its seed, and two of 10^5 hashed streams
would then collide with probability 0.69.

One key, one draw: for two draws take two children.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


@dataclass(frozen=True)
class Key:
    """A name in the tree of randomness.

    `private` keys are known to one client, `shared` keys to client and server; who may know a number is visible where
    a function takes the key. Equal keys draw equal numbers on every machine with the same numpy.
    """

    seed: int
    path: tuple[str | int, ...] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.seed, int) or isinstance(self.seed, bool):
            raise TypeError(f"expected an integer seed, got {self.seed!r}")

    def child(self, *parts: str | int) -> Key:
        """The key named `parts` below this one."""
        return Key(self.seed, (*self.path, *parts))


def _generator(key: Key) -> np.random.Generator:
    """The stream of `key`: Philox with a 128-bit key."""
    # JSON keeps 1 and "1" apart, and no two paths share a text.
    name = json.dumps([key.seed, list(key.path)], separators=(",", ":")).encode()
    return np.random.Generator(np.random.Philox(key=int.from_bytes(hashlib.sha256(name).digest()[:16], "little")))


def normal(key: Key, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
    """Standard normal draws of the given shape; drawn as float64, then cast."""
    return torch.from_numpy(_generator(key).standard_normal(shape)).to(dtype)


def uniform(
    key: Key, shape: tuple[int, ...], low: float = 0.0, high: float = 1.0, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Uniform draws from [low, high) of the given shape; drawn as float64, then cast."""
    return torch.from_numpy(_generator(key).uniform(low, high, shape)).to(dtype)


def laplace(key: Key, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
    """Laplace draws of scale 1 (variance 2) of the given shape; drawn as float64, then cast."""
    return torch.from_numpy(_generator(key).laplace(0.0, 1.0, shape)).to(dtype)


def permutation(key: Key, n: int) -> npt.NDArray[np.int64]:
    """A uniform permutation of 0..n-1."""
    return _generator(key).permutation(n)


def permutations(key: Key, count: int, n: int) -> npt.NDArray[np.int64]:
    """[count, n]: `count` independent uniform permutations of 0..n-1, from one draw."""
    return _generator(key).permuted(np.broadcast_to(np.arange(n), (count, n)), axis=1)


def subset(key: Key, n: int, size: int) -> npt.NDArray[np.int64]:
    """A uniform subset of 0..n-1, in increasing order.

    Raises:
        ValueError: size is not between 0 and n.
    """
    if not 0 <= size <= n:
        raise ValueError(f"expected a subset of 0 to {n} elements, got size={size}")
    return np.sort(_generator(key).choice(n, size, replace=False))


def integers(key: Key, n: int, high: int) -> npt.NDArray[np.int64]:
    """n uniform integers from 0..high-1, with replacement."""
    return _generator(key).integers(0, high, n)


def dirichlet(key: Key, alpha: npt.NDArray[np.float64], n: int) -> npt.NDArray[np.float64]:
    """[n, len(alpha)] draws from a Dirichlet law."""
    return _generator(key).dirichlet(alpha, n)


def lognormal(key: Key, sigma: float, n: int) -> npt.NDArray[np.float64]:
    """n draws of exp(sigma * normal)."""
    return np.exp(sigma * _generator(key).standard_normal(n))
