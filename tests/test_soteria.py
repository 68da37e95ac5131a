"""Soteria: which entries of a representation are pruned, the gradients that follow, and what an adversary sees."""

import dataclasses

import pytest
import torch
from torch.autograd.functional import jacobian

from leakgauge import Key, Links, Sender, Setting, rng
from leakgauge.attacks._engine.simulate import client_updates, plan_of
from leakgauge.attacks.lineup import Lineup
from leakgauge.defenses.soteria import Soteria
from leakgauge.harness.core.claim import Verdict, judge
from leakgauge.harness.core.codec import pack_float64
from leakgauge.harness.core.contract import Examples, LocalRule, Observation, Snapshot
from leakgauge.harness.core.threats import View
from leakgauge.harness.federation.aggregate import aggregated
from leakgauge.harness.learn import models
from leakgauge.harness.learn.batch import LocalPlan, Work, check_records, train_clients
from leakgauge.harness.learn.gradients import targets_of
from leakgauge.harness.learn.pruning import kept, slopes
from tests.baselines_case import encode, setting_of
from tests.doubles import function_task, random_examples, small_task
from tests.victims import encoded

KEY = Key(11)
SHAPES = {
    "linear": (1, 8, 8),
    "mlp-small": (1, 8, 8),
    "lenet-dlg": (1, 8, 8),
    "cnn-udp": (1, 2, 3),
    "cnn2": (1, 20, 20),
    "cnn3": (1, 22, 22),
}
every_model = pytest.mark.parametrize("name", SHAPES)


def task_of(name):
    """A model for inputs whose pixels have unlike scales."""
    model = models.build(name, SHAPES[name], 10)
    low, span = (rng.uniform(KEY.child(part), SHAPES[name], 0.5, 2.0) for part in ("low", "span"))
    return dataclasses.replace(small_task(), model=models.scaled(model, low, span))


def jacobian_norms(body, tensors, x, keep=None):
    """[m]: the norm of each entry's slope at one input, by automatic differentiation of the layers."""
    return jacobian(lambda x: body(tensors, x[None], keep)[0], x, vectorize=True).flatten(1).norm(dim=1)


def pruned_by_hand(task, params, x, y, rate, keep=None):
    """The last dense layer's gradient of a batch, record by record from the definition."""
    structure = task.structure
    body, total = structure.body, 0
    own = structure.split(params)
    weight, bias = own[len(body.layout.shapes) :][:2]
    for i in range(len(y)):
        mine = None if keep is None else [mask[i : i + 1] for mask in keep]
        (r,) = body(own[: len(body.layout.shapes)], x[i : i + 1], mine)
        leak = r.abs() / jacobian_norms(body, own, x[i], mine)
        worst = sorted((j for j in range(len(r)) if r[j] != 0), key=lambda j: -float(leak[j]))
        rest = r.clone()
        rest[worst[: round(rate * len(worst))]] = 0.0
        delta = torch.softmax(weight @ r + bias, 0)
        delta[y[i]] -= 1.0
        total = total + torch.outer(delta, rest) / len(y)
    return total


def test_of_numbers_that_reach_the_layer_unchanged_the_largest_are_pruned():
    body = small_task("linear", (1, 1, 5)).structure.body
    x = torch.tensor([[[[0.3, 0.0, 0.9, 0.1, 0.6]]], [[[0.2, 0.2, 0.0, 0.0, 0.0]]]])
    assert kept(body, 0.5, [], x, None).tolist() == [[1, 1, 0, 1, 0], [0, 1, 1, 1, 1]]  # of equal ones the first
    assert kept(body, 0.1, [], x, None).min() == 1  # a tenth of 4 rounds to 0


@every_model
def test_slopes_are_those_of_each_entry_at_each_record(name):
    task = task_of(name)
    body, x = task.structure.body, random_examples(3, SHAPES[name]).x
    own = task.structure.split(task.init(KEY))[: len(body.layout.shapes)]
    expected = torch.stack([jacobian_norms(body, own, one) for one in x])
    torch.testing.assert_close(slopes(body, own, x, None), expected, rtol=1e-4, atol=1e-7)


