"""Source inference: finds out which client holds a record."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from leakgauge.attacks._engine.own_clients import ByOwnClients
from leakgauge.attacks._members.presence import presence
from leakgauge.harness.core.contract import Observation, Traced
from leakgauge.harness.core.rng import Key, normal


@dataclass(frozen=True)
class Source(ByOwnClients):
    """Compares each client's messages with what they would be with the record and without it.

    The scores are log likelihood ratios of normal messages (see `_members.presence`); those of several rounds add up.

    Must know: every client's messages, the models of their rounds, the records in question with their labels, the
    defense with its parameters, and data of the same kind.

    Cannot: tell clients apart whose messages arrive as a sum; then the scores are random.

    Source: Hu et al. 2021, "Source inference attacks in federated learning". Differs: the messages are compared with
        the record's gradient and the errors of the defense, in place of the record's loss under each client's model.
    """

    kind: ClassVar[str] = "source"
    needs: ClassVar[frozenset[str]] = ByOwnClients.needs | {"candidates"}

    def run(self, seen: Observation, key: Key) -> Traced:
        """[n, clients] scores of the candidates; only guesses for sums are drawn."""
        assert seen.candidates is not None
        shape = (len(seen.candidates.y), seen.setting.clients)
        if seen.defense.superposes:
            return Traced(normal(key.child("guess"), shape, torch.float64))
        scores = torch.full(shape, -torch.inf, dtype=torch.float64)
        for sender, ratios in presence(seen, key.child("presence")):
            scores[:, sender] = torch.where(scores[:, sender].isinf(), 0.0, scores[:, sender]) + ratios
        return Traced(scores)
