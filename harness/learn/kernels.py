"""Gradients of a chain of layers by hand, and the slopes of their inner products with given directions.

m instances share the parameters theta; each has its own gradient g and its own direction v. <v, g> is the derivative of
the loss along v, so its slope in the inputs takes one pass forward with the tangents of v, and one pass back. The
loss's slopes, known from the gradient's own pass back, are the slopes of <v, g> in the tangents, so the second pass
back carries values alone: 19 products in total for the three convolutions of the LeNet of DLG.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn.functional import linear, max_pool2d, pad, softplus

from leakgauge.harness.core.vec import Layout, Vector
from leakgauge.harness.learn.layers import Chain, Conv, Dense, Dropout, Flatten, MaxPool, Relu, Sigmoid, SoftRelu


class Pulled(NamedTuple):
    """Slopes in the inputs x [m, b, *input_shape] and in the labels y [m, b, classes]."""

    x: Tensor
    y: Tensor


class Kernel:
    """Gradients of the mean softmax cross-entropy of a chain at fixed parameters, with dropout off.

    Not thread-safe: convolutions copy their windows from shared scratch memory.

    Args:
        chain: its output is one row of scores for each input.
        params: [d]. Not modified; later changes of it have no effect.
        linear: the loss is the inner product of the outputs and y instead, summed over the inputs of an instance.
    """

    def __init__(self, chain: Chain, layout: Layout, params: Vector, *, linear: bool = False) -> None:
        self._layout, self._head = layout, _Linear if linear else _Softmax
        tensors = iter(layout.split(params.detach().clone()))
        layers = [layer for layer in chain.layers if not isinstance(layer, Dropout)]
        self._makers = [_maker(layer, *(next(tensors) for _ in range(layer.owns))) for layer in layers]
        self._owns = [layer.owns for layer in layers]
        self.first = next(position for position, owns in enumerate(self._owns) if owns)
        """The position of the first layer with parameters."""

    @torch.no_grad()
    def trace(self, x: Tensor, y: Tensor) -> tuple[Tensor, Trace]:
        """Gradients [m, d], each the mean over the b inputs of an instance, and the trace for slopes of them.

        Args:
            x: [m, b, *input_shape]; do not modify it while the trace is in use.
            y: [m, b, classes] probabilities; if linear, the loss's slopes in the outputs.
        """
        steps: list[_Step] = [make() for make in self._makers]
        h = x.transpose(1, 2)
        for step in steps:
            h = step.forward(h)
        head = self._head(h, y)
        gradients = h.new_empty(len(x), self._layout.dim)
        into, d = self.split(gradients), head.slope
        for position in reversed(range(self.first, len(steps))):
            d = steps[position].backward(d, into[position], position > self.first)
        return gradients, Trace(self, steps, head)

    def split(self, vectors: Tensor) -> list[list[Tensor]]:
        """Views of the rows of vectors [m, d], one list per layer."""
        tensors = iter(self._layout.split(vectors))
        return [[next(tensors) for _ in range(owns)] for owns in self._owns]


class Trace:
    """The intermediate results of one `Kernel.trace`; `pull` may be called any number of times."""

    def __init__(self, kernel: Kernel, steps: Sequence[_Step], head: _Softmax | _Linear) -> None:
        self._kernel, self._steps, self._head = kernel, steps, head

    @property
    def outputs(self) -> Tensor:
        """[m, b, classes] of the chain."""
        return self._head.outputs

    @torch.no_grad()
    def pull(self, slopes: Tensor, of_outputs: Tensor | None = None) -> Pulled:
        """The slopes of sum_i <slopes_i, gradients_i> + <of_outputs_i, outputs_i>, with both [m, ...] held fixed."""
        first, along = self._kernel.first, self._kernel.split(slopes)
        t: Tensor | None = None
        for step, directions in zip(self._steps[first:], along[first:], strict=True):
            t = step.tangent(t, directions)
        assert t is not None  # the first of these layers has parameters
        a, y = self._head.pull(t)
        a = a if of_outputs is None else a + of_outputs
        for step in reversed(self._steps):
            a = step.reverse(a)
        return Pulled(a.transpose(1, 2), y)


class _Step(Protocol):
    """A layer in one evaluation; each pass keeps the results that later passes need.

    Maps are [m, channels, b, height, width], so that the factors of an instance's weights are contiguous; rows are
    [m, b, entries].
    """

    def forward(self, h: Tensor) -> Tensor:
        """The layer's output."""

    def backward(self, d: Tensor, into: Sequence[Tensor], on: bool) -> Tensor:
        """From the loss's slope in the output to its slope in the input; if not `on`, the result is not used.

        into: one [m, *shape] for each tensor of the layer; filled with its gradient.
        """

    def tangent(self, t: Tensor | None, along: Sequence[Tensor]) -> Tensor:
        """The derivative of the output along t in the input (None: zero) and `along` in the layer's tensors."""

    def reverse(self, a: Tensor) -> Tensor:
        """From the slope of <v, g> in the output to its slope in the input."""


