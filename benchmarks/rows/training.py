"""Training: clients' local steps, steps with every record clipped, whole rounds, and shadow models.

The reference is the textbook loop: one module, one `torch.optim.SGD` and one batch at a time, with the engines'
shuffled indices. Only for clipped steps, the reference is the same engine's step without a clip.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from functools import partial
from itertools import pairwise

import torch
from _measure import Rows, Work
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from leakgauge.attacks._members.shadowing import halves, train_shadows
from leakgauge.defenses.none import NoDefense
from leakgauge.harness.core import rng
from leakgauge.harness.core.cell import FederationSpec
from leakgauge.harness.core.contract import Examples, Setting
from leakgauge.harness.core.rng import Key
from leakgauge.harness.core.threads import keep_memory
from leakgauge.harness.federation.loop import Keep, train
from leakgauge.harness.learn.batch import LocalPlan, choose_engine, plan_batches, train_clients
from leakgauge.harness.learn.batch import Work as Turn
from leakgauge.harness.learn.models import build
from leakgauge.harness.learn.tasks import ModelTask

CLIENTS, SAMPLES, TESTED = 10, 600, 10_000
PLAN = LocalPlan(gradient=False, steps=5, epochs=None, batch=32, lr=0.1, momentum=0.9)
SHADOWS = LocalPlan(gradient=False, steps=None, epochs=2, batch=50, lr=0.05, momentum=0.9)
RECORDS = 1000
SHAPE = (1, 28, 28)


def mlp(*widths: int) -> Callable[[], nn.Module]:
    """Dense layers with ReLU between them."""

    def make() -> nn.Module:
        layers: list[nn.Module] = [nn.Flatten()]
        for inputs, outputs in pairwise(widths):
            layers += [nn.Linear(inputs, outputs), nn.ReLU()]
        return nn.Sequential(*layers[:-1])

    return make


def cnn2() -> nn.Module:
    """The CNN of JoPEQ."""
    convolutions = [nn.Conv2d(1, 6, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 6, 5), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*convolutions, nn.Flatten(), nn.Linear(96, 50), nn.ReLU(), nn.Linear(50, 10))


PLAIN: dict[str, Callable[[], nn.Module]] = {
    "mlp": mlp(784, 256, 10),
    "mlp-small": mlp(784, 32, 16, 10),
    "cnn2": cnn2,
}
"""The models as torch modules."""


def step_by_step(net: nn.Module, data: Examples, key: Key, plan: LocalPlan) -> None:
    """One client's local training."""
    optimizer = torch.optim.SGD(net.parameters(), lr=plan.lr, momentum=plan.momentum)
    for index in plan_batches(len(data.y), plan, key):
        rows = torch.from_numpy(index)
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(data.x[rows]), data.y[rows]).backward()
        optimizer.step()


def plain(
    net: nn.Module, params: Tensor, work: list[Turn], plan: LocalPlan, rounds: int, test: Examples | None = None
) -> Tensor:
    """Only federated averaging: no message, no key; with `test`, it evaluates as often as ours, on as much."""
    for number in range(1, rounds + 1):
        total = torch.zeros_like(params)
        for turn in work:
            local = deepcopy(net)
            vector_to_parameters(params.clone(), local.parameters())
            step_by_step(local, turn.data, turn.key, plan)
            total += parameters_to_vector(local.parameters()).detach()
        params = total / len(work)
        if test is not None:
            vector_to_parameters(params, net.parameters())
            count = len(test.y) if number == rounds else FederationSpec().interim_samples
            tested(net, test.x[:count], test.y[:count])
    return params


@torch.no_grad()
def tested(net: nn.Module, images: Tensor, labels: Tensor) -> tuple[float, float]:
    """Loss and accuracy, in batches of a hundred, the fastest here."""
    loss, right = 0.0, 0
    for x, y in zip(images.split(100), labels.split(100), strict=True):
        scores = net(x)
        loss += float(nn.functional.cross_entropy(scores, y, reduction="sum"))
        right += int((scores.argmax(1) == y).sum())
    return loss / len(labels), right / len(labels)


@functools.cache
def clients(count: int, samples: int) -> list[Turn]:
    """Clients with noise in the shape of digits: the values do not affect the time."""
    labels = torch.arange(samples) % 10
    return [
        Turn(Examples(rng.normal(Key(0).child(number), (samples, *SHAPE)), labels), Key(1).child(number))
        for number in range(count)
    ]


