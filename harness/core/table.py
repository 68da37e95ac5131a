"""Columns of a table encoded as vectors: which entries form a column, and when a guess of a column is right."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


class Column(NamedTuple):
    """One column.

    Attributes:
        width: number of entries: 1 for a number in [0, 1], else one entry per category (one-hot).
        tolerance: a guess of a number is right up to this difference.
    """

    name: str
    width: int
    tolerance: float = 0.0


def parts(x: Tensor, columns: Sequence[Column]) -> Iterator[tuple[Column, Tensor]]:
    """Each column with its entries [..., width] of records x [..., p]."""
    return zip(columns, torch.split(x, [column.width for column in columns], dim=-1), strict=True)


def records(x: Tensor, columns: Sequence[Column]) -> Tensor:
    """The valid records nearest to vectors x [..., p]: one-hot at the largest entry, numbers clamped to [0, 1]."""
    nearest = []
    for column, entries in parts(x, columns):
        number, largest = column.width == 1, torch.nn.functional.one_hot(entries.argmax(-1), column.width)
        nearest.append(entries.clamp(0, 1) if number else largest.to(entries.dtype))
    return torch.cat(nearest, -1)


def commonest(x: Tensor, columns: Sequence[Column]) -> Tensor:
    """[p] the guess that is right most often for records x [n, p], column by column."""
    each = [
        likeliest_number(entries[:, 0], torch.ones_like(entries[:, 0]), column.tolerance)[None]
        if column.width == 1
        else entries.sum(0)
        for column, entries in parts(x, columns)
    ]
    return records(torch.cat(each), columns)


def has_property(x: Tensor, columns: Sequence[Column], name: str, usual: Tensor) -> Tensor:
    """[n] bool: which of records x [n, ...] have a property; `usual` [m, ...] are records that define what is large.

    Args:
        name: a column: its number is above the mean of `usual`, or its category is the commonest one of `usual`; or
            `brightness`, for other inputs: the mean of the entries is above the mean of `usual`.

    Raises:
        ValueError: there is no such property.
    """
    if not columns and name == "brightness":
        return x.double().flatten(1).mean(1) > usual.double().mean()
    if name not in (known := [column.name for column in columns] or ["brightness"]):
        raise ValueError(f"property: got {name!r}, expected one of: {', '.join(known)}")
    own, all_ = (dict(zip(known, (each for _, each in parts(rows, columns)), strict=True))[name] for rows in (x, usual))
    if own.shape[-1] == 1:
        return own[:, 0] > all_.double().mean()
    return own.argmax(-1) == all_.sum(0).argmax()


def spread_evenly(labels: Tensor, many: Tensor) -> Tensor:
    """[n, b] bool: which `many` [n] of the places in a row of labels [n, b] have a property, evenly over the labels."""
    b, rank = labels.shape[1], labels.sort(dim=1, stable=True).indices.argsort(1)
    ends: Tensor = (rank + 1) * many[:, None] // b
    return ends > rank * many[:, None] // b


def likeliest_number(x: Tensor, weights: Tensor, tolerance: float) -> Tensor:
    """[...] the number of x [..., n] with the most weight within its tolerance; of several, the middle one."""
    ordered, order = x.double().sort(-1)
    total = torch.nn.functional.pad(weights.double().gather(-1, order).cumsum(-1), (1, 0))
    ends = [torch.searchsorted(ordered, ordered + tolerance * sign, right=sign > 0) for sign in (1, -1)]
    near = total.gather(-1, ends[0]) - total.gather(-1, ends[1])
    most = near >= near.amax(-1, keepdim=True) - 1e-9
    middle = (most.sum(-1, keepdim=True) + 1) // 2
    at = (most.cumsum(-1) < middle).sum(-1, keepdim=True)
    return ordered.gather(-1, at)[..., 0].to(x.dtype)


def columns_right(truth: Tensor, guess: Tensor, columns: Sequence[Column]) -> Tensor:
    """[..., number of columns] bool: whether each column of `records(guess)` is that of the truth [..., p]."""
    pairs = zip(parts(truth, columns), parts(records(guess, columns), columns), strict=True)
    # rounding to float32 may move a number one step beyond the tolerance
    return torch.stack([((a - b).abs() <= column.tolerance + 1e-6).all(-1) for (column, a), (_, b) in pairs], -1)


def texts(truth: Tensor, guess: Tensor, columns: Sequence[Column]) -> tuple[npt.NDArray[np.str_], npt.NDArray[np.str_]]:
    """Records [n, p] and guesses of them in words [n, columns], for readers: a number, or the number of a category.

    A number that is right within its tolerance has the words of the truth.
    """
    shown = []
    for x in (truth.cpu(), records(guess.cpu(), columns)):
        each = [
            [f"{column.name} {value:.2f}" for value in entries[:, 0].tolist()]
            if column.width == 1
            else [f"{column.name} #{value}" for value in entries.argmax(-1).tolist()]
            for column, entries in parts(x, columns)
        ]
        shown.append(np.array(each).T)
    own, found = shown
    return own, np.where(columns_right(truth.cpu(), guess.cpu(), columns).numpy(), own, found)
