"""A client's local training on candidate images, differentiable in them: what an attacker knows that the client did."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.func import grad, vmap

from leakgauge.attacks._engine.matching import Evaluation, Function, Misfit, batch_loss, gradients, unpack
from leakgauge.harness.core.contract import Setting, Task
from leakgauge.harness.core.vec import Vector


class Local(NamedTuple):
    """How a client made its message, as far as everybody knows.

    Attributes:
        gradient: it sent the gradient of all its images, not an update.
        lr, momentum: of its SGD.
        steps: behind an update.
        batch: images of a step; 0 means all.
        clip: bound on the l2 norm of one record's gradient; None: no bound.
        nominal: a step divides its sum by `batch`, also where fewer images were left for it.
    """

    gradient: bool
    lr: float
    steps: int
    batch: int
    momentum: float
    clip: float | None = None
    nominal: bool = False

    @classmethod
    def of(cls, setting: Setting, lr: float, steps: int, clip: float | None = None, *, nominal: bool = False) -> Local:
        """Of a message of so many steps in a round with this learning rate."""
        return cls(setting.sends == "gradient", lr, steps, setting.batch, setting.momentum, clip, nominal)

    def one_gradient(self, images: int) -> bool:
        """Whether the message of so many images is their mean gradient, up to a factor."""
        whole = self.gradient or (self.steps == 1 and (self.batch == 0 or self.batch >= images))
        return whole and self.clip is None and not (self.nominal and 0 < images < self.batch)


def client_updates(task: Task, params: Vector, x: Tensor, y: Tensor, local: Local) -> Tensor:
    """The messages that clients would send who trained on these images, before a defense; differentiable in x and y.

    The steps take the images in the candidate's own order. The client's is not known: images with one label may change
    places in a search, and whoever holds labels fixed can try their orders. Every pass takes them in the same order;
    where a client shuffles anew, that is an approximation.

    Args:
        params: [d] that all trained from.
        x: [m, b, *input_shape].
        y: [m, b, classes] probabilities.

    Returns:
        [m, d]: gradients or updates.

    Source: Geiping et al. 2020, sec. 6 (unrolled steps); Dimitrov et al. 2022 (arXiv 2206.12395) for the unknown order.
        Differs: one order for all passes, where they average over what the images of a pass have in common.
    """
    images = x.shape[1]
    if local.gradient:
        return _step(task, params, x, y, local, images)
    size = images if local.batch == 0 else min(local.batch, images)
    a_pass = math.ceil(images / size)
    velocity = moved = x.new_zeros(())
    for number in range(local.steps):
        first = number % a_pass * size
        part = slice(first, first + size)
        # the first step's parameters are shared, which is several times cheaper
        at = params if number == 0 else params + moved
        velocity = local.momentum * velocity + _step(task, at, x[:, part], y[:, part], local, size)
        moved = moved - local.lr * velocity
    return moved


def _step(task: Task, params: Tensor, x: Tensor, y: Tensor, local: Local, size: int) -> Tensor:
    """[m, d]: the mean gradient of a step's images at params [d] or [m, d], its records clipped where asked for."""
    m, b = x.shape[:2]
    divisor = size if local.nominal else b
    if local.clip is None:
        mean = gradients(task, params, x, y) if params.ndim == 1 else _gradients_at(task, params, x, y)
        return mean * (b / divisor)
    records, labels = x.flatten(0, 1)[:, None], y.flatten(0, 1)[:, None]
    if params.ndim == 1:
        each = gradients(task, params, records, labels)
    else:
        each = _gradients_at(task, params.repeat_interleave(b, dim=0), records, labels)
    # the epsilon keeps the slope of a zero gradient's norm finite
    norm = (each.square().sum(dim=1, keepdim=True) + 1e-30).sqrt()
    return (each * (local.clip / norm.clamp(min=local.clip))).view(m, b, -1).sum(dim=1) / divisor


def _gradients_at(task: Task, params: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """[m, d]: gradients at parameters [m, d] of their own."""
    mapped: Tensor = vmap(grad(batch_loss), in_dims=(0, 0, 0, None))(params, x, y, task)
    return mapped


def update_evaluator(
    task: Task,
    params: Vector,
    misfit: Misfit,
    local: Local,
    *,
    images: int,
    users: int = 1,
    labels: Tensor | None = None,
    chunk: int = 8,
) -> Function:
    """The attacker's objective of whole messages, and its gradient in the dummies; compare `matching.evaluator`.

    Args:
        misfit: scores messages [m, d], or [m, users, d] where `users` > 1.
        images: of all users together, equally many of each.
        users: clients whose messages the channel adds up.
        labels: [n, images, classes] probabilities of each instance, held fixed; None: a candidate brings its own.
        chunk: candidates computed at once.
    """
    return _Evaluator(task, params, misfit, local, images, users, labels, chunk)


@dataclass(frozen=True, eq=False)
class _Evaluator:
    """See `update_evaluator`."""

    task: Task
    params: Vector
    misfit: Misfit
    local: Local
    images: int
    users: int
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
        x, y = (part.reshape(len(z) * self.users, self.images // self.users, *part.shape[2:]) for part in (x, y))
        messages = client_updates(self.task, self.params, x, y, self.local)
        if self.users > 1:
            messages = messages.view(len(z), self.users, -1)
        value = self.misfit(messages, instances)
        (slope,) = torch.autograd.grad(value.sum(), z)
        return Evaluation(value.detach(), slope)
