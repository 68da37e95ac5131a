"""The sum of clipped per-record gradients of a batch, without a loop over its records.

A forward pass records every layer that takes a parameter; a backward pass ends at the outputs of these layers. A
layer's inputs and output gradients give the norms of the records' gradients and, once all norms are known, their
weighted sum. A record's gradient of a dense layer is an outer product, whose norm is found without forming the product
(ghost norm). The gradients of a small kernel are materialized and kept for the sum. Dense stacks have their own
formulas.

Source: Goodfellow 2015 (arXiv 1510.01799) for dense layers; Bu, Mao, Xu 2022 (arXiv 2205.10683) for choosing the method
by the size of the layer. Differs: the threshold is measured.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import NamedTuple

import torch
from torch import Tensor
from torch.linalg import vector_norm
from torch.nn.functional import conv2d, group_norm, linear
from torch.nn.grad import conv2d_weight

from leakgauge.harness.learn import convolution
from leakgauge.harness.learn.tasks import ModelTask

Squares = Callable[[torch.dtype], Tensor]
"""Squared norms of one part of each record's gradient, in the given type."""

_CACHE = 2**19  # patch entries that are materialized at once; patches beyond the cache cost up to four times as much
_KEPT = 2**22  # maximum entries (16 MiB) of one kernel's gradients that are kept for the sum; else only norms are

_GRAM = 64
"""Inner products of positions are faster if the kernel's gradient has more than this many times as many entries as
there are pairs of positions (measured)."""

_kernel_gradient: Callable[..., Tensor] = conv2d_weight  # untyped in torch


class UnknownUse(Exception):
    """A parameter is used in a way for which this module has no per-record gradients."""


def clipped_gradient(
    task: ModelTask,
    tensors: Sequence[Tensor],
    x: Tensor,
    y: Tensor,
    keep: Sequence[Tensor] | None,
    clip: float,
    divisor: float,
) -> list[Tensor]:
    """sum_i g_i min(1, clip / ||g_i||) / divisor over the records i, in the tensors' shapes.

    g_i is the gradient of record i's loss with respect to all tensors together, without the penalty, which depends on
    no record. The model must not mix records, as a batch norm does, because a single record would have no gradient.

    Args:
        tensors: parameters, in the layout's order. Not modified.
        x, y, keep: as for `ModelTask.losses`.
        clip: C > 0; infinite: no clipping.

    Guarantees:
        A record with a zero gradient adds zero; a batch without records gives zeros.
        No norm overflows before its gradient does; a NaN in one record's gradient gives a NaN in the sum.

    Raises:
        UnknownUse: a parameter is not used by exactly one dense layer, convolution or group norm.
    """
    if not len(x):
        return [torch.zeros_like(tensor) for tensor in tensors]
    if task.structure is not None and task.model.widths is not None and task.softmax and y.ndim == 1:
        tanh = task.structure.widths is None
        per_record, scale = _dense_gradients(task.structure.ordered(tensors), x, y, tanh=tanh), 1.0
        positions = task.structure.ordered(range(len(tensors)))
    else:
        per_record, positions, scale = _watched_gradients(task, tensors, x, y, keep)
    with torch.no_grad():
        squares = [gradients.squares for gradients in per_record]
        factors = clip_factors(squares, tensors[0].dtype, clip / divisor, scale / divisor)
        totals = [total for gradients in per_record for total in gradients.totals(factors)]
    by_position = dict(zip(positions, totals, strict=True))
    return [by_position[position] for position in range(len(tensors))]


def dense_deltas(
    tensors: Sequence[Tensor], x: Tensor, y: Tensor, weight: Tensor | None = None, *, tanh: bool = False
) -> tuple[list[Tensor], list[Tensor]]:
    """Each layer's input [c, b, n], and the gradients by its output [c, b, m] of the records' losses times `weight`.

    tensors: parameters of a dense stack with cross-entropy, with ReLU or tanh between its layers, and with a first axis
    c; x: [c, b, *input_shape]; y: [c, b]; weight: [c, b], or None for 1.
    """
    matrices, biases = tensors[0::2], tensors[1::2]
    inputs = [x.flatten(2)]
    for matrix, bias in zip(matrices, biases, strict=True):
        inputs.append(torch.baddbmm(bias[:, None], inputs[-1], matrix.transpose(1, 2)))
        if len(inputs) <= len(matrices):
            inputs[-1].tanh_() if tanh else inputs[-1].relu_()
    delta = torch.softmax(inputs.pop(), -1)
    delta.scatter_add_(-1, y[..., None], torch.full_like(y[..., None], -1, dtype=delta.dtype))
    if weight is not None:
        delta *= weight[..., None]
    deltas = [delta]
    for matrix, entered in zip(matrices[:0:-1], inputs[:0:-1], strict=True):
        deltas.append(torch.bmm(deltas[-1], matrix).mul_(1 - entered.square() if tanh else entered > 0))
    return inputs, deltas[::-1]


