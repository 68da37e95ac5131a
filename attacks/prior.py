"""The floor of reconstruction: guesses that ignore the messages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor

from leakgauge.harness.core import rng
from leakgauge.harness.core.contract import Attack, Guess, Observation, Reconstruction
from leakgauge.harness.core.rng import Key
from leakgauge.harness.core.table import Column, commonest

Guessing = Literal["mean", "flat", "other", "majority"]


@dataclass(frozen=True)
class Prior(Attack):
    """A control that makes the same guess from public data of the same kind, whatever was sent.

    Must know: the number of messages and of their images, but not their content. An attack that scores no better has
    learned nothing from a message.

    Args:
        guess: `mean`: the mean auxiliary input, pixel by pixel, which has the least expected error; `flat`: a flat
            image with the mean of each channel (for vectors, the mean vector); `other`: random auxiliary inputs, which
            look real; `majority`: for tables, the guess for each column that is right most often.

    Raises:
        ValueError: an unknown guess; in `run`: fewer auxiliary inputs than one victim has images, or `majority` for
            inputs that are not a table.
    """

    kind: ClassVar[str] = "reconstruction"
    floor: ClassVar[bool] = True
    needs: ClassVar[frozenset[str]] = frozenset({"messages", "auxiliary"})

    guess: Guessing = "mean"

    def __post_init__(self) -> None:
        if self.guess not in get_args(Guessing):
            raise ValueError(f"expected guess 'mean', 'flat', 'other' or 'majority', got {self.guess!r}")

    def run(self, observation: Observation, key: Key) -> Reconstruction:
        """The chosen inputs, all with the most frequent auxiliary label, or the mean of a regression's numbers."""
        assert observation.messages is not None
        assert observation.auxiliary is not None
        x, y = observation.auxiliary
        most = max((message.images for message in observation.messages), default=0)
        if len(x) < max(most, 1):
            raise ValueError(f"expected at least {max(most, 1)} auxiliary inputs, got {len(x)}")
        label = y.mean(0) if y.is_floating_point() else y.mode().values.to(torch.int64)
        guesses = []
        for message in observation.messages:
            inputs = self._inputs(x, message.images, key.child(message.sender.number), observation.task.columns)
            guesses.append(Guess(inputs, label.expand(message.images, *label.shape), 0.0, 0))
        return Reconstruction(tuple(guesses))

    def _inputs(self, x: Tensor, count: int, key: Key, columns: Sequence[Column]) -> Tensor:
        if self.guess == "majority":
            if not columns:
                raise ValueError(
                    "expected data with known columns, such as adult, for guess 'majority', got other data"
                )
            return commonest(x, columns).expand(count, -1).clone()
        if self.guess == "other":
            return x[torch.from_numpy(rng.subset(key, len(x), count))]
        over = (0, *range(2, x.ndim)) if self.guess == "flat" else 0
        mean = x.double().mean(dim=over, keepdim=True).to(x.dtype)
        return mean.expand(count, *x.shape[1:]).clone()
