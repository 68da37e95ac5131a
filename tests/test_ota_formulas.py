"""Over-the-air powers and claims against the golden allocations, the printed tables and exact accounting."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from leakgauge.defenses._ota import (
    Channel,
    allocate,
    claimed_epsilon,
    claimed_mu,
    colluding_mu,
    composed_claim,
    orthogonal,
    rayleigh_gains,
)
from leakgauge.harness.core.gaussian import gaussian_epsilon
from leakgauge.harness.core.rng import Key
from tests.by_rows import by_rows
from tests.oracles import ALPHA, OTA_ROUNDS, follows
from tests.ota_case import DELTA, GOLDEN

"""False-alarm rate of every statistical test in this file."""

# user, epsilon by the formula and exactly if all others collude, in the first golden allocation; printed values
COLLUDING = [(0, 5.16, 4.68), (1, 3.39, 2.84), (2, 2.31, 1.83), (3, 1.61, 1.21)]
# users, P(feasible at A = min) over 3000 Rayleigh channels; printed with three decimals
FEASIBLE = [(2, 0.036), (5, 0.296), (8, 0.644), (10, 0.791), (15, 0.970), (20, 0.999)]

FIRST = allocate(Channel((0.5, 1, 2, 4), 100, 1.0), (1.2,) * 4, DELTA, 1.0)
RECIPE = {"power": 1000.0, "noise_variance": 1.0}
"""30 dB above the receiver's noise."""

CHANNEL = st.builds(
    Channel,
    st.lists(st.floats(1e-3, 20), min_size=1, max_size=12).map(tuple),
    st.floats(0.1, 1e4),
    st.sampled_from([0.0, 1.0, 50.0]),
)


@pytest.mark.parametrize(("gains", "power", "epsilons", "feasible", "aligned", "needed", "noise"), GOLDEN)
def test_the_allocation_has_the_golden_values(gains, power, epsilons, feasible, aligned, needed, noise):
    found = allocate(Channel(gains, power, 1.0), epsilons, DELTA, 2.0)
    assert (found.aligned_power == found.channel.received.min()) == feasible
    assert found.aligned_power == pytest.approx(aligned, abs=5.1e-7)
    assert sum(found.noise) == pytest.approx(needed, abs=5.1e-7)
    assert found.noise == pytest.approx(noise, abs=5.1e-7)
    assert found.epsilon == pytest.approx(min(epsilons), rel=1e-12)
    assert found.gain == pytest.approx(math.sqrt(aligned) / 2, abs=5.1e-7)


@given(CHANNEL, st.data())
def test_an_allocation_keeps_the_claim_within_everyones_power(channel, data):
    epsilons = data.draw(st.lists(st.floats(0.05, 30), min_size=channel.users, max_size=channel.users))
    found = allocate(channel, epsilons, DELTA, 1.5)
    alpha, beta, received = np.array(found.alpha), np.array(found.beta), channel.received
    assert (alpha > 0).all()
    assert (beta >= 0).all()
    assert (alpha + beta).max() <= 1 + 1e-12
    assert alpha * received == pytest.approx(found.aligned_power, rel=1e-12)
    assert beta * received == pytest.approx(np.array(found.noise), rel=1e-12)
    needed = 4 * found.aligned_power / claimed_mu(min(epsilons), DELTA) ** 2 - channel.noise_variance
    assert sum(found.noise) == pytest.approx(max(0.0, needed), rel=1e-9, abs=1e-9 * channel.noise_variance)
    if needed >= 0:
        assert found.epsilon == pytest.approx(min(epsilons), rel=1e-9)
    else:
        assert found.epsilon < min(epsilons)
    # the strongest signal: the weakest user is at its limit, or all users are
    feasible = found.aligned_power == received.min()
    assert (alpha.max() if feasible else alpha + beta) == pytest.approx(1.0, rel=1e-9)


