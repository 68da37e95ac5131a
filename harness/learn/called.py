"""A network that is called as it is: a `torch.nn.Module` as a function of the tensors of the flat vector.

It is called with these tensors in place of its own. Batch norm, dropout, recurrent layers and softened ReLU get other
forwards: those of modules are replaced, those of functions are caught by torch's own protocol (`TorchFunctionMode`).
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode

from leakgauge.harness.core.contract import InTraining
from leakgauge.harness.core.rng import Key
from leakgauge.harness.core.vec import Layout, Vector
from leakgauge.harness.learn.layers import UNSCALED, BatchStatistics, Scale, SoftRelu, normal
from leakgauge.harness.learn.reading import near, tensors_of
from leakgauge.harness.learn.recurrent import RECURRENT, written_out

KEY = Key(0, ("own model",))
"""Key of dry runs, and of a factory's draws for constants, which are the same for every seed."""

_MASKS: dict[type[nn.Module], int] = {nn.Dropout: 0, nn.Dropout1d: 3, nn.Dropout2d: 4, nn.Dropout3d: 5}
"""Supported dropouts; dropouts of whole channels take inputs with this many axes."""

_DROPOUTS: dict[object, int] = {
    functional.dropout: 0,
    functional.dropout1d: 3,
    functional.dropout2d: 4,
    functional.dropout3d: 5,
}
"""The same as functions."""

_WARNS = "warn_if_padding_and_no_attention_mask"
"""Name of a method of transformers' networks that only warns, by the values of ids."""

_DEPTH = ("torchvision.ops.stochastic_depth", "StochasticDepth")
"""Module and name of the layer that drops a record's whole residual branch; only `torchvision_shim` may import it."""

_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)

_BENT: dict[type[nn.Module], Callable[[Tensor], Tensor]] = {
    nn.Hardsigmoid: lambda h: (h / 6 + 0.5).clamp(0.0, 1.0),
    nn.Hardswish: lambda h: h * (h / 6 + 0.5).clamp(0.0, 1.0),
}
"""Replacements for activations that have no second derivative in torch."""

_SMOOTH = (
    *(nn.Sequential, nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Flatten, nn.Unflatten, nn.Identity, *_MASKS),
    *(nn.GroupNorm, nn.LayerNorm, *_NORMS, nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d),
    *(nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d),
    *(nn.Sigmoid, nn.Tanh, nn.Softplus, nn.GELU, nn.SiLU, nn.Mish, nn.LogSigmoid, nn.Softsign, nn.Softmax),
)
"""Modules whose outputs are smooth functions of their inputs."""

_RELU = frozenset(("relu", "relu_", "rnn_relu", "rnn_relu_cell"))
"""Names of the functions that `Called.softened` softens."""

_KINKS = _RELU | {
    *("relu6", "leaky_relu", "leaky_relu_", "prelu", "rrelu", "threshold", "hardtanh", "hardshrink", "softshrink"),
    *("max_pool1d", "max_pool2d", "max_pool3d", "adaptive_max_pool1d", "adaptive_max_pool2d", "adaptive_max_pool3d"),
    *("max", "min", "amax", "amin", "maximum", "minimum", "abs", "clamp", "clip", "where", "sort", "topk", "sign"),
}
"""Names of functions with kinks."""


_MADE = ("zeros", "empty")
"""Names of functions that make the tensors that a network fills."""


def refusal(name: str, text: str) -> ValueError:
    """The error for an unsupported network."""
    return ValueError(f"model {name!r}: {text}")


@contextmanager
def theirs(name: str, doing: str) -> Iterator[None]:
    """Turn any exception of a user's code into one line."""
    try:
        yield
    except (Exception, SystemExit) as error:
        raise refusal(name, f"{doing}: {line(error)}") from error


def line(error: BaseException) -> str:
    """An error of torch, which may have many lines, in one line of limited length."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text if len(text) < 300 else text[:300] + ' ...'}"


def is_norm(layer: nn.Module) -> bool:
    """Whether a layer is a batch norm with torch's own forward."""
    return isinstance(layer, _BatchNorm) and type(layer).forward in {norm.forward for norm in _NORMS}


def _bag(layer: nn.EmbeddingBag, ids: Tensor) -> Tensor:
    """The mean or the sum of embeddings, which torch's own kernel cannot map over many batches."""
    found = functional.embedding(ids, layer.weight)
    return found.mean(-2) if layer.mode == "mean" else found.sum(-2)


class _Place(NamedTuple):
    """The batch axis in the inputs of a dropout, and how often each record appears along it."""

    axis: int
    times: int


