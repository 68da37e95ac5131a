"""What no test can see: the divergences behind docs/audit-power.md, against distributions that are written out."""

import itertools

import numpy as np
import pytest
from scipy import special

from leakgauge.defenses._privquant import choose
from leakgauge.harness.audit.goodness_of_fit import LEVEL
from tests.faults import best


def channel_table(channel):
    """[K^d inputs, K^d outputs] probabilities."""
    every = np.array(list(itertools.product(range(channel.levels), repeat=channel.d)))
    many = (every[:, None] == every[None]).sum(2) >= channel.tau
    favored = special.expit(channel.logit)
    return np.where(many, favored / many.sum(1, keepdims=True), (1 - favored) / (~many).sum(1, keepdims=True))


def distribution_of_signs(channel, values):
    """[2^d] probabilities of a message of signs, for an update within [-1, 1]."""
    every = np.array(list(itertools.product((-1, 1), repeat=channel.d)))
    return ((1 + every * values) / 2).prod(1) @ channel_table(channel)


def of_update(honest, fault, values):
    """KL for one update."""
    return best.divergence(*(np.log(distribution_of_signs(one, values)) for one in (fault, honest)))


@pytest.mark.parametrize(("levels", "epsilon", "other"), [(2, 3.0, 3.2), (2, 3.0, 9.0), (3, 4.0, 4.4), (3, 4.0, 9.0)])
def test_a_channel_says_of_its_noise_what_its_table_says(levels, epsilon, other):
    honest, fault = choose(3, levels, epsilon), choose(3, levels, other)
    tables = [np.log(channel_table(one)) for one in (fault, honest)]
    for row in range(0, levels**3, 5):
        assert best.of_channel(fault, honest) == pytest.approx(best.divergence(*(t[row] for t in tables)), rel=1e-9)


@pytest.mark.parametrize("k", [1, 2, 4])
@pytest.mark.parametrize("other", [1.2, 24.0])
def test_signs_say_of_the_noise_what_their_distribution_says(k, other):
    honest, fault = choose(4, 2, 1.0), choose(4, 2, other)
    values = np.where(np.arange(4) < k, k**-0.5, 0.0)
    assert best.of_flat(fault, honest, k) == pytest.approx(of_update(honest, fault, values), rel=1e-9)


@pytest.mark.parametrize("other", [1.0 / 0.95, 24.0])
def test_no_update_says_more_than_one_with_equal_coordinates(other):
    honest, fault = choose(4, 2, 1.0), choose(4, 2, other)
    most = max(best.of_flat(fault, honest, k) for k in (1, 2, 4))
    draw = np.random.Generator(np.random.Philox(1)).standard_normal((300, 4)) ** 3
    found = [of_update(honest, fault, row / np.linalg.norm(row)) for row in draw]
    assert 0.9 * most < max(found) <= most * (1 + 1e-9)


def test_clean_messages_of_mvu_say_what_their_count_of_errors_says():
    share, n = 0.01, 12
    errs = [best.design(epsilon, 1, 1).P[0, 1] for epsilon in (24.0, 2.0)]
    every = np.array(list(itertools.product((0, 1), repeat=n)))
    clean, honest = (np.where(every, err, 1 - err).prod(1) for err in errs)
    expected = best.divergence(np.log(share * clean + (1 - share) * honest), np.log(honest))
    assert best.mvu(2.0, 24.0, share, n) == pytest.approx(expected, rel=1e-9)


def test_points_say_what_randomized_response_says():
    distributions = [np.full(6, 1 / (np.exp(epsilon) + 5)) for epsilon in (2.2, 2.0)]
    for distribution in distributions:
        distribution[0] = 1 - distribution[1:].sum()
    assert best.vqsgd(2.0, 2.2, 6, 3) == pytest.approx(3 * best.divergence(*map(np.log, distributions)), rel=1e-9)


def test_the_best_test_of_normal_numbers_needs_more_messages_and_not_twice_as_many():
    for shift in (1e-3, 0.1):
        n = best.messages(shift**2 / 2)
        low, high = (special.ndtr(shift * (times * n) ** 0.5 + special.ndtri(LEVEL)) for times in (1, 2))
        assert low < best.POWER < high


def test_a_channel_of_epsilon_400_shows_only_long_messages():
    # one branch in 10^17 messages where all levels match; 256 coordinates do not all fit into epsilon 400
    assert best.messages(best.of_channel(choose(32, 16, 421.0), choose(32, 16, 400.0))) > 1e17
    assert best.of_channel(choose(256, 16, 421.0), choose(256, 16, 400.0)) > 1
