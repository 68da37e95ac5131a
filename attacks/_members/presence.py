"""How likely a record is behind each message, beside records that are unknown."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from leakgauge.attacks._engine.imitation import own_updates
from leakgauge.attacks._engine.others import Blur
from leakgauge.attacks._engine.own_clients import (
    TOGETHER,
    Revealed,
    drawn,
    held,
    labels_of,
    most_clients,
    own_pairs,
    revealed,
)
from leakgauge.attacks._members.traffic import chance_of, mixture
from leakgauge.harness.core.contract import Examples, Observation, ObservedRound, Setting
from leakgauge.harness.core.rng import Key

_CLIENTS = 300  # clients of the adversary's own

_OTHERS = 200  # auxiliary records that show the usual effect of a record


def presence(seen: Observation, key: Key, suspect: int | None = None) -> Iterator[tuple[int, Tensor]]:
    """The sender of each message, and for each candidate [n] the log likelihood ratio that the message holds it.

    What a message reveals counts as normal. Its covariance is that of clients of the adversary's own, with the errors
    of the defense. A candidate moves the mean by its share of the update, less that of a usual record. Messages of
    about equally many records, within a factor of 1.4, are read together.

    Args:
        suspect: only this sender's messages are read; None: all.
    """
    assert seen.candidates is not None
    assert seen.auxiliary is not None
    for number, observed in enumerate(seen.observed_rounds):
        asked = [each for each in observed.messages if suspect in (None, each.sender.number)]
        size = [round(2 * math.log2(max(1, message.images))) for message in asked]
        if not asked:
            continue
        usual = _alone(seen, observed, Examples(*(part[:_OTHERS] for part in seen.auxiliary))).mean(0)
        moves = _alone(seen, observed, seen.candidates) - usual
        for about in sorted(set(size)):
            some = [each for each, own in zip(asked, size, strict=True) if own == about]
            alike = observed._replace(messages=tuple(some))
            ratios = _ratios(seen, alike, round(2 ** (about / 2)), usual, moves, key.child(number, about))
            yield from zip((message.sender.number for message in some), ratios, strict=True)


def _ratios(seen: Observation, observed: ObservedRound, images: int, usual: Tensor, moves: Tensor, key: Key) -> Tensor:
    """[messages, n] log likelihood ratios of the candidates.

    Args:
        images: of an own client.
        usual: [d], the update of a usual record alone; moves: [n, d], by how much those of the candidates differ.
    """
    users = observed.messages[0].users
    whole = -(-images // users) * users
    labels = labels_of(seen, most_clients(seen, _CLIENTS, whole), whole, key.child("labels"), skewed=True)
    batches = drawn(seen, labels, key.child("records"))
    readings = revealed(seen, observed, batches, key.child("own"))
    own = len(readings[0].own)
    firsts = _alone(seen, observed, Examples(batches.x[:own, 0], batches.y[:own, 0])) - usual
    fitted = [_Fitted.of(reading) for reading in readings]
    shares = torch.full((own,), _share(seen.setting, whole, users), dtype=torch.float64)
    best = max(fitted, key=lambda each: own_pairs(each.ratios(each.reading.own, firsts, shares)))
    each = torch.tensor([_share(seen.setting, one.images, one.users) for one in observed.messages], dtype=torch.float64)
    chances = torch.tensor([[chance_of(message)] for message in observed.messages], dtype=torch.float64)
    return mixture(best.ratios(best.reading.sent, moves, each), chances)


def _share(setting: Setting, images: int, users: int) -> float:
    """The share of a record in the one step that takes it."""
    own = max(1, images // users)
    return 1 / (min(setting.batch, own) if setting.batch else own)


class _Fitted(NamedTuple):
    """A reading, and the normal distribution of what messages reveal, around its mean."""

    reading: Revealed
    center: Tensor
    blur: Blur

    @classmethod
    def of(cls, reading: Revealed) -> _Fitted:
        """The distribution by own clients who send no messages, if they are enough; by all otherwise."""
        others = reading.updates[len(reading.own) :]
        rows = reading.shrink * (others if len(others) >= len(reading.own) else reading.updates)
        center = rows.mean(0)
        # what none of a few own clients shows may still occur
        noise = reading.noise + (rows - center).square().mean() / len(rows)
        return cls(reading, center, Blur.of(rows - center, noise.expand(len(center)), held(len(reading.updates))))

    def ratios(self, sent: Tensor, moves: Tensor, shares: Tensor) -> Tensor:
        """[messages, n] for messages that reveal `sent` [messages, d]: log likelihood ratios of records.

        Args:
            moves: [n, d], by how much an update of the record alone differs from a usual one.
            shares: [messages], of a record in the message.
        """
        scaled = self.reading.shrink * moves / self.reading.scale
        shifts = self.blur.products(sent - self.center, scaled)
        return shares[:, None] * shifts + shares[:, None].square() * self.blur.log_density(scaled)


def _alone(seen: Observation, observed: ObservedRound, records: Examples) -> Tensor:
    """[n, d]: the updates of clients who have only one of these records, after one step.

    Later passes do not count: by then a client has fitted its records.
    """
    single = observed._replace(messages=(observed.messages[0]._replace(others=(), steps=1),))
    chunks = zip(*(torch.split(part[:, None], TOGETHER) for part in records), strict=True)
    rows = torch.cat([own_updates(seen, single, Examples(*chunk))[:, 0] for chunk in chunks])
    return rows.double().nan_to_num(0.0, 0.0, 0.0)
