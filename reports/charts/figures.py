"""Charts as SVG that follows the page's theme: lines with markers, dashes and error bars."""

from __future__ import annotations

import io
import itertools
import math
import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import matplotlib
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

from leakgauge.reports.charts.svg import embed
from leakgauge.reports.text.notation import short

MOST_SERIES = 5
MARKERS = ("o", "s", "D", "^", "v")
DASHES = ("", "6 2", "6 2 1.5 2", "1.5 1.5", "9 2 1.5 2 1.5 2")
"""As in SVG: lengths of strokes and gaps, in points; one a series, so that color is never the only sign."""

_SHAPES = (
    "M13 6a4 4 0 1 0 8 0a4 4 0 1 0-8 0z",
    "M13.5 2.5h7v7h-7z",
    "M17 1.2L21.8 6L17 10.8L12.2 6z",
    "M17 1.8L21.4 10H12.6z",
    "M17 10.2L12.6 2H21.4z",
)
"""The markers again, as paths around (17, 6), for the legend."""

_OPEN_DASH = "3 1.5"
_OPEN_SHAPE = "M14.2 2L17 4.8L19.8 2L21 3.2L18.2 6L21 8.8L19.8 10L17 7.2L14.2 10L13 8.8L15.8 6L13 3.2z"
"""Of the undefended line."""

_LABEL_ROOM = 0.08
"""Share of the height of a chart that the name of a line takes."""

LEAK_BETTER = "Lower is better for the clients: higher means the attacker learns more."
ACCURACY_BETTER = "Higher is better: the model is more useful."

_SENTINELS = {f"#0000a{index + 1}": f"s{index + 1}" for index in range(MOST_SERIES)}
_OPEN = "#0000a6"
_INK, _MUTED, _GRID, _SURFACE = "#0000b1", "#0000b2", "#0000b3", "#0000b4"
COLORS = _SENTINELS | {_OPEN: "s6", _INK: "ink", _MUTED: "muted", _GRID: "grid", _SURFACE: "surface"}
"""Sentinels, as `#rrggbb`: what a chart is drawn in, each with the name of the page's color that takes its place."""

RC: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "leakgauge",
    "font.family": "DejaVu Sans",
    "font.size": 9.5,
    "text.color": _INK,
    "text.parse_math": False,
    "axes.unicode_minus": True,
    "axes.edgecolor": _MUTED,
    "axes.labelcolor": _MUTED,
    "axes.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "xtick.color": _MUTED,
    "ytick.color": _MUTED,
    "grid.color": _GRID,
    "grid.linewidth": 0.7,
}
"""matplotlib's settings while a chart is drawn; its colors are sentinels."""


class Point(NamedTuple):
    """A value over x with the ends of its error bar, None where there is none.

    `proved`: where it lies on the x axis by another account, for a hollow marker.
    """

    x: float
    y: float
    low: float | None = None
    high: float | None = None
    proved: float | None = None

    @property
    def places(self) -> tuple[float, ...]:
        """All that it needs of the x axis."""
        return (self.x,) if self.proved is None else (self.x, self.proved)


@dataclass(frozen=True)
class Series:
    """One line. `look` picks color, marker and dash; -1 is the undefended one's, gray.

    `trace`: (x, y) of the corners of its line, where this is not the one that joins the points.
    """

    label: str
    points: tuple[Point, ...]
    look: int = 0
    trace: tuple[tuple[float, float], ...] = ()


@dataclass(frozen=True)
class Chart:
    """A chart with all that stands around it.

    Attributes:
        name: its id on the page: letters, digits and dashes.
        better: which direction is better, for whom.
        lines: horizontal reference lines: height and name.
        header, rows: its data table.
        joined: whether the points of a series without a trace are joined.
        ends: where both axes begin and end; None: where the points do. On a log axis what lies below is drawn at the
            beginning.
        diagonal: name of the line of equal x and y; empty: there is none.
    """

    name: str
    title: str
    x_label: str
    y_label: str
    series: tuple[Series, ...]
    better: str
    caption: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    lines: tuple[tuple[float, str], ...] = ()
    log_x: bool = False
    log_y: bool = False
    whole_x: bool = False
    joined: bool = True
    ends: tuple[float, float] | None = None
    diagonal: str = ""

    @property
    def places(self) -> int:
        """At how many different x there is a point or a corner."""
        points = {point.x for series in self.series for point in series.points}
        return len(points | {x for series in self.series for x, _ in series.trace})

    @property
    def least(self) -> float:
        """The lowest y that can be drawn."""
        if not self.log_y:
            return -math.inf
        shown = [point.y for series in self.series for point in series.points if point.y > 0]
        return self.ends[0] if self.ends is not None else min(shown) / 2


