"""Skellam noise in a secure sum: messages, sums, their distribution and the proof."""

import math

import numpy as np
import pytest
import torch
from scipy import special, stats
from scipy.linalg import hadamard

from leakgauge import Key, Layout, Link, Links, MessageError, Setting, rng
from leakgauge.defenses._secure_sum import _bound, _rounded
from leakgauge.defenses.distributed_gaussian import DistributedGaussian
from leakgauge.defenses.dp_fedavg import DPFedAvg
from leakgauge.defenses.skellam import Skellam
from leakgauge.harness.core.claim import Unit, Verdict, judge
from leakgauge.harness.core.codec import pack_levels, unpack_levels
from leakgauge.harness.core.contract import Sender, claim_of
from leakgauge.harness.core.gaussian import gaussian_epsilon
from leakgauge.harness.core.integer_noise import IntegerNoise, log_skellam
from leakgauge.harness.core.threats import Threat
from leakgauge.harness.federation.round import Client, Round
from tests.oracles import ALPHA, follows

KEY = Key(0, ("secure sum",))
BAR = {"clip": 1.0, "epsilon": 8.0, "delta": 5e-4}
"""The parameters of the bar: 1,000 clients, 25,450 numbers, 30 rounds."""


BOTH = pytest.mark.parametrize("kind", [Skellam, DistributedGaussian])


def setting_of(d, clients, rounds=1, **changes):
    values = {"participants": clients, "sends": "gradient", "steps": 1, "lr": 0.1, "batch": 0, "samples": 20} | changes
    return Setting(Layout(("all",), ((d,),)), clients, rounds=rounds, **values)


def exchanged(defense, setting, updates, key=KEY):
    """The plan, and the exchange of clients with these updates."""
    state = defense.init(setting)
    clients = [Client.of(Sender(k, 20), update, None, key.child(k)) for k, update in enumerate(updates)]
    return state, Round(defense, setting, state).exchange(clients, key.child("channel"))


def rotation(defense, d):
    """[n, n] the matrix of the rotation by its definition, for updates padded to n numbers."""
    n = 1 << (d - 1).bit_length()
    signs = 1.0 - 2.0 * rng.integers(Key(defense.rotation).child("signs"), n, 2)
    return hadamard(n) * signs / math.sqrt(n)


def drawn(d, count, norm):
    values = rng.normal(KEY.child("updates"), (count, d), torch.float64)
    return list((values / values.norm(dim=1, keepdim=True) * norm).float())


def test_without_noise_a_message_is_the_rotated_clipped_update_rounded_to_a_neighbor():
    d, defense = 11, Skellam(clip=0.5, noise_std=1e-12, bits=12)
    updates = [*drawn(d, 2, 3.0), *drawn(d, 1, 0.2), torch.zeros(d)]
    state, exchange = exchanged(defense, setting_of(d, 4), updates)
    total = np.zeros(16, np.int64)
    for update, wire in zip(updates, exchange.sent, strict=True):
        assert len(wire) == 16 * 12 // 8
        clipped = update.double() * min(1.0, 0.5 / max(float(update.double().norm()), 1e-9))
        exact = rotation(defense, d)[:, :d] @ clipped.numpy() / state.grid
        sent = (unpack_levels(wire, 16, 12) + 2048) % 4096 - 2048
        assert (np.abs(sent - exact) < 1).all()
        total += sent
    assert (sent == 0).all()
    (received,) = exchange.received
    assert len(received) == 24
    assert ((unpack_levels(received, 16, 12) - total) % 4096 == 0).all()
    decoded = defense.decode(state, exchange.received, exchange.links, KEY)
    expected = rotation(defense, d).T @ total * state.grid / 4
    assert decoded.numpy() == pytest.approx(expected[:d], abs=1e-6)
    single = defense.estimate(state, received, exchange.links.each()[0])
    assert single.numpy() == pytest.approx(4 * expected[:d], abs=1e-6)


