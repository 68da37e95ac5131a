"""No defense: the maximum leakage, with which every other defense is compared."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from leakgauge.defenses._common.plain import Plain
from leakgauge.harness.core.claim import Claim, nothing_promised
from leakgauge.harness.core.contract import Link, Setting
from leakgauge.harness.core.distribution import Exact, MessageDistribution, numbers
from leakgauge.harness.core.vec import Vector


@dataclass(frozen=True)
class NoDefense(Plain[None]):
    """No defense: the update is sent as float32, without noise and without any privacy claim.

    Guarantees:
        decode(encode(u)) equals u, bit for bit.
        Messages have 4 * d bytes.

    Source: McMahan et al. 2017, "Communication-efficient learning of deep networks from decentralized data".
    """

    def message_distribution(self, state: None, memory: None, update: Vector, link: Link) -> MessageDistribution:
        """The update itself, as float32."""
        return Exact(numbers(update).astype("<f4").tobytes())

    def claim(self, history: Sequence[None], setting: Setting) -> Claim:
        """No privacy is claimed."""
        return nothing_promised(len(history), "The update is sent as it is.")
