"""The leaderboard: each defense at its best, by who has to be trusted and what is protected.

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
| | `threat` where that adversary sees too little; `audit`: trials |
| `scale.SIZE` | values that replace those of the board at this size |

`grid` lists values of fields of the federation, of the defense's parameters (`clip`), and of two others: `step`, how
far one clipped update finally moves the model, which is learning rate times clip over 1 - server momentum; and `path`,
the number of rounds times `step`. If all clients send in each round, and noise of one epsilon grows with the square
root of the rounds, the noise of the final model depends on the path, and hardly on the number of rounds. If
`participants` is larger than the number of clients, all take part. Values of a task replace those of a track under the
same name, and those of an entry replace both; one of `path`, `step` and `lr` replaces the others. Each entry tries as
many combinations, drawn by the same key.

The noise follows from epsilon by a goal (`study.goal`), at delta = 1 / N^1.1, where N is the number of clients or
records. An entry whose proof does not hold against a track's adversary is not in the track, nor one whose messages are
added up before they reach a server that is to see each of them.

Tuning is successive halving on validation records, with the same clients, batches and first weights for all settings;
early stages end a training early and compare only settings with one number of rounds. The winner is trained anew, with
other seeds, and is tested on test records.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib import resources
from itertools import chain, combinations, islice
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import Field

from leakgauge.harness.core.cases import gathered
from leakgauge.harness.core.cell import Cell, FederationSpec, Scalar, Size, TrainingSpec
from leakgauge.harness.core.code import code_allowed, named_code
from leakgauge.harness.core.errors import StudyError, unknown
from leakgauge.harness.core.labels import UNDEFENDED, counted, part_text
from leakgauge.harness.core.rating import Ratings
from leakgauge.harness.core.result import Run, TrainingRecord
from leakgauge.harness.core.rng import Key, permutation
from leakgauge.harness.core.stored import canonical, to_data
from leakgauge.harness.core.threats import ThreatMismatch, View, require
from leakgauge.harness.data import DataSet
from leakgauge.harness.federation import registry
from leakgauge.harness.federation.registry import ParameterError
from leakgauge.harness.federation.round import participants
from leakgauge.harness.study.engine import Open
from leakgauge.harness.study.goal import KEY, Adversary, Goal, proved_at, solve
from leakgauge.harness.study.prepare import prepare
from leakgauge.harness.study.recipes import merged, scalable
from leakgauge.harness.study.run import run_study
from leakgauge.harness.study.schedule import Listener
from leakgauge.harness.study.standings import rank
from leakgauge.harness.study.study import Study, expand, resolve

Table = dict[str, Any]
Epsilon = Annotated[float, Field(gt=0)]
T = TypeVar("T")
_STRICT = {"extra": "forbid"}

_MOST = 60  # records of a victim's message
_SPARE = 2  # settings that are tried in place of one that does not reach its epsilon, for each that is asked for
_TUNING = 1000  # the first seed of tuning; the final trainings have the seeds from 0 on
_AGAINST: tuple[Adversary, ...] = ("server", "aggregator", "participant", "public")  # who sees less and less
_FIELDS = {one.name for one in dataclasses.fields(FederationSpec)}
_AUDITED = ("code", "strict", "proved", "unit", "horizon", "threat", "rounds", "clients", "trials")
_LENGTHS = {"path", "step", "lr"}  # names of a grid, each of which sets the learning rate


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
        epsilons: None: those of the board; empty: no goal, the defense is as its parameters are.
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
    rounds: float
    settings: int
    seeds: int = 1


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
    seeds: int = 5
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
    solved = {name for entry in made.entries if entry.epsilons is None for name in entry.tracks}
    tracks = tuple(track.name for track in made.tracks if track.name in solved)
    more = [Entry(name, {"name": name}, tracks) for name in defenses]
    return dataclasses.replace(made, entries=(*made.entries, *more))


def _repeated(names: Iterable[str]) -> list[str]:
    return [name for name, alike in gathered((name, 1) for name in names).items() if len(alike) > 1]


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
        return _delta(self.spec["samples" if self.track.unit == "record" else "clients"])

    def goal(self, epsilon: float, adversary: Adversary) -> Goal:
        """This epsilon of the whole run for the track's unit, at this delta."""
        track, delta = self.track, self.delta
        return Goal(epsilon, unit=track.unit, adversary=adversary, delta=delta, relation=track.relation)

    @property
    def trusts_sums(self) -> bool:
        """Whether epsilon is to hold against a server that sees every message, and the defense sends only sums."""
        alone = self.epsilon is not None and self.track.adversary == "server"
        return alone and registry.build("defense", self.entry.defense["name"], {}).superposes

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
        known = registry.build("defense", defense["name"], {}).parameters()
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
            federation["participants"] = federation["clients"] // federation["rounds"]
        if self.epsilon is not None:
            if known.get("delta") is not None:
                defense.setdefault("delta", self.delta)
            defense[KEY] = {**dataclasses.asdict(self.goal(self.epsilon, self.track.adversary)), **defense.get(KEY, {})}
        task = {"data": self.place.data, "model": self.place.model}
        return {"name": "leaderboard", "tasks": [task], "federations": [federation], "defenses": [defense]}


