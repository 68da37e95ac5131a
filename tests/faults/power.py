"""Write docs/audit-power.md: what each fault looks like to the audit, in how many messages and seconds.

python -m tests.faults.power            write the page
python -m tests.faults.power shipped    renew its first table only
"""

import itertools
import sys
import time
from collections import Counter
from pathlib import Path

import torch

from leakgauge.harness.audit.goodness_of_fit import check_fit
from leakgauge.harness.audit.keys import check_keys
from leakgauge.harness.audit.stated import check_stated
from leakgauge.harness.core.rng import Key
from leakgauge.harness.federation import registry
from tests.audit_case import setting_of
from tests.faults import best
from tests.faults.library import MISSED, STEPS, faults, lying
from tests.test_keys import ADDITIVE, DISCRETE, DISCRETE_NAMES
from tests.test_stated import FALSE

HEAD = """# What the audit sees

This page is made by `python -m tests.faults.power`. Each row is a defense that lies: its claim and its stated
distribution are those of a shipped defense, and its code breaks them in one way (`tests/faults/library.py`). The
goodness-of-fit test (`harness/audit/goodness_of_fit.py`) reads a few hundred to a few thousand messages. "seen by" is
the test with the smallest p-value. Seconds are processor seconds of one core; they vary with the machine.

"""


FAULTY = "## Claims of epsilon "
"""What the headings of the other tables begin with."""


def table(epsilon):
    """The rows of one epsilon, and how many are caught."""
    lines, caught = (
        [f"{FAULTY}{epsilon:g}\n", "| kind | fault | seen by | messages | s |", "|---|---|---|---|---|"],
        Counter(),
    )
    for fault in faults(epsilon):
        start = time.process_time()
        found = check_fit(fault.liar, setting_of(36, steps=STEPS), Key(3))
        seconds = time.process_time() - start
        why = MISSED.get((epsilon, fault.name), lambda: "unexplained")
        seen = found.rejects[0] if found.rejects else f"**not seen**: {why()}"
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
distributions it is one of 2, 3.5, 5, 10 and 25 %, by the likelihood ratios of honest messages: a channel of epsilon
that lacks a share s of its noise is the channel of epsilon / (1 - s). Empty: no noise.

"no test": this battery would miss even 25 %, and any other 5 %. A test that rejects honest messages with
probability 0.001 at most and sees 5 % less noise with probability 0.95 reads at least so many messages, whatever it
computes: their number times the divergence of one message is at least that of these two probabilities
(`tests/faults/best.py`). It knows the update, which is the one that says most, in messages of any power of two up to
1024 sent coordinates. This is why:

- `vqsgd` at epsilon 400 replaces a point by another with a chance below 10^-170.
- `sqsgd` chooses a threshold in whole matches, so that a little more epsilon changes the chance of a branch only: at
  epsilon 1, from 0.525 to 0.526. Where the threshold changes, messages have so many coordinates that the clip keeps
  updates off the corners. With one bit a coordinate, rounding to signs then hides nearly all of the update; of such
  messages, the number is for updates with k equal coordinates and zeros, for the best power of two k.

At epsilon 400, `sqsgd` sends 32 levels of the first updates as they are, whatever its noise; the share is seen in
messages of 256 levels."""


def least(name, parameters):
    """What any test needs to see 5 % less noise, for the defenses that have some and whose own test does not see it."""
    epsilon, bits = parameters.get("epsilon", 400.0), parameters.get("bits", 4)
    nats = {"sqsgd": lambda: best.sqsgd(epsilon, epsilon / 0.95, bits)}
    nats["vqsgd"] = lambda: best.vqsgd(epsilon, epsilon / 0.95, 2 * 10**6, 113)
    return f"5 %: no test below {best.messages(nats[name]()):.1e} messages" if name in nats else ""


def honest():
    """The smallest missing share of noise that each shipped defense's test sees."""
    lines = ["## Shipped defenses\n", "| defense | messages | numbers | detects | s |", "|---|---|---|---|---|"]
    for name, parameters in ((name, one) for name, each in SHIPPED.items() for one in each):
        start = time.process_time()
        found = check_fit(registry.build("defense", name, parameters), setting_of(36), Key(3))
        seconds = time.process_time() - start
        label = " ".join([name, *(f"{key}={value:g}" for key, value in parameters.items())])
        if found is None:
            lines.append(f"| {label} | no distribution is stated | | | |")
            continue
        share = least(name, parameters) if found.detects is None else f"{found.detects:.1%}"
        lines.append(f"| {label} | {found.messages} | {found.numbers} | {share} | {seconds:.2f} |")
    return [*lines, f"\n{NOTE}\n"]


RARE = """## What no test of these messages sees

A fault in a share r of messages, or of clients, or of rounds, is in none of n messages with probability (1 - r)^n: it
takes 4.6 / r messages to hold one with probability 0.99. The key check reads 120 to 302 messages at chosen sizes, and
the goodness-of-fit test 200 to 2,800: an audit states both numbers and the range. A message that holds a fault need not
show it: the divergence of one message bounds what any test sees, as in the first table. A fault that waits for a
condition outside the stated range, as for a round above the last, is not seen.

"""


def keys_table():
    """The faults of secrets, sizes and bytes, and what the key check says of them."""
    lines = [
        "## Secrets, sizes and bytes\n",
        "The key check reads messages with chosen keys, updates, sizes and rounds.\n",
    ]
    lines += ["| mechanism | epsilon | fault | the key check | messages | s |", "|---|---|---|---|---|---|"]
    caught = Counter()
    rows = [("gaussian", ADDITIVE), ("laplace", ADDITIVE), *((name, DISCRETE) for name in DISCRETE_NAMES)]
    for name, table in rows:
        for epsilon, fault in itertools.product((8.0, 1.0), table):
            liar, start = (
                lying(registry.build("defense", name, {"epsilon": epsilon}), table[fault]),
                time.process_time(),
            )
            try:
                found = check_keys(liar, setting_of(36), Key(3))
            except ValueError:  # this defense has no such epsilon
                continue
            seconds = time.process_time() - start
            said = found.faults[0] if found.faults else "**not seen**"
            lines.append(f"| {name} | {epsilon:g} | {fault} | {said} | {found.messages} | {seconds:.2f} |")
            caught[bool(found.faults)] += 1
    return [*lines, "", f"Caught: {caught[True]} of {caught.total()}.", ""]


def proofs_table():
    """False proofs, and what the stated distribution says of them without a message."""
    lines = ["## Proofs\n", "The code keeps to the stated distribution, and the proof is false. It takes no message.\n"]
    lines += ["| epsilon | false proof | the audit |", "|---|---|---|"]
    for epsilon, name in itertools.product((8.0, 1.0), FALSE):
        faults = check_stated(FALSE[name](epsilon), setting_of(36), Key(3)).faults
        lines.append(f"| {epsilon:g} | {name} | {faults[0] if faults else '**not seen**'} |")
    return [*lines, ""]


if __name__ == "__main__":
    torch.set_num_threads(1)
    where, first = Path(__file__).parents[2] / "docs" / "audit-power.md", "\n".join(honest())
    if sys.argv[1:] == ["shipped"]:
        rest = FAULTY + where.read_text("utf-8").partition(FAULTY)[2]
    else:
        rest = "\n".join([*table(8.0), *table(1.0), *keys_table(), *proofs_table(), RARE.strip(), ""])
    where.write_text(f"{HEAD}{first}\n{rest}", encoding="utf-8")
