"""What an attacker minimizes: how badly candidate images explain the messages of one round or of several."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from leakgauge.attacks._engine.image_prior import ImagePrior
from leakgauge.attacks._engine.matching import Evaluation, Function, Misfit, SquaredDistance, evaluator, unpack
from leakgauge.attacks._engine.simulate import Local, update_evaluator
from leakgauge.harness.core.contract import (
    Likelihood,
    Message,
    Observation,
    Setting,
    Sighting,
    Task,
    links_of,
)
from leakgauge.harness.federation.round import Round

Kind = Literal["l2", "likelihood"]

_LIKELIHOODS = 32
"""Likelihoods kept; one decodes the messages of a chunk, and chunks change when a victim leaves the batch."""


@dataclass(frozen=True)
class Explains:
    """How messages are explained.

    Attributes:
        kind: `l2`: squared distance to what the defense's own estimate tells; `likelihood`: what the defense says of
            the candidate's update.
        scale: factor of the squared distance of gradients, so that it can be weighed against a prior.
        unroll: follow the client's steps, and the clipping of its records where `likelihood` is asked; otherwise an
            update counts as one step of all steps' length.
        prior: of the inputs, added.
    """

    kind: Kind = "l2"
    scale: float = 1.0
    unroll: bool = False
    prior: ImagePrior | None = None

    def __post_init__(self) -> None:
        if self.kind not in ("l2", "likelihood"):
            raise ValueError(f"expected objective 'l2' or 'likelihood', got {self.kind!r}")


def update_per_gradient(setting: Setting, sighting: Sighting) -> Tensor:
    """[n]: what the mean gradient of its images is multiplied with to give each message's update, to first order.

    A message that the channel added up of several users is the sum of their updates.
    """
    gradient = setting.sends == "gradient"
    return torch.tensor(
        [message.users * (1.0 if gradient else -sighting.lr * message.steps) for message in sighting.messages]
    )


def received_gradients(seen: Observation) -> Tensor:
    """[n, d]: the gradient that each message of the first round tells of, by the defense's own estimate.

    An update of several steps is taken for one step of their joint length, -update / (lr * steps): the gradient at the
    round's model up to first order in lr * steps. A sum of several users' messages is taken for their mean.

    Raises:
        ValueError: the loss is not softmax cross-entropy.

    Source: Geiping et al. 2020, sec. 6 attacks updates by unrolling the steps; this is its first approximation.
    """
    return told_gradients(seen, seen.sightings[0])


def told_gradients(seen: Observation, sighting: Sighting) -> Tensor:
    """`received_gradients` of any round."""
    if not seen.task.softmax:
        raise ValueError("expected a softmax cross-entropy loss for gradient matching, got another")
    here = Round(seen.defense, seen.setting, sighting.model.state, sighting.model.round)
    estimates = [here.read(message) for message in sighting.messages]
    return torch.stack(estimates) / update_per_gradient(seen.setting, sighting)[:, None]


class Objective(NamedTuple):
    """Of n victims: how badly candidates explain the messages, [n] how badly updates of zero do, and the prior."""

    messages: Function
    nothing: Tensor
    prior: Function | None

    def at(self, strength: float) -> Function:
        """The sum, with the messages' part scaled down to `strength` for updates of zero, where it is above that."""
        whole = self.messages
        if bool((self.nothing > strength).any()):
            whole = _Weighted(whole, strength / self.nothing.clamp(min=strength))
        return whole if self.prior is None else Sum((whole, self.prior))


def objective(
    seen: Observation,
    sightings: Sequence[Sighting],
    labels: Tensor | None,
    explains: Explains,
) -> Objective:
    """The sum over the rounds of how badly candidates explain each round's messages, and the prior.

    Args:
        sightings: the rounds, each with one message of the same n victims, in the same order.
        labels: [n, b] int64, held fixed; None: a candidate brings its own.
    """
    task, params = seen.task, sightings[0].model.params
    fixed = None if labels is None else one_hot(labels, task.classes).to(params.dtype)
    functions, nothing = [], params.new_zeros(len(sightings[0].messages))
    for sighting in sightings:
        function, misfit_of_zero = _of_round(seen, sighting, fixed, explains)
        functions.append(function)
        nothing = nothing + misfit_of_zero
    messages = functions[0] if len(functions) == 1 else Sum(tuple(functions))
    prior = None if explains.prior is None else Believed(explains.prior, task, sightings[0].messages[0].images)
    return Objective(messages, nothing, prior)


