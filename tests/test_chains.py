"""A user's network is read as layers where it is made of them, and is called as it is where it is not."""

import copy
import dataclasses

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.functional import cross_entropy, one_hot

from leakgauge import Key, rng
from leakgauge.harness.learn import modules
from leakgauge.harness.learn.batch import LocalPlan, Work, train_clients
from leakgauge.harness.learn.gradients import gradients, kernel_of
from leakgauge.harness.learn.models import build, scaled
from leakgauge.harness.learn.tasks import ModelTask
from tests.doubles import random_examples
from tests.torch_models import Block

KEY, IMAGE, TABLE, RGB = Key(5), (2, 8, 6), (7,), (3, 32, 32)


@pytest.fixture(autouse=True)
def same_weights():
    with torch.random.fork_rng():
        torch.manual_seed(2)
        yield


def own(net, shape=IMAGE, classes=3):
    """The task of a user's network, or of a factory of one."""
    return ModelTask(build(modules.given("chain", net), shape, classes))


def moved(task, low=-3.0, span=(0.5, 4.0)):
    """The task of inputs that are stored on another scale, one for each channel or column."""
    spans = torch.linspace(*span, task.input_shape[0]).view(-1, *[1] * (len(task.input_shape) - 1))
    return dataclasses.replace(task, model=scaled(task.model, low + spans, spans))


def conv(*sizes, **how):
    """A convolution in front of a sigmoid and a dense layer of the right size."""
    body = nn.Sequential(nn.Conv2d(*sizes, **how), nn.Sigmoid(), nn.Flatten())
    return nn.Sequential(body, nn.Linear(body(torch.zeros(1, *IMAGE)).shape[1], 3))


def pooled(*pools):
    body = nn.Sequential(nn.Conv2d(2, 3, 3, padding=1), nn.ReLU(), *pools, nn.Flatten())
    return nn.Sequential(body, nn.Linear(body(torch.zeros(1, *IMAGE)).shape[1], 3))


def dense(*between, inputs=96):
    return nn.Sequential(nn.Flatten(), nn.Linear(inputs, 5), *between, nn.Linear(5, 3))


def one_relu_twice():
    relu = nn.ReLU(inplace=True)
    return nn.Sequential(nn.Flatten(), nn.Linear(96, 5), relu, nn.Linear(5, 5), relu, nn.Linear(5, 3))


class Named(nn.Sequential):
    """A Sequential with an own constructor, a buffer and names."""

    def __init__(self):
        super().__init__()
        self.flat, self.first, self.act, self.last = nn.Flatten(-3), nn.Linear(96, 5), nn.Sigmoid(), nn.Linear(5, 3)
        self.first.register_buffer("mask", torch.zeros(5))


def unet():
    """A projection on the shortcut, and a block in a block."""
    inner = Residual(nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.Tanh()))
    body = nn.Sequential(nn.Conv2d(2, 4, 3, 2, 1), nn.GroupNorm(2, 4, eps=1e-3), nn.ReLU(), inner)
    first = Residual(body, nn.Sequential(nn.Conv2d(2, 4, 1, 2, bias=False), nn.GroupNorm(4, 4)))
    return nn.Sequential(first, nn.ReLU(), nn.AdaptiveAvgPool2d((1, 1)), nn.Flatten(), nn.Linear(4, 3))


class Residual(nn.Module):
    def __init__(self, body, shortcut=None):
        super().__init__()
        self.shortcut, self.body = shortcut or nn.Identity(), body

    def forward(self, x):
        return self.shortcut(x) + self.body(x)


class By(nn.Module):
    """Two dense layers, or a convolution and a dense layer, by a function of this module and the inputs."""

    def __init__(self, function, first=None, last=None):
        super().__init__()
        self.last = nn.Linear(5, 3) if last is None else last
        self.first = nn.Linear(96, 5) if first is None else first
        self.function, self.mean = function, torch.tensor([0.4, 0.5])[:, None, None]

    def forward(self, x):
        return self.function(self, x)


def by_convolution(function, inputs=3, **how):
    return By(function, nn.Conv2d(2, 3, 3, padding=1, **how), nn.Linear(inputs, 3))


