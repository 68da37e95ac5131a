"""The figures that a study requests, and the verdicts on its claims."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from markupsafe import Markup

from leakgauge.harness.query.lines import Drawn, Figure, Line, Panel, panels, quantities
from leakgauge.harness.query.points import values
from leakgauge.harness.query.statements import Judged, Statement, Verdict, judge
from leakgauge.reports.charts import figures
from leakgauge.reports.charts.figures import Chart, Point, Series, drawable, slug
from leakgauge.reports.sections import Section
from leakgauge.reports.select import Analysis
from leakgauge.reports.table import Cell, Fields, Table
from leakgauge.reports.text.notation import short, spread

_CAPTION = (
    "The published statements, the measured numbers, and those printed in the source. No verdict uses the printed ones."
)
_TONES = dict(zip(Verdict, ("good", "warn", "none", "bad", "warn", "none"), strict=True))


def asked(analysis: Analysis) -> dict[str, Any] | None:
    """The figures and claims of the run's study; None if it has none."""
    study: dict[str, Any] = analysis.run.study
    wanted = [Figure.of(figure) for figure in study.get("figures", ())]
    claims = [Statement(**claim) for claim in study.get("claims", ())]
    if not wanted and not claims:
        return None
    numbers = values(analysis.run, quantities(claims, wanted))
    return shown(judge(claims, numbers), [panels(figure, numbers) for figure in wanted], "asked")


SECTION = Section("asked", "Figures and claims of this study", "Figures", asked, 60)


def shown(judged: Sequence[Judged], drawn: Sequence[Drawn], prefix: str) -> dict[str, Any]:
    """Verdicts and figures for a page, and the figures that could not be drawn, with the reason.

    prefix: prefix of the ids on the page.
    """
    columns = ("Statement", "Verdict", "Measured", "Printed")
    ordered = sorted(judged, key=lambda one: one.statement.own)
    return {
        "stated": Table(_CAPTION, columns, tuple(map(_stated, ordered))) if judged else None,
        "drawings": [drawing(chart, prefix) for chart in charts_of(drawn)],
        "errors": [(figure.title, panels) for figure, panels in drawn if isinstance(panels, str)],
    }


def charts_of(drawn: Sequence[Drawn]) -> list[Chart]:
    """The charts of figures: one for each panel with a point."""
    charts = []
    for number, (figure, made) in enumerate(drawn):
        parts = enumerate(() if isinstance(made, str) else made)
        charts += [chart_of(figure, panel, f"{number}-{place}") for place, panel in parts]
    return [drawable(chart) for chart in charts if any(line.points for line in chart.series)]


def _stated(claim: Judged) -> Fields:
    more = "" if claim.p is None else f"p = {claim.p:.2g}"
    if claim.verdict is Verdict.UNRESOLVED and claim.seeds is not None:
        more += f"; about {claim.seeds} seeds would decide it"
    below = [more, *(f"{one.where}: {str(one.verdict).lower()}; {one.measured}" for one in claim.evidence)]
    said = tuple(filter(None, (claim.statement.quote, "not published, ours" * claim.statement.own)))
    verdict = Cell(str(claim.verdict), tone=_TONES[claim.verdict])
    measured = Cell(claim.measured, below=tuple(filter(None, below)))
    return Cell(claim.statement.text, below=said), verdict, measured, claim.statement.printed


def chart_of(figure: Figure, panel: Panel, name: str) -> Chart:
    """One panel as a chart; all lines are drawn."""
    lines = [line for line in panel.lines if line.spots]
    spots = [spot for line in lines for spot in line.spots]
    log_x = figure.log_x and all(spot.x > 0 for spot in spots)
    end = _infinity([spot.x for spot in spots], log=log_x)
    series = [_series(line, at, end) for at, line in enumerate(lines)]
    levels = [(line.level, line.label) for line in panel.lines if line.level is not None and math.isfinite(line.level)]
    x_label, y_label = figure.x_label or _words(figure.x), figure.y_label or _words(figure.y)
    if panel.names:
        x_label += ": " + ", ".join(f"{number} {text}" for number, text in enumerate(panel.names))
    every = [(line.label, spot) for line in lines for spot in line.spots]
    rows = [(name, short(one.x), short(one.y), spread(one.low, one.high), str(one.n)) for name, one in every]
    rows += [(label, "", short(level), "", "") for level, label in levels]
    what = ""
    if figure.best is not None:
        what = f" Shown: the {'value at the ' * (figure.best.show == 'value')}best {_words(figure.best.along)}."
    return Chart(
        name=f"{slug(figure.title)}-{name}",
        title=f"{figure.title}: {panel.title}" if panel.title else figure.title,
        x_label=x_label,
        y_label=y_label,
        series=tuple(series),
        better="",
        caption=f"Means over {', '.join(('seeds and items', *figure.over))}; bars: 95 % intervals.{what}",
        header=("Line", x_label, y_label, "95 %", "n"),
        rows=tuple(rows),
        lines=tuple(levels),
        log_x=log_x,
        infinity=end,
        log_y=figure.log_y and all(spot.y > 0 for spot in spots),
        whole_x=all(spot.x.is_integer() for spot in spots),
    )


def _words(name: str) -> str:
    """A path or a quantity in words: `rounds` of `federation.rounds`, `final accuracy` of `final_accuracy`."""
    return name.split(".")[-1].replace("_", " ")


def _infinity(places: Sequence[float], *, log: bool) -> float | None:
    """The place of infinity on the axis: a sixth of the range behind the last; None if no x is infinite."""
    finite = [place for place in places if math.isfinite(place)]
    if len(finite) == len(places):
        return None
    low, high = (min(finite), max(finite)) if finite else (1.0, 1.0)
    return high * max(high / low, 10.0) ** (1 / 6) if log else high + max(high - low, 1.0) / 6


def _series(line: Line, at: int, infinity: float | None) -> Series:
    known = [(one, one.x if math.isfinite(one.x) else infinity or 0.0) for one in line.spots if math.isfinite(one.y)]
    points = [Point(x, one.y, one.low, one.high) for one, x in known]
    finite = tuple((point.x, point.y) for point in points if point.x != infinity)
    trace = (finite or ((points[0].x, points[0].y),)) if len(finite) < len(points) else ()
    return Series(line.label, tuple(points), -1 if line.label == "no defense" else at, trace)


def drawing(chart: Chart, prefix: str) -> dict[str, Any]:
    """A chart, its SVG, its data table, and the markers of its legend. `prefix`: prefix of the ids in the chart."""
    drawn = Markup(figures.svg(chart, prefix=f"{prefix}-{chart.name}-"))
    markers = [Markup(figures.key(series, joined=chart.joined)) for series in chart.series]
    return {"chart": chart, "svg": drawn, "table": Table(chart.title, chart.header, chart.rows), "markers": markers}
