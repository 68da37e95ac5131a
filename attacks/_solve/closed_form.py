"""Models whose gradient at one image can be inverted without a search, layer by layer from the last one."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import conv2d, linear, relu

from leakgauge.attacks._solve.layerwise import Evidence, Geometry, Inverse, inverse, pulled_back
from leakgauge.harness.core.contract import Task
from leakgauge.harness.core.rng import Key, uniform
from leakgauge.harness.core.vec import Layout, Vector
from leakgauge.harness.learn.models import build

_EDGE = 1e-9
"""Nearest that an activation is let to 0 and 1, between which every sigmoid lies. Its logit is then at most 21."""

_STRIDES = (2, 2, 1)
"""Of the convolutions of `lenet-dlg`; their padding is 2."""

_PADDING = 2


RIDGE = 1e-10
"""Added to the squares of a first convolution's output equations, as a share of their largest: for float32 gradients
without noise; 1e-12 to 1e-8 give the same images."""


class Unsolvable(ValueError):
    """This gradient has no closed form; the message says why, for a reader of the report."""


class ClosedForm(Protocol):
    """A model, prepared for many gradients of one image each."""

    def solve(self, gradient: Tensor) -> Tensor:
        """The input [*input_shape] float64 behind the gradient [d] float64; finite for a finite gradient, or raises.

        Raises:
            Unsolvable: the gradient is of no single input.
            Underdetermined: the model tells less than the input holds.
        """


def closed_form(task: Task, params: Vector, ridge: float) -> ClosedForm | None:
    """The closed form of this model, or None where it has none.

    A model is told by its tensors and, as these do not show the activations, by its scores of a few inputs.

    Args:
        params: [d] finite.
        ridge: see `Analytic`.
    """
    exact = params.double()
    for covers, apply, make in (
        (_is_dense(task.layout, task.input_shape), _dense_scores, _dense),
        (_is_lenet(task), _lenet_scores, _lenet),
    ):
        if covers and _agree(task, exact, apply(task.layout.split(exact), _probes(task))):
            return make(task, exact, ridge)
    return None


def _probes(task: Task) -> Tensor:
    """Inputs on which models are compared."""
    return uniform(Key(0).child("probes"), (4, *task.input_shape), dtype=torch.float64)


def _agree(task: Task, params: Tensor, scores: Tensor) -> bool:
    """Whether the task has these scores."""
    with torch.no_grad():
        return torch.allclose(task.outputs(params, _probes(task)), scores, rtol=1e-6, atol=1e-9)


def _is_dense(layout: Layout, input_shape: tuple[int, ...]) -> bool:
    """Whether the tensors are W0, b0, W1, b1, ... of dense layers, one behind the other."""
    weights, biases = layout.shapes[::2], layout.shapes[1::2]
    if len(weights) != len(biases) or any(len(shape) != 2 for shape in weights):
        return False
    chained = all(one[0] == other[1] for one, other in itertools.pairwise(weights))
    fits = all(bias == weight[:1] for weight, bias in zip(weights, biases, strict=True))
    return chained and fits and weights[0][1] == math.prod(input_shape)


def _dense_scores(tensors: list[Tensor], x: Tensor) -> Tensor:
    """Of dense layers with ReLU between them."""
    h = x.flatten(1)
    for weight, bias in zip(tensors[:-2:2], tensors[1:-2:2], strict=True):
        h = relu(linear(h, weight, bias))
    return linear(h, tensors[-2], tensors[-1])


def _is_lenet(task: Task) -> bool:
    """Whether the tensors are those of `lenet-dlg`."""
    shape = task.input_shape
    return len(shape) == 3 and task.classes > 1 and task.layout == build("lenet-dlg", shape, task.classes).layout


def _lenet_scores(tensors: list[Tensor], x: Tensor) -> Tensor:
    """Of three convolutions with sigmoid and a dense layer."""
    h = x
    for i, stride in enumerate(_STRIDES):
        h = torch.sigmoid(conv2d(h, tensors[2 * i], tensors[2 * i + 1], stride=stride, padding=_PADDING))
    return linear(h.flatten(1), tensors[-2], tensors[-1])


def _quotient(weight: Tensor, bias: Tensor) -> Tensor:
    """The input [m] of a dense layer at one example: row by row the weight's gradient over the bias's, rows averaged.

    Weighed by the squared bias gradient: the least squares of weight [n, m] = outer(bias [n], input).
    """
    # by the largest, for squares that do not vanish
    unit = bias.abs().max()
    if not unit > 0:
        raise Unsolvable("no unit of a dense layer has a gradient in its bias, so that none tells the layer's input")
    rows = bias / unit
    return weight.T @ rows / rows.square().sum() / unit


def _dense(task: Task, params: Tensor, ridge: float) -> ClosedForm:
    """The closed form of a dense stack, which needs neither parameters nor ridge."""
    return _Dense(task.layout, task.input_shape)


@dataclass(frozen=True)
class _Dense:
    """Only the first layer is needed.

    Source: Phong et al. 2017, "Privacy-preserving deep learning via additively homomorphic encryption"; Geiping et al.
        2020, Prop. 3.1.
    """

    layout: Layout
    input_shape: tuple[int, ...]

    def solve(self, gradient: Tensor) -> Tensor:
        """Implement `ClosedForm`."""
        weight, bias, *_ = self.layout.split(gradient)
        return _quotient(weight, bias).reshape(self.input_shape)


def _lenet(task: Task, params: Tensor, ridge: float) -> ClosedForm:
    """The closed form of `lenet-dlg`, convolutions prepared."""
    tensors = task.layout.split(params)
    channels, height, width = task.input_shape
    layers = []
    for i, stride in enumerate(_STRIDES):
        geometry = Geometry((channels, height, width), stride, _PADDING)
        kernel, bias = tensors[2 * i : 2 * i + 2]
        layers.append(_Layer(kernel, bias[:, None, None], geometry, inverse(kernel, geometry, ridge)))
        channels, height, width = len(kernel), -(-height // stride), -(-width // stride)
    return _LeNet(task.layout, tuple(layers), tensors[-2], (channels, height, width))


@dataclass(frozen=True, eq=False)
class _Layer:
    """A convolution and a sigmoid. bias: [o, 1, 1]."""

    kernel: Tensor
    bias: Tensor
    geometry: Geometry
    inverse: Inverse


@dataclass(frozen=True, eq=False)
class _LeNet:
    """Convolutions with sigmoid, then a dense layer.

    head: weight [classes, features] of the dense layer; shape: of its input, before it is flattened.
    """

    layout: Layout
    layers: tuple[_Layer, ...]
    head: Tensor
    shape: tuple[int, int, int]

    def solve(self, gradient: Tensor) -> Tensor:
        """Implement `ClosedForm`."""
        *kernels, weight, bias = self.layout.split(gradient)
        h = _quotient(weight, bias)
        # the scores' slopes once more, from all weights and not the biases alone: noise averages out
        row = torch.cat([h, h.new_ones(1)])
        slopes = torch.cat([weight, bias[:, None]], dim=1) @ row / row.square().sum()
        h = _quotient(weight, slopes).reshape(self.shape)
        slope = (slopes @ self.head).reshape(self.shape)
        for layer, received in zip(reversed(self.layers), reversed(kernels[::2]), strict=True):
            h = h.clamp(_EDGE, 1 - _EDGE)
            steep = h * (1 - h)
            slope = slope * steep
            evidence = Evidence(h.logit() - layer.bias, steep, slope, received)
            h = layer.inverse.solve(evidence)
            slope = pulled_back(slope[None], layer.kernel, layer.geometry)[0]
        return h
