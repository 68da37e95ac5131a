"""Convolutions of gradient matching, for many instances at once: by compiled loops, or by products of patches.

Each instance has weights or slopes of its own for a few small maps. As products of matrices, half of the time goes into
copies of patches. The loops (`harness/core/native.c`) read the maps themselves, copied into margins of zeros.

An input u, counted with the padding, is place q of phase f: u = stride q + f. The phases of a row are kept apart, so
that neighbors in a phase are neighbors in memory. Forward, output y reads the inputs stride y + k, k in the kernel, so
place y + k // stride of phase k % stride. Backward, place q of phase f reads the slopes q - j, with k = stride j + f.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain, product
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from leakgauge.harness.core.native import Library, library_for
from leakgauge.harness.learn.layers import Conv

Shape = tuple[int, ...]


class Scratch:
    """Allocates memory with the type and device of a tensor."""

    def __init__(self, like: Tensor) -> None:
        self.like = like.new_empty(0)
        self.spare = self.like

    def new(self, *shape: int) -> Tensor:
        """Zeros [*shape]."""
        return self.like.new_zeros(shape)

    def shared(self, *shape: int) -> Tensor:
        """[*shape], one block for all callers: only for results that the next operation consumes."""
        if self.spare.numel() < math.prod(shape):
            self.spare = self.new(math.prod(shape))
        return self.spare[: math.prod(shape)].view(shape)


def conv_maker(layer: Conv, own: Sequence[Tensor]) -> Callable[[Shape, Scratch], _NativeConvStep | _PatchConvStep]:
    """The maker of the steps of a convolution with these tensors; what is the same in every step is computed here."""
    native = library_for(own[0])
    return (
        partial(_PatchConvStep, _Filters(layer, *own))
        if native is None
        else partial(_NativeConvStep, native, layer, own)
    )


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

    def __init__(self, native: Library, layer: Conv, own: Sequence[Tensor], shape: Shape, scratch: Scratch) -> None:
        (m, ins, b, *_), new = shape, scratch.new
        self.native, self.m, self.plans, self.biased = native, m, _plans(layer, native.lanes, *shape[1:]), layer.bias
        self.shape: Shape = (m, layer.outputs, b, *self.plans.sides)
        self.own = [tensor.contiguous() for tensor in own]
        self.weight, *bias = (_Rows(tensor.data_ptr(), 0) for tensor in self.own)
        self.bias = bias[0] if self.biased else _NOTHING
        self.ahead, self.ahead_of_t = (new(m * ins * b, self.plans.ahead) for _ in range(2))
        self.behind, self.behind_of_a = (new(m * layer.outputs * b, self.plans.behind) for _ in range(2))
        self.out, self.moved, self.back = new(*self.shape), new(*self.shape), new(*shape)

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


class _PatchConvStep:
    """A convolution as products of weights with patches of its input maps [m, inputs, b, height, width]."""

    def __init__(self, filters: _Filters, shape: Shape, scratch: Scratch) -> None:
        layer, (m, inputs, b, *sides) = filters.layer, shape
        after = [(side + 2 * layer.padding - layer.kernel) // layer.stride + 1 for side in sides]
        self.filters, self.shape = filters, (m, layer.outputs, b, *after)
        self.bias = filters.bias
        self.forth, self.back = (matrix.expand(m, -1, -1) for matrix in (filters.forth, filters.back))
        margins = [(layer.padding, layer.padding)] * 2
        self.patches, self.patches_of_t = (
            _Windows(shape, margins, layer.kernel, layer.stride, scratch, keep) for keep in (True, False)
        )
        self.patches_back, self.patches_of_a = (
            filters.behind(self.shape, sides, scratch, keep) for keep in (True, False)
        )
        square = (layer.kernel, layer.kernel)
        self.weights = scratch.shared(m, *filters.forth.shape[1:])
        self.in_order = self.weights.view(m, layer.outputs, *square, inputs).permute(0, 1, 4, 2, 3)
        self.padded = scratch.new(m, filters.forth.numel() + 1)  # the last entry stays zero
        self.along = self.padded[:, :-1].view(self.weights.shape)
        self.along_in_order = self.along.view(m, layer.outputs, *square, inputs).permute(0, 1, 4, 2, 3)
        self.turned = scratch.new(m, *filters.back.shape[1:])
        columns = (m, layer.outputs, b * math.prod(after))
        self.out, self.moved = scratch.new(*columns), scratch.new(*columns)
        self.product = scratch.new(m, filters.back.shape[1], self.patches_back.positions)
        self.unphased = filters.unphased(b, sides)
        self.maps = self.product.view(shape) if self.unphased is None else scratch.new(*shape)

    def forward(self, h: Tensor) -> Tensor:
        if self.bias is None:
            torch.bmm(self.forth, self.patches(h), out=self.out)
        else:
            torch.baddbmm(self.bias, self.forth, self.patches(h), out=self.out)
        return self.out.view(self.shape)

    def backward(self, d: Tensor, into: Sequence[Tensor], on: bool) -> Tensor:
        columns = d.flatten(2)
        torch.bmm(columns, self.patches.rows, out=self.weights)
        into[0].copy_(self.in_order)
        if self.bias is not None:
            torch.sum(columns, dim=2, out=into[1])
        torch.bmm(self.back, self.patches_back(d), out=self.product) if on else self.patches_back(d)
        return self._unphase() if on else d

    def tangent(self, t: Tensor | None, along: Sequence[Tensor]) -> Tensor:
        self.along_in_order.copy_(along[0])
        if self.bias is None:
            torch.bmm(self.along, self.patches.columns, out=self.moved)
        else:
            torch.baddbmm(along[1][:, :, None], self.along, self.patches.columns, out=self.moved)
        if t is not None:
            self.moved.baddbmm_(self.forth, self.patches_of_t(t))
        return self.moved.view(self.shape)

    def reverse(self, a: Tensor) -> Tensor:
        torch.index_select(self.padded, 1, self.filters.turned, out=self.turned.flatten(1))
        torch.bmm(self.turned, self.patches_back.columns, out=self.product)
        self.product.baddbmm_(self.back, self.patches_of_a(a))
        return self._unphase()

    def _unphase(self) -> Tensor:
        """The product as maps with the input's height and width."""
        if self.unphased is not None:
            torch.index_select(self.product.flatten(1), 1, self.unphased, out=self.maps.flatten(1))
        return self.maps


