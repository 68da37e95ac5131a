"""Reads a `torch.nn.Module` into the list of its layers: `structure_of`.

The module is called once, and every torch function that gets the inputs, or what became of them, is recorded by
torch's own protocol (`TorchFunctionMode`). So an `nn.ReLU`, `F.relu` and `h.relu()` are the same call, and containers,
custom modules, hooks and Python code of any kind are followed. A call that is no layer, or that takes a decision by the
inputs' values, ends the reading: such a module has no known structure, and is called as it is.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import dropout, dropout2d
from torch.nn.modules.utils import _pair
from torch.overrides import TorchFunctionMode, handle_torch_function, has_torch_function_unary
from torch.utils._pytree import tree_leaves

from leakgauge.harness.core import rng
from leakgauge.harness.core.form import VECTOR
from leakgauge.harness.core.rng import Key
from leakgauge.harness.learn import layers
from leakgauge.harness.learn.layers import Layer
from leakgauge.harness.learn.structure import Structure

_KEY = Key(0, ("structure",))  # key of the inputs and the factors of dry runs

_SHAPES = {
    *("size", "dim", "ndimension", "numel", "nelement", "stride", "is_contiguous", "is_floating_point", "is_complex"),
    *("get_device", "element_size", "__len__", "__get__"),
}
"""Functions that show no values of a tensor."""

_CONSTANTS = {"new_zeros", "zeros_like"}  # functions of a tensor whose results do not depend on its values


def structure_of(module: nn.Module, input_shape: tuple[int, ...]) -> Structure | None:
    """The layers of a module in its present mode; None: it has no known structure.

    A structure owns exactly the module's trainable tensors, each once, and the running statistics of batch norms in
    train mode. In dry runs it has the module's scores and gradients, in train and in eval mode.

    Args:
        module: not modified; materialized, on the CPU.
        input_shape: without the batch axis.
    """
    with rng.global_generators(_KEY):
        try:
            module = copy.deepcopy(module)
            structure = _read(module, input_shape)
            return structure if structure is not None and _agrees(structure, module, input_shape) else None
        except (Exception, SystemExit):  # a user's code that fails fails again, with an explanation, when it is called
            return None


def tensors_of(module: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by name, in the order of `state_dict`; a tied tensor only by its first name."""
    named: dict[int, tuple[str, Tensor]] = {}
    for prefix, layer in module.named_modules():
        for key, tensor in (*layer.named_parameters(recurse=False), *layer.named_buffers(recurse=False)):
            named.setdefault(id(tensor), (f"{prefix}.{key}".lstrip("."), tensor))
    return dict(named.values())


def near(scores: Tensor, expected: Tensor) -> bool:
    """Whether scores are equal up to rounding."""
    atol = 1e-4 * float(expected.abs().max()) if expected.numel() else 0.0
    return torch.allclose(scores, expected, rtol=1e-3, atol=atol, equal_nan=True)


def follow(h: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, variance: Tensor, *, training: bool) -> Tensor:
    """A batch norm whose running statistics follow the biased ones of a batch: a function that `structure_of` knows."""
    if has_torch_function_unary(h):
        every = weight, bias, mean, variance
        normalized: Tensor = handle_torch_function(follow, (h,), h, *every, training=training)
        return normalized
    norm = layers.Norm("", len(weight))
    own = weight, bias, mean, variance
    return norm.by_batch(h, *own).scores if training else norm.apply(h, *own)


def margin(h: Tensor) -> Tensor:
    """`Margin`, as a function that `structure_of` knows."""
    if has_torch_function_unary(h):
        scores: Tensor = handle_torch_function(margin, (h,), h)
        return scores
    return layers.Margin().apply(h)


@dataclass(frozen=True, eq=False)
class _Call:
    """A layer that was called, and the names of its tensors; each call is equal only to itself."""

    layer: Layer
    names: tuple[str, ...] = ()


class _Value(NamedTuple):
    """What became of the inputs: the tensor, the calls that led to it, and whether the last one returned rows.

    A mean over maps that keeps their axes counts as rows, although the tensor still has these axes.
    """

    tensor: Tensor
    calls: tuple[_Call, ...]
    rows: bool

    def then(self, tensor: Tensor, *calls: _Call, rows: bool | None = None) -> _Value:
        return _Value(tensor, self.calls + calls, self.rows if rows is None else rows)


class _UnreadError(Exception):
    """A call that is no layer."""


