"""The privacy of t noise and of JoPEQ with t noise in numbers, against direct maximization and integration.

"As printed" is a value that an independent script derived from Lang, Sofer, Shaked, Shlezinger 2022; tolerances follow
from its digits.
"""

import math

import numpy as np
import pytest
from scipy import integrate, optimize

from leakgauge import Key, rng
from leakgauge.defenses._jopeq import privacy
from leakgauge.defenses._jopeq.privacy import (
    GENERATOR,
    SHIPPED,
    surrogate_covariance,
    t_epsilon,
    vector_epsilon,
    vector_epsilon_bound,
)
from tests.by_rows import by_rows

INF = math.inf


def code_gamma(s2, nu):
    return 1.5 * math.sqrt(1 + s2 * nu / (nu - 2))


DIAMETERS = (1, math.sqrt(2), 2)
STUDENT = [  # as printed: nominal epsilon, s2, nu, epsilon at each of DIAMETERS
    (0.84, 3, 3, (0.830, 1.168, 1.637)),
    (1, 2, 3, (1.014, 1.424, 1.988)),
    (2, 1, 12, (2.014, 2.838, 3.987)),
    (2, 0.5, 4, (2.079, 2.887, 3.951)),
    (3, 1, 32, (3.001, 4.239, 5.980)),
    (3, 0.5, 14, (3.006, 4.227, 5.912)),
    (3, 0.2, 4, (3.200, 4.352, 5.775)),
    (4, 0.85, 50, (3.984, 5.629, 7.945)),
    (4, 0.1, 3, (4.092, 5.365, 6.814)),
    (4, 0.2, 4, (3.200, 4.352, 5.775)),
    (4, 0.5, 29, (4.059, 5.724, 8.050)),
]


@pytest.mark.parametrize(("nominal", "s2", "nu", "printed"), STUDENT)
def test_the_epsilon_of_t_noise_is_as_printed_and_the_table_is_shipped(nominal, s2, nu, printed):
    assert [t_epsilon(s2, nu, diameter) for diameter in DIAMETERS] == pytest.approx(printed, abs=5.1e-4)
    assert (s2, nu) in SHIPPED[nominal]


def test_nothing_else_is_shipped():
    assert sum(map(len, SHIPPED.values())) == len(STUDENT)
    assert SHIPPED[2][0] == (0.5, 4)
    assert SHIPPED[3][0] == (0.2, 4)


@pytest.mark.parametrize(("D", "nu"), [(1, 4), (2, 4), (2, 12), (0.01, 4)])
def test_the_epsilon_of_t_noise_maximizes_the_ratio_of_densities(D, nu):
    def ratio(z):
        moved = z - np.array([D, 0.0])
        return -(nu + 2) / 2 * (np.log1p(z @ z / nu) - np.log1p(moved @ moved / nu))

    starts = 3 * rng.normal(Key(3, (D, nu)), (5, 2)).double().numpy()
    options = {"xatol": 1e-9, "fatol": 1e-13, "maxiter": 20_000, "maxfev": 20_000}
    found = max(-optimize.minimize(ratio, x, method="Nelder-Mead", options=options).fun for x in starts)
    assert found == pytest.approx(t_epsilon(1.0, nu, D), rel=1e-9)
    c = (D + math.sqrt(D * D + 4 * nu)) / 2
    assert t_epsilon(1.0, nu, D) == pytest.approx((nu + 2) / 2 * math.log(c * c / nu), rel=1e-11)


def test_the_golden_epsilon_of_t_noise():
    assert t_epsilon(1.0, 4, 1.0) == pytest.approx(1.484799, abs=5.1e-7)
    assert t_epsilon(0.25, 4, 0.5) == t_epsilon(1.0, 4, 1.0)


def test_the_surrogate_matrix_takes_the_errors_share():
    # golden: step 0.6, error covariance [[0.03, 0.0173205081], [0.0173205081, 0.05]]
    matrix, is_proper = surrogate_covariance(0.5, 4, 0.6)
    assert (0.5 * np.eye(2) - matrix) * 4 / 2 == pytest.approx(
        np.array([[0.03, 0.0173205081], [0.0173205081, 0.05]]), abs=5.1e-11
    )
    assert is_proper
    # as printed: eigenvalues at s2 = 0.5, nu = 4, step 1.414, and at s2 = 0.1, nu = 3, step 1.140
    assert np.linalg.eigvalsh(surrogate_covariance(0.5, 4, 2**0.5)[0]) == pytest.approx([0.333, 0.444], abs=5.1e-4)
    assert np.linalg.eigvalsh(surrogate_covariance(0.1, 3, 1.140)[0]) == pytest.approx([0.028, 0.076], abs=7e-4)
    assert surrogate_covariance(0.5, 4, 0.0)[0] == pytest.approx(0.5 * np.eye(2))


