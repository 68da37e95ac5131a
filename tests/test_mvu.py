"""MVU as a defense; the channel's design is in test_mvu_design.py."""

import math

import numpy as np
import pytest
import torch
from scipy import stats

from leakgauge import Key, Link, Links, rng, unpack_levels
from leakgauge.defenses.mvu import MVU
from leakgauge.harness.core.claim import Verdict, judge
from leakgauge.harness.core.distribution import DistributionError
from tests.by_rows import by_rows
from tests.jopeq_case import WHO, setting_of
from tests.oracles import ALPHA


def through(defense, update, here, private):
    state = defense.init(here)
    wire, _ = defense.encode(state, None, update, Link(here, WHO, Key(9)), private)
    return wire, defense.estimate(state, wire, Link(here, WHO, None))


@by_rows((1, "public", 126), (2, "public", 251), pytest.param(3, "tensor", 376 + 16, marks=pytest.mark.matrix))
def test_the_wire_has_exactly_the_bits_of_the_columns(bits, scale, size):
    wire, _ = through(MVU(bits=bits, scale=scale), rng.normal(Key(0), (1001,)), setting_of(1000, 1), Key(1))
    assert len(wire) == size == math.ceil(1001 * bits / 8) + (16 if scale == "tensor" else 0)


def test_one_bit_is_randomized_response_on_the_bytes():
    # a coordinate at the bound keeps its bit with probability e^eps / (1 + e^eps); alpha 1e-6
    wire, _ = through(MVU(epsilon=2.0), torch.ones(200_000), setting_of(200_000), Key(1))
    ones = int(np.unpackbits(np.frombuffer(wire, np.uint8)).sum())
    chance = math.exp(2.0) / (1 + math.exp(2.0))
    assert stats.binomtest(ones, 200_000, chance).pvalue > ALPHA
    assert stats.binomtest(ones, 200_000, 1 - 1.06 * (1 - chance)).pvalue < ALPHA


@pytest.mark.parametrize("bits", [1, 2, 3])
@pytest.mark.parametrize("value", [-0.9, 0.1, 0.6, 7.0])
@pytest.mark.table(7)
def test_decoding_is_unbiased_for_the_clamped_coordinate(bits, value):
    # alpha 1e-6; an offset of 6 % of the range is more than 20 standard errors
    defense, d = MVU(epsilon=4.0, bits=bits, clip=2.0), 100_000
    _, found = through(defense, torch.full((d,), value), setting_of(d), Key(2))
    clamped = min(value, 2.0)
    assert stats.ttest_1samp(found.double().numpy(), clamped).pvalue > ALPHA
    assert stats.ttest_1samp(found.double().numpy() + 0.06, clamped).pvalue < ALPHA


def test_values_outside_after_a_private_scale_are_clamped():
    update = torch.zeros(1000)
    update[0] = 100.0
    _, found = through(MVU(epsilon=20.0, bits=4, scale="tensor"), update, setting_of(1000), Key(3))
    assert torch.isfinite(found).all()
    # the mean and three times the deviation were sent: 0.1 + 3 * 3.16 at most
    assert found.max() < 0.1 + 3 * 100 / 1000**0.5 * 1.1


@pytest.mark.parametrize(("epsilon", "bits"), [(0.5, 1), (4.0, 1), (4.0, 2), (10.0, 2)])
def test_a_coordinate_has_its_epsilon_and_a_message_d_times_as_much(epsilon, bits):
    defense, here = MVU(epsilon=epsilon, bits=bits), setting_of(100)
    claim = defense.claim([defense.init(here)] * 3, here)
    assert claim.epsilon == pytest.approx(3 * epsilon)
    assert judge(claim).verdict is (Verdict.VACUOUS if epsilon > 3 else Verdict.HOLDS)
    assert judge(claim).proved == pytest.approx(3 * epsilon, rel=1e-6)
    assert claim.further[0].epsilon(0.0) == pytest.approx(300 * epsilon, rel=1e-6)
    leaky = MVU(epsilon=epsilon, bits=bits, scale="tensor")
    assert leaky.claim([leaky.init(here)], here).further[0].epsilon(0.0) == math.inf


@pytest.mark.parametrize("scale", ["public", "tensor", "vector"])
def test_the_stated_distribution_is_that_of_the_likelihood(scale):
    defense, here = MVU(bits=2, clip=0.7, scale=scale), setting_of(30, 10)
    update, state = rng.normal(Key(3), (40,)), defense.init(here)
    wire, _ = through(defense, update, here, Key(1))
    distribution = defense.message_distribution(state, None, update, Link(here, WHO, None))
    columns = unpack_levels(wire[4 * len(distribution.header) :], 40, 2)
    score = defense.likelihood(state, [wire], Links(here, [WHO], None))(update[None])
    assert float(score) == pytest.approx(-np.log(distribution.chances[np.arange(40), columns]).sum(), abs=1e-3)
    assert ((distribution.read(wire, Key(2)).uniforms > 0) & (distribution.read(wire, Key(2)).uniforms < 1)).all()


@pytest.mark.parametrize(("change", "match"), [(0.5, "epsilon at most"), (-0.5, "not probabilities")])
def test_a_channel_that_breaks_its_promise_has_no_distribution(change, match):
    defense, here = MVU(), setting_of(5)
    state = defense.init(here)
    moved = change * float(state.P[0, -1])
    P = state.P + np.array([[moved, -moved if change > 0 else 0.0], [0.0, 0.0]])
    with pytest.raises(DistributionError, match=match):
        defense.message_distribution(state._replace(P=P), None, torch.ones(5), Link(here, WHO, None))