def _of_round(
    seen: Observation, sighting: Sighting, labels: Tensor | None, explains: Explains
) -> tuple[Function, Tensor]:
    """The function of one round, and its value at an update of zero."""
    message, params = sighting.messages[0], sighting.model.params
    aware = explains.kind == "likelihood"
    each = torch.arange(len(sighting.messages))
    zero = params.new_zeros(len(each), params.numel())
    local = Local.of(
        seen.setting,
        sighting.lr,
        message.steps,
        seen.defense.local.clip if aware else None,
        nominal=aware and (seen.defense.local.poisson or seen.defense.step_noise(seen.setting) > 0),
    )
    unlikely = _Unlikelihood(seen, sighting)
    if not explains.unroll or (local.one_gradient(message.images) and message.users == 1):
        misfit: Misfit = _OfGradients(unlikely, update_per_gradient(seen.setting, sighting))
        if not aware:
            misfit = SquaredDistance(told_gradients(seen, sighting).to(params.dtype), explains.scale)
        function = evaluator(seen.task, params, misfit, images=message.images, labels=labels)
        return function, misfit(zero, each)
    misfit = unlikely if aware else _Distance(*_told_updates(seen, sighting), explains.scale)
    function = update_evaluator(
        seen.task, params, misfit, local, images=message.images, users=message.users, labels=labels
    )
    if message.users > 1:
        zero = zero[:, None].expand(-1, message.users, -1)
    return function, misfit(zero, each)


def _told_updates(seen: Observation, sighting: Sighting) -> tuple[Tensor, Tensor]:
    """Estimates [n, d] of the messages, and [n] what an update is divided by to be as long as a mean gradient."""
    scale = update_per_gradient(seen.setting, sighting)
    return told_gradients(seen, sighting) * scale[:, None], scale


@dataclass(frozen=True, eq=False)
class _Distance:
    """Squared distance of messages [m, d] or [m, users, d] to what was told, in the unit of gradients."""

    targets: Tensor
    per_gradient: Tensor
    scale: float

    def __call__(self, gradients: Tensor, instances: Tensor) -> Tensor:
        """Implement `Misfit`."""
        whole = gradients if gradients.ndim == 2 else gradients.sum(dim=1)
        off = (whole - self.targets[instances]) / self.per_gradient[instances, None]
        return self.scale * off.square().sum(dim=1)


@dataclass(frozen=True, eq=False)
class _OfGradients:
    """A misfit of messages as one of mean gradients."""

    misfit: Misfit
    per_gradient: Tensor

    def __call__(self, gradients: Tensor, instances: Tensor) -> Tensor:
        """Implement `Misfit`."""
        return self.misfit(self.per_gradient[instances, None] * gradients, instances)


@dataclass(frozen=True, eq=False)
class _Unlikelihood:
    """-log p(received | the messages before the defense), by the defense itself."""

    seen: Observation
    sighting: Sighting
    kept: dict[tuple[int, ...], Likelihood] = field(default_factory=dict)

    def __call__(self, gradients: Tensor, instances: Tensor) -> Tensor:
        """Implement `Misfit`, of messages [m, d] or [m, users, d]."""
        members = tuple(instances.tolist())
        if members not in self.kept:
            if len(self.kept) >= _LIKELIHOODS:
                self.kept.clear()
            self.kept[members] = self._likelihood([self.sighting.messages[i] for i in members])
        return self.kept[members](gradients)

    def _likelihood(self, messages: Sequence[Message]) -> Likelihood:
        """Of these messages together."""
        wires, links = [message.wire for message in messages], links_of(self.seen.setting, messages)
        return self.seen.defense.likelihood(self.sighting.model.state, wires, links)


@dataclass(frozen=True, eq=False)
class Sum:
    """The sum of several functions of the same candidates."""

    functions: tuple[Function, ...]

    def __call__(self, candidates: Tensor, instances: Tensor) -> Evaluation:
        found = [function(candidates, instances) for function in self.functions]
        values, gradients = (torch.stack(parts).sum(dim=0) for parts in zip(*found, strict=True))
        return Evaluation(values, gradients)


@dataclass(frozen=True, eq=False)
class _Weighted:
    """A function with a weight [n] for each instance."""

    function: Function
    weight: Tensor

    def __call__(self, candidates: Tensor, instances: Tensor) -> Evaluation:
        value, gradient = self.function(candidates, instances)
        weight = self.weight[instances]
        return Evaluation(weight * value, weight[:, None] * gradient)


@dataclass(frozen=True, eq=False)
class Believed:
    """A prior of the inputs, as a function of candidates with so many images."""

    prior: ImagePrior
    task: Task
    images: int

    def __call__(self, candidates: Tensor, instances: Tensor) -> Evaluation:
        z = candidates.detach().requires_grad_()
        value = self.prior(unpack(self.task, z, self.images)[0])
        (slope,) = torch.autograd.grad(value.sum(), z)
        return Evaluation(value.detach(), slope)
