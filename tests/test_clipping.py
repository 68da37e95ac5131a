"""Clipped per-record gradients against a loop over records in float64, and against opacus."""

import dataclasses
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.functional import conv2d, cross_entropy, linear, relu_

from harness import batch, clipping
from harness.batch import LocalPlan, Work, plan_batches, train_clients
from harness.clipping import UnknownUse, clipped_gradient
from harness.contract import Examples
from harness.models import Model, build, names
from harness.rng import Key, normal
from harness.tasks import ModelTask
from harness.vec import Layout
from tests.doubles import random_examples, small_task

SHAPES = {"cnn2": (1, 16, 16), "cnn3": (3, 22, 22), "lenet5": (1, 14, 14)}
PLAN = LocalPlan(gradient=False, steps=None, epochs=2, batch=8, lr=0.02, momentum=0.9, clip=1.0)


def shape_of(model):
    return SHAPES.get(model, (1, 8, 8))


def record_gradients(task, params, x, y, keep=None):
    """[b, d] float64, one backward pass a record."""
    at = params.detach().double().clone().requires_grad_()
    rows = []
    for i in range(len(x)):
        masks = None if keep is None else [mask[i : i + 1].double() for mask in keep]
        target = y[i : i + 1] if y.dtype == torch.int64 else y[i : i + 1].double()
        rows.append(torch.autograd.grad(task.losses(at, x[i : i + 1].double(), target, masks)[0], at)[0])
    return torch.stack(rows) if rows else torch.zeros(0, len(params), dtype=torch.float64)


def clipped_sum(rows, clip):
    """The sum of rows of a norm of at most `clip`; without one, of the rows."""
    if clip is None:
        return rows.sum(0)
    return sum(
        (row * min(1.0, clip / float(row.norm())) for row in rows if row.norm() > 0), torch.zeros_like(rows[:1].sum(0))
    )


def median_norm(task, params, x, y, keep=None):
    """A clip that half of the records are above."""
    return float(record_gradients(task, params, x, y, keep).norm(dim=1).median())


def assert_near(found, wanted, rtol=1e-5):
    """||found - wanted|| <= rtol ||wanted||."""
    assert float(wanted.norm()) > 0
    assert float((found.double() - wanted).norm()) <= rtol * float(wanted.norm())


def flat_clipped(task, params, x, y, keep, clip, divisor):
    return task.layout.join(clipped_gradient(task, task.layout.split(params), x, y, keep, clip, divisor))


def assert_is_the_naive_sum(task, b=7, soft=False):
    """With a clip that half of the records are above."""
    params = task.init(Key(1))
    x, y = random_examples(b, task.input_shape)
    if soft:
        y = normal(Key(5), (b, task.classes)).softmax(1)
    keep = task.dropout_masks(Key(2), b)
    clip = median_norm(task, params, x, y, keep)
    found = flat_clipped(task, params, x, y, keep, clip, 11.0)
    assert_near(found, clipped_sum(record_gradients(task, params, x, y, keep), clip) / 11)


@pytest.mark.parametrize("model", [name for name, _ in names() if name != "resnet110"])
def test_the_sum_is_that_of_a_loop_over_records(model):
    assert_is_the_naive_sum(small_task(model, shape_of(model)))


@pytest.mark.slow
def test_the_sum_of_the_deepest_model_is_that_of_a_loop_over_records():
    assert_is_the_naive_sum(small_task("resnet110"), b=3)


@pytest.mark.parametrize("model", ["mlp-small", "cnn2", "svm"])
def test_labels_may_be_probabilities(model):
    assert_is_the_naive_sum(small_task(model, shape_of(model)), soft=True)


def test_a_dense_stack_by_hand_is_a_dense_stack_watched():
    task = small_task()
    watched = ModelTask(dataclasses.replace(task.model, widths=None))
    params, (x, y) = task.init(Key(1)), random_examples(7)
    found = [flat_clipped(one, params, x, y, None, 0.5, 7.0) for one in (task, watched)]
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    "model", ["cnn2", "lenet-dlg", "cnn-udp", "resnet20"]
)  # strides, paddings, kernels without bias
@pytest.mark.parametrize(
    "sizes",
    [{"_CACHE": 1}, {"_KEPT": 0}, {"_GRAM": 0}, {"_CACHE": 3000, "_KEPT": 0}],
    ids=lambda sizes: "-".join(sizes),
)
def test_a_kernel_has_the_same_sum_in_every_way(model, sizes, monkeypatch):
    for name, value in sizes.items():
        assert hasattr(clipping, name)
        monkeypatch.setattr(clipping, name, value)
    assert_is_the_naive_sum(small_task(model, shape_of(model)))


