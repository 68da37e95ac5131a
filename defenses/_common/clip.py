"""Clipping to a public bound, to which a noise scale can be calibrated."""

from __future__ import annotations

import torch
from torch import Tensor


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
