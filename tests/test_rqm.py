"""The randomized quantization mechanism, and the accounting of a channel with finitely many outcomes."""

import itertools
import math

import numpy as np
import pytest
import torch
from scipy import stats

from leakgauge import Key, Link, Links, MessageError, pack_levels, rng, unpack_levels
from leakgauge.defenses.rqm import RQM
from leakgauge.harness.core.accounting import Finite, delta, epsilon, is_sampled, repeat
from leakgauge.harness.core.claim import Unit, Verdict, judge
from leakgauge.harness.core.distribution import DistributionError
from tests.by_rows import by_rows
from tests.jopeq_case import WHO, setting_of
from tests.oracles import ALPHA

every_geometry = by_rows((2, 0.3, 0.5), (3, 0.42, 1.0), (8, 0.2, 0.3), (9, 0.9, 0.05), (10, 0.05, 30.0), (12, 0.6, 0.7))


PRIVATE = Key(1)


def through(defense, update, private=PRIVATE):
    here = setting_of(len(update))
    state = defense.init(here)
    wire, _ = defense.encode(state, None, update, Link(here, WHO, Key(9)), private)
    return wire, defense.estimate(state, wire, Link(here, WHO, None))


def distribution_of(defense, update):
    here = setting_of(len(update))
    return defense.message_distribution(defense.init(here), None, update, Link(here, WHO, None))


def enumerated(m, q, margin, inputs):
    """[n, m] the probabilities of the levels for inputs [n] of clips, by the sum over all sets of kept levels."""
    levels, chances, rows = np.linspace(-1 - margin, 1 + margin, m), np.zeros((len(inputs), m)), np.arange(len(inputs))
    for inner in itertools.product((False, True), repeat=m - 2):
        kept = np.flatnonzero([True, *inner, True])
        above = np.maximum(1, np.searchsorted(levels[kept], inputs))
        low, high = kept[above - 1], kept[above]
        shares = (inputs - levels[low]) / (levels[high] - levels[low])
        weight = q ** sum(inner) * (1 - q) ** (m - 2 - sum(inner))
        chances[rows, low] += weight * (1 - shares)
        chances[rows, high] += weight * shares
    return chances


@every_geometry
def test_the_stated_distribution_is_the_sum_over_all_sets_of_kept_levels(m, q, margin):
    x = torch.tensor([-1.0, -0.71, -0.3, 0.0, 0.11, 0.64, 1.0, 7.0])
    found = distribution_of(RQM(clip=2.0, levels=m, keep=q, margin=margin), 2.0 * x).chances
    expected = enumerated(m, q, margin, np.minimum(x.double().numpy(), 1.0))
    assert found == pytest.approx(expected, abs=1e-6)  # float32 coordinates
    assert found.sum(1) == pytest.approx(np.ones(8), abs=1e-12)


@pytest.mark.parametrize("value", [-1.0, -0.4, 0.0, 0.37, 5.0])
def test_the_levels_of_a_message_follow_the_enumeration(value):
    # alpha 1e-6; a chance of keeping of 0.45 for 0.42 is rejected by a wide margin at 200,000 coordinates
    d, defense = 200_000, RQM(levels=9, margin=0.4)
    wire, _ = through(defense, torch.full((d,), value))
    counts = np.bincount(unpack_levels(wire, d, 4), minlength=9)
    for keep, follows in ((0.42, True), (0.45, False)):
        expected = d * enumerated(9, keep, 0.4, np.array([min(value, 1.0)]))[0]
        assert (stats.chisquare(counts, expected).pvalue > ALPHA) == follows


def test_coordinates_of_a_message_and_its_draws_are_independent():
    d, defense = 200_000, RQM(levels=4, margin=0.4)
    levels = unpack_levels(through(defense, torch.full((d,), 0.3))[0], d, 2)
    pairs = np.histogram2d(levels[::2], levels[1::2], bins=4)[0]
    assert stats.chi2_contingency(pairs).pvalue > ALPHA
    again = unpack_levels(through(defense, torch.full((d,), 0.3), Key(2))[0], d, 2)
    assert stats.chi2_contingency(np.histogram2d(levels, again, bins=4)[0]).pvalue > ALPHA


@every_geometry
def test_decoding_is_unbiased_for_the_clamped_update_with_the_enumerated_variance(m, q, margin):
    # 5 standard errors; an offset of 6 % of the clip is more than that in all rows but that with a margin of 30
    d, clip, levels = 100_000, 2.0, np.linspace(-1 - margin, 1 + margin, m)
    for value in (-0.45, 3.0):
        x = max(-1.0, min(1.0, value / clip))
        _, found = through(RQM(clip=clip, levels=m, keep=q, margin=margin), torch.full((d,), value))
        chances, errors = enumerated(m, q, margin, np.array([x]))[0], (levels - x) ** 2
        variance = clip**2 * chances @ errors
        spread = clip**2 * math.sqrt(chances @ (errors - chances @ errors) ** 2 / d)
        assert abs(float(found.double().mean()) - clip * x) < 5 * math.sqrt(variance / d)
        assert abs(float((found.double() - clip * x).square().mean()) - variance) < 5 * spread + 1e-6 * variance
        assert margin == 30 or 0.06 * clip > 5 * math.sqrt(variance / d)


