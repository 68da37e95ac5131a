"""Images that the closed form finds exactly, and failures that it reports."""

import dataclasses
import math

import pytest
import torch
from torch.nn.functional import conv2d, relu

from leakgauge import Key, rng
from leakgauge.attacks._engine.closed_form import Evidence, Geometry, inverse
from leakgauge.attacks.analytic import Analytic
from leakgauge.defenses.gaussian import Gaussian
from leakgauge.harness.core.form import PICTURE
from leakgauge.harness.data import load
from leakgauge.harness.learn.models import build
from leakgauge.harness.learn.tasks import ModelTask
from tests import victims
from tests.by_rows import by_rows
from tests.doubles import function_task, small_task
from tests.victims import EXACT, KEY, Case, Says, assert_found, make


def lenet(shape, classes=10, initialization="dlg"):
    return ModelTask(build("lenet-dlg", shape, classes), initialization)


SMALL = lenet((1, 8, 8))


def photos(tmp_path, n):
    """n crops, spread over all eight photographs."""
    x = load("photos", tmp_path).train.x
    return x[:: len(x) // n][:n]


def sent(task, x, key=KEY):
    """A server's observation of one gradient per image, of the images x [n, c, h, w]."""
    labels = torch.from_numpy(rng.integers(key.child("labels"), len(x), task.classes))[:, None]
    seen = victims.sent(task, list(zip(x[:, None], labels, strict=True)), params=task.init(key.child("model")))
    return Case(seen, x[:, None], labels)


def assert_solved(case, mse=EXACT):
    """The closed form finds every image."""
    assert_found(case.batches, Analytic().run(case.seen, KEY).guesses, mse)


def run_on_lenet(x, key=KEY, classes=10):
    """The guesses of color images x behind the LeNet, all exact."""
    case = sent(lenet((3, 32, 32), classes), x, key)
    guesses = Analytic().run(case.seen, KEY).guesses
    assert_found(case.batches, guesses)
    assert (PICTURE.score(x, torch.cat([guess.x for guess in guesses]))["ssim"] >= 0.999).all()
    return guesses


@pytest.mark.parametrize(("kind", "classes"), [("photographs", 10), ("photographs", 100), ("random", 10)])
@pytest.mark.matrix
def test_color_images_behind_the_lenet_are_found_with_their_labels(tmp_path, kind, classes):
    x = photos(tmp_path, 2) if kind == "photographs" else rng.uniform(KEY.child("x"), (3, 3, 32, 32))
    guesses = run_on_lenet(x, classes=classes)
    assert all(guess.objective < 1e-7 and guess.evaluations == 1 for guess in guesses)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_eight_photographs_behind_each_of_four_models_are_all_found(tmp_path, seed):
    run_on_lenet(photos(tmp_path, 32)[seed::4], Key(seed))


@pytest.mark.parametrize("shape", [(1, 1, 1), (3, 3, 5), (1, 8, 8), (1, 16, 16), (1, 28, 28), (3, 31, 29)])
@pytest.mark.parametrize("initialization", ["dlg", "default"])
@pytest.mark.table(4)
def test_images_of_other_shapes_and_initializations_are_found(shape, initialization):
    assert_solved(make(lenet(shape, 10, initialization), n=2))


@pytest.mark.parametrize("name", ["linear", "mlp-small", "mlp"])
@pytest.mark.parametrize("shape", [(1, 8, 8), (3, 32, 32), (14,)])
def test_the_input_of_a_dense_stack_is_found_exactly(name, shape):
    assert_solved(make(ModelTask(build(name, shape, 10)), n=4), mse=1e-10)


@pytest.mark.parametrize("how", [{"sends": "update", "lr": 0.25}, {"defense": Gaussian(clip=0.01, noise_std=1e-12)}])
def test_an_update_of_one_step_and_a_common_factor_leak_what_the_gradient_leaks(how):
    assert_solved(make(SMALL, **how))


def test_noise_that_a_search_withstands_ruins_the_closed_form():
    # the closed form is for bare gradients; this shows that a test of exactness can fail
    case = make(lenet((3, 16, 16)), defense=Gaussian(clip=1e3, noise_std=1e-2))
    guesses = Analytic().run(case.seen, KEY).guesses
    assert all(guess.x.isfinite().all() for guess in guesses)
    assert (case.mse(guesses) > 1e-3).all()


def test_other_victims_and_keys_do_not_change_a_solution():
    case = make(SMALL, n=4)
    alone = dataclasses.replace(case.seen, messages=case.seen.messages[2:3])
    one, other = Analytic().run(case.seen, KEY).guesses[2], Analytic().run(alone, Key(1)).guesses[0]
    assert torch.equal(one.x, other.x)
    assert one[2:] == other[2:]


def test_granted_labels_are_not_used():
    case = make(SMALL)
    wrong = tuple((labels + 1) % 10 for labels in case.seen.labels)
    assert Analytic().needs == {"messages", "models"}
    assert not Analytic().aware
    assert_solved(dataclasses.replace(case, seen=dataclasses.replace(case.seen, labels=wrong)))


@pytest.mark.parametrize("task", [SMALL, small_task("mlp")], ids=["lenet-dlg", "mlp"])
def test_a_gradient_that_belongs_to_no_image_is_a_failure(task):
    for guess in Analytic().run(make(task, defense=Says(1.0)).seen, KEY).guesses:
        assert guess.failure.startswith("the last bias's gradient has no negative entry")
        assert not guess.x.any()
        assert guess.objective == math.inf


def test_a_gradient_of_the_wrong_structure_is_a_failure_or_finite():
    for guess in Analytic().run(make(SMALL, defense=Says(-1.0)).seen, KEY).guesses:
        assert guess.x.isfinite().all()


def test_a_batch_is_refused_and_a_single_image_beside_it_is_found():
    one, two = make(SMALL, n=1), make(SMALL, n=1, images=2)
    seen = dataclasses.replace(two.seen, messages=(two.seen.messages[0], one.seen.messages[0]))
    refused, found = Analytic().run(seen, KEY).guesses
    assert refused.failure == "expected one image per message, got 2; use map or idlg instead"
    assert refused.x.shape == (2, 1, 8, 8)
    assert_found(one.batches, [found])


@pytest.mark.parametrize("name", ["cnn2", "lenet5", "cnn-udp", "resnet20"])
def test_a_model_without_a_closed_form_is_a_failure_that_names_other_attacks(name):
    case = make(ModelTask(build(name, (1, 28, 28), 10)), n=1)
    (guess,) = Analytic().run(case.seen, KEY).guesses
    assert guess.failure.startswith("expected lenet-dlg or a dense first layer")
    assert "use map or idlg" in guess.failure


def test_the_same_tensors_with_other_activations_are_not_the_lenet():
    def apply(tensors, x, keep):
        for i, stride in enumerate((2, 2, 1)):
            x = relu(conv2d(x, tensors[2 * i], tensors[2 * i + 1], stride=stride, padding=2))
        return x.flatten(1) @ tensors[-2].T + tensors[-1]

    task = function_task(SMALL.layout, apply, SMALL.input_shape)
    (guess,) = Analytic().run(make(task, n=1).seen, KEY).guesses
    assert guess.failure.startswith("expected lenet-dlg or a dense first layer")


def test_a_dead_first_layer_is_a_failure():
    task = small_task("mlp")
    case = make(task)
    weights = task.layout.split(case.seen.model.params.clone())
    weights[1].fill_(-1e3)
    model = case.seen.model._replace(params=task.layout.join(weights))
    gradients = task.layout.split(torch.full((task.layout.dim,), 0.1))
    for tensor in gradients[:3]:
        tensor.zero_()
    gradients[3][4] = -0.9
    dead = task.layout.join(gradients)

    @dataclasses.dataclass(frozen=True, eq=False)
    class Dead(Says):
        def estimate(self, state, received, link):
            return dead

    guesses = Analytic().run(dataclasses.replace(case.seen, model=model, defense=Dead()), KEY).guesses
    assert all(guess.failure.startswith("the gradient of a dense layer's bias is zero") for guess in guesses)


def test_an_image_that_the_lenet_does_not_determine_is_a_failure():
    (guess,) = Analytic().run(make(lenet((1, 48, 48)), n=1).seen, KEY).guesses
    assert guess.failure == "a convolution's gradient gives fewer equations than its input has pixels"


@by_rows(Geometry((2, 9, 9), 2, 2), Geometry((2, 20, 23), 2, 2), Geometry((3, 8, 8), 1, 2))
def test_a_convolution_is_inverted_to_many_digits_in_double_precision(geometry):
    kernel = rng.uniform(KEY.child("kernel"), (12, geometry.shape[0], 5, 5), -0.5, 0.5, dtype=torch.float64)
    truth = rng.uniform(KEY.child("input"), geometry.shape, dtype=torch.float64)
    leaf = kernel.clone().requires_grad_()
    output = conv2d(truth[None], leaf, stride=geometry.stride, padding=geometry.padding)[0]
    slope = rng.normal(KEY.child("slope"), tuple(output.shape), dtype=torch.float64)
    (gradient,) = torch.autograd.grad((output * slope).sum(), leaf)
    trust = rng.uniform(KEY.child("trust"), tuple(output.shape), 0.1, 1.0, dtype=torch.float64)
    found = inverse(kernel, geometry, 1e-10).solve(Evidence(output.detach(), trust, slope, gradient))
    assert (found - truth).abs().max() < 1e-8
