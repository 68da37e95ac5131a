"""Gradient pruning: only the largest coordinates are sent."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from leakgauge.defenses._common.misfit import ROUNDING
from leakgauge.harness.core import codec
from leakgauge.harness.core.checks import check_update
from leakgauge.harness.core.claim import Claim, nothing_promised
from leakgauge.harness.core.contract import Defense, Likelihood, Link, Links, Setting
from leakgauge.harness.core.distribution import Integers
from leakgauge.harness.core.errors import MessageError
from leakgauge.harness.core.rng import Key
from leakgauge.harness.core.vec import Vector


@dataclass(frozen=True)
class TopK(Defense[None, Tensor | None]):
    """Gradient pruning: sends the coordinates of largest magnitude as float32 and drops the others; claims no privacy.

    k = max(1, round(fraction * d)) coordinates are sent, whatever the update, so that all messages have the same
    length. Their positions come first, as numbers of ceil(log2 d) bits or as a bitmap of d bits, whichever is shorter.
    Both sides know k and d, so no flag is needed.

    Args:
        fraction: share of the coordinates that are sent. Default 0.01: Aji & Heafield drop 99 %.
        feedback: whether the client adds the dropped values to its next update.

    | case | message |
    |---|---|
    | a zero update | the first k coordinates, zeros |
    | ties at the smallest sent magnitude | the first ones |
    | fraction * d below one half | one coordinate |

    Guarantees:
        Messages have 4 * k + ceil(min(k * ceil(log2 d), d) / 8) bytes.
        The sent values are exact, and no dropped magnitude exceeds a sent one.
        With feedback, all sent values plus the residual equal the sum of all updates, up to float32 rounding.

    Raises:
        ValueError: fraction is outside (0, 1].

    Source: Zhu et al. 2019, "Deep leakage from gradients", sec. 5 (as a defense, without feedback); Aji & Heafield
        2017, "Sparse communication for distributed gradient descent" (with feedback). Differs: one threshold for the
        whole update, found exactly; no masking of momentum, no warm-up.
    """

    randomized = False

    fraction: float = 0.01
    feedback: bool = False

    def __post_init__(self) -> None:
        if not 0 < self.fraction <= 1:
            raise ValueError(f"expected 0 < fraction <= 1, got fraction={self.fraction}")

    def count(self, dim: int) -> int:
        """k, the number of sent coordinates out of d."""
        return max(1, round(self.fraction * dim))

    def remember(self, setting: Setting) -> Tensor | None:
        """A residual of zero; None without feedback."""
        return torch.zeros(setting.dim) if self.feedback else None

    def compensated(self, memory: Tensor | None, update: Vector) -> Vector:
        """The update, with feedback plus the residual."""
        return update if memory is None else update + memory

    def encode(
        self, state: None, memory: Tensor | None, update: Vector, link: Link, private: Key
    ) -> tuple[bytes, Tensor | None]:
        """The largest coordinates of the update plus the residual. Uses neither key."""
        check_update(update)
        whole = self.compensated(memory, update.detach().cpu())
        dim = whole.numel()
        positions = _largest(whole.abs().numpy(), self.count(dim))
        chosen = torch.from_numpy(positions)
        if _is_bitmap(len(positions), dim):
            bitmap = np.zeros(dim, np.int64)
            bitmap[positions] = 1
            wire = codec.pack_levels(bitmap, 1)
        else:
            wire = codec.pack_levels(positions, codec.width_of(dim))
        return wire + codec.pack_float32(whole[chosen]), None if memory is None else whole.index_fill(0, chosen, 0.0)

    def estimate(self, state: None, received: bytes, link: Link) -> Vector:
        """The sent values at their positions, zeros elsewhere."""
        positions, values = self._read(received, link.setting.dim)
        return torch.zeros(link.setting.dim).scatter(0, torch.from_numpy(positions), values)

    def likelihood(self, state: None, received: Sequence[bytes], links: Links) -> Likelihood:
        """Squared distance of sent coordinates to their values and of others to their bound, in units of `ROUNDING`.

        The bound is the smallest sent magnitude. With feedback, the unknown residual counts as zero, which is exact for
        a client's first message.
        """
        read = [self._read(wire, links.setting.dim) for wire in received]
        places = torch.from_numpy(np.stack([positions for positions, _ in read]))
        sent = torch.stack([values for _, values in read])
        smallest = sent.abs().min(dim=1, keepdim=True).values
        bounds = smallest.expand(-1, links.setting.dim).scatter(1, places, math.inf)

        def score(update: Tensor) -> Tensor:
            off = (update.gather(-1, places) - sent) / ROUNDING
            over = (update.abs() - bounds).clamp(min=0) / ROUNDING
            return 0.5 * (off.square().sum(-1) + over.square().sum(-1))

        return score

    def claim(self, history: Sequence[None], setting: Setting) -> Claim:
        """No privacy is claimed."""
        return nothing_promised(len(history), "The largest coordinates are sent as they are.")

    def _read(self, received: bytes, dim: int) -> tuple[Integers, Tensor]:
        k = self.count(dim)
        size = -(-min(k * codec.width_of(dim), dim) // 8)
        codec.check_length(received, size + 4 * k, f"{k} positions and floats")
        return _unpack_positions(received[:size], k, dim), codec.unpack_float32(received[size:], k)


def _largest(magnitudes: npt.NDArray[np.float32], k: int) -> Integers:
    """The positions of the k largest magnitudes, in increasing order; of equal magnitudes, the first positions."""
    threshold = np.partition(magnitudes, -k)[-k]
    chosen = magnitudes > threshold
    equal = np.flatnonzero(magnitudes == threshold)
    chosen[equal[: k - int(chosen.sum())]] = True
    return np.flatnonzero(chosen)


def _is_bitmap(k: int, dim: int) -> bool:
    """Whether one bit per coordinate is shorter than one number per sent coordinate."""
    return dim < k * codec.width_of(dim)


def _unpack_positions(wire: bytes, k: int, dim: int) -> Integers:
    """[k] positions, which are checked to increase and to lie below `dim`."""
    if _is_bitmap(k, dim):
        positions = np.flatnonzero(codec.unpack_levels(wire, dim, 1))
        if len(positions) != k:
            raise MessageError(f"expected {k} positions, got {len(positions)}")
        return positions
    positions = codec.unpack_levels(wire, k, codec.width_of(dim))
    if (np.diff(positions) <= 0).any() or int(positions[-1]) >= dim:
        raise MessageError(f"expected {k} increasing positions below {dim}, got {positions[:8].tolist()} and so on")
    return positions
