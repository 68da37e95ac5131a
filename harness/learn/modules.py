"""A user's network as a `Model`: any `torch.nn.Module` that the engine can differentiate.

The flat vector holds the trainable parameters and the running statistics of batch norms in train mode, in the order of
`state_dict`. Everything else is a constant: parameters with `requires_grad=False`, buffers, the running statistics of
batch norms in eval mode. The network is called with the tensors of the vector in place of its own.

*Batch norm in train mode* uses the statistics of the batch while a client trains, and the running statistics otherwise.
The gradient of running statistics is their difference from those of the batch, as in `resnet20-bn`: a step of rate lr
moves them by lr * (batch - running). Torch moves them by the layer's momentum instead; `paced` does too, if clients
send updates. The variance of the batch is the unbiased one, as in torch.

*Dropout*, and torchvision's stochastic depth, multiply with masks that the task draws from its keys. Layers of these
kinds that are in eval mode are off.

An unsupported network is refused in one line that names the layer and the reason.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import one_hot
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.modules.utils import _pair
from torch.nn.parameter import is_lazy

from leakgauge.harness.core import rng
from leakgauge.harness.core.code import imported
from leakgauge.harness.core.contract import InTraining
from leakgauge.harness.core.errors import UnknownNameError, unknown
from leakgauge.harness.core.rng import Key
from leakgauge.harness.core.vec import Layout, Vector
from leakgauge.harness.learn.gradients import gradients, losses
from leakgauge.harness.learn.layers import BatchStatistics, Chain, Conv, Dense, Dropout, Flatten, MaxPool, Relu, Sigmoid
from leakgauge.harness.learn.models import Initialization, Loss, Model
from leakgauge.harness.learn.tasks import ModelTask

Make = Callable[..., nn.Module]

_KEY = Key(0, ("own model",))
"""Key of dry runs, and of a factory's draws for constants, which are the same for every seed."""

_MASKS: dict[type[nn.Module], int] = {nn.Dropout: 0, nn.Dropout1d: 3, nn.Dropout2d: 4, nn.Dropout3d: 5}
"""Supported dropouts; dropouts of whole channels take inputs with this many axes."""

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

_STEPS = (1e-8, 1e-9, 1e-8, 1e-9)
"""Step sizes of the numerical slope in each direction, in float64; so short that steps cross few kinks. One direction
that agrees is enough: a kink spoils few directions, a wrong backward spoils all."""

_AGREES = 1e-3
"""Maximum relative difference of the two slopes; it is about 1e-6 for a ResNet-18."""

_UNSENT = "?statistics=no"
"""Suffix of the name of a network whose running statistics are constants and are not sent, although a batch norm in
train mode uses the statistics of the batch."""

BINARY = "; to train z with the binary cross-entropy, return torch.cat([0 * z, z], 1)"
"""Advice for a network with one output and labels of two classes: their cross-entropy is that of z."""

_given: dict[str, Make | nn.Module] = {}


def given(name: str, make: Make | nn.Module) -> str:
    """Register a network in this process; returns its name for a study, `given:NAME`.

    Args:
        make: a factory as in `build`, or a network, whose weights are then the first model of every training.

    Raises:
        TypeError: `make` is neither.
    """
    if not isinstance(make, nn.Module) and not callable(make):
        raise TypeError(f"expected a torch.nn.Module or a function that makes one, got {make!r}")
    _given[name] = make
    return f"given:{name}"


def build(name: str, input_shape: tuple[int, ...], classes: int, loss: Loss = "cross-entropy") -> Model:
    """The network `name` for inputs of one shape.

    Args:
        name: `module:factory`, `torchvision:NAME` or `given:NAME`. A factory is called with those of the arguments
            `input_shape`, `classes`, `num_classes` and `channels` that it accepts. It draws the weights from torch's,
            numpy's and Python's global generators, which are seeded by the seed of the training; its draws for
            constants are the same for every seed. With the suffix `?statistics=no`, running statistics are constants.
        classes: number of outputs; squared loss always has one output.

    Raises:
        UnknownNameError: there is no such network, or its module cannot be imported.
        ValueError: the network is not supported.
    """
    outputs = 1 if loss == "squared" else classes
    fresh = _Fresh(name, _source(name), input_shape, outputs)
    with rng.global_generators(_KEY):
        module = fresh()
        names = _names(name, module, statistics=not name.endswith(_UNSENT))
        found = _tensors(module)
        layout = Layout(names, tuple(tuple(found[one].shape) for one in names))
        made = layout.join([found[one].detach().clone() for one in names])
        net = _Net.of(module, names)
        dropout, mixes = _tried(name, net, layout.split(made), input_shape, outputs)
        chain = None if mixes else _chain_of(net, layout, made, _inputs(2, input_shape), dropout)
    return Model(
        *(name, layout, (), input_shape, outputs, chain or net, loss),
        dropout=dropout,
        training=net.training if mixes else None,
        start=_Start(fresh, net, made, layout),
        smooth=all(type(one) in _SMOOTH for one in module.modules()),
    )


