"""sqSGD; the channel itself is in test_privquant.py, the transform in test_hadamard.py."""

import dataclasses
import itertools
import math

import numpy as np
import pytest
import torch
from scipy import stats
from scipy.linalg import hadamard

from leakgauge import Key, Link, Links, rng
from leakgauge.defenses.sqsgd import SqSGD
from leakgauge.harness.core.claim import Verdict, judge
from leakgauge.harness.core.distribution import DistributionError
from tests.baselines_case import PRIVATE, SENDERS, SHARED, encode, estimate, setting_of
from tests.by_rows import by_rows
from tests.oracles import ALPHA


def sent_coordinates(defense, d, shared=SHARED):
    """Those that are not zero in one of three messages: noise may cancel a coordinate in one."""
    wires = [encode(defense, torch.ones(d), PRIVATE.child(i), shared)[0] for i in range(3)]
    return {at for wire in wires for at in estimate(defense, wire, d, shared).nonzero()[:, 0].tolist()}


def test_a_power_of_two_of_the_coordinates_is_sent():
    assert [SqSGD(ratio=0.005).sent(d) for d in (119_850, 1_722_224, 10)] == [512, 8192, 1]
    assert [SqSGD(ratio=ratio).sent(1_722_224) for ratio in (0.001, 0.05)] == [1024, 65536]


@pytest.mark.parametrize(("bits", "size"), [(1, 64), (3, 192), (4, 256), (5, 320), (7, 448)])
def test_the_wire_has_exactly_the_bits_of_the_levels(bits, size):
    defense = SqSGD(bits=bits)
    assert len(encode(defense, torch.ones(119_850))[0]) == size == math.ceil(512 * bits / 8)


def test_coordinates_come_from_the_shared_key_and_change_with_the_round():
    defense = SqSGD(ratio=0.3)
    first = sent_coordinates(defense, 1000)
    assert len(first) == 256
    assert first == sent_coordinates(defense, 1000)
    assert first != sent_coordinates(defense, 1000, Key(9))
    assert not estimate(defense, encode(defense, torch.ones(1000))[0], 1000, None).any()


def test_unsent_coordinates_stay_in_the_residual_and_sent_ones_do_not():
    defense, update = SqSGD(ratio=0.3, alpha=0.5, beta=2.0, clip=100.0), rng.normal(Key(3), (1000,))
    chosen = sorted(sent_coordinates(defense, 1000))
    _, first = encode(defense, update)
    expected = 0.5 * update
    expected[chosen] = 0.0
    torch.testing.assert_close(first, expected)
    _, second = encode(defense, update, memory=first)
    expected = first + 0.5 * update
    expected[chosen] = 0.0
    torch.testing.assert_close(second, expected)


@pytest.mark.parametrize("memory", [0.0, 3.0])
@pytest.mark.table(2)
def test_decoding_is_unbiased_on_the_sent_coordinates(memory):
    # 1,500 messages, alpha 1e-6: a bias of 6 % is more than 5 standard errors of the mean projection on the truth
    d, clip = 64, 4.0
    defense = SqSGD(ratio=1.0, epsilon=170.0, clip=clip)
    update, residual = 4 * rng.normal(Key(3), (d,)) / 8, memory * torch.ones(d)
    target = residual + update
    target = (target * min(1.0, clip / float(target.norm()))).double()
    wires = [encode(defense, update, PRIVATE.child(i), memory=residual)[0] for i in range(1500)]
    found = [float(estimate(defense, wire, d).double() @ target) for wire in wires]
    expected = float(target @ target)
    assert stats.ttest_1samp(found, expected).pvalue > ALPHA
    assert stats.ttest_1samp(found, 1.06 * expected).pvalue < ALPHA


def test_the_residual_is_clipped_before_it_is_rounded():
    defense, d = SqSGD(ratio=1.0, epsilon=2000.0, bits=8), 64  # the channel is the identity there: tau = d
    assert defense.init(setting_of(d)).channel.tau == d
    wire, _ = encode(defense, torch.zeros(d), memory=1e6 * torch.ones(d))
    found = estimate(defense, wire, d)
    torch.testing.assert_close(found, torch.full((d,), 10 / 8.0), atol=0.3, rtol=0)


