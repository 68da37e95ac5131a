"""Images that `analytic` reads from the patches of vision transformers."""

import itertools

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, interpolate

from leakgauge import rng
from leakgauge.attacks._engine.labels import restore
from leakgauge.attacks._engine.patches import PatchForm
from leakgauge.attacks.analytic import Analytic
from leakgauge.attacks.map import MAP
from leakgauge.defenses.gaussian import Gaussian
from leakgauge.defenses.jopeq import JoPEQ
from leakgauge.defenses.top_k import TopK
from leakgauge.harness.core.contract import Examples
from leakgauge.harness.core.form import PICTURE
from leakgauge.harness.data.torchvision_shim import torchvision
from leakgauge.harness.learn.gradients import gradients, targets_of
from leakgauge.harness.learn.models import build
from leakgauge.harness.learn.modules import given
from leakgauge.harness.learn.tasks import ModelTask
from tests import victims
from tests.by_rows import by_rows
from tests.victims import EXACT, KEY, make


class ViT(nn.Module):
    """Patches by a convolution or a dense layer, class token or mean, norms before or after."""

    def __init__(self, width=64, patch=8, token=True, before=True, dense=False, bias=True, trained=True, side=32):
        super().__init__()
        places = (side // patch) ** 2 + token
        self.token, self.patch = token, patch
        self.a = nn.Linear(3 * patch**2, width, bias) if dense else nn.Conv2d(3, width, patch, patch, bias=bias)
        self.b = nn.Parameter(torch.randn(1, 1, width) / 50) if token else None
        self.c = nn.Parameter(torch.randn(1, places, width) / 50, requires_grad=trained)
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, 0.0, "gelu", batch_first=True, norm_first=before)
        self.d = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.e = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 10))

    def cut(self, x):
        """Patches as users write them: pixels of a patch by rows, columns and channels, normalized."""
        (b, c, h, w), p = x.shape, self.patch
        rows = x.view(b, c, h // p, p, w // p, p).permute(0, 2, 4, 3, 5, 1).reshape(b, -1, p * p * c)
        return (rows - 0.4) / torch.tensor([0.2, 0.25, 0.3]).to(x).repeat(p * p)

    def forward(self, x):
        z = self.a(self.cut(x)) if isinstance(self.a, nn.Linear) else self.a(x).flatten(2).transpose(1, 2)
        z = z if self.b is None else torch.cat([self.b.expand(len(z), -1, -1), z], 1)
        z = self.d(z + self.c)
        return self.e(z[:, 0] if self.token else z.mean(1))


class Grid(nn.Module):
    """Positions [d, h, w], registers behind the patches, and a first layer that is a product with a matrix [m, d]."""

    def __init__(self):
        super().__init__()
        self.cut, self.one = nn.Unfold(8, stride=8), nn.Parameter(torch.randn(192, 48) / 14)
        self.two, self.three = nn.Parameter(torch.randn(48, 4, 4) / 50), nn.Parameter(torch.randn(3, 48) / 50)
        self.four = nn.Sequential(nn.LayerNorm(48), nn.Linear(48, 48), nn.GELU())
        self.five = nn.Linear(48, 10)

    def forward(self, x):
        z = self.cut(x).transpose(1, 2) @ self.one + self.two.flatten(1).T
        z = torch.cat([z, self.three.expand(len(z), -1, -1)], 1)
        return self.five((z + self.four(z)).square().mean(1))


def photographs(n):
    """Smooth color images [n, 3, 32, 32] with some detail."""
    parts = [side**-0.7 * rng.normal(KEY.child("photographs", side), (n, 3, side, side)) for side in (2, 4, 8, 16)]
    return (1.5 * sum(interpolate(part, (32, 32), mode="bicubic") for part in parts)).sigmoid()


NUMBERS = itertools.count()
X, Y = photographs(40), torch.arange(40) % 10


def task_of(make, trained=0):
    """A task with this network, fresh or after some steps."""
    with rng.global_generators(KEY):
        module = make()
        steps = torch.optim.Adam(module.parameters(), 1e-3)
        for _ in range(trained):
            steps.zero_grad()
            cross_entropy(module(X[2:]), Y[2:]).backward()
            steps.step()
    return ModelTask(build(given(f"patches-{next(NUMBERS)}", module if trained else make), (3, 32, 32), 10))


def read(task, defense=None, **how):
    """The guesses of two images, and their SSIM."""
    batches = [(X[i : i + 1], Y[i : i + 1]) for i in range(2)]
    guesses = Analytic().run(victims.sent(task, batches, defense, **how), KEY).guesses
    return guesses, PICTURE.score(X[:2], torch.cat([guess.x for guess in guesses]).clamp(0, 1))["ssim"]


@by_rows(
    ({}, 0),
    ({"token": False}, 60),
    ({"dense": True}, 60),
    ({"before": False, "bias": False}, 0),
    ({"width": 32}, 60),
    ({"width": 192, "patch": 4}, 0),
    ({"width": 64, "patch": 4}, 0),
    ({"width": 64, "patch": 4, "token": False, "dense": True}, 60),
)
@pytest.mark.table(4)
def test_images_are_read_from_fresh_and_trained_transformers_also_with_as_many_places_as_the_width(how, trained):
    assert (read(task_of(lambda: ViT(**how), trained))[1] >= 0.99).all()


def test_positions_on_a_grid_and_a_product_with_a_matrix_are_recognized():
    assert (read(task_of(Grid))[1] >= 0.99).all()


def test_an_update_of_one_step_shows_what_a_gradient_shows():
    assert (read(task_of(ViT), steps=1)[1] >= 0.99).all()


@pytest.mark.matrix
def test_the_transformer_of_torchvision_is_read_once_its_head_is_not_zero():
    transformer = torchvision().models.VisionTransformer
    task = task_of(lambda: transformer(32, 8, 2, 4, 64, 128, num_classes=10), trained=2)
    assert (read(task)[1] >= 0.99).all()
    fresh = task_of(lambda: transformer(32, 8, 2, 4, 64, 128, num_classes=10))
    assert all("positions is zero" in guess.failure for guess in read(fresh)[0])


@by_rows(
    lambda: ViT(trained=False),
    lambda: nn.Sequential(nn.Conv2d(3, 3, 3, padding=1), ViT()),
    lambda: nn.Sequential(nn.LayerNorm(32), ViT()),
)
def test_a_network_without_trained_positions_of_the_patches_of_the_image_is_refused(make):
    assert all("nor patches with trained positions" in guess.failure for guess in read(task_of(make))[0])


def test_a_batch_is_refused():
    task = task_of(ViT)
    (guess,) = Analytic().run(victims.sent(task, [(X[:2], Y[:2])]), KEY).guesses
    assert guess.failure == "expected one image per message, got 2; use map or idlg instead"


def test_the_entries_of_patches_show_single_pixels():
    task = task_of(lambda: ViT(dense=True))
    form = PatchForm.of(task, task.init(KEY).double())
    shown = form.scale * X[0].double().flatten()[form.pixels] + form.shift
    assert torch.allclose(shown, ViT(dense=True).cut(X[:1].double())[0])
    assert form.bias is not None
    assert form.places.tolist() == list(range(1, 17))


def test_the_less_noise_the_more_is_read_and_pure_noise_is_a_gray_image():
    task = task_of(ViT)
    weak, some, all_noise = (read(task, Gaussian(clip=1e3, noise_std=noise))[1].mean() for noise in (1e-5, 1e-3, 1e2))
    gray = PICTURE.score(X[:2], torch.full_like(X[:2], 0.5))["ssim"].mean()
    assert weak > 0.98
    assert weak > some > gray + 0.1
    assert all_noise <= gray + 0.05


def test_the_label_is_read_with_the_image():
    assert [int(guess.y) for guess in read(task_of(ViT))[0]] == Y[:2].tolist()


@pytest.mark.parametrize("defense", [JoPEQ(), Gaussian(epsilon=1e4), TopK()], ids=["jopeq", "gaussian", "top-k"])
def test_behind_a_defense_that_hides_the_positions_a_guess_is_about_gray_or_a_failure(defense):
    gray = (X[:2] - 0.5).square().mean()
    for guess, x in zip(read(task_of(ViT), defense)[0], X[:2], strict=True):
        assert guess.x.isfinite().all()
        assert guess.failure or (guess.x[0].clamp(0, 1) - x).square().mean() < 2 * gray


def test_a_common_factor_changes_nothing():
    task = task_of(ViT)
    form = PatchForm.of(task, task.init(KEY).double())
    gradient = rng.normal(KEY.child("any"), (task.layout.dim,), torch.float64)
    assert torch.equal(form.solve(gradient), form.solve(gradient / 2**20))


def test_map_returns_the_patches_without_a_search():
    case = make(task_of(ViT), n=2)
    guesses = MAP().run(case.seen, KEY).guesses
    assert (case.mse(guesses) < EXACT).all()
    assert all(guess.evaluations == 1 for guess in guesses)


@by_rows(({}, True), ({"token": False}, True), ({}, False))
def test_the_label_behind_a_trained_transformer_is_read_whatever_the_sign_of_its_hidden_state(how, biased):
    def make():
        module = ViT(**how)
        module.e[1] = nn.Linear(64, 10, bias=biased)
        return module

    task = task_of(make, trained=60)
    params, y = task.init(KEY), targets_of(task, Y[:, None], torch.float32)
    sent = gradients(task, params, X[:, None], y)
    for known in (None, Examples(photographs(60)[40:], torch.arange(20) % 10)):
        assert torch.equal(torch.cat(restore(task, params, sent, [1] * 40, KEY, known)), Y)
