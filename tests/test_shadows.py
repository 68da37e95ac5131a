import dataclasses
from dataclasses import dataclass

import pytest
import torch

from leakgauge.attacks._engine.shadows import Recipe, halves, train_shadows
from leakgauge.defenses.gaussian import Gaussian
from leakgauge.defenses.none import NoDefense
from leakgauge.defenses.top_k import TopK
from leakgauge.defenses.udp_crd import UDPCRD
from leakgauge.harness.core import rng
from leakgauge.harness.core.cell import FederationSpec
from leakgauge.harness.core.codec import pack_float32, unpack_float32
from leakgauge.harness.core.contract import (
    Examples,
    Setting,
)
from leakgauge.harness.core.rng import Key
from leakgauge.harness.federation.loop import Keep, make_setting, train
from leakgauge.harness.learn.batch import LocalPlan, Work, train_clients
from tests.doubles import Counting, Ruled, Summing, random_examples, small_task

TASK = small_task()
POOL = random_examples(60, seed=3)
KEY = Key(7)
PLAN = LocalPlan(gradient=False, steps=None, epochs=2, batch=4, lr=0.2, momentum=0.9)
RECIPE = Recipe(clients=3, rounds=3, plan=PLAN)
INSIDE = halves(KEY.child("halves"), 4, 60, 30)
SPEC = FederationSpec(clients=3, rounds=3, batch=4, lr=0.2, momentum=0.9, local_epochs=2)


@dataclass(frozen=True)
class Hissing(Summing):
    """Its channel adds noise, and so does its server."""

    def transmit(self, state, wires, links, channel):
        (heard,) = super().transmit(state, wires, links, channel)
        return [
            pack_float32(unpack_float32(heard, links.setting.dim) + 0.1 * rng.normal(channel, (links.setting.dim,)))
        ]

    def decode(self, state, received, links, private):
        mean = super().decode(state, received, links, private)
        return mean + 0.1 * rng.normal(private, (links.setting.dim,))


def go(recipe=RECIPE, inside=INSIDE, key=KEY, task=TASK, pool=POOL, **how):
    return train_shadows(task, recipe, pool, inside, key, **how)


def hands(run, clients=3, inside=INSIDE):
    """What the clients of a run hold."""
    members = inside[run].nonzero()[:, 0]
    dealt = members[torch.from_numpy(rng.permutation(KEY.child("run", run, "deal"), len(members)))]
    return [Examples(*(part[hand.sort().values] for part in POOL)) for hand in torch.tensor_split(dealt, clients)]


def setting_of(spec=SPEC, defense=None, run=0, inside=INSIDE):
    clients = dict(enumerate(hands(run, spec.clients, inside)))
    return make_setting(TASK, spec, clients, (defense or NoDefense()).local)


def by_the_loop(spec, run, defense=None, engine="dense", keep=()):
    """The real federation under the run's key, on the run's records."""
    clients = dict(enumerate(hands(run, spec.clients)))
    left = Examples(*(part[~INSIDE[run]] for part in POOL))
    kept = Keep(frozenset(keep))
    return train(TASK, spec, defense or NoDefense(), clients, left, KEY.child("run", run), engine=engine, keep=kept)


