"""Trap weights: a malicious server broadcasts parameters under which an update shows the image."""

from __future__ import annotations

from dataclasses import dataclass

from leakgauge.attacks._engine.posterior import ByPosterior
from leakgauge.attacks._engine.traps import trap
from leakgauge.harness.core.contract import Observation
from leakgauge.harness.core.rng import Key
from leakgauge.harness.core.vec import Vector


@dataclass(frozen=True)
class TrapWeights(ByPosterior):
    """Broadcasts parameters that make an update show its image, then searches for the most probable image, like `map`.

    The convolutions pass the image on to the first dense layer, whose gradient holds nearly all of the update's energy.
    So noise in proportion to the update's size, a clip and a quantizer's step hide less of the image than at honest
    parameters. The server discards the updates of the attacked rounds and continues from its own model.

    Must know: what `map` must know; it also chooses the parameters, which requires a malicious server. The parameters
    depend on auxiliary data and on a key, not on the defense or the victims. They are the same in every attacked round.

    Cannot: attack models that are not a chain of convolutions and dense layers (`resnet20`), or whose loss is not
    softmax cross-entropy; the training then fails with the reason. Behind max-pooling, only the maxima of the image
    pass. The images of a batch add up in one gradient; see `imprint`.

    Args: as in `map`. `evaluations` counts for all attacked rounds together; many noisy rounds need more evaluations
    than one round.

    Raises:
        ValueError: a parameter is out of range; in `broadcast`: the model has no trap weights.

    Source: "LDP is not enough" (arXiv 2502.08151). Differs: principal components instead of averages of 2 x 2 blocks,
        power in proportion to their standard deviation, a sigmoid without a baseline, and the posterior of `map`
        instead of a linear decoder.
    """

    @property
    def needs(self) -> frozenset[str]:
        """What `map` needs, auxiliary data, and the choice of the parameters."""
        return super().needs | {"auxiliary", "broadcast"}

    def broadcast(self, seen: Observation, key: Key) -> Vector:
        """The same parameters in every attacked round."""
        assert seen.auxiliary is not None
        return trap(seen.task, seen.auxiliary.x, key.child("trap"))
