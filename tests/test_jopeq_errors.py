"""The distributions of the errors of JoPEQ and its baselines.

Every statistical test has a false-alarm rate of 1e-6 or less.
"""

import math

import numpy as np
import pytest
import torch
from scipy import special, stats

from leakgauge import Key, rng
from leakgauge.defenses.jopeq import JoPEQ
from leakgauge.defenses.jopeq_sound import SoundJoPEQ
from leakgauge.defenses.jopeq_t import JoPEQT
from leakgauge.defenses.sdq import SDQ
from leakgauge.defenses.sdq_lattice import LatticeSDQ
from leakgauge.defenses.t_noise import TNoise
from tests.by_rows import by_rows
from tests.jopeq_case import FROM_PAIRS, decode, encode, like_one_bit, round_trip, setting_of
from tests.oracles import follows


def scaled_error(defense, update):
    """[n] float64: decode(encode(u)) - u in units of the scale; pairs stand side by side."""
    header, _ = defense.scaling.normalize(update, setting_of(len(update)).layout)
    lanes = defense.scaling.lanes
    scale = float(np.frombuffer(header, "<f4")[-1]) if header else defense.clip
    error = (round_trip(defense, update).double() - update.double()).numpy() / scale
    return error.reshape(lanes, -1).T.reshape(-1)


def assert_distribution(drawn, distribution):
    """Kolmogorov-Smirnov at 1e-6, with a twin: 300,000 draws detect a scale that is 6 % off with the same certainty."""
    assert len(drawn) >= 300_000
    assert follows(drawn, distribution)
    assert not follows(1.06 * drawn, distribution)


def laplace_plus_uniform(b, step):
    """Distribution function of Laplace(b) plus uniform over `step`; b = 0: uniform alone."""

    def integral(t):
        # the antiderivative of Laplace's distribution function
        return np.maximum(t, 0) + (b / 2 * np.exp(-np.abs(t) / b) if b else 0.0)

    return lambda z: (integral(z + step / 2) - integral(z - step / 2)) / step


def assert_uncorrelated(one, other):
    assert abs(stats.pearsonr(one, other).statistic) < 5 / math.sqrt(len(one))


@by_rows(
    like_one_bit(JoPEQ(epsilon=4.0)),
    like_one_bit(JoPEQ(epsilon=4.0, gamma="paper", scale="vector")),
    like_one_bit(JoPEQ(epsilon=3.0, scale="public", clip=4.0)),
    like_one_bit(JoPEQ(epsilon=10.0)),  # no private noise: uniform
    ids=["reference", "paper", "public", "no noise"],
)
def test_the_error_of_jopeq_is_laplace_plus_uniform(defense):
    update = (0.8 * rng.normal(Key(8), (300_000,))).clamp(-4, 4)
    error = scaled_error(defense, update)
    assert_distribution(error, laplace_plus_uniform(defense.noise_scale, defense.lattice.step))
    assert_uncorrelated(error, update.numpy())
    assert_uncorrelated(error[1:], error[:-1])


def test_the_error_of_the_sound_variant_is_the_full_laplace_noise_plus_uniform():
    defense = like_one_bit(SoundJoPEQ(epsilon=4.0, clip=2.0))
    update = rng.normal(Key(8), (300_000,)).clamp(-2, 2)
    error = scaled_error(defense, update)
    assert_distribution(error, laplace_plus_uniform(0.5, defense.lattice.step))
    assert error.var() > 1.1 * (2 * 0.5**2)
    assert_uncorrelated(error, update.numpy())


def test_the_sound_variant_clamps_to_its_bound():
    defense = SoundJoPEQ(epsilon=4.0, bits=8, clip=0.5)
    inside, outside = (encode(defense, torch.full((1000,), value)) for value in (0.5, 7.0))
    assert inside == outside


@pytest.mark.parametrize("bits", [3, 8])
def test_the_error_of_sdq_is_uniform_in_the_cell(bits):
    # entries of a uniform distribution are at most sqrt(3)/3 in units of the scale, below the edge of 1.33
    defense, update = SDQ(bits=bits), rng.uniform(Key(9), (300_000,), -0.3, 1.0)
    error = scaled_error(defense, update) / defense.lattice.step
    assert np.abs(error).max() < 0.5 + 2**-21 * 2**bits
    assert_distribution(error, stats.uniform(-0.5, 1).cdf)
    assert_uncorrelated(error, update.numpy())
    # the place of an input in its own cell would reveal an undithered error
    assert_uncorrelated(error, (update.numpy() / defense.lattice.step) % 1)


