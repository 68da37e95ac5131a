"""How many labels the last layer's gradient tells by itself: fresh and trained models, several images a message."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import one_hot

from attacks._labels import restore
from harness import rng, stats
from harness.batch import LocalPlan, Work, choose_engine, train_clients
from harness.contract import Examples
from harness.data.embedded import digits
from harness.matching import gradients
from harness.models import build
from harness.rng import Key
from harness.tasks import ModelTask
from harness.vec import Vector

CLASSES = 10
BATCHES = 100
SIZES = (1, 2, 4, 8)
MODELS = (("lenet-dlg", "dlg", 0.03), ("mlp", "default", 0.1), ("cnn2", "default", 0.05))
"""Model, initialisation, learning rate."""


class Share(NamedTuple):
    """Of m batches of b labels: labels told, batches told without a mistake, labels that a guess has right."""

    labels: int
    batches: int
    floor: int


@functools.cache
def data() -> Examples:
    """The digits of scikit-learn, enlarged to 16 x 16 pixels, which `cnn2` needs."""
    x, y = digits(Path()).train
    return Examples(x.repeat_interleave(2, 2).repeat_interleave(2, 3), y)


def draw(kind: str, batches: int, size: int, key: Key) -> Tensor:
    """[batches, size] labels: `distinct`, or `repeated`: each twice."""
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


def share(task: ModelTask, params: Vector, labels: Tensor, key: Key) -> Share:
    """Restored from the gradients of batches with labels [m, b]; the floor tells the b most frequent labels."""
    sent = gradients(task, params, pictures(labels, key.child("pictures")), one_hot(labels, CLASSES).float())
    told = torch.stack(restore(task, params, sent, [labels.shape[1]] * len(labels), key.child("dummies")))
    frequent = torch.bincount(data().y, minlength=CLASSES).argsort(descending=True, stable=True)[: labels.shape[1]]
    common, floor = _in_common(labels, told), _in_common(labels, frequent.expand_as(labels))
    return Share(int(common.sum()), int((common == labels.shape[1]).sum()), int(floor.sum()))


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
        f"\nlabels restored from the gradients of {BATCHES} batches of digits, 10 classes; the floor tells the most "
        f"frequent ones.\nThe interval, at 95 %, is of batches, as the labels of one are not independent."
    )
    print(f"{'':<34}{'images':>7}{'labels':>8}{'floor':>7}{'whole batches right':>28}")
    for name, start, lr in MODELS:
        task = ModelTask(build(name, (1, 16, 16), CLASSES), "dlg" if start == "dlg" else "default")
        for state, params in (("fresh", task.init(key.child("model"))), ("trained", train(task, lr, key))):
            accuracy = task.correct(params, *data()) / len(data().y)
            for kind in ("distinct", "repeated"):
                for size in SIZES[kind == "repeated" :]:
                    mine = key.child(name, state, kind, size)
                    found = share(task, params, draw(kind, BATCHES, size, mine.child("labels")), mine)
                    whole = stats.proportion("batches", found.batches, BATCHES, higher_leaks=True)
                    n = BATCHES * size
                    print(
                        f"{f'{name}, {state} ({accuracy:.2f}), {kind}':<34}{size:7}{found.labels / n:8.3f}"
                        f"{found.floor / n:7.2f}{whole.value:12.2f} [{whole.low:.3f}, {whole.high:.3f}]",
                        flush=True,
                    )
