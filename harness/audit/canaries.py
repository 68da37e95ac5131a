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
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from leakgauge.harness.audit.bounds import Counts, check_confidence, count, epsilon_lower, split_threshold
from leakgauge.harness.audit.engine import STRICT, AuditResult, bound_from_counts, is_gaussian
from leakgauge.harness.audit.one_run import CosineEstimate, cosine_epsilon, fdp_epsilon, steinke_epsilon
from leakgauge.harness.audit.trials import Deployment, Inputs, log_ratios, pairs
from leakgauge.harness.core import accounting, rng
from leakgauge.harness.core.claim import Claim, Horizon, Relation, Unit
from leakgauge.harness.core.contract import Sender
from leakgauge.harness.core.rng import Key
from leakgauge.harness.core.stats import Numbers
from leakgauge.harness.core.threats import SEES, Threat
from leakgauge.harness.federation.round import Client, Exchange, Round, client_key

_FAR = 100.0
"""Norm of a canary client's update: outside every clip, which reduces it."""

_PILOT_SHARE = 0.25
"""Share of the rounds that choose canary and threshold, if the mechanism is not Gaussian."""


def audit_messages(
    deployment: Deployment, updates: Tensor, claim: Claim, threat: Threat, confidence: float, key: Key
) -> AuditResult:
    """A lower bound of the epsilon of one message, from all messages of a run with a canary in each.

    A random half of the messages carries input 1, the others input 0. `encode` makes each of them with the round's
    public state and with the client's memory of its real messages. The auditor knows the real updates and computes the
    defense's likelihood ratio of the two inputs. For a Gaussian mechanism the threshold is 0. Otherwise the first
    quarter of the rounds chooses the pair and the threshold with the largest bound, and is not counted.

    | the claim's unit | inputs 0 and 1, neighbors by the claim's relation: real update u, c_0 and c_1 of `pairs` |
    |---|---|
    | message, client | u + c_0 and u + c_1; c is 100 times as long as u, at least 100: the defense clips it |
    | coordinate, sub-vector | the same; c is zero except in the first coordinate or sub-vector |
    | the same, if the update sets its own scale | c_0 and c_1, which have one norm |
    | any, with add-remove | c_0 = 0 and c_1 |
    | record | refused: it acts through local training, see `harness.audit.engine` |

    Args:
        updates: [T, clients, d] the clients' updates in a run, before the defense.
        claim: of one round.
        threat: an adversary who sees messages; without the shared keys it reads them as an outsider.

    Guarantees:
        Above the largest epsilon of a round with probability at most 1 - confidence. If the claim's proof is a
        composition of Gaussians, the bound assumes that messages are Gaussian; `any_mechanism` does not. Error rates
        may differ between messages: the halves are random, so each count is spread around its mean rate at most as
        widely as a binomial (Hoeffding 1956, Thm 4), and mean rates obey every trade-off curve because it is convex.

    Raises:
        ValueError: updates of another shape or not finite, fewer than two rounds or clients, a claim for several rounds
            or a record, an adversary who sees no single messages, confidence outside (0, 1).

    Source: Nasr et al. 2023 (arXiv 2302.07956). Differs: their canaries are gradients; ours go through `encode`.
    """
    _check_messages(deployment, updates, claim, threat)
    check_confidence(confidence)
    defense, setting, history = deployment
    alone = claim.relation is Relation.ADD_REMOVE or defense.parts(setting).self_scaled
    run = _Messages(deployment, updates, threat, alone)
    inputs = pairs(defense, setting, claim.unit, claim.relation, key.child("pairs"))
    gaussian = is_gaussian(claim, threat)
    chosen, threshold, first = inputs[0], 0.0, 0
    if not gaussian:
        first = max(1, math.floor(_PILOT_SHARE * len(history)))
        chosen, threshold = run.choose(inputs, first, claim, confidence, key.child("pilot"))
    counts = count(*run.scores(chosen, range(first, len(history)), key.child("counted")), threshold)
    return AuditResult(
        *bound_from_counts(counts, claim.delta, confidence, gaussian=gaussian),
        delta=claim.delta,
        confidence=confidence,
        trials=min(counts.positives, counts.negatives),
        distinguisher="likelihood ratio",
        pair=chosen.name,
        threat=threat,
        counts=counts,
    )