@BOTH
def test_the_mean_is_unbiased_with_the_noise_of_all_senders(kind):
    # 400 rounds of 3 numbers: the mean has a standard deviation of 5 % of the noise, the variance one of 4 %
    d, rounds, defense = 3, 400, kind(clip=1.0, noise_std=0.5, senders=4)
    setting, update = setting_of(d, 5), torch.tensor([0.5, -0.2, 0.1])
    errors = []
    for number in range(rounds):
        state, exchange = exchanged(defense, setting, [update] * 5, KEY.child("round", number))
        errors.append(defense.decode(state, exchange.received, exchange.links, KEY).double() - update.double())
    errors = torch.stack(errors).numpy() * 5 / (0.5 * math.sqrt(5 / 4))
    count = errors.size
    assert abs(errors.mean()) < 5 / math.sqrt(count)
    assert stats.chi2.sf(np.square(errors).sum(), count) > ALPHA
    assert stats.chi2.cdf(np.square(errors).sum(), count) > ALPHA
    assert stats.chi2.cdf(np.square(errors / 1.25).sum(), count) < ALPHA


def test_a_lost_message_is_not_in_the_sum_and_the_denominator_stays():
    d, defense = 5, Skellam(clip=1.0, noise_std=1e-9)
    updates = drawn(d, 4, 0.5)
    state, exchange = exchanged(defense, setting_of(d, 4), updates[:3])
    decoded = defense.decode(state, exchange.received, exchange.links, KEY)
    assert torch.allclose(decoded, torch.stack(updates[:3]).sum(0) / 4, atol=1e-3)


def test_rounds_with_too_few_senders_are_counted():
    defense, setting = Skellam(senders=3), setting_of(5, 4)
    for count, broken in ((4, 0), (3, 0), (2, 1)):
        links = Links(setting, [Sender(k, 20) for k in range(count)], None)
        (violation,) = defense.violations([torch.zeros(5)] * count, links, 0.1).values()
        assert (violation.broken, violation.of) == (broken, 1)
    (words,) = defense.violations([], Links(setting, [], None), 0.1)
    assert words in defense.claim([defense.init(setting)], setting).assumes
    with pytest.raises(ValueError, match="expected senders <= 4 participants, got senders=5"):
        Skellam(senders=5).init(setting)


def test_fewer_counted_senders_add_more_noise_each():
    setting = setting_of(100, 10)
    all_of_them, half = (Skellam(senders=senders).init(setting) for senders in (0, 5))
    noise = [plan.grid * math.sqrt(plan.variance / plan.senders) for plan in (all_of_them, half)]
    assert noise[1] / noise[0] == pytest.approx(math.sqrt(2), rel=1e-3)


def test_a_sum_wraps_around():
    d, defense = 4, Skellam(clip=1.0, noise_std=1e-9, bits=8, reach=0.25)
    update = torch.tensor([1.0, 0.0, 0.0, 0.0])
    state, exchange = exchanged(defense, setting_of(d, 3), [update] * 3)
    back = rotation(defense, d) @ defense.decode(state, exchange.received, exchange.links, KEY).double().numpy()
    # the range of a sum is 2 * 0.25 * 1.5, and each rotated number is 1.5 or -1.5
    assert 3 * back == pytest.approx(np.zeros(4), abs=0.03)


@pytest.mark.parametrize("fractions", [0.5, 0.01])
def test_a_rounded_vector_is_never_longer_than_the_bound(fractions):
    # all numbers half way: the rounded squares have a mean of d / 2
    values = np.full(4096, fractions)
    for number in range(20):
        levels = _rounded(values, 30.0, KEY.child("rounding", number))
        assert levels @ levels <= 900
    free = np.array([_rounded(values, 1e9, KEY.child("free", number)).mean() for number in range(100)])
    spread = math.sqrt(fractions * (1 - fractions) / 4096 / 100)
    assert abs(free.mean() - fractions) < 5 * spread


def test_the_bound_of_a_rounded_vector_hardly_ever_counts_for_rotated_updates_at_the_clip():
    defense, d = Skellam(bits=12, reach=2.0), 2000
    setting = setting_of(d, 1000)
    state = defense.init(setting)
    n = len(state.signs)
    for number, update in enumerate(drawn(d, 20, 5.0)):
        exact = rotation(defense, d)[:, :d] @ (update.double().numpy() / 5) / state.grid
        levels = np.floor(exact + rng.uniform(KEY.child("free", number), (n,), dtype=torch.float64).numpy())
        assert np.linalg.norm(levels) < state.bound
    # the papers' bound of these squares has n / 4 at least
    assert _bound(165.0, 32_768) ** 2 < 165**2 + 32_768 / 4


