"""What is proved for a client whose messages are seen only in sums: the noise of all clients counts.

The references are computed here: the Gaussian mechanism by its formula, and Renyi divergences of sums of Laplace
numbers from their density, by quadrature.
"""

import dataclasses
import json
import math

import numpy as np
import pytest
import torch
from scipy import optimize, special, stats

from leakgauge.defenses._common.function import of
from leakgauge.defenses.gaussian import Gaussian
from leakgauge.defenses.laplace import Laplace
from leakgauge.harness.audit.claims import claim_to_data, record_claim
from leakgauge.harness.core.cell import FederationSpec, PartSpec, TaskSpec, TrainingSpec
from leakgauge.harness.core.claim import IN_SUMS, Relation, Unit
from leakgauge.harness.core.code import states
from leakgauge.harness.core.concentrated import laplace_l2
from leakgauge.harness.core.contract import Feedback, claim_of
from leakgauge.harness.core.result import ClaimRecord
from leakgauge.harness.core.stored import from_data, to_data
from leakgauge.harness.core.threats import Threat
from leakgauge.harness.core.vec import Layout
from leakgauge.harness.data import default_root
from leakgauge.harness.federation import registry
from leakgauge.harness.federation.loop import setting_of
from leakgauge.harness.federation.recording import Recorder, read, spec_of
from leakgauge.harness.learn import models
from leakgauge.harness.study.goal import solve
from leakgauge.harness.study.prepare import StoredTraining, claimed, counted, prepare
from leakgauge.harness.study.run import run_study
from leakgauge.harness.study.study import resolve
from tests.doubles import random_examples, study_table
from tests.test_dropped import SETTING as SMALL
from tests.test_dropped import go
from tests.test_recording import FACTS, examples

SUMS = {Threat.AGGREGATOR, Threat.PUBLIC}
DEFENSES = ["gaussian", "laplace", "udp", "udp-crd", "cepam-clip"]
L2 = {"gaussian": {}, "laplace": {"norm": "l2"}, "udp": {"clips": "update"}, "udp-crd": {"clips": "update"}}


def build(name, **parameters):
    return registry.build("defense", name, L2.get(name, {}) | parameters)


def setting(participants=100, rounds=3, **changes):
    return dataclasses.replace(SMALL, clients=participants, participants=participants, rounds=rounds, **changes)


def claim(defense, at):
    states = [defense.init(at)]
    for _ in range(at.rounds - 1):
        states.append(defense.advance(states[-1], Feedback(len(states) - 1, None, None)))
    return claim_of(defense, states, at)


def of_client(stated, threat):
    """The proofs for a client against exactly these adversaries."""
    return [proof for proof in stated.further if proof.unit is Unit.CLIENT and proof.against == threat]


def gaussian_delta(epsilon, mu):
    """Balle & Wang 2018, Thm 8."""
    return stats.norm.cdf(mu / 2 - epsilon / mu) - math.exp(epsilon) * stats.norm.cdf(-mu / 2 - epsilon / mu)


@pytest.mark.parametrize(("participants", "rounds"), [(2, 1), (50, 4), (1000, 60)])
def test_normal_noises_of_all_clients_add_up_to_one_gaussian_mechanism(participants, rounds):
    stated = claim(build("gaussian", noise_std=0.4, clip=2.0), setting(participants, rounds))
    (all_,), (own,) = of_client(stated, SUMS), of_client(stated, {Threat.PARTICIPANT})
    for proof, noises in ((all_, participants), (own, participants - 1)):
        mu = 2.0 * math.sqrt(rounds / noises) / 0.4  # an update of norm 2, or none
        assert gaussian_delta(proof.epsilon(1e-5), mu) == pytest.approx(1e-5, rel=1e-3)
        assert proof.relation is Relation.ADD_REMOVE
    assert all_.tight


@pytest.mark.parametrize("name", ["udp", "udp-crd"])
def test_the_noises_of_udp_add_up_if_updates_are_clipped(name):
    at = setting(50, 3)
    defense = build(name, epsilon=4.0)
    stated = claim(defense, at)
    (all_,) = of_client(stated, SUMS)
    mu = math.sqrt(sum(1 / z**2 for z in [2 * defense.noise_multiplier(defense.init(at), at)] * 3) / 50)
    assert gaussian_delta(all_.epsilon(1e-3), mu) == pytest.approx(1e-3, rel=1e-3)
    assert not of_client(claim(build(name, epsilon=4.0, clips="records"), at), SUMS)


def sum_of_laplace(n, points):
    """The density of a sum of n standard Laplace numbers; a = n - 1/2: |x|^a K_a(|x|) / (sqrt(pi) 2^a (n - 1)!)."""
    at, order = np.abs(points), n - 0.5
    logs = order * np.log(at) + np.log(special.kve(order, at)) - at
    return np.exp(logs - 0.5 * math.log(math.pi) - order * math.log(2) - special.gammaln(n))


