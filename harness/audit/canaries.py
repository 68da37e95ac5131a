"""Audits inside a federated run: canaries in its messages, and canary clients in its aggregates.

| audit | a trial | the adversary sees | result |
|---|---|---|---|
| `audit_messages` | a message of a client in a round | messages | a bound for one round |
| `audit_one_run` | a client in all rounds | what each round decodes to | a bound for all rounds together |
| `estimate_by_cosine` | a client in all rounds | what each round decodes to | an estimate for all rounds; no bound |
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from leakgauge.harness import data
from leakgauge.harness.audit import bounds
from leakgauge.harness.audit.bounds import Counts
from leakgauge.harness.audit.distinguishers import distinguishers
from leakgauge.harness.audit.engine import AuditResult, HypothesisTest, is_gaussian
from leakgauge.harness.audit.neighbors import Inputs, in_turn, pairs, varied
from leakgauge.harness.audit.one_run import CosineEstimate, bound_from_guesses, cosine_epsilon
from leakgauge.harness.audit.trials import Part, Source, Trace
from leakgauge.harness.core import accounting, rng
from leakgauge.harness.core.cell import FederationSpec
from leakgauge.harness.core.claim import Claim, Horizon, Relation, Unit
from leakgauge.harness.core.contract import Defense, Examples, Sender, Setting
from leakgauge.harness.core.errors import StudyError
from leakgauge.harness.core.rng import Key
from leakgauge.harness.core.threats import SEES, Threat
from leakgauge.harness.core.vec import Vector
from leakgauge.harness.federation.loop import Keep, make_plan, make_setting, train
from leakgauge.harness.federation.round import client_key
from leakgauge.harness.federation.small import Federation
from leakgauge.harness.learn.batch import Work, choose_engine, train_clients
from leakgauge.harness.learn.models import build
from leakgauge.harness.learn.partition import partition
from leakgauge.harness.learn.tasks import ModelTask

DIGITS_DIM = 650
"""Parameters of a softmax regression on digits."""

_FAR = 100.0  # norm of a canary client's update: above every clip, which reduces it
_PILOT_SHARE = 0.25  # share of the rounds that are used to choose canary, distinguisher and threshold


@dataclass(frozen=True, eq=False)
class DigitsTraining:
    """A softmax regression on digits, trained with the defense; every client has equally many samples."""

    defense: Defense[Any, Any]
    task: ModelTask
    spec: FederationSpec
    clients: dict[int, Examples]
    test: Examples
    setting: Setting
    key: Key

    @classmethod
    def of(cls, federation: Federation, key: Key) -> DigitsTraining:
        """A training with the federation's clients, samples, steps, batch and learning rate."""
        public, digits = federation.setting, data.load("digits", Path())
        samples, available = public.clients * public.samples, len(digits.train.y)
        if samples > available:
            raise StudyError("audit", [f"setting.samples: got {samples} of all clients, expected at most {available}"])
        task = ModelTask(build("linear", digits.input_shape, len(digits.classes))).under(federation.defense.local)
        same: dict[str, Any] = {name: getattr(public, name) for name in ("clients", "rounds", "batch", "lr")}
        same |= {"samples": samples, "local_steps": public.steps, "evaluate_every": public.rounds}
        spec = FederationSpec(algorithm="fedsgd" if public.sends == "gradient" else "fedavg", **same)
        parts = partition(spec, digits.train.y, key.child("partition"))
        clients = {k: Examples(digits.train.x[part], digits.train.y[part]) for k, part in enumerate(parts)}
        setting = make_setting(task, spec, clients, federation.defense.local)
        return cls(federation.defense, task, spec, clients, digits.test, setting, key.child("training"))

    def run(self, device: str = "cpu") -> tuple[Tensor, Federation]:
        """[T, clients, d] the updates before the defense, trained again from each round's model, and the federation.

        Args:
            device: where the clients train.
        """
        engine, defense = choose_engine(self.task, device), self.defense
        keep = Keep(models=frozenset(range(self.spec.rounds)))
        asked = (self.task, self.spec, defense, self.clients, self.test, self.key)
        run = train(*asked, engine=engine, keep=keep, device=device)
        placed = {number: held.on(device) for number, held in self.clients.items()}
        updates, history = [], [defense.init(self.setting)]
        for number, lr in enumerate(run.learning_rates):
            plan = make_plan(self.spec, lr, defense.local, defense.step_noise(self.setting))
            work = [Work(held, client_key(self.key, number, k).child("train")) for k, held in placed.items()]
            params = run.models[number].to(device)
            updates.append(train_clients(self.task, params, work, plan, engine).updates.cpu())
            history.append(defense.advance(history[-1], run.feedback[number]))
        return torch.stack(updates), Federation(defense, self.setting, tuple(history[:-1]))