def test_the_noise_of_a_message_and_of_a_sum_is_skellam():
    # alpha 1e-6; 100,000 numbers show 2 % less noise
    d, defense = 100_000, Skellam(clip=1.0, noise_std=1.0, bits=14)
    setting = setting_of(d, 3)
    state, exchange = exchanged(defense, setting, [torch.zeros(d)] * 3)
    for wire, share in ((exchange.sent[0], 1), (exchange.received[0], 3)):
        levels = (unpack_levels(wire, 1 << 17, 14) + 2**13) % 2**14 - 2**13
        variance = state.variance * share / 3
        edges = np.unique(np.rint(stats.norm.ppf(np.linspace(0.02, 0.98, 40)) * math.sqrt(variance)))
        z = np.arange(math.floor(-40 * math.sqrt(variance)), edges[-1] + 1)
        cumulative = np.cumsum(special.ive(np.abs(z), variance))  # exp(-v) I_z(v)
        chances = np.diff([0.0, *cumulative[np.searchsorted(z, edges)], 1.0])
        counts = np.bincount(np.searchsorted(edges, levels), minlength=len(chances))
        assert stats.chisquare(counts, chances * len(levels)).pvalue > ALPHA
        wrong = np.diff([0.0, *stats.norm.cdf(edges + 0.5, 0, 0.97 * math.sqrt(variance)), 1.0])
        assert stats.chisquare(counts, wrong * len(levels)).pvalue < ALPHA


@BOTH
@pytest.mark.parametrize(("bits", "reach"), [(16, 4.0), (10, 1.0)])
def test_messages_and_sums_follow_their_stated_distribution(kind, bits, reach):
    d, defense = 3000, kind(clip=1.0, noise_std=0.05, bits=bits, reach=reach)
    setting, updates = setting_of(d, 6), [*drawn(d, 4, 2.0), torch.eye(1, d)[0], torch.zeros(d)]
    state, exchange = exchanged(defense, setting, updates)
    links = exchange.links
    for update, wire in zip(updates, exchange.sent, strict=True):
        stated = defense.message_distribution(state, None, update, links.each()[0])
        assert follows(stated.read(wire, Key(1)).uniforms, "uniform")
    stated = defense.aggregate_distribution(state, updates, links)
    assert follows(stated.read(exchange.received[0], Key(1)).uniforms, "uniform")
    other = defense.aggregate_distribution(state._replace(variance=0.5 * state.variance), updates, links)
    assert not follows(other.read(exchange.received[0], Key(1)).uniforms, "uniform")
    one = defense.message_distribution(state, None, updates[0], links.each()[0])
    assert not follows(one.read(exchange.sent[1], Key(1)).uniforms, "uniform")


def exact_epsilon(variance, shift, delta):
    """Epsilon of a vector of Skellam numbers that moves by `shift`, by enumeration of all outcomes."""
    z = np.arange(-int(12 * math.sqrt(variance)) - 60, int(12 * math.sqrt(variance)) + 61)
    losses, chances = np.zeros(1), np.ones(1)
    for move in shift:
        here, there = (np.log(special.ive(np.abs(z - at), variance)) for at in (0, move))
        losses = (losses[:, None] + here - there).ravel()
        chances = (chances[:, None] * np.exp(here)).ravel()
    return least_epsilon(losses, chances, delta)


def least_epsilon(losses, chances, delta):
    """Epsilon at delta of these privacy losses."""
    low, high = 0.0, 100.0
    for _ in range(50):
        middle = (low + high) / 2
        found = -(chances * np.expm1(np.minimum(middle - losses, 0.0))).sum()
        low, high = (middle, high) if found > delta else (low, middle)
    return high


def test_discrete_gaussian_numbers_have_their_probabilities():
    # alpha 1e-6; a twentieth less variance shows
    for variance in (0.3, 7.0, 1e4):
        drawn = DistributedGaussian().draw(variance, 400_000, KEY.child("discrete", int(variance)))
        z = np.arange(-int(30 * variance**0.5) - 9, int(30 * variance**0.5) + 10)
        for factor, honest in ((1.0, True), (0.95, False)):
            chances = np.exp(-(z**2) / (2 * factor * variance))
            cumulative = np.cumsum(chances / chances.sum())
            edges = z[np.unique(np.searchsorted(cumulative, np.linspace(0.01, 0.99, 30)))]
            expected = np.diff([0.0, *cumulative[np.searchsorted(z, edges)], 1.0])
            counts = np.bincount(np.searchsorted(edges, drawn), minlength=len(expected))
            assert bool(stats.chisquare(counts, expected * len(drawn)).pvalue > ALPHA) is honest


