"""Initialization, losses and gradients of the models."""

import dataclasses
import math

import pytest
import torch
from torch import nn
from torch.func import grad, vmap

from leakgauge import Key, rng
from leakgauge.harness.learn.layers import Dropout
from leakgauge.harness.learn.models import build
from leakgauge.harness.learn.structure import Structure
from leakgauge.harness.learn.tasks import ModelTask
from tests.by_rows import by_rows

KEY = Key(0)

SMALL = {
    "linear": ((5,), 3),
    "mlp-small": ((5,), 3),
    "mlp": ((5,), 3),
    "cnn2": ((1, 16, 16), 3),
    "cnn3": ((1, 22, 22), 3),
    "lenet-dlg": ((3, 8, 8), 3),
    "lenet5": ((1, 12, 12), 3),
    "cnn-udp": ((1, 6, 6), 3),
    "resnet20": ((3, 8, 8), 3),
    "svm": ((5,), 3),
    "linear-regression": ((5,), 1),
}


def _task(name):
    return ModelTask(build(name, *SMALL[name]))


def _data(task, n=4):
    """Parameters, inputs and labels; float64, so that equality is of the formulas."""
    params = task.init(KEY.child("params")).double()
    x = rng.uniform(KEY.child("x"), (n, *task.input_shape), dtype=torch.float64)
    return params, x, torch.from_numpy(rng.integers(KEY.child("y"), n, task.classes))


def _simplex(b):
    """[b, 3] probabilities."""
    return torch.softmax(rng.normal(KEY.child("soft"), (b, 3), torch.float64), 1)


def test_a_model_is_smooth_where_all_its_layers_are_known_to_be():
    smooth = {name for name in SMALL if _task(name).smooth}
    assert smooth == {"linear", "lenet-dlg"}


@pytest.mark.parametrize("layer", [nn.Linear(20, 1000), nn.Conv2d(3, 1000, 5)])
def test_torch_draws_weights_and_biases_within_one_over_root_fan_in(layer):
    bound = layer.weight[0].numel() ** -0.5
    for tensor in layer.parameters():
        assert 0.8 * bound < tensor.abs().max() <= bound  # 1000 entries below 0.8: probability 1e-97


@pytest.mark.parametrize("initialization", ["default", "dlg"])
@pytest.mark.parametrize("name", ["mlp-small", "lenet-dlg", "resnet20"])
def test_initialization_is_one_draw_scaled_by_the_fan_in_or_to_a_half(name, initialization):
    task = ModelTask(build(name, *SMALL[name]), initialization)
    draw = task.layout.split(rng.uniform(KEY, (task.layout.dim,), -1, 1))
    params = task.init(KEY)
    parts = zip(task.layout.split(params), draw, task.layout.names, task.structure.fan_in, strict=True)
    for part, unit, tensor, fan_in in parts:
        if tensor.endswith("scale"):
            assert torch.equal(part, torch.ones_like(part))
        elif initialization == "dlg":
            assert torch.equal(part, unit / 2)
        elif "norm" in tensor:
            assert not part.any()
        else:
            torch.testing.assert_close(part, unit / math.sqrt(fan_in))
            assert part.abs().max() <= 1 / math.sqrt(fan_in)
    assert torch.equal(params, task.init(KEY))
    assert not torch.equal(params, task.init(KEY.child("other")))
    assert params.dtype == torch.float32


def test_an_unknown_initialization_is_refused():
    with pytest.raises(ValueError, match="no initialization 'he'; known: default, dlg"):
        ModelTask(build("linear", (5,), 3), initialization="he")


@pytest.mark.parametrize("name", SMALL)
def test_the_loss_is_the_mean_of_the_losses_plus_the_penalty(name):
    task = _task(name)
    params, x, y = _data(task)
    losses = task.losses(params, x, y)
    assert losses.shape == (4,)
    torch.testing.assert_close(task.loss(params, x, y), losses.mean() + task.penalty([params]))
    assert task.softmax == (name not in ("svm", "linear-regression"))
    diverged = task.penalty([torch.full((task.layout.dim,), torch.inf)])
    assert diverged == (torch.inf if task.model.l2 else 0)


