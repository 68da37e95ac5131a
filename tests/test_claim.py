"""Claims, proofs, and their verdicts."""

import json
import math
from dataclasses import replace

import pytest

from leakgauge.harness.audit.claims import record_claim
from leakgauge.harness.core.accounting import Leak, Pure, epsilon, repeat
from leakgauge.harness.core.accounting import delta as delta_of
from leakgauge.harness.core.claim import Claim, Horizon, Proof, Relation, Unit, Verdict, judge
from leakgauge.harness.core.threats import Threat
from tests.by_rows import by_rows
from tests.command import call


def claim(claimed, proved, tight=True, delta=0.0):
    proof = Proof(None if proved is None else Pure(proved), Unit.MESSAGE, "closed form", "because", tight)
    against = frozenset({Threat.SERVER} if math.isfinite(claimed) else ())
    return Claim(claimed, delta, Unit.MESSAGE, Relation.ANY_TWO, Horizon.ONE_ROUND, against, "a paper", (), proof)


def leakgauge(*arguments):
    return call("claim", *arguments)


@by_rows(
    (1.0, 1.0, True, Verdict.HOLDS),
    (1.0, 0.995, True, Verdict.HOLDS),
    (1.0, 0.98, True, Verdict.LOOSE),
    (1.0, 1.001, True, Verdict.BROKEN),
    (1.0, 1.001, False, Verdict.UNPROVED),
    (1.0, None, True, Verdict.BROKEN),
    (math.inf, 1.0, True, Verdict.NOTHING_PROMISED),
    (math.inf, None, True, Verdict.NOTHING_PROMISED),
)
def test_the_verdict_compares_the_proved_epsilon_with_the_claimed_one(claimed, proved, tight, verdict):
    assert judge(claim(claimed, proved, tight)).verdict is verdict


@by_rows(
    (2.0, 3.0, Verdict.BROKEN), (3.5, 3.0, Verdict.UNPROVED), (4.0, 3.0, Verdict.HOLDS), (2.0, None, Verdict.UNPROVED)
)
def test_an_attained_epsilon_below_the_proved_one_breaks_a_claim_below_it_and_is_named(claimed, attained, verdict):
    shown = None if attained is None else Proof.pure(attained, 1, Unit.MESSAGE, "two inputs show it")
    found = judge(replace(claim(claimed, 4.0, tight=False), attained=shown))
    assert (found.verdict, found.proved) == (verdict, 4.0)
    assert ("attained 3 per message" in found.reason) == (attained is not None)
    assert ("two inputs show it" in found.reason) == (verdict is Verdict.BROKEN)


def test_the_verdict_uses_the_delta_of_the_claim_and_not_the_requested_one():
    record = record_claim(claim(1.0, 1.0), delta=0.3)
    assert record.verdict == "HOLDS"
    assert record.proved.delta == 0.3
    # randomized response of epsilon 1 at delta 0.3: ln(e - 0.3 (1 + e))
    assert record.proved.epsilon == pytest.approx(math.log(math.e - 0.3 * (1 + math.e)), rel=1e-12)


def test_a_claim_has_adversaries_exactly_if_it_promises_something():
    proof = Proof(None, Unit.MESSAGE, "", "")
    for claimed, against in ((1.0, frozenset()), (math.inf, frozenset(Threat)), (math.nan, frozenset(Threat))):
        with pytest.raises(ValueError, match="expected"):
            Claim(claimed, 0.0, Unit.MESSAGE, Relation.REPLACE, Horizon.ONE_ROUND, against, "", (), proof)


def test_pure_claims_add_up_and_compose_better_at_a_delta():
    assert epsilon(repeat(Pure(0.5), 7), 0.0) == pytest.approx(3.5)
    # Kairouz, Oh, Viswanath 2015: far below 100 at a small delta
    many = epsilon(repeat(Pure(0.1), 1000), 1e-5)
    assert 0.1 * 1000**0.5 < many < 0.5 * 100
    assert delta_of(repeat(Pure(0.1), 1000), many) == pytest.approx(1e-5, rel=1e-6)
    assert epsilon(repeat(Pure(400.0), 9400), 1e-5) == 3_760_000  # sqSGD's whole run
    assert delta_of(Pure(400.0), 399.0) == 1.0
    assert delta_of(Pure(400.0), 400.0) == 0.0


def test_a_leak_is_the_same_at_every_epsilon():
    assert epsilon(Leak(0.3), 0.0) == epsilon(Leak(0.3), 0.29) == math.inf
    assert epsilon(Leak(0.3), 0.3) == 0.0
    assert delta_of(repeat(Leak(0.3), 2), 50.0) == pytest.approx(0.51)
    assert delta_of(repeat(Leak(1.0), 3), 50.0) == 1.0
    assert delta_of(repeat(Leak(1.0), 0), 50.0) == 0.0


