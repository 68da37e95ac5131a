"""The MVU channel: golden designs, its constraints to rounding, its optimality where that can be checked, its draws."""

import math

import numpy as np
import pytest
import torch
from scipy import optimize, stats

from leakgauge import Key, rng
from leakgauge.defenses import mvu
from leakgauge.defenses.mvu import Design, design, exact_epsilon, sample
from tests.by_rows import by_rows
from tests.oracles import ALPHA

QUICK = [(0.01, 1, 1), (1.0, 2, 2), (2.0, 3, 2), (4.0, 3, 3), (20.0, 2, 4)]
SMALL = [
    *((epsilon, 1, 1) for epsilon in (1.0, 24.0)),
    *((epsilon, 2, 2) for epsilon in (0.01, 0.5, 4.0, 10.0, 12.0, 20.0)),
    *((1.0, 3, 3), (1.0, 3, 1), (2.0, 1, 2), (1.0, 2, 3), (20.0, 3, 2), (24.0, 4, 4), (10.0, 4, 4)),
]
LARGE = [
    *((epsilon, 3, 3) for epsilon in (0.5, 10.0)),
    *((epsilon, 4, 4) for epsilon in (0.01, 0.5, 1.0, 4.0, 7.0, 12.0)),
    (2.0, 4, 2),
    (15.0, 4, 3),
]
every_design = pytest.mark.parametrize(
    "case",
    [
        *QUICK,
        *(pytest.param(case, marks=pytest.mark.matrix) for case in SMALL),
        *(pytest.param(case, marks=pytest.mark.slow) for case in LARGE),
    ],
    ids=str,
)


@by_rows(  # as printed: closed form for one bit
    (1.0, 0.73105858, (-0.58197671, 1.58197671)),
    (3.0, 0.95257413, (-0.05239570, 1.05239570)),
    (4.0, 0.98201379, (-0.01865736, 1.01865736)),
)
def test_one_bit_is_randomized_response(epsilon, kept, alpha):
    found = design(epsilon, 1, 1)
    channel = np.array([[kept, 1 - kept], [1 - kept, kept]])
    assert np.abs(found.P - channel).max() < 5.1e-9
    assert found.alpha == pytest.approx(alpha, abs=5.1e-9)
    p = math.exp(epsilon) / (1 + math.exp(epsilon))
    assert found.objective == pytest.approx(p * (1 - p) / (2 * p - 1) ** 2, rel=1e-9)


@by_rows(((1.0, 2, 2), 1.031688), ((4.0, 2, 2), 0.024400), ((2.0, 3, 2), 0.220445))
@pytest.mark.matrix
def test_the_objective_is_not_above_the_printed_one(case, printed):
    # printed is where taking turns between channel and values stops; the values did not move at all
    assert design(*case).objective < 0.97 * printed


