import itertools

import numpy as np
import pytest
import torch

from leakgauge.defenses.gaussian import Gaussian
from leakgauge.defenses.none import NoDefense
from leakgauge.harness.core.cell import FederationSpec
from leakgauge.harness.core.contract import Link, LocalRule
from leakgauge.harness.core.rng import Key
from leakgauge.harness.federation.loop import Keep, make_setting, replay_state, train
from tests.doubles import Counting, Ruled, Summing, random_examples, small_task

TASK = small_task()
CLIENTS = {k: random_examples(10 + 3 * k, seed=k) for k in range(5)}
TEST = random_examples(40, seed=99)
SPEC = FederationSpec(clients=5, participants=3, rounds=4, batch=4, lr=0.5, local_steps=2)


def keeping(models=(), messages=()):
    return Keep(frozenset(models), frozenset(messages))


KEEP = keeping((0, 2), (2,))


def spec_of(**changes):
    return FederationSpec(**{"clients": 5, "batch": 4, **changes})


def go(spec=SPEC, defense=None, clients=CLIENTS, seed=0, keep=KEEP, engine="loop"):
    return train(TASK, spec, defense or NoDefense(), clients, TEST, Key(seed), engine=engine, keep=keep)


def test_the_seed_alone_decides_every_bit():
    first, second, other = (go(defense=Gaussian(noise_std=0.01), seed=seed) for seed in (0, 0, 1))
    assert torch.equal(first.final, second.final)
    assert first.messages == second.messages
    assert first.evaluations == second.evaluations
    assert not torch.equal(first.final, other.final)


@pytest.mark.parametrize("engine", ["loop", "dense"])
def test_the_order_in_which_clients_are_listed_changes_no_bit(engine):
    backwards = {k: CLIENTS[k] for k in reversed(CLIENTS)}
    assert list(backwards) != list(CLIENTS)
    there, back = go(engine=engine), go(clients=backwards, engine=engine)
    assert torch.equal(there.final, back.final)
    assert there.messages == back.messages


def test_two_defenses_start_from_the_same_model_with_the_same_clients():
    plain, noisy = go(), go(defense=Gaussian(noise_std=0.1))
    assert torch.equal(plain.models[0], noisy.models[0])
    assert [m.sender for m in plain.messages[2]] == [m.sender for m in noisy.messages[2]]
    assert all((plain.truth[2][k] == noisy.truth[2][k]).all() for k in plain.truth[2])


def test_a_round_adds_the_weighted_mean_of_the_decoded_updates():
    training = go(spec_of(rounds=1, lr=0.5), keep=keeping([0], [0]))
    updates = [
        NoDefense().estimate(None, m.wire, Link(training.setting, m.sender, m.shared)) for m in training.messages[0]
    ]
    sizes = [len(CLIENTS[m.sender.number].y) for m in training.messages[0]]
    mean = sum(n * u.double() for n, u in zip(sizes, updates, strict=True)) / sum(sizes)
    torch.testing.assert_close(training.final, (training.models[0] + mean).float(), rtol=1e-6, atol=1e-7)


def test_fedsgd_steps_against_the_gradient():
    training = go(spec_of(rounds=1, algorithm="fedsgd", batch=0, lr=0.25), keep=keeping([0]))
    start = training.models[0].clone().requires_grad_()
    total = sum(len(data.y) for data in CLIENTS.values())
    loss = sum(len(data.y) / total * TASK.loss(start, *data) for data in CLIENTS.values())
    (gradient,) = torch.autograd.grad(loss, start)
    torch.testing.assert_close(training.final, (start - 0.25 * gradient).detach(), rtol=1e-5, atol=1e-6)
    assert training.setting.sends == "gradient"


def test_state_travels_through_the_rounds_and_a_memory_through_those_of_its_client():
    training = go(defense=Counting(), keep=keeping(messages=range(4)))
    sent = dict.fromkeys(CLIENTS, 0)
    for number in range(4):
        for message in training.messages[number]:
            assert list(message.wire[:2]) == [number, 100 + sent[message.sender.number]]
            sent[message.sender.number] += 1
    assert sum(sent.values()) == 12
    assert replay_state(Counting(), training.setting, training.feedback[:2]) == 2


