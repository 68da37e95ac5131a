"""The suite of checks on every attack in the registry, then what gradient matching, the priors and the loss find."""

import dataclasses
import math
from pathlib import Path

import pytest
import torch
from torch.nn.functional import one_hot

from leakgauge import Layout, pack_float32, rng
from leakgauge.attacks._engine import reconstruct as _matching
from leakgauge.attacks._engine.labels import restore
from leakgauge.attacks.dlg import DLG
from leakgauge.attacks.idlg import IDLG
from leakgauge.attacks.membership_loss import MembershipLoss
from leakgauge.attacks.prior import Prior
from leakgauge.defenses.gaussian import Gaussian
from leakgauge.harness.core.contract import Examples, Sender
from leakgauge.harness.data.embedded import photos
from leakgauge.harness.federation import registry
from leakgauge.harness.learn.gradients import gradients
from leakgauge.harness.learn.models import build
from leakgauge.harness.learn.tasks import ModelTask
from leakgauge.testing import Effort, checks_of
from tests.by_rows import by_rows
from tests.doubles import function_task, small_task
from tests.victims import KEY, LENET, SHAPE, Case, Says, make, only

CHEAP = {name: {"evaluations": 30} for name in ("dlg", "idlg", "map", "inverting-gradients")}
CHEAP |= {"learned": {"samples": 60, "epochs": 2}, "regressed": {"samples": 60}, "tokens": {"sweeps": 1}}
"""Parameters that make the checks fast."""

every_attack = pytest.mark.parametrize("attack", registry.classes("attack"))
both = pytest.mark.parametrize("attack", [DLG(), IDLG()], ids=["dlg", "idlg"])


@pytest.mark.table(3)
@pytest.mark.parametrize(("name", "check"), checks_of("attack", Effort(victims=2)))
@every_attack
@pytest.mark.ci(without=("property-threats-check6",))
def test_a_shipped_attack_passes_every_check(attack, name, check):
    check(registry.build("attack", attack, CHEAP.get(attack, {})))


@both
def test_an_attack_is_aware_of_the_defense_if_it_uses_its_likelihood(attack):
    assert not attack.aware
    assert dataclasses.replace(attack, objective="likelihood").aware


@both
@pytest.mark.parametrize("images", [1, 2])
def test_the_images_behind_a_bare_gradient_are_found(attack, images):
    case = make(images=images)
    guesses = attack.run(only(case.seen, attack.needs), KEY).guesses
    assert (case.mse(guesses) < 1e-4).all()
    for guess, labels in zip(guesses, case.seen.labels, strict=True):
        assert torch.equal(guess.y.sort().values, labels)
        assert guess.failure == ""
        assert guess.evaluations <= 1200
        assert guess.objective < 1e-5


def test_labels_of_dlg_come_from_what_was_found_and_not_from_the_start():
    # one public tool returned the labels of its start value, with the accuracy of chance
    case, attack = make(n=6, labels=torch.full((6, 1), 7)), DLG()
    guesses = attack.run(case.seen, KEY).guesses
    started = [rng.normal(KEY.child("start", i, 0).child("labels"), (1, 10)).argmax().item() for i in range(6)]
    assert started != [7] * 6
    assert [guess.y.item() for guess in guesses] == [7] * 6


@both
def test_an_update_of_one_step_leaks_what_its_gradient_leaks(attack):
    case = make(sends="update", lr=0.25)
    assert (case.mse(attack.run(case.seen, KEY).guesses) < 1e-4).all()


def test_an_update_is_divided_by_the_steps_of_its_own_message():
    case = make(sends="update", lr=0.25, steps=4)
    assert case.seen.setting.steps == 4
    assert (case.mse(IDLG().run(case.seen, KEY).guesses) < 1e-4).all()
    one_step = tuple(message._replace(steps=1) for message in case.seen.messages)
    wrong = IDLG(restarts=1, evaluations=300).run(dataclasses.replace(case.seen, messages=one_step), KEY)
    assert (case.mse(wrong.guesses) > 1e-4).all()


@pytest.mark.parametrize("sends", ["gradient", "update"])
def test_the_likelihood_of_no_defense_finds_what_the_distance_finds(sends):
    case = make(n=10, sends=sends)  # more victims than one chunk
    assert (case.mse(IDLG(objective="likelihood").run(case.seen, KEY).guesses) < 1e-4).all()


