"""Adam, optionally on signs of gradients, for many independent problems at once, each with its own box and end."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from leakgauge.attacks._engine.matching import Function
from leakgauge.attacks._search.lbfgs import UNWATCHED, Minima

_DECAY = 0.1  # factor of the size of signed steps after 3/8, 5/8 and 7/8 of the evaluations
_MEMORIES = (0.9, 0.999)  # decay of the running mean and mean square (Kingma and Ba 2015, Algorithm 1)
_TINY = 1e-8  # added to the root mean square of signs, which is zero only if every gradient was zero

_ROUNDING = 64.0
"""Multiple of the machine's precision: a smaller share of a problem's largest slope is rounding. Adam would make it a
full step, in a direction that depends on the processor."""


@dataclass(frozen=True)
class Schedule:
    """Budget, step sizes and bounds.

    Attributes:
        evaluations: maximum number for one problem.
        step: size of the first steps, in units of x.
        tolerance: a problem with this value or below has converged.
        box: lower and upper bound of every variable; None: unbounded.
        signed: whether only the signs of gradients count; the step size then decreases in stages, otherwise with a
            cosine.
    """

    evaluations: int
    step: float
    tolerance: float = -torch.inf
    box: tuple[float, float] | None = None
    signed: bool = True

    def size(self, used: int) -> float:
        """The size of the step after `used` evaluations."""
        if not self.signed:
            return self.step * (1 + math.cos(math.pi * (used - 1) / self.evaluations)) / 2
        passed = sum(8 * used > eighths * self.evaluations for eighths in (3, 5, 7))
        return self.step * _DECAY**passed

    def project(self, x: Tensor) -> Tensor:
        """The nearest point in the box."""
        return x if self.box is None else x.clamp(*self.box)


def descend(function: Function, start: Tensor, schedule: Schedule) -> Minima:
    """Minimize n functions of D variables each.

    Args:
        function: values and gradients of any of the n functions.
        start: [n, D], not modified; projected into the box first.

    Guarantees:
        Returns the iterate with the lowest value, not the last; it lies in the box.
        A value or gradient that is not finite ends a problem and changes the others at most by rounding; the problem
            keeps its best iterate so far, or has an infinite value without one.
        A zero gradient ends a problem. A problem that has ended is not evaluated again.
        The same arguments give the same numbers.

    Source: Kingma and Ba 2015; Geiping et al. 2020, sec. 4 and its published code: the sign of the gradient goes into
        Adam, the step size decays, every iterate is projected. Differs: returns the best iterate instead of the last;
        each problem ends separately; slopes that are only rounding count as zero.
    """
    n, watch = len(start), 1 if start.device.type == "cpu" else UNWATCHED
    x = schedule.project(start)
    best = Minima(x.clone(), start.new_full((n,), torch.inf), start.new_zeros(n, dtype=torch.int64))
    live, mean, square = torch.arange(n, device=start.device), torch.zeros_like(x), torch.zeros_like(x)
    over = torch.zeros_like(live, dtype=torch.bool)
    for used in range(1, schedule.evaluations + 1):
        value, gradient = function(x, live)
        best.evaluations[live] += (~over).long()
        sound = value.isfinite() & gradient.isfinite().all(dim=1)
        better = ~over & sound & (value < best.value[live])
        best.x[live] = torch.where(better[:, None], x, best.x[live])
        best.value[live] = torch.where(better, value, best.value[live])
        over = over | ~sound | (value <= schedule.tolerance) | ~gradient.any(dim=1)
        if used % watch == 0:
            on = ~over
            if not bool(on.all()):
                live, x, gradient, mean, square, over = live[on], x[on], gradient[on], mean[on], square[on], over[on]
            if not len(live):
                break
        sizes, share = gradient.abs(), _ROUNDING * torch.finfo(x.dtype).eps
        gradient = torch.where(sizes > share * sizes.amax(1, keepdim=True), gradient, 0.0)
        sign, tiny = (gradient.sign(), _TINY) if schedule.signed else (gradient, torch.finfo(x.dtype).tiny)
        mean.lerp_(sign, 1 - _MEMORIES[0])
        square.lerp_(sign.square(), 1 - _MEMORIES[1])
        unbiased, spread = mean / (1 - _MEMORIES[0] ** used), square / (1 - _MEMORIES[1] ** used)
        x = schedule.project(x - schedule.size(used) * unbiased / (spread.sqrt() + tiny))
    return best
