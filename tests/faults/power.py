"""Write docs/audit-power.md: what each fault looks like to the audit, in how many messages and seconds.

python -m tests.faults.power
"""

import time
from collections import Counter
from pathlib import Path

import torch

from leakgauge.harness.audit.law_test import check_law
from leakgauge.harness.core.rng import Key
from leakgauge.harness.federation import registry
from tests.audit_case import setting_of
from tests.faults.library import MISSED, STEPS, faults

HEAD = """# What the audit sees

This page is made by `python -m tests.faults.power`. Each row is a defense that lies: its claim and its stated law are
those of a shipped defense, and its code breaks them in one way (`tests/faults/library.py`). The test of the law
(`harness/audit/law_test.py`) reads a few hundred to a few thousand messages. "seen by" is the test with the smallest
p-value. Seconds are processor seconds of one core; they vary with the machine.

"""


def table(epsilon):
    """The rows of one epsilon, and how many are caught."""
    lines, caught = (
        [f"## Claims of epsilon {epsilon:g}\n", "| kind | fault | seen by | messages | s |", "|---|---|---|---|---|"],
        Counter(),
    )
    for fault in faults(epsilon):
        start = time.process_time()
        found = check_law(fault.liar, setting_of(36, steps=STEPS), Key(3))
        seconds = time.process_time() - start
        seen = (
            found.rejects[0] if found.rejects else f"**not seen**: {MISSED.get((epsilon, fault.name), 'unexplained')}"
        )
        lines.append(f"| {fault.kind} | {fault.name} | {seen} | {found.messages} | {seconds:.2f} |")
        caught[bool(found.rejects)] += 1
    return [*lines, "", f"Caught: {caught[True]} of {caught.total()}.", ""]


SHIPPED = {name: [{}] for name in registry.classes("defense")} | {
    "laplace+sdq": [{}],
    "mvu": [{}, {"epsilon": 1.0}, {"epsilon": 8.0}],
    "vqsgd": [{}, {"epsilon": 1.0}, {"epsilon": 8.0}],
    "sqsgd": [{}, *({"epsilon": e, "ratio": 1.0, "bits": bits} for e in (1.0, 8.0) for bits in (4, 1))],
}
"""Defenses with their parameters."""

NOTE = """"detects": the smallest share of the noise's scale whose absence is seen with 95 % probability. For discrete
laws it is one of 2, 3.5, 5, 10 and 25 %, by the likelihood ratios of honest messages: a channel of epsilon that lacks a
share s of its noise is the channel of epsilon / (1 - s). Empty: no noise, or not even 25 % of it would be missed. With
epsilon 400, the channels of `vqsgd` and `sqsgd` err less than once in 10^17 messages. `sqsgd` chooses a threshold in
whole matches, so that a little more epsilon changes little; and its clip keeps updates off the corners, where its
channel says most: with one bit a coordinate, a message says at most m^2 / 2 nats, where m is the factor by which its
mean shrinks."""


def honest():
    """The smallest missing share of noise that each shipped defense's test sees."""
    lines = ["## Shipped defenses\n", "| defense | messages | numbers | detects | s |", "|---|---|---|---|---|"]
    for name, parameters in ((name, one) for name, each in SHIPPED.items() for one in each):
        start = time.process_time()
        found = check_law(registry.build("defense", name, parameters), setting_of(36), Key(3))
        seconds = time.process_time() - start
        label = " ".join([name, *(f"{key}={value:g}" for key, value in parameters.items())])
        if found is None:
            lines.append(f"| {label} | no law is stated | | | |")
            continue
        share = "" if found.detects is None else f"{found.detects:.1%}"
        lines.append(f"| {label} | {found.messages} | {found.numbers} | {share} | {seconds:.2f} |")
    return [*lines, f"\n{NOTE}\n"]


if __name__ == "__main__":
    torch.set_num_threads(1)
    page = HEAD + "\n".join([*honest(), *table(8.0), *table(1.0)])
    Path(__file__).parents[2].joinpath("docs", "audit-power.md").write_text(page, encoding="utf-8")