@pytest.mark.parametrize("name", ["mlp", "svm"])
def test_soft_labels_give_the_expected_loss(name):
    task = _task(name)
    params, x, _ = _data(task)
    soft = _simplex(4)
    each = torch.stack([task.losses(params, x, torch.full((4,), label)) for label in range(3)], 1)
    torch.testing.assert_close(task.losses(params, x, soft), (soft * each).sum(1))


def test_cross_entropy_is_minus_the_log_of_the_labels_probability():
    task = _task("linear")
    params, x, y = _data(task)
    wanted = -torch.softmax(task.outputs(params, x), 1).log()[torch.arange(4), y]
    torch.testing.assert_close(task.losses(params, x, y), wanted)


def test_two_class_hinge_is_the_formula_of_udp():  # UDP (32) with its sign corrected
    task = ModelTask(build("svm", (5,), 2))
    params, x, y = rng.normal(KEY, (5,)), rng.normal(KEY.child("x"), (9, 5)), torch.tensor([0, 1] * 4 + [0])
    wanted = torch.clamp(1 - (2 * y - 1) * (x @ params), min=0)
    torch.testing.assert_close(task.losses(params, x, y), wanted)
    assert 0 < (wanted == 0).sum() < 9  # both branches are seen
    torch.testing.assert_close(task.loss(params, x, y), wanted.mean() + 0.01 / 2 * params.square().sum())


def test_multi_class_hinge_compares_with_the_best_other_score():  # Crammer and Singer 2001
    task = ModelTask(build("svm", (3,), 3))
    params = torch.eye(3).flatten()  # the scores are the inputs
    x = torch.tensor([[3.0, 1.0, 0.0], [0.0, 0.5, 2.0], [1.0, 1.0, 1.0]])
    assert task.losses(params, x, torch.tensor([0, 1, 2])).tolist() == [0.0, 2.5, 1.0]


def test_squared_loss_is_the_formula_of_ota():  # OTA: mean (w.u - v)^2 + lambda/2 ||w||^2, lambda = 1e-3
    task = ModelTask(build("linear-regression", (30,), 1))
    w, u, v = rng.normal(KEY, (30,)), rng.normal(KEY.child("u"), (20, 30)), rng.normal(KEY.child("v"), (20,))
    wanted = (u @ w - v).square().mean() + 1e-3 / 2 * w.square().sum()
    torch.testing.assert_close(task.loss(w, u, v), wanted)


@by_rows(("mlp", (3,)), ("mlp", (4, 2)), ("svm", (1,)), ("linear-regression", (4, 1)))
def test_labels_of_another_shape_are_refused(name, shape):
    task = _task(name)
    params, x, _ = _data(task)
    with pytest.raises(ValueError, match=r"expected labels of shape \(4,\)"):
        task.losses(params, x, torch.zeros(shape, dtype=torch.int64))


def test_a_test_counts_the_highest_scores_of_a_classifier():
    task = ModelTask(build("svm", (3,), 3))
    x = torch.tensor([[3.0, 1.0, 0.0], [0.0, 0.5, 2.0], [1.0, 2.0, 1.0]])
    params, y = torch.eye(3).flatten(), torch.tensor([0, 1, 1])
    losses, correct = task.tested(params, x, y)
    assert correct == 2
    assert torch.equal(losses, task.losses(params, x, y))
    regression = _task("linear-regression")
    params, x, y = _data(regression)
    losses, correct = regression.tested(params, x, y)
    assert correct is None
    assert torch.equal(losses, regression.losses(params, x, y).detach())


def _squared_norm(task, params, x, y):
    """||gradient of the loss||^2, differentiable in x."""
    (gradient,) = torch.autograd.grad(task.loss(params, x, y), params, create_graph=True)
    return gradient.square().sum()


