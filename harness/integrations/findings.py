"""The findings of an examination, one line per check, and the place of an error in a user's code."""

from __future__ import annotations

import linecache
import traceback
from collections.abc import Callable, Sequence
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


class ConformanceError(AssertionError):
    """A defense, an attack or a task that fails checks; `findings` holds the failed ones, the message lists them."""

    def __init__(self, name: str, findings: Sequence[Finding]) -> None:
        super().__init__("\n  ".join([f"{name} fails:", *(f"{failed.name}: {failed.text}" for failed in findings)]))
        self.findings = findings


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


def told(error: BaseException, folder: Path) -> str:
    """An error as part of a line: its kind, its message, and the last line of the folder's code in its traceback."""
    text = " ".join(str(error).split())
    kind = "" if type(error) is ValueError and text else f"{type(error).__name__}{': ' if text else ''}"
    frames = [(frame.f_code, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    places = [Place(code.co_filename, line) for code, line in frames if is_own(code, folder)]
    return f"{kind}{text}{f' at {places[-1]}' if places else ''}"


def finding(name: str, check: Callable[[P], str], subject: P, folder: Path) -> Finding:
    """The finding of a check, which returns what it saw, or raises `Fault` or `Skip`.

    Any other exception is an error of the examined code; the line states its kind, its message and its place.
    """
    try:
        return Finding("ok", name, check(subject))
    except Fault as error:
        return Finding("FAIL", name, str(error))
    except Skip as error:
        return Finding("skipped", name, str(error))
    except (Exception, SystemExit) as error:
        return Finding("FAIL", name, told(error, folder))
