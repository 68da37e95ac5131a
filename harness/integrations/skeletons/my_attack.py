"""An attack of your own: search for images whose gradient matches the received gradient.

It runs unchanged. Edit it step by step, and after each step run

    leakgauge doctor my_attack.py
    leakgauge run my_attack.toml -o runs/my_attack --allow-code
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from leakgauge import Attack, Guess, Key, Observation, Reconstruction, Round, positive, rng
from leakgauge.testing import check_attack


@dataclass(frozen=True)
class MyAttack(Attack):
    """Matches the gradient by L-BFGS, over images and soft labels.

    The fields are the parameters: a study sets them by name, the command line by `--set steps=50`.

    Args:
        steps: steps of the search, for each victim.
        restarts: random starts; the guess whose gradient fits best is returned.
    """

    kind: ClassVar[str] = "reconstruction"  # or another kind: see `Attack.kind`

    steps: int = 200
    restarts: int = 2

    def __post_init__(self) -> None:
        positive(steps=self.steps, restarts=self.restarts)

    @property
    def needs(self) -> frozenset[str]:
        """What the adversary must see; a study refuses other adversaries. The names are in `core.threats.SEES`."""
        return frozenset({"messages", "models"})

    def run(self, seen: Observation, key: Key) -> Reconstruction:
        """One guess for each victim. `seen` is all that the adversary knows; the truth is not in it."""
        assert seen.messages is not None  # by `needs`
        assert seen.model is not None
        here = Round(seen.defense, seen.setting, seen.model.state, seen.model.round)
        guesses = []
        for number, message in enumerate(seen.messages):
            # the update that the message reveals; clients that train for several steps send it instead of a gradient
            gradient = here.read(message)
            if seen.setting.sends == "update":
                gradient = -gradient / (seen.lr * message.steps)
            starts = range(self.restarts)
            found = [self._search(seen, gradient, message.images, key.child(number, start)) for start in starts]
            # the truth is unknown, so the attack's own objective decides; it is infinite for a failed search
            guesses.append(min(found, key=lambda guess: guess.objective))
        return Reconstruction(tuple(guesses))

    def _search(self, seen: Observation, gradient: Tensor, images: int, key: Key) -> Guess:
        """The guess from one random start."""
        assert seen.model is not None
        task, params = seen.task, seen.model.params.clone().requires_grad_()
        x = rng.uniform(key.child("x"), (images, *task.input_shape)).requires_grad_()
        scores = rng.normal(key.child("y"), (images, task.classes)).requires_grad_()
        size = gradient.square().sum().clamp(min=1e-12)
        search = torch.optim.LBFGS([x, scores], max_iter=self.steps, line_search_fn="strong_wolfe")

        def misfit() -> Tensor:
            """Squared distance of the gradients over the received one's; sets the slopes of x and scores."""
            (own,) = torch.autograd.grad(task.loss(params, x, scores.softmax(1)), params, create_graph=True)
            off = (own - gradient).square().sum() / size
            x.grad, scores.grad = torch.autograd.grad(off, (x, scores))
            return off.detach()

        if params.isfinite().all():  # of a training that did not diverge
            search.step(misfit)  # type: ignore[no-untyped-call]  # of torch
        objective = float(misfit())
        x, y = x.detach(), scores.detach().argmax(1)
        if not (torch.isfinite(x).all() and objective < float("inf")):
            # never raise for one victim: state why there is no guess, and the other victims still count
            return Guess(torch.zeros_like(x), y, float("inf"), self.steps, failure="the search diverged")
        return Guess(x.clamp(0, 1), y, objective, self.steps)


def test_the_attack_passes_every_check() -> None:
    """`pytest my_attack.py` runs it: the checks of `leakgauge doctor`, with an error that lists what is wrong."""
    check_attack(MyAttack)
