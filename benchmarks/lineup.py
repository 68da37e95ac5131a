"""Which of k people is behind messages whose other records are unknown, several rounds, steps or sums, or large models.

`leakgauge run lineup` has single messages of one record. Each table here is a study of the same attack: `rounds`, fresh
messages of one model; `batches`, the other records unknown; `steps`, five local steps; `mates`, the same beside known
records; `sums` of ten clients, the others unknown; `large`, a ResNet-18 for images of 32 x 32. Prints the
share of records that are named with its 95 % interval, n, and processor seconds for a victim without the training.
Needs `cifar10` (see README).

    python benchmarks/lineup.py [FOLDER] [--only TABLE] [--seeds 0,1]
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from _cells import attacked

from leakgauge.harness.data import default_root
from leakgauge.harness.data.torchvision_shim import classifier
from leakgauge.harness.study.study import resolve

LENET = {"data": "cifar10", "model": "lenet-dlg", "init": "dlg"}
FEDERATION = {"clients": 10, "rounds": 1, "algorithm": "fedsgd", "batch": 0, "samples": 1000, "test_samples": 1000}
STILL = {**FEDERATION, "rounds": 10, "lr": 1e-7}
SMALL = {"clients": 10, "samples": 10, "test_samples": 10}
STEPS = {**FEDERATION, "algorithm": "fedavg", "local_steps": 5, "lr": 0.01}


def residual(channels: int, classes: int) -> torch.nn.Module:
    """ResNet-18 with a first layer for images of 32 x 32."""
    net = classifier("resnet18", classes)
    net.conv1, net.maxpool = torch.nn.Conv2d(channels, 64, 3, 1, 1, bias=False), torch.nn.Identity()
    return net


def table(defenses: list[str], federation: dict[str, Any], *targets: dict[str, Any], **more: Any) -> dict[str, Any]:
    """A study of lineups."""
    each = [{"name": "lineup", "threat": "server+lineup", "target": target, **more} for target in targets]
    return {"federations": [federation], "defenses": [{"name": defenses}], "attacks": each}


TABLES: dict[str, dict[str, Any]] = {
    "rounds": table(["mvu", "piecewise", "vqsgd"], STILL, *({"count": 40, "rounds": rounds} for rounds in (1, 3, 10))),
    "batches": table(["none", "jopeq"], FEDERATION, *({"count": 40, "batch": batch} for batch in (4, 8, 16))),
    "steps": table(
        ["none", "jopeq", "cepam-gaussian"], STEPS, *({"count": 20, "batch": batch, "among": 50} for batch in (1, 4))
    ),
    "mates": table(
        ["none", "jopeq", "cepam-gaussian"],
        STEPS,
        {"count": 40, "batch": 4, "among": 50},
        threat="server+lineup+mates",
    ),
    "sums": table(
        ["none", "laplace", "jopeq", "cepam-gaussian"],
        FEDERATION,
        {"count": 15, "users": 10},
        threat="aggregator+lineup",
    ),
    "large": {
        **table(["none", "gaussian", "jopeq", "cepam-gaussian"], {**FEDERATION, **SMALL}, {"count": 1}),
        "tasks": [{"data": "cifar10", "model": "lineup:residual"}],
    },
}


def main() -> None:
    """Print the tables."""
    torch.set_num_threads(1)
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", nargs="?", type=Path, default=default_root())
    parser.add_argument("--only", default="", help="print only this table")
    parser.add_argument("--seeds", default="0", help="seeds, separated by commas")
    given = parser.parse_args()
    shared = {"seeds": [*map(int, given.seeds.split(","))], "tasks": [LENET], "limit": False, "lineup": False}
    for name, parts in TABLES.items():
        if given.only not in ("", name):
            continue
        study = resolve({"name": name, **shared, **parts}, allow_code=True)
        for cell, found, seconds in attacked(study, given.folder):
            named, target = found["named"], cell.target
            where = f"batch {target.batch}, {target.rounds} rounds, {target.users} users, seed {cell.training.seed}"
            rate = f"{named.value:.3f} [{named.low:.3f}, {named.high:.3f}], n = {named.n}"
            print(f"{name:<8} {cell.training.defense.name:<15} {where:<45} {rate}, {seconds:.1f} s", flush=True)


if __name__ == "__main__":
    main()
