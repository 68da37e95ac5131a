"""What a model is evaluated on, how it sees its inputs, and the norms and errors that a training records."""

import dataclasses
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from leakgauge.defenses.none import NoDefense
from leakgauge.defenses.sqsgd import SqSGD
from leakgauge.defenses.top_k import TopK
from leakgauge.harness.core.cell import FederationSpec, PartSpec, TaskSpec, TrainingSpec
from leakgauge.harness.core.contract import Examples
from leakgauge.harness.core.rng import Key
from leakgauge.harness.core.rows import rows
from leakgauge.harness.federation.loop import Keep, train
from leakgauge.harness.learn.partition import partition
from leakgauge.harness.study.prepare import load_data, make_task, prepare
from leakgauge.harness.study.run import run_study
from leakgauge.harness.study.study import resolve

HELD = 300
SPEC = TrainingSpec(
    TaskSpec("digits", "mlp-small"), FederationSpec(clients=4, validation=HELD), PartSpec("none"), seed=3
)


def ready(**changes):
    return prepare(dataclasses.replace(SPEC, federation=dataclasses.replace(SPEC.federation, **changes)), Path())


def held_out(made):
    """The rows of the training data that no client has."""
    used = np.concatenate(list(made.clients.values()))
    assert len(used) == len(set(used.tolist()))
    return np.setdiff1d(np.arange(len(made.data.train.y)), used)


def test_no_client_gets_a_held_out_sample_and_evaluations_use_exactly_these():
    made = ready(evaluate_on="validation")
    rows_of = held_out(made)
    assert len(rows_of) == HELD
    assert torch.equal(made.test.x, made.data.train.x[rows_of])
    assert torch.equal(made.test.y, made.data.train.y[rows_of])
    assert len(ready(evaluate_on="validation", test_samples=40).test.y) == 40


def test_test_and_train_evaluations_and_the_number_of_samples_count_the_remaining_samples():
    made = ready()
    assert torch.equal(made.test.x, made.data.test.x)
    assert len(held_out(ready(samples=100))) == len(made.data.train.y) - 100
    own = ready(evaluate_on="train").test
    assert len(own.y) == len(made.data.train.y) - HELD
    with pytest.raises(ValueError, match=f"expected at most {len(own.y)} training samples"):
        ready(samples=len(own.y) + 1)


def test_a_validation_set_larger_than_the_data_is_refused():
    with pytest.raises(ValueError, match=r"validation: got 9999, expected less than [0-9]+ training samples"):
        ready(validation=9999)


def test_without_a_validation_set_the_clients_have_the_samples_that_they_had_before():
    made = ready(validation=0)
    before = partition(FederationSpec(clients=4), made.data.train.y, made.key.child("training", "partition"))
    assert [made.clients[number].tolist() for number in range(4)] == [one.tolist() for one in before]


def test_a_centered_model_sees_twice_the_input_minus_one_and_trains_on_it():
    data = load_data("digits", Path())
    plain = make_task(TaskSpec("digits", "mlp-small"), data)
    centered = make_task(TaskSpec("digits", "mlp-small", inputs="centered"), data)
    params, x, y = plain.init(Key(0)), data.train.x[:8], data.train.y[:8]
    assert torch.equal(centered.init(Key(0)), params)
    assert torch.equal(centered.outputs(params, x), plain.outputs(params, 2 * x - 1))
    spec = FederationSpec(clients=2, rounds=2, batch=4)
    ends = [
        train(task, spec, NoDefense(), clients, test, Key(1), engine="loop", keep=Keep()).final
        for task, change in ((centered, lambda x: x), (plain, lambda x: 2 * x - 1))
        for clients, test in [
            ({k: Examples(change(x[4 * k : 4 * k + 4]), y[4 * k : 4 * k + 4]) for k in (0, 1)}, Examples(change(x), y))
        ]
    ]
    assert torch.allclose(*ends, atol=1e-6)
    assert not torch.equal(ends[0], params)