def slug(text: str) -> str:
    """Letters, digits and dashes, for an id."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


def capped(series: Sequence[Series]) -> tuple[tuple[Series, ...], str]:
    """As many series as there are looks, no defense besides, and a sentence on the rest."""
    open_ = [one for one in series if one.look < 0]
    others = [one for one in series if one.look >= 0]
    if len(others) <= MOST_SERIES:
        return (*open_, *others), ""
    rest = f"{MOST_SERIES} of {len(others)} defenses are drawn, the first ones; the data table has all."
    return (*open_, *others[:MOST_SERIES]), rest


def key(series: Series, *, joined: bool = True) -> str:
    """The legend's sample of a series: a piece of its line with its marker."""
    index = series.look % MOST_SERIES
    name = f"s{index + 1}" if series.look >= 0 else "s6"
    strokes = DASHES[index] if series.look >= 0 else _OPEN_DASH
    line = f'<path class="k-{name}" d="M1 6H33" stroke-width="1.8" fill="none" stroke-dasharray="{strokes or "none"}"/>'
    marker = _SHAPES[index] if series.look >= 0 else _OPEN_SHAPE
    return (
        f'<svg class="key" viewBox="0 0 34 12" width="34" height="12" aria-hidden="true">{line if joined else ""}'
        f'<path class="f-{name}" d="{marker}"/></svg>'
    )


def dash(look: int) -> tuple[float, tuple[float, ...]] | str:
    """matplotlib's line style of a look: `-`, or an offset of 0 with lengths of strokes and gaps, in points."""
    pattern = DASHES[look % MOST_SERIES] if look >= 0 else _OPEN_DASH
    return (0.0, tuple(float(length) for length in pattern.split())) if pattern else "-"


def _draw(axes: Axes, chart: Chart, series: Series, index: int) -> None:
    """One series: error bars and hollow markers below, then the line with its markers."""
    color = list(_SENTINELS)[series.look % MOST_SERIES] if series.look >= 0 else _OPEN
    x, y = [point.x for point in series.points], [max(chart.least, point.y) for point in series.points]
    _draw_bars(axes, chart, series, color)
    marker = MARKERS[series.look % MOST_SERIES] if series.look >= 0 else "X"
    marked = zip(series.points, y, strict=True)
    hollow = [(point.x, point.proved, height) for point, height in marked if point.proved is not None]
    for here, there, height in hollow:
        axes.plot((here, there), (height, height), color=color, linestyle=(0, (1, 2)), linewidth=1.0)
    if hollow:
        places = [there for _, there, _ in hollow], [height for _, _, height in hollow]
        axes.plot(*places, marker, color=color, markersize=6.0, markerfacecolor="none", gid=f"proved{index}")
    if series.trace:
        axes.plot(*zip(*series.trace, strict=True), color=color, linestyle=dash(series.look), linewidth=1.6)
    axes.plot(
        x,
        y,
        color=color,
        linestyle=dash(series.look) if chart.joined and not series.trace else "none",
        linewidth=1.6,
        marker=marker,
        markersize=6.0 if len(x) <= 25 else 3.0,
        markeredgecolor=_SURFACE,
        markeredgewidth=0.8 if series.look >= 0 else 0.0,
        clip_on=not series.trace,
        gid=f"series{index}",
    )


def _draw_bars(axes: Axes, chart: Chart, series: Series, color: str) -> None:
    """The error bars of a series."""
    bars = [(p.x, max(chart.least, p.y), p.low, p.high) for p in series.points if None not in (p.low, p.high)]
    if bars:
        below = [max(0.0, y - max(chart.least, low or 0.0)) for _, y, low, _ in bars]
        above = [max(0.0, (high or 0.0) - y) for _, y, _, high in bars]
        places = [x for x, *_ in bars], [y for _, y, *_ in bars]
        axes.errorbar(*places, yerr=[below, above], fmt="none", ecolor=color, elinewidth=1.1, capsize=2.5, alpha=0.75)


