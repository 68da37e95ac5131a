"""Bounds from one run: printed values, exact and simulated coverage, known defects, and the estimate from cosines."""

import bisect
import math

import numpy as np
import pytest
from scipy import special
from scipy import stats as scipy_stats

from leakgauge.harness.audit.one_run import cosine_epsilon, fdp_mu, p_value, steinke_epsilon
from leakgauge.harness.core.gaussian import gaussian_epsilon
from leakgauge.harness.core.rng import Key, normal, uniform
from tests.audit_case import at_most
from tests.oracles import exact_delta

ROOT = Key(20240612, ("test_one_run",))

# from an independent program: (m, r, v) -> Steinke's epsilon at 1e-5; eight printed decimals
STEINKE = [
    (1000, 1000, 600, 0.29722695),
    (1000, 1000, 691, 0.69018672),
    (1000, 100, 95, 2.16517580),
    (1000, 100, 99, 3.00283237),
    (1000, 100, 100, 3.46537635),
    (1000, 1000, 1000, 5.78228314),
    (1000, 10, 10, 1.01498620),
    (1000, 500, 250, 0.0),
]
# (m, r, v) -> mu and its epsilon at 1e-5; six printed decimals
FDP = [
    (1000, 1000, 600, 0.163850, 0.583540),
    (1000, 1000, 691, 0.339404, 1.296655),
    (1000, 100, 95, 0.786812, 3.323300),
    (1000, 100, 99, 1.068443, 4.726715),
    (1000, 100, 100, 1.225533, 5.549028),
    (1000, 1000, 1000, 2.368074, 12.334569),
]
P_VALUES = [
    (1000, 100, 95, 2, 1e-5, 0.01782463464),
    (1000, 100, 95, 2, 0.0, 0.01610181875),
    (1000, 1000, 600, 0, 1e-5, 0.000151515115),
    (100, 100, 80, 1, 1e-5, 0.07170153372),
]


def fewest_refuting(m, r, epsilon, delta, confidence):
    """The fewest right guesses of r that refute epsilon; r + 1 if even r do not."""
    return bisect.bisect_left(range(r + 1), True, key=lambda v: p_value(m, r, v, epsilon, delta) < 1 - confidence)


@pytest.mark.parametrize(("m", "r", "v", "epsilon", "delta", "expected"), P_VALUES)
def test_p_values_are_the_printed_ones(m, r, v, epsilon, delta, expected):
    assert p_value(m, r, v, epsilon, delta) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize(("m", "r", "v", "expected"), STEINKE)
def test_epsilon_of_one_run_is_the_printed_one(m, r, v, expected):
    assert steinke_epsilon(m, r, v, 1e-5) == pytest.approx(expected, abs=6e-9)


@pytest.mark.parametrize(("m", "r", "v", "mu", "epsilon"), FDP)
def test_mu_of_one_run_is_the_printed_one(m, r, v, mu, epsilon):
    assert fdp_mu(m, r, v) == pytest.approx(mu, abs=6e-7)
    assert gaussian_epsilon(fdp_mu(m, r, v), 1e-5) == pytest.approx(epsilon, abs=6e-7)


def test_delta_costs_epsilon():
    # three public ports omit the term; the independent program: 5.80906834 without it, 5.78228314 with 1e-5
    assert steinke_epsilon(1000, 1000, 1000, 0.0) == pytest.approx(5.80906834, abs=6e-9)
    assert steinke_epsilon(1000, 100, 95, 1e-4) < steinke_epsilon(1000, 100, 95, 1e-5)
    assert steinke_epsilon(1000, 100, 100, 1e-2) == 0


def test_the_p_value_without_delta_is_a_binomial_tail():
    for r, v, epsilon in [(10, 7, 0.0), (200, 150, 1.0), (50, 50, 3.0)]:
        tail = scipy_stats.binom.sf(v - 1, r, special.expit(epsilon))
        assert p_value(1000, r, v, epsilon, 0.0) == pytest.approx(tail, rel=1e-12)
    assert p_value(5, 5, 0, 1.0, 0.0) == p_value(5, 0, 0, 1.0, 0.0) == 1


