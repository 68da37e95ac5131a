"""Losses by name, as torch's objects and as functions: their values, and attacks on gradients that plain torch made."""

import functools
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional

import leakgauge
from leakgauge.harness.core.errors import StudyError, UnknownNameError
from leakgauge.harness.core.rng import Key, normal
from leakgauge.harness.data import load
from leakgauge.harness.learn.gradients import gradients, targets_of
from leakgauge.harness.learn.losses import CROSS_ENTROPY, Loss, parse, text_of
from leakgauge.harness.learn.models import build
from leakgauge.harness.learn.tasks import ModelTask
from leakgauge.harness.study.check import check_study
from leakgauge.harness.study.study import resolve
from tests.by_rows import by_rows
from tests.doubles import study_table
from tests.test_fit import seeded

ROWS = [[0], [11], [22], [33]]
FOUR = [[0, 1, 2, 3], [14, 15, 16, 17], [28, 29, 30, 31]]
WEIGHTS = [0.5, 1.0, 2.0, 4.0]
SCORES = normal(Key(0).child("scores"), (6, 4))
Y = torch.tensor([0, 3, 1, 2, 3, 1])
ROW = functional.one_hot(Y, 4).float()
ONE, TWO = SCORES[:, :1], (Y > 1).long()

weighted = nn.CrossEntropyLoss(weight=torch.tensor(WEIGHTS), label_smoothing=0.1)
smooth = functools.partial(functional.cross_entropy, label_smoothing=0.2)
logistic = functional.binary_cross_entropy_with_logits


# values


@by_rows(
    ("cross-entropy", SCORES, Y, functional.cross_entropy(SCORES, Y)),
    ("cross-entropy?smoothing=0.2", SCORES, Y, smooth(SCORES, Y)),
    ("cross-entropy?smoothing=0.1&weights=0.5,1,2,4", SCORES, Y, weighted(SCORES, Y)),
    ("binary-cross-entropy", SCORES, Y, logistic(SCORES, ROW)),
    ("binary-cross-entropy", SCORES, ROW, logistic(SCORES, ROW)),
    ("binary-cross-entropy", ONE, TWO, logistic(ONE[:, 0], TWO.float())),
    ("squared", SCORES, Y, functional.mse_loss(SCORES, ROW)),
    ("squared", ONE, SCORES[:, 1], functional.mse_loss(ONE[:, 0], SCORES[:, 1])),
    ("hinge", SCORES, Y, functional.multi_margin_loss(SCORES, Y, reduction="none").mean()),
)
def test_a_batch_has_the_loss_of_torch(text, scores, y, expected):
    if text == "hinge":  # torch sums over all other classes
        others = SCORES.masked_fill(ROW.bool(), -torch.inf).amax(1)
        expected = (1 + others - SCORES.gather(1, Y[:, None])[:, 0]).relu().mean()
    torch.testing.assert_close(parse(text).batch(scores, y), expected)


@pytest.mark.parametrize("text", ["cross-entropy", "cross-entropy?smoothing=0.2&weights=0.5,1,2,4", "squared"])
def test_probabilities_of_one_class_count_as_the_class(text):
    loss = parse(text)
    torch.testing.assert_close(loss.batch(SCORES, ROW), loss.batch(SCORES, Y))
    torch.testing.assert_close(loss.each(SCORES, ROW), loss.each(SCORES, Y))


@pytest.mark.parametrize("text", ["cross-entropy", "cross-entropy?smoothing=0.3", "binary-cross-entropy", "squared"])
def test_the_slopes_in_the_scores_are_the_link_minus_the_target(text):
    loss, scores = parse(text), SCORES.double().requires_grad_()
    (slopes,) = torch.autograd.grad(loss.each(scores, Y).sum(), scores)
    torch.testing.assert_close(slopes, loss.slope(4) * (loss.link(scores) - ROW))


