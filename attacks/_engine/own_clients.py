"""Clients of the adversary's own, for inferences on groups of records: their updates, and what messages reveal."""

from __future__ import annotations

from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from leakgauge.attacks._engine.imitation import own_messages, own_updates
from leakgauge.harness.core import rng
from leakgauge.harness.core.contract import Attack, Examples, Message, Observation, ObservedRound
from leakgauge.harness.core.rng import Key
from leakgauge.harness.core.vec import Layout
from leakgauge.harness.federation.round import Round

_CUT = 3.0  # the largest entry of a cut estimate, in medians

_IMAGES = 20_000  # the most images of all own clients, if there are more than `_FEWEST`

_FEWEST = 24  # the fewest own clients

_SENT = 60  # own clients who also send messages

TOGETHER = 512  # the most records whose gradients are computed at once

_ENTRIES = 2**25  # the most numbers of clients' updates that are held


class ByOwnClients(Attack):
    """The common part of attacks that compare messages with those of clients of the adversary's own."""

    aware: ClassVar[bool] = True  # the adversary's own messages pass through the defense
    needs: ClassVar[frozenset[str]] = frozenset({"messages", "models", "auxiliary"})


def most_clients(seen: Observation, wanted: int, images: int) -> int:
    """The number of own clients of that many images: fewer than wanted if they take much memory or many gradients."""
    return max(_FEWEST, min(wanted, _ENTRIES // seen.setting.dim, _IMAGES // images))


def labels_of(seen: Observation, clients: int, records: int, key: Key, *, skewed: bool = False) -> Tensor:
    """[clients, records] labels of own clients: those of the first victim if granted, or drawn from the auxiliary data.

    The labels of a regression are 0.

    Args:
        skewed: whether each client has some of the labels only, equally often, so that clients differ much.
    """
    assert seen.auxiliary is not None
    every = kinds(seen.auxiliary.y)
    if seen.labels is not None and seen.marked is not None:  # then all victims have the same labels
        return kinds(seen.labels[0]).expand(clients, records)
    if not skewed:
        return every[torch.from_numpy(rng.integers(key, clients * records, len(every)))].view(clients, records)
    known, rows = torch.unique(every), []
    for number in range(clients):
        own = key.child(number)
        some = rng.subset(own.child("some"), len(known), 1 + int(rng.integers(own.child("how many"), 1, len(known))[0]))
        rows.append(known[some[rng.integers(own.child("labels"), records, len(some))]])
    return torch.stack(rows)


def kinds(y: Tensor) -> Tensor:
    """The labels [n]; 0 for the numbers of a regression."""
    return torch.zeros(len(y), dtype=torch.int64) if y.is_floating_point() else y


def drawn(seen: Observation, labels: Tensor, key: Key, marks: Tensor | None = None) -> Examples:
    """Auxiliary records x [m, b, ...], y [m, b] with these labels [m, b], with replacement.

    The last third of the clients has a third of the records, which no other client has: only these show how far a
    client with new records is from the others. A single record of a label is in both parts; in place of a label without
    records, all are drawn from.

    Args:
        marks: [m, b] whether a record has the property in question; None: any record.

    Raises:
        ValueError: no auxiliary record of a label has the property, or all have it.
    """
    own = seen.auxiliary
    assert own is not None
    rows, first = torch.empty(labels.shape, dtype=torch.int64), len(labels) - held(len(labels))
    last = torch.arange(len(labels)) >= first
    known, having = kinds(own.y), torch.zeros(0) if seen.marked is None else seen.marked.has
    for label in torch.unique(labels).tolist():
        for mark in (None,) if marks is None else (True, False):
            alike = known == label if mark is None else (known == label) & (having == mark)
            places = labels == label if mark is None else (labels == label) & (marks == mark)
            pool = torch.nonzero(alike if mark is not None or bool(alike.any()) else torch.ones_like(alike))[:, 0]
            cut = min(len(pool) - 1, len(pool) - held(len(pool))) if len(pool) > 1 else 0
            for part, here in ((pool[:cut] if cut else pool, ~last), (pool[cut:], last)):
                wanted = places & here[:, None]
                count = int(wanted.sum())
                if count and not len(part):
                    raise ValueError(f"expected auxiliary records of label {label} with and without the property")
                if count:
                    at = rng.integers(key.child(int(label), str(mark), int(here[0])), count, len(part))
                    rows[wanted] = part[torch.from_numpy(at)]
    return Examples(own.x[rows], own.y[rows])


def held(clients: int) -> int:
    """How many of the own clients, the last ones, share no record with the others."""
    return clients // 3


class Revealed(NamedTuple):
    """What messages reveal of updates in one reading; float64.

    updates: [m, d] of the adversary's own clients, without a defense; own: [k, d], k <= m, as the messages of the first
        ones reveal them; sent: [n, d] as the victims' messages do. scale: [d], the unit: the errors in each tensor, or
        1.
    """

    updates: Tensor
    own: Tensor
    sent: Tensor
    scale: Tensor

    @property
    def centered(self) -> Revealed:
        """The same around the means of the own clients."""
        center = self.own.mean(0)
        return Revealed(self.updates - self.updates.mean(0), self.own - center, self.sent - center, self.scale)

    @classmethod
    def of(cls, updates: Tensor, own: Tensor, sent: Tensor, layout: Layout) -> Revealed:
        """The same in units of the errors in each tensor, if all tensors have errors."""
        plain = cls(updates, own, sent, torch.ones(layout.dim, dtype=torch.float64))
        errors = layout.split(own - plain.shrink * updates[: len(own)])
        scale = torch.cat([tensor.square().mean().sqrt().expand(tensor[0].numel()) for tensor in errors])
        return cls(updates / scale, own / scale, sent / scale, scale) if bool((scale > 0).all()) else plain

    @property
    def shrink(self) -> float:
        """The factor of an update in what its message reveals."""
        known = self.updates[: len(self.own)]
        return float((self.own * known).sum() / known.square().sum().clamp(min=1e-300))

    @property
    def noise(self) -> Tensor:
        """The mean square of the errors of what messages reveal."""
        return (self.own - self.shrink * self.updates[: len(self.own)]).square().mean()


def revealed(seen: Observation, observed: ObservedRound, batches: Examples, key: Key) -> list[Revealed]:
    """Two readings of the messages of clients with these batches, at most `_SENT`, and of the victims.

    The first one is the defense's estimate. The second one is the same with large entries cut at three times the median
    one, which tells more if errors have heavy tails (Huber 1964).
    """
    (m, b), updates, made = batches.y.shape, list[Tensor](), list[Message]()
    size = max(1, min(TOGETHER, _ENTRIES // 4 // seen.setting.dim) // b)
    for start in range(0, m, size):
        some = Examples(*(part[start : start + size] for part in batches))
        if start < _SENT:
            each, round_ = own_messages(seen, observed, some, start, key)
            made += round_.messages
        else:
            each = own_updates(seen, observed, some)
        updates.append(each.double().nan_to_num(0.0, 0.0, 0.0).sum(1))
    server = Round(seen.defense, seen.setting, observed.model.state, observed.model.round)
    own, sent = (
        torch.stack([server.read(each).double() for each in messages]) for messages in (made, observed.messages)
    )
    layout, sums = seen.setting.layout, torch.cat(updates)
    medians = [tensor.abs()[tensor != 0].median().nan_to_num(0.0) for tensor in layout.split(own)]
    most = torch.cat([_CUT * middle.expand(n) for middle, n in zip(medians, layout.sizes, strict=True)])
    cut = torch.clamp(own, -most, most), torch.clamp(sent, -most, most)
    return [Revealed.of(sums, *read, layout) for read in ((own, sent), cut)]


def own_pairs(scores: Tensor) -> float:
    """How well scores [n, n] of pairs find the n true ones on the diagonal: mean rank, plus the share found."""
    right = scores.diagonal()[:, None]
    return float((scores < right).double().mean() + ((scores >= right).sum(1) == 1).double().mean())
