"""Defences with a fault in them, that say of themselves what they said without it."""

import dataclasses
from typing import Any

from harness.contract import Defense


@dataclasses.dataclass(frozen=True, eq=False)
class Faulty(Defense):
    """All that `promised` says, but messages by `actual`, or with a change to them.

    shared_noise: private noise comes from the key that the server has. clear: bytes of the update's norm go ahead.
    """

    promised: Any
    actual: Any
    shared_noise: bool = False
    clear: bool = False

    @property
    def superposes(self):
        return self.promised.superposes

    @property
    def local(self):
        return self.actual.local

    def step_noise(self, setting):
        return self.actual.step_noise(setting)

    def parts(self, setting):
        return self.promised.parts(setting)

    def init(self, setting):
        return self.promised.init(setting), self.actual.init(setting)

    def remember(self, setting):
        return self.actual.remember(setting)

    def encode(self, state, memory, update, *, sender, private, shared, setting):
        private = shared if self.shared_noise else private
        wire, memory = self.actual.encode(
            state[1], memory, update, sender=sender, private=private, shared=shared, setting=setting
        )
        return (int(update.norm()).to_bytes(8, "little") if self.clear else b"") + wire, memory

    def _bare(self, wire):
        return wire[8:] if self.clear else wire

    def transmit(self, state, wires, *, senders, channel, setting):
        return self.promised.transmit(state[0], wires, senders=senders, channel=channel, setting=setting)

    def estimate(self, state, received, *, sender, shared, setting):
        wire = self._bare(received)
        return self.promised.estimate(state[0], wire, sender=sender, shared=shared, setting=setting)

    def decode(self, state, received, **others):
        return self.actual.decode(state[1], received, **others)

    def likelihood(self, state, received, *, senders, shared, setting):
        wires = [self._bare(wire) for wire in received]
        return self.promised.likelihood(state[0], wires, senders=senders, shared=shared, setting=setting)

    def advance(self, state, feedback):
        return self.promised.advance(state[0], feedback), self.actual.advance(state[1], feedback)

    def claim(self, history, setting):
        return self.promised.claim([state[0] for state in history], setting)


def with_changes(promised, **changes):
    """The defence, with other parameters in the code than in what it says."""
    return Faulty(promised, dataclasses.replace(promised, **changes))
