"""One round of over-the-air aggregation or of its orthogonal baseline, by hand."""

import dataclasses
import math

import pytest
import torch

from leakgauge.defenses.ota import OTA
from leakgauge.defenses.ota_orthogonal import OTAOrthogonal
from leakgauge.harness.core import rng
from leakgauge.harness.core.contract import (
    Link,
    Links,
    Sender,
    Setting,
)
from leakgauge.harness.core.rng import Key
from leakgauge.harness.core.vec import Layout

D = 200_000
DELTA = 1e-4
A_ROUND = 8 * math.log(1.25 / DELTA) / 1.2**2
"""Noise over signal that the claim (1.2, 1e-4) takes: (15) and Thm 1 solved for it."""

FIRST = {"gains": "0.5,1,2,4", "power": 100.0}
SECOND = {"gains": "0.05,1,2,4", "power": 100.0}

PRIVATE, CHANNEL = Key(7), Key(9)
both = pytest.mark.parametrize("kind", [OTA, OTAOrthogonal])


def setting_of(clients, d=D, **changes):
    plain = Setting(
        Layout(("w",), ((d,),)),
        clients=clients,
        participants=clients,
        rounds=3,
        sends="gradient",
        steps=1,
        lr=0.1,
        batch=0,
        samples=20,
    )
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
