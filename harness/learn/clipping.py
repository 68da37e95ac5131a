"""The sum of clipped per-record gradients of a batch, without a loop over its records.

A forward pass records every layer that takes a parameter; a backward pass ends at the outputs of these layers. A
layer's inputs and output gradients give the norms of the records' gradients and, once all norms are known, their
weighted sum. A record's gradient of a dense layer is an outer product, whose norm is found without forming the product
(ghost norm). The gradients of a small kernel are materialized and kept for the sum. Dense ReLU stacks have their own
formulas.

Source: Goodfellow 2015 (arXiv 1510.01799) for dense layers; Bu, Mao, Xu 2022 (arXiv 2205.10683) for choosing the method
by the size of the layer. Differs: the threshold is measured.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.linalg import vector_norm
from torch.nn.functional import conv2d, group_norm, linear, pad
from torch.nn.grad import conv2d_weight

from leakgauge.harness.learn.tasks import ModelTask

Squares = Callable[[torch.dtype], Tensor]
"""Squared norms of one part of each record's gradient, in the given type."""

_CACHE = 2**19
"""Number of patch entries that are materialized at once; patches beyond the cache cost up to four times as much."""

_KEPT = 2**22
"""Maximum entries (16 MiB) of one kernel's per-record gradients that are kept for the sum; else only norms are kept."""

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
    by_hand = task.model.widths is not None and task.softmax and y.ndim == 1
    found = _dense_gradients(tensors, x, y) if by_hand else _watched_gradients(task, tensors, x, y, keep)
    with torch.no_grad():
        squares = [one.squares for one in found.per_record]
        factors = clip_factors(squares, tensors[0].dtype, clip / divisor, found.scale / divisor)
        totals = [total for one in found.per_record for total in one.totals(factors)]
    by_position = dict(zip(found.positions, totals, strict=True))
    return [by_position[position] for position in range(len(tensors))]


def dense_deltas(
    tensors: Sequence[Tensor], x: Tensor, y: Tensor, weight: Tensor | None = None
) -> tuple[list[Tensor], list[Tensor]]:
    """Each layer's input [c, b, n], and the gradients by its output [c, b, m] of the records' losses times `weight`.

    tensors: parameters of a dense ReLU stack with cross-entropy, with a first axis c; x: [c, b, *input_shape];
    y: [c, b]; weight: [c, b], or None for 1.
    """
    matrices, biases = tensors[0::2], tensors[1::2]
    inputs = [x.flatten(2)]
    for matrix, bias in zip(matrices, biases, strict=True):
        inputs.append(torch.baddbmm(bias[:, None], inputs[-1], matrix.transpose(1, 2)))
        if len(inputs) <= len(matrices):
            inputs[-1].relu_()
    delta = torch.softmax(inputs.pop(), -1)
    delta.scatter_add_(-1, y[..., None], torch.full_like(y[..., None], -1, dtype=delta.dtype))
    if weight is not None:
        delta *= weight[..., None]
    deltas = [delta]
    for matrix, entered in zip(matrices[:0:-1], inputs[:0:-1], strict=True):
        deltas.append(torch.bmm(deltas[-1], matrix).mul_(entered > 0))
    return inputs, deltas[::-1]


def clip_factors(parts: Sequence[Squares], dtype: torch.dtype, clip: float, most: float = 1.0) -> Tensor:
    """min(most, clip / norm) for each record; `most` for a zero norm, NaN for a NaN norm.

    The squared norm is the sum of `parts`. If it overflows in `dtype`, the gradients' type, it is computed in float64.
    """
    for precision in (dtype, torch.float64):
        squares = reduce(torch.add, [part(precision) for part in parts])
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


class _Gradients(NamedTuple):
    """Gradients of all parameters, to be multiplied by `scale`, and the parameters' `positions` in the layout."""

    per_record: Sequence[_PerRecord]
    positions: list[int]
    scale: float


def _dense_gradients(tensors: Sequence[Tensor], x: Tensor, y: Tensor) -> _Gradients:
    """Gradients of a dense ReLU stack with cross-entropy, by hand.

    Recording the layers instead would take a third of the time of a step of 32 records.
    """
    with torch.no_grad():
        inputs, deltas = dense_deltas([tensor[None] for tensor in tensors], x[None], y[None])
    outer = [_Outer(delta[0], entered[0], bias=True) for delta, entered in zip(deltas, inputs, strict=True)]
    return _Gradients(outer, list(range(len(tensors))), 1.0)


