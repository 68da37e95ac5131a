"""First gradients of a chain of layers by hand, and what a slope in them is in the inputs.

m instances share the parameters theta, but not the direction v in which their gradient g is pulled back. <v, g> is the
derivative of the loss along v, so its gradient in the inputs takes one pass forward with the tangents of v, and one
pass back. The slopes of the loss that the first gradient has computed are the slopes of <v, g> in the tangents, so the
pass back is one of values alone: 19 products in all for the three convolutions of the LeNet of DLG.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn.functional import linear, max_pool2d

from leakgauge.attacks._engine.kernel_conv import ConvStep, Filters
from leakgauge.harness.core.vec import Layout, Vector
from leakgauge.harness.learn.layers import Chain, Conv, Dense, Dropout, Flatten, MaxPool, Relu, Sigmoid


class Pulled(NamedTuple):
    """Slopes in the inputs x [m, b, *input_shape] and in the labels y [m, b, classes]."""

    x: Tensor
    y: Tensor


class Kernel:
    """Gradients of the mean softmax cross-entropy of a chain, dropout off, at fixed parameters.

    Args:
        chain: its output are rows of scores.
        params: [d]. Not modified; a later change of them is not seen.

    Not for several threads at once: windows of maps are cut out of scratch.
    """

    def __init__(self, chain: Chain, layout: Layout, params: Vector) -> None:
        self._layout = layout
        tensors = iter(layout.split(params.detach().clone()))
        layers = [layer for layer in chain.layers if not isinstance(layer, Dropout)]
        self._makers = [_maker(layer, *(next(tensors) for _ in range(layer.owns))) for layer in layers]
        self._owns = [layer.owns for layer in layers]
        self._first = next(position for position, owns in enumerate(self._owns) if owns)

    @torch.no_grad()
    def trace(self, x: Tensor, y: Tensor) -> tuple[Tensor, Trace]:
        """Gradients [m, d], the mean over the b inputs of each instance, and what pulls a slope in them back.

        Args:
            x: [m, b, *input_shape], not to be modified before the trace was used.
            y: [m, b, classes] probabilities.
        """
        steps: list[_Step] = [make() for make in self._makers]
        h = x.transpose(1, 2)
        for step in steps:
            h = step.forward(h)
        head = _Head(h, y)
        gradients = h.new_empty(len(x), self._layout.dim)
        into, d = self._split(gradients), head.slope
        for position in reversed(range(self._first, len(steps))):
            d = steps[position].backward(d, into[position], position > self._first)
        return gradients, Trace(steps, head, self._split, self._first)

    def _split(self, vectors: Tensor) -> list[list[Tensor]]:
        """Views of the rows of vectors [m, d], one list a layer."""
        tensors = iter(self._layout.split(vectors))
        return [[next(tensors) for _ in range(owns)] for owns in self._owns]


class Trace:
    """What one evaluation of a `Kernel` keeps; `pull` may be called any number of times."""

    def __init__(self, steps: Sequence[_Step], head: _Head, split: _Split, first: int) -> None:
        self._steps, self._head, self._split, self._first = steps, head, split, first

    @torch.no_grad()
    def pull(self, slopes: Tensor) -> Pulled:
        """The slopes of sum_i <slopes_i, gradients_i>, slopes [m, d] held fixed."""
        along = self._split(slopes)
        t: Tensor | None = None
        for step, directions in zip(self._steps[self._first :], along[self._first :], strict=True):
            t = step.tangent(t, directions)
        assert t is not None  # the first of these layers has parameters
        a, y = self._head.pull(t)
        for step in reversed(self._steps):
            a = step.reverse(a)
        return Pulled(a.transpose(1, 2), y)


class _Split(Protocol):
    """See `Kernel._split`."""

    def __call__(self, vectors: Tensor) -> list[list[Tensor]]: ...


class _Step(Protocol):
    """A layer in one evaluation; what its passes find is kept for those that follow.

    Maps are [m, channels, b, height, width], so that what an instance's weights are multiplied with lies together;
    rows are [m, b, entries].
    """

    def forward(self, h: Tensor) -> Tensor:
        """The layer's output."""

    def backward(self, d: Tensor, into: Sequence[Tensor], on: bool) -> Tensor:
        """From the loss's slope in the output to that in the input; if not `on`, the result is of no use.

        into: one [m, *shape] for each tensor that the layer owns; filled with its gradient.
        """

    def tangent(self, t: Tensor | None, along: Sequence[Tensor]) -> Tensor:
        """How the output moves when the input does by t (None: not at all) and the layer's tensors by `along`."""

    def reverse(self, a: Tensor) -> Tensor:
        """From the slope of the loss's derivative along the tangent, in the output, to that in the input."""


class _Make(Protocol):
    """Starts a layer's step."""

    def __call__(self) -> _Step: ...


def _maker(layer: Conv | Dense | Sigmoid | Relu | MaxPool | Flatten, *tensors: Tensor) -> _Make:
    """What is the same in every evaluation is done here, once."""
    match layer:
        case Conv():
            return partial(ConvStep, Filters(layer, *tensors))
        case Dense():
            return partial(_DenseStep, *tensors)
        case Sigmoid():
            return _SigmoidStep
        case Relu():
            return _ReluStep
        case MaxPool():
            return _MaxPoolStep
        case Flatten():
            return _FlattenStep


