"""What the commands share: exit codes, options, and the printing of errors and tables."""

from __future__ import annotations

import io
import json
import os
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Argument, Option
from typer.core import TyperCommand, TyperGroup

from leakgauge.harness.core.sinks import emit, say, spelled

INCREASED, USAGE, INCONCLUSIVE, NOT_COMPARABLE, INCOMPLETE, UNACCEPTED, UNSOUND = 1, 2, 3, 4, 5, 6, 7
BUG, INTERRUPTED, CLOSED = 70, 130, 141

EXITS = {
    0: "done, and nothing below was found",
    INCREASED: "leakage increased, or a decided verdict of a claim changed",
    USAGE: "an invalid study or argument",
    INCONCLUSIVE: "inconclusive, with --inconclusive fail",
    NOT_COMPARABLE: "nothing to compare with, or not comparable",
    INCOMPLETE: "a result failed, is missing or is damaged",
    UNACCEPTED: "a change of the baseline or of the rules was not accepted",
    UNSOUND: "the doctor found an error",
    BUG: "an internal error (EX_SOFTWARE of sysexits.h)",
    INTERRUPTED: "interrupted; the same command resumes",
    CLOSED: "the reader closed the pipe",
}
"""The meaning of each exit code."""

_ANY = (0, USAGE, BUG, INTERRUPTED)
"""The exit codes of every command."""

StudyArgument = Annotated[str, Argument(help="A TOML file, or the name of a shipped study.")]
FolderArgument = Annotated[Path, Argument(help="Folder of results that 'leakgauge run' wrote.")]
DEFENSE_HELP = "Name of a defense, or two names joined as in laplace+sdq."
DefenseArgument = Annotated[str, Argument(help=DEFENSE_HELP)]
SetOption = Annotated[list[str] | None, Option("--set", help="A parameter of the defense, as key=value; repeatable.")]
SettingOption = Annotated[
    list[str] | None, Option(help="Federation, as key=value: dim, clients, participants, samples, steps, batch, lr.")
]
DataOption = Annotated[Path | None, Option("--data", help="Data sets; default: LEAKGAUGE_DATA, or ~/.cache/leakgauge.")]
WorkersOption = Annotated[int | None, Option(min=0, help="Worker processes; default: one per core; 0: this process.")]
EngineOption = Annotated[str, Option(help="Where jobs run: workers (of this machine), ray, or an engine of your own.")]
AddressOption = Annotated[str | None, Option(metavar="HOST:PORT", help="A Ray cluster; default: a private Ray.")]
AllowCodeOption = Annotated[bool, Option("--allow-code", help="Import a study's code; also LEAKGAUGE_ALLOW_CODE=1.")]
MaxCellsOption = Annotated[int, Option("--max-cells", min=1, help="Maximum number of cells of a grid.")]
MaxNumberOption = Annotated[int, Option("--max-number", min=1, help="Most clients, rounds, victims, ... of a study.")]
FiguresOption = Annotated[str, Option(help="Formats, as in png,pdf: write each chart to `figures` of the results.")]
JsonOption = Annotated[bool, Option("--json", help="Print JSON.")]


def _short(parameters: list[Any]) -> list[Any]:
    """The parameters; the help shows no type behind a flag, which takes no value, and `N [x>=0]` behind a range."""
    for parameter in parameters:
        if getattr(parameter, "is_flag", False):
            parameter.metavar = ""
        elif getattr(parameter, "min", None) is not None:
            parameter.metavar = parameter.metavar or "N"
    return parameters


class Command(TyperCommand):
    """A command whose help shows `--flag`, not `--flag <bool>`."""

    def get_params(self, ctx: Any) -> list[Any]:
        """The parameters."""
        return _short(super().get_params(ctx))


class Group(TyperGroup):
    """A group of commands whose help shows `--flag`, not `--flag <bool>`."""

    def get_params(self, ctx: Any) -> list[Any]:
        """The parameters."""
        return _short(super().get_params(ctx))


