"""Local training: the only place that decides how clients' steps are computed.

Measured (`make bench`, `benchmarks/gpu.py`): on a CPU a lean loop over clients is fastest for convolutions, where
`vmap` takes 1.5-2 times as long, and on a GPU `vmap` is; a batched product over clients is fastest for dense stacks.
`vmap` is also for hundreds of clients of a tiny model. Every result records its engine. The engines agree within a
tested tolerance. `double` computes in double precision and rounds the updates at the end: they are then the same on
every processor, as fingerprints of the code need.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from leakgauge.harness.core import rng
from leakgauge.harness.core.contract import Examples, LocalRule, Setting
from leakgauge.harness.core.rng import Key
from leakgauge.harness.core.vec import Vector
from leakgauge.harness.learn.clipping import (
    UnknownUse,
    clip_factors,
    clipped_gradient,
    dense_deltas,
    outer_squares,
    row_squares,
)
from leakgauge.harness.learn.pruning import kept
from leakgauge.harness.learn.tasks import ModelTask

Engine = Literal["loop", "dense", "vmap", "double"]
Indices = npt.NDArray[np.int64]

_BETAS, EPSILON = (0.9, 0.999), 1e-8
"""Of Adam, as in torch."""

_CHUNK, _CACHED = 5, 2**19
"""Least number of clients side by side, and number of their weights up to which there are more, or with `vmap` of
entries of per-record gradients: what does not fit in the cache is slower.

