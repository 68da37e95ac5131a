"""The lines of a leaderboard: each entry at each epsilon, the settings that are tried, and those that stay.

The noise follows from epsilon by a goal (`study.goal`), at delta = 1 / N^1.1, where N is the number of clients or
records. An entry whose proof does not hold against a track's adversary is not in the track, nor one whose messages are
added up before they reach a server that is to see each of them.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import combinations, islice
from pathlib import Path
from typing import Any, TypeVar

from leakgauge.harness.core.cell import FederationSpec, Scalar, TrainingSpec
from leakgauge.harness.core.contract import Defense
from leakgauge.harness.core.errors import unknown
from leakgauge.harness.core.labels import UNDEFENDED
from leakgauge.harness.core.rng import Key, permutation
from leakgauge.harness.core.stored import canonical
from leakgauge.harness.federation import registry
from leakgauge.harness.study.board import Board, Entry, Place, Stage, Table, Track
from leakgauge.harness.study.goal import KEY, Adversary, Goal, solve
from leakgauge.harness.study.study import expand, resolve, without

T = TypeVar("T")

TUNING = 1000
"""The first seed of tuning; the final trainings have the seeds from 0 on."""

_SPARE = 2  # settings that are tried in place of one that does not reach its epsilon, for each that is asked for
_FIELDS = {one.name for one in dataclasses.fields(FederationSpec)}
_LENGTHS = {"path", "step", "lr"}  # names of a grid, each of which sets the learning rate


@dataclass
class Trial:
    """One setting of an entry: the values of its grid, its training, and what validation records said.

    Attributes:
        scores: by stage, the accuracy with each seed; 0 for a training that failed.
    """

    setting: dict[str, Scalar]
    training: TrainingSpec
    scores: list[list[float]] = field(default_factory=list)

    @property
    def rounds(self) -> int:
        """The planned number of rounds."""
        return self.training.federation.rounds

    @property
    def score(self) -> float:
        """Mean accuracy of the last stage."""
        return sum(self.scores[-1]) / len(self.scores[-1])

    def at(self, seed: int, stage: Stage | None = None) -> TrainingSpec:
        """The training of a stage of tuning, or the final one."""
        federation = self.training.federation
        if stage is not None:
            stop = math.ceil(stage.rounds * federation.rounds)
            federation = dataclasses.replace(
                *(federation,), evaluate_on="validation", stop_after=stop if stop < federation.rounds else None
            )
        return dataclasses.replace(self.training, federation=federation, seed=seed)


@dataclass
class Line:
    """An entry on a task, in a track, at an epsilon; None: without a goal.

    Attributes:
        trials: all settings that were tried; `left`: those that are still in, at the end the chosen one.
        note: why it has no result.
    """

    place: Place
    track: Track
    entry: Entry
    epsilon: float | None
    trials: list[Trial] = field(default_factory=list)
    left: list[Trial] = field(default_factory=list)
    note: str = ""

    @property
    def spec(self) -> Table:
        """The federation without the values of the grid."""
        return {**self.place.federation, **self.track.federation, **self.entry.federation}

    @property
    def delta(self) -> float:
        """1 / N^1.1 for N clients or records."""
        return delta_of(self.spec["samples" if self.track.unit == "record" else "clients"])

    def goal(self, epsilon: float, adversary: Adversary) -> Goal:
        """This epsilon of the whole run for the track's unit, at this delta."""
        track, delta = self.track, self.delta
        return Goal(epsilon, unit=track.unit, adversary=adversary, delta=delta, relation=track.relation)

    @property
    def trusts_sums(self) -> bool:
        """Whether epsilon is to hold against a server that sees every message, and the defense sends only sums."""
        return self.epsilon is not None and self.track.adversary == "server" and self._fixed().superposes

    def _fixed(self) -> Defense[Any, Any]:
        """The defense with the parameters that are not tuned."""
        given = self.entry.defense
        built: Defense[Any, Any] = registry.build("defense", given["name"], without(given, "name", KEY))
        return built

    @property
    def grid(self) -> Table:
        """The values of each name that is tuned."""
        own = {name: self.place.grid.get(name, values) for name, values in self.track.grid.items()}
        if _LENGTHS & self.entry.grid.keys():
            own = {name: values for name, values in own.items() if name not in _LENGTHS - self.entry.grid.keys()}
        grid = {**own, **self.entry.grid}
        if "participants" in grid:
            grid["participants"] = sorted({min(one, self.spec["clients"]) for one in grid["participants"]})
        return grid

    def settings(self, number: int) -> list[dict[str, Scalar]]:
        """This many settings of all in the grid, drawn by one key and spread over all pairs of values; then others."""
        grid = self.grid
        every = list(expand(grid))
        drawn = [every[at] for at in permutation(Key(0).child("leaderboard", canonical(grid)), len(every))]
        first = _spread(drawn, number)
        return [*first, *[one for one in drawn if one not in first][: _SPARE * number]]

    def table(self, setting: dict[str, Scalar]) -> Table:
        """The study of one setting, as its TOML."""
        federation, defense = dict(self.spec), dict(self.entry.defense)
        known = self._fixed().parameters()
        run: Table = {**dataclasses.asdict(FederationSpec()), **federation, **setting}
        for name, value in setting.items():
            if name in ("step", "path"):
                step = float(value or 0) / (run["rounds"] if name == "path" else 1)
                clip = setting.get("clip", defense.get("clip", known.get("clip"))) if "clip" in known else 1.0
                rate = step * (1 - run["server_momentum"]) / float(clip or 1)
                federation["lr"] = float(f"{rate:.6g}")
            elif name in _FIELDS:
                federation[name] = value
            elif name in known:
                defense[name] = value
        if federation.get("participation") == "turns" and "participants" not in federation:
            federation["participants"] = max(1, federation["clients"] // federation["rounds"])
        if self.epsilon is not None:
            if known.get("delta") is not None:
                defense.setdefault("delta", self.delta)
            defense[KEY] = {**dataclasses.asdict(self.goal(self.epsilon, self.track.adversary)), **defense.get(KEY, {})}
        task = {"data": self.place.data, "model": self.place.model}
        return {"name": "leaderboard", "tasks": [task], "federations": [federation], "defenses": [defense]}


def lines_of(made: Board, only: Sequence[str] = (), tasks: Sequence[str] = ()) -> list[Line]:
    """Every entry on every task, track and epsilon; or only these entries, beside the undefended ones, and tasks.

    Raises:
        UnknownNameError: there is no such entry or task.
    """
    for kind, asked, every in (("entry", only, made.entries), ("task", tasks, made.tasks)):
        if wrong := sorted({*asked} - {one.name for one in every}):
            raise unknown(kind, wrong[0], [one.name for one in every])
    tracks = {track.name: track for track in made.tracks}
    return [
        Line(place, track, entry, epsilon)
        for place in made.tasks
        for name, track in tracks.items()
        for entry in made.entries
        if place.name in (tasks or [place.name])
        and place.name in (track.tasks or [place.name])
        and place.name in (entry.tasks or [place.name])
        and name in entry.tracks
        and (not only or entry.name in only or entry.defense["name"] == UNDEFENDED)
        for epsilon in ((place.epsilons or made.epsilons) if entry.epsilons is None else entry.epsilons or (None,))
    ]


def begin(line: Line, number: int, root: Path, allow_code: bool) -> None:
    """Solve the noise of this many settings; an entry without any that reaches its epsilon stays out, with the reason.

    In place of a setting that does not reach its epsilon comes the next one of the grid.
    """
    if line.trusts_sums:
        line.note = "Its messages are added up on the way, so whoever adds them has to be trusted"
        return
    notes = list[str]()
    line.trials = [*islice(solved(line, line.settings(number), root, allow_code, notes), number)]
    line.left = line.trials
    line.note = "" if line.trials else notes[0]


def solved(
    line: Line, settings: Iterable[dict[str, Scalar]], root: Path, allow_code: bool, notes: list[str]
) -> Iterator[Trial]:
    """The settings that reach their epsilon; `notes` gets the reasons of the others."""
    for setting in settings:
        study = resolve(line.table(setting), line.entry.name, allow_code=allow_code)
        cells, said = solve(study.cells, root, lambda _: {})
        notes += said
        yield from (Trial(setting, cell.training) for cell in cells[:1])


def _spread(settings: Sequence[dict[str, Scalar]], number: int) -> list[dict[str, Scalar]]:
    """This many, each the first of those whose pairs of values came least often for their number."""
    kinds = {name: len({each[name] for each in settings}) for name in settings[0]}
    left, seen = list(settings), Counter[object]()

    def often(one: dict[str, Scalar]) -> int:
        return sum(seen[a, b] * kinds[a[0]] * kinds[b[0]] for a, b in combinations(one.items(), 2))

    chosen = list[dict[str, Scalar]]()
    while left and len(chosen) < number:
        chosen.append(min(left, key=often))
        left.remove(chosen[-1])
        seen.update(combinations(chosen[-1].items(), 2))
    return chosen


def kept(trials: Sequence[Trial], number: int, *, whole: bool) -> list[Trial]:
    """The best settings; after a part of the rounds, first the best of each number of rounds, then the second best."""
    order = sorted(trials, key=lambda trial: -trial.score)
    return (order if whole else _in_turn(order, [trial.rounds for trial in order]))[:number]


def _in_turn(items: Sequence[T], kinds: Sequence[object]) -> list[T]:
    """The first item of each kind, then the second of each, and so on."""
    seen, places = Counter[object](), list[int]()
    for kind in kinds:
        places.append(seen[kind])
        seen[kind] += 1
    return [items[at] for at in sorted(range(len(items)), key=lambda at: places[at])]


def delta_of(number: int) -> float:
    """1 / number^1.1, to six digits."""
    return float(f"{number**-1.1:.6g}")
