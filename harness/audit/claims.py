"""Records of claims: what a defense claims, what is proved, and delta at the claimed epsilon."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from typing import Any

import numpy as np
from scipy import optimize, special

from leakgauge.harness.audit.bounds import check_confidence, checked_scores
from leakgauge.harness.core import accounting
from leakgauge.harness.core.accounting import Event, Leak
from leakgauge.harness.core.answer import Answer, DefenseRecord, DeltaRecord
from leakgauge.harness.core.cell import Scalar
from leakgauge.harness.core.checks import scalars, shown
from leakgauge.harness.core.claim import Arithmetic, Claim, ClientGroup, Horizon, Proof, Verdict, judge
from leakgauge.harness.core.contract import Defense, Setting, claim_of
from leakgauge.harness.core.errors import StudyError
from leakgauge.harness.core.gaussian import check_nonnegative
from leakgauge.harness.core.result import ClaimRecord, GroupRecord, ProofRecord
from leakgauge.harness.core.stats import Numbers
from leakgauge.harness.core.stored import finite
from leakgauge.harness.core.threats import Threat
from leakgauge.harness.core.vec import Layout
from leakgauge.harness.federation import registry
from leakgauge.harness.federation.registry import ParameterError
from leakgauge.harness.federation.small import Federation

MOST = 200
"""Default rounds of a claim for a whole run, unless the defense has fewer: UDP's T."""

_LARGEST = 1e9  # numbers of the setting must be below this
_MOST_ROUNDS = 1_000_000

_TYPES: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(("name", "threat", "device", "by"), (str,)),
    **dict.fromkeys(("rounds", "trials", "seed"), (int,)),
    **dict.fromkeys(("delta", "budget", "confidence"), (int, float)),
}
"""Types of the arguments of claims and audits."""

DEFAULTS: dict[str, Any] = dict(
    dim=25_818, clients=30, participants=30, samples=1666, steps=15, batch=1, lr=0.01, momentum=0.0, sends="update"
)
"""The setting of a claim without a study: CEPAM's experiment on MNIST with its MLP."""

_FALSE_ALARM = 1e-6  # probability that correct log-likelihood ratios of both inputs are taken for inconsistent
_ROUNDING = 1e-5  # relative difference of privacy losses that float32 likelihoods may not resolve


def claim(
    name: str, parameters: dict[str, Scalar], setting: dict[str, Scalar], rounds: int | None, delta: float | None
) -> Answer:
    """The claim of a defense and what is proved.

    Args:
        setting: differences from `DEFAULTS`.
        rounds: T; by default 1 for a defense that promises one round, else its own number of rounds, at most 200.
        delta: the delta of the proved epsilon; by default the claim's.

    Raises:
        UnknownNameError: no such defense.
        StudyError: invalid parameters, setting, rounds or delta; all problems of one kind are reported together.
    """
    parameters, setting = checked(parameters, setting, name=name, **given(rounds=rounds, delta=delta))
    deployment = prepare(name, parameters, setting, rounds, delta, DEFAULTS)
    try:
        record = record_claim(claim_of(deployment.defense, deployment.history, deployment.setting), delta)
    except ValueError as error:
        raise StudyError(name, [str(error)]) from error
    except (ArithmeticError, RuntimeError) as error:
        text = f"the claim cannot be computed in floating point ({error}); expected less extreme parameters"
        raise StudyError(name, [text]) from error
    return defense_record(name, deployment, record).answer()


def checked(parameters: object, setting: object, **others: object) -> tuple[dict[str, Scalar], dict[str, Scalar]]:
    """Parameters and setting as tables.

    Raises:
        StudyError: they are no tables of scalars, or another argument has not the type in `_TYPES`.
    """
    problems = list[str]()
    for name, value in others.items():
        if isinstance(value, bool) or not isinstance(value, _TYPES[name]):
            kind = {str: "a text", int: "a whole number", float: "a number"}[_TYPES[name][-1]]
            problems.append(f"{name}: got {shown(value)}, expected {kind}")
    try:
        tables = scalars("parameters", parameters), scalars("setting", setting)
    except ValueError as error:
        problems.append(str(error))
    if problems:
        raise StudyError("claim", problems)
    return tables


