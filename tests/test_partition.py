"""Who holds which training samples."""

import dataclasses
import re

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chi2, norm

from leakgauge import Key, rng
from leakgauge.harness.core.cell import FederationSpec
from leakgauge.harness.learn.partition import dirichlet, partition
from leakgauge.harness.study.study import resolve
from tests.by_rows import by_rows

KEY = Key(0, ("partition",))
KINDS = ("iid", "shards", "dirichlet", "unbalanced")
TEN = torch.arange(1000) % 10


@st.composite
def cases(draw):
    """A specification that can be met, with labels."""
    clients, shards = draw(st.integers(1, 12)), draw(st.integers(1, 3))
    n = draw(st.integers(clients * shards, 150))
    spec = FederationSpec(
        clients=clients,
        partition=draw(st.sampled_from(KINDS)),
        alpha=draw(st.sampled_from([1e-8, 1e-2, 0.5, 1.0, 100.0])),
        shards=shards,
        imbalance=draw(st.sampled_from([0.0, 0.5, 5.0, 100.0])),
        samples=draw(st.none() | st.integers(clients * shards, n)),
    )
    labels = rng.integers(Key(draw(st.integers(0, 99))), n, draw(st.integers(1, 11)))
    return spec, torch.from_numpy(labels)


@settings(derandomize=True, deadline=None, max_examples=300)
@given(cases(), st.integers(0, 99))
def test_every_used_sample_belongs_to_one_client_and_no_client_is_empty(case, seed):
    spec, labels = case
    parts = partition(spec, labels, Key(seed))
    held = np.concatenate(parts)
    assert len(parts) == spec.clients
    assert len(held) == (spec.samples or len(labels)) == len(np.unique(held))
    assert 0 <= held.min() <= held.max() < len(labels)
    for part in parts:
        assert part.dtype == np.int64
        assert len(part) >= 1
        assert (np.diff(part) > 0).all()


@pytest.mark.parametrize("kind", KINDS)
def test_the_key_alone_decides_and_the_used_subset_is_the_same_for_every_kind(kind):
    spec = FederationSpec(partition=kind, samples=500)
    first, again, other = (partition(spec, TEN, key) for key in (KEY, KEY, KEY.child("other")))
    assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))
    assert not all(np.array_equal(a, b) for a, b in zip(first, other, strict=True))
    iid = np.concatenate(partition(FederationSpec(samples=500), TEN, KEY))
    assert np.array_equal(np.sort(np.concatenate(first)), np.sort(iid))


@pytest.mark.parametrize("changes", [{}, {"partition": "unbalanced", "imbalance": 0.0}], ids=["iid", "no imbalance"])
def test_clients_differ_in_size_by_one_at_most(changes):
    sizes = [len(part) for part in partition(FederationSpec(clients=7, **changes), TEN, KEY)]
    assert sorted(sizes) == [142] * 1 + [143] * 6


def test_two_shards_a_client_are_two_classes_at_most():  # McMahan et al. 2017, section 3: 200 shards of 300
    labels = torch.arange(60_000) % 10
    parts = partition(FederationSpec(clients=100, partition="shards", shards=2), labels, KEY)
    assert {len(part) for part in parts} == {600}
    assert max(len(labels[part].unique()) for part in parts) == 2


def test_a_huge_alpha_gives_every_client_the_classes_of_all():
    # q then has a standard deviation under 1e-6, a thousandth of one sample
    parts = partition(FederationSpec(partition="dirichlet", alpha=1e12), TEN, KEY)
    counts = np.stack([np.bincount(TEN[part], minlength=10) for part in parts])
    assert (counts == 10).all()


def test_a_tiny_alpha_gives_every_class_to_clients_that_hold_little_else():
    # alpha -> 0: each client has one class; classes that no client drew go to one client each
    parts = partition(FederationSpec(clients=5, partition="dirichlet", alpha=1e-8), TEN, KEY)
    holders = np.stack([np.bincount(TEN[part], minlength=10) > 0 for part in parts])
    assert holders.sum() <= 5 + 10
    assert holders.any(axis=0).all()


def test_smaller_alpha_is_further_from_the_classes_of_all():
    def distance(alpha):
        parts = partition(FederationSpec(clients=20, partition="dirichlet", alpha=alpha), TEN, KEY)
        shares = np.stack([np.bincount(TEN[part], minlength=10) / len(part) for part in parts])
        return np.abs(shares - 0.1).sum(axis=1).mean()

    assert distance(0.1) > distance(1.0) > distance(10.0) > distance(1000.0)


def test_clients_that_end_empty_take_one_sample_each_of_the_largest():
    # as many samples as clients: such uneven shares never give one sample each by themselves
    parts = partition(FederationSpec(clients=50, partition="dirichlet", alpha=0.1, samples=50), TEN, KEY)
    assert [len(part) for part in parts] == [1] * 50


def log_size_spread(imbalance, clients):
    """The sample variance of the log of the sizes, times clients - 1."""
    labels = torch.zeros(200 * clients, dtype=torch.int64)
    spec = FederationSpec(clients=clients, partition="unbalanced", imbalance=imbalance)
    logs = np.log([len(part) - 1 for part in partition(spec, labels, KEY)])
    return ((logs - logs.mean()) ** 2).sum()