def trained(defense):
    """A training of one client, with its updates computed again from the model of each round."""
    data, task = load_data("digits", Path()), make_task(TaskSpec("digits", "mlp-small"), load_data("digits", Path()))
    own = Examples(data.train.x[:40], data.train.y[:40])
    spec = FederationSpec(clients=1, rounds=3, batch=0, lr=0.5)
    keep = Keep(frozenset(range(3)), frozenset(range(3)))
    run = train(task, spec, defense, {0: own}, own, Key(1), engine="loop", keep=keep)
    updates = []
    for number in range(3):
        params = run.models[number].clone().requires_grad_()
        (gradient,) = torch.autograd.grad(task.loss(params, own.x, own.y), params)
        updates.append(-0.5 * gradient)
    return run, updates


@pytest.mark.parametrize("defense", [NoDefense(), TopK(fraction=0.1, feedback=True)])
def test_a_training_records_the_median_norm_of_the_updates_before_the_defense(defense):
    run, updates = trained(defense)
    assert run.norms == pytest.approx([float(update.norm()) for update in updates], rel=1e-4)


def test_with_error_feedback_the_error_is_judged_against_the_update_plus_the_residual():
    run, updates = trained(TopK(fraction=0.1, feedback=True))
    residual = torch.zeros_like(updates[0])
    for update, snr in zip(updates, run.snr_db, strict=True):
        whole = residual + update
        residual = whole.clone()
        residual[whole.abs().topk(round(0.1 * len(whole))).indices] = 0.0
        ratio = 10 * math.log10(float(whole.square().sum() / residual.square().sum()))
        assert snr == pytest.approx(ratio, abs=1e-3)
    assert run.snr_db[2] != pytest.approx(
        10 * math.log10(float(update.square().sum() / residual.square().sum())), abs=0.1
    )


def test_sqsgd_should_carry_the_residual_plus_beta_times_the_update():
    memory, update = torch.tensor([1.0, -2.0]), torch.tensor([3.0, 4.0])
    assert SqSGD(beta=2.0).compensated(memory, update).tolist() == [7.0, 6.0]
    assert TopK().compensated(None, update) is update


def test_a_study_says_validation_and_centered_inputs_and_its_rows_hold_the_norms(tmp_path):
    federation = {"clients": 2, "rounds": 2, "samples": 80, "validation": 30, "evaluate_on": "validation"}
    tasks = [{"data": "digits", "model": "linear", "inputs": ["unit", "centered"]}]
    made = resolve({"name": "s", "federations": [federation], "tasks": tasks, "defenses": [{"name": "none"}]})
    run = run_study(made, tmp_path, workers=0)
    assert {one.test_samples for one in run.trainings.values()} == {30}
    losses = [one.evaluations[-1].loss for one in run.trainings.values()]
    assert len(set(losses)) == 2
    norms = [row for row in rows(run) if row["quantity"] == "update_norm"]
    assert [row["round"] for row in norms] == [0, 1, 0, 1]
    assert min(row["value"] for row in norms) > 0


@pytest.mark.parametrize("attack", [{"name": "analytic"}, {"name": "map", "evaluations": 200}])
def test_attacks_on_a_centered_model_recover_the_inputs_themselves(attack, tmp_path):
    federation = {"clients": 2, "rounds": 1, "samples": 20, "algorithm": "fedsgd", "batch": 1, "test_samples": 20}
    tasks = [{"data": "digits", "model": "mlp-small", "inputs": "centered"}]
    asked = [{**attack, "target": {"count": 2, "batch": 1}}]
    made = resolve(
        {"name": "s", "federations": [federation], "tasks": tasks, "defenses": [{"name": "none"}], "attacks": asked}
    )
    run = run_study(made, tmp_path, workers=0)
    assert not run.failures
    results = [run.results[cell.id] for cell in made.cells if cell.attack.name == attack["name"]]
    assert min(one.value for result in results for one in result.estimates if one.name == "ssim") > 0.99
