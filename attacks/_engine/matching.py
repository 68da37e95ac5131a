"""Evaluations of a model for many instances at once: losses, gradients, and how well dummies explain a message.

All victims of a round train from the same parameters, which are shared. Gradients of chains of known layers are
computed by hand (`attacks._engine.kernels`); those of other models are mapped over the instances, and one backward pass
through them gives every dummy its own gradient. `_kernel` decides.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.func import grad, vmap
from torch.nn.functional import softplus

from leakgauge.attacks._engine.kernels import Kernel
from leakgauge.harness.core.contract import Task
from leakgauge.harness.core.vec import Vector
from leakgauge.harness.learn.layers import Chain, Conv
from leakgauge.harness.learn.tasks import ModelTask

_TOGETHER = 32
"""Instances whose gradients are computed at once: the patches of an image take up to 2 MB."""

_ENTRIES = 2**20
"""Gradient entries of one chunk by hand: with 789,000 entries an instance, 8 at once took 6.5 ms each, single ones
2.4."""


class Evaluation(NamedTuple):
    """Of m candidates: value [m] and gradient [m, D]."""

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


def gradients(task: Task, params: Vector, x: Tensor, y: Tensor) -> Tensor:
    """Gradients [m, d] of the loss at the shared parameters, one per batch; differentiable in x and y.

    Args:
        x: [m, b, *input_shape].
        y: [m, b, classes] probabilities.
    """
    kernel = _kernel(task, params, x.shape[1])
    if kernel is not None:
        parts = zip(torch.split(x, _TOGETHER), torch.split(y, _TOGETHER), strict=True)
        rows = [_ByHand.apply(kernel, *part) for part in parts]  # type: ignore[no-untyped-call]
        return torch.cat(rows) if len(rows) > 1 else rows[0]
    if len(x) == 1:  # mapping over one instance takes half as long again as not mapping
        leaf = params.detach().requires_grad_()
        again = x.requires_grad or y.requires_grad
        return torch.autograd.grad(batch_loss(leaf, x[0], y[0], task), leaf, create_graph=again)[0][None]
    mapped: Tensor = vmap(grad(batch_loss), in_dims=(None, 0, 0, None))(params, x, y, task)
    return mapped


class _ByHand(torch.autograd.Function):
    """`gradients` by a kernel, inside autograd."""

    @staticmethod
    def forward(ctx: Any, kernel: Kernel, x: Tensor, y: Tensor) -> Tensor:
        gradients, ctx.trace = kernel.trace(x, y)
        ctx.save_for_backward(x, y)
        return gradients

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slopes: Tensor) -> tuple[None, Tensor, Tensor]:
        assert len(ctx.saved_tensors) == 2  # this access raises if x or y was modified in place
        return None, *ctx.trace.pull(slopes)


def _kernel(task: Task, params: Vector, images: int) -> Kernel | None:
    """The kernel by hand if there is one and it is faster; None: use `vmap`.

    Time of `vmap` over time by hand, measured on one busy CPU core (`benchmarks/matching.py`), 3x32x32, 8 instances or
    more: 1.5 to 2.5 for the LeNet of DLG with one image and 1.2 to 1.4 with four, 3 to 6 for `mlp` (in smaller chunks
    by hand), 1.1 to 1.4 for `cnn2` and `lenet5` with one image, but 0.6 to 1.0 with four: a first convolution of stride
    1 has a window per pixel, and few channels share the cost of copying it. No GPU was measured.
    """
    if type(task) is not ModelTask or not task.softmax or task.model.l2 or params.device.type != "cpu":
        return None
    chain = task.model.apply
    if not isinstance(chain, Chain):
        return None
    strides = [layer.stride for layer in chain.layers if isinstance(layer, Conv)]
    if images > 1 and strides and strides[0] == 1:
        return None
    return Kernel(chain, task.layout, params)


def batch_loss(params: Vector, x: Tensor, y: Tensor, task: Task) -> Tensor:
    """The task's loss for probabilities y [b, classes]; softmax cross-entropy keeps more correct digits.

    Its gradient in the scores is p - y. For a confident and correct prediction that difference loses most digits in
    float32, and matching then stalls long before it finds the image (MSE 0.1 instead of 5e-4). So the entry of the
    likeliest label is computed as minus the sum of the others.
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
    """[n] losses of single examples x [n, *input_shape] and y [n], computed `chunk` at a time."""
    each = vmap(task.loss, in_dims=(None, 0, 0))
    parts = zip(torch.split(x[:, None], chunk), torch.split(y[:, None], chunk), strict=True)
    with torch.no_grad():
        return torch.cat([each(params, *part) for part in parts])