@by_rows(
    (nn.CrossEntropyLoss(), "cross-entropy"),
    (functional.cross_entropy, "cross-entropy"),
    (nn.CrossEntropyLoss(label_smoothing=0.25), "cross-entropy?smoothing=0.25"),
    (nn.CrossEntropyLoss(weight=torch.tensor([1.0, 3.0])), "cross-entropy?weights=1.0,3.0"),
    (nn.BCEWithLogitsLoss(), "binary-cross-entropy"),
    (nn.MSELoss(), "squared"),
    (functional.mse_loss, "squared"),
    (nn.BCEWithLogitsLoss(pos_weight=torch.tensor([2.0])), "given:inspect"),
    (lambda scores, y: scores.sum(), "given:inspect"),
    (None, ""),
)
def test_a_loss_of_torch_has_a_name(given, text):
    assert text_of(given) == text
    assert not text or text.startswith("given") or isinstance(parse(text), Loss)


@by_rows(
    ("crossentropy", "did you mean 'cross-entropy'"),
    ("cross-entropy?smoothing=1", "0 <= smoothing < 1"),
    ("cross-entropy?weights=1,-2", "weights=1,2,... >= 0"),
    ("cross-entropy?weights=a", "weights=1,2,... >= 0"),
    ("squared?smoothing=0.1", "only cross-entropy has options"),
    ("nowhere:loss", "nowhere"),
    (3, "expected a loss"),
    (nn.CrossEntropyLoss(reduction="sum"), "mean over the batch"),
)
def test_another_loss_is_refused_in_one_line(given, words):
    with pytest.raises((ValueError, UnknownNameError)) as caught:
        text_of(given)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


@by_rows(
    ("linear", 10, "hinge", 1, Y, True),
    ("mlp-small", 4, "cross-entropy?smoothing=0.2", 1, Y, True),
    ("mlp-small", 4, "binary-cross-entropy", 1, Y, True),
    ("mlp-small", 4, "squared", 1, Y, True),
    ("mlp-small", 0, "binary-cross-entropy", 4, ROW, False),
    ("mlp-small", 0, "", 4, SCORES, False),
    ("mlp-small", 0, "", 1, SCORES[:, 0], False),
)
def test_gradients_agree_with_small_steps(model, classes, loss, numbers, y, accurate):
    task = ModelTask(build(model, (12,), classes, loss, numbers))
    params, x = task.init(Key(1)).double(), normal(Key(2), (6, 12)).double()
    (found,) = gradients(task, params, x[None], targets_of(task, y, torch.float64)[None])
    way = normal(Key(3), params.shape).double()
    ends = [task.loss(params + step * way, x, y) for step in (1e-6, -1e-6)]
    assert float(found @ way) == pytest.approx(float(ends[0] - ends[1]) / 2e-6, rel=1e-5)
    assert (task.tested(params, x, y)[1] is not None) is accurate


# attacks


def net(k, *, conv=False):
    layers = [nn.Flatten(), nn.Linear(64, 20), nn.Sigmoid(), nn.Linear(20, k)]
    if conv:
        layers = [nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(64, k)]
    return seeded(nn.Sequential(*layers))


def data(labels):
    (x, y), (x_test, y_test) = load("digits", Path()).train, load("digits", Path()).test
    return x, labels(y), x_test, labels(y_test)


def found(folder, model, labels, made_by, loss, rows=ROWS):
    """The best SSIM of the default attacks on plain torch's gradients, and the best label accuracy."""
    x, y, *test = data(labels)
    sent = [torch.autograd.grad(made_by(model(x[own]), y[own]), list(model.parameters())) for own in rows]
    asked = {"loss": loss, "limit": False, "progress": False, "minutes": 1.0, "batch": len(rows[0])}
    run = leakgauge.inspect(model, (x, y, *test), sent, records=rows, folder=folder, **asked)
    assert not run.failures, [failure.message for failure in run.failures.values()]
    assert not [flag for record in run.trainings.values() for flag in record.flags if flag.code == "misfit"]
    best = {"ssim": -1.0, "label_accuracy": 0.0}
    for result in run.results.values():
        for estimate in result.estimates:
            if estimate.name in best and result.cell.attack.name != "prior":
                best[estimate.name] = max(best[estimate.name], estimate.value)
    return best["ssim"], best["label_accuracy"]


