"""The function that a search minimizes: how badly candidate images explain the messages of one or several rounds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from leakgauge.attacks._engine.matching import Evaluation, Function, Latest, Misfit, SquaredDistance, evaluator
from leakgauge.attacks._engine.prior import Believed, Prior
from leakgauge.attacks._engine.simulate import Local, update_evaluator
from leakgauge.harness.core.contract import Observation, Setting, Sighting, likelihood_of, links_of
from leakgauge.harness.core.device import Placed
from leakgauge.harness.federation.round import Round
from leakgauge.harness.learn.gradients import takes_numbers, targets_of

Kind = Literal["l2", "likelihood"]

_DECODED = 2**25
"""Maximum number of entries in the cache of likelihoods. Each likelihood decodes the messages of one chunk; chunks
change when a victim leaves the batch, and a search of a table has a chunk for every few values of each victim."""


@dataclass(frozen=True)
class Explains:
    """How well a candidate explains the messages.

    Attributes:
        kind: `l2`: squared distance to the defense's own estimate; `likelihood`: the defense's likelihood of the
            candidate's update.
        scale: factor of the squared distance of gradients, which weighs it against a prior.
        unroll: whether to follow the client's steps and, for `likelihood`, the clipping of its records; otherwise an
            update counts as one step of the total length of all steps.
        prior: prior of the inputs; its energy is added, and candidates are in its coordinates. None: candidates are
            inputs.
    """

    kind: Kind = "l2"
    scale: float = 1.0
    unroll: bool = False
    prior: Prior | None = None

    def __post_init__(self) -> None:
        if self.kind not in ("l2", "likelihood"):
            raise ValueError(f"expected objective 'l2' or 'likelihood', got {self.kind!r}")


def update_per_gradient(setting: Setting, sighting: Sighting) -> Tensor:
    """[n]: the factor from the mean gradient of a message's images to its update, to first order.

    The update of a superposed message is the sum of its users' updates.
    """
    gradient = setting.sends == "gradient"
    return torch.tensor(
        [message.users * (1.0 if gradient else -sighting.lr * message.steps) for message in sighting.messages]
    )


def received_gradients(observation: Observation, *, numbers: bool = False) -> Tensor:
    """[n, d]: the defense's own estimate of the gradient behind each message of the first round, in the model's dtype.

    An update of several steps counts as one step of their total length, -update / (lr * steps): the gradient at the
    round's model up to first order in lr * steps. A sum of several users' messages counts as their mean.

    Args:
        numbers: whether the attack also accepts the squared loss of a regression, whose labels are numbers.

    Raises:
        ValueError: the loss is not softmax cross-entropy nor, with `numbers`, that of a regression.

    Source: Geiping et al. 2020, sec. 6, attacks updates by unrolling the steps; this is the first-order approximation.
    """
    return gradients_of_round(observation, observation.sightings[0], numbers=numbers)


def gradients_of_round(observation: Observation, sighting: Sighting, *, numbers: bool = False) -> Tensor:
    """Same as `received_gradients`, for any round."""
    regression = takes_numbers(observation.task)
    if not (observation.task.softmax or (numbers and regression)):
        advice = "; for a regression, use analytic, dlg, or map with given labels" if regression else ""
        raise ValueError(f"expected a softmax cross-entropy loss for gradient matching, got another loss{advice}")
    here = Round(observation.defense, observation.setting, sighting.model.state, sighting.model.round)
    estimates = torch.stack([here.read(message) for message in sighting.messages])
    return estimates.to(sighting.model.params.dtype) / update_per_gradient(observation.setting, sighting)[:, None]


class Objective(NamedTuple):
    """For n victims: the misfit of the messages, its value [n] for updates of zero, and the prior's addition to it."""

    messages: Function
    nothing: Tensor
    believed: Callable[[Function], Function]

    def at(self, strength: float) -> Function:
        """The sum of misfit and prior; the misfit is scaled so its value for zero updates is at most `strength`."""
        weighed = self.messages
        if bool((self.nothing > strength).any()):
            weighed = _Weighted(weighed, strength / self.nothing.clamp(min=strength))
        return self.believed(weighed)


def objective(
    observation: Observation, sightings: Sequence[Sighting], labels: Tensor | None, explains: Explains
) -> Objective:
    """The objective: the misfits of all rounds summed, plus the prior.

    Args:
        sightings: the rounds, each with one message of the same n victims, in the same order.
        labels: [n, b], held fixed; None: each candidate has its own labels.
    """
    task, params = observation.task, sightings[0].model.params
    fixed = None if labels is None else targets_of(task, labels, params.dtype)
    functions, nothing = [], params.new_zeros(len(sightings[0].messages))
    for sighting in sightings:
        function, misfit_of_zero = _of_round(observation, sighting, fixed, explains)
        functions.append(function)
        nothing = nothing + misfit_of_zero
    messages = functions[0] if len(functions) == 1 else _Sum(tuple(functions))
    shape, images, prior = task.input_shape, sightings[0].messages[0].images, explains.prior

    others = 0 if labels is not None else images * task.classes

    def believed(misfit: Function) -> Function:
        return misfit if prior is None else Believed(misfit, prior, shape, images, others=others)

    return Objective(messages, nothing, believed)


