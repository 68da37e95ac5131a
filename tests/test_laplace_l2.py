"""Laplace noise on updates of a bounded l2 norm: the proof by quadrature, its epsilon, and the defenses that use it.

The references are computed here: Renyi divergences by quadrature, epsilon by a search over orders, privacy loss
distributions by convolution. Every statistical test has a false-alarm rate of at most 1e-6.
"""

import dataclasses
import math

import numpy as np
import pytest
import torch
from scipy import fft, integrate, optimize, special, stats

from leakgauge import Key, Link, Links, MessageError, rng
from leakgauge.defenses.jopeq_sound import SoundJoPEQ
from leakgauge.defenses.laplace import Laplace
from leakgauge.harness.audit.claims import prepare
from leakgauge.harness.audit.stated import check_stated
from leakgauge.harness.audit.trials import Mechanism
from leakgauge.harness.core import accounting
from leakgauge.harness.core.cell import PartSpec
from leakgauge.harness.core.claim import Horizon, Relation, Unit, Verdict, judge
from leakgauge.harness.core.concentrated import Concentrated, concentrated_rho, laplace_l2, laplace_l2_scale
from leakgauge.harness.core.contract import claim_of
from leakgauge.harness.core.distribution import Laplacian, PairLoss
from leakgauge.harness.core.threats import Threat
from leakgauge.harness.data import default_root
from leakgauge.harness.federation import registry
from leakgauge.harness.federation.registry import ParameterError
from leakgauge.harness.study.goal import TOLERANCE, solve
from leakgauge.harness.study.study import resolve
from leakgauge.testing import Effort, checks_of
from tests.audit_case import audit_mechanism, deployed
from tests.audit_case import setting_of as audit_setting
from tests.by_rows import by_rows
from tests.doubles import study_table
from tests.faulty import Faulty
from tests.jopeq_case import PRIVATE, SHARED, WHO, decode, encode, setting_of
from tests.oracles import follows

ORDERS = [1.001, 1.1, 1.5, 2.0, 3.0, 8.0, 32.0, 128.0]
SHIFTS = [1e-3, 0.03, 0.3, 1.0, 3.0, 10.0, 40.0]
BAR = 8.0, 5e-4
"""Epsilon and delta of the comparison with normal noise."""


def build(name, **parameters):
    return registry.build("defense", name, {"norm": "l2"} | parameters)


def claim(defense, d, rounds=1):
    return defense.claim([None] * rounds, setting_of(d))


# ---- the proof


def divergence(order, shift):
    """D_a of Laplace noise of scale 1, moved by `shift`, by quadrature: the two tails and the interval between."""

    def density(x):
        p, q = -abs(x), -abs(x - shift)
        return 0.5 * math.exp(order * p + (1 - order) * q - most)

    # the exponent is piecewise linear: largest at 0, where it is (a - 1) shift
    most = (order - 1) * shift
    reach = 40.0
    parts = [(-reach, 0.0), *((a, min(a + 0.5, shift)) for a in np.arange(0.0, shift, 0.5)), (shift, shift + reach)]
    total = sum(integrate.quad(density, low, high, epsabs=0, epsrel=1e-13)[0] for low, high in parts if high > low)
    return (most + math.log(total)) / (order - 1)


def closed(order, shift):
    """The same: Mironov 2017, Table II."""
    p = order / (2 * order - 1)
    logs = [math.log(p) + (order - 1) * shift, math.log1p(-p) - order * shift]
    return float(special.logsumexp(logs)) / (order - 1)


@pytest.mark.parametrize("order", ORDERS)
def test_the_divergence_of_one_coordinate_is_below_that_of_normal_noise(order):
    for shift in SHIFTS:
        found, normal = divergence(order, shift), order * shift**2 / 2
        # of a divergence of 1e-6, quadrature finds eight digits above order 1.001
        assert found == pytest.approx(closed(order, shift), rel=1e-6, abs=1e-12 / (order - 1))
        assert found <= normal + 1e-12 / (order - 1)
    # rho cannot be smaller in any fixed share: small shifts attain it
    assert divergence(order, 1e-3) > 0.95 * order * 1e-6 / 2