def _maker(
    layer: Conv | Dense | Sigmoid | Relu | SoftRelu | MaxPool | Flatten, *tensors: Tensor
) -> Callable[[], _Step]:
    """A factory of the layer's steps; work that is the same in every evaluation is done here, once."""
    match layer:
        case Conv():
            return partial(_ConvStep, _Filters(layer, *tensors))
        case Dense():
            return partial(_DenseStep, *tensors)
        case Sigmoid():
            return _SigmoidStep
        case Relu():
            return _ReluStep
        case SoftRelu():
            return partial(_SoftReluStep, layer.width)
        case MaxPool():
            return _MaxPoolStep
        case Flatten():
            return _FlattenStep


class _Softmax:
    """Softmax cross-entropy, the mean over the b rows of an instance.

    Its slope in the scores is p - y. For a confident and correct prediction that difference loses most digits, so the
    entry of the likeliest label is computed as minus the sum of the others; see `attacks._engine.matching`.
    """

    def __init__(self, scores: Tensor, y: Tensor) -> None:
        self.outputs = scores
        self.likeliest = y.argmax(dim=2, keepdim=True)
        self.p = scores.softmax(dim=2)
        self.b = scores.shape[1]
        slope = (self.p - y).div_(self.b).scatter_(2, self.likeliest, 0.0)
        self.slope = slope.scatter_(2, self.likeliest, -slope.sum(dim=2, keepdim=True))

    def pull(self, t: Tensor) -> tuple[Tensor, Tensor]:
        """Slopes in the scores and in y of the loss's derivative along score tangents t."""
        gaps = (t - t.gather(2, self.likeliest)).div_(self.b)
        return self.p * (gaps - (self.p * gaps).sum(dim=2, keepdim=True)), -gaps


class _Linear:
    """The loss <y, outputs>: its slope in the outputs is y, whatever they are."""

    def __init__(self, outputs: Tensor, y: Tensor) -> None:
        self.outputs, self.slope = outputs, y

    def pull(self, t: Tensor) -> tuple[Tensor, Tensor]:
        """Slopes in the outputs and in y of the loss's derivative along output tangents t."""
        return torch.zeros_like(t), t


class _DenseStep:
    """A dense layer."""

    def __init__(self, weight: Tensor, bias: Tensor) -> None:
        self.weight, self.bias = weight, bias

    def forward(self, h: Tensor) -> Tensor:
        self.h = h
        return linear(h, self.weight, self.bias)

    def backward(self, d: Tensor, into: Sequence[Tensor], on: bool) -> Tensor:
        self.d = d
        product = torch.mul if d.shape[1] == 1 else torch.bmm  # of one row, mul takes half the time
        product(d.transpose(1, 2), self.h, out=into[0])
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
    """h'' t times the loss's slope in the output; None before the first layer with weights, where t is zero."""

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


class _SoftReluStep(_SigmoidStep):
    """softplus(z / width) width, whose slope is the sigmoid of z / width."""

    def __init__(self, width: float) -> None:
        self.width = width

    def forward(self, h: Tensor) -> Tensor:
        self.slope = (h / self.width).sigmoid_()
        return softplus(h / self.width, threshold=50).mul_(self.width)

    def tangent(self, t: Tensor | None, along: Sequence[Tensor]) -> Tensor:
        assert t is not None
        self.bend = self.slope.neg().add_(1).mul_(t).mul_(self.d).div_(self.width)  # d has one factor slope
        return t * self.slope


