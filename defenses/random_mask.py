"""Random mask: each message holds a fresh random share of the coordinates and the seed that selects them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from leakgauge.defenses._common.misfit import rounding_misfit
from leakgauge.harness.core import rng
from leakgauge.harness.core.checks import check_update
from leakgauge.harness.core.claim import Claim, nothing_promised
from leakgauge.harness.core.codec import check_length, pack_float32, pack_levels, unpack_float32
from leakgauge.harness.core.contract import Defense, Likelihood, Link, Links, Setting
from leakgauge.harness.core.rng import Key
from leakgauge.harness.core.vec import Vector

_SEED_BYTES = 8


@dataclass(frozen=True)
class RandomMask(Defense[None, None]):
    """Sends a random share of the coordinates as float32 and drops the others; claims no privacy.

    The mask is uniform over all sets of max(1, round(share * d)) coordinates, and new in every message. The client
    draws a seed of 64 bits, which determines the mask, and sends it in the clear: everyone who sees the message knows
    the mask.

    Args:
        share: share of the coordinates that are sent.
        rescale: whether the server multiplies the received values by d / count, which makes the estimate unbiased.
            False: the estimate is the update with zeros at the dropped coordinates.

    Guarantees:
        Messages have 8 + 4 * count bytes.
        The sent values are exact.
        With `rescale`, the mean of the estimate over masks is the update.

    Raises:
        ValueError: share is outside (0, 1].

    Source: Konecny et al. 2016, "Federated learning: strategies for improving communication efficiency", sec. 2 (random
        mask, given by a seed) and sec. 3 (subsampling, scaled to be unbiased). Differs: the mask is applied after local
        training, as in sec. 3; sec. 2 trains only the masked coordinates, which is the same for one step. One mask with
        a fixed number of coordinates covers the whole update.
    """

    share: float = 0.1
    rescale: bool = False

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1:
            raise ValueError(f"expected 0 < share <= 1, got share={self.share}")

    def count(self, dim: int) -> int:
        """The number of sent coordinates out of d."""
        return max(1, round(self.share * dim))

    def encode(self, state: None, memory: None, update: Vector, link: Link, private: Key) -> tuple[bytes, None]:
        """A seed, and the coordinates that it selects. Does not use the shared key."""
        check_update(update)
        seed = pack_levels(rng.integers(private.child("seed"), 2, 1 << 32), 32)
        return seed + pack_float32(update.detach().cpu()[self._positions(seed, update.numel())]), None

    def estimate(self, state: None, received: bytes, link: Link) -> Vector:
        """The sent values at their positions, zeros elsewhere; with `rescale`, multiplied by d / count."""
        dim = link.setting.dim
        seed, values = self._split(received, dim)
        scale = dim / self.count(dim) if self.rescale else 1.0
        return torch.zeros(dim).scatter(0, self._positions(seed, dim), scale * values)

    def likelihood(self, state: None, received: Sequence[bytes], links: Links) -> Likelihood:
        """Squared distance of the sent coordinates in units of `ROUNDING`; the dropped ones do not count.

        It does not depend on the shared key, because the mask is in the message.
        """
        dim = links.setting.dim
        read = [self._split(wire, dim) for wire in received]
        places = torch.stack([self._positions(seed, dim) for seed, _ in read])
        sent = torch.stack([values for _, values in read])
        return lambda update: rounding_misfit(update.gather(-1, places) - sent)

    def claim(self, history: Sequence[None], setting: Setting) -> Claim:
        """No privacy is claimed."""
        return nothing_promised(len(history), "The selected coordinates are sent as they are.")

    def _positions(self, seed: bytes, dim: int) -> Tensor:
        """[count] int64, increasing: the positions that a seed of 64 bits selects."""
        # named `shared`, because everyone with the message also has this key
        key = Key(int.from_bytes(seed, "little")).child("shared", "mask")
        return torch.from_numpy(rng.subset(key, dim, self.count(dim)))

    def _split(self, received: bytes, dim: int) -> tuple[bytes, Tensor]:
        count = self.count(dim)
        check_length(received, _SEED_BYTES + 4 * count, f"a seed and {count} floats")
        return received[:_SEED_BYTES], unpack_float32(received[_SEED_BYTES:], count)
