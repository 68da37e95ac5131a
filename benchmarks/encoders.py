"""Encoders and decoders: millions of coordinates per second, encode and decode together, one thread, draws included.

Each defense gets one tensor of 10^6 coordinates, or 1.1 * 10^7, that resembles an update. It is timed from the update
to the bytes and from the bytes to the estimate; the best of several repeats counts, because other work on the machine
only adds time. Prints the measured rate beside its bar, and the bits per coordinate, counted from the bytes. Exit code
1 if a bar is missed.

    python benchmarks/encoders.py [NAME ...]
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from leakgauge.defenses._wire.hadamard import fast_walsh_hadamard
from leakgauge.harness.core import rng
from leakgauge.harness.core.contract import (
    Sender,
    Setting,
)
from leakgauge.harness.core.rng import Key
from leakgauge.harness.core.vec import Layout
from leakgauge.harness.federation import registry
from leakgauge.harness.federation.round import Client, Round

D = 1_000_000
REPEATS = 9


class Case(NamedTuple):
    """A defense with parameters; bar: millions of coordinates per second; spread: a coordinate's standard deviation."""

    name: str
    parameters: dict[str, Any]
    bar: float | None = None
    dim: int = D
    spread: float = 0.01


CASES = (
    Case("none", {}),
    Case("gaussian", {}),
    Case("laplace", {}),
    *(Case("sdq", {"bits": bits}, 30.0) for bits in (1, 2, 4, 8)),
    *(Case("jopeq", {"bits": bits}, 30.0) for bits in (1, 2, 4, 8)),
    Case("sdq-lattice", {"bits": 2}),
    Case("jopeq-t", {"bits": 2}),
    Case("jopeq-sound", {"bits": 2}),
    Case("laplace+sdq", {"bits": 2}),
    *(Case("cepam-gaussian", {"noise_std": std, "dimension": 1}, 12.0) for std in (0.1, 0.01)),
    *(Case("cepam-gaussian", {"noise_std": std, "dimension": 2}) for std in (0.1, 0.01)),
    *(Case("cepam-gaussian", {"noise_std": std, "dimension": 3}, 9.0) for std in (0.1, 0.01)),
    Case("cepam-laplace", {}),
    Case("cepam-clip", {}),
    # dt = 2^17 of 2^17 coordinates; 40 ms in total is 3.3 million per second
    Case("sqsgd", {"ratio": 1.0, "epsilon": 400.0}, 2**17 / 0.040 / 1e6, 2**17),
    Case("sqsgd", {"ratio": 1.0}, 8.0, 11_000_000),
    Case("mvu", {"bits": 2}),
    Case("piecewise", {}),
    Case("vqsgd", {}),
    Case("top-k", {}),
    Case("ota", {}),
)


def best(work: Callable[[], Any]) -> float:
    """Processor seconds of the fastest of several repeats, after a first run that fills the caches."""
    work()
    seconds = []
    for _ in range(REPEATS):
        start = time.process_time()
        work()
        seconds.append(time.process_time() - start)
    return min(seconds)


def measure(case: Case) -> tuple[float, float, float]:
    """(encode seconds, decode seconds, bits per coordinate)."""
    defense = registry.build("defense", case.name, case.parameters)
    layout = Layout(("w",), ((case.dim,),))
    setting = Setting(layout, 10, 10, 20, sends="update", steps=15, lr=0.01, batch=1, samples=600)
    update = case.spread * rng.normal(Key(0), (case.dim,))
    state, memory, sender = defense.init(setting), defense.remember(setting), Sender(0, 600)
    client, here = Client(sender, update, memory, private=Key(1), shared=Key(2)), Round(defense, setting, state)

    def encode() -> bytes:
        return here.exchange([client], Key(3)).sent[0]

    wire = encode()
    decode = best(lambda: here.estimate(wire, sender, client.shared))
    return best(encode), decode, 8 * len(wire) / case.dim


def transform() -> bool:
    """Compare the Walsh-Hadamard transform with one pass over memory, per coordinate; return whether its bar holds.

    With 2^25 floats, no cache holds the vector, and a pass is memory-bound. The transform writes new memory, so the bar
    is three passes into new memory; a pass into existing memory, a few times cheaper, is printed beside it. The
    transform needs log2(n) additions per coordinate, which take longer than a pass within the cache.
    """
    big = torch.ones(2**25)
    out = torch.empty_like(big)
    fresh = best(lambda: big * 2.0) / len(big)
    there = best(lambda: torch.mul(big, 2.0, out=out)) / len(big)
    print(f"memory-bound pass: {1e9 * fresh:.2f} ns per coordinate into new memory, {1e9 * there:.2f} into old")
    right = True
    for power in (13, 17, 20):
        n = 2**power
        x = rng.normal(Key(0), (n,))
        took = best(lambda x=x: fast_walsh_hadamard(x)) / n
        right &= took <= 3 * fresh
        print(
            f"Hadamard 2^{power}: {1e9 * took:.2f} ns per coordinate, {took / fresh:.1f} passes into new memory (bar "
            f"3), {took / there:.1f} into old"
        )
    return right


def main(names: list[str]) -> int:
    """Print the table; return 1 if a bar is missed."""
    torch.set_num_threads(1)
    missed = []
    print(f"{'defense':<40} {'encode ms':>9} {'decode ms':>9} {'M coord/s':>9} {'bar':>6} {'bits':>8}")
    for case in CASES:
        if names and case.name not in names:
            continue
        encode, decode, bits = measure(case)
        rate = case.dim / (encode + decode) / 1e6
        label = case.name + ("" if not case.parameters else f" {case.parameters}")
        bar = "" if case.bar is None else f"{case.bar:.1f}"
        missed += [label] * (case.bar is not None and rate < case.bar)
        print(f"{label:<40} {1e3 * encode:9.1f} {1e3 * decode:9.1f} {rate:9.1f} {bar:>6} {bits:8.3f}", flush=True)
    if not names and not transform():
        missed.append("Hadamard")
    print(f"{len(missed)} bars missed: {', '.join(missed) or 'none'}")
    return int(bool(missed))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
