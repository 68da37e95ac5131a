"""The function that a search minimizes: how badly candidate images explain the messages of one or several rounds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from leakgauge.attacks._engine.bottleneck import before_noise
from leakgauge.attacks._engine.matching import (
    Evaluation,
    Evaluator,
    Function,
    Latest,
    Misfit,
    SquaredDistance,
    evaluator,
)
from leakgauge.attacks._engine.prior import Believed, Prior
from leakgauge.attacks._engine.simulate import messages_of, one_gradient, plan_of
from leakgauge.harness.core.contract import Observation, ObservedRound, Setting, likelihood_of, links_of
from leakgauge.harness.core.device import Placed
from leakgauge.harness.core.vec import Vector
from leakgauge.harness.federation.round import Round
from leakgauge.harness.learn.batch import EPSILON
from leakgauge.harness.learn.gradients import targets_of

Kind = Literal["l2", "likelihood"]

_EXACT = 3e-3  # least error of a bent gradient of Adam; smaller ones make a search stiff
_CLOSE = 4.0  # rounding errors between a step of Adam and the longest one, within which only a least size is known
_DECODED = 2**25  # maximum number of entries in the cache of likelihoods, each for one chunk of victims


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


def update_per_gradient(setting: Setting, observed: ObservedRound) -> Tensor:
    """[n]: the factor from the mean gradient of a message's images to its update, to first order.

    The update of a superposed message is the sum of its users' updates.
    """
    gradient = setting.sends == "gradient"
    return torch.tensor(
        [message.users * (1.0 if gradient else -observed.lr * message.steps) for message in observed.messages]
    )


def received_gradients(
    observation: Observation, observed: ObservedRound | None = None, *, numbers: bool = False, softmax: bool = False
) -> Tensor:
    """[n, d]: the defense's own estimate of the gradient behind each message of a round, in the model's dtype.

    An update of several steps counts as one step of their total length, -update / (lr * steps): the gradient at the
    round's model up to first order in lr * steps. A sum of several users' messages counts as their mean.

    Args:
        observed: None: the first round.
        numbers: whether the attack also accepts the labels of a regression.
        softmax: whether the attack needs a softmax cross-entropy.

    Raises:
        ValueError: the labels are those of a regression, or the loss is another one.

    Source: Geiping et al. 2020, sec. 6, attacks updates by unrolling the steps; this is the first-order approximation.
    """
    observed = observed or observation.observed_rounds[0]
    if softmax and not observation.task.softmax:
        raise ValueError("expected a softmax cross-entropy loss without weights and smoothing, got another loss")
    if observation.task.numbers and not observation.task.bounded and not numbers:
        raise ValueError(
            "expected labels that can be inferred; for a regression, use analytic, dlg, or map with given labels"
        )
    server = Round(observation.defense, observation.setting, observed.model.state, observed.model.round)
    estimates = torch.stack([server.read(message) for message in observed.messages]).to(observed.model.params.dtype)
    steps = estimates / update_per_gradient(observation.setting, observed)[:, None]
    return _without_decay(observation, observed, steps)


def _without_decay(observation: Observation, observed: ObservedRound, steps: Tensor) -> Tensor:
    """[n, d]: the gradients behind mean steps of an optimizer, in units of the learning rate."""
    setting, params = observation.setting, observed.model.params
    if setting.sends == "gradient" or (setting.optimizer == "sgd" and not setting.weight_decay):
        return steps
    if bent(observation, observed):
        decayed = setting.weight_decay * params if setting.optimizer == "adamw" else torch.zeros_like(params)
        rounding = _rounding(params, observed.lr)
        return undone(steps - decayed, rounding) - (setting.weight_decay * params - decayed)
    return steps - setting.weight_decay * params


def undone(steps: Tensor, rounding: Tensor) -> Tensor:
    """[n, d]: the gradients behind first steps of Adam, g / (|g| + epsilon), with rounding errors [d].

    The epsilon shows the size of small gradients. Of large ones, rounding leaves only the sign and a least size. Steps
    that are longer than 1 are noisy, and returned as they are.
    """
    noisy = (steps.abs() > 1 + 12 * rounding).any(1, keepdim=True)
    return torch.where(noisy, steps, EPSILON * steps / (1 - steps.abs()).clamp(min=rounding))


def _rounding(params: Vector, lr: float) -> Tensor:
    """[d]: about the standard rounding error of a step of Adam, in units of the learning rate."""
    above = torch.nextafter(params.abs(), params.new_tensor(torch.inf)) - params.abs()
    return 0.3 * (torch.finfo(params.dtype).eps + above / lr)


def bent(observation: Observation, observed: ObservedRound) -> bool:
    """Whether the messages of a round are single steps of Adam: rounding hides the sizes of their larger entries."""
    setting = observation.setting
    return setting.sends == "update" and setting.optimizer != "sgd" and observed.messages[0].steps == 1


def unbent_errors(observation: Observation, observed: ObservedRound) -> tuple[Tensor, Tensor]:
    """[d] and [d]: the rounding errors of a step of Adam, per learning rate, and what decay adds to its gradient."""
    share = observation.setting.weight_decay if observation.setting.optimizer == "adam" else 0.0
    return _rounding(observed.model.params, observed.lr), share * observed.model.params


class Objective(NamedTuple):
    """For n victims: the misfit of the messages, its value [n] for updates of zero, and the prior's addition to it."""

    messages: Function
    nothing: Tensor
    believed: Callable[[Function], Function] | None

    def at(self, strength: float) -> Function:
        """The sum of misfit and prior; the misfit is scaled so its value for zero updates is at most `strength`."""
        weighed = self.messages
        if bool((self.nothing > strength).any()):
            weighed = partial(_weighted, weighed, strength / self.nothing.clamp(min=strength))
        return weighed if self.believed is None else self.believed(weighed)


