"""Inverting gradients: matches the gradient's direction with smooth images, by signed Adam."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from leakgauge.attacks._engine.matching import at_once, unpack
from leakgauge.attacks._engine.objective import received_gradients
from leakgauge.attacks._engine.prior import check_prior, mapped, near_center, needs_of, prior_of
from leakgauge.attacks._engine.reconstruct import Start, failed, unusable
from leakgauge.attacks._labels.infer import ByLabels, LabelSource, check_source, labels_of
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

    On models of a federation, fresh and after 100 rounds (study `trained-models`: 8 photographs, undefended, mean
    SSIM, floor 0.25): sigmoid and stride 0.10 to 0.25, dense ReLU 0.62 and 1.00, one ReLU convolution 1.00 and
    0.81, ReLU with max-pooling 0.09 to 0.27 fresh and 0.45 to 0.47 trained.

    Args:
        evaluations: maximum number of evaluations of the objective and its gradient, per victim and restart. The source
            uses 4800.
        restarts: number of random starts, run side by side; the result with the lowest objective is returned.
        lr: size of the first steps, in units of the pixel range; it is divided by ten after 3/8, 5/8 and 7/8 of all
            steps.
        tv: weight of the mean difference of neighboring pixels, horizontal plus vertical; the distance is in [0, 2]. It
            was set once, on 8 photographs behind the LeNet of DLG, not per image or defense: SSIM 0.82 with 3e-3, 0.80
            with 1e-2, 0.68 with 3e-2; on 8 other photographs 0.81 with 3e-3, 0.38 with 1e-4 and 0.34 with 1e-6.
        labels: `inferred`, or `given`: the true labels, which a study must grant.
        start: law of the first dummy inputs: `uniform` (in [0, 1]) or `normal` (standard, cut to [0, 1]).
        prior: `tv`: total variation, as published; `gaussian` or `module:function`: the prior of `map`, with the angle
            instead of the cosine, and Adam's own steps in the prior's coordinates. `lr` and `tv` then have no effect.

    Raises:
        ValueError: a parameter is out of range; in `run`: a loss that is neither softmax cross-entropy nor, with given
            labels, squared; or, to infer labels, a last layer that is not dense with one row per class.

    Source: Geiping et al. 2020, "Inverting gradients: how easy is it to break privacy in federated learning?", eq. (4)
        and sec. 4. Differs: returns the best iterate instead of the last; chooses among the restarts by the objective,
        not by the distance alone; rounds the tip of the total variation; infers labels of several images
        (`attacks._labels.infer`); does not standardize pixels, and scales `lr` accordingly.
    """

    evaluations: int = 2400
    restarts: int = 1
    lr: float = STEP
    tv: float = SMOOTHNESS
    labels: LabelSource = "inferred"
    start: Start = "uniform"
    prior: str = "tv"

    def __post_init__(self) -> None:
        if self.restarts < 1:
            raise ValueError(f"expected restarts >= 1, got restarts={self.restarts}")
        Direction.smooth(self.evaluations, self.lr, self.tv)
        check_prior(self.prior)
        check_source(self.labels)
        if self.start not in ("normal", "uniform"):
            raise ValueError(f"expected start 'normal' or 'uniform', got {self.start!r}")

    @property
    def needs(self) -> frozenset[str]:
        """What `ByLabels` needs, and auxiliary data for a prior that is fitted to them."""
        return super().needs | needs_of(self.prior)

    def at_once(self, dim: int) -> int | None:
        """As many victims as one search takes at once."""
        return at_once(dim)

    def run(self, observation: Observation, key: Key) -> Reconstruction:
        """Inputs and labels; only images are clamped to [0, 1]."""
        messages, targets = (
            observation.sightings[0].messages,
            received_gradients(observation, numbers=self.labels == "given"),
        )
        labels = labels_of(observation, targets, self.labels, key.child("dummies"))
        guesses = [failed(observation.task, *pair) for pair in zip(messages, map(unusable, targets), strict=True)]
        direction = self._direction(observation)
        usable = [i for i, guess in enumerate(guesses) if guess.failure == ""]
        for images in sorted({messages[i].images for i in usable}):
            victims = [i for i in usable if messages[i].images == images]
            known = torch.stack([labels[i] for i in victims])
            sought = targets[victims].to(observation.device)
            found = self._invert(observation.placed(), direction, victims, sought, known.to(observation.device), key)
            for i, guess in zip(victims, found, strict=True):
                guesses[i] = guess
        return Reconstruction(tuple(guesses), "" if self.prior == "tv" else direction.prior.words)

    def _invert(
        self,
        observation: Observation,
        direction: Direction,
        victims: Sequence[int],
        targets: Tensor,
        labels: Tensor,
        key: Key,
    ) -> list[Guess]:
        """Guesses for victims with labels [n, b]; all restarts run at once."""
        messages = [observation.sightings[0].messages[i] for i in victims]
        n, images = labels.shape
        prior = direction.prior
        starts = [
            torch.stack([self._start(observation.task, message, key, i) for message in messages]).to(targets)
            for i in range(self.restarts)
        ]
        if prior.centered:
            starts = [near_center(mapped(one, images, 0, prior.coordinates), i) for i, one in enumerate(starts)]
        found = direction.search(observation, targets, labels, torch.stack(starts, 1))
        value, restart = found.value.view(n, self.restarts).cpu().min(dim=1)
        inputs = mapped(found.x, images, 0, prior.inputs).cpu()
        x, _ = unpack(observation.task, inputs[self.restarts * torch.arange(n) + restart], images)
        used, labels = found.evaluations.view(n, self.restarts).sum(dim=1).tolist(), labels.cpu()
        return [
            Guess(x[i], labels[i], float(value[i]), used[i])
            if value[i].isfinite()
            else failed(observation.task, message, "no restart had a finite objective", used[i])
            for i, message in enumerate(messages)
        ]

    def _direction(self, observation: Observation) -> Direction:
        """The objective, with a fitted prior if `prior` names one."""
        if self.prior == "tv":
            return Direction.smooth(self.evaluations, self.lr, self.tv)
        return Direction.of(prior_of(self.prior, observation), self.evaluations)

    def _start(self, task: Task, message: Message, key: Key, restart: int) -> Tensor:
        """[D]: a victim's first dummy inputs in one restart."""
        draw = rng.normal if self.start == "normal" else rng.uniform
        return draw(key.child("start", message.sender.number, restart), (message.images, *task.input_shape)).flatten()
