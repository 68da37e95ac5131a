"""The stored form of questions and records: names on disk, their version, and the ids that follow from them.

Only here names in code become names on disk. A field that is added later is left out at its first default by an entry
in `OMITTED`: ids, draws and stored results stay valid.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from pydantic import TypeAdapter

T = TypeVar("T")

VERSION = 2
"""Version of the stored form. 1: files that state none."""

READS = (1, 2)
"""The versions that `upgraded` reads."""

OMITTED: dict[str, object] = {
    "TaskSpec.inputs": "unit",
    "TaskSpec.loss": "",
    "FederationSpec.labels": 1,
    "FederationSpec.participation": "drawn",
    "FederationSpec.stop_after": None,
    "FederationSpec.dropout": 0.0,
    "FederationSpec.server_optimizer": "sgd",
    "FederationSpec.server_momentum": 0.0,
    "FederationSpec.server_lr": 1.0,
    "FederationSpec.optimizer": "sgd",
    "FederationSpec.weight_decay": 0.0,
    "FederationSpec.proximal": 0.0,
    "FederationSpec.sizes": (),
    "FederationSpec.interim_samples": 1000,
    "FederationSpec.evaluate_on": "test",
    "FederationSpec.validation": 0,
    "TrainingSpec.audit": 0,
    "TrainingSpec.malice": None,
    "TrainingSpec.strict": False,
    "Cell.limit": True,
    "ClaimRecord.groups": (),
    "Environment.numerics": {},
    "ClaimRecord.arithmetic": "reals",
    "Estimate.chance": None,
    "Estimate.p": None,
    "Estimate.sizes": (),
    "Target.among": 100,
    "Target.shuffled": False,
    "Target.skip": 0,
    "Target.property": "",
    "Target.share": 0.75,
    "Target.victim_classes": (),
    "Goal.relation": None,
    "ProofRecord.relation": "",
}
"""Fields added after results were stored, each with the value at which it is left out."""

_LAPLACE = ("laplace", "laplace+sdq", "laplace+sdq-lattice")

PARAMETERS: dict[str, dict[str, Any]] = {
    **{name: {"norm": "entry", "delta": None} for name in ("jopeq-sound", *_LAPLACE)},
    "model-replacement": {"forges": False},
    "rmia": {"temperature": 1.0, "variant": "online", "weight": 0.5},
    "sqsgd": {"reclip": True},
}
"""Parameters of defenses and attacks that were added after results were stored, as in `OMITTED`."""

INFINITE = {
    "ClaimRecord.epsilon",
    "GroupRecord.epsilon",
    "ProofRecord.epsilon",
    "AuditRecord.claimed",
    "AuditRecord.proved",
    "AuditRecord.ceiling",
    "CosineRecord.epsilon_estimate",
}
"""Fields whose None is infinity, which JSON numbers cannot express; files hold null, texts for readers "inf"."""

RENAMED: dict[int, dict[str, str]] = {1: {"breaches": "violations", "gauges": "state_metrics", "audited.law": "fit"}}
"""By version, the fields of records `field.field` that have another name since, each with its last name of today."""


class StoredVersionError(ValueError):
    """A file has a stored form that this version does not read; the message is one line."""


def canonical(data: Any) -> str:
    """JSON with sorted keys and no spaces, so that equal values have equal texts.

    Raises:
        ValueError: a number is NaN or infinite.
    """
    return json.dumps(data, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def fingerprint(data: Any, digits: int = 16) -> str:
    """The first `digits` hex digits of SHA-256 of the canonical JSON."""
    return hashlib.sha256(canonical(data).encode()).hexdigest()[:digits]


def finite(value: float) -> float | None:
    """The number as a record holds it: None for infinity."""
    return None if math.isinf(value) else value


def number(value: float | None) -> float:
    """The number that a record holds: infinity for None."""
    return math.inf if value is None else value


def to_data(value: Any, *, infinity: str | None = None) -> Any:
    """A question or a record as plain data for JSON.

    Args:
        infinity: the text for an infinite number, also for None in `INFINITE`, in JSON for readers; None: in files.
    """
    kind = type(value)
    if kind in _PLAIN:
        return infinity if infinity is not None and value == math.inf else value
    if dataclasses.is_dataclass(kind):
        data = {}
        for name, left_out, first, infinite in _fields(kind):
            inner = getattr(value, name)
            if left_out and inner == first:
                continue
            if infinity is None and type(inner) in _PLAIN:  # most fields: a call for each would take thrice the time
                data[name] = inner
            else:
                data[name] = infinity if infinite and inner is None else to_data(inner, infinity=infinity)
        return data
    if isinstance(value, Mapping):
        return {key: to_data(inner, infinity=infinity) for key, inner in value.items()}
    if isinstance(value, tuple | list):
        return [to_data(inner, infinity=infinity) for inner in value]
    return infinity if infinity is not None and value == math.inf else value


_PLAIN = {str, int, float, bool, type(None)}


@functools.cache
def _fields(kind: type) -> tuple[tuple[str, bool, object, bool], ...]:
    """Of each field: its name, whether it is left out at its first default, this default, and whether None is inf."""
    names = [(field.name, f"{kind.__name__}.{field.name}") for field in dataclasses.fields(kind)]
    return tuple((name, full in OMITTED, OMITTED.get(full), full in INFINITE) for name, full in names)


def from_data(kind: type[T], data: Any) -> T:
    """The value whose `to_data` is `data`.

    Raises:
        ValidationError: the data do not fit.
    """
    value: T = _adapter(kind).validate_python(data)  # type: ignore[arg-type]  # hashable
    return value


@functools.cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    """The reader of a type, cached because building one takes milliseconds and a study has thousands of cells."""
    from pydantic import TypeAdapter  # .1 s, which `leakgauge --help` does not need

    return TypeAdapter(kind)


def upgraded(data: dict[str, Any]) -> dict[str, Any]:
    """The data of a stored record in today's form.

    Raises:
        StoredVersionError: an unknown version.
    """
    version = data.get("version", 1)
    if version not in READS:
        raise StoredVersionError(
            f"has the stored form {version}, of another version of leakgauge; this one reads {READS[0]} to {READS[-1]}"
        )
    record = {key: value for key, value in data.items() if key != "version"}
    for path, name in RENAMED.get(version, {}).items():
        *above, last = path.split(".")
        place: Any = record
        for step in above:
            place = place.get(step) if isinstance(place, dict) else None
        if isinstance(place, dict) and last in place:
            place[name] = place.pop(last)
    return record
