"""The objective of a search by direction: the angle between gradients, and how likely the inputs are."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import normalize

from leakgauge.attacks._engine.matching import Evaluator, Function, evaluator
from leakgauge.attacks._engine.prior import Believed, ImagePrior, Prior
from leakgauge.attacks._engine.simulate import messages_of
from leakgauge.attacks._search.adam import Schedule, descend
from leakgauge.attacks._search.lbfgs import Minima
from leakgauge.harness.core.contract import Observation
from leakgauge.harness.learn.batch import LocalPlan
from leakgauge.harness.learn.gradients import targets_of

STEP = 0.1
"""Size of the first signed steps, in units of the pixel range."""

SMOOTHNESS = 3e-3
"""Weight of the total variation, see `Direction`; `docs/attacks.md` has its choice."""

_WHITE_STEP = 0.3  # size of the first steps in the coordinates of a fitted prior, in standard deviations
_WHITE_WEIGHT = 0.3  # weight of a fitted prior; `docs/attacks.md` has the results of other weights and steps
_TOLERANCE = 1e-7  # near the single-precision rounding of a sum of thousands of squares


@dataclass(frozen=True)
class Direction:
    """Minimizes the distance of gradient directions plus the inputs' mean energy, by Adam in the prior's coordinates.

    Attributes:
        evaluations: maximum number for one victim and start.
        step: size of the first steps, in units of the coordinates.
        prior: prior of the inputs.
        weight: weight of the prior's energy per input entry, against a distance in [0, 2].
        informed: True: the distance is the angle over pi, and the steps are Adam's and decay with a cosine. False: the
            distance is 1 minus the cosine, by Adam on signs within [0, 1], as in the source.

    Raises:
        ValueError: a parameter is out of range; the message names `step` as `lr`, the attack's parameter.

    Source: Geiping et al. 2020, eq. (4) and sec. 4.
    """

    evaluations: int
    step: float
    prior: Prior
    weight: float
    informed: bool = False

    def __post_init__(self) -> None:
        if self.evaluations < 1:
            raise ValueError(f"expected evaluations >= 1, got evaluations={self.evaluations}")
        if not 0 < self.step < float("inf"):
            raise ValueError(f"expected lr > 0, got lr={self.step}")

    @classmethod
    def smooth(cls, evaluations: int, step: float = STEP, tv: float = SMOOTHNESS) -> Direction:
        """With total variation, as published; tv: weight of neighbors' mean difference, horizontal plus vertical."""
        ImagePrior(tv, box=0.0)
        return cls(evaluations, step, ImagePrior(1.0, box=0.0), tv)

    @classmethod
    def of(cls, prior: Prior, evaluations: int) -> Direction:
        """In the coordinates of a prior with a center, which are about standard normal; else with total variation."""
        if not prior.centered:
            return cls.smooth(evaluations)
        return cls(evaluations, _WHITE_STEP, prior, _WHITE_WEIGHT, informed=True)

    def search(
        self, observation: Observation, targets: Tensor, labels: Tensor, starts: Tensor, plan: LocalPlan | None = None
    ) -> Minima:
        """Search from several starts per victim, all at once.

        Args:
            targets: [n, d], estimated gradients, nonzero and finite.
            labels: [n, b] int64.
            starts: [n, r, D], in the prior's coordinates.
            plan: the steps of an update, which the search follows; None: an update counts as one gradient.

        Returns:
            n r minima; start j of victim i is problem r i + j.
        """
        assert observation.model is not None
        task, params, images, times = observation.task, observation.model.params, labels.shape[1], starts.shape[1]
        fixed = targets_of(task, labels, params.dtype).repeat_interleave(times, dim=0)
        # float64, because squares of a finite target may overflow, and those of a small target vanish
        units = normalize(targets.double(), dim=1, eps=0.0).to(params.dtype)
        misfit = _Directions(units if plan is None or plan.gradient else -units, times, self.informed)
        if plan is None:
            matched: Function = evaluator(task, params, misfit, images=images, labels=fixed)
        else:
            matched = Evaluator(task, misfit, images, fixed, partial(messages_of, task, params, plan, 1))
        weight = self.weight / (images * math.prod(task.input_shape))
        whole = Believed(matched, self.prior, task.input_shape, images, weight)
        box = (0.0, 1.0) if len(task.input_shape) == 3 and not self.informed else None
        schedule = Schedule(self.evaluations, self.step, _TOLERANCE, box, signed=not self.informed)
        return descend(whole, starts.flatten(0, 1), schedule)


@dataclass(frozen=True, eq=False)
class _Directions:
    """The distance of the directions of gradient and target, with `times` instances per target.

    Angle and cosine are computed from the unit vectors' distance, which keeps its digits where the vectors nearly
    agree.

    Attributes:
        angle: the angle over pi, in [0, 1]; otherwise 1 minus its cosine.
    """

    units: Tensor
    times: int
    angle: bool

    def __call__(self, gradients: Tensor, instances: Tensor) -> Tensor:
        lengths = gradients.square().sum(dim=1, keepdim=True).sqrt()
        units, sought = gradients / lengths, self.units.index_select(0, instances // self.times)
        distance = (units - sought).square().sum(dim=1)
        if not self.angle:
            return distance / 2
        together = (units + sought).square().sum(dim=1)
        # the tip of the angle at zero is rounded by less than the rounding of the sums
        return 2 / math.pi * torch.atan2((distance + _TOLERANCE**2).sqrt(), together.sqrt())
