"""Formulas of JoPEQ's privacy: the noise that can be drawn, and the epsilon of a message with this noise.

JoPEQ needs a private noise n such that n plus the quantization error is exactly Laplace (or t). No distribution has the
required characteristic function, which exceeds 1 near every non-zero point of 2 pi times the dual lattice. The
reference code draws a surrogate: noise of the same family whose variance is that of the target minus that of the error.
The server knows the dither, so to the server a message is a function of the input plus n. Its epsilon is that of n
alone, unless the quantizer hides part of this sum; the error adds no privacy, because its support is bounded.

Inputs are in [-1, 1], or in the unit disc where two coordinates share a lattice. The lattice is `GENERATOR` times the
integers times the step.

Source: Lang, Sofer, Shaked, Shlezinger 2022, "Joint privacy enhancement and quantization in federated learning", and
    its reference code. All epsilons here are derived, not copied from the printed formulas.
"""

from __future__ import annotations

import functools
import math
from fractions import Fraction
from typing import NamedTuple

import numpy as np
from scipy import optimize, special

from leakgauge.harness.core.checks import positive
from leakgauge.harness.core.gaussian import check_nonnegative
from leakgauge.harness.core.stats import Numbers

_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(48)

# Search for a sub-vector's epsilon: numbers of inputs on the circle, places of a cell per coordinate, and ascents
_ANGLES, _PLACES, _CLIMBS = 24, 7, 3

GENERATOR: Numbers = np.array([[1.0, 0.0], [1 / 3**0.5, 2 / 3**0.5]])
"""Generators of the two-dimensional lattice at step 1, by columns."""
GENERATOR.setflags(write=False)


class Student(NamedTuple):
    """Bivariate t noise: scale matrix s2 times the identity, nu degrees of freedom."""

    s2: float
    nu: float


SHIPPED: dict[float, tuple[Student, ...]] = {
    0.84: (Student(3.0, 3.0),),
    1.0: (Student(2.0, 3.0),),
    2.0: (Student(0.5, 4.0), Student(1.0, 12.0)),
    3.0: (Student(0.2, 4.0), Student(0.5, 14.0), Student(1.0, 32.0)),
    4.0: (Student(0.2, 4.0), Student(0.1, 3.0), Student(0.5, 29.0), Student(0.85, 50.0)),
}
"""The noises of the reference code for each epsilon; the paper's Table II uses the first noise for epsilon 2 and 3."""


def surrogate_scale(epsilon: float, step: float) -> float:
    """Scale b' of Laplace noise that, with an error uniform over `step`, has the variance of scale b = 2/epsilon.

    sqrt(b^2 - step^2 / 24), or 0 where the error already has at least the target variance: then no noise is drawn.

    Raises:
        ValueError: epsilon is not finite and above zero, or step not finite and non-negative.
    """
    positive(epsilon=epsilon)
    _check_step(step)
    # exact fractions: the difference cancels where b' is near 0
    left = 4 / Fraction(float(epsilon)) ** 2 - Fraction(float(step)) ** 2 / 24
    return math.sqrt(max(Fraction(0), left))


def scalar_epsilon(epsilon: float, step: float, edge: float = 1.0) -> float:
    """Exact pure epsilon of one coordinate under the surrogate noise, against a server that knows the dither.

    Args:
        epsilon: as configured.
        step: of the quantizer.
        edge: the outermost level, 2^(bits - 1) * step.

    | case | value |
    |---|---|
    | edge >= 1 | 2/b' = epsilon / sqrt(1 - step^2 epsilon^2 / 96) |
    | edge < 1 | (1 + edge)/b' + ln(2 - e^(-(1 - edge)/b')): the outermost level hides part of the noise |
    | step * epsilon >= sqrt(96) | inf: there is no noise |

    Proof: Laplace noise is log-concave, so the likelihood of levels and inputs is totally positive. Hence no level
    reveals more about the inputs 1 and -1 than the outermost level, at the dither that moves its threshold to `edge`.

    Raises:
        ValueError: as for `surrogate_scale`, or edge is not above zero.
    """
    if not edge > 0:
        raise ValueError(f"expected edge > 0, got edge={edge}")
    scale = surrogate_scale(epsilon, step)
    if scale == 0:
        return math.inf
    hidden = max(0.0, 1.0 - edge) / scale
    return 2 / scale - hidden + math.log1p(-math.expm1(-hidden))


