"""Messages without noise: the bounded update as float32."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, TypeVar

import torch
from torch import Tensor

from leakgauge.defenses._common.misfit import rounding_misfit
from leakgauge.harness.core.checks import check_update
from leakgauge.harness.core.codec import pack_float32, unpack_float32
from leakgauge.harness.core.contract import Defense, Likelihood, Link, Links
from leakgauge.harness.core.rng import Key
from leakgauge.harness.core.vec import Vector

S = TypeVar("S")


@dataclass(frozen=True)
class Plain(Defense[S, None]):
    """A defense whose message is the bounded update itself, in 4 * d bytes; it uses neither key."""

    randomized: ClassVar[bool] = False

    def bounded(self, update: Tensor) -> Tensor:
        """The update [..., d] as the client sends it: unchanged unless the defense clips."""
        return update

    def encode(self, state: S, memory: None, update: Vector, link: Link, private: Key) -> tuple[bytes, None]:
        """The bounded update as float32. Uses neither key."""
        check_update(update)
        return pack_float32(self.bounded(update)), None

    def estimate(self, state: S, received: bytes, link: Link) -> Vector:
        """The exact bounded update."""
        return unpack_float32(received, link.setting.dim)

    def sent(self, received: Sequence[bytes], links: Links) -> Tensor:
        """[n, d]: the bounded updates of n messages."""
        return torch.stack([unpack_float32(wire, links.setting.dim) for wire in received])

    def likelihood(self, state: S, received: Sequence[bytes], links: Links) -> Likelihood:
        """Squared distance of the bounded candidate in units of `ROUNDING`: messages have no noise."""
        sent = self.sent(received, links)
        return lambda update: rounding_misfit(self.bounded(update) - sent)
