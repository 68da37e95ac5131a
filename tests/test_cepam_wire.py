"""CEPAM's code of cells and attempts: both sides agree, and a message is as short as its entropy allows."""

import dataclasses
import math
from functools import partial

import numpy as np
import pytest
import torch
from scipy import stats
from scipy.special import ndtr

from leakgauge import Key, MessageError, rng
from leakgauge.defenses._cepam import wire as _cepam_wire
from leakgauge.defenses._cepam.golomb import encode_integers
from leakgauge.defenses._cepam.wire import (
    attempt_contexts,
    cell_contexts,
    dithers,
    encode,
    gaussian_radii,
    pack,
    place,
    unpack,
)
from leakgauge.defenses.cepam_gaussian import CepamGaussian
from tests import cepam_case
from tests.by_rows import by_rows
from tests.cepam_case import every_n


def quantized(n, count, sigma, spread=1.0):
    x = spread * rng.normal(Key(1), (n, count), torch.float64).numpy().T
    return x, gaussian_radii(Key(2), count, n, sigma)


@every_n
@pytest.mark.parametrize("sigma", [0.01, 1.0, 30.0])
def test_server_and_client_agree_on_every_coordinate(n, sigma):
    for count in (1, 63, 64, 65, 1000, 70_000):
        x, radii = quantized(n, count, sigma)
        accepted = np.empty((n, count)).T

        def remember(attempt, rows, n, accepted=accepted):
            accepted[rows] = drawn = dithers(Key(3), attempt, rows, n)
            return drawn

        encoded = encode(x, radii, remember)
        y = unpack(pack(x, radii, 1.0, Key(3)), radii, 1.0, Key(3), n)
        assert np.array_equal(y, place(encoded.cells, radii, accepted))
        assert (np.sqrt(((y - x) ** 2).sum(1)) <= radii * (1 + 1e-10)).all()


@every_n
def test_the_cuts_of_the_work_change_nothing(n, monkeypatch):
    x, radii = quantized(n, 4000, 0.1)
    wire, y = pack(x, radii, 1.0, Key(3)), unpack(pack(x, radii, 1.0, Key(3)), radii, 1.0, Key(3), n)
    monkeypatch.setattr(_cepam_wire, "_BLOCK", 77)
    monkeypatch.setattr(_cepam_wire, "_BLOCK", 30)
    assert pack(x, radii, 1.0, Key(3)) == wire
    assert np.array_equal(unpack(wire, radii, 1.0, Key(3), n), y)
    monkeypatch.setattr(_cepam_wire, "_MANY", 1)
    limited = pack(x, radii, 1.0, Key(3))
    assert limited != wire
    assert np.array_equal(unpack(limited, radii, 1.0, Key(3), n), y)


@every_n
def test_each_part_of_a_message_has_its_own_dithers(n, monkeypatch):
    x, radii = quantized(n, 4000, 0.1)
    whole = pack(x, radii, 1.0, Key(3))
    monkeypatch.setattr(_cepam_wire, "_SINGLE_PART", 300)
    monkeypatch.setattr(_cepam_wire, "_PART", 300)
    wire = pack(x, radii, 1.0, Key(3))
    assert wire != whole
    y = unpack(wire, radii, 1.0, Key(3), n)
    assert (np.sqrt(((y - x) ** 2).sum(1)) <= radii * (1 + 1e-10)).all()
    drawn = dithers(Key(3), 1, np.arange(4000), n)
    assert len(np.unique(drawn)) == drawn.size
    # the second attempt of two parts, the first of which has nothing open
    late = dithers(Key(3), 2, np.array([301, 302, 650]), n)
    assert np.array_equal(late[2:], dithers(Key(3), 2, np.array([600]), n))
    assert len(np.unique(late)) == late.size


def test_an_attempt_that_no_honest_client_needs_is_refused():
    x, radii = quantized(3, 40, 1.0)
    wire = bytearray(pack(x, radii, 1.0, Key(3)))
    # fewer than 64 sub-vectors: after the empty part of far cells, all attempts are in the next part
    attempts = encode(x, radii, partial(dithers, Key(3))).attempts
    part = encode_integers(attempts - 1, np.zeros(40, np.uint8))
    assert wire[1 : 2 + len(part)] == bytes([len(part)]) + part
    attempts[7] = 202
    longer = encode_integers(attempts - 1, np.zeros(40, np.uint8))
    forged = wire[:1] + bytes([len(longer)]) + longer + wire[2 + len(part) :]
    with pytest.raises(MessageError, match=r"expected accepted attempts of 1..201, got 1..202"):
        unpack(bytes(forged), radii, 1.0, Key(3), 3)


