"""The partition of the training samples among the clients."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from leakgauge.harness.core import rng
from leakgauge.harness.core.cell import FederationSpec
from leakgauge.harness.core.contract import Examples
from leakgauge.harness.core.rng import Key

Indices = npt.NDArray[np.int64]


class Holdings(Mapping[int, Examples]):
    """The data of each client as rows of one data set; rows are copied only when a client is looked up.

    rows: for each client, indices into `data`.
    """

    def __init__(self, data: Examples, rows: Mapping[int, Indices]) -> None:
        self.data, self.rows = data, rows

    def __getitem__(self, number: int) -> Examples:
        rows = self.rows[number]
        return Examples(self.data.x[rows], self.data.y[rows])

    def __iter__(self) -> Iterator[int]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)


def sizes(clients: Mapping[int, Examples]) -> dict[int, int]:
    """The number of samples of each client."""
    if isinstance(clients, Holdings):
        return {number: len(rows) for number, rows in clients.rows.items()}
    return {number: len(data.y) for number, data in clients.items()}


def partition(spec: FederationSpec, labels: Tensor, key: Key) -> list[Indices]:
    """Deal the training samples to the clients, by `spec.partition`.

    Args:
        spec: `clients`, `samples`, `partition` and its parameter are used.
        labels: [n] of all training samples; integers, or the numbers of a regression.
        key: determines which samples are used, and by which clients.

    Returns:
        One sorted array of indices into `labels` per client.

    Guarantees:
        Every used sample belongs to one client; no client is empty.
        `spec.samples` samples, or the sum of the given sizes, are used: a uniform subset, the same for every kind of
        partition.

    Raises:
        ValueError: there are too few samples, clients or classes for the partition, or the samples of a regression are
            to be dealt by class.
    """
    check_labels(spec, labels)
    if labels.ndim != 1:
        raise ValueError(f"partition: expected labels with one axis, got shape {tuple(labels.shape)}")
    given = np.resize(np.asarray(spec.sizes, dtype=np.int64), spec.clients) if spec.sizes else None
    available, used = len(labels), spec.samples or (len(labels) if given is None else int(given.sum()))
    if used > available:
        got = f"samples: got {used}" if given is None else f"sizes: their sum is {used}"
        raise ValueError(f"{got}, expected at most {available} training samples")
    if used < spec.clients:
        raise ValueError(f"clients: got {spec.clients}, expected at most {used}: a client has one sample or more")
    chosen = np.arange(available) if used == available else rng.subset(key.child("subset"), available, used)
    classes = np.asarray(labels.cpu(), dtype=np.int64)[chosen]
    match spec.partition:
        case "iid":
            hands = np.array_split(rng.permutation(key.child("deal"), used), spec.clients)
        case "shards":
            hands = shards(classes, spec.clients, spec.shards, key)
        case "dirichlet":
            hands = dirichlet(classes, spec.clients, spec.alpha, key)
        case "labels":
            hands = some_labels(classes, spec.clients, spec.labels, key)
        case "sizes":
            assert given is not None
            hands = np.split(rng.permutation(key.child("deal"), used), np.cumsum(given)[:-1])
        case "unbalanced":
            hands = unbalanced(used, spec.clients, spec.imbalance, key)
    return [np.sort(chosen[rows]) for rows in hands]


def check_labels(spec: FederationSpec, labels: Tensor) -> None:
    """Raise ValueError if samples without classes are to be dealt by class."""
    if labels.is_floating_point() and spec.partition in ("shards", "labels", "dirichlet"):
        raise ValueError(
            f"partition: got {spec.partition!r}, which deals by class, but the labels are the numbers of a regression; "
            "expected iid, unbalanced or sizes"
        )


def shards(classes: Indices, clients: int, each: int, key: Key) -> list[Indices]:
    """Sort the samples by class, cut them into equal shards (to within one), and deal `each` shards to a client.

    Raises:
        ValueError: fewer samples than shards.

    Source: McMahan et al. 2017, section 3 ("pathological non-IID": 200 shards of 300, two per client).
    """
    count = clients * each
    if len(classes) < count:
        raise ValueError(
            f"shards: got {each} for each of {clients} clients, expected at most {len(classes)} in all: a shard has "
            "one sample or more"
        )
    pieces = np.array_split(np.argsort(classes, kind="stable"), count)
    dealt = rng.permutation(key.child("deal"), count).reshape(clients, each)
    return [np.concatenate([pieces[number] for number in hand]) for hand in dealt]


def some_labels(classes: Indices, clients: int, each: int, key: Key) -> list[Indices]:
    """Give each client exactly `each` labels; a label's samples are dealt equally (to within one) to its clients.

    Each label has equally many clients, to within one: a client takes the labels that still need most clients, in
    random order where they tie.

    Raises:
        ValueError: there are fewer labels than `each`, some label has no client, or fewer samples than clients.
    """
    present = np.unique(classes)
    if each > len(present) or clients * each < len(present):
        raise ValueError(
            f"labels: got {each} for each of {clients} clients, expected at most {len(present)}, so that some client "
            f"has each of the {len(present)} labels"
        )
    needs = np.full(len(present), clients * each // len(present))
    order = rng.permutation(key.child("labels"), len(present))
    needs[order[: clients * each % len(present)]] += 1
    holders: list[list[int]] = [[] for _ in present]
    for client in range(clients):
        ties = rng.permutation(key.child("labels", client), len(present))
        for label in np.lexsort((ties, -needs))[:each]:
            needs[label] -= 1
            holders[label].append(client)
    hands: list[list[Indices]] = [[] for _ in range(clients)]
    for value, numbers in zip(present, holders, strict=True):
        members = np.flatnonzero(classes == value)
        if len(members) < len(numbers):
            raise ValueError(
                f"labels: label {value} has {len(members)} samples, expected one for each of {len(numbers)} clients"
            )
        members = members[rng.permutation(key.child("deal", int(value)), len(members))]
        for number, rows in zip(numbers, np.array_split(members, len(numbers)), strict=True):
            hands[number].append(rows)
    return [np.concatenate(hand) for hand in hands]


def dirichlet(classes: Indices, clients: int, alpha: float, key: Key) -> list[Indices]:
    """Class proportions q_k ~ Dir(alpha * p) for each client k; p are the class frequencies of the used samples.

    Client k gets the share q_k[c] / sum_j q_j[c] of class c, so clients also differ in size. If every q_k[c] is 0 in
    floating point, one random client takes class c (the limit alpha -> 0). A client left empty (with small alpha) takes
    one sample of the largest client, the first if tied.

    Source: Hsu et al. 2019 (arXiv:1909.06335). Differs: their clients have equal sizes and may leave samples unused;
    here every sample is used once, and the sizes follow from the proportions.
    """
    present, counts = np.unique(classes, return_counts=True)
    proportions = rng.dirichlet(key.child("proportions"), alpha * counts / counts.sum(), clients)
    hands: list[list[Indices]] = [[] for _ in range(clients)]
    for value, count, weights in zip(present, counts, proportions.T, strict=True):
        if weights.sum() == 0:
            weights = np.eye(clients)[rng.integers(key.child("uncovered", int(value)), 1, clients)[0]]
        members = np.flatnonzero(classes == value)[rng.permutation(key.child("deal", int(value)), int(count))]
        for hand, rows in zip(hands, np.split(members, _cuts(weights, int(count))), strict=True):
            hand.append(rows)
    parts = [np.concatenate(hand) for hand in hands]
    _fill(parts)
    return parts


def _fill(hands: list[Indices]) -> None:
    """Give each client without a sample the first one of the largest client, the first if tied."""
    by_size = [(-len(hand), number) for number, hand in enumerate(hands)]
    heapq.heapify(by_size)
    for number, hand in enumerate(hands):
        if len(hand) == 0:
            size, largest = by_size[0]
            hands[number], hands[largest] = hands[largest][:1], hands[largest][1:]
            heapq.heapreplace(by_size, (size + 1, largest))


def unbalanced(used: int, clients: int, imbalance: float, key: Key) -> list[Indices]:
    """Log-normal sizes: one sample per client, and the rest in proportion to exp(imbalance * normal)."""
    logs = imbalance * rng.normal(key.child("sizes"), (clients,), dtype=torch.float64).numpy()
    cuts = _cuts(np.exp(logs - logs.max()), used - clients) + np.arange(1, clients)
    return np.split(rng.permutation(key.child("deal"), used), cuts)


def _cuts(weights: npt.NDArray[np.float64], count: int) -> Indices:
    """Cut points of `count` items into parts in proportion to the weights, which have a positive sum."""
    return np.asarray(np.rint(np.cumsum(weights / weights.sum())[:-1] * count), dtype=np.int64)
