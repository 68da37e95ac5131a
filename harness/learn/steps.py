"""The passes of each layer in a kernel of `learn.kernels`, which describes them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn.functional import linear, max_pool2d, softplus

from leakgauge.harness.learn.convolution import Scratch, Shape, conv_maker
from leakgauge.harness.learn.layers import (
    Block,
    Conv,
    Dense,
    Dropout,
    Flatten,
    Layer,
    MaxPool,
    Mean,
    MeanPool,
    Norm,
    Relu,
    Sigmoid,
    SoftRelu,
    Tanh,
    Widen,
)


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


Maker = Callable[[Shape, Scratch], Step]
"""Makes a layer's step from the shape of its input, [m, channels, b, ...]."""


def maker_of(layer: Layer, tensors: Iterator[Tensor]) -> Maker:
    """The maker of the layer's steps; work that is the same in every evaluation is done here, once."""
    if isinstance(layer, Block):
        return partial(_BlockStep, [_path(path, tensors) for path in (layer.layers, layer.shortcut)])
    own = list(itertools.islice(tensors, layer.owns))
    match layer:
        case Conv():
            return conv_maker(layer, own)
        case Dense():
            weight, *bias = own
            return partial(DenseStep, weight, bias[0] if bias else None)
        case Norm():
            return partial(_NormStep, layer, own)
        case SoftRelu() | MaxPool() | MeanPool() | Widen():
            return partial(_STEPS[type(layer)], layer)
    return _STEPS[type(layer)]


class _Path(NamedTuple):
    """One path of a residual block: the makers of its steps, and how many tensors each of its layers owns."""

    makers: list[Maker]
    owns: list[int]


def _path(layers: Sequence[Layer], tensors: Iterator[Tensor]) -> _Path:
    """The path of these layers, without dropouts."""
    kept = [layer for layer in layers if not isinstance(layer, Dropout)]
    return _Path([maker_of(layer, tensors) for layer in kept], [layer.owns for layer in kept])


class DenseStep:
    """A dense layer."""

    def __init__(self, weight: Tensor, bias: Tensor | None, shape: Shape, scratch: Scratch) -> None:
        self.weight, self.bias, self.shape = weight, bias, (*shape[:2], len(weight))
        self.moved, self.back = scratch.new(*self.shape), scratch.new(*shape)
        self.product = True
        """Whether the next backward pass computes the weights' gradient."""

    def forward(self, h: Tensor) -> Tensor:
        """Implement `Step`."""
        self.h = h
        return linear(h, self.weight, self.bias)

    def backward(self, d: Tensor, into: Sequence[Tensor], on: bool) -> Tensor:
        """Implement `Step`."""
        self.d = d
        if self.product:
            product = torch.mul if d.shape[1] == 1 else torch.bmm  # for one row, mul takes half the time
            product(d.transpose(1, 2), self.h, out=into[0])
        self.product = True
        if self.bias is not None:
            torch.sum(d, dim=1, out=into[1])
        return torch.matmul(d, self.weight) if on else d

    def tangent(self, t: Tensor | None, along: Sequence[Tensor]) -> Tensor:
        """Implement `Step`."""
        self.along = along[0]
        if self.bias is None:
            torch.bmm(self.h, along[0].transpose(1, 2), out=self.moved)
        else:
            torch.baddbmm(along[1][:, None], self.h, along[0].transpose(1, 2), out=self.moved)
        return self.moved if t is None else self.moved.add_(linear(t, self.weight))

    def reverse(self, a: Tensor) -> Tensor:
        """Implement `Step`."""
        return torch.matmul(a, self.weight, out=self.back).baddbmm_(self.d, self.along)


class _Smooth:
    """An entry-by-entry function."""

    def __init__(self, shape: Shape, scratch: Scratch) -> None:
        self.shape, self.one = shape, scratch.new().fill_(1.0)
        self.h, self.slope, self.d, self.t, self.a, self.bend = (scratch.new(*shape) for _ in range(6))
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
        torch.sub(self.one, self.h, out=self.slope).mul_(self.h)
        return self.h

    def tangent(self, t: Tensor | None, along: Sequence[Tensor]) -> Tensor:
        assert t is not None
        torch.add(self.one, self.h, alpha=-2, out=self.bend).mul_(t).mul_(self.d)
        self.bent = True
        return torch.mul(t, self.slope, out=self.t)