def test_the_steps_of_the_proof_hold_in_exact_digits():
    import mpmath

    with mpmath.workdps(60):
        for order in map(mpmath.mpf, ORDERS):
            p, q = order / (2 * order - 1), (order - 1) / (2 * order - 1)

            def g(t, a=order, p=p, q=q):
                return mpmath.log(p * mpmath.exp((a - 1) * t) + q * mpmath.exp(-a * t))

            assert abs(g(0)) < 1e-50
            assert abs(mpmath.diff(g, 0)) < 1e-20
            curvature = [mpmath.diff(g, t, 2) for t in map(mpmath.mpf, [0, *SHIFTS])]
            assert abs(curvature[0] / (order * (order - 1)) - 1) < 1e-15
            assert all(later <= curvature[0] * (1 + mpmath.mpf(1e-15)) for later in curvature)


def test_divergences_of_coordinates_add_up_to_rho_of_the_l2_distance():
    shifts = 3.0 * rng.normal(Key(1), (50,), torch.float64).numpy()
    event = laplace_l2(float(np.linalg.norm(shifts)), 1.0, 50)
    assert event.rho == pytest.approx(np.square(shifts).sum() / 2)
    assert event.pure >= np.abs(shifts).sum()
    for order in ORDERS:
        assert sum(closed(order, abs(shift)) for shift in shifts) <= order * event.rho
    assert Laplacian().loss(shifts) == PairLoss(np.abs(shifts).sum(), rho=pytest.approx(event.rho))


# ---- epsilon and delta


def orders_epsilon(rho, delta):
    """Canonne, Kamath, Steinke 2020, Prop. 12, minimized over a fine grid of orders."""
    a = 1 + np.geomspace(1e-9, 1e9, 2_000_001)
    return max(0.0, (a * rho + np.log1p(-1 / a) - (math.log(delta) + np.log(a)) / (a - 1)).min())


def gaussian_epsilon(mu, delta):
    """Balle, Wang 2018, Thm 8."""

    def excess(epsilon):
        lower = math.exp(epsilon + special.log_ndtr(-epsilon / mu - mu / 2))
        return special.ndtr(mu / 2 - epsilon / mu) - lower - delta

    return optimize.brentq(excess, 0.0, mu**2 / 2 + 40 * mu + 1, xtol=1e-12) if excess(0.0) > 0 else 0.0


@pytest.mark.parametrize(("epsilon", "clients"), [(8.0, 6000), (8.0, 1000), (1.0, 6000), (1.0, 100), (1.0, 20)])
def test_at_the_deltas_of_the_leaderboard_it_has_about_half_as_much_noise_again_as_normal_noise(epsilon, clients):
    delta = clients**-1.1
    mu = optimize.brentq(lambda mu: gaussian_epsilon(mu, delta) - epsilon, 1e-3, 20.0)
    assert 1.5 < math.sqrt(2) * laplace_l2_scale(1.0, epsilon, delta) * mu < 1.72


@pytest.mark.parametrize("delta", [1e-12, 1e-5, 5e-4, 0.1])
@pytest.mark.parametrize("rho", [1e-8, 1e-3, 0.1, 1.72, 30.0, 1e4])
def test_epsilon_is_the_least_over_all_orders(rho, delta):
    found = Concentrated(rho).epsilon(delta)
    assert found == pytest.approx(orders_epsilon(rho, delta), rel=1e-7, abs=1e-12)
    # better than Bun and Steinke 2016, Prop. 1.3; never better than normal noise, which has this rho
    assert found < rho + 2 * math.sqrt(rho * math.log(1 / delta))
    assert found >= gaussian_epsilon(math.sqrt(2 * rho), delta) * (1 - 1e-9)
    if found > 0:
        assert Concentrated(rho).delta(found) == pytest.approx(delta, rel=1e-6)
        assert concentrated_rho(found, delta) == pytest.approx(rho, rel=1e-6)


def test_epsilon_agrees_with_the_renyi_accountant_of_dp_accounting():
    from dp_accounting.rdp.rdp_privacy_accountant import compute_epsilon

    orders = 1 + np.geomspace(1e-3, 1e3, 20_001)
    for rho, delta in ((0.05, 1e-5), (1.72, 5e-4), (20.0, 1e-6)):
        found = compute_epsilon(orders, orders * rho, delta)[0]
        assert Concentrated(rho).epsilon(delta) == pytest.approx(found, rel=1e-6)