@every_model
def test_only_the_last_weight_has_another_gradient_and_it_is_that_of_the_pruned_records(name):
    task, rate = task_of(name), 0.6
    params, (x, y) = task.init(KEY), random_examples(4, SHAPES[name])
    pruned = task.pruned(rate)
    torch.testing.assert_close(pruned.outputs(params, x), task.outputs(params, x), rtol=0, atol=0)
    leaf = params.clone().requires_grad_()
    whole, ours = (task.layout.split(torch.autograd.grad(one.loss(leaf, x, y), leaf)[0]) for one in (task, pruned))
    place = task.layout.last_matrix
    for at, (one, other) in enumerate(zip(whole, ours, strict=True)):
        assert torch.equal(one, other) == (at != place)
    torch.testing.assert_close(ours[place], pruned_by_hand(task, params, x, y, rate), rtol=1e-4, atol=1e-6)


def test_dropout_masks_count_as_a_part_of_the_layers():
    task = task_of("cnn3")
    params, (x, y) = task.init(KEY), random_examples(3, SHAPES["cnn3"])
    keep = task.dropout_masks(KEY.child("dropout"), 3)
    leaf = params.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(task.pruned(0.4).loss(leaf, x, y, keep), leaf)
    found = task.layout.split(gradient)[task.layout.last_matrix]
    torch.testing.assert_close(found, pruned_by_hand(task, params, x, y, 0.4, keep), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("name", "engine"), [("mlp-small", "dense"), ("mlp-small", "vmap"), ("lenet-dlg", "vmap")])
@pytest.mark.parametrize("clip", [None, 0.05])
def test_all_engines_prune_alike(name, engine, clip):
    # in double precision: rounding may swap two nearly equal scores
    task = small_task(name)
    params, data = task.init(KEY).double(), random_examples(9).double()
    work = [Work(Examples(data.x[:n], data.y[:n]), KEY.child(n)) for n in (9, 5)]
    plan = LocalPlan(False, None, 2, 4, 0.5, 0.3, clip=clip, prune=0.6)
    found, expected = (train_clients(task, params, work, plan, how).updates for how in (engine, "loop"))
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)
    plain = train_clients(task, params, work, dataclasses.replace(plan, prune=0.0), "loop").updates
    assert not torch.allclose(found, plain, rtol=1e-2)


def test_a_model_whose_last_dense_layer_is_not_known_or_that_mixes_records_is_refused():
    rule = LocalRule(prune=0.5)
    for name in ("mlp-small", "resnet20"):
        check_records(small_task(name), rule)
    with pytest.raises(ValueError, match="mixes the records of a batch"):
        check_records(small_task("resnet20-bn"), rule)
    with pytest.raises(ValueError, match="is called as it is"):
        check_records(function_task((10, 64), lambda tensors, x, keep: x.flatten(1) @ tensors[0].T), rule)
    other = models.build("tests.torch_models:Turned", (1, 8, 8), 10)
    with pytest.raises(ValueError, match="last weight of two axes is that of its last dense layer"):
        check_records(dataclasses.replace(small_task(), model=other), rule)


def test_messages_are_plain_and_promise_nothing():
    update = rng.normal(Key(3), (200,))
    assert len(encode(Soteria(), update)[0]) == 4 * 200
    assert judge(Soteria().claim([None], setting_of(200))).verdict is Verdict.NOTHING_PROMISED
    assert Soteria(rate=0.3).local == LocalRule(prune=0.3)


def scores(task, sent, candidates, samples, exact=False, **how):
    """Of candidates [n, d], for one message of a client."""
    setting = Setting(task.layout, 4, 4, 1, "gradient", 1, 0.1, batch=0, samples=1)
    setting = dataclasses.replace(setting, **how)
    defense = Soteria()
    links = Links(setting, [Sender(0, samples)] * len(candidates), None)
    wire = defense.encode(None, None, sent, links.each()[0], Key(1))[0]
    method = defense.exact_likelihood if exact else defense.likelihood
    return method(None, [wire] * len(candidates), links)(candidates)


@pytest.mark.parametrize("name", ["mlp-small", "lenet-dlg"])
def test_the_likelihood_takes_updates_without_pruning_and_the_exact_one_takes_them_with_it(name):
    task = small_task(name)
    params = task.init(KEY)
    for images in (1, 4):
        x, y = random_examples(images)
        leaf = params.clone().requires_grad_()
        whole, sent = (
            torch.autograd.grad(one.loss(leaf, x, y), leaf)[0] for one in (task, task.pruned(Soteria().rate))
        )
        both = torch.stack([whole, sent])
        exact = scores(task, sent, both, images, exact=True)
        assert float(scores(task, sent, both, images)[0]) < 1.0 < 1e3 < float(exact[0])
        assert float(exact[1]) < 1.0
        # one record shows which columns were pruned, so the others count; several records do not
        place = task.layout.last_matrix
        start, size = sum(task.layout.sizes[:place]), task.layout.sizes[place]
        hit = int((sent[start : start + size] != 0).nonzero()[0]) + start
        for at, counts in ((hit, images == 1), (0, True)):
            moved = whole.clone()
            moved[at] += 1e-3
            assert (float(scores(task, sent, moved[None], images)) > 1e3) == counts


