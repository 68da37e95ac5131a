"""The search of `dlg`, `idlg`, `map` and `trap-weights`, which differ in labels, prior and objective."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from leakgauge.attacks._engine.labels import ByLabels, LabelSource, by_slopes, check_source, labels_over_rounds
from leakgauge.attacks._engine.matching import at_once
from leakgauge.attacks._engine.objective import Explains, Kind, received_gradients
from leakgauge.attacks._engine.prior import BOX, TV, ImagePrior, Prior, check_prior, prior_of
from leakgauge.attacks._engine.reconstruct import Search, Start, match
from leakgauge.attacks._engine.tables import Mixture
from leakgauge.harness.core.checks import positive
from leakgauge.harness.core.contract import Observation, Reconstruction
from leakgauge.harness.core.rng import Key
from leakgauge.harness.learn.prior import MOST

_MIXTURE = Key(0, ("mixture",))  # key that draws the initial classes of a mixture
_DECREASE = 1e-5  # share of the objective that 200 evaluations must gain: most of it is noise, but single nats count

NAIVE_STD = 0.01
"""Assumed standard deviation of the estimate's entries, to weigh a distance of gradients against a prior."""

EASE = 3e5
"""Default of `Search.ease`; `docs/attacks.md` has its choice."""


class ByMatching(ByLabels):
    """Searches by L-BFGS for inputs that explain the messages.

    A subclass names the parameters of `attacks.map` that a user may set; here are the values of the others.
    """

    restarts: int
    evaluations: int
    start: Start
    tv: float = TV
    box: float = BOX
    naive_std: float = NAIVE_STD
    unroll: bool = False
    ease: float = EASE
    warm: int = 0
    solve: bool = False

    def __post_init__(self) -> None:
        """Check the parameters."""
        positive(naive_std=self.naive_std, ease=self.ease)
        self.search(None if self.prior == "none" else ImagePrior(self.tv, self.box))
        if self.prior != "none":
            check_prior(self.prior)
        if self.labels is not None:
            check_source(self.labels)

    def at_once(self, dim: int) -> int | None:
        """As many victims as one search takes at once."""
        return at_once(dim)

    def search(self, prior: Prior | None) -> Search:
        """The search in the prior's coordinates; a distance then counts as normal errors of `naive_std`."""
        scale = 1.0 if prior is None or self.objective == "likelihood" else 0.5 / self.naive_std**2
        explains = Explains(self.objective, scale, self.unroll, prior)
        plain = Search(self.restarts, self.evaluations, self.start, explains)
        if prior is None:
            return plain
        return replace(plain, decrease=_DECREASE, ease=self.ease, warm=self.warm, solve=self.solve)

    def matched(
        self, observation: Observation, gradients: Tensor, labels: Sequence[Tensor] | None, key: Key
    ) -> Reconstruction:
        """The inputs behind the first round's messages; `labels` None: the search includes them."""
        prior = None if self.prior == "none" else prior_of(self.prior, observation, self.tv, self.box)
        words = "" if prior is None else prior.words
        return Reconstruction(match(observation, gradients, labels, self.search(prior), key), words)


@dataclass(frozen=True)
class ByPosterior(ByMatching):
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
        super().__post_init__()

    def run(self, observation: Observation, key: Key) -> Reconstruction:
        """Inputs, not clipped, and their labels."""
        if (found := by_slopes(self, observation, key)) is not None:
            return found
        if observation.task.form.columns:  # the search of a table draws record by record
            observation = replace(observation, device="cpu")
        gradients = received_gradients(observation, numbers=self.labels == "given")
        labels = labels_over_rounds(observation, self.labels, key.child("dummies"))
        prior = prior_of(self.prior, observation, self.tv, self.box)
        search, words = self.search(prior), prior.words
        if self.prior != "tv" and observation.task.form.columns and observation.auxiliary is not None:
            mixture = Mixture.fit(observation.auxiliary.x[:MOST], observation.task.form.columns, _MIXTURE)
            search, words = replace(search, table=mixture), f"{words}, then {mixture.words}"
        return Reconstruction(match(observation, gradients, labels, search, key, rounds=None), words)
