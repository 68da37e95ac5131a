"""Tests of bounds that assume a part of the distribution: a declared product, or a family with two branches."""

import math

import dp_accounting
import numpy as np
import pytest

from leakgauge.defenses.gaussian import Gaussian
from leakgauge.defenses.jopeq_t import JoPEQT
from leakgauge.defenses.laplace import Laplace
from leakgauge.defenses.mvu import MVU
from leakgauge.defenses.piecewise import Piecewise
from leakgauge.defenses.sqsgd import SqSGD
from leakgauge.harness.audit import assumed, standalone
from leakgauge.harness.audit.assumed import assumed_bounds
from leakgauge.harness.audit.engine import AuditResult, inspect, needed
from leakgauge.harness.audit.trials import Mechanism
from leakgauge.harness.core.claim import Claim, Code, Horizon, Proof, Relation, Unit, claim_over
from leakgauge.harness.core.result import AssumedBound, FitRecord
from leakgauge.harness.core.rng import Key
from leakgauge.harness.core.stats import STRICT
from leakgauge.harness.core.threats import Threat
from tests.audit_case import at_most, deployed, setting_of, strongest_adversary
from tests.by_rows import by_rows
from tests.command import call


def bounds(defense, dim=16, trials=300, seed=0, threat=None):
    """The claim and its bounds by message or coordinate."""
    deployment = deployed(defense, setting_of(dim))
    claim = defense.claim(deployment.history, deployment.setting)
    mechanism = Mechanism(deployment, threat or strongest_adversary(claim))
    return claim, {one.unit: one for one in assumed_bounds(mechanism, claim, trials, (0.95, STRICT), Key(seed))}


@pytest.mark.parametrize("defense", [Laplace(epsilon=4.0), MVU(epsilon=4.0)], ids=["laplace", "mvu"])
@pytest.mark.matrix
def test_a_product_is_audited_coordinate_by_coordinate(defense):
    _, found = bounds(defense)
    assert {one.assumes for one in found.values()} == {"a declared product"}
    coordinate, message = found["coordinate"], found["message"]
    assert coordinate.epsilon_lower > max(0.85 * 4, coordinate.strict)
    assert message.epsilon_lower > 0.85 * 64
    assert message.strict <= message.proved == pytest.approx(64)
    assert (message.numbers, message.pair) == (16, coordinate.pair)
    assert math.log(message.trials) < 10  # no count of whole messages shows more


def test_a_product_of_a_share_of_the_coordinates_is_audited():
    _, found = bounds(Piecewise(epsilon=10.0), dim=30)
    assert found["message"].numbers == 4  # the shared key selects which
    assert found["message"].proved == pytest.approx(10)
    assert 0.85 < found["message"].epsilon_lower / 10 < 1


POISSON = dp_accounting.PoissonSampledDpEvent(0.5, dp_accounting.GaussianDpEvent(2.0))


class Sampled(Gaussian):
    """Its proof has no known epsilon at delta 0."""

    event = POISSON

    def claim(self, history, setting):
        proof = Proof(self.event, Unit.MESSAGE, "privacy loss distribution", "sampled.")
        proofs = proof, Proof(self.event, Unit.COORDINATE, "privacy loss distribution", "sampled.")
        return claim_over(1, 9.0, proof, source="some", delta=1e-5, further=proofs[1:])


class Mixed(Sampled):
    """A sampled step and one of all records."""

    event = dp_accounting.ComposedDpEvent([POISSON, dp_accounting.GaussianDpEvent(4.0)])


class ByLaplace(Sampled):
    """Sampled Laplace noise."""

    event = dp_accounting.PoissonSampledDpEvent(0.5, dp_accounting.LaplaceDpEvent(2.0))


@pytest.mark.parametrize("kind", [Sampled, Mixed, ByLaplace])
def test_a_claim_whose_proof_has_no_epsilon_at_delta_0_is_audited(kind):
    found = standalone.audit(f"tests.test_assumed:{kind.__name__}", {"noise_std": 40.0}, {}, 1, trials=20, seed=0)
    assert 0 < found["proved"]["epsilon"] < 9.0
    assert found["audited"]["assuming"] == []
    assert found["audited"]["verdict"] == "CONSISTENT"


@pytest.mark.parametrize(
    ("defense", "threat"),
    [(Gaussian(epsilon=1.0), None), (JoPEQT(epsilon=2.0), None), (Laplace(epsilon=1.0), Threat.PUBLIC)],
    ids=["delta above 0", "no product", "no messages"],
)
def test_nothing_is_assumed_that_is_not_declared_or_seen(defense, threat):
    assert bounds(defense, threat=threat)[1] == {}


