"""Labels read off the last layer: what is exact, how often the rest is right, and what is never told."""

import math
from pathlib import Path

import pytest
import torch
from scipy import stats
from torch.nn.functional import linear, one_hot

from leakgauge.attacks._engine.matching import gradients
from leakgauge.attacks._labels.infer import apportion, restore
from leakgauge.attacks._labels.last_layer import noise_of
from leakgauge.harness.core import rng
from leakgauge.harness.core.contract import Examples
from leakgauge.harness.core.rng import Key
from leakgauge.harness.core.vec import Layout
from leakgauge.harness.data.embedded import digits
from leakgauge.harness.learn.models import Model, build
from leakgauge.harness.learn.tasks import ModelTask

KEY = Key(0)
CLASSES = 10
DIGITS, AUXILIARY = digits(Path()).train, digits(Path()).test
BATCHES = 100
FALSE_ALARM = 1e-6

LENET = ModelTask(build("lenet-dlg", (1, 8, 8), CLASSES), "dlg")
MLP = ModelTask(build("mlp", (1, 8, 8), CLASSES))
LINEAR = ModelTask(build("linear", (1, 8, 8), CLASSES))


def drawn(how, images, n=BATCHES):
    """Labels [n, images] of random batches: all different, independent, or all the same."""
    if how == "distinct":
        return torch.from_numpy(rng.permutations(KEY.child("labels"), n, CLASSES))[:, :images]
    count = n * images if how == "independent" else n
    labels = torch.from_numpy(rng.integers(KEY.child("labels"), count, CLASSES))
    return labels.reshape(n, -1).expand(n, images)


def digits_of(labels):
    """A random digit [n, b, 1, 8, 8] for each label [n, b]."""
    which = torch.from_numpy(rng.integers(KEY.child("digits"), labels.numel(), 10**6)).reshape(labels.shape)
    x = torch.empty(*labels.shape, 1, 8, 8)
    for label in range(CLASSES):
        pool, at = DIGITS.x[DIGITS.y == label], labels == label
        x[at] = pool[which[at] % len(pool)]
    return x


def sent(task, params, labels):
    """[n, d] the gradients of batches of digits with these labels."""
    return gradients(task, params, digits_of(labels), one_hot(labels, CLASSES).float())


def found(task, params, received, labels, auxiliary=None):
    """[n, b] restored labels of batches of one size."""
    return torch.stack(restore(task, params, received, [labels.shape[1]] * len(labels), Key(1), auxiliary))


def usual(images):
    """[images] labels as often as they occur, as the floor tells them."""
    return apportion(AUXILIARY.y.bincount(minlength=CLASSES).double() * images / len(AUXILIARY.y), images)


def trained(task, steps=100):
    """Parameters after some steps on the digits."""
    params = task.init(KEY.child("model"))
    for step in range(steps):
        batch = torch.from_numpy(rng.integers(KEY.child("step", step), 32, len(DIGITS.y)))
        params = params.detach().requires_grad_()
        (gradient,) = torch.autograd.grad(task.loss(params, DIGITS.x[batch], DIGITS.y[batch]), params)
        params = params.detach() - 0.3 * gradient
    return params


def right(labels, guess):
    """[n] how many labels of each batch are in common, whatever their order."""
    truth, told = (one_hot(each, CLASSES).sum(1) for each in (labels, guess))
    return torch.minimum(truth, told).sum(1)


def reach(hits, n, share):
    """Whether `hits` of n are compatible with a probability of at least `share`, at a false alarm of 1e-6."""
    return stats.binom.cdf(hits, n, share) >= FALSE_ALARM


def test_counts_are_exact_where_every_softmax_is_known_at_any_batch_size():
    # zero weights: p = 1/10 for every input, and `images` times the bias gradient is images / 10 - counts
    labels = drawn("independent", 64, n=50)
    params = torch.zeros(LINEAR.layout.dim)
    assert torch.equal(found(LINEAR, params, sent(LINEAR, params, labels), labels), labels.sort(dim=1).values)


@pytest.mark.parametrize("task", [LENET, MLP], ids=lambda task: task.model.name)
@pytest.mark.parametrize("how", ["distinct", "independent", "same"])
@pytest.mark.parametrize("images", [2, 4, 8])
def test_all_labels_of_a_fresh_models_batch_are_found_97_times_in_100(task, how, images):
    labels, params = drawn(how, images), task.init(KEY.child("model"))
    received = sent(task, params, labels)
    hits = right(labels, found(task, params, received, labels)) == images
    assert reach(int(hits.sum()), BATCHES, 0.97)
    # the twin: the labels of the next batch are not those of this one
    others = right(labels, found(task, params, received.roll(1, 0), labels)) == images
    assert not reach(int(others.sum()), BATCHES, 0.97)


