"""Label restoration: the share of correct labels behind fresh and trained models, by number of images and noise."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import one_hot

from leakgauge.attacks._engine.labels import apportion, restore
from leakgauge.harness.core import rng, stats
from leakgauge.harness.core.contract import Examples
from leakgauge.harness.core.rng import Key
from leakgauge.harness.core.vec import Vector
from leakgauge.harness.data.embedded import digits
from leakgauge.harness.federation.loop import evaluation
from leakgauge.harness.learn.batch import LocalPlan, Work, choose_engine, train_clients
from leakgauge.harness.learn.gradients import gradients
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
    """Counts for m batches of b labels.

    labels: correct labels; batches: batches without a mistake; floor: correct labels of the floor; bare: correct labels
    without auxiliary data; margin: half-width of the 95 % interval of `labels` minus `floor`, in shares.
    """

    labels: int
    batches: int
    floor: int
    bare: int
    margin: float


@functools.cache
def data() -> Examples:
    """The victims' data: the digits of scikit-learn, enlarged to 16 x 16 pixels, which `cnn2` needs."""
    return _enlarged(digits(Path()).train)


@functools.cache
def auxiliary() -> Examples:
    """Digits that belong to no victim."""
    return _enlarged(digits(Path()).test)


def _enlarged(examples: Examples) -> Examples:
    """Images of 8 x 8 pixels, enlarged to 16 x 16."""
    return Examples(examples.x.repeat_interleave(2, 2).repeat_interleave(2, 3), examples.y)


def draw(kind: str, batches: int, size: int, key: Key) -> Tensor:
    """Labels [batches, size]: `distinct`, `independent` draws from the data, or `repeated` (each label twice)."""
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
    """The counts for batches with labels [m, b]; the floor guesses labels in their proportions in the data."""
    size = labels.shape[1]
    sent = gradients(task, params, pictures(labels, key.child("pictures")), one_hot(labels, CLASSES).float())
    if noise:
        sent = sent + noise * rng.normal(key.child("noise"), tuple(sent.shape))
    hits, bare = (
        _in_common(labels, torch.stack(restore(task, params, sent, [size] * len(labels), key.child("dummies"), seen)))
        for seen in (auxiliary(), None)
    )
    usual = torch.bincount(data().y, minlength=CLASSES).double() * size / len(data().y)
    floor = _in_common(labels, apportion(usual, size).expand_as(labels))
    margin = 1.96 * float(((hits - floor).double() / size).std()) / len(labels) ** 0.5
    return Share(int(hits.sum()), int((hits == size).sum()), int(floor.sum()), int(bare.sum()), margin)


def _in_common(truth: Tensor, guess: Tensor) -> Tensor:
    """Number [m] of labels that the two rows [m, b] have in common, each used once."""
    counts = [one_hot(labels, CLASSES).sum(1) for labels in (truth, guess)]
    return torch.minimum(*counts).sum(1)


def train(task: ModelTask, lr: float, key: Key) -> Vector:
    """The model after 300 steps of 32 digits each."""
    params = task.init(key.child("model"))
    plan = LocalPlan(gradient=False, steps=300, epochs=None, batch=32, lr=lr, momentum=0.9)
    return (
        params + train_clients(task, params, [Work(data(), key.child("train"))], plan, choose_engine(task)).updates[0]
    )


def labels(key: Key) -> None:
    """Print the table."""
    print(
        f"\nshare of correct labels restored from the gradients of {BATCHES} batches of digits, 10 classes\nbare: no "
        f"auxiliary data; floor: the most frequent labels. Intervals at 95 %, over batches, because the labels of one "
        f"batch are not independent."
    )
    print(
        f"{'':<37}{'images':>7}{'noise':>6}{'labels':>8}{'bare':>7}{'floor':>7}{'above the floor':>17}"
        f"{'whole batches right':>28}"
    )
    for name, start, lr in MODELS:
        task = ModelTask(build(name, (1, 16, 16), CLASSES), "dlg" if start == "dlg" else "default")
        for state, params in (("fresh", task.init(key.child("model"))), ("trained", train(task, lr, key))):
            title = f"{name}, {state} ({evaluation(task, params, data(), 0).accuracy:.2f})"
            for kind, sizes in SIZES.items():
                for size in sizes:
                    _rows(f"{title}, {kind}", task, params, kind, size, key.child(name, state, kind, size))


def _rows(title: str, task: ModelTask, params: Vector, kind: str, size: int, key: Key) -> None:
    """Print the shares for batches of one kind and size, for each noise."""
    n = BATCHES * size
    for noise in NOISES:
        found = share(task, params, draw(kind, BATCHES, size, key.child("labels")), key, noise)
        whole = stats.proportion("batches", found.batches, BATCHES)
        print(
            f"{title:<37}{size:7}{noise:6}{found.labels / n:8.3f}{found.bare / n:7.2f}{found.floor / n:7.2f}"
            f"{(found.labels - found.floor) / n:+10.3f} +-{found.margin:.3f}"
            f"{whole.value:12.2f} [{whole.low:.3f}, {whole.high:.3f}]",
            flush=True,
        )