def objective(
    observation: Observation, observed_rounds: Sequence[ObservedRound], labels: Tensor | None, explains: Explains
) -> Objective:
    """The objective: the misfits of all rounds summed, plus the prior.

    Args:
        observed_rounds: the rounds, each with one message of the same n victims, in the same order.
        labels: [n, b], held fixed; None: each candidate has its own labels.
    """
    task, params = observation.task, observed_rounds[0].model.params
    if labels is None and not task.linked:
        raise ValueError("expected labels for this loss: it takes no probabilities of labels, over which to search")
    fixed = None if labels is None else targets_of(task, labels, params.dtype)
    functions, nothing = [], params.new_zeros(len(observed_rounds[0].messages))
    for observed in observed_rounds:
        function, misfit_of_zero = _of_round(observation, observed, fixed, explains)
        functions.append(function)
        nothing = nothing + misfit_of_zero
    messages = functions[0] if len(functions) == 1 else partial(_sum, functions)
    images, believed = observed_rounds[0].messages[0].images, None
    if explains.prior is not None:
        others = 0 if labels is not None else images * task.classes
        believed = partial(Believed, prior=explains.prior, shape=task.input_shape, images=images, others=others)
    return Objective(messages, nothing, believed)


def _of_round(
    observation: Observation, observed: ObservedRound, labels: Tensor | None, explains: Explains
) -> tuple[Function, Tensor]:
    """The misfit of one round, and its value [n] for updates of zero."""
    message, params, aware = observed.messages[0], observed.model.params, explains.kind == "likelihood"
    zero = params.new_zeros(len(observed.messages), params.numel())
    each = torch.arange(len(zero), device=zero.device)
    plan = plan_of(observation.setting, observed.lr, message.steps, observation.defense if aware else None)
    unlikely = _Unlikelihood(observation, observed)
    factor = update_per_gradient(observation.setting, observed).to(params.device)
    misfit: Misfit
    if not explains.unroll or (one_gradient(plan, message.images) and message.users == 1):
        if plan.optimizer != "sgd" and not plan.gradient:
            estimates = received_gradients(observation, observed, numbers=True)
            misfit = _by_bent(estimates.to(params), *unbent_errors(observation, observed))
        elif aware and (shown := _before_noise(observation, observed)) is not None:
            return shown
        elif aware:
            decay = observation.setting.weight_decay if observation.setting.sends == "update" else 0.0
            misfit = partial(_of_gradients, unlikely, factor, decay * params if decay else None)
        else:
            estimates = received_gradients(observation, observed, numbers=True)
            misfit = SquaredDistance(estimates.to(params), explains.scale)
        matched = evaluator(observation.task, params, misfit, images=message.images, labels=labels)
        return matched, matched.misfit(zero, each)
    misfit = unlikely
    if not aware:
        estimates = received_gradients(observation, observed, numbers=True).to(factor.device)
        misfit = partial(_distance, estimates * factor[:, None], factor, explains.scale)
    send = partial(messages_of, observation.task, params, plan, message.users)
    function = Evaluator(observation.task, misfit, message.images, labels, send)
    if message.users > 1:
        zero = zero[:, None].expand(-1, message.users, -1)
    return function, misfit(zero, each)


