"""Candidates by the direction of their gradient, and smooth: what signed Adam searches."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor
from torch.nn.functional import normalize, one_hot

from leakgauge.attacks._engine.image_prior import ImagePrior
from leakgauge.attacks._engine.matching import evaluator
from leakgauge.attacks._engine.objective import Believed, Sum
from leakgauge.attacks._search.adam import Schedule, descend
from leakgauge.attacks._search.lbfgs import Minima
from leakgauge.harness.core.contract import Observation

STEP = 0.1
"""Size of the first steps, in units of the pixel range."""

SMOOTHNESS = 3e-3
"""Weight of the total variation, see `Direction`: `inverting-gradients` tells how it was chosen."""

_TOLERANCE = 1e-7
"""Of the objective: a distance near the rounding of a sum of thousands of squares in single precision."""


@dataclass(frozen=True)
class Direction:
    """Cosine distance of the gradients, plus the total variation of the images, by Adam on signs, images in [0, 1].

    Attributes:
        evaluations: for one victim and start, at most.
        step: size of the first steps, in units of the pixel range.
        tv: weight of the mean difference of neighboring pixels, across plus down, beside a distance in [0, 2].

    Raises:
        ValueError: a parameter out of range; a step is called `lr` there, as whoever sets it does.

    Source: Geiping et al. 2020, eq. (4) and sec. 4.
    """

    evaluations: int
    step: float = STEP
    tv: float = SMOOTHNESS

    def __post_init__(self) -> None:
        if self.evaluations < 1:
            raise ValueError(f"expected evaluations >= 1, got evaluations={self.evaluations}")
        if not 0 < self.step < float("inf"):
            raise ValueError(f"expected lr > 0, got lr={self.step}")
        ImagePrior(self.tv, box=0.0)

    def search(self, seen: Observation, targets: Tensor, labels: Tensor, starts: Tensor) -> Minima:
        """From several starts a victim, all at once.

        Args:
            targets: [n, d] gradients that were told, neither zero nor infinite.
            labels: [n, b] int64.
            starts: [n, r, D].

        Returns:
            Of n r problems; start j of victim i is problem r i + j.
        """
        assert seen.model is not None
        params, images, times = seen.model.params, labels.shape[1], starts.shape[1]
        fixed = one_hot(labels, seen.task.classes).to(params.dtype).repeat_interleave(times, dim=0)
        # float64: the squares of a finite target may overflow, and those of a small one vanish
        units = normalize(targets.double(), dim=1, eps=0.0).to(params.dtype)
        matched = evaluator(seen.task, params, _Directions(units, times), images=images, labels=fixed)
        # a sum over neighbors there, the mean here, so that `tv` means the same for every size
        prior = ImagePrior(self.tv / (images * math.prod(seen.task.input_shape)), box=0.0)
        box = (0.0, 1.0) if len(seen.task.input_shape) == 3 else None
        schedule = Schedule(self.evaluations, self.step, _TOLERANCE, box)
        return descend(Sum((matched, Believed(prior, seen.task, images))), starts.flatten(0, 1), schedule)


@dataclass(frozen=True, eq=False)
class _Directions:
    """1 - cos of the angle between gradient and target, of `times` instances a target.

    As half the squared distance of the two unit vectors, which keeps its digits where they nearly agree.
    """

    units: Tensor
    times: int

    def __call__(self, gradients: Tensor, instances: Tensor) -> Tensor:
        """Implement `Misfit`."""
        lengths = gradients.square().sum(dim=1, keepdim=True).sqrt()
        return (gradients / lengths - self.units.index_select(0, instances // self.times)).square().sum(dim=1) / 2
