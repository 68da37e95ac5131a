"""Poisson private representation: its points, its choice, its bits and its epsilon."""

import math

import numpy as np
import pytest
import torch
from scipy import stats

from leakgauge import Key, Link, Links, MessageError, rng
from leakgauge.defenses.ppr import PPR, _Points
from leakgauge.defenses.privunit import PrivUnit
from leakgauge.harness.core.claim import Unit, Verdict, judge
from tests.baselines_case import SENDERS, SHARED, encode, estimate, setting_of
from tests.oracles import ALPHA, follows

FORMS = pytest.mark.parametrize("form", ["direction", "ball"])
U = torch.tensor([0.6, 0.0, -0.8])


def sent(defense, update, count, shared=None):
    """Messages of one update, and their shared keys."""
    keys = [shared or Key(4).child(number) for number in range(count)]
    return [encode(defense, update, Key(5).child(number), key)[0] for number, key in enumerate(keys)], keys


def number_of(wire):
    """(stretch, number in it)"""
    whole = int.from_bytes(wire, "little")
    return whole % 64, whole // 64


def chances_of(key, one, alpha, kept):
    """The names of the points, and their probabilities with the update and with its opposite.

    By a closed form: in three dimensions the threshold of a cap is tanh(epsilon / 4), its share (1 - threshold) / 2.
    Points after time 2048 count by their mean, under 10 % in all.
    """
    points, edge = _Points(key, 3), math.tanh(one / 4)
    outside = 1 / (1 + math.expm1(one) * (1 - edge) / 2)
    names = [(stretch, number) for stretch in range(12) for number in range(points.count(stretch))]
    times, vectors = zip(*(points.point(*name) for name in names), strict=True)
    cosines = (torch.stack(vectors) @ U.double()).numpy()
    level = [np.where(side * cosines >= edge, math.exp(one), 1.0) * outside for side in (1, -1)]
    found = []
    for share in (kept, 1 - kept):
        densities = share * level[0] + (1 - share) * level[1]
        weights = (densities / np.array(times)) ** alpha
        rest = float((densities**alpha).mean()) * 2048 ** (1 - alpha) / (alpha - 1)
        assert rest < 0.1 * weights.sum()
        found.append(weights / (weights.sum() + rest))
    return names, *found


@pytest.mark.parametrize("alpha", [1.5, 3.0])
@FORMS
def test_a_number_has_the_probability_of_its_weight(form, alpha):
    # alpha 1e-6, 1000 messages
    one, kept = 3.0, 1.0 if form == "direction" else 0.75
    defense = PPR(clip=2.0, epsilon=2 * alpha * one, alpha=alpha, form=form)
    # a process in which several points are likely
    each = ((key, *chances_of(key, one, alpha, kept)) for key in map(Key, range(20, 60)))
    key, names, chances, opposite = next(found for found in each if found[2].max() < 0.4)
    found = [number_of(wire) for wire in sent(defense, U, 1000, key)[0]]
    likely = np.argsort(-chances)[:12]
    counts = np.array([found.count(names[place]) for place in likely])
    right, wrong = (1000 * np.append(law[likely], 1 - law[likely].sum()) for law in (chances, opposite))
    assert stats.chisquare([*counts, 1000 - counts.sum()], right).pvalue > ALPHA
    assert stats.chisquare([*counts, 1000 - counts.sum()], wrong).pvalue < ALPHA


@pytest.mark.parametrize("alpha", [1.5, 3.0])
@FORMS
def test_opposite_updates_change_the_chances_of_numbers_by_up_to_twice_alpha_the_epsilon_of_the_vector(form, alpha):
    # an update as long as the clip, so that both forms keep its direction
    defense = PPR(clip=1.0, epsilon=6 * alpha, alpha=alpha, form=form)
    one, keys = defense.mechanism.epsilon, [Key(number) for number in range(20, 40)]
    laws = [chances_of(key, one, alpha, 1.0)[1:] for key in keys]
    largest = max(float(np.abs(np.log(law / opposite)).max()) for law, opposite in laws)
    # more than alpha times epsilon, so that the factor of 2 is needed
    assert 1.6 * alpha * one < largest <= 2 * alpha * one
    link = Link(setting_of(3), SENDERS[0], SHARED)
    law, opposite = (defense.message_distribution(None, None, way * U, link) for way in (1, -1))
    for stated in (defense.claim([None], setting_of(3)).epsilon, law.loss(opposite).pure):
        assert largest <= stated < largest / 0.8
    # shorter updates of a ball change them less
    _, law, opposite = chances_of(keys[0], one, alpha, 0.75)
    assert np.abs(np.log(law / opposite)).max() < alpha * one