@pytest.mark.matrix
def test_the_likelihood_uses_a_clip_that_the_distance_ignores():
    case = make(n=2, defense=Gaussian(clip=0.5, noise_std=1e-5))
    attacks = [IDLG(restarts=1, evaluations=400, objective=how) for how in ("likelihood", "l2")]
    aware, naive = (case.mse(attack.run(case.seen, KEY).guesses) for attack in attacks)
    assert (aware < 1e-2).all()
    assert (aware < naive / 10).all()


@pytest.mark.matrix
def test_a_search_that_stalls_at_single_precision_continues_in_double(monkeypatch):
    monkeypatch.setattr(_matching, "_TOLERANCE", 1e-16)  # beyond single precision
    case, found = make(n=2), []
    for near in (0.0, 1e-5):
        monkeypatch.setattr(_matching, "_NEAR", near)
        found.append(DLG(restarts=1, evaluations=500).run(case.seen, KEY).guesses)
    for single, double in zip(*found, strict=True):
        assert double.objective <= 1.1 * single.objective  # the target itself is single precision
        assert single.evaluations < double.evaluations <= 500
        assert double.x.dtype == torch.float32


def test_a_noisy_target_ends_early():
    case = make(defense=Gaussian(clip=1e3, noise_std=0.03))
    for guess in IDLG(restarts=1).run(case.seen, KEY).guesses:
        assert guess.failure == ""
        assert guess.evaluations <= 2000


def test_the_restart_with_the_lowest_objective_is_returned():
    case = make(n=6)
    one, three = (IDLG(restarts=n, evaluations=15).run(case.seen, KEY).guesses for n in (1, 3))
    assert all(b.objective <= a.objective for a, b in zip(one, three, strict=True))
    assert any(b.objective < a.objective for a, b in zip(one, three, strict=True))
    assert [guess.evaluations for guess in three] == [45] * 6


def test_an_explained_target_is_not_started_again():
    case = make()
    few, many = (IDLG(restarts=n).run(case.seen, KEY).guesses for n in (1, 5))
    assert [guess.evaluations for guess in few] == [guess.evaluations for guess in many]


def test_a_victim_is_attacked_the_same_beside_others():
    case = make(n=4)
    alone = dataclasses.replace(case.seen, messages=case.seen.messages[2:3])
    together = IDLG().run(case.seen, KEY).guesses[2]
    assert torch.allclose(IDLG().run(alone, KEY).guesses[0].x, together.x, atol=1e-2)


def test_victims_with_unequal_numbers_of_images_keep_their_order():
    one, two = make(n=1), make(n=1, images=2)
    messages = (two.seen.messages[0], one.seen.messages[0]._replace(sender=Sender(5, 8)))
    guesses = IDLG().run(dataclasses.replace(two.seen, messages=messages), KEY).guesses
    assert [len(guess.x) for guess in guesses] == [2, 1]
    assert two.mse(guesses[:1]).item() < 1e-4
    assert one.mse(guesses[1:]).item() < 1e-4


@both
def test_a_victim_whose_restarts_all_diverged_is_a_failure(attack):
    attack = dataclasses.replace(attack, objective="likelihood")
    guesses = attack.run(make(defense=Says(1.0)).seen, KEY).guesses
    assert [guess.failure for guess in guesses] == ["no restart had a finite objective"] * 3
    assert all(guess.x.isfinite().all() for guess in guesses)


def sent_by(case):
    """[n, d]: the gradients of the victims' single images."""
    return gradients(case.seen.task, case.seen.model.params, case.x, one_hot(case.y, 10).float())


@by_rows(LENET, small_task(), small_task("mlp"), small_task("cnn-udp"), ids=lambda t: t.model.name)
def test_the_label_of_one_image_is_right_without_noise(task):
    case = make(task, n=40)
    found = restore(task, case.seen.model.params, sent_by(case), [1] * 40, KEY)
    assert torch.equal(torch.stack(found), case.y)


def test_noise_on_the_weights_averages_out_of_the_labels():
    # noise of 0.5 is half of the largest possible entry of the bias, whose gradient alone is misread
    case = make(n=40)
    sent = sent_by(case)
    noisy = sent + 0.5 * rng.normal(KEY, tuple(sent.shape))
    found = torch.stack(restore(LENET, case.seen.model.params, noisy, [1] * 40, KEY))
    of_bias = noisy[:, -10:].argmin(1, keepdim=True)
    assert (found == case.y).float().mean() > 0.9
    assert (of_bias == case.y).float().mean() < 0.9


