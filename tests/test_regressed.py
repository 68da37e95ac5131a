"""Regressed estimates: what they recover behind any model and defense, and what `map` does with them."""

import dataclasses

import pytest
import torch
from torch import nn
from torch.nn.functional import one_hot

from leakgauge import Key, rng
from leakgauge.attacks._engine import imitation, reconstruct
from leakgauge.attacks._engine.simulate import client_updates, plan_of
from leakgauge.attacks.map import MAP
from leakgauge.attacks.regressed import Regressed
from leakgauge.defenses.gaussian import Gaussian
from leakgauge.defenses.none import NoDefense
from leakgauge.defenses.sdq import SDQ
from leakgauge.defenses.top_k import TopK
from leakgauge.harness.core.contract import Examples, Links, Message, Observation, Setting, Snapshot
from leakgauge.harness.core.form import PICTURE
from leakgauge.harness.core.threats import View
from leakgauge.harness.learn import modules
from leakgauge.harness.learn.models import build
from leakgauge.harness.learn.tasks import ModelTask
from tests.by_rows import by_rows
from tests.data_files import real
from tests.doubles import Summing, small_task
from tests.victims import encoded

KEY = Key(0, ("regressed",))
SHAPE = (1, 8, 8)
GIVEN = Regressed(labels="given")
MLP = small_task("mlp-small")
ONE = torch.full((6,), 4)
"""One label for all victims, which then share a fit."""


class BatchNorm(nn.Sequential):
    def __init__(self):
        first, second = (nn.Conv2d(1, 8, 3, 2, 1), nn.BatchNorm2d(8)), (nn.Conv2d(8, 8, 3, 1, 1), nn.BatchNorm2d(8))
        super().__init__(*first, nn.ReLU(), *second, nn.ReLU(), nn.Flatten(), nn.Linear(128, 10))


class Gelu(nn.Sequential):
    def __init__(self):
        first, rest = (nn.Conv2d(1, 8, 3, 2, 1), nn.GELU()), (nn.Linear(128, 32), nn.GELU(), nn.Linear(32, 10))
        super().__init__(*first, nn.Flatten(), *rest)


class Series(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Flatten(), nn.Linear(40, 16), nn.Tanh(), nn.Linear(16, 10))


def own(network, shape=SHAPE):
    return ModelTask(modules.build(modules.given(network.__name__, network), shape, 10))


def slopes(key, n):
    """Images with a ramp in a random direction, with labels in turn."""
    across, tilt = torch.linspace(-1, 1, 8), rng.normal(key, (n, 3, 1, 1, 1))
    return Examples((tilt[:, 0] + tilt[:, 1] * across + tilt[:, 2] * across[:, None]).sigmoid(), torch.arange(n) % 10)


def seen_of(task, data, aside, images=1, defense=None, sends="gradient", steps=1, seed=0, labels=None):
    """What a server with the labels sees of the messages of clients that hold `images` records of `data` each."""
    defense, params = defense or NoDefense(), task.init(Key(seed, ("model",)))
    setting = Setting(task.layout, 8, 8, 1, sends, steps, 0.1, 0, images)
    x = data.x.view(-1, images, *task.input_shape)
    y = (data.y if labels is None else labels).view(-1, images)
    local = plan_of(setting, 0.1, steps)
    sent = client_updates(task, params, x, one_hot(y, task.classes).to(x), local).detach()
    messages = encoded(setting, defense, sent, [images] * len(x), KEY.child("victims", seed))
    model, labels = Snapshot(0, params, defense.init(setting)), tuple(row.sort().values for row in y)
    view = View.parse("server+labels")
    return Observation(view, setting, task, defense, 0.1, messages, model, auxiliary=aside, labels=labels)


def ramps(task=MLP, n=6, **how):
    data = slopes(KEY.child("data"), n)
    return seen_of(task, data, slopes(KEY.child("aside"), 200), **how), data.x


def mse(guesses, x):
    """[n] of all images in the order of the guesses."""
    return (torch.cat([guess.x for guess in guesses]) - x).square().flatten(1).mean(1)


def floor(seen, x):
    return (seen.auxiliary.x.mean(0) - x).square().flatten(1).mean(1)


@by_rows(
    (MLP, 0.01),
    (small_task("resnet20", SHAPE), 0.2),
    (small_task("resnet20-bn", SHAPE), 0.1),
    (own(BatchNorm), 0.01),
    (own(Gelu), 0.01),
    (small_task("lenet-dlg", SHAPE), 0.01),
    ids=["dense", "residual", "batch norm", "a user's batch norm", "a user's gelu", "sigmoid"],
)
@pytest.mark.matrix
def test_images_are_estimated_without_a_search_behind_any_model(task, share):
    seen, x = ramps(task, labels=ONE)
    guesses = GIVEN.run(seen, KEY).guesses
    assert [guess.failure for guess in guesses] == [""] * 6
    assert mse(guesses, x).mean() < share * floor(seen, x).mean()


