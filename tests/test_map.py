"""MAP: the gain from knowing the defense, the image prior, the closed form and the search by direction."""

import dataclasses

import pytest
import torch
from skimage.filters import gaussian as blur

from leakgauge import Key, rng
from leakgauge.attacks._engine import reconstruct
from leakgauge.attacks._engine.imitation import explained_at
from leakgauge.attacks._engine.objective import Explains, objective
from leakgauge.attacks._engine.prior import ImagePrior
from leakgauge.attacks.dlg import DLG
from leakgauge.attacks.idlg import IDLG
from leakgauge.attacks.inverting_gradients import InvertingGradients
from leakgauge.attacks.map import MAP
from leakgauge.defenses.dp_fedavg import DPFedAvg
from leakgauge.defenses.gaussian import Gaussian
from leakgauge.defenses.laplace import Laplace
from leakgauge.defenses.none import NoDefense
from leakgauge.defenses.sdq import SDQ
from leakgauge.harness.core.contract import Examples, Link, Message, Observation, Sender, Setting, Snapshot
from leakgauge.harness.core.threats import View
from leakgauge.harness.learn.gradients import gradients
from leakgauge.harness.learn.models import build
from leakgauge.harness.learn.prior import gaussian_prior
from leakgauge.harness.learn.tasks import ModelTask
from tests.by_rows import by_rows

LENET = ModelTask(build("lenet-dlg", (1, 16, 16), 10), "dlg")
N = 4


def smooth_images(n=N, side=16, key=Key(1)):  # noqa: B008  # immutable
    """Blurred noise, stretched to [0, 1]: neighboring pixels are similar, as in photographs."""
    x = rng.uniform(key, (n, 1, side, side))
    x = torch.stack([torch.from_numpy(blur(image[0].numpy(), 2))[None] for image in x]).float()
    low, high = x.amin((2, 3), keepdim=True), x.amax((2, 3), keepdim=True)
    return (x - low) / (high - low)


def observation(defense, x, task=LENET, params=None):
    """What a server sees of one gradient per image."""
    params = task.init(Key(2)) if params is None else params
    y = torch.arange(len(x)) % 10
    sent = gradients(task, params, x[:, None], torch.nn.functional.one_hot(y, 10)[:, None].float())
    setting = Setting(task.layout, 4, 4, 1, sends="gradient", steps=1, lr=0.1, batch=0, samples=1)
    messages = []
    for i, row in enumerate(sent):
        sender, private = Sender(i, 1), Key(3).child(i)
        wire, _ = defense.encode(None, None, row, Link(setting, sender, Key(4)), private)
        messages.append(Message(0, sender, wire, None, 1))
    others = Examples(smooth_images(300, x.shape[-1], Key(8)), torch.arange(300) % 10)
    view, model = View.parse("server"), Snapshot(0, params, None)
    return Observation(view, setting, task, defense, 0.1, messages=tuple(messages), model=model, auxiliary=others)


def mse(attack, seen, x):
    """[n], of each victim."""
    return errors(attack.run(seen, Key(5)).guesses, x)


def errors(guesses, x):
    """[n] mean squared error of each guess."""
    return torch.stack([(guess.x[0] - image).square().mean() for guess, image in zip(guesses, x, strict=True)])


@pytest.mark.parametrize(
    "defense",
    [Gaussian(clip=2.0, noise_std=0.01), Laplace(clip=0.05, noise_std=0.01)],
    ids=["gaussian that clips", "laplace that clamps"],
)
@pytest.mark.matrix
def test_the_aware_attack_beats_the_naive_one(defense):
    x = smooth_images(2)
    seen = observation(defense, x)
    naive = mse(IDLG(restarts=1, evaluations=300), seen, x)
    aware = mse(MAP(evaluations=300), seen, x)
    assert (aware < naive / 4).all()
    assert aware.median() < 0.02


@pytest.mark.parametrize("task", ["lenet-dlg", "cnn2"])
@pytest.mark.matrix
def test_a_gaussian_prior_finds_more_under_noise_with_fewer_evaluations(task):
    x, task = smooth_images(), ModelTask(build(task, (1, 16, 16), 10), "dlg" if task == "lenet-dlg" else "default")
    seen = observation(Gaussian(clip=100.0, noise_std=0.05), x, task)
    smooth, informed = MAP(prior="tv", evaluations=200, warm=60), MAP(evaluations=60, warm=60)
    assert mse(informed, seen, x).mean() < 0.75 * mse(smooth, seen, x).mean()


@pytest.mark.matrix
def test_a_gaussian_prior_leaves_an_undefended_image_exact_and_repeats_itself():
    x = smooth_images()
    seen = observation(NoDefense(), x)
    first, second = (MAP(evaluations=200, solve=False).run(seen, Key(5)).guesses for _ in range(2))
    assert (errors(first, x) < 1e-4).all()
    assert all(torch.equal(one.x, other.x) for one, other in zip(first, second, strict=True))


