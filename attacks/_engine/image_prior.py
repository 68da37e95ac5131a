"""What an attacker believes of an image before he has seen anything of it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

_SMOOTH = 1e-2
"""Width of the rounded tip of |difference|, in units of the pixel range: L-BFGS needs a gradient at zero."""


@dataclass(frozen=True)
class ImagePrior:
    """-log p(x) up to a constant: neighbors are alike, and pixels are in [0, 1].

    Attributes:
        tv: weight of the total variation: a Laplace law of the differences of neighboring pixels, of scale 1/tv.
        box: weight of the squared distance to [0, 1].
    """

    tv: float
    box: float

    def __post_init__(self) -> None:
        for name, value in (("tv", self.tv), ("box", self.box)):
            if not (value >= 0 and value < float("inf")):
                raise ValueError(f"expected {name} >= 0, got {name}={value}")

    def __call__(self, x: Tensor) -> Tensor:
        """[m] of x [m, b, channels, height, width]; of inputs of another shape the box alone."""
        outside = (x - x.clamp(0, 1)).square().flatten(1).sum(1)
        if x.ndim != 5:
            return self.box * outside
        across = (x[..., :, 1:] - x[..., :, :-1]).flatten(1)
        down = (x[..., 1:, :] - x[..., :-1, :]).flatten(1)
        differences = torch.cat([across, down], 1)
        variation = ((differences.square() + _SMOOTH**2).sqrt() - _SMOOTH).sum(1)
        return self.tv * variation + self.box * outside