class _Recorder(TorchFunctionMode):
    """Records the calls of layers; dropouts return their inputs.

    Attributes:
        values: by the identity of their tensors, which therefore must stay alive.
    """

    def __init__(self, module: nn.Module, x: Tensor) -> None:
        super().__init__()
        self.names = {id(tensor): name for name, tensor in tensors_of(module).items()}
        self.values = {id(x): _Value(x, (), x.ndim == 2)}
        self.unread = ""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        dropped = name in ("dropout", "dropout2d") and func in (dropout, dropout2d)
        values = [self.values[id(leaf)] for leaf in tree_leaves((args, kwargs)) if id(leaf) in self.values]
        result = args[0].clone() if dropped else func(*args, **kwargs)
        if not values or name in _CONSTANTS or (name in _SHAPES and not isinstance(result, Tensor)):
            return result
        try:
            reader = _READERS.get(name.strip("_") if name not in _READERS else name)
            if reader is None or not isinstance(result, Tensor):
                raise _UnreadError
            self.values[id(result)] = reader(self, result, *args, **kwargs)
        except (_UnreadError, TypeError, ValueError, LookupError, AttributeError):
            self.unread = self.unread or name
        return result

    def owned(self, *tensors: Tensor | None) -> tuple[str, ...]:
        return tuple(self.names[id(tensor)] for tensor in tensors if tensor is not None)

    def layer(
        self, result: Tensor, h: Tensor, layer: Layer, *own: Tensor | None, axes: int = 0, rows: bool | None = None
    ) -> _Value:
        """The value after a layer that takes inputs of this many axes (0: any)."""
        value = self.values[id(h)]
        _require(axes in (0, h.ndim) and value.rows == (h.ndim == 2))
        return value.then(result, _Call(layer, self.owned(*own)), rows=rows)


def _require(condition: bool) -> None:
    """End the reading unless a condition holds."""
    if not condition:
        raise _UnreadError


def _prefix(names: tuple[str, ...]) -> str:
    """The name of a layer: that of its weight, without the last word."""
    return names[0].rpartition(".")[0]


def _side(*pairs: Any) -> int:
    """The one number of a quantity for rows and columns."""
    sides = {side for pair in pairs for side in _pair(pair)}
    _require(len(sides) == 1)
    return int(sides.pop())


def _rest(names: str, defaults: Sequence[Any], rest: Sequence[Any], named: dict[str, Any]) -> list[Any]:
    """The values of these arguments, which were given by position or by name."""
    values = dict(zip(names.split(), defaults, strict=True)) | dict(zip(names.split(), rest, strict=False)) | named
    return [values[name] for name in names.split()]


def _linear(to: _Recorder, result: Tensor, h: Tensor, weight: Tensor, bias: Tensor | None = None) -> _Value:
    layer = layers.Dense(_prefix(to.owned(weight)), weight.shape[1], len(weight), bias is not None)
    return to.layer(result, h, layer, weight, bias, axes=2)


def _conv(to: _Recorder, result: Tensor, h: Tensor, weight: Tensor, *rest: Any, **named: Any) -> _Value:
    names, defaults = "bias stride padding dilation groups", (None, 1, 0, 1, 1)
    bias, stride, padding, dilation, groups = _rest(names, defaults, rest, named)
    _require(_side(dilation) == groups == 1)
    kernel = _side(weight.shape[2:])
    if isinstance(padding, str):
        _require(padding == "valid" or kernel % 2 == 1)
        padding = 0 if padding == "valid" else kernel // 2
    sides = kernel, _side(stride), _side(padding)
    layer = layers.Conv(_prefix(to.owned(weight)), weight.shape[1], len(weight), *sides, bias is not None)
    return to.layer(result, h, layer, weight, bias, axes=4)


def _group_norm(to: _Recorder, result: Tensor, h: Tensor, num_groups: int, *rest: Any, **named: Any) -> _Value:
    weight, bias, eps = _rest("weight bias eps", (None, None, 1e-5), rest, named)
    layer = layers.Norm(_prefix(to.owned(weight)), len(weight), num_groups, eps)
    return to.layer(result, h, layer, weight, bias, axes=4)