class _Dropped(NamedTuple):
    """A called dropout: its layer, rate, shape of the mask, and whether it drops whole channels."""

    path: str
    rate: float
    shape: tuple[int, ...]
    channels: bool


class _State:
    """The state that the layers of one network share during a call."""

    def __init__(self) -> None:
        self.training = True
        self.keep: Iterator[tuple[Tensor, _Place]] | None = None
        self.terms: list[Tensor] = []
        self.pace: float | None = None
        self.sent = True
        self.places: tuple[_Place, ...] = ()
        self.dropped: list[_Dropped] | None = None  # only in a dry run
        self.kinks: set[str] = set()
        self.functional = self.written = self.fills = False
        self.after: dict[str, Tensor] = {}

    def norm(self, layer: _BatchNorm, live: bool, h: Tensor) -> Tensor:
        """The forward of a batch norm; `live`: the user's network has it in train mode."""
        layer._check_input_dim(h)  # type: ignore[no-untyped-call]
        if h.shape[1] != layer.num_features:
            raise ValueError(f"expected {layer.num_features} channels, got inputs {tuple(h.shape)}")
        mean, variance = layer.running_mean, layer.running_var
        if mean is None or variance is None or (live and self.training):
            if h.numel() == h.shape[1]:
                raise ValueError(f"a batch norm needs more than one value per channel, got inputs {tuple(h.shape)}")
            axes = [axis for axis in range(h.ndim) if axis != 1]
            now = h.mean(axes), h.var(axes, correction=0)
            if mean is not None and variance is not None and self.sent:
                rate = 1.0 if self.pace is None else self.pace * (layer.momentum or 0.0)
                count = h.numel() // h.shape[1]
                moved = BatchStatistics.apply(mean, variance, now[0], now[1] * (count / (count - 1)))  # type: ignore[no-untyped-call]
                self.terms.append(rate * moved)
            mean, variance = now
        return normal(h, mean, variance.clamp_min(0.0), layer.weight, layer.bias, layer.eps)

    def drop(self, path: str, rate: float, axes: int, depth: str, h: Tensor) -> Tensor:
        """The forward of a dropout, or of a stochastic depth.

        Args:
            axes: number of axes of inputs whose whole channels are dropped; 0: entries are dropped.
            depth: the mode of a stochastic depth; empty: a dropout.
        """
        if self.dropped is not None:
            if axes not in (0, h.ndim):
                raise ValueError(f"expected inputs of {axes} axes, got {tuple(h.shape)}")
            if depth not in ("", "row"):
                raise ValueError(f"expected mode='row', got mode={depth!r}, which drops whole batches")
            leading = 1 if depth else 2 if axes else h.ndim
            shape = (*h.shape[:leading], *(1 for _ in h.shape[leading:]))
            self.dropped.append(_Dropped(path, rate, shape, bool(axes or depth)))
        if self.keep is None:
            return h
        mask, place = next(self.keep)
        mask = mask.to(h)  # masks are drawn on the CPU, h may be elsewhere
        return h * (mask if place.times == 1 else mask.flatten(0, 1)).movedim(0, place.axis)


_MULTI_HEAD = FunctionType(
    functional.multi_head_attention_forward.__code__,
    vars(functional) | {"has_torch_function": lambda tensors: False},
    argdefs=functional.multi_head_attention_forward.__defaults__,
)
"""Torch's function, which shows a `TorchFunctionMode` the functions that it calls, instead of itself."""


