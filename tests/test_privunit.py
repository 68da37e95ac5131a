"""PrivUnit: its cap, its distribution, its epsilon and its errors."""

import dataclasses
import itertools
import math

import mpmath
import numpy as np
import pytest
import torch
from scipy import optimize, special, stats

from leakgauge import Key, Link, Links, MessageError, pack_float32, rng
from leakgauge.defenses._privunit import best_cap
from leakgauge.defenses.privunit import PrivUnit
from leakgauge.harness.core.claim import Unit, Verdict, judge
from leakgauge.harness.core.distribution import DistributionError
from tests.baselines_case import SENDERS, SHARED, encode, estimate, setting_of
from tests.oracles import ALPHA, follows

FORMS = pytest.mark.parametrize("form", ["direction", "ball"])


def messages(defense, update, count):
    """[count, d] float64: the vectors of messages of one update."""
    wires = [encode(defense, update, private=Key(5).child(number))[0] for number in range(count)]
    return np.stack([np.frombuffer(wire, "<f4").astype(np.float64) for wire in wires])


def distribution_of(defense, update):
    return defense.message_distribution(None, None, update, Link(setting_of(len(update)), SENDERS[0], SHARED))


def exact(defense, wires, candidates):
    links = Links(setting_of(candidates.shape[1]), [SENDERS[0]] * len(wires), None)
    return defense.exact_likelihood(None, wires, links)(candidates)


def moments(d, depth):
    """The share of the sphere with (1 - <u, v>) / 2 <= depth, and E[<u, v>; there] under uniform v.

    By quadrature in 30 digits over the angle w between u and v, whose density is sin(w)^(d - 2) / B(1/2, (d - 1) / 2).
    """
    with mpmath.workdps(30):
        top = 2 * mpmath.asin(mpmath.sqrt(mpmath.mpf(depth)))
        start = max(0, top - 200 / (d * mpmath.cos(top) + mpmath.sqrt(d)))
        ends = sorted({mpmath.mpf(0), *mpmath.linspace(start, top, 80)})
        whole = mpmath.beta(mpmath.mpf(1) / 2, mpmath.mpf(d - 1) / 2)
        powers = (lambda w: mpmath.sin(w) ** (d - 2), lambda w: mpmath.cos(w) * mpmath.sin(w) ** (d - 2))
        return [mpmath.quad(power, ends) / whole for power in powers]


@pytest.mark.parametrize("epsilon", [0.01, 0.5, 8.0, 30.0])
def test_in_one_two_and_three_dimensions_the_cap_has_its_closed_form(epsilon):
    # d = 3: <u, v> is uniform on [-1, 1], and (1 - g^2) / 4 = g (1 - g) / 2 + g c has the root tanh(epsilon / 4)
    assert best_cap(1, epsilon).mean == pytest.approx(math.tanh(epsilon / 2), rel=1e-12)
    three, tanh = best_cap(3, epsilon), math.tanh(epsilon / 4)
    assert (1 - 2 * three.depth, three.mean) == pytest.approx((tanh, tanh), rel=1e-11)
    assert three.mass == pytest.approx(1 / (1 + math.exp(epsilon / 2)), rel=1e-10)
    # d = 2: an arc within the angle w of u has the share w / pi, and E[cos; arc] = sin(w) / pi
    best = optimize.minimize_scalar(
        lambda w: -math.sin(w) / math.pi / (w / math.pi + 1 / math.expm1(epsilon)),
        bounds=(0, math.pi / 2),
        method="bounded",
        options={"xatol": 1e-10},
    )
    assert best_cap(2, epsilon).mean == pytest.approx(-best.fun, rel=1e-10)
    assert best_cap(2, epsilon).mass == pytest.approx(best.x / math.pi, rel=1e-4)


