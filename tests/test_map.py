import pytest
import torch
from skimage.filters import gaussian as blur

from attacks._image_prior import ImagePrior
from attacks.idlg import IDLG
from attacks.map import MAP
from defenses.gaussian import Gaussian
from defenses.laplace import Laplace
from harness import rng
from harness.contract import Message, Observation, Sender, Setting, Snapshot
from harness.matching import gradients
from harness.models import build
from harness.rng import Key
from harness.tasks import ModelTask
from harness.threats import View

LENET = ModelTask(build("lenet-dlg", (1, 16, 16), 10), "dlg")
N = 4


def smooth_images(n=N, side=16):
    """Blurred noise, stretched to [0, 1]: neighbours are alike, as in photographs."""
    x = rng.uniform(Key(1), (n, 1, side, side))
    x = torch.stack([torch.from_numpy(blur(image[0].numpy(), 2))[None] for image in x]).float()
    low, high = x.amin((2, 3), keepdim=True), x.amax((2, 3), keepdim=True)
    return (x - low) / (high - low)


def observation(defense, x):
    """What a server sees of one gradient an image."""
    params = LENET.init(Key(2))
    y = torch.arange(len(x)) % 10
    sent = gradients(LENET, params, x[:, None], torch.nn.functional.one_hot(y, 10)[:, None].float())
    setting = Setting(LENET.layout, 4, 4, 1, sends="gradient", steps=1, lr=0.1, batch=0, samples=1)
    messages = []
    for i, row in enumerate(sent):
        sender, private = Sender(i, 1), Key(3).child(i)
        wire, _ = defense.encode(None, None, row, sender=sender, private=private, shared=Key(4), setting=setting)
        messages.append(Message(0, sender, wire, None, 1))
    view = View.parse("server")
    return Observation(view, setting, LENET, defense, 0.1, messages=tuple(messages), model=Snapshot(0, params, None))


def mse(attack, seen, x):
    """Of each victim."""
    guesses = attack.run(seen, Key(5)).guesses
    return torch.stack([(guess.x[0] - image).square().mean() for guess, image in zip(guesses, x, strict=True)])


@pytest.mark.parametrize(
    "defense",
    [Gaussian(clip=2.0, noise_std=0.01), Laplace(clip=0.05, noise_std=0.01)],
    ids=["gaussian that clips", "laplace that clamps"],
)
def test_who_knows_the_clip_the_noise_and_images_sees_through_what_stops_the_naive(defense):
    x = smooth_images()
    seen = observation(defense, x)
    naive = mse(IDLG(restarts=1, evaluations=600), seen, x)
    aware = mse(MAP(evaluations=600), seen, x)
    assert (aware < naive / 4).all()
    assert aware.median() < 0.02


def test_the_prior_alone_does_not_explain_the_gain():
    x = smooth_images()
    seen = observation(Gaussian(clip=2.0, noise_std=0.01), x)
    blind = mse(MAP(objective="l2", evaluations=600), seen, x)
    aware = mse(MAP(evaluations=600), seen, x)
    assert aware.mean() < blind.mean()
    assert MAP().aware
    assert not MAP(objective="l2").aware


def test_a_prior_prefers_smooth_images_inside_the_box():
    prior = ImagePrior(tv=5.0, box=1000.0)
    flat = torch.full((1, 1, 3, 8, 8), 0.5)
    rough = flat + 0.2 * rng.normal(Key(0), tuple(flat.shape)).sign()
    assert prior(flat) == 0
    assert prior(rough) > 100
    assert prior(flat + 0.6) == pytest.approx(1000 * 0.1**2 * flat.numel(), rel=1e-5)
    assert prior(torch.full((2, 1, 5), 1.5)).tolist() == pytest.approx([1000 * 0.25 * 5] * 2)


def test_a_prior_is_the_total_variation_where_differences_are_large():
    x = torch.zeros(1, 1, 1, 2, 2)
    x[..., 1, 1] = 1.0
    # two differences of one, each less the width of the rounded tip
    assert float(ImagePrior(1.0, 0.0)(x)) == pytest.approx(2 * ((1 + 1e-4) ** 0.5 - 1e-2), rel=1e-6)


@pytest.mark.parametrize(
    ("parameters", "said"),
    [
        ({"tv": -1.0}, "expected tv >= 0, got tv=-1.0"),
        ({"box": float("inf")}, "expected box >= 0"),
        ({"evaluations": 0}, "expected evaluations >= 1"),
        ({"labels": "guessed"}, "expected labels 'inferred' or 'given'"),
        ({"naive_std": 0.0}, "expected naive_std > 0"),
    ],
)
def test_parameters_out_of_range_are_named(parameters, said):
    with pytest.raises(ValueError, match=said):
        MAP(**parameters)


def test_given_labels_are_needed_where_they_are_used():
    assert MAP(labels="given").needs == {"messages", "models", "labels"}
