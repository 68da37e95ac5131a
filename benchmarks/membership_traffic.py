"""Membership inference by a server from each client's messages, by defense and statistic.

Ten clients with 50 digits each, enlarged to 28x28 pixels by bilinear interpolation, with wrong labels for 10 % of all
records (members or not); a dense network 784-64-10 (d = 50,890), 30 rounds of two local passes, batches of 10, lr 0.1.
The runs have no defense, or normal noise of 0.05 C per coordinate with C = 1, about twice the norm of an update. Each
client is attacked once: its 50 records against the same 700 records that no client holds. Prints the mean AUC and the
mean TPR at 1 % FPR over clients and seeds, with Student's 95 % interval over these 30 values. The clients of a seed
share the model and the 700 records, so the interval is slightly too narrow. `anybody`: no client is named, and all 500
members are scored with the largest evidence over the clients; `sum`: the server sees only the mean of the messages.
These rows have one value per seed.

`likelihood` is that of `membership-cosine`, which reads all messages anew: about five minutes a seed.

The bars are a mean AUC of 0.69 and a mean TPR of 0.09 without a defense, for `likelihood` and for FedMIA with a
pooled variance. The exit code is 1 if one of the two misses a bar, or if the loss of the final model has at least the
same AUC.

    python benchmarks/membership_traffic.py [SEEDS [FIRST]]
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import interpolate

from leakgauge.attacks._members.presence import presence
from leakgauge.attacks._members.traffic import Traffic, over_rounds, read
from leakgauge.attacks.fedmia import FedMIA
from leakgauge.attacks.membership_cosine import MembershipCosine
from leakgauge.attacks.membership_loss import MembershipLoss
from leakgauge.attacks.membership_sum import MembershipSum
from leakgauge.defenses.gaussian import Gaussian
from leakgauge.defenses.none import NoDefense
from leakgauge.harness.core import rng
from leakgauge.harness.core.cell import FederationSpec, Target
from leakgauge.harness.core.contract import Defense, Examples, Observation
from leakgauge.harness.core.rng import Key
from leakgauge.harness.core.stats import auc, mean, tpr_at_fpr
from leakgauge.harness.core.threats import View
from leakgauge.harness.data.embedded import digits
from leakgauge.harness.federation.loop import Keep, train
from leakgauge.harness.federation.observe import TrainedFederation, observe
from leakgauge.harness.learn.batch import choose_engine
from leakgauge.harness.learn.layers import dense_stack
from leakgauge.harness.learn.models import Model
from leakgauge.harness.learn.partition import partition
from leakgauge.harness.learn.structure import Structure
from leakgauge.harness.learn.tasks import ModelTask

CLIENTS, OUTSIDE, WRONG = 10, 700, 0.1
FEDERATION = FederationSpec(
    clients=CLIENTS, samples=500, rounds=30, local_epochs=2, batch=10, lr=0.1, evaluate_every=30
)
DEFENSES: dict[str, Defense[Any, Any]] = {
    "no defense": NoDefense(),
    "noise 0.05 C": Gaussian(clip=1.0, noise_std=0.05),
}
SINGLE: dict[str, MembershipCosine | FedMIA] = {
    "cosine": MembershipCosine(),
    "difference": MembershipCosine("difference"),
    "FedMIA, Phi": FedMIA(pooled=False),
    "FedMIA, pooled": FedMIA(),
}
BARRED, FLOOR = ("likelihood", "FedMIA, pooled"), "loss of the final model"
LEAST_AUC, LEAST_TPR = 0.69, 0.09


class Rates(NamedTuple):
    """Rates of one set of members against the 700 non-members."""

    auc: float
    tpr: float


class Observed(NamedTuple):
    """The server's observation, and the owner of each candidate [1200]; -1: no client."""

    seen: Observation
    owner: Tensor


def network() -> ModelTask:
    """Dense 784-64-10 with ReLU."""
    widths = (784, 64, 10)
    return ModelTask(Model("mlp-64", Structure(tuple(dense_stack(widths))), (1, 28, 28), 10))


def records(key: Key) -> tuple[Examples, Examples]:
    """Training records with some wrong labels, and test records."""
    loaded = digits(Path())
    (x, y), test = ((interpolate(part.x, (28, 28), mode="bilinear"), part.y) for part in (loaded.train, loaded.test))
    chosen = torch.from_numpy(rng.subset(key.child("rows"), len(y), round(WRONG * len(y))))
    shift = torch.from_numpy(rng.integers(key.child("labels"), len(chosen), 9))
    return Examples(x, y.index_put((chosen,), (y[chosen] + 1 + shift) % 10)), Examples(*test)