def _lines(made: Board, only: Sequence[str]) -> list[Line]:
    """Every entry on every task, track and epsilon."""
    if wrong := sorted({*only} - {entry.name for entry in made.entries}):
        raise unknown("entry", wrong[0], [entry.name for entry in made.entries])
    tracks = {track.name: track for track in made.tracks}
    return [
        Line(place, track, entry, epsilon)
        for place in made.tasks
        for name, track in tracks.items()
        for entry in made.entries
        if place.name in (track.tasks or [place.name])
        and place.name in (entry.tasks or [place.name])
        and name in entry.tracks
        and (not only or entry.name in only or entry.defense["name"] == UNDEFENDED)
        for epsilon in ((place.epsilons or made.epsilons) if entry.epsilons is None else entry.epsilons or (None,))
    ]


def _begin(line: Line, number: int, root: Path, allow_code: bool) -> None:
    """Solve the noise of this many settings; an entry without any that reaches its epsilon stays out, with the reason.

    In place of a setting that does not reach its epsilon comes the next one of the grid.
    """
    if line.trusts_sums:
        line.note = "Its messages are added up on the way, so whoever adds them has to be trusted"
        return
    notes = list[str]()
    line.trials = [*islice(_solved(line, line.settings(number), root, allow_code, notes), number)]
    line.left = line.trials
    line.note = "" if line.trials else notes[0]