def evaluator(
    task: Task, params: Vector, misfit: Misfit, *, images: int, labels: Tensor | None = None, chunk: int = 8
) -> Function:
    """The misfit of the candidates' gradients, and its slope in the candidates.

    A candidate is one row: `images` inputs and, where `labels` is None, `images` rows of label logits after them, in
    the layout of `unpack`.

    Args:
        images: b, inputs of one instance.
        labels: [n, b, classes] probabilities of each instance, held fixed; None: each candidate has its own.
        chunk: candidates computed at once, at most. More than 8 leave the cache and are no faster per candidate.

    Guarantees:
        Other candidates change the value of a candidate by rounding at most.
    """
    if chunk < 1:
        raise ValueError(f"expected chunk >= 1, got chunk={chunk}")
    kernel = _kernel(task, params, images)
    if kernel is not None:
        _keep_freed_memory()
        chunk = max(1, min(chunk, _ENTRIES // task.layout.dim))
    return Evaluator(task, misfit, images, labels, partial(gradients, task, params), chunk, kernel)


def _keep_freed_memory() -> None:
    """Free one large, untouched block: glibc then keeps up to 64 MiB of freed memory instead of 128 KiB.

    Otherwise each evaluation returns megabytes to the system, and the next one faults them in again: 1,100 to 1,600
    page faults, a third of the time.
    """
    torch.empty(2**25 - 2**16, dtype=torch.uint8)  # glibc ignores blocks above 32 MiB


def unpack(task: Task, candidates: Tensor, images: int) -> tuple[Tensor, Tensor]:
    """Inputs [m, b, *input_shape] and label logits [m, b, classes or 0] of candidates [m, D]."""
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
        value, slopes = _sloped(self.misfit, gradients, instances)
        pulled = trace.pull(slopes)
        if self.labels is not None:
            return Evaluation(value, pulled.x.flatten(1))
        of_logits = y * (pulled.y - (y * pulled.y).sum(dim=-1, keepdim=True))
        return Evaluation(value, torch.cat([pulled.x.flatten(1), of_logits.flatten(1)], dim=1))

    def _by_autograd(self, candidates: Tensor, instances: Tensor) -> Evaluation:
        """One chunk."""
        z = candidates.detach().requires_grad_()
        value = self.misfit(self.send(*self._batch(z, instances)), instances)
        (slope,) = torch.autograd.grad(value.sum(), z)
        return Evaluation(value.detach(), slope)

    def _batch(self, candidates: Tensor, instances: Tensor) -> tuple[Tensor, Tensor]:
        """Inputs and label probabilities of candidates."""
        x, logits = unpack(self.task, candidates, self.images)
        return x, logits.softmax(dim=-1) if self.labels is None else self.labels[instances]


def _sloped(misfit: Misfit, gradients: Tensor, instances: Tensor) -> Evaluation:
    """The misfit [m] and its slope in the gradients [m, d]."""
    if isinstance(misfit, SlopedMisfit):
        return misfit.sloped(gradients, instances)
    leaf = gradients.requires_grad_()
    value = misfit(leaf, instances)
    (slope,) = torch.autograd.grad(value.sum(), leaf)
    return Evaluation(value.detach(), slope)
