"""Encoders: coordinates per second, for encoding and decoding together, including draws.

Each defense gets one update of a million coordinates (an eighth of this in the quick table). The reference is a
dithered quantizer in plain numpy, whose intermediate arrays need as much cache as ours.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch
from _measure import Rows, Work

from leakgauge.defenses._common.hadamard import fast_walsh_hadamard
from leakgauge.harness.core import rng
from leakgauge.harness.core.contract import Sender, Setting
from leakgauge.harness.core.rng import Key
from leakgauge.harness.core.vec import Layout
from leakgauge.harness.federation import registry
from leakgauge.harness.federation.round import Client, Round
from leakgauge.harness.learn.models import build

SPREAD = 0.01
"""Standard deviation of a coordinate."""

CASES: dict[str, dict[str, Any]] = {
    "none": {},
    "gaussian": {},
    "laplace": {},
    "t-noise": {},
    "sdq": {"bits": 1},
    "sdq, 4 bits": {"bits": 4},
    "sdq-lattice": {"bits": 2},
    "jopeq": {"bits": 1},
    "jopeq, 4 bits": {"bits": 4},
    "jopeq-t": {"bits": 2},
    "jopeq-sound": {"bits": 2},
    "laplace+sdq": {"bits": 2},
    "cepam-gaussian, n = 1": {"noise_std": 0.01, "dimension": 1},
    "cepam-gaussian, n = 2": {"noise_std": 0.01, "dimension": 2},
    "cepam-gaussian, n = 3": {"noise_std": 0.01, "dimension": 3},
    "cepam-gaussian, n = 1, noise .1": {"noise_std": 0.1, "dimension": 1},
    "cepam-gaussian, n = 3, noise .1": {"noise_std": 0.1, "dimension": 3},
    "cepam-laplace": {},
    "cepam-clip": {},
    "sqsgd": {"ratio": 1.0, "epsilon": 400.0},
    "mvu": {"bits": 2},
    "piecewise": {},
    "vqsgd": {},
    "top-k": {},
    "dp-fedavg": {},
    "dp-sgd": {},
    "udp": {},
    "ota": {},
    "ota-orthogonal": {},
}
"""The part of a name before a comma is the name of the defense."""

QUICK = ("none", "gaussian", "laplace", "sdq, 4 bits", "jopeq", "jopeq-t", "cepam-gaussian, n = 1")
QUICK += ("cepam-gaussian, n = 3", "sqsgd", "mvu", "piecewise", "top-k", "ota")


SPARING = ("none", "piecewise", "vqsgd", "top-k", "dp-fedavg", "dp-sgd")
"""Defenses that draw fewer numbers than coordinates, on the client and on the server together."""


def work(name: str, parameters: dict[str, Any], layout: Layout) -> Work:
    """One message of a defense, from the update to the estimate."""
    dim = layout.dim
    defense = registry.build("defense", name.partition(",")[0], parameters)
    setting = Setting(layout, 10, 10, 20, sends="update", steps=15, lr=0.01, batch=1, samples=600)
    update = SPREAD * rng.normal(Key(0), (dim,))
    state, memory, sender = defense.init(setting), defense.remember(setting), Sender(0, 600)
    client, here = Client(sender, update, memory, private=Key(1), shared=Key(2)), Round(defense, setting, state)

    def message() -> bytes:
        (wire,) = here.exchange([client], Key(3)).sent
        here.estimate(wire, sender, client.shared)
        return wire

    size = len(message())
    moved = 8 * dim + 2 * size  # the update is read and the estimate is written; the message is written and read
    against = "dithered quantizer in numpy"
    drawn = 0 if name in SPARING else dim
    note = f"{8 * size / dim:.3g} bits a coordinate"
    return Work(message, partial(dithered, update), against, dim, "coordinate", moved=moved, drawn=drawn, note=note)


def dithered(update: torch.Tensor) -> np.ndarray:
    """A dithered quantizer of 8 bits in plain numpy: draw, add, round, pack; unpack, subtract the dither."""
    drawn = np.random.Generator(np.random.Philox(0)).random(len(update))  # noqa: TID251
    values = np.rint(64 * update.numpy().astype(np.float64) + drawn).clip(-128, 127).astype(np.int64)
    wire = np.packbits(np.unpackbits(values.astype(np.int8).view(np.uint8))).tobytes()
    read = np.frombuffer(wire, np.int8).astype(np.int64)
    return ((read - drawn) / 64).astype(np.float32)


def transform(dim: int) -> Work:
    """The Walsh-Hadamard transform; the reference is one pass over memory."""
    x, out = rng.normal(Key(0), (dim,)), torch.empty(dim)
    ours = partial(fast_walsh_hadamard, x)
    return Work(ours, lambda: torch.mul(x, 2.0, out=out), "one pass", dim, "coordinate", moved=8 * dim)


def large(name: str) -> Work:
    """One message of ResNet-18."""
    return work(name, {}, build("torchvision:resnet18", (3, 64, 64), 1000).layout)


def rows(quick: bool) -> Rows:
    """One row per defense, the transform of `sqsgd` and `vqsgd`, and each defense on an update of ResNet-18."""
    dim = 2**17 if quick else 1_000_000
    layout = Layout(("w",), ((dim,),))
    chosen = QUICK if quick else CASES
    found = {f"message, {name}": partial(work, name, CASES[name], layout) for name in chosen}
    found["Walsh-Hadamard"] = partial(transform, 2**17 if quick else 2**20)
    every = () if quick else registry.classes("defense")
    return found | {f"message of ResNet-18, {name}": partial(large, name) for name in every}
