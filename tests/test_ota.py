"""Over-the-air aggregation and its orthogonal baseline as defences: what is sent and received, runs, claims."""

import dataclasses
import math

import numpy as np
import pytest
import torch
from scipy import stats

from defenses._ota import rayleigh_gains
from defenses.none import NoDefense
from defenses.ota import OTA
from defenses.ota_orthogonal import OTAOrthogonal
from harness import rng
from harness.accounting import gaussian_epsilon
from harness.ask import ask
from harness.cell import FederationSpec, Target
from harness.claim import Relation, Unit, Verdict, judge
from harness.codec import pack_float64, unpack_float64
from harness.contract import Examples, MessageError, Sender, Setting
from harness.loop import Keep, train
from harness.models import build
from harness.observe import Scene, observe
from harness.rng import Key
from harness.tasks import ModelTask
from harness.threats import Threat, View
from harness.vec import Layout
from tests.doubles import random_examples, small_task

D = 200_000
ALPHA = 1e-6
"""False-alarm rate of every statistical test in this file."""

DELTA = 1e-4
A_ROUND = 8 * math.log(1.25 / DELTA) / 1.2**2
"""Noise over signal that the claim (1.2, 1e-4) takes: (15) and Thm 1 solved for it."""

# ota.md, section 5: squared gains, P, epsilon (the least of them binds), feasible, A, Z; six decimals
GOLDEN = [
    ("0.5,1,2,4", 100.0, 1.2, False, 13.313657, (36.686343, 86.686343, 186.686343, 386.686343)),
    ("0.05,1,2,4", 100.0, 1.2, True, 5.0, (0, 95, 166.041220, 0)),
    ("0.05,0.3,1,2,4,0.8", 1000.0, 1.2, True, 50.0, (0, 250, 950, 669.412201, 0, 750)),
    ("1,1,1", 10.0, 5.0, False, 5.150601, (4.849399,) * 3),
]
FIRST = {"gains": "0.5,1,2,4", "power": 100.0}
SECOND = {"gains": "0.05,1,2,4", "power": 100.0}

# ota.md, section 3: claim of one round -> what holds, half a unit of the last printed digit
TRUE = [
    (0.5, 0.323, 5e-4),
    (1.0, 0.705, 5e-4),
    (1.2, 0.866, 5e-4),
    (2.0, 1.545, 5e-4),
    (4.0, 3.451, 5e-4),
    (6.0, 5.610, 5e-4),
    (8.0, 8.002, 5e-4),
    (10.0, 10.62, 5e-3),
    (15.0, 18.13, 5e-3),
    (20.0, 26.99, 5e-3),
]
# T: (16), half a unit of its last digit, its delta; what holds at that delta and at 1e-4, with half a unit
RUNS = [
    (10, 44.13, 5e-3, 1.1e-3, 2.631, 3.243, 5e-4),
    (100, 329.9, 0.05, 0.0101, 9.514, 13.461, 5e-4),
    (1000, 2947, 0.5, 0.1001, 48.42, 69.82, 5e-3),
]

PRIVATE, CHANNEL = Key(7), Key(9)
both = pytest.mark.parametrize("kind", [OTA, OTAOrthogonal])
TASK = small_task()
TEST = random_examples(40, seed=99)


def setting_of(clients, d=D, **changes):
    plain = Setting(
        Layout(("w",), ((d,),)),
        clients=clients,
        participants=clients,
        rounds=3,
        sends="gradient",
        steps=1,
        lr=0.1,
        batch=0,
        samples=20,
    )
    return dataclasses.replace(plain, **changes)


def senders_of(clients):
    return [Sender(number, 20 + number) for number in range(clients)]


def updates_of(clients, d=D, norm=0.8):
    rows = rng.normal(Key(1), (clients, d), torch.float64)
    return (norm * rows / rows.norm(dim=1, keepdim=True)).float()


def encode(defense, setting, update, user):
    state = defense.init(setting)
    sender, key = Sender(user, 20 + user), PRIVATE.child(user)
    wire, _ = defense.encode(state, None, update, sender=sender, private=key, shared=Key(8), setting=setting)
    return wire


