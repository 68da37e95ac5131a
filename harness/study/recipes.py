"""Recipes: studies that reproduce a table or a figure of a paper, with the paper's claims; and how they run.

A recipe is a study's TOML file with a few more keys. It is only data, without code.

| key | meaning |
|---|---|
| `source` | the paper, and its table or figure |
| `unstated` | what the paper does not state, and the value or sweep used instead, one line each |
| `printed` | what the paper prints: `parameter`, `value`, `place`; the `path` of what runs; `why` that differs |
| `formulas` | functions of a defense (`FORMULAS` of its module), or of any defense's messages (`messages.`), with |
| | arguments; lists are swept, nothing is trained; values with a `seed` are measured, those without are exact |
| `regime` | numbers that decide the outcome: products and quotients of paths; a size that changes one by more than |
| | `ANOTHER` is noted |
| `looks` | numbers of seeds: what is undecided at one gets those of the next; each look spends an equal share of the |
| | level |
| `scale.SIZE` | values that replace those of the study at this size; a table is merged into each table of a list |
| `missing` | why the recipe cannot run; its claims are then NOT RUN |
"""

from __future__ import annotations

import dataclasses
import json
import math
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib import resources
from pathlib import Path
from typing import Any

from leakgauge.harness.core.cell import Cell, Size
from leakgauge.harness.core.errors import StudyError, unknown
from leakgauge.harness.core.files import text as text_of
from leakgauge.harness.core.labels import value_text
from leakgauge.harness.core.result import Run
from leakgauge.harness.data import DataMissing, load
from leakgauge.harness.federation import registry
from leakgauge.harness.query.lines import Panel, Reproduced, panels, quantities
from leakgauge.harness.query.points import Value, of_cell, paths_of, values, varied
from leakgauge.harness.query.statements import DECIDED, LEVEL, Judged, Verdict, judge
from leakgauge.harness.study.environment import origin
from leakgauge.harness.study.run import run_study
from leakgauge.harness.study.schedule import Listener
from leakgauge.harness.study.store import write_atomically
from leakgauge.harness.study.study import Study, expand, resolve

Table = dict[str, Any]

STAND_INS = {
    "emnist": "mnist",
    "cifar100": "cifar10",
    "mnist": "digits",
    "fashion_mnist": "digits",
    "cifar10": "photos",
}
"""The data set that a recipe uses if the files of another are missing; the row states the substitution."""

ANOTHER = 1.5
"""The ratio beyond which a size is in another regime than the paper's."""

NAME = "reproduce.json"
"""The file that `reproduce` writes."""

_EXTRA = ("source", "unstated", "printed", "formulas", "scale", "missing", "regime", "looks")
_NOTHING = {"tasks": [{"data": "digits", "model": "linear"}], "federations": [{}], "defenses": [{"name": "none"}]}


@dataclass(frozen=True)
class Recipe:
    """A recipe at one size.

    Attributes:
        name: `paper/item`, like the file.
        source: the paper and its item.
        study: the study to run, with its figures and claims; `trains` states whether anything runs.
        unstated: what the paper does not state.
        missing: why the recipe cannot run; empty if it can.
        notes: substitutes for missing data, each printed parameter that runs with another value, and other regimes.
        formulas: tables of formulas with single arguments.
        looks: after how many seeds the statements are judged.
    """

    name: str
    source: str
    study: Study
    trains: bool
    unstated: tuple[str, ...] = ()
    missing: str = ""
    notes: tuple[str, ...] = ()
    formulas: tuple[Table, ...] = field(default=(), repr=False)
    looks: tuple[int, ...] = ()


def recipes() -> dict[str, Path]:
    """The files of the shipped recipes, by name."""
    root = Path(str(resources.files("leakgauge.studies"))) / "papers"
    return {str(path.relative_to(root).with_suffix("")): path for path in sorted(root.glob("*/*.toml"))}


