"""Our accountant against those of opacus, which under-report in some cases; ours must not."""

import warnings

import pytest
from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent, SelfComposedDpEvent
from opacus.accountants import GaussianAccountant, PRVAccountant, RDPAccountant
from opacus.accountants.analysis.prv import PoissonSubsampledGaussianPRV

from leakgauge.harness.core.accounting import epsilon
from leakgauge.harness.core.gaussian import gaussian_epsilon
from leakgauge.harness.integrations.opacus import Facts, OpacusError, _points, claim_of, notes_of
from tests.by_rows import by_rows

DELTA = 1e-5
CASES = [(0.01, 1000, 1.0), (0.1, 100, 1.0), (0.02, 1000, 0.8), (1.0, 10, 5.0)]  # (q, T, z)


def ours(q, steps, z):
    step = GaussianDpEvent(z) if q == 1 else PoissonSampledDpEvent(q, GaussianDpEvent(z))
    return epsilon(SelfComposedDpEvent(step, steps), DELTA)


def theirs(kind, q, steps, z):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        accountant = kind()
        accountant.history = [(z, q, steps)]
        return accountant.get_epsilon(DELTA)


@pytest.mark.parametrize(("q", "steps", "z"), CASES)
@pytest.mark.table(2)
def test_ours_is_below_renyi_and_near_the_numerical_one(q, steps, z):
    found = ours(q, steps, z)
    assert found <= theirs(RDPAccountant, q, steps, z)
    # opacus' PRV accountant promises an error of 0.01 in epsilon
    assert found == pytest.approx(theirs(PRVAccountant, q, steps, z), abs=0.011)


def test_a_full_batch_is_exact_here_and_an_estimate_or_a_bound_there():
    exact = gaussian_epsilon(10**0.5 / 5, DELTA)
    assert ours(1.0, 10, 5.0) == pytest.approx(exact, rel=1e-13)
    assert theirs(RDPAccountant, 1.0, 10, 5.0) > exact
    # the numerical one is an estimate, within its promise of 0.01, and no bound
    assert theirs(PRVAccountant, 1.0, 10, 5.0) == pytest.approx(exact, abs=0.011)


def test_the_central_limit_accountant_under_reports_and_ours_does_not():
    # q = .01, T = 1000, z = 1: 1.618 against 1.828
    limit = theirs(GaussianAccountant, 0.01, 1000, 1.0)
    assert limit == pytest.approx(1.618, abs=2e-3)
    assert ours(0.01, 1000, 1.0) == pytest.approx(1.828, abs=2e-3)


def facts(noise, steps):
    return Facts(1.0, noise, 10, 10 * steps, steps, True, 1 / steps, 0)


@by_rows(
    ("gdp", 0.1, 10, 1, DELTA, "it searches from 0 to 500"),
    ("gdp", 30.0, 2, 1, 0.5, "it searches from 0 to 500"),
    ("gdp", 0.01, 10, 1, DELTA, "it searches from 0 to 500"),
    ("prv", 0.1, 100, 10, DELTA, "it would need 1.9e+08 points"),
    ("prv", 0.1, 10_000, 10_000, DELTA, "points"),
    ("prv", 0.05, 1, 3, DELTA, "its epsilon is inf"),
    ("prv", 1.0, 1, 1, 1e-18, "Floating point errors will dominate"),
    ("prv", 1.0, 10, 10**9, DELTA, "points"),
)
def test_our_accounting_answers_for_an_accountant_that_fails_or_takes_long(
    accountant, noise, steps, epochs, delta, why
):
    claim = claim_of(facts(noise, steps), epochs, delta, accountant)
    assert claim.source.startswith(
        f"leakgauge's own accounting, because Opacus' accountant {accountant} gives no epsilon"
    )
    assert why in claim.source
    assert "\n" not in claim.source
    assert claim.epsilon == claim.proved.epsilon(delta)
    assert f"claimed by {claim.source}" in notes_of(facts(noise, steps), claim)


@by_rows("prv", "rdp", "gdp")
def test_the_accountants_own_number_is_claimed_where_it_has_one(accountant):
    claim = claim_of(facts(1.0, 10), 3, DELTA, accountant)
    kinds = {"prv": PRVAccountant, "rdp": RDPAccountant, "gdp": GaussianAccountant}
    assert claim.epsilon == theirs(kinds[accountant], 0.1, 30, 1.0)
    assert claim.source == f"Opacus, accountant {accountant}, 3 epochs"
    assert notes_of(facts(1.0, 10), claim) == ()


@by_rows((0.01, 1000, 1.0), (0.1, 100, 1.0), (1.0, 30, 0.1), (0.5, 6, 2.0))
def test_the_points_of_a_grid_are_forecast(q, steps, z):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        errors = {"eps_error": 0.01, "delta_error": DELTA / 1000}
        domain = PRVAccountant()._get_domain(
            prvs=[PoissonSubsampledGaussianPRV(q, z)], num_self_compositions=[steps], **errors
        )
        assert _points(z, q, steps, DELTA) == pytest.approx(domain.size, rel=2e-3)


def test_a_negative_epsilon_of_an_accountant_is_none():
    assert theirs(PRVAccountant, 0.1, 10, 30.0) > 0
    claim = claim_of(facts(30.0, 10), 1, 0.5)
    assert claim.epsilon == claim.proved.epsilon(0.5) == 0


@by_rows((1, 0.0, "prv"), (1, 1.0, "gdp"), (0, DELTA, "rdp"), (1, DELTA, "moments"))
def test_what_no_accountant_can_count_is_refused_in_one_line(epochs, delta, accountant):
    with pytest.raises(
        OpacusError, match="expected epochs >= 1, 0 < delta < 1 and the accountant prv, rdp, gdp, got"
    ) as e:
        claim_of(facts(1.0, 10), epochs, delta, accountant)
    assert "\n" not in str(e.value)


def test_a_delta_that_protects_too_few_records_is_noted():
    (note,) = notes_of(facts(1.0, 10), claim_of(facts(1.0, 10), 1, 0.01, "rdp"))
    assert note == "delta 0.01 is not below one in 100 records: publishing all about one satisfies it"
    assert notes_of(facts(1.0, 10), claim_of(facts(1.0, 10), 1, 0.0099, "rdp")) == ()