def receive(defense, setting, updates):
    """What arrives of one round of all clients."""
    wires = [encode(defense, setting, update, user) for user, update in enumerate(updates)]
    senders = senders_of(len(updates))
    return defense.transmit(defense.init(setting), wires, senders=senders, channel=CHANNEL, setting=setting)


def decode(defense, setting, received):
    return defense.decode(
        defense.init(setting),
        received,
        senders=senders_of(setting.clients),
        shared=[Key(8)] * setting.clients,
        private=Key(10),
        setting=setting,
    )


def claim(defense, clients=4, rounds=1):
    setting = setting_of(clients)
    return defense.claim([defense.init(setting)] * rounds, setting)


@pytest.mark.parametrize(("gains", "power", "epsilon", "feasible", "aligned", "noise"), GOLDEN)
def test_the_state_is_the_golden_allocation_and_the_antennas_send_it(gains, power, epsilon, feasible, aligned, noise):
    squared = [float(part) for part in gains.split(",")]
    setting = setting_of(len(squared), d=50)
    defense = OTA(gains=gains, power=power, epsilon=epsilon, clip=3.0)
    state = defense.init(setting)
    assert state.feasible == feasible
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
    assert [len(wire) for wire in received] == [8 * d] * 4
    heard = torch.stack([unpack_float64(wire, d) for wire in received])
    # 20,000 squares each: 12 % off is 12 standard errors
    for row in heard:
        assert stats.kstest(row.numpy(), stats.norm.cdf).pvalue > ALPHA
    assert np.abs(np.corrcoef(heard.numpy()) - np.eye(4)).max() < 5.5 / d**0.5
    alone = defense.transmit(
        state, [pack_float64(torch.zeros(d))], senders=[Sender(2, 5)], channel=CHANNEL, setting=setting
    )
    assert alone == [received[2]]


@pytest.mark.parametrize(
    ("defense", "clients", "variance"),
    [
        (OTA(**FIRST), 4, 3.2755),  # ota.md, section 1
        (OTA(clip=2.0, **FIRST), 4, 4 * 3.2755),
        (OTA(**SECOND), 4, A_ROUND / 16),
        (OTA(gains="0.3"), 1, A_ROUND),
        (OTA(), 50, A_ROUND / 50**2),
        (OTAOrthogonal(**FIRST), 4, A_ROUND / 4),
        (OTAOrthogonal(clip=2.0, **FIRST), 4, 4 * A_ROUND / 4),
        (OTAOrthogonal(gains="0.3"), 1, A_ROUND),
        # receiver noise alone: 1 / (K^2 G) summed over G = 5e-3 and three times 1e-2
        (OTAOrthogonal(gains="0.5,1,1,1", power=0.01), 4, 500 / 16),
    ],
)
def test_the_error_of_the_mean_has_exactly_the_stated_law(defense, clients, variance):
    # 100,000 errors see a scale off by 6 % with a miss rate under 1e-6 (see the twin); 3.2755 is right to 2e-5
    d = D if clients < 50 else D // 2
    setting = setting_of(clients, d)
    assert defense.init(setting).gradient_variance == pytest.approx(variance, rel=2e-5)
    updates = updates_of(clients, d)
    updates[0] *= 10 * defense.clip  # clipped
    kept = updates.double()
    kept[0] *= defense.clip / kept[0].norm()
    mean = decode(defense, setting, receive(defense, setting, updates))
    error = (mean.double() - kept.mean(0)).numpy()
    law = stats.norm(scale=math.sqrt(variance))
    assert stats.kstest(error, law.cdf).pvalue > ALPHA
    assert stats.kstest(1.06 * error, law.cdf).pvalue < ALPHA
    assert abs(stats.pearsonr(error[1:], error[:-1]).statistic) < 5 / d**0.5