def test_nothing_is_clipped_below_the_bound():
    task = small_task("cnn2", (1, 16, 16))
    params, (x, y) = task.init(Key(1)), random_examples(6, (1, 16, 16))
    wanted = record_gradients(task, params, x, y).mean(0)
    for clip in (1e6, math.inf):
        assert_near(flat_clipped(task, params, x, y, None, clip, 6.0), wanted)


@settings(deadline=None, max_examples=30)
@given(scale=st.floats(-3, 3), exponent=st.floats(-3, 3), index=st.integers(0, 5))
def test_one_record_never_moves_the_sum_by_more_than_the_clip(scale, exponent, index):
    task, clip = small_task(), 10**exponent
    params, (x, y) = task.init(Key(1)), random_examples(6)
    alone = flat_clipped(task, params, 10**scale * x[index : index + 1], y[index : index + 1], None, clip, 1.0)
    assert float(alone.double().norm()) <= clip * (1 + 1e-5)


def regression(w, x, y):
    """linear-regression on vectors, its gradient without the penalty 2 (w.x - y) x."""
    task = ModelTask(build("linear-regression", (x.shape[1],), 1))
    return task, torch.full((x.shape[1],), w), x, y


def test_a_zero_gradient_adds_zero():
    task, params, x, y = regression(0.0, torch.ones(3, 4), torch.tensor([0.0, 2.0, 0.0]))
    found = flat_clipped(task, params, x, y, None, 1.0, 1.0)
    assert found.tolist() == pytest.approx([-0.5] * 4, rel=1e-6)  # -4 ones, scaled to norm 1
    assert flat_clipped(task, params, x[:1], y[:1], None, 1.0, 1.0).tolist() == [0.0] * 4


def test_no_record_is_a_zero_gradient():
    for model in ("mlp-small", "cnn2"):
        task = small_task(model, shape_of(model))
        x, y = random_examples(0, shape_of(model))
        assert not flat_clipped(task, task.init(Key(1)), x, y, None, 1.0, 8.0).any()


def test_a_norm_whose_square_no_float32_holds_is_clipped_all_the_same():
    # ||g|| = 2 y ||x|| = 4e25
    task, params, x, y = regression(0.0, torch.full((2, 4), 1e15), torch.full((2,), 1e10))
    assert flat_clipped(task, params, x, y, None, 1.0, 1.0).tolist() == pytest.approx([-1.0] * 4, rel=1e-6)


@pytest.mark.parametrize("engine", ["loop", "dense", "vmap"])
def test_huge_inputs_move_a_dense_stack_by_no_more_than_the_clip(engine):
    task = small_task()
    data = random_examples(1)
    work = [Work(Examples(data.x * 1e22, data.y + 1), Key(0))]
    plan = LocalPlan(gradient=True, steps=1, epochs=None, batch=0, lr=1.0, momentum=0.0, clip=0.5)
    found = train_clients(task, task.init(Key(1)), work, plan, engine).updates[0]
    assert float(found.double().norm()) == pytest.approx(0.5, rel=1e-5)


@pytest.mark.parametrize("model", ["mlp-small", "cnn2", "resnet20"])
def test_a_record_that_is_no_number_leaves_no_number(model):
    task = small_task(model, shape_of(model))
    x, y = random_examples(4, shape_of(model))
    x[2] = math.nan
    assert flat_clipped(task, task.init(Key(1)), x, y, None, 1.0, 4.0).isnan().all()


def test_the_parameters_stay_as_they_are():
    task = small_task("resnet20")
    params = task.init(Key(1))
    tensors = task.layout.split(params.clone())
    clipped_gradient(task, tensors, *random_examples(3), None, 1.0, 3.0)
    assert torch.equal(task.layout.join(tensors), params)
    assert not any(tensor.requires_grad for tensor in tensors)


