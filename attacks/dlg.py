"""Deep leakage from gradients: inputs and labels by matching the gradient."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from leakgauge.attacks._engine.objective import Explains, Kind, received_gradients
from leakgauge.attacks._engine.reconstruct import Search, Start, match
from leakgauge.harness.core.contract import Attack, Observation, Reconstruction
from leakgauge.harness.core.rng import Key


@dataclass(frozen=True)
class DLG(Attack):
    """Gradient matching for inputs and soft labels together, by L-BFGS.

    Must know: one message of each victim and the model it trained from. So for a server or an eavesdropper; without
    the shared key, the estimate is an outsider's. It ignores the defense, but for how a message is read, unless
    `objective` is `likelihood`.

    Cannot: use what images look like. Against noise it explains the noise too, and the picture drowns. Several images
    a victim need many times the evaluations. Of an update it takes the mean step for the gradient.

    Behind ReLU with max-pooling its search stops at kinks, as that of `idlg`, which tells what that comes to.

    Args:
        restarts: from other random starts; the one with the lowest objective is told.
        evaluations: of the objective and its gradient, for one victim and restart, at most.
        objective: `l2`: squared distance of the gradients; `likelihood`: by the defense's own likelihood.
        start: law of the first dummy inputs: `normal` (standard) or `uniform` (in [0, 1]).

    Raises:
        ValueError: a parameter out of range; in `run`, a loss that is not softmax cross-entropy.

    Source: Zhu, Liu and Han 2019, "Deep leakage from gradients", Algorithm 1. Differs: backtracking and a stop rule,
        without which 1 or 2 of 8 runs diverge.
    """

    kind: ClassVar[str] = "reconstruction"

    restarts: int = 2
    evaluations: int = 10_000
    objective: Kind = "l2"
    start: Start = "normal"

    def __post_init__(self) -> None:
        self._search()

    def _search(self) -> Search:
        """The checked parameters."""
        return Search(self.restarts, self.evaluations, self.start, Explains(self.objective))

    @property
    def aware(self) -> bool:
        """Whether the defense's likelihood is asked."""
        return self.objective == "likelihood"

    @property
    def needs(self) -> frozenset[str]:
        """Messages and the round's model."""
        return frozenset({"messages", "models"})

    def run(self, seen: Observation, key: Key) -> Reconstruction:
        """Raw inputs, not clipped, and the most likely of the labels found."""
        return Reconstruction(match(seen, received_gradients(seen), None, self._search(), key))