def audit_one_run(
    deployment: Deployment,
    claim: Claim,
    threat: Threat,
    guesses: int,
    confidence: float,
    key: Key,
    *,
    pair: Literal["from nothing", "end to end"] = "from nothing",
) -> AuditResult:
    """A lower bound of the epsilon of all rounds together, from one run in which all m clients are canaries.

    An independent fair coin decides for each canary whether it is in. If so, it sends the same update in every round,
    far outside the clip along its own direction; if not, zero or the opposite. Canaries are ranked by the sum of <what
    a round decodes to, direction>. Of r guesses, half are that the highest are in, half that the lowest are out.
    Directions are the axes if m <= d, else uniform on the sphere, where each canary is noise to the others.

    | pair | the aggregate moves by | neighbors by |
    |---|---|---|
    | from nothing | one clip: half of the effect of replacing an update | add-remove, replace, any-two-inputs |
    | end to end | two clips | replace, any-two-inputs |

    Args:
        deployment: all clients take part in every round.
        claim: of all these rounds, for a client or all its messages.
        threat: named in the result; every adversary sees what a round decodes to.
        guesses: r, fixed before the run.

    Guarantees:
        Above the true epsilon with probability at most 1 - confidence. The Gaussian trade-off is used only if the
        claim's proof is a composition of Gaussians; `any_mechanism` does not use it. The larger of the two bounds needs
        no correction: each refutes a given epsilon from some number of right guesses on.

    Raises:
        ValueError: no rounds, some clients do not take part, not 1 <= guesses <= m, a claim for another horizon or for
            part of a message, `end to end` with add-remove, confidence outside (0, 1).

    Source: Steinke, Nasr, Jagielski 2023 (arXiv 2305.08846); Mahloujifar, Melis, Chaudhuri 2024 (arXiv 2410.22235).
    """
    _check_run(deployment, claim)
    check_confidence(confidence)
    m, d = deployment.setting.clients, deployment.setting.dim
    if not 1 <= guesses <= m:
        raise ValueError(f"expected 1 to {m} guesses, one for each canary at most, got {guesses}")
    out = {"from nothing": 0.0} if claim.relation is Relation.ADD_REMOVE else {"from nothing": 0.0, "end to end": -1.0}
    if pair not in out:
        raise ValueError(f"expected a pair from {tuple(out)} for a claim by {claim.relation.value}, got {pair!r}")
    along = torch.eye(m, d) if m <= d else _on_sphere(m, d, key.child("directions"))
    coins = rng.uniform(key.child("coins"), (m,)) < 0.5
    total = _sum_of_rounds(deployment, _FAR * along * torch.where(coins, 1.0, out[pair])[:, None], key)
    ranked = coins.numpy()[np.argsort((along.double() @ total).numpy(), kind="stable")]
    lowest = guesses // 2
    right = int(np.sum(ranked[m - guesses + lowest :])) + int(np.sum(~ranked[:lowest]))
    gaussian = claim.delta > 0 and claim.proved.tight and accounting.is_gaussian(claim.proved.event)
    strict = max(confidence, STRICT)

    def bound(successes: int, level: float) -> float:
        general = steinke_epsilon(m, guesses, successes, claim.delta, level)
        return max(general, fdp_epsilon(m, guesses, successes, claim.delta, level)) if gaussian else general

    return AuditResult(
        epsilon_lower=bound(right, confidence),
        method="one run, Gaussian trade-off" if gaussian else "one run",
        any_mechanism=steinke_epsilon(m, guesses, right, claim.delta, confidence),
        strict=bound(right, strict),
        ceiling=bound(guesses, strict),
        delta=claim.delta,
        confidence=confidence,
        trials=m,
        distinguisher="guesses",
        pair=pair,
        threat=threat,
        counts=Counts(right, guesses - right, guesses, guesses),
        trials_label="canary clients",
    )


def estimate_by_cosine(deployment: Deployment, claim: Claim, key: Key) -> CosineEstimate:
    """An ESTIMATE, not a bound, of the epsilon of all rounds together, for a client that sends a full update or zero.

    All k clients are canaries and send the same update in every round, uniform on the sphere. `cosine_epsilon` judges
    the cosines of the canaries with the sum of what the rounds decode to. If updates may be replaced, mu is twice the
    estimate. Many canaries hide each other: mu / sqrt(1 + mu^2 k / d) is found instead of mu.

    Args:
        deployment, claim: as in `audit_one_run`; k is at least 100 and at most d / 100.

    Raises:
        ValueError: as `audit_one_run`; fewer than two clients.

    Source: Andrew et al. 2023 (arXiv 2302.03098). Differs: see `cosine_epsilon`.
    """
    _check_run(deployment, claim)
    along = _on_sphere(deployment.setting.clients, deployment.setting.dim, key.child("directions"))
    total = _sum_of_rounds(deployment, _FAR * along, key)
    cosines = (along.double() @ (total / total.norm())).clamp(-1.0, 1.0)
    return cosine_epsilon(np.asarray(cosines.numpy(), np.float64), deployment.setting.dim, claim.delta)


