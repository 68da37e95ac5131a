"""Audits of one mechanism: a measured lower bound of epsilon, beside a claim of differential privacy.

Pilot trials choose the pair of inputs, the distinguisher, its threshold, and whether only this threshold counts or all.
Fresh trials are then counted, so the bound holds whatever the pilot chose. What scores show is the business of
`harness.audit.bounds`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from leakgauge.harness.audit import bounds
from leakgauge.harness.audit.bounds import Bound, Counts, Rates, SampledSteps
from leakgauge.harness.audit.distinguishers import Distinguisher, distinguishers
from leakgauge.harness.audit.neighbors import Inputs, pairs, varied
from leakgauge.harness.audit.trials import Mechanism, Part, Trace
from leakgauge.harness.core import accounting
from leakgauge.harness.core.claim import Claim, Code, Relation, Unit, Verdict, judge
from leakgauge.harness.core.contract import Defense, OnTensors
from leakgauge.harness.core.result import AssumedBound, FitRecord, KeyRecord, RangeRecord, StatedRecord
from leakgauge.harness.core.rng import Key
from leakgauge.harness.core.stats import STRICT, Numbers
from leakgauge.harness.core.threats import SEES, Threat

_PILOT_SHARE = 1 / 3  # pilot trials per input and pair, as a share of the counted trials
_PILOT_LEAST, _PILOT_MOST = 20, 200  # the smallest and the largest number of trials per input that screen a pair
_FINALISTS = 4  # tests that are judged again if many trials are counted: the best test of a small pilot may be lucky
_FAR_APART = 12.0  # distance of both inputs' mean scores, in spreads, beyond which a test cannot become much better
_SHOWN = 3  # the most departures from a distribution that a sentence names
_MISSED = 0.01  # the probability that no tested message is of a kind whose rate an audit states
_SLACK = 1e-3  # the relative difference of a proof and what pairs of inputs show from which on an audit states it

_PLAYED = frozenset({"messages", "shared", "sums"})
"""What differs between views of a trial, whose other clients send zeros: all servers see the same."""


class Inspection(NamedTuple):
    """What an audit says about the code behind a claim.

    Attributes:
        code: the verdict.
        contradictions: why the code is not the mechanism of the proof; empty unless the verdict is CONTRADICTED.
        reason: one sentence.
    """

    code: Code
    contradictions: tuple[str, ...]
    reason: str


class HypothesisTest(NamedTuple):
    """The test of input 1 against input 0 that the pilot chose; the last three are for `bounds.bound_from_trials`."""

    inputs: Inputs
    distinguisher: Distinguisher
    threshold: float
    rates: Rates | None = None
    sampled: SampledSteps | None = None

    def bound(
        self, zeros: Numbers, ones: Numbers, claim: Claim, threat: Threat, confidence: float
    ) -> tuple[Bound, Counts]:
        """The bound from the scores of trials, by the method that fits mechanism and test, and its counts."""
        gaussian, linear = is_gaussian(claim, threat), self.inputs.zero.dim() == 1 and self.distinguisher.linear
        chosen = self.threshold, self.rates, claim.delta, confidence
        return bounds.bound_from_trials(zeros, ones, *chosen, gaussian=gaussian, linear=linear, sampled=self.sampled)

    def result(self, bound: Bound, claim: Claim, threat: Threat, counts: Counts, confidence: float) -> AuditResult:
        """The audit in which the test had these counts."""
        trials, name = min(counts.positives, counts.negatives), self.distinguisher.name
        what = "trials per input" + ("" if "models" in SEES[threat] else " that show the final model only")
        return AuditResult(*bound, claim.delta, confidence, trials, name, self.inputs.name, threat, counts, what)


class Judged(NamedTuple):
    """A test with its bound in a pilot; the separation ranks tests with equal bounds, all 0 or all at the maximum.

    zeros, ones: the scores of the pilot trials that judged it.
    """

    bound: float
    separation: float
    test: HypothesisTest
    zeros: Numbers
    ones: Numbers


@dataclass(frozen=True)
class AuditResult:
    """The result of an audit.

    Attributes:
        epsilon_lower: with this confidence, the mechanism's epsilon at `delta` is at least this.
        method: `Clopper-Pearson` at the pilot's threshold, or `all thresholds` at once; if the mechanism is known to be
            Gaussian, `Gaussian scores`, or `Gaussian trade-off` if the scores are not Gaussian; for sums of Gaussian
            steps on sampled records, `sampled Gaussian scores`; for guesses in one run `one run`, or `one run, Gaussian
            trade-off`.
        any_mechanism: the bound without the assumption that the mechanism is Gaussian.
        strict: the bound at confidence `STRICT` or `confidence`, whichever is higher. Only this bound decides verdicts.
        ceiling: the largest `strict` that this many trials could have shown, without any wrong guess; infinite for
            Gaussian scores.
        trials: the number of counted trials with each of the two inputs; in one run, of canary clients.
        distinguisher: see `harness.audit.distinguishers`; `guesses` in one run.
        pair: the name of the two neighbors.
        threat: the adversary.
        counts: outcomes of the trials at the bound's threshold; in one run, true positives are right guesses and false
            positives wrong guesses.
        trials_label: what `trials` counts, for people.
        repeated: how many first messages of trials are those of another trial with the same input.
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
    repeated: int = 0


