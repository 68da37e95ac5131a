"""Audits of one defense in a small federation: by trials (`audit.engine`), or inside a run (`audit.canaries`)."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from leakgauge.harness.audit import canaries, engine
from leakgauge.harness.audit.assumed import assumed_bounds
from leakgauge.harness.audit.canaries import DIGITS_DIM, DigitsTraining
from leakgauge.harness.audit.claims import (
    DEFAULTS,
    checked,
    defense_record,
    exact_delta,
    given,
    prepare,
    ratios_delta,
    record_claim,
)
from leakgauge.harness.audit.engine import AuditResult
from leakgauge.harness.audit.goodness_of_fit import check_fit
from leakgauge.harness.audit.keys import check_keys
from leakgauge.harness.audit.stated import check_stated
from leakgauge.harness.audit.trials import Mechanism
from leakgauge.harness.core import accounting
from leakgauge.harness.core import answer as answers
from leakgauge.harness.core.answer import Answer, CosineRecord, DefenseRecord, DeltaRecord
from leakgauge.harness.core.cell import PartSpec, Scalar
from leakgauge.harness.core.claim import Claim, Horizon, Unit
from leakgauge.harness.core.contract import Defense, Setting, claim_of
from leakgauge.harness.core.device import available
from leakgauge.harness.core.errors import StudyError
from leakgauge.harness.core.result import AssumedBound, AuditRecord, ClaimRecord, FitRecord, KeyRecord, StatedRecord
from leakgauge.harness.core.rng import Key
from leakgauge.harness.core.stats import STRICT
from leakgauge.harness.core.stored import finite
from leakgauge.harness.core.threads import one_thread
from leakgauge.harness.core.threats import SEES, Threat
from leakgauge.harness.federation import registry
from leakgauge.harness.federation.small import Federation

MOST_ROUNDS = 20
"""The most rounds of a study that are audited, because each trial runs all of them."""

MOST_STEPS = 8
"""The most local steps of a study that are audited."""

CONFIDENCE = 0.95

TRIALS, _MOST_USUAL = 1000, 3000
"""Default number of trials with each input, and its maximum if a proof needs more."""

_TIMED, _USED, _RUNS_OF_PRODUCT = 100, 0.8, 24
"""For a budget: timed trials, the usable share of the time left, and the runs per counted trial at delta 0."""

_RUN = 3  # default rounds of a claim for a whole run in an audit by trials; the noise is scaled to them

_SAMPLES = 20
# small, so that audits are fast; a bound for a small model is a bound for the mechanism
_SMALL = DEFAULTS | dict(dim=36, clients=3, participants=3, samples=_SAMPLES, steps=1, batch=0, lr=0.1)

_ALL = {**_SMALL, "participants": None}  # the small federation with all clients in every round, for audits inside a run
_CANARIES_PER_GUESS = 10  # one guess per ten canaries, fixed before any run: 100 guesses for 1000 canaries


class _Kind(NamedTuple):
    """Defaults of one kind of audit: the federation, the rounds (None: the defense's), and the accepted options."""

    setting: dict[str, Any]
    rounds: int | None
    options: frozenset[str]


_KINDS = {
    "trials": _Kind(_SMALL, None, frozenset({"trials", "budget", "confidence", "threat", "device"})),
    # 10 clients x 200 rounds: 2,000 messages
    "messages": _Kind({**_ALL, "dim": DIGITS_DIM, "clients": 10}, 200, frozenset({"confidence", "threat", "device"})),
    # as many coordinates as canaries, so that no canary is noise to another
    "one-run": _Kind({**_ALL, "dim": 1000, "clients": 1000}, 10, frozenset({"confidence", "threat"})),
    # one canary per hundred coordinates
    "cosine": _Kind({**_ALL, "dim": 30_000, "clients": 300}, 10, frozenset()),
}


class Studied(NamedTuple):
    """A study's federation: its public setting, and the number of records of its largest client."""

    setting: Setting
    most_samples: int


@one_thread()
def audit(
    name: str,
    parameters: dict[str, Scalar],
    setting: dict[str, Scalar],
    rounds: int | None,
    *,
    trials: int | None = None,
    budget: float | None = None,
    confidence: float | None = None,
    threat: str | None = None,
    device: str | None = None,
    seed: int,
    by: str = "trials",
    study: Studied | None = None,
) -> Answer:
    """The result of `claims.claim`, with an audit, and the verdict on both; `core.answer` lists the fields and keys.

    Args:
        setting: differences from the small federation of this `by`.
        rounds: T; by default 1 for trials, or 3 if the defense promises a whole run; 200 for messages, 10 for canary
            clients.
        trials: the number with each of the two inputs; by default 1000, or up to 3000 if a Gaussian proof needs more.
        budget: seconds for the whole audit, instead of `trials`. The trials are whole thousands, at least 1000 and at
            most as many as needed. The result states their number, and depends on the time only through it.
        confidence: of the lower bound; by default 0.95.
        threat: the adversary; by default the strongest that the claim names; the pilot chooses among different views.
            All adversaries see decoded rounds; in trials, `public` sees only their sum.
        device: where clients train and likelihoods are computed: `cpu` (the default) or `cuda`, for trials and
            messages. Messages are encoded and decoded on the CPU, so the other kinds would compute nothing there.
        study: by trials only; `setting` and `rounds` are then those of `audited_part`. Setting, claim, proof and
            verdict of the result are the study's, and messages of its size are looked at. `audited` is of the small
            federation, whose size, claim and proof stand beside it; `small` holds the verdict on that claim.

    Raises:
        UnknownNameError: as `claims.claim`.
        StudyError: as `claims.claim`; an option that this `by` does not use; a claim that this `by` cannot audit.
    """
    options = {"trials": trials, "budget": budget, "confidence": confidence, "threat": threat, "device": device}
    parameters, setting = checked(parameters, setting, name=name, seed=seed, by=by, **given(rounds=rounds, **options))
    _check_options(setting, by, options)
    started, kind, key = time.monotonic(), _KINDS[by], Key(seed, ("audit",))
    if study is not None:
        setting, rounds = audited_part(PartSpec(name, parameters), study.setting)
    rounds, level = kind.rounds if rounds is None else rounds, CONFIDENCE if confidence is None else confidence
    deployment = prepare(name, parameters, setting, rounds, None, kind.setting, most=_RUN)
    try:
        if by == "messages":
            training = DigitsTraining.of(deployment, key.child("run"))
            deployment = replace(deployment, setting=training.setting)
        claimed_rounds = deployment.history[:1] if by == "messages" else deployment.history
        claim = claim_of(deployment.defense, claimed_rounds, deployment.setting)
        played = engine.adversaries(claim) if threat is None else (Threat(threat),)
        adversary = played[0 if by == "messages" else -1]
        _check_fit(name, deployment.defense, claim, adversary, by)
        record = defense_record(name, deployment, record_claim(claim))
        if by == "cosine":
            estimate = _by_cosine(deployment, claim, key)
            return replace(record, audit=estimate, delta_at=exact_delta(claim, adversary)).answer()
        checks = _Checks.of(deployment, key, *(study or ()))
        if by == "messages":
            measured = _by_messages(training, claim, adversary, level, key, device or "cpu")
        elif by == "one-run":
            measured = _by_one_run(deployment, claim, adversary, level, key)
        else:
            much = (trials or _usual(claim, adversary, level)) if budget is None else _Budget(budget, started)
            mechanisms = [Mechanism(deployment, each, device or "cpu") for each in played]
            measured = _by_trials(mechanisms, claim, much, checks.fit, level, key)
        audited = _audit_record(deployment, claim, record.claim, measured, checks)
        in_study = study and Federation.of(deployment.defense, study.setting)
    except ValueError as error:
        raise error if isinstance(error, StudyError) else StudyError(name, [str(error)]) from error
    delta = None if audited.contradictions else exact_delta(claim, measured.bound.threat) or measured.sampled
    record = replace(record, audit=audited, counts=measured.counts, delta_at=delta)
    return _in_study(name, in_study, record) if in_study else record.answer()


def _in_study(name: str, federation: Federation, small: DefenseRecord) -> Answer:
    """The answer for a study's federation, with the audit of a small one."""
    claim = record_claim(claim_of(federation.defense, federation.history, federation.setting))
    record = replace(defense_record(name, federation, claim), audit=small.audit, counts=small.counts)
    answer = replace(record, delta_at=small.delta_at).answer()
    judged = {"verdict": answer["verdict"], "reason": answer["reason"]}
    answer.update(verdict=claim.verdict, reason=claim.reason, small=judged)
    return answer


def audit_for_study(
    spec: PartSpec, study: Setting, trials: int, key: Key, device: str = "cpu", most_samples: int = 0
) -> AuditRecord:
    """A lower bound of a defense's epsilon, in the small federation of `leakgauge audit`.

    Args:
        study: the study's federation. The audit uses its local training: what is sent, the learning rate, the
            momentum, at most `MOST_STEPS` steps, the share of records in a batch. It covers one round if the defense
            promises one round, else at most `MOST_ROUNDS`. Key check and goodness-of-fit test also look at the study's
            own size.
        trials: the number of counted trials with each of the two inputs.
        device: where clients train and likelihoods are computed.
        most_samples: the number of records of the study's largest client.

    Guarantees:
        The same arguments give the same record.
        The claimed epsilon, the proved epsilon and the bound in the record are those of the small federation.

    Raises:
        ValueError: the small federation cannot use the defense, or its claim cannot be computed.
    """
    deployment = prepare(spec.name, spec.parameters, *audited_part(spec, study), None, _SMALL)
    claim = claim_of(deployment.defense, deployment.history, deployment.setting)
    mechanisms = [Mechanism(deployment, threat, device) for threat in engine.adversaries(claim)]
    checks = _Checks.of(deployment, key, study, most_samples)
    measured = _by_trials(mechanisms, claim, trials, checks.fit, CONFIDENCE, key, deltas=False)
    return _audit_record(deployment, claim, record_claim(claim), measured, checks)


class _Checks(NamedTuple):
    """What an audit finds beside its trials: by keys, by the fit of messages, and from the stated distribution."""

    keys: KeyRecord
    fit: FitRecord | None
    stated: StatedRecord

    @classmethod
    def of(cls, small: Federation, key: Key, study: Setting | None = None, most_samples: int = 0) -> _Checks:
        asked = small.defense, small.setting
        keys = check_keys(*asked, key.child("keys"), study, most_samples)
        fit = check_fit(*asked, key.child("law"), study, most_samples)
        return cls(keys, fit, check_stated(*asked, key.child("stated")))


def _audit_record(
    deployment: Federation, claim: Claim, recorded: ClaimRecord, measured: _Found, checks: _Checks
) -> AuditRecord:
    """The record of a bound, with the verdicts on the claim and on the code."""
    result, setting = measured.bound, deployment.setting
    judged, reason = engine.verdict(claim, result, checks.stated)
    asked = checks.fit, measured.assuming, deployment.defense, checks.keys, checks.stated
    inspected = engine.inspect(claim, result, *asked)
    return AuditRecord(
        claimed=recorded.epsilon,
        proved=recorded.proved.epsilon,
        rounds=len(deployment.history),
        threat=result.threat.value,
        ceiling=finite(result.ceiling),
        verdict=judged.value,
        reason=reason,
        code=inspected.code.value,
        contradictions=inspected.contradictions,
        seen=inspected.reason,
        assuming=measured.assuming,
        **{name: getattr(recorded, name) for name in ("unit", "relation", "horizon")},
        **{name: getattr(setting, name) for name in ("clients", "samples", "dim")},
        **{name: getattr(result, name) for name in ("epsilon_lower", "delta", "confidence", "trials", "strict")},
        **{name: getattr(result, name) for name in ("distinguisher", "pair", "method", "any_mechanism")},
        **checks._asdict(),
    )


def sizes(study: Setting, most_samples: int) -> list[Any]:
    """What an audit looks at besides `audited_part`; equal results of both mean equal audits."""
    return [study.layout.shapes, study.clients, study.participants, study.samples, most_samples, study.rounds]


def audited_part(spec: PartSpec, study: Setting) -> tuple[dict[str, Scalar], int]:
    """The local training and the rounds that the small federation takes from a study."""
    share = min(1.0, study.batch / study.samples)
    training: dict[str, Scalar] = {name: getattr(study, name) for name in ("sends", "lr", "momentum")}
    batch = max(1, round(_SAMPLES * share)) if study.batch else 0
    training |= {"steps": min(study.steps, MOST_STEPS), "batch": batch}
    one_round = registry.build_defense(spec).promises is Horizon.ONE_ROUND
    return training, 1 if one_round else min(study.turns, MOST_ROUNDS)


class _Found(NamedTuple):
    """A bound with its counts, the delta from trials, and the bounds that assume a part of the distribution."""

    bound: AuditResult
    counts: answers.TrialCounts | answers.MessageCounts | answers.CanaryCounts
    sampled: DeltaRecord | None = None
    assuming: tuple[AssumedBound, ...] = ()


def _usual(claim: Claim, adversary: Threat, confidence: float) -> int:
    """The default number of trials with each input: more if a Gaussian proof needs more."""
    if claim.unit is Unit.RECORD and accounting.sampled_gaussian(claim.proved.event):
        return _MOST_USUAL
    enough = engine.needed(claim, adversary, confidence) if engine.is_gaussian(claim, adversary) else TRIALS
    return _MOST_USUAL if enough is None else min(max(TRIALS, enough), _MOST_USUAL)


class _Budget(NamedTuple):
    """Seconds for an audit that began at `started`, by `time.monotonic`."""

    seconds: float
    started: float

    def affords(
        self, mechanism: Mechanism, test: engine.HypothesisTest, claim: Claim, enough: int | None, key: Key
    ) -> int:
        """How many trials with each input fit, in whole thousands: at least 1000, at most `enough`."""
        begun = time.monotonic()
        trace = mechanism.run(test.inputs, 1, _TIMED, key, only=test.distinguisher.reads)
        test.distinguisher.scores(trace)
        each = (time.monotonic() - begun) / _TIMED
        # a trial runs both inputs, perhaps again for their ratios; a product needs further messages
        runs = 8 if claim.delta > 0 else _RUNS_OF_PRODUCT
        left = self.seconds - (begun - self.started)
        most = math.inf if enough is None else enough
        return TRIALS * max(1, math.floor(min(most, _USED * left / (each * runs)) / TRIALS))


def _by_trials(
    mechanisms: Sequence[Mechanism],
    claim: Claim,
    trials: int | _Budget,
    fit: FitRecord | None,
    confidence: float,
    key: Key,
    *,
    deltas: bool = True,
) -> _Found:
    """An audit by `harness.audit.engine` of the mechanism that shows most, and by `harness.audit.assumed`.

    deltas: whether the likelihood ratios of the trials also give delta, if no exact one is known.
    """
    least = trials if isinstance(trials, int) else TRIALS
    mechanism = engine.most_telling(mechanisms, claim, least, confidence, key)
    adversary = mechanism.threat
    enough = engine.needed(claim, adversary, confidence)
    tests = engine.screen(mechanism, claim, least, confidence, key)
    if isinstance(trials, _Budget):
        trials = trials.affords(mechanism, tests[0].test, claim, enough, key.child("timing"))
    test = engine.choose_test(mechanism, claim, trials, confidence, key, tests)
    fixed, shown = test.inputs.draw is None, adversary in claim.against and mechanism.sees_messages
    ratios, sampled = deltas and shown and fixed and not exact_delta(claim, adversary), None
    result, traces = engine.apply_test(mechanism, claim, test, trials, confidence, key, ratios=ratios)
    if traces[0].ratios is not None and ratios:
        zeros, ones = (trace.ratios.numpy() for trace in traces if trace.ratios is not None)
        most = claim.proved.epsilon(0.0) if claim.delta == 0 else math.inf
        sampled = ratios_delta(zeros, ones, claim.epsilon, confidence, most)
    counts, assuming = answers.TrialCounts(*result.counts[:2], enough, mechanism.device), tuple[AssumedBound, ...]()
    if fit is not None and not fit.rejects:  # if messages depart from their distribution, none is assumed
        levels = confidence, max(confidence, STRICT)
        assuming = assumed_bounds(mechanism, claim, trials, levels, key.child("assumed"))
    return _Found(result, counts, sampled, assuming)


def _by_messages(
    training: DigitsTraining, claim: Claim, adversary: Threat, confidence: float, key: Key, device: str
) -> _Found:
    """An audit by `canaries.audit_messages`."""
    updates, deployment = training.run(device)
    result = canaries.audit_messages(deployment, updates, claim, adversary, confidence, key, device=device)
    right, wrong, positives, negatives = result.counts
    messages = positives + negatives
    return _Found(
        result, answers.MessageCounts(right, wrong, messages, len(updates) * updates.shape[1] - messages, device)
    )


def _by_one_run(deployment: Federation, claim: Claim, adversary: Threat, confidence: float, key: Key) -> _Found:
    """An audit by `canaries.audit_one_run`."""
    guesses = max(1, deployment.setting.clients // _CANARIES_PER_GUESS)
    result = canaries.audit_one_run(deployment, claim, adversary, guesses, confidence, key)
    return _Found(result, answers.CanaryCounts(result.trials, guesses, result.counts.true_positives))


def _by_cosine(deployment: Federation, claim: Claim, key: Key) -> CosineRecord:
    """An estimate by `canaries.estimate_by_cosine`: no bound, no verdict."""
    result = canaries.estimate_by_cosine(deployment, claim, key)
    rounds, unit = len(deployment.history), claim.unit.value
    return CosineRecord(finite(result.epsilon), result.mu, result.dim, result.canaries, rounds, claim.delta, unit)


def _check_options(setting: dict[str, Scalar], by: str, options: dict[str, Any]) -> None:
    """Refuse options and settings that this kind of audit cannot use; all problems are reported together."""
    if by not in _KINDS:
        raise StudyError("audit", [f"by: got {by!r}, known: {', '.join(_KINDS)}"])
    problems = [_option_problem(name, value, by) for name, value in options.items() if value is not None]
    if options.get("budget") is not None and options.get("trials") is not None:
        problems.append(f"budget: got {options['budget']:g} s with trials={options['trials']}, expected one of the two")
    clients = setting.get("clients", _KINDS[by].setting["clients"])
    if by != "trials" and setting.get("participants", clients) != clients:
        problems.append(f"setting.participants: got {setting['participants']}, expected all of {clients} clients")
    if by == "messages" and setting.get("dim", DIGITS_DIM) != DIGITS_DIM:
        problems.append(f"setting.dim: got {setting['dim']}, the model that is trained has {DIGITS_DIM}")
    if any(problems):
        raise StudyError("audit", [problem for problem in problems if problem])


def _option_problem(name: str, value: Any, by: str) -> str:
    """What is wrong with one option, or an empty text."""
    known = [threat.value for threat in Threat]
    if name not in _KINDS[by].options:
        return f"{name}: got {value}, which an audit by {by} does not use"
    if name == "trials" and value < 1:
        return f"trials: got {value}, expected at least 1"
    if name == "budget" and not value > 0:
        return f"budget: got {value:g} s, expected a time above zero"
    if name == "confidence" and not 0 < value < 1:
        return f"confidence: got {value}, expected 0 < confidence < 1"
    if name == "device" and not available(value):
        return f"device: got {value!r}, expected cpu, or cuda if there is one"
    if name == "threat" and value not in known:
        return f"threat: got {value!r}, known: {', '.join(known)}"
    return ""


def _check_fit(name: str, defense: Defense[Any, Any], claim: Claim, adversary: Threat, by: str) -> None:
    """Refuse a claim that this kind of audit cannot audit, and name the kinds that can."""
    why: dict[str, str] = {}
    if claim.unit not in (Unit.CLIENT, Unit.MESSAGE):
        why |= dict.fromkeys(("one-run", "cosine"), f"its unit is a {claim.unit.value}, and a canary is a client")
    elif claim.delta == 0:
        why["cosine"] = "its claim is at delta 0, where Gaussian distributions have no epsilon"
    if claim.unit is Unit.RECORD:
        why["messages"] = "its unit is a record, which acts through local training"
    elif defense.superposes:
        why["messages"] = "its channel adds all messages up"
    elif "messages" not in SEES[adversary]:
        why["messages"] = f"{adversary.value} sees no messages"
    if by in why:
        fits = " or ".join(kind for kind in _KINDS if kind not in why)
        raise StudyError(name, [f"cannot be audited by {by}: {why[by]}; expected --by {fits}"])
