"""Local training: the one place that decides how clients' steps are computed.

Measured (`benchmarks/local_training.py`): on a CPU a lean loop over clients is fastest for convolutions, where `vmap`
was 1.5-2 times slower, and a batched product over clients for dense stacks; `vmap` over clients is for a GPU. What was
chosen is recorded with every result, and the engines agree within a tested tolerance.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from harness import rng
from harness.contract import Examples
from harness.rng import Key
from harness.tasks import ModelTask
from harness.vec import Vector

Engine = Literal["loop", "dense", "vmap"]
Indices = npt.NDArray[np.int64]

_CHUNK = 5
"""Clients in one batched product: more fall out of the cache (measured for 784-256-10)."""


@dataclass(frozen=True)
class LocalPlan:
    """How one client trains in one round.

    Attributes:
        gradient: send the gradient of the first batch instead of the update (FedSGD).
        steps: SGD steps, or None with `epochs`.
        epochs: passes over the local data, or None with `steps`.
        batch: samples a step; 0 means all of the client's.
        lr, momentum: of SGD, v <- momentum v + g, w <- w - lr v, v = 0 at the start of the round.
    """

    gradient: bool
    steps: int | None
    epochs: int | None
    batch: int
    lr: float
    momentum: float


class Work(NamedTuple):
    """One client's data and key for one round."""

    data: Examples
    key: Key


class Trained(NamedTuple):
    """updates: [clients, d]; batches: for each client the samples behind each step, as indices into its data."""

    updates: Tensor
    batches: tuple[tuple[Indices, ...], ...]


def choose_engine(task: ModelTask, device: torch.device | str = "cpu") -> Engine:
    """The fastest engine, by measurement, for this model on this device."""
    if torch.device(device).type != "cpu":
        return "vmap"
    dense = task.model.widths is not None and task.softmax
    return "dense" if dense else "loop"


