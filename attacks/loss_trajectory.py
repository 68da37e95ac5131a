"""Membership by the mean loss under the models of several rounds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from leakgauge.attacks._members.scores import confidence, finite, or_nan
from leakgauge.attacks._members.shadowing import outputs
from leakgauge.harness.core.contract import Attack, Membership, Observation
from leakgauge.harness.core.rng import Key
from leakgauge.harness.learn.gradients import losses


@dataclass(frozen=True)
class LossTrajectory(Attack):
    """Scores each candidate by minus its mean loss under the models of the observed rounds.

    The loss of one model on a record fluctuates from round to round; the mean over rounds fluctuates less.

    Must know: the models of several rounds, as every participant does, and the candidates with their labels. It uses no
    messages and ignores the defense.

    Cannot: separate a member from a record that is easy for every model, because it compares with no shadow model. The
    model before the first round has not trained on any member; observing it adds no information.

    Args:
        statistic: `loss`: minus the loss. `confidence`: the log odds of the label, which do not saturate when the model
            is certain.

    Raises:
        ValueError: an unknown statistic; in `run`: no model, or `confidence` with fewer than two classes.

    Source: Yeom et al. 2018 for the loss; for its sequence over training, Liu et al. 2022, "Membership inference
        attacks by exploiting loss trajectory" (arXiv 2208.14933). Differs: uses the federation's own models, without
        distillation, and the mean loss instead of a classifier of the sequence.
    """

    kind: ClassVar[str] = "membership"
    needs: ClassVar[frozenset[str]] = frozenset({"models", "candidates"})

    statistic: Literal["loss", "confidence"] = "loss"

    def __post_init__(self) -> None:
        if self.statistic not in ("loss", "confidence"):
            raise ValueError(f"expected statistic 'loss' or 'confidence', got {self.statistic!r}")

    def run(self, observation: Observation, key: Key) -> Membership:
        """The mean over the models with a finite value; a record without a finite value gets the lowest score."""
        assert observation.models is not None
        assert observation.candidates is not None
        if not observation.models:
            raise ValueError("expected the model of at least one round, got none")
        x, y = observation.candidates
        models = [snapshot.params for snapshot in observation.models]
        if self.statistic == "confidence":
            values = confidence(outputs(observation.task, models, x), y)
        else:
            values = -torch.stack([losses(observation.task, model, x, y) for model in models]).double()
        return Membership(finite(or_nan(values).nanmean(0)))