def test_a_negative_bias_entry_of_a_trained_model_is_always_a_label_that_is_told():
    params = trained(MLP)
    for images in (2, 4, 8):
        labels = drawn("independent", images)
        received = sent(MLP, params, labels)
        proven = MLP.layout.split(received)[-1] < -1e-6
        told = one_hot(found(MLP, params, received, labels), CLASSES).sum(1) > 0
        assert proven.any()
        assert (told | ~proven).all()
        assert (one_hot(labels, CLASSES).sum(1)[proven] > 0).all()


@pytest.mark.parametrize(
    ("how", "images", "share"), [("independent", 2, 0.9), ("same", 8, 0.8), ("independent", 4, 0.7)]
)
def test_a_trained_model_hides_some_labels_of_a_batch_and_not_most(how, images, share):
    # the softmax of dummy inputs in place of the rows' own finds 0.57, 0.28 and 0.60 of them
    labels, params = drawn(how, images), trained(MLP)
    told = right(labels, found(MLP, params, sent(MLP, params, labels), labels)).float().mean() / images
    assert told > share
    if how == "independent":
        assert told < 1.0


def test_noise_averages_out_of_a_batchs_labels_over_the_width_of_the_layer():
    # 0.3, more than one image of four adds to any entry of the bias
    labels, params = drawn("independent", 4), LENET.init(KEY.child("model"))
    clean = sent(LENET, params, labels)
    noisy = clean + 0.3 * rng.normal(KEY.child("noise"), tuple(clean.shape))
    told = right(labels, found(LENET, params, noisy, labels)).float().mean() / 4
    of_bias = LENET.layout.split(noisy)[-1].topk(4, largest=False).indices
    assert told > 0.8
    assert right(labels, of_bias).float().mean() / 4 < told - 0.1


def test_the_noise_of_a_gradient_shows_in_the_sums_of_its_rows():
    labels, params = drawn("independent", 2, n=200), MLP.init(KEY.child("model"))
    weight, bias = MLP.layout.split(sent(MLP, params, labels))[-2:]
    rows = torch.cat([weight, bias[..., None]], dim=2)
    assert float(noise_of(rows).max()) < 1e-7
    squares = noise_of(rows + 0.01 * rng.normal(KEY.child("noise"), tuple(rows.shape))).double().square() / 0.01**2
    freedom = rows.shape[2] * len(rows)
    low, high = stats.chi2.interval(1 - FALSE_ALARM, freedom)
    total = float(squares.sum()) * rows.shape[2]
    assert low < total < high
    assert not low < 1.06**2 * total < high  # noise that is 6 % larger


def test_batches_of_unequal_sizes_are_told_in_their_order_and_sorted():
    params, sizes = MLP.init(KEY.child("model")), (1, 8, 3)
    batches = [drawn("independent", size, n=1) for size in sizes]
    received = torch.cat([sent(MLP, params, labels) for labels in batches])
    for labels, told in zip(batches, restore(MLP, params, received, sizes, Key(1)), strict=True):
        assert told.dtype == torch.int64
        assert torch.equal(told, labels[0].sort().values)


