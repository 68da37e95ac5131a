"""Gradients of a network of layers by hand, and the slopes of their inner products with given directions.

m instances share the parameters theta; each has its own gradient g and its own direction v. <v, g> is the derivative of
the loss along v, so its slope in the inputs takes one forward pass with the tangents of v, and one backward pass. The
loss's slopes, known from the gradient's backward pass, are the slopes of <v, g> in the tangents. So the second backward
pass carries only values: 19 products in total for the three convolutions of the LeNet of DLG.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn.functional import linear, max_pool2d, softplus

from leakgauge.harness.core.vec import Vector
from leakgauge.harness.learn import layers
from leakgauge.harness.learn.convolution import Shape, conv_maker
from leakgauge.harness.learn.layers import Layer
from leakgauge.harness.learn.structure import Structure


class Pulled(NamedTuple):
    """Slopes with respect to the inputs x [m, b, *input_shape] and the labels y [m, b, classes]."""

    x: Tensor
    y: Tensor


class Outer(NamedTuple):
    """The gradient of the last layer's weights at one input, from entry `first` of a gradient on: an outer product.

    slopes: [m, outputs], of the loss; inputs: [m, inputs].
    """

    first: int
    slopes: Tensor
    inputs: Tensor


_KEPT = 4
"""Maximum number of unused tapes that are kept for the next evaluation of their shape. A kept tape saves nearly all
allocations: with new memory and views, a single image behind the LeNet of DLG took three times as long."""


class Kernel:
    """Gradients of the mean softmax cross-entropy of a network at fixed parameters, with dropout off.

    Args:
        structure: its output is one row of scores for each input; batch norms use the statistics of an instance's
            batch.
        params: [d]. Not modified; later changes of params have no effect.
        linear: use as loss the inner product of the outputs and y, summed over the inputs of an instance.
    """

    def __init__(self, structure: Structure, params: Vector, *, linear: bool = False) -> None:
        self.structure, self._head = structure, _Linear if linear else _Softmax
        tensors = iter(structure.split(params.detach().clone()))
        self.scale = structure.scale if isinstance(structure.layers[0], layers.Scale) else None
        self._makers = [maker_of(layer, tensors) for layer in structure.core]
        self._owns = [layer.owns for layer in structure.core]
        self.first = next(position for position, owns in enumerate(self._owns) if owns)
        """The position of the first layer with parameters."""
        self._free: list[_Tape] = []
        last = sum(self._owns[:-1])
        place = structure.places[last] if structure.places else last
        self._before = sum(structure.layout.sizes[:place])  # entries before the weight of the last layer

    @torch.no_grad()
    def trace(self, x: Tensor, y: Tensor, *, whole: bool = True) -> tuple[Tensor, Trace]:
        """Gradients [m, d], each the mean over the b inputs of an instance, and the trace that computes their slopes.

        Args:
            x: [m, b, *input_shape]; do not modify it while the trace is in use.
            y: [m, b, classes] probabilities; if linear, the loss's slopes with respect to the outputs.
            whole: False leaves out the entries that `Trace.outer` describes, if there are any; the caller sets them.
        """
        x = x if self.scale is None else self.scale.apply(x)
        gradients = x.new_empty(len(x), self.structure.layout.dim)
        with torch.inference_mode():  # operations and views take a sixth less time
            tape, into, h = self._tape(x), self.split(gradients), x.transpose(1, 2)
            for step in tape.steps:
                h = step.forward(h)
            head = self._head(h, y)
            d = head.slope
            outer = None if whole else self._outer(tape, d)
            for position in reversed(range(self.first, len(tape.steps))):
                d = tape.steps[position].backward(d, into[position], position > self.first)
        return gradients, Trace(self, tape, head, gradients, into, outer)

    def _outer(self, tape: _Tape, d: Tensor) -> Outer | None:
        """The outer product of the last layer, if it is dense and the instances have one input each."""
        step = tape.steps[-1]
        if not isinstance(step, _DenseStep) or d.shape[1] != 1:
            return None
        step.product = False
        return Outer(self._before, d[:, 0].contiguous(), step.h[:, 0].contiguous())

    def _tape(self, x: Tensor) -> _Tape:
        for place, tape in enumerate(self._free):
            if tape.shape == x.shape:
                return self._free.pop(place)
        shape, steps, like = (len(x), x.shape[2], x.shape[1], *x.shape[3:]), [], x.new_empty(0)
        for make in self._makers:
            steps.append(make(shape, like))
            shape = steps[-1].shape
        return _Tape(x.shape, steps)

    def give_back(self, tape: _Tape) -> None:
        """Take back a tape that is no longer read."""
        self._free = [*self._free[1 - _KEPT :], tape]

    def split(self, vectors: Tensor) -> list[list[Tensor]]:
        """Views of the rows of vectors [m, d], one list per layer."""
        tensors = iter(self.structure.split(vectors))
        return [[next(tensors) for _ in range(owns)] for owns in self._owns]


class _Tape(NamedTuple):
    """The steps for inputs [m, b, *input_shape] of this shape, with the memory for their results."""

    shape: torch.Size
    steps: list[Step]


@dataclass(eq=False)
class Trace:
    """The intermediate results of one `Kernel.trace`; `pull` may be called any number of times.

    Its memory is reused after the trace is deleted.
    """

    _kernel: Kernel
    _tape: _Tape
    _head: _Softmax | _Linear
    _gradients: Tensor
    _split: list[list[Tensor]]
    outer: Outer | None

    def __del__(self) -> None:
        self._kernel.give_back(self._tape)

    @property
    def outputs(self) -> Tensor:
        """[m, b, classes] outputs of the network; valid as long as the trace exists."""
        return self._head.outputs

    @torch.no_grad()
    def pull(self, slopes: Tensor, of_outputs: Tensor | None = None) -> Pulled:
        """The slopes of sum_i <slopes_i, gradients_i> + <of_outputs_i, outputs_i>, with both [m, ...] held fixed."""
        first, steps = self._kernel.first, self._tape.steps
        with torch.inference_mode():
            along = self._split if slopes is self._gradients else self._kernel.split(slopes.contiguous())
            t: Tensor | None = None
            for step, directions in zip(steps[first:], along[first:], strict=True):
                t = step.tangent(t, directions)
            assert t is not None  # the first of these layers has parameters
            a, y = self._head.pull(t)
            a = a if of_outputs is None else a + of_outputs
            for step in reversed(steps):
                a = step.reverse(a)
        x = a.transpose(1, 2).clone(memory_format=torch.contiguous_format)
        scale = self._kernel.scale
        return Pulled(x if scale is None else x * scale.span.to(x), y.clone())


class _Softmax:
    """Softmax cross-entropy, the mean over the b rows of an instance, as accurate as `gradients.batch_loss`."""

    def __init__(self, scores: Tensor, y: Tensor) -> None:
        self.outputs = scores
        self.likeliest = y.argmax(dim=2, keepdim=True)
        self.p = scores.softmax(dim=2)
        self.b = scores.shape[1]
        slope = (self.p - y).div_(self.b).scatter_(2, self.likeliest, 0.0)
        self.slope = slope.scatter_(2, self.likeliest, slope.sum(dim=2, keepdim=True).neg_())

    def pull(self, t: Tensor) -> tuple[Tensor, Tensor]:
        """Slopes of the loss's derivative along score tangents t, in the scores and in y."""
        gaps = (t - t.gather(2, self.likeliest)).div_(self.b)
        return (gaps - (self.p * gaps).sum(dim=2, keepdim=True)).mul_(self.p), gaps.neg()


