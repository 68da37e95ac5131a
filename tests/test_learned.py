"""Learned inversion: what its network recovers, which keys it uses, and its fit."""

import dataclasses
import math

import pytest
import torch
from torch.nn.functional import one_hot

from leakgauge import Key, rng
from leakgauge.attacks._engine.simulate import client_updates, plan_of
from leakgauge.attacks.learned import Learned, _altered, _apart
from leakgauge.attacks.learned import _fit as fit
from leakgauge.attacks.learned import _Pairs as Pairs
from leakgauge.defenses.gaussian import Gaussian
from leakgauge.defenses.none import NoDefense
from leakgauge.defenses.sdq import SDQ
from leakgauge.defenses.top_k import TopK
from leakgauge.harness.core.contract import (
    Examples,
    Link,
    Links,
    LocalRule,
    Message,
    Observation,
    Sender,
    Setting,
    Snapshot,
)
from leakgauge.harness.core.threats import View
from leakgauge.harness.learn.models import build
from leakgauge.harness.learn.tasks import ModelTask
from tests.by_rows import by_rows
from tests.doubles import Counting, Summing
from tests.victims import Case, Says, make

KEY = Key(0)
SHAPE = (1, 6, 6)
TASK = ModelTask(build("mlp", SHAPE, 10))
QUICK = Learned(samples=300, components=36, hidden=16, epochs=3)
PLAN = Learned(components=4, hidden=8, epochs=4, lr=3e-3)


def slopes(key, n):
    """Images with a ramp in a random direction, with labels in turn."""
    across = torch.linspace(-1, 1, 6)
    tilt = rng.normal(key, (n, 3, 1, 1, 1))
    return Examples((tilt[:, 0] + tilt[:, 1] * across + tilt[:, 2] * across[:, None]).sigmoid(), torch.arange(n) % 10)


def seen_of(defense, n=5, images=1, users=1, labels=None, sends="gradient", steps=1):
    """n messages computed from ramps, each the sum of `users` updates; the adversary holds other ramps."""
    setting = Setting(TASK.layout, 10, 10, 1, sends, steps, 0.1, 0, images)
    x, y = slopes(KEY.child("victims"), n * images * users)
    y = y if labels is None else labels
    params, state = TASK.init(KEY.child("model")), defense.init(setting)
    soft = one_hot(y.view(-1, images), 10).float()
    sent = client_updates(TASK, params, x.view(-1, images, *SHAPE), soft, plan_of(setting, 0.1, steps))
    senders = [Sender(i, images) for i in range(n * users)]
    wires, messages = [], []
    for who, update in zip(senders, sent, strict=True):
        key = KEY.child("client", who.number)
        link = Link(setting, who, key.child("shared"))
        wires.append(defense.encode(state, defense.remember(setting), update, link, key.child("private"))[0])
    for first in range(0, n * users, users):
        group = slice(first, first + users)
        channel, shared = KEY.child("channel", first), KEY.child("client", first, "shared")
        (wire,) = defense.transmit(state, wires[group], Links(setting, senders[group], None), channel)
        who, *others = senders[group]
        messages.append(Message(0, who, wire, shared, images * users, steps, tuple(others)))
    model = Snapshot(0, params, state)
    aside = slopes(KEY.child("aside"), 80)
    seen = Observation(View.parse("server"), setting, TASK, defense, 0.1, tuple(messages), model, auxiliary=aside)
    return Case(seen, x.view(n, -1, *SHAPE), y.view(n, -1))


def mean_image_mse(case):
    """[n]: MSE of the mean auxiliary image."""
    return (case.seen.auxiliary.x.mean(0) - case.x).square().flatten(1).mean(1)


@dataclasses.dataclass(frozen=True, eq=False)
class Recording(Counting):
    """Records every key that it receives, and every update."""

    keys: list = dataclasses.field(default_factory=list)
    read_with: list = dataclasses.field(default_factory=list)
    updates: list = dataclasses.field(default_factory=list)
    noise: float = 0.0

    @property
    def local(self):
        return LocalRule(clip=1e-3) if self.noise else LocalRule()

    def step_noise(self, setting):
        return self.noise

    def encode(self, state, memory, update, link, private):
        self.keys.extend([private, link.key])
        self.updates.append(update)
        return super().encode(state, memory, update, link, private)

    def transmit(self, state, wires, links, channel):
        self.keys.append(channel)
        return wires

    def estimate(self, state, received, link):
        self.read_with.append(link.shared)
        return super().estimate(state, received, link)

    def forget(self):
        for notes in (self.keys, self.read_with, self.updates):
            notes.clear()