@every_n
@pytest.mark.parametrize("spread", [1e-30, 0.01, 100.0, 1e30])
def test_another_spread_costs_bits_but_loses_nothing(n, spread):
    x, radii = quantized(n, 5000, 3.0)
    wire, right = pack(x, radii, spread, Key(3)), pack(x, radii, 1.0, Key(3))
    assert np.array_equal(unpack(wire, radii, spread, Key(3), n), unpack(right, radii, 1.0, Key(3), n))
    assert len(wire) > 1.1 * len(right)


def test_contexts_are_where_the_dither_and_the_radius_put_them():
    # cells of width 2r = 6 spreads: 0, 0.48, 1.5, 1.5 and 3 spreads from the edge, all half-octaves apart
    fine, wide = np.array([0.2]), np.array([3.0])
    edges = [cell_contexts(np.array([[v]]), wide, 1.0).item() for v in (0.5, 0.42, 0.25, -0.25, 0.0)]
    assert edges[2] == edges[3]
    assert len(set(edges)) == 4
    assert len({cell_contexts(np.array([[v]]), fine, 1.0).item() for v in (0.5, 0.25, 0.0)}) == 1
    # 1.2 and 0.05 spreads inside the ball, 0.05 and 1.2 outside
    around = np.array([[0.0, 0.3], [0.39, 0.3], [0.41, 0.3], [0.5, -0.5]])
    assert len(set(attempt_contexts(around, np.full(4, 3.0), 1.0).tolist())) == 4
    assert not attempt_contexts(around, np.full(4, 0.2), 1.0).any()


def radii_and_weights(n):
    """Radii in sigmas, and the chances of a quadrature over their distribution."""
    at, weight = np.polynomial.legendre.leggauss(60)
    radius = 0.01 + 8.99 * (at + 1) / 2
    return radius, weight * 8.99 / 2 * stats.chi.pdf(radius, n + 2)


def ball(n, nodes):
    """Nodes [n, Q] and weights [Q] of the mean over a disc or a ball of radius 1/2."""
    at, weight = np.polynomial.legendre.leggauss(nodes)
    turn = 2 * np.pi * (np.arange(2 * nodes) + 0.5) / (2 * nodes)
    height = at if n == 3 else np.zeros(1)
    flat = weight / 2 if n == 3 else np.ones(1)
    r, z, angle = (part.ravel() for part in np.meshgrid(((at + 1) / 2) ** (1 / n) / 2, height, turn, indexing="ij"))
    level = np.sqrt(1 - z**2)
    w = (weight[:, None, None] / 2 * flat[:, None] * np.ones(len(turn)) / len(turn)).ravel()
    return np.stack([r * level * np.cos(angle), r * level * np.sin(angle), r * z])[:n], w


def entropy(p):
    return -(p * np.log2(np.maximum(p, 1e-300))).sum()


def cells_entropy(n, sigma, deviation):
    """H(M | U) in bits a sub-vector: M rounds x + e in cells, e uniform in the ball, and given e it has n parts.

    For n > 1, cells of less than 0.6 deviations are left out, and it is too low by less than 1e-4.
    """
    found = 0.0
    for u, chance in zip(*radii_and_weights(n), strict=True):
        cell = 2 * sigma * u / deviation
        k = np.arange(-math.ceil(7 / cell) - 1, math.ceil(7 / cell) + 2)
        if n == 1:  # the mean of max(0, 1 - |x / cell - k|): a second difference of the mean of max(0, a - x)
            a = cell * np.arange(k[0] - 1, k[-1] + 2)
            found += chance * entropy(np.diff(a * ndtr(a) + stats.norm.pdf(a), 2) / cell)
        elif cell > 0.6:
            e, weight = ball(n, 20 if cell > 8 else 10)  # doubled, they change the fourth digit
            first, second, *third = (
                ndtr((k + 0.5 - c[:, None]) * cell) - ndtr((k - 0.5 - c[:, None]) * cell) for c in e
            )
            rest = (second[..., None] * third[0][:, None]).reshape(len(weight), -1) if third else second
            found += chance * entropy((weight[:, None] * first).T @ rest)
    return found