@pytest.mark.parametrize("variance", [0.5, 1.0])
def test_the_sum_of_discrete_gaussians_is_as_near_to_one_as_the_proof_counts(variance):
    z, count = np.arange(-60, 61), 4
    single, whole = (np.exp(-(z**2) / (2 * v)) / np.exp(-(z**2) / (2 * v)).sum() for v in (variance, count * variance))
    total = np.ones(1)
    for _ in range(count):
        total = np.convolve(total, single)
    total = total[180 + z[50:71] + 60]
    ratios = np.abs(np.log(total / whole[50:71]))
    counted = IntegerNoise(1, 1, count * variance, 1.0, count, "discrete").uneven
    assert ratios.max() < counted < 1e3 * max(ratios.max(), 1e-13)


@pytest.mark.parametrize(("senders", "moved"), [(4, 2.0), (200, 180.0)])
def test_the_proof_pays_the_ratio_of_probabilities_of_all_numbers_twice(senders, moved):
    # the log ratios of all numbers add up, and the largest is reached when all numbers are the worst one. The sum
    # differs from one discrete Gaussian by that under both neighbors. The first case is by Renyi divergences, the
    # second by comparison with normal noise, but for its last counts
    z, variance = np.arange(-20, 21), senders / 2
    masses, total = np.exp(-(z**2)), np.ones(1)
    for _ in range(senders):
        total = np.convolve(total, masses / masses.sum())
    sums = np.arange(-20 * senders, 20 * senders + 1)
    whole = np.exp(-(sums**2) / (2 * variance))
    within = np.abs(sums) <= 4 * math.sqrt(variance)
    worst = float(np.abs(np.log(total[within] / whole[within] * whole.sum())).max())
    for count, times in ((1, 1), (40, 1), (1, 40), (40, 40)):
        event, even = (
            IntegerNoise(count, times, variance, moved / math.sqrt(times), number, "discrete")
            for number in (senders, 1)
        )
        assert count * times * worst < event.uneven < 1e3 * count * times * worst
        assert event.epsilon(0.1) - even.epsilon(0.1) > 2 * event.uneven


@pytest.mark.parametrize("delta", [1e-2, 1e-5])
@pytest.mark.parametrize("shift", [[30], [-12, 9]])
def test_the_proof_of_a_discrete_gaussian_is_slightly_above_that_of_enumerated_outcomes(shift, delta):
    z = np.arange(-400, 401.0)
    losses, chances = np.zeros(1), np.ones(1)
    masses = np.exp(-(z**2) / 800)
    for move in shift:
        losses = (losses[:, None] + ((z - move) ** 2 - z**2) / 800).ravel()
        chances = (chances[:, None] * masses / masses.sum()).ravel()
    exact = least_epsilon(losses, chances, delta)
    proved = IntegerNoise(len(shift), 1, 400.0, float(np.linalg.norm(shift)), 1, "discrete").epsilon(delta)
    assert exact * (1 - 1e-9) < proved < 1.01 * exact


@pytest.mark.parametrize("delta", [1e-2, 1e-5])
@pytest.mark.parametrize(("variance", "shift"), [(400.0, [30]), (400.0, [-12, 9]), (900.0, [60]), (25.0, [3, -4])])
def test_the_proof_is_slightly_above_the_epsilon_of_enumerated_outcomes(variance, shift, delta):
    exact = exact_epsilon(variance, shift, delta)
    proved = IntegerNoise(len(shift), 1, variance, float(np.linalg.norm(shift))).epsilon(delta)
    slack = 1.25 if variance >= 400 else 1.6
    assert exact < proved < slack * exact


@pytest.mark.parametrize("variance", [0.5, 3.0, 50.0, 2000.0])
def test_the_renyi_bound_holds_for_enumerated_divergences(variance):
    # the shortest vector of one number: its l1 norm is at most its square
    z = np.arange(-int(40 * math.sqrt(variance)) - 200, int(40 * math.sqrt(variance)) + 201)
    logs = np.log(
        special.ive(np.abs(z), variance), where=special.ive(np.abs(z), variance) > 0, out=np.full(len(z), -1e9)
    )
    for shift in (1, 2, 7):
        for order in (2, 5, 20):
            terms = (order * logs[:-shift] + (1 - order) * logs[shift:])[logs[shift:] > -600]
            exact = special.logsumexp(terms) / (order - 1)
            fine = ((2 * order - 1) * shift**2 + 6 * shift) / (4 * variance**2)
            assert exact <= order * shift**2 / (2 * variance) + min(fine, 1.5 * shift / variance)


