"""Audits inside a federated run: canaries in its messages, and canary clients in its aggregates.

| audit | a trial | the adversary sees | result |
|---|---|---|---|
| `audit_messages` | a message of a client in a round | messages | a bound for one round |
| `audit_one_run` | a client in all rounds | what each round decodes to | a bound for all rounds together |
| `estimate_by_cosine` | a client in all rounds | what each round decodes to | an estimate for all rounds; no bound |
"""

from __future__ import annotations

import math
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from leakgauge.harness.audit.bounds import Counts, check_confidence, count
from leakgauge.harness.audit.distinguishers import scored
from leakgauge.harness.audit.engine import AuditResult, bound_from_counts, is_gaussian
from leakgauge.harness.audit.messages import Messages, choose, first_memories, real_run, round_of, send
from leakgauge.harness.audit.one_run import CosineEstimate, cosine_epsilon, fdp_epsilon, steinke_epsilon
from leakgauge.harness.audit.space import varied
from leakgauge.harness.audit.trials import Deployment, pairs
from leakgauge.harness.core import accounting, rng
from leakgauge.harness.core.claim import Claim, Horizon, Relation, Unit
from leakgauge.harness.core.rng import Key
from leakgauge.harness.core.stats import STRICT
from leakgauge.harness.core.threats import SEES, Threat

_FAR = 100.0
"""Norm of a canary client's update: above every clip, which reduces it."""

_PILOT_SHARE = 0.25
"""Share of the rounds that are used to choose canary, distinguisher and threshold."""


def audit_messages(
    deployment: Deployment,
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
    _check_messages(deployment, updates, claim, threat)
    check_confidence(confidence)
    defense, setting, history = deployment
    alone = claim.relation is Relation.ADD_REMOVE or defense.parts(setting).self_scaled
    real = real_run(deployment, updates, threat, key.child("real"))
    run = Messages(deployment, updates, threat, alone, real, device)
    asked = (defense, setting, claim.unit, claim.relation, key.child("pairs"))
    inputs = [pair for pair in (*pairs(*asked), *varied(*asked)) if not pair.reverses]
    first, gaussian = max(1, math.floor(_PILOT_SHARE * len(history))), is_gaussian(claim, threat)
    chosen = choose(run, inputs, first, claim, confidence, key.child("pilot"))
    reads = chosen.distinguisher.reads
    low, high = run.traces(chosen.inputs, range(first, len(history)), key.child("counted"), only=reads)
    threshold = 0.0 if gaussian and reads == "ratios" else chosen.threshold
    counts = count(scored(chosen.distinguisher, low), scored(chosen.distinguisher, high), threshold)
    return AuditResult(
        *bound_from_counts(counts, claim.delta, confidence, gaussian=gaussian),
        delta=claim.delta,
        confidence=confidence,
        trials=min(counts.positives, counts.negatives),
        distinguisher=chosen.distinguisher.name,
        pair=chosen.inputs.name,
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

    An independent fair coin decides for each canary whether it is in. A canary that is in sends the same update in
    every round, far above the clip and along its own direction; a canary that is out sends zero or the opposite. After
    half of the rounds all updates change their sign. Canaries are ranked by a weighted sum of <what a round decodes to,
    direction>, with that sign. The weights are optimal for the covariance of the rounds over the canaries, so noise
    shows if it is used again, cancels or is missing in some rounds. Of r guesses, half are that the highest are in,
    half that the lowest are out. Directions are the axes if m <= d; else they are uniform on the sphere, where each
    canary is noise to the others.

    | pair | the aggregate moves by | neighbors by |
    |---|---|---|
    | from nothing | one clip, half of the effect of replacing an update | add-remove, replace, any-two-inputs |
    | end to end | two clips | replace, any-two-inputs |

    Args:
        deployment: all clients take part in every round.
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
    rounds = len(deployment.history)
    signs = torch.where(2 * torch.arange(rounds) < rounds, 1.0, -1.0).double()
    sent = _FAR * along * torch.where(coins, 1.0, out[pair])[:, None]
    decoded = _decoded(deployment, sent, key, signs, threat)
    scores = (along.double() @ decoded.T) * signs
    ranked = coins.numpy()[np.argsort((scores @ _weights(scores)).numpy(), kind="stable")]
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

    All k clients are canaries; each sends its own update, uniform on the sphere, in every round. `cosine_epsilon` uses
    the cosines of the canaries with the sum of what the rounds decode to. If updates may be replaced, mu is twice the
    estimate. Many canaries hide each other: the estimate is then mu / sqrt(1 + mu^2 k / d) instead of mu.

    Args:
        deployment, claim: as in `audit_one_run`; k is at least 100 and at most d / 100.

    Raises:
        ValueError: as `audit_one_run`; fewer than two clients.

    Source: Andrew et al. 2023 (arXiv 2302.03098). Differs: see `cosine_epsilon`.
    """
    _check_run(deployment, claim)
    along = _on_sphere(deployment.setting.clients, deployment.setting.dim, key.child("directions"))
    ones = torch.ones(len(deployment.history))
    total = _decoded(deployment, _FAR * along, key, ones, Threat.PARTICIPANT).sum(0)
    cosines = (along.double() @ (total / total.norm())).clamp(-1.0, 1.0)
    return cosine_epsilon(np.asarray(cosines.numpy(), np.float64), deployment.setting.dim, claim.delta)


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


def _decoded(deployment: Deployment, updates: Tensor, key: Key, signs: Tensor, threat: Threat) -> Tensor:
    """[T, d] float64: what an adversary without messages sees of each round.

    Clients send `updates` [clients, d] times the round's sign.
    """
    memories, found = first_memories(deployment), []
    for number, sign in enumerate(signs.tolist()):
        sent = send(deployment, number, memories, sign * updates, key)
        memories = sent.memories
        server = key.child("round", number, "server")
        found.append(round_of(deployment, number).revealed(sent, threat, server).double())
    return torch.stack(found)


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
