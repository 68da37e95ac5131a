"""The compiled loops, against torch's operations in double precision."""

import shutil

import pytest
import torch

from leakgauge.attacks._engine.matching import SquaredDistance
from leakgauge.attacks._search import lbfgs
from leakgauge.harness.core import native, rng
from leakgauge.harness.core.rng import Key
from leakgauge.harness.learn import convolution
from leakgauge.harness.learn.convolution import _NativeConvStep
from leakgauge.harness.learn.gradients import kernel_of
from leakgauge.harness.learn.kernels import Kernel, Outer
from leakgauge.harness.learn.layers import Conv, Dense, Flatten, Sigmoid
from leakgauge.harness.learn.models import Model, build
from leakgauge.harness.learn.structure import Structure
from leakgauge.harness.learn.tasks import ModelTask
from tests.by_rows import by_rows
from tests.test_kernels import assert_close

KEY = Key(0, ("native",))

needs_loops = pytest.mark.skipif(native.library() is None, reason="no compiler at the installation")

# (kernel, stride, padding): rows of 1 to 27 columns, with and without remainders
WINDOWS = [(1, 1, 0), (1, 2, 0), (2, 1, 1), (2, 3, 0), (3, 1, 1), (3, 2, 1), (3, 4, 2), (4, 2, 3), (5, 1, 2), (5, 2, 2)]
SIDES = [(5, 5), (6, 8), (9, 16), (11, 27)]


def draw(name, *shape, dtype=torch.float64):
    return rng.normal(KEY.child(name), shape, torch.float64).to(dtype)