def watch(defense: Defense[Any, Any], key: Key) -> Observed:
    """Train a federation, and observe every round."""
    task, (inside, test) = network(), records(key.child("data"))
    clients = dict(enumerate(partition(FEDERATION, inside.y, key.child("partition"))))
    holdings = {k: Examples(inside.x[rows], inside.y[rows]) for k, rows in clients.items()}
    every, engine = frozenset(range(FEDERATION.rounds)), choose_engine(task)
    keep = Keep(every, every)
    training = train(task, FEDERATION, defense, holdings, test, key.child("training"), engine=engine, keep=keep)
    federation = TrainedFederation(task, FEDERATION, defense, training, inside, test, clients, engine, key)
    target = Target(kind="members", round=0, rounds=FEDERATION.rounds, count=500, outside=OUTSIDE)
    seen, truth = observe(federation, View.parse("server"), target)
    assert seen.candidates is not None
    assert truth.is_member is not None
    held = {k: data.x.flatten(1) for k, data in holdings.items()}
    owner = torch.full((len(truth.is_member),), -1)
    for row in truth.is_member.nonzero().flatten().tolist():
        image = seen.candidates.x[row].flatten()
        owner[row] = next(k for k, images in held.items() if bool((images == image).all(dim=1).any()))
    return Observed(seen, owner)


def rates(scores: Tensor, members: Tensor) -> Rates:
    """The rates of scores [n] with known members [n]."""
    sides = np.asarray(scores[members], np.float64), np.asarray(scores[~members], np.float64)
    area, found = auc(*sides).value, tpr_at_fpr(*sides, 0.01).value
    assert area is not None
    assert found is not None
    return Rates(area, found)


def only(rounds: Sequence[Traffic], rows: Tensor) -> list[Traffic]:
    """The same rounds, restricted to some of the candidates."""
    return [
        dataclasses.replace(one, products=one.products[:, rows], gradient_norm=one.gradient_norm[rows])
        for one in rounds
    ]


def measure(observed: Observed) -> dict[str, list[Rates]]:
    """The rates of each statistic: one per client, or a single one."""
    seen, owner = observed
    rounds, loss = list(read(seen)), MembershipLoss().run(seen, Key(0)).scores
    found: dict[str, list[Rates]] = {name: [] for name in ("cosine, last round", *SINGLE, FLOOR)}
    evidence = list(presence(seen, Key(0)))
    found["likelihood"] = []
    for client in range(CLIENTS):
        rows = (owner == client) | (owner < 0)
        own, members = only(rounds, rows), owner[rows] == client
        found["cosine, last round"].append(rates(SINGLE["cosine"].judge(own[-1:], client).scores, members))
        for name, attack in SINGLE.items():
            found[name].append(rates(attack.judge(own, client).scores, members))
        found["likelihood"].append(rates(over_rounds(evidence, client).scores[rows], members))
        found[FLOOR].append(rates(loss[rows], members))
    for name, attack in SINGLE.items():
        found[f"anybody: {name}"] = [rates(attack.judge(rounds, None).scores, owner >= 0)]
    found["anybody: likelihood"] = [rates(over_rounds(evidence, None).scores, owner >= 0)]
    found["sum: cosine"] = [rates(MembershipSum().judge(list(read(seen, together=True))).scores, owner >= 0)]
    return found


def show(name: str, values: Sequence[Rates]) -> Rates:
    """Print one line; return the means."""
    parts, means = [], []
    for label, column in zip(Rates._fields, zip(*values, strict=True), strict=True):
        estimate = mean(label, column)
        assert estimate.value is not None
        ends = "" if estimate.low is None or estimate.high is None else f" ({estimate.low:.3f} to {estimate.high:.3f})"
        parts.append(f"{estimate.value:.3f}{ends:18s}")
        means.append(estimate.value)
    print(f"  {name:26s} AUC {parts[0]}  TPR at 1 % {parts[1]} n = {len(values)}", flush=True)
    return Rates(*means)


def run(label: str, defense: Defense[Any, Any], seeds: range) -> dict[str, Rates]:
    """Run all seeds of one defense; return the means by statistic."""
    print(f"{label}, {len(seeds)} seeds from {seeds.start} on")
    every = [measure(watch(defense, Key(seed))) for seed in seeds]
    return {name: show(name, [value for found in every for value in found[name]]) for name in every[0]}


def main(seeds: int, first: int = 0) -> int:
    """Run all defenses; return the exit code."""
    torch.set_num_threads(1)
    plain, *_ = [run(label, defense, range(first, first + seeds)) for label, defense in DEFENSES.items()]
    missed = [name for name in BARRED if plain[name].auc < LEAST_AUC or plain[name].tpr < LEAST_TPR]
    missed += [name for name in BARRED if plain[name].auc <= plain[FLOOR].auc]
    print(f"bars: AUC {LEAST_AUC} and TPR at 1 % {LEAST_TPR}: " + (f"missed by {missed}" if missed else "met"))
    return int(bool(missed))


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:]) if len(sys.argv) > 1 else (3,)))
