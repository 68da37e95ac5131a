"""How often audits of honest mechanisms end above the truth, with all that an audit chooses by itself."""

import dataclasses

import pytest
from scipy import stats

from leakgauge.defenses.gaussian import Gaussian
from leakgauge.defenses.laplace import Laplace
from leakgauge.defenses.mvu import MVU
from leakgauge.defenses.sqsgd import SqSGD
from leakgauge.harness.audit.engine import audit
from leakgauge.harness.audit.trials import Mechanism
from leakgauge.harness.core.contract import Setting
from leakgauge.harness.core.rng import Key
from leakgauge.harness.core.threats import Threat
from leakgauge.harness.core.vec import Layout
from tests.faults import Faulty

SMALL = Setting(Layout(("all",), ((2,),)), 1, 1, 1, "update", 1, 0.1, 0, 20)
NULL = Faulty(Gaussian(noise_std=1.0), Gaussian(noise_std=1e9))
"""Two inputs that nothing tells apart; what it claims is not asked."""


def above(defense, audits, trials, truth=None):
    """How many audits are above what is proved, or above `truth`."""
    history = (defense.init(SMALL),)
    claim = defense.claim(list(history), SMALL)
    limit = claim.proved.epsilon(claim.delta) if truth is None else truth
    mechanism = Mechanism(defense, SMALL, history, Threat.SERVER)
    found = [audit(mechanism, claim, trials, 0.95, Key(7, ("coverage", i))).epsilon_lower for i in range(audits)]
    return sum(epsilon > limit for epsilon in found)


def few(audits):
    """Above it with probability 0.001 where each audit errs with probability 0.05."""
    return int(stats.binom.ppf(0.999, audits, 0.05))


HONEST = {
    "gaussian": (Gaussian(epsilon=4.0, delta=0.05), None),
    "laplace": (Laplace(epsilon=1.0), None),
    "randomized response": (MVU(epsilon=1.0, bits=1), None),
    "privquant": (SqSGD(epsilon=2.0, bits=1, ratio=1.0), None),
    "null": (NULL, 0.0),
}


@pytest.mark.parametrize("name", HONEST)
def test_few_audits_end_above_the_truth(name):
    defense, truth = HONEST[name]
    assert above(defense, 20, 40, truth) <= few(20)


@pytest.mark.slow
@pytest.mark.parametrize("name", HONEST)
def test_of_a_thousand_audits_few_end_above_the_truth(name):
    defense, truth = HONEST[name]
    assert above(defense, 1000, 60, truth) <= few(1000)


def test_the_count_would_see_a_bound_that_errs_more_often():
    half = Faulty(Laplace(epsilon=1.0), dataclasses.replace(Laplace(epsilon=1.0), epsilon=4.0))
    assert above(half, 20, 60) > few(20)
