"""An attacker's simulation of local training, against the training itself."""

import dataclasses
from functools import partial

import numpy as np
import pytest
import torch
from torch.nn.functional import one_hot

from leakgauge import Key, rng
from leakgauge.attacks._engine.matching import Evaluator
from leakgauge.attacks._engine.simulate import client_updates, messages_of, one_gradient
from leakgauge.harness.core.contract import Examples
from leakgauge.harness.learn.batch import LocalPlan, Work, train_clients
from leakgauge.harness.learn.models import build
from leakgauge.harness.learn.tasks import ModelTask
from tests.by_rows import by_rows
from tests.doubles import small_task

KEY = Key(3).child("test simulate")
TASKS = [small_task("mlp-small"), ModelTask(build("lenet-dlg", (1, 8, 8), 10), "dlg")]
NAMES = ["mlp-small", "lenet-dlg"]
PLAN = LocalPlan(gradient=False, steps=3, epochs=None, batch=2, lr=0.3, momentum=0.0)


def images(task, n, b):
    x = rng.normal(KEY.child("x"), (n, b, *task.input_shape)).sigmoid()
    return x, (torch.arange(n * b) % task.classes).reshape(n, b)


def soft(task, y):
    return one_hot(y, task.classes).float()


def trained(task, params, x, y, plan):
    """The updates of clients that hold x [n, b, ...], and x and y in each client's training order."""
    work = [Work(Examples(*pair), KEY.child("client", i)) for i, pair in enumerate(zip(x, y, strict=True))]
    done = train_clients(task, params, work, plan, "loop")
    orders = [torch.from_numpy(np.concatenate(batches)[: x.shape[1]]) for batches in done.batches]
    ordered = (torch.stack([a[o] for a, o in zip(rows, orders, strict=True)]) for rows in (x, y))
    return done.updates, *ordered


@pytest.mark.parametrize("task", TASKS, ids=NAMES)
@by_rows(
    {},
    {"momentum": 0.5},
    {"clip": 0.1},
    {"batch": 0},
    {"batch": 4, "steps": 1, "clip": 0.1},
    {"gradient": True, "batch": 0},
    ids=str,
)
def test_a_simulated_pass_equals_the_client_s_own(changes, task):
    plan = dataclasses.replace(PLAN, **changes)
    params = task.init(KEY.child("model"))
    sent, x, y = trained(task, params, *images(task, 3, 6), plan)
    found = client_updates(task, params, x, soft(task, y), plan)
    torch.testing.assert_close(found, sent, rtol=1e-4, atol=1e-6)


def test_noise_divides_a_smaller_last_step_by_the_nominal_size():
    task, plan = TASKS[0], dataclasses.replace(PLAN, steps=2, batch=4, clip=0.1, noise_multiplier=1e-9)
    params = task.init(KEY.child("model"))
    sent, x, y = trained(task, params, *images(task, 2, 6), plan)
    found = client_updates(task, params, x, soft(task, y), plan)
    torch.testing.assert_close(found, sent, rtol=1e-3, atol=1e-6)
    wrong = client_updates(task, params, x, soft(task, y), dataclasses.replace(plan, noise_multiplier=0.0))
    assert not torch.allclose(wrong, sent, rtol=1e-2, atol=1e-6)


def test_an_update_does_not_depend_on_the_order_inside_a_step():
    task = TASKS[0]
    params, (x, y) = task.init(KEY.child("model")), images(task, 2, 4)
    orders = ([0, 1, 2, 3], [1, 0, 3, 2])
    torch.testing.assert_close(*(client_updates(task, params, x[:, o], soft(task, y[:, o]), PLAN) for o in orders))


@pytest.mark.parametrize("users", [1, 2])
@pytest.mark.parametrize("clip", [None, 0.1])
def test_the_slope_equals_finite_differences_of_the_value(users, clip):
    task = TASKS[0]
    params = task.init(KEY.child("model")).double()
    how = LocalPlan(False, 2, None, 1, 0.3, 0.5, clip)
    labels = one_hot(torch.tensor([[1, 2, 3, 4][: 2 * users]] * 3), 10).double()

    def misfit(messages, instances):
        assert messages.shape[1:] == ((task.layout.dim,) if users == 1 else (users, task.layout.dim))
        return messages.flatten(1).square().sum(1) * 50

    function = Evaluator(task, misfit, 2 * users, labels, partial(messages_of, task, params, how, users))
    z = rng.uniform(KEY.child("z"), (3, 2 * users * 64), dtype=torch.float64)
    step = rng.normal(KEY.child("step"), tuple(z.shape), dtype=torch.float64) * 1e-5
    rows = torch.arange(3)
    slope = function(z, rows).gradient
    change = function(z + step, rows).value - function(z - step, rows).value
    torch.testing.assert_close((2 * slope * step).sum(1), change, rtol=1e-5, atol=0)


def test_a_message_of_one_whole_step_is_recognized():
    one = LocalPlan(gradient=False, steps=1, epochs=None, batch=4, lr=1.0, momentum=0.0)
    whole = [(4, {}), (3, {}), (9, {"batch": 0}), (9, {"gradient": True})]
    other = [(5, {}), (4, {"steps": 2}), (4, {"clip": 1.0}), (3, {"poisson": True})]
    assert all(one_gradient(dataclasses.replace(one, **changes), images) for images, changes in whole)
    assert not any(one_gradient(dataclasses.replace(one, **changes), images) for images, changes in other)
