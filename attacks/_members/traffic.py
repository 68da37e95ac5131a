"""What the messages of each round tell of each candidate: how its gradient lies in them.

A message is taken for a mean gradient at the round's model, U = -update / (lr * steps). A member's own gradient g
stands in it with a weight: what one step on a batch gives it. A client's later passes over its data count for nothing,
for it has fitted the record by then: counted, they cost the ratios below 0.07 of AUC with two passes, 0.12 with five.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from leakgauge.attacks._engine.matching import gradients
from leakgauge.attacks._engine.objective import told_gradients
from leakgauge.attacks._members.scores import finite
from leakgauge.harness.core.contract import (
    Membership,
    Message,
    Observation,
    Setting,
    Sighting,
    links_of,
)

_CHUNK = 64
"""Candidates whose gradients are held at once."""

_PROBE = 1e-3
"""Entries of the update at which a likelihood is asked what it knows of, in units of the message's root mean square:
far below what top-k leaves out."""


@dataclass(frozen=True)
class Traffic:
    """One round: k messages U, n candidates' gradients g at its model, clipped where the defense clips records.

    All float64. A message or a gradient that is not finite counts as zero.

    Attributes:
        senders: [k], who sent each; -1: a sum.
        products: [k, n], <U, g>.
        told: [k], |U|.
        whole: [n], |g|.
        sent: [k, n], |g| over the coordinates that the message tells of; |g| where nobody has asked.
        weight: [k], of a member's gradient in U.
        chance: [k], that a member's record is behind the message at all.
    """

    senders: tuple[int, ...]
    products: Tensor
    told: Tensor
    whole: Tensor
    sent: Tensor
    weight: Tensor
    chance: Tensor

    @cached_property
    def cosines(self) -> Tensor:
        """[k, n], <U, g> / |U| |g|; 0 where one of them is zero."""
        return _quotient(self.products, self.told[:, None] * self.whole)

    @cached_property
    def differences(self) -> Tensor:
        """[k, n], |U|^2 - |U - g|^2.

        Source: Li et al. 2022, "Effective passive membership inference attacks in federated learning against
            overparameterized models".
        """
        return 2 * self.products - self.whole.square()

    @cached_property
    def ratios(self) -> Tensor:
        """[k, n], log of the likelihood ratio that the record is in the message, against isotropic normal noise.

        A member's gradient shifts <U, g> by weight * |g|^2, over the sent coordinates. The noise is mostly the other
        records' gradients; its variance a coordinate is the mean of <U, g>^2 / |g|^2 over the candidates, most of whom
        are not in this message. Where few are behind it (`chance`), the ratio is that of the mixture.
        """
        along = _quotient(self.products, self.sent)
        noise = along.square().mean(dim=1, keepdim=True).sqrt()
        return self.mixed(_ratio(along, self.weight[:, None] * self.sent, noise), slice(None))

    def against_others(self, row: int) -> Tensor:
        """[n], the same of message `row` alone, with mean and variance of the noise from the other messages.

        As for `fedmia`, with the variance pooled over the candidates; but each quotient weighs by the shift that a
        member would cause.
        """
        along = _quotient(self.products, self.told[:, None] * self.sent)
        shift = _quotient(self.weight[:, None] * self.sent, self.told[:, None])
        others = along[self.others_of(row)]
        noise = others.var(dim=0, correction=0).mean().sqrt()
        return self.mixed(_ratio(along[row] - others.mean(dim=0), shift[row], noise), row)

    def others_of(self, row: int) -> list[int]:
        """The rows of the other messages."""
        return [other for other in range(len(self.senders)) if other != row]

    def mixed(self, ratios: Tensor, rows: int | slice) -> Tensor:
        """log(1 - chance + chance * exp(ratio))."""
        chance = self.chance[rows, None] if isinstance(rows, slice) else self.chance[rows]
        return torch.logaddexp(torch.log1p(-chance).expand_as(ratios), chance.log() + ratios)


Evidence = Callable[[Traffic, int], Tensor]
"""(a round, the row of a message) -> [n]: what it says for membership in its sender's data."""


def _quotient(value: Tensor, by: Tensor) -> Tensor:
    """value / by, and 0 where `by` is 0."""
    return torch.where(by > 0, value / by, 0.0)


def _ratio(value: Tensor, shift: Tensor, std: Tensor) -> Tensor:
    """log N(value; shift, std^2) - log N(value; 0, std^2); 0 where there is no spread to compare with."""
    z, delta = _quotient(value, std), _quotient(shift, std)
    return delta * z - delta.square() / 2


def membership(rounds: Sequence[Traffic], evidence: Evidence, suspect: int | None, *, mean: bool = False) -> Membership:
    """The evidence summed over the rounds in which the suspect took part, or its mean.

    Without a suspect, the largest among the clients: a record has at most one owner.

    Raises:
        ValueError: the suspect sent no message in these rounds, or nobody did.
    """
    sums: dict[int, Tensor] = {}
    times: dict[int, int] = {}
    for traffic in rounds:
        for row, sender in enumerate(traffic.senders):
            if suspect in (None, sender):
                found = evidence(traffic, row)
                sums[sender] = sums[sender] + found if sender in sums else found
                times[sender] = times.get(sender, 0) + 1
    if not sums:
        who = "any client" if suspect is None else f"client {suspect}"
        raise ValueError(f"expected a message of {who} in the rounds that are looked at, got none; look at more rounds")
    scores = [total / times[sender] if mean else total for sender, total in sums.items()]
    return Membership(finite(torch.stack(scores).amax(dim=0)))


