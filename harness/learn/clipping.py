"""The sum of clipped per-record gradients of a batch, without a loop over its records.

One forward pass in which every layer that takes a parameter is watched, one backward pass to the outputs of these
layers only. From a layer's inputs and the gradients of its outputs follow the norms of the records' gradients and, once
all norms are known, their weighted sum. A record's gradient of a dense layer is an outer product, whose norm needs no
writing out (ghost norm); that of a small kernel is written out, and kept for the sum. Dense ReLU stacks go by hand.

Source: Goodfellow 2015 (arXiv 1510.01799) for dense layers; Bu, Mao, Xu 2022 (arXiv 2205.10683) for choosing the way by
the size of the layer. Differs: the threshold was measured.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn.functional import conv2d, group_norm, linear, pad
from torch.nn.grad import conv2d_weight

from leakgauge.harness.learn.steps import clip_factors, dense_deltas, outer_squares, row_squares
from leakgauge.harness.learn.tasks import ModelTask

_CACHE = 2**19
"""Entries of the patches that are laid out at once: beyond the cache they cost up to four times as much."""

_KEPT = 2**22
"""Entries of one kernel's per-record gradients that are kept for the sum, 16 MiB; of more, only the norms are."""

_GRAM = 64
"""Inner products of the positions beat a kernel's gradients that have this many times more entries (measured)."""

_kernel_gradient: Callable[..., Tensor] = conv2d_weight  # torch has no types for it


class UnknownUse(Exception):
    """A parameter is used in a way of which no per-record gradients are known here."""


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

    g_i is the gradient of record i's loss with respect to all tensors together, without the penalty: that depends on
    no record. The model must not mix records, as a batch norm does: there would be no gradient of one.

    Args:
        tensors: parameters, in the layout's order. Not modified.
        x, y, keep: as `ModelTask.losses` takes them.
        clip: C > 0; infinite: nothing is clipped.

    Guarantees:
        A record whose gradient is zero adds zero; no record at all: zeros.
        No norm overflows before its gradient does; a NaN in one record's gradient is a NaN in the sum.

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


class _Gradients(NamedTuple):
    """Of all parameters; `positions`: of each in the layout. The records' true gradients are `scale` times these."""

    per_record: Sequence[_PerRecord]
    positions: list[int]
    scale: float


def _dense_gradients(tensors: Sequence[Tensor], x: Tensor, y: Tensor) -> _Gradients:
    """Of a dense ReLU stack with cross-entropy, by hand: what watching costs is a third of a step of 32 records."""
    with torch.no_grad():
        inputs, deltas = dense_deltas([tensor[None] for tensor in tensors], x[None], y[None])
    found = [_Outer(delta[0], entered[0], bias=True) for delta, entered in zip(deltas, inputs, strict=True)]
    return _Gradients(found, list(range(len(tensors))), 1.0)


def _watched_gradients(
    task: ModelTask, tensors: Sequence[Tensor], x: Tensor, y: Tensor, keep: Sequence[Tensor] | None
) -> _Gradients:
    """Of any model of the known layers."""
    pure = replace(task, model=replace(task.model, l2=0.0)) if task.model.l2 else task
    calls: list[_Call] = []
    watched = [_watch(tensor, position, calls) for position, tensor in enumerate(tensors)]
    loss = pure.loss_at(watched, x, y, keep)
    positions = _positions(calls)
    _check(calls, positions, len(tensors), len(x))
    deltas = torch.autograd.grad(loss, [call.output for call in calls], materialize_grads=True)
    with torch.no_grad():
        found = [one for call, delta in zip(calls, deltas, strict=True) for one in call.layer.per_record(delta)]
    return _Gradients(found, positions, float(len(x)))  # the loss is a mean


class _PerRecord(Protocol):
    """The gradients of some parameters, one a record."""

    def squares(self, dtype: torch.dtype) -> Tensor:
        """[b] squared norms."""

    def totals(self, factors: Tensor) -> list[Tensor]:
        """Of each parameter, the records' sum with weights [b]."""


