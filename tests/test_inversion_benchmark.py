"""The inversion benchmark: its loops match the published ones, and its parts run and set their bars."""

import importlib
import math
from pathlib import Path

import pytest
import torch
from torch.nn.functional import one_hot

from leakgauge import Guess, Key, Link, rng
from leakgauge.attacks._engine import reconstruct as _matching
from leakgauge.attacks._engine.matching import SquaredDistance, evaluator
from leakgauge.harness.federation import registry
from leakgauge.harness.learn.gradients import gradients
from leakgauge.harness.learn.models import build
from leakgauge.harness.learn.tasks import ModelTask

with pytest.MonkeyPatch.context() as patch:
    patch.syspath_prepend(str(Path(__file__).parents[1] / "benchmarks"))
    inversion, loops, shares, victims = (
        importlib.import_module(name) for name in ("inversion", "_loops", "_label_shares", "_victims")
    )

KEY = Key(0)
SHAPE, CLASSES = (1, 8, 8), 10
TASK = ModelTask(build("lenet-dlg", SHAPE, CLASSES), "dlg")
PARAMS = TASK.init(KEY.child("model"))
X, Y = rng.uniform(KEY.child("x"), (1, *SHAPE)), torch.tensor([7])
START = rng.normal(KEY.child("start"), (1, *SHAPE))
LOGITS = rng.normal(KEY.child("logits"), (1, CLASSES))


def network(task=TASK, params=PARAMS):
    return loops.LeNet(task.model, params)


def target():
    return network().gradient(X, Y)


@pytest.mark.parametrize(("shape", "classes"), [(SHAPE, CLASSES), ((3, 32, 32), 100)])
def test_the_loops_network_is_the_model_of_our_attacks(shape, classes):
    task = ModelTask(build("lenet-dlg", shape, classes), "dlg")
    params, x = task.init(KEY), rng.uniform(KEY, (2, *shape))
    y = torch.tensor([3, 5])
    net = network(task, params)
    assert torch.allclose(net(x), task.outputs(params, x), atol=1e-5)
    ours = gradients(task, params, x[None], one_hot(y, classes).float()[None])[0]
    assert torch.allclose(task.layout.join(net.gradient(x, y)), ours, atol=1e-6)
    assert [tuple(tensor.shape) for tensor in net.parameters()] == list(task.layout.shapes)


@pytest.mark.parametrize("soft", [False, True], ids=["idlg", "dlg"])
def test_the_loops_objective_is_that_of_our_evaluator(soft):
    closure = loops.Matching(network(), target(), START, LOGITS if soft else Y)
    value = closure()
    known = None if soft else one_hot(Y, CLASSES).float()[None]
    sent = SquaredDistance(TASK.layout.join(target())[None])
    candidate = torch.cat([START.flatten(1), LOGITS], 1) if soft else START.flatten(1)
    ours = evaluator(TASK, PARAMS, sent, images=1, labels=known)(candidate, torch.tensor([0]))
    slope = torch.cat([closure.x.grad.flatten(1), closure.label.grad], 1) if soft else closure.x.grad.flatten(1)
    assert value.item() == pytest.approx(ours.value.item(), rel=1e-4)
    assert torch.allclose(slope, ours.gradient, rtol=1e-3, atol=1e-4 * ours.gradient.abs().max())


def test_the_optimizer_has_the_originals_options():
    options = loops.Matching(network(), target(), START, Y).optimizer.defaults
    assert (options["lr"], options["max_iter"], options["history_size"]) == (1, 20, 100)
    assert options["line_search_fn"] is None
    assert loops.OUTER == 300
    assert loops.ENOUGH == 1e-6


def test_every_call_of_the_closure_is_counted_as_an_evaluation():
    closure = loops.Matching(network(), target(), START, LOGITS)
    for _ in range(2):
        closure.optimizer.step(closure)
    (state,) = (state for state in closure.optimizer.state.values() if state)
    assert closure.calls == state["func_evals"] > 20
    assert loops.dlg(network(), target(), START, LOGITS, outer=2).evaluations == closure.calls


def test_idlg_evaluates_the_loss_after_each_step_and_stops_when_it_is_small():
    # at the image itself the optimizer evaluates once and stays
    assert loops.idlg(network(), target(), X).evaluations == 2
    assert loops.dlg(network(), target(), X, 1e3 * one_hot(Y, CLASSES).float(), outer=5).evaluations == 5


def test_the_idlg_loop_finds_a_small_image_and_its_label():
    found = loops.idlg(network(), target(), START, outer=40)
    assert found.objective < 1e-6
    assert found.y.tolist() == [7]
    assert (found.x - X).square().mean() < 1e-3


def test_the_dlg_loop_finds_a_small_image_and_its_label():
    found = loops.dlg(network(), target(), START, LOGITS, outer=20)
    assert found.y.tolist() == [7]
    assert (found.x - X).square().mean() < 1e-3


