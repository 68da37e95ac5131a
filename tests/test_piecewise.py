"""The distribution of the piecewise mechanism (PM)."""

import itertools
import math

import numpy as np
import pytest
import torch
from scipy import stats

from leakgauge import Key, Link, MessageError, pack_float32, rng
from leakgauge.defenses.piecewise import Piecewise
from leakgauge.harness.core.claim import Unit, Verdict, judge
from leakgauge.harness.core.distribution import DistributionError
from tests.baselines_case import LENET, SENDERS, SHARED, encode, estimate, score, setting_of
from tests.oracles import ALPHA, follows


def test_piecewise_has_the_constants_of_sqsgds_comparison():
    # sqSGD, section 5: epsilon 400 gives k = 160, 2.5 a coordinate and C = 1.803102
    defense = Piecewise()
    assert defense.epsilon == 400
    assert defense.count(LENET) == 160
    assert defense.output_distribution(LENET).epsilon == 2.5
    assert defense.output_distribution(LENET).bound == pytest.approx(1.803102, abs=5e-7)
    assert [Piecewise(epsilon=e).count(17) for e in (0.1, 2.5, 5.1, 400.0)] == [1, 1, 2, 17]


def cells(eps, t):
    """(left, right, density) of the intervals on which PM's density is constant: sqSGD, section 5."""
    s = math.exp(eps / 2)
    c = (s + 1) / (s - 1)
    left = (c + 1) * t / 2 - (c - 1) / 2
    levels = (1 / (s + 1) / (c + 1), s / (s + 1) / (c - 1))
    return [(-c, left, levels[0]), (left, left + c - 1, levels[1]), (left + c - 1, c, levels[0])]


def distribution(eps, t):
    """The piecewise linear distribution function of PM's output."""
    stretches = cells(eps, t)
    edges = [stretches[0][0], *(b for _, b, _ in stretches)]
    mass = np.cumsum([0.0, *((b - a) * level for a, b, level in stretches)])
    return lambda y: np.interp(y, edges, mass)


@pytest.mark.parametrize("eps", [0.1, 1.0, 2.5, 10.0])
@pytest.mark.parametrize("t", [-1.0, -0.3, 0.0, 0.7, 1.0])
def test_piecewise_is_unbiased_with_the_stated_variance_and_a_density_ratio_of_exactly_e_to_the_epsilon(eps, t):
    stretches, s = cells(eps, t), math.exp(eps / 2)
    mass, mean, second = (sum(level * (b**n - a**n) / n for a, b, level in stretches) for n in (1, 2, 3))
    assert mass == pytest.approx(1, rel=1e-12)
    assert mean == pytest.approx(t, abs=1e-12 * stretches[2][1])
    variance = t**2 / (s - 1) + (s + 3) / (3 * (s - 1) ** 2)
    assert second - t**2 == pytest.approx(variance, rel=1e-10)
    distribution, place = Piecewise().output_distribution(1)._replace(epsilon=eps), torch.tensor(t, dtype=torch.float64)
    assert float(distribution.variance(place)) == pytest.approx(variance, rel=1e-12)
    # the numbers that the sampler uses
    assert (float(distribution.left(place.numpy())), distribution.bound) == pytest.approx(
        (stretches[0][1], stretches[2][1]), rel=1e-12
    )
    assert distribution.inside / distribution.width == pytest.approx(stretches[1][2], rel=1e-12)
    assert (1 - distribution.inside) / (distribution.bound + 1) == pytest.approx(stretches[0][2], rel=1e-9)
    assert stretches[1][2] / stretches[0][2] == pytest.approx(math.exp(eps), rel=1e-12)


def test_the_intervals_of_opposite_inputs_do_not_overlap_so_that_epsilon_is_attained():
    (_, high, _), (low, _, _) = cells(2.5, -1.0)[1], cells(2.5, 1.0)[1]
    assert high == pytest.approx(-1)
    assert low == pytest.approx(1)


@pytest.mark.parametrize("t", [-0.9, 0.2])
def test_piecewise_outputs_have_the_distribution_of_pm(t):
    # alpha 1e-6; 300,000 outputs detect a scale or an epsilon 6 % off with a miss rate under 1e-6 (the twins)
    d = 300_000
    defense = Piecewise(clip=0.5, epsilon=2.5 * d)
    found = estimate(defense, encode(defense, torch.full((d,), 0.5 * t))[0], d).double().numpy() / 0.5
    assert follows(found, distribution(2.5, t))
    assert not follows(1.06 * found, distribution(2.5, t))
    assert not follows(found, distribution(1.06 * 2.5, t))
    assert abs(stats.pearsonr(found[1:], found[:-1]).statistic) < 5 / d**0.5


