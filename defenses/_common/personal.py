"""Personal privacy: clients that share a defense, each with an epsilon, a noise or a number of bits of its own."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from leakgauge.harness.core.claim import Claim, ClientGroup
from leakgauge.harness.core.contract import Apart, Defense, Feedback, Likelihood, Link, Links, Sender, Setting
from leakgauge.harness.core.defense import Wrapper
from leakgauge.harness.core.distribution import MessageDistribution
from leakgauge.harness.core.rng import Key
from leakgauge.harness.core.vec import Vector

ALLOWED = ("epsilon", "local_epsilon", "noise_std", "noise_scale", "bits")
"""The parameters that may differ between clients."""


def read(text: str) -> list[dict[str, int | float]]:
    """The parameters of each group of clients, from a text such as `epsilon = 4, 8; bits = 2, 3`.

    Raises:
        ValueError: another form, an unknown parameter, or parameters with different numbers of values.
    """
    try:
        pairs = [part.split("=") for part in text.split(";")]
        table = {name.strip(): [json.loads(value) for value in values.split(",")] for name, values in pairs}
    except ValueError as error:
        raise ValueError(f"expected a text such as 'epsilon = 4, 8; bits = 2, 3', got {text!r}") from error
    if len(table) < len(pairs) or not table.keys() <= {*ALLOWED}:
        raise ValueError(f"expected each of {', '.join(ALLOWED)} at most once, got {text!r}")
    if len({len(values) for values in table.values()}) > 1:
        raise ValueError(f"expected as many values of each parameter, got {text!r}")
    return [dict(zip(table, values, strict=True)) for values in zip(*table.values(), strict=True)]


class Each(NamedTuple):
    """The state of each group's defense. binding: the group whose defense all clients use; None: each its own."""

    states: tuple[Any, ...]
    binding: int | None


