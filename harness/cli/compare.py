"""The command `compare`: shows how two runs differ."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from leakgauge.harness.cli.options import FolderArgument, print_table, user_errors
from leakgauge.harness.core.sinks import emit


def compare(
    first: FolderArgument,
    second: Annotated[Path, typer.Argument(help="Another folder; differences are this one minus the first.")],
    format_: Annotated[Literal["table", "md", "json"], typer.Option("--format", help="Output format.")] = "table",
) -> None:
    """Show how two runs differ, image by image if they attacked the same images. Never fails the build."""
    from leakgauge.harness.gate import compare as comparing
    from leakgauge.harness.study.store import load_run

    with user_errors():
        found = comparing.compare(load_run(first), load_run(second))
    if format_ == "table":
        print_table(lambda width: comparing.table(found))
    else:
        emit((comparing.to_markdown if format_ == "md" else comparing.to_json)(found))
