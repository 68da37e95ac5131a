"""Building blocks of the models: the tensors of a layer, and chains of layers."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import conv2d, group_norm, linear, max_pool2d, pad, relu, softplus

from leakgauge.harness.core.contract import InTraining
from leakgauge.harness.core.vec import Layout

TINY = 1e-5
"""Constant added to a variance, as in torch."""


class Slot(NamedTuple):
    """One tensor of a layer; `fan_in` as in `Model`."""

    name: str
    shape: tuple[int, ...]
    fan_in: int


class Tensors(NamedTuple):
    """The tensors of a stack of layers, in the form that `Model` takes."""

    layout: Layout
    fan_in: tuple[int, ...]


def stack(*layers: Sequence[Slot]) -> Tensors:
    """All tensors of the layers, in order."""
    slots = [slot for layer in layers for slot in layer]
    layout = Layout(tuple(slot.name for slot in slots), tuple(slot.shape for slot in slots))
    return Tensors(layout, tuple(slot.fan_in for slot in slots))


def weights(name: str, *shape: int, bias: bool = True) -> list[Slot]:
    """A weight of this shape, [outputs, inputs, ...], and by default a bias [outputs] with the weight's fan-in."""
    fan_in, of = math.prod(shape[1:]), f"{name}." if name else ""
    weight = Slot(f"{of}weight", shape, fan_in)
    return [weight, Slot(f"{of}bias", shape[:1], fan_in)] if bias else [weight]


class BatchStatistics(torch.autograd.Function):
    """A loss term with the value 0; its gradient in the running statistics is running minus batch statistics.

    It takes (running mean, running variance, mean, variance), each [channels]. The gradient is differentiable in all
    four; the statistics of the batch themselves get no gradient, so the term affects no other parameter.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(mean: Tensor, variance: Tensor, now_mean: Tensor, now_variance: Tensor) -> Tensor:
        """Return 0."""
        return mean.new_zeros(())

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        """Save the statistics for the backward pass."""
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor, Tensor, None, None]:
        """The differences between running and batch statistics."""
        mean, variance, now_mean, now_variance = ctx.saved_tensors
        return slope * (mean - now_mean), slope * (variance - now_variance), None, None


@dataclass(frozen=True)
class Conv:
    """A convolution with a square kernel; the image gets a border of `padding` zeros.

    Raises:
        ValueError: stride or padding out of range.
    """

    name: str
    inputs: int
    outputs: int
    kernel: int
    stride: int = 1
    padding: int = 0
    bias: bool = True

    def __post_init__(self) -> None:
        if self.stride < 1 or not 0 <= self.padding < self.kernel:
            raise ValueError(f"expected stride >= 1 and 0 <= padding < kernel, got {self}")

    @property
    def owns(self) -> int:
        """Number of tensors: weight and, if present, bias."""
        return 1 + self.bias

    @property
    def slots(self) -> list[Slot]:
        """Weight and, if present, bias."""
        return weights(self.name, self.outputs, self.inputs, self.kernel, self.kernel, bias=self.bias)

    def apply(self, h: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
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
class Norm:
    """A normalization of images, then a scale and a bias for each channel.

    groups: number of groups of channels; the entries of a group in one image are normalized together. 0: a batch norm,
    which uses the statistics of the batch in training and running statistics otherwise. A negative running variance,
    possible through a defense's noise, counts as 0.
    """

    name: str
    channels: int
    groups: int = 0

    @property
    def owns(self) -> int:
        """Number of tensors: scale and bias; a batch norm also has a running mean and variance."""
        return 2 if self.groups else 4

    @property
    def slots(self) -> list[Slot]:
        """[channels] each: scale (initially 1) and bias (0); of a batch norm also running mean (0) and variance (1)."""
        names = ("scale", "bias", "running_mean", "running_var")
        initial = zip(names, (0, -1, -1, 0), strict=True)
        return [Slot(f"{self.name}.{name}", (self.channels,), fan_in) for name, fan_in in initial][: self.owns]

    def apply(self, h: Tensor, *own: Tensor) -> Tensor:
        """[b, channels, height, width] to the same shape."""
        scale, bias, *running = own
        if self.groups:
            return group_norm(h, self.groups, scale, bias)
        mean, variance = running
        return _normal(h, mean, variance.clamp(min=0.0), scale, bias)

    def by_batch(self, h: Tensor, *own: Tensor) -> InTraining:
        """As `apply`, but by the statistics of h, with the loss term that moves the running statistics toward them."""
        if self.groups:
            return InTraining(self.apply(h, *own))
        scale, bias, *running = own
        now = h.mean((0, 2, 3)), h.var((0, 2, 3), correction=0)
        term: Tensor = BatchStatistics.apply(*running, *now)  # type: ignore[no-untyped-call]
        return InTraining(_normal(h, *now, scale, bias), term)


def _normal(h: Tensor, mean: Tensor, variance: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
    """Each channel of h, normalized by this mean and variance."""
    factor = scale * (variance + TINY).rsqrt()
    return (h - mean[:, None, None]) * factor[:, None, None] + bias[:, None, None]


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
    """width * log(1 + exp(h / width)), entry by entry: ReLU with a smooth bend of this width instead of a kink."""

    width: float

    def apply(self, h: Tensor) -> Tensor:
        """[...] to the same shape."""
        return softplus(h / self.width, threshold=50) * self.width


class MaxPool(_WithoutTensors):
    """The maximum of each 2 x 2 window; an odd last row or column is dropped."""

    def apply(self, h: Tensor) -> Tensor:
        """[..., height, width] to half of both."""
        return max_pool2d(h, 2)


class Flatten(_WithoutTensors):
    """Each example as one row."""

    def apply(self, h: Tensor) -> Tensor:
        """[b, ...] to [b, entries]."""
        return h.flatten(1)


class Mean(_WithoutTensors):
    """The mean of each channel's map."""

    def apply(self, h: Tensor) -> Tensor:
        """[b, channels, height, width] to [b, channels]."""
        return h.mean((2, 3))


