"""One client's message of JoPEQ or of a baseline, both ways."""

import dataclasses
import math

import numpy as np

from leakgauge import Key, Layout, Link, Sender, Setting, unpack_levels
from leakgauge.defenses._jopeq.privacy import GENERATOR
from leakgauge.harness.federation import registry

PRIVATE, SHARED = Key(1).child("private"), Key(1).child("shared")
WHO = Sender(0, 8)
FROM_PAIRS = np.linalg.inv(GENERATOR)


def setting_of(*sizes):
    layout = Layout(tuple(f"p{i}" for i in range(len(sizes))), tuple((size,) for size in sizes))
    return Setting(layout, 4, 4, 3, sends="update", steps=1, lr=0.1, batch=8, samples=8)


def encode(defense, update, private=PRIVATE, shared=SHARED, setting=None):
    setting = setting or setting_of(len(update))
    return defense.encode(None, None, update, Link(setting, WHO, shared), private)[0]


def decode(defense, wire, setting, shared=SHARED):
    return defense.estimate(None, wire, Link(setting, WHO, shared))


def round_trip(defense, update):
    return decode(defense, encode(defense, update), setting_of(len(update)))


def levels_of(defense, wire, d):
    """[d] integers -top..top of a message without padding."""
    size = math.ceil(d * (defense.bits + 1) / 8)
    return unpack_levels(wire[-size:], d, defense.bits + 1) - defense.lattice.top


def like_one_bit(defense, bits=6):
    """The same step at more bits, so that nothing overloads."""
    return dataclasses.replace(defense, bits=bits, gamma=defense.lattice.step * (2**bits + 1) / 2)


def build(name, **parameters):
    return registry.build("defense", name, {key.replace("__", "."): value for key, value in parameters.items()})