@FORMS
@pytest.mark.parametrize(("d", "epsilon"), [(3, 8.0), (20, 16.0)])
def test_over_shared_keys_the_vector_has_privunits_distribution(form, d, epsilon):
    # alpha 1e-6, 400 messages; PrivUnit of three times the epsilon is told apart
    defense, update = PPR(clip=2.0, epsilon=epsilon, form=form), 1.6 * rng.normal(Key(1), (d,)) / d**0.5
    wires, keys = sent(defense, update, 400)
    links = [Link(setting_of(d), SENDERS[0], key) for key in keys]
    stated = [
        defense.message_distribution(None, None, update, link).read(wire, Key(3).child(number)).uniforms
        for number, (wire, link) in enumerate(zip(wires, links, strict=True))
    ]
    rows = np.stack(stated)
    assert follows(rows[:, 0], "uniform")
    assert follows(rows[:, -1], "uniform")
    assert follows(rows.ravel(), "uniform")
    other = PrivUnit(clip=2.0, epsilon=3 * epsilon / 4, form=form).message_distribution(None, None, update, links[0])
    vectors = [defense.vector(wire, link.shared, link.setting).numpy() for wire, link in zip(wires, links, strict=True)]
    wrong = [other.read(vector.astype("<f4").tobytes(), Key(3)).uniforms[0] for vector in vectors]
    assert not follows(wrong, "uniform")


@FORMS
def test_the_estimate_is_unbiased_with_privunits_error(form):
    # the mean of 500 estimates is within 5 standard deviations; a length 20 % off is not
    d, defense = 10, PPR(clip=2.0, epsilon=24.0, form=form)
    update = rng.normal(Key(3), (d,))
    update *= 1.5 / update.norm()
    wires, keys = sent(defense, update, 500)
    found = torch.stack([estimate(defense, wire, d, key) for wire, key in zip(wires, keys, strict=True)]).double()
    aim = update.double() * (2 / 1.5 if form == "direction" else 1)
    along = (found @ aim / (aim @ aim)).numpy()
    error = 5 * along.std() / 500**0.5
    assert abs(along.mean() - 1) < error < abs(along.mean() - 1.2)
    total = float(
        PrivUnit(clip=2.0, epsilon=6.0).error_variance(None, wires[:1], Links(setting_of(d), SENDERS[:1], None)).sum()
    )
    errors = (found - aim).square().sum(1).numpy()
    assert abs(errors.mean() - (total + 4 - float(aim @ aim))) < 5 * errors.std() / 500**0.5 + 1e-6


def test_the_points_are_a_poisson_process_of_rate_1_with_uniform_vectors():
    # alpha 1e-6
    many = [_Points(Key(8).child(number), 3) for number in range(200)]
    counts = np.array([[points.count(stretch) for stretch in range(8)] for points in many])
    means = np.array([1, 1, 2, 4, 8, 16, 32, 64])
    squares = (np.square(counts - means) / means).sum()
    assert stats.chi2.sf(squares, counts.size) > ALPHA
    assert stats.chi2.sf(squares * 1.4, counts.size) < ALPHA
    times = np.array([points.point(6, number)[0] for points in many for number in range(points.count(6))])
    assert follows(times / 32 - 1, "uniform")
    heights = [float(points.point(6, number)[1][1]) for points in many[:60] for number in range(points.count(6))]
    assert follows((np.array(heights) + 1) / 2, "uniform")


