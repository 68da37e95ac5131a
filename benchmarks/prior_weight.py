"""The weight of MAP's image prior, chosen once on CIFAR-10, which no study of this project attacks by default.

Sixteen training images, the LeNet of DLG with its initialization, one image per victim, normal noise. Prints the mean
SSIM and the median MSE for each weight. Needs `cifar10` (see README); a part of it suffices.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from leakgauge.attacks.map import MAP
from leakgauge.defenses.gaussian import Gaussian
from leakgauge.harness.core.contract import (
    Examples,
    Message,
    Observation,
    Sender,
    Setting,
    Snapshot,
)
from leakgauge.harness.core.rng import Key
from leakgauge.harness.core.threats import View
from leakgauge.harness.data import default_root, load
from leakgauge.harness.federation.round import Client, Round
from leakgauge.harness.learn.batch import LocalPlan, Work, train_clients
from leakgauge.harness.learn.models import build
from leakgauge.harness.learn.tasks import ModelTask
from leakgauge.harness.study.score import score_reconstruction

IMAGES = range(1000, 1016)
NOISE = (0.003, 0.01, 0.05)
WEIGHTS = (1.0, 2.0, 5.0, 10.0, 20.0)
PLAN = LocalPlan(gradient=True, steps=None, epochs=None, batch=0, lr=0.1, momentum=0.0)


def main() -> None:
    """Print the table."""
    torch.set_num_threads(1)
    root = Path(sys.argv[1]) if len(sys.argv) > 1 else default_root()
    x, y = load("cifar10", root).train
    task = ModelTask(build("lenet-dlg", (3, 32, 32), 10), "dlg")
    params = task.init(Key(5))
    victims = [Examples(x[i : i + 1], y[i : i + 1]) for i in IMAGES]
    work = [Work(victim, Key(0)) for victim in victims]
    gradients = train_clients(task, params, work, PLAN, "loop").updates
    setting = Setting(task.layout, 16, 16, 1, sends="gradient", steps=1, lr=0.1, batch=0, samples=1)
    print("noise " + " ".join(f"{f'tv {weight:g}':>16}" for weight in WEIGHTS) + "   (mean SSIM, median MSE)")
    for noise in NOISE:
        defense = Gaussian(clip=1000.0, noise_std=noise)
        messages = []
        for i, gradient in zip(IMAGES, gradients, strict=True):
            client = Client(Sender(i, 1), gradient, None, private=Key(6).child(i), shared=Key(6))
            (wire,) = Round(defense, setting, None).exchange([client], Key(6)).sent
            messages.append(Message(0, client.sender, wire, None, 1))
        seen = Observation(
            View.parse("server"), setting, task, defense, 0.1, messages=tuple(messages), model=Snapshot(0, params, None)
        )
        cells = []
        for weight in WEIGHTS:
            guesses = MAP(tv=weight).run(seen, Key(7)).guesses
            estimates, _ = score_reconstruction([v.x for v in victims], [v.y for v in victims], guesses)
            cells.append(f"{estimates[0].value:8.3f} {estimates[1].value:7.4f}")
        print(f"{noise:<5g} " + " ".join(f"{cell:>16}" for cell in cells))


if __name__ == "__main__":
    main()