Measured for dense networks on one thread with batches of 10, against 5 at once: 784-32-16-10 takes .64 of the time with
25 at once, 64-32-16-10 takes .34 with 100; 784-256-10 takes up to 1.4 times as long with more than 5.
"""

_MOST_DRAWN = 10**8  # maximum number of rows in the batches of a client's round
_ENTRIES = 2**26  # maximum number of entries of per-record gradients that `vmap` materializes at once


@dataclass(frozen=True)
class LocalPlan:
    """How one client trains in one round.

    A step of B samples follows their mean gradient. With `clip`, training is DP-SGD: each record's gradient of the loss
    is scaled down to at most norm C before the mean. The gradient of the model's l2 penalty depends on no record; it is
    added after the mean, without clipping or noise.

    Attributes:
        gradient: send the gradient of the first batch instead of the update (FedSGD).
        steps: SGD steps, or None with `epochs`.
        epochs: passes over the local data, or None with `steps`.
        batch: samples per step; 0 means all samples of the client.
        lr, momentum: of SGD, v <- momentum v + g, w <- w - lr v, v = 0 at the start of the round.
        clip: C, bound on the l2 norm of one record's gradient; None: no bound.
        noise_multiplier: z; each step's mean gradient gets normal noise of standard deviation z C / B per coordinate,
            B = `size`. With noise, the sum is always divided by B, although the last batch of a pass may be smaller, so
            one record never moves the mean by more than C / B.
        poisson: each step takes every sample independently with probability B / n, possibly none, and divides the sum
            by B; an epoch has ceil(n / B) steps.
        prune: see `LocalRule`.
        optimizer, weight_decay, proximal: see `FederationSpec`.

    Raises:
        ValueError: the clip is not positive and finite, the noise multiplier is negative, or there is noise without a
            clip.

    Source: Abadi et al. 2016 (arXiv 1607.00133), Alg. 1; it does not cover the l2 penalty.
    """

    gradient: bool
    steps: int | None
    epochs: int | None
    batch: int
    lr: float
    momentum: float
    clip: float | None = None
    noise_multiplier: float = 0.0
    poisson: bool = False
    prune: float = 0.0
    optimizer: str = "sgd"
    weight_decay: float = 0.0
    proximal: float = 0.0

    @classmethod
    def of(cls, setting: Setting, *, lr: float | None = None, steps: int | None = None) -> LocalPlan:
        """The plan of a setting; lr, steps: of a round and a message, instead of the setting's."""
        return cls(
            gradient=setting.sends == "gradient",
            steps=setting.steps if steps is None else steps,
            epochs=None,
            batch=setting.batch,
            lr=setting.lr if lr is None else lr,
            momentum=setting.momentum,
            optimizer=setting.optimizer,
            weight_decay=setting.weight_decay,
            proximal=setting.proximal,
        )

    @property
    def plain(self) -> bool:
        """Whether each step follows the gradient of the loss, or its momentum."""
        return self.optimizer == "sgd" and not self.weight_decay and not self.proximal

    def __post_init__(self) -> None:
        if self.clip is not None and not 0 < self.clip < math.inf:
            raise ValueError(f"expected 0 < clip < inf, or None, got clip={self.clip}")
        if not 0 <= self.noise_multiplier < math.inf:
            raise ValueError(f"expected 0 <= noise_multiplier < inf, got noise_multiplier={self.noise_multiplier}")
        if self.noise_multiplier and self.clip is None:
            raise ValueError(f"noise_multiplier={self.noise_multiplier} needs a clip: it is a multiple of the clip")

    def under(self, rule: LocalRule, noise: float = 0.0) -> LocalPlan:
        """The plan under a defense's rule for local training; `noise` is its `step_noise`.

        A full-batch rule overrides the plan's steps, epochs, batch and momentum.

        Raises:
            ValueError: the rule adds noise in each step, and the steps are not those of plain SGD.
        """
        if noise and not self.plain:
            text = f"optimizer={self.optimizer}, weight_decay={self.weight_decay:g}, proximal={self.proximal:g}"
            raise ValueError(f"expected plain SGD with a defense that adds noise in each step, got {text}")
        plan = replace(self, clip=rule.clip, noise_multiplier=noise, poisson=rule.poisson, prune=rule.prune)
        return replace(plan, steps=1, epochs=None, batch=0, momentum=0.0) if rule.full_batch else plan

    def move(self, number: int, gradient: Tensor, at: Tensor, moved: Tensor, memory: Moments) -> tuple[Tensor, Moments]:
        """By how much step `number` moves the weights; differentiable.

        Args:
            gradient: of the loss, with its momentum, noise and clip.
            at, moved: the weights, and by how much they moved in this round.

        Source: Kingma and Ba 2015, Algorithm 1, with torch's defaults; Loshchilov and Hutter 2019 (AdamW).
        """
        if self.proximal:
            gradient = gradient + self.proximal * moved
        if self.weight_decay and self.optimizer != "adamw":
            gradient = gradient + self.weight_decay * at
        if self.optimizer == "sgd":
            velocity = self.momentum * memory.first + gradient
            return -self.lr * velocity, Moments(velocity)
        first = _BETAS[0] * memory.first + (1 - _BETAS[0]) * gradient
        second = _BETAS[1] * memory.second + (1 - _BETAS[1]) * gradient.square()
        # the summand, far below the epsilon squared, keeps the slope of a zero gradient's root finite
        root = (second / (1 - _BETAS[1] ** (number + 1)) + 1e-30).sqrt()
        move = -self.lr / (1 - _BETAS[0] ** (number + 1)) * first / (root + EPSILON)
        if self.optimizer == "adamw":
            move = move - self.lr * self.weight_decay * at
        return move, Moments(first, second)

    def size(self, n: int) -> int:
        """B, the nominal number of samples per step of a client with n samples."""
        return n if self.batch == 0 else min(self.batch, n)

    def divisor(self, n: int, taken: int) -> int:
        """The divisor of the gradient sum in a step that took `taken` of n samples."""
        return self.size(n) if self.poisson or self.noise_multiplier else taken


class Moments(NamedTuple):
    """The moments that an optimizer keeps, like the weights; 0 before the first step."""

    first: Tensor | float = 0.0
    second: Tensor | float = 0.0


@dataclass
class Server:
    """The server's optimizer, which moves the model with the mean of each round.

    Attributes:
        plan: its steps; the mean gradient, or the negative mean update, is the gradient.
        gradient: whether clients send gradients; a round's learning rate then scales its step.
    """

    plan: LocalPlan
    gradient: bool
    moments: Moments = field(default_factory=Moments)
    taken: int = 0

    @classmethod
    def of(cls, setting: Setting) -> Server:
        """The server of a setting before its first step."""
        own = replace(LocalPlan.of(setting), weight_decay=0.0, proximal=0.0, optimizer=setting.server_optimizer)
        plan = replace(own, momentum=setting.server_momentum, lr=setting.server_lr)
        return cls(plan, setting.sends == "gradient")

    def step(self, params: Vector, mean: Vector, lr: float) -> Vector:
        """The next parameters [d] after a round with this mean and learning rate."""
        plan = replace(self.plan, lr=self.plan.lr * (lr if self.gradient else 1.0))
        given = mean if self.gradient else -mean
        move, self.moments = plan.move(self.taken, given, params, params, self.moments)
        self.taken += 1
        return params + move


