"""One round of over-the-air aggregation or of its orthogonal baseline, by hand."""

import dataclasses
import math

import pytest
import torch

from leakgauge import Key, Layout, Link, Links, Sender, Setting, rng
from leakgauge.defenses.ota import OTA
from leakgauge.defenses.ota_orthogonal import OTAOrthogonal

D = 200_000
DELTA = 1e-4
A_ROUND = 8 * math.log(1.25 / DELTA) / 1.2**2
"""Ratio of noise to signal at the claim (1.2, 1e-4), from (15) and Thm 1."""

# squared gains, P, epsilons (the least of them binds), feasible, A, Psi, Z; noise variance 1. Golden values of an
# independent script, six decimals.
GOLDEN = [
    ((0.5, 1, 2, 4), 100, (1.2,) * 4, False, 13.313657, 696.745373, (36.686343, 86.686343, 186.686343, 386.686343)),
    ((0.05, 1, 2, 4), 100, (1.2,) * 4, True, 5.0, 261.041220, (0, 95, 166.041220, 0)),
    (
        (0.05, 0.3, 1, 2, 4, 0.8),
        1000,
        (1.2, 2, 3, 1.5, 2, 2),
        True,
        50.0,
        2619.412201,
        (0, 250, 950, 669.412201, 0, 750),
    ),
    ((1, 1, 1), 10, (5,) * 3, False, 5.150601, 14.548196, (4.849399,) * 3),
]
FIRST = {"gains": "0.5,1,2,4", "power": 100.0}
SECOND = {"gains": "0.05,1,2,4", "power": 100.0}

PRIVATE, CHANNEL = Key(7), Key(9)
both = pytest.mark.parametrize("kind", [OTA, OTAOrthogonal])


def setting_of(clients, d=D, **changes):
    layout = Layout(("w",), ((d,),))
    plain = Setting(layout, clients, clients, rounds=3, sends="gradient", steps=1, lr=0.1, batch=0, samples=20)
    return dataclasses.replace(plain, **changes)


def senders_of(clients):
    return [Sender(number, 20 + number) for number in range(clients)]


def updates_of(clients, d=D, norm=0.8):
    rows = rng.normal(Key(1), (clients, d), torch.float64)
    return (norm * rows / rows.norm(dim=1, keepdim=True)).float()


def encode(defense, setting, update, user):
    state = defense.init(setting)
    sender, key = Sender(user, 20 + user), PRIVATE.child(user)
    wire, _ = defense.encode(state, None, update, Link(setting, sender, Key(8)), key)
    return wire


def receive(defense, setting, updates):
    """What arrives of one round of all clients."""
    wires = [encode(defense, setting, update, user) for user, update in enumerate(updates)]
    senders = senders_of(len(updates))
    return defense.transmit(defense.init(setting), wires, Links(setting, senders, None), CHANNEL)