def test_log_sizes_have_the_declared_spread():
    # alpha = beta = 1e-6, effect: a spread off by 10 %; the estimate's relative error is 1/sqrt(2 clients)
    miss = norm.isf(1e-6 / 2) + norm.isf(1e-6) * 1.1
    clients = 5700
    assert clients >= (miss / 0.1) ** 2 / 2
    low, high = chi2.ppf([0.5e-6, 1 - 0.5e-6], clients - 1) * 0.5**2
    assert low < log_size_spread(0.5, clients) < high
    assert not low < log_size_spread(0.55, clients) < high  # the twin: 10 % off is seen


@by_rows(
    (FederationSpec(clients=10, samples=9), "clients: got 10, expected at most 9: a client"),
    (FederationSpec(clients=10, samples=1001), "samples: got 1001, expected at most 1000 training samples"),
    (FederationSpec(clients=1001), "clients: got 1001, expected at most 1000: a client"),
    (
        FederationSpec(partition="shards", shards=3, samples=29),
        "shards: got 3 for each of 10 clients, expected at most 29 in all",
    ),
)
def test_an_impossible_deal_is_refused_with_the_numbers(spec, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        partition(spec, TEN, KEY)
    with pytest.raises(ValueError, match=r"one axis, got shape \(10, 2\)"):
        partition(FederationSpec(), torch.zeros(10, 2, dtype=torch.int64), KEY)


@pytest.mark.parametrize("alpha", [0.2, 1.0])
def test_a_client_without_a_sample_takes_the_first_one_of_the_largest_the_first_if_tied(alpha, monkeypatch):
    classes = rng.integers(KEY.child("classes"), 305, 10)
    filled = dirichlet(classes, 300, alpha, KEY)
    monkeypatch.setattr("leakgauge.harness.learn.partition._fill", lambda parts: None)
    parts = dirichlet(classes, 300, alpha, KEY)
    assert sum(len(part) == 0 for part in parts) > 10
    for number in range(300):
        if len(parts[number]) == 0:
            largest = max(range(300), key=lambda other: len(parts[other]))
            parts[number], parts[largest] = parts[largest][:1], parts[largest][1:]
    assert all(map(np.array_equal, filled, parts))


@pytest.mark.parametrize(("clients", "each"), [(10, 1), (10, 4), (13, 3), (50, 10), (7, 9)])
def test_each_client_has_exactly_so_many_labels_and_each_label_equally_many_clients(clients, each):
    spec = FederationSpec(clients=clients, partition="labels", labels=each, samples=900)
    parts = partition(spec, TEN, KEY)
    assert [len(np.unique(TEN[part])) for part in parts] == [each] * clients
    assert len(np.unique(np.concatenate(parts))) == sum(map(len, parts)) == 900
    holders = [sum(bool((TEN[part] == label).any()) for part in parts) for label in range(10)]
    assert max(holders) - min(holders) <= 1
    for label in range(10):
        shares = [n for part in parts if (n := int((TEN[part] == label).sum()))]
        assert max(shares) - min(shares) <= 1


def test_the_labels_of_clients_are_drawn():
    spec = FederationSpec(clients=50, partition="labels", labels=4)
    sets = [{tuple(np.unique(TEN[part])) for part in partition(spec, TEN, KEY.child(n))} for n in range(2)]
    assert sets[0] != sets[1]
    assert min(map(len, sets)) > 10  # 14 and more; a circle of labels would have 5


@pytest.mark.parametrize(("clients", "each"), [(10, 11), (3, 3)])
def test_labels_that_do_not_go_round_are_refused(clients, each):
    with pytest.raises(
        ValueError, match=f"labels: got {each} for each of {clients} clients, expected at most 10, so that"
    ):
        partition(FederationSpec(clients=clients, partition="labels", labels=each), TEN, KEY)


def test_a_label_with_too_few_samples_is_refused():
    labels = torch.tensor([0] * 30 + [1])
    with pytest.raises(ValueError, match="labels: label 1 has 1 samples, expected one for each of 4 clients"):
        partition(FederationSpec(clients=4, partition="labels", labels=2), labels, KEY)


def test_given_sizes_are_repeated():
    spec = FederationSpec(clients=5, partition="sizes", sizes=(40, 60, 80))
    parts = partition(spec, TEN, KEY)
    assert [len(part) for part in parts] == [40, 60, 80, 40, 60]
    assert len(np.unique(np.concatenate(parts))) == 280
    with pytest.raises(ValueError, match="sizes: their sum is 1200, expected at most 1000 training samples"):
        partition(dataclasses.replace(spec, sizes=(240,)), TEN, KEY)


def test_a_study_names_sizes_as_a_list_of_lists_and_older_cells_keep_their_ids():
    table = {"name": "sizes", "tasks": [{"data": "digits", "model": "linear"}], "defenses": [{"name": "none"}]}
    sizes = {"clients": 4, "rounds": 1, "partition": "sizes", "sizes": [[40, 60], [50]]}
    found = resolve(table | {"federations": [sizes]}).trainings
    assert [one.federation.sizes for one in found] == [(40, 60), (50,)]
    assert len({one.id for one in found}) == 2
