"""Label restoration: recovers the labels behind a message, without its inputs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from leakgauge.attacks._engine.labels import labels_over_rounds
from leakgauge.harness.core.contract import Attack, Labels, Observation
from leakgauge.harness.core.rng import Key


@dataclass(frozen=True)
class LabelRestoration(Attack):
    """Counts the labels of a message's images from the gradient of the last layer.

    Must know: the messages of each victim, the models of their rounds, with a dense last layer, and data of the same
    kind; a server or an eavesdropper does. Without the shared key, it uses an outsider's estimate. It ignores the
    defense except to read messages, and estimates the noise itself. It adds up the evidence of several rounds as if the
    rounds were independent.

    Cannot: mainly, count the labels of a batch that a trained model predicts with certainty; see
    `attacks._engine.labels.restore`. For such a batch, it returns the most frequent labels, as the floor `label-prior`
    does.

    Raises:
        ValueError: in `run`: labels that cannot be inferred, see `attacks._engine.labels.restore`.

    Source: Zhao et al. 2020 (iDLG), Wainakh et al. 2022 (LLG), Ma et al. 2023 (iLRG); see
        `attacks._engine.labels.restore` for the differences.
    """

    kind: ClassVar[str] = "labels"
    needs: ClassVar[frozenset[str]] = frozenset({"messages", "models", "auxiliary"})

    def run(self, observation: Observation, key: Key) -> Labels:
        """For each victim, one label per image."""
        return Labels(labels_over_rounds(observation, "inferred", key.child("dummies")))