@pytest.mark.parametrize("epsilon", [0.1, 4.0, 400.0])
@pytest.mark.parametrize("d", [2, 7, 100, 100_000])
def test_epsilon_is_the_log_ratio_of_the_two_densities_and_no_other_cap_has_less_variance(d, epsilon):
    cap = best_cap(d, epsilon)

    def found(depth):
        """(share of the cap, density in it, mean): densities of the ratio e^epsilon that add up to a mass of 1."""
        with mpmath.workdps(30):
            mass, part = moments(d, depth)
            ratio = mpmath.exp(mpmath.mpf(epsilon))
            outside = 1 / (ratio * mass + 1 - mass)
            return mass, ratio * outside, part * (ratio - 1) * outside

    mass, inside, mean = found(cap.depth)
    assert cap.mass == pytest.approx(float(mass), rel=1e-8)
    assert cap.density == pytest.approx(float(mpmath.log(inside)), abs=1e-8)
    assert cap.mean == pytest.approx(float(mean), rel=1e-8)
    # what the sampler uses
    assert math.exp(cap.density) * cap.mass == pytest.approx(float(inside * mass), rel=1e-8)
    assert all(found(factor * cap.depth)[2] < mean for factor in (0.99, 1.01) if 1e-9 < factor * cap.depth < 0.5)


def test_a_larger_epsilon_or_fewer_dimensions_have_less_variance_up_to_extreme_values():
    for d in (1, 2, 7, 200, 100_000):
        means = [best_cap(d, epsilon).mean for epsilon in (1e-6, 0.01, 0.1, 1.0, 8.0, 60.0, 400.0, 1000.0, 1e6)]
        assert all(0 < one <= other <= 1 for one, other in itertools.pairwise(means))
    assert best_cap(100_000, 8.0).mean < best_cap(1000, 8.0).mean < best_cap(2, 8.0).mean


@pytest.mark.parametrize(("d", "epsilon"), [(2, 400.0), (7, 400.0), (9, 1000.0), (600, 0.1), (100_000, 400.0)])
def test_a_place_is_drawn_by_the_inverse_of_its_conditional_cdf(d, epsilon):
    # the two uniform numbers of a key select inside or outside, and the share of the mass there that is passed
    cap, a = best_cap(d, epsilon), (d - 1) / 2
    for number in range(40):
        key = Key(9).child(number)
        chosen, place = rng.uniform(key, (2,), dtype=torch.float64).tolist()
        x, near = cap.sample(key), chosen < math.exp(cap.density) * cap.mass
        assert (x <= cap.depth * (1 + 1e-12)) == near
        passed = special.betainc(a, a, x) / cap.mass if near else special.betainc(a, a, 1 - x) / (1 - cap.mass)
        assert passed == pytest.approx(1 - place, rel=1e-9)


@FORMS
@pytest.mark.parametrize(("d", "epsilon"), [(2, 1.0), (7, 4.0), (400, 30.0)])
def test_messages_have_the_stated_distribution(form, d, epsilon):
    # alpha 1e-6; 2000 messages: an epsilon twice as large leaves no doubt
    defense, update = PrivUnit(clip=2.0, epsilon=epsilon, form=form), 1.2 * rng.normal(Key(1), (d,)) / d**0.5
    sent, rows = messages(defense, update, 2000).astype("<f4"), []
    for off, looked in ((1.0, slice(None)), (2.0, slice(1000))):
        law = distribution_of(dataclasses.replace(defense, epsilon=off * epsilon), update)
        read = [law.read(row.tobytes(), Key(2).child(number)).uniforms for number, row in enumerate(sent[looked])]
        rows.append(np.stack(read))
    right, wrong = rows
    assert all(follows(right[:, column], "uniform") for column in {0, min(1, d - 1), d - 1})
    assert follows(right[:250].ravel(), "uniform")
    assert not follows(wrong[:, 0], "uniform")
    assert abs(np.corrcoef(right[:, 0], right[:, -1])[0, 1]) < 5 / 2000**0.5


