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
(`harness/audit/law_test.py`) reads a few hundred messages. "seen by" is the test with the smallest p-value. Seconds are
processor seconds of one core; they vary with the machine.

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


def honest():
    """The smallest missing share of noise that each shipped defense's test sees."""
    lines = ["## Shipped defenses\n", "| defense | messages | numbers | detects | s |", "|---|---|---|---|---|"]
    for name in registry.classes("defense"):
        start = time.process_time()
        found = check_law(registry.build("defense", name, {}), setting_of(36), Key(3))
        seconds = time.process_time() - start
        if found is None:
            lines.append(f"| {name} | no law is stated | | | |")
            continue
        share = "" if found.detects is None else f"{found.detects:.1%}"
        lines.append(f"| {name} | {found.messages} | {found.numbers} | {share} | {seconds:.2f} |")
    note = (
        '"detects": the smallest share of the noise\'s scale whose absence is seen with 95 % probability; for floats.'
    )
    return [*lines, f"\n{note}\n"]


if __name__ == "__main__":
    torch.set_num_threads(1)
    page = HEAD + "\n".join([*honest(), *table(8.0), *table(1.0)])
    Path(__file__).parents[2].joinpath("docs", "audit-power.md").write_text(page, encoding="utf-8")