@by_rows(
    (NoDefense(), 0.01),
    (Gaussian(clip=0.5, noise_std=0.01), 0.2),
    (SDQ(bits=2), 0.05),
    (TopK(fraction=0.2), 0.2),
    (Summing(), 0.01),
    ids=["none", "gaussian", "sdq", "top-k", "a channel that adds"],
)
def test_ramps_are_recovered_far_better_than_by_their_mean(defense, share):
    case = seen_of(defense)
    guesses = QUICK.run(case.seen, KEY).guesses
    assert [guess.failure for guess in guesses] == [""] * 5
    assert case.mse(guesses).mean() < share * mean_image_mse(case).mean()
    assert [guess.y.tolist() for guess in guesses] == case.y.tolist()
    assert all(guess.x.min() >= 0 and guess.x.max() <= 1 for guess in guesses)
    assert QUICK.aware


def test_a_defense_that_drowns_the_image_leaves_about_the_mean():
    case = seen_of(Gaussian(clip=0.5, noise_std=100.0))
    ratio = case.mse(QUICK.run(case.seen, KEY).guesses).mean() / mean_image_mse(case).mean()
    assert 0.5 < ratio < 1.5


def test_the_objective_is_the_held_out_error_and_evaluations_are_the_messages_made():
    case = seen_of(NoDefense())
    guesses = QUICK.run(case.seen, KEY).guesses
    assert len({guess.objective for guess in guesses}) == 1
    assert 0 < guesses[0].objective < 0.1 * float(mean_image_mse(case).mean())
    assert {guess.evaluations for guess in guesses} == {300 + 10}  # one of 8 images of each label is held out


@by_rows(
    (NoDefense(), {"images": 2}),
    (Summing(), {"users": 2}),
    (NoDefense(), {"sends": "update", "steps": 1}),
    (NoDefense(), {"sends": "update", "steps": 4}),
    ids=["a batch of two labels", "a sum of users", "an update", "an update of several steps"],
)
def test_every_image_of_a_message_is_recovered(defense, how):
    case = seen_of(defense, **how)
    assert (case.mse(QUICK.run(case.seen, KEY).guesses) < 0.1 * mean_image_mse(case)).all()


def test_images_of_one_label_in_a_batch_are_replaced_by_their_mean():
    case = seen_of(NoDefense(), images=2, labels=torch.arange(5).repeat_interleave(2))
    for guess, x in zip(QUICK.run(case.seen, KEY).guesses, case.x, strict=True):
        assert torch.allclose(guess.x[0], guess.x[1], atol=1e-4)
        assert (guess.x[0] - x.mean(0)).square().mean() < 0.02


def test_a_victims_key_is_used_only_to_read_its_message():
    defense = Recording()
    case = seen_of(defense)
    defense.forget()
    key = Key(7).child("attack")
    QUICK.run(case.seen, key)
    assert len(defense.keys) == 3 * (300 + 10)
    assert len(set(defense.keys)) == len(defense.keys)
    assert all(one.seed == 7 and one.path[0] == "attack" for one in defense.keys)
    theirs = [message.shared for message in case.seen.messages]
    assert defense.read_with[:5] == theirs
    assert not set(defense.read_with[5:]) & set(theirs)


def test_an_attacker_without_the_shared_key_trains_on_an_outsiders_estimates():
    defense = Recording()
    case = seen_of(defense)
    messages = tuple(message._replace(shared=None) for message in case.seen.messages)
    defense.forget()
    QUICK.run(dataclasses.replace(case.seen, messages=messages), KEY)
    assert defense.read_with == [None] * (5 + 300 + 10)


def test_noise_of_local_steps_is_imitated():
    defense = Recording(noise=2.0)
    case = seen_of(defense)
    defense.forget()
    QUICK.run(case.seen, KEY)
    # the gradient is clipped to 1e-3, and a step on one record adds noise of 2 * 1e-3 to each of d coordinates
    updates = torch.stack(defense.updates)
    assert updates.std() == pytest.approx(2e-3, rel=0.01)
    assert len({float(update[0]) for update in updates}) == len(updates)


def test_another_key_gives_another_guess():
    case, attack = seen_of(Gaussian(clip=0.5, noise_std=0.01)), dataclasses.replace(QUICK, samples=60)
    one, other = (attack.run(case.seen, key).guesses for key in (KEY, Key(1)))
    assert not torch.equal(one[0].x, other[0].x)


