"""How many labels the last layer's gradient tells: fresh and trained models, several images a message, some noise."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import one_hot

from leakgauge.attacks._engine.matching import gradients
from leakgauge.attacks._labels.infer import apportion, restore
from leakgauge.harness.core import rng, stats
from leakgauge.harness.core.contract import Examples
from leakgauge.harness.core.rng import Key
from leakgauge.harness.core.vec import Vector
from leakgauge.harness.data.embedded import digits
from leakgauge.harness.learn.batch import LocalPlan, Work, choose_engine, train_clients
from leakgauge.harness.learn.models import build
from leakgauge.harness.learn.tasks import ModelTask

CLASSES = 10
BATCHES = 100
SIZES = {"distinct": (1, 2, 4, 8), "independent": (2, 4, 8, 16), "repeated": (2, 4, 8)}
NOISES = (0.0, 0.01)
"""Standard deviations of normal noise in each entry of the gradient."""

MODELS = (("lenet-dlg", "dlg", 0.03), ("mlp", "default", 0.1), ("cnn2", "default", 0.05))
"""Model, initialization, learning rate."""


class Share(NamedTuple):
    """Of m batches of b labels: labels told, batches told without a mistake, labels that a guess has right.

    bare: labels told without auxiliary data; margin: of `labels` less `floor`, in shares, half an interval at 95 %.
    """

    labels: int
    batches: int
    floor: int
    bare: int
    margin: float


@functools.cache
def data() -> Examples:
    """The digits of scikit-learn, enlarged to 16 x 16 pixels, which `cnn2` needs: the victims'."""
    return _enlarged(digits(Path()).train)


@functools.cache
def auxiliary() -> Examples:
    """The digits that are nobody's."""
    return _enlarged(digits(Path()).test)


def _enlarged(examples: Examples) -> Examples:
    """8 x 8 pixels as 16 x 16."""
    return Examples(examples.x.repeat_interleave(2, 2).repeat_interleave(2, 3), examples.y)


def draw(kind: str, batches: int, size: int, key: Key) -> Tensor:
    """[batches, size] labels: `distinct`; `independent`, as often as in the data; or `repeated`: each twice."""
    if kind == "independent":
        return data().y[torch.from_numpy(rng.integers(key, batches * size, len(data().y)))].view(batches, size)
    different = size if kind == "distinct" else size // 2
    rows = [rng.permutation(key.child(number), CLASSES)[:different] for number in range(batches)]
    return torch.from_numpy(np.stack(rows)).repeat(1, size // different)


def pictures(labels: Tensor, key: Key) -> Tensor:
    """[m, b, 1, 16, 16]: a digit for each label [m, b], drawn with replacement."""
    x, y = data()
    pools = [torch.nonzero(y == label)[:, 0] for label in range(CLASSES)]
    draws = rng.uniform(key, (labels.numel(),), dtype=torch.float64).tolist()
    rows = [
        int(pools[label][int(u * len(pools[label]))]) for label, u in zip(labels.flatten().tolist(), draws, strict=True)
    ]
    return x[rows].reshape(*labels.shape, *x.shape[1:])


def share(task: ModelTask, params: Vector, labels: Tensor, key: Key, noise: float = 0.0) -> Share:
    """Restored from the gradients of batches with labels [m, b]; the floor tells them as often as they are usual."""
    size = labels.shape[1]
    sent = gradients(task, params, pictures(labels, key.child("pictures")), one_hot(labels, CLASSES).float())
    if noise:
        sent = sent + noise * rng.normal(key.child("noise"), tuple(sent.shape))
    told, bare = (
        _in_common(labels, torch.stack(restore(task, params, sent, [size] * len(labels), key.child("dummies"), seen)))
        for seen in (auxiliary(), None)
    )
    usual = torch.bincount(data().y, minlength=CLASSES).double() * size / len(data().y)
    floor = _in_common(labels, apportion(usual, size).expand_as(labels))
    margin = 1.96 * float(((told - floor).double() / size).std()) / len(labels) ** 0.5
    return Share(int(told.sum()), int((told == size).sum()), int(floor.sum()), int(bare.sum()), margin)


def _in_common(truth: Tensor, told: Tensor) -> Tensor:
    """[m] labels that both rows [m, b] have, each used once."""
    counts = [one_hot(labels, CLASSES).sum(1) for labels in (truth, told)]
    return torch.minimum(*counts).sum(1)


def train(task: ModelTask, lr: float, key: Key) -> Vector:
    """The model after 300 steps of 32 digits."""
    params = task.init(key.child("model"))
    plan = LocalPlan(gradient=False, steps=300, epochs=None, batch=32, lr=lr, momentum=0.9)
    return (
        params + train_clients(task, params, [Work(data(), key.child("train"))], plan, choose_engine(task)).updates[0]
    )


def labels(key: Key) -> None:
    """Print the table."""
    print(
        f"\nlabels restored from the gradients of {BATCHES} batches of digits, 10 classes; beside it without auxiliary "
        f"data; the floor tells the usual ones.\nIntervals at 95 %, over batches, as the labels of one are not "
        f"independent."
    )
    print(
        f"{'':<37}{'images':>7}{'noise':>6}{'labels':>8}{'bare':>7}{'floor':>7}{'over the floor':>17}"
        f"{'whole batches right':>28}"
    )
    for name, start, lr in MODELS:
        task = ModelTask(build(name, (1, 16, 16), CLASSES), "dlg" if start == "dlg" else "default")
        for state, params in (("fresh", task.init(key.child("model"))), ("trained", train(task, lr, key))):
            title = f"{name}, {state} ({task.correct(params, *data()) / len(data().y):.2f})"
            for kind, sizes in SIZES.items():
                for size in sizes:
                    _rows(f"{title}, {kind}", task, params, kind, size, key.child(name, state, kind, size))


def _rows(title: str, task: ModelTask, params: Vector, kind: str, size: int, key: Key) -> None:
    """Print what is told of batches of one law and size, for each noise."""
    n = BATCHES * size
    for noise in NOISES:
        found = share(task, params, draw(kind, BATCHES, size, key.child("labels")), key, noise)
        whole = stats.proportion("batches", found.batches, BATCHES, higher_leaks=True)
        print(
            f"{title:<37}{size:7}{noise:6}{found.labels / n:8.3f}{found.bare / n:7.2f}{found.floor / n:7.2f}"
            f"{(found.labels - found.floor) / n:+10.3f} +-{found.margin:.3f}"
            f"{whole.value:12.2f} [{whole.low:.3f}, {whole.high:.3f}]",
            flush=True,
        )