@pytest.mark.parametrize("n", [2, 3, 8])
@pytest.mark.parametrize("order", [1.1, 2.0, 8.0])
@pytest.mark.parametrize("shift", [0.05, 0.7, 4.0])
def test_a_sum_of_laplace_numbers_diverges_no_more_than_proved(n, order, shift):
    points = np.linspace(-120, 120, 400_001) + 1e-5
    moved, still = sum_of_laplace(n, points - shift), sum_of_laplace(n, points)
    assert np.trapezoid(still, points) == pytest.approx(1, abs=1e-6)
    powers = np.exp(order * np.log(moved) + (1 - order) * np.log(still))
    divergence = math.log(np.trapezoid(powers, points)) / (order - 1)
    assert divergence <= order * n * laplace_l2(shift / n, 1.0, 1).rho * (1 + 1e-5)
    # not far from it where the shift is small
    assert shift > 0.1 or divergence > 0.5 * order * shift**2 / 2 / n


def test_over_the_air_an_update_moves_the_sum_half_as_far_as_another_update_does():
    at = setting(8, 2)
    stated = claim(build("ota", epsilon=2.0, fading="equal"), at)
    (all_,), delta = of_client(stated, SUMS), 1e-6
    mu = optimize.brentq(lambda mu: gaussian_delta(stated.proved.epsilon(delta), mu) - delta, 0.01, 50)
    assert gaussian_delta(all_.epsilon(delta), mu / 2) == pytest.approx(delta, rel=1e-3)
    proofs = of_client(stated, {Threat.PARTICIPANT})
    assert sorted(proof.relation is None for proof in proofs) == [False, True]
    half, whole = sorted(proofs, key=lambda proof: proof.relation is None)
    assert half.epsilon(delta) < whole.epsilon(delta)


def test_errors_of_clipped_cepam_add_up():
    stated = claim(build("cepam-clip", clip=0.5, noise_std=0.2), setting(50, 3))
    (all_,) = of_client(stated, SUMS)
    assert gaussian_delta(all_.epsilon(1e-5), 0.5 * math.sqrt(3 / 50) / 0.2) == pytest.approx(1e-5, rel=1e-3)


def test_laplace_noise_with_an_l2_clip_counts_the_noise_of_all():
    defense = build("laplace", noise_std=0.3, delta=1e-5)
    stated = claim(defense, setting(64, 2))
    (all_,) = of_client(stated, SUMS)
    alone = claim(build("laplace", noise_std=16 * 0.3, delta=1e-5), setting(1, 2)).proved  # of two updates
    assert all_.epsilon(1e-5) == pytest.approx(alone.epsilon(1e-5), rel=1e-6)
    assert not all_.tight
    assert not of_client(claim(Laplace(), setting()), SUMS)


@pytest.mark.parametrize("name", DEFENSES)
def test_the_noise_counts_only_if_several_clients_of_equal_weight_send(name):
    defense = build(name)
    assert of_client(claim(defense, setting()), SUMS)
    assert IN_SUMS in claim(defense, setting()).assumes
    for other in (setting(1), setting(equal=False)):
        stated = claim(defense, other)
        assert not of_client(stated, SUMS)
        assert IN_SUMS not in stated.assumes
    spec = FederationSpec(clients=2, rounds=1)
    layout, rule = Layout(("w",), ((3,),)), defense.local
    assert [setting_of(layout, spec, sizes, rule).equal for sizes in ([5, 5], [5, 6])] == [True, False]
    for random in ({"dropout": 0.1}, {"participation": "poisson"}):
        assert not setting_of(layout, dataclasses.replace(spec, **random), [5, 5], rule).equal


@pytest.mark.parametrize("name", DEFENSES)
def test_a_claim_with_such_proofs_is_stored_and_read_as_it_is(name):
    stated = claim(build(name), setting())
    assert json.loads(json.dumps(claim_to_data(stated)))["proofs"][-1][-1] == "add-remove"
    record = record_claim(stated)
    assert from_data(ClaimRecord, to_data(record)) == record
    assert "relation" in to_data(record)["further"][-1]
    assert "relation" not in to_data(record)["proved"]


@pytest.mark.parametrize("name", ["gaussian+sdq", "laplace+sdq"])
def test_a_quantized_message_has_no_sum_of_noises(name):
    parameters = {"norm": "l2"} if name.startswith("laplace") else {}
    assert not of_client(claim(registry.build("defense", name, parameters), setting()), SUMS)


def test_clients_that_take_turns_count_the_noise_of_their_group():
    at = setting(10, 4)
    turns = dataclasses.replace(at, clients=40, participation="turns")
    one, all_ = build("gaussian"), of_client(claim(build("gaussian"), dataclasses.replace(at, rounds=1)), SUMS)[0]
    assert of_client(claim(one, turns), SUMS)[0].epsilon(1e-5) == all_.epsilon(1e-5)


