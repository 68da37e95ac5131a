"""The claims of over-the-air aggregation and its orthogonal baseline, and their correct bounds."""

import math

import pytest

from leakgauge.defenses.ota import OTA
from leakgauge.defenses.ota_orthogonal import OTAOrthogonal
from leakgauge.harness.audit import claims
from leakgauge.harness.core.claim import Relation, Unit, Verdict, judge
from leakgauge.harness.core.gaussian import gaussian_epsilon
from leakgauge.harness.core.threats import Threat
from tests.oracles import OTA_ROUNDS, OTA_TRUE
from tests.ota_case import A_ROUND, DELTA, FIRST, SECOND, both, setting_of


def claim(defense, clients=4, rounds=1):
    setting = setting_of(clients)
    return defense.claim([defense.init(setting)] * rounds, setting)


RECEIVER = set(Threat) - {Threat.COLLUDING_SERVER, Threat.EAVESDROPPER}


@both
@pytest.mark.parametrize(("epsilon", "true", "digit"), OTA_TRUE)
def test_a_round_has_the_printed_epsilon(kind, epsilon, true, digit):
    # beyond epsilon 7.991 the formula is false
    made = claim(kind(epsilon=epsilon, **FIRST))
    found = judge(made)
    assert made.epsilon == pytest.approx(epsilon, rel=1e-9)
    assert found.proved == pytest.approx(true, abs=1.02 * digit)
    assert found.verdict is (Verdict.LOOSE if epsilon < 7.9 else Verdict.BROKEN)
    assert (made.unit, made.relation, made.delta) == (Unit.CLIENT, Relation.ANY_TWO, DELTA)
    collusion = set() if kind is OTA else {Threat.COLLUDING_SERVER}
    assert made.against == RECEIVER | collusion


@pytest.mark.parametrize(("rounds", "claimed", "half", "delta", "same", "at_1e4", "_", "digit"), OTA_ROUNDS[1:])
@pytest.mark.parametrize("name", ["ota", "ota-orthogonal"])
def test_a_run_has_the_printed_epsilons(name, rounds, claimed, half, delta, same, at_1e4, _, digit):
    parameters = {"epsilon": 1.2}
    found = claims.claim(name, parameters, {"clients": 30}, rounds, None)
    assert found["claimed"]["epsilon"] == pytest.approx(claimed, abs=1.02 * half)
    assert found["claimed"]["delta"] == pytest.approx(delta, rel=1e-12)
    assert found["claimed"]["horizon"] == "whole run"
    assert found["claimed"]["source"].endswith("composed by (16)")
    assert found["proved"]["epsilon"] == pytest.approx(same, abs=1.02 * digit)
    assert found["verdict"] == ("VACUOUS" if same > 10 else "LOOSE")
    assert found["proved"]["against"] == found["claimed"]["against"]
    tight = claims.claim(name, parameters, {"clients": 30}, rounds, DELTA)
    assert tight["proved"]["epsilon"] == pytest.approx(at_1e4, abs=1.02 * digit)


@both
def test_a_run_whose_deltas_reach_one_is_promised_nothing(kind):
    made = claim(kind(**FIRST), rounds=10_000)
    assert (made.epsilon, made.against, made.delta) == (math.inf, frozenset(), DELTA)
    found = judge(made)
    assert found.verdict is Verdict.NOTHING_PROMISED
    assert found.proved == pytest.approx(gaussian_epsilon(2 / math.sqrt(A_ROUND) * 100, DELTA), rel=1e-9)
    assert made.proved.against >= RECEIVER


def test_a_receiver_that_is_noisy_enough_lowers_the_claim():
    # Psi < 0: no noise of the users, mu = 2 sqrt(P)
    made = claim(OTA(gains="1,2", power=0.01, epsilon=5.0), clients=2)
    mu = 2 * math.sqrt(0.01)
    assert made.epsilon == pytest.approx(mu * math.sqrt(2 * math.log(1.25 / DELTA)), rel=1e-12)
    assert judge(made).proved == pytest.approx(gaussian_epsilon(mu, DELTA), rel=1e-9)