class _TanhStep(_Smooth):
    """tanh(z), with h' = 1 - h^2 and h'' = -2 h h'."""

    def forward(self, h: Tensor) -> Tensor:
        torch.tanh(h, out=self.h)
        torch.addcmul(self.one, self.h, self.h, value=-1, out=self.slope)
        return self.h

    def tangent(self, t: Tensor | None, along: Sequence[Tensor]) -> Tensor:
        assert t is not None
        # self.d already contains the factor h'
        torch.mul(self.h, t, out=self.bend).mul_(self.d).mul_(-2)
        self.bent = True
        return torch.mul(t, self.slope, out=self.t)


class _SoftReluStep(_Smooth):
    """softplus(z / width) width, whose slope is the sigmoid of z / width."""

    def __init__(self, layer: SoftRelu, shape: Shape, scratch: Scratch) -> None:
        super().__init__(shape, scratch)
        self.width = layer.width

    def forward(self, h: Tensor) -> Tensor:
        z = h / self.width
        torch.sigmoid(z, out=self.slope)
        return softplus(z, threshold=50).mul_(self.width)

    def tangent(self, t: Tensor | None, along: Sequence[Tensor]) -> Tensor:
        assert t is not None
        # self.d already contains one factor `slope`
        torch.sub(self.one, self.slope, out=self.bend).mul_(t).mul_(self.d).div_(self.width)
        self.bent = True
        return torch.mul(t, self.slope, out=self.t)


class _ReluStep(_Smooth):
    """max(z, 0); its second derivative is zero."""

    def forward(self, h: Tensor) -> Tensor:
        torch.clamp_min(h, 0.0, out=self.h)
        torch.sign(self.h, out=self.slope)
        return self.h

    def tangent(self, t: Tensor | None, along: Sequence[Tensor]) -> Tensor:
        assert t is not None
        return torch.mul(t, self.slope, out=self.t)