def same(y):
    return y


def half(y):
    return (y > 4).long()


def tenth(y):
    return y.float() / 9


def several(y):
    return torch.stack([y.float() / 9, (y % 3).float(), (y % 5).float()], 1)


def marks(y):
    return torch.stack([(y > 4).float(), (y % 2).float(), (y % 3 == 0).float(), (y % 5 == 0).float()], 1)


def focal(scores, y):
    sure = scores.softmax(1).gather(1, y[:, None])[:, 0]
    return ((1 - sure) ** 2 * functional.cross_entropy(scores, y, reduction="none")).mean()


def of_rows(loss):
    return lambda scores, y: loss(scores, functional.one_hot(y, 10).float())


def first(loss):
    return lambda scores, y: loss(scores[:, 0], y.float())


LONG = (
    *("10-same-focal-focal-conv", "10-same-made_by0-cross-entropy?smoothing=0.2-conv", "10-same-<lambda>-loss1-conv"),
    *("1-half-<lambda>-None-conv", "1-tenth-<lambda>-None-conv", "3-several-mse_loss-None-conv"),
)


@functools.cache
def plain(conv, folder):
    return found(folder, net(10, conv=conv), same, functional.cross_entropy, None)[0]


@pytest.mark.matrix
@pytest.mark.parametrize("conv", [False, True], ids=["dense", "conv"])
@by_rows(
    (10, same, smooth, "cross-entropy?smoothing=0.2"),
    (10, same, of_rows(logistic), nn.BCEWithLogitsLoss()),
    (10, same, of_rows(functional.mse_loss), "squared"),
    (10, same, focal, focal),
    (1, half, first(logistic), None),
    (1, tenth, first(functional.mse_loss), None),
    (1, tenth, first(functional.smooth_l1_loss), first(functional.smooth_l1_loss)),
    (3, several, functional.mse_loss, None),
    (4, marks, logistic, nn.BCEWithLogitsLoss()),
)
@pytest.mark.ci(without=LONG)
def test_records_behind_any_loss_are_found_as_behind_cross_entropy(
    k, labels, made_by, loss, conv, tmp_path, tmp_path_factory
):
    ssim, right = found(tmp_path, net(k, conv=conv), labels, made_by, loss)
    assert ssim >= plain(conv, tmp_path_factory.getbasetemp() / f"plain{conv}") - 0.03
    assert right == 1 or labels(torch.arange(3)).is_floating_point()


def test_class_weights_of_a_batch_are_followed(tmp_path):
    loss = nn.CrossEntropyLoss(weight=torch.linspace(0.1, 5, 10))
    ssim, right = found(tmp_path, net(10), same, loss, loss, FOUR)
    assert ssim >= 0.96
    assert right == 1


def test_a_study_names_its_loss_and_keeps_its_numbers_without_one(tmp_path):
    task = ModelTask(build("mlp-small", (64,), 10))
    assert task.model.loss == CROSS_ENTROPY
    assert task.softmax
    assert not ModelTask(build("mlp-small", (64,), 10, "cross-entropy?smoothing=0.1")).softmax


def test_a_wrong_loss_of_a_study_is_named_by_its_field(tmp_path):
    table = study_table({"clients": 4, "rounds": 1}, ["none"], [{"name": "prior", "target": {"round": 0, "count": 2}}])
    table["tasks"][0]["loss"] = "crossentropy"
    with pytest.raises(StudyError, match=r"tasks\.loss: no loss 'crossentropy'; did you mean 'cross-entropy'"):
        check_study(resolve(table, "wrong"), tmp_path)
