"""The claims of UDP, CRD and Lei's approach, and their correct bounds."""

import dataclasses
import math

import pytest
from scipy import stats

from leakgauge.defenses._udp import budget, claimed_epsilon
from leakgauge.defenses.udp import UDP
from leakgauge.defenses.udp_crd import UDPCRD
from leakgauge.defenses.udp_lei import UDPLei
from leakgauge.harness.audit import claims
from leakgauge.harness.core.claim import Relation, Unit, Verdict, judge
from leakgauge.harness.core.contract import Feedback, Setting
from leakgauge.harness.core.errors import StudyError
from leakgauge.harness.core.gaussian import gaussian_epsilon
from leakgauge.harness.core.threats import Threat
from leakgauge.harness.core.vec import Layout
from tests.oracles import UDP_SAMPLED, UDP_TRUE

DELTA = 1e-3
LOG = math.log(1e3)
SETTING = Setting(Layout(("w",), ((10,),)), 50, 50, 200, sends="update", steps=1, lr=0.01, batch=0, samples=800)
SIX_OF_TEN = dataclasses.replace(SETTING, participants=30)


def claim(defense, setting=SETTING, losses=lambda number: (None, None)):
    """The claim of a run with these losses before and after each round."""
    states = [defense.init(setting)]
    while not defense.stops(states[-1]) and len(states) <= setting.rounds:
        number = len(states) - 1
        states.append(defense.advance(states[-1], Feedback(number, *losses(number))))
    return defense.claim(states[:-1], setting)


def now_and_then(number):
    """In rounds 5, 9 and 12 the model does not improve."""
    return (1.0, 1.0 if number in (5, 9, 12) else 0.5)


@pytest.mark.parametrize("calibration", ["zcdp", "tight"])
def test_crd_with_a_calibration_that_holds_keeps_its_claim_whatever_the_losses(calibration):
    for losses in (now_and_then, lambda number: (1.0, 1.0), lambda number: (None, 1.0)):
        assert judge(claim(UDPCRD(calibration=calibration), SETTING, losses=losses)).verdict is not Verdict.BROKEN
    whole = judge(claim(UDPCRD(calibration="tight"), SETTING, losses=now_and_then))
    assert whole.verdict is Verdict.HOLDS
    assert whole.claimed == pytest.approx(8, rel=1e-9)


def test_a_budget_that_crd_does_not_spend_is_not_claimed():
    # T = 2: the first round shrinks it to floor(2 * 0.9) = 1; half the budget is 8 / sqrt(2)
    made = claim(UDPCRD(rounds=2), losses=lambda number: (1.0, 1.0))
    assert made.horizon.value == "one round"
    assert made.epsilon == pytest.approx(8 / math.sqrt(2), rel=1e-12)


@pytest.mark.parametrize(("epsilon", "_", "true", "digit"), UDP_TRUE)
def test_a_whole_run_has_the_printed_epsilon(epsilon, _, true, digit):
    for kind in (UDP, UDPCRD):
        made = claim(kind(epsilon=epsilon))
        judgment = judge(made)
        assert made.epsilon == pytest.approx(epsilon, rel=1e-9)
        assert judgment.proved == pytest.approx(true, abs=1.02 * digit)
        assert judgment.verdict is (Verdict.LOOSE if epsilon < 6.9 else Verdict.BROKEN)  # above 6.978 for delta 1e-3
        assert (made.unit, made.relation, made.delta) == (Unit.RECORD, Relation.REPLACE, DELTA)
        assert made.against == frozenset(Threat)


def test_the_paper_claim_breaks_at_the_printed_epsilon():
    assert judge(claim(UDP(epsilon=6.977))).verdict is Verdict.HOLDS
    assert judge(claim(UDP(epsilon=6.979))).verdict is Verdict.BROKEN


@pytest.mark.parametrize("epsilon", [1, 4, 8, 20, 100])
def test_the_other_calibrations_keep_the_claim(epsilon):
    tight = judge(claim(UDP(epsilon=epsilon, calibration="tight")))
    assert tight.verdict is (Verdict.VACUOUS if epsilon > 10 else Verdict.HOLDS)
    assert [tight.claimed, tight.proved] == pytest.approx([epsilon, epsilon], rel=1e-9)
    loose = judge(claim(UDP(epsilon=epsilon, calibration="zcdp")))
    assert loose.verdict is (Verdict.VACUOUS if epsilon > 10 else Verdict.LOOSE)
    assert loose.claimed == pytest.approx(epsilon, rel=1e-9)


def test_one_round_is_claimed_by_the_same_formula():
    z = math.sqrt(2 * 200 * LOG) / 8
    for setting, q in ((SETTING, 1.0), (SIX_OF_TEN, 0.6)):
        one = UDP().claim([0], setting)
        assert one.epsilon == pytest.approx(8 / math.sqrt(200), rel=1e-12)
        assert one.epsilon == pytest.approx(math.sqrt(2 * q * LOG) / (math.sqrt(q) * z), rel=1e-12)
        assert judge(one).proved == pytest.approx(gaussian_epsilon(1 / (math.sqrt(q) * z), DELTA), rel=1e-9)
        assert [proof.unit for proof in one.further] == [Unit.CLIENT]


