"""How far the leaderboard's tuning stays behind the best of more settings, on a board at one size.

python benchmarks/regret.py [--board NAME_OR_FILE] [--size quick] [--settings 25] [--seeds 5] [--data FOLDER] FOLDER [ENTRY ...]

Each entry is tuned as on the board. Beside it, this many settings of a wider grid are trained for all rounds, with the
seeds of the final trainings, and tested on test records. The regret of an entry is the best mean accuracy among these
settings, and among those that the board tried, minus that of the setting that the board chose. The best of many noisy
means is too high, so the script also prints the regret against settings that are chosen on half of the seeds and
scored on the other half.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np

from leakgauge.harness.core.cell import Size
from leakgauge.harness.core.rng import Key, permutation
from leakgauge.harness.data import default_root
from leakgauge.harness.study import leaderboard as boards
from leakgauge.harness.study.run import run_study
from leakgauge.harness.study.study import Study, expand

WIDER = {
    "clip": [0.02, 0.05, 0.1, 0.2, 0.5],
    "step": [1.0, 2.0, 5.0, 10.0, 20.0],
    "server_momentum": [0.0, 0.5, 0.9],
    "rounds": [10, 20, 40, 80, 160],
}
"""Values beside those of the board; an entry without a clip, or without one of these, keeps its own values."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("entries", nargs="*")
    parser.add_argument("--board", default="leaderboard")
    parser.add_argument("--size", type=Size, default=Size.QUICK)
    parser.add_argument("--settings", type=int, default=25)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--data", type=Path, default=default_root())
    asked = parser.parse_args()
    made = boards.board(asked.board, asked.size)
    made = boards.dataclasses.replace(made, attacks=(), audit=0, seeds=asked.seeds)
    quiet = lambda name: None  # noqa: E731
    tables = boards.run_board(made, asked.folder, asked.data, only=asked.entries, workers=asked.workers, listen=quiet)
    chosen = {(table["task"], table["track"], table["entry"], table["epsilon"]): table for table in tables}
    lines = [line for line in boards._lines(made, asked.entries) if (line.entry.name in asked.entries)]
    cells, tried = {}, []
    for line in lines:
        grid = {**line.track.grid, **line.entry.grid}
        wider = {name: sorted({*values, *WIDER.get(name, [])}) for name, values in grid.items()}
        every = list(expand(wider))
        order = permutation(Key(1).child("regret", line.entry.name), len(every))[: asked.settings]
        line.settings = lambda number, every=every, order=order: [every[at] for at in order]  # type: ignore[method-assign]
        boards._begin(line, asked.settings, asked.data, False)
        own = boards.Line(line.place, line.track, line.entry, line.epsilon)
        boards._begin(own, made.stages[0].settings, asked.data, False)
        tried.append((line, [*line.trials, *own.trials]))
        for trial in tried[-1][1]:
            for seed in range(asked.seeds):
                cell = boards._plain(trial.at(seed))
                cells[cell.id] = cell
    study = Study("regret", "regret", tuple(cells.values()))
    run = run_study(study, folder=asked.folder / "wide", data=asked.data, workers=asked.workers, merge=True)
    print(f"{'task, track, entry, epsilon':80} chosen  best   regret  regret by halves")
    for line, trials in tried:
        key = line.place.name, line.track.name, line.entry.name, line.epsilon
        mine = np.array(chosen[key]["accuracy"])
        if not len(mine):
            continue
        scores = np.array([[boards._accuracy(run.trainings.get(t.at(s).id)) for s in range(asked.seeds)] for t in trials])
        best = int(scores.mean(1).argmax())
        halves = []
        for first in (slice(None, None, 2), slice(1, None, 2)):
            other = np.setdiff1d(np.arange(asked.seeds), np.arange(asked.seeds)[first])
            at = int(scores[:, first].mean(1).argmax())
            halves.append(scores[at, other].mean() - mine[other].mean())
        text = ", ".join(map(str, key))
        gap = scores[best].mean() - mine.mean()
        print(f"{text:80} {mine.mean():.3f}  {scores[best].mean():.3f}  {gap:+.3f}  {np.mean(halves):+.3f}  {trials[best].setting}")


if __name__ == "__main__":
    main()