class _ReluStep:
    """max(z, 0); its second derivative is zero."""

    def forward(self, h: Tensor) -> Tensor:
        h = h.relu()
        self.slope = h.sign()
        return h

    def backward(self, d: Tensor, into: Sequence[Tensor], on: bool) -> Tensor:
        return self.reverse(d)

    def tangent(self, t: Tensor | None, along: Sequence[Tensor]) -> Tensor:
        assert t is not None
        return t * self.slope

    def reverse(self, a: Tensor) -> Tensor:
        return a * self.slope


class _MaxPoolStep:
    """The maximum of each 2 x 2 window; the choice of the entry counts as constant."""

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


class _ConvStep:
    """A convolution as products of weights with patches of its input maps [m, inputs, b, height, width]."""

    def __init__(self, filters: _Filters) -> None:
        self.filters = filters

    def forward(self, h: Tensor) -> Tensor:
        layer, m, b, self.sides = self.filters.layer, len(h), h.shape[2], h.shape[3:]
        after = [(side + 2 * layer.padding - layer.kernel) // layer.stride + 1 for side in self.sides]
        self.shape = (m, layer.outputs, b, *after)
        self.patches = self.filters.patches(h)
        return torch.baddbmm(self.filters.bias, self._shared(self.filters.forth), self.patches).view(self.shape)

    def backward(self, d: Tensor, into: Sequence[Tensor], on: bool) -> Tensor:
        weight, bias = into
        columns = d.flatten(2)
        weight.flatten(1).copy_(self.filters.weights(torch.bmm(columns, self.patches.transpose(1, 2))))
        torch.sum(columns, dim=2, out=bias)
        self.patches_back = self.filters.patches_back(d, self.sides)
        return self._back(torch.bmm(self._shared(self.filters.back), self.patches_back)) if on else d

    def tangent(self, t: Tensor | None, along: Sequence[Tensor]) -> Tensor:
        weight, bias = along
        self.along = self.filters.rows(weight)
        product = torch.baddbmm(bias[:, :, None], self.along, self.patches)
        if t is not None:
            product.baddbmm_(self._shared(self.filters.forth), self.filters.patches(t))
        return product.view(self.shape)

    def reverse(self, a: Tensor) -> Tensor:
        product = torch.bmm(self.filters.turned(self.along), self.patches_back)
        patches = self.filters.patches_back(a, self.sides)
        return self._back(product.baddbmm_(self._shared(self.filters.back), patches))

    def _shared(self, weight: Tensor) -> Tensor:
        """The parameters' weights, expanded over the instances."""
        return weight.expand(self.shape[0], -1, -1)

    def _back(self, product: Tensor) -> Tensor:
        """Maps of the input's sides."""
        return self.filters.unphase(product, self.shape[2], self.sides)


class _Filters:
    """A convolution's weights as matrices that multiply patches.

    Backwards, input u (counted with the padding) contributes to the outputs o with u = stride o + k, k in the kernel.
    With u = stride q + phase and k = stride j + phase, o is q - j: windows of `reach` outputs, one product for all
    phases. Entries are reordered by `index_select` from a list of their places, which takes a third to a tenth of the
    time of copying the permuted view.
    """

    def __init__(self, layer: Conv, weight: Tensor, bias: Tensor) -> None:
        self.layer, self.bias = layer, bias[:, None]
        self.reach = -(-layer.kernel // layer.stride)
        self.start = layer.padding // layer.stride
        places = torch.arange(weight.numel(), device=weight.device).view(weight.shape)
        self._order = places.permute(0, 2, 3, 1).flatten()
        self._inverse = self._order.argsort()
        turned = self._turn(self._inverse.view(weight.shape))
        self._turned, self._inside = turned.clamp(min=0), (turned >= 0).to(weight.dtype)
        self._unphased: dict[tuple[int, ...], Tensor] = {}
        self._ahead: dict[torch.Size, _Windows] = {}
        self._behind: dict[torch.Size, _Windows] = {}
        self.forth = self.rows(weight[None])
        self.back = self.turned(self.forth)

    def rows(self, weight: Tensor) -> Tensor:
        """[m, outputs, kernel * kernel * inputs] of weights [m, outputs, inputs, kernel, kernel]."""
        return weight.flatten(1).index_select(1, self._order).view(len(weight), self.layer.outputs, -1)

    def weights(self, rows: Tensor) -> Tensor:
        """The inverse of `rows`: weights [m, outputs * inputs * kernel * kernel]."""
        return rows.flatten(1).index_select(1, self._inverse)

    def turned(self, rows: Tensor) -> Tensor:
        """[m, stride * stride * inputs, reach * reach * outputs] of `rows`, for the product backwards."""
        entries = rows.flatten(1).index_select(1, self._turned).mul_(self._inside)
        return entries.view(len(rows), self.layer.stride**2 * self.layer.inputs, -1)

    def _turn(self, places: Tensor) -> Tensor:
        """The place in `rows` of each entry of `turned`, from the places of the weights' entries; -1: zero."""
        stride, reach = self.layer.stride, self.reach
        missing = stride * reach - self.layer.kernel
        full = pad(places, (0, missing, 0, missing), value=-1)
        split = full.view(*places.shape[:2], reach, stride, reach, stride).flip(2, 4)
        return split.permute(3, 5, 1, 2, 4, 0).flatten()

    def patches(self, h: Tensor) -> Tensor:
        """[m, kernel * kernel * inputs, positions of the output]."""
        if h.shape not in self._ahead:
            margins = [(self.layer.padding, self.layer.padding)] * 2
            self._ahead[h.shape] = _Windows(h, margins, self.layer.kernel, self.layer.stride)
        return self._ahead[h.shape](h)

    def patches_back(self, d: Tensor, sides: Sequence[int]) -> Tensor:
        """[m, reach * reach * outputs, positions of the input / stride]; sides: height and width of the input."""
        if d.shape not in self._behind:
            before = self.reach - 1 - self.start
            margins = [(before, self._end(side) - have) for side, have in zip(sides, d.shape[3:], strict=True)]
            self._behind[d.shape] = _Windows(d, margins, self.reach, 1)
        return self._behind[d.shape](d)

    def unphase(self, product: Tensor, b: int, sides: Sequence[int]) -> Tensor:
        """[m, inputs, b, *sides] of `turned` weights times `patches_back`."""
        if self.layer.stride > 1:
            if (b, *sides) not in self._unphased:
                places = torch.arange(product[0].numel(), device=product.device)
                self._unphased[b, *sides] = self._unphase(places, b, sides)
            product = product.flatten(1).index_select(1, self._unphased[b, *sides])
        return product.view(len(product), self.layer.inputs, b, *sides)

    def _unphase(self, places: Tensor, b: int, sides: Sequence[int]) -> Tensor:
        """The place in the product of each entry of the maps."""
        stride, skipped = self.layer.stride, self.layer.padding % self.layer.stride
        counts = [self._end(side) - self.start for side in sides]
        phases = places.view(stride, stride, self.layer.inputs, b, *counts)
        full = phases.permute(2, 3, 4, 0, 5, 1).flatten(4).flatten(2, 3)
        return full[..., skipped : skipped + sides[0], skipped : skipped + sides[1]].flatten()

    def _end(self, side: int) -> int:
        """One past the last q of an input with this side."""
        return (self.layer.padding + side - 1) // self.layer.stride + 1


class _Windows:
    """All windows of maps [m, channels, b, height, width] in a margin of zeros (before, after; rows, columns).

    Channels come last in the padded maps, so that runs of kernel * channels entries are copied: a fifth of the time of
    torch's `unfold`. The padded maps are scratch memory, kept for the next maps of this shape: allocating them and
    their views anew cost a tenth of an evaluation.
    """

    def __init__(self, maps: Tensor, margins: Sequence[tuple[int, int]], kernel: int, stride: int) -> None:
        m, channels, b, height, width = maps.shape
        (top, bottom), (left, right) = margins
        padded = maps.new_zeros(m, b, top + height + bottom, left + width + right, channels)
        self._inside = padded[:, :, top : top + height, left : left + width].permute(0, 4, 1, 2, 3)
        self._all = padded.unfold(2, kernel, stride).unfold(3, kernel, stride).permute(0, 1, 2, 3, 5, 6, 4)
        self._shape = (m, self._all.shape[1:4].numel(), kernel * kernel * channels)

    def __call__(self, maps: Tensor) -> Tensor:
        """[m, kernel * kernel * channels, b * positions]."""
        self._inside.copy_(maps)
        # not `reshape`: of a single window it is a view of the scratch memory, which the next maps overwrite
        return self._all.clone(memory_format=torch.contiguous_format).view(self._shape).transpose(1, 2)