def between(window, sides, inputs=3, outputs=5, bias=True):
    """A network with this convolution as its second, so that all passes go through it."""
    conv = Conv("conv", inputs, outputs, *window, bias=bias)
    after = [(side + 2 * conv.padding - conv.kernel) // conv.stride + 1 for side in sides]
    head = Dense("fc", outputs * after[0] * after[1], 4)
    layers = (Conv("first", 2, inputs, 1), Sigmoid(), conv, Sigmoid(), Flatten(), head)
    return ModelTask(Model("chain", Structure(layers), (2, *sides), 4))


def passes(task, dtype, m=3, b=2, loops=True):
    """All gradients, and their slopes in inputs and labels, by the compiled loops or by torch."""
    params, x = draw("params", task.layout.dim, dtype=dtype), draw("x", m, b, *task.input_shape, dtype=dtype)
    y, v = draw("y", m, b, task.classes, dtype=dtype).softmax(2), draw("v", m, task.layout.dim, dtype=dtype)
    with pytest.MonkeyPatch.context() as patch:
        if not loops:
            patch.setattr(convolution, "library_for", lambda tensor: None)
        kernel = Kernel(task.structure, params)
    for scale in (0.5, 1.0):  # the second evaluation reuses the memory of the first
        gradients, trace = kernel.trace(scale * x, y)
        found = (gradients, *trace.pull(v))
        del trace
    return found


SHARE = {torch.float32: 2e-5, torch.float64: 1e-12}
both = pytest.mark.parametrize("dtype", list(SHARE))


@needs_loops
def test_an_installation_with_a_compiler_has_the_loops_and_uses_them():
    task = between((3, 1, 1), (9, 9))
    steps = Kernel(task.structure, task.init(KEY))._tape(torch.zeros(1, 1, 2, 9, 9)).steps
    assert [type(step) is _NativeConvStep for step in steps] == [True, False, True, False, False, False]
    assert isinstance(lbfgs._memory(torch.zeros(1, 3), 2), lbfgs._NativeMemory)
    assert native.library_for(torch.zeros(1, dtype=torch.bfloat16)) is None


@pytest.mark.skipif(shutil.which("cc") is None, reason="no compiler")
def test_a_compiler_was_found_at_the_installation():
    assert native.library() is not None, "install again: pip install -e ."


@needs_loops
@both
@pytest.mark.parametrize("sides", SIDES)
@pytest.mark.parametrize("window", WINDOWS)
def test_convolutions_are_those_of_torch(window, sides, dtype):
    task = between(window, sides)
    assert_close(passes(task, dtype), passes(task, torch.float64, loops=False), SHARE[dtype])


@needs_loops
@both
@pytest.mark.parametrize("channels", [(1, 1), (1, 6), (2, 3), (4, 4), (7, 9)])
@pytest.mark.parametrize("bias", [True, False])
def test_every_number_of_channels_is_covered(channels, bias, dtype):
    task = between((3, 2, 1), (9, 20), *channels, bias=bias)
    alone = {"m": 1, "b": 1}
    assert_close(passes(task, dtype, **alone), passes(task, torch.float64, **alone, loops=False), SHARE[dtype])


@needs_loops
def test_an_instance_has_the_same_numbers_in_every_batch():
    task = between((5, 2, 2), (9, 20))
    kernel = Kernel(task.structure, task.init(KEY))
    x, y = draw("x", 4, 1, 2, 9, 20).float(), draw("y", 4, 1, 4).float().softmax(2)
    alone = torch.cat([kernel.trace(x[i : i + 1], y[i : i + 1])[0] for i in range(4)])
    assert_close([kernel.trace(x, y)[0]], [alone], 1e-6)


@needs_loops
def test_the_loops_make_kernels_faster_for_several_images_behind_a_first_stride_of_one():
    tasks = [ModelTask(build(name, (1, 28, 28), 4)) for name in ("cnn2", "cnn3")]
    params = [task.init(KEY) for task in tasks]
    assert [kernel_of(t, p, 2) is None for t, p in zip(tasks, params, strict=True)] == [False, True]
    assert [kernel_of(t, p, 1) is None for t, p in zip(tasks, params, strict=True)] == [False, False]
    assert [kernel_of(t, p.bfloat16(), 2) is None for t, p in zip(tasks, params, strict=True)] == [True, True]


@both
@pytest.mark.parametrize("width", [1, 7, 32, 61, 1024, 5000])
def test_the_squared_distance_and_its_slope_are_those_of_torch(width, dtype):
    targets, gradients, instances = draw("targets", 4, width), draw("gradients", 3, width), torch.tensor([2, 0, 2])
    misfit = SquaredDistance(targets.to(dtype), scale=0.5)
    found = misfit.sloped(gradients.to(dtype, copy=True), instances)
    assert (found.value.dtype, found.factor) == (dtype, 1.0)
    misses = gradients - targets[instances]
    assert_close((found.slope, found.value), (misses, misses.square().sum(1) / 2), SHARE[dtype])
    mixed = SquaredDistance(targets.float()).sloped(gradients.clone(), instances)
    assert_close([mixed.slope], [gradients - targets.float()[instances]], 1e-12)


@both
@needs_loops
@pytest.mark.parametrize("before", [0, 1, 40])
@pytest.mark.parametrize(("outs", "ins"), [(1, 1), (3, 8), (10, 70), (2, 3000)])
def test_the_squared_distance_computes_an_outer_product_on_the_way(before, outs, ins, dtype):
    slopes, inputs = draw("slopes", 3, outs).to(dtype), draw("inputs", 3, ins).to(dtype)
    gradients, instances = draw("gradients", 3, before + outs * ins + outs).to(dtype), torch.tensor([2, 0, 2])
    misfit = SquaredDistance(draw("targets", 4, gradients.shape[1]).to(dtype))
    whole = gradients.clone()
    whole[:, before : before + outs * ins] = (slopes[:, :, None] * inputs[:, None]).flatten(1)
    expected = misfit.sloped(whole, instances)
    found = misfit.sloped(gradients, instances, Outer(before, slopes, inputs))
    assert_close((found.slope, found.value), (expected.slope, expected.value), SHARE[dtype])


@needs_loops
@by_rows(("lenet-dlg", 1, True), ("mlp-small", 1, True), ("cnn2", 2, False))
def test_a_trace_leaves_out_only_the_outer_product_of_the_last_layer(name, images, outer):
    task = ModelTask(build(name, (1, 16, 16), 4))
    kernel = kernel_of(task, task.init(KEY), images)
    x, y = draw("x", 2, images, 1, 16, 16).float(), draw("y", 2, images, 4).float().softmax(2)
    for _ in range(2):
        expected, whole = kernel.trace(x, y)
        found, part = kernel.trace(x, y, whole=False)
        assert whole.outer is None
        assert (part.outer is not None) == outer
        if outer:
            first, slopes, inputs = part.outer
            products = (slopes[:, :, None] * inputs[:, None]).flatten(1)
            found[:, first : first + products.shape[1]] = products
        assert torch.equal(found, expected)
        directions = draw("v", *expected.shape).float()
        assert torch.equal(part.pull(directions).x, whole.pull(directions).x)


@needs_loops
@pytest.mark.parametrize(("dtype", "close"), [(torch.float32, 1e-4), (torch.float64, 1e-12)])
@pytest.mark.parametrize("width", [1, 7, 32, 61, 300])
def test_directions_are_those_of_matrix_products_in_double_precision(width, dtype, close):
    n, size, turns = 3, 5, 14
    start = torch.zeros(n, width, dtype=dtype)
    compiled = lbfgs._NativeMemory.empty(native.library_for(start), start, size)
    exact = lbfgs._Memory.empty(torch.zeros(n, width, dtype=torch.float64), size)
    steps, gradients = draw("steps", turns, n, width).float(), draw("gradients", turns, n, width).float()
    changes = (steps.double() * (1 + draw("curvature", n, width).abs())).float()
    changes[3, 0] *= -1  # without positive curvature
    for number, (step, change, gradient) in enumerate(zip(steps, changes, gradients, strict=True)):
        accepted = torch.tensor([True, number % 3 > 0, number > 1])
        if number == 9:
            for memory in (compiled, exact):
                memory.forget(torch.tensor([False, True, False]))
        found = compiled.directions(accepted, *(one.to(dtype) for one in (step, change, gradient)))
        assert found.dtype == dtype
        expected = exact.directions(accepted, step.double(), change.double(), gradient.double())
        near = close * float(expected.nan_to_num().abs().max())
        assert torch.allclose(found.double(), expected, rtol=close, atol=near, equal_nan=True)
        assert torch.equal(compiled.count, exact.count)


@needs_loops
def test_directions_take_every_layout_and_keep_infinite_numbers_to_their_problem():
    steps = draw("step", 2, 9).float()
    turned, memory = steps.T.contiguous().T, lbfgs._NativeMemory.empty(native.library(), steps, 3)
    for accepted in (torch.tensor([[True, False], [True, False]])[:, 0], torch.tensor([False, True])):
        gradient = torch.where(accepted[:, None], turned, torch.inf)
        found = memory.directions(accepted, turned, turned, gradient)
    assert not turned.is_contiguous()
    assert not found[0].isfinite().any()
    assert torch.allclose(found[1], -steps[1], rtol=1e-2)


@needs_loops
def test_a_convolution_takes_every_layout():
    task = between((3, 2, 1), (9, 20))
    kernel = Kernel(task.structure, task.init(KEY))
    x, y = draw("x", 3, 2, 2, 9, 20).float(), draw("y", 3, 2, 4).float().softmax(2)
    turned = x.transpose(0, 4).contiguous().transpose(0, 4)
    assert not turned.is_contiguous()
    (found, _), (expected, trace) = kernel.trace(turned, y), kernel.trace(x, y)
    assert torch.equal(found, expected)
    ones = torch.ones(1, 1).expand(3, task.layout.dim)
    assert torch.equal(trace.pull(ones).x, trace.pull(ones.contiguous()).x)


@needs_loops
def test_a_library_of_another_version_is_not_used(monkeypatch):
    assert native.library() is not None
    monkeypatch.setattr(native, "VERSION", native.VERSION + 1)
    native.library.cache_clear()
    try:
        assert native.library() is None
    finally:
        native.library.cache_clear()
