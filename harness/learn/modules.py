"""A user's network as a `Model`: any `torch.nn.Module` that the engine can differentiate.

`docs/how-to/own-model-and-data.md` says what the flat vector holds, what is a constant, and what is refused. The
network is called with the tensors of the vector in place of its own.

*Batch norm in train mode* uses the statistics of the batch while a client trains, and the running statistics otherwise.
The gradient of running statistics is their difference from those of the batch, as in `resnet20-bn`: a step of rate lr
moves them by lr * (batch - running). Torch moves them by the layer's momentum instead; `paced` does too, if clients
send updates. The variance of the batch is the unbiased one, as in torch.

*Dropout*, and torchvision's stochastic depth, multiply with masks that the task draws from its keys.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import one_hot
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.parameter import is_lazy

from leakgauge.harness.core import rng
from leakgauge.harness.core.code import imported
from leakgauge.harness.core.errors import UnknownNameError, unknown
from leakgauge.harness.core.form import Form, Tokens, form_of
from leakgauge.harness.core.rng import Key
from leakgauge.harness.core.vec import Layout, Vector
from leakgauge.harness.learn.called import KEY, Called, Watch, is_norm, plain_scores, refusal, theirs, tried
from leakgauge.harness.learn.gradients import gradients, losses, targets_of
from leakgauge.harness.learn.losses import CROSS_ENTROPY, NEXT_TOKEN, PER_PLACE, Loss, next_tokens
from leakgauge.harness.learn.models import Initialization, Model
from leakgauge.harness.learn.reading import structure_of, tensors_of
from leakgauge.harness.learn.tasks import ModelTask
from leakgauge.harness.learn.wrapped import bare, unwrap

Make = Callable[..., nn.Module]

_STEPS = (1e-8, 1e-9, 1e-8, 1e-9)
"""Step sizes of the numerical slope in each direction, in float64; so short that steps cross few kinks. One direction
that agrees is enough: a kink spoils few directions, a wrong backward spoils all."""

_AGREES = 1e-3  # maximum relative difference of the two slopes; it is about 1e-6 for a ResNet-18

_UNSENT = "?statistics=no"
"""Suffix of the name of a network whose running statistics are constants and are not sent, although a batch norm in
train mode uses the statistics of the batch."""

_given: dict[str, Make | nn.Module] = {}


def given(name: str, make: Make | nn.Module) -> str:
    """Register a network in this process; returns its name for a study, `given:NAME`.

    Args:
        make: a factory as in `build`, or a network, whose weights are then the first model of every training.

    Raises:
        ValueError: `make` is neither.
    """
    if not isinstance(make, nn.Module) and not callable(make):
        raise ValueError(f"expected a torch.nn.Module, or a function that makes one, got {type(make).__name__}")
    _given[name] = make
    return f"given:{name}"


def build(
    name: str, input_shape: tuple[int, ...], outputs: int, form: Form | None = None, loss: Loss = CROSS_ENTROPY
) -> Model:
    """The network `name` for inputs of one shape.

    Args:
        name: `module:factory`, `torchvision:NAME` or `given:NAME`. A factory is called with those of the arguments
            `input_shape`, `classes`, `num_classes` and `channels` that it accepts. It draws the weights from torch's,
            numpy's and Python's global generators, which are seeded by the seed of the training; its draws for
            constants are the same for every seed. With the suffix `?statistics=no`, running statistics are constants.
            For tokens, it may also take `vocabulary`, the number of different ids.
        form: of the inputs; None: the usual one of their shape.
        loss: for `next-token`, the scores are those of `losses.next_tokens`; for `cross-entropy-per-place`, scores
            [b, classes, *places] become rows.

    Raises:
        UnknownNameError: there is no such network, or its module cannot be imported.
        ValueError: the network is not supported.
    """
    form = form or form_of(input_shape)
    fresh = _Fresh(name, _source(name), input_shape, outputs, form, loss)
    with rng.global_generators(KEY):
        module = fresh()
        names = _names(name, module, statistics=not name.endswith(_UNSENT))
        tensors = tensors_of(module)
        layout = Layout(names, tuple(tuple(tensors[key].shape) for key in names))
        made = layout.join([tensors[key].detach().clone() for key in names])
        structure = structure_of(module, input_shape) if form.continuous else None
        net = tried(
            name,
            Called.of(module, layout, tokens=not form.continuous),
            layout.split(made),
            form.inputs(3, input_shape, KEY),
            outputs,
        )
    if structure is not None and (structure.layout, structure.dropout) != (layout, net.dropout):
        structure = None  # for example, with running statistics that are constants
    return Model(name, structure or net, input_shape, outputs, start=_Start(fresh, net, made, layout))


def width(name: str, input_shape: tuple[int, ...], form: Form, *, wide: bool = False) -> int:
    """The number of outputs of a user's network; 0 for a factory that asks for it, or a shipped model.

    wide: scores may have places, as [b, classes, height, width]; all are counted.
    """
    source = _source(name) if ":" in name and not name.startswith("torchvision:") else None
    asks = callable(source) and {"classes", "num_classes"} & set(inspect.signature(source).parameters)
    if source is None or (asks and not isinstance(source, nn.Module)):
        return 0
    fresh = _Fresh(name, source, input_shape, 0, form)
    with rng.global_generators(KEY):
        module, x = fresh().eval(), form.inputs(2, input_shape, KEY)
        x = x if form.continuous else x.long()
        _names(name, module, statistics=False)  # explains a wrong type better than the forward
        with Watch(name, module, tuple(x.shape), draws=True), torch.no_grad():
            scores = module(x)
    if not isinstance(scores, Tensor) or (scores.ndim != 2 and not wide):
        return 0
    return scores.numel() // len(scores)


def scores_of(name: str, input_shape: tuple[int, ...], form: Form, places: int) -> int:
    """The number of scores [classes, *places] of a user's network for labels of many places; 0 if there are no places.

    Raises:
        ValueError: the network has no scores for each place.
    """
    count = width(name, input_shape, form, wide=True) if places else 0
    if places and (count == 0 or count % places):
        text = f"expected scores [b, classes, *places] for {places} places of a label, got {count} scores"
        raise refusal(name, f"{text}; a factory is called without the number of classes")
    return count


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
    return replace(model, apply=model.apply.paced(lr))


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
    return Origin(named | {type(bare(source)).__module__}, digest.hexdigest())


def _source(name: str) -> Make | nn.Module:
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
    source: Make | nn.Module = imported("model", name)
    if not isinstance(source, nn.Module) and not callable(source):
        raise UnknownNameError(f"expected a torch.nn.Module or a function that makes one for {name!r}, got {source!r}")
    return source


@dataclass(frozen=True, eq=False)
class _Fresh:
    """Makes the network again: a private copy on the CPU, with materialized lazy layers."""

    name: str
    source: Make | nn.Module
    input_shape: tuple[int, ...]
    outputs: int
    form: Form
    loss: Loss = CROSS_ENTROPY

    def __call__(self) -> nn.Module:
        several = self.loss in (NEXT_TOKEN, PER_PLACE)
        count = 0 if several else self.outputs
        accepted: dict[str, object] = {"classes": count, "num_classes": count}
        accepted |= {"channels": self.input_shape[0], "input_shape": self.input_shape}
        accepted |= {"vocabulary": self.form.vocabulary.size} if isinstance(self.form, Tokens) else {}
        with theirs(self.name, "the factory fails"):
            made = self.source
            if not isinstance(made, nn.Module):
                named = inspect.signature(made).parameters
                made = made(**{key: value for key, value in accepted.items() if key in named})
        if not isinstance(made, nn.Module):
            raise refusal(self.name, f"expected a factory of a torch.nn.Module, got {type(made).__name__}")
        if isinstance(made, torch.jit.ScriptModule):
            raise refusal(self.name, "a scripted network cannot be differentiated per record; return the plain one")
        if any(map(is_lazy, tensors_of(made).values())):
            if made is self.source:
                raise refusal(self.name, "a network with lazy layers has no weights yet; pass its factory")
            self._materialize(made)
        with theirs(self.name, "the network cannot be copied to the CPU"):
            module = unwrap(copy.deepcopy(made).cpu(), 0 if several else self.outputs)
        if self.loss == NEXT_TOKEN and isinstance(self.form, Tokens):
            module.register_forward_hook(partial(next_tokens, self.form.vocabulary.padding))
        elif self.loss == PER_PLACE:
            module.register_forward_hook(lambda module, inputs, scores: scores.flatten(1))
        return module

    def _materialize(self, module: nn.Module) -> None:
        """Give lazy layers their shapes by a forward pass in eval mode."""
        modes = [(layer, layer.training) for layer in module.modules()]
        with Watch(self.name, module, (2, *self.input_shape), draws=True), torch.no_grad():
            x = self.form.inputs(2, self.input_shape, KEY)
            module.eval()(x if self.form.continuous else x.long())
        for layer, mode in modes:
            layer.training = mode
        for key, tensor in tensors_of(module).items():
            if is_lazy(tensor):
                raise refusal(self.name, f"{key!r} is lazy, and a dry run does not reach it")


def _owned(layout: Layout, module: nn.Module) -> list[Tensor]:
    tensors = tensors_of(module)
    for name, shape in zip(layout.names, layout.shapes, strict=True):
        if name not in tensors or tuple(tensors[name].shape) != shape:
            got = tuple(tensors[name].shape) if name in tensors else "none"
            raise ValueError(f"expected a network with a tensor {name!r} of shape {shape}, got {got}")
    return [tensors[name] for name in layout.names]


def _names(name: str, module: nn.Module, *, statistics: bool) -> tuple[str, ...]:
    """The names of the tensors in the flat vector; raises ValueError for unsupported layers."""
    moving = set()
    for path, layer in module.named_modules():
        where = f"layer {path!r} ({type(layer).__name__})"
        if isinstance(layer, _InstanceNorm) and layer.track_running_stats:
            raise refusal(name, f"{where}: running statistics of instances are not supported; do not track them")
        if not isinstance(layer, _BatchNorm) or not layer.training:
            continue
        if not is_norm(layer):
            raise refusal(name, f"{where}: a batch norm with a custom forward; take torch's, or eval mode")
        if layer.running_mean is not None and layer.momentum is None:
            raise refusal(name, f"{where}: a cumulative average (momentum=None) is not supported; give a momentum")
        if layer.running_mean is not None and statistics:
            moving |= {f"{path}.running_mean".lstrip("."), f"{path}.running_var".lstrip(".")}
    owned = {key: tensor for key, tensor in tensors_of(module).items() if tensor.requires_grad or key in moving}
    if not any(tensor.requires_grad for tensor in owned.values()):
        raise refusal(name, "expected a trainable parameter, got none")
    for key, tensor in owned.items():
        _check_weights(name, key, tensor)
    return tuple(owned)


def _check_weights(name: str, key: str, tensor: Tensor) -> None:
    if tensor.dtype != torch.float32:
        raise refusal(name, f"expected float32, got {tensor.dtype} for {key!r}; return network.float()")
    if not bool(tensor.isfinite().all()):
        raise refusal(name, f"expected finite weights, got NaN or infinity in {key!r}")


@dataclass(frozen=True, eq=False)
class _Start:
    """The first parameters of a training.

    Attributes:
        made: the parameters of the network that `build` made.
    """

    fresh: _Fresh
    net: Called
    made: Vector
    layout: Layout

    def __call__(self, key: Key, initialization: Initialization) -> Vector:
        """[d] drawn from the key, or the given weights; `dlg`: uniform in +-0.5, except for running statistics."""
        if initialization == "dlg":
            flat = rng.uniform(key, (self.layout.dim,), -0.5, 0.5)
            parts = zip(self.layout.names, self.layout.split(flat), self.layout.split(self.made), strict=True)
            return self.layout.join([made if name in self.net.statistics else drawn for name, drawn, made in parts])
        if isinstance(self.fresh.source, nn.Module):
            return self.made.clone()
        with rng.global_generators(key):
            module = self.fresh()
        return self.layout.join([tensor.detach() for tensor in _owned(self.layout, module)])


def other_norms(model: Model) -> tuple[Callable[[Vector, Tensor], Tensor], Tensor] | None:
    """A user's network whose batch norms are in the other mode, and which numbers [d] bool of its vector clients train.

    The network maps the vector [d] and inputs [b, *input_shape] to scores. None: there is no batch norm.
    """
    start = model.start
    if not isinstance(start, _Start):
        return None
    module, layout = start.fresh(), start.layout
    norms = [layer for layer in module.modules() if isinstance(layer, _BatchNorm)]
    for layer in norms:
        layer.training = not layer.training
    each = zip(layout.names, layout.shapes, strict=True)
    trained = [torch.full(shape, name not in start.net.statistics) for name, shape in each]
    return (
        (partial(plain_scores, module, layout, start.net.tokens), torch.cat([part.flatten() for part in trained]))
        if norms
        else None
    )


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
    params = start.made
    b = 4 if task.mixes else 2  # a batch norm of two values has only two possible results, so no useful slope
    x = task.form.inputs(2 * b, task.input_shape, KEY).view(2, b, *task.input_shape)
    labels = (torch.arange(2 * b) % max(2, task.classes)).view(2, b)
    if task.numbers and not task.bounded:
        labels = rng.uniform(KEY.child("y"), (2, b, *task.label_shape))
    elif task.numbers and task.classes > 1:
        labels = one_hot(labels, task.classes)
    y = targets_of(task, labels, x.dtype)
    leaf = params.clone().requires_grad_()
    tensors = task.layout.split(leaf)
    with theirs(name, "its gradient fails"):
        used = torch.autograd.grad(task.loss_at(tensors, x[0], y[0]), tensors, allow_unused=True)
    for key, gradient in zip(task.layout.names, used, strict=True):
        if gradient is None:
            raise refusal(name, f"{key!r} takes no part in the scores; set its requires_grad to False")
    with theirs(name, "gradients of many batches at once fail; control flow by data, or an operation in place?"):
        several = x.clone().requires_grad_(task.form.continuous)
        found = gradients(task, params, several, y)
        if task.form.continuous:
            torch.autograd.grad(found.sum(), several)
        losses(task, params, x[0], y[0] if task.numbers else labels[0])
    with theirs(name, "its gradient fails in float64; register constant tensors as buffers"):
        difference = _apart(task, params.double(), x[:1].double(), y[:1].double())
    if difference > _AGREES:
        text = "the derivative of its gradient in the inputs differs from finite differences"
        raise refusal(name, f"{text} (off by {difference:.1g}); is the backward of a custom autograd.Function wrong?")


def _apart(task: ModelTask, params: Vector, x: Tensor, y: Tensor) -> float:
    """The relative difference between the slope of a random combination of the gradient and that of small steps.

    Where inputs are tokens, the loss and its slope in the parameters take the place of the gradient. The result is the
    smallest difference over the directions; the first direction that agrees ends the search.
    """
    mixed = rng.normal(KEY.child("mixed"), params.shape, torch.float64)

    def value(at: Tensor) -> Tensor:
        return gradients(task, params, at, y)[0] @ mixed if task.form.continuous else task.loss(at, x[0], y[0])

    leaf = (x if task.form.continuous else params).clone().requires_grad_()
    (slope,) = torch.autograd.grad(value(leaf), leaf)
    distances = []
    for number, step in enumerate(_STEPS):
        way = rng.normal(KEY.child("way", number), leaf.shape, torch.float64)
        with torch.no_grad():
            ends = [value(leaf.detach() + sign * way) for sign in (step, -step)]
        pair = float((slope * way).sum()), float(ends[0] - ends[1]) / (2 * step)
        distances.append(abs(pair[0] - pair[1]) / max(*map(abs, pair), 1e-12))
        if distances[-1] <= _AGREES:
            break
    return min(distances)
