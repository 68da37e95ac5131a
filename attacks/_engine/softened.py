"""Softened ReLU layers, with which a search does not stop at a wrong pattern of active units."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from leakgauge.attacks._engine.objective import Explains, objective, update_per_gradient
from leakgauge.harness.core.contract import Observation, ObservedRound, Task
from leakgauge.harness.core.rng import Key
from leakgauge.harness.federation.round import Client, Round
from leakgauge.harness.learn.gradients import gradients, targets_of
from leakgauge.harness.learn.tasks import ModelTask

STAGES = ((0.1, 16.0), (0.03, 160.0), (0.01, 1600.0), (0.003, math.inf))
"""For each of the successive searches before the search with kinks: the width of the bends, and the messages' weight,
as their misfit for an update of zero, in nats per input entry. Wide bends with messages at full weight mislead the
search: for 16 digits behind `mlp-small`, these weights raised the SSIM from 0.53 to 0.73 behind `random-mask`, and from
0.64 to 0.81 behind `top-k`."""

CLOSE = 1e-4
"""At this share of the misfit for an update of zero, a candidate counts as right even if its misfit exceeds that of
imitated messages: without noise, no search in single precision gets as close as these."""

_TIMES = 8
"""Number of imitated messages per candidate."""

_SURE = 4.0
"""Standard deviations above the mean misfit of imitated messages, up to which a candidate explains the real one."""


def softened(task: Task, width: float) -> Task | None:
    """The task with bends of this width instead of kinks.

    None: it has kinks other than ReLU's, or no kinks; or residual blocks or norms, behind which softening was not
    measured.
    """
    if not isinstance(task, ModelTask) or (task.structure is not None and not task.structure.is_chain):
        return None
    soft = task.model.apply.softened(width)
    if task.model.apply.smooth or not soft.smooth:
        return None
    return replace(task, model=replace(task.model, apply=soft))


def explained_at(
    seen: Observation, observed_rounds: Sequence[ObservedRound], x: Tensor, labels: Tensor, explains: Explains, key: Key
) -> Tensor:
    """[n]: the misfit up to which a candidate explains its messages as well as the truth would.

    The misfit of the true input has the same distribution as the misfit of messages that the adversary computes from
    that input.
    This distribution hardly depends on the input, so it is estimated at a candidate: the bound is the mean plus `_SURE`
    standard deviations over imitated messages, plus one unit per entry, which the prior may cost.

    Args:
        observed_rounds: rounds in which each message is a single gradient of one client.
        x: [n, b, *input_shape], the candidates; labels: [n, b].
    """
    each, misfits = torch.arange(len(x), device=x.device), []
    for number in range(_TIMES):
        made = [_imitated(seen, observed, x, labels, key.child(number)) for observed in observed_rounds]
        misfits.append(objective(seen, made, labels, explains).messages(x.flatten(1), each).value)
    values = torch.stack(misfits)
    return values.mean(0) + _SURE * values.std(0) + x[0].numel()


def _imitated(seen: Observation, observed: ObservedRound, x: Tensor, labels: Tensor, key: Key) -> ObservedRound:
    """The observed round with messages of the candidates instead of the victims."""
    params, here = observed.model.params, Round(seen.defense, seen.setting, observed.model.state, observed.model.round)
    with torch.no_grad():
        each = gradients(seen.task, params, x, targets_of(seen.task, labels, params.dtype))
    each = each.nan_to_num(0.0, 0.0, 0.0)  # if a model diverged: no client sends this
    updates, messages = update_per_gradient(seen.setting, observed)[:, None] * each.cpu(), []
    for message, update in zip(observed.messages, updates, strict=True):
        own = key.child(message.sender.number)
        client = Client.of(message.sender, update, seen.defense.remember(seen.setting), own)
        (wire,) = here.among_silent([client], own).received
        messages.append(message._replace(wire=wire, shared=message.shared and client.shared))
    return observed._replace(messages=tuple(messages))