def long(net, x):
    """Control flow by shapes, and functions that change nothing."""
    if x.ndim != 4 or x.shape[1] != 2 or len(x) < 1:
        raise ValueError("expected images")
    h = net.first(x.contiguous().view(x.size(0), -1).to(x.dtype))
    for function in [torch.Tensor.relu_, torch.sigmoid][: len(x.shape) // 2]:
        h = function(h)
    return net.last(functional.dropout(h.clone(), 0.5, net.training))


READ = {
    "sigmoid": (lambda: dense(nn.Sigmoid()), IMAGE),
    "three layers": (lambda: dense(nn.ReLU(), nn.Linear(5, 5), nn.ReLU()), IMAGE),
    "no activation": (dense, IMAGE),
    "tanh": (lambda: dense(nn.Tanh()), IMAGE),
    "one module twice": (one_relu_twice, IMAGE),
    "names": (Named, IMAGE),
    "dropout": (lambda: dense(nn.Dropout(0.5), nn.ReLU(), nn.Identity(), nn.Dropout(0.2).eval()), IMAGE),
    "table": (lambda: nn.Sequential(nn.Linear(7, 5), nn.ReLU(), nn.Linear(5, 3)), TABLE),
    "flattened table": (lambda: dense(nn.ReLU(), nn.Flatten(), inputs=7), TABLE),
    "activation first": (lambda: nn.Sequential(nn.Sigmoid(), nn.Linear(7, 3)), TABLE),
    "one layer": (lambda: nn.Linear(7, 3), TABLE),
    "no channels": (lambda: dense(nn.Sigmoid(), inputs=30), (6, 5)),
    "conv": (lambda: conv(2, 3, 3), IMAGE),
    "no bias": (lambda: conv(2, 3, 3, 2, 1, bias=False), IMAGE),
    "no bias of a dense layer": (lambda: dense(nn.ReLU(), nn.Linear(5, 5, bias=False)), IMAGE),
    "same": (lambda: conv(2, 3, 5, padding="same"), IMAGE),
    "valid": (lambda: conv(2, 3, 2, padding="valid"), IMAGE),
    "gaps": (lambda: conv(2, 3, 1, stride=3), IMAGE),
    "pool": (lambda: pooled(nn.MaxPool2d(2)), IMAGE),
    "pool by pair": (lambda: pooled(nn.MaxPool2d((2, 2), stride=(2, 2))), IMAGE),
    "pool of three": (lambda: pooled(nn.MaxPool2d(3)), IMAGE),
    "pool that overlaps": (lambda: pooled(nn.MaxPool2d(3, 1, 1)), IMAGE),
    "mean pool": (lambda: pooled(nn.AvgPool2d(2), nn.AvgPool2d(3, 1, 1)), IMAGE),
    "nested": (lambda: nn.Sequential(nn.Sequential(nn.Sequential(nn.ReLU()), nn.Flatten()), nn.Linear(96, 3)), IMAGE),
    "other forward": (lambda: Backwards(nn.Linear(5, 3), nn.Sigmoid(), nn.Linear(96, 5), nn.Flatten()), IMAGE),
    "order": (lambda: Reordered(nn.Linear(96, 5), nn.Flatten(), nn.Linear(5, 3)), IMAGE),
    "skipped dropout": (lambda: Skipping(nn.Flatten(), nn.Dropout(0.5), nn.Linear(96, 3)), IMAGE),
    "patched": (lambda: patched(), IMAGE),
    "functions": (lambda: By(lambda net, x: net.last(functional.relu(net.first(x.flatten(1))))), IMAGE),
    "python": (lambda: By(long), IMAGE),
    "standardized": (lambda: By(lambda net, x: net.last(net.first((x.sub(net.mean) / 0.2).flatten(1)))), IMAGE),
    "operators": (lambda: By(lambda net, x: net.last(net.first((0.5 + 2 * x - 1).reshape(len(x), -1)))), IMAGE),
    "mean": (lambda: by_convolution(lambda net, x: net.last(torch.tanh(net.first(x)).mean(dim=(-1, -2)))), IMAGE),
    "whole pool": (
        lambda: by_convolution(lambda net, x: net.last(functional.avg_pool2d(net.first(x), (8, 6)).flatten(1))),
        IMAGE,
    ),
    "kept mean": (
        lambda: by_convolution(lambda net, x: net.last(net.first(x).mean([2, 3], keepdim=True).squeeze())),
        IMAGE,
    ),
    "log-softmax": (lambda: By(lambda net, x: net.last(net.first(x.flatten(1)).relu()).log_softmax(dim=-1)), IMAGE),
    "pool to a size": (lambda: pooled(nn.AdaptiveAvgPool2d((4, 3)), nn.AdaptiveAvgPool2d((4, 3))), IMAGE),
    "small pools": (
        lambda: by_convolution(lambda net, x: net.last(torch.flatten(functional.max_pool2d(net.first(x), 2), 1)), 36),
        IMAGE,
    ),
}

RESIDUAL = {
    "group norm": (lambda: norms(nn.GroupNorm(2, 4)), IMAGE),
    "projection": (unet, IMAGE),
    "option A": (lambda: nn.Sequential(Block(2, 6), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 3)), IMAGE),
    "padded": (
        lambda: by_convolution(
            lambda net, x: net.last((net.first(x) + functional.pad(x[..., ::2, ::2], (0, 0, 0, 0, 1, 0))).mean((2, 3))),
            stride=2,
        ),
        IMAGE,
    ),
    "in place": (lambda: By(doubled_up, nn.Linear(96, 5)), IMAGE),
    "batch norm": (lambda: norms(nn.BatchNorm2d(4, momentum=0.3)), IMAGE),
}


