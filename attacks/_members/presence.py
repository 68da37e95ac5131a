"""How likely a record is behind each message, beside records that are unknown."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from leakgauge.attacks._engine.imitation import CHUNK, own_updates
from leakgauge.attacks._engine.others import Blur
from leakgauge.attacks._engine.own_clients import Revealed, drawn, labels_of, most_clients, own_pairs, revealed
from leakgauge.harness.core.contract import Examples, Observation, ObservedRound
from leakgauge.harness.core.rng import Key

_CLIENTS = 400  # clients of the adversary's own

_OTHERS = 200  # auxiliary records that show the usual effect of a record


def presence(seen: Observation, key: Key) -> Iterator[tuple[int, Tensor]]:
    """The sender of each message, and for each candidate [n] the log likelihood ratio that the message holds it.

    What a message reveals counts as normal. Its covariance is that of clients of the adversary's own, with the errors
    of the defense. A candidate moves the mean by its share of the update, less that of a usual record. Messages of
    equally many records are read together.
    """
    for number, observed in enumerate(seen.observed_rounds):
        for images in sorted({message.images for message in observed.messages}):
            some = observed._replace(messages=tuple(each for each in observed.messages if each.images == images))
            ratios = _ratios(seen, some, images, key.child(number, images))
            yield from zip((message.sender.number for message in some.messages), ratios, strict=True)


def _ratios(seen: Observation, observed: ObservedRound, images: int, key: Key) -> Tensor:
    """[messages, n] log likelihood ratios of the candidates."""
    assert seen.candidates is not None
    assert seen.auxiliary is not None
    labels = labels_of(seen, most_clients(seen, _CLIENTS), images, key.child("labels"), skewed=True)
    batches = drawn(seen, labels, key.child("records"))
    reading = max(
        revealed(seen, observed, batches, key.child("own")), key=lambda each: _own_traced(seen, observed, each, batches)
    )
    return _score(seen, observed, reading, seen.candidates, reading.updates, reading.sent)


def _own_traced(seen: Observation, observed: ObservedRound, reading: Revealed, batches: Examples) -> float:
    """How well this reading traces records to own clients; others show the covariance, if there are."""
    own = len(reading.own)
    firsts, others = Examples(batches.x[:own, 0], batches.y[:own, 0]), reading.updates[own:]
    scores = _score(seen, observed, reading, firsts, others if len(others) >= own else reading.updates, reading.own)
    return own_pairs(scores)


def _score(
    seen: Observation, observed: ObservedRound, reading: Revealed, records: Examples, updates: Tensor, sent: Tensor
) -> Tensor:
    """[messages, n] log likelihood ratios of these records for messages [messages, d]."""
    assert seen.auxiliary is not None
    usual = _alone(seen, observed, Examples(*(part[:_OTHERS] for part in seen.auxiliary))).mean(0)
    message, center = observed.messages[0], updates.mean(0)
    share = reading.shrink * message.users / message.images / reading.scale
    moves = share * (_alone(seen, observed, records) - usual)
    blur = Blur.of(reading.shrink * (updates - center), reading.noise.expand(len(center)))
    return blur.products(sent - reading.shrink * center, moves) - blur.products(moves, moves).diagonal() / 2


def _alone(seen: Observation, observed: ObservedRound, records: Examples) -> Tensor:
    """[n, d]: the updates of clients who have only one of these records."""
    single = observed._replace(messages=(observed.messages[0]._replace(others=()),))
    chunks = zip(*(torch.split(part[:, None], CHUNK) for part in records), strict=True)
    rows = torch.cat([own_updates(seen, single, Examples(*chunk))[:, 0] for chunk in chunks])
    return rows.double().nan_to_num(0.0, 0.0, 0.0)