@by_rows(
    (Concentrated(0.0), 1e-5, 0.0),
    (Concentrated(0.0, 0.0), 0.0, 0.0),
    (Concentrated(2.0), 0.0, math.inf),
    (Concentrated(2.0, 3.0, 4), 0.0, 12.0),
    (Concentrated(math.inf), 0.5, math.inf),
    (Concentrated(math.inf, 3.0), 0.5, 3.0),
    (Concentrated(1e6, 3.0, 0), 1e-5, 0.0),
    (Concentrated(1e-9), 0.5, 0.0),
)
def test_the_ends_of_concentrated_privacy(event, delta, epsilon):
    assert event.epsilon(delta) == epsilon
    assert accounting.epsilon(event, delta) == epsilon
    if epsilon == 0:
        assert event.delta(0.0) <= delta
    if math.isinf(epsilon):
        assert event.delta(10.0) > delta


def test_delta_is_zero_from_the_largest_loss_on():
    event = Concentrated(2.0, 3.0, 2)
    assert event.delta(6.0) == 0
    assert 0 < event.delta(5.999) < 1
    assert Concentrated(math.inf).delta(100.0) == 1.0
    assert Concentrated(100.0).delta(0.0) == pytest.approx(1.0)
    assert accounting.delta(event, math.inf) == 0


@pytest.mark.parametrize("rho", [1e-300, 1e-12, 1.0, 1e12, 1e200])
def test_extreme_numbers_have_finite_bounds(rho):
    event = Concentrated(rho)
    deltas = [event.delta(epsilon) for epsilon in (0.0, 1e-12, 1.0, 1e12)]
    assert 1 >= deltas[0] >= deltas[1] >= deltas[2] >= deltas[3] >= 0
    epsilons = [event.epsilon(delta) for delta in (1e-323, 1e-300, 1e-5, 0.5, 1 - 1e-16)]
    assert math.inf > epsilons[0] >= epsilons[1] >= epsilons[2] >= epsilons[3] >= epsilons[4] >= 0


def test_rounds_and_other_mechanisms_add_up():
    one, normal = Concentrated(0.3, 5.0), Concentrated(1 / (2 * 2.0**2))
    assert accounting.repeat(one, 7).epsilon(1e-5) == pytest.approx(Concentrated(2.1).epsilon(1e-5))
    assert accounting.repeat(accounting.repeat(one, 7), 0).epsilon(1e-5) == 0
    both = accounting.repeat(one, 2).plus(accounting.repeat(normal, 3))
    assert (both.rho, both.pure) == (pytest.approx(0.6 + 3 / 8), math.inf)
    assert one.plus(one) == Concentrated(0.6, 10.0)
    assert not accounting.is_sampled(one)
    assert not accounting.is_gaussian(one)
    assert accounting.sampled_gaussian(one) is None


@by_rows((-1.0, 1.0, 1), (1.0, math.nan, 1), (1.0, 1.0, -1))
def test_a_negative_rho_is_refused(rho, pure, times):
    with pytest.raises(ValueError, match="expected"):
        Concentrated(rho, pure, times)
    for wrong in ((0.0, 1e-5), (math.inf, 1e-5), (1.0, 0.0), (1.0, 1.0)):
        with pytest.raises(ValueError, match="expected a finite epsilon"):
            concentrated_rho(*wrong)
    with pytest.raises(ValueError, match="expected numbers above zero"):
        laplace_l2(1.0, 0.0, 3)


# ---- privacy loss distributions


def losses(shift, step):
    """The losses of one coordinate on the grid of `step`, rounded up: their probabilities, from -shift on."""
    top = math.ceil(shift / step)
    edges = np.minimum(step * np.arange(-top, top + 1), shift)
    below = np.where(edges < -shift, 0.0, 0.5 * np.exp((edges - shift) / 2))  # P(loss <= edge), but for the largest
    return np.append(np.diff(below, prepend=0.0)[:-1], 1 - below[-2])


