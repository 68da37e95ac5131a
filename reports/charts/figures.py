"""Charts as SVG that follow the theme of the page, without style attributes: lines, markers, dashes and error bars."""

from __future__ import annotations

import io
import itertools
import math
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple
from xml.etree import ElementTree

import matplotlib
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

from leakgauge.harness.core.sinks import visible
from leakgauge.reports.text.notation import short


class Look(NamedTuple):
    """How a series is drawn, so that color is never the only distinction.

    Attributes:
        name: name of the page's color.
        color: the sentinel of that color, see `COLORS`.
        marker: marker of matplotlib; `shape` is the same marker as a path around (17, 6), for the legend.
        dash: lengths of strokes and gaps, in points, as in SVG; empty: a solid line.
        edge: width of the marker's edge.
    """

    name: str
    color: str
    marker: str
    dash: str
    shape: str
    edge: float = 0.8

    @property
    def linestyle(self) -> tuple[float, tuple[float, ...]] | str:
        """The line style in matplotlib: `-`, or an offset of 0 and the dash."""
        return (0.0, tuple(float(length) for length in self.dash.split())) if self.dash else "-"


_CROSS = "M14.2 2L17 4.8L19.8 2L21 3.2L18.2 6L21 8.8L19.8 10L17 7.2L14.2 10L13 8.8L15.8 6L13 3.2z"
LOOKS = (
    Look("s1", "#0000a1", "o", "", "M13 6a4 4 0 1 0 8 0a4 4 0 1 0-8 0z"),
    Look("s2", "#0000a2", "s", "6 2", "M13.5 2.5h7v7h-7z"),
    Look("s3", "#0000a3", "D", "6 2 1.5 2", "M17 1.2L21.8 6L17 10.8L12.2 6z"),
    Look("s4", "#0000a4", "^", "1.5 1.5", "M17 1.8L21.4 10H12.6z"),
    Look("s5", "#0000a5", "v", "9 2 1.5 2 1.5 2", "M17 10.2L12.6 2H21.4z"),
    Look("s6", "#0000a6", "X", "3 1.5", _CROSS, edge=0.0),
)
"""The looks of the series; the last look, gray, is for no defense."""

MOST_SERIES = len(LOOKS) - 1

_LABEL_ROOM = 0.08
"""Height of the name of a reference line, as a share of the chart's height."""

LEAK_BETTER = "Lower is better for the clients: higher means that the adversary learns more."
ACCURACY_BETTER = "Higher is better: the model is more useful."

_INK, _MUTED, _GRID, _SURFACE = "#0000b1", "#0000b2", "#0000b3", "#0000b4"
COLORS = {look.color: look.name for look in LOOKS}
COLORS |= {_INK: "ink", _MUTED: "muted", _GRID: "grid", _SURFACE: "surface"}
"""Sentinel colors of a drawing, as `#rrggbb`, each with the name of the page's color that replaces it."""

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
    "path.simplify_threshold": 0.35,  # points by which a line of many corners may miss one: a fifth of its width
}
"""Settings of matplotlib for a chart, in sentinel colors."""


class Point(NamedTuple):
    """A value over x with the ends of its error bar (None without a bar). `proved`: x of a hollow marker."""

    x: float
    y: float
    low: float | None = None
    high: float | None = None
    proved: float | None = None