class _Linear:
    """The loss <y, outputs>, whose slope in the outputs is always y."""

    def __init__(self, outputs: Tensor, y: Tensor) -> None:
        self.outputs, self.slope = outputs, y

    def pull(self, t: Tensor) -> tuple[Tensor, Tensor]:
        """Slopes of the loss's derivative along output tangents t, in the outputs and in y."""
        return torch.zeros_like(t), t


class Step(Protocol):
    """A layer in one evaluation; each pass keeps the results that later passes need.

    Maps are [m, channels, b, height, width], so that the factors of an instance's weights are contiguous; rows are
    [m, b, entries]. A pass may return memory that its next call overwrites.
    """

    shape: Shape
    """Shape of the output."""

    def forward(self, h: Tensor) -> Tensor:
        """The layer's output."""

    def backward(self, d: Tensor, into: Sequence[Tensor], on: bool) -> Tensor:
        """The loss's slope in the input, from d, its slope in the output; if not `on`, the result is not used.

        into: one [m, *shape] for each tensor of the layer; filled with the tensor's gradient.
        """

    def tangent(self, t: Tensor | None, along: Sequence[Tensor]) -> Tensor:
        """The derivative of the output along t in the input (None: zero) and `along` in the layer's tensors."""

    def reverse(self, a: Tensor) -> Tensor:
        """The slope of <v, g> in the input, from a, its slope in the output."""


