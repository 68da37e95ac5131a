"""Models: a network with its loss; the shipped ones are `torch.nn.Module`s like those of users."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import group_norm, pad, relu

from leakgauge.harness.core import rng
from leakgauge.harness.core.errors import UnknownNameError, unknown
from leakgauge.harness.core.form import Form, form_of
from leakgauge.harness.core.rng import Key
from leakgauge.harness.core.vec import Layout, Vector
from leakgauge.harness.learn.called import Called
from leakgauge.harness.learn.layers import Scale, Tanh
from leakgauge.harness.learn.losses import BINARY, CROSS_ENTROPY, HINGE, NEXT_TOKEN, PER_PLACE, SQUARED, Loss, parse
from leakgauge.harness.learn.reading import follow, margin, structure_of
from leakgauge.harness.learn.structure import Structure

Initialization = Literal["default", "dlg", "zero"]

_STAGES = (16, 32, 64)  # channels of the three stages of a ResNet


Apply = Structure | Called
"""A network as a function of its tensors."""


@dataclass(frozen=True)
class Model:
    """An architecture for one input shape and number of classes.

    Attributes:
        apply: the network.
        loss: what clients minimize.
        numbers: whether the label is a number for each score, not a class.
        places: the number of places of a label that is a class for each; 0: it is not.
        l2: the loss includes the penalty l2/2 ||parameters||^2.
        start: draws the first parameters from a key; None: they are drawn by `Structure.fan_in`.
    """

    name: str
    apply: Apply
    input_shape: tuple[int, ...]
    classes: int
    loss: Loss = CROSS_ENTROPY
    numbers: bool = False
    l2: float = 0.0
    start: Callable[[Key, Initialization], Vector] | None = None
    places: int = 0

    @property
    def structure(self) -> Structure | None:
        """The layers, from which gradients by hand are derived; None: they are not known, or a gradient is pruned."""
        return self.apply if isinstance(self.apply, Structure) and not self.apply.prune else None

    @property
    def layout(self) -> Layout:
        """Names and shapes of the tensors in the flat vector."""
        return self.apply.layout

    @property
    def scale(self) -> Scale:
        """The scale that `apply` undoes, see `scaled`."""
        return self.apply.scale

    @functools.cached_property
    def widths(self) -> tuple[int, ...] | None:
        """(inputs, hidden..., classes) of a dense stack with ReLU or tanh, from which batched products are derived.

        Its layers take the tensors W0 [out, in], b0, W1, b1, ...; it has neither dropouts nor a scale; else None.
        """
        known = self.structure
        fits = known is not None and not known.dropout and known.unscaled == known.layers
        return known.widths or known.dense_stack(Tanh()) if known is not None and fits else None


class _Architecture(NamedTuple):
    """build: (input_shape, classes) -> the module; loss, l2: as in `Model`."""

    build: Callable[[tuple[int, ...], int], nn.Module]
    summary: str
    loss: Loss = CROSS_ENTROPY
    l2: float = 0.0


def build(
    name: str, input_shape: tuple[int, ...], classes: int, loss: str = "", numbers: int = 1, form: Form | None = None
) -> Model:
    """The architecture `name` for inputs of one shape.

    Args:
        name: one of `names()`; with a colon, as in `modules.build`.
        input_shape: without the batch axis; (channels, height, width) for convolutions.
        classes: number of label classes; 0: the label is so many `numbers`. Then every architecture but `svm` has one
            output for each and squared loss. `linear-regression` always has one output and squared loss.
        loss: as in `losses.parse`; empty: that of the architecture. A network with one output and two classes has the
            binary cross-entropy, and one whose inputs are tokens without labels predicts the next token.
        form: of the inputs; None: the usual one of their shape.

    Raises:
        UnknownNameError: no such architecture or loss; the error suggests the nearest name and lists the known names.
        ValueError: the architecture does not accept this input shape, this number of classes or this loss.
    """
    from leakgauge.harness.learn import modules

    form = form or form_of(input_shape)
    if name in _TOKENS and form.continuous:
        raise ValueError(f"model {name!r} takes token ids, got inputs of the form {form.name}")
    short, name = name, f"leakgauge.harness.learn.language:{_TOKENS[name][0]}" if name in _TOKENS else name
    own = ":" in name
    if not own and name not in _ARCHITECTURES:
        if modules.torchvision_has(name):
            raise UnknownNameError(f"no model {name!r}; did you mean 'torchvision:{name}'?")
        raise unknown("model", name, sorted([*_ARCHITECTURES, *_TOKENS]))
    if not input_shape or min(input_shape) < 1:
        raise ValueError(f"model {name!r} expects a shape of positive lengths, got input_shape={input_shape}")
    regression = classes == 0 and name != "svm"
    least = 1 if name == "linear-regression" else 2
    if classes < least and not regression:
        label = "; the label of this task is a number" if classes == 0 else ""
        raise ValueError(f"model {name!r} expects classes >= {least}, got classes={classes}{label}")
    if not own and not form.continuous:
        raise ValueError(f"model {name!r} takes numbers; for tokens take {', '.join(_TOKENS)}, or your own module")
    single = own and classes == 2 and modules.width(name, input_shape, form) == 1
    outputs = 1 if name == "linear-regression" or single else classes or numbers
    usual = BINARY if single else SQUARED if regression else CROSS_ENTROPY
    usual = usual if own or regression else _ARCHITECTURES[name].loss
    takes = (classes == 0 or outputs == 1) and name != "svm"
    chosen = _loss(loss, usual, outputs, takes)
    if chosen == NEXT_TOKEN and (form.continuous or classes):
        raise ValueError("loss 'next-token' needs token ids without labels")
    if own:
        places = numbers if chosen == PER_PLACE else 0
        outputs = 2 if chosen == NEXT_TOKEN else modules.scores_of(name, input_shape, form, places) or outputs
        built = modules.build(name, input_shape, outputs, form, chosen)
        return replace(built, name=short, loss=chosen, numbers=takes, places=places)
    if chosen == PER_PLACE:
        raise ValueError(f"model {name!r} has no scores for each place of a label: take your own module")
    apply, l2 = _read(name, input_shape, outputs), _ARCHITECTURES[name].l2
    return Model(name, apply, input_shape, outputs, chosen, takes, l2)


def _loss(text: str, usual: Loss, outputs: int, takes: bool) -> Loss:
    """The loss of a text, or the usual one; `takes`: whether the labels are numbers."""
    chosen = parse(text) if text else usual
    if takes and chosen.name in ("cross-entropy", "hinge"):
        raise ValueError(f"loss {chosen.name!r} needs classes, and a score for each: take squared")
    if chosen.weights and len(chosen.weights) != outputs:
        raise ValueError(f"expected {outputs} weights of a loss, one for each class, got {len(chosen.weights)}")
    return chosen


@functools.lru_cache(64)
def _read(name: str, input_shape: tuple[int, ...], outputs: int) -> Structure:
    """The structure of a shipped architecture, read like that of a user's network."""
    with rng.global_generators(Key(0, (name,))):
        structure = structure_of(_ARCHITECTURES[name].build(input_shape, outputs), input_shape)
    assert structure is not None
    return structure


