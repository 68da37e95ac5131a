"""The Poisson-binomial mechanism in a secure sum."""

import math

import numpy as np
import pytest
import torch
from scipy import stats

from leakgauge import Key, Link, MessageError, rng
from leakgauge.defenses.dp_fedavg import DPFedAvg
from leakgauge.defenses.poisson_binomial import PoissonBinomial
from leakgauge.harness.core.codec import pack_levels, unpack_levels
from leakgauge.harness.core.contract import Sender, claim_of
from leakgauge.harness.core.distribution import DistributionError
from leakgauge.harness.core.integer_noise import Coins
from tests.oracles import ALPHA, follows
from tests.test_secure_sum import BAR, drawn, exchanged, least_epsilon, rotation, setting_of

KEY = Key(0, ("coins",))


def test_heads_have_the_chances_of_the_rotated_clipped_update():
    # alpha 1e-6; chances that are 10 % nearer to 1/2 show in 300 messages of 64 numbers
    d, defense = 50, PoissonBinomial(clip=0.5, noise_std=0.1, bits=12)
    setting, update = setting_of(d, 4), drawn(d, 1, 3.0)[0]
    heads = []
    for number in range(300):
        state, exchange = exchanged(defense, setting, [update], KEY.child(number))
        wire = exchange.sent[0]
        assert len(wire) == 64 * 12 // 8
        heads.append((unpack_levels(wire, 64, 12) + 2048) % 4096 - 2048)
    trials, offset = defense.coins(state)
    exact = rotation(defense, d)[:, :d] @ (update.double().numpy() / float(update.double().norm()))
    chances = 0.5 + offset * np.clip(exact * 8 / 4, -1, 1)
    total = np.sum(heads, 0) + 150 * trials
    for factor, honest in ((1.0, True), (0.9, False)):
        p = 0.5 + factor * (chances - 0.5)
        statistic = np.square((total - 300 * trials * p) / np.sqrt(300 * trials * p * (1 - p))).sum()
        assert bool(stats.chi2.sf(statistic, 64) > ALPHA) is honest


def test_the_mean_is_unbiased_with_the_stated_variance():
    d, rounds, defense = 30, 200, PoissonBinomial(clip=1.0, noise_std=0.5)
    setting, updates = setting_of(d, 5), drawn(d, 5, 0.8)
    mean, errors = torch.stack(updates).double().mean(0), []
    for number in range(rounds):
        state, exchange = exchanged(defense, setting, updates, KEY.child("round", number))
        errors.append(defense.decode(state, exchange.received, exchange.links, KEY).double() - mean)
    values = torch.stack(errors).numpy() * 5 / 0.5
    assert abs(values.mean()) < 5 / math.sqrt(values.size)
    assert (np.abs(values.mean(0)) < 5 / math.sqrt(rounds)).all()
    # a coin's variance is 1/4 - t^2, with t up to 1/4
    assert 0.85 < values.var() < 1.05


def test_a_message_follows_its_stated_distribution():
    d, defense = 3000, PoissonBinomial(clip=1.0, noise_std=0.05)
    setting, updates = setting_of(d, 4), [*drawn(d, 2, 2.0), torch.zeros(d)]
    state, exchange = exchanged(defense, setting, updates)
    link = exchange.links.each()[0]
    for update, wire in zip(updates, exchange.sent, strict=True):
        stated = defense.message_distribution(state, None, update, link)
        assert follows(stated.read(wire, Key(1)).uniforms, "uniform")
    stated = defense.message_distribution(state, None, updates[0], link)
    assert not follows(stated.read(exchange.sent[1], Key(1)).uniforms, "uniform")
    impossible = pack_levels(np.full(4096, 1 << 14), 16)
    with pytest.raises(DistributionError, match="heads of"):
        stated.read(impossible, Key(1))


def sums(trials, chance, others, low, high, many):
    """Probabilities of heads: the client's coins, and others', `many` of them at the chance `high`."""
    total = stats.binom.pmf(np.arange(trials + 1), trials, chance)
    for count, at in ((many, high), (others - many, low)):
        total = np.convolve(total, stats.binom.pmf(np.arange(count + 1), count, at))
    return total