def test_many_numbers_are_hardly_less_normal_than_a_gaussian_mechanism():
    event = IntegerNoise(32_768, 30, 250_000.0, 250.0)
    gaussian = DPFedAvg(noise_std=math.sqrt(250_000 / 250**2)).claim([None] * 30, setting_of(9, 5, 30))
    assert gaussian.proved.epsilon(5e-4) < event.epsilon(5e-4) < 1.005 * gaussian.proved.epsilon(5e-4)
    assert event.epsilon(0.0) == math.inf
    for delta in (1e-3, 1e-6):
        at = event.delta(event.epsilon(delta))
        assert delta * (1 - 1e-9) <= at < 1.3 * delta


@pytest.mark.parametrize(("count", "times"), [(10**10, 1), (10**5, 10**5), (1, 10**10)])
def test_the_proof_by_normal_noise_pays_the_divergences_of_all_numbers_in_all_rounds(count, times):
    # noise P, rounded normal noise G of the same variance; normal noise before it is rounded has 1/12 less
    variance, mu, delta = 1e4, 18.0, 0.1
    std = math.sqrt(variance - 1 / 12)
    z = np.arange(0.0, 1001.0)
    noise, normal = special.ive(z, variance), special.ndtr((0.5 - z) / std) - special.ndtr((-0.5 - z) / std)
    noise[1:], normal[1:] = 2 * noise[1:], 2 * normal[1:]  # both signs
    ratios = np.log(noise / normal)
    there, back = float(noise @ ratios), -float(normal @ ratios)  # KL(P || G), KL(G || P): 2e-10 each
    spreads = [math.sqrt(count * times * float(law @ ratios**2)) for law in (noise, normal)]
    # L, the sum of all ratios, has these divergences as means, and so many numbers make it normal. What L exceeds with
    # probability delta_1 <= delta under P is at least `over`; what -L exceeds with probability delta_2 under G is at
    # least `under`, as exp(epsilon_0 + over) delta_2 <= delta. This is a floor of the proof, not of the true epsilon
    over = count * times * there - spreads[0] * special.ndtri(delta)
    least = gaussian_epsilon(mu, delta * math.exp(-over)) + over
    under = count * times * back - spreads[1] * special.ndtri_exp(math.log(delta) - least)
    floor = least + under
    assert floor > gaussian_epsilon(mu, delta) + count * times * (there + back) + 50
    proved = IntegerNoise(count, times, variance, mu * std / math.sqrt(times)).epsilon(delta)
    assert floor < proved < 1.12 * floor  # Renyi divergences prove 1.22 times the floor


def test_the_logarithms_of_skellam_probabilities_are_those_of_the_difference_of_two_poisson_numbers():
    poisson = stats.poisson.pmf(np.arange(200), 45.0)
    z = np.arange(-60, 61)
    difference = np.convolve(poisson, poisson[::-1])[199 + z]
    assert log_skellam(z, 90.0) == pytest.approx(np.log(difference), rel=1e-9)
    # of large variances by an expansion
    z = np.arange(-20_000.0, 20_001.0, 1000.0)
    assert log_skellam(z, 3e6) == pytest.approx(np.log(special.ive(np.abs(z), 3e6)), rel=1e-12)
    assert np.exp(log_skellam(np.arange(-7e5, 7e5), 1e10)).sum() == pytest.approx(1.0, abs=1e-9)


@BOTH
@pytest.mark.parametrize(("bits", "reach", "most"), [(12, 2.0, 1.15), (14, 2.0, 1.05), (14, 4.0, 1.05)])
def test_at_equal_proved_epsilon_the_noise_is_near_that_of_central_noise(kind, bits, reach, most):
    setting = setting_of(25_450, 1000, 30)
    defense = kind(**BAR, bits=bits, reach=reach)
    state = defense.init(setting)
    central = DPFedAvg(**BAR)
    proved = [claim_of(d, [s] * 30, setting).proved.epsilon(5e-4) for d, s in ((defense, state), (central, None))]
    assert proved == pytest.approx([8.0, 8.0], rel=1e-5)
    # the noise, and the rounding errors of all clients at their largest variance
    noise = state.grid * math.sqrt(state.variance + 1000 / 4)
    assert 1 < noise / central.sigma(setting) < most


