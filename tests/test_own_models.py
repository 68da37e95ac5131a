"""A user's own network: the same numbers as torch's, or one line that says why not."""

import random
import re
import sys
import textwrap
import tomllib
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, dropout, one_hot

from leakgauge import Key, rng
from leakgauge.attacks._engine.simulate import client_updates
from leakgauge.harness.core.contract import Examples
from leakgauge.harness.core.errors import StudyError, UnknownNameError
from leakgauge.harness.data.torchvision_shim import torchvision
from leakgauge.harness.gate import rerun
from leakgauge.harness.gate.rerun import Bench
from leakgauge.harness.learn import modules
from leakgauge.harness.learn.batch import LocalPlan, Work, train_clients
from leakgauge.harness.learn.gradients import gradients
from leakgauge.harness.learn.losses import SQUARED
from leakgauge.harness.learn.models import build
from leakgauge.harness.learn.tasks import ModelTask
from leakgauge.harness.study.environment import code_of
from leakgauge.harness.study.run import run_study
from leakgauge.harness.study.study import resolve
from tests.by_rows import by_rows
from tests.command import call
from tests.torch_models import TWINS, cnn3

RGB = (3, 32, 32)
PLAN = LocalPlan(gradient=False, steps=2, epochs=None, batch=4, lr=0.1, momentum=0.0)
GRADIENT = replace(PLAN, gradient=True, batch=0)
KEY = Key(7)


def own(net, shape=(6,), classes=3, name="net"):
    return ModelTask(build(modules.given(name, net), shape, classes))


def batch(b, shape, classes=3):
    return Examples(rng.uniform(Key(0, ("x",)), (b, *shape)), torch.arange(b) % classes)


def trained(task, params, data, plan=PLAN, key=KEY):
    return train_clients(task, params, [Work(data, key)], plan, "loop").updates[0]


class Net(nn.Module):
    """A factory: a class with the arguments that it needs."""

    def __init__(self, channels, classes):
        super().__init__()
        self.conv, self.fc = nn.Conv2d(channels, 8, 3, padding=1), nn.Linear(8 * 64, classes)

    def forward(self, x):
        return self.fc(torch.sigmoid(self.conv(x)).flatten(1))


@pytest.mark.parametrize("name", ["lenet5", "cnn3", "resnet20"])
def test_a_torch_twin_has_the_gradients_and_updates_of_the_shipped_model(name):
    layers = cnn3([nn.Dropout(0.2) for _ in range(3)]) if name == "cnn3" else TWINS[name]
    shipped, twin = ModelTask(build(name, RGB, 10)), own(nn.Sequential(*layers), RGB, 10)
    params = shipped.init(Key(1))
    assert twin.layout.shapes == shipped.layout.shapes
    assert twin.model.apply.dropout == shipped.model.apply.dropout
    x, y = rng.uniform(Key(2), (2, 2, *RGB)), one_hot(torch.arange(4).view(2, 2), 10).float()
    several, theirs = (gradients(task, params, x, y) for task in (twin, shipped))
    torch.testing.assert_close(several, theirs, rtol=1e-3, atol=1e-5)
    data = batch(6, RGB, 10)
    for plan in (PLAN, replace(PLAN, clip=0.5, poisson=True)):
        mine, theirs = (trained(task, params, data, plan) for task in (twin, shipped))
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-6)


NORMED = {
    "1d": (nn.BatchNorm1d, nn.Conv1d, (9,)),
    "2d": (nn.BatchNorm2d, nn.Conv2d, (6, 5)),
    "3d": (nn.BatchNorm3d, nn.Conv3d, (4, 5, 4)),
    "sync": (nn.SyncBatchNorm, nn.Conv2d, (6, 5)),
}


def weights(task, net):
    """[d]: the weights and running statistics of a network of the task's architecture."""
    return task.layout.join([tensor.detach() for tensor in modules._owned(task.layout, net)])