@dataclass(frozen=True)
class _Messages:
    """A run with a canary in each message: on top of the real update [T, clients, d], or `alone`."""

    deployment: Deployment
    updates: Tensor
    threat: Threat
    alone: bool

    def scores(self, canary: Inputs, rounds: range, key: Key) -> tuple[Numbers, Numbers]:
        """Log-likelihood ratios of the messages with input 0 and with input 1, a random half each."""
        clients, memories = self.updates.shape[1], _memories(self.deployment)
        coins = torch.zeros(len(rounds) * clients, dtype=torch.bool)
        coins[rng.subset(key.child("coins"), len(coins), len(coins) // 2)] = True
        ratios = torch.zeros(len(rounds), clients, dtype=torch.float64)
        for number in range(rounds.stop):
            if (row := number - rounds.start) >= 0:
                ratios[row] = self._ratios(canary, number, memories, coins.reshape(-1, clients)[row], key)
            if any(memory is not None for memory in memories):
                memories = _send(self.deployment, number, memories, self.updates[number], key.child("real")).memories
        found = np.asarray(ratios.flatten().numpy(), np.float64)
        return found[~coins.numpy()], found[coins.numpy()]

    def choose(self, inputs: list[Inputs], rounds: int, claim: Claim, level: float, key: Key) -> tuple[Inputs, float]:
        """The pair and the threshold with the largest bound in the first rounds; the first pair if several tie."""
        bounds, thresholds = [], []
        for index, pair in enumerate(inputs):
            scores = self.scores(pair, range(rounds), key.child(index))
            thresholds.append(split_threshold(*scores, claim.delta, level))
            bounds.append(epsilon_lower(count(*scores, thresholds[-1]), claim.delta, level))
        best = int(np.argmax(bounds))
        return inputs[best], thresholds[best]

    def _ratios(self, canary: Inputs, number: int, memories: list[Any], coins: Tensor, key: Key) -> Tensor:
        """[clients] log-likelihood ratios of one round."""
        defense, _, history = self.deployment
        base = torch.zeros_like(self.updates[number]) if self.alone else self.updates[number]
        scale = base.norm(dim=1, keepdim=True).clamp(min=1.0)
        inputs = base + scale * torch.where(coins[:, None], canary.one, canary.zero)
        sent = _send(self.deployment, number, memories, inputs, key)
        links = sent.links if "shared" in SEES[self.threat] else sent.links._replace(shared=None)
        # float64, because the ratio is a small difference of sums over all coordinates
        zero, one = ((base + scale * side).double() for side in canary.hypotheses)
        return log_ratios(defense.likelihood(history[number], sent.received, links), zero, one)


def _memories(deployment: Deployment) -> list[Any]:
    """What each client remembers before its first message."""
    return [deployment.defense.remember(deployment.setting) for _ in range(deployment.setting.clients)]


def _round(deployment: Deployment, number: int) -> Round:
    """One round of a deployment."""
    return Round(deployment.defense, deployment.setting, deployment.history[number], number)


def _send(deployment: Deployment, number: int, memories: list[Any], updates: Tensor, key: Key) -> Exchange:
    """Send the clients' updates [clients, d] of a round, with the keys that the training loop derives."""
    clients = [
        Client.of(Sender(client, deployment.setting.samples), update, memory, client_key(key, number, client))
        for client, (update, memory) in enumerate(zip(updates, memories, strict=True))
    ]
    return _round(deployment, number).exchange(clients, key.child("round", number, "channel"))


def _sum_of_rounds(deployment: Deployment, updates: Tensor, key: Key) -> Tensor:
    """[d] float64: the sum of what all rounds decode to, if the clients send `updates` [clients, d] in each."""
    memories, total = _memories(deployment), torch.zeros(deployment.setting.dim, dtype=torch.float64)
    for number in range(len(deployment.history)):
        sent = _send(deployment, number, memories, updates, key)
        memories = sent.memories
        total += _round(deployment, number).decode(sent, key.child("round", number, "server"))
    return total


def _on_sphere(canaries: int, d: int, key: Key) -> Tensor:
    """[canaries, d] uniform on the unit sphere."""
    return torch.nn.functional.normalize(rng.normal(key, (canaries, d)))


def _check_messages(deployment: Deployment, updates: Tensor, claim: Claim, threat: Threat) -> None:
    """Refuse updates, a claim or an adversary that an audit of messages cannot use."""
    expected = (len(deployment.history), deployment.setting.clients, deployment.setting.dim)
    if updates.shape != expected or min(expected[:2]) < 2:
        raise ValueError(
            f"expected updates {list(expected)}, with two rounds and clients at least, got shape {tuple(updates.shape)}"
        )
    if claim.horizon is not Horizon.ONE_ROUND:
        raise ValueError("expected a claim of one round, because each message is a trial; got one of a whole run")
    if claim.unit is Unit.RECORD:
        raise ValueError("expected a claim for a message or a part of it; a record acts through local training")
    if "messages" not in SEES[threat] or deployment.defense.superposes:
        raise ValueError(f"expected single messages that {threat.value} sees; for aggregates use audit_one_run")


def _check_run(deployment: Deployment, claim: Claim) -> None:
    """Refuse a federation or a claim that canary clients cannot audit."""
    setting, rounds = deployment.setting, len(deployment.history)
    if setting.participants != setting.clients:
        raise ValueError(f"expected that all clients take part, got {setting.participants} of {setting.clients}")
    if rounds == 0 or claim.horizon is not Horizon.of(rounds):
        raise ValueError(f"expected a claim of all rounds, got {rounds} and a claim of {claim.horizon.value}")
    if claim.unit not in (Unit.CLIENT, Unit.MESSAGE):
        raise ValueError(f"expected a claim for a client's whole message, got one for a {claim.unit.value}")
