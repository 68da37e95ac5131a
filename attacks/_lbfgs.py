"""L-BFGS on many independent problems at once, each with its own history, step length and end.

Nobody waits: at every turn each live problem has one trial point evaluated; those that accept theirs get a new
direction, the others halve their step, and those that are done leave the batch.
"""

from __future__ import annotations

import dataclasses
import enum
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from harness.matching import Function

_ARMIJO = 1e-4
_CURVATURE = 1e-8
"""A pair with s.y below this times |s||y| would make the next direction mostly rounding."""
_SHORTEST = 2.0**-20
"""A shorter step changes a float32 point by no more than its rounding."""


class Status(enum.Enum):
    """Why a problem ended; in the order in which they are asked, so that the first that holds is told."""

    FAILED = "failed"
    CONVERGED = "converged"
    STALLED = "stalled"
    SPENT = "spent"


class Minima(NamedTuple):
    """Of n problems: the best x [n, D] and value [n], evaluations [n] int64, and why each ended.

    A problem that failed keeps its start and has an infinite value.
    """

    x: Tensor
    value: Tensor
    evaluations: Tensor
    status: tuple[Status, ...]


@dataclass
class _Memory:
    """The last m accepted pairs of each problem in rings, and their inner products.

    steps, changes: [n, m, D], s = x' - x and y = g' - g. cross: [n, m, m], s_i.y_j. gram: y_i.y_j. count: [n] pairs
    ever stored; the next goes to slot count % m.
    """

    steps: Tensor
    changes: Tensor
    cross: Tensor
    gram: Tensor
    count: Tensor

    @classmethod
    def empty(cls, like: Tensor, size: int) -> _Memory:
        """No pairs yet, for problems like [n, D]."""
        rings = like.new_zeros(2, len(like), size, like.shape[1])
        # float64: the triangular solve amplifies the rounding of nearly parallel steps
        squares = like.new_zeros(2, len(like), size, size, dtype=torch.float64)
        return cls(*rings, *squares, torch.zeros(len(like), dtype=torch.int64, device=like.device))

    def take(self, rows: Tensor) -> _Memory:
        """The memory of some of the problems."""
        return _Memory(*(getattr(self, field.name)[rows] for field in dataclasses.fields(self)))

    def forget(self, rows: Tensor) -> None:
        """Drop the pairs of some of the problems."""
        for field in dataclasses.fields(self):
            getattr(self, field.name)[rows] = 0

    def store(self, rows: Tensor, step: Tensor, change: Tensor) -> None:
        """Add a pair [k, D] to each of the k problems `rows` whose curvature is positive enough."""
        curved = (step * change).sum(1) > _CURVATURE * step.norm(dim=1) * change.norm(dim=1)
        rows, step, change = rows[curved], step[curved], change[curved]
        slot = self.count[rows] % self.steps.shape[1]
        self.steps[rows, slot], self.changes[rows, slot] = step, change
        self.count[rows] += 1

    def directions(self, gradient: Tensor) -> Tensor:
        """-H g [n, D] for every problem; refreshes the inner products with the newest pair on the way.

        Source: Byrd, Nocedal and Schnabel 1994, eq. (3.13)-(3.14): the two-loop recursion as matrix products.
        """
        n, size = self.steps.shape[:2]
        every = torch.arange(n, device=gradient.device)
        newest = (self.count - 1) % size
        pair = torch.stack([self.changes[every, newest], gradient], dim=1)
        # rows times the transposed ring: several times faster than the ring times columns
        on_steps, on_changes = (torch.bmm(pair, ring.mT).double() for ring in (self.steps, self.changes))
        self.cross[every, :, newest] = on_steps[:, 0]
        self.gram[every, :, newest] = self.gram[every, newest] = on_changes[:, 0]

        # oldest to newest; slots that were never used are zero and come first
        order = (self.count[:, None] + torch.arange(size, device=gradient.device)) % size
        back = order.argsort(dim=1)
        upper = _permute(self.cross, order).triu_()
        diagonal = upper.diagonal(dim1=1, dim2=2)
        curvature = diagonal.gather(1, back)
        scale = (diagonal[:, -1] / self.gram[every, newest, newest])[:, None]
        diagonal[diagonal == 0] = 1.0
        p = on_steps[:, 1].gather(1, order)[..., None]
        u = torch.linalg.solve_triangular(upper, p, upper=True)[..., 0].gather(1, back)
        inner = curvature * u + scale * (torch.bmm(u[:, None], self.gram)[:, 0] - on_changes[:, 1])
        inner = inner.gather(1, order)[..., None]
        w = torch.linalg.solve_triangular(upper.mT, inner, upper=False)[..., 0].gather(1, back)
        weights = torch.stack([w, -scale * u], dim=1).to(gradient.dtype)
        return -(
            scale.to(gradient.dtype) * gradient
            + torch.bmm(weights[:, :1], self.steps)[:, 0]
            + torch.bmm(weights[:, 1:], self.changes)[:, 0]
        )


