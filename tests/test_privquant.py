"""PrivQuant against reference tables, exact counting, enumeration, then its sampler's distributions.

A printed value was derived from the sqSGD paper by an independent script; tolerances follow from its digits.
"""

import dataclasses
import itertools
import math
import re

import numpy as np
import pytest
import torch
from scipy import stats
from torch.nn.functional import normalize, pad

from leakgauge import Key, pack_levels, rng
from leakgauge.defenses import _privquant
from leakgauge.defenses._privquant import Matched, PrivQuant, choose, levels_to_values, round_levels
from leakgauge.harness.core.distribution import DistributionError
from tests.by_rows import by_rows
from tests.oracles import ALPHA, coordinate_product

"""False-alarm rate of every statistical test in this file."""
PQ = PrivQuant(4, 3, 3, 1.0)


def channel(d, levels, kappa, p):
    """The channel by the paper's parameters; tau = ceil((d + kappa + 1) / 2)."""
    return PrivQuant(d, levels, -(-(d + kappa + 1) // 2), math.log(p / (1 - p)))


def grid(d, levels):
    """[levels^d, d]: every level vector, the last coordinate fastest."""
    return torch.tensor(list(itertools.product(range(levels), repeat=d)))


def distribution(pq, everything):
    """[inputs, outputs]: P(V | u) by its definition."""
    few, many = torch.tensor(chances(pq), dtype=torch.float64)
    return torch.where((everything[:, None] == everything[None]).sum(-1) >= pq.tau, many, few)


def chances(pq):
    """P(V | u) with fewer than tau matches, and with more."""
    fewer, matching = counts(pq.d, pq.levels, pq.tau)
    return math.exp(pq.log_rest) / fewer, -math.expm1(pq.log_rest) / matching


def counts(d, levels, tau):
    """N_lo and N_hi, as integers."""
    fewer, weight = 0, (levels - 1) ** d
    for k in range(tau):
        fewer, weight = fewer + weight, weight * (d - k) // ((k + 1) * (levels - 1))
    return fewer, levels**d - fewer


GOLDEN = [  # printed: d, K, kappa, p, tau, N_hi, N_lo, m, epsilon; N of the last four: counted by hand
    (3, 2, 0, 0.8, 2, 4, 4, 3 / 10, math.log(4)),
    (4, 3, 0, 0.6, 3, 9, 72, 11 / 30, math.log(12)),
    (4, 4, -2, 0.8, 2, 67, 189, 689 / 2345, math.log(756 / 67)),
    (5, 4, 2, 0.95, 4, 16, 1008, 299 / 420, math.log(1197)),
    (2, 2, 0, 0.7, 2, 1, 3, 0.6, 1.945910),
    (3, 2, 1, 0.9, 3, 1, 7, 0.88571429, 4.143135),
    (5, 3, -3, 0.75, 2, 131, 112, 0.11177754, 0.941914),
    (6, 3, -4, 0.9, 2, 473, 256, 0.12096987, 1.583307),
]
EDGES = [(3, 4, -3, 0.9), (4, 3, 3, 0.5), (1, 5, 0, 0.6), (4, 2, -4, 0.97)]  # tau = 1; tau = d; d = 1; K = 2, tau = 1
every_small = pytest.mark.parametrize(("d", "levels", "kappa", "p"), [row[:4] for row in GOLDEN] + EDGES)


@pytest.mark.parametrize("row", GOLDEN)
def test_golden_values(row):
    d, levels, kappa, p, tau, matching, fewer, normalizer, epsilon = row
    pq, exact = channel(d, levels, kappa, p), row in GOLDEN[:4]
    assert pq.tau == tau
    assert counts(d, levels, tau) == (fewer, matching)
    assert pq.normalizer == pytest.approx(normalizer, rel=0, abs=1e-14 if exact else 0.5e-8)
    assert pq.epsilon == pytest.approx(epsilon, rel=0, abs=1e-14 if exact else 0.5e-6)


# printed: d, K, epsilon, kappa, tau, ln ratio, true epsilon, m
TABLE = [
    (512, 2, 400, 511, 512, 354.891, 394.891, "1.000000"),
    (512, 8, 400, 129, 321, 358.024, 398.024, "0.573867"),
    (512, 16, 200, -165, 174, 179.241, 199.241, "0.296140"),
    (512, 16, 300, -85, 214, 267.832, 297.832, "0.379378"),
    (512, 16, 400, -13, 250, 358.579, 398.579, "0.454322"),
    (512, 32, 400, -117, 198, 357.816, 397.816, "0.367044"),
    (8192, 2, 2000, 5213, 6703, 1799.017, 1999.017, "0.636544"),
    (8192, 8, 2000, -1853, 3170, 1799.777, 1999.777, "0.299427"),
    (8192, 16, 1000, -4873, 1660, 899.209, 999.209, "0.149525"),
    (8192, 16, 2000, -3707, 2243, 1798.529, 1998.529, "0.225419"),
    (8192, 16, 3000, -2747, 2723, 2698.254, 2998.254, "0.287911"),
    (8192, 32, 2000, -4909, 1642, 1798.781, 1998.781, "0.174666"),
    (8192, 128, 2000, -6245, 974, 1798.935, 1998.935, "0.111966"),
    (1024, 16, 2000, 625, 825, 1799.402, 1999.402, "0.792725"),
    (65536, 16, 2000, -48963, 8287, 1799.711, 1999.711, "0.0682268"),
    (131072, 16, 400, -109813, 10630, 359.803, 399.803, "0.01986555"),
]


@pytest.mark.parametrize("row", TABLE, ids=lambda row: f"d{row[0]}-K{row[1]}-eps{row[2]}")
def test_the_table_of_settings(row):
    d, levels, epsilon, kappa, tau, log_ratio, true_epsilon, normalizer = row
    pq = choose(d, levels, float(epsilon))
    assert (2 * pq.tau - d - 1, pq.tau) == (kappa, tau)
    assert pq.epsilon - pq.logit == pytest.approx(log_ratio, abs=0.5e-3 + 1e-9)
    assert pq.epsilon == pytest.approx(true_epsilon, abs=0.5e-3 + 1e-9)
    assert pq.normalizer == pytest.approx(float(normalizer), abs=0.5 * 10.0 ** -len(normalizer.partition(".")[2]))


@pytest.mark.parametrize(("d", "levels", "epsilon"), [(512, 16, 400.0), (8192, 2, 2000.0), (8192, 128, 2000.0)])
def test_logs_of_counts_and_the_normalizer_agree_with_integer_arithmetic(d, levels, epsilon):
    pq = choose(d, levels, epsilon)
    fewer, matching = counts(d, levels, pq.tau)
    assert pq.epsilon == pytest.approx(pq.logit + math.log(fewer) - math.log(matching), rel=1e-13)
    share = math.comb(d - 1, pq.tau - 1) * (levels - 1) ** (d - pq.tau) / matching  # p is 1 to 4e-18 here
    assert pq.normalizer == pytest.approx(share, rel=1e-12)


@by_rows((512, 16, "377.40"), (8192, 16, "5949.98"), (512, 32, "547.22"), (8192, 8, "3392.6"))
def test_at_kappa_zero_the_settings_of_the_paper_cost_more_than_its_budget(d, levels, log_ratio):
    pq = PrivQuant(d, levels, -(-(d + 1) // 2), 0.0)
    assert pq.epsilon == pytest.approx(float(log_ratio), abs=0.5 * 10.0 ** -len(log_ratio.partition(".")[2]))


@every_small
def test_probabilities_sum_to_one_differ_by_exactly_e_to_the_epsilon_and_leave_no_bias(d, levels, kappa, p):
    pq = channel(d, levels, kappa, p)
    exact = distribution(pq, grid(d, levels))
    assert torch.allclose(exact.sum(1), torch.ones(levels**d, dtype=torch.float64), rtol=1e-12)
    assert math.exp(pq.log_rest) == pytest.approx(1 - p, rel=1e-12)
    worst = (exact.amax(0) / exact.amin(0)).log()
    assert worst.tolist() == pytest.approx([pq.epsilon] * levels**d, rel=1e-12)
    values = levels_to_values(grid(d, levels), 2.5, levels)
    assert torch.allclose(exact @ values / pq.normalizer, values, atol=1e-12)


def outputs(pq, u, n):
    return torch.stack([pq.privatize(u, Key(7).child("draw", i)) for i in range(n)])


@by_rows((3, 2, [0, 2, 1], 8_500), (2, 2, [1, 0, 1], 6_500), (3, 1, [2, 0], 7_000), (4, 2, [3, 1], 7_500))
@pytest.mark.matrix
def test_the_sampler_has_the_enumerated_distribution(levels, tau, u, n):
    # alpha 1e-6, and 1e-6 for missing a p that is 6 % off: n follows from the noncentral chi-square
    d = len(u)
    matches = (grid(d, levels) == torch.tensor(u)).sum(1).numpy()
    fewer, matching = counts(d, levels, tau)
    right, other = (n * np.where(matches >= tau, p / matching, (1 - p) / fewer) for p in (0.8, 1.06 * 0.8))
    freedom = levels**d - 1
    effect = ((right - other) ** 2 / other).sum()
    assert stats.ncx2.cdf(stats.chi2.isf(ALPHA, freedom), freedom, effect) < 1e-6
    sent = outputs(PrivQuant(d, levels, tau, math.log(4)), torch.tensor(u), n)
    seen = np.bincount((sent * levels ** torch.arange(d - 1, -1, -1)).sum(1), minlength=levels**d)  # in grid's order
    assert stats.chisquare(seen, right).pvalue > ALPHA
    assert stats.chisquare(seen, other).pvalue < ALPHA


@pytest.mark.parametrize(("d", "levels", "tau"), [(512, 16, 35), (512, 16, 250), (64, 2, 30), (6, 3, 2)])
def test_the_number_of_matches_is_the_inverse_of_its_exact_distribution(d, levels, tau):
    pq = PrivQuant(d, levels, tau, 20.0)
    weights = [math.comb(d, k) * (levels - 1) ** (d - k) for k in range(d + 1)]
    total = {True: sum(weights[:tau]), False: sum(weights[tau:])}
    for k in range(d + 1):  # at most k of those below tau, at least k of the others
        tail = sum(weights[: k + 1]) if k < tau else sum(weights[k:])
        log_chance = math.log(tail) - math.log(total[k < tau])
        if -110 < log_chance < -1e-9:
            assert pq._matches(k < tau, log_chance - 1e-10) == k
            assert pq._matches(k < tau, log_chance + 1e-10) == (k + 1 if k < tau else k - 1)


@pytest.mark.parametrize("large", [rng.LARGE, 2**10], ids=["by a permutation", "by a subset"])
def test_matches_lie_anywhere_and_the_other_coordinates_are_uniform_over_the_other_levels(large, monkeypatch):
    # one message of 2^17 coordinates, 120,000 of them without a match. Alpha 1e-6; the twins move 9 % of one of fifteen
    # levels to the next (chi-square 130 on 14 degrees of freedom), and 12 % of the matches to every other of 64 blocks
    monkeypatch.setattr(rng, "LARGE", large)
    pq, u = choose(2**17, 16, 400.0), torch.from_numpy(rng.integers(Key(4), 2**17, 16))
    sent = pq.privatize(u, Key(5))
    shift = np.bincount((sent - u).remainder(16), minlength=16)
    blocks = (sent == u).reshape(64, -1).sum(1).numpy()
    assert shift[0] == blocks.sum() >= pq.tau
    moved, tilted = shift[1:] + np.array([-720, 720] + [0] * 13), blocks * np.tile([1.12, 0.88], 32)
    for counted, twin in [(shift[1:], moved), (blocks, tilted)]:
        assert stats.chisquare(counted).pvalue > ALPHA
        assert stats.chisquare(twin).pvalue < ALPHA


def log_uniform(*digits):
    return _privquant._log_uniform(torch.tensor(digits, dtype=torch.float64))


def test_chances_are_drawn_to_159_bits():
    for digits, number in [((0.25, 0, 0), 2**-2), ((0, 0.5, 0), 2**-54), ((0, 2**-53, 0.75), 1.75 * 2**-106)]:
        assert log_uniform(*digits) == pytest.approx(math.log(number), rel=1e-15)
    assert log_uniform(*[0] * _privquant._DIGITS) == pytest.approx(-160 * math.log(2), rel=1e-15)
    # epsilon = 400 takes the lesser branch with probability 4.25e-18, between 2^-58 and 2^-57, below one digit
    below, above = (log_uniform(0, 2.0**-n, 0) for n in (5, 4))
    assert below < choose(512, 2, 400.0).log_rest < above < math.log(2**-53)


def test_at_epsilon_400_one_bit_is_the_identity_and_the_lesser_branch_is_known():
    pq, u = choose(512, 2, 400.0), torch.from_numpy(rng.integers(Key(1), 512, 2))
    assert (pq.tau, pq.normalizer) == (512, 1.0)
    assert math.exp(pq.log_rest) == pytest.approx(4.25e-18, abs=0.005e-18)
    assert torch.equal(outputs(pq, u, 50), u.expand(50, -1))
    pq = choose(512, 16, 400.0)
    assert 1 / (1 + math.exp(-pq.logit)) == 1.0
    assert pq.log_rest == pytest.approx(-pq.logit, rel=1e-15)
    assert math.exp(choose(8192, 16, 2000.0).log_rest) == pytest.approx(1.4e-87, abs=0.05e-87)


def test_the_cuts_of_the_work_change_nothing(monkeypatch):
    pq, x = choose(512, 16, 400.0), rng.normal(Key(1), (512,))
    levels = round_levels(x, 1.0, 16, Key(2))
    sent = pq.privatize(levels, Key(3))
    monkeypatch.setattr(_privquant, "_BLOCK", 77)
    assert torch.equal(round_levels(x, 1.0, 16, Key(2)), levels)
    assert torch.equal(pq.privatize(levels, Key(3)), sent)


def test_the_key_decides_and_the_input_is_not_modified():
    pq, u = choose(512, 16, 400.0), torch.from_numpy(rng.integers(Key(1), 512, 16))
    before, sent = u.clone(), pq.privatize(u, Key(2))
    assert torch.equal(pq.privatize(u.to(torch.int16), Key(2)), sent)
    assert not torch.equal(pq.privatize(u, Key(3)), sent)
    assert torch.equal(u, before)


@pytest.mark.parametrize(("d", "levels", "tau"), [(1, 2, 1), (1, 9, 1), (6, 5, 1), (6, 5, 6), (6, 2, 6)])
def test_at_the_edges_both_branches_are_drawn_and_stay_inside(d, levels, tau):
    # 200 draws miss a branch of chance 0.076 with probability 1.4e-7
    u = torch.arange(d) % levels
    sent = outputs(PrivQuant(d, levels, tau, 2.5), u, 200)
    assert 0 <= sent.min() <= sent.max() < levels
    assert set(((sent == u).sum(1) >= tau).tolist()) == {True, False}


@pytest.mark.parametrize(("chance", "value"), [(0.1, 0.5), (0.59, 0.5), (0.61, 0.0)])
def test_golden_rounding(chance, value):
    x, drawn = (torch.tensor([number], dtype=torch.float64) for number in (0.3, chance))
    assert levels_to_values(_privquant._round_by(x, 1.0, 5, drawn), 1.0, 5).tolist() == [value]


@pytest.mark.parametrize("levels", [2, 3, 5, 16, 128])
@pytest.mark.parametrize("bound", [1.0, 10.0, 0.1, 1 / 3])
def test_values_are_symmetric_and_a_value_on_a_level_stays_there(levels, bound):
    index = torch.arange(levels)
    values = levels_to_values(index, bound, levels)
    assert torch.equal(values, -values.flip(0))
    assert (values[0], values[-1]) == (-bound, bound)
    assert values.diff().tolist() == pytest.approx([2 * bound / (levels - 1)] * (levels - 1), rel=1e-12)
    # a value that is off its level by a rounding error leaves it once in 10^15 draws at most
    for chance in (1e-12, 1 - 1e-12):
        drawn = torch.tensor(chance, dtype=torch.float64)
        assert torch.equal(_privquant._round_by(values, bound, levels, drawn), index)


def test_rounding_clamps_what_lies_outside_and_keeps_the_rest_between_its_neighbors():
    x = torch.tensor([[-1e9, -2.0, -1.0, 0.1], [1.0, 1.0000001, 3.0, 0.2]])
    for seed in range(20):
        level = round_levels(x, 1.0, 16, Key(seed))
        assert (level.dtype, level[0, :3].tolist(), level[1, :3].tolist()) == (torch.int64, [0, 0, 0], [15, 15, 15])
        assert (levels_to_values(level, 1.0, 16) - x)[:, 3].abs().max() < 2 / 15


def test_rounding_is_unbiased():
    # 300,000 roundings of 0.3 between 0 and 0.5: up with chance 0.6. Alpha 1e-6; a chance 6 % off is 40 standard errors
    level = round_levels(torch.full((300_000,), 0.3, dtype=torch.float64), 1.0, 5, Key(6))
    down, up = level.unique(return_counts=True)[1].tolist()
    assert level.unique().tolist() == [2, 3]
    assert stats.binomtest(up, up + down, 0.6).pvalue > ALPHA
    assert stats.binomtest(up, up + down, 0.6 * 1.06).pvalue < ALPHA


def match_chances(y, received, bound, levels):
    """[n, d]: the probability that y is rounded to the received level, by the paper's eq. (6)."""
    f = (y + bound) / (2 * bound / (levels - 1))
    return torch.where(received == f.floor(), 1 - f.frac(), torch.where(received == f.floor() + 1, f.frac(), 0.0))


def tail(h, tau):
    """P(at least tau of independent events with probabilities h [d]), summed exactly."""
    count = torch.eye(1, len(h) + 1, dtype=torch.float64)[0]
    for one in h:
        count = count * (1 - one) + one * pad(count[:-1], (1, 0))
    return count[tau:].sum()


@every_small
def test_each_factor_of_the_surrogate_is_the_exact_distribution_of_that_coordinate(d, levels, kappa, p):
    pq, everything = channel(d, levels, kappa, p), grid(d, levels)
    y = 2.0 * rng.uniform(Key(8).child(d, levels), (d,), -1.0, 1.0, torch.float64)
    rounded = torch.stack([match_chances(y, u, 2.0, levels) for u in everything]).prod(1)  # P(u | y)
    outcome = rounded @ distribution(pq, everything)  # P(V | y)
    exact = [torch.stack([outcome[everything[:, j] == v].sum() for v in range(levels)]) for j in range(d)]
    product = torch.stack([torch.stack([exact[j][v[j]] for j in range(d)]).prod() for v in everything])
    surrogate = coordinate_product(pq, everything, y.expand(len(everything), -1), 2.0)
    assert torch.allclose(surrogate, -product.log(), rtol=1e-10)
    # and P(V | y) is a Poisson-binomial tail, which the surrogate bounds
    few, many = chances(pq)
    tails = torch.stack([tail(match_chances(y, v, 2.0, levels), pq.tau) for v in everything])
    assert torch.allclose(outcome, few + (many - few) * tails, rtol=1e-10)
    m = pq.normalizer
    a = (1 + (levels - 1) * m) / levels
    shift = d * math.log((1 - m) / levels) + pq.tau * math.log(a * (levels - 1) / (1 - a))
    assert (tails.log() <= -surrogate - shift + 1e-9).all()


def test_the_surrogate_points_where_the_exact_likelihood_points():
    # LeNet's setting: the exact score is the derivative of the tail. 0.99 leaves room for a tilt that is off by a few
    # per cent; the twin, one level further, points elsewhere
    pq, bound = choose(512, 16, 400.0), 10.0
    y = bound * normalize(rng.normal(Key(9), (512,), torch.float64), dim=0)
    received = pq.privatize(round_levels(y, bound, 16, Key(10)), Key(11))
    candidate = y.clone().requires_grad_()
    (exact,) = torch.autograd.grad(-tail(match_chances(candidate, received, bound, 16), pq.tau).log(), candidate)
    for shift, agrees in [(0, True), (1, False)]:
        candidate = y[None].clone().requires_grad_()
        (ours,) = torch.autograd.grad(
            coordinate_product(pq, (received + shift)[None] % 16, candidate, bound).sum(), candidate
        )
        assert (float(torch.cosine_similarity(ours[0], exact, dim=0)) > 0.99) == agrees


@pytest.mark.parametrize("row", [(512, 16, 400.0, 0.9), (512, 16, 1.0, 0.9), (64, 2, 10.0, 0.5), (7, 3, 2.0, 0.9)])
def test_the_next_threshold_would_cost_more_than_its_share(row):
    pq, (_, _, epsilon, share) = choose(*row), row
    above = dataclasses.replace(pq, tau=pq.tau + 1)
    assert pq.logit == pytest.approx((1 - share) * epsilon, rel=1e-15)
    assert pq.epsilon - pq.logit <= share * epsilon < above.epsilon - above.logit
    assert 0 < pq.epsilon <= epsilon


# at tau = 1, ln(N_lo / N_hi) is ln(225 / 31) = 1.98 in the first, and -ln 3 in the second: a true epsilon of 1.08
@pytest.mark.parametrize("row", [(2, 16, 1.0, 0.9), (2, 2, 0.2, 0.9), (2, 2, 0.2, 0.1), (1024, 2, 0.02, 0.9)])
def test_an_epsilon_that_no_threshold_fits_is_refused_with_one_that_works(row):
    d, levels, epsilon, share = row
    with pytest.raises(ValueError, match=rf"at d={d}, levels={levels}, share={share}, got epsilon={epsilon}") as error:
        choose(d, levels, epsilon, share)
    smallest = float(re.search(r"expected epsilon >= ([\d.e+-]+) at", str(error.value)).group(1))
    assert 0 < choose(d, levels, smallest, share).epsilon <= smallest
    with pytest.raises(ValueError, match="expected epsilon >="):
        choose(d, levels, smallest * (1 - 1e-5), share)


def test_the_papers_condition_fails_where_its_ratio_falls_below_one():
    # d = 2, K = 2, kappa = -1 (tau = 1), p = 0.505: eq. (8) reads p/(1-p) * 1/3 <= e^0.2, but 1/ratio is e^1.08
    fewer, matching = counts(2, 2, 1)
    ratio = math.exp(0.02) * fewer / matching
    assert ratio <= math.exp(0.2) < 1 / ratio
    with pytest.raises(ValueError, match=r"expected logit > 1\.09861 at d=2, levels=2, tau=1, got logit=0\.02"):
        PrivQuant(2, 2, 1, 0.02)


@by_rows(
    (lambda: PrivQuant(0, 2, 1, 1.0), "expected d >= 1, got d=0"),
    (lambda: PrivQuant(4, 2, 0, 1.0), "expected 1 <= tau <= d=4, got tau=0"),
    (lambda: PrivQuant(4, 3, 3, -0.1), "expected a finite logit >= 0, got logit=-0.1"),
    (lambda: PrivQuant(4, 3, 3, math.inf), "expected a finite logit >= 0, got logit=inf"),
    (lambda: choose(4, 3, 0.0), "expected epsilon > 0, got epsilon=0.0"),
    (lambda: choose(4, 3, 1.0, share=1.0), "expected 0 < share < 1, got share=1.0"),
    (lambda: PQ.privatize(torch.tensor([0, 1, 2]), Key(0)), r"expected levels of shape \[4\], got \[3\]"),
    (lambda: PQ.privatize(torch.tensor([0, 1, 2, -1]), Key(0)), "expected levels 0 to 2, got -1 to 2"),
    (lambda: PQ.privatize(torch.zeros(4), Key(0)), "expected integer levels, got torch.float32"),
    (lambda: round_levels(torch.tensor([1.0, math.nan]), 1.0, 4, Key(0)), "finite values, got 1 non-finite of 2"),
    (lambda: round_levels(torch.zeros(2), -1.0, 4, Key(0)), "expected bound > 0, got bound=-1.0"),
    (lambda: levels_to_values(torch.tensor([4]), 1.0, 4), "expected levels 0 to 3, got 4 to 4"),
)
def test_arguments_out_of_range_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@by_rows((3, 4, 2, 3.0), (4, 2, 3, 0.5), (1, 4, 1, 0.0), (3, 4, 3, 9.0))
def test_the_stated_distribution_is_the_mixture_over_the_hidden_roundings(d, levels, tau, logit, monkeypatch):
    pq, everything = PrivQuant(d, levels, tau, logit), grid(d, levels)
    place = torch.tensor([0.3, levels - 1, 0.5, 0.0], dtype=torch.float64)[:d]
    rounded = (1 - (everything - place).abs()).clamp(min=0).prod(1)
    expected = (rounded[:, None] * distribution(pq, everything)).sum(0)
    stated = Matched(place.numpy(), levels, tau, logit, pq.epsilon)
    ends = []
    for end in (0.0, 1.0):
        monkeypatch.setattr(rng, "uniform", lambda key, shape, dtype, end=end: torch.full(shape, end, dtype=dtype))
        wires = (pack_levels(row, (levels - 1).bit_length()) for row in everything.numpy())
        ends.append(np.array([stated.read(wire, Key(0)).uniforms for wire in wires]))
    assert (ends[1] - ends[0]).prod(1) == pytest.approx(expected.numpy(), rel=1e-10)
    # given those before it, the intervals of a level tile (0, 1)
    starts = ends[0].reshape(-1, levels, d)[:, :, -1]
    stops = ends[1].reshape(-1, levels, d)[:, :, -1]
    assert np.sort(starts)[:, 1:] == pytest.approx(np.sort(stops)[:, :-1], abs=1e-12)


def test_a_channel_above_its_epsilon_has_no_distribution():
    wire = pack_levels(np.zeros(4, np.int64), 2)
    assert len(Matched(np.zeros(4), 3, 3, 1.0, PQ.epsilon).read(wire, Key(0)).uniforms) == 4
    with pytest.raises(DistributionError, match="expected a channel of epsilon at most"):
        Matched(np.zeros(4), 3, 3, 1.0, 0.999 * PQ.epsilon).read(wire, Key(0))
