import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from leakgauge.harness.core.rng import Key
from leakgauge.harness.learn.batch import LocalPlan, Work, choose_engine, plan_batches, train_clients
from leakgauge.harness.learn.partition import Holdings, sizes
from tests.by_rows import by_rows
from tests.clipping_case import clients
from tests.doubles import random_examples, small_task

PLAN = LocalPlan(gradient=False, steps=None, epochs=2, batch=8, lr=0.1, momentum=0.9)


def by_hand(task, params, client, plan):
    """The textbook loop, with torch's own optimizer."""
    local = params.clone().requires_grad_()
    optimizer = torch.optim.SGD([local], lr=plan.lr, momentum=plan.momentum)
    for number, index in enumerate(plan_batches(len(client.data.y), plan, client.key)):
        optimizer.zero_grad()
        keep = task.dropout_masks(client.key.child("dropout", number), len(index))
        task.loss(local, client.data.x[index], client.data.y[index], keep).backward()
        optimizer.step()
    return local.detach() - params


@by_rows(
    ("mlp-small", (1, 8, 8), "loop"),
    ("mlp-small", (1, 8, 8), "dense"),
    ("mlp-small", (1, 8, 8), "vmap"),
    ("mlp-32-tanh", (1, 8, 8), "dense"),
    ("linear", (1, 8, 8), "dense"),
    ("svm", (1, 8, 8), "loop"),
    ("svm", (1, 8, 8), "vmap"),
    ("cnn2", (1, 16, 16), "loop"),
    ("cnn2", (1, 16, 16), "vmap"),
    ("cnn3", (3, 22, 22), "loop"),  # has dropout
    ("cnn3", (3, 22, 22), "vmap"),
)
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_every_engine_is_the_textbook_loop(model, shape, engine, momentum):
    task, work = small_task(model, shape), clients(shape)
    params = task.init(Key(1))
    plan = dataclasses.replace(PLAN, momentum=momentum)
    found = train_clients(task, params, work, plan, engine)
    wanted = torch.stack([by_hand(task, params, client, plan) for client in work])
    assert wanted.abs().max() > 1e-3
    torch.testing.assert_close(found.updates, wanted, rtol=1e-4, atol=2e-6)


@pytest.mark.parametrize("engine", ["loop", "dense", "vmap"])
def test_clients_that_hold_rows_of_one_data_set_train_as_on_their_own_copies(engine):
    task, data = small_task(), random_examples(100)
    rows = [np.arange(1, 30, 3), np.arange(40, 90), np.arange(90, 97)]
    holdings = Holdings(data, dict(enumerate(rows)))
    assert [len(holdings[k].y) for k in holdings] == list(sizes(holdings).values()) == [10, 50, 7]
    keys, params = [Key(k) for k in range(3)], task.init(Key(1))
    views = [Work(data, key, own) for key, own in zip(keys, rows, strict=True)]
    copies = [Work(holdings[k], key) for k, key in enumerate(keys)]
    mixed = [views[0], copies[1], views[2]]
    found, other, both = (train_clients(task, params, work, PLAN, engine) for work in (views, copies, mixed))
    assert torch.equal(found.updates, other.updates)
    assert torch.equal(found.updates, both.updates)
    assert all(map(np.array_equal, found.batches[1], other.batches[1]))