def plan_batches(n: int, plan: LocalPlan, key: Key) -> tuple[Indices, ...]:
    """The samples of each step: fresh permutations of 0..n-1, cut into batches; the last of a pass may be smaller.

    Raises:
        ValueError: the client has no data.
    """
    if n < 1:
        raise ValueError("expected a client with at least one sample, got none")
    size = n if plan.batch == 0 else min(plan.batch, n)
    a_pass = -(-n // size)
    steps = 1 if plan.gradient else plan.steps
    if steps is None:
        steps = a_pass * (plan.epochs or 1)
    orders = rng.permutations(key.child("order"), -(-steps // a_pass), n)
    batches = [order[start : start + size] for order in orders for start in range(0, n, size)]
    return tuple(batches[:steps])


def train_clients(task: ModelTask, params: Vector, work: Sequence[Work], plan: LocalPlan, engine: Engine) -> Trained:
    """Every client's update (local parameters minus `params`), or gradient, in the order of `work`.

    Args:
        params: [d] float32, the global model. Not modified.

    Raises:
        ValueError: no clients, a client without data, or an engine that this model does not fit.
    """
    if not work:
        raise ValueError("expected at least one client, got none")
    batches = tuple(plan_batches(len(client.data.y), plan, client.key) for client in work)
    if engine == "loop":
        rows = [_train_one(task, params, *pair, plan) for pair in zip(work, batches, strict=True)]
        return Trained(torch.stack(rows), batches)
    if engine == "dense":
        if task.model.widths is None or not task.softmax:
            raise ValueError(f"expected a dense ReLU stack for engine 'dense', got {task.model.name!r}")
        step = _dense_step
    else:
        step = _vmap_step
    chunk = _CHUNK if params.device.type == "cpu" else len(work)
    parts = [
        _train_many(task, params, work[i : i + chunk], batches[i : i + chunk], plan, step)
        for i in range(0, len(work), chunk)
    ]
    return Trained(torch.cat(parts), batches)


def _train_one(task: ModelTask, params: Vector, work: Work, batches: Sequence[Indices], plan: LocalPlan) -> Vector:
    """One client, step by step, on views of one flat vector."""
    local = params.clone()
    tensors = [part.detach().requires_grad_() for part in task.layout.split(local)]
    velocity: list[Tensor] | None = None
    for number, index in enumerate(batches):
        rows = torch.from_numpy(index).to(params.device)
        keep = task.dropout_masks(work.key.child("dropout", number), len(index))
        loss = task.loss_at(tensors, work.data.x[rows], work.data.y[rows], keep)
        gradient = list(torch.autograd.grad(loss, tensors))
        if plan.gradient:
            return task.layout.join(gradient)
        if plan.momentum:
            if velocity is not None:
                torch._foreach_add_(gradient, velocity, alpha=plan.momentum)
            velocity = gradient
        with torch.no_grad():
            torch._foreach_add_(tensors, gradient, alpha=-plan.lr)
    return local - params


class _Step(NamedTuple):
    """One step of several clients, padded to one batch size.

    x: [c, b, *input_shape], y: [c, b]; weight: [c, b], 1/size on samples and 0 on padding; running: [c], 1 where the
    client still trains; keep: dropout masks [c, b, *shape].
    """

    x: Tensor
    y: Tensor
    weight: Tensor
    running: Tensor
    keep: list[Tensor] | None


_Accumulate = Callable[[ModelTask, Tensor, _Step, Tensor, float], None]
"""(task, local, step, velocity, momentum): velocity <- momentum * velocity + gradient, in place; both [c, d]."""


def _train_many(
    task: ModelTask,
    params: Vector,
    work: Sequence[Work],
    batches: Sequence[Sequence[Indices]],
    plan: LocalPlan,
    accumulate: _Accumulate,
) -> Tensor:
    """Several clients side by side; [c, d]. A client that has finished stands still."""
    local = params.repeat(len(work), 1)
    velocity = torch.zeros_like(local)
    for number in range(max(map(len, batches))):
        step = _gather(task, work, batches, number)
        accumulate(task, local, step, velocity, plan.momentum)
        if plan.gradient:
            return velocity
        everybody = bool(step.running.all())
        local.sub_(velocity if everybody else velocity * step.running[:, None], alpha=plan.lr)
    return local.sub_(params)


def _gather(task: ModelTask, work: Sequence[Work], batches: Sequence[Sequence[Indices]], number: int) -> _Step:
    """Step `number` of all clients, padded with zero-weight copies of a sample."""
    running = [number < len(mine) for mine in batches]
    picks = [mine[number] if runs else mine[-1] for mine, runs in zip(batches, running, strict=True)]
    size = max(map(len, picks))
    first, device = work[0].data, work[0].data.x.device
    x = first.x.new_empty((len(work), size, *first.x.shape[1:]))
    y = first.y.new_empty((len(work), size, *first.y.shape[1:]))
    weight = torch.zeros(len(work), size)
    keeps = []
    for row, (client, pick) in enumerate(zip(work, picks, strict=True)):
        rows = torch.from_numpy(np.concatenate([pick, np.repeat(pick[:1], size - len(pick))])).to(device)
        torch.index_select(client.data.x, 0, rows, out=x[row])
        torch.index_select(client.data.y, 0, rows, out=y[row])
        weight[row, : len(pick)] = 1.0 / len(pick)
        keep = task.dropout_masks(client.key.child("dropout", number), len(pick))
        if keep is not None:
            keeps.append([torch.cat([mask, mask[:1].expand(size - len(pick), *mask.shape[1:])]) for mask in keep])
    stacked = [torch.stack(masks) for masks in zip(*keeps, strict=True)] if keeps else None
    return _Step(x, y, weight.to(device), torch.tensor(running, dtype=torch.float32, device=device), stacked)


def _dense_step(task: ModelTask, local: Tensor, step: _Step, velocity: Tensor, momentum: float) -> None:
    """A dense ReLU stack with cross-entropy, by hand: three batched products a layer."""
    tensors, moving = task.layout.split(local), task.layout.split(velocity)
    weights, biases = tensors[0::2], tensors[1::2]
    inputs = [step.x.flatten(2)]
    for weight, bias in zip(weights, biases, strict=True):
        inputs.append(torch.baddbmm(bias[:, None], inputs[-1], weight.transpose(1, 2)))
        if len(inputs) <= len(weights):
            inputs[-1].relu_()
    delta = torch.softmax(inputs.pop(), -1)
    delta.scatter_add_(-1, step.y[..., None], torch.full_like(step.y[..., None], -1, dtype=delta.dtype))
    delta *= step.weight[..., None]
    for layer in range(len(weights) - 1, -1, -1):
        moving[2 * layer].baddbmm_(delta.transpose(1, 2), inputs[layer], beta=momentum)
        moving[2 * layer + 1].mul_(momentum).add_(delta.sum(1))
        if layer:
            delta = torch.bmm(delta, weights[layer]).mul_(inputs[layer] > 0)


def _vmap_step(task: ModelTask, local: Tensor, step: _Step, velocity: Tensor, momentum: float) -> None:
    """Any model, through `torch.func`; random draws were made outside."""

    def weighted_loss(params: Tensor, x: Tensor, y: Tensor, weight: Tensor, keep: list[Tensor] | None) -> Tensor:
        return (task.losses(params, x, y, keep) * weight).sum() + task.penalty(params)

    in_dims = (0, 0, 0, 0, None if step.keep is None else 0)
    gradient = torch.func.vmap(torch.func.grad(weighted_loss), in_dims=in_dims)
    velocity.mul_(momentum).add_(gradient(local, step.x, step.y, step.weight, step.keep))
