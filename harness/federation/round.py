"""One round of messages: only this module and the defenses themselves call `encode`, `transmit`, `estimate`, `decode`.

Training, probes, audits, shadow federations and attacks that imitate a client all go through `Round`, so an audit or an
attack meets the same bytes that a training sends.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from leakgauge.harness.core.contract import Defense, Link, Links, Message, Sender, Setting
from leakgauge.harness.core.errors import MessageError
from leakgauge.harness.core.rng import Key
from leakgauge.harness.core.threats import Threat
from leakgauge.harness.core.vec import Vector

_HEADER = struct.Struct("<II")
"""The envelope of a digital message: its round and its sender, 4 bytes each."""


def client_key(key: Key, number: int, client: int) -> Key:
    """The key of one client in round `number`; its children are `train`, `private` and `shared`."""
    return key.child("round", number, "client", client)


class Client(NamedTuple):
    """One client in a round: its update [d], its memory, and its two keys of the round."""

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
    """The messages of one round.

    Attributes:
        sent: each client's message, without its envelope.
        received: what arrives: the same messages, or their one superposition.
        memories: each client's memory after the round.
        links: one per message, with the shared keys.
    """

    sent: list[bytes]
    received: Sequence[bytes]
    memories: list[Any]
    links: Links


@dataclass(frozen=True)
class Round:
    """Round `number` of a federation, with the defense's public state of that round."""

    defense: Defense[Any, Any]
    setting: Setting
    state: Any
    number: int = 0

    def exchange(self, clients: Sequence[Client], channel: Key) -> Exchange:
        """Encode each client's update, seal and open it if it is digital, then transmit all messages.

        Args:
            channel: key of the channel noise.

        Raises:
            ValueError: an update is not finite; the error names round and client.
        """
        setting, number, defense = self.setting, self.number, self.defense
        sent, memories, senders, keys = [], [], [], []
        for sender, update, memory, private, shared in clients:
            try:
                wire, after = defense.encode(self.state, memory, update, Link(setting, sender, shared), private)
            except ValueError as error:
                raise ValueError(f"round {number}, client {sender.number}: {error}") from error
            sent.append(wire if defense.analog else unseal(seal(wire, number, sender.number), number, sender.number))
            memories.append(after)
            senders.append(sender)
            keys.append(shared)
        received = defense.transmit(self.state, sent, Links(setting, senders, None), channel)
        return Exchange(sent, received, memories, Links(setting, senders, keys))

    def silent(self, clients: Sequence[Sender], key: Key) -> list[Client]:
        """The remaining participants, with zero updates and new memories: the lowest client numbers that are free.

        They add only their noise to the aggregate: an adversary who knows their data can subtract everything else.
        """
        taken = {sender.number % self.setting.clients for sender in clients}
        free = [Sender(k, self.setting.samples) for k in range(self.setting.clients) if k not in taken]
        zero = torch.zeros(self.setting.dim)
        return [
            Client.of(sender, zero, self.defense.remember(self.setting), key.child("other", sender.number))
            for sender in free[: self.setting.participants - len(clients)]
        ]

    def decode(self, exchange: Exchange, private: Key) -> Vector:
        """Server: the mean update [d]. Only the server knows `private`."""
        return self.defense.decode(self.state, exchange.received, exchange.links, private)

    def revealed(self, exchange: Exchange, threat: Threat, private: Key) -> Vector:
        """[d] what an adversary who sees no single message learns: the decoded mean.

        An aggregator learns the mean of what the messages decode to, without the noise that the server adds itself.
        """
        if threat is not Threat.AGGREGATOR or self.defense.superposes:
            return self.decode(exchange, private)
        pairs = zip(exchange.received, exchange.links.each(), strict=True)
        return torch.stack([self.estimate(wire, link.sender, link.shared) for wire, link in pairs]).mean(0)

    def estimate(self, received: bytes, sender: Sender, shared: Key | None) -> Vector:
        """The update [d] that one received message reveals; `shared` is None for an outsider."""
        return self.defense.estimate(self.state, received, Link(self.setting, sender, shared))

    def read(self, message: Message) -> Vector:
        """The update [d] that a message reveals to an adversary."""
        return self.estimate(message.wire, message.sender, message.shared)


def seal(wire: bytes, number: int, sender: int) -> bytes:
    """The message in an envelope that names its round and its sender."""
    return _HEADER.pack(number, sender) + wire


def unseal(sealed: bytes, number: int, sender: int) -> bytes:
    """The message in an envelope of this round and sender.

    Raises:
        MessageError: the bytes are too short for an envelope, or it names another round or sender.
    """
    if len(sealed) < _HEADER.size:
        raise MessageError(f"expected an envelope of at least {_HEADER.size} bytes, got {len(sealed)} bytes")
    found, author = _HEADER.unpack_from(sealed)
    if (found, author) != (number, sender):
        raise MessageError(
            f"expected a message of round {number} from client {sender}, got one of round {found} from client {author}"
        )
    return sealed[_HEADER.size :]
