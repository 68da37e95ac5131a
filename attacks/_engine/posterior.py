"""The common part of attacks that look for the most probable input, given the messages and the defense."""

from __future__ import annotations

from dataclasses import dataclass, replace

from leakgauge.attacks._engine.objective import Explains, Kind, received_gradients
from leakgauge.attacks._engine.prior import ImagePrior, Prior, fitting
from leakgauge.attacks._engine.reconstruct import Search, Start, match
from leakgauge.attacks._engine.tables import Mixture
from leakgauge.attacks._labels.infer import ByLabels, LabelSource, check_source, labels_over_rounds
from leakgauge.harness.core.checks import positive
from leakgauge.harness.core.contract import Observation, Reconstruction
from leakgauge.harness.core.rng import Key
from leakgauge.harness.learn.prior import MOST

_MIXTURE = Key(0, ("mixture",))
"""Of the first classes of a mixture."""

_DECREASE = 1e-5
"""Share of the objective that 200 evaluations must gain: most of it is noise, and single nats still count."""


@dataclass(frozen=True)
class ByPosterior(ByLabels):
    """Combines the defense's own likelihood of the messages with a prior of inputs; parameters as in `attacks.map`."""

    prior: str = "gaussian"
    tv: float = 5.0
    box: float = 100.0
    restarts: int = 1
    evaluations: int = 400
    objective: Kind = "likelihood"
    naive_std: float = 0.01
    unroll: bool = True
    labels: LabelSource = "inferred"
    start: Start = "uniform"
    ease: float = 3e5
    warm: int = 400
    solve: bool = True

    def __post_init__(self) -> None:
        smooth = ImagePrior(self.tv, self.box)
        if self.prior != "tv":
            fitting(self.prior)
        self._search(smooth)
        check_source(self.labels)
        positive(naive_std=self.naive_std)

    @property
    def needs(self) -> frozenset[str]:
        """Messages, the round's model, the labels if given, and auxiliary data to infer them or to fit the prior."""
        return super().needs | ({"auxiliary"} if self.prior != "tv" else set())

    def _prior(self, seen: Observation) -> Prior:
        """The prior, fitted to the auxiliary inputs."""
        if self.prior == "tv":
            return ImagePrior(self.tv, self.box)
        assert seen.auxiliary is not None
        return fitting(self.prior)(seen.auxiliary.x, self.box)

    def _search(self, prior: Prior) -> Search:
        """The checked parameters."""
        scale = 0.5 / self.naive_std**2 if self.objective == "l2" else 1.0
        explains = Explains(self.objective, scale, self.unroll, prior)
        return Search(
            self.restarts, self.evaluations, self.start, explains, _DECREASE, self.ease, self.warm, self.solve
        )

    def run(self, seen: Observation, key: Key) -> Reconstruction:
        """Raw inputs, not clipped, and the labels."""
        targets = received_gradients(seen)
        labels = labels_over_rounds(seen, self.labels, key.child("dummies"))
        prior = self._prior(seen)
        search, words = self._search(prior), prior.words
        if self.prior != "tv" and seen.task.columns and seen.auxiliary is not None:
            mixture = Mixture.fit(seen.auxiliary.x[:MOST], seen.task.columns, _MIXTURE)
            search, words = replace(search, table=mixture), f"{words}; {mixture.words}"
        return Reconstruction(match(seen, targets, labels, search, key, rounds=None), words)