def test_noise_goes_first_to_users_with_the_least_remaining_power():
    found = allocate(Channel((0.05, 0.3, 1, 2, 4, 0.8), 1000, 1.0), (1.2,) * 6, DELTA, 1.0)
    room = found.channel.received - found.aligned_power
    order = np.argsort(room)
    full = np.isclose(np.array(found.noise)[order], room[order])
    empty = np.array(found.noise)[order] == 0
    assert full.tolist() == [True] * 4 + [False] * 2
    assert empty.tolist() == [True] + [False] * 4 + [True]  # the weakest has no room, the strongest adds none


def test_the_mu_of_the_papers_point_has_the_printed_value():
    assert claimed_mu(1.2, DELTA) == pytest.approx(0.27627, abs=5.1e-6)
    assert claimed_epsilon(claimed_mu(1.2, DELTA), DELTA) == pytest.approx(1.2, rel=1e-15)
    assert gaussian_epsilon(claimed_mu(1.2, DELTA), DELTA) == pytest.approx(0.8656, abs=5.1e-5)
    assert gaussian_epsilon(claimed_mu(1.2, 1e-5), 1e-5) == pytest.approx(0.917, abs=5.1e-4)
    assert FIRST.mu == pytest.approx(0.27627, abs=5.1e-6)


@pytest.mark.parametrize(("delta", "crossover"), [(1e-4, 7.991), (1e-5, 8.420)])
def test_the_classical_bound_turns_false_at_the_printed_epsilon(delta, crossover):
    low, high = crossover - 6e-4, crossover + 6e-4
    assert gaussian_epsilon(claimed_mu(low, delta), delta) < low
    assert gaussian_epsilon(claimed_mu(high, delta), delta) > high


@pytest.mark.parametrize(("rounds", "claimed", "digit", "total"), [row[:4] for row in OTA_ROUNDS])
def test_the_claim_of_a_run_has_the_printed_values(rounds, claimed, digit, total):
    claim = composed_claim(1.2, DELTA, rounds, DELTA)
    assert claim.epsilon == pytest.approx(claimed, abs=1.02 * digit)
    assert claim.delta == pytest.approx(total, rel=1e-12)


def test_a_composed_claim_may_be_infinite():
    assert composed_claim(1.2, DELTA, 10_000, DELTA) == (math.inf, 1.0)
    assert composed_claim(710.0, DELTA, 1, DELTA) == (math.inf, 2e-4)
    assert composed_claim(math.inf, DELTA, 1, DELTA).epsilon == math.inf
    assert composed_claim(0.0, DELTA, 1, DELTA).epsilon == 0.0


@pytest.mark.parametrize(("user", "claimed", "true"), COLLUDING)
def test_colluding_users_leave_the_printed_epsilons(user, claimed, true):
    mu = colluding_mu(FIRST, user)
    assert claimed_epsilon(mu, DELTA) == pytest.approx(claimed, abs=5.1e-3)
    assert gaussian_epsilon(mu, DELTA) == pytest.approx(true, abs=5.1e-3)


def test_a_user_without_noise_of_its_own_has_only_the_receivers_noise():
    found = allocate(Channel((0.05, 1, 2, 4), 100, 1.0), (1.2,) * 4, DELTA, 1.0)
    assert (found.alpha[0], found.beta[0]) == (1.0, 0.0)
    assert colluding_mu(found, 0) == pytest.approx(2 * math.sqrt(5), rel=1e-12)
    assert colluding_mu(found, 0, receiver_noise=False) == math.inf
    assert colluding_mu(found, 1, receiver_noise=False) == pytest.approx(2 * math.sqrt(5 / 95), rel=1e-12)


@given(st.lists(st.floats(0, 1e6), min_size=4, max_size=4), st.floats(1e-9, 1e6), st.integers(0, 3))
def test_no_eavesdropper_learns_more_than_the_antenna_sends(gains, noise, user):
    # it hears x_j with gains of its own: signal g_k alpha_k P, noise sum g_j beta_j P + its own
    alpha, beta, power = np.array(FIRST.alpha), np.array(FIRST.beta), FIRST.channel.power
    heard = 2 * math.sqrt(gains[user] * alpha[user] * power / (np.array(gains) @ beta * power + noise))
    assert heard <= colluding_mu(FIRST, user, receiver_noise=False) * (1 + 1e-12)


