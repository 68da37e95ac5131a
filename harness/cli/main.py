"""The command `leakgauge`. Heavy imports happen inside the commands, so that `--help` is quick."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from leakgauge import __version__
from leakgauge.harness.cli.audit import audit, claim
from leakgauge.harness.cli.gate import baselines, check, gate
from leakgauge.harness.cli.inspect import inspect_
from leakgauge.harness.cli.list import list_
from leakgauge.harness.cli.options import bugs
from leakgauge.harness.cli.own import doctor, new
from leakgauge.harness.cli.report import compare, export, report, verify
from leakgauge.harness.cli.reproduce import reproduce
from leakgauge.harness.cli.run import run, show
from leakgauge.harness.core.search_path import leave_working_folder
from leakgauge.harness.core.sinks import any_encoding, say


class _Commands(TyperGroup):
    """The commands; an uncaught exception in any command is printed as one line."""

    def invoke(self, ctx: Any) -> Any:
        with bugs(verbose=ctx.params["verbose"]):
            return super().invoke(ctx)


app = typer.Typer(name="leakgauge", cls=_Commands, no_args_is_help=True, pretty_exceptions_enable=False)


def _print_version(wanted: bool) -> None:
    if wanted:
        say(f"leakgauge {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)
    ] = False,
    verbose: Annotated[bool, typer.Option("--verbose", help="Print the traceback of an internal error.")] = False,
) -> None:
    """Measure how much a federated-learning defense really leaks."""


_RESULTS: tuple[Callable[..., None], ...] = (run, report, export, verify, show)
_CHECKS: tuple[Callable[..., None], ...] = (claim, audit, compare, gate, check, new, doctor, reproduce)
for _command in (*_RESULTS, *_CHECKS):
    app.command()(_command)
app.command("list")(list_)
app.command("inspect")(inspect_)
app.add_typer(baselines)


def main() -> None:
    """Run the command line of this process."""
    leave_working_folder()
    for stream in (sys.stdout, sys.stderr):
        any_encoding(stream)
    try:
        app()
    except Exception:  # the interpreter would print the error message unescaped
        say(*traceback.format_exc().splitlines(), err=True)
        sys.exit(1)
