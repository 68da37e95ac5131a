"""Audits inside a federated run: canaries in its messages, and canary clients in what it adds up.

| audit | a trial | who looks | what is bounded |
|---|---|---|---|
| `audit_messages` | a message of a client in a round | who sees messages | one round |
| `one_run` | a client in all rounds | who sees what a round decodes to | all rounds together |
| `cosine_run` | the same | the same | nothing: an estimate for all rounds |
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from leakgauge.harness.audit.bounds import Counts, count, epsilon_lower, split_threshold
from leakgauge.harness.audit.engine import bound, is_gaussian
from leakgauge.harness.audit.one_run import CosineAudit, corrected_steinke, cosine_epsilon, fdp_epsilon
from leakgauge.harness.audit.trials import Inputs, pairs
from leakgauge.harness.core import accounting, rng
from leakgauge.harness.core.claim import Claim, Horizon, Relation, Unit
from leakgauge.harness.core.contract import (
    Defense,
    Sender,
    Setting,
)
from leakgauge.harness.core.rng import Key
from leakgauge.harness.core.stats import Numbers
from leakgauge.harness.core.threats import SEES, Threat
from leakgauge.harness.federation.round import Client, Exchange, Round, client_key

_FAR = 100.0
"""Norm of what a canary client hands to the defense: outside every clip, which cuts it down."""

_PILOT = 0.25
"""Share of the rounds that choose canary and threshold, where the mechanism is not Gaussian."""


@dataclass(frozen=True)
class RunAudit:
    """What the canaries in the messages of a run bound: the epsilon of ONE round's message, at `delta`.

    Attributes:
        epsilon_lower: with this confidence, epsilon (of the round that tells most, where they differ) is no smaller.
        method: `Clopper-Pearson`, or `Gaussian trade-off` where the mechanism is known to be Gaussian.
        any_mechanism: the bound by Clopper-Pearson, whatever the mechanism.
        trials: messages that are counted, half with each input.
        pilot: messages that are not, of the first rounds: they chose pair and threshold.
    """

    epsilon_lower: float
    delta: float
    confidence: float
    method: str
    any_mechanism: float
    counts: Counts
    trials: int
    pilot: int
    pair: str
    threat: Threat


class Guesses(NamedTuple):
    """How many coins were guessed, fixed before the run, and how many of these guesses are right."""

    made: int
    right: int


@dataclass(frozen=True)
class OneRun:
    """What canary clients bound in one run: the epsilon of ALL its rounds together, at `delta`.

    Attributes:
        epsilon_lower: with this confidence, epsilon is no smaller.
        method: `one run`, or `one run, Gaussian trade-off` where the composed mechanism is known to be Gaussian.
        any_mechanism: the bound of `corrected_steinke`, whatever the mechanism.
    """

    epsilon_lower: float
    delta: float
    confidence: float
    method: str
    any_mechanism: float
    canaries: int
    rounds: int
    guesses: tuple[Guesses, ...]
    pair: str


def audit_messages(
    defense: Defense[Any, Any],
    setting: Setting,
    updates: Tensor,
    history: Sequence[Any],
    claim: Claim,
    threat: Threat,
    confidence: float,
    key: Key,
) -> RunAudit:
    """A lower bound of the epsilon of one message, from all messages of a run with a canary in each.

    Half of the messages, at random, are made of input 1, the others of input 0, by `encode` with the round's public
    state and with what the real messages left in the client's memory. The auditor knows the real updates; it tells the
    two inputs apart by the defense's likelihood ratio, at the threshold 0 where the mechanism is Gaussian, else with
    the pair and at the threshold that do best in the first quarter of the rounds, which is then not counted.

    | the claim's unit | inputs 0 and 1, neighbors by the claim's relation: real update u, c_0 and c_1 of `pairs` |
    |---|---|
    | message, client | u + c_0 and u + c_1; c is 100 times as long as u, or as 1: the defense cuts it down |
    | coordinate, sub-vector | the same; c is not zero in the first place alone |
    | the same, where the update sets its own unit | c_0 and c_1, which have one norm |
    | any, with add-remove | c_0 = 0 and c_1 |
    | record | refused: it acts through local training, see `harness.audit.engine` |

    Args:
        updates: [T, clients, d] what the clients of a run sent, before the defense.
        history: [T] the public state of each round.
        claim: of one round.
        threat: an adversary who sees messages; without the shared keys it reads them as an outsider.

    Guarantees:
        Above the largest epsilon of a round with probability at most 1 - confidence. Where the claim's proof is a
        composition of Gaussians, the bound takes messages for Gaussian; `any_mechanism` does not. Error rates may
        differ between messages: as the halves are drawn at random, each count is spread around its mean rate no wider
        than a binomial (Hoeffding 1956, Thm 4); and mean rates obey every trade-off curve, since these are convex.

    Raises:
        ValueError: updates of another shape or not finite, fewer than two rounds or clients, a claim for several rounds
            or a record, an adversary who sees no messages one by one, confidence outside (0, 1).

    Source: Nasr et al. 2023 (arXiv 2302.07956), whose canaries are gradients; here they go through the encode path.
    """
    _check_messages(defense, updates, (len(history), setting.dim), claim, threat)
    _check_confidence(confidence)
    alone = claim.relation is Relation.ADD_REMOVE or defense.parts(setting).self_scaled
    run = _Messages(_Federation(defense, setting, history, updates.shape[1]), updates, threat, alone)
    inputs = pairs(defense, setting, claim.unit, claim.relation, key.child("pairs"))
    gaussian = is_gaussian(claim, threat)
    chosen, threshold, first = inputs[0], 0.0, 0
    if not gaussian:
        first = max(1, math.floor(_PILOT * len(history)))
        chosen, threshold = run.choose(inputs, first, claim, confidence, key.child("pilot"))
    counts = count(*run.scores(chosen, range(first, len(history)), key.child("counted")), threshold)
    found = bound(counts, claim.delta, confidence, gaussian=gaussian)
    return RunAudit(
        epsilon_lower=found.epsilon_lower,
        delta=claim.delta,
        confidence=confidence,
        method=found.method,
        any_mechanism=found.any_mechanism,
        counts=counts,
        trials=counts.positives + counts.negatives,
        pilot=first * updates.shape[1],
        pair=chosen.name,
        threat=threat,
    )


def one_run(
    defense: Defense[Any, Any],
    setting: Setting,
    history: Sequence[Any],
    claim: Claim,
    canaries: int,
    guesses: Sequence[int],
    confidence: float,
    key: Key,
    *,
    pair: Literal["from nothing", "end to end"] = "from nothing",
) -> OneRun:
    """A lower bound of the epsilon of all rounds together, from one run with many canary clients.

    A fair coin of its own says whether a canary is in. If so, it sends the same update in every round, far outside the
    clip along a direction of its own; if not, zero, or the opposite. Other clients send zero. Canaries are ranked by
    the sum of <what a round decodes to, direction>; of r guesses, half call the highest in, half the lowest out.

    | pair | what the defense adds up moves by | neighbors by |
    |---|---|---|
    | from nothing | a clip: half of what replacing an update can do | add-remove, replace, any-two-inputs |
    | end to end | two clips | replace, any-two-inputs |

    Args:
        setting: everybody takes part in every round.
        history: [T] public states.
        claim: of these T rounds, for a client or all its messages.
        canaries: m. Up to d they lie along the axes; more are uniform on the sphere, where each is noise to the others.
        guesses: r, or several; fixed before the run. Each of k is taken at 1 - (1 - confidence) / k.

    Guarantees:
        Above the true epsilon with probability at most 1 - confidence. The Gaussian trade-off is used only where the
        claim's proof is a composition of Gaussians; `any_mechanism` does without. The larger of the two needs no
        correction: both refute a given epsilon from some number of right guesses on.

    Raises:
        ValueError: no rounds, not 1 <= canaries <= clients, some clients do not take part, impossible guesses, a claim
            for another horizon or for part of a message, `end to end` by add-remove, confidence outside (0, 1).

    Source: Steinke, Nasr, Jagielski 2023 (arXiv 2305.08846); Mahloujifar, Melis, Chaudhuri 2024 (arXiv 2410.22235).
    """
    _check_run(setting, history, claim, canaries, least=1)
    _check_confidence(confidence)
    if not guesses or not all(1 <= r <= canaries for r in guesses):
        raise ValueError(f"expected numbers of guesses from 1 to {canaries} canaries, got {tuple(guesses)}")
    out = {"from nothing": 0.0} if claim.relation is Relation.ADD_REMOVE else {"from nothing": 0.0, "end to end": -1.0}
    if pair not in out:
        raise ValueError(f"expected a pair from {tuple(out)} for a claim by {claim.relation.value}, got {pair!r}")
    along = torch.eye(canaries, setting.dim)
    if canaries > setting.dim:
        along = _on_sphere(canaries, setting.dim, key.child("directions"))
    coins = rng.uniform(key.child("coins"), (canaries,)) < 0.5
    sent = _FAR * along * torch.where(coins, 1.0, out[pair])[:, None]
    total = _Federation(defense, setting, history, setting.clients).added_up(sent, key)
    ranked = coins.numpy()[np.argsort((along.double() @ total).numpy(), kind="stable")]
    found = tuple(Guesses(r, _right(ranked, r)) for r in guesses)
    best = sure = corrected_steinke(canaries, found, claim.delta, confidence)
    gaussian = claim.delta > 0 and accounting.is_gaussian(claim.proved.event)
    if gaussian:
        each = 1 - (1 - confidence) / len(found)
        best = max(sure, *(fdp_epsilon(canaries, *guess, claim.delta, each) for guess in found))
    return OneRun(
        epsilon_lower=best,
        delta=claim.delta,
        confidence=confidence,
        method="one run, Gaussian trade-off" if gaussian else "one run",
        any_mechanism=sure,
        canaries=canaries,
        rounds=len(history),
        guesses=found,
        pair=pair,
    )


def cosine_run(
    defense: Defense[Any, Any], setting: Setting, history: Sequence[Any], claim: Claim, canaries: int, key: Key
) -> CosineAudit:
    """An ESTIMATE, no bound, of the epsilon of all rounds together, of a client that sends a full update or zero.

    All canaries are in, in every round, uniform on the sphere; what is decoded is added up over the rounds, and its
    cosines with them are judged by `cosine_epsilon` against the null's known variance. Where updates may be replaced,
    mu is twice that. Low where canaries drown each other: of mu, mu / sqrt(1 + mu^2 k / d) is found.

    Args:
        setting, history, claim: as of `one_run`.
        canaries: k, a hundred or more, and a hundredth of d at most.

    Raises:
        ValueError: as `one_run`; fewer than two canaries.

    Source: Andrew et al. 2023 (arXiv 2302.03098). Differs: see `cosine_epsilon`.
    """
    _check_run(setting, history, claim, canaries, least=2)
    along = _on_sphere(canaries, setting.dim, key.child("directions"))
    total = _Federation(defense, setting, history, setting.clients).added_up(_FAR * along, key)
    cosines = (along.double() @ (total / total.norm())).clamp(-1.0, 1.0)
    return cosine_epsilon(np.asarray(cosines.numpy(), np.float64), setting.dim, claim.delta)


@dataclass(frozen=True)
class _Federation:
    """Clients 0, 1, ... of equally many samples, with the keys that the loop gives them."""

    defense: Defense[Any, Any]
    setting: Setting
    history: Sequence[Any]
    clients: int

    @property
    def senders(self) -> list[Sender]:
        return [Sender(number, self.setting.samples) for number in range(self.clients)]

    @property
    def memories(self) -> list[Any]:
        return [self.defense.remember(self.setting) for _ in range(self.clients)]

    def send(self, number: int, memories: list[Any], updates: Tensor, key: Key) -> Exchange:
        """The updates [clients, d] of a round, sent."""
        clients = [
            Client.of(who, update, memory, client_key(key, number, who.number))
            for who, update, memory in zip(self.senders, updates, memories, strict=True)
        ]
        return self.round(number).exchange(clients, key.child("round", number, "channel"))

    def round(self, number: int) -> Round:
        return Round(self.defense, self.setting, self.history[number], number)

    def added_up(self, canaries: Tensor, key: Key) -> Tensor:
        """[d] float64: what all rounds decode to, with these [m, d] from the first m clients and zero from the rest."""
        memories, total = self.memories, torch.zeros(self.setting.dim, dtype=torch.float64)
        updates = torch.cat([canaries, torch.zeros(self.clients - len(canaries), self.setting.dim)])
        for number in range(len(self.history)):
            sent = self.send(number, memories, updates, key)
            memories = sent.memories
            total += self.round(number).decode(sent, key.child("round", number, "server"))
        return total


@dataclass(frozen=True)
class _Messages:
    """A run whose messages carry canaries; where these are `alone`, with nothing real in them."""

    federation: _Federation
    updates: Tensor
    threat: Threat
    alone: bool

    def scores(self, canary: Inputs, rounds: range, key: Key) -> tuple[Numbers, Numbers]:
        """Log-likelihood ratios of the messages with input 0 and of those with input 1, half of them each."""
        clients, memories = self.federation.clients, self.federation.memories
        coins = torch.zeros(len(rounds) * clients, dtype=torch.bool)
        coins[rng.subset(key.child("coins"), len(coins), len(coins) // 2)] = True
        ratios = torch.zeros(len(rounds), clients, dtype=torch.float64)
        for number in range(rounds.stop):
            if (row := number - rounds.start) >= 0:
                ratios[row] = self._round(canary, number, memories, coins.reshape(-1, clients)[row], key)
            if any(memory is not None for memory in memories):
                memories = self.federation.send(number, memories, self.updates[number], key.child("real")).memories
        found = np.asarray(ratios.flatten().numpy(), np.float64)
        return found[~coins.numpy()], found[coins.numpy()]

    def choose(self, inputs: list[Inputs], rounds: int, claim: Claim, level: float, key: Key) -> tuple[Inputs, float]:
        """The pair and the threshold that bound most in the first rounds; the first pair where several do."""
        bounds, thresholds = [], []
        for index, pair in enumerate(inputs):
            scores = self.scores(pair, range(rounds), key.child(index))
            thresholds.append(split_threshold(*scores, claim.delta, level))
            bounds.append(epsilon_lower(count(*scores, thresholds[-1]), claim.delta, level))
        best = int(np.argmax(bounds))
        return inputs[best], thresholds[best]

    def _round(self, canary: Inputs, number: int, memories: list[Any], coins: Tensor, key: Key) -> Tensor:
        """[clients] log-likelihood ratios of one round."""
        federation, real = self.federation, self.updates[number]
        base = torch.zeros_like(real) if self.alone else real
        far = base.norm(dim=1, keepdim=True).clamp(min=1.0)
        inputs = base + far * torch.where(coins[:, None], canary.one, canary.zero)
        sent = federation.send(number, memories, inputs, key)
        links = sent.links if "shared" in SEES[self.threat] else sent.links._replace(shared=None)
        score = federation.defense.likelihood(federation.history[number], sent.received, links)
        with torch.no_grad():
            # float64: the ratio is a small difference of sums over all coordinates
            zero, one = (score((base + far * side).double()).double() for side in canary.hypotheses)
        return torch.nan_to_num(zero - one, nan=0.0, posinf=math.inf, neginf=-math.inf)


def _on_sphere(canaries: int, d: int, key: Key) -> Tensor:
    """[m, d] uniform."""
    return torch.nn.functional.normalize(rng.normal(key, (canaries, d)))


def _right(ranked: npt.NDArray[np.bool_], made: int) -> int:
    """Right guesses among so many, of coins [m] in the order of their scores."""
    low = made // 2
    return int(np.sum(ranked[len(ranked) - made + low :])) + int(np.sum(~ranked[:low]))


def _check_messages(
    defense: Defense[Any, Any], updates: Tensor, expected: tuple[int, int], claim: Claim, threat: Threat
) -> None:
    """Refuse what no message can be audited with; expected: rounds and d."""
    if updates.ndim != 3 or (updates.shape[0], updates.shape[2]) != expected or min(updates.shape[:2]) < 2:
        want = f"updates [{expected[0]}, clients, {expected[1]}], two rounds and clients at least"
        raise ValueError(f"expected {want}, got shape {tuple(updates.shape)}")
    if claim.horizon is not Horizon.ONE_ROUND:
        raise ValueError("expected a claim of one round, of which each message is a trial; got one of a whole run")
    if claim.unit is Unit.RECORD:
        raise ValueError("expected a claim for a message or a part of it; a record acts through local training")
    if "messages" not in SEES[threat] or defense.superposes:
        raise ValueError(f"expected messages that {threat.value} sees one by one; for what adds up, see one_run")


def _check_run(setting: Setting, history: Sequence[Any], claim: Claim, canaries: int, *, least: int) -> None:
    """Refuse what no canary client can audit."""
    if not least <= canaries <= setting.clients:
        raise ValueError(f"expected {least} to {setting.clients} canaries, all of them clients, got {canaries}")
    if setting.participants != setting.clients:
        raise ValueError(f"expected that all clients take part, got {setting.participants} of {setting.clients}")
    if len(history) == 0 or claim.horizon is not Horizon.of(len(history)):
        raise ValueError(f"expected a claim of all rounds, got {len(history)} and a claim of {claim.horizon.value}")
    if claim.unit not in (Unit.CLIENT, Unit.MESSAGE):
        raise ValueError(f"expected a claim for a client's whole message, got one for a {claim.unit.value}")


def _check_confidence(confidence: float) -> None:
    """Refuse, before the run, a confidence outside (0, 1)."""
    if not 0 < confidence < 1:
        raise ValueError(f"expected 0 < confidence < 1, got confidence={confidence}")
