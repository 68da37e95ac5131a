"""Training behind every defense: MNIST, 20 rounds, a mild and a harsh setting of each defense, against no defense.

Ten clients with 600 samples each, full participation. A defense that requires one full-batch step, or gradients, is
compared with no defense under the same federation. Prints the test accuracy (10,000 images; half-width of the 95 %
interval at most 1.0 points) and whether the mild setting stays within 5 points of no defense and the harsh setting does
not. Needs `mnist` (see README). The exit code is 1 if either fails for a defense.

    python benchmarks/training.py [NAME ...]
"""

from __future__ import annotations

import sys
from typing import Any

import torch

from leakgauge.harness.core.cell import FederationSpec
from leakgauge.harness.core.contract import Examples
from leakgauge.harness.core.rng import Key, subset
from leakgauge.harness.data import default_root, load
from leakgauge.harness.federation import registry
from leakgauge.harness.federation.loop import Keep, train
from leakgauge.harness.learn.batch import choose_engine
from leakgauge.harness.learn.models import build
from leakgauge.harness.learn.partition import partition
from leakgauge.harness.learn.tasks import ModelTask

CLIENTS, SAMPLES, ROUNDS, POINTS = 10, 6000, 20, 0.05

FEDERATIONS = {
    "updates": FederationSpec(clients=CLIENTS, rounds=ROUNDS, samples=SAMPLES, local_epochs=1, lr=0.1),
    "one step": FederationSpec(clients=CLIENTS, rounds=ROUNDS, samples=SAMPLES, local_steps=1, batch=0, lr=0.5),
    "gradients": FederationSpec(clients=CLIENTS, rounds=ROUNDS, samples=SAMPLES, algorithm="fedsgd", batch=0, lr=0.5),
}
MODELS = {"updates": "mlp-small", "one step": "linear", "gradients": "linear"}

CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "gaussian": ("updates", {"clip": 2.0, "noise_std": 0.002}, {"epsilon": 1.0}),
    "laplace": ("updates", {"clip": 0.1, "noise_std": 0.002}, {"clip": 0.1, "epsilon": 1.0}),
    "t-noise": ("updates", {"s2": 0.001, "nu": 4.0}, {"s2": 1000.0, "nu": 3.0}),
    "sdq": ("updates", {"bits": 4}, {"bits": 1, "gamma": 60.0}),
    "sdq-lattice": ("updates", {"bits": 4}, {"bits": 1, "gamma": 60.0}),
    "jopeq": ("updates", {"epsilon": 30.0, "bits": 4}, {"epsilon": 0.1}),
    "jopeq-t": ("updates", {"s2": 0.01, "nu": 4.0, "bits": 4}, {"s2": 1000.0, "nu": 3.0}),
    "jopeq-sound": ("updates", {"clip": 0.1, "epsilon": 300.0, "bits": 6}, {"clip": 0.1, "epsilon": 1.0}),
    "cepam-gaussian": ("updates", {"noise_std": 0.002, "dimension": 3}, {"noise_std": 1.0}),
    "cepam-laplace": ("updates", {"noise_scale": 0.002}, {"noise_scale": 1.0}),
    "cepam-clip": ("updates", {"clip": 2.0, "noise_std": 0.002}, {"clip": 2.0, "noise_std": 1.0}),
    "sqsgd": (
        "gradients",
        {"ratio": 1.0, "clip": 1.0, "epsilon": 40_000.0, "bits": 8},
        {"ratio": 1.0, "clip": 2.0, "epsilon": 10.0},
    ),
    "udp": ("one step", {"clip": 10.0, "epsilon": 100.0}, {"clip": 1.0, "epsilon": 0.1}),
    "udp-crd": ("one step", {"clip": 10.0, "epsilon": 100.0}, {"clip": 1.0, "epsilon": 0.1}),
    "udp-lei": ("one step", {"clip": 10.0, "epsilon": 40.0, "rounds": 100}, {"clip": 1.0, "epsilon": 0.1}),
    "ota": ("gradients", {"clip": 2.0, "epsilon": 100.0}, {"clip": 2.0, "epsilon": 0.2}),
    "ota-orthogonal": ("gradients", {"clip": 2.0, "epsilon": 1000.0, "power": 1e6}, {"clip": 2.0, "epsilon": 0.2}),
    "mvu": ("updates", {"clip": 0.1, "epsilon": 10.0, "bits": 4}, {"clip": 0.1, "epsilon": 0.5}),
    "piecewise": ("gradients", {"clip": 0.2, "epsilon": 100_000.0}, {"clip": 0.2, "epsilon": 10.0}),
    "vqsgd": ("gradients", {"clip": 2.0, "repeats": 20_000}, {"clip": 2.0, "epsilon": 1.0}),
    "top-k": ("updates", {"fraction": 0.2, "feedback": True}, {"fraction": 0.0001}),
    "dp-fedavg": ("updates", {"clip": 2.0, "noise_std": 0.02}, {"clip": 2.0, "epsilon": 0.5}),
    "dp-sgd": ("updates", {"clip": 10.0, "noise_std": 0.05}, {"clip": 2.0, "noise_std": 50.0}),
    "laplace+sdq": ("updates", {"clip": 0.1, "noise_std": 0.002, "bits": 8}, {"clip": 0.1, "epsilon": 1.0, "bits": 1}),
    "t-noise+sdq-lattice": ("updates", {"s2": 0.001, "nu": 4.0, "bits": 4}, {"s2": 1000.0, "nu": 3.0, "bits": 1}),
    "gaussian+sdq": ("updates", {"clip": 2.0, "noise_std": 0.002, "bits": 8}, {"epsilon": 1.0, "bits": 1}),
}


