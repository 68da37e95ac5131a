"""The likelihoods of JoPEQ and its baselines.

Every statistical test has a false-alarm rate of 1e-6 or less.
"""

import math

import pytest
import torch

from leakgauge import Key, Links, rng
from leakgauge.defenses.jopeq import JoPEQ
from leakgauge.defenses.jopeq_sound import SoundJoPEQ
from leakgauge.defenses.jopeq_t import JoPEQT
from leakgauge.defenses.laplace import Laplace
from leakgauge.defenses.mvu import MVU
from leakgauge.defenses.sdq import SDQ
from leakgauge.defenses.sdq_lattice import LatticeSDQ
from leakgauge.defenses.t_noise import TNoise
from leakgauge.harness.core.contract import Link, log_likelihoods
from tests.by_rows import by_rows
from tests.jopeq_case import PRIVATE, SHARED, WHO, decode, encode, levels_of, like_one_bit, setting_of


def score(defense, wires, candidates, shared=(SHARED,)):
    setting = setting_of(candidates.shape[1])
    keys = None if shared is None else list(shared) * len(wires)
    return defense.likelihood(None, wires, Links(setting, [WHO] * len(wires), keys))(candidates)


def test_the_likelihood_of_jopeq_is_laplace_noise_in_a_cell():
    defense = like_one_bit(JoPEQ(epsilon=4.0, scale="public", clip=10.0))
    wire = encode(defense, torch.zeros(1000))
    sent, candidate = decode(defense, wire, setting_of(1000)) / 10, rng.uniform(Key(18), (1000,), -1.0, 1.0)
    # golden: b' = 0.4330127019, Delta^2 = 3/2
    r, half = (candidate - sent).double() / 0.4330127019, math.sqrt(1.5) / 2 / 0.4330127019
    inside = 1 - math.exp(-half) * r.cosh()
    outside = (-r.abs()).exp() * math.sinh(half)
    expected = -torch.where(r.abs() < half, inside, outside).log().sum() + 1000 * math.log1p(-math.exp(-half))
    assert float(score(defense, [wire], 10 * candidate[None])) == pytest.approx(float(expected), rel=1e-5)
    # without the dither: the midpoint of a level, and the dither as further noise, hence a triangle
    middle = torch.tensor(defense.lattice.step * levels_of(defense, wire, 1000))
    r, width = (candidate - middle).abs().double() / 0.4330127019, math.sqrt(1.5) / 0.4330127019
    inside = width - r + math.exp(-width) * r.cosh() - (-r).exp()
    outside = (-r).exp() * (math.cosh(width) - 1)
    expected = -torch.where(r < width, inside, outside).log().sum() + 1000 * math.log(width - 1 + math.exp(-width))
    assert float(score(defense, [wire], 10 * candidate[None], shared=None)) == pytest.approx(float(expected), rel=1e-5)


def test_the_likelihood_without_noise_is_zero_in_the_cell_except_near_its_wall():
    for defense in (SDQ(bits=6), JoPEQ(epsilon=10.0, bits=6, gamma=3.0 * 65 / 2)):
        update = rng.uniform(Key(15), (2000,), -1.0, 1.0)
        wire = encode(defense, update)
        # of a uniform draw: two walls of 0.02 cells, and the integral of -ln(1 - e^-z / 2), Li2(1/2) = 0.5822
        misfit = float(score(defense, [wire], update[None])) / 2000
        assert misfit == pytest.approx(2 * 0.02 * 0.5822, rel=0.4)


@by_rows(JoPEQ(), JoPEQT(), TNoise(), Laplace(scale="tensor"), MVU(scale="tensor"), JoPEQ(scale="vector"))
def test_numbers_in_the_clear_cost_a_search_at_most_twelve_nats(defense):
    update = rng.normal(Key(20), (400,))
    setting = setting_of(400)
    state, link = defense.init(setting), Link(setting, WHO, SHARED)
    wire, _ = defense.encode(state, defense.remember(setting), update, link, PRIVATE)
    stated = defense.likelihood(state, [wire] * 2, Links(setting, [WHO] * 2, [SHARED] * 2))
    both = torch.stack([update, 1.1 * update]).double()
    hidden, clear = stated.hidden(both), stated.clear(both)
    assert torch.equal(stated(both), hidden + clear)
    assert float(clear[0]) < 1e-3 < 1e3 < float(clear[1])
    found = log_likelihoods(defense, state, wire, link, 2, search=True)(both)
    assert float(found[0] + hidden[0]) == pytest.approx(0, abs=1)
    assert float(found[1] + hidden[1]) == pytest.approx(-12)


@pytest.mark.parametrize("shared", [(SHARED,), None])
@by_rows(
    JoPEQ(epsilon=1000.0, bits=2, gamma=0.4, scale="public"),  # no private noise
    JoPEQ(epsilon=40.0, bits=2, gamma=0.4, scale="public"),
    JoPEQT(s2=0.001, nu=4.0, bits=2, gamma=0.2, scale="public"),
)
def test_an_outermost_level_is_evidence_only_against_the_inside(defense, shared):
    # the pair (0.45, 0.8) is (0.45, 0.47) in the lattice, beyond the edge of 0.16; noise is a tenth of that
    beyond = torch.cat([torch.full((32,), 0.45), torch.full((32,), 0.8)])
    for sign in (1, -1):
        wire = encode(defense, sign * beyond)
        assert set(levels_of(defense, wire, 64)) == {sign * 2}
        factors = sign * torch.tensor([1.0, 1.08, 0.2, 0.1])
        true, beyond_it, inside, deeper = (float(score(defense, [wire], f * beyond[None], shared)) for f in factors)
        assert 0 <= beyond_it <= true < 0.2
        assert 1 < inside < deeper


def test_the_gradient_of_the_likelihood_points_to_the_message_and_the_truth_beats_its_neighbors():
    update = 0.3 * rng.normal(Key(16), (2000,))
    for defense in (JoPEQ(bits=4), JoPEQT(bits=4), SDQ(bits=4), LatticeSDQ(bits=4), SoundJoPEQ(epsilon=40.0), TNoise()):
        wires = [encode(defense, update, PRIVATE.child(i), SHARED.child(i)) for i in range(20)]
        keys = [SHARED.child(i) for i in range(20)]
        likelihood = defense.likelihood(None, wires, Links(setting_of(2000), [WHO] * 20, keys))
        off = 0.2 * rng.normal(Key(17), (2000,))
        off -= off.mean()
        true, near = (likelihood(u.expand(20, -1)).mean() for u in (update, update + off))
        assert true < near, defense
