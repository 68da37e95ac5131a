"""The layers of a network."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import avg_pool2d, conv2d, group_norm, linear, max_pool2d, pad, relu, softplus

from leakgauge.harness.core.contract import InTraining

TINY = 1e-5
"""Constant added to a variance, as in torch."""


class Slot(NamedTuple):
    """One tensor of a layer; `fan_in` as in `Structure.fan_in`."""

    name: str
    shape: tuple[int, ...]
    fan_in: int


def weights(name: str, *shape: int, bias: bool = True) -> list[Slot]:
    """A weight of this shape, [outputs, inputs, ...], and by default a bias [outputs] with the weight's fan-in."""
    fan_in = math.prod(shape[1:])
    weight = Slot(f"{name}.weight", shape, fan_in)
    return [weight, Slot(f"{name}.bias", shape[:1], fan_in)] if bias else [weight]


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


class Layer:
    """A layer; `apply` maps its input [b, ...] and its tensors to its output."""

    smooth: ClassVar[bool] = True
    """Whether the output is a smooth function of the input: ReLU and max-pooling have kinks."""

    apply: Callable[..., Tensor]

    @property
    def slots(self) -> Sequence[Slot]:
        """Its tensors, in the order in which `apply` takes them."""
        return ()

    @functools.cached_property
    def owns(self) -> int:
        """Number of its tensors."""
        return len(self.slots)


