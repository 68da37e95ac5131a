"""Finds defenses and attacks: in files of the packages `defenses` and `attacks`, entry points, or `module:Class`.

A file is named after its defense or attack (`membership_loss.py` is `membership-loss`) and holds one public class. No
other module imports the two packages.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import importlib.metadata
import inspect
import json
import multiprocessing
import pkgutil
import warnings
from collections.abc import Callable, Collection
from typing import Any, Literal, TypeVar

from pydantic import TypeAdapter, ValidationError

from leakgauge.harness.core.cell import PartSpec, Scalar
from leakgauge.harness.core.code import FUNCTION, loaded
from leakgauge.harness.core.contract import Attack, Defense
from leakgauge.harness.core.errors import UnknownNameError, suggestion, unknown
from leakgauge.harness.core.result import PartInfo
from leakgauge.harness.core.sinks import line
from leakgauge.harness.core.stored import PARAMETERS

Kind = Literal["defense", "attack"]
P = TypeVar("P")

PERSONAL = "personal"
"""The parameter of any defense that gives each client a value of its own, as `epsilon = 4, 8`."""

_LEAST = 1e-12
"""Smallest magnitude of a defense's parameter other than 0, and 1 / the largest: formulas square and divide."""

_PACKAGE = {"defense": "defenses", "attack": "attacks"}
_adapter: Callable[[Any], TypeAdapter[Any]] = functools.cache(TypeAdapter)  # built once for each type
_BASE: dict[str, type] = {"defense": Defense, "attack": Attack}


@functools.cache
def classes(kind: Kind) -> dict[str, type]:
    """All classes of this kind by name, in alphabetical order; a broken entry point is left out, with a warning.

    Raises:
        ImportError: a file of the package does not hold exactly one class of this kind.
    """
    known = {name: _of_file(kind, name) for name in _files(kind)}
    for entry in importlib.metadata.entry_points(group=f"leakgauge.{_PACKAGE[kind]}"):
        try:
            if entry.name in known:
                raise UnknownNameError(f"two {_PACKAGE[kind]} are named {entry.name!r}")
            known[entry.name] = _loaded(kind, entry.name, entry.load)
        except UnknownNameError as error:
            if multiprocessing.parent_process() is None:  # warn once, not in each worker
                text = f"plug-in {entry.name} = {entry.value} is left out: {error}"
                warnings.warn(line(text), stacklevel=2)
    return dict(sorted(known.items()))


@functools.cache
def _files(kind: Kind) -> tuple[str, ...]:
    package = importlib.import_module(f"leakgauge.{_PACKAGE[kind]}")
    names = (info.name for info in pkgutil.iter_modules(package.__path__))
    return tuple(name.replace("_", "-") for name in names if not name.startswith("_"))


def _of_file(kind: Kind, name: str) -> type:
    module = importlib.import_module(f"leakgauge.{_PACKAGE[kind]}.{name.replace('-', '_')}")
    public = [value for key, value in vars(module).items() if inspect.isclass(value) and not key.startswith("_")]
    own = [value for value in public if value.__module__ == module.__name__ and issubclass(value, _BASE[kind])]
    if len(own) != 1:
        raise ImportError(f"expected one public {kind} class in {module.__name__}, got {len(own)}")
    return own[0]


def _loaded(kind: Kind, name: str, load: Callable[[], Any]) -> type:
    """The class that `load` imports from a foreign module, which may raise any exception."""
    value = loaded(kind, name, load)
    if not (inspect.isclass(value) and issubclass(value, _BASE[kind])):
        hint = f"; a function of an update is named {function_hint(name)}" if inspect.isroutine(value) else ""
        raise UnknownNameError(f"expected a subclass of {_BASE[kind].__name__} for {name!r}, got {value!r}{hint}")
    return value


def function_hint(name: str) -> str:
    """The name `function:module.name` of what is named `module:name`."""
    return FUNCTION + name.replace(":", ".")


