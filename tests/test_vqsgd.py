"""The distribution of vqSGD."""

import dataclasses
import math

import numpy as np
import pytest
import torch
from scipy import stats

from leakgauge import Key, Link, MessageError, pack_levels, rng
from leakgauge.defenses.vqsgd import VQSGD
from leakgauge.harness.core.claim import Verdict, judge
from leakgauge.harness.core.distribution import DistributionError
from tests.baselines_case import LENET, SENDERS, encode, estimate, score, setting_of
from tests.oracles import ALPHA


def chances(defense, v):
    """Probabilities of all 2d points by the definition: the mixture, then randomized response."""
    d = len(v)
    spare = 1 - v.abs().sum() / d**0.5
    drawn = torch.cat([v.clamp(min=0), (-v).clamp(min=0)]) / d**0.5 + spare / (2 * d)
    honest = math.exp(defense.epsilon) / (math.exp(defense.epsilon) + 2 * d - 1)
    return drawn * honest + (1 - drawn) * (1 - honest) / (2 * d - 1)


def single(defense, d):
    """All 2d messages of one point."""
    width = (2 * d - 1).bit_length()
    return [pack_levels(np.array([point]), width) for point in range(2 * d)]


@pytest.mark.parametrize("d", [1, 3, 8])
@pytest.mark.parametrize("eps", [0.1, 1.0, 4.0])
def test_the_likelihood_of_vqsgd_is_its_distribution_and_the_estimate_is_unbiased(d, eps):
    defense = VQSGD(clip=2.0, epsilon=eps, repeats=1)
    update = rng.normal(Key(5), (d,), torch.float64)
    update *= 1.7 / update.norm()
    wires = single(defense, d)
    distribution = (-score(defense, wires, d, update.expand(2 * d, -1))).exp()
    assert torch.allclose(distribution, chances(defense, update / 2), rtol=1e-12)
    assert float(distribution.sum()) == pytest.approx(1, rel=1e-12)
    mean = sum(chance * estimate(defense, wire, d).double() for chance, wire in zip(distribution, wires, strict=True))
    assert torch.allclose(mean, update, atol=1e-6 * (1 + 2 * d / eps))
    long = (-score(defense, wires, d, (10 * update).expand(2 * d, -1))).exp()
    assert torch.allclose(long, chances(defense, update / 1.7), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("eps", [1.0, 4.0])
def test_vqsgd_draws_its_points_by_that_distribution(eps):
    # alpha 1e-6; 200,000 points of one message detect a chance 6 % off with a miss rate under 1e-6 (the twin)
    defense, d = VQSGD(clip=2.0, epsilon=eps, repeats=200_000), 3
    update = torch.tensor([1.2, -0.8, 0.0])
    points = defense._read(encode(defense, update)[0], setting_of(d))
    distribution = chances(defense, update.double() / 2).numpy()
    assert stats.chisquare(np.bincount(points, minlength=6), 200_000 * distribution / distribution.sum()).pvalue > ALPHA
    distribution[0] *= 1.06
    assert stats.chisquare(np.bincount(points, minlength=6), 200_000 * distribution / distribution.sum()).pvalue < ALPHA
    assert abs(stats.pearsonr(points[1:], points[:-1]).statistic) < 5 / 200_000**0.5


def test_vqsgd_averages_its_repetitions():
    defense = VQSGD(clip=2.0, epsilon=1.0, repeats=4)
    parts = [estimate(dataclasses.replace(defense, repeats=1), single(defense, 3)[point], 3) for point in (0, 4, 4, 5)]
    whole = estimate(defense, pack_levels(np.array([0, 4, 4, 5]), 3), 3)
    assert torch.allclose(whole, sum(parts) / 4)


def test_a_vqsgd_message_has_18_bits_a_point_for_sqsgds_lenet():
    wire = encode(VQSGD(), torch.ones(LENET))[0]
    assert len(wire) == math.ceil(113 * 18 / 8) == 255
    assert len(encode(VQSGD(repeats=3), torch.ones(1))[0]) == 1


def test_vqsgd_never_replaces_a_point_if_the_probability_is_below_2_to_the_minus_53():
    # for equal magnitudes at the clip only the four points with the right signs are drawn
    update = torch.tensor([1.0, -1.0, 1.0, -1.0])
    exact, random = (VQSGD(clip=1.0, epsilon=eps, repeats=1000) for eps in (400.0, 1.0))
    assert set(exact._read(encode(exact, update)[0], setting_of(4)).tolist()) == {0, 5, 2, 7}
    assert set(random._read(encode(random, update)[0], setting_of(4)).tolist()) == set(range(8))


@pytest.mark.parametrize(("d", "eps"), [(1, 1.0), (2, 0.3), (5, 2.0), (9, 6.0)])
def test_one_point_of_vqsgd_has_exactly_the_stated_epsilon_and_no_pair_has_more(d, eps):
    defense = VQSGD(epsilon=eps, repeats=1)
    e1, flat = torch.zeros(d).double(), torch.full((d,), -(d**-0.5), dtype=torch.float64)
    e1[0] = 1.0
    worst = defense.repetition_epsilon(d)
    assert float((chances(defense, e1) / chances(defense, flat)).log().max()) == pytest.approx(worst, rel=1e-9)
    assert worst <= eps * (1 + 1e-12)
    pairs = rng.normal(Key(6), (200, d), torch.float64)
    pairs /= pairs.norm(dim=1, keepdim=True)
    distributions = torch.stack([chances(defense, v) for v in [*pairs, e1, flat, torch.zeros(d)]]).log()
    assert float((distributions[:, None] - distributions[None]).max()) <= worst * (1 + 1e-9)


def test_the_repetitions_of_vqsgd_break_its_claim():
    setting = setting_of(LENET)
    claim = VQSGD().claim([None], setting)
    # 1/sqrt(119850) = 0.00288856, and 0.00288856 + 0.99711144 / 239700 = 0.00289272, whose logarithm is -5.84556
    assert judge(claim).verdict is Verdict.BROKEN
    assert (claim.epsilon, judge(claim).proved) == (400.0, pytest.approx(113 * (400 - 5.84556), abs=1e-3))
    run = VQSGD().claim([None] * 3, setting)
    assert (run.epsilon, judge(run).proved) == (1200.0, pytest.approx(3 * judge(claim).proved))
    assert judge(VQSGD(repeats=1).claim([None], setting)).verdict is Verdict.VACUOUS
    assert judge(VQSGD(repeats=1).claim([None], setting_of(1))).verdict is Verdict.VACUOUS


@pytest.mark.parametrize("eps", [1e-3, 36.0, 5000.0])
def test_vqsgd_works_at_every_epsilon(eps):
    defense, update = VQSGD(epsilon=eps), torch.zeros(1, 17, requires_grad=True)
    wire = encode(defense, 0.1 * rng.normal(Key(7), (17,)))[0]
    assert torch.isfinite(estimate(defense, wire, 17)).all()
    found = score(defense, [wire], 17, update)
    (slope,) = torch.autograd.grad(found.sum(), update)
    assert found.dtype == torch.float32
    assert torch.isfinite(slope).all()


def test_a_vqsgd_point_that_does_not_exist_is_refused():
    with pytest.raises(MessageError, match=r"points 0 to 5, got 7"):
        estimate(VQSGD(repeats=2), pack_levels(np.array([0, 7]), 3), 3)


def distribution_of(defense, update):
    return defense.message_distribution(None, None, update, Link(setting_of(len(update)), SENDERS[0], None))


@pytest.mark.parametrize("eps", [0.1, 4.0, 5000.0])
@pytest.mark.parametrize("norm", [1.7, 17.0])
def test_the_stated_distribution_holds_the_chances_from_the_least_likely_point_on(eps, norm):
    defense, d = VQSGD(clip=2.0, epsilon=eps, repeats=1), 5
    update = rng.normal(Key(5), (d,), torch.float64)
    update *= norm / update.norm()
    distribution = chances(dataclasses.replace(defense, epsilon=min(eps, 500.0)), update / max(2.0, norm)).numpy()
    order, seen = np.argsort(distribution, kind="stable"), distribution_of(defense, update)
    for point, end in zip(order, np.cumsum(distribution[order]), strict=True):
        drawn = [float(seen.read(single(defense, d)[point], Key(k)).uniforms[0]) for k in range(50)]
        assert end - distribution[point] - 1e-12 <= min(drawn) <= max(drawn) <= end + 1e-12
        assert max(drawn) - min(drawn) >= 0.8 * distribution[point]


def test_a_point_that_does_not_exist_is_impossible():
    with pytest.raises(DistributionError, match=r"an outcome of 7, expected at most 5"):
        distribution_of(VQSGD(repeats=2), torch.ones(3)).read(pack_levels(np.array([0, 7]), 3), Key(0))
