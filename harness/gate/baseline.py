"""The baseline: a committed JSON file of a run's measures, with the reason why they are accepted.

A measure takes three lines (name, number, values), so a diff shows which of them moved.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from pydantic import ConfigDict, TypeAdapter, ValidationError

from leakgauge.harness.core.cell import PartSpec
from leakgauge.harness.core.files import text
from leakgauge.harness.core.metrics import GateTest, metric
from leakgauge.harness.gate.measure import Measure, Measured, measured
from leakgauge.harness.study.store import load_run, write_atomically

SCHEMA = 2

_BREAKS = ("value", "values")
"""Fields of a measure that start a new line."""

_ANEW = "make a new one with 'leakgauge baseline make'"


class BaselineError(ValueError):
    """A baseline is missing, unreadable or of another version; the message is one line and states the remedy."""


@dataclass(frozen=True)
class Baseline:
    """A run's measures, with the reason given when they were accepted.

    Attributes:
        reason: why these measures are accepted.
        gaps: keys of the measures that may lack numbers.
        acknowledged: digests of changed files of code, by path, whose change of behavior is meant.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)
    measured: Measured
    reason: str
    gaps: tuple[str, ...] = ()
    acknowledged: dict[str, str] = field(default_factory=dict)


def of(path: Path) -> Baseline:
    """The baseline in a file, or a folder of results used as one.

    Raises:
        BaselineError, StoreError: the file or the folder cannot be read.
    """
    if not path.is_dir():
        return read(path)
    return Baseline(measured(load_run(path)), f"the results in {path.name}")


def read(path: Path) -> Baseline:
    """The baseline in a file.

    Raises:
        BaselineError: the file is missing, truncated or of another version, or a field has a wrong type, is not finite,
            or appears twice.
    """
    try:
        content = text(path)
    except FileNotFoundError as error:
        raise BaselineError(f"no baseline {path}; make one with 'leakgauge baseline make'") from error
    except UnicodeDecodeError as error:
        raise BaselineError(f"baseline {path} is truncated or not JSON: {error}; restore it with git") from error
    except (OSError, ValueError) as error:
        raise BaselineError(f"cannot read baseline {path}: {error}; give a file") from error
    return parse(content, str(path))


def parse(content: str, path: str) -> Baseline:
    """The baseline in the content of the file `path`; errors as in `read`."""
    try:
        data: Any = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise BaselineError(f"baseline {path} is truncated or not JSON: {error}; restore it with git") from error
    schema = data.pop("schema", None) if isinstance(data, dict) else None
    if isinstance(data, dict):
        data.pop("fingerprints", None)  # of the code, in files of before 0.2
    if schema != SCHEMA:
        raise BaselineError(f"baseline {path}: got schema {schema!r}, expected {SCHEMA}; delete it and {_ANEW}")
    try:
        baseline: Baseline = TypeAdapter(Baseline).validate_json(json.dumps(data))
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(step) for step in first["loc"])
        raise BaselineError(f"baseline {path}: {where}: {first['msg']}; restore it with git") from error
    if problem := _problem(baseline):
        raise BaselineError(f"baseline {path}: {problem}; restore it with git")
    return baseline


def write(baseline: Baseline, path: Path) -> None:
    """Write a baseline atomically, with a stable key order, so a diff of two versions shows the changes.

    Raises:
        ValueError: a number is not finite.
        StoreError: the folder cannot be written.
    """
    write_atomically(path, to_text(baseline).encode())


def to_text(baseline: Baseline) -> str:
    """The JSON of a baseline: equal baselines give equal text."""
    head = {
        "schema": SCHEMA,
        "reason": baseline.reason,
        **({"gaps": baseline.gaps} if baseline.gaps else {}),
        **({"acknowledged": dict(sorted(baseline.acknowledged.items()))} if baseline.acknowledged else {}),
        "measured": _shallow(baseline.measured, "measures"),
    }
    text = json.dumps(head, indent=1, ensure_ascii=False, allow_nan=False).removesuffix("\n }\n}")
    lines = ",\n".join(_lines(measure) for measure in baseline.measured.measures)
    return f'{text},\n  "measures": [\n{lines}\n  ]\n }}\n}}\n'


def _problem(baseline: Baseline) -> str:
    measures = baseline.measured.measures
    if not measures:
        return "it has no measures"
    keys: set[str] = set()
    for measure in measures:
        if measure.key in keys:
            return f"{measure.key} is there twice"
        keys.add(measure.key)
        sides = sum(members + others for members, others in measure.sides)
        if metric(measure.metric).gate is None:
            return f"{measure.key} has a metric unknown to the gate: {measure.metric}"
        if metric(measure.metric).gate is GateTest.DELONG and sides != len(measure.values):
            return f"{measure.key} has {len(measure.values)} values for {sides} records"
    if unknown := set(baseline.gaps) - keys:
        return f"the gap {min(unknown)} names no measure of the baseline"
    return ""


def _lines(measure: Measure) -> str:
    defaults = {field.name: field.default for field in dataclasses.fields(measure)}
    text = ""
    for name, value in _shallow(measure).items():
        if defaults[name] is not dataclasses.MISSING and value == defaults[name]:
            continue
        between = ",\n    " if name in _BREAKS else ", "
        plain = dataclasses.asdict(value) if isinstance(value, PartSpec) else value
        text += f"{between if text else ''}{json.dumps(name)}: {_plain(plain)}"
    return f"   {{{text}}}"


def _plain(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def _shallow(value: Measure | Measured, *without: str) -> dict[str, Any]:
    """The fields in their order; mappings with sorted keys."""
    names = [field.name for field in dataclasses.fields(value) if field.name not in without]
    fields = {name: getattr(value, name) for name in names}
    return {
        name: dict(sorted(field.items())) if isinstance(field, Mapping) else field for name, field in fields.items()
    }