def test_a_training_that_missed_a_client_has_no_proof_for_sums():
    data = {k: random_examples(10, seed=k) for k in range(5)}
    whole = go(build("gaussian"), data)
    assert counted(whole.setting, whole).equal
    data[2].x[0] = math.nan
    assert not counted(whole.setting, go(build("gaussian"), data)).equal


def test_a_stored_training_states_the_proof_unless_a_client_was_missing_or_malicious(tmp_path):
    target = {"kind": "members", "round": 1, "count": 4, "outside": 4}
    crafted = {"name": "model-replacement", "threat": "participant+craft", "target": target}
    federation = {"clients": 4, "samples": 40, "rounds": 2, "batch": 0, "local_steps": 1}
    for name, attack, counts in (("whole", {"name": "prior"}, True), ("crafted", crafted, False)):
        table = study_table(federation, ["gaussian"], [attack], limit=False)
        run = run_study(resolve(table, default_root()), folder=tmp_path / name, data=default_root(), workers=0)
        assert not run.failures
        (record,) = [one for one in run.trainings.values() if (one.spec.malice is None) == counts]
        assert (IN_SUMS in record.whole_run.assumes) == counts
        stored = StoredTraining(tmp_path / name, default_root(), record.spec.id, 0)
        assert (IN_SUMS in claimed(stored.federation, ()).assumes) == counts


class Signs(Gaussian):
    """What is decoded is no longer an update plus noise."""

    def estimate(self, state, received, link):
        return super().estimate(state, received, link).sign()


class Louder(Gaussian):
    """The same message, with another noise."""

    @property
    def sigma(self):
        return 2 * super().sigma


def test_a_subclass_that_changes_the_messages_has_no_proof_for_sums():
    assert not of_client(claim(Signs(), setting()), SUMS)
    assert of_client(claim(Louder(), setting()), SUMS)


def test_a_recording_has_no_proof_for_sums_because_weights_and_missing_clients_are_unknown(tmp_path):
    layout = models.build("linear", (3,), 2).layout
    with Recorder(tmp_path, FACTS, layout, PartSpec("gaussian"), most_bytes=10**6) as recorder:
        recorder.data(examples("train"), examples("auxiliary"), ("a", "b"))
        recorder.model(0, torch.zeros(layout.dim), 0.1)
    federation, task = spec_of(read(tmp_path)), TaskSpec(f"recording:{tmp_path}", "linear")
    spec = TrainingSpec(task, federation, PartSpec("gaussian"), 0)
    assert not prepare(spec, tmp_path).setting.equal


@states(clip=1.0, noise=0.5, unit="client", epsilon=4.0)
def stated(update):
    return update


@pytest.mark.parametrize(
    ("name", "knob"), [("gaussian", "noise_std"), (f"function:{__name__}.stated", "noise"), ("laplace", "noise_std")]
)
def test_a_goal_against_an_aggregator_needs_less_noise(name, knob):
    stds = []
    for adversary in ("server", "aggregator"):
        target = {
            "proved_epsilon": 4.0,
            "unit": "client",
            "adversary": adversary,
            "parameter": knob,
            "relation": "add-remove",
        }
        defense = {"name": name, knob: 1.0, "target": target} | L2.get(name, {})
        table = study_table({"clients": 4, "samples": 40, "rounds": 2}, [defense], [{"name": "prior"}])
        cells, _ = solve(resolve(table, default_root()).cells, default_root(), lambda specs: {})
        stds.append(cells[0].training.defense.parameters[knob])
    clients = cells[0].training.federation.clients
    assert stds[0] / stds[1] == pytest.approx(2 * math.sqrt(clients), rel=0.01)


STATED = {
    "l2 clip": ({"unit": "record"}, True),
    "message": ({"unit": "message", "clip": None, "sensitivity": 1.0, "norm": "none"}, True),
    "record without a clip": ({"unit": "record", "clip": None, "sensitivity": 0.1, "norm": "none"}, False),
    "a client that leaves": ({"unit": "client", "relation": "add-remove"}, True),
    "coordinate": ({"unit": "coordinate"}, False),
    "Laplace": ({"unit": "message", "family": "laplace"}, False),
    "the user's own proof": ({"unit": "message", "proves": lambda stated, size: (3.0, "by hand")}, False),
}


@pytest.mark.parametrize("facts", STATED)
def test_a_function_counts_the_noise_of_all_where_a_client_moves_its_message_by_a_known_norm(facts):
    changes, counted = STATED[facts]

    @states(**{"clip": 1.0, "noise": 0.5} | changes)
    def noisy(update):
        return update

    (proof, *_) = of_client(claim(of("function:tests.test_summed.noisy", noisy)(), setting(25, 2)), SUMS) or [None]
    assert (proof is not None) == counted
    if counted:
        assert gaussian_delta(proof.epsilon(1e-5), 1 / (5 * 0.5) * math.sqrt(2)) == pytest.approx(1e-5, rel=1e-3)