def _watched_gradients(
    task: ModelTask, tensors: Sequence[Tensor], x: Tensor, y: Tensor, keep: Sequence[Tensor] | None
) -> _Gradients:
    """Gradients of any model of the known layers."""
    pure = replace(task, model=replace(task.model, l2=0.0)) if task.model.l2 else task
    calls: list[_Call] = []
    watched = [tensor.detach().as_subclass(_Parameter) for tensor in tensors]
    for position, parameter in enumerate(watched):
        parameter.position, parameter.calls = position, calls
    loss = pure.loss_at(watched, x, y, keep)
    positions = _positions(calls, len(tensors), len(x))
    deltas = torch.autograd.grad(loss, [call.output for call in calls], materialize_grads=True)
    with torch.no_grad():
        found = [one for call, delta in zip(calls, deltas, strict=True) for one in call.layer.per_record(delta)]
    return _Gradients(found, positions, float(len(x)))  # the loss is a mean


class _PerRecord(Protocol):
    """The gradients of some parameters, one per record."""

    def squares(self, dtype: torch.dtype) -> Tensor:
        """[b] squared norms."""

    def totals(self, factors: Tensor) -> list[Tensor]:
        """Each parameter's sum of gradients over the records, with weights [b]."""


@dataclass(frozen=True)
class _Rows:
    """Materialized gradients [b, n]."""

    rows: Tensor

    def squares(self, dtype: torch.dtype) -> Tensor:
        """The squared norm of each row."""
        return row_squares(self.rows, dtype)

    def totals(self, factors: Tensor) -> list[Tensor]:
        """The weighted sum of the rows."""
        return [factors @ self.rows]


