"""Messages that an adversary makes from its own inputs as the victims make theirs, and what they teach."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.nn.functional import normalize

from leakgauge.attacks._engine.objective import Explains, objective, received_gradients, update_per_gradient
from leakgauge.attacks._engine.simulate import client_updates, plan_of
from leakgauge.harness.core import rng
from leakgauge.harness.core.contract import Examples, Observation, ObservedRound, Task
from leakgauge.harness.core.rng import Key
from leakgauge.harness.federation.round import Client, Round
from leakgauge.harness.learn.gradients import gradients, targets_of
from leakgauge.harness.learn.tasks import ModelTask

CHUNK = 32  # number of images whose gradients are computed at once
_WIDE = 1024  # number of entries above which a tensor is projected to this number
_ENTRIES = 2**25  # maximum number of entries of the gradients that are computed at once
_STATISTICS = ("running_mean", "running_var")
_STRENGTHS = 10.0 ** torch.arange(-4.0, 6.5, 0.5, dtype=torch.float64)  # of the penalty, in mean variances
_TIMES = 8  # number of imitated messages per candidate
_SURE = 4.0  # standard deviations above the mean misfit of imitations, up to which a candidate explains the real one


def imitated(seen: Observation, observed: ObservedRound, updates: Tensor, keys: Sequence[Key]) -> ObservedRound:
    """The round with messages of these updates [n, users, d] in place of the victims', one key for each message."""
    server, messages = Round(seen.defense, seen.setting, observed.model.state, observed.model.round), []
    for message, each, key in zip(observed.messages, updates, keys, strict=True):
        clients = []
        for i, (sender, update) in enumerate(zip([message.sender, *message.others], each, strict=True)):
            own, noise = key.child("user", i), seen.defense.training_noise(seen.setting, sender.samples)
            if noise > 0:
                update = update + noise * rng.normal(own.child("steps"), update.shape)
            clients.append(Client.of(sender, update, seen.defense.remember(seen.setting), own))
        (wire,) = server.among_silent(clients, key).received
        messages.append(message._replace(wire=wire, shared=message.shared and clients[0].shared))
    return observed._replace(messages=tuple(messages))


def own_updates(seen: Observation, observed: ObservedRound, batches: Examples, key: Key | None = None) -> Tensor:
    """[m, users, d]: the updates of clients who have batches x [m, b, ...], y [m, b], before a defense.

    key: draws the noise of a bottleneck for each client, the same in all its steps; None: no noise.
    """
    message = observed.messages[0]
    plan = plan_of(seen.setting, observed.lr, message.steps, seen.defense)
    # images are dealt alternately, because y is sorted and a user's images should not share one label
    split = (part.view(len(part), -1, message.users, *part.shape[2:]) for part in batches)
    x, y = (part.transpose(1, 2).flatten(0, 1) for part in split)
    params, y = observed.model.params.cpu(), targets_of(seen.task, y, x.dtype)
    if key is None or not seen.defense.local.bottleneck or not isinstance(seen.task, ModelTask):
        sent = client_updates(seen.task, params, x, y, plan)
    else:
        tasks = [seen.task.drawn(key.child(number), x.shape[1]) for number in range(len(x))]
        each = zip(tasks, torch.split(x, 1), torch.split(y, 1), strict=True)
        sent = torch.cat([client_updates(task, params, one, label, plan) for task, one, label in each])
    return sent.detach().view(-1, message.users, seen.setting.dim)


def own_messages(
    seen: Observation, observed: ObservedRound, batches: Examples, start: int, key: Key
) -> tuple[Tensor, ObservedRound]:
    """`own_updates`, and messages of these clients, numbered from `start`, which imitate the victims in turn.

    An update that is not finite, which defenses refuse to encode, is zero in its message.
    """
    numbers = range(start, start + len(batches.x))
    updates = own_updates(seen, observed, batches, key.child("noise", start))
    turns = observed._replace(messages=tuple(observed.messages[i % len(observed.messages)] for i in numbers))
    finite, keys = updates.isfinite().flatten(1).all(1), [key.child("message", i) for i in numbers]
    return updates, imitated(seen, turns, updates.where(finite[:, None, None], 0.0), keys)


def imitated_gradients(seen: Observation, observed: ObservedRound, batches: Examples, start: int, key: Key) -> Tensor:
    """[m, d]: what the messages of `own_messages` reveal of their gradients; NaN if an update is not finite."""
    updates, made = own_messages(seen, observed, batches, start, key)
    return received_gradients(seen, made, numbers=True).where(updates.isfinite().flatten(1).all(1)[:, None], torch.nan)


def explained_at(
    seen: Observation, observed_rounds: Sequence[ObservedRound], x: Tensor, labels: Tensor, explains: Explains, key: Key
) -> Tensor:
    """[n]: the misfit up to which candidates x [n, b, *input_shape] explain their messages as well as the truth would.

    The misfit of the true input has the same distribution as that of messages that the adversary computes from it. This
    distribution hardly depends on the input, so it is estimated at a candidate: the bound is the mean plus `_SURE`
    standard deviations over imitated messages, plus one unit per entry, which the prior may cost. Each message is a
    single gradient of one client.
    """
    each, misfits, updates = torch.arange(len(x), device=x.device), [], []
    for observed in observed_rounds:
        with torch.no_grad():
            rows = gradients(seen.task, observed.model.params, x, targets_of(seen.task, labels, x.dtype))
        rows = rows.nan_to_num(0.0, 0.0, 0.0).cpu()  # if a model diverged: no client sends this
        updates.append((update_per_gradient(seen.setting, observed)[:, None] * rows)[:, None])
    for number in range(_TIMES):
        keys = [key.child(number, message.sender.number) for message in observed_rounds[0].messages]
        made = [imitated(seen, *each_round, keys) for each_round in zip(observed_rounds, updates, strict=True)]
        misfits.append(objective(seen, made, labels, explains).messages(x.flatten(1), each).value)
    values = torch.stack(misfits)
    return values.mean(0) + _SURE * values.std(0) + x[0].numel()


