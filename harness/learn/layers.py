"""Building blocks of the models: the tensors of a layer, and chains of layers."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import conv2d, linear, max_pool2d, relu, softplus

from leakgauge.harness.core.vec import Layout


class Slot(NamedTuple):
    """One tensor of a layer; `fan_in` as in `Model`."""

    name: str
    shape: tuple[int, ...]
    fan_in: int


class Tensors(NamedTuple):
    """The tensors of a stack of layers, as `Model` takes them."""

    layout: Layout
    fan_in: tuple[int, ...]


def stack(*layers: Sequence[Slot]) -> Tensors:
    """All tensors of the layers, in order."""
    slots = [slot for layer in layers for slot in layer]
    layout = Layout(tuple(slot.name for slot in slots), tuple(slot.shape for slot in slots))
    return Tensors(layout, tuple(slot.fan_in for slot in slots))


def weights(name: str, *shape: int, bias: bool = True) -> list[Slot]:
    """A weight of this shape, [outputs, inputs, ...], and by default a bias [outputs] with the weight's fan-in."""
    fan_in = math.prod(shape[1:])
    weight = Slot(f"{name}.weight", shape, fan_in)
    return [weight, Slot(f"{name}.bias", shape[:1], fan_in)] if bias else [weight]


def norm(name: str, channels: int, *, running: bool = False) -> list[Slot]:
    """The scale [channels] of a normalization, initially ones, and its bias [channels], initially zeros.

    Args:
        running: also the running mean and variance [channels] of a batch norm, initially zeros and ones.
    """
    slots = [Slot(f"{name}.scale", (channels,), 0), Slot(f"{name}.bias", (channels,), -1)]
    if running:
        slots += [Slot(f"{name}.running_mean", (channels,), -1), Slot(f"{name}.running_var", (channels,), 0)]
    return slots


class BatchStatistics(torch.autograd.Function):
    """A term of the loss with the value 0; running statistics have a gradient in it, themselves less those of a batch.

    It takes (running mean, running variance, mean, variance), each [channels]. The gradient is differentiable in all
    four; the statistics of the batch get none themselves, so that no other parameter notices the term.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(mean: Tensor, variance: Tensor, now_mean: Tensor, now_variance: Tensor) -> Tensor:
        """Return 0."""
        return mean.new_zeros(())

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        """Keep the statistics."""
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor, Tensor, None, None]:
        """The differences."""
        mean, variance, now_mean, now_variance = ctx.saved_tensors
        return slope * (mean - now_mean), slope * (variance - now_variance), None, None


@dataclass(frozen=True)
class Conv:
    """A convolution with a square kernel and a bias; the image gets a border of `padding` zeros.

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
        return weights(self.name, self.outputs, self.inputs, self.kernel, self.kernel)

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
        return weights(self.name, self.outputs, self.inputs)

    def apply(self, h: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        """[b, inputs] to [b, outputs]."""
        return linear(h, weight, bias)


@dataclass(frozen=True)
class _WithoutTensors:
    """A layer that owns no tensors."""

    owns: ClassVar[int] = 0
    slots: ClassVar[tuple[Slot, ...]] = ()


class Sigmoid(_WithoutTensors):
    """1 / (1 + exp(-h)), entry by entry."""

    def apply(self, h: Tensor) -> Tensor:
        """[...] to the same shape."""
        return torch.sigmoid(h)


class Relu(_WithoutTensors):
    """max(h, 0), entry by entry; the slope at zero is zero."""

    def apply(self, h: Tensor) -> Tensor:
        """[...] to the same shape."""
        return relu(h)


@dataclass(frozen=True)
class SoftRelu(_WithoutTensors):
    """log(1 + exp(h / width)) width, entry by entry: ReLU with a bend of this width instead of a kink."""

    width: float

    def apply(self, h: Tensor) -> Tensor:
        """[...] to the same shape."""
        return softplus(h / self.width, threshold=50) * self.width


class MaxPool(_WithoutTensors):
    """The maximum of each 2 x 2 window, without an odd last row or column."""

    def apply(self, h: Tensor) -> Tensor:
        """[..., height, width] to half of both."""
        return max_pool2d(h, 2)


class Flatten(_WithoutTensors):
    """Each example as one row."""

    def apply(self, h: Tensor) -> Tensor:
        """[b, ...] to [b, entries]."""
        return h.flatten(1)


@dataclass(frozen=True)
class Dropout(_WithoutTensors):
    """Sets entries of examples of this shape to zero at this rate; the caller passes the mask."""

    shape: tuple[int, ...]
    rate: float


Layer = Conv | Dense | Sigmoid | Relu | SoftRelu | MaxPool | Flatten | Dropout


@dataclass(frozen=True)
class Chain:
    """Layers that each take the output of the layer before; an `Apply` of `harness.learn.models`."""

    layers: tuple[Layer, ...]

    @property
    def tensors(self) -> Tensors:
        """The tensors of the layers, in their order."""
        return stack(*(layer.slots for layer in self.layers))

    @property
    def dropout(self) -> tuple[tuple[tuple[int, ...], float], ...]:
        """(shape, rate) of each dropout."""
        return tuple((layer.shape, layer.rate) for layer in self.layers if isinstance(layer, Dropout))

    @property
    def smooth(self) -> bool:
        """Whether the scores are a smooth function of the inputs: ReLU and max-pooling have kinks."""
        return not any(isinstance(layer, (Relu, MaxPool)) for layer in self.layers)

    def softened(self, width: float) -> Chain:
        """The same layers with `SoftRelu` for ReLU."""
        return Chain(tuple(SoftRelu(width) if isinstance(layer, Relu) else layer for layer in self.layers))

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
    """Flattened inputs through dense layers with ReLU between them: `fc1` from widths[0] to widths[1], and so on."""
    layers: list[Layer] = [Flatten()]
    for number, (inputs, outputs) in enumerate(itertools.pairwise(widths), start=1):
        layers += [Dense(f"fc{number}", inputs, outputs), Relu()]
    return layers[:-1]
