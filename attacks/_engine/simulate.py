"""A client's local training on candidate images, differentiable in them."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from torch import Tensor
from torch.func import grad, vmap

from leakgauge.harness.core.contract import Defense, Setting, Task
from leakgauge.harness.core.vec import Vector
from leakgauge.harness.learn.batch import LocalPlan, Moments
from leakgauge.harness.learn.gradients import batch_loss, gradients
from leakgauge.harness.learn.tasks import ModelTask


def plan_of(setting: Setting, lr: float, steps: int, defense: Defense[Any, Any] | None = None) -> LocalPlan:
    """How a client computed a message of `steps` steps in a round of rate `lr`, under a defense's rule for training."""
    plan = LocalPlan.of(setting, lr=lr, steps=steps)
    if defense is None:
        return plan
    rule = defense.local
    noise = defense.step_noise(setting)
    return replace(plan, clip=rule.clip, noise_multiplier=noise, poisson=rule.poisson, prune=rule.prune)


def one_step(plan: LocalPlan, images: int) -> bool:
    """Whether a message is made by one step on all of that many images."""
    return plan.gradient or (plan.steps == 1 and plan.size(images) == images)


def one_gradient(plan: LocalPlan, images: int) -> bool:
    """Whether a message of that many images is their mean gradient, up to a factor and the decay of the weights.

    By Adam, it is a number for each entry of the gradient.
    """
    return one_step(plan, images) and plan.clip is None and not (plan.poisson and 0 < images < plan.batch)


def client_updates(task: Task, params: Vector, x: Tensor, y: Tensor, plan: LocalPlan) -> Tensor:
    """The messages of clients that train on these images, before a defense; differentiable in x and y.

    The steps take the images in the candidate's own order, because the client's order is unknown: a search may swap
    images of one label, and an attack with fixed labels can try several orders. Every pass uses the same order, which
    is an approximation for clients that shuffle before each pass.

    Args:
        params: [d], the parameters from which all clients train.
        x: [m, b, *input_shape].
        y: [m, b, classes] probabilities.
        plan: with a number of steps; noise is not added.

    Returns:
        [m, d]: gradients or updates.

    Source: Geiping et al. 2020, sec. 6 (unrolled steps); Dimitrov et al. 2022 (arXiv 2206.12395) for the unknown order.
        Differs: uses one order for all passes, whereas they average over what the images of a pass have in common.
    """
    images = x.shape[1]
    if plan.prune and isinstance(task, ModelTask):
        task = task.pruned(plan.prune)
    if plan.gradient:
        return _step(task, params, x, y, plan, images)
    assert plan.steps is not None
    size = plan.size(images)
    steps_per_pass = math.ceil(images / size)
    memory, moved = Moments(), x.new_zeros(())
    for number in range(plan.steps):
        first = number % steps_per_pass * size
        batch = slice(first, first + size)
        # the first step's parameters are shared, which is several times cheaper
        at = params if number == 0 else params + moved
        move, memory = plan.move(number, _step(task, at, x[:, batch], y[:, batch], plan, size), at, moved, memory)
        moved = moved + move
    return moved


def _step(task: Task, params: Tensor, x: Tensor, y: Tensor, plan: LocalPlan, size: int) -> Tensor:
    """[m, d]: the mean gradient of a step's images at params [d] or [m, d], with clipped records if `plan.clip`."""
    m, b = x.shape[:2]
    divisor = size if plan.poisson or plan.noise_multiplier else b
    if plan.clip is None:
        return _gradients_at(task, params, x, y) * (b / divisor)
    records, labels = x.flatten(0, 1)[:, None], y.flatten(0, 1)[:, None]
    each = _gradients_at(task, params if params.ndim == 1 else params.repeat_interleave(b, dim=0), records, labels)
    # the epsilon keeps the slope of a zero gradient's norm finite
    norm = (each.square().sum(dim=1, keepdim=True) + 1e-30).sqrt()
    return (each * (plan.clip / norm.clamp(min=plan.clip))).view(m, b, -1).sum(dim=1) / divisor


def _gradients_at(task: Task, params: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """[m, d]: gradients at shared parameters [d], or at one set of parameters for each [m, d]."""
    if params.ndim == 1:
        return gradients(task, params, x, y)
    mapped: Tensor = vmap(grad(batch_loss), in_dims=(0, 0, 0, None))(params, x, y, task)
    return mapped


def messages_of(task: Task, params: Vector, plan: LocalPlan, users: int, x: Tensor, y: Tensor) -> Tensor:
    """Messages [m, d], or [m, users, d] of several users, who split inputs x [m, images, ...] and labels y in order."""
    own_x, own_y = (whole.reshape(len(x) * users, x.shape[1] // users, *whole.shape[2:]) for whole in (x, y))
    sent = client_updates(task, params, own_x, own_y, plan)
    return sent.view(len(x), users, -1) if users > 1 else sent