@pytest.mark.parametrize("delta", [0.0, 1e-5, 1e-3, 1e-2, 0.05])
@pytest.mark.parametrize(("m", "r"), [(1000, 100), (50, 50), (100, 20)])
def test_the_p_value_never_falls_with_epsilon(m, r, delta):
    for v in range(1, r + 1, 5):
        p = [p_value(m, r, v, epsilon, delta) for epsilon in np.linspace(0, 8, 40)]
        assert np.all(np.diff(p) > -1e-12)


@pytest.mark.parametrize("epsilon", [0.0, 0.5, 2.0])
def test_randomized_response_is_refuted_in_five_per_cent_at_most_and_nearly_so(epsilon):
    # the worst mechanism: each guess is right with probability q, independently
    for m, r in [(200, 200), (1000, 100)]:
        fewest = fewest_refuting(m, r, epsilon, 0.0, 0.95)
        assert 0.015 < scipy_stats.binom.sf(fewest - 1, r, special.expit(epsilon)) <= 0.05
        assert steinke_epsilon(m, r, fewest, 0.0) > epsilon >= steinke_epsilon(m, r, fewest - 1, 0.0)


def test_the_best_of_several_numbers_of_guesses_gives_no_bound():
    # it rejects the truth in 41 to 59 % of audits at a nominal 5 %
    m, epsilon, audits = 1000, 1.0, 400
    grid = np.arange(20, 1001, 20)
    right = np.cumsum(uniform(ROOT.child("grid"), (audits, m)).numpy() < special.expit(epsilon), axis=1)[:, grid - 1]
    fewest = np.array([fewest_refuting(m, int(r), epsilon, 1e-5, 0.95) for r in grid])
    assert np.sum(np.any(right >= fewest, axis=1)) > at_most(0.05, audits)
    assert max(np.sum(right >= fewest, axis=0)) <= at_most(0.05, audits)


@pytest.mark.parametrize("guesses", [(0, 0, 0), (5, 6, 1), (5, 4, 5), (5, 4, -1)])
def test_impossible_guesses_are_refused(guesses):
    for call in (
        lambda: p_value(*guesses, 1.0, 1e-5),
        lambda: steinke_epsilon(*guesses, 1e-5),
        lambda: fdp_mu(*guesses),
    ):
        with pytest.raises(ValueError, match="expected 0 <= v <= r <= m"):
            call()


def test_impossible_numbers_are_refused():
    for call, words in [
        (lambda: p_value(9, 5, 3, -1.0, 0.0), "expected epsilon >= 0"),
        (lambda: p_value(9, 5, 3, 1.0, 1.0), "expected 0 <= delta < 1"),
        (lambda: steinke_epsilon(9, 5, 3, -0.1), "expected 0 <= delta < 1"),
        (lambda: steinke_epsilon(9, 5, 3, 0.0, 1.0), "expected 0 < confidence < 1"),
        (lambda: fdp_mu(9, 5, 3, 0.0), "expected 0 < confidence < 1"),
        (lambda: cosine_epsilon(np.zeros(1), 100, 1e-5), "expected cosines"),
        (lambda: cosine_epsilon(np.array([0.1, 1.1]), 100, 1e-5), "expected cosines"),
        (lambda: cosine_epsilon(np.zeros(9), 1, 1e-5), "expected dim >= 2"),
    ]:
        with pytest.raises(ValueError, match=words):
            call()


def test_too_few_right_guesses_refute_nothing():
    for r, v in [(0, 0), (9, 0), (9, 4)]:
        assert steinke_epsilon(9, r, v, 1e-5) == fdp_mu(9, r, v) == 0