def regressed(
    seen: Observation, rounds: Sequence[ObservedRound], labels: Tensor, key: Key, samples: int = 1000
) -> tuple[Tensor, float]:
    """Estimates [n, b, *input_shape] from messages of n victims with labels [b], and the error of left out inputs.

    At most `samples` auxiliary inputs with these labels, first those of the same label, pass through model, local
    training and defense. Ridge regression reads the tensors of the gradients over their norms, and batch statistics;
    large tensors are projected at random. Each principal component of the inputs has its own strength of the penalty,
    with the least error on inputs that are left out. Inputs of one label in a batch get their mean.
    """
    assert seen.auxiliary is not None
    (x, y), b = seen.auxiliary, len(labels)
    if len(x) < 2:
        raise ValueError(f"expected at least 2 auxiliary inputs, got {len(x)}")
    order = torch.from_numpy(rng.permutation(key.child("order"), len(x)))
    turns = torch.arange(max(2, min(samples, len(x)) // b) * b).view(-1, b) % len(x)
    rows = [order[(y[order] != own).sort(stable=True).indices][turns[:, i]] for i, own in enumerate(labels)]
    batches = Examples(x[torch.stack(rows, 1)], labels.expand(len(turns), b))
    products = [_products(seen, observed, batches, key.child(i)) for i, observed in enumerate(rounds)]
    alike = (labels[:, None] == labels).to(x)
    wanted = (alike / alike.sum(1)) @ batches.x.flatten(2)
    found, error = _ridge(torch.stack(products).sum(0), wanted.flatten(1).double())
    found = found.to(x).view(-1, b, *x.shape[1:])
    return found.clamp(0, 1) if x.ndim == 4 else found, error


def _products(seen: Observation, observed: ObservedRound, batches: Examples, key: Key) -> Tensor:
    """[m + n, m]: inner products of the features of m imitated messages, then n victims', with those of the imitated.

    A victim's feature stays in the range of the imitated ones.
    """
    task, layout, (m, b), own = seen.task, seen.task.layout, batches.y.shape, key.child("projection")
    size, chunks = max(1, min(CHUNK, _ENTRIES // layout.dim) // b), []
    for start in range(0, m, size):
        some = Examples(*(part[start : start + size] for part in batches))
        chunks.append([*_features(task, imitated_gradients(seen, observed, some, start, key).nan_to_num(0.0), own)])
    chunks.append([*_features(task, received_gradients(seen, observed, numbers=True), own)])
    products = torch.zeros(m + len(observed.messages), m, dtype=torch.float64)
    for name, entries, parts in zip(layout.names, layout.sizes, zip(*chunks, strict=True), strict=True):
        features = torch.cat(parts)
        made = features[:m]
        unit = features.clamp(made.amin(0), made.amax(0)) - made.mean(0)
        weight = math.sqrt(max(layout.sizes) if name.endswith(_STATISTICS) else entries)
        products += weight / unit[:m].square().sum().clamp(min=1e-30) * (unit @ unit[:m].T)
    return products


def _features(task: Task, gradients: Tensor, key: Key) -> Iterator[Tensor]:
    """[n, f] of each tensor of gradients [n, d]; keys follow the layers, not a model's order of tensors."""
    layout, structure = task.layout, getattr(task, "structure", None)
    turns = {at: turn for turn, at in enumerate(structure.places)} if structure is not None else {}
    for number, (name, tensor) in enumerate(zip(layout.names, layout.split(gradients), strict=True)):
        unit = tensor.flatten(1) if name.endswith(_STATISTICS) else normalize(tensor.flatten(1), dim=1, eps=1e-30)
        if unit.shape[1] > _WIDE:  # a count sketch adds each entry to one place, with a random sign
            places = torch.from_numpy(rng.integers(key.child(turns.get(number, number)), unit.shape[1], 2 * _WIDE))
            unit = unit.new_zeros(len(unit), 2 * _WIDE).index_add_(1, places, unit)
            unit = unit[:, :_WIDE] - unit[:, _WIDE:]
        yield unit


def _ridge(products: Tensor, wanted: Tensor) -> tuple[Tensor, float]:
    """Estimates [n, p] from `_products`, fitted to targets [m, p], and the error of each target left out of its fit."""
    m, mean, center = len(wanted), wanted.mean(0), products[: len(wanted)].mean(0)
    centered, off = products - products.mean(1, keepdim=True) - center + center.mean(), wanted - mean
    values, vectors = torch.linalg.eigh(centered[:m])
    squares, scores = torch.linalg.eigh(off @ off.T)
    values, turned = values.clamp(min=0)[:, None], vectors.T @ scores
    strengths = _STRENGTHS * values.mean().clamp(min=1e-30)
    errors = []
    for rest in (strengths / (values + strengths)).T:
        missed = vectors @ (rest[:, None] * turned) / (vectors.square() @ rest - 1 / m)[:, None]
        errors.append(missed.square().sum(0))
    least = torch.stack(errors).nan_to_num(nan=torch.inf).min(0)
    weights = vectors @ (turned / (values + strengths[least.indices]))
    error = float(squares.clamp(min=0) @ least.values / wanted.numel())
    return mean + centered[m:] @ weights @ (scores.T @ off), error
