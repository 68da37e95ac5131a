"""Models as small named functions of a list of tensors."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import linear

from leakgauge.harness.core.errors import unknown
from leakgauge.harness.core.vec import Layout
from leakgauge.harness.learn.layers import (
    Chain,
    Conv,
    Dropout,
    Layer,
    MaxPool,
    Relu,
    Sigmoid,
    dense,
    dense_stack,
    stack,
)
from leakgauge.harness.learn.resnet import apply_resnet, resnet_tensors

Apply = Callable[[Sequence[Tensor], Tensor, Sequence[Tensor] | None], Tensor]


@dataclass(frozen=True)
class Model:
    """An architecture for one input shape and number of classes.

    Attributes:
        layout: tensors, in the order in which `apply` takes them.
        fan_in: of each tensor; the usual initialization is uniform in +-1/sqrt(fan_in). 0: ones (a norm's scale);
            -1: zeros.
        apply: (tensors, x [b, *input_shape], keep) -> [b, classes] scores. `keep` holds one dropout mask per entry of
            `dropout`, already scaled by 1/(1-rate), or is None: dropout off. Where it is a `Chain`, its layers are
            known; gradients by hand are derived from them.
        loss: the loss that goes with it.
        widths: (inputs, hidden..., classes) of a dense ReLU stack with biases in the order W0, b0, W1, b1, ...
            (W [out, in]), else None; batched products are derived from it.
        dropout: (shape without the batch axis, rate) of each dropout.
        l2: the loss has the additional term l2/2 ||parameters||^2.
    """

    name: str
    layout: Layout
    fan_in: tuple[int, ...]
    input_shape: tuple[int, ...]
    classes: int
    apply: Apply
    loss: Literal["cross-entropy", "hinge", "squared"] = "cross-entropy"
    widths: tuple[int, ...] | None = None
    dropout: tuple[tuple[tuple[int, ...], float], ...] = ()
    l2: float = 0.0


class _Architecture(NamedTuple):
    """build: (input_shape, classes) -> the model."""

    build: Callable[[tuple[int, ...], int], Model]
    summary: str


def build(name: str, input_shape: tuple[int, ...], classes: int) -> Model:
    """The architecture `name` for inputs of one shape.

    Args:
        input_shape: of one input, without the batch axis; (channels, height, width) for convolutions.
        classes: number of label classes. `linear-regression` has one output whatever it is.

    Raises:
        UnknownNameError: no such architecture; the message lists the known ones and the nearest.
        ValueError: it cannot take this input shape, or this number of classes.
    """
    if name not in _ARCHITECTURES:
        raise unknown("model", name, sorted(_ARCHITECTURES))
    if not input_shape or min(input_shape) < 1:
        raise ValueError(f"model {name!r} expects a shape of positive lengths, got input_shape={input_shape}")
    least = 1 if name == "linear-regression" else 2
    if classes < least:
        raise ValueError(f"model {name!r} expects classes >= {least}, got classes={classes}")
    return _ARCHITECTURES[name].build(input_shape, classes)


def names() -> tuple[tuple[str, str], ...]:
    """(name, one-line summary) of every architecture."""
    return tuple((name, architecture.summary) for name, architecture in _ARCHITECTURES.items())


def _image(name: str, input_shape: tuple[int, ...], least: int) -> tuple[int, int, int]:
    """(channels, height, width), or a ValueError where the image is none or too small."""
    if len(input_shape) != 3 or min(input_shape[1:]) < least:
        raise ValueError(
            f"model {name!r} expects (channels, height, width) of at least {least} x {least} pixels, "
            f"got input_shape={input_shape}"
        )
    return input_shape


def _chain(
    name: str, layers: list[Layer], input_shape: tuple[int, ...], classes: int, widths: tuple[int, ...] | None = None
) -> Model:
    """The model that its layers describe."""
    chain = Chain(tuple(layers))
    return Model(name, *chain.tensors, input_shape, classes, chain, widths=widths, dropout=chain.dropout)


def _dense_model(name: str, hidden: tuple[int, ...], input_shape: tuple[int, ...], classes: int) -> Model:
    """Dense layers with biases and ReLU between them."""
    widths = (math.prod(input_shape), *hidden, classes)
    return _chain(name, dense_stack(widths), input_shape, classes, widths)


def _linear(input_shape: tuple[int, ...], classes: int) -> Model:
    """Logistic regression."""
    return _dense_model("linear", (), input_shape, classes)


def _mlp_small(input_shape: tuple[int, ...], classes: int) -> Model:
    """The MLP of JoPEQ and CEPAM."""
    return _dense_model("mlp-small", (32, 16), input_shape, classes)


def _mlp(input_shape: tuple[int, ...], classes: int) -> Model:
    """The MLP of UDP."""
    return _dense_model("mlp", (256,), input_shape, classes)


def _cnn2(input_shape: tuple[int, ...], classes: int) -> Model:
    """The CNN of JoPEQ and CEPAM on MNIST: two convolutions, each with ReLU and max-pooling, then two dense layers."""
    channels, *sides = _image("cnn2", input_shape, 16)
    layers: list[Layer] = [Conv("conv1", channels, 6, 5), Relu(), MaxPool()]
    layers += [Conv("conv2", 6, 6, 5), Relu(), MaxPool()]
    flat = 6 * math.prod(((side - 4) // 2 - 4) // 2 for side in sides)
    return _chain("cnn2", [*layers, *dense_stack((flat, 50, classes))], input_shape, classes)


def _cnn3(input_shape: tuple[int, ...], classes: int) -> Model:
    """The CNN of JoPEQ on CIFAR-10: three convolutions with ReLU, max-pooling and dropout, then four dense layers.

    Without padding, so that 128 * 2 * 2 entries are left of 32 x 32 pixels.
    """
    channels, *sides = _image("cnn3", input_shape, 22)
    layers: list[Layer] = []
    for number, (inputs, outputs) in enumerate(((channels, 32), (32, 64), (64, 128)), start=1):
        sides = [(side - 2) // 2 for side in sides]
        layers += [Conv(f"conv{number}", inputs, outputs, 3), Relu(), MaxPool(), Dropout((outputs, *sides), 0.2)]
    layers += dense_stack((128 * math.prod(sides), 128, 64, 32, classes))
    return _chain("cnn3", layers, input_shape, classes)


def _lenet_dlg(input_shape: tuple[int, ...], classes: int) -> Model:
    """The LeNet of Zhu et al. 2019: three convolutions, then a dense layer.

    With sigmoids, for the attack differentiates it twice.
    """
    channels, *sides = _image("lenet-dlg", input_shape, 1)
    layers: list[Layer] = []
    for number, (inputs, stride) in enumerate(((channels, 2), (12, 2), (12, 1)), start=1):
        layers += [Conv(f"conv{number}", inputs, 12, 5, stride=stride, padding=2), Sigmoid()]
    flat = 12 * math.prod(-(-side // 4) for side in sides)
    return _chain("lenet-dlg", [*layers, *dense_stack((flat, classes))], input_shape, classes)


def _lenet5(input_shape: tuple[int, ...], classes: int) -> Model:
    """LeNet-5 with its 28 x 28 digits padded to 32 x 32, as LeCun et al. 1998 had it; ReLU and max-pooling are newer.

    61,706 parameters on MNIST. sqSGD reports 119,850 for its LeNet-5, and no architecture that would give them.
    """
    channels, *sides = _image("lenet5", input_shape, 12)
    layers: list[Layer] = [Conv("conv1", channels, 6, 5, padding=2), Relu(), MaxPool()]
    layers += [Conv("conv2", 6, 16, 5), Relu(), MaxPool()]
    flat = 16 * math.prod((side // 2 - 4) // 2 for side in sides)
    return _chain("lenet5", [*layers, *dense_stack((flat, 120, 84, classes))], input_shape, classes)


def _cnn_udp(input_shape: tuple[int, ...], classes: int) -> Model:
    """The CNN of UDP on CIFAR-10: one convolution with ReLU, then a dense layer."""
    channels, *sides = _image("cnn-udp", input_shape, 1)
    width = 16  # the paper gives none; with 16 it is as large as the paper's MLP, within 3 %
    flat = width * math.prod(side + 4 for side in sides)
    layers: list[Layer] = [Conv("conv1", channels, width, 5, padding=4), Relu(), *dense_stack((flat, classes))]
    return _chain("cnn-udp", layers, input_shape, classes)


def _resnet20(input_shape: tuple[int, ...], classes: int) -> Model:
    """ResNet-20 with group norm."""
    channels, _, _ = _image("resnet20", input_shape, 1)
    return Model("resnet20", *resnet_tensors(channels, classes, 20), input_shape, classes, apply_resnet)


def _resnet110(input_shape: tuple[int, ...], classes: int) -> Model:
    """ResNet-110 with group norm; 1,727,674 parameters on FMNIST, sqSGD reports 1,722,224 for its own (0.3 % fewer)."""
    channels, _, _ = _image("resnet110", input_shape, 1)
    return Model("resnet110", *resnet_tensors(channels, classes, 110), input_shape, classes, apply_resnet)


def _apply_scores(tensors: Sequence[Tensor], x: Tensor, keep: Sequence[Tensor] | None) -> Tensor:
    """W x, without a bias."""
    return linear(x.flatten(1), tensors[0])


def _apply_margin(tensors: Sequence[Tensor], x: Tensor, keep: Sequence[Tensor] | None) -> Tensor:
    """(-w.x / 2, w.x / 2): the second score is ahead of the first by w.x."""
    half = linear(x.flatten(1), tensors[0]) / 2
    return torch.cat([-half, half], 1)


def _svm(input_shape: tuple[int, ...], classes: int) -> Model:
    """A linear support vector machine without bias; one weight vector for two classes, else one a class.

    With two classes, classes 0 and 1 being y = -1 and y = 1, the hinge loss is max(0, 1 - y w.x), as UDP (32) is meant.
    """
    columns = 1 if classes == 2 else classes
    tensors = stack(dense("fc", math.prod(input_shape), columns, bias=False))
    apply = _apply_margin if classes == 2 else _apply_scores
    # l2: kappa, which UDP does not give
    return Model("svm", *tensors, input_shape, classes, apply, loss="hinge", l2=0.01)


def _linear_regression(input_shape: tuple[int, ...], classes: int) -> Model:
    """w.x as the estimate of a number; the loss is (w.x - y)^2 + lambda/2 ||w||^2 with the lambda of the OTA paper."""
    tensors = stack(dense("fc", math.prod(input_shape), 1, bias=False))
    return Model("linear-regression", *tensors, input_shape, 1, _apply_scores, loss="squared", l2=1e-3)


_ARCHITECTURES = {
    "linear": _Architecture(_linear, "softmax regression: one dense layer"),
    "mlp-small": _Architecture(_mlp_small, "dense 32-16, the MLP of JoPEQ and CEPAM"),
    "mlp": _Architecture(_mlp, "dense 256, the MLP of UDP"),
    "cnn2": _Architecture(_cnn2, "two 5x5 convolutions of 6 channels, the CNN of JoPEQ and CEPAM for MNIST"),
    "cnn3": _Architecture(_cnn3, "three 3x3 convolutions with dropout 0.2, the CNN of JoPEQ for CIFAR-10"),
    "lenet-dlg": _Architecture(_lenet_dlg, "three 5x5 convolutions of 12 channels with sigmoid, the LeNet of DLG"),
    "lenet5": _Architecture(_lenet5, "LeNet-5 with ReLU and max-pooling, padded input (61,706 parameters on MNIST)"),
    "cnn-udp": _Architecture(_cnn_udp, "one padded 5x5 convolution, the CNN of UDP; 16 channels are our choice"),
    "resnet20": _Architecture(_resnet20, "ResNet-20 with group norm and shortcuts without parameters"),
    "resnet110": _Architecture(_resnet110, "ResNet-110 with group norm and shortcuts without parameters"),
    "svm": _Architecture(_svm, "linear support vector machine: hinge loss, kappa = 0.01, no bias"),
    "linear-regression": _Architecture(_linear_regression, "squared loss with lambda = 0.001, no bias"),
}