def test_the_command_prints_both_numbers_and_the_verdict():
    found = leakgauge("gaussian", "--set", "clip=3", "--set", "noise_std=6", "--rounds", "4")
    assert found.exit_code == 0
    assert (
        "claimed  epsilon 9.99726 (right over 99.99 %) per message, delta 1e-05, whole run" in found.output
    )  # mu 2, see test_accounting
    assert "HOLDS" in found.output
    assert "everybody" in found.output


@by_rows(
    (["udp"], "delta 0.001 is not below one in 49,980 records"),
    (["udp", "--setting", "samples=33", "--setting", "clients=30"], None),
    (["dp-sgd"], None),
    (["dp-fedavg", "--set", "delta=0.05"], "delta 0.05 is not below one in 30 clients"),
    (["dp-fedavg", "--set", "delta=0.05", "--setting", "clients=19", "--setting", "participants=19"], None),
    (["laplace"], None),
    (["laplace", "--delta", "0.04"], "delta 0.04 is not below one in 30 clients"),
    (["none", "--delta", "0.04"], None),
)
def test_a_delta_of_one_in_all_records_or_clients_or_more_has_a_note(arguments, note):
    printed, found = leakgauge(*arguments).output, json.loads(leakgauge(*arguments, "--json").output)
    if note is None:
        assert "  note " not in printed
        assert "notes" not in found
    else:
        assert f"\n  note     {note}: publishing all about one of them satisfies it.\n" in printed
        assert found["notes"] == [f"{note}: publishing all about one of them satisfies it."]


def test_the_command_prints_json_with_infinity_as_text():
    found = json.loads(leakgauge("none", "--json").output)
    assert found["claimed"]["epsilon"] == found["proved"]["epsilon"] == "inf"
    assert found["verdict"] == "NOTHING PROMISED"
    laplace = json.loads(leakgauge("laplace", "--set", "epsilon=4", "--setting", "dim=100", "--json").output)
    assert laplace["claimed"] == {
        "epsilon": 4.0,
        "chance": pytest.approx(math.exp(4) / (1 + math.exp(4))),
        "delta": 0.0,
        "unit": "coordinate",
        "relation": "any-two-inputs",
        "adjacency": "any-two-inputs",
        "horizon": "one round",
        "against": [
            "aggregator",
            "colluding-server",
            "eavesdropper",
            "malicious-server",
            "participant",
            "public",
            "server",
        ],
        "source": "Dwork et al. 2006",
        "assumes": [],
        "arithmetic": "reals",
    }
    assert {"epsilon", "delta", "method", "reason"} <= set(laplace["proved"])
    assert laplace["further"][0]["epsilon"] == 400.0
    assert laplace["parameters"]["epsilon"] == 4.0


@by_rows(
    (["laplce"], "no defense 'laplce'; did you mean 'laplace'?"),
    (["laplace", "--set", "epsilon=0"], "expected epsilon > 0"),
    (["laplace", "--set", "epsilon=four"], "laplace: epsilon: got 'four', expected"),
    (["laplace", "--set", "nonsense=1"], "laplace: nonsense: unknown key, got 1"),
    (["laplace", "--set", "epsilon"], "--set: got 'epsilon', expected key=value"),
    (["laplace", "--set", "clip=1", "--set", "clip=2"], "--set: got 'clip' twice"),
    (["laplace", "--rounds", "0"], "rounds: got 0, expected at least 1"),
    (["laplace", "--delta", "1"], "delta: got 1.0, expected 0 <= delta < 1"),
    (["laplace", "--setting", "size=3"], "setting.size: unknown key, known: dim, clients"),
    (["laplace", "--setting", "dim=0"], "setting.dim: got 0, expected a whole number from 1 to below 1e+09"),
    (["laplace", "--setting", "clients=0.5"], "setting.clients: got 0.5, expected a whole number from 1"),
    (["laplace", "--setting", "batch=-1"], "setting.batch: got -1, expected a whole number from 0"),
    (["laplace", "--setting", "lr=0"], "setting.lr: got 0, expected a number from 1e-12"),
    (["laplace", "--setting", "momentum=5"], "setting.momentum: got 5, expected 0 <= momentum < 1"),
    (["laplace", "--setting", "momentum=-0.5"], "setting.momentum: got -0.5, expected 0 <= momentum < 1"),
    (["laplace", "--setting", "clients=3", "--setting", "participants=4"], "participants: got 4, expected at most 3"),
    (["laplace", "--setting", "sends=nothing"], "setting.sends: got 'nothing', expected"),
    (["laplace+gaussian"], "expected a quantizer after '+', got 'gaussian'"),
    (["none+laplace"], "expected a defense that adds noise before '+', got 'none'"),
    (["a+b+c"], "expected two defenses joined by one '+'"),
)
def test_an_error_is_reported_in_one_line(arguments, message):
    found = leakgauge(*arguments)
    assert found.exit_code == 2
    assert message in found.output
    assert "Traceback" not in found.output
