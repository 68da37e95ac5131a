"""L-BFGS on many independent problems at once, each with its own history, step length and end.

No problem waits for another. Each turn evaluates one trial point of every live problem: a problem that accepts its
point gets a new direction, the others halve their step, and finished problems leave the batch.
"""

from __future__ import annotations

import dataclasses
import enum
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from leakgauge.attacks._engine.matching import Function

_ARMIJO = 1e-4
"""Share of the decrease predicted by the slope that a step must achieve (Nocedal & Wright 2006, sec. 3.1)."""

_CURVATURE = 1e-8
"""A pair with s.y below this times |s||y| would make the next direction mostly rounding."""

_SHORTEST = 2.0**-20
"""A shorter step changes a float32 point by little more than its rounding."""

_HISTORY = 100
"""Accepted pairs in memory; gradient matching needs 50 or more (measured)."""

_WINDOW = 200
"""Evaluations from one check for stalling to the next."""


class Status(enum.Enum):
    """Why a problem ended, in order of precedence."""

    FAILED = "failed"
    CONVERGED = "converged"
    STALLED = "stalled"
    SPENT = "spent"


@dataclass(frozen=True, eq=False)
class Stop:
    """When a problem ends.

    Attributes:
        evaluations: of one problem, at most.
        tolerance: [n], converged at this value or below.
        decrease: stalled if `_WINDOW` evaluations lower the value by less than this share of its size, if no step along
            the gradient lowers it, or if the gradient is zero.
    """

    evaluations: int
    tolerance: Tensor
    decrease: float = 1e-2


class Minima(NamedTuple):
    """Of n problems: the best x [n, D] and its value [n], evaluations [n] int64, and why each ended.

    A problem without a finite value and gradient at its start failed: it keeps its start, with an infinite value.
    """

    x: Tensor
    value: Tensor
    evaluations: Tensor
    status: tuple[Status, ...]


def minimize(function: Function, start: Tensor, stop: Stop) -> Minima:
    """Minimize n functions of D variables each.

    Args:
        function: values and gradients of any of the n functions. A step to a value or gradient that is not finite is
            too long.
        start: [n, D], not modified. All computation has its dtype, except inner products.

    Guarantees:
        No value exceeds the value at the start; each x is the point of its value.
        Same arguments, same numbers; a problem that fails changes the others by rounding at most.
        A problem that has ended is not evaluated again.

    Source: Liu and Nocedal 1989 (L-BFGS). Differs: steps are halved until they satisfy Armijo's condition only; a pair
        without positive curvature is not stored.
    """
    n = len(start)
    ends = start.new_zeros(n, dtype=torch.int64)
    found = Minima(start.clone(), start.new_full((n,), torch.inf), ends.clone(), ())
    search, memory = _Search.begin(start), _Memory.empty(start, _HISTORY)
    while len(search.instance):
        stuck = _turn(search, memory, function)
        reasons = _reasons(search, stuck, stop)
        done = reasons.any(dim=0)
        if bool(done.any()):
            at = search.instance[done]
            found.x[at], found.value[at], found.evaluations[at] = search.x[done], search.value[done], search.used[done]
            ends[at] = reasons[:, done].int().argmax(dim=0)
            search, memory = _take(search, ~done), _take(memory, ~done)
    statuses = tuple(Status)
    return found._replace(status=tuple(statuses[end] for end in ends.tolist()))


@dataclass
class _Search:
    """The position and direction of each live problem: all [n] or [n, D].

    value: infinite before the first evaluation. slope: of the value along `direction`. used: evaluations. mark_value,
    mark_used: value and evaluations at the last check for stalling.
    """

    instance: Tensor
    x: Tensor
    value: Tensor
    gradient: Tensor
    direction: Tensor
    slope: Tensor
    step: Tensor
    used: Tensor
    mark_value: Tensor
    mark_used: Tensor

    @classmethod
    def begin(cls, start: Tensor) -> _Search:
        """At the start, with zero directions: the first trial point is the start itself."""
        n, still = len(start), torch.zeros_like(start)
        instance, slope, step = torch.arange(n, device=start.device), start.new_zeros(n), start.new_ones(n)
        value, used = start.new_full((n,), torch.inf), start.new_zeros(n, dtype=torch.int64)
        marks = value.clone(), used.clone()
        return cls(instance, start.clone(), value, still, still.clone(), slope, step, used, *marks)


