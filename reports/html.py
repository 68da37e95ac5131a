"""The report: one HTML page that loads nothing, readable without a script."""

from __future__ import annotations

import base64
import hashlib
import re
import traceback
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from importlib import resources
from typing import Any, NamedTuple, TypeVar

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from leakgauge.harness.core.result import Run
from leakgauge.reports.charts import figures
from leakgauge.reports.charts.messages import Traffic, traffic
from leakgauge.reports.sections import leakage
from leakgauge.reports.sections.changes import Against, Changes, changes
from leakgauge.reports.sections.claims import claims
from leakgauge.reports.sections.limits import limits
from leakgauge.reports.sections.pictures import Images, gallery
from leakgauge.reports.sections.provenance import provenance
from leakgauge.reports.sections.results import everything
from leakgauge.reports.sections.tradeoffs import charts
from leakgauge.reports.sections.verdict import verdict
from leakgauge.reports.select import HIGH, LOW, RECOGNIZABLE, Analysis

STYLE, SCRIPT = "style.css", "script.js"
"""Beside a page that has them in files of their own."""

_UNSEEN = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
"""What no page can show, or what turns the text that follows it around."""

_Text = TypeVar("_Text", bound=str)


class Section(NamedTuple):
    """A part of the page: its id and template, its heading, its name in the navigation, its content or its error."""

    id: str
    title: str
    short: str
    body: Markup


@dataclass(frozen=True)
class Part:
    """How a section is made. `build` returns None where a run has nothing for it."""

    id: str
    title: str
    short: str
    build: Callable[[Analysis, Images], object | None]


class Drawing(NamedTuple):
    """A chart and its SVG."""

    chart: figures.Chart
    svg: Markup
    markers: tuple[Markup, ...]


class TradeOffs(NamedTuple):
    """The charts and the table of messages of one setting."""

    setting: str
    drawings: tuple[Drawing, ...]
    traffic: tuple[Traffic, ...]


class Leakage(NamedTuple):
    """The matrices and how their intervals were made."""

    matrices: tuple[leakage.Matrix, ...]
    methods: tuple[str, ...]
    high: str
    low: str
    recognizable: float


def _leakage(analysis: Analysis, images: Images) -> Leakage | None:
    """Section 3."""
    found = leakage.matrices(analysis)
    if found is None:
        return None
    return Leakage(found, leakage.methods(analysis), f"{HIGH * 100:.0f} %", f"{LOW * 100:.0f} %", RECOGNIZABLE)


def _trade_offs(analysis: Analysis, images: Images) -> tuple[TradeOffs, ...] | None:
    """Section 5."""
    found = []
    for index, (setting, name) in enumerate(analysis.settings.items()):
        drawings = tuple(_drawing(chart, index) for chart in charts(analysis, setting))
        rows = traffic(analysis, setting)
        if drawings or rows:
            found.append(TradeOffs(name, drawings, rows))
    return tuple(found) or None


def drawable(chart: figures.Chart) -> figures.Chart:
    """The chart with names that XML can hold and that do not turn the words around them."""
    values = {field.name: getattr(chart, field.name) for field in fields(chart)}
    texts: dict[str, Any] = {name: visible(value) for name, value in values.items() if isinstance(value, str)}
    series = tuple(replace(one, label=visible(one.label)) for one in chart.series)
    lines = tuple((height, visible(name)) for height, name in chart.lines)
    return replace(chart, series=series, lines=lines, **texts)


def _drawing(chart: figures.Chart, index: int) -> Drawing:
    """A chart with the keys of its legend."""
    chart = drawable(chart)
    drawn = figures.svg(chart, prefix=f"s{index}-{chart.name}-")
    return Drawing(chart, Markup(drawn), tuple(Markup(figures.key(s, joined=chart.joined)) for s in chart.series))