@every_design
@pytest.mark.matrix
@pytest.mark.ci(2)
def test_every_constraint_holds_to_rounding_and_the_whole_of_epsilon_is_used(case):
    epsilon, bits_in, bits_out = case
    P, alpha = design(*case)
    assert P.shape == (2**bits_in, 2**bits_out)
    assert np.abs(P.sum(1) - 1).max() < 1e-12
    u = np.linspace(0, 1, 2**bits_in)
    assert np.abs(P @ alpha - u).max() < 1e-12 * np.abs(alpha).max()
    assert exact_epsilon(P) <= epsilon + 1e-12
    used = P.max(0) > 0
    assert P[:, used].min() > 1e-7 * math.exp(-epsilon)
    assert used[: used.sum() // 2].all()
    assert used[-used.sum() // 2 :].all()
    assert np.abs(P - P[::-1, ::-1]).max() < 1e-12
    assert np.abs(alpha + alpha[::-1] - 1).max() < 1e-12 * np.abs(alpha).max()
    assert (np.diff(alpha) >= 0).all()
    # in two cases the design for 12 is the best: the rest of the error is rounding to fewer values
    spent = 12 if case in ((20.0, 3, 2), (15.0, 4, 3)) else epsilon
    assert exact_epsilon(P) == pytest.approx(spent, abs=1e-9)


def least_objective(epsilon, levels_in, alpha):
    """The program without simplification: every column, every pair of rows, no symmetry."""
    u, n = np.linspace(0, 1, levels_in), len(alpha)
    pairs = [(i, k) for i in range(levels_in) for k in range(levels_in) if i != k]
    ratio = np.zeros((len(pairs), levels_in))
    for row, (i, k) in enumerate(pairs):
        ratio[row, i], ratio[row, k] = math.exp(-epsilon / 2), -math.exp(epsilon / 2)
    solved = optimize.linprog(
        ((u[:, None] - alpha) ** 2).ravel() / levels_in,
        A_ub=np.kron(ratio, np.eye(n)),
        b_ub=np.zeros(len(pairs) * n),
        A_eq=np.concatenate([np.kron(np.eye(levels_in), np.ones(n)), np.kron(np.eye(levels_in), alpha)]),
        b_eq=np.concatenate([np.ones(levels_in), u]),
        bounds=(0, 1),
        method="highs",
        options={"primal_feasibility_tolerance": 1e-10, "dual_feasibility_tolerance": 1e-10},
    )
    return solved.fun if solved.status == 0 else math.inf


@pytest.mark.parametrize("case", [(1.0, 2, 2), (0.5, 2, 2), (4.0, 3, 3), (1.0, 3, 3), (2.0, 3, 2), (4.0, 2, 2)])
@pytest.mark.table(2)
def test_no_channel_with_these_values_errs_less(case):
    found = design(*case)
    assert found.objective == pytest.approx(least_objective(case[0], 2 ** case[1], found.alpha), rel=1e-6)


@by_rows((1.0, 15), *(pytest.param(e, 40, marks=pytest.mark.slow) for e in (0.5, 2.0, 4.0)))
def test_no_values_on_a_grid_err_less(epsilon, points):
    floor = 1 / math.expm1(epsilon)
    outer, inner = -floor * np.linspace(1.02, 3, points), np.append(np.linspace(-2 * floor, 0.45, points), 0.5)
    grid = [least_objective(epsilon, 4, np.array([a, b, 1 - b, 1 - a])) for a in outer for b in inner if a < b]
    # the minimum is a sharp one: between the points there may be 4 % less
    assert 0.96 * min(grid) < design(epsilon, 2, 2).objective < min(grid)


@by_rows(((1.0, 2, 2), 0.28), ((4.0, 2, 2), 0.0), ((4.0, 3, 3), 0.19), ((1.0, 3, 3), 0.7), ((2.0, 3, 2), 0.1))
@pytest.mark.table(2)
def test_it_errs_no_more_than_rounding_and_randomized_response(case, gain):
    epsilon, bits_in, bits_out = case
    simple = mvu._rounded_response(epsilon, 2**bits_in, 2**bits_out)
    assert np.abs(simple.P @ simple.alpha - np.linspace(0, 1, 2**bits_in)).max() < 1e-14
    assert exact_epsilon(simple.P) == pytest.approx(epsilon, abs=1e-12)
    assert design(*case).objective <= (1 - gain) * simple.objective


def test_the_objective_is_the_added_variance_and_more_privacy_or_fewer_columns_cost_more():
    by_epsilon = [design(epsilon, 2, 2).objective for epsilon in (1.0, 4.0, 12.0, 20.0)]
    assert by_epsilon == sorted(by_epsilon, reverse=True)
    assert design(2.0, 2, 1).objective > design(2.0, 3, 2).objective
    assert design(1.0, 2, 1).objective > design(1.0, 2, 2).objective
    channel = Design(np.array([[0.75, 0.25], [0.25, 0.75]]), np.array([-0.5, 1.5]))
    assert channel.objective == pytest.approx(0.75)


def test_the_repair_meets_the_constraints_after_an_inexact_solution():
    # a solution that is off by 1e-5 in every entry and has a crossed pair and an unused column
    epsilon = 2.0
    rough = mvu._rounded_response(epsilon, 4, 4)
    lower, channel = rough.alpha[:2].copy(), rough.P[:2] + 1e-5 * rng.normal(Key(2), (2, 4)).double().numpy()
    crossed = mvu._repair(epsilon, np.array([lower[0], 1 - lower[1]]), channel[:, [0, 2, 1, 3]])
    plain = mvu._repair(epsilon, lower, channel)
    assert np.allclose(crossed.P, plain.P, atol=1e-15)
    assert np.allclose(crossed.alpha, plain.alpha, atol=1e-15)
    wide = mvu._repair(epsilon, np.append(lower, 0.5), np.insert(channel, [2, 2], 1e-9, axis=1))
    assert np.all(wide.P[:, 2:4] == 0)
    for found in (plain, wide):
        assert exact_epsilon(found.P) <= epsilon + 1e-12
        assert np.abs(found.P.sum(1) - 1).max() < 1e-12
        assert np.abs(found.P @ found.alpha - np.linspace(0, 1, 4)).max() < 1e-12
        assert found.objective == pytest.approx(rough.objective, rel=1e-3)


def test_equal_arguments_give_the_same_arrays_which_cannot_be_written():
    found = design(12.0, 2, 2)
    assert design(12.0, 2, 2) is found
    again = design.__wrapped__(12.0, 2, 2)
    assert np.array_equal(again.P, found.P)
    assert np.array_equal(again.alpha, found.alpha)
    with pytest.raises(ValueError, match="read-only"):
        found.P[0, 0] = 0


def test_the_exact_epsilon_is_the_largest_log_ratio_of_two_rows():
    P = rng.uniform(Key(1), (5, 7), 0.01, 1.0, torch.float64).numpy()
    P /= P.sum(1, keepdims=True)
    direct = max(math.log(P[i, j] / P[k, j]) for i in range(5) for k in range(5) for j in range(7))
    assert exact_epsilon(P) == pytest.approx(direct, rel=1e-14)
    assert exact_epsilon(np.full((3, 2), 0.5)) == 0
    assert exact_epsilon(np.array([[0.2, 0.0, 0.8], [0.4, 0.0, 0.6]])) == pytest.approx(math.log(2))
    assert exact_epsilon(np.array([[0.2, 0.1, 0.7], [0.4, 0.0, 0.6]])) == math.inf


def test_a_column_is_the_inverse_distribution_function_of_its_rows_uniform_number():
    P = design(4.0, 3, 3).P
    rows = rng.integers(Key(1), 5000, 8)
    columns = sample(P, rows, Key(2))
    u = rng.uniform(Key(2), (5000,), dtype=torch.float64).numpy()
    assert columns.dtype == np.int64
    assert np.array_equal(columns, [int((x >= np.cumsum(P[row])[:-1]).sum()) for row, x in zip(rows, u, strict=True)])
    assert np.array_equal(columns, sample(P, rows, Key(2)))
    assert not np.array_equal(columns, sample(P, rows, Key(3)))
    assert sample(P, rows[:0], Key(2)).shape == (0,)


def pvalue(P, columns, rows):
    """The p-value of the hypothesis that each column was drawn from its row of P."""
    seen = np.zeros(P.shape)
    np.add.at(seen, (rows, columns), 1)
    expected = P * np.bincount(rows, minlength=len(P))[:, None]
    statistic = ((seen - expected) ** 2 / expected).sum()
    return stats.chi2.sf(statistic, len(P) * (P.shape[1] - 1))


@pytest.mark.parametrize("epsilon", [1.0, 4.0])
def test_columns_have_the_probabilities_of_the_design(epsilon):
    # false alarm 1e-6; 500,000 draws reject a column that is 6 % too frequent with the same certainty (the twin)
    P, alpha = design(epsilon, 2, 2)
    rows = np.arange(500_000) % 4
    columns = sample(P, rows, Key(11))
    assert pvalue(P, columns, rows) > ALPHA
    off = P * np.array([1.06, 1.0, 1.0, 1.0])
    assert pvalue(P, sample(off / off.sum(1, keepdims=True), rows, Key(11)), rows) < ALPHA
    # unbiased: 125,000 draws a row, 5.5 standard deviations (false alarm 4e-8 a row)
    for row, u in enumerate((0, 1 / 3, 2 / 3, 1)):
        read = alpha[columns[rows == row]]
        assert abs(read.mean() - u) < 5.5 * read.std() / math.sqrt(len(read))


def test_a_column_of_probability_zero_is_never_drawn():
    found = design(20.0, 2, 4)
    assert np.array_equal(np.flatnonzero(found.P.max(0)), [0, 1, 14, 15])
    assert set(sample(found.P, np.arange(100_000) % 4, Key(1))) <= {0, 1, 14, 15}
    assert sample(np.array([[1.0, 0.0], [0.0, 1.0]]), np.array([0, 1, 1, 0]), Key(1)).tolist() == [0, 1, 1, 0]


@by_rows(
    (lambda: design(0.0, 1, 1), r"expected 0.01 <= epsilon <= 24, got epsilon=0.0"),
    (lambda: design(math.nan, 1, 1), "got epsilon=nan"),
    (lambda: design(30.0, 1, 1), "got epsilon=30.0"),
    (lambda: design(1.0, 0, 1), "expected bits_in between 1 and 4, got bits_in=0"),
    (lambda: design(1.0, 1, 5), "expected bits_out between 1 and 4, got bits_out=5"),
    (lambda: sample(np.eye(2), np.array([0, 2]), Key(1)), r"expected rows in 0..1, got 0..2"),
    (lambda: sample(np.eye(2), np.array([-1, 1]), Key(1)), r"expected rows in 0..1, got -1..1"),
)
def test_arguments_out_of_range_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