@pytest.mark.parametrize(
    ("users", "over_the_air", "apart", "digit"), [(10, 0.524, 5.241, 5e-4), (50, 0.0210, 1.048, 5e-5)]
)
def test_simulated_errors_have_the_printed_variances(users, over_the_air, apart, digit):
    # ota.md, section 3, at L = 1; 50,000 squares see a scale off by 6 % as 19 standard errors
    setting = setting_of(users, d := 50_000)
    for defense, printed, half in ((OTA(), over_the_air, digit), (OTAOrthogonal(), apart, 5e-4)):
        mean = decode(defense, setting, receive(defense, setting, torch.zeros(users, d)))
        total = float(mean.double().square().sum())
        law = stats.chi2(d)
        low, high = total / law.ppf(1 - ALPHA / 2), total / law.ppf(ALPHA / 2)
        assert low - half <= printed <= high + half
        assert not low - half <= printed / 1.06**2 <= high + half


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
    estimate = defense.estimate(defense.init(setting), received[0], sender=Sender(0, 5), shared=None, setting=setting)
    told = updates.sum(0) if kind is OTA else updates[0]
    torch.testing.assert_close(estimate, told, rtol=0, atol=1e-3)


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


def test_an_infeasible_channel_is_lowered_or_refused():
    setting = setting_of(4)
    with pytest.raises(ValueError, match=r"noise of variance 2619\.41 beside the gradients, got 550; lower the"):
        OTA(infeasible="refuse", **FIRST).init(setting)
    lowered = OTA(**FIRST).init(setting)
    assert (lowered.feasible, lowered.epsilon) == (False, pytest.approx(1.2, rel=1e-12))
    assert OTA(infeasible="refuse", **SECOND).init(setting) == OTA(**SECOND).init(setting)


def test_over_the_air_everybody_takes_part():
    with pytest.raises(ValueError, match=r"expected all clients to take part in every round.*; got 3 of 4"):
        OTA().init(setting_of(4, participants=3))
    assert len(OTAOrthogonal().init(setting_of(4, participants=3)).alpha) == 4


@both
@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"clip": 0.0}, "expected clip > 0, got clip=0.0"),
        ({"epsilon": math.inf}, "expected epsilon > 0"),
        ({"delta": 1.0}, "expected 0 < delta < 1, got delta=1.0"),
        ({"delta": 0.0}, "expected 0 < delta < 1"),
        ({"power": -1.0}, "expected power > 0"),
        ({"noise_variance": -1.0}, "expected noise_variance >= 0"),
        ({"fading": "rician"}, "expected fading rayleigh or equal, got 'rician'"),
        ({"gains": "1;2"}, "expected squared gains with commas between them, got gains='1;2'"),
        ({"gains": "1,,2"}, "expected squared gains with commas"),
        ({"gains": "1,0"}, r"expected squared gains > 0, got \(1.0, 0.0\)"),
    ],
)
def test_parameters_out_of_range_are_named(kind, parameters, message):
    with pytest.raises(ValueError, match=message):
        kind(**parameters)


@both
def test_a_federation_that_does_not_fit_is_named(kind):
    with pytest.raises(ValueError, match="expected one gain a client, got 4 for 3 clients"):
        kind(**FIRST).init(setting_of(3))
    with pytest.raises(ValueError, match="expected infeasible lower or refuse, got 'ignore'"):
        OTA(infeasible="ignore")


@both
def test_a_waveform_of_another_length_or_with_no_number_in_it_is_refused(kind):
    setting = setting_of(2, d=10)
    state = kind().init(setting)
    for wire, said in ((bytes(79), "80 bytes"), (bytes(72) + b"\x00" * 6 + b"\xf0\x7f", "1 non-finite")):
        with pytest.raises(MessageError, match=said):
            kind().transmit(state, [wire], senders=[Sender(0, 1)], channel=Key(1), setting=setting)


@both
def test_a_victim_beyond_the_clients_takes_the_place_of_one_of_them(kind):
    setting = setting_of(4, d=10)
    update = updates_of(1, 10)[0]
    defense, state = kind(), kind().init(setting)
    place, beyond = (
        defense.encode(state, None, update, sender=Sender(n, 1), private=Key(1), shared=Key(2), setting=setting)[0]
        for n in (2, 6)
    )
    assert place == beyond
    if kind is OTAOrthogonal:
        wires = defense.estimate(state, place, sender=Sender(6, 1), shared=None, setting=setting)
        assert torch.equal(wires, defense.estimate(state, place, sender=Sender(2, 1), shared=None, setting=setting))