def _batch_norm(
    to: _Recorder, result: Tensor, h: Tensor, running_mean: Tensor, running_var: Tensor, *rest: Any, **named: Any
) -> _Value:
    defaults = None, None, False, 0.1, 1e-5
    weight, bias, training, momentum, eps = _rest("weight bias training momentum eps", defaults, rest, named)
    _require(training)
    layer = layers.Norm(_prefix(to.owned(weight)), len(weight), 0, eps, momentum)
    return to.layer(result, h, layer, weight, bias, running_mean, running_var, axes=4)


def _follow(to: _Recorder, result: Tensor, h: Tensor, *own: Tensor, training: bool) -> _Value:
    _require(training)
    return to.layer(result, h, layers.Norm(_prefix(to.owned(own[0])), len(own[0])), *own, axes=4)


def _entrywise(layer: Layer) -> Callable[..., _Value]:
    """The reader of an entry-by-entry function; `inplace` has no effect on what it returns."""

    def read(to: _Recorder, result: Tensor, h: Tensor, inplace: bool = False) -> _Value:
        return to.layer(result, h, layer)

    return read


def _max_pool(to: _Recorder, result: Tensor, h: Tensor, kernel_size: Any, *rest: Any, **named: Any) -> _Value:
    names, defaults = "stride padding dilation ceil_mode return_indices", (None, 0, 1, False, False)
    stride, padding, dilation, ceil_mode, _ = _rest(names, defaults, rest, named)
    _require(_side(dilation) == 1 and not ceil_mode)
    return to.layer(result, h, layers.MaxPool(_side(kernel_size), _side(stride or kernel_size), _side(padding)), axes=4)


def _mean_pool(to: _Recorder, result: Tensor, h: Tensor, kernel_size: Any, *rest: Any, **named: Any) -> _Value:
    names, defaults = "stride padding ceil_mode count_include_pad divisor_override", (None, 0, False, True, None)
    stride, padding, ceil_mode, with_border, divisor = _rest(names, defaults, rest, named)
    if result.shape[2:] == (1, 1) and tuple(_pair(kernel_size)) == tuple(h.shape[2:]) and _side(padding) == 0:
        return to.layer(result, h, layers.Mean(), axes=4, rows=True)
    _require(not ceil_mode and divisor is None and (with_border or _side(padding) == 0))
    layer = layers.MeanPool(_side(kernel_size), _side(stride or kernel_size), _side(padding))
    return to.layer(result, h, layer, axes=4)


