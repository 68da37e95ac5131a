"""The file of a board: what the leaderboard compares.

A board is a TOML file, only data.

| key | meaning |
|---|---|
| `tasks` | `name`, `data`, `model`, `federation`: clients and records; `grid`: see below; `epsilons` of its own |
| `tracks` | `name`, `title`, what a guarantee protects (`unit`, `relation`), against whom (`adversary`), |
| | `tasks` (none: all), `federation`, `grid` |
| `entries` | `defense`, and the names of its `tracks` and `tasks`; `federation` and `grid` over those of the track; |
| | `epsilons = []`: as published, without a goal; `bits`: one entry each; `good_for`: a sentence |
| `epsilons`, `seeds` | proved epsilons of the whole run, and the number of seeds of the final trainings |
| `stages` | tuning: `rounds` (share of the rounds that run), `settings` (the number left), `seeds` |
| `attacks` | on the first final training of each entry, as in a study, by the track's adversary; by the one of its |
| | `threat` where that adversary sees too little; if both do, the attack is left out |
| `audit` | trials of the audit of each entry with an epsilon; 0: none |
| `scale.SIZE` | values that replace those of the board at this size; a table in place of a list goes to each of it |

`grid` lists values of fields of the federation, of the defense's parameters (`clip`), and of two others: `step`, how
far one clipped update of the first round finally moves the model, which is learning rate times clip (1 for a defense
without one) over 1 - server momentum; and `path`, the number of rounds times `step`. If all clients send in each round,
and noise of one epsilon grows with the square root of the rounds, the noise of the final model depends on the path, and
hardly on the number of rounds. If `participants` is larger than the number of clients, all take part. Values of a task
replace those of a track under the same name, and those of an entry replace both; an entry's `path`, `step` or `lr` also
replaces the others. Each entry tries as many combinations, drawn by the same key, or all if there are fewer.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from leakgauge.harness.core.cases import gathered
from leakgauge.harness.core.cell import Size
from leakgauge.harness.core.errors import StudyError
from leakgauge.harness.core.labels import counted
from leakgauge.harness.federation import registry
from leakgauge.harness.federation.registry import ParameterError
from leakgauge.harness.study.goal import Adversary
from leakgauge.harness.study.recipes import merged, scalable

Table = dict[str, Any]
Epsilon = Annotated[float, Field(gt=0)]
Count = Annotated[int, Field(gt=0)]
_STRICT = {"extra": "forbid"}


@dataclass(frozen=True)
class Place:
    """A task of the board: data, model, and how many clients share the records.

    Attributes:
        grid: values for names that a track's grid has.
        epsilons: empty: those of the board.
    """

    __pydantic_config__: ClassVar[dict[str, str]] = _STRICT
    name: str
    data: str
    model: str
    federation: Table = field(default_factory=dict)
    grid: Table = field(default_factory=dict)
    epsilons: tuple[Epsilon, ...] = ()


@dataclass(frozen=True)
class Track:
    """Entries with one unit and adversary: who has to be trusted, and what is protected. `tasks`: names; empty: all.

    `relation`: see `Goal`.
    """

    __pydantic_config__: ClassVar[dict[str, str]] = _STRICT
    name: str
    title: str
    adversary: Adversary
    unit: Literal["record", "client"] = "client"
    relation: Literal["add-remove", "any-two-inputs"] | None = None
    tasks: tuple[str, ...] = ()
    federation: Table = field(default_factory=dict)
    grid: Table = field(default_factory=dict)


@dataclass(frozen=True)
class Entry:
    """A defense with its fixed parameters.

    Attributes:
        epsilons: None: those of the task or the board; empty: no goal, the defense is as its parameters are.
        bits: values of the defense's `bits`; each is an entry of its own.
        tasks: names of the tasks; empty: all of its tracks.
        good_for: what the defense is good for, in a sentence.
    """

    __pydantic_config__: ClassVar[dict[str, str]] = _STRICT
    name: str
    defense: Table
    tracks: tuple[str, ...]
    federation: Table = field(default_factory=dict)
    grid: Table = field(default_factory=dict)
    epsilons: tuple[Epsilon, ...] | None = None
    bits: tuple[int, ...] = ()
    tasks: tuple[str, ...] = ()
    good_for: str = ""


@dataclass(frozen=True)
class Stage:
    """A stage of tuning: the share of a training's rounds that run, the settings that are tried, and the seeds."""

    __pydantic_config__: ClassVar[dict[str, str]] = _STRICT
    rounds: Annotated[float, Field(gt=0, le=1)]
    settings: Count
    seeds: Count = 1


