"""The objective of signed Adam: the direction of the gradient, plus the smoothness of the images."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor
from torch.nn.functional import normalize, one_hot

from leakgauge.attacks._engine.matching import evaluator
from leakgauge.attacks._engine.objective import Believed, ImagePrior, Sum
from leakgauge.attacks._search.adam import Schedule, descend
from leakgauge.attacks._search.lbfgs import Minima
from leakgauge.harness.core.contract import Observation

STEP = 0.1
"""Size of the first steps, in units of the pixel range."""

SMOOTHNESS = 3e-3
"""Weight of the total variation, see `Direction`; `inverting-gradients` documents its choice."""

_TOLERANCE = 1e-7
"""Of the objective: a distance near the rounding of a sum of thousands of squares in single precision."""


@dataclass(frozen=True)
class Direction:
    """Cosine distance of the gradients plus total variation of the images, by Adam on signs, with images in [0, 1].

    Attributes:
        evaluations: for one victim and start, at most.
        step: size of the first steps, in units of the pixel range.
        tv: weight of the mean difference of neighboring pixels, across plus down, against a distance in [0, 2].

    Raises:
        ValueError: a parameter out of range; the message names `step` as `lr`, the attack's parameter.

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
        """Search from several starts per victim, all at once.

        Args:
            targets: [n, d] estimated gradients, not zero and finite.
            labels: [n, b] int64.
            starts: [n, r, D].

        Returns:
            n r minima; start j of victim i is problem r i + j.
        """
        assert seen.model is not None
        params, images, times = seen.model.params, labels.shape[1], starts.shape[1]
        fixed = one_hot(labels, seen.task.classes).to(params.dtype).repeat_interleave(times, dim=0)
        # float64: the squares of a finite target may overflow, and those of a small one vanish
        units = normalize(targets.double(), dim=1, eps=0.0).to(params.dtype)
        matched = evaluator(seen.task, params, _Directions(units, times), images=images, labels=fixed)
        # the prior sums over neighbors; divided by the entries, `tv` means the same for every image size
        prior = ImagePrior(self.tv / (images * math.prod(seen.task.input_shape)), box=0.0)
        box = (0.0, 1.0) if len(seen.task.input_shape) == 3 else None
        schedule = Schedule(self.evaluations, self.step, _TOLERANCE, box)
        return descend(Sum((matched, Believed(prior, seen.task, images))), starts.flatten(0, 1), schedule)


@dataclass(frozen=True, eq=False)
class _Directions:
    """1 - cos of the angle between gradient and target, with `times` instances per target.

    Computed as half the squared distance of the two unit vectors, which keeps its digits where they nearly agree.
    """

    units: Tensor
    times: int

    def __call__(self, gradients: Tensor, instances: Tensor) -> Tensor:
        """Implement `Misfit`."""
        lengths = gradients.square().sum(dim=1, keepdim=True).sqrt()
        return (gradients / lengths - self.units.index_select(0, instances // self.times)).square().sum(dim=1) / 2
