"""Local optimizers: their steps are torch's, and attacks follow them."""

import copy
import functools

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import leakgauge
from leakgauge.attacks._engine.objective import undone
from leakgauge.attacks._engine.simulate import client_updates
from leakgauge.harness.core.cell import FederationSpec
from leakgauge.harness.core.contract import Examples
from leakgauge.harness.core.rng import Key, normal
from leakgauge.harness.learn.batch import LocalPlan, Work, train_clients
from leakgauge.harness.learn.gradients import targets_of
from leakgauge.harness.learn.models import build
from leakgauge.harness.learn.modules import given
from leakgauge.harness.learn.tasks import ModelTask
from tests.by_rows import by_rows
from tests.test_fit import ROWS, conv, dense, relu, some

HOW = {
    "sgd": {},
    "momentum": {"momentum": 0.9},
    "decay": {"weight_decay": 0.05},
    "proximal": {"proximal": 0.5},
    "both": {"momentum": 0.5, "weight_decay": 0.1, "proximal": 0.2},
    "adam": {"optimizer": "adam"},
    "adam-decay": {"optimizer": "adam", "weight_decay": 0.05},
    "adamw": {"optimizer": "adamw", "weight_decay": 0.05},
}


def by_torch(model, x, y, lr, steps, optimizer="sgd", momentum=0.0, weight_decay=0.0, proximal=0.0):
    """The update of a client with torch's own optimizer, after steps on all its records."""
    own = copy.deepcopy(model)
    kinds = {"sgd": functools.partial(torch.optim.SGD, momentum=momentum), "adam": torch.optim.Adam}
    kinds["adamw"] = torch.optim.AdamW
    stepper = kinds[optimizer](own.parameters(), lr=lr, weight_decay=weight_decay)
    for _ in range(steps):
        stepper.zero_grad()
        pairs = zip(own.parameters(), model.parameters(), strict=True)
        drift = sum((now - before.detach()).square().sum() for now, before in pairs)
        (cross_entropy(own(x), y) + proximal / 2 * drift).backward()
        stepper.step()
    pairs = zip(own.parameters(), model.parameters(), strict=True)
    return [(after - before).detach() for after, before in pairs]


def flat(tensors):
    return torch.cat([tensor.flatten() for tensor in tensors])


def plan_of(lr, steps, **how):
    kinds = {"momentum": 0.0, **how}
    return LocalPlan(gradient=False, steps=steps, epochs=None, batch=0, lr=lr, **kinds)


# steps


@pytest.mark.parametrize("steps", [1, 2, 5])
@pytest.mark.parametrize("how", HOW.values(), ids=HOW)
@by_rows(dense, conv)
def test_a_client_takes_the_steps_of_torch(make, how, steps):
    model = make().double()
    x, y = some([0, 3, 5, 8])
    task = ModelTask(build(given("steps", make()), (1, 8, 8), 10))
    expected = flat(by_torch(model, x.double(), y, 0.01, steps, **how))
    start = flat([parameter.detach() for parameter in model.parameters()])
    work = [Work(Examples(x.double(), y), Key(0))]
    (found,) = train_clients(task, start, work, plan_of(0.01, steps, **how), "loop").updates
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-13)
    given_y = targets_of(task, y, torch.float64)
    (followed,) = client_updates(task, start, x.double()[None], given_y[None], plan_of(0.01, steps, **how))
    torch.testing.assert_close(followed, expected, rtol=1e-9, atol=1e-13)


@pytest.mark.parametrize("how", HOW.values(), ids=HOW)
def test_all_engines_agree(how):
    task = ModelTask(build("mlp-small", (64,), 10))
    start, plan = task.init(Key(1)), plan_of(0.01, 4, **how)
    work = []
    for number, size in enumerate((6, 3, 5)):
        x, y = normal(Key(number), (size, 64)), torch.arange(size) % 10
        work.append(Work(Examples(x, y), Key(number)))
    plan = plan.__class__(**{**plan.__dict__, "batch": 2})
    loop, dense_, mapped = (train_clients(task, start, work, plan, each).updates for each in ("loop", "dense", "vmap"))
    # Adam turns rounding errors of small gradients into parts of a step
    close = {"rtol": 1e-3, "atol": 2e-4 if "adam" in how.get("optimizer", "") else 1e-6}
    torch.testing.assert_close(dense_, loop, **close)
    torch.testing.assert_close(mapped, loop, **close)


def test_the_slope_of_a_followed_step_is_finite_where_a_gradient_is_zero():
    task = ModelTask(build("mlp-small", (64,), 10))
    x = torch.zeros(1, 1, 64, requires_grad=True)
    y = targets_of(task, torch.tensor([[3]]), torch.float32)
    update = client_updates(task, task.init(Key(1)), x, y, plan_of(0.01, 2, optimizer="adam"))
    (slope,) = torch.autograd.grad(update.square().sum(), x)
    assert slope.isfinite().all()


