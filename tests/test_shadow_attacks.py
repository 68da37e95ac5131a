"""Membership attacks on models, with and without shadow models, in a federation that has overfitted."""

import dataclasses
import functools
import math
from pathlib import Path

import pytest
import torch

from leakgauge import Key, rng
from leakgauge.attacks._members.shadowing import outputs, shadow
from leakgauge.attacks.lira import LiRA
from leakgauge.attacks.loss_trajectory import LossTrajectory
from leakgauge.attacks.rmia import RMIA
from leakgauge.attacks.shadow_classifier import ShadowClassifier
from leakgauge.defenses.gaussian import Gaussian
from leakgauge.defenses.none import NoDefense
from leakgauge.harness.core.cell import FederationSpec
from leakgauge.harness.core.contract import Examples, Observation, Snapshot
from leakgauge.harness.core.stats import auc
from leakgauge.harness.core.threats import View, require
from leakgauge.harness.data import load
from leakgauge.harness.federation.loop import Keep, train
from leakgauge.harness.learn.models import build
from leakgauge.harness.learn.tasks import ModelTask
from tests.by_rows import by_rows
from tests.doubles import small_task

KEY = Key(0)
TASK = ModelTask(build("mlp", (1, 8, 8), 10))
CLIENTS, RECORDS, ROUNDS = 2, 400, 3
SPEC = FederationSpec(
    clients=CLIENTS, rounds=ROUNDS, local_epochs=9, batch=40, lr=0.1, momentum=0.9, evaluate_every=ROUNDS
)
ATTACKS = {
    "lira": LiRA(shadows=4),
    "lira-offline": LiRA(mode="offline", shadows=4),
    "rmia": RMIA(),
    "rmia-offline": RMIA(mode="offline"),
    "shadow-classifier": ShadowClassifier(shadows=4),
    "loss-trajectory": LossTrajectory(),
}
every = pytest.mark.parametrize("attack", ATTACKS.values(), ids=ATTACKS)
shadowed = pytest.mark.parametrize("attack", list(ATTACKS.values())[:5], ids=list(ATTACKS)[:5])