def given(**options: Any) -> dict[str, Any]:
    """The options that are not None."""
    return {name: value for name, value in options.items() if value is not None}


def record_claim(claim: Claim, delta: float | None = None) -> ClaimRecord:
    """The claim, what is proved, and the verdict, with computed epsilons.

    Args:
        delta: the delta of the proved epsilons; by default the claim's. The verdict always uses the claim's.
    """
    at = claim.delta if delta is None else delta
    groups = tuple(_record_group(group, delta) for group in claim.groups)
    verdict, _, _, reason = judge(claim)
    for group in sorted(groups, key=lambda group: group.verdict == Verdict.BROKEN.value):
        if group.verdict in (Verdict.BROKEN.value, Verdict.UNPROVED.value):
            verdict, reason = Verdict(group.verdict), f"{group.label}: {group.reason}"
    return ClaimRecord(
        epsilon=finite(claim.epsilon),
        against=_names(claim.against),
        proved=_record_proof(claim.proved, at, claim.against),
        further=tuple(_record_proof(proof, at, claim.against) for proof in claim.further),
        verdict=verdict.value,
        reason=reason,
        attained=None if claim.attained is None else _record_proof(claim.attained, claim.delta, claim.against),
        **{name: getattr(claim, name).value for name in ("unit", "relation", "horizon", "arithmetic")},
        **{name: getattr(claim, name) for name in ("delta", "source", "assumes")},
        groups=groups,
    )


def _record_group(group: ClientGroup, delta: float | None) -> GroupRecord:
    """The claim of some clients."""
    own = record_claim(group.claim, delta)
    return GroupRecord(group.label, group.clients, own.epsilon, own.delta, own.proved, own.verdict, own.reason)


def claim_to_data(claim: Claim) -> dict[str, Any]:
    """The claim as plain data that determine the result of `record_claim`."""
    proofs = [proof for proof in (claim.proved, *claim.further, claim.attained) if proof is not None]
    groups = [[label, clients, claim_to_data(own)] for label, clients, own in claim.groups]
    return {
        **({"groups": groups} if groups else {}),
        **({} if claim.arithmetic is Arithmetic.REALS else {"arithmetic": claim.arithmetic.value}),
        "numbers": [repr(claim.epsilon), repr(claim.delta)],
        "words": [claim.unit.value, claim.relation.value, claim.horizon.value, claim.source],
        "against": _names(claim.against),
        "assumes": claim.assumes,
        "proofs": [
            [repr(p.event), p.unit.value, p.method, p.reason, p.tight, *_names(p.against)]
            + ([] if p.relation is None else [p.relation.value])
            for p in proofs
        ],
    }


def exact_delta(claim: Claim, threat: Threat) -> DeltaRecord | None:
    """The delta of the claimed epsilon, if the proof is attained and its curve is exact, not a bound.

    None if nothing is claimed against this adversary, if the proof does not cover it or is not tight, or if the proof's
    curve is a bound: for `Pure` the curve of the worst mechanism, for mixed compositions a numerical bound (see
    `harness.core.accounting`).
    """
    proof = claim.proved
    covered = threat in claim.against and threat in (proof.against or claim.against)
    if not (covered and proof.tight and _is_exact(proof.event)):
        return None
    delta = float(accounting.delta(proof.event, claim.epsilon))
    return DeltaRecord(claim.epsilon, delta, delta, delta, "exact", 0)


