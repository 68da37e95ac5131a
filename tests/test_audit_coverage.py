"""How often audits of honest mechanisms end above the truth, including everything that an audit chooses itself."""

import dataclasses

import pytest

from leakgauge.defenses.gaussian import Gaussian
from leakgauge.defenses.laplace import Laplace
from leakgauge.defenses.mvu import MVU
from leakgauge.defenses.sqsgd import SqSGD
from leakgauge.harness.audit.trials import Mechanism
from leakgauge.harness.core.rng import Key
from leakgauge.harness.core.threats import Threat
from tests.audit_case import at_most, audit_mechanism, deployed, setting_of
from tests.by_rows import by_rows
from tests.faulty import Faulty

NULL = Faulty(Gaussian(noise_std=1.0), Gaussian(noise_std=1e9))
"""Nothing distinguishes its two inputs; its claim is not used."""


def above(defense, audits, trials, truth=None):
    """How many audits are above what is proved, or above `truth`."""
    run = deployed(defense, setting_of(2, clients=1))
    claim = defense.claim(run.history, run.setting)
    limit = claim.proved.epsilon(claim.delta) if truth is None else truth
    mechanism, keys = Mechanism(run, Threat.SERVER), [Key(7, ("coverage", i)) for i in range(audits)]
    return sum(audit_mechanism(mechanism, claim, trials, 0.95, key).epsilon_lower > limit for key in keys)


def few(audits):
    """The most audits above the truth, up to a probability of 0.001, if each errs with probability 0.05."""
    return at_most(0.05, audits, 0.001)


HONEST = {
    "gaussian": (Gaussian(epsilon=4.0, delta=0.05), None),
    "laplace": (Laplace(epsilon=1.0), None),
    "randomized response": (MVU(epsilon=1.0, bits=1), None),
    "privquant": (SqSGD(epsilon=2.0, bits=1, ratio=1.0), None),
    "null": (NULL, 0.0),
}


ENCODED = {"privquant", "randomized response"}
"""Mechanisms whose encoders take long."""

SLOW = pytest.mark.slow
QUICK = [pytest.param(name, 20, 40, marks=[SLOW] * (name in ENCODED)) for name in HONEST]


@by_rows(*QUICK, *(pytest.param(name, 1000, 60, marks=SLOW) for name in HONEST))
@pytest.mark.matrix
def test_few_audits_end_above_the_truth(name, audits, trials):
    defense, truth = HONEST[name]
    assert above(defense, audits, trials, truth) <= few(audits)


@pytest.mark.matrix
def test_the_count_would_see_a_bound_that_errs_more_often():
    half = Faulty(Laplace(epsilon=1.0), dataclasses.replace(Laplace(epsilon=1.0), epsilon=4.0))
    assert above(half, 20, 60) > few(20)
