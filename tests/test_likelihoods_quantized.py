"""The likelihoods of rounded or noisy messages: distributions, overload, an unknown dither, slopes, and attacks.

Every statistical test has a false-alarm rate of at most 1e-6.
"""

import math

import numpy as np
import pytest
import torch
from scipy import stats

from leakgauge import Key, Link, Links, rng
from leakgauge.attacks.map import MAP
from leakgauge.defenses._common.misfit import WALL, ball_misfit, rounded_misfit
from leakgauge.defenses.cepam_clip import CepamClip
from leakgauge.defenses.cepam_gaussian import CepamGaussian
from leakgauge.defenses.cepam_laplace import CepamLaplace
from leakgauge.defenses.gaussian import Gaussian
from leakgauge.defenses.jopeq import JoPEQ
from leakgauge.defenses.jopeq_sound import SoundJoPEQ
from leakgauge.defenses.jopeq_t import JoPEQT
from leakgauge.defenses.laplace import Laplace
from leakgauge.defenses.sdq import SDQ
from leakgauge.defenses.sdq_lattice import LatticeSDQ
from leakgauge.defenses.t_noise import TNoise
from leakgauge.harness.federation import registry
from tests.by_rows import by_rows
from tests.jopeq_case import PRIVATE, SHARED, WHO, encode, setting_of
from tests.oracles import ALPHA, follows
from tests.victims import make

QUANTIZED = {
    "sdq": SDQ(bits=4),
    "sdq-lattice": LatticeSDQ(bits=4),
    "jopeq": JoPEQ(epsilon=10.0, bits=3),
    "jopeq-t": JoPEQT(bits=4),
    "jopeq-sound": SoundJoPEQ(epsilon=10.0, bits=3),
    "laplace+sdq": registry.build("defense", "laplace+sdq", {"epsilon": 10.0, "bits": 3}),
    "gaussian+sdq": registry.build("defense", "gaussian+sdq", {"noise_std": 0.1, "clip": 9.0, "bits": 4}),
    "t-noise+sdq-lattice": registry.build("defense", "t-noise+sdq-lattice", {"bits": 4}),
    "laplace+sdq-lattice": registry.build("defense", "laplace+sdq-lattice", {"epsilon": 10.0, "bits": 4}),
}
NOISY = {
    "cepam-gaussian": CepamGaussian(gamma=7.0),
    "cepam-gaussian 2": CepamGaussian(gamma=7.0, dimension=2),
    "cepam-gaussian 3": CepamGaussian(gamma=7.0, dimension=3),
    "cepam-laplace": CepamLaplace(gamma=7.0),
    "cepam-clip": CepamClip(clip=20.0),
    "gaussian": Gaussian(clip=20.0, noise_std=0.1),
    "laplace": Laplace(noise_std=0.1),
    "t-noise": TNoise(),
}
EVERY = QUANTIZED | NOISY
CLAMPED = {"jopeq-sound", "laplace", "laplace+sdq", "laplace+sdq-lattice"}


def scorer(defense, wires, d, shared):
    return defense.likelihood(None, wires, Links(setting_of(d), [WHO] * len(wires), shared))


def chance(r, side, step, noise, dithered):
    """P(r plus Laplace noise lies in the cell around 0), averaged over an unknown dither, by quadrature."""
    r = r[:, None] if dithered else r[:, None] + step * ((np.arange(2000) + 0.5) / 2000 - 0.5)
    low, high = (-np.inf if side < 0 else -step / 2), (np.inf if side > 0 else step / 2)

    def below(x):
        return np.where(x < 0, 0.5 * np.exp(np.minimum(x, 0)), 1 - 0.5 * np.exp(-np.maximum(x, 0)))

    # on the side of the tail, where differences of small numbers keep their digits
    a, b = (low - r) / noise, (high - r) / noise
    return np.where(a > 0, below(-a) - below(-b), below(b) - below(a)).mean(1)