def test_an_eavesdropper_may_learn_more_than_is_claimed():
    alpha, beta = FIRST.alpha[0], FIRST.beta[0]
    near_the_weakest_user = 2 * math.sqrt(alpha * 100 / (beta * 100 + 0.01))
    assert claimed_epsilon(near_the_weakest_user, DELTA) > 4 * FIRST.epsilon


@by_rows(
    (0.01, 1.0, 0.0, 0.868722),
    (0.5, 0.056171, 0.943829, 1.2),
    (5.0, 0.022468, 0.977532, 1.2),
    (100.0, 0.018911, 0.981089, 1.2),
    (1000.0, 0.018742, 0.981258, 1.2),
)
def test_orthogonal_users_split_their_power_as_printed(received, alpha, beta, epsilon):
    found = orthogonal(Channel((received,), 1.0, 1.0), (1.2,), DELTA, 1.0)
    assert found.alpha == pytest.approx([alpha], abs=5.1e-7)
    assert found.beta == pytest.approx([beta], abs=5.1e-7)
    assert found.epsilons == pytest.approx([epsilon], abs=5.1e-7)


@given(CHANNEL, st.data())
def test_orthogonal_users_each_keep_their_own_claim(channel, data):
    epsilons = data.draw(st.lists(st.floats(0.05, 30), min_size=channel.users, max_size=channel.users))
    found = orthogonal(channel, epsilons, DELTA, 1.5)
    alpha, beta, g = np.array(found.alpha), np.array(found.beta), channel.received
    noisy = beta > 0
    assert (alpha + beta).max() <= 1 + 1e-12
    assert (alpha + beta)[noisy] == pytest.approx(1.0, rel=1e-9)
    assert alpha[~noisy] == pytest.approx(1.0, rel=1e-9)
    # (15)
    formula = 2 * np.sqrt(g * alpha / (g * beta + channel.noise_variance)) * math.sqrt(2 * math.log(1.25 / DELTA))
    assert np.array(found.epsilons) == pytest.approx(formula, rel=1e-12)
    assert formula[noisy] == pytest.approx(np.array(epsilons)[noisy], rel=1e-9)
    assert (formula <= np.array(epsilons) * (1 + 1e-9)).all()


@by_rows((10, 0.524, 5.241, 5e-4), (50, 0.0210, 1.048, 5e-5), (150, 0.00233, 0.349, 5e-6))
@pytest.mark.parametrize("lipschitz", [1.0, 3.0])
def test_the_sum_is_less_noisy_than_single_messages_by_the_printed_factor(users, over_the_air, apart, digit, lipschitz):
    # printed: 8 L^2 ln(1.25/delta) / (eps^2 K^2), and / (eps^2 K) at the same epsilon; in units of L^2
    channel = Channel(rayleigh_gains(Key(0), users), **RECIPE)
    together, single = (make(channel, (1.2,) * users, DELTA, lipschitz) for make in (allocate, orthogonal))
    assert together.gradient_variance / lipschitz**2 == pytest.approx(over_the_air, abs=1.02 * digit)
    assert all(beta > 0 for beta in single.beta)
    assert single.gradient_variance / lipschitz**2 == pytest.approx(apart, abs=5.1e-4)


def test_squared_gains_are_exponential():
    # 300,000 draws detect a scale off by 6 % (0.02 in the distribution function) with a miss rate under 1e-6
    gains = np.array(rayleigh_gains(Key(3), 300_000))
    assert follows(gains, stats.expon.cdf)
    assert not follows(1.06 * gains, stats.expon.cdf)
    assert abs(stats.pearsonr(gains[1:], gains[:-1]).statistic) < 5 / 300_000**0.5