def test_above_epsilon_73_a_coordinate_piecewise_never_leaves_the_interval():
    # e^(-40) is the interval's half-width and the probability of leaving it; float32 resolves 1e-7
    d, update = 1000, rng.uniform(Key(15), (1000,), -1.0, 1.0)
    found = estimate(Piecewise(epsilon=80.0 * d), encode(Piecewise(epsilon=80.0 * d), update)[0], d)
    assert Piecewise(epsilon=80.0 * d).output_distribution(d).epsilon == 80.0
    assert torch.allclose(found, update, atol=2e-7)


def test_a_piecewise_estimate_is_unbiased_for_the_clamped_update():
    # the mean over equal coordinates has a standard deviation of 0.002 clips; 6 % are 26 standard deviations
    d, defense = 400_000, Piecewise(clip=2.0, epsilon=400_000.0)
    for value, clamped in ((1.8, 1.8), (5.0, 2.0), (-5.0, -2.0)):
        mean = float(estimate(defense, encode(defense, torch.full((d,), value))[0], d).double().mean())
        assert abs(mean - clamped) < 5 * 2 * 0.002
        assert abs(mean - 1.06 * clamped) > 5 * 2 * 0.002


def test_a_piecewise_message_has_four_bytes_a_coordinate_at_positions_independent_of_the_update():
    d, defense = 1000, Piecewise(clip=0.5)
    wires = [encode(defense, update)[0] for update in (torch.zeros(d), rng.normal(Key(3), (d,)))]
    assert [len(wire) for wire in wires] == [4 * 160] * 2
    places = defense.positions(d, SHARED)
    assert len(set(places.tolist())) == 160
    for wire in wires:
        found = estimate(defense, wire, d)
        sent = torch.frombuffer(bytearray(wire), dtype=torch.float32)
        assert torch.allclose(found[places], 0.5 * d / 160 * sent, rtol=1e-6)
        assert int((found != 0).sum()) == 160


def test_piecewise_positions_are_uniform_in_a_random_order():
    # alpha 1e-6; the position of the first value is uniform over 10; the smallest of 4 positions is not
    first = [int(Piecewise(epsilon=10.0).positions(10, Key(4).child(i))[0]) for i in range(2000)]
    assert stats.chisquare(np.bincount(first, minlength=10)).pvalue > ALPHA
    smallest = [int(Piecewise(epsilon=10.0).positions(10, Key(4).child(i)).min()) for i in range(200)]
    assert stats.chisquare(np.bincount(smallest, minlength=10)).pvalue < ALPHA


def test_an_outsider_estimates_the_mean_over_all_choices_of_coordinates():
    d, defense = 5, Piecewise(clip=2.0, epsilon=5.0)
    wire = encode(defense, torch.full((d,), 1.0))[0]
    sent = torch.frombuffer(bytearray(wire), dtype=torch.float32)
    choices = torch.zeros(20, d)
    for row, places in zip(choices, itertools.permutations(range(d), 2), strict=True):
        row[list(places)] = 2.0 * d / 2 * sent
    assert torch.allclose(estimate(defense, wire, d, shared=None), choices.mean(0), atol=1e-6)


def test_the_blurred_likelihood_of_piecewise_pulls_into_the_interval_and_costs_epsilon_outside():
    distribution = Piecewise().output_distribution(LENET)
    y = torch.tensor(0.4, dtype=torch.float64)
    middle = float(y) * (1 - distribution.tail)
    t = torch.tensor([middle, middle + 0.6 * distribution.tail, -0.95, 0.95], dtype=torch.float64, requires_grad=True)
    misfit = distribution.misfit(y.expand(4), t)
    (slope,) = torch.autograd.grad(misfit.sum(), t)
    center, within, *beyond = misfit.tolist()
    assert center == 0
    assert 0 <= within < 0.05
    # the tails of the blur reduce the 2.5 slightly
    assert all(2.2 < value < 2.5 for value in beyond)
    assert slope[2] < -0.01
    assert slope[3] > 0.01