def normed(kind):
    """A network with two batch norms, and its input shape."""
    norm, conv, sides = NORMED[kind]
    layers = [conv(2, 4, 3), norm(4, eps=1e-3, momentum=0.3), nn.ReLU(), conv(4, 3, 1), norm(3, affine=False)]
    head = nn.Linear(3 * int(np.prod([side - 2 for side in sides])), 3)
    return nn.Sequential(*layers, nn.Flatten(), head), (2, *sides)


@pytest.mark.parametrize("kind", NORMED)
def test_batch_norm_in_train_mode_trains_as_in_torch(kind):
    net, shape = normed(kind)
    task, data = own(net, shape), batch(6, shape)
    theirs = normed("2d" if kind == "sync" else kind)[0]
    theirs.load_state_dict(net.state_dict())
    theirs(data.x)  # the statistics are no longer zeros and ones
    start, plan = weights(task, theirs), replace(PLAN, batch=0, steps=3)
    paced = replace(task, model=modules.paced(task.model, plan.lr))
    sent = trained(paced, start, data, plan)
    optimizer = torch.optim.SGD(theirs.parameters(), lr=plan.lr)
    for _ in range(3):
        optimizer.zero_grad()
        cross_entropy(theirs(data.x), data.y).backward()
        optimizer.step()
    torch.testing.assert_close(start + sent, weights(task, theirs), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(task.outputs(start + sent, data.x), theirs.eval()(data.x), rtol=1e-4, atol=1e-4)
    x, y = data.x[None], one_hot(data.y, 3).float()[None]
    simulated = client_updates(paced, start, x, y, LocalPlan(False, 3, None, 0, plan.lr, 0.0))
    torch.testing.assert_close(simulated, sent[None], rtol=1e-3, atol=1e-5)


def test_where_clients_send_gradients_the_statistics_have_that_of_the_shipped_batch_norm():
    net, shape = normed("2d")
    task, data = own(net, shape), batch(6, shape)
    start = task.init(Key(0))
    sent, tensors = (
        dict(zip(task.layout.names, task.layout.split(flat), strict=True))
        for flat in (trained(task, start, data, GRADIENT), start)
    )
    h = nn.functional.conv2d(data.x, tensors["0.weight"], tensors["0.bias"])
    torch.testing.assert_close(sent["1.running_mean"], -h.mean((0, 2, 3)))
    torch.testing.assert_close(sent["1.running_var"], 1 - h.var((0, 2, 3)))
    assert task.mixes
    modules.check(task)


def test_batch_norm_in_eval_mode_is_a_constant():
    net, shape = normed("2d")
    data = batch(6, shape)
    net(data.x)
    task = own(net.eval(), shape)
    assert not task.mixes
    assert not any("running" in name for name in task.layout.names)
    start = weights(task, net)
    torch.testing.assert_close(task.outputs(start, data.x), net(data.x), rtol=1e-4, atol=1e-5)
    clipped = trained(task, start, data, replace(GRADIENT, clip=1e9))
    torch.testing.assert_close(clipped, trained(task, start, data, GRADIENT), rtol=1e-3, atol=1e-5)


def test_batch_norm_without_running_statistics_has_none_but_mixes_records():
    net = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4, track_running_stats=False), nn.Linear(4, 3))
    task, data = own(net), batch(5, (6,))
    assert task.mixes
    assert task.layout.dim == sum(tensor.numel() for tensor in net.parameters())
    cross_entropy(net(data.x), data.y).backward()
    sent = task.layout.split(trained(task, task.init(Key(0)), data, GRADIENT))
    torch.testing.assert_close(sent, [tensor.grad for tensor in net.parameters()])
    with pytest.raises(ValueError, match="a batch norm needs more than one value per channel, got inputs \\(1, 4\\)"):
        trained(task, task.init(Key(0)), batch(1, (6,)), GRADIENT)


