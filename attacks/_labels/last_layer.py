"""The last layer of a model: where it lies, and what of a gradient belongs to it."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from leakgauge.harness.core.contract import Task


class LastLayer(NamedTuple):
    """first, stop: its tensors, as a range of the layout: weight [classes, m] and, where there is one, bias."""

    first: int
    stop: int

    @property
    def biased(self) -> bool:
        """Whether there is a bias."""
        return self.stop - self.first == 2


def last_layer(task: Task) -> LastLayer:
    """Where the last layer lies.

    Raises:
        ValueError: labels cannot be read off it, see `restore`.
    """
    if not task.softmax:
        raise ValueError("expected a softmax cross-entropy loss to infer labels, got another")
    shapes = task.layout.shapes
    stop = len(shapes)
    first = stop - 2 if stop > 1 and shapes[-1] == (task.classes,) else stop - 1
    if len(shapes[first]) != 2 or shapes[first][0] != task.classes:
        raise ValueError(
            f"expected a dense last layer with {task.classes} rows to infer labels, "
            f"got {task.layout.names[first]!r} of shape {shapes[first]}"
        )
    return LastLayer(first, stop)


def rows_of(task: Task, layer: LastLayer, vectors: Tensor) -> Tensor:
    """[n, classes, m + 1 or m] of vectors [n, d]: what belongs to the last layer, the bias as the last column."""
    parts = task.layout.split(vectors)[layer.first : layer.stop]
    return torch.cat([part.reshape(len(vectors), task.classes, -1) for part in parts], dim=2)


def noise_of(rows: Tensor) -> Tensor:
    """[n] standard deviation of the noise in an entry, from sums of rows, which have no other reason not to be zero."""
    return (rows.sum(dim=1).square().mean(dim=1) / rows.shape[1]).sqrt()
