"""The lineup attack: who is behind a message, for all defenses, models, batches, steps, rounds and sums."""

import dataclasses
import math

import numpy as np
import pytest
import torch

from leakgauge.attacks.lineup import Lineup
from leakgauge.harness.core.cell import FederationSpec, PartSpec, Target, TaskSpec, TrainingSpec
from leakgauge.harness.core.contract import Candidates, Defense, Named
from leakgauge.harness.core.rng import Key
from leakgauge.harness.core.stored import to_data
from leakgauge.harness.core.threats import View
from leakgauge.harness.federation import registry
from leakgauge.harness.federation.loop import Keep
from leakgauge.harness.federation.observe import observe
from leakgauge.harness.study.attack import of_parts, run_attack, to_parts
from leakgauge.harness.study.jobs import RunContext
from leakgauge.harness.study.prepare import StoredTraining
from leakgauge.harness.study.score import score_lineup
from leakgauge.harness.study.study import resolve
from leakgauge.harness.study.training import keep_for, run_training
from tests.doubles import study_table

SERVER = View.parse("server+lineup")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A function that trains digits for one round and gives the federation."""

    def federation(defense="none", model="mlp-small", seed=3, parameters=None, **changes):
        asked = {"clients": 10, "rounds": 1, "algorithm": "fedsgd", "batch": 0, "samples": 400, **changes}
        part = PartSpec(defense, registry.build("defense", defense, parameters or {}).parameters())
        spec = TrainingSpec(TaskSpec("digits", model), FederationSpec(**asked), part, seed=seed)
        context = RunContext(tmp_path_factory.mktemp("lineup"), tmp_path_factory.getbasetemp())
        run_training(spec, Keep(frozenset(range(asked["rounds"])), frozenset(range(asked["rounds"]))), context)
        return StoredTraining.of(spec, context).federation

    return federation


def estimates_of(federation, view=SERVER, attack=None, **target):
    observation, truth = observe(federation, view, Target(**{"count": 20, "among": 50, **target}))
    answer = (attack or Lineup()).run(observation, Key(1))
    return {estimate.name: estimate for estimate in score_lineup(answer, truth.places)}, answer


@pytest.mark.parametrize(
    ("defense", "least"), [("none", 1.0), ("jopeq", 1.0), ("cepam-gaussian", 1.0), ("sdq", 1.0), ("top-k", 1.0)]
)
def test_one_record_is_named_behind_each_of_these_defenses(trained, defense, least):
    found, answer = estimates_of(trained(defense))
    assert answer.exact
    assert found["named"].value >= least
    assert abs(found["posterior_gap"].value) < 0.01


@pytest.mark.parametrize("defense", ["gaussian", "ota"])
def test_behind_much_noise_nobody_is_named_more_often_than_by_chance(trained, defense):
    found, _ = estimates_of(trained(defense), count=40)
    assert found["named"].low <= found["named"].chance
    assert found["named"].chance == 1 / 50


def test_the_score_sees_only_the_order_of_the_true_record():
    scores = torch.tensor([0.0, 3.0, 1.0, 2.0], dtype=torch.float64)
    candidates = Candidates(scores, torch.tensor([0.0], dtype=torch.float64), torch.full((4,), math.nan))
    answer = Named(((candidates,), (candidates,)), exact=True)
    found = {estimate.name: estimate for estimate in score_lineup(answer, [(1,), (2,)])}
    assert found["named"].values == (1.0, 0.0)
    assert found["named@2"].values == (1.0, 1.0)  # the first rival of the second record has 0
    assert found["lineup_auc"].values == (1.0, 1 / 3)
    posterior = torch.softmax(scores, 0)
    gaps = [float(posterior[at] - posterior.square().sum()) for at in (1, 2)]
    assert found["posterior_gap"].values == pytest.approx(gaps)


def test_a_tie_is_a_miss():
    scores = torch.tensor([1.0, 1.0, 0.0], dtype=torch.float64)
    answer = Named(((Candidates(scores, scores[:0], torch.full((3,), math.nan)),),), exact=True)
    found = {estimate.name: estimate for estimate in score_lineup(answer, [(0,)])}
    assert found["named"].value == 0.0
    assert found["lineup_auc"].value == 0.75


def test_candidates_are_a_grant_of_one_label_and_hold_the_record_once(trained):
    federation = trained()
    seen, truth = observe(federation, View.parse("server"), Target(count=5, among=30))
    assert seen.lineups is None
    assert seen.mates is None
    seen, truth = observe(federation, SERVER, Target(count=5, batch=2, among=30))
    for lineups, places, victim in zip(seen.lineups, truth.places, truth.victims, strict=True):
        assert len(lineups) == len(places) == 2
        for lineup, place, x, y in zip(lineups, places, *victim, strict=True):
            assert bool((lineup.y == y).all())
            equal = (lineup.x == x).flatten(1).all(1)
            assert int(equal.sum()) == 1
            assert bool(equal[place])
    assert len({place for places in truth.places for place in places}) > 2  # not always in one place


def test_too_few_records_of_a_label_are_said(trained):
    _, truth = observe(trained(), SERVER, Target(count=5, among=1000))
    assert "the smallest lineup has" in truth.note


def test_references_are_no_candidates(trained):
    _, answer = estimates_of(trained(), count=2)
    assert {len(place.references) for each in answer.records for place in each} == {28}
    _, answer = estimates_of(trained(), attack=Lineup(references=0), count=2)
    assert {len(place.references) for each in answer.records for place in each} == {0}


def test_unknown_records_of_a_batch_are_noise(trained):
    federation = trained()
    known, answer = estimates_of(federation, View.parse("server+lineup+mates"), batch=4, count=10)
    assert answer.exact
    assert known["named"].value == 1.0
    unknown, answer = estimates_of(federation, batch=4, count=10)
    assert not answer.exact
    assert "posterior_gap" not in unknown
    assert unknown["named"].n == 40
    assert "over 10 batches" in unknown["named"].method
    assert unknown["named"].value > 0.5


@pytest.mark.parametrize("defense", ["none", "jopeq"])
@pytest.mark.ci("none")
def test_local_steps_are_simulated(trained, defense):
    federation = trained(defense, algorithm="fedavg", local_steps=5, batch=0)
    found, answer = estimates_of(federation, among=30)
    assert answer.exact
    assert found["named"].value >= 0.95
    # others unknown: their steps are simulated too
    found, answer = estimates_of(federation, among=30, batch=3, count=6)
    assert not answer.exact
    assert found["named"].value > 0.3


def test_rounds_add_up(trained):
    federation = trained("gaussian", rounds=6, parameters={"epsilon": 60.0})
    one, _ = estimates_of(federation, among=20, count=25)
    six, _ = estimates_of(federation, among=20, count=25, rounds=6)
    assert six["lineup_auc"].value > one["lineup_auc"].value + 0.05
    assert six["nats"].value > 2 * one["nats"].value


def test_a_sum_of_clients_hides_little_without_noise(trained):
    federation = trained()
    found, answer = estimates_of(federation, View.parse("aggregator+lineup"), users=5, count=6)
    assert not answer.exact
    assert found["named"].value > 0.5
    found, _ = estimates_of(federation, View.parse("aggregator+lineup+mates"), users=5, count=6)
    assert found["named"].value == 1.0


def test_an_eavesdropper_needs_no_shared_key(trained):
    found, _ = estimates_of(trained("jopeq"), View.parse("eavesdropper+lineup"), among=30)
    assert found["named"].value > 0.5


def test_a_defense_without_a_likelihood_is_read_by_its_estimate(trained):
    federation = trained("jopeq")
    silent = type("Silent", (type(federation.defense),), {"likelihood": Defense.likelihood})
    quiet = silent(**federation.defense.parameters())
    found, answer = estimates_of(dataclasses.replace(federation, defense=quiet), among=30)
    assert not answer.exact
    assert found["named"].value > 0.9


def test_presence_is_told_from_absence_by_fit(trained):
    found, _ = estimates_of(trained("jopeq"), among=20)
    assert found["present_auc_fit"].value > 0.95


def test_parts_of_an_answer_are_stored_whole(trained):
    _, answer = estimates_of(trained(), count=3, batch=2)
    again = to_parts(of_parts(answer))
    assert again.exact is answer.exact
    for each, same in zip(answer.records, again.records, strict=True):
        for place, other in zip(each, same, strict=True):
            assert all(np.array_equal(a, b, equal_nan=True) for a, b in zip(place, other, strict=True))


def study(**changes):
    table = {
        "name": "s",
        "tasks": [{"data": "digits", "model": "mlp-small"}],
        "federations": [{"rounds": 1}],
        "defenses": [{"name": "none"}],
        "attacks": [
            {"name": "prior"},
            {"name": "map", "threat": "server+labels"},
            {"name": "membership-loss", "threat": "public"},
        ],
    }
    return resolve(table | changes)


def test_each_target_of_a_reconstruction_has_its_lineup_and_one_of_its_own_unless_a_study_declines():
    cells = [cell for cell in study().cells if cell.attack.name == "lineup"]
    assert [(cell.threat, cell.target.kind) for cell in cells] == [("server+lineup", "probe")] * 2
    pictured, own = (cell.target for cell in cells)
    assert (own.count, own.among, own.skip) == (200, 20, pictured.images)
    assert [cell.target.count for cell in study(lineup=40).cells if cell.attack.name == "lineup"][1] == 40
    assert not cells[0].limit
    assert not [cell for cell in study(lineup=False).cells if cell.attack.name == "lineup"]
    own = {"name": "lineup", "threat": "server+lineup", "target": {"among": 1000}}
    among = [cell.target.among for cell in study(attacks=[own]).cells]
    assert among == [1000]


def test_a_target_keeps_its_id():
    assert "among" not in to_data(Target())


@pytest.mark.parametrize("model", ["mlp", "svm", "linear", "lenet-dlg"])
def test_each_shipped_model_has_lineups(trained, model):
    found, _ = estimates_of(trained(model=model), count=8, among=20)
    assert found["named"].value >= 0.9


@pytest.mark.slow
@pytest.mark.parametrize("model", ["mlp-small", "lenet-dlg"])
@pytest.mark.parametrize("defense", sorted(registry.classes("defense")))
def test_a_thousand_messages_obey_bayes_rule_and_the_proof_of_their_defense(tmp_path, defense, model):
    federation = {"clients": 10, "rounds": 1, "algorithm": "fedsgd", "batch": 0, "samples": 1200}
    attack = {"name": "lineup", "references": 0, "threat": "server+lineup", "target": {"count": 1000, "among": 10}}
    table = study_table(federation, [defense], [attack], seeds=[11])
    # with torch's own start, gradients of one label differ by rounding errors only
    table["tasks"] = [{"data": "digits", "model": model, "init": "dlg" if model == "lenet-dlg" else "default"}]
    (cell,) = resolve(table, "thousand").cells
    context = RunContext(tmp_path, tmp_path)
    run_training(cell.training, keep_for([cell]), context)
    found = {estimate.name: estimate for estimate in run_attack(cell, context).estimates}
    # .002 of exact likelihoods fail with one seed
    gap, named = found["posterior_gap"], found["named"]
    half = (gap.high - gap.low) / 2 / 1.96 * 3.1
    assert abs(gap.value) <= half + 1e-12
    assert named.n == 1000
    assert "named_bound" not in found or named.low <= found["named_bound"].value
