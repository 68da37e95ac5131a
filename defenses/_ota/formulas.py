"""Formulas of over-the-air aggregation: each user's powers of signal and noise, and the privacy of the sum.

All users send simultaneously and aligned: the receiver gets c * (sum of gradients) + noise of all users + its own
noise. A user's share of power is alpha for the gradient and beta for noise; its received power is G = |h|^2 P.

The paper leaves two conventions open. Here the baseband is real, so a noise variance is that of one real channel use
(the real part of complex noise of the same variance has half the variance, and epsilon is up to sqrt(2) times as
large). P is in units of the receiver's noise variance, so 30 dB is 1000 at variance 1.

The claim is against a receiver that sees only the sum, while the other users add their noise. The claim is not local
differential privacy: see `colluding_mu`. It does not cover an eavesdropper, whose receiver has other gains and noise.

Source: Seif, Tandon, Li 2020, "Wireless federated learning with local differential privacy".
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from leakgauge.defenses._common.clip import check_delta
from leakgauge.harness.core import rng
from leakgauge.harness.core.checks import positive
from leakgauge.harness.core.gaussian import check_nonnegative
from leakgauge.harness.core.rng import Key
from leakgauge.harness.core.stats import Numbers


@dataclass(frozen=True)
class Channel:
    """A multiple access channel, constant over the run.

    Args:
        squared_gains: |h|^2 of each user, above zero.
        power: P, power of each user per channel use. Only |h|^2 P matters, so gains can absorb unequal powers.
        noise_variance: variance of the receiver's noise per real channel use; 0: no receiver noise.

    Raises:
        ValueError: a value is out of range, or there are no users.
    """

    squared_gains: tuple[float, ...]
    power: float
    noise_variance: float

    def __post_init__(self) -> None:
        positive(power=self.power, users=len(self.squared_gains))
        if not all(0 < gain < math.inf for gain in self.squared_gains):
            raise ValueError(f"expected squared gains > 0, got {self.squared_gains}")
        if not 0 <= self.noise_variance < math.inf:
            raise ValueError(f"expected noise_variance >= 0, got noise_variance={self.noise_variance}")

    @property
    def users(self) -> int:
        """K, the number of users."""
        return len(self.squared_gains)

    @functools.cached_property
    def received(self) -> Numbers:
        """[K] G = |h|^2 P: the received power of each user at full power."""
        return self.power * np.array(self.squared_gains)


@dataclass(frozen=True)
class Allocation:
    """The powers of users that send simultaneously.

    Attributes:
        lipschitz: L, the bound to which gradients are clipped.
        delta: the delta at which `epsilon` is claimed.
        aligned_power: A = c^2 L^2, the received power of every user's largest gradient.
        noise: [K] Z, the received variance of each user's own noise.
    """

    channel: Channel
    lipschitz: float
    delta: float
    aligned_power: float
    noise: tuple[float, ...]

    @functools.cached_property
    def alpha(self) -> tuple[float, ...]:
        """[K] share of each user's power for the gradient."""
        return tuple((self.aligned_power / self.channel.received).tolist())

    @functools.cached_property
    def beta(self) -> tuple[float, ...]:
        """[K] share of each user's power for noise."""
        return tuple((np.array(self.noise) / self.channel.received).tolist())

    @functools.cached_property
    def gain(self) -> float:
        """c, the factor of the gradients in the sum."""
        return math.sqrt(self.aligned_power) / self.lipschitz

    @functools.cached_property
    def noise_variance(self) -> float:
        """Variance of all noise in the sum, per channel use."""
        return math.fsum(self.noise) + self.channel.noise_variance

    @property
    def gradient_variance(self) -> float:
        """sigma_z^2, the variance of each coordinate of the unbiased mean gradient y / (K c)."""
        return self.noise_variance / (self.channel.users * self.gain) ** 2

    @property
    def mu(self) -> float:
        """mu of the sum in one round if one user's data is replaced; T rounds have mu sqrt(T)."""
        return 2 * math.sqrt(self.aligned_power / self.noise_variance)

    @property
    def epsilon(self) -> float:
        """The claim of the paper's Theorem 1 for one round and each user."""
        return claimed_epsilon(self.mu, self.delta)


