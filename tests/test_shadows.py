"""Shadow federations, against federations written by hand and against the real loop."""

import dataclasses
from dataclasses import dataclass

import pytest
import torch

from leakgauge import Key, pack_float32, rng, unpack_float32
from leakgauge.attacks._members.shadowing import halves, local_plan, train_shadows
from leakgauge.defenses.gaussian import Gaussian
from leakgauge.defenses.none import NoDefense
from leakgauge.defenses.top_k import TopK
from leakgauge.defenses.udp_crd import UDPCRD
from leakgauge.harness.core.cell import FederationSpec
from leakgauge.harness.core.contract import Examples, Setting
from leakgauge.harness.federation.loop import Keep, make_setting, train
from leakgauge.harness.learn.batch import LocalPlan, Work, train_clients
from tests.by_rows import by_rows
from tests.doubles import Counting, Ruled, Summing, random_examples, small_task

TASK = small_task()
POOL = random_examples(60, seed=3)
KEY = Key(7)
PLAN = LocalPlan(gradient=False, steps=None, epochs=2, batch=4, lr=0.2, momentum=0.9)
SHADOWS = Setting(TASK.layout, 3, 3, 3, "update", 6, 0.2, 4, 10, 0.9)
INSIDE = halves(KEY.child("halves"), 4, 60, 30)
SPEC = FederationSpec(clients=3, rounds=3, batch=4, lr=0.2, momentum=0.9, local_epochs=2)


@dataclass(frozen=True)
class Hissing(Summing):
    """The channel adds noise, and so does the server."""

    def transmit(self, state, wires, links, channel):
        (wire,) = super().transmit(state, wires, links, channel)
        dim = links.setting.dim
        return [pack_float32(unpack_float32(wire, dim) + 0.1 * rng.normal(channel, (dim,)))]

    def decode(self, state, received, links, private):
        return super().decode(state, received, links, private) + 0.1 * rng.normal(private, (links.setting.dim,))


def go(setting=SHADOWS, inside=INSIDE, key=KEY, task=TASK, pool=POOL, defense=None):
    return train_shadows(task, setting, local_plan(setting), pool, inside, key, defense=defense)


def shares(run, clients=3):
    members = INSIDE[run].nonzero()[:, 0]
    dealt = members[torch.from_numpy(rng.permutation(KEY.child("run", run, "deal"), len(members)))]
    return [Examples(*(part[share.sort().values] for part in POOL)) for share in torch.tensor_split(dealt, clients)]


def setting_of(spec=SPEC, defense=None):
    clients = dict(enumerate(shares(0, spec.clients)))
    return make_setting(TASK, spec, clients, (defense or NoDefense()).local)


def assert_runs_as_the_loop(found, spec, defense):
    """The first runs equal the real federation under the run's key, on the run's records."""
    for run in range(2):
        clients = dict(enumerate(shares(run, spec.clients)))
        left = Examples(*(part[~INSIDE[run]] for part in POOL))
        wanted = train(TASK, spec, defense, clients, left, KEY.child("run", run), engine="dense", keep=Keep())
        torch.testing.assert_close(found[run], wanted.final, rtol=0, atol=1e-6)


def test_a_run_equals_a_federation_written_by_hand():
    found = go()
    for run in range(4):
        start = params = TASK.init(KEY.child("run", run, "init"))
        for number in range(3):
            total = torch.zeros_like(params)
            for k, data in enumerate(shares(run)):
                work = Work(data, KEY.child("run", run, "round", number, "client", k, "train"))
                total += len(data.y) / 30 * train_clients(TASK, params, [work], PLAN, "loop").updates[0]
            params = params + total
        torch.testing.assert_close(found[run], params, rtol=0, atol=1e-5)
        assert (found[run] - start).abs().max() > 0.01


@by_rows(
    {},
    {"participants": 2},
    {"algorithm": "fedsgd", "local_epochs": None, "momentum": 0.0},
    {"clients": 4, "local_epochs": None, "local_steps": 5},  # of 7 and 8 records
)
def test_a_run_equals_the_loop_with_the_same_key(changes):
    spec = dataclasses.replace(SPEC, **changes)
    assert_runs_as_the_loop(go(setting_of(spec)), spec, NoDefense())


@by_rows(
    (NoDefense(), False),
    (Counting(), False),  # checks its state and memory
    (Summing(), False),  # the clients are equally large
    (Hissing(), True),
    (Gaussian(noise_std=0.05), True),
    (TopK(feedback=True), True),
    (UDPCRD(zeta=10.0, beta=0.5), True),
    (Ruled(clip=0.1, full_batch=False, rounds=9), True),
    (Ruled(clip=1e6, full_batch=True, rounds=9), True),
    (Ruled(clip=1e6, full_batch=False, rounds=1), True),
    ids=["none", "state", "sum", "channel", "noise", "memory", "losses", "clip", "full batch", "stops"],
)
def test_a_defended_run_equals_the_loop_with_the_same_key(defense, differs):
    spec = dataclasses.replace(SPEC, participants=2)
    setting = setting_of(spec, defense)
    found = go(setting, defense=defense)
    assert_runs_as_the_loop(found, spec, defense)
    plain = go(setting_of(spec))
    assert differs != torch.allclose(found, plain, rtol=0, atol=1e-6)