@dataclass(frozen=True)
class Personal(Wrapper[Each, Any]):
    """Client i of n groups of clients uses the defense of group i mod n.

    If the channel adds up the messages, all clients send with the same amplitude and rely on each other's noise: they
    use the defense with the smallest claimed epsilon, and the others' claims are larger than what is proved.

    Args:
        names: the defense's name in a study, or the two of a cascade.
        keys: the parameters that differ between the groups.
        each: the defense of each group.

    Guarantees:
        The message, its likelihood and its distribution are those of the sender's own defense.
        A client's claim is that of its own defense; the claim of all is the one with the largest epsilon.

    Raises:
        ValueError: the noise is not in each client's message, but in local steps or in the mean.

    Source: Seif et al. 2020, Thm 3; Wei et al. 2021, Algorithm 1; Ling et al. 2025, sec. V: one epsilon a client.
    """

    delegated: ClassVar[str] = (
        "randomized analog superposes correlates relies promises arithmetic local step_noise training_noise parts "
        "remember compensated average plaintext_statistic read_plaintext_statistic step_distribution violations"
    )
    default: ClassVar[str] = "summed_proof independent settled"  # noises and epsilons differ

    names: tuple[str, ...]
    keys: tuple[str, ...]
    each: tuple[Defense[Any, Any], ...]

    def __post_init__(self) -> None:
        shared = self.wrapped.step_noise, self.wrapped.aggregate_distribution
        common = Defense.step_noise, Defense.aggregate_distribution
        if not self.superposes and tuple(getattr(method, "__func__", None) for method in shared) != common:
            raise ValueError("personal: expected a defense with noise in each client's message, not in steps or a mean")

    @property
    def wrapped(self) -> Defense[Any, Any]:
        """The defense of the first group."""
        return self.each[0]

    def _groups(self, setting: Setting) -> range:
        return range(min(len(self.each), setting.clients))

    def _number(self, state: Each, sender: Sender, setting: Setting) -> int:
        own = sender.number % setting.clients % len(self.each)
        return own if state.binding is None else state.binding

    def _own(self, state: Each, link: Link) -> tuple[Defense[Any, Any], Any]:
        number = self._number(state, link.sender, link.setting)
        return self.each[number], state.states[number]

    def init(self, setting: Setting) -> Each:
        """The state of each group's defense."""
        if setting.groups > 1:
            raise ValueError("personal: expected clients that do not take turns")
        states = tuple(defense.init(setting) for defense in self.each)
        if not self.superposes:
            return Each(states, None)
        epsilons = [self.each[i].claim([states[i]], setting).epsilon for i in self._groups(setting)]
        return Each(states, epsilons.index(min(epsilons)))

    def encode(self, state: Each, memory: Any, update: Vector, link: Link, private: Key) -> tuple[bytes, Any]:
        """The message of the sender's defense."""
        defense, own = self._own(state, link)
        return defense.encode(own, memory, update, link, private)

    def transmit(self, state: Each, wires: Sequence[bytes], links: Links, channel: Key) -> Sequence[bytes]:
        """The channel of each group, with a child of the channel's key; that of all if it adds up."""
        if state.binding is not None:
            return self.each[state.binding].transmit(state.states[state.binding], wires, links, channel)
        received = [b""] * len(wires)
        for number, places, own in self._by_group(state, links):
            sent = [wires[place] for place in places]
            heard = self.each[number].transmit(state.states[number], sent, own, channel.child("group", number))
            for place, wire in zip(places, heard, strict=True):
                received[place] = wire
        return received

    def _by_group(self, state: Each, links: Links) -> list[tuple[int, list[int], Links]]:
        """For each group with messages, its number, the places of its messages, and their links."""
        places: dict[int, list[int]] = {}
        for place, sender in enumerate(links.senders):
            places.setdefault(self._number(state, sender, links.setting), []).append(place)
        senders, shared, found = links.senders, links.shared, []
        for number, own in places.items():
            keys = None if shared is None else [shared[place] for place in own]
            found.append((number, own, Links(links.setting, [senders[place] for place in own], keys)))
        return found

    def estimate(self, state: Each, received: bytes, link: Link) -> Vector:
        """That of the sender's defense."""
        defense, own = self._own(state, link)
        return defense.estimate(own, received, link)

    def longest(self, state: Each, link: Link) -> float:
        """That of the sender's defense."""
        defense, own = self._own(state, link)
        return defense.longest(own, link)

    def decode(self, state: Each, received: Sequence[bytes], links: Links, private: Key) -> Vector:
        """The mean of the estimates, or what a sum reveals."""
        if state.binding is None:
            return super().decode(state, received, links, private)
        return self.each[state.binding].decode(state.states[state.binding], received, links, private)

    def advance(self, state: Each, feedback: Feedback) -> Each:
        """The next state of each group's defense."""
        pairs = zip(self.each, state.states, strict=True)
        return state._replace(states=tuple(defense.advance(own, feedback) for defense, own in pairs))

    def stops(self, state: Each) -> bool:
        """Whether any group's defense stops."""
        return any(defense.stops(own) for defense, own in zip(self.each, state.states, strict=True))

    def _asked(self, method: str, state: Each, received: Sequence[bytes], links: Links) -> list[tuple[list[int], Any]]:
        """What a method of each group's defense returns for its messages, with their places."""
        return [
            (places, getattr(self.each[i], method)(state.states[i], [received[place] for place in places], own))
            for i, places, own in self._by_group(state, links)
        ]

    def likelihood(self, state: Each, received: Sequence[bytes], links: Links) -> Likelihood:
        """That of each message's sender."""
        return _joined(self._asked("likelihood", state, received, links))

    def exact_likelihood(self, state: Each, received: Sequence[bytes], links: Links) -> Likelihood:
        """That of each message's sender."""
        return _joined(self._asked("exact_likelihood", state, received, links))

    def error_variance(self, state: Each, received: Sequence[bytes], links: Links) -> Tensor | None:
        """That of each message's sender; None if one has Fisher information."""
        found = self._asked("error_variance", state, received, links)
        return None if any(rows is None for _, rows in found) else _in_order(found)

    def message_distribution(self, state: Each, memory: Any, update: Vector, link: Link) -> MessageDistribution | None:
        """That of the sender's defense."""
        defense, own = self._own(state, link)
        return defense.message_distribution(own, memory, update, link)

    def aggregate_distribution(
        self, state: Each, updates: Sequence[Vector], links: Links
    ) -> MessageDistribution | None:
        """That of the defense that all use, if the channel adds up."""
        if state.binding is None:
            return None
        return self.each[state.binding].aggregate_distribution(state.states[state.binding], updates, links)

    def low_noise_variant(self) -> Personal | None:
        """That of each group; None if one states none."""
        quiet = [defense.low_noise_variant() for defense in self.each]
        known = tuple(defense for defense in quiet if defense is not None)
        return replace(self, each=known) if len(known) == len(quiet) else None

    def state_metrics(self, state: Each, setting: Setting) -> dict[str, float]:
        """The metrics of each group, as `noise_multiplier of epsilon 4`."""
        found = {}
        for number in self._groups(setting):
            for name, value in self.each[number].state_metrics(state.states[number], setting).items():
                found[f"{name} of {self._label(number)}"] = value
        return found

    def claim(self, history: Sequence[Each], setting: Setting) -> Claim:
        """The claim with the largest epsilon, with all groups' claims; if the channel adds up, one proof for all."""
        claims = [
            self.each[number].claim([state.states[number] for state in history], setting)
            for number in self._groups(setting)
        ]
        if history[0].binding is not None:
            kept = claims[history[0].binding]
            claims = [replace(claim, proved=kept.proved, further=kept.further) for claim in claims]
        groups = tuple(
            ClientGroup(self._label(number), tuple(range(number, setting.clients, len(self.each))), claim)
            for number, claim in enumerate(claims)
        )
        assumes = tuple(dict.fromkeys(text for claim in claims for text in claim.assumes))
        largest = max(claims, key=lambda claim: (claim.epsilon, claim.proved.epsilon(claim.delta)))
        return replace(largest, assumes=assumes, groups=groups)

    def _label(self, number: int) -> str:
        own = self.each[number].parameters()
        return ", ".join(f"{key} {own[key]:g}" for key in self.keys)

    def parameters(self) -> dict[str, Any]:
        """The parameters that all groups share, and `personal`, from which `read` reads the others."""
        tables: list[Mapping[str, Any]] = [defense.parameters() for defense in self.each]
        shared = {name: value for name, value in tables[0].items() if name not in self.keys}
        lists = (f"{key} = {', '.join(str(table[key]) for table in tables)}" for key in self.keys)
        return shared | {"personal": "; ".join(lists)}


def _in_order(found: Sequence[tuple[Sequence[int], Tensor]]) -> Tensor:
    """Rows of several groups of messages, in the order of the messages."""
    order = torch.tensor([place for places, _ in found for place in places]).argsort().tolist()
    return torch.cat([rows for _, rows in found])[order]


def _joined(found: Sequence[tuple[list[int], Any]]) -> Likelihood:
    """One likelihood of all messages from those of each group."""
    if len(found) == 1:
        only: Likelihood = found[0][1]
        return only
    parts = [(places, part) for places, part in found if isinstance(part, Apart)]
    if len(parts) == len(found):
        return Apart(_joined([(p, part.hidden) for p, part in parts]), _joined([(p, part.clear) for p, part in parts]))
    return lambda update: _in_order([(places, score(update[places])) for places, score in found])
