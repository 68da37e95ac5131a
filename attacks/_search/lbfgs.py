"""L-BFGS on many independent problems at once, each with its own history, step length and end.

No problem waits for another. Each turn evaluates one trial point of each live problem: a problem that accepts its point
gets a new direction, the others halve their step, and finished problems leave the batch.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from leakgauge.attacks._engine.matching import Function
from leakgauge.harness.core.native import Library, library_for

_ARMIJO = 1e-4  # share of the decrease predicted by the slope that a step must achieve (Nocedal & Wright 2006, 3.1)
_CURVATURE = 1e-8  # if s.y of a pair is below this share of |s||y|, the next direction would be mostly rounding
_SHORTEST = 2.0**-20  # a shorter step changes a float32 point by little more than its rounding
_HISTORY = 100  # number of accepted pairs in memory; gradient matching needs 50 or more (measured)
_PAIRS = torch.bfloat16  # type of the stored pairs, because much of a search is reading them; see `docs/attacks.md`
_WINDOW = 200  # number of evaluations between checks for stalling

UNWATCHED = 16
"""Number of turns between checks for finished problems on an accelerator, because each check makes the host wait."""


@dataclass(frozen=True, eq=False)
class Stop:
    """When a problem ends.

    Attributes:
        evaluations: maximum number for one problem.
        tolerance: [n]; a problem has converged at this value or below.
        each: [n] int64, lower maximum numbers of single problems; None: `evaluations` for all.
        decrease: a problem has stalled if `_WINDOW` evaluations lower the value by less than this share of its size, if
            no step along the gradient lowers the value, or if the gradient is zero.
    """

    evaluations: int
    tolerance: Tensor
    decrease: float = 1e-2
    each: Tensor | None = None


class Minima(NamedTuple):
    """Results of n problems: the best x [n, D], its value [n], and evaluations [n] int64.

    A problem without a finite value and gradient at its start has failed: it keeps its start, with an infinite value.
    """

    x: Tensor
    value: Tensor
    evaluations: Tensor


def minimize(function: Function, start: Tensor, stop: Stop, watch: int | None = None) -> Minima:
    """Minimize n functions of D variables each.

    Args:
        function: values and gradients of any of the n functions. A step to a value or gradient that is not finite
            counts as too long.
        start: [n, D], not modified. All computation uses its dtype, except inner products.
        watch: number of turns between checks for ended problems, which continue until the check; None: 1 on a CPU.

    Guarantees:
        No value exceeds the value at the start; each x is the point of its value.
        The same arguments give the same numbers; a problem that fails changes the others at most by rounding.
        A problem that has ended is not evaluated again, except for the turns until the next check.

    Source: Liu and Nocedal 1989 (L-BFGS). Differs: steps are halved until they satisfy Armijo's condition only; a pair
        without positive curvature is not stored.
    """
    n, turn, watch = len(start), 0, watch or (1 if start.device.type == "cpu" else UNWATCHED)
    minima = Minima(start.clone(), start.new_full((n,), torch.inf), start.new_zeros(n, dtype=torch.int64))
    search, memory = _Search.begin(start, stop.tolerance), _memory(start, min(_HISTORY, stop.evaluations))
    while len(search.instance):
        turn += 1
        _turn(search, memory, function, looks=watch == 1)
        if turn % watch and turn % _WINDOW and turn < stop.evaluations:
            continue
        done = _ended(search, turn, stop)
        if bool(done.any()):
            at = search.instance[done]
            minima.x[at], minima.value[at], minima.evaluations[at] = search.x[done], search.value[done], turn
            search, memory = _take(search, ~done), _take(memory, ~done)
    return minima


@dataclass
class _Search:
    """The position and direction of each live problem; all tensors are [n] or [n, D].

    value: infinite before the first evaluation. slope: slope of the value along `direction`. stuck: whether no step
    lowers the value further. mark: value at the last check for stalling.
    """

    instance: Tensor
    tolerance: Tensor
    x: Tensor
    value: Tensor
    gradient: Tensor
    direction: Tensor
    slope: Tensor
    step: Tensor
    stuck: Tensor
    mark: Tensor

    @classmethod
    def begin(cls, start: Tensor, tolerance: Tensor) -> _Search:
        """The start of a search, with zero directions: the first trial point is the start itself."""
        n, still = len(start), torch.zeros_like(start)
        instance, slope, step = torch.arange(n, device=start.device), start.new_zeros(n), start.new_ones(n)
        value, stuck = start.new_full((n,), torch.inf), start.new_zeros(n, dtype=torch.bool)
        return cls(instance, tolerance, start.clone(), value, still, still, slope, step, stuck, value)


@dataclass
class _Memory:
    """The last m accepted pairs of each problem, and their inner products.

    pairs: [n, m + 1, 2, D], s = x' - x and y = g' - g, in rings from slot 1 on; slot 0 takes zeros instead of a pair
    that is not kept. inverse, gram: [n, m + 1, m + 1], the inverse of the triangle of s_i.y_j with i not newer than j,
    and y_i.y_j. curvature: [n, m + 1], s_i.y_i. count: [n], number of pairs ever stored. scale: [n, 1], s.y / y.y of
    the newest pair; NaN without pairs. turns: number of pairs offered.

    The inverse of a triangle contains the inverses of its later parts. So the oldest pair is removed with its row and
    column, a new pair adds a column, and the order of the slots does not matter.
    """

    pairs: Tensor
    inverse: Tensor
    gram: Tensor
    curvature: Tensor
    count: Tensor
    scale: Tensor
    turns: int = 0

    @classmethod
    def empty(cls, start: Tensor, size: int) -> _Memory:
        (n, width), slots = start.shape, size + 1
        # float64, because triangular solves amplify the rounding of nearly parallel steps
        exact = start.new_zeros(n, slots, dtype=torch.float64)
        inverse, gram = exact.new_zeros(2, n, slots, slots)
        count, scale = start.new_zeros(n, dtype=torch.int64), exact.new_full((n, 1), torch.nan)
        return cls(start.new_zeros(n, slots, 2, width), inverse, gram, exact, count, scale)

    @torch.inference_mode()
    def forget(self, rows: Tensor) -> None:
        for tensor in (self.pairs, self.inverse, self.gram, self.curvature, self.count):
            tensor.masked_fill_(rows.view(-1, *[1] * (tensor.ndim - 1)), 0)
        self.scale.masked_fill_(rows[:, None], torch.nan)

    @torch.inference_mode()
    def directions(self, accepted: Tensor, step: Tensor, change: Tensor, gradient: Tensor) -> Tensor:
        """Store a pair for each problem, and return -H g [n, D]; NaN without pairs.

        Args:
            accepted: [n] bool; pairs that are not accepted, or that lack positive curvature, are not stored.

        Source: Byrd, Nocedal and Schnabel 1994, Thm 2.2: the two-loop recursion as matrix products.
        """
        slots = self.curvature.shape[1]
        self.turns += 1
        used = slice(min(self.turns + 1, slots))
        inverse, gram, rings = self.inverse[:, used, used], self.gram[:, used, used], self.pairs[:, used].flatten(1, 2)
        pair = torch.stack([step, change], dim=1).to(_PAIRS).to(step.dtype)
        lengths, change_squared = torch.bmm(pair, pair.mT).unbind(1)
        step_squared, curvature = lengths.unbind(1)
        stored = accepted & (curvature > _CURVATURE * (step_squared.sqrt() * change_squared[:, 1].sqrt()))
        slot = torch.where(stored, self.count % (slots - 1) + 1, 0)
        self.count += stored
        every, column_of = torch.arange(len(slot), device=slot.device), slot[:, None]
        self.pairs[every, slot] = pair = torch.where(stored[:, None, None], pair, 0.0)

        # multiplying rows by the transposed ring is several times faster than the ring by columns
        pair[:, 0] = gradient
        products = torch.bmm(pair, rings.mT).double().view(len(slot), 2, -1, 2)
        on_steps, on_changes = products.unbind(3)
        gram[every, slot] = gram[every, :, slot] = on_changes[:, 1]
        newest = on_steps.gather(2, column_of[:, None].expand(-1, 2, -1))[..., 0]
        on_steps.scatter_(2, column_of[:, None].expand(-1, 2, -1), 0.0)
        inverse[every, slot] = 0.0
        solved = torch.bmm(on_steps, inverse.mT)
        curvature = torch.where(stored, newest[:, 1], torch.inf)[:, None]
        column = (solved[:, 1] / -curvature).scatter_(1, column_of, 1 / curvature)
        inverse[every, :, slot] = column
        self.curvature.scatter_(1, column_of, curvature.nan_to_num(posinf=0.0))
        now = curvature / on_changes[:, 1].gather(1, column_of)
        self.scale = torch.where(stored[:, None], now, self.scale)

        u = torch.addcmul(solved[:, 0], column, newest[:, :1])
        inner = self.curvature[:, used] * u + self.scale * (torch.bmm(u[:, None], gram)[:, 0] - on_changes[:, 0])
        w = torch.bmm(inner[:, None], inverse)[:, 0]
        weights = torch.stack([w, -self.scale * u], dim=2).to(gradient.dtype)
        direction = torch.bmm(weights.flatten(1)[:, None], rings)[:, 0]
        return direction.addcmul_(self.scale.to(gradient.dtype), gradient).neg_()


@dataclass
class _NativeMemory:
    """The same as `_Memory` on a CPU, by compiled loops.

    With 100 pairs of 3,072 numbers, it takes a third of the time of matrix products for 8 problems, a fifth for one.

    pairs: [n, m, 2, D], the bits of a ring of the last m accepted pairs. curvature, count, scale: see `_Memory`.
    """

    native: Library
    pairs: Tensor
    curvature: Tensor
    count: Tensor
    scale: Tensor

    @classmethod
    def empty(cls, native: Library, start: Tensor, size: int) -> _NativeMemory:
        n, width = start.shape
        curvature, scale = (start.new_zeros(*shape, dtype=torch.float64) for shape in ((n, size), (n,)))
        pairs = start.new_empty(n, size, 2, width, dtype=torch.int16)
        return cls(native, pairs, curvature, start.new_zeros(n, dtype=torch.int64), scale)

    def forget(self, rows: Tensor) -> None:
        self.count.masked_fill_(rows, 0)

    def directions(self, accepted: Tensor, step: Tensor, change: Tensor, gradient: Tensor) -> Tensor:
        n, slots, _, width = self.pairs.shape
        given = [tensor.contiguous() for tensor in (accepted, step, change, gradient)]
        weights, directions = self.curvature.new_empty(slots), torch.empty_like(given[1])
        arrays = (self.pairs, self.curvature, self.count, self.scale, *given, weights, directions)
        self.native.directions(n, slots, width, _CURVATURE, *(array.data_ptr() for array in arrays))
        return directions


def _memory(start: Tensor, size: int) -> _Memory | _NativeMemory:
    native = library_for(start)
    return _Memory.empty(start, size) if native is None else _NativeMemory.empty(native, start, size)


_State = TypeVar("_State", bound=_Search | _Memory | _NativeMemory)


def _take(state: _State, rows: Tensor) -> _State:
    taken: dict[str, Any] = {name: field[rows] for name, field in vars(state).items() if isinstance(field, Tensor)}
    return dataclasses.replace(state, **taken)


def _turn(search: _Search, memory: _Memory | _NativeMemory, function: Function, *, looks: bool) -> None:
    """Evaluate one trial point of each problem and choose the next direction and step.

    looks: whether the host checks if any problem must restart from steepest descent, to skip that work otherwise.
    """
    trial = torch.addcmul(search.x, search.step[:, None], search.direction)
    value, gradient = function(trial, search.instance)
    bound = torch.addcmul(search.value, search.step, search.slope, value=_ARMIJO)
    better = (value <= bound) & (value + gradient.sum(dim=1)).isfinite()
    direction = memory.directions(better, trial - search.x, gradient - search.gradient, gradient)
    slope = (direction * gradient).sum(dim=1)
    accepted = better[:, None]
    search.x, search.value = torch.where(accepted, trial, search.x), torch.where(better, value, search.value)
    search.gradient = torch.where(accepted, gradient, search.gradient)

    step = torch.where(better, 1.0, search.step / 2)
    short = step < _SHORTEST
    lost = short | (better & ~(slope < 0))
    if not looks or bool(lost.any()):
        search.stuck |= short & (memory.count == 0)
        memory.forget(lost)
        # length 1 at any scale of the values; 1e-30 for zero gradients, which have no direction
        steepest = -search.gradient / search.gradient.norm(dim=1, keepdim=True).clamp(min=1e-30)
        direction = torch.where(lost[:, None], steepest, direction)
        slope = torch.where(lost, (steepest * search.gradient).sum(dim=1), slope)
        search.stuck |= lost & ~(slope < 0)
    aimed = better | short
    search.direction = torch.where(aimed[:, None], direction, search.direction)
    search.slope = torch.where(aimed, slope, search.slope)
    search.step = torch.where(short, 1.0, step)


def _ended(search: _Search, turn: int, stop: Stop) -> Tensor:
    """[n] bool: failed, converged, stalled or spent. Updates `mark` after a check for stalling."""
    stalled = search.stuck
    if turn % _WINDOW == 0:
        stalled = stalled | ~(search.mark - search.value >= stop.decrease * search.value.abs())
        search.mark = search.value
    spent = torch.full_like(stalled, turn >= stop.evaluations)
    if stop.each is not None:
        spent |= turn >= stop.each[search.instance]
    return search.value.isinf() | (search.value <= search.tolerance) | stalled | spent
