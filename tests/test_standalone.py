"""`leakgauge audit --by`: audits inside a run, their refusals, and the delta of the claimed epsilon."""

import json
import math
import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import stats

from leakgauge import Key, Layout, Setting, audit, claim, rng, unpack_float32
from leakgauge.defenses.dp_fedavg import DPFedAvg
from leakgauge.defenses.gaussian import Gaussian
from leakgauge.harness.audit import standalone
from leakgauge.harness.audit.claims import ratios_delta
from leakgauge.harness.audit.goodness_of_fit import check_fit
from leakgauge.harness.cli.claim_text import claim_lines
from leakgauge.harness.core.answer import DefenseRecord
from leakgauge.harness.core.errors import StudyError
from leakgauge.harness.core.gaussian import gaussian_delta, gaussian_epsilon
from leakgauge.harness.core.stored import from_data, to_data
from tests.audit_case import setting_of
from tests.by_rows import by_rows
from tests.command import call
from tests.faults.library import lying, of_noise

pytestmark = pytest.mark.usefixtures("without_fit")

KEY = Key(0, ("ask-audit",))
FEW = {"clients": 200, "dim": 200}
"""Canary clients that are quick."""


def audited(name, parameters=None, setting=None, rounds=None, seed=0, **options):
    return audit(name, parameters or {}, setting or {}, rounds, seed=seed, **options)


def refused(*args, **options):
    """The lines of the error."""
    with pytest.raises(StudyError) as error:
        audited(*args, **options)
    return str(error.value).splitlines()


def test_messages_of_a_training_bound_a_gaussian_from_below():
    # sigma for epsilon 8: mu 1.666; 150 trials per input find less than 3 in 1 of 100 runs, and 1000 find 6.7
    found = audited("gaussian", rounds=40, by="messages")
    row = found["audited"]
    assert 3.0 < row["epsilon_lower"] < found["proved"]["epsilon"] == pytest.approx(8.0)
    assert (row["messages"], row["pilot"], row["rounds"]) == (300, 100, 40)
    assert (row["by"], row["unit"], row["threat"]) == ("messages", "message", "colluding-server")
    assert (found["claimed"]["horizon"], found["setting"]["dim"], found["setting"]["rounds"]) == ("one round", 650, 40)
    assert found["verdict"] == "HOLDS"
    assert found["reason"].endswith("with 150 trials per input.")


def test_messages_of_a_pure_claim_choose_the_threshold_on_the_first_rounds():
    row = audited("laplace", {"epsilon": 2.0}, rounds=24, by="messages")["audited"]
    assert 0 < row["epsilon_lower"] < 2.0
    assert (row["messages"], row["pilot"], row["method"]) == (180, 60, "Clopper-Pearson")


@dataclass(frozen=True)
class Quiet(Gaussian):
    """The Gaussian mechanism with less noise than it claims."""

    def encode(self, *args):
        return Gaussian(epsilon=100.0).encode(*args)


def test_messages_with_too_little_noise_break_the_claim(monkeypatch):
    monkeypatch.setattr(standalone, "check_fit", check_fit)
    found = audited("tests.test_standalone:Quiet", {"epsilon": 1.0}, rounds=10, by="messages")
    assert found["audited"]["epsilon_lower"] > 1.0
    assert found["verdict"] == "BROKEN"
    assert found["audited"]["verdict"] == "CONTRADICTED"
    bound, errors, fit, *_ = found["audited"]["contradicts"]
    assert "above what is proved" in bound
    assert errors.startswith("the test errs in 0 of 80 trials; under the stated distribution every test errs in 0.336")
    assert "depart from their distribution" in fit
    assert "delta_at" not in found["audited"]  # a number from a distribution that the messages do not follow