class _Functions(TorchFunctionMode):
    """Gives dropouts that are called as functions their masks, and ReLU a bend of this width; notes kinks.

    Recurrent layers are written out. Where `zero` is float64, so is what asks for float32, as norms of language models
    do. Where the network fills tensors in place, they begin as mapped ones, as its inputs are.
    """

    def __init__(self, state: _State, width: float | None, zero: Tensor) -> None:
        super().__init__()
        self.zero, self.double = zero, zero.dtype == torch.float64
        self.state, self.relu = state, torch.relu if width is None else SoftRelu(width).apply

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        self.state.kinks |= {name} & _KINKS
        if self.double:
            func = Tensor.double if func is Tensor.float else func
            args = tuple(torch.float64 if arg is torch.float32 else arg for arg in args)
            kwargs = {key: torch.float64 if arg is torch.float32 else arg for key, arg in kwargs.items()}
        if func is functional.multi_head_attention_forward:
            with self:
                return _MULTI_HEAD(*args, **kwargs)
        if name == "__setitem__":
            self.state.written = self.state.fills = True
        if name in _MADE and self.state.fills:
            made = func(*args, **kwargs)
            return made + self.zero.to(made.dtype)
        if func in RECURRENT:
            self.state.written = True
            return written_out(func, args, self._drop, self.relu)
        if name in _RELU and self.relu is not torch.relu:
            return self.relu(args[0])
        if func is functional.scaled_dot_product_attention:
            return self._attend(*args, **kwargs)
        if self.state.training and name.startswith("dropout") and func in _DROPOUTS:
            given = inspect.signature(func).bind(*args, **kwargs)
            given.apply_defaults()
            if given.arguments["training"] and given.arguments["p"]:
                return self._drop(given.arguments["p"], args[0], _DROPOUTS[func])
        return func(*args, **kwargs)

    def _drop(self, rate: float, h: Tensor, axes: int = 0) -> Tensor:
        self.state.functional = True
        return self.state.drop("its forward", rate, axes, "", h)

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Any = None,
        dropout_p: float = 0,
        *rest: Any,
        **to: Any,
    ) -> Tensor:
        """Attention; where it drops, its weights are what it makes of the identity."""
        attend = functional.scaled_dot_product_attention
        if not (self.state.training and dropout_p):
            return attend(query, key, value, attn_mask, dropout_p, *rest, **to)
        identity = torch.eye(key.shape[-2], dtype=key.dtype, device=key.device).expand(*key.shape[:-1], key.shape[-2])
        weights = self._drop(dropout_p, attend(query, key, identity, attn_mask, 0.0, *rest, **to))
        if to.get("enable_gqa"):
            value = value.repeat_interleave(weights.shape[-3] // value.shape[-3], -3)
        return weights @ value


@dataclass(frozen=True, eq=False)
class Called:
    """A network that is called as it is, as a function of its tensors, like a `Structure`. Not thread-safe.

    Attributes:
        layout, dropout, mixes, scale: as in `Structure`.
        modes: each layer, and whether the user's network has it in train mode.
        statistics: names of the running statistics among the tensors.
        pace: 1 / learning rate if running statistics move by their layer's momentum.
        width: width of the bends of ReLU; None: it has its kink.
        tokens: whether the inputs are ids, which the network takes as integers.
    """

    module: nn.Module
    layout: Layout
    constants: dict[str, Tensor]
    statistics: frozenset[str]
    state: _State
    modes: tuple[tuple[nn.Module, bool], ...]
    dropout: tuple[tuple[tuple[int, ...], float], ...] = ()
    mixes: bool = True
    scale: Scale = UNSCALED
    pace: float | None = None
    width: float | None = None
    tokens: bool = False

    @classmethod
    def of(cls, module: nn.Module, layout: Layout, *, tokens: bool = False) -> Called:
        """Take over a network: batch norm and dropout get other forwards, and in-place options are turned off."""
        modes, state = tuple((layer, layer.training) for layer in module.modules()), _State()
        for path, layer in module.named_modules():
            drop = functools.partial(state.drop, f"layer {path!r}")
            if hasattr(layer, _WARNS):
                setattr(layer, _WARNS, lambda *ids: None)
            if getattr(layer, "inplace", False) is True:
                layer.inplace = False
            if is_norm(layer):
                layer.forward = functools.partial(state.norm, layer, layer.training)
            elif type(layer) in _MASKS and layer.training and layer.p:
                layer.forward = functools.partial(drop, float(layer.p), _MASKS[type(layer)], "")
            elif (type(layer).__module__, type(layer).__name__) == _DEPTH and layer.training and layer.p:
                layer.forward = functools.partial(drop, float(layer.p), 0, layer.mode)
            elif type(layer) in _BENT:
                layer.forward = _BENT[type(layer)]
            elif type(layer) is nn.EmbeddingBag and layer.mode != "max" and layer.padding_idx is None:
                layer.forward = functools.partial(_bag, layer)  # type: ignore[method-assign]
            elif isinstance(layer, nn.RNNBase):
                layer.flatten_parameters = lambda: None  # type: ignore[method-assign]  # it needs addresses of weights
        tensors = tensors_of(module)
        floating = {name: tensor.detach() for name, tensor in tensors.items() if tensor.is_floating_point()}
        constants = {name: tensor for name, tensor in floating.items() if name not in layout.names}
        statistics = frozenset(name for name in layout.names if not tensors[name].requires_grad)
        state.sent = bool(statistics)
        module.requires_grad_(False)
        return cls(module, layout, constants, statistics, state, modes, tokens=tokens)

    @property
    def smooth(self) -> bool:
        """Whether all modules are known to be smooth, or softened ReLUs are the only functions with kinks."""
        kinks = self.state.kinks - (_RELU if self.width else frozenset())
        softened = self.width is not None and bool(self.state.kinks) and not kinks
        return softened or all(type(layer) in _SMOOTH for layer, _ in self.modes)

    def scaled(self, low: Tensor, span: Tensor) -> Called:
        """The network for inputs that are stored as (x - low) / span."""
        return replace(self, scale=self.scale.after(low, span))

    def softened(self, width: float) -> Called:
        """The network with bends of this width instead of the kinks of ReLU."""
        return replace(self, width=width)

    def paced(self, lr: float) -> Called:
        """The network, whose running statistics a step of rate `lr` moves by the momentum of their layer."""
        return replace(self, pace=1.0 / lr)

    def __call__(self, tensors: Sequence[Tensor], x: Tensor, keep: Sequence[Tensor] | None) -> Tensor:
        """Scores [b, classes] of x [b, *input_shape]; `keep` as in `Structure`."""
        # functions drop only in train mode, in which batch norms use the statistics of the batch
        drops = keep is not None and self.state.functional and not self.mixes
        return self._scores(tensors, x, keep, training=drops)

    def in_training(self, tensors: Sequence[Tensor], x: Tensor, keep: Sequence[Tensor] | None) -> InTraining:
        """The scores while a client trains."""
        scores = self._scores(tensors, x, keep, training=self.mixes or self.state.functional)
        terms = self.state.terms
        return InTraining(scores, torch.stack(terms).sum() if terms else None)

    def _scores(self, tensors: Sequence[Tensor], x: Tensor, keep: Sequence[Tensor] | None, *, training: bool) -> Tensor:
        state = self.state
        if state.training != training:
            for layer, mode in self.modes:
                layer.training = mode and training
        state.training, state.pace, state.terms = training, self.pace, []
        state.keep = None if keep is None else zip(keep, state.places, strict=True)
        # constants follow the type and the device of the inputs, or of the parameters
        like = tensors[0] if self.tokens else x
        constants = {key: tensor.to(like) for key, tensor in self.constants.items()}
        state.after = constants | dict(zip(self.layout.names, tensors, strict=True))
        x = x.long() if self.tokens else x if self.scale is UNSCALED else self.scale.apply(x)
        with ExitStack() as stack:
            double = tensors[0].dtype == torch.float64
            stack.enter_context(_plainly(torch.float64 if double else torch.get_default_dtype()))
            if double or self.width is not None or state.functional or state.written or state.dropped is not None:
                zero = tensors[0].new_zeros(()) + x.new_zeros(())
                stack.enter_context(_Functions(state, self.width, zero))
            # writes changed tensors into state.after
            scores: Tensor = functional_call(self.module, state.after, (x,))
        return scores


@contextmanager
def _plainly(made: torch.dtype) -> Iterator[None]:
    """Compute attention by plain operations, and give tensors that a network makes this type.

    Torch's faster operations lack second derivatives, or lack them under `vmap`.
    """
    fast, before = torch.backends.mha.get_fastpath_enabled(), torch.get_default_dtype()
    torch.backends.mha.set_fastpath_enabled(False)
    torch.set_default_dtype(made)
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        torch.set_default_dtype(before)
        torch.backends.mha.set_fastpath_enabled(fast)


class Watch:
    """Watches a forward pass, and refuses a network that fails or, unless `draws`, draws from torch's generator.

    The error names the layer.
    """

    def __init__(self, name: str, module: nn.Module, shape: tuple[int, ...], *, draws: bool = False) -> None:
        self.name, self.module, self.shape, self.draws = name, module, shape, draws
        self.open: list[tuple[str, Tensor]] = []
        self.drew = ""

    def __enter__(self) -> None:
        self.hooks = []
        for path, layer in self.module.named_modules():
            where = f"layer {path!r} ({type(layer).__name__})" if path else "its forward"
            self.hooks.append(layer.register_forward_pre_hook(functools.partial(self._enter, where)))
            self.hooks.append(layer.register_forward_hook(self._leave))

    def _enter(self, where: str, *_: object) -> None:
        self.open.append((where, torch.get_rng_state()))

    def _leave(self, *_: object) -> None:
        where, before = self.open.pop()
        if not self.drew and not torch.equal(before, torch.get_rng_state()):
            self.drew = where

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        for hook in self.hooks:
            hook.remove()
        if isinstance(error, (Exception, SystemExit)):
            where = self.open[-1][0] if self.open else "its forward"
            if len(self.shape) == 4 and self.shape[1] == 1 and "1d" in where:
                where = f"(a series [n, c, T] arrives as [n, 1, c, T] unless its form is stated: series(x, y)) {where}"
            raise refusal(self.name, f"{where} fails on inputs of shape {self.shape}: {line(error)}") from error
        if self.drew and not self.draws:
            text = "draws from torch's global generator, but randomness comes from the seed"
            raise refusal(self.name, f"{self.drew} {text}: use nn.Dropout, or return the layer in eval mode")


def plain_scores(module: nn.Module, layout: Layout, tokens: bool, params: Vector, x: Tensor) -> Tensor:
    """The scores of a network as it is, with the tensors of the vector [d] in place of its own."""
    tensors = dict(zip(layout.names, layout.split(params), strict=True))
    scores: Tensor = functional_call(module, tensors, (x.long() if tokens else x,))
    return scores


def tried(name: str, net: Called, tensors: list[Tensor], x: Tensor, outputs: int) -> Called:
    """The network with its dropouts, and whether it mixes the records of a batch, by dry runs on x [3, *input_shape].

    Raises:
        ValueError: the network is not supported.
    """

    def scores_of(x: Tensor, *, training: bool) -> Tensor:
        with Watch(name, net.module, tuple(x.shape)), torch.no_grad():
            scores = net.in_training(tensors, x, None).scores if training else net(tensors, x, None)
        if not isinstance(scores, Tensor) or scores.shape != (len(x), outputs):
            got = f"shape {tuple(scores.shape)}" if isinstance(scores, Tensor) else type(scores).__name__
            when = "in train mode" if training else "in eval mode"
            count = scores.shape[1] if isinstance(scores, Tensor) and scores.ndim == 2 else 0
            todo = f"state them: npz:PATH?classes={count}, or classes={count} of inspect" if count > outputs else ""
            todo = todo and f"; if the data lack classes, or have floats as labels, {todo}"
            todo = todo if isinstance(scores, Tensor) else "; return the scores alone, or a dictionary with 'logits'"
            raise refusal(name, f"expected scores of shape {(len(x), outputs)} {when}, got {got}{todo}")
        return scores

    everything = tensors_of(net.module) | net.constants | dict(zip(net.layout.names, tensors, strict=True))
    before = {key: tensor.clone() for key, tensor in everything.items()}
    scores = scores_of(x[:2], training=False)
    runs, dropped = [], []
    for b in (2, 3):
        net.state.dropped = []
        runs.append(scores_of(x[:b], training=True))
        dropped.append(net.state.dropped)
        net.state.dropped = None
    for key, tensor in (tensors_of(net.module) | net.state.after).items():
        if not torch.equal(before[key], tensor):
            raise refusal(name, f"{key!r} changes in forward; only the statistics of batch norms may")
    if not torch.equal(scores_of(x, training=True), runs[1]):
        raise refusal(name, "two forwards of the same inputs differ; what draws random numbers, or counts its calls?")
    dropouts = [_dropout(name, *pair) for pair in zip(*dropped, strict=True)]
    net.state.places = tuple(place for place, _, _ in dropouts)
    live = any(mode and is_norm(layer) for layer, mode in net.modes)
    if not live and not near(runs[0], scores):
        raise refusal(name, "its scores in train mode differ from those in eval mode, and no batch norm explains it")
    mixes = live or not near(scores_of(x[[0, 2]], training=True)[0], runs[0][0])
    return replace(net, dropout=tuple((shape, rate) for _, shape, rate in dropouts), mixes=mixes)


def _dropout(name: str, two: _Dropped, three: _Dropped) -> tuple[_Place, tuple[int, ...], float]:
    """The place of the batch, the shape of a record's mask and the rate, from runs of two and of three records."""
    if two.rate >= 1:
        raise refusal(name, f"{two.path}: expected a dropout rate below 1, got {two.rate:g}")
    axes = [axis for axis, pair in enumerate(zip(two.shape, three.shape, strict=True)) if pair[0] != pair[1]]
    if len(axes) != 1 or 3 * two.shape[axes[0]] != 2 * three.shape[axes[0]] or (two.channels and axes[0]):
        raise refusal(name, f"{two.path}: a dropout whose inputs {two.shape} have no batch axis")
    (axis,) = axes
    times = two.shape[axis] // 2
    rest = (*two.shape[:axis], *two.shape[axis + 1 :])
    return _Place(axis, times), rest if times == 1 else (times, *rest), two.rate