def norms(norm):
    return nn.Sequential(nn.Conv2d(2, 4, 3), norm, nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(96, 3))


def doubled_up(net, x):
    h = net.first(x.flatten(1))
    out = h.clone()
    out += torch.sigmoid(h)
    return net.last(out)


def still(net, x):
    with torch.no_grad():
        return net.first(x.flatten(1))


class Doubled(nn.Linear):
    def forward(self, x):
        return super().forward(2 * x)


class Backwards(nn.Sequential):
    def forward(self, x):
        for one in reversed(self):
            x = one(x)
        return x


class Children(nn.Module):
    """Its children look like a sequence, but its forward is another."""

    def __init__(self):
        super().__init__()
        self.flat, self.fc, self.act, self.last = nn.Flatten(), nn.Linear(96, 5), nn.ReLU(), nn.Linear(5, 3)

    def forward(self, x):
        return self.last(self.act(self.fc(self.flat(x)) - 0.1))


class Idle(Children):
    """Children with a dropout that is never called."""

    def __init__(self):
        super().__init__()
        self.drop = nn.Dropout(0.5)


class Skipping(nn.Sequential):
    def __iter__(self):
        return iter([self[0], self[2]])


class Reordered(nn.Sequential):
    def __iter__(self):
        return iter([self[1], self[0], self[2]])


def tied(share):
    first, last = nn.Linear(5, 5), nn.Linear(5, 5)
    last.weight = first.weight
    return dense(nn.ReLU(), first, nn.Sigmoid(), first if share else last)


def frozen():
    net = dense(nn.ReLU())
    net[1].weight.requires_grad_(False)
    return net


def hooked(kind):
    def hook(module, *given):
        change = given[-1] if kind == "register_forward_hook" else given[0]
        return tuple(2 * one for one in change if one is not None) if isinstance(change, tuple) else 2 * change

    net = dense(nn.Sigmoid())
    getattr(net[3], kind)(hook)
    return net


def patched():
    net = dense(nn.Sigmoid())
    net[2].forward = torch.tanh
    return net


