"""Verdicts on the claims of recipes, compared with those of an earlier `reproduce.json`."""

from __future__ import annotations

import json
from pathlib import Path

from leakgauge.harness.core.files import text
from leakgauge.harness.core.statements import Verdict
from leakgauge.harness.gate.baseline import BaselineError

_DECIDED = (Verdict.CONFIRMED, Verdict.CONTRADICTED)

Verdicts = dict[tuple[str, str, str, str], str]
"""The verdicts of claims by recipe, size, text and the values of `each`."""


def verdicts(path: Path) -> Verdicts:
    """The verdicts of a `reproduce.json`.

    Raises:
        BaselineError: the file cannot be read, or has another form.
    """
    try:
        return {
            (recipe["name"], recipe["size"], claim["text"], claim["where"]): str(claim["verdict"])
            for recipe in json.loads(text(path))
            for claim in recipe["claims"]
        }
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise BaselineError(f"{path}: expected a reproduce.json of 'leakgauge reproduce': {error!r}") from error


def changes(before: Verdicts, now: Verdicts) -> list[str]:
    """The decided claims of recipes that ran whose verdict is different now or which are gone, in a line each.

    Raises:
        BaselineError: no recipe of one size is in both.
    """
    ran = {key[:2] for key in now}
    held = {key: verdict for key, verdict in before.items() if key[:2] in ran}
    if not held:
        raise BaselineError("no recipe is in both at the same size")
    return [
        f"{name} ({size}): {text}{f' ({where})' if where else ''}: {verdict} before, {after} now"
        for (name, size, text, where), verdict in held.items()
        if verdict in _DECIDED and (after := now.get((name, size, text, where), "gone")) != verdict
    ]
