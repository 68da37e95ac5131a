"""A server that chooses what it broadcasts: in the loop, in a study, and what it knows at that time."""

import dataclasses
import math

import pytest
import torch

from leakgauge import Key, load_run, unpack_float32
from leakgauge.defenses.none import NoDefense
from leakgauge.harness.core.cell import FederationSpec, Target
from leakgauge.harness.core.contract import Snapshot
from leakgauge.harness.core.errors import StudyError
from leakgauge.harness.core.labels import server_text
from leakgauge.harness.core.rows import rows
from leakgauge.harness.core.threats import SEES, Threat, View
from leakgauge.harness.federation.loop import Keep, Training, train
from leakgauge.harness.federation.observe import before_rounds, observe
from leakgauge.harness.study.run import run_study
from leakgauge.harness.study.study import resolve
from tests.by_rows import by_rows
from tests.doubles import Counting, random_examples, small_task, study_table
from tests.test_observe import PROBE, federation

TASK = small_task()
CLIENTS = {k: random_examples(10, seed=k) for k in range(3)}
TEST = random_examples(40, seed=99)
SPEC = FederationSpec(clients=3, rounds=3, batch=0, lr=0.5, algorithm="fedsgd")
CHOSEN = torch.linspace(-1, 1, TASK.layout.dim)
VIEW = View(Threat.MALICIOUS_SERVER)


def go(broadcasts=None, spec=SPEC, defense=None):
    keep = Keep(frozenset({0, 1, 2}), frozenset({1}))
    holdings = (defense or NoDefense(), CLIENTS, TEST, Key(0))
    return train(TASK, spec, *holdings, engine="loop", keep=keep, broadcasts=broadcasts)


def test_clients_train_from_what_is_broadcast_and_the_server_goes_on_from_its_own_model():
    honest, attacked = go(), go({1: lambda _, lr: CHOSEN})
    assert torch.equal(attacked.models[0], honest.models[0])
    assert torch.equal(attacked.models[1], CHOSEN)
    assert torch.equal(attacked.models[2], honest.models[1])  # nothing of round 1 is kept
    params = CHOSEN.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(TASK.loss(params, *CLIENTS[0]), params)
    sent = unpack_float32(attacked.messages[1][0].wire, TASK.layout.dim)
    assert torch.allclose(sent, gradient, rtol=1e-4, atol=1e-7)


def test_the_server_knows_its_model_the_state_and_the_learning_rate():
    seen = []

    def chosen(model, lr):
        seen.append((model, lr))
        return CHOSEN

    training = go({2: chosen}, defense=Counting())
    ((model, lr),) = seen
    assert isinstance(model, Snapshot)
    assert (model.round, model.state, lr) == (2, 2, 0.5)
    assert model.params.shape == CHOSEN.shape
    assert torch.equal(training.final, model.params)


def test_what_is_broadcast_changes_neither_the_senders_nor_their_data():
    honest, attacked = go(), go({1: lambda _, lr: CHOSEN})
    assert [one.sender for one in honest.messages[1]] == [one.sender for one in attacked.messages[1]]
    assert all((honest.truth[1][k] == attacked.truth[1][k]).all() for k in honest.truth[1])


@pytest.mark.parametrize("target", [PROBE, Target(kind="members", count=5, round=1)])
def test_before_the_round_it_knows_no_message_and_no_model_but_the_same_candidates(target):
    here = federation()
    nothing = dataclasses.replace(here, training=Training(here.training.setting, torch.zeros(TASK.layout.dim)))
    before, (seen, truth) = before_rounds(nothing, VIEW, target), observe(here, VIEW, target)
    assert before.messages is None
    assert before.model is None
    assert before.models is None
    assert before.final is None
    assert torch.equal(before.auxiliary.x, seen.auxiliary.x)
    if target.kind == "members":
        assert torch.equal(before.candidates.x, seen.candidates.x)
        assert truth.alike
    assert (before.suspect, before.lr) == (seen.suspect, seen.lr)


def test_only_the_malicious_server_chooses_and_it_sees_what_an_honest_one_does():
    assert SEES[Threat.MALICIOUS_SERVER] == SEES[Threat.SERVER] | {"broadcast"}
    assert [threat for threat in Threat if "broadcast" in SEES[threat]] == [Threat.MALICIOUS_SERVER]


def table(**changes):
    federation = {"clients": 4, "rounds": 2, "samples": 32, "test_samples": 200, "batch": 0, "algorithm": "fedsgd"}
    attacks = [
        {"name": "imprint", "target": {"round": 1, "count": 8, "batch": 2}},
        {"name": "active-membership", "target": {"kind": "members", "round": 1, "count": 16}},
        {"name": "prior", "target": {"round": 1, "count": 8, "batch": 2}},
    ]
    base = study_table(federation, ["none", {"name": "gaussian", "epsilon": 8.0}], attacks, limit=False)
    return {**base, "threats": ["malicious-server"], **changes}


