"""What a client notices: nothing about honest parameters, and the right thing about each trap."""

from pathlib import Path

import pytest
import torch

from leakgauge.defenses.gaussian import Gaussian
from leakgauge.defenses.jopeq import JoPEQ
from leakgauge.defenses.none import NoDefense
from leakgauge.harness.audit import weights as module
from leakgauge.harness.audit.weights import suspicious
from leakgauge.harness.core.cell import FederationSpec
from leakgauge.harness.core.contract import Examples
from leakgauge.harness.core.rng import Key, normal, uniform
from leakgauge.harness.data import load
from leakgauge.harness.federation.loop import Keep, train
from leakgauge.harness.learn.batch import choose_engine
from leakgauge.harness.learn.models import build
from leakgauge.harness.learn.tasks import ModelTask
from tests.by_rows import by_rows

DIGITS = load("digits", Path())
SHAPE = (1, 8, 8)
OWN = Examples(DIGITS.train.x[:8], DIGITS.train.y[:8])
SMALL = ModelTask(build("mlp-small", SHAPE, 10))
LENET = ModelTask(build("lenet-dlg", SHAPE, 10), "dlg")


def notices(task, params, data=OWN, seed=1):
    return set(suspicious(task, params, data, Key(seed)))


def changed(number, change, task=SMALL):
    """Fresh parameters with one tensor changed."""
    tensors = [tensor.clone() for tensor in task.layout.split(task.init(Key(2)))]
    tensors[number] = change(tensors[number])
    return task.layout.join(tensors)


@pytest.mark.parametrize("initialization", ["default", "dlg"])
@pytest.mark.parametrize("name", ["linear", "mlp-small", "lenet-dlg", "cnn-udp", "svm", "linear-regression"])
def test_fresh_parameters_trip_nothing(name, initialization):
    task = ModelTask(build(name, SHAPE, 10), initialization)
    for seed in range(2):
        assert notices(task, task.init(Key(100 + seed))) == set()


@pytest.mark.parametrize("defense", [NoDefense(), Gaussian(epsilon=1.0), Gaussian(), JoPEQ()], ids=str)
@pytest.mark.parametrize("task", [SMALL, LENET], ids=["mlp-small", "lenet-dlg"])
@pytest.mark.table(2)
def test_trained_parameters_trip_nothing_behind_any_noise(task, defense):
    spec = FederationSpec(clients=2, rounds=12, local_steps=3, batch=4, evaluate_every=12)
    clients = {k: Examples(DIGITS.train.x[8 * k : 8 * k + 8], DIGITS.train.y[8 * k : 8 * k + 8]) for k in range(2)}
    keep = Keep(frozenset({1, 5}))
    done = train(task, spec, defense, clients, OWN, Key(3), engine=choose_engine(task), keep=keep)
    for params in (*done.models.values(), done.final):
        assert notices(task, params) == set()


def one_alive(bias):
    return torch.cat([bias[:1], bias[1:] - 1000])


@by_rows(
    (changed(0, lambda w: w[:1].expand_as(w)), {"parallel", "repeated"}),
    (changed(0, lambda tensor: tensor[:1] * uniform(Key(4), (len(tensor), 1), -1.0, 1.0)), {"parallel"}),
    (changed(0, lambda tensor: torch.sign(tensor) * tensor.abs().mean()), {"repeated"}),
    (changed(2, lambda w: w * torch.eye(len(w), w.shape[1])), {"repeated"}),
    (changed(1, one_alive), {"stuck"}),
    (changed(3, one_alive), {"stuck"}),
    (changed(1, lambda b: b + 1000), {"stuck"}),
    (changed(0, lambda w: 1e6 * w), {"large"}),
    (changed(4, lambda w: 1e-3 * w), {"small", "loud"}),
)
def test_each_trap_trips_its_tests(trap, trips):
    assert notices(SMALL, trap) == trips


def test_noise_in_all_weights_is_no_large_weight():
    noise = 1e3 * normal(Key(5), (SMALL.layout.dim,))
    assert notices(SMALL, SMALL.init(Key(2)) + noise) == set()


@pytest.mark.parametrize(("number", "factor"), [(0, 10.0), (4, 10.0), (0, 0.3), (2, 0.5)])
def test_weights_within_the_honest_range_trip_nothing(number, factor):
    assert notices(SMALL, changed(number, lambda w: factor * w)) <= {"loud"} - ({"loud"} if factor < 1 else set())


@pytest.mark.parametrize("level", [-100.0, 100.0])
def test_a_saturated_sigmoid_is_stuck(level):
    assert "stuck" in notices(LENET, changed(3, lambda b: b + level, LENET))
    assert "stuck" not in notices(LENET, changed(3, lambda b: b + level / 100, LENET))


def test_units_that_died_in_training_are_honest():
    # no gradient comes through dead units, whose weights are as large as before
    assert "loud" not in notices(SMALL, changed(3, lambda b: b - 1000))


def test_rows_of_two_classes_may_be_opposite():
    task = ModelTask(build("linear", SHAPE, 2))
    data = Examples(OWN.x, OWN.y % 2)
    assert notices(task, changed(0, lambda w: torch.stack([w[0], -w[0] * 1.1]), task), data) == set()


@pytest.mark.parametrize("name", ["resnet20", pytest.param("resnet20-bn", marks=pytest.mark.matrix)])
@pytest.mark.matrix
def test_a_model_of_unknown_layers(name):
    task = ModelTask(build(name, SHAPE, 10))
    few = Examples(OWN.x[:2], OWN.y[:2])
    assert notices(task, task.init(Key(2)), few) == set()
    assert "large" in notices(task, changed(0, lambda w: 1e6 * w, task), few)


def test_one_record_is_enough():
    one = Examples(OWN.x[:1], OWN.y[:1])
    for task in (SMALL, LENET):
        assert notices(task, task.init(Key(2)), one) == set()
    assert notices(SMALL, changed(1, one_alive), one) == {"stuck"}


def test_parameters_that_are_not_finite_give_an_answer():
    assert "small" not in notices(SMALL, changed(0, lambda w: w * torch.nan))
    assert "large" in notices(SMALL, changed(0, lambda w: w * torch.inf))


def test_the_key_decides_the_honest_models(monkeypatch):
    made = []

    def facts(task, params, data):
        made.append(params)
        return known(task, params, data)

    known = module._facts
    monkeypatch.setattr(module, "_facts", facts)
    answers = [notices(SMALL, SMALL.init(Key(2)), seed=seed) for seed in (1, 1, 9)]
    first, again, other = (torch.stack(made[at : at + 9]) for at in (0, 9, 18))
    assert answers == [set()] * 3
    assert torch.equal(first, again)
    assert not (first[:8] == other[:8]).all(1).any()