def test_without_the_second_clip_rotated_coordinates_are_clamped():
    defense, d = SqSGD(ratio=1.0, epsilon=2000.0, bits=8, reclip=False), 64  # the channel is the identity there
    residual = 6.0 * torch.ones(d)
    found = estimate(defense, encode(defense, torch.zeros(d), memory=residual)[0], d)
    spread = defense.init(setting_of(d)).signs.float() * 6.0
    rotated = torch.from_numpy(hadamard(d)).float() @ spread / math.sqrt(d)
    assert rotated.abs().max() > defense.clip
    back = torch.from_numpy(hadamard(d)).float() @ rotated.clamp(-10, 10) / math.sqrt(d)
    torch.testing.assert_close(found, back * defense.init(setting_of(d)).signs.float(), atol=0.3, rtol=0)
    assert found.norm() > 2 * defense.clip
    assert defense.parameters()["reclip"] is False


def test_at_a_large_budget_the_message_is_exact_up_to_rounding():
    defense, d = SqSGD(ratio=1.0, epsilon=3000.0, bits=10), 256
    update = rng.normal(Key(3), (d,)) / 4
    error = (estimate(defense, encode(defense, update)[0], d) - update).norm()
    assert error < (2 * 10 / 1023) * d**0.5  # a step a coordinate, and the rotation keeps norms


@by_rows(  # proved: values of an independent script, three decimals
    (119_850, 4, 400, 398.579), (119_850, 4, 200, 199.241), (119_850, 5, 400, 397.816), (1_722_224, 4, 2000, 1998.529)
)
def test_a_message_has_the_epsilon_of_its_channel_and_rounds_add_up(d, bits, epsilon, proved):
    defense = SqSGD(bits=bits, epsilon=float(epsilon))
    state = defense.init(setting_of(d))
    one, run = defense.claim([state], setting_of(d)), defense.claim([state] * 9400, setting_of(d))
    assert judge(one).proved == pytest.approx(proved, abs=6e-4)
    assert judge(one).verdict is Verdict.VACUOUS
    assert run.epsilon == 9400 * epsilon
    assert judge(run).proved == pytest.approx(9400 * judge(one).proved)
    # the probability of the lesser branch, exp(-0.1 epsilon), is below the resolution of any generator at 2000
    assert [proof.epsilon(0.0) for proof in one.further] == ([math.inf] if epsilon == 2000 else [])


def test_a_budget_without_a_fitting_threshold_is_refused_with_one_that_fits():
    with pytest.raises(ValueError, match="expected epsilon >= "):
        SqSGD(epsilon=1e-9, bits=8, ratio=1.0).init(setting_of(8))


def test_the_likelihood_knows_the_subset_the_rotation_and_the_clip():
    defense, d = SqSGD(ratio=0.3, epsilon=300.0), 1000
    update = rng.normal(Key(3), (d,))
    here, keys = setting_of(d), [SHARED.child(i) for i in range(20)]
    wires = [encode(defense, update, PRIVATE.child(i), key)[0] for i, key in enumerate(keys)]
    score = defense.likelihood(defense.init(here), wires, Links(here, [SENDERS[0]] * 20, keys))
    other = score(rng.normal(Key(4), (20, d)))
    assert (score(update.expand(20, -1)) < other).all()
    # beyond the clip only the direction counts
    torch.testing.assert_close(score(update.expand(20, -1)), score(5 * update.expand(20, -1)), rtol=1e-4, atol=1e-3)
    wrong = defense.likelihood(
        defense.init(here), wires, Links(here, [SENDERS[0]] * 20, [key.child("x") for key in keys])
    )
    assert wrong(update.expand(20, -1)).mean() > score(update.expand(20, -1)).mean()


def test_it_is_rebuilt_with_other_signs_by_another_rotation():
    one, two = SqSGD(), SqSGD(rotation=1)
    assert not torch.equal(one.init(setting_of(119_850)).signs, two.init(setting_of(119_850)).signs)
    assert dataclasses.replace(two, rotation=0) == one


@pytest.mark.parametrize("reclip", [True, False])
def test_the_stated_distribution_knows_the_residual_the_subset_and_the_rotation(reclip):
    # the channel is the identity, and levels are 3e-5 clips apart: every error is impossible
    defense, here = SqSGD(epsilon=1e4, bits=16, ratio=0.3, beta=0.5, reclip=reclip), setting_of(200)
    update, memory = rng.normal(Key(5), (200,)), rng.normal(Key(6), (200,))
    memory *= 1 if reclip else 10  # some rotated coordinates are beyond U
    wire = encode(defense, update, memory=memory)[0]
    cases = {"true": (update, memory, SHARED), "update": (0.5 * update, memory, SHARED)}
    cases |= {"memory": (update, 1.01 * memory, SHARED), "subset": (update, memory, Key(9))}
    for name, (other, residual, shared) in cases.items():
        stated = defense.message_distribution(defense.init(here), residual, other, Link(here, SENDERS[0], shared))
        if name == "true":
            assert float(stated.read(wire, Key(0)).uniforms.min()) > 1e-6
        else:
            with pytest.raises(DistributionError, match="levels of probability 0"):
                stated.read(wire, Key(0))


