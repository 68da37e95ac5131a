"""MAP behind ReLU with pooling, residual blocks, group norm and batch norm: one image, noise, batches of 4, 8, 16.

Gradients of CIFAR-10 test images that were not used for any choice; models are fresh, or trained with two passes over
9,990 training images; labels are inferred. Prints mean SSIM with its 95 % interval (too narrow for images of one batch)
and processor seconds per image. Needs `cifar10` (see README); a part of it suffices.

    python benchmarks/relu.py [FOLDER] [--models lenet5 ...] [--images 16]
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import Any

from _victims import opened
from fedavg import PLAN, messages, quality
from peer import TRAINING, fresh

from leakgauge.attacks.map import MAP
from leakgauge.attacks.prior import Prior
from leakgauge.defenses.gaussian import Gaussian
from leakgauge.defenses.none import NoDefense
from leakgauge.harness.core.contract import Defense
from leakgauge.harness.core.rng import Key
from leakgauge.harness.learn.batch import Work, train_clients
from leakgauge.harness.learn.prior import gaussian_prior

FIRST = 700
MODELS = ("lenet5", "cnn2", "resnet20", "resnet20-bn")
NOISE = Gaussian(clip=1000.0, noise_std=0.01)
CASES: list[tuple[int, Defense[Any, Any]]] = [(1, NoDefense()), (1, NOISE), *((b, NoDefense()) for b in (4, 8, 16))]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--models", nargs="+", default=MODELS)
    given, data, x, y, auxiliary = opened(parser, FIRST)
    plan = replace(PLAN, gradient=True, steps=None)
    gaussian_prior(auxiliary.x, MAP().box)  # cached, so that no attack's time includes it
    for name in given.models:
        start = fresh(name, x, y)
        trained = train_clients(start.task, start.params, [Work(data.train, Key(4))], TRAINING, "loop").updates[0]
        for state, victims in (("trained", start._replace(params=start.params + trained)), ("fresh", start)):
            right = (start.task.outputs(victims.params, data.test.x[:2000]).argmax(1) == data.test.y[:2000]).float()
            print(f"{name}, {state}, accuracy {float(right.mean()):.3f}", flush=True)
            for batch, defense in CASES:
                seen = messages(victims, batch, auxiliary, plan, defense)
                of = f"batch {batch:>2}, {'clean' if defense is not NOISE else 'noise 0.01'}"
                for who, attack in (("floor", Prior()), ("map", MAP())):
                    print(f"    {of:<20} {who:<6} {quality(attack, seen, x, y, batch)}", flush=True)


if __name__ == "__main__":
    main()
