"""Improved deep leakage from gradients: infers labels first, then searches for inputs."""

from __future__ import annotations

from dataclasses import dataclass

from leakgauge.attacks._engine.labels import LabelSource, by_slopes, labels_of
from leakgauge.attacks._engine.objective import Kind, received_gradients
from leakgauge.attacks._engine.posterior import ByMatching
from leakgauge.attacks._engine.reconstruct import Start
from leakgauge.harness.core.contract import Observation, Reconstruction
from leakgauge.harness.core.rng import Key


@dataclass(frozen=True)
class IDLG(ByMatching):
    """Infers labels from the last layer's gradient, then searches for inputs by gradient matching with L-BFGS.

    Must know: one message of each victim and the model of its round, with a dense last layer, and data of the same kind
    to infer the labels of batches; a server or an eavesdropper does. Without the shared key, it uses an outsider's
    estimate. It ignores the defense except to read messages, unless `objective` is `likelihood`.

    Cannot: use knowledge of what images look like. Under noise, it also fits the noise, which hides the image. Wrongly
    inferred labels are never corrected. An update is treated as its mean step.

    The study `trained-models` shows the results by model, before and after training (`docs/attacks.md`): behind ReLU
    with max-pooling, they are below the floor.

    Args:
        restarts, evaluations, objective, start, prior: as in `dlg`.
        labels: `inferred`, or `given`: the true labels, which a study must grant.

    Raises:
        ValueError: a parameter is out of range; in `run`: labels that cannot be inferred, see
            `attacks._engine.labels.restore` and `by_slopes`.

    Source: Zhao, Mopuri and Bilen 2020, "iDLG: improved deep leakage from gradients", Algorithm 1. Differs: infers
        labels of several images (`attacks._engine.labels`); has backtracking and a stop rule.
    """

    restarts: int = 2
    evaluations: int = 10_000
    objective: Kind = "l2"
    labels: LabelSource = "inferred"
    start: Start = "normal"
    prior: str = "none"

    def run(self, observation: Observation, key: Key) -> Reconstruction:
        """Inputs, not clipped, and their labels."""
        if (found := by_slopes(self, observation, key)) is not None:
            return found
        gradients = received_gradients(observation, numbers=self.labels == "given")
        labels = labels_of(observation, gradients, self.labels, key.child("dummies"))
        return self.matched(observation, gradients, labels, key)
