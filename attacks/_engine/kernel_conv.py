"""A convolution in one evaluation of `attacks._engine.kernels`: products of weights with patches.

The patches are copied from maps whose channels come last, in runs of kernel * channels entries: a fifth of the time of
torch's `unfold`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from leakgauge.harness.learn.layers import Conv


class Filters:
    """A convolution's weights as matrices of a product with patches.

    Backwards, input u (counted with the padding) belongs to the outputs o with u = stride o + k, k in the kernel. With
    u = stride q + phase and k = stride j + phase, o is q - j: windows of `reach` outputs, one product for all phases.

    Entries are reordered by `index_select` from a list of their places: a third of the time, or a tenth, of a copy of
    the permuted view.
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
        """The weights [m, outputs * inputs * kernel * kernel] of such rows."""
        return rows.flatten(1).index_select(1, self._inverse)

    def turned(self, rows: Tensor) -> Tensor:
        """[m, stride * stride * inputs, reach * reach * outputs] of such rows."""
        entries = rows.flatten(1).index_select(1, self._turned).mul_(self._inside)
        return entries.view(len(rows), self.layer.stride**2 * self.layer.inputs, -1)

    def _turn(self, places: Tensor) -> Tensor:
        """Of each entry of `turned` its place, from those of the weights' entries; -1: it is zero."""
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
        """[m, reach * reach * outputs, positions of the input / stride]; sides: of the input."""
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
        """Of each entry of the maps its place in the product."""
        stride, skipped = self.layer.stride, self.layer.padding % self.layer.stride
        counts = [self._end(side) - self.start for side in sides]
        phases = places.view(stride, stride, self.layer.inputs, b, *counts)
        full = phases.permute(2, 3, 4, 0, 5, 1).flatten(4).flatten(2, 3)
        return full[..., skipped : skipped + sides[0], skipped : skipped + sides[1]].flatten()

    def _end(self, side: int) -> int:
        """One past the last q of an input with this side."""
        return (self.layer.padding + side - 1) // self.layer.stride + 1


class _Windows:
    """All windows of maps [m, channels, b, height, width] with zeros around, channels last.

    margins: zeros before and after the rows, and the columns. The padded maps are scratch, kept for the next maps of
    this shape: with them and the views of them made anew, a tenth of an evaluation went into small calls.
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
        # not `reshape`: of a single window it is a view of the scratch, which the next maps overwrite
        return self._all.clone(memory_format=torch.contiguous_format).view(self._shape).transpose(1, 2)


class ConvStep:
    """A step of `attacks._engine.kernels`: one convolution, whose input maps are [m, inputs, b, height, width]."""

    def __init__(self, filters: Filters) -> None:
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
        """The parameters' weights, for every instance."""
        return weight.expand(self.shape[0], -1, -1)

    def _back(self, product: Tensor) -> Tensor:
        """Maps of the input's sides."""
        return self.filters.unphase(product, self.shape[2], self.sides)