def test_a_defense_may_require_one_clipped_full_batch_step():
    spec, keep = spec_of(rounds=1, lr=0.5, local_epochs=3), keeping([0], [0])
    training = go(spec, Ruled(), keep=keep)
    assert training.setting.steps == 1
    assert {k: len(samples) for k, samples in training.truth[0].items()} == {k: len(CLIENTS[k].y) for k in CLIENTS}
    # the mean of gradients of norm at most 1e-3, times lr 0.5
    moved = (training.final - training.models[0]).norm()
    assert 0 < moved <= 0.5 * 1e-3 * (1 + 1e-5)
    free = go(spec, Ruled(clip=1e6), keep=keep)
    assert (free.final - free.models[0]).norm() > 10 * moved


def test_a_defense_may_end_the_federation():
    spec = spec_of(rounds=9, evaluate_every=5)
    training = go(spec, Ruled(rounds=2), keep=keeping((0, 1, 7), (1, 7)))
    assert len(training.feedback) == len(training.learning_rates) == len(training.message_bytes) == 2
    assert [e.round for e in training.evaluations] == [0, 2]
    assert sorted(training.models) == [0, 1]
    with pytest.raises(ValueError, match="stops before the first round"):
        go(spec, Ruled(rounds=0))


def test_a_channel_that_adds_delivers_one_message_of_all():
    training = go(spec_of(rounds=2), Summing(), keep=keeping(messages=[1]))
    (message,) = training.messages[1]
    assert message.users == 5
    assert [message.sender.number, *(other.number for other in message.others)] == [0, 1, 2, 3, 4]
    assert training.snr_db == [None, None]


def test_bytes_are_counted_and_only_the_given_rounds_are_kept():
    training = go(defense=Counting())
    assert training.message_bytes == [2 + 4 * TASK.layout.dim] * 4
    assert sorted(training.models) == [0, 2]
    assert sorted(training.messages) == [2]
    assert set(training.truth) == {2}


def test_the_snr_is_that_of_the_decoded_updates():
    assert go().snr_db == [None] * 4  # exact
    half = go(defense=Counting(factor=0.5)).snr_db  # error half the signal: 20 log10 2 dB
    assert half == pytest.approx([20 * np.log10(2)] * 4, rel=1e-6)


def test_evaluations_come_every_n_rounds_and_at_the_end():
    training = go(spec_of(rounds=5, evaluate_every=2))
    assert [e.round for e in training.evaluations] == [0, 2, 4, 5]
    assert [item.before is None for item in training.feedback] == [False, True, False, True, False]
    assert [item.after is None for item in training.feedback] == [True, False, True, False, False]
    every = go()
    losses = [evaluation.loss for evaluation in every.evaluations]
    assert [(item.before, item.after) for item in every.feedback] == list(itertools.pairwise(losses))


def test_the_learning_rate_follows_its_schedule():
    inverse = go(spec_of(rounds=3, lr=0.5, schedule="inverse", decay=1.0))
    assert inverse.learning_rates == [0.5, 0.25, 0.5 / 3]
    # a rate of 1e-20 changes nothing: every evaluation after the first is without improvement
    plateau = go(spec_of(rounds=6, lr=1e-20, schedule="plateau", decay=0.5, patience=2))
    assert plateau.learning_rates == [1e-20, 1e-20, 5e-21, 5e-21, 2.5e-21, 2.5e-21]


def test_a_diverged_training_is_refused_with_the_round():
    with pytest.raises(ValueError, match=r"round 0, client \d: expected a finite update|training diverged"):
        go(spec_of(rounds=3, lr=1e30))


@pytest.mark.gpu
@pytest.mark.parametrize("model", ["mlp-small", "cnn2"])
def test_a_gpu_trains_to_the_same_model_within_tolerance(model):
    task = small_task(model, (1, 16, 16))
    clients = {k: random_examples(20, (1, 16, 16), seed=k) for k in range(4)}
    spec = FederationSpec(clients=4, rounds=3, batch=8, lr=0.1)
    here, there = (
        train(task, spec, NoDefense(), clients, clients[0], Key(0), engine=engine, keep=KEEP, device=device)
        for engine, device in (("loop", "cpu"), ("vmap", "cuda"))
    )
    torch.testing.assert_close(there.final, here.final, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(("spec", "steps"), [(spec_of(local_epochs=2), 2 * 6), (SPEC, 2)])
def test_the_setting_counts_the_steps_of_the_largest_client(spec, steps):
    assert make_setting(TASK, spec, CLIENTS, LocalRule()).steps == steps  # 22 samples: six batches of four