def product(tensors, x, keep):
    """A matrix product by another name."""
    return x.flatten(1) @ tensors[0].T


def stacked(tensors, x, keep):
    """Parameters inside a list."""
    return linear(x.flatten(1), torch.cat([tensors[0][:5], tensors[0][5:]]))


def unbound(tensors, x, keep):
    """Rows of a parameter one by one."""
    return linear(x.flatten(1), torch.stack(tensors[0].unbind()))


def tied(tensors, x, keep):
    """One parameter in two layers."""
    return linear(x.flatten(1), tensors[0]) + linear(x.flatten(1).square(), tensors[0])


def overwritten(tensors, x, keep):
    """A layer's output is not what it was."""
    return relu_(linear(x.flatten(1).clone().requires_grad_(), tensors[0]))


def unused(tensors, x, keep):
    """The parameter does nothing."""
    return x.flatten(1)[:, :10]


def doubled(tensors, x, keep):
    """A value that is computed from a parameter."""
    return linear(x.flatten(1), 2 * tensors[0])


STRANGE = [product, stacked, unbound, tied, overwritten, unused, doubled]


def strange_task(apply, l2=0.01):
    layout = Layout(("w",), ((10, 64),))
    return ModelTask(Model("strange", layout, (64,), (1, 8, 8), 10, apply, l2=l2))


@pytest.mark.parametrize("apply", STRANGE, ids=lambda apply: apply.__name__)
def test_a_parameter_in_an_unknown_place_is_refused(apply):
    task = strange_task(apply)
    x, y = random_examples(4)
    with pytest.raises(UnknownUse):
        clipped_gradient(task, task.layout.split(task.init(Key(1))), x, y, None, 1.0, 4.0)


def dilated_kernel(tensors, x, keep):
    return conv2d(x, tensors[0], dilation=2).flatten(1)[:, :10]


def depthwise(tensors, x, keep):
    return conv2d(x.expand(-1, 2, -1, -1), tensors[0], groups=2).flatten(1)[:, :10]


def same(tensors, x, keep):
    return conv2d(x, tensors[0], padding="same").flatten(1)[:, :10]


@pytest.mark.parametrize("apply", [dilated_kernel, depthwise, same])
def test_a_convolution_of_another_kind_is_refused(apply):
    task = ModelTask(Model("strange", Layout(("w",), ((2, 1, 3, 3),)), (9,), (1, 8, 8), 10, apply))
    x, y = random_examples(4)
    with pytest.raises(UnknownUse):
        clipped_gradient(task, task.layout.split(task.init(Key(1))), x, y, None, 1.0, 4.0)


def by_position(tensors, x, keep):
    """A dense layer along one axis of many."""
    return linear(x, tensors[0]).mean((1, 2))


def rows_of_pixels_as_records(tensors, x, keep):
    """A dense layer whose first axis is longer than the batch."""
    return linear(x.view(-1, 8), tensors[0]).view(len(x), 8, 10).mean(1)


@pytest.mark.parametrize("apply", [by_position, rows_of_pixels_as_records])
def test_a_dense_layer_of_more_than_one_vector_a_record_is_refused(apply):
    task = ModelTask(Model("strange", Layout(("w",), ((10, 8),)), (8,), (1, 8, 8), 10, apply))
    x, y = random_examples(4)
    with pytest.raises(UnknownUse):
        clipped_gradient(task, task.layout.split(task.init(Key(1))), x, y, None, 1.0, 4.0)


@pytest.mark.parametrize("apply", [product, stacked, tied, doubled])
def test_the_loop_takes_what_is_refused_record_by_record(apply):
    task = strange_task(apply)
    params = 10 * task.init(Key(1))
    client = Work(random_examples(9), Key(0))
    plan = LocalPlan(gradient=True, steps=1, epochs=None, batch=6, lr=1.0, momentum=0.0, clip=0.3)
    found = train_clients(task, params, [client], plan, "loop")
    rows = record_gradients(task, params, client.data.x[found.batches[0][0]], client.data.y[found.batches[0][0]])
    assert_near(found.updates[0], clipped_sum(rows, 0.3) / 6 + 0.01 * params.double())


