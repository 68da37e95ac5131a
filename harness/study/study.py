"""Studies: a TOML file is a grid of tasks x federations x defenses x attacks x threats x seeds.

A list instead of a single value is swept; the lists of keys that `zip` names advance together. All problems of a file
are reported together, each with its path, the value and the expected value.
"""

from __future__ import annotations

import difflib
import itertools
import math
import tomllib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from leakgauge.harness.core.cases import gathered
from leakgauge.harness.core.cell import Cell, FederationSpec, Malice, PartSpec, Target, TaskSpec, TrainingSpec
from leakgauge.harness.core.code import code_allowed, import_from, named_code, task_code
from leakgauge.harness.core.errors import StudyError, unknown
from leakgauge.harness.core.files import text as text_of
from leakgauge.harness.core.metrics import MANY, METRICS
from leakgauge.harness.core.rows import QUANTITIES
from leakgauge.harness.core.stored import fingerprint
from leakgauge.harness.core.threats import ThreatMismatch, View, require
from leakgauge.harness.federation import registry
from leakgauge.harness.federation.registry import ParameterError, explain
from leakgauge.harness.query.lines import Figure
from leakgauge.harness.query.points import OF_ROW, flat, of_cell, paths_of
from leakgauge.harness.query.statements import Statement
from leakgauge.harness.study import goal
from leakgauge.harness.study.titles import shipped as shipped

T = TypeVar("T")
Table = dict[str, Any]
_Attacked = tuple[PartSpec, Target, tuple[str, ...], Malice | None]

OWN = 200
"""The victims of a lineup that a rating needs: about the fewest for a share that is surely near one half."""

MAX_CELLS = 20_000
"""The most cells of a study, before duplicates are dropped; a study with more is probably a mistake."""

MAX_NUMBER = 1_000_000
"""The largest number of clients, rounds, victims, trials and so on."""

ZIP = "zip"
"""The key of a table that names keys whose lists advance together, or a list of such groups."""

_MAX_DEPTH = 8  # the deepest nesting of tables and lists; a study needs five levels

_DEEP = f"tables or lists inside each other are more than {_MAX_DEPTH} deep, which is the limit"

_MAX_INTEGER = 2**63 - 1  # the largest integer that TOML guarantees; the limit of a seed and of a defense's parameter


UTILITY: Table = {"name": "prior", "target": {"count": 1}}
"""The only attack of a study that names none, or on seeds without attacks: blind guessing, which costs no time."""


def _lineup(value: object) -> object:
    if not isinstance(value, int) or value < 0:
        raise ValueError(f"got {value!r}, expected true, false or a number of victims")
    return value