@pytest.mark.matrix
def test_a_quantized_gaussian_is_not_audited_as_a_gaussian():
    # the exact distribution of the level given the dither has 1.928; the Gaussian trade-off of the same counts shows
    # 6.5
    found = audited("gaussian+sdq", {"epsilon": 8.0, "gamma": 0.3}, {"dim": 1}, trials=300)
    assert found["audited"]["method"] == "all thresholds"
    assert found["audited"]["epsilon_lower"] <= 1.928


def test_a_message_may_be_a_gradient():
    found = audited("gaussian", {}, {"sends": "gradient", "clients": 4}, rounds=6, by="messages")
    assert (found["setting"]["sends"], found["setting"]["participants"]) == ("gradient", 4)
    assert (found["audited"]["messages"], found["audited"]["pilot"]) == (20, 4)


@pytest.mark.parametrize(("name", "pair"), [("ota", "end to end"), ("dp-fedavg", "from nothing")])
def test_canary_clients_bound_all_rounds_from_below(name, pair):
    found = audited(name, {}, FEW, rounds=3, by="one-run")
    row = found["audited"]
    assert 0 <= row["any_mechanism"] <= row["epsilon_lower"] <= found["proved"]["epsilon"]
    assert (row["pair"], row["canaries"], row["guesses"], row["rounds"]) == (pair, 200, 20, 3)
    assert 10 < row["right"] <= 20
    assert (found["claimed"]["horizon"], found["claimed"]["unit"]) == ("whole run", "client")
    assert found["reason"].endswith("with 200 canary clients.")


def test_canary_clients_hidden_by_their_own_noise_show_nothing():
    # each message of sqSGD hides its client, and the sum has the noise of a hundred others
    found = audited("sqsgd", {}, {"clients": 100, "dim": 100}, rounds=2, by="one-run")
    assert found["audited"]["epsilon_lower"] <= found["proved"]["epsilon"]


@dataclass(frozen=True)
class Noiseless(DPFedAvg):
    """DP-FedAvg whose server forgets the noise."""

    def decode(self, state, received, links, private):
        return torch.stack([unpack_float32(wire, links.setting.dim) for wire in received]).mean(0)


def test_canary_clients_without_noise_break_the_claim_but_none_against_other_adversaries():
    found = audited("tests.test_standalone:Noiseless", {"epsilon": 1.0}, FEW, rounds=2, by="one-run")
    assert found["audited"]["right"] == 20
    assert found["audited"]["epsilon_lower"] > 1.0
    assert found["verdict"] == "BROKEN"
    assert "above what is proved" in found["audited"]["seen"]
    assert audited("dp-fedavg", {"epsilon": 1.0}, FEW, rounds=2, by="one-run")["verdict"] == "HOLDS"
    found = audited("tests.test_standalone:Noiseless", {"epsilon": 1.0}, FEW, rounds=2, by="one-run", threat="server")
    assert found["verdict"] == "NOTHING PROMISED"
    assert "delta_at" not in found["audited"]


def test_cosines_estimate_and_change_no_verdict():
    # mu 0.5 by 100 cosines: a standard deviation of 0.1
    small = {"clients": 100, "dim": 10_000}
    found = audited("dp-fedavg", {"noise_std": 4.0}, small, rounds=4, by="cosine")
    row = found["audited"]
    assert row["mu"] == pytest.approx(0.5, abs=0.5)
    assert row["epsilon_estimate"] == pytest.approx(gaussian_epsilon(row["mu"], 1e-5))
    assert (row["kind"], row["canaries"], row["dim"], row["rounds"]) == ("estimate", 100, 10_000, 4)
    exposed = audited("tests.test_standalone:Noiseless", {"epsilon": 1.0}, small, rounds=4, by="cosine")
    assert exposed["audited"]["epsilon_estimate"] > 1.0
    assert (exposed["verdict"], "udited" in exposed["reason"]) == ("HOLDS", False)


