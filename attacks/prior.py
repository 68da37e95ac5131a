"""The floor of reconstruction: guesses that ignore the messages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor

from leakgauge.harness.core import rng
from leakgauge.harness.core.contract import Attack, Guess, Observation, Reconstruction
from leakgauge.harness.core.form import ALL, Form
from leakgauge.harness.core.rng import Key

Guessing = Literal["mean", "flat", "other", "majority"]


@dataclass(frozen=True)
class Prior(Attack):
    """A control that makes the same guess from public data of the same kind, whatever was sent.

    Must know: the number of messages and of their images, but not their content. An attack that scores no better has
    learned nothing from a message.

    Args:
        guess: `mean`: the mean auxiliary input, pixel by pixel, which has the least expected error, or the most typical
            text; `flat`: a flat image with the mean of each channel (for vectors, the mean vector); `other`: random
            auxiliary inputs, which look real; `majority`: for tables, the guess for each column that is right most
            often, and for texts the most frequent tokens.

    Raises:
        ValueError: an unknown guess; in `run`: fewer auxiliary inputs than one victim has images, or `majority` for
            inputs of other forms.
    """

    kind: ClassVar[str] = "reconstruction"
    floor: ClassVar[bool] = True
    needs: ClassVar[frozenset[str]] = frozenset({"messages", "auxiliary"})

    guess: Guessing = "mean"

    @property
    def forms(self) -> frozenset[str]:
        """All forms have a blind guess."""
        return ALL

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
            inputs = self._inputs(x, message.images, key.child(message.sender.number), observation.task.form)
            guesses.append(Guess(inputs, label.expand(message.images, *label.shape), 0.0, 0))
        return Reconstruction(tuple(guesses))

    def _inputs(self, x: Tensor, count: int, key: Key, form: Form) -> Tensor:
        if self.guess == "majority":
            return form.blind(x, majority=True).expand(count, *x.shape[1:]).clone()
        if self.guess == "other":
            return x[torch.from_numpy(rng.subset(key, len(x), count))]
        if self.guess == "flat" and form.continuous:
            mean = x.double().mean(dim=(0, *range(2, x.ndim)), keepdim=True).to(x.dtype)
            return mean.expand(count, *x.shape[1:]).clone()
        return form.blind(x).expand(count, *x.shape[1:]).clone()
