"""Proved epsilons of all defenses and cascades against epsilons that two inputs attain, by computations of their own.

Nothing here calls the accounting under test. What a mechanism draws comes from its paper, or from the distribution that
it states as data (`Defense.message_distribution`); the epsilon of two inputs follows by closed forms, quadrature or
enumeration.
"""

import dataclasses
import itertools
import math
from pathlib import Path

import mpmath
import numpy as np
import pytest
import torch
from scipy import optimize, special

from leakgauge import Key, Layout, Link, Links, Sender, Setting
from leakgauge.defenses._common.reference import scaled
from leakgauge.defenses._jopeq.privacy import SHIPPED, t_epsilon, vector_epsilon_bound
from leakgauge.harness.audit import neighbors
from leakgauge.harness.core.claim import Relation, Unit, judge
from leakgauge.harness.federation import registry
from leakgauge.harness.federation.small import Federation
from tests.by_rows import by_rows

KEY, DIM = Key(7).child("shared"), 12
SETTING = Setting(Layout(("w",), ((DIM,),)), 20, 20, 1, "update", 4, 0.1, 5, 50)
SOME = dataclasses.replace(SETTING, participants=5)
FIRST = torch.eye(DIM)[0]


def case(name, parameters, rounds, setting=SETTING):
    """A defense, its states, its setting and its claim."""
    defense, setting = registry.build("defense", name, parameters), dataclasses.replace(setting, rounds=rounds)
    states = list(Federation.of(defense, setting).history[:rounds])
    return defense, states, setting, defense.claim(states, setting)


def link(setting, number=0):
    return Link(setting, Sender(number, setting.samples), KEY)


def distances(defense, states, setting, a, b):
    """The distance of two updates' messages in noise units, one for each round, for additive ones and waveforms."""
    found = []
    for state in states:
        one, two = (
            defense.message_distribution(state, defense.remember(setting), end, link(setting)) for end in (a, b)
        )
        scale = one.scale if hasattr(one, "scale") else one.spread
        found.append(float(np.linalg.norm((one.center - two.center) / scale)))
    return np.array(found)


def normal_delta(mu, eps):
    return float(special.ndtr(mu / 2 - eps / mu) - math.exp(eps + special.log_ndtr(-mu / 2 - eps / mu)))


def solved(delta_of, delta):
    """The epsilon at which a falling function of epsilon is `delta`."""
    if delta_of(0.0) <= delta:
        return 0.0
    high = 1.0
    while delta_of(high) > delta:
        high *= 2
    return optimize.brentq(lambda eps: delta_of(eps) - delta, 0.0, high, xtol=1e-12)


def normal(mu, delta):
    """Epsilon of N(0, 1) against N(mu, 1)."""
    return solved(lambda eps: normal_delta(mu, eps), delta)


def sampled_once(mu, share, delta):
    """Epsilon of one sampled Gaussian, for a removed record."""
    return solved(lambda eps: share * normal_delta(mu, math.log1p(math.expm1(eps) / share)), delta)