@both
def test_the_likelihood_is_the_density_of_what_is_received(kind):
    setting = setting_of(4, d=5)
    defense, clip = kind(clip=2.0, **FIRST), 2.0
    state, senders = defense.init(setting), [Sender(0, 9), Sender(7, 9)]
    heard = rng.normal(Key(3), (2, 5), torch.float64)
    wires = [pack_float64(row) for row in heard]
    score = defense.likelihood(state, wires, senders=senders, shared=None, setting=setting)
    one, other = (rng.normal(Key(4).child(i), (2, 5), torch.float64) for i in range(2))
    for row, gain in enumerate((0.5, 4.0)):
        if kind is OTA:  # the golden A and Z, and the receiver's noise
            factor, variance = math.sqrt(13.313657) / clip, 696.745373 + 1
        else:  # ota.md, section 3, at G = 50 and 400: all that alpha leaves is noise
            received = 100 * gain
            alpha = (received + 1) / (received * (1 + A_ROUND))
            factor, variance = math.sqrt(alpha * received) / clip, (1 - alpha) * received + 1
        law = stats.norm(scale=math.sqrt(variance))
        expected = []
        for candidate in (one, other):
            kept = candidate[row] * min(1.0, clip / float(candidate[row].norm()))
            expected.append(-law.logpdf((heard[row] - factor * kept).numpy()).sum())
        found = float(score(other)[row] - score(one)[row])
        assert found == pytest.approx(expected[1] - expected[0], rel=1e-6)
    assert float(score(50 * one)[0]) == pytest.approx(float(score(99 * one)[0]), rel=1e-12)


RECEIVER = {Threat.SERVER, Threat.PARTICIPANT, Threat.PUBLIC}


@both
@pytest.mark.parametrize(("epsilon", "true", "digit"), TRUE)
def test_a_round_has_the_printed_epsilon(kind, epsilon, true, digit):
    # beyond epsilon 7.991 the formula is false
    made = claim(kind(epsilon=epsilon, **FIRST))
    found = judge(made)
    assert made.epsilon == pytest.approx(epsilon, rel=1e-9)
    assert found.proved == pytest.approx(true, abs=1.02 * digit)
    assert found.verdict is (Verdict.LOOSE if epsilon < 7.9 else Verdict.BROKEN)
    assert (made.unit, made.relation, made.delta) == (Unit.CLIENT, Relation.ANY_TWO, DELTA)
    collusion = set() if kind is OTA else {Threat.COLLUDING_SERVER}
    assert made.against == RECEIVER | collusion
    assert Threat.EAVESDROPPER not in made.against


@pytest.mark.parametrize(("rounds", "claimed", "half", "delta", "same", "at_1e4", "digit"), RUNS)
@pytest.mark.parametrize("name", ["ota", "ota-orthogonal"])
def test_a_run_has_the_printed_epsilons(name, rounds, claimed, half, delta, same, at_1e4, digit):
    parameters = {"epsilon": 1.2}
    found = ask(name, parameters, {"clients": 30}, rounds, None)
    assert found["claimed"]["epsilon"] == pytest.approx(claimed, abs=1.02 * half)
    assert found["claimed"]["delta"] == pytest.approx(delta, rel=1e-12)
    assert found["claimed"]["horizon"] == "whole run"
    assert found["claimed"]["source"].endswith("composed by (16)")
    assert found["proved"]["epsilon"] == pytest.approx(same, abs=1.02 * digit)
    assert found["verdict"] == "LOOSE"
    assert found["proved"]["against"] == found["claimed"]["against"]
    tight = ask(name, parameters, {"clients": 30}, rounds, DELTA)
    assert tight["proved"]["epsilon"] == pytest.approx(at_1e4, abs=1.02 * digit)


@both
def test_a_run_whose_deltas_reach_one_is_promised_nothing(kind):
    made = claim(kind(**FIRST), rounds=10_000)
    assert (made.epsilon, made.against, made.delta) == (math.inf, frozenset(), DELTA)
    found = judge(made)
    assert found.verdict is Verdict.NOTHING_PROMISED
    assert found.proved == pytest.approx(gaussian_epsilon(2 / math.sqrt(A_ROUND) * 100, DELTA), rel=1e-9)
    assert made.proved.against >= RECEIVER


