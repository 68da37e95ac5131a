"""The command `leakgauge compare`."""

from __future__ import annotations

import os
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

USAGE = 2
"""Exit code: a folder that cannot be read."""


class Format(StrEnum):
    """What `leakgauge compare` prints."""

    table = "table"
    md = "md"
    json = "json"


def compare(
    first: Annotated[Path, typer.Argument(help="Folder of results that 'leakgauge run' made.")],
    second: Annotated[Path, typer.Argument(help="Another; differences are this one minus the first.")],
    format_: Annotated[Format, typer.Option("--format", help="How to print it.")] = Format.table,
) -> None:
    """Show how two runs differ, image by image where they attacked the same ones. It informs and never fails."""
    from rich.console import Console

    from leakgauge.harness.gate import compare as comparing
    from leakgauge.harness.study.store import StoreError, load_run

    try:
        found = comparing.compare(load_run(first), load_run(second))
    except StoreError as error:
        for line in str(error).splitlines():
            typer.echo(f"leakgauge: {line}", err=True)
        raise typer.Exit(USAGE) from error
    if format_ is Format.md:
        typer.echo(comparing.to_markdown(found), nl=False)
    elif format_ is Format.json:
        typer.echo(comparing.to_json(found), nl=False)
    else:
        width = None if sys.stdout.isatty() else int(os.environ.get("COLUMNS", "140"))
        Console(width=width).print(comparing.table(found))
