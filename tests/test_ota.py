"""Over-the-air aggregation and its orthogonal baseline as defenses: messages sent and received, parameters."""

import math

import numpy as np
import pytest
import torch
from scipy import stats

from leakgauge import Key, Link, Links, MessageError, Sender, rng
from leakgauge.defenses._ota import rayleigh_gains
from leakgauge.defenses.ota import OTA
from leakgauge.defenses.ota_orthogonal import OTAOrthogonal
from leakgauge.harness.core.codec import pack_float64, unpack_float64
from tests.by_rows import by_rows
from tests.oracles import follows
from tests.ota_case import (
    A_ROUND,
    CHANNEL,
    FIRST,
    GOLDEN,
    PRIVATE,
    SECOND,
    D,
    both,
    encode,
    receive,
    senders_of,
    setting_of,
    updates_of,
)

"""False-alarm rate of every statistical test in this file."""


def decode(defense, setting, received):
    links = Links(setting, senders_of(setting.clients), [Key(8)] * setting.clients)
    return defense.decode(defense.init(setting), received, links, Key(10))


@pytest.mark.parametrize(("squared", "power", "epsilons", "_", "aligned", "needed", "noise"), GOLDEN)
def test_the_state_is_the_golden_allocation_and_the_antennas_send_it(
    squared, power, epsilons, _, aligned, needed, noise
):
    setting = setting_of(len(squared), d=50)
    defense = OTA(gains=",".join(map(str, squared)), power=power, epsilon=min(epsilons), clip=3.0)
    state = defense.init(setting)
    assert state.aligned_power == pytest.approx(aligned, abs=5.1e-7)
    assert state.noise == pytest.approx(noise, abs=5.1e-7)
    assert max(np.add(state.alpha, state.beta)) <= 1 + 1e-12
    update = updates_of(1, 50, norm=1.5)[0]
    for user, gain in enumerate(squared):
        silent, full = (
            math.sqrt(gain) * unpack_float64(encode(defense, setting, sent, user), 50)
            for sent in (torch.zeros(50), update)
        )
        n = rng.normal(PRIVATE.child(user), (50,), torch.float64)
        # within half of the sixth decimal of Z and A
        assert silent.square().mean() == pytest.approx(noise[user] * float(n.square().mean()), abs=1.1e-6)
        assert (full - silent).square().sum() == pytest.approx(aligned * 0.25, abs=1.1e-6)


def test_only_one_wire_arrives_and_only_the_sum_counts():
    setting = setting_of(4, d=1000)
    updates = updates_of(4, 1000, norm=0.4)
    shift = updates_of(1, 1000, norm=0.3)[0]
    moved = updates + torch.stack([shift, -shift, torch.zeros(1000), torch.zeros(1000)])
    plain, other, longer = (
        receive(OTA(**FIRST), setting, rows) for rows in (updates, moved, updates + 0.2 * shift.expand(4, -1))
    )
    assert [len(received) for received in (plain, other, longer)] == [1, 1, 1]
    assert len(plain[0]) == 8 * 1000
    first, second, third = (unpack_float64(*received, 1000) for received in (plain, other, longer))
    # the updates were added up in float32
    torch.testing.assert_close(first, second, rtol=0, atol=1e-6)
    assert (first - third).norm() == pytest.approx(4 * 0.2 * 0.3 * math.sqrt(13.313657), rel=1e-6)


def test_orthogonal_messages_arrive_one_by_one_each_with_receiver_noise_of_its_own():
    d, defense = 20_000, OTAOrthogonal(gains="0.5,1,2,4", power=1e-3)
    setting = setting_of(4, d)
    state = defense.init(setting)
    assert state.beta == (0.0,) * 4  # a receiver that is noisy enough: what is left is its noise alone
    received = receive(defense, setting, torch.zeros(4, d))
    heard = torch.stack([unpack_float64(wire, d) for wire in received])
    # 20,000 squares each: 12 % off is 12 standard errors
    for row in heard:
        assert follows(row.numpy(), stats.norm.cdf)
    assert np.abs(np.corrcoef(heard.numpy()) - np.eye(4)).max() < 5.5 / d**0.5
    alone = defense.transmit(state, [pack_float64(torch.zeros(d))], Links(setting, [Sender(2, 5)], None), CHANNEL)
    assert alone == [received[2]]


