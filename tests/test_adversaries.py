"""Audits play the strongest adversaries that a claim names, for each of the 127 sets of adversaries."""

import dataclasses
import itertools
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from leakgauge import Key, audit, rng
from leakgauge.defenses.gaussian import Gaussian
from leakgauge.harness.audit import standalone
from leakgauge.harness.audit.engine import adversaries
from leakgauge.harness.audit.neighbors import Inputs
from leakgauge.harness.audit.trials import Mechanism
from leakgauge.harness.core.cell import PartSpec
from leakgauge.harness.core.claim import Claim, Horizon, Proof, Relation, Unit, claim_over
from leakgauge.harness.core.contract import Defense, claim_of
from leakgauge.harness.core.errors import StudyError
from leakgauge.harness.core.threats import ANYBODY, SEES, Threat
from leakgauge.harness.federation import registry
from leakgauge.harness.federation.small import Federation
from leakgauge.harness.integrations.quick import Effort
from leakgauge.harness.integrations.suite import examine
from tests.audit_case import deployed, setting_of
from tests.by_rows import by_rows
from tests.fuzz import DEFENSES, SETTING

ROOT = Path(__file__).parents[1]
SETS = [frozenset(some) for k in range(1, 8) for some in itertools.combinations(Threat, k)]
QUARTER = Gaussian(noise_std=0.5)
BEHIND_SUMS = (Threat.AGGREGATOR, Threat.PARTICIPANT, Threat.PUBLIC)
SERVERS = {Threat.SERVER, Threat.COLLUDING_SERVER, Threat.MALICIOUS_SERVER}


@dataclasses.dataclass(frozen=True)
class Weak(Defense):
    """A quarter of the noise that it claims, against the adversaries whose names are in `against`.

    Attributes:
        masked: a mask of the shared key hides each message from those who do not have the key.
        stated: the distribution of the messages is stated, as they are.
    """

    against: str = ""
    masked: bool = False
    stated: bool = False

    def _masked(self, wire, shared):
        mask = rng.integers(shared.child("mask"), len(wire), 256).astype(np.uint8)
        return (np.frombuffer(wire, np.uint8) ^ mask).tobytes() if self.masked else wire

    def encode(self, state, memory, update, link, private):
        wire, memory = QUARTER.encode(state, memory, update, link, private)
        return self._masked(wire, link.key), memory

    def estimate(self, state, received, link):
        if self.masked and link.shared is None:
            return torch.zeros(link.setting.dim)
        return QUARTER.estimate(state, self._masked(received, link.shared or Key(0)), link)

    def message_distribution(self, state, memory, update, link):
        return QUARTER.message_distribution(state, memory, update, link) if self.stated else None

    def claim(self, history, setting):
        proof = Proof.gaussian(1.0, len(history), Unit.MESSAGE, "noise of std 2.")
        kind = Unit.MESSAGE, Relation.ANY_TWO, Horizon.of(len(history)), frozenset(map(Threat, self.against.split()))
        return Claim(proof.epsilon(1e-5), 1e-5, *kind, "a plant", (), proof)


def words(against):
    """The value of `Weak.against` for a set."""
    return " ".join(threat.value for threat in Threat if threat in against)


def audited(against, trials=100, **more):
    return standalone.audit(
        "tests.test_adversaries:Weak", {"against": words(against), **more}, {}, None, trials=trials, seed=0
    )


def claim_against(some):
    return claim_over(1, 1.0, Proof.pure(1.0, 1, Unit.MESSAGE, "some"), source="some", against=some)


def test_the_played_adversaries_are_maximal_and_together_see_what_each_named_one_sees():
    shown = {"messages", "shared", "sums"}
    for some in SETS:
        played = adversaries(claim_against(some))
        assert some >= set(played)
        assert not any(SEES[one] < SEES[other] for one in played for other in some)
        for other in some:
            # a server adds the messages up itself
            knows = [SEES[one] | ({"sums"} if one in SERVERS else set()) for one in played]
            assert any(SEES[other] & shown <= sees for sees in knows), (some, played)
    assert len(SETS) == 127


@pytest.mark.table(8)
@pytest.mark.parametrize("some", SETS, ids=words)
@pytest.mark.ci(4)
def test_a_quarter_of_the_noise_is_broken_against_every_set_of_adversaries(some):
    found = audited(some)
    assert (found["verdict"], found["audited"]["verdict"]) == ("BROKEN", "CONTRADICTED")
    assert Threat(found["audited"]["threat"]) in adversaries(claim_against(some))


