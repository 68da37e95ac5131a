"""What the message of one record shows behind a variational bottleneck, whatever its noise.

The noise reaches the gradients of the encoder and of the layers before it only through the loss's slope at the
encoder's output. The message shows this slope, the gradient of the encoder's bias. So these gradients are those of the
inner product of the slope with the encoder's outputs, which have no noise.

Source: Scheliga et al. 2023, "Privacy preserving federated learning with convolutional variational bottlenecks", leave
    out the gradients of the bottleneck and behind it. Differs: the slope is read, not computed with other noise.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from leakgauge.attacks._engine.matching import Evaluation, Evaluator, Function, SquaredDistance
from leakgauge.harness.core.contract import Task
from leakgauge.harness.core.vec import Vector
from leakgauge.harness.learn.kernels import Kernel
from leakgauge.harness.learn.structure import Structure
from leakgauge.harness.learn.tasks import ModelTask

_ROUNDING = 1e-6  # assumed error of an entry of a gradient, as that of `defenses`
_CLEAR = 30.0  # the factor by which a dimension of a span is above the noise
_RELATIVE = 1e-5  # assumed error of a record's distance from a span, as a share of its length
_SILENT = -30.0  # before the softplus: standard deviations of 1e-13


def before_noise(task: Task, params: Vector, targets: Tensor) -> tuple[Function, Tensor] | None:
    """The misfit of inputs by the gradients up to the encoder, and its value [n] for zero gradients.

    It does not depend on the labels, and shows nothing of them.

    None: there is no bottleneck.

    Args:
        targets: [n, d] the gradient of one record each.
    """
    if not isinstance(task, ModelTask) or task.structure is None or (at := task.structure.sampled) is None:
        return None
    front, split = task.structure.front(at), task.structure.split
    count = len(front.layout.shapes)
    kernel = Kernel(front, front.layout.join(split(params)[:count]), linear=True)
    own = split(targets)[:count]
    sought = torch.cat([part.flatten(1) for part in own], 1)
    misfit = SquaredDistance(sought, 0.5 / _ROUNDING**2)
    matched = Evaluator(task, misfit, 1, own[-1][:, None], lambda x, y: kernel.trace(x, y)[0], kernel=kernel)
    entries = math.prod(task.input_shape)

    def function(candidates: Tensor, instances: Tensor) -> Evaluation:
        found = matched(candidates[:, :entries], instances)
        return found._replace(gradient=pad(found.gradient, (0, candidates.shape[1] - entries)))

    return function, misfit(torch.zeros_like(sought), torch.arange(len(sought), device=sought.device))


def spanned(task: Task, params: Vector, gradient: Tensor, images: int) -> Callable[[Tensor], Tensor] | None:
    """Scores [n] of inputs [n, ...] by whether they can be among the records behind a gradient [d], in one step.

    The rows of the gradient of the encoder, weight and bias, are sums of the records' inputs of this layer, whatever
    the noise. A record's input of it lies in their span. The score is that of a normal distance from the span.

    None: there is no bottleneck, the gradient is not finite, or the rows do not span as many dimensions as there are
    records, and fewer than all.
    """
    if not isinstance(task, ModelTask) or task.structure is None or task.structure.sampled is None:
        return None
    if not gradient.isfinite().all():
        return None
    front = task.structure.before_encoder
    owned = len(front.layout.shapes)
    weight, bias = (part.double() for part in task.structure.split(gradient)[owned : owned + 2])
    _, values, right = torch.linalg.svd(torch.cat([weight, bias[:, None]], 1), full_matrices=False)
    if images >= len(values) or not float(values[images - 1]) > _CLEAR * float(values[images]):
        return None
    error, basis = max(_RELATIVE, float(values[images] / values[images - 1])), right[:images]
    tensors = task.structure.split(params)[:owned]

    def scores(x: Tensor) -> Tensor:
        h = front(tensors, x, None).flatten(1).double()
        h = torch.cat([h, torch.ones_like(h[:, :1])], 1)
        off: Tensor = (h - h @ basis.T @ basis).square().sum(1) / h.square().sum(1)
        return -off / (2 * error**2)

    return scores


@dataclass(frozen=True, eq=False)
class Without:
    """A model as it is without the bottleneck that a defense inserts; without one, everything stays as it is.

    Attributes:
        task: the model without the bottleneck.
        whole: the layers with it; None: there is none.
        kept: [d] the places of the parameters that stay.
    """

    task: Task
    whole: Structure | None
    kept: Tensor | slice

    @classmethod
    def of(cls, task: Task) -> Without:
        """The model without its bottleneck."""
        structure = task.structure if isinstance(task, ModelTask) else None
        if not isinstance(task, ModelTask) or structure is None or structure.sampled is None:
            return cls(task, None, slice(None))
        plain, owned = structure.unbottlenecked(), len(structure.before_encoder.layout.shapes)
        places = structure.split(torch.arange(task.layout.dim))
        kept = plain.join([*places[:owned], *places[owned + 4 :]])
        return cls(replace(task, model=replace(task.model, apply=plain, start=None)), structure, kept)

    def silenced(self, params: Vector, scale: float = 1e-3) -> Vector:
        """Parameters [d] with which the whole model has the scores and slopes of these [d'] without the bottleneck.

        For a server that chooses the model: codes have no noise, and hold what the last dense layer reads.

        Args:
            scale: of the codes. If it is small, their divergence moves no slope; the encoder's gradient is then large.

        Raises:
            ValueError: the codes have fewer entries than there are classes.
        """
        if self.whole is None:
            return params
        full = params.new_zeros(self.whole.layout.dim)
        full[self.kept] = params
        owned = len(self.whole.before_encoder.layout.shapes)
        encoder, spread, decoder, _, last = self.whole.split(full)[owned : owned + 5]
        width = decoder.shape[1]
        if len(last) > width:
            raise ValueError(f"the bottleneck has {width} numbers, too few to pass on {len(last)} scores")
        read = torch.linalg.qr(last.double().T).Q.to(full)  # [entries, scores or fewer]
        encoder[: read.shape[1]], decoder[:, : read.shape[1]], spread[width:] = scale * read.T, read / scale, _SILENT
        return full
