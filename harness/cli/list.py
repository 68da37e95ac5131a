"""The command `list`: the defenses, attacks, tasks and studies by name."""

from __future__ import annotations

import hashlib
import json
import platform
import warnings
from contextlib import suppress
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from leakgauge.harness.cli.options import USAGE, JsonOption, print_json, refusal
from leakgauge.harness.core.sinks import line, say
from leakgauge.harness.study.titles import shipped

if TYPE_CHECKING:
    from leakgauge.harness.core.cell import Scalar
    from leakgauge.harness.federation import registry

_LISTS = ("defenses", "attacks", "tasks", "studies")


def list_(
    what: Annotated[str, typer.Argument(help="What to list.", metavar="|".join(_LISTS))],
    as_json: JsonOption = False,
) -> None:
    """List the defenses, attacks, tasks or studies, each with one line of description."""
    from leakgauge.harness.core.errors import unknown

    if what not in _LISTS:
        raise refusal(USAGE, str(unknown("list of", what, _LISTS)))
    rows = _known(what)
    if as_json:
        print_json(rows)
        return
    width = max(len(row["name"]) for row in rows)
    for row in rows:
        kind = f"[{row['kind']}] " if "kind" in row else ""
        say(f"{row['name']:<{width}}  {kind}{row['summary']}")
        if row.get("parameters"):
            parameters = ", ".join(f"{key}={value!r}" for key, value in row["parameters"].items())
            say(f"{'':<{width}}  {parameters}")


def _known(what: str) -> list[dict[str, Any]]:
    """The entries of one list; those of this code are read from the user's cache, because imports take seconds.

    With plug-ins, the modules are imported each time: no digest covers what a plug-in is made of.
    """
    from leakgauge.harness.study.environment import cache_folder, package
    from leakgauge.harness.study.files import load, sealed, unsealed

    folder, plugged = cache_folder(), any(entry_points(group=f"leakgauge.{what}"))
    if what == "studies" or folder is None or plugged:
        return _rows(what)
    made_by = [package(), hashlib.sha256(Path(__file__).read_bytes()).hexdigest(), platform.python_version()]
    path = folder / "lists" / f"{what}.json"
    stored = load(path, unsealed, {})
    if stored is not None and stored.get("made_by") == made_by:
        found: list[dict[str, Any]] = json.loads(stored["rows"])
        return found
    rows = _rows(what)
    text = json.dumps(rows)  # as a text, since a sealed file sorts keys, and parameters have an order
    if json.loads(text) != rows:
        return rows
    from leakgauge.harness.study.store import StoreError, write_atomically

    with suppress(StoreError):  # a full disk: the next call imports again
        write_atomically(path, sealed({"made_by": made_by, "rows": text}))
    return rows


def _rows(what: str) -> list[dict[str, Any]]:
    """The entries of one list. A task is a data set and a model: both are listed, with their kind."""
    if what == "studies":
        return [{"name": name, "summary": title} for name, title in shipped().items()]
    from leakgauge.harness import data
    from leakgauge.harness.federation import registry
    from leakgauge.harness.learn import models

    if what == "tasks":
        tasks = (("data", data.names()), ("model", (*models.names(), *models.FORMS)))
        return [{"name": name, "summary": text, "kind": kind} for kind, known in tasks for name, text in known]
    kind: registry.Kind = "defense" if what == "defenses" else "attack"
    return [
        {"name": name, "summary": registry.summary(kind, name), "parameters": _defaults(kind, name)}
        for name in registry.classes(kind)
    ]


def _defaults(kind: registry.Kind, name: str) -> dict[str, Scalar]:
    """The default parameters; none of a plug-in that cannot be built from them."""
    from leakgauge.harness.federation import registry

    try:
        return registry.defaults(kind, name)
    except Exception as error:
        warnings.warn(line(f"{name} has no defaults: {type(error).__name__}: {error}"), stacklevel=2)
        return {}
