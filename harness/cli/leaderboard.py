"""The command `leaderboard`: every defense at its tuned best, by who has to be trusted and what is protected."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from leakgauge.harness.cli import options as cli
from leakgauge.harness.core.cell import Size
from leakgauge.harness.core.sinks import say

_SUBMIT = "A defense of your own, as module:Class, in every track that its proof allows; repeatable."


def leaderboard(
    source: Annotated[str, Argument(help="A shipped board, or a TOML file.")] = "leaderboard",
    out: Annotated[Path, Option("-o", "--out", help="Folder of the results; the same command continues there.")] = Path(
        "runs/leaderboard"
    ),
    size: Annotated[Size, Option(help="quick (minutes), standard (hours) or paper.")] = Size.QUICK,
    entry: Annotated[list[str] | None, Option("--entry", help="Only this entry; repeatable.")] = None,
    task: Annotated[list[str] | None, Option("--task", help="Only this task; repeatable.")] = None,
    submit: Annotated[list[str] | None, Option("--submit", help=_SUBMIT)] = None,
    listing: Annotated[bool, Option("--list", help="Only list the tasks and entries.")] = False,
    data: cli.DataOption = None,
    workers: cli.WorkersOption = None,
    engine: cli.EngineOption = "workers",
    address: cli.AddressOption = None,
    allow_code: cli.AllowCodeOption = False,
    record: Annotated[Path | None, Option(help="Folder to commit: the numbers, a page and the headline.")] = None,
) -> None:
    """Tune every defense within one budget, train it with new seeds, attack it, and write one page that sorts."""
    from leakgauge.harness.cli.progress import listener
    from leakgauge.harness.core.code import code_allowed, import_from
    from leakgauge.harness.data import default_root
    from leakgauge.harness.study.board import board, submitted
    from leakgauge.harness.study.engine import open_engine
    from leakgauge.harness.study.leaderboard import as_json, run_board
    from leakgauge.harness.study.store import write_atomically
    from leakgauge.reports.leaderboard import leaderboard as page

    with cli.bugs(out / "run.log"), cli.user_errors(cli.NOT_COMPARABLE):
        made = submitted(board(source, size), submit or ())
        if code_allowed(allow_code):
            import_from(Path(source).parent if source.endswith(".toml") else Path.cwd())
            import_from(Path.cwd())
        if listing:
            width = max(len(one.name) for one in made.entries)
            say(*(f"task: {one.name}" for one in made.tasks))
            say(*(f"{one.name:{width}}  {', '.join(one.tracks)}" for one in made.entries))
            return
        only = [*(entry or ()), *(submit or ())]
        with ExitStack() as stack:
            tables = run_board(
                *(made, out, data or default_root()),
                only=only,
                tasks=task or (),
                workers=workers,
                listen=lambda name: stack.enter_context(listener(name)),
                allow_code=allow_code,
                engine=open_engine(engine, address, workers, allow_code=allow_code),
            )
        text = as_json(made, size, tables)
        write_atomically(out / "leaderboard.json", text.encode())
        write_atomically(out / "index.html", page(json.loads(text)).encode())
        if record is not None:
            _keep(record, source, text)
        lost = [line for line in tables if line["trials"] and not line["accuracy"]]
        say(*(f"{line['entry']}, {line['track']}: {line['note']}" for line in tables if not line["accuracy"]))
        say(*(f"{name}: has no part in these tasks" for name in only if name not in {line["entry"] for line in tables}))
        say("", f"{out / 'index.html'} has the tables, leaderboard.json the numbers")
        if lost:
            raise typer.Exit(cli.INCOMPLETE)


def _keep(record: Path, source: str, text: str) -> None:
    """The numbers as a file, and the page of all of them; lines of other entries stay."""
    from leakgauge.harness.gate.baseline import BaselineError
    from leakgauge.harness.study.standings import joined
    from leakgauge.harness.study.store import write_atomically
    from leakgauge.reports.charts.files import chart_files
    from leakgauge.reports.charts.plane import alone
    from leakgauge.reports.leaderboard import charts, headline, scoreboard

    folder = record / str(json.loads(text)["size"])
    path = folder / "leaderboard.json"
    try:
        kept = joined(path.read_text("utf-8") if path.exists() else text, text)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BaselineError(f"{path}: expected the numbers of an earlier --record: {error!r}; delete it") from error
    made, pictures, drawn = json.loads(kept), list[str](), dict[str, str]()
    before = json.loads(path.read_text("utf-8"))["lines"] if path.exists() else []
    if len(before) > len(made["lines"]):
        say(f"{path}: {len(before) - len(made['lines'])} lines of another board are dropped")
    write_atomically(path, kept.encode())
    for number, (title, picture) in enumerate(headline(made).items()):
        name = f"headline-{number}.svg"
        write_atomically(folder / name, alone(picture, title).encode())
        pictures.append(f"{folder.name}/{name}")
    for chart in (one for track in made["tracks"] for one in charts(made, track)):
        for name, content in chart_files([chart], "kept", ["svg"]):
            write_atomically(folder / name, content)
            drawn[chart.name] = f"{folder.name}/{name}"
    command = f"leakgauge leaderboard {source} --size {folder.name} --record {record}"
    page = f"# The leaderboard at the size {folder.name}\n\nWritten by `{command}`.\n\n"
    write_atomically(folder.with_suffix(".md"), (page + scoreboard(made, pictures, drawn)).encode())