def local(name: str) -> Work:
    """A round's local training of ten clients."""
    task, work = ModelTask(build(name, SHAPE, 10)), clients(CLIENTS, SAMPLES)
    params, net = task.init(Key(0).child("init")), PLAIN[name]()
    assert sum(one.numel() for one in net.parameters()) == len(params)
    ours = partial(train_clients, task, params, work, PLAN, choose_engine(task))
    steps = CLIENTS * (PLAN.steps or 1)
    return Work(ours, partial(plain, net, params, work, PLAN, 1), "plain loop", steps, "step")


def clipped(name: str, shape: tuple[int, int, int]) -> Work:
    """A round's local training with every record clipped."""
    task = ModelTask(build(name, shape, 10))
    params, engine, labels = task.init(Key(0)), choose_engine(task), torch.arange(SAMPLES) % 10
    work = [Turn(Examples(rng.normal(Key(k), (SAMPLES, *shape)), labels), Key(1).child(k)) for k in range(CLIENTS)]
    ours, free = (partial(train_clients, task, params, work, plan, engine) for plan in (replace(PLAN, clip=1.0), PLAN))
    return Work(ours, free, "the same without a clip", CLIENTS * (PLAN.steps or 1), "step")


def federated(name: str, rounds: int, count: int, *, evaluates: bool) -> Work:
    """A whole training with its evaluations at default settings; the plain loop has them if it `evaluates`.

    Freed memory is kept, as in every worker.
    """
    keep_memory()
    task, work = ModelTask(build(name, SHAPE, 10)), clients(CLIENTS, SAMPLES)
    spec = FederationSpec(clients=CLIENTS, rounds=rounds, local_steps=PLAN.steps, lr=PLAN.lr, momentum=PLAN.momentum)
    test = Examples(rng.normal(Key(2), (count, *SHAPE)), torch.arange(count) % 10)
    data, engine = {number: turn.data for number, turn in enumerate(work)}, choose_engine(task)
    ours = partial(train, task, spec, NoDefense(), data, test, Key(3), engine=engine, keep=Keep())
    base = partial(plain, PLAIN[name](), task.init(Key(0)), work, PLAN, rounds, test if evaluates else None)
    return Work(ours, base, f"plain loop, {'with' if evaluates else 'no'} evaluation", rounds, "round")


def shadows(name: str, runs: int) -> Work:
    """Shadow models, each trained with SGD on half of the records."""
    task, inside = ModelTask(build(name, SHAPE, 10)), halves(Key(4), runs, RECORDS, RECORDS // 2)
    pool, net = clients(1, RECORDS)[0].data, PLAIN[name]()
    halved = [Turn(Examples(pool.x[rows], pool.y[rows]), Key(5).child(i)) for i, rows in enumerate(inside)]
    setting = Setting(task.layout, 1, 1, 1, "update", SHADOWS.steps or 1, SHADOWS.lr, SHADOWS.batch, RECORDS // 2)
    params = task.init(Key(0))

    def one_by_one() -> None:
        for turn in halved:
            plain(net, params, [turn], SHADOWS, 1)

    return Work(
        partial(train_shadows, task, setting, SHADOWS, pool, inside, Key(6)), one_by_one, "plain loop", runs, "model"
    )


def rows(quick: bool) -> Rows:
    """Steps, rounds and shadow models."""
    few = 2 if quick else 10
    found: dict[str, Callable[[], Work]] = {
        "local steps, mlp": partial(local, "mlp"),
        "local steps, cnn2": partial(local, "cnn2"),
        "clipped steps, mlp": partial(clipped, "mlp", SHAPE),
        "clipped steps, cnn2": partial(clipped, "cnn2", SHAPE),
        "round, mlp": partial(federated, "mlp", few, TESTED, evaluates=False),
        "shadow models, mlp-small": partial(shadows, "mlp-small", 8 if quick else 32),
    }
    more = {
        "clipped steps, cnn-udp, 3x32x32": partial(clipped, "cnn-udp", (3, 32, 32)),
        "round, cnn2": partial(federated, "cnn2", few, TESTED, evaluates=True),
        "shadow models, mlp": partial(shadows, "mlp", 16),
    }
    return found if quick else found | more