def clients(shape, sizes=(20, 13, 3)):
    return [Work(random_examples(n, shape, seed=n), Key(0).child("client", n)) for n in sizes]


def by_hand(task, params, client, plan):
    """The update of one client, record by record, in float64."""
    n = len(client.data.y)
    nominal = min(plan.batch, n) or n
    local, velocity = params.double(), torch.zeros(len(params), dtype=torch.float64)
    for number, index in enumerate(plan_batches(n, plan, client.key)):
        keep = task.dropout_masks(client.key.child("dropout", number), len(index))
        rows = record_gradients(task, local, client.data.x[index], client.data.y[index], keep)
        gradient = clipped_sum(rows, plan.clip) / (nominal if plan.poisson or plan.noise_multiplier else len(index))
        gradient += task.model.l2 * local
        if plan.noise_multiplier:
            drawn = normal(client.key.child("noise", number), (len(params),))
            gradient += plan.noise_multiplier * plan.clip / nominal * drawn
        if plan.gradient:
            return gradient
        velocity = plan.momentum * velocity + gradient
        local = local - plan.lr * velocity
    return local - params.double()


ENGINES = [("mlp-small", "dense"), ("mlp-small", "loop"), ("mlp-small", "vmap")]
ENGINES += [
    (model, engine)
    for model in ("cnn2", "cnn-udp", "lenet5", "resnet20", "svm", "linear-regression")
    for engine in ("loop", "vmap")
]


def clipping_half(task, work, plan):
    """The plan with a clip that half of the first client's records are above."""
    params, data = task.init(Key(1)), work[0].data
    return dataclasses.replace(plan, clip=median_norm(task, params, data.x, data.y))


@pytest.mark.parametrize(("model", "engine"), ENGINES)
def test_every_engine_takes_the_step_of_a_loop_over_records(model, engine):
    task, work = small_task(model, shape_of(model)), clients(shape_of(model))  # the last client's batch is padded
    plan = clipping_half(task, work, dataclasses.replace(PLAN, gradient=True))
    params = task.init(Key(1))
    found = train_clients(task, params, work, plan, engine)
    for row, client in zip(found.updates, work, strict=True):
        # twenty layers in float32: the loop over records is itself 8e-6 from the one in float64
        assert_near(row, by_hand(task, params, client, plan), rtol=3e-5 if model == "resnet20" else 1e-5)


PLANS = {
    "permuted": {},
    "noised": {"noise_multiplier": 0.5},
    "poisson": {"poisson": True},
    "sparse": {"poisson": True, "batch": 1, "noise_multiplier": 0.5},  # with steps that take nothing
    "whole": {"poisson": True, "batch": 0},
    "unclipped": {"poisson": True, "clip": None},
}


@pytest.mark.parametrize(
    ("model", "engine", "plan"),
    [(model, engine, "permuted") for model, engine in ENGINES]
    + [("mlp-small", engine, plan) for engine in ("dense", "loop", "vmap") for plan in PLANS]
    + [
        (model, engine, plan)
        for model in ("cnn3", "svm")
        for engine in ("loop", "vmap")
        for plan in ("noised", "sparse")
    ],
)
def test_every_engine_trains_as_a_loop_over_records_does(model, engine, plan):
    # in float64, where no rounding takes a ReLU to its other side
    task, work = small_task(model, shape_of(model)), clients(shape_of(model))
    work = [Work(Examples(client.data.x.double(), client.data.y), client.key) for client in work]
    params = task.init(Key(1)).double()
    plan = dataclasses.replace(clipping_half(task, work, PLAN), **PLANS[plan])
    found = train_clients(task, params, work, plan, engine)
    for row, mine, client in zip(found.updates, found.batches, work, strict=True):
        assert plan.batch != 1 or min(map(len, mine)) == 0
        assert_near(row, by_hand(task, params, client, plan), rtol=1e-6)  # 1/b is a float32


