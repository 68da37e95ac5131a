"""The key check of an audit: what a message may depend on, tried with chosen keys.

An audit owns every key, so it can repeat a message and change one thing at a time. Most faults of randomness then show
in a few messages, without statistics:

| check | faults that it finds |
|---|---|
| the same keys again, in another order of clients: the same bytes | a generator outside the keys, state between calls |
| each draw's key descends from this message's keys, or is the same for all messages | pools of noise |
| a message with private noise, or a proof against those who know the shared key: a private draw | shared noise |
| another private key, the same shared key: no number, sign or lowest bit agrees beyond chance | shared or fixed noise |
| another update, size, memory or federation, the same keys: the same noise | noise with conditions, later rounds |
| other signs of entries of 1e-20 clips: the same bytes | hidden bits |
| each byte flipped, one more, one less: another reading, or none | bytes beside the stated distribution |
| fewer clients, the same key of the server: the same noise of the mean | noise that shrinks when clients drop out |
| nearly equal updates, many private keys: the same lowest bits (`audit.low_bits`) | low bits of updates, coarse noise |
| 100,000 coordinates: uniform in each tensor, no number twice | large tensors without noise, repeated buffers |

A check is made where the stated distribution implies it. Discrete messages have no noise that could be compared: their
agreement with a repeated message is counted if its probability is known (`MessageDistribution.agreement`). Randomness
from the shared key agrees by design.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from scipy import special, stats
from torch import Tensor

from leakgauge.harness.audit.goodness_of_fit import LARGE, grown
from leakgauge.harness.audit.low_bits import low_bits
from leakgauge.harness.audit.neighbors import clip_of
from leakgauge.harness.core import rng
from leakgauge.harness.core.claim import Arithmetic
from leakgauge.harness.core.contract import OnTensors, Sender, Setting, claim_of
from leakgauge.harness.core.defense import Defense
from leakgauge.harness.core.distribution import DistributionError, MessageDistribution, Reading
from leakgauge.harness.core.errors import MessageError
from leakgauge.harness.core.result import KeyRecord
from leakgauge.harness.core.rng import Key
from leakgauge.harness.core.stats import Numbers
from leakgauge.harness.core.threats import SEES
from leakgauge.harness.core.vec import Layout
from leakgauge.harness.federation.round import Client, Round
from leakgauge.harness.federation.small import Federation

LEVEL = 1e-12
"""The largest p-value of a finding by counts. Other findings cannot happen by chance."""

_SMALL = Layout(("tensor 0", "tensor 1", "tensor 2"), ((121,), (44,), (35,)))  # tensors of 200 numbers in all

_CLIENTS, _ROUNDS, _SAMPLES = 40, 26, 20
_WATCHED = (0, 1, _ROUNDS - 1)
"""The rounds in which messages of every second client are repeated; the last round of a shorter history, too."""

_PROBED = (0, 14, 38)  # the clients that send in all rounds, and whose messages are changed one thing at a time
_LONGEST = 200  # the largest number of rounds of a study that are looked at

_SIZES, _FEDERATIONS = (1, 60, 201, 700, 5000, 100_000), (3, 21, 60, 400)
"""Other numbers of a client's records, and of the federation's clients."""

_LATE = (100, 1000, 10_000)  # late rounds, and the numbers of earlier messages of a client
_ARRIVED = (8, 7, 5, 2)  # how many of eight clients do not drop out
_SAME = 1e-3  # how far a uniform number may move, besides what the rounding of the message moves it
_NEAR = 1e-6  # distance below which two uniform numbers are called equal

_OF_OWN, _NUMBERS = (1, 2, 4, 7, 12, 13), 600_000
"""Clients that send messages of the defense's own tensors, and about how many numbers they send in all."""

_FLIPPED = 48  # the number of bytes that are flipped at the start, at the end, and between

_BINS, _REPEATED, _EQUAL = 50, 0.05, 1e-9
"""Bins for the numbers of a large tensor, the share of them that may be there twice, and their distance if they are."""


