"""UDP and its schedules against the printed tables, the golden trace and exact accounting."""

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import integrate, stats

from leakgauge import Key, rng
from leakgauge.defenses._common.clip import clip_l2
from leakgauge.defenses._udp import (
    Schedule,
    budget,
    discount,
    linear_decay,
    moment,
    multiplier,
    next_multiplier,
    participations,
    sensitivity,
    spend,
    whole_run_mu,
)
from leakgauge.harness.core.gaussian import gaussian_delta, gaussian_epsilon
from tests.by_rows import by_rows
from tests.oracles import UDP_CORRECTED, UDP_CROSSOVER, UDP_TRUE

DELTA = 1e-3
ONE = 8**2 / (2 * math.log(1e3))
"""The paper's budget at epsilon 8, delta 1e-3, q = 1."""


def run(rounds, allowed, beta, fires):
    """Every schedule of a run whose model fails to improve in the rounds for which `fires` holds."""
    schedules = [Schedule(rounds)]
    while not schedules[-1].ended:
        spent = spend(schedules[-1], allowed)
        after = 1.0 if fires(schedules[-1].round) else 0.0
        schedules.append(discount(spent, 1.0, after, zeta=0.001, beta=beta))
    return schedules


def test_the_sensitivity_is_attained_by_two_opposite_records():
    lr, clip, n = 0.01, 1.5, 50
    gradients = clip_l2(100 * rng.normal(Key(1), (n, 10), torch.float64), clip)
    replaced = gradients.clone()
    replaced[0] = -gradients[0]
    moved = lr * (gradients.mean(0) - replaced.mean(0)).norm()
    assert float(moved) == pytest.approx(sensitivity(clip, lr, n), rel=1e-12)
    replaced[0] = gradients[1]
    assert float(lr * (gradients.mean(0) - replaced.mean(0)).norm()) < 0.9 * sensitivity(clip, lr, n)
    assert float(lr * (2 * gradients.mean(0)).norm()) < sensitivity(clip, lr, 1)  # all records are opposite


@pytest.mark.parametrize(("claimed", "mu", "true", "digit"), UDP_TRUE)
def test_a_claim_has_the_printed_mu_and_true_epsilon_for_any_number_of_rounds(claimed, mu, true, digit):
    for rounds in (1, 200):
        whole = whole_run_mu([multiplier(claimed, DELTA, rounds, 1.0, "paper")] * rounds)
        assert whole == pytest.approx(mu, abs=5.1e-4 if mu < 10 else 5.1e-3)
        assert gaussian_epsilon(whole, DELTA) == pytest.approx(true, abs=1.02 * digit)


@pytest.mark.parametrize(("delta", "crossover"), UDP_CROSSOVER)
def test_the_paper_claim_holds_up_to_the_printed_epsilon_and_not_above(delta, crossover):
    # printed to two decimals
    low, high = crossover - 0.006, crossover + 0.006
    assert gaussian_epsilon(math.sqrt(budget(low, delta, 1.0, "paper")), delta) < low
    assert gaussian_epsilon(math.sqrt(budget(high, delta, 1.0, "paper")), delta) > high


@pytest.mark.parametrize(("epsilon", "mu", "tight", "zcdp"), UDP_CORRECTED)
def test_corrected_noise_has_the_printed_ratio_to_the_papers(epsilon, mu, tight, zcdp):
    paper = multiplier(epsilon, DELTA, 200, 1.0, "paper")
    assert math.sqrt(budget(epsilon, DELTA, 1.0, "tight")) == pytest.approx(mu, abs=5.1e-5)
    assert multiplier(epsilon, DELTA, 200, 1.0, "tight") / paper == pytest.approx(tight, abs=5.1e-4)
    assert multiplier(epsilon, DELTA, 200, 1.0, "zcdp") / paper == pytest.approx(zcdp, abs=5.1e-4)