def test_bounds_of_a_product_are_right_in_95_of_100_cases_without_homogeneity():
    rng = np.random.default_rng(1)
    k, trials, above = 8, 400, np.zeros((2, 2))
    q = np.geomspace(1e-3, 0.05, k)
    p = np.minimum(0.95, q * np.exp(rng.uniform(0.5, 4.0, k)))
    truth = {Unit.COORDINATE: np.log(p / q).max(), Unit.MESSAGE: np.log(p / q).sum()}
    for _ in range(1000):
        tp, fp = rng.binomial(trials, p), rng.binomial(trials, q)
        above += [
            [assumed.product_epsilon(tp, fp, trials, unit, level) > truth[unit] for level in (0.5, 0.95)]
            for unit in truth
        ]
    assert above[:, 1].max() <= at_most(0.05, 1000)
    # with one chance for all numbers the interval of the mean is all that is left
    q, p, above = np.full(k, 0.02), np.full(k, 0.5), 0
    for _ in range(1000):
        above += assumed.product_epsilon(
            rng.binomial(trials, p), rng.binomial(trials, q), trials, Unit.COORDINATE, 0.5
        ) > math.log(25)
    assert 100 < above <= at_most(0.5, 1000)


def test_two_branches_are_audited_within_their_family():
    defense = SqSGD(epsilon=40.0, ratio=1.0)
    claim, found = bounds(defense, dim=36)
    one = found["message"]
    assert (one.assumes, list(found)) == ("the distribution's family", ["message"])
    assert one.proved == pytest.approx(claim.proved.epsilon(0.0))
    assert 0.9 < one.epsilon_lower / one.proved < 1


def test_bounds_of_branches_are_right_in_95_of_100_cases():
    defense = SqSGD(epsilon=3.0, ratio=1.0, bits=2)
    above = sum(
        one.epsilon_lower > one.proved
        for seed in range(15)
        for one in bounds(defense, dim=4, trials=20, seed=seed)[1].values()
    )
    assert above <= at_most(0.05, 15, 1e-3)


class Halved(Laplace):
    """Half of the claimed noise."""

    def perturb(self, numbers, private):
        return (numbers + super().perturb(numbers, private)) / 2


def test_a_test_of_the_distribution_takes_assumed_bounds_away(monkeypatch):
    def audited(distribution):
        monkeypatch.setattr(standalone, "check_fit", lambda *_: distribution)
        return standalone.audit("laplace", {"epsilon": 1.0}, {}, None, trials=100, seed=0)["audited"]

    assert audited(FitRecord((), 0.5, 10, 10, 10, None))["assuming"]
    assert audited(FitRecord(("bytes",), 0.0, 10, 10, 10, None))["assuming"] == []
    assert audited(None)["assuming"] == []


def test_an_assumed_bound_above_the_proof_contradicts():
    pure = Proof.pure(1.0, 1, Unit.COORDINATE, "")
    claim = Claim(1.0, 0.0, Unit.COORDINATE, Relation.ANY_TWO, Horizon.ONE_ROUND, frozenset(Threat), "", (), pure)
    _, found = bounds(Laplace(epsilon=1.0), trials=100)
    plain = AuditResult(0.1, "Clopper-Pearson", 0.1, 0.05, 2.0, 0.0, 0.95, 100, "", "", Threat.SERVER, None)
    distribution = FitRecord((), 0.5, 10, 10, 10, None)
    assert inspect(claim, plain, distribution, list(found.values())).code is Code.CONSISTENT
    high = AssumedBound(1.4, 1.2, "a declared product", "coordinate", 1.0, 16, 500, "")
    assert inspect(claim, plain, distribution, [high]).contradictions == (
        "the bound that assumes a declared product, 1.2 per coordinate at confidence 0.999, is above what is proved",
    )


def test_half_of_the_noise_is_above_the_proof_under_the_product():
    _, found = bounds(Halved(epsilon=4.0))
    assert found["coordinate"].strict > 1.5 * 4


def test_the_trials_that_a_proof_needs():
    def enough(defense):
        deployment = deployed(defense, setting_of(16))
        claim = defense.claim(deployment.history, deployment.setting)
        return needed(claim, strongest_adversary(claim), 0.95)

    assert enough(Gaussian(epsilon=8.0)) <= 4000
    assert enough(Laplace(epsilon=1.0)) < enough(Laplace(epsilon=0.1))
    assert enough(Laplace(epsilon=8.0)) < enough(Laplace(epsilon=12.0))
    assert enough(Laplace(epsilon=100.0)) is None


@pytest.mark.matrix
def test_a_budget_becomes_a_number_of_trials_that_repeats_the_audit(monkeypatch):
    monkeypatch.setattr(standalone, "check_fit", lambda *_: FitRecord((), 0.5, 10, 10, 10, None))

    def audited(**options):
        return standalone.audit("laplace", {"epsilon": 4.0}, {"dim": 4}, None, seed=0, **options)["audited"]

    found = audited(budget=0.01)
    assert (found["trials"], found["assumes"]) == (1000, "nothing")
    assert audited(trials=1000) == found
    assert audited(budget=1e6)["trials"] == found["needed"] > 1000


@by_rows(
    (["--budget", "soon"], "got 'soon', expected a time such as 30s or 2m"),
    (["--budget", "0s"], "budget: got 0 s, expected a time above zero"),
    (["--budget", "1m", "--by", "one-run"], "budget: got 60.0, which an audit by one-run does not use"),
    (["--budget", "1m", "--trials", "5"], "budget: got 60 s with trials=5, expected one of the two"),
)
def test_a_wrong_budget_is_named(options, text):
    ran = call("audit", "laplace", *options)
    assert ran.exit_code != 0
    assert text in " ".join(ran.output.split())
