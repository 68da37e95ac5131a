"""Clipping to a public bound: what a noise scale may be calibrated to."""

from __future__ import annotations

import torch
from torch import Tensor


def clip_l2(update: Tensor, bound: float) -> Tensor:
    """`update` [..., d] scaled down to an l2 norm of at most `bound`; shorter ones, zero included, pass unchanged.

    Differentiable away from zero. The norm is taken in float64, so that the bound holds to float32 rounding.
    """
    norm: Tensor = torch.linalg.vector_norm(update.double(), dim=-1, keepdim=True)
    # clamp at the bound: a zero update has no direction to clip, and none is needed
    return update * (bound / norm.clamp(min=bound)).to(update.dtype)


def clip_coordinates(update: Tensor, bound: float) -> Tensor:
    """`update` [..., d] with every coordinate clamped to [-bound, bound]."""
    return update.clamp(-bound, bound)