@FORMS
def test_the_projection_has_two_levels_of_density_and_the_rest_has_no_direction(form):
    # by a closed form of its own: in three dimensions <u, v> is uniform on [-1, 1]. alpha 1e-6
    defense, n = PrivUnit(clip=2.0, epsilon=3.0, form=form), 6000
    update = torch.tensor([0.6, 0.0, -0.8])
    v = messages(defense, update, n)
    edge, share = math.tanh(3 / 4), 1.0 if form == "direction" else 0.5
    q = (1 - edge) / 2
    p = math.exp(3) * q / (1 + math.expm1(3) * q)

    def one(t):
        return np.where(t < edge, (1 - p) * (t + 1) / (1 + edge), 1 - p + p * (t - edge) / (1 - edge))

    def mixed(t):
        return (1 + share) / 2 * one(t) + (1 - share) / 2 * (1 - one(-t))

    u = update.double().numpy()
    assert follows(v @ u, mixed)
    assert not follows(v @ u, lambda t: (t + 1) / 2)
    angles = np.arctan2(v[:, 1], v @ np.array([0.8, 0.0, 0.6]))
    assert follows(angles / (2 * math.pi) + 0.5, "uniform")
    assert stats.spearmanr(angles, v @ u).pvalue > ALPHA


@FORMS
@pytest.mark.parametrize(("d", "epsilon"), [(1, 0.5), (2, 1.0), (20, 8.0), (600, 60.0)])
def test_the_estimate_is_unbiased_with_the_stated_error(form, d, epsilon):
    # the mean of 3000 estimates is within 5 standard deviations; a length 20 % off is not, where noise is that small
    defense, n = PrivUnit(clip=2.0, epsilon=epsilon, form=form), 3000
    update = rng.normal(Key(3), (d,))
    update *= 1.5 / update.norm()
    sent = [encode(defense, update, private=Key(6).child(number))[0] for number in range(n)]
    found = torch.stack([estimate(defense, wire, d) for wire in sent]).double().numpy()
    mean = float(moments(d, best_cap(d, epsilon).depth)[1]) if d > 1 else 0.5
    mean /= best_cap(d, epsilon).mass + 1 / math.expm1(epsilon)
    aim = update.double().numpy() * (2 / 1.5 if form == "direction" else 1)
    along = found @ aim / (aim @ aim)
    assert abs(along.mean() - 1) < 5 * along.std() / n**0.5
    if epsilon > 1:
        assert abs(along.mean() - 1.2) > 5 * along.std() / n**0.5
    errors = np.square(found - aim).sum(1)
    stated = 4 / mean**2 - float(aim @ aim)
    assert abs(errors.mean() - stated) < 5 * errors.std() / n**0.5 + 1e-6 * stated
    links = Links(setting_of(d), SENDERS[:1], None)
    assert float(defense.error_variance(None, sent[:1], links).sum()) == pytest.approx(4 / mean**2 - 4, rel=1e-6)


def test_an_update_beyond_the_ball_is_clipped_and_only_the_direction_of_others_counts():
    update = torch.tensor([3.0, -4.0, 0.0])
    for form, same in (("ball", 0.4), ("direction", 1e-30)):
        defense = PrivUnit(clip=2.0, epsilon=2.0, form=form)
        assert encode(defense, update)[0] == encode(defense, same * update)[0]
    ball = PrivUnit(clip=2.0, epsilon=50.0, form="ball")
    small = [float(estimate(ball, encode(ball, 0.01 * update, private=Key(i))[0], 3)[0]) for i in range(40)]
    assert min(small) < -1
    assert max(small) > 1


@FORMS
@pytest.mark.parametrize("epsilon", [0.01, 3.0, 1000.0])
@pytest.mark.parametrize("d", [1, 2, 50])
def test_an_update_of_zero_is_sent_as_a_uniform_vector(d, epsilon, form):
    # alpha 1e-6, 1000 messages
    v = messages(PrivUnit(epsilon=epsilon, form=form), torch.zeros(d), 1000)
    assert np.linalg.norm(v, axis=1) == pytest.approx(1, abs=1e-6)
    if d == 1:
        assert stats.binomtest(int((v > 0).sum()), 1000).pvalue > ALPHA
    else:
        assert follows((1 + v[:, 0]) / 2, stats.beta((d - 1) / 2, (d - 1) / 2).cdf)


