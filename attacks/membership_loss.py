"""Membership by loss: what a model was trained on, it predicts better."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from leakgauge.attacks._engine.matching import losses
from leakgauge.harness.core.contract import Attack, Membership, Observation
from leakgauge.harness.core.rng import Key


@dataclass(frozen=True)
class MembershipLoss(Attack):
    """The score of a candidate is minus its loss under the final model.

    Must know: the final model and the candidates with their labels, as everybody does who may use the model. It looks
    at no message and ignores the defense.

    Cannot: tell a member from a record that is easy for any model, having no shadow models to compare with. It finds
    what is overfitted on average, and few members with certainty.

    Source: Yeom et al. 2018, "Privacy risk in machine learning: analyzing the connection to overfitting", Adversary 2.
        Differs: the score is told, not compared with the mean training loss.
    """

    kind: ClassVar[str] = "membership"

    @property
    def needs(self) -> frozenset[str]:
        """The final model and the candidates."""
        return frozenset({"final", "candidates"})

    def run(self, seen: Observation, key: Key) -> Membership:
        """Minus the losses; one that is not finite counts as the largest finite one: no sign of a member."""
        assert seen.final is not None
        assert seen.candidates is not None
        largest = torch.finfo(torch.float32).max
        scores = -losses(seen.task, seen.final, *seen.candidates)
        return Membership(scores.nan_to_num(nan=-largest, posinf=-largest, neginf=-largest))