@pytest.mark.parametrize("many", [0, 400, 798])
@pytest.mark.parametrize(("part", "trials"), [(1.0, 2), (0.4, 2), (1.0, 6)])
def test_the_divergences_are_bounds_of_enumerated_sums(many, part, trials):
    offset, senders = 0.05, 400
    event = Coins(1, 1, trials, offset, senders, 1.0)
    others = (senders - 1) * trials
    here, there = (
        sums(trials, 0.5 + t, others, 0.5 - offset, 0.5 + offset, many * trials // 2) for t in (part * offset, 0.0)
    )
    for one, two in ((here, there), (there, here)):
        kept = (one > 1e-250) & (two > 1e-250)
        losses, chances = np.log(one[kept] / two[kept]), one[kept]
        for delta in (1e-3, 1e-6):
            exact = least_epsilon(losses, chances, delta)
            assert exact <= Coins(1, 1, trials, offset, senders, part**2).epsilon(delta)
        order = 9
        divergence = math.log(chances @ np.exp((order - 1) * losses)) / (order - 1)
        bound = _divergence(event, order) * part**2
        assert divergence <= bound * (1 + 1e-6)
        assert bound < 1.6 * divergence


@pytest.mark.parametrize(("trials", "offset", "senders"), [(4, 0.05, 10), (2, 0.1, 20), (32, 0.1, 2)])
def test_with_few_other_clients_a_client_s_own_coins_remain(trials, offset, senders):
    alone, together = (Coins(100, 1, trials, offset, count, 6.25).epsilon(1e-3) for count in (1, senders))
    assert together <= alone < math.inf


def _divergence(event, order):
    from leakgauge.harness.core.integer_noise import _COIN_ORDERS, _coins

    (at,) = np.flatnonzero(order == _COIN_ORDERS)
    return float(_coins(event.trials, event.offset, event.senders)[at])


@pytest.mark.parametrize(("own", "fair"), [(1, 0), (2, 7), (5, 20), (8, 3)])
def test_a_ratio_of_heads_is_a_product_of_coins_and_its_powers_grow_with_the_offset(own, fair):
    z = np.arange(own + fair + 1)
    chances = stats.binom.pmf(z, own + fair, 0.5)
    heads = stats.hypergeom.pmf(np.arange(own + 1)[:, None], own + fair, z, own)  # [own + 1, z]
    for column in heads.T:  # the polynomial of heads has real roots only, none positive: a sum of independent coins
        roots = np.roots(column[::-1])
        assert np.abs(roots.imag).max(initial=0) < 1e-3 * (1 + np.abs(roots).max(initial=0))
        assert roots.real.max(initial=0) <= 1e-9
    offsets = np.array([0.01, 0.02, 0.05, 0.1, 0.15, 0.2, 0.25])
    tilt = (1 + 2 * offsets[:, None]) ** np.arange(own + 1) * (1 - 2 * offsets[:, None]) ** (own - np.arange(own + 1))
    ratio = tilt @ heads
    for power in (-31.5, -8.0, -1.0, -0.25, 2.0, 5.0, 16.0):
        growth = (ratio**power @ chances - 1) / offsets**2
        assert np.all(np.diff(growth) >= -1e-9 * growth[1:])


@pytest.mark.parametrize(("bits", "most"), [(8, 1.22), (10, 1.13), (12, 1.10)])
def test_with_few_bits_the_noise_is_near_that_of_central_noise(bits, most):
    defense, setting = PoissonBinomial(**BAR, bits=bits, reach=2.0), setting_of(25_450, 1000, 30)
    state = defense.init(setting)
    assert claim_of(defense, [state] * 30, setting).proved.epsilon(5e-4) == pytest.approx(8.0, rel=1e-3)
    noise = state.grid * math.sqrt(state.variance)
    assert 1 < noise / DPFedAvg(**BAR).sigma(setting) < most


def test_noise_beyond_the_coins_and_wrong_parameters_are_refused():
    with pytest.raises(ValueError, match=r"no number of coins up to 1024 has noise 0\.001 over 1 rounds in 4 numbers"):
        PoissonBinomial(noise_std=1e-3).init(setting_of(4, 3))
    with pytest.raises(ValueError, match="no number of coins up to 1024 has epsilon 8 over"):
        PoissonBinomial(bits=2).init(setting_of(100, 30))
    with pytest.raises(ValueError, match="expected clamp > 0"):
        PoissonBinomial(clamp=0.0)
    with pytest.raises(ValueError, match="expected senders <= 3 participants"):
        PoissonBinomial(senders=4).init(setting_of(4, 3))


@pytest.mark.parametrize(("epsilon", "d"), [(0.01, 1), (0.01, 40), (100.0, 4000)])
def test_it_works_at_every_epsilon_that_its_coins_reach(epsilon, d):
    defense, setting = PoissonBinomial(epsilon=epsilon, noise_std=None, bits=18), setting_of(d, 40)
    state, exchange = exchanged(defense, setting, [torch.full((d,), 0.3)] * 4)
    assert defense.claim([state], setting).epsilon == pytest.approx(epsilon, rel=1e-2)
    assert torch.isfinite(defense.decode(state, exchange.received, exchange.links, KEY)).all()


def test_a_damaged_message_is_refused():
    defense, setting = PoissonBinomial(bits=12), setting_of(3, 40)
    state, link = defense.init(setting), Link(setting, Sender(0, 20), KEY)
    wire = defense.encode(state, None, rng.normal(KEY, (3,)), link, KEY.child("private"))[0]
    for broken in (wire[:-1], wire + b"\0", b""):
        with pytest.raises(MessageError, match="expected a message of 6 bytes"):
            defense.estimate(state, broken, link)
    with pytest.raises(ValueError, match="expected a finite update"):
        defense.encode(state, None, torch.tensor([0.0, math.nan, 1.0]), link, KEY)