@dataclass(frozen=True, eq=False)
class Messages(Source):
    """A run with a canary in each message, for an adversary that sees messages.

    Attributes:
        updates: [T, clients, d] the real updates.
        alone: whether a canary replaces the real update, instead of being added to it.
        memories: of the run without canaries: T times [clients], before each message.
        before: [T, clients, d] in that run, the error of the client's previous message as the adversary's estimate of
            the update; 0 in the first round.
    """

    federation: Federation
    updates: Tensor
    threat: Threat
    alone: bool
    memories: list[list[Any]]
    before: Tensor
    device: str

    @classmethod
    def of(
        cls, federation: Federation, updates: Tensor, threat: Threat, key: Key, *, alone: bool, device: str
    ) -> Messages:
        """With the memories of a run without canaries: a memory that is None may become another value."""
        memories, before = [federation.memories(updates.shape[1])], [torch.zeros_like(updates[0])]
        for number, exchange in enumerate(federation.run(updates[:-1], key)):
            memories.append(exchange.memories)
            before.append(federation.estimates(exchange, threat, number) - updates[number])
        return cls(federation, updates, threat, alone, memories, torch.stack(before), device)

    def traces(self, canary: Inputs, rounds: range, key: Key, *, only: Part | None = None) -> tuple[Trace, Trace]:
        """The messages with input 0 and with input 1, a random half each; `only` as in `Mechanism.run`."""
        clients = self.updates.shape[1]
        coins = torch.zeros(len(rounds) * clients, dtype=torch.bool)
        coins[rng.subset(key.child("coins"), len(coins), len(coins) // 2)] = True
        rows = zip(rounds, coins.reshape(-1, clients), strict=True)
        each = [self._round(canary, number, of_round, key, only) for number, of_round in rows]
        ratios = [trace.ratios for trace in each if trace.ratios is not None]
        terms = [trace.rounds for trace in each if trace.rounds is not None]
        trace = Trace(
            torch.cat(ratios) if ratios else None,
            torch.cat([trace.estimates for trace in each]),
            tuple(wire for trace in each for wire in trace.wires),
            tuple(shared for trace in each for shared in trace.shared),
            torch.cat([trace.trials for trace in each]),
            torch.cat(terms) if terms else None,
        )
        return trace.select(~coins), trace.select(coins)

    def sent(self, inputs: Inputs, bit: int, trial: int) -> tuple[int, Sender, Vector]:
        """The round, the client and its update with its canary."""
        number, client = divmod(trial, self.updates.shape[1])
        update = self._with_canary(number, (inputs.zero, inputs.one))[bit][client]
        return number, Sender(client, self.federation.setting.samples), update

    def _with_canary(self, number: int, canary: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """[clients, d] each: the updates of a round with either of two canaries."""
        base = torch.zeros_like(self.updates[number]) if self.alone else self.updates[number]
        scale = base.norm(dim=1, keepdim=True).clamp(min=1.0)
        zero, one = (base + scale * in_turn(side, self._trials(number)) for side in canary)
        return zero, one

    def _trials(self, number: int) -> Tensor:
        """[clients] the numbers of the messages of a round."""
        clients = self.updates.shape[1]
        return torch.arange(number * clients, (number + 1) * clients)

    def _round(self, canary: Inputs, number: int, coins: Tensor, key: Key, only: Part | None) -> Trace:
        """What the adversary sees of the messages of one round."""
        (zero, one), trials = self._with_canary(number, (canary.zero, canary.one)), self._trials(number)
        updates, memories = torch.where(coins[:, None], one, zero), self.memories[number]
        exchange = self.federation.exchange(updates, key.child("round", number), number, memories=memories)
        ratios, estimates, terms = None, torch.zeros(len(coins), 0), None
        if only in (None, "ratios"):
            zero, one = self._with_canary(number, canary.hypotheses)
            # float64, because a likelihood ratio is a small difference of sums over all coordinates
            ratios = self.ratios(number, exchange.received, exchange.links, (zero.double(), one.double()))
        if only in (None, "estimates"):
            estimates = canary.seen(self.federation.estimates(exchange, self.threat, number), trials)
            terms = torch.stack([estimates, canary.seen(self.before[number], trials)], 1)
        return Trace(ratios, estimates, tuple(exchange.received), tuple(exchange.links.keys), trials, terms)


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
            low, high = (distinguisher.scores(trace) for trace in judged)
            threshold = bounds.split_threshold(low, high, claim.delta, level)
            counts = bounds.count(low, high, threshold)
            right = counts.true_positives / counts.positives - counts.false_positives / counts.negatives
            rank = bounds.epsilon_lower(counts, claim.delta, level), right
            if best is None or rank > best[0]:
                if distinguisher.reads == "ratios":
                    low, high = (distinguisher.scores(trace) for trace in both)
                    threshold = bounds.split_threshold(low, high, claim.delta, level)
                best = rank, HypothesisTest(pair, distinguisher, threshold)
    assert best is not None
    return best[1]


def audit_messages(
    federation: Federation,
    updates: Tensor,
    claim: Claim,
    threat: Threat,
    confidence: float,
    key: Key,
    *,
    device: str = "cpu",
) -> AuditResult:
    """A lower bound of the epsilon of one message, from all messages of a run with a canary in each.

    A random half of the messages carries input 1, the others input 0. `encode` makes each message with the round's
    public state and with the client's memory of its real messages. The auditor knows the real updates and messages.
    The first quarter of the rounds is not counted; it selects the pair, the distinguisher and the threshold with the
    largest bound. Of two equally good distinguishers, the defense's likelihood ratio is chosen; for a Gaussian
    mechanism its threshold is 0. The distinguisher `rounds` subtracts what is known about the noise in the client's
    previous real message, so noise that is used again cancels.

    | the claim's unit | inputs 0 and 1, neighbors by the claim's relation: real update u, c_0 and c_1 of `pairs` |
    |---|---|
    | message, client | u + c_0 and u + c_1; c is 100 times as long as u, at least 100: the defense clips it |
    | coordinate, sub-vector | the same; c is zero except in the first coordinate or sub-vector |
    | the same, if the update sets its own scale | c_0 and c_1 without u; both have the same norm |
    | any, with add-remove | c_0 = 0 and c_1 |
    | record | refused: it acts through local training, see `harness.audit.engine` |

    Args:
        updates: [T, clients, d] the clients' updates in a run, before the defense.
        claim: of one round.
        threat: an adversary who sees messages; without the shared keys it reads them as an outsider.
        device: where likelihoods are computed.

    Guarantees:
        Above the largest epsilon of a round with probability at most 1 - confidence. If the claim's proof is a
        composition of Gaussians, the bound assumes that messages are Gaussian; `any_mechanism` does not. Error rates
        may differ between messages: the halves are random, so each count is spread around its mean rate at most as
        widely as a binomial (Hoeffding 1956, Thm 4). Mean rates obey every trade-off curve because the curve is convex.

    Raises:
        ValueError: updates of another shape or not finite, fewer than two rounds or clients, a claim for several rounds
            or for a record, an adversary who sees no single messages, confidence outside (0, 1).

    Source: Nasr et al. 2023 (arXiv 2302.07956). Differs: their canaries are gradients; ours go through `encode`.
    """
    _check_messages(federation, updates, claim, threat)
    bounds.check_confidence(confidence)
    defense, setting, history = federation.defense, federation.setting, federation.history
    alone = claim.relation is Relation.ADD_REMOVE or defense.parts(setting).self_scaled
    run = Messages.of(federation, updates, threat, key.child("real"), alone=alone, device=device)
    asked = (defense, setting, claim.unit, claim.relation, key.child("pairs"))
    inputs = [pair for pair in (*pairs(*asked), *varied(*asked)) if not pair.reverses]
    first, gaussian = max(1, math.floor(_PILOT_SHARE * len(history))), is_gaussian(claim, threat)
    chosen = choose(run, inputs, first, claim, confidence, key.child("pilot"))
    reads = chosen.distinguisher.reads
    low, high = run.traces(chosen.inputs, range(first, len(history)), key.child("counted"), only=reads)
    threshold = 0.0 if gaussian and reads == "ratios" else chosen.threshold
    counts = bounds.count(chosen.distinguisher.scores(low), chosen.distinguisher.scores(high), threshold)
    bound = bounds.bound_from_counts(counts, claim.delta, confidence, gaussian=gaussian)
    return chosen.result(bound, claim, threat, counts, confidence)


def audit_one_run(
    federation: Federation, claim: Claim, threat: Threat, guesses: int, confidence: float, key: Key
) -> AuditResult:
    """A lower bound of the epsilon of all rounds together, from one run in which all m clients are canaries.

    An independent fair coin decides for each canary whether it is in. A canary that is in sends the same update in
    every round, far above the clip and along its own direction; a canary that is out sends zero or the opposite. After
    half of the rounds all updates change their sign. Canaries are ranked by a weighted sum of <what a round decodes to,
    direction>, with that sign. The weights are optimal for the covariance of the rounds over the canaries, so noise
    shows if it is used again, cancels or is missing in some rounds. Of r guesses, half are that the highest are in,
    half that the lowest are out. Directions are the axes if m <= d; else they are uniform on the sphere, where each
    canary is noise to the others.

    | pair | the aggregate moves by | neighbors by |
    |---|---|---|
    | from nothing | one clip | add-remove |
    | end to end | two clips | replace, any-two-inputs |

    Args:
        federation: all clients take part in every round.
        claim: of all these rounds, for a client or all its messages.
        threat: the adversary sees what a round decodes to; an aggregator sees it without the server's own noise.
        guesses: r, fixed before the run.

    Guarantees:
        Above the true epsilon with probability at most 1 - confidence. The Gaussian trade-off is used only if the
        claim's proof is a composition of Gaussians; `any_mechanism` never uses it. The larger of the two bounds needs
        no correction: each refutes a given epsilon from some number of right guesses on. The weights depend on what the
        rounds decode to and not on the coins, so the guesses are a function of the output, as the bounds require.

    Raises:
        ValueError: no rounds, clients that do not take part, not 1 <= guesses <= m, a claim for another horizon or for
            part of a message, confidence outside (0, 1).

    Source: Steinke, Nasr, Jagielski 2023 (arXiv 2305.08846); Mahloujifar, Melis, Chaudhuri 2024 (arXiv 2410.22235).
    """
    _check_run(federation, claim)
    bounds.check_confidence(confidence)
    m, d = federation.setting.clients, federation.setting.dim
    if not 1 <= guesses <= m:
        raise ValueError(f"expected 1 to {m} guesses, one for each canary at most, got {guesses}")
    pair, out = ("from nothing", 0.0) if claim.relation is Relation.ADD_REMOVE else ("end to end", -1.0)
    along = torch.eye(m, d) if m <= d else _on_sphere(m, d, key.child("directions"))
    coins = rng.uniform(key.child("coins"), (m,)) < 0.5
    rounds = len(federation.history)
    signs = torch.where(2 * torch.arange(rounds) < rounds, 1.0, -1.0).double()
    sent = _FAR * along * torch.where(coins, 1.0, out)[:, None]
    decoded = _decoded(federation, sent, key, signs, threat)
    scores = (along.double() @ decoded.T) * signs
    ranked = coins.numpy()[np.argsort((scores @ _weights(scores)).numpy(), kind="stable")]
    lowest = guesses // 2
    right = int(np.sum(ranked[m - guesses + lowest :])) + int(np.sum(~ranked[:lowest]))
    gaussian = claim.delta > 0 and claim.proved.tight and accounting.is_gaussian(claim.proved.event)
    bound = bound_from_guesses(m, guesses, right, claim.delta, confidence, gaussian=gaussian)
    counts = Counts(right, guesses - right, guesses, guesses)
    return AuditResult(*bound, claim.delta, confidence, m, "guesses", pair, threat, counts, "canary clients")


def estimate_by_cosine(federation: Federation, claim: Claim, key: Key) -> CosineEstimate:
    """An ESTIMATE, not a bound, of the epsilon of all rounds together, for a client that sends a full update or zero.

    All k clients are canaries; each sends its own update, uniform on the sphere, in every round. `cosine_epsilon` uses
    the cosines of the canaries with the sum of what the rounds decode to. If updates may be replaced, mu is twice the
    estimate. Many canaries hide each other: the estimate is then mu / sqrt(1 + mu^2 k / d) instead of mu.

    Args:
        federation, claim: as in `audit_one_run`; k is at least 100 and at most d / 100.

    Raises:
        ValueError: as `audit_one_run`; fewer than two clients.

    Source: Andrew et al. 2023 (arXiv 2302.03098). Differs: see `cosine_epsilon`.
    """
    _check_run(federation, claim)
    along = _on_sphere(federation.setting.clients, federation.setting.dim, key.child("directions"))
    ones = torch.ones(len(federation.history))
    total = _decoded(federation, _FAR * along, key, ones, Threat.PARTICIPANT).sum(0)
    cosines = (along.double() @ (total / total.norm())).clamp(-1.0, 1.0)
    return cosine_epsilon(np.asarray(cosines.numpy(), np.float64), federation.setting.dim, claim.delta)


def _weights(scores: Tensor) -> Tensor:
    """[T] the weights of the rounds: the weighted sum of scores [canaries, T] of equal means has the least variance.

    Canaries that are in and canaries that are out differ in their means by the same amount in each round, which only
    scales the weights.
    """
    canaries, rounds = scores.shape
    centered = scores - scores.mean(0)
    covariance = centered.T @ centered / canaries
    # with few canaries, the ridge pulls the weights towards equal ones
    ridge = rounds / canaries * float(covariance.diagonal().mean()) + 1e-300
    shrunk = covariance + ridge * torch.eye(rounds, dtype=torch.float64)
    found: Tensor = torch.linalg.solve(shrunk, torch.ones_like(scores[0]))
    return found


def _decoded(federation: Federation, updates: Tensor, key: Key, signs: Tensor, threat: Threat) -> Tensor:
    """[T, d] float64: what an adversary without messages sees of each round.

    Clients send `updates` [clients, d] times the round's sign.
    """
    found = []
    for number, exchange in enumerate(federation.run((sign * updates for sign in signs.tolist()), key)):
        round_ = federation.round(number)
        server = round_.server_key(key, key.child("round", number))
        found.append(round_.revealed(exchange, threat, server).double())
    return torch.stack(found)


def _on_sphere(canaries: int, d: int, key: Key) -> Tensor:
    return torch.nn.functional.normalize(rng.normal(key, (canaries, d)))


def _check_messages(federation: Federation, updates: Tensor, claim: Claim, threat: Threat) -> None:
    expected = (len(federation.history), federation.setting.clients, federation.setting.dim)
    if updates.shape != expected or min(expected[:2]) < 2:
        raise ValueError(
            f"expected updates {list(expected)}, with two rounds and clients at least, got shape {tuple(updates.shape)}"
        )
    if claim.horizon is not Horizon.ONE_ROUND:
        raise ValueError("expected a claim of one round, because each message is a trial; got one of a whole run")
    if claim.unit is Unit.RECORD:
        raise ValueError("expected a claim for a message or a part of it; a record acts through local training")
    if "messages" not in SEES[threat] or federation.defense.superposes:
        raise ValueError(f"expected single messages that {threat.value} sees; for aggregates use audit_one_run")


def _check_run(federation: Federation, claim: Claim) -> None:
    setting, rounds = federation.setting, len(federation.history)
    if setting.participants != setting.clients:
        raise ValueError(f"expected that all clients take part, got {setting.participants} of {setting.clients}")
    if rounds == 0 or claim.horizon is not Horizon.of(rounds):
        raise ValueError(f"expected a claim of all rounds, got {rounds} and a claim of {claim.horizon.value}")
    if claim.unit not in (Unit.CLIENT, Unit.MESSAGE):
        raise ValueError(f"expected a claim for a client's whole message, got one for a {claim.unit.value}")