@pytest.mark.parametrize(("s2", "nu"), [(0.5, 4), (0.1, 3), (1, 32)])
def test_the_surrogate_is_proper_up_to_the_step_that_takes_everything(s2, nu):
    most = math.sqrt(6 * s2 * nu / (nu - 2))
    inside, outside = (surrogate_covariance(s2, nu, most * (1 + off)) for off in (-1e-9, 1e-9))
    assert inside.is_proper
    assert not outside.is_proper
    assert np.linalg.eigvalsh(inside.scale_matrix)[0] == pytest.approx(0, abs=1e-8)
    bits = 3
    assert vector_epsilon(s2, nu, bits, most * 1.0001 * (2**bits + 1) / 2) == INF
    assert vector_epsilon_bound(s2, nu, bits, most * 1.0001 * (2**bits + 1) / 2) == INF
    assert vector_epsilon_bound(s2, nu, bits, most * 0.9999 * (2**bits + 1) / 2) < INF


def lattice_noise(s2, nu, step):
    matrix = np.linalg.inv(GENERATOR) @ surrogate_covariance(s2, nu, step)[0] @ np.linalg.inv(GENERATOR).T
    assert matrix[0, 0] == pytest.approx(matrix[1, 1])
    std = math.sqrt(matrix[0, 0])
    return privacy._LatticeNoise(std, matrix[0, 1] / std**2, nu), matrix


@pytest.mark.parametrize(("s2", "nu", "step"), [(0.1, 3, 1.140), (0.5, 14, 0.755), (0.85, 50, 0.8)])
def test_the_probability_of_a_cell_is_the_integral_of_the_density(s2, nu, step):
    noise, matrix = lattice_noise(s2, nu, step)
    precision, norm = np.linalg.inv(matrix), 2 * math.pi * math.sqrt(np.linalg.det(matrix))

    def density(y, x):
        q = precision[0, 0] * x * x + 2 * precision[0, 1] * x * y + precision[1, 1] * y * y
        return (1 + q / nu) ** (-(nu + 2) / 2) / norm

    cells = [((-0.2, 0.1), (0.5, 0.9)), ((0.7, 0.4), (INF, INF)), ((0.3, -INF), (INF, -0.6)), ((-0.1, 0.9), (0.6, INF))]
    for low, high in cells:
        direct = integrate.dblquad(density, low[0], high[0], low[1], high[1], epsabs=1e-13, epsrel=1e-9)[0]
        assert noise.probability(np.array(low), np.array(high)) == pytest.approx(direct, rel=1e-7)


def cells_of(noise, step, bits, inputs, dithers):
    """[dithers, inputs, 2^bits + 1, 2^bits + 1] probabilities of the index cells, in lattice coordinates."""
    ends = np.concatenate([[-INF], (np.arange(-(2 ** (bits - 1)), 2 ** (bits - 1)) + 0.5) * step, [INF]])
    low, high = (np.stack(np.meshgrid(e, e, indexing="ij"), -1) for e in (ends[:-1], ends[1:]))
    moved = (dithers[:, None] + inputs)[:, :, None, None]
    return noise.probability(low - moved, high - moved)


def test_the_cells_share_all_of_the_probability():
    noise, _ = lattice_noise(0.2, 4, 0.71)
    inputs = rng.normal(Key(4), (6, 2)).double().numpy()
    dithers = 0.71 * (rng.uniform(Key(5), (4, 2)).double().numpy() - 0.5)
    assert cells_of(noise, 0.71, 2, inputs, dithers).sum((-1, -2)) == pytest.approx(np.ones((4, 6)), abs=1e-11)


def disc(angles):
    turn = np.linspace(0, 2 * np.pi, angles, endpoint=False)
    circle = np.stack([np.cos(turn), np.sin(turn)], 1)
    return np.concatenate([circle, circle[::2] / 2, np.zeros((1, 2))])


# as printed: (s2, nu), epsilon at 1 and 2 bits, bound at 1 and 2 bits. The epsilons are maxima over 81 dithers and 24
# inputs, so below the supremum, by a quadrature over the mixing variable of t that has an error of its own at nu = 3
# and 4; the one that is too high for this reason has a test of its own.
VECTOR = [
    ((0.5, 4), (4.28, 4.05), (4.700, 4.177)),
    ((1, 12), (4.66, 4.14), (4.758, 4.220)),
    ((0.2, 4), (7.04, 6.04), (7.902, 6.315)),
    ((0.5, 14), (7.72, 6.33), (7.853, 6.435)),
    ((0.1, 3), (None, 6.89), (9.779, 7.485)),
]


