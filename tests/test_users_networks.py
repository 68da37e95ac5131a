"""Attacks on users' networks that are read as layers, or only in part, and on data of another scale."""

import dataclasses
import math

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.functional import one_hot

from leakgauge import inspect, rng
from leakgauge.attacks._engine.reconstruct import softened
from leakgauge.attacks._engine.tables import FirstLayer
from leakgauge.attacks._search.features import Features
from leakgauge.attacks.active_membership import ActiveMembership
from leakgauge.attacks.analytic import Analytic
from leakgauge.attacks.imprint import Imprint
from leakgauge.attacks.map import MAP
from leakgauge.attacks.quantile_biases import QuantileBiases
from leakgauge.attacks.spear import Spear
from leakgauge.harness.core.cell import TaskSpec
from leakgauge.harness.core.contract import Examples
from leakgauge.harness.core.errors import StudyError
from leakgauge.harness.data import default_root, load
from leakgauge.harness.federation.recording import read
from leakgauge.harness.integrations.inspect import Asked, study_of
from leakgauge.harness.integrations.synthetic import part_spec
from leakgauge.harness.learn.gradients import gradients, kernel_of
from leakgauge.harness.learn.models import build
from leakgauge.harness.learn.tasks import ModelTask
from leakgauge.harness.study.run import run_study
from leakgauge.harness.study.study import resolve
from tests.by_rows import by_rows
from tests.doubles import random_examples, study_table
from tests.test_chains import (
    IMAGE,
    KEY,
    OTHER,
    READ,
    TABLE,
    By,
    Hidden,
    conv,
    dense,
    frozen,
    moved,
    norms,
    own,
    pooled,
    same_weights,
    unet,
)
from tests.victims import assert_found, make, sent

__all__ = ["same_weights"]  # a fixture of every test here


class Partly(nn.Module):
    """A dense first layer, and a ReLU in a part that is not read; the last layer is registered first."""

    def __init__(self, shape=IMAGE):
        super().__init__()
        self.last, self.first, self.middle = nn.Linear(20, 3), nn.Linear(math.prod(shape), 20), nn.Linear(20, 20)

    def forward(self, x):
        h = functional.softsign(self.first(x.flatten(1)))
        return self.last(torch.relu(self.middle(h)))


@by_rows(
    (Partly, True),
    (lambda: dense(nn.ReLU(), nn.LayerNorm(5), nn.ReLU(inplace=True)), True),
    (lambda: norms(nn.BatchNorm2d(4).eval()), True),
    (lambda: dense(nn.ReLU(), nn.Hardtanh()), False),
    (lambda: dense(nn.Softsign()), False),
    (lambda: nn.Sequential(pooled(nn.MaxPool2d(2), nn.LocalResponseNorm(2))), False),
)
def test_any_relu_of_a_network_of_unknown_structure_is_softened_if_it_has_no_other_kinks(net, soft):
    task = own(net())
    assert task.structure is None
    found = softened(task, 0.1)
    assert (found is not None) == soft
    if found is None:
        return
    assert not task.smooth
    assert found.smooth
    params, x = task.init(KEY), random_examples(4, IMAGE, 3).x
    gaps = [(softened(task, width).outputs(params, x) - task.outputs(params, x)).abs().max() for width in (0.3, 0.003)]
    assert gaps[0] > 3 * gaps[1] > 0
    leaf = x[:, None].clone().requires_grad_()
    gradient = gradients(found, params, leaf, torch.full((4, 1, 3), 1 / 3))
    assert torch.autograd.grad(gradient.square().sum(), leaf)[0].isfinite().all()
    searched = MAP(evaluations=8, warm=8).run(make(task, n=2).seen, KEY).guesses
    assert all(guess.failure == "" for guess in searched)


@pytest.mark.parametrize("shape", [IMAGE, TABLE])
def test_the_inputs_of_a_dense_first_layer_are_features_behind_unknown_layers(shape):
    for task in (own(Partly(shape), shape), moved(own(Partly(shape), shape))):
        assert task.structure is None
        case = make(task, n=2)
        params = case.seen.model.params.double()
        targets = gradients(task, params, case.x.double(), one_hot(case.y, 3).double())
        told, each = Features.of(task, params, targets), torch.arange(2)
        assert (told(case.x.double().flatten(1), each).value < 1e-6).all()
        if shape == TABLE:
            torch.testing.assert_close(FirstLayer.of(task, targets).inputs, case.x.double().flatten(1))
        for guess, x in zip(MAP(evaluations=30, warm=30).run(case.seen, KEY).guesses, case.x, strict=True):
            assert (guess.x - x).square().mean() < 1e-5


