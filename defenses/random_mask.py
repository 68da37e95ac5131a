"""Random mask: a fresh random share of the coordinates is sent, and the seed that says which."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from leakgauge.defenses._common.misfit import ROUNDING
from leakgauge.harness.core import rng
from leakgauge.harness.core.checks import check_update
from leakgauge.harness.core.claim import Claim, nothing_promised
from leakgauge.harness.core.codec import check_length, pack_float32, pack_levels, unpack_float32
from leakgauge.harness.core.contract import (
    Defense,
    Likelihood,
    Link,
    Links,
    Setting,
)
from leakgauge.harness.core.rng import Key
from leakgauge.harness.core.vec import Vector

_SEED_BYTES = 8


class _Kept(NamedTuple):
    """positions: [count] int64, increasing; values: [count] float32."""

    positions: Tensor
    values: Tensor


@dataclass(frozen=True)
class RandomMask(Defense[None, None]):
    """A random share of the coordinates as float32, the others dropped; nothing promised.

    The mask is uniform among those of max(1, round(share * d)) coordinates, and new in every message. It follows from
    64 bits that the client draws and sends in clear, so that whoever sees the message knows it.

    Args:
        share: of the coordinates that are sent.
        rescale: whether the server multiplies what it received by d / count, so that the estimate is unbiased. False:
            the update with zeros for what is missing.

    Guarantees:
        8 + 4 * count bytes.
        What is sent is exact.
        With rescale, the mean of the estimate over masks is the update.

    Raises:
        ValueError: share is outside (0, 1].

    Source: Konecny et al. 2016, "Federated learning: strategies for improving communication efficiency", sec. 2 (random
        mask, told by a seed) and sec. 3 (subsampling, scaled to be unbiased). Differs: the mask comes after local
        training, as in sec. 3; sec. 2 trains the masked coordinates only, the same where there is one step. One mask
        for the whole update, and of a fixed number of coordinates.
    """

    share: float = 0.1
    rescale: bool = False

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1:
            raise ValueError(f"expected 0 < share <= 1, got share={self.share}")

    def count(self, dim: int) -> int:
        """How many of d coordinates are sent."""
        return max(1, round(self.share * dim))

    def encode(self, state: None, memory: None, update: Vector, link: Link, private: Key) -> tuple[bytes, None]:
        """A seed, and the coordinates that it chooses. Does not use the shared key."""
        check_update(update)
        seed = pack_levels(rng.integers(private.child("seed"), 2, 1 << 32), 32)
        return seed + pack_float32(update.detach().cpu()[self._positions(seed, update.numel())]), None

    def estimate(self, state: None, received: bytes, link: Link) -> Vector:
        """What was sent, in its places, and zeros; with `rescale` times d / count."""
        kept, dim = self._read(received, link.setting.dim), link.setting.dim
        scale = dim / self.count(dim) if self.rescale else 1.0
        return torch.zeros(dim).scatter(0, kept.positions, scale * kept.values)

    def likelihood(self, state: None, received: Sequence[bytes], links: Links) -> Likelihood:
        """Squared distance of what was sent in units of `ROUNDING`; nothing is known of the rest.

        The same with and without the shared key: the mask is in the message.
        """
        kept = [self._read(wire, links.setting.dim) for wire in received]
        places = torch.stack([item.positions for item in kept])
        sent = torch.stack([item.values for item in kept])

        def score(update: Tensor) -> Tensor:
            return 0.5 * ((update.gather(-1, places) - sent) / ROUNDING).square().sum(-1)

        return score

    def claim(self, history: Sequence[None], setting: Setting) -> Claim:
        """Nothing is promised."""
        return nothing_promised(len(history), "The chosen coordinates are sent as they are.")

    def _positions(self, seed: bytes, dim: int) -> Tensor:
        """[count] int64, increasing: the mask of these 64 bits."""
        # `shared`: whoever holds the message holds this key
        key = Key(int.from_bytes(seed, "little")).child("shared", "mask")
        return torch.from_numpy(rng.subset(key, dim, self.count(dim)))

    def _read(self, received: bytes, dim: int) -> _Kept:
        """The mask and the values of a message."""
        count = self.count(dim)
        check_length(received, _SEED_BYTES + 4 * count, f"a seed and {count} floats")
        seed, values = received[:_SEED_BYTES], received[_SEED_BYTES:]
        return _Kept(self._positions(seed, dim), unpack_float32(values, count))
