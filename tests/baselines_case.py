"""One client's message of a baseline, both ways."""

import dataclasses

from leakgauge.harness.core.contract import Sender, Setting
from leakgauge.harness.core.rng import Key
from leakgauge.harness.core.vec import Layout

PRIVATE, SHARED, SERVER = Key(1), Key(2), Key(3)
SENDERS = [Sender(number, samples) for number, samples in enumerate((8, 80, 8, 8))]
LENET = 119_850  # sqSGD, section 5


def setting_of(d, **changes):
    setting = Setting(
        Layout(("w",), ((d,),)),
        clients=4,
        participants=4,
        rounds=3,
        sends="update",
        steps=1,
        lr=0.1,
        batch=8,
        samples=8,
    )
    return dataclasses.replace(setting, **changes)


def encode(defense, update, private=PRIVATE, shared=SHARED, memory=None):
    return defense.encode(
        None, memory, update, sender=SENDERS[0], private=private, shared=shared, setting=setting_of(len(update))
    )


def estimate(defense, wire, d, shared=SHARED):
    return defense.estimate(None, wire, sender=SENDERS[0], shared=shared, setting=setting_of(d))


def score(defense, wires, d, candidates, shared=SHARED):
    keys = None if shared is None else [shared] * len(wires)
    senders = [SENDERS[0]] * len(wires)
    return defense.likelihood(None, wires, senders=senders, shared=keys, setting=setting_of(d))(candidates)
