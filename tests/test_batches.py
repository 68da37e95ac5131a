"""The features of the images of a batch, and the images that `map` finds from them."""

import itertools
from dataclasses import replace

import pytest
import torch
from torch.nn.functional import one_hot

from leakgauge import Key, rng
from leakgauge.attacks._search.batches import shown
from leakgauge.attacks.map import MAP
from leakgauge.defenses.none import NoDefense
from leakgauge.harness.core.contract import Examples
from leakgauge.harness.data import load
from leakgauge.harness.learn.gradients import gradients
from leakgauge.harness.learn.models import build
from leakgauge.harness.learn.tasks import ModelTask
from leakgauge.harness.study.score import score_reconstruction
from tests.test_twins import twins
from tests.victims import KEY, sent

SHAPE = (3, 32, 32)


def smooth(n, key, shape=SHAPE):
    """[n, *shape] images of few waves in [0, 1]."""
    small = rng.uniform(key, (n, shape[0], 5, 5))
    return torch.nn.functional.interpolate(small, size=shape[1:], mode="bicubic").clamp(0, 1)


def shows(name, images, noise=0.0, n=2, seed=4):
    """Features and labels that gradients show, the true ones, and their task; images of a fresh model."""
    key, task = Key(seed), ModelTask(build(name, SHAPE, 10))
    params, x = task.init(key), smooth(n * images, key.child("x")).view(n, images, *SHAPE)
    y = (torch.arange(n * images).view(n, images) * 7 + 1) % 10
    estimate = lambda x, y, key: perturbed(gradients(task, params, x, one_hot(y, 10).float()), noise, key)  # noqa: E731
    auxiliary = Examples(smooth(300, key.child("aside")), torch.arange(300) % 10)
    imitate = lambda x, y, key: estimate(x[None], y[None], key)[0]  # noqa: E731
    each = shown(task, params, estimate(x, y, key.child("real")), images, auxiliary, imitate, key.child("attack"))
    front = task.structure.front(task.structure.first_dense)
    return each, [front(front.layout.split(params[: front.layout.dim]), of, None).double() for of in x], y


def perturbed(rows, level, key):
    size = level * rows.norm(dim=1, keepdim=True) / rows.shape[1] ** 0.5
    return rows.detach() + size.detach() * rng.normal(key.child("noise"), tuple(rows.shape))


@pytest.mark.parametrize(
    ("name", "images"),
    [*itertools.product(["lenet5", "cnn2"], [2, 4, 8]), pytest.param("lenet5", 16, marks=pytest.mark.slow)],
)
@pytest.mark.ci("lenet5-8", "cnn2-2", "cnn2-4")
def test_a_gradient_shows_most_features_with_their_labels(name, images):
    each, truth, labels = shows(name, images)
    found = 0
    for (x, y), features, own in zip(each, truth, labels, strict=True):
        off = torch.cdist(x, features) / features.norm(dim=1)
        assert (off.amin(1) < 0.15).all()
        assert torch.equal(y, own[off.argmin(1)])
        found += len(set(off.argmin(1).tolist()))
    assert found >= 0.65 * labels.numel()


def test_noise_leaves_right_features_or_none():
    for noise in (1e-4, 1e-1):
        each, truth, _ = shows("lenet5", 4, noise)
        wrong = [(torch.cdist(x, of) / of.norm(dim=1)).amin(1) > 0.15 for (x, _), of in zip(each, truth, strict=True)]
        assert torch.cat(wrong).double().sum() <= 1
        assert (noise == 1e-4) == (sum(map(len, wrong)) > 0)


def test_inputs_of_a_first_dense_layer_are_not_searched():
    task = ModelTask(build("mlp", SHAPE, 10))
    params = task.init(Key(1))
    assert shown(task, params, params[None], 4, Examples(torch.zeros(9, *SHAPE), torch.zeros(9)), None, Key(1)) == []


def test_a_users_network_shows_what_its_shipped_twin_shows():
    shipped, task = twins("lenet5", "forward")
    params, found = shipped.init(KEY.child("model")), []
    x, aside = (smooth(n, KEY.child("smooth", n), task.input_shape) for n in (4, 200))
    for one, at in ((shipped, params), (task, task.structure.join(shipped.structure.split(params)))):
        seen = sent(one, [(x, torch.arange(4))], params=at)
        seen = replace(seen, auxiliary=Examples(aside, torch.arange(200) % 10))
        (guess,) = MAP(warm=20, evaluations=2).run(seen, Key(5)).guesses
        found.append(score_reconstruction([x], [torch.arange(4)], [guess])[0][0].value)
    assert found[0] == pytest.approx(found[1], abs=0.02)


@pytest.mark.slow
@pytest.mark.parametrize(("images", "least"), [(4, 0.5), (8, 0.4), (16, 0.4)])
def test_batches_of_photographs_behind_a_fresh_lenet5_are_found(images, least, real_data):
    data = load("cifar10", real_data).train
    order = torch.from_numpy(rng.permutation(Key(31), len(data.x)))
    x, y = torch.as_tensor(data.x)[order].float(), torch.as_tensor(data.y)[order].long()
    batches = [(x[at : at + images], y[at : at + images]) for at in range(0, 2 * images, images)]
    task = ModelTask(build("lenet5", (3, 32, 32), 10))
    seen = sent(task, batches, NoDefense(), params=task.init(Key(32)))
    seen = replace(seen, auxiliary=Examples(x[4000:7000], y[4000:7000]))
    guesses = MAP().run(seen, Key(33)).guesses
    (ssim, *_), _ = score_reconstruction(*zip(*batches, strict=True), guesses)
    assert ssim.value > least
