"""Code that a text names, as `module:Class` or `module:function`; it is imported only with permission."""

from __future__ import annotations

import importlib
import os
import pkgutil
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import unquote

from leakgauge.harness.core.errors import UnknownNameError

RECORDING = "recording:"
"""Prefix of the folder in the name of a recording that is used as data."""

FEATURES = "features:"
"""Prefix of a data set that is seen through features of another one."""

FUNCTION = "function:"
"""Prefix of the dotted name of a function of an update that is used as a defense."""

F = TypeVar("F", bound=Callable[..., Any])

# Prefixes of model and data names with a colon that do not name code
_FORMS = {"model": ("torchvision", "given"), "data": ("given", "folder", "npz", "recording"), "loss": ("given",)}


def code_allowed(asked: bool) -> bool:
    """Whether a text may name code to import: by an option, or by LEAKGAUGE_ALLOW_CODE=1."""
    return asked or os.environ.get("LEAKGAUGE_ALLOW_CODE") == "1"


def import_from(folder: Path) -> None:
    """Add a folder to the end of the import path; a console script does not search its working folder by itself."""
    name = str(folder.resolve())
    if name not in sys.path:
        sys.path.append(name)


def named_code(values: Iterable[object]) -> list[str]:
    """The values in a defense's or an attack's table that name code, as in `module:Class`."""
    return [value for value in values if isinstance(value, str) and ":" in value]


def task_code(model: str, data: str, loss: str = "") -> list[str]:
    """The names in a task that name code."""
    names = [("model", model), ("loss", loss), *(("data", name) for name in _data_sets(records_of(data)))]
    return [name for kind, name in names if ":" in name and name.partition(":")[0] not in _FORMS[kind]]


def _data_sets(data: str) -> list[str]:
    """The data sets that a name loads: itself, or the two of `features:DATA?public=DATA`."""
    if not data.startswith(FEATURES):
        return [data]
    inner, _, query = data.removeprefix(FEATURES).rpartition("?")
    options = dict(pair.partition("=")[::2] for pair in query.split("&"))
    return [name for each in (inner, options.get("public", "")) for name in _data_sets(each)]


def recording_options(name: str) -> tuple[str, dict[str, str]]:
    """The folder and the options in the name of a recording, as in `recording:DIR?data=NAME&public=yes`."""
    path, _, query = name.removeprefix(RECORDING).partition("?")
    pairs = [option.partition("=") for option in query.split("&") if option]
    return path, {key: unquote(value) for key, _, value in pairs}


def records_of(data: str) -> str:
    """The name of the data set that gives a recording its records, or `data` itself."""
    return recording_options(data)[1].get("data", data) if data.startswith(RECORDING) else data


def states(**facts: Any) -> Callable[[F], F]:
    """A decorator of a function of an update: the facts stay stated wherever it is named as `function:module.name`.

    Args:
        facts: parameters of `defenses._common.function.Function`; a value may be a function of that defense, such as
            the noise of the other parameters. `proves`: a function of that defense and the length of an update that
            returns the epsilon that one message has, proved elsewhere, and the reason in one sentence.
    """

    def stated(function: F) -> F:
        function.facts = facts  # type: ignore[attr-defined]
        return function

    return stated


def named_function(function: Any) -> str:
    """The name `function:module.name` of a function.

    Raises:
        ValueError: a study cannot find it by this name, because it is not at the top of a module.
    """
    name = f"{getattr(function, '__module__', '')}.{getattr(function, '__qualname__', '')}"
    with suppress(Exception):
        if pkgutil.resolve_name(name) is function:
            return f"{FUNCTION}{name}"
    raise ValueError(f"expected a function at the top of a module, which is found by its name, got {function!r:.80}")


def imported(kind: str, name: str) -> Any:
    """The object that `module:attribute` names.

    Raises:
        UnknownNameError: as `loaded`.
    """
    module, _, attribute = name.partition(":")
    return loaded(kind, name, lambda: getattr(importlib.import_module(module), attribute))


def loaded(kind: str, name: str, load: Callable[[], Any]) -> Any:
    """The object that `load` imports from a foreign module, which may raise any exception.

    Raises:
        UnknownNameError: `load` fails; the error is one line.
    """
    try:
        return load()
    except (Exception, SystemExit) as error:
        text = " ".join(str(error).split())
        raise UnknownNameError(f"no {kind} {name!r}: {type(error).__name__}: {text}") from error
