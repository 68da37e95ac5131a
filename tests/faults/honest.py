"""Write docs/audit-honest.md: audits of the shipped defenses, how tight they are, and how often they err.

python -m tests.faults.honest [SEEDS]    (40 seeds: one to three hours on two cores)
"""

import math
import statistics
import sys
import time
from collections import defaultdict
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import torch

from leakgauge.harness.audit import standalone
from leakgauge.harness.core.stats import clopper_pearson
from leakgauge.harness.federation import registry

HEAD = """# Audits of the shipped defenses

This page is made by `python -m tests.faults.honest {seeds}`: `leakgauge audit NAME` with the seeds 0 to {last}. Nothing
lies here, so each CONTRADICTED is an error. "audited" is the median of the lower bounds at confidence 0.95, and "of
proved" its share of the proved epsilon, with what the bound assumes. "s" is the longest time of one core; it varies
with the machine.

| audit | unit | proved | audited | of proved | assuming | contradicted | s |
|---|---|---|---|---|---|---|---|
"""

CASCADES = ("laplace+sdq", "gaussian+sdq-lattice")
STEPS = ("dp-sgd --setting steps=2", "dp-sgd --setting steps=4", "dp-sgd --setting steps=8")
LARGE = ("sqsgd --setting dim=25818",)


def audited(case):
    """One audit: its command, the rows of its bounds, its verdict and its processor seconds."""
    command, seed = case
    name, *words = command.split()
    setting = {key: int(value) for key, value in (word.split("=") for word in words[1::2])}
    start = time.process_time()
    found = standalone.audit(name, {}, setting, None, seed=seed)
    row, seconds = found["audited"], time.process_time() - start
    bounds = [(row["unit"], row["assumes"], found["proved"]["epsilon"], row["epsilon_lower"])]
    bounds += [(one["unit"], one["assumes"], one["proved"], one["epsilon_lower"]) for one in row["assuming"]]
    return command, bounds, row["verdict"], seconds


def table(audits):
    """The lines of the page, and how many audits of how many erred."""
    bounds, verdicts, longest = defaultdict(list), defaultdict(list), defaultdict(float)
    for command, rows, verdict, seconds in audits:
        verdicts[command].append(verdict)
        longest[command] = max(longest[command], seconds)
        for index, (*what, lower) in enumerate(rows):
            bounds[command, index, *what].append(lower)
    lines = []
    for (command, index, unit, assumes, proved), found in sorted(bounds.items(), key=lambda item: item[0][:2]):
        lower = statistics.median(found)
        share = "" if math.isinf(float(proved)) or not proved else f"{lower / proved:.2f}"
        errors = verdicts[command].count("CONTRADICTED")
        end = " | " if index else f"{errors} of {len(verdicts[command])} | {longest[command]:.1f}"
        lines.append(f"| `{command}` | {unit} | {float(proved):.4g} | {lower:.4g} | {share} | {assumes} | {end} |")
    return lines, sum(found.count("CONTRADICTED") for found in verdicts.values()), len(audits)


def main(seeds):
    """Audit with each seed in turn, and write the page after each: it can be stopped, and says how many there were."""
    commands, audits = [*registry.classes("defense"), *CASCADES, *STEPS, *LARGE], []
    page = Path(__file__).parents[2] / "docs" / "audit-honest.md"
    with ProcessPoolExecutor(2, get_context("spawn"), torch.set_num_threads, (1,)) as pool:
        for seed in range(seeds):
            audits += pool.map(audited, [(command, seed) for command in commands])
            lines, errors, number = table(audits)
            interval = clopper_pearson(errors, number, 0.95)
            end = f"\n\nCONTRADICTED: {errors} of {number} ({interval.low:.2%} to {interval.high:.2%}).\n"
            page.write_text(HEAD.format(seeds=seed + 1, last=seed) + "\n".join(lines) + end, encoding="utf-8")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 40)