def uniform_delta(step: float) -> float:
    """min(1, 2/step): delta of one coordinate, at every finite epsilon, where no noise is drawn.

    Given the dither, the message is then a function of the input. The messages of 1 and -1 differ with this probability
    over the dither.

    Raises:
        ValueError: step is not finite and above zero.
    """
    positive(step=step)
    return min(1.0, 2 / step)


def sphere_epsilon(epsilon_per_coordinate: float, sub_vectors: int) -> float:
    """Exact pure epsilon of a message of M scalars on the sphere of radius sqrt(M)/3, the range of JoPEQ's scale.

    It is (M/3) epsilon. The l1 distance of two points on the sphere is at most 2M/3, attained by (1/3, ..., 1/3) and
    its negative, and one coordinate's epsilon covers a distance of 2. No clipping is needed, but the scale must not be
    sent.

    Args:
        epsilon_per_coordinate: 2/b' of the noise, i.e. `scalar_epsilon` with its default edge.
        sub_vectors: M, the number of sub-vectors of one coordinate.

    Raises:
        ValueError: epsilon is negative, or sub_vectors below 1.
    """
    check_nonnegative(epsilon=epsilon_per_coordinate)
    if sub_vectors < 1:
        raise ValueError(f"expected a message of at least 1 part, got {sub_vectors}")
    return sub_vectors / 3 * epsilon_per_coordinate


def t_epsilon(s2: float, nu: float, diameter: float) -> float:
    """Exact pure epsilon of bivariate t noise, with scale matrix s2 times the identity, for inputs within a diameter.

    (nu + 2)/2 * ln(c^2/nu), with c = (D + sqrt(D^2 + 4 nu))/2 and D = diameter/sqrt(s2); computed in the equal form (nu
    + 2) * asinh(D / (2 sqrt(nu))), which does not cancel. The paper prints the exponent (nu + 2)^2.

    The scale of a tensor clips nothing, so pairs may lie outside of the unit disc, further apart than its diameter, 2:
    those of a tensor of 121 numbers that an audit compares are 2.0166 apart, with 3.980 instead of 3.951 (s2 0.5, nu
    4), or 4.206 instead of 4.177 for `jopeq-t`. Claims state this assumption (`scale.unclipped`).

    Raises:
        ValueError: a number is not finite and above zero.
    """
    positive(s2=s2, nu=nu, diameter=diameter)
    return (nu + 2) * math.asinh(diameter / math.sqrt(s2) / (2 * math.sqrt(nu)))


class Surrogate(NamedTuple):
    """The surrogate t noise. scale_matrix: [2, 2], Sigma'; is_proper: whether Sigma' is positive definite."""

    scale_matrix: Numbers
    is_proper: bool


def surrogate_covariance(s2: float, nu: float, step: float) -> Surrogate:
    """Sigma' = s2 I - ((nu - 2)/nu) Cov(P0): scale matrix of the t noise drawn instead of t(s2 I).

    Cov(P0) = step^2/12 G G^T is the covariance of the error, uniform over the lattice's parallelogram. G G^T has the
    eigenvalues 2/3 and 2, so Sigma' is positive definite where (nu - 2)/nu * step^2/6 < s2.

    Raises:
        ValueError: s2 is not finite and above zero, step not finite and non-negative, or nu not above 2.
    """
    taken = _error_scale(s2, nu, step)
    return Surrogate(s2 * np.eye(2) - taken * GENERATOR @ GENERATOR.T, 2 * taken < s2)


