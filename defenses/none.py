"""No defense: the ceiling that every other defense is read against."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from leakgauge.defenses._common.misfit import ROUNDING
from leakgauge.harness.core.checks import check_update
from leakgauge.harness.core.claim import Claim, nothing_promised
from leakgauge.harness.core.codec import pack_float32, unpack_float32
from leakgauge.harness.core.contract import (
    Defense,
    Likelihood,
    Link,
    Links,
    Setting,
)
from leakgauge.harness.core.rng import Key
from leakgauge.harness.core.vec import Vector


@dataclass(frozen=True)
class NoDefense(Defense[None, None]):
    """No defense: the update as float32, nothing added, nothing promised.

    Guarantees:
        decode(encode(u)) equals u, bit for bit.
        4 * d bytes.

    Source: McMahan et al. 2017, "Communication-efficient learning of deep networks from decentralized data".
    """

    randomized = False

    def encode(self, state: None, memory: None, update: Vector, link: Link, private: Key) -> tuple[bytes, None]:
        """The update's float32 bytes. Uses neither key."""
        check_update(update)
        return pack_float32(update), None

    def estimate(self, state: None, received: bytes, link: Link) -> Vector:
        """The update, exactly."""
        return unpack_float32(received, link.setting.dim)

    def likelihood(self, state: None, received: Sequence[bytes], links: Links) -> Likelihood:
        """Squared distance in units of `ROUNDING`: what is left when both sides compute the same gradient."""
        sent = torch.stack([unpack_float32(wire, links.setting.dim) for wire in received])

        def score(update: Tensor) -> Tensor:
            return 0.5 * ((update - sent) / ROUNDING).square().sum(-1)

        return score

    def claim(self, history: Sequence[None], setting: Setting) -> Claim:
        """Nothing is promised."""
        return nothing_promised(len(history), "The update is sent as it is.")