@pytest.mark.matrix
def test_the_prior_alone_does_not_explain_the_gain():
    x = smooth_images()
    seen = observation(Gaussian(clip=2.0, noise_std=0.01), x)
    blind = mse(MAP(objective="l2", evaluations=600), seen, x)
    aware = mse(MAP(evaluations=600), seen, x)
    assert aware.mean() < blind.mean()
    assert MAP().aware
    assert not MAP(objective="l2").aware


@pytest.mark.parametrize(("prior", "share", "most"), [("tv", 0.5, 300), ("gaussian", 0.8, 600)])
@pytest.mark.matrix
def test_behind_kinks_a_search_by_features_or_by_direction_comes_first(prior, share, most):
    task, x = ModelTask(build("lenet5", (1, 16, 16), 10)), smooth_images(8)
    seen = observation(NoDefense(), x, task)
    cold, warm = (
        MAP(evaluations=150, warm=evaluations, prior=prior).run(seen, Key(5)).guesses for evaluations in (0, 150)
    )
    assert errors(warm, x).mean() < share * errors(cold, x).mean()
    assert all(most - 150 < guess.evaluations <= most for guess in warm)


@pytest.mark.parametrize("defense", [NoDefense(), DPFedAvg(clip=0.5, noise_std=1.0)], ids=["none", "dp-fedavg"])
@pytest.mark.table(2)
def test_nothing_is_searched_if_the_closed_form_explains_all(defense):
    x = smooth_images()
    seen = observation(defense, x)
    guesses = MAP().run(seen, Key(5)).guesses
    assert [guess.evaluations for guess in guesses] == [1] * N
    assert (errors(guesses, x) < 1e-11).all()
    assert (mse(MAP(evaluations=100, solve=False), seen, x) > 1e-11).all()


def test_a_closed_form_spoiled_by_noise_does_not_change_the_search():
    x = smooth_images(2)
    seen = observation(Gaussian(clip=2.0, noise_std=0.01), x)
    with_it, without = (MAP(evaluations=60, solve=solve).run(seen, Key(5)).guesses for solve in (True, False))
    assert all(torch.equal(a.x, b.x) for a, b in zip(with_it, without, strict=True))


def test_behind_a_smooth_model_no_search_by_direction_comes_first():
    x = smooth_images(2)
    seen = observation(NoDefense(), x)
    cold, warm = (MAP(evaluations=60, warm=evaluations).run(seen, Key(5)) for evaluations in (0, 300))
    assert [guess.evaluations for guess in cold.guesses] == [guess.evaluations for guess in warm.guesses]


def own_prior(x, box):
    """A plug-in: the normal distribution of the blurred auxiliary inputs."""
    return dataclasses.replace(gaussian_prior(x, box), words="my own distribution")


def test_a_prior_of_somebody_else_is_plugged_in_by_name():
    x = smooth_images(2)
    seen = observation(Gaussian(clip=2.0, noise_std=0.01), x)
    own, ours = (MAP(prior=name, evaluations=30).run(seen, Key(5)) for name in ("tests.test_map:own_prior", "gaussian"))
    assert (own.prior, ours.prior) == ("my own distribution", "normal distribution of 300 auxiliary inputs")
    assert all(torch.equal(a.x, b.x) for a, b in zip(own.guesses, ours.guesses, strict=True))


@by_rows(
    ("Gauss", "no prior 'Gauss'; did you mean 'gaussian'"),
    ("tests.test_map:other", "no prior 'tests.test_map:other': AttributeError: module"),
    ("nowhere:other", "no prior 'nowhere:other': ModuleNotFoundError: No module named 'nowhere'"),
    ("tests.test_map:N", "expected a function of auxiliary inputs"),
)
def test_an_unknown_prior_is_refused(name, problem):
    with pytest.raises(ValueError, match=problem):
        MAP(prior=name)


def test_a_fitted_prior_needs_auxiliary_data_and_total_variation_does_not():
    assert "auxiliary" in MAP(labels="given").needs
    assert "auxiliary" not in MAP(labels="given", prior="tv").needs
    seen = dataclasses.replace(observation(NoDefense(), smooth_images(2)), auxiliary=Examples(*torch.zeros(2, 0)))
    with pytest.raises(ValueError, match="at least two finite auxiliary inputs, got 0"):
        MAP().run(seen, Key(5))


def test_a_prior_prefers_smooth_images_inside_the_box():
    prior = ImagePrior(tv=5.0, box=1000.0)
    flat = torch.full((1, 1, 3, 8, 8), 0.5)
    rough = flat + 0.2 * rng.normal(Key(0), tuple(flat.shape)).sign()
    assert prior.energy(flat, flat) == 0
    assert prior.energy(rough, rough) > 100
    assert prior.energy(flat, flat + 0.6) == pytest.approx(1000 * 0.1**2 * flat.numel(), rel=1e-5)
    vectors = torch.full((2, 1, 5), 1.5)
    assert prior.energy(vectors, vectors).tolist() == pytest.approx([1000 * 0.25 * 5] * 2)


