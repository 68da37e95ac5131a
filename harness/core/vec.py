"""Flat parameter vectors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from leakgauge.harness.core.layout import Layout as Layout

Vector = Tensor
"""[d] float32: all parameters of a model, or an update of them, in the order of the model's layout."""


class Parts(NamedTuple):
    """The coordinates or sub-vectors to which a claim for one coordinate or sub-vector refers.

    Attributes:
        places: [k, n] int64, the coordinates of the k whole sub-vectors of length n in the first tensor.
        self_scaled: whether the update is scaled by its own norm, which is sent too. The claim then covers updates of
            equal norm and mean whose scaled numbers lie in [-1, 1] or in the unit disc.
    """

    places: Tensor
    self_scaled: bool = False


def weighted_mean(vectors: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """sum_k weights[k] * vectors[k] / sum(weights), accumulated in float64 in the given order.

    Raises:
        ValueError: no vectors, or the weights do not sum to a positive number.
    """
    if not vectors:
        raise ValueError("expected at least one vector, got none")
    total = math.fsum(weights)
    if not total > 0:
        raise ValueError(f"expected weights with a positive sum, got {list(weights)}")
    # float64, because a float32 sum over clients would differ between one and two threads
    mean = torch.zeros_like(vectors[0], dtype=torch.float64)
    for vector, weight in zip(vectors, weights, strict=True):
        mean.add_(vector, alpha=weight / total)
    return mean.to(vectors[0].dtype)