@dataclass(frozen=True)
class _Outer:
    """Outer products of deltas [b, m] and inputs [b, n]; with a bias, also the deltas themselves."""

    deltas: Tensor
    inputs: Tensor
    bias: bool

    def squares(self, dtype: torch.dtype) -> Tensor:
        """Products of the factors' squared norms."""
        return outer_squares(self.deltas, self.inputs, dtype, bias=self.bias)

    def totals(self, factors: Tensor) -> list[Tensor]:
        """The sums for weight and bias, from the same weighted deltas."""
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
        largest = max(entries // self.shape[0] * positions, 0 if by_gram or keeps else entries)
        pieces = [torch.split(part, max(1, _CACHE // largest)) for part in (self.deltas.flatten(2), self.inputs)]
        squares, kept = [], []
        for deltas, inputs in zip(*pieces, strict=True):
            patches = self._patches(inputs)
            if by_gram:
                squares.append(_gram_squares(deltas, patches, dtype))
                continue
            rows = torch.bmm(deltas, patches.transpose(1, 2)).flatten(1)
            squares.append(row_squares(rows, dtype))
            if keeps:
                kept.append(rows)
        self.kept = torch.cat(kept) if keeps else None
        return torch.cat(squares)

    def totals(self, factors: Tensor) -> list[Tensor]:
        """The gradients that `squares` kept, or else the convolution's backward pass."""
        if self.kept is not None:
            return [(factors @ self.kept).view(self.shape)]
        weighted = self.deltas * factors[:, None, None, None]
        return [_kernel_gradient(self.inputs, self.shape, weighted, self.stride, self.padding)]

    def _patches(self, inputs: Tensor) -> Tensor:
        """[b, entries of a patch, positions]; a copy of a strided view takes half the time of torch's `unfold`."""
        high, wide = self.padding
        padded = pad(inputs, (wide, wide, high, high)) if high or wide else inputs
        windows = padded.unfold(2, self.shape[2], self.stride[0]).unfold(3, self.shape[3], self.stride[1])
        return windows.permute(0, 1, 4, 5, 2, 3).flatten(4).flatten(1, 3)


def _gram_squares(deltas: Tensor, patches: Tensor, dtype: torch.dtype) -> Tensor:
    """[b] squared norms of deltas [b, m, p] @ patches^T [b, p, n], from the inner products of the positions."""
    grams = [torch.bmm(part.transpose(1, 2), part) for part in (deltas.to(dtype), patches.to(dtype))]
    return (grams[0] * grams[1]).sum((1, 2)).clamp(min=0.0)  # rounding may give a negative sum


class _Layer(ABC):
    """A call of a torch function that takes parameters; its fields have the names of the function's arguments."""

    input: Tensor
    weight: Tensor
    bias: Tensor | None

    @property
    def is_known(self) -> bool:
        """Whether `per_record` is correct for these arguments."""
        return True

    @abstractmethod
    def per_record(self, deltas: Tensor) -> list[_PerRecord]:
        """Gradients of the weight and, if present, the bias, from the gradients of the outputs."""


@dataclass
class _Linear(_Layer):
    """A dense layer."""

    input: Tensor
    weight: Tensor
    bias: Tensor | None = None

    @property
    def is_known(self) -> bool:
        """Whether the input has two axes; with more, a record's gradient is not an outer product."""
        return self.input.ndim == 2

    def per_record(self, deltas: Tensor) -> list[_PerRecord]:
        """An outer product that is not materialized."""
        return [_Outer(deltas, self.input, self.bias is not None)]


@dataclass
class _Convolution(_Layer):
    """A convolution in two dimensions."""

    input: Tensor
    weight: Tensor
    bias: Tensor | None = None
    stride: int | tuple[int, int] = 1
    padding: int | str | tuple[int, int] = 0
    dilation: int | tuple[int, int] = 1
    groups: int = 1

    @property
    def is_known(self) -> bool:
        """Whether there are no dilation, no groups and no padding by name; the first two would change the patches."""
        plain = self.groups == 1 and self.dilation in (1, (1, 1)) and not isinstance(self.padding, str)
        return plain and self.input.ndim == 4

    def per_record(self, deltas: Tensor) -> list[_PerRecord]:
        """The kernel's gradients, and the bias's: sums over all positions."""
        assert not isinstance(self.padding, str)
        # torch accepts one number for both dimensions
        stride, padding = (part if isinstance(part, tuple) else (part, part) for part in (self.stride, self.padding))
        kernel = _Kernel(deltas, self.input, self.weight.shape, stride, padding)
        return [kernel] if self.bias is None else [kernel, _Rows(_sum_positions(deltas))]


@dataclass
class _GroupNorm(_Layer):
    """A group norm with a scale."""

    input: Tensor
    num_groups: int
    weight: Tensor
    bias: Tensor | None = None
    eps: float = 1e-5

    def per_record(self, deltas: Tensor) -> list[_PerRecord]:
        """Materialized gradients, because they are small; the normalized input is recomputed."""
        scale = _Rows(_sum_positions(deltas * group_norm(self.input, self.num_groups, eps=self.eps)))
        return [scale] if self.bias is None else [scale, _Rows(_sum_positions(deltas))]


def _sum_positions(values: Tensor) -> Tensor:
    """[b, channels] sums of [b, channels, ...]."""
    return values.flatten(2).sum(2)


_LAYERS: dict[object, Callable[..., _Layer]] = {linear: _Linear, conv2d: _Convolution, group_norm: _GroupNorm}


class _Call(NamedTuple):
    """A call of a layer: its arguments, its output, and the version of its input at the call."""

    layer: _Layer
    output: Tensor
    version: int


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
        """Record the call; torch calls this instead of `func` if an argument is, or contains, a parameter."""
        named = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **named)
        if not _has_tensor(result):  # such as a shape, which does not depend on values
            return result
        layer = _LAYERS[func](*args, **named) if func in _LAYERS else None
        if layer is None or not isinstance(result, Tensor) or not isinstance(layer.weight, _Parameter):
            raise UnknownUse(f"no per-record gradients of a parameter in {func}")
        # if no earlier tensor requires a gradient, the output itself must
        layer.weight.calls.append(_Call(layer, result.requires_grad_(), layer.input._version))
        return result


def _has_tensor(result: object) -> bool:
    """Whether the result is a tensor, or a list or tuple that contains one."""
    return isinstance(result, Tensor) or (isinstance(result, list | tuple) and any(map(_has_tensor, result)))


def _positions(calls: Sequence[_Call], parameters: int, records: int) -> list[int]:
    """Positions of the calls' parameters, weight before bias.

    Raises:
        UnknownUse: a parameter is not used exactly once, in a known layer with one row per record.
    """
    tensors = [one for call in calls for one in (call.layer.weight, call.layer.bias) if one is not None]
    positions = [one.position if isinstance(one, _Parameter) else -1 for one in tensors]
    if sorted(positions) != list(range(parameters)):
        raise UnknownUse("expected every parameter in exactly one layer")
    for layer, output, version in calls:
        if isinstance(layer.input, _Parameter) or not layer.is_known or len(layer.input) != records:
            raise UnknownUse(f"no per-record gradients of {type(layer).__name__} with these arguments")
        if output._version or layer.input._version != version:
            raise UnknownUse("expected layers whose inputs and outputs are not overwritten")
    return positions
