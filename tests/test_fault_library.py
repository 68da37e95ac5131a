"""Every lying defense departs from its distribution and is caught; every honest one follows it."""

import pytest

from leakgauge.harness.audit.goodness_of_fit import check_fit
from leakgauge.harness.audit.keys import check_keys
from leakgauge.harness.core.rng import Key
from leakgauge.harness.federation import registry
from tests.audit_case import setting_of
from tests.faults.library import MISSED, STEPS, faults, of_studies
from tests.test_defenses import FITTED

HONEST = [*registry.classes("defense"), "laplace+sdq", "gaussian+sdq", "t-noise+sdq-lattice"]


def rows(epsilon, quick):
    """Every liar; all but each `quick`-th are slow."""
    found = []
    for n, fault in enumerate(faults(epsilon)):
        heavy = [pytest.mark.matrix] * fault.name.startswith("MVU")  # its design takes seconds
        found.append(pytest.param(fault, id=fault.name, marks=[pytest.mark.slow] if n % quick else heavy))
    return found


@pytest.mark.parametrize("fault", rows(8.0, 10))
@pytest.mark.table(3)
@pytest.mark.ci(without=("SqSGD, 4 bits: 5 % clean messages",))  # it is at epsilon 1
def test_a_liar_is_caught_at_epsilon_8(fault):
    result = check_fit(fault.liar, setting_of(36, steps=STEPS), Key(3))
    assert bool(result.rejects) == ((8.0, fault.name) not in MISSED)


@pytest.mark.parametrize("fault", rows(1.0, 20))
@pytest.mark.matrix
def test_a_liar_is_caught_at_epsilon_1(fault):
    result = check_fit(fault.liar, setting_of(36, steps=STEPS), Key(4))
    assert bool(result.rejects) == ((1.0, fault.name) not in MISSED)


@pytest.mark.matrix
@pytest.mark.ci(*(f"{n}-8.0" for n in range(32) if n % 4 < 2 or n == 23))  # two of each kind, and one of MVU
@pytest.mark.parametrize("epsilon", [1.0, 8.0])
@pytest.mark.parametrize("number", range(len(of_studies(8.0))))
def test_a_fault_at_the_size_of_a_study_is_found(number, epsilon):
    fault = of_studies(epsilon)[number]
    if fault.kind == "buffer":  # equal numbers follow the distribution, one by one
        assert check_keys(fault.liar, setting_of(36), Key(3)).faults
    else:
        assert check_fit(fault.liar, setting_of(36), Key(3)).rejects


def test_a_fit_states_what_was_looked_at():
    small, large = check_fit(registry.build("defense", "gaussian", {}), setting_of(36), Key(3)).looked
    assert (small.messages, small.dims, small.clients) == (600, (200, 200), (20, 400))
    assert (small.samples, small.rounds) == ((20, 80_000), (0, 10_000))
    assert (large.messages, large.dims, large.samples) == (8, (101_770, 101_770), (20, 80_000))


@pytest.mark.parametrize("name", HONEST)
@pytest.mark.table(7)
@pytest.mark.ci(*FITTED, "gaussian+sdq")
def test_an_honest_defense_follows_its_distribution(name):
    result = check_fit(registry.build("defense", name, {}), setting_of(36), Key(5))
    assert result is None or not result.rejects


def test_a_defense_without_a_distribution_is_not_called_consistent():
    assert check_fit(registry.build("defense", "tests.doubles:Counting", {}), setting_of(36), Key(0)) is None