def test_one_image_is_read_off_its_most_negative_row_whatever_else_is_asked_for():
    labels, params = drawn("independent", 1), trained(MLP)
    received = sent(MLP, params, labels)
    assert torch.equal(found(MLP, params, received, labels), labels)
    beside = restore(MLP, params, received, [1, 5] * (BATCHES // 2), Key(1))
    assert torch.equal(torch.cat(beside[::2]), labels[::2, 0])


@pytest.mark.parametrize("value", [0.0, 1.0, -1e30, math.nan, math.inf, -math.inf])
def test_labels_are_in_range_whatever_the_gradient(value):
    params = MLP.init(KEY.child("model"))
    received = torch.full((3, MLP.layout.dim), value)
    for told, images in zip(restore(MLP, params, received, (1, 4, 12), Key(1)), (1, 4, 12), strict=True):
        assert len(told) == images
        assert ((told >= 0) & (told < CLASSES)).all()


def test_a_gradient_that_is_not_finite_changes_no_other_label():
    labels, params = drawn("independent", 4, n=4), MLP.init(KEY.child("model"))
    received = sent(MLP, params, labels)
    before = found(MLP, params, received, labels)
    received[1] = math.nan
    after = found(MLP, params, received, labels)
    assert torch.equal(before[[0, 2, 3]], after[[0, 2, 3]])


def test_a_last_layer_without_a_bias_tells_its_labels_too():
    def apply(tensors, x, keep):
        return linear(x.flatten(1), tensors[0])

    task = ModelTask(Model("no-bias", Layout(("w",), ((CLASSES, 64),)), (64,), (1, 8, 8), CLASSES, apply))
    labels, params = drawn("independent", 2), task.init(KEY.child("model"))
    told = right(labels, found(task, params, sent(task, params, labels), labels)).float().mean() / 2
    assert told > 0.9


@pytest.mark.parametrize("noise", [0.0, 0.02])
@pytest.mark.parametrize("how", ["independent", "same"])
def test_auxiliary_data_count_all_labels_of_fresh_models(how, noise):
    labels, params = drawn(how, 8, n=40), LENET.init(KEY.child("model"))
    received = sent(LENET, params, labels)
    received = received + noise * rng.normal(KEY.child("noise"), tuple(received.shape))
    hits = right(labels, found(LENET, params, received, labels, AUXILIARY)) == 8
    assert reach(int(hits.sum()), 40, 0.97)


@pytest.mark.parametrize(("images", "noise", "more"), [(4, 0.0, 0.15), (8, 0.0, 0.04), (4, 0.01, 0.02)])
def test_auxiliary_data_lift_a_trained_models_labels_over_their_frequencies(images, noise, more):
    labels, params = drawn("independent", images), trained(MLP)
    received = sent(MLP, params, labels)
    received = received + noise * rng.normal(KEY.child("noise"), tuple(received.shape))
    told = right(labels, found(MLP, params, received, labels, AUXILIARY))
    floor = right(labels, usual(images).expand(len(labels), -1))
    assert float((told - floor).float().mean()) / images > more


@pytest.mark.parametrize("images", [1, 8])
def test_where_noise_drowns_all_the_usual_labels_are_told(images):
    skewed = Examples(*(torch.cat([part, part[AUXILIARY.y == 3]]) for part in AUXILIARY))
    labels, params = drawn("independent", images, n=20), trained(MLP)
    noisy = 1e6 * rng.normal(KEY.child("noise"), (20, MLP.layout.dim))
    told = found(MLP, params, noisy, labels, skewed)
    assert (told == 3).any(dim=1).all()
    if images == 8:
        assert (one_hot(told, CLASSES).sum(1) <= 2).all()


def test_proven_labels_are_told_with_auxiliary_data_too():
    params, labels = trained(MLP), drawn("independent", 8)
    received = sent(MLP, params, labels)
    proven = MLP.layout.split(received)[-1] < -1e-6
    told = one_hot(found(MLP, params, received, labels, AUXILIARY), CLASSES).sum(1) > 0
    assert proven.any()
    assert (told | ~proven).all()
    one = drawn("independent", 1)
    assert torch.equal(found(MLP, params, sent(MLP, params, one), one, AUXILIARY), one)


@pytest.mark.parametrize("auxiliary", [AUXILIARY, Examples(AUXILIARY.x[:1], AUXILIARY.y[:1])], ids=["many", "one"])
@pytest.mark.parametrize("value", [0.0, -1e30, math.nan, math.inf])
def test_with_auxiliary_data_labels_are_in_range_and_one_gradient_changes_no_other(value, auxiliary):
    params, labels = MLP.init(KEY.child("model")), drawn("independent", 4, n=3)
    received = sent(MLP, params, labels)
    before = found(MLP, params, received, labels, auxiliary)
    received[1] = value
    after = found(MLP, params, received, labels, auxiliary)
    assert torch.equal(before[[0, 2]], after[[0, 2]])
    assert ((after >= 0) & (after < CLASSES)).all()
    assert after.shape == (3, 4)


def test_labels_that_no_auxiliary_example_has_are_told_too():
    few = Examples(*(part[AUXILIARY.y < 2] for part in AUXILIARY))
    labels, params = drawn("independent", 4), LENET.init(KEY.child("model"))
    told = found(LENET, params, sent(LENET, params, labels), labels, few)
    assert right(labels, told).float().mean() / 4 > 0.95


def test_a_model_that_is_not_finite_tells_the_usual_labels():
    labels, params = drawn("independent", 8, n=2), torch.full((MLP.layout.dim,), math.nan)
    told = found(MLP, params, torch.ones(2, MLP.layout.dim), labels, AUXILIARY)
    assert (one_hot(told, CLASSES).sum(1) <= 1).all()