def test_the_epsilon_of_adam_shows_gradients():
    gradient, params = normal(Key(4), (2000,)) * 1e-3, normal(Key(5), (2000,)) * 0.1
    after = params - 0.1 * gradient / (gradient.abs() + 1e-8)
    (found,) = undone((after - params)[None] / -0.1, torch.finfo().eps * (1 + params.abs() / 0.1))
    off = (found - gradient).abs() / gradient.abs()
    assert off[gradient.abs() < 1e-3].median() < 0.01
    assert (found.sign() == gradient.sign()).all()


@by_rows(
    ({"optimizer": "adam", "momentum": 0.5}, "optimizer=sgd"),
    ({"optimizer": "adam", "algorithm": "fedsgd"}, "optimizer=sgd"),
    ({"weight_decay": 0.1, "algorithm": "fedsgd"}, "no weight_decay"),
    ({"weight_decay": -0.1}, "weight_decay >= 0"),
    ({"proximal": float("inf")}, "proximal >= 0"),
)
def test_what_does_not_go_together_is_refused(how, words):
    with pytest.raises(ValueError, match=words):
        FederationSpec(**how)


def test_noise_in_each_step_needs_plain_sgd():
    from leakgauge.harness.core.contract import LocalRule

    with pytest.raises(ValueError, match="plain SGD with a defense that adds noise in each step"):
        plan_of(0.1, 2, optimizer="adam").under(LocalRule(clip=1.0), noise=1.0)


# attacks


def found(folder, model, how, lr, steps=1):
    """The SSIM of the best default attack on updates that plain torch made, and the flags of the training."""
    sent = [by_torch(model, *some(own), lr, steps, **how) for own in ROWS]
    asked = {"sends": "update", "lr": lr, "steps": steps, "limit": False, "progress": False, "minutes": 1.0, **how}
    run = leakgauge.inspect(model, "digits", sent, records=ROWS, folder=folder, **asked)
    assert not run.failures, [failure.message for failure in run.failures.values()]
    assert not [flag for record in run.trainings.values() for flag in record.flags if flag.code == "misfit"]
    scores = [
        estimate.value
        for result in run.results.values()
        for estimate in result.estimates
        if estimate.name == "ssim" and result.cell.attack.name != "prior"
    ]
    return max(scores)


@functools.cache
def plain(make, steps, folder):
    return found(folder, make(), {}, 0.1, steps)


@pytest.mark.matrix
@pytest.mark.ci("dense-proximal-3", "dense-momentum-1", "relu-both-1", "conv-decay-1")
@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("name", ["momentum", "decay", "proximal", "both"])
@by_rows(dense, relu, conv)
def test_records_behind_decay_and_proximal_steps_are_found_as_behind_sgd(make, name, steps, tmp_path, tmp_path_factory):
    base = plain(make, steps, tmp_path_factory.getbasetemp() / f"plain-{make.__name__}-{steps}")
    assert found(tmp_path, make(), HOW[name], 0.1, steps) >= base - 0.03


@pytest.mark.matrix
@pytest.mark.ci("dense-0.03-adam-decay", "relu-0.1-adam", "conv-0.09-adamw")
@pytest.mark.parametrize("name", ["adam", "adam-decay", "adamw"])
@by_rows((dense, 0.03), (relu, 0.1), (conv, 0.09))
def test_records_behind_a_step_of_adam_are_found(make, less, name, tmp_path, tmp_path_factory):
    base = plain(make, 1, tmp_path_factory.getbasetemp() / f"plain-{make.__name__}-adam")
    assert found(tmp_path, make(), HOW[name], 0.1) >= base - less


@by_rows(
    ({"optimizer": "adam", "sends": "update"}, 1, "steps of Adam"),
    ({"loss": "cross-entropy?weights=1,2,3,4,5,6,7,8,9,10"}, 2, "depends on the others"),
)
def test_no_limit_is_stated_where_its_slopes_are_others(how, batch, words, tmp_path):
    asked = {"attacks": ["map"], "victims": 2, "limit": True, "progress": False, "batch": batch, **how}
    run = leakgauge.inspect(dense(), "digits", folder=tmp_path, **asked)
    assert not run.failures
    (result,) = [result for result in run.results.values() if result.cell.attack.name == "map"]
    assert any(words in flag.message for flag in result.flags), [flag.message for flag in result.flags]
    assert not [estimate for estimate in result.estimates if "limit" in estimate.name and estimate.value is not None]


def test_a_module_with_another_optimizer_is_named_by_the_fit_check(tmp_path):
    sent = [by_torch(dense(), *some(own), 0.1, 2, **HOW["adam"]) for own in ROWS]
    asked = {"attacks": ["prior"], "limit": False, "progress": False}
    run = leakgauge.inspect(
        dense(), "digits", sent, records=ROWS, folder=tmp_path, sends="update", lr=0.1, steps=2, **asked
    )
    (record,) = run.trainings.values()
    assert [flag.code for flag in record.flags if flag.code == "misfit"] == ["misfit"]
    assert isinstance(dense(), nn.Module)