@dataclass(frozen=True)
class _Rows:
    """Gradients that are written out, [b, n]."""

    rows: Tensor

    def squares(self, dtype: torch.dtype) -> Tensor:
        """Row by row."""
        return row_squares(self.rows, dtype)

    def totals(self, factors: Tensor) -> list[Tensor]:
        """One product."""
        return [factors @ self.rows]


@dataclass(frozen=True)
class _Outer:
    """Outer products of deltas [b, m] and inputs [b, n]; with a bias, also the deltas themselves."""

    deltas: Tensor
    inputs: Tensor
    bias: bool

    def squares(self, dtype: torch.dtype) -> Tensor:
        """The norm of an outer product is the product of the norms."""
        return outer_squares(self.deltas, self.inputs, dtype, bias=self.bias)

    def totals(self, factors: Tensor) -> list[Tensor]:
        """The weighted deltas once, for both."""
        weighted = self.deltas * factors[:, None]
        weight = torch.mm(weighted.t(), self.inputs)
        return [weight, weighted.sum(0)] if self.bias else [weight]


@dataclass
class _Kernel:
    """Of a convolution: sums of outer products of deltas [b, outputs, h, w] and patches of inputs [b, inputs, H, W]."""

    deltas: Tensor
    inputs: Tensor
    shape: torch.Size
    stride: tuple[int, int]
    padding: tuple[int, int]
    kept: Tensor | None = None

    def squares(self, dtype: torch.dtype) -> Tensor:
        """In pieces that fit the cache; keeps the gradients where there are few."""
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
        """From what `squares` kept, else by the convolution's own backward pass."""
        if self.kept is not None:
            return [(factors @ self.kept).view(self.shape)]
        weighted = self.deltas * factors[:, None, None, None]
        return [_kernel_gradient(self.inputs, self.shape, weighted, self.stride, self.padding)]

    def _patches(self, inputs: Tensor) -> Tensor:
        """[b, entries of a patch, positions]; one copy of a strided view takes half the time of torch's `unfold`."""
        high, wide = self.padding
        padded = pad(inputs, (wide, wide, high, high)) if high or wide else inputs
        windows = padded.unfold(2, self.shape[2], self.stride[0]).unfold(3, self.shape[3], self.stride[1])
        return windows.permute(0, 1, 4, 5, 2, 3).flatten(4).flatten(1, 3)


def _gram_squares(deltas: Tensor, patches: Tensor, dtype: torch.dtype) -> Tensor:
    """[b] squared norms of deltas [b, m, p] @ patches^T [b, p, n], from the inner products of the positions."""
    grams = [torch.bmm(part.transpose(1, 2), part) for part in (deltas.to(dtype), patches.to(dtype))]
    return (grams[0] * grams[1]).sum((1, 2)).clamp(min=0.0)  # rounding


class _Layer(Protocol):
    """A call of a torch function that takes parameters, with its arguments as they are named there."""

    input: Tensor
    weight: Tensor
    bias: Tensor | None

    @property
    def is_known(self) -> bool:
        """Whether `per_record` is right for these arguments."""

    def per_record(self, deltas: Tensor) -> list[_PerRecord]:
        """Of the weight and, where there is one, the bias, from the gradients of the outputs."""


@dataclass
class _Linear:
    """A dense layer."""

    input: Tensor
    weight: Tensor
    bias: Tensor | None = None

    @property
    def is_known(self) -> bool:
        """With one more axis a record's gradient would be no outer product."""
        return self.input.ndim == 2

    def per_record(self, deltas: Tensor) -> list[_PerRecord]:
        """Nothing is written out."""
        return [_Outer(deltas, self.input, self.bias is not None)]


