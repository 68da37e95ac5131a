"""Trials of an audit: many runs of a defense on two inputs, through its real `encode`, as one adversary sees them."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from leakgauge.harness.audit.neighbors import Inputs, in_turn
from leakgauge.harness.core.contract import Defense, Links, Sender, likelihood_of
from leakgauge.harness.core.device import Placed, moved
from leakgauge.harness.core.errors import NoLikelihood
from leakgauge.harness.core.rng import Key
from leakgauge.harness.core.threats import SEES, Threat
from leakgauge.harness.core.vec import Vector
from leakgauge.harness.federation.round import Client, Exchange
from leakgauge.harness.federation.small import Federation, known_links

Part = Literal["ratios", "estimates", "wires"]
"""Name of a field of `Trace`."""


class Trace(NamedTuple):
    """What the adversary sees in n trials.

    Attributes:
        ratios: [n] log-likelihood ratio of input 1 to input 0 by the exact likelihood, summed over the rounds;
            None if the adversary sees no messages, or the defense has no likelihood.
        estimates: [n, d] or [n, focus]: the update estimated from the message, or the decoded mean update for an
            adversary who sees no messages; summed over the rounds, with the opposite sign where inputs are negated.
        wires: [n] the first message received in the first round.
        shared: [n] the key that client and server share in the first round.
        trials: [n] the number of each trial.
        rounds: [n, T, d] or [n, T, focus]: the terms of `estimates`, if an adversary sees several models.
        later: T - 1 times [n], the first message received in each later round.
    """

    ratios: Tensor | None
    estimates: Tensor
    wires: tuple[bytes, ...]
    shared: tuple[Key, ...]
    trials: Tensor
    rounds: Tensor | None = None
    later: tuple[tuple[bytes, ...], ...] = ()

    def select(self, trials: slice | Tensor) -> Trace:
        """The trace of some of the trials."""
        at = torch.arange(len(self.shared))[trials].tolist()
        return Trace(
            None if self.ratios is None else self.ratios[at],
            self.estimates[at],
            tuple(self.wires[trial] for trial in at),
            tuple(self.shared[trial] for trial in at),
            self.trials[at],
            None if self.rounds is None else self.rounds[at],
            tuple(tuple(wires[trial] for trial in at) for wires in self.later),
        )


class Source(ABC):
    """Trials of a defense in a federation, as one adversary sees them; their messages can be read and made again.

    Attributes:
        threat: the adversary. An adversary without the shared keys reads messages as an outsider.
        device: where clients train and likelihoods are computed; messages are encoded and decoded on the CPU.
    """

    federation: Federation
    threat: Threat
    device: str

    @property
    def defense(self) -> Defense[Any, Any]:
        """The audited defense."""
        return self.federation.defense

    @property
    def sees_messages(self) -> bool:
        """Whether the adversary sees messages, not only models."""
        return "messages" in SEES[self.threat]

    @abstractmethod
    def sent(self, inputs: Inputs, bit: int, trial: int) -> tuple[int, Sender, Vector]:
        """The round, the sender and the update [d] behind a trial's first message with input `bit`."""

    def again(self, inputs: Inputs, bit: int, trial: int, shared: Key, private: Key) -> bytes:
        """The first message of a trial with input `bit` and these keys, as if the client had no memory."""
        number, sender, update = self.sent(inputs, bit, trial)
        made = self.federation.repeat(update, private, shared, shared.child("replay"), number, sender=sender)
        return made.received[0]

    def read(self, inputs: Inputs, wire: bytes, trial: int, shared: Key) -> Vector:
        """The coordinates that the adversary learns from such a message."""
        number, sender, _ = self.sent(inputs, 0, trial)
        round_, known = self.federation.round(number), shared if "shared" in SEES[self.threat] else None
        update, focus = round_.estimate(wire, sender, known), inputs.row(trial).focus
        return update if focus is None else update[focus]

    def ratios(
        self, number: int, wires: Sequence[bytes], links: Links, hypotheses: tuple[Tensor, Tensor]
    ) -> Tensor | None:
        """[n] float64 log-likelihood ratios of the messages of one round, of input 1 to input 0, [n, d] each.

        0 if both inputs are impossible. None if the defense has no likelihood.
        """
        state, links = self.federation.history[number], known_links(links, self.threat)
        try:
            likelihood = Placed(likelihood_of(self.defense, state, wires, links, exact=True), torch.device(self.device))
        except NoLikelihood:
            return None
        with torch.no_grad():
            zero, one = (likelihood(moved(update, self.device)).double() for update in hypotheses)
        return (zero - one).cpu().nan_to_num(nan=0.0, posinf=math.inf, neginf=-math.inf)


