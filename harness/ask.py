"""What a defence claims and what holds, asked without a study."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable
from typing import Any

from harness import registry
from harness.cell import Scalar
from harness.claim import Horizon
from harness.claim_record import record_claim
from harness.contract import Defense, Feedback, Setting
from harness.errors import StudyError
from harness.registry import ParameterError
from harness.result import ClaimRecord, ProofRecord
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
    public = _setting(setting, rounds, problems)
    if problems:
        raise StudyError("claim", problems)
    try:
        record = record_claim(defense.claim(_history(defense, public), public), delta)
    except ValueError as error:
        raise StudyError(name, [str(error)]) from error
    return {
        "defense": name,
        "parameters": defense.parameters(),
        "setting": {key: getattr(public, key) for key in (*_SETTING, "rounds")},
        **_plain(record),
    }


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


def _setting(given: dict[str, Scalar], rounds: int, problems: list[str]) -> Setting:
    """The public setting, with what is wrong added to the problems."""
    table: dict[str, Any] = dict(_SETTING)
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