@pytest.mark.parametrize("epsilon", [1e-3, 0.5, 8.0, 100.0])
@pytest.mark.parametrize("q", [0.1, 0.6, 1.0])
def test_corrected_noise_covers_a_client_that_takes_part_in_every_round(epsilon, q):
    tight, zcdp = (whole_run_mu([multiplier(epsilon, DELTA, 50, q, kind)] * 50) for kind in ("tight", "zcdp"))
    assert gaussian_epsilon(tight, DELTA) == pytest.approx(epsilon, rel=1e-9)
    assert gaussian_epsilon(zcdp, DELTA) < epsilon
    # Bun, Steinke 2016, Prop. 1.3: rho = mu^2 / 2 gives rho + 2 sqrt(rho ln(1/delta))
    assert zcdp**2 / 2 + zcdp * math.sqrt(2 * math.log(1 / DELTA)) == pytest.approx(epsilon, rel=1e-12)


def test_participations_are_the_quantile_of_the_binomial_distribution():
    for rounds, q, quantile in itertools.product((1, 7, 300), (0.01, 0.6, 0.95, 1.0), (0.05, 0.5, 0.95, 1.0)):
        assert participations(rounds, q, quantile) == stats.binom.ppf(quantile, rounds, q)


@pytest.mark.parametrize(("beta", "rounds"), [(0.9, 26), (0.8, 15), (0.5, 7)])
def test_a_run_that_never_improves_ends_after_the_printed_rounds(beta, rounds):
    assert run(200, ONE, beta, lambda _: True)[-1].round == rounds


@pytest.mark.parametrize("q", [0.6, 1.0])
def test_the_schedule_starts_at_the_noise_of_the_fixed_run_and_keeps_it(q):
    last = run(200, budget(8, DELTA, q, "paper"), 0.9, lambda _: False)[-1]
    assert last.round == 200
    assert last.multipliers == pytest.approx([multiplier(8, DELTA, 200, q, "paper")] * 200, rel=1e-11)


@by_rows(  # 1 to 0.875: by zeta exactly
    *((*losses, 10) for losses in [(None, 1.0), (1.0, None), (None, None), (1.0, 0.875), (math.inf, 1.0)]),
    *((1.0, after, 9) for after in (0.876, 1.0, math.inf, math.nan)),
    (math.inf, math.inf, 9),
)
def test_only_a_known_loss_without_improvement_shortens_the_run(before, after, rounds):
    schedule = spend(Schedule(10), ONE)
    assert discount(schedule, before, after, zeta=0.125, beta=0.9).rounds == rounds


@by_rows((90, 0.7, 63), (170, 0.7, 119), (100, 0.57, 57), (10, 0.99, 9))
def test_a_discount_counts_in_decimals(rounds, beta, expected):
    # as floats, 0.7 * 90, 0.7 * 170 and 0.57 * 100 are a hair below a whole number
    assert discount(spend(Schedule(rounds), ONE), 1.0, 1.0, zeta=0.001, beta=beta).rounds == expected


LOSS = st.none() | st.floats(allow_nan=True, allow_infinity=True)


@given(
    st.integers(1, 80),
    st.sampled_from([0.01, 0.5, 0.9, 0.99]),
    st.sampled_from(["paper", "zcdp", "tight"]),
    st.lists(LOSS, min_size=81, max_size=81),
)
def test_no_sequence_of_losses_overspends_the_budget(rounds, beta, calibration, losses):
    allowed = budget(8, DELTA, 0.6, calibration)
    schedule, wasted = Schedule(rounds), False
    while not schedule.ended:
        number, before = schedule.round, schedule.rounds
        assert next_multiplier(schedule, allowed) == pytest.approx(
            math.sqrt((before - number) / (allowed - sum(1 / z**2 for z in schedule.multipliers))), rel=1e-9
        )
        spent = spend(schedule, allowed)
        schedule = discount(spent, losses[number], losses[number + 1], zeta=0.001, beta=beta)
        assert schedule.rounds <= before
        wasted = wasted or (schedule.ended and before - number > 1)
    assert schedule.round <= rounds
    assert schedule.spent <= allowed * (1 + 1e-12)
    assert wasted or schedule.spent == pytest.approx(allowed, rel=1e-12)


def test_a_run_that_has_ended_has_no_next_round():
    ended = run(3, ONE, 0.9, lambda _: False)[-1]
    with pytest.raises(ValueError, match="one that ended before round 3"):
        next_multiplier(ended, ONE)
    with pytest.raises(ValueError, match="expected a budget above the sum spent"):
        next_multiplier(Schedule(3, (0.1,)), ONE)


