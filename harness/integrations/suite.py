"""One suite of checks of a defense, an attack or a task: for `leakgauge doctor`, for our tests and for users' tests."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from types import ModuleType
from typing import Any

from leakgauge.harness.core.cell import Scalar
from leakgauge.harness.core.contract import Attack, Defense
from leakgauge.harness.core.errors import StudyError
from leakgauge.harness.integrations import attack_checks, message_checks, noise, quick
from leakgauge.harness.integrations.attack_checks import AttackUnderTest
from leakgauge.harness.integrations.findings import ConformanceError, Finding, finding
from leakgauge.harness.integrations.parts import Kind, Part, built, named, part_of
from leakgauge.harness.integrations.quick import DefenseUnderTest, Effort, TaskUnderTest

USUAL = Effort()

Check = Callable[[Any], Finding]
Subject = DefenseUnderTest | AttackUnderTest | TaskUnderTest


def _of(module: ModuleType, names: str) -> dict[str, Callable[[Any], str]]:
    """The functions `check_x` of a module for each name x."""
    return {name: getattr(module, f"check_{name}") for name in names.split()}


_CHECKS: dict[Kind, dict[str, Callable[[Any], str]]] = {
    "defense": _of(message_checks, "class parameters encode update keys private memory plaintext mean bound")
    | _of(noise, "estimate")
    | _of(message_checks, "messages")
    | _of(noise, "clip noise likelihood")
    | _of(quick, "assumptions claim distribution dependence audit training attacks"),
    "attack": _of(message_checks, "class parameters")
    | _of(attack_checks, "needs truth keys guesses threats diverges floor"),
    "task": _of(quick, "data model training attacks"),
}
_SUBJECTS: dict[Kind, Callable[[Part, Effort], Subject]] = {
    "defense": DefenseUnderTest,
    "attack": AttackUnderTest,
    "task": TaskUnderTest,
}

_last: list[tuple[Part, Effort, Subject]] = []
"""The last subject: its audit and its study serve all checks of a parametrized test."""


def check_defense(defense: Defense[Any, Any] | type[Defense[Any, Any]] | str, effort: Effort = USUAL) -> list[Finding]:
    """Examine a defense by all checks.

    Args:
        defense: an object, a class with defaults for all parameters, or a text as for `leakgauge doctor`.
        effort: how much work the checks do.

    Returns:
        A finding per check: passed, or skipped with the reason.

    Raises:
        ConformanceError: checks failed; the message has a line for each, with what to do.
        StudyError: the defense cannot be built with its defaults.
    """
    return _check_all("defense", defense, effort)


def check_attack(attack: Attack | type[Attack] | str, effort: Effort = USUAL) -> list[Finding]:
    """Examine an attack by all checks; arguments, result and errors are those of `check_defense`."""
    return _check_all("attack", attack, effort)


def check_task(task: ModuleType | str, effort: Effort = USUAL) -> list[Finding]:
    """Examine a module with `model`, `data` or both by all checks; result and errors are those of `check_defense`."""
    return _check_all("task", task, effort)


def checks_of(kind: Kind, effort: Effort = USUAL) -> list[tuple[str, Check]]:
    """The checks of a defense, an attack or a task by name, for `pytest.mark.parametrize`.

    A check takes what `check_defense` takes, returns its finding, and raises ConformanceError if it fails. Checks of
    one object that follow each other share its audit and its study.
    """
    return [(name, functools.partial(_check, kind, name, effort)) for name in _CHECKS[kind]]


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
    if part.kind == "task" and parameters:
        raise StudyError(part.name, [f"--set: got {', '.join(parameters)}, but a task has no parameters"])
    yield from _findings(part, effort, _CHECKS[part.kind])


def _findings(part: Part, effort: Effort, names: Iterable[str]) -> Iterator[Finding]:
    subject = _under_test(part, effort)
    for name in names:
        yield finding(name, _CHECKS[part.kind][name], subject, part.folder)


def _under_test(part: Part, effort: Effort) -> Subject:
    """The subject of the checks; a defense or an attack is built here first, so that bad parameters are refused."""
    if _last and _last[0][:2] == (part, effort):
        return _last[0][2]
    if part.kind != "task":
        built(part)
    subject: Subject = _SUBJECTS[part.kind](part, effort)
    _last[:] = [(part, effort, subject)]
    return subject


def _check(kind: Kind, name: str, effort: Effort, given: object) -> Finding:
    return _check_all(kind, given, effort, [name])[0]


def _check_all(kind: Kind, given: object, effort: Effort, names: Iterable[str] = ()) -> list[Finding]:
    part = named(given, {}) if isinstance(given, str) else part_of(given)
    if part.kind != kind:
        raise TypeError(f"check_{kind} got the {part.kind} {part.name}: use check_{part.kind}")
    findings = list(_findings(part, effort, names or _CHECKS[kind]))
    if failed := [result for result in findings if result.mark == "FAIL"]:
        raise ConformanceError(part.name, failed)
    return findings
