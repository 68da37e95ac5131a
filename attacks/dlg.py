"""Deep leakage from gradients: finds inputs and labels by gradient matching."""

from __future__ import annotations

from dataclasses import dataclass

from leakgauge.attacks._engine.objective import Kind, received_gradients
from leakgauge.attacks._engine.posterior import ByMatching
from leakgauge.attacks._engine.reconstruct import Start
from leakgauge.harness.core.contract import Observation, Reconstruction
from leakgauge.harness.core.rng import Key


@dataclass(frozen=True)
class DLG(ByMatching):
    """Searches for inputs and soft labels whose gradient matches the received one, by L-BFGS.

    Must know: one message of each victim and the model of its round, as a server or an eavesdropper does. Without the
    shared key, it uses an outsider's estimate. It ignores the defense except to read messages, unless `objective` is
    `likelihood`.

    Cannot: use knowledge of what images look like. Under noise, it also fits the noise, which hides the image. Several
    images per victim need many times the evaluations. An update is treated as its mean step. Behind ReLU with
    max-pooling, the search stops at kinks (`docs/attacks.md` has results). Of a regression, it also searches for the
    label, which is a number.

    Args:
        restarts: number of random starts; the result with the lowest objective is returned.
        evaluations: maximum number of evaluations of the objective and its gradient, per victim and restart.
        objective: `l2`: squared distance of the gradients; `likelihood`: the defense's own likelihood.
        start: distribution of the first dummy inputs: `normal` (standard) or `uniform` (in [0, 1]).
        prior: `none`, as published; `gaussian`, `tv` or `module:function`: the prior of `map`, combined as in `map`
            with `objective = "l2"`.

    Raises:
        ValueError: a parameter is out of range; in `run`: a loss without a target for each score.

    Source: Zhu, Liu and Han 2019, "Deep leakage from gradients", Algorithm 1. Differs: has backtracking and a stop
        rule, without which 1 or 2 of 8 runs diverge.
    """

    restarts: int = 2
    evaluations: int = 10_000
    objective: Kind = "l2"
    start: Start = "normal"
    prior: str = "none"

    def run(self, observation: Observation, key: Key) -> Reconstruction:
        """Inputs, not clipped, each with its most likely label or, for a regression, number."""
        gradients = received_gradients(observation, numbers=True)
        return self.matched(observation, gradients, None, key)
