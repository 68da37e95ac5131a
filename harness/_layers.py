"""Building blocks of the models: the tensors a layer owns, plus the few functions that several models share."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor
from torch.nn.functional import linear, relu

from harness.vec import Layout


class Slot(NamedTuple):
    """One tensor of a layer; `fan_in` as in `Model`."""

    name: str
    shape: tuple[int, ...]
    fan_in: int


class Tensors(NamedTuple):
    """What a stack of layers owns, as `Model` wants it."""

    layout: Layout
    fan_in: tuple[int, ...]


def stack(*layers: Sequence[Slot]) -> Tensors:
    """All tensors of the layers, in order."""
    slots = [slot for layer in layers for slot in layer]
    layout = Layout(tuple(slot.name for slot in slots), tuple(slot.shape for slot in slots))
    return Tensors(layout, tuple(slot.fan_in for slot in slots))


def conv(name: str, inputs: int, outputs: int, kernel: int, *, bias: bool = True) -> list[Slot]:
    """A convolution with a square kernel: weight [outputs, inputs, kernel, kernel], bias [outputs]."""
    return _weight_and_bias(name, (outputs, inputs, kernel, kernel), bias)


def dense(name: str, inputs: int, outputs: int, *, bias: bool = True) -> list[Slot]:
    """A dense layer: weight [outputs, inputs], bias [outputs]."""
    return _weight_and_bias(name, (outputs, inputs), bias)


def dense_stack(widths: Sequence[int]) -> list[Slot]:
    """Dense layers with biases, `fc1` from widths[0] to widths[1] and so on."""
    pairs = enumerate(itertools.pairwise(widths), start=1)
    return [slot for number, (inputs, outputs) in pairs for slot in dense(f"fc{number}", inputs, outputs)]


def norm(name: str, channels: int) -> list[Slot]:
    """A normalisation's scale [channels] and bias [channels]; ones and zeros to start with."""
    return [Slot(f"{name}.scale", (channels,), 0), Slot(f"{name}.bias", (channels,), -1)]


def _weight_and_bias(name: str, shape: tuple[int, ...], bias: bool) -> list[Slot]:
    """A weight [outputs, ...] and its bias [outputs], which has the weight's fan-in."""
    fan_in = math.prod(shape[1:])
    weight = Slot(f"{name}.weight", shape, fan_in)
    return [weight, Slot(f"{name}.bias", shape[:1], fan_in)] if bias else [weight]


def apply_dense_stack(tensors: Sequence[Tensor], h: Tensor) -> Tensor:
    """h [b, ...] through W0, b0, W1, b1, ... with ReLU between the layers; [b, outputs]."""
    h = h.flatten(1)
    for weight, bias in zip(tensors[:-2:2], tensors[1:-2:2], strict=True):
        h = relu(linear(h, weight, bias))
    return linear(h, tensors[-2], tensors[-1])


def drop(h: Tensor, keep: Sequence[Tensor] | None, number: int) -> Tensor:
    """h [b, ...] under dropout mask `number`; keep=None: unchanged."""
    return h if keep is None else h * keep[number].to(h)  # masks are drawn on the CPU, h may be elsewhere
