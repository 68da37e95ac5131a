"""Clipped per-record gradients against a loop over records in float64, and against opacus."""

import copy
import gc
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.functional import conv2d, cross_entropy, linear, relu_
from torch.nn.utils import vector_to_parameters

from leakgauge.harness.core.rng import Key, normal
from leakgauge.harness.learn import clipping, convolution
from leakgauge.harness.learn.batch import LocalPlan, Work, train_clients
from leakgauge.harness.learn.clipping import UnknownUse, clipped_gradient
from leakgauge.harness.learn.models import build, names
from leakgauge.harness.learn.tasks import ModelTask
from tests.by_rows import by_rows
from tests.clipping_case import assert_near, clipped_sum, median_norm, record_gradients, shape_of
from tests.doubles import function_task, random_examples, small_task
from tests.torch_models import TWINS


def flat_clipped(task, params, x, y, keep, clip, divisor):
    return task.layout.join(clipped_gradient(task, task.layout.split(params), x, y, keep, clip, divisor))


def assert_is_the_naive_sum(task, b=7, soft=False):
    """The clip is the median norm."""
    params = task.init(Key(1))
    x, y = random_examples(b, task.input_shape)
    if soft:
        y = normal(Key(5), (b, task.classes)).softmax(1)
    keep = task.dropout_masks(Key(2), b)
    clip = median_norm(task, params, x, y, keep)
    found = flat_clipped(task, params, x, y, keep, clip, 11.0)
    assert_near(found, clipped_sum(record_gradients(task, params, x, y, keep), clip) / 11)


DEEPEST = pytest.param("resnet110", False, 3, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("model", "soft", "b"),
    [(name, False, 7) for name, _ in names() if name not in ("resnet110", "resnet20-bn")]
    + [(name, True, 7) for name in ("mlp-small", "cnn2", "svm")]
    + [DEEPEST],
)
def test_the_sum_is_that_of_a_loop_over_records(model, soft, b):
    assert_is_the_naive_sum(small_task(model, shape_of(model)), b, soft)


def test_a_recorded_dense_stack_has_the_same_sum():
    assert_is_the_naive_sum(function_task(small_task().layout, small_task().model.apply))


@pytest.mark.parametrize("model", ["cnn2", "lenet-dlg", "cnn-udp", "resnet20"])  # stride, padding, kernel without bias
@by_rows({"_CACHE": 1}, {"_KEPT": 0}, {"_GRAM": 0}, {"_CACHE": 3000, "_KEPT": 0}, ids=lambda sizes: "-".join(sizes))
def test_a_kernel_has_the_same_sum_by_every_method(sizes, model, monkeypatch):
    for name, value in sizes.items():
        monkeypatch.setattr(clipping, name, value)
    assert_is_the_naive_sum(small_task(model, shape_of(model)))


@pytest.mark.parametrize("model", ["cnn2", "cnn-udp"])
@by_rows({"_CACHED": 1}, {"library_for": lambda like: None}, ids=lambda changed: "-".join(changed))
def test_compiled_loops_in_pieces_and_products_of_patches_give_the_same_sum(changed, model, monkeypatch):
    for name, value in changed.items():
        monkeypatch.setattr(convolution, name, value)
    assert_is_the_naive_sum(small_task(model, shape_of(model)))


def test_no_layer_stays_in_memory_until_a_collection_of_garbage():
    task = ModelTask(build("cnn-udp", (3, 8, 8), 10))
    (x, y), tensors = random_examples(4, (3, 8, 8)), task.layout.split(task.init(Key(0)))
    gc.collect()
    gc.disable()
    try:
        clipped_gradient(task, tensors, x, y, None, 1.0, 4.0)
        left = [one for one in gc.get_objects() if isinstance(one, clipping._Layer)]
    finally:
        gc.enable()
    assert not left


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


def test_a_norm_whose_square_overflows_float32_is_clipped():
    # ||g|| = 2 y ||x|| = 4e25
    task, params, x, y = regression(0.0, torch.full((2, 4), 1e15), torch.full((2,), 1e10))
    assert flat_clipped(task, params, x, y, None, 1.0, 1.0).tolist() == pytest.approx([-1.0] * 4, rel=1e-6)