@pytest.mark.parametrize("engine", ["loop", "dense", "vmap"])
def test_a_gradient_is_that_of_the_first_batch(engine):
    task, work = small_task(), clients()
    params = task.init(Key(1)).requires_grad_()
    found = train_clients(task, params.detach(), work, dataclasses.replace(PLAN, gradient=True), engine)
    for row, client, (index,) in zip(found.updates, work, found.batches, strict=True):
        wanted = torch.autograd.grad(task.loss(params, client.data.x[index], client.data.y[index]), params)[0]
        torch.testing.assert_close(row, wanted, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("engine", ["loop", "dense"])
def test_training_twice_gives_the_same_bits_and_leaves_the_model_alone(engine):
    task = small_task()
    params = task.init(Key(1))
    before = params.clone()
    first, second = (train_clients(task, params, clients(), PLAN, engine).updates for _ in range(2))
    assert torch.equal(first, second)
    assert torch.equal(params, before)


@by_rows(("mlp-small", "loop"), ("mlp-small", "dense"), ("mlp-small", "vmap"), ("cnn2", "loop"))
@pytest.mark.parametrize(
    "changes",
    [{}, {"gradient": True}, {"clip": 0.1, "noise_multiplier": 1.0, "poisson": True}],
    ids=["update", "gradient", "dp-sgd"],
)
def test_clients_with_different_starts_train_as_each_alone(model, engine, changes):
    task = small_task(model, (1, 16, 16))
    work = clients((1, 16, 16), (20, 13, 8, 8, 8, 9, 9))  # more than one chunk
    starts = torch.stack([task.init(Key(1).child(i)) for i in range(len(work))])
    before, plan = starts.clone(), dataclasses.replace(PLAN, **changes)
    found = train_clients(task, starts, work, plan, engine)
    alone = [train_clients(task, *each, plan, engine) for each in zip(starts, [[c] for c in work], strict=True)]
    torch.testing.assert_close(found.updates, torch.cat([one.updates for one in alone]), rtol=1e-4, atol=2e-6)
    assert torch.equal(starts, before)


@pytest.mark.parametrize("engine", ["loop", "dense", "vmap"])
def test_one_model_for_all_is_the_same_bits_as_a_copy_for_each(engine):
    task, work = small_task(), clients(sizes=(20, 13, 8, 8, 8, 9, 9))
    params = task.init(Key(1))
    shared, copies = (train_clients(task, p, work, PLAN, engine).updates for p in (params, params.repeat(7, 1)))
    assert torch.equal(shared, copies)


@given(n=st.integers(1, 50), batch=st.integers(0, 60), epochs=st.integers(1, 3))
def test_an_epoch_uses_every_sample_once(n, batch, epochs):
    batches = plan_batches(n, LocalPlan(False, None, epochs, batch, 0.1, 0.0), Key(0))
    counts = np.bincount(np.concatenate(batches), minlength=n)
    assert (counts == epochs).all()
    assert max(map(len, batches)) <= (batch or n)


def test_steps_go_on_into_the_next_pass():
    batches = plan_batches(10, LocalPlan(False, 5, None, 4, 0.1, 0.0), Key(0))
    assert [len(index) for index in batches] == [4, 4, 2, 4, 4]
    assert sorted(np.concatenate(batches[:3])) == list(range(10))


POISSON = LocalPlan(False, None, 3, 4, 0.1, 0.0, poisson=True)


def test_a_poisson_epoch_has_the_usual_number_of_steps_each_of_none_to_all_samples():
    assert len(plan_batches(10, POISSON, Key(0))) == 3 * 3
    assert len(plan_batches(10, dataclasses.replace(POISSON, steps=5, epochs=None), Key(0))) == 5
    assert len(plan_batches(10, dataclasses.replace(POISSON, gradient=True), Key(0))) == 1
    assert {0, 1} < set(map(len, plan_batches(10, dataclasses.replace(POISSON, batch=1, epochs=9), Key(0))))
    for batch in (0, 10, 11):  # all samples
        batches = plan_batches(10, dataclasses.replace(POISSON, batch=batch, epochs=300), Key(0))
        assert len(batches) == 300
        assert all((index == np.arange(10)).all() for index in batches)


def test_a_poisson_step_takes_every_sample_by_itself_with_the_same_chance():
    # alpha 1e-6 over 50 + 2 tests: 5.7 standard errors, which at 150,000 steps are 2.3 % of a sample's chance and 2.1 %
    # of the variance of a step's size: the twins, 6 % off, are missed at a rate under 1e-6
    n, steps, chance = 50, 150_000, 0.3
    batches = plan_batches(n, LocalPlan(False, steps, None, 15, 0.1, 0.0, poisson=True), Key(0))
    counts = np.bincount(np.concatenate(batches), minlength=n) / (steps * chance)
    sizes = np.array([len(index) for index in batches])
    off = np.sqrt((1 - chance) / (steps * chance))
    spread = sizes.var() / (n * chance * (1 - chance))  # that of a binomial distribution: the samples are independent
    assert np.abs(counts - 1).max() < 5.7 * off < np.abs(1.06 * counts - 1).min()
    assert np.abs(spread - 1) < 5.7 * np.sqrt(2 / steps) < np.abs(1.06 * spread - 1)
    assert np.abs(sizes.mean() / (n * chance) - 1) < 5.7 * off / np.sqrt(n)


@by_rows(
    ({"clip": 0.0}, "expected 0 < clip < inf"),
    ({"clip": np.nan}, "expected 0 < clip < inf"),
    ({"clip": np.inf}, "expected 0 < clip < inf"),
    ({"clip": 1.0, "noise_multiplier": -1.0}, "expected 0 <= noise_multiplier < inf"),
    ({"clip": 1.0, "noise_multiplier": np.nan}, "expected 0 <= noise_multiplier < inf"),
    ({"noise_multiplier": 1.0}, "noise_multiplier=1.0 needs a clip"),
)
def test_a_plan_without_a_valid_clip_or_noise_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(PLAN, **changes)


def test_the_engine_goes_with_the_model_and_the_device():
    assert choose_engine(small_task()) == "dense"
    assert choose_engine(small_task("cnn2", (1, 16, 16))) == "loop"
    assert choose_engine(small_task("svm")) == "loop"
    assert choose_engine(small_task(), "cuda") == "dense"
    assert choose_engine(small_task("cnn2", (1, 16, 16)), "cuda") == "vmap"


@by_rows(
    ([], 1, "loop", "at least one client"),
    ([Work(random_examples(0), Key(0))], 1, "loop", "at least one sample"),
    (clients((1, 16, 16)), 2, "loop", r"expected params \[1922\] or \[3, 1922\], got \[2, 1922\]"),
    (clients((1, 16, 16)), 3, "dense", "dense stack for engine 'dense', got 'cnn2'"),
)
def test_an_impossible_training_is_refused(work, starts, engine, message):
    task = small_task("cnn2", (1, 16, 16))
    with pytest.raises(ValueError, match=message):
        train_clients(task, task.init(Key(0)).repeat(starts, 1), work, PLAN, engine)
