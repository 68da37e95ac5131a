"""Batches that `spear` finds exactly, and failures that it reports."""

import dataclasses
import math
from pathlib import Path

import pytest
import torch
from torch.nn.functional import linear

from leakgauge import Key, rng
from leakgauge.attacks._engine.closed_form import Unsolvable
from leakgauge.attacks._engine.objective import received_gradients
from leakgauge.attacks.spear import Spear
from leakgauge.attacks.spear import _find as find
from leakgauge.attacks.spear import _FirstLayer as FirstLayer
from leakgauge.defenses.gaussian import Gaussian
from leakgauge.harness.data import load
from leakgauge.harness.learn.layers import dense_stack
from leakgauge.harness.learn.models import Model, build
from leakgauge.harness.learn.structure import Structure
from leakgauge.harness.learn.tasks import ModelTask
from leakgauge.harness.study.score import match
from tests.doubles import function_task
from tests.victims import EXACT, KEY, Says, assert_found, errors, make, sent


def dense(*widths):
    """A task of dense ReLU layers on vectors."""
    return ModelTask(Model("stack", Structure(tuple(dense_stack(widths))), widths[:1], widths[-1]))


SMALL = dense(16, 64, 5)


def shifted(by):
    """The parameters of SMALL with its first bias shifted."""
    tensors = SMALL.layout.split(SMALL.init(KEY.child("model")))
    tensors[1] = tensors[1] + by
    return SMALL.layout.join(tensors)


def batches(task, n, images):
    """n batches of random inputs and labels."""
    x = rng.uniform(KEY.child("x", images), (n, images, *task.input_shape))
    y = torch.from_numpy(rng.integers(KEY.child("y", images), n * images, task.classes)).reshape(n, images)
    return list(zip(x, y, strict=True))


@pytest.mark.parametrize("images", [1, 2, 3, 4])
def test_a_small_batch_is_found_exactly_with_each_image_s_label(images):
    truth = batches(SMALL, 4, images)
    guesses = Spear().run(sent(SMALL, truth), KEY).guesses
    assert_found(truth, guesses)
    assert all(guess.objective < 1e-8 for guess in guesses)
    assert all(guess.x.dtype == torch.float32 for guess in guesses)


def test_a_deeper_stack_needs_only_the_zeros_of_its_first_layer():
    task = dense(16, 64, 24, 5)
    truth = batches(task, 3, 3)
    assert_found(truth, Spear().run(sent(task, truth), KEY).guesses)


def test_images_keep_their_shape_and_are_found_beside_batches_of_other_sizes():
    task = ModelTask(build("mlp", (1, 8, 8), 10))
    truth = batches(task, 1, 2) + batches(task, 1, 4)
    guesses = Spear().run(sent(task, truth), KEY).guesses
    assert [tuple(guess.x.shape) for guess in guesses] == [(2, 1, 8, 8), (4, 1, 8, 8)]
    assert_found(truth, guesses)


def test_images_of_one_label_are_separated():
    x = rng.uniform(KEY.child("x"), (3, 16))
    truth = [(x, torch.tensor([2, 2, 2]))]
    assert_found(truth, Spear().run(sent(SMALL, truth), KEY).guesses)


@pytest.mark.parametrize("how", [{"steps": 1, "lr": 0.25}, {"defense": Gaussian(clip=0.01, noise_std=1e-12)}])
def test_an_update_of_one_step_and_a_common_factor_leak_what_the_gradient_leaks(how):
    truth = batches(SMALL, 3, 3)
    assert_found(truth, Spear().run(sent(SMALL, truth, **how), KEY).guesses)


def test_an_update_of_several_small_steps_on_one_batch_still_reveals_it():
    # the update is sum_t D_t^T X: of the same rank, and zero at units that are inactive in every step
    task = ModelTask(build("mlp", (1, 8, 8), 10))
    truth = batches(task, 2, 2)
    guesses = Spear(samples=2000).run(sent(task, truth, steps=5, lr=0.1), KEY).guesses
    assert_found(truth, guesses)
    assert all(guess.objective > 1e-6 for guess in guesses)  # the gradient at the round's model differs


@pytest.mark.parametrize("noise", [1e-5, 1e-4, 1e-3, 1e-2, 1.0])
def test_noise_is_a_failure_or_shows_in_the_objective_and_is_never_nan(noise):
    truth = batches(SMALL, 4, 3)
    guesses = Spear(samples=2000).run(sent(SMALL, truth, Gaussian(clip=1e3, noise_std=noise)), KEY).guesses
    for batch, guess in zip(truth, guesses, strict=True):
        assert guess.x.isfinite().all()
        assert not math.isnan(guess.objective)
        if guess.failure:
            assert "map" in guess.failure or "inactive" in guess.failure
            assert not guess.x.any()
        elif errors(batch, guess)[0].max() > 1e-3:
            assert guess.objective > 1e-6
    if noise >= 1e-2:
        assert all("too much noise; use map instead" in guess.failure for guess in guesses)


