"""Clipping to a public bound, and the noise that is calibrated to it: either epsilon or a noise scale, never both."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from leakgauge.harness.core.checks import positive

DEFAULT_EPSILON = 8.0
"""Default epsilon of a defense whose parameters set neither epsilon nor the noise."""

DEFAULT_DELTA = 1e-5
"""Default delta of noise on an l2-clipped update."""

Norm = Literal["entry", "l2"]
"""What a public bound C holds for: the magnitude of each coordinate, or the l2 norm of the update."""


@dataclass(frozen=True)
class Clipped:
    """Parameters of a Gaussian mechanism on l2-clipped values: a clip, a delta, and epsilon or a noise scale."""

    clip: float = 1.0
    epsilon: float | None = None
    delta: float = DEFAULT_DELTA
    noise_std: float | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "epsilon", epsilon_unless(self.epsilon, self.noise_std))
        positive(clip=self.clip)
        check_delta(self.delta)


def epsilon_unless(epsilon: float | None, noise_std: float | None) -> float | None:
    """The epsilon that sets the noise, by default `DEFAULT_EPSILON`; None if `noise_std` sets it.

    Raises:
        ValueError: both are given, or the given one is not a finite number above zero.
    """
    if noise_std is None:
        epsilon = DEFAULT_EPSILON if epsilon is None else epsilon
        positive(epsilon=epsilon)
        return epsilon
    if epsilon is not None:
        raise ValueError(f"expected epsilon or noise_std, got both: epsilon={epsilon} and noise_std={noise_std}")
    positive(noise_std=noise_std)
    return None


def delta_for(norm: Norm, delta: float | None) -> float | None:
    """The delta of Laplace noise: 1e-5 by default for an l2 norm; None for single coordinates, whose epsilon is pure.

    Raises:
        ValueError: another norm, a delta for single coordinates, or one out of range.
    """
    if norm not in get_args(Norm):
        raise ValueError(f"expected norm {' or '.join(get_args(Norm))}, got {norm!r}")
    if norm == "entry":
        if delta is not None:
            raise ValueError(f"expected delta with norm l2 only: each entry has a pure epsilon; got delta={delta}")
        return None
    delta = DEFAULT_DELTA if delta is None else delta
    check_delta(delta)
    return delta


def check_delta(delta: float) -> None:
    """Raise ValueError unless delta is strictly between 0 and 1."""
    if not 0 < delta < 1:
        raise ValueError(f"expected 0 < delta < 1, got delta={delta}")


def normal_reach(std: float, dim: int) -> float:
    """A norm that normal noise in `dim` coordinates exceeds with a probability below e^-32 (Gaussian concentration)."""
    return std * (math.sqrt(dim) + 8)


def clip_l2(update: Tensor, bound: float) -> Tensor:
    """`update` [..., d] scaled down to an l2 norm of at most `bound`; shorter updates, including zero, stay unchanged.

    Differentiable except at zero. The norm is computed in float64, so that the bound holds up to float32 rounding.
    """
    # clamping the norm at the bound leaves a zero update, which has no direction, unchanged
    if update.ndim == 1 and not update.requires_grad:
        # same result as below: torch divides by a tensor in these two steps; Python floats halve the time
        return update * (1.0 / max(float(torch.linalg.vector_norm(update.double())), bound) * bound)
    norm: Tensor = torch.linalg.vector_norm(update.double(), dim=-1, keepdim=True)
    return update * (bound / norm.clamp(min=bound)).to(update.dtype)


def clip_coordinates(update: Tensor, bound: float) -> Tensor:
    """`update` [..., d] with every coordinate clamped to [-bound, bound]."""
    return update.clamp(-bound, bound)
