"""One client's message of a baseline, encoded, decoded and scored."""

import dataclasses

from leakgauge import Key, Layout, Link, Links, Sender, Setting

PRIVATE, SHARED, SERVER = Key(1), Key(2), Key(3)
SENDERS = [Sender(number, samples) for number, samples in enumerate((8, 80, 8, 8))]
LENET = 119_850  # sqSGD, section 5


def setting_of(d, **changes):
    setting = Setting(Layout(("w",), ((d,),)), 4, 4, 3, sends="update", steps=1, lr=0.1, batch=8, samples=8)
    return dataclasses.replace(setting, **changes)


def encode(defense, update, private=PRIVATE, shared=SHARED, memory=None):
    setting = setting_of(len(update))
    memory = defense.remember(setting) if memory is None else memory
    return defense.encode(defense.init(setting), memory, update, Link(setting, SENDERS[0], shared), private)


def estimate(defense, wire, d, shared=SHARED):
    setting = setting_of(d)
    return defense.estimate(defense.init(setting), wire, Link(setting, SENDERS[0], shared))


def score(defense, wires, d, candidates, shared=SHARED):
    keys = None if shared is None else [shared] * len(wires)
    senders = [SENDERS[0]] * len(wires)
    return defense.likelihood(None, wires, Links(setting_of(d), senders, keys))(candidates)
