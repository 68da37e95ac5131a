"""Coordinates through a public channel: each lies between two levels and is sent as one of a few columns."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from leakgauge.defenses._common.clip import clip_coordinates
from leakgauge.defenses._common.reference import scaled
from leakgauge.defenses._common.scale import ByScale
from leakgauge.harness.core.claim import Arithmetic
from leakgauge.harness.core.codec import unpack_levels
from leakgauge.harness.core.contract import Apart, Likelihood, Link, Links, Setting
from leakgauge.harness.core.distribution import Choices, DistributionError, Integers, MessageDistribution, powers
from leakgauge.harness.core.errors import MessageError
from leakgauge.harness.core.stats import Numbers
from leakgauge.harness.core.vec import Vector

_LEAST = 1e-30  # smallest probability in the likelihood; keeps the logarithm and its gradient within float32


class Design(NamedTuple):
    """A channel between levels and the values that make it unbiased.

    Attributes:
        P: [levels in, levels out]; P[i, j] is the probability of column j for the level u_i = i / (levels in - 1).
        alpha: [levels out], increasing; the decoded value of column j.
    """

    P: Numbers
    alpha: Numbers

    @property
    def objective(self) -> float:
        """The variance that the channel adds: the mean of E (alpha_j - u_i)^2 over the levels u_i."""
        u = np.linspace(0.0, 1.0, len(self.P))
        return float((self.P * (u[:, None] - self.alpha) ** 2).sum() / len(u))


class ByChannel(ByScale[Design]):
    """A defense whose messages hold one column of a `Design` for each scaled number, linear between two levels."""

    @property
    @abstractmethod
    def width(self) -> int:
        """Bits of a column on the wire."""

    @property
    def reach(self) -> float:
        """Bound to which scaled numbers are clamped; the first and the last level are at -1 and 1."""
        return 1.0

    @property
    def arithmetic(self) -> Arithmetic:  # type: ignore[override]  # it follows from a parameter
        """Columns of a public channel: rounding-safe, unless floats of the update come first."""
        return self.scaling.before_levels

    def checked(self, channel: Numbers) -> Numbers:
        """The channel [levels in, levels out], whose promises `message_distribution` relies on.

        Raises:
            DistributionError: a promise is broken.
        """
        if not (channel.min() >= 0 and np.abs(channel.sum(1) - 1).max() <= 1e-9):
            raise DistributionError("the rows of the channel are not probabilities")
        return channel

    def places(self, numbers: Tensor, levels: int) -> Numbers:
        """[k] float64: the scaled numbers on the axis on which the levels are 0 to levels - 1."""
        clamped: Numbers = clip_coordinates(numbers.double(), self.reach).numpy()
        return (clamped + 1) / 2 * (levels - 1)

    def estimate(self, state: Design, received: bytes, link: Link) -> Vector:
        """The values of the columns, which are unbiased for the clamped update."""
        header, columns = self._read(received, link.setting, len(state.alpha))
        values = torch.from_numpy(2 * state.alpha[columns] - 1).float()
        return self.scaling.undo(header, values, link.setting.layout)

    def likelihood(self, state: Design, received: Sequence[bytes], links: Links) -> Likelihood:
        """Exact: a column's probability is linear between two levels. Adds a penalty for norms unlike the sent ones."""
        read = [self._read(wire, links.setting, len(state.alpha)) for wire in received]
        candidates = self.scaling.candidates([header for header, _ in read], links.setting.layout)
        columns = torch.from_numpy(np.stack([columns for _, columns in read]))
        steps = len(state.P) - 1
        # one entry per column and two neighboring levels; flat, because indexing by pairs is several times slower
        low = torch.from_numpy(state.P[:-1].T.copy()).float().flatten()
        rise = torch.from_numpy(np.diff(state.P, axis=0).T.copy()).float().flatten()
        first = steps * columns

        def hidden(update: Tensor) -> Tensor:
            place = (candidates.numbers(update).clamp(-self.reach, self.reach) + 1) / 2 * steps
            below = place.detach().floor().clamp(max=steps - 1).long()
            at = first + below
            chance = low[at] + rise[at] * (place - below)
            return -chance.clamp(_LEAST, 1.0).log().sum(-1)

        return Apart(hidden, candidates.penalty)

    def message_distribution(self, state: Design, memory: None, update: Vector, link: Link) -> MessageDistribution:
        """The probability of each column of the public channel, linear between two levels; the channel is checked.

        Raises:
            DistributionError: as for `checked`.
        """
        scaling = self.scaling
        header, numbers, places = scaled(update, link.setting.layout, scaling.mode, bound=scaling.bound)
        # float32, as on the client: a number rounded past a level could make the sent column impossible
        inside = np.clip(numbers.astype(np.float32).astype(np.float64), -self.reach, self.reach)
        place = (inside + 1) / 2 * (len(state.P) - 1)
        below = np.minimum(place.astype(np.int64), len(state.P) - 2)
        share, channel = (place - below)[:, None], self.checked(state.P)
        every = np.concatenate([channel[None], powers(channel)])
        chances = (1 - share) * every.take(below, 1) + share * every.take(below + 1, 1)
        return Choices(chances[0], self.width, places, header, chances[1:])

    def _read(self, received: bytes, setting: Setting, columns: int) -> tuple[bytes, Integers]:
        size = self.scaling.header_size(setting.layout)
        if len(received) < size:
            raise MessageError(f"expected a message with a header of {size} bytes, got {len(received)} bytes")
        sent = unpack_levels(received[size:], setting.dim, self.width)
        if sent.max(initial=0) >= columns:
            raise MessageError(f"expected columns 0 to {columns - 1}, got {sent.max()}")
        return received[:size], sent
