"""How well dummies explain messages, for many at once: all victims of a round train from the same parameters."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Generic, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.linalg import vector_norm

from leakgauge.harness.core.contract import Task
from leakgauge.harness.core.device import capacity
from leakgauge.harness.core.native import Library, library_for
from leakgauge.harness.core.vec import Vector
from leakgauge.harness.learn.gradients import gradients, keep_freed_memory, kernel_of
from leakgauge.harness.learn.kernels import Kernel, Outer

_T = TypeVar("_T")

# Sizes at which an evaluation is fastest; `docs/attacks.md` has the times, under "Speed and the usual loops".
_ENTRIES = 2**20  # gradient entries of one chunk with the manual kernel
_WIDE = 50_000_000  # the same for autograd
_SMALL = 2**17  # gradient entries of one chunk of more than 8 candidates
_COPIES = 8  # on an accelerator: arrays of the size of the gradients that an evaluation holds, with the layers' own
_TOGETHER, _NUMBERS = 32, 2**22  # maximum number of victims searched at once, and of entries in all their gradients


def at_once(dim: int) -> int:
    """How many victims a search takes at once if the model has `dim` parameters."""
    return max(1, min(_TOGETHER, _NUMBERS // dim))


class Evaluation(NamedTuple):
    """Value [m] and gradient [m, D] of m candidates; under `torch.no_grad`, the gradient may be zeros."""

    value: Tensor
    gradient: Tensor


Function = Callable[[Tensor, Tensor], Evaluation]
"""(candidates [m, D], instances [m] int64) -> Evaluation; `instances` names the instance of each candidate."""


Misfit = Callable[[Tensor, Tensor], Tensor]
"""How badly gradients explain the received messages: (gradients [m, d], instances [m]) -> [m], differentiable in the
gradients; there is one gradient for each instance."""


class Sloped(NamedTuple):
    """A misfit [m] and its slope in the gradients, which is `factor` times `slope` [m, d]."""

    value: Tensor
    slope: Tensor
    factor: float = 1.0


class Latest(Generic[_T]):
    """A function of one tensor that reuses its last result as long as it gets the same unchanged object.

    A search asks for the same instances until one of them ends.
    """

    def __init__(self, function: Callable[[Tensor], _T]) -> None:
        self._function = function
        self._last: tuple[Tensor, _T] | None = None

    def __call__(self, of: Tensor) -> _T:
        """The result; do not modify it or `of`."""
        if self._last is None or of is not self._last[0]:
            self._last = of, self._function(of)
        return self._last[1]


@dataclass(frozen=True, eq=False)
class SquaredDistance:
    """scale * sum_i (gradient_i - target_i)^2, with one target per instance: targets is [n, d].

    Source: Zhu et al. 2019, "Deep leakage from gradients", Algorithm 1.
    """

    targets: Tensor
    scale: float = 1.0
    _sought: Latest[Tensor] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_sought", Latest(partial(torch.index_select, self.targets, 0)))

    def __call__(self, gradients: Tensor, instances: Tensor) -> Tensor:
        return self.scale * (gradients - self.targets.index_select(0, instances)).square().sum(dim=1)

    def native(self, like: Tensor) -> Library | None:
        """The compiled loops, if they can compute with gradients like this tensor."""
        return library_for(like) if like.dtype == self.targets.dtype else None

    def sloped(self, gradients: Tensor, instances: Tensor, outer: Outer | None = None) -> Sloped:
        """The value of `__call__` and its slope, without a graph; overwrites `gradients` [m, d].

        It works in place, because each pass over d numbers takes time with 100 classes: the compiled loops read and
        write a number once, and compute an outer product on the way.

        Args:
            outer: sets entries of the gradients first; only for compiled loops.
        """
        sought, native = self._sought(instances), self.native(gradients)
        if native is None:
            squares = vector_norm(gradients.sub_(sought), dim=1).square_()
        else:
            squares, (m, width) = gradients.new_empty(len(gradients), dtype=torch.float64), gradients.shape
            arrays = (array.data_ptr() for array in (gradients, sought, squares))
            product: tuple[int | None, ...] = (width, 0, 0, None, None)
            if outer is not None:
                first, slopes, inputs = outer
                product = (first, slopes.shape[1], inputs.shape[1], slopes.data_ptr(), inputs.data_ptr())
            native.subtract(m, width, *arrays, *product)
            squares = squares.to(gradients.dtype)
        return Sloped(self.scale * squares, gradients, 2 * self.scale)


def evaluator(task: Task, params: Vector, misfit: Misfit, *, images: int, labels: Tensor | None = None) -> Evaluator:
    """The misfit of the candidates' gradients, and its slope in the candidates.

    A candidate is one row: `images` inputs and, if `labels` is None, `images` rows of label logits after the inputs, in
    the layout of `unpack`.

    Args:
        images: b, number of inputs of one instance.
        labels: [n, b, classes] probabilities of each instance, or [n, b] numbers of a regression, held fixed; None:
            each candidate has its own.

    Guarantees:
        Other candidates change the value of a candidate at most by rounding.
    """
    kernel = kernel_of(task, params, images, blocks=True)
    if kernel is not None and kernel.structure.places and isinstance(misfit, SquaredDistance):
        # in the order of the layers, a sum over the parameters rounds alike however the network is written
        structure = kernel.structure
        kernel = Kernel(replace(structure, places=(), names=()), structure.by_layers(params))
        misfit = replace(misfit, targets=structure.by_layers(misfit.targets))
    if params.device.type == "cpu":
        if kernel is not None:
            keep_freed_memory()
        # more candidates would leave the cache and be no faster
        chunk = max(8, min(_TOGETHER, _SMALL // task.layout.dim))
        chunk = min(chunk, (_WIDE if kernel is None else _ENTRIES) // task.layout.dim)
    else:
        chunk = capacity(params.device) // (_COPIES * task.layout.dim)
    return Evaluator(task, misfit, images, labels, partial(gradients, task, params), max(1, chunk), kernel)


def unpack(task: Task, candidates: Tensor, images: int) -> tuple[Tensor, Tensor]:
    """Inputs [m, b, *input_shape] and label logits [m, b, classes or 0], or numbers, of candidates [m, D]."""
    inputs = images * math.prod(task.input_shape)
    x, logits = candidates[:, :inputs], candidates[:, inputs:]
    return x.reshape(-1, images, *task.input_shape), logits.reshape(len(candidates), images, -1)


@dataclass(frozen=True, eq=False)
class Evaluator:
    """A `Function`: the misfit of the messages that clients with the candidates' inputs and labels send.

    Attributes:
        images, labels: see `evaluator`.
        chunk: maximum number of candidates computed at once.
        send: maps x [m, images, *input_shape] and y [m, images, classes] to the argument of the misfit; differentiable.
        kernel: computes `send` and its slope manually; None: autograd does.
    """

    task: Task
    misfit: Misfit
    images: int
    labels: Tensor | None
    send: Callable[[Tensor, Tensor], Tensor]
    chunk: int = 8
    kernel: Kernel | None = None
    _chunks: Latest[tuple[Tensor, ...]] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_chunks", Latest(partial(torch.split, split_size_or_sections=self.chunk)))

    def __call__(self, candidates: Tensor, instances: Tensor) -> Evaluation:
        evaluate = self._by_autograd if self.kernel is None else partial(self._by_hand, self.kernel)
        if len(candidates) <= self.chunk:
            return evaluate(candidates, instances)
        chunks = zip(torch.split(candidates, self.chunk), self._chunks(instances), strict=True)
        values, slopes = zip(*(evaluate(chunk, rows) for chunk, rows in chunks), strict=True)
        return Evaluation(torch.cat(values), torch.cat(slopes))

    def _by_hand(self, kernel: Kernel, candidates: Tensor, instances: Tensor) -> Evaluation:
        """Evaluate one chunk with the kernel; only the misfit may record a graph."""
        x, y = self._batch(candidates.detach(), instances)
        if isinstance(self.misfit, SquaredDistance):
            gradients, trace = kernel.trace(x, y, whole=self.misfit.native(x) is None)
            value, slopes, factor = self.misfit.sloped(gradients, instances, trace.outer)
        else:
            gradients, trace = kernel.trace(x, y)
            value, slopes, factor = _sloped(self.misfit, gradients, instances)
        if not torch.is_grad_enabled():
            return Evaluation(value, torch.zeros_like(candidates))
        pulled = trace.pull(slopes)
        slope = pulled.x.flatten(1)
        if self.labels is None:
            of_logits = y * (pulled.y - (y * pulled.y).sum(dim=-1, keepdim=True))
            slope = torch.cat([slope, of_logits.flatten(1)], dim=1)
        return Evaluation(value, slope if factor == 1.0 else slope.mul_(factor))

    def _by_autograd(self, candidates: Tensor, instances: Tensor) -> Evaluation:
        if not torch.is_grad_enabled():
            value = self.misfit(self.send(*self._batch(candidates, instances)), instances)
            return Evaluation(value, torch.zeros_like(candidates))
        z = candidates.detach().requires_grad_()
        value = self.misfit(self.send(*self._batch(z, instances)), instances)
        (slope,) = torch.autograd.grad(value.sum(), z)
        return Evaluation(value.detach(), slope)

    def _batch(self, candidates: Tensor, instances: Tensor) -> tuple[Tensor, Tensor]:
        x, logits = unpack(self.task, candidates, self.images)
        if self.labels is not None:
            return x, self.labels[instances]
        if not self.task.numbers:
            return x, logits.softmax(dim=-1)
        return x, logits[..., 0] if self.task.classes == 1 else logits


def _sloped(misfit: Misfit, gradients: Tensor, instances: Tensor) -> Sloped:
    """The misfit [m] and its slope in the gradients [m, d]; under `torch.no_grad`, the slope has no meaning."""
    if not torch.is_grad_enabled():
        return Sloped(misfit(gradients, instances), gradients)
    leaf = gradients.requires_grad_()
    value = misfit(leaf, instances)
    (slope,) = torch.autograd.grad(value.sum(), leaf)
    return Sloped(value.detach(), slope)
