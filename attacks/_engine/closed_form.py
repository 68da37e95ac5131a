"""Closed forms: inverts a model's gradient at one image without a search, layer by layer from the last layer.

A convolution's input follows from its output, the loss's slope in the output, and the kernel's gradient. Two systems
are linear in the input. Kernel equations: the kernel's gradient is the slope times the patches of the input, separately
for each input channel. Output equations: the output is the convolution of the input.

Source: Zhu and Blaschko 2021, "R-GAP: recursive gradient attack on privacy". Differs: weights output equations by the
certainty of the output, and uses each system only in directions that the other system leaves open.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn.functional import conv2d, conv_transpose2d, unfold

from leakgauge.attacks._engine.patches import PatchForm
from leakgauge.harness.core.contract import Task
from leakgauge.harness.core.rng import Key, normal, uniform
from leakgauge.harness.core.vec import Vector
from leakgauge.harness.learn.layers import Dense, Dropout, LogSoftmax, Relu, dense_stack
from leakgauge.harness.learn.models import Model, build
from leakgauge.harness.learn.structure import Structure
from leakgauge.harness.learn.tasks import ModelTask

_EDGE = 1e-9  # least distance of a recovered activation from 0 and 1, the bounds of a sigmoid; its logit is at most 21
_STRIDES, _PADDING = (2, 2, 1), 2  # strides and padding of the convolutions of `lenet-dlg`

RIDGE = 1e-10
"""Added to the squares of a first convolution's output equations, as a share of the largest square. The value is for
float32 gradients without noise; 1e-12 to 1e-8 give the same images."""

_WEAK = 1e-2  # strength in the kernel equations, relative to the strongest, below which output equations replace them
_OPEN = 128  # number of directions of an input in which the kernel equations correct the output equations
_ROUNDS = 2  # rounds of subspace iteration for the open directions and of refinement; the last system corrects both


class Unsolvable(ValueError):
    """This gradient has no closed-form solution; the message gives the reason for the report."""


class ClosedForm(Protocol):
    """A model that is prepared for many gradients of one image each."""

    def solve(self, gradient: Tensor) -> Tensor:
        """The input [*input_shape] float64 behind the gradient [d] float64; finite if the gradient is.

        Raises:
            Unsolvable: no single input has this gradient, or the gradient does not determine the input.
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
    if (patches := PatchForm.of(task, exact)) is not None:
        return patches
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
    for at, (shape, following) in enumerate(itertools.pairwise(task.layout.shapes)):
        if len(shape) == 2 and shape == (*following, entries):
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