def width(name: str, input_shape: tuple[int, ...]) -> int:
    """The number of outputs of a network that was given as an object; 0 for a factory or a shipped model."""
    if not isinstance(_given.get(name.removeprefix("given:")), nn.Module):
        return 0
    fresh = _Fresh(name, _source(name), input_shape, 0)
    with rng.global_generators(_KEY):
        module, x = fresh().eval(), _inputs(2, input_shape)
        with _Watch(name, module, tuple(x.shape), draws=True), torch.no_grad():
            scores = module(x)
    return int(scores.shape[1]) if isinstance(scores, Tensor) and scores.ndim == 2 else 0


def without_statistics(name: str) -> str:
    """The name of the same network, with running statistics of batch norms that clients do not send."""
    return name if name.endswith(_UNSENT) else name + _UNSENT


def torchvision_has(name: str) -> bool:
    """Whether torchvision is installed and has a classifier of this name."""
    from leakgauge.harness.data.torchvision_shim import classifiers

    try:
        return name in classifiers()
    except (ImportError, RuntimeError):
        return False


def paced(model: Model, lr: float) -> Model:
    """The model, but a step of rate `lr` moves running statistics as in torch, by the momentum of their layer.

    This is exact only without momentum of the local SGD, which would keep moving the statistics. With a learning-rate
    schedule, the moves are in proportion to the rate.
    """
    if not isinstance(model.apply, _Net) or model.training is None:
        return model
    net = replace(model.apply, pace=1.0 / lr)
    return replace(model, apply=net, training=net.training)


class Origin(NamedTuple):
    """modules: names of the modules that define a network; weights: digest of a given network's weights, or empty."""

    modules: frozenset[str]
    weights: str = ""


