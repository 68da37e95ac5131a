"""Checks of arguments; an error states the expected and the given value."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping, Set
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor


def check_update(update: Tensor) -> None:
    """Raise ValueError unless the update is one-dimensional and finite; the message states the defect and its place."""
    if update.ndim != 1:
        raise ValueError(f"expected a flat update [d], got shape {tuple(update.shape)}")
    # numpy takes a third of torch's time for a short update
    finite = np.isfinite(update.detach().cpu().numpy())
    if np.count_nonzero(finite) < finite.size:
        finite = torch.isfinite(update)
        bad = int((~finite).nonzero()[0])
        raise ValueError(
            f"expected a finite update, got {float(update[bad])} at coordinate {bad} "
            f"and {int((~finite).sum())} non-finite of {update.numel()} in all"
        )


def positive(**values: float) -> None:
    """Raise ValueError for the first named value that is not a finite number above zero."""
    for name, value in values.items():
        if not (value > 0 and math.isfinite(value)):
            raise ValueError(f"expected {name} > 0, got {name}={value}")


def numbers(kinds: tuple[type, ...], **values: object) -> None:
    """Raise ValueError for the first named value that is not a finite number of one of these kinds, or is a bool."""
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, kinds) or not -(2.0**127) < value < 2.0**127:  # type: ignore[operator]
            what = "number" if float in kinds else "whole number"
            raise ValueError(f"expected a {what} as {name}, got {shown(value)}")


def shown(value: object) -> str:
    """A value in an error: one short line."""
    return f"{' '.join(repr(value).split()):.60}"


def scalars(name: str, table: object) -> dict[str, Any]:
    """A table from names to texts, numbers and booleans, with numbers of Python; ValueError if it is none."""
    if not isinstance(table, Mapping):
        raise ValueError(f"expected a table of names and values as {name}, got {type(table).__name__}")
    for key, value in table.items():
        if not isinstance(key, str) or not key.isprintable():
            raise ValueError(f"expected printable names in {name}, got {shown(key)}")
        if not isinstance(value, str | int | float | np.generic | None):
            raise ValueError(f"{name}.{key}: expected a text, a number or a boolean, got {type(value).__name__}")
    return {key: plain(value) for key, value in table.items()}


def listed(name: str, values: object, *kinds: type) -> list[Any]:
    """The items of a list, an array or an iterator.

    Raises:
        ValueError: it has no items, or none in an order, such as a text; or an item is of none of the kinds, if stated.
    """
    try:
        if isinstance(values, str | bytes | Mapping | Set) or not isinstance(values, Iterable):
            raise TypeError
        items = list(values)
    except TypeError as error:
        raise ValueError(f"expected a list as {name}, got {type(values).__name__}") from error
    if wrong := [type(item).__name__ for item in items if kinds and not isinstance(item, kinds)]:
        raise ValueError(f"expected each of {name} to be a {kinds[0].__name__}, got {wrong[0]}")
    return items


def plain(value: Any) -> Any:
    """A number of numpy as one of Python; anything else as it is."""
    return value.item() if isinstance(value, np.generic) else value


def path_of(name: str, value: object) -> Path:
    """A path; ValueError if it is none."""
    if not isinstance(value, str | os.PathLike) or "\0" in str(value):
        raise ValueError(f"expected a path as {name}, got {shown(value)}")
    return Path(value)