def allocate(
    channel: Channel, epsilons: Sequence[float], delta: float, lipschitz: float, *, lower: bool = True
) -> Allocation:
    """The powers with the strongest signal at which the sum attains the smallest epsilon of all users.

    Users add noise in the order of the power that the gradient leaves them, least first. This is the paper's order; it
    has no effect on the receiver.

    Args:
        epsilons: epsilon of each user; the smallest binds all users.
        lower: whether to lower A if the users' power does not suffice for the noise; otherwise raise an error.

    Guarantees:
        `epsilon` of the allocation is the smallest of `epsilons`, or less where the receiver's noise exceeds the need.
        alpha + beta <= 1, up to rounding.
        No larger aligned power has these two properties.

    Raises:
        ValueError: an argument is out of range, or the channel is infeasible and `lower` is False.

    Source: Theorem 3. Differs: defines the result for an infeasible channel, which the paper leaves open.
    """
    positive(lipschitz=lipschitz)
    ratio = min(_ratios(channel, epsilons, delta))
    received, own = channel.received, channel.noise_variance
    weakest = float(received.min())
    # at this aligned power, signal and noise use all of the users' power
    largest = (math.fsum(received) + own) / (channel.users + 1 / ratio)
    if weakest > largest and not lower:
        raise ValueError(
            f"expected power for noise of variance {weakest / ratio - own:.6g} in addition to the gradients, "
            f"got {math.fsum(received - weakest):.6g}; lower the aligned power or increase epsilon"
        )
    aligned = min(weakest, largest)
    noise = _fill(received - aligned, aligned / ratio - own)
    return Allocation(channel, lipschitz, delta, aligned, tuple(noise.tolist()))


def colluding_mu(allocation: Allocation, user: int, *, receiver_noise: bool = True) -> float:
    """mu of one round for `user` against a receiver that knows all other users' noise; infinite if no noise is left.

    Args:
        receiver_noise: False also removes the receiver's noise and leaves the signal of the user's antenna. This bounds
            every eavesdropper, with any gains and any number of antennas.

    Raises:
        ValueError: `user` does not exist.
    """
    if not 0 <= user < allocation.channel.users:
        raise ValueError(f"expected a user from 0 to {allocation.channel.users - 1}, got user={user}")
    left = allocation.noise[user] + (allocation.channel.noise_variance if receiver_noise else 0.0)
    return 2 * math.sqrt(allocation.aligned_power / left) if left > 0 else math.inf


@dataclass(frozen=True)
class Orthogonal:
    """The powers of users with separate channel uses: K d per round, compared with d for the sum.

    Attributes:
        lipschitz: L, the bound to which gradients are clipped.
        delta: the delta at which `epsilons` are claimed.
        alpha: [K] share of each user's power for the gradient.
        beta: [K] share of each user's power for noise.
    """

    channel: Channel
    lipschitz: float
    delta: float
    alpha: tuple[float, ...]
    beta: tuple[float, ...]

    @property
    def signal(self) -> Numbers:
        """[K] received power of each user's largest gradient."""
        return self.channel.received * self.alpha

    @property
    def noise_variances(self) -> Numbers:
        """[K] variance of all noise in each user's channel uses."""
        return self.channel.received * self.beta + self.channel.noise_variance

    @property
    def mus(self) -> Numbers:
        """[K] mu of each user's message in one round."""
        return 2 * np.sqrt(self.signal / self.noise_variances)

    @property
    def epsilons(self) -> tuple[float, ...]:
        """[K] each user's epsilon for one round, as claimed by (15)."""
        return tuple(claimed_epsilon(mu, self.delta) for mu in self.mus.tolist())

    @property
    def gradient_variance(self) -> float:
        """Variance of each coordinate of the mean of the decoded gradients."""
        return self.lipschitz**2 * math.fsum(self.noise_variances / self.signal) / self.channel.users**2


def orthogonal(channel: Channel, epsilons: Sequence[float], delta: float, lipschitz: float) -> Orthogonal:
    """The powers with the strongest signal at which each user's message attains that user's epsilon.

    Args:
        epsilons: epsilon of each user.

    Guarantees:
        (15) gives a user's epsilon, or less where the receiver's noise exceeds the need.
        alpha + beta <= 1, up to rounding, with equality where the user adds noise.

    Raises:
        ValueError: an argument is out of range.

    Source: (15). Differs: splits a user's power, which the paper does not: the noise is the least that epsilon allows.
    """
    positive(lipschitz=lipschitz)
    received, own = channel.received, channel.noise_variance
    noise_over_signal = 1 / np.array(_ratios(channel, epsilons, delta))
    alpha = np.minimum(1.0, (received + own) / (received * (1 + noise_over_signal)))
    beta = np.maximum(0.0, noise_over_signal * alpha - own / received)
    return Orthogonal(channel, lipschitz, delta, tuple(alpha.tolist()), tuple(beta.tolist()))


def claimed_epsilon(mu: float, delta: float) -> float:
    """mu sqrt(2 ln(1.25 / delta)), the claim of the paper's Theorem 1 for one round.

    This is the classical bound, proved below epsilon = 1 and false above 7.991 at delta = 1e-4.

    Raises:
        ValueError: mu is negative, or delta is outside (0, 1).
    """
    check_nonnegative(mu=mu)
    return mu * math.sqrt(2 * _log(delta))


def claimed_mu(epsilon: float, delta: float) -> float:
    """The mu for which `claimed_epsilon` claims `epsilon`.

    Raises:
        ValueError: epsilon is negative, or delta is outside (0, 1).
    """
    check_nonnegative(epsilon=epsilon)
    return epsilon / math.sqrt(2 * _log(delta))


