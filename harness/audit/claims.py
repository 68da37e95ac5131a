"""What a defense claims and what holds, of its epsilon and of its delta, asked without a study."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
from scipy import special

from leakgauge.harness.audit.bounds import sampled_delta
from leakgauge.harness.audit.claim_record import record_claim
from leakgauge.harness.core import accounting
from leakgauge.harness.core.accounting import Event, Leak
from leakgauge.harness.core.cell import Scalar
from leakgauge.harness.core.claim import Claim, Horizon
from leakgauge.harness.core.contract import Defense, Feedback, Setting
from leakgauge.harness.core.errors import StudyError
from leakgauge.harness.core.result import ClaimRecord, ProofRecord
from leakgauge.harness.core.stats import Numbers
from leakgauge.harness.core.threats import Threat
from leakgauge.harness.core.vec import Layout
from leakgauge.harness.federation import registry
from leakgauge.harness.federation.registry import ParameterError

_ROUNDS = 200
"""Of a claim for a whole run, where nobody says how long it is: UDP's T."""

USUAL = {
    "dim": 25_818,
    "clients": 30,
    "participants": 30,
    "samples": 1666,
    "steps": 15,
    "batch": 1,
    "lr": 0.01,
    "sends": "update",
}
"""Of a claim that no study is behind: CEPAM's experiment on MNIST with its MLP."""


_SAME = 1e-6
"""How often the two halves of a true likelihood ratio may seem not to fit together."""

_ROUNDING = 1e-5
"""Relative: privacy losses that likelihoods in float32 cannot tell apart."""


class Asked(NamedTuple):
    """A defense in a federation, and the public state of each round."""

    defense: Defense[Any, Any]
    setting: Setting
    history: list[Any]


def ask(
    name: str, parameters: dict[str, Scalar], setting: dict[str, Scalar], rounds: int | None, delta: float | None
) -> dict[str, Any]:
    """The claim of a defense and what holds, as plain data; an infinite epsilon is the text "inf".

    Args:
        setting: what differs from `USUAL`.
        rounds: T; by default 1 for a defense that promises one round, else its own number of rounds, or 200.
        delta: at which to say what holds; by default the claim's.

    Raises:
        UnknownNameError: no such defense.
        StudyError: parameters, setting, rounds or delta that make no sense: all problems of one kind at once.
    """
    defense, public, history = prepare(name, parameters, setting, rounds, delta, USUAL)
    try:
        record = record_claim(defense.claim(history, public), delta)
    except ValueError as error:
        raise StudyError(name, [str(error)]) from error
    return described(name, defense, public) | plain(record)


class Delta(NamedTuple):
    """delta at the claimed epsilon: `exact`, of the pair that attains the proof, or by `sampling`, of the tried pair.

    low and high are the ends of its interval, n the samples of each input; equal to it, and 0, where it is exact.
    """

    delta: float
    low: float
    high: float
    method: str
    n: int


def exact_delta(claim: Claim, threat: Threat) -> Delta | None:
    """The delta of the claimed epsilon where a proof that is attained tells the law itself, not a bound of it.

    None where nothing is claimed against this adversary, the proof is not of him or not tight, or its curve is a bound:
    of `Pure` that of the worst mechanism, of mixed compositions a numerical one (see `harness.core.accounting`).
    """
    proof = claim.proved
    of_him = threat in claim.against and threat in (proof.against or claim.against)
    if not (of_him and proof.tight and _is_curve(proof.event)):
        return None
    delta = float(accounting.delta(proof.event, claim.epsilon))
    return Delta(delta, delta, delta, "exact", 0)


def ratios_delta(
    zeros: Numbers, ones: Numbers, epsilon: float, confidence: float, most: float = math.inf
) -> Delta | None:
    """delta(epsilon) of a pair, the larger of both directions, from its log-likelihood ratios: `bounds.sampled_delta`.

    It believes the law that the ratios are of. A defense's likelihood is made for attacks, and some are smoothed where
    the law has walls or steps. None where the ratios are seen not to be those of two laws: the means of 1 / (1 + e^L)
    over input 1 and of 1 / (1 + e^-L) over input 0 are one number for two laws, or one is above what is proved.

    Args:
        zeros, ones: [n] each, log p1 / p0 of samples from input 0, and from input 1.
        most: what is proved of the ratios.

    Guarantees:
        The interval covers with probability `confidence` or more, if the ratios are those of the laws.
    """
    n, sides = min(len(zeros), len(ones)), (ones, -zeros)
    apart = abs(float(np.mean(special.expit(-ones))) - float(np.mean(special.expit(zeros))))
    if apart > math.sqrt(math.log(2 / _SAME) / n) or max(map(np.max, sides)) > most * (1 + _ROUNDING):
        return None
    each = 1 - (1 - confidence) / 2
    at = epsilon * (1 + _ROUNDING)
    both = [sampled_delta(side, at, level=each) for side in sides]
    value, low, high = (max(ends) for ends in list(zip(*both, strict=True))[:3])
    return Delta(value, low, high, "sampling", n)