def test_a_receiver_that_is_noisy_enough_lowers_the_claim():
    # Psi < 0: no noise of the users, mu = 2 sqrt(P)
    made = claim(OTA(gains="1,2", power=0.01, epsilon=5.0), clients=2)
    mu = 2 * math.sqrt(0.01)
    assert made.epsilon == pytest.approx(mu * math.sqrt(2 * math.log(1.25 / DELTA)), rel=1e-12)
    assert judge(made).proved == pytest.approx(gaussian_epsilon(mu, DELTA), rel=1e-9)


def told(defense, clients=4, rounds=1):
    """What else holds, by adversary."""
    found = {}
    for proof in claim(defense, clients, rounds).further:
        (threat,) = proof.against
        found[threat] = proof
    return found


def test_adversaries_that_know_more_are_told_of():
    # ota.md, section 3, first golden allocation; exact accounting, two decimals
    first = told(OTA(**FIRST))
    assert set(first) == {Threat.COLLUDING_SERVER, Threat.EAVESDROPPER, Threat.PARTICIPANT}
    assert first[Threat.COLLUDING_SERVER].epsilon(DELTA) == pytest.approx(4.68, abs=5.1e-3)
    weakest = 2 * math.sqrt(13.313657 / 36.686343)
    assert first[Threat.EAVESDROPPER].epsilon(DELTA) == pytest.approx(gaussian_epsilon(weakest, DELTA), rel=1e-6)
    assert not first[Threat.EAVESDROPPER].tight
    knowing = 2 * math.sqrt(13.313657 / (36.686343 + 86.686343 + 186.686343 + 1))
    assert first[Threat.PARTICIPANT].epsilon(DELTA) == pytest.approx(gaussian_epsilon(knowing, DELTA), rel=1e-6)
    many = told(OTA(**FIRST), rounds=50)
    expected = gaussian_epsilon(weakest * math.sqrt(50), 1e-3)
    assert many[Threat.EAVESDROPPER].epsilon(1e-3) == pytest.approx(expected, rel=1e-6)


def test_a_client_that_adds_no_noise_has_none_when_it_counts():
    second = told(OTA(**SECOND))
    assert second[Threat.EAVESDROPPER].epsilon(DELTA) == math.inf
    expected = gaussian_epsilon(2 * math.sqrt(5), DELTA)
    assert second[Threat.COLLUDING_SERVER].epsilon(DELTA) == pytest.approx(expected, rel=1e-9)
    silent = told(OTA(noise_variance=0.0, **SECOND))
    assert silent[Threat.COLLUDING_SERVER].epsilon(DELTA) == math.inf
    # two clients of which one adds all the noise: it hears the other plainly
    pair = told(OTA(gains="0.001,1", noise_variance=0.0), clients=2)
    assert pair[Threat.PARTICIPANT].epsilon(DELTA) == math.inf


def test_a_single_client_is_the_orthogonal_one():
    setting = setting_of(1, d=100)
    update = updates_of(1, 100)
    sum_of_one, own = (receive(kind(gains="0.3"), setting, update) for kind in (OTA, OTAOrthogonal))
    assert len(sum_of_one) == len(own) == 1
    alone, single = claim(OTA(gains="0.3"), 1), claim(OTAOrthogonal(gains="0.3"), 1)
    assert alone.epsilon == pytest.approx(single.epsilon, rel=1e-12)
    assert [judge(one).proved for one in (alone, single)] == pytest.approx([0.8656] * 2, abs=5.1e-5)
    assert set(told(OTA(gains="0.3"), 1)) == {Threat.COLLUDING_SERVER, Threat.EAVESDROPPER}
    colluding = told(OTA(gains="0.3"), 1)[Threat.COLLUDING_SERVER]
    assert colluding.epsilon(DELTA) == pytest.approx(judge(alone).proved, rel=1e-9)


