"""CEPAM's three variants on their bytes.

The quantizer is in test_lrsuq.py, the code of the cells in test_cepam_wire.py, the claims in test_cepam_claims.py.
"""

import math

import numpy as np
import pytest
import torch
from scipy import stats

from leakgauge import Key, Links, MessageError, rng
from leakgauge.defenses._common.clip import clip_l2
from leakgauge.defenses.cepam_clip import CepamClip
from leakgauge.defenses.cepam_gaussian import CepamGaussian
from leakgauge.defenses.cepam_laplace import CepamLaplace
from tests.by_rows import by_rows
from tests.cepam_case import SHARED, WHO, decode, encode, every_n, setting
from tests.oracles import follows

"""False-alarm rate of every statistical test in this file."""

N = 300_000
"""Errors. Kolmogorov-Smirnov at ALPHA detects 0.005; a scale off by 6 % moves a normal or Laplace distribution by 0.011
or more, where the standard error is 0.0009: the miss rate is under 1e-6."""

GAUSSIANS = [CepamGaussian(dimension=n) for n in (1, 2, 3)]
CLIPS = [CepamClip(dimension=n, clip=2.0) for n in (1, 2, 3)]
every_variant = pytest.mark.parametrize("defense", [*GAUSSIANS, CepamLaplace(), *CLIPS], ids=repr)


def score(defense, wire, candidate, shared=(SHARED,)):
    here = setting(candidate.shape[-1])
    return defense.likelihood(None, [wire], Links(here, [WHO], shared))(candidate[None])[0]


def noise(defense, update):
    """Scale of the noise in each coordinate."""
    if isinstance(defense, CepamClip):
        return defense.noise_std
    scale = defense.noise_scale if isinstance(defense, CepamLaplace) else defense.noise_std
    return scale * float(update.double().norm()) / defense.gamma


def errors(defense, update):
    """[d] errors in units of the noise, from the bytes."""
    target = clip_l2(update, defense.clip) if isinstance(defense, CepamClip) else update
    found = decode(defense, encode(defense, update), len(update))
    assert found.shape == update.shape
    return ((found.double() - target.double()) / noise(defense, update)).numpy()


@every_variant
def test_the_error_has_exactly_the_stated_distribution(defense):
    # of norm 16, so that the clip acts
    update = 0.03 * rng.normal(Key(5), (N,))
    z, distribution = errors(defense, update), "laplace" if isinstance(defense, CepamLaplace) else "norm"
    assert follows(z, distribution)
    assert not follows(1.06 * z, distribution)
    # the other coordinates of a sub-vector are N / n further on
    for other in (z[:-1], np.roll(z, len(z) // 2)[1:], np.roll(z, len(z) // 3)[1:], update.numpy()[1:]):
        assert abs(stats.pearsonr(z[1:], other).statistic) < 5 / N**0.5


@every_n
def test_squared_errors_of_a_sub_vector_are_independent(n):
    # a ball whose radius did not follow the right distribution would have normal-looking, dependent coordinates
    z = errors(CepamGaussian(dimension=n), 0.03 * rng.normal(Key(5), (N,)))
    norms = (z.reshape(n, -1) ** 2).sum(0)
    assert follows(norms, stats.chi2(n).cdf)
    assert not follows(1.06**2 * norms, stats.chi2(n).cdf)


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
def test_any_length_is_padded_and_cut(defense):
    for d in (1, 2, 17, 1001):
        assert np.abs(errors(defense, rng.normal(Key(4), (d,)))).max() < 12


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


def test_a_clipped_message_does_not_reveal_the_norm():
    update = rng.normal(Key(4), (1000,))
    assert encode(CLIPS[0], update) == encode(CLIPS[0], 2 * update)


@every_variant
def test_no_key_is_drawn_from_twice(defense, monkeypatch):
    drawn, inside = [], rng._digest
    monkeypatch.setattr(rng, "_digest", lambda key: drawn.append(key) or inside(key))
    wire = encode(defense, rng.normal(Key(4), (1000,)))
    shared = [key for key in drawn if key.path[:1] == SHARED.path]
    assert len(shared) == len(set(shared)) >= 2
    drawn.clear()
    decode(defense, wire, 1000)
    assert set(drawn) == set(shared)
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
        assert "expected" in str(error)  # noqa: PT017
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
@pytest.mark.table(3)
def test_a_message_with_wrong_bits_is_refused_or_decoded_to_finite_numbers(defense):
    wire = encode(defense, rng.normal(Key(4), (200,)))
    places, masks = rng.integers(Key(7), 300, len(wire)).tolist(), (1 + rng.integers(Key(8), 300, 255)).tolist()
    for at, mask in zip(places, masks, strict=True):
        changed = bytearray(wire)
        changed[at] ^= mask
        found = decoded_or_refused(defense, bytes(changed), 200)
        assert found is None or torch.isfinite(found).all()


@by_rows(
    (-1.0, "expected a norm >= 0"), (math.nan, "expected a finite message"), (0.0, "expected a message of 4 bytes")
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
    candidate = update + 0.1 * rng.normal(Key(9), (d,))
    candidate *= update.norm() / candidate.norm()
    error = (candidate.double() - decode(defense, wire, d).double()).numpy().reshape(n, -1)
    ratio = np.sqrt((error**2).sum(0)) / radii
    # 1e-3 of the norm is one standard deviation; the candidate's is right to 1e-6
    beyond = (ratio - 1) / 0.04
    expected = (np.maximum(beyond, 0) - np.log1p(-0.5 * np.exp(np.minimum(beyond, 0)))).sum()
    assert float(score(defense, wire, candidate)) == pytest.approx(expected, rel=1e-4)
    assert (ratio > 1).any()
    longer = score(defense, wire, 1.01 * update) - score(defense, wire, update)
    assert float(longer) > 45


def test_the_likelihood_of_a_clipped_message_ignores_the_norm():
    update = rng.normal(Key(4), (60,))
    wire = encode(CLIPS[1], update)
    assert score(CLIPS[1], wire, update) == pytest.approx(float(score(CLIPS[1], wire, 2 * update)), rel=1e-4)
    assert score(CLIPS[1], wire, update) < score(CLIPS[1], wire, -update)