OTHER = {
    "groups": lambda: conv(2, 4, 3, groups=2),
    "dilation": lambda: conv(2, 3, 3, dilation=2),
    "kernel": lambda: conv(2, 3, (3, 2)),
    "stride": lambda: conv(2, 3, 3, (1, 2)),
    "padding": lambda: conv(2, 3, 3, padding=(1, 0)),
    "wide padding": lambda: conv(2, 3, 1, padding=1),
    "uneven padding": lambda: conv(2, 3, 2, padding="same"),
    "border": lambda: conv(2, 3, 3, padding=1, padding_mode="reflect"),
    "pool with a rest": lambda: pooled(nn.MaxPool2d(2, ceil_mode=True)),
    "rows": lambda: nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3)),
    "flattened in part": lambda: nn.Sequential(nn.Flatten(2), nn.Linear(48, 4), nn.Flatten(), nn.Linear(8, 3)),
    "one layer twice": lambda: tied(True),
    "tied": lambda: tied(False),
    "frozen": frozen,
    "norm": lambda: dense(nn.BatchNorm1d(5).eval(), nn.ReLU()),
    "group norm": lambda: dense(nn.GroupNorm(1, 5), nn.ReLU()),
    "weight norm": lambda: dense(nn.utils.parametrizations.weight_norm(nn.Linear(5, 5))),
    "other activation": lambda: dense(nn.Softsign()),
    "mean over uneven windows": lambda: pooled(nn.AvgPool2d(3, 2, 1, count_include_pad=False)),
    "mean by another divisor": lambda: pooled(nn.AvgPool2d(2, divisor_override=3)),
    "decision by values": lambda: By(lambda net, x: net.last(net.first(x.flatten(1)) * float(x.sum() > -1e9))),
    "no gradient": lambda: By(lambda net, x: net.last(net.first(x.flatten(1)) + still(net, x))),
    "detached": lambda: By(lambda net, x: net.last(net.first(x.flatten(1)).detach())),
    "shifted rows": lambda: By(lambda net, x: net.last(net.first(x.flatten(1)) - 0.1)),
    "rows of two records": lambda: By(lambda net, x: net.last(net.first(x.view(-1, 48).view(-1, 96)))),
    "inputs times zero": lambda: By(lambda net, x: net.last(net.first((0 * x).flatten(1)))),
    "squares": lambda: By(lambda net, x: net.last(net.first((x * x).flatten(1)))),
    "twice the same": lambda: By(lambda net, x: net.last((h := net.first(x.flatten(1))) + h)),
    "constant added to a layer": lambda: By(lambda net, x: net.last(torch.ones(5) + net.first(x.flatten(1)))),
    "affine after the first layer": lambda: By(lambda net, x: net.last(2 * net.first(x.flatten(1)))),
    "frozen batch norm": lambda: norms(nn.BatchNorm2d(4).eval()),
    "batch norm without statistics": lambda: norms(nn.BatchNorm2d(4, track_running_stats=False)),
    "norm without a scale": lambda: norms(nn.GroupNorm(2, 4, affine=False)),
    "instance norm": lambda: norms(nn.InstanceNorm2d(4)),
    "log-softmax inside": lambda: nn.Sequential(dense(nn.ReLU()), nn.LogSoftmax(1), nn.Linear(3, 3)),
    "log-softmax of records": lambda: nn.Sequential(dense(nn.ReLU()), nn.LogSoftmax(0)),
    "pool to an uneven size": lambda: pooled(nn.AdaptiveAvgPool2d((5, 3))),
    "softmax": lambda: nn.Sequential(dense(nn.ReLU()), nn.Softmax(1)),
    "sigmoid": lambda: nn.Sequential(dense(nn.ReLU()), nn.Sigmoid()),
    "subclass": lambda: dense(Doubled(5, 5)),
    "idle dropout": Idle,
    "forward hook": lambda: hooked("register_forward_hook"),
    "pre-hook": lambda: hooked("register_forward_pre_hook"),
    "backward hook": lambda: hooked("register_full_backward_hook"),
    "backward pre-hook": lambda: hooked("register_full_backward_pre_hook"),
    "module": Children,
}


def theirs(net, x, y, v):
    """Scores, gradients [m, d] and the slopes of their products with v in x, by the network itself in float64."""
    leaves = [one for one in net.parameters() if one.requires_grad]
    found = []
    for part, label, way in zip(x, y, v, strict=True):
        leaf = part.clone().requires_grad_()
        scores = net(leaf)
        gradient = torch.autograd.grad(cross_entropy(scores, label), leaves, create_graph=True)
        flat = torch.cat([one.flatten() for one in gradient])
        (slope,) = torch.autograd.grad((flat * way).sum(), leaf)
        found.append((scores.detach(), flat.detach(), slope))
    return map(torch.stack, zip(*found, strict=True))


def assert_computes(task, net, low=0.0, span=1.0):
    """The task has the scores, the gradients and the gradients' slopes of the network at x span + low."""
    params, net = task.init(Key(0)).double(), copy.deepcopy(net).double().eval()
    x = rng.uniform(KEY.child("x"), (3, 2, *task.input_shape), dtype=torch.float64)
    y = one_hot(torch.arange(6) % 3, 3).view(3, 2, 3).double()
    v = rng.normal(KEY.child("v"), (3, len(params)), torch.float64)
    leaf = x.clone().requires_grad_()
    found = gradients(task, params, leaf, y)
    (slopes,) = torch.autograd.grad((found * v).sum(), leaf)
    scores, expected, ways = theirs(net, x * span + low, y, v)
    torch.testing.assert_close(task.outputs(params, x.flatten(0, 1)), scores.flatten(0, 1))
    torch.testing.assert_close(found.detach(), expected)
    torch.testing.assert_close(slopes, ways * span)


