"""The content of Flower's messages: arrays as vectors, numbers of samples, and the server's orders to its clients.

Arrays of floats enter a vector as float32, in the order of their record. Other arrays, such as the number of batches
that a batch norm has seen, are not part of the vector.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from logging import getLogger
from typing import Any, NamedTuple

import numpy as np
import torch
from flwr.app import Array, ArrayRecord

from leakgauge.harness.core.cell import FederationSpec, PartSpec, Scalar
from leakgauge.harness.core.contract import Defense, Feedback, LocalRule, Setting
from leakgauge.harness.core.errors import MessageError
from leakgauge.harness.core.vec import Layout, Vector
from leakgauge.harness.federation import registry
from leakgauge.harness.federation.loop import replay_state, setting_of
from leakgauge.harness.federation.recording import Facts, spec_of_facts
from leakgauge.harness.federation.round import Round

LOG = getLogger("flwr")
OURS = "leakgauge"
"""The name of leakgauge's record in a message, and of the array that holds a sealed message."""

HOOKED = "leakgauge_hook"
"""The attribute of a strategy that holds the object in front of its methods."""

_MOST_SAMPLES = 2**53

CallNext = Callable[[Any, Any], Any]
Mod = Callable[[Any, Any, CallNext], Any]


def part(defense: str, parameters: dict[str, Scalar] | None) -> tuple[PartSpec, Defense[Any, Any]]:
    """A defense, and its specification with all parameters."""
    built: Defense[Any, Any] = registry.build("defense", defense, parameters or {})
    return PartSpec(defense, built.parameters()), built


def new_api(strategy: Any) -> None:
    """Raise ValueError for a strategy without the methods of `flwr.serverapp`, as of `flwr.server.strategy`."""
    if not hasattr(strategy, "configure_train"):
        text = f"expected a strategy of flwr.serverapp.strategy, got {type(strategy).__name__} without configure_train"
        raise ValueError(f"{text}: the older flwr.server.strategy is not supported")


def trains(message: Any) -> bool:
    """Whether a message asks for training."""
    return str(message.metadata.message_type).split(".")[0] == "train"


def only(records: Any, what: str) -> tuple[str, Any]:
    """The name and value of the only record."""
    if len(records) != 1:
        raise MessageError(f"expected one {what} in a message, got {len(records)}")
    (found,) = records.items()
    return str(found[0]), found[1]


def layout_of(record: Any, names: Sequence[str] | None = None) -> Layout:
    """The layout of a record's arrays of floats, or of the arrays in `names`.

    Raises:
        MessageError: an array is missing, or there are no floats.
    """
    found = [name for name, array in record.items() if "float" in array.dtype] if names is None else names
    if not found or not set(found) <= set(record):
        raise MessageError(f"expected arrays of floats, among them those of the first model, got {', '.join(record)}")
    return Layout(tuple(found), tuple(tuple(record[name].shape) for name in found))


def numbers_of(array: Any) -> Any:
    """A record's array as a numpy array.

    Raises:
        MessageError: its bytes, which may come from an untrusted client, are not an array.
    """
    try:
        held = array.numpy()
    except Exception as error:
        raise MessageError(f"expected an array, got bytes that are not an array: {type(error).__name__}") from error
    if not isinstance(held, np.ndarray):
        raise MessageError(f"expected an array, got a {type(held).__name__}")
    return held


def vector_of(record: Any, layout: Layout) -> Vector:
    """[d] float32: the arrays of a record that are in the layout.

    Raises:
        MessageError: an array is missing or has another shape.
    """
    parts = []
    for name, shape in zip(layout.names, layout.shapes, strict=True):
        held = numbers_of(record[name]) if name in record else np.empty(0)
        if held.shape != shape or held.dtype.kind != "f":
            raise MessageError(f"expected the array {name!r} of floats and shape {shape}, got {held.shape}")
        parts.append(torch.from_numpy(held.astype(np.float32)))
    return layout.join(parts)


def record_of(base: Any, layout: Layout, vector: Vector) -> Any:
    """The arrays of `base`; arrays in the layout are replaced by parts of the vector, in their own types."""
    parts = dict(zip(layout.names, layout.split(vector), strict=True))
    return ArrayRecord(
        {
            name: Array(parts[name].numpy().astype(array.dtype)) if name in parts else array
            for name, array in base.items()
        }
    )


def federation(facts: Facts, rounds: int) -> FederationSpec:
    """The federation that these facts describe."""
    if facts.sends != "update":
        raise ValueError(f"expected facts.sends='update': a Flower app sends models, got {facts.sends!r}")
    return spec_of_facts(facts, rounds)


class Order(NamedTuple):
    """What the server tells a client besides the model; losses: before rounds 0, 1, ... to this one, nan if unknown."""

    defense: str
    number: int
    rounds: int
    client: int
    counted: int
    facts: str
    sizes: list[int]
    names: list[str]
    losses: list[float]
    weight: str

    @classmethod
    def read(cls, message: Any) -> Order:
        """The order in a message."""
        record = message.content.config_records.get(OURS)
        if record is None or set(record) != set(cls._fields):
            raise MessageError("expected a strategy with leakgauge.flower.defend, got a message without its record")
        return cls(**record)

    def setting(self, layout: Layout, rule: LocalRule) -> Setting:
        """The public setting."""
        facts = registry.construct(Facts, json.loads(self.facts))
        return setting_of(layout, federation(facts, self.rounds), self.sizes, rule)

    def round(self, defense: Defense[Any, Any], setting: Setting) -> Round:
        """The round, with the state that follows from the losses."""
        known = [loss if math.isfinite(loss) else None for loss in self.losses]
        feedback = [Feedback(k, *pair) for k, pair in enumerate(pairwise(known))]
        return Round(defense, setting, replay_state(defense, setting, feedback), self.number)


def samples_of(reply: Any, weight: str) -> int:
    """The client's number of samples."""
    found = only(reply.content.metric_records, "MetricRecord")[1].get(weight)
    if not isinstance(found, int | float) or not 1 <= found <= _MOST_SAMPLES or found != int(found):
        raise MessageError(f"expected a whole number of samples as metric {weight!r}, got {found!r}")
    return int(found)


def error_of(reply: Any) -> str:
    """The last line of the error that came instead of a reply; Flower logs the whole error."""
    return [*str(reply.error.reason).split("\n"), "no reason"][-2][-200:]