def test_the_prior_of_large_differences_is_the_total_variation():
    x = torch.zeros(1, 1, 1, 2, 2)
    x[..., 1, 1] = 1.0
    # two differences of one, each reduced by the width of the rounded tip
    assert float(ImagePrior(1.0, 0.0).energy(x, x)) == pytest.approx(2 * ((1 + 1e-4) ** 0.5 - 1e-2), rel=1e-6)


@pytest.mark.matrix
def test_a_search_begins_where_units_are_active(monkeypatch):
    x, task = smooth_images(8), ModelTask(build("lenet5", (1, 16, 16), 10))
    params, mean = task.init(Key(2)), smooth_images(300, key=Key(8)).mean(0)
    weight, bias = params[:150].view(6, 1, 5, 5), params[150:156]
    # the mean input of the attacker's data activates no unit
    bias.copy_(-torch.nn.functional.conv2d(mean[None], weight, padding=2).amax((0, 2, 3)) - 0.01)
    seen = observation(Gaussian(clip=10.0, noise_std=0.003), x, task, params)
    awake = mse(MAP(evaluations=150, warm=150), seen, x)
    monkeypatch.setattr(reconstruct, "_FARTHER", ())
    asleep = mse(MAP(evaluations=150, warm=150), seen, x)
    assert awake.mean() < 0.9 * asleep.mean()
    assert all(guess.evaluations == 1 for guess in MAP(warm=0).run(seen, Key(5)).guesses)


@pytest.mark.matrix
def test_softened_layers_lead_to_the_active_units_behind_a_quantizer_and_dense_relu(monkeypatch):
    x, task = smooth_images(24, side=8), ModelTask(build("mlp-small", (1, 8, 8), 10))
    seen = observation(SDQ(), x, task)
    after = MAP(evaluations=100).run(seen, Key(5)).guesses
    monkeypatch.setattr(reconstruct, "_BENDS", ())
    before = MAP(evaluations=400).run(seen, Key(5)).guesses
    assert sum(a.evaluations for a in after) < 0.7 * sum(b.evaluations for b in before)
    ratios = errors(after, x) / errors(before, x)
    assert int((ratios < 0.7).sum()) >= 6  # both find the most probable image of others
    assert float(ratios.log().mean().exp()) < 0.8  # some end at a worse image


@pytest.mark.parametrize("defense", [SDQ(), Laplace(clip=1.0, noise_std=0.003), Gaussian(clip=4.0, noise_std=0.003)])
def test_the_truth_explains_its_message_and_another_image_does_not(defense):
    x, task = smooth_images(8, side=8), ModelTask(build("mlp-small", (1, 8, 8), 10))
    seen, labels = observation(defense, x, task), torch.arange(8)[:, None] % 10
    explains = Explains("likelihood", unroll=True)
    goal = objective(seen, seen.observed_rounds, labels, explains)
    bound = explained_at(seen, seen.observed_rounds, x[:, None], labels, explains, Key(6))
    assert bool((goal.messages(x.flatten(1), torch.arange(8)).value <= bound).all())
    other = x.roll(1, 0)
    bound = explained_at(seen, seen.observed_rounds, other[:, None], labels, explains, Key(6))
    assert not bool((goal.messages(other.flatten(1), torch.arange(8)).value <= bound).any())
    few = seen.of(range(5, 8))
    part = explained_at(few, few.observed_rounds, other[5:, None], labels[5:], explains, Key(6))
    torch.testing.assert_close(part, bound[5:], rtol=1e-4, atol=1e-4)  # whatever the other victims


@pytest.mark.table(2)
@by_rows((IDLG, "gaussian"), (IDLG, "tv"), (DLG, "gaussian"), (DLG, "tv"), (InvertingGradients, "gaussian"))
@pytest.mark.matrix
def test_every_search_attack_takes_a_prior_which_helps_under_noise(attack, prior):
    x = smooth_images(2 * N)
    # a search by direction is for models with kinks
    task = LENET if attack is not InvertingGradients else ModelTask(build("cnn2", (1, 16, 16), 10))
    seen = observation(Gaussian(clip=4.0, noise_std=0.01), x, task)
    bare, informed = attack(evaluations=200, restarts=1), attack(evaluations=200, restarts=1, prior=prior)
    found = informed.run(seen, Key(5))
    assert errors(found.guesses, x).mean() < 0.7 * mse(bare, seen, x).mean()
    assert found.guesses[0].x.shape == x[:1].shape
    assert ("normal distribution of 300" in found.prior) == (prior == "gaussian")
    assert ("auxiliary" in informed.needs) == ("auxiliary" in bare.needs or prior == "gaussian")


@pytest.mark.parametrize("attack", [IDLG, DLG, InvertingGradients])
def test_every_search_attack_refuses_an_unknown_prior_and_takes_anothers(attack):
    with pytest.raises(ValueError, match="no prior 'gausian'; did you mean 'gaussian'"):
        attack(prior="gausian")
    seen = observation(NoDefense(), smooth_images())
    assert attack(evaluations=3, prior="tests.test_map:own_prior").run(seen, Key(5)).prior == "my own distribution"
