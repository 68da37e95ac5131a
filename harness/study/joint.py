"""Several cells as one batch on an accelerator, where a search takes about as long for a hundred victims as for one.

The victims of a batch need the same parameters. So it has cells that attack the common first model: their seed, model,
data and federation are the same, and their defenses differ. Every attack that searches victims in groups takes such a
batch, because each message's sender tells the defense and the state behind the message.
"""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from leakgauge.harness.core.contract import (
    Attack,
    Defense,
    Likelihood,
    Link,
    Links,
    Observation,
    Reconstruction,
    Sender,
    likelihood_of,
)
from leakgauge.harness.core.defense import Wrapper
from leakgauge.harness.core.rng import Key
from leakgauge.harness.core.vec import Vector


class _Member(Sender):
    """A sender in one of several federations, with the number of the federation."""

    federation: int

    @classmethod
    def of(cls, sender: Sender, federation: int) -> _Member:
        """The sender with its federation."""
        made = cls(*sender)
        made.federation = federation
        return made


@dataclass(frozen=True)
class BatchedCells(Wrapper[Any, Any]):
    """The defenses of several federations with one setting and one rule for local training.

    It has what a search for the inputs behind messages uses; the state is a tuple, with one state per federation.
    """

    delegated: ClassVar[str] = "local step_noise training_noise superposes"
    default: ClassVar[str] = "analog randomized remember"  # `encode` asks each defense for its memory
    refused: ClassVar[dict[str, str]] = {
        "parts init longest decode average advance compensated stops plaintext_statistic read_plaintext_statistic "
        "error_variance message_distribution state_metrics step_distribution aggregate_distribution relies promises "
        "claim violations low_noise_variant parameters": "the defenses of a batch differ"
    }

    each: tuple[Defense[Any, Any], ...]
    known: dict[int, tuple[object, Likelihood]] = field(default_factory=dict, compare=False, repr=False)

    @property
    def wrapped(self) -> Defense[Any, Any]:
        """The first defense; only what `fits` compares is delegated to it."""
        return self.each[0]

    def encode(self, state: Any, memory: Any, update: Vector, link: Link, private: Key) -> tuple[bytes, Any]:
        """The first message of a client, by its own federation's defense."""
        at = _federation(link.sender)
        wire, _ = self.each[at].encode(state[at], self.each[at].remember(link.setting), update, link, private)
        return wire, None

    def transmit(self, state: Any, wires: Sequence[bytes], links: Links, channel: Key) -> Sequence[bytes]:
        """Each message through its own federation's channel."""
        received: list[bytes] = []
        for wire, sender in zip(wires, links.senders, strict=True):
            at = _federation(sender)
            received += self.each[at].transmit(state[at], [wire], Links(links.setting, [sender], None), channel)
        return received

    def estimate(self, state: Any, received: bytes, link: Link) -> Vector:
        """The estimate of the message's own defense."""
        at = _federation(link.sender)
        return self.each[at].estimate(state[at], received, link)

    def likelihood(self, state: Any, received: Sequence[bytes], links: Links) -> Likelihood:
        """The likelihoods of the messages' own defenses, one after the other."""
        likelihoods, sizes = list[Likelihood](), list[int]()
        for at, members in itertools.groupby(range(len(received)), lambda i: _federation(links.senders[i])):
            places = list(members)
            span = slice(places[0], places[-1] + 1)
            keys = None if links.shared is None else links.shared[span]
            wires, theirs = received[span], Links(links.setting, links.senders[span], keys)
            asked = wires, theirs.senders, keys
            if at not in self.known or self.known[at][0] != asked:
                self.known[at] = asked, likelihood_of(self.each[at], state[at], wires, theirs)
            likelihoods.append(self.known[at][1])
            sizes.append(len(wires))

        def score(update: Tensor) -> Tensor:
            pieces = zip(likelihoods, torch.split(update, sizes), strict=True)
            return torch.cat([likelihood(piece) for likelihood, piece in pieces])

        return score


