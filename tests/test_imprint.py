"""Batches that an imprint sorts into bins, and models, messages and noise that it does not read."""

import dataclasses

import pytest
import torch

from leakgauge.attacks.imprint import Imprint
from leakgauge.defenses.gaussian import Gaussian
from leakgauge.harness.core.contract import Examples
from leakgauge.harness.core.rng import Key, permutation
from leakgauge.harness.data import load
from leakgauge.harness.learn.models import build
from leakgauge.harness.learn.tasks import ModelTask
from tests.by_rows import by_rows
from tests.doubles import random_examples, small_task
from tests.victims import KEY, Says, assert_found, errors, make, sent

MLP, SMALL = small_task("mlp"), small_task("mlp-small")


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    """Digits in random order: auxiliary ones, and victims'."""
    data = load("digits", tmp_path_factory.mktemp("data")).train
    order = torch.from_numpy(permutation(KEY.child("digits"), len(data.y)))
    x, y = data.x[order], data.y[order]
    return Examples(x[:800], y[:800]), Examples(x[800:], y[800:])


def cut(data, *sizes):
    total = sum(sizes)
    return list(zip(data.x[:total].split(sizes), data.y[:total].split(sizes), strict=True))


def imprinted(task, batches, auxiliary, attack=None, **how):
    """The server's observation of batches at the attack's parameters."""
    seen = dataclasses.replace(sent(task, batches[:1]), messages=None, auxiliary=auxiliary)
    params = (attack or Imprint()).broadcast(seen, KEY)
    return dataclasses.replace(sent(task, batches, params=params, **how), auxiliary=auxiliary)


def assert_failed(guesses, says):
    """Zeros with a reason."""
    for guess in guesses:
        assert says in guess.failure
        assert guess.objective == torch.inf
        assert not guess.x.any()


def test_batches_of_digits_are_found_with_their_labels(digits):
    batches = cut(digits[1], 1, 2, 8, 32, 64)
    guesses = Imprint().run(imprinted(MLP, batches, digits[0]), KEY).guesses
    assert_found(batches, guesses, 1e-8)
    assert all(guess.objective < 1e-9 for guess in guesses)


@by_rows((SMALL, (4, 8), 1e-8), (MLP, (100, 128), 1e-6))
def test_a_small_batch_behind_few_units_and_records_that_share_bins_are_found(task, sizes, mse, digits):
    batches = cut(digits[1], *sizes)
    assert_found(batches, Imprint().run(imprinted(task, batches, digits[0]), KEY).guesses, mse)


@pytest.mark.parametrize(("classes", "shape"), [(2, (14,)), (3, (5,)), (100, (3, 8, 8))])
def test_other_numbers_of_classes_and_inputs_are_found(classes, shape):
    batches = cut(random_examples(20, shape, classes), 20)
    seen = imprinted(small_task("mlp", shape, classes), batches, random_examples(500, shape, classes, seed=1))
    assert_found(batches, Imprint().run(seen, KEY).guesses, 1e-8)


def test_units_that_no_group_takes_stay_off(digits):
    attack, batches = Imprint(groups=7), cut(digits[1], 32)
    assert_found(batches, attack.run(imprinted(MLP, batches, digits[0], attack), KEY).guesses, 1e-8)


@pytest.mark.parametrize("how", [{"defense": Gaussian(clip=0.01, noise_std=1e-12)}, {"steps": 1, "lr": 0.25}])
def test_a_clip_of_the_message_and_an_update_of_one_step_change_nothing(digits, how):
    batches = cut(digits[1], 1, 16, 20, 32)
    assert_found(batches, Imprint().run(imprinted(MLP, batches, digits[0], **how), KEY).guesses, 1e-6)


def test_copies_are_not_found_and_are_filled_with_the_mean_and_their_labels(digits):
    (x, y), (copy, label) = *cut(digits[1], 12), (digits[1].x[40], digits[1].y[40])
    batch = torch.cat([x, copy.expand(2, -1, -1, -1)]), torch.cat([y, label.expand(2)])
    (guess,) = Imprint().run(imprinted(MLP, [batch], digits[0]), KEY).guesses
    assert_found([(x, y)], [guess._replace(x=guess.x[:12], y=guess.y[:12])], 1e-8)
    assert torch.allclose(guess.x[12:], digits[0].x.mean(0).expand(2, -1, -1, -1))
    assert guess.y[12:].tolist() == [label, label]
    assert guess.objective > 1e-3