def _pool_to(to: _Recorder, result: Tensor, h: Tensor, output_size: Any) -> _Value:
    if result.shape[2:] == h.shape[2:] != (1, 1):
        return to.values[id(h)].then(result)
    if result.shape[2:] == (1, 1):
        return to.layer(result, h, layers.Mean(), axes=4, rows=True)
    _require(not any(side % after for side, after in zip(h.shape[2:], result.shape[2:], strict=True)))
    size = _side([side // after for side, after in zip(h.shape[2:], result.shape[2:], strict=True)])
    return to.layer(result, h, layers.MeanPool(size, size), axes=4)


def _log_softmax(to: _Recorder, result: Tensor, h: Tensor, dim: int, *rest: Any, **named: Any) -> _Value:
    _require(dim in (1, -1) and result.dtype == h.dtype)
    return to.layer(result, h, layers.LogSoftmax(), axes=2)


def _mean(to: _Recorder, result: Tensor, h: Tensor, dim: Any, keepdim: bool = False) -> _Value:
    _require(h.ndim == 4 and {axis % 4 for axis in dim} == {2, 3})
    return to.layer(result, h, layers.Mean(), rows=True)


def _reshaped(to: _Recorder, result: Tensor, h: Tensor, *args: Any, **kwargs: Any) -> _Value:
    """A function that changes at most the shape: from maps to rows."""
    value = to.values[id(h)]
    if result.shape == h.shape and result.dtype == h.dtype:
        return value.then(result)
    _require(result.dtype == h.dtype and result.ndim == 2 and len(result) == len(h))
    return value.then(result) if value.rows else value.then(result, _Call(layers.Flatten()), rows=True)


def _dropped(channels: bool) -> Callable[..., _Value]:
    def read(to: _Recorder, result: Tensor, h: Tensor, *rest: Any, **named: Any) -> _Value:
        p, training, _ = _rest("p training inplace", (0.5, True, False), rest, named)
        if not training or not p:
            return to.values[id(h)].then(result)
        _require(p < 1)
        shape = (h.shape[1], 1, 1) if channels else tuple(h.shape[1:])
        return to.layer(result, h, layers.Dropout(shape, float(p)), axes=4 if channels else 0)

    return read


def _slice(to: _Recorder, result: Tensor, h: Tensor, index: Any) -> _Value:
    _require(h.ndim == 4 and isinstance(index, tuple))
    rows, columns = index[-2:]
    _require(index in ((slice(None), slice(None), rows, columns), (..., rows, columns)))
    _require(rows == columns and rows in (slice(None), slice(None, None, rows.step), slice(0, None, rows.step)))
    return _widened(to, result, h, layers.Widen(rows.step or 1, 0, 0))


def _padded(
    to: _Recorder, result: Tensor, h: Tensor, pad: Sequence[int], mode: str = "constant", value: float | None = None
) -> _Value:
    """Channels of zeros before and after."""
    _require(mode == "constant" and not value and h.ndim == 4 and len(pad) >= 6 and not any((*pad[:4], *pad[6:])))
    return _widened(to, result, h, layers.Widen(1, *pad[4:6]))


def _joined(to: _Recorder, result: Tensor, tensors: Sequence[Tensor], dim: int = 0) -> _Value:
    (at,) = (number for number, tensor in enumerate(tensors) if id(tensor) in to.values)
    zeros = [tensor for number, tensor in enumerate(tensors) if number != at]
    _require(dim == 1 and tensors[at].ndim == 4 and not any(bool(zero.any()) for zero in zeros))
    widths = [tensor.shape[1] for tensor in tensors]
    return _widened(to, result, tensors[at], layers.Widen(1, sum(widths[:at]), sum(widths[at + 1 :])))


def _widened(to: _Recorder, result: Tensor, h: Tensor, widen: layers.Widen) -> _Value:
    """The value after a `Widen`, which continues one directly before it."""
    value = to.values[id(h)]
    _require(not value.rows and min(widen.stride - 1, widen.before, widen.after) >= 0)
    last = value.calls[-1].layer if value.calls else None
    if isinstance(last, layers.Widen) and widen.stride == 1:
        widen = layers.Widen(last.stride, last.before + widen.before, last.after + widen.after)
        value = value._replace(calls=value.calls[:-1])
    return value.then(result, *([] if widen == layers.Widen(1, 0, 0) else [_Call(widen)]))


def _added(to: _Recorder, result: Tensor, h: Any, other: Any, alpha: float = 1, sign: float = 1.0) -> _Value:
    """The sum of two values, which is that of a residual block, or of a value and a constant."""
    if id(h) not in to.values or id(other) not in to.values:
        value, constant = (h, other) if id(h) in to.values else (other, h)
        _require(value is h or sign == 1.0)
        return _scaled(to, result, value, 1.0, sign * alpha * torch.as_tensor(constant))
    left, right = to.values[id(h)], to.values[id(other)]
    _require(alpha == sign == 1 and left.rows == right.rows == (h.ndim == 2) and h.shape == other.shape)
    pairs = zip(left.calls, right.calls, strict=False)
    shared = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] is pair[1], pairs))
    body, shortcut = sorted((left.calls[shared:], right.calls[shared:]), key=len, reverse=True)
    _require(bool(body))
    block = layers.Block(*(tuple(call.layer for call in path) for path in (body, shortcut)))
    names = tuple(name for call in body + shortcut for name in call.names)
    return _Value(result, (*left.calls[:shared], _Call(block, names)), left.rows)


def _multiplied(to: _Recorder, result: Tensor, h: Any, other: Any) -> _Value:
    value, constant = (h, other) if id(h) in to.values else (other, h)
    return _scaled(to, result, value, torch.as_tensor(constant), 0.0)


def _divided(to: _Recorder, result: Tensor, h: Tensor, other: Any) -> _Value:
    return _scaled(to, result, h, 1 / torch.as_tensor(other), 0.0)


def _scaled(to: _Recorder, result: Tensor, h: Tensor, span: Any, low: Any) -> _Value:
    """Inputs times `span` plus `low`, before any other layer."""
    value = to.values[id(h)]
    _require(all(isinstance(call.layer, layers.Scale) for call in value.calls) and result.shape == h.shape)
    low, span = (_constant(number, h) for number in (low, span))
    _require(bool((span != 0).all()))
    scale = value.calls[0].layer if value.calls else layers.UNSCALED
    assert isinstance(scale, layers.Scale)
    return _Value(result, (_Call(layers.Scale(scale.low * span + low, scale.span * span)),), value.rows)