def test_orthogonal_users_are_claimed_for_by_the_one_that_is_worst_off():
    # G = 0.01: the receiver's noise is more than enough, (15) is 0.868722; G = 5: 1.2 (verify_ota.out, part I)
    assert claim(OTAOrthogonal(gains="0.01", power=1.0), 1).epsilon == pytest.approx(0.868722, abs=5.1e-7)
    made = claim(OTAOrthogonal(gains="0.01,5", power=1.0), 2)
    assert made.epsilon == pytest.approx(1.2, rel=1e-9)
    (heard,) = made.further
    assert heard.against == {Threat.EAVESDROPPER}
    assert heard.epsilon(DELTA) == math.inf
    # alpha and beta of G = 5 in the same list, six decimals
    (heard,) = claim(OTAOrthogonal(gains="5", power=1.0), 1).further
    expected = gaussian_epsilon(2 * math.sqrt(0.022468 / 0.977532), DELTA)
    assert heard.epsilon(DELTA) == pytest.approx(expected, rel=1e-4)


CLIENTS = {k: random_examples(10, seed=k) for k in range(4)}
SPEC = FederationSpec(clients=4, rounds=3, batch=0, lr=0.1, algorithm="fedsgd")
KEEP = Keep(frozenset({0, 1, 2}), frozenset({0, 1, 2}))


def go(defense, spec=SPEC, keep=KEEP):
    return train(TASK, spec, defense, CLIENTS, TEST, Key(0), engine="loop", keep=keep)


@pytest.mark.parametrize("algorithm", ["fedsgd", "fedavg"])
@both
def test_a_run_goes_through_the_loop(kind, algorithm):
    d = TASK.layout.dim
    trained = go(kind(), dataclasses.replace(SPEC, algorithm=algorithm))
    assert torch.isfinite(trained.final).all()
    assert trained.message_bytes == [8 * d] * 3
    if kind is OTA:  # nobody's message arrives by itself
        assert trained.messages == {}
        assert trained.snr_db == [None] * 3
    else:
        assert [len(messages) for messages in trained.messages.values()] == [4] * 3
        assert {len(message.wire) for message in trained.messages[1]} == {8 * d}
    assert not torch.equal(trained.final, go(kind(channel_seed=1), SPEC).final)


@both
def test_a_channel_without_noise_trains_as_no_defense_does(kind):
    # noise of standard deviation 1e-6 at most in the mean; every gradient is shorter than L
    plain, clear = go(NoDefense()), go(kind(clip=100.0, epsilon=1e9, noise_variance=0.0))
    torch.testing.assert_close(clear.final, plain.final, rtol=0, atol=1e-5)


def scene(defense):
    train_set = random_examples(60, seed=1)
    rows = {k: np.arange(10 * k, 10 * k + 10) for k in range(4)}
    holdings = {k: Examples(train_set.x[mine], train_set.y[mine]) for k, mine in rows.items()}
    training = train(TASK, SPEC, defense, holdings, TEST, Key(0), engine="loop", keep=KEEP)
    return Scene(TASK, SPEC, defense, training, train_set, TEST, rows, "loop", Key(0))


def residuals(defense, here, seen, truth):
    """[n, d]: what each victim's message holds beside its own clipped gradient, as the server receives it."""
    found = []
    for message, victim in zip(seen.messages, truth.victims, strict=True):
        params = here.training.models[1].clone().requires_grad_()
        (gradient,) = torch.autograd.grad(TASK.loss(params, *victim), params)
        kept = gradient.double() * min(1.0, defense.clip / float(gradient.norm()))
        found.append(unpack_float64(message.wire, len(kept)) - seen.model.state.gain * kept)
    return torch.stack(found)


