"""Gradients by hand and their pullback, against autograd's double backward, one instance at a time."""

import dataclasses

import pytest
import torch
from torch.nn.functional import cross_entropy, one_hot

from leakgauge import Key, rng
from leakgauge.attacks._engine.matching import SquaredDistance, evaluator
from leakgauge.harness.learn import convolution
from leakgauge.harness.learn import gradients as learn
from leakgauge.harness.learn.gradients import gradients, kernel_of
from leakgauge.harness.learn.kernels import Kernel
from leakgauge.harness.learn.layers import (
    Block,
    Conv,
    Dense,
    Flatten,
    MaxPool,
    Mean,
    MeanPool,
    Norm,
    Relu,
    Sigmoid,
    SoftRelu,
    Tanh,
    Widen,
    dense_stack,
)
from leakgauge.harness.learn.models import Model, build
from leakgauge.harness.learn.structure import Structure
from leakgauge.harness.learn.tasks import ModelTask
from tests.by_rows import by_rows

KEY = Key(0)
COVERED = ["linear", "mlp-small", "mlp", "cnn2", "cnn3", "lenet-dlg", "lenet5", "cnn-udp"]
RESIDUAL = ["resnet20", "resnet20-bn"]
SHAPE, CLASSES = (1, 22, 25), 4  # one channel, neither square nor even: strides and pools leave columns over


@dataclasses.dataclass(frozen=True)
class Mapped(ModelTask):
    """A subclass, whose loss may be another: it goes through `vmap`."""


def named(name, shape=SHAPE, classes=CLASSES):
    return ModelTask(build(name, shape, classes), "dlg" if name == "lenet-dlg" else "default")


def chained(*layers, shape=SHAPE, classes=CLASSES, **how):
    return ModelTask(Model("chain", Structure(tuple(layers), **how), shape, classes))


def federation(task, m=3, b=2, dtype=torch.float64):
    """Parameters, inputs, label logits, and a direction for each gradient."""
    x = rng.normal(KEY.child("x"), (m, b, *task.input_shape), torch.float64)
    logits = rng.normal(KEY.child("logits"), (m, b, task.classes), torch.float64)
    v = rng.normal(KEY.child("v"), (m, task.layout.dim), torch.float64)
    return tuple(tensor.to(dtype) for tensor in (task.init(KEY), x, logits, v))


def by_hand(task, params, x, logits, v):
    """Gradients, and the slopes of <v, gradient> in inputs and logits."""
    logits = logits.clone().requires_grad_()
    y = logits.softmax(2)
    found, trace = Kernel(task.structure, params).trace(x, y)
    pulled = trace.pull(v)
    return found, pulled.x, *torch.autograd.grad(y, logits, pulled.y)


def by_autograd(task, params, x, logits, v):
    """The same by autograd."""
    rows = []
    for i in range(len(x)):
        leaf, dummy, label = (tensor.clone().requires_grad_() for tensor in (params, x[i], logits[i]))
        scores, term = task.in_training(leaf, dummy)
        loss = cross_entropy(scores, label.softmax(1)) + (0.0 if term is None else term)
        (gradient,) = torch.autograd.grad(loss, leaf, create_graph=True)
        rows.append((gradient.detach(), *torch.autograd.grad((gradient * v[i]).sum(), (dummy, label))))
    return tuple(torch.stack(column) for column in zip(*rows, strict=True))


def assert_both_agree(task, **how):
    scenery = federation(task, **how)
    assert_close(by_hand(task, *scenery), by_autograd(task, *scenery), 1e-10)


def assert_close(found, expected, share):
    for one, other in zip(found, expected, strict=True):
        assert one.shape == other.shape
        assert other.norm() > 1e-6  # not a comparison of zeros
        assert (one - other).norm() <= share * other.norm()


@pytest.mark.parametrize("b", [1, 3])
@pytest.mark.parametrize("name", [*COVERED, *RESIDUAL])
@pytest.mark.matrix
def test_every_model_of_known_layers_agrees_with_double_backward(name, b):
    assert_both_agree(named(name), b=b)


@pytest.mark.parametrize("name", [*COVERED, *RESIDUAL])
def test_single_precision_is_as_exact_as_that_of_autograd(name):
    task = named(name)
    exact, scenery = by_autograd(task, *federation(task)), federation(task, dtype=torch.float32)
    assert_close(by_hand(task, *scenery), exact, 1e-4)


def test_exactly_the_covered_models_have_known_layers():
    chains = [name for name in (*COVERED, "resnet20", "svm") if named(name).structure.plain]
    assert chains == COVERED