def exact_delta(shifts, epsilon, step):
    """delta of product Laplace noise of scale 1 whose centers are so far apart; each loss is rounded up to a `step`."""
    top = sum(math.ceil(shift / step) for shift in shifts)
    size, spectrum = fft.next_fast_len(2 * top + 1, real=True), np.ones(1)
    for shift, times in zip(*np.unique(shifts[shifts > 0], return_counts=True), strict=True):
        each = losses(shift, step)
        assert each.sum() == pytest.approx(1, abs=1e-12)
        spectrum = spectrum * fft.rfft(each, size) ** times
    grid = step * np.arange(-top, top + 1)
    return float(fft.irfft(spectrum, size)[: 2 * top + 1] @ -np.expm1(np.minimum(epsilon - grid, 0.0)))


def directions(d):
    """Unit vectors: one coordinate, even, falling, random."""
    some = rng.normal(Key(2), (d,), torch.float64).abs().numpy()
    each = [np.eye(d)[0], np.ones(d), 1 / np.arange(1, d + 1), some]
    return [way / np.linalg.norm(way) for way in each]


def test_the_exact_delta_of_one_coordinate_is_the_closed_form():
    for shift, epsilon in ((0.5, 0.2), (2.0, 1.0), (2.0, 2.5)):
        expected = max(0, -math.expm1((epsilon - shift) / 2))
        assert exact_delta(np.array([shift, 0.0]), epsilon, 1e-4) == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("d", [1, 2, 3, 10, 60])
@pytest.mark.parametrize(("distance", "delta"), [(0.1, 1e-3), (0.5, 1e-5), (1.854, 5e-4), (1.854, 1e-6), (4.0, 1e-4)])
def test_no_product_of_coordinates_exceeds_the_proved_epsilon(d, distance, delta):
    event = laplace_l2(distance, 1.0, d)
    proved, by_rho = event.epsilon(delta), Concentrated(event.rho).epsilon(delta)
    assert proved == pytest.approx(min(by_rho, math.sqrt(d) * distance))
    step = distance / math.sqrt(d) / 500
    for way in directions(d):
        assert exact_delta(distance * way, by_rho, step) <= delta
        assert exact_delta(distance * way, proved + d * step, step) <= delta


def test_a_smaller_rho_would_be_exceeded():
    # of an even change of 100 coordinates, epsilon is nearly that of normal noise with standard deviation b
    rho = concentrated_rho(*BAR)
    even = np.full(100, math.sqrt(2 * rho / 100))
    found = [exact_delta(even, Concentrated(share * rho).epsilon(BAR[1]), 1e-4) for share in (1.0, 0.75)]
    assert found[0] < BAR[1] < found[1]


# ---- the noise of the two defenses


def test_the_noise_is_at_most_1_6_times_normal_noise_in_any_dimension():
    epsilon, delta = BAR
    sigma = 2 / optimize.brentq(lambda mu: gaussian_epsilon(mu, delta) - epsilon, 1.0, 4.0, xtol=1e-12)
    found = Laplace(norm="l2", epsilon=epsilon, delta=delta)
    assert found.noise_scale == pytest.approx(1.0786621, abs=1e-6)  # the least b by a grid of orders, below
    b = optimize.brentq(lambda b: orders_epsilon(2 / b**2, delta) - epsilon, 0.5, 2.0, xtol=1e-9)
    assert found.noise_scale == pytest.approx(b, rel=1e-6)
    ratio = math.sqrt(2) * found.noise_scale / sigma
    assert ratio == pytest.approx(1.526, abs=1e-3)
    assert ratio <= 1.6
    for d in (1, 2, 10, 100, 10**6, 10**8):
        whole = claim(found, d)
        assert whole.epsilon == pytest.approx(min(epsilon, 2 * math.sqrt(d) / b), rel=1e-6)
        assert claim(dataclasses.replace(found, norm="entry", delta=None), d).further[0].epsilon(0) == epsilon * d