def is_gaussian(claim: Claim, threat: Threat) -> bool:
    """Whether a bound may assume that this adversary's view is Gaussian: the proof states it, and delta > 0.

    The proof must be attained, because a function of a Gaussian message may have a trade-off curve above the Gaussian
    one.
    """
    known = threat in (claim.proved.against or claim.against)
    return known and claim.delta > 0 and claim.proved.tight and accounting.is_gaussian(claim.proved.event)


def adversaries(claim: Claim) -> tuple[Threat, ...]:
    """The adversaries to play: those that see no less than another of the claim, one for each view of a trial.

    A server if the claim names none. With its keys, a server also knows the sum of messages. An eavesdropper is first.
    """
    named = [threat for threat in Threat if threat in claim.against] or [Threat.SERVER]
    sums = {threat: {"sums"} if {"messages", "shared"} <= SEES[threat] else set() for threat in reversed(named)}
    sees = {threat: SEES[threat] | more for threat, more in sums.items()}
    most = [threat for threat in sees if not any(sees[threat] < other for other in sees.values())]
    return tuple({sees[threat] & _PLAYED: threat for threat in most}.values())


def most_telling(mechanisms: Sequence[Mechanism], claim: Claim, trials: int, confidence: float, key: Key) -> Mechanism:
    """The mechanism that shows most in the pilot of an audit with this key; fresh trials then need no correction."""
    if len(mechanisms) == 1:
        return mechanisms[0]
    return max(mechanisms, key=lambda mechanism: screen(mechanism, claim, trials, confidence, key)[0][:2])


def choose_test(
    mechanism: Mechanism, claim: Claim, trials: int, confidence: float, key: Key, screened: Sequence[Judged] = ()
) -> HypothesisTest:
    """The best test in a pilot: all tests are screened, and the best few are judged again on a third of `trials`.

    Args:
        trials: the number of trials with each of the two inputs that `apply_test` counts.
        screened: the result of `screen`, if it is known.

    Raises:
        ValueError: fewer than one trial, or confidence outside (0, 1).
    """
    tests = screened or screen(mechanism, claim, trials, confidence, key)
    more = math.ceil(_PILOT_SHARE * trials)
    if tests[0].separation >= _FAR_APART:
        return tests[0].test
    finalists = list(tests[:1])
    if more > _PILOT_MOST:
        finalists, ran = [], dict[tuple[int, str | None], tuple[Trace, Trace]]()
        for number, (_, _, (inputs, distinguisher, *_), *_) in enumerate(tests[:_FINALISTS]):
            # the tests of one pair judge the same trials
            place = id(inputs), distinguisher.reads
            if place not in ran:
                ran[place] = mechanism.run_both(inputs, more, key.child("finalist", number), only=distinguisher.reads)
            finalists.append(_judged(mechanism, claim, inputs, distinguisher, confidence, ran[place]))
    best = max(finalists, key=lambda test: test[:2])
    if is_gaussian(claim, mechanism.threat):
        return best.test
    asked = trials, claim.delta, confidence, key.child("thresholds")
    return best.test._replace(rates=bounds.likely_rates(best.zeros, best.ones, best.test.threshold, *asked))


