"""Inverting gradients: matches the gradient's direction with smooth images, by signed Adam."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from leakgauge.attacks._engine.labels import ByLabels, LabelSource, check_source, labels_of
from leakgauge.attacks._engine.matching import at_once, unpack
from leakgauge.attacks._engine.objective import received_gradients
from leakgauge.attacks._engine.prior import check_prior, mapped, near_center, prior_of
from leakgauge.attacks._engine.reconstruct import Search, Start, alike, in_order, searched
from leakgauge.attacks._search.direction import SMOOTHNESS, STEP, Direction
from leakgauge.harness.core import rng
from leakgauge.harness.core.contract import Guess, Message, Observation, Reconstruction, Task
from leakgauge.harness.core.rng import Key


@dataclass(frozen=True)
class InvertingGradients(ByLabels):
    """Minimizes the cosine distance of the gradients plus total variation, by signed Adam, on images in [0, 1].

    Must know: one message of each victim, the model of its round, that inputs of shape [c, h, w] are images in [0, 1],
    and data of the same kind to infer the labels of batches; a server or an eavesdropper does. Without the shared key,
    it uses an outsider's estimate. It ignores the defense except to read messages. It also ignores the length of the
    gradient, which a clip changes.

    Cannot: separate inputs with parallel gradients, or exploit that some pixels are known better than others, because
    all its steps have the same size. Under noise, it also fits the noise, as far as the images stay smooth. Wrongly
    inferred labels are never corrected. An update is treated as its mean step.

    The study `trained-models` shows the results by model, before and after training (`docs/attacks.md`).

    Args:
        evaluations: maximum number of evaluations of the objective and its gradient, per victim and restart. The source
            uses 4800.
        restarts: number of random starts, run side by side; the result with the lowest objective is returned.
        lr: size of the first steps, in units of the pixel range; it is divided by ten after 3/8, 5/8 and 7/8 of all
            steps.
        tv: weight of the mean difference of neighboring pixels, horizontal plus vertical; the distance is in [0, 2]. It
            was set once, on 8 photographs behind the LeNet of DLG, not per image or defense (`docs/attacks.md`).
        labels: `inferred`, or `given`: the true labels, which a study must grant.
        start: distribution of the first dummy inputs: `uniform` (in [0, 1]) or `normal` (standard, cut to [0, 1]).
        prior: `tv`: total variation, as published; `gaussian` or `module:function`: the prior of `map`, with the angle
            instead of the cosine, and Adam's own steps in the prior's coordinates. `lr` and `tv` then have no effect.

    Raises:
        ValueError: a parameter is out of range; in `run`: labels that cannot be inferred, see
            `attacks._engine.labels.restore`, or of a regression.

    Source: Geiping et al. 2020, "Inverting gradients: how easy is it to break privacy in federated learning?", eq. (4)
        and sec. 4. Differs: returns the best iterate instead of the last; chooses among the restarts by the objective,
        not by the distance alone; rounds the tip of the total variation; infers labels of several images
        (`attacks._engine.labels`); does not standardize pixels, and scales `lr` accordingly.
    """

    evaluations: int = 2400
    restarts: int = 1
    lr: float = STEP
    tv: float = SMOOTHNESS
    labels: LabelSource = "inferred"
    start: Start = "uniform"
    prior: str = "tv"

    def __post_init__(self) -> None:
        Search(self.restarts, self.evaluations, self.start)
        Direction.smooth(self.evaluations, self.lr, self.tv)
        check_prior(self.prior)
        check_source(self.labels)

    def at_once(self, dim: int) -> int | None:
        """As many victims as one search takes at once."""
        return at_once(dim)

    def run(self, observation: Observation, key: Key) -> Reconstruction:
        """Inputs and labels; only images are clamped to [0, 1]."""
        task, messages, guesses = observation.task, observation.observed_rounds[0].messages, dict[int, Guess]()
        gradients = received_gradients(observation, numbers=self.labels == "given")
        labels = labels_of(observation, gradients, self.labels, key.child("dummies"))
        direction = Direction.smooth(self.evaluations, self.lr, self.tv)
        if self.prior != "tv":
            direction = Direction.of(prior_of(self.prior, observation), self.evaluations)
        prior = direction.prior
        for (images,), victims in alike(gradients, ((message.images,) for message in messages)):
            chosen = [messages[i] for i in victims]
            sought = gradients[victims].to(observation.device)
            known = torch.stack([labels[i] for i in victims])
            starts = [self._starts(task, chosen, key, i).to(sought) for i in range(self.restarts)]
            if prior.centered:
                starts = [near_center(mapped(x, images, 0, prior.coordinates), i) for i, x in enumerate(starts)]
            placed = observation.placed(), sought, known.to(observation.device)
            minima = direction.search(*placed, torch.stack(starts, 1))
            value, best = minima.value.view(-1, self.restarts).cpu().min(dim=1)
            inputs = mapped(minima.x, images, 0, prior.inputs).cpu()
            x, _ = unpack(task, inputs[self.restarts * torch.arange(len(victims)) + best], images)
            used = minima.evaluations.view(-1, self.restarts).sum(dim=1)
            guesses |= zip(victims, searched(task, chosen, x, known, value.tolist(), used.tolist()), strict=True)
        words = "" if self.prior == "tv" else prior.words
        return Reconstruction(in_order(task, messages, gradients, guesses), words)

    def _starts(self, task: Task, messages: Sequence[Message], key: Key, restart: int) -> Tensor:
        draw = rng.normal if self.start == "normal" else rng.uniform
        keys = [key.child("start", message.sender.number, restart) for message in messages]
        return torch.stack([draw(own, (messages[0].images, *task.input_shape)).flatten() for own in keys])