@pytest.mark.parametrize("dithered", [True, False])
@pytest.mark.parametrize("side", [0.0, 1.0, -1.0])
@pytest.mark.parametrize(("step", "noise"), [(1.0, 0.03), (1.2, 0.43), (0.1, 0.4)])
def test_the_distribution_of_a_rounded_number_is_noise_in_a_cell(step, noise, side, dithered):
    r = np.linspace(-2.3, 2.3, 24) * max(step, noise)
    expected = -np.log(chance(r, side, step, noise, dithered))
    if side == 0:
        expected += np.log(chance(np.zeros(1), side, step, noise, dithered))
    distribution = rounded_misfit(torch.full((24, 1), side), step, noise, dithered=dithered)
    # the error of the quadrature is at most its spacing over the noise's scale
    tolerance = 1e-5 if dithered else 2e-4
    assert distribution(torch.tensor(r)[:, None]).tolist() == pytest.approx(expected.tolist(), rel=1e-5, abs=tolerance)


@pytest.mark.parametrize("dithered", [True, False])
@pytest.mark.parametrize("side", [0.0, 1.0, -1.0])
@pytest.mark.parametrize("noise", [0.0, 0.4, 5.0])
def test_the_slope_of_a_cell_is_the_derivative_of_its_distribution(noise, side, dithered):
    r = torch.linspace(-2.03, 2.07, 41, dtype=torch.float64)[:, None].requires_grad_()
    distribution = rounded_misfit(torch.full((41, 1), side, dtype=torch.float64), 1.0, noise, dithered=dithered)
    assert torch.autograd.gradcheck(distribution, (r,), atol=1e-6)


def test_a_cell_without_noise_has_a_wall_of_a_fiftieth_of_its_width():
    distribution = rounded_misfit(torch.zeros(4, 1), 2.0, 0.0, dithered=True)
    inside, wall, out, far = distribution(torch.tensor([[0.5], [1.0], [1.1], [1.2]])).tolist()
    assert inside == pytest.approx(0, abs=1e-4)
    assert wall == pytest.approx(math.log(2), abs=1e-4)
    assert far - out == pytest.approx(0.1 / (2.0 * WALL), rel=1e-4)
    assert ball_misfit(torch.tensor([[0.5], [1.0], [1.1], [1.2]])).tolist() == pytest.approx(
        [inside, wall, out, far], abs=1e-5
    )


def test_the_levels_of_jopeq_have_the_frequencies_of_the_outsiders_distribution():
    # 200,000 equal numbers; a chi-square test of the levels' frequencies
    n, x, defense = 200_000, 0.3, JoPEQ(epsilon=10.0, bits=2, gamma=1.0, scale="public")
    step, top = defense.lattice.step, defense.lattice.top
    wire = encode(defense, torch.full((n,), x))
    here = setting_of(n)
    middles = defense.estimate(None, wire, Link(here, WHO, None)) / step
    seen = np.bincount(middles.round().long().numpy() + top, minlength=2 * top + 1)
    residual = x - step * torch.arange(-top, top + 1, dtype=torch.float64)
    side = torch.zeros(2 * top + 1, 1)
    side[0], side[-1] = -1.0, 1.0
    chances = (-rounded_misfit(side, step, defense.noise_scale, dithered=False)(residual[:, None])).exp().numpy()
    chances[1:-1] *= chance(np.zeros(1), 0, step, defense.noise_scale, False)
    assert chances.sum() == pytest.approx(1, abs=1e-4)
    assert seen.min() > 20
    assert stats.chisquare(seen, n * chances / chances.sum()).pvalue > ALPHA
    off = np.roll(chances, 1)
    assert stats.chisquare(seen, n * off / off.sum()).pvalue < ALPHA