def screen(mechanism: Mechanism, claim: Claim, trials: int, confidence: float, key: Key) -> list[Judged]:
    """All tests, best first. Each pair gets a third of `trials`, 20 to 200, and as many more to fit distinguishers.

    Raises:
        ValueError: as `choose_test`.
    """
    if trials < 1:
        raise ValueError(f"expected trials >= 1, got trials={trials}")
    pilot = min(_PILOT_MOST, max(_PILOT_LEAST, math.ceil(_PILOT_SHARE * trials)))
    key, tests = key.child("pilot"), list[Judged]()
    asked = (mechanism.defense, mechanism.federation.setting, claim.unit, claim.relation, key.child("pairs"))
    for number, inputs in enumerate([*pairs(*asked), *varied(*asked)]):
        if inputs.reverses and "models" not in SEES[mechanism.threat]:
            continue  # nothing is left of it in the final model
        traces = mechanism.run_both(inputs, 2 * pilot, key.child(number))
        fitting, judging = ([trace.select(half) for trace in traces] for half in (slice(pilot), slice(pilot, None)))
        for distinguisher in distinguishers(mechanism, inputs, *fitting):
            tests.append(_judged(mechanism, claim, inputs, distinguisher, confidence, judging))
    return sorted(tests, key=lambda test: test[:2], reverse=True)


def _judged(
    mechanism: Mechanism, claim: Claim, inputs: Inputs, scorer: Distinguisher, confidence: float, both: Sequence[Trace]
) -> Judged:
    """A distinguisher with its best threshold on pilot trials; of Gaussian scores, half-way between the means."""
    (zeros, ones), gaussian = map(scorer.scores, both), is_gaussian(claim, mechanism.threat)
    threshold = bounds.pilot_threshold(zeros, ones, claim.delta, confidence, gaussian=gaussian)
    test = HypothesisTest(inputs, scorer, threshold, sampled=_sampled(mechanism, claim, inputs, scorer))
    bound, _ = test.bound(zeros, ones, claim, mechanism.threat, confidence)
    return Judged(bound.epsilon_lower, min(bounds.separation(zeros, ones), _FAR_APART), test, zeros, ones)


def _sampled(mechanism: Mechanism, claim: Claim, inputs: Inputs, distinguisher: Distinguisher) -> SampledSteps | None:
    """The Gaussian steps on sampled records that scores are sums of; None: scores have another distribution."""
    setting, known = mechanism.federation.setting, mechanism.threat in (claim.proved.against or claim.against)
    trains = claim.unit is Unit.RECORD and mechanism.defense.local.poisson and inputs.draw is not None
    sums = distinguisher.name == "projection" and claim.relation is Relation.ADD_REMOVE and setting.momentum == 0
    steps = accounting.sampled_gaussian(claim.proved.event) if known and trains and sums and claim.delta > 0 else None
    return SampledSteps(*steps, apart=setting.steps == 1 and mechanism.sees_messages) if steps else None


