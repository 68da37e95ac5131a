"""Defenses with a fault, which keep the claims that they have without it."""

import contextlib
import dataclasses
import functools
import sys
from typing import Any

import pytest

from leakgauge import Defense, Key, rng
from leakgauge.defenses._common.scale import Scaling
from leakgauge.harness.core.codec import pack_float64
from leakgauge.harness.federation import registry

ONE_KEY = Key(0, ("dither",))
"""The shared key of every round, if it is reused."""

_NORM = 8
"""Bytes of a norm sent in clear."""


@dataclasses.dataclass(frozen=True, eq=False)
class Faulty(Defense):
    """The claims of `promised`, but messages of `actual`, or with a fault.

    Attributes:
        reader: the defense that reads messages; None: `promised`.
        quiet: factor of all noise.
        shared_noise: private noise comes from the shared key.
        reused: all rounds share one key, `ONE_KEY`.
        unclipped: neither records nor updates are clipped.
        clear: the update's norm precedes the message.
    """

    promised: Any
    actual: Any
    reader: Any = None
    quiet: float = 1.0
    shared_noise: bool = False
    reused: bool = False
    unclipped: bool = False
    clear: bool = False

    @property
    def superposes(self):
        return self.promised.superposes

    @property
    def analog(self):
        return self.promised.analog

    @property
    def local(self):
        return self.actual.local._replace(clip=None) if self.unclipped else self.actual.local

    def step_noise(self, setting):
        return self.quiet * self.actual.step_noise(setting)

    def parts(self, setting):
        return self.promised.parts(setting)

    def init(self, setting):
        return self.promised.init(setting), self.actual.init(setting)

    def remember(self, setting):
        return self.actual.remember(setting)

    def encode(self, state, memory, update, link, private):
        link = link._replace(shared=self._key(link.key))
        private = link.key if self.shared_noise else private
        with self._code():
            wire, memory = self.actual.encode(state[1], memory, update, link, private)
        return (pack_float64(update.double().norm()[None]) if self.clear else b"") + wire, memory

    def transmit(self, state, wires, links, channel):
        """Norms do not add up on the channel: a sum arrives with the first sender's norm."""
        bare = [self._bare(wire) for wire in wires]
        received = self.promised.transmit(state[0], bare, links, channel)
        norms = [wire[: len(wire) - len(rest)] for wire, rest in zip(wires, bare, strict=True)]
        return [norm + wire for norm, wire in zip(norms, received, strict=False)]

    def estimate(self, state, received, link):
        link, reader = link._replace(shared=self._key(link.shared)), self.reader or self.promised
        return reader.estimate(state[0], self._bare(received), link)

    def decode(self, state, received, links, private):
        wires, links = [self._bare(wire) for wire in received], links._replace(shared=[*map(self._key, links.keys)])
        with self._code():
            return self.actual.decode(state[1], wires, links, private)

    def likelihood(self, state, received, links):
        wires = [self._bare(wire) for wire in received]
        keys = None if links.shared is None else [self._key(key) for key in links.shared]
        return (self.reader or self.promised).likelihood(state[0], wires, links._replace(shared=keys))

    def advance(self, state, feedback):
        return self.promised.advance(state[0], feedback), self.actual.advance(state[1], feedback)

    def claim(self, history, setting):
        return self.promised.claim([state[0] for state in history], setting)

    def _bare(self, wire):
        return wire[_NORM:] if self.clear else wire

    def _key(self, shared):
        return ONE_KEY if self.reused and shared is not None else shared

    @contextlib.contextmanager
    def _code(self):
        """Patch the fault into the defense's code."""
        with pytest.MonkeyPatch.context() as code:
            if self.quiet != 1.0:
                for name in ("normal", "laplace", "signed_exponential"):
                    draw = getattr(rng, name)
                    code.setattr(rng, name, lambda *given, draw=draw: self.quiet * draw(*given))
            if self.unclipped:
                code.setattr(Scaling, "_clip", lambda scaling, values: values)
                for module, name in _clips():
                    code.setattr(module, name, lambda update, bound: update)
            yield


def with_changes(promised, **changes):
    """The defense with other parameters in its code than in its claim."""
    return Faulty(promised, dataclasses.replace(promised, **changes))


@functools.cache
def _clips():
    """The modules of defenses that clip, with the names of their clips."""
    registry.classes("defense")
    modules = [module for name, module in sys.modules.items() if name.startswith("leakgauge.defenses.")]
    return [(module, name) for module in modules for name in ("clip_l2", "clip_coordinates") if hasattr(module, name)]