def recipe(source: str, size: Size, root: Path) -> Recipe:
    """A recipe by name or file, at a size, for the data sets in `root`.

    Raises:
        UnknownNameError: there is no such recipe.
        StudyError: the recipe is invalid; all problems are reported together.
    """
    name, table = scalable("recipe", source, recipes())
    own = {key: value for key, value in table.items() if key not in _EXTRA}
    scaled = merged(own, table.get("scale", {}).get(size, {}))
    trains, looks = "tasks" in scaled, scaled.pop("looks", table.get("looks", []))
    looks = tuple(looks) if isinstance(looks, list) else (looks,)
    there, notes, lacking = _there(scaled, root)
    formulas = [single for swept in table.get("formulas", []) for single in expand(swept)]
    study = resolve(
        {"name": name, "lineup": False, **({} if trains else _NOTHING), **there}, name, spelled=not formulas
    )
    if not (trains or formulas or table.get("missing", lacking)):
        raise StudyError(name, ["expected tasks to train, formulas, or why it is missing; nothing runs"])
    if looks and not (all(type(look) is int for look in looks) and looks[0] > 0 and sorted({*looks}) == [*looks]):
        raise StudyError(name, [f"looks: expected rising numbers of seeds, such as [3, 6, 12], got {list(looks)}"])
    notes = (*notes, *_departures(name, table.get("printed", []), study, formulas))
    if trains and scaled != own and "regime" in table:
        whole = resolve({"name": name, "lineup": False, **_there(own, root)[0]}, name)
        notes = (*notes, *_regimes(name, table["regime"], _rows(whole), _rows(study)))
    return Recipe(
        *(name, table.get("source", ""), study, trains, (*table.get("unstated", ()),), table.get("missing", lacking)),
        *(notes, tuple(formulas), looks),
    )


def scalable(kind: str, source: str, known: Mapping[str, Path]) -> tuple[str, Table]:
    """The name and the table of a file with `scale`, by the name of a shipped one or by its path.

    Raises:
        UnknownNameError: there is no such file among the shipped ones, which are of this kind.
        StudyError: the file cannot be read, or scales to an unknown size.
    """
    path = Path(source) if source.endswith(".toml") else known.get(source)
    if path is None:
        raise unknown(kind, source, known)
    try:
        table = tomllib.loads(text_of(path))
    except (OSError, ValueError) as error:
        raise StudyError(source, [f"cannot be read: {error}"]) from error
    if wrong := sorted(table.get("scale", {}).keys() - set(Size)):
        raise StudyError(source, [f"scale.{wrong[0]}: expected one of {', '.join(Size)}"])
    return source if source in known else path.stem, table


def _departures(recipe: str, printed: list[Table], study: Study, formulas: list[Table]) -> Iterator[str]:
    """A line for each printed parameter that runs with other values, or that has no path."""
    rows = [*formulas, *_rows(study)]
    known, needed = {"None"}.union(*rows), {"parameter", "value", "place"}
    for line in printed:
        if not isinstance(line, dict) or line.keys() - {"path", "why"} != needed or str(line.get("path")) not in known:
            raise StudyError(recipe, [f"printed: expected parameter, value, place, and a path that runs, got {line}"])
        path, value = line.get("path"), line["value"]
        printed_values = dict.fromkeys(map(value_text, value if isinstance(value, list) else [value]))
        run_values = dict.fromkeys(value_text(row[path]) for row in rows if path and row.get(path) is not None)
        if not path or (run_values and run_values.keys() != printed_values.keys()):
            runs = f", here {', '.join(run_values)}" if path else ""
            why = line.get("why", "the run is smaller than the paper's")
            yield f"not as printed, {line['parameter']}: {', '.join(printed_values)} ({line['place']}){runs}: {why}"


def _rows(study: Study) -> list[Table]:
    return list(map(_row, study.cells))


