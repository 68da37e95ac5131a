"""How far the leaderboard's tuning stays behind the best of more settings.

python benchmarks/regret.py FOLDER ENTRY ... [--size quick] [--task NAME] [--epsilon 8] [--settings 25] [--workers 2]

Each entry is tuned as on the board. Beside it, this many settings of a wider grid, and all that the board tried, are
trained for all rounds with the seeds of the final trainings, and tested on test records. The regret is the best mean
accuracy among them, minus that of the setting that the board chose. The best of many noisy means is too high; so the
last column chooses the best on half of the seeds, and compares on the other half.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from leakgauge.harness.core.cell import Size
from leakgauge.harness.core.rng import Key, permutation
from leakgauge.harness.data import default_root
from leakgauge.harness.study.board import Board, board
from leakgauge.harness.study.leaderboard import accuracy_of, plain, run_board
from leakgauge.harness.study.run import run_study
from leakgauge.harness.study.study import Study, expand
from leakgauge.harness.study.tuning import Line, lines_of, solved

WIDER: dict[str, list[float]] = {
    "clip": [0.02, 0.05, 0.1, 0.2, 0.5],
    "step": [1.0, 2.0, 5.0, 10.0, 20.0],
    "server_momentum": [0.0, 0.5, 0.9],
    "rounds": [10, 20, 40, 80],
}
"""Values beside those of the board, for the names that an entry's grid has; no more rounds than the board has."""


def wide(line: Line) -> list[dict[str, Any]]:
    """The settings of a wider grid, in the order of another key than the board's."""
    wider = {name: {*values, *WIDER.get(name, [])} for name, values in line.grid.items()}
    if paths := sorted(wider.get("path", ())):  # between those of the board, and beyond
        wider["path"] |= {paths[0] / 2, 2 * paths[-1], *(1.5 * path for path in paths[:-1])}
    wider["rounds"] = {number for number in wider["rounds"] if number <= max(line.grid["rounds"])}
    every = list(expand({name: sorted(values) for name, values in wider.items()}))
    return [every[at] for at in permutation(Key(1).child("regret", line.entry.name), len(every))]


def narrowed(made: Board, epsilon: float | None) -> Board:
    """The board without attacks and audits, and perhaps with one epsilon."""
    made = dataclasses.replace(made, attacks=(), audit=0)
    if epsilon is None:
        return made
    tasks = tuple(dataclasses.replace(place, epsilons=()) for place in made.tasks)
    entries = tuple(dataclasses.replace(entry, epsilons=None) if entry.epsilons else entry for entry in made.entries)
    return dataclasses.replace(made, tasks=tasks, entries=entries, epsilons=(epsilon,))


def compared(made: Board, folder: Path, entries: Sequence[str], asked: argparse.Namespace) -> Iterator[str]:
    """A line for each task, track and epsilon of the entries."""
    run = {"workers": asked.workers, "only": entries, "tasks": asked.task, "listen": lambda name: None}
    tables = run_board(made, folder, asked.data, **run)
    done = {(each["task"], each["track"], each["entry"], each["epsilon"]): each for each in tables}
    lines = [
        line
        for line in lines_of(made, entries, asked.task)
        if line.entry.name in entries and done[_key(line)]["trials"]
    ]
    for line in lines:
        tried = [trial["setting"] for trial in done[_key(line)]["trials"]]
        more = solved(line, wide(line), asked.data, False, [])
        line.trials = [*islice(more, asked.settings), *solved(line, tried, asked.data, False, [])]
    specs = [trial.at(seed) for line in lines for trial in line.trials for seed in range(made.seeds)]
    study = Study("regret", "regret", tuple({spec.id: plain(spec) for spec in specs}.values()))
    found = run_study(study, folder=folder / "wide", data=asked.data, workers=asked.workers, merge=True).trainings
    yield "chosen  best   regret  by halves  entry"
    for line in lines:
        key = _key(line)
        scores = np.array(
            [[accuracy_of(found.get(trial.at(s).id)) for s in range(made.seeds)] for trial in line.trials]
        )
        if done[key]["accuracy"] and len(scores):
            mine, best = np.array(done[key]["accuracy"]), int(scores.mean(1).argmax())
            regret, halves = scores[best].mean() - mine.mean(), np.mean(list(_by_halves(scores, mine)))
            name = ", ".join(map(str, key))
            numbers = f"{mine.mean():.3f}   {scores[best].mean():.3f}  {regret:+.3f}  {halves:+.3f}"
            yield f"{numbers}     {name}: {line.trials[best].setting}"


def _key(line: Line) -> tuple[str, str, str, float | None]:
    return line.place.name, line.track.name, line.entry.name, line.epsilon


def _by_halves(scores: Any, mine: Any) -> Iterator[float]:
    odd = np.arange(scores.shape[1]) % 2 == 1
    for one in (odd, ~odd):
        yield float(scores[scores[:, one].mean(1).argmax(), ~one].mean() - mine[~one].mean())


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("entries", nargs="+")
    parser.add_argument("--size", type=Size, default=Size.QUICK)
    parser.add_argument("--task", nargs="*", default=(), help="only these tasks of the board")
    parser.add_argument("--epsilon", type=float, help="only this epsilon")
    parser.add_argument("--settings", type=int, default=25)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--data", type=Path, default=default_root())
    words = parser.parse_args()
    chosen = narrowed(board("leaderboard", words.size), words.epsilon)
    for text in compared(chosen, words.folder, words.entries, words):
        print(text, flush=True)