@pytest.mark.parametrize(("name", "soft"), [("lenet-dlg", True), ("mlp", False), ("mlp", True)])
def test_the_gradient_can_be_differentiated_by_the_input_and_by_soft_labels(name, soft):
    task = _task(name)
    params, x, y = _data(task, 2)
    params.requires_grad_()
    x.requires_grad_()
    labels = _simplex(2).requires_grad_() if soft else y
    inputs = (x, labels) if soft else (x,)
    assert torch.autograd.gradcheck(lambda x, labels=labels: _squared_norm(task, params, x, labels), inputs)


@pytest.mark.parametrize("name", SMALL)
def test_vmap_gives_each_examples_gradient_and_runs_several_models(name):
    task = _task(name)
    params, x, y = _data(task)
    together = vmap(grad(task.loss), in_dims=(None, 0, 0))(params, x[:, None], y[:, None])
    alone = torch.stack([grad(task.loss)(params, x[i : i + 1], y[i : i + 1]) for i in range(4)])
    torch.testing.assert_close(together, alone)
    assert together.abs().amax(1).min() > 0
    many = torch.stack([task.init(KEY.child(i)).double() for i in range(3)])
    together = vmap(grad(task.loss), in_dims=(0, None, None))(many, x, y)
    torch.testing.assert_close(together, torch.stack([grad(task.loss)(params, x, y) for params in many]))


@pytest.mark.parametrize("name", ["lenet-dlg", "mlp", "cnn2", "resnet20"])
def test_vmap_goes_through_the_second_derivative(name):
    task = _task(name)
    params, x, y = _data(task, 2)

    def norm(x, y):
        return grad(task.loss)(params, x, y).square().sum()

    together = vmap(grad(norm))(x[:, None], y[:, None])
    torch.testing.assert_close(together, torch.stack([grad(norm)(x[i : i + 1], y[i : i + 1]) for i in range(2)]))


def _dropped(task):
    """(entries, zeros) of the masks of four examples."""
    masks = task.dropout_masks(KEY, 4)
    return sum(mask.numel() for mask in masks), sum(int((mask == 0).sum()) for mask in masks)


def _agrees(entries, zeros, rate):
    """Two-sided test of a proportion; alpha = 1e-6: 4.892 standard deviations."""
    return abs(zeros / entries - rate) <= 4.892 * math.sqrt(rate * (1 - rate) / entries)


def test_masks_are_zero_or_scaled_and_drop_at_the_declared_rate():
    task = ModelTask(build("cnn3", (3, 32, 32), 10))
    masks = task.dropout_masks(KEY, 4)
    assert [tuple(mask.shape) for mask in masks] == [(4, *shape) for shape, _ in task.model.apply.dropout]
    for mask in masks:
        assert mask.dtype == torch.float32
        assert set(mask.unique().tolist()) == {0.0, 1.25}
    # alpha = beta = 1e-6 and a rate off by 0.02: ((4.892 * 0.4 + 4.753 * 0.4142) / 0.02)^2 = 38,530 entries
    entries, zeros = _dropped(task)
    assert entries >= 38_530
    assert _agrees(entries, zeros, 0.2)
    layers = (
        dataclasses.replace(one, rate=0.225) if isinstance(one, Dropout) else one for one in task.structure.layers
    )
    off = dataclasses.replace(task.model, apply=Structure(tuple(layers)))
    assert not _agrees(*_dropped(ModelTask(off)), 0.2)


def test_masks_of_ones_or_none_leave_the_loss():
    task = _task("cnn3")
    params, x, y = _data(task)
    masks = task.dropout_masks(KEY, 4)
    assert task.loss(params, x, y, masks) != task.loss(params, x, y)
    ones = [torch.ones_like(mask) for mask in masks]
    torch.testing.assert_close(task.losses(params, x, y, ones), task.losses(params, x, y))
    assert _task("mlp").dropout_masks(KEY, 4) is None