def origin(name: str) -> Origin:
    """The origin of the code and the weights behind a name."""
    kind, source = name.partition(":")[0], _source(name)
    if kind == "torchvision":
        return Origin(frozenset())
    named = frozenset() if kind == "given" else frozenset({kind})
    if not isinstance(source, nn.Module):
        return Origin(named | {source.__module__})
    digest = hashlib.sha256()
    for key, tensor in source.state_dict().items():
        digest.update(f"{key} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return Origin(named | {type(source).__module__}, digest.hexdigest())


def _source(name: str) -> Make | nn.Module:
    """The factory or the network of a name."""
    name = name.removesuffix(_UNSENT)
    kind, _, rest = name.partition(":")
    if kind == "given":
        if rest not in _given:
            raise UnknownNameError(
                f"no model {name!r} in this process: only the process that registered it may run it, with workers=0"
            )
        return _given[rest]
    if kind == "torchvision":
        from leakgauge.harness.data import torchvision_shim

        try:
            known = torchvision_shim.classifiers()
        except ImportError as error:
            raise UnknownNameError(f"no model {name!r}: torchvision is not installed") from error
        if rest not in known:
            raise unknown("model of torchvision", rest, known)
        return functools.partial(torchvision_shim.classifier, rest)
    found: Make | nn.Module = imported("model", name)
    if not isinstance(found, nn.Module) and not callable(found):
        raise UnknownNameError(f"expected a torch.nn.Module or a function that makes one for {name!r}, got {found!r}")
    return found


def _refusal(name: str, text: str) -> ValueError:
    """The error for an unsupported network."""
    return ValueError(f"model {name!r}: {text}")


@contextmanager
def _theirs(name: str, doing: str) -> Iterator[None]:
    """Turn any exception of a user's code into one line."""
    try:
        yield
    except (Exception, SystemExit) as error:
        raise _refusal(name, f"{doing}: {_line(error)}") from error


def _line(error: BaseException) -> str:
    """An error of torch, which may have many lines, in one line of limited length."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text if len(text) < 300 else text[:300] + ' ...'}"


@dataclass(frozen=True, eq=False)
class _Fresh:
    """Makes the network again: a private copy on the CPU, with materialized lazy layers."""

    name: str
    source: Make | nn.Module
    input_shape: tuple[int, ...]
    outputs: int

    def __call__(self) -> nn.Module:
        """The network, drawn from the global generators."""
        with _theirs(self.name, "the factory fails"):
            made = self.source if isinstance(self.source, nn.Module) else self.source(**self._arguments(self.source))
        if not isinstance(made, nn.Module):
            raise _refusal(self.name, f"expected a factory of a torch.nn.Module, got {type(made).__name__}")
        if isinstance(made, torch.jit.ScriptModule):
            raise _refusal(self.name, "a scripted network cannot be differentiated per record; return the plain one")
        if any(map(is_lazy, _tensors(made).values())):
            if made is self.source:
                raise _refusal(self.name, "a network with lazy layers has no weights yet; pass its factory")
            self._materialize(made)
        with _theirs(self.name, "the network cannot be copied to the CPU"):
            return copy.deepcopy(made).cpu()

    def _arguments(self, make: Make) -> dict[str, object]:
        """The arguments that the factory accepts."""
        known = {"classes": self.outputs, "num_classes": self.outputs, "channels": self.input_shape[0]}
        named = inspect.signature(make).parameters
        return {key: one for key, one in {**known, "input_shape": self.input_shape}.items() if key in named}

    def _materialize(self, module: nn.Module) -> None:
        """Give lazy layers their shapes by a forward pass in eval mode."""
        modes = [(layer, layer.training) for layer in module.modules()]
        with _Watch(self.name, module, (2, *self.input_shape), draws=True), torch.no_grad():
            module.eval()(_inputs(2, self.input_shape))
        for layer, mode in modes:
            layer.training = mode
        for key, tensor in _tensors(module).items():
            if is_lazy(tensor):
                raise _refusal(self.name, f"{key!r} is lazy, and a dry run does not reach it")


def _inputs(b: int, input_shape: tuple[int, ...]) -> Tensor:
    """Inputs of a dry run."""
    return rng.uniform(_KEY.child("x"), (b, *input_shape))


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by name, in the order of `state_dict`; a tied tensor only by its first name."""
    found: dict[int, tuple[str, Tensor]] = {}
    for prefix, layer in module.named_modules():
        for key, tensor in (*layer.named_parameters(recurse=False), *layer.named_buffers(recurse=False)):
            found.setdefault(id(tensor), (f"{prefix}.{key}".lstrip("."), tensor))
    return dict(found.values())


def _owned(layout: Layout, module: nn.Module) -> list[Tensor]:
    """A network's tensors in the order of a layout."""
    found = _tensors(module)
    for name, shape in zip(layout.names, layout.shapes, strict=True):
        if name not in found or tuple(found[name].shape) != shape:
            got = tuple(found[name].shape) if name in found else "none"
            raise ValueError(f"expected a network with a tensor {name!r} of shape {shape}, got {got}")
    return [found[name] for name in layout.names]


def _is_norm(layer: nn.Module) -> bool:
    """Whether a layer is a batch norm with torch's own forward."""
    return isinstance(layer, _BatchNorm) and type(layer).forward in {one.forward for one in _NORMS}


def _is_depth(layer: nn.Module) -> bool:
    """Whether a layer is torchvision's stochastic depth."""
    return (type(layer).__module__, type(layer).__name__) == _DEPTH


def _names(name: str, module: nn.Module, *, statistics: bool) -> tuple[str, ...]:
    """The names of the tensors in the flat vector; raises ValueError for unsupported layers."""
    moving = set()
    for path, layer in module.named_modules():
        where = f"layer {path!r} ({type(layer).__name__})"
        if isinstance(layer, _InstanceNorm) and layer.track_running_stats:
            raise _refusal(name, f"{where}: running statistics of instances are not supported; do not track them")
        if not isinstance(layer, _BatchNorm) or not layer.training:
            continue
        if not _is_norm(layer):
            raise _refusal(name, f"{where}: a batch norm with a custom forward; take torch's, or eval mode")
        if layer.running_mean is not None and layer.momentum is None:
            raise _refusal(name, f"{where}: a cumulative average (momentum=None) is not supported; give a momentum")
        if layer.running_mean is not None and statistics:
            moving |= {f"{path}.running_mean".lstrip("."), f"{path}.running_var".lstrip(".")}
    found = _tensors(module)
    owned = [one for one, tensor in found.items() if tensor.requires_grad or one in moving]
    if not any(found[one].requires_grad for one in owned):
        raise _refusal(name, "expected a trainable parameter, got none")
    for one in owned:
        if found[one].dtype != torch.float32:
            raise _refusal(name, f"expected float32, got {found[one].dtype} for {one!r}; return network.float()")
    return tuple(owned)


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
        self.found: list[_Dropped] | None = None  # only in a dry run
        self.after: dict[str, Tensor] = {}

    def norm(self, layer: _BatchNorm, live: bool, h: Tensor) -> Tensor:
        """The forward of a batch norm; `live`: the user's network has it in train mode."""
        layer._check_input_dim(h)  # type: ignore[no-untyped-call]
        if h.shape[1] != layer.num_features:
            raise ValueError(f"expected {layer.num_features} channels, got inputs {tuple(h.shape)}")
        shape = (1, -1, *(1 for _ in h.shape[2:]))
        mean, variance = layer.running_mean, layer.running_var
        if mean is None or variance is None or (live and self.training):
            now = self._of_batch(h)
            if mean is not None and variance is not None and self.sent:
                rate = 1.0 if self.pace is None else self.pace * (layer.momentum or 0.0)
                count = h.numel() // h.shape[1]
                moved = BatchStatistics.apply(mean, variance, now[0], now[1] * (count / (count - 1)))  # type: ignore[no-untyped-call]
                self.terms.append(rate * moved)
            mean, variance = now
        factor = (variance.clamp(min=0.0) + layer.eps).rsqrt()
        factor = factor if layer.weight is None else factor * layer.weight
        normal = (h - mean.view(shape)) * factor.view(shape)
        return normal if layer.bias is None else normal + layer.bias.view(shape)

    def _of_batch(self, h: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and biased variance of each channel."""
        axes = [axis for axis in range(h.ndim) if axis != 1]
        if h.numel() == h.shape[1]:
            raise ValueError(f"a batch norm needs more than one value per channel, got inputs {tuple(h.shape)}")
        return h.mean(axes), h.var(axes, correction=0)

    def drop(self, path: str, layer: nn.Dropout, h: Tensor) -> Tensor:
        """The forward of a dropout, or of a stochastic depth."""
        if self.found is not None:
            axes = _MASKS.get(type(layer), h.ndim)
            if axes not in (0, h.ndim):
                raise ValueError(f"expected inputs of {axes} axes, got {tuple(h.shape)}")
            if _is_depth(layer) and layer.mode != "row":
                raise ValueError(f"expected mode='row', got mode={layer.mode!r}, which drops whole batches")
            kept = 1 if _is_depth(layer) else 2 if axes else h.ndim
            shape = (*h.shape[:kept], *(1 for _ in h.shape[kept:]))
            self.found.append(_Dropped(path, float(layer.p), shape, bool(axes)))
        if self.keep is None:
            return h
        mask, place = next(self.keep)
        mask = mask.to(h)  # masks are drawn on the CPU, h may be elsewhere
        return h * (mask if place.times == 1 else mask.flatten(0, 1)).movedim(0, place.axis)


@dataclass(frozen=True, eq=False)
class _Net:
    """A network as a function of the tensors of the flat vector. Not thread-safe.

    Attributes:
        modes: each layer, and whether the user's network has it in train mode.
        statistics: names of the running statistics among the tensors.
        pace: 1 / learning rate if running statistics move by their layer's momentum.
    """

    module: nn.Module
    names: tuple[str, ...]
    constants: dict[str, Tensor]
    statistics: frozenset[str]
    state: _State
    modes: tuple[tuple[nn.Module, bool], ...]
    pace: float | None = None

    @classmethod
    def of(cls, module: nn.Module, names: tuple[str, ...]) -> _Net:
        """Take over a network: batch norm and dropout get other forwards, and in-place options are turned off."""
        modes, state = tuple((layer, layer.training) for layer in module.modules()), _State()
        for path, layer in module.named_modules():
            if getattr(layer, "inplace", False) is True:
                layer.inplace = False
            if _is_norm(layer):
                layer.forward = functools.partial(state.norm, layer, layer.training)
            elif (type(layer) in _MASKS or _is_depth(layer)) and layer.training and layer.p:
                layer.forward = functools.partial(state.drop, path, layer)
            elif type(layer) in _BENT:
                layer.forward = _BENT[type(layer)]
        constants = {
            key: tensor.detach()
            for key, tensor in _tensors(module).items()
            if key not in names and tensor.is_floating_point()
        }
        found = _tensors(module)
        statistics = frozenset(key for key in names if not found[key].requires_grad)
        state.sent = bool(statistics)
        module.requires_grad_(False)
        return cls(module, names, constants, statistics, state, modes)

    def __call__(self, tensors: Sequence[Tensor], x: Tensor, keep: Sequence[Tensor] | None) -> Tensor:
        """Scores [b, classes] of x [b, *input_shape]; `keep` as in `Model`."""
        return self._scores(tensors, x, keep, training=False)

    def training(self, tensors: Sequence[Tensor], x: Tensor, keep: Sequence[Tensor] | None = None) -> InTraining:
        """The scores while a client trains."""
        scores = self._scores(tensors, x, keep, training=True)
        terms = self.state.terms
        return InTraining(scores, torch.stack(terms).sum() if terms else None)

    def _scores(self, tensors: Sequence[Tensor], x: Tensor, keep: Sequence[Tensor] | None, *, training: bool) -> Tensor:
        """Call the network with its layers in train or eval mode."""
        state = self.state
        if state.training != training:
            for layer, mode in self.modes:
                layer.training = mode and training
        state.training, state.pace, state.terms = training, self.pace, []
        state.keep = None if keep is None else zip(keep, state.places, strict=True)
        # constants follow the type and the device of the inputs
        constants = {key: tensor.to(x) for key, tensor in self.constants.items()}
        state.after = constants | dict(zip(self.names, tensors, strict=True))
        with _plain_attention():
            scores: Tensor = functional_call(self.module, state.after, (x,))  # writes changed tensors into state.after
        return scores


@contextmanager
def _plain_attention() -> Iterator[None]:
    """Compute attention by plain operations: torch's faster ones lack second derivatives, or lack them under `vmap`."""
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)


class _Watch:
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
            if len(self.shape) == 4 and self.shape[1] == 1 and "Conv1d" in where:
                where = f"(a series [n, c, T] arrives as [n, 1, c, T]: begin with nn.Flatten(1, 2)) {where}"
            raise _refusal(self.name, f"{where} fails on inputs of shape {self.shape}: {_line(error)}") from error
        if self.drew and not self.draws:
            text = "draws from torch's global generator, but randomness comes from the seed"
            raise _refusal(self.name, f"{self.drew} {text}: use nn.Dropout, or return the layer in eval mode")


def _tried(
    name: str, net: _Net, tensors: list[Tensor], input_shape: tuple[int, ...], outputs: int
) -> tuple[tuple[tuple[tuple[int, ...], float], ...], bool]:
    """The dropouts of a network as in `Model`, and whether it mixes the records of a batch, by dry runs."""
    x = _inputs(3, input_shape)

    def tried(x: Tensor, *, training: bool) -> Tensor:
        with _Watch(name, net.module, tuple(x.shape)), torch.no_grad():
            scores = net.training(tensors, x).scores if training else net(tensors, x, None)
        if not isinstance(scores, Tensor) or scores.shape != (len(x), outputs):
            got = f"shape {tuple(scores.shape)}" if isinstance(scores, Tensor) else type(scores).__name__
            when = "in train mode" if training else "in eval mode"
            count = scores.shape[1] if isinstance(scores, Tensor) and scores.ndim == 2 else 0
            todo = f"; if the data lack classes, state them: npz:PATH?classes={count}" if count > outputs > 1 else ""
            todo = BINARY if count == 1 else todo
            raise _refusal(name, f"expected scores of shape {(len(x), outputs)} {when}, got {got}{todo}")
        return scores

    everything = _tensors(net.module) | net.constants | dict(zip(net.names, tensors, strict=True))
    before = {key: tensor.clone() for key, tensor in everything.items()}
    scores = tried(x[:2], training=False)
    runs, found = [], []
    for b in (2, 3):
        net.state.found = []
        runs.append(tried(x[:b], training=True))
        found.append(net.state.found)
        net.state.found = None
    for key, tensor in (_tensors(net.module) | net.state.after).items():
        if not torch.equal(before[key], tensor):
            raise _refusal(name, f"{key!r} changes in forward; only the statistics of batch norms may")
    if not torch.equal(tried(x, training=True), runs[1]):
        raise _refusal(name, "two forwards of the same inputs differ; what draws random numbers, or counts its calls?")
    dropouts = [_dropout(name, *pair) for pair in zip(*found, strict=True)]
    net.state.places = tuple(place for place, _, _ in dropouts)
    live = any(mode and _is_norm(layer) for layer, mode in net.modes)
    if not live and not _near(runs[0], scores):
        raise _refusal(name, "its scores in train mode differ from those in eval mode, and no batch norm explains it")
    mixes = live or not _near(tried(torch.stack([x[0], 1 - x[1]]), training=True)[0], runs[0][0])
    return tuple((shape, rate) for _, shape, rate in dropouts), mixes


def _near(one: Tensor, other: Tensor) -> bool:
    """Whether scores are equal up to rounding."""
    return torch.allclose(one, other, rtol=1e-3, atol=1e-4 * float(other.abs().max()), equal_nan=True)


def _dropout(name: str, two: _Dropped, three: _Dropped) -> tuple[_Place, tuple[int, ...], float]:
    """The place of the batch, the shape of a record's mask and the rate, from runs of two and of three records."""
    if two.rate >= 1:
        raise _refusal(name, f"layer {two.path!r}: expected a dropout rate below 1, got {two.rate:g}")
    axes = [axis for axis, pair in enumerate(zip(two.shape, three.shape, strict=True)) if pair[0] != pair[1]]
    if len(axes) != 1 or 3 * two.shape[axes[0]] != 2 * three.shape[axes[0]] or (two.channels and axes[0]):
        raise _refusal(name, f"layer {two.path!r}: a dropout whose inputs {two.shape} have no batch axis")
    (axis,) = axes
    times = two.shape[axis] // 2
    rest = (*two.shape[:axis], *two.shape[axis + 1 :])
    return _Place(axis, times), rest if times == 1 else (times, *rest), two.rate


def _chain_of(net: _Net, layout: Layout, made: Vector, x: Tensor, dropout: Sequence[Any]) -> Chain | None:
    """The layers of a plain `nn.Sequential`, so that gradients are computed and attacked as those of a shipped model.

    None: other modules, Sequentials with an own forward, hooks, or weights that are tied or frozen; see `_layer`.
    """
    axes, drops, layers = x.ndim, iter(dropout), list[Any]([Flatten()] if x.ndim == 2 else [])
    for path, one in net.module.named_modules(remove_duplicate=False):  # in the order of the calls
        hooks = one._forward_hooks, one._forward_pre_hooks, one._backward_hooks, one._backward_pre_hooks
        if any(hooks) or None in layers:
            return None
        if type(one) in _MASKS:  # the forward of an active one has been replaced
            layers += [Dropout(*next(drops, ((), 0.0)))] if "forward" in vars(one) else []
        elif type(one) is nn.Flatten and (one.start_dim % axes, one.end_dim % axes) == (1, axes - 1):
            layers, axes = layers + [Flatten()] * (axes > 2), 2
        elif type(one) is not nn.Identity and type(one).forward is not nn.Sequential.forward:
            layers.append(_layer(path, one, axes))
    if not isinstance(layers[-1], Dense) or None in layers:
        return None
    chain, tensors = Chain(tuple(layers)), layout.split(made)
    if (chain.tensors.layout, chain.dropout) != (layout, tuple(dropout)):
        return None
    with torch.no_grad():
        return chain if _near(chain(tensors, x, None), net(tensors, x, None)) else None


def _layer(path: str, one: Any, axes: int) -> Conv | Dense | MaxPool | Relu | Sigmoid | None:
    """A module for inputs with this number of axes as a layer; None: no layer computes the same."""
    if type(one) is nn.Linear and axes == 2:
        return Dense(path, one.in_features, one.out_features)
    if type(one) is nn.Conv2d and axes == 4:
        sides = {*one.kernel_size}, {*one.stride}, {*one._reversed_padding_repeated_twice}
        kernel, stride, padding = map(max, sides)
        alike = sum(map(len, sides)) == 3 and padding < kernel
        if alike and (one.groups, one.dilation, one.padding_mode) == (1, (1, 1), "zeros"):
            return Conv(path, one.in_channels, one.out_channels, kernel, stride, padding, one.bias is not None)
    if type(one) is nn.MaxPool2d and axes == 4:
        asked = map(_pair, (one.kernel_size, one.stride, one.padding, one.dilation, one.ceil_mode))
        return MaxPool() if [*asked] == [*map(_pair, (2, 2, 0, 1, False))] else None
    return Relu() if type(one) is nn.ReLU else Sigmoid() if type(one) is nn.Sigmoid else None


@dataclass(frozen=True, eq=False)
class _Start:
    """The first parameters of a training.

    Attributes:
        made: the parameters of the network that `build` made.
    """

    fresh: _Fresh
    net: _Net
    made: Vector
    layout: Layout

    def __call__(self, key: Key, initialization: Initialization) -> Vector:
        """[d] drawn from the key, or the given weights; `dlg`: uniform in +-0.5, except for running statistics."""
        if initialization == "dlg":
            flat = rng.uniform(key, (self.layout.dim,), -0.5, 0.5)
            parts = zip(self.layout.names, self.layout.split(flat), self.layout.split(self.made), strict=True)
            return self.layout.join([made if name in self.net.statistics else part for name, part, made in parts])
        if isinstance(self.fresh.source, nn.Module):
            return self.made.clone()
        with rng.global_generators(key):
            module = self.fresh()
        return self.layout.join([tensor.detach() for tensor in _owned(self.layout, module)])


def check(task: ModelTask) -> None:
    """Check once that a user's network has the gradients that an attack needs; a shipped model is not checked.

    The gradient of the loss must exist for each parameter, in float64, for many batches at once, and its slope in the
    inputs must agree with small steps. For a ResNet-18 on 64 x 64 pixels, the check takes two to three seconds.

    Raises:
        ValueError: the gradients do not meet these conditions; the error is one line.
    """
    start, name = task.model.start, task.model.name
    if not isinstance(start, _Start):
        return
    squared, params = task.model.loss == "squared", start.made
    b = 4 if task.mixes else 2  # a batch norm of two values has only two possible results, so no useful slope
    x = _inputs(2 * b, task.input_shape).view(2, b, *task.input_shape)
    labels = (torch.arange(2 * b) % task.classes).view(2, b)
    y = rng.uniform(_KEY.child("y"), (2, b)) if squared else one_hot(labels, task.classes).to(x)
    leaf = params.clone().requires_grad_()
    tensors = task.layout.split(leaf)
    with _theirs(name, "its gradient fails"):
        used = torch.autograd.grad(task.loss_at(tensors, x[0], y[0]), tensors, allow_unused=True)
    for key, gradient in zip(task.layout.names, used, strict=True):
        if gradient is None:
            raise _refusal(name, f"{key!r} takes no part in the scores; set its requires_grad to False")
    with _theirs(name, "gradients of many batches at once fail; control flow by data, or an operation in place?"):
        several = x.clone().requires_grad_()
        torch.autograd.grad(gradients(task, params, several, y).sum(), several)
        losses(task, params, x[0], y[0] if squared else labels[0])
    with _theirs(name, "its gradient fails in float64; register constant tensors as buffers"):
        apart = _apart(task, params.double(), x[:1].double(), y[:1].double())
    if apart > _AGREES:
        text = "the derivative of its gradient in the inputs differs from finite differences"
        raise _refusal(name, f"{text} (off by {apart:.1g}); is the backward of a custom autograd.Function wrong?")


def _apart(task: ModelTask, params: Vector, x: Tensor, y: Tensor) -> float:
    """The relative difference between the slope of a random combination of the gradient and that of small steps.

    The result is the smallest difference over the directions; the first direction that agrees ends the search.
    """
    leaf, mixed = x.requires_grad_(), rng.normal(_KEY.child("mixed"), params.shape, torch.float64)
    (slope,) = torch.autograd.grad(gradients(task, params, leaf, y)[0] @ mixed, leaf)
    found = []
    for number, step in enumerate(_STEPS):
        way = rng.normal(_KEY.child("way", number), x.shape, torch.float64)
        with torch.no_grad():
            ends = [gradients(task, params, x.detach() + sign * way, y)[0] @ mixed for sign in (step, -step)]
        pair = float((slope * way).sum()), float(ends[0] - ends[1]) / (2 * step)
        found.append(abs(pair[0] - pair[1]) / max(*map(abs, pair), 1e-12))
        if found[-1] <= _AGREES:
            break
    return min(found)
