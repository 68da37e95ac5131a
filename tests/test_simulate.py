"""What an attacker simulates of local training, against the training itself."""

import numpy as np
import pytest
import torch
from torch.nn.functional import one_hot

from leakgauge.attacks._engine.simulate import Local, client_updates, update_evaluator
from leakgauge.harness.core import rng
from leakgauge.harness.core.contract import Examples
from leakgauge.harness.core.rng import Key
from leakgauge.harness.learn.batch import LocalPlan, Work, plan_batches, train_clients
from leakgauge.harness.learn.models import build
from leakgauge.harness.learn.tasks import ModelTask
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
    """The updates of clients who hold x [n, b, ...], and x and y in the order in which each took them."""
    work = [Work(Examples(*pair), KEY.child("client", i)) for i, pair in enumerate(zip(x, y, strict=True))]
    done = train_clients(task, params, work, plan, "loop")
    orders = [torch.from_numpy(np.concatenate(mine)[: x.shape[1]]) for mine in done.batches]
    return (
        done.updates,
        torch.stack([a[o] for a, o in zip(x, orders, strict=True)]),
        torch.stack([a[o] for a, o in zip(y, orders, strict=True)]),
    )


def local(plan, nominal=False):
    return Local(plan.gradient, plan.lr, plan.steps or 1, plan.batch, plan.momentum, plan.clip, nominal)


@pytest.mark.parametrize("task", TASKS, ids=NAMES)
@pytest.mark.parametrize(
    "changes",
    [{}, {"momentum": 0.5}, {"clip": 0.1}, {"batch": 0}, {"batch": 4, "steps": 1, "clip": 0.1}, {"gradient": True}],
    ids=str,
)
def test_a_simulated_pass_is_the_clients_own(task, changes):
    plan = LocalPlan(**{**PLAN.__dict__, **changes})
    if plan.gradient:
        plan = LocalPlan(**{**plan.__dict__, "batch": 0})
    params = task.init(KEY.child("model"))
    sent, x, y = trained(task, params, *images(task, 3, 6), plan)
    told = client_updates(task, params, x, soft(task, y), local(plan))
    torch.testing.assert_close(told, sent, rtol=1e-4, atol=1e-6)


def test_a_smaller_last_step_is_divided_by_the_nominal_size_where_there_is_noise():
    task, plan = TASKS[0], LocalPlan(**{**PLAN.__dict__, "steps": 2, "batch": 4, "clip": 0.1, "noise_multiplier": 1e-9})
    params = task.init(KEY.child("model"))
    sent, x, y = trained(task, params, *images(task, 2, 6), plan)
    told = client_updates(task, params, x, soft(task, y), local(plan, nominal=True))
    torch.testing.assert_close(told, sent, rtol=1e-3, atol=1e-6)
    wrong = client_updates(task, params, x, soft(task, y), local(plan))
    assert not torch.allclose(wrong, sent, rtol=1e-2, atol=1e-6)


def test_an_update_does_not_depend_on_the_order_inside_a_step():
    task = TASKS[0]
    params, (x, y) = task.init(KEY.child("model")), images(task, 2, 4)
    swapped = torch.tensor([1, 0, 3, 2])
    one, other = (
        client_updates(task, params, x[:, o], soft(task, y[:, o]), local(PLAN)) for o in (slice(None), swapped)
    )
    torch.testing.assert_close(one, other)


@pytest.mark.parametrize("users", [1, 2])
@pytest.mark.parametrize("clip", [None, 0.1])
def test_the_slope_is_that_of_the_value(users, clip):
    task = TASKS[0]
    params = task.init(KEY.child("model")).double()
    how = Local(False, 0.3, 2, 1, 0.5, clip)
    labels = one_hot(torch.tensor([[1, 2, 3, 4][: 2 * users]] * 3), 10).double()

    def misfit(messages, instances):
        assert messages.shape[1:] == ((task.layout.dim,) if users == 1 else (users, task.layout.dim))
        return messages.flatten(1).square().sum(1) * 50

    function = update_evaluator(task, params, misfit, how, images=2 * users, users=users, labels=labels, chunk=2)
    z = rng.uniform(KEY.child("z"), (3, 2 * users * 64), dtype=torch.float64)
    step = rng.normal(KEY.child("step"), tuple(z.shape), dtype=torch.float64) * 1e-5
    rows = torch.arange(3)
    slope = function(z, rows).gradient
    change = function(z + step, rows).value - function(z - step, rows).value
    torch.testing.assert_close((2 * slope * step).sum(1), change, rtol=1e-5, atol=0)


def test_a_message_of_one_whole_step_is_told_from_others():
    def whole(images, **changes):
        return Local(**{"gradient": False, "lr": 1.0, "steps": 1, "batch": 4, "momentum": 0.0, **changes}).one_gradient(
            images
        )

    assert whole(4)
    assert whole(9, batch=0)
    assert whole(9, gradient=True, steps=1)
    assert not whole(5)
    assert not whole(4, steps=2)
    assert not whole(4, clip=1.0)
    assert whole(3)
    assert not whole(3, nominal=True)


def test_batches_are_cut_as_the_client_cuts_them():
    plan = LocalPlan(**{**PLAN.__dict__, "steps": 4, "batch": 4})
    sizes = [len(batch) for batch in plan_batches(6, plan, KEY)]
    assert sizes == [4, 2, 4, 2]
