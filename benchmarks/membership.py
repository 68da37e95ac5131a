"""Membership from the final model: LiRA, RMIA and the loss, by leave-one-out and in real federations.

Data: the digits, enlarged to 28x28 pixels by bilinear interpolation, with wrong labels for 10 % of all records (members
or not); a dense network 784-64-10. A model trains on 500 of a pool of 1,000 records: SGD with lr 0.05 and momentum 0.9,
30 epochs in batches of 50. The other 797 records are RMIA's population and the attacker's auxiliary data.

Leave-one-out: 66 models on 33 random halves and their complements. The targets are 32 of them, from 32 pairs. Each is
attacked with the first 4, 16 or 63 models of the other pairs. The model of a target's complement is not used as a
shadow of the target, because it depends on the true membership, which no attacker knows (with it, LiRA's AUC with 63
shadows was 0.005 higher). AUC and TPR at 1 % FPR are means over targets, with 500 members and 500 others each. At 0.1 %
FPR, one threshold serves all targets' scores (n/a below 1,000 scored non-members). Intervals are Student's, at 95 %,
over targets. The intervals do not cover the choice of the pool, which all targets share: over four pools, LiRA's AUC
with 4 shadows was 0.653 to 0.668.

Bars, for the means: AUC 0.65 with TPR 0.07 at 1 % FPR from 4 shadows, and AUC 0.65 with TPR 0.10 from 63. Default LiRA
or online RMIA must reach both parts of a bar. The exit code is 1 if a bar is missed.

Federations: one client with 500 records, trained as above, and ten with 50 (30 rounds of two passes, batches of 10, lr
0.1). The attacks use their defaults and the view of the adversary `public`; candidates are 500 members and 500 others.
Mean and interval are over seeds, which share the records but not the members. Seconds are processor seconds, one
thread.

    python benchmarks/membership.py [--seeds N] [--roc FILE.csv]
"""

from __future__ import annotations

import argparse
import csv
import functools
import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, cast

import numpy as np
import numpy.typing as npt
import torch
from membership_traffic import FEDERATION, WRONG, network
from torch import Tensor
from torch.nn.functional import interpolate, logsigmoid

from leakgauge.attacks._members.scores import confidence
from leakgauge.attacks._members.shadowing import Shadowing, halves, outputs, train_shadows
from leakgauge.attacks.lira import LiRA
from leakgauge.attacks.rmia import RMIA
from leakgauge.defenses.none import NoDefense
from leakgauge.harness.core import rng
from leakgauge.harness.core.cell import FederationSpec, Target
from leakgauge.harness.core.contract import Examples, Setting, Task
from leakgauge.harness.core.result import Estimate
from leakgauge.harness.core.rng import Key
from leakgauge.harness.core.stats import auc, mean, roc, tpr_at_fpr
from leakgauge.harness.core.threats import View
from leakgauge.harness.data.embedded import digits
from leakgauge.harness.federation import registry
from leakgauge.harness.federation.loop import Keep, train
from leakgauge.harness.federation.observe import TrainedFederation, observe
from leakgauge.harness.learn.batch import LocalPlan, choose_engine
from leakgauge.harness.learn.partition import partition
from leakgauge.harness.study.score import score_membership

Numbers = npt.NDArray[np.float64]

KEY = Key(0, ("membership",))
POOL, INSIDE, TARGETS, SHADOWS = 1000, 500, 32, (4, 16, 63)
PLAN = LocalPlan(gradient=False, steps=None, epochs=30, batch=50, lr=0.05, momentum=0.9)
FEDERATIONS = {
    "1 client": FederationSpec(
        clients=1, samples=INSIDE, rounds=1, local_epochs=30, batch=50, lr=0.05, momentum=0.9, evaluate_every=1
    ),
    "10 clients": FEDERATION,
}
ATTACKS = ("membership-loss", "shadow-classifier", "rmia", "lira")
LOW, LOWEST = 0.01, 0.001
ROC_POINTS = 200


