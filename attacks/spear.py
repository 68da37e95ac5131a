"""SPEAR: recovers the exact small batch behind the gradient of a ReLU network, without a search over pixels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.linalg import LinAlgError  # type: ignore[attr-defined]  # public, but not listed in __all__
from torch.nn.functional import linear, one_hot, relu

from leakgauge.attacks._engine.objective import received_gradients
from leakgauge.attacks._engine.reconstruct import failed, unusable
from leakgauge.attacks._solve.closed_form import dense_stack_of
from leakgauge.attacks._solve.spear import FirstLayer, Undecided, find
from leakgauge.harness.core.contract import Attack, Guess, Message, Observation, Reconstruction, Task
from leakgauge.harness.core.rng import Key
from leakgauge.harness.core.vec import Vector
from leakgauge.harness.learn.gradients import gradients
from leakgauge.harness.learn.tasks import ModelTask

_UNEXPLAINED = 0.5
"""Largest share of a tensor of the received gradient that the batch may leave unexplained, up to a factor: exact
batches left at most 1e-11, batches with some correct images 0.03 to 0.57, chance batches 0.6 to 1, one of them 0.38."""


@dataclass(frozen=True)
class Spear(Attack):
    """Recovers exact batches behind a dense ReLU network from the low rank and zeros of its first layer's gradient.

    Must know: one message of each victim, its number of images (public), and the model of its round: at least two dense
    layers with ReLU between them (`mlp`, `mlp-small`); a server or an eavesdropper does. Without the shared key, it
    uses an outsider's estimate. The defense's estimate is treated as the gradient itself. A common factor, for example
    from a clip, changes no image.

    Cannot: withstand more than slight noise, or find an image that activates nearly all units, two similar images, or
    an image that leaves no trace in the gradient. `map` attacks these cases and other models. An update of several
    full-batch steps on few images is solved if enough units stay inactive; its objective is then that of the
    first-order approximation, which is not small.

    Practical up to 10 images behind a fresh `mlp`, fewer behind a trained one, whose units are active more often
    (`docs/attacks.md` has counts). A batch that is not found takes 3 to 15 s.

    Edge cases, each a guess with a `failure`: a gradient or model that is zero or not finite; fewer directions in the
    gradient than images; fewer units than images; no hidden layer; a batch that does not explain the gradient. A batch
    with some wrong images is returned if it explains more than half of each tensor; its objective shows it.

    Args:
        samples: maximum number of sets of rows that are drawn per victim; `evaluations` of the guess is the number
            drawn.

    Raises:
        ValueError: samples < 1; in `run`: a loss that is not softmax cross-entropy.

    Source: Dimitrov et al. 2024, "SPEAR: exact gradient inversion of batches in federated learning". Differs: see
        `attacks._solve.spear`; the labels are solved from the last layer's gradient.
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

    def at_once(self, dim: int) -> int | None:
        """One: no victim needs another."""
        return 1

    def run(self, observation: Observation, key: Key) -> Reconstruction:
        """Inputs, not clipped, each with its label; the objective is the squared distance of the gradients."""
        (messages, model, _), targets = observation.observed_rounds[0], received_gradients(observation)
        task, guesses, refusal = observation.task, [], _refusal(observation.task, model.params)
        for message, target in zip(messages, targets, strict=True):
            if failure := refusal or unusable(target):
                guesses.append(failed(task, message, failure))
                continue
            try:
                rows = key.child("rows", message.sender.number)
                guesses.append(_guess(task, model.params, message, target, self.samples, rows))
            except (Undecided, LinAlgError) as error:
                guesses.append(failed(task, message, str(error)))
        return Reconstruction(tuple(guesses))


def _refusal(task: Task, params: Vector) -> str:
    """Why the attack cannot handle messages behind this model; an empty string if it can."""
    if not bool(params.isfinite().all()):
        return "the model is not finite"
    if dense_stack_of(task) is None:
        return "expected a model of dense layers with ReLU, got another model; use map instead"
    if len(task.layout.shapes) == 2:
        return "expected a model with a hidden layer, got none; use map instead, or analytic for one image"
    return ""


def _guess(task: Task, params: Vector, message: Message, target: Tensor, samples: int, key: Key) -> Guess:
    """The batch behind one message; the objective is its distance to the received gradient."""
    structure = dense_stack_of(task)
    assert structure is not None  # else `_refusal` gave a reason
    assert isinstance(task, ModelTask)
    tensors, received = (structure.split(vector.double()) for vector in (params, target))
    batch = find(FirstLayer(*tensors[:2], *received[:2]), message.images, samples, key)
    y = _labels(tensors, received, batch.x)
    x = task.model.scale.stored(batch.x.reshape(-1, *task.input_shape)).to(params.dtype)
    (own,) = gradients(task, params, x[None], one_hot(y, task.classes).to(params.dtype)[None])
    if not bool(own.isfinite().all()) or _unexplained(task, own, target) > _UNEXPLAINED:
        moved = f", or too many are active at some of the {message.steps} steps" if message.steps > 1 else ""
        why = f"too few units of the first layer are inactive for an image{moved}; use map instead"
        return failed(task, message, f"the images found do not explain the gradient: {why}", batch.drawn)
    return Guess(x, y, float((own - target).square().sum()), batch.drawn)


def _unexplained(task: Task, own: Tensor, target: Tensor) -> float:
    """Squared sine of the angle between two gradients, for the tensor where it is largest.

    A common factor, for example from a clip, has no effect. Tensors are compared one by one, because the last layer
    often outweighs the first.
    """
    shares = []
    for explained, received in zip(task.layout.split(own.double()), task.layout.split(target.double()), strict=True):
        scale = explained.square().sum() * received.square().sum()
        equal = float(torch.equal(explained, received))
        shares.append(float((explained * received).sum().square() / scale) if scale > 0 else equal)
    return 1 - min(shares)


def _labels(tensors: Sequence[Tensor], received: Sequence[Tensor], x: Tensor) -> Tensor:
    """[b] int64: the label of each input x [b, n] behind a dense stack whose tensors received these gradients.

    The last layer's gradient is the sum over the images of p - [y = i] times the layer's input h, which is known. This
    is a linear system for the p - [y = i] of each image, up to a factor; the one negative entry is at the label.
    """
    h = x
    for weight, bias in zip(tensors[:-2:2], tensors[1:-2:2], strict=True):
        h = relu(linear(h, weight, bias))
    inputs = torch.cat([h, h.new_ones(len(h), 1)], dim=1)
    rows = torch.cat([received[-2], received[-1][:, None]], dim=1)
    # gelsd, because the h of images that a layer does not separate are linearly dependent
    errors: Tensor = torch.linalg.lstsq(inputs.T, rows.T, driver="gelsd").solution
    return errors.argmin(dim=1)