@by_rows(
    (Gaussian(clip=0.5, noise_std=0.01), 0.2),
    (SDQ(bits=2), 0.2),
    (TopK(fraction=0.1), 0.2),
    ids=["gaussian that clips", "sdq", "top-k"],
)
def test_behind_a_defense_the_fit_is_to_messages_of_the_defense(defense, share):
    seen, x = ramps(defense=defense)
    guesses = GIVEN.run(seen, KEY).guesses
    assert mse(guesses, x).mean() < share * floor(seen, x).mean()
    assert GIVEN.aware


def test_noise_that_hides_everything_leaves_the_mean_image():
    seen, x = ramps(defense=Gaussian(clip=0.5, noise_std=100.0))
    ratio = mse(GIVEN.run(seen, KEY).guesses, x).mean() / floor(seen, x).mean()
    assert 0.8 < ratio < 1.2


@by_rows(
    ({"images": 2}, 0.3),
    ({"sends": "update", "steps": 3}, 0.05),
    ({"images": 3, "sends": "update", "steps": 2}, 0.4),
    ids=["a batch", "steps", "a batch and steps"],
)
def test_every_image_of_a_batch_or_of_several_steps_is_estimated(how, share):
    seen, x = ramps(**how)
    guesses = GIVEN.run(seen, KEY).guesses
    assert mse(guesses, x).mean() < share * floor(seen, x).mean()
    assert all(torch.equal(guess.y, labels) for guess, labels in zip(guesses, seen.labels, strict=True))


def test_images_of_one_label_in_a_batch_get_their_mean():
    seen, x = ramps(images=2, labels=torch.tensor([3, 3, 5, 5, 7, 7]))
    guesses = GIVEN.run(seen, KEY).guesses
    means = x.view(3, 2, *SHAPE).mean(1)
    for guess, mean in zip(guesses, means, strict=True):
        assert torch.equal(guess.x[0], guess.x[1])
        assert (guess.x[0] - mean).square().mean() < 0.2 * (seen.auxiliary.x.mean(0) - mean).square().mean()


def test_features_of_several_rounds_stand_side_by_side():
    how = {"n": 24, "labels": ONE.repeat(4), "defense": Gaussian(clip=0.5, noise_std=0.01)}
    seen, x = ramps(**how)
    both = dataclasses.replace(seen, later=ramps(**how, seed=1)[0].observed_rounds)
    one, two = (mse(GIVEN.run(each, KEY).guesses, x).mean() for each in (seen, both))
    assert two < 0.8 * one


def test_the_users_of_a_sum_are_estimated():
    seen, x = ramps(n=8, defense=Summing())
    wires, messages = [message.wire for message in seen.messages], []
    for first in range(0, 8, 2):
        pair = [message.sender for message in seen.messages[first : first + 2]]
        (wire,) = seen.defense.transmit(None, wires[first : first + 2], Links(seen.setting, pair, None), KEY)
        messages.append(Message(0, pair[0], wire, None, 2, 1, (pair[1],)))
    labels = tuple(torch.stack(seen.labels[i : i + 2]).flatten() for i in range(0, 8, 2))
    summed = dataclasses.replace(seen, messages=tuple(messages), labels=labels)
    assert mse(GIVEN.run(summed, KEY).guesses, x).mean() < 0.3 * floor(seen, x).mean()


def test_records_of_a_table_are_estimated():
    adult = real("adult")
    task = ModelTask(build("mlp-small", adult.input_shape, 2), stated=adult.form)
    data, aside = Examples(*(part[:12] for part in adult.test)), Examples(*(part[:600] for part in adult.train))
    seen = seen_of(task, data, aside)
    guesses = GIVEN.run(seen, KEY).guesses
    assert mse(guesses, data.x).mean() < 0.5 * floor(seen, data.x).mean()


def test_series_are_estimated():
    task = own(Series, (2, 20))
    waves = (rng.normal(KEY.child("waves"), (206, 2, 1)) * torch.linspace(0, 6, 20)).sin()
    data, aside = (Examples(part, torch.arange(len(part)) % 10) for part in waves.split([6, 200]))
    seen = seen_of(task, data, aside)
    assert mse(GIVEN.run(seen, KEY).guesses, data.x).mean() < 0.1 * floor(seen, data.x).mean()


def test_the_objective_is_about_the_error_on_new_inputs():
    seen, x = ramps(n=40, labels=torch.full((40,), 4), defense=Gaussian(clip=0.5, noise_std=0.03))
    guesses = GIVEN.run(seen, KEY).guesses
    assert len({guess.objective for guess in guesses}) == 1
    assert guesses[0].objective == pytest.approx(float(mse(guesses, x).mean()), rel=0.35)


def test_inferred_labels_do_as_well_as_given_ones_behind_a_bare_gradient():
    seen, x = ramps()
    given, inferred = (attack.run(seen, KEY).guesses for attack in (GIVEN, Regressed()))
    assert all(torch.equal(one.y, other.y) for one, other in zip(given, inferred, strict=True))
    torch.testing.assert_close(mse(inferred, x), mse(given, x))