def _permute(square: Tensor, order: Tensor) -> Tensor:
    """Rows and columns of [n, m, m] in the given order [n, m]."""
    every = torch.arange(len(order), device=order.device)[:, None, None]
    return square[every, order[:, :, None], order[:, None, :]]


@dataclass
class _Search:
    """The live problems: where each stands, where it looks next, and its counters.

    value is infinite before the first evaluation. slope: g.d. mark: value and evaluations when stalling was last asked.
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
    stuck: Tensor

    @classmethod
    def begin(cls, start: Tensor) -> _Search:
        """At the start, with a direction of zero: the first trial is the start itself."""
        n = len(start)
        zero, count = start.new_zeros(n), torch.zeros(n, dtype=torch.int64)
        nothing = torch.zeros_like(start)
        return cls(
            instance=torch.arange(n), x=start.clone(), value=zero + torch.inf, gradient=nothing,
            direction=nothing.clone(), slope=zero, step=zero + 1, used=count, mark_value=zero + torch.inf,
            mark_used=count.clone(), stuck=count.bool(),
        )

    def take(self, rows: Tensor) -> _Search:
        return _Search(*(getattr(self, field.name)[rows] for field in dataclasses.fields(self)))

    def turn(self, function: Function, memory: _Memory) -> None:
        trial = torch.addcmul(self.x, self.step[:, None], self.direction)
        value, gradient = function(trial, self.instance)
        self.used += 1
        bound = self.value + _ARMIJO * self.step * self.slope
        better = (value <= bound) & value.isfinite() & gradient.isfinite().all(dim=1)
        moved = better.nonzero()[:, 0]
        memory.store(moved, trial[moved] - self.x[moved], gradient[moved] - self.gradient[moved])
        self.x[moved], self.value[moved], self.gradient[moved] = trial[moved], value[moved], gradient[moved]
        self.step = torch.where(better, 1.0, self.step / 2)
        lost = self.step < _SHORTEST
        fresh = memory.count == 0
        self.stuck = lost & fresh
        retry = lost & ~fresh
        memory.forget(retry.nonzero()[:, 0])
        if len(moved) or bool(retry.any()):
            self._aim(memory, better | retry)

    def _aim(self, memory, rows):
        steepest = -self.gradient / self.gradient.norm(dim=1, keepdim=True).clamp(min=1)
        direction = torch.where((memory.count > 0)[:, None], memory.directions(self.gradient), steepest)
        slope = (direction * self.gradient).sum(1)
        uphill = ~(slope < 0) & rows
        if bool(uphill.any()):
            memory.forget(uphill.nonzero()[:, 0])
            direction = torch.where(uphill[:, None], steepest, direction)
            slope = (direction*self.gradient).sum(1)
        self.direction = torch.where(rows[:, None], direction, self.direction)
        self.slope = torch.where(rows, slope, self.slope)
        self.step = torch.where(rows, 1.0, self.step)


def minimize(function: Function, start: Tensor, *, evaluations: int, tolerance: float = 0.0, history: int = 100,
             window: int = 200, decrease: float = 1e-3) -> Minima:
    n = len(start)
    best = Minima(start.clone(), start.new_full((n,), torch.inf), torch.zeros(n, dtype=torch.int64), ())
    status = [Status.SPENT] * n
    search, memory = _Search.begin(start), _Memory.empty(start, history)
    while len(search.instance):
        search.turn(function, memory)
        due = search.used - search.mark_used >= window
        still = due & ~(search.value < search.mark_value * (1 - decrease))
        search.mark_value = torch.where(due, search.value, search.mark_value)
        search.mark_used = torch.where(due, search.used, search.mark_used)
        reasons = torch.stack([search.value.isinf(), search.value <= tolerance, search.stuck | still, search.used >= evaluations])
        done = reasons.any(0)
        if bool(done.any()):
            rows = done.nonzero()[:, 0]
            ids = search.instance[rows]
            best.x[ids], best.value[ids], best.evaluations[ids] = search.x[rows], search.value[rows], search.used[rows]
            for i, r in zip(ids.tolist(), reasons[:, rows].int().argmax(0).tolist()):
                status[i] = list(Status)[r]
            keep = (~done).nonzero()[:, 0]
            search, memory = search.take(keep), memory.take(keep)
    return best._replace(status=tuple(status))
