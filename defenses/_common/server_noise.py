"""Clients clip and send float32; an honest server adds normal noise to the sum and divides by a public number."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self, TypeVar

import numpy as np
import numpy.typing as npt
from torch import Tensor

from leakgauge.defenses._common.clip import Clipped, clip_l2
from leakgauge.defenses._common.plain import Plain
from leakgauge.harness.core.claim import Claim, Horizon, Proof, Relation, Unit, Violation
from leakgauge.harness.core.contract import Link, Links
from leakgauge.harness.core.distribution import projected
from leakgauge.harness.core.threats import LISTED, seeing
from leakgauge.harness.core.vec import Vector

S = TypeVar("S")

HONEST = "the server is honest and reveals no message"
FIXED = "the number of participants is fixed beforehand and public"

_MODELS = seeing({"models", "final"})  # the adversaries that see models but no messages


@dataclass(frozen=True)
class ServerNoise(Clipped, Plain[S]):
    """A defense whose clients clip their update's l2 norm and add no noise."""

    promises = Horizon.WHOLE_RUN

    def bounded(self, update: Tensor) -> Tensor:
        """The clipped update."""
        return clip_l2(update, self.clip)

    def longest(self, state: S, link: Link) -> float:
        """C."""
        return self.clip

    def center(self, updates: Sequence[Vector], links: Links) -> npt.NDArray[np.float64]:
        """[d] the mean without noise: the sum of the projected updates, divided by U."""
        total = np.sum([projected(update, self.clip) for update in updates], axis=0)
        return np.asarray(total / links.setting.participants)

    def low_noise_variant(self) -> Self:
        """The same mechanism with a noise of 0.001 C in each coordinate of the sum."""
        return dataclasses.replace(self, epsilon=None, noise_std=1e-3 * self.clip)

    def violations(self, updates: Sequence[Vector], links: Links, lr: float) -> dict[str, Violation]:
        """The rounds whose number of messages differs from the public number."""
        if links.setting.participation == "poisson":
            return {}
        return {FIXED: Violation(int(len(links.senders) != links.setting.participants), 1, "round")}

    def against_models(
        self, rounds: int, claimed: float, proved: Proof, source: str, assumes: tuple[str, ...]
    ) -> Claim:
        """The claim for one client, added or removed, against adversaries that see only models."""
        clear = "messages are clipped and sent without noise."
        further = (Proof.none(Unit.CLIENT, clear, against=seeing(LISTED, some={"messages", "sums"})),)
        # `claim_over` does not fit: the client need not take part in every round
        return Claim(
            claimed,
            self.delta,
            Unit.CLIENT,
            Relation.ADD_REMOVE,
            Horizon.of(rounds),
            _MODELS,
            source,
            assumes,
            proved,
            further,
        )