@by_rows(
    *((OTA(clip=clip, **FIRST), 4, clip**2 * 3.2755) for clip in (1.0, 2.0)),  # printed
    (OTA(**SECOND), 4, A_ROUND / 16),
    (OTA(gains="0.3"), 1, A_ROUND),
    (OTA(), 50, A_ROUND / 50**2),
    *((OTAOrthogonal(clip=clip, **FIRST), 4, clip**2 * A_ROUND / 4) for clip in (1.0, 2.0)),
    (OTAOrthogonal(gains="0.3"), 1, A_ROUND),
    # receiver noise alone: 1 / (K^2 G) summed over G = 5e-3 and three times 1e-2
    (OTAOrthogonal(gains="0.5,1,1,1", power=0.01), 4, 500 / 16),
)
def test_the_error_of_the_mean_has_exactly_the_stated_distribution(defense, clients, variance):
    # 100,000 errors detect a scale off by 6 % with a miss rate under 1e-6 (see the twin); 3.2755 is right to 2e-5
    d = D if clients < 50 else D // 2
    setting = setting_of(clients, d)
    assert defense.init(setting).gradient_variance == pytest.approx(variance, rel=2e-5)
    updates = updates_of(clients, d)
    updates[0] *= 10 * defense.clip  # clipped
    kept = updates.double()
    kept[0] *= defense.clip / kept[0].norm()
    mean = decode(defense, setting, receive(defense, setting, updates))
    error = (mean.double() - kept.mean(0)).numpy()
    distribution = stats.norm(scale=math.sqrt(variance))
    assert follows(error, distribution.cdf)
    assert not follows(1.06 * error, distribution.cdf)
    assert abs(stats.pearsonr(error[1:], error[:-1]).statistic) < 5 / d**0.5


@both
def test_updates_are_clipped_to_l_and_short_ones_are_not(kind):
    setting = setting_of(1, d=1000)
    defense = kind(gains="1", power=1e4, epsilon=1e6, clip=2.0)
    for norm, expected in ((9.0, 2.0), (1.5, 1.5), (0.0, 0.0)):
        found = decode(defense, setting, receive(defense, setting, updates_of(1, 1000, norm)))
        # receiver noise of standard deviation 0.02 sqrt(1000) in all
        assert float(found.double() @ updates_of(1, 1000, 1.0)[0].double()) == pytest.approx(expected, abs=0.1)


@both
def test_all_clients_count_alike_whatever_their_samples(kind):
    # noise of standard deviation 1e-4 a coordinate, at most
    setting = setting_of(3, d=100)
    updates = updates_of(3, 100)
    defense = kind(gains="0.2,1,3", power=1e12, epsilon=1e6)
    received = receive(defense, setting, updates)
    torch.testing.assert_close(decode(defense, setting, received), updates.mean(0), rtol=0, atol=1e-4)
    estimate = defense.estimate(defense.init(setting), received[0], Link(setting, Sender(0, 5), None))
    expected = updates.sum(0) if kind is OTA else updates[0]
    torch.testing.assert_close(estimate, expected, rtol=0, atol=1e-3)


@both
def test_gains_are_public_fixed_and_named_by_their_own_seed(kind):
    setting = setting_of(6)
    state = kind(channel_seed=3).init(setting)
    assert state.channel.squared_gains == rayleigh_gains(Key(3).child("gains"), 6)
    assert kind(channel_seed=3).init(setting) == state
    assert kind(channel_seed=4).init(setting).channel != state.channel
    assert OTA().init(setting).channel == OTAOrthogonal().init(setting).channel
    assert kind(fading="equal").init(setting).channel.squared_gains == (1.0,) * 6
    assert kind(gains="1, 2e-1,3,4,5,6", fading="equal").init(setting).channel.squared_gains == (1, 0.2, 3, 4, 5, 6)
    assert kind().advance(state, None) is state
    with pytest.raises(ValueError, match="expected one gain per client, got 4 for 3 clients"):
        kind(**FIRST).init(setting_of(3))