def _federation(sender: Sender) -> int:
    assert isinstance(sender, _Member)  # `joined` made it
    return sender.federation


def joined(observations: Sequence[Observation]) -> Observation:
    """One observation of all victims, in order, without what only single federations have.

    Args:
        observations: with messages and models of one round, and equal in all that `alike` compares.
    """
    first, messages, states = observations[0], [], []
    for number, observation in enumerate(observations):
        assert observation.messages is not None
        assert observation.model is not None
        states.append(observation.model.state)
        messages += [sent._replace(sender=_Member.of(sent.sender, number)) for sent in observation.messages]
    assert first.model is not None
    return dataclasses.replace(
        first,
        defense=BatchedCells(tuple(observation.defense for observation in observations)),
        messages=tuple(messages),
        model=first.model._replace(state=tuple(states)),
        labels=None if first.labels is None else tuple(label for each in observations for label in each.labels or ()),
        models=None,
        final=None,
        others=None,
    )


def fits(observation: Observation, defense: Defense[Any, Any]) -> bool:
    """Whether a federation with this defense may share a batch with an observation."""
    ours, setting = observation.defense, observation.setting
    return (
        not (ours.superposes or defense.superposes)
        and ours.local == defense.local
        and ours.step_noise(setting) == defense.step_noise(setting)
    )


def alike(observation: Observation, other: Observation) -> bool:
    """Whether two observations of one attack, target and adversary have the same setting and parameters."""
    return (
        observation.model is not None
        and other.model is not None
        and not (observation.later or other.later)
        and (observation.setting, observation.lr) == (other.setting, other.lr)
        and torch.equal(observation.model.params, other.model.params)
    )


class Found(NamedTuple):
    """The guesses for a cell, and the seconds spent for it by other jobs, less those spent by its own for others."""

    result: Reconstruction
    elsewhere: float


class Batches:
    """The guesses that this process found in batches, until the jobs of their cells ask for them."""

    def __init__(self) -> None:
        self._found: dict[Hashable, Found] = {}
        self._alone: set[Hashable] = set()

    def take(self, name: Hashable) -> Found | None:
        """The guesses for a cell; None: they were not found yet."""
        return self._found.pop(name, None)

    def search(
        self,
        attack: Attack,
        key: Key,
        own: tuple[Hashable, Observation],
        others: Iterable[tuple[Hashable, Callable[[], Observation]]],
        size: int,
    ) -> Found | None:
        """Attack a cell with others in one batch: the same as `take` for the cell; the other cells' guesses are kept.

        Args:
            own, others: the name and the observation of the cell and of cells whose defenses fit; those that are not
                alike are left out.
            size: the most victims of a batch.

        Returns:
            None: no other cell joins, or the attack fails; each cell is then attacked alone.
        """
        name, ours = own
        if name in self._alone or ours.messages is None or ours.task.columns:
            return None
        start, batch, victims = time.perf_counter(), {name: ours}, len(ours.messages)
        for other, look in others:
            if victims + len(ours.messages) > size:
                break
            if other in self._found or other in self._alone:
                continue
            try:
                observation = look()
            except Exception:  # its own job reports the error
                self._alone.add(other)
                continue
            if observation.messages is not None and alike(ours, observation):
                batch[other] = observation
                victims += len(observation.messages)
        if len(batch) == 1:
            return None
        try:
            result = attack.run(joined(list(batch.values())), key)
        except Exception:  # of one defense, whose own job reports it, or of the memory
            self._alone.update(batch)
            return None
        assert isinstance(result, Reconstruction)  # only reconstructions have groups
        guesses, seconds = iter(result.guesses), (time.perf_counter() - start) / len(batch)
        for each, observation in batch.items():
            share = tuple(itertools.islice(guesses, len(observation.messages or ())))
            self._found[each] = Found(Reconstruction(share, result.prior), seconds)
        return self._found.pop(name)._replace(elsewhere=seconds * (1 - len(batch)))