@dataclass(frozen=True, eq=False)
class Scale(_WithoutTensors):
    """The original inputs of inputs that are stored as (x - low) / span; low and span are broadcast over one input."""

    low: Tensor
    span: Tensor

    def apply(self, h: Tensor) -> Tensor:
        """The original inputs of stored inputs h."""
        return h * self.span.to(h) + self.low.to(h)

    def stored(self, h: Tensor) -> Tensor:
        """The stored inputs of original inputs h."""
        return (h - self.low.to(h)) / self.span.to(h)


@dataclass(frozen=True)
class Dropout(_WithoutTensors):
    """A dropout of this rate on examples of this shape; the caller passes the mask."""

    shape: tuple[int, ...]
    rate: float


Layer = Conv | Dense | Norm | Sigmoid | Relu | SoftRelu | MaxPool | Mean | Flatten | Scale | Dropout


@dataclass(frozen=True)
class Chain:
    """Layers, each applied to the output of the previous layer, a `Dense` at the end; an `Apply` of `learn.models`."""

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


@dataclass(frozen=True)
class Block:
    """Layers with a parameter-free shortcut that adds their input to their output.

    If the layers add channels (`new` of them), the shortcut takes every second row and column, and its new channels
    are zero (option A of He et al. 2016).
    """

    layers: tuple[Layer, ...]
    new: int = 0

    @property
    def owns(self) -> int:
        """Number of tensors of the layers."""
        return sum(layer.owns for layer in self.layers)

    @property
    def slots(self) -> list[Slot]:
        """The tensors of the layers, in order."""
        return [slot for layer in self.layers for slot in layer.slots]

    @property
    def stride(self) -> int:
        """Stride of the shortcut."""
        return 2 if self.new else 1

    def shortcut(self, h: Tensor) -> Tensor:
        """The output of the shortcut for the input h."""
        return pad(h[:, :, ::2, ::2], (0, 0, 0, 0, 0, self.new)) if self.new else h


@dataclass(frozen=True)
class Network:
    """Layers and residual blocks in sequence; not a `Chain`, because users of `Chain` expect a single path."""

    layers: tuple[Layer | Block, ...]

    @property
    def tensors(self) -> Tensors:
        """The tensors of the layers, in their order."""
        return stack(*(layer.slots for layer in self.layers))

    def __call__(self, tensors: Sequence[Tensor], x: Tensor, keep: Sequence[Tensor] | None) -> Tensor:
        """[b, classes] scores of x [b, *input_shape]."""
        return self._through(self.layers, x, iter(tensors), None)

    def in_training(self, tensors: Sequence[Tensor], x: Tensor, keep: Sequence[Tensor] | None) -> InTraining:
        """As a call, but batch norms use the statistics of x."""
        terms: list[Tensor] = []
        scores = self._through(self.layers, x, iter(tensors), terms)
        return InTraining(scores, torch.stack(terms).sum() if terms else None)

    def _through(
        self, layers: Sequence[Layer | Block], h: Tensor, tensors: Iterator[Tensor], terms: list[Tensor] | None
    ) -> Tensor:
        """The output of the layers; in training, their loss terms are appended to `terms`."""
        for layer in layers:
            if isinstance(layer, Block):
                h = self._through(layer.layers, h, tensors, terms) + layer.shortcut(h)
            elif isinstance(layer, Norm) and terms is not None:
                h, term = layer.by_batch(h, *itertools.islice(tensors, layer.owns))
                terms += [] if term is None else [term]
            elif not isinstance(layer, Dropout):
                h = layer.apply(h, *itertools.islice(tensors, layer.owns))
        return h


@dataclass(frozen=True)
class Trained:
    """`Network.in_training` for `Model`; unlike bound methods, instances of equal networks are equal."""

    network: Network

    def __call__(self, tensors: Sequence[Tensor], x: Tensor, keep: Sequence[Tensor] | None) -> InTraining:
        """`Network.in_training`."""
        return self.network.in_training(tensors, x, keep)


def dense_stack(widths: Sequence[int]) -> list[Layer]:
    """Flattening, then dense layers with ReLU between them: `fc1` from widths[0] to widths[1], and so on."""
    layers: list[Layer] = [Flatten()]
    for number, (inputs, outputs) in enumerate(itertools.pairwise(widths), start=1):
        layers += [Dense(f"fc{number}", inputs, outputs), Relu()]
    return layers[:-1]
