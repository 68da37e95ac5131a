"""A small batch behind the gradient of a ReLU network, exactly and without a search of its pixels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.linalg import LinAlgError  # type: ignore[attr-defined]  # public, but not listed in __all__
from torch.nn.functional import linear, one_hot, relu

from leakgauge.attacks._engine.failure import failed, unusable
from leakgauge.attacks._engine.matching import gradients
from leakgauge.attacks._engine.objective import received_gradients
from leakgauge.attacks._solve.closed_form import closed_form
from leakgauge.attacks._solve.spear import FirstLayer, Undecided, find
from leakgauge.harness.core.contract import Attack, Guess, Message, Observation, Reconstruction, Task
from leakgauge.harness.core.rng import Key
from leakgauge.harness.core.vec import Vector

_UNEXPLAINED = 0.5
"""Share of a tensor of the received gradient that the batch's own may leave unexplained, whatever its factor. Exact
batches left at most 1e-11, mixtures with right images 0.03 to 0.57, chance 0.6 to 1; one wholly wrong batch of two left
0.38 and was told."""


@dataclass(frozen=True)
class Spear(Attack):
    """Exact batches behind a dense ReLU network, by low rank and zeros of the first layer's gradient.

    Must know: one message of each victim, how many images are behind it (public), and the model it trained from: dense
    layers with ReLU between them, at least two (`mlp`, `mlp-small`). So for a server or an eavesdropper; without the
    shared key, the estimate is an outsider's. It takes the defense's estimate for the gradient itself. A common
    factor, as of a clip, changes no image.

    Cannot: withstand more than slight noise; tell an image that activates nearly all units, two that are alike, or one
    that leaves no trace. `map` attacks those, and other models. An update of several full-batch steps on few images is
    told if enough units stay inactive; its objective is then that of the first approximation, and not small.

    Practical up to 10 images behind a fresh `mlp`; fewer behind a trained one, whose units are active more often. Of
    5 batches each of 2, 4, 6, 8, 10 images exact (MSE < 1e-6), on a busy core:
        `mlp`, digits: 5 5 5 5 4 fresh, in 0.03 to 6 s; 5 5 5 5 0 after 5 rounds (37 of 50 images of the 10)
        `mlp`, mnist: 5 5 5 5 5 fresh, in 0.4 to 1.1 s; 5 5 4 0 after 5 rounds (10 not run)
        `mlp-small`, mnist, of 2, 3, 4, 6 images: 4 5 5 4 fresh; 2 3 0 0 after 5 rounds
    A batch that is not found takes 3 to 15 s.

    Edge cases, each a guess with a `failure`: a gradient or model that is zero or not finite; fewer directions in the
    gradient than images; fewer units than images; no hidden layer; a batch that does not explain the gradient. A batch
    with some wrong images is told, where it explains more than half of each tensor; its objective shows it.

    Args:
        samples: sets of rows to draw for one victim, at most. The guess tells in `evaluations` how many were.

    Raises:
        ValueError: samples < 1; in `run`, a loss that is not softmax cross-entropy.

    Source: Dimitrov et al. 2024, "SPEAR: exact gradient inversion of batches in federated learning". Differs: see
        `attacks._solve.spear`; labels are solved for from the last layer.
    """

    kind: ClassVar[str] = "reconstruction"

    samples: int = 100_000

    def __post_init__(self) -> None:
        if self.samples < 1:
            raise ValueError(f"expected samples >= 1, got samples={self.samples}")

    @property
    def needs(self) -> frozenset[str]:
        """Messages and the round's model."""
        return frozenset({"messages", "models"})

    def run(self, seen: Observation, key: Key) -> Reconstruction:
        """Raw inputs, not clipped, each with its label; the objective is the squared distance of the gradients."""
        assert seen.model is not None
        assert seen.messages is not None
        targets, params = received_gradients(seen), seen.model.params
        refusal = _refusal(seen.task, params)
        guesses = []
        for message, target in zip(seen.messages, targets, strict=True):
            failure = refusal or unusable(target)
            if failure:
                guesses.append(failed(seen.task, message, failure))
            else:
                rows = key.child("rows", message.sender.number)
                guesses.append(_guess(seen.task, params, message, target, self.samples, rows))
        return Reconstruction(tuple(guesses))


def _refusal(task: Task, params: Vector) -> str:
    """Why no message behind this model is attacked, or nothing."""
    if not bool(params.isfinite().all()):
        return "the model is not finite"
    shapes = task.layout.shapes
    # of what has a closed form, only dense stacks start with a matrix; none of them depends on the ridge
    if len(shapes[0]) != 2 or closed_form(task, params, ridge=1e-10) is None:
        return "spear does not cover this model, only dense ReLU layers; map does"
    if len(shapes) == 2:
        return "without a hidden layer there are no zeros to find images by; map does it, and analytic one image"
    return ""


def _guess(task: Task, params: Vector, message: Message, target: Tensor, samples: int, key: Key) -> Guess:
    """What was found behind one message, and how well it explains what was received."""
    tensors, told = (task.layout.split(vector.double()) for vector in (params, target))
    try:
        found = find(FirstLayer(*tensors[:2], *told[:2]), message.images, samples, key)
        y = _labels(tensors, told, found.x)
    except (Undecided, LinAlgError) as error:
        return failed(task, message, str(error))
    x = found.x.reshape(-1, *task.input_shape).to(params.dtype)
    (own,) = gradients(task, params, x[None], one_hot(y, task.classes).to(params.dtype)[None])
    if not bool(own.isfinite().all()) or _unexplained(task, own, target) > _UNEXPLAINED:
        return failed(task, message, _why(message), found.drawn)
    return Guess(x, y, float((own - target).square().sum()), found.drawn)


def _why(message: Message) -> str:
    """Why what was found is no batch."""
    moved = f", or too many were active at some of {message.steps} steps" if message.steps > 1 else ""
    return f"what was found does not explain the gradient: too few units are inactive for one{moved}; map needs none"


def _unexplained(task: Task, own: Tensor, target: Tensor) -> float:
    """Squared sine of the angle between two gradients, of the tensor where it is largest.

    A common factor, as of a clip, is no matter. One tensor at a time, for the last layer's often outweighs the first's.
    """
    shares = []
    for one, other in zip(task.layout.split(own.double()), task.layout.split(target.double()), strict=True):
        scale = one.square().sum() * other.square().sum()
        equal = float(torch.equal(one, other))
        shares.append(float((one * other).sum().square() / scale) if scale > 0 else equal)
    return 1 - min(shares)


def _labels(tensors: list[Tensor], told: list[Tensor], x: Tensor) -> Tensor:
    """[b] int64, the label of each input x [b, n] behind a dense stack whose tensors have the told gradients.

    The last layer's gradient is the sum over the images of p - [y = i], times the layer's input h, which is known: a
    linear system for each p - [y = i], up to a factor. Its one negative entry is the label.
    """
    h = x
    for weight, bias in zip(tensors[:-2:2], tensors[1:-2:2], strict=True):
        h = relu(linear(h, weight, bias))
    inputs = torch.cat([h, h.new_ones(len(h), 1)], dim=1)
    rows = torch.cat([told[-2], told[-1][:, None]], dim=1)
    # gelsd: h of images that a layer does not tell apart are dependent
    errors: Tensor = torch.linalg.lstsq(inputs.T, rows.T, driver="gelsd").solution
    return errors.argmin(dim=1)