def test_more_images_than_units_have_a_guess_for_each_or_a_failure(digits):
    (guess,) = Imprint().run(imprinted(SMALL, cut(digits[1], 100), digits[0]), KEY).guesses
    assert guess.x.shape == (100, 1, 8, 8)
    assert guess.y.shape == (100,)
    assert guess.failure or guess.objective > 1e-3


@pytest.mark.parametrize(("noise", "share"), [(1e-5, 0.9), (1e-4, 0.8)])
def test_a_batch_is_found_behind_slight_noise(digits, noise, share):
    batches = cut(digits[1], 8, 8, 8)
    seen = imprinted(MLP, batches, digits[0], defense=Gaussian(clip=1.0, noise_std=noise))
    guesses = Imprint().run(seen, KEY).guesses
    near = [errors(batch, guess)[0] < 0.01 for batch, guess in zip(batches, guesses, strict=True)]
    assert torch.cat(near).float().mean() > share
    assert all(guess.x.isfinite().all() and guess.objective > 0 for guess in guesses)


@pytest.mark.parametrize("noise", [6e-3, 1e-2, 1.0])
def test_noise_that_hides_the_bins_is_a_failure(digits, noise):
    seen = imprinted(MLP, cut(digits[1], 1, 8, 32), digits[0], defense=Gaussian(clip=1.0, noise_std=noise))
    assert_failed(Imprint().run(seen, KEY).guesses, "no bin contains a single record: there is too much noise")


def test_an_update_of_several_full_batch_steps_shows_the_images_of_the_first(digits):
    batches = cut(digits[1], 8)
    guesses = Imprint().run(imprinted(MLP, batches, digits[0], steps=3), KEY).guesses
    assert_found(batches, guesses)
    assert guesses[0].objective > 1e-3


@pytest.mark.parametrize("task", [MLP, SMALL])
def test_honest_parameters_are_failures(task):
    assert_failed(Imprint().run(make(task, images=4).seen, KEY).guesses, "the model has no imprint")


def test_a_zeroed_model_is_a_failure(digits):
    seen = imprinted(MLP, cut(digits[1], 4), digits[0])
    dead = seen.model._replace(params=torch.zeros_like(seen.model.params))
    assert_failed(Imprint().run(dataclasses.replace(seen, model=dead), KEY).guesses, "the model has no imprint")
    dead = seen.model._replace(params=seen.model.params * torch.nan)
    assert_failed(Imprint().run(dataclasses.replace(seen, model=dead), KEY).guesses, "the model is not finite")


@by_rows(
    (0.0, "the gradient is zero"), (torch.nan, "the gradient is not finite"), (1.0, "no bin contains a single record")
)
def test_a_gradient_of_no_records_is_a_failure(value, says, digits):
    seen = imprinted(MLP, cut(digits[1], 4), digits[0])
    assert_failed(Imprint().run(dataclasses.replace(seen, defense=Says(value)), KEY).guesses, says)


@by_rows(
    ("lenet-dlg", "begins with a convolution"), ("cnn2", "begins with a convolution"), ("linear", "has no such layers")
)
def test_other_models_are_refused(name, why):
    task = ModelTask(build(name, (1, 28, 28), 10))
    says = f"imprint needs a dense first layer with ReLU and a dense layer behind it; {name} {why}; use trap-weights"
    case = make(task, n=1)
    with pytest.raises(ValueError, match=says):
        Imprint().broadcast(case.seen, KEY)
    assert_failed(Imprint().run(case.seen, KEY).guesses, says)


def test_too_few_rows_are_refused():
    with pytest.raises(ValueError, match="got 32 rows for 20 groups"):
        Imprint(groups=20).broadcast(make(SMALL).seen, KEY)


def test_the_parameters_depend_on_the_auxiliary_data_and_the_key_alone(digits):
    one, other = (imprinted(MLP, [batch], digits[0]).model.params for batch in cut(digits[1], 4, 8))
    assert torch.equal(one, other)
    seen = imprinted(MLP, cut(digits[1], 4), digits[1])
    assert not torch.equal(one, seen.model.params)
    assert Imprint().broadcast(seen, Key(1)).isfinite().all()
    assert Imprint().needs == {"messages", "models", "auxiliary", "broadcast"}
