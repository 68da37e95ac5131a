"""The command `list`: the defenses, attacks, tasks and studies by name."""

from __future__ import annotations

import warnings
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument

from leakgauge.harness.cli.options import USAGE, JsonOption, print_json, refusal
from leakgauge.harness.core.sinks import line, say
from leakgauge.harness.study.titles import shipped

if TYPE_CHECKING:
    from leakgauge.harness.core.cell import Scalar
    from leakgauge.harness.federation import registry

_LISTS = ("defenses", "attacks", "tasks", "studies")


def list_(
    what: Annotated[str, Argument(metavar="WHAT", help=f"{', '.join(_LISTS[:-1])} or {_LISTS[-1]}.")],
    as_json: JsonOption = False,
) -> None:
    """List the defenses, attacks, tasks or studies, each with one line of description."""
    from leakgauge.harness.cli.known import known
    from leakgauge.harness.core.errors import unknown

    if what not in _LISTS:
        raise refusal(USAGE, str(unknown("list of", what, _LISTS)))
    # no digest covers the code of plug-ins; studies are read fast enough without a cache
    fixed = what != "studies" and not any(entry_points(group=f"leakgauge.{what}"))
    source = Path(__file__).read_text("utf-8")  # it determines the rows, and no other digest covers it
    rows = known(["list", what, source], lambda: _rows(what)) if fixed else _rows(what)
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


def _rows(what: str) -> list[dict[str, Any]]:
    """The entries of one list. A task consists of a data set and a model; the list has both, each with its kind."""
    if what == "studies":
        return [{"name": name, "summary": title} for name, title in shipped().items()]
    from leakgauge.harness import data
    from leakgauge.harness.federation import recording, registry
    from leakgauge.harness.learn import models

    if what == "tasks":
        networks = *models.names(), *models.names_for_tokens(), *models.FORMS
        tasks = (("data", (*data.names(), recording.FORM)), ("model", networks))
        return [{"name": name, "summary": text, "kind": kind} for kind, known in tasks for name, text in known]
    kind: registry.Kind = "defense" if what == "defenses" else "attack"
    return [
        {"name": name, "summary": registry.summary(kind, name), "parameters": _defaults(kind, name)}
        for name in registry.classes(kind)
    ]


def _defaults(kind: registry.Kind, name: str) -> dict[str, Scalar]:
    """The default parameters; empty, with a warning, for a plug-in that cannot be built from its defaults."""
    from leakgauge.harness.federation import registry

    try:
        return registry.defaults(kind, name)
    except Exception as error:
        warnings.warn(line(f"{name} has no defaults: {type(error).__name__}: {error}"), stacklevel=2)
        return {}
