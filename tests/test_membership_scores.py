"""Membership scores: golden numbers, reference loops, ties, missing values and divergence."""

import math
from statistics import NormalDist

import pytest
import torch

from leakgauge import Key, rng
from leakgauge.attacks._members.scores import confidence, fedmia, finite, lira_offline, lira_online, rmia
from leakgauge.harness.core.stats import auc

KEY = Key(0)
VARIANCES = ("pooled", "per-example", "global")


def column(*values):
    return torch.tensor(values, dtype=torch.float64)[:, None]


def f64(rows):
    return torch.tensor(rows, dtype=torch.float64)


# one record: phi under four shadows with it and four without it
TARGET = f64([2.5])
SHADOW = column(2, 3, 4, 5, -1, 0, 1, 0)
INSIDE = torch.arange(8)[:, None] < 4


def simulated(n, m, key=KEY, spread=1.5, gap=1.0):
    """Normal confidences of n records under a target and m shadows; half of the records are members.

    Each pair of shadows trains on complementary halves.
    """
    difficulty = spread * rng.normal(key.child("difficulty"), (n,), dtype=torch.float64)
    orders = rng.permutations(key.child("halves"), m // 2, n)
    first = torch.from_numpy(orders) < n // 2
    inside = torch.stack([first, ~first], 1).flatten(0, 1)
    member = torch.arange(n) % 2 == 0
    noise = rng.normal(key.child("noise"), (m + 1, n), dtype=torch.float64)
    phi = difficulty + gap * torch.cat([member[None], inside]) + noise
    return phi[0], phi[1:], inside, member


def area(scores, member):
    return auc(scores[member].numpy(), scores[~member].numpy()).value


def test_confidence_is_the_log_odds_of_the_label():
    assert confidence(f64([[2, 0, 0]]), torch.tensor([0])).item() == pytest.approx(1.3068528194, abs=1e-10)
    scores, y = rng.normal(KEY, (4, 7, 5), dtype=torch.float64), torch.arange(7) % 5
    p = scores.softmax(-1)[..., torch.arange(7), y]
    assert torch.allclose(confidence(scores, y), (p / (1 - p)).log(), atol=1e-12)


def test_confidence_does_not_saturate_where_the_probability_does():
    scores = torch.tensor([[60.0, 0.0], [80.0, 0.0], [0.0, 400.0]])
    assert scores.softmax(-1)[:2, 0].tolist() == [1.0, 1.0]
    assert confidence(scores, torch.zeros(3, dtype=torch.int64)).tolist() == [60.0, 80.0, -400.0]


def test_confidence_of_a_regression_is_refused():
    with pytest.raises(ValueError, match="expected scores of at least 2 classes, got a regression"):
        confidence(torch.zeros(3, 1), torch.zeros(3, dtype=torch.int64))


@pytest.mark.parametrize(
    ("variance", "online", "offline"),
    # two public implementations, computed by hand: with ddof = 0 and with ddof = 1
    [
        ("per-example", 5.3918546341, -0.0002034967),
        ("global", 5.3918546341, -0.0002034967),
        ("pooled", 3.9293546341, -0.0011004288),
    ],
)
def test_the_likelihood_ratio_of_one_point(variance, online, offline):
    assert lira_online(TARGET, SHADOW, INSIDE, variance).item() == pytest.approx(online, abs=1e-10)
    assert lira_offline(TARGET, SHADOW, INSIDE, variance).item() == pytest.approx(offline, abs=1e-10)


def test_the_pooled_variance_is_that_about_the_records_own_means():
    target, shadow, inside, _ = simulated(9, 6)
    inside = inside ^ (rng.uniform(KEY.child("more"), (6, 9)) < 0.3)
    inside[:2], inside[2:4] = True, False  # at least two shadows of each kind, so no side is missing
    sides, means = [], []
    for side in (inside, ~inside):
        total, degrees, mean = 0.0, 0, []
        for x in range(9):
            values = [shadow[i, x].item() for i in range(6) if side[i, x]]
            mean.append(sum(values) / len(values))
            total += sum((value - mean[-1]) ** 2 for value in values)
            degrees += len(values) - 1
        sides.append(math.sqrt(total / degrees))
        means.append(mean)
    expected = [
        math.log(NormalDist(means[0][x], sides[0]).pdf(target[x]))
        - math.log(NormalDist(means[1][x], sides[1]).pdf(target[x]))
        for x in range(9)
    ]
    assert lira_online(target, shadow, inside).numpy() == pytest.approx(expected, abs=1e-9)
    expected = [math.log(NormalDist(means[1][x], sides[1]).cdf(target[x])) for x in range(9)]
    assert lira_offline(target, shadow, inside).numpy() == pytest.approx(expected, rel=1e-9)


def test_with_four_shadows_a_records_own_variance_ruins_the_attack():
    # other tools use `per-example`; 40,000 records give a standard error of 0.003
    target, shadow, inside, member = simulated(40_000, 4)
    own, pooled = (area(lira_online(target, shadow, inside, how), member) for how in ("per-example", "pooled"))
    assert own < pooled - 0.05
    many = simulated(40_000, 64)
    own, pooled = (area(lira_online(*many[:3], how), many[3]) for how in ("per-example", "pooled"))
    assert own == pytest.approx(pooled, abs=0.01)


def test_shrunk_means_find_more_with_few_shadows_and_the_same_with_many():
    # the gap is larger for records that models find hard, as in trained models
    for m, gains in ((4, True), (64, False)):
        target, shadow, inside, member = simulated(20_000, m, gap=0.0)
        gap = 1 - 0.4 * shadow.mean(0, keepdim=True).clamp(-2, 2)
        target, shadow = target + gap[0] * member, shadow + gap * inside
        own, shrunk = (area(lira_online(target, shadow, inside, shrink=how), member) for how in (False, True))
        assert (shrunk > own + 0.02) if gains else shrunk == pytest.approx(own, abs=0.005)


def test_shrunk_means_of_many_shadows_are_their_own():
    target, shadow, inside, _ = simulated(50, 20_000)
    shadow = shadow + inside * rng.normal(KEY.child("gaps"), (50,))
    own, shrunk = (lira_online(target, shadow, inside, shrink=how) for how in (False, True))
    assert torch.allclose(own, shrunk, atol=0.02)
    # one record alone is not shrunk
    assert lira_online(TARGET, SHADOW, INSIDE, shrink=True) == lira_online(TARGET, SHADOW, INSIDE)


def test_a_record_without_shadows_inside_gets_the_mean_gap_of_the_others():
    shadow = f64([[3, 5, 9], [3, 5, 9], [1, 2, 4], [1, 2, 4]]) + f64([0.1, -0.1, 0.1, -0.1])[:, None]
    inside = torch.tensor([[1, 1, 0]] * 2 + [[0, 0, 0]] * 2, dtype=torch.bool)
    target = f64([3, 5, 9])
    found = lira_online(target, shadow, inside)
    # the first two have gaps of 2 and 3; the four shadows without the third have mean 6.5
    one, other = NormalDist(6.5 + 2.5, side_std(shadow, inside)), NormalDist(6.5, side_std(shadow, ~inside))
    assert found[2].item() == pytest.approx(math.log(one.pdf(9)) - math.log(other.pdf(9)), rel=1e-9)


def side_std(shadow, side):
    """The pooled standard deviation, by a loop."""
    columns = [shadow[side[:, x], x] for x in range(shadow.shape[1])]
    columns = [values for values in columns if len(values)]
    squares = sum(float((values - values.mean()).square().sum()) for values in columns)
    return math.sqrt(squares / sum(len(values) - 1 for values in columns))


@pytest.mark.parametrize("variance", VARIANCES)
@pytest.mark.parametrize("shrink", [False, True])
@pytest.mark.parametrize("m", [1, 2, 3])
def test_one_shadow_or_two_give_finite_scores(variance, shrink, m):
    target, shadow, inside, _ = simulated(30, 4)
    for scores in (
        lira_online(target, shadow[:m], inside[:m], variance, shrink=shrink),
        lira_offline(target, shadow[:m], inside[:m], variance),
    ):
        assert scores.isfinite().all()
        assert len(set(scores.tolist())) > 20


@pytest.mark.parametrize("variance", VARIANCES)
@pytest.mark.parametrize("shrink", [False, True])
def test_shadows_that_agree_exactly_give_finite_scores(variance, shrink):
    shadow, inside = torch.zeros(4, 5), torch.arange(4)[:, None].expand(4, 5) < 2
    scores = lira_online(f64([-1e6, -1, 0, 1, 1e30]), shadow, inside, variance, shrink=shrink)
    assert scores.tolist() == [0.0] * 5
    assert lira_offline(f64([-1e6, -1, 0, 1, 1e30]), shadow, inside, variance).isfinite().all()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_diverged_shadow_is_left_out_and_a_diverged_target_scores_lowest(bad):
    target, shadow, inside, _ = simulated(30, 8)
    broken = torch.cat([shadow, torch.full((1, 30), bad)])
    taken = torch.cat([inside, torch.ones(1, 30, dtype=torch.bool)])
    population = (f64([0.5]), f64([[0.5]] * 9))
    for score in (lira_online, lira_offline):
        assert torch.equal(score(target, broken, taken), score(target, shadow, inside))
        one = target.clone()
        one[3] = bad
        scores = score(one, shadow, inside)
        assert scores.isfinite().all()
        assert scores[3] == scores.min()
        assert len(set(score(torch.full_like(target, bad), shadow, inside).tolist())) == 1
    p = broken.sigmoid()
    p[-1] = bad
    found = rmia(target.sigmoid(), p, taken, *population)
    assert torch.equal(found, rmia(target.sigmoid(), shadow.sigmoid(), inside, population[0], population[1][:8]))
    assert len(set(rmia(torch.full_like(target, math.nan), p, taken, *population).tolist())) == 1


def test_nothing_to_compare_with_is_refused():
    inside = torch.ones(8, 1, dtype=torch.bool)
    for score, taken, where in (
        (lira_online, inside, "outside"),
        (lira_online, ~inside, "inside"),
        (lira_offline, inside, "outside"),
    ):
        with pytest.raises(ValueError, match=f"expected a finite value of a shadow for a record {where} its training"):
            score(TARGET, SHADOW, taken)


P_T = f64([0.9, 0.5])
P = f64([[0.95, 0.6], [0.85, 0.7], [0.3, 0.55], [0.5, 0.45]])
WITH = torch.tensor([[1, 1], [1, 1], [0, 0], [0, 0]], dtype=torch.bool)
Z_T = f64([0.2, 0.4, 0.6, 0.8])
Z = f64([[0.2, 0.5, 0.5, 0.9], [0.3, 0.3, 0.6, 0.8], [0.1, 0.4, 0.7, 0.7], [0.2, 0.4, 0.6, 0.6]])
NOBODY = (Z_T[:0], Z[:, :0])


@pytest.mark.parametrize(("offline_a", "ratios"), [(None, [1.38461538, 0.86956522]), (0.3, [0.9 / 0.61, 0.5 / 0.675])])
def test_the_ratios_of_two_records(offline_a, ratios):
    assert rmia(P_T, P, WITH, *NOBODY, offline_a=offline_a).exp().numpy() == pytest.approx(ratios, abs=5e-9)


@pytest.mark.parametrize(
    # the lower median of 1, 1, 1 and 16/15; and of 0.2 / 0.48, 0.4 / 0.61, 0.6 / 0.74 and 0.8 / 0.8375
    ("offline_a", "median"),
    [(None, 1.0), (0.3, 0.4 / 0.61)],
)
def test_the_population_shifts_all_scores_by_its_median(offline_a, median):
    with_it, without = (rmia(P_T, P, WITH, *who, offline_a=offline_a) for who in ((Z_T, Z), NOBODY))
    assert (without - with_it).numpy() == pytest.approx([math.log(median)] * 2, abs=1e-12)


def test_the_log_ratios_are_the_formula_record_by_record_and_have_no_ties():
    target, shadow, inside, _ = simulated(400, 8)
    p, q = target.sigmoid(), shadow.sigmoid()
    found = rmia(p, q, inside, p[:0], q[:, :0])
    means = [(q[inside[:, x], x].mean() + q[~inside[:, x], x].mean()) / 2 for x in range(400)]
    assert torch.allclose(found, (p / torch.stack(means)).log(), atol=1e-12)
    assert len(set(found.tolist())) == 400


def test_a_hopelessly_wrong_model_gives_finite_ratios():
    scores = rmia(f64([0.0, 1.0]), torch.zeros(2, 2), torch.tensor([[True] * 2, [False] * 2]), Z_T[:0], Z[:2, :0])
    assert scores.isfinite().all()
    assert scores[0] < scores[1]


OWN = column(0.30, 0.10)
OTHERS = f64([[0.02, 0.05, 0.03, 0.04], [0.06, 0.02, 0.08, 0.04]])[..., None]


def test_the_sum_over_two_rounds():
    each = [fedmia(OWN[t : t + 1], OTHERS[t : t + 1]).item() for t in range(2)]
    # the second round is (0.10 - 0.05) / sqrt(5e-4) = sqrt(5) deviations away
    assert each == pytest.approx([1.0, NormalDist().cdf(math.sqrt(5))], abs=1e-12)
    # a public code adds 1e-8 to the variance
    assert NormalDist().cdf(0.05 / math.sqrt(5e-4 + 1e-8)) == pytest.approx(0.9873256084, abs=1e-10)
    assert fedmia(OWN, OTHERS).item() == pytest.approx(1.9873256084, abs=1e-6)


def test_a_pooled_round_divides_all_records_by_one_deviation():
    own, others = rng.normal(KEY.child("own"), (3, 5)), rng.normal(KEY.child("others"), (3, 4, 5))
    expected = torch.zeros(5, dtype=torch.float64)
    for t in range(3):
        mean = others[t].double().mean(0)
        deviation = math.sqrt(sum(float((others[t, k].double() - mean).square().sum()) for k in range(4)) / 20)
        expected += (own[t].double() - mean) / deviation
    assert torch.allclose(fedmia(own, others, pooled=True), expected, rtol=1e-12)


@pytest.mark.parametrize("pooled", [False, True])
def test_rounds_and_clients_may_diverge(pooled):
    own, others = rng.normal(KEY.child("own"), (3, 5)), rng.normal(KEY.child("others"), (3, 4, 5))
    wild = torch.cat([others, torch.full((3, 1, 5), math.nan)], 1)
    assert torch.equal(fedmia(own, wild, pooled=pooled), fedmia(own, others, pooled=pooled))
    lost = torch.cat([own, torch.full((1, 5), math.inf)]), torch.cat([others, others[:1]])
    nothing = 0.0 if pooled else 0.5
    assert torch.allclose(fedmia(*lost, pooled=pooled), fedmia(own, others, pooled=pooled) + nothing)
    still = torch.ones(2, 5), torch.ones(2, 4, 5)
    assert fedmia(*still, pooled=pooled).tolist() == [2 * nothing] * 5


def test_permuting_the_records_permutes_the_scores():
    target, shadow, inside, _ = simulated(40, 6)
    order = torch.from_numpy(rng.permutation(KEY.child("order"), 40))
    population = (f64([0.3, 0.6]), torch.full((6, 2), 0.4, dtype=torch.float64))
    for how in VARIANCES:
        for shrink in (False, True):
            plain = lira_online(target, shadow, inside, how, shrink=shrink)
            moved = lira_online(target[order], shadow[:, order], inside[:, order], how, shrink=shrink)
            assert torch.allclose(plain[order], moved, atol=1e-9)
        plain = lira_offline(target, shadow, inside, how)
        assert torch.allclose(plain[order], lira_offline(target[order], shadow[:, order], inside[:, order], how))
    p, q = target.sigmoid(), shadow.sigmoid()
    plain = rmia(p, q, inside, *population)
    assert torch.allclose(plain[order], rmia(p[order], q[:, order], inside[:, order], *population))
    for pooled in (False, True):
        plain = fedmia(shadow[:2], shadow[None, 2:].expand(2, -1, -1), pooled=pooled)
        moved = fedmia(shadow[:2, order], shadow[None, 2:, order].expand(2, -1, -1), pooled=pooled)
        assert torch.allclose(plain[order], moved)


def test_a_score_that_is_not_finite_counts_as_the_lowest():
    assert finite(torch.tensor([1.0, math.nan, -2.0, math.inf])).tolist() == [1.0, -2.0, -2.0, -2.0]
    assert finite(torch.tensor([math.nan, math.inf])).tolist() == [0.0, 0.0]