def clip_factors(parts: Sequence[Squares], dtype: torch.dtype, clip: float, most: float = 1.0) -> Tensor:
    """min(most, clip / norm) for each record; `most` for a zero norm, NaN for a NaN norm.

    The squared norm is the sum of `parts`. If it overflows in `dtype`, the gradients' type, it is computed in float64.
    """
    for precision in (dtype, torch.float64):
        squares = reduce(torch.add, [term(precision) for term in parts])
        if math.isfinite(float(squares.sum())):
            break
    return (squares.rsqrt() * clip).clamp(max=most).to(dtype)


def row_squares(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """Squared l2 norms over the last axis, in this type."""
    norms: Tensor = vector_norm(rows, dim=-1, dtype=dtype)
    return norms.square()


def outer_squares(deltas: Tensor, inputs: Tensor, dtype: torch.dtype, *, bias: bool = True) -> Tensor:
    """Squared norms of the outer products of deltas [..., m] and inputs [..., n], and (`bias`) of the deltas too."""
    by_inputs, by_deltas = row_squares(inputs, dtype), row_squares(deltas, dtype)
    return torch.addcmul(by_deltas, by_deltas, by_inputs) if bias else by_deltas * by_inputs


def _dense_gradients(tensors: Sequence[Tensor], x: Tensor, y: Tensor, *, tanh: bool) -> Sequence[_PerRecord]:
    """`_watched_gradients` of a dense stack with cross-entropy, by hand; `tensors` have the order of the layers.

    Recording the layers instead would take a third of the time of a step of 32 records.
    """
    with torch.no_grad():
        inputs, deltas = dense_deltas([tensor[None] for tensor in tensors], x[None], y[None], tanh=tanh)
    return [_Outer(delta[0], entered[0], bias=True) for delta, entered in zip(deltas, inputs, strict=True)]


def _watched_gradients(
    task: ModelTask, tensors: Sequence[Tensor], x: Tensor, y: Tensor, keep: Sequence[Tensor] | None
) -> tuple[Sequence[_PerRecord], Sequence[int], float]:
    """Gradients of any model of the known layers, the parameters' positions, and a factor of all gradients."""
    pure = replace(task, model=replace(task.model, l2=0.0)) if task.model.l2 else task
    calls: list[_Call] = []
    watched = [tensor.detach().as_subclass(_Parameter) for tensor in tensors]
    for position, parameter in enumerate(watched):
        parameter.position, parameter.calls = position, calls
    loss = pure.loss_at(watched, x, y, keep)
    positions = _positions(calls, len(tensors), len(x))
    deltas = torch.autograd.grad(loss, [output for _, output, _ in calls], materialize_grads=True)
    with torch.no_grad():
        each = [layer.per_record(delta) for (layer, _, _), delta in zip(calls, deltas, strict=True)]
    calls.clear()  # else the parameters and their calls refer to each other, and keep all outputs in memory
    return list(itertools.chain.from_iterable(each)), positions, float(len(x))  # the loss is a mean


@dataclass(frozen=True)
class _Rows:
    rows: Tensor

    def squares(self, dtype: torch.dtype) -> Tensor:
        return row_squares(self.rows, dtype)

    def totals(self, factors: Tensor) -> list[Tensor]:
        return [factors @ self.rows]


@dataclass(frozen=True)
class _Outer:
    """Outer products of deltas [b, m] and inputs [b, n]; with a bias, also the deltas themselves."""

    deltas: Tensor
    inputs: Tensor
    bias: bool

    def squares(self, dtype: torch.dtype) -> Tensor:
        return outer_squares(self.deltas, self.inputs, dtype, bias=self.bias)

    def totals(self, factors: Tensor) -> list[Tensor]:
        weighted = self.deltas * factors[:, None]
        weight = torch.mm(weighted.t(), self.inputs)
        return [weight, weighted.sum(0)] if self.bias else [weight]


@dataclass
class _Kernel:
    """A convolution: sums of outer products of deltas [b, outputs, h, w] and patches of inputs [b, inputs, H, W]."""

    deltas: Tensor
    inputs: Tensor
    shape: torch.Size
    stride: tuple[int, int]
    padding: tuple[int, int]
    kept: Tensor | None = None

    def squares(self, dtype: torch.dtype) -> Tensor:
        """Squared norms, computed in pieces that fit in the cache; keeps the gradients if they have few entries."""
        entries, positions = math.prod(self.shape), math.prod(self.deltas.shape[2:])
        by_gram = _GRAM * positions**2 < entries
        keeps = not by_gram and len(self.deltas) * entries <= _KEPT
        if keeps:
            sizes = self.shape[2:], self.stride, self.padding
            self.kept = convolution.kernel_gradients(self.inputs, self.deltas, *sizes)
            if self.kept is not None:
                return row_squares(self.kept, dtype)
        largest = max(entries // self.shape[0] * positions, 0 if by_gram or keeps else entries)
        pieces = [torch.split(maps, max(1, _CACHE // largest)) for maps in (self.deltas.flatten(2), self.inputs)]
        squares, stored = [], []
        for deltas, inputs in zip(*pieces, strict=True):
            patches = convolution.patches(inputs[:, :, None], self.shape[2:], self.stride, self.padding)
            if by_gram:
                grams = [torch.bmm(piece.transpose(1, 2), piece) for piece in (deltas.to(dtype), patches.to(dtype))]
                # rounding may give a negative sum
                squares.append((grams[0] * grams[1]).sum((1, 2)).clamp(min=0.0))
                continue
            rows = torch.bmm(deltas, patches.transpose(1, 2)).flatten(1)
            squares.append(row_squares(rows, dtype))
            if keeps:
                stored.append(rows)
        self.kept = torch.cat(stored) if keeps else None
        return torch.cat(squares)

    def totals(self, factors: Tensor) -> list[Tensor]:
        """The gradients that `squares` kept, or else the convolution's backward pass."""
        if self.kept is not None:
            return [(factors @ self.kept).view(self.shape)]
        weighted = self.deltas * factors[:, None, None, None]
        return [_kernel_gradient(self.inputs, self.shape, weighted, self.stride, self.padding)]


_PerRecord = _Rows | _Outer | _Kernel
"""The gradients of some parameters, one per record: their `squares` [b] of norms, and `totals` with weights [b]."""


class _Layer(NamedTuple):
    """The tensors of a call that takes parameters; per_record: their gradients, from those of the output."""

    input: Tensor
    weight: Tensor
    bias: Tensor | None
    per_record: Callable[[Tensor], list[_PerRecord]]


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> _Layer | None:
    """A dense layer; with more than two axes, a record's gradient is not an outer product."""
    layer = _Layer(input, weight, bias, lambda deltas: [_Outer(deltas, input, bias is not None)])
    return layer if input.ndim == 2 else None


def _convolution(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | tuple[int, int] = 1,
    padding: int | str | tuple[int, int] = 0,
    dilation: int | tuple[int, int] = 1,
    groups: int = 1,
) -> _Layer | None:
    """A convolution in two dimensions, without dilation and groups, which would change the patches."""
    if groups != 1 or dilation not in (1, (1, 1)) or isinstance(padding, str) or input.ndim != 4:
        return None
    # torch accepts one number for both dimensions
    steps, margins = (pair if isinstance(pair, tuple) else (pair, pair) for pair in (stride, padding))

    def per_record(deltas: Tensor) -> list[_PerRecord]:
        kernel = _Kernel(deltas, input, weight.shape, steps, margins)
        return [kernel] if bias is None else [kernel, _Rows(deltas.flatten(2).sum(2))]

    return _Layer(input, weight, bias, per_record)


def _group_norm(
    input: Tensor, num_groups: int, weight: Tensor, bias: Tensor | None = None, eps: float = 1e-5
) -> _Layer:
    """A group norm with a scale; its small gradients are materialized, and the normalized input is recomputed."""

    def per_record(deltas: Tensor) -> list[_PerRecord]:
        scale = _Rows((deltas * group_norm(input, num_groups, eps=eps)).flatten(2).sum(2))
        return [scale] if bias is None else [scale, _Rows(deltas.flatten(2).sum(2))]

    return _Layer(input, weight, bias, per_record)


_LAYERS: dict[object, Callable[..., _Layer | None]] = {linear: _linear, conv2d: _convolution, group_norm: _group_norm}
"""What reads a call of a torch function, by its arguments; None: there are no per-record gradients for them."""

_Call = tuple[_Layer, Tensor, int]
"""A call of a layer: its tensors, its output, and the version of its input at the call."""


class _Parameter(Tensor):
    """A parameter that records the layers that use it; `position` is its index in the model."""

    position: int
    calls: list[_Call]

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., object],
        types: Iterable[type],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        named = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **named)
        if not _has_tensor(result):  # such as a shape, which does not depend on values
            return result
        layer = _LAYERS[func](*args, **named) if func in _LAYERS else None
        if layer is None or not isinstance(result, Tensor) or not isinstance(layer.weight, _Parameter):
            raise UnknownUse(f"no per-record gradients of a parameter in {func} with these arguments")
        # if no earlier tensor requires a gradient, the output itself must
        layer.weight.calls.append((layer, result.requires_grad_(), layer.input._version))
        return result


def _has_tensor(result: object) -> bool:
    """Whether the result is a tensor, or a list or tuple that contains one."""
    return isinstance(result, Tensor) or (isinstance(result, list | tuple) and any(map(_has_tensor, result)))


def _positions(calls: Sequence[_Call], parameters: int, records: int) -> list[int]:
    """Positions of the calls' parameters, weight before bias.

    Raises:
        UnknownUse: a parameter is not used exactly once, in a known layer with one row per record.
    """
    tensors = [tensor for layer, _, _ in calls for tensor in (layer.weight, layer.bias) if tensor is not None]
    positions = [tensor.position if isinstance(tensor, _Parameter) else -1 for tensor in tensors]
    if sorted(positions) != list(range(parameters)):
        raise UnknownUse("expected every parameter in exactly one layer")
    for layer, output, version in calls:
        if isinstance(layer.input, _Parameter) or len(layer.input) != records:
            raise UnknownUse("expected layers that take one row per record")
        if output._version or layer.input._version != version:
            raise UnknownUse("expected layers whose inputs and outputs are not overwritten")
    return positions
