import dataclasses
import math

import pytest
import torch
from torch.nn.functional import conv2d, relu

from leakgauge.attacks._solve.layerwise import Evidence, Geometry, inverse
from leakgauge.attacks.analytic import Analytic
from leakgauge.defenses.gaussian import Gaussian
from leakgauge.harness.core import rng
from leakgauge.harness.core.contract import (
    Link,
    Sender,
)
from leakgauge.harness.core.rng import Key
from leakgauge.harness.data import load
from leakgauge.harness.learn.models import Model, build
from leakgauge.harness.learn.tasks import ModelTask
from leakgauge.harness.study.score import image_scores
from tests.doubles import small_task
from tests.victims import Case, Says, make

KEY = Key(0)
EXACT = 1e-6
"""Raw MSE; gradients are float32."""


def lenet(shape, classes=10, initialization="dlg"):
    return ModelTask(build("lenet-dlg", shape, classes), initialization)


SMALL = lenet((1, 8, 8))


def photos(tmp_path, n):
    """Spread over all eight photographs."""
    x = load("photos", tmp_path).train.x
    return x[:: len(x) // n][:n]


def sent(task, x, key=KEY, defense=None):
    """What a server sees of one gradient an image, of the images x [n, c, h, w]."""
    case = make(task, n=len(x), defense=defense)
    setting = case.seen.setting
    labels = torch.from_numpy(rng.integers(key.child("labels"), len(x), task.classes))
    params = task.init(key.child("model"))
    messages = []
    for i, (image, label) in enumerate(zip(x, labels, strict=True)):
        leaf = params.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(task.loss(leaf, image[None], label[None]), leaf)
        wire, _ = case.seen.defense.encode(None, None, gradient, Link(setting, Sender(i, 8), key), key.child(i))
        messages.append(case.seen.messages[i]._replace(wire=wire))
    model = case.seen.model._replace(params=params)
    return Case(dataclasses.replace(case.seen, messages=tuple(messages), model=model), x[:, None], labels[:, None])


def assert_found(case, guesses, mse=EXACT):
    assert [guess.failure for guess in guesses] == [""] * len(guesses)
    assert (case.mse(guesses) < mse).all()
    assert torch.equal(torch.stack([guess.y for guess in guesses]), case.y)


@pytest.mark.parametrize(("kind", "classes"), [("photographs", 10), ("photographs", 100), ("random", 10)])
def test_color_images_behind_the_lenet_are_found_with_their_labels(tmp_path, kind, classes):
    x = photos(tmp_path, 8) if kind == "photographs" else rng.uniform(KEY.child("x"), (3, 3, 32, 32))
    case = sent(lenet((3, 32, 32), classes), x)
    guesses = Analytic().run(case.seen, KEY).guesses
    assert_found(case, guesses)
    assert (image_scores(x, torch.cat([guess.x for guess in guesses])).ssim >= 0.999).all()
    assert all(guess.objective < 1e-7 and guess.evaluations == 1 for guess in guesses)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_eight_photographs_behind_each_of_four_models_are_all_found(tmp_path, seed):
    x = photos(tmp_path, 32)[seed::4]
    case = sent(lenet((3, 32, 32)), x, Key(seed))
    guesses = Analytic().run(case.seen, KEY).guesses
    assert_found(case, guesses)
    assert (image_scores(x, torch.cat([guess.x for guess in guesses])).ssim >= 0.999).all()


@pytest.mark.parametrize("shape", [(1, 1, 1), (3, 3, 5), (1, 8, 8), (1, 16, 16), (1, 28, 28), (3, 31, 29)])
@pytest.mark.parametrize("initialization", ["dlg", "default"])
def test_other_shapes_and_the_usual_initialization_are_no_obstacle(shape, initialization):
    case = make(lenet(shape, 10, initialization), n=2)
    assert_found(case, Analytic().run(case.seen, KEY).guesses)


@pytest.mark.parametrize("name", ["linear", "mlp-small", "mlp"])
@pytest.mark.parametrize("shape", [(1, 8, 8), (3, 32, 32), (14,)])
def test_the_input_of_a_dense_stack_is_found_exactly(name, shape):
    case = make(ModelTask(build(name, shape, 10)), n=4)
    assert_found(case, Analytic().run(case.seen, KEY).guesses, mse=1e-10)


def test_an_update_of_one_step_leaks_what_its_gradient_leaks():
    case = make(SMALL, sends="update", lr=0.25)
    assert_found(case, Analytic().run(case.seen, KEY).guesses)


def test_a_common_factor_changes_nothing():
    case = make(SMALL, defense=Gaussian(clip=0.01, noise_std=1e-12))
    assert_found(case, Analytic().run(case.seen, KEY).guesses)


def test_noise_that_a_search_withstands_ruins_the_closed_form():
    # the table: the closed form is for bare gradients; a test of exactness must be able to fail
    case = make(lenet((3, 16, 16)), defense=Gaussian(clip=1e3, noise_std=1e-2))
    guesses = Analytic().run(case.seen, KEY).guesses
    assert all(guess.x.isfinite().all() for guess in guesses)
    assert (case.mse(guesses) > 1e-3).all()


def test_a_victim_is_solved_the_same_beside_others_and_under_another_key():
    case = make(SMALL, n=4)
    alone = dataclasses.replace(case.seen, messages=case.seen.messages[2:3])
    one, other = Analytic().run(case.seen, KEY).guesses[2], Analytic().run(alone, Key(1)).guesses[0]
    assert torch.equal(one.x, other.x)
    assert one[2:] == other[2:]


def test_labels_are_read_and_not_taken_from_what_was_granted():
    case = make(SMALL)
    wrong = tuple((labels + 1) % 10 for labels in case.seen.labels)
    assert Analytic().needs == {"messages", "models"}
    assert not Analytic().aware
    assert_found(case, Analytic().run(dataclasses.replace(case.seen, labels=wrong), KEY).guesses)


@pytest.mark.parametrize("task", [SMALL, small_task("mlp")], ids=["lenet-dlg", "mlp"])
@pytest.mark.parametrize(
    ("value", "failure"),
    [
        (0.0, "the gradient is zero"),
        (math.nan, "the gradient is not finite"),
        (-math.inf, "the gradient is not finite"),
        (1.0, "no entry of the last bias' gradient is negative"),
    ],
)
def test_a_gradient_of_no_image_is_a_failure(task, value, failure):
    for guess in Analytic().run(make(task, defense=Says(value)).seen, KEY).guesses:
        assert guess.failure.startswith(failure)
        assert not guess.x.any()
        assert guess.objective == math.inf


def test_a_gradient_of_the_wrong_structure_is_a_failure_or_finite():
    for guess in Analytic().run(make(SMALL, defense=Says(-1.0)).seen, KEY).guesses:
        assert guess.x.isfinite().all()


def test_a_batch_is_refused_beside_a_single_image_that_is_not():
    one, two = make(SMALL, n=1), make(SMALL, n=1, images=2)
    seen = dataclasses.replace(two.seen, messages=(two.seen.messages[0], one.seen.messages[0]))
    refused, found = Analytic().run(seen, KEY).guesses
    assert refused.failure == "the closed form takes one image a message, and this one has 2; map and idlg take more"
    assert refused.x.shape == (2, 1, 8, 8)
    assert_found(one, [found])


@pytest.mark.parametrize("name", ["cnn2", "lenet5", "cnn-udp", "resnet20"])
def test_a_model_without_a_closed_form_is_a_failure_that_names_who_can(name):
    case = make(ModelTask(build(name, (1, 28, 28), 10)), n=1)
    (guess,) = Analytic().run(case.seen, KEY).guesses
    assert guess.failure.startswith("the closed form does not cover this model")
    assert "map and idlg" in guess.failure


def test_a_lookalike_with_other_activations_is_not_taken_for_the_lenet():
    def apply(tensors, x, keep):
        for i, stride in enumerate((2, 2, 1)):
            x = relu(conv2d(x, tensors[2 * i], tensors[2 * i + 1], stride=stride, padding=2))
        return x.flatten(1) @ tensors[-2].T + tensors[-1]

    task = ModelTask(dataclasses.replace(SMALL.model, apply=apply), "dlg")
    assert isinstance(task.model, Model)
    (guess,) = Analytic().run(make(task, n=1).seen, KEY).guesses
    assert guess.failure.startswith("the closed form does not cover this model")


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
    assert all(guess.failure.startswith("no unit of a dense layer has a gradient") for guess in guesses)


def test_a_model_that_diverged_is_a_failure():
    case = make(SMALL)
    model = case.seen.model._replace(params=case.seen.model.params * math.nan)
    guesses = Analytic().run(dataclasses.replace(case.seen, model=model), KEY).guesses
    assert [guess.failure for guess in guesses] == ["the model is not finite"] * 3


def test_an_image_that_the_lenet_does_not_determine_is_a_failure():
    (guess,) = Analytic().run(make(lenet((1, 48, 48)), n=1).seen, KEY).guesses
    assert guess.failure == "a convolution has fewer equations than its input has pixels"


def test_another_loss_than_cross_entropy_is_refused():
    with pytest.raises(ValueError, match="expected a softmax cross-entropy loss"):
        Analytic().run(make(small_task("svm")).seen, KEY)


@pytest.mark.parametrize("ridge", [0.0, 1.0, -1e-9, math.nan])
def test_a_ridge_out_of_range_is_refused(ridge):
    with pytest.raises(ValueError, match="expected 0 < ridge < 1"):
        Analytic(ridge=ridge)


@pytest.mark.parametrize(
    "geometry", [Geometry((2, 9, 9), 2, 2), Geometry((2, 20, 23), 2, 2), Geometry((3, 8, 8), 1, 2)]
)
def test_a_convolution_is_undone_to_many_digits_in_double_precision(geometry):
    kernel = rng.uniform(KEY.child("kernel"), (12, geometry.shape[0], 5, 5), -0.5, 0.5, dtype=torch.float64)
    truth = rng.uniform(KEY.child("input"), geometry.shape, dtype=torch.float64)
    leaf = kernel.clone().requires_grad_()
    output = conv2d(truth[None], leaf, stride=geometry.stride, padding=geometry.padding)[0]
    slope = rng.normal(KEY.child("slope"), tuple(output.shape), dtype=torch.float64)
    (gradient,) = torch.autograd.grad((output * slope).sum(), leaf)
    trust = rng.uniform(KEY.child("trust"), tuple(output.shape), 0.1, 1.0, dtype=torch.float64)
    found = inverse(kernel, geometry, 1e-10).solve(Evidence(output.detach(), trust, slope, gradient))
    assert (found - truth).abs().max() < 1e-8