Maker = Callable[[Shape, Tensor], Step]
"""Makes a layer's step from the shape of its input, [m, channels, b, ...]."""


def maker_of(layer: Layer, tensors: Iterator[Tensor]) -> Maker:
    """The maker of the layer's steps; work that is the same in every evaluation is done here, once."""
    if isinstance(layer, layers.Block):
        paths = [
            [(maker_of(each, tensors), each.owns) for each in path if not isinstance(each, layers.Dropout)]
            for path in (layer.layers, layer.shortcut)
        ]
        return partial(_BlockStep, paths)
    own = list(itertools.islice(tensors, layer.owns))
    match layer:
        case layers.Conv():
            return conv_maker(layer, own)
        case layers.Dense():
            weight, *bias = own
            return partial(_DenseStep, weight, bias[0] if bias else None)
        case layers.Norm():
            return partial(_NormStep, layer, own)
        case layers.SoftRelu() | layers.MaxPool() | layers.MeanPool() | layers.Widen():
            return partial(_STEPS[type(layer)], layer)
    return _STEPS[type(layer)]


class _DenseStep:
    """A dense layer."""

    def __init__(self, weight: Tensor, bias: Tensor | None, shape: Shape, like: Tensor) -> None:
        self.weight, self.bias, self.shape = weight, bias, (*shape[:2], len(weight))
        self.moved, self.back = like.new_zeros(self.shape), like.new_zeros(shape)
        self.product = True
        """Whether the next backward pass computes the weights' gradient."""

    def forward(self, h: Tensor) -> Tensor:
        self.h = h
        return linear(h, self.weight, self.bias)

    def backward(self, d: Tensor, into: Sequence[Tensor], on: bool) -> Tensor:
        self.d = d
        if self.product:
            product = torch.mul if d.shape[1] == 1 else torch.bmm  # for one row, mul takes half the time
            product(d.transpose(1, 2), self.h, out=into[0])
        self.product = True
        if self.bias is not None:
            torch.sum(d, dim=1, out=into[1])
        return torch.matmul(d, self.weight) if on else d

    def tangent(self, t: Tensor | None, along: Sequence[Tensor]) -> Tensor:
        self.along = along[0]
        if self.bias is None:
            torch.bmm(self.h, along[0].transpose(1, 2), out=self.moved)
        else:
            torch.baddbmm(along[1][:, None], self.h, along[0].transpose(1, 2), out=self.moved)
        return self.moved if t is None else self.moved.add_(linear(t, self.weight))

    def reverse(self, a: Tensor) -> Tensor:
        return torch.matmul(a, self.weight, out=self.back).baddbmm_(self.d, self.along)


class _Smooth:
    def __init__(self, shape: Shape, like: Tensor) -> None:
        self.shape, self.unit = shape, like.new_zeros(()).fill_(1.0)
        self.h, self.slope, self.d, self.t, self.a, self.bend = (like.new_zeros(shape) for _ in range(6))
        self.bent = False
        """Whether `bend` holds h'' t times the loss's slope in the output; False before the first layer with weights,
        where t is zero."""

    def backward(self, d: Tensor, into: Sequence[Tensor], on: bool) -> Tensor:
        return torch.mul(d, self.slope, out=self.d)

    def reverse(self, a: Tensor) -> Tensor:
        if not self.bent:
            return torch.mul(a, self.slope, out=self.a)
        return torch.addcmul(self.bend, a, self.slope, out=self.a)