@pytest.mark.parametrize("name", READ)
def test_a_chain_of_layers_is_read_however_it_is_written(name):
    build_it, shape = READ[name]
    net = build_it()
    task = own(net, shape)
    assert task.structure is not None
    assert kernel_of(task, task.init(KEY), 1) is not None
    assert task.layout.names == tuple(name for name, _ in net.named_parameters())
    assert_computes(task, net)
    # data that are stored on another scale, and centered besides
    double = moved(dataclasses.replace(task, model=scaled(task.model, torch.tensor(-1.0), torch.tensor(2.0))))
    spans = torch.linspace(0.5, 4.0, shape[0]).view(-1, *[1] * (len(shape) - 1))
    assert double.structure is not None
    assert_computes(double, net, (2 * (spans - 3) - 1).double(), 2 * spans.double())
    modules.check(moved(task))


@pytest.mark.parametrize("name", RESIDUAL)
def test_residual_blocks_and_norms_have_the_kernel_and_the_updates_of_the_network_as_it_is(name):
    net = RESIDUAL[name][0]()
    read, unread = tasks = own(net), own(Hidden(net))
    assert [task.structure is None for task in tasks] == [False, True]
    assert read.mixes == unread.mixes
    params = read.init(Key(0)).double()
    x = rng.uniform(KEY.child("x"), (3, 2, *IMAGE), dtype=torch.float64)
    y, v = one_hot(torch.arange(6) % 3, 3).view(3, 2, 3).double(), rng.normal(KEY.child("v"), (3, len(params))).double()
    for task in (read, moved(read)):
        leaf = (task.model.scale.apply(x) if task is not read else x.clone()).requires_grad_()
        expected = gradients(unread, params, leaf, y)
        (slopes,) = torch.autograd.grad((expected * v).sum(), leaf)
        found, trace = kernel_of(task, params, 2, blocks=True).trace(x, y)
        torch.testing.assert_close(found, expected.detach())
        torch.testing.assert_close(trace.pull(v).x, slopes * task.model.scale.span.double())
    plan = LocalPlan(False, 3, None, 4, 0.1, 0.5)
    work = [Work(random_examples(9, IMAGE, 3), KEY)]
    for change in (lambda model: model, lambda model: modules.paced(model, 0.1)):
        each = [dataclasses.replace(task, model=change(task.model)) for task in tasks]
        updates = [train_clients(task, task.init(KEY), work, plan, "loop").updates for task in each]
        torch.testing.assert_close(*updates)


@pytest.mark.parametrize("name", OTHER)
@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")
def test_any_other_network_is_called_as_it_is(name):
    net = OTHER[name]()
    task = own(net)
    assert task.structure is None
    # these have no gradients of many batches at once, or others in eval mode
    if not any(word in name for word in ("backward", "decision", "detached", "batch norm without", "of records")):
        assert_computes(task, net)


def test_lazy_layers_are_read_once_they_have_a_shape():
    task = own(lambda: nn.Sequential(nn.LazyConv2d(3, 3), nn.Flatten(), nn.LazyLinear(3)))
    assert task.structure is not None
    assert task.layout.shapes == ((3, 2, 3, 3), (3,), (3, 72), (3,))


class Hidden(nn.Module):
    """A network behind a forward of its own that is not read: it takes a sum of the inputs times zero."""

    def __init__(self, net):
        super().__init__()
        self.net = net

    def forward(self, x):
        return self.net(x) - 0 * x.flatten(1).sum(1, keepdim=True)


def by_functions(net, x):
    h = functional.max_pool2d(functional.dropout(functional.relu(net.first(x)), 0.5, net.training), 2)
    return net.last(functional.dropout2d(h, p=0.3, training=net.training).flatten(1))


@pytest.mark.parametrize("by_function", [False, True])
def test_dropout_has_the_masks_and_the_gradients_of_an_unread_network(by_function):
    net = pooled(nn.Dropout(0.5), nn.MaxPool2d(2), nn.Dropout2d(0.3))
    net = by_convolution(by_functions, 36) if by_function else net
    read, unread = own(net), own(Hidden(net))
    assert read.structure is not None
    assert unread.structure is None
    assert read.model.apply.dropout == unread.model.apply.dropout == (((3, 8, 6), 0.5), ((3, 1, 1), 0.3))
    plan = LocalPlan(False, 3, None, 4, 0.1, 0.5)
    for clip in (None, 0.1):
        work = [Work(random_examples(9, IMAGE, 3), KEY)]
        updates = [
            train_clients(task, task.init(KEY), work, dataclasses.replace(plan, clip=clip), "loop").updates
            for task in (read, unread)
        ]
        torch.testing.assert_close(*updates)
        assert updates[0].abs().max() > 0
