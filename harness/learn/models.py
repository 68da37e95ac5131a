"""Models, as small named functions of a list of tensors."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, NamedTuple, cast

import torch
from torch import Tensor
from torch.nn.functional import linear

from leakgauge.harness.core.contract import InTraining
from leakgauge.harness.core.errors import UnknownNameError, unknown
from leakgauge.harness.core.rng import Key
from leakgauge.harness.core.vec import Layout, Vector
from leakgauge.harness.learn.layers import (
    Block,
    Chain,
    Conv,
    Dense,
    Dropout,
    Layer,
    MaxPool,
    Mean,
    Network,
    Norm,
    Relu,
    Scale,
    Sigmoid,
    Trained,
    dense_stack,
    stack,
    weights,
)

Apply = Callable[[Sequence[Tensor], Tensor, Sequence[Tensor] | None], Tensor]
Training = Callable[[Sequence[Tensor], Tensor, Sequence[Tensor] | None], InTraining]
Loss = Literal["cross-entropy", "hinge", "squared"]
Initialization = Literal["default", "dlg", "zero"]

_STAGES = (16, 32, 64)
"""Channels of the three stages of a ResNet."""

_UNSCALED = Scale(torch.zeros(()), torch.ones(()))

_GROUPS = 2
"""Groups of a norm; best for ResNet-20 on label-skewed clients (Hsieh et al. 2020; issue 1 of their repository)."""


@dataclass(frozen=True)
class Model:
    """An architecture for one input shape and number of classes.

    Attributes:
        layout: the tensors, in the order in which `apply` takes them.
        fan_in: one per tensor; the default initialization is uniform in +-1/sqrt(fan_in). 0: ones (a norm's scale);
            -1: zeros.
        apply: (tensors, x [b, *input_shape], keep) -> [b, classes] scores. `keep` holds one dropout mask per entry of
            `dropout`, already scaled by 1/(1-rate); None: dropout off. If it is a `Chain`, gradients by hand are
            derived from its layers.
        loss: the loss of this architecture.
        widths: (inputs, hidden..., classes) of a dense ReLU stack with biases in the order W0, b0, W1, b1, ...
            (W [out, in]), else None; batched products are derived from it.
        dropout: (shape without the batch axis, rate) of each dropout.
        l2: the loss includes the penalty l2/2 ||parameters||^2.
        training: like `apply`, the scores while a client trains, if they differ: records of a batch then change each
            other's scores. None: they do not differ.
        start: draws the first parameters from a key; None: they are drawn by `fan_in`.
        smooth: the scores are known to be a smooth function of the inputs; a `Chain` determines it by itself.
        scale: the scale that `apply` undoes, see `scaled`.
    """

    name: str
    layout: Layout
    fan_in: tuple[int, ...]
    input_shape: tuple[int, ...]
    classes: int
    apply: Apply
    loss: Loss = "cross-entropy"
    widths: tuple[int, ...] | None = None
    dropout: tuple[tuple[tuple[int, ...], float], ...] = ()
    l2: float = 0.0
    training: Training | None = None
    start: Callable[[Key, Initialization], Vector] | None = None
    smooth: bool = False
    scale: Scale = _UNSCALED


class _Architecture(NamedTuple):
    """build: (input_shape, classes) -> the model."""

    build: Callable[[tuple[int, ...], int], Model]
    summary: str


def build(name: str, input_shape: tuple[int, ...], classes: int) -> Model:
    """The architecture `name` for inputs of one shape.

    Args:
        name: one of `names()`; with a colon, as in `modules.build`.
        input_shape: without the batch axis; (channels, height, width) for convolutions.
        classes: number of label classes; 0: the label is a number. Then every architecture but `svm` has one output
            and squared loss. `linear-regression` always has one output and squared loss.

    Raises:
        UnknownNameError: no such architecture; the error suggests the nearest name and lists the known names.
        ValueError: the architecture does not accept this input shape or this number of classes.
    """
    from leakgauge.harness.learn import modules

    own = ":" in name
    if not own and name not in _ARCHITECTURES:
        if modules.torchvision_has(name):
            raise UnknownNameError(f"no model {name!r}; did you mean 'torchvision:{name}'?")
        raise unknown("model", name, sorted(_ARCHITECTURES))
    if not input_shape or min(input_shape) < 1:
        raise ValueError(f"model {name!r} expects a shape of positive lengths, got input_shape={input_shape}")
    regression = classes == 0 and name != "svm"
    least = 1 if name == "linear-regression" else 2
    if classes < least and not regression:
        label = "; the label of this task is a number" if classes == 0 else ""
        raise ValueError(f"model {name!r} expects classes >= {least}, got classes={classes}{label}")
    if own:
        return modules.build(name, input_shape, classes, "cross-entropy" if classes else "squared")
    model = _ARCHITECTURES[name].build(input_shape, max(classes, 1))
    return replace(model, loss="squared") if regression else model


def scaled(model: Model, low: Tensor | None, span: Tensor | None) -> Model:
    """The model for inputs that are stored as (x - low) / span, or the model itself if low or span is None.

    Args:
        low, span: broadcast over one input, see `DataSet`.
    """
    if low is None or span is None:
        return model
    scale, inner, apply = Scale(low, span), model.scale, cast(Any, model.apply)
    known = isinstance(apply, (Chain, Network))
    apply = replace(apply, layers=(scale, *apply.layers)) if known else partial(_of_stored, scale, apply)
    training = None if model.training is None else partial(_of_stored, scale, model.training)
    both = Scale(low * inner.span + inner.low, span * inner.span)
    name = f"{model.name} with scaled inputs"
    return replace(model, name=name, apply=apply, widths=None, training=training, scale=both)


def _of_stored(scale: Scale, call: Any, tensors: Sequence[Tensor], x: Tensor, keep: Sequence[Tensor] | None) -> Any:
    """What `call` returns for stored inputs x."""
    return call(tensors, scale.apply(x), keep)


def names() -> tuple[tuple[str, str], ...]:
    """(name, one-line summary) of every architecture."""
    return tuple((name, architecture.summary) for name, architecture in _ARCHITECTURES.items())


def _image(name: str, input_shape: tuple[int, ...], least: int) -> tuple[int, int, int]:
    """(channels, height, width); raises ValueError if the input is not an image or too small."""
    if len(input_shape) != 3 or min(input_shape[1:]) < least:
        raise ValueError(
            f"model {name!r} expects (channels, height, width) of at least {least} x {least} pixels, "
            f"got input_shape={input_shape}"
        )
    return input_shape


def _chain(
    name: str, input_shape: tuple[int, ...], classes: int, *layers: Layer, widths: tuple[int, ...] | None = None
) -> Model:
    """A model from its layers."""
    chain = Chain(layers)
    return Model(name, *chain.tensors, input_shape, classes, chain, widths=widths, dropout=chain.dropout)


def _dense(name: str, hidden: tuple[int, ...], input_shape: tuple[int, ...], classes: int) -> Model:
    """Dense layers with biases and ReLU between them."""
    widths = (math.prod(input_shape), *hidden, classes)
    return _chain(name, input_shape, classes, *dense_stack(widths), widths=widths)


def _cnn2(input_shape: tuple[int, ...], classes: int) -> Model:
    """The CNN of JoPEQ and CEPAM on MNIST: two convolutions, each with ReLU and max-pooling, then two dense layers."""
    channels, *sides = _image("cnn2", input_shape, 16)
    flat = 6 * math.prod(((side - 4) // 2 - 4) // 2 for side in sides)
    head = dense_stack((flat, 50, classes))
    conv1, conv2 = Conv("conv1", channels, 6, 5), Conv("conv2", 6, 6, 5)
    return _chain("cnn2", input_shape, classes, conv1, Relu(), MaxPool(), conv2, Relu(), MaxPool(), *head)


def _cnn3(input_shape: tuple[int, ...], classes: int) -> Model:
    """The CNN of JoPEQ on CIFAR-10: three convolutions with ReLU, max-pooling and dropout, then four dense layers."""
    channels, *sides = _image("cnn3", input_shape, 22)
    layers: list[Layer] = []
    for number, (inputs, outputs) in enumerate(((channels, 32), (32, 64), (64, 128)), start=1):
        sides = [(side - 2) // 2 for side in sides]
        layers += [Conv(f"conv{number}", inputs, outputs, 3), Relu(), MaxPool(), Dropout((outputs, *sides), 0.2)]
    # without padding, 128 * 2 * 2 entries remain of 32 x 32 pixels
    layers += dense_stack((128 * math.prod(sides), 128, 64, 32, classes))
    return _chain("cnn3", input_shape, classes, *layers)


def _lenet_dlg(input_shape: tuple[int, ...], classes: int) -> Model:
    """The LeNet of Zhu et al. 2019: three convolutions, a dense layer; sigmoids, as the attack differentiates twice."""
    channels, *sides = _image("lenet-dlg", input_shape, 1)
    layers: list[Layer] = []
    for number, (inputs, stride) in enumerate(((channels, 2), (12, 2), (12, 1)), start=1):
        layers += [Conv(f"conv{number}", inputs, 12, 5, stride=stride, padding=2), Sigmoid()]
    flat = 12 * math.prod(-(-side // 4) for side in sides)
    return _chain("lenet-dlg", input_shape, classes, *layers, *dense_stack((flat, classes)))


def _lenet5(input_shape: tuple[int, ...], classes: int) -> Model:
    """LeNet-5 as in LeCun et al. 1998, with 28 x 28 digits padded to 32 x 32, but with ReLU and max-pooling.

    It has 61,706 parameters on MNIST. sqSGD reports 119,850 for its LeNet-5, without the architecture.
    """
    channels, *sides = _image("lenet5", input_shape, 12)
    flat = 16 * math.prod((side // 2 - 4) // 2 for side in sides)
    head = dense_stack((flat, 120, 84, classes))
    conv1, conv2 = Conv("conv1", channels, 6, 5, padding=2), Conv("conv2", 6, 16, 5)
    return _chain("lenet5", input_shape, classes, conv1, Relu(), MaxPool(), conv2, Relu(), MaxPool(), *head)


def _cnn_udp(input_shape: tuple[int, ...], classes: int) -> Model:
    """The CNN of UDP on CIFAR-10: one convolution with ReLU, then a dense layer."""
    channels, *sides = _image("cnn-udp", input_shape, 1)
    width = 16  # not given in the paper; with 16, the model is as large as the paper's MLP, within 3 %
    flat = width * math.prod(side + 4 for side in sides)
    first = Conv("conv1", channels, width, 5, padding=4)
    return _chain("cnn-udp", input_shape, classes, first, Relu(), *dense_stack((flat, classes)))


def _resnet(blocks: int, input_shape: tuple[int, ...], classes: int, *, running: bool = False) -> Model:
    """A ResNet of 6 `blocks` + 2 layers: a stem, three stages of residual blocks and a dense head.

    ResNet-110 has 1,727,674 parameters on FMNIST; sqSGD reports 1,722,224 for its own (0.3 % fewer).

    Args:
        running: use batch norm, whose running means and variances are tensors of the layout. A client's gradient in
            them is their difference from the statistics of its batch, so a step moves them toward the batch by the
            learning rate, and a message contains them like every other tensor. Otherwise use group norm.

    Source: He et al. 2016, section 4.2; shortcuts of their option A, without parameters. Differs: group norm, unless
        `running`, because batch norm mixes the examples of a batch, and its statistics leak. Batch norm is that of
        Ioffe and Szegedy 2015; torch moves its statistics by a tenth and uses the unbiased variance.
    """
    name = f"resnet{6 * blocks + 2}{'-bn' if running else ''}"
    inputs, _, _ = _image(name, input_shape, 1)
    groups = 0 if running else _GROUPS
    layers: list[Layer | Block] = [Conv("stem", inputs, _STAGES[0], 3, padding=1, bias=False)]
    layers += [Norm("stem_norm", _STAGES[0], groups), Relu()]
    inputs = _STAGES[0]
    for stage, outputs in enumerate(_STAGES, start=1):
        for number in range(1, blocks + 1):
            layers += [_block(f"stage{stage}.block{number}", inputs, outputs, groups), Relu()]
            inputs = outputs
    network = Network((*layers, Mean(), Dense("fc", inputs, classes)))
    return Model(name, *network.tensors, input_shape, classes, network, training=Trained(network) if running else None)


def _block(name: str, inputs: int, outputs: int, groups: int) -> Block:
    """Two convolutions with their norms; if the block widens, it halves height and width."""
    new, halves = outputs - inputs, list[Layer]()
    for half, before, stride in ((1, inputs, 2 if new else 1), (2, outputs, 1)):
        halves += [Conv(f"{name}.conv{half}", before, outputs, 3, stride, 1, bias=False)]
        halves += [Norm(f"{name}.norm{half}", outputs, groups), Relu()]
    return Block(tuple(halves[:-1]), new)


def _apply_scores(tensors: Sequence[Tensor], x: Tensor, keep: Sequence[Tensor] | None) -> Tensor:
    """W x, without a bias."""
    return linear(x.flatten(1), tensors[0])


def _apply_margin(tensors: Sequence[Tensor], x: Tensor, keep: Sequence[Tensor] | None) -> Tensor:
    """The scores (-w.x / 2, w.x / 2), of which the second exceeds the first by w.x."""
    half = linear(x.flatten(1), tensors[0]) / 2
    return torch.cat([-half, half], 1)


def _svm(input_shape: tuple[int, ...], classes: int) -> Model:
    """A linear support vector machine without bias: one weight vector for two classes, else one per class.

    For two classes, 0 as y = -1 and 1 as y = 1, the hinge loss is max(0, 1 - y w.x): UDP (32) with its sign corrected.
    """
    tensors = stack(weights("fc", 1 if classes == 2 else classes, math.prod(input_shape), bias=False))
    apply = _apply_margin if classes == 2 else _apply_scores
    # l2 is kappa, whose value UDP does not give
    return Model("svm", *tensors, input_shape, classes, apply, loss="hinge", l2=0.01)


def _linear_regression(input_shape: tuple[int, ...], classes: int) -> Model:
    """w.x as the estimate of a number; the loss is (w.x - y)^2 + lambda/2 ||w||^2 with the lambda of the OTA paper."""
    tensors = stack(weights("fc", 1, math.prod(input_shape), bias=False))
    return Model("linear-regression", *tensors, input_shape, 1, _apply_scores, loss="squared", l2=1e-3)


_ARCHITECTURES = {
    "linear": _Architecture(partial(_dense, "linear", ()), "softmax regression: one dense layer"),
    "mlp-small": _Architecture(partial(_dense, "mlp-small", (32, 16)), "dense 32-16, the MLP of JoPEQ and CEPAM"),
    "mlp": _Architecture(partial(_dense, "mlp", (256,)), "dense 256, the MLP of UDP"),
    "cnn2": _Architecture(_cnn2, "two 5x5 convolutions of 6 channels, the CNN of JoPEQ and CEPAM for MNIST"),
    "cnn3": _Architecture(_cnn3, "three 3x3 convolutions with dropout 0.2, the CNN of JoPEQ for CIFAR-10"),
    "lenet-dlg": _Architecture(_lenet_dlg, "three 5x5 convolutions of 12 channels with sigmoid, the LeNet of DLG"),
    "lenet5": _Architecture(_lenet5, "LeNet-5 with ReLU and max-pooling, padded input (61,706 parameters on MNIST)"),
    "cnn-udp": _Architecture(_cnn_udp, "one padded 5x5 convolution, the CNN of UDP; 16 channels are our choice"),
    "resnet20": _Architecture(partial(_resnet, 3), "ResNet-20 with group norm and shortcuts without parameters"),
    "resnet20-bn": _Architecture(partial(_resnet, 3, running=True), "ResNet-20 with batch norm, statistics sent too"),
    "resnet110": _Architecture(partial(_resnet, 18), "ResNet-110 with group norm and shortcuts without parameters"),
    "svm": _Architecture(_svm, "linear support vector machine: hinge loss, kappa = 0.01, no bias"),
    "linear-regression": _Architecture(_linear_regression, "squared loss with lambda = 0.001, no bias"),
}

FORMS = (
    (
        "module:FACTORY",
        "your own torch.nn.Module: its class, a function that makes it, or an instance; needs --allow-code",
    ),
    ("torchvision:NAME", "a classifier of torchvision without weights, as in torchvision:resnet18"),
    ("given:NAME", "a torch.nn.Module that this Python process has registered by harness.learn.modules.given"),
)
"""(form, one-line summary) of the names of networks that are not shipped."""