@pytest.mark.parametrize(("student", "printed", "bound"), VECTOR)
@pytest.mark.table(3)
def test_the_epsilon_of_a_sub_vector_is_not_below_the_printed_grid_and_near_it(student, printed, bound):
    gamma = code_gamma(*student)
    for k, bits in enumerate((1, 2)):
        found, most = vector_epsilon(*student, bits, gamma), vector_epsilon_bound(*student, bits, gamma)
        assert most == pytest.approx(bound[k], abs=5.1e-4)
        assert found <= most
        if printed[k] is not None:
            assert printed[k] - 5.1e-3 <= found <= printed[k] + 0.05


def test_the_one_printed_epsilon_that_is_too_high_comes_from_a_wrong_probability():
    # (4; 0.1, 3) at 1 bit is printed as 8.52: the corner cell at dither (1/4, 1/8) of a step. Its least probability
    # over 24 inputs is 1.268e-4 by direct integration, not the 7.70e-5 behind that number
    step = 2 * code_gamma(0.1, 3) / 3
    noise, matrix = lattice_noise(0.1, 3, step)
    chance = cells_of(noise, step, 1, disc(24)[:24] @ np.linalg.inv(GENERATOR).T, step * np.array([[0.25, 0.125]]))
    chance = chance[0, :, 2, 2]
    x = np.linalg.inv(GENERATOR) @ disc(24)[chance.argmin()]
    precision, norm = np.linalg.inv(matrix), 2 * math.pi * math.sqrt(np.linalg.det(matrix))

    def density(v, u):
        return (1 + np.array([u, v]) @ precision @ np.array([u, v]) / 3) ** -2.5 / norm

    low = step / 2 - step * np.array([0.25, 0.125]) - x
    direct = integrate.dblquad(density, low[0], INF, low[1], INF, epsabs=1e-9)[0]
    assert direct == pytest.approx(1.268e-4, abs=5.1e-8)
    assert chance.min() == pytest.approx(direct, rel=1e-4)
    assert vector_epsilon(0.1, 3, 1, code_gamma(0.1, 3)) < 8.52 - 0.2


@by_rows((0.5, 4, 1), (0.1, 3, 1), *(pytest.param(*case, marks=pytest.mark.slow) for case in ((1, 12, 2), (0.2, 4, 2))))
@pytest.mark.matrix
def test_the_epsilon_of_a_sub_vector_is_what_all_cells_dithers_and_inputs_attain(s2, nu, bits):
    # every index cell at 121 dithers and 37 inputs, without symmetries and without a search
    # for the maximum between them: it misses the supremum by less than 0.02
    gamma = code_gamma(s2, nu)
    step = 2 * gamma / (2**bits + 1)
    noise, _ = lattice_noise(s2, nu, step)
    axis = np.linspace(-step / 2, step / 2, 11)
    worst = 0.0
    for first in axis:
        dithers = np.stack([np.full(11, first), axis], 1)
        logs = np.log(cells_of(noise, step, bits, disc(24) @ np.linalg.inv(GENERATOR).T, dithers))
        worst = max(worst, float((logs.max(1) - logs.min(1)).max()))
    found = vector_epsilon(s2, nu, bits, gamma)
    assert worst <= found + 1e-9
    assert found == pytest.approx(worst, abs=0.02)


@pytest.mark.parametrize(("bits", "hidden"), [(8, 1e-3), (24, 1e-6)])
def test_many_bits_hide_nothing(bits, hidden):
    found, most = (f(0.5, 4, bits, code_gamma(0.5, 4)) for f in (vector_epsilon, vector_epsilon_bound))
    assert found == pytest.approx(t_epsilon(0.5, 4, 2), rel=hidden)
    assert found <= most


def test_a_paper_step_is_a_larger_gamma():
    # at 1 bit the paper's step takes more than there is from every shipped noise
    for s2, nu in {student for students in SHIPPED.values() for student in students}:
        gamma = 1.5 * (1 + s2 * nu / (nu - 2))
        assert vector_epsilon_bound(s2, nu, 1, gamma * 3 / 2) == INF
        assert not surrogate_covariance(s2, nu, gamma).is_proper


@by_rows(
    (lambda: t_epsilon(0, 3, 2), "expected s2 > 0, got s2=0"),
    (lambda: t_epsilon(1, 3, 0), "expected diameter > 0"),
    (lambda: surrogate_covariance(1, 2, 1), "expected nu > 2, so that t noise has a variance, got nu=2"),
    (lambda: vector_epsilon(1, 3, 0, 1), "expected 1 <= bits <= 24, got bits=0"),
    (lambda: vector_epsilon(1, 3, 1, 0), "expected gamma > 0"),
)
def test_arguments_out_of_range_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
