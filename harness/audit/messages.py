"""The messages of a run with a canary in each, as one adversary sees them, and the pilot that chooses the test."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from leakgauge.harness.audit.bounds import count, epsilon_lower, split_threshold
from leakgauge.harness.audit.distinguishers import distinguishers, scored
from leakgauge.harness.audit.engine import HypothesisTest
from leakgauge.harness.audit.trials import Deployment, Inputs, Part, Trace, in_turn, log_ratios
from leakgauge.harness.core import rng
from leakgauge.harness.core.claim import Claim
from leakgauge.harness.core.contract import Defense, Sender, likelihood_of
from leakgauge.harness.core.errors import NoLikelihood
from leakgauge.harness.core.rng import Key
from leakgauge.harness.core.threats import SEES, Threat
from leakgauge.harness.core.vec import Vector
from leakgauge.harness.federation.round import Client, Exchange, Round, client_key


class Real(NamedTuple):
    """The run without canaries.

    Attributes:
        memories: T times [clients], before each message.
        before: [T, clients, d] the error of the client's previous message as the adversary's estimate of the update; 0
            in the first round.
    """

    memories: list[list[Any]]
    before: Tensor


@dataclass(frozen=True, eq=False)
class Messages:
    """A run with a canary in each message: on top of the real update [T, clients, d], or `alone`.

    Likelihoods are computed on the device.
    """

    deployment: Deployment
    updates: Tensor
    threat: Threat
    alone: bool
    real: Real
    device: str = "cpu"

    @property
    def defense(self) -> Defense[Any, Any]:
        """The audited defense."""
        return self.deployment.defense

    @property
    def sees_messages(self) -> bool:
        """Whether the adversary sees messages."""
        return True

    def traces(self, canary: Inputs, rounds: range, key: Key, *, only: Part | None = None) -> tuple[Trace, Trace]:
        """The messages with input 0 and with input 1, a random half each; `only` as in `Mechanism.run`."""
        clients = self.updates.shape[1]
        coins = torch.zeros(len(rounds) * clients, dtype=torch.bool)
        coins[rng.subset(key.child("coins"), len(coins), len(coins) // 2)] = True
        rows = zip(rounds, coins.reshape(-1, clients), strict=True)
        each = [self._round(canary, number, own, key, only) for number, own in rows]
        trials = torch.arange(rounds.start * clients, rounds.stop * clients)
        ratios = [one.ratios for one in each if one.ratios is not None]
        terms = [one.rounds for one in each if one.rounds is not None]
        trace = Trace(
            torch.cat(ratios) if ratios else None,
            torch.cat([one.estimates for one in each]),
            tuple(wire for one in each for wire in one.wires),
            tuple(shared for one in each for shared in one.shared),
            trials,
            torch.cat(terms) if terms else None,
        )
        return trace.select(~coins), trace.select(coins)

    def again(self, inputs: Inputs, bit: int, trial: int, shared: Key, private: Key) -> bytes:
        """The message of a trial with input `bit` and these keys, without the client's memory, which is secret."""
        number, client = divmod(trial, self.updates.shape[1])
        memory = self.defense.remember(self.deployment.setting)
        again = Client(self._sender(client), self._inputs(inputs, number)[bit][client], memory, private, shared)
        return round_of(self.deployment, number).exchange([again], shared.child("replay")).received[0]

    def read(self, inputs: Inputs, wire: bytes, trial: int, shared: Key) -> Vector:
        """The coordinates that the adversary learns from such a message."""
        number, client = divmod(trial, self.updates.shape[1])
        known = shared if "shared" in SEES[self.threat] else None
        here: Round = round_of(self.deployment, number)
        update = here.estimate(wire, self._sender(client), known)
        focus = inputs.row(trial).focus
        return update if focus is None else update[focus]

    def _sender(self, client: int) -> Sender:
        return Sender(client, self.deployment.setting.samples)

    def _inputs(self, canary: Inputs, number: int, *, hypotheses: bool = False) -> tuple[Tensor, Tensor]:
        """[clients, d] each: the updates of a round with input 0 and with input 1, or the adversary's hypotheses."""
        base = torch.zeros_like(self.updates[number]) if self.alone else self.updates[number]
        scale, trials = base.norm(dim=1, keepdim=True).clamp(min=1.0), self._trials(number)
        # float64, because a likelihood ratio is a small difference of sums over all coordinates
        if hypotheses:
            zero, one = ((base + scale * in_turn(side, trials)).double() for side in canary.hypotheses)
        else:
            zero, one = (base + scale * in_turn(side, trials) for side in (canary.zero, canary.one))
        return zero, one

    def _trials(self, number: int) -> Tensor:
        """[clients] the numbers of the messages of a round."""
        clients = self.updates.shape[1]
        return torch.arange(number * clients, (number + 1) * clients)

    def _round(self, canary: Inputs, number: int, coins: Tensor, key: Key, only: Part | None) -> Trace:
        """What the adversary sees of the messages of one round."""
        zero, one = self._inputs(canary, number)
        sent = send(self.deployment, number, self.real.memories[number], torch.where(coins[:, None], one, zero), key)
        links = sent.links if "shared" in SEES[self.threat] else sent.links._replace(shared=None)
        ratios, estimates, terms = None, torch.zeros(len(coins), 0), None
        if only in (None, "ratios"):
            with suppress(NoLikelihood):
                likelihood = likelihood_of(self.defense, self.deployment.history[number], sent.received, links)
                ratios = log_ratios(likelihood, *self._inputs(canary, number, hypotheses=True), self.device)
        if only in (None, "estimates"):
            estimates = canary.seen(_estimates(self.deployment, number, sent, self.threat), self._trials(number))
            before = canary.seen(self.real.before[number], self._trials(number))
            terms = torch.stack([estimates, before], 1)
        return Trace(ratios, estimates, tuple(sent.received), tuple(sent.links.keys), self._trials(number), terms)


