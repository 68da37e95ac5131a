"""Membership by loss: a model predicts its training records better."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from leakgauge.harness.core.contract import Attack, Membership, Observation
from leakgauge.harness.core.rng import Key
from leakgauge.harness.learn.gradients import losses


@dataclass(frozen=True)
class MembershipLoss(Attack):
    """Scores each candidate by minus its loss under the final model.

    Must know: the final model and the candidates with their labels, as every user of the model does. It uses no
    messages and ignores the defense.

    Cannot: separate a member from a record that is easy for every model, because it compares with no shadow model. It
    detects overfitting on average, but few members with certainty.

    Source: Yeom et al. 2018, "Privacy risk in machine learning: analyzing the connection to overfitting", Adversary 2.
        Differs: returns the score instead of comparing it with the mean training loss.
    """

    kind: ClassVar[str] = "membership"
    needs: ClassVar[frozenset[str]] = frozenset({"final", "candidates"})

    def run(self, observation: Observation, key: Key) -> Membership:
        """Minus the losses; a non-finite loss counts as the largest float32, which indicates a non-member."""
        assert observation.final is not None
        assert observation.candidates is not None
        largest = torch.finfo(torch.float32).max
        scores = -losses(observation.task, observation.final, *observation.candidates)
        return Membership(scores.nan_to_num(nan=-largest, posinf=-largest, neginf=-largest))
