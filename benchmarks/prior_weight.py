"""MAP's image priors on CIFAR-10, which no study of this project attacks by default.

The weight of total variation was chosen once on sixteen training images behind the LeNet of DLG with its
initialization, with one image per victim and normal noise; the table `weights` repeats this choice. The table `priors`
compares total variation with a Gaussian prior of 3,000 training images, on test images that were not used for any
choice, behind normal noise and defenses at their defaults. `attacks`: every search attack with and without the prior.
`softened`: digits behind dense ReLU layers, with and without the searches behind softened layers. Prints mean SSIM,
median MSE, and processor seconds per image. Needs `cifar10` (see README) except for `softened`; a part of it suffices.

    python benchmarks/prior_weight.py weights|priors|attacks|softened [FOLDER]
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from _victims import AUXILIARY, Victims, observed
from torch import Tensor

from leakgauge.attacks._engine import reconstruct
from leakgauge.attacks.dlg import DLG
from leakgauge.attacks.idlg import IDLG
from leakgauge.attacks.inverting_gradients import InvertingGradients
from leakgauge.attacks.map import MAP
from leakgauge.attacks.prior import Prior
from leakgauge.defenses.gaussian import Gaussian
from leakgauge.defenses.none import NoDefense
from leakgauge.harness.core.contract import Attack, Defense, Examples, Observation
from leakgauge.harness.core.rng import Key
from leakgauge.harness.data import DataSet, default_root, load
from leakgauge.harness.federation.registry import build as build_part
from leakgauge.harness.learn.models import build
from leakgauge.harness.learn.prior import gaussian_prior
from leakgauge.harness.learn.tasks import ModelTask
from leakgauge.harness.study.score import score_reconstruction

IMAGES = range(1000, 1016)
NOISE = (0.003, 0.01, 0.05)
WEIGHTS = (1.0, 2.0, 5.0, 10.0, 20.0)
TESTED = range(100, 116)
ATTACKED = range(900, 908)
DIGITS = range(200, 216)


def seen(x: Tensor, y: Tensor, defense: Defense[Any, Any], auxiliary: Examples) -> Observation:
    """The server's observation of one client for each image [n, 3, 32, 32] with its label [n]."""
    task = ModelTask(build("lenet-dlg", (3, 32, 32), 10), "dlg")
    return replace(observed(Victims(task, task.init(Key(5)), x, y), defense, Key(6)), auxiliary=auxiliary)


def quality(attack: Attack, x: Tensor, y: Tensor, observation: Observation) -> str:
    """Mean SSIM, median MSE, and processor seconds per image."""
    start = time.process_time()
    guesses = attack.run(observation, Key(7)).guesses
    seconds = (time.process_time() - start) / len(x)
    estimates, _ = score_reconstruction(list(x[:, None]), list(y[:, None]), guesses)
    return f"{estimates[0].value:8.3f} {estimates[1].value:7.4f} {seconds:5.2f}"


def weights(data: DataSet, auxiliary: Examples) -> None:
    """Print the table of weights of total variation."""
    x, y = (part[IMAGES.start : IMAGES.stop] for part in data.train)
    print("noise " + " ".join(f"{f'tv {weight:g}':>22}" for weight in WEIGHTS))
    for noise in NOISE:
        here = seen(x, y, Gaussian(clip=1000.0, noise_std=noise), auxiliary)
        attacks = [MAP(prior="tv", tv=weight, evaluations=1500) for weight in WEIGHTS]
        print(f"{noise:<5g} " + " ".join(f"{quality(attack, x, y, here):>22}" for attack in attacks), flush=True)


def priors(data: DataSet, auxiliary: Examples) -> None:
    """Print the table of priors."""
    x, y = (part[TESTED.start : TESTED.stop] for part in data.test)
    defenses: dict[str, Defense[Any, Any]] = {
        f"gaussian {noise}": Gaussian(clip=1000.0, noise_std=noise) for noise in (0.003, 0.01, 0.03, 0.1)
    }
    for name in ("laplace", "sdq", "jopeq", "cepam-gaussian", "top-k", "random-mask"):
        defenses[name] = build_part("defense", name, {})
    attacks: dict[str, Attack] = {"floor": Prior()}
    attacks["tv, 1500"] = MAP(prior="tv", evaluations=1500)
    attacks |= {f"gaussian, {n}": MAP(evaluations=n) for n in (100, 400)}
    gaussian_prior(auxiliary.x, MAP().box)  # cached, so that no attack's time includes it
    print(f"{'defense':<15} " + " ".join(f"{name:>22}" for name in attacks))
    for name, defense in defenses.items():
        here = seen(x, y, defense, auxiliary)
        cells = [quality(attack, x, y, here) for attack in attacks.values()]
        print(f"{name:<15} " + " ".join(f"{cell:>22}" for cell in cells), flush=True)


def attacks(data: DataSet, auxiliary: Examples) -> None:
    """Print the table of search attacks."""
    x, y = (part[ATTACKED.start : ATTACKED.stop] for part in data.test)
    every: dict[str, Attack] = {"floor": Prior(), "map": MAP()}
    for prior in ("none", "gaussian"):
        every[f"dlg {prior}"] = DLG(restarts=1, evaluations=400, prior=prior)
        every[f"idlg {prior}"] = IDLG(restarts=1, evaluations=400, prior=prior)
        published = "tv" if prior == "none" else prior
        every[f"inverting {published}"] = InvertingGradients(evaluations=400, prior=published)
    for model, init in (("cnn2", "default"), ("lenet5", "default"), ("lenet-dlg", "dlg")):
        task = ModelTask(build(model, (3, 32, 32), 10), init)
        for noise, defense in (("none", NoDefense()), ("0.01", Gaussian(clip=1000.0, noise_std=0.01))):
            victims = Victims(task, task.init(Key(5)), x, y)
            here = replace(observed(victims, defense, Key(6)), auxiliary=auxiliary)
            for name, attack in every.items():
                print(f"{model:<10} noise {noise:<5} {name:<20} {quality(attack, x, y, here)}", flush=True)


def softened() -> None:
    """Print the table of softened layers."""
    digits = load("digits", Path())
    x, y = (part[DIGITS.start : DIGITS.stop] for part in digits.train)
    task = ModelTask(build("mlp-small", digits.input_shape, 10))
    stages = reconstruct.STAGES
    for name in ("sdq", "sdq-lattice", "jopeq", "t-noise", "top-k", "random-mask"):
        victims = Victims(task, task.init(Key(5)), x, y)
        here = replace(observed(victims, build_part("defense", name, {}), Key(6)), auxiliary=digits.test)
        tv = MAP(prior="tv", box=1000.0, warm=800, evaluations=1500)
        cells = [quality(tv, x, y, here)]
        for tried in ((), stages):
            reconstruct.STAGES = tried
            cells.append(quality(MAP(), x, y, here))
        print(f"{name:<12} tv {cells[0]}   without {cells[1]}   with {cells[2]}", flush=True)


PARTS = {"weights": weights, "priors": priors, "attacks": attacks}


def main() -> None:
    """Print the chosen table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("part", choices=(*PARTS, "softened"))
    parser.add_argument("folder", nargs="?", type=Path, default=default_root())
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.part == "softened":
        softened()
        return
    data = load("cifar10", given.folder)
    PARTS[given.part](data, Examples(*(part[:AUXILIARY] for part in data.train)))


if __name__ == "__main__":
    main()