def _before_noise(observation: Observation, observed: ObservedRound) -> tuple[Function, Tensor] | None:
    """As `_of_round`, for messages of one record behind a bottleneck, from what its noise leaves; else None."""
    message, params = observed.messages[0], observed.model.params
    if not observation.defense.local.bottleneck or (message.images, message.users) != (1, 1):
        return None
    return before_noise(observation.task, params, received_gradients(observation, observed, numbers=True).to(params))


def _distance(targets: Tensor, per_gradient: Tensor, scale: float, gradients: Tensor, instances: Tensor) -> Tensor:
    """Squared distance of messages [m, d] or [m, users, d] to estimates, in units of gradients: a `Misfit`."""
    whole = gradients if gradients.ndim == 2 else gradients.sum(dim=1)
    off = (whole - targets[instances]) / per_gradient[instances, None]
    return scale * off.square().sum(dim=1)


def _of_gradients(
    misfit: Misfit, per_gradient: Tensor, decay: Tensor | None, gradients: Tensor, instances: Tensor
) -> Tensor:
    steps = gradients if decay is None else gradients + decay
    return misfit(per_gradient[instances, None] * steps, instances)


def _by_bent(estimates: Tensor, rounding: Tensor, decay: Tensor) -> Misfit:
    """The misfit of g + decay after g / (|g| + scale), as Adam bends them, but with a scale of their size.

    rounding: [d], the rounding errors of Adam's steps. They give each estimate its error; where only the sign and a
    least size are known, a larger gradient of this sign fits.
    """
    followed = estimates + decay
    size = followed.abs()
    known = size.where(estimates != 0, torch.nan)
    scale = known.nanmedian(1, keepdim=True).values.nan_to_num(1.0)

    def bend(rows: Tensor, instances: Tensor) -> Tensor:
        return rows / (rows.abs() + scale[instances])

    wanted = bend(followed, torch.arange(len(followed), device=followed.device))
    error = rounding * (EPSILON + size).square() / EPSILON * scale / (size + scale).square()
    precision, least = error.clamp(_EXACT, 1.0).square().reciprocal() / 2, size >= EPSILON / (_CLOSE * rounding)

    def misfit(rows: Tensor, at: Tensor) -> Tensor:
        off = bend(rows + decay, at) - wanted[at]
        off = off.where(~(least[at] & (off * wanted[at] > 0)), 0.0)
        return (precision[at] * off.square()).sum(1)

    return misfit


@dataclass(frozen=True, eq=False)
class _Unlikelihood:
    """-log p(received | the messages before the defense), from the defense itself: a `Misfit`."""

    observation: Observation
    observed: ObservedRound
    cache: dict[tuple[int, ...], Placed] = field(default_factory=dict)
    # the host waits for the numbers of the instances once, not at each evaluation
    _members: Latest[tuple[int, ...]] = field(default_factory=lambda: Latest(lambda rows: tuple(rows.tolist())))

    def __call__(self, gradients: Tensor, instances: Tensor) -> Tensor:
        members, setting = self._members(instances), self.observation.setting
        if members not in self.cache:
            if (len(self.cache) + 1) * len(members) * setting.dim > _DECODED:
                self.cache.clear()
            messages = [self.observed.messages[i] for i in members]
            given = [message.wire for message in messages], links_of(setting, messages)
            likelihood = likelihood_of(self.observation.defense, self.observed.model.state, *given)
            self.cache[members] = Placed(likelihood, gradients.device)
        return self.cache[members](gradients)


def _sum(functions: Sequence[Function], candidates: Tensor, instances: Tensor) -> Evaluation:
    each = [function(candidates, instances) for function in functions]
    return Evaluation(*(torch.stack(terms).sum(dim=0) for terms in zip(*each, strict=True)))


def _weighted(function: Function, weight: Tensor, candidates: Tensor, instances: Tensor) -> Evaluation:
    """A function with one weight [n] per instance."""
    (value, gradient), own = function(candidates, instances), weight[instances]
    return Evaluation(own * value, own[:, None] * gradient)
