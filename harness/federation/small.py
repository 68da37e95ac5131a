"""A defense in a small federation: any of its rounds, with chosen clients, memories and keys, as an adversary sees it.

Audits, fingerprints and the limit of reconstruction use `Federation`, so they see the bytes that a training sends.
`FORMULAS` are the formulas that recipes may draw for any defense; those of one defense are in its own module.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from leakgauge.harness.core import rng
from leakgauge.harness.core.cell import FederationSpec, Scalar
from leakgauge.harness.core.contract import Defense, Feedback, Links, Sender, Setting
from leakgauge.harness.core.rng import Key
from leakgauge.harness.core.threats import SEES, Threat
from leakgauge.harness.core.vec import Vector
from leakgauge.harness.federation.loop import setting_of
from leakgauge.harness.federation.registry import build
from leakgauge.harness.federation.round import Client, Exchange, Round
from leakgauge.harness.learn import models


@dataclass(frozen=True)
class Federation:
    """A defense in a federation.

    Attributes:
        history: the public state of each round.
    """

    defense: Defense[Any, Any]
    setting: Setting
    history: tuple[Any, ...]

    @classmethod
    def of(cls, defense: Defense[Any, Any], setting: Setting, rounds: int | None = None) -> Federation:
        """The federation without evaluated losses, for `rounds` (None: the setting's) or until the defense stops."""
        state, history = defense.init(setting), []
        for number in range(setting.rounds if rounds is None else rounds):
            if defense.stops(state):
                break
            history.append(state)
            state = defense.advance(state, Feedback(number, None, None))
        return cls(defense, setting, tuple(history))

    def round(self, number: int = 0) -> Round:
        """One round, with its state."""
        return Round(self.defense, self.setting, self.history[number], number)

    def memories(self, clients: int) -> list[Any]:
        """What clients remember before their first message."""
        return [self.defense.remember(self.setting) for _ in range(clients)]

    def exchange(
        self,
        updates: Iterable[Vector],
        key: Key,
        number: int = 0,
        *,
        senders: Sequence[Sender] | None = None,
        memories: Sequence[Any] | None = None,
        shared: Key | None = None,
    ) -> Exchange:
        """The messages of round `number` with these updates, with the keys that the training loop derives.

        Args:
            key: of the round; client k has its child ("client", k).
            senders: None: clients 0, 1, ... with the smallest number of samples.
            memories: None: the clients have sent nothing before.
            shared: the shared key of all these clients; None: each has its own.
        """
        each = list(updates)
        senders = [Sender(k, self.setting.samples) for k in range(len(each))] if senders is None else senders
        memories = self.memories(len(each)) if memories is None else memories
        clients = [
            Client.of(sender, update, memory, key.child("client", sender.number))
            for sender, update, memory in zip(senders, each, memories, strict=True)
        ]
        clients = [client._replace(shared=shared or client.shared) for client in clients]
        return self.round(number).among_silent(clients, key)

    def run(self, updates: Iterable[Iterable[Vector]], key: Key) -> Iterator[Exchange]:
        """The rounds with these updates; clients keep their memories, and round t gets the key's child ("round", t)."""
        memories: Sequence[Any] | None = None
        for number, of_round in enumerate(updates):
            exchange = self.exchange(of_round, key.child("round", number), number, memories=memories)
            memories = exchange.memories
            yield exchange

    def repeat(
        self, update: Vector, private: Key, shared: Key, channel: Key, number: int = 0, *, sender: Sender | None = None
    ) -> Exchange:
        """The message of one client alone (None: client 0) that has sent nothing before, with chosen keys."""
        sender = Sender(0, self.setting.samples) if sender is None else sender
        client = Client(sender, update, self.defense.remember(self.setting), private, shared)
        return self.round(number).exchange([client], channel)

    def estimates(self, exchange: Exchange, threat: Threat, number: int = 0) -> Tensor:
        """[n, d] the updates that n received messages reveal to an adversary; raises as `Round.estimate`."""
        round_, links = self.round(number), known_links(exchange.links, threat).each()
        pairs = zip(exchange.received, links, strict=False)  # a superposition is read by its first sender
        return torch.stack([round_.estimate(wire, link.sender, link.shared) for wire, link in pairs])


def known_links(links: Links, threat: Threat) -> Links:
    """The links as an adversary knows them: without the shared keys, unless it sees them."""
    return links if "shared" in SEES[threat] else links._replace(shared=None)


def layer_snr(mechanism: str, model: str, seed: int = 0, draws: int = 4, **parameters: Scalar) -> dict[str, float]:
    """Signal-to-noise ratio of messages with standard normal updates, averaged over the tensors of a model.

    Args:
        mechanism: name of a defense; `parameters` are its parameters.
        model: architecture for color images of 32 x 32 pixels and ten classes.
        seed: seed of the updates, and of all randomness of the messages.
        draws: number of messages.

    Returns:
        `layer_snr_db`: 10 log10 of the mean over messages and tensors of var(u) / var(u - decoded).

    Raises:
        LookupError, ValueError: there is no such defense or model, or a parameter is wrong.
    """
    layout = models.build(model, (3, 32, 32), 10).layout
    defense = build("defense", mechanism, parameters)
    samples = [100]  # of the client; the size of its message does not depend on them
    setting = setting_of(layout, FederationSpec(clients=1, rounds=1), samples, defense.local)
    federation, ratios = Federation(defense, setting, (defense.init(setting),)), []
    for number in range(draws):
        key = Key(seed).child("layer_snr", number)
        update = rng.normal(key.child("update"), (layout.dim,))
        exchange = federation.repeat(update, key.child("private"), key.child("shared"), key.child("channel"))
        (decoded,) = federation.estimates(exchange, Threat.SERVER)
        parts = zip(layout.split(update), layout.split(decoded), strict=True)
        ratios += [float(sent.var() / (sent - read).var()) for sent, read in parts]
    return {"layer_snr_db": 10 * math.log10(float(np.mean(ratios)))}


FORMULAS = {"layer_snr": layer_snr}