def _row(cell: Cell) -> Table:
    """The paths of a cell, with `records` of a client."""
    its = cell.training.federation
    return {**paths_of(cell.training), **of_cell(cell), "records": its.samples and its.samples // its.clients}


def _regimes(recipe: str, numbers: Sequence[str], whole: list[Table], rows: list[Table]) -> Iterator[str]:
    """A line for each number whose least or greatest value at this size is another than in the whole recipe."""
    for number in numbers:
        ends = [[min(known), max(known)] for each in (whole, rows) if (known := _numbers(number, each))]
        if len(ends) < 2:
            raise StudyError(recipe, [f"regime: expected paths of numbers, with * or / between them, got {number!r}"])
        ratio = max(max(a / b, b / a) for a, b in zip(*ends, strict=True))
        if ratio > ANOTHER:
            there, here = (" to ".join(dict.fromkeys(f"{end:.3g}" for end in each)) for each in ends)
            yield f"another regime, {number}: {here}, at the size paper {there}"


def _numbers(number: str, rows: list[Table]) -> list[float]:
    """The values of `a * b / c` over the cells that have all of its paths."""
    first, *rest = str(number).split() or [""]
    if len(rest) % 2 or not {*rest[::2]} <= {"*", "/"}:
        return []  # which is refused
    powers = [1, *(1 if sign == "*" else -1 for sign in rest[::2])]
    found = list[float]()
    for row in rows:
        parts = [float(row.get(name) or 0) for name in (first, *rest[1::2])]
        if all(parts):
            found.append(math.prod(part**power for part, power in zip(parts, powers, strict=True)))
    return found


def merged(table: Table, over: Table) -> Table:
    """A table with values replaced; a table over a list of tables is merged into each of them."""
    whole = dict(table)
    for key, value in over.items():
        before = table.get(key)
        if isinstance(value, dict) and isinstance(before, list):
            value = [merged(inner, value) for inner in before]
        elif isinstance(value, dict) and isinstance(before, dict):
            value = merged(before, value)
        whole[key] = value
    return whole


def _there(table: Table, root: Path) -> tuple[Table, tuple[str, ...], str]:
    """The study with available data, notes on substitutes (all samples of smaller ones), and the first missing file."""
    notes, most, missing = dict[str, None](), list[int](), list[str]()

    def available(name: str) -> str:
        try:
            loaded = load(name, root)
        except DataMissing as error:
            if name not in STAND_INS:
                missing.append(str(error))
                return "digits"
            notes[f"{name} is not here: {STAND_INS[name]} stands in for it"] = None
            return available(STAND_INS[name])
        if notes:
            most.append(len(loaded.train.y))
        if loaded.note:
            notes[loaded.note] = None
        return name

    if "tasks" in table:
        tasks = [{**task, "data": _each(task.get("data", ""), available)} for task in table["tasks"]]
        table = {**table, "tasks": tasks}
    if most:
        table["federations"] = [_fitting(given, min(most)) for given in table.get("federations", [])]
    return table, tuple(notes), missing[0] if missing else ""


def _each(value: Any, change: Callable[[Any], Any]) -> Any:
    return [change(item) for item in value] if isinstance(value, list) else change(value)


def _fitting(federation: Table, most: int) -> Table:
    """The federation with at most `most` training samples; if it holds some out, at most a fifth of them."""
    held = most // 5 if "validation" in federation else 0
    limits = {"validation": held, "samples": most - held}
    return {
        name: _each(value, partial(min, limits[name])) if name in limits else value
        for name, value in federation.items()
    }


def computed(made: Recipe) -> list[Value]:
    """The values of a recipe's formulas.

    Raises:
        StudyError: a formula does not exist, or refuses its arguments.
    """
    return [] if made.missing else [value for table in made.formulas for value in _values(made.name, table)]


def _values(recipe: str, table: Table) -> Iterable[Value]:
    """The values of one formula, which returns a number or numbers by quantity; the arguments are the paths."""
    arguments = {key: value for key, value in table.items() if key != "name"}
    try:
        computed = registry.formula(str(table.get("name")))(**arguments)
    except (TypeError, ValueError, LookupError) as error:
        raise StudyError(recipe, [f"formulas.{table.get('name')}: {error}"]) from error
    quantities = computed if isinstance(computed, dict) else {str(table["name"]): computed}
    for quantity, value in quantities.items():
        several = value if isinstance(value, list | tuple) else [value]
        for item, number in enumerate(several):
            at = arguments | ({"index": item} if several is value else {})
            yield Value(quantity, float(number), at, exact="seed" not in at)


def data(done: Reproduced) -> dict[str, Any]:
    """A recipe's result as plain data for JSON; the same recipe, code and data give the same bytes."""
    fields = ("name", "title", "source", "size", "unstated", "notes", "missing", "failures")
    figures = [
        {"title": figure.title} | ({"error": drawn} if isinstance(drawn, str) else {"panels": list(map(_panel, drawn))})
        for figure, drawn in done.figures
    ]
    claims = [
        {
            **{name: getattr(judged.statement, name) for name in ("text", "own", "quote", "printed")},
            "verdict": str(judged.verdict),
            "measured": judged.measured,
            "p": judged.p,
            "seeds_needed": judged.seeds,
            "evidence": [{**cell._asdict(), "verdict": str(cell.verdict)} for cell in judged.evidence],
        }
        for judged in done.judged
    ]
    return {name: getattr(done, name) for name in fields} | {"claims": claims, "figures": figures}


def _panel(panel: Panel) -> dict[str, Any]:
    lines = []
    for line in panel.lines:
        positions = [[_finite(value) for value in position] for position in line.spots]
        lines.append({"label": line.label, "level": _finite(line.level), "spots": positions})
    return {"title": panel.title, "names": list(panel.names), "lines": lines}


def _finite(value: float | None) -> float | str | None:
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def evaluate(
    made: Recipe, size: Size, known: Sequence[Value], failures: Iterable[str] = (), made_by: Iterable[str] = ()
) -> Reproduced:
    """The claims and figures of a recipe on the values of its study and its formulas."""
    study = made.study
    if made.missing:
        lacking = tuple(dataclasses.replace(claim, missing=made.missing) for claim in study.claims)
        study = dataclasses.replace(study, claims=lacking)
    return Reproduced(
        *(made.name, study.title, made.source, size, made.unstated, made.notes, made.missing),
        failures=tuple(dict.fromkeys(failures)),
        made_by=tuple(sorted(set(made_by))),
        judged=tuple(_judged(dataclasses.replace(made, study=study), known)),
        figures=tuple(panels(figure, known) for figure in study.figures),
    )


def _judged(made: Recipe, known: Sequence[Value], upto: int | None = None) -> list[Judged]:
    """The verdicts on its claims: of the first look at which a claim is decided, with the seeds of that look.

    Args:
        upto: the number of looks so far; None: all.
    """
    planned = (cell.training.seed for cell in made.study.cells) if made.trains else varied(known, "seed")
    seeds = list(dict.fromkeys(seed for seed in planned if seed is not None))
    looks = made.looks[:upto] or (len(seeds),)
    decided: dict[int, Judged] = {}
    for look in looks:
        seen = [value for value in known if value.at.get("seed") in (None, *seeds[:look])]
        for at, one in enumerate(judge(made.study.claims, seen, LEVEL / max(1, len(made.looks)))):
            if at not in decided or decided[at].verdict not in DECIDED:
                decided[at] = one
    return [decided[at] for at in range(len(made.study.claims))]


def _run(made: Recipe, run: Callable[[Study], Run], computed: Sequence[Value]) -> tuple[Run, list[Value]]:
    """Run the recipe's study, at each look the seeds that what is undecided needs; its run, and all values."""
    study = made.study
    seeds, cells = list(dict.fromkeys(cell.training.seed for cell in study.cells)), list[Cell]()
    undecided, before = list(study.claims), 0
    for number, look in enumerate(made.looks or (len(seeds),), 1):
        more = [cell for cell in study.cells if cell.training.seed in seeds[before:look]]
        cells += [cell for cell in more if not before or any(claim.asks(_row(cell)) for claim in undecided)]
        asked = dataclasses.replace(study, cells=tuple(cells))
        done = dataclasses.replace(run(asked), cells=asked.cells)
        known, before = [*values(done, quantities(study.claims, study.figures)), *computed], look
        undecided = [one.statement for one in _judged(made, known, number) if one.verdict is Verdict.UNRESOLVED]
    return done, known


def reproduce(
    names: Sequence[str],
    size: Size,
    out: Path,
    root: Path,
    *,
    workers: int | None = None,
    listen: Callable[[str], Listener],
) -> list[Reproduced]:
    """Run recipes and write `reproduce.json`; the recipes of a paper share a folder, which keeps finished cells.

    Args:
        listen: gives the listener for the progress of a study, by the study's name.

    Raises:
        StudyError: a recipe is invalid; raised before anything runs.
    """
    outcomes = []
    for made in [recipe(name, size, root) for name in names]:
        known = computed(made)
        failures, environments = list[str](), [origin()]
        if made.trains and not made.missing:
            folder = out / size / made.name.partition("/")[0]
            ask = partial(run_study, folder=folder, data=root, workers=workers, listen=listen(made.name), merge=True)
            run, known = _run(made, ask, known)
            failed = [run.failures[cell.id] for cell in run.cells if cell.id in run.failures]
            failures = [f"{failure.kind}: {failure.message}" for failure in failed]
            environments = [record.environment for record in run.trainings.values()]
        made_by = (f"{each.commit[:8]}{' with changes' * each.dirty}, {each.machine}" for each in environments)
        outcomes.append(evaluate(made, size, known, failures, made_by))
        text = json.dumps(list(map(data, outcomes)), indent=1, sort_keys=True) + "\n"
        write_atomically(out / NAME, text.encode())
    return outcomes