def apply_test(
    mechanism: Mechanism,
    claim: Claim,
    test: HypothesisTest,
    trials: int,
    confidence: float,
    key: Key,
    *,
    ratios: bool = False,
) -> tuple[AuditResult, tuple[Trace, Trace]]:
    """The audit with a test of `choose_test` with this key, and its fresh trials; with `ratios`, also their ratios.

    Guarantees:
        The bound is above the true epsilon, for the claim's unit at its delta, with probability at most 1 - confidence.
        If the claim's proof is a composition of Gaussians against this adversary, the bound assumes that the mechanism
        is Gaussian; `any_mechanism` does not.
    """
    reads: Part | None = test.distinguisher.reads
    if ratios:
        reads = None if reads == "estimates" else "ratios"
    traces = mechanism.run_both(test.inputs, trials, key.child("counted"), only=reads)
    zeros, ones = (test.distinguisher.scores(trace) for trace in traces)
    bound, counts = test.bound(zeros, ones, claim, mechanism.threat, confidence)
    repeated = sum(len(trace.wires) - len(set(trace.wires)) for trace in traces)
    return replace(test.result(bound, claim, mechanism.threat, counts, confidence), repeated=repeated), traces


def verdict(claim: Claim, audit: AuditResult, stated: StatedRecord | None = None) -> tuple[Verdict, str]:
    """The verdict on an audited claim, and its reason; `docs/claims.md` has the table of verdicts."""
    judged = judge(claim)
    measured = f"The audited lower bound is {audit.epsilon_lower:.4g}, with {audit.trials} {audit.trials_label}"
    if audit.threat not in claim.against:
        reason = f"nothing is claimed against {audit.threat.value}." if claim.against else judged.reason
        return Verdict.NOTHING_PROMISED, f"{reason} {measured}."
    if audit.strict > claim.epsilon:
        return Verdict.BROKEN, f"{judged.reason} {measured}."
    if stated is None or stated.supports or judged.verdict not in (Verdict.HOLDS, Verdict.LOOSE):
        return judged.verdict, f"{judged.reason} {measured}."
    return Verdict.AUTHORS_WORD, f"{judged.reason} {measured}. The proof is its author's word: {stated.lacks}."


def inspect(
    claim: Claim,
    audit: AuditResult,
    fit: FitRecord | None,
    assuming: Sequence[AssumedBound] = (),
    defense: Defense[Any, Any] | None = None,
    keys: KeyRecord | None = None,
    stated: StatedRecord | None = None,
) -> Inspection:
    """Whether the code is the mechanism of its proof, as far as key check, trials and goodness-of-fit test show.

    `docs/claims.md` has the table of verdicts. Without a stated distribution of what the adversary sees, trials with
    two inputs cannot show that the code is right.
    """
    faults, at = [], f"at confidence {STRICT:g}, is above what is proved"
    if contradicts(claim, audit):
        faults.append(f"the audited bound, {audit.strict:.4g} {at}")
    for bound in assuming:
        if bound.strict > bound.proved * (1 + 1e-9):
            faults.append(f"the bound that assumes {bound.assumes}, {bound.strict:.4g} per {bound.unit} {at}")
    if stated is not None and stated.error and "one run" not in audit.method:
        right, false, positives, negatives = audit.counts
        if bounds.too_few_errors(audit.counts, stated.error):
            least = f"under the stated distribution every test errs in {stated.error:.3g} of them on average"
            faults.append(f"the test errs in {positives - right + false} of {positives + negatives} trials; {least}")
    if stated is not None and stated.distinct and audit.repeated:
        of = audit.counts.positives + audit.counts.negatives
        faults.append(f"{audit.repeated} of {of} messages of trials repeat the noise of another one")
    if fit is not None and fit.rejects:
        faults.append(f"messages depart from their distribution: {', '.join(fit.rejects[:_SHOWN])}")
    faults += (*(keys.faults if keys else ()), *(stated.faults if stated else ()))
    if faults:
        return Inspection(Code.CONTRADICTED, tuple(faults), "; ".join(faults))
    of_sums = defense is not None and type(defense).aggregate_distribution is not Defense.aggregate_distribution
    if fit is None or not (of_sums or "messages" in SEES[audit.threat]):
        other = f"{audit.threat.value} does not see messages, and no `aggregate_distribution` is stated"
        why = "no distribution of the messages is stated" if fit is None else other
        return Inspection(Code.INCONCLUSIVE, (), f"{why}, and {_reach(claim, audit)}{_by_chance(claim, audit)}")
    power = f"; {fit.detects:.1%} less noise would show" if fit.detects else ""
    power += _of_pairs(claim, stated) if stated else ""
    numbers = f"{fit.numbers} numbers of {fit.messages} messages follow their distribution{power}"
    exact = f"{fit.messages} messages are as stated, without any randomness"
    looked = _by_chance(claim, audit) + (_looked(keys, fit) if keys else "")
    looked += defense.looked_at if isinstance(defense, OnTensors) else ""
    return Inspection(Code.CONSISTENT, (), (numbers if fit.numbers else exact) + looked)


