"""The normal prior of inputs: its distribution, its coordinates, and what a search in them finds."""

import dataclasses
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from torch.distributions import MultivariateNormal

from leakgauge.attacks._engine.matching import Evaluation
from leakgauge.attacks._engine.prior import Believed
from leakgauge.attacks._search.lbfgs import Stop, minimize
from leakgauge.harness.core.rng import Key, normal, uniform
from leakgauge.harness.learn import prior as module
from leakgauge.harness.learn.prior import GaussianPrior, gaussian_prior

FLOOR = 2e-4


def smooth(count, side=6, seed=0):
    """[count, 1, side, side] images whose neighboring pixels are alike."""
    coarse = uniform(Key(seed), (count, 1, 2, 2))
    return torch.nn.functional.interpolate(coarse, size=(side, side), mode="bilinear", align_corners=True)


def covariance(prior):
    """[p, p] float64, by its definition."""
    factor = prior.factor.double()
    return prior.least * torch.eye(len(factor)) + factor @ factor.T


def energy(prior, x):
    """[m] of inputs [m, b, p]."""
    return prior.energy(prior.coordinates(x), x)


@pytest.mark.parametrize("count", [200, 20])
def test_it_has_the_mean_and_the_floored_covariance_of_the_inputs(count):
    x = smooth(count)
    prior, flat = gaussian_prior(x, 0.0), x.flatten(1).double()
    assert torch.allclose(prior.mean.double(), flat.mean(0), atol=1e-6)
    values, vectors = torch.linalg.eigh(torch.cov(flat.T))
    expected = vectors @ torch.diag(values.clamp(min=FLOOR)) @ vectors.T
    assert torch.allclose(covariance(prior), expected, atol=2e-6)
    assert prior.factor.shape[1] <= 4 < count  # bilinear between four corners


def test_its_value_is_that_of_the_normal_distribution_up_to_a_constant():
    prior, x = gaussian_prior(smooth(50), 0.0), smooth(8, seed=1).flatten(1).double()
    distribution = MultivariateNormal(prior.mean.double(), covariance(prior))
    found = energy(prior, x.float().view(4, 2, 36)) + distribution.log_prob(x).view(4, 2).sum(1)
    assert found.std() < 1e-3


def test_coordinates_and_inputs_are_inverse_and_standard():
    prior, x = gaussian_prior(smooth(50), 0.0), smooth(8, seed=1).flatten(1)
    assert torch.allclose(prior.inputs(prior.coordinates(x)), x, atol=1e-5)
    v = normal(Key(2), (4000, 36 + prior.factor.shape[1]))
    assert torch.allclose(torch.cov(prior.inputs(v).T).double(), covariance(prior), atol=0.01)


def test_inputs_outside_the_box_cost_their_squared_distance():
    prior = gaussian_prior(smooth(50), 10.0)
    x = torch.full((1, 1, 36), 1.5)
    x[..., 0] = -1.0
    apart = energy(prior, x) - energy(dataclasses.replace(prior, box=0.0), x)
    assert float(apart) == pytest.approx(10 * (35 * 0.25 + 1.0), rel=1e-3)


@dataclass(frozen=True)
class Linear:
    """The misfit of A x to y [n, d], in units of the noise: |A x - y|^2 / (2 sigma^2)."""

    matrix: torch.Tensor
    y: torch.Tensor
    sigma: float

    def __call__(self, candidates, instances):
        off = candidates @ self.matrix.T - self.y[instances]
        return Evaluation(0.5 * off.square().sum(1) / self.sigma**2, off @ self.matrix / self.sigma**2)


def test_its_slope_in_the_coordinates_is_that_of_its_value():
    prior = gaussian_prior(smooth(50), 10.0)
    matrix = normal(Key(3), (20, 72))
    whole = Believed(Linear(matrix, normal(Key(4), (3, 20)), 0.5), prior, (36,), 2)
    width = 2 * (36 + prior.factor.shape[1])
    v, direction, step = normal(Key(5), (3, width)).double(), normal(Key(6), (3, width)).double(), 1e-3
    exact = dataclasses.replace(
        whole,
        function=Linear(matrix.double(), whole.function.y.double(), 0.5),
        prior=GaussianPrior(prior.mean.double(), prior.factor.double(), FLOOR, 10.0),
    )
    each = torch.arange(3)
    high, low = (exact(v + sign * step * direction, each).value for sign in (1, -1))
    slope = (exact(v, each).gradient * direction).sum(1)
    assert torch.allclose((high - low) / (2 * step), slope, rtol=1e-5)
    x = exact.prior.inputs(v.view(3, 2, -1)).flatten(1)
    known = exact.prior.energy(v.view(3, 2, -1), x.view(3, 2, 36))
    assert torch.allclose(exact(v, each).value, exact.function(x, each).value + known)
    assert (energy(exact.prior, x.view(3, 2, 36)) < known).all()


