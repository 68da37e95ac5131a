"""The fit check: what does not fit between messages and what is said about them is named before an attack runs."""

import copy
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy, mse_loss, one_hot

import leakgauge
from leakgauge.harness.core.rng import Key, normal
from leakgauge.harness.data import load
from tests.by_rows import by_rows

LR = 0.1
ROWS = [[0], [11], [22], [33]]
FOUR = [[0, 1, 2, 3], [14, 15, 16, 17], [28, 29, 30, 31]]


def seeded(module, scale=1.0):
    with torch.no_grad():
        for number, tensor in enumerate(module.parameters()):
            size = (tensor.numel() / len(tensor)) ** -0.5
            tensor.copy_(scale * size * normal(Key(number).child("fit"), tuple(tensor.shape)))
    return module


def dense():
    return seeded(nn.Sequential(nn.Flatten(), nn.Linear(64, 20), nn.Sigmoid(), nn.Linear(20, 10)))


def relu():
    return seeded(nn.Sequential(nn.Flatten(), nn.Linear(64, 24), nn.ReLU(), nn.Linear(24, 10)))


def conv():
    layers = nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(64, 10)
    return seeded(nn.Sequential(*layers))


def normed():
    layers = nn.Flatten(), nn.Linear(64, 32), nn.BatchNorm1d(32), nn.Sigmoid(), nn.Linear(32, 10)
    made = nn.Sequential(*layers)
    seeded(made)
    with torch.no_grad():
        made[2].weight.fill_(1.0)
        made[2].running_mean.copy_(normal(Key(5), (32,)) * 0.3)
        made[2].running_var.fill_(0.5)
    return made


def some(rows):
    x, y = load("digits", Path()).train
    return x[rows], y[rows]


def gradients(model, loss=cross_entropy, rows=ROWS, change=lambda x: x):
    found = []
    for own in rows:
        x, y = some(own)
        found.append(torch.autograd.grad(loss(model(change(x)), y), list(model.parameters())))
    return found


def shown(folder, model, messages, rows=ROWS, **how):
    asked = {"attacks": ["prior"], "limit": False, "progress": False, "victims": None, **how}
    run = leakgauge.inspect(model, "digits", messages, records=rows, folder=folder, **asked)
    assert not run.failures, [failure.message for failure in run.failures.values()]
    (record,) = run.trainings.values()
    return [flag.message for flag in record.flags if flag.code == "misfit"]


def scaled(messages, by):
    return [[by * tensor for tensor in one] for one in messages]


def noisy(messages, share):
    made = []
    for number, one in enumerate(messages):
        norm = torch.cat([tensor.flatten() for tensor in one]).norm()
        entries = sum(tensor.numel() for tensor in one)
        noise = [normal(Key(number).child(at), tuple(tensor.shape)) for at, tensor in enumerate(one)]
        made.append([tensor + share * norm / entries**0.5 * each for tensor, each in zip(one, noise, strict=True)])
    return made


def weighted(scores, y):
    return (torch.linspace(0.1, 5, 10)[y] * cross_entropy(scores, y, reduction="none")).sum()


def one_hot_of(scores, y):
    return one_hot(y, 10).to(scores)


# what is said holds


@by_rows(dense, relu, conv)
@pytest.mark.parametrize("rows", [ROWS, FOUR], ids=["one", "four"])
@pytest.mark.ci("one-conv", "four-relu")
def test_messages_that_fit_raise_no_alarm(make, tmp_path, rows):
    model, made = make(), gradients(make(), rows=rows)
    for number, messages in enumerate(
        (
            made,
            [[tensor.half().float() for tensor in one] for one in made],
            [[tensor.bfloat16().float() for tensor in one] for one in made],
            noisy(made, 0.1),
        )
    ):
        assert shown(tmp_path / str(number), model, messages, rows, batch=len(rows[0])) == []