@pytest.mark.parametrize(("loops", "slower"), [(True, ["cnn3"]), (False, ["cnn2", "cnn3", "lenet5", "cnn-udp"])])
def test_a_kernel_is_used_where_it_is_faster(loops, slower, monkeypatch):
    monkeypatch.setattr(learn, "library_for", lambda params: object() if loops else None)
    chosen = [(name, b) for name in (*COVERED, "resnet20", "svm") for b in (1, 4) if is_by_hand(named(name), b)]
    assert chosen == [(name, b) for name in COVERED for b in (1, 4) if (name, b) not in [(n, 4) for n in slower]]
    task = named("lenet-dlg")
    assert not is_by_hand(Mapped(task.model), 1)
    assert not is_by_hand(dataclasses.replace(task, model=dataclasses.replace(task.model, l2=0.1)), 1)


def is_by_hand(task, images, **how):
    return kernel_of(task, task.init(KEY), images, **how) is not None


@pytest.mark.parametrize(("loops", "most"), [(True, (8, 8)), (False, (1, 4))])
def test_an_evaluation_goes_by_hand_through_residual_blocks_where_that_is_faster(loops, most, monkeypatch):
    monkeypatch.setattr(learn, "library_for", lambda params: object() if loops else None)
    chosen = [(name, b) for name in RESIDUAL for b in (1, 4, 5, 8, 9) if is_by_hand(named(name), b, blocks=True)]
    assert chosen == [(name, b) for name, m in zip(RESIDUAL, most, strict=True) for b in (1, 4, 5, 8, 9) if b <= m]
    assert not any(is_by_hand(named(name), 1) for name in RESIDUAL)


@pytest.mark.parametrize("name", RESIDUAL)
def test_an_evaluation_through_residual_blocks_is_that_of_autograd(name):
    task = named(name)
    params, x, logits, v = federation(task, b=1)
    functions = [
        evaluator(one, params, SquaredDistance(v), images=1, labels=logits.softmax(2))
        for one in (task, Mapped(task.model))
    ]
    assert [function.kernel is None for function in functions] == [False, True]
    assert_close(*(function(x.flatten(1), torch.arange(3)) for function in functions), 1e-10)