class Composed(NamedTuple):
    """The (epsilon, delta) claimed for a whole run."""

    epsilon: float
    delta: float


def composed_claim(epsilon: float, delta: float, rounds: int, delta_prime: float) -> Composed:
    """The claim of (16) for `rounds` rounds of (epsilon, delta), which adds delta_prime to the sum of the deltas.

    | case | claim |
    |---|---|
    | rounds = 1 | above epsilon, as the formula has it |
    | exp(epsilon) above the largest float64 | epsilon infinite |
    | deltas that sum to 1 or more | epsilon infinite, delta 1: no claim |

    Raises:
        ValueError: an argument is out of range.
    """
    positive(rounds=rounds)
    for name, value in (("delta", delta), ("delta_prime", delta_prime)):
        if not 0 < value < 1:
            raise ValueError(f"expected 0 < {name} < 1, got {name}={value}")
    check_nonnegative(epsilon=epsilon)
    total = rounds * delta + delta_prime
    if total >= 1:
        return Composed(math.inf, 1.0)
    if epsilon > 709:  # exp overflows
        return Composed(math.inf, total)
    spread = math.sqrt(2 * rounds * -math.log(delta_prime)) * epsilon
    return Composed(spread + rounds * epsilon * math.expm1(epsilon), total)


def fixed_noise(
    users: int, rounds: int, beta: float, power: float, delta: float, channel_seed: int = 0
) -> dict[str, float]:
    """The claims of (14) and (16) if all users spend the share `beta` of their power on noise, at Rayleigh gains.

    The signal is that of the weakest user with the rest of its power; the receiver noise is 1; delta_prime is delta.

    Returns:
        `round_epsilon` of one round; `total_epsilon` and `total_delta` of all.
    """
    gains = np.array(rayleigh_gains(Key(channel_seed).child("gains"), users))
    aligned, noise = (1 - beta) * power * gains.min(), beta * power * gains.sum() + 1.0
    each = claimed_epsilon(2 * math.sqrt(aligned / noise), delta)
    total = composed_claim(each, delta, rounds, delta)
    return {"round_epsilon": each, "total_epsilon": total.epsilon, "total_delta": total.delta}


def noise_powers(gains: str, power: float, epsilon: float, delta: float) -> dict[str, float | list[float]]:
    """Theorem 3 for comma-separated squared gains: the users' noise, its sum, the needed sum, and the claim."""
    squared = tuple(float(gain) for gain in gains.split(","))
    powers = allocate(Channel(squared, power, 1.0), (epsilon,) * len(squared), delta, 1.0)
    needed = max(0.0, powers.aligned_power / (claimed_mu(epsilon, delta) / 2) ** 2 - 1.0)
    return {
        "noise": list(powers.noise),
        "sum": math.fsum(powers.noise),
        "needed": needed,
        "claimed": powers.epsilon,
    }


def convergence_bound(
    users: int,
    rounds: int,
    power: float,
    epsilon: float,
    delta: float,
    dim: int = 30,
    smooth: float = 2.0,
    convex: float = 1e-3,
) -> float:
    """Bound (17) on the excess loss, with L = 1 and gains of 1: 2 mu / (lambda^2 T) (L^2 + d sigma_z^2)."""
    allocation = allocate(Channel((1.0,) * users, power, 1.0), (epsilon,) * users, delta, 1.0)
    return 2 * smooth / (convex**2 * rounds) * (1 + dim * allocation.gradient_variance)


FORMULAS = {"fixed_noise": fixed_noise, "noise_powers": noise_powers, "convergence_bound": convergence_bound}
"""Formulas of the paper that recipes draw."""


def rayleigh_gains(key: Key, users: int) -> tuple[float, ...]:
    """|h|^2 of `users` independent h ~ CN(0, 1): exponential with mean 1. Draws once from the key.

    Raises:
        ValueError: users is below 1.
    """
    positive(users=users)
    parts = rng.normal(key, (users, 2), torch.float64)
    return tuple((parts.square().sum(1) / 2).tolist())


def _ratios(channel: Channel, epsilons: Sequence[float], delta: float) -> list[float]:
    """The largest ratio of signal power to noise variance for each epsilon: eps^2 / (8 ln(1.25 / delta))."""
    if len(epsilons) != channel.users:
        raise ValueError(f"expected one epsilon per user, got {len(epsilons)} for {channel.users} users")
    for epsilon in epsilons:
        positive(epsilon=epsilon)
    return [(claimed_mu(epsilon, delta) / 2) ** 2 for epsilon in epsilons]


def _fill(room: Numbers, total: float) -> Numbers:
    """`total` distributed in order of increasing room: nothing if `total` is negative, at most all room."""
    order = np.argsort(room, kind="stable")
    ordered = room[order]
    filled = np.empty_like(room)
    filled[order] = np.clip(total - (np.cumsum(ordered) - ordered), 0.0, ordered)
    return filled


def _log(delta: float) -> float:
    check_delta(delta)
    return math.log(1.25 / delta)
