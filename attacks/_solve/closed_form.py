"""Closed forms: inverts a model's gradient at one image without a search, layer by layer from the last layer."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from leakgauge.attacks._solve.layerwise import Evidence, Geometry, Inverse, inverse, pulled_back
from leakgauge.harness.core.contract import Task
from leakgauge.harness.core.rng import Key, uniform
from leakgauge.harness.learn.layers import dense_stack
from leakgauge.harness.learn.models import Model, build
from leakgauge.harness.learn.structure import Structure
from leakgauge.harness.learn.tasks import ModelTask

_EDGE = 1e-9
"""Least distance of a recovered activation from 0 and 1, the bounds of a sigmoid; its logit is then at most 21."""

_STRIDES, _PADDING = (2, 2, 1), 2
"""Strides and padding of the convolutions of `lenet-dlg`."""

RIDGE = 1e-10
"""Added to the squares of a first convolution's output equations, as a share of the largest square. The value is for
float32 gradients without noise; 1e-12 to 1e-8 give the same images."""


class Unsolvable(ValueError):
    """This gradient has no closed-form solution; the message gives the reason for the report."""


class ClosedForm(Protocol):
    """A model that is prepared for many gradients of one image each."""

    def solve(self, gradient: Tensor) -> Tensor:
        """The input [*input_shape] float64 behind the gradient [d] float64; finite if the gradient is.

        Raises:
            Unsolvable: no single input has this gradient.
            Underdetermined: the gradient does not determine the input.
        """


def closed_form(task: Task, params: Tensor, ridge: float) -> ClosedForm | None:
    """The closed form of this model; None if it has no closed form.

    A model is recognized by its tensors and, for a few inputs, by its gradients or scores: tensors do not show the
    activations.

    Args:
        params: [d] finite.
        ridge: see `Analytic`.
    """
    if not isinstance(task, ModelTask):
        return None
    exact, shape = params.double(), task.input_shape
    if (at := entrance(task, exact)) is not None:
        return DenseForm(task.model, at)
    if len(shape) == 3 and task.classes > 1:
        lenet = build("lenet-dlg", shape, task.classes).structure
        assert lenet is not None
        known = task.structure or lenet
        ordered = tuple(known.ordered(task.layout.shapes)) if known.layout.dim == task.layout.dim else ()
        if ordered == lenet.layout.shapes and _agree(task, exact, lenet, known):
            return _lenet(task.model, known, exact, ridge)
    return None


def entrance(task: ModelTask, params: Tensor) -> int | None:
    """The position of the weight of a dense layer with a bias that takes the whole input; None: there is none.

    The weight's gradient is then the outer product of the bias's gradient and the input, whatever is behind the layer.
    """
    leaf, entries = params.clone().requires_grad_(), math.prod(task.input_shape)
    x = uniform(Key(0).child("probe"), (1, *task.input_shape), dtype=torch.float64)
    row, factors = task.model.scale.apply(x).flatten(), uniform(Key(0).child("factors"), (task.classes,))
    for at, (one, other) in enumerate(itertools.pairwise(task.layout.shapes)):
        if len(one) == 2 and one == (*other, entries):
            (slopes,) = torch.autograd.grad((task.outputs(leaf, x) * factors).sum(), leaf)
            weight, bias = task.layout.split(slopes)[at : at + 2]
            if torch.dist(weight, torch.outer(bias, row)) <= 1e-6 * weight.norm():
                return at
    return None


def dense_stack_of(task: Task) -> Structure | None:
    """The structure of a model that computes the same as a `dense_stack`; None: it does not.

    If its layers are not known, it is recognized by its scores, as its tensors do not show activations.
    """
    if not isinstance(task, ModelTask):
        return None
    if task.structure is not None:
        return task.structure if task.structure.widths is not None else None
    widths = [math.prod(task.input_shape), *(width for tensor in task.layout.shapes[::2] for width in tensor[:1])]
    dense = Structure(tuple(dense_stack(widths)))
    if task.layout.shapes != dense.layout.shapes:
        return None
    params = uniform(Key(0).child("params"), (task.layout.dim,), -1.0, 1.0, dtype=torch.float64)
    return dense if _agree(task, params, dense, dense) else None


def _agree(task: ModelTask, params: Tensor, other: Structure, known: Structure) -> bool:
    """Whether a task has the scores of another structure for a few inputs.

    known: gives the order of the layers' tensors.
    """
    x = uniform(Key(0).child("probes"), (4, *task.input_shape), dtype=torch.float64)
    with torch.no_grad():
        scores = other(known.split(params), task.model.scale.apply(x), None)
        return torch.allclose(task.outputs(params, x), scores, rtol=1e-6, atol=1e-9)


def _quotient(weight: Tensor, bias: Tensor) -> Tensor:
    """The input [m] of a dense layer at one example: least-squares fit of weight [n, m] = outer(bias [n], input).

    Each row's estimate is the weight's gradient over the bias's; the mean weights rows by the squared bias gradient.
    """
    # divided by the largest entry, so that squares do not vanish
    unit = bias.abs().max()
    if not unit > 0:
        raise Unsolvable("the gradient of a dense layer's bias is zero, so the layer's input is not determined")
    rows = bias / unit
    return weight.T @ rows / rows.square().sum() / unit


@dataclass(frozen=True)
class DenseForm:
    """The closed form of a model that begins with a dense layer, of which it needs only this layer's gradient.

    at: position of the layer's weight in the layout.

    Source: Phong et al. 2017, "Privacy-preserving deep learning via additively homomorphic encryption"; Geiping et al.
        2020, Prop. 3.1.
    """

    model: Model
    at: int

    def solve(self, gradient: Tensor) -> Tensor:
        """Implement `ClosedForm`."""
        weight, bias = self.model.layout.split(gradient)[self.at : self.at + 2]
        return self.model.scale.stored(_quotient(weight, bias).reshape(self.model.input_shape))


def _lenet(model: Model, structure: Structure, params: Tensor, ridge: float) -> ClosedForm:
    """The closed form of `lenet-dlg`, with prepared convolutions."""
    channels, height, width = model.input_shape
    layers, tensors = [], structure.split(params)
    for i, stride in enumerate(_STRIDES):
        geometry = Geometry((channels, height, width), stride, _PADDING)
        kernel, bias = tensors[2 * i : 2 * i + 2]
        layers.append(_Layer(kernel, bias[:, None, None], geometry, inverse(kernel, geometry, ridge)))
        channels, height, width = len(kernel), -(-height // stride), -(-width // stride)
    return _LeNet(model, structure, tuple(layers), tensors[-2], (channels, height, width))


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

    head: weight [classes, features] of the dense layer; shape: shape of its input before flattening.
    """

    model: Model
    structure: Structure
    layers: tuple[_Layer, ...]
    head: Tensor
    shape: tuple[int, int, int]

    def solve(self, gradient: Tensor) -> Tensor:
        """Implement `ClosedForm`."""
        *kernels, weight, bias = self.structure.split(gradient)
        h = _quotient(weight, bias)
        # the scores' slopes again, from all weights and not only the biases, so that noise averages out
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
        return self.model.scale.stored(h)