@BOTH
def test_the_claim_is_the_proof_of_a_whole_run_against_all_that_see_sums(kind):
    defense, setting = kind(**BAR), setting_of(100, 10, 5)
    state = defense.init(setting)
    claim = defense.claim([state] * 5, setting)
    assert (claim.unit, claim.delta, claim.epsilon) == (Unit.CLIENT, 5e-4, pytest.approx(8.0, rel=1e-5))
    assert judge(claim).verdict is Verdict.HOLDS
    assert Threat.SERVER in claim.against
    assert Threat.COLLUDING_SERVER not in claim.against
    colluding, participant = claim.further
    assert 8.0 < participant.epsilon(5e-4) < 9.0 < colluding.epsilon(5e-4)
    turns = setting_of(100, 50, 25, participants=10, participation="turns")
    assert kind(**BAR).init(turns).variance == state.variance
    assert claim_of(defense, [state] * 25, turns).epsilon == pytest.approx(8.0, rel=1e-5)


@BOTH
@pytest.mark.parametrize("epsilon", [0.01, 1000.0])
@pytest.mark.parametrize("d", [1, 40])
def test_it_works_at_every_epsilon(kind, epsilon, d):
    defense, setting = kind(epsilon=epsilon, bits=18), setting_of(d, 4)
    state, exchange = exchanged(defense, setting, [torch.full((d,), 0.3)] * 4)
    assert defense.claim([state], setting).epsilon == pytest.approx(epsilon, rel=1e-3)
    assert torch.isfinite(defense.decode(state, exchange.received, exchange.links, KEY)).all()


def test_too_few_bits_for_an_epsilon_are_refused():
    with pytest.raises(ValueError, match=r"no noise has epsilon 0\.1 over 1 rounds in 4096 numbers of 4 bits"):
        Skellam(epsilon=0.1, bits=4).init(setting_of(4000, 10))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"bits": 1}, "expected bits between 2 and 20, got bits=1"),
        ({"bits": 21}, "expected bits between 2 and 20, got bits=21"),
        ({"reach": 0.0}, "expected reach > 0"),
        ({"senders": -1}, "expected senders >= 0, got senders=-1"),
        ({"clip": math.nan}, "expected clip > 0"),
        ({"epsilon": 1.0, "noise_std": 1.0}, "expected epsilon or noise_std, got both"),
    ],
)
def test_wrong_parameters_are_refused(changes, words):
    with pytest.raises(ValueError, match=words):
        Skellam(**changes)


@BOTH
def test_a_damaged_message_or_sum_is_refused(kind):
    defense, setting = kind(bits=12), setting_of(3, 2)
    state = defense.init(setting)
    link, wire = Link(setting, Sender(0, 20), KEY), pack_levels(np.array([1, 2, 3, 4]), 12)
    assert len(defense.estimate(state, wire, link)) == 3
    for broken in (wire[:-1], wire + b"\0", b""):
        with pytest.raises(MessageError, match="expected a message of 6 bytes"):
            defense.estimate(state, broken, link)
        with pytest.raises(MessageError, match="expected a message of 6 bytes"):
            defense.transmit(state, [wire, broken], Links(setting, [link.sender] * 2, None), KEY)
    with pytest.raises(ValueError, match="expected a finite update"):
        defense.encode(state, None, torch.tensor([0.0, math.nan, 1.0]), link, KEY)


@BOTH
def test_the_likelihood_prefers_the_sum_that_was_sent(kind):
    d, defense = 200, kind(clip=1.0, noise_std=0.1)
    setting, updates = setting_of(d, 3), drawn(d, 3, 0.9)
    state, exchange = exchanged(defense, setting, updates)
    links = Links(setting, exchange.links.senders[:1], None)
    score = defense.likelihood(state, exchange.received, links)
    true, wrong = (float(score(torch.stack(rows)[None])[0]) for rows in (updates, updates[:2] + updates[:1]))
    assert true + 20 < wrong
    # half a chi square of 200 numbers
    assert 60 < true < 150