def choose(run: Messages, inputs: list[Inputs], rounds: int, claim: Claim, level: float, key: Key) -> HypothesisTest:
    """The test with the largest bound in the first rounds; of equal bounds the best guesses, then the first.

    Distinguishers are fitted to half of the messages and judged on the others; a single message with an input is used
    for both. A likelihood ratio needs no fit, so all messages set its threshold.
    """
    best: tuple[tuple[float, float], HypothesisTest] | None = None
    for index, pair in enumerate(inputs):
        both = run.traces(pair, range(rounds), key.child(index))
        zero, one = (trace.select(slice(0, None, 2)) for trace in both)
        judged = [trace.select(slice(min(1, len(trace.wires) - 1), None, 2)) for trace in both]
        for distinguisher in distinguishers(run, pair, zero, one):
            low, high = (scored(distinguisher, trace) for trace in judged)
            threshold = split_threshold(low, high, claim.delta, level)
            counts = count(low, high, threshold)
            right = counts.true_positives / counts.positives - counts.false_positives / counts.negatives
            rank = epsilon_lower(counts, claim.delta, level), right
            if best is None or rank > best[0]:
                if distinguisher.reads == "ratios":
                    low, high = (scored(distinguisher, trace) for trace in both)
                    threshold = split_threshold(low, high, claim.delta, level)
                best = rank, HypothesisTest(pair, distinguisher, threshold)
    assert best is not None
    return best[1]


def real_run(deployment: Deployment, updates: Tensor, threat: Threat, key: Key) -> Real:
    """The run without canaries, with all memories: a memory that is None may become another value."""
    memories, before = [first_memories(deployment)], [torch.zeros_like(updates[0])]
    for number, own in enumerate(updates[:-1]):
        sent = send(deployment, number, memories[-1], own, key)
        memories.append(sent.memories)
        before.append(_estimates(deployment, number, sent, threat) - own)
    return Real(memories, torch.stack(before))


def _estimates(deployment: Deployment, number: int, sent: Exchange, threat: Threat) -> Tensor:
    """[clients, d] the updates that the messages of a round reveal to an adversary."""
    links = sent.links if "shared" in SEES[threat] else sent.links._replace(shared=None)
    here: Round = round_of(deployment, number)
    each = zip(sent.received, links.each(), strict=True)
    return torch.stack([here.estimate(wire, link.sender, link.shared) for wire, link in each])


def first_memories(deployment: Deployment) -> list[Any]:
    """What each client remembers before its first message."""
    return [deployment.defense.remember(deployment.setting) for _ in range(deployment.setting.clients)]


def round_of(deployment: Deployment, number: int) -> Round:
    """One round of a deployment."""
    return Round(deployment.defense, deployment.setting, deployment.history[number], number)


def send(deployment: Deployment, number: int, memories: list[Any], updates: Tensor, key: Key) -> Exchange:
    """Send the clients' updates [clients, d] of a round, with the keys that the training loop derives."""
    clients = [
        Client.of(Sender(client, deployment.setting.samples), update, memory, client_key(key, number, client))
        for client, (update, memory) in enumerate(zip(updates, memories, strict=True))
    ]
    return round_of(deployment, number).exchange(clients, key.child("round", number, "channel"))
