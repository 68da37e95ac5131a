"""The charts of the report as files, in the page's light colors."""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence

import matplotlib
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from leakgauge.reports.charts import figures
from leakgauge.reports.charts.figures import Chart, Series, slug
from leakgauge.reports.html import STYLE, source
from leakgauge.reports.sections.asked import asked
from leakgauge.reports.sections.tradeoffs import charts
from leakgauge.reports.select import Analysis

FORMATS: dict[str, dict[str, None]] = {
    "png": {"Software": None},
    "pdf": dict.fromkeys(("Creator", "Producer", "CreationDate")),
    "svg": dict.fromkeys(("Date", "Creator", "Format", "Type")),
}
"""Metadata that would put a date into a file, by format; None leaves a field out."""

_WIDTH, _HEIGHT, _LINE, _DOTS = 6.4, 4.1, 0.19, 200
"""In inches: width and height without a legend, height of a line of the legend. Dots per inch of a PNG."""

_LONG = 34
"""If a name is longer than this, the legend has one column."""


def figure_files(analysis: Analysis, kinds: Sequence[str]) -> Iterator[tuple[str, bytes]]:
    """Each chart of the page in each of the formats, as (file name, bytes): `1-ssim-record-replace-one-round.png`.

    The number is that of the setting, in the study's order; the names of figures that the study asks for begin with
    `asked-`. A file name has only lower-case letters, digits and dashes.

    Guarantees:
        The same run gives the same bytes: no date, no random id.
        Charts only: no picture of the data.
    """
    several = len(analysis.settings) > 1
    for number, (setting, name) in enumerate(analysis.settings.items(), 1):
        for chart in charts(analysis, setting):
            for kind in kinds:
                yield f"{number}-{slug(chart.name)}.{kind}", _file(chart, name if several else "", kind)
    requested = asked(analysis)
    yield from chart_files([drawing["chart"] for drawing in requested["drawings"]] if requested else [], "asked", kinds)


def chart_files(charts: Iterable[Chart], prefix: str, kinds: Sequence[str]) -> Iterator[tuple[str, bytes]]:
    """These charts in each of the formats; `prefix` is the first word of the names."""
    for chart in charts:
        for kind in kinds:
            yield f"{prefix}-{slug(chart.name)}.{kind}", _file(chart, "", kind)


def _file(chart: Chart, setting: str, kind: str) -> bytes:
    colors = dict(re.findall(r"--([a-z0-9]+): (#[0-9a-fA-F]{6})", source(STYLE).partition("}")[0]))
    light = {sentinel: colors[name] for sentinel, name in figures.COLORS.items()}
    style = figures.RC | {"pdf.fonttype": 42}
    style = {name: light.get(value, value) if isinstance(value, str) else value for name, value in style.items()}
    with matplotlib.rc_context(style), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph")  # the font draws a box for a missing letter
        figure, buffer = _figure(chart, setting, light), io.BytesIO()
        figure.savefig(buffer, format=kind, dpi=_DOTS, metadata=FORMATS[kind])
    return buffer.getvalue()


def _figure(chart: Chart, setting: str, paint: Mapping[str, str]) -> Figure:
    columns = 1 if max((len(series.label) for series in chart.series), default=0) > _LONG else 2
    rows = -(-len(chart.series) // columns)
    figure = Figure(figsize=(_WIDTH, _HEIGHT + _LINE * rows), layout="constrained")
    axes = figure.add_subplot()
    figures.fill(axes, chart, paint)
    figure.suptitle(chart.title, x=0.02, ha="left", fontsize=11.5, fontweight="bold")
    axes.set_title("\n".join(filter(None, (setting, chart.better))), loc="left", fontsize=8.8)
    lines = {line.get_gid(): line for line in axes.get_lines()}
    handles = [_key(lines[f"series{index}"], chart, series) for index, series in enumerate(chart.series)]
    labels = [series.label for series in chart.series]
    figure.legend(handles, labels, loc="outside lower left", ncols=columns, frameon=False, handlelength=3.2)
    return figure


def _key(line: Line2D, chart: Chart, series: Series) -> Line2D:
    """The sample in the legend: marker and dash, even if the line with the markers has no dash."""
    sample = Line2D([], [])
    sample.update_from(line)
    sample.set(linestyle=series.style.linestyle if chart.joined or series.trace else "none")
    return sample
