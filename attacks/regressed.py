"""Regression from whole messages to inputs: an attack without a search, for any model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from leakgauge.attacks._engine.imitation import regressed
from leakgauge.attacks._engine.labels import ByLabels, LabelSource, check_source, labels_over_rounds
from leakgauge.attacks._engine.objective import received_gradients
from leakgauge.attacks._engine.reconstruct import alike, in_order, kinds_of, only
from leakgauge.harness.core.contract import Guess, Observation, Reconstruction
from leakgauge.harness.core.rng import Key


@dataclass(frozen=True)
class Regressed(ByLabels):
    """Estimates inputs from whole messages by ridge regression, fitted to auxiliary data that pass through the defense.

    One fit serves victims with equal labels and numbers of images, users and steps (see `_engine.imitation.regressed`).
    The objective is the fit's mean squared error per entry on auxiliary inputs, each left out of its own fit.

    Must know: the messages of each victim, the models of their rounds, the defense, how clients train, and data of the
    same kind; a server or an eavesdropper does. Without the shared key, it fits to an outsider's estimates.

    Cannot: separate inputs of one label in a batch (it returns their mean), show fine detail, or correct wrong labels.

    Args:
        samples: maximum number of auxiliary inputs of one fit.
        labels: `inferred`, or `given`: the true labels, which a study must grant.

    Raises:
        ValueError: samples is below 2; in `run`: fewer than two auxiliary inputs, or a loss that `map` refuses.

    Source: Hoerl and Kennard 1970 (ridge regression); Charikar et al. 2002 (count sketch).
    """

    imitates: ClassVar[bool] = True
    samples: int = 1000
    labels: LabelSource = "inferred"

    def __post_init__(self) -> None:
        if self.samples < 2:
            raise ValueError(f"expected samples >= 2, got samples={self.samples}")
        check_source(self.labels)

    def run(self, observation: Observation, key: Key) -> Reconstruction:
        """Inputs and labels; only images are clamped to [0, 1]."""
        rounds, guesses = observation.observed_rounds, dict[int, Guess]()
        gradients = received_gradients(observation, numbers=self.labels == "given")
        gradients = gradients.where(rounds[0].model.params.isfinite().all(), float("nan"))
        labels = labels_over_rounds(observation, self.labels, key.child("dummies"))
        each = zip(kinds_of(rounds), labels, strict=True)
        for _, victims in alike(gradients, ((*kind, *own.tolist()) for kind, own in each)):
            seen, y = [only(observed, victims) for observed in rounds], labels[victims[0]]
            x, error = regressed(observation, seen, y, key.child("regression"), self.samples)
            guesses |= {i: Guess(one, y, error, 1) for i, one in zip(victims, x, strict=True)}
        return Reconstruction(in_order(observation.task, rounds[0].messages, gradients, guesses))