def check_keys(
    defense: Defense[Any, Any], like: Setting, key: Key, study: Setting | None = None, most_samples: int = 0
) -> KeyRecord:
    """Look for what a message depends on and must not.

    Args:
        like: the federation whose local training the defense sees, and whose tensors if it refuses small ones.
        study: a federation whose tensors, clients, records and rounds, up to `_LONGEST`, are looked at, too.
        most_samples: the number of records of its largest client.

    Guarantees:
        The same arguments give the same record.
        Code that follows its stated distribution has a finding with probability below 1e-9.
    """
    check = _Check(defense, like, key, study)
    check.samples += (study.samples, max(study.samples, most_samples)) if study else ()
    for part in (check.follow, check.age, check.resize, check.look_low, check.drop_out, check.enlarge):
        try:
            part()
        except (DistributionError, MessageError) as error:
            check.faults.setdefault(f"a message is impossible: {error}")
    check.compare()
    ranges = ((min(values), max(values)) for values in zip(*check.sizes, strict=True))
    return KeyRecord(tuple(check.faults), len(check.sizes), *ranges)


class _Cause(NamedTuple):
    """All from which an encoder may make a message."""

    number: int
    sender: Sender
    update: Tensor
    memory: Any
    private: Key
    shared: Key


@dataclass(frozen=True, eq=False)
class Sent:
    """A message, the client's memory after it, and its stated distribution."""

    wire: bytes
    memory: Any
    stated: MessageDistribution | None

    def reading(self, wire: bytes | None = None, auditor: int = 0) -> Reading:
        """The message, or other bytes, as uniform numbers, with the numbers of one auditor within outcomes."""
        assert self.stated is not None
        return self.stated.read(self.wire if wire is None else wire, Key(auditor, ("auditor",)))

    @cached_property
    def read(self) -> Reading:
        """The message as uniform numbers."""
        return self.reading()

    @property
    def noisy(self) -> bool:
        """Whether its private randomness is stated."""
        stated = self.stated
        return stated is not None and not stated.from_shared and not stated.noiseless and len(self.read.places) > 0

    @property
    def continuous(self) -> bool:
        """Whether it holds floats with noise, and no part of the noise follows from the update."""
        return self.noisy and self.stated is not None and self.read.bits is not None and not self.stated.redraws


def send(round_: Round, client: Client, channel: Key) -> Sent:
    """The message of one client alone; of a channel that superposes, before the channel."""
    exchange = round_.exchange([client._replace(update=client.update.clone())], channel)
    wire = (exchange.sent if round_.defense.superposes else exchange.received)[0]
    asked = round_.state, client.memory, client.update, exchange.links.each()[0]
    return Sent(wire, exchange.memories[0], round_.defense.message_distribution(*asked))


