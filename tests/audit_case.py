"""What the tests of audits share: a small federation, a defense's claim in it, and the size of a statistical test."""

from __future__ import annotations

from scipy import stats

from leakgauge import Layout, Setting
from leakgauge.harness.audit.engine import adversaries, apply_test, choose_test
from leakgauge.harness.federation.small import Federation


def at_most(rate, cases, alpha=1e-6):
    """The largest number of events of this rate; more occur with probability alpha at most."""
    return int(stats.binom.isf(alpha, cases, rate))


def strongest_adversary(claim):
    """The first adversary that an audit plays."""
    return adversaries(claim)[0]


def setting_of(d, clients=3, rounds=1, steps=1):
    """All clients take part, with 20 samples each."""
    return Setting(Layout(("all",), ((d,),)), clients, clients, rounds, "update", steps, 0.1, 0, 20)


def audit_mechanism(mechanism, claim, trials, confidence, key):
    """A whole audit: a pilot chooses the test, and fresh trials are counted."""
    test = choose_test(mechanism, claim, trials, confidence, key)
    return apply_test(mechanism, claim, test, trials, confidence, key)[0]


def deployed(defense, setting):
    """The defense in its first state, in every round of the setting."""
    return Federation(defense, setting, (defense.init(setting),) * setting.rounds)