@by_rows(
    ("ota", "messages", "its channel adds all messages up; expected --by trials or one-run or cosine"),
    ("dp-fedavg", "messages", "participant sees no messages; expected --by trials or one-run or cosine"),
    ("udp", "messages", "its unit is a record, which acts through local training; expected --by trials"),
    ("udp", "one-run", "its unit is a record, and a canary is a client; expected --by trials"),
    ("jopeq", "one-run", "its unit is a coordinate, and a canary is a client; expected --by trials or messages"),
    ("jopeq", "cosine", "its unit is a coordinate, and a canary is a client; expected --by trials or messages"),
    (
        "piecewise",
        "cosine",
        "at delta 0, where Gaussian distributions have no epsilon; expected --by trials or messages",
    ),
)
def test_a_claim_that_one_kind_cannot_audit_is_refused_with_the_kinds_that_can(name, by, words):
    (line,) = refused(name, {}, {"clients": 20}, rounds=2, by=by)
    assert line.startswith(f"{name}: cannot be audited by {by}: ")
    assert words in line


def test_all_unused_and_invalid_options_are_reported_together():
    wrong = {"trials": 10, "confidence": 2.0, "threat": "me", "device": "tpu"}
    lines = refused("gaussian", {}, {"participants": 3, "dim": 36}, **wrong, by="messages")
    assert lines == [
        "audit: trials: got 10, which an audit by messages does not use",
        "audit: confidence: got 2.0, expected 0 < confidence < 1",
        "audit: threat: got 'me', known: server, colluding-server, malicious-server, aggregator, eavesdropper, "
        "participant, public",
        "audit: device: got 'tpu', expected cpu, or cuda if there is one",
        "audit: setting.participants: got 3, expected all of 10 clients",
        "audit: setting.dim: got 36, the model that is trained has 650",
    ]
    assert refused("gaussian", by="guess") == ["audit: by: got 'guess', known: trials, messages, one-run, cosine"]
    lines = refused("dp-fedavg", {}, trials=5, confidence=0.9, threat="server", device="cpu", by="cosine")
    assert [line.split(":")[1] for line in lines] == [" trials", " confidence", " threat", " device"]


def test_too_many_samples_and_a_single_round_are_refused():
    (line,) = refused("gaussian", {}, {"samples": 1000}, rounds=2, by="messages")
    assert "setting.samples: got 10000 of all clients, expected at most 14" in line
    (line,) = refused("gaussian", rounds=1, by="messages")
    assert "two rounds and clients at least" in line
    (line,) = refused("gaussian", {}, {"clients": "many"}, rounds=2, by="one-run")
    assert line == "claim: setting.clients: got 'many', expected a whole number from 1 to below 1e+09"


def test_the_command_ends_with_2_and_one_line_for_each_problem():
    result = call("audit", "ota", "--by", "cosine", "--trials", 5, "--threat", "server")
    assert result.exit_code == 2
    assert len(result.stderr.splitlines()) == 2


def samples(mu, n, key):
    """Log-likelihood ratios of N(mu, 1) against N(0, 1), of samples from the second and from the first."""
    noise = rng.normal(key, (2, n), torch.float64).numpy()
    return mu * noise[0] - mu**2 / 2, mu * noise[1] + mu**2 / 2


def test_the_interval_of_a_sampled_delta_covers_the_closed_form_of_a_gaussian():
    missed = 0
    for i in range(200):
        found = ratios_delta(*samples(1.0, 500, KEY.child("cover", i)), 0.5, 0.9)
        assert (found.n, found.method) == (500, "sampling")
        missed += not found.low <= gaussian_delta(1.0, 0.5) <= found.high
    assert missed <= stats.binom.isf(1e-6, 200, 0.1)
    assert found.high - found.low < 0.2
    assert found.low <= found.delta <= found.high