def test_few_records_at_once_change_nothing(monkeypatch):
    task, work = small_task("cnn2", (1, 16, 16)), clients((1, 16, 16))
    params = task.init(Key(1))
    whole = train_clients(task, params, work, PLAN, "vmap").updates
    monkeypatch.setattr(batch, "_ENTRIES", 7 * len(params))  # three clients, two records
    torch.testing.assert_close(train_clients(task, params, work, PLAN, "vmap").updates, whole, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("engine", ["loop", "vmap"])
def test_the_penalty_is_neither_clipped_nor_averaged(engine):
    task = small_task("svm")
    params = task.init(Key(1))
    plan = dataclasses.replace(PLAN, gradient=True, clip=1e-12)
    found = train_clients(task, params, clients((1, 8, 8)), plan, engine).updates
    torch.testing.assert_close(found, (task.model.l2 * params).expand_as(found), rtol=1e-5, atol=2e-12)


@pytest.mark.parametrize("engine", ["loop", "dense", "vmap"])
def test_the_noise_of_a_step_has_the_standard_deviation_z_c_over_b(engine):
    # alpha 1e-6: 4.9 standard errors; of 25,818 coordinates they are 2.2 %, so that the twin, 6 % off, is seen
    task = small_task(shape=(1, 28, 28))
    params, work = task.init(Key(1)), clients((1, 28, 28), sizes=(20,))
    plan = dataclasses.replace(PLAN, gradient=True, clip=0.7)
    silent, noisy = (
        train_clients(task, params, work, dataclasses.replace(plan, noise_multiplier=z), engine).updates for z in (0, 3)
    )
    errors = ((noisy - silent).double().std() / torch.tensor([1.0, 1.06]) / (3 * 0.7 / 8) - 1) * (
        2 * len(params)
    ) ** 0.5
    assert abs(errors[0]) < 4.9 < abs(errors[1])


def test_two_steps_and_two_clients_have_noise_of_their_own():
    task = small_task()
    plan = dataclasses.replace(
        PLAN, steps=2, epochs=None, momentum=0.0, lr=1.0, clip=1e-9, noise_multiplier=1e9, batch=4
    )
    found = train_clients(task, task.init(Key(1)), clients((1, 8, 8)), plan, "loop").updates.double()
    drawn = [
        normal(client.key.child("noise", number), (task.layout.dim,))
        for client in clients((1, 8, 8))
        for number in (0, 1)
    ]
    assert torch.corrcoef(torch.stack(drawn)).fill_diagonal_(0).abs().max() < 4.9 / task.layout.dim**0.5
    sizes = torch.tensor([4, 4, 3])[:, None]
    torch.testing.assert_close(found, -torch.stack(drawn).view(3, 2, -1).sum(1).double() / sizes, rtol=1e-4, atol=1e-5)


def torch_mlp():
    """mlp-small on 8 x 8 pixels."""
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 10))


def torch_cnn2():
    """cnn2 on 16 x 16 pixels."""
    convolutions = [nn.Conv2d(1, 6, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 6, 5), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*convolutions, nn.Flatten(), nn.Linear(6, 50), nn.ReLU(), nn.Linear(50, 10))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("model", "make"), [("mlp-small", torch_mlp), ("cnn2", torch_cnn2)])
def test_norms_and_sum_are_those_of_opacus(model, make):
    from opacus import GradSampleModule

    task, b = small_task(model, shape_of(model)), 9
    params, (x, y) = task.init(Key(1)), random_examples(9, shape_of(model))
    net = make()
    for parameter, value in zip(net.parameters(), task.layout.split(params), strict=True):
        parameter.data.copy_(value)
    theirs = GradSampleModule(net, loss_reduction="sum")
    cross_entropy(theirs(x), y, reduction="sum").backward()
    rows = torch.cat([parameter.grad_sample.flatten(1) for parameter in theirs.parameters()], 1)
    norms = [flat_clipped(task, params, x[i : i + 1], y[i : i + 1], None, math.inf, 1.0).norm() for i in range(b)]
    torch.testing.assert_close(torch.stack(norms), rows.norm(dim=1), rtol=1e-5, atol=0)
    clip = float(rows.norm(dim=1).median())
    wanted = (rows * (clip / rows.norm(dim=1)).clamp(max=1)[:, None]).sum(0)
    assert_near(flat_clipped(task, params, x, y, None, clip, 1.0), wanted.double())