@dataclass(frozen=True)
class Mechanism(Source):
    """Trials of all rounds of a federation, each with one client and one adversary.

    The other clients send zero updates. Apart from their noise, this equals knowing and subtracting their updates.
    """

    federation: Federation
    threat: Threat
    device: str = "cpu"

    def run(self, inputs: Inputs, bit: int, trials: int, key: Key, *, only: Part | None = None) -> Trace:
        """Run independent trials with input `bit`.

        Args:
            only: the part of the trace to compute besides `wires` and `shared`; None: all parts.
        """
        federation, numbers, rounds = self.federation, torch.arange(trials), len(self.federation.history)
        turns = [self._sender(inputs.row(number)) for number in range(max(1, len(inputs.senders)))]
        senders = [turns[number % len(turns)] for number in range(trials)]
        memories, each_round = federation.memories(trials), "models" in SEES[self.threat]
        ratios, terms = list[Tensor](), list[Tensor]()
        wires, shared = list[tuple[bytes, ...]](), list[tuple[Key, ...]]()
        for number in range(rounds):
            own, negated = key.child("round", number), inputs.reverses and 2 * number >= rounds
            updates = self._updates(inputs, bit, negated, numbers, own.child("train"))
            keys = [own.child("trial", trial) for trial in range(trials)]
            clients = [Client.of(*each) for each in zip(senders, updates.unbind(), memories, keys, strict=True)]
            exchanges = self._exchanges(number, clients, keys)
            memories = [memory for exchange in exchanges for memory in exchange.memories]
            first = trials // len(exchanges)
            wires.append(tuple(wire for exchange in exchanges for wire in exchange.received[:first]))
            shared.append(tuple(client.shared for client in clients))
            sign = -1.0 if negated and each_round else 1.0
            if self.sees_messages and only in (None, "ratios"):
                zero, one = (sign * in_turn(update, numbers) for update in inputs.hypotheses)
                links = Links(federation.setting, senders, shared[-1])
                of_round = self.ratios(number, wires[-1], links, (zero, one))
                ratios += [] if of_round is None else [of_round]
            if only in (None, "estimates"):
                runs = [key.child("trial", trial) for trial in range(trials)]
                terms.append(sign * inputs.seen(self._estimates(number, exchanges, runs, keys), numbers))
        width = federation.setting.dim if inputs.focus is None else inputs.focus.shape[-1]
        return Trace(
            torch.stack(ratios).sum(0) if ratios else None,
            torch.stack(terms).sum(0) if terms else torch.zeros(trials, width),
            wires[0],
            shared[0],
            numbers,
            torch.stack(terms, 1) if len(terms) > 1 and each_round else None,
            tuple(wires[1:]),
        )

    def run_both(self, inputs: Inputs, trials: int, key: Key, *, only: Part | None = None) -> tuple[Trace, Trace]:
        """Trials with input 0, and as many with input 1; `only` as in `run`."""
        zero, one = (self.run(inputs, bit, trials, key.child(bit), only=only) for bit in (0, 1))
        return zero, one

    def sent(self, inputs: Inputs, bit: int, trial: int) -> tuple[int, Sender, Vector]:
        """Round 0, the sender of the trial's pair, and its update without the noise of local training."""
        pair = inputs.row(trial)
        return 0, self._sender(pair), pair.one if bit else pair.zero

    def _sender(self, inputs: Inputs) -> Sender:
        """The client whose input moves, in one pair; a sum with other clients needs equal numbers of samples."""
        if not inputs.senders:
            return Sender(0, self.federation.setting.samples)
        alone = self.sees_messages and not self.defense.superposes
        return inputs.senders[0] if alone else inputs.senders[0]._replace(samples=self.federation.setting.samples)

    def _updates(self, inputs: Inputs, bit: int, negated: bool, trials: Tensor, key: Key) -> Tensor:
        if inputs.draw is not None:
            return inputs.draw(bit, negated, len(trials), key, self.device)
        updates = in_turn(inputs.one if bit else inputs.zero, trials)
        return -updates if negated else updates

    def _exchanges(self, number: int, clients: Sequence[Client], keys: Sequence[Key]) -> list[Exchange]:
        """The exchange of each trial, with all participants if the adversary sees only a sum of messages.

        Without a channel and other clients, one exchange holds all trials, which are then still independent.
        """
        round_, alone = self.federation.round(number), self.sees_messages and not self.defense.superposes
        if alone and not self.defense.analog:
            return [round_.exchange(clients, keys[0])]
        each = zip(clients, keys, strict=True)
        return [round_.among_silent([client], key, always=not alone) for client, key in each]

    def _estimates(
        self, number: int, exchanges: Sequence[Exchange], runs: Sequence[Key], keys: Sequence[Key]
    ) -> Tensor:
        """[n, d] the adversary's estimate of the update in one round, or of the mean update.

        Args:
            runs, keys: the key of each trial, and its key of this round.
        """
        if self.sees_messages:
            return torch.cat([self.federation.estimates(exchange, self.threat, number) for exchange in exchanges])
        round_ = self.federation.round(number)
        each = zip(exchanges, map(round_.server_key, runs, keys), strict=True)
        return torch.stack([round_.revealed(exchange, self.threat, server) for exchange, server in each])