def test_a_sampled_delta_is_the_larger_of_both_directions():
    # distributions on two points: 0.1 and 0.9 against 0.3 and 0.7; the direction of input 1 has the larger delta
    zeros = np.repeat([math.log(3), math.log(7 / 9)], [100, 900])
    ones = np.repeat([math.log(3), math.log(7 / 9)], [300, 700])
    at = 0.5
    forward, backward = 0.3 - math.exp(at) * 0.1, max(0.0, 0.9 - math.exp(at) * 0.7)
    assert ratios_delta(zeros, ones, at, 0.95).delta == pytest.approx(max(forward, backward), abs=1e-4)
    assert ratios_delta(-ones, -zeros, at, 0.95).delta == pytest.approx(max(forward, backward), abs=1e-4)


def test_inconsistent_ratios_give_no_delta():
    zeros, ones = samples(1.0, 500, KEY)
    assert ratios_delta(zeros + 5, ones + 5, 1.0, 0.95) is None
    assert ratios_delta(zeros, ones, 1.0, 0.95, most=2.0) is None
    assert ratios_delta(zeros, ones, 1.0, 0.95, most=20.0) is not None


def test_an_attained_proof_gives_the_delta_exactly():
    found = audited("gaussian", {"epsilon": 2.0}, trials=20)["audited"]["delta_at"]
    assert found["delta"] == found["low"] == found["high"] == pytest.approx(1e-5)
    assert (found["epsilon"], found["method"], found["n"]) == (pytest.approx(2.0), "exact", 0)
    udp = audited("udp", {"epsilon": 20.0}, rounds=2, trials=20)["audited"]["delta_at"]
    assert udp["delta"] > 10 * 1e-3  # ten times the claimed delta; the true epsilon is 30.3, not 20
    assert audited("dp-fedavg", {}, FEW, rounds=2, by="one-run")["audited"]["delta_at"]["delta"] == pytest.approx(1e-5)


def test_trials_give_the_delta_of_a_distribution_without_a_curve():
    # one coordinate of three rounds of Laplace: 2 a round, 6 in all, so that delta is 0 there
    found = audited("laplace", {"epsilon": 2.0}, {"dim": 4}, rounds=3, trials=200)["audited"]["delta_at"]
    assert (found["epsilon"], found["method"], found["n"]) == (6.0, "sampling", 200)
    assert found["delta"] == pytest.approx(0.0, abs=1e-4)
    assert found["low"] < 1e-6 < 0.005 < found["high"] < 0.05


def test_trials_give_the_delta_by_which_a_claim_is_missed():
    # Laplace noise with epsilon 4.62 and a quantizer with a known dither: at most Laplace's own delta
    found = audited("jopeq", {"scale": "public"}, {"dim": 4}, trials=200)
    row = found["audited"]["delta_at"]
    assert (found["verdict"], row["epsilon"], row["method"]) == ("BROKEN", 4.0, "sampling")
    assert 0.02 < row["low"] < row["delta"] < -math.expm1((4 - found["proved"]["epsilon"]) / 2)


@pytest.mark.matrix
def test_there_is_no_delta_if_the_likelihood_is_not_the_distribution_or_nothing_is_claimed():
    assert "delta_at" not in audited("sqsgd", trials=20)["audited"]  # extended for attacks: above what is proved
    assert "delta_at" not in audited("jopeq", trials=20)["audited"]  # at one norm: ratios of a part of the message
    assert "delta_at" not in audited("none", trials=20)["audited"]


STUDY = standalone.Studied(
    Setting(Layout(("first", "second"), ((300, 70), (70,))), 900, 90, 30, "update", 2, 0.1, 5, 7000), 7777
)


def half_if(when):
    """A Gaussian mechanism with half of its noise in messages for which `when(link)` holds."""
    noise = of_noise(lambda z, u, p, link: np.where(when(link), 0.5, 1.0) * z)
    return lying(Gaussian(epsilon=8.0), noise)


