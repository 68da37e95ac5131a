"""A message that its sender chooses: the accepted one that moves the mean most."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np
import torch

from leakgauge.harness.core.contract import Defense
from leakgauge.harness.federation.round import Client, Round

_FACTORS = [factor for step in (100.0, 4.0, 1.2) for factor in (step, 1 / step)]
_REPEATS = 4  # of each factor


class _Choice(NamedTuple):
    """A message, the defense and the factor on the update that made it, and its estimate's distance from the update."""

    wire: bytes
    defense: Defense[Any, Any]
    size: float
    distance: float


def forged(round_: Round, client: Client, state_of: Callable[[Defense[Any, Any]], Any]) -> bytes:
    """The accepted message whose estimate is nearest to the client's update; empty: none is accepted.

    The server decodes with the public parameters, but a client may encode with any: less noise, a larger clip, a longer
    update. The search multiplies the best of these numbers by a factor as long as that helps. Whole numbers stay,
    because they set the format. Codes that no encoder makes are not tried, so a better message may exist.

    Args:
        client: its update is what the client wants to add.
        state_of: the public state that a defense has in this round.
    """
    found = _tried(round_, client, state_of, round_.defense, 1.0)
    for factor in _FACTORS * 2:
        for _ in range(_REPEATS):
            others = [(found.defense, found.size * factor)]
            others += [(other, found.size) for other in _changed(found.defense, factor)]
            best = min((_tried(round_, client, state_of, *other) for other in others), key=lambda one: one.distance)
            if best.distance >= found.distance:
                break
            found = best
    return found.wire


def _changed(defense: Defense[Any, Any], factor: float) -> Iterator[Defense[Any, Any]]:
    """The defense with little noise, and with one of its real numbers multiplied, for each of them."""
    with suppress(ValueError, ArithmeticError):
        if quiet := defense.low_noise_variant():
            yield quiet
    for field in dataclasses.fields(defense):
        value = getattr(defense, field.name)
        numbers = [value * factor] if type(value) is float else []
        for other in _changed(value, factor) if isinstance(value, Defense) else numbers:
            with suppress(ValueError, ArithmeticError):
                yield dataclasses.replace(defense, **{field.name: other})


def _tried(
    round_: Round, client: Client, state_of: Callable[[Any], Any], defense: Defense[Any, Any], size: float
) -> _Choice:
    """What the server makes of the message of a defense for `size` times the update."""
    wire, distance = b"", math.inf
    with suppress(ValueError, ArithmeticError), np.errstate(all="ignore"):
        own = dataclasses.replace(round_, defense=defense, state=state_of(defense))
        longer = client._replace(update=client.update * size, memory=defense.remember(round_.setting))
        wire, _ = own.encode(longer)
        exchange = round_.among_silent([client._replace(own=wire)], client.private)
        moved = round_.accept(exchange.received[0], exchange.links.each()[0])
        distance = float(torch.linalg.vector_norm(moved.double() - client.update))
    return _Choice(wire if distance < math.inf else b"", defense, size, distance)
