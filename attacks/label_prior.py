"""The floor of label restoration: labels that ignore the messages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from leakgauge.attacks._engine.labels import apportion
from leakgauge.harness.core.contract import Attack, Labels, Observation
from leakgauge.harness.core.rng import Key


@dataclass(frozen=True)
class LabelPrior(Attack):
    """A control that ignores the messages and guesses labels in their proportions in data of the same kind.

    Must know: the number of messages and of their images, but not their content.

    Raises:
        ValueError: in `run`: no auxiliary data, or the labels are numbers.
    """

    kind: ClassVar[str] = "labels"
    floor: ClassVar[bool] = True
    needs: ClassVar[frozenset[str]] = frozenset({"messages", "auxiliary"})

    def run(self, observation: Observation, key: Key) -> Labels:
        """For one image, the most frequent label; for several, labels in the auxiliary proportions, rounded."""
        assert observation.messages is not None
        assert observation.auxiliary is not None
        if observation.task.numbers:
            raise ValueError("expected class labels, got the numbers of a regression")
        y = observation.auxiliary.y
        if not len(y):
            raise ValueError("expected at least 1 auxiliary label, got 0")
        share = y.bincount(minlength=observation.task.classes).double() / len(y)
        return Labels(tuple(apportion(share * message.images, message.images) for message in observation.messages))