def test_little_noise_blurs_the_images_only_a_little():
    # the exact tests can fail: the same batches with noise are not exact, but closer than chance (0.17)
    task = ModelTask(build("mlp", (1, 8, 8), 10))
    truth = batches(task, 3, 2)
    guesses = Spear(samples=2000).run(sent(task, truth, Gaussian(clip=1e3, noise_std=1e-5)), KEY).guesses
    for batch, guess in zip(truth, guesses, strict=True):
        worst = errors(batch, guess)[0]
        assert ((worst > 1e-12) & (worst < 1e-2)).all()


def test_a_key_fixes_the_guess_and_other_victims_change_nothing():
    seen = sent(SMALL, batches(SMALL, 3, 3))
    first, second = (Spear().run(seen, KEY).guesses for _ in range(2))
    alone = Spear().run(dataclasses.replace(seen, messages=seen.messages[1:2]), KEY).guesses
    for one, other in zip([*first, first[1]], [*second, *alone], strict=True):
        assert torch.equal(one.x, other.x)
        assert torch.equal(one.y, other.y)
        assert one[2:] == other[2:]


def test_granted_labels_are_not_used():
    assert Spear().needs == {"messages", "models"}
    assert not Spear().aware
    truth = batches(SMALL, 1, 3)
    wrong = dataclasses.replace(sent(SMALL, truth), labels=((truth[0][1] + 1) % 5,))
    assert_found(truth, Spear().run(wrong, KEY).guesses)


def test_a_gradient_that_belongs_to_no_batch_is_a_failure():
    seen = dataclasses.replace(sent(SMALL, batches(SMALL, 2, 3)), defense=Says(1.0))
    for guess in Spear().run(seen, KEY).guesses:
        assert guess.failure.startswith("expected 3 directions of the gradient above its noise, got 1: two images")
        assert guess.x.shape == (3, 16)
        assert not guess.x.any()
        assert guess.objective == math.inf


@pytest.mark.parametrize("label", [1, 2])
def test_an_image_that_is_twice_in_the_batch_is_a_failure_with_equal_or_different_labels(label):
    x = rng.uniform(KEY.child("x"), (3, 16))
    truth = [(x[[0, 1, 1]], torch.tensor([0, 1, label]))]
    (guess,) = Spear().run(sent(SMALL, truth), KEY).guesses
    assert guess.failure.startswith("expected 3 directions of the gradient above its noise, got 2: two images")


def test_an_image_without_an_active_unit_is_a_failure():
    x = rng.uniform(KEY.child("x"), (3, 16))
    tensors = SMALL.layout.split(SMALL.init(KEY.child("model")))
    x[2] = 0.0
    tensors[1] = -tensors[1].abs()
    params = SMALL.layout.join(tensors)
    assert not (linear(x[2], *tensors[:2]) > 0).any()
    (guess,) = Spear().run(sent(SMALL, [(x, torch.tensor([0, 1, 2]))], params=params), KEY).guesses
    assert guess.failure.endswith("two images are alike, or one has no gradient")


def test_a_first_layer_without_a_gradient_is_a_failure():
    (guess,) = Spear().run(sent(SMALL, batches(SMALL, 1, 2), params=shifted(-1e3)), KEY).guesses
    assert guess.failure.startswith("expected 2 directions of the gradient above its noise, got 0")


def test_a_batch_that_activates_every_unit_is_a_failure():
    seen = sent(SMALL, batches(SMALL, 1, 3), params=shifted(3.0))
    guesses = [Spear(samples=2000).run(seen, KEY.child(number)).guesses[0] for number in range(12)]
    failures = [guess.failure for guess in guesses if guess.failure]
    assert len(failures) >= 2
    assert all("too few units of the first layer are inactive" in failure for failure in failures)
    # which wrong batch is found depends on the draws; some explain the direction of the gradient, but not its length
    whole = float(received_gradients(seen).square().sum())
    assert all(guess.objective > 1e-5 * whole for guess in guesses)


def test_a_wrong_batch_without_a_contradiction_shows_in_the_objective():
    # a confident model errs alike on two images: their slopes are nearly equal, and the difference vanishes in noise
    truth = batches(SMALL, 1, 3)
    (guess,) = Spear(samples=2000).run(sent(SMALL, truth, params=shifted(10.0)), KEY).guesses
    assert guess.failure or guess.objective > 0.1
    assert guess.failure or errors(truth[0], guess)[0].max() > 1e-3


