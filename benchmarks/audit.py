"""Time of audits, and each defense's audited bound with the claimed and the proved epsilon.

Times are processor milliseconds on one thread: for set-up, which is the pilot, and for the audit, which makes, scores
and counts 2 N messages through the real encode path. Bar: an audit of the Laplace mechanism with d = 5 and 300 trials
per input takes at most 50 ms after set-up. The exit code is 1 if the bar is missed, or if an audited bound exceeds the
proved epsilon.

    python benchmarks/audit.py [--trials N] [--defense NAME ...] [--repeats N]
    python benchmarks/audit.py default [NAME ...]

The second form runs the default `leakgauge audit` of these defenses; without names, of all defenses and two cascades.
Bar: 10 processor seconds per audit. The exit code is 1 if an audit misses the bar.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

import torch

from leakgauge.harness.audit.claims import DEFAULTS, prepare
from leakgauge.harness.audit.engine import (
    AuditResult,
    adversaries,
    apply_test,
    choose_test,
    contradicts,
    verdict,
)
from leakgauge.harness.audit.standalone import audit
from leakgauge.harness.audit.trials import Mechanism
from leakgauge.harness.core.claim import Claim
from leakgauge.harness.core.rng import Key
from leakgauge.harness.federation import registry

KEY = Key(0, ("audit",))
BAR_MS, BAR_S = 50.0, 10.0
CASCADES = ("gaussian+sdq", "laplace+sdq")
ROUNDS = {"udp": 10, "udp-crd": 10, "udp-lei": 10, "dp-sgd": 3, "dp-fedavg": 10}
"""Rounds for defenses with a claim for a whole run: fewer than their default, and accordingly less noise."""

SMALL = DEFAULTS | {"dim": 36, "clients": 3, "participants": 3, "samples": 20, "steps": 1, "batch": 0, "lr": 0.1}
"""The small federation of an audit by trials."""


def mechanism_of(name: str, parameters: dict[str, Any], setting: dict[str, Any]) -> tuple[Claim, Mechanism]:
    """The claim of a defense in a small federation, and its messages for the first adversary of an audit."""
    deployment = prepare(name, parameters, setting, ROUNDS.get(name), None, SMALL)
    claim = deployment.defense.claim(deployment.history, deployment.setting)
    return claim, Mechanism(deployment, adversaries(claim)[0])


def timed(
    name: str, parameters: dict[str, Any], setting: dict[str, Any], trials: int
) -> tuple[Claim, AuditResult, float, float]:
    """The claim, the audit, milliseconds of set-up with pilot, and milliseconds of the audit itself."""
    claim, mechanism = mechanism_of(name, parameters, setting)
    start = time.process_time()
    test = choose_test(mechanism, claim, trials, 0.95, KEY)
    middle = time.process_time()
    found, _ = apply_test(mechanism, claim, test, trials, 0.95, KEY)
    return claim, found, 1e3 * (middle - start), 1e3 * (time.process_time() - middle)


def table(names: Sequence[str], trials: int) -> list[str]:
    """Print every defense; return the names of defenses whose audited bound exceeds the proved epsilon."""
    print(f"{trials} trials per input, confidence 0.95, d = 36; processor milliseconds")
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


def defaults(names: Sequence[str]) -> int:
    """Print the verdicts of the default audits and their processor seconds; return 1 if one misses the bar."""
    print(f"{'':<18}{'claim':<18}{'code':<15}{'seconds':>7}")
    seconds = {}
    for name in names:
        start = time.process_time()
        found = audit(name, {}, {}, None, seed=0)
        seconds[name] = time.process_time() - start
        print(f"{name:<18}{found['verdict']:<18}{found['audited']['verdict']:<15}{seconds[name]:7.2f}", flush=True)
    slowest = max(seconds, key=seconds.__getitem__)
    print(f"\nslowest: {slowest}, {seconds[slowest]:.2f} processor seconds; bar {BAR_S:g}")
    return int(not seconds[slowest] <= BAR_S)


def main(arguments: Sequence[str]) -> int:
    """Print the table and the bar; return 1 if the bar is missed or a bound exceeds the proved epsilon."""
    torch.set_num_threads(1)
    known = list(registry.classes("defense"))
    if arguments[:1] == ["default"]:
        return defaults(arguments[1:] or [*known, *CASCADES])
    parser = argparse.ArgumentParser(description="Audits of one mechanism.")
    parser.add_argument("--trials", type=int, default=300)
    parser.add_argument("--defense", nargs="*", default=known)
    parser.add_argument("--repeats", type=int, default=5, help="repeats of the timed audit")
    options = parser.parse_args(arguments)
    if min(options.trials, options.repeats) < 1:
        parser.error("expected at least 1 trial and repeat")
    wrong = table(options.defense, options.trials)
    ms = [timed("laplace", {"epsilon": 5.0}, {"dim": 5}, 300)[3] for _ in range(options.repeats)]
    took = statistics.median(ms)
    print(f"\nlaplace, d = 5, 300 trials per input: {took:.0f} ms after set-up, with its 600 messages; bar {BAR_MS:g}")
    print(f"audited bounds above the proved epsilon: {', '.join(wrong) or 'none'}")
    return int(bool(wrong) or not took <= BAR_MS)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
