"""Labels read off the last layer: exact cases, rates of correct labels, and bad inputs."""

import functools
import math
from pathlib import Path

import pytest
import torch
from scipy import stats
from torch.nn.functional import linear, one_hot

from leakgauge import Key, rng
from leakgauge.attacks._engine.labels import apportion, noise_of, restore
from leakgauge.harness.core.contract import Examples
from leakgauge.harness.data.embedded import digits
from leakgauge.harness.learn.gradients import gradients
from leakgauge.harness.learn.models import build
from leakgauge.harness.learn.tasks import ModelTask
from tests.by_rows import by_rows
from tests.doubles import function_task

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
    """[images] labels in their proportions, as the floor returns them."""
    return apportion(AUXILIARY.y.bincount(minlength=CLASSES).double() * images / len(AUXILIARY.y), images)


@functools.cache
def trained(task, steps=100):
    params = task.init(KEY.child("model"))
    for step in range(steps):
        batch = torch.from_numpy(rng.integers(KEY.child("step", step), 32, len(DIGITS.y)))
        params = params.detach().requires_grad_()
        (gradient,) = torch.autograd.grad(task.loss(params, DIGITS.x[batch], DIGITS.y[batch]), params)
        params = params.detach() - 0.3 * gradient
    return params


def right(labels, guess):
    """[n]: the number of common labels of each batch, in any order."""
    return torch.minimum(*(one_hot(each, CLASSES).sum(1) for each in (labels, guess))).sum(1)


def reach(hits, n, share):
    """Whether `hits` of n are compatible with a probability of at least `share`, with a false-alarm rate of 1e-6."""
    return stats.binom.cdf(hits, n, share) >= FALSE_ALARM


def test_counts_are_exact_if_every_softmax_is_known():
    # zero weights: p = 1/10 for every input, and `images` times the bias gradient is images / 10 - counts
    labels = drawn("independent", 64, n=50)
    params = torch.zeros(LINEAR.layout.dim)
    assert torch.equal(found(LINEAR, params, sent(LINEAR, params, labels), labels), labels.sort(dim=1).values)


@pytest.mark.parametrize("task", [LENET, MLP], ids=lambda task: task.model.name)
@pytest.mark.parametrize("how", ["distinct", "independent", "same"])
@pytest.mark.parametrize("images", [2, 4, 8])
def test_all_labels_behind_a_fresh_model_are_found_97_times_in_100(task, how, images):
    labels, params = drawn(how, images), task.init(KEY.child("model"))
    received = sent(task, params, labels)
    hits = right(labels, found(task, params, received, labels)) == images
    assert reach(int(hits.sum()), BATCHES, 0.97)
    # the twin: gradients of other batches must fail
    others = right(labels, found(task, params, received.roll(1, 0), labels)) == images
    assert not reach(int(others.sum()), BATCHES, 0.97)


@pytest.mark.parametrize("auxiliary", [None, AUXILIARY], ids=["without", "with"])
@pytest.mark.parametrize("images", [2, 4, 8])
@pytest.mark.matrix
def test_a_label_with_a_negative_bias_entry_of_a_trained_model_is_always_returned(images, auxiliary):
    params, labels = trained(MLP), drawn("independent", images)
    received = sent(MLP, params, labels)
    proven = MLP.layout.split(received)[-1] < -1e-6
    returned = one_hot(found(MLP, params, received, labels, auxiliary), CLASSES).sum(1) > 0
    assert proven.any()
    assert (returned | ~proven).all()
    assert (one_hot(labels, CLASSES).sum(1)[proven] > 0).all()


@by_rows(("independent", 2, 0.9), ("same", 8, 0.8), ("independent", 4, 0.7))
def test_a_trained_model_hides_some_labels_of_a_batch_but_not_most(how, images, share):
    # with the softmax of dummy inputs instead of the rows' own, 0.57, 0.28 and 0.60 are found
    labels, params = drawn(how, images), trained(MLP)
    hits = right(labels, found(MLP, params, sent(MLP, params, labels), labels)).float().mean() / images
    assert hits > share
    if how == "independent":
        assert hits < 1.0


def test_noise_averages_out_of_a_batchs_labels_over_the_width_of_the_layer():
    # noise of 0.3 exceeds what one image of four adds to any entry of the bias
    labels, params = drawn("independent", 4), LENET.init(KEY.child("model"))
    clean = sent(LENET, params, labels)
    noisy = clean + 0.3 * rng.normal(KEY.child("noise"), tuple(clean.shape))
    hits = right(labels, found(LENET, params, noisy, labels)).float().mean() / 4
    of_bias = LENET.layout.split(noisy)[-1].topk(4, largest=False).indices
    assert hits > 0.8
    assert right(labels, of_bias).float().mean() / 4 < hits - 0.1


def test_the_noise_of_a_gradient_shows_in_the_sums_of_its_rows():
    labels, params = drawn("independent", 2, n=200), MLP.init(KEY.child("model"))
    weight, bias = MLP.layout.split(sent(MLP, params, labels))[-2:]
    rows = torch.cat([weight, bias[..., None]], dim=2)
    assert float(noise_of(MLP, rows).max()) < 1e-7
    squares = noise_of(MLP, rows + 0.01 * rng.normal(KEY.child("noise"), tuple(rows.shape))).double().square() / 0.01**2
    freedom = rows.shape[2] * len(rows)
    low, high = stats.chi2.interval(1 - FALSE_ALARM, freedom)
    total = float(squares.sum()) * rows.shape[2]
    assert low < total < high
    assert not low < 1.06**2 * total < high  # noise that is 6 % larger


