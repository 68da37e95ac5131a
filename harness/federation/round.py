"""One round of messages: the one place where they are made, carried and read.

The federated loop, probes, audits, shadow federations and attacks that imitate a client all go through here, so what is
audited and attacked is what a training sends.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from leakgauge.harness.core.contract import Defense, Link, Links, Message, Sender, Setting
from leakgauge.harness.core.rng import Key
from leakgauge.harness.core.vec import Vector
from leakgauge.harness.federation import envelope


def client_key(key: Key, number: int, client: int) -> Key:
    """The key of one client in round `number`; its children are `train`, `private` and `shared`."""
    return key.child("round", number, "client", client)


class Client(NamedTuple):
    """One client in a round: its update [d], what it remembers, and its two keys of the round."""

    sender: Sender
    update: Vector
    memory: Any
    private: Key
    shared: Key

    @classmethod
    def of(cls, sender: Sender, update: Vector, memory: Any, key: Key) -> Client:
        """A client whose keys are the children `private` and `shared` of `key`."""
        return cls(sender, update, memory, key.child("private"), key.child("shared"))


class Exchange(NamedTuple):
    """What crossed the wire in a round.

    Attributes:
        sent: each client's message, without its envelope.
        received: what arrived: the same messages, or the one superposition of them.
        memories: what each client remembers afterwards.
        links: of the messages, with the shared keys.
    """

    sent: list[bytes]
    received: Sequence[bytes]
    memories: list[Any]
    links: Links


@dataclass(frozen=True)
class Round:
    """Round `number` of a federation, at the defense's public state of that round."""

    defense: Defense[Any, Any]
    setting: Setting
    state: Any
    number: int = 0

    def exchange(self, clients: Sequence[Client], channel: Key) -> Exchange:
        """Encode each update, seal it if it is digital, transmit all messages, and open them.

        Args:
            channel: the key of the channel's own noise.

        Raises:
            ValueError: an update is not finite; the message names round and client.
        """
        sent, memories = [], []
        for client in clients:
            link = Link(self.setting, client.sender, client.shared)
            try:
                wire, memory = self.defense.encode(self.state, client.memory, client.update, link, client.private)
            except ValueError as error:
                raise ValueError(f"round {self.number}, client {client.sender.number}: {error}") from error
            if not self.defense.analog:
                who = client.sender.number
                wire = envelope.unseal(envelope.seal(wire, self.number, who), self.number, who)
            sent.append(wire)
            memories.append(memory)
        links = Links(self.setting, [client.sender for client in clients], [client.shared for client in clients])
        received = self.defense.transmit(self.state, sent, links._replace(shared=None), channel)
        return Exchange(sent, received, memories, links)

    def silent(self, clients: Sequence[Sender], key: Key) -> list[Client]:
        """The remaining participants, with updates of zero and no history: the lowest numbers that are not taken.

        Their noise is in the aggregate, and nothing else: an adversary who knows their data can subtract the rest.
        """
        taken = {who.number % self.setting.clients for who in clients}
        others = [Sender(k, self.setting.samples) for k in range(self.setting.clients) if k not in taken]
        zero = torch.zeros(self.setting.dim)
        return [
            Client.of(who, zero, self.defense.remember(self.setting), key.child("other", who.number))
            for who in others[: self.setting.participants - len(clients)]
        ]

    def decode(self, exchange: Exchange, private: Key) -> Vector:
        """The server's mean update [d]. `private` is known to the server only."""
        return self.defense.decode(self.state, exchange.received, exchange.links, private)

    def estimate(self, received: bytes, sender: Sender, shared: Key | None) -> Vector:
        """The update [d] that one received message shows; `shared` is None for an outsider."""
        return self.defense.estimate(self.state, received, Link(self.setting, sender, shared))

    def read(self, message: Message) -> Vector:
        """`estimate` of a message as an adversary sees it."""
        return self.estimate(message.wire, message.sender, message.shared)
