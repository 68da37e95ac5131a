"""Gradient matching: find inputs whose gradient explains what each victim sent.

The engine of the attacks that differ only in where the labels come from.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from attacks._failure import failed, unusable
from attacks._image_prior import ImagePrior
from attacks._lbfgs import Minima, Stop, minimize
from harness import rng
from harness.contract import Guess, Likelihood, Message, Observation, Snapshot, Task
from harness.matching import Evaluation, Function, Misfit, SquaredDistance, evaluator, unpack
from harness.rng import Key

Objective = Literal["l2", "likelihood"]
Start = Literal["normal", "uniform"]

_TOLERANCE = 3e-9
"""Share of a zero gradient's misfit at which a search ends: of 24 photographs behind the LeNet of DLG the raw MSE was
then 3e-6 to 5e-4. Single precision goes on to about 1e-10, for half as many evaluations again."""

_EXPLAINED = 1e-7
"""Share at which a target counts as explained, so that another start would find the same inputs again. Above the
tolerance, which soft labels often miss: they reach a corner of the simplex ever more slowly."""

_LIKELIHOODS = 32
"""Likelihoods kept; one decodes the messages of a chunk, and chunks change when a victim leaves the batch."""


@dataclass(frozen=True)
class Search:
    """How hard, and from where, is searched.

    Attributes:
        restarts: at most; a victim whose target is explained is not started again.
        evaluations: of the objective and its gradient, for one victim and restart, at most.
        objective: `l2`: squared distance of gradients; `likelihood`: what the defence says of the candidate's update.
        start: law of the first dummy inputs: standard normal, or uniform in [0, 1].
        prior: of the inputs, added to the objective.
        scale: factor of the squared distance, so that it can be weighed against a prior.
        decrease: share of the objective that the last evaluations must have won, see `Stop`. 3e-2: the slowest of
            the undefended photographs still wins 0.1; against noise it saves two thirds that would fit the noise.
    """

    restarts: int
    evaluations: int
    objective: Objective
    start: Start
    prior: ImagePrior | None = None
    scale: float = 1.0
    decrease: float = 3e-2

    def __post_init__(self) -> None:
        for name, value in (("restarts", self.restarts), ("evaluations", self.evaluations)):
            if value < 1:
                raise ValueError(f"expected {name} >= 1, got {name}={value}")
        if self.objective not in ("l2", "likelihood"):
            raise ValueError(f"expected objective 'l2' or 'likelihood', got {self.objective!r}")
        if self.start not in ("normal", "uniform"):
            raise ValueError(f"expected start 'normal' or 'uniform', got {self.start!r}")


def received_gradients(seen: Observation) -> Tensor:
    """[n, d]: the gradient that each message tells of, by the defence's own estimate.

    An update of several steps is taken for one step of their joint length, -update / (lr * steps): the gradient at the
    round's model up to first order in lr * steps.

    Raises:
        ValueError: the loss is not softmax cross-entropy.

    Source: Geiping et al. 2020, sec. 6 attacks updates by unrolling the steps; this is its first approximation.
    """
    if not seen.task.softmax:
        raise ValueError("expected a softmax cross-entropy loss for gradient matching, got another")
    model, messages = _sent(seen)
    estimates = [
        seen.defense.estimate(
            model.state, message.wire, sender=message.sender, shared=message.shared, setting=seen.setting
        )
        for message in messages
    ]
    return torch.stack(estimates) / _update_per_gradient(seen, messages)[:, None]


def match(
    seen: Observation, targets: Tensor, labels: Sequence[Tensor] | None, search: Search, key: Key
) -> tuple[Guess, ...]:
    """One guess a victim.

    Args:
        targets: [n, d], see `received_gradients`.
        labels: [b] int64 of each victim; None: soft labels are searched together with the inputs.
        key: draws the starts; those of a victim do not depend on the others.

    Guarantees:
        The restart with the lowest objective is told, never one that is not finite.
        A target that is zero or not finite is a failure, and costs nothing.
    """
    _, messages = _sent(seen)
    guesses = [failed(seen.task, message, unusable(target)) for message, target in zip(messages, targets, strict=True)]
    usable = [i for i, guess in enumerate(guesses) if guess.failure == ""]
    for images in sorted({messages[i].images for i in usable}):
        victims = [i for i in usable if messages[i].images == images]
        known = None if labels is None else torch.stack([labels[i] for i in victims])
        group = _Group(seen, tuple(messages[i] for i in victims), targets[victims], known, search)
        for i, guess in zip(victims, group.run(key), strict=True):
            guesses[i] = guess
    return tuple(guesses)


@dataclass(frozen=True, eq=False)
class _Group:
    """Victims with equally many images, attacked side by side.

    targets: [n, d]; labels: [n, b] int64 or None.
    """

    seen: Observation
    messages: tuple[Message, ...]
    targets: Tensor
    labels: Tensor | None
    search: Search

    def run(self, key: Key) -> list[Guess]:
        """All restarts; the best of each victim."""
        n, task = len(self.messages), self.seen.task
        function, misfit = self._function()
        nothing = misfit(torch.zeros_like(self.targets), torch.arange(n))
        # a negative log-likelihood below zero has no natural end
        tolerance, explained = (
            torch.where(nothing > 0, share * nothing, -torch.inf) for share in (_TOLERANCE, _EXPLAINED)
        )
        best = Minima(self._starts(key, 0), nothing.new_full((n,), torch.inf), torch.zeros(n, dtype=torch.int64), ())
        pending = torch.arange(n)
        for restart in range(self.search.restarts):
            stop = Stop(self.search.evaluations, tolerance[pending], decrease=self.search.decrease)
            found = minimize(_Subset(function, pending), self._starts(key, restart)[pending], stop)
            better = found.value < best.value[pending]
            rows = pending[better]
            best.x[rows], best.value[rows] = found.x[better], found.value[better]
            best.evaluations[pending] += found.evaluations
            pending = pending[best.value[pending] > explained[pending]]
            if not len(pending):
                break
        x, logits = unpack(task, best.x, self.messages[0].images)
        labels = logits.argmax(dim=2) if self.labels is None else self.labels
        return [
            Guess(x[i], labels[i], float(best.value[i]), int(best.evaluations[i]))
            if best.value[i].isfinite()
            else failed(self.seen.task, self.messages[i], "no restart had a finite objective", int(best.evaluations[i]))
            for i in range(n)
        ]

    def _function(self) -> tuple[Function, Misfit]:
        """The objective of every victim, and its misfit alone."""
        model, _ = _sent(self.seen)
        misfit: Misfit = SquaredDistance(self.targets, self.search.scale)
        if self.search.objective == "likelihood":
            misfit = _Unlikelihood(self.seen, self.messages)
        task, labels = self.seen.task, None
        if self.labels is not None:
            labels = one_hot(self.labels, task.classes).to(model.params.dtype)
        images = self.messages[0].images
        function = evaluator(task, model.params, misfit, images=images, labels=labels)
        if self.search.prior is not None:
            function = _WithPrior(function, self.search.prior, task, images)
        return function, misfit

    def _starts(self, key: Key, restart: int) -> Tensor:
        """[n, D]: every victim's first dummy inputs, and label logits where those are searched too."""
        draw = rng.normal if self.search.start == "normal" else rng.uniform
        task, images = self.seen.task, self.messages[0].images
        rows = []
        for message in self.messages:
            mine = key.child("start", message.sender.number, restart)
            x = draw(mine.child("inputs"), (images, *task.input_shape)).flatten()
            logits = rng.normal(mine.child("labels"), (images, task.classes)).flatten()
            rows.append(x if self.labels is not None else torch.cat([x, logits]))
        return torch.stack(rows)


