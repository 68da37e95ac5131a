"""The floor of label restoration: what is guessed without looking."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from leakgauge.attacks._labels.infer import apportion
from leakgauge.harness.core.contract import Attack, Labels, Observation
from leakgauge.harness.core.rng import Key


@dataclass(frozen=True)
class LabelPrior(Attack):
    """A control: labels as often as they occur in data of the same kind, whatever was sent.

    Must know: how many messages there are and of how many images, but not what they say.

    Raises:
        ValueError: in `run`, no auxiliary data.
    """

    kind: ClassVar[str] = "labels"
    floor: ClassVar[bool] = True

    @property
    def needs(self) -> frozenset[str]:
        """Messages, to be counted, and auxiliary data."""
        return frozenset({"messages", "auxiliary"})

    def run(self, seen: Observation, key: Key) -> Labels:
        """Of one image the most frequent label; of several the auxiliary frequencies, rounded to whole labels."""
        assert seen.messages is not None
        assert seen.auxiliary is not None
        y = seen.auxiliary.y
        if not len(y):
            raise ValueError("expected at least 1 auxiliary label, got 0")
        share = y.bincount(minlength=seen.task.classes).double() / len(y)
        return Labels(tuple(apportion(share * message.images, message.images) for message in seen.messages))