def lookup(kind: Kind, name: str) -> type:
    """The class named `name`, which may be `module:Class`, or `function:module.name` for a function of an update.

    Raises:
        UnknownNameError: there is no such class.
    """
    if name in _files(kind):
        return _of_file(kind, name)  # skips importing the others, which takes half a second
    if kind == "defense" and name.startswith(FUNCTION):
        function = loaded(kind, name, lambda: pkgutil.resolve_name(name.removeprefix(FUNCTION)))
        made: type = importlib.import_module("leakgauge.defenses._common.function").of(name, function)
        return made
    known = classes(kind)
    if name in known:
        return known[name]
    if ":" not in name:
        raise unknown(kind, name, known)
    module, _, attribute = name.partition(":")
    return _loaded(kind, name, lambda: getattr(importlib.import_module(module), attribute))


class ParameterError(ValueError):
    """Parameters that a defense or an attack does not accept; `problems` holds (key, given and expected value)."""

    def __init__(self, name: str, problems: list[tuple[str, str]]) -> None:
        super().__init__("; ".join(f"{name}.{key}: {text}" if key else f"{name}: {text}" for key, text in problems))
        self.problems = problems


def build(kind: Kind, name: str, parameters: dict[str, Scalar]) -> Any:
    """The defense or attack named `name` with these parameters, checked strictly.

    Raises:
        UnknownNameError: there is no such name.
        ParameterError: unknown keys, wrong types or values out of range; all problems are reported together.
    """
    if kind == "defense" and parameters.get(PERSONAL) is not None:
        return _personal(name, parameters)
    if kind == "defense" and "+" in name:
        return _cascade(name, parameters)
    problems, text = [], f"expected 0 or a magnitude from {_LEAST:g} to {1 / _LEAST:g}"
    for key, value in parameters.items() if kind == "defense" else ():
        if isinstance(value, int | float) and value and not _LEAST <= abs(value) <= 1 / _LEAST:
            problems.append((key, f"{text}, got {f'{value:g}' if isinstance(value, float) else 'a huge integer'}"))
    if problems:
        raise ParameterError(name, problems)
    return construct(lookup(kind, name), {key: value for key, value in parameters.items() if value is not None}, name)


def _personal(name: str, parameters: dict[str, Scalar]) -> Any:
    """The defense with the parameters of each group of clients that `personal` states."""
    module = importlib.import_module("leakgauge.defenses._common.personal")
    shared = {key: value for key, value in parameters.items() if key != PERSONAL and value is not None}
    try:
        groups = module.read(str(parameters[PERSONAL]))
        if both := shared.keys() & groups[0].keys():
            raise ValueError(f"{', '.join(sorted(both))} of each client is stated: leave it out elsewhere")
        each = tuple(build("defense", name, shared | group) for group in groups)
        return module.Personal(tuple(name.split("+")), tuple(groups[0]), each)
    except ParameterError:
        raise
    except ValueError as error:
        raise ParameterError(name, [(PERSONAL, str(error).removeprefix("personal: "))]) from error


def _cascade(name: str, parameters: dict[str, Scalar]) -> Any:
    """The cascade `first+second`; a parameter that both defenses have is written `defense.parameter`."""
    names = _parts(name)
    fields = [{field.name for field in dataclasses.fields(lookup("defense", part))} for part in names]
    tables: list[dict[str, Scalar]] = [{}, {}]
    problems = []
    for key, value in parameters.items():
        part, _, inner = key.rpartition(".")
        owners = [i for i in (0, 1) if inner in fields[i] and part in ("", names[i])]
        if len(owners) == 1:
            tables[owners[0]][inner] = value
        elif owners:
            problems.append((key, f"both have it; write {names[0]}.{key} or {names[1]}.{key}"))
        else:
            known = [f"{part}.{inner}" for part, inners in zip(names, fields, strict=True) for inner in sorted(inners)]
            problems.append((key, f"unknown key, got {value!r}{suggestion(key, known)}"))
    built = []
    for part, table in zip(names, tables, strict=True):
        try:
            built.append(build("defense", part, table))
        except ParameterError as error:
            problems += error.problems
    if problems:
        raise ParameterError(name, problems)
    try:
        return importlib.import_module("leakgauge.defenses._common.cascade").Cascade(names, *built)
    except ValueError as error:
        raise ParameterError(name, [("", str(error))]) from error