class Bench:
    """The data, partitioned once, and the accuracy of each federation without a defense."""

    def __init__(self) -> None:
        loaded = load("mnist", default_root())
        rows = subset(Key(0).child("rows"), len(loaded.train.y), SAMPLES)
        x, y = loaded.train.x[rows], loaded.train.y[rows]
        parts = partition(FEDERATIONS["updates"], y, Key(0).child("partition"))
        self.clients = {k: Examples(x[part], y[part]) for k, part in enumerate(parts)}
        self.test = loaded.test
        self.ceiling = {name: self.accuracy("none", {}, name) for name in FEDERATIONS}

    def accuracy(self, name: str, parameters: dict[str, Any], federation: str) -> float:
        """Test accuracy after the last round."""
        task = ModelTask(build(MODELS[federation], (1, 28, 28), 10))
        defense = registry.build("defense", name, parameters)
        spec = FEDERATIONS[federation]
        engine = choose_engine(task)
        try:
            training = train(task, spec, defense, self.clients, self.test, Key(0), engine=engine, keep=Keep())
        except ValueError as error:
            if "diverged" not in str(error) and "finite" not in str(error):
                raise
            return 0.0  # training failed
        found = training.evaluations[-1].accuracy
        assert found is not None  # a classifier
        return found


def main(names: list[str]) -> int:
    """Print the table; return 1 if a defense does not train as expected."""
    torch.set_num_threads(1)
    bench = Bench()
    print(f"no defense, {ROUNDS} rounds: " + ", ".join(f"{k} {v:.3f}" for k, v in bench.ceiling.items()))
    failed = []
    for name, (federation, mild, harsh) in CASES.items():
        if names and name not in names:
            continue
        most = bench.ceiling[federation]
        found = [bench.accuracy(name, parameters, federation) for parameters in (mild, harsh)]
        right = found[0] >= most - POINTS, found[1] < most - POINTS
        failed += [name] * (not all(right))
        print(f"{name:<20} {federation:<9} none {most:.3f}  mild {found[0]:.3f} {mild}  harsh {found[1]:.3f} {harsh}")
        print(f"{'':<20} {'as expected' if all(right) else 'NOT AS EXPECTED'}", flush=True)
    print(f"{len(failed)} of {len(names or CASES)} not as expected: {', '.join(failed) or 'none'}")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
