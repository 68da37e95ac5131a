"""How well many dummies explain a message, all at once: all victims of a round train from the same parameters."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from leakgauge.harness.core.contract import Task
from leakgauge.harness.core.vec import Vector
from leakgauge.harness.learn.gradients import gradients, keep_freed_memory, kernel_of, takes_numbers
from leakgauge.harness.learn.kernels import Kernel

_ENTRIES = 2**20
"""Gradient entries of one chunk by hand: with 789,000 entries an instance, 8 at once took 6.5 ms each, single ones
2.4."""


_TOGETHER, _NUMBERS = 32, 2**22
"""Victims searched at once, at most, and numbers in all their gradients: for 24 digits behind a linear model, three
searches of 8 took 1.4 times as long as one; a chunk of large gradients holds one victim anyway."""


def at_once(dim: int) -> int:
    """How many victims a search takes at once where a model has `dim` parameters."""
    return max(1, min(_TOGETHER, _NUMBERS // dim))


class Evaluation(NamedTuple):
    """Of m candidates: value [m] and gradient [m, D]; under `torch.no_grad`, a function may give zeros instead."""

    value: Tensor
    gradient: Tensor


Function = Callable[[Tensor, Tensor], Evaluation]
"""(candidates [m, D], instances [m] int64) -> Evaluation; `instances` names the instance of each candidate."""


class Misfit(Protocol):
    """How badly a gradient explains what was received."""

    def __call__(self, gradients: Tensor, instances: Tensor) -> Tensor:
        """gradients: [m, d], one for each of `instances` [m]; returns [m], differentiable in `gradients`."""


@runtime_checkable
class SlopedMisfit(Misfit, Protocol):
    """A misfit that computes its own slope, so that no graph with d numbers per instance is recorded."""

    def sloped(self, gradients: Tensor, instances: Tensor) -> Evaluation:
        """The value of `__call__` and its slope in `gradients` [m, d], without a graph."""


@dataclass(frozen=True, eq=False)
class SquaredDistance:
    """scale * sum_i (gradient_i - target_i)^2, with one target per instance: targets is [n, d].

    Source: Zhu et al. 2019, "Deep leakage from gradients", Algorithm 1.
    """

    targets: Tensor
    scale: float = 1.0

    def __call__(self, gradients: Tensor, instances: Tensor) -> Tensor:
        """Implement `Misfit`."""
        return self.scale * (gradients - self.targets.index_select(0, instances)).square().sum(dim=1)

    def sloped(self, gradients: Tensor, instances: Tensor) -> Evaluation:
        """Implement `SlopedMisfit`, in place: with 100 classes these passes over d numbers are a fifth of the time."""
        misses = self.targets.index_select(0, instances).sub_(gradients)  # indexing took six times as long
        return Evaluation(self.scale * misses.square().sum(dim=1), misses.mul_(-2 * self.scale))


def evaluator(
    task: Task, params: Vector, misfit: Misfit, *, images: int, labels: Tensor | None = None, chunk: int = 8
) -> Function:
    """The misfit of the candidates' gradients, and its slope in the candidates.

    A candidate is one row: `images` inputs and, where `labels` is None, `images` rows of label logits after them, in
    the layout of `unpack`.

    Args:
        images: b, inputs of one instance.
        labels: [n, b, classes] probabilities of each instance, or [n, b] numbers of a regression, held fixed; None:
            each candidate has its own.
        chunk: candidates computed at once, at most. More than 8 leave the cache and are no faster per candidate.

    Guarantees:
        Other candidates change the value of a candidate by rounding at most.
    """
    if chunk < 1:
        raise ValueError(f"expected chunk >= 1, got chunk={chunk}")
    kernel = kernel_of(task, params, images)
    if kernel is not None:
        keep_freed_memory()
        chunk = max(1, min(chunk, _ENTRIES // task.layout.dim))
    return Evaluator(task, misfit, images, labels, partial(gradients, task, params), chunk, kernel)


def unpack(task: Task, candidates: Tensor, images: int) -> tuple[Tensor, Tensor]:
    """Inputs [m, b, *input_shape] and label logits [m, b, classes or 0] of candidates [m, D]; a number has itself."""
    inputs = images * math.prod(task.input_shape)
    x, logits = candidates[:, :inputs], candidates[:, inputs:]
    return x.reshape(-1, images, *task.input_shape), logits.reshape(len(candidates), images, -1)


@dataclass(frozen=True, eq=False)
class Evaluator:
    """A `Function`: the misfit of what clients with the candidates' inputs and labels send.

    Attributes:
        images, labels, chunk: see `evaluator`.
        send: from x [m, images, *input_shape] and y [m, images, classes] to the argument of the misfit; differentiable.
        kernel: computes `send` by hand; None: autograd does.
    """

    task: Task
    misfit: Misfit
    images: int
    labels: Tensor | None
    send: Callable[[Tensor, Tensor], Tensor]
    chunk: int = 8
    kernel: Kernel | None = None

    def __call__(self, candidates: Tensor, instances: Tensor) -> Evaluation:
        """Implement `Function`."""
        evaluate = self._by_autograd if self.kernel is None else partial(self._by_hand, self.kernel)
        parts = zip(torch.split(candidates, self.chunk), torch.split(instances, self.chunk), strict=True)
        values, slopes = zip(*(evaluate(part, rows) for part, rows in parts), strict=True)
        return Evaluation(torch.cat(values), torch.cat(slopes))

    def _by_hand(self, kernel: Kernel, candidates: Tensor, instances: Tensor) -> Evaluation:
        """One chunk, without a graph, except the misfit's."""
        x, y = self._batch(candidates.detach(), instances)
        gradients, trace = kernel.trace(x, y)
        if not torch.is_grad_enabled():
            return Evaluation(self.misfit(gradients, instances), torch.zeros_like(candidates))
        value, slopes = _sloped(self.misfit, gradients, instances)
        pulled = trace.pull(slopes)
        if self.labels is not None:
            return Evaluation(value, pulled.x.flatten(1))
        of_logits = y * (pulled.y - (y * pulled.y).sum(dim=-1, keepdim=True))
        return Evaluation(value, torch.cat([pulled.x.flatten(1), of_logits.flatten(1)], dim=1))

    def _by_autograd(self, candidates: Tensor, instances: Tensor) -> Evaluation:
        """One chunk."""
        if not torch.is_grad_enabled():
            value = self.misfit(self.send(*self._batch(candidates, instances)), instances)
            return Evaluation(value, torch.zeros_like(candidates))
        z = candidates.detach().requires_grad_()
        value = self.misfit(self.send(*self._batch(z, instances)), instances)
        (slope,) = torch.autograd.grad(value.sum(), z)
        return Evaluation(value.detach(), slope)

    def _batch(self, candidates: Tensor, instances: Tensor) -> tuple[Tensor, Tensor]:
        """Inputs and label probabilities, or numbers, of candidates."""
        x, logits = unpack(self.task, candidates, self.images)
        if self.labels is not None:
            return x, self.labels[instances]
        return x, logits[..., 0] if takes_numbers(self.task) else logits.softmax(dim=-1)


def _sloped(misfit: Misfit, gradients: Tensor, instances: Tensor) -> Evaluation:
    """The misfit [m] and its slope in the gradients [m, d]."""
    if isinstance(misfit, SlopedMisfit):
        return misfit.sloped(gradients, instances)
    leaf = gradients.requires_grad_()
    value = misfit(leaf, instances)
    (slope,) = torch.autograd.grad(value.sum(), leaf)
    return Evaluation(value.detach(), slope)
