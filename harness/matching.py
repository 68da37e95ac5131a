"""What attackers ask of a model, for many instances at once: losses, and how well a dummy explains what was received.

All victims of a round trained from the same parameters. The first gradient is therefore mapped over the instances with
the parameters shared, and one backward pass through it gives every dummy its own gradient.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.func import grad, vmap
from torch.nn.functional import softplus

from harness.contract import Task
from harness.vec import Vector


class Evaluation(NamedTuple):
    """Of m candidates: value [m] and gradient [m, D]."""

    value: Tensor
    gradient: Tensor


Function = Callable[[Tensor, Tensor], Evaluation]
"""(candidates [m, D], instances [m] int64) -> Evaluation; the second says which instance each candidate belongs to."""


class Misfit(Protocol):
    """How badly a gradient explains what was received."""

    def __call__(self, gradients: Tensor, instances: Tensor) -> Tensor:
        """gradients: [m, d], one for each of `instances` [m]; returns [m], differentiable in `gradients`."""


@dataclass(frozen=True, eq=False)
class SquaredDistance:
    """scale * sum_i (gradient_i - target_i)^2, to one target an instance: targets is [n, d].

    Source: Zhu et al. 2019, "Deep leakage from gradients", Algorithm 1.
    """

    targets: Tensor
    scale: float = 1.0

    def __call__(self, gradients: Tensor, instances: Tensor) -> Tensor:
        """Implement `Misfit`."""
        return self.scale * (gradients - self.targets[instances]).square().sum(dim=1)


def gradients(task: Task, params: Vector, x: Tensor, y: Tensor) -> Tensor:
    """Gradients of the loss at the shared parameters, one a batch; differentiable in x and y.

    Args:
        x: [m, b, *input_shape].
        y: [m, b, classes] probabilities.

    Returns:
        [m, d].
    """
    if len(x) == 1:  # mapping over one instance costs half as much again as not mapping
        leaf = params.detach().requires_grad_()
        again = x.requires_grad or y.requires_grad
        return torch.autograd.grad(_loss(leaf, x[0], y[0], task), leaf, create_graph=again)[0][None]
    mapped: Tensor = vmap(grad(_loss), in_dims=(None, 0, 0, None))(params, x, y, task)
    return mapped


def _loss(params: Vector, x: Tensor, y: Tensor, task: Task) -> Tensor:
    """The task's loss for probabilities y [b, classes], with more correct digits where it is softmax cross-entropy.

    Its gradient in the scores is p - y. For a sure and right prediction that difference loses most digits in float32,
    and matching then stalls long before the image is found (MSE 0.1 instead of 5e-4); so the likeliest label's is
    taken from the sum of the others.
    """
    if not task.softmax:
        return task.loss(params, x, y)
    scores = task.outputs(params, x)
    likeliest = y.argmax(dim=1, keepdim=True)
    gaps = scores - scores.gather(1, likeliest)
    itself = torch.arange(task.classes, device=y.device) == likeliest
    others = gaps.masked_fill(itself, -torch.inf).logsumexp(dim=1)
    # masked although the likeliest label's gap is zero: its slopes, +1 and -1, would swallow the others
    return (softplus(others) - (y.masked_fill(itself, 0.0) * gaps).sum(dim=1)).mean()


def losses(task: Task, params: Vector, x: Tensor, y: Tensor, *, chunk: int = 256) -> Tensor:
    """[n] losses of single examples x [n, *input_shape] and y [n], `chunk` of them at once."""
    each = vmap(task.loss, in_dims=(None, 0, 0))
    parts = zip(torch.split(x[:, None], chunk), torch.split(y[:, None], chunk), strict=True)
    with torch.no_grad():
        return torch.cat([each(params, *part) for part in parts])


def evaluator(
    task: Task, params: Vector, misfit: Misfit, *, images: int, labels: Tensor | None = None, chunk: int = 8
) -> Function:
    """The attacker's objective and its gradient in the dummies.

    A candidate is one row: `images` inputs and, where `labels` is None, `images` rows of label logits behind them
    (`unpack` takes it apart).

    Args:
        misfit: scores the gradients of the candidates.
        images: b, inputs of one instance.
        labels: [n, b, classes] probabilities of each instance, held fixed; None: a candidate brings its own.
        chunk: candidates computed at once. 8: more fall out of the cache and are no faster each.

    Guarantees:
        The value of a candidate depends on the other candidates by no more than rounding.
    """
    if chunk < 1:
        raise ValueError(f"expected chunk >= 1, got chunk={chunk}")
    return _Evaluator(task, params, misfit, images, labels, chunk)


def unpack(task: Task, candidates: Tensor, images: int) -> tuple[Tensor, Tensor]:
    """Inputs [m, b, *input_shape] and label logits [m, b, classes or 0] of candidates [m, D]."""
    inputs = images * math.prod(task.input_shape)
    x, logits = candidates[:, :inputs], candidates[:, inputs:]
    return x.reshape(-1, images, *task.input_shape), logits.reshape(len(candidates), images, -1)


@dataclass(frozen=True, eq=False)
class _Evaluator:
    """See `evaluator`."""

    task: Task
    params: Vector
    misfit: Misfit
    images: int
    labels: Tensor | None
    chunk: int

    def __call__(self, candidates: Tensor, instances: Tensor) -> Evaluation:
        parts = zip(torch.split(candidates, self.chunk), torch.split(instances, self.chunk), strict=True)
        values, slopes = zip(*(self._evaluate(part, rows) for part, rows in parts), strict=True)
        return Evaluation(torch.cat(values), torch.cat(slopes))

    def _evaluate(self, candidates: Tensor, instances: Tensor) -> Evaluation:
        """One chunk."""
        z = candidates.detach().requires_grad_()
        x, logits = unpack(self.task, z, self.images)
        y = logits.softmax(dim=-1) if self.labels is None else self.labels[instances]
        value = self.misfit(gradients(self.task, self.params, x, y), instances)
        (slope,) = torch.autograd.grad(value.sum(), z)
        return Evaluation(value.detach(), slope)