def _constant(number: Any, h: Tensor) -> Tensor:
    """A number, or a tensor that is broadcast over each input of h."""
    constant = torch.as_tensor(number, dtype=h.dtype).detach()
    _require(constant.ndim < h.ndim or len(constant) == 1)
    return constant[0] if constant.ndim == h.ndim else constant


_READERS: dict[str, Callable[..., _Value]] = {
    "linear": _linear,
    "conv2d": _conv,
    "group_norm": _group_norm,
    "batch_norm": _batch_norm,
    "follow": _follow,
    "margin": _entrywise(layers.Margin()),
    "relu": _entrywise(layers.Relu()),
    "sigmoid": _entrywise(layers.Sigmoid()),
    "tanh": _entrywise(layers.Tanh()),
    "max_pool2d": _max_pool,
    "avg_pool2d": _mean_pool,
    "adaptive_avg_pool2d": _pool_to,
    "log_softmax": _log_softmax,
    "mean": _mean,
    **dict.fromkeys(("flatten", "view", "reshape", "squeeze", "contiguous", "clone", "float", "to"), _reshaped),
    "dropout": _dropped(False),
    "dropout2d": _dropped(True),
    "getitem": _slice,
    "pad": _padded,
    "cat": _joined,
    "add": _added,
    "sub": partial(_added, sign=-1.0),
    "mul": _multiplied,
    "div": _divided,
}
"""What reads a function's call, by the function's name without underscores: the recorder, the result, the arguments."""


def _read(module: nn.Module, input_shape: tuple[int, ...]) -> Structure | None:
    """The structure of a module, from a run of two inputs; None: a call is no layer, or a tensor is used otherwise."""
    x = VECTOR.inputs(2, input_shape, _KEY)
    recorder = _Recorder(module, x)
    with torch.no_grad(), recorder:
        scores = module(x)
    value = recorder.values.get(id(scores))
    if recorder.unread or value is None or not value.rows or scores.ndim != 2:
        return None
    chain, names = [call.layer for call in value.calls], [name for call in value.calls for name in call.names]
    if len(input_shape) == 1:
        chain.insert(1 if chain and isinstance(chain[0], layers.Scale) else 0, layers.Flatten())
    last = next((layer for layer in reversed(chain) if not isinstance(layer, (layers.Margin, layers.LogSoftmax))), None)
    _require(not any(isinstance(layer, layers.LogSoftmax) for layer in chain[:-1]))
    tensors = tensors_of(module)
    statistics = {name for name in names if not isinstance(tensors[name], nn.Parameter)}
    trainable = {name for name, tensor in tensors.items() if tensor.requires_grad}
    if not isinstance(last, layers.Dense) or sorted(names) != sorted(trainable | statistics):
        return None
    order = [name for name in tensors if name in names]
    usual = names == [slot.name for layer in chain for slot in layer.slots]
    places = () if order == names else tuple(map(order.index, names))
    return Structure(tuple(chain), () if usual else tuple(names), places)


def _agrees(structure: Structure, module: nn.Module, input_shape: tuple[int, ...]) -> bool:
    """Whether a structure has the scores and gradients of the module for three inputs."""
    owned, x = tensors_of(module), VECTOR.inputs(3, input_shape, _KEY.child("agrees"))
    tensors = [owned[name] for name in structure.layout.names]
    before = [tensor.detach().clone() for tensor in tensors]
    with torch.no_grad(), _Recorder(module, x):
        trained = module(x)
    if not near(structure.in_training(before, x, None).scores, trained):
        return False
    for name, buffer in zip(structure.layout.names, before, strict=True):
        owned[name].data.copy_(buffer)
    module.eval()
    results = []
    for scores_of in (module, lambda leaf: structure(tensors, leaf, None)):
        leaf = x.clone().requires_grad_()
        scores = scores_of(leaf.clone())  # a layer in place may come first
        factors = rng.normal(_KEY.child("factors"), tuple(scores.shape))
        leaves = [leaf, *(tensor for tensor in tensors if tensor.requires_grad)]
        slopes = torch.autograd.grad((scores * factors).sum(), leaves, allow_unused=True)
        results.append((scores.detach(), *slopes))
    return all(
        near(actual, expected) if actual is not None and expected is not None else actual is expected
        for expected, actual in zip(*results, strict=True)
    )