@by_rows(
    (
        "a tensor",
        lambda link: np.repeat([size == 21_000 for size in link.setting.layout.sizes], link.setting.layout.sizes),
    ),
    ("900 clients", lambda link: link.setting.clients == 900),
    ("90 senders", lambda link: link.setting.participants == 90),
    ("7,777 records", lambda link: link.sender.samples == 7777),
)
@pytest.mark.ci("a tensor-<lambda>", "90 senders-<lambda>")
def test_half_of_the_noise_at_the_size_of_a_study_alone_is_found_there(name, when):
    liar = half_if(when)
    assert not check_fit(liar, setting_of(36), KEY).rejects, name
    assert check_fit(liar, setting_of(36), KEY, *STUDY).rejects, name


def test_an_audit_of_a_study_has_its_claim_and_the_small_federation_beside_the_bound():
    found = audited("dp-fedavg", {"noise_std": 4.0}, study=STUDY, trials=20)
    whole = claim("dp-fedavg", {"noise_std": 4.0}, {"clients": 900, "participants": 90}, 30, None)
    assert found["claimed"]["epsilon"] == whole["claimed"]["epsilon"]
    assert found["proved"]["epsilon"] == whole["proved"]["epsilon"]
    assert [found["setting"][name] for name in ("dim", "clients", "participants", "rounds", "samples")] == [
        *(21_070, 900, 90, 30, 7000)
    ]
    row = found["audited"]
    assert [row[name] for name in ("dim", "clients", "rounds")] == [36, 3, 20]
    assert row["proved"] != found["proved"]["epsilon"]
    assert found["verdict"] == whole["verdict"]
    assert set(found["small"]) == {"verdict", "reason"}
    assert "audited" not in found["reason"]


DOCUMENT = (Path(__file__).parents[1] / "docs" / "claims-tables.md").read_text("utf-8")
ROWS = re.findall(
    r"^\| `(\S+) --by (\S+)` \| (.*?), (.*?), (.*?) \| (\S+) \| (\S+) \| (.*?) \| (.*?) \|$", DOCUMENT, re.M
)


@pytest.mark.slow
@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row[0]} by {row[1]}")
def test_a_row_of_the_table_is_what_its_command_finds(row):
    name, by, unit, delta, horizon, claimed, proved, bound, verdict = row
    found = audited(name, by=by)
    what, where = found["audited"], found["claimed"]
    assert (unit, horizon, verdict) == (where["unit"], where["horizon"], found["verdict"])
    measured = what["epsilon_estimate"] if bound.startswith("estimate") else what["epsilon_lower"]
    numbers = (delta, where["delta"]), (claimed, where["epsilon"]), (proved, found["proved"]["epsilon"])
    for printed, number in numbers:
        assert float(printed) == pytest.approx(number, rel=6e-4)
    # trained updates differ in last digits between processors, and so do single guesses
    assert float(bound.removeprefix("estimate ")) == pytest.approx(measured, rel=0.3)


def test_all_kinds_of_audits_are_in_the_table():
    assert {row[1] for row in ROWS} == {"messages", "one-run", "cosine"}


@by_rows(
    ("gaussian", {"by": "messages", "rounds": 4}),
    ("ota", {"by": "one-run", "rounds": 2, "setting": FEW}),
    ("dp-fedavg", {"by": "cosine", "rounds": 2, "setting": FEW}),
    ("gaussian", {"by": "trials", "trials": 50}),
)
def test_the_same_seed_gives_the_same_audit_and_another_one_another(name, options):
    first, again, other = (audited(name, seed=seed, **options) for seed in (0, 0, 1))
    assert first == again
    assert first["audited"] != other["audited"]
    assert json.loads(json.dumps(first, allow_nan=False)) == again
    record = from_data(DefenseRecord, json.loads(json.dumps(to_data(first.record))))
    assert (record, record.answer()) == (first.record, first)