class _Check:
    """The messages that were looked at so far, and the faults in them, each once."""

    def __init__(self, defense: Defense[Any, Any], like: Setting, key: Key, study: Setting | None) -> None:
        self.defense, self.like, self.key, self.study = defense, like, key, study
        self.clip = clip_of(defense)
        self.layout, rounds = _SMALL, max(_ROUNDS, min(study.rounds, _LONGEST) if study else 0)
        try:
            self.federation = self.of(_SMALL, _CLIENTS, rounds)
        except ValueError:
            self.layout = like.layout
            self.federation = self.of(self.layout, _CLIENTS, rounds)
        self.samples: tuple[int, ...] = _SIZES
        self.faults: dict[str, None] = {}
        self.sizes: list[tuple[int, int, int, int]] = []
        self.constants: set[Key] | None = None
        self.repeated: list[tuple[Sent, bytes]] = []

    def of(self, layout: Layout, clients: int, rounds: int) -> Federation:
        """A federation of this size, with the local training of the audited one."""
        size: dict[str, Any] = {"clients": clients, "participants": clients, "rounds": rounds, "samples": _SAMPLES}
        return Federation.of(self.defense, replace(self.like, layout=layout, **size))

    def send(self, cause: _Cause, federation: Federation | None = None) -> Sent:
        """The message of a client alone; the channel's noise is part of its private randomness."""
        round_ = (federation or self.federation).round(cause.number)
        client = Client(cause.sender, cause.update, cause.memory, cause.private, cause.shared)
        sent = send(round_, client, cause.private.child("channel"))
        own = self.defense.records(cause.sender) if isinstance(self.defense, OnTensors) else cause.sender.samples
        self.sizes.append((round_.setting.dim, round_.setting.clients, own, cause.number))
        return sent

    def cause(self, number: int, client: int, memory: Any, federation: Federation | None = None) -> _Cause:
        """An update at half of the clip, and the keys of its message."""
        setting = (federation or self.federation).setting
        own = self.key.child("round", number, "client", client)
        update = _dense(own.child("update"), setting.dim) * (0.5 * self.clip)
        sender = Sender(client, _SAMPLES * (1 + client % 20))
        return _Cause(number, sender, update, memory, own.child("private"), own.child("shared"))

    def follow(self) -> None:
        """Clients send through all rounds with their memories; in some rounds, messages are repeated and changed."""
        last = len(self.federation.history) - 1
        memories = {client: self.defense.remember(self.federation.setting) for client in range(0, _CLIENTS, 2)}
        for number in range(last + 1):
            watched = number in _WATCHED or number == last
            if not watched and all(memory is None for memory in memories.values()):
                continue
            sent = []
            for client in memories if watched else _PROBED:
                cause = self.cause(number, client, memories[client])
                with rng.recorded() as drawn:
                    message = self.send(cause)
                self.trace(cause, message, drawn)
                sent.append((cause, message))
            for cause, message in reversed(sent):
                memories[cause.sender.number] = message.memory
                if watched:
                    self.repeat(cause, message)

    def trace(self, cause: _Cause, message: Sent, drawn: set[Key]) -> None:
        """Where the keys of a message's draws come from; keys of other origin must be the same for all messages."""
        if message.stated is None:
            return
        foreign = {key for key in drawn if not any(_descends(key, own) for own in (cause.private, cause.shared))}
        if self.constants is None:
            self.constants = foreign
        for key in sorted(foreign - self.constants, key=str)[:1]:
            self.faults.setdefault(f"it draws from a key of no message or of another one, {key.path}")
        private = message.noisy or (message.stated.from_shared and self.proved)
        randomized = self.defense.randomized and private and not self.defense.superposes
        if randomized and not any(_descends(key, cause.private) for key in drawn):
            how = "stated" if message.noisy else "proved"
            self.faults.setdefault(f"its noise is {how}, and nothing is drawn from the private key")

    @cached_property
    def proved(self) -> bool:
        """Whether a finite epsilon is proved against an adversary that sees messages and shared keys."""
        try:
            claim = claim_of(self.defense, self.federation.history[:1], self.federation.setting)
        except (ValueError, ArithmeticError, RuntimeError):
            return False  # of a federation that is not the audited one
        known = claim.proved.against or claim.against
        return claim.proved.event is not None and any({"messages", "shared"} <= SEES[threat] for threat in known)

    def repeat(self, cause: _Cause, message: Sent) -> None:
        """The same keys once more, then another private key; of few clients, everything else."""
        if self.send(cause).wire != message.wire:
            self.faults.setdefault(f"the same keys give other bytes (round {cause.number})")
        if message.noisy:
            self.repeated.append((message, self.send(cause._replace(private=cause.private.child("twin"))).wire))
        if cause.sender.number in _PROBED:
            self.probe(cause, message)
            if cause.number == 0 and cause.sender.number == _PROBED[1]:
                self.flip(message)

    def probe(self, cause: _Cause, message: Sent) -> None:
        """The noise with the same keys, if one other thing changes."""
        if message.stated is None or message.stated.noiseless or not message.read.uniforms.size:
            return
        tiny = cause.update.clone()
        at = [0, len(tiny) // 2, -1]
        tiny[at] = 1e-20 * self.clip * torch.tensor([1.0, -1.0, 1.0])
        turned = tiny.clone()
        turned[at] *= -1
        one, other = (self.send(cause._replace(update=update)).wire for update in (tiny, turned))
        if one != other:
            self.faults.setdefault("signs of entries of 1e-20 clips change the message")
        if not message.continuous:
            return
        fixed = message.read
        for words, changed in self.changes(cause):
            self.match(fixed, self.send(changed), words, cause.number)

    def changes(self, cause: _Cause) -> Iterator[tuple[str, _Cause]]:
        """The same keys with one other thing each, in words."""
        direction = _dense(self.key.child("direction"), len(cause.update))
        norms = {"0": 0.0, "of the clip": 1.0, "below the clip": 1 - 1e-6, "above the clip": 1 + 1e-6}
        for words, times in (norms | {"far above the clip": 1e6, "far below the clip": 1e-6}).items():
            yield f"an update of norm {words}", cause._replace(update=direction * (times * self.clip))
        yield "a negative update", cause._replace(update=-direction.abs() * self.clip)
        single = torch.zeros_like(direction)
        single[0] = self.clip
        yield "one coordinate at the clip", cause._replace(update=single)
        sparse = torch.zeros_like(direction)
        sparse[::17] = direction[::17]
        yield "a sparse update", cause._replace(update=sparse * (0.5 * self.clip / sparse.norm()))
        for samples in self.samples:
            words = f"{samples} records of the client"
            yield words, cause._replace(sender=cause.sender._replace(samples=samples))
        if cause.memory is not None:
            yield "the memory", cause._replace(memory=self.defense.remember(self.federation.setting))

    def match(self, fixed: Reading, message: Sent, words: str, number: int) -> None:
        """Note a fault unless the message has the same noise, up to what a lowest bit in each number changes."""
        if message.continuous and _moved(fixed, message) > _SAME:
            self.faults.setdefault(f"its noise changes with {words} (round {number})")

    def flip(self, message: Sent) -> None:
        """Every flipped byte must change the reading, or be refused; a sample of the bytes of a long message."""
        if message.stated is None or self.defense.analog:
            return  # the channel's own noise hides what an encoder could put into the lowest bits
        wire, known = message.wire, message.read
        size = len(wire)
        between = rng.subset(self.key.child("bytes"), size, min(size, _FLIPPED)).tolist()
        places = sorted({*range(min(size, _FLIPPED)), *range(max(0, size - _FLIPPED), size), *between})
        blind = []
        for place in places:
            for bit in (0, 7):
                bent = wire[:place] + bytes([wire[place] ^ 1 << bit]) + wire[place + 1 :]
                if _accepts(message, bent, known):
                    blind.append(place)
        if blind:
            self.faults.setdefault(
                f"the stated distribution does not cover byte {blind[0]} of {size}, and {len(set(blind)) - 1} more "
                f"of {len(places)} that were flipped"
            )
        for words, bent in (("longer", wire + b"\0"), ("shorter", wire[:-1])):
            if wire and _accepts(message, bent, None):
                self.faults.setdefault(f"the stated distribution allows a {words} message")

    def age(self) -> None:
        """The noise in late rounds, and of a client that has sent many messages."""
        cause = self.cause(0, _PROBED[0], self.defense.remember(self.federation.setting))
        first = self.send(cause)
        if not first.continuous:
            return
        try:
            federation = Federation.of(self.defense, self.federation.setting, _LATE[-1] + 1)
            for number in (late for late in _LATE if late < len(federation.history)):
                client = Client.of(cause.sender, cause.update, first.memory, self.key.child("age", number))
                old = cause._replace(number=number, memory=grown(federation.round(), client, number))
                self.match(first.read, self.send(old, federation), "earlier messages", number)
        except (ValueError, LookupError, ArithmeticError):
            return  # beyond the rounds of its setting, a defense may fail

    def resize(self) -> None:
        """The noise in federations of other sizes."""
        cause = self.cause(0, _PROBED[0], self.defense.remember(self.federation.setting))
        message = self.send(cause)
        if not message.continuous:
            return
        for clients in (*_FEDERATIONS, *([self.study.clients] if self.study else [])):
            try:
                resized = self.send(cause, self.of(self.layout, clients, 1))
            except (DistributionError, MessageError):
                raise
            except ValueError:
                continue  # the defense refuses a federation of this size
            self.match(message.read, resized, f"{clients} clients", 0)

    def look_low(self) -> None:
        """The lowest bits of noisy floats: those of the stated distribution, or else those that are the estimate.

        Without a stated distribution, only if something is claimed of messages: others may send a part of the update.
        """
        round_, memory = self.federation.round(), self.defense.remember(self.federation.setting)
        cause = self.cause(0, _PROBED[0], memory)

        def sent(update: Tensor, private: Key) -> Sent:
            client = Client(cause.sender, update, memory, private, cause.shared)
            return send(round_, client, private.child("channel"))

        message, count = sent(cause.update, cause.private), len(cause.update)
        if message.stated is not None:
            held, count = message.noisy and message.read.bits is not None, len(message.read.uniforms)
        else:
            estimate = round_.estimate(message.wire, cause.sender, cause.shared).numpy().astype("<f4")
            try:
                claim = claim_of(self.defense, self.federation.history[:1], self.federation.setting)
            except (ValueError, ArithmeticError, RuntimeError):
                return  # of a federation that is not the audited one
            seen = any("messages" in SEES[threat] for threat in claim.against)
            held = seen and message.wire.endswith(estimate.tobytes())
        if held and self.defense.arithmetic is not Arithmetic.REALS:
            self.faults.setdefault(f"its claim is called {self.defense.arithmetic.value}, but it sends floats")
        if held:
            words, p = low_bits(lambda *by: _floats(sent(*by).wire, count), len(cause.update), self.clip, cause.private)
            self.count(p, f"low-bits distinguisher: the lowest bits tell {words}", "")

    def drop_out(self) -> None:
        """The noise that the server adds, with all clients and with fewer."""
        if self.defense.superposes:
            return  # each user adds a part of the noise
        try:
            federation, key = self.of(self.layout, 8, 2), self.key.child("drop out")
        except ValueError:
            return
        updates = [_dense(key.child("update", k), federation.setting.dim) * (0.5 * self.clip) for k in range(8)]
        sent = []
        for count in _ARRIVED:
            exchange = federation.exchange([update.clone() for update in updates[:count]], key)
            state, links = federation.history[0], exchange.links
            stated = self.defense.aggregate_distribution(state, updates[:count], links)
            if stated is None:
                return
            mean = federation.round().decode(exchange, key.child("server"))
            sent.append(Sent(mean.numpy().astype("<f4").tobytes(), None, stated))
            self.sizes += [(federation.setting.dim, federation.setting.clients, _SAMPLES, 0)] * count
        if sent[0].continuous:
            for count, message in zip(_ARRIVED[1:], sent[1:], strict=True):
                self.match(sent[0].read, message, f"{count} of 8 clients", 0)

    def enlarge(self) -> None:
        """Messages of a large model, and of the study's model."""
        for layout in (LARGE, *([self.study.layout] if self.study else [])):
            self.examine(layout)
        if isinstance(self.defense, OnTensors):
            own = self.defense.layout
            for client in _OF_OWN[: max(1, _NUMBERS // own.dim)]:
                self.examine(own, client)

    def examine(self, layout: Layout, client: int = 1) -> None:
        """The noise of each tensor, if the defense takes so many numbers."""
        try:
            federation = self.of(layout, 4, 2)
            cause = self.cause(0, client, self.defense.remember(federation.setting), federation)
            sent = [self.send(cause._replace(update=cause.update * times), federation) for times in (4.0, 0.0)]
        except (DistributionError, MessageError):
            raise
        except ValueError:
            return
        ends = np.cumsum(federation.setting.layout.sizes)
        if sent[0].stated is None or sent[0].stated.quadratic or not sent[0].noisy:
            return
        for message in sent[: 1 + sent[0].continuous]:
            places = message.read.places
            tensors = np.where(places < 0, -1, np.searchsorted(ends, places, side="right"))
            order = np.argsort(tensors, kind="stable")
            starts = np.searchsorted(tensors[order], np.arange(len(ends)))
            self.weigh(np.split(message.read.uniforms[order], starts)[1:])
        if sent[1].continuous:
            sizes = np.abs(sent[1].read.uniforms - 0.5)
            # in a long message, floats agree by chance, but not together with their neighbors
            shares = [
                np.mean(np.diff(np.sort(numbers)) < _EQUAL) - chance * len(sizes)
                for numbers, chance in ((sizes, 2e-8), (sizes[:-1] + np.pi * sizes[1:], 1e-9))
            ]
            twice = max(map(float, shares))
            if twice > _REPEATED:
                self.faults.setdefault(f"{twice:.0%} of the noise in a large message is there twice")

    def weigh(self, tensors: Sequence[Numbers]) -> None:
        """The uniform numbers of each tensor, by themselves and against those of the first one and the one before."""
        others = list[Numbers]()
        for inside in tensors:
            scores, size = special.ndtri(inside.clip(1e-15, 1 - 1e-15)), len(inside)
            squares = float(scores @ scores)
            p = 2 * min(special.chdtr(size, squares), special.chdtrc(size, squares), 0.5)
            if size > _BINS:
                p = min(p, stats.chisquare(np.histogram(inside, _BINS, (0, 1))[0]).pvalue)
            if size and p < LEVEL:
                self.faults.setdefault(f"the noise of a tensor of {size} numbers is not as stated (p < {LEVEL:g})")
                break
            if any(_copied(scores, other) < LEVEL for other in others):
                self.faults.setdefault(f"the noise of a tensor of {size} numbers is that of another one in part")
                break
            others = [*others[:1], scores]

    def compare(self) -> None:
        """All messages against those of the same update and shared key, but another private key."""
        outcomes, pairs = list[tuple[Numbers, Numbers]](), list[tuple[Reading, Reading]]()
        for number, (message, other) in enumerate(self.repeated):
            try:
                two = message.reading(auditor=2 * number), message.reading(other, 2 * number + 1)
            except (DistributionError, MessageError) as error:
                self.faults.setdefault(f"a message is impossible: {error}")
                continue
            agreement = message.stated.agreement(message.wire, other) if message.stated else None
            if agreement is not None:
                outcomes.append(agreement)
            elif two[0].bits is not None and len(two[0].uniforms) == len(two[1].uniforms):
                pairs.append(two)
        if outcomes:
            equal, chance = (np.concatenate(rows) for rows in zip(*outcomes, strict=True))
            # the Poisson tail is above that of a sum of independent trials
            p = float(stats.poisson.cdf(np.sum(1 - equal), np.sum(1 - chance)))
            self.count(p, f"{np.mean(equal):.1%} of outcomes agree, expected {np.mean(chance):.1%}")
        if pairs and len({len(one.uniforms) for one, _ in pairs}) == 1:
            self.compare_numbers(pairs)

    def compare_numbers(self, pairs: Sequence[tuple[Reading, Reading]]) -> None:
        """Numbers, signs and lowest bits of two messages [n, k], in all, and of each number."""
        one, other = (np.array([pair[side].uniforms for pair in pairs]) for side in (0, 1))
        bits = [np.array([pair[side].bits for pair in pairs]) for side in (0, 1)]
        for words, same, chance in (
            ("numbers", np.abs(one - other) < _NEAR, 2 * _NEAR),
            ("signs of the noise", (one > 0.5) == (other > 0.5), 0.5),
            ("lowest bits", bits[0] == bits[1], 0.5),
        ):
            p = stats.binom.sf(same.sum() - 1, same.size, chance)
            each = stats.binom.sf(same.sum(0) - 1, len(same), chance) * same.shape[1]
            self.count(min(float(p), float(each.min())), f"{same.mean():.1%} of {words} agree, expected {chance:.2g}")
        scores = [special.ndtri(rows.clip(1e-15, 1 - 1e-15)) for rows in (one, other)]
        shared = float(np.mean(scores[0] * scores[1]) / np.sqrt(np.mean(scores[0] ** 2) * np.mean(scores[1] ** 2)))
        p = 2 * float(stats.norm.sf(abs(shared) * np.sqrt(one.size)))
        self.count(p, f"the noise has a correlation of {shared:.2f}")

    def count(self, p: float, words: str, of: str = "with the same shared key and another private key, ") -> None:
        """Note a fault, by default of messages with the same shared key, if this p-value is too small for chance."""
        if p < LEVEL:
            self.faults.setdefault(f"{of}{words} (p < {LEVEL:g})")


def _copied(one: Numbers, other: Numbers) -> float:
    """The exact p-value of the correlation of two tensors' first normal scores."""
    count = min(len(one), len(other))
    a, b = one[:count], other[:count]
    square = float(a @ b) ** 2 / max(float(a @ a) * float(b @ b), 1e-300)
    return float(special.betaincc(0.5, (count - 1) / 2, min(1.0, square))) if count > 2 else 1.0


def _dense(key: Key, dim: int) -> Tensor:
    """[dim] random numbers, of norm 1 together."""
    values = rng.normal(key, (dim,), torch.float64)
    return torch.as_tensor(values / values.norm(), dtype=torch.float32)


def _descends(key: Key, own: Key) -> bool:
    return key.seed == own.seed and key.path[: len(own.path)] == own.path


def _moved(fixed: Reading, message: Sent) -> float:
    """The largest move of a uniform number, without what the lowest bit of each number may move it.

    If the update decides which coordinates are sent, their noise may belong to the number or to the coordinate.
    """
    reading = message.read
    if len(reading.uniforms) != len(fixed.uniforms):
        return float("inf")
    count = len(reading.uniforms)
    floats, rounding = _floats(message.wire, count), np.zeros(count)
    for end in (-np.inf, np.inf):
        nudged = message.wire[: -floats.nbytes] + np.nextafter(floats, floats.dtype.type(end)).tobytes()
        rounding = np.maximum(rounding, np.abs(message.reading(nudged).uniforms - reading.uniforms))
    moves = float((np.abs(reading.uniforms - fixed.uniforms) - 8 * rounding).max())
    if np.array_equal(reading.places, fixed.places):
        return moves
    _, here, before = np.intersect1d(reading.places, fixed.places, return_indices=True)
    by_place = np.abs(reading.uniforms[here] - fixed.uniforms[before]) - 8 * rounding[here]
    return min(moves, float(by_place.max(initial=0.0)))


def _floats(wire: bytes, count: int) -> npt.NDArray[Any]:
    """The floats [count] at the end of a message."""
    item = np.dtype("<f8" if len(wire) >= 8 * count else "<f4")
    return np.frombuffer(wire[len(wire) - item.itemsize * count :], item)


def _accepts(message: Sent, wire: bytes, known: Reading | None) -> bool:
    """Whether the distribution reads these bytes, and as `known` if this is given."""
    try:
        reading = message.reading(wire)
    except (DistributionError, MessageError):
        return False
    return known is None or all(
        one is other if one is None or other is None else np.array_equal(one, other)
        for one, other in zip(reading, known, strict=True)
    )