def cells_entropy_given_dithers(sigma, deviation):
    """H(M | U, V) in bits for n = 1."""
    v, found = (np.arange(2000) + 0.5) / 2000 - 0.5, 0.0
    for u, chance in zip(*radii_and_weights(1), strict=True):
        cell = 2 * sigma * u / deviation
        k = np.arange(-math.ceil(7 / cell) - 1, math.ceil(7 / cell) + 2)[:, None]
        found += chance * entropy(ndtr((k + v + 0.5) * cell) - ndtr((k + v - 0.5) * cell)) / len(v)
    return found


M = 25_818
DEVIATION = 1 / math.sqrt(M)

# As printed for CEPAM at gamma = 1: bits a coordinate of the fixed-length code given U, and bits a sub-vector of H
FIXED = {(1, 0.1): 3.630, (2, 0.1): 3.573, (3, 0.1): 3.333, (1, 0.01): 6.663, (2, 0.01): 6.411, (3, 0.01): 6.207}
GEOMETRIC = {1: 0.0, 2: 0.955168, 3: 1.906789}


def rate(defense, d, updates, gamma):
    """Bits a coordinate, header included, of updates whose coordinates are as large as those of norm 1 in M."""
    defense = dataclasses.replace(defense, gamma=gamma)
    bits = [8 * len(cepam_case.encode(defense, rng.normal(Key(i), (d,)))) for i in range(updates)]
    return float(np.mean(bits)) / d


@by_rows((0.1, 0.154, 0.078), (0.01, 0.843, 0.321), (0.001, 3.174, 0.673))
def test_the_entropy_of_cells_is_the_printed_one_up_to_the_noise_of_its_400_radii(sigma, printed, spread):
    # 5 standard errors of a mean over radii, where the entropy has this spread, and half a unit of the last digit
    assert cells_entropy(1, sigma, DEVIATION) == pytest.approx(printed, abs=5 * spread / 400**0.5 + 0.0005)


@pytest.mark.parametrize(("n", "sigma"), list(FIXED))
@pytest.mark.table(2)
def test_a_message_is_shorter_than_in_fixed_lengths_and_than_attempts_and_cells_given_radii(n, sigma):
    # 4 messages of a real model, with all that a short message pays for its contexts; a standard error of 1 %
    bits = rate(CepamGaussian(noise_std=sigma, dimension=n), M, 4, 1.0)
    given_radii = (GEOMETRIC[n] + cells_entropy(n, sigma, DEVIATION)) / n
    assert bits < (0.9 if sigma == 0.01 else 0.6) * given_radii < 1.02 * FIXED[n, sigma]


def test_fine_cells_take_at_most_two_percent_more_than_their_entropy():
    assert rate(CepamGaussian(noise_std=0.001), M, 4, 1.0) < 1.02 * cells_entropy(1, 0.001, DEVIATION)


@by_rows((0.1, 1.06), (0.01, 1.04), pytest.param(0.001, 1.02, marks=pytest.mark.matrix))
def test_a_long_message_takes_little_more_than_the_entropy_given_radii_and_dithers(sigma, excess):
    # a million coordinates: standard errors of 0.5 %, 0.15 % and 0.04 %
    d, bound = 1_000_000, cells_entropy_given_dithers(sigma, DEVIATION)
    assert bound < rate(CepamGaussian(noise_std=sigma), d, 1, math.sqrt(d / M)) < excess * bound
    # a code that ignores the dithers fails, except for cells so fine that the dithers are uninformative
    assert (cells_entropy(1, sigma, DEVIATION) > excess * bound) == (sigma > 0.001)


@every_n
@pytest.mark.parametrize(("d", "sigma"), [(M, 0.1), (M, 0.01), (M, 1e-7), (70_000, 0.01), (70_000, 1e-7)])
def test_all_of_an_update_in_one_coordinate_is_decoded_and_short(n, d, sigma):
    update = torch.zeros(d)
    update[d // 2] = -5.0
    defense = CepamGaussian(noise_std=sigma, dimension=n)
    wire = cepam_case.encode(defense, update)
    error = (cepam_case.decode(defense, wire, d) - update).abs()
    # the largest of d normal errors; a float32 near 5 is good to 2.4e-7
    assert error.max() < 7 * sigma * 5 + 5e-7
    # below 1 % of a cell, the others cost only the attempts that dithers do not determine
    assert len(wire) < (1000 if n == 1 else d / 8)