def test_labels_are_not_inferred_without_a_dense_last_layer():
    def apply(tensors, x, keep):
        return torch.nn.functional.conv2d(x, tensors[0]).mean((2, 3))

    task = function_task(Layout(("conv",), ((10, 1, 3, 3),)), apply, SHAPE)
    case = make(task)
    with pytest.raises(ValueError, match="expected a dense last layer with 10 rows to infer labels, got 'conv'"):
        IDLG().run(case.seen, KEY)
    assert len(IDLG(labels="given", evaluations=5).run(case.seen, KEY).guesses) == 3
    assert len(DLG(evaluations=5).run(case.seen, KEY).guesses) == 3


def test_the_prior_is_a_mean_or_another_picture_and_never_the_message():
    case = make(images=2)
    empty = tuple(message._replace(wire=b"") for message in case.seen.messages)
    silent = dataclasses.replace(case.seen, messages=empty)
    x = case.seen.auxiliary.x
    for name, mean in (("mean", x.mean(0)), ("flat", x.mean())):
        for guess in Prior(guess=name).run(silent, KEY).guesses:
            assert torch.allclose(guess.x, mean.expand_as(guess.x), atol=1e-6)
            assert guess.y.tolist() == [2, 2]
    others = Prior(guess="other").run(silent, KEY).guesses
    assert all(any(torch.equal(image, aside) for aside in x) for guess in others for image in guess.x)
    assert len({tuple(guess.x.flatten().tolist()) for guess in others}) > 1
    assert Prior().floor
    assert not DLG().floor


def test_a_flat_prior_of_color_images_has_a_mean_a_channel_and_of_vectors_one_an_entry():
    case = make()
    color = rng.uniform(KEY, (20, 3, 4, 5))
    vectors = rng.uniform(KEY, (20, 6))
    for x, mean in ((color, color.mean((0, 2, 3))[:, None, None].expand(3, 4, 5)), (vectors, vectors.mean(0))):
        seen = dataclasses.replace(case.seen, auxiliary=Examples(x, torch.zeros(20, dtype=torch.int64)))
        assert torch.allclose(Prior(guess="flat").run(seen, KEY).guesses[0].x[0], mean, atol=1e-6)


def test_a_prior_without_auxiliary_data_is_refused():
    case = make()
    seen = dataclasses.replace(case.seen, auxiliary=Examples(case.x[:0, 0], case.y[:0, 0]))
    with pytest.raises(ValueError, match="expected at least 1 auxiliary inputs, got 0"):
        Prior().run(seen, KEY)


def test_the_membership_score_is_minus_the_loss():
    case = make()
    task, params = case.seen.task, case.seen.final
    found = MembershipLoss().run(only(case.seen, MembershipLoss().needs), KEY).scores
    expected = [-task.loss(params, x[None], y[None]).item() for x, y in zip(*case.seen.candidates, strict=True)]
    assert found.numpy() == pytest.approx(expected, rel=1e-5)


def test_a_model_that_diverged_reveals_no_member():
    case = make()
    seen = dataclasses.replace(case.seen, final=torch.full_like(case.seen.final, math.nan))
    scores = MembershipLoss().run(seen, KEY).scores
    assert scores.isfinite().all()
    assert len(set(scores.tolist())) == 1


@pytest.mark.slow
@both
def test_seven_of_eight_photographs_are_found(attack):
    # Zhu et al. 2019 and Zhao et al. 2020 report 6 to 7 of 8 (raw MSE < 1e-3, LeNet with weights uniform in +-0.5)
    data = photos(Path()).train
    task = ModelTask(build("lenet-dlg", (3, 32, 32), 8), "dlg")
    case = make(task, n=8)
    chosen = torch.from_numpy(rng.subset(KEY.child("photos"), len(data.y), 8))
    x, y = data.x[chosen, None], data.y[chosen, None]
    wires = [pack_float32(row) for row in gradients(task, case.seen.model.params, x, one_hot(y, 8).float())]
    messages = tuple(message._replace(wire=wire) for message, wire in zip(case.seen.messages, wires, strict=True))
    guesses = attack.run(dataclasses.replace(case.seen, messages=messages), KEY).guesses
    assert int((Case(case.seen, x, y).mse(guesses) < 1e-3).sum()) >= 7
    assert [guess.y.item() for guess in guesses] == y.flatten().tolist()