@pytest.mark.parametrize("calibration", ["paper", "zcdp", "tight"])
@pytest.mark.parametrize("q", [0.3, 1.0])
@pytest.mark.parametrize("epsilon", [0.5, 8.0, 60.0])
def test_the_claimed_epsilon_inverts_the_budget(calibration, q, epsilon):
    spent = budget(epsilon, DELTA, q, calibration)
    assert claimed_epsilon(spent, DELTA, q, calibration) == pytest.approx(epsilon, rel=1e-9)


@pytest.mark.parametrize(("rounds", "epsilon", "_", "average", "often", "always"), UDP_SAMPLED)
def test_selected_clients_have_the_printed_epsilons(rounds, epsilon, _, average, often, always):
    made = claim(UDP(epsilon=epsilon), dataclasses.replace(SIX_OF_TEN, rounds=rounds))
    mean, frequent, _ = made.further
    assert made.epsilon == pytest.approx(epsilon, rel=1e-9)
    assert judge(made).proved == pytest.approx(always, abs=5.1e-4)
    assert mean.epsilon(DELTA) == pytest.approx(average, abs=5.1e-4)
    assert frequent.epsilon(DELTA) == pytest.approx(often, abs=5.1e-4)
    assert {mean.unit, frequent.unit} == {Unit.RECORD}
    assert any("does not know which clients take part" in text for text in made.assumes)
    assert not any("takes part" in text for text in claim(UDP(calibration="tight"), SIX_OF_TEN).assumes)


def test_a_client_that_is_often_selected_may_be_so_in_the_rounds_of_least_noise():
    # z = 10, 9, ..., 1; 95 % of clients are selected in at most 8 of 10 rounds
    setting = dataclasses.replace(SIX_OF_TEN, rounds=10)
    made = claim(UDPLei(first=10.0, slope=0.1), setting)
    assert stats.binom.cdf(7, 10, 0.6) < 0.95 < stats.binom.cdf(8, 10, 0.6)
    mu = math.sqrt(sum(1 / z**2 for z in range(1, 9)))
    assert made.further[1].epsilon(DELTA) == pytest.approx(gaussian_epsilon(mu, DELTA), rel=1e-9)


def test_all_records_of_a_client_have_no_protection():
    # printed: n = 800, claimed epsilon 8: mu = 1722
    (whole,) = claim(UDP()).further
    assert whole.unit is Unit.CLIENT
    assert gaussian_epsilon(1721.5, DELTA) < whole.epsilon(DELTA) < gaussian_epsilon(1722.5, DELTA)


def test_a_clipped_update_covers_any_two_messages_and_so_all_records():
    made = claim(UDP(clips="update", calibration="tight"))
    (whole,) = made.further
    assert (made.unit, made.relation) == (Unit.MESSAGE, Relation.ANY_TWO)
    assert whole.unit is Unit.CLIENT
    assert [whole.epsilon(DELTA), judge(made).proved] == pytest.approx([8, 8], rel=1e-9)


def test_a_claim_states_its_assumptions():
    assert "no round's learning rate is above that of round 0" in claim(UDP()).assumes
    assert not any("learning rate" in text for text in claim(UDP(clips="update")).assumes)
    gradient = dataclasses.replace(SETTING, sends="gradient")
    assert not any("learning rate" in text for text in claim(UDP(), gradient).assumes)
    assert any("test losses" in text for text in claim(UDPCRD()).assumes)
    assert "(10)" in claim(UDP()).source
    assert "Balle" in claim(UDP(calibration="tight")).source


def test_the_command_line_shows_the_correct_bound():
    found = claims.claim("udp", {"epsilon": 8}, {}, 200, None)
    assert found["verdict"] == "BROKEN"
    assert found["claimed"]["epsilon"] == pytest.approx(8, rel=1e-12)
    assert found["proved"]["epsilon"] == pytest.approx(8.353, abs=5e-4)
    assert claims.claim("udp", {"epsilon": 4}, {}, None, None)["verdict"] == "LOOSE"
    assert claims.claim("udp", {"rounds": 50}, {}, None, None)["setting"]["rounds"] == 50
    assert claims.claim("udp-crd", {"rounds": 50}, {}, 200, None)["claimed"]["epsilon"] == pytest.approx(8, rel=1e-9)
    assert claims.claim("udp-lei", {}, {}, 200, None)["verdict"] == "LOOSE"
    with pytest.raises(StudyError, match=r"expected a first round within the budget 3\.0"):
        claims.claim("udp-lei", {"first": 0.1}, {}, None, None)
