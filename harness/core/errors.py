"""User errors, one line each. Imports no torch, so the command reports them quickly."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UnknownNameError(LookupError):
    """There is no defense, attack, data set, model or study of this name."""

    def __str__(self) -> str:
        """The plain message; LookupError would quote it."""
        return str(self.args[0])


def unknown(kind: str, name: str, known: Iterable[str]) -> UnknownNameError:
    """The error for an unknown name; it suggests the nearest known name and lists all of them."""
    return UnknownNameError(f"no {kind} {name!r}{suggestion(name, known)}")


def suggestion(name: str, known: Iterable[str]) -> str:
    """The end of an error message on an unknown name: the nearest known name, ignoring case, and all known names."""
    listed = list(known)
    plain = {known_name.casefold(): known_name for known_name in listed}
    near = difflib.get_close_matches(name.casefold(), plain, 1)
    hint = f"; did you mean {plain[near[0]]!r}?" if near else "."
    return f"{hint} Known: {', '.join(listed)}"


class StudyError(ValueError):
    """An invalid study; `problems` holds one line per problem."""

    def __init__(self, source: str, problems: list[str]) -> None:
        self.problems = list(dict.fromkeys(problems))
        super().__init__("\n".join(f"{source}: {problem}" for problem in self.problems))


class NoLikelihood(ValueError):
    """An attack or an audit needs the likelihood of a defense that states none."""


class MessageError(ValueError):
    """The bytes are not a message of this defense: wrong length, wrong round, or not finite."""