@dataclass(frozen=True)
class Conv(Layer):
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
    def slots(self) -> list[Slot]:
        """Weight and, if present, bias."""
        return weights(self.name, self.outputs, self.inputs, self.kernel, self.kernel, bias=self.bias)

    def apply(self, h: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """[b, inputs, height, width] to [b, outputs, ...]."""
        return conv2d(h, weight, bias, stride=self.stride, padding=self.padding)


@dataclass(frozen=True)
class Dense(Layer):
    """A dense layer."""

    name: str
    inputs: int
    outputs: int
    bias: bool = True

    @property
    def slots(self) -> list[Slot]:
        """Weight and, if present, bias."""
        return weights(self.name, self.outputs, self.inputs, bias=self.bias)

    def apply(self, h: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """[b, inputs] to [b, outputs]."""
        return linear(h, weight, bias)


@dataclass(frozen=True)
class Norm(Layer):
    """A normalization of images, then a scale and a bias for each channel.

    Args:
        groups: number of groups of channels; the entries of a group in one image are normalized together. 0: a batch
            norm, which uses the statistics of the batch in training and running statistics otherwise. A negative
            running variance, possible through a defense's noise, counts as 0.
        eps: added to a variance.
        momentum: of a batch norm of torch, whose running variance follows the unbiased variance of a batch; None: it
            follows the biased one (Ioffe and Szegedy 2015).
        rate: factor of the gradient in the running statistics.
    """

    name: str
    channels: int
    groups: int = 0
    eps: float = TINY
    momentum: float | None = None
    rate: float = 1.0

    @property
    def slots(self) -> list[Slot]:
        """[channels] each: scale (initially 1) and bias (0); of a batch norm also running mean (0) and variance (1)."""
        initial = {"weight": 0, "bias": -1} | ({} if self.groups else {"running_mean": -1, "running_var": 0})
        return [Slot(f"{self.name}.{name}", (self.channels,), fan_in) for name, fan_in in initial.items()]

    def apply(self, h: Tensor, *own: Tensor) -> Tensor:
        """[b, channels, height, width] to the same shape."""
        scale, bias, *running = own
        if self.groups:
            return group_norm(h, self.groups, scale, bias, self.eps)
        mean, variance = running
        return normal(h, mean, variance.clamp(min=0.0), scale, bias, self.eps)

    def by_batch(self, h: Tensor, *own: Tensor) -> InTraining:
        """As `apply`, but by the statistics of h, with the loss term that moves the running statistics toward them."""
        if self.groups:
            return InTraining(self.apply(h, *own))
        scale, bias, *running = own
        mean, variance = now = h.mean((0, 2, 3)), h.var((0, 2, 3), correction=0)
        shown = (mean, variance * self.unbiased(h.numel() // h.shape[1], tuple(h.shape)))
        term: Tensor = BatchStatistics.apply(*running, *shown)  # type: ignore[no-untyped-call]
        return InTraining(normal(h, *now, scale, bias, self.eps), self.rate * term)

    def unbiased(self, count: int, shape: tuple[int, ...]) -> float:
        """The factor from the biased variance of `count` entries of a channel to the one that the statistics follow.

        Raises:
            ValueError: the variance is unbiased, and there is only one entry in inputs of this shape.
        """
        if self.momentum is not None and count == 1:
            raise ValueError(f"a batch norm needs more than one value per channel, got inputs {shape}")
        return 1.0 if self.momentum is None else count / (count - 1)


def normal(
    h: Tensor, mean: Tensor, variance: Tensor, scale: Tensor | None, bias: Tensor | None, eps: float = TINY
) -> Tensor:
    """Each channel of h [b, channels, ...], normalized by this mean and variance."""
    shape = (-1, *(1 for _ in h.shape[2:]))
    factor = (variance + eps).rsqrt()
    factor = factor if scale is None else scale * factor
    normalized = (h - mean.view(shape)) * factor.view(shape)
    return normalized if bias is None else normalized + bias.view(shape)


@dataclass(frozen=True)
class Sigmoid(Layer):
    """1 / (1 + exp(-h)), entry by entry."""

    apply = staticmethod(torch.sigmoid)


@dataclass(frozen=True)
class Tanh(Layer):
    """The hyperbolic tangent, entry by entry."""

    apply = staticmethod(torch.tanh)


@dataclass(frozen=True)
class Relu(Layer):
    """max(h, 0), entry by entry; the slope at zero is zero."""

    smooth: ClassVar[bool] = False
    apply = staticmethod(relu)


@dataclass(frozen=True)
class SoftRelu(Layer):
    """width * log(1 + exp(h / width)), entry by entry: ReLU with a smooth bend of this width instead of a kink."""

    width: float

    def apply(self, h: Tensor) -> Tensor:
        """[...] to the same shape."""
        return softplus(h / self.width, threshold=50) * self.width


@dataclass(frozen=True)
class MaxPool(Layer):
    """The maximum of each square window; rows and columns that fill no window are dropped."""

    size: int = 2
    stride: int = 2
    padding: int = 0
    smooth: ClassVar[bool] = False

    def apply(self, h: Tensor) -> Tensor:
        """[b, channels, height, width] to [b, channels, ...]."""
        return max_pool2d(h, self.size, self.stride, self.padding)


@dataclass(frozen=True)
class MeanPool(Layer):
    """The mean of each square window; rows and columns that fill no window are dropped, a border counts as zeros."""

    size: int
    stride: int
    padding: int = 0

    def apply(self, h: Tensor) -> Tensor:
        """[b, channels, height, width] to [b, channels, ...]."""
        return avg_pool2d(h, self.size, self.stride, self.padding)


@dataclass(frozen=True)
class Flatten(Layer):
    """Each example as one row: [b, ...] to [b, entries]."""

    apply = staticmethod(partial(torch.flatten, start_dim=1))


@dataclass(frozen=True)
class Mean(Layer):
    """The mean of each channel's map: [b, channels, height, width] to [b, channels]."""

    apply = staticmethod(partial(torch.mean, dim=(2, 3)))


@dataclass(frozen=True)
class Widen(Layer):
    """Every stride-th row and column, with channels of zeros before and after: a shortcut without parameters.

    Source: option A of He et al. 2016.
    """

    stride: int
    before: int
    after: int

    def apply(self, h: Tensor) -> Tensor:
        """[b, channels, height, width] to [b, before + channels + after, ...]."""
        return pad(h[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, self.before, self.after))


@dataclass(frozen=True)
class Margin(Layer):
    """The scores (-h / 2, h / 2) of two classes, of which the second exceeds the first by h."""

    def apply(self, h: Tensor) -> Tensor:
        """[b, 1] to [b, 2]."""
        half = h / 2
        return torch.cat([-half, half], 1)


@dataclass(frozen=True)
class LogSoftmax(Layer):
    """The logarithms of the softmax of scores, which have the same cross-entropy as the scores."""

    apply = staticmethod(partial(torch.log_softmax, dim=1))


@dataclass(frozen=True, eq=False)
class Scale(Layer):
    """The original inputs of inputs that are stored as (x - low) / span; low and span are broadcast over one input."""

    low: Tensor
    span: Tensor

    def apply(self, h: Tensor) -> Tensor:
        """The original inputs of stored inputs h."""
        return h * self.span.to(h) + self.low.to(h)

    def stored(self, h: Tensor) -> Tensor:
        """The stored inputs of original inputs h."""
        return (h - self.low.to(h)) / self.span.to(h)

    def after(self, low: Tensor, span: Tensor) -> Scale:
        """The scale of inputs that are stored as (x - low) / span, where x are the stored inputs of this one."""
        return Scale(low * self.span + self.low, span * self.span)


UNSCALED = Scale(torch.zeros(()), torch.ones(()))


@dataclass(frozen=True)
class Dropout(Layer):
    """A dropout of this rate on examples of this shape; the caller passes the mask."""

    shape: tuple[int, ...]
    rate: float


@dataclass(frozen=True)
class Sampled(Layer):
    """Normal codes: the encoder's outputs hold their means and, before a softplus, their standard deviations.

    Args:
        width: k, entries of a code.
        weight: of the codes' divergence from standard normal ones in the loss, per bit.
        drawn: the noise [n, width] of up to n records to which no other noise is given; None: none.
    """

    width: int
    weight: float
    drawn: Tensor | None = field(default=None, compare=False)

    def _parts(self, h: Tensor) -> tuple[Tensor, Tensor]:
        """Means and standard deviations, [b, width] each."""
        return h[:, : self.width], softplus(h[:, self.width :])

    def apply(self, h: Tensor, noise: Tensor | None = None) -> Tensor:
        """[b, 2 width] to codes [b, width], which without standard normal noise [b, width] are their means."""
        mean, std = self._parts(h)
        if noise is None and self.drawn is not None:
            noise = self.drawn[: len(h)].to(h)
        return mean if noise is None else mean + std * noise

    def divergence(self, h: Tensor) -> Tensor:
        """[b] the weighted Kullback-Leibler divergence of each code from a standard normal one."""
        mean, std = self._parts(h)
        return self.weight / math.log(4) * (mean.square() + std.square() - 2 * std.log() - 1).sum(1)


@dataclass(frozen=True)
class Block(Layer):
    """A residual block: the sum of the outputs of two paths of layers; a shortcut without layers is the input itself.

    Its tensors are those of the layers, then those of the shortcut.
    """

    layers: tuple[Layer, ...]
    shortcut: tuple[Layer, ...] = ()

    @property
    def slots(self) -> list[Slot]:
        """The tensors of both paths, in order."""
        return [slot for layer in self.layers + self.shortcut for slot in layer.slots]


def dense_stack(widths: Sequence[int]) -> list[Layer]:
    """Flattening, then dense layers with ReLU between them: `fc1` from widths[0] to widths[1], and so on."""
    layers: list[Layer] = [Flatten()]
    for number, (inputs, outputs) in enumerate(itertools.pairwise(widths), start=1):
        layers += [Dense(f"fc{number}", inputs, outputs), Relu()]
    return layers[:-1]
