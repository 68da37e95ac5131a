"""JoPEQ's privacy in numbers, against enumeration and closed forms.

"As printed" is a value that an independent script derived from Lang, Sofer, Shaked, Shlezinger 2022; tolerances follow
from its digits.
"""

import math

import numpy as np
import pytest
from scipy import special, stats

from leakgauge import Key, rng
from leakgauge.defenses._jopeq.privacy import (
    GENERATOR,
    scalar_epsilon,
    sphere_epsilon,
    surrogate_scale,
    uniform_delta,
)
from tests.by_rows import by_rows


def paper_step(epsilon, bits):
    return 2 * (2 * bits + 1 / epsilon) / 2**bits


def code_step(epsilon, bits):
    return 2 * 1.5 * math.sqrt(1 + 2 * (2 / epsilon) ** 2) / (2**bits + 1)


EPSILONS = (1, 2, 3, 3.5, 4, 5, 8, 10)
INF = math.inf
SCALAR = [  # as printed: the rule for the step, bits, epsilon at each of EPSILONS
    (paper_step, 1, (1.050, 2.326, 4.288, 6.062, 10.119, INF, INF, INF)),
    (paper_step, 2, (1.034, 2.252, 4.009, 5.439, 8.042, INF, INF, INF)),
    (paper_step, 3, (1.016, 2.120, 3.430, 4.229, 5.194, 8.172, INF, INF)),
    (paper_step, 4, (1.007, 2.049, 3.165, 3.767, 4.410, 5.867, 14.315, INF)),
    (paper_step, 8, (1.000, 2.001, 3.002, 3.504, 4.005, 5.010, 8.043, 10.083)),
    (code_step, 1, (1.050, 2.138, 3.307, 3.940, 4.619, 6.172, 16.000, INF)),
    (code_step, 2, (1.017, 2.047, 3.100, 3.641, 4.193, 5.341, 9.363, 12.964)),
    (code_step, 4, (1.001, 2.004, 3.008, 3.512, 4.016, 5.027, 8.095, 10.180)),
    (code_step, 8, (1.000, 2.000, 3.000, 3.500, 4.000, 5.000, 8.000, 10.001)),
]


@pytest.mark.parametrize(("step", "bits", "printed"), SCALAR)
def test_the_scalar_epsilon_is_as_printed(step, bits, printed):
    found = [scalar_epsilon(epsilon, step(epsilon, bits)) for epsilon in EPSILONS]
    assert found == pytest.approx(printed, abs=5.1e-4)


def test_golden_values_of_the_scalar_surrogate():
    for step in (0.0, 1.0, code_step(4, 1)):  # the sum of noise and error has the variance 2 b^2
        assert 2 * surrogate_scale(4, step) ** 2 + step**2 / 12 == pytest.approx(2 * 0.5**2, rel=1e-12)
    assert surrogate_scale(4, code_step(4, 1)) == pytest.approx(0.4330127019, abs=5.1e-11)
    assert surrogate_scale(4, 2.25) == pytest.approx(0.1976423538, abs=5.1e-11)
    assert scalar_epsilon(4, code_step(4, 1)) == pytest.approx(4.61880, abs=5.1e-6)
    assert scalar_epsilon(4, 2.25) == pytest.approx(10.11929, abs=5.1e-6)
    assert scalar_epsilon(3, code_step(3, 1)) == pytest.approx(3.30707, abs=5.1e-6)
    assert scalar_epsilon(3, paper_step(3, 1)) == pytest.approx(4.28754, abs=5.1e-6)
    assert scalar_epsilon(10, code_step(10, 8)) == pytest.approx(10.00077, abs=5.1e-6)
    assert scalar_epsilon(10, paper_step(10, 8)) == pytest.approx(10.08343, abs=5.1e-6)