@by_rows((2, 1001, 126), (3, 1001, 251), (16, 1001, 501), (17, 1001, 626), (17, 1, 1), (64, 4, 3))
def test_a_message_has_exactly_the_bits_of_its_levels(m, d, size):
    defense = RQM(levels=m, keep=0.2)
    wire, found = through(defense, rng.normal(Key(3), (d,)))
    assert len(wire) == size == math.ceil(d * math.ceil(math.log2(m)) / 8)
    assert found.shape == (d,)
    assert found.abs().max() <= 1 / defense.reach * (1 + 1e-6)


@by_rows(
    (b"\x00" * 2, "of 4 bytes"),
    (b"\x00" * 5, "of 4 bytes"),
    (pack_levels(np.array([0, 4, 5, 0, 1]), 3).ljust(2, b"\0") + b"\x00\x00", "expected columns 0 to 4, got 5"),
    (b"\x00\x00\x00\x80", "expected zero bits"),
)
def test_a_damaged_message_is_refused(wire, words):
    defense, here = RQM(levels=5), setting_of(10)
    with pytest.raises(MessageError, match=words):
        defense.estimate(defense.init(here), wire, Link(here, WHO, None))


def test_an_update_that_is_not_finite_is_refused():
    with pytest.raises(ValueError, match="finite"):
        through(RQM(), torch.tensor([0.0, math.nan]))


def largest_ratio(defense, inputs):
    """The largest log ratio of a level's probability over these inputs, by enumeration."""
    rows = enumerated(defense.levels, defense.keep, 1 / defense.reach - 1, np.clip(inputs, -1.0, 1.0))
    return float(np.log(rows.max(0) / rows.min(0)).max())


@every_geometry
def test_a_coordinate_s_epsilon_is_the_largest_ratio_over_all_pairs_of_inputs(m, q, margin):
    defense, here = RQM(levels=m, keep=q, margin=margin), setting_of(7)
    claim = defense.claim([defense.init(here)] * 3, here)
    levels = np.linspace(-1 - margin, 1 + margin, m)
    attained = largest_ratio(defense, np.append(np.linspace(-1, 1, 301), levels))
    assert judge(claim).proved == pytest.approx(3 * attained, rel=1e-9)
    assert judge(claim).verdict in (Verdict.HOLDS, Verdict.VACUOUS)
    assert (claim.unit, claim.delta, claim.further[0].unit) == (Unit.COORDINATE, 0.0, Unit.MESSAGE)
    assert claim.further[0].epsilon(0.0) == pytest.approx(21 * attained, rel=1e-9)


@by_rows((8, 0.2, 0.3), (16, 0.42, 0.66))
def test_an_inner_pair_of_inputs_can_be_worse_than_the_two_ends(m, q, margin):
    defense = RQM(levels=m, keep=q, margin=margin)
    ends = largest_ratio(defense, [-1.0, 1.0])
    assert defense.inputs.pure > ends + 0.01
    assert defense.inputs.pure == pytest.approx(
        largest_ratio(defense, np.append(np.linspace(-1 - margin, 1 + margin, m), [1.0, -1.0])), rel=1e-9
    )


@pytest.mark.parametrize("eps", [0.001, 0.01, 1.0, 8.0, 24.0])
@pytest.mark.parametrize(("m", "q"), [(2, 0.5), (5, 0.3), (16, 0.42)])
def test_the_margin_for_an_epsilon_gives_it(m, q, eps):
    defense, here = RQM(levels=m, keep=q, epsilon=eps), setting_of(1)
    claim = defense.claim([defense.init(here)], here)
    assert claim.epsilon == eps
    assert claim.proved.epsilon(0.0) == pytest.approx(eps, rel=1e-7)
    assert torch.isfinite(through(defense, torch.tensor([0.3]))[1]).all()
    if m == 2:  # randomized response: the two levels have odds of (2 C + Delta) / Delta
        assert 1 / defense.reach - 1 == pytest.approx(2 / math.expm1(eps), rel=1e-4)