class ByHand(nn.Module):
    """Centers the batch without any layer that says so."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(6, 3)

    def forward(self, x):
        return self.fc(x - x.mean(0))


def test_a_network_that_mixes_records_by_hand_is_seen():
    task = own(ByHand)
    assert task.mixes
    with pytest.raises(ValueError, match="'given:net' mixes the records of a batch"):
        trained(task, task.init(Key(0)), batch(4, (6,)), replace(PLAN, clip=1.0))


class Turned(nn.Module):
    """A dropout whose batch is the second axis, and one in whose first axis each record stands twice."""

    def __init__(self):
        super().__init__()
        self.fc, self.drop = nn.Linear(3, 3), nn.Dropout(0.5)

    def forward(self, x):
        h = self.drop(x.view(-1, 2, 3).transpose(0, 1)).transpose(0, 1)
        return self.fc(self.drop(h.flatten(0, 1)).view(-1, 2, 3).sum(1))


def depth(rate, mode="row"):
    """torchvision's stochastic depth."""
    return torchvision().ops.StochasticDepth(rate, mode)


DROPS = {
    "entries": (lambda: nn.Sequential(nn.Dropout(0.25), nn.Linear(6, 3)), (6,), ((6,),)),
    "channels": (lambda: nn.Sequential(nn.Dropout2d(0.25), nn.Flatten(), nn.Linear(24, 3)), (6, 2, 2), ((6, 1, 1),)),
    "axes": (Turned, (6,), ((2, 3), (2, 3))),
    "depth": (lambda: nn.Sequential(depth(0.25), nn.Flatten(), nn.Linear(24, 3)), (6, 2, 2), ((1, 1, 1),)),
    "off": (lambda: nn.Sequential(nn.Dropout(0.0), nn.Dropout(0.5).eval(), nn.Linear(6, 3)), (6,), ()),
    "depth off": (lambda: nn.Sequential(depth(0.0), depth(0.5, "batch").eval(), nn.Linear(6, 3)), (6,), ()),
}


@pytest.mark.parametrize("kind", DROPS)
def test_dropout_multiplies_with_the_masks_of_the_key(kind):
    make, shape, masks = DROPS[kind]
    task, data = own(make, shape), batch(5, shape)
    assert tuple(shape for shape, _ in task.model.apply.dropout) == masks
    start = task.init(Key(0))
    sent = [trained(task, start, data, GRADIENT, Key(seed)) for seed in (1, 1, 2)]
    assert torch.equal(sent[0], sent[1])
    assert torch.allclose(sent[0], sent[2], atol=1e-6) == (not masks)
    if masks:
        keep = [torch.ones(5, *shape) for shape in masks]
        keep[0][2] = 0.0  # of the third record only
        x = data.x.clone()
        x[2] = 0.0
        torch.testing.assert_close(task.losses(start, data.x, data.y, keep), task.losses(start, x, data.y))


class Attentive(nn.Module):
    """Attention by itself, and in a layer of a transformer, which torch computes by fast kernels where it can."""

    def __init__(self):
        super().__init__()
        self.first = nn.MultiheadAttention(4, 2, batch_first=True)
        self.then = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)
        self.fc = nn.Linear(4, 3)

    def forward(self, x):
        h = x.view(-1, 3, 4)
        return self.fc(self.then(h + self.first(h, h, h, need_weights=False)[0]).mean(1))


def test_attention_has_the_gradient_of_torch_and_a_second_one():
    task, data = own(Attentive, (12,)), batch(5, (12,))
    modules.check(task)
    start, net = task.init(Key(0)), Attentive()
    net.load_state_dict(dict(zip(task.layout.names, task.layout.split(start), strict=True)))
    wanted = torch.autograd.grad(cross_entropy(net(data.x), data.y), list(net.parameters()))
    found = task.layout.split(trained(task, start, data, GRADIENT, Key(1)))
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        self.second.weight = self.first.weight
        self.scale = nn.Parameter(torch.full((6,), 2.0), requires_grad=False)

    def forward(self, x):
        return self.second(torch.tanh(self.first(x)) * self.scale)[:, :3]


