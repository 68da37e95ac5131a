"""MAP's image priors on CIFAR-10, which no study of this project attacks by default.

The weight of total variation was chosen once on sixteen training images behind the LeNet of DLG with its
initialization, one image per victim, normal noise; the table of weights repeats that choice. The second table compares
it with a Gaussian prior of 3,000 training images, on test images, which served no choice: normal noise, JoPEQ and
CEPAM at their defaults. Mean SSIM, median MSE, and processor seconds an image. Needs `cifar10` (see README); a part of
it suffices.

    python benchmarks/prior_weight.py [FOLDER]
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from leakgauge.attacks._engine.prior import fitted
from leakgauge.attacks._engine.reconstruct import Search
from leakgauge.attacks.map import MAP
from leakgauge.attacks.prior import Prior
from leakgauge.defenses.cepam_gaussian import CepamGaussian
from leakgauge.defenses.gaussian import Gaussian
from leakgauge.defenses.jopeq import JoPEQ
from leakgauge.harness.core.contract import (
    Attack,
    Defense,
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


TESTED = range(100, 116)
AUXILIARY = 3000


@dataclass(frozen=True)
class Informed(MAP):
    """`map` with a Gaussian prior of auxiliary images."""

    images: Tensor = field(default_factory=lambda: torch.zeros(0), repr=False)

    def _search(self) -> Search:
        """The search of `map` in the coordinates of that prior."""
        search = super()._search()
        if not len(self.images):
            return search
        return replace(search, explains=replace(search.explains, prior=fitted(self.images, self.box)))


def observed(x: Tensor, y: Tensor, defense: Defense[Any, Any], auxiliary: Examples) -> Observation:
    """What a server sees of one client for each image [n, 3, 32, 32] with its label [n]."""
    task = ModelTask(build("lenet-dlg", (3, 32, 32), 10), "dlg")
    params, n = task.init(Key(5)), len(x)
    work = [Work(Examples(x[i : i + 1], y[i : i + 1]), Key(0)) for i in range(n)]
    gradients = train_clients(task, params, work, PLAN, "loop").updates
    setting = Setting(task.layout, n, n, 1, sends="gradient", steps=1, lr=0.1, batch=0, samples=1)
    state, messages = defense.init(setting), []
    for i, gradient in enumerate(gradients):
        client = Client.of(Sender(i, 1), gradient, defense.remember(setting), Key(6).child(i))
        (wire,) = Round(defense, setting, state).exchange([client], Key(6).child(i, "channel")).sent
        messages.append(Message(0, client.sender, wire, client.shared, 1))
    snapshot, view = Snapshot(0, params, state), View.parse("server")
    return Observation(view, setting, task, defense, 0.1, messages=tuple(messages), model=snapshot, auxiliary=auxiliary)


def quality(attack: Attack, x: Tensor, y: Tensor, seen: Observation) -> str:
    """Mean SSIM, median MSE, and processor seconds an image."""
    start = time.process_time()
    guesses = attack.run(seen, Key(7)).guesses
    seconds = (time.process_time() - start) / len(x)
    estimates, _ = score_reconstruction(list(x[:, None]), list(y[:, None]), guesses)
    return f"{estimates[0].value:8.3f} {estimates[1].value:7.4f} {seconds:5.2f}"


def main() -> None:
    """Print the tables."""
    torch.set_num_threads(1)
    data = load("cifar10", Path(sys.argv[1]) if len(sys.argv) > 1 else default_root())
    (x, y), auxiliary = data.train, Examples(*(part[:AUXILIARY] for part in data.train))
    chosen, labels = x[IMAGES.start : IMAGES.stop], y[IMAGES.start : IMAGES.stop]
    print("noise " + " ".join(f"{f'tv {weight:g}':>22}" for weight in WEIGHTS))
    for noise in NOISE:
        seen = observed(chosen, labels, Gaussian(clip=1000.0, noise_std=noise), auxiliary)
        print(f"{noise:<5g} " + " ".join(f"{quality(MAP(tv=weight), chosen, labels, seen):>22}" for weight in WEIGHTS))
    x, y = (part[TESTED.start : TESTED.stop] for part in data.test)
    defenses: dict[str, Defense[Any, Any]] = {
        f"gaussian {noise}": Gaussian(clip=1000.0, noise_std=noise) for noise in (0.003, 0.01, 0.03, 0.1)
    }
    defenses |= {"jopeq": JoPEQ(), "cepam-gaussian": CepamGaussian()}
    attacks: dict[str, Attack] = {"floor": Prior(), "tv, 400": MAP(evaluations=400)}
    attacks |= {f"gaussian, {n}": Informed(evaluations=n, images=auxiliary.x) for n in (100, 200)}
    fitted(auxiliary.x, MAP().box)
    print(f"\n{'defense':<15} " + " ".join(f"{name:>22}" for name in attacks))
    for name, defense in defenses.items():
        seen = observed(x, y, defense, auxiliary)
        cells = [quality(attack, x, y, seen) for attack in attacks.values()]
        print(f"{name:<15} " + " ".join(f"{cell:>22}" for cell in cells))


if __name__ == "__main__":
    main()
