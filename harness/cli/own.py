"""The commands `new` and `doctor`: write the skeleton of a user's defense, attack or task, and check it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from leakgauge.harness.cli import options as cli
from leakgauge.harness.core.sinks import say

_MARKS = {"ok": "ok  ", "FAIL": "FAIL", "skipped": "—   "}


def new(
    kind: Annotated[str, typer.Argument(help="What to write.", metavar="defense|attack|task")],
    file: Annotated[Path, typer.Argument(help="The file, such as my_defense.py. Nothing is overwritten.")],
) -> None:
    """Write a runnable skeleton of a defense, an attack or a task, and a small study of it."""
    from leakgauge.harness.own.new import write

    with cli.user_errors():
        code, study = write(kind, file)
    say(f"wrote {code} and {study}; next:", f"  leakgauge doctor {code}")
    say(f"  leakgauge run {study} -o runs/{code.stem} --allow-code")


def doctor(
    what: Annotated[
        str, typer.Argument(help="FILE.py, module:Class, or a name. It is imported: no --allow-code is needed.")
    ],
    set_: cli.SetOption = None,
    as_json: cli.JsonOption = False,
) -> None:
    """Check a defense, an attack or a task: one line per check; a failed check says what is wrong, where, and a fix."""
    from leakgauge.harness.audit.claims import assignments
    from leakgauge.harness.own.suite import examine

    found = []
    with cli.user_errors():
        for finding in examine(what, assignments(set_ or [], "--set")):
            found.append(finding)
            if not as_json:
                say(f"{_MARKS[finding.mark]} {finding.name}: {finding.text}")
    if as_json:
        cli.print_json([finding._asdict() for finding in found])
    wrong = [finding.name for finding in found if finding.mark == "FAIL"]
    if not as_json:
        say(f"{len(wrong)} of {len(found)} checks failed: {', '.join(wrong)}" if wrong else "nothing wrong was found")
    if wrong:
        raise typer.Exit(cli.UNSOUND)
