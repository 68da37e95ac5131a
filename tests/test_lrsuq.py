"""CEPAM's layered quantizer: the error on its ball, the number of attempts, and the printed variant.

The distribution of the error is tested on bytes, in test_cepam.py.
"""

import math
from functools import partial

import numpy as np
import pytest
import torch
from scipy import stats

from leakgauge import Key, rng
from leakgauge.defenses._cepam.wire import dithers, encode, gaussian_radii, pack, place, unpack
from tests.by_rows import by_rows
from tests.cepam_case import every_n
from tests.oracles import ALPHA, follows

"""False-alarm rate of every statistical test in this file."""

N = 200_000
"""Sub-vectors. Kolmogorov-Smirnov at ALPHA detects a distance of 0.006."""

RADII, DITHERS = Key(2).child("radii"), Key(2).child("dithers")
SHIFT = np.array([0.07, 0.2, -0.4])


def inputs(n, count=N, sigma=0.1):
    x = 0.3 * rng.normal(Key(1), (count, n), torch.float64).numpy() + SHIFT[:n]
    return x, gaussian_radii(RADII, count, n, sigma)


@by_rows(
    ((0.37,), 0.1, [(0.2,)], 1, (2,), (0.44,)),
    ((0.37,), 0.1, [(-0.49,)], 1, (2,), (0.302,)),
    ((0.25, -0.1), 0.15, [(0.3, 0.2), (0.4, 0.45)], 2, (0, -1), (0.12, -0.165)),
    ((0.2, 0.1, -0.3), 0.2, [(0.45, 0.45, 0.2)], 1, (0, 0, -1), (0.18, 0.18, -0.32)),
)
def test_explicit_dithers_give_the_golden_values(x, r, given, attempts, cells, y):
    # worked by hand from the definition, M = ceil(x / 2r - v - 1/2)
    radii, listed = np.array([r]), np.array(given)
    encoded = encode(np.array([x]), radii, lambda attempt, rows, n: listed[attempt - 1][None])
    assert encoded.attempts.tolist() == [attempts]
    assert encoded.cells.tolist() == [list(cells)]
    assert place(encoded.cells, radii, listed[[attempts - 1]])[0].tolist() == pytest.approx(y, abs=1e-12)


@every_n
def test_the_error_is_uniform_on_its_ball_and_does_not_depend_on_the_input(n):
    x, radii = inputs(n)
    y = unpack(pack(x, radii, 0.3, DITHERS), radii, 0.3, DITHERS, n)
    # x is up to 20 cells of 0.01 off; float64 rounds 1e-14 of that
    distance = np.sqrt(((y - x) ** 2).sum(1)) / radii
    assert distance.max() <= 1 + 1e-10
    # the volume within is uniform, so that the bound is no accident of a smaller ball
    assert follows(distance**n, "uniform")
    assert not follows(0.94 * distance**n, "uniform")
    place_in_cell = x / (2 * radii[:, None]) % 1
    for error in (y - x).T:
        for other in (*x.T, *place_in_cell.T):
            assert stats.pearsonr(error, other).pvalue > ALPHA
            assert stats.pearsonr(error / error.std() + 0.06 * other / other.std(), other).pvalue < ALPHA


@pytest.mark.parametrize(("n", "mean"), [(1, 1.0), (2, 1.273240), (3, 1.909859)])
def test_the_number_of_attempts_is_geometric(n, mean):
    attempts = encode(*inputs(n), partial(dithers, DITHERS)).attempts
    assert attempts.min() == 1
    # variance (1 - p) / p^2 = m (m - 1): a mean off by 6 % is 38 standard errors or more away
    detects = stats.norm.isf(ALPHA / 2) * math.sqrt(mean * (mean - 1) / N)
    assert abs(attempts.mean() - mean) <= detects < abs(attempts.mean() - 1.06 * mean)
    assert stats.binomtest(int((attempts == 1).sum()), N, 1 / mean).pvalue > ALPHA


def printed_algorithm(x, radii, tries):
    """Errors of the sub-vectors accepted by |2r M - x| <= r, and the share of those that `tries` dithers leave open."""
    errors, rows = [], np.arange(len(x))
    beta = 2 * radii[:, None]
    for attempt in range(tries):
        dither = dithers(Key(7), attempt, rows, x.shape[1])
        cells = np.ceil(x[rows] / beta[rows] - dither - 0.5)
        accepted = np.linalg.norm(beta[rows] * cells - x[rows], axis=1) <= radii[rows]
        errors.append((beta[rows] * (cells + dither) - x[rows])[accepted])
        rows = rows[~accepted]
    return np.concatenate(errors), len(rows) / len(x)


@pytest.mark.parametrize(("n", "left"), [(1, 0.0), (2, 0.2862), (3, 0.6414)])
@pytest.mark.matrix
def test_the_printed_acceptance_test_is_biased_and_does_not_end(n, left):
    # an independent script found these shares among 200,000; 6 standard errors, there and of 50,000 here, are 0.014
    x = np.tile([[0.23, 0.11, -0.07]], (50_000, 1))[:, :n]
    errors, still_open = printed_algorithm(x, gaussian_radii(RADII, len(x), n, 0.1), 200)
    assert still_open == pytest.approx(left, abs=0.015)
    assert not follows(errors[:, 0] / 0.1, "norm")
    if n == 1:
        # standard errors 0.0004 and 0.003
        assert errors.mean() == pytest.approx(0.0105, abs=0.003)
        assert errors.std() / 0.1 == pytest.approx(0.9173, abs=0.02)


@every_n
def test_the_order_in_memory_changes_nothing(n):
    x, radii = inputs(n, count=1000)
    before = x.copy()
    plain, other = (encode(given, radii, partial(dithers, DITHERS)) for given in (x, np.asfortranarray(x)))
    assert all(map(np.array_equal, plain, other))
    assert np.array_equal(x, before)


@every_n
@pytest.mark.parametrize(("bad", "radius"), [(math.nan, 0.1), (math.inf, 0.1), (1e15, 0.1), (1.0, 0.0), (0.0, -1.0)])
def test_what_would_never_be_accepted_is_refused(n, bad, radius):
    x, radii = np.zeros((4, n)), np.full(4, 0.1)
    x[2, -1], radii[2] = bad, radius
    with pytest.raises(ValueError, match=r"finite x within 2\^40 cells of 0 and radii > 0"):
        pack(x, radii, 1.0, DITHERS)
