"""The command `verify`: check that no file in a folder of results is damaged or missing."""

from __future__ import annotations

import typer

from leakgauge.harness.cli.options import INCOMPLETE, FolderArgument, JsonOption, print_json, user_errors
from leakgauge.harness.core.sinks import say


def verify(folder: FolderArgument, as_json: JsonOption = False) -> None:
    """List every damaged or missing file of a folder of results, with the reason. Exit code 0: none found; 5: some."""
    from leakgauge.harness.study import store

    with user_errors():
        number, faults = store.verify(folder)
    if as_json:
        listed = [{"file": name, "reason": reason} for name, reason in faults.items()]
        print_json({"cells_and_trainings": number, "whole": not faults, "faults": listed})
    else:
        for name, reason in faults.items():
            say(f"{name}: {reason}")
        say(f"{number} cells and trainings, " + (f"{len(faults)} files damaged or missing" if faults else "all whole"))
    raise typer.Exit(INCOMPLETE if faults else 0)