def _solved(
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


def _kept(trials: Sequence[Trial], number: int, *, whole: bool) -> list[Trial]:
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


def run_board(
    made: Board,
    out: Path,
    root: Path,
    *,
    only: Sequence[str] = (),
    workers: int | None = None,
    listen: Callable[[str], Listener],
    allow_code: bool = False,
    engine: Open | None = None,
) -> list[Table]:
    """Tune, train and attack every entry; one table of plain data for each line of the board.

    Finished trainings and attacks are kept in `out`; the same call continues there.

    Args:
        only: names of the entries to run; the undefended ones run as well. Empty: all.
        listen: gives the listener for the progress of a step, by its name.
        engine: as in `run_study`.

    Raises:
        StudyError: an entry or an attack is invalid; raised before anything runs.
        UnknownNameError: there is no such entry.
    """
    lines = _lines(made, only)
    named = named_code(
        [*(line.entry.defense.get("name") for line in lines), *(one.get("name") for one in made.attacks)]
    )
    if named and not code_allowed(allow_code):  # before anything builds the defense
        text = f"{named[0]!r} names code to import; pass --allow-code if you trust it"
        raise StudyError(made.name, [text])
    for line in lines:
        _begin(line, made.stages[0].settings, root, allow_code)
    ready = {(line.track.name, line.place.name): line for line in lines if line.trials}
    for line in ready.values():
        _final(made, line, line.trials[0], root, allow_code)

    def trained(name: str, cells: Iterable[Cell]) -> Run:
        asked = Study(name, made.title, tuple({cell.id: cell for cell in cells}.values()))
        own = functools.partial(run_study, asked, out / "runs", data=root, workers=workers, merge=True)
        return own(listen=listen(name), engine=engine)

    def narrow(number: int, before: Stage) -> None:
        for line in lines:
            line.left = _kept(line.left, number, whole=before.rounds == 1)

    for number, stage in enumerate(made.stages):
        if number:
            narrow(stage.settings, made.stages[number - 1])
        seeds = range(_TUNING, _TUNING + stage.seeds)
        asked = [(trial, [trial.at(seed, stage) for seed in seeds]) for line in lines for trial in line.left]
        run = trained(f"tuning, stage {number + 1}", (_plain(spec) for _, specs in asked for spec in specs))
        for trial, specs in asked:
            trial.scores.append([_accuracy(run.trainings.get(spec.id)) for spec in specs])
    narrow(1, made.stages[-1])
    final = [[cell for trial in line.left for cell in _final(made, line, trial, root, allow_code)] for line in lines]
    run = trained("final trainings and attacks", chain(*final))
    # the folder may hold attacks of other boards and tracks on the same trainings
    its = (dataclasses.replace(run, cells=tuple(cells)) for cells in final)
    tables = [_result(made, line, own, root) for line, own in zip(lines, its, strict=True)]
    rank(tables)
    return tables


@functools.cache
def _blind() -> Cell:
    table = {"name": "x", "tasks": [{"data": "digits", "model": "linear"}], "federations": [{}]}
    return resolve({**table, "defenses": [{"name": UNDEFENDED}]}).cells[0]


def _plain(spec: TrainingSpec) -> Cell:
    """A training without an attack."""
    return dataclasses.replace(_blind(), training=spec)


def _final(made: Board, line: Line, trial: Trial, root: Path, allow_code: bool) -> list[Cell]:
    """The final trainings: all seeds, and the attacks on the first of them.

    They are those of the track's adversary. One that sees too little for an attack leaves it to the adversary that the
    board states for the attack, if it does: that shows what an entry hides from nobody else.
    """
    defense = {"name": trial.training.defense.name, **trial.training.defense.parameters}
    adversary, study = line.track.adversary, {**line.table(trial.setting), "defenses": [defense]}
    first = _first(made, line, trial)
    ready, cells = prepare(first, root), list[Cell]()
    for given in made.attacks:
        needs, asked = registry.build("attack", given["name"], {}).needs, given.get("target", {})
        views = _seen(adversary, given), given.get("threat")
        if (threat := next((one for one in views if one and _suffices(one, needs)), None)) is None:
            continue
        drawn = ready.key.child("training"), asked.get("round", 0), sorted(ready.clients)
        senders = participants(*drawn, ready.setting)
        attack = {**given, "threat": threat, "target": _target(asked, first.federation, ready.data, senders)}
        crossed = resolve({**study, "lineup": False, "attacks": [attack]}, line.entry.name, allow_code=allow_code)
        cells += [dataclasses.replace(cell, training=first) for cell in crossed.cells]
    return [*cells, *(_plain(first if seed == 0 else trial.at(seed)) for seed in range(made.seeds))]


def _first(made: Board, line: Line, trial: Trial) -> TrainingSpec:
    """The first final training, with the audit of a defense that has an epsilon."""
    return dataclasses.replace(trial.at(0), audit=0 if line.epsilon is None else made.audit)


def _target(given: Table, federation: FederationSpec, data: DataSet, senders: Sequence[int]) -> Table:
    """The target of an attack in this federation, which may be smaller than the attack asks for.

    Victims have as many records as a client's message, at most `_MOST`, and all victims have different ones. A client
    that does not send in the target's round is the last one before it that does, or the first. Members are at most its
    records, non-members at most half of the test records.
    """
    samples, count = federation.samples or 0, int(given.get("count", 1))
    own = samples // federation.clients
    if given.get("kind", "probe") == "probe":
        epochs = federation.algorithm == "fedavg" and federation.local_steps is None
        taken = own if epochs else (federation.batch or own) * (federation.local_steps or 1)
        size = max(1, min(taken, own, _MOST, samples // count))
        return {"batch": size, **given}
    if given["kind"] != "members":
        return given
    before = [client for client in senders if client <= given.get("client", 0)]
    fitting = {"client": (before or senders)[-1 if before else 0], "count": min(count, own)}
    return {**given, **fitting, "outside": min(given.get("outside", count), len(data.test.y) // 2)}


def _suffices(view: str, needs: frozenset[str]) -> bool:
    try:
        require(needs, "", View.parse(view))
    except ThreatMismatch:
        return False
    return True


def _seen(adversary: str, attack: Table) -> str:
    grants = attack.get("threat", "").partition("+")[2]
    return f"{adversary}+{grants}" if grants else adversary


def _accuracy(record: TrainingRecord | None) -> float:
    """The last accuracy; 0 for a training that failed."""
    return 0.0 if record is None else record.evaluations[-1].accuracy or 0.0


def _result(made: Board, line: Line, run: Run, root: Path) -> Table:
    """One line of the board as plain data; `run` has its cells alone."""
    table: Table = {
        "task": line.place.name,
        "track": line.track.name,
        "entry": line.entry.name,
        "epsilon": line.epsilon,
        "adversary": line.track.adversary,
        "delta": line.delta,
        "note": line.note,
        "defense": line.entry.defense["name"],
        "accuracy": [],
        "trials": [
            {"setting": trial.setting, "scores": trial.scores, "kept": trial in line.left}
            for trial in sorted(line.trials, key=lambda one: one not in line.left)
        ],
    }
    if not line.left:
        return table
    trial = line.left[0]
    specs = [_first(made, line, trial), *(trial.at(seed) for seed in range(1, made.seeds))]
    records = [run.trainings.get(spec.id) for spec in specs]
    done = [record for record in records if record is not None]
    failed = [(cell, run.failures[cell.id].message) for cell in run.cells if cell.id in run.failures]
    if len(done) < len(records):
        return {**table, "note": failed[0][1] if failed else "a final training is missing"}
    lost = {f"an attack failed, {cell.attack.name}: {text}" for cell, text in failed}
    first, commit = done[0], done[0].environment.commit[:8]
    bits = 8 * fmean(first.message_bytes) / first.dim
    added = registry.build_defense(specs[0].defense).superposes or line.track.adversary != "aggregator"
    table |= {
        "accuracy": [_accuracy(record) for record in done],
        "settings": part_text(trial.training.defense),
        "federation": {
            name: value
            for name, value in to_data(trial.training.federation).items()
            if value != getattr(FederationSpec(), name)
        },
        "bytes": fmean(first.message_bytes),
        "bits": bits if added else max(bits, 32.0),  # what cannot be added up is decoded first
        "dim": first.dim,
        "proved": {adversary: _proved(line, specs[0], adversary, root) for adversary in _AGAINST},
        "audited": None if first.audited is None else {name: getattr(first.audited, name) for name in _AUDITED},
        "found": list(_found(Ratings(run))),
        "failed": [*(flag.message for flag in first.flags if flag.code == "not-audited"), *sorted(lost)],
        "made_by": f"{commit}{' with changes' * first.environment.dirty}, {first.environment.machine}",
    }
    return table


def _found(ratings: Ratings) -> Iterator[Table]:
    for case in ratings.cases:
        adversary = View.parse(case.cells[0].threat).threat.value
        yield from ({**to_data(one), "adversary": adversary} for one in ratings.findings.get(case.identity, ()))


def _proved(line: Line, spec: TrainingSpec, adversary: Adversary, root: Path) -> float | str:
    """Epsilon of the whole run for a client, whatever the track's unit, at delta = 1 / clients^1.1; or `inf`."""
    clients, summed = line.spec["clients"], registry.build_defense(spec.defense).superposes
    if clients == 1 or (adversary == "server" and summed):
        return "inf"
    asked = Goal(1.0, unit="client", adversary=adversary, delta=_delta(clients), relation=line.track.relation)
    epsilon = proved_at(spec, asked, root)[0]
    return epsilon if math.isfinite(epsilon) else "inf"


def _delta(number: int) -> float:
    return float(f"{number**-1.1:.6g}")


def as_json(made: Board, size: Size, tables: Sequence[Table]) -> str:
    """The board and its lines as JSON; the same code and data give the same bytes."""
    about = {**to_data(made), "size": size}
    return json.dumps({**about, "lines": list(tables)}, indent=1, sort_keys=True) + "\n"