@by_rows(
    (1, 1, 3.0, True), (2, 1, 3.0, True), (4, 1, 3.0, False), (8, 1, 9.0, True), (4, 2, 8.0, True), (4, 3, 9.0, True)
)
def test_the_claim_has_the_largest_ratio_of_an_output_over_the_updates_in_the_ball(d, bits, eps, tight):
    # at d = 4, K = 2 the l2 clip keeps inputs off the corners: 1.088 is proved, 0.802 attained
    defense, here = SqSGD(bits=bits, ratio=1.0, epsilon=eps), setting_of(d)
    claim = defense.claim([defense.init(here)], here)
    channel, generator = defense.init(here).channel, np.random.default_rng(2)
    x = generator.standard_normal((2000, d)) * (generator.random((2000, d)) < generator.random((2000, 1)))
    x = np.concatenate([x, np.where(generator.random((400, d)) < generator.random((400, 1)), 1.0, -1.0)])
    x /= np.maximum(np.linalg.norm(x, axis=1, keepdims=True), 1e-9)
    some, even = (np.arange(d) < np.arange(d + 1)[:, None]) / (channel.levels - 1.0), np.full((1, d), d**-0.5)
    x = np.concatenate([x, generator.random((2400, 1)) * x, some, -some, even, -even])
    x /= np.maximum(np.linalg.norm(x, axis=1, keepdims=True), 1.0)
    place, found = (x + 1) * (channel.levels - 1) / 2, 0.0
    for output in itertools.combinations_with_replacement(range(channel.levels), d):
        counts = np.ones((len(x), 1))
        for h in np.maximum(0.0, 1 - np.abs(place - np.array(output))).T[..., None]:
            counts = np.pad(counts * (1 - h), ((0, 0), (0, 1))) + np.pad(counts * h, ((0, 0), (1, 0)))
        favored = counts[:, channel.tau :].sum(1)
        found = max(found, float(np.ptp(np.log1p(math.expm1(channel.epsilon) * favored))))
    proved, shown = claim.proved.epsilon(0), (claim.attained or claim.proved).epsilon(0)
    assert found <= proved * (1 + 1e-9)
    assert found == pytest.approx(shown, rel=1e-3)
    assert (claim.proved.tight, claim.attained is None) == (tight, tight)


def test_more_coordinates_than_the_clip_lets_reach_the_next_level_lower_the_epsilon():
    # 128 coordinates: with 16 levels all may surely match, with 8 levels each only with chance 0.809
    for bits, channel, proved in ((4, 394.891, 394.891), (3, 306.169, 279.095)):
        defense, here = SqSGD(bits=bits), setting_of(25_818)
        plan = defense.init(here)
        claim = defense.claim([plan], here)
        assert plan.channel.epsilon == pytest.approx(channel, abs=1e-3)
        assert claim.proved.epsilon(0) == pytest.approx(proved, abs=1e-3)
        assert claim.proved.tight


def test_the_attained_epsilon_is_that_of_two_updates_and_an_output_with_outer_levels():
    # K = 8, 512 coordinates, tau 321: an output at a middle level in 369 coordinates and at the top in the others; one
    # update is even in the 369, the other is at the other middle level in 49 of them, and 320 matches are too few
    defense, here = SqSGD(bits=3), setting_of(119_850)
    plan = defense.init(here)
    channel, claim = plan.channel, defense.claim([plan], here)
    assert (channel.d, channel.tau) == (512, 321)
    h, counts = 0.5 + 3.5 / math.sqrt(369), np.ones(1)
    for _ in range(369):
        counts = np.convolve(counts, [1 - h, h])
    attained = math.log1p(math.expm1(channel.epsilon) * counts[321:].sum())
    assert claim.attained.epsilon(0) == pytest.approx(attained, rel=1e-9)
    assert attained == pytest.approx(360.467, abs=1e-3)
    assert claim.proved.epsilon(0) == pytest.approx(398.024, abs=1e-3)
    assert not claim.proved.tight


def test_residuals_without_a_clip_have_the_epsilon_of_the_channel():
    # residuals may carry all rotated coordinates to the ends of the range; a first message cannot
    defense, here = SqSGD(bits=3, reclip=False), setting_of(25_818)
    plan = defense.init(here)
    claim = defense.claim([plan], here)
    assert claim.proved.epsilon(0) == plan.channel.epsilon
    assert not claim.proved.tight
    assert claim.attained.epsilon(0) == pytest.approx(279.095, abs=1e-3)
