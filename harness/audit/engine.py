"""Audits of one mechanism: a measured lower bound of epsilon, beside a claim of differential privacy.

Pilot trials choose the pair of inputs, the distinguisher and its threshold. Fresh trials are then counted, so the bound
holds whatever the pilot chose.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from leakgauge.harness.audit.bounds import Counts, count, epsilon_lower, gaussian_epsilon_lower, split_threshold
from leakgauge.harness.audit.distinguishers import Distinguisher, distinguishers
from leakgauge.harness.audit.trials import Inputs, Mechanism, pairs
from leakgauge.harness.core import accounting
from leakgauge.harness.core.claim import Claim, Verdict, judge
from leakgauge.harness.core.rng import Key
from leakgauge.harness.core.stats import Numbers
from leakgauge.harness.core.threats import Threat

_PILOT_SHARE = 1 / 3
"""Pilot trials per input and pair, as a share of the counted trials."""

_PILOT_LEAST = 20
"""The smallest number of pilot trials per input."""

# the server precedes a colluding server: in a trial the other clients send zeros, so both see the same
_STRONGEST_FIRST = (Threat.SERVER, Threat.COLLUDING_SERVER, Threat.EAVESDROPPER, Threat.PARTICIPANT, Threat.PUBLIC)


class Bound(NamedTuple):
    """A lower bound of epsilon; the fields are those of `AuditResult`."""

    epsilon_lower: float
    method: str
    any_mechanism: float


class HypothesisTest(NamedTuple):
    """The test of input 1 against input 0 that the pilot chose."""

    inputs: Inputs
    distinguisher: Distinguisher
    threshold: float


@dataclass(frozen=True)
class AuditResult:
    """The result of an audit.

    Attributes:
        epsilon_lower: with this confidence, the mechanism's epsilon at `delta` is at least this.
        method: `Clopper-Pearson`, or `Gaussian trade-off` if the mechanism is known to be Gaussian; for guesses in one
            run `one run`, or `one run, Gaussian trade-off`.
        any_mechanism: the bound without the assumption that the mechanism is Gaussian.
        trials: the number of counted trials with each of the two inputs; in one run, of canary clients.
        distinguisher: see `harness.audit.distinguishers`; `guesses` in one run.
        pair: which neighbors.
        threat: the adversary.
        counts: of the trials; in one run, true positives are right guesses and false positives are wrong guesses.
        trials_label: what `trials` counts, for people.
    """

    epsilon_lower: float
    method: str
    any_mechanism: float
    delta: float
    confidence: float
    trials: int
    distinguisher: str
    pair: str
    threat: Threat
    counts: Counts
    trials_label: str = "trials per input"


def is_gaussian(claim: Claim, threat: Threat) -> bool:
    """Whether a bound may assume that this adversary's view is Gaussian: its proof states so, and delta > 0."""
    known = threat in (claim.proved.against or claim.against)
    return known and claim.delta > 0 and accounting.is_gaussian(claim.proved.event)


def bound_from_counts(counts: Counts, delta: float, confidence: float, *, gaussian: bool) -> Bound:
    """The bound from counts at one threshold; both methods use the same two events, so the larger bound is valid."""
    general = epsilon_lower(counts, delta, confidence)
    if not gaussian:
        return Bound(general, "Clopper-Pearson", general)
    return Bound(max(general, gaussian_epsilon_lower(counts, delta, confidence)), "Gaussian trade-off", general)


def strongest_adversary(claim: Claim) -> Threat:
    """The adversary in an audit of a claim: the strongest that the claim names; a server if it names none."""
    against = claim.against or frozenset({Threat.SERVER})
    return next(threat for threat in _STRONGEST_FIRST if threat in against)


def audit_mechanism(mechanism: Mechanism, claim: Claim, trials: int, confidence: float, key: Key) -> AuditResult:
    """A lower bound of epsilon for the claim's unit, at the claim's delta.

    Args:
        trials: the number of counted trials with each of the two inputs.

    Guarantees:
        Above the true epsilon with probability at most 1 - confidence. If the claim's proof is a composition of
        Gaussians against this adversary, the bound assumes that the mechanism is Gaussian; `any_mechanism` does not.

    Raises:
        ValueError: fewer than one trial, or confidence outside (0, 1).
    """
    return apply_test(mechanism, claim, choose_test(mechanism, claim, trials, confidence, key), trials, confidence, key)