@dataclass(frozen=True)
class Series:
    """One line. `look` counts from 0, see `LOOKS`; -1 is the look of no defense.

    `trace`: (x, y) of the corners of the line; if empty, the line joins the points.
    """

    label: str
    points: tuple[Point, ...]
    look: int = 0
    trace: tuple[tuple[float, float], ...] = ()

    @property
    def style(self) -> Look:
        """The look itself; when the colors repeat, markers and dashes differ."""
        if self.look < 0:
            return LOOKS[-1]
        look, again = LOOKS[self.look % MOST_SERIES], LOOKS[(self.look + self.look // MOST_SERIES) % MOST_SERIES]
        return again._replace(name=look.name, color=look.color)


@dataclass(frozen=True)
class Chart:
    """A chart with the text and the table around it.

    Attributes:
        name: the chart's id on the page: letters, digits and dashes.
        better: which direction is better.
        lines: horizontal reference lines: height and name.
        header, rows: the data table.
        joined: whether a line joins the points of a series that has no trace.
        ends: range of both axes; None: the range of the points. A log axis shows lower values at its lower end.
        diagonal: name of the line of equal x and y; if empty, there is no such line.
        infinity: the x that stands for infinity; None: there is none.
    """

    name: str
    title: str
    x_label: str
    y_label: str
    series: tuple[Series, ...]
    better: str
    caption: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...] = ()
    lines: tuple[tuple[float, str], ...] = ()
    log_x: bool = False
    log_y: bool = False
    whole_x: bool = False
    joined: bool = True
    ends: tuple[float, float] | None = None
    diagonal: str = ""
    infinity: float | None = None

    @property
    def places(self) -> int:
        """Number of different x of points and corners."""
        points = {point.x for series in self.series for point in series.points}
        return len(points | {x for series in self.series for x, _ in series.trace})

    @property
    def least(self) -> float:
        """The lowest y that can be drawn."""
        if not self.log_y:
            return -math.inf
        shown = [point.y for series in self.series for point in series.points if point.y > 0]
        return self.ends[0] if self.ends is not None else min(shown) / 2


def drawable(chart: Chart) -> Chart:
    """The chart with texts that are valid in XML and do not change the direction of the text after them."""
    texts: dict[str, Any] = {
        field.name: visible(value) for field in fields(chart) if isinstance(value := getattr(chart, field.name), str)
    }
    series = tuple(replace(line, label=visible(line.label)) for line in chart.series)
    return replace(chart, series=series, lines=tuple((y, visible(name)) for y, name in chart.lines), **texts)


def slug(text: str) -> str:
    """The text as an id: letters, digits and dashes."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


def capped(series: Sequence[Series]) -> tuple[tuple[Series, ...], str]:
    """The first series, as many as there are looks, and a sentence about the others."""
    rest = f"The first {MOST_SERIES} of {len(series)} defenses are drawn; the data table lists all."
    return tuple(series[:MOST_SERIES]), rest if len(series) > MOST_SERIES else ""


def key(series: Series, *, joined: bool = True) -> str:
    """The sample of a series in the legend: a piece of its line with its marker."""
    name, dash = series.style.name, series.style.dash or "none"
    line = f'<path class="k-{name}" d="M1 6H33" stroke-width="1.8" fill="none" stroke-dasharray="{dash}"/>'
    return (
        f'<svg class="key" viewBox="0 0 34 12" width="34" height="12" aria-hidden="true">{line if joined else ""}'
        f'<path class="f-{name}" d="{series.style.shape}"/></svg>'
    )


def _draw(axes: Axes, chart: Chart, series: Series, index: int, paint: Mapping[str, str]) -> None:
    look, x = series.style, [point.x for point in series.points]
    color, y = paint[look.color], [max(chart.least, point.y) for point in series.points]
    _draw_bars(axes, chart, series, color)
    marked = zip(series.points, y, strict=True)
    hollow = [(point.x, point.proved, height) for point, height in marked if point.proved is not None]
    for claimed, there, height in hollow:
        axes.plot((claimed, there), (height, height), color=color, linestyle=(0, (1, 2)), linewidth=1.0)
    if hollow:
        places = [there for _, there, _ in hollow], [height for _, _, height in hollow]
        axes.plot(*places, look.marker, color=color, markersize=6.0, markerfacecolor="none", gid=f"proved{index}")
    if series.trace:
        axes.plot(*zip(*series.trace, strict=True), color=color, linestyle=look.linestyle, linewidth=1.6)
    axes.plot(
        x,
        y,
        color=color,
        linestyle=look.linestyle if chart.joined and not series.trace else "none",
        linewidth=1.6,
        marker=look.marker,
        markersize=6.0 if len(x) <= 25 else 3.0,
        markeredgecolor=paint[_SURFACE],
        markeredgewidth=look.edge,
        clip_on=not series.trace,
        gid=f"series{index}",
    )


def _draw_bars(axes: Axes, chart: Chart, series: Series, color: str) -> None:
    bars = [(p.x, max(chart.least, p.y), p.low, p.high) for p in series.points if None not in (p.low, p.high)]
    if bars:
        below = [max(0.0, y - max(chart.least, low or 0.0)) for _, y, low, _ in bars]
        above = [max(0.0, (high or 0.0) - y) for _, y, _, high in bars]
        places = [x for x, *_ in bars], [y for _, y, *_ in bars]
        style: dict[str, Any] = {"ecolor": color, "elinewidth": 1.1, "capsize": 2.5, "alpha": 0.75}
        axes.errorbar(*places, yerr=[below, above], fmt="none", **style)


def _draw_references(axes: Axes, chart: Chart, paint: Mapping[str, str]) -> None:
    """The diagonal, infinity and the horizontal lines; a name is below its line if another line is close above it."""
    dotted: dict[str, Any] = {"color": paint[_MUTED], "linewidth": 1.0, "linestyle": (0, (1.5, 2.0))}
    plate = {"facecolor": paint[_SURFACE], "edgecolor": "none", "alpha": 0.75, "pad": 0.5}
    small: dict[str, Any] = {"fontsize": 8.8, "color": paint[_MUTED]}
    if chart.diagonal and chart.ends is not None:
        low, high = chart.ends
        axes.plot(chart.ends, chart.ends, **dotted)
        place = low**0.3 * high**0.7 if chart.log_x else 0.3 * low + 0.7 * high
        turned: dict[str, Any] = {"rotation": 45, "rotation_mode": "anchor", "transform_rotates_text": True}
        axes.text(place, place, chart.diagonal, va="top", ha="center", **turned, **small)
    side, edge = ("right", 0.995) if chart.infinity is None else ("left", 0.005)
    if chart.infinity is not None:
        low, _ = axes.get_xlim()
        axes.set_xticks([tick for tick in axes.get_xticks() if low <= tick < chart.infinity])
        axes.axvline(chart.infinity, **dotted)
        axes.annotate("∞", (chart.infinity, 1.0), xycoords=("data", "axes fraction"), ha="center", va="bottom", **small)
    scaled = math.log10 if chart.log_y else float
    bottom, top = (scaled(end) for end in axes.get_ylim())
    for (height, name), (above, _) in itertools.pairwise([*sorted(chart.lines), (math.inf, "")]):
        axes.axhline(height, **dotted)
        crowded = scaled(above) - scaled(height) < _LABEL_ROOM * (top - bottom)
        axes.annotate(
            name,
            (edge, height),
            xycoords=("axes fraction", "data"),
            xytext=(0, -3 if crowded else 3),
            textcoords="offset points",
            ha=side,
            va="top" if crowded else "bottom",
            bbox=plate,
            **small,
        )


def _log_axis(axis: Axis, values: Sequence[float]) -> None:
    decades = math.log10(max(values) / min(values))
    # 1, 2 and 5 of each decade only if their labels do not overlap
    subs = (1.0, 2.0, 5.0) if decades < 3 and decades * len(short(max(values))) < 14 else (1.0,)
    ticks = 12 if decades <= 6 else 6  # numbers of seven digits need room
    axis.set_major_locator(LogLocator(10, subs=subs, numticks=ticks) if decades > 0.8 else MaxNLocator(5))
    axis.set_major_formatter(FuncFormatter(lambda value, _: short(float(value))))
    axis.set_minor_formatter(NullFormatter())


def _scale(axes: Axes, chart: Chart) -> None:
    points = [point for series in chart.series for point in series.points]
    if chart.log_x:
        axes.set_xscale("log")
        places = (place for point in points for place in (point.x, point.proved) if place is not None)
        values = [*(chart.ends or ()), *places]
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


def fill(axes: Axes, chart: Chart, paint: Mapping[str, str] = dict(zip(COLORS, COLORS, strict=True))) -> None:
    """Draw a chart into empty axes. `paint`: the color for each sentinel; default: the sentinels."""
    for index, series in enumerate(chart.series):
        _draw(axes, chart, series, index, paint)
    for height, _ in chart.lines:
        axes.update_datalim(((0.0, height),), updatex=False)
    _scale(axes, chart)
    _draw_references(axes, chart, paint)


def svg(chart: Chart, *, prefix: str) -> str:
    """The drawing as an `<svg>` element for a page whose policy forbids inline styles; every id begins with `prefix`.

    Guarantees:
        No style attribute, no style element, no script, no reference outside the drawing.
        The same chart gives the same text.
    """
    with matplotlib.rc_context(RC), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph")  # text stays text, so the reader's fonts draw it
        figure = Figure(figsize=(5.9, 3.5), layout="constrained")
        fill(figure.add_subplot(), chart)
        buffer = io.StringIO()
        empty = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        figure.savefig(buffer, format="svg", transparent=True, metadata=empty)
    titles = dict[str, list[str]]()
    for index, s in enumerate(chart.series):
        texts = [("∞" if p.x == chart.infinity else short(p.x), f"{chart.y_label} {short(p.y)}") for p in s.points]
        titles[f"series{index}"] = [f"{s.label}: {chart.x_label} {x}, {y}" for x, y in texts]
        proved = [(p.proved, y) for p, (_, y) in zip(s.points, texts, strict=True) if p.proved is not None]
        titles[f"proved{index}"] = [f"{s.label}: proved {short(x)}, {y}" for x, y in proved]
    root = ElementTree.fromstring(buffer.getvalue())
    _add_titles(root, titles)
    wanted = {use.get(_LINK, "").removeprefix("#") for use in root.iter()}
    wanted |= {name for element in root.iter() for name in _REFERENCE.findall(" ".join(element.attrib.values()))}
    _clean(root, prefix, wanted)
    for element in root.iter("tooltip"):
        element.tag = "title"
    for name in ("width", "height", "version"):
        del root.attrib[name]
    label = f"{chart.title}. {chart.caption} {chart.better} The numbers are in the data table below."
    root.attrib |= {"role": "img", "aria-label": label, "stroke-linejoin": "round", "stroke-linecap": "butt"}
    return ElementTree.tostring(root, encoding="unicode")


_LINK = "{http://www.w3.org/1999/xlink}href"
_DROPPED_TAGS = ("metadata", "style", "title")
_DROPPED_PROPERTIES = ("font-family",)  # the page's own font is inherited
_LONG = re.compile(r"-?\d+\.\d{3,}")
_REFERENCE = re.compile(r"url\(#([^)]+)\)")
_FONT = re.compile(r"(?P<size>[\d.]+)px .*")


def _local(name: str) -> str:
    return name.rpartition("}")[2]


def _declarations(style: str) -> dict[str, str]:
    """`fill: none; stroke: #000` as a mapping; the `font` shorthand as its size."""
    declarations = dict(re.findall(r"([\w-]+): ([^;]*)", style))
    shorthand = _FONT.fullmatch(declarations.pop("font", ""))
    if shorthand:
        declarations["font-size"] = shorthand["size"]
    return {name: value for name, value in declarations.items() if name not in _DROPPED_PROPERTIES}


def _paint(element: ElementTree.Element, declarations: Mapping[str, str]) -> None:
    """Declarations as presentation attributes; a sentinel color as the class `f-NAME` (fill) or `k-NAME` (stroke)."""
    classes = []
    for name, value in declarations.items():
        color = COLORS.get(value.lower())
        if name in ("fill", "stroke") and color is not None:
            classes.append(f"{'f' if name == 'fill' else 'k'}-{color}")
        else:
            element.set(name, value)
    if classes:
        element.set("class", " ".join(classes))


def _clean(element: ElementTree.Element, prefix: str, wanted: set[str]) -> None:
    element.tag = _local(element.tag)
    own = element.attrib
    declarations: dict[str, str] = {name: own.pop(name) for name in ("fill", "stroke") if name in own}
    declarations |= _declarations(own.pop("style", ""))
    for name in list(element.attrib):
        value = element.attrib.pop(name)
        if name == "id" and value not in wanted:
            continue
        if name == "id":
            value = prefix + value
        elif name == _LINK:
            name, value = "href", "#" + prefix + value.removeprefix("#")
        elif name in ("d", "x", "y"):
            value = _LONG.sub(lambda number: f"{float(number[0]):.2f}", value)
        element.set(_local(name), _REFERENCE.sub(rf"url(#{prefix}\1)", value))
    _paint(element, declarations)
    for child in list(element):
        if _local(str(child.tag)) in _DROPPED_TAGS:
            element.remove(child)
        else:
            _clean(child, prefix, wanted)


def _add_titles(root: ElementTree.Element, titles: Mapping[str, Sequence[str]]) -> None:
    """A tooltip for each marker of a series, if matplotlib drew exactly one marker per point."""
    groups = {element.get("id", ""): element for element in root.iter()}
    for name, texts in titles.items():
        markers = [use for use in groups[name].iter("{http://www.w3.org/2000/svg}use")] if name in groups else []
        if len(markers) == len(texts):
            for marker, text in zip(markers, texts, strict=True):
                ElementTree.SubElement(marker, "tooltip").text = text
