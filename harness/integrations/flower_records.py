"""Flower: what a message holds, read with numpy alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from logging import getLogger
from typing import Any

import numpy as np
import numpy.typing as npt

from leakgauge.harness.core.cell import FederationSpec
from leakgauge.harness.core.errors import MessageError
from leakgauge.harness.core.layout import Layout
from leakgauge.harness.federation.recorder import Facts, spec_of_facts

LOG = getLogger("flwr")
OURS = "leakgauge"
"""The name of leakgauge's record in a message, and of the array that holds a sealed message."""

HOOKED = "leakgauge_hook"
"""The attribute of a strategy that holds the object in front of its methods."""

_MOST_SAMPLES = 2**53

Numbers = npt.NDArray[np.float32]
CallNext = Callable[[Any, Any], Any]
Mod = Callable[[Any, Any, CallNext], Any]


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
    found = floats(record) if names is None else names
    if not found or not set(found) <= set(record):
        raise MessageError(f"expected arrays of floats, among them those of the first model, got {', '.join(record)}")
    return Layout(tuple(found), tuple(tuple(record[name].shape) for name in found))


def floats(record: Any) -> list[str]:
    """The names of a record's arrays of floats; numpy reads the bytes of a bfloat16 as two bytes without a type."""
    return [name for name, array in record.items() if "float" in str(array.dtype) or str(array.dtype) == "|V2"]


def numbers_of(array: Any) -> Any:
    """A record's array as a numpy array; bfloat16 as float32.

    Raises:
        MessageError: its bytes, which may come from an untrusted client, are not an array.
    """
    try:
        held = array if isinstance(array, np.ndarray) else array.numpy()
    except Exception as error:
        raise MessageError(f"expected an array, got bytes that are not an array: {type(error).__name__}") from error
    if not isinstance(held, np.ndarray):
        raise MessageError(f"expected an array, got a {type(held).__name__}")
    bfloat16 = held.dtype.kind == "V" and held.dtype.itemsize == 2
    return (held.view(np.uint16).astype(np.uint32) << 16).view(np.float32) if bfloat16 else held


def vector_of(record: Any, layout: Layout) -> Numbers:
    """[d] float32: the arrays of a record that are in the layout.

    Raises:
        MessageError: an array is missing or has another shape.
    """
    parts = []
    for name, shape in zip(layout.names, layout.shapes, strict=True):
        held = numbers_of(record[name]) if name in record else np.empty(0)
        if held.shape != shape or held.dtype.kind != "f":
            raise MessageError(f"expected the array {name!r} of floats and shape {shape}, got {held.shape}")
        parts.append(held.astype(np.float32).reshape(-1))
    return np.concatenate(parts)


def federation(facts: Facts, rounds: int) -> FederationSpec:
    """The federation that these facts describe."""
    if facts.sends != "update":
        raise ValueError(f"expected facts.sends='update': a Flower app sends models, got {facts.sends!r}")
    return spec_of_facts(facts, rounds)


def samples_of(reply: Any, weight: str) -> int:
    """The client's number of samples."""
    return whole(only(reply.content.metric_records, "MetricRecord")[1].get(weight), weight)


def whole(found: Any, weight: str) -> int:
    """A number of samples that a client states as metric `weight`; MessageError if it is none."""
    if not isinstance(found, int | float) or not 1 <= found <= _MOST_SAMPLES or found != int(found):
        raise MessageError(f"expected a whole number of samples as metric {weight!r}, got {found!r}")
    return int(found)


def error_of(reply: Any) -> str:
    """The last line of the error that came instead of a reply; Flower logs the whole error."""
    return [*str(reply.error.reason).split("\n"), "no reason"][-2][-200:]
