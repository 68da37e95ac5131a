"""Every lying defense departs from its distribution and is caught; every honest one follows it."""

import itertools

import numpy as np
import pytest

from leakgauge.defenses import _secure_sum
from leakgauge.defenses._privunit import best_cap
from leakgauge.harness.audit.goodness_of_fit import check_fit
from leakgauge.harness.audit.keys import check_keys
from leakgauge.harness.core.codec import unpack_float32
from leakgauge.harness.core.rng import Key
from leakgauge.harness.federation import registry
from tests.audit_case import setting_of
from tests.faults.library import ANY, MISSED, STEPS, faults, leaking, lying, made, of_studies
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


SHARED = {
    "ppr: all": ("ppr", {}, ANY["the shared key's"][1]),
    "ppr: its clocks": ("ppr", {}, leaking("clock")),
    "jopeq-t: the size of its noise": ("jopeq-t", {}, leaking("chi-square")),
    "mvu: its channel": ("mvu", {}, leaking("channel")),
    "rqm: the levels below": ("rqm", {}, leaking("below")),
    "sqsgd: its branch": ("sqsgd", {"epsilon": 8.0, "ratio": 1.0}, leaking("branch")),
    "vqsgd: which points are lies": ("vqsgd", {"epsilon": 4.0}, leaking("lie")),
}
"""Private numbers that come from the shared key, in whole or in part, in defenses with their parameters."""


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.matrix) for name in SHARED])
def test_a_private_draw_from_the_shared_key_is_found(name):
    defense, parameters, how = SHARED[name]
    assert check_fit(lying(made(defense, **parameters), how), setting_of(36), Key(3)).rejects


def test_points_that_are_chosen_with_the_shared_key_have_no_private_draw():
    honest = made("ppr")
    assert not check_keys(honest, setting_of(36), Key(3)).faults
    faults = check_keys(lying(honest, ANY["the shared key's"][1]), setting_of(36), Key(3)).faults
    assert faults == ("its noise is proved, and nothing is drawn from the private key",)


def always_near(liar, honest, state, memory, update, link, private):
    """PrivUnit that never lies: a vector outside the cap is drawn again."""
    u, near = update.double() / update.double().norm(), 1 - 2 * best_cap(len(update), liar.epsilon).depth
    sent = (honest(state, memory, update, link, private.child("try", n)) for n in itertools.count())
    return next(each for each in sent if not update.any() or unpack_float32(each[0], len(u)).double() @ u >= near)


def one_way(liar, honest, state, memory, update, link, private):
    """Coins a tenth farther from fair."""
    return honest(state._replace(grid=state.grid / 1.1), memory, update, link, private)


def nearest(values, bound, key):
    """Integers without random rounding."""
    return np.rint(values).astype(np.int64)


@pytest.mark.matrix
@pytest.mark.parametrize(("name", "how"), [("privunit", always_near), ("poisson-binomial", one_way)])
def test_a_vector_that_never_lies_and_coins_that_say_more_are_found(name, how):
    assert check_fit(lying(made(name), how), setting_of(36), Key(3)).rejects


@pytest.mark.matrix
@pytest.mark.parametrize("name", ["skellam", "distributed-gaussian"])
def test_rounding_without_chance_before_noise_is_found(name, monkeypatch):
    monkeypatch.setattr(_secure_sum, "_rounded", nearest)
    assert check_fit(made(name), setting_of(36), Key(3)).rejects


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
