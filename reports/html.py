"""The report: one HTML page that loads nothing, readable without a script."""

from __future__ import annotations

import base64
import hashlib
import re
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from harness.result import Run
from reports import figures, leakage
from reports.claims import claims
from reports.limits import limits
from reports.messages import Traffic, traffic
from reports.pictures import Images, gallery
from reports.provenance import provenance
from reports.results import everything
from reports.select import HIGH, LOW, RECOGNISABLE, Analysis
from reports.tradeoffs import charts
from reports.verdict import verdict


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
    recognisable: float


def _leakage(analysis: Analysis, images: Images) -> Leakage | None:
    """Section 3."""
    found = leakage.matrices(analysis)
    if found is None:
        return None
    return Leakage(found, leakage.methods(analysis), f"{HIGH * 100:.0f} %", f"{LOW * 100:.0f} %", RECOGNISABLE)


def _trade_offs(analysis: Analysis, images: Images) -> tuple[TradeOffs, ...] | None:
    """Section 5."""
    found = []
    for index, (setting, name) in enumerate(analysis.settings.items()):
        drawings = tuple(_drawing(chart, index) for chart in charts(analysis, setting))
        rows = traffic(analysis, setting)
        if drawings or rows:
            found.append(TradeOffs(name, drawings, rows))
    return tuple(found) or None


def _drawing(chart: figures.Chart, index: int) -> Drawing:
    """A chart with the keys of its legend."""
    drawn = figures.svg(chart, prefix=f"s{index}-{chart.name}-")
    return Drawing(chart, Markup(drawn), tuple(Markup(figures.key(s, joined=chart.joined)) for s in chart.series))


PARTS = (
    Part("verdict", "Verdict", "Verdict", lambda analysis, _: verdict(analysis)),
    Part("claims", "What the defences claim, and what holds", "Claims", lambda analysis, _: claims(analysis)),
    Part("leakage", "Leakage by defence and attack", "Leakage", _leakage),
    Part("pictures", "What the attacker sees", "Reconstructions", gallery),
    Part("tradeoffs", "Trade-offs", "Trade-offs", _trade_offs),
    Part("results", "All results", "All results", lambda analysis, _: everything(analysis)),
    Part("limits", "What this report does not show", "Limits", lambda analysis, _: limits(analysis)),
    Part("provenance", "Provenance", "Provenance", lambda analysis, _: provenance(analysis)),
)


def _breakable(text: str) -> Markup:
    """A parameter list that a narrow column may break after `=` and `_`, but not inside a number."""
    return Markup(re.sub("([=_])", r"\1<wbr>", str(escape(text))))


def _environment() -> Environment:
    """Templates that escape everything and stop at a name that they do not know."""
    environment = Environment(
        loader=PackageLoader("reports"),
        autoescape=True,
        undefined=StrictUndefined,
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


def _source(environment: Environment, name: str) -> Markup:
    """A file of the templates as it is."""
    assert environment.loader is not None
    return Markup(environment.loader.get_source(environment, name)[0])


def _hash(text: str) -> str:
    """What a content security policy calls one inline element."""
    return "'sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() + "'"


def render(run: Run, *, images: Images = "public") -> str:
    """The whole page.

    Args:
        images: `public` shows pictures of the data sets in `run.public_data` and redacts the others with a word saying
            why; `redact` withholds all pictures and keeps their numbers; `none` leaves them out.

    Returns:
        HTML that loads nothing: style, script, charts and pictures are inside, and its policy forbids the rest.

    Guarantees:
        Same run, same page.
        A section that cannot be built prints its error where it would stand; the others are not touched.
        Every text of the run is escaped.
    """
    environment, analysis = _environment(), Analysis(run)
    sections = [_section(environment, part, analysis, images) for part in PARTS]
    style, script = _source(environment, "style.css"), _source(environment, "script.js")
    policy = (
        f"default-src 'none'; img-src data:; style-src {_hash(style)}; script-src {_hash(script)}; "
        "base-uri 'none'; form-action 'none'"
    )
    return environment.get_template("page.html").render(
        name=run.name,
        policy=policy,
        style=style,
        script=script,
        sections=[section for section in sections if section is not None],
    )
