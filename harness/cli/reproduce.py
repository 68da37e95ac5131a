"""The command `reproduce`: repeats tables and figures of papers, by name, and checks their claims."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Argument, Option

from leakgauge.harness.cli import options as cli
from leakgauge.harness.core.cell import Size
from leakgauge.harness.core.sinks import say

if TYPE_CHECKING:
    from leakgauge.harness.query.lines import Reproduced


def reproduce(
    names: Annotated[list[str] | None, Argument(help="Recipes as paper/item, papers, TOML files; see --list.")] = None,
    out: Annotated[Path, Option("-o", "--out", help="Folder of the results.")] = Path("runs/reproduce"),
    every: Annotated[bool, Option("--all", help="All shipped recipes.")] = False,
    listing: Annotated[bool, Option("--list", help="Only list the recipes.")] = False,
    size: Annotated[Size, Option(help="quick (minutes), standard (hours) or paper.")] = Size.QUICK,
    data: cli.DataOption = None,
    workers: cli.WorkersOption = None,
    figures: cli.FiguresOption = "",
    record: Annotated[Path | None, Option(help="Folder to commit: a file a recipe, a page of all in it.")] = None,
    against: Annotated[Path | None, Option(help="Earlier reproduce.json: exit 1 if a decided verdict changed.")] = None,
) -> None:
    """Repeat tables and figures of papers, check what they claim, and write one page and reproduce.json."""
    from leakgauge.harness.cli.progress import listener
    from leakgauge.harness.data import default_root
    from leakgauge.harness.study.recipes import NAME, recipe, recipes
    from leakgauge.harness.study.recipes import data as plain
    from leakgauge.harness.study.recipes import reproduce as run_recipes
    from leakgauge.harness.study.store import write_atomically
    from leakgauge.reports.charts.figures import slug
    from leakgauge.reports.charts.files import chart_files
    from leakgauge.reports.reproduction import reproduction, scoreboard
    from leakgauge.reports.sections.asked import charts_of

    kinds, known, root = cli.figure_formats(figures), recipes(), data or default_root()
    # a name is that of a recipe, or of a paper with several
    asked = [[recipe for recipe in known if recipe.startswith(f"{name}/")] or [name] for name in names or ()]
    chosen = list(known) if every else list(chain(*asked))
    with cli.bugs(out / "run.log"), cli.user_errors(cli.NOT_COMPARABLE):
        if listing:
            for name in chosen or known:
                say(f"{name:24} {recipe(name, size, root).study.title}")
            return
        if not chosen:
            raise cli.refusal(cli.USAGE, "expected names of recipes, or --all; 'leakgauge reproduce --list' lists them")
        before = None if against is None else verdicts(against)
        with ExitStack() as stack:
            done = run_recipes(
                chosen, size, out, root, workers=workers, listen=lambda name: stack.enter_context(listener(name))
            )
        write_atomically(out / "index.html", reproduction(done).encode())
        made = {slug(one.name): {**plain(one), "made_by": list(one.made_by)} for one in done}
        write_atomically(out / "scoreboard.md", scoreboard(list(made.values())).encode())
        if record is not None:
            _keep(record / size, done, made)
        for outcome in done:
            for file, content in chart_files(charts_of(outcome.figures), slug(outcome.name), kinds):
                write_atomically(out / "figures" / file, content)
            say(*(f"{'NOTE':12} {outcome.name}: {note}" for note in outcome.notes))
            say(
                *(
                    f"{each.verdict:12} {outcome.name}: {each.statement.text}: {each.measured}"
                    for each in outcome.judged
                )
            )
        say("", f"{out / 'index.html'} has the figures, reproduce.json the numbers, scoreboard.md the claims")
        if any(outcome.failures for outcome in done):
            raise typer.Exit(cli.INCOMPLETE)
        if before is not None:
            changed = changes(before, verdicts(out / NAME))
            say("", *(changed or ["no decided verdict has changed"]))
            raise typer.Exit(cli.INCREASED if changed else 0)


def _keep(folder: Path, done: Sequence[Reproduced], made: Mapping[str, dict[str, Any]]) -> None:
    """Write a file for each recipe, a picture for each paper, and the page of all that is in the folder."""
    from leakgauge.harness.study.store import write_atomically
    from leakgauge.reports.charts.files import chart_files
    from leakgauge.reports.reproduction import by_paper, picture

    for name, one in made.items():
        kept = json.dumps({key: one[key] for key in one if key != "figures"}, indent=1, sort_keys=True)
        write_atomically(folder / f"{name}.json", f"{kept}\n".encode())
    for paper, alike in by_paper(done).items():
        path, chart = folder / f"{paper}.svg", picture(alike)
        if chart is not None and (not path.exists() or any(one.headline for each in alike for one, _ in each.figures)):
            ((_, drawn),) = chart_files([chart], paper, ("svg",))
            write_atomically(path, drawn)
    write_atomically(folder.with_suffix(".md"), recorded(folder).encode())


def recorded(folder: Path) -> str:
    """The page of all recipes whose files are in a folder; recipes of several runs may be there."""
    from leakgauge.reports.reproduction import scoreboard

    made = [_read(path) for path in sorted(folder.glob("*.json"))]
    command = f"leakgauge reproduce NAME ... --size {folder.name} --record {folder.parent.name}"
    pictures = {path.stem: f"{folder.name}/{path.name}" for path in folder.glob("*.svg")}
    text = scoreboard(made, pictures)
    return f"# Every published statement at the size {folder.name}\n\nWritten by `{command}`.\n\n{text}"


def _read(path: Path) -> dict[str, Any]:
    from leakgauge.harness.gate.baseline import BaselineError

    try:
        made: dict[str, Any] = json.loads(path.read_bytes())
        if not {"name", "size", "claims", "notes", "unstated", "made_by"} <= made.keys():
            raise ValueError("it lacks some keys of a recipe")
    except (OSError, ValueError, AttributeError) as error:
        raise BaselineError(f"{path}: expected a recipe of an earlier --record: {error}; delete it") from error
    return made


Verdicts = dict[tuple[str, str, str], str]
"""The verdicts of statements by recipe, size and text."""


def verdicts(path: Path) -> Verdicts:
    """The verdicts of a `reproduce.json`.

    Raises:
        BaselineError: the file cannot be read, or has another form.
    """
    from leakgauge.harness.core.files import text
    from leakgauge.harness.gate.baseline import BaselineError

    try:
        return {
            (recipe["name"], recipe["size"], claim["text"]): str(claim["verdict"])
            for recipe in json.loads(text(path))
            for claim in recipe["claims"]
        }
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise BaselineError(f"{path}: expected a reproduce.json of 'leakgauge reproduce': {error!r}") from error


def changes(before: Verdicts, now: Verdicts) -> list[str]:
    """The decided statements of recipes that ran whose verdict is different now or which are gone, in a line each.

    Raises:
        BaselineError: no recipe of one size is in both.
    """
    from leakgauge.harness.gate.baseline import BaselineError
    from leakgauge.harness.query.statements import DECIDED

    ran = {key[:2] for key in now}
    shared = {key: verdict for key, verdict in before.items() if key[:2] in ran}
    if not shared:
        raise BaselineError("no recipe is in both at the same size")
    return [
        f"{name} ({size}): {text}: {verdict} before, {after} now"
        for (name, size, text), verdict in shared.items()
        if verdict in DECIDED and (after := now.get((name, size, text), "gone")) != verdict
    ]
