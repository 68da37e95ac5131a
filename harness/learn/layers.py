"""Building blocks of the models: the tensors a layer owns, and chains of layers."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import conv2d, linear, max_pool2d, relu

from leakgauge.harness.core.vec import Layout


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


def norm(name: str, channels: int) -> list[Slot]:
    """A normalization's scale [channels] and bias [channels]; ones and zeros to start with."""
    return [Slot(f"{name}.scale", (channels,), 0), Slot(f"{name}.bias", (channels,), -1)]


def _weight_and_bias(name: str, shape: tuple[int, ...], bias: bool) -> list[Slot]:
    """A weight [outputs, ...] and its bias [outputs], which has the weight's fan-in."""
    fan_in = math.prod(shape[1:])
    weight = Slot(f"{name}.weight", shape, fan_in)
    return [weight, Slot(f"{name}.bias", shape[:1], fan_in)] if bias else [weight]


@dataclass(frozen=True)
class Conv:
    """A convolution with a square kernel and a bias; `padding` zeros around the image, fewer than the kernel is wide.

    Raises:
        ValueError: stride or padding out of range.
    """

    owns: ClassVar[int] = 2

    name: str
    inputs: int
    outputs: int
    kernel: int
    stride: int = 1
    padding: int = 0

    def __post_init__(self) -> None:
        if self.stride < 1 or not 0 <= self.padding < self.kernel:
            raise ValueError(f"expected stride >= 1 and 0 <= padding < kernel, got {self}")

    @property
    def slots(self) -> list[Slot]:
        """Weight and bias."""
        return conv(self.name, self.inputs, self.outputs, self.kernel)

    def apply(self, h: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        """[b, inputs, height, width] to [b, outputs, ...]."""
        return conv2d(h, weight, bias, stride=self.stride, padding=self.padding)


@dataclass(frozen=True)
class Dense:
    """A dense layer with a bias."""

    owns: ClassVar[int] = 2

    name: str
    inputs: int
    outputs: int

    @property
    def slots(self) -> list[Slot]:
        """Weight and bias."""
        return dense(self.name, self.inputs, self.outputs)

    def apply(self, h: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        """[b, inputs] to [b, outputs]."""
        return linear(h, weight, bias)


@dataclass(frozen=True)
class Sigmoid:
    """1 / (1 + exp(-h)), entry by entry."""

    owns: ClassVar[int] = 0
    slots: ClassVar[tuple[Slot, ...]] = ()

    def apply(self, h: Tensor) -> Tensor:
        """Of any shape."""
        return torch.sigmoid(h)


@dataclass(frozen=True)
class Relu:
    """max(h, 0), entry by entry; the slope at zero is zero."""

    owns: ClassVar[int] = 0
    slots: ClassVar[tuple[Slot, ...]] = ()

    def apply(self, h: Tensor) -> Tensor:
        """Of any shape."""
        return relu(h)


@dataclass(frozen=True)
class MaxPool:
    """The maximum of each 2 x 2 window; an odd last row or column is left out."""

    owns: ClassVar[int] = 0
    slots: ClassVar[tuple[Slot, ...]] = ()

    def apply(self, h: Tensor) -> Tensor:
        """[..., height, width] to half of both."""
        return max_pool2d(h, 2)


@dataclass(frozen=True)
class Flatten:
    """Each example as one row."""

    owns: ClassVar[int] = 0
    slots: ClassVar[tuple[Slot, ...]] = ()

    def apply(self, h: Tensor) -> Tensor:
        """[b, ...] to [b, entries]."""
        return h.flatten(1)


@dataclass(frozen=True)
class Dropout:
    """Entries of an example of this shape are set to zero at this rate, by a mask that comes from outside."""

    owns: ClassVar[int] = 0
    slots: ClassVar[tuple[Slot, ...]] = ()

    shape: tuple[int, ...]
    rate: float


Layer = Conv | Dense | Sigmoid | Relu | MaxPool | Flatten | Dropout


@dataclass(frozen=True)
class Chain:
    """Layers, each of which takes what the one before it gives; an `Apply` of `harness.learn.models`."""

    layers: tuple[Layer, ...]

    @property
    def tensors(self) -> Tensors:
        """What the layers own, in their order."""
        return stack(*(layer.slots for layer in self.layers))

    @property
    def dropout(self) -> tuple[tuple[tuple[int, ...], float], ...]:
        """(shape, rate) of each dropout."""
        return tuple((layer.shape, layer.rate) for layer in self.layers if isinstance(layer, Dropout))

    @property
    def smooth(self) -> bool:
        """Whether the scores are a smooth function of the inputs: ReLU and max-pooling have kinks."""
        return not any(isinstance(layer, (Relu, MaxPool)) for layer in self.layers)

    def __call__(self, tensors: Sequence[Tensor], x: Tensor, keep: Sequence[Tensor] | None) -> Tensor:
        """Scores [b, classes] of x [b, *input_shape]; `keep` as in `Model`."""
        h, rest, masks = x, iter(tensors), iter(keep or ())
        for layer in self.layers:
            if not isinstance(layer, Dropout):
                h = layer.apply(h, *itertools.islice(rest, layer.owns))
            elif keep is not None:
                h = h * next(masks).to(h)  # masks are drawn on the CPU, h may be elsewhere
        return h


def dense_stack(widths: Sequence[int]) -> list[Layer]:
    """Rows through dense layers with ReLU between them, `fc1` from widths[0] to widths[1] and so on."""
    layers: list[Layer] = [Flatten()]
    for number, (inputs, outputs) in enumerate(itertools.pairwise(widths), start=1):
        layers += [Dense(f"fc{number}", inputs, outputs), Relu()]
    return layers[:-1]
