"""Reference values that several test files share: printed tables, and closed forms of Gaussian mechanisms.

Unless stated otherwise, a printed value is exact to `digit`, half a unit of its last printed digit.
"""

from __future__ import annotations

import math
from typing import Any

import mpmath
import torch
from scipy import stats

ALPHA = 1e-6
"""Level of a statistical test: a correct program fails one test in a million."""

# UDP (Wei et al. 2021) at q = 1, delta = 1e-3: claimed epsilon, mu, true epsilon, digit of the true epsilon.
# mu has three decimals below 10 and two above. Our notes print mu = 3.229 for 12: it is 3.22848, rounded twice.
UDP_TRUE = [
    (1, 0.269, 0.646, 5e-4),
    (4, 1.076, 3.438, 5e-4),
    (6, 1.614, 5.738, 5e-4),
    (7, 1.883, 7.007, 5e-4),
    (8, 2.152, 8.353, 5e-4),
    (10, 2.690, 11.27, 5e-3),
    (12, 3.228, 14.49, 5e-3),
    (16, 4.305, 21.82, 5e-3),
    (20, 5.381, 30.32, 5e-3),
    (50, 13.45, 131.1, 0.05),
    (60, 16.14, 179.3, 0.05),
    (80, 21.52, 297.2, 0.05),
    (100, 26.90, 444.1, 0.05),
]
# The same: claimed epsilon, mu of the tight calibration (four decimals), z over the paper's z for tight and for zCDP
# (three decimals).
UDP_CORRECTED = [
    (1, 0.3884, 0.693, 1.035),
    (4, 1.2150, 0.886, 1.128),
    (8, 2.0833, 1.033, 1.235),
    (12, 2.8165, 1.146, 1.327),
    (16, 3.4649, 1.242, 1.411),
    (20, 4.0531, 1.328, 1.487),
    (50, 7.4558, 1.804, 1.935),
    (100, 11.4465, 2.350, 2.467),
]
# UDP at q = 0.6: T, claimed epsilon, true epsilon with hidden participation (Poisson PLD), of q T rounds, of the 95 %
# client, of all T rounds; three decimals.
UDP_SAMPLED = [
    (100, 4, 2.534, 3.438, 3.717, 4.737),
    (100, 8, 6.122, 8.353, 9.078, 11.780),
    (100, 16, 16.059, 21.817, 23.901, 31.823),
    (100, 20, 22.500, 30.317, 33.312, 44.769),
    (200, 4, 2.521, 3.438, 3.631, 4.737),
    (200, 8, 6.052, 8.353, 8.854, 11.780),
    (200, 12, 10.417, 14.491, 15.408, 20.822),
    (200, 16, 15.620, 21.817, 23.255, 31.823),
    (200, 20, 21.689, 30.317, 32.383, 44.769),
    (200, 50, 98.824, 131.149, 141.302, 203.543),
    (200, 100, 383.076, 444.105, 481.005, 709.562),
    (300, 8, 6.029, 8.353, 8.779, 11.780),
    (300, 20, 21.407, 30.317, 32.072, 44.769),
]
# UDP: delta, the claimed epsilon above which the claim is false; two decimals.
UDP_CROSSOVER = [(1e-2, 6.25), (1e-3, 6.98), (1e-4, 7.53), (1e-5, 7.97), (1e-6, 8.34)]
# UDP with eta 0.01, C 1, n 800, delta = 1e-3: q, T, claimed epsilon, noise_std of the update; eleven digits.
UDP_NOISE = [
    (1.0, 200, 4, 3.2853261061e-04),
    (1.0, 200, 8, 1.6426630530e-04),
    (1.0, 200, 20, 6.5706522122e-05),
    (0.6, 200, 8, 1.2724013296e-04),
    (0.6, 300, 50, 2.4933872044e-05),
]

# Over-the-air aggregation (Seif et al. 2020), delta = 1e-4: claimed epsilon of one round, true epsilon, its digit.
OTA_TRUE = [
    (0.5, 0.323, 5e-4),
    (1.0, 0.705, 5e-4),
    (1.2, 0.866, 5e-4),
    (2.0, 1.545, 5e-4),
    (4.0, 3.451, 5e-4),
    (6.0, 5.610, 5e-4),
    (8.0, 8.002, 5e-4),
    (10.0, 10.62, 5e-3),
    (15.0, 18.13, 5e-3),
    (20.0, 26.99, 5e-3),
]
# T rounds of the claim (1.2, 1e-4), delta' = 1e-4: claim by (16), its digit, its delta; true epsilon at that delta, at
# 1e-4 and at 1e-5, their digit. Our notes print 41.28 for 41.27: the root is 41.274884 in 60 digits.
OTA_ROUNDS = [
    (1, 7.93, 5e-3, 2e-4, 0.810, 0.866, 1.034, 5e-4),
    (10, 44.13, 5e-3, 1.1e-3, 2.631, 3.243, 3.746, 5e-4),
    (100, 329.9, 0.05, 0.0101, 9.514, 13.461, 14.997, 5e-4),
    (500, 1507, 0.5, 0.0501, 28.35, 41.27, 44.67, 5e-3),
    (1000, 2947, 0.5, 0.1001, 48.42, 69.82, 74.61, 5e-3),
]


def udp_mu(claimed: float, delta: float = 1e-3) -> float:
    """mu of the noise that UDP eq. (10) adds over all rounds, at q = 1."""
    return claimed / math.sqrt(2 * math.log(1 / delta))


def ota_mu(claimed: float, delta: float = 1e-4) -> float:
    """mu of the classical Gaussian mechanism."""
    return claimed / math.sqrt(2 * math.log(1.25 / delta))


def exact_delta(mu: float, epsilon: float) -> mpmath.mpf:
    """delta of the Gaussian mechanism: Balle, Wang 2018, Thm 8, as printed, in 400 digits."""
    with mpmath.workdps(400):
        m, e = mpmath.mpf(mu), mpmath.mpf(epsilon)
        return mpmath.ncdf(m / 2 - e / m) - mpmath.exp(e) * mpmath.ncdf(-m / 2 - e / m)


def follows(draws: Any, distribution: Any) -> bool:
    """Whether many draws follow a distribution (cdf or name), by Kolmogorov-Smirnov and the asymptotic p-value."""
    return bool(stats.kstest(draws, distribution, method="asymp").pvalue > ALPHA)


def coordinate_product(channel: Any, received: torch.Tensor, y: torch.Tensor, bound: float) -> torch.Tensor:
    """[n]: -ln of the product of the distributions of a PrivQuant channel's coordinates, given values y [n, d]."""
    places = ((y.double() / bound).clip(-1, 1) + 1) * ((channel.levels - 1) / 2)
    matched = (1 - (places - received).abs()).clamp(min=0)
    # 1e-12, because the channel may be the identity
    background = max((1 - channel.normalizer) / channel.levels, 1e-12)
    return -(background + channel.normalizer * matched).log().sum(-1)
