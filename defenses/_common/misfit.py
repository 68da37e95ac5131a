"""-log density of a residual under the noise of a defense, smooth enough for an optimizer.

A residual [n, count] is a candidate's numbers minus the received ones. Every distribution returns [n], at least 0, with
finite slopes everywhere. `extra` is the variance of a further error (from a quantizer) whose distribution is not
modeled: this error widens the distribution or rounds its tip.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

ROUNDING = 1e-6
"""Assumed standard deviation between the client's and the attacker's float32 computation of one coordinate of a
gradient, in units of the gradient: about the largest difference measured between two kernels for LeNet."""

TIP = 0.1  # width of the rounded tip of |r|/b, in units of b: L-BFGS needs a gradient at zero
WALL = 0.02
"""Scale of the Laplace distribution that blurs the wall of a cell, in units of the cell's width: an optimizer cannot
use a jump. The measurement behind it is in docs/attacks.md."""

Misfit: TypeAlias = Callable[[Tensor], Tensor]
"""-log density of the received numbers, up to a constant: from a residual [n, count] to [n]."""


def laplace_misfit(residual: Tensor, scale: float, extra: float = 0.0, tip: float = TIP) -> Tensor:
    """[n]: sum |r| / b with a rounded tip (pseudo-Huber); a further error makes the tip wider."""
    tip = max(tip, math.sqrt(extra) / scale)
    return (((residual / scale).square() + tip**2).sqrt() - tip).sum(-1)


def gaussian_misfit(residual: Tensor, variance: float, extra: float = 0.0) -> Tensor:
    """[n]: |r|^2 / 2 variance."""
    return residual.square().sum(-1) / (2 * (variance + extra))


def rounding_misfit(residual: Tensor) -> Tensor:
    """[n]: |r|^2 / 2 in units of `ROUNDING`, for numbers sent without noise."""
    return 0.5 * (residual / ROUNDING).square().sum(-1)


def student_misfit(residual: Tensor, s2: float, nu: float, extra: float = 0.0) -> Tensor:
    """[n]: the misfit of pairs with bivariate t noise of scale matrix s2 I; `extra` widens s2 accordingly."""
    wide = s2 + extra * (nu - 2) / nu
    pairs = residual.reshape(len(residual), -1, 2).square().sum(-1)
    return ((nu + 2) / 2 * (pairs / (nu * wide)).log1p()).sum(-1)


def ball_misfit(distance: Tensor, wall: float = WALL) -> Tensor:
    """[n]: near zero inside a ball, constant slope far outside; distances [n, count] from its center are in radii.

    The value is -log of the probability that a distance plus Laplace noise of scale 2 `wall` is below 1. Attacks do
    better with it than with a normal distribution of the ball's covariance (docs/attacks.md).
    """
    beyond = (distance - 1) / (2 * wall)
    return (beyond.relu() - (-0.5 * (beyond.clamp(max=0.0)).exp()).log1p()).sum(-1)


def rounded_misfit(side: Tensor, step: float, noise: float, *, dithered: bool) -> Misfit:
    """The misfit of numbers with Laplace noise that are rounded, with a uniform dither, to multiples of a step.

    Exact with two exceptions: noise below `WALL` steps counts as `WALL` steps, and a cell counts as at least a fifth of
    the noise's scale wide, which rounds the tip of |r|/b. Overload counts as censoring: a cell at the edge has no outer
    end.

    Without noise, attacks do better with a wall than with |r|^2 / 2 variance (docs/attacks.md).

    Args:
        side: [n, count]: 1 if all larger numbers give the same level, -1 if all smaller ones do (overload), else 0.
        step: width of a cell.
        noise: scale b of the Laplace noise; 0: none.
        dithered: whether the adversary knows the dither; residuals then refer to the values without dither, otherwise
            to the middles of the levels.
    """
    scale = max(noise, WALL * step)
    width = max(step / scale, 2 * TIP)
    if not dithered:
        return partial(_unknown_dither, side, scale, width)
    # only the tip needs the widened cell: a cell without an outer end keeps its own inner end
    low = torch.where(side > 0, -0.5 * step / scale, -0.5 * width).masked_fill(side < 0, -torch.inf)
    high = torch.where(side < 0, 0.5 * step / scale, 0.5 * width).masked_fill(side > 0, torch.inf)
    # the least cost is in the middle of a cell, or far beyond its missing end
    least = -(-(0.5 * (low - high)).exp()).log1p().sum(-1)

    def known_cell(residual: Tensor) -> Tensor:
        cost: Tensor = _CellCost.apply(residual, low, high, scale)  # type: ignore[no-untyped-call]
        return (cost - least).clamp(min=0.0)

    return known_cell


class _CellCost(torch.autograd.Function):
    """-log P(low <= r + Laplace noise <= high), in scales, differentiable once.

    The manual slope takes half the time and little memory.
    """

    @staticmethod
    def forward(ctx: Any, residual: Tensor, low: Tensor, high: Tensor, scale: float) -> Tensor:
        r = residual / scale
        near = r.clamp(low, high)
        below, above = (low - near).exp_().mul_(0.5), (near - high).exp_().mul_(0.5)
        missed = below + above
        cost = r.sub_(near).abs_().sub_(torch.log1p(-missed)).sum(-1)
        # outside the cell, one of the two is 1/2 and the slope is 1
        ctx.save_for_backward(above.sub_(below).div_(missed.neg_().add_(1.0).mul_(scale)))
        return cost

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad: Tensor) -> tuple[Tensor, None, None, None]:
        (slope,) = ctx.saved_tensors
        return grad[0][:, None] * slope, None, None, None


def _unknown_dither(side: Tensor, scale: float, h: float, residual: Tensor) -> Tensor:
    """[n]: -log of a level's probability over all dithers: a triangle of half-width h scales, blurred by the noise."""
    r, tail = residual / scale, math.exp(-h)
    far = r.abs()
    near = far.clamp(max=h)
    falling, rising = (-near).exp(), 0.5 * (near - h).exp()
    within = (far - near) - ((h - near + rising - (1 - tail / 2) * falling) / (h - 1 + tail)).log()
    if not bool(side.any()):
        return within.sum(-1).clamp(min=0.0)
    # from the point where no dither reaches the outermost level to the point where all do
    inner = r * side + h
    on = inner.clamp(0.0, h)
    above = (inner - h).relu()
    share = (on + 0.5 * (-on - above).exp() - 0.5 * (on - h - above).exp()) / h
    edge = (-inner).relu() - share.log()
    return torch.where(side == 0, within, edge).sum(-1).clamp(min=0.0)