@pytest.mark.parametrize(("task", "images"), [(dense(16, 6, 5), 7), (dense(4, 64, 5), 5)])
def test_more_images_than_units_or_inputs_are_a_failure(task, images):
    (guess,) = Spear().run(sent(task, batches(task, 1, images)), KEY).guesses
    units = task.layout.shapes[1][0]
    assert guess.failure == (
        f"expected at least {images} units and {images} inputs of the first layer for {images} images, got {units} "
        f"units and {task.layout.shapes[0][1]} inputs; use map instead"
    )


@pytest.mark.parametrize("name", ["lenet-dlg", "cnn2", "resnet20"])
def test_a_model_other_than_a_dense_stack_is_a_failure_that_names_another_attack(name):
    (guess,) = Spear().run(make(ModelTask(build(name, (1, 28, 28), 10)), n=1, images=2).seen, KEY).guesses
    assert guess.failure == "expected a model of dense layers with ReLU, got another model; use map instead"
    assert guess.x.shape == (2, 1, 28, 28)


def test_a_dense_stack_without_a_hidden_layer_is_a_failure_that_names_other_attacks():
    (guess,) = Spear().run(sent(dense(16, 5), batches(dense(16, 5), 1, 2)), KEY).guesses
    assert guess.failure.startswith("expected a model with a hidden layer, got none")
    assert "map" in guess.failure
    assert "analytic" in guess.failure


def test_the_same_tensors_with_other_activations_are_not_a_relu_stack():
    def apply(tensors, x, keep):
        return linear(torch.tanh(linear(x, *tensors[:2])), *tensors[2:])

    task = function_task(SMALL.layout, apply, SMALL.input_shape, SMALL.classes)
    (guess,) = Spear().run(sent(task, batches(task, 1, 2)), KEY).guesses
    assert guess.failure.startswith("expected a model of dense layers with ReLU")


@pytest.mark.parametrize("samples", [1, 100])
def test_the_budget_ends_the_search(samples):  # the first round alone would draw 4096
    task = dense(16, 24, 5)
    (guess,) = Spear(samples=samples).run(sent(task, batches(task, 1, 6)), KEY).guesses
    assert guess.failure == "" or "too few units of the first layer are inactive" in guess.failure
    assert guess.evaluations <= samples


def first_layer(x, slopes, key):
    """A layer whose inputs x [b, n] have `slopes` [b, m] at the units that they activate."""
    weight = rng.normal(key.child("weight"), (slopes.shape[1], x.shape[1]), dtype=torch.float64)
    bias = rng.normal(key.child("bias"), (slopes.shape[1],), dtype=torch.float64)
    d = slopes * (linear(x, weight, bias) > 0)
    return FirstLayer(weight, bias, d.T @ x, d.sum(0))


@pytest.mark.parametrize("images", [1, 2, 5, 8])
def test_in_double_precision_the_batch_is_found_without_a_contradiction(images):
    x = rng.normal(KEY.child("x"), (images, 32), dtype=torch.float64)
    slopes = rng.normal(KEY.child("slopes"), (images, 128), dtype=torch.float64)
    found = find(first_layer(x, slopes, KEY), images, 20_000, KEY)
    assert found.contradictions == 0
    assert (found.x[match(x, found.x)] - x).abs().max() < 1e-8


def test_one_image_more_than_stated_is_refused():
    x = rng.normal(KEY.child("x"), (4, 32), dtype=torch.float64)
    slopes = rng.normal(KEY.child("slopes"), (4, 128), dtype=torch.float64)
    with pytest.raises(Unsolvable, match="too much noise"):
        find(first_layer(x, slopes, KEY), 3, 1000, KEY)


@pytest.mark.slow
@pytest.mark.parametrize(("images", "least"), [(6, 4), (8, 3), (10, 2)])
def test_larger_batches_of_digits_are_found_behind_a_fresh_model(images, least):
    data, task = load("digits", Path()).train, ModelTask(build("mlp", (1, 8, 8), 10))
    found = 0
    for seed in range(5):
        rows = torch.from_numpy(rng.subset(Key(seed).child("rows", images), len(data.y), images))
        batch = (data.x[rows], data.y[rows])
        seen = sent(task, [batch], params=task.init(Key(seed)))
        (guess,) = Spear().run(seen, Key(seed)).guesses
        found += guess.failure == "" and bool((errors(batch, guess)[0] < EXACT).all())
    assert found >= least