def described(name: str, defense: Defense[Any, Any], setting: Setting) -> dict[str, Any]:
    """What was asked about."""
    return {
        "defense": name,
        "parameters": defense.parameters(),
        "setting": {key: getattr(setting, key) for key in (*USUAL, "rounds")},
    }


def prepare(
    name: str,
    parameters: dict[str, Scalar],
    setting: dict[str, Scalar],
    rounds: int | None,
    delta: float | None,
    usual: dict[str, Any],
) -> Asked:
    """The defense, its setting and the states of its rounds.

    Args:
        setting, rounds, delta: as of `ask`.
        usual: the setting where nobody says; `participants` None: all clients.

    Raises:
        UnknownNameError, StudyError: as `ask`.
    """
    try:
        defense: Defense[Any, Any] = registry.build("defense", name, parameters)
    except ParameterError as error:
        raise StudyError(name, [f"{key}: {text}" if key else text for key, text in error.problems]) from error
    if rounds is None:
        own = defense.parameters().get("rounds")
        rounds = 1 if defense.promises is Horizon.ONE_ROUND else own or _ROUNDS
    problems = [] if rounds >= 1 else [f"rounds: got {rounds}, expected at least 1"]
    if delta is not None and not 0 <= delta < 1:
        problems.append(f"delta: got {delta}, expected 0 <= delta < 1")
    public = _setting(setting, rounds, problems, usual)
    if problems:
        raise StudyError("claim", problems)
    try:
        return Asked(defense, public, _history(defense, public))
    except ValueError as error:
        raise StudyError(name, [str(error)]) from error


def assignments(texts: Iterable[str], option: str) -> dict[str, Scalar]:
    """`key=value` texts as a table; a value is read as JSON where it is JSON, else it is the text itself.

    Raises:
        StudyError: a text without an equals sign, or a key twice.
    """
    found: dict[str, Scalar] = {}
    problems = []
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals or not key:
            problems.append(f"{option}: got {text!r}, expected key=value")
        elif key in found:
            problems.append(f"{option}: got {key!r} twice")
        found[key] = _value(value)
    if problems:
        raise StudyError("claim", problems)
    return found


def _value(text: str) -> Scalar:
    """A number, true or false, or the text itself."""
    try:
        value = json.loads(text)
    except json.JSONDecodeError:
        return text
    return value if isinstance(value, bool | int | float) else text


def _is_curve(event: Event | None) -> bool:
    """Whether `accounting.delta` tells this very law."""
    if isinstance(event, Leak) or accounting.is_gaussian(event):
        return True
    import dp_accounting as dp

    while isinstance(event, dp.SelfComposedDpEvent) and event.count == 1:
        event = event.event
    return isinstance(event, dp.LaplaceDpEvent | dp.RandomizedResponseDpEvent)


def _setting(given: dict[str, Scalar], rounds: int, problems: list[str], usual: dict[str, Any]) -> Setting:
    """The public setting, with what is wrong added to the problems."""
    table = dict(usual)
    for key, value in given.items():
        if key not in table:
            problems.append(f"setting.{key}: unknown key, known: {', '.join(table)}")
        elif key == "sends" and value not in ("update", "gradient"):
            problems.append(f"setting.sends: got {value!r}, expected 'update' or 'gradient'")
        elif key != "sends" and (isinstance(value, bool | str) or value is None or not value > (0, -1)[key == "batch"]):
            problems.append(f"setting.{key}: got {value!r}, expected a number above zero")
        else:
            table[key] = value if key in ("lr", "sends") else int(value)  # type: ignore[arg-type]  # checked above
    if "participants" not in given or table["participants"] is None:
        table["participants"] = min(table["participants"] or table["clients"], table["clients"])
    if table["participants"] > table["clients"]:
        problems.append(f"setting.participants: got {table['participants']}, expected at most {table['clients']}")
    dim = table.pop("dim")
    return Setting(layout=Layout(("all",), ((dim,),)), rounds=rounds, **table)


def _history(defense: Defense[Any, Any], setting: Setting) -> list[Any]:
    """The states of the rounds, while no loss is ever told."""
    state, history = defense.init(setting), []
    for number in range(setting.rounds):
        if defense.stops(state):
            break
        history.append(state)
        state = defense.advance(state, Feedback(number, None, None))
    return history


def plain(record: ClaimRecord) -> dict[str, Any]:
    """The record by the names that the command line prints."""
    return {
        "claimed": {
            "epsilon": epsilon_in_json(record.epsilon),
            "delta": record.delta,
            "unit": record.unit,
            "adjacency": record.relation,
            "horizon": record.horizon,
            "against": list(record.against),
            "source": record.source,
            "assumes": list(record.assumes),
        },
        "proved": _proof(record.proved),
        "further": [_proof(proof) for proof in record.further],
        "verdict": record.verdict,
        "reason": record.reason,
    }


def _proof(proof: ProofRecord) -> dict[str, Any]:
    """A proof with its epsilon as a number or "inf"."""
    return {**dataclasses.asdict(proof), "epsilon": epsilon_in_json(proof.epsilon), "against": list(proof.against)}


def epsilon_in_json(value: float | None) -> float | str:
    """JSON has no infinity, which is None in records."""
    return "inf" if value is None or math.isinf(value) else value
