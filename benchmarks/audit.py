"""Audits: how long one takes, and what each defense's finds beside what is claimed and proved.

Milliseconds are the processor's, one thread: of set-up, which is the pilot, and of the audit, which makes 2 N messages
by the real encode path, scores and counts them. Bar: an audit of 300 trials an input in 50 ms after set-up, for the
Laplace mechanism with d = 5. Exit code 1 where it is missed, or where an audit is above what is proved.

    python benchmarks/audit.py [--trials N] [--defense NAME ...] [--repeats N]
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

import torch

from leakgauge.harness.audit.engine import Audited, choose, contradicts, counted, verdict, watcher
from leakgauge.harness.audit.standalone import prepare_audit
from leakgauge.harness.audit.trials import Mechanism
from leakgauge.harness.core.claim import Claim
from leakgauge.harness.core.rng import Key
from leakgauge.harness.federation import registry

KEY = Key(0, ("audit",))
BAR_MS = 50.0
ROUNDS = {"udp": 10, "udp-crd": 10, "udp-lei": 10, "dp-sgd": 3, "dp-fedavg": 10}
"""Of those that promise something for a whole run: shorter than theirs, whose noise is then as much less."""


def timed(
    name: str, parameters: dict[str, Any], setting: dict[str, Any], trials: int
) -> tuple[Claim, Audited, float, float]:
    """The claim, the audit, and ms of set-up with pilot and of the audit proper."""
    asked = prepare_audit(name, parameters, setting, ROUNDS.get(name))
    claim = asked.defense.claim(asked.history, asked.setting)
    mechanism = Mechanism(asked.defense, asked.setting, tuple(asked.history), watcher(claim))
    start = time.process_time()
    way = choose(mechanism, claim, trials, 0.95, KEY)
    middle = time.process_time()
    found = counted(mechanism, claim, way, trials, 0.95, KEY)
    return claim, found, 1e3 * (middle - start), 1e3 * (time.process_time() - middle)


def table(names: Sequence[str], trials: int) -> list[str]:
    """Print every defense; the names of those whose audit is above what is proved."""
    print(f"{trials} trials an input, confidence 0.95, d = 36; milliseconds of the processor")
    print(f"{'':<18}{'unit':<12}{'claimed':>10}{'proved':>11}{'audited':>9}  {'verdict':<17}{'set-up':>9}{'audit':>8}")
    wrong = []
    for name in names:
        claim, found, setup, audit = timed(name, {}, {}, trials)
        proved = claim.proved.epsilon(claim.delta)
        print(
            f"{name:<18}{claim.unit.value:<12}{claim.epsilon:10.4g}{proved:11.4g}{found.epsilon_lower:9.3f}  "
            f"{verdict(claim, found)[0].value:<17}{setup:9.0f}{audit:8.0f}",
            flush=True,
        )
        if contradicts(claim, found):
            wrong.append(name)
    return wrong


def main(arguments: Sequence[str]) -> int:
    """Print the table and the bar; 1 where something is wrong."""
    torch.set_num_threads(1)
    parser = argparse.ArgumentParser(description="Audits of one mechanism.")
    parser.add_argument("--trials", type=int, default=300)
    parser.add_argument("--defense", nargs="*", default=list(registry.classes("defense")))
    parser.add_argument("--repeats", type=int, default=5, help="of the audit that the bar is about")
    told = parser.parse_args(arguments)
    if min(told.trials, told.repeats) < 1:
        parser.error("expected at least 1 trial and repeat")
    wrong = table(told.defense, told.trials)
    ms = [timed("laplace", {"epsilon": 5.0}, {"dim": 5}, 300)[3] for _ in range(told.repeats)]
    took = statistics.median(ms)
    print(f"\nlaplace, d = 5, 300 trials an input: {took:.0f} ms after set-up, with its 600 messages; bar {BAR_MS:g}")
    print(f"audits above what is proved: {', '.join(wrong) or 'none'}")
    return int(bool(wrong) or not took <= BAR_MS)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