class _SigmoidStep(_Smooth):
    """1 / (1 + exp(-z)), with h' = h (1 - h) and h'' = h' (1 - 2h)."""

    def forward(self, h: Tensor) -> Tensor:
        torch.sigmoid(h, out=self.h)
        torch.sub(self.unit, self.h, out=self.slope).mul_(self.h)
        return self.h

    def tangent(self, t: Tensor | None, along: Sequence[Tensor]) -> Tensor:
        assert t is not None
        torch.add(self.unit, self.h, alpha=-2, out=self.bend).mul_(t).mul_(self.d)
        self.bent = True
        return torch.mul(t, self.slope, out=self.t)


class _TanhStep(_Smooth):
    """tanh(z), with h' = 1 - h^2 and h'' = -2 h h'."""

    def forward(self, h: Tensor) -> Tensor:
        torch.tanh(h, out=self.h)
        torch.addcmul(self.unit, self.h, self.h, value=-1, out=self.slope)
        return self.h

    def tangent(self, t: Tensor | None, along: Sequence[Tensor]) -> Tensor:
        assert t is not None
        # self.d already contains the factor h'
        torch.mul(self.h, t, out=self.bend).mul_(self.d).mul_(-2)
        self.bent = True
        return torch.mul(t, self.slope, out=self.t)


class _SoftReluStep(_Smooth):
    """softplus(z / width) width, whose slope is the sigmoid of z / width."""

    def __init__(self, layer: layers.SoftRelu, shape: Shape, like: Tensor) -> None:
        super().__init__(shape, like)
        self.width = layer.width

    def forward(self, h: Tensor) -> Tensor:
        z = h / self.width
        torch.sigmoid(z, out=self.slope)
        return softplus(z, threshold=50).mul_(self.width)

    def tangent(self, t: Tensor | None, along: Sequence[Tensor]) -> Tensor:
        assert t is not None
        # self.d already contains one factor `slope`
        torch.sub(self.unit, self.slope, out=self.bend).mul_(t).mul_(self.d).div_(self.width)
        self.bent = True
        return torch.mul(t, self.slope, out=self.t)


class _ReluStep(_Smooth):
    def forward(self, h: Tensor) -> Tensor:
        torch.clamp_min(h, 0.0, out=self.h)
        torch.sign(self.h, out=self.slope)
        return self.h

    def tangent(self, t: Tensor | None, along: Sequence[Tensor]) -> Tensor:
        assert t is not None
        return torch.mul(t, self.slope, out=self.t)


