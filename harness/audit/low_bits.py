"""The low-bits distinguisher: whether the lowest bits of sent floats depend on the update.

A proof for real numbers says nothing of them. Beside noise that is much wider than the steps of floats, they are the
same fair coins for every update, so that they must not tell any pair apart.

Source: Mironov 2012, "On significance of the least significant bits for differential privacy". Differs: his attack
    knows which floats a generator of noise can reach; this one learns from messages.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from scipy import special, stats
from torch import Tensor

from leakgauge.harness.core import rng
from leakgauge.harness.core.rng import Key
from leakgauge.harness.core.stats import Numbers

_MESSAGES, _BITS = 80, 8  # messages of each update, of which half are counted, and the bits of a float
_WIDE = 2.0**14  # steps of floats over which a number is spread at least; else its bits are not looked at
_TINY = 2.0**-14  # the size of a tiny update's numbers, in spreads
_CHANCE = 0.01  # probability that some bit is chosen by chance


def low_bits(send: Callable[[Tensor, Key], npt.NDArray[Any]], dim: int, clip: float, key: Key) -> tuple[str, float]:
    """The pair of updates that the lowest bits of messages tell apart best, with how often; and its p-value.

    One half of a pair's messages chooses bits, weights and a threshold, and the other half is counted, by Fisher's test
    for all pairs together. Noise on a coarse grid and copied bits show in the first two pairs, signs in the last.

    Args:
        send: the floats [k] in the message of an update [dim], with noise by this private key.
        clip: of the updates' l2 norm.
    """

    def sent(update: Tensor, *name: int) -> npt.NDArray[Any]:
        rows = [send(update.float(), key.child("low bits", *name, n)) for n in range(_MESSAGES)]
        return np.stack(rows) if len({row.shape for row in rows}) == 1 else np.empty((0, 0))

    zero, first = torch.zeros(dim), sent(torch.zeros(dim))
    if not first.size:
        return "", 1.0
    spread = first.std(0, dtype=np.float64)
    wide = spread > _WIDE * np.spacing(np.abs(first).max(0))
    if not wide.any():
        return "", 1.0
    step = 2.0 ** math.floor(math.log2(clip / (8 * math.sqrt(dim))))
    signed = torch.from_numpy(rng.integers(key.child("low bits", "grid"), dim, 6) - 2.5)
    grid = step * signed.sign() * (signed.abs() + 0.5)
    tiny = rng.uniform(key.child("low bits", "tiny"), (dim,), 0.5, 1.0, torch.float64)
    beside = grid + tiny * min(_TINY * float(spread[wide].min()), step)
    pairs = {"an update on a grid and one beside it": (grid, beside), "zero and a tiny update": (zero, beside - grid)}
    found = list[tuple[float, str]]()
    for number, (name, two) in enumerate((pairs | {"an update and its opposite": (-beside, beside)}).items()):
        floats = [sent(one, number, bit) for bit, one in enumerate(two)]
        if any(one.shape != first.shape for one in floats):  # the length of a message tells, which other checks find
            continue
        right, p = _told_apart(*(_features(one[:, wide]) for one in floats))
        found.append((min(1.0, 3 * p), f"{name} apart in {right} of {_MESSAGES} messages"))
    p, words = min(found, default=(1.0, ""))
    return words, p


def _features(floats: npt.NDArray[Any]) -> Numbers:
    """[n, f] the lowest bits of each float [n, k], and how many floats of a message end in one, two, ... zeros."""
    words = floats.view(f"<u{floats.itemsize}")
    bits = (words[:, :, None] >> np.arange(_BITS, dtype=words.dtype) & 1).astype(np.float64)
    return np.concatenate([bits.reshape(len(bits), -1), np.cumprod(1 - bits, 2).sum(1)], 1)


def _told_apart(low: Numbers, high: Numbers) -> tuple[int, float]:
    """How many counted messages [n, f] of both updates a linear score of the rest tells right, and Fisher's p-value."""
    half = len(low) // 2
    moves, variances = high[:half].mean(0) - low[:half].mean(0), high[:half].var(0) + low[:half].var(0) + 1 / half
    far = -special.ndtri(_CHANCE / (2 * len(moves)))
    weights = np.where(np.abs(moves) * math.sqrt(half) > far * np.sqrt(variances), moves / variances, 0.0)
    threshold = (low[:half] @ weights + high[:half] @ weights).mean() / 2
    false, true = (int((rows[half:] @ weights > threshold).sum()) for rows in (low, high))
    return half - false + true, float(stats.hypergeom.sf(true - 1, 2 * half, true + false, half))