@dataclass(frozen=True, eq=False)
class _Subset:
    """A function of some of the instances, numbered anew."""

    function: Function
    rows: Tensor

    def __call__(self, candidates: Tensor, instances: Tensor) -> Evaluation:
        return self.function(candidates, self.rows[instances])


@dataclass(frozen=True, eq=False)
class _WithPrior:
    """An objective with a prior of the inputs added."""

    function: Function
    prior: ImagePrior
    task: Task
    images: int

    def __call__(self, candidates: Tensor, instances: Tensor) -> Evaluation:
        value, gradient = self.function(candidates, instances)
        z = candidates.detach().requires_grad_()
        believed = self.prior(unpack(self.task, z, self.images)[0])
        (slope,) = torch.autograd.grad(believed.sum(), z)
        return Evaluation(value + believed.detach(), gradient + slope)


@dataclass(frozen=True, eq=False)
class _Unlikelihood:
    """-log p(received | the update that a gradient makes), by the defence itself."""

    seen: Observation
    messages: tuple[Message, ...]
    kept: dict[tuple[int, ...], Likelihood] = field(default_factory=dict)

    def __call__(self, gradients: Tensor, instances: Tensor) -> Tensor:
        members = tuple(instances.tolist())
        if members not in self.kept:
            if len(self.kept) >= _LIKELIHOODS:
                self.kept.clear()
            self.kept[members] = self._likelihood([self.messages[i] for i in members])
        scale = _update_per_gradient(self.seen, [self.messages[i] for i in members])
        return self.kept[members](scale[:, None] * gradients)

    def _likelihood(self, messages: Sequence[Message]) -> Likelihood:
        """Of these messages together."""
        model, _ = _sent(self.seen)
        shared = [message.shared for message in messages if message.shared is not None]
        return self.seen.defense.likelihood(
            model.state,
            [message.wire for message in messages],
            senders=[message.sender for message in messages],
            shared=shared if len(shared) == len(messages) else None,
            setting=self.seen.setting,
        )


def _sent(seen: Observation) -> tuple[Snapshot, tuple[Message, ...]]:
    """The round's model and the victims' messages, which `needs` has asked for."""
    assert seen.model is not None
    assert seen.messages is not None
    return seen.model, seen.messages


def _update_per_gradient(seen: Observation, messages: Sequence[Message]) -> Tensor:
    """[n]: what a gradient is multiplied with to give the update of each message."""
    gradient = seen.setting.sends == "gradient"
    return torch.tensor([1.0 if gradient else -seen.lr * message.steps for message in messages])