@by_rows((Laplace, 1.0, 1.0), (Laplace, 0.02, 0.02), (SoundJoPEQ, 1.0, 1.0), (SoundJoPEQ, 0.02, 1.0))
def test_both_defenses_have_the_same_noise_and_claim_a_message(kind, clip, unit):
    for epsilon, delta in ((0.01, 1e-5), (2.0, 1e-3), (1000.0, 1e-5)):
        defense = kind(norm="l2", clip=clip, epsilon=epsilon, delta=delta)
        assert defense.noise_scale / unit == pytest.approx(laplace_l2_scale(2.0, epsilon, delta))
        for rounds in (1, 10):
            found = claim(defense, 10**6, rounds)
            expected = orders_epsilon(rounds * 2 * (unit / defense.noise_scale) ** 2, delta)
            assert found.proved.epsilon(delta) == pytest.approx(expected, rel=1e-6)
            assert (found.epsilon, found.delta, found.unit) == (found.proved.epsilon(delta), delta, Unit.MESSAGE)
            assert (found.relation, found.horizon) == (Relation.ANY_TWO, Horizon.of(rounds))
            assert found.against == frozenset(Threat)
            assert (found.further, found.proved.tight) == ((), False)
            verdict = Verdict.VACUOUS if found.epsilon > 10 else Verdict.HOLDS
            assert judge(found).verdict is verdict


def test_a_pure_epsilon_per_coordinate_stays_the_default():
    for defense in (Laplace(), SoundJoPEQ()):
        assert (defense.norm, defense.delta) == ("entry", None)
        found = claim(defense, 100)
        assert (found.unit, found.delta, found.further[0].epsilon(0)) == (Unit.COORDINATE, 0, 100 * found.epsilon)
    assert (Laplace(norm="l2").delta, SoundJoPEQ(norm="l2").delta) == (1e-5, 1e-5)


def test_ids_of_stored_results_stay_those_without_a_norm():
    for name in ("laplace", "laplace+sdq", "laplace+sdq-lattice", "jopeq-sound"):
        table = registry.build("defense", name, {}).parameters()
        assert (table["norm"], table["delta"]) == ("entry", None)
        spec = PartSpec(name, table)
        assert not {"norm", "delta"} & set(spec.parameters)
        assert registry.build_defense(spec).parameters() == table
        assert "norm=l2" in PartSpec(name, table | {"norm": "l2"}).key


@by_rows(
    ("laplace", {"norm": "l1"}, "norm: got 'l1', expected 'entry' or 'l2'"),
    ("laplace", {"norm": "entry", "delta": 1e-5}, "expected delta with norm l2 only"),
    ("laplace", {"scale": "tensor"}, "expected scale public with norm l2, got scale='tensor'"),
    ("laplace", {"delta": math.nan}, "delta: expected 0 or a magnitude"),
    ("laplace", {"epsilon": -1.0}, "expected epsilon > 0"),
    ("jopeq-sound", {"delta": 1.0}, "expected 0 < delta < 1"),
    ("jopeq-sound", {"delta": 0.0}, "expected 0 < delta < 1"),
    ("jopeq-sound", {"norm": "entry", "delta": 1e-5}, "expected delta with norm l2 only"),
    ("jopeq-sound", {"epsilon": 0.0}, "expected epsilon > 0"),
)
def test_wrong_parameters_are_refused(name, parameters, message):
    with pytest.raises(ParameterError, match=message):
        build(name, **parameters)
    with pytest.raises(ValueError, match="expected norm entry or l2, got 'l1'"):
        Laplace(norm="l1")


# ---- messages


def clipped(update, clip):
    """[d] float64, by numpy."""
    values = update.double().numpy()
    return values * min(1.0, clip / np.linalg.norm(values))


@pytest.mark.parametrize("length", [0.5, 3.0])
def test_a_message_of_laplace_is_the_clipped_update_plus_noise(length):
    # alpha 1e-6; 300,000 draws see a scale that is 6 % off
    d, defense = 300_000, build("laplace", clip=2.0, epsilon=5.0, delta=1e-3)
    update = rng.normal(Key(3), (d,))
    update *= length / update.norm()
    wire = encode(defense, update)
    assert len(wire) == 4 * d
    noise = decode(defense, wire, setting_of(d)).double().numpy() - clipped(update, 2.0)
    b = laplace_l2_scale(4.0, 5.0, 1e-3)
    assert follows(noise, stats.laplace(scale=b).cdf)
    assert not follows(noise, stats.laplace(scale=1.06 * b).cdf)
    assert abs(noise.mean()) < 5 * b * math.sqrt(2 / d)
    with pytest.raises(MessageError):
        decode(defense, wire[:-1], setting_of(d))