def scaled(model: Model, low: Tensor | None, span: Tensor | None) -> Model:
    """The model for inputs that are stored as (x - low) / span, or the model itself if low or span is None.

    Args:
        low, span: broadcast over one input, see `DataSet`.
    """
    if low is None or span is None:
        return model
    return replace(model, name=f"{model.name} with scaled inputs", apply=model.apply.scaled(low, span))


def names() -> tuple[tuple[str, str], ...]:
    """(name, one-line summary) of every architecture."""
    return tuple((name, architecture.summary) for name, architecture in _ARCHITECTURES.items())


def names_for_tokens() -> tuple[tuple[str, str], ...]:
    """(name, one-line summary) of every architecture that takes token ids."""
    return tuple((name, summary) for name, (_, summary) in _TOKENS.items())


def _image(name: str, input_shape: tuple[int, ...], least: int) -> tuple[int, int, int]:
    """(channels, height, width); raises ValueError if the input is not an image or too small."""
    if len(input_shape) != 3 or min(input_shape[1:]) < least:
        raise ValueError(
            f"model {name!r} expects (channels, height, width) of at least {least} x {least} pixels, "
            f"got input_shape={input_shape}"
        )
    return input_shape


def _named(*layers: nn.Module | tuple[str, nn.Module]) -> nn.Sequential:
    """The layers in sequence; those without a name are numbered."""
    stack = nn.Sequential()
    for number, layer in enumerate(layers):
        stack.add_module(*(layer if isinstance(layer, tuple) else (str(number), layer)))
    return stack