def test_the_exact_likelihood_costs_epsilon_outside_the_cap_and_mixes_both_caps_in_the_ball():
    epsilon, u = 3.0, torch.tensor([[0.6, 0.0, -0.8]], dtype=torch.float64)
    edge, side = math.tanh(epsilon / 4), torch.tensor([0.8, 0.0, 0.6], dtype=torch.float64)
    at = {
        t: pack_float32((t * u[0] + math.sqrt(1 - t * t) * side).float()) for t in (1.0, edge + 1e-5, edge - 1e-5, -1.0)
    }
    direction, ball = (PrivUnit(clip=2.0, epsilon=epsilon, form=form) for form in ("direction", "ball"))
    found = [float(exact(direction, [wire], 9 * u)) for wire in at.values()]
    assert found == pytest.approx([0.0, 0.0, epsilon, epsilon], abs=1e-12)
    q = (1 - edge) / 2
    inside, outside = (math.exp(e) / (1 + math.expm1(epsilon) * q) for e in (epsilon, 0.0))
    for norm in (0.5, 2.0, 7.0):
        kept = (1 + min(norm / 2, 1)) / 2
        densities = [kept * inside + (1 - kept) * outside, outside, (1 - kept) * inside + kept * outside]
        found = [float(exact(ball, [at[t]], norm * u)) for t in (1.0, edge - 1e-5, -1.0)]
        assert found == pytest.approx([math.log(inside / density) for density in densities], abs=1e-9)
    # a candidate of zero has the uniform density
    for defense in (direction, ball):
        assert float(exact(defense, [at[1.0]], 0 * u)) == pytest.approx(math.log(inside), abs=1e-9)


@FORMS
def test_the_blurred_likelihood_prefers_the_truth_and_slopes_towards_it(form):
    d, defense = 100, PrivUnit(epsilon=50.0, form=form)
    update = rng.normal(Key(7), (d,), torch.float64)
    update /= update.norm()
    wires = [encode(defense, update.float(), private=Key(8).child(number))[0] for number in range(20)]
    links, near = Links(setting_of(d), SENDERS[:1] * 20, None), torch.roll(update, 1) + update
    score = defense.likelihood(None, wires, links)
    # a vector is outside the cap with probability 0.03
    assert int((score(update.expand(20, d)) + 10 < score(near.expand(20, d))).sum()) > 15
    moved = near.expand(20, d).clone().requires_grad_()
    (slope,) = torch.autograd.grad(score(moved).sum(), moved)
    assert int((slope @ update < 0).sum()) > 15
    ends = torch.stack([0 * update, 1e-30 * update, 1e30 * update]).requires_grad_()
    three = defense.likelihood(None, wires[:3], Links(setting_of(d), SENDERS[:1] * 3, None))(ends)
    assert bool(torch.isfinite(three).all())
    assert bool(torch.isfinite(torch.autograd.grad(three.sum(), ends)[0]).all())


def test_the_stated_distribution_has_a_loss_of_epsilon_between_any_two_directions():
    one, other = torch.tensor([0.6, 0.0, -0.8]), torch.tensor([0.6, 1e-4, -0.8])
    defense, ball = (PrivUnit(clip=1.0, epsilon=3.0, form=form) for form in ("direction", "ball"))
    laws = [distribution_of(defense, update) for update in (one, other, -one, 2 * one, 0 * one)]
    assert [laws[0].loss(law).pure for law in laws[1:4]] == pytest.approx([3.0, 3.0, 0.0], abs=1e-9)
    q = (1 - math.tanh(3 / 4)) / 2
    inside, outside = (math.exp(e) / (1 + math.expm1(3.0) * q) for e in (3.0, 0.0))
    assert laws[0].loss(laws[4]).pure == pytest.approx(max(math.log(inside), -math.log(outside)), rel=1e-9)
    half, full, reversed_ = (distribution_of(ball, update) for update in (0.5 * one, one, -0.5 * one))
    mixed = [0.75 * inside + 0.25 * outside, 0.25 * inside + 0.75 * outside]
    assert half.loss(full).pure == pytest.approx(math.log(mixed[1] / outside), rel=1e-6)
    assert half.loss(reversed_).pure == pytest.approx(math.log(mixed[0] / mixed[1]), rel=1e-6)
    assert half.loss(distribution_of(ball, 0.5 * other)).pure == pytest.approx(math.log(mixed[0] / outside), rel=1e-6)
    assert half.loss(laws[0]).pure == half.loss(full).pure
    assert half.loss(distribution_of(PrivUnit(epsilon=4.0), one)) is None


