"""The search by what a gradient of one image tells of the first dense layer."""

import dataclasses

import pytest
import torch
from torch.nn.functional import one_hot

from leakgauge import Key, rng
from leakgauge.attacks._search.features import Features
from leakgauge.harness.learn.gradients import gradients
from leakgauge.harness.learn.kernels import Kernel
from leakgauge.harness.learn.models import build
from leakgauge.harness.learn.prior import gaussian_prior
from leakgauge.harness.learn.tasks import ModelTask

KEY = Key(3)
N, SHAPE = 4, (1, 16, 16)
CONVOLUTIONS = ["cnn2", "lenet5", "cnn-udp"]


def federation(name, dtype=torch.float64):
    """A task, its parameters, N inputs and the gradient of each."""
    task = ModelTask(build(name, SHAPE, 10))
    params, x = task.init(KEY).to(dtype), rng.uniform(KEY.child("x"), (N, *SHAPE)).to(dtype)
    y = one_hot(torch.arange(N), 10)[:, None].to(dtype)
    return task, params, x, gradients(task, params, x[:, None], y).detach()


def before(task):
    """The layers before the first dense one."""
    return task.structure.front(task.structure.first_dense)


def noisy(targets, level):
    """With normal noise of `level` in every entry."""
    return targets + level * rng.normal(KEY.child("noise"), tuple(targets.shape)).to(targets)


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_the_kernel_of_a_linear_loss_agrees_with_autograd(name):
    task, params, x, _ = federation(name)
    chain = before(task)
    theirs = params[: chain.layout.dim].requires_grad_()
    dummy = x[0].clone().requires_grad_()
    outputs = chain(chain.layout.split(theirs), dummy[None], None)
    y = rng.normal(KEY.child("y"), tuple(outputs.shape), torch.float64).requires_grad_()
    v = rng.normal(KEY.child("v"), tuple(theirs.shape), torch.float64)
    w = rng.normal(KEY.child("w"), tuple(outputs.shape), torch.float64)
    (gradient,) = torch.autograd.grad((y * outputs).sum(), theirs, create_graph=True)
    slopes = torch.autograd.grad((gradient * v).sum() + (w * outputs).sum(), (dummy, y))
    kernel = Kernel(chain, theirs, linear=True)
    found, trace = kernel.trace(x[:1, None], y[None].detach())
    pulled = trace.pull(v[None], w[None])
    torch.testing.assert_close(found[0], gradient.detach())
    torch.testing.assert_close(trace.outputs[0], outputs.detach())
    torch.testing.assert_close(pulled.x[0, 0], slopes[0])
    torch.testing.assert_close(pulled.y[0], slopes[1])


@pytest.mark.parametrize("name", [*CONVOLUTIONS, "mlp-small"])
def test_the_truth_explains_all_and_the_slope_is_that_of_the_value(name):
    task, params, x, targets = federation(name)
    told, rows = Features.of(task, params, targets), torch.arange(N)
    assert (told(x.flatten(1), rows).value < 1e-6).all()
    assert (told.error < 1e-6).all()
    candidates = (0.8 * x + 0.1).flatten(1)
    value, slope = told(candidates, rows)
    assert (value > 0.01).all()
    # along one pixel at a time, so near that no unit switches
    for pixel in (37, 120, 200):
        step = torch.zeros_like(candidates)
        step[:, pixel] = 1e-8
        difference = (told(candidates + step, rows).value - told(candidates - step, rows).value) / 2e-8
        torch.testing.assert_close(difference, slope[:, pixel], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("level", [1e-4, 1e-3])
@pytest.mark.parametrize("name", ["lenet5", "mlp-small"])
def test_the_error_is_that_of_the_features_under_equal_noise(name, level):
    task, params, _, targets = federation(name)
    exact, told = Features.of(task, params, targets), Features.of(task, params, noisy(targets, level))
    off = (told.features - exact.features).norm(dim=1) / exact.features.norm(dim=1)
    assert (told.error > 1e-3).all()
    assert 0.5 < float((off / told.error).median()) < 2.0


def test_noise_leaves_more_weight_to_the_prior():
    task, params, x, targets = federation("mlp-small")
    level = 0.1 * float(targets.abs().max())
    clear, hidden = Features.of(task, params, targets), Features.of(task, params, noisy(targets, level))
    assert (clear.trust == 1).all()
    assert (hidden.trust < 1).all()
    plain = dataclasses.replace(hidden, trust=torch.ones_like(hidden.trust))
    rows, candidates = torch.arange(N), x.flatten(1)
    for scaled, whole in zip(hidden(candidates, rows), plain(candidates, rows), strict=True):
        torch.testing.assert_close(scaled, hidden.trust.view(-1, *[1] * (whole.ndim - 1)) * whole)


def test_a_dense_layer_without_a_gradient_shows_no_features():
    task, params, _, targets = federation("cnn2")
    dense = before(task).layout.dim
    targets[0, dense:] = 0.0
    told = Features.of(task, params, targets)
    assert told.error[0] == torch.inf
    assert told.error[1:].isfinite().all()


def test_a_model_of_other_layers_shows_no_features():
    task = ModelTask(build("resnet20", (3, 16, 16), 10))
    params = task.init(KEY)
    assert Features.of(task, params, params[None]) is None


def test_a_mean_of_minima_without_gradients_leans_to_the_one_that_explains_most():
    task, params, x, targets = federation("cnn2", torch.float32)
    prior = gaussian_prior(rng.uniform(KEY.child("auxiliary"), (40, *SHAPE)), 100.0)
    start = torch.zeros(N, prior.coordinates(x[0].flatten()).shape[-1])
    exact = Features.of(task, params, targets)
    told = exact.of_batches(exact.features)
    plain, lone = (dataclasses.replace(told, choice=power).search(prior, start, 30, Key(1)) for power in (0.0, 1e3))
    found = told.search(prior, start, 30, Key(1))
    assert found.evaluations.tolist() == [3 * 48] * N
    assert ((found.x - lone.x).norm(dim=1) < (plain.x - lone.x).norm(dim=1)).all()


def test_searches_repeat_themselves_and_do_not_depend_on_other_victims():
    task, params, x, targets = federation("cnn2", torch.float32)
    prior = gaussian_prior(rng.uniform(KEY.child("auxiliary"), (40, *SHAPE)), 100.0)
    start = torch.zeros(N, prior.coordinates(x[0].flatten()).shape[-1])
    told, alone = Features.of(task, params, targets), Features.of(task, params, targets[:1])
    together = told.search(prior, start, 30, Key(1))
    again, single = told.search(prior, start, 30, Key(1)), alone.search(prior, start[:1], 30, Key(1))
    assert torch.equal(together.x, again.x)
    torch.testing.assert_close(single.x[0], together.x[0], rtol=1e-3, atol=1e-3)
    assert together.evaluations.tolist() == [90] * N
    assert (
        told(prior.inputs(together.x), torch.arange(N)).value < told(prior.inputs(start), torch.arange(N)).value
    ).all()