_Bend = type[nn.ReLU] | type[nn.Tanh]


def _dense_layers(widths: Sequence[int], between: _Bend = nn.ReLU) -> list[nn.Module | tuple[str, nn.Module]]:
    """Flattening, then dense layers with bends between them: `fc1` from widths[0] to widths[1], and so on."""
    layers: list[nn.Module | tuple[str, nn.Module]] = [nn.Flatten()]
    for number, pair in enumerate(pairwise(widths), start=1):
        layers += [(f"fc{number}", nn.Linear(*pair)), between()]
    return layers[:-1]


def _dense(
    hidden: tuple[int, ...], input_shape: tuple[int, ...], classes: int, *, between: _Bend = nn.ReLU
) -> nn.Module:
    return _named(*_dense_layers((math.prod(input_shape), *hidden, classes), between))


def _cnn2(input_shape: tuple[int, ...], classes: int) -> nn.Module:
    """The CNN of JoPEQ and CEPAM on MNIST: two convolutions, each with ReLU and max-pooling, then two dense layers."""
    channels, *sides = _image("cnn2", input_shape, 16)
    flat = 6 * math.prod(((side - 4) // 2 - 4) // 2 for side in sides)
    conv1, conv2 = ("conv1", nn.Conv2d(channels, 6, 5)), ("conv2", nn.Conv2d(6, 6, 5))
    body = conv1, nn.ReLU(), nn.MaxPool2d(2), conv2, nn.ReLU(), nn.MaxPool2d(2)
    return _named(*body, *_dense_layers((flat, 50, classes)))


def _cnn3(input_shape: tuple[int, ...], classes: int) -> nn.Module:
    """The CNN of JoPEQ on CIFAR-10: three convolutions with ReLU, max-pooling and dropout, then four dense layers."""
    channels, *sides = _image("cnn3", input_shape, 22)
    layers: list[nn.Module | tuple[str, nn.Module]] = []
    for number, (inputs, outputs) in enumerate(((channels, 32), (32, 64), (64, 128)), start=1):
        sides = [(side - 2) // 2 for side in sides]
        layers += [(f"conv{number}", nn.Conv2d(inputs, outputs, 3)), nn.ReLU(), nn.MaxPool2d(2), nn.Dropout(0.2)]
    # without padding, 128 * 2 * 2 entries remain of 32 x 32 pixels
    return _named(*layers, *_dense_layers((128 * math.prod(sides), 128, 64, 32, classes)))


def _lenet_dlg(input_shape: tuple[int, ...], classes: int) -> nn.Module:
    """The LeNet of Zhu et al. 2019: three convolutions, a dense layer; sigmoids, as the attack differentiates twice."""
    channels, *sides = _image("lenet-dlg", input_shape, 1)
    layers: list[nn.Module | tuple[str, nn.Module]] = []
    for number, (inputs, stride) in enumerate(((channels, 2), (12, 2), (12, 1)), start=1):
        layers += [(f"conv{number}", nn.Conv2d(inputs, 12, 5, stride, 2)), nn.Sigmoid()]
    return _named(*layers, *_dense_layers((12 * math.prod(-(-side // 4) for side in sides), classes)))


def _lenet5(input_shape: tuple[int, ...], classes: int) -> nn.Module:
    """LeNet-5 as in LeCun et al. 1998, with 28 x 28 digits padded to 32 x 32, but with ReLU and max-pooling.

    It has 61,706 parameters on MNIST. sqSGD reports 119,850 for its LeNet-5, without the architecture.
    """
    channels, *sides = _image("lenet5", input_shape, 12)
    flat = 16 * math.prod((side // 2 - 4) // 2 for side in sides)
    conv1, conv2 = ("conv1", nn.Conv2d(channels, 6, 5, padding=2)), ("conv2", nn.Conv2d(6, 16, 5))
    body = conv1, nn.ReLU(), nn.MaxPool2d(2), conv2, nn.ReLU(), nn.MaxPool2d(2)
    return _named(*body, *_dense_layers((flat, 120, 84, classes)))


def _cnn_udp(input_shape: tuple[int, ...], classes: int) -> nn.Module:
    """The CNN of UDP on CIFAR-10: one convolution with ReLU, then a dense layer."""
    channels, *sides = _image("cnn-udp", input_shape, 1)
    width = 16  # not given in the paper; with 16, the model is as large as the paper's MLP, within 3 %
    flat = width * math.prod(side + 4 for side in sides)
    return _named(("conv1", nn.Conv2d(channels, width, 5, padding=4)), nn.ReLU(), *_dense_layers((flat, classes)))


class _Norm(nn.Module):
    """A group norm, or with no groups a batch norm as in Ioffe and Szegedy 2015, whose statistics clients send.

    A client's gradient in these statistics is their difference from the statistics of its batch, so a step moves them
    toward the batch by the learning rate, and a message contains them like every other tensor. Differs from torch,
    which moves them by a tenth and uses the unbiased variance.
    """

    def __init__(self, channels: int, groups: int) -> None:
        super().__init__()
        self.groups = groups
        self.scale, self.bias = nn.Parameter(torch.ones(channels)), nn.Parameter(torch.zeros(channels))
        if not groups:
            self.register_buffer("running_mean", torch.zeros(channels))
            self.register_buffer("running_var", torch.ones(channels))

    def forward(self, h: Tensor) -> Tensor:
        if self.groups:
            return group_norm(h, self.groups, self.scale, self.bias)
        own = self.scale, self.bias, self.get_buffer("running_mean"), self.get_buffer("running_var")
        return follow(h, *own, training=self.training)


class _Residual(nn.Module):
    """Two convolutions with their norms, and a shortcut without parameters; if it widens, it halves height and width.

    The shortcut then takes every second row and column, and its new channels are zero (option A of He et al. 2016).
    """

    def __init__(self, inputs: int, outputs: int, groups: int) -> None:
        super().__init__()
        self.new = outputs - inputs
        self.conv1, self.norm1 = _conv3(inputs, outputs, 2 if self.new else 1), _Norm(outputs, groups)
        self.conv2, self.norm2 = _conv3(outputs, outputs), _Norm(outputs, groups)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm2(self.conv2(relu(self.norm1(self.conv1(x)))))
        return relu(h + (pad(x[:, :, ::2, ::2], (0, 0, 0, 0, 0, self.new)) if self.new else x))


def _conv3(inputs: int, outputs: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)


def _resnet(blocks: int, groups: int, input_shape: tuple[int, ...], classes: int) -> nn.Module:
    """A ResNet of 6 `blocks` + 2 layers: a stem, three stages of residual blocks and a dense head.

    ResNet-110 has 1,727,674 parameters on FMNIST; sqSGD reports 1,722,224 for its own (0.3 % fewer).

    Source: He et al. 2016, section 4.2. Differs: if `groups`, group norm, because batch norm mixes the examples of a
        batch, and its statistics leak.
    """
    inputs, _, _ = _image(f"resnet{6 * blocks + 2}{'' if groups else '-bn'}", input_shape, 1)
    layers: list[nn.Module | tuple[str, nn.Module]] = [("stem", _conv3(inputs, _STAGES[0]))]
    layers += [("stem_norm", _Norm(_STAGES[0], groups)), nn.ReLU()]
    for stage, (before, outputs) in enumerate(zip((_STAGES[0], *_STAGES), _STAGES, strict=False), start=1):
        each = [(f"block{k + 1}", _Residual(outputs if k else before, outputs, groups)) for k in range(blocks)]
        layers.append((f"stage{stage}", _named(*each)))
    return _named(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), ("fc", nn.Linear(_STAGES[-1], classes)))


class _Margin(nn.Module):
    def forward(self, h: Tensor) -> Tensor:
        return margin(h)


def _without_bias(input_shape: tuple[int, ...], outputs: int) -> nn.Sequential:
    return _named(nn.Flatten(), ("fc", nn.Linear(math.prod(input_shape), outputs, bias=False)))


def _svm(input_shape: tuple[int, ...], classes: int) -> nn.Module:
    """A linear support vector machine without bias: one weight vector for two classes, else one per class.

    For two classes, 0 as y = -1 and 1 as y = 1, the hinge loss is max(0, 1 - y w.x): UDP (32) with its sign corrected.
    """
    return _without_bias(input_shape, classes) if classes > 2 else _without_bias(input_shape, 1).append(_Margin())


_ARCHITECTURES = {
    "linear": _Architecture(partial(_dense, ()), "softmax regression: one dense layer"),
    "mlp-small": _Architecture(partial(_dense, (32, 16)), "dense 32-16, the MLP of JoPEQ and CEPAM"),
    "mlp-32": _Architecture(partial(_dense, (32,)), "dense 32"),
    # bounded activations lose less under clipped gradients with noise (Papernot et al. 2021)
    "mlp-32-tanh": _Architecture(partial(_dense, (32,), between=nn.Tanh), "dense 32 with tanh, for noisy training"),
    "mlp": _Architecture(partial(_dense, (256,)), "dense 256, the MLP of UDP"),
    "cnn2": _Architecture(_cnn2, "two 5x5 convolutions of 6 channels, the CNN of JoPEQ and CEPAM for MNIST"),
    "cnn3": _Architecture(_cnn3, "three 3x3 convolutions with dropout 0.2, the CNN of JoPEQ for CIFAR-10"),
    "lenet-dlg": _Architecture(_lenet_dlg, "three 5x5 convolutions of 12 channels with sigmoid, the LeNet of DLG"),
    "lenet5": _Architecture(_lenet5, "LeNet-5 with ReLU and max-pooling, padded input (61,706 parameters on MNIST)"),
    "cnn-udp": _Architecture(_cnn_udp, "one padded 5x5 convolution, the CNN of UDP; 16 channels are our choice"),
    # two groups are best for ResNet-20 on label-skewed clients (Hsieh et al. 2020; issue 1 of their repository)
    "resnet20": _Architecture(partial(_resnet, 3, 2), "ResNet-20 with group norm and shortcuts without parameters"),
    "resnet20-bn": _Architecture(partial(_resnet, 3, 0), "ResNet-20 with batch norm, statistics sent too"),
    "resnet110": _Architecture(partial(_resnet, 18, 2), "ResNet-110 with group norm and shortcuts without parameters"),
    # l2 is kappa, whose value UDP does not give
    "svm": _Architecture(_svm, "linear support vector machine: hinge loss, kappa = 0.01, no bias", HINGE, 0.01),
    # the estimate of a number is w.x; the loss is (w.x - y)^2 + lambda/2 ||w||^2 with the lambda of the OTA paper
    "linear-regression": _Architecture(_without_bias, "squared loss with lambda = 0.001, no bias", SQUARED, 1e-3),
}

_TOKENS = {
    "text-decoder": ("Decoder", "three causal blocks of attention, width 64; classes, or the next token"),
    "text-encoder": ("Encoder", "three blocks of attention that look both ways, width 64"),
    "text-lstm": ("Lstm", "embedding, LSTM of width 64, dense layer; classes, or the next token"),
    "text-gru": ("Gru", "embedding, GRU of width 64, dense layer; classes, or the next token"),
}
"""The networks of `learn.language`, each with a one-line summary; they are read like a user's."""

FORMS = (
    (
        "module:FACTORY",
        "your own torch.nn.Module: its class, a function that makes it, or an instance; needs --allow-code",
    ),
    ("torchvision:NAME", "a classifier of torchvision without weights, as in torchvision:resnet18"),
    ("given:NAME", "a torch.nn.Module that this Python process has registered by harness.learn.modules.given"),
)
"""(form, one-line summary) of the names of networks that are not shipped."""