def closing(codes: Iterable[int], *examples: str) -> str:
    """The end of a command's help: examples, without the first word, and the exit codes, also those of any command."""
    exits = [f"  {code:>3}  {EXITS[code]}" for code in sorted({*_ANY, *codes})]
    shown = [f"  leakgauge {example}" for example in examples]
    return "\n".join(["Examples:", *shown, "", "Exit codes:", *exits])


def refusal(code: int, *lines: str) -> typer.Exit:
    """Print the lines on standard error and return the exit with this code."""
    say(*(f"leakgauge: {line}" for line in lines), err=True)
    return typer.Exit(code)


@contextmanager
def user_errors(no_baseline: int = USAGE) -> Iterator[None]:
    """Turn a user's mistake, or Ctrl-C, SIGTERM or SIGHUP, into lines on standard error and an exit code.

    Args:
        no_baseline: the exit code if a baseline is missing or cannot be read.
    """
    from leakgauge.harness.core.errors import StudyError, UnknownNameError
    from leakgauge.harness.gate.baseline import BaselineError
    from leakgauge.harness.study.engine import Interrupted
    from leakgauge.harness.study.orphans import handling, interrupt
    from leakgauge.harness.study.store import StoreError

    try:
        with handling(interrupt):
            yield
    except (StudyError, UnknownNameError, StoreError) as error:
        raise refusal(USAGE, *str(error).splitlines()) from error
    except BaselineError as error:
        raise refusal(no_baseline, str(error)) from error
    except (Interrupted, KeyboardInterrupt) as error:
        raise refusal(INTERRUPTED, "stopped; finished results are kept, the same command resumes") from error


@contextmanager
def computed_anew(wanted: bool = True) -> Iterator[None]:
    """Read no cached audit or claim, also in worker processes started inside; used by the gates."""
    from leakgauge.harness.study.environment import CACHE
    from leakgauge.harness.study.orphans import inherited

    with inherited({CACHE: "off"} if wanted else {}):
        yield


@contextmanager
def bugs(log: Path | None = None, *, verbose: bool = False) -> Iterator[None]:
    """Turn any other exception into one line and its own exit code; Python's code 1 means that leakage increased.

    Args:
        log: file for the traceback, unless it is printed.
        verbose: print the traceback.
    """
    try:
        yield
    except (Exception, SystemExit) as error:
        if isinstance(error, BrokenPipeError) or isinstance(error.__context__, BrokenPipeError):  # a console exits
            sys.stdout = io.StringIO()  # because Python flushes stdout at exit
            raise typer.Exit(CLOSED) from error
        if hasattr(error, "exit_code"):  # typer handles its own exceptions
            raise
        trace, where = traceback.format_exc(), "'leakgauge --verbose ...' prints the traceback"
        if log is not None and log.parent.is_dir() and not verbose:
            with suppress(OSError), log.open("a", encoding="utf-8") as file:
                file.write(trace)
                where = f"the traceback is in {log}"
        text = " ".join(f"{type(error).__name__}: {error}".split())
        shown = trace.splitlines() if verbose else []
        raise refusal(BUG, *shown, f"internal error, please report it: {text}; {where}") from error


def figure_formats(text: str) -> tuple[str, ...]:
    """The formats that `--figures` names, as in `png,pdf`; none for an empty text."""
    from leakgauge.reports.charts.files import FORMATS

    names = tuple(name.strip() for name in text.split(",")) if text else ()
    for name in names:
        if name not in FORMATS:
            raise typer.BadParameter(f"expected some of {','.join(FORMATS)}, got {name!r}", param_hint="'--figures'")
    return names


def print_json(data: Any) -> None:
    """Print plain data as JSON."""
    emit(f"{spelled(json.dumps(data, indent=1))}\n")


def print_table(make: Callable[[int], Any]) -> None:
    """Print the rich table of `make` for the terminal's width; without a terminal, for COLUMNS or 140 columns."""
    from rich.console import Console

    console = Console(width=None if sys.stdout.isatty() else int(os.environ.get("COLUMNS", "140")))
    console.print(make(console.width))