@dataclass
class _Memory:
    """The last m accepted pairs of each problem in rings, and their inner products.

    steps, changes: [n, m, D], s = x' - x and y = g' - g. cross, gram: [n, m, m], s_i.y_j and y_i.y_j. count: [n] pairs
    ever stored; the next goes to slot count % m.
    """

    steps: Tensor
    changes: Tensor
    cross: Tensor
    gram: Tensor
    count: Tensor

    @classmethod
    def empty(cls, start: Tensor, size: int) -> _Memory:
        """No pairs yet."""
        n, width = start.shape
        # float64: the triangular solves amplify the rounding of nearly parallel steps
        cross, gram = start.new_zeros(2, n, size, size, dtype=torch.float64)
        steps, changes = start.new_zeros(2, n, size, width)
        return cls(steps, changes, cross, gram, start.new_zeros(n, dtype=torch.int64))

    def forget(self, rows: Tensor) -> None:
        """Drop the pairs of the problems `rows` [n] bool."""
        at = rows.nonzero()[:, 0]  # a mask would pass over the whole memory at every turn
        for field in dataclasses.fields(self):
            getattr(self, field.name)[at] = 0

    def store(self, rows: Tensor, step: Tensor, change: Tensor) -> None:
        """Add a pair, [k, D] each, to each of the problems `rows` [k] int64 if its curvature is positive enough."""
        curved = (step * change).sum(dim=1) > _CURVATURE * step.norm(dim=1) * change.norm(dim=1)
        rows = rows[curved]
        slot = self.count[rows] % self.steps.shape[1]
        self.steps[rows, slot], self.changes[rows, slot] = step[curved], change[curved]
        self.count[rows] += 1

    def directions(self, gradient: Tensor) -> Tensor:
        """-H g [n, D] of every problem; NaN without pairs. Refreshes the inner products of the newest pair.

        Source: Byrd, Nocedal and Schnabel 1994, Thm 2.2: the two-loop recursion as four matrix products.
        """
        size = self.steps.shape[1]
        every, newest = torch.arange(len(gradient), device=gradient.device), (self.count - 1) % size
        pair = torch.stack([self.changes[every, newest], gradient], dim=1)
        # rows times the transposed ring is several times faster than the ring times columns
        on_steps, on_changes = (torch.bmm(pair, ring.mT).double() for ring in (self.steps, self.changes))
        self.cross[every, :, newest] = on_steps[:, 0]
        self.gram[every, :, newest] = self.gram[every, newest] = on_changes[:, 0]

        # oldest to newest; unused slots are zero and come first
        order = (self.count[:, None] + torch.arange(size, device=gradient.device)) % size
        back = order.argsort(dim=1)
        upper = self.cross[every[:, None, None], order[:, :, None], order[:, None, :]].triu_()
        diagonal = upper.diagonal(dim1=1, dim2=2)
        curvature = diagonal.gather(1, back)
        scale = (diagonal[:, -1] / self.gram[every, newest, newest])[:, None]
        diagonal[diagonal == 0] = 1.0
        u = torch.linalg.solve_triangular(upper, on_steps[:, 1].gather(1, order)[..., None], upper=True)
        u = u[..., 0].gather(1, back)
        inner = curvature * u + scale * (torch.bmm(u[:, None], self.gram)[:, 0] - on_changes[:, 1])
        w = torch.linalg.solve_triangular(upper.mT, inner.gather(1, order)[..., None], upper=False)
        w = w[..., 0].gather(1, back)
        weights = torch.stack([w, -scale * u], dim=1).to(gradient.dtype)
        hessian_gradient = scale.to(gradient.dtype) * gradient
        hessian_gradient += torch.bmm(weights[:, :1], self.steps)[:, 0]
        hessian_gradient += torch.bmm(weights[:, 1:], self.changes)[:, 0]
        return hessian_gradient.neg_()


_State = TypeVar("_State", _Search, _Memory)


def _take(state: _State, rows: Tensor) -> _State:
    """The problems `rows` [n] bool of a search or memory."""
    return type(state)(*(getattr(state, field.name)[rows] for field in dataclasses.fields(state)))


def _turn(search: _Search, memory: _Memory, function: Function) -> Tensor:
    """Evaluate one trial point of every problem and aim the next; returns [n] bool: no step lowers the value
    further."""
    trial = torch.addcmul(search.x, search.step[:, None], search.direction)
    value, gradient = function(trial, search.instance)
    search.used += 1
    bound = search.value + _ARMIJO * search.step * search.slope
    better = (value <= bound) & value.isfinite() & gradient.isfinite().all(dim=1)
    rows = better.nonzero()[:, 0]
    memory.store(rows, trial[rows] - search.x[rows], gradient[rows] - search.gradient[rows])
    search.x[rows], search.value[rows], search.gradient[rows] = trial[rows], value[rows], gradient[rows]

    search.step = torch.where(better, 1.0, search.step / 2)
    short = search.step < _SHORTEST
    stuck = short & (memory.count == 0)
    memory.forget(short)
    return stuck | _aim(search, memory, better | short)


def _aim(search: _Search, memory: _Memory, rows: Tensor) -> Tensor:
    """Set new directions for the problems `rows` [n] bool; returns [n] bool: no direction leads downhill."""
    if not bool(rows.any()):
        return rows
    # of length 1 at any scale of the values; 1e-30: a zero gradient has no direction
    steepest = -search.gradient / search.gradient.norm(dim=1, keepdim=True).clamp(min=1e-30)
    direction = memory.directions(search.gradient)
    slope = (direction * search.gradient).sum(dim=1)
    bad = rows & ~(slope < 0)
    memory.forget(bad)
    direction = torch.where(bad[:, None], steepest, direction)
    slope = torch.where(bad, (steepest * search.gradient).sum(dim=1), slope)
    search.direction = torch.where(rows[:, None], direction, search.direction)
    search.slope = torch.where(rows, slope, search.slope)
    search.step = torch.where(rows, 1.0, search.step)
    return rows & ~(slope < 0)


def _reasons(search: _Search, stuck: Tensor, stop: Stop) -> Tensor:
    """[4, n] bool, one row per `Status`: which reasons to end hold. Marks the values that were checked for stalling."""
    due = search.used - search.mark_used >= _WINDOW
    gained = search.mark_value - search.value
    still = due & ~(gained >= stop.decrease * search.value.abs())
    search.mark_value = torch.where(due, search.value, search.mark_value)
    search.mark_used = torch.where(due, search.used, search.mark_used)
    converged = search.value <= stop.tolerance[search.instance]
    return torch.stack([search.value.isinf(), converged, stuck | still, search.used >= stop.evaluations])
