"""The limit of reconstruction compared with MAP: CIFAR-10 test images behind the LeNet of DLG, in one round.

The images were not used for any choice; labels are inferred. The defenses are normal noise of known size, and defenses
at their defaults. Prints the mean MSE per pixel of the mean image, of the limit given these images, of the limit over
all images of the attacker's distribution, and of `map` (its images are clipped to [0, 1]); the efficiency, which is the
mean over images of limit divided by the MSE of `map`, with its 95 % interval; and processor seconds per image of the
limit and of `map`. Needs `cifar10` (see README); a part of it suffices.

    python benchmarks/limit.py [FOLDER] [--images 16]
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import numpy as np
from _victims import opened
from prior_weight import seen

from leakgauge.attacks.map import MAP
from leakgauge.defenses.gaussian import Gaussian
from leakgauge.harness.audit.limit import limits
from leakgauge.harness.core.contract import Defense, Examples
from leakgauge.harness.core.rng import Key
from leakgauge.harness.federation.registry import build as build_part
from leakgauge.harness.learn.prior import gaussian_prior
from leakgauge.harness.study.score import score_limits

FIRST = 500
NOISE = (0.003, 0.01, 0.03, 0.1, 0.3)
DEFENSES = ("none", "laplace", "sdq", "jopeq", "cepam-gaussian")


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    _, _, x, y, auxiliary = opened(parser, FIRST)
    for box in (0.0, MAP().box):
        gaussian_prior(auxiliary.x, box).axes  # noqa: B018 - cached, so that no time includes it
    defenses: dict[str, Defense[Any, Any]] = {
        f"noise {noise}": Gaussian(clip=1000.0, noise_std=noise) for noise in NOISE
    } | {name: build_part("defense", name, {}) for name in DEFENSES}
    truth = [Examples(*pair) for pair in zip(x[:, None], y[:, None], strict=True)]
    print(f"{'defense':<15} {'blind':>7} {'limit':>7} {'average':>7} {'map':>7}  efficiency            limit s  map s")
    for name, defense in defenses.items():
        here, start = seen(x, y, defense, auxiliary), time.process_time()
        found = limits(here, truth, Key(9))
        middle = time.process_time()
        guesses = MAP().run(here, Key(7)).guesses
        end = time.process_time()
        *_, efficiency = score_limits([victim.x for victim in truth], guesses, found)
        pairs = zip(found, truth, guesses, strict=True)
        errors = [one.errors_of(victim.x, guess.x.clamp(0, 1))[0] for one, victim, guess in pairs]
        means = [np.mean([part[0] for part in parts]) for parts in zip(*(one[2::-1] for one in found), strict=True)]
        shares = f"{efficiency.value:.2f} [{efficiency.low:.2f}, {efficiency.high:.2f}]"
        seconds = f"{(middle - start) / len(x):7.2f} {(end - middle) / len(x):6.2f}"
        means = [means[0], means[2], means[1], np.mean(errors)]
        print(f"{name:<15} {' '.join(f'{value:7.4f}' for value in means)}  {shares:<20} {seconds}", flush=True)


if __name__ == "__main__":
    main()