def _by_chance(claim: Claim, audit: AuditResult) -> str:
    """What a bound above the proof says as long as its strict bound is not above it."""
    if not contradicts(claim, replace(audit, strict=audit.epsilon_lower)):
        return ""
    return f"; the bound is above the proved epsilon, as in {1 - audit.confidence:.2g} of audits of right code or fewer"


def _of_pairs(claim: Claim, stated: StatedRecord) -> str:
    """What the stated distribution says of pairs of inputs, and how far below the proof that is."""
    if not stated.pairs or stated.high is None:
        return ""
    proved = claim.proved.epsilon(claim.delta)
    slack = f", the proof is {1 - stated.high / proved:.1%} above it" if stated.high < proved * (1 - _SLACK) else ""
    return f"; {stated.pairs} pairs of inputs have epsilon {stated.high:.5g} or less under it{slack}"


def _looked(keys: KeyRecord, fit: FitRecord) -> str:
    """What key check and goodness-of-fit test looked at, and how rare a fault may be that these messages hold."""

    def words(looked: KeyRecord | RangeRecord) -> str:
        sizes = {"d": looked.dims, "clients": looked.clients, "records": looked.samples, "rounds": looked.rounds}
        ends = {name: f"{low} to {high}" if low < high else str(low) for name, (low, high) in sizes.items()}
        return ", ".join(f"{name} {text}" for name, text in ends.items())

    text = f"; the key check found nothing in {keys.messages} messages ({words(keys)})"
    for looked in fit.looked:
        rate = looked.messages / -math.log(_MISSED)
        hold = f"hold a fault of 1 in {rate:.0f} with probability {1 - _MISSED:g}"
        text += f"; {looked.messages} tested messages ({words(looked)}) {hold if rate > 2 else 'show a fault of each'}"
    return text


def _reach(claim: Claim, audit: AuditResult) -> str:
    """The epsilon that these trials could have refuted, and the number of trials that could refute the claim."""
    if audit.ceiling == math.inf:
        return f"{audit.trials} {audit.trials_label} were counted"
    reach = f"{audit.trials} {audit.trials_label} refute no epsilon above {audit.ceiling:.3g}"
    enough = needed(claim, audit.threat, STRICT)
    return f"{reach}; it would take about {enough:.0e}" if enough is not None and enough > audit.trials else reach


def needed(claim: Claim, threat: Threat, confidence: float) -> int | None:
    """`bounds.trials_needed` for the proved epsilon; a Gaussian proof needs fewer if a bound may assume it."""
    proved = claim.proved.epsilon(claim.delta)
    return bounds.trials_needed(proved, claim.delta, confidence, gaussian=is_gaussian(claim, threat))


def contradicts(claim: Claim, audit: AuditResult) -> bool:
    """Whether the strict bound exceeds the epsilon proved for its unit and adversary; False if no epsilon is proved."""
    proofs = [proof for proof in claim.further if proof.unit is claim.unit and audit.threat in proof.against]
    if audit.threat in claim.against or not claim.against:
        # a tight further proof, whose pair was found by search, bounds epsilon from below; another one from above
        proofs = [proof for proof in proofs if not proof.tight] or [claim.proved]
    least = min((proof.epsilon(claim.delta) for proof in proofs), default=math.inf)
    return audit.strict > least * (1 + 1e-9)
