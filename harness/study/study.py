"""Studies: a TOML file is a grid of tasks x federations x defenses x attacks x threats x seeds.

A list where one value stands expands the grid. All that is wrong with a file is said at once, each with its path, the
value that came and what was expected.
"""

from __future__ import annotations

import functools
import itertools
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from leakgauge.harness.core.cell import Cell, FederationSpec, PartSpec, Target, TaskSpec, TrainingSpec, fingerprint
from leakgauge.harness.core.errors import StudyError, unknown
from leakgauge.harness.core.threats import ThreatMismatch, View, require
from leakgauge.harness.federation import registry
from leakgauge.harness.federation.registry import ParameterError, explain

T = TypeVar("T")
Table = dict[str, Any]


class _File(BaseModel):
    """The outermost keys of a study."""

    model_config = ConfigDict(extra="forbid", strict=True)
    name: str
    title: str = ""
    seeds: list[int] = Field(default=[0], min_length=1)
    threats: list[str] = Field(default=["server"], min_length=1)
    audit: int = Field(default=0, ge=0)
    tasks: list[Table] = Field(min_length=1)
    federations: list[Table] = Field(min_length=1)
    defenses: list[Table] = Field(min_length=1)
    attacks: list[Table] = Field(min_length=1)


@dataclass(frozen=True)
class Study:
    """A resolved study: its cells, in order, with every default filled in; `text` is the TOML that asked for them."""

    name: str
    title: str
    cells: tuple[Cell, ...]
    text: str = ""

    @property
    def hash(self) -> str:
        """Fingerprint of the cells: two studies with one hash ask the same questions."""
        return fingerprint([cell.id for cell in self.cells])

    @functools.cached_property
    def cells_of(self) -> dict[str, tuple[Cell, ...]]:
        """The cells on each training, by its id, in the order of their first cell."""
        found: dict[str, list[Cell]] = {}
        for cell in self.cells:
            found.setdefault(cell.training.id, []).append(cell)
        return {name: tuple(cells) for name, cells in found.items()}

    @property
    def trainings(self) -> tuple[TrainingSpec, ...]:
        """The distinct trainings, in the order of their first cell."""
        return tuple(cells[0].training for cells in self.cells_of.values())


def shipped() -> dict[str, str]:
    """Name and title of each study that ships with leakgauge."""
    found = {}
    for item in sorted(resources.files("leakgauge.studies").iterdir(), key=lambda item: item.name):
        if item.name.endswith(".toml"):
            found[item.name.removesuffix(".toml")] = str(tomllib.loads(item.read_text("utf-8")).get("title", ""))
    return found


def load_study(source: str | Path) -> Study:
    """The study in a TOML file, or the shipped one of that name.

    Raises:
        StudyError: the file cannot be read, is not TOML, or asks for something impossible: all problems at once.
        UnknownNameError: neither a file nor a shipped study.
    """
    path = Path(source)
    if path.is_file():
        try:
            text = path.read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise StudyError(str(source), [f"cannot be read: {error}"]) from error
    elif str(source) in (known := shipped()):
        text = resources.files("leakgauge.studies").joinpath(f"{source}.toml").read_text("utf-8")
    else:
        raise unknown("study", str(source), known)
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise StudyError(str(source), [f"is not TOML: {error}"]) from error
    return replace(resolve(table, str(source)), text=text)


