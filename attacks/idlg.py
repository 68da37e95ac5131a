"""Improved deep leakage from gradients: labels first, then inputs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from leakgauge.attacks._engine.objective import Explains, Kind, received_gradients
from leakgauge.attacks._engine.reconstruct import Search, Start, match
from leakgauge.attacks._labels.infer import LabelSource, check_source, labels_of, needs
from leakgauge.harness.core.contract import Attack, Observation, Reconstruction
from leakgauge.harness.core.rng import Key


@dataclass(frozen=True)
class IDLG(Attack):
    """Labels read off the last layer's gradient, then gradient matching for the inputs, by L-BFGS.

    Must know: one message of each victim and the model it trained from, with a dense last layer, and data of the
    same kind, which tell the labels of batches. So for a server or an eavesdropper; without the shared key, the
    estimate is an outsider's. It ignores the defense, but for how a message is read, unless `objective` is
    `likelihood`.

    Cannot: use what images look like. Against noise it explains the noise too, and the picture drowns. Labels that it
    infers wrongly are never corrected. Of an update it takes the mean step for the gradient.

    On models of a federation, fresh and after 100 rounds (study `trained-models`: 8 photographs, undefended, mean
    SSIM, floor 0.25): sigmoid and stride 0.42 to 0.88, dense ReLU 0.68 and 0.88, one ReLU convolution 1.00 and 0.63;
    behind ReLU with max-pooling below the floor, 0.06 to 0.12.

    Args:
        restarts: from other random starts; the one with the lowest objective is told.
        evaluations: of the objective and its gradient, for one victim and restart, at most.
        objective: `l2`: squared distance of the gradients; `likelihood`: by the defense's own likelihood.
        labels: `inferred`, or `given`: the true ones, which a study must grant.
        start: law of the first dummy inputs: `normal` (standard) or `uniform` (in [0, 1]).

    Raises:
        ValueError: a parameter out of range; in `run`, a loss that is not softmax cross-entropy, or, to infer labels, a
            last layer that is not dense with one row a class.

    Source: Zhao, Mopuri and Bilen 2020, "iDLG: improved deep leakage from gradients", Algorithm 1. Differs: labels of
        several images (`attacks._labels.infer`), backtracking and a stop rule.
    """

    kind: ClassVar[str] = "reconstruction"

    restarts: int = 2
    evaluations: int = 10_000
    objective: Kind = "l2"
    labels: LabelSource = "inferred"
    start: Start = "normal"

    def __post_init__(self) -> None:
        self._search()
        check_source(self.labels)

    def _search(self) -> Search:
        """The checked parameters."""
        return Search(self.restarts, self.evaluations, self.start, Explains(self.objective))

    @property
    def aware(self) -> bool:
        """Whether the defense's likelihood is asked."""
        return self.objective == "likelihood"

    @property
    def needs(self) -> frozenset[str]:
        """Messages, the round's model, and the labels where they are given, else auxiliary data to infer them with."""
        return needs(self.labels)

    def run(self, seen: Observation, key: Key) -> Reconstruction:
        """Raw inputs, not clipped, and the labels."""
        targets = received_gradients(seen)
        labels = labels_of(seen, targets, self.labels, key.child("dummies"))
        return Reconstruction(match(seen, targets, labels, self._search(), key))