def ratios_delta(
    zeros: Numbers, ones: Numbers, epsilon: float, confidence: float, most: float = math.inf
) -> DeltaRecord | None:
    """delta(epsilon) of a pair, the larger of both directions, from its log-likelihood ratios: `sampled_delta`.

    The result relies on the defense's own likelihood, which is made for attacks and may smooth walls or steps of the
    true distribution. None if the ratios are inconsistent: for any two distributions, the means of 1 / (1 + e^L) over
    input 1 and of 1 / (1 + e^-L) over input 0 are equal, and no ratio exceeds its proved maximum.

    Args:
        zeros, ones: [n] each, log p1 / p0 of samples from input 0, and from input 1.
        most: the proved maximum of the ratios.

    Guarantees:
        The interval covers delta with probability at least `confidence`, if the ratios are those of the true
        distributions.
    """
    n, sides = min(len(zeros), len(ones)), (ones, -zeros)
    gap = abs(float(np.mean(special.expit(-ones))) - float(np.mean(special.expit(zeros))))
    if gap > math.sqrt(math.log(2 / _FALSE_ALARM) / n) or max(map(np.max, sides)) > most * (1 + _ROUNDING):
        return None
    at, level = epsilon * (1 + _ROUNDING), 1 - (1 - confidence) / 2
    both = [sampled_delta(side, at, level) for side in sides]
    value, low, high = (max(ends) for ends in zip(*both, strict=True))
    return DeltaRecord(epsilon, value, low, high, "sampling", n)


def sampled_delta(losses: Numbers, epsilon: float, level: float = 0.95) -> tuple[float, float, float]:
    """delta(epsilon) = E_P[(1 - e^(epsilon - L))_+] from samples of L = log p / p', and the ends of its interval.

    This is one direction; the delta of the pair is the larger of both directions. The interval is Chernoff's,
    {d : KL(mean, d) <= log(2 / (1 - level)) / n}, which is valid for every n because the terms lie in [0, 1].

    Args:
        losses: [n] privacy losses of samples from P; they may be infinite.

    Raises:
        ValueError: no samples, a loss that is not a number, epsilon negative, level outside (0, 1).

    Source: Balle, Wang 2018 (arXiv 1805.06530), Thm 5; interval: Hoeffding 1963, Thm 1, eq. (2.1).
    """
    losses = checked_scores(losses)
    check_nonnegative(epsilon=epsilon)
    check_confidence(level)
    mean = float(np.mean(-np.expm1(np.minimum(epsilon - losses, 0.0))))
    width = math.log(2 / (1 - level)) / len(losses)

    def excess(d: float) -> float:
        return float(special.kl_div(mean, d) + special.kl_div(1 - mean, 1 - d)) - width

    # the divergence exceeds the width at `floor` and `ceiling`, because t log t >= t - 1
    floor = mean * math.exp(-1 - width / mean) if mean > 0 else 0.0
    ceiling = 1 - (1 - mean) * math.exp(-1 - width / (1 - mean)) if mean < 1 else 1.0
    low = optimize.brentq(excess, floor, mean, xtol=1e-300) if floor > 0 else 0.0
    high = optimize.brentq(excess, mean, ceiling, xtol=1e-300) if ceiling < 1 else 1.0
    return mean, float(low), float(high)


def prepare(
    name: str,
    parameters: dict[str, Scalar],
    setting: dict[str, Scalar],
    rounds: int | None,
    delta: float | None,
    defaults: dict[str, Any],
    most: int = MOST,
) -> Federation:
    """The defense, its setting and its state in each round.

    Args:
        setting, rounds, delta: as in `claim`.
        defaults: values of the setting that `setting` does not state; `participants` None: all clients.
        most: rounds of a claim for a whole run, if `rounds` is None and the defense does not have fewer.

    Raises:
        UnknownNameError, StudyError: as `claim`.
    """
    try:
        defense: Defense[Any, Any] = registry.build("defense", name, parameters)
    except ParameterError as error:
        raise StudyError(name, [f"{key}: {text}" if key else text for key, text in error.problems]) from error
    if rounds is None:
        own = min(defense.parameters().get("rounds") or most, most)
        rounds = 1 if defense.promises is Horizon.ONE_ROUND else own
    problems = [] if rounds >= 1 else [f"rounds: got {rounds}, expected at least 1"]
    if rounds > _MOST_ROUNDS:
        problems.append(f"rounds: got {rounds:,}, expected at most {_MOST_ROUNDS:,}")
    if delta is not None and not 0 <= delta < 1:
        problems.append(f"delta: got {delta}, expected 0 <= delta < 1")
    public = _setting(setting, rounds, problems, defaults)
    if problems:
        raise StudyError("claim", problems)
    try:
        return Federation.of(defense, public)
    except ValueError as error:
        raise StudyError(name, [str(error)]) from error


