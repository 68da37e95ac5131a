"""The layout of a model's tensors in a flat vector. Imports no torch, so that a recorder needs none."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

ENCODER, DECODER = "bottleneck.encoder", "bottleneck.decoder"
"""Names of the dense layers of a bottleneck that a defense inserts (`LocalRule.bottleneck`)."""


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

    @functools.cached_property
    def last_matrix(self) -> int | None:
        """The position of the last tensor with two axes, which is a dense layer's weight; None: there is none."""
        return max((at for at, shape in enumerate(self.shapes) if len(shape) == 2), default=None)

    @functools.cached_property
    def encoder(self) -> int | None:
        """The position of the weight of an inserted bottleneck's encoder; None: there is none."""
        return self.names.index(f"{ENCODER}.weight") if f"{ENCODER}.weight" in self.names else None

    def split(self, vector: Tensor) -> list[Tensor]:
        """Views of the last axis of `vector` [..., d], one per tensor, in the tensors' shapes [..., *shape].

        Raises:
            ValueError: the last axis does not have length d.
        """
        if vector.shape[-1] != self.dim:
            raise ValueError(f"expected a last axis of {self.dim} entries, got {tuple(vector.shape)}")
        lead = vector.shape[:-1]
        parts = vector.split(list(self.sizes), dim=-1)  # type: ignore[no-untyped-call]
        return [tensor.reshape(*lead, *shape) for tensor, shape in zip(parts, self.shapes, strict=True)]

    def join(self, tensors: Sequence[Tensor]) -> Tensor:
        """The flat vector [d] of tensors in this layout's shapes."""
        import torch

        return torch.cat([tensor.reshape(-1) for tensor in tensors])
