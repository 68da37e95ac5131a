"""Linkability: finds out which messages of two rounds have the same sender, although senders have no names."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from leakgauge.attacks._engine.own_clients import (
    ByOwnClients,
    Revealed,
    drawn,
    held,
    labels_of,
    most_clients,
    own_pairs,
    revealed,
)
from leakgauge.harness.core.contract import Observation, Traced
from leakgauge.harness.core.rng import Key

_CLIENTS = 60  # clients of the adversary's own

_SURE = 1 - 1e-9  # the largest correlation of two messages of one client

_LEAST = 1e-10  # variance along a direction that counts as none, as a share of the largest


@dataclass(frozen=True)
class Linkability(ByOwnClients):
    """Compares each message of a later round with each message of the first one, and links the likeliest pairs.

    The data of a client have similar effects in every round. What two messages reveal counts as normal: clients of the
    adversary's own show in which directions the updates of clients differ, how alike a client's updates are in the two
    rounds, and how large the errors of the defense are. The score of a pair is the log likelihood ratio of one client
    to two clients.

    Must know: the messages of all rounds, which a shuffler has put into a random order; the models of the rounds, the
    defense with its parameters, and data of the same kind. It uses no number of a sender.

    Cannot: link clients whose data differ less than the errors of two messages.

    Source: the likelihood ratio of probabilistic linear discriminant analysis (Ioffe 2006, sec. 4), with updates in
        place of faces. Unlinkability is that of Pfitzmann, Hansen 2010.
    """

    kind: ClassVar[str] = "linkability"

    def run(self, seen: Observation, key: Key) -> Traced:
        """For each message of the later rounds, in order, the score of each message of the first one."""
        first, *later = seen.observed_rounds
        records = first.messages[0].images
        clients = most_clients(seen, _CLIENTS, records)
        batches = drawn(seen, labels_of(seen, clients, records, key.child("labels"), skewed=True), key.child("records"))
        before, rows = [each.centered for each in revealed(seen, first, batches, key.child("own", 0))], []
        for number, observed in enumerate(later, 1):
            after = [each.centered for each in revealed(seen, observed, batches, key.child("own", number))]
            best = max(zip(before, after, strict=True), key=_own_links)
            rows.append(_scores(*best))
        return Traced(torch.cat(rows))


def _own_links(rounds: tuple[Revealed, Revealed]) -> float:
    """How well this reading links the messages of own clients, of those who give no directions."""
    cut = _cut(rounds[0])
    own = (each._replace(sent=each.own[cut:]) for each in rounds)
    return own_pairs(_scores(*own))


def _cut(own: Revealed) -> int:
    return len(own.own) - held(len(own.own))


def _scores(before: Revealed, after: Revealed) -> Tensor:
    """[later, first] scores that two messages have one sender.

    Two thirds of the own clients give directions, the others show how much clients differ there, and beside them. Terms
    of the likelihood ratio that depend on one message only are left out: they do not change the likeliest pairs.
    """
    (u, _, x, _), (v, _, y, _), cut = before, after, _cut(before)
    spans, turns = torch.linalg.eigh(u[:cut] @ u[:cut].T)
    kept = spans > _LEAST * spans.max().clamp(min=1e-300)
    basis = (turns[:, kept] / spans[kept].sqrt()).T @ u[:cut]  # [r, d]

    (x_in, y_in), (u_in, v_in) = ((each @ basis.T for each in pair) for pair in ((x, y), (u[cut:], v[cut:])))
    count = max(1, u.shape[1] - len(basis))
    # what messages hold beside the directions is hardly of the client: it shows the errors of each message
    x_noise, y_noise = (((a.square().sum(1) - b.square().sum(1)) / count)[:, None] for a, b in ((x, x_in), (y, y_in)))

    def weights(common: Tensor, one: Tensor, other: Tensor, number: int) -> Tensor:
        """[first, r] factors of products of entries that have these variances, and this covariance for one sender."""
        p = before.shrink**2 * one + x_noise + 1e-300
        q = after.shrink**2 * other + y_noise[number] + 1e-300
        alike = (before.shrink * after.shrink * common / (p * q).sqrt()).clamp(0, _SURE)
        factor: Tensor = alike / (1 - alike.square()) / (p * q).sqrt()
        return factor

    inside = (u_in * v_in).mean(0), u_in.square().mean(0), v_in.square().mean(0)
    pairs = (u, v, u_in, v_in), (u, u, u_in, u_in), (v, v, v_in, v_in)
    common, one, other = (
        ((a[cut:] * b[cut:]).sum(1) - (c * d).sum(1)).clamp(min=0).mean() / count for a, b, c, d in pairs
    )
    products, rows = y @ x.T - y_in @ x_in.T, []
    for number in range(len(y)):
        own = (weights(*inside, number) * x_in) @ y_in[number]
        rows.append(own + weights(common, one, other, number)[:, 0] * products[number])
    return torch.stack(rows)