@pytest.mark.parametrize("name", ["resnet20-bn", "cnn2"])
def test_the_gradients_by_hand_of_a_shipped_model_hold_for_data_on_another_scale(name):
    plain = ModelTask(build(name, (2, 22, 24), 3))
    task = moved(plain)
    params, b = task.init(KEY).double(), 2
    x = rng.uniform(KEY.child("x"), (2, b, 2, 22, 24), dtype=torch.float64)
    y, v = torch.eye(3).double()[:b].expand(2, b, 3), rng.normal(KEY.child("v"), (2, len(params)), torch.float64)
    kernel = kernel_of(task, params, 1, blocks=True)
    found, trace = kernel.trace(x, y)
    leaf = x.clone().requires_grad_()
    expected = gradients(plain, params, task.model.scale.apply(leaf), y)
    (slopes,) = torch.autograd.grad((expected * v).sum(), leaf)
    torch.testing.assert_close(found, expected.detach())
    torch.testing.assert_close(trace.pull(v).x, slopes)


def three_layers():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 16), nn.ReLU(), nn.Linear(16, 10))


class ByHand(nn.Module):
    """Dense layers with ReLU, in a forward of its own and in another order."""

    def __init__(self):
        super().__init__()
        self.last, self.first = nn.Linear(48, 10), nn.Linear(64, 48)

    def forward(self, x):
        return self.last(torch.relu(self.first(x.flatten(1))))


@pytest.mark.parametrize("span", [1.0, 2.0, 255.0], ids=["unit", "centered", "bytes"])
@pytest.mark.parametrize("net", [three_layers, ByHand])
def test_batches_behind_a_users_dense_relu_network_are_read_out_of_bins_and_factorized(net, span):
    torch.manual_seed(1)
    task = own(net(), (1, 8, 8), 10)
    task = task if span == 1.0 else moved(task, -1.5 * span, (span, span))
    auxiliary, data = random_examples(400, seed=1), random_examples(8)
    blank = dataclasses.replace(sent(task, [data]), auxiliary=auxiliary)
    biases = QuantileBiases(batch=5)
    servers = [(attack, attack.broadcast(blank, KEY), 5) for attack in (Imprint(), biases)]
    for attack, params, n in (*servers, (Spear(), task.init(KEY), 2)):
        batches = [(data.x[:n], data.y[:n])]
        seen = dataclasses.replace(sent(task, batches, params=params), auxiliary=auxiliary)
        assert_found(batches, attack.run(seen, KEY).guesses, 1e-6)


def test_an_imprint_behind_dropout_is_refused_for_the_dropout():
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 48), nn.ReLU(), nn.Dropout(0.1), nn.Linear(48, 10))
    with pytest.raises(ValueError, match="given:chain has dropout; use trap-weights"):
        Imprint().broadcast(make(own(net, (1, 8, 8), 10)).seen, KEY)


@by_rows(
    (lambda: dense(nn.ReLU()), True),
    (lambda: dense(nn.Dropout(0.2), nn.ReLU(), nn.Linear(5, 5), nn.ReLU()), True),
    (lambda: dense(nn.ReLU(), nn.Linear(5, 5)), True),
    (lambda: nn.Sequential(dense(nn.ReLU()), nn.LogSoftmax(1)), True),
    (lambda: nn.Sequential(pooled(nn.MaxPool2d(2))[0], nn.Linear(36, 5), nn.ReLU(), nn.Linear(5, 3)), True),
    (lambda: By(lambda net, x: net.last(functional.relu(net.first(x.flatten(1))))), True),
    (lambda: nn.Sequential(*unet()[:-1], nn.Linear(4, 9), nn.ReLU(), nn.Linear(9, 3)), True),
    (lambda: dense(nn.Linear(5, 5), nn.ReLU()), False),
    (lambda: dense(nn.Sigmoid()), False),
    (lambda: dense(nn.ReLU(), nn.Linear(5, 5), nn.Sigmoid()), False),
    (lambda: dense(nn.ReLU(), nn.Linear(5, 5, bias=False)), False),
    (lambda: Hidden(dense(nn.ReLU())), False),
)
def test_neurons_need_relu_right_behind_the_first_dense_layer_and_no_other_activation_later(net, has):
    task = own(net())
    data = random_examples(60, IMAGE, 3)
    seen = dataclasses.replace(make(task).seen, auxiliary=Examples(data.x[8:], data.y[8:]))
    seen = dataclasses.replace(seen, candidates=Examples(data.x[:3], data.y[:3]))
    if not has:
        with pytest.raises(ValueError, match=r"; (given:chain has none|the layers of given:chain are not known)"):
            ActiveMembership().broadcast(seen, KEY)
        return
    params = ActiveMembership().broadcast(seen, KEY)
    own_gradients = gradients(task, params, data.x[:, None], one_hot(data.y, 3).float()[:, None])
    lengths = own_gradients.norm(dim=1)
    assert lengths[:3].min() > 10 * lengths[8:].median()


