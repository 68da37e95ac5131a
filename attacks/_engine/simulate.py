"""A client's local training on candidate images, differentiable in them."""

from __future__ import annotations

import math
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor
from torch.func import grad, vmap

from leakgauge.attacks._engine.matching import Evaluator, Function, Misfit
from leakgauge.harness.core.contract import Defense, Setting, Task
from leakgauge.harness.core.vec import Vector
from leakgauge.harness.learn.gradients import batch_loss, gradients


class Local(NamedTuple):
    """The public facts about how a client computes its message.

    Attributes:
        gradient: whether the client sends the gradient of all its images instead of an update.
        lr, momentum: parameters of its SGD.
        steps: number of SGD steps behind an update.
        batch: number of images per step; 0 means all.
        clip: bound on the l2 norm of one record's gradient; None: no bound.
        nominal: whether a step divides its sum by `batch` even if it has fewer images.
    """

    gradient: bool
    lr: float
    steps: int
    batch: int
    momentum: float
    clip: float | None = None
    nominal: bool = False

    @classmethod
    def of(cls, setting: Setting, lr: float, steps: int, defense: Defense[Any, Any] | None = None) -> Local:
        """The facts for a message of `steps` steps in a round with learning rate `lr`, under a defense's local rule."""
        plain = cls(setting.sends == "gradient", lr, steps, setting.batch, setting.momentum)
        if defense is None:
            return plain
        return plain._replace(clip=defense.local.clip, nominal=defense.local.poisson or defense.step_noise(setting) > 0)

    def one_gradient(self, images: int) -> bool:
        """Whether a message of that many images is their mean gradient, up to a factor."""
        whole = self.gradient or (self.steps == 1 and (self.batch == 0 or self.batch >= images))
        return whole and self.clip is None and not (self.nominal and 0 < images < self.batch)


def client_updates(task: Task, params: Vector, x: Tensor, y: Tensor, local: Local) -> Tensor:
    """The messages of clients that train on these images, before a defense; differentiable in x and y.

    The steps take the images in the candidate's own order, because the client's order is unknown: a search may swap
    images of one label, and an attack with fixed labels can try several orders. Every pass uses the same order, which
    is an approximation for clients that shuffle before each pass.

    Args:
        params: [d], the parameters from which all clients train.
        x: [m, b, *input_shape].
        y: [m, b, classes] probabilities.

    Returns:
        [m, d]: gradients or updates.

    Source: Geiping et al. 2020, sec. 6 (unrolled steps); Dimitrov et al. 2022 (arXiv 2206.12395) for the unknown order.
        Differs: uses one order for all passes, whereas they average over what the images of a pass have in common.
    """
    images = x.shape[1]
    if local.gradient:
        return _step(task, params, x, y, local, images)
    size = images if local.batch == 0 else min(local.batch, images)
    steps_per_pass = math.ceil(images / size)
    velocity = moved = x.new_zeros(())
    for number in range(local.steps):
        first = number % steps_per_pass * size
        batch = slice(first, first + size)
        # the first step's parameters are shared, which is several times cheaper
        at = params if number == 0 else params + moved
        velocity = local.momentum * velocity + _step(task, at, x[:, batch], y[:, batch], local, size)
        moved = moved - local.lr * velocity
    return moved


def _step(task: Task, params: Tensor, x: Tensor, y: Tensor, local: Local, size: int) -> Tensor:
    """[m, d]: the mean gradient of a step's images at params [d] or [m, d], with clipped records if `local.clip`."""
    m, b = x.shape[:2]
    divisor = size if local.nominal else b
    if local.clip is None:
        return _gradients_at(task, params, x, y) * (b / divisor)
    records, labels = x.flatten(0, 1)[:, None], y.flatten(0, 1)[:, None]
    each = _gradients_at(task, params if params.ndim == 1 else params.repeat_interleave(b, dim=0), records, labels)
    # the epsilon keeps the slope of a zero gradient's norm finite
    norm = (each.square().sum(dim=1, keepdim=True) + 1e-30).sqrt()
    return (each * (local.clip / norm.clamp(min=local.clip))).view(m, b, -1).sum(dim=1) / divisor


def _gradients_at(task: Task, params: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """[m, d]: gradients at shared parameters [d], or at one set of parameters for each [m, d]."""
    if params.ndim == 1:
        return gradients(task, params, x, y)
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
) -> Function:
    """The misfit of whole messages, and its slope in the candidates; compare `matching.evaluator`.

    Args:
        misfit: scores messages [m, d], or [m, users, d] where `users` > 1.
        images: number of images of all users together; each user has the same number.
        users: number of clients whose messages the channel adds up.
        labels: [n, images, classes] probabilities of each instance, held fixed; None: each candidate has its own
            labels.
    """
    return Evaluator(task, misfit, images, labels, partial(_messages, task, params, local, users))


def _messages(task: Task, params: Vector, local: Local, users: int, x: Tensor, y: Tensor) -> Tensor:
    """Messages [m, d] or [m, users, d] of users that split inputs x [m, images, ...] and labels y in order."""
    own_x, own_y = (whole.reshape(len(x) * users, x.shape[1] // users, *whole.shape[2:]) for whole in (x, y))
    sent = client_updates(task, params, own_x, own_y, local)
    return sent.view(len(x), users, -1) if users > 1 else sent