def test_batches_of_unequal_sizes_keep_their_order_and_have_sorted_labels():
    params, sizes = MLP.init(KEY.child("model")), (1, 8, 3)
    batches = [drawn("independent", size, n=1) for size in sizes]
    received = torch.cat([sent(MLP, params, labels) for labels in batches])
    for labels, guess in zip(batches, restore(MLP, params, received, sizes, Key(1)), strict=True):
        assert guess.dtype == torch.int64
        assert torch.equal(guess, labels[0].sort().values)


def test_one_image_is_read_off_its_most_negative_row_beside_any_batch():
    labels, params = drawn("independent", 1), trained(MLP)
    received = sent(MLP, params, labels)
    for auxiliary in (None, AUXILIARY):
        assert torch.equal(found(MLP, params, received, labels, auxiliary), labels)
    beside = restore(MLP, params, received, [1, 5] * (BATCHES // 2), Key(1))
    assert torch.equal(torch.cat(beside[::2]), labels[::2, 0])


@by_rows(None, AUXILIARY, Examples(AUXILIARY.x[:1], AUXILIARY.y[:1]), ids=["none", "many", "one"])
@pytest.mark.parametrize("value", [0.0, 1.0, -1e30, math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("images", [1, 4, 12])
@pytest.mark.table(4)
def test_labels_are_in_range_for_any_gradient_and_one_gradient_changes_no_other(auxiliary, images, value):
    params, labels = MLP.init(KEY.child("model")), drawn("independent", images, n=3)
    received = sent(MLP, params, labels)
    before = found(MLP, params, received, labels, auxiliary)
    received[1] = value
    after = found(MLP, params, received, labels, auxiliary)
    assert torch.equal(before[[0, 2]], after[[0, 2]])
    assert ((after >= 0) & (after < CLASSES)).all()
    assert after.shape == (3, images)


def test_a_last_layer_without_a_bias_reveals_its_labels_too():
    def apply(tensors, x, keep):
        return linear(x.flatten(1), tensors[0])

    task = function_task((CLASSES, 64), apply, classes=CLASSES)
    labels, params = drawn("independent", 2), task.init(KEY.child("model"))
    assert right(labels, found(task, params, sent(task, params, labels), labels)).float().mean() / 2 > 0.9


@pytest.mark.parametrize("noise", [0.0, 0.02])
@pytest.mark.parametrize("how", ["independent", "same"])
def test_auxiliary_data_count_all_labels_of_fresh_models(how, noise):
    labels, params = drawn(how, 8, n=40), LENET.init(KEY.child("model"))
    received = sent(LENET, params, labels)
    received = received + noise * rng.normal(KEY.child("noise"), tuple(received.shape))
    hits = right(labels, found(LENET, params, received, labels, AUXILIARY)) == 8
    assert reach(int(hits.sum()), 40, 0.97)


@pytest.mark.parametrize(("images", "noise", "more"), [(4, 0.0, 0.15), (8, 0.0, 0.04), (4, 0.01, 0.02)])
@pytest.mark.table(3)
def test_with_auxiliary_data_labels_behind_a_trained_model_beat_their_frequencies(images, noise, more):
    labels, params = drawn("independent", images), trained(MLP)
    received = sent(MLP, params, labels)
    received = received + noise * rng.normal(KEY.child("noise"), tuple(received.shape))
    hits = right(labels, found(MLP, params, received, labels, AUXILIARY))
    floor = right(labels, usual(images).expand(len(labels), -1))
    assert float((hits - floor).float().mean()) / images > more


@pytest.mark.parametrize("images", [1, 8])
def test_under_overwhelming_noise_the_most_frequent_labels_are_returned(images):
    skewed = Examples(*(torch.cat([part, part[AUXILIARY.y == 3]]) for part in AUXILIARY))
    labels, params = drawn("independent", images, n=20), trained(MLP)
    noisy = 1e6 * rng.normal(KEY.child("noise"), (20, MLP.layout.dim))
    guess = found(MLP, params, noisy, labels, skewed)
    assert (guess == 3).any(dim=1).all()
    if images == 8:
        assert (one_hot(guess, CLASSES).sum(1) <= 2).all()


def test_labels_without_auxiliary_examples_are_found_too():
    few = Examples(*(part[AUXILIARY.y < 2] for part in AUXILIARY))
    labels, params = drawn("independent", 4), LENET.init(KEY.child("model"))
    guess = found(LENET, params, sent(LENET, params, labels), labels, few)
    assert right(labels, guess).float().mean() / 4 > 0.95


def test_a_model_that_is_not_finite_gives_the_most_frequent_labels():
    labels, params = drawn("independent", 8, n=2), torch.full((MLP.layout.dim,), math.nan)
    guess = found(MLP, params, torch.ones(2, MLP.layout.dim), labels, AUXILIARY)
    assert (one_hot(guess, CLASSES).sum(1) <= 1).all()