def test_the_clip_is_that_of_the_whole_update():
    # hardly any noise: epsilon 1e12
    update = torch.tensor([3.0, -4.0, 0.0])
    for name, more in (("laplace", {}), ("jopeq-sound", {"bits": 16}), ("laplace+sdq", {"bits": 16})):
        defense = build(name, clip=2.5, epsilon=1e12, **more)
        found = decode(defense, encode(defense, update), setting_of(3))
        assert found.tolist() == pytest.approx([1.5, -2.0, 0.0], abs=2e-3)
        short = decode(defense, encode(defense, 0.1 * update), setting_of(3))
        assert short.tolist() == pytest.approx([0.3, -0.4, 0.0], abs=2e-3)
        assert decode(defense, encode(defense, torch.zeros(3)), setting_of(3)).abs().max() < 2e-3
        far = decode(defense, encode(defense, 1e37 * update), setting_of(3))
        assert far.tolist() == pytest.approx([1.5, -2.0, 0.0], abs=2e-3)
        with pytest.raises(ValueError, match="finite"):
            encode(defense, torch.tensor([math.nan, 0.0, 1.0]))


@pytest.mark.parametrize("bits", [1, 4, 16])
@pytest.mark.parametrize("gamma", ["reference", "paper", 0.3])
def test_a_message_of_jopeq_sound_is_a_function_of_noisy_numbers_and_dither(bits, gamma):
    # post-processing, overload included: the levels follow from clip(u) / C + noise and the shared key alone
    d, defense = 20_000, SoundJoPEQ(norm="l2", clip=2.0, epsilon=8.0, delta=5e-4, bits=bits, gamma=gamma)
    update = 0.1 * rng.normal(Key(4), (d,))
    wire = encode(defense, update)
    assert len(wire) == math.ceil(d * (bits + 1) / 8)
    b = 1.0786621
    noisy = clipped(update, 2.0) / 2 + b * rng.signed_exponential(PRIVATE, (d,), torch.float64).numpy()
    radius = {"reference": 1.5 * math.sqrt(1 + 2 * b**2), "paper": 2 * bits + b / 2}.get(gamma, gamma)
    step = 2 * radius / (2**bits if gamma == "paper" else 2**bits + 1)
    dither = rng.uniform32(SHARED, (d,), -0.5, 0.5).numpy().astype(float)
    top = 2 ** (bits - 1)
    places = noisy / step + dither
    found = defense.lattice.read(wire, d).numpy()
    levels = np.clip(np.rint(places), -top, top)
    # float32 arithmetic and the digits of b may move a number across a threshold
    near = np.abs(places - np.floor(places) - 0.5) < 1e-3 + 2.0**-18 * np.abs(places)
    assert near.mean() < (0.01 if bits < 16 else 1.0)
    assert (found[~near] == levels[~near]).all()
    assert np.abs(found - levels).max() <= 1 if bits < 16 else np.abs(found - levels).max() <= 2
    overload = (np.abs(places) > top + 0.5).mean()
    assert overload > 0.01 or bits == 16 or gamma == "paper"
    short = SoundJoPEQ(epsilon=defense.nominal, clip=2.0, bits=bits, gamma=gamma)
    assert encode(short, update * (1.999 / update.norm())) == encode(defense, update * (1.999 / update.norm()))


def test_without_overload_the_error_is_laplace_plus_uniform():
    d, defense = 300_000, SoundJoPEQ(norm="l2", epsilon=8.0, delta=5e-4, bits=6, gamma=40.0)
    update = 0.1 * rng.normal(Key(5), (d,))
    error = decode(defense, encode(defense, update), setting_of(d)).double().numpy() - clipped(update, 1.0)
    b, step = 1.0786621, 80 / 65

    def cdf(x):
        """Of Laplace(b) plus Uniform(-step/2, step/2): the mean of the Laplace cdf over the uniform number."""

        def area(y):
            return np.where(y < 0, b / 2 * np.exp(-np.abs(y) / b), np.maximum(y, 0) + b / 2 * np.exp(-np.abs(y) / b))

        return (area(x + step / 2) - area(x - step / 2)) / step

    assert follows(error, cdf)
    assert not follows(1.06 * error, cdf)