def test_an_aggregators_likelihood_leaves_the_pruned_weight_out_of_a_sum():
    task = small_task("mlp-small")
    leaf = task.init(KEY).requires_grad_()
    each = [random_examples(2, seed=seed) for seed in range(2)]
    whole = torch.stack([torch.autograd.grad(task.loss(leaf, *one), leaf)[0] for one in each])
    sent = torch.stack([torch.autograd.grad(task.pruned(0.6).loss(leaf, *one), leaf)[0] for one in each])
    defense, links = (
        aggregated(Soteria()),
        Links(setting_of(0, layout=task.layout, participants=2), [Sender(0, 2)], None),
    )
    likelihood = defense.likelihood(None, [pack_float64(sent.double().sum(0))], links)
    moved = whole.clone()
    moved[0, 0] += 1e-3
    assert float(likelihood(whole[None])) < 1.0 < 1e3 < float(likelihood(moved[None]))


def test_a_decay_of_the_weights_leaves_the_whole_layer_out():
    task = small_task("mlp-small")
    params, (x, y) = task.init(KEY), random_examples(1)
    leaf = params.clone().requires_grad_()
    whole, sent = (torch.autograd.grad(one.loss(leaf, x, y), leaf)[0] for one in (task, task.pruned(0.6)))
    update = -0.1 * (sent + 0.01 * params)
    found = scores(task, update, (-0.1 * (whole + 0.01 * params))[None], 1, sends="update", weight_decay=0.01)
    assert float(found) < 1.0


def trained(task, images, steps=1):
    """(setting, parameters, work, updates) of two clients under Soteria."""
    x, y = random_examples(2 * images, seed=5)
    params, setting = task.init(KEY), Setting(task.layout, 2, 2, 1, "update", steps, 0.1, 0, images)
    parts = zip(x.split(images), y.split(images), strict=True)
    work = [Work(Examples(*part), KEY.child(k)) for k, part in enumerate(parts)]
    plan = LocalPlan.of(setting).under(Soteria().local)
    return setting, params, work, train_clients(task, params, work, plan, "loop").updates


@pytest.mark.parametrize(("images", "steps"), [(1, 1), (3, 1), (3, 3)])
def test_an_attack_simulates_the_steps_as_clients_take_them(images, steps):
    task = small_task("lenet-dlg")
    setting, params, work, updates = trained(task, images, steps)
    plan = plan_of(setting, setting.lr, steps, Soteria())
    for client, update in zip(work, updates, strict=True):
        y = targets_of(task, client.data.y, params.dtype)
        (found,) = client_updates(task, params, client.data.x[None], y[None], plan)
        torch.testing.assert_close(found, update, rtol=1e-4, atol=1e-7)
        unaware = client_updates(task, params, client.data.x[None], y[None], plan_of(setting, setting.lr, steps))
        assert not torch.allclose(unaware[0], update, rtol=1e-2, atol=1e-6)


def test_a_lineup_names_the_record_behind_each_message():
    task = small_task("lenet-dlg")
    setting, params, work, updates = trained(task, 1)
    pool = random_examples(60, seed=6)
    lineups = [Examples(torch.cat([own.data.x, pool.x[k:40:10]]), pool.y[[k] * 5]) for k, own in enumerate(work)]
    messages = encoded(setting, Soteria(), updates, [1, 1], KEY)
    known = {"auxiliary": Examples(pool.x[40:], pool.y[40:]), "lineups": tuple((each,) for each in lineups)}
    model = Snapshot(0, params, None)
    seen = Observation(View.parse("server+lineup"), setting, task, Soteria(), 0.1, messages, model, **known)
    named = Lineup(references=2).run(seen, KEY)
    assert named.exact
    assert [int(record.scores.argmax()) for (record,) in named.records] == [0, 0]