def test_each_attack_that_broadcasts_has_a_training_of_its_own_and_the_others_share_the_honest_one():
    study = resolve(table(audit=20))
    servers = {cell.attack.name: cell.training.malice for cell in study.cells}
    assert servers["prior"] is None
    assert (servers["imprint"].attack.name, servers["imprint"].target.round) == ("imprint", 1)
    assert len(study.trainings) == 2 * 3
    for training in study.trainings:
        assert training.audit == (0 if training.malice else 20)
        assert training.honest == dataclasses.replace(training, malice=None)
    assert len({training.id for training in study.trainings}) == 6


def test_an_honest_training_keeps_its_id():
    training = resolve(table()).trainings[-1]
    assert training.malice is None
    assert training.honest.id == training.id


@by_rows(
    ({"name": "imprint", "threat": "server", "target": {"round": 1}}, "broadcast"),
    ({"name": "trap-weights", "threat": "eavesdropper", "target": {"round": 1}}, "broadcast"),
    ({"name": "active-membership", "target": {"kind": "members"}}, "target.round: missing; attack"),
)
def test_a_study_names_who_may_broadcast_and_where(attack, says):
    with pytest.raises(StudyError) as caught:
        resolve(table(attacks=[attack]))
    assert says in " ".join(caught.value.problems)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    out = tmp_path_factory.mktemp("malicious")
    run_study(resolve(table()), out, workers=0)
    return load_run(out)


def estimates(run, attack, defense):
    (result,) = (
        one
        for one in run.results.values()
        if (one.cell.attack.name, one.cell.training.defense.name) == (attack, defense)
    )
    return {one.name: one for one in result.estimates}, {flag.code: flag.message for flag in result.flags}


def test_a_study_runs_them_from_the_broadcast_to_the_score(run):
    assert len(run.results) == 6
    imprint, flags = estimates(run, "imprint", "none")
    assert imprint["ssim"].value > 0.99
    assert (imprint["detectable"].value, imprint["detectable"].n) == (1.0, 4)
    assert "4 of 4 clients notice" in flags["detectable"]
    assert "small" in flags["detectable"]
    members, _ = estimates(run, "active-membership", "none")
    assert members["auc"].value == 1.0
    assert "membership_epsilon" not in members  # nothing is promised


def test_a_promise_is_compared_with_what_the_attack_shows(run):
    found, flags = estimates(run, "active-membership", "gaussian")
    assert found["membership_epsilon"].value < 8.0
    assert found["membership_epsilon"].note.startswith("claimed 8, proved 8 per message")
    assert "claim-contradicted" not in flags
    assert "proof-contradicted" not in flags
    prior, flags = estimates(run, "prior", "gaussian")
    assert "identification_epsilon" not in prior  # a floor shows nothing
    assert "detectable" not in {**prior, **flags}


def test_the_accuracy_is_that_of_the_attacked_training(run):
    of = {server_text(record.spec): record for record in run.trainings.values() if record.spec.defense.name == "none"}
    honest, attacked = of["honest"], of["imprint groups=4, probe, round 1, batch 2"]
    assert attacked.evaluations[-1].round == honest.evaluations[-1].round
    assert attacked.evaluations[-1].loss != honest.evaluations[-1].loss
    assert {row["server"] for row in rows(run)} >= {"honest", "imprint groups=4, probe, round 1, batch 2"}


def test_a_model_without_such_parameters_is_refused_with_the_reason(tmp_path):
    study = resolve(table(tasks=[{"data": "digits", "model": "linear"}], defenses=[{"name": "none"}]))
    with pytest.raises(StudyError) as caught:
        run_study(study, tmp_path, workers=0)
    first, second = caught.value.problems
    assert first.startswith("attacks (imprint): imprint needs a dense first layer with ReLU")
    assert second.startswith("attacks (active-membership): active-membership needs a dense layer with ReLU")


def test_a_diverged_broadcast_is_refused_with_the_round():
    with pytest.raises(ValueError, match="round 1"):
        go({1: lambda _, lr: torch.full_like(CHOSEN, math.nan)})


def test_a_report_has_the_honest_training_and_without_one_that_of_the_attack(run):
    from leakgauge.reports.select import Analysis

    assert {record.spec.malice for (record,) in Analysis(run).trainings.values()} == {None}
    left = {key: record for key, record in run.trainings.items() if record.spec.malice is not None}
    only = Analysis(dataclasses.replace(run, trainings=left)).trainings
    assert [record.spec.malice.attack.name for (record,) in only.values()] == ["active-membership"] * 2
