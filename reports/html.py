"""The report: one HTML page that loads nothing and works without a script, or a folder with nothing inline."""

from __future__ import annotations

import base64
import hashlib
import re
import traceback
from collections.abc import Collection, Sequence
from functools import cache
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from leakgauge.harness.core.result import Run
from leakgauge.harness.core.sinks import visible
from leakgauge.reports.sections import FOLDED, C, Section, sections
from leakgauge.reports.select import Analysis, Images

if TYPE_CHECKING:
    from leakgauge.reports.sections.changes import Against

PAGE, STYLE, SCRIPT, PICTURES = "index.html", "style.css", "script.js", "pictures"
"""Names in the folder of a report."""

_INSIDE = re.compile(
    r'(?P<attribute>src|href)="data:(?P<kind>[a-z/+.-]+)(;charset=[a-z0-9-]+)?;base64,(?P<content>[A-Za-z0-9+/=]+)"'
    r'(?P<saved> download="(?P<name>[a-z0-9.-]+)")?'
)
"""A file inside a page. No text of a run can match this pattern, because its quotes are escaped."""

_ENDINGS = {"image/png": "png", "image/svg+xml": "svg"}
_OURS = re.compile(rf"[0-9a-f]{{16}}\.({'|'.join(_ENDINGS.values())})")


def render(
    run: Run, *, images: Images = "public", linked: bool = False, home: str = "", against: Against | None = None
) -> str:
    """The whole page.

    Args:
        images, against: see `Analysis`.
        linked, home: see `page`.

    Returns:
        HTML that loads nothing: style, script, charts and pictures are inline, and its policy forbids all else.
        A linked page loads files of its folder, and its policy forbids inline content.

    Guarantees:
        The same run gives the same page.
        A section that cannot be built shows its error instead; the other sections are unaffected.
        Every text of the run is escaped and cannot change the direction of the text after it.
    """
    return page(run.name, sections(), Analysis(run, images=images, against=against), linked=linked, home=home)


def page(
    name: str, parts: Sequence[Section[C]], content: C, *, linked: bool = False, home: str = "", asks: bool = False
) -> str:
    """A page with these sections, each built from `content`; the guarantees are those of `render`.

    Args:
        linked: whether style and script are files next to the page, or next to `home`, see `folder_files`.
        home: address of a page that lists this one.
        asks: whether its forms may ask for another page of the same server.
    """
    environment = _environment()
    bodies = [(section, _section(environment, section, content)) for section in parts]
    style, script = source(STYLE), source(SCRIPT)
    sources = ("'self'", "'self'", "'self'") if linked else ("data:", _hash(style), _hash(script))
    return environment.get_template("page.html").render(
        name=name,
        policy="default-src 'none'; img-src {}; style-src {}; script-src {}; ".format(*sources)
        + ("base-uri 'none'; form-action 'self'" if asks else "base-uri 'none'; form-action 'none'"),
        linked=linked,
        home=home,
        style=f"{home.removesuffix(PAGE)}{STYLE}" if linked else style,
        script=f"{home.removesuffix(PAGE)}{SCRIPT}" if linked else script,
        sections=[(section, body) for section, body in bodies if body is not None and section.place < FOLDED],
        folded=[(section, body) for section, body in bodies if body is not None and section.place >= FOLDED],
        origin=getattr(content, "origin", ""),
    )


def of_template(name: str, **content: object) -> str:
    """A page of one template, for other readers than the report's; the guarantees are those of `render`."""
    return _environment().get_template(name).render(**content)


def folder_files(run: Run, *, images: Images = "public", against: Against | None = None) -> dict[str, bytes]:
    """The report for a server whose policy forbids inline styles and scripts.

    Returns:
        By path in the folder: style, script, a file for each picture, named after its content, and the table of all
        cells; the page comes last.

    Guarantees:
        The same run gives the same bytes.
        The page has no inline style, no inline script, no `data:` address; its policy allows only its own folder.
        The charts stay in the page, as SVG without style attributes, so that they follow the theme.
    """
    files: dict[str, bytes] = {STYLE: source(STYLE).encode(), SCRIPT: source(SCRIPT).encode()}
    text, inside = taken_out(render(run, images=images, linked=True, against=against))
    return {**files, **inside, PAGE: text.encode()}


def taken_out(page: str, up: str = "") -> tuple[str, dict[str, bytes]]:
    """A linked page without the files inside it, and these by path. `up`: where they lie, from the page."""
    files = {_name(match): base64.b64decode(match["content"]) for match in _INSIDE.finditer(page)}
    return _INSIDE.sub(lambda match: f'{match["attribute"]}="{up}{_name(match)}"{match["saved"] or ""}', page), files


def stale_pictures(place: Path, files: Collection[Path]) -> list[Path]:
    """Pictures of an earlier report in this folder that the new report does not show, because it may withhold them."""
    pictures = sorted((place / PICTURES).glob("*"))
    return [path for path in pictures if _OURS.fullmatch(path.name) and path not in files]


def source(name: str) -> Markup:
    """A file of the templates, unchanged."""
    return Markup(resources.files("leakgauge.reports").joinpath("templates", name).read_text("utf-8"))


@cache
def _environment() -> Environment:
    """Templates that escape every text, show hidden characters, and stop at an unknown name."""
    environment = Environment(
        loader=PackageLoader("leakgauge.reports"),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=lambda value: visible(value) if isinstance(value, str) else value,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    # a narrow column may break a parameter list after `=` and `_`, but not inside a number
    environment.filters["breakable"] = lambda text: Markup(re.sub("([=_])", r"\1<wbr>", str(escape(text))))
    environment.filters["hashed"] = _hash
    return environment


def _section(environment: Environment, section: Section[C], content: C) -> Markup | None:
    try:
        data = section.build(content)
        if data is None:
            return None
        made = environment.from_string(section.template or f'{{% include "{section.id}.html" %}}')
        body = made.render(data=data, title=section.title, id=section.id)
    except Exception as error:
        last = traceback.format_exception_only(error)[-1].strip()
        body = environment.get_template("broken.html").render(part=section, error=last)
    return Markup(body)


def _hash(text: str) -> str:
    return "'sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() + "'"


def _name(match: re.Match[str]) -> str:
    digest = hashlib.sha256(match["content"].encode()).hexdigest()[:16]
    return match["name"] or f"{PICTURES}/{digest}.{_ENDINGS[match['kind']]}"
