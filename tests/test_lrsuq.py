import math

import numpy as np
import pytest
import torch
from scipy import stats

from leakgauge.defenses._cepam import lrsuq as _lrsuq
from leakgauge.defenses._cepam.lrsuq import decode, encode, encode_with, gaussian_radii, laplace_radii, place
from leakgauge.harness.core import rng
from leakgauge.harness.core.rng import Key

ALPHA = 1e-6
"""False-alarm rate of every statistical test in this file."""

N = 200_000
"""Sub-vectors. Kolmogorov-Smirnov at ALPHA sees 0.006; an error scale off by 6 % moves a Gaussian or Laplace law by
0.011 or more, where the standard error is 0.0009: the miss rate is under 1e-6."""

RADII, DITHERS = Key(2).child("radii"), Key(2).child("dithers")
SHIFT = np.array([0.07, 0.2, -0.4])

every_n = pytest.mark.parametrize("n", [1, 2, 3])


def inputs(n, count=N):
    return 0.3 * rng.normal(Key(1), (count, n), torch.float64).numpy() + SHIFT[:n]


def quantized(n, sigma=0.1, count=N):
    x = inputs(n, count)
    radii = gaussian_radii(RADII, count, n, sigma)
    encoded = encode(x, radii, DITHERS)
    return x, radii, encoded, decode(*encoded, radii, DITHERS)


@pytest.mark.parametrize(
    ("x", "r", "dithers", "attempts", "cells", "y"),
    [
        ((0.37,), 0.1, [(0.2,)], 1, (2,), (0.44,)),
        ((0.37,), 0.1, [(-0.49,)], 1, (2,), (0.302,)),
        ((0.25, -0.1), 0.15, [(0.3, 0.2), (0.4, 0.45)], 2, (0, -1), (0.12, -0.165)),
        ((0.2, 0.1, -0.3), 0.2, [(0.45, 0.45, 0.2)], 1, (0, 0, -1), (0.18, 0.18, -0.32)),
    ],
)
def test_explicit_dithers_give_the_golden_values(x, r, dithers, attempts, cells, y):
    # worked by hand from the definition, M = ceil(x / 2r - v - 1/2)
    radii = np.array([r])
    listed = np.array(dithers)
    encoded = encode_with(np.array([x]), radii, lambda attempt, rows, n: listed[attempt - 1][None])
    assert encoded.attempts.tolist() == [attempts]
    assert encoded.cells.tolist() == [list(cells)]
    assert place(encoded.cells, radii, listed[[attempts - 1]])[0].tolist() == pytest.approx(y, abs=1e-12)


@every_n
def test_the_error_of_gaussian_radii_is_gaussian(n):
    x, _, _, y = quantized(n)
    z = (y - x) / 0.1
    for one in z.T:
        assert stats.kstest(one, "norm").pvalue > ALPHA
        assert stats.kstest(1.06 * one, "norm").pvalue < ALPHA
    norm2 = (z**2).sum(1)
    assert stats.kstest(norm2, stats.chi2(n).cdf).pvalue > ALPHA
    assert stats.kstest(1.06**2 * norm2, stats.chi2(n).cdf).pvalue < ALPHA


def test_the_error_of_laplace_radii_is_laplace():
    x = inputs(1)
    radii = laplace_radii(RADII, N, 0.1)
    z = ((decode(*encode(x, radii, DITHERS), radii, DITHERS) - x) / 0.1)[:, 0]
    assert stats.kstest(z, "laplace").pvalue > ALPHA
    assert stats.kstest(1.06 * z, "laplace").pvalue < ALPHA


@every_n
def test_decoder_and_encoder_agree_on_every_sub_vector(n):
    x, radii, _, y = quantized(n)
    # x is up to 20 cells of 0.01 off, of which float64 rounds 1e-14
    distance = np.sqrt(((y - x) ** 2).sum(1)) / radii
    assert distance.max() <= 1 + 1e-10
    # the volume within is uniform, so that the bound is no accident of a smaller ball
    assert stats.kstest(distance**n, "uniform").pvalue > ALPHA
    assert stats.kstest(0.94 * distance**n, "uniform").pvalue < ALPHA


@every_n
def test_a_server_with_another_key_is_a_cell_off(n):
    x, radii, encoded, _ = quantized(n, count=1000)
    wrong = decode(*encoded, radii, DITHERS.child("other"))
    assert (np.sqrt(((wrong - x) ** 2).sum(1)) > radii).mean() > 0.1


@every_n
def test_the_error_does_not_depend_on_the_input(n):
    x, radii, _, y = quantized(n)
    place_in_cell = x / (2 * radii[:, None]) % 1
    for error in (y - x).T:
        for other in (*x.T, *place_in_cell.T):
            assert stats.pearsonr(error, other).pvalue > ALPHA
            assert stats.pearsonr(error / error.std() + 0.06 * other / other.std(), other).pvalue < ALPHA