@dataclass(frozen=True)
class Board:
    """A board at one size."""

    __pydantic_config__: ClassVar[dict[str, str]] = _STRICT
    name: str
    title: str
    tasks: tuple[Place, ...]
    tracks: tuple[Track, ...]
    entries: tuple[Entry, ...]
    epsilons: tuple[Epsilon, ...]
    stages: tuple[Stage, ...]
    attacks: tuple[Table, ...] = ()
    seeds: Count = 5
    audit: int = 0


def boards() -> dict[str, Path]:
    """The files of the shipped boards, by name."""
    root = Path(str(resources.files("leakgauge.studies"))) / "boards"
    return {path.stem: path for path in sorted(root.glob("*.toml"))}


def board(source: str, size: Size) -> Board:
    """A board by name or file, at a size.

    Raises:
        UnknownNameError: there is no such board.
        StudyError: the board is invalid.
    """
    name, table = scalable("board", source, boards())
    scale = table.pop("scale", {})
    try:
        made = registry.construct(Board, {"name": name, **merged(table, scale.get(size, {}))})
    except ParameterError as error:
        raise StudyError(source, [f"{at}: {text}" if at else text for at, text in error.problems]) from error
    made = dataclasses.replace(made, entries=tuple(one for entry in made.entries for one in _by_bits(entry)))
    names = {track.name for track in made.tracks}
    problems = [
        f"entries: {entry.name}: no track {name!r}; known: {', '.join(sorted(names))}"
        for entry in made.entries
        for name in entry.tracks
        if name not in names
    ]
    tasks = {place.name for place in made.tasks}
    listed = [name for track in made.tracks for name in track.tasks]
    listed += [name for entry in made.entries for name in entry.tasks]
    problems += [f"tasks: no task {name!r}; known: {', '.join(sorted(tasks))}" for name in listed if name not in tasks]
    problems += [f"entries: {name}: expected one of each name" for name in _repeated(one.name for one in made.entries)]
    problems += [
        f"tasks: {place.name}: expected {key} > 0 in federation, got {place.federation.get(key, 'none')}"
        for place in made.tasks
        for key in ("clients", "samples", "validation")
        if not isinstance(count := place.federation.get(key), int) or count < 1
    ]
    tuned = {name for track in made.tracks for name in track.grid}
    tuned |= {name for entry in made.entries for name in entry.grid}
    problems += [
        f"tasks: {place.name}: grid: no track or entry tunes {name!r}; known: {', '.join(sorted(tuned))}"
        for place in made.tasks
        for name in sorted(place.grid.keys() - tuned)
    ]
    grids = [(one.name, one.grid) for one in made.tasks] + [(one.name, one.grid) for one in made.tracks]
    grids += [(one.name, one.grid) for one in made.entries]
    problems += [
        f"{name}: grid: expected a list of one value or more for {each!r}"
        for name, grid in grids
        for each, values in grid.items()
        if not isinstance(values, list) or not values
    ]
    problems += ["stages: expected one stage of tuning or more"] if not made.stages else []
    if problems:
        raise StudyError(source, problems)
    return made


def _by_bits(entry: Entry) -> Iterator[Entry]:
    for bits in entry.bits:
        name = f"{entry.name}, {counted(bits, 'bit')}"
        yield dataclasses.replace(entry, name=name, defense={**entry.defense, "bits": bits}, bits=())
    if not entry.bits:
        yield entry


def submitted(made: Board, defenses: Sequence[str]) -> Board:
    """The board with a defense of a user, `module:Class`, in every track whose epsilon is solved."""
    solved = {name for entry in made.entries if entry.epsilons != () for name in entry.tracks}
    tracks = tuple(track.name for track in made.tracks if track.name in solved)
    more = [Entry(name, {"name": name}, tracks) for name in dict.fromkeys(defenses)]
    return dataclasses.replace(made, entries=(*made.entries, *more))


def _repeated(names: Iterable[str]) -> list[str]:
    return [name for name, alike in gathered((name, 1) for name in names).items() if len(alike) > 1]
