"""What the message of one record shows behind a variational bottleneck, whatever its noise.

The noise reaches the gradients of the encoder and of the layers before it only through the loss's slope at the
encoder's output. The message shows this slope, the gradient of the encoder's bias. So these gradients are those of the
inner product of the slope with the encoder's outputs, which have no noise.

Source: Scheliga et al. 2023, "Privacy preserving federated learning with convolutional variational bottlenecks", leave
    out the gradients of the bottleneck and behind it. Differs: the slope is read, not computed with other noise.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import pad

from leakgauge.attacks._engine.matching import Evaluation, Evaluator, Function, SquaredDistance
from leakgauge.harness.core.contract import Task
from leakgauge.harness.core.vec import Vector
from leakgauge.harness.learn.kernels import Kernel
from leakgauge.harness.learn.tasks import ModelTask

_ROUNDING = 1e-6  # assumed error of an entry of a gradient, as that of `defenses`


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