@pytest.mark.parametrize(("n", "mean"), [(2, 1.273240), (3, 1.909859)])
def test_the_number_of_attempts_is_geometric(n, mean):
    attempts = quantized(n)[2].attempts
    # variance (1 - p) / p^2 = m (m - 1): a mean off by 6 % is 38 standard errors or more away
    error = math.sqrt(mean * (mean - 1) / N)
    sees = stats.norm.isf(ALPHA / 2) * error
    assert abs(attempts.mean() - mean) < sees
    assert abs(attempts.mean() - 1.06 * mean) > sees
    assert stats.binomtest(int((attempts == 1).sum()), N, 1 / mean).pvalue > ALPHA
    assert attempts.min() == 1


def test_one_dimension_never_rejects():
    _, _, encoded, _ = quantized(1)
    assert (encoded.attempts == 1).all()


def printed_algorithm(x, radii, tries):
    """Errors of the sub-vectors accepted by |2r M - x| <= r, and the share of those that `tries` dithers leave open."""
    errors, rows = [], np.arange(len(x))
    beta = 2 * radii[:, None]
    for attempt in range(tries):
        dither = _lrsuq._dithers(Key(7), attempt, rows, x.shape[1])
        cells = np.ceil(x[rows] / beta[rows] - dither - 0.5)
        accepted = np.linalg.norm(beta[rows] * cells - x[rows], axis=1) <= radii[rows]
        errors.append((beta[rows] * (cells + dither) - x[rows])[accepted])
        rows = rows[~accepted]
    return np.concatenate(errors), len(rows) / len(x)


@pytest.mark.parametrize(("n", "left"), [(1, 0.0), (2, 0.2862), (3, 0.6414)])
def test_the_printed_acceptance_test_is_biased_and_does_not_end(n, left):
    # an independent script found these shares among 200,000; 6 standard errors, there and of 50,000 here, are 0.014
    x = np.tile([[0.23, 0.11, -0.07]], (50_000, 1))[:, :n]
    errors, still_open = printed_algorithm(x, gaussian_radii(RADII, len(x), n, 0.1), 200)
    assert still_open == pytest.approx(left, abs=0.015)
    assert stats.kstest(errors[:, 0] / 0.1, "norm").pvalue < ALPHA
    if n == 1:
        # standard errors 0.0004 and 0.003
        assert errors.mean() == pytest.approx(0.0105, abs=0.003)
        assert errors.std() / 0.1 == pytest.approx(0.9173, abs=0.02)


def test_a_sub_vector_depends_on_its_own_message_alone():
    _, radii, encoded, y = quantized(3, count=1000)
    attempts, cells = encoded.attempts.copy(), encoded.cells.copy()
    attempts[5] += 3
    cells[6] += 1
    changed = (decode(attempts, cells, radii, DITHERS) != y).any(axis=1)
    assert np.flatnonzero(changed).tolist() == [5, 6]


@every_n
def test_the_size_of_a_block_changes_nothing(n, monkeypatch):
    x, radii, encoded, _ = quantized(n, count=1000)
    monkeypatch.setattr(_lrsuq, "_BLOCK", 77)
    again = encode(x, radii, DITHERS)
    assert np.array_equal(again.attempts, encoded.attempts)
    assert np.array_equal(again.cells, encoded.cells)


@every_n
def test_the_order_in_memory_changes_nothing(n):
    x, radii, encoded, _ = quantized(n, count=1000)
    before = x.copy()
    other = encode(np.asfortranarray(x), radii, DITHERS)
    assert np.array_equal(other.attempts, encoded.attempts)
    assert np.array_equal(other.cells, encoded.cells)
    assert np.array_equal(x, before)


@every_n
def test_no_sub_vectors_encode_to_nothing(n):
    empty = encode(np.empty((0, n)), np.empty(0), DITHERS)
    assert empty.cells.shape == (0, n)
    assert decode(*empty, np.empty(0), DITHERS).shape == (0, n)


@every_n
@pytest.mark.parametrize(("bad", "radius"), [(math.nan, 0.1), (math.inf, 0.1), (1e15, 0.1), (1.0, 0.0), (0.0, -1.0)])
def test_what_would_never_be_accepted_is_refused(n, bad, radius):
    x, radii = np.zeros((4, n)), np.full(4, 0.1)
    x[2, -1], radii[2] = bad, radius
    with pytest.raises(ValueError, match=r"finite x within 2\^40 cells of 0 and radii > 0"):
        encode(x, radii, DITHERS)