def sampled(mu, share, count, delta, step=5e-5, points=200_001):
    """A lower bound of epsilon over many runs: losses rounded down, of a removed record, summed by a transform."""
    x = np.linspace(-9, 9 + mu, points)
    weight = (x[1] - x[0]) / math.sqrt(2 * math.pi)
    chances = weight * ((1 - share) * np.exp(-(x**2) / 2) + share * np.exp(-((x - mu) ** 2) / 2))
    index = np.floor(np.log1p(share * np.expm1(mu * x - mu**2 / 2)) / step).astype(int)
    size = 1 << 20
    total = np.fft.irfft(np.fft.rfft(np.bincount(index % size, chances, size)) ** count, size)
    losses = (np.arange(size) - size * (np.arange(size) > size // 2)) * step
    return solved(lambda eps: float(total @ -np.expm1(np.minimum(eps - losses, 0.0))), delta)


def gaussians(name, parameters, rounds, setting, clip, unit_shift=None):
    """Claim and attained epsilon of a defense with normal noise, for updates C and -C, or for a shift of a message."""
    defense, states, setting, claim = case(name, parameters, rounds, setting)
    mus = distances(defense, states, setting, clip * FIRST, -clip * FIRST)
    if unit_shift is not None:
        mus = distances(defense, states, setting, unit_shift * FIRST, 0 * FIRST)
    return claim, normal(math.sqrt(float(mus @ mus)), claim.delta)


@pytest.mark.parametrize("rounds", [1, 6])
@by_rows(
    ("gaussian", {}, 1.0, None),
    ("gaussian", {"noise_std": 0.7, "clip": 2.0, "delta": 1e-7}, 2.0, None),
    ("gaussian", {"epsilon": 0.3}, 1.0, None),
    *[(udp, {}, 1.0, 2 * 0.1 / 50) for udp in ("udp", "udp-crd", "udp-lei")],
    *[(udp, {"epsilon": 30.0, "clip": 3.0}, 3.0, 2 * 3 * 0.1 / 50) for udp in ("udp", "udp-crd", "udp-lei")],
    *[(udp, {"clips": "update", "epsilon": 2.0}, 1.0, None) for udp in ("udp", "udp-crd", "udp-lei")],
    ("udp", {"calibration": "tight", "epsilon": 1.0, "delta": 1e-6}, 1.0, 2 * 0.1 / 50),
    ("ota-orthogonal", {"fading": "equal"}, 1.0, None),
    ("ota-orthogonal", {"fading": "equal", "epsilon": 9.0, "clip": 2.0}, 2.0, None),
)
def test_normal_noise_on_a_message_is_not_proved_below_its_hockey_stick(name, parameters, clip, shift, rounds):
    claim, attained = gaussians(name, parameters, rounds, SETTING, clip, shift)
    # updates are float32
    assert attained * (1 - 1e-6) <= judge(claim).proved <= attained * (1 + 1e-6)


@pytest.mark.parametrize("rounds", [1, 6])
@by_rows(
    ("ota", {}, 1.0),
    ("ota", {"epsilon": 9.0, "clip": 3.0, "power": 10.0}, 3.0),
    ("dp-fedavg", {}, 1.0),
    ("dp-fedavg", {"noise_std": 3.0, "clip": 2.0, "delta": 1e-8}, 2.0),
    ("dp-ftrl", {"epsilon": 3.0, "clip": 2.0}, 2.0),
)
def test_normal_noise_on_a_sum_is_not_proved_below_its_hockey_stick(name, parameters, clip, rounds):
    defense, states, setting, claim = case(name, parameters, rounds)
    links = Links(setting, [Sender(k, setting.samples) for k in range(20)], KEY)
    rest = [torch.zeros(DIM)] * 19
    other = 0.0 if claim.relation is Relation.ADD_REMOVE else -clip
    mus = []
    for state in states:
        one, two = (defense.aggregate_distribution(state, [end * FIRST, *rest], links) for end in (clip, other))
        scale = one.scale if hasattr(one, "scale") else one.spread
        mus.append(float(np.linalg.norm((one.center - two.center) / scale)))
    attained = normal(math.hypot(*mus), claim.delta)
    assert attained * (1 - 1e-9) <= judge(claim).proved <= attained * (1 + 1e-6)


@by_rows(
    ("dp-sgd", {}, 1, SETTING),
    ("dp-sgd", {"noise_std": 1.1}, 5, SETTING),
    ("dp-sgd", {"noise_std": 0.7, "delta": 1e-7}, 20, dataclasses.replace(SETTING, samples=2000)),
    ("dp-sgd", {"noise_std": 2.0}, 5, dataclasses.replace(SETTING, batch=0)),
    ("dp-fedavg", {}, 1, SOME),
    ("dp-fedavg", {"noise_std": 4.0}, 7, SOME),
)
def test_sampled_normal_noise_is_not_proved_below_its_sum_of_losses(name, parameters, rounds, setting):
    defense, _, setting, claim = case(name, parameters, rounds, setting)
    if name == "dp-sgd":
        share, count, mu = min(1.0, setting.batch / setting.samples or 1.0), 4 * rounds, 1 / defense.multiplier(setting)
    else:  # all other clients send -c, this client sends c
        share, count, mu = 5 / 20, rounds, 2 / defense.sigma(setting)
    attained = sampled(mu, share, count, claim.delta)
    assert attained <= judge(claim).proved <= attained * 1.01
    if count == 1:
        assert judge(claim).proved == pytest.approx(sampled_once(mu, share, claim.delta), rel=1e-5)


@pytest.mark.parametrize("rounds", [1, 5])
@pytest.mark.parametrize("setting", [SETTING, dataclasses.replace(SETTING, samples=400), SOME])
@pytest.mark.parametrize("parameters", [{}, {"noise_std": 5.0, "clip": 0.5, "local_epsilon": 2.0}, {"noise_std": 0.5}])
def test_cepam_clip_is_not_proved_below_one_record_that_turns_the_message_around(parameters, rounds, setting):
    defense, _, setting, claim = case("cepam-clip", parameters, rounds, setting)
    mu = 2 * defense.clip / defense.noise_std / math.sqrt(setting.participants - 1)
    used = min(1.0, setting.steps * setting.batch / setting.samples)
    # a run whose first round uses the record, then all later rounds without it
    attained = sampled_once(mu, used, claim.delta) if claim.delta > 0 else math.inf
    proved = judge(claim).proved
    assert attained * (1 - 1e-9) <= proved
    assert rounds > 1 or used == 1 or claim.delta == 0 or proved <= attained * 1.001 or mu > 5


@pytest.mark.parametrize("rounds", [1, 5])
@by_rows(
    ("cepam-gaussian", {}),
    ("cepam-gaussian", {"noise_std": 10.0, "dimension": 2}),
    ("cepam-laplace", {}),
    ("cepam-laplace", {"local_epsilon": 1e5, "noise_scale": 3.0}),
)
def test_cepam_whose_noise_vanishes_with_the_update_reveals_that_a_record_was_used(name, parameters, rounds):
    for samples in (50, 4000):
        claim = case(name, parameters, rounds, dataclasses.replace(SETTING, samples=samples))[3]
        used = 1 - (1 - min(1.0, 20 / samples)) ** rounds
        assert judge(claim).proved >= (math.inf if claim.delta < used * (1 - 1e-12) else 0.0)


@pytest.mark.parametrize("name", ["none", "top-k", "random-mask", "soteria", "precode", "sdq", "sdq-lattice"])
def test_without_private_noise_nothing_is_proved_at_delta_zero(name):
    # two updates whose messages cannot be confused
    for rounds in (1, 4):
        assert case(name, {}, rounds)[3].proved.epsilon(0.0) == math.inf


def cells(step, edge, dithers=401):
    """The ends of all cells of a subtractively dithered quantizer for many dithers: [dithers, levels + 1]."""
    levels = round(edge / step)
    ends = (np.arange(-levels, levels) + 0.5) * step
    dither = np.linspace(-step / 2, step / 2, dithers)[:, None]
    inner = ends[None] - dither
    far = np.full((dithers, 1), np.inf)
    return np.hstack([-far, inner, far])


def laplace_cdf(x):
    return np.where(x < 0, np.exp(np.minimum(x, 0)) / 2, 1 - np.exp(-np.maximum(x, 0)) / 2)


def of_cells(cdf, scale, ends, one=1.0, other=-1.0):
    """The largest log ratio of a cell's probabilities for two inputs; upper cells by their mirror images."""
    found = []
    for x, y in ((one, other), (-one, -other)):
        p, q = (np.diff(cdf((ends - at) / scale), axis=1) for at in (x, y))
        seen = (p > 1e-9) & (q > 1e-12)  # the cdf has 16 digits
        found.append(np.abs(np.log(p[seen] / q[seen])).max())
    return max(found)


def quantizer(bits, variance, gamma=None):
    """Step and outermost level of the reference code's quantizer."""
    step = 2 * (gamma or 1.5 * math.sqrt(1 + variance)) / (2**bits + 1)
    return step, 2 ** (bits - 1) * step


@pytest.mark.parametrize("rounds", [1, 3])
@pytest.mark.parametrize("scale", ["tensor", "vector", "public"])
@pytest.mark.parametrize("eps", [0.5, 4.0, 8.0])
@pytest.mark.parametrize("bits", [1, 2, 4])
def test_laplace_noise_before_or_without_a_quantizer_is_not_proved_below_its_cells(eps, bits, scale, rounds):
    b = 2 / eps
    step, edge = quantizer(bits, 2 * b**2)
    alone = of_cells(laplace_cdf, b, np.linspace(-3, 3, 601)[None])
    behind = of_cells(laplace_cdf, b, cells(step, edge))
    reduced = math.sqrt(b**2 - step**2 / 24)
    jopeq = of_cells(laplace_cdf, reduced, cells(step, edge))
    for name, attained in (("laplace", alone), ("laplace+sdq", behind), ("laplace+sdq-lattice", 0), ("jopeq", jopeq)):
        parameters = {"epsilon": eps, "scale": scale} | ({"bits": bits} if name != "laplace" else {})
        assert attained * rounds <= case(name, parameters, rounds)[3].proved.epsilon(0) * (1 + 1e-6)
    if bits == 1:  # levels that hide much of the noise
        small = {"epsilon": eps, "scale": scale, "bits": 1, "gamma": 0.3}
        attained = of_cells(laplace_cdf, b, cells(*quantizer(1, 0, 0.3)))
        for name in ("laplace+sdq", "laplace+sdq-lattice"):
            claim = case(name, small, rounds)[3]
            assert attained * rounds <= claim.proved.epsilon(0) * (1 + 1e-6)
            assert (claim.attained or claim.proved).epsilon(0) == pytest.approx(attained * rounds, rel=1e-3)
    sound = case("jopeq-sound", {"epsilon": eps, "bits": bits, "gamma": 0.7}, rounds)[3].proved.epsilon(0)
    small = of_cells(laplace_cdf, b, cells(*quantizer(bits, 0, 0.7)))
    assert small * rounds <= sound * (1 + 1e-6)


@pytest.mark.parametrize("bits", [1, 3])
@pytest.mark.parametrize("second", ["sdq", "sdq-lattice"])
@pytest.mark.parametrize("parameters", [{}, {"noise_std": 0.5}, {"epsilon": 1.0, "clip": 3.0}])
def test_normal_noise_before_a_quantizer_is_not_proved_below_its_outermost_cell(parameters, second, bits):
    defense, _, _, claim = case(f"gaussian+{second}", parameters | {"bits": bits}, 1)
    first = defense.first
    unit = 3 * first.clip / math.sqrt(DIM)
    ends = np.linspace(-4, 4, 4001)  # at some dither, a threshold of the quantizer is there
    above, below = (special.ndtr((x / unit - ends) * unit / first.sigma) for x in (first.clip, -first.clip))
    attained = solved(lambda eps: float((above - math.exp(eps) * below).max()), claim.delta)
    assert attained <= judge(claim).proved


def summed(losses, chances, count, delta, step=2e-5):
    """Epsilon of `count` sums of these losses, rounded down and rounded up."""
    size, found = 1 << 22, []
    shifts = (np.arange(size) - size * (np.arange(size) > size // 2)) * step
    for rounded in (np.floor(losses / step), np.ceil(losses / step)):
        one = np.bincount(rounded.astype(int) % size, chances, size)
        total = np.fft.irfft(np.fft.rfft(one) ** count, size)
        found.append(solved(lambda eps, total=total: float(total @ -np.expm1(np.minimum(eps - shifts, 0.0))), delta))
    return found


@pytest.mark.parametrize("rounds", [1, 3])
@by_rows(
    ("sdq", 1, {}),
    ("sdq", 1, {"gamma": 0.1, "epsilon": 3.0}),
    ("sdq", 3, {"noise_std": 2.0, "delta": 1e-3}),
    ("sdq-lattice", 2, {}),
)
@pytest.mark.ci(3)
def test_normal_noise_before_a_quantizer_attains_almost_the_epsilon_of_an_even_change(second, bits, parameters, rounds):
    defense, _, _, claim = case(f"gaussian+{second}", parameters | {"bits": bits}, rounds)
    first = defense.first
    unit = 3 * first.clip / math.sqrt(DIM)
    step, edge = quantizer(bits, (first.sigma / unit) ** 2, parameters.get("gamma"))
    count = DIM if second == "sdq" else DIM // 2  # of a pair, its first lattice coordinate
    shift, ends = first.clip / math.sqrt(count) / first.sigma, cells(step, edge, 1000) * unit / first.sigma
    p, q = (np.maximum(np.diff(special.ndtr(ends - at), axis=1), 1e-300).ravel() / 1000 for at in (shift, -shift))
    low, high = summed(np.log(p / q), p, count * rounds, claim.delta)
    assert low * 0.995 <= claim.attained.epsilon(claim.delta) <= high
    assert high < claim.proved.epsilon(claim.delta)


def student(x, s2, nu):
    """ln of the density of bivariate t noise, up to a constant."""
    return -(nu + 2) / 2 * np.log1p((x**2).sum(-1) / (nu * s2))


def disc(radii, angles):
    turn = np.linspace(0, 2 * np.pi, angles, endpoint=False)
    return np.concatenate([r * np.stack([np.cos(turn), np.sin(turn)], 1) for r in radii])


def searched(s2, nu, radius, matrix=None):
    """The largest log ratio of two densities of t noise, for two centers in a disc: over outputs in the plane.

    Centers lie at several radii and angles, so shifts have all lengths and directions. `matrix`: of the noise, by its
    inverse root; by default sqrt(s2) times the identity.
    """
    root = np.eye(2) / math.sqrt(s2) if matrix is None else matrix
    ends = disc([radius, 0.7 * radius, 0.3 * radius], 16)
    outputs = disc(np.concatenate([np.linspace(0, 4, 81), np.geomspace(4.2, 60, 20)]), 48)
    logs = student((outputs[:, None] - ends) @ root.T, 1.0, nu)
    grid = logs.max(1) - logs.min(1)
    at = int(grid.argmax())
    x0 = np.concatenate([outputs[at], ends[logs[at].argmax()], ends[logs[at].argmin()]])

    def lost(v):
        near, far = (end / max(1.0, math.hypot(*end) / radius) for end in (v[2:4], v[4:6]))
        return float(student((v[:2] - far) @ root.T, 1.0, nu) - student((v[:2] - near) @ root.T, 1.0, nu))

    found = optimize.minimize(lost, x0, method="Nelder-Mead", options={"maxiter": 6000, "xatol": 1e-9, "fatol": 1e-12})
    return max(float(grid.max()), -float(found.fun))


@pytest.mark.parametrize("noise", sorted({one for ones in SHIPPED.values() for one in ones}))
def test_no_pair_of_the_unit_disc_has_more_than_the_epsilon_of_t_noise_and_one_beyond_it_has(noise):
    s2, nu = noise
    inside = searched(s2, nu, 1.0)
    assert inside <= t_epsilon(s2, nu, 2.0) * (1 + 1e-9)
    assert inside == pytest.approx(t_epsilon(s2, nu, 2.0), rel=1e-6)
    assert searched(s2, nu, 1.00829893) > inside


def test_a_search_over_distributions_found_3_98_because_its_inputs_were_outside_of_the_unit_disc():
    layout = Layout(("w",), ((121,),))  # odd: one number is padding
    setting, defense = dataclasses.replace(SETTING, layout=layout), registry.build("defense", "t-noise", {})
    inputs = neighbors.pairs(defense, setting, Unit.SUBVECTOR, Relation.ANY_TWO, Key(1))[0]
    zero, one = (scaled(end.float(), layout, "tensor", 2) for end in (inputs.zero, inputs.one))
    apart = np.hypot(*(zero.numbers - one.numbers).reshape(-1, 2).T).max()
    assert apart == pytest.approx(2 * 1.0082989, rel=1e-6)
    assert np.allclose(zero.header, one.header)
    assert searched(0.5, 4.0, 1.0) == pytest.approx(3.95087, abs=1e-5)
    assert searched(0.5, 4.0, 1.0082989) == pytest.approx(3.97958, abs=1e-5)


@by_rows((2, 0.5, 4.0), (1, 0.5, 4.0), (2, 0.2, 4.0), (4, 1.0, 12.0), (1, 0.1, 3.0))
def test_no_pair_of_the_unit_disc_has_more_than_the_bound_of_jopeq_with_t_noise(bits, s2, nu):
    # the server sees a function of the input plus the drawn noise, whose least eigenvalue is that of the reduced matrix
    gamma = 1.5 * math.sqrt(1 + s2 * nu / (nu - 2))
    step = 2 * gamma / (2**bits + 1)
    lattice = np.array([[1, 0], [1 / math.sqrt(3), 2 / math.sqrt(3)]])
    matrix = s2 * np.eye(2) - (nu - 2) / nu * step**2 / 12 * lattice @ lattice.T
    values, vectors = np.linalg.eigh(matrix)
    found = searched(s2, nu, 1.0, vectors @ np.diag(values**-0.5) @ vectors.T)
    bound = vector_epsilon_bound(s2, nu, bits, gamma)
    assert found <= bound * (1 + 1e-9)
    assert found == pytest.approx(bound, rel=1e-6)


def test_a_search_over_distributions_found_4_20_for_jopeq_with_t_noise_for_the_same_reason():
    step = 2 * 1.5 * math.sqrt(2) / 5
    least = 0.5 - step**2 / 12  # 2 ((nu - 2) / nu) step^2 / 12 in the direction of the larger error
    assert searched(least, 4.0, 1.0) == pytest.approx(4.177, abs=1e-3)
    assert searched(least, 4.0, 1.0082989) == pytest.approx(4.206, abs=2e-3)


@pytest.mark.parametrize("rounds", [1, 3])
@pytest.mark.parametrize("scale", ["tensor", "public"])
@pytest.mark.parametrize("nominal", sorted(SHIPPED))
def test_t_noise_alone_or_before_a_quantizer_is_not_proved_below_what_pairs_attain(nominal, scale, rounds):
    s2, nu = SHIPPED[nominal][0]
    alone = searched(s2, nu, 1.0)
    names = [("t-noise", {}, alone)]
    for bits in (1, 2):
        edge = quantizer(bits, s2 * nu / (nu - 2))[1]
        # one number of the pair, and the outermost level at the dither that moves its threshold
        ends = np.linspace(-edge, edge, 2001)
        above, below = (special.stdtr(nu, (x - ends) / math.sqrt(s2)) for x in (1.0, -1.0))
        cell = float(np.log(above / below).max())
        names += [(f"t-noise+{second}", {"bits": bits}, cell) for second in ("sdq", "sdq-lattice")]
    for name, parameters, attained in names:
        claim = case(name, {"epsilon": nominal, "scale": scale} | parameters, rounds)[3]
        assert attained * rounds * (1 - 1e-9) <= claim.proved.epsilon(0)
        assert claim.proved.epsilon(0) == pytest.approx(alone * rounds, rel=1e-6)
        if name != "t-noise":
            assert claim.attained.epsilon(0) == pytest.approx(attained * rounds, rel=1e-4)


@pytest.mark.parametrize("bits", [1, 2])
@pytest.mark.parametrize("nominal", sorted(SHIPPED))
def test_jopeq_with_t_noise_is_not_proved_below_its_outermost_row_of_cells(nominal, bits):
    s2, nu = SHIPPED[nominal][0]
    step, edge = quantizer(bits, s2 * nu / (nu - 2))
    lattice = np.array([[1, 0], [1 / math.sqrt(3), 2 / math.sqrt(3)]])
    inverse = np.linalg.inv(lattice)
    if 2 * (nu - 2) / nu * step**2 / 12 >= s2:
        pytest.skip("the error exceeds the noise, and the defense is refused")
    matrix = inverse @ (s2 * np.eye(2) - (nu - 2) / nu * step**2 / 12 * lattice @ lattice.T) @ inverse.T
    far, ends = np.linalg.norm(inverse[1]), np.linspace(-edge, edge, 2001)
    above, below = (special.stdtr(nu, (x - ends) / math.sqrt(matrix[1, 1])) for x in (far, -far))
    claim = case("jopeq-t", {"epsilon": nominal, "bits": bits}, 1)[3]
    attained = float(np.log(above / below).max())
    assert attained <= claim.attained.epsilon(0) * (1 + 1e-6) <= claim.proved.epsilon(0) * (1 + 1e-6)


@pytest.mark.parametrize("rounds", [1, 4])
@pytest.mark.parametrize(("eps", "bits"), [(4.0, 1), (1.0, 1), (0.1, 2), (2.0, 2), (8.0, 2), (2.0, 3), (24.0, 3)])
@pytest.mark.ci(without=("2.0-3-1",))
def test_mvu_is_not_proved_below_the_largest_ratio_of_its_channel(eps, bits, rounds):
    defense, states, setting, claim = case("mvu", {"epsilon": eps, "bits": bits}, rounds)
    inputs = torch.linspace(-1, 1, 12)
    distributions = defense.message_distribution(states[0], None, inputs, link(setting)).chances
    distributions = distributions / distributions.sum(1, keepdims=True)
    ends = defense.message_distribution(
        states[0], None, torch.linspace(-1, 1, 2**bits).repeat(12)[:12], link(setting)
    ).chances
    both = np.concatenate([distributions, ends / ends.sum(1, keepdims=True)])
    sent = both.max(0) > 0
    attained = float(np.log(both[:, sent].max(0) / both[:, sent].min(0)).max())
    assert attained * rounds * (1 - 1e-9) <= judge(claim).proved <= attained * rounds * (1 + 1e-6)


@pytest.mark.parametrize("rounds", [1, 4])
@pytest.mark.parametrize(("eps", "levels"), [(4.0, 2), (0.1, 3), (2.0, 8), (8.0, 16), (24.0, 16), (1.0, 33)])
def test_rqm_is_not_proved_below_the_largest_ratio_of_two_stated_distributions(eps, levels, rounds):
    claim = case("rqm", {"epsilon": eps, "levels": levels}, rounds)[3]
    # inputs on a grid, and at the levels: there, an outcome's probability has its corners
    defense, states, setting, _ = case("rqm", {"epsilon": eps, "levels": levels}, 1)
    edge, here = 1 / defense.reach, dataclasses.replace(setting, layout=Layout(("w",), ((201 + levels,),)))
    inputs = torch.cat([torch.linspace(-1, 1, 201), torch.linspace(-edge, edge, levels)])
    chances = defense.message_distribution(states[0], None, inputs, link(here)).chances
    attained = float(np.log(chances.max(0) / chances.min(0)).max())
    assert attained * rounds == pytest.approx(judge(claim).proved, rel=1e-5)  # float32 inputs
    assert DIM * attained * rounds == pytest.approx(further(claim, "message"), rel=1e-5)


@pytest.mark.parametrize("rounds", [1, 4])
@pytest.mark.parametrize("eps", [0.3, 2.0, 7.0, 30.0, 400.0])
def test_piecewise_is_not_proved_below_the_ratio_of_its_two_densities(eps, rounds):
    # Wang et al. 2019, Algorithm 2: the densities p and p / e^eps; Algorithm 4: k coordinates, each with eps / k
    k = max(1, min(DIM, math.floor(eps / 2.5)))
    one = eps / k
    width = 2 / math.expm1(one / 2)
    inside = 1 / (1 + math.exp(-one / 2))
    outer = (1 - inside) / (2 + width)  # the rest of [-C, C] has length C + 1 = 2 + width
    attained = k * math.log(inside / width / outer)
    claim = case("piecewise", {"epsilon": eps}, rounds)[3]
    assert attained * rounds * (1 - 1e-9) <= judge(claim).proved


@pytest.mark.parametrize("rounds", [1, 4])
@pytest.mark.parametrize("form", ["direction", "ball"])
@pytest.mark.parametrize("eps", [0.3, 2.0, 8.0])
def test_privunit_is_proved_the_largest_ratio_of_the_densities_of_its_cap(eps, form, rounds):
    # at vectors near three inputs, their opposites and elsewhere: some are in the cap of one input only
    defense, _, setting, claim = case("privunit", {"epsilon": eps, "form": form}, rounds)
    generator, u = np.random.default_rng(5), torch.eye(DIM)[:3].double()
    v = u.numpy()[generator.integers(0, 3, 900)] * generator.uniform(-1, 1, (900, 1))
    v += 0.3 * generator.standard_normal(v.shape) * generator.uniform(0, 1, (900, 1))
    wires = [(row / np.linalg.norm(row)).astype("<f4").tobytes() for row in v]
    links = Links(setting, [Sender(0, 1)] * len(wires), None)
    score = defense.exact_likelihood(None, wires, links)
    each = np.stack([score(end.expand(900, -1)).numpy() for end in (*u, -u[0], 0.4 * u[0], 0 * u[0])])
    attained = float(np.ptp(each, axis=0).max()) * rounds
    assert attained * (1 - 1e-9) <= judge(claim).proved <= attained * (1 + 1e-9)


@pytest.mark.parametrize(("eps", "alpha"), [(1.0, 2.0), (8.0, 2.0), (8.0, 1.5)])
def test_ppr_is_not_proved_below_the_ratio_of_the_chances_of_its_points(eps, alpha):
    # any points: 300 times and vectors, with PrivUnit's two densities, which differ by eps / (2 alpha)
    claim, generator = case("ppr", {"epsilon": eps, "alpha": alpha}, 2)[3], np.random.default_rng(6)
    times = np.sort(generator.uniform(0, 300, 300))
    inner = eps / (2 * alpha)
    weights = (np.exp(inner * generator.integers(0, 2, (2000, 300))) / times) ** alpha
    chances = np.log(weights / weights.sum(1, keepdims=True))
    attained = 2 * float(np.ptp(chances, axis=0).max())
    assert 0.6 * judge(claim).proved < attained <= judge(claim).proved


@pytest.mark.parametrize("rounds", [1, 2])
@pytest.mark.parametrize(("eps", "repeats"), [(0.5, 1), (4.0, 3), (400.0, 113)])
def test_vqsgd_is_not_proved_below_the_ratio_of_its_points(eps, repeats, rounds):
    other = math.exp(-np.logaddexp(eps, math.log(2 * DIM - 1)))
    logs = []
    generator = np.random.default_rng(3)
    inputs = [*np.eye(DIM), np.full(DIM, DIM**-0.5), *generator.standard_normal((40, DIM)), np.zeros(DIM)]
    for v in inputs:
        v = v / max(1.0, np.linalg.norm(v))
        signed = np.maximum(np.concatenate([v, -v]), 0) / math.sqrt(DIM)
        drawn = signed + (1 - np.abs(v).sum() / math.sqrt(DIM)) / (2 * DIM)
        logs.append(np.log(other + (1 - 2 * DIM * other) * np.maximum(drawn, 0)))
    attained = float(np.ptp(np.array(logs), axis=0).max()) * repeats * rounds
    claim = case("vqsgd", {"epsilon": eps, "repeats": repeats}, rounds)[3]
    assert attained * (1 - 1e-9) <= judge(claim).proved


def test_a_search_over_distributions_found_4151_of_the_44904_of_vqsgd_because_probabilities_were_rounded():
    # a draw is e_i with probability 1/sqrt(d) or more, or never for a vector of equal magnitudes; then a response
    dim, repeats, eps = 200, 113, mpmath.mpf(400)
    with mpmath.workdps(400):
        other = 1 / (mpmath.exp(eps) + 2 * dim - 1)
        likeliest = 1 / mpmath.sqrt(dim) + (1 - 1 / mpmath.sqrt(dim)) / (2 * dim)
        attained = float(repeats * mpmath.log((other + (1 - 2 * dim * other) * likeliest) / other))
    setting = dataclasses.replace(SETTING, layout=Layout(("w",), ((dim,),)))
    proved = case("vqsgd", {"repeats": repeats}, 1, setting)[3].proved
    assert proved.tight
    assert proved.epsilon(0) == pytest.approx(attained, rel=1e-12)
    assert attained == pytest.approx(44_904, abs=1)

    def stated(dim):
        """What the float64 probabilities of the distribution attain for e_1 against equal magnitudes."""
        here = dataclasses.replace(SETTING, layout=Layout(("w",), ((dim,),)))
        defense, states, here, claim = case("vqsgd", {"repeats": repeats}, 1, here)
        ends = torch.eye(dim)[0], -torch.ones(dim)
        one, two = (defense.message_distribution(states[0], None, end, link(here)).chances for end in ends)
        return float(np.log(one / two).max()) * repeats, claim.proved.epsilon(0)

    assert stated(36)[0] == pytest.approx(stated(36)[1], rel=1e-12)  # sums of 1/6 are exact
    assert stated(200)[0] < 113 * 40


@pytest.mark.parametrize("rounds", [1, 3])
@pytest.mark.parametrize(
    "parameters", [{}, {"epsilon": 40.0, "bits": 1}, {"epsilon": 100.0, "bits": 2, "share": 0.5}, {"bits": 3}]
)
def test_sqsgd_is_not_proved_below_the_ratio_of_two_updates(parameters, rounds):
    setting = dataclasses.replace(SETTING, layout=Layout(("w",), ((3200,),)))
    _, states, _, claim = case("sqsgd", {"ratio": 0.02} | parameters, rounds, setting)
    channel = states[0].channel
    d, tau, steps = channel.d, channel.tau, channel.levels - 1
    # an output of the lesser branch against one of the favored branch, by counting vectors
    ways = [math.comb(d, m) * steps ** (d - m) for m in range(d + 1)]
    odds = math.exp(channel.logit) * (sum(ways[:tau]) / sum(ways[tau:]))

    def favored(h):
        """The chance of tau matches for coordinates that match with these chances."""
        counts = np.ones(1)
        for one in h:
            counts = np.convolve(counts, [1 - one, one])
        return counts[tau:].sum()

    # equal coordinates, and some at the other middle level or all below 0
    near = favored(np.full(d, min(1.0, 0.5 + steps / 2 / math.sqrt(d))))
    others = [np.full(d, max(0.0, 0.5 - steps / 2 / math.sqrt(d))), np.where(np.arange(d) < steps**2, 0.0, 0.5)]
    attained = max(math.log1p((odds - 1) * near) - math.log1p((odds - 1) * favored(h)) for h in others)
    assert attained * rounds * (1 - 1e-9) <= claim.proved.epsilon(0)
    assert attained * rounds * (1 - 1e-9) <= (claim.attained or claim.proved).epsilon(0) <= claim.proved.epsilon(0)


def further(claim, unit, at=0):
    """Epsilon of the proof number `at` for a unit, at the claim's delta."""
    return [proof for proof in claim.further if proof.unit.value == unit][at].epsilon(claim.delta)


@pytest.mark.parametrize("rounds", [1, 4])
@by_rows(("laplace", 2.0), ("laplace", 8.0), ("jopeq", 2.0), ("jopeq-sound", 4.0), ("mvu", 4.0), ("laplace+sdq", 8.0))
def test_a_whole_message_is_not_proved_below_the_sum_over_its_independent_numbers(name, eps, rounds):
    claim = case(name, {"epsilon": eps}, rounds)[3]
    b = 2 / eps
    if name == "jopeq":  # 1 bit, and the error of the quantizer instead of a part of the noise
        step = quantizer(1, 2 * b**2)[0]
        b = math.sqrt(b**2 - step**2 / 24)
        # coordinates 1/3 and -1/3 lie on the sphere of the scale
        third = of_cells(laplace_cdf, b, cells(*quantizer(1, 8 / eps**2)), 1 / 3, -1 / 3)
        assert DIM * third * rounds == pytest.approx(further(claim, "message", 1), rel=1e-6)
    one = of_cells(laplace_cdf, b, np.linspace(-3, 3, 601)[None]) if name != "mvu" else eps
    assert DIM * one * rounds == pytest.approx(further(claim, "message"), rel=1e-6)


@pytest.mark.parametrize("rounds", [1, 4])
@pytest.mark.parametrize("parameters", [{}, {"epsilon": 9.0, "clip": 2.0, "fading": "equal"}, {"power": 3.0}])
def test_over_the_air_adversaries_that_know_more_are_not_proved_to_see_less(parameters, rounds):
    clip = parameters.get("clip", 1.0)
    defense, states, setting, claim = case("ota", parameters, rounds)
    state = states[0]
    heard = Links(setting, [Sender(k, 50) for k in range(20)], KEY)
    alone = [defense.message_distribution(state, None, clip * FIRST, link(setting, k)) for k in range(20)]
    gains = np.array(state.channel.squared_gains)
    total = defense.aggregate_distribution(state, [clip * FIRST] + [0 * FIRST] * 19, heard)
    moved, noise = 2 * float(np.linalg.norm(total.center)), np.array([one.spread for one in alone]) ** 2 * gains
    mus = {
        "colluding-server": moved / np.sqrt(noise.min() + state.channel.noise_variance),
        "eavesdropper": max(
            2 * float(np.linalg.norm(one.center)) / one.spread if one.spread else np.inf for one in alone
        ),
        "participant": moved / np.sqrt(noise.sum() - noise.max() + state.channel.noise_variance),
    }
    for proof, (threat, mu) in zip(claim.further, mus.items(), strict=True):
        assert {one.value for one in proof.against} == {threat}
        attained = normal(mu * math.sqrt(rounds), claim.delta) if mu < 1e6 else math.inf
        assert attained * (1 - 1e-6) <= proof.epsilon(claim.delta) <= attained * (1 + 1e-6)


@pytest.mark.parametrize("rounds", [1, 4])
def test_records_in_every_batch_and_all_records_of_a_client_are_not_proved_below_their_hockey_sticks(rounds):
    defense, _, setting, claim = case("dp-sgd", {}, rounds)
    attained = normal(math.sqrt(4 * rounds) / defense.multiplier(setting), claim.delta)
    assert attained * (1 - 1e-9) <= further(claim, "record") <= attained * (1 + 1e-6)
    for name in ("udp", "udp-crd", "udp-lei"):
        defense, states, setting, claim = case(name, {}, rounds)
        mus = distances(defense, states, setting, 2 * 0.1 * FIRST, 0 * FIRST)  # all 50 records turned around
        attained = normal(math.sqrt(float(mus @ mus)), claim.delta)
        assert attained * (1 - 1e-6) <= further(claim, "client") <= attained * (1 + 1e-6)
    claim = case("piecewise", {"epsilon": 30.0}, rounds)[3]
    assert further(claim, "coordinate") == pytest.approx(30.0 / 12 * rounds)


ROOMS = Path(__file__).parent
ELSEWHERE = {
    "skellam": "test_secure_sum.py",
    "distributed-gaussian": "test_secure_sum.py",
    "poisson-binomial": "test_poisson_binomial.py",
}
"""Proofs that are computed anew in the tests of their defense."""


def test_every_defense_and_cascade_is_in_a_test_of_its_proof():
    text = Path(__file__).read_text("utf-8")
    firsts, seconds = ("laplace", "gaussian", "t-noise"), ("sdq", "sdq-lattice")
    for name, kind in registry.classes("defense").items():
        if name in ELSEWHERE:
            assert f"{kind.__name__}(" in (ROOMS / ELSEWHERE[name]).read_text("utf-8")
        else:
            assert f'"{name}"' in text
    for first, second in itertools.product(firsts, seconds):
        assert f"{first}+{second}" in text or f"{first}+{{second}}" in text
