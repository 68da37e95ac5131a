"""CEPAM's three variants on their bytes; the quantizer is in test_lrsuq.py, the claims are in test_cepam_claims.py."""

import dataclasses
import math

import numpy as np
import pytest
import torch
from scipy import stats
from scipy.special import ndtr

from defenses import _cepam_wire
from defenses._cepam_wire import attempt_contexts, cell_contexts, dithers, pack, unpack
from defenses._clip import clip_l2
from defenses._lrsuq import encode_with, gaussian_radii, place
from defenses.cepam_clip import CepamClip
from defenses.cepam_gaussian import CepamGaussian
from defenses.cepam_laplace import CepamLaplace
from harness import rng
from harness.contract import MessageError, Sender, Setting
from harness.rng import Key
from harness.vec import Layout

ALPHA = 1e-6
"""False-alarm rate of every statistical test in this file."""

N = 300_000
"""Errors. Kolmogorov-Smirnov at ALPHA sees 0.005; a scale off by 6 % moves a normal or Laplace law by 0.011 or more,
where the standard error is 0.0009: the miss rate is under 1e-6."""

PRIVATE, SHARED = Key(0).child("private"), Key(0).child("shared")
WHO = Sender(0, 8)

GAUSSIANS = [CepamGaussian(dimension=n) for n in (1, 2, 3)]
CLIPS = [CepamClip(dimension=n, clip=2.0) for n in (1, 2, 3)]
every_variant = pytest.mark.parametrize("defense", [*GAUSSIANS, CepamLaplace(), *CLIPS], ids=repr)
every_n = pytest.mark.parametrize("n", [1, 2, 3])


def setting(d):
    return Setting(Layout(("w",), ((d,),)), 4, 4, 3, sends="update", steps=1, lr=0.1, batch=1, samples=100)


def encode(defense, update, shared=SHARED):
    here = setting(len(update))
    return defense.encode(None, None, update, sender=WHO, private=PRIVATE, shared=shared, setting=here)[0]


def decode(defense, wire, d, shared=SHARED):
    return defense.estimate(None, wire, sender=WHO, shared=shared, setting=setting(d))


def score(defense, wire, candidate, shared=(SHARED,)):
    here = setting(candidate.shape[-1])
    return defense.likelihood(None, [wire], senders=[WHO], shared=shared, setting=here)(candidate[None])[0]


def law(defense):
    return stats.laplace.cdf if isinstance(defense, CepamLaplace) else stats.norm.cdf


def noise(defense, update):
    """Scale of the noise in each coordinate."""
    if isinstance(defense, CepamClip):
        return defense.noise_std
    scale = defense.noise_scale if isinstance(defense, CepamLaplace) else defense.noise_std
    return scale * float(update.double().norm()) / defense.gamma


def errors(defense, update):
    """[N] errors in units of the noise, from the bytes."""
    target = clip_l2(update, defense.clip) if isinstance(defense, CepamClip) else update
    found = decode(defense, encode(defense, update), len(update))
    return ((found.double() - target.double()) / noise(defense, update)).numpy()