def test_a_victim_does_not_change_the_guess_of_another_and_no_truth_is_needed():
    seen, _ = ramps(labels=torch.tensor([1, 2, 1, 2, 1, 2]))
    whole, part = (GIVEN.run(each, KEY).guesses for each in (seen, seen.of(range(4, 6))))
    torch.testing.assert_close(torch.cat([guess.x for guess in part]), torch.cat([guess.x for guess in whole[4:]]))


def test_wide_tensors_are_projected(monkeypatch):
    seen, x = ramps()
    monkeypatch.setattr(imitation, "_WIDE", 200)
    assert mse(GIVEN.run(seen, KEY).guesses, x).mean() < 0.3 * floor(seen, x).mean()


def test_leaving_one_out_in_closed_form_is_leaving_one_out():
    made, noise = (rng.normal(KEY.child(width), (30, width), torch.float64) for width in (5, 1))
    wanted = noise + made[:, :1]
    _, error = imitation._ridge(torch.cat([made, made]) @ made.T, wanted)
    by_hand = []
    for strength in imitation._STRENGTHS:
        gram = (made - made.mean(0)) @ (made - made.mean(0)).T
        penalty = strength * torch.linalg.eigvalsh(gram).clamp(min=0).mean()
        missed = []
        for i in range(30):
            rest = torch.arange(30) != i
            off, mean = made[rest] - made[rest].mean(0), wanted[rest].mean()
            weights = off.T @ torch.linalg.solve(off @ off.T + penalty * torch.eye(29), wanted[rest] - mean)
            missed.append(((made[i] - made[rest].mean(0)) @ weights + mean - wanted[i]).square())
        by_hand.append(torch.stack(missed).mean())
    assert error == pytest.approx(float(torch.stack(by_hand).min()), rel=0.02)


def test_a_batch_may_be_larger_than_the_auxiliary_data_but_one_input_is_too_few():
    seen, x = ramps(images=3)
    few, one = (dataclasses.replace(seen, auxiliary=slopes(KEY.child("few"), n)) for n in (2, 1))
    assert mse(GIVEN.run(few, KEY).guesses, x).isfinite().all()
    with pytest.raises(ValueError, match="expected at least 2 auxiliary inputs, got 1"):
        GIVEN.run(one, KEY)


@by_rows(small_task("resnet20", SHAPE), small_task("resnet20-bn", SHAPE), ids=["residual", "batch norm"])
@pytest.mark.matrix
@pytest.mark.ci("residual")
def test_map_is_never_worse_than_regression_where_searches_fail(task):
    seen, x = ramps(task, labels=ONE)
    attack = MAP(labels="given", evaluations=20, warm=20)
    without = mse(dataclasses.replace(attack, solve=False).run(seen, KEY).guesses, x).mean()
    guesses = attack.run(seen, KEY).guesses
    assert mse(guesses, x).mean() < 0.2 * floor(seen, x).mean()
    assert mse(guesses, x).mean() < without


def test_map_regresses_nothing_where_searches_work(monkeypatch):
    monkeypatch.setattr(reconstruct, "regressed", None)
    seen, _ = ramps(own(Gelu), n=2)
    with_it, without = (
        MAP(labels="given", evaluations=5, warm=5, solve=solve).run(seen, KEY) for solve in (True, False)
    )
    assert all(torch.equal(one.x, two.x) for one, two in zip(with_it.guesses, without.guesses, strict=True))


def test_map_keeps_what_explains_the_messages():
    seen, x = ramps(own(BatchNorm), n=1, labels=ONE[:1])
    truth = dataclasses.replace(seen, defense=NoDefense())
    search = MAP(labels="given").search(None)
    group = reconstruct._Group(truth, truth.observed_rounds, torch.ones(1, 1), torch.stack(truth.labels), search)
    rows, goal = torch.tensor([0]), group._goal(group.labels)
    assert bool(group._explained(goal, x.flatten(1), rows, KEY))
    assert not bool(group._explained(goal, x.flip(3).flatten(1), rows, KEY))


@by_rows(("resnet20", 5, 0.30), ("resnet20-bn", 5, 0.24))
@pytest.mark.slow
def test_photographs_behind_fresh_resnets_are_recognized(name, label, bar):
    cifar = real("cifar10")
    task, at = ModelTask(build(name, (3, 32, 32), 10)), torch.nonzero(cifar.test.y == label)[300:308, 0]
    data, aside = Examples(*(part[at] for part in cifar.test)), Examples(*(part[:3000] for part in cifar.train))
    seen = seen_of(task, data, aside, seed=31)
    found = torch.cat([guess.x for guess in GIVEN.run(seen, KEY).guesses])
    mean = aside.x.mean(0).expand_as(found)
    assert PICTURE.score(data.x, found)["ssim"].mean() >= bar
    assert PICTURE.score(data.x, mean)["ssim"].mean() < 0.16