@pytest.mark.parametrize("factor", [1.0, 1.06])
def test_the_servers_distribution_of_jopeq_is_the_distribution_of_its_errors(factor):
    # Kolmogorov-Smirnov at 1e-6 detects 0.005 in 300,000; a scale off by 6 % moves the distribution by 0.01
    n, defense = 300_000, JoPEQ(epsilon=10.0, bits=6, gamma=16.0, scale="public")
    wire = encode(defense, torch.zeros(n))
    sent = defense.estimate(None, wire, Link(setting_of(n), WHO, SHARED)).double()
    grid = torch.linspace(-4.0, 4.0, 8001, dtype=torch.float64)[:, None]
    distribution = rounded_misfit(torch.zeros(8001, 1), defense.lattice.step, defense.noise_scale, dithered=True)
    mass = (-distribution(grid)).exp().cumsum(0).numpy()
    found = follows(factor * sent.numpy(), lambda x: np.interp(x, grid[:, 0].numpy(), mass / mass[-1]))
    assert found == (factor == 1.0)


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("name", EVERY)
def test_the_truth_scores_better_than_a_candidate_at_the_distance_of_a_cell_or_of_the_noise(name, known):
    defense, d = EVERY[name], 1000
    if not known and name.startswith("cepam"):
        return  # only the norm can be read
    update = 0.3 * rng.normal(Key(2), (d,))
    keys = [SHARED.child(i) for i in range(20)]
    wires = [encode(defense, update, PRIVATE.child(i), key) for i, key in enumerate(keys)]
    score = scorer(defense, wires, d, keys if known else None)
    away = 0.2 * rng.normal(Key(3), (20, d))
    away -= (away @ update)[:, None] * update / update.square().sum() + away.mean(1, keepdim=True)
    away = update + away
    # the same norm and mean, so that the scales do not differ
    away = (away - away.mean(1, keepdim=True)) * update.std() / away.std(1, keepdim=True) + update.mean()
    true, false = score(update.expand(20, -1)), score(away)
    assert (true >= 0).all()
    assert (true < false).all()


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("bits", [1, 3])
def test_the_servers_distribution_is_wrong_without_the_dither_and_the_outsiders_distribution_with_it(known, bits):
    # 20,000 numbers; both distributions have the same peak, so that the scores are comparable
    n, step = 20_000, 2.0**-bits
    x = rng.uniform(Key(4), (1, n), -4.0, 4.0)
    dither = rng.uniform(Key(5), (1, n), -0.5, 0.5)
    levels = (x / step + dither).round()
    residual = x - step * (levels - dither if known else levels)
    side = torch.zeros(1, n)
    right, wrong = (
        float(rounded_misfit(side, step, 0.0, dithered=distribution)(residual)) for distribution in (known, not known)
    )
    assert right < wrong
    # 0, and -E ln(1 - |r|/step) of a triangular r, up to the blur
    assert right / n == pytest.approx(0.0 if known else 0.5, abs=0.05)


@pytest.mark.parametrize("known", [True, False])
@by_rows(
    JoPEQ(epsilon=1000.0, bits=2, gamma=0.2, scale="public"),  # no private noise
    JoPEQ(epsilon=100.0, bits=2, gamma=0.2, scale="public"),
    SoundJoPEQ(epsilon=200.0, bits=2, gamma=0.2),
    JoPEQT(s2=0.001, nu=4.0, bits=2, gamma=0.2, scale="public"),
    registry.build("defense", "laplace+sdq", {"noise_std": 0.01, "bits": 2, "gamma": 0.2}),
    registry.build("defense", "laplace+sdq-lattice", {"noise_std": 0.01, "bits": 2, "gamma": 0.2}),
    registry.build("defense", "gaussian+sdq", {"noise_std": 0.01, "clip": 8.0, "bits": 2, "gamma": 0.06}),
    ids=repr,
)
@pytest.mark.parametrize("sign", [1, -1])
def test_the_cost_does_not_rise_beyond_the_outermost_cell_but_inside(defense, known, sign):
    # beyond the edge of 0.16, also for lattice pairs along both generators, whether neighbors or halves form pairs
    beyond = sign * torch.tensor([0.25, 0.5] * 16 + [0.5, 0.85] * 16)
    wire = encode(defense, beyond)
    score = scorer(defense, [wire], 64, [SHARED] if known else None)
    edge, far, inside, other = (float(score(factor * beyond[None])) for factor in (1.0, 1.15, 0.15, -1.0))
    assert 0 <= far <= edge < inside < other