@by_rows((1, 1, 0), (2, 1, 1), (3, 2, 0), (3, 1, 2), (5, 3, 2), (4, 2, 3), (5, 3, 4), (2, 3, 1), (1, 2, 0))
def test_convolutions_of_any_kernel_stride_and_padding(kernel, stride, padding):
    sides = [(side + 2 * padding - kernel) // stride + 1 for side in (11, 13)]
    after = [(side + 2 * padding - kernel) // stride + 1 for side in sides]
    first = Conv("first", 2, 3, kernel, stride, padding)
    second = Conv("second", 3, 2, kernel, stride, padding)
    head = dense_stack((2 * after[0] * after[1], CLASSES))
    assert_both_agree(chained(first, Sigmoid(), second, SoftRelu(0.3), *head, shape=(2, 11, 13)))


@pytest.mark.parametrize("before", [(Sigmoid(),), (Relu(), SoftRelu(0.1)), (MaxPool(),)])
def test_slopes_pass_the_layers_before_the_first_weights(before):
    sides = (11, 12) if before == (MaxPool(),) else SHAPE[1:]
    head = dense_stack((3 * (sides[0] - 2) * (sides[1] - 2), CLASSES))
    assert_both_agree(chained(*before, Conv("conv", 1, 3, 3), Relu(), *head))


@pytest.mark.parametrize("groups", [0, 2, 4])
def test_residual_blocks_and_norms_in_any_order(groups):
    path = (Norm("norm1", 4, groups), Sigmoid(), Conv("conv1", 4, 6, 3, 2, 1), Norm("norm2", 6, groups // 2), Relu())
    second = (Conv("conv2", 6, 6, 3, padding=1, bias=False), SoftRelu(0.3))
    widened = Block(path, (Widen(2, 0, 2),))
    layers = (widened, Block(second), Norm("norm3", 6, groups // 2), MaxPool(), Mean(), Dense("fc", 6, CLASSES))
    assert_both_agree(chained(*layers, shape=(4, 10, 13)))


@pytest.mark.parametrize("shortcut", [(Widen(1, 1, 1),), (Conv("conv0", 4, 6, 1), Norm("norm0", 6, 0, 1e-3, 0.1, 0.5))])
def test_both_paths_of_a_residual_block_may_have_tensors_and_blocks_of_their_own(shortcut):
    inner = Block((Conv("conv2", 6, 6, 3, padding=1), Tanh()), (Sigmoid(),))
    path = (Conv("conv1", 4, 6, 3, padding=1), inner, Norm("norm1", 6, 3, 1e-2))
    layers = (Block(path, shortcut), Relu(), MeanPool(3, 2, 1), Mean(), Dense("fc", 6, CLASSES))
    assert_both_agree(chained(*layers, shape=(4, 10, 13)))


@pytest.mark.parametrize("pool", [MaxPool(3, 3), MaxPool(3, 2), MaxPool(3, 1, 1), MeanPool(2, 2), MeanPool(3, 1, 1)])
@pytest.mark.parametrize("bend", [Tanh(), Relu()])
def test_windows_of_any_size_and_stride(pool, bend):
    layers = (Conv("conv1", 1, 3, 3), bend, pool, Conv("conv2", 3, 2, 3), Mean(), Dense("fc", 2, CLASSES))
    assert_both_agree(chained(*layers))


def test_dense_layers_without_a_bias_and_tensors_in_another_order_than_their_layers():
    layers = (Flatten(), Dense("a", 20, 6, bias=False), Tanh(), Dense("b", 6, 5), Relu(), Dense("c", 5, CLASSES))
    for places in ((), (3, 1, 4, 0, 2)):
        task = chained(*layers, shape=(20,), places=places)
        assert_both_agree(task)
        params, x, logits, _ = federation(task)
        kernel, y = Kernel(task.structure, params), logits.softmax(2)
        found, trace = kernel.trace(x[:, :1], y[:, :1], whole=False)
        first, slopes, inputs = trace.outer
        entries = slice(first, first + slopes.shape[1] * inputs.shape[1])
        found[:, entries] = (slopes[:, :, None] * inputs[:, None]).flatten(1)
        assert torch.equal(found, kernel.trace(x[:, :1], y[:, :1])[0])
    assert task.layout.names == ("c.weight", "b.weight", "c.bias", "a.weight", "b.bias")


@pytest.mark.parametrize("loops", [True, False])
def test_a_norm_may_stand_directly_before_a_convolution(loops, monkeypatch):
    if not loops:
        monkeypatch.setattr(convolution, "library_for", lambda tensor: None)
    layers = (Conv("conv1", 1, 4, 3, padding=1), Norm("norm", 4, 2), Conv("conv2", 4, 5, 3), Mean())
    assert_both_agree(chained(*layers, Dense("fc", 5, CLASSES)))


def test_a_network_scores_by_running_statistics_and_trains_by_those_of_the_batch():
    task = named("resnet20-bn")
    params, x, _, _ = federation(task)
    alone, batch = (task.in_training(params, part).scores[0] for part in (x[0, :1], x[0]))
    assert not torch.allclose(alone, batch)
    assert torch.allclose(task.outputs(params, x[0, :1])[0], task.outputs(params, x[0])[0])


@pytest.mark.parametrize(("stride", "padding"), [(0, 0), (1, 3), (1, -1)])
def test_a_stride_or_padding_out_of_range_is_refused(stride, padding):
    with pytest.raises(ValueError, match="expected stride >= 1 and 0 <= padding < kernel, got Conv"):
        Conv("conv", 1, 1, 3, stride, padding)


@pytest.mark.parametrize("name", ["lenet-dlg", "linear"])
def test_the_pullback_is_the_derivative_by_finite_differences(name):
    task = named(name, (1, 2, 3), 3)
    params, x, logits, _ = federation(task)
    leaves = (x.requires_grad_(), logits.softmax(2).requires_grad_())
    assert torch.autograd.gradcheck(lambda x, y: gradients(task, params, x, y), leaves, fast_mode=True)


@pytest.mark.parametrize("name", ["cnn2", "lenet-dlg"])
def test_nan_stays_with_its_instance(name):
    task = named(name)
    params, x, logits, v = federation(task)
    clean = by_hand(task, params, x, logits, v)
    x[1, 0, 0, 3, 3] = torch.nan
    for one, other in zip(by_hand(task, params, x, logits, v), clean, strict=True):
        assert one[1].isnan().any()
        assert torch.equal(one[[0, 2]], other[[0, 2]])


def test_instances_and_images_may_change_from_call_to_call():
    task = named("lenet-dlg")
    params, x, logits, v = federation(task, m=4, b=3)
    y = logits.softmax(2)
    kernel = Kernel(task.structure, params)
    for m, b in ((4, 3), (2, 3), (4, 1), (4, 3)):
        fresh = Kernel(task.structure, params)
        found, expected = (one.trace(x[:m, :b], y[:m, :b]) for one in (kernel, fresh))
        assert torch.equal(found[0], expected[0])
        for one, other in zip(found[1].pull(v[:m]), expected[1].pull(v[:m]), strict=True):
            assert torch.equal(one, other)


@pytest.mark.parametrize("shape", [SHAPE, (1, 2, 3)])  # the second has windows as large as its maps
def test_a_trace_may_be_used_twice_and_is_not_overwritten_by_the_next(shape):
    task = named("lenet-dlg", shape)
    params, x, logits, v = federation(task)
    kernel = Kernel(task.structure, params)
    _, trace = kernel.trace(x, logits.softmax(2))
    first = trace.pull(v)
    trace.pull(2 * v)
    kernel.trace(x + 1, logits.softmax(2))[1].pull(v)
    for one, other in zip(first, trace.pull(v), strict=True):
        assert torch.equal(one, other)


def test_memory_is_used_again_once_its_trace_is_gone_but_gradients_are_kept():
    task = named("lenet-dlg")
    params, x, logits, _ = federation(task)
    kernel, y = Kernel(task.structure, params), logits.softmax(2)
    first, trace = kernel.trace(x, y)
    other, kept, used = kernel.trace(x, y)[1], first.clone(), trace._tape.steps
    assert other._tape.steps is not used
    del trace
    assert kernel.trace(x + 1, y)[1]._tape.steps is used
    assert torch.equal(first, kept)


def test_a_kernel_does_not_see_later_parameters():
    task = named("mlp-small")
    params, x, logits, _ = federation(task)
    kernel = Kernel(task.structure, params)
    before, _ = kernel.trace(x, logits.softmax(2))
    params.zero_()
    assert torch.equal(kernel.trace(x, logits.softmax(2))[0], before)


def test_inputs_that_changed_before_the_backward_pass_are_refused():
    task = named("mlp-small")
    params, x, logits, _ = federation(task)
    found = gradients(task, params, x.requires_grad_(), logits.softmax(2))
    with torch.no_grad():
        x.add_(1)
    with pytest.raises(RuntimeError, match="modified inplace"):
        found.sum().backward()


def test_many_instances_are_computed_in_parts():
    task = named("mlp-small")
    params, x, logits, v = federation(task, m=70, b=1)
    y, expected = logits.softmax(2), by_autograd(task, params, x, logits, v)
    found = gradients(task, params, x.requires_grad_(), y)
    assert_close((found, *torch.autograd.grad(found, x, v)), expected[:2], 1e-10)


def test_a_misfit_with_and_without_its_own_slope_agree():
    task = named("lenet-dlg")
    params, x, logits, v = federation(task)
    misfits = (SquaredDistance(v, 0.3), SquaredDistance(v, 0.3).__call__)
    functions = [evaluator(task, params, misfit, images=2, labels=logits.softmax(2)) for misfit in misfits]
    assert_close(*(function(x.flatten(1), torch.arange(3)) for function in functions), 1e-12)


def test_a_confident_correct_prediction_keeps_the_digits_of_its_curvature():
    task = named("linear")
    params, x, _, v = federation(task)
    params[-CLASSES:] = torch.tensor([0.0, 16.0, 0.0, 0.0])
    y = one_hot(torch.ones(x.shape[:2], dtype=torch.int64), CLASSES)
    found = []
    for dtype in (torch.float32, torch.float64):
        kernel = Kernel(task.structure, params.to(dtype))
        found.append(kernel.trace(x.to(dtype), y.to(dtype))[1].pull(v.to(dtype)).x)
    assert 1e-9 < found[1].abs().max() < 1e-3
    assert (found[0] - found[1]).norm() < 1e-5 * found[1].norm()


def test_a_trace_inside_autograd_is_freed_with_its_result(monkeypatch):
    freed = []
    monkeypatch.setattr(Kernel, "give_back", lambda kernel, tape: freed.append(tape))
    task = ModelTask(build("lenet-dlg", (1, 8, 8), 4), "dlg")
    x = rng.uniform(KEY.child("freed"), (2, 1, 1, 8, 8)).requires_grad_()
    y = torch.full((2, 1, 4), 0.25)
    found = gradients(task, task.init(KEY), x, y)
    (slope,) = torch.autograd.grad(found.square().sum(), x)
    assert slope.abs().sum() > 0
    del found
    assert len(freed) == 1
