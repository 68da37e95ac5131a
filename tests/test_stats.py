"""Intervals against exact coverage, printed values and simulated coverage."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats as scipy_stats

from leakgauge.harness.core import stats
from leakgauge.harness.core.rng import Key, normal
from tests.by_rows import by_rows

ROOT = Key(20240607, ("test_stats",))
ALPHA = BETA = 1e-6
MEMBERS = np.array([0.9, 0.8, 0.7, 0.4, 0.2])
NONMEMBERS = np.array([0.75, 0.5, 0.3, 0.1, 0.0])

CASES = 3000
"""Simulated data sets behind each coverage test."""


def fewest(coverage, cases=CASES):
    """The fewest hits of `cases` that an interval of this coverage reaches, but for a false alarm of ALPHA."""
    return int(scipy_stats.binom.ppf(ALPHA, cases, coverage))


def hits(true, interval, cases=CASES):
    """In how many cases the interval holds the true value."""
    found = 0
    for case in range(cases):
        low, high = interval(case)
        found += low is not None and high is not None and low <= true <= high
    return found


def ends(estimate):
    return estimate.low, estimate.high


def draws(name, n, cases=CASES):
    """[cases, n] standard normal numbers."""
    return normal(ROOT.child(name), (cases, n)).numpy().astype(np.float64)


def test_the_coverage_tests_see_a_coverage_of_ninety_per_cent():
    # false alarm 1e-6 at coverage .95, miss 1e-6 at .90; at .94, .885
    assert scipy_stats.binom.cdf(fewest(0.95) - 1, CASES, 0.95) <= ALPHA
    assert scipy_stats.binom.sf(fewest(0.95) - 1, CASES, 0.90) <= BETA
    assert scipy_stats.binom.sf(fewest(0.94) - 1, CASES, 0.885) <= BETA


@pytest.mark.parametrize(("successes", "n"), [(0, 1), (1, 1), (0, 30), (3, 10), (29, 30), (500, 1000)])
@pytest.mark.parametrize("level", [0.9, 0.95, 0.999])
def test_clopper_pearson_inverts_the_two_binomial_tails(successes, n, level):
    low, high = stats.clopper_pearson(successes, n, level)
    tail = (1 - level) / 2
    below, above = scipy_stats.binom.sf(successes - 1, n, low), scipy_stats.binom.cdf(successes, n, high)
    assert low == 0 if successes == 0 else below == pytest.approx(tail, rel=1e-9)
    assert high == 1 if successes == n else above == pytest.approx(tail, rel=1e-9)


def covered(n, p, low, high):
    """Exact coverage of a proportion p by the intervals [low_k, high_k] of k = 0..n successes."""
    return float(scipy_stats.binom.pmf(np.arange(n + 1), n, p)[(low <= p) & (p <= high)].sum())


@pytest.mark.parametrize("n", [1, 8, 50])
def test_clopper_pearson_covers_every_true_proportion(n):
    low, high = np.array([stats.clopper_pearson(k, n) for k in range(n + 1)]).T
    assert min(covered(n, p, low, high) for p in np.linspace(0, 1, 501)) >= 0.95 - 1e-12


def test_twin_the_interval_of_wald_is_found_out():
    n, k = 50, np.arange(51)
    half = 1.96 * np.sqrt(k / n * (1 - k / n) / n)
    assert min(covered(n, p, k / n - half, k / n + half) for p in np.linspace(0.01, 0.99, 99)) < 0.5


@pytest.mark.parametrize(("successes", "n", "level"), [(-1, 5, 0.95), (6, 5, 0.95), (0, 0, 0.95), (1, 2, 1.0)])
def test_clopper_pearson_refuses_the_impossible(successes, n, level):
    with pytest.raises(ValueError, match="expected 0 <"):
        stats.clopper_pearson(successes, n, level)


def test_student_interval_has_the_closed_form():
    # three values 1, 2, 3: sd 1, t_{2, .975} = 4.302653 (any t table)
    low, high = stats.mean_interval([1.0, 2.0, 3.0])
    assert (low, high) == pytest.approx((2 - 4.302653 / math.sqrt(3), 2 + 4.302653 / math.sqrt(3)), abs=3e-7)


@pytest.mark.parametrize(("values", "expected"), [([], (None, None)), ([0.3], (None, None)), ([0.5] * 3, (0.5, 0.5))])
def test_fewer_than_two_values_have_no_interval_and_equal_ones_a_width_of_zero(values, expected):
    assert stats.mean_interval(values) == expected


def test_student_interval_covers_the_mean():
    x = draws("student", 4)
    assert hits(0.0, lambda case: stats.mean_interval(x[case])) >= fewest(0.95)


def test_twin_a_normal_quantile_in_place_of_student_is_found_out():
    x = draws("student", 4)
    half = 1.96 * x.std(axis=1, ddof=1) / 2
    assert hits(0.0, lambda case: (x[case].mean() - half[case], x[case].mean() + half[case])) < fewest(0.95)


@pytest.mark.parametrize(("n", "rank"), [(5, None), (6, 1), (8, 1), (9, 2), (10, 2), (15, 4), (20, 6), (100, 40)])
def test_median_interval_has_the_ranks_of_the_sign_test(n, rank):
    # tables of the sign test at 5 %, two-sided
    expected = (None, None) if rank is None else (float(rank), float(n + 1 - rank))
    assert stats.median_interval(np.arange(n, 0, -1)) == expected


@pytest.mark.parametrize("n", [6, 9, 33, 200])
@pytest.mark.parametrize("level", [0.9, 0.95])
def test_median_interval_covers_and_the_next_narrower_does_not(n, level):
    low, _ = stats.median_interval(np.arange(1, n + 1), level)
    assert low is not None
    # the interval misses if fewer than `low` values lie on one side of the median
    assert 1 - 2 * scipy_stats.binom.cdf(low - 1, n, 0.5) >= level
    assert 1 - 2 * scipy_stats.binom.cdf(low, n, 0.5) < level


def test_median_interval_covers_the_median_of_a_skewed_distribution():
    x = np.exp(2 * draws("median", 20))
    assert hits(1.0, lambda case: stats.median_interval(x[case])) >= fewest(0.95)


def test_twin_one_rank_further_in_is_found_out():
    # ranks 7 and 14 of 20 cover .885; the test needs .94 to pass
    x = np.sort(np.exp(2 * draws("median", 20)), axis=1)
    assert hits(1.0, lambda case: (x[case, 6], x[case, 13])) < fewest(0.95)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_an_interval_of_what_is_not_finite_is_refused(bad):
    with pytest.raises(ValueError, match="1 not finite"):
        stats.mean_interval([0.0, bad])


def test_a_proportion_of_nothing_has_no_value():
    found = stats.proportion("recognized", 0, 0, note="8 of 8 victims failed")
    assert (found.value, found.low, found.high, found.n) == (None, None, None, 0)
    assert found.note == "no item to judge; 8 of 8 victims failed"


@pytest.mark.parametrize("kind", [stats.mean, stats.median])
def test_a_failed_item_is_kept_in_the_values_and_left_out_of_the_number(kind):
    found = kind("ssim", [1.0, None, 3.0])
    assert (found.value, found.n, found.values) == (2.0, 2, (1.0, None, 3.0))
    found = kind("mse", [None, None], note="2 of 2 victims failed")
    assert (found.value, found.low, found.high, found.n) == (None, None, None, 0)
    assert found.note == "no item finished; 2 of 2 victims failed"


def test_roc_statistics_have_the_golden_values():
    curve = stats.roc(MEMBERS, NONMEMBERS)
    assert stats.auc(MEMBERS, NONMEMBERS).value == pytest.approx(0.76, abs=1e-12)
    assert curve.tpr[curve.fpr <= 0].max() == pytest.approx(0.4, abs=1e-12)
    assert curve.tpr[curve.fpr <= 0.2].max() == pytest.approx(0.6, abs=1e-12)
    assert stats.tpr_at_fpr(MEMBERS, NONMEMBERS, 0.2).value == pytest.approx(0.6, abs=1e-12)
    assert stats.balanced_accuracy(MEMBERS, NONMEMBERS).value == pytest.approx(0.70, abs=1e-12)


def test_ties_are_one_step_of_the_curve():
    fpr, tpr = stats.roc(np.array([1.0, 1.0, 0.0]), np.array([1.0, 0.0]))
    assert fpr.tolist() == [0, 0.5, 1]
    assert tpr.tolist() == [0, 2 / 3, 1]


scores = st.lists(st.integers(0, 6).map(float), min_size=1, max_size=12).map(np.array)


@settings(deadline=None)
@given(scores, scores)
def test_auc_is_the_area_under_the_curve_and_the_share_of_ordered_pairs(members, nonmembers):
    value = stats.auc(members, nonmembers).value
    pairs = np.sign(members[:, None] - nonmembers[None, :]) / 2 + 0.5
    fpr, tpr = stats.roc(members, nonmembers)
    assert value == pytest.approx(pairs.mean(), abs=1e-12)
    assert value == pytest.approx(np.trapezoid(tpr, fpr), abs=1e-12)


@settings(deadline=None)
@given(scores, scores)
def test_an_attack_turned_round_has_one_minus_the_auc(members, nonmembers):
    straight, turned = stats.auc(members, nonmembers), stats.auc(-members, -nonmembers)
    assert turned.value == pytest.approx(1 - straight.value, abs=1e-12)
    assert turned.low == pytest.approx(1 - straight.high, abs=1e-9)
    assert 0 <= straight.low <= straight.value <= straight.high <= 1


@settings(deadline=None)
@given(scores, scores, st.floats(0, 0.99))
def test_tpr_is_read_off_the_curve_and_its_threshold_respects_the_fpr(members, nonmembers, fpr):
    found = stats.tpr_at_fpr(members, nonmembers, fpr)
    curve = stats.roc(members, nonmembers)
    if found.value is None:
        assert fpr * len(nonmembers) < 1
    else:
        assert found.value == pytest.approx(curve.tpr[curve.fpr <= fpr + 1e-9].max(), abs=1e-12)


def test_delong_interval_has_the_closed_form():
    members = [1.0, 1.0, 0.8, 0.6, 0.4]  # share of the non-members below each
    nonmembers = [0.4, 0.6, 0.8, 1.0, 1.0]  # share of the members above each
    half = 1.959964 * math.sqrt((np.var(members, ddof=1) + np.var(nonmembers, ddof=1)) / 5) / (0.76 * 0.24)
    center = math.log(0.76 / 0.24)
    expected = [1 / (1 + math.exp(-(center + sign * half))) for sign in (-1, 1)]
    assert ends(stats.auc(MEMBERS, NONMEMBERS)) == pytest.approx(expected, abs=1e-7)


@pytest.mark.parametrize("sides", [(1, 1), (5, 5), (30, 3)])
def test_a_perfect_attack_does_not_have_a_certain_auc(sides):
    found = stats.auc(np.ones(sides[0]), np.zeros(sides[1]))
    n = min(sides)
    # Wilson at share 1: n / (n + z^2)
    assert (found.value, found.high) == (1.0, 1.0)
    assert found.low == pytest.approx(n / (n + 1.959964**2), abs=1e-6)


@pytest.mark.parametrize("shift", [0.0, 1.0])
def test_auc_interval_covers(shift):
    # DeLong is asymptotic: .94 at 50 a side
    members, others = draws("members", 50) + shift, draws("others", 50)
    true = scipy_stats.norm.cdf(shift / math.sqrt(2))
    assert hits(true, lambda case: ends(stats.auc(members[case], others[case]))) >= fewest(0.94)


def test_twin_pairs_taken_as_independent_are_found_out():
    members, others = draws("members", 50), draws("others", 50)
    half = 1.96 * math.sqrt(0.25 / 50**2)

    def wrong(case):
        value = stats.auc(members[case], others[case]).value
        return value - half, value + half

    assert hits(0.5, wrong) < fewest(0.94)


def test_tpr_interval_covers_the_share_at_its_threshold():
    members, others = draws("members", 50) + 1, draws("others", 100)
    found = [stats.tpr_at_fpr(members[case], others[case], 0.05) for case in range(CASES)]
    threshold = np.sort(others, axis=1)[:, -6]
    true = scipy_stats.norm.sf(threshold - 1)
    assert sum(e.low <= t <= e.high for e, t in zip(found, true, strict=True)) >= fewest(0.95)


@by_rows((0.01, 99, False), (0.01, 100, True), (0.001, 999, False), (0, 9, False))
def test_a_tpr_that_rests_on_less_than_one_nonmember_is_not_available(fpr, n, defined):
    found = stats.tpr_at_fpr(np.arange(10.0), np.arange(float(n)), fpr)
    assert (found.value is not None) is defined
    assert defined or found.note == f"n/a: {100 * fpr:g} % of {n} non-members is less than one record"


def test_a_threshold_is_not_lost_to_rounding():
    # 0.29 * 100 is 28.999999999999996 in floating point
    assert stats.tpr_at_fpr(np.zeros(4), np.arange(100.0), 0.29).note == "29 of 100 non-members above the threshold"
    assert stats.tpr_at_fpr(np.zeros(4), np.zeros(3), 1 - 1e-12).value == 0.0


def test_tpr_has_the_clopper_pearson_interval_of_the_members_and_is_named_in_per_cent():
    found = stats.tpr_at_fpr(MEMBERS, NONMEMBERS, 0.2)
    assert ends(found) == stats.clopper_pearson(3, 5)
    assert (found.name, found.n) == ("tpr@20%", 5)
    assert stats.tpr_at_fpr(MEMBERS, NONMEMBERS, 0.001).name == "tpr@0.1%"


@pytest.mark.parametrize("shift", [0.0, 1.0])
@pytest.mark.parametrize("level", [0.8, 0.95])
def test_balanced_accuracy_interval_covers_the_best_of_the_population(shift, level):
    members, others = draws("members", 50, 500) + shift, draws("others", 50, 500)
    true = scipy_stats.norm.cdf(shift / 2)
    found = hits(true, lambda case: ends(stats.balanced_accuracy(members[case], others[case], level=level)), 500)
    assert found >= fewest(level, 500)


def test_twin_a_binomial_interval_around_the_best_threshold_is_found_out():
    # at chance the best of all thresholds is well above 0.5; 500 cases tell a coverage of .6 from .8
    assert scipy_stats.binom.sf(fewest(0.8, 500) - 1, 500, 0.6) <= BETA
    members, others = draws("members", 50, 500), draws("others", 50, 500)

    def wrong(case):
        value = stats.balanced_accuracy(members[case], others[case]).value
        return stats.clopper_pearson(round(value * 100), 100, 0.8)

    assert hits(0.5, wrong, 500) < fewest(0.8, 500)


def test_balanced_accuracy_is_never_below_chance():
    assert stats.balanced_accuracy(np.zeros(5), np.ones(5)).value == 0.5
    assert "optimistic" in stats.balanced_accuracy(MEMBERS, NONMEMBERS).note


def test_an_attack_at_chance_has_an_auc_on_both_sides_of_a_half():
    # a hidden absolute value would lift every one to 0.5 or more; by chance 40 do so with probability 2^-40
    members, others = draws("null-members", 30, 40), draws("null-others", 30, 40)
    values = [stats.auc(m, n).value for m, n in zip(members, others, strict=True)]
    assert min(values) < 0.5 < max(values)


@pytest.mark.parametrize("members", [np.array([]), np.array([math.nan])])
def test_scores_of_one_side_or_not_finite_are_refused(members):
    for statistic in (stats.auc, stats.balanced_accuracy, stats.roc, lambda m, n: stats.tpr_at_fpr(m, n, 0.5)):
        with pytest.raises(ValueError, match=r"0 members and 5 non-members|1 not finite"):
            statistic(members, NONMEMBERS)


def test_every_leak_statistic_says_that_higher_leaks_more():
    for found in (stats.auc, stats.balanced_accuracy, lambda m, n: stats.tpr_at_fpr(m, n, 0.2)):
        assert found(MEMBERS, NONMEMBERS).higher_leaks is True


@pytest.mark.parametrize("size", [1, 4])
def test_intervals_over_batches_cover_where_those_over_items_do_not(size):
    batches, shared = 6, draws("batches", 6)
    values = 0.4 * shared[:, :, None] + 0.1 * draws("items", 6 * size).reshape(CASES, 6, size)
    each = [stats.mean("psnr", case.flatten().tolist()) for case in values]
    over = [stats.over_batches(estimate, [size] * batches) for estimate in each]
    assert hits(0.0, lambda case: ends(over[case])) >= fewest(0.95)
    assert (hits(0.0, lambda case: ends(each[case])) < fewest(0.90)) == (size > 1)
    assert (over == each) == (size == 1)


def test_batches_of_equal_sizes_have_students_interval_of_their_means_also_pooled():
    one, other = ([[0.1, 0.3], [0.4, 0.6], [0.2, 0.4]], [[0.3, 0.3], [0.5, 0.1]])
    alone = [stats.over_batches(stats.mean("ssim", np.ravel(x).tolist()), [2] * len(x)) for x in (one, other)]
    assert ends(alone[0]) == pytest.approx(stats.mean_interval([0.2, 0.5, 0.3]))
    assert alone[0].method == "Student t over 3 batches"
    pooled = stats.pool(alone)
    assert ends(pooled) == pytest.approx(stats.mean_interval([0.2, 0.5, 0.3, 0.3, 0.3]))
    assert (pooled.n, pooled.method) == (10, "Student t over 5 batches")


def test_a_share_of_no_item_of_some_batches_has_the_interval_of_no_batch():
    none = stats.over_batches(stats.proportion("success", 0, 8, values=[0.0] * 8), [2] * 4)
    assert ends(none) == stats.clopper_pearson(0, 4)
    failed = stats.over_batches(stats.mean("ssim", [None, None, 0.2, 0.4, 0.1, 0.3]), [2] * 3)
    assert failed.method == "Student t over 2 batches"
