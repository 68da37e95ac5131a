"""Photographs behind the LeNet of DLG: the clients' messages, and the quality of reconstructions."""

from __future__ import annotations

import argparse
import functools
import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from leakgauge.harness.core import rng
from leakgauge.harness.core.contract import (
    Defense,
    Examples,
    Guess,
    Message,
    Observation,
    Sender,
    Setting,
    Snapshot,
)
from leakgauge.harness.core.form import SUCCESS
from leakgauge.harness.core.rng import Key
from leakgauge.harness.core.threats import View
from leakgauge.harness.core.vec import Vector
from leakgauge.harness.data import DataSet, default_root, load
from leakgauge.harness.data.embedded import FACTORS, photos
from leakgauge.harness.federation.round import Client, Round
from leakgauge.harness.learn.batch import LocalPlan, Work, train_clients
from leakgauge.harness.learn.models import build
from leakgauge.harness.learn.tasks import ModelTask
from leakgauge.harness.study.score import score_reconstruction

AUXILIARY = 3000
"""Number of images that the attacker has."""

EXACT = 0.999
"""SSIM from which the closed form counts as exact."""

DIVERGED = 1.0
"""MSE above which a search has left the range of images."""

_PLAN = LocalPlan(gradient=True, steps=None, epochs=None, batch=0, lr=0.1, momentum=0.0)


def opened(parser: argparse.ArgumentParser, first: int) -> tuple[argparse.Namespace, DataSet, Tensor, Tensor, Examples]:
    """The words of the command, CIFAR-10, its attacked test images x and y from `first` on, and the attacker's images.

    From then on, torch uses one thread.
    """
    parser.add_argument("folder", nargs="?", type=Path, default=default_root())
    parser.add_argument("--images", type=int, default=16)
    given = parser.parse_args()
    torch.set_num_threads(1)
    data = load("cifar10", given.folder)
    x, y = (part[first : first + given.images] for part in data.test)
    return given, data, x, y, Examples(*(part[:AUXILIARY] for part in data.train))


class Victims(NamedTuple):
    """n clients with one image each and a common model: x [n, 3, 32, 32], y [n]."""

    task: ModelTask
    params: Vector
    x: Tensor
    y: Tensor


class Quality(NamedTuple):
    """Quality of n guesses: median raw MSE, mean SSIM (0 for a non-finite guess), and counts.

    recovered: MSE < 1e-3; exact: SSIM >= 0.999; infinite: not finite, or no reconstruction; failed: infinite, or MSE >
    1; labels: label correct.
    """

    mse: float
    ssim: float
    recovered: int
    exact: int
    infinite: int
    failed: int
    labels: int
    each_ssim: tuple[float, ...]


@functools.cache
def _photos() -> DataSet:
    """The data, read once."""
    return photos(Path())


def photographs(count: int, classes: int, key: Key) -> Victims:
    """Distinct training photographs and a fresh model, with weights and biases uniform in +-0.5.

    If `classes` is the number of source photographs, the labels are those of the data. Otherwise labels are drawn
    uniformly; for a fresh model a label is only a number.
    """
    x, y = _photos().train
    chosen = torch.from_numpy(rng.subset(key.child("photos"), len(y), count))
    own = classes == len(FACTORS)
    labels = y[chosen] if own else torch.from_numpy(rng.integers(key.child("labels"), count, classes))
    task = ModelTask(build("lenet-dlg", (3, 32, 32), classes), "dlg")
    return Victims(task, task.init(key.child("model")), x[chosen], labels)


def sent(victims: Victims) -> Tensor:
    """[n, d]: the clients' gradients."""
    work = [Work(Examples(x[None], y[None]), Key(0)) for x, y in zip(victims.x, victims.y, strict=True)]
    return train_clients(victims.task, victims.params, work, _PLAN, "loop").updates


def observed(victims: Victims, defense: Defense[Any, Any], key: Key) -> Observation:
    """The server's observation of the victims through the defense; `key` is the key of the clients."""
    n, task = len(victims.y), victims.task
    setting = Setting(task.layout, n, n, 1, sends="gradient", steps=1, lr=_PLAN.lr, batch=0, samples=1)
    state, messages = defense.init(setting), []
    for number, gradient in enumerate(sent(victims)):
        client = Client.of(Sender(number, 1), gradient, defense.remember(setting), key.child(number))
        (wire,) = Round(defense, setting, state).exchange([client], key.child(number, "channel")).sent
        messages.append(Message(0, client.sender, wire, client.shared, 1))
    return Observation(
        View.parse("server"),
        setting,
        task,
        defense,
        _PLAN.lr,
        messages=tuple(messages),
        model=Snapshot(0, victims.params, state),
        auxiliary=_photos().test,
    )


def judge(victims: Victims, guesses: Sequence[Guess]) -> Quality:
    """The quality of the guesses."""
    truth = [x[None] for x in victims.x], [y[None] for y in victims.y]
    estimates, _ = score_reconstruction(*truth, guesses)
    values = {estimate.name: estimate.values for estimate in estimates}
    mse = [math.inf if value is None else value for value in values["mse"]]
    ssim = tuple(value or 0.0 for value in values["ssim"])
    return Quality(
        mse=statistics.median(mse),
        ssim=statistics.fmean(ssim),
        recovered=sum(value < SUCCESS for value in mse),
        exact=sum(value >= EXACT for value in ssim),
        infinite=sum(value == math.inf for value in mse),
        failed=sum(value > DIVERGED for value in mse),
        labels=sum(value == 1 for value in values["label_accuracy"]),
        each_ssim=ssim,
    )
