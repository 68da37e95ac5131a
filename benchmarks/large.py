"""Memory and time of every defense on one update of a large model, ResNet-18 in torchvision's layout.

Each defense runs in a fresh process with one thread, from the update to the bytes, and from the bytes to the estimate;
one-time preparation for a setting is included. Then an attacker evaluates the likelihood of the message and its
gradient. Prints processor seconds, the peak resident memory of the process up to that point (including torch), and the
bytes.

Bars: 20 s and 4 GB for encoding and decoding, 24 GB for the likelihood. The exit code is 1 if a bar is missed.

    python benchmarks/large.py [NAME ...]

A NAME may be a cascade, such as laplace+sdq. Without names, all shipped defenses run, and some again with parameters
that send more.
"""

from __future__ import annotations

import multiprocessing
import re
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch

from leakgauge.harness.core import rng
from leakgauge.harness.core.contract import Sender, Setting, likelihood_of
from leakgauge.harness.core.errors import NoLikelihood
from leakgauge.harness.core.rng import Key
from leakgauge.harness.core.vec import Layout
from leakgauge.harness.federation import registry
from leakgauge.harness.federation.round import Client, Round
from leakgauge.harness.learn.models import build

MODEL, SHAPE, CLASSES = "torchvision:resnet18", (3, 64, 64), 1000
SECONDS, GIGABYTES, ATTACKED = 20.0, 4.0, 24.0
FURTHER: tuple[tuple[str, dict[str, Any]], ...] = (
    ("sqsgd", {"ratio": 1.0}),
    ("cepam-gaussian", {"dimension": 2}),
    ("cepam-gaussian", {"dimension": 3}),
    ("cepam-gaussian", {"noise_std": 0.01, "dimension": 3}),
    ("jopeq", {"bits": 8}),
    ("laplace+sdq", {}),
)


class Measured(NamedTuple):
    """One defense on one update.

    Attributes:
        encode, decode, likelihood: processor seconds; `encode` includes the one-time preparation of the defense.
        coded, attacked: peak gigabytes up to the estimate, and up to the gradient of the likelihood.
        size: bytes of the message.
        failure: the error that was raised; empty without an error.
    """

    encode: float = 0.0
    decode: float = 0.0
    coded: float = 0.0
    size: int = 0
    likelihood: float = 0.0
    attacked: float = 0.0
    failure: str = ""

    @property
    def missed(self) -> bool:
        """Whether a bar is missed."""
        slow = self.encode + self.decode > SECONDS
        return slow or self.coded > GIGABYTES or self.attacked > ATTACKED or bool(self.failure)


def peak() -> float:
    """Peak resident memory of this process, in gigabytes."""
    (line,) = re.findall(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(line) * 1024 / 1e9


def measure(name: str, parameters: dict[str, Any], layout: Layout) -> Measured:
    """Run one defense; call this function in a fresh process."""
    torch.set_num_threads(1)
    defense = registry.build("defense", name, parameters)
    setting = Setting(layout, 10, 10, 20, sends="update", steps=15, lr=0.01, batch=1, samples=600)
    update, sender = rng.normal(Key(0), (layout.dim,)).mul_(0.01), Sender(0, 600)
    found = Measured()
    try:
        start = time.process_time()
        here = Round(defense, setting, defense.init(setting))
        client = Client(sender, update, defense.remember(setting), private=Key(1), shared=Key(2))
        exchange = here.exchange([client], Key(3))
        ends = time.process_time()
        estimate = here.estimate(exchange.received[0], sender, client.shared)
        found = Measured(ends - start, time.process_time() - ends, peak(), len(exchange.sent[0]))
        del client
        start = time.process_time()
        score = likelihood_of(defense, here.state, exchange.received, exchange.links)
        candidate = estimate[None].requires_grad_()
        torch.autograd.grad(score(candidate).sum(), candidate)
    except NoLikelihood:
        return found
    except Exception as error:  # a defense that fails is one line of the table
        return found._replace(failure=f"{type(error).__name__}: {error}")
    return found._replace(likelihood=time.process_time() - start, attacked=peak())


def main(names: list[str]) -> int:
    """Print the table; return 1 if a bar is missed."""
    layout = build(MODEL, SHAPE, CLASSES).layout
    cases = [(name, {}) for name in names] or [*((name, {}) for name in registry.classes("defense")), *FURTHER]
    spawn, missed = multiprocessing.get_context("spawn"), []
    print(f"{MODEL}: {layout.dim:,} numbers in {len(layout.sizes)} tensors")
    titles = ("encode s", "decode s", "peak MB", "megabytes", "likelihood s", "peak MB")
    print(f"{'defense':<52}", *(f"{title:>12}" for title in titles))
    for name, parameters in cases:
        with spawn.Pool(1) as alone:
            found = alone.apply(measure, (name, parameters, layout))
        label = name + (f" {parameters}" if parameters else "")
        missed += [label] * found.missed
        print(
            f"{label:<52} {found.encode:12.2f} {found.decode:12.2f} {1e3 * found.coded:12.0f} {found.size / 1e6:12.3f} "
            f"{found.likelihood:12.2f} {1e3 * found.attacked:12.0f} {found.failure}",
            flush=True,
        )
    print(f"{len(missed)} bars missed: {', '.join(missed) or 'none'}")
    return int(bool(missed))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