def test_a_run_is_a_federation_written_by_hand():
    found = go(keep=[0, 2])
    for run in range(4):
        params = TASK.init(KEY.child("run", run, "init"))
        for number in range(3):
            if number in (0, 2):
                torch.testing.assert_close(found.models[number][run], params, rtol=0, atol=1e-5)
            total = torch.zeros_like(params)
            for k, data in enumerate(hands(run)):
                work = Work(data, KEY.child("run", run, "round", number, "client", k, "train"))
                total += len(data.y) / 30 * train_clients(TASK, params, [work], PLAN, "loop").updates[0]
            params = params + total
        torch.testing.assert_close(found.final[run], params, rtol=0, atol=1e-5)
    assert sorted(found.models) == [0, 2]
    assert (found.final - found.models[0]).abs().max() > 0.01


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"participants": 2},
        {"algorithm": "fedsgd", "local_epochs": None, "momentum": 0.0},
        {"clients": 4, "local_epochs": None, "local_steps": 5},  # of 7 and 8 records
    ],
)
def test_a_run_is_what_the_loop_does_with_the_same_key(changes):
    spec = dataclasses.replace(SPEC, **changes)
    recipe = Recipe.of(setting_of(spec), 30)
    found = go(recipe, keep=[1])
    for run in range(2):
        wanted = by_the_loop(spec, run, keep=[1])
        torch.testing.assert_close(found.models[1][run], wanted.models[1], rtol=0, atol=1e-6)
        torch.testing.assert_close(found.final[run], wanted.final, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("defense", "differs"),
    [
        (NoDefense(), False),
        (Counting(), False),  # asserts its state and its memory
        (Summing(), False),  # of equally large clients
        (Hissing(), True),
        (Gaussian(noise_std=0.05), True),
        (TopK(feedback=True), True),  # remembers
        (UDPCRD(zeta=10.0, beta=0.5), True),  # looks at losses
        (Ruled(clip=0.1, full_batch=False, rounds=9), True),
        (Ruled(clip=1e6, full_batch=True, rounds=9), True),
        (Ruled(clip=1e6, full_batch=False, rounds=1), True),
    ],
    ids=["none", "state", "sum", "channel", "noise", "memory", "losses", "clip", "full batch", "stops"],
)
def test_a_defended_run_is_what_the_loop_does_with_the_same_key(defense, differs):
    spec = dataclasses.replace(SPEC, participants=2)
    setting = setting_of(spec, defense)
    found = go(Recipe.of(setting, 30), defense=defense, setting=setting, keep=[2])
    for run in range(2):
        wanted = by_the_loop(spec, run, defense)
        torch.testing.assert_close(found.final[run], wanted.final, rtol=0, atol=1e-6)
    plain = go(Recipe.of(setting_of(spec), 30))
    assert differs != torch.allclose(found.final, plain.final, rtol=0, atol=1e-6)
    if isinstance(defense, Ruled) and defense.rounds == 1:
        assert torch.equal(found.models[2], found.final)


def test_a_run_uses_the_records_that_are_inside_and_no_others():
    other = Examples(torch.where(INSIDE[0][:, None, None, None], POOL.x, torch.nan), POOL.y)
    found = go(inside=INSIDE[:1], pool=other)
    assert torch.equal(found.final, go(inside=INSIDE[:1]).final)
    assert go(inside=INSIDE[1:2], pool=other).final.isnan().all()


@pytest.mark.parametrize("defense", [None, Gaussian(noise_std=0.05)])
def test_twice_the_same_bits_and_another_key_is_another_run(defense):
    how = {"defense": defense, "setting": setting_of()}
    first = go(**how)
    assert torch.equal(first.final, go(**how).final)
    assert (first.final - go(key=Key(8), **how).final).abs().max() > 0.01


@pytest.mark.parametrize("runs_at_once", [1, 3])
def test_a_run_does_not_hang_on_those_beside_it(monkeypatch, runs_at_once):
    together = go(keep=[1])
    alone = go(inside=INSIDE[:1])
    torch.testing.assert_close(together.final[:1], alone.final, rtol=0, atol=1e-6)
    monkeypatch.setattr("leakgauge.attacks._engine.shadows._ENTRIES", runs_at_once * (30 * 64 + 6 * TASK.layout.dim))
    apart = go(keep=[1])
    torch.testing.assert_close(apart.final, together.final, rtol=0, atol=1e-6)
    torch.testing.assert_close(apart.models[1], together.models[1], rtol=0, atol=1e-6)


def test_runs_start_apart_or_where_they_are_told():
    apart = go(keep=[0]).models[0]
    assert all(torch.equal(apart[i], TASK.init(KEY.child("run", i, "init"))) for i in range(4))
    start = TASK.init(Key(1))
    told = go(keep=[0], start=start)
    assert torch.equal(told.models[0], start.expand(4, -1))
    assert (told.final[0] - told.final[1]).abs().max() > 0.01
    assert torch.equal(start, TASK.init(Key(1)))