def further(defense, clients=4, rounds=1):
    found = {}
    for proof in claim(defense, clients, rounds).further:
        (threat,) = proof.against
        found[threat] = proof
    return found


def test_adversaries_that_know_more_have_further_proofs():
    # first golden allocation; exact accounting, two decimals
    first = further(OTA(**FIRST))
    assert set(first) == {Threat.COLLUDING_SERVER, Threat.EAVESDROPPER, Threat.PARTICIPANT}
    assert first[Threat.COLLUDING_SERVER].epsilon(DELTA) == pytest.approx(4.68, abs=5.1e-3)
    weakest = 2 * math.sqrt(13.313657 / 36.686343)
    assert first[Threat.EAVESDROPPER].epsilon(DELTA) == pytest.approx(gaussian_epsilon(weakest, DELTA), rel=1e-6)
    assert not first[Threat.EAVESDROPPER].tight
    knowing = 2 * math.sqrt(13.313657 / (36.686343 + 86.686343 + 186.686343 + 1))
    assert first[Threat.PARTICIPANT].epsilon(DELTA) == pytest.approx(gaussian_epsilon(knowing, DELTA), rel=1e-6)
    many = further(OTA(**FIRST), rounds=50)
    expected = gaussian_epsilon(weakest * math.sqrt(50), 1e-3)
    assert many[Threat.EAVESDROPPER].epsilon(1e-3) == pytest.approx(expected, rel=1e-6)


def test_a_client_that_adds_no_noise_has_only_the_receivers_noise():
    second = further(OTA(**SECOND))
    assert second[Threat.EAVESDROPPER].epsilon(DELTA) == math.inf
    expected = gaussian_epsilon(2 * math.sqrt(5), DELTA)
    assert second[Threat.COLLUDING_SERVER].epsilon(DELTA) == pytest.approx(expected, rel=1e-9)
    silent = further(OTA(noise_variance=0.0, **SECOND))
    assert silent[Threat.COLLUDING_SERVER].epsilon(DELTA) == math.inf
    # two clients, one of them adds all the noise: it receives the other without noise
    pair = further(OTA(gains="0.001,1", noise_variance=0.0), clients=2)
    assert pair[Threat.PARTICIPANT].epsilon(DELTA) == math.inf


def test_a_single_client_is_the_orthogonal_one():
    alone, single = claim(OTA(gains="0.3"), 1), claim(OTAOrthogonal(gains="0.3"), 1)
    assert alone.epsilon == pytest.approx(single.epsilon, rel=1e-12)
    assert [judge(one).proved for one in (alone, single)] == pytest.approx([0.8656] * 2, abs=5.1e-5)
    assert set(further(OTA(gains="0.3"), 1)) == {Threat.COLLUDING_SERVER, Threat.EAVESDROPPER}
    colluding = further(OTA(gains="0.3"), 1)[Threat.COLLUDING_SERVER]
    assert colluding.epsilon(DELTA) == pytest.approx(judge(alone).proved, rel=1e-9)


def test_the_orthogonal_claim_is_that_of_the_worst_client():
    # G = 0.01: the receiver's noise is more than enough, and (15) is 0.868722, as printed; G = 5: 1.2
    assert claim(OTAOrthogonal(gains="0.01", power=1.0), 1).epsilon == pytest.approx(0.868722, abs=5.1e-7)
    made = claim(OTAOrthogonal(gains="0.01,5", power=1.0), 2)
    assert made.epsilon == pytest.approx(1.2, rel=1e-9)
    (heard,) = made.further
    assert heard.against == {Threat.EAVESDROPPER}
    assert heard.epsilon(DELTA) == math.inf
    # alpha and beta of G = 5 as printed, six decimals
    (heard,) = claim(OTAOrthogonal(gains="5", power=1.0), 1).further
    expected = gaussian_epsilon(2 * math.sqrt(0.022468 / 0.977532), DELTA)
    assert heard.epsilon(DELTA) == pytest.approx(expected, rel=1e-4)
