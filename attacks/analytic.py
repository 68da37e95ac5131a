"""Recovers the image behind a gradient by solving equations instead of searching."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.linalg import LinAlgError  # type: ignore[attr-defined]  # public, but not listed in __all__

from leakgauge.attacks._engine.closed_form import RIDGE, ClosedForm, Unsolvable, closed_form
from leakgauge.attacks._engine.labels import restore
from leakgauge.attacks._engine.last_layer import last_layer
from leakgauge.attacks._engine.objective import received_gradients
from leakgauge.attacks._engine.reconstruct import failed, unusable
from leakgauge.attacks._search.features import settled
from leakgauge.harness.core.contract import Attack, Guess, Message, Observation, Reconstruction, Task
from leakgauge.harness.core.rng import Key
from leakgauge.harness.core.vec import Vector
from leakgauge.harness.learn.gradients import gradients, targets_of


@dataclass(frozen=True)
class Analytic(Attack):
    """Solves for a message's single image by linear equations, layer by layer from the last, without a search.

    Must know: one message of each victim, with one image, and the model of its round: `lenet-dlg`, or any model whose
    first layer is dense with a bias (`linear`, `mlp`, `mlp-small`), or a user's network that projects patches of the
    image and adds a trained position to each (a vision transformer); a server or an eavesdropper does. Without the
    shared key, it uses an outsider's estimate. The defense's estimate is treated as the gradient itself; for patches,
    the gradients also show the noise. A common factor, for example from a clip, changes nothing.

    Cannot: solve for batches, or behind max-pooling, group norm or ReLU convolutions; it then returns a `failure`, and
    `map` and `idlg` can be used. Each convolution magnifies the noise; a dense first layer averages it over its units.
    An update is treated as its mean step, which is exact for one step.

    Edge cases, each a guess with a `failure`: a gradient that is zero, not finite, or not of a single label; no active
    unit in a dense first layer; an image that the model does not determine (`lenet-dlg` above 38 x 38); positions whose
    gradient is zero, as behind a head of zeros; a non-finite model. A projection narrower than the number of patches
    leaves the image open in part; the guess is then the likeliest smooth one.

    Args:
        ridge: added to the squares of a first convolution's output equations, as a share of the largest square. The
            default is for noise-free float32 gradients; 1e-12 to 1e-8 give the same images.

    Raises:
        ValueError: ridge is not in (0, 1); in `run`: a last layer that is not dense.

    Source: Zhu and Blaschko 2021 (R-GAP), for sigmoid and with weighted equations (see `attacks._engine.closed_form`);
        for dense layers, Phong et al. 2017 and Geiping et al. 2020, Prop. 3.1; for patches, Lu et al. 2022 (APRIL).
    """

    kind: ClassVar[str] = "reconstruction"
    needs: ClassVar[frozenset[str]] = frozenset({"messages", "models"})

    ridge: float = RIDGE

    def __post_init__(self) -> None:
        if not 0 < self.ridge < 1:
            raise ValueError(f"expected 0 < ridge < 1, got ridge={self.ridge}")

    def run(self, observation: Observation, key: Key) -> Reconstruction:
        """Inputs, not clipped, and their labels; the objective is the squared distance of the gradients."""
        messages, model, _ = observation.observed_rounds[0]
        targets = settled(observation, observation.observed_rounds[0], received_gradients(observation, numbers=True))
        task, params, guesses = observation.task, model.params, []
        # prepared once for all victims, because it depends only on the model
        form = closed_form(task, params, self.ridge) if bool(params.isfinite().all()) else None
        for message, target in zip(messages, targets, strict=True):
            try:
                x = _solved(task, params, form, message, target)
                guesses.append(_guess(task, params, x, target, key.child("dummies")))
            except (Unsolvable, LinAlgError) as error:
                guesses.append(failed(task, message, str(error)))
        return Reconstruction(tuple(guesses))


def _solved(task: Task, params: Vector, form: ClosedForm | None, message: Message, target: Tensor) -> Tensor:
    """[1, *input_shape]: the image behind one message.

    Raises:
        Unsolvable, LinAlgError: there is none; the text states why.
    """
    if not bool(params.isfinite().all()):
        raise Unsolvable("the model is not finite")
    if form is None:
        expected = "expected lenet-dlg or a dense first layer with trained bias, got another model"
        raise Unsolvable(f"{expected} (nor patches with trained positions); use map or idlg instead")
    if message.images != 1:
        raise Unsolvable(f"expected one image per message, got {message.images}; use map or idlg instead")
    if failure := unusable(target):
        raise Unsolvable(failure)
    # the last bias's gradient is p - [y = i]
    known = task.bounded and not task.numbers
    if known and not bool((task.layout.split(target)[last_layer(task).stop - 1] < 0).any()):
        raise Unsolvable("the last bias's gradient has no negative entry, but every label causes one")
    x = form.solve(target.double())[None].to(params.dtype)
    if not bool(x.isfinite().all()):
        raise Unsolvable("the equations have no finite solution")
    return x


def _guess(task: Task, params: Vector, x: Tensor, target: Tensor, key: Key) -> Guess:
    if task.numbers and task.classes == 1 and not task.bounded:  # the gradient is 2 (score - y) times the score's own
        score = task.outputs(params, x)[:, 0]
        (own,) = gradients(task, params, x[None], (score - 0.5)[None])
        label = score - own @ target / own.square().sum() / 2
    elif task.numbers:
        label = task.link(task.outputs(params, x)) - last_layer(task).rows(target[None])[..., -1] / task.slope
        label = label.round() if task.bounded else label
        label = label[:, 0] if task.classes == 1 else label
    elif task.softmax:
        (label,) = restore(task, params, target[None], [1], key)
    else:  # the label whose gradient is nearest
        every = targets_of(task, torch.arange(task.classes)[:, None], params.dtype)
        own = gradients(task, params, x.expand(task.classes, *x.shape), every)
        label = (own - target).square().sum(1).argmin()[None]
    (own,) = gradients(task, params, x[None], targets_of(task, label, params.dtype)[None])
    return Guess(x, label, float((own - target).square().sum()), 1)