class _Filters:
    """A convolution's weights as matrices that multiply patches.

    In the backward pass, input u (counted with the padding) contributes to the outputs o with u = stride o + k, k in
    the kernel. With u = stride q + phase and k = stride j + phase, o is q - j: windows of `reach` outputs, one product
    for all phases. Entries are reordered by `index_select` from a list of their places, which takes a third to a tenth
    of the time of copying the permuted view.

    Attributes:
        forth: [1, outputs, kernel * kernel * inputs].
        back: [1, stride * stride * inputs, reach * reach * outputs], for the backward product.
        turned: the place of each entry of `back` in `forth` with a zero appended.
    """

    def __init__(self, layer: Conv, weight: Tensor, bias: Tensor | None = None) -> None:
        self.layer, self.bias = layer, None if bias is None else bias[:, None]
        self.reach = -(-layer.kernel // layer.stride)
        self.start = layer.padding // layer.stride
        self.forth = weight.permute(0, 2, 3, 1).reshape(1, layer.outputs, -1)
        places = torch.arange(weight.numel(), device=weight.device).view(layer.outputs, *weight.shape[2:], -1)
        missing = layer.stride * self.reach - layer.kernel
        full = pad(places.permute(0, 3, 1, 2), (0, missing, 0, missing), value=places.numel())
        phases = full.view(*full.shape[:2], self.reach, layer.stride, self.reach, layer.stride).flip(2, 4)
        self.turned = phases.permute(3, 5, 1, 2, 4, 0).flatten()
        zeroed = torch.cat([self.forth.flatten(), weight.new_zeros(1)])
        self.back = zeroed[self.turned].view(1, layer.stride**2 * layer.inputs, -1)
        self._unphased: dict[tuple[int, ...], Tensor] = {}

    def behind(self, shape: Shape, sides: Sequence[int], scratch: Scratch, keep: bool) -> _Windows:
        """The patches of outputs, [m, reach * reach * outputs, positions of the input / stride].

        sides: height and width of the input.
        """
        before = self.reach - 1 - self.start
        margins = [(before, self._end(side) - have) for side, have in zip(sides, shape[3:], strict=True)]
        return _Windows(shape, margins, self.reach, 1, scratch, keep)

    def unphased(self, b: int, sides: Sequence[int]) -> Tensor | None:
        """The place in the backward product of each entry of the maps [inputs, b, *sides]; None: the same place."""
        stride, skipped = self.layer.stride, self.layer.padding % self.layer.stride
        if stride == 1:
            return None
        if (b, *sides) not in self._unphased:
            counts = [self._end(side) - self.start for side in sides]
            count = stride**2 * self.layer.inputs * b * math.prod(counts)
            places = torch.arange(count, device=self.turned.device)
            phases = places.view(stride, stride, self.layer.inputs, b, *counts)
            full = phases.permute(2, 3, 4, 0, 5, 1).flatten(4).flatten(2, 3)
            inside = full[..., skipped : skipped + sides[0], skipped : skipped + sides[1]]
            self._unphased[b, *sides] = inside.flatten()
        return self._unphased[b, *sides]

    def _end(self, side: int) -> int:
        """One past the last q of an input with this height or width."""
        return (self.layer.padding + side - 1) // self.layer.stride + 1


class _Windows:
    """All windows of maps [m, channels, b, height, width] in margins of zeros (before, after) of rows and columns.

    Channels come last in the padded maps, so runs of kernel * channels entries are copied: a fifth of the time of
    torch's `unfold`.

    Attributes:
        rows: [m, b * positions, kernel * kernel * channels], windows of the last maps.
        columns: the same, transposed.
    """

    def __init__(
        self, shape: Shape, margins: Sequence[tuple[int, int]], kernel: int, stride: int, scratch: Scratch, keep: bool
    ) -> None:
        m, channels, b, height, width = shape
        (top, bottom), (left, right) = margins
        padded = scratch.new(m, b, top + height + bottom, left + width + right, channels)
        self._inside = padded[:, :, top : top + height, left : left + width].permute(0, 4, 1, 2, 3)
        self._all = padded.unfold(2, kernel, stride).unfold(3, kernel, stride).permute(0, 1, 2, 3, 5, 6, 4)
        self._copy = (scratch.new if keep else scratch.shared)(*self._all.shape)
        self.positions = b * math.prod(self._all.shape[2:4])
        self.rows = self._copy.view(m, self.positions, -1)
        self.columns = self.rows.transpose(1, 2)

    def __call__(self, maps: Tensor) -> Tensor:
        """`columns` of these maps."""
        self._inside.copy_(maps)
        self._copy.copy_(self._all)
        return self.columns