BOUND = {"by", "pair", "epsilon_lower", "confidence", "threat", "method", "any_mechanism", "assumes", "delta", "unit"}
BOUND |= {"strict", "ceiling", "chance", "verdict", "contradicts", "seen"}
POSITIVES = {"device", "distinguisher", "true_positives", "false_positives"}
KEYS = {
    "trials": (BOUND | POSITIVES | {"trials", "needed", "assuming"}, {"messages", "canaries"}),
    "messages": (BOUND | POSITIVES | {"messages", "pilot", "rounds"}, {"needed", "canaries", "guesses"}),
    "one-run": (BOUND | {"rounds", "canaries", "guesses", "right"}, {"messages", "true_positives"}),
    "cosine": (
        {"by", "pair", "delta", "unit", "rounds", "canaries", "epsilon_estimate", "mu", "dim", "null", "kind"},
        {"epsilon_lower", "confidence", "threat", "method", "verdict"},
    ),
}
"""By kind of audit: keys of `audited` on which users' scripts rely, and keys of other kinds."""


@pytest.mark.parametrize(("by", "keys"), KEYS.items())
def test_an_audit_has_the_keys_of_its_kind_and_the_claim_those_of_a_claim(by, keys):
    found = audited(
        "dp-fedavg" if by in ("one-run", "cosine") else "gaussian",
        {},
        FEW if by in ("one-run", "cosine") else {},
        rounds=2,
        by=by,
        **({"trials": 20} if by == "trials" else {}),
    )
    assert keys[0] | {"delta_at"} <= set(found["audited"])
    assert not (keys[1] | {"fit", "detects", "reason"}) & set(found["audited"])
    assert set(found) - {"notes"} == {
        *("version", "defense", "parameters", "setting", "claimed", "proved", "further"),
        *("verdict", "reason", "audited"),
    }
    assert set(found["claimed"]) == {
        *("epsilon", "chance", "delta", "unit", "relation", "adjacency", "horizon", "against", "source", "assumes"),
        "arithmetic",
    }
    assert set(found["proved"]) == {*("epsilon", "chance", "delta", "unit", "method", "reason", "tight", "against")}


@by_rows((5, True), (99, True), (100, False))
def test_few_trials_have_a_note(trials, noted, monkeypatch):
    monkeypatch.setattr(standalone, "check_fit", lambda *_: None)
    found = audited("laplace", trials=trials)
    assert found.get("notes", []) == [f"{trials} trials are few: under 100, a verdict says little."] * noted
    assert (f"  note     {trials} trials are few" in "\n".join(claim_lines(found.record))) is noted


def test_a_distribution_is_shown_with_what_it_detects_and_an_infinite_number_as_text(monkeypatch):
    monkeypatch.setattr(standalone, "check_fit", check_fit)
    found = audited("gaussian", {}, {"dim": 4}, trials=20)["audited"]
    assert found["ceiling"] == "inf"
    assert (found["detects"], found["contradicts"]) == (found["fit"]["detects"], found["contradictions"])
    nothing = audited("none", trials=20)
    assert (nothing["audited"]["claimed"], nothing["proved"]["epsilon"]) == ("inf", "inf")
    assert to_data(nothing.record)["claim"]["epsilon"] is None


@by_rows(
    (["gaussian", "--by", "messages", "--rounds", "4"], ["audited", "of 15 right on input 1", "30 messages of 4"]),
    (["ota", "--by", "one-run", "--rounds", "2"], ["audited", "of 20 guesses right", "end to end", "200 canary"]),
    (["dp-fedavg", "--by", "cosine", "--rounds", "2"], ["ESTIMATE epsilon about", "no bound", "from nothing"]),
)
def test_the_command_prints_what_was_audited(options, words):
    few = [] if "messages" in options else ["--setting", "clients=200", "--setting", "dim=200"]
    result = call("audit", *options, *few)
    assert result.exit_code == 0
    assert "(exact, of the pair that attains the proof)" in result.stdout
    for word in words:
        assert word in result.stdout
    assert ("  audited  " in result.stdout) == ("cosine" not in options)
