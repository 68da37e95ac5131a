"""Trap weights: a malicious server broadcasts parameters under which an update shows the image.

The convolutions pass the image on to the first dense layer's inputs h, almost without a baseline. The layers behind
hardly move the scores, so the residual p - y depends only on the label. The gradient of the first dense layer is the
residual, propagated back through the layers behind, times h: it holds nearly all of the update's energy. So a clip,
scale or step size that a defense derives from the size of the update fits the image.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import conv2d, unfold

from leakgauge.attacks._engine.bottleneck import Without
from leakgauge.attacks._engine.posterior import ByPosterior
from leakgauge.harness.core import rng
from leakgauge.harness.core.contract import Observation, Task
from leakgauge.harness.core.rng import Key
from leakgauge.harness.core.vec import Vector
from leakgauge.harness.learn.gradients import gradients
from leakgauge.harness.learn.layers import Conv, Dense, Dropout, Relu, Tanh
from leakgauge.harness.learn.structure import Structure
from leakgauge.harness.learn.tasks import ModelTask

_IMAGES = 1500  # maximum number of auxiliary images to which the parameters are fitted
_PATCHES = 500  # maximum number of these images whose patches are analyzed
_LINEAR = 0.3  # standard deviation of a sigmoid's inputs around 0 where it passes an image on
_RIDGE = 1e-3  # least eigenvalue of a covariance, as a share of the largest
_LEVEL, _SPREAD = -2.5, 1.2  # mean and deviation of the last sigmoid's inputs, so its outputs have hardly any baseline
_TINY = 1e-3  # scale of the first dense layer's outputs, which hardly move
_ON = 1e-2  # output of a hidden unit that is not before the scores: it is on, and far below the slopes of 1 behind it
_CALIBRATED = 50  # number of auxiliary images over which energies are averaged
_SHOWN = 0.25  # share of the gradient's energy in the last layer behind hidden layers, to infer the label in noise


@dataclass(frozen=True)
class TrapWeights(ByPosterior):
    """Broadcasts parameters that make an update show its image, then searches for the most probable image, like `map`.

    The convolutions pass the image on to the first dense layer, whose gradient holds nearly all of the update's energy.
    So noise in proportion to the update's size, a clip and a quantizer's step hide less of the image than at honest
    parameters. The server discards the updates of the attacked rounds and continues from its own model.

    Must know: what `map` must know; it also chooses the parameters, which requires a malicious server. The parameters
    depend on auxiliary data and on a key, not on the defense or the victims. They are the same in every attacked round.

    Cannot: attack models that are not a chain of convolutions and dense layers (`resnet20`), or whose loss is not
    softmax cross-entropy; the training then fails with the reason. Behind max-pooling, only the maxima of the image
    pass. The images of a batch add up in one gradient; see `imprint`.

    Args: as in `map`. `evaluations` counts for all attacked rounds together; many noisy rounds need more evaluations
    than one round.

    Raises:
        ValueError: a parameter is out of range; in `broadcast`: the model has no trap weights.

    Source: "LDP is not enough" (arXiv 2502.08151). Differs: principal components instead of averages of 2 x 2 blocks,
        power in proportion to their standard deviation, a sigmoid without a baseline, and the posterior of `map`
        instead of a linear decoder.
    """

    @property
    def needs(self) -> frozenset[str]:
        """What `map` needs, auxiliary data, and the choice of the parameters."""
        return super().needs | {"auxiliary", "broadcast"}

    def broadcast(self, seen: Observation, key: Key) -> Vector:
        """The same parameters in every attacked round."""
        assert seen.auxiliary is not None
        own = Without.of(seen.task)
        return own.silenced(_trap(own.task, seen.auxiliary.x, key.child("trap")), 1.0)


def _trap(task: Task, x: Tensor, key: Key) -> Vector:
    """Parameters [d] under which a gradient shows its input.

    Args:
        x: [n, ...] auxiliary inputs, two or more.
        key: draws the signs of the dense layers' weights.

    Raises:
        ValueError: the model is not a chain of convolutions and dense layers, its loss is not softmax cross-entropy, or
            there are fewer than two auxiliary inputs.
    """
    structure = task.structure if isinstance(task, ModelTask) else None
    if structure is None or not structure.plain or not task.softmax:
        raise ValueError(
            "trap-weights needs a chain of convolutions and dense layers, which have biases, with a softmax "
            "cross-entropy loss; this model or its loss is different"
        )
    if len(x) < 2:
        raise ValueError(f"expected at least 2 auxiliary inputs to fit the trap weights, got {len(x)}")
    body = structure.layers[: structure.first_dense]
    h, made = x[:_IMAGES], list[Tensor]()
    for at, layer in enumerate(body):
        if isinstance(layer, Conv):
            after = body[at + 1] if at + 1 < len(body) else None
            last = not any(isinstance(later, Conv) for later in body[at + 1 :]) and not isinstance(after, Tanh)
            tensors = _carry(layer, h, first=not made, last=last, rectified=isinstance(after, Relu))
            h, made = layer.apply(h, *tensors), made + tensors
        elif not isinstance(layer, Dropout):
            h = layer.apply(h)
    dense = [layer for layer in structure.layers if isinstance(layer, Dense)]
    tensors = made + _head(dense, float(h.flatten(1).norm(dim=1).max()), key)
    if len(dense) > 1:  # the last layer's gradient is the residual times these units, on which its scores hardly depend
        tensors[-3] *= _louder(task, structure, tensors, x, 2 * len(dense))
    return structure.join(tensors)


def _louder(task: Task, structure: Structure, tensors: Sequence[Tensor], x: Tensor, dense: int) -> float:
    """The factor on the last hidden units that gives the last layer its share of the gradient's energy.

    Args:
        x: [n, ...] inputs, to which all labels are assigned in turn; dense: number of tensors of the dense layers.
    """
    count = torch.arange(max(_CALIBRATED, task.classes))
    images, labels = x[count * len(x) // len(count), None], torch.eye(task.classes)[count % task.classes, None]
    slopes = gradients(task, structure.join(tensors), images, labels)
    energy = [float(slope.square().sum()) for slope in structure.split(slopes.square().sum(0).sqrt())]
    return math.sqrt(_SHOWN / (1 - _SHOWN) * energy[-dense] / max(energy[-2], 1e-30))


def _carry(layer: Conv, h: Tensor, *, first: bool, last: bool, rectified: bool) -> list[Tensor]:
    """Weight and bias with which a convolution passes on its inputs h [n, inputs, rows, columns].

    Before ReLU, each component has two channels, one for each sign.
    """
    if rectified:
        weight = _components(h, layer, (layer.outputs + 1) // 2)
        weight = torch.stack([weight, -weight], 1).flatten(0, 1)[: layer.outputs]
        raw = conv2d(h, weight, stride=layer.stride, padding=layer.padding).std((0, 2, 3))
        return _placed(layer, weight, h, 0.0, (raw / raw.max().clamp(min=1e-12)).sqrt())
    if last and layer.inputs == layer.outputs and layer.stride == 1 and layer.kernel <= min(h.shape[2:]):
        return _placed(layer, _balanced(h, layer), h, _LEVEL, torch.tensor(_SPREAD))
    if first and layer.outputs >= layer.inputs * layer.stride**2:
        weight = _phases(layer)
    else:
        weight = _components(h, layer, layer.outputs)
    return _placed(layer, weight, h, *((_LEVEL, torch.tensor(_SPREAD)) if last else (0.0, torch.tensor(_LINEAR))))


def _placed(layer: Conv, weight: Tensor, h: Tensor, mean: float, std: Tensor) -> list[Tensor]:
    """The tensors that give each output channel this mean and standard deviation over h, if it varies at all."""
    out = conv2d(h, weight, stride=layer.stride, padding=layer.padding)
    varies = out.std((0, 2, 3))
    factor = std / varies.clamp(min=max(_RIDGE * float(varies.max()), 1e-6))
    return [weight * factor[:, None, None, None], mean - out.mean((0, 2, 3)) * factor][: layer.owns]


def _phases(layer: Conv) -> Tensor:
    """[outputs, inputs, k, k]: each output is one pixel of a stride x stride block, in one channel."""
    weight = torch.zeros(layer.outputs, layer.inputs, layer.kernel, layer.kernel)
    for output in range(layer.outputs):
        place, channel = divmod(output, layer.inputs)
        row, column = divmod(place % layer.stride**2, layer.stride)
        weight[output, channel, (layer.padding + row) % layer.kernel, (layer.padding + column) % layer.kernel] = 1.0
    return weight


def _components(h: Tensor, layer: Conv, count: int) -> Tensor:
    """[count, inputs, k, k]: leading principal components of a convolution's patches, repeated if they are too few.

    Patches that reach beyond the border count only if all patches do.
    """
    padding = 0 if layer.kernel <= min(h.shape[2:]) else layer.padding
    flat = unfold(h[:_PATCHES], layer.kernel, padding=padding, stride=layer.stride).transpose(1, 2).flatten(0, 1)
    off = (flat - flat.mean(0)).double()
    vectors: Tensor = torch.linalg.eigh(off.T @ off).eigenvectors.flip(1)
    chosen = torch.arange(count) % vectors.shape[1]
    return vectors[:, chosen].T.reshape(count, layer.inputs, layer.kernel, layer.kernel).to(h.dtype)


def _balanced(h: Tensor, layer: Conv) -> Tensor:
    """[c, c, k, k]: the middle of C^(-1/4), where C is the covariance of h [n, c, rows, columns].

    Each component then has power in proportion to its standard deviation. Under equal noise, this is the best split of
    a fixed power (reverse water-filling).
    """
    n, c, rows, columns = h.shape
    off = (h - h.mean(0)).flatten(1).double()
    values, vectors = torch.linalg.eigh(off.T @ off / n)
    root = (vectors * (values.clamp(min=0) + _RIDGE * values.max().clamp(min=1e-12)) ** -0.25) @ vectors.T
    middle = root.reshape(c, rows, columns, c, rows, columns)[:, rows // 2, columns // 2]
    below, right = rows // 2 - layer.kernel // 2, columns // 2 - layer.kernel // 2
    kernel: Tensor = middle[:, :, below : below + layer.kernel, right : right + layer.kernel].to(h.dtype)
    return kernel


def _head(layers: Sequence[Dense], length: float, key: Key) -> list[Tensor]:
    """Weights and biases of the dense layers, for inputs of at most this length.

    Each row of a weight has as many positive as negative entries, so equal units give zero scores.
    """
    made: list[Tensor] = []
    for number, layer in enumerate(layers):
        order = torch.from_numpy(rng.permutations(key.child(number), layer.outputs, layer.inputs))
        signs = (order < layer.inputs // 2).float() - (order >= layer.inputs - layer.inputs // 2).float()
        hidden = number + 1 < len(layers)
        scale = (_TINY * (_ON if hidden else 1.0) / max(length, 1.0)) if number == 0 else 1.0
        made += [scale * signs, torch.full((layer.outputs,), _ON if hidden else 0.0)]
    return made