def test_the_error_on_the_lattice_is_uniform_in_both_coordinates_of_the_cell():
    defense, update = LatticeSDQ(bits=4), rng.uniform(Key(10), (600_000,), -0.3, 1.0)
    cells = scaled_error(defense, update).reshape(-1, 2) @ FROM_PAIRS.T / defense.lattice.step
    assert np.abs(cells).max() < 0.5 + 1e-4
    inputs = update.numpy().reshape(2, -1)
    for k in (0, 1):
        assert_distribution(cells[:, k], stats.uniform(-0.5, 1).cdf)
        assert_uncorrelated(cells[:, k], inputs[0])
        assert_uncorrelated(cells[:, k], inputs[1])
    assert_uncorrelated(cells[:, 0], cells[:, 1])


@pytest.mark.parametrize("parameters", [{}, {"s2": 1.0, "nu": 12.0, "scale": "public", "clip": 2.0}])
def test_the_error_of_t_noise_is_bivariate_t(parameters):
    defense, update = TNoise(**parameters), 0.3 * rng.normal(Key(11), (600_000,))
    s2, nu = defense.noise
    header, _ = defense.scaling.normalize(update, setting_of(600_000).layout)
    scale = float(np.frombuffer(header, "<f4")[-1]) if header else 2.0
    error = ((round_trip(defense, update) - update).double().numpy() / scale).reshape(2, -1)
    for row in error:
        assert_distribution(row, lambda z: special.stdtr(nu, z / math.sqrt(s2)))

    def radial(q):
        return 1 - (1 + q / (nu * s2)) ** (-nu / 2)

    assert_distribution((error**2).sum(0), radial)
    # one chi-square for both coordinates: one for each would not do
    assert not follows(error[0] ** 2 + np.roll(error[1], 1) ** 2, radial)


@pytest.mark.parametrize("parameters", [{}, {"epsilon": 3.0, "s2": 0.2, "nu": 12.0, "bits": 1, "scale": "vector"}])
@pytest.mark.matrix
def test_the_error_of_jopeq_with_t_noise_is_reduced_t_plus_uniform_in_both_lattice_coordinates(parameters):
    defense = like_one_bit(JoPEQT(**parameters), bits=10)
    (s2, nu), step = defense.noise, defense.lattice.step
    # in lattice coordinates the reduced scale matrix has twice this on its diagonal
    std = math.sqrt(s2 - (nu - 2) / nu * step**2 / 12)
    norm = math.gamma((nu + 1) / 2) / math.gamma(nu / 2) / math.sqrt(nu * math.pi)

    def integral(t):
        # the antiderivative of t's distribution function
        return t * special.stdtr(nu, t) + nu / (nu - 1) * norm * (1 + t**2 / nu) ** ((1 - nu) / 2)

    def distribution(z):
        return (integral((z + step / 2) / std) - integral((z - step / 2) / std)) * std / step

    update = rng.normal(Key(12), (600_000,))
    pairs = scaled_error(defense, update).reshape(-1, 2)
    cells = pairs @ FROM_PAIRS.T
    for k in (0, 1):
        assert_distribution(cells[:, k], distribution)
    # noise and error together have the covariance that the full t noise would have
    if nu > 8:
        total, sd = s2 * nu / (nu - 2), 3 / math.sqrt(len(pairs))
        assert np.cov(pairs.T) == pytest.approx(total * np.eye(2), abs=5 * sd * total)
    assert_uncorrelated(cells[:, 0], update.numpy()[:300_000])


@pytest.mark.parametrize("kind", [SDQ, LatticeSDQ])
def test_without_the_shared_key_the_error_is_the_difference_of_two_draws_from_the_cell(kind):
    # for inputs that lie anywhere in their cells
    defense, update = kind(bits=6, gamma=3.0), rng.normal(Key(13), (600_000,))
    lanes, step = defense.scaling.lanes, defense.lattice.step
    wire = encode(defense, update)
    scale = float(np.frombuffer(wire[: 4 * (lanes + 1)], "<f4")[-1])
    found = decode(defense, wire, setting_of(len(update)), shared=None)
    error = (found - update).double().numpy().reshape(lanes, -1) / scale
    cells = error if lanes == 1 else FROM_PAIRS @ error
    for row in cells:
        assert_distribution(row, stats.triang(0.5, loc=-step, scale=2 * step).cdf)
    variance = defense.lattice.error_variance(dithered=False)
    assert float((error**2).mean()) == pytest.approx(variance, rel=5 * 1.2 / math.sqrt(300_000))
    assert defense.lattice.error_variance(dithered=True) == pytest.approx(variance / 2)
