"""Mistakes that a user can make, said in one line each; without torch, so that saying them is quick."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UnknownNameError(LookupError):
    """No such defense, attack, data set, model or study; one line."""

    def __str__(self) -> str:
        """The message itself: a LookupError's would be quoted."""
        return str(self.args[0])


def unknown(kind: str, name: str, known: Iterable[str]) -> UnknownNameError:
    """The error for a name that is not among the known ones: the nearest where one is near, and all of them."""
    listed = list(known)
    near = difflib.get_close_matches(name, listed, 1)
    hint = f"; did you mean {near[0]!r}?" if near else "."
    return UnknownNameError(f"no {kind} {name!r}{hint} Known: {', '.join(listed)}")


class StudyError(ValueError):
    """Everything that is wrong with a study; `problems` holds one line each."""

    def __init__(self, source: str, problems: list[str]) -> None:
        self.problems = list(dict.fromkeys(problems))
        super().__init__("\n".join(f"{source}: {problem}" for problem in self.problems))
