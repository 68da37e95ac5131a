"""The command `leakgauge`. Heavy imports happen inside the commands, so that `--help` is quick."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable
from typing import Annotated, Any

import typer
from typer import Option

from leakgauge import __version__
from leakgauge.harness.cli import options as cli
from leakgauge.harness.cli.audit import audit, claim
from leakgauge.harness.cli.gate import acknowledge, check, diff, gate, make, update
from leakgauge.harness.cli.gate import show as show_baseline
from leakgauge.harness.cli.init import init
from leakgauge.harness.cli.inspect import inspect_
from leakgauge.harness.cli.leaderboard import leaderboard
from leakgauge.harness.cli.list import list_
from leakgauge.harness.cli.own import doctor, new
from leakgauge.harness.cli.report import compare, export, report, sign, verify, view
from leakgauge.harness.cli.reproduce import reproduce
from leakgauge.harness.cli.run import run, show
from leakgauge.harness.core.search_path import leave_working_folder
from leakgauge.harness.core.sinks import any_encoding, say


class _Commands(cli.Group):
    """The commands; an uncaught exception in any command is printed as one line."""

    def invoke(self, ctx: Any) -> Any:
        with cli.bugs(verbose=ctx.params["verbose"]):
            return super().invoke(ctx)


app = typer.Typer(name="leakgauge", cls=_Commands, no_args_is_help=True, pretty_exceptions_enable=False)


def _print_version(wanted: bool) -> None:
    if wanted:
        say(f"leakgauge {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, Option("--version", help="Print the version.", callback=_print_version, is_eager=True)
    ] = False,
    verbose: Annotated[bool, Option("--verbose", help="Print the traceback of an internal error.")] = False,
) -> None:
    """Measure how much a federated-learning defense really leaks."""


_BASELINES = "The numbers that 'check' and 'gate' compare with: make, acknowledge, show and compare them."
baselines = typer.Typer(name="baseline", cls=cli.Group, no_args_is_help=True, help=_BASELINES)

_MEASURE, _LOOK, _KNOW, _GUARD = "Measure leakage", "Results", "Defenses, attacks and claims", "Gate (for CI)"
_LOST, _BASE = (cli.INCOMPLETE,), (cli.NOT_COMPARABLE,)
_CHANGED = (cli.INCREASED, cli.NOT_COMPARABLE, cli.INCOMPLETE)
_GATED = (cli.INCREASED, cli.INCONCLUSIVE, cli.NOT_COMPARABLE, cli.INCOMPLETE, cli.UNACCEPTED)


def _add(command: Callable[..., None], panel: str | None, codes: tuple[int, ...], *examples: str) -> None:
    """Add a command, to a panel or to `baseline`; codes: its exit codes besides those of every command."""
    end, name = cli.closing(codes, *examples), command.__name__.rstrip("_")
    to = app if panel else baselines
    to.command(name, cls=cli.Command, epilog=end, rich_help_panel=panel)(command)


_add(init, _MEASURE, (), "init", "init --have defense --defense jopeq --adversary server --data pictures -o mine.toml")
_add(show, _MEASURE, (), "show demo", "show mine.toml --json")
_add(run, _MEASURE, _LOST, "run demo -o runs/demo", "run mine.toml -o runs/mine --only 'gaussian*map'")
_add(inspect_, _MEASURE, _LOST, "inspect recording --model cnn2", "inspect recording --model linear --data mnist")
_add(reproduce, _MEASURE, _CHANGED, "reproduce --list", "reproduce jopeq/figure-2 -o runs/jopeq")
_add(
    leaderboard,
    _MEASURE,
    (cli.NOT_COMPARABLE, *_LOST),
    "leaderboard --size quick",
    "leaderboard --submit mine:Defense --allow-code",
)
_add(report, _LOOK, (*_BASE, *_LOST), "report runs/mine --details", "report runs/mine --against runs/other")
_add(export, _LOOK, (), "export runs/mine", "export runs/mine --to csv -o mine.csv")
_add(compare, _LOOK, (), "compare runs/mine runs/other", "compare runs/mine runs/other runs/third --format md")
_add(view, _LOOK, (), "view runs", "view runs --bundle site")
_add(verify, _LOOK, _LOST, "verify runs/mine", "verify runs/mine --key me.pub.pem")
_add(sign, _LOOK, _LOST, "sign runs/mine --new-key me.pem", "sign runs/mine --key me.pem")
_add(list_, _KNOW, (), "list attacks", "list tasks")
_add(claim, _KNOW, (), "claim gaussian --set epsilon=8")
_add(audit, _KNOW, (), "audit laplace --trials 1000", "audit --study mine.toml --only laplace")
_add(new, _KNOW, (), "new defense my_defense.py", "new attack my_attack.py")
_add(doctor, _KNOW, (cli.UNSOUND,), "doctor my_defense.py", "doctor jopeq --set bits=2")
_add(gate, _GUARD, _GATED, "gate mine.toml -o runs/gate --baseline baselines/mine.json")
_add(check, _GUARD, _GATED, "check runs/mine --baseline baselines/mine.json")
app.add_typer(baselines, rich_help_panel=_GUARD)
_add(make, None, _CHANGED, "baseline make mine.toml --reason 'first numbers'")
_add(update, None, _CHANGED, "baseline update runs/mine --reason 'first numbers'")
_add(acknowledge, None, _BASE, "baseline acknowledge mine.json --reason 'another clip'")
_add(show_baseline, None, _BASE, "baseline show baselines/mine.json")
_add(diff, None, _BASE, "baseline diff old.json new.json")


AVX2 = {
    "ATEN_CPU_CAPABILITY": "avx2",
    "MKL_CBWR": "AVX2",
    "ONEDNN_MAX_CPU_ISA": "AVX2",
    "OPENBLAS_CORETYPE": "Haswell",
    "NPY_DISABLE_CPU_FEATURES": "X86_V4 AVX512_ICL AVX512_SPR",
}
"""The variables that keep torch, MKL, oneDNN, OpenBLAS and numpy to AVX2. The compiled loops follow the processor."""


def _choose_kernels() -> None:
    """Set the variables for `LEAKGAUGE_KERNELS`, before anything imports numpy or torch, which then read them."""
    asked = os.environ.get("LEAKGAUGE_KERNELS", "")
    if asked not in ("", "avx2"):
        say(f"leakgauge: LEAKGAUGE_KERNELS: expected avx2, got {asked!r}", err=True)
        sys.exit(2)
    os.environ.update(AVX2 if asked else {})


def main() -> None:
    """Run the command line of this process."""
    leave_working_folder()
    for stream in (sys.stdout, sys.stderr):
        any_encoding(stream)
    _choose_kernels()
    try:
        app()
    except Exception:  # the interpreter would print the error message unescaped
        say(*traceback.format_exc().splitlines(), err=True)
        sys.exit(1)