def test_the_chances_of_all_messages_sum_to_one_and_the_likelihood_is_the_distribution():
    defense, here = RQM(clip=0.5, levels=5, margin=0.2), setting_of(2)
    update = torch.tensor([0.11, -3.0])
    wires = [pack_levels(np.array(pair), 3) for pair in itertools.product(range(5), repeat=2)]
    score = defense.likelihood(defense.init(here), wires, Links(here, [WHO] * 25, None))(update.expand(25, -1))
    first, second = distribution_of(defense, update).chances
    assert (-score).exp().numpy() == pytest.approx(np.outer(first, second).ravel(), rel=1e-4)
    assert float((-score.double()).exp().sum()) == pytest.approx(1.0, abs=1e-5)


def test_the_likelihood_has_a_slope_inside_the_clip_and_none_beyond():
    defense, here = RQM(), setting_of(3)
    update = torch.tensor([[0.1, -0.8, 1.7]], requires_grad=True)
    wire, _ = through(defense, update.detach()[0])
    (slope,) = torch.autograd.grad(
        defense.likelihood(defense.init(here), [wire], Links(here, [WHO], None))(update).sum(), update
    )
    assert (slope[0, :2] != 0).all()
    assert slope[0, 2] == 0


def test_a_level_that_does_not_exist_and_a_channel_without_probabilities_have_no_distribution():
    defense, here = RQM(levels=5), setting_of(1)
    with pytest.raises(DistributionError, match="outcome of 6"):
        distribution_of(defense, torch.zeros(1)).read(bytes([6]), Key(0))
    state = defense.init(here)
    with pytest.raises(DistributionError, match="not probabilities"):
        defense.message_distribution(state._replace(P=1.1 * state.P), None, torch.zeros(1), Link(here, WHO, None))


# ---- the accounting of a channel

ROWS = ((0.5, 0.3, 0.2), (0.2, 0.5, 0.3), (0.25, 0.35, 0.4))


def hockey_stick(one, other, eps):
    return float(np.maximum(one - math.exp(eps) * other, 0).sum())


def products(rows, times):
    """The distributions of `times` outcomes for all sequences of inputs."""
    each = itertools.product(np.array(rows), repeat=times)
    return [np.array([math.prod(chances) for chances in itertools.product(*sequence)]) for sequence in each]


def test_one_outcome_has_the_exact_epsilon_and_delta_of_the_worst_mixtures():
    event, weights = Finite(ROWS), rng.dirichlet(Key(4), np.full(3, 0.3), 200)
    mixtures = np.concatenate([weights @ np.array(ROWS), ROWS])
    for eps in (0.0, 0.1, 0.4, 0.8):
        attained = max(hockey_stick(one, other, eps) for one, other in itertools.product(mixtures, repeat=2))
        assert delta(event, eps) == pytest.approx(attained, rel=1e-12)
        assert epsilon(event, attained) == pytest.approx(eps, abs=1e-9)
    assert epsilon(event, 0.0) == pytest.approx(math.log(2.5))
    assert delta(event, 1.0) == 0
    assert epsilon(event, 0.9) == 0
    assert not is_sampled(event)


@pytest.mark.parametrize("times", [2, 3])
def test_the_bound_of_several_outcomes_covers_all_sequences_of_inputs(times):
    event, sequences = repeat(Finite(ROWS), times), products(ROWS, times)
    for eps in (0.2, 0.7, 1.2):
        attained = max(hockey_stick(one, other, eps) for one, other in itertools.product(sequences, repeat=2))
        assert 0 < attained <= delta(event, eps) < 4 * attained
        assert eps <= epsilon(event, attained) <= epsilon(event, 0.0)
    assert epsilon(event, 0.0) == pytest.approx(times * math.log(2.5))
    assert epsilon(repeat(event, 0), 1e-5) == 0


def test_the_bound_of_many_outcomes_is_near_the_exact_composition_of_one_pair():
    # randomized response: the losses of n outcomes are binomial
    p, n, at = 0.55, 1000, 1e-5
    event = repeat(Finite(((p, 1 - p), (1 - p, p))), n)
    ones = np.arange(n + 1)
    chances, losses = stats.binom.pmf(ones, n, p), (2 * ones - n) * math.log(p / (1 - p))

    def exact(eps):
        return float(chances @ np.maximum(-np.expm1(np.minimum(eps - losses, 0)), 0))

    bound = epsilon(event, at)
    assert exact(bound) <= at < exact(0.9 * bound)
    assert delta(event, bound) == pytest.approx(at, rel=1e-6)
    assert bound < 0.25 * epsilon(event, 0.0)


def test_a_whole_message_s_epsilon_at_a_delta_is_far_below_the_sum():
    defense, here = RQM(epsilon=0.1), setting_of(1000)
    (whole,) = defense.claim([defense.init(here)], here).further
    assert whole.epsilon(0.0) == pytest.approx(100.0, rel=1e-6)
    assert 5 < whole.epsilon(1e-5) < 20