class _Head:
    """Softmax cross-entropy, the mean over the b rows of an instance.

    Its slope in the scores is p - y. For a sure and right prediction that difference loses most digits, so the
    likeliest label's is taken from the sum of the others; see `attacks._engine.matching`.
    """

    def __init__(self, scores: Tensor, y: Tensor) -> None:
        self.likeliest = y.argmax(dim=2, keepdim=True)
        self.p = scores.softmax(dim=2)
        self.b = scores.shape[1]
        slope = (self.p - y).div_(self.b).scatter_(2, self.likeliest, 0.0)
        self.slope = slope.scatter_(2, self.likeliest, -slope.sum(dim=2, keepdim=True))

    def pull(self, t: Tensor) -> tuple[Tensor, Tensor]:
        """Slopes in the scores and in y of the loss's derivative along score tangents t."""
        gaps = (t - t.gather(2, self.likeliest)).div_(self.b)
        return self.p * (gaps - (self.p * gaps).sum(dim=2, keepdim=True)), -gaps


class _DenseStep:
    """A dense layer."""

    def __init__(self, weight: Tensor, bias: Tensor) -> None:
        self.weight, self.bias = weight, bias

    def forward(self, h: Tensor) -> Tensor:
        self.h = h
        return linear(h, self.weight, self.bias)

    def backward(self, d: Tensor, into: Sequence[Tensor], on: bool) -> Tensor:
        self.d = d
        if d.shape[1] == 1:  # half the time of the product
            torch.mul(d.transpose(1, 2), self.h, out=into[0])
        else:
            torch.bmm(d.transpose(1, 2), self.h, out=into[0])
        torch.sum(d, dim=1, out=into[1])
        return d @ self.weight if on else d

    def tangent(self, t: Tensor | None, along: Sequence[Tensor]) -> Tensor:
        moved = torch.baddbmm(along[1][:, None], self.h, along[0].transpose(1, 2))
        self.along = along[0]
        return moved if t is None else moved.add_(linear(t, self.weight))

    def reverse(self, a: Tensor) -> Tensor:
        return (a @ self.weight).baddbmm_(self.d, self.along)


class _SigmoidStep:
    """1 / (1 + exp(-z)), with h' = h (1 - h) and h'' = h' (1 - 2h)."""

    bend: Tensor | None = None
    """h'' t times the loss's slope in the output: zero before the first layer with weights, where nothing moves."""

    def forward(self, h: Tensor) -> Tensor:
        self.h = h.sigmoid()
        self.slope = self.h.neg().add_(1).mul_(self.h)
        return self.h

    def backward(self, d: Tensor, into: Sequence[Tensor], on: bool) -> Tensor:
        self.d = d * self.slope
        return self.d

    def tangent(self, t: Tensor | None, along: Sequence[Tensor]) -> Tensor:
        assert t is not None
        self.bend = self.h.mul(-2).add_(1).mul_(t).mul_(self.d)
        return t * self.slope

    def reverse(self, a: Tensor) -> Tensor:
        return a * self.slope if self.bend is None else torch.addcmul(self.bend, a, self.slope)


class _ReluStep:
    """max(z, 0); it does not bend."""

    def forward(self, h: Tensor) -> Tensor:
        h = h.relu()
        self.slope = h.sign()
        return h

    def backward(self, d: Tensor, into: Sequence[Tensor], on: bool) -> Tensor:
        return d * self.slope

    def tangent(self, t: Tensor | None, along: Sequence[Tensor]) -> Tensor:
        assert t is not None
        return t * self.slope

    def reverse(self, a: Tensor) -> Tensor:
        return a * self.slope


class _MaxPoolStep:
    """The maximum of each 2 x 2 window; which entry that is does not change with the input."""

    def forward(self, h: Tensor) -> Tensor:
        self.shape = h.shape
        pooled, taken = max_pool2d(h.flatten(0, 1), 2, return_indices=True)
        self.taken = taken.view(*h.shape[:3], -1)
        return pooled.view(*h.shape[:3], *pooled.shape[2:])

    def backward(self, d: Tensor, into: Sequence[Tensor], on: bool) -> Tensor:
        return self.reverse(d)

    def tangent(self, t: Tensor | None, along: Sequence[Tensor]) -> Tensor:
        assert t is not None
        height, width = self.shape[3:]
        return t.flatten(3).gather(3, self.taken).view(*t.shape[:3], height // 2, width // 2)

    def reverse(self, a: Tensor) -> Tensor:
        empty = a.new_zeros(self.shape)
        empty.view(*self.shape[:3], -1).scatter_(3, self.taken, a.flatten(3))
        return empty


class _FlattenStep:
    """Maps to rows."""

    def forward(self, h: Tensor) -> Tensor:
        rows = h.transpose(1, 2)
        self.shape = rows.shape
        return rows.flatten(2)

    def backward(self, d: Tensor, into: Sequence[Tensor], on: bool) -> Tensor:
        return self.reverse(d)

    def tangent(self, t: Tensor | None, along: Sequence[Tensor]) -> Tensor:
        assert t is not None
        return t.transpose(1, 2).flatten(2)

    def reverse(self, a: Tensor) -> Tensor:
        return a.view(self.shape).transpose(1, 2)