@pytest.mark.parametrize("epsilon", [1.0, 8.0, 50.0])
@pytest.mark.parametrize("q", [0.6, 1.0])
def test_linear_decay_stops_before_it_overspends(epsilon, q):
    z = linear_decay(epsilon, DELTA, 200, q)
    first = multiplier(epsilon, DELTA, 200, q, "paper")
    assert z == pytest.approx([first * (1 - t / 400) for t in range(len(z))], rel=1e-12)
    rho = sum(1 / (2 * sigma**2) for sigma in z)
    more = rho + 1 / (2 * (first * (1 - len(z) / 400)) ** 2)
    log = math.log(1 / DELTA)
    assert rho + 2 * math.sqrt(rho * log) <= epsilon < more + 2 * math.sqrt(more * log)
    assert gaussian_epsilon(whole_run_mu(z), DELTA) < epsilon


@pytest.mark.parametrize("rounds", [1, 7, 8, 9, 16, 200])
def test_linear_decay_without_a_slope_runs_every_round_that_the_budget_pays(rounds):
    # summed as floats, the 1/z^2 of 7 rounds exceed the budget from which z was computed
    flat = multiplier(4, DELTA, rounds, 1.0, "zcdp")
    assert linear_decay(4, DELTA, 300, 1.0, first=flat, slope=0.0) == pytest.approx([flat] * rounds, rel=1e-12)


def test_linear_decay_takes_both_of_its_numbers():
    # steep: ends where the noise would, with budget left
    assert linear_decay(8, DELTA, 200, 1.0, first=100.0, slope=0.4) == pytest.approx([100.0, 60.0, 20.0], rel=1e-12)
    assert linear_decay(8, DELTA, 200, 1.0, first=100.0, slope=2.0) == (100.0,)


def test_rounds_compose_by_the_squares_of_their_noise():
    assert whole_run_mu([]) == 0.0
    assert whole_run_mu([2.0]) == 0.5
    assert whole_run_mu([1 / 3, 1 / 4]) == pytest.approx(5.0, rel=1e-15)
    # at mu = 1, delta(0) = 2 Phi(1/2) - 1
    assert gaussian_delta(whole_run_mu([2.0] * 4), 0.0) == pytest.approx(2 * stats.norm.cdf(0.5) - 1, rel=1e-12)


def test_the_moment_of_a_round_is_its_integral_and_its_bounds_those_of_the_paper():
    q, shift, order = 0.9, 0.5, 5  # 2 * .5 / 400 / .005

    def integrand(z):
        return stats.norm.pdf(z) * (1 - q + q * math.exp(z * shift - shift**2 / 2)) ** (order + 1)

    found = moment(share=q, step=0.5, records=400, sigma=0.005, order=order)
    exact, fifteen, fourteen = found["moment"]
    assert exact == pytest.approx(math.log(integrate.quad(integrand, -10, 20)[0]), rel=1e-9)
    assert fifteen == pytest.approx(q * order * (order + 1) * shift**2 / 2, rel=1e-12)
    assert fourteen == pytest.approx(q * (order + 1) * (math.exp(order * shift**2 / 2) - 1), rel=1e-12)
    assert found["gap"] == abs(fifteen - exact)


@by_rows(
    (lambda: sensitivity(0.0, 0.1, 10), "expected clip > 0, got clip=0.0"),
    (lambda: sensitivity(1.0, 0.1, 0), "expected samples > 0"),
    (lambda: budget(8, DELTA, 1.5, "paper"), "expected 0 < participation <= 1, got participation=1.5"),
    (lambda: multiplier(8, DELTA, 0, 1.0, "paper"), "expected rounds > 0"),
    (lambda: Schedule(0), "expected rounds >= 1, got rounds=0"),
    (lambda: linear_decay(8, DELTA, 0, 1.0, first=9.0), "expected rounds > 0"),
    (lambda: whole_run_mu([1.0, 0.0]), "expected noise multipliers > 0, got 0.0"),
    (lambda: participations(10, 0.5, 0.0), "expected 0 < quantile <= 1, got quantile=0.0"),
    (lambda: participations(0, 0.5, 0.5), "expected rounds > 0"),
)
def test_arguments_out_of_range_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()