def test_an_infeasible_channel_is_lowered_or_refused():
    setting = setting_of(4)
    with pytest.raises(
        ValueError, match=r"noise of variance 2619\.41 in addition to the gradients, got 550; lower the"
    ):
        OTA(infeasible="refuse", **FIRST).init(setting)
    lowered = OTA(**FIRST).init(setting)
    assert lowered.aligned_power < lowered.channel.received.min()
    assert lowered.epsilon == pytest.approx(1.2, rel=1e-12)
    assert OTA(infeasible="refuse", **SECOND).init(setting) == OTA(**SECOND).init(setting)
    with pytest.raises(ValueError, match="expected infeasible lower or refuse, got 'ignore'"):
        OTA(infeasible="ignore")


def test_over_the_air_everybody_takes_part():
    with pytest.raises(ValueError, match=r"expected all clients to take part in every round.*, got 3 of 4"):
        OTA().init(setting_of(4, participants=3))
    assert len(OTAOrthogonal().init(setting_of(4, participants=3)).alpha) == 4


@both
def test_a_waveform_of_another_length_or_with_no_number_in_it_is_refused(kind):
    setting = setting_of(2, d=10)
    state = kind().init(setting)
    for wire, message in ((bytes(79), "80 bytes"), (bytes(72) + b"\x00" * 6 + b"\xf0\x7f", "1 non-finite")):
        with pytest.raises(MessageError, match=message):
            kind().transmit(state, [wire], Links(setting, [Sender(0, 1)], None), Key(1))


@both
def test_a_victim_beyond_the_clients_takes_the_place_of_one_of_them(kind):
    setting = setting_of(4, d=10)
    update = updates_of(1, 10)[0]
    defense, state = kind(), kind().init(setting)
    place, beyond = (
        defense.encode(state, None, update, Link(setting, Sender(n, 1), Key(2)), Key(1))[0] for n in (2, 6)
    )
    assert place == beyond
    if kind is OTAOrthogonal:
        wires = defense.estimate(state, place, Link(setting, Sender(6, 1), None))
        assert torch.equal(wires, defense.estimate(state, place, Link(setting, Sender(2, 1), None)))


@both
def test_the_likelihood_is_the_density_of_what_is_received(kind):
    setting = setting_of(4, d=5)
    defense, clip = kind(clip=2.0, **FIRST), 2.0
    state, senders = defense.init(setting), [Sender(0, 9), Sender(7, 9)]
    heard = rng.normal(Key(3), (2, 5), torch.float64)
    wires = [pack_float64(row) for row in heard]
    score = defense.likelihood(state, wires, Links(setting, senders, None))
    one, other = (rng.normal(Key(4).child(i), (2, 5), torch.float64) for i in range(2))
    for row, gain in enumerate((0.5, 4.0)):
        if kind is OTA:  # the golden A and Z, and the receiver's noise
            factor, variance = math.sqrt(13.313657) / clip, 696.745373 + 1
        else:  # at G = 50 and 400, where alpha and noise use all power
            received = 100 * gain
            alpha = (received + 1) / (received * (1 + A_ROUND))
            factor, variance = math.sqrt(alpha * received) / clip, (1 - alpha) * received + 1
        distribution = stats.norm(scale=math.sqrt(variance))
        expected = []
        for candidate in (one, other):
            clipped = candidate[row] * min(1.0, clip / float(candidate[row].norm()))
            expected.append(-distribution.logpdf((heard[row] - factor * clipped).numpy()).sum())
        found = float(score(other)[row] - score(one)[row])
        assert found == pytest.approx(expected[1] - expected[0], rel=1e-6)
    assert float(score(50 * one)[0]) == pytest.approx(float(score(99 * one)[0]), rel=1e-12)
