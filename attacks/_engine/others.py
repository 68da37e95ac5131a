"""The records beside the one in question, if they are unknown: how they and the defense blur a message's estimate."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch
from torch import Tensor

_LEAST = 1e-12  # variance of a coordinate without any noise, as a share of the mean square of an update


@dataclass(frozen=True, eq=False)
class Blur:
    """A normal distribution of errors: a covariance of low rank, and further noise of its own for each coordinate.

    Attributes:
        rows: [r, d]; the covariance of low rank is the mean of their outer products.
        noise: [d], variances, positive.
    """

    rows: Tensor
    noise: Tensor

    @classmethod
    def of(cls, rows: Tensor, noise: Tensor, last: int | None = None) -> Blur:
        """The distribution of which `rows` [n, d] are draws, plus `noise` [d].

        Few draws do not span all directions in which others fall. So all rows but the last ones, a third if `last` is
        None, give the covariance; what it does not explain of these is noise of each coordinate, in proportion to the
        coordinate's variance over all rows.
        """
        cut = len(rows) - (len(rows) // 3 if last is None else last)
        spread = rows.square().sum(0) / max(1, len(rows))
        least = _LEAST * float(spread.mean() + noise.mean()) or _LEAST
        fitted, held = cls(rows[:cut], noise + spread + least), rows[cut:]
        if not len(held) or float(spread.sum()) == 0:
            return cls(rows, noise + least)
        scaled = held / fitted.noise.sqrt()
        basis, _ = fitted.axes
        outside = float((scaled.square().sum() - (scaled @ basis.T).square().sum()) / scaled.square().sum())
        return cls(rows, noise + max(outside, 0.0) * spread + least)

    @functools.cached_property
    def axes(self) -> tuple[Tensor, Tensor]:
        """Orthonormal rows [r, d] in units of the noise, and the variances [r] along them, without the noise."""
        scaled = self.rows / self.noise.sqrt() / math.sqrt(max(1, len(self.rows)))
        variances, turns = torch.linalg.eigh(scaled @ scaled.T)
        kept = variances > 1e-10 * variances.max().clamp(min=1e-300) if len(variances) else variances > 0
        return (turns[:, kept] / variances[kept].sqrt()).T @ scaled, variances[kept]

    def products(self, one: Tensor, other: Tensor) -> Tensor:
        """[n, m] inner products of errors [n, d] and [m, d], over the covariance."""
        basis, variances = self.axes
        (a, along), (b, beside) = (
            (each, each @ basis.T) for each in (part / self.noise.sqrt() for part in (one, other))
        )
        return a @ b.T - (along * (variances / (1 + variances))) @ beside.T

    def log_density(self, errors: Tensor) -> Tensor:
        """[n] log density of errors [n, d], up to a constant."""
        scaled = errors / self.noise.sqrt()
        basis, variances = self.axes
        along = (scaled @ basis.T).square()
        return -0.5 * ((scaled.square().sum(1) - along.sum(1)) + (along / (1 + variances)).sum(1))