@functools.cache
def digits():
    """1797 records in random order; one in five has a wrong label, which only its own model can know."""
    data = load("digits", Path())
    x, y = (torch.cat(parts) for parts in zip(data.train, data.test, strict=True))
    order = torch.from_numpy(rng.permutation(KEY.child("order"), len(y)))
    x, y = x[order], y[order]
    wrong = torch.from_numpy(rng.subset(KEY.child("wrong"), len(y), len(y) // 5))
    y[wrong] = (y[wrong] + 1 + torch.from_numpy(rng.integers(KEY.child("shift"), len(wrong), 9))) % 10
    return Examples(x, y)


def rows(part):
    return Examples(digits().x[part], digits().y[part])


@functools.cache
def trained(first):
    """A federation on the 400 records from `first` on."""
    size = RECORDS // CLIENTS
    clients = {k: rows(slice(first + k * size, first + (k + 1) * size)) for k in range(CLIENTS)}
    keep = Keep(models=frozenset(range(1, ROUNDS)))
    key = KEY.child("training")
    return train(TASK, SPEC, NoDefense(), clients, rows(slice(1600, None)), key, engine="dense", keep=keep)


def observed(first=0, defense=None, auxiliary=slice(800, 1600)):
    """Records 0 to 799 are the candidates; the first half are members if the federation trained on them."""
    training = trained(first)
    return Observation(
        View.parse("participant"),
        training.setting,
        TASK,
        defense or NoDefense(),
        SPEC.lr,
        models=tuple(Snapshot(number, model, None) for number, model in training.models.items()),
        final=training.final,
        auxiliary=rows(auxiliary),
        candidates=rows(slice(0, 800)),
    )


@functools.cache
def area(name, first=0):
    """AUC of an attack on the federation from `first` on."""
    seen = observed() if first == 0 else observed(first, auxiliary=slice(800, 1000))
    scores = ATTACKS[name].run(seen, KEY).scores
    assert scores.isfinite().all()
    return auc(scores[:400].numpy(), scores[400:].numpy()).value


named = pytest.mark.parametrize("name", ATTACKS)


@named
def test_members_of_an_overfitted_federation_are_found(name):
    # 400 records per side give a standard error of 0.02
    assert area(name) > 0.55


def test_comparing_a_record_with_itself_under_other_models_helps():
    for name in ("lira", "rmia"):
        assert area(name) > area("loss-trajectory") + 0.02


@named
def test_records_that_no_model_saw_look_alike(name):
    assert abs(area(name, 1000) - 0.5) < 0.08


def brief(seen, **changes):
    """The observation of a federation of one step, for tests that do not depend on what the shadows learn."""
    setting = dataclasses.replace(seen.setting, **({"rounds": 1, "steps": 1} | changes))
    return dataclasses.replace(seen, setting=setting)


@shadowed
def test_another_key_trains_other_shadows_and_the_same_key_the_same(attack):
    seen = brief(observed())
    first, second, other = (attack.run(seen, key).scores for key in (KEY, KEY, KEY.child("other")))
    assert torch.equal(first, second)
    assert not torch.equal(first, other)


def test_offline_reordered_candidates_have_reordered_scores():
    seen = brief(observed())
    order = torch.from_numpy(rng.permutation(KEY.child("candidates"), 800))
    moved = dataclasses.replace(seen, candidates=Examples(*(each[order] for each in seen.candidates)))
    for name in ("lira-offline", "rmia-offline", "shadow-classifier", "loss-trajectory"):
        plain, other = (ATTACKS[name].run(each, KEY).scores for each in (seen, moved))
        assert torch.allclose(plain[order], other, rtol=1e-3, atol=1e-4)
    # online, a record's place decides which shadows train on it
    plain, other = (ATTACKS["lira"].run(each, KEY).scores for each in (seen, moved))
    assert not torch.allclose(plain[order], other, rtol=1e-3, atol=1e-4)


@every
def test_a_model_that_diverged_reveals_no_member(attack):
    seen = brief(observed())
    broken = torch.full_like(seen.final, math.nan)
    snapshots = tuple(Snapshot(snapshot.round, broken, None) for snapshot in seen.models)
    scores = attack.run(dataclasses.replace(seen, final=broken, models=snapshots), KEY).scores
    assert scores.isfinite().all()
    assert len(set(scores.tolist())) == 1
    for scale in (1e4, 1e18):  # the outputs are the largest finite numbers, and beyond
        huge = scale * seen.final
        scores = attack.run(dataclasses.replace(seen, final=huge, models=(Snapshot(1, huge, None),)), KEY).scores
        assert scores.isfinite().all()


@pytest.mark.parametrize("broken", [0, 1])
def test_a_round_whose_model_diverged_is_left_out(broken):
    seen = observed()
    one, other = seen.models
    wild = tuple(s._replace(params=s.params * math.nan) if i == broken else s for i, s in enumerate(seen.models))
    alone = (other, one)[broken : broken + 1]
    plain, left = (LossTrajectory().run(dataclasses.replace(seen, models=m), KEY).scores for m in (alone, wild))
    assert torch.equal(plain, left)


def test_a_pool_holds_all_candidates_and_half_of_it_is_as_large_as_the_federation():
    seen = with_few()
    made = shadow(seen, KEY, runs=4, online=True, simulate=False)
    assert torch.equal(made.pool.x[:100], seen.candidates.x)
    assert (len(made.pool.y), len(made.aside.y)) == (800, 100)
    assert made.inside.sum(1).tolist() == [400] * 4
    assert torch.equal(made.candidates, made.inside[:, :100])
    assert 0.3 < made.candidates.double().mean() < 0.7
    together = torch.cat([made.pool.x[100:], made.aside.x]).flatten(1).sum(1)
    assert torch.equal(together.sort().values, seen.auxiliary.x.flatten(1).sum(1).sort().values)


def with_few(auxiliary=slice(800, 1600)):
    """An observation with fewer candidates than a pool holds, and almost no training."""
    seen = brief(observed(auxiliary=auxiliary))
    return dataclasses.replace(seen, candidates=Examples(*(each[350:450] for each in seen.candidates)))


def test_offline_no_shadow_sees_a_candidate():
    made = shadow(with_few(), KEY, runs=3, online=False, simulate=False)
    assert not made.candidates.any()
    assert made.candidates.shape == (3, 100)
    assert (len(made.pool.y), len(made.aside.y)) == (800, 0)
    assert made.inside.sum(1).tolist() == [400] * 3


def test_more_candidates_than_a_pool_are_all_in_it():
    seen = with_few()
    seen = dataclasses.replace(seen, candidates=Examples(*(torch.cat([each] * 9) for each in seen.candidates)))
    made = shadow(seen, KEY, runs=2, online=True, simulate=False)
    assert (len(made.pool.y), len(made.aside.y)) == (900, 800)
    assert made.inside.sum(1).tolist() == [400] * 2


@by_rows((200, True, 150), (200, False, 100), (4, False, 2), (3, False, 2))
def test_with_little_auxiliary_data_a_shadow_trains_on_half_of_it(auxiliary, online, part):
    made = shadow(with_few(slice(800, 800 + auxiliary)), KEY, runs=2, online=online, simulate=False)
    assert made.inside.sum(1).tolist() == [part] * 2
    assert len(made.aside.y) == 0


def test_too_few_records_for_a_shadow_federation_are_refused():
    with pytest.raises(ValueError, match="expected more than 2 records, one per client, to train shadow models, got 2"):
        shadow(with_few(slice(800, 802)), KEY, runs=2, online=False, simulate=False)


def test_simulated_shadows_pass_through_the_defense():
    seen = dataclasses.replace(with_few(), defense=Gaussian(clip=0.01, noise_std=1e-6))
    plain, simulated = (shadow(seen, KEY, runs=1, online=True, simulate=how).models[0] for how in (False, True))
    start = TASK.init(KEY.child("train", "run", 0, "init"))
    assert (plain - start).norm() > 0.03
    assert (simulated - start).norm() < 0.0101  # the clip, and a little noise


def test_an_attack_whose_shadows_all_diverged_is_refused():
    wild = brief(observed(), lr=1e38, rounds=3)
    with pytest.raises(ValueError, match="expected at least 1 shadow model that did not diverge, got 0 of 2"):
        LiRA(shadows=2).run(wild, KEY)


def test_outputs_are_those_of_each_model_on_each_record():
    models = torch.stack([TASK.init(KEY.child(i)) for i in range(3)])
    x = rows(slice(0, 1100)).x
    found = outputs(TASK, models, x)
    assert found.shape == (3, 1100, 10)
    assert torch.allclose(found[2, 1050:], TASK.outputs(models[2], x[1050:]), atol=1e-5)


@every
def test_it_needs_no_message(attack):
    threat = "participant" if isinstance(attack, LossTrajectory) else "public"
    require(attack.needs, "x", View.parse(threat))


@shadowed
def test_it_is_aware_of_the_defense_if_its_shadows_pass_through_it(attack):
    assert not attack.aware
    assert dataclasses.replace(attack, simulate=True).aware


def test_a_trajectory_is_the_mean_over_the_models():
    seen = observed()
    task, (x, y) = seen.task, seen.candidates
    scores = torch.stack([task.outputs(snapshot.params, x) for snapshot in seen.models]).double().log_softmax(-1)
    p = scores.gather(-1, y.expand(len(seen.models), -1)[..., None])[..., 0]
    assert torch.allclose(LossTrajectory().run(seen, KEY).scores, p.mean(0), atol=1e-4)
    odds = LossTrajectory("confidence").run(seen, KEY).scores
    sure = p.exp().amax(0) < 0.999  # beyond, 1 - p loses its digits
    assert torch.allclose(odds[sure], (p - torch.log(-torch.expm1(p))).mean(0)[sure], atol=1e-3)


def test_a_trajectory_without_models_is_refused():
    with pytest.raises(ValueError, match="expected the model of at least one round, got none"):
        LossTrajectory().run(dataclasses.replace(observed(), models=()), KEY)


def test_a_regression_has_no_log_odds():
    task = small_task("linear-regression")
    seen = dataclasses.replace(observed(), task=task, models=(Snapshot(0, task.init(KEY), None),))
    with pytest.raises(ValueError, match="at least 2 classes, got a regression"):
        LossTrajectory("confidence").run(seen, KEY)