def test_a_weaker_adversary_beside_a_strong_one_hides_nothing():
    alone = audited({Threat.SERVER})["audited"]["epsilon_lower"]
    for some in ({Threat.MALICIOUS_SERVER, Threat.PUBLIC}, set(Threat)):
        assert audited(some)["audited"]["epsilon_lower"] == alone
    assert audited({Threat.PUBLIC})["audited"]["epsilon_lower"] < alone


def test_of_two_different_views_the_one_that_shows_more_is_played():
    both = {Threat.AGGREGATOR, Threat.EAVESDROPPER}
    assert audited(both)["audited"]["threat"] == "eavesdropper"
    masked = audited(both, masked=True)
    assert (masked["audited"]["threat"], masked["verdict"]) == ("aggregator", "BROKEN")
    unseen = audited({Threat.EAVESDROPPER}, masked=True)["audited"]
    assert (unseen["epsilon_lower"], unseen["verdict"]) == (0.0, "INCONCLUSIVE")


@pytest.mark.parametrize("some", [{Threat.AGGREGATOR}, {Threat.MALICIOUS_SERVER}], ids=words)
def test_doctor_and_a_study_audit_every_adversary(some):
    given = {"against": words(some)}
    spec = PartSpec("tests.test_adversaries:Weak", given)
    assert standalone.audit_for_study(spec, setting_of(36), 300, Key(0)).code == "CONTRADICTED"
    found = {one.name: one for one in examine(spec.name, given, Effort(300, 30, 1))}
    assert "is above what is proved" in found["audit"].text
    assert "BROKEN" in found["claim"].text


def test_messages_that_follow_their_distribution_do_not_vouch_for_what_is_claimed_against_those_who_see_none():
    # the distribution states the weak noise, the proof more; too few trials to show it
    few = {some: audited({some}, trials=20, stated=True) for some in (*BEHIND_SUMS, Threat.EAVESDROPPER)}
    codes = {some: found["audited"]["verdict"] for some, found in few.items()}
    assert codes == dict.fromkeys(BEHIND_SUMS, "INCONCLUSIVE") | {Threat.EAVESDROPPER: "CONTRADICTED"}
    assert all("no `aggregate_distribution` is stated" in few[some]["audited"]["seen"] for some in BEHIND_SUMS)
    fedavg = standalone.audit("dp-fedavg", {}, {}, 1, trials=20, seed=0)["audited"]
    assert (fedavg["threat"], fedavg["verdict"]) == ("participant", "CONSISTENT")  # its distribution of sums is tested


def test_a_claim_against_nobody_is_refused_in_one_line():
    with pytest.raises(ValueError, match=r"expected adversaries in `against` .* got 0 with epsilon=1\.0$"):
        claim_against(frozenset())
    with pytest.raises(ValueError, match=r"and none otherwise; got 2 with epsilon=inf$"):
        dataclasses.replace(
            claim_against(ANYBODY), epsilon=float("inf"), against=frozenset({Threat.AGGREGATOR, Threat.PUBLIC})
        )
    with pytest.raises(StudyError) as error:
        audited(())
    assert len(str(error.value).splitlines()) == 1
    assert "expected adversaries in `against`" in str(error.value)


def test_one_who_sees_the_final_model_only_is_shown_no_model_of_a_round():
    deployment = deployed(Weak("public"), setting_of(4, rounds=2))
    back_and_forth = Inputs("reversing", -torch.ones(4), torch.ones(4), reverses=True)
    for threat, sees, moved in ((Threat.PUBLIC, False, 0.0), (Threat.PARTICIPANT, True, 1.0)):
        trace = Mechanism(deployment, threat).run(back_and_forth, 1, 200, Key(1))
        assert (trace.rounds is not None) == sees
        # each of two rounds moves the mean of three clients by 0.5 / 3 in each coordinate
        assert trace.estimates.mean(0).numpy() == pytest.approx(moved / 3, abs=0.08)


@pytest.mark.usefixtures("without_fit")
@by_rows(("dp-sgd", 2), ("dp-fedavg", 2), ("dp-sgd", 10), ("dp-fedavg", 10))
@pytest.mark.table(2)
@pytest.mark.ci("dp-sgd-10", "dp-fedavg-2")
def test_the_final_model_alone_shows_most_of_what_is_proved_for_all_rounds(name, rounds):
    # noise is scaled to the rounds; pairs that push the same way in each round move the sum as far as all rounds do
    found = audit(name, {}, {}, rounds, threat="public", trials=600, seed=0)
    audited = found["audited"]
    assert 0.75 * found["proved"]["epsilon"] < audited["epsilon_lower"]
    assert audited["strict"] < found["proved"]["epsilon"]
    assert (audited["rounds"], audited["threat"]) == (rounds, "public")
    assert "with 600 trials per input that show the final model only." in found["reason"]
    assert "reversing" not in audited["pair"]