@pytest.mark.parametrize("name", ["sdq", "sdq-lattice"])
def test_an_outlier_of_a_bare_quantizer_may_be_anywhere_beyond_the_edge(name):
    # two numbers in a thousand are far outside of 1.5 times three standard deviations
    defense, d = {"sdq": SDQ(bits=3), "sdq-lattice": LatticeSDQ(bits=3)}[name], 1000
    numbers = 0.3 * rng.normal(Key(6), (1, d))
    lattice = defense.lattice
    assert not lattice.side(lattice.read(lattice.pack(numbers[0], SHARED), d)).any()
    numbers[0, 10:12] = torch.tensor([9.0, 14.0])
    levels = lattice.read(lattice.pack(numbers[0], SHARED), d)
    side = lattice.side(levels[None])
    assert side.nonzero().tolist() == [[0, 10], [0, 11]]
    sent = lattice.place(levels, d, SHARED)
    misfit = defense.misfit(side, dithered=True)
    scores = []
    for factor in (1.0, 2.0, 0.05):
        moved = numbers.clone()
        moved[0, 10:12] *= factor
        scores.append(float(misfit(moved - sent)))
    assert scores[0] == pytest.approx(scores[1], abs=1e-3)
    assert scores[2] > scores[0] + 10


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("name", EVERY)
def test_slopes_are_finite_and_lead_back_from_far_away(name, known):
    defense, d = EVERY[name], 500
    update = 0.3 * rng.normal(Key(7), (d,))
    score = scorer(defense, [encode(defense, update)], d, [SHARED] if known else None)
    for distance in (0.0, 1e-3, 10.0, 1e6):
        candidate = (update + distance * rng.normal(Key(8), (1, d))).requires_grad_()
        value = score(candidate)
        (slope,) = torch.autograd.grad(value.sum(), candidate)
        assert value.dtype == slope.dtype == torch.float32
        assert torch.isfinite(value).all()
        assert torch.isfinite(slope).all()
    # a clamp has no slope beyond its bound; clipped CEPAM reveals nothing without the key
    if name not in CLAMPED and (known or name != "cepam-clip"):
        assert float((slope * (candidate - update).detach()).sum()) > 0


@pytest.mark.parametrize("name", ["cepam-gaussian 3", "cepam-clip"])
def test_the_error_of_cepam_is_inside_its_balls_and_a_longer_one_is_not(name):
    defense, d = NOISY[name], 3000
    update = 0.3 * rng.normal(Key(9), (d,))
    wire = encode(defense, update)
    sent = defense.estimate(None, wire, Link(setting_of(d), WHO, SHARED))
    score = scorer(defense, [wire], d, [SHARED])
    true, longer = (float(score(sent[None] + factor * (update - sent))) for factor in (1.0, 1.5))
    # a uniform draw has density n at the wall of an n-ball; the integral of -ln(1 - e^-z / 2) is Li2(1/2) = 0.5822
    n = defense.dimension
    assert true / (d / n) == pytest.approx(n * 2 * WALL * 0.5822, rel=0.2)
    assert longer > 5 * true


@pytest.mark.slow
@by_rows(
    JoPEQ(epsilon=1000.0, bits=8, gamma=12.0, scale="public"),
    LatticeSDQ(bits=4),
    CepamClip(noise_std=0.05, clip=100.0, dimension=3),
    registry.build("defense", "laplace+sdq", {"noise_std": 0.05, "bits": 6}),
    ids=repr,
)
def test_a_defense_aware_attack_is_no_worse_than_a_naive_one(defense):
    case = make(n=4, defense=defense)
    aware, naive = (
        case.mse(MAP(prior="tv", tv=1.0, evaluations=600, objective=how).run(case.seen, Key(10)).guesses).clamp(max=1.0)
        for how in ("likelihood", "l2")
    )
    assert aware.mean() < 1.05 * naive.mean()
