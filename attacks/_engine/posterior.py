"""The common part of attacks that search for the most probable input, given the messages and the defense."""

from __future__ import annotations

from dataclasses import dataclass, replace

from leakgauge.attacks._engine.matching import at_once
from leakgauge.attacks._engine.objective import Explains, Kind, received_gradients
from leakgauge.attacks._engine.prior import BOX, TV, ImagePrior, Prior, check_prior, needs_of, prior_of
from leakgauge.attacks._engine.reconstruct import Search, Start, match
from leakgauge.attacks._engine.tables import Mixture
from leakgauge.attacks._labels.infer import ByLabels, LabelSource, check_source, labels_over_rounds
from leakgauge.harness.core.checks import positive
from leakgauge.harness.core.contract import Observation, Reconstruction
from leakgauge.harness.core.rng import Key
from leakgauge.harness.learn.prior import MOST

_MIXTURE = Key(0, ("mixture",))
"""Key that draws the initial classes of a mixture."""

_DECREASE = 1e-5
"""Share of the objective that 200 evaluations must gain: most of it is noise, but single nats still count."""

NAIVE_STD = 0.01
"""Assumed standard deviation of the estimate's entries, to weigh a distance of gradients against a prior."""

EASE = 3e5
"""Default of `Search.ease`; `attacks.map` documents the choice."""


def believing(search: Search, name: str, observation: Observation) -> Search:
    """The search with the prior called `name`; for `none`, the search is unchanged.

    A squared distance counts as normal errors of `NAIVE_STD`. The search runs in the prior's coordinates, from the
    prior's center if it has one, as in `map`.
    """
    if name == "none":
        return search
    scale = 0.5 / NAIVE_STD**2 if search.explains.kind == "l2" else 1.0
    explains = replace(search.explains, scale=scale, prior=prior_of(name, observation))
    return replace(search, explains=explains, decrease=_DECREASE, ease=EASE)


@dataclass(frozen=True)
class ByPosterior(ByLabels):
    """Combines the defense's own likelihood of the messages with a prior of inputs; parameters as in `attacks.map`."""

    prior: str = "gaussian"
    tv: float = TV
    box: float = BOX
    restarts: int = 1
    evaluations: int = 400
    objective: Kind = "likelihood"
    naive_std: float = NAIVE_STD
    unroll: bool = True
    labels: LabelSource = "inferred"
    start: Start = "uniform"
    ease: float = EASE
    warm: int = 400
    solve: bool = True

    def __post_init__(self) -> None:
        check_prior(self.prior)
        self._search(ImagePrior(self.tv, self.box))
        check_source(self.labels)
        positive(naive_std=self.naive_std)

    @property
    def needs(self) -> frozenset[str]:
        """Messages, the round's model, the labels if given, and auxiliary data to infer them or to fit the prior."""
        return super().needs | needs_of(self.prior)

    def _search(self, prior: Prior) -> Search:
        """The checked parameters."""
        scale = 0.5 / self.naive_std**2 if self.objective == "l2" else 1.0
        explains = Explains(self.objective, scale, self.unroll, prior)
        return Search(
            self.restarts, self.evaluations, self.start, explains, _DECREASE, self.ease, self.warm, self.solve
        )

    def at_once(self, dim: int) -> int | None:
        """As many victims as one search takes at once."""
        return at_once(dim)

    def run(self, observation: Observation, key: Key) -> Reconstruction:
        """Inputs, not clipped, and their labels."""
        if observation.task.columns:  # the search of a table draws record by record
            observation = replace(observation, device="cpu")
        targets = received_gradients(observation, numbers=self.labels == "given")
        labels = labels_over_rounds(observation, self.labels, key.child("dummies"))
        prior = prior_of(self.prior, observation, self.tv, self.box)
        search, words = self._search(prior), prior.words
        if self.prior != "tv" and observation.task.columns and observation.auxiliary is not None:
            mixture = Mixture.fit(observation.auxiliary.x[:MOST], observation.task.columns, _MIXTURE)
            search, words = replace(search, table=mixture), f"{words}, then {mixture.words}"
        return Reconstruction(match(observation, targets, labels, search, key, rounds=None), words)
