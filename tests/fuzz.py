"""Honest messages of every shipped defense and two cascades, and whether server and outsider take given bytes."""

import math
from typing import NamedTuple

import torch

from leakgauge import Key, Layout, Link, Links, MessageError, Sender, Setting, rng
from leakgauge.harness.federation import registry
from leakgauge.harness.federation.round import Client, Exchange, Round

SETTING = Setting(
    Layout(("w", "v"), ((11, 13), (7,))),
    clients=4,
    participants=4,
    rounds=3,
    sends="update",
    steps=1,
    lr=0.1,
    batch=8,
    samples=8,
)
DEFENSES = [
    *((name, {}) for name in (*registry.classes("defense"), "laplace+sdq", "t-noise+sdq-lattice")),
    ("cepam-gaussian", {"dimension": 3}),
    ("dp-fedavg", {"noise_std": 1e-3}),
    ("gaussian", {"noise_std": 1e-3}),
    ("laplace", {"scale": "tensor"}),
    ("mvu", {"scale": "vector", "bits": 2}),
    ("random-mask", {"rescale": True}),
    ("sqsgd", {"ratio": 0.5}),
    ("t-noise", {"scale": "public"}),
    ("top-k", {"fraction": 0.5, "feedback": True}),
    ("udp", {"clips": "update"}),
]
"""Every defense as shipped, the cascades, and parameters under which a message looks otherwise."""


class Honest(NamedTuple):
    """A round, the link of an honest client, and the message that arrives of it."""

    here: Round
    link: Link
    wire: bytes


def honest(name, parameters, update=None, seed=7, setting=SETTING):
    """One honest message; if the channel adds messages, the others are silent."""
    defense, key = registry.build("defense", name, parameters), Key(seed)
    update = 0.1 * rng.normal(key.child("update"), (setting.dim,)) if update is None else update
    here = Round(defense, setting, defense.init(setting), number=1)
    client = Client.of(Sender(2, 8), update, defense.remember(setting), key.child("client"))
    silent = here.silent([client.sender], key) if defense.superposes else []
    exchange = here.exchange([client, *silent], key.child("channel"))
    return Honest(here, exchange.links.each()[0], exchange.received[0])


def taken(one, wire):
    """Whether the server and an outsider take these bytes; each answers with a MessageError or finite numbers.

    The server's are within the public bound; on a channel that superposes it also decodes the mean.
    """
    here, link, _ = one
    alone = Exchange([wire], [wire], [], Links(here.setting, [link.sender], [link.shared]))
    readers = [
        (lambda: here.accept(wire, link), (1 + 1e-3) * here.defense.longest(here.state, link)),
        (lambda: here.estimate(wire, link.sender, None), math.inf),
        (lambda: here.decode(alone, Key(1)), math.inf),
    ]
    outcomes = []
    for read, most in readers[: 3 if here.defense.superposes else 2]:
        try:
            norm = float(torch.linalg.vector_norm(read(), dtype=torch.float64))
        except MessageError:
            outcomes.append(False)
        else:
            assert norm <= most
            assert norm < math.inf
            outcomes.append(True)
    return outcomes[0]