def assignments(texts: Iterable[str], option: str) -> dict[str, Scalar]:
    """`key=value` texts as a table; a value that is a JSON number, true or false is parsed, any other stays a text.

    Raises:
        StudyError: a text without an equals sign, or a key twice.
    """
    table: dict[str, Scalar] = {}
    problems = []
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals or not key:
            problems.append(f"{option}: got {text!r}, expected key=value")
        elif key in table:
            problems.append(f"{option}: got {key!r} twice")
        table[key] = _value(value)
    if problems:
        raise StudyError("claim", problems)
    return table


def defense_record(name: str, deployment: Federation, claim: ClaimRecord) -> DefenseRecord:
    """The record of a deployment with its claim."""
    setting = {key: getattr(deployment.setting, key) for key in (*DEFAULTS, "rounds")}
    return DefenseRecord(name, deployment.defense.parameters(), setting, claim)


def _record_proof(proof: Proof, delta: float, against: Iterable[Threat]) -> ProofRecord:
    """A proof with its epsilon at `delta`, for the adversaries `against` unless the proof names its own."""
    return ProofRecord(
        epsilon=finite(proof.epsilon(delta)),
        delta=delta,
        unit=proof.unit.value,
        against=_names(proof.against or against),
        relation="" if proof.relation is None else proof.relation.value,
        **{name: getattr(proof, name) for name in ("method", "reason", "tight")},
    )


def _names(threats: Iterable[Threat]) -> tuple[str, ...]:
    return tuple(sorted(threat.value for threat in threats))


def _value(text: str) -> Scalar:
    """A number, true or false, or the text itself."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):  # not JSON, thousands of digits, or thousands of brackets
        return text
    return value if isinstance(value, bool | int | float) else text


def _is_exact(event: Event | None) -> bool:
    """Whether `accounting.delta` is exact for this distribution, not a bound."""
    if isinstance(event, Leak) or accounting.is_gaussian(event):
        return True
    import dp_accounting as dp

    while isinstance(event, dp.SelfComposedDpEvent) and event.count == 1:
        event = event.event
    return isinstance(event, dp.LaplaceDpEvent | dp.RandomizedResponseDpEvent)


def _setting(given: dict[str, Scalar], rounds: int, problems: list[str], defaults: dict[str, Any]) -> Setting:
    """The public setting; its problems are appended to `problems`."""
    table = dict(defaults)
    for key, value in given.items():
        whole = key not in ("lr", "momentum", "sends")
        least = 0 if key in ("batch", "momentum") else 1 if whole else 1e-12
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if key not in table:
            problems.append(f"setting.{key}: unknown key, known: {', '.join(table)}")
        elif key == "sends" and value not in ("update", "gradient"):
            problems.append(f"setting.sends: got {value!r}, expected 'update' or 'gradient'")
        elif key == "momentum" and not (is_number and 0 <= value < 1):  # type: ignore[operator]  # a number
            problems.append(f"setting.momentum: got {value!r}, expected 0 <= momentum < 1")
        elif key != "sends" and not (is_number and least <= value < _LARGEST and (not whole or value == int(value))):  # type: ignore[operator,arg-type]  # a number
            kind = "a whole number" if whole else "a number"
            problems.append(f"setting.{key}: got {value!r}, expected {kind} from {least:g} to below {_LARGEST:g}")
        else:
            table[key] = int(value) if whole else value  # type: ignore[arg-type]  # a number
    if "participants" not in given or table["participants"] is None:
        table["participants"] = min(table["participants"] or table["clients"], table["clients"])
    if table["participants"] > table["clients"]:
        problems.append(f"setting.participants: got {table['participants']}, expected at most {table['clients']}")
    dim = table.pop("dim")
    return Setting(layout=Layout(("all",), ((dim,),)), rounds=rounds, **table)
