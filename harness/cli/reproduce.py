"""The command `reproduce`: repeats tables and figures of papers, by name, and checks their claims."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from leakgauge.harness.cli import options as cli
from leakgauge.harness.core.cell import Size
from leakgauge.harness.core.sinks import say

if TYPE_CHECKING:
    from leakgauge.harness.gate.verdicts import Verdicts


def reproduce(
    names: Annotated[
        list[str] | None, typer.Argument(help="Recipes as paper/item, papers, or TOML files; see --list.")
    ] = None,
    out: Annotated[Path, typer.Option("-o", "--out", help="Folder of the results.")] = Path("runs/reproduce"),
    every: Annotated[bool, typer.Option("--all", help="All shipped recipes.")] = False,
    listing: Annotated[bool, typer.Option("--list", help="Only list the recipes.")] = False,
    size: Annotated[Size, typer.Option(help="quick (minutes), standard (hours) or paper.")] = Size.QUICK,
    data: cli.DataOption = None,
    workers: cli.WorkersOption = None,
    figures: cli.FiguresOption = "",
    against: Annotated[
        Path | None, typer.Option(help="An earlier reproduce.json: exit with 1 if a decided verdict has changed.")
    ] = None,
) -> None:
    """Repeat tables and figures of papers, check what they claim, and write one page and reproduce.json."""
    from leakgauge.harness.cli.progress import listener
    from leakgauge.harness.data import default_root
    from leakgauge.harness.study.recipes import recipe, recipes
    from leakgauge.harness.study.reproduce import reproduce as run
    from leakgauge.harness.study.store import write_atomically
    from leakgauge.reports.charts.files import chart_files
    from leakgauge.reports.reproduction import Repeated, reproduction, scoreboard

    kinds, before = cli.figure_formats(figures), None if against is None else _before(against)
    known, root = recipes(), data or default_root()
    chosen = [one for name in names or () for one in _named(name, list(known))] if not every else list(known)
    with cli.bugs(out / "run.log"), cli.user_errors():
        if listing:
            for name in chosen or known:
                say(f"{name:24} {recipe(name, size, root).study.title}")
            return
        if not chosen:
            raise cli.refusal(cli.USAGE, "expected names of recipes, or --all; 'leakgauge reproduce --list' lists them")
        with ExitStack() as stack:
            done = run(
                chosen, size, out, root, workers=workers, listen=lambda name: stack.enter_context(listener(name))
            )
        pages = [Repeated(**one.shown) for one in done]
        write_atomically(out / "index.html", reproduction(pages).encode())
        write_atomically(out / "scoreboard.md", scoreboard(pages).encode())
        for shown in pages:
            for file, content in chart_files(shown.charts, shown.id, kinds):
                write_atomically(out / "figures" / file, content)
    for one in done:
        for judged in one.judged:
            say(f"{judged.verdict:12} {one.recipe.name}: {judged.text}: {judged.measured}")
    say("", f"{out / 'index.html'} has the figures, reproduce.json the numbers, scoreboard.md the claims")
    if any(one.failures for one in done):
        raise typer.Exit(cli.INCOMPLETE)
    if before is not None:
        _compare(before, [one.data for one in done])


def _before(path: Path) -> Verdicts:
    """The earlier verdicts; a file that cannot be read is an error before anything runs."""
    from leakgauge.harness.gate.verdicts import read_verdicts

    try:
        return read_verdicts(path)
    except ValueError as error:
        raise cli.refusal(cli.NOT_COMPARABLE, str(error)) from error


def _compare(before: Verdicts, recipes: list[dict[str, Any]]) -> None:
    """Print the changed verdicts; exit with 1 if there are any, and with 4 if no recipe is in both."""
    from leakgauge.harness.gate.verdicts import changes, verdicts

    try:
        found = changes(before, verdicts(recipes))
    except ValueError as error:
        raise cli.refusal(cli.NOT_COMPARABLE, str(error)) from error
    say("", *(found or ["no decided verdict has changed"]))
    if found:
        raise typer.Exit(cli.INCREASED)


def _named(name: str, known: list[str]) -> list[str]:
    """The recipes of a paper, or the name itself if it is no paper."""
    return [one for one in known if one.startswith(f"{name}/")] or [name]