def resolve(table: Table, source: str = "study") -> Study:
    """The study that a parsed TOML table describes.

    Raises:
        StudyError: all problems at once.
    """
    try:
        file = _File.model_validate(table)
    except ValidationError as error:
        raise StudyError(source, [_line(*explain(item)) for item in error.errors()]) from error
    problems: list[str] = []
    tasks = list(_all("tasks", file.tasks, _spec(TaskSpec), problems))
    federations = list(_all("federations", file.federations, _spec(FederationSpec), problems))
    defenses = list(_all("defenses", file.defenses, _defense, problems))
    attacks = list(_all("attacks", file.attacks, lambda one: _attack(one, file.threats), problems))
    if len(set(file.seeds)) < len(file.seeds):
        problems.append(f"seeds: got {file.seeds}, expected each seed once")
    for federation, (_, target, _) in itertools.product(federations, attacks):
        last = max(target.looks_at, default=0)
        if last >= federation.rounds:
            problems.append(f"attacks.target.round: looks at round {last}, expected less than {federation.rounds}")
        if (target.client or 0) >= federation.clients:
            problems.append(f"attacks.target.client: got {target.client}, expected less than {federation.clients}")
    if problems:
        raise StudyError(source, problems)
    cells = [
        Cell(TrainingSpec(task, federation, defense, seed, file.audit), attack, target, view)
        for task, federation, defense, seed in itertools.product(tasks, federations, defenses, file.seeds)
        for attack, target, views in attacks
        for view in views
    ]
    unique = {cell.id: cell for cell in cells}
    return Study(file.name, file.title, tuple(unique.values()))


def _line(path: str, text: str) -> str:
    """One problem as a line."""
    return f"{path}: {text}" if path else text


def expand(table: Table) -> Iterator[Table]:
    """Every choice of one value from each list in `table`, lists in tables inside it included; first key slowest."""
    choices: list[list[Any]] = []
    for value in table.values():
        if isinstance(value, list):
            choices.append(value)
        elif isinstance(value, dict):
            choices.append(list(expand(value)))
        else:
            choices.append([value])
    for picked in itertools.product(*choices):
        yield dict(zip(table, picked, strict=True))


def _all(key: str, tables: list[Table], build: Callable[[Table], T], problems: list[str]) -> Iterator[T]:
    """What every expansion of the tables builds; what cannot be built is added to the problems."""
    for number, table in enumerate(tables):
        for one in expand(table):
            try:
                yield build(one)
            except ValidationError as error:
                problems.extend(_line(_at(key, number, path), text) for path, text in map(explain, error.errors()))
            except ParameterError as error:
                problems.extend(_line(_at(key, number, path), text) for path, text in error.problems)
            except (LookupError, ThreatMismatch, ValueError) as error:
                problems.append(f"{key}[{number}]: {error}")


def _at(key: str, number: int, path: str) -> str:
    """`defenses[1].epsilon`."""
    return f"{key}[{number}].{path}" if path else f"{key}[{number}]"


def _spec(kind: type[T]) -> Callable[[Table], T]:
    """A strict builder of a specification dataclass."""
    return lambda table: registry.construct(kind, table)


def _name(table: Table) -> str:
    """The `name` of a defense's or an attack's table."""
    name = table.get("name")
    if not isinstance(name, str):
        raise ValueError(f"name: got {name!r}, expected a string" if "name" in table else "name: missing")
    return name


def _defense(table: Table) -> PartSpec:
    """A defense with its defaults filled in."""
    name = _name(table)
    built = registry.build("defense", name, {key: value for key, value in table.items() if key != "name"})
    return PartSpec(name, built.parameters())


def _attack(table: Table, threats: list[str]) -> tuple[PartSpec, Target, tuple[str, ...]]:
    """An attack with its defaults filled in, where it looks, and the adversaries who run it."""
    name = _name(table)
    built = registry.build(
        "attack", name, {key: value for key, value in table.items() if key not in ("name", "target", "threat")}
    )
    try:
        target = _spec(Target)(table.get("target", {"kind": "members"} if built.kind == "membership" else {}))
    except ValidationError as error:
        found = map(explain, error.errors())
        raise ParameterError(name, [(f"target.{path}" if path else "target", text) for path, text in found]) from error
    if (target.kind == "members") != (built.kind == "membership"):
        raise ValueError(f"target.kind: got {target.kind!r}, which does not go with a {built.kind} attack")
    looks = sorted(built.needs & {"messages", "models"})
    if looks and target.round is None:
        raise ValueError(f"target.round: attack {name!r} looks at {' and '.join(looks)}; say from which round on")
    views = []
    for text in [table["threat"]] if "threat" in table else threats:
        view = View.parse(text)
        require(built.needs, name, view)
        views.append(view.name)
    return PartSpec(name, built.parameters()), target, tuple(views)