def read(seen: Observation, *, sent: bool = False, together: bool = False) -> Iterator[Traffic]:
    """Round by round, as far as it has messages.

    Args:
        sent: ask the defense which coordinates each message tells of (one slope of its likelihood a message).
        together: take the mean of a round's messages, weighted by their senders' samples, for one message: what
            reaches whoever sees the sum alone.

    Raises:
        ValueError: the loss is not softmax cross-entropy; or the channel adds messages up, and not `together`.
    """
    assert seen.candidates is not None
    if seen.defense.superposes and not together:
        raise ValueError(
            "expected messages of single clients, got sums: the channel adds them up; membership-sum takes those"
        )
    for sighting in seen.sightings:
        if sighting.messages:
            yield _read_round(seen, sighting, sent, together)


def _read_round(seen: Observation, sighting: Sighting, sent: bool, together: bool) -> Traffic:
    """One round; the candidates' gradients are computed chunk by chunk and not kept."""
    assert seen.candidates is not None
    messages, params = sighting.messages, sighting.model.params
    told = _finite_rows(told_gradients(seen, sighting).to(params.dtype))
    known = _sent_coordinates(seen, sighting, told) if sent else None
    weight = torch.tensor([_weight(seen.setting, message) for message in messages], dtype=torch.float64)
    chance = torch.tensor([_chance(message) for message in messages], dtype=torch.float64)
    if together:
        samples = torch.tensor([float(_samples(message)) for message in messages], dtype=torch.float64)
        share = samples / samples.sum()
        told = (share.to(told.dtype) @ told)[None]
        known = None if known is None else known.any(dim=0, keepdim=True)
        weight, chance = (share @ (weight * share))[None], (share @ chance)[None]
    kept = None if known is None or bool(known.all()) else known.to(told.dtype).T
    x, y = seen.candidates
    labels = one_hot(y, seen.task.classes).to(params.dtype)
    columns = []
    for images, rows in zip(torch.split(x, _CHUNK), torch.split(labels, _CHUNK), strict=True):
        with torch.no_grad():
            each = _finite_rows(gradients(seen.task, params, images[:, None], rows[:, None]))
            squares = each.square()
            whole = squares.sum(dim=1, keepdim=True)
            over = whole.expand(-1, len(told)) if kept is None else squares @ kept
            columns.append(torch.cat([whole, each @ told.T, over], dim=1).double())
    found = torch.cat(columns).T
    whole, products, over = found[0].sqrt(), found[1 : 1 + len(told)], found[1 + len(told) :].sqrt()
    clip = seen.defense.local.clip
    scale = torch.ones_like(whole) if clip is None else clip / whole.clamp(min=clip)
    senders = (-1,) if together else tuple(message.sender.number for message in messages)
    length = told.double().norm(dim=1)
    return Traffic(senders, scale * products, length, scale * whole, scale * over, weight, chance)


def _finite_rows(vectors: Tensor) -> Tensor:
    """[m, d], with zeros for a row that is not finite."""
    return torch.where(vectors.isfinite().all(dim=1, keepdim=True), vectors, 0.0)


def _samples(message: Message) -> int:
    """How many records the senders of a message train on."""
    return message.sender.samples + sum(other.samples for other in message.others)


def _weight(setting: Setting, message: Message) -> float:
    """Of one record's gradient in the mean gradient that a message tells of, where one step takes the record."""
    samples = max(1, message.sender.samples)
    size = min(setting.batch, samples) if setting.batch else samples
    steps = 1 if setting.sends == "gradient" else max(1, message.steps)
    return 1 / (size * steps * message.users)


def _chance(message: Message) -> float:
    """The share of its senders' records that is behind a message."""
    return min(1.0, max(1, message.images) / max(1, _samples(message)))


def _sent_coordinates(seen: Observation, sighting: Sighting, told: Tensor) -> Tensor:
    """[k, d] bool: the coordinates on which the likelihood of each message depends, at a small update; all, if none.

    A coordinate that an estimate has as zero may well be told: that of a pixel which is dark in all of a client's
    images speaks against a record in which it is not.
    """
    messages, state = sighting.messages, sighting.model.state
    known = torch.ones_like(told, dtype=torch.bool)
    for row, message in enumerate(messages):
        likelihood = seen.defense.likelihood(state, [message.wire], links_of(seen.setting, [message]))
        rms = float(told[row].norm()) / math.sqrt(len(told[row]))
        size = _PROBE * (rms * _step(seen.setting, sighting.lr, message) or 1.0)
        shape = (1, len(told[row])) if message.users == 1 else (1, message.users, len(told[row]))
        update = torch.full(shape, size, dtype=told.dtype, requires_grad=True)
        with torch.enable_grad():
            (slope,) = torch.autograd.grad(likelihood(update).sum(), update)
        moves = (slope.reshape(-1, shape[-1]) != 0).any(dim=0)
        if bool(slope.isfinite().all()) and bool(moves.any()):
            known[row] = moves
    return known


def _step(setting: Setting, lr: float, message: Message) -> float:
    """The length of an update in units of the mean gradient that it tells of."""
    return 1.0 if setting.sends == "gradient" else lr * message.steps
