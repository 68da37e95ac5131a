"""How candidates' gradients align with the messages of each round: the evidence of membership attacks on messages.

A message is read as a mean gradient at the round's model, U = -update / (lr * steps). U contains the gradient g of a
member with a weight, which is its share of one step on a batch. A client's later passes over its data are not counted,
because by then the client has fitted the record.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor

from leakgauge.attacks._engine.objective import received_gradients
from leakgauge.attacks._members.scores import finite
from leakgauge.harness.core.contract import Attack, Membership, Message, Observation, ObservedRound, Setting
from leakgauge.harness.core.rng import Key
from leakgauge.harness.learn.gradients import gradients, targets_of

_CHUNK = 64  # number of candidates whose gradients are held at once


@dataclass(frozen=True)
class Traffic:
    """One round: k messages U, and n candidates' gradients g at its model, clipped if the defense clips records.

    All values are float64. A non-finite message or gradient counts as zero.

    Attributes:
        senders: [k], the sender of each message; -1 for a sum.
        products: [k, n], <U, g>.
        message_norm: [k], |U|.
        gradient_norm: [n], |g|.
    """

    senders: tuple[int, ...]
    products: Tensor
    message_norm: Tensor
    gradient_norm: Tensor

    @cached_property
    def cosines(self) -> Tensor:
        """[k, n], <U, g> / |U| |g|; 0 if U or g is zero."""
        lengths = self.message_norm[:, None] * self.gradient_norm
        return torch.where(lengths > 0, self.products / lengths, 0.0)

    @cached_property
    def differences(self) -> Tensor:
        """[k, n], |U|^2 - |U - g|^2.

        Source: Li et al. 2022, "Effective passive membership inference attacks in federated learning against
            overparameterized models".
        """
        return 2 * self.products - self.gradient_norm.square()


def mixture(ratios: Tensor, chance: Tensor) -> Tensor:
    """log(1 - chance + chance * exp(ratio)): the ratios [..., n] if a member's record is used with this probability."""
    return torch.logaddexp(torch.log1p(-chance).expand_as(ratios), chance.log() + ratios)


class ByTraffic(Attack):
    """The common part of membership attacks on messages."""

    kind: ClassVar[str] = "membership"
    together: ClassVar[bool] = False
    """Whether a round's messages are seen only as their mean."""
    reads_sums: ClassVar[bool] = False
    """Whether, for a channel that adds messages up, the sum replaces the suspect's message."""

    @property
    def averages(self) -> bool:
        """Whether the score is the mean over the rounds instead of the sum."""
        return False

    @property
    def needs(self) -> frozenset[str]:
        """Messages, the rounds' models and the candidates."""
        return frozenset({"messages", "models", "candidates"})

    @abstractmethod
    def evidence(self, traffic: Traffic, row: int) -> Tensor:
        """[n]: the evidence of message `row` of a round for membership in its sender's data."""

    def run(self, observation: Observation, key: Key) -> Membership:
        """One score per candidate; nothing is drawn."""
        together = self.together or (self.reads_sums and observation.defense.superposes)
        rounds = list(read(observation, together=together))
        return self.judge(rounds, None if together else observation.suspect)

    def judge(self, rounds: Sequence[Traffic], suspect: int | None = None) -> Membership:
        """The scores by `over_rounds`, which also states the errors; one reading of `rounds` serves several attacks."""
        each = []
        for traffic in rounds:
            each += [(sender, self.evidence(traffic, row)) for row, sender in enumerate(traffic.senders)]
        return over_rounds(each, suspect, averages=self.averages)


def over_rounds(each: Iterable[tuple[int, Tensor]], suspect: int | None, *, averages: bool = False) -> Membership:
    """The scores from the evidence of each message: sums, or means, over the suspect's messages.

    Args:
        each: the sender and the evidence [n] of each message.
        suspect: None: a record's score is the largest among the clients, because a record has at most one owner.

    Raises:
        ValueError: the suspect sent no message.
    """
    sums: dict[int, Tensor] = {}
    times: dict[int, int] = {}
    for sender, evidence in each:
        if suspect in (None, sender):
            sums[sender] = sums[sender] + evidence if sender in sums else evidence
            times[sender] = times.get(sender, 0) + 1
    if not sums:
        name = "any client" if suspect is None else f"client {suspect}"
        raise ValueError(f"expected a message of {name} in the observed rounds, got none; observe more rounds")
    scores = [total / times[sender] if averages else total for sender, total in sums.items()]
    return Membership(finite(torch.stack(scores).amax(dim=0)))


def read(observation: Observation, *, together: bool = False) -> Iterator[Traffic]:
    """One `Traffic` for each round that has messages.

    Args:
        together: whether to replace the messages of a round by their mean, weighted by their senders' samples, as an
            adversary that sees only the aggregate does.

    Raises:
        ValueError: the channel adds messages up, without `together`.
    """
    assert observation.candidates is not None
    if observation.defense.superposes and not together:
        raise ValueError(
            "expected messages of single clients, got their sums from the channel; use membership-sum instead"
        )
    for observed in observation.observed_rounds:
        if observed.messages:
            yield _read_round(observation, observed, together)


def _read_round(observation: Observation, observed: ObservedRound, together: bool) -> Traffic:
    """Read one round; the candidates' gradients are computed in chunks and not kept."""
    assert observation.candidates is not None
    messages, params = observed.messages, observed.model.params
    received = _finite_rows(received_gradients(observation, observed, numbers=True).to(params.dtype))
    if together:
        samples = torch.tensor([float(_samples(message)) for message in messages], dtype=torch.float64)
        received = ((samples / samples.sum()).to(received.dtype) @ received)[None]
    x, y = observation.candidates
    labels = targets_of(observation.task, y, params.dtype)
    columns = []
    for images, rows in zip(torch.split(x, _CHUNK), torch.split(labels, _CHUNK), strict=True):
        with torch.no_grad():
            each = _finite_rows(gradients(observation.task, params, images[:, None], rows[:, None]))
            columns.append(torch.cat([each.square().sum(dim=1, keepdim=True), each @ received.T], dim=1).double())
    squares, *products = torch.cat(columns).T
    whole, clip = squares.sqrt(), observation.defense.local.clip
    scale = torch.ones_like(whole) if clip is None else clip / whole.clamp(min=clip)
    senders = (-1,) if together else tuple(message.sender.number for message in messages)
    return Traffic(senders, scale * torch.stack(products), received.double().norm(dim=1), scale * whole)


def _finite_rows(vectors: Tensor) -> Tensor:
    """[m, d], with zeros in each row that is not finite."""
    return torch.where(vectors.isfinite().all(dim=1, keepdim=True), vectors, 0.0)


def _samples(message: Message) -> int:
    return message.sender.samples + sum(other.samples for other in message.others)


def weight_of(setting: Setting, message: Message) -> float:
    """The weight of one record's gradient in a message's mean gradient, if one step takes the record."""
    samples = max(1, message.sender.samples)
    size = min(setting.batch, samples) if setting.batch else samples
    steps = 1 if setting.sends == "gradient" else max(1, message.steps)
    return 1 / (size * steps * message.users)


def chance_of(message: Message) -> float:
    """The share of the senders' records that a message was computed from."""
    return min(1.0, max(1, message.images) / max(1, _samples(message)))
