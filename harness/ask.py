"""What a defence claims and what holds, asked without a study."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable
from typing import Any, NamedTuple

from harness import registry
from harness.cell import Scalar
from harness.claim import Horizon
from harness.claim_record import record_claim
from harness.contract import Defense, Feedback, Setting
from harness.errors import StudyError
from harness.registry import ParameterError
from harness.result import ClaimRecord, ProofRecord
from harness.rng import Key
from harness.threats import Threat
from harness.vec import Layout

_ROUNDS = 200
"""Of a claim for a whole run, where nobody says how long it is: UDP's T."""

_SETTING = {
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


_SMALL = {**_SETTING, "dim": 36, "clients": 3, "participants": 3, "samples": 20, "steps": 1, "batch": 0, "lr": 0.1}
"""Of an audit: what is small is quick, and a bound for a small model is one for the mechanism."""


class Asked(NamedTuple):
    """A defence in a federation, and the public state of each round."""

    defense: Defense[Any, Any]
    setting: Setting
    history: list[Any]


def ask(
    name: str, parameters: dict[str, Scalar], setting: dict[str, Scalar], rounds: int | None, delta: float | None
) -> dict[str, Any]:
    """The claim of a defence and what holds, as plain data; an infinite epsilon is the text "inf".

    Args:
        setting: what differs from `_SETTING`.
        rounds: T; by default 1 for a defence that promises one round, else its own number of rounds, or 200.
        delta: at which to say what holds; by default the claim's.

    Raises:
        UnknownNameError: no such defence.
        StudyError: parameters, setting, rounds or delta that make no sense: all problems of one kind at once.
    """
    defense, public, history = _prepare(name, parameters, setting, rounds, delta, _SETTING)
    try:
        record = record_claim(defense.claim(history, public), delta)
    except ValueError as error:
        raise StudyError(name, [str(error)]) from error
    return _described(name, defense, public) | _plain(record)


def ask_audit(
    name: str,
    parameters: dict[str, Scalar],
    setting: dict[str, Scalar],
    rounds: int | None,
    *,
    trials: int,
    confidence: float,
    threat: str | None,
    seed: int,
) -> dict[str, Any]:
    """What `ask` tells, with an audit under it: the key `audited`, and the verdict of both.

    Args:
        setting: what differs from `_SMALL`.
        threat: who looks; by default the adversary of the claim who sees most.

    Raises:
        UnknownNameError, StudyError: as `ask`.
    """
    from harness.audit import audit, verdict, watcher
    from harness.trials import Mechanism

    problems = [] if trials >= 1 else [f"trials: got {trials}, expected at least 1"]
    if not 0 < confidence < 1:
        problems.append(f"confidence: got {confidence}, expected 0 < confidence < 1")
    known = [one.value for one in Threat]
    if threat is not None and threat not in known:
        problems.append(f"threat: got {threat!r}, known: {', '.join(known)}")
    if problems:
        raise StudyError("audit", problems)
    defense, public, history = prepare_audit(name, parameters, setting, rounds)
    try:
        claim = defense.claim(history, public)
        looks = watcher(claim) if threat is None else Threat(threat)
        mechanism = Mechanism(defense, public, tuple(history), looks)
        found = audit(mechanism, claim, trials, confidence, Key(seed, ("audit",)))
    except ValueError as error:
        raise StudyError(name, [str(error)]) from error
    judged, reason = verdict(claim, found)
    plain = _plain(record_claim(claim))
    plain["audited"] = {
        "epsilon_lower": _epsilon(found.epsilon_lower),
        "delta": found.delta,
        "unit": claim.unit.value,
        "confidence": found.confidence,
        "trials": found.trials,
        "distinguisher": found.distinguisher,
        "pair": found.pair,
        "threat": found.threat.value,
        "method": found.method,
        "any_mechanism": _epsilon(found.any_mechanism),
        "true_positives": found.counts.true_positives,
        "false_positives": found.counts.false_positives,
    }
    return _described(name, defense, public) | plain | {"verdict": judged.value, "reason": reason}


def prepare_audit(name: str, parameters: dict[str, Scalar], setting: dict[str, Scalar], rounds: int | None) -> Asked:
    """The defence in the small federation that it is audited in.

    Raises:
        UnknownNameError, StudyError: as `ask`.
    """
    return _prepare(name, parameters, setting, rounds, None, _SMALL)


def _described(name: str, defense: Defense[Any, Any], setting: Setting) -> dict[str, Any]:
    """What was asked about."""
    return {
        "defense": name,
        "parameters": defense.parameters(),
        "setting": {key: getattr(setting, key) for key in (*_SETTING, "rounds")},
    }


def _prepare(
    name: str,
    parameters: dict[str, Scalar],
    setting: dict[str, Scalar],
    rounds: int | None,
    delta: float | None,
    usual: dict[str, Any],
) -> Asked:
    """The defence, its setting and the states of its rounds; all problems of one kind at once."""
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
    if table["participants"] > table["clients"] and "participants" not in given:
        table["participants"] = table["clients"]
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


def _plain(record: ClaimRecord) -> dict[str, Any]:
    """The record by the names that the command line prints."""
    return {
        "claimed": {
            "epsilon": _epsilon(record.epsilon),
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
    return {**dataclasses.asdict(proof), "epsilon": _epsilon(proof.epsilon), "against": list(proof.against)}


def _epsilon(value: float | None) -> float | str:
    """JSON has no infinity."""
    return "inf" if value is None else value