@pytest.mark.parametrize("model", ["mlp-small", "cnn2", "resnet20"])
def test_a_nan_in_a_record_is_a_nan_in_the_sum_no_record_is_zero_and_the_parameters_stay(model):
    task = small_task(model, shape_of(model))
    x, y = random_examples(4, shape_of(model))
    x[2] = math.nan
    params = task.init(Key(1))
    tensors = task.layout.split(params.clone())
    assert task.layout.join(clipped_gradient(task, tensors, x, y, None, 1.0, 4.0)).isnan().all()
    assert not task.layout.join(clipped_gradient(task, tensors, x[:0], y[:0], None, 1.0, 4.0)).any()
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
    return relu_(linear(x.flatten(1).clone().requires_grad_(), tensors[0]))


def unused(tensors, x, keep):
    return x.flatten(1)[:, :10]


def doubled(tensors, x, keep):
    """A value that is computed from a parameter."""
    return linear(x.flatten(1), 2 * tensors[0])


def dilated_kernel(tensors, x, keep):
    return conv2d(x, tensors[0], dilation=2).flatten(1)[:, :10]


def depthwise(tensors, x, keep):
    return conv2d(x.expand(-1, 2, -1, -1), tensors[0], groups=2).flatten(1)[:, :10]


def same(tensors, x, keep):
    return conv2d(x, tensors[0], padding="same").flatten(1)[:, :10]


def by_position(tensors, x, keep):
    """A dense layer along one axis of many."""
    return linear(x, tensors[0]).mean((1, 2))


def rows_of_pixels_as_records(tensors, x, keep):
    """A dense layer whose first axis is longer than the batch."""
    return linear(x.view(-1, 8), tensors[0]).view(len(x), 8, 10).mean(1)


def strange_task(apply, shape=(10, 64)):
    return function_task(shape, apply, l2=0.01)


@pytest.mark.parametrize(
    ("apply", "shape"),
    [(apply, (10, 64)) for apply in (product, stacked, unbound, tied, overwritten, unused, doubled)]
    + [(apply, (2, 1, 3, 3)) for apply in (dilated_kernel, depthwise, same)]
    + [(apply, (10, 8)) for apply in (by_position, rows_of_pixels_as_records)],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_parameter_in_an_unknown_place_is_refused(apply, shape):
    task = strange_task(apply, shape)
    x, y = random_examples(4)
    with pytest.raises(UnknownUse):
        clipped_gradient(task, task.layout.split(task.init(Key(1))), x, y, None, 1.0, 4.0)


@pytest.mark.parametrize("apply", [product, stacked, tied, doubled])
def test_the_loop_engine_materializes_the_gradients_of_an_unknown_use(apply):
    task = strange_task(apply)
    params = 10 * task.init(Key(1))
    client = Work(random_examples(9), Key(0))
    plan = LocalPlan(gradient=True, steps=1, epochs=None, batch=6, lr=1.0, momentum=0.0, clip=0.3)
    found = train_clients(task, params, [client], plan, "loop")
    rows = record_gradients(task, params, client.data.x[found.batches[0][0]], client.data.y[found.batches[0][0]])
    assert_near(found.updates[0], clipped_sum(rows, 0.3) / 6 + 0.01 * params.double())


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("model", ["mlp-small", "cnn2"])
def test_norms_and_sum_are_those_of_opacus(model):
    from opacus import GradSampleModule

    task, b = small_task(model, (3, 32, 32)), 9
    params, (x, y) = task.init(Key(1)), random_examples(b, (3, 32, 32))
    net = copy.deepcopy(nn.Sequential(*TWINS[model])).float()
    vector_to_parameters(params, net.parameters())
    theirs = GradSampleModule(net, loss_reduction="sum")
    cross_entropy(theirs(x), y, reduction="sum").backward()
    rows = torch.cat([parameter.grad_sample.flatten(1) for parameter in theirs.parameters()], 1)
    norms = [flat_clipped(task, params, x[i : i + 1], y[i : i + 1], None, math.inf, 1.0).norm() for i in range(b)]
    torch.testing.assert_close(torch.stack(norms), rows.norm(dim=1), rtol=1e-5, atol=0)
    clip = float(rows.norm(dim=1).median())
    wanted = (rows * (clip / rows.norm(dim=1)).clamp(max=1)[:, None]).sum(0)
    assert_near(flat_clipped(task, params, x, y, None, clip, 1.0), wanted.double())
