"""RMIA with the temperature and the variant that its shadows choose, beside fixed ones, on many pools.

Digits: as in `membership.py`, but with 40 epochs. Fashion-MNIST: a pool of 4,000 training records with their own
labels, and 28 epochs. With these numbers of epochs, RMIA with temperature 1 is as good as in the comparison with
another project that the bars are from. That project's online RMIA is `peer`: temperature 2, and the share of 797 or
1,000 other records whose ratio is less than half of the record's.

Each pool has 66 models, of which 32 are targets, as in `membership.py`. Rates of a pool are means over its targets;
printed are means over pools, with Student's interval at 95 %. The exit code is 1 if a mean of the default misses a bar.

    python benchmarks/membership_pools.py digits|fashion_mnist FIRST_SEED LAST_SEED [FOLDER OF DATA]
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Sequence
from pathlib import Path

import membership
import torch
from membership import Runs, Seen, _scores
from torch import Tensor

from leakgauge.attacks._members.scores import confidence
from leakgauge.attacks.rmia import RMIA
from leakgauge.harness.core import rng
from leakgauge.harness.core.contract import Examples
from leakgauge.harness.core.rng import Key
from leakgauge.harness.core.stats import auc, mean, tpr_at_fpr
from leakgauge.harness.data import load

EPOCHS = {"digits": 40, "fashion_mnist": 28}
BARS = {"digits": {4: (0.680, 0.095), 16: (0.688, 0.106)}, "fashion_mnist": {4: (0.649, 0.048), 16: (0.658, 0.060)}}
ATTACKS = {
    "default": RMIA(),
    "online, 1": RMIA(temperature=1.0, variant="online", weight=0.5),
    "online, 2": RMIA(temperature=2.0, variant="online", weight=0.5),
    "offline, 1": RMIA(temperature=1.0, variant="offline"),
}


def peer(seen: Seen) -> Tensor:
    """[n]: the number of other records whose ratio is less than half of the record's."""
    p = confidence(seen.runs.table / 2.0, seen.runs.y).sigmoid()
    ratio = p[seen.target] / (p[seen.shadows].mean(0) + 1e-6)
    pool, aside = ratio.split([seen.runs.inside.shape[1], len(ratio) - seen.runs.inside.shape[1]])
    return torch.searchsorted(2 * aside.sort().values, pool)


def records(data: str, folder: Path, key: Key) -> tuple[Examples, Examples]:
    """A pool and other records."""
    if data == "digits":
        return membership.records(key)
    x, y = load(data, folder).train
    order = torch.from_numpy(rng.permutation(key.child("order"), len(y)))
    pool, rest = order[:4000], order[4000:5000]
    return Examples(x[pool], y[pool]), Examples(x[rest], y[rest])


def rates(runs: Runs, count: int) -> dict[str, tuple[float, float]]:
    """Of each attack, the mean AUC and TPR at 1 % over the targets."""
    found = {}
    for name in [*ATTACKS, "peer"]:
        statistic = functools.partial(_scores, attack=ATTACKS[name]) if name in ATTACKS else peer
        targets = range(0, 2 * membership.TARGETS, 2)
        scored = [
            membership.sides(statistic(membership.look(runs, target, count)), runs.inside[target]) for target in targets
        ]
        areas = [auc(*pair).value or 0.0 for pair in scored]
        low = [tpr_at_fpr(*pair, 0.01).value or 0.0 for pair in scored]
        found[name] = sum(areas) / len(areas), sum(low) / len(low)
    return found


def main(arguments: Sequence[str]) -> int:
    """Print the rates; return 1 if a bar is missed."""
    torch.set_num_threads(1)
    data, first, last, *folder = arguments
    plan = dataclasses.replace(membership.PLAN, epochs=EPOCHS[data])
    found: dict[tuple[int, str], list[tuple[float, float]]] = {}
    for seed in range(int(first), int(last) + 1):
        key = Key(seed, ("membership",))
        pool, rest = records(data, Path(*folder), key.child("records"))
        runs = membership.train_runs(pool, rest, key.child("runs"), plan)
        for count in BARS[data]:
            for name, pair in rates(runs, count).items():
                found.setdefault((count, name), []).append(pair)
    missed = False
    for (count, name), pairs in found.items():
        area, low = (
            mean(kind, list(column)) for kind, column in zip(("auc", "tpr"), zip(*pairs, strict=True), strict=True)
        )
        line = f"{count:>3} {name:12}{membership.text_of(area, 4):28}{membership.text_of(low, 4):28}n = {area.n}"
        bars = BARS[data][count]
        if name == "default":
            short = (area.value or 0.0) < bars[0] or (low.value or 0.0) < bars[1]
            missed |= short
            line += f"  bar {bars[0]} / {bars[1]}: {'MISSED' if short else 'reached'}"
        print(line)
    return int(missed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