def vector_epsilon_bound(s2: float, nu: float, bits: int, gamma: float) -> float:
    """Proved upper bound on the epsilon of one sub-vector: the epsilon of the surrogate t noise, by post-processing.

    Arguments, special cases and errors are those of `vector_epsilon`.
    """
    least = s2 - 2 * _error_scale(s2, nu, _step(bits, gamma))
    return t_epsilon(least, nu, 2.0) if least > 0 else math.inf


@functools.lru_cache(maxsize=64)
def vector_epsilon(s2: float, nu: float, bits: int, gamma: float) -> float:
    """Pure epsilon of one sub-vector under the surrogate t noise, attained by two inputs, a dither and an index.

    It is the supremum over inputs in the unit disc, dithers and index cells, overload included, of the log ratio of an
    index's probabilities given the dither. The value is attained up to quadrature (1e-9), so it is a lower bound on
    epsilon. A local search from the best points of a grid finds the supremum, without a proof; five times the work adds
    at most 3e-5. `vector_epsilon_bound` is the proved upper bound: for the shipped parameters, at most 19 % larger at 1
    bit, 13 % at 2, 7 % at 8.

    Args:
        s2, nu: the t noise that the surrogate replaces.
        bits: R; there are 2^R + 1 levels per lattice coordinate. The cost does not depend on R.
        gamma: with the reference code's step = 2 gamma / (2^R + 1). For the paper's step, 2 gamma / 2^R, pass gamma
            times (2^R + 1) / 2^R.

    | case | value |
    |---|---|
    | the surrogate is not proper | inf: no noise can be drawn |

    Raises:
        ValueError: bits outside 1..24, nu not above 2, or another number not finite and above zero.
    """
    step = _step(bits, gamma)
    taken = _error_scale(s2, nu, step)
    if not 2 * taken < s2:
        return math.inf
    noise = _LatticeNoise(math.sqrt(s2 - taken), -s2 / 2 / (s2 - taken), nu)
    edge = 2 ** (bits - 1) * step
    return max(_family_epsilon(noise, family) for family in _families(step, edge))


class _LatticeNoise(NamedTuple):
    """The surrogate t noise in lattice coordinates, where both coordinates have the same variance.

    std: square root of the diagonal of the scale matrix G^-1 Sigma' G^-T; rho: its correlation.
    """

    std: float
    rho: float
    nu: float

    def probability(self, low: Numbers, high: Numbers) -> Numbers:
        """P(low < noise < high) by integration over the first coordinate; low, high: [..., 2], may be infinite.

        With sqrt(nu) tan(phi) for the first coordinate, the density is cos^(nu - 1), and the second coordinate given
        the first is t with nu + 1 degrees of freedom at an argument that is bounded and smooth in phi.
        """
        start, end = (np.arctan(bound[..., 0] / self.std / math.sqrt(self.nu)) for bound in (low, high))
        phi = (start + end)[..., None] / 2 + (end - start)[..., None] / 2 * _NODES
        cos, sin = np.cos(phi), np.sin(phi)
        shrink = math.sqrt(self.nu / (self.nu + 1) * (1 - self.rho**2))
        below, above = (
            (bound[..., 1, None] / self.std * cos - self.rho * math.sqrt(self.nu) * sin) / shrink
            for bound in (low, high)
        )
        # computed in the lower tail, where the difference does not cancel
        below, above = np.where(below > 0, -above, below), np.where(below > 0, -below, above)
        inner = special.stdtr(self.nu + 1, above) - special.stdtr(self.nu + 1, below)
        constant = math.exp(math.lgamma((self.nu + 1) / 2) - math.lgamma(self.nu / 2)) / math.sqrt(math.pi)
        total = (inner * cos ** (self.nu - 1)) @ _WEIGHTS
        return np.asarray(constant * (end - start) / 2 * total)


class _Family(NamedTuple):
    """Index cells of one shape: a box that the dither moves within a rectangle of places.

    below, above: reach of the box from its place; least, most: corners of the rectangle of places. All are [2].
    """

    below: Numbers
    above: Numbers
    least: Numbers
    most: Numbers