class Work(NamedTuple):
    """One client's data and key for one round; rows: the client's rows of `data`, None: all rows."""

    data: Examples
    key: Key
    rows: Indices | None = None

    @property
    def samples(self) -> int:
        """Number of samples of the client."""
        return self.data.y.shape[0] if self.rows is None else len(self.rows)

    def places(self, index: Indices) -> Indices:
        """The client's samples `index` as rows of `data`."""
        return index if self.rows is None else self.rows[index]


class Trained(NamedTuple):
    """updates: [clients, d]; batches: each client's samples in each step, as indices into its data."""

    updates: Tensor
    batches: tuple[tuple[Indices, ...], ...]


class _Step(NamedTuple):
    """One step of several clients, padded to one batch size.

    x: [c, b, *input_shape]; y: [c, b]; weight: [c, b], 1/size on samples and 0 on padding; running: [c], 1 for a client
    that still trains; keep: dropout masks [c, b, *shape].
    """

    x: Tensor
    y: Tensor
    weight: Tensor
    running: Tensor
    keep: list[Tensor] | None


def choose_engine(task: ModelTask, device: torch.device | str = "cpu") -> Engine:
    """The fastest engine for this model on this device, by measurement; `loop` if a record has no loss of its own."""
    if not task.separable:
        return "loop"
    if task.model.widths is not None and task.softmax:
        return "dense"
    return "loop" if torch.device(device).type == "cpu" else "vmap"


def check_records(task: ModelTask, rule: LocalRule | LocalPlan) -> None:
    """Refuse to train a model by a rule for single records that does not fit it.

    Raises:
        ValueError: the model mixes records, and the rule clips or samples single records; or as `ModelTask.pruned`.
    """
    if rule.prune:
        task.pruned(rule.prune)
    if task.mixes and (rule.clip is not None or rule.poisson):
        raise ValueError(
            f"model {task.model.name!r} mixes the records of a batch, so single records have no gradient, "
            "but the defense clips or samples single records; take a model without batch norm"
        )