@pytest.mark.parametrize(("model", "shape"), [("cnn2", (1, 16, 16)), ("svm", (1, 8, 8))])
def test_models_that_are_no_dense_stack_train_too(model, shape):
    task, pool = small_task(model, shape), random_examples(12, shape)
    inside = halves(KEY, 2, 12, 6)
    recipe = Recipe(2, 2, LocalPlan(False, 2, None, 0, 0.1, 0.5))
    found = go(recipe, inside, task=task, pool=pool)
    assert torch.equal(found.final, go(recipe, inside, task=task, pool=pool, engine="loop").final)
    torch.testing.assert_close(found.final, go(recipe, inside, task=task, pool=pool, engine="vmap").final)


def test_a_run_that_diverges_is_nan_and_leaves_the_others_alone():
    far = Examples(POOL.x.clone(), POOL.y)
    only = int((INSIDE[0] & ~INSIDE[2]).nonzero()[0, 0])
    far.x[only] = torch.inf
    for how in ({}, {"defense": NoDefense(), "setting": setting_of()}):
        found = go(inside=INSIDE[[0, 2]], pool=far, keep=[0, 2], **how)
        assert found.final[0].isnan().all()
        assert found.models[2][0].isnan().all()
        assert found.models[0].isfinite().all()
        assert found.final[1].isfinite().all()


@pytest.mark.parametrize(("runs", "records", "inside"), [(6, 10, 5), (5, 10, 5), (4, 11, 5), (4, 10, 7), (3, 4, 0)])
def test_halves_are_exact_and_the_second_of_a_pair_takes_what_the_first_left(runs, records, inside):
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


def test_every_record_has_the_same_chance_to_be_inside():
    # alpha 1e-6 over 16 shares: 5.45 standard errors of 4,000 independent pairs. A chance off by 0.08 is 4.8 of them
    # further away: missed with probability under 1e-6
    taken = halves(KEY, 8000, 8, 3).double()
    off = (3 / 8 * 5 / 8 / 4000) ** 0.5
    for member in (taken[::2], taken[1::2]):
        assert (member.mean(0) - 3 / 8).abs().max() < 5.45 * off < 0.08 - 4.8 * off


SETTING = Setting(TASK.layout, 10, 6, 30, "update", 10, 0.1, 10, 50, 0.9)


@pytest.mark.parametrize(
    ("changes", "records", "steps", "epochs"),
    [
        ({}, 500, None, 2),
        ({}, 250, None, 2),  # fewer records: as many passes
        ({"steps": 7}, 500, 7, None),
        ({"batch": 0, "steps": 3}, 500, None, 3),
        ({"batch": 50, "steps": 2, "samples": 50}, 509, None, 1),  # the clients with 51 make two steps
        ({"sends": "gradient", "steps": 1, "batch": 50}, 500, 1, None),
    ],
)
def test_a_recipe_is_what_the_setting_says(changes, records, steps, epochs):
    recipe = Recipe.of(dataclasses.replace(SETTING, **changes), records)
    assert (recipe.clients, recipe.participants, recipe.rounds) == (10, 6, 30)
    gradient, batch = changes.get("sends") == "gradient", changes.get("batch", 10)
    assert recipe.plan == LocalPlan(gradient, steps, epochs, batch, 0.1, 0.9)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"inside": INSIDE[:, 1:]}, r"expected inside \[runs, 60\] bool, got \[4, 59\] bool"),
        ({"inside": INSIDE[:0]}, r"got \[0, 60\] bool"),
        ({"inside": INSIDE.int()}, r"got \[4, 60\] int32"),
        ({"inside": INSIDE & (torch.arange(60) < 2)}, "a record for each of 3 clients or more, got a run of"),
        ({"keep": [0, 3]}, r"expected rounds 0 to 2 to keep, got \[3\]"),
        ({"defense": NoDefense()}, "expected a setting beside the defense"),
        ({"defense": NoDefense(), "setting": SETTING}, "3 clients and 3 participants, got clients=10, participants=6"),
    ],
)
def test_what_makes_no_federation_is_refused(how, message):
    with pytest.raises(ValueError, match=message):
        go(**how)


def test_other_mistakes_are_refused():
    with pytest.raises(ValueError, match="expected 0 <= inside <= records=4, got inside=5"):
        halves(KEY, 2, 4, 5)
    with pytest.raises(ValueError, match="each of 10 clients or more, got records=9"):
        Recipe.of(SETTING, 9)
    with pytest.raises(TypeError, match="expected a ModelTask"):
        go(task=object())