def _families(step: float, edge: float) -> list[_Family]:
    """Inner, border and two kinds of corner cells; all others follow by reflection or by swapping coordinates."""
    inner = (step / 2, step / 2, step / 2 - edge, edge - step / 2)
    above = (0.0, math.inf, edge - step, edge)
    under = (math.inf, 0.0, -edge, step - edge)
    return [_Family(*np.array(pair).T) for pair in ((inner, inner), (inner, above), (above, above), (above, under))]


def _family_epsilon(noise: _LatticeNoise, family: _Family) -> float:
    """Largest log ratio of a cell's probabilities for two inputs: over a grid, then by ascent from the best places."""
    to_lattice = np.linalg.inv(GENERATOR).T
    turn = np.linspace(0, 2 * np.pi, _ANGLES, endpoint=False)
    circle = np.stack([np.cos(turn), np.sin(turn)], axis=1)
    # the least probability is on the circle, because the probability is quasi-concave in the input (Borell 1975); the
    # largest may be anywhere in the disc
    inputs = np.concatenate([circle, circle[::2] / 2, np.zeros((1, 2))])
    axes = [np.linspace(family.least[k], family.most[k], _PLACES) for k in range(2)]
    places = np.stack(np.meshgrid(*axes), axis=-1).reshape(-1, 1, 2)
    logs = _log_probability(noise, family, places - inputs @ to_lattice)
    near, far = logs.argmax(1), logs[:, :_ANGLES].argmin(1)
    best = logs.max(1) - logs[:, :_ANGLES].min(1)
    limits = [*zip(family.least, family.most, strict=True), (None, None), (0.0, 1.0), (None, None)]
    largest = float(best.max())
    for k in np.argsort(best)[-_CLIMBS:]:
        x = inputs[near[k]]
        start = np.array([*places[k, 0], turn[far[k]], np.hypot(*x), np.arctan2(x[1], x[0])])
        # eps 1e-6, because the probability of a narrow cell has too few digits for smaller differences
        search = {"method": "L-BFGS-B", "bounds": limits, "options": {"eps": 1e-6}}
        climbed = optimize.minimize(_lost_ratio, start, args=(noise, family, to_lattice), **search)
        largest = max(largest, -float(climbed.fun))
    return largest


def _lost_ratio(v: Numbers, noise: _LatticeNoise, family: _Family, to_lattice: Numbers) -> float:
    """Minus the log ratio; v: a cell's place, the far input's angle, the near input's radius and angle."""
    ends = np.array([[v[3] * np.cos(v[4]), v[3] * np.sin(v[4])], [np.cos(v[2]), np.sin(v[2])]])
    near, far = _log_probability(noise, family, v[:2] - ends @ to_lattice)
    return float(far - near)


def _log_probability(noise: _LatticeNoise, family: _Family, centers: Numbers) -> Numbers:
    chance = noise.probability(centers - family.below, centers + family.above)
    # raising the smaller of two probabilities keeps their ratio a lower bound
    return np.asarray(np.log(np.maximum(chance, 1e-300)))


def _step(bits: int, gamma: float) -> float:
    # above 24 bits, the probability of a narrow cell loses its digits, and the search its slopes
    if not 1 <= bits <= 24:
        raise ValueError(f"expected 1 <= bits <= 24, got bits={bits}")
    positive(gamma=gamma)
    return 2 * gamma / (2.0**bits + 1)


def _error_scale(s2: float, nu: float, step: float) -> float:
    """((nu - 2)/nu) step^2/12: the error's part of the scale matrix, as a multiple of G G^T."""
    positive(s2=s2)
    if not 2 < nu < math.inf:
        raise ValueError(f"expected nu > 2, so that t noise has a variance, got nu={nu}")
    _check_step(step)
    return (nu - 2) / nu * step**2 / 12


def _check_step(step: float) -> None:
    if not 0 <= step < math.inf:
        raise ValueError(f"expected step >= 0, got step={step}")
