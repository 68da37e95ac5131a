"""Property inference: finds out whether many or few of the records behind a message have a property."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from leakgauge.attacks._engine.others import Blur
from leakgauge.attacks._engine.own_clients import ByOwnClients, Revealed, drawn, held, labels_of, most_clients, revealed
from leakgauge.harness.core.contract import Membership, Observation
from leakgauge.harness.core.rng import Key
from leakgauge.harness.core.table import spread_evenly

_CLIENTS = 1000  # clients of the adversary's own


@dataclass(frozen=True)
class Property(ByOwnClients):
    """Compares each message with messages of clients whose records have the property often, and seldom.

    What a message reveals of an update counts as normal, with the same covariance for both kinds of clients. Clients of
    the adversary's own, in pairs with the same labels, show the two means and the covariance, to which the errors of
    the defense add. The score is the log likelihood ratio; those of several rounds add up.

    Must know: the messages, the models of their rounds, the defense with its parameters, and data of the same kind of
    which it knows the property (`marked`).

    Cannot: find a property that the records' gradients do not depend on.

    Source: Melis et al. 2019, "Exploiting unintended feature leakage in collaborative learning", sec. 4.2 (passive
        property inference). Differs: a linear discriminant whose covariance knows the defense, in place of a random
        forest.
    """

    kind: ClassVar[str] = "property"

    def run(self, seen: Observation, key: Key) -> Membership:
        """One score for each victim; a higher one means that many of its records have the property."""
        assert seen.marked is not None
        records = seen.observed_rounds[0].messages[0].images
        pairs = most_clients(seen, _CLIENTS, records) // 2
        labels = labels_of(seen, pairs, records, key.child("labels")).repeat_interleave(2, 0)
        many = round(seen.marked.share * records)
        marks = spread_evenly(labels, torch.where(torch.arange(len(labels)) % 2 == 0, many, records - many))
        batches = drawn(seen, labels, key.child("records"), marks)
        scores = []
        for number, observed in enumerate(seen.observed_rounds):
            reading = max(revealed(seen, observed, batches, key.child("own", number)), key=_own_auc)
            scores.append(_ratios(reading.updates, reading, reading.sent))
        return Membership(torch.stack(scores).sum(0))


def _own_auc(reading: Revealed) -> float:
    """How often an own client with a message is told from one of the other kind; others are fitted, if there are."""
    others = reading.updates[len(reading.own) :]
    left = _ratios(others if len(others) >= len(reading.own) else reading.updates, reading, reading.own)
    return float((left[0::2, None] > left[None, 1::2]).double().mean())


def _ratios(updates: Tensor, reading: Revealed, sent: Tensor) -> Tensor:
    """[n] log likelihood ratios of many records with the property to few, for messages `sent` [n, d].

    Own clients with these updates [m, d], in turn of the two kinds, show both means and the covariance.
    """
    updates = reading.shrink * updates
    means = torch.stack([updates[0::2].mean(0), updates[1::2].mean(0)])
    rows = updates - means[torch.arange(len(updates)) % 2]
    blur = Blur.of(rows, reading.noise.expand(rows.shape[1]), held(len(reading.updates)))
    return blur.log_density(sent - means[0]) - blur.log_density(sent - means[1])