class Odd(nn.Module):
    """Its first layer is the second of its tensors, and its activation is none that is read."""

    def __init__(self, outputs):
        super().__init__()
        self.last, self.first = nn.Linear(5, outputs, bias=False), nn.Linear(7, 5)
        self.end = nn.Linear(outputs, outputs)

    def forward(self, x):
        return self.end(self.last(nn.functional.gelu(self.first(x))))


LINEAR_FIRST = {
    "sigmoid": lambda classes: nn.Sequential(nn.Linear(7, 5), nn.Sigmoid(), nn.Linear(5, classes)),
    "tanh": lambda classes: nn.Sequential(nn.Flatten(), nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, classes)),
    "norm": lambda classes: nn.Sequential(nn.Linear(7, 6), nn.GroupNorm(2, 6), nn.SiLU(), nn.Linear(6, classes)),
    "no last bias": lambda classes: nn.Sequential(nn.Linear(7, 5), nn.ELU(), nn.Linear(5, classes, bias=False)),
    "own forward": Odd,
}


@pytest.mark.parametrize("scale", [False, True], ids=["unit", "scaled"])
@pytest.mark.parametrize("classes", [3, 0], ids=["classes", "number"])
@pytest.mark.parametrize("name", LINEAR_FIRST)
def test_the_input_of_a_dense_first_layer_is_found_whatever_is_behind_it(name, classes, scale):
    torch.manual_seed(1)
    task = own(LINEAR_FIRST[name](max(classes, 1)), TABLE, classes)
    task = moved(task) if scale else task
    x = rng.uniform(KEY.child("x"), (3, 1, 7))
    y = torch.tensor([[1], [0], [2]] if classes else [[0.3], [-2.0], [5.0]])
    for guess, image, label in zip(
        Analytic().run(sent(task, list(zip(x, y, strict=True))), KEY).guesses, x, y, strict=True
    ):
        assert guess.failure == ""
        torch.testing.assert_close(guess.x, image, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(guess.y, label, rtol=1e-4, atol=1e-5)


NOT_LINEAR_FIRST = {
    "convolution": (lambda: conv(2, 3, 3), IMAGE),
    "frozen": (frozen, IMAGE),
    "no bias": (lambda: nn.Sequential(nn.Flatten(), nn.Linear(96, 5, bias=False), nn.ReLU(), nn.Linear(5, 3)), IMAGE),
    "rows": (OTHER["rows"], IMAGE),
    "square": (lambda: nn.Sequential(nn.Tanh(), nn.Linear(7, 7), nn.Linear(7, 3)), TABLE),
}


@pytest.mark.parametrize("name", NOT_LINEAR_FIRST)
def test_a_layer_that_does_not_take_the_input_is_not_taken_for_the_first(name):
    net, shape = NOT_LINEAR_FIRST[name]
    for guess in guesses_of(Analytic(), own(net(), shape)):
        assert guess.failure.startswith(
            "expected lenet-dlg or a dense first layer with trained bias, got another model"
        )


def guesses_of(attack, task):
    """The guesses of an attack on two records."""
    return attack.run(make(task, n=2).seen, KEY).guesses


def test_a_table_on_another_scale_tells_its_first_layer_as_before():
    plain = own(nn.Sequential(nn.Linear(7, 5), nn.Sigmoid(), nn.Linear(5, 3)), TABLE)
    for task in (plain, moved(plain)):
        case = make(task, n=2)
        told = FirstLayer.of(task, gradients(task, case.seen.model.params, case.x, one_hot(case.y, 3).float()))
        torch.testing.assert_close(told.inputs.float(), case.x[:, 0], rtol=1e-4, atol=1e-5)
        assert (told.least(case.x) < 1e-3 * told.least(case.x.flip(0))).all()


@pytest.mark.parametrize("name", ["sigmoid", "no bias", "pool", "activation first"])
def test_features_explain_the_truth_on_every_scale_and_are_not_taken_for_inputs_they_are_not(name):
    net, shape = READ[name]
    for task in (own(net(), shape), moved(own(net(), shape))):
        case = make(task, n=2)
        params = case.seen.model.params.double()
        targets = gradients(task, params, case.x.double(), one_hot(case.y, 3).double())
        told = Features.of(task, params, targets)
        if name == "activation first":
            assert told is None
        else:
            assert (told(case.x.double().flatten(1), torch.arange(2)).value < 1e-6).all()
            assert (told(0.9 * case.x.double().flatten(1), torch.arange(2)).value > 1e-3).all()


# through the doors


def mlp(classes):
    """A twin of `mlp-small` on digits."""
    layers = nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, classes)
    return nn.Sequential(nn.Flatten(), *layers)