# ---- evidence


@pytest.mark.parametrize("name", ["laplace", "jopeq-sound", "laplace+sdq"])
@pytest.mark.parametrize("rounds", [1, 10])
def test_the_proof_follows_from_the_stated_distribution(name, rounds):
    for epsilon, dim in ((0.5, 1), (8.0, 1), (8.0, 36), (2.0, 3000)):
        table = {"norm": "l2", "epsilon": epsilon, "delta": 1e-3}
        setting = {"dim": dim, "clients": 3, "participants": 3, "samples": 20, "steps": 1, "batch": 0, "lr": 0.1}
        ready = prepare(name, table, {}, rounds, None, setting | {"momentum": 0.0, "sends": "update"})
        found = check_stated(ready.defense, ready.setting, Key(6))
        proved = claim_of(ready.defense, ready.history, ready.setting).proved.epsilon(1e-3)
        assert (found.faults, found.lacks) == ((), "")
        assert found.high == pytest.approx(proved, rel=1e-3)


def test_the_least_error_of_a_test_is_that_of_the_distance_by_pinsker():
    loss = Laplacian().loss(np.full(400, 0.02))
    assert loss.error == pytest.approx((1 - math.sqrt(0.08 / 2)) / 2)
    # the best test between two such messages: the sign of the sum of losses, by their distribution
    best = (1 - exact_delta(np.full(400, 0.02), 0.0, 1e-4)) / 2
    assert loss.error < best < 0.49
    assert loss.plus(PairLoss(1.0)).rho == pytest.approx(0.08 + 0.5)
    assert loss.times(3).ends(1e-3) == (0.0, pytest.approx(Concentrated(0.24).epsilon(1e-3)))


def test_exact_likelihoods_are_those_of_the_noise_around_the_clipped_update():
    d, setting = 40, setting_of(40)
    update, others = rng.normal(Key(7), (d,)), rng.normal(Key(8), (2, d))
    links = Links(setting, [WHO] * 2, [SHARED] * 2)
    defense = build("laplace", clip=2.0, epsilon=20.0)
    wire = encode(defense, update)
    sent = decode(defense, wire, setting).double().numpy()
    expected = [np.abs(sent - clipped(other, 2.0)).sum() / defense.noise_scale for other in others]
    found = defense.exact_likelihood(None, [wire] * 2, links)(others)
    assert found.tolist() == pytest.approx(expected, rel=1e-4)
    sound = build("jopeq-sound", clip=2.0, epsilon=20.0, bits=2)
    wire = encode(sound, update)
    levels, top = sound.lattice.read(wire, d).numpy(), 2
    dither = rng.uniform32(SHARED, (d,), -0.5, 0.5).numpy().astype(float)
    ends = sound.lattice.step * (np.array([levels - 0.5, levels + 0.5]) - dither)
    ends = np.where([levels == -top, levels == top], [[-np.inf], [np.inf]], ends)
    cdf = stats.laplace(scale=sound.noise_scale).cdf
    logs = [-np.log(np.subtract(*cdf(ends - clipped(other, 2.0) / 2)[::-1])).sum() for other in others]
    found = sound.likelihood(None, [wire] * 2, links)(others.double())
    assert float(found[0] - found[1]) == pytest.approx(logs[0] - logs[1], rel=1e-4)


@pytest.mark.parametrize("name", ["laplace", "jopeq-sound", "laplace+sdq"])
def test_likelihoods_have_slopes_that_respect_the_clip(name):
    defense, update = build(name, epsilon=30.0), rng.normal(Key(9), (30,))
    wire = encode(defense, update)
    for shared in ([SHARED], None):
        score = defense.likelihood(None, [wire], Links(setting_of(30), [WHO], shared))
        at = (3.0 * update)[None].double().requires_grad_()
        (slope,) = torch.autograd.grad(score(at).sum(), at)
        assert bool(torch.isfinite(slope).all())
        assert float(slope.abs().max()) > 0
        # outside the ball, the length does not matter
        assert abs(float((slope * at.detach()).sum())) < 1e-6 * float(slope.norm() * at.detach().norm())
        assert float(score(at.detach())) == pytest.approx(float(score(update[None].double())), rel=1e-6)