class Runs(NamedTuple):
    """All models, used as targets or shadows. A model is its number, and a record its place in the pool or after it.

    inside: [runs, pool] bool, records that the model trained on; table: [runs, pool + k, classes], outputs in the pool
    and outside it; y: [pool + k], labels.
    """

    inside: Tensor
    table: Tensor
    y: Tensor

    def outputs(self, model: Tensor, x: Tensor) -> Tensor:
        """As `Task.outputs`: [n, classes] of a model on records x [n]."""
        return self.table[int(model), x]


class Seen(NamedTuple):
    """Input of a statistic: all runs, of which one is the target and some are its shadows."""

    runs: Runs
    target: int
    shadows: list[int]


class Rates(NamedTuple):
    """The mean rates over the targets; `lowest` has no value if too few records are scored."""

    auc: Estimate
    low: Estimate
    lowest: Estimate


class Bar(NamedTuple):
    """AUC and TPR that one of the barred statistics must reach with this number of shadows."""

    shadows: int
    auc: float
    low: float


def _scores(seen: Seen, attack: LiRA | RMIA) -> Tensor:
    """[n]: scores of an attack with these parameters, from trained models."""
    runs, rows = seen.runs, torch.tensor(seen.shadows)
    size, places = runs.inside.shape[1], torch.arange(len(runs.y))
    pool, aside = (Examples(places[part], runs.y[part]) for part in (slice(size), slice(size, None)))
    trained = Shadowing(rows, pool, runs.inside[rows], runs.inside[rows], aside, rows // 2)
    return attack.scores(cast(Task, runs), torch.tensor(seen.target), pool, trained)


def _loss(seen: Seen) -> Tensor:
    size = seen.runs.inside.shape[1]
    return logsigmoid(confidence(seen.runs.table[seen.target, :size], seen.runs.y[:size]))


LOSS = "loss"
STATISTICS: dict[str, Callable[[Seen], Tensor]] = {
    LOSS: _loss,
    "LiRA": functools.partial(_scores, attack=LiRA()),
    "LiRA, no shrinking": functools.partial(_scores, attack=LiRA(shrink=False)),
    "LiRA, per example": functools.partial(_scores, attack=LiRA(variance="per-example", shrink=False)),
    "LiRA, offline": functools.partial(_scores, attack=LiRA(mode="offline")),
    "RMIA": functools.partial(_scores, attack=RMIA()),
    "RMIA, online, 1": functools.partial(_scores, attack=RMIA(temperature=1.0, variant="online", weight=0.5)),
    "RMIA, online, 2": functools.partial(_scores, attack=RMIA(temperature=2.0, variant="online", weight=0.5)),
    "RMIA, offline": functools.partial(_scores, attack=RMIA(mode="offline")),
}
BARRED = ("LiRA", "RMIA")
BARS = (Bar(4, 0.65, 0.07), Bar(63, 0.65, 0.10))


def records(key: Key) -> tuple[Examples, Examples]:
    """The pool, and the rest of the digits; both have the same expected share of wrong labels."""
    loaded = digits(Path())
    x, y = (torch.cat(parts) for parts in zip(loaded.train, loaded.test, strict=True))
    order = torch.from_numpy(rng.permutation(key.child("order"), len(y)))
    x, y = interpolate(x[order], (28, 28), mode="bilinear"), y[order]
    wrong = torch.from_numpy(rng.subset(key.child("wrong"), len(y), round(WRONG * len(y))))
    shift = torch.from_numpy(rng.integers(key.child("shift"), len(wrong), 9))
    y = y.index_put((wrong,), (y[wrong] + 1 + shift) % 10)
    return Examples(x[:POOL], y[:POOL]), Examples(x[POOL:], y[POOL:])


def train_runs(pool: Examples, rest: Examples, key: Key, plan: LocalPlan | None = None) -> Runs:
    """Train one pair of models per target, or as many pairs as the largest number of shadows needs."""
    pairs = max(TARGETS, 1 + -(-max(SHADOWS) // 2))
    inside = halves(key.child("halves"), 2 * pairs, len(pool.y), len(pool.y) // 2)
    task, local = network(), plan or PLAN
    setting = Setting(task.layout, 1, 1, 1, "update", local.steps or 1, local.lr, local.batch, len(pool.y) // 2)
    models = train_shadows(task, setting, local, pool, inside, key.child("train"))
    return Runs(inside, outputs(task, models, torch.cat([pool.x, rest.x])), torch.cat([pool.y, rest.y]))


def others(target: int, count: int, runs: int) -> list[int]:
    """The `count` runs from the pairs that follow the target's own pair cyclically.

    Raises:
        ValueError: there are fewer runs.
    """
    own, pairs = target // 2, runs // 2
    found = [2 * ((own + step) % pairs) + side for step in range(1, pairs) for side in range(2)]
    if count > len(found):
        raise ValueError(f"expected at most {len(found)} shadows of {runs} runs, got {count}")
    return found[:count]


def look(runs: Runs, target: int, count: int) -> Seen:
    """The input of a statistic for one target with `count` shadows."""
    return Seen(runs, target, others(target, count, len(runs.inside)))


def sides(scores: Tensor, members: Tensor) -> tuple[Numbers, Numbers]:
    """Scores of members and of non-members."""
    return scores[members].double().numpy(), scores[~members].double().numpy()


def rates(scored: Sequence[tuple[Numbers, Numbers]]) -> Rates:
    """The rates from scores of members and non-members, one pair per target."""
    areas, low = [auc(*pair).value for pair in scored], [tpr_at_fpr(*pair, LOW).value for pair in scored]
    outside = np.sort(np.concatenate([pair[1] for pair in scored]))[::-1]
    allowed = math.floor(LOWEST * len(outside) + 1e-9)  # as in harness.core.stats.tpr_at_fpr
    over = [float(np.mean(pair[0] > outside[allowed])) if allowed else None for pair in scored]
    named = {"auc": areas, "tpr@1%": low, "tpr@0.1%": over}
    return Rates(*(mean(name, values) for name, values in named.items()))


def text_of(estimate: Estimate, places: int = 3) -> str:
    """A mean with its interval, as text."""
    if estimate.value is None:
        return "n/a"
    if estimate.low is None or estimate.high is None:
        return f"{estimate.value:.{places}f}"
    return f"{estimate.value:.{places}f} ({estimate.low:.{places}f} to {estimate.high:.{places}f})"


def show(name: str, shadows: int, found: Rates) -> None:
    """Print one line."""
    line = f"{text_of(found.auc):25}{text_of(found.low):25}{text_of(found.lowest, 4)}"
    print(f"  {name:20}{shadows:>7}  {line:80}n = {found.auc.n}", flush=True)


def leave_one_out(runs: Runs) -> dict[tuple[str, int], list[tuple[Numbers, Numbers]]]:
    """For each statistic and number of shadows, the scores of each target's members and non-members."""
    scored: dict[tuple[str, int], list[tuple[Numbers, Numbers]]] = {}
    for name, statistic in STATISTICS.items():
        for count in SHADOWS if name != LOSS else (0,):
            seen = ((look(runs, target, count), runs.inside[target]) for target in range(0, 2 * TARGETS, 2))
            scored[name, count] = [sides(statistic(one), members) for one, members in seen]
    return scored


def reaching(found: Mapping[tuple[str, int], Rates], bar: Bar) -> list[str]:
    """The barred statistics whose mean AUC and mean TPR both exist and reach the bar."""
    names = []
    for name in BARRED:
        area, low = found[name, bar.shadows].auc.value, found[name, bar.shadows].low.value
        if area is not None and low is not None and area >= bar.auc and low >= bar.low:
            names.append(name)
    return names


def verdict(found: Mapping[tuple[str, int], Rates]) -> int:
    """Print the bars; return 1 if one is missed."""
    reached = [reaching(found, bar) for bar in BARS]
    for bar, names in zip(BARS, reached, strict=True):
        by = f"reached by {' and '.join(names)}" if names else f"MISSED by {' and '.join(BARRED)}"
        print(f"bar: AUC {bar.auc:g} with TPR {bar.low:g} at 1 %, {bar.shadows} shadows: {by}")
    return int(not all(reached))


def write_roc(path: Path, scored: Mapping[tuple[str, int], Sequence[tuple[Numbers, Numbers]]]) -> None:
    """Write the ROC of all targets' scores together, at logarithmically spaced false-positive rates."""
    with path.open("w", newline="") as file:
        lines = csv.writer(file)
        lines.writerow(("statistic", "shadows", "fpr", "tpr"))
        for (name, shadows), pairs in scored.items():
            members, outside = (np.concatenate(side) for side in zip(*pairs, strict=True))
            curve = roc(members, outside)
            for fpr in np.geomspace(1 / len(outside), 1, ROC_POINTS):
                corner = int(np.searchsorted(curve.fpr, fpr * (1 + 1e-9), side="right")) - 1
                lines.writerow((name, shadows, f"{fpr:.6g}", f"{curve.tpr[corner]:.6g}"))


def federation(spec: FederationSpec, pool: Examples, rest: Examples, key: Key) -> dict[str, list[Estimate]]:
    """AUC and TPR of each attack on one federation, whose partition is drawn from the key."""
    task = network()
    engine = choose_engine(task)
    clients = dict(enumerate(partition(spec, pool.y, key.child("partition"))))
    holdings = {number: Examples(pool.x[rows], pool.y[rows]) for number, rows in clients.items()}
    training = train(task, spec, NoDefense(), holdings, rest, key.child("training"), engine=engine, keep=Keep())
    federation = TrainedFederation(task, spec, NoDefense(), training, pool, rest, clients, engine, key)
    target = Target(kind="members", count=INSIDE, outside=len(pool.y) - INSIDE)
    seen, truth = observe(federation, View.parse("public"), target)
    assert truth.is_member is not None
    found = {}
    for name in ATTACKS:
        scores = registry.build("attack", name, {}).run(seen, key.child("attack", name)).scores
        found[name] = list(score_membership(scores, truth.is_member)[:3])
    return found


def federations(pool: Examples, rest: Examples, seeds: int) -> None:
    """Print the rates of each attack on each federation."""
    for label, spec in FEDERATIONS.items():
        start = time.process_time()
        keys = [KEY.child(label, seed) for seed in range(seeds)]
        every = [federation(spec, pool, rest, key) for key in keys]
        print(f"{label}, {INSIDE} records in all; attacks by their registered names; n: seeds")
        for name in ATTACKS:
            columns = zip(*(found[name] for found in every), strict=True)
            means = [mean(column[0].name, [one.value for one in column]) for column in columns]
            show(name, int(registry.defaults("attack", name).get("shadows") or 0), Rates(*means))
        print(f"  {time.process_time() - start:.1f} s")


def main(arguments: Sequence[str]) -> int:
    """Print the tables and the bars; return 1 if one is missed."""
    torch.set_num_threads(1)
    parser = argparse.ArgumentParser(description="Membership from the final model.")
    parser.add_argument("--seeds", type=int, default=5, help="seeds of the federations; 0: no federations")
    parser.add_argument("--roc", type=Path, help="CSV file for the ROC curves")
    options = parser.parse_args(arguments)
    if options.seeds < 0:
        parser.error(f"expected --seeds >= 0, got {options.seeds}")
    pool, rest = records(KEY.child("records"))
    start = time.process_time()
    runs = train_runs(pool, rest, KEY.child("runs"))
    trained = time.process_time()
    scored = leave_one_out(runs)
    found = {which: rates(pairs) for which, pairs in scored.items()}
    judged = time.process_time()
    right = runs.table[:, : len(pool.y)].argmax(-1) == pool.y
    share = [float(right[side].double().mean()) for side in (runs.inside, ~runs.inside)]
    print(f"{len(runs.inside)} models in {trained - start:.1f} s, scored in {judged - trained:.1f} s")
    print(f"labels predicted: {share[0]:.3f} of members, {share[1]:.3f} of others")
    print(f"  {'':20}{'shadows':>7}  {'AUC':25}{'TPR at 1 %':25}{'TPR at 0.1 %':30}n: targets")
    for (name, count), values in found.items():
        show(name, count, values)
    if options.roc is not None:
        write_roc(options.roc, scored)
    if options.seeds:
        federations(pool, rest, options.seeds)
    return verdict(found)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
