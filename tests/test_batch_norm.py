"""A model with batch norm: its statistics are those of the batch, are sent, and are attacked."""

import copy
import math
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, one_hot

from leakgauge import Key, rng
from leakgauge.attacks._engine.simulate import client_updates
from leakgauge.harness.core.contract import Examples
from leakgauge.harness.learn.batch import LocalPlan, Work, choose_engine, train_clients
from leakgauge.harness.learn.gradients import gradients, losses
from leakgauge.harness.learn.models import build
from leakgauge.harness.learn.tasks import ModelTask
from tests.torch_models import TWINS, fill, owned

SHAPE = (3, 16, 16)
TASK = ModelTask(build("resnet20-bn", SHAPE, 10))
STATISTICS = torch.cat(
    [
        torch.full((tensor.numel(),), "running" in name)
        for name, tensor in zip(TASK.layout.names, TASK.layout.split(torch.zeros(TASK.layout.dim)), strict=True)
    ]
)
PLAN = LocalPlan(gradient=False, steps=2, epochs=None, batch=0, lr=0.1, momentum=0.0)


def batch(b, key=0):
    x = rng.uniform(Key(key, ("x",)), (b, *SHAPE), dtype=torch.float64)
    return Examples(x, torch.arange(b) % 10)


def params():
    return TASK.init(Key(1)).double()


def twin():
    net = copy.deepcopy(nn.Sequential(*TWINS["resnet20-bn"])).double().train()
    fill(net, params())
    for module in net.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = 1.0
    return net


def test_a_step_has_the_gradient_of_torch_and_moves_the_statistics_toward_those_of_the_batch():
    x, y = batch(5)
    net, start = twin(), params()
    cross_entropy(net(x), y).backward()
    sent = train_clients(TASK, start, [Work(Examples(x, y), Key(0))], replace(PLAN, gradient=True), "loop").updates[0]
    # torch's running variance divides by one entry less
    entries = {
        id(m.running_var): len(x) * (256 // m.num_features) ** 2 for m in net.modules() if hasattr(m, "running_var")
    }
    for mine, was, theirs in zip(TASK.layout.split(sent), TASK.layout.split(start), owned(net), strict=True):
        if theirs.grad is not None:
            torch.testing.assert_close(mine, theirs.grad)
        else:
            n = entries.get(id(theirs), math.inf)
            torch.testing.assert_close(mine, was - theirs * (1 - 1 / n))


def test_a_trained_model_scores_by_its_running_statistics():
    x, y = batch(4)
    net = twin().eval()
    scores = TASK.outputs(params(), x)
    torch.testing.assert_close(scores, net(x))
    torch.testing.assert_close(TASK.outputs(params(), x[:1]), scores[:1])
    assert not torch.allclose(TASK.in_training(params(), x).scores, scores)
    torch.testing.assert_close(losses(TASK, params(), x, y), cross_entropy(scores, y, reduction="none"))


def test_the_attacks_simulate_what_clients_send():
    x, y = batch(4)
    for steps in (1, 2):
        local = LocalPlan(False, steps, None, 0, PLAN.lr, 0.0)
        own = train_clients(TASK, params(), [Work(Examples(x, y), Key(0))], replace(PLAN, steps=steps), "loop").updates
        simulated = client_updates(TASK, params(), x[None], one_hot(y, 10).double()[None], local)
        torch.testing.assert_close(simulated, own)


def test_many_gradients_at_once_are_those_of_each_and_slope_in_the_images():
    x, y = rng.uniform(Key(2), (3, 2, *SHAPE), dtype=torch.float64), one_hot(torch.arange(6).view(3, 2), 10).double()
    alone = [gradients(TASK, params(), x[i : i + 1], y[i : i + 1]) for i in range(3)]
    torch.testing.assert_close(gradients(TASK, params(), x, y), torch.cat(alone))
    for only in (STATISTICS, ~STATISTICS):
        assert_slope(lambda images: gradients(TASK, params(), images, y[:1]), x[:1], only)


def test_the_statistics_of_two_steps_slope_as_they_move():
    x, y = rng.uniform(Key(5), (1, 2, *SHAPE), dtype=torch.float64), one_hot(torch.arange(2), 10).double()[None]
    local = LocalPlan(False, 2, None, 0, PLAN.lr, 0.0)
    assert_slope(lambda images: client_updates(TASK, params(), images, y, local), x, STATISTICS)


def assert_slope(sent, x, only):
    """The slope of a random combination of these entries of what is sent is that of small steps, between two kinks."""
    direction, step = rng.normal(Key(4), (TASK.layout.dim,), torch.float64) * only, 1e-8
    leaf, way = x.clone().requires_grad_(), rng.normal(Key(3), x.shape, torch.float64)
    (slope,) = torch.autograd.grad(sent(leaf)[0] @ direction, leaf)
    ends = [sent(x + sign * step * way)[0] @ direction for sign in (1, -1)]
    assert float((slope * way).sum()) == pytest.approx(float(ends[0] - ends[1]) / (2 * step), rel=1e-4)
    assert slope.abs().max() > 1e-6


@pytest.mark.parametrize("plan", [replace(PLAN, clip=1.0), replace(PLAN, poisson=True)], ids=["clip", "poisson"])
def test_a_defense_that_needs_single_records_is_refused(plan):
    with pytest.raises(
        ValueError, match=r"'resnet20-bn' mixes the records of a batch.* take a model without batch norm"
    ):
        train_clients(TASK, params(), [Work(batch(4), Key(0))], plan, "loop")


def test_one_client_after_the_other_is_the_only_way_to_train_it():
    assert choose_engine(TASK) == "loop"
    with pytest.raises(ValueError, match="expected engine 'loop' for model 'resnet20-bn', got 'vmap'"):
        train_clients(TASK, params(), [Work(batch(4), Key(0))], PLAN, "vmap")