def test_tied_weights_are_one_tensor_and_frozen_ones_are_constants():
    net = Tied()
    task, data = own(net), batch(5, (6,))
    assert task.layout.names == ("first.weight", "first.bias", "second.bias")
    cross_entropy(net(data.x), data.y).backward()
    expected = [net.first.weight.grad, net.first.bias.grad, net.second.bias.grad]
    for plan in (GRADIENT, replace(GRADIENT, clip=1e9)):
        sent = task.layout.split(trained(task, task.init(Key(0)), data, plan))
        torch.testing.assert_close(sent, expected)
    modules.check(task)


def test_each_seed_has_its_own_weights_but_given_ones_stay():
    before = torch.get_rng_state()
    task = own(Net, (2, 8, 8))
    first, again, other = (task.init(Key(seed)) for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert torch.equal(before, torch.get_rng_state())
    net = Net(2, 3)
    these = own(net, (2, 8, 8))
    assert torch.equal(these.init(Key(1)), torch.cat([tensor.detach().flatten() for tensor in net.parameters()]))
    assert replace(these, initialization="dlg").init(Key(1)).abs().max() == pytest.approx(0.5, abs=0.01)
    with pytest.raises(ValueError, match=r"a network with a tensor 'conv.weight' of shape \(8, 2, 3, 3\), got \(8, 1"):
        weights(these, Net(1, 3))


SIZES = ((4, 3), (), (), (), (3,))


def test_lazy_layers_are_made_by_a_dry_run_and_known_activations_are_smooth():
    layers = nn.LazyConv2d, nn.LazyBatchNorm2d, nn.Tanh, nn.Flatten, nn.LazyLinear
    task = own(lambda: nn.Sequential(*(make(*size) for make, size in zip(layers, SIZES, strict=True))), (2, 8, 8))
    assert dict(zip(task.layout.names, task.layout.shapes, strict=True))["4.weight"] == (3, 144)
    assert "1.running_mean" in task.layout.names
    assert task.smooth
    assert not own(nn.Sequential(nn.Linear(6, 3), nn.ReLU())).smooth


def test_a_network_for_numbers_has_squared_loss():
    task = ModelTask(build(modules.given("net", lambda classes: nn.Linear(6, classes)), (6,), 0))
    assert (task.model.loss, task.classes) == (SQUARED, 1)
    modules.check(task)


class By(nn.Module):
    """A network by a function of itself and its inputs."""

    def __init__(self, forward, **tensors):
        super().__init__()
        self.fc, self.act = nn.Linear(6, 3), forward
        for name, tensor in tensors.items():
            self.register_buffer(name, tensor)

    def forward(self, x):
        return self.act(self, x)


class Spare(By):
    def __init__(self, forward):
        super().__init__(forward)
        self.spare = nn.LazyLinear(3)


class Wrong(torch.autograd.Function):
    """The square, with half of its slope."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x):
        return x * x

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, slope):
        return slope * ctx.saved_tensors[0]


def counting(net, x):
    net.count += 1
    return net.fc(x)


def clamping(net, x):
    net.fc.weight.data.clamp_(-0.1, 0.1)
    return net.fc(x)


def fails(*_):
    raise SystemExit(3)


CONSTANT = torch.eye(3)


@by_rows(
    (lambda: nn.Sequential(nn.Linear(6, 3), nn.AlphaDropout(0.5)), r"layer '1' \(AlphaDropout\) draws from torch's"),
    (lambda: By(lambda net, x: dropout(net.fc(x))), "its forward draws from torch's global generator"),
    (lambda: By(lambda net, x: net.fc(x) + random.random()), "two forwards of the same inputs differ"),
    (lambda: By(counting, count=torch.zeros(1)), "'count' changes in forward; only the statistics of batch"),
    (lambda: By(counting, count=torch.zeros(1, dtype=torch.int64)), "'count' changes in forward"),
    (lambda: By(clamping), "'fc.weight' changes in forward"),
    (lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(6, 3)), "changes in forward"),
    (lambda: nn.Linear(5, 3), r"its forward fails on inputs of shape \(2, 6\): RuntimeError: mat1 and mat2"),
    (lambda: nn.Sequential(nn.ReLU(), nn.Conv2d(6, 3, 1)), r"layer '1' \(Conv2d\) fails on inputs of shape \(2, 6\)"),
    (lambda: nn.Linear(6, 4), r"expected scores of shape \(2, 3\) in eval mode, got shape \(2, 4\)"),
    (
        lambda: By(lambda net, x: (net.fc(x), -net.fc(x))),
        r"in eval mode, got tuple; return the scores alone, or",
    ),
    (
        lambda: By(lambda net, x: net.fc(x) * (2 if net.training else 1)),
        "scores in train mode differ from those in eval",
    ),
    (lambda: nn.Sequential(nn.Linear(6, 3), nn.BatchNorm1d(3, momentum=None)), r"'1' \(BatchNorm1d\): a cumulative"),
    (lambda: nn.Sequential(nn.InstanceNorm1d(2, track_running_stats=True)), "running statistics of instances"),
    (lambda: nn.Linear(6, 3).double(), "expected float32, got torch.float64 for 'weight'; return network.float"),
    (lambda: nn.Linear(6, 3, dtype=torch.complex64), "expected float32, got torch.complex64"),
    (lambda: nn.Linear(6, 3).requires_grad_(False), "expected a trainable parameter, got none"),
    (lambda: nn.Sequential(nn.Linear(6, 6), By(lambda net, x: x[:, :3])), "'1.fc.weight' takes no part in the scores"),
    (lambda: Spare(lambda net, x: net.fc(x)), "'spare.weight' is lazy, and a dry run does not reach it"),
    (nn.LazyLinear(3), "a network with lazy layers has no weights yet; pass its factory"),
    (lambda: nn.Sequential(nn.Linear(6, 3), nn.Dropout(1.0)), "layer '1': expected a dropout rate below 1, got 1"),
    (
        lambda: nn.Sequential(nn.Linear(6, 3), depth(0.5, "batch")),
        r"layer '1' \(StochasticDepth\) fails on .*: expected mode='row', got mode='batch', which drops whole batches",
    ),
    (lambda: By(lambda net, x: net.fc(x) if x.sum() > 0 else net.fc(-x)), "control flow by data"),
    (lambda: By(lambda net, x: net.fc(x) @ CONSTANT), "its gradient fails in float64; register constant tensors"),
    (
        lambda: By(lambda net, x: Wrong.apply(net.fc(Wrong.apply(x)))),
        "the derivative of its gradient in the inputs differs from finite differences",
    ),
    (fails, "the factory fails: SystemExit: 3"),
    (lambda: 3, "expected a factory of a torch.nn.Module, got int"),
    (lambda width: nn.Linear(width, 3), "the factory fails: TypeError: .*missing 1 required positional argument"),
)
def test_what_cannot_be_handled_is_refused_in_one_line(make, said):
    with pytest.raises(ValueError, match=said) as caught:
        modules.check(own(make))
    assert str(caught.value).startswith("model 'given:net': ")
    assert "\n" not in str(caught.value)


@pytest.mark.matrix
def test_torchvisions_resnet_is_attacked_like_any_model():
    task = ModelTask(build("torchvision:resnet18", (3, 64, 64), 10))
    assert task.layout.dim == 11_181_642 + 2 * 4_800  # weights, and the statistics of twenty batch norms
    x = rng.uniform(Key(1), (1, 2, 3, 64, 64), dtype=torch.float64)
    y, params = one_hot(torch.tensor([[3, 5]]), 10).double(), task.init(Key(0)).double()
    target, guess = gradients(task, params, x, y), (x * 0.9).requires_grad_()
    distance = (gradients(task, params, guess, y) - target).square().sum()
    (slope,) = torch.autograd.grad(distance, guess)
    gain = 1e-6 * distance.detach()
    nearer = (gradients(task, params, guess.detach() - gain / slope.square().sum() * slope, y) - target).square().sum()
    assert float((distance.detach() - nearer) / gain) == pytest.approx(1.0, abs=0.01)


@pytest.mark.matrix
@pytest.mark.parametrize(("name", "masks"), [("efficientnet_b0", 10), ("convnext_tiny", 17), ("googlenet", 1)])
def test_torchvisions_networks_with_stochastic_depth_or_auxiliary_classifiers_are_built(name, masks):
    model = build(f"torchvision:{name}", (3, 32, 32), 10)
    assert len(model.apply.dropout) == masks


@pytest.mark.slow
@by_rows(("resnet18", 8), ("resnet34", 32), ("mobilenet_v3_small", 64), ("efficientnet_b0", 64))
def test_torchvisions_classifiers_pass_the_check_where_features_shrink_to_one_pixel(name, side):
    modules.check(ModelTask(build(f"torchvision:{name}", (3, side, side), 10)))


def test_an_unknown_name_suggests_torchvisions():
    with pytest.raises(UnknownNameError, match=r"^no model 'resnet18'; did you mean 'torchvision:resnet18'\?$"):
        build("resnet18", RGB, 10)
    with pytest.raises(UnknownNameError, match="no model of torchvision 'resnt18'; did you mean 'resnet18'"):
        build("torchvision:resnt18", RGB, 10)
    with pytest.raises(UnknownNameError, match="no model 'given:nobody' in this process: only the process that"):
        build("given:nobody", RGB, 10)
    with pytest.raises(
        UnknownNameError, match=r"expected a torch.nn.Module or a function that makes one for 'math:pi'"
    ):
        build("math:pi", RGB, 10)
    with pytest.raises(ValueError, match=r"expected a torch.nn.Module, or a function that makes one, got int"):
        modules.given("three", 3)
    listed = call("list", "tasks").output
    forms = ("module:FACTORY", "torchvision:NAME", "given:NAME", "folder:PATH", "npz:PATH", "recording:DIR")
    assert all(re.search(rf"^{form} +\[\w+\] \w", listed, re.M) for form in (*forms, "module:factory"))


STUDY = textwrap.dedent("""
    name = "own"
    lineup = false
    tasks = [{data = "digits", model = "tests.test_own_models:Net"}]
    federations = [{clients = 3, rounds = 1, samples = 60, test_samples = 40, algorithm = "fedsgd", batch = 1}]
    defenses = [{name = "none"}]
    attacks = [{name = "prior", target = {round = 0}}, {name = "idlg", evaluations = 120, target = {round = 0}}]
""")


def errors(run):
    """The mean squared error of each attack."""
    each = {result.cell.attack.name: result.estimates for result in run.results.values()}
    return {name: next(one.value for one in found if one.name == "mse") for name, found in each.items()}


@pytest.mark.matrix
def test_a_study_of_a_users_network_runs_to_the_end(tmp_path):
    run = run_study(resolve(tomllib.loads(STUDY), allow_code=True), tmp_path, workers=0)
    assert not run.failures
    found = errors(run)
    assert found["idlg"] < 0.1 * found["prior"]


@pytest.mark.matrix
def test_a_given_network_is_attacked_in_this_process_alone(tmp_path):
    study = resolve(tomllib.loads(STUDY.replace("tests.test_own_models:Net", modules.given("digits", Net(1, 10)))))
    with pytest.raises(StudyError, match="only this process has 'given:digits': expected workers=0, got workers=2"):
        run_study(study, tmp_path, workers=2)
    found = errors(run_study(study, tmp_path))
    assert found["idlg"] < 0.1 * found["prior"]


def test_a_network_that_cannot_be_attacked_is_refused_before_anything_runs(tmp_path):
    modules.given("flow", lambda: By(lambda net, x: net.fc(x.flatten(1)[:, :6])))
    with pytest.raises(
        StudyError, match=r"own: tasks.model: model 'given:flow': expected scores of shape \(2, 10\) in eval mode, got"
    ):
        run_study(resolve(tomllib.loads(STUDY.replace("tests.test_own_models:Net", "given:flow"))), tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.fixture
def stranger(tmp_path, monkeypatch):
    """A module that leaves a file when it is imported."""
    (tmp_path / "stranger_net.py").write_text(
        "import pathlib\npathlib.Path(__file__).with_suffix('.ran').touch()\nfrom tests.test_own_models import Net\n"
        "def make(channels, classes):\n    return Net(channels, classes)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delenv("LEAKGAUGE_ALLOW_CODE")
    yield tmp_path / "stranger_net.ran"
    sys.modules.pop("stranger_net", None)


@pytest.mark.parametrize("key", ["model", "data"])
def test_a_task_that_names_code_imports_nothing_without_permission(key, stranger, tmp_path):
    text = STUDY.replace("tests.test_own_models:Net", "mlp-small")
    text = text.replace('"mlp-small"' if key == "model" else '"digits"', '"stranger_net:make"')
    (tmp_path / "s.toml").write_text(text)
    for words in (["show"], ["show", "--json"], ["run", "-o", str(tmp_path / "out")]):
        done = call(words[0], tmp_path / "s.toml", *words[1:])
        assert done.exit_code == 2
        assert "tasks[0]: 'stranger_net:make' names code to import; pass --allow-code if you trust it" in done.output
    asked = resolve(tomllib.loads(text), allow_code=True).cells
    assert (
        rerun._forbidden(asked, Bench(tmp_path))
        == "'stranger_net:make' names code to import; pass --allow-code if you trust it"
    )
    assert not stranger.exists()
    for form in ("torchvision:resnet18", "given:net"):
        assert resolve(tomllib.loads(STUDY.replace("tests.test_own_models:Net", form))).cells


def test_the_code_of_a_result_has_the_file_and_the_given_weights_of_its_model(stranger, tmp_path):
    def code(model):
        code_of.__globals__["_code"].cache_clear()
        return code_of(
            resolve(tomllib.loads(STUDY.replace("tests.test_own_models:Net", model)), allow_code=True).trainings[0]
        )

    before = code("stranger_net:make")
    assert before == code("stranger_net:make") != code("mlp-small") == code("torchvision:resnet18")
    with (tmp_path / "stranger_net.py").open("a") as file:
        file.write("# other\n")
    assert code("stranger_net:make") != before
    net = Net(1, 10)
    given = modules.given("net", net)
    before = code(given)
    assert before == code(given)
    net.fc.bias.data[3] += 1
    assert code(given) != before


BROKEN = {"gone": ("nowhere_net:make", "ModuleNotFoundError: No module"), "exits": ("exits_net:make", "SystemExit: 1")}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_module_that_cannot_be_imported_is_one_line(kind, tmp_path, monkeypatch):
    name, said = BROKEN[kind]
    (tmp_path / "exits_net.py").write_text("raise SystemExit(1)\n")
    monkeypatch.syspath_prepend(tmp_path)
    study = resolve(tomllib.loads(STUDY.replace("tests.test_own_models:Net", name)), allow_code=True)
    with pytest.raises(StudyError, match=f"^own: tasks.model: no model '{name}': {said}.*$"):
        run_study(study, tmp_path / "out", workers=0)