def _draw_references(axes: Axes, chart: Chart) -> None:
    """The horizontal lines with their names, one below its line where another is close above; and the diagonal."""
    dotted: dict[str, Any] = {"color": _MUTED, "linewidth": 1.0, "linestyle": (0, (1.5, 2.0))}
    plate = {"facecolor": _SURFACE, "edgecolor": "none", "alpha": 0.75, "pad": 0.5}
    small: dict[str, Any] = {"fontsize": 8.8, "color": _MUTED}
    if chart.diagonal and chart.ends is not None:
        low, high = chart.ends
        axes.plot(chart.ends, chart.ends, **dotted)
        place = low**0.3 * high**0.7 if chart.log_x else 0.3 * low + 0.7 * high
        turned: dict[str, Any] = {"rotation": 45, "rotation_mode": "anchor", "transform_rotates_text": True}
        axes.text(place, place, chart.diagonal, va="top", ha="center", **turned, **small)
    scaled = math.log10 if chart.log_y else float
    bottom, top = (scaled(end) for end in axes.get_ylim())
    for (height, name), (above, _) in itertools.pairwise([*sorted(chart.lines), (math.inf, "")]):
        axes.axhline(height, **dotted)
        crowded = scaled(above) - scaled(height) < _LABEL_ROOM * (top - bottom)
        axes.annotate(
            name,
            (0.995, height),
            xycoords=("axes fraction", "data"),
            xytext=(0, -3 if crowded else 3),
            textcoords="offset points",
            ha="right",
            va="top" if crowded else "bottom",
            bbox=plate,
            **small,
        )


def _log_axis(axis: Axis, values: Sequence[float]) -> None:
    """Plain numbers at a few places of a log axis."""
    decades = math.log10(max(values) / min(values))
    # 1, 2 and 5 of each decade only where their labels stay apart
    subs = (1.0, 2.0, 5.0) if decades < 3 and decades * len(short(max(values))) < 14 else (1.0,)
    axis.set_major_locator(LogLocator(10, subs=subs, numticks=12) if decades > 0.8 else MaxNLocator(5))
    axis.set_major_formatter(FuncFormatter(lambda value, _: short(float(value))))
    axis.set_minor_formatter(NullFormatter())


def _scale(axes: Axes, chart: Chart) -> None:
    """Axes: log with plain numbers, or a few round ticks."""
    points = [point for series in chart.series for point in series.points]
    if chart.log_x:
        axes.set_xscale("log")
        values = [*(chart.ends or ()), *(place for point in points for place in point.places)]
        _log_axis(axes.xaxis, values)
        if max(values) == min(values):
            axes.set_xlim(values[0] / 2, values[0] * 2)
    elif chart.whole_x:
        axes.xaxis.set_major_locator(MaxNLocator(8, integer=True))
    if chart.log_y:
        axes.set_yscale("log")
        heights = [max(chart.least, point.y) for point in points] + [height for height, _ in chart.lines]
        _log_axis(axes.yaxis, [*(chart.ends or ()), *heights])
    axes.margins(x=0.06, y=0.12)
    if chart.ends is not None:
        axes.set_xlim(chart.ends)
        axes.set_ylim(chart.ends[0], chart.ends[1] * (1.15 if chart.log_y else 1.0))
    axes.set_xlabel(chart.x_label)
    axes.set_ylabel(chart.y_label)
    axes.grid(True)
    axes.set_axisbelow(True)
    axes.tick_params(length=3)


def fill(axes: Axes, chart: Chart) -> None:
    """Draw a chart into empty axes, in the sentinel colors."""
    for index, series in enumerate(chart.series):
        _draw(axes, chart, series, index)
    for height, _ in chart.lines:
        axes.update_datalim(((0.0, height),), updatex=False)
    _scale(axes, chart)
    _draw_references(axes, chart)


def svg(chart: Chart, *, prefix: str) -> str:
    """The drawing, as an `<svg>` element whose ids begin with `prefix`.

    Guarantees:
        Same chart, same text.
    """
    with matplotlib.rc_context(RC), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph")  # text stays text: the reader's fonts draw it
        figure = Figure(figsize=(5.9, 3.5), layout="constrained")
        axes = figure.add_subplot()
        fill(axes, chart)
        buffer = io.StringIO()
        empty = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        figure.savefig(buffer, format="svg", transparent=True, metadata=empty)
    titles = {
        f"series{index}": [f"{s.label}: {chart.x_label} {short(p.x)}, {chart.y_label} {short(p.y)}" for p in s.points]
        for index, s in enumerate(chart.series)
    }
    titles |= {
        f"proved{index}": [
            f"{s.label}: proved {short(p.proved)}, {chart.y_label} {short(p.y)}"
            for p in s.points
            if p.proved is not None
        ]
        for index, s in enumerate(chart.series)
    }
    label = f"{chart.title}. {chart.caption} {chart.better} The numbers are in the data table below."
    return embed(buffer.getvalue(), prefix=prefix, colors=COLORS, titles=titles, label=label)