def test_the_likelihoods_of_piecewise_prefer_the_truth_with_and_without_the_key():
    d, defense = 1000, Piecewise(epsilon=1000.0)
    update = torch.cat([torch.full((900,), 0.5), torch.full((100,), -0.5)])
    wire = encode(defense, update)[0]
    for key in (SHARED, None):
        true, wrong = score(defense, [wire] * 2, d, torch.stack([update, -update]), key)
        assert true.dtype == torch.float32
        assert true + 100 < wrong
    shuffled = update.flip(0)
    inside, outside = (score(defense, [wire] * 2, d, torch.stack([update, shuffled]), key) for key in (SHARED, None))
    assert inside[0] + 10 < inside[1]
    assert float(outside[0]) == pytest.approx(float(outside[1]), rel=1e-5)


@pytest.mark.parametrize("eps", [1e-3, 30.0, 5000.0])
def test_piecewise_works_at_every_epsilon(eps):
    defense, update = Piecewise(epsilon=eps), torch.full((1,), 0.3, requires_grad=True)
    wire = encode(defense, update.detach())[0]
    found = estimate(defense, wire, 1)
    assert torch.isfinite(found).all()
    (slope,) = torch.autograd.grad(score(defense, [wire], 1, update[None]).sum(), update)
    assert torch.isfinite(slope).all()
    if eps >= 30:
        assert float(found) == pytest.approx(0.3, abs=1e-5)


def test_piecewise_claims_epsilon_a_message_and_it_holds():
    setting = setting_of(LENET)
    one, three = (Piecewise().claim([None] * rounds, setting) for rounds in (1, 3))
    assert (one.unit, one.epsilon, one.delta) == (Unit.MESSAGE, 400.0, 0.0)
    assert judge(one).verdict is judge(three).verdict is Verdict.VACUOUS
    assert judge(three).proved == three.epsilon == 1200.0
    (coordinate,) = one.further
    assert coordinate.unit is Unit.COORDINATE
    assert coordinate.epsilon(0.0) == 2.5


def test_a_piecewise_message_beyond_the_range_is_refused():
    defense = Piecewise()
    wire = encode(defense, torch.zeros(1000))[0]
    with pytest.raises(MessageError, match=r"values of at most 1\.80310225, got 2"):
        estimate(defense, wire[:-4] + pack_float32(torch.tensor([-2.0])), 1000)


def distribution_of(defense, update):
    return defense.message_distribution(None, None, update, Link(setting_of(len(update)), SENDERS[0], SHARED))


def test_the_stated_distribution_is_the_distribution_of_pm_at_the_places_of_the_shared_key():
    defense, update = Piecewise(clip=0.5), torch.linspace(-1.0, 1.0, 1000)
    wire = encode(defense, update)[0]
    reading = distribution_of(defense, update).read(wire, Key(0))
    assert (reading.places == defense.positions(1000, SHARED).numpy()).all()
    inputs = (update[reading.places].double() / 0.5).clamp(-1, 1).tolist()
    sent = np.frombuffer(wire, "<f4").astype(np.float64)
    expected = [distribution(2.5, t)(y) for t, y in zip(inputs, sent, strict=True)]
    assert reading.uniforms == pytest.approx(np.array(expected), abs=1e-6)


@pytest.mark.parametrize(("eps", "clip"), [(30.0, 1.0), (5000.0, 0.3)])
def test_outputs_that_float32_hardly_resolves_follow_the_stated_distribution(eps, clip):
    # alpha 1e-6; an error of a millionth of the clip leaves no doubt
    d, update = 2000, rng.uniform(Key(15), (2000,), -1.5, 1.5)
    defense = Piecewise(clip=clip, epsilon=eps * d)
    wire = encode(defense, update)[0]
    reading = distribution_of(defense, update).read(wire, Key(0))
    assert reading.bits is None
    assert follows(reading.uniforms, "uniform")
    assert not follows(distribution_of(defense, update + 1e-6).read(wire, Key(0)).uniforms, "uniform")


def test_an_output_beyond_the_range_is_impossible():
    wire = encode(Piecewise(), torch.zeros(1000))[0]
    with pytest.raises(DistributionError, match=r"not within 1\.80310"):
        distribution_of(Piecewise(), torch.zeros(1000)).read(wire[:-4] + pack_float32(torch.tensor([-2.0])), Key(0))
