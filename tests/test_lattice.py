"""The dithered lattices of JoPEQ: golden values, and the distribution of the error."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from leakgauge import Key, rng
from leakgauge.defenses._jopeq.lattice import Lattice, student_variance
from leakgauge.defenses._jopeq.quantizer import scalar_lattice
from tests.by_rows import by_rows
from tests.oracles import ALPHA, follows

"""False-alarm rate of every statistical test in this file."""

HALF = 5e-11
"""Half a unit of the last printed digit."""


def doubles(*values):
    return torch.tensor(values, dtype=torch.float64)


def draw_dither(key, shape):
    """The dither of a message, as `Lattice.pack` draws it."""
    return rng.uniform32(key, shape, -0.5, 0.5)


def in_lattice(x):
    """G^-1 x, G = [[1, 0], [1/sqrt 3, 2/sqrt 3]]."""
    generator = doubles([1.0, 0.0], [1 / math.sqrt(3), 2 / math.sqrt(3)])
    return torch.linalg.solve(generator, x.double())


@pytest.mark.parametrize("degrees", [2, 1, math.nan])
def test_a_t_distribution_without_variance_is_refused(degrees):
    with pytest.raises(ValueError, match="more than 2 degrees of freedom"):
        student_variance(1.0, degrees)


@by_rows(
    (0.3, 0.0, 0.4, 0.82474487),
    (0.3, 0.25, -0.5, 0.5),
    (-1.0, -0.9, 0.1, -1.32474487),
    (0.9, 2.5, 0.3, 0.92474487),  # clipped
)
def test_a_scalar_decodes_to_its_golden_value(x, noise, dither, decoded):
    lattice = scalar_lattice(1, 4.0, "reference")
    shared = doubles(dither) / lattice.step
    levels = lattice.quantize(doubles(x) + noise, shared)
    assert lattice.restore(levels, shared).item() == pytest.approx(decoded, abs=5e-9)


@by_rows(
    ((0.3, -0.2), (0.1, -0.25), [1, -1], (0.5, -0.1154700538)), ((1.9, 0.4), (0.2, 0.2), [2, -1], (1.0, -0.3464101615))
)
def test_a_pair_decodes_to_its_golden_value(x, dither, index, decoded):
    lattice = Lattice(0.6, 2, dimension=2)
    shared = doubles(*dither)[:, None] / lattice.step
    levels = lattice.quantize(doubles(*x)[:, None], shared)
    assert levels[:, 0].tolist() == index
    assert lattice.restore(levels, shared)[:, 0].tolist() == pytest.approx(decoded, abs=HALF)


def test_the_covariance_of_a_cell_has_its_golden_value():
    lattice = Lattice(0.6, 2, dimension=2)
    assert lattice.edge == pytest.approx(1.2)
    expected = doubles([0.03, 0.0173205081], [0.0173205081, 0.05])
    assert torch.allclose(lattice.covariance, expected, rtol=0, atol=HALF)
    assert Lattice(0.6, 2).covariance.item() == pytest.approx(0.03)


@pytest.mark.parametrize("bits", [1, 2, 3, 4, 8])
def test_there_is_one_level_more_than_the_bits_can_number(bits):
    lattice = Lattice(2.0, bits)
    levels = lattice.quantize(torch.linspace(-1.5 * lattice.edge, 1.5 * lattice.edge, 10_000), torch.zeros(10_000))
    assert levels.unique().tolist() == list(range(-(2 ** (bits - 1)), 2 ** (bits - 1) + 1))
    assert lattice.levels == len(levels.unique()) == 2**bits + 1


@by_rows((7, torch.int8), (8, torch.int16), (15, torch.int16), (16, torch.int32), (31, torch.int32), (32, torch.int64))
def test_the_outermost_levels_fit_their_integer_type(bits, kind):
    lattice = Lattice(1.0, bits)
    levels = lattice.quantize(torch.tensor([-1e20, 1e20]), torch.zeros(2))
    assert levels.dtype == kind
    assert levels.tolist() == [-lattice.top, lattice.top]


@given(
    x=st.lists(st.floats(-1.0, 1.0), min_size=1, max_size=8),
    step=st.floats(1e-3, 10.0),
    dimension=st.sampled_from([1, 2]),
    seed=st.integers(0, 1000),
)
def test_the_error_stays_within_half_a_cell_where_nothing_is_clipped(x, step, dimension, seed):
    x = doubles(*x, *x).reshape(2, -1)[:dimension]
    lattice = Lattice(step, 32, dimension)
    dither = draw_dither(Key(seed), tuple(x.shape)).double()
    error = lattice.restore(lattice.quantize(x, dither), dither) - x
    cells = in_lattice(error) / step if dimension == 2 else error / step
    assert cells.abs().max() <= 0.5 + 1e-12


@pytest.mark.parametrize("dimension", [1, 2])
def test_float32_costs_no_more_than_stated(dimension):
    lattice = Lattice(3 / 65_537, 16, dimension)
    x = rng.uniform(Key(1), (dimension, 100_000), -0.7, 0.7)
    dither = draw_dither(Key(2), tuple(x.shape))
    error = lattice.restore(lattice.quantize(x, dither), dither).double() - x.double()
    cells = in_lattice(error) if dimension == 2 else error
    assert cells.abs().max() <= lattice.step / 2 + 2**-21 * lattice.edge


@pytest.mark.parametrize("dimension", [1, 2])
def test_the_error_is_uniform_on_the_cell_and_independent_of_the_input(dimension):
    # 200,000 draws detect a cell that is 6 % too wide (0.03 in the distribution function; the test detects 0.006)
    lattice = Lattice(0.6, 4, dimension)
    x = 0.3 * rng.normal(Key(3), (dimension, 200_000)) + 0.1
    dither = draw_dither(Key(4), tuple(x.shape))
    error = (lattice.restore(lattice.quantize(x, dither), dither) - x).double()
    cells = (in_lattice(error) if dimension == 2 else error) / lattice.step + 0.5
    for one in cells.numpy():
        assert follows(one, "uniform")
        assert not follows(0.5 + 1.06 * (one - 0.5), "uniform")
        # the place of x in its own cell would reveal an undithered error
        for other in ((in_lattice(x) if dimension == 2 else x) / lattice.step % 1).numpy():
            assert stats.pearsonr(one, other).pvalue > ALPHA
            assert stats.pearsonr(one + 0.06 * other, other).pvalue < ALPHA
    if dimension == 2:
        assert stats.pearsonr(*cells.numpy()).pvalue > ALPHA
    assert torch.allclose(torch.cov(error).reshape(dimension, dimension), lattice.covariance, atol=0.001)


def test_beyond_the_outermost_cell_every_coordinate_is_clipped_by_itself():
    lattice = Lattice(1.0, 2, dimension=2)
    x = torch.tensor([[100.0, 0.0], [0.0, 100.0]])
    zero = torch.zeros(2, 2)
    assert lattice.quantize(x, zero).tolist() == [[2, 0], [-2, 2]]


def test_a_point_is_a_level_without_dither():
    lattice = Lattice(0.6, 2, dimension=2)
    levels = torch.tensor([[1, -2, 0], [-1, 2, 1]], dtype=torch.int8)
    assert torch.equal(lattice.point(levels), lattice.restore(levels, torch.zeros(2, 3)))
    assert lattice.point(levels)[:, 2].tolist() == pytest.approx([0.0, 1.2 / math.sqrt(3)])


@pytest.mark.parametrize("dimension", [1, 2])
def test_no_argument_is_modified(dimension):
    lattice = Lattice(0.6, 2, dimension)
    x, dither = rng.normal(Key(1), (dimension, 9)), draw_dither(Key(2), (dimension, 9))
    before = x.clone(), dither.clone()
    levels = lattice.quantize(x, dither)
    copied = levels.clone()
    lattice.restore(levels, dither)
    lattice.point(levels)
    assert all(map(torch.equal, (x, dither, levels), (*before, copied)))


@by_rows(
    ({"step": 0.0, "bits": 1}, "step > 0, got step=0.0"),
    ({"step": math.inf, "bits": 1}, "step > 0, got step=inf"),
    ({"step": 1.0, "bits": 0}, "1 to 32 bits, got bits=0"),
    ({"step": 1.0, "bits": 33}, "1 to 32 bits, got bits=33"),
    ({"step": 1.0, "bits": 1, "dimension": 3}, "dimension 1 or 2, got dimension=3"),
)
def test_a_lattice_out_of_range_is_refused(parameters, message):
    with pytest.raises(ValueError, match=message):
        Lattice(**parameters)


def test_both_sides_draw_the_same_dither_in_the_cell():
    drawn = draw_dither(Key(5), (2, 1000))
    assert torch.equal(drawn, draw_dither(Key(5), (2, 1000)))
    assert drawn.min() >= -0.5
    assert drawn.max() < 0.5