@pytest.mark.parametrize(("images", "weight", "others"), [(1, 1.0, 0), (2, 0.3, 3)])
def test_the_slope_by_hand_is_that_of_autograd(images, weight, others):
    prior = gaussian_prior(smooth(80), 100.0)
    width = len(prior.mean) + prior.factor.shape[1]
    linear = Linear(normal(Key(4), (20, images * 36 + others)), normal(Key(5), (4, 20)), 0.5)
    whole = Believed(linear, prior, (1, 6, 6), images, weight, others)
    z = 2 * normal(Key(3), (4, images * width + others))
    found = whole(z, torch.arange(4))
    plain = SimpleNamespace(inputs=prior.inputs, energy=prior.energy)
    expected = dataclasses.replace(whole, prior=plain)(z, torch.arange(4))
    assert torch.equal(found.value, expected.value)
    torch.testing.assert_close(found.gradient, expected.gradient, rtol=1e-4, atol=1e-4)


@pytest.mark.matrix
def test_behind_a_linear_model_a_search_ends_at_the_posterior_mean_and_its_error():
    prior = gaussian_prior(smooth(300), 0.0)
    spread, n, sigma = covariance(prior), 200, 0.1
    width = 36 + prior.factor.shape[1]
    x = prior.inputs(normal(Key(9), (n, width)))
    matrix = normal(Key(7), (12, 36))
    y = x @ matrix.T + sigma * normal(Key(8), (n, 12))
    found = minimize(
        Believed(Linear(matrix, y, sigma), prior, (36,), 1), torch.zeros(n, width), Stop(60, torch.zeros(n))
    )
    posterior = torch.linalg.inv(torch.linalg.inv(spread) + matrix.double().T @ matrix.double() / sigma**2)
    mean = prior.mean + ((y - prior.mean @ matrix.T) @ matrix / sigma**2) @ posterior.float()
    assert torch.allclose(prior.inputs(found.x), mean, atol=2e-3)
    errors = (prior.inputs(found.x) - x).square().mean(1)
    expected = float(posterior.trace()) / 36
    assert float(errors.mean()) == pytest.approx(expected, abs=4 * float(errors.std()) / n**0.5)
    assert float(errors.mean()) == pytest.approx(expected, rel=0.2)


@pytest.mark.parametrize("x", [torch.zeros(1, 4), torch.tensor([[0.0], [torch.nan]]), torch.zeros(0, 4)])
def test_too_few_or_infinite_inputs_are_refused(x):
    with pytest.raises(ValueError, match="at least two finite auxiliary inputs"):
        gaussian_prior(x, 0.0)


def test_a_fit_is_kept_by_what_it_was_fitted_to():
    assert gaussian_prior(smooth(50), 1.0) is gaussian_prior(smooth(50).clone(), 1.0)
    assert gaussian_prior(smooth(50), 1.0) is not gaussian_prior(smooth(50, seed=3), 1.0)


def test_of_large_inputs_the_leading_components_are_kept_and_the_others_share_their_variance(monkeypatch):
    x = uniform(Key(0), (200, 1, 6, 6)) + smooth(200)
    monkeypatch.setattr(module, "_ENTRIES", 5 * 36)
    prior, flat = gaussian_prior(x, 0.0), x.flatten(1).double()
    values = torch.linalg.eigvalsh(torch.cov(flat.T))
    assert prior.factor.shape == (36, 5)
    assert prior.least == pytest.approx(float(values[:-5].mean()), rel=1e-6)
    assert torch.allclose(prior.factor.double().square().sum(0) + prior.least, values[-5:], rtol=1e-4)


@pytest.mark.parametrize(("count", "words"), [(50, ""), (20, ", fewer than the entries of one")])
def test_it_says_what_it_was_fitted_to(count, words):
    assert gaussian_prior(smooth(count), 0.0).words == f"normal distribution of {count} auxiliary inputs{words}"