def _pooled(layer: layers.MaxPool | layers.MeanPool, shape: Shape) -> Shape:
    return (*shape[:3], *((side + 2 * layer.padding - layer.size) // layer.stride + 1 for side in shape[3:]))


class _FixedStep:
    """A map without parameters: its `backward` is `reverse`; if it is linear, its `tangent` is `forward`."""

    def backward(self: Step, d: Tensor, into: Sequence[Tensor], on: bool) -> Tensor:
        return self.reverse(d)

    def tangent(self: Step, t: Tensor | None, along: Sequence[Tensor]) -> Tensor:
        assert t is not None
        return self.forward(t)


class _MaxPoolStep(_FixedStep):
    """The maximum of each window; the choice of the entry is treated as constant."""

    def __init__(self, layer: layers.MaxPool, shape: Shape, like: Tensor) -> None:
        self.layer, self.before, self.shape = layer, shape, _pooled(layer, shape)

    def forward(self, h: Tensor) -> Tensor:
        window = self.layer.size, self.layer.stride, self.layer.padding
        pooled, taken = max_pool2d(h.flatten(0, 1), *window, return_indices=True)
        self.taken = taken.view(*self.shape[:3], -1)
        return pooled.view(self.shape)

    def tangent(self, t: Tensor | None, along: Sequence[Tensor]) -> Tensor:
        assert t is not None
        return t.flatten(3).gather(3, self.taken).view(self.shape)

    def reverse(self, a: Tensor) -> Tensor:
        empty = a.new_zeros(self.before)
        rows = empty.view(*self.shape[:3], -1)
        if self.layer.stride < self.layer.size:
            rows.scatter_add_(3, self.taken, a.flatten(3))
        else:
            rows.scatter_(3, self.taken, a.flatten(3))
        return empty


class _FlattenStep(_FixedStep):
    def __init__(self, shape: Shape, like: Tensor) -> None:
        self.before = (shape[0], shape[2], shape[1], *shape[3:])
        self.shape = (*self.before[:2], math.prod(self.before[2:]))

    def forward(self, h: Tensor) -> Tensor:
        return h.transpose(1, 2).flatten(2)

    def reverse(self, a: Tensor) -> Tensor:
        return a.view(self.before).transpose(1, 2)


class _MeanStep(_FixedStep):
    """Turns maps into rows of their means."""

    def __init__(self, shape: Shape, like: Tensor) -> None:
        self.before, self.entries = shape, math.prod(shape[3:])
        self.shape: Shape = (shape[0], shape[2], shape[1])

    def forward(self, h: Tensor) -> Tensor:
        return h.mean((3, 4)).transpose(1, 2)

    def reverse(self, a: Tensor) -> Tensor:
        return (a.transpose(1, 2) / self.entries)[..., None, None].expand(self.before)


class _MeanPoolStep(_FixedStep):
    def __init__(self, layer: layers.MeanPool, shape: Shape, like: Tensor) -> None:
        self.layer, self.window = layer, [[side, side] for side in (layer.size, layer.stride, layer.padding)]
        self.before, self.shape = like.new_zeros(shape), _pooled(layer, shape)

    def forward(self, h: Tensor) -> Tensor:
        return self.layer.apply(h.flatten(0, 1)).view(self.shape)

    def reverse(self, a: Tensor) -> Tensor:
        maps = a.flatten(0, 1), self.before.flatten(0, 1)
        back: Tensor = torch.ops.aten.avg_pool2d_backward(*maps, *self.window, False, True, None)
        return back.view(self.before.shape)


class _WidenStep(_FixedStep):
    def __init__(self, layer: layers.Widen, shape: Shape, like: Tensor) -> None:
        m, channels, b, *sides = self.before = shape
        self.stride, self.inner = layer.stride, slice(layer.before, layer.before + channels)
        sides = [-(-side // layer.stride) for side in sides]
        self.shape: Shape = (m, layer.before + channels + layer.after, b, *sides)

    def forward(self, h: Tensor) -> Tensor:
        wide = h.new_zeros(self.shape)
        wide[:, self.inner] = h[..., :: self.stride, :: self.stride]
        return wide

    def reverse(self, a: Tensor) -> Tensor:
        back = a.new_zeros(self.before)
        back[..., :: self.stride, :: self.stride] = a[:, self.inner]
        return back


class _NormStep:
    """A normalization u = (z - mean) / deviation over sets of entries, times a scale, plus a bias.

    J w = (w - mean(w) - u mean(u w)) / deviation is the derivative of u along w, and symmetric. Its own derivative
    along an error e and a tangent t, both held fixed, is -(u mean(e J t) + mean(u t) J e + mean(u e) J t) / deviation.
    """

    def __init__(self, layer: layers.Norm, tensors: Sequence[Tensor], shape: Shape, like: Tensor) -> None:
        self.shape, self.running, m = shape, tensors[2:], shape[0]
        self.scale, self.bias = (tensor[:, None, None, None] for tensor in tensors[:2])
        self.sets = (m, layer.groups or layer.channels, -1, shape[2], math.prod(shape[3:]))
        self.over = (2, 4) if layer.groups else (2, 3, 4)  # a batch norm's sets span the images
        self.entries, self.eps, self.rate = math.prod(shape[2:]), layer.eps, layer.rate
        sizes = shape[2], shape[1], *shape[3:]
        self.unbiased = 1.0 if layer.groups else layer.unbiased(self.entries, sizes)

    def forward(self, h: Tensor) -> Tensor:
        z = h.reshape(self.sets)
        self.mean = z.mean(self.over, keepdim=True)
        self.u = z - self.mean
        self.variance = self.u.square().mean(self.over, keepdim=True)  # `var_mean` takes several times as long
        self.factor = (self.variance + self.eps).rsqrt_()
        self.u.mul_(self.factor)
        return torch.addcmul(self.bias, self.u.view(self.shape), self.scale)

    def backward(self, d: Tensor, into: Sequence[Tensor], on: bool) -> Tensor:
        self.d = d.clone(memory_format=torch.contiguous_format)  # a convolution's next pass may overwrite d
        torch.sum(self.d * self.u.view(self.shape), (2, 3, 4), out=into[0])
        torch.sum(self.d, (2, 3, 4), out=into[1])
        for own, now, result in zip(self.running, (self.mean, self.variance * self.unbiased), into[2:], strict=False):
            torch.sub(own, now.flatten(1), out=result).mul_(self.rate)
        self.e, self.of_e = self._along(self.d * self.scale)
        return self.e.view(self.shape)

    def tangent(self, t: Tensor | None, along: Sequence[Tensor]) -> Tensor:
        self.along = along[0][..., None, None, None]
        self.moves = [direction[:, :, None, None, None] * self.rate / self.entries for direction in along[2:]]
        moved = torch.addcmul(along[1][..., None, None, None], self.along, self.u.view(self.shape))
        self.t, self.of_t = self._along(torch.zeros(self.shape).to(moved) if t is None else t)
        return moved.addcmul_(self.t.view(self.shape), self.scale)

    def reverse(self, a: Tensor) -> Tensor:
        back, _ = self._along(torch.addcmul(self.d * self.along, a, self.scale))
        both = ((self.d * self.scale).reshape(self.sets) * self.t).mean(self.over, keepdim=True)
        bend = torch.addcmul(self.u * both, self.of_t, self.e).addcmul_(self.of_e, self.t)
        back.addcmul_(bend, self.factor, value=-1)
        if self.moves:
            mean, variance = self.moves
            back.sub_(mean).addcmul_(self.u, variance * self.unbiased / self.factor, value=-2)
        return back.view(self.shape)

    def _along(self, w: Tensor) -> tuple[Tensor, Tensor]:
        """J w, and mean(u w)."""
        w = w.reshape(self.sets)
        of_w = (self.u * w).mean(self.over, keepdim=True)
        return (w - w.mean(self.over, keepdim=True)).addcmul_(self.u, of_w, value=-1).mul_(self.factor), of_w


class _BlockStep:
    def __init__(self, paths: Sequence[Sequence[tuple[Maker, int]]], shape: Shape, like: Tensor) -> None:
        self.before, self.paths, start = shape, list[list[tuple[Step, slice]]](), 0
        for path in paths:
            steps, self.shape = list[tuple[Step, slice]](), shape
            for make, owns in path:
                steps.append((make(self.shape, like), slice(start, start + owns)))
                self.shape, start = steps[-1][0].shape, start + owns
            self.paths.append(steps)

    def forward(self, h: Tensor) -> Tensor:
        return self._sum(h, lambda step, _, after: step.forward(after))

    def backward(self, d: Tensor, into: Sequence[Tensor], on: bool) -> Tensor:
        return self._sum(d, lambda step, own, before: step.backward(before, into[own], True), back=True)

    def tangent(self, t: Tensor | None, along: Sequence[Tensor]) -> Tensor:
        t = along[0].new_zeros(self.before) if t is None else t
        return self._sum(t, lambda step, own, after: step.tangent(after, along[own]))

    def reverse(self, a: Tensor) -> Tensor:
        return self._sum(a, lambda step, _, before: step.reverse(before), back=True)

    def _sum(self, h: Tensor, through: Callable[[Step, slice, Tensor], Tensor], *, back: bool = False) -> Tensor:
        """The sum of both paths, each from h; `back`: from its last step to its first."""
        ends = []
        for steps in self.paths:
            end = h
            for step, own in reversed(steps) if back else steps:
                end = through(step, own, end)
            ends.append(end)
        return ends[0] + ends[1]


_STEPS: dict[type[Layer], Callable[..., Step]] = {
    layers.Sigmoid: _SigmoidStep,
    layers.Tanh: _TanhStep,
    layers.Relu: _ReluStep,
    layers.SoftRelu: _SoftReluStep,
    layers.MaxPool: _MaxPoolStep,
    layers.MeanPool: _MeanPoolStep,
    layers.Flatten: _FlattenStep,
    layers.Mean: _MeanStep,
    layers.Widen: _WidenStep,
}
"""The steps of layers without tensors."""