@pytest.mark.parametrize(("m", "r", "v"), [(1000, 100, 90), (1000, 1000, 600), (50, 50, 50), (300, 7, 7)])
def test_the_recursion_reaches_its_limit_at_the_found_mu(m, r, v):
    def total(mu):  # Mahloujifar et al. 2024, one step a line
        R, H = 0.05 * v / m, 0.05 * (r - v) / m
        for i in range(v - 1, -1, -1):
            grown = max(H, special.ndtr(special.ndtri(R) - mu))
            R, H = min(1.0, R + i / (r - i) * (grown - H)), grown
        return R + H

    mu = fdp_mu(m, r, v)
    assert total(mu - 1e-6) > r / m > total(mu + 1e-6)


def canary_run(name, m, r, mu, runs):
    """Right guesses of each run: the r / 2 highest and lowest of m scores, N(mu, 1) for canaries that are in."""
    coins = uniform(ROOT.child(name, "coins"), (runs, m)).numpy() < 0.5
    scores = normal(ROOT.child(name, "scores"), (runs, m)).numpy() + mu * coins
    coins = np.take_along_axis(coins, np.argsort(scores, axis=1), axis=1)
    return [int(np.sum(row[-(r // 2) :]) + np.sum(~row[: r // 2])) for row in coins]


def test_one_run_of_gaussian_canaries_ends_in_the_simulated_range():
    # simulated, mu 1, m 1000, r 100, p5 to p95: Steinke 1.66 (1.19-2.17), f-DP 2.52 (1.76-3.32); true 4.3772
    right = canary_run("range", 1000, 100, 1.0, 200)
    steinke = [steinke_epsilon(1000, 100, v, 1e-5) for v in right]
    fdp = [gaussian_epsilon(fdp_mu(1000, 100, v), 1e-5) for v in right]
    assert np.mean(steinke) == pytest.approx(1.66, abs=0.1)
    assert np.quantile(steinke, [0.05, 0.95]) == pytest.approx([1.19, 2.17], abs=0.15)
    assert np.mean(fdp) == pytest.approx(2.52, abs=0.15)
    assert np.quantile(fdp, [0.05, 0.95]) == pytest.approx([1.76, 3.32], abs=0.25)
    assert max(steinke) < max(fdp) < gaussian_epsilon(1.0, 1e-5)


@pytest.mark.parametrize("mu", [0.0, 1.0])
def test_runs_of_gaussian_canaries_end_above_the_truth_in_few_cases(mu):
    right = canary_run(f"cover {mu}", 500, 50, mu, 200)
    assert sum(fdp_mu(500, 50, v) > mu for v in right) <= at_most(0.05, 200)
    assert sum(steinke_epsilon(500, 50, v, 1e-5) > gaussian_epsilon(mu, 1e-5) for v in right) <= at_most(0.05, 200)


def cosines(name, k, d, sigma):
    """[k] cosines of canaries of norm 1 with their sum plus noise of standard deviation sigma."""
    canaries = normal(ROOT.child(name, "canaries"), (k, d)).double().numpy()
    canaries /= np.linalg.norm(canaries, axis=1, keepdims=True)
    noisy = canaries.sum(axis=0) + sigma * normal(ROOT.child(name, "noise"), (d,)).double().numpy()
    return canaries @ noisy / np.linalg.norm(noisy)


def test_cosines_of_canaries_estimate_epsilon():
    # simulated, d 1e4, k 100, sigma 1 (true 4.377): 4.33 +- .41
    found = [cosine_epsilon(cosines(f"run {i}", 100, 10_000, 1.0), 10_000, 1e-5).epsilon for i in range(20)]
    assert np.mean(found) == pytest.approx(4.33, abs=4.9 * 0.41 / math.sqrt(20))
    assert np.std(found) < 2 * 0.41


def test_the_estimate_is_that_of_the_mean_cosine_and_0_if_it_is_negative():
    found = cosine_epsilon(np.array([0.02, 0.04]), 2500, 1e-5)
    assert (found.canaries, found.dim, found.mu) == (2, 2500, pytest.approx(1.5))
    assert float(exact_delta(1.5, found.epsilon)) == pytest.approx(1e-5, rel=1e-9)
    assert cosine_epsilon(np.array([-0.02, -0.04]), 2500, 1e-5)[:2] == (0.0, 0.0)