def test_a_probe_is_one_wire_that_holds_the_victim_and_everybodys_noise():
    # more victims than clients; 16,668 squares see a variance off by 12 % (a scale by 6 %) as 11 standard errors
    defense = OTA(clip=0.5, **FIRST)
    here = scene(defense)
    seen, truth = observe(here, View(Threat.SERVER), Target(round=1, count=6, batch=2))
    assert len(seen.messages) == 6
    assert {len(message.wire) for message in seen.messages} == {8 * TASK.layout.dim}
    assert seen.model.state == defense.init(seen.setting)
    rest = residuals(defense, here, seen, truth)
    law = stats.norm(scale=math.sqrt(696.745373 + 1))
    assert stats.chi2(rest.numel()).ppf(ALPHA / 2) < float((rest / law.std()).square().sum())
    assert float((rest / law.std()).square().sum()) < stats.chi2(rest.numel()).ppf(1 - ALPHA / 2)
    assert float((1.06 * rest / law.std()).square().sum()) > stats.chi2(rest.numel()).ppf(1 - ALPHA / 2)
    assert np.abs(np.corrcoef(rest.numpy()) - np.eye(6)).max() < 6 / TASK.layout.dim**0.5
    with pytest.raises(ValueError, match="no single client's message of round 1 reached the receiver"):
        observe(here, View(Threat.SERVER), Target(kind="messages", round=1, count=1))


def test_a_probe_of_the_baseline_is_heard_alone():
    defense = OTAOrthogonal(epsilon=1e9, noise_variance=0.0)
    here = scene(defense)
    seen, truth = observe(here, View(Threat.SERVER), Target(round=1, count=6, batch=2))
    for message, victim in zip(seen.messages, truth.victims, strict=True):
        params = here.training.models[1].clone().requires_grad_()
        (gradient,) = torch.autograd.grad(TASK.loss(params, *victim), params)
        found = defense.estimate(
            seen.model.state, message.wire, sender=message.sender, shared=None, setting=seen.setting
        )
        kept = gradient * min(1.0, 1.0 / float(gradient.norm()))
        torch.testing.assert_close(found, kept, rtol=0, atol=1e-6)


@dataclasses.dataclass(frozen=True)
class FromZero(ModelTask):
    """The recipe starts at w = 0."""

    def init(self, key):
        return torch.zeros(self.layout.dim)


REGRESSION = FromZero(build("linear-regression", (30,), 1))


def excess(kind, users, rounds, draw):
    """Final training loss of the recipe above the least there is: ota.md, section 4, step 1/(t + 10)."""
    key = Key(11).child(draw)
    x, y = rng.normal(key.child("x"), (users, 20, 30)), rng.normal(key.child("y"), (users, 20))
    clients = {k: Examples(x[k], y[k]) for k in range(users)}
    everything = Examples(x.flatten(0, 1), y.flatten())
    spec = FederationSpec(
        clients=users,
        rounds=rounds,
        algorithm="fedsgd",
        batch=0,
        lr=1 / 11,
        schedule="inverse",
        decay=1 / 11,
        evaluate_every=rounds,
    )
    defense = kind(channel_seed=draw)
    trained = train(REGRESSION, spec, defense, clients, everything, key, engine="loop", keep=Keep())
    a, b = everything.x.double().numpy(), everything.y.double().numpy()
    best = np.linalg.solve(2 * a.T @ a / len(a) + 1e-3 * np.eye(30), 2 * a.T @ b / len(a))
    least = float(((a @ best - b) ** 2).mean() + 5e-4 * best @ best)
    return float(REGRESSION.loss(trained.final, *everything)) - least


@pytest.mark.slow
@pytest.mark.parametrize(
    ("users", "over_the_air", "apart", "optimum"), [(10, 0.949, 6.40, 0.911), (50, 0.974, 1.83, 0.972)]
)
def test_the_regression_of_the_paper_ends_near_the_printed_losses(users, over_the_air, apart, optimum):
    # Printed: means of 5 draws of data, channel and noise, three digits; here 3 draws. The optimum varies with the
    # data, hence losses above it. One draw has a relative standard deviation of a third at most (0.30 to 0.33 in 60
    # to 150 runs written for this), the ratio of the two means 0.24: five of them are a factor of 3.3.
    draws = range(3)
    summed = [excess(OTA, users, 1000, draw) for draw in draws]
    single = [excess(OTAOrthogonal, users, 1000 // users, draw) for draw in draws]
    assert max(summed) < min(single) / 10
    for found, printed in ((summed, over_the_air), (single, apart)):
        assert (printed - optimum - 1e-3) / 3.3 < np.mean(found) < (printed - optimum + 1e-3) * 3.3
