"""The values of a run as points for figures and statements; each point has all properties of its question, by path.

A path names one property of a question: `task.model`, `federation.clients`, `defense.name`, `defense.bits`,
`attack.evaluations`, `target.batch`, `threat`, `seed`; then `round`, `item`, and for an epsilon `horizon`,
`privacy_unit` and `against.ADVERSARY`. `defense` and `attack` are short for `defense.name` and `attack.name`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from leakgauge.harness.core.cases import gathered
from leakgauge.harness.core.cell import Cell, PartSpec, Scalar, TrainingSpec
from leakgauge.harness.core.result import Run
from leakgauge.harness.core.rows import rows

Paths = Mapping[str, Scalar]
Filter = Mapping[str, Any]
"""Values, lists of values, or `{from = NUMBER}` for all numbers from this one on, by path.

A nested table extends the path: `{defense = {name = "sdq", bits = [1, 2]}, round = {from = 1}}`.
"""

OF_ROW = ("round", "item", "horizon", "privacy_unit")
"""Paths that single values add to those of their cell."""

_COMPUTED = ("claimed_epsilon", "proved_epsilon", "attained_epsilon", "dim")
_SHORT = {"defense": "defense.name", "attack": "attack.name"}
_REPEATED = ("seed", "item")  # paths over which a figure or statement may average without naming them


@dataclass(frozen=True)
class Value:
    """One value of one quantity. `exact`: the value is computed, not measured, and has no error."""

    quantity: str
    value: float
    at: Paths
    exact: bool = False


def values(run: Run, quantities: Iterable[str]) -> list[Value]:
    """The values of these quantities; one value per item for a metric that has items."""
    requested, points = set(quantities), list[Value]()
    trainings = {cell.training.id: paths_of(cell.training) for cell in run.cells}
    cells = {cell.id: trainings[cell.training.id] | of_cell(cell) for cell in run.cells}
    known = [row for row in rows(run, items=True) if row["quantity"] in requested and row.get("value") is not None]
    listed = {(row.get("cell"), row["quantity"]) for row in known if "item" in row}
    for row in known:
        if "item" in row or (row.get("cell"), row["quantity"]) not in listed:
            at = cells[row["cell"]] if "cell" in row else trainings[row["training"]]
            also = {name: row[name] for name in OF_ROW if row.get(name) not in (None, "")}
            also |= {f"against.{adversary}": True for adversary in row.get("adversaries", "").split()}
            points.append(Value(row["quantity"], row["value"], at | also, row["quantity"] in _COMPUTED))
    return points


def paths_of(spec: TrainingSpec) -> dict[str, Scalar]:
    """The paths of a training."""
    asked = flat({"task": dataclasses.asdict(spec.task), "federation": dataclasses.asdict(spec.federation)})
    return {**asked, **_of_part("defense", spec.defense), "seed": spec.seed}


def of_cell(cell: Cell) -> dict[str, Scalar]:
    """The paths of a cell that its training does not have."""
    return _of_part("attack", cell.attack) | flat({"target": dataclasses.asdict(cell.target), "threat": cell.threat})


def _of_part(kind: str, part: PartSpec) -> dict[str, Scalar]:
    return {f"{kind}.name": part.name, **{f"{kind}.{name}": value for name, value in part.parameters.items()}}


def path(name: str) -> str:
    """The path that a study calls `name`."""
    return _SHORT.get(name, name)


def flat(table: Filter, before: str = "") -> dict[str, Any]:
    """A nested table as one flat table, with paths as keys.

    Raises:
        ValueError: a `from` is no number.
    """
    paths = dict[str, Any]()
    for key, value in table.items():
        if isinstance(value, Mapping) and value.keys() != {"from"}:
            paths |= flat(value, f"{before}{key}.")
        elif isinstance(value, Mapping) and not isinstance(value["from"], int | float):
            raise ValueError(f"expected a number for {before}{key}.from, got {value['from']!r}")
        else:
            paths[path(f"{before}{key}")] = value
    return paths


def allows(asked: Any, level: Scalar | None) -> bool:
    """Whether a filter's entry matches a level."""
    if isinstance(asked, Mapping):
        return isinstance(level, int | float) and level >= asked["from"]
    return level in (asked if isinstance(asked, list) else [asked])


def select(points: Iterable[Value], quantity: str, *filters: Filter) -> list[Value]:
    """The values of one quantity that match all filters: each path in a filter must be present and equal.

    `"default"` matches a value without the path: a parameter that was added later is left out at its default.
    """
    pairs = [pair for table in filters for pair in flat(table).items()]
    return [
        value
        for value in points
        if value.quantity == quantity and all(allows(asked, value.at.get(name, "default")) for name, asked in pairs)
    ]


def grouped(points: Iterable[Value], names: Sequence[str]) -> dict[tuple[Scalar, ...], list[Value]]:
    """The values grouped by their entries at these paths (None if missing), in order of first appearance."""
    return gathered((tuple(value.at.get(path(name)) for name in names), value) for value in points)


def check_alike(group: Sequence[Value], over: Iterable[str]) -> None:
    """Refuse values that differ at a path other than seed, item and `over`.

    Raises:
        ValueError: the values differ; the message names the path and its values.
    """
    allowed = {*_REPEATED, *map(path, over)}
    for name in dict.fromkeys(name for value in group for name in value.at):
        levels = dict.fromkeys(repr(value.at.get(name)) for value in group)
        if name not in allowed and len(levels) > 1:
            which = ", ".join(list(levels)[:4])
            raise ValueError(f"mixes values of {name} ({which}): name it in series, panel, over, where or at")


def varied(points: Iterable[Value], name: str) -> Iterator[Scalar]:
    """The distinct values at a path; numbers are sorted."""
    levels = dict.fromkeys(value.at.get(path(name)) for value in points)
    numbers = all(isinstance(level, int | float) and not isinstance(level, bool) for level in levels)
    return iter(sorted(levels) if numbers else levels)  # type: ignore[type-var]
