"""What a defense's proofs say about the success of any attack, and what an attack's success says about the claim.

A claim or proof covers an attack on whole inputs if its unit is a record, a client or a message and it holds against
the attack's adversary. It covers victims that are encoded alone only if it does not rely on sampling, because such
victims always take part.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from torch import Tensor

from leakgauge.harness.audit.one_run import steinke_epsilon
from leakgauge.harness.core.accounting import delta, is_sampled
from leakgauge.harness.core.claim import Claim, Proof, Relation, Unit
from leakgauge.harness.core.stats import clopper_pearson
from leakgauge.harness.core.threats import Threat

_WIDEST = 10.0
_EPSILONS = 101  # the number of epsilons, from 0 to the widest, at which a proof is evaluated

LEVEL = 0.95
"""Confidence of an epsilon that an attack refutes."""


class Proved(NamedTuple):
    """The largest share of images that a proof lets any attack identify, and the proof in words."""

    share: float
    words: str


class Promised(NamedTuple):
    """The claimed and the proved epsilon that cover an attack, at the claim's delta; infinite if there is none.

    Attributes:
        relation: of the neighbors; the proofs have the claim's relation.
        unit: of the claim, or of the proof if only the proof covers the attack.
    """

    claimed: float
    proved: float
    delta: float
    relation: Relation
    unit: Unit


def proved_identification(claim: Claim, threat: Threat, among: int) -> Proved | None:
    """The bound that the claim's proofs put on guessing one of `among` equally likely inputs; None: no bound.

    A guess is right with probability at most e^epsilon / among + delta(epsilon), for every epsilon. Neighbors exchange
    the input or leave it out. The claim's assumptions must hold.

    Source: Balle, Cherubin, Hayes 2022, "Reconstructing training data with informed adversaries", thm 2, with the
        uniform prior; over all epsilons as in Hayes, Mahloujifar, Balle 2023, "Bounding training data reconstruction in
        DP-SGD", thm 2.
    """
    bounds, blind = list[Proved](), 1 / among
    for proof in _proofs(claim, threat, alone=True):
        try:
            deltas = [(e, delta(proof.event, e)) for e in np.linspace(0.0, _WIDEST, _EPSILONS)]
        except ValueError:  # no distribution is known above delta = 0
            continue
        # the bound on an event, and the bound on its complement with the two inputs exchanged
        share = min(min(math.exp(e) * blind + d, 1 - math.exp(-e) * (1 - blind - d)) for e, d in deltas)
        if share < 1:
            bounds.append(Proved(share, f"{proof.method}, one {proof.unit.value}"))
    return min(bounds, default=None)


def promised(claim: Claim, threat: Threat, *, alone: bool) -> Promised | None:
    """What the claim and its proofs promise against an attack on whole inputs; None: nothing.

    Args:
        alone: whether the victims are encoded alone, so that sampling leaves none of them out.
    """
    # proofs for other neighbors bound the naming of a record (`proved_identification`), but no test between neighbors
    proofs = [proof for proof in _proofs(claim, threat, alone=alone) if proof.relation in (None, claim.relation)]
    covers = threat in claim.against and _whole(claim.unit) and not (alone and is_sampled(claim.proved.event))
    claimed = claim.epsilon if covers else math.inf
    each = ((proof.epsilon(claim.delta), proof.unit) for proof in proofs)
    proved, unit = min(each, key=lambda pair: pair[0], default=(math.inf, claim.unit))
    if math.isinf(claimed) and math.isinf(proved):
        return None
    return Promised(claimed, proved, claim.delta, claim.relation, claim.unit if covers else unit)


def shown_by_identification(right: int, n: int, among: int, at: float) -> float:
    """The epsilon up to which `right` of `n` guesses of one input among `among` refute a claim at delta `at`.

    The share s of right guesses is at most e^epsilon / among + delta, and 1 - s is at least
    e^-epsilon (1 - 1 / among - delta). The lower end of the Clopper-Pearson interval is used for s.
    """
    low = clopper_pearson(right, n, 2 * LEVEL - 1).low or 0.0
    upward, downward = among * (low - at), (1 - 1 / among - at) / (1 - low)
    return max(0.0, *(math.log(ratio) for ratio in (upward, downward) if ratio > 0))


def shown_by_membership(scores: Tensor, is_member: Tensor, found: Promised) -> float:
    """The epsilon that scores of candidates refute, at the promised delta.

    Members and non-members, drawn alike, are paired in their random order. A fair coin decides which of a pair is the
    member; the guess is the one with the higher score. All pairs are tested, and the quarter with the greatest
    differences, each at half the error level. Neighbors differ in one pair: one record is replaced. If the claim adds
    or removes records, this is two of its steps, with (2 epsilon, (1 + e^epsilon) delta).

    Args:
        scores: [n]; is_member: [n] bool.

    Source: Steinke, Nasr, Jagielski 2023, "Privacy auditing with one (1) training run", on pairs.
    """
    inside, outside = scores[is_member].double(), scores[~is_member].double()
    pairs = min(len(inside), len(outside))
    ahead = inside[:pairs] - outside[:pairs]
    surest = ahead[ahead.abs().argsort(descending=True, stable=True)]
    twice = found.relation is Relation.ADD_REMOVE
    at = min(found.delta * (1 + math.exp(min(found.claimed, found.proved))), 0.5) if twice else found.delta
    level = (1 + LEVEL) / 2
    shown = max(
        steinke_epsilon(pairs, guesses, int((surest[:guesses] > 0).sum()), at, level)
        for guesses in (pairs, max(1, pairs // 4))
    )
    return shown / 2 if twice else shown


def _whole(unit: Unit) -> bool:
    return unit not in (Unit.COORDINATE, Unit.SUBVECTOR)


def _proofs(claim: Claim, threat: Threat, *, alone: bool) -> Sequence[Proof]:
    return [
        proof
        for proof in (claim.proved, *claim.further)
        if _whole(proof.unit) and threat in (proof.against or claim.against) and not (alone and is_sampled(proof.event))
    ]