def _parts(name: str) -> tuple[str, str]:
    first, *rest = name.split("+")
    if len(rest) != 1:
        raise UnknownNameError(f"expected two defenses joined by one '+', got {name!r}")
    return first, rest[0]


def construct(kind: type[P], table: dict[str, Any], name: str = "") -> P:
    """A dataclass from a table, checked strictly: text is not accepted as a number, and unknown keys are refused.

    Raises:
        ParameterError: the table does not fit; all problems are reported together, under `name`.
    """
    # through JSON, because strict mode then accepts a table for a dataclass and an integer for a float
    try:
        value: P = _adapter(kind).validate_json(json.dumps(table, default=str), strict=True)
    except ValidationError as error:
        known = [field.name for field in dataclasses.fields(kind)] if dataclasses.is_dataclass(kind) else []
        raise ParameterError(name, [explain(item, known) for item in error.errors()]) from error
    return value


def explain(item: Any, known: Collection[str] = ()) -> tuple[str, str]:
    """One of pydantic's errors as (path, text); the text states the given and the expected value, or the known keys."""
    path = ".".join(str(part) for part in item["loc"])
    came = item["input"]
    if item["type"] in ("unexpected_keyword_argument", "extra_forbidden"):
        value = "" if isinstance(came, list | dict) else f", got {came!r}"
        return path, f"unknown key{value}{suggestion(path.split('.')[-1], known)}"
    if item["type"] in ("missing", "missing_argument"):
        return path, "missing"
    if item["type"] == "value_error":
        return path, item["msg"].removeprefix("Value error, ")
    expected = item["msg"].replace("Input should be ", "").replace("List should have", "a list of")
    for word, plainer in (("a valid array", "a list"), ("a valid integer", "an integer"), ("a valid ", "a ")):
        expected = expected.replace(word, plainer)
    return path, f"got {came!r}, expected {expected[0].lower()}{expected[1:]}"


def build_defense(spec: PartSpec) -> Defense[Any, Any]:
    """The defense that a specification names."""
    built: Defense[Any, Any] = build("defense", spec.name, PARAMETERS.get(spec.name, {}) | spec.parameters)
    return built


def build_attack(spec: PartSpec) -> Attack:
    """The attack that a specification names."""
    built: Attack = build("attack", spec.name, PARAMETERS.get(spec.name, {}) | spec.parameters)
    return built


def defaults(kind: Kind, name: str) -> dict[str, Scalar]:
    """The parameters of a defense or an attack with their default values."""
    parameters: dict[str, Scalar] = build(kind, name, {}).parameters()
    return parameters


def summary(kind: Kind, name: str) -> str:
    """The first line of a defense's or an attack's docstring."""
    if kind == "defense" and "+" in name:
        return ", then ".join(summary(kind, part).rstrip(".") for part in _parts(name)) + "."
    return (inspect.getdoc(lookup(kind, name)) or "").split("\n")[0]


def describe(spec: PartSpec) -> PartInfo:
    """The kind and the summary of an attack with these parameters."""
    attack = build_attack(spec)
    return PartInfo(spec.name, summary("attack", spec.name), attack.kind, attack.aware, attack.floor)


def formula(name: str) -> Callable[..., Any]:
    """The formula `module.function` of a defense's module, or `messages.function` of `federation.small`.

    It is a pure function in the module's table `FORMULAS`.

    Raises:
        LookupError: there is no such formula.
    """
    module, _, function = name.rpartition(".")
    try:
        home = "harness.federation.small" if module == "messages" else f"defenses.{module}"
        known: dict[str, Callable[..., Any]] = importlib.import_module(f"leakgauge.{home}").FORMULAS
    except (ImportError, AttributeError, ValueError) as error:
        raise LookupError(f"no formulas of a defense {module!r}") from error
    if function not in known:
        raise unknown("formula", name, [f"{module}.{function}" for function in known])
    return known[function]
