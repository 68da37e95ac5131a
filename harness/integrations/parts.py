"""A defense, an attack or a task that a user gives as an object, a file, `module:Class`, or the name of a plug-in."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, NamedTuple

from leakgauge.harness.core.cell import Scalar
from leakgauge.harness.core.code import FUNCTION, import_from, named_function
from leakgauge.harness.core.contract import Attack, Defense
from leakgauge.harness.core.errors import StudyError, UnknownNameError
from leakgauge.harness.federation import registry
from leakgauge.harness.integrations.findings import told

Kind = Literal["defense", "attack", "task"]


class Part(NamedTuple):
    """A user's part.

    Attributes:
        name: the name in a study: `module:Class`, or the name of a plug-in; for a task the module.
        code: the class, or the module of a task.
        folder: the folder of its code.
        parameters: parameters that differ from the defaults.
    """

    kind: Kind
    name: str
    code: Any
    folder: Path
    parameters: dict[str, Scalar]


def part_of(given: object) -> Part:
    """The part that an object is: a defense, an attack, a class of one, a function of an update, or a task's module.

    Raises:
        TypeError: it is none of these.
        ValueError: it is a function that is not at the top of a module.
    """
    if isinstance(given, ModuleType):
        return Part("task", given.__name__, given, Path(given.__file__ or ".").resolve().parent, {})
    if inspect.isroutine(given):
        return _of_function(named_function(given), {})
    code = given if inspect.isclass(given) else type(given)
    if not issubclass(code, Defense | Attack):
        raise TypeError(f"expected a defense, an attack, a class of one, or the module of a task, got {given!r:.80}")
    name = name_of(given) if isinstance(given, Defense | Attack) else _name_of(code)
    parameters = given.parameters() if isinstance(given, Defense | Attack) else {}
    return Part(_kind_of(code), name, code, Path(inspect.getfile(code)).resolve().parent, parameters)


def name_of(given: Defense[Any, Any] | Attack) -> str:
    """The name in a study of a defense or an attack."""
    names = getattr(given, "names", None)  # of a cascade
    return "+".join(names) if names and type(given).__module__.startswith("leakgauge.") else _name_of(type(given))


def _name_of(code: type) -> str:
    """The name of a shipped or installed class, `function:module.name`, or `module:Class`."""
    names = {known: name for name, known in registry.classes(_kind_of(code)).items()}
    own = code.__qualname__
    return names.get(code, own if own.startswith(FUNCTION) else f"{code.__module__}:{own}")


def _kind_of(code: type) -> Literal["defense", "attack"]:
    return "defense" if issubclass(code, Defense) else "attack"


def named(what: str, parameters: dict[str, Scalar]) -> Part:
    """The part that a text names; its module is imported.

    Raises:
        UnknownNameError: there is no such part, or its module cannot be imported; the error states the place.
    """
    path = Path(what)
    if path.suffix == ".py" or path.is_file():
        return _of_file(path, parameters)
    if ":" not in what:
        return _registered(what, parameters)
    module, _, name = what.partition(":")
    if not module or not name:
        raise UnknownNameError(f"expected FILE.py, module:Class or a name, got {what!r}")
    import_from(Path.cwd())
    if what.startswith(FUNCTION):
        return _of_function(what, parameters)
    try:
        loaded = importlib.import_module(module)
    except (Exception, SystemExit) as error:
        raise UnknownNameError(f"cannot import {what}: {told(error, Path.cwd())}") from error
    if not hasattr(loaded, name):
        raise UnknownNameError(f"no {name!r} in {module}; it has: {', '.join(_public(loaded)) or 'nothing public'}")
    code, folder = getattr(loaded, name), Path(loaded.__file__ or ".").parent
    if inspect.isclass(code) and issubclass(code, Defense | Attack):
        return Part(_kind_of(code), what, code, folder, parameters)
    if callable(code) and {"model", "data"} & vars(loaded).keys():
        return Part("task", module, loaded, folder, parameters)
    hint = f"; a function of an update is named {registry.function_hint(what)}" if callable(code) else ""
    raise UnknownNameError(
        f"expected a subclass of Defense or Attack, or a function of a task, got {what}={code!r:.80}{hint}"
    )


def _of_function(name: str, parameters: dict[str, Scalar]) -> Part:
    """The defense `function:module.name`, in the folder of the function's module."""
    code = registry.lookup("defense", name)
    folder = Path(getattr(sys.modules.get(code.__module__), "__file__", None) or ".").resolve().parent
    return Part("defense", name, code, folder, parameters)


