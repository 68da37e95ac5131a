"""The figures of a study: any quantity over any path or quantity, averaged, or at its best along a path.

`Reproduced` is a recipe's result: its figures, and the verdicts on its claims.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import numpy as np

from leakgauge.harness.core.cases import gathered
from leakgauge.harness.core.cell import Scalar
from leakgauge.harness.core.labels import shown_name, value_text
from leakgauge.harness.core.stats import mean_interval
from leakgauge.harness.core.stored import from_data
from leakgauge.harness.query.points import Value, check_alike, flat, grouped, path, select
from leakgauge.harness.query.statements import Best, Judged, Statement


@dataclass(frozen=True)
class Figure:
    """A figure of a study.

    Attributes:
        title: title of the figure.
        y: a quantity, see `core.rows`.
        x: a path; or a quantity of the same training, such as `proved_epsilon`, filtered by `x_where`; if several
            values remain, the largest. Then each setting of a training is a spot of its own.
        series, panel: paths; each combination of their values is one line (series) or one chart (panel).
        where: filter of the values, by path.
        over: paths besides seed and item over which y is averaged.
        best: if given, y is replaced by its best along a path.
        log_x, log_y: whether an axis is logarithmic.
        x_label, y_label: words for the axes; empty: those of the path and the quantity.
        headline: whether this figure stands for its source.
    """

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}
    title: str
    y: str
    x: str
    series: tuple[str, ...] = ("defense",)
    panel: tuple[str, ...] = ()
    where: dict[str, Any] = field(default_factory=dict)
    x_where: dict[str, Any] = field(default_factory=dict)
    over: tuple[str, ...] = ()
    best: Best | None = None
    log_x: bool = False
    log_y: bool = False
    x_label: str = ""
    y_label: str = ""
    headline: bool = False

    @classmethod
    def of(cls, data: dict[str, Any]) -> Figure:
        """The figure from the plain data that `dataclasses.asdict` made of it."""
        return from_data(cls, data)

    @property
    def paths(self) -> set[str]:
        """The paths that the figure names, and `x`, which may be a quantity."""
        along = {self.best.along} if self.best else set()
        named = {self.x, *self.series, *self.panel, *self.over, *along}
        return {*map(path, named), *flat(self.where), *flat(self.x_where)}


class Spot(NamedTuple):
    """A mean of y at an x, which may be infinite, its 95 % interval (None for one value), and the number of values."""

    x: float
    y: float
    low: float | None
    high: float | None
    n: int


class Line(NamedTuple):
    """A line of a panel. `level`: the constant y of a line whose values have no x; such a line has no spots."""

    label: str
    spots: tuple[Spot, ...]
    level: float | None = None


class Panel(NamedTuple):
    """One chart of a figure. `names`: the values of a non-numeric path; x is then an index into them."""

    title: str
    lines: tuple[Line, ...]
    names: tuple[str, ...] = ()


Drawn = tuple[Figure, tuple[Panel, ...] | str]
"""A figure with its panels, or with the reason why it could not be drawn."""


def quantities(claims: Iterable[Statement], figures: Iterable[Figure]) -> set[str]:
    """The quantities that claims and figures use."""
    return {claim.y for claim in claims}.union(*((figure.y, figure.x) for figure in figures))


@dataclass(frozen=True)
class Reproduced:
    """The result of a recipe.

    Attributes:
        name, title, source, unstated, missing, notes: as in the recipe.
        size: the size at which it ran.
        failures: the distinct failures of its cells.
        made_by: the commits and machines of its trainings; of the current process if nothing was trained.
        judged: its claims with their verdicts.
        figures: each figure with its panels, or with the reason why it could not be drawn.
    """

    name: str
    title: str
    source: str
    size: str
    unstated: tuple[str, ...]
    notes: tuple[str, ...]
    missing: str
    failures: tuple[str, ...]
    made_by: tuple[str, ...]
    judged: tuple[Judged, ...]
    figures: tuple[Drawn, ...]


def panels(figure: Figure, points: Sequence[Value]) -> Drawn:
    """A figure with its panels, or with the reason why it could not be drawn."""
    try:
        return figure, tuple(draw(figure, points)) or "the results have no value for it"
    except ValueError as error:
        return figure, str(error)


def draw(figure: Figure, points: Sequence[Value]) -> list[Panel]:
    """The panels of a figure.

    Raises:
        ValueError: a spot would mix values that differ in a path that the figure does not name.
    """
    chosen = select(points, figure.y, figure.where)
    measured = figure.x in {value.quantity for value in points}
    if measured:
        chosen = _with_x(figure, chosen, points)
    panels = []
    for place, values in grouped(chosen, figure.panel).items():
        levels = dict.fromkeys(value.at.get(path(figure.x)) for value in values)
        texts = [str(level) for level in levels if isinstance(level, str | bool)]
        groups = grouped(values, figure.series).items()
        lines = [_line(figure, label, group, texts, measured=measured) for label, group in groups]
        panels.append(Panel(_label(figure.panel, place), tuple(lines), tuple(texts)))
    return panels


def _with_x(figure: Figure, chosen: Sequence[Value], points: Sequence[Value]) -> list[Value]:
    """The values, with a quantity of their setting added as x if the setting has it."""
    places = dict[tuple[Scalar, ...], float]()
    for key, group in _by_setting(select(points, figure.x, figure.x_where), figure.over).items():
        adversaries = (name for value in group for name in value.at if name.startswith("against."))
        check_alike(group, [*figure.over, *adversaries])
        places[key] = max(value.value for value in group)
    return [
        Value(value.quantity, value.value, {**value.at, figure.x: places[key]}) if key in places else value
        for key, group in _by_setting(chosen, figure.over).items()
        for value in group
    ]


def _by_setting(points: Sequence[Value], over: Sequence[str]) -> dict[tuple[Scalar, ...], list[Value]]:
    """The values grouped by the setting of their training: all its paths except the seed and `over`."""
    names = {name for value in points for name in value.at if name.split(".")[0] in ("task", "federation", "defense")}
    of_training = sorted(names - set(map(path, over)))
    return gathered(
        (tuple(f"{name}={value.at[name]}" for name in of_training if name in value.at), value) for value in points
    )


def _line(
    figure: Figure, place: tuple[Scalar, ...], values: Sequence[Value], texts: Sequence[str], *, measured: bool
) -> Line:
    """One line. `measured`: x is a quantity, and each setting is a spot."""
    spots, level = list[Spot](), None
    groups = _by_setting(values, figure.over) if measured else grouped(values, (figure.x,))
    for group in groups.values():
        x, spot = group[0].at.get(path(figure.x)), _spot(figure, group)
        if x is None:
            level = spot.y
        else:
            spots.append(spot._replace(x=float(texts.index(str(x))) if texts else float(x)))
    return Line(_label(figure.series, place), tuple(sorted(spots)), None if spots else level)


def _spot(figure: Figure, group: Sequence[Value]) -> Spot:
    """One spot; its x is 0 until the caller sets it."""
    best = figure.best
    if best is None:
        return _mean(figure, group)
    means = {along: _mean(figure, values) for (along,), values in grouped(group, (best.along,)).items()}
    chosen = (min if best.of == "min" else max)(means, key=lambda along: means[along].y)
    return means[chosen] if best.show == "value" else Spot(0.0, float(chosen or 0), None, None, means[chosen].n)


def _mean(figure: Figure, group: Sequence[Value]) -> Spot:
    check_alike(group, figure.over)
    values = [value.value for value in group]
    low, high = mean_interval(values) if all(map(math.isfinite, values)) else (None, None)
    return Spot(0.0, float(np.mean(values)), low, high, len(values))


def _label(names: Sequence[str], place: Sequence[Scalar]) -> str:
    """The label of a line or a panel: a defense's or an attack's name, or the path's last word with the value."""
    words = []
    for name, value in zip(names, place, strict=True):
        if path(name) in ("defense.name", "attack.name"):
            words.append(shown_name(str(value)))
        elif value is not None:
            words.append(f"{name.split('.')[-1]} {value_text(value)}")
    return ", ".join(words)