def _of_round(
    observation: Observation, sighting: Sighting, labels: Tensor | None, explains: Explains
) -> tuple[Function, Tensor]:
    """The misfit of one round, and its value [n] for updates of zero."""
    task, message, params, rule = (
        observation.task,
        sighting.messages[0],
        sighting.model.params,
        observation.defense.local,
    )
    zero = params.new_zeros(len(sighting.messages), params.numel())
    each = torch.arange(len(zero), device=zero.device)
    aware = explains.kind == "likelihood"
    nominal = aware and (rule.poisson or observation.defense.step_noise(observation.setting) > 0)
    local = Local.of(observation.setting, sighting.lr, message.steps, rule.clip if aware else None, nominal=nominal)
    unlikely, factor = (
        _Unlikelihood(observation, sighting),
        update_per_gradient(observation.setting, sighting).to(params.device),
    )
    misfit: Misfit
    if not explains.unroll or (local.one_gradient(message.images) and message.users == 1):
        if aware:
            misfit = _OfGradients(unlikely, factor)
        else:
            misfit = SquaredDistance(gradients_of_round(observation, sighting, numbers=True).to(params), explains.scale)
        return evaluator(task, params, misfit, images=message.images, labels=labels), misfit(zero, each)
    misfit = unlikely
    if not aware:
        estimates = gradients_of_round(observation, sighting, numbers=True).to(factor.device)
        misfit = _Distance(estimates * factor[:, None], factor, explains.scale)
    function = update_evaluator(task, params, misfit, local, images=message.images, users=message.users, labels=labels)
    if message.users > 1:
        zero = zero[:, None].expand(-1, message.users, -1)
    return function, misfit(zero, each)


@dataclass(frozen=True, eq=False)
class _Distance:
    """Squared distance of messages [m, d] or [m, users, d] to estimates, in units of gradients."""

    targets: Tensor
    per_gradient: Tensor
    scale: float

    def __call__(self, gradients: Tensor, instances: Tensor) -> Tensor:
        whole = gradients if gradients.ndim == 2 else gradients.sum(dim=1)
        off = (whole - self.targets[instances]) / self.per_gradient[instances, None]
        return self.scale * off.square().sum(dim=1)


@dataclass(frozen=True, eq=False)
class _OfGradients:
    """A misfit of messages as a function of mean gradients."""

    misfit: Misfit
    per_gradient: Tensor

    def __call__(self, gradients: Tensor, instances: Tensor) -> Tensor:
        return self.misfit(self.per_gradient[instances, None] * gradients, instances)


@dataclass(frozen=True, eq=False)
class _Unlikelihood:
    """-log p(received | the messages before the defense), from the defense itself."""

    observation: Observation
    sighting: Sighting
    cache: dict[tuple[int, ...], Placed] = field(default_factory=dict)
    # the host waits for the numbers of the instances once, not at each evaluation
    _members: Latest[tuple[int, ...]] = field(default_factory=lambda: Latest(_numbers))

    def __call__(self, gradients: Tensor, instances: Tensor) -> Tensor:
        members = self._members(instances)
        if members not in self.cache:
            if (len(self.cache) + 1) * len(members) * self.observation.setting.dim > _DECODED:
                self.cache.clear()
            messages = [self.sighting.messages[i] for i in members]
            wires, links = [message.wire for message in messages], links_of(self.observation.setting, messages)
            found = likelihood_of(self.observation.defense, self.sighting.model.state, wires, links)
            self.cache[members] = Placed(found, gradients.device)
        return self.cache[members](gradients)


def _numbers(instances: Tensor) -> tuple[int, ...]:
    """Instances [m] as numbers."""
    return tuple(instances.tolist())


@dataclass(frozen=True, eq=False)
class _Sum:
    """The sum of several functions of the same candidates."""

    functions: tuple[Function, ...]

    def __call__(self, candidates: Tensor, instances: Tensor) -> Evaluation:
        found = [function(candidates, instances) for function in self.functions]
        values, gradients = (torch.stack(parts).sum(dim=0) for parts in zip(*found, strict=True))
        return Evaluation(values, gradients)


@dataclass(frozen=True, eq=False)
class _Weighted:
    """A function with one weight [n] per instance."""

    function: Function
    weight: Tensor

    def __call__(self, candidates: Tensor, instances: Tensor) -> Evaluation:
        value, gradient = self.function(candidates, instances)
        weight = self.weight[instances]
        return Evaluation(weight * value, weight[:, None] * gradient)
