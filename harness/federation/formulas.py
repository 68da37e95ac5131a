"""Formulas that recipes may draw for any defense; those of one defense are in its own module."""

from __future__ import annotations

import math

import numpy as np

from leakgauge.harness.core import rng
from leakgauge.harness.core.cell import FederationSpec, Scalar
from leakgauge.harness.core.rng import Key
from leakgauge.harness.core.threats import Threat
from leakgauge.harness.federation.loop import setting_of
from leakgauge.harness.federation.registry import build
from leakgauge.harness.federation.small import Federation
from leakgauge.harness.learn import models

_SAMPLES = 100  # samples of the client; the size of its message does not depend on them


def layer_snr(mechanism: str, model: str, seed: int = 0, draws: int = 4, **parameters: Scalar) -> dict[str, float]:
    """Signal-to-noise ratio of messages with standard normal updates, averaged over the tensors of a model.

    Args:
        mechanism: name of a defense; `parameters` are its parameters.
        model: architecture for color images of 32 x 32 pixels and ten classes.
        seed: seed of the updates, and of all randomness of the messages.
        draws: number of messages.

    Returns:
        `layer_snr_db`: 10 log10 of the mean over messages and tensors of var(u) / var(u - decoded).

    Raises:
        LookupError, ValueError: there is no such defense or model, or a parameter is wrong.
    """
    layout = models.build(model, (3, 32, 32), 10).layout
    defense = build("defense", mechanism, parameters)
    setting = setting_of(layout, FederationSpec(clients=1, rounds=1), [_SAMPLES], defense.local)
    federation, ratios = Federation(defense, setting, (defense.init(setting),)), []
    for number in range(draws):
        key = Key(seed).child("layer_snr", number)
        update = rng.normal(key.child("update"), (layout.dim,))
        exchange = federation.repeat(update, key.child("private"), key.child("shared"), key.child("channel"))
        (decoded,) = federation.estimates(exchange, Threat.SERVER)
        parts = zip(layout.split(update), layout.split(decoded), strict=True)
        ratios += [float(sent.var() / (sent - read).var()) for sent, read in parts]
    return {"layer_snr_db": 10 * math.log10(float(np.mean(ratios)))}


FORMULAS = {"layer_snr": layer_snr}