def test_one_network_serves_all_victims_of_a_kind_and_another_the_others():
    single, double = seen_of(NoDefense(), n=2), seen_of(NoDefense(), n=1, images=2)
    messages = (*double.seen.messages, *single.seen.messages)
    guesses = QUICK.run(dataclasses.replace(single.seen, messages=messages), KEY).guesses
    assert [len(guess.x) for guess in guesses] == [2, 1, 1]
    assert guesses[1].objective == guesses[2].objective != guesses[0].objective
    assert (single.mse(guesses[1:]) < 0.1 * mean_image_mse(single)).all()


def test_a_constant_message_gives_a_finite_image():
    guesses = QUICK.run(make(defense=Says(1.0)).seen, KEY).guesses
    assert all(guess.failure == "" and guess.x.isfinite().all() for guess in guesses)


@pytest.mark.parametrize("n", [0, 1])
def test_too_little_auxiliary_data_is_refused(n):
    case = seen_of(NoDefense())
    few = Examples(case.x[:n, 0], case.y[:n, 0])
    with pytest.raises(ValueError, match=f"expected at least 2 auxiliary inputs, got {n}"):
        QUICK.run(dataclasses.replace(case.seen, auxiliary=few), KEY)


def test_two_auxiliary_inputs_are_enough_to_run():
    case = seen_of(NoDefense())
    few = Examples(case.x[:2, 0], case.y[:2, 0])
    assert all(guess.failure == "" for guess in QUICK.run(dataclasses.replace(case.seen, auxiliary=few), KEY).guesses)


def test_the_last_inputs_of_each_label_are_held_out():
    data = slopes(KEY, 160)
    train, held = _apart(data)
    assert torch.equal(held.x, data.x[-20:])
    assert torch.equal(train.x, data.x[:-20])
    assert [len(part.x) for part in _apart(slopes(KEY, 3))] == [2, 1]


def test_altered_images_stay_in_range_and_vectors_are_unchanged():
    x = slopes(KEY, 40).x[:, None]
    altered = _altered(x, KEY)
    assert not torch.equal(altered, x)
    assert 0 <= altered.min() <= altered.max() <= 1
    assert torch.equal(_altered(x.flatten(2), KEY), x.flatten(2))


def linear_pairs(key, n, noise=0.0):
    """Images [n, 1, 2, 2] that are linear in 6 features; the last feature is constant."""
    features = rng.normal(key, (n, 6)).index_fill(1, torch.tensor([5]), 3.0)
    mixing = rng.normal(KEY.child("mixing"), (6, 4))
    images = 0.5 + 0.01 * features @ mixing + noise * rng.normal(key.child("noise"), (n, 4))
    return Pairs(features, images.view(n, 1, 2, 2))


def test_a_linear_map_is_found_exactly_and_a_constant_feature_has_no_effect():
    train, held = linear_pairs(KEY.child("train"), 200), linear_pairs(KEY.child("held"), 50)
    network = fit(train, held, PLAN, pixels=True, key=KEY)
    assert network.error < 1e-9
    other = held.features.index_fill(1, torch.tensor([5]), -40.0)
    assert torch.equal(network(held.features), network(other))


def test_a_hidden_layer_learns_a_nonlinear_map_and_never_raises_the_held_out_error():
    def bent(key):
        features = rng.normal(key, (600, 4))
        return Pairs(features, features.abs().view(600, 1, 2, 2))

    train, held = bent(KEY.child("train")), bent(KEY.child("held"))
    straight, network = (
        fit(train, held, dataclasses.replace(PLAN, hidden=hidden, epochs=40, lr=1e-2), pixels=False, key=KEY)
        for hidden in (0, 32)
    )
    assert network.error < 0.2 * straight.error
    noise = Pairs(train.features, rng.normal(KEY, (600, 1, 2, 2)))
    unknown = Pairs(held.features, rng.normal(Key(1), (600, 1, 2, 2)))
    straight, network = (
        fit(noise, unknown, dataclasses.replace(PLAN, hidden=hidden), pixels=False, key=KEY) for hidden in (0, 32)
    )
    assert network.error <= straight.error * (1 + 1e-6)


def test_a_non_finite_feature_gives_a_non_finite_error():
    train, held = linear_pairs(KEY.child("train"), 20), linear_pairs(KEY.child("held"), 5)
    train.features[3, 2] = math.nan
    assert math.isnan(fit(train, held, PLAN, pixels=True, key=KEY).error)
