"""Our accountant against those of opacus, which under-report in some cases; ours must not."""

import warnings

import pytest
from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent, SelfComposedDpEvent
from opacus.accountants import GaussianAccountant, PRVAccountant, RDPAccountant

from leakgauge.harness.core.accounting import epsilon
from leakgauge.harness.core.gaussian import gaussian_epsilon

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