def test_the_branches_of_a_message_are_the_cap_and_the_rest():
    # the gain of the branches and the chance of the cap give epsilon
    law, u = distribution_of(PrivUnit(epsilon=3.0), torch.tensor([0.6, 0.0, -0.8])), torch.tensor([0.6, 0.0, -0.8])
    q = (1 - math.tanh(3 / 4)) / 2
    p = math.exp(3) * q / (1 + math.expm1(3) * q)
    within, without = law.branches(pack_float32(u)), law.branches(pack_float32(-u))
    assert (within.likelier, within.lesser) == (pytest.approx(-math.log(q)), -math.inf)
    assert (without.likelier, without.lesser) == (-math.inf, pytest.approx(-math.log(1 - q)))
    assert within.gain + float(special.logit(p)) == pytest.approx(3.0)


def test_a_cap_that_float32_does_not_resolve_states_no_distribution():
    u = torch.tensor([0.6, -0.8])
    assert distribution_of(PrivUnit(epsilon=60.0), u) is None
    assert distribution_of(PrivUnit(epsilon=8.0), u) is not None
    found = estimate(PrivUnit(epsilon=400.0), encode(PrivUnit(epsilon=400.0), u)[0], 2)
    assert found == pytest.approx(u, abs=1e-6)
    assert float(exact(PrivUnit(epsilon=400.0), [encode(PrivUnit(epsilon=400.0), u)[0]], u[None].double())) == 0.0


def test_messages_have_four_bytes_a_coordinate_and_others_are_refused():
    defense = PrivUnit(epsilon=4.0)
    wire = encode(defense, torch.ones(5))[0]
    assert len(wire) == 20
    for damaged, words in (
        (wire[:-1], "expected a message of 20 bytes"),
        (wire + b"\0", "expected a message of 20 bytes"),
        (pack_float32(torch.tensor([math.nan, 0, 0, 0, 0])), "expected a finite message"),
        (pack_float32(1.00001 * torch.eye(5)[0]), r"expected a vector of norm 1, got 1\.0000"),
        (bytes(20), "expected a vector of norm 1, got 0"),
    ):
        with pytest.raises(MessageError, match=words):
            estimate(defense, damaged, 5)
    with pytest.raises(DistributionError, match="a vector of norm 0, expected 1"):
        distribution_of(defense, torch.ones(5)).read(bytes(20), Key(0))


def test_privunit_claims_epsilon_a_message_at_delta_zero_and_it_holds():
    one, three = (PrivUnit(epsilon=2.0).claim([None] * rounds, setting_of(600)) for rounds in (1, 3))
    assert (one.unit, one.epsilon, one.delta) == (Unit.MESSAGE, 2.0, 0.0)
    assert judge(one).verdict is judge(three).verdict is Verdict.HOLDS
    assert judge(three).proved == three.epsilon == pytest.approx(6.0)
    assert one.proved.tight
    assert "rounds added up by us" in three.source


def test_another_form_is_refused():
    with pytest.raises(ValueError, match="expected form direction or ball, got form='norm'"):
        PrivUnit(form="norm")
    with pytest.raises(ValueError, match="expected epsilon > 0"):
        PrivUnit(epsilon=math.nan)
