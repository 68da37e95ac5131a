"""The report as files: one page with all inside, or a folder whose page has nothing inline."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Collection
from pathlib import Path
from typing import Literal

from leakgauge.harness.core.result import Run
from leakgauge.reports.html import SCRIPT, STYLE, render, source
from leakgauge.reports.sections.changes import Against
from leakgauge.reports.sections.pictures import Images

Layout = Literal["file", "dir"]

PAGE = "index.html"
PICTURES = "pictures"

_INSIDE = re.compile(
    r'(?P<attribute>src|href)="data:(?P<kind>[a-z/+.-]+)(;charset=[a-z0-9-]+)?;base64,(?P<content>[A-Za-z0-9+/=]+)"'
    r'(?P<saved> download="(?P<name>[a-z0-9.-]+)")?'
)
"""A file inside a page. No text of a run can look like one: its quotes are escaped."""

_ENDINGS = {"image/png": "png", "image/svg+xml": "svg"}
_OURS = re.compile(rf"[0-9a-f]{{16}}\.({'|'.join(_ENDINGS.values())})")


def report_files(
    run: Run, place: Path, layout: Layout, *, images: Images = "public", against: Against | None = None
) -> dict[Path, bytes]:
    """The files of a report by where they go, its page last. `place` is the page, or the folder of the page."""
    if layout == "file":
        return {place: render(run, images=images, against=against).encode()}
    return {place / name: content for name, content in folder_files(run, images=images, against=against).items()}


def folder_files(run: Run, *, images: Images = "public", against: Against | None = None) -> dict[str, bytes]:
    """The report for a server whose policy forbids inline styles and scripts.

    Returns:
        By path in the folder: style, script, a file for each picture, named after its content, the table of all cells;
        the page comes last.

    Guarantees:
        Same run, same bytes.
        The page has no inline style, no inline script, no `data:` address; its policy allows its own folder only.
        The charts stay in it, as SVG without a style attribute, so that they follow the theme.
    """
    files: dict[str, bytes] = {STYLE: source(STYLE).encode(), SCRIPT: source(SCRIPT).encode()}
    page = render(run, images=images, linked=True, against=against)
    files |= {_name(found): base64.b64decode(found["content"]) for found in _INSIDE.finditer(page)}
    return {**files, PAGE: _INSIDE.sub(_link, page).encode()}


def _name(found: re.Match[str]) -> str:
    """Where the content of a file inside a page goes."""
    digest = hashlib.sha256(found["content"].encode()).hexdigest()[:16]
    return found["name"] or f"{PICTURES}/{digest}.{_ENDINGS[found['kind']]}"


def _link(found: re.Match[str]) -> str:
    """The attribute that names this file instead of holding it."""
    return f'{found["attribute"]}="{_name(found)}"{found["saved"] or ""}'


def stale_pictures(place: Path, files: Collection[Path]) -> list[Path]:
    """Pictures that an earlier report left in its folder and that this one does not show: it may withhold them."""
    found = sorted((place / PICTURES).glob("*"))
    return [path for path in found if _OURS.fullmatch(path.name) and path not in files]