def test_a_claim_against_anybody_is_against_those_who_see_what_was_listed():
    listed = {"messages", "shared", "sums", "models", "final", "others", "broadcast"}
    public = frozenset.intersection(*SEES.values()) - {"final"}
    assert frozenset(threat for threat in Threat if SEES[threat] <= public | listed) == ANYBODY
    assert claim_over(1, 1.0, Proof.pure(1.0, 1, Unit.MESSAGE, "some"), source="some").against == ANYBODY


ADDED = """
import json, sys
from importlib import util
added, module = json.loads(sys.argv[1]), "leakgauge.harness.core.threats"
spec = util.find_spec(module)
source = open(spec.origin).read()
kind, table = "class Threat(enum.Enum):", "SEES: dict[Threat, frozenset[str]] = {"
for name, sees in added.items():
    source = source.replace(kind, f"{kind}\\n    {name} = {name!r}")
    source = source.replace(table, f"{table}\\n    Threat.{name}: _PUBLIC | {set(sees.split())!r},")
threats = sys.modules[module] = util.module_from_spec(spec)
exec(compile(source, spec.origin, "exec"), threats.__dict__)
from leakgauge.harness.audit import engine
from leakgauge.harness.audit.trials import Mechanism
from leakgauge.harness.core.rng import Key
from tests import test_adversaries
from tests.audit_case import audit_mechanism
found = test_adversaries.all_claims()
for name in added:
    threat, verdicts = threats.View.parse(name + "+labels").threat, []
    for federation in map(test_adversaries.shipped, ("gaussian", "ota")):
        claim = federation.defense.claim(federation.history, federation.setting)
        audit = audit_mechanism(Mechanism(federation, threat), claim, 20, 0.95, Key(0))
        verdicts.append(engine.verdict(claim, audit)[0].value)
    found[name] = verdicts
print(json.dumps(found))
"""
NEWCOMERS = {  # what they see, and whether `gaussian` and `ota` promise anything against them
    "SEES_MORE": ("messages shared models final timing", False, False),
    "TIMING": ("models final timing", False, False),
    "COLLUDING_EAVESDROPPER": ("messages models final others", True, False),
    "LATE_EAVESDROPPER": ("messages final", True, False),
    "COLLUDING_CLIENT": ("models final others", True, False),
    "THIEF": ("shared final", True, True),
}


def shipped(name, parameters=()):
    return Federation.of(registry.build("defense", name, dict(parameters)), SETTING)


def all_claims():
    """For each shipped defense, the adversaries of its claim and its proofs, and those that an audit plays."""
    claims = {}
    for name, parameters in DEFENSES:
        federation = shipped(name, parameters)
        claim = claim_of(federation.defense, federation.history, federation.setting)
        proofs = [proof for proof in (claim.proved, *claim.further, claim.attained) if proof is not None]
        sets = [sorted(threat.value for threat in part.against) for part in (claim, *proofs)]
        claims[f"{name} {parameters}"] = [sets, [threat.value for threat in adversaries(claim)]]
    return claims


@pytest.fixture(scope="module")
def claims_with_newcomers():
    added = json.dumps({name: sees for name, (sees, _, _) in NEWCOMERS.items()})
    run = [sys.executable, "-c", ADDED, added]
    return json.loads(subprocess.run(run, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True).stdout)


@pytest.mark.parametrize("newcomer", NEWCOMERS)
def test_a_new_threat_widens_no_claim_and_nothing_else_fails(claims_with_newcomers, newcomer):
    sees, *promised = NEWCOMERS[newcomer]
    knows, grown = set(sees.split()), 0
    for name, (known, played_before) in all_claims().items():
        sets, played = claims_with_newcomers[name]
        assert [[one for one in against if one not in NEWCOMERS] for against in sets] == known, name
        assert played == played_before  # it sees no more than another, or is not of the claim
        for old in (old for old, new in zip(known, sets, strict=True) if newcomer in new):
            grown += 1
            assert any(knows <= SEES[Threat(one)] for one in old), (name, old)
            assert not ("messages" in knows and "eavesdropper" not in old), (name, old)
    assert (grown > 0) == promised[0]
    assert [verdict != "NOTHING PROMISED" for verdict in claims_with_newcomers[newcomer]] == promised
