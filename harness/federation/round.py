"""One round of messages: only this module and the defenses themselves call `encode`, `transmit`, `estimate`, `decode`.

Training, probes, audits, shadow federations and attacks that imitate a client all use `Round`, so audits and attacks
see the same bytes that a training sends.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import torch

from leakgauge.harness.core import rng
from leakgauge.harness.core.checks import check_update
from leakgauge.harness.core.contract import Defense, Link, Links, Message, Sender, Setting
from leakgauge.harness.core.errors import MessageError
from leakgauge.harness.core.rng import Key, global_states
from leakgauge.harness.core.threats import SEES, Threat
from leakgauge.harness.core.vec import Vector

_HEADER = struct.Struct("<II")  # the envelope of a digital message: its round and its sender, 4 bytes each

_ROUNDING = 1e-3
"""Relative tolerance above a message's norm bound, well above the float32 rounding of an honest message."""


def client_key(key: Key, number: int, client: int) -> Key:
    """The key of one client in round `number`; its children are `train`, `private` and `shared`."""
    return key.child("round", number, "client", client)


def participants(key: Key, number: int, clients: Sequence[int], setting: Setting) -> list[int]:
    """The clients that take part in a round, of the sorted numbers of all; `key` is that of the training."""
    count, drawn = setting.participants, key.child("round", number, "participants")
    if setting.participation == "poisson":
        takes = rng.uniform(drawn, (len(clients),)) < count / len(clients)
        return [k for k, taken in zip(clients, takes.tolist(), strict=True) if taken]
    if setting.participation == "turns":
        dealt = rng.permutation(key.child("turns"), len(clients))
        first = number % setting.groups * count
        return sorted(clients[i] for i in dealt[first : first + count])
    return [clients[i] for i in rng.subset(drawn, len(clients), count)]


class Client(NamedTuple):
    """One client in a round: its update [d], its memory, and its two keys of the round.

    own: the bytes that it sends of its own choice; empty: what the defense encodes.
    """

    sender: Sender
    update: Vector
    memory: Any
    private: Key
    shared: Key
    own: bytes = b""

    @classmethod
    def of(cls, sender: Sender, update: Vector, memory: Any, key: Key) -> Client:
        """A client whose keys are the children `private` and `shared` of `key`."""
        return cls(sender, update, memory, key.child("private"), key.child("shared"))

    def silent(self) -> Client:
        """The client with an update of zero."""
        return self._replace(update=torch.zeros_like(self.update), own=b"")


class SealedMessage(NamedTuple):
    """A remote client's message in its envelope, and the shared key of the round, as the server holds them.

    fault: the client's reason why its message does not count; the client then sends only its noise. Empty: it counts.
    """

    sender: Sender
    wire: bytes
    shared: Key
    fault: str = ""

    def silent(self) -> SealedMessage:
        """The sealed message with its fault cleared, so that its content enters the sum as noise."""
        return self._replace(fault="")


C = TypeVar("C", Client, SealedMessage)


class Exchange(NamedTuple):
    """The messages of one round.

    Attributes:
        sent: each client's message, without its envelope.
        received: the received messages: the sent ones, or their one superposition.
        memories: each client's memory after the round.
        links: one per message, with the shared keys.
    """

    sent: list[bytes]
    received: Sequence[bytes]
    memories: list[Any]
    links: Links


class Collected(NamedTuple, Generic[C]):
    """A round as the server collects it.

    Attributes:
        clients: the clients that count, and on a channel that superposes also those that send only their noise.
        exchange: the messages of `clients`.
        links: links of the clients that count.
        updates: the decoded update of each received message; the sum if the channel superposes.
        mean: the mean update [d] of the clients that count; None: no client counts.
        dropped: for each client that does not count, by its number, the reason.
    """

    clients: Sequence[C]
    exchange: Exchange
    links: Links
    updates: list[Vector]
    mean: Vector | None
    dropped: dict[int, str]


