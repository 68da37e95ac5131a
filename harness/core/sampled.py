"""The privacy loss of Poisson-sampled Gaussian noise, vectorized; dp_accounting inverts it point by point, in Python.

Source: dp_accounting 0.6.0, `privacy_loss_mechanism.AdditiveNoisePrivacyLoss` and `from_gaussian_mechanism`. The
    operations and their order are the same, so the results have the same bits.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from dp_accounting.pld.pld_pmf import PLDPmf
    from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution

_Numbers = npt.NDArray[np.float64]

_NEAR = 1e-9
"""Relative difference below which a loss counts as equal to the limit that sampling sets."""


def sampled_gaussian(noise_multiplier: float, share: float, count: int, step: float) -> PrivacyLossDistribution:
    """The privacy loss of `count` runs of Gaussian noise on a Poisson sample, for adding or removing a record.

    Args:
        noise_multiplier: above zero, in units of the sensitivity.
        share: the probability that a record is sampled, above 0 and below 1.
        step: the distance between the discretized losses.

    Guarantees:
        The distribution equals that of `PLDAccountant(value_discretization_interval=step)`, bit by bit.
    """
    from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution, identity

    removed, added = (_pmf(noise_multiplier, share, step, added=added) for added in (False, True))
    one = PrivacyLossDistribution(removed, added).self_compose(count)
    return identity(value_discretization_interval=step).compose(one)


def _pmf(noise: float, share: float, step: float, *, added: bool) -> PLDPmf:
    """The discretized loss of one run, as an upper bound ("connect the dots")."""
    from dp_accounting.pld.pld_pmf import create_pmf_pessimistic_connect_dots_fixed_gap
    from dp_accounting.pld.privacy_loss_mechanism import AdjacencyType, GaussianPrivacyLoss

    loss = GaussianPrivacyLoss(
        noise, sampling_prob=share, adjacency_type=AdjacencyType.ADD if added else AdjacencyType.REMOVE
    )
    bounds = loss.connect_dots_bounds()
    low, high = math.floor(bounds.epsilon_lower / step), math.ceil(bounds.epsilon_upper / step)
    epsilons = np.arange(low, high + 1) * step
    limit = math.log1p(-share)
    inside = epsilons < -limit if added else epsilons > limit
    deltas = np.zeros(len(epsilons)) if added else np.asarray(-np.expm1(epsilons))
    at = _inverse(epsilons[inside], noise, share, added=added)
    deltas[inside] = loss.mu_upper_cdf(at) - np.exp(epsilons[inside] + loss.mu_lower_log_cdf(at))
    return create_pmf_pessimistic_connect_dots_fixed_gap(step, low, high, np.clip(deltas, 0, 1))


def _inverse(losses: _Numbers, noise: float, share: float, *, added: bool) -> _Numbers:
    """The largest outputs at which the privacy loss is at least `losses`."""
    sign, rate = (-1 if added else 1), 1 / share
    signed = sign * losses
    limit = math.log(1 - share)
    with np.errstate(divide="ignore", invalid="ignore"):  # invalid at the limit, whose value is replaced below
        scaled = signed + np.log(rate)
        unsampled = scaled + np.log1p(-np.exp(np.log(rate - 1) - scaled))
    unsampled[signed == 0] = np.log(rate + (1 - rate))
    unsampled[np.abs(signed - limit) <= _NEAR * np.maximum(np.abs(signed), abs(limit))] = -math.inf
    found: _Numbers = -0.5 - sign * unsampled * noise**2
    return 1 + found if added else found