def neurons_of(
    task: Task, params: Vector, attack: str
) -> tuple[Structure, Callable[[Tensor], Tensor], Sequence[Tensor]]:
    """The structure; the map from inputs [n, ...] to inputs [n, p] of the first dense layer; the dense layers' tensors.

    attack: name of the attack that needs ReLU neurons in this layer, and only dense layers behind it.

    Raises:
        ValueError: the model has no layer for such neurons, or its loss is not softmax cross-entropy.
    """
    name = task.model.name if isinstance(task, ModelTask) else "the model"
    structure = task.structure if isinstance(task, ModelTask) else None
    first = None if structure is None or structure.mixes else structure.first_dense
    layers = () if structure is None or first is None else structure.layers[first:]
    head = [layer for layer in layers if not isinstance(layer, (Dropout, LogSoftmax))]
    dense = all(isinstance(layer, Relu) or (isinstance(layer, Dense) and layer.bias) for layer in head)
    if structure is None or first is None or head[1:2] != [Relu()] or not dense:
        text = f"{attack} needs a dense layer with ReLU before another dense layer"
        why = f"the layers of {name} are not known" if structure is None else f"{name} has none"
        raise ValueError(f"{text}; {why}")
    if not task.softmax:
        raise ValueError(f"{attack} needs a softmax cross-entropy loss; this model has another loss")
    before, owned = structure.front(first), sum(layer.owns for layer in structure.layers[:first])
    tensors = structure.split(params)
    return structure, lambda x: before(tensors[:owned], x, None).flatten(1), tensors[owned:]


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
    channels, height, width = model.input_shape
    biases, inverses, tensors = [], [], structure.split(params)
    for i, stride in enumerate(_STRIDES):
        geometry = Geometry((channels, height, width), stride, _PADDING)
        kernel, bias = tensors[2 * i : 2 * i + 2]
        biases.append(bias[:, None, None])
        inverses.append(inverse(kernel, geometry, ridge))
        channels, height, width = len(kernel), -(-height // stride), -(-width // stride)
    return _LeNet(model, structure, biases, inverses, tensors[-2], (channels, height, width))


@dataclass(frozen=True, eq=False)
class _LeNet:
    """Convolutions with sigmoid, then a dense layer.

    biases, inverses: of each convolution; a bias is [o, 1, 1]. head: weight [classes, features] of the dense layer;
        shape: shape of its input before flattening.
    """

    model: Model
    structure: Structure
    biases: Sequence[Tensor]
    inverses: Sequence[_OutputFirst | _KernelFirst]
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
        layers = list(zip(self.biases, self.inverses, kernels[::2], strict=True))
        for bias, layer, received in reversed(layers):
            h = h.clamp(_EDGE, 1 - _EDGE)
            steep = h * (1 - h)
            slope = slope * steep
            h = layer.solve(Evidence(h.logit() - bias, steep, slope, received))
            slope = pulled_back(slope[None], layer.kernel, layer.geometry)[0]
        return self.model.scale.stored(h)


class Geometry(NamedTuple):
    """A convolution with a square kernel; `shape` is (channels, height, width) of its input."""

    shape: tuple[int, int, int]
    stride: int
    padding: int


class Evidence(NamedTuple):
    """The known values of a convolution at one input; all float64.

    Attributes:
        output: [o, h, w], without the bias.
        trust: [o, h, w], inverse standard deviation of the output, up to a factor.
        slope: [o, h, w], slope of the loss in the output, up to a factor.
        gradient: [o, i, k, k], gradient of the loss in the kernel, with the same factor.
    """

    output: Tensor
    trust: Tensor
    slope: Tensor
    gradient: Tensor


def inverse(kernel: Tensor, geometry: Geometry, ridge: float) -> _OutputFirst | _KernelFirst:
    """The better of two inversions of the convolution with `kernel` [o, i, k, k] float64.

    Kernel equations are more precise, because they come directly from the received gradient, but each channel has only
    o * k * k of them.

    Args:
        ridge: added to the squared output equations, as a share of their largest entry.
    """
    channels, height, width = geometry.shape
    positions = _positions(kernel.shape[-1], geometry)
    outputs, pixels = len(kernel) * len(positions), height * width
    if pixels > kernel[:, 0].numel() and outputs >= channels * pixels:
        return _OutputFirst(kernel, geometry, positions, _band(positions, geometry), ridge)
    return _KernelFirst(kernel, geometry, positions)


def _positions(side: int, geometry: Geometry) -> Tensor:
    """[outputs, side * side]: the pixel of a channel behind each patch entry; height * width means outside."""
    _, height, width = geometry.shape
    numbers = torch.arange(1, height * width + 1, dtype=torch.float64).reshape(1, 1, height, width)
    pixels = unfold(numbers, side, padding=geometry.padding, stride=geometry.stride)[0].T.long() - 1
    return pixels.where(pixels >= 0, height * width)


def _kernel_equations(slope: Tensor, positions: Tensor, pixels: int) -> Tensor:
    """[o * k * k, pixels]: the map from an input channel to the gradient of the kernel's slice for it."""
    outputs, taps = len(slope), positions.shape[1]
    rows = slope.new_zeros(outputs, taps, pixels + 1)
    values = slope.reshape(outputs, 1, -1).expand(outputs, taps, -1)
    rows.scatter_(2, positions.T.expand(outputs, -1, -1), values)
    return rows[:, :, :pixels].reshape(outputs * taps, pixels)


@dataclass(frozen=True, eq=False)
class _KernelFirst:
    """Uses kernel equations, and output equations in the few directions that the kernel equations leave open."""

    kernel: Tensor
    geometry: Geometry
    positions: Tensor

    def solve(self, evidence: Evidence) -> Tensor:
        channels, height, width = self.geometry.shape
        pixels = height * width
        equations = _kernel_equations(evidence.slope, self.positions, pixels)
        left, strength, right = torch.linalg.svd(equations, full_matrices=len(equations) < pixels)
        strong = int((strength > _WEAK * strength[0]).sum())
        amounts = evidence.gradient.transpose(0, 1).flatten(1) @ left[:, :strong] / strength[:strong]
        x: Tensor = (amounts @ right[:strong]).reshape(channels, height, width)
        weak = right[strong:].contiguous()
        return x + self._weak_part(evidence, x, weak) if len(weak) else x

    def _weak_part(self, evidence: Evidence, x: Tensor, weak: Tensor) -> Tensor:
        """The part of the input in the directions `weak` [m, pixels] of each channel, from the output equations."""
        channels, height, width = self.geometry.shape
        if channels * len(weak) > evidence.output.numel():
            raise Unsolvable("a convolution's gradient gives fewer equations than its input has pixels")
        directions = torch.kron(torch.eye(channels, dtype=weak.dtype), weak).reshape(-1, channels, height, width)
        shown = _convolve(directions, self.kernel, self.geometry).flatten(1).T
        missing = evidence.output - _convolve(x[None], self.kernel, self.geometry)[0]
        trust = evidence.trust.flatten()[:, None]
        amount = torch.linalg.lstsq(trust * shown, trust * missing.reshape(-1, 1)).solution
        corrected: Tensor = (amount.T @ directions.flatten(1)).reshape(channels, height, width)
        return corrected


@dataclass(frozen=True, eq=False)
class _OutputFirst:
    """Uses output equations, and kernel equations in the directions that output equations barely determine."""

    kernel: Tensor
    geometry: Geometry
    positions: Tensor
    band: _Band
    ridge: float

    def solve(self, evidence: Evidence) -> Tensor:
        trust = evidence.trust / evidence.trust.max()
        factor = self.band.factor(self.kernel, trust, self.ridge)
        x = evidence.output.new_zeros(1, *self.geometry.shape)
        channels, height, width = self.geometry.shape
        for _ in range(_ROUNDS):
            back = pulled_back(trust * self._missing(evidence, trust, x), self.kernel, self.geometry)
            step = factor.solve(back[0].permute(1, 2, 0).reshape(-1, 1))
            x = x + step.reshape(height, width, channels).permute(2, 0, 1)[None]
        directions = self._open(factor)
        shown = trust * _convolve(directions, self.kernel, self.geometry)
        basis, triangle = torch.linalg.qr(shown.flatten(1).T)
        output_side = basis.T @ self._missing(evidence, trust, x).reshape(-1, 1)
        # divided by the largest slope, so comparable with the weighted output equations at any common factor
        unit = evidence.slope.abs().max()
        equations = _kernel_equations(evidence.slope / unit, self.positions, math.prod(self.geometry.shape[1:]))
        kernel_side = (evidence.gradient / unit).transpose(0, 1).flatten(1) - x[0].flatten(1) @ equations.T
        kernel_rows = (directions.flatten(2) @ equations.T).flatten(1).T
        rows = torch.cat([triangle, kernel_rows])
        amount = torch.linalg.lstsq(rows, torch.cat([output_side, kernel_side.reshape(-1, 1)])).solution
        corrected: Tensor = x[0] + (amount[:, 0, None, None, None] * directions).sum(dim=0)
        return corrected

    def _missing(self, evidence: Evidence, trust: Tensor, x: Tensor) -> Tensor:
        """[1, o, h, w]: weighted residuals of the output equations."""
        return trust * (evidence.output - _convolve(x, self.kernel, self.geometry))

    def _open(self, factor: _Factor) -> Tensor:
        """[m, i, h, w]: orthonormal directions of the input with the smallest output."""
        channels, height, width = self.geometry.shape
        size = channels * height * width
        # any fixed start works here
        x = normal(Key(0).child("open directions"), (size, min(_OPEN, size)), dtype=torch.float64)
        for _ in range(_ROUNDS):
            x = torch.linalg.qr(factor.solve(x)).Q
        return x.T.reshape(-1, height, width, channels).permute(0, 3, 1, 2)


def pulled_back(slope: Tensor, kernel: Tensor, geometry: Geometry) -> Tensor:
    """[b, i, h, w]: the transposed convolution of slopes [b, o, h, w] in the output."""
    padding, stride = geometry.padding, geometry.stride
    height, width = (
        side + 2 * padding - kernel.shape[-1] - stride * (outputs - 1)
        for side, outputs in zip(geometry.shape[1:], slope.shape[2:], strict=True)
    )
    return conv_transpose2d(slope, kernel, stride=stride, padding=padding, output_padding=(height, width))


def _convolve(x: Tensor, kernel: Tensor, geometry: Geometry) -> Tensor:
    return conv2d(x, kernel, stride=geometry.stride, padding=geometry.padding)


@dataclass(frozen=True, eq=False)
class _Band:
    """Places of the entries of the squared output equations, which form a band if unknowns are ordered by image rows.

    A block of unknowns has one image row less than the kernel, so only neighboring blocks interact.

    Attributes:
        blocks, size: number of blocks, and unknowns in each; the last block may be padded.
        source: place of each entry in the flat [positions, i * k * k, i * k * k] products of patch entries.
        target: place of each entry in the flat [blocks, 2, size, size] blocks on and below the diagonal.
    """

    blocks: int
    size: int
    unknowns: int
    source: Tensor
    target: Tensor

    def factor(self, kernel: Tensor, trust: Tensor, ridge: float) -> _Factor:
        """Cholesky factor of the squared output equations, weighted by `trust` [o, h, w], plus the ridge."""
        taps = kernel.flatten(1)
        weighed = trust.square().flatten(1).T[:, :, None] * taps  # [positions, o, i * k * k]
        products = (taps.T @ weighed).flatten()
        flat = taps.new_zeros(self.blocks * 2 * self.size * self.size)
        flat.scatter_add_(0, self.target, products[self.source])
        stored = flat.reshape(self.blocks, 2, self.size, self.size)
        diagonal = stored[:, 0].diagonal(dim1=1, dim2=2)
        diagonal += ridge * diagonal.max()
        diagonal.reshape(-1)[self.unknowns :] = 1.0
        return _factor(stored)


def _band(positions: Tensor, geometry: Geometry) -> _Band:
    channels, height, width = geometry.shape
    unknowns = channels * height * width
    rows = max(1, math.isqrt(positions.shape[1]) - 1)
    size = rows * width * channels
    inside = (positions < height * width).repeat(1, channels)
    places = torch.cat([positions * channels + channel for channel in range(channels)], dim=1)
    lower, upper = places[:, :, None], places[:, None, :]
    below = lower // size - upper // size
    used = inside[:, :, None] & inside[:, None, :] & (below >= 0)
    target = ((upper // size * 2 + below) * size + lower % size) * size + upper % size
    return _Band(-(-height // rows), size, unknowns, used.flatten().nonzero()[:, 0], target[used])


@dataclass(frozen=True, eq=False)
class _Factor:
    """Lower Cholesky factor of a block tridiagonal matrix: its diagonal blocks and the blocks below them."""

    diagonal: Sequence[Tensor]
    below: Sequence[Tensor]

    def solve(self, right: Tensor) -> Tensor:
        """Solutions [n, m] for right sides [n, m]."""
        size = len(self.diagonal[0])
        blocks = list(torch.split(torch.cat([right, right.new_zeros(-len(right) % size, right.shape[1])]), size))
        for i, block in enumerate(self.diagonal):
            if i:
                blocks[i] = blocks[i] - self.below[i - 1] @ blocks[i - 1]
            blocks[i] = torch.linalg.solve_triangular(block, blocks[i], upper=False)
        for i in reversed(range(len(blocks))):
            if i < len(self.below):
                blocks[i] = blocks[i] - self.below[i].T @ blocks[i + 1]
            blocks[i] = torch.linalg.solve_triangular(self.diagonal[i].T, blocks[i], upper=True)
        return torch.cat(blocks)[: len(right)]


def _factor(stored: Tensor) -> _Factor:
    """The factor of a symmetric matrix with blocks `stored` [blocks, 2, size, size] on and below the diagonal."""
    diagonal, below = [torch.linalg.cholesky(stored[0, 0])], []
    for block, after in itertools.pairwise(stored):
        below.append(torch.linalg.solve_triangular(diagonal[-1], block[1].T, upper=False).T)
        diagonal.append(torch.linalg.cholesky(after[0] - below[-1] @ below[-1].T))
    return _Factor(diagonal, below)