def _of_file(path: Path, parameters: dict[str, Scalar]) -> Part:
    """The only public part of a file, imported under the file's name, or under another name if that is taken."""
    if not path.is_file():
        raise UnknownNameError(f"no file {path}; `leakgauge new defense {path}` writes one")
    folder = path.resolve().parent
    module = _free_name(path)
    import_from(folder)
    spec = importlib.util.spec_from_file_location(module, path.resolve())
    assert spec is not None  # the suffix is .py; other files are refused before
    assert spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    sys.modules[module] = loaded
    try:
        spec.loader.exec_module(loaded)
    except (Exception, SystemExit) as error:
        del sys.modules[module]
        raise UnknownNameError(f"cannot import {path}: {told(error, folder)}") from error
    return _only(loaded, module, path, folder, parameters)


def _only(loaded: ModuleType, module: str, path: Path, folder: Path, parameters: dict[str, Scalar]) -> Part:
    """The only public defense or attack that a module defines; a module without one is a task."""
    classes = [value for value in vars(loaded).values() if inspect.isclass(value) and value.__module__ == module]
    codes = [code for code in classes if issubclass(code, Defense | Attack) and not code.__name__.startswith("_")]
    if len(codes) == 1:
        return Part(_kind_of(codes[0]), f"{module}:{codes[0].__name__}", codes[0], folder, parameters)
    if not codes and {"model", "data"} & set(_public(loaded)):
        return Part("task", module, loaded, folder, parameters)
    names = ", ".join(sorted(code.__name__ for code in codes))
    raise UnknownNameError(
        f"expected one public defense or attack in {path}, or functions `model` and `data` of a task, got "
        f"{names or 'neither'}; "
        f"{'name one as module:Class' if names else f'a function of an update is named {FUNCTION}{module}.NAME'}"
    )


def _registered(name: str, parameters: dict[str, Scalar]) -> Part:
    """A shipped part, a cascade of two shipped defenses, or a part from an entry point."""
    if "+" in name:
        return part_of(registry.build("defense", name, {}))._replace(parameters=parameters)
    for kind in ("defense", "attack"):
        known = registry.classes(kind)
        if name in known:
            folder = Path(inspect.getfile(known[name])).parent
            return Part(kind, name, known[name], folder, parameters)
    raise UnknownNameError(f"expected FILE.py, module:Class, or the name of a defense or an attack, got {name!r}")


def _free_name(path: Path) -> str:
    """The module name for a file: its own name, or another if an installed module has that name."""
    stem = path.stem
    loaded = sys.modules.get(stem)
    if loaded is not None:
        return stem if getattr(loaded, "__file__", None) == str(path.resolve()) else f"own_{stem}"
    spec = importlib.util.find_spec(stem) if stem.isidentifier() else None
    taken = spec is not None and (spec.origin is None or Path(spec.origin).resolve() != path.resolve())
    return f"own_{stem}" if taken or not stem.isidentifier() else stem


def _public(module: ModuleType) -> list[str]:
    """The public functions, classes and torch modules that a module defines."""
    return [
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and callable(value) and getattr(value, "__module__", "") == module.__name__
    ]


def built(part: Part) -> Any:
    """The defense or attack with its parameters.

    Raises:
        StudyError: parameters that the part does not accept; one line for each.
    """
    try:
        if part.kind == "defense" and ("+" in part.name or registry.PERSONAL in part.parameters):
            return registry.build("defense", part.name, part.parameters)
        return registry.construct(part.code, part.parameters, part.name)
    except registry.ParameterError as error:
        raise StudyError(part.name, [f"{key}: {text}" if key else text for key, text in error.problems]) from error
    except TypeError as error:  # an abstract method is missing
        names = " and ".join(f"`{name}`" for name in sorted(getattr(part.code, "__abstractmethods__", ())))
        text = f"expected {names} in {part.code.__name__}, got none" if names else str(error)
        raise StudyError(part.name, [text]) from error