def drawn(name, seed):
    """A network with its own initialization."""
    torch.manual_seed(seed)
    layers = {
        "dense": [nn.Flatten(), nn.Linear(64, 40), nn.Tanh(), nn.Linear(40, 10)],
        "deep": [nn.Flatten(), nn.Linear(64, 30), nn.ReLU(), nn.Linear(30, 30), nn.GELU(), nn.Linear(30, 10)],
        "conv": [nn.Conv2d(1, 6, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(54, 10)],
        "group": [nn.Conv2d(1, 8, 3), nn.GroupNorm(2, 8), nn.SiLU(), nn.Flatten(), nn.Linear(288, 10)],
        "layer": [nn.Flatten(), nn.Linear(64, 32), nn.LayerNorm(32), nn.ReLU(), nn.Linear(32, 10)],
        "linear": [nn.Flatten(), nn.Linear(64, 10)],
    }
    return nn.Sequential(*layers[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dense", "deep", "conv", "group", "layer", "linear"])
def test_no_messages_that_fit_raise_an_alarm_over_fifty_seeds(name, tmp_path):
    for seed in range(50):
        model = drawn(name, seed)
        rows = [[(7 * seed + 31 * number) % 1000] for number in range(4)]
        made = gradients(model, rows=rows)
        kinds = {
            "exact": made,
            "half": [[tensor.half().float() for tensor in one] for one in made],
            "bfloat16": [[tensor.bfloat16().float() for tensor in one] for one in made],
            "noisy": noisy(made, 0.1),
        }
        for kind, messages in kinds.items():
            assert shown(tmp_path / f"{seed}-{kind}", model, messages, rows, seed=seed) == [], (seed, kind)


@pytest.mark.parametrize("defense", ["gaussian", "jopeq", "top-k", "sdq", "laplace", "cepam-gaussian", "udp"])
def test_our_own_messages_behind_a_defense_raise_no_alarm(tmp_path, defense):
    run = leakgauge.inspect(
        dense(), "digits", folder=tmp_path, defense=defense, attacks=["prior"], limit=False, progress=False, victims=6
    )
    (record,) = run.trainings.values()
    assert [flag.message for flag in record.flags if flag.code == "misfit"] == []


def test_two_steps_and_momentum_raise_no_alarm(tmp_path):
    how = {"sends": "update", "steps": 3, "momentum": 0.9, "batch": 4}
    run = leakgauge.inspect(
        dense(), "digits", folder=tmp_path, attacks=["prior"], limit=False, progress=False, victims=4, **how
    )
    (record,) = run.trainings.values()
    assert [flag.message for flag in record.flags if flag.code == "misfit"] == []


# what is said does not hold


@by_rows(
    (lambda model: scaled(gradients(model), 0.5), "multiplied by 0.5"),
    (lambda model: scaled(gradients(model), 3.0), "multiplied by 3"),
    (lambda model: scaled(gradients(model), -1.0), "opposite sign"),
    (lambda model: scaled(gradients(model), -LR), "updates of one step, not gradients"),
    (lambda model: gradients(model, weighted), "weights of classes"),
    (lambda model: gradients(model, lambda s, y: cross_entropy(s, y, label_smoothing=0.3)), "label smoothing"),
    (lambda model: gradients(model, lambda s, y: binary_cross_entropy_with_logits(s, one_hot_of(s, y))), "binary"),
    (lambda model: gradients(model, lambda s, y: mse_loss(s, one_hot_of(s, y))), "squared error of the scores"),
    (lambda model: gradients(model, lambda s, y: cross_entropy(s.softmax(1), y)), "softmax twice"),
    (lambda model: gradients(model, change=lambda x: 255 * x), "255 times as large"),
    (lambda model: gradients(model, change=lambda x: 2 * x - 1), "[-1, 1]"),
    (lambda model: gradients(model, rows=[[own[0] + 1] for own in ROWS]), "records after the named ones"),
    (lambda model: gradients(model, rows=[[own[0] + 7] for own in ROWS]), "other records"),
    (lambda model: [[t.sign() for t in one] for one in gradients(model)], "Adam"),
)
@pytest.mark.parametrize("make", [dense, relu, conv])
@pytest.mark.ci(3)  # each fault behind one of the networks
def test_a_gradient_that_is_another_one_is_named(messages, named, tmp_path, make):
    (text,) = shown(tmp_path, make(), messages(make()))
    assert named in text


def test_a_sum_over_the_records_is_named(tmp_path):
    made = gradients(dense(), lambda s, y: cross_entropy(s, y, reduction="sum"), FOUR)
    (text,) = shown(tmp_path, dense(), made, FOUR, batch=4)
    assert "sum over the records" in text


def stepped(model, make, rows=ROWS):
    """The update of each client after a step of an optimizer, and the model after it."""
    made, last = [], None
    for own in rows:
        last = copy.deepcopy(model)
        optimizer = make(last.parameters())
        x, y = some(own)
        cross_entropy(last(x), y).backward()
        optimizer.step()
        pairs = zip(last.parameters(), model.parameters(), strict=True)
        made.append([(after - before).detach() for after, before in pairs])
    return made, last


@by_rows(
    (lambda parameters: torch.optim.SGD(parameters, lr=0.03), "learning rate is 0.03"),
    (lambda parameters: torch.optim.Adam(parameters, lr=LR), "Adam"),
    (lambda parameters: torch.optim.SGD(parameters, lr=LR, weight_decay=0.5), "weight decay"),
)
@pytest.mark.parametrize("model", [dense(), conv()], ids=["dense", "conv"])
def test_an_update_of_another_optimizer_is_named(make, named, tmp_path, model):
    (text,) = shown(tmp_path, model, stepped(model, make)[0], sends="update", lr=LR)
    assert named in text


def test_whole_weights_are_named(tmp_path):
    model = dense()
    made = [
        [before.detach() + moved for before, moved in zip(model.parameters(), one, strict=True)]
        for one in stepped(model, lambda parameters: torch.optim.SGD(parameters, lr=LR))[0]
    ]
    (text,) = shown(tmp_path, model, made, sends="update", lr=LR)
    assert "whole weights after training" in text


def test_the_model_after_the_step_is_named(tmp_path):
    model = dense()
    made, after = stepped(model, lambda parameters: torch.optim.SGD(parameters, lr=5.0), ROWS[:1])
    (text,) = shown(tmp_path, after, made, ROWS[:1], sends="update", lr=5.0)
    assert "model before the step" in text


@pytest.mark.parametrize("training", [True, False])
def test_batch_norms_in_another_mode_are_named(tmp_path, training):
    made = gradients(normed().train(training), rows=FOUR)
    (text,) = shown(tmp_path, normed().train(not training), made, FOUR, batch=4)
    assert f"batch norms in {'train' if training else 'eval'} mode" in text


@pytest.mark.parametrize("defense", ["jopeq", "top-k", "cepam-gaussian"])
def test_a_wrong_step_behind_a_defense_is_named(tmp_path, defense):
    def shifted(model, x, y):
        return torch.autograd.grad(cross_entropy(model(x), (y + 1) % 10), list(model.parameters()))

    run = leakgauge.inspect(
        *(dense(), "digits"),
        folder=tmp_path,
        train_step=shifted,
        defense=defense,
        attacks=["prior"],
        limit=False,
        progress=False,
        victims=6,
    )
    (record,) = run.trainings.values()
    (text,) = [flag.message for flag in record.flags if flag.code == "misfit"]
    assert "other records" in text
