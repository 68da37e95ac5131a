"""The image behind a gradient, solved for instead of searched."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor
from torch.linalg import LinAlgError  # type: ignore[attr-defined]  # public, but not listed in __all__
from torch.nn.functional import one_hot

from leakgauge.attacks._engine.failure import failed
from leakgauge.attacks._engine.matching import gradients
from leakgauge.attacks._engine.objective import received_gradients
from leakgauge.attacks._labels.infer import restore
from leakgauge.attacks._solve.closed_form import RIDGE, ClosedForm, Unsolvable, closed_form
from leakgauge.attacks._solve.layerwise import Underdetermined
from leakgauge.harness.core.contract import Attack, Guess, Message, Observation, Reconstruction, Task
from leakgauge.harness.core.rng import Key
from leakgauge.harness.core.vec import Vector


@dataclass(frozen=True)
class Analytic(Attack):
    """Closed form: one image's input, layer by layer from the last, by linear equations; no start, no iteration.

    Must know: one message of each victim, of one image, and the model it trained from: `lenet-dlg`, or dense layers
    with ReLU between them (`linear`, `mlp`, `mlp-small`). So for a server or an eavesdropper; without the shared key,
    the estimate is an outsider's. It takes the defense's estimate for the gradient itself. A common factor, as of a
    clip, changes nothing.

    Cannot: batches, and models with max-pooling, group norm or ReLU convolutions, for which it says so; `map` and
    `idlg` do those. Withstand noise behind convolutions: each layer magnifies it. For dense stacks, noise is averaged
    over the first layer's units. Of an update it takes the mean step for the gradient, exact for one step.

    On models of a federation, fresh and after 100 rounds (study `trained-models`: 8 photographs, undefended, mean
    SSIM, floor 0.25): 1.000 and 1.000 behind sigmoid with stride and behind dense ReLU layers.

    Edge cases, each a guess with a `failure`: a gradient that is zero, not finite or of no single label; no active unit
    in a dense first layer; an image that the model does not determine (`lenet-dlg` above 38 x 38); a model that is
    not finite.

    Args:
        ridge: added to the squares of a first convolution's output equations, as a share of their largest. One
            default, for noise-free float32 gradients; 1e-12 to 1e-8 give the same images.

    Raises:
        ValueError: ridge is not in (0, 1); in `run`, a loss that is not softmax cross-entropy.

    Source: Zhu and Blaschko 2021 (R-GAP), for sigmoid and with weighed equations, see `attacks._solve.layerwise`; dense
        layers: Phong et al. 2017 and Geiping et al. 2020, Prop. 3.1.
    """

    kind: ClassVar[str] = "reconstruction"

    ridge: float = RIDGE

    def __post_init__(self) -> None:
        if not 0 < self.ridge < 1:
            raise ValueError(f"expected 0 < ridge < 1, got ridge={self.ridge}")

    @property
    def needs(self) -> frozenset[str]:
        """Messages and the round's model."""
        return frozenset({"messages", "models"})

    def run(self, seen: Observation, key: Key) -> Reconstruction:
        """Raw inputs, not clipped, and the labels; the objective is the squared distance of the gradients."""
        assert seen.model is not None
        assert seen.messages is not None
        targets, params = received_gradients(seen), seen.model.params
        finite = bool(params.isfinite().all())
        # once for all victims, as what it prepares depends on the model only
        form = closed_form(seen.task, params, self.ridge) if finite else None
        guesses = []
        for message, target in zip(seen.messages, targets, strict=True):
            failure = _refusal(message, target, finite, form)
            if failure or form is None:
                guesses.append(failed(seen.task, message, failure))
            else:
                guesses.append(_guess(seen.task, params, form, message, target, key.child("dummies")))
        return Reconstruction(tuple(guesses))


def _refusal(message: Message, target: Tensor, finite: bool, form: ClosedForm | None) -> str:
    """Why a message is not attacked, or nothing."""
    if not finite:
        return "the model is not finite"
    if form is None:
        return "the closed form does not cover this model, only lenet-dlg and dense ReLU layers; map and idlg do"
    if message.images != 1:
        return f"the closed form takes one image a message, and this one has {message.images}; map and idlg take more"
    if not bool(target.isfinite().all()):
        return "the gradient is not finite"
    return "" if bool(target.any()) else "the gradient is zero"


def _guess(task: Task, params: Vector, form: ClosedForm, message: Message, target: Tensor, key: Key) -> Guess:
    """The solution for one message, and how well it explains what was received."""
    (label,) = restore(task, params, target[None], [1], key)
    try:
        _check_label(task.layout.split(target)[-1])
        x = form.solve(target.double())[None].to(params.dtype)
    except (Unsolvable, Underdetermined, LinAlgError) as error:
        return failed(task, message, str(error))
    if not bool(x.isfinite().all()):
        return failed(task, message, "the equations have no finite solution")
    told = gradients(task, params, x[None], one_hot(label, task.classes).to(params.dtype)[None])
    return Guess(x, label, float((told[0] - target).square().sum()), 1)


def _check_label(bias: Tensor) -> None:
    """Refuse a last bias' gradient p - [y = i] that has no negative entry: it is of no label."""
    if not bool((bias < 0).any()):
        raise Unsolvable("no entry of the last bias' gradient is negative, as it would be for an image's label")