def chance(users, epsilon):
    """P(feasible at A = min): the least of K exponentials is exponential of rate K, apart from what they exceed it by.

    That excess is Gamma(K - 1), and the channel is infeasible where a times the least, a = 8 ln(1.25/delta) / eps^2, is
    above it (by the receiver's 1 / P).
    """
    a = 8 * math.log(1.25 / DELTA) / epsilon**2
    return 1 - math.exp(-users / (RECIPE["power"] * a)) * (1 + users / a) ** (1 - users)


def feasible(gains):
    """Of each row of squared gains [n, K], whether Theorem 3 can be had at A = min, written out; noise variance 1."""
    received = RECIPE["power"] * gains
    least = received.min(1)
    return (received - least[:, None]).sum(1) >= 8 * least * math.log(1.25 / DELTA) / 1.44 - 1


@pytest.mark.parametrize(("users", "printed"), FEASIBLE)
@pytest.mark.table(3)
def test_rayleigh_channels_are_feasible_with_the_printed_probability(users, printed):
    # 250,000 channels detect an epsilon off by 6 % with a miss rate under 1e-6 (10 standard errors at K = 2)
    n = 250_000
    gains = np.array(rayleigh_gains(Key(4).child(users), n * users)).reshape(n, users)
    count = int(feasible(gains).sum())
    assert stats.binomtest(count, n, chance(users, 1.2)).pvalue > ALPHA
    assert stats.binomtest(count, n, chance(users, 1.2 / 1.06)).pvalue < ALPHA
    # the printed share is one of 3000 channels
    low, high = stats.binom.interval(1 - ALPHA, 3000, chance(users, 1.2))
    assert low - 1.5 <= 3000 * printed <= high + 1.5
    for row in gains[:200]:
        channel = Channel(tuple(row.tolist()), **RECIPE)
        aligned = allocate(channel, (1.2,) * users, DELTA, 1.0).aligned_power
        assert (aligned == channel.received.min()) == bool(feasible(row[None])[0])


TWO = Channel((1.0, 2.0), 1.0, 1.0)


@by_rows(
    (lambda: Channel((), 1.0, 1.0), "expected users > 0"),
    (lambda: Channel((1.0, math.nan), 1.0, 1.0), "expected squared gains > 0"),
    (lambda: allocate(TWO, (1.0,), DELTA, 1.0), "expected one epsilon per user, got 1 for 2 users"),
    (lambda: allocate(TWO, (1.0, 0.0), DELTA, 1.0), "expected epsilon > 0"),
    (lambda: allocate(TWO, (1.0, 1.0), 1.0, 1.0), "expected 0 < delta < 1, got delta=1.0"),
    (lambda: allocate(TWO, (1.0, 1.0), DELTA, 0.0), "expected lipschitz > 0"),
    (lambda: orthogonal(TWO, (1.0, 1.0), DELTA, math.inf), "expected lipschitz > 0"),
    (lambda: orthogonal(TWO, (1.0,) * 3, DELTA, 1.0), "expected one epsilon per user, got 3 for 2 users"),
    (lambda: claimed_epsilon(-1.0, DELTA), "expected mu >= 0"),
    (lambda: claimed_mu(math.nan, DELTA), "expected epsilon >= 0"),
    (lambda: composed_claim(1.0, DELTA, 0, DELTA), "expected rounds > 0"),
    (lambda: composed_claim(1.0, DELTA, 1, 0.0), "expected 0 < delta_prime < 1, got delta_prime=0.0"),
    (lambda: composed_claim(-1.0, DELTA, 1, DELTA), "expected epsilon >= 0, got epsilon=-1.0"),
    (lambda: colluding_mu(FIRST, 4), "expected a user from 0 to 3, got user=4"),
    (lambda: colluding_mu(FIRST, -1), "expected a user from 0 to 3, got user=-1"),
    (lambda: rayleigh_gains(Key(0), 0), "expected users > 0"),
)
def test_arguments_out_of_range_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()