def _pooled(layer: MaxPool | MeanPool, shape: Shape) -> Shape:
    """The shape of the output of a pooling."""
    return (*shape[:3], *((side + 2 * layer.padding - layer.size) // layer.stride + 1 for side in shape[3:]))


class _MaxPoolStep:
    """The maximum of each window; the choice of the entry is treated as constant."""

    def __init__(self, layer: MaxPool, shape: Shape, scratch: Scratch) -> None:
        self.layer, self.before, self.shape = layer, shape, _pooled(layer, shape)

    def forward(self, h: Tensor) -> Tensor:
        window = self.layer.size, self.layer.stride, self.layer.padding
        pooled, taken = max_pool2d(h.flatten(0, 1), *window, return_indices=True)
        self.taken = taken.view(*self.shape[:3], -1)
        return pooled.view(self.shape)

    def backward(self, d: Tensor, into: Sequence[Tensor], on: bool) -> Tensor:
        return self.reverse(d)

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


class _FixedStep:
    """A linear map without parameters: its `tangent` is `forward`, its `backward` is `reverse`."""

    def forward(self, h: Tensor) -> Tensor:
        raise NotImplementedError

    def reverse(self, a: Tensor) -> Tensor:
        raise NotImplementedError

    def backward(self, d: Tensor, into: Sequence[Tensor], on: bool) -> Tensor:
        return self.reverse(d)

    def tangent(self, t: Tensor | None, along: Sequence[Tensor]) -> Tensor:
        assert t is not None
        return self.forward(t)


class _FlattenStep(_FixedStep):
    """Turns maps into rows."""

    def __init__(self, shape: Shape, scratch: Scratch) -> None:
        self.before = (shape[0], shape[2], shape[1], *shape[3:])
        self.shape = (*self.before[:2], math.prod(self.before[2:]))

    def forward(self, h: Tensor) -> Tensor:
        return h.transpose(1, 2).flatten(2)

    def reverse(self, a: Tensor) -> Tensor:
        return a.view(self.before).transpose(1, 2)


class _MeanStep(_FixedStep):
    """Turns maps into rows of their means."""

    def __init__(self, shape: Shape, scratch: Scratch) -> None:
        self.before, self.entries = shape, math.prod(shape[3:])
        self.shape: Shape = (shape[0], shape[2], shape[1])

    def forward(self, h: Tensor) -> Tensor:
        return h.mean((3, 4)).transpose(1, 2)

    def reverse(self, a: Tensor) -> Tensor:
        return (a.transpose(1, 2) / self.entries)[..., None, None].expand(self.before)


class _MeanPoolStep(_FixedStep):
    """The mean of each window."""

    def __init__(self, layer: MeanPool, shape: Shape, scratch: Scratch) -> None:
        self.layer, self.window = layer, [[side, side] for side in (layer.size, layer.stride, layer.padding)]
        self.before, self.shape = scratch.new(*shape), _pooled(layer, shape)

    def forward(self, h: Tensor) -> Tensor:
        return self.layer.apply(h.flatten(0, 1)).view(self.shape)

    def reverse(self, a: Tensor) -> Tensor:
        maps = a.flatten(0, 1), self.before.flatten(0, 1)
        back: Tensor = torch.ops.aten.avg_pool2d_backward(*maps, *self.window, False, True, None)
        return back.view(self.before.shape)


class _WidenStep(_FixedStep):
    """Every stride-th row and column, between channels of zeros."""

    def __init__(self, layer: Widen, shape: Shape, scratch: Scratch) -> None:
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

    def __init__(self, layer: Norm, tensors: Sequence[Tensor], shape: Shape, scratch: Scratch) -> None:
        self.shape, self.running, m = shape, tensors[2:], shape[0]
        self.scale, self.bias = (one[:, None, None, None] for one in tensors[:2])
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
        self.moves = [part[:, :, None, None, None] * self.rate / self.entries for part in along[2:]]
        moved = torch.addcmul(along[1][..., None, None, None], self.along, self.u.view(self.shape))
        self.t, self.of_t = self._along(torch.zeros(self.shape).to(moved) if t is None else t)
        return moved.addcmul_(self.t.view(self.shape), self.scale)

    def reverse(self, a: Tensor) -> Tensor:
        back, _ = self._along(torch.addcmul(self.d * self.along, a, self.scale))
        both = (self._sets(self.d * self.scale) * self.t).mean(self.over, keepdim=True)
        bend = torch.addcmul(self.u * both, self.of_t, self.e).addcmul_(self.of_e, self.t)
        back.addcmul_(bend, self.factor, value=-1)
        if self.moves:
            mean, variance = self.moves
            back.sub_(mean).addcmul_(self.u, variance * self.unbiased / self.factor, value=-2)
        return back.view(self.shape)

    def _along(self, w: Tensor) -> tuple[Tensor, Tensor]:
        """J w, and mean(u w)."""
        w = self._sets(w)
        of_w = (self.u * w).mean(self.over, keepdim=True)
        return (w - w.mean(self.over, keepdim=True)).addcmul_(self.u, of_w, value=-1).mul_(self.factor), of_w

    def _sets(self, w: Tensor) -> Tensor:
        """Maps, split into the sets of entries that are normalized together."""
        return w.reshape(self.sets)


class _BlockStep:
    """The sum of two paths of layers."""

    def __init__(self, paths: Sequence[_Path], shape: Shape, scratch: Scratch) -> None:
        self.before, self.paths, start = shape, list[tuple[list[Step], list[slice]]](), 0
        for path in paths:
            steps, after = list[Step](), shape
            for make in path.makers:
                steps.append(make(after, scratch))
                after = steps[-1].shape
            ends = list(itertools.accumulate(path.owns, initial=start))
            self.paths.append((steps, [slice(*pair) for pair in itertools.pairwise(ends)]))
            self.shape, start = after, ends[-1]

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
        for steps, owns in self.paths:
            end = h
            for step, own in list(zip(steps, owns, strict=True))[:: -1 if back else 1]:
                end = through(step, own, end)
            ends.append(end)
        return ends[0] + ends[1]


_STEPS: dict[type[Layer], Callable[..., Step]] = {
    Sigmoid: _SigmoidStep,
    Tanh: _TanhStep,
    Relu: _ReluStep,
    SoftRelu: _SoftReluStep,
    MaxPool: _MaxPoolStep,
    MeanPool: _MeanPoolStep,
    Flatten: _FlattenStep,
    Mean: _MeanStep,
    Widen: _WidenStep,
}
"""The steps of layers without tensors."""
