"""Flat parameter vectors and the layout of the tensors inside them."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

Vector = Tensor
"""[d] float32: all parameters of a model, or an update of them, in the order of the model's layout."""


@dataclass(frozen=True)
class Layout:
    """Names and shapes of a model's tensors, in their order in the flat vector."""

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        if len(self.names) != len(self.shapes):
            raise ValueError(f"expected one shape per name, got {len(self.names)} names and {len(self.shapes)} shapes")

    @functools.cached_property
    def sizes(self) -> tuple[int, ...]:
        """Number of entries of each tensor."""
        return tuple(math.prod(shape) for shape in self.shapes)

    @functools.cached_property
    def dim(self) -> int:
        """d, the length of the flat vector."""
        return sum(self.sizes)

    def split(self, vector: Tensor) -> list[Tensor]:
        """Views of the last axis of `vector` [..., d], one per tensor, in the tensors' shapes [..., *shape].

        Raises:
            ValueError: the last axis does not have length d.
        """
        if vector.shape[-1] != self.dim:
            raise ValueError(f"expected a last axis of {self.dim} entries, got {tuple(vector.shape)}")
        lead = vector.shape[:-1]
        parts = torch.split(vector, list(self.sizes), dim=-1)
        return [tensor.reshape(*lead, *shape) for tensor, shape in zip(parts, self.shapes, strict=True)]

    def join(self, tensors: Sequence[Tensor]) -> Tensor:
        """The flat vector [d] of tensors in this layout's shapes."""
        return torch.cat([tensor.reshape(-1) for tensor in tensors])


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
