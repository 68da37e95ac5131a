"""Examination of a user's defense, attack or task, check by check: `leakgauge doctor`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from leakgauge.harness.core.cell import Scalar
from leakgauge.harness.core.errors import StudyError
from leakgauge.harness.own import attempts, noise, quick, tasks, wire
from leakgauge.harness.own.findings import Finding, examined
from leakgauge.harness.own.parts import named
from leakgauge.harness.own.quick import Effort

USUAL = Effort()

_Checks = tuple[tuple[str, Callable[[Any], str]], ...]

_DEFENSE: _Checks = (
    ("class", lambda patient: wire.check_class(patient.part, patient.defense)),
    ("parameters", lambda patient: wire.check_parameters(patient.part, patient.defense)),
    ("encode", wire.check_encode),
    ("update", wire.check_update),
    ("keys", wire.check_keys),
    ("private", wire.check_private),
    ("memory", wire.check_memory),
    ("messages", wire.check_damaged),
    ("estimate", noise.check_estimate),
    ("clip", noise.check_clip),
    ("noise", noise.check_noise),
    ("likelihood", noise.check_likelihood),
    ("claim", quick.check_claim),
    ("law", quick.check_law),
    ("audit", quick.check_audit),
    ("training", lambda patient: quick.check_training(patient.study, patient.part)),
    ("attacks", lambda patient: quick.check_attacks(patient.study, patient.part)),
)

_ATTACK: _Checks = (
    ("class", lambda trial: wire.check_class(trial.part, trial.attack)),
    ("parameters", lambda trial: wire.check_parameters(trial.part, trial.attack)),
    ("needs", attempts.check_needs),
    ("truth", attempts.check_truth),
    ("keys", attempts.check_keys),
    ("guesses", attempts.check_guesses),
    ("threats", attempts.check_threats),
    ("diverges", attempts.check_diverges),
    ("floor", attempts.check_floor),
)


def examine(what: str, parameters: dict[str, Scalar], effort: Effort = USUAL) -> Iterator[Finding]:
    """The findings about a part, one per check, each as soon as it is made.

    Args:
        what: `FILE.py` with one public defense or attack, or with the functions of a task; `module:Class`; or the name
            of a shipped or installed part. Its module is imported.
        parameters: parameters that differ from the defaults.
        effort: how much work the checks do.

    Raises:
        UnknownNameError: there is no such part, or its module cannot be imported.
        StudyError: the part cannot be built with these parameters.
    """
    part = named(what, parameters)
    if part.kind == "task":
        if parameters:
            raise StudyError(part.name, [f"--set: got {', '.join(parameters)}, but a task has no parameters"])
        yield from tasks.examine(part, effort)
        return
    patient = quick.Trial(part, effort) if part.kind == "defense" else attempts.Trial(part, effort)
    made = patient.defense if isinstance(patient, quick.Trial) else patient.attack
    assert made is not None  # the part is built before the first line, so that bad parameters are refused
    yield from examined(_DEFENSE if part.kind == "defense" else _ATTACK, patient, part.folder)