def test_a_run_uses_only_its_own_records():
    other = Examples(torch.where(INSIDE[0][:, None, None, None], POOL.x, torch.nan), POOL.y)
    found = go(inside=INSIDE[:1], pool=other)
    assert torch.equal(found, go(inside=INSIDE[:1]))
    assert go(inside=INSIDE[1:2], pool=other).isnan().all()


@pytest.mark.parametrize("defense", [None, Gaussian(noise_std=0.05)])
def test_a_key_fixes_the_bits_and_another_key_changes_the_run(defense):
    first = go(defense=defense)
    assert torch.equal(first, go(defense=defense))
    assert (first - go(key=Key(8), defense=defense)).abs().max() > 0.01


@pytest.mark.parametrize("runs_at_once", [1, 3])
def test_a_run_does_not_depend_on_the_others(monkeypatch, runs_at_once):
    together = go()
    alone = go(inside=INSIDE[:1])
    torch.testing.assert_close(together[:1], alone, rtol=0, atol=1e-6)
    monkeypatch.setattr("leakgauge.attacks._members.shadowing._ENTRIES", runs_at_once * (30 * 64 + 6 * TASK.layout.dim))
    torch.testing.assert_close(go(), together, rtol=0, atol=1e-6)


@pytest.mark.parametrize(("model", "shape"), [("cnn2", (1, 16, 16)), ("svm", (1, 8, 8))])
def test_models_other_than_dense_stacks_train_too(model, shape, monkeypatch):
    task, pool = small_task(model, shape), random_examples(12, shape)
    inside = halves(KEY, 2, 12, 6)
    setting = Setting(task.layout, 2, 2, 2, "update", 2, 0.1, 0, 3, 0.5)
    found = go(setting, inside, task=task, pool=pool)
    monkeypatch.setattr("leakgauge.attacks._members.shadowing.choose_engine", lambda task, device: "vmap")
    torch.testing.assert_close(found, go(setting, inside, task=task, pool=pool))


def test_a_run_that_diverges_is_nan_and_does_not_affect_the_others():
    far = Examples(POOL.x.clone(), POOL.y)
    only = int((INSIDE[0] & ~INSIDE[2]).nonzero()[0, 0])
    far.x[only] = torch.inf
    for defense in (None, NoDefense()):
        found = go(inside=INSIDE[[0, 2]], pool=far, defense=defense)
        assert found[0].isnan().all()
        assert found[1].isfinite().all()


@pytest.mark.parametrize(("runs", "records", "inside"), [(6, 10, 5), (5, 10, 5), (4, 11, 5), (4, 10, 7), (3, 4, 0)])
def test_halves_are_exact_and_runs_of_a_pair_share_as_few_records_as_possible(runs, records, inside):
    taken = halves(KEY, runs, records, inside)
    assert taken.shape == (runs, records)
    assert (taken.sum(1) == inside).all()
    for first in range(0, runs - 1, 2):
        assert (taken[first] & taken[first + 1]).sum() == max(0, 2 * inside - records)
    if runs > 3 and inside > 0:
        assert not torch.equal(taken[0], taken[2])
    if runs % 2 == 0 and 2 * inside == records:
        assert (taken.sum(0) == runs // 2).all()
    assert torch.equal(taken[:2], halves(KEY, 2, records, inside))
    assert torch.equal(taken, halves(KEY, runs, records, inside))


def test_every_record_is_inside_with_the_same_probability():
    # alpha 1e-6 over 16 shares: 5.45 standard errors of 4,000 independent pairs. A probability off by 0.08 is at least
    # 4.8 standard errors beyond that limit: missed with probability under 1e-6
    taken = halves(KEY, 8000, 8, 3).double()
    off = (3 / 8 * 5 / 8 / 4000) ** 0.5
    for member in (taken[::2], taken[1::2]):
        assert (member.mean(0) - 3 / 8).abs().max() < 5.45 * off < 0.08 - 4.8 * off


SETTING = Setting(TASK.layout, 10, 6, 30, "update", 10, 0.1, 10, 50, 0.9)


@by_rows(
    ({}, None, 2),
    ({"steps": 7}, 7, None),
    ({"batch": 0, "steps": 3}, None, 3),
    ({"batch": 50, "steps": 2, "samples": 51}, None, 1),
    ({"sends": "gradient", "steps": 1, "batch": 50}, 1, None),
)
def test_a_plan_follows_the_setting(changes, steps, epochs):
    plan = local_plan(dataclasses.replace(SETTING, **changes))
    gradient, batch = changes.get("sends") == "gradient", changes.get("batch", 10)
    assert plan == LocalPlan(gradient, steps, epochs, batch, 0.1, 0.9)


def test_only_a_model_task_is_trained():
    with pytest.raises(TypeError, match="expected a ModelTask"):
        go(task=object())
