"""The floor of reconstruction: guesses that ignore the messages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from leakgauge.harness.core import rng
from leakgauge.harness.core.contract import Attack, Guess, Observation, Reconstruction
from leakgauge.harness.core.rng import Key


@dataclass(frozen=True)
class Prior(Attack):
    """A control that makes the same guess from public data of the same kind, whatever was sent.

    Must know: the number of messages and of their images, but not their content. An attack that scores no better has
    learned nothing from a message.

    Args:
        guess: `mean`: the mean auxiliary input, pixel by pixel, which has the least expected error; `flat`: a flat
            image with the mean of each channel (for vectors, the mean vector); `other`: random auxiliary inputs, which
            look real.

    Raises:
        ValueError: an unknown guess; in `run`: fewer auxiliary inputs than one victim has images.
    """

    kind: ClassVar[str] = "reconstruction"
    floor: ClassVar[bool] = True

    guess: Literal["mean", "flat", "other"] = "mean"

    def __post_init__(self) -> None:
        if self.guess not in ("mean", "flat", "other"):
            raise ValueError(f"expected guess 'mean', 'flat' or 'other', got {self.guess!r}")

    @property
    def needs(self) -> frozenset[str]:
        """Messages, which are only counted, and auxiliary data."""
        return frozenset({"messages", "auxiliary"})

    def run(self, seen: Observation, key: Key) -> Reconstruction:
        """The chosen inputs, all with the most frequent auxiliary label."""
        assert seen.messages is not None
        assert seen.auxiliary is not None
        x, y = seen.auxiliary
        most = max((message.images for message in seen.messages), default=0)
        if len(x) < max(most, 1):
            raise ValueError(f"expected at least {max(most, 1)} auxiliary inputs, got {len(x)}")
        label = y.mode().values.to(torch.int64)
        guesses = []
        for message in seen.messages:
            inputs = self._inputs(x, message.images, key.child(message.sender.number))
            guesses.append(Guess(inputs, label.repeat(message.images), 0.0, 0))
        return Reconstruction(tuple(guesses))

    def _inputs(self, x: Tensor, count: int, key: Key) -> Tensor:
        """`count` guesses, from auxiliary inputs x."""
        if self.guess == "other":
            return x[torch.from_numpy(rng.subset(key, len(x), count))]
        over = (0, *range(2, x.ndim)) if self.guess == "flat" else 0
        mean = x.double().mean(dim=over, keepdim=True).to(x.dtype)
        return mean.expand(count, *x.shape[1:]).clone()
