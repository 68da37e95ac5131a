"""-log density of a residual under the laws that defences add, smooth enough for an optimiser.

Each takes residuals [n, count] in the unit of the numbers, and `extra`, the variance of a further error (a quantiser's)
that is not known in detail: it widens the law, or rounds its tip.
"""

from __future__ import annotations

import math

from torch import Tensor

ROUNDING = 1e-6
"""Standard deviation that is assumed between the client's and the attacker's float32 computation of one coordinate of a
gradient, in its unit: about the largest difference seen between two kernels for LeNet. An assumption, not a law."""

_TIP = 0.1
"""Width of the rounded tip of |r|/b, in units of b: L-BFGS needs a gradient at zero."""


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
