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
from leakgauge.harness.core.claim import Claim, Code, Verdict, judge
from leakgauge.harness.core.result import LawRecord
from leakgauge.harness.core.rng import Key
from leakgauge.harness.core.stats import Numbers
from leakgauge.harness.core.threats import Threat

STRICT = 0.999
"""Confidence of the bound that decides: one that a reader sees may err once in 20 audits, a verdict may not."""

_PILOT_SHARE = 1 / 3
"""Pilot trials per input and pair, as a share of the counted trials."""

_PILOT_LEAST = 20
"""The smallest number of pilot trials per input."""

_SHOWN = 3
"""Departures from a law that a sentence names."""

_LONGEST = 30.0
"""No number of trials is named for a larger epsilon."""

# the server precedes a colluding server: in a trial the other clients send zeros, so both see the same
_STRONGEST_FIRST = (Threat.SERVER, Threat.COLLUDING_SERVER, Threat.EAVESDROPPER, Threat.PARTICIPANT, Threat.PUBLIC)


class Bound(NamedTuple):
    """A lower bound of epsilon; the fields are those of `AuditResult`."""

    epsilon_lower: float
    method: str
    any_mechanism: float
    strict: float
    ceiling: float


class Inspection(NamedTuple):
    """What an audit says about the code behind a claim.

    Attributes:
        code: the verdict.
        contradictions: why the code is not the mechanism of the proof; not empty exactly if it is CONTRADICTED.
        reason: one sentence.
    """

    code: Code
    contradictions: tuple[str, ...]
    reason: str


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
        strict: the bound at confidence `STRICT` or `confidence`, whichever is higher. It alone decides on verdicts.
        ceiling: the largest `strict` that this many trials could have shown, with no wrong guess.
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
    strict: float
    ceiling: float
    delta: float
    confidence: float
    trials: int
    distinguisher: str
    pair: str
    threat: Threat
    counts: Counts
    trials_label: str = "trials per input"


def is_gaussian(claim: Claim, threat: Threat) -> bool:
    """Whether a bound may assume that this adversary's view is Gaussian: its proof states so, and delta > 0.

    The proof must be attained: a function of a Gaussian message only has a trade-off curve above the Gaussian one.
    """
    known = threat in (claim.proved.against or claim.against)
    return known and claim.delta > 0 and claim.proved.tight and accounting.is_gaussian(claim.proved.event)


def bound_from_counts(counts: Counts, delta: float, confidence: float, *, gaussian: bool) -> Bound:
    """The bound from counts at one threshold; both methods use the same two events, so the larger bound is valid."""
    method, strict = "Gaussian trade-off" if gaussian else "Clopper-Pearson", max(confidence, STRICT)

    def bound(seen: Counts, level: float) -> float:
        general = epsilon_lower(seen, delta, level)
        return max(general, gaussian_epsilon_lower(seen, delta, level)) if gaussian else general

    perfect = Counts(counts.positives, 0, counts.positives, counts.negatives)
    general = epsilon_lower(counts, delta, confidence)
    return Bound(bound(counts, confidence), method, general, bound(counts, strict), bound(perfect, strict))


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
    | the strict audited bound is above the claim | BROKEN |
    | else | as `claim.judge` |
    """
    judged = judge(claim)
    measured = f"The audited lower bound is {audit.epsilon_lower:.4g}, with {audit.trials} {audit.trials_label}"
    if audit.threat not in claim.against:
        reason = f"nothing is claimed against {audit.threat.value}." if claim.against else judged.reason
        return Verdict.NOTHING_PROMISED, f"{reason} {measured}."
    found = Verdict.BROKEN if audit.strict > claim.epsilon else judged.verdict
    return found, f"{judged.reason} {measured}."


def inspect(claim: Claim, audit: AuditResult, law: LawRecord | None) -> Inspection:
    """Whether the code is the mechanism of its proof, as far as the trials and the law test saw.

    | | verdict |
    |---|---|
    | the strict bound is above the proved epsilon, or messages depart from their law | CONTRADICTED |
    | messages were tested against a stated law, and nothing was found | CONSISTENT |
    | no law is stated: trials with two inputs alone cannot show that code is right | INCONCLUSIVE |
    """
    found = []
    if contradicts(claim, audit):
        found.append(f"the audited bound, {audit.strict:.4g} at confidence {STRICT:g}, is above what is proved")
    if law is not None and law.rejects:
        found.append(f"messages depart from their law: {', '.join(law.rejects[:_SHOWN])}")
    if found:
        return Inspection(Code.CONTRADICTED, tuple(found), "; ".join(found))
    if law is not None and not law.numbers:
        return Inspection(Code.CONSISTENT, (), f"{law.messages} messages are as stated, without any randomness")
    if law is not None:
        power = f"; {law.detects:.1%} less noise would show" if law.detects else ""
        return Inspection(
            Code.CONSISTENT, (), f"{law.numbers} numbers of {law.messages} messages follow their law{power}"
        )
    return Inspection(Code.INCONCLUSIVE, (), f"no law of the messages is stated, and {_reach(claim, audit)}")


def _reach(claim: Claim, audit: AuditResult) -> str:
    """What these trials could have refuted, and how many it would take to refute the claim."""
    reach = f"{audit.trials} {audit.trials_label} refute no epsilon above {audit.ceiling:.3g}"
    least = min(claim.epsilon, claim.proved.epsilon(claim.delta))
    if not audit.ceiling <= least < _LONGEST:
        return reach
    needed = audit.trials
    while epsilon_lower(Counts(needed, 0, needed, needed), claim.delta, STRICT) <= least:
        needed *= 2
    return f"{reach}; it would take about {needed:.0e} without a wrong guess"


def contradicts(claim: Claim, audit: AuditResult) -> bool:
    """Whether the strict bound exceeds the epsilon proved for its unit and adversary; False if none is proved."""
    proofs = [proof for proof in claim.further if proof.unit is claim.unit and audit.threat in proof.against]
    if audit.threat in claim.against or not claim.against:
        # a tight proof whose pair was found by search bounds epsilon from below; a proof that is not tight, from above
        proofs = [proof for proof in proofs if not proof.tight] or [claim.proved]
    least = min((proof.epsilon(claim.delta) for proof in proofs), default=math.inf)
    return audit.strict > least * (1 + 1e-9)


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
