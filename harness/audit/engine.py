"""Audits: a measured lower bound under a claim of differential privacy.

Pilot trials choose the pair of inputs, the distinguisher and its threshold; fresh trials are counted. So the bound
holds whatever the pilot chose.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from leakgauge.harness.audit.bounds import Counts, count, epsilon_lower, gaussian_epsilon_lower, split_threshold
from leakgauge.harness.audit.distinguish import Distinguisher, distinguishers
from leakgauge.harness.audit.trials import Inputs, Mechanism, pairs
from leakgauge.harness.core import accounting
from leakgauge.harness.core.claim import Claim, Verdict, judge
from leakgauge.harness.core.rng import Key
from leakgauge.harness.core.stats import Numbers
from leakgauge.harness.core.threats import Threat

_PILOT = 1 / 3
"""Trials a side of the pilot, for each pair, as a share of those that are counted."""

_LEAST = 20
"""Pilot trials a side, at least."""

# a colluding server comes after the server: in a trial the others are silent for both
_ORDER = (Threat.SERVER, Threat.COLLUDING_SERVER, Threat.EAVESDROPPER, Threat.PARTICIPANT, Threat.PUBLIC)


class Bound(NamedTuple):
    """epsilon_lower by `method`; any_mechanism: by Clopper-Pearson, whatever the mechanism."""

    epsilon_lower: float
    method: str
    any_mechanism: float


def is_gaussian(claim: Claim, threat: Threat) -> bool:
    """Whether a bound may take what this adversary sees for Gaussian: where the proof says so of it, at delta > 0."""
    known = threat in (claim.proved.against or claim.against)
    return known and claim.delta > 0 and accounting.is_gaussian(claim.proved.event)


def bound(counts: Counts, delta: float, confidence: float, *, gaussian: bool) -> Bound:
    """What counts at one threshold bound; both bounds rest on the same two events, so that the larger one holds."""
    sure = epsilon_lower(counts, delta, confidence)
    if not gaussian:
        return Bound(sure, "Clopper-Pearson", sure)
    return Bound(max(sure, gaussian_epsilon_lower(counts, delta, confidence)), "Gaussian trade-off", sure)


class Way(NamedTuple):
    """How an audit tells input 1 from input 0: chosen by the pilot."""

    inputs: Inputs
    distinguisher: Distinguisher
    threshold: float


@dataclass(frozen=True)
class Audited:
    """What an audit found.

    Attributes:
        epsilon_lower: with this confidence, the mechanism's epsilon at `delta` is no smaller.
        method: `Clopper-Pearson`, or `Gaussian trade-off` where the mechanism is known to be Gaussian.
        any_mechanism: the bound by Clopper-Pearson, whatever the mechanism.
        trials: counted, with each of the two inputs.
        distinguisher: see `harness.audit.distinguish`.
        pair: which neighbors.
        threat: who looks.
    """

    epsilon_lower: float
    delta: float
    confidence: float
    trials: int
    distinguisher: str
    pair: str
    threat: Threat
    method: str
    any_mechanism: float
    counts: Counts


def watcher(claim: Claim) -> Threat:
    """Against whom a claim is audited: the first of `_ORDER` whom it names, a server where it names nobody."""
    against = claim.against or frozenset({Threat.SERVER})
    return next(threat for threat in _ORDER if threat in against)


def audit(mechanism: Mechanism, claim: Claim, trials: int, confidence: float, key: Key) -> Audited:
    """A lower bound of the epsilon of the claim's unit, at the claim's delta.

    Args:
        trials: counted, with each of the two inputs.

    Guarantees:
        Above the true epsilon with probability at most 1 - confidence. Where the claim's proof is a composition of
        Gaussians against this adversary, the bound takes the mechanism for one; `any_mechanism` does not.

    Raises:
        ValueError: fewer than one trial, or confidence outside (0, 1).
    """
    return counted(mechanism, claim, choose(mechanism, claim, trials, confidence, key), trials, confidence, key)


def choose(mechanism: Mechanism, claim: Claim, trials: int, confidence: float, key: Key) -> Way:
    """What a pilot of a third as many trials finds best; half of each pair's fit the distinguishers.

    Raises:
        ValueError: as `audit`.
    """
    if trials < 1:
        raise ValueError(f"expected trials >= 1, got trials={trials}")
    pilot = max(_LEAST, math.ceil(_PILOT * trials))
    return _pilot(mechanism, claim, pilot, confidence, key.child("pilot"))


def counted(mechanism: Mechanism, claim: Claim, way: Way, trials: int, confidence: float, key: Key) -> Audited:
    """The audit proper: fresh trials, counted at a threshold that is already fixed."""
    how, here = way.distinguisher, key.child("counted")
    zeros, ones = (
        how.scores(mechanism.run(way.inputs, bit, trials, here.child(bit), only=how.reads)) for bit in (0, 1)
    )
    counts = count(zeros, ones, way.threshold)
    found = bound(counts, claim.delta, confidence, gaussian=is_gaussian(claim, mechanism.threat))
    return Audited(
        epsilon_lower=found.epsilon_lower,
        delta=claim.delta,
        confidence=confidence,
        trials=trials,
        distinguisher=how.name,
        pair=way.inputs.name,
        threat=mechanism.threat,
        method=found.method,
        any_mechanism=found.any_mechanism,
        counts=counts,
    )


def verdict(claim: Claim, audited: Audited) -> tuple[Verdict, str]:
    """What becomes of a claim that was audited, and why.

    | | verdict |
    |---|---|
    | nothing is claimed, or nothing against this adversary | NOTHING PROMISED |
    | the audit is above the claim | BROKEN |
    | else | as `claim.judge` has it |

    An audit above what is proved says, but for its error rate, that the code does not draw from the law of the proof.
    """
    judged = judge(claim)
    said = f"Audited above {audited.epsilon_lower:.4g} with {audited.trials} trials an input"
    if contradicts(claim, audited):
        said += ", which is above what is proved: the code does not draw from that law, or this is the audit's error"
    if audited.threat not in claim.against:
        why = judged.reason if not claim.against else f"nothing is claimed against {audited.threat.value}."
        return Verdict.NOTHING_PROMISED, f"{why} {said}."
    found = Verdict.BROKEN if audited.epsilon_lower > claim.epsilon else judged.verdict
    return found, f"{judged.reason} {said}."


def contradicts(claim: Claim, audited: Audited) -> bool:
    """Whether the audit is above what is proved for the same unit and adversary; False where nothing is."""
    named = [proof for proof in claim.further if proof.unit is claim.unit and audited.threat in proof.against]
    if audited.threat in claim.against or not claim.against:
        # a proof that found its pair by search is attained, but may be exceeded up to one that is not attained
        named = [proof for proof in named if not proof.tight] or [claim.proved]
    least = min((proof.epsilon(claim.delta) for proof in named), default=math.inf)
    return audited.epsilon_lower > least * (1 + 1e-9)


def _pilot(mechanism: Mechanism, claim: Claim, trials: int, confidence: float, key: Key) -> Way:
    """The way that does best on trials that are not counted; half of them fit the distinguishers."""
    best: tuple[float, float, Way] | None = None
    neighbors = pairs(mechanism.defense, mechanism.setting, claim.unit, claim.relation, key.child("pairs"))
    for number, inputs in enumerate(neighbors):
        zero, one = (mechanism.run(inputs, bit, 2 * trials, key.child(number, bit)) for bit in (0, 1))
        for how in distinguishers(mechanism, inputs, zero.first(trials), one.first(trials)):
            low, high = how.scores(zero.after(trials)), how.scores(one.after(trials))
            middle = is_gaussian(claim, mechanism.threat)
            threshold = _middle(low, high) if middle else split_threshold(low, high, claim.delta, confidence)
            told = count(low, high, threshold)
            # beside the bound, how far apart the two are: tells ways apart that all bound nothing, or all they can
            found = (epsilon_lower(told, claim.delta, confidence), _separation(low, high))
            if best is None or found > best[:2]:
                best = (*found, Way(inputs, how, threshold))
    assert best is not None
    return best[2]


def _middle(low: Numbers, high: Numbers) -> float:
    """Half-way between the means; infinite scores count as the largest finite ones."""
    return (float(np.mean(_finite(low))) + float(np.mean(_finite(high)))) / 2


def _separation(low: Numbers, high: Numbers) -> float:
    """Difference of the means in units of the spread."""
    a, b = _finite(low), _finite(high)
    spread = math.sqrt((float(np.var(a)) + float(np.var(b))) / 2)
    gap = float(np.mean(b)) - float(np.mean(a))
    return gap / spread if spread > 0 else math.copysign(math.inf, gap) if gap else 0.0


def _finite(scores: Numbers) -> Numbers:
    """Infinite entries as large finite ones."""
    return np.nan_to_num(scores, posinf=1e300**0.5, neginf=-(1e300**0.5))
