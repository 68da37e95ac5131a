"""Parameters under which an update shows its image: where the energy lies, what they depend on, and what they give."""

import dataclasses

import pytest
import torch

from leakgauge.attacks.map import MAP
from leakgauge.attacks.trap_weights import TrapWeights
from leakgauge.attacks.trap_weights import _trap as trap
from leakgauge.defenses.gaussian import Gaussian
from leakgauge.harness.core.contract import Examples, Observation, Setting, Snapshot
from leakgauge.harness.core.rng import Key
from leakgauge.harness.core.threats import View
from leakgauge.harness.data.embedded import photos
from leakgauge.harness.learn.gradients import gradients
from leakgauge.harness.learn.layers import Dense
from leakgauge.harness.learn.models import build
from leakgauge.harness.learn.tasks import ModelTask
from leakgauge.harness.study.score import score_reconstruction
from tests.doubles import random_examples
from tests.victims import encoded

KEY = Key(7)
CHAINS = ["lenet-dlg", "lenet5", "cnn2", "cnn3", "cnn-udp", "mlp", "mlp-small"]


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    return photos(tmp_path_factory.mktemp("none")).train


def task_of(name, shape=(3, 32, 32), classes=10):
    return ModelTask(build(name, shape, classes))


def energies(task, params, x):
    """[classes, tensors] of the gradient of one image a label."""
    images = x[: task.classes, None]
    found = gradients(task, params, images, torch.eye(task.classes)[:, None])
    return torch.stack([torch.stack([part.square().sum() for part in task.layout.split(row)]) for row in found])


@pytest.fixture(scope="module", params=CHAINS)
def trapped(request, pictures):
    task = task_of(request.param)
    return task, trap(task, pictures.x[::40], KEY)


def test_the_first_dense_layer_holds_most_of_the_gradient_and_the_last_one_enough_to_tell_the_label(pictures, trapped):
    task, params = trapped
    found = energies(task, params, pictures.x[7::97])
    dense = sum(isinstance(layer, Dense) for layer in task.structure.layers)
    share = found / found.sum(1, keepdim=True)
    first = share[:, -2 * dense] + share[:, 1 - 2 * dense]
    if dense == 1:
        assert first.min() > 0.99
    else:
        assert first.mean() > 0.6
        assert 0.1 < share[:, -2].mean() < 0.4
        assert (first + share[:, -2]).min() > 0.95


def test_the_scores_hardly_move_with_the_image(pictures, trapped):
    task, params = trapped
    scores = task.model.apply(task.layout.split(params), pictures.x[400:420], None)
    assert (scores - scores.mean()).abs().max() < 0.02


@pytest.mark.parametrize(("shape", "classes"), [((1, 28, 28), 2), ((3, 32, 32), 3), ((1, 20, 28), 7)])
@pytest.mark.parametrize("name", ["lenet-dlg", "cnn2", "mlp-small"])
def test_other_shapes_and_numbers_of_classes_work(name, shape, classes):
    task = task_of(name, shape, classes)
    params = trap(task, random_examples(30, shape, classes).x, KEY)
    assert params.isfinite().all()
    assert params.shape == (task.layout.dim,)
    found = energies(task, params, random_examples(10, shape, classes, seed=1).x)
    assert (found.sum(1) > 0).all()


def test_the_parameters_follow_from_the_data_and_the_key_alone(pictures):
    task, x = task_of("lenet5"), pictures.x[:50]
    assert torch.equal(trap(task, x, KEY), trap(task, x, KEY))
    assert not torch.equal(trap(task, x, KEY), trap(task, x, Key(8)))


def test_constant_inputs_give_finite_parameters():
    for name in CHAINS:
        assert trap(task_of(name), torch.full((4, 3, 32, 32), 0.5), KEY).isfinite().all()


@pytest.mark.parametrize("name", ["resnet20", "resnet20-bn", "svm", "linear-regression"])
def test_models_without_such_parameters_are_refused(pictures, name):
    with pytest.raises(ValueError, match="trap-weights needs a chain of convolutions and dense layers"):
        trap(task_of(name), pictures.x[:50], KEY)


def test_one_auxiliary_input_is_too_few(pictures):
    with pytest.raises(ValueError, match="expected at least 2 auxiliary inputs to fit the trap weights, got 1"):
        trap(task_of("mlp-small"), pictures.x[:1], KEY)


def watched(pictures, task, params, n=4):
    """What the server sees of n clients with one image, with a hundredth of the update's length as noise."""
    x, y = pictures.x[500 : 500 + n], pictures.y[500 : 500 + n]
    updates = gradients(task, params, x[:, None], torch.nn.functional.one_hot(y, 10).float()[:, None])
    noise = 0.03 * float(updates.norm(dim=1).mean())
    setting = Setting(task.layout, n, n, 1, "gradient", 1, 0.1, 0, 1)
    defense = Gaussian(clip=1e9, noise_std=noise)
    messages = encoded(setting, defense, updates, [1] * n, KEY)
    auxiliary = Examples(pictures.x[:400], pictures.y[:400])
    model = Snapshot(0, params, None)
    seen = Observation(View.parse("server"), setting, task, defense, 0.1, messages=messages, model=model)
    return dataclasses.replace(seen, auxiliary=auxiliary), Examples(x, y)


@pytest.mark.matrix
def test_noise_in_proportion_to_the_update_hides_less_of_the_image(pictures):
    task = task_of("cnn2", (1, 16, 16))
    gray = torch.nn.functional.avg_pool2d(pictures.x.mean(1, keepdim=True), 2)
    pictures = Examples(gray, pictures.y)
    honest, truth = watched(pictures, task, task.init(KEY))
    chosen = TrapWeights().broadcast(honest, KEY)
    trapped, _ = watched(pictures, task, chosen)
    value, effort = [], {"evaluations": 60, "warm": 60}
    for attack, seen in ((MAP(**effort), honest), (TrapWeights(**effort), trapped)):
        guesses = attack.run(seen, KEY).guesses
        estimates, _ = score_reconstruction(list(truth.x[:, None]), list(truth.y[:, None]), guesses)
        value.append({one.name: one.value for one in estimates})
    assert value[1]["ssim"] > value[0]["ssim"] + 0.1
    assert value[1]["label_accuracy"] == 1.0


def test_it_is_map_with_a_broadcast():
    assert TrapWeights().needs == MAP().needs | {"broadcast"}
    assert TrapWeights(labels="given", prior="tv").needs >= {"labels", "auxiliary", "broadcast"}
    assert TrapWeights().aware
