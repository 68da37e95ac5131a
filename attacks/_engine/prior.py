"""An attacker's prior distribution of inputs: a distribution of coordinates, in which a search moves."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from leakgauge.attacks._engine.matching import Evaluation, Function
from leakgauge.harness.core.contract import Observation
from leakgauge.harness.core.errors import suggestion
from leakgauge.harness.learn.prior import gaussian_prior, outside

TV, BOX = 5.0, 100.0
"""Default weights; `benchmarks/prior_weight.py` documents the choice of the first."""

_SMOOTH = 1e-2  # width of the rounded tip of |difference|, in units of the pixel range: L-BFGS needs a gradient at zero
_SPREAD = 0.1  # distance of restart 1 from a fitted prior's center, in standard deviations; restart 0 begins there


class Prior(Protocol):
    """A distribution of independent inputs: x = inputs(z), where z has a density.

    A prior may have `pull`, the slope of its energy by hand, as in `GaussianPrior`; otherwise autograd computes it.
    """

    @property
    def words(self) -> str:
        """Words for the report: what the prior is and what it was fitted to."""

    @property
    def centered(self) -> bool:
        """Whether z is about standard normal, so that a search begins at 0; otherwise it begins at random inputs."""

    def inputs(self, z: Tensor) -> Tensor:
        """[..., p]: the inputs at z [..., k]; differentiable."""

    def coordinates(self, x: Tensor) -> Tensor:
        """[..., k]: the coordinates of inputs [..., p]."""

    def energy(self, z: Tensor, x: Tensor) -> Tensor:
        """[m]: -log p(z) up to a constant, for z [m, b, k] at x = inputs(z) [m, b, *input_shape]; differentiable."""


@dataclass(frozen=True)
class ImagePrior:
    """A prior that favors similar neighboring pixels and pixels in [0, 1]; the coordinates are x itself.

    Attributes:
        tv: weight of the total variation: a Laplace distribution of scale 1/tv for differences of neighboring pixels.
        box: weight of the squared distance to [0, 1].
    """

    words: ClassVar[str] = "total variation"
    centered: ClassVar[bool] = False

    tv: float
    box: float

    def __post_init__(self) -> None:
        for name, value in (("tv", self.tv), ("box", self.box)):
            if not 0 <= value < float("inf"):
                raise ValueError(f"expected {name} >= 0, got {name}={value}")

    def inputs(self, z: Tensor) -> Tensor:
        """Implement `Prior`."""
        return z

    def coordinates(self, x: Tensor) -> Tensor:
        """Implement `Prior`."""
        return x

    def energy(self, z: Tensor, x: Tensor) -> Tensor:
        """Implement `Prior`; for inputs without height and width, only the box term counts."""
        box = self.box * outside(x)
        if x.ndim != 5:
            return box
        across = (x[..., :, 1:] - x[..., :, :-1]).flatten(1)
        down = (x[..., 1:, :] - x[..., :-1, :]).flatten(1)
        differences = torch.cat([across, down], 1)
        variation = ((differences.square() + _SMOOTH**2).sqrt() - _SMOOTH).sum(1)
        return self.tv * variation + box


def check_prior(name: str) -> None:
    """Raise ValueError if no prior has this name."""
    if name != "tv":
        fitting(name)


def prior_of(name: str, observation: Observation, tv: float = TV, box: float = BOX) -> Prior:
    """The prior called `name`, fitted to the auxiliary inputs unless it is total variation.

    Args:
        tv: weight of the total variation. box: weight of the squared distance to [0, 1].
    """
    if name == "tv":
        return ImagePrior(tv, box)
    assert observation.auxiliary is not None
    return fitting(name)(observation.auxiliary.x.to(observation.device), box)


def fitting(name: str) -> Callable[[Tensor, float], Prior]:
    """The function that fits the prior called `name` to auxiliary inputs [n, *input_shape], given the box's weight.

    A user's own prior is `module:function`.

    Raises:
        ValueError: no prior has this name, or the function cannot be imported.
    """
    if name == "gaussian":
        return gaussian_prior
    module, _, attribute = name.partition(":")
    if not attribute:
        raise ValueError(f"no prior {name!r}{suggestion(name, ['tv', 'gaussian', 'module:function'])}")
    try:
        fit = getattr(importlib.import_module(module), attribute)
    except (Exception, SystemExit) as error:  # a user's module may fail in any way
        raise ValueError(f"no prior {name!r}: {type(error).__name__}: {error}") from error
    if not callable(fit):
        raise ValueError(f"expected a function of auxiliary inputs for prior {name!r}, got {fit!r}")
    return fit  # type: ignore[no-any-return]


@dataclass(frozen=True, eq=False)
class Believed:
    """A function of inputs plus `weight` times the prior's energy, as a function of its coordinates [m, images k].

    others: number of last entries of each candidate that are not inputs and stay unchanged.
    """

    function: Function
    prior: Prior
    shape: tuple[int, ...]
    images: int
    weight: float = 1.0
    others: int = 0

    def __call__(self, candidates: Tensor, instances: Tensor) -> Evaluation:
        count = candidates.shape[1] - self.others
        pull: Callable[[Tensor, Tensor, Tensor, float], Tensor] | None = getattr(self.prior, "pull", None)
        z = candidates[:, :count].detach().view(len(candidates), self.images, -1).requires_grad_(pull is None)
        x = self.prior.inputs(z)
        energy = self.weight * self.prior.energy(z, x.view(len(x), self.images, *self.shape))
        at = x.detach().flatten(1)
        value, slope = self.function(torch.cat([at, candidates[:, count:]], 1) if self.others else at, instances)
        inputs = slope.shape[1] - self.others
        of_inputs = slope[:, :inputs].view(x.shape)
        if pull is not None:
            pulled = pull(z, x, of_inputs, self.weight)
        else:
            (pulled,) = torch.autograd.grad([energy, x], z, [torch.ones_like(energy), of_inputs])
        whole = torch.cat([pulled.flatten(1), slope[:, inputs:]], 1) if self.others else pulled.flatten(1)
        return Evaluation(value + energy.detach(), whole)


def mapped(rows: Tensor, images: int, others: int, change: Callable[[Tensor], Tensor]) -> Tensor:
    """[m, ...]: rows [m, D] with `change` applied to each image's inputs or coordinates; the last `others` stay."""
    count = rows.shape[1] - others
    changed = change(rows[:, :count].view(len(rows), images, -1)).flatten(1)
    return torch.cat([changed, rows[:, count:]], 1)


def near_center(z: Tensor, restart: int) -> Tensor:
    """Start coordinates [m, k] of restart `restart`: the center first, then points in the direction of z."""
    length: Tensor = z.norm(dim=1, keepdim=True)
    return z * (_SPREAD * restart * math.sqrt(z.shape[1]) / length)