@dataclass(frozen=True)
class Round:
    """Round `number` of a federation, with the defense's public state of that round."""

    defense: Defense[Any, Any]
    setting: Setting
    state: Any
    number: int = 0

    def exchange(self, clients: Sequence[Client] | Sequence[SealedMessage], channel: Key) -> Exchange:
        """Encode each client's update, or open its sealed message, then transmit all messages.

        A message that stays in this process has no envelope, because sealing and opening would only copy it.

        Args:
            clients: a sealed message's content replaces the encoded update, and the sealed message has no memory.
            channel: key of the channel noise.

        Raises:
            ValueError: an update is not finite; the error names round and client.
            MessageError: the channel cannot carry a waveform, or a sealed message has a fault or is of another client
                or round.
        """
        sent, memories, senders, keys = [], [], [], []
        for client in clients:
            wire, memory = self._encode(client) if isinstance(client, Client) else (self.opened(client), None)
            sent.append(wire)
            memories.append(memory)
            senders.append(client.sender)
            keys.append(client.shared)
        received = self.defense.transmit(self.state, sent, Links(self.setting, senders, None), channel)
        return Exchange(sent, received, memories, Links(self.setting, senders, keys))

    def encode(self, client: Client) -> tuple[Any, Any]:
        """The client's half alone, without checks: the message that `exchange` transmits, and the new memory."""
        if client.own:
            return client.own, client.memory
        link = Link(self.setting, client.sender, client.shared)
        return self.defense.encode(self.state, client.memory, client.update, link, client.private)

    def unrepeated(self, client: Client, sent: bytes) -> str:
        """Why the message `sent` of a client with a new memory does not follow from its keys; empty: it does.

        It encodes once more: numbers drawn from a global generator, or from the operating system, do not repeat.
        """
        before = global_states()
        again, _ = self.encode(client)
        after = global_states()
        moved = [name for name in before if before[name] != after[name]]
        if again == sent and not moved:
            return ""
        drawn = f"`encode` draws from the global generator of {' and '.join(moved)}" if moved else ""
        return drawn or "`encode` sends other bytes for the same update and keys"

    def send(self, client: Client) -> tuple[SealedMessage, Any]:
        """Client: the sealed message to a remote server, and the client's memory if the server accepts the sealed
        message.

        If the update is faulty, the sealed message states the fault. Its message is then empty, or the client's noise
        alone if the channel superposes.
        """
        try:
            wire, after = self._encode(client)
            return SealedMessage(client.sender, self.sealed(wire, client.sender), client.shared), after
        except ValueError as error:
            silent = self.sealed(self._encode(client.silent())[0], client.sender) if self.defense.superposes else b""
            return SealedMessage(client.sender, silent, client.shared, self._reason(error, client)), client.memory

    def _encode(self, client: Client) -> tuple[bytes, Any]:
        try:
            check_update(client.update)
            wire, after = self.encode(client)
            return b"".join([wire]), after  # turns any bytes-like object into bytes, without copying bytes
        except ValueError as error:
            raise ValueError(f"round {self.number}, client {client.sender.number}: {error}") from error

    def sealed(self, wire: bytes, sender: Sender) -> bytes:
        """A message in an envelope that names its round and its sender; a waveform has none."""
        return wire if self.defense.analog else _HEADER.pack(self.number, sender.number) + wire

    def opened(self, sealed: SealedMessage) -> bytes:
        """The message in a sealed message.

        Raises:
            MessageError: the sealed message has a fault or is too short for an envelope, or its envelope names another
                round or client.
        """
        if sealed.fault:
            raise MessageError(sealed.fault)
        if self.defense.analog:
            return sealed.wire
        if len(sealed.wire) < _HEADER.size:
            raise MessageError(f"expected an envelope of at least {_HEADER.size} bytes, got {len(sealed.wire)} bytes")
        expected, envelope = (self.number, sealed.sender.number), _HEADER.unpack_from(sealed.wire)
        if envelope != expected:
            asked, got = (f"round {number} from client {sender}" for number, sender in (expected, envelope))
            raise MessageError(f"expected a message of {asked}, got one of {got}")
        return sealed.wire[_HEADER.size :]

    def collect(self, clients: Sequence[C], channel: Key, server: Key) -> Collected[C]:
        """`exchange` and `decode` without the clients whose update is not finite or whose message is refused.

        The round proceeds as if these clients had not been drawn. If the channel superposes, a client with a faulty
        update sends only its noise, because the others rely on this noise; if only the sum is faulty, all clients are
        dropped. A sealed message that states no fault but is refused is left out of the sum too.

        Args:
            channel, server: keys of the channel noise and of the server.
        """
        try:
            return self._collect(clients, {}, channel, server)
        except ValueError:
            dropped = {client.sender.number: why for client in clients if (why := self._fault(client, channel))}
        faulty = [client.silent() for client in clients if client.sender.number in dropped]
        quiet: list[C] = [client for client in faulty if self.defense.superposes and not self._fault(client, channel)]
        sending: list[C] = [client for client in clients if client.sender.number not in dropped]
        try:
            return self._collect(sending + quiet if sending else [], dropped, channel, server)
        except ValueError as error:
            everyone = {client.sender.number: str(error) for client in clients}
            return self._collect([], everyone | dropped, channel, server)

    def _collect(self, clients: Sequence[C], dropped: dict[int, str], channel: Key, server: Key) -> Collected[C]:
        """The round of clients that all send; the clients in `dropped` do not count."""
        if not clients:
            nothing = Links(self.setting, [], [])
            return Collected([], Exchange([], [], [], nothing), nothing, [], None, dropped)
        exchange = self.exchange(clients, channel)
        counted = [client for client in clients if client.sender.number not in dropped]
        links = Links(self.setting, [client.sender for client in counted], [client.shared for client in counted])
        updates = [self.accept(wire, link) for wire, link in zip(exchange.received, links.each(), strict=False)]
        if type(self.defense).decode is Defense.decode:  # each message is decoded only once
            mean = _finite(self.defense.average(updates, links, server))
        else:
            mean = self.decode(exchange._replace(links=links), server)
        return Collected(clients, exchange, links, updates, mean, dropped)

    def _fault(self, client: C, channel: Key) -> str:
        """Why the server refuses the message of this client alone; empty: it accepts the message."""
        try:
            exchange = self.exchange([client], channel)
            self.accept(exchange.received[0], exchange.links.each()[0])
        except ValueError as error:
            return self._reason(error, client)
        return ""

    def _reason(self, error: ValueError, client: Client | SealedMessage) -> str:
        """The error text without round and client, which are stored beside it."""
        return str(error).removeprefix(f"round {self.number}, client {client.sender.number}: ")

    def silent(self, clients: Sequence[Sender], key: Key) -> list[Client]:
        """The remaining participants, with zero updates and new memories: the lowest free client numbers.

        They add only their noise to the aggregate: an adversary that knows their data can subtract their updates.
        """
        taken = {sender.number % self.setting.clients for sender in clients}
        free = [Sender(k, self.setting.samples) for k in range(self.setting.clients) if k not in taken]
        zero = torch.zeros(self.setting.dim)
        return [
            Client.of(sender, zero, self.defense.remember(self.setting), key.child("other", sender.number))
            for sender in free[: self.setting.participants - len(clients)]
        ]

    def among_silent(self, clients: Sequence[Client], key: Key, *, always: bool = False) -> Exchange:
        """`exchange` together with the remaining participants, who send only their noise, if the channel superposes.

        Args:
            key: of the silent clients and of the channel noise, its children `other` and `channel`.
            always: the remaining participants also send if the channel does not superpose.

        Returns:
            The exchange; its memories are those of `clients` alone.
        """
        both = always or self.defense.superposes
        silent = self.silent([client.sender for client in clients], key) if both else []
        exchange = self.exchange([*clients, *silent], key.child("channel"))
        return exchange._replace(memories=exchange.memories[: len(clients)])

    def server_key(self, run: Key, of_round: Key) -> Key:
        """The server's key of this round: a child of the round's key, or of the run's if the defense `correlates`."""
        return (run if self.defense.correlates else of_round).child("server")

    def decode(self, exchange: Exchange, private: Key) -> Vector:
        """Server: the mean update [d]. Only the server knows `private`.

        Raises:
            MessageError: a message does not belong to the defense, or the mean is not finite.
        """
        return _finite(self.defense.decode(self.state, exchange.received, exchange.links, private))

    def revealed(self, exchange: Exchange, threat: Threat, private: Key) -> Vector:
        """[d] the decoded mean, for an adversary that sees no single message.

        For an aggregator, it is the unweighted mean of the decoded messages, without the noise that the server adds.
        """
        if "sums" not in SEES[threat] or self.defense.superposes:
            return self.decode(exchange, private)
        pairs = zip(exchange.received, exchange.links.each(), strict=True)
        return torch.stack([self.estimate(wire, link.sender, link.shared) for wire, link in pairs]).mean(0)

    def estimate(self, received: bytes, sender: Sender, shared: Key | None) -> Vector:
        """The update [d] that one received message reveals; `shared` is None for an outsider.

        Raises:
            MessageError: the bytes are not a message of the defense, or what they reveal is not finite.
        """
        return _finite(self.defense.estimate(self.state, received, Link(self.setting, sender, shared)))

    def accept(self, received: bytes, link: Link) -> Vector:
        """Server: `estimate`, checked against the defense's public norm bound.

        Raises:
            MessageError: as `estimate`, or the update is longer than an honest message allows.
        """
        update, longest = self.estimate(received, link.sender, link.shared), self.defense.longest(self.state, link)
        # without a bound, skip the norm: it takes longer than reading a plain message
        norm = float(torch.linalg.vector_norm(update, dtype=torch.float64)) if longest < math.inf else 0.0
        if norm > (1 + _ROUNDING) * longest:
            raise MessageError(f"expected an update of norm {longest:.6g} or less, the public bound, got {norm:.6g}")
        return update

    def read(self, message: Message) -> Vector:
        """The update [d] that a message reveals to an adversary; it may be non-finite."""
        return self.defense.estimate(self.state, message.wire, Link(self.setting, message.sender, message.shared))


def _finite(update: Vector) -> Vector:
    # numpy takes a third of torch's time for a short update
    finite = np.isfinite(update.detach().cpu().numpy())
    if np.count_nonzero(finite) < finite.size:
        raise MessageError(f"expected a finite update, got {int((~finite).sum())} non-finite of {finite.size}")
    return update