def test_the_norm_of_a_message_is_below_its_bound():
    for name in ("laplace", "jopeq-sound"):
        defense, d = build(name), 5000
        found = decode(defense, encode(defense, rng.normal(Key(10), (d,))), setting_of(d))
        assert float(found.norm()) < defense.longest(None, Link(setting_of(d), WHO, SHARED))


# ---- goals, personal epsilons, the suite, audits


@by_rows(("laplace", 8.0), ("laplace", 0.5), ("jopeq-sound", 8.0), ("laplace+sdq", 8.0))
def test_a_goal_is_reached_and_its_noise_is_that_of_the_proof(name, epsilon):
    federation = {"clients": 20, "rounds": 10, "algorithm": "fedsgd", "batch": 0, "lr": 3.0, "evaluate_every": 10}
    attack = {"name": "prior", "target": {"kind": "probe", "round": 0, "count": 2}}
    goal = {"proved_epsilon": epsilon, "unit": "client", "delta": 5e-4}
    asked = study_table(federation, [{"name": name, "norm": "l2", "target": goal}], [attack], model="linear", seeds=[0])
    (cell,), (note,) = solve(resolve(asked).cells, default_root(), lambda specs: {})
    defense = registry.build_defense(cell.training.defense)
    first = getattr(defense, "first", defense)
    # ten rounds; the noise of `BAR` for one would have sqrt(10) times less at equal epsilons
    found = orders_epsilon(10 * 2 / first.noise_scale**2, 5e-4)
    assert epsilon * (1 - TOLERANCE) <= found <= epsilon * (1 + 1e-6)
    assert ", which covers a client" in note


def test_each_client_of_a_personal_defense_has_the_epsilon_of_its_own_noise():
    for name in ("laplace", "jopeq-sound"):
        defense = build(name, personal="epsilon = 2, 8")
        found = defense.claim([defense.init(setting_of(36))] * 3, setting_of(36))
        proved = [group.claim.proved.epsilon(1e-5) for group in found.groups]
        alone = [orders_epsilon(3 * concentrated_rho(epsilon, 1e-5), 1e-5) for epsilon in (2.0, 8.0)]
        assert proved == pytest.approx(alone, rel=1e-6)
        assert found.epsilon == max(proved)


CHECKS = checks_of("defense", Effort(trials=200, evaluations=100, victims=2))
COSTLY = ("claim", "distribution", "dependence", "audit", "training", "attacks")


@pytest.mark.parametrize("name", ["laplace", "jopeq-sound", "laplace+sdq"])
@pytest.mark.parametrize(("what", "check"), [pair for pair in CHECKS if pair[0] not in COSTLY])
def test_a_clip_by_the_norm_passes_the_checks_of_the_suite(name, what, check):
    check(build(name))


@pytest.mark.matrix
@pytest.mark.parametrize("name", ["laplace", "jopeq-sound", "laplace+sdq"])
@pytest.mark.parametrize(("what", "check"), [pair for pair in CHECKS if pair[0] in COSTLY])
def test_a_clip_by_the_norm_passes_the_checks_by_an_audit_and_a_study(name, what, check):
    check(build(name))


def audited(faulty, trials=300):
    run = deployed(faulty, audit_setting(2))
    promise = claim_of(run.defense, run.history, run.setting)
    mechanism = Mechanism(run, Threat.SERVER)
    return promise, audit_mechanism(mechanism, promise, trials, 0.95, Key(11)).epsilon_lower


@pytest.mark.slow
@pytest.mark.parametrize("name", ["laplace", "jopeq-sound"])
def test_an_audit_finds_missing_noise_and_a_missing_clip_and_nothing_else(name):
    more = {"bits": 8, "gamma": 30.0} if name == "jopeq-sound" else {}
    right = build(name, epsilon=2.0, delta=1e-2, **more)
    for fault in ({"quiet": 0.3}, {"unclipped": True}, {"shared_noise": True}):
        promise, found = audited(Faulty(right, right, **fault))
        assert found > promise.epsilon, fault
    promise, found = audited(Faulty(right, right))
    assert found <= promise.epsilon