def plan_batches(n: int, plan: LocalPlan, key: Key) -> tuple[Indices, ...]:
    """The samples of each step: new permutations of 0..n-1, cut into batches; the last batch of a pass may be smaller.

    With `plan.poisson` a step's samples are an independent draw, in increasing order, possibly empty.

    Raises:
        ValueError: the client has no data, or its batches do not fit in memory.
    """
    if n < 1:
        raise ValueError("expected a client with at least one sample, got none")
    size = plan.size(n)
    per_pass = -(-n // size)
    steps = 1 if plan.gradient else plan.steps
    if steps is None:
        steps = per_pass * (plan.epochs or 1)
    if steps * max(size, 16) > _MOST_DRAWN:  # numpy's own size of a batch is that of 16 rows
        text = f"expected a client's round with at most {_MOST_DRAWN // max(size, 16):,} steps of {size:,} records"
        raise ValueError(f"{text}, got {steps:,}: its batches do not fit in memory")
    if plan.poisson:
        # float64, because a draw in [0, 1) rounded to float32 can be 1, but B = n must take all samples
        takes = rng.uniform(key.child("poisson"), (steps, n), dtype=torch.float64) < size / n
        return tuple(np.flatnonzero(row) for row in takes.numpy())
    orders = rng.permutations(key.child("order"), -(-steps // per_pass), n)
    batches = [order[start : start + size] for order in orders for start in range(0, n, size)]
    return tuple(batches[:steps])


def train_clients(task: ModelTask, params: Tensor, work: Sequence[Work], plan: LocalPlan, engine: Engine) -> Trained:
    """Every client's update (local parameters minus the initial ones) or gradient, in the order of `work`.

    Args:
        params: float32; [d], the initial model of all clients, or [clients, d], one per client. Not modified.

    Raises:
        ValueError: there are no clients, a client has no data, params has another shape, or the engine or the plan does
            not support this model: in a model that mixes records, a single record has no gradient.
    """
    if not work:
        raise ValueError("expected at least one client, got none")
    d = task.layout.dim
    if params.shape not in ((d,), (len(work), d)):
        raise ValueError(f"expected params [{d}] or [{len(work)}, {d}], got {list(params.shape)}")
    if engine == "double":
        exact = [client._replace(data=client.data.double()) for client in work]
        updates, batches = train_clients(task, params.double(), exact, plan, choose_engine(task, params.device))
        return Trained(updates.to(params.dtype), batches)
    check_records(task, plan)
    if engine != "loop" and not task.separable:
        why = "it mixes records" if task.mixes else "its loss may not be the mean of the records' losses"
        raise ValueError(f"expected engine 'loop' for model {task.model.name!r}, got {engine!r}: {why}")
    if plan.prune and engine != "dense":
        task = task.pruned(plan.prune)
    starts = params.expand(len(work), d)
    batches = tuple(plan_batches(client.samples, plan, client.key) for client in work)
    if engine == "loop":
        rows = [_train_one(task, *each, plan) for each in zip(starts, work, batches, strict=True)]
        return Trained(torch.stack(rows), batches)
    if engine == "dense" and (task.model.widths is None or not task.softmax):
        raise ValueError(f"expected a dense stack for engine 'dense', got {task.model.name!r}")
    chunk = len(work)
    if params.device.type == "cpu":
        sizes = {client.samples for client in work}
        padded = engine == "dense" and (plan.poisson or len(sizes) > 1)  # to the largest batch of a product
        chunk = _CHUNK if padded else max(_CHUNK, _CACHED // (d * (1 if engine == "dense" else max(sizes))))
    updates = torch.empty(len(work), d, dtype=params.dtype, device=params.device)
    for start in range(0, len(work), chunk):
        some = slice(start, start + chunk)
        _train_many(task, starts[some], work[some], batches[some], plan, engine, updates[some])
    return Trained(updates, batches)


def _train_one(task: ModelTask, params: Vector, work: Work, batches: Sequence[Indices], plan: LocalPlan) -> Vector:
    local = params.clone()
    tensors = [tensor.detach().requires_grad_() for tensor in task.layout.split(local)]
    velocity: list[Tensor] | None = None
    moments = Moments()
    for number, index in enumerate(batches):
        gradient = _gradient(task, tensors, work, number, index, plan)
        if plan.gradient:
            return task.layout.join(gradient)
        if not plan.plain:
            at = task.layout.join([tensor.detach() for tensor in tensors])
            move, moments = plan.move(number, task.layout.join(gradient), at, at - params, moments)
            local = at + move
            tensors = [tensor.requires_grad_() for tensor in task.layout.split(local)]
            continue
        if plan.momentum:
            if velocity is not None:
                torch._foreach_add_(gradient, velocity, alpha=plan.momentum)
            velocity = gradient
        with torch.no_grad():
            torch._foreach_add_(tensors, gradient, alpha=-plan.lr)
    return local - params


def _gradient(
    task: ModelTask, tensors: list[Tensor], work: Work, number: int, index: Indices, plan: LocalPlan
) -> list[Tensor]:
    """The gradient of step `number` on these samples, with noise and penalty."""
    rows = torch.from_numpy(work.places(index)).to(work.data.x.device)
    x, y = work.data.x[rows], work.data.y[rows]
    keep = task.dropout_masks(work.key.child("dropout", number), len(index))
    keep = keep and [mask.to(x.device) for mask in keep]
    if plan.clip is None and not plan.poisson:
        return list(torch.autograd.grad(task.loss_at(tensors, x, y, keep), tensors))
    clip = math.inf if plan.clip is None else plan.clip
    divisor = plan.divisor(work.samples, len(index))
    try:
        gradient = clipped_gradient(task, tensors, x, y, keep, clip, divisor)
    except UnknownUse:
        flat = task.layout.join(tensors).detach()
        weight = torch.full_like(rows, 1.0 / divisor, dtype=x.dtype)
        alone = _Step(x[None], y[None], weight[None], torch.ones(1), keep and [mask[None] for mask in keep])
        gradient = task.layout.split(_clipped_sums(task, flat[None], alone, clip)[0])
    with torch.no_grad():
        if task.model.l2:
            torch._foreach_add_(gradient, tensors, alpha=task.model.l2)
        if plan.noise_multiplier:
            torch._foreach_add_(gradient, task.layout.split(_noise(task, [work], number, plan)[0]))
    return gradient


def _noise(task: ModelTask, work: Sequence[Work], number: int, plan: LocalPlan) -> Tensor:
    """[c, d] the noise of step `number` of each client."""
    assert plan.clip is not None  # the plan refuses noise without a clip
    draws = [rng.normal(client.key.child("noise", number), (task.layout.dim,)) for client in work]
    stds = torch.tensor([plan.noise_multiplier * plan.clip / plan.size(client.samples) for client in work])
    return torch.stack(draws).mul_(stds[:, None]).to(work[0].data.x.device)


def _train_many(
    task: ModelTask,
    starts: Tensor,
    work: Sequence[Work],
    batches: Sequence[Sequence[Indices]],
    plan: LocalPlan,
    engine: Engine,
    out: Tensor,
) -> None:
    """Write to `out` [c, d] the updates of clients trained side by side from `starts` [c, d].

    A finished client no longer moves.
    """
    local = starts.clone(memory_format=torch.contiguous_format) if plan.gradient else out.copy_(starts)
    velocity, moments = out.zero_() if plan.gradient else torch.zeros_like(local), Moments()
    follows = plan if plan.plain else replace(plan, momentum=0.0)
    accumulate = _dense_step if engine == "dense" else _vmap_step
    for number in range(max(map(len, batches))):
        step = _gather(task, work, batches, number, plan)
        accumulate(task, local, step, velocity, follows)
        if plan.noise_multiplier:
            rows = [row for row, used in enumerate(batches) if number < len(used)]
            noise = _noise(task, [work[row] for row in rows], number, plan)
            velocity.index_add_(0, torch.tensor(rows, device=velocity.device), noise.to(velocity.dtype))
        if plan.gradient:
            return
        if not plan.plain:
            move, moments = plan.move(number, velocity.clone(), local, local - starts, moments)
            local.add_(move * step.running[:, None])
            continue
        everybody = all(number < len(used) for used in batches)  # on the host: an accelerator would have to wait
        local.sub_(velocity if everybody else velocity * step.running[:, None], alpha=plan.lr)
    local.sub_(starts)


def _gather(
    task: ModelTask, work: Sequence[Work], batches: Sequence[Sequence[Indices]], number: int, plan: LocalPlan
) -> _Step:
    """Step `number` of all clients, padded with zero-weight copies of a sample."""
    running = [number < len(used) for used in batches]
    picks = [used[number] if runs else used[-1] for used, runs in zip(batches, running, strict=True)]
    size = max(1, *map(len, picks))
    device = work[0].data.x.device
    # numpy takes a tenth of torch's time for a few numbers
    weight = np.zeros((len(work), size), np.float32)
    rows, keeps = np.empty((len(work), size), np.int64), list[list[Tensor]]()
    drops = bool(task.model.apply.dropout)
    for row, (client, pick) in enumerate(zip(work, picks, strict=True)):
        taken = len(pick)
        rows[row, :taken], rows[row, taken:] = pick, pick[0] if taken else 0
        weight[row, :taken] = 1.0 / plan.divisor(client.samples, taken)
        if client.rows is not None:
            rows[row] = client.rows[rows[row]]
        keep = task.dropout_masks(client.key.child("dropout", number), taken) if drops else None
        if keep is not None:
            keeps.append([torch.cat([mask, mask.new_ones(size - taken, *mask.shape[1:])]) for mask in keep])
    stacked = [torch.stack(masks).to(device) for masks in zip(*keeps, strict=True)] if keeps else None
    places = torch.from_numpy(rows).to(device)
    x, y = (_taken(data, places) for data in zip(*(client.data for client in work), strict=True))
    trains = torch.tensor(running, dtype=torch.float32, device=device)
    return _Step(x, y, torch.from_numpy(weight).to(device), trains, stacked)


def _taken(data: Sequence[Tensor], rows: Tensor) -> Tensor:
    """[c, b, ...] the rows [c, b] of each client's data; in one call if all clients hold rows of one tensor."""
    if all(tensor is data[0] for tensor in data):
        return data[0].index_select(0, rows.view(-1)).view(*rows.shape, *data[0].shape[1:])
    taken = data[0].new_empty((*rows.shape, *data[0].shape[1:]))
    for tensor, each, out in zip(data, rows, taken, strict=True):
        torch.index_select(tensor, 0, each, out=out)
    return taken


def _dense_step(task: ModelTask, local: Tensor, step: _Step, velocity: Tensor, plan: LocalPlan) -> None:
    """Add a dense stack's gradient to the decayed velocity [c, d], by hand: three batched products per layer."""
    assert task.structure is not None
    moving, momentum = task.structure.split(velocity), plan.momentum
    weight = step.weight if plan.clip is None else None
    tanh = task.structure.widths is None
    inputs, deltas = dense_deltas(task.structure.split(local), step.x, step.y, weight, tanh=tanh)
    if plan.prune:
        body, own = task.structure.body, task.structure.split(local)[:-2]
        inputs[-1] = inputs[-1] * torch.func.vmap(lambda own, x: kept(body, plan.prune, own, x, None))(own, step.x)
    if plan.clip is not None:
        squares = [partial(outer_squares, *pair) for pair in zip(deltas, inputs, strict=True)]
        factors = clip_factors(squares, local.dtype, plan.clip) * step.weight
        for delta in deltas:
            delta *= factors[..., None]
    for layer, (delta, entered) in enumerate(zip(deltas, inputs, strict=True)):
        moving[2 * layer].baddbmm_(delta.transpose(1, 2), entered, beta=momentum)
        moving[2 * layer + 1].mul_(momentum).add_(delta.sum(1))


def _vmap_step(task: ModelTask, local: Tensor, step: _Step, velocity: Tensor, plan: LocalPlan) -> None:
    """As `_dense_step`, but for any model, through `torch.func`; all random draws are inputs."""
    velocity.mul_(plan.momentum)
    if plan.clip is not None:
        velocity.add_(_clipped_sums(task, local, step, plan.clip))
        if task.model.l2:
            velocity.add_(local, alpha=task.model.l2)
        return

    def weighted_loss(params: Tensor, x: Tensor, y: Tensor, weight: Tensor, keep: list[Tensor] | None) -> Tensor:
        return (task.losses(params, x, y, keep) * weight).sum() + task.penalty(task.layout.split(params))

    in_dims = (0, 0, 0, 0, None if step.keep is None else 0)
    gradient = torch.func.vmap(torch.func.grad(weighted_loss), in_dims=in_dims)
    velocity.add_(gradient(local, step.x, step.y, step.weight, step.keep))


def _clipped_sums(task: ModelTask, local: Tensor, step: _Step, clip: float) -> Tensor:
    """[c, d] weighted sums of the records' clipped gradients; at most `_ENTRIES` entries are materialized at once."""

    def loss_of_one(params: Tensor, x: Tensor, y: Tensor, keep: list[Tensor] | None) -> Tensor:
        return task.losses(params, x[None], y[None], keep and [mask[None] for mask in keep])[0]

    over_keep = None if step.keep is None else 0
    of_client = torch.func.vmap(torch.func.grad(loss_of_one), in_dims=(None, 0, 0, over_keep))
    gradients = torch.func.vmap(of_client, in_dims=(0, 0, 0, over_keep))
    sums = torch.zeros_like(local)
    size = max(1, _ENTRIES // local.numel())
    for start in range(0, step.y.shape[1], size):
        records = slice(start, start + size)
        keep = step.keep and [mask[:, records] for mask in step.keep]
        rows = gradients(local, step.x[:, records], step.y[:, records], keep)
        factors = clip_factors([partial(row_squares, rows)], rows.dtype, clip) * step.weight[:, records]
        sums += torch.bmm(factors[:, None], rows)[:, 0]
    return sums
