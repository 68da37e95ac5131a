"""The labels behind a message, and nothing else."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from leakgauge.attacks._labels.infer import labels_over_rounds, needs
from leakgauge.harness.core.contract import Attack, Labels, Observation
from leakgauge.harness.core.rng import Key


@dataclass(frozen=True)
class LabelRestoration(Attack):
    """The labels of a message's images, counted from the gradient of the last layer.

    Must know: the messages of each victim, the models it trained from, with a dense last layer, and data of the same
    kind, as everybody has. So for a server or an eavesdropper; without the shared key, the estimate is an
    outsider's. It ignores the defense, but for how a message is read: what noise it sees it estimates. The evidence of
    several rounds is added up as if they were independent.

    Cannot: see `attacks._labels.infer.restore`; mainly, count the labels of a batch that a trained model predicts
    surely. Of those it tells the usual ones, as the floor `label-prior` does.

    Raises:
        ValueError: in `run`, a loss that is not softmax cross-entropy, or a last layer that is not dense with one row a
            class.

    Source: Zhao et al. 2020 (iDLG), Wainakh et al. 2022 (LLG), Ma et al. 2023 (iLRG); where we differ stands in
        `attacks._labels.infer.restore`.
    """

    kind: ClassVar[str] = "labels"

    @property
    def needs(self) -> frozenset[str]:
        """Messages, the rounds' models and auxiliary data."""
        return needs("inferred")

    def run(self, seen: Observation, key: Key) -> Labels:
        """As many labels as each victim has images."""
        return Labels(labels_over_rounds(seen, "inferred", key.child("dummies")))
