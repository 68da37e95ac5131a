"""Hand-written defenses and attacks with the real interfaces, and small tasks and data."""

import ctypes
import math
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from leakgauge.harness.core.claim import Claim, Horizon, Proof, Relation, Unit
from leakgauge.harness.core.codec import pack_float32, unpack_float32
from leakgauge.harness.core.contract import (
    Attack,
    Defense,
    Examples,
    Guess,
    InTraining,
    LocalRule,
    Membership,
    Reconstruction,
)
from leakgauge.harness.core.rng import Key, normal, uniform
from leakgauge.harness.core.vec import Layout, weighted_mean
from leakgauge.harness.learn.layers import UNSCALED, Scale
from leakgauge.harness.learn.models import Model, build
from leakgauge.harness.learn.tasks import ModelTask


def study_table(federation, defenses, attacks, *, data="digits", model="mlp-small", **more):
    """A study of one task and one federation, as in a file; a name stands for a defense with its defaults.

    It has no lineups, so that its cells are those of `attacks`; `lineup=True` adds them.
    """
    named = [{"name": one} if isinstance(one, str) else one for one in defenses]
    tables = {"tasks": [{"data": data, "model": model}], "federations": [federation], "defenses": named}
    return {"name": "small", "lineup": False, **tables, "attacks": attacks, **more}


def nothing(history):
    """The claim of a double."""
    proved = Proof(None, Unit.MESSAGE, "by definition", "a double")
    horizon = Horizon.of(len(history))
    return Claim(math.inf, 0.0, Unit.MESSAGE, Relation.ANY_TWO, horizon, frozenset(), "", (), proved)


@dataclass(frozen=True)
class Counting(Defense[int, int]):
    """A defense that sends its state and its memory in the clear, so that a test can read them."""

    randomized: ClassVar[bool] = False
    factor: float = 1.0

    def init(self, setting):
        return 0

    def remember(self, setting):
        return 100

    def encode(self, state, memory, update, link, private):
        return bytes([state, memory]) + pack_float32(self.factor * update), memory + 1

    def estimate(self, state, received, link):
        assert received[0] == state
        return unpack_float32(received[2:], link.setting.dim)

    def advance(self, state, feedback):
        return state + 1

    def likelihood(self, state, received, links):
        sent = torch.stack([unpack_float32(wire[2:], links.setting.dim) for wire in received])
        return lambda update: (update - sent).square().sum(-1)

    def claim(self, history, setting):
        return nothing(history)


@dataclass(frozen=True)
class Summing(Defense[None, None]):
    """A channel that adds up all messages: the receiver sees only the sum."""

    randomized: ClassVar[bool] = False
    analog: ClassVar[bool] = True
    superposes: ClassVar[bool] = True

    def encode(self, state, memory, update, link, private):
        return pack_float32(update), None

    def transmit(self, state, wires, links, channel):
        return [pack_float32(sum(unpack_float32(wire, len(wire) // 4) for wire in wires))]

    def estimate(self, state, received, link):
        return unpack_float32(received, link.setting.dim)

    def decode(self, state, received, links, private):
        return weighted_mean([unpack_float32(received[0], links.setting.dim) / len(links.senders)], [1.0])

    def likelihood(self, state, received, links):
        return lambda update: update.sum(-1)

    def claim(self, history, setting):
        return nothing(history)


@dataclass(frozen=True)
class Ruled(Counting):
    """A defense with a rule for local training, which stops after some rounds."""

    clip: float = 1e-3
    full_batch: bool = True
    rounds: int = 2

    @property
    def local(self):
        return LocalRule(clip=self.clip, full_batch=self.full_batch)

    def stops(self, state):
        return state >= self.rounds


@dataclass(frozen=True)
class Echo(Attack):
    """Guesses noise from its key; `wants` lists its needs, `break_with` makes it fail."""

    kind: ClassVar[str] = "reconstruction"
    wants: str = "messages"
    break_with: str = ""

    @property
    def needs(self):
        return frozenset(self.wants.split(","))

    def run(self, seen, key):
        if self.break_with == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.break_with:
            raise RuntimeError(self.break_with)
        sizes = [message.images for message in seen.messages]
        noise = [normal(key.child(i), (n, *seen.task.input_shape)) for i, n in enumerate(sizes)]
        labels = [torch.zeros(n, dtype=torch.int64) for n in sizes]
        return Reconstruction(tuple(Guess(x, y, 0.0, 1) for x, y in zip(noise, labels, strict=True)))


@dataclass(frozen=True)
class Pairs(Echo):
    """Takes two victims at once, and fails at the third."""

    def at_once(self, dim):
        return 2

    def run(self, seen, key):
        if seen.messages[0].sender.number == 2:
            raise RuntimeError("victim 2")
        return super().run(seen, key)


@dataclass(frozen=True)
class Coin(Attack):
    """Random membership scores."""

    kind: ClassVar[str] = "membership"

    @property
    def needs(self):
        return frozenset({"candidates"})

    def run(self, seen, key):
        return Membership(normal(key, (len(seen.candidates.y),)))


@dataclass(frozen=True)
class Wrong(Coin):
    """Fails on everything."""

    def run(self, seen, key):
        raise ValueError(f"expected nothing, got {len(seen.candidates.y)} candidates")


@dataclass(frozen=True)
class Stuck(Coin):
    """Random membership scores after `seconds` in one call that holds the interpreter, with `megabytes` in use."""

    seconds: int = 0
    megabytes: int = 0

    def run(self, seen, key):
        used = torch.ones(self.megabytes * 250_000)
        ctypes.PyDLL(None).sleep(self.seconds)
        assert len(used) == self.megabytes * 250_000
        return super().run(seen, key)


def small_task(name="mlp-small", shape=(1, 8, 8), classes=10):
    """A task on digits-sized images."""
    return ModelTask(build(name, shape, classes))


@dataclass(frozen=True)
class ByFunction:
    """A network of which nothing is known but its scores: a function of the tensors, the inputs and the masks."""

    layout: Layout
    function: Callable[..., Tensor]
    dropout: ClassVar[tuple[object, ...]] = ()
    mixes: ClassVar[bool] = False
    smooth: ClassVar[bool] = False
    scale: ClassVar[Scale] = UNSCALED

    def __call__(self, tensors, x, keep):
        return self.function(tensors, x, keep)

    def in_training(self, tensors, x, keep):
        return InTraining(self.function(tensors, x, keep))

    def start(self, key, initialization):
        return uniform(key, (self.layout.dim,), -0.2, 0.2)


def function_task(layout, function, shape=(1, 8, 8), classes=10, **how):
    """A task of a network of which nothing else is known; by default of one tensor, whose shape is given."""
    layout = layout if isinstance(layout, Layout) else Layout(("w",), (layout,))
    network = ByFunction(layout, function)
    return ModelTask(Model("function", network, shape, classes, start=network.start, **how))


def random_examples(n, shape=(1, 8, 8), classes=10, seed=0):
    """Noise images with the labels 0, 1, 2, ... in turn."""
    return Examples(normal(Key(seed).child("x"), (n, *shape)).sigmoid(), torch.arange(n) % classes)