def enumerated(epsilon, step, bits, inputs=9, dithers=801):
    """Largest log ratio over pairs of inputs, dithers and all 2^bits + 1 index cells, overload included."""
    distribution = stats.laplace(scale=surrogate_scale(epsilon, step))
    d, x = np.linspace(-step / 2, step / 2, dithers)[:, None, None], np.linspace(-1, 1, inputs)[:, None]
    ends = (np.arange(-(2 ** (bits - 1)), 2 ** (bits - 1)) + 0.5) * step - d - x
    inner = np.where(ends[..., :-1] > 0, -np.diff(distribution.sf(ends)), np.diff(distribution.cdf(ends)))
    logs = np.concatenate(
        [distribution.logcdf(ends[..., :1]), np.log(np.maximum(inner, 1e-300)), distribution.logsf(ends[..., -1:])], -1
    )
    return float((logs.max(1) - logs.min(1)).max())


@pytest.mark.parametrize(("epsilon", "bits"), [(3, 1), (4, 1), (4, 2), (3, 4)])
@pytest.mark.parametrize("step", [paper_step, code_step])
def test_the_scalar_epsilon_is_attained_by_enumeration(epsilon, bits, step):
    width = step(epsilon, bits)
    assert enumerated(epsilon, width, bits) == pytest.approx(scalar_epsilon(epsilon, width), rel=1e-5)


@pytest.mark.parametrize(("epsilon", "bits", "gamma"), [(4, 1, 1.0), (4, 2, 0.7), (10, 4, 1.0), (1, 3, 0.3)])
def test_an_outermost_level_inside_the_inputs_hides_as_much_as_enumeration_shows(epsilon, bits, gamma):
    step = 2 * gamma / (2**bits + 1)
    edge = 2 ** (bits - 1) * step
    assert edge < 1
    hidden = scalar_epsilon(epsilon, step, edge)
    assert hidden == pytest.approx(enumerated(epsilon, step, bits), rel=1e-5)
    assert hidden < scalar_epsilon(epsilon, step) * 0.999


def test_quantizing_takes_noise_away_and_gives_no_privacy_back():
    assert scalar_epsilon(2, 0.0) == 2
    assert scalar_epsilon(2, 1.0, edge=7.0) == scalar_epsilon(2, 1.0) > 2
    assert scalar_epsilon(1, math.sqrt(96) * (1 - 1e-12)) > 1e5
    assert scalar_epsilon(1, math.sqrt(96) * (1 + 1e-12)) == INF
    assert surrogate_scale(1, math.sqrt(96) * (1 + 1e-12)) == 0
    assert surrogate_scale(5, 0.0) == 2 / 5


@by_rows((10, 1, 0.952), (10, 2, 0.976), (10, 4, 1.000), (33, 4, 1.000), (5, 1, 0.909))
def test_the_delta_of_the_dither_alone_is_as_printed_and_counted(epsilon, bits, delta):
    step = paper_step(epsilon, bits)
    assert scalar_epsilon(epsilon, step) == INF
    assert uniform_delta(step) == pytest.approx(delta, abs=5.1e-4)
    edge = 2.0 ** (bits - 1)
    d = (np.arange(1_000_000) + 0.5) / 1_000_000 - 0.5  # in steps
    index = [np.clip(np.round(x / step + d), -edge, edge) for x in (-1.0, 1.0)]
    assert np.mean(index[0] != index[1]) == pytest.approx(uniform_delta(step), abs=3e-6)


def test_a_message_on_the_sphere_costs_a_third_of_one_in_the_cube():
    # as printed, at epsilon 4: linear model, CNN, MLP, CIFAR CNN
    for weights, printed in ((7850, 1.05e4), (6422, 8.6e3), (25818, 3.4e4), (169578, 2.3e5)):
        assert float(f"{sphere_epsilon(4.0, weights):.1e}") == pytest.approx(printed, rel=0.06)
    assert sphere_epsilon(4.0, 7850) == pytest.approx(10466.667, abs=1e-3)
    assert sphere_epsilon(INF, 3) == INF


