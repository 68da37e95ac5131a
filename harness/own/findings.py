"""The findings of an examination, one line per check, and the place of an error in a user's code."""

from __future__ import annotations

import linecache
import traceback
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import CodeType
from typing import Literal, NamedTuple, TypeVar

P = TypeVar("P")

Mark = Literal["ok", "FAIL", "skipped"]


class Finding(NamedTuple):
    """The result of one check: what was seen; or the error, its place and its fix; or why the check was skipped."""

    mark: Mark
    name: str
    text: str


class Fault(Exception):
    """An error found by a check, as the text of its line."""


class Skip(Exception):
    """Why a check does not apply, as the text of its line."""


class Place(NamedTuple):
    """A line of a user's code."""

    file: str
    line: int

    @property
    def source(self) -> str:
        """The text of the line."""
        return linecache.getline(self.file, self.line).strip()

    def __str__(self) -> str:
        """The place with its text, as in `my_defense.py:41 (noise = ...)`."""
        shown = f" ({self.source[:80]})" if self.source else ""
        return f"{Path(self.file).name}:{self.line}{shown}"


def is_own(code: CodeType, folder: Path) -> bool:
    """Whether code is in a file of this folder, but not in a package that is installed below it."""
    return Path(code.co_filename).is_relative_to(folder) and "site-packages" not in code.co_filename


def place_of(error: BaseException, folder: Path) -> str:
    """` at FILE:LINE (text)` of the last line of the user's code in an error's traceback; empty if there is none."""
    frames = [
        Place(frame.f_code.co_filename, line)
        for frame, line in traceback.walk_tb(error.__traceback__)
        if is_own(frame.f_code, folder)
    ]
    return f" at {frames[-1]}" if frames else ""


def told(error: BaseException, folder: Path) -> str:
    """An error as part of a line: its kind, its message and its place."""
    text = " ".join(str(error).split())
    kind = "" if type(error) is ValueError and text else f"{type(error).__name__}{': ' if text else ''}"
    return f"{kind}{text}{place_of(error, folder)}"


def examined(checks: Iterable[tuple[str, Callable[[P], str]]], subject: P, folder: Path) -> Iterator[Finding]:
    """The findings of checks in their order; a check returns what it saw, or raises `Fault` or `Skip`.

    Any other exception is an error of the examined code; the line states its kind, its message and its place.
    """
    for name, check in checks:
        try:
            yield Finding("ok", name, check(subject))
        except Fault as error:
            yield Finding("FAIL", name, str(error))
        except Skip as error:
            yield Finding("skipped", name, str(error))
        except (Exception, SystemExit) as error:
            yield Finding("FAIL", name, told(error, folder))
