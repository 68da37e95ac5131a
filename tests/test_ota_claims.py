"""What over-the-air aggregation and its orthogonal baseline claim, and what holds of them."""

import math

import pytest

from leakgauge.defenses.ota import OTA
from leakgauge.defenses.ota_orthogonal import OTAOrthogonal
from leakgauge.harness.audit.claims import ask
from leakgauge.harness.core.accounting import gaussian_epsilon
from leakgauge.harness.core.claim import Relation, Unit, Verdict, judge
from leakgauge.harness.core.threats import Threat
from tests.ota_case import A_ROUND, DELTA, FIRST, SECOND, both, receive, setting_of, updates_of

# ota.md, section 3: claim of one round -> what holds, half a unit of the last printed digit
TRUE = [
    (0.5, 0.323, 5e-4),
    (1.0, 0.705, 5e-4),
    (1.2, 0.866, 5e-4),
    (2.0, 1.545, 5e-4),
    (4.0, 3.451, 5e-4),
    (6.0, 5.610, 5e-4),
    (8.0, 8.002, 5e-4),
    (10.0, 10.62, 5e-3),
    (15.0, 18.13, 5e-3),
    (20.0, 26.99, 5e-3),
]
# T: (16), half a unit of its last digit, its delta; what holds at that delta and at 1e-4, with half a unit
RUNS = [
    (10, 44.13, 5e-3, 1.1e-3, 2.631, 3.243, 5e-4),
    (100, 329.9, 0.05, 0.0101, 9.514, 13.461, 5e-4),
    (1000, 2947, 0.5, 0.1001, 48.42, 69.82, 5e-3),
]


def claim(defense, clients=4, rounds=1):
    setting = setting_of(clients)
    return defense.claim([defense.init(setting)] * rounds, setting)


RECEIVER = {Threat.SERVER, Threat.PARTICIPANT, Threat.PUBLIC}


@both
@pytest.mark.parametrize(("epsilon", "true", "digit"), TRUE)
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
    assert Threat.EAVESDROPPER not in made.against


@pytest.mark.parametrize(("rounds", "claimed", "half", "delta", "same", "at_1e4", "digit"), RUNS)
@pytest.mark.parametrize("name", ["ota", "ota-orthogonal"])
def test_a_run_has_the_printed_epsilons(name, rounds, claimed, half, delta, same, at_1e4, digit):
    parameters = {"epsilon": 1.2}
    found = ask(name, parameters, {"clients": 30}, rounds, None)
    assert found["claimed"]["epsilon"] == pytest.approx(claimed, abs=1.02 * half)
    assert found["claimed"]["delta"] == pytest.approx(delta, rel=1e-12)
    assert found["claimed"]["horizon"] == "whole run"
    assert found["claimed"]["source"].endswith("composed by (16)")
    assert found["proved"]["epsilon"] == pytest.approx(same, abs=1.02 * digit)
    assert found["verdict"] == "LOOSE"
    assert found["proved"]["against"] == found["claimed"]["against"]
    tight = ask(name, parameters, {"clients": 30}, rounds, DELTA)
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


def told(defense, clients=4, rounds=1):
    """What else holds, by adversary."""
    found = {}
    for proof in claim(defense, clients, rounds).further:
        (threat,) = proof.against
        found[threat] = proof
    return found


def test_adversaries_that_know_more_are_told_of():
    # ota.md, section 3, first golden allocation; exact accounting, two decimals
    first = told(OTA(**FIRST))
    assert set(first) == {Threat.COLLUDING_SERVER, Threat.EAVESDROPPER, Threat.PARTICIPANT}
    assert first[Threat.COLLUDING_SERVER].epsilon(DELTA) == pytest.approx(4.68, abs=5.1e-3)
    weakest = 2 * math.sqrt(13.313657 / 36.686343)
    assert first[Threat.EAVESDROPPER].epsilon(DELTA) == pytest.approx(gaussian_epsilon(weakest, DELTA), rel=1e-6)
    assert not first[Threat.EAVESDROPPER].tight
    knowing = 2 * math.sqrt(13.313657 / (36.686343 + 86.686343 + 186.686343 + 1))
    assert first[Threat.PARTICIPANT].epsilon(DELTA) == pytest.approx(gaussian_epsilon(knowing, DELTA), rel=1e-6)
    many = told(OTA(**FIRST), rounds=50)
    expected = gaussian_epsilon(weakest * math.sqrt(50), 1e-3)
    assert many[Threat.EAVESDROPPER].epsilon(1e-3) == pytest.approx(expected, rel=1e-6)


def test_a_client_that_adds_no_noise_has_none_when_it_counts():
    second = told(OTA(**SECOND))
    assert second[Threat.EAVESDROPPER].epsilon(DELTA) == math.inf
    expected = gaussian_epsilon(2 * math.sqrt(5), DELTA)
    assert second[Threat.COLLUDING_SERVER].epsilon(DELTA) == pytest.approx(expected, rel=1e-9)
    silent = told(OTA(noise_variance=0.0, **SECOND))
    assert silent[Threat.COLLUDING_SERVER].epsilon(DELTA) == math.inf
    # two clients of which one adds all the noise: it hears the other plainly
    pair = told(OTA(gains="0.001,1", noise_variance=0.0), clients=2)
    assert pair[Threat.PARTICIPANT].epsilon(DELTA) == math.inf


def test_a_single_client_is_the_orthogonal_one():
    setting = setting_of(1, d=100)
    update = updates_of(1, 100)
    sum_of_one, own = (receive(kind(gains="0.3"), setting, update) for kind in (OTA, OTAOrthogonal))
    assert len(sum_of_one) == len(own) == 1
    alone, single = claim(OTA(gains="0.3"), 1), claim(OTAOrthogonal(gains="0.3"), 1)
    assert alone.epsilon == pytest.approx(single.epsilon, rel=1e-12)
    assert [judge(one).proved for one in (alone, single)] == pytest.approx([0.8656] * 2, abs=5.1e-5)
    assert set(told(OTA(gains="0.3"), 1)) == {Threat.COLLUDING_SERVER, Threat.EAVESDROPPER}
    colluding = told(OTA(gains="0.3"), 1)[Threat.COLLUDING_SERVER]
    assert colluding.epsilon(DELTA) == pytest.approx(judge(alone).proved, rel=1e-9)


def test_orthogonal_users_are_claimed_for_by_the_one_that_is_worst_off():
    # G = 0.01: the receiver's noise is more than enough, (15) is 0.868722; G = 5: 1.2 (verify_ota.out, part I)
    assert claim(OTAOrthogonal(gains="0.01", power=1.0), 1).epsilon == pytest.approx(0.868722, abs=5.1e-7)
    made = claim(OTAOrthogonal(gains="0.01,5", power=1.0), 2)
    assert made.epsilon == pytest.approx(1.2, rel=1e-9)
    (heard,) = made.further
    assert heard.against == {Threat.EAVESDROPPER}
    assert heard.epsilon(DELTA) == math.inf
    # alpha and beta of G = 5 in the same list, six decimals
    (heard,) = claim(OTAOrthogonal(gains="5", power=1.0), 1).further
    expected = gaussian_epsilon(2 * math.sqrt(0.022468 / 0.977532), DELTA)
    assert heard.epsilon(DELTA) == pytest.approx(expected, rel=1e-4)