@every_variant
def test_the_error_has_exactly_the_stated_law(defense):
    # of norm 16, so that the clip acts
    update = 0.03 * rng.normal(Key(5), (N,))
    z = errors(defense, update)
    assert stats.kstest(z, law(defense)).pvalue > ALPHA
    assert stats.kstest(1.06 * z, law(defense)).pvalue < ALPHA
    # the other coordinates of a sub-vector are N / n further on
    for other in (z[:-1], np.roll(z, len(z) // 2)[1:], np.roll(z, len(z) // 3)[1:], update.numpy()[1:]):
        assert abs(stats.pearsonr(z[1:], other).statistic) < 5 / N**0.5


@every_n
def test_squared_errors_of_a_sub_vector_are_independent(n):
    # a ball whose radius did not follow the right law would have normal-looking, dependent coordinates
    z = errors(CepamGaussian(dimension=n), 0.03 * rng.normal(Key(5), (N,)))
    norms = (z.reshape(n, -1) ** 2).sum(0)
    assert stats.kstest(norms, stats.chi2(n).cdf).pvalue > ALPHA
    assert stats.kstest(1.06**2 * norms, stats.chi2(n).cdf).pvalue < ALPHA


def quantized(n, count, sigma, spread=1.0):
    x = spread * rng.normal(Key(1), (n, count), torch.float64).numpy().T
    return x, gaussian_radii(Key(2), count, n, sigma)


@every_n
@pytest.mark.parametrize("sigma", [0.01, 1.0, 30.0])
@pytest.mark.parametrize("count", [1, 63, 64, 65, 1000, 70_000])
def test_server_and_client_agree_on_every_coordinate(n, sigma, count):
    x, radii = quantized(n, count, sigma)
    accepted = np.empty((n, count)).T

    def remember(attempt, rows, n):
        drawn = dithers(Key(3), attempt, rows, n)
        accepted[rows] = drawn
        return drawn

    encoded = encode_with(x, radii, remember)
    y = unpack(pack(x, radii, 1.0, Key(3)), radii, 1.0, Key(3), n)
    assert np.array_equal(y, place(encoded.cells, radii, accepted))
    assert (np.sqrt(((y - x) ** 2).sum(1)) <= radii * (1 + 1e-10)).all()


@every_n
def test_the_cuts_of_the_work_change_nothing(n, monkeypatch):
    x, radii = quantized(n, 1000, 0.1)
    wire, y = pack(x, radii, 1.0, Key(3)), unpack(pack(x, radii, 1.0, Key(3)), radii, 1.0, Key(3), n)
    monkeypatch.setattr(_cepam_wire, "_BLOCK", 77)
    assert pack(x, radii, 1.0, Key(3)) == wire
    assert np.array_equal(unpack(wire, radii, 1.0, Key(3), n), y)
    monkeypatch.setattr(_cepam_wire, "_MANY", 1)
    limited = pack(x, radii, 1.0, Key(3))
    assert limited != wire
    assert np.array_equal(unpack(limited, radii, 1.0, Key(3), n), y)


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
    """Radii in sigmas, and the chances of a quadrature over their law."""
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

# cepam.md, section 1, gamma = 1: bits a coordinate of the fixed-length code given U, and bits a sub-vector of H
FIXED = {(1, 0.1): 3.630, (2, 0.1): 3.573, (3, 0.1): 3.333, (1, 0.01): 6.663, (2, 0.01): 6.411, (3, 0.01): 6.207}
GEOMETRIC = {1: 0.0, 2: 0.955168, 3: 1.906789}


def rate(defense, d, updates, gamma):
    """Bits a coordinate, header included, of updates whose coordinates are as large as those of norm 1 in M."""
    bits = [
        8 * len(encode(dataclasses.replace(defense, gamma=gamma), rng.normal(Key(i), (d,)))) for i in range(updates)
    ]
    return float(np.mean(bits)) / d


@pytest.mark.parametrize(
    ("sigma", "printed", "spread"), [(0.1, 0.154, 0.078), (0.01, 0.843, 0.321), (0.001, 3.174, 0.673)]
)
def test_the_entropy_of_cells_is_the_printed_one_up_to_the_noise_of_its_400_radii(sigma, printed, spread):
    # 5 standard errors of a mean over radii, where the entropy has this spread, and half a unit of the last digit
    assert cells_entropy(1, sigma, DEVIATION) == pytest.approx(printed, abs=5 * spread / 400**0.5 + 0.0005)


@pytest.mark.parametrize(("n", "sigma"), list(FIXED))
def test_a_message_is_shorter_than_in_fixed_lengths_and_than_attempts_and_cells_given_radii(n, sigma):
    # 4 messages of a real model, with all that a short message pays for its contexts; a standard error of 1 %
    bits = rate(CepamGaussian(noise_std=sigma, dimension=n), M, 4, 1.0)
    given_radii = (GEOMETRIC[n] + cells_entropy(n, sigma, DEVIATION)) / n
    assert bits < (0.9 if sigma == 0.01 else 0.6) * given_radii < 1.02 * FIXED[n, sigma]


def test_fine_cells_of_which_no_dither_tells_take_at_most_two_percent_more_than_their_entropy():
    assert rate(CepamGaussian(noise_std=0.001), M, 4, 1.0) < 1.02 * cells_entropy(1, 0.001, DEVIATION)


@pytest.mark.parametrize(("sigma", "excess"), [(0.1, 1.06), (0.01, 1.04), (0.001, 1.02)])
def test_a_long_message_takes_little_more_than_the_entropy_given_radii_and_dithers(sigma, excess):
    # a million coordinates: standard errors of 0.5 %, 0.15 % and 0.04 %
    d, bound = 1_000_000, cells_entropy_given_dithers(sigma, DEVIATION)
    assert bound < rate(CepamGaussian(noise_std=sigma), d, 1, math.sqrt(d / M)) < excess * bound
    # whoever does not look at the dithers fails, but where the cells are so fine that they tell nothing
    assert (cells_entropy(1, sigma, DEVIATION) > excess * bound) == (sigma > 0.001)


@every_n
@pytest.mark.parametrize(("d", "sigma"), [(M, 0.1), (M, 0.01), (M, 1e-7), (70_000, 0.01), (70_000, 1e-7)])
def test_all_of_an_update_in_one_coordinate_is_decoded_and_short(n, d, sigma):
    update = torch.zeros(d)
    update[d // 2] = -5.0
    defense = CepamGaussian(noise_std=sigma, dimension=n)
    wire = encode(defense, update)
    error = (decode(defense, wire, d) - update).abs()
    # the largest of d normal errors; a float32 near 5 is good to 2.4e-7
    assert error.max() < 7 * sigma * 5 + 5e-7
    # below 1 % of a cell, the others cost only the attempts that no dither tells
    assert len(wire) < (1000 if n == 1 else d / 8)


@every_variant
def test_a_zero_update_is_four_bytes_and_exact_unless_noise_does_not_depend_on_it(defense):
    wire = encode(defense, torch.zeros(1000))
    found = decode(defense, wire, 1000)
    if isinstance(defense, CepamClip):
        assert float(found.std()) == pytest.approx(0.1, rel=0.2)
    else:
        assert wire == bytes(4)
        assert torch.equal(found, torch.zeros(1000))
        assert score(defense, wire, torch.zeros(1000)) < 1e-6 < score(defense, wire, torch.full((1000,), 1e-6))


@every_variant
@pytest.mark.parametrize("d", [1, 2, 17, 1001])
def test_any_length_is_padded_and_cut(defense, d):
    update = rng.normal(Key(4), (d,))
    found = decode(defense, encode(defense, update), d)
    assert found.shape == (d,)
    target = clip_l2(update, defense.clip) if isinstance(defense, CepamClip) else update
    assert (found - target).abs().max() < 12 * noise(defense, update)


@pytest.mark.parametrize("defense", [*GAUSSIANS, CepamLaplace()], ids=repr)
def test_four_times_the_update_is_the_same_message_with_four_times_the_norm(defense):
    update = rng.normal(Key(4), (1000,))
    wire, louder = encode(defense, update), encode(defense, 4 * update)
    assert louder[4:] == wire[4:]
    assert np.frombuffer(louder[:4], "<f4") == 4 * np.frombuffer(wire[:4], "<f4")
    assert torch.equal(decode(defense, louder, 1000), 4 * decode(defense, wire, 1000))


def test_only_the_ratio_of_gamma_and_noise_matters():
    update = rng.normal(Key(4), (1000,))
    one, two = CepamGaussian(noise_std=0.125, gamma=1.0), CepamGaussian(noise_std=0.25, gamma=2.0)
    assert encode(one, update)[4:] == encode(two, update)[4:]
    assert torch.equal(decode(one, encode(one, update), 1000), decode(two, encode(two, update), 1000))


def test_a_clipped_message_does_not_tell_the_norm():
    update = rng.normal(Key(4), (1000,))
    assert encode(CLIPS[0], update) == encode(CLIPS[0], 2 * update)


@every_variant
def test_no_key_is_drawn_from_twice(defense, monkeypatch):
    drawn, inside = [], rng._digest
    monkeypatch.setattr(rng, "_digest", lambda key: drawn.append(key) or inside(key))
    wire = encode(defense, rng.normal(Key(4), (1000,)))
    mine = [key for key in drawn if key.path[:1] == SHARED.path]
    assert len(mine) == len(set(mine)) >= 2
    drawn.clear()
    decode(defense, wire, 1000)
    assert set(drawn) == set(mine)
    assert len(set(drawn)) == len(drawn)


@every_variant
def test_without_the_shared_key_nothing_but_the_norm_can_be_read(defense):
    update = rng.normal(Key(4), (1000,))
    wire = encode(defense, update)
    assert torch.equal(decode(defense, wire, 1000, None), torch.zeros(1000))
    true, turned, half = (score(defense, wire, u, None) for u in (update, -update.flip(0), update / 2))
    if isinstance(defense, CepamClip):
        assert true == turned == half == 0
    else:
        assert true == pytest.approx(float(turned), abs=1e-3)
        assert half > 1000 > true


def decoded_or_refused(defense, wire, d, shared=SHARED):
    try:
        return decode(defense, wire, d, shared)
    except MessageError as error:
        said = str(error)
    assert "expected" in said
    return None


@every_variant
def test_another_key_decodes_something_else_or_nothing(defense):
    update = rng.normal(Key(4), (1000,))
    found = decoded_or_refused(defense, encode(defense, update), 1000, SHARED.child("other"))
    assert found is None or not torch.allclose(found, decode(defense, encode(defense, update), 1000))


@every_variant
def test_a_message_that_is_cut_off_or_goes_on_is_refused(defense):
    wire = encode(defense, rng.normal(Key(4), (200,)))
    for end in range(len(wire)):
        assert decoded_or_refused(defense, wire[:end], 200) is None
    assert decoded_or_refused(defense, wire + b"\0", 200) is None


@every_variant
def test_a_message_with_wrong_bits_is_refused_or_decoded_to_finite_numbers(defense):
    wire = encode(defense, rng.normal(Key(4), (200,)))
    places, masks = rng.integers(Key(7), 300, len(wire)).tolist(), (1 + rng.integers(Key(8), 300, 255)).tolist()
    for at, mask in zip(places, masks, strict=True):
        changed = bytearray(wire)
        changed[at] ^= mask
        found = decoded_or_refused(defense, bytes(changed), 200)
        assert found is None or torch.isfinite(found).all()


@pytest.mark.parametrize(
    ("norm", "message"),
    [(-1.0, "expected a norm >= 0"), (math.nan, "expected a finite message"), (0.0, "expected a message of 4 bytes")],
)
def test_a_norm_that_cannot_be_is_refused(norm, message):
    wire = encode(CepamGaussian(), rng.normal(Key(4), (200,)))
    with pytest.raises(MessageError, match=message):
        decode(CepamGaussian(), np.array(norm, "<f4").tobytes() + wire[4:], 200)


@pytest.mark.parametrize("factor", [1e-2, 1e-36])
def test_a_norm_beyond_float32_is_named(factor):
    with pytest.raises(ValueError, match="norm in units is a float32"):
        encode(CepamGaussian(gamma=factor), torch.full((1000,), 3e38 if factor > 1e-9 else 1e5))


@every_n
def test_the_likelihood_is_flat_in_each_ball_with_a_wall_around_it(n):
    d, defense = 60, CepamGaussian(dimension=n, gamma=2.0)
    update = rng.normal(Key(4), (d,))
    wire = encode(defense, update)
    unit = float(np.frombuffer(wire[:4], "<f4")[0])
    radii = defense.radii(SHARED.child("radii"), d // n, unit)
    candidate = update + 0.05 * rng.normal(Key(9), (d,))
    candidate *= update.norm() / candidate.norm()
    error = (candidate.double() - decode(defense, wire, d).double()).numpy().reshape(n, -1)
    ratio = np.sqrt((error**2).sum(0)) / radii
    # 1e-3 of the norm is one standard deviation; the candidate's is right to 1e-6
    beyond = (ratio - 1) / 0.04
    expected = (np.maximum(beyond, 0) - np.log1p(-0.5 * np.exp(np.minimum(beyond, 0)))).sum()
    assert float(score(defense, wire, candidate)) == pytest.approx(expected, rel=1e-4)
    assert (ratio > 1).any()
    longer = score(defense, wire, 1.01 * update) - score(dataclasses.replace(defense), wire, update)
    assert float(longer) > 45


def test_the_likelihood_of_a_clipped_message_does_not_ask_for_the_norm():
    update = rng.normal(Key(4), (60,))
    wire = encode(CLIPS[1], update)
    assert score(CLIPS[1], wire, update) == pytest.approx(float(score(CLIPS[1], wire, 2 * update)), rel=1e-4)
    assert score(CLIPS[1], wire, update) < score(CLIPS[1], wire, -update)


@pytest.mark.parametrize(
    ("kind", "parameters", "message"),
    [
        (CepamGaussian, {"noise_std": 0.0}, "expected noise_std > 0"),
        (CepamGaussian, {"gamma": math.inf}, "expected gamma > 0"),
        (CepamGaussian, {"local_epsilon": -1.0}, "expected local_epsilon > 0"),
        (CepamGaussian, {"dimension": 4}, "expected dimension 1, 2 or 3, got dimension=4"),
        (CepamLaplace, {"noise_scale": math.nan}, "expected noise_scale > 0"),
        (CepamLaplace, {"gamma": 0.0}, "expected gamma > 0"),
        (CepamClip, {"clip": 0.0}, "expected clip > 0"),
        (CepamClip, {"dimension": 0}, "expected dimension 1, 2 or 3, got dimension=0"),
    ],
)
def test_parameters_out_of_range_are_named(kind, parameters, message):
    with pytest.raises(ValueError, match=message):
        kind(**parameters)