def lenet(classes):
    """A sibling of `lenet5` on digits."""
    body = nn.Sequential(nn.Conv2d(1, 6, 3, padding="same"), nn.ReLU(inplace=True), nn.MaxPool2d((2, 2)))
    return nn.Sequential(body, nn.Flatten(), nn.Linear(96, 20), nn.ReLU(), nn.Linear(20, classes))


def standardized():
    """Four hundred digits with mean 0 and standard deviation 1, a quarter of them for tests."""
    x, y = (part[:400] for part in load("digits", default_root()).train)
    x = ((x - x.mean()) / x.std()).numpy()
    return x[:300], y[:300].numpy(), x[300:], y[300:].numpy()


FEDERATION = {"clients": 4, "rounds": 1, "samples": 32, "test_samples": 50, "batch": 0, "algorithm": "fedsgd"}
MALICIOUS = [
    {"name": "imprint", "target": {"round": 0, "count": 4, "batch": 2}},
    {"name": "active-membership", "target": {"kind": "members", "round": 0, "count": 16}},
    {"name": "trap-weights", "evaluations": 6, "warm": 6, "target": {"round": 0, "count": 2}},
]


def estimates(model, data, folder):
    """The estimates of the attacks of a malicious server, by attack, and the reasons of those that failed."""
    table = study_table(FEDERATION, ["none"], MALICIOUS, data=data, model=model, limit=False)
    run = run_study(resolve({**table, "threats": ["malicious-server"]}, allow_code=True), folder, workers=0)
    found = {cell.attack.name: run.results[cell.id].estimates for cell in run.cells if cell.id in run.results}
    return found, " ".join(one.message for one in run.failures.values())


@pytest.mark.parametrize("data", ["digits", "tests.test_users_networks:standardized"])
@pytest.mark.ci(without=("digits",))
def test_a_study_attacks_a_users_twin_with_the_results_of_the_shipped_model(data, tmp_path):
    shipped, _ = estimates("mlp-small", data, tmp_path / "shipped")
    mine, failed = estimates("tests.test_users_networks:mlp", data, tmp_path / "mine")
    assert not failed
    for name, found in mine.items():  # the batched products of a shipped dense stack round in another order
        for one, other in zip(found, shipped[name], strict=True):
            assert (one.name, one.n, one.values) == (
                other.name,
                other.n,
                pytest.approx(other.values, rel=1e-3, abs=1e-6),
            )
    values = {name: {one.name: one.value for one in found} for name, found in mine.items()}
    assert values["imprint"]["mse"] < 1e-9
    assert values["active-membership"]["auc"] > 0.95
    assert values["trap-weights"]["mse"] < 1e-9


def test_a_study_of_a_users_convolutions_says_what_does_not_fit_them_before_anything_runs(tmp_path):
    words = "tests.test_users_networks:lenet with scaled inputs begins with a convolution; use trap-weights"
    with pytest.raises(StudyError, match=words):
        estimates("tests.test_users_networks:lenet", "tests.test_users_networks:standardized", tmp_path)


def tanh(classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 20), nn.Tanh(), nn.Linear(20, classes))


def sigmoid(classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 20), nn.Sigmoid(), nn.Linear(20, classes))


@pytest.mark.parametrize("factory", [sigmoid, tanh])
@pytest.mark.ci(without=("sigmoid",))
def test_inspect_and_its_recording_are_solved_behind_a_dense_first_layer_of_any_activation(factory, tmp_path):
    torch.manual_seed(1)
    how = {"victims": 2, "minutes": 0.02, "limit": False, "progress": False}
    run = inspect(factory(10), standardized(), folder=tmp_path, **how)
    (cell,) = (cell for cell in run.cells if cell.attack.name == "analytic")
    assert max(run.results[cell.id].estimate("mse").values) < 1e-9
    model = f"tests.test_users_networks:{factory.__name__}"
    recorded = f"recording:{tmp_path}/recording?data=tests.test_users_networks:standardized"
    asked = Asked(attacks=[part_spec("attack", "analytic")], limit=False)
    study = study_of(TaskSpec(recorded, model), read(tmp_path / "recording"), asked, default_root())
    results = run_study(study, tmp_path / "again", workers=0).results.values()
    (again,) = (result for result in results if result.cell.attack.name == "analytic")
    assert max(again.estimate("mse").values) < 1e-9
