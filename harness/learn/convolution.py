"""Convolutions of gradient matching, for many instances at once: by compiled loops, or by products of patches.

Each instance has weights or slopes of its own for a few small maps. As products of matrices, half of the time goes into
copies of patches. The loops (`harness/core/native.c`) read the maps themselves, copied into margins of zeros.

An input u, counted with the padding, is place q of phase f: u = stride q + f. The phases of a row are kept apart, so
that neighbors in a phase are neighbors in memory. Forward, output y reads the inputs stride y + k, k in the kernel, so
place y + k // stride of phase k % stride. Backward, place q of phase f reads the slopes q - j, with k = stride j + f.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain, product
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import fold, pad

from leakgauge.harness.core.native import Library, library_for
from leakgauge.harness.learn.layers import Conv

Shape = tuple[int, ...]

_CACHED = 2**19
"""Entries of padded maps that are filled at once: they stay in the cache, and no more memory is asked for."""


def conv_maker(layer: Conv, own: Sequence[Tensor]) -> Callable[[Shape, Tensor], _NativeConvStep | _PatchConvStep]:
    """The maker of the steps of a convolution with these tensors."""
    native = library_for(own[0])
    return partial(_PatchConvStep, layer, own) if native is None else partial(_NativeConvStep, native, layer, own)


class _Rows(NamedTuple):
    """One array for each instance: the address of the first, and the distance to the next; 0: all share one."""

    at: int | None
    by: int

    @classmethod
    def of(cls, tensor: Tensor) -> _Rows:
        return cls(tensor.data_ptr(), tensor.stride(0))


_NOTHING = _Rows(None, 0)


class _NativeConvStep:
    """A `Step` of `harness.learn.kernels`, by compiled loops."""

    def __init__(self, native: Library, layer: Conv, own: Sequence[Tensor], shape: Shape, like: Tensor) -> None:
        m, ins, b, *_ = shape
        self.native, self.m, self.plans, self.biased = native, m, _plans(layer, native.lanes, *shape[1:]), layer.bias
        self.shape: Shape = (m, layer.outputs, b, *self.plans.sides)
        self.own = [tensor.contiguous() for tensor in own]
        self.weight, *bias = (_Rows(tensor.data_ptr(), 0) for tensor in self.own)
        self.bias = bias[0] if self.biased else _NOTHING
        self.ahead, self.ahead_of_t = (like.new_zeros(m * ins * b, self.plans.ahead) for _ in range(2))
        self.behind, self.behind_of_a = (like.new_zeros(m * layer.outputs * b, self.plans.behind) for _ in range(2))
        self.out, self.moved, self.back = (like.new_zeros(each) for each in (self.shape, self.shape, shape))

    def forward(self, h: Tensor) -> Tensor:
        self._pad(self.plans.spread, h, self.ahead)
        return self._correlate(self.plans.forward, self.out, [(self.ahead, self.weight)], self.bias)

    def backward(self, d: Tensor, into: Sequence[Tensor], on: bool) -> Tensor:
        self._pad(self.plans.spread_back, d, self.behind)
        inputs, slopes, gradient = self.ahead.data_ptr(), self.behind.data_ptr(), _Rows.of(into[0])
        self.native.weights(self.plans.weights.data_ptr(), self.m, inputs, slopes, *gradient)
        if self.biased:
            torch.sum(d.flatten(2), dim=2, out=into[1])
        return self._correlate(self.plans.backward, self.back, [(self.behind, self.weight)]) if on else d

    def tangent(self, t: Tensor | None, along: Sequence[Tensor]) -> Tensor:
        self.along = along[0]
        terms = [(self.ahead, _Rows.of(self.along))]
        if t is not None:
            self._pad(self.plans.spread, t, self.ahead_of_t)
            terms.append((self.ahead_of_t, self.weight))
        bias = _Rows.of(along[1]) if self.biased else _NOTHING
        return self._correlate(self.plans.forward, self.moved, terms, bias)

    def reverse(self, a: Tensor) -> Tensor:
        self._pad(self.plans.spread_back, a, self.behind_of_a)
        terms = [(self.behind, _Rows.of(self.along)), (self.behind_of_a, self.weight)]
        return self._correlate(self.plans.backward, self.back, terms)

    def _pad(self, plan: Tensor, maps: Tensor, into: Tensor) -> None:
        """Copy maps [m, channels, b, height, width] into their margins."""
        source = maps.contiguous()
        self.native.spread(plan.data_ptr(), len(into), source.data_ptr(), into.data_ptr())

    def _correlate(
        self, plan: Tensor, out: Tensor, terms: Sequence[tuple[Tensor, _Rows]], bias: _Rows = _NOTHING
    ) -> Tensor:
        """Fill `out` with the sum of one or two products of padded maps and weights, plus a bias."""
        (first, weight), (second, weight_too) = terms[0], terms[1] if len(terms) > 1 else (None, _NOTHING)
        too = None if second is None else second.data_ptr()
        operands = first.data_ptr(), *weight, too, *weight_too, *bias
        self.native.correlate(plan.data_ptr(), self.m, *operands, out.data_ptr())
        return out


class _Axis(NamedTuple):
    """The rows or the columns of a convolution.

    lanes: how many neighbors are computed at once; the last ones may lie in the margin.
    """

    size: int
    kernel: int
    stride: int
    padding: int
    lanes: int

    @property
    def outputs(self) -> int:
        return (self.size + 2 * self.padding - self.kernel) // self.stride + 1

    def places(self, phase: int) -> range:
        """The places of the inputs in a phase, without the padding."""
        first, after = self.padding - phase, self.padding + self.size - phase
        return range(-(-first // self.stride), -(-after // self.stride))

    def input(self, phase: int, place: int) -> int:
        return self.stride * place + phase - self.padding

    def taps(self, phase: int) -> range:
        return range(phase, self.kernel, self.stride)

    def whole(self, count: int) -> int:
        """How many are computed if `count` are needed."""
        return -(-count // self.lanes) * self.lanes

    @property
    def ahead(self) -> int:
        """Number of places of one phase with the padding, as far as an output is computed."""
        reach = self.whole(self.outputs) + (self.kernel - 1) // self.stride
        return max(-(-(self.size + 2 * self.padding) // self.stride), reach)

    @property
    def margin(self) -> int:
        """Number of zeros before the slopes."""
        return max(0, *(len(self.taps(f)) - 1 - self.places(f).start for f in range(self.stride)))

    @property
    def behind(self) -> int:
        """Number of slopes with zeros on both sides, as far as a place of a phase is computed."""
        ends = (self.places(f).start + self.whole(len(self.places(f))) for f in range(self.stride))
        return self.margin + max(self.whole(self.outputs), *ends)


class _Plans(NamedTuple):
    """What `native.c` does for a convolution, as lists of int64, and the sizes of the arrays.

    Attributes:
        sides: height and width of the output.
        ahead, behind: entries of a padded map of inputs, or of slopes.
        spread, spread_back: copy inputs, or slopes, into padded maps.
        forward, backward, weights: compute outputs, slopes of inputs, and gradients of weights.
    """

    sides: tuple[int, int]
    ahead: int
    behind: int
    spread: Tensor
    spread_back: Tensor
    forward: Tensor
    backward: Tensor
    weights: Tensor


@functools.lru_cache(256)
def _plans(layer: Conv, lanes: int, ins: int, b: int, height: int, width: int) -> _Plans:
    """The plans for inputs [m, ins, b, height, width]; lanes: neighboring columns that are computed at once."""
    axes = [_Axis(size, layer.kernel, layer.stride, layer.padding, 1) for size in (height, width)]
    rows, columns = axes[0], axes[1]._replace(lanes=lanes)
    phases, square = range(layer.stride), layer.kernel**2
    phase = rows.ahead * columns.ahead
    ahead, behind = layer.stride**2 * phase, rows.behind * columns.behind
    inputs, outputs = height * width, rows.outputs * columns.outputs

    def cell(u: int, v: int) -> int:
        """The entry of row u and column v, counted with the padding, in a padded map of inputs."""
        (q, f), (r, g) = divmod(u, layer.stride), divmod(v, layer.stride)
        return (f * layer.stride + g) * phase + q * columns.ahead + r

    def slope(y: int, x: int) -> int:
        """The entry of output y, x in a padded map of slopes."""
        return (rows.margin + y) * columns.behind + columns.margin + x

    firsts = [columns.places(g).start for g in phases]
    parts = [
        (columns.input(g, q), cell(0, layer.stride * q + g), len(columns.places(g)))
        for g, q in zip(phases, firsts, strict=True)
    ]
    spread = [height, layer.stride, layer.stride, inputs, width, ahead, *chain.from_iterable(parts)]
    spread += [cell(row + layer.padding, 0) for row in range(height)]
    spread_back = [rows.outputs, 1, 1, outputs, columns.outputs, behind, 0, columns.margin, columns.outputs]
    spread_back += [slope(y, 0) - columns.margin for y in range(rows.outputs)]

    taps = [(k * layer.kernel + j, cell(k, j)) for k, j in product(range(layer.kernel), repeat=2)]
    places = [
        (image, y, x, min(lanes, columns.outputs - x))
        for image, y, x in product(range(b), range(rows.outputs), range(0, columns.outputs, lanes))
    ]
    read = [image * ahead + y * columns.ahead + x for image, y, x, _ in places]
    written = [image * outputs + y * columns.outputs + x for image, y, x, _ in places]
    slopes = [image * behind + slope(y, x) for image, y, x, _ in places]
    of_weights, of_inputs = (ins * square, square), (b * ahead, ins * b * ahead)
    of_slopes = b * behind, layer.outputs * b * behind
    forward = [layer.outputs, ins, *of_weights, *of_inputs, b * outputs, layer.outputs * b * outputs, 1, 1]
    forward += [
        len(taps),
        len(places),
        *chain.from_iterable(taps),
        *chain.from_iterable(zip(read, written, (p[3] for p in places), strict=True)),
    ]
    weights = [layer.outputs, ins, *of_weights, *of_inputs, *of_slopes, len(taps), len(places)]
    weights += [*chain.from_iterable(taps), *chain.from_iterable(zip(read, slopes, strict=True))]

    backward = [ins, layer.outputs, *reversed(of_weights), *of_slopes, b * inputs, ins * b * inputs]
    backward += [layer.stride, layer.stride**2]
    for f, g in product(phases, repeat=2):
        taps = [
            (k * layer.kernel + j, -(k // layer.stride) * columns.behind - j // layer.stride)
            for k, j in product(rows.taps(f), columns.taps(g))
        ]
        across = columns.places(g)
        targets = [
            (
                image * behind + slope(q, r),
                image * inputs + rows.input(f, q) * width + columns.input(g, r),
                min(lanes, across.stop - r),
            )
            for image, q, r in product(range(b), rows.places(f), across[::lanes])
        ]
        backward += [len(taps), len(targets), *chain.from_iterable(taps), *chain.from_iterable(targets)]
    plans = (torch.tensor(plan) for plan in (spread, spread_back, forward, backward, weights))
    return _Plans((rows.outputs, columns.outputs), ahead, behind, *plans)


def kernel_gradients(
    inputs: Tensor, deltas: Tensor, kernel: Sequence[int], stride: Sequence[int], padding: Sequence[int]
) -> Tensor | None:
    """[b, outputs * inputs * kernel] each record's gradient of a kernel, by compiled loops; None: they do not do it.

    A half to all of the time of products of patches (measured for 1 to 20 maps of 12 to 32 squared).

    Args:
        inputs: [b, inputs, H, W].
        deltas: [b, outputs, h, w], the gradients of the outputs.
    """
    native, square = library_for(deltas), all(len(set(size)) == 1 for size in (kernel, stride, padding))
    if native is None or inputs.dtype != deltas.dtype or not square or padding[0] >= kernel[0]:
        return None
    layer = Conv("", inputs.shape[1], deltas.shape[1], kernel[0], stride[0], padding[0], bias=False)
    plans = _plans(layer, native.lanes, inputs.shape[1], 1, *inputs.shape[2:])
    rows = deltas.new_empty(len(deltas), layer.outputs * layer.inputs * layer.kernel**2)
    count = min(len(rows), max(1, _CACHED // (layer.inputs * plans.ahead + layer.outputs * plans.behind)))
    ahead, behind = (rows.new_zeros(count, n) for n in (layer.inputs * plans.ahead, layer.outputs * plans.behind))
    sources = (torch.split(each.contiguous(), count) for each in (inputs, deltas, rows))
    for x, d, out in zip(*sources, strict=True):
        native.spread(plans.spread.data_ptr(), len(x) * layer.inputs, x.data_ptr(), ahead.data_ptr())
        native.spread(plans.spread_back.data_ptr(), len(d) * layer.outputs, d.data_ptr(), behind.data_ptr())
        native.weights(plans.weights.data_ptr(), len(x), ahead.data_ptr(), behind.data_ptr(), *_Rows.of(out))
    return rows


class _PatchConvStep:
    """A `Step` of `harness.learn.kernels`, by products of weights with patches of its inputs."""

    def __init__(self, layer: Conv, own: Sequence[Tensor], shape: Shape, like: Tensor) -> None:
        after = ((side + 2 * layer.padding - layer.kernel) // layer.stride + 1 for side in shape[3:])
        self.layer, self.before, self.shape = layer, shape, (shape[0], layer.outputs, shape[2], *after)
        self.weight = own[0].flatten(1).expand(shape[0], -1, -1)
        self.bias = own[1][:, None] if layer.bias else like.new_zeros(1)

    def forward(self, h: Tensor) -> Tensor:
        self.columns = self._patches(h)
        return torch.baddbmm(self.bias, self.weight, self.columns).view(self.shape)

    def backward(self, d: Tensor, into: Sequence[Tensor], on: bool) -> Tensor:
        self.d = d.flatten(2)
        torch.bmm(self.d, self.columns.mT, out=into[0].view(self.weight.shape))
        if self.layer.bias:
            torch.sum(self.d, dim=2, out=into[1])
        return self._maps(torch.bmm(self.weight.mT, self.d)) if on else d

    def tangent(self, t: Tensor | None, along: Sequence[Tensor]) -> Tensor:
        self.along = along[0].flatten(2)
        moved = torch.baddbmm(along[1][:, :, None] if self.layer.bias else self.bias, self.along, self.columns)
        if t is not None:
            moved.baddbmm_(self.weight, self._patches(t))
        return moved.view(self.shape)

    def reverse(self, a: Tensor) -> Tensor:
        return self._maps(torch.bmm(self.along.mT, self.d).baddbmm_(self.weight.mT, a.flatten(2)))

    def _patches(self, maps: Tensor) -> Tensor:
        kernel, stride, padding = ((side, side) for side in (self.layer.kernel, self.layer.stride, self.layer.padding))
        return patches(maps, kernel, stride, padding)

    def _maps(self, columns: Tensor) -> Tensor:
        """The sums of patches, given as columns, where they overlap: maps with the input's height and width."""
        m, channels, b, height, width = self.before
        images = columns.view(m, -1, b, columns.shape[2] // b).transpose(1, 2).flatten(0, 1)
        layer = self.layer
        maps = fold(images, (height, width), layer.kernel, padding=layer.padding, stride=layer.stride)
        return maps.view(m, b, channels, height, width).transpose(1, 2)


def patches(maps: Tensor, kernel: Sequence[int], stride: Sequence[int], padding: Sequence[int]) -> Tensor:
    """[m, entries of a patch, b * positions] of maps [m, channels, b, height, width]; sizes are (rows, columns).

    A copy of a strided view takes half the time of torch's `unfold`.
    """
    high, wide = padding
    padded = pad(maps, (wide, wide, high, high)) if high or wide else maps
    windows = padded.unfold(3, kernel[0], stride[0]).unfold(4, kernel[1], stride[1])
    return windows.permute(0, 1, 5, 6, 2, 3, 4).flatten(4).flatten(1, 3)