def test_photographs_are_distinct_and_depend_on_the_key():
    one, other = (victims.photographs(6, 8, KEY.child(i)) for i in range(2))
    assert len({tuple(image.flatten().tolist()) for image in one.x}) == 6
    assert not torch.equal(one.x, other.x)
    assert not torch.equal(one.params, other.params)
    assert victims.photographs(40, 100, KEY).y.max() > 8


def test_a_guess_that_diverged_or_is_not_finite_counts_as_failed():
    truth = victims.photographs(4, 8, KEY)
    offsets = (0.0, 0.02, 2.0, math.nan)
    guesses = [Guess(x[None] + offset, y[None], 0.0, 1) for x, y, offset in zip(truth.x, truth.y, offsets, strict=True)]
    found = victims.judge(truth, guesses)
    assert (found.recovered, found.exact, found.infinite, found.failed, found.labels) == (2, 1, 1, 2, 3)
    assert found.each_ssim[0] == 1
    assert found.each_ssim[3] == 0
    assert found.ssim == pytest.approx(sum(found.each_ssim) / 4)


@pytest.mark.parametrize("number", [1, 2])
def test_the_quantizers_error_is_uniform_over_one_step_in_every_coordinate(number):
    case, step = inversion.CASES[number], (0.05, 0.2)[number - 1]
    assert f"step {step:g}" in case.title
    defense = registry.build("defense", case.name, case.parameters)
    assert defense.noise_scale == 0
    truth = victims.photographs(1, 100, KEY)
    seen = victims.observed(truth, defense, KEY)
    message = seen.messages[0]
    estimate = defense.estimate(None, message.wire, Link(seen.setting, message.sender, message.shared))
    error = (estimate - victims.sent(truth)[0]) / step
    assert error.abs().max() == pytest.approx(0.5, rel=1e-3)  # no overload
    assert error.std() == pytest.approx(12**-0.5, rel=0.02)  # 86,000 values: four standard errors are 0.5 %


def test_labels_are_drawn_distinct_or_each_twice():
    distinct, repeated = (shares.draw(kind, 20, 8, KEY) for kind in ("distinct", "repeated"))
    assert distinct.shape == repeated.shape == (20, 8)
    assert {len(set(row)) for row in distinct.tolist()} == {8}
    assert {len(set(row)) for row in repeated.tolist()} == {4}


def test_a_share_counts_every_label_once():
    task = ModelTask(build("mlp", (1, 16, 16), CLASSES))
    labels = shares.draw("repeated", 20, 4, KEY)
    found = shares.share(task, task.init(KEY), labels, KEY)
    assert (found.labels, found.batches) == (80, 20)
    frequent = set(torch.bincount(shares.data().y).argsort(descending=True, stable=True)[:4].tolist())
    assert found.floor == sum(len(set(row) & frequent) for row in labels.tolist())


@pytest.mark.slow
def test_every_part_runs_and_sets_its_bars(monkeypatch, capsys):
    monkeypatch.setattr(inversion, "REPEATS", 1)
    bars = inversion.reconstructions(1, 8, outer=1, evaluations=4)
    assert len(bars) == 6
    bars += inversion.engine(1, 8)
    assert not any(bar.missed for bar in inversion.closed(1, 1, 8))
    assert not any(bar.missed for bar in inversion.finite(2, 3, [8, 100]))
    bars += inversion.aware(2, inversion.CASES[:1], evaluations=3)
    assert inversion.many(2, 3, "cpu") > 0
    assert all(math.isfinite(bar.value) for bar in bars)
    out = capsys.readouterr().out
    assert all(name in out for name in ("usual loop, iDLG", "inverting-gradients, at once", "normal noise 0.01"))


@pytest.mark.parametrize(("value", "code"), [(1.0, 0), (0.9, 1), (math.nan, 1)])
def test_a_missed_bar_is_named_and_ends_with_an_error(value, code, capsys):
    assert inversion._verdict([inversion.Bar("speed", value, 1.0)]) == code
    assert f"{code} bars missed: {'speed' if code else 'none'}" in capsys.readouterr().out


@pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device is present")
def test_a_missing_device_is_reported(capsys):
    assert inversion.main(["--gpu"]) == 1
    assert capsys.readouterr().out == "expected a CUDA device, got none\n"


@pytest.mark.slow
def test_double_precision_finds_a_photograph_at_which_single_precision_stalls(monkeypatch):
    eight = victims.photographs(8, 100, inversion.KEY.child("loops", 100))
    one, recovered = inversion.attack("dlg", {"restarts": 1}), []
    for near in (0.0, 1e-5):
        monkeypatch.setattr(_matching, "_NEAR", near)
        found = one.run(inversion.undefended(eight), inversion.KEY.child("attack"))
        recovered.append(victims.judge(eight, found.guesses).recovered)
    assert recovered == [6, 7]
