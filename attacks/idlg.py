"""Improved deep leakage from gradients: infers labels first, then searches for inputs."""

from __future__ import annotations

from dataclasses import dataclass

from leakgauge.attacks._engine.matching import at_once
from leakgauge.attacks._engine.objective import Explains, Kind, received_gradients
from leakgauge.attacks._engine.posterior import believing
from leakgauge.attacks._engine.prior import check_prior, needs_of
from leakgauge.attacks._engine.reconstruct import Search, Start, match
from leakgauge.attacks._labels.infer import ByLabels, LabelSource, check_source, labels_of
from leakgauge.harness.core.contract import Observation, Reconstruction
from leakgauge.harness.core.rng import Key


@dataclass(frozen=True)
class IDLG(ByLabels):
    """Infers labels from the last layer's gradient, then searches for inputs by gradient matching with L-BFGS.

    Must know: one message of each victim and the model of its round, with a dense last layer, and data of the same kind
    to infer the labels of batches; a server or an eavesdropper does. Without the shared key, it uses an outsider's
    estimate. It ignores the defense except to read messages, unless `objective` is `likelihood`.

    Cannot: use knowledge of what images look like. Under noise, it also fits the noise, which hides the image. Wrongly
    inferred labels are never corrected. An update is treated as its mean step.

    On models of a federation, fresh and after 100 rounds (study `trained-models`: 8 photographs, undefended, mean
    SSIM, floor 0.25): sigmoid and stride 0.42 to 0.88, dense ReLU 0.68 and 0.88, one ReLU convolution 1.00 and 0.63;
    behind ReLU with max-pooling 0.06 to 0.12, below the floor.

    Args:
        restarts: number of random starts; the result with the lowest objective is returned.
        evaluations: maximum number of evaluations of the objective and its gradient, per victim and restart.
        objective: `l2`: squared distance of the gradients; `likelihood`: the defense's own likelihood.
        labels: `inferred`, or `given`: the true labels, which a study must grant.
        start: law of the first dummy inputs: `normal` (standard) or `uniform` (in [0, 1]).
        prior: `none`, as published; `gaussian`, `tv` or `module:function`: the prior of `map`, combined as in `map`
            with `objective = "l2"`.

    Raises:
        ValueError: a parameter is out of range; in `run`: a loss that is not softmax cross-entropy, or, to infer
            labels, a last layer that is not dense with one row per class.

    Source: Zhao, Mopuri and Bilen 2020, "iDLG: improved deep leakage from gradients", Algorithm 1. Differs: infers
        labels of several images (`attacks._labels.infer`); has backtracking and a stop rule.
    """

    restarts: int = 2
    evaluations: int = 10_000
    objective: Kind = "l2"
    labels: LabelSource = "inferred"
    start: Start = "normal"
    prior: str = "none"

    def __post_init__(self) -> None:
        self._search()
        check_prior(self.prior, without=True)
        check_source(self.labels)

    @property
    def needs(self) -> frozenset[str]:
        """What `ByLabels` needs, and auxiliary data for a prior that is fitted to them."""
        return super().needs | needs_of(self.prior)

    def _search(self) -> Search:
        """The checked parameters."""
        return Search(self.restarts, self.evaluations, self.start, Explains(self.objective))

    def at_once(self, dim: int) -> int | None:
        """As many victims as one search takes at once."""
        return at_once(dim)

    def run(self, observation: Observation, key: Key) -> Reconstruction:
        """Inputs, not clipped, and their labels."""
        targets = received_gradients(observation)
        labels = labels_of(observation, targets, self.labels, key.child("dummies"))
        search = believing(self._search(), self.prior, observation)
        words = "" if search.explains.prior is None else search.explains.prior.words
        return Reconstruction(match(observation, targets, labels, search, key), words)