PARTS = (
    Part("verdict", "Verdict", "Verdict", lambda analysis, _: verdict(analysis)),
    Part("claims", "What the defenses claim, and what holds", "Claims", lambda analysis, _: claims(analysis)),
    Part("leakage", "Leakage by defense and attack", "Leakage", _leakage),
    Part("pictures", "What the attacker sees", "Reconstructions", gallery),
    Part("tradeoffs", "Trade-offs", "Trade-offs", _trade_offs),
    Part("results", "All results", "All results", lambda analysis, _: everything(analysis)),
    Part("limits", "What this report does not show", "Limits", lambda analysis, _: limits(analysis)),
    Part("provenance", "Provenance", "Provenance", lambda analysis, _: provenance(analysis)),
)


def _breakable(text: str) -> Markup:
    """A parameter list that a narrow column may break after `=` and `_`, but not inside a number."""
    return Markup(re.sub("([=_])", r"\1<wbr>", str(escape(text))))


def _code(found: re.Match[str]) -> str:
    """A character as a study would spell it: `\\u202e`."""
    return f"\\u{ord(found[0]):04x}"


def visible(text: _Text) -> _Text:
    """A text in which control characters and changes of direction are spelled out, still safe where it was safe.

    So a name cannot turn the words around it, or end the page: `a\\u202eb` stands for itself.
    """
    return type(text)(_UNSEEN.sub(_code, text)) if _UNSEEN.search(text) else text


def _shown(value: object) -> object:
    """What a template prints for a value."""
    return visible(value) if isinstance(value, str) else value


def _environment() -> Environment:
    """Templates that escape everything, show what is hidden, and stop at a name that they do not know."""
    environment = Environment(
        loader=PackageLoader("leakgauge.reports"),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_shown,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["breakable"] = _breakable
    return environment


def _section(environment: Environment, part: Part, analysis: Analysis, images: Images) -> Section | None:
    """One section; where it cannot be built its error stands in its place."""
    try:
        content = part.build(analysis, images)
        if content is None:
            return None
        body = environment.get_template(f"{part.id}.html").render(data=content, title=part.title)
    except Exception as error:
        last = traceback.format_exception_only(error)[-1].strip()
        body = environment.get_template("broken.html").render(
            title=part.title, error=last, id=part.id, first=part.id == "verdict"
        )
    return Section(part.id, part.title, part.short, Markup(body))


def source(name: str) -> Markup:
    """A file of the templates as it is."""
    return Markup(resources.files("leakgauge.reports").joinpath("templates", name).read_text("utf-8"))


def _hash(text: str) -> str:
    """What a content security policy calls one inline element."""
    return "'sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() + "'"


def _changed(against: Against) -> Part:
    """The section on a comparison."""

    def build(analysis: Analysis, images: Images) -> Changes:
        names = {label: known.text for label, known in (analysis.defenses | analysis.attacks).items()}
        return changes(*against, names=names)

    return Part("changes", "What changed since the baseline", "Changes", build)


def render(run: Run, *, images: Images = "public", linked: bool = False, against: Against | None = None) -> str:
    """The whole page.

    Args:
        images: `public` shows pictures of the data sets in `run.public_data` and redacts the others with a word saying
            why; `redact` withholds all pictures and keeps their numbers; `none` leaves them out.
        against: a finished comparison, for the section on what changed; None: there is no such section.
        linked: style and script stand in files beside the page instead of inside (`reports.layout`).

    Returns:
        HTML that loads nothing: style, script, charts and pictures are inside, and its policy forbids the rest. A
        linked page loads what lies beside it, and its policy forbids what is inside.

    Guarantees:
        Same run, same page.
        A section that cannot be built prints its error where it would stand; the others are not touched.
        Every text of the run is escaped; none turns what follows it around.
    """
    environment, analysis = _environment(), Analysis(run)
    parts = PARTS if against is None else (PARTS[0], _changed(against), *PARTS[1:])
    sections = [_section(environment, part, analysis, images) for part in parts]
    style, script = source(STYLE), source(SCRIPT)
    sources = ("'self'", "'self'", "'self'") if linked else ("data:", _hash(style), _hash(script))
    return environment.get_template("page.html").render(
        name=run.name,
        policy="default-src 'none'; img-src {}; style-src {}; script-src {}; ".format(*sources)
        + "base-uri 'none'; form-action 'none'",
        linked=linked,
        style=STYLE if linked else style,
        script=SCRIPT if linked else script,
        sections=[section for section in sections if section is not None],
    )
