"""Attacks: one gradient-matching evaluation, and the limit of reconstruction.

The reference of matching is the usual loop over the instances with a torch module and a double backward, as published.
The reference of the limit is the plain formula: one gradient per direction by autograd, then a product and an inverse
in numpy.
"""

from __future__ import annotations

from functools import partial

import matching
import numpy as np
import torch
from _measure import Rows, Work, flops_of
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from leakgauge.defenses.gaussian import Gaussian
from leakgauge.harness.audit.limit import limits
from leakgauge.harness.core import rng
from leakgauge.harness.core.contract import Examples, Message, Observation, Sender, Setting, Snapshot
from leakgauge.harness.core.rng import Key
from leakgauge.harness.core.threats import View
from leakgauge.harness.federation.round import Client, Round
from leakgauge.harness.learn.models import build
from leakgauge.harness.learn.prior import gaussian_prior
from leakgauge.harness.learn.tasks import ModelTask

STEP, NOISE = 1e-6, 0.01


def evaluation(name: str, n: int, images: int) -> Work:
    """One evaluation of n instances with `images` images each, behind a model."""
    ours, _, published, lean = matching.methods(name, 10, n, images)
    # compiled loops, which ours has, are not counted
    return Work(ours, published, "published loop", n, "evaluation", flops=flops_of(lean))


def limit(size: int) -> Work:
    """The limit of one image of size x size behind the LeNet of DLG, under normal noise."""
    task = ModelTask(build("lenet-dlg", (3, size, size), 10), "dlg")
    params, defense = task.init(Key(0)), Gaussian(clip=1000.0, noise_std=NOISE)
    truth = Examples(rng.uniform(Key(1), (1, 3, size, size)), torch.tensor([3]))
    auxiliary = Examples(rng.uniform(Key(2), (8 * size * size, 3, size, size)), torch.arange(8 * size * size) % 10)
    setting = Setting(task.layout, 1, 1, 1, sends="gradient", steps=1, lr=0.1, batch=1, samples=1)
    net = matching.module(task.model, params).double()
    update = torch.cat([one.flatten() for one in _gradient(net, truth.x.double(), truth.y)]).float()
    state = defense.init(setting)
    client = Client.of(Sender(0, 1), update, defense.remember(setting), Key(3))
    (wire,) = Round(defense, setting, state).exchange([client], Key(4)).sent
    message, model = Message(0, client.sender, wire, client.shared, 1), Snapshot(0, params, state)
    seen = Observation(
        View.parse("server"),
        setting,
        task,
        defense,
        0.1,
        messages=(message,),
        model=model,
        auxiliary=auxiliary,
    )
    basis, variances = gaussian_prior(auxiliary.x, 0.0).axes
    directions = (basis * variances.sqrt()).T
    flops = (
        flops_of(partial(_gradient, net, truth.x.double(), truth.y)) * len(directions)
        + len(directions) ** 2 * task.layout.dim
    )
    return Work(
        lambda: limits(seen, [truth], Key(5)),
        partial(_plain_limit, net, truth, directions),
        "plain formula",
        1,
        "image",
        flops=2 * flops,  # float64 has half the rate of float32
    )


def _gradient(net: nn.Module, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    """The gradient of the loss with respect to the parameters."""
    return torch.autograd.grad(cross_entropy(net(x), y), list(net.parameters()))


def _plain_limit(net: nn.Module, truth: Examples, directions: Tensor) -> float:
    """The mean of the diagonal of (J' F J + 1)^-1, with J by differences."""
    x = truth.x.double()
    here = torch.cat([one.flatten() for one in _gradient(net, x, truth.y)])
    rows = []
    for direction in directions.view(-1, *x.shape):
        there = torch.cat([one.flatten() for one in _gradient(net, x + STEP * direction, truth.y)])
        rows.append((there - here) / (STEP * NOISE))
    slopes = torch.stack(rows).numpy()
    return float(np.trace(np.linalg.inv(slopes @ slopes.T + np.eye(len(slopes)))) / len(slopes))


def rows(quick: bool) -> Rows:
    """Evaluations of several models and numbers of instances, and the limit of one image."""
    few = (("lenet-dlg", 8, 1), ("lenet-dlg", 8, 4), ("lenet5", 8, 1))
    more = (("lenet-dlg", 1, 1), ("lenet-dlg", 32, 1), ("mlp", 8, 1), ("cnn2", 8, 1))
    found = {
        f"matching, {name}, {n} at once, {images} image{'s' * (images > 1)}": partial(evaluation, name, n, images)
        for name, n, images in (few if quick else few + more)
    }
    size = 12 if quick else 24
    return {**found, f"limit, lenet-dlg, 3x{size}x{size}": partial(limit, size)}