def choose_test(mechanism: Mechanism, claim: Claim, trials: int, confidence: float, key: Key) -> HypothesisTest:
    """The best test in a pilot with a third as many trials for each pair, and as many again to fit distinguishers.

    Raises:
        ValueError: as `audit_mechanism`.
    """
    if trials < 1:
        raise ValueError(f"expected trials >= 1, got trials={trials}")
    pilot, key = max(_PILOT_LEAST, math.ceil(_PILOT_SHARE * trials)), key.child("pilot")
    best: tuple[float, float, HypothesisTest] | None = None
    neighbors = pairs(mechanism.defense, mechanism.setting, claim.unit, claim.relation, key.child("pairs"))
    for number, inputs in enumerate(neighbors):
        zero, one = (mechanism.run(inputs, bit, 2 * pilot, key.child(number, bit)) for bit in (0, 1))
        fit, judging = slice(pilot), slice(pilot, None)
        for distinguisher in distinguishers(mechanism, inputs, zero.select(fit), one.select(fit)):
            low, high = distinguisher.scores(zero.select(judging)), distinguisher.scores(one.select(judging))
            gaussian = is_gaussian(claim, mechanism.threat)
            threshold = _middle(low, high) if gaussian else split_threshold(low, high, claim.delta, confidence)
            bound = epsilon_lower(count(low, high, threshold), claim.delta, confidence)
            # the separation ranks tests whose bounds are all 0, or all as large as this many trials allow
            found = (bound, _separation(low, high))
            if best is None or found > best[:2]:
                best = (*found, HypothesisTest(inputs, distinguisher, threshold))
    assert best is not None
    return best[2]


def apply_test(
    mechanism: Mechanism, claim: Claim, test: HypothesisTest, trials: int, confidence: float, key: Key
) -> AuditResult:
    """The audit with a test that is already chosen, on fresh trials."""
    inputs, distinguisher, threshold = test
    zeros, ones = (
        distinguisher.scores(mechanism.run(inputs, bit, trials, key.child("counted", bit), only=distinguisher.reads))
        for bit in (0, 1)
    )
    counts = count(zeros, ones, threshold)
    return AuditResult(
        *bound_from_counts(counts, claim.delta, confidence, gaussian=is_gaussian(claim, mechanism.threat)),
        delta=claim.delta,
        confidence=confidence,
        trials=trials,
        distinguisher=distinguisher.name,
        pair=inputs.name,
        threat=mechanism.threat,
        counts=counts,
    )


def verdict(claim: Claim, audit: AuditResult) -> tuple[Verdict, str]:
    """The verdict on an audited claim, and its reason.

    | | verdict |
    |---|---|
    | nothing is claimed, or nothing against this adversary | NOTHING PROMISED |
    | the audited bound is above the claim | BROKEN |
    | else | as `claim.judge` |

    An audited bound above the proved epsilon means, up to the audit's error rate, that the implementation does not
    match its proof.
    """
    judged = judge(claim)
    measured = f"The audited lower bound is {audit.epsilon_lower:.4g}, with {audit.trials} {audit.trials_label}"
    if contradicts(claim, audit):
        measured += "; it is above what is proved: the code does not match its proof, or the audit errs by chance"
    if audit.threat not in claim.against:
        reason = f"nothing is claimed against {audit.threat.value}." if claim.against else judged.reason
        return Verdict.NOTHING_PROMISED, f"{reason} {measured}."
    found = Verdict.BROKEN if audit.epsilon_lower > claim.epsilon else judged.verdict
    return found, f"{judged.reason} {measured}."


def contradicts(claim: Claim, audit: AuditResult) -> bool:
    """Whether the audited bound exceeds the epsilon proved for its unit and adversary; False if none is proved."""
    proofs = [proof for proof in claim.further if proof.unit is claim.unit and audit.threat in proof.against]
    if audit.threat in claim.against or not claim.against:
        # a tight proof whose pair was found by search bounds epsilon from below; a proof that is not tight, from above
        proofs = [proof for proof in proofs if not proof.tight] or [claim.proved]
    least = min((proof.epsilon(claim.delta) for proof in proofs), default=math.inf)
    return audit.epsilon_lower > least * (1 + 1e-9)


def _middle(low: Numbers, high: Numbers) -> float:
    """Half-way between the means; infinite scores count as large finite ones."""
    return (float(np.mean(_finite(low))) + float(np.mean(_finite(high)))) / 2


def _separation(low: Numbers, high: Numbers) -> float:
    """The difference of the means in units of the spread."""
    a, b = _finite(low), _finite(high)
    spread = math.sqrt((float(np.var(a)) + float(np.var(b))) / 2)
    gap = float(np.mean(b)) - float(np.mean(a))
    return gap / spread if spread > 0 else math.copysign(math.inf, gap) if gap else 0.0


def _finite(scores: Numbers) -> Numbers:
    """The scores with infinite entries as large finite ones."""
    return np.nan_to_num(scores, posinf=1e300**0.5, neginf=-(1e300**0.5))