def test_a_message_has_the_bits_of_its_number():
    for epsilon, most in ((8.0, 2), (32.0, 3)):
        defense, update = PPR(epsilon=epsilon), torch.ones(50)
        wires, keys = sent(defense, update, 60)
        for wire, key in zip(wires, keys, strict=True):
            stretch, _ = number_of(wire)
            assert len(wire) == -(-(6 + (_Points(key, 50).count(stretch) - 1).bit_length()) // 8)
        assert np.mean([len(wire) for wire in wires]) < most


def test_without_the_shared_key_a_number_says_nothing_of_the_direction():
    # alpha 1e-6: the stretches of messages of two opposite updates
    defense = PPR(epsilon=24.0)
    rows = [
        [number_of(encode(defense, way * U, Key(5).child(n), Key(6).child(n, way))[0])[0] for n in range(500)]
        for way in (1, -1)
    ]
    table = np.stack([np.bincount(np.minimum(row, 7), minlength=8) for row in rows])
    assert stats.chi2_contingency(table[:, table.sum(0) > 0]).pvalue > ALPHA
    wire = encode(defense, U)[0]
    assert estimate(defense, wire, 3, None).tolist() == [0.0] * 3
    links = Links(setting_of(3), SENDERS[:1], None)
    assert defense.likelihood(None, [wire], links)(torch.stack([U])).tolist() == [0.0]
    assert defense.error_variance(None, [wire], links).tolist() == [[math.inf] * 3]


def test_the_likelihood_is_privunits_of_the_decoded_vector():
    defense, inner = PPR(epsilon=12.0), PrivUnit(epsilon=3.0)
    wire = encode(defense, U)[0]
    vector = defense.vector(wire, SHARED, setting_of(3))
    links = Links(setting_of(3), SENDERS[:1], [SHARED])
    rows = torch.stack([U, -U, U.roll(1)]).double()
    for name in ("likelihood", "exact_likelihood"):
        found = [float(getattr(defense, name)(None, [wire], links)(row[None])) for row in rows]
        as_sent = getattr(inner, name)(None, [vector.numpy().astype("<f4").tobytes()], links)
        assert found == pytest.approx([float(as_sent(row[None])) for row in rows], abs=1e-5)


@FORMS
@pytest.mark.parametrize("epsilon", [0.01, 8.0])
@pytest.mark.parametrize("d", [1, 2, 50])
def test_zero_and_few_coordinates_are_sent(d, epsilon, form):
    defense = PPR(epsilon=epsilon, form=form)
    for update in (torch.zeros(d), torch.ones(d)):
        assert torch.isfinite(estimate(defense, encode(defense, update)[0], d)).all()
    with pytest.raises(ValueError, match="expected a finite update"):
        encode(defense, torch.full((d,), math.nan))


def test_numbers_of_no_point_are_refused():
    defense, setting = PPR(), setting_of(3)
    count = _Points(SHARED, 3).count(4)
    for wire, words in (
        (b"", "cut off"),
        (bytes([60]), "expected one of 0 points of stretch 60"),
        (bytes([63]), "expected one of 0 points of stretch 63"),
        ((4 + 64 * count).to_bytes(2, "little"), "expected"),
        (encode(defense, U)[0] + b"\1", "expected a message of"),
    ):
        with pytest.raises(MessageError, match=words):
            defense.vector(wire, SHARED, setting)


def test_ppr_claims_twice_alpha_the_epsilon_of_privunit():
    one, three = (PPR(epsilon=6.0, alpha=1.5).claim([None] * rounds, setting_of(600)) for rounds in (1, 3))
    assert PPR(epsilon=6.0, alpha=1.5).mechanism == PrivUnit(epsilon=2.0).channel
    assert (one.unit, one.epsilon, one.delta) == (Unit.MESSAGE, 6.0, 0.0)
    assert judge(one).verdict is Verdict.HOLDS
    assert judge(three).proved == three.epsilon == pytest.approx(18.0)
    assert not one.proved.tight
    law, other = (
        PPR(epsilon=6.0, alpha=1.5).message_distribution(None, None, way * U, Link(setting_of(3), SENDERS[0], SHARED))
        for way in (1, -1)
    )
    assert law.loss(other).pure == pytest.approx(6.0)
    assert not law.loss(other).attained
    assert law.loss(law).pure == 0.0