@dataclass
class _Convolution:
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
        """With holes or groups the patches would be others."""
        simple = self.groups == 1 and self.dilation in (1, (1, 1)) and not isinstance(self.padding, str)
        return simple and self.input.ndim == 4

    def per_record(self, deltas: Tensor) -> list[_PerRecord]:
        """The kernel's are the work; the bias was added at every position."""
        assert not isinstance(self.padding, str)
        kernel = _Kernel(deltas, self.input, self.weight.shape, _pair(self.stride), _pair(self.padding))
        return [kernel] if self.bias is None else [kernel, _Rows(_sum_positions(deltas))]


@dataclass
class _GroupNorm:
    """A group norm with a scale."""

    input: Tensor
    num_groups: int
    weight: Tensor
    bias: Tensor | None = None
    eps: float = 1e-5

    @property
    def is_known(self) -> bool:
        """There is but one kind."""
        return True

    def per_record(self, deltas: Tensor) -> list[_PerRecord]:
        """Few entries; the normalized input is computed once more."""
        normalized = group_norm(self.input, self.num_groups, eps=self.eps)
        scale = _Rows(_sum_positions(deltas * normalized))
        return [scale] if self.bias is None else [scale, _Rows(_sum_positions(deltas))]


def _pair(value: int | tuple[int, int]) -> tuple[int, int]:
    """Torch takes one number for both dimensions."""
    return (value, value) if isinstance(value, int) else value


def _sum_positions(values: Tensor) -> Tensor:
    """[b, channels] of [b, channels, ...]."""
    return values.flatten(2).sum(2)


_LAYERS: dict[Callable[..., object], Callable[..., _Layer]] = {
    linear: _Linear,
    conv2d: _Convolution,
    group_norm: _GroupNorm,
}


class _Call(NamedTuple):
    """A layer, what came out of it, and the version of what went in."""

    layer: _Layer
    output: Tensor
    version: int


class _Parameter(Tensor):
    """A parameter that notes the layers it goes into; `position`: among the model's."""

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
        """Torch calls this in place of `func` where a parameter is among the arguments, or inside them."""
        named = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **named)
        if not _has_tensor(result):  # a shape: it depends on no value
            return result
        layer = _LAYERS[func](*args, **named) if func in _LAYERS else None
        if layer is None or not isinstance(result, Tensor) or not isinstance(layer.weight, _Parameter):
            raise UnknownUse(f"no per-record gradients are known here of a parameter in {func}")
        # where nothing before it is differentiated by, the output itself has to be
        layer.weight.calls.append(_Call(layer, result.requires_grad_(), layer.input._version))
        return result


def _watch(tensor: Tensor, position: int, calls: list[_Call]) -> _Parameter:
    """A view of the parameter that adds its layers to `calls`."""
    watched = tensor.detach().as_subclass(_Parameter)
    watched.position, watched.calls = position, calls
    return watched


def _has_tensor(result: object) -> bool:
    """Whether it is a tensor, or a list with one in it."""
    return isinstance(result, Tensor) or (isinstance(result, list | tuple) and any(map(_has_tensor, result)))


def _positions(calls: Sequence[_Call]) -> list[int]:
    """Of the parameters of these calls, weight before bias; -1 for a tensor that is no parameter."""
    tensors = [one for call in calls for one in (call.layer.weight, call.layer.bias) if one is not None]
    return [one.position if isinstance(one, _Parameter) else -1 for one in tensors]


def _check(calls: Sequence[_Call], positions: list[int], parameters: int, records: int) -> None:
    """Refuse calls whose gradients are not one row a record, once a parameter."""
    if sorted(positions) != list(range(parameters)):
        raise UnknownUse("expected every parameter in exactly one layer")
    for layer, output, version in calls:
        if isinstance(layer.input, _Parameter) or not layer.is_known or len(layer.input) != records:
            raise UnknownUse(f"no per-record gradients are known here of {type(layer).__name__} with these arguments")
        if output._version or layer.input._version != version:
            raise UnknownUse("expected that no layer's input or output is overwritten")