def test_no_two_points_of_the_sphere_are_further_apart_in_l1_than_claimed():
    points = rng.normal(Key(1), (2000, 2, 12)).double().numpy()
    points *= math.sqrt(12) / 3 / np.linalg.norm(points, axis=-1, keepdims=True)
    b = 0.5
    assert (np.abs(points[:, 0] - points[:, 1]).sum(-1) / b).max() < sphere_epsilon(2 / b, 12)
    third = np.full(12, 1 / 3)
    assert np.linalg.norm(third) == pytest.approx(math.sqrt(12) / 3)
    assert np.abs(2 * third).sum() / b == pytest.approx(sphere_epsilon(2 / b, 12), rel=1e-12)


def required(t, epsilon, step):
    """Modulus of the characteristic function required by the paper's Thm III.2: Laplace's over that of the error."""
    return 1 / (1 + (2 * t / epsilon) ** 2) / np.abs(np.sinc(t * step / (2 * np.pi)))


@pytest.mark.parametrize(("epsilon", "bits", "first"), [(4, 1, 1.04), (4, 8, 49.4)])
def test_the_required_noise_has_an_impossible_characteristic_function(epsilon, bits, first):
    # as printed, to three digits: where it first exceeds 1
    step, digit = paper_step(epsilon, bits), 0.005 if first < 10 else 0.05
    assert required(np.linspace(1e-3, first - digit, 100_000), epsilon, step).max() < 1
    assert required(first + digit, epsilon, step) > 1
    for k in (1, 2, 3):
        assert required(2 * np.pi * k / step * (1 + 1e-9), epsilon, step) > 1e3


def test_the_required_noise_has_a_negative_variance_where_none_is_drawn():
    step = paper_step(10, 4)
    assert required(1e-3, 10, step) > 1
    assert surrogate_scale(10, step) == 0
    assert required(1e-3, 4, paper_step(4, 1)) < 1


@pytest.mark.parametrize("bits", [1, 2, 8])
@pytest.mark.parametrize("epsilon", [0.5, 3, 33])
@pytest.mark.parametrize("step", [paper_step, code_step])
def test_no_choice_of_parameters_makes_it_possible(epsilon, bits, step):
    width = step(epsilon, bits)
    zero = 2 * np.pi / width
    assert required(zero * (1 + 1e-12), epsilon, width) > 1
    # without an error, Laplace noise is required
    assert required(zero, epsilon, 0.0) < 1


def test_nor_does_t_noise_over_the_lattice():
    # the error's characteristic function vanishes on 2 pi times the dual lattice, that of t noise nowhere
    nu, s2, step = 4, 0.5, 0.6
    offset = np.stack(np.meshgrid(*[(np.arange(64) + 0.5) / 64 - 0.5] * 2), -1).reshape(-1, 2) * step @ GENERATOR.T
    for k in ((1, 0), (0, 1), (1, -1), (2, 1)):
        t = 2 * np.pi / step * np.linalg.inv(GENERATOR).T @ np.array(k)
        a = math.sqrt(nu * s2) * np.linalg.norm(t)
        of_noise = a ** (nu / 2) * special.kv(nu / 2, a) / (2 ** (nu / 2 - 1) * special.gamma(nu / 2))
        of_error = abs(np.exp(1j * offset @ t).mean())
        assert of_noise / of_error > 1e3
        if k != (2, 1):  # half of it is not on the dual lattice, in either coordinate
            assert abs(np.exp(1j * offset @ (t / 2)).mean()) > 0.1


@by_rows(
    (lambda: surrogate_scale(0, 1), "expected epsilon > 0, got epsilon=0"),
    (lambda: surrogate_scale(1, -1), "expected step >= 0, got step=-1"),
    (lambda: surrogate_scale(math.nan, 1), "expected epsilon > 0"),
    (lambda: surrogate_scale(1, INF), "expected step >= 0"),
    (lambda: scalar_epsilon(1, 1, 0), "expected edge > 0, got edge=0"),
    (lambda: uniform_delta(0), "expected step > 0"),
    (lambda: sphere_epsilon(-1, 3), "expected epsilon >= 0, got epsilon=-1"),
    (lambda: sphere_epsilon(1, 0), "expected a message of at least 1 part, got 0"),
)
def test_arguments_out_of_range_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