class _File(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    name: str
    title: str = ""
    seeds: list[int] = Field(default=[0], min_length=1)
    threats: list[str] = Field(default=["server"], min_length=1)
    audit: int = Field(default=0, ge=0)
    limit: bool = True
    lineup: Annotated[bool | int, BeforeValidator(_lineup)] = True
    tasks: list[Table] = Field(min_length=1)
    federations: list[Table] = Field(min_length=1)
    defenses: list[Table] = Field(min_length=1)
    attacks: list[Table] = Field(default=[UTILITY], min_length=1)
    strict: bool = False
    exclude: list[Table] = []
    figures: list[Table] = []
    claims: list[Table] = []
    attack_seeds: Annotated[list[int], Field(min_length=1)] | None = None

    @property
    def attacked(self) -> list[int]:
        """The seeds on which attacks and audits run; on the others only accuracy is measured."""
        return self.seeds if self.attack_seeds is None else self.attack_seeds


@dataclass(frozen=True)
class Study:
    """A resolved study: its cells, in order, with every default filled in; `text` is its TOML.

    Defenses with a goal are solved when the study runs; `goals` has the solutions. `notes`: other facts that a reader
    must know. `figures` and `claims`: what is drawn from the results, and what is checked on them.
    """

    name: str
    title: str
    cells: tuple[Cell, ...]
    text: str = ""
    goals: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    figures: tuple[Figure, ...] = ()
    claims: tuple[Statement, ...] = ()

    @property
    def hash(self) -> str:
        """Fingerprint of the cells: studies with the same cells have the same hash."""
        return fingerprint([cell.id for cell in self.cells])

    @cached_property
    def cells_of(self) -> dict[str, tuple[Cell, ...]]:
        """The cells of each training by its id, in the order of the first cell."""
        cells_of = gathered((cell.training.id, cell) for cell in self.cells)
        return {name: tuple(cells) for name, cells in cells_of.items()}

    @property
    def trainings(self) -> tuple[TrainingSpec, ...]:
        """The distinct trainings, in the order of the first cell."""
        return tuple(cells[0].training for cells in self.cells_of.values())


def load_study(
    source: str | Path, *, allow_code: bool = False, max_cells: int = MAX_CELLS, max_number: int = MAX_NUMBER
) -> Study:
    """The study in a TOML file, or the shipped study of this name.

    Args:
        allow_code: whether the file may name code to import, as in `module:Class`; also allowed if the environment
            has LEAKGAUGE_ALLOW_CODE=1. A study that is built in Python needs no permission.
        max_cells, max_number: the most cells, and the largest integer other than a seed or a defense's parameter.

    Raises:
        StudyError: the file cannot be read, is not TOML, is too large, or is invalid; all problems are reported
            together.
        UnknownNameError: `source` is neither a file nor a shipped study.
    """
    try:
        if (path := Path(source)).exists() and not path.is_dir():
            text = text_of(Path(source))
            if code_allowed(allow_code):
                import_from(Path(source).parent)  # for code next to the file that names it
                import_from(Path.cwd())
        elif str(source) in (known := shipped()):
            text = resources.files("leakgauge.studies").joinpath(f"{source}.toml").read_text("utf-8")
        else:
            raise unknown("study", str(source), known)
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise StudyError(str(source), [f"is not TOML: {error}"]) from error
    except (OSError, UnicodeDecodeError) as error:
        raise StudyError(str(source), [f"cannot be read: {error}"]) from error
    except ValueError as error:  # from int, for an integer of thousands of digits
        raise StudyError(str(source), [f"cannot be read: {str(error).partition(';')[0]}"]) from error
    except RecursionError as error:
        raise StudyError(str(source), [_DEEP]) from error
    study = resolve(table, str(source), allow_code=allow_code, max_cells=max_cells, max_number=max_number)
    return replace(study, text=text)


def resolve(
    table: Table,
    source: str = "study",
    *,
    allow_code: bool = False,
    max_cells: int = MAX_CELLS,
    max_number: int = MAX_NUMBER,
    spelled: bool = True,
) -> Study:
    """The study that a parsed TOML table describes.

    Args: as in `load_study`; spelled: refuse names in figures and claims that are nearly, but not quite, known names.

    Raises:
        StudyError: the study is invalid. All problems are reported together, except sizes, which are checked first,
            before anything expands.
    """
    problems = _too_large(table, max_number)
    if problems:
        raise StudyError(source, problems)
    file = _file(table, problems)
    _check_grid(file, source, max_cells)
    trusted = code_allowed(allow_code)
    tasks = list(_all("tasks", file.tasks, partial(_task, trusted=trusted), problems))
    federations = list(_all("federations", file.federations, partial(registry.construct, FederationSpec), problems))
    defenses = list(_all("defenses", file.defenses, partial(_defense, trusted=trusted), problems))
    attacks = list(_all("attacks", file.attacks, partial(_attack, threats=file.threats, trusted=trusted), problems))
    figures = list(_all("figures", file.figures, partial(_flat_filters, Figure), problems, expands=False))
    claims = list(_all("claims", file.claims, partial(_flat_filters, Statement), problems, expands=False))
    if len(set(file.seeds)) < len(file.seeds):
        problems.append(f"seeds: got {file.seeds}, expected each seed once")
    if unknown_seeds := sorted({*file.attacked} - {*file.seeds}):
        problems.append(f"attack_seeds: got {unknown_seeds}, expected seeds among {file.seeds}")
    for federation, (_, target, *_) in itertools.product(federations, attacks):
        last = max(target.looks_at, default=0)
        if last >= federation.rounds_run:
            problems.append(f"attacks.target.round: looks at round {last}, expected less than {federation.rounds_run}")
        if (target.client or 0) >= federation.clients:
            problems.append(f"attacks.target.client: got {target.client}, expected less than {federation.clients}")
    if problems:
        raise StudyError(source, problems)
    trainings = [
        TrainingSpec(task, federation, defense, seed, file.audit * (seed in file.attacked), strict=file.strict)
        for task, federation, defense in itertools.product(tasks, federations, defenses)
        for seed in file.seeds
    ]
    cells = list(_crossed(file, trainings, attacks, asked="attacks" in table))
    unique = {cell.id: cell for cell in _not_excluded(cells, file.exclude, source)}
    if spelled and (wrong := _misspelled(figures, claims, unique.values())):
        raise StudyError(source, wrong)
    notes = () if "attacks" in table else ("No attack was asked for: this study measures utility, not leakage.",)
    return Study(
        file.name, file.title, tuple(unique.values()), notes=notes, figures=tuple(figures), claims=tuple(claims)
    )


def _crossed(file: _File, trainings: list[TrainingSpec], attacks: list[_Attacked], *, asked: bool) -> Iterator[Cell]:
    """Every attack on the trainings of the attacked seeds with their lineups, and `UTILITY` on the others."""
    cells = [
        # a malicious server or participant: without the audit of the honest training
        Cell(
            replace(training, malice=malice, audit=0) if malice else training,
            *(attack, target, view),
            limit=file.limit and asked,
        )
        for training in trainings
        if training.seed in file.attacked
        for attack, target, views, malice in attacks
        for view in views
    ]
    yield from cells
    if file.lineup is not False and asked:
        yield from _lineups(cells, OWN if file.lineup is True else file.lineup)
    blind, target, (view,), _ = _attack(UTILITY, ["server"], trusted=False)
    for training in trainings:
        if training.seed not in file.attacked:
            yield Cell(training, blind, target, view, limit=False)


def _lineups(cells: Sequence[Cell], own: int) -> Iterator[Cell]:
    """Lineups for each target of a reconstruction by an adversary that sees messages of an honest training.

    One is on its victims, among many candidates; one on probes of its own, as many as a rating needs, among few.
    """
    part = PartSpec("lineup", registry.build("attack", "lineup", {}).parameters())
    passed = max((cell.target.images for cell in cells if cell.target.kind == "probe"), default=0)
    built = {cell.attack.key: registry.build_attack(cell.attack) for cell in cells}
    for cell in cells:
        view = View.parse(cell.threat)
        granted = replace(view, grants=(view.grants - {"labels"}) | {"lineup"})  # candidates show the labels
        reads = view.messages and "models" in view.sees and "broadcast" not in view.sees
        if reads and built[cell.attack.key].kind == "reconstruction" and cell.training.malice is None:
            yield Cell(cell.training, part, cell.target, granted.name, limit=False)
            if own and cell.target.kind == "probe" and not cell.target.property:
                target = replace(cell.target, count=own, among=MANY, skip=passed, shuffled=False)
                yield Cell(cell.training, part, target, granted.name, limit=False)


def _misspelled(figures: Sequence[Figure], claims: Sequence[Statement], cells: Iterable[Cell]) -> list[str]:
    """The quantities and paths of figures and claims that are unknown and nearly a known name."""
    quantities = {*QUANTITIES, *METRICS}
    paths = {*OF_ROW, "defense", "attack"}.union(*(paths_of(cell.training).keys() | of_cell(cell) for cell in cells))
    named: list[tuple[str, str, str, set[str]]] = []
    each = [(f"figures[{i}]", figure.y, figure.paths - ({figure.x} & quantities)) for i, figure in enumerate(figures)]
    each += [(f"claims[{i}]", claim.y, claim.paths) for i, claim in enumerate(claims)]
    for at, quantity, its_paths in each:
        named.append((at, "quantity", quantity, quantities))
        named += [(at, "path", name, paths) for name in sorted(its_paths)]
    problems = []
    for at, word, name, known in named:
        group, dot, last = name.rpartition(".")
        siblings = [other.rpartition(".")[2] for other in known if other.rpartition(".")[0] == group]
        near = difflib.get_close_matches(last, sorted(siblings), 1, 0.8) if name not in known else []
        problems += [f"{at}: unknown {word} {name!r}; did you mean {group + dot + other!r}?" for other in near]
    return problems


def _not_excluded(cells: list[Cell], patterns: list[Table], source: str) -> list[Cell]:
    """The cells that no pattern matches; raises StudyError if a pattern matches no cell, or all are excluded."""
    rows = [_row(cell) for cell in cells] if patterns else []
    matches = [{at for at, row in enumerate(rows) if _matches(pattern, row)} for pattern in patterns]
    problems = [
        f"exclude[{number}]: {patterns[number]} matches no cell; expected values of the study for {', '.join(rows[0])}"
        for number, matched in enumerate(matches)
        if not matched
    ]
    excluded = set[int]().union(*matches)
    if len(excluded) == len(cells):
        problems.append("exclude: matches every cell; expected one that is left")
    if problems:
        raise StudyError(source, problems)
    return [cell for at, cell in enumerate(cells) if at not in excluded]


def _row(cell: Cell) -> Table:
    task = asdict(cell.training.task)
    parts = {"defense": cell.training.defense, "attack": cell.attack}
    named = {key: {"name": part.name, **part.parameters} for key, part in parts.items()}
    federation = asdict(cell.training.federation)
    places = {"task": task, **task, "federation": federation, "target": asdict(cell.target)}
    return {**named, "threat": cell.threat, "seed": cell.training.seed, **places}


def _matches(pattern: object, value: object) -> bool:
    """Whether a pattern matches: a table by all its keys, a list by one of its values, a text also by a part's name."""
    if isinstance(pattern, dict):
        inside = value if isinstance(value, dict) else {}
        return bool(pattern) and all(key in inside and _matches(inner, inside[key]) for key, inner in pattern.items())
    if isinstance(pattern, list):
        return any(_matches(choice, value) for choice in pattern)
    return pattern == (value.get("name") if isinstance(value, dict) else value)


def _too_large(table: Table, max_number: int) -> list[str]:
    problems = []
    todo: list[tuple[str, object, int]] = [("", table, 0)]
    for path, value, depth in todo:  # the list grows during the loop, instead of recursion
        if depth > _MAX_DEPTH:
            return [_DEEP]
        if isinstance(value, dict):
            todo += [(f"{path}.{key}".removeprefix("."), inner, depth + 1) for key, inner in value.items()]
        elif isinstance(value, list):
            todo += [(f"{path}[{number}]", inner, depth + 1) for number, inner in enumerate(value)]
        elif isinstance(value, int):
            free = path.startswith(("seeds", "defenses"))
            most = _MAX_INTEGER if free else max_number
            if abs(value) > most:
                raised = "" if free else "; --max-number raises this limit"
                problems.append(f"{path}: got {_short(value)}, expected at most {most:,}{raised}")
        elif isinstance(value, float) and not math.isfinite(value):
            problems.append(f"{path}: got {value}, expected a finite number")
    return problems


def _short(value: int) -> str:
    """An integer as text that fits on a line, because Python refuses to print thousands of digits."""
    digits = int(value.bit_length() * math.log10(2)) + 1
    return f"{value:,}" if digits < 30 else f"an integer of about {digits:,} digits"


def _check_grid(file: _File, source: str, max_cells: int) -> None:
    """Refuse a grid with too many cells, counted without expanding it."""
    attacks = sum(_count(attack) * (1 if "threat" in attack else len(file.threats)) for attack in file.attacks)
    counts = [sum(map(_count, tables)) for tables in (file.tasks, file.federations, file.defenses)]
    counts += [attacks, len(file.seeds)]
    most = max(math.prod(counts), *counts)  # one count may be 0, and another 10^9
    if most > max_cells:
        text = f"the grid has {_short(most)} cells, expected at most {max_cells:,}; --max-cells raises this limit"
        raise StudyError(source, [text])


def _count(table: Table) -> int:
    inner = (_count(value) for value in table.values() if isinstance(value, dict))
    together = {key for group in _zipped(table) for key in group[1:]}
    lists = (len(value) for key, value in table.items() if isinstance(value, list) and key not in {ZIP, *together})
    return math.prod(inner) * math.prod(lists)


def _file(table: Table, problems: list[str]) -> _File:
    """The top-level keys; wrong keys are left out and added to the problems, so that inner tables are still read."""
    try:
        return _File.model_validate(table)
    except ValidationError as error:
        problems += [": ".join(filter(None, explain(item, list(_File.model_fields)))) for item in error.errors()]
        wrong = {item["loc"][0] for item in error.errors()}
    known = {key: value for key, value in table.items() if key in _File.model_fields and key not in wrong}
    missing: dict[str, Any] = {"name": "", "tasks": [], "federations": [], "defenses": [], "attacks": []}
    return _File.model_construct(**missing | known)


def expand(table: Table) -> Iterator[Table]:
    """Every choice of one value from each list in `table` and in its inner tables; the first key varies slowest.

    Raises:
        ValueError: `zip` names a key without a list, or lists of different lengths.
    """
    groups = _zipped(table)
    for group in groups:
        lengths = {len(table[key]) if isinstance(table.get(key), list) else -1 for key in group}
        if len(lengths) != 1 or -1 in lengths:
            raise ValueError(f"{ZIP}: expected keys with lists of one length, got {group}")
    together = {key: group for group in groups for key in group}
    axes: list[list[Table]] = []
    for key, value in table.items():
        if key in together:
            group = together[key]
            if key == group[0]:
                rows = zip(*(table[member] for member in group), strict=True)
                axes.append([dict(zip(group, row, strict=True)) for row in rows])
        elif key != ZIP:
            choices = list(expand(value)) if isinstance(value, dict) else value if isinstance(value, list) else [value]
            axes.append([{key: choice} for choice in choices])
    for picked in itertools.product(*axes):
        chosen = {key: value for axis in picked for key, value in axis.items()}
        yield {key: chosen[key] for key in table if key in chosen}


def _zipped(table: Table) -> list[list[str]]:
    """The keys whose lists advance together, in groups."""
    named = table.get(ZIP, [])
    return [named] if named and all(isinstance(key, str) for key in named) else named


def _all(
    key: str, tables: list[Table], build: Callable[[Table], T], problems: list[str], *, expands: bool = True
) -> Iterator[T]:
    """The objects built from the expansions of the tables; failures are added to the problems."""
    for number, table in enumerate(tables):
        at = f"{key}[{number}]"
        try:
            expanded = list(expand(table)) if expands else [table]
        except (TypeError, ValueError) as error:
            problems.append(f"{at}: {error}")
            continue
        for single in expanded:
            try:
                yield build(single)
            except ParameterError as error:
                problems += [f"{at}.{path}: {text}" if path else f"{at}: {text}" for path, text in error.problems]
            except (LookupError, ThreatMismatch, ValueError) as error:
                problems.append(f"{at}: {error}")


def _flat_filters(kind: type[T], table: Table) -> T:
    """A figure or a statement, whose filters may be nested tables."""
    plain = {key: flat(value) if isinstance(value, dict) and key != "best" else value for key, value in table.items()}
    return registry.construct(kind, plain)


def _permit(code: list[str], trusted: bool) -> None:
    if code and not trusted:
        raise ValueError(f"{code[0]!r} names code to import; pass --allow-code if you trust it")


def _task(table: Table, trusted: bool) -> TaskSpec:
    """A task; its model and data may name code only if trusted."""
    spec = registry.construct(TaskSpec, table)
    _permit(task_code(spec.model, spec.data, spec.loss), trusted)
    return spec


def _name(table: Table, trusted: bool) -> str:
    """The `name` in a defense's or an attack's table; the name and parameters may name code only if trusted."""
    name, code = table.get("name"), named_code(table[key] for key in table if key not in ("target", "threat"))
    _permit(code, trusted)
    if not isinstance(name, str):
        raise ValueError(f"name: got {name!r}, expected a string" if "name" in table else "name: missing")
    return name


def _defense(table: Table, trusted: bool) -> PartSpec:
    name = _name(table, trusted)
    made = registry.build("defense", name, without(table, "name", goal.KEY))
    if goal.KEY not in table:
        return PartSpec(name, made.parameters())
    asked = _inner(goal.Goal, table[goal.KEY], goal.KEY)
    if asked.clip is not None and made.local.clip is not None:
        raise ValueError(f"target.clip: {name} clips records' gradients; a training records the norms of updates only")
    return goal.with_goal(name, made.parameters(), asked)


_TARGETS: dict[str, Table] = {
    "membership": {"kind": "members"},
    "source": {"kind": "members", "round": 0},
    "linkability": {"shuffled": True, "rounds": 2, "count": 20, "batch": 8},
}
"""The target of each kind of attack that is used if the study has none; other kinds have the defaults of `Target`."""


def _attack(table: Table, threats: list[str], trusted: bool) -> _Attacked:
    name = _name(table, trusted)
    built = registry.build("attack", name, without(table, "name", "target", "threat"))
    asked = table.get("target", _TARGETS.get(built.kind, {}))
    if isinstance(asked, dict) and isinstance(one := asked.get("victim_classes"), str):
        asked = asked | {"victim_classes": [one]}
    target = _inner(Target, asked, "target")
    if (target.kind == "members") != (of_members := built.kind in ("membership", "source")):
        expected = "members" if of_members else "probe or messages"
        raise ValueError(f"target.kind: got {target.kind!r}, expected {expected} for a {built.kind} attack")
    if target.shuffled != (linking := built.kind == "linkability"):
        raise ValueError(f"target.shuffled: got {target.shuffled}, expected {linking} for a {built.kind} attack")
    if bool(target.property) != (asking := built.kind == "property"):
        expected = "the name of a property" if asking else "none"
        raise ValueError(f"target.property: got {target.property!r}, expected {expected} for a {built.kind} attack")
    uses = sorted(built.needs & {"messages", "models"})
    if uses and target.round is None:
        raise ValueError(f"target.round: missing; attack {name!r} needs the {' and '.join(uses)} from some round on")
    views = [View.parse(text) for text in ([table["threat"]] if "threat" in table else threats)]
    for view in views:
        _permit(task_code("", view.other), trusted)
        require(built.needs, name, view)
        if view.other and built.needs & {"broadcast", "craft"}:
            raise ValueError(
                f"threat: got {view.name!r}, but the parameters of {name!r} are fitted to data of one kind"
            )
    if "broadcast" in built.needs and target.round is None:
        raise ValueError(f"target.round: missing; attack {name!r} chooses the parameters of some round")
    if "craft" in built.needs and target.round == 0:
        raise ValueError(f"target.round: got 0, expected at least 1: {name!r} sends its update in the round before")
    spec = PartSpec(name, built.parameters())
    malice = Malice(spec, target) if built.needs & {"broadcast", "craft"} else None
    return spec, target, tuple(view.name for view in views), malice


def _inner(kind: type[T], table: Table, key: str) -> T:
    try:
        return registry.construct(kind, table)
    except ParameterError as error:
        raise ParameterError(key, [(f"{key}.{path}".rstrip("."), text) for path, text in error.problems]) from error


def without(table: Table, *keys: str) -> Table:
    """The table without these keys."""
    return {key: value for key, value in table.items() if key not in keys}
