"""-log density of a residual under the laws that defenses add, smooth enough for an optimizer.

A residual is a candidate's numbers minus those that were received, [n, count]. Every law gives [n], at least 0, with
finite slopes everywhere. `extra` is the variance of a further error (a quantizer's) that is not known in detail: it
widens the law, or rounds its tip.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

ROUNDING = 1e-6
"""Standard deviation that is assumed between the client's and the attacker's float32 computation of one coordinate of a
gradient, in its unit: about the largest difference seen between two kernels for LeNet. An assumption, not a law."""

_TIP = 0.1
"""Width of the rounded tip of |r|/b, in units of b: L-BFGS needs a gradient at zero."""

WALL = 0.02
"""Scale of the Laplace law that blurs the wall of a cell, in units of the cell's width: an optimizer cannot use a jump.
Measured, see `rounded_misfit`."""


class Misfit(Protocol):
    """-log density of what was received, up to a constant."""

    def __call__(self, residual: Tensor) -> Tensor:
        """residual: [n, count]; returns [n]."""


def laplace_misfit(residual: Tensor, scale: float, extra: float = 0.0) -> Tensor:
    """[n]: sum |r| / b with the tip rounded (pseudo-Huber), more widely where a further error blurs it."""
    tip = max(_TIP, math.sqrt(extra) / scale)
    return (((residual / scale).square() + tip**2).sqrt() - tip).sum(-1)


def gaussian_misfit(residual: Tensor, variance: float, extra: float = 0.0) -> Tensor:
    """[n]: |r|^2 / 2 variance."""
    return residual.square().sum(-1) / (2 * (variance + extra))


def student_misfit(residual: Tensor, s2: float, nu: float, extra: float = 0.0) -> Tensor:
    """[n]: of pairs that are bivariate t with scale matrix s2 I; the further error widens s2 by as much variance."""
    wide = s2 + extra * (nu - 2) / nu
    pairs = residual.reshape(len(residual), -1, 2).square().sum(-1)
    return ((nu + 2) / 2 * (pairs / (nu * wide)).log1p()).sum(-1)


def ball_misfit(distance: Tensor) -> Tensor:
    """[n]: nothing inside the ball, of distances [n, count] in radii from its center; a constant slope far outside.

    -log of the chance that a distance plus Laplace noise of scale 2 `WALL` is below 1. Attacks better than a normal law
    of the ball's covariance with a softer wall: as in `rounded_misfit`, on `cepam-clip` with noise of 0.05, mean SSIM
    0.602 for 0.567 (n = 1) and 0.561 for 0.518 (n = 3); the naive attack has 0.241 (n = 1).
    """
    beyond = (distance - 1) / (2 * WALL)
    return (beyond.relu() - (-0.5 * (beyond.clamp(max=0.0)).exp()).log1p()).sum(-1)


def rounded_misfit(side: Tensor, step: float, noise: float, *, dithered: bool) -> Misfit:
    """Of numbers that got Laplace noise and were rounded with a uniform dither to multiples of a step.

    Exact but for two things: noise of less than `WALL` steps counts as that much, and a cell as at least a fifth of the
    noise's scale wide, which rounds the tip of |r|/b. Overload is censoring: a cell at the edge has no outer end.

    Without noise a wall attacks better than |r|^2 / 2 variance. Mean SSIM of `map` on 16 images of CIFAR-10 behind the
    LeNet of DLG, gradients of root mean square 0.21, no overload; "naive" is `map` with `objective = "l2"`:

    | step, by whom | naive | variance | wall 0.05 | wall 0.02 |
    |---|---|---|---|---|
    | 0.05, server | 0.717 | 0.695 | 0.735 | 0.751 |
    | 0.2, server | 0.186 | 0.395 | 0.475 | 0.518 |
    | 0.05, no dither | 0.632 | 0.633 | - | 0.643 |
    | 0.2, no dither | 0.116 | 0.309 | 0.328 | 0.344 |

    Args:
        side: [n, count]: 1 where all numbers above look the same, -1 where all below do (overload), else 0.
        step: width of a cell.
        noise: scale b of the Laplace noise; 0: none.
        dithered: residuals are from the values without their dither, by who knows it; else from the levels' middles.
    """
    scale = max(noise, WALL * step)
    width = max(step / scale, 2 * _TIP)
    if not dithered:
        return _UnknownDither(side, scale, width)
    # a cell without an end begins where it does: the floor is for tips
    low = torch.where(side > 0, -0.5 * step / scale, -0.5 * width).masked_fill(side < 0, -torch.inf)
    high = torch.where(side < 0, 0.5 * step / scale, 0.5 * width).masked_fill(side > 0, torch.inf)
    # in the middle of a cell, or far beyond the end that it lacks
    least = -(-(0.5 * (low - high)).exp()).log1p().sum(-1)
    return _KnownCell(low, high, least, scale)


@dataclass(frozen=True, eq=False)
class _KnownCell:
    """-log of the chance that r plus Laplace noise lies from low to high, [n, count] in units of its scale.

    least: [n], the lowest value; it is subtracted.
    """

    low: Tensor
    high: Tensor
    least: Tensor
    scale: float

    def __call__(self, residual: Tensor) -> Tensor:
        """Implement `Misfit`."""
        cost: Tensor = _CellCost.apply(residual, self.low, self.high, self.scale)  # type: ignore[no-untyped-call]
        return (cost - self.least).clamp(min=0.0)


class _CellCost(torch.autograd.Function):
    """The cost of `_KnownCell`, with its slope by hand: half the time, and few temporaries to keep.

    It can be differentiated once.
    """

    @staticmethod
    def forward(ctx: Any, residual: Tensor, low: Tensor, high: Tensor, scale: float) -> Tensor:
        """[n]; keeps the slope."""
        r = residual / scale
        near = r.clamp(low, high)
        below, above = (low - near).exp_().mul_(0.5), (near - high).exp_().mul_(0.5)
        missed = below + above
        cost = r.sub_(near).abs_().sub_(torch.log1p(-missed)).sum(-1)
        # outside, one of the two is a half, and the slope is 1
        ctx.save_for_backward(above.sub_(below).div_(missed.neg_().add_(1.0).mul_(scale)))
        return cost

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad: Tensor) -> tuple[Tensor, None, None, None]:
        """The slope that was kept."""
        (slope,) = ctx.saved_tensors
        return grad[0][:, None] * slope, None, None, None


@dataclass(frozen=True, eq=False)
class _UnknownDither:
    """The chance of a level given r plus Laplace noise, over all dithers: a triangle of half-width `width`, blurred.

    side: [n, count]; width: of a cell in units of the scale.
    """

    side: Tensor
    scale: float
    width: float

    def __call__(self, residual: Tensor) -> Tensor:
        """Implement `Misfit`."""
        r, h, tail = residual / self.scale, self.width, math.exp(-self.width)
        far = r.abs()
        near = far.clamp(max=h)
        falling, rising = (-near).exp(), 0.5 * (near - h).exp()
        within = (far - near) - ((h - near + rising - (1 - tail / 2) * falling) / (h - 1 + tail)).log()
        if not bool(self.side.any()):
            return within.sum(-1).clamp(min=0.0)
        # from where no dither reaches the outermost level to where all do
        inner = r * self.side + h
        on = inner.clamp(0.0, h)
        above = (inner - h).relu()
        share = (on + 0.5 * (-on - above).exp() - 0.5 * (on - h - above).exp()) / h
        edge = (-inner).relu() - share.log()
        return torch.where(self.side == 0, within, edge).sum(-1).clamp(min=0.0)
