"""Audits of one mechanism: bounds below the truth, broken claims, and faults that are caught."""

import dataclasses
import json
import math

import pytest

from leakgauge import Key, audit
from leakgauge.defenses.gaussian import Gaussian
from leakgauge.defenses.jopeq_sound import SoundJoPEQ
from leakgauge.defenses.laplace import Laplace
from leakgauge.defenses.mvu import MVU
from leakgauge.defenses.none import NoDefense
from leakgauge.defenses.udp import UDP
from leakgauge.harness.audit.bounds import Counts
from leakgauge.harness.audit.engine import contradicts, inspect, verdict
from leakgauge.harness.audit.neighbors import pairs
from leakgauge.harness.audit.trials import Mechanism
from leakgauge.harness.core.claim import Code, Relation, Unit, Verdict
from leakgauge.harness.federation import registry
from tests.audit_case import audit_mechanism, deployed, setting_of, strongest_adversary
from tests.by_rows import by_rows
from tests.faulty import Faulty

KEY = Key(0, ("audit",))
SETTING = setting_of(36)


def audited(defense, trials=300):
    """The claim and the result of its audit."""
    run = deployed(defense, SETTING)
    claim = defense.claim(run.history, SETTING)
    return claim, audit_mechanism(Mechanism(run, strongest_adversary(claim)), claim, trials, 0.95, KEY)


@pytest.mark.usefixtures("without_fit")
@pytest.mark.parametrize("name", [*registry.classes("defense"), "laplace+sdq", "t-noise+sdq-lattice"])
@pytest.mark.matrix
@pytest.mark.ci(without=("t-noise+sdq-lattice", "jopeq-t"))
def test_no_audit_is_above_what_is_proved(name):
    rounds = {"udp": 3, "udp-crd": 3, "udp-lei": 3, "dp-sgd": 2, "dp-fedavg": 2, "dp-ftrl": 2}.get(name)
    found = audit(name, {}, {}, rounds, trials=30, seed=0)
    assert "above what is proved" not in found["reason"]
    proved, lower = found["proved"]["epsilon"], found["audited"]["strict"]
    assert proved == "inf" or 0 <= lower <= max(float(p["epsilon"]) for p in (found["proved"], *found["further"]))


@by_rows(Gaussian(epsilon=4.0), Laplace(epsilon=1.0), MVU(epsilon=1.0), ids=["gaussian", "laplace", "mvu"])
@pytest.mark.table(3)
def test_an_honest_mechanism_is_bounded_from_below_and_not_refuted(defense):
    claim, found = audited(defense, 1000)
    assert 0.2 * claim.epsilon < found.epsilon_lower <= claim.epsilon
    assert verdict(claim, found)[0] is Verdict.HOLDS
    assert not contradicts(claim, found)


@pytest.mark.slow
def test_the_t_mechanism_on_the_lattice_leaks_more_than_it_claims():
    found = audit("jopeq-t", {}, {}, None, trials=1000, seed=0)
    assert found["claimed"]["epsilon"] == 2.0
    assert 2.0 < found["audited"]["epsilon_lower"] <= 4.177
    assert found["verdict"] == "BROKEN"
    assert "at one norm" in found["audited"]["pair"]


@pytest.mark.matrix
def test_a_claim_is_not_broken_by_an_adversary_that_it_does_not_name():
    found = audit("dp-fedavg", {}, {}, 2, trials=100, threat="server", seed=0)
    assert found["verdict"] == "NOTHING PROMISED"
    assert "nothing is claimed against server" in found["reason"]
    assert found["audited"]["epsilon_lower"] > 2
    # the view of the claim's adversaries is Gaussian, that of a server is not
    assert found["audited"]["method"] == "Clopper-Pearson"


def test_plain_updates_are_distinguished_in_every_trial():
    claim, found = audited(NoDefense(), 100)
    assert found.counts == Counts(100, 0, 100, 100)
    assert found.epsilon_lower == pytest.approx(3.2813, abs=2e-4)  # the most that 100 trials per input can show
    assert verdict(claim, found)[0] is Verdict.NOTHING_PROMISED


# ---- which distinguisher finds a fault; test_audit_faults.py tests every fault in every defense


@pytest.mark.parametrize(
    "defense",
    [Gaussian(epsilon=1.0), Laplace(epsilon=1.0), SoundJoPEQ(epsilon=1.0), MVU(epsilon=1.0), UDP(epsilon=1.0)],
    ids=["gaussian", "laplace", "jopeq-sound", "mvu", "udp"],
)
@pytest.mark.table(5)
def test_noise_that_the_server_can_reproduce_is_caught(defense):
    claim, found = audited(Faulty(defense, defense, shared_noise=True), 60)
    assert found.distinguisher == "replay"
    assert found.epsilon_lower > claim.epsilon
    _, honest = audited(Faulty(defense, defense), 60)
    assert honest.distinguisher != "replay"


@pytest.mark.parametrize("defense", [Laplace(epsilon=1.0), SoundJoPEQ(epsilon=1.0)], ids=["laplace", "jopeq-sound"])
def test_a_scale_sent_in_clear_is_caught(defense):
    claim, found = audited(Faulty(defense, defense, clear=True), 100)
    assert found.distinguisher == "bytes"
    assert "from nothing" in found.pair
    assert found.epsilon_lower > claim.epsilon


def test_a_pair_of_a_self_scaled_defense_keeps_norm_and_mean():
    defense = registry.build("defense", "jopeq", {})
    (pair,) = pairs(defense, SETTING, Unit.COORDINATE, Relation.ANY_TWO, KEY)
    assert pair.zero.norm().item() == pytest.approx(pair.one.norm().item())
    assert pair.zero.mean().item() == pytest.approx(pair.one.mean().item(), abs=1e-6)
    header, numbers = defense.scaling.normalize(pair.one, SETTING.layout)
    assert header == defense.scaling.normalize(pair.zero, SETTING.layout)[0]
    assert numbers.abs().max().item() == pytest.approx(1.0, abs=1e-3)
    assert pair.focus.tolist() == [0]


def test_the_sub_vectors_of_a_pair_of_rows_are_columns():
    parts = registry.build("defense", "jopeq-t", {}).parts(SETTING)
    assert parts.places[:2].tolist() == [[0, 18], [1, 19]]
    assert parts.self_scaled
    assert not registry.build("defense", "jopeq-t", {"scale": "public"}).parts(SETTING).self_scaled


def test_an_audit_is_plain_data():
    found = audit("laplace", {"epsilon": 2.0}, {"dim": 4}, None, trials=50, confidence=0.9, seed=0)
    row = json.loads(json.dumps(found))["audited"]
    assert {"epsilon_lower", "confidence", "trials", "distinguisher", "pair"} <= set(row)
    assert (row["trials"], row["confidence"], row["threat"], row["unit"]) == (50, 0.9, "colluding-server", "coordinate")
    assert math.isfinite(row["epsilon_lower"])


def test_an_audit_below_the_claim_changes_no_verdict_and_one_above_breaks_it():
    claim, found = audited(Laplace(epsilon=1.0), 9)
    assert verdict(claim, dataclasses.replace(found, epsilon_lower=1.5, strict=0.5))[0] is Verdict.HOLDS
    above = dataclasses.replace(found, strict=1.5)
    assert verdict(claim, above)[0] is Verdict.BROKEN
    code, (why,), _ = inspect(claim, above, None)
    assert code is Code.CONTRADICTED
    assert "above what is proved" in why
