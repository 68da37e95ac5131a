"""A malicious server, from the broadcast to the score, on images that were not used for any choice.

Each table is a study: `trap-weights` in one round and over twenty (CIFAR-10, the LeNet of DLG), `imprint` in batches of
32 (CIFAR-10, `mlp`), `quantile-biases` in batches of 8 and 16, and `active-membership` in one round with clients of 8
records (MNIST, `mlp-small`), compared with the floor or an honest server; `norm` is `active-membership` from only the
numbers that are sent in the clear. `steps` is the same with two and five local steps, and with `model-replacement` by
an active participant, who sends its update or bytes of its own choice. Prints the value with its 95 % interval, n, and
the share of clients that notice. Needs `cifar10` and `mnist` (see README); a part of them suffices.

    python benchmarks/malicious.py [FOLDER] [--only TABLE] [--seeds 11,12]
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

from leakgauge.harness.core.metrics import RECOGNIZABLE
from leakgauge.harness.data import default_root
from leakgauge.harness.study.run import run_study
from leakgauge.harness.study.study import resolve

FEDERATION = {"clients": 20, "algorithm": "fedsgd", "batch": 0, "lr": 0.1, "evaluate_every": 20, "test_samples": 2000}


def probe(count: int, **target: Any) -> dict[str, Any]:
    """A target of fresh victims."""
    return {"kind": "probe", "round": 0, "count": count, **target}


ONE, TWENTY, BATCH = probe(16), probe(16, rounds=20), probe(8, batch=32)
MEMBERS = {"kind": "members", "round": 0, "count": 32}
AFTER_ONE = {"kind": "members", "round": 1, "count": 40, "outside": 200}
CLIENTS_OF_EIGHT = {
    "tasks": [{"data": "mnist", "model": "mlp-small"}],
    "federations": [{**FEDERATION, "rounds": 1, "samples": 160}],
}
TABLES: dict[str, dict[str, Any]] = {
    "trap-weights": {
        "tasks": [{"data": "cifar10", "model": "lenet-dlg", "init": "dlg"}],
        "federations": [{**FEDERATION, "rounds": 20, "samples": 400}],
        "defenses": [{"name": ["none", "jopeq", "cepam-gaussian"]}],
        "attacks": [
            {"name": "prior", "target": ONE},
            {"name": "map", "threat": "server", "target": ONE},
            {"name": "trap-weights", "target": ONE},
            {"name": "trap-weights", "evaluations": 800, "target": TWENTY},
        ],
    },
    "imprint": {
        "tasks": [{"data": "cifar10", "model": "mlp"}],
        "federations": [{**FEDERATION, "rounds": 1, "samples": 640}],
        "defenses": [{"name": "none"}],
        "attacks": [{"name": "prior", "target": BATCH}, {"name": "imprint", "target": BATCH}],
    },
    "quantile-biases": {
        "tasks": [{"data": ["cifar10", "mnist"], "model": ["mlp-small", "lenet5"]}],
        "federations": [{**FEDERATION, "rounds": 1, "samples": 320}],
        "defenses": [{"name": "none"}],
        "attacks": [
            {**attack, "target": probe(4, batch=batch)}
            for batch in (8, 16)
            for attack in (
                {"name": "prior"},
                {"name": "map", "threat": "server"},
                {"name": "quantile-biases", "batch": batch},
            )
        ],
    },
    "active-membership": {
        **CLIENTS_OF_EIGHT,
        "defenses": [{"name": ["none", "jopeq", "cepam-gaussian", "sqsgd"]}, {"name": "gaussian", "epsilon": 8.0}],
        "attacks": [
            {"name": "membership-cosine", "statistic": "likelihood", "threat": "server", "target": MEMBERS},
            {"name": "active-membership", "target": MEMBERS},
        ],
    },
    "norm": {
        **CLIENTS_OF_EIGHT,
        "defenses": [{"name": ["jopeq", "cepam-gaussian"]}],
        "attacks": [
            {"name": "membership-cosine", "statistic": "norm", "threat": "server", "target": MEMBERS},
            {"name": "active-membership", "statistic": "norm", "target": MEMBERS},
        ],
    },
    "steps": {
        "tasks": [{"data": "mnist", "model": "mlp-small"}],
        "federations": [
            {"clients": 10, "rounds": 2, "samples": 300, "test_samples": 500, **steps}
            for steps in ({"local_steps": 2, "batch": 0, "lr": 0.05}, {"local_steps": 5, "batch": 10, "lr": 0.2})
        ],
        "defenses": [
            {"name": ["none", "jopeq", "sdq", "t-noise", "cepam-gaussian", "top-k", "dp-fedavg"]},
            {"name": "gaussian", "epsilon": 8.0},
            {"name": "laplace", "epsilon": 1e5},
        ],
        "attacks": [
            {"name": "active-membership", "target": AFTER_ONE},
            {"name": "model-replacement", "threat": "participant+craft", "target": AFTER_ONE},
            {"name": "model-replacement", "forges": True, "threat": "participant+craft", "target": AFTER_ONE},
            {"name": "loss-trajectory", "threat": "participant", "target": AFTER_ONE},
        ],
    },
}


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", nargs="?", type=Path, default=default_root())
    parser.add_argument("--only", default="", help="print only this table")
    parser.add_argument("--seeds", default="11", help="seeds, separated by commas")
    given = parser.parse_args()
    shared = {"seeds": [*map(int, given.seeds.split(","))], "threats": ["malicious-server"], "limit": False}
    for name, table in TABLES.items():
        if given.only in ("", name):
            study = resolve({"name": name, **shared, **table})
            with tempfile.TemporaryDirectory() as folder:
                run = run_study(study, folder, data=given.folder)
            for cell in study.cells:
                result = run.results[cell.id]
                found = {one.name: one for one in result.estimates}
                main = found["ssim" if "ssim" in found else "auc"]
                above = sum((value or 0.0) >= RECOGNIZABLE for value in main.values)
                line = [f"{main.value:.3f} [{main.low:.3f}, {main.high:.3f}]", f"n = {main.n}"]
                line += [f"{above}/{main.n} above {RECOGNIZABLE}"] if main.name == "ssim" else []
                line += [f"noticed by {found['detectable'].value:.0%}"] if "detectable" in found else []
                task, target = cell.training.task, cell.target
                where = f"{cell.attack.key}, {target.rounds or 1} rounds, seed {cell.training.seed}"
                steps = cell.training.federation.local_steps or 1
                where = f"{task.data}, {task.model}, batch {target.batch}, {steps} steps, {where}"
                print(f"{cell.training.defense.name:<15} {where:<70} {', '.join(line)}", flush=True)


if __name__ == "__main__":
    main()
