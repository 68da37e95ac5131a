"""Over-the-air aggregation in numbers: who sends how much signal and noise, and what the sum then tells.

All users send at once, aligned: the receiver gets c * (sum of gradients) + noise of all users + its own. A user's share
of power is alpha for the gradient and beta for noise; its received power is G = |h|^2 P.

Conventions that the paper leaves open: real baseband, so that a noise variance is that of one real channel use (a
receiver that takes the real part of complex noise of that variance has half of it, and epsilon up to sqrt(2) times as
large); P in units in which the receiver's noise has the variance that is given, hence 30 dB is 1000 at variance 1.

What is promised is promised against a receiver that sees the sum and nothing else, while the other users add their
noise. It is not local differential privacy: see `colluding_mu`. Another receiver, an eavesdropper, has other gains and
other noise, and is promised nothing.

Source: Seif, Tandon, Li 2020, "Wireless federated learning with local differential privacy".
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from leakgauge.defenses._common.budget import check_delta
from leakgauge.harness.core import rng
from leakgauge.harness.core.checks import positive
from leakgauge.harness.core.rng import Key

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Channel:
    """A multiple access channel that stays as it is over the run.

    Args:
        squared_gains: |h|^2, one a user, above zero.
        power: P of every user, a channel use. Unequal powers go into the gains: only |h|^2 P matters.
        noise_variance: of the receiver's noise, a real channel use; 0 is a receiver without noise.

    Raises:
        ValueError: a value out of range, or no users.
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
        """K."""
        return len(self.squared_gains)

    @property
    def received(self) -> Floats:
        """[K] G = |h|^2 P: what arrives of each user at full power."""
        return self.power * np.array(self.squared_gains)


@dataclass(frozen=True)
class Allocation:
    """Who sends what, where all users send at once.

    Attributes:
        lipschitz: L, the bound to which gradients are clipped.
        delta: at which `epsilon` is claimed.
        aligned_power: A = c^2 L^2, at which every user's largest gradient arrives.
        noise: [K] Z, the variance at which each user's own noise arrives.
        needed: Psi, what `noise` must sum to; negative where the receiver's noise is more than enough.
        feasible: whether A is the largest that the weakest user can reach; else it was lowered.
    """

    channel: Channel
    lipschitz: float
    delta: float
    aligned_power: float
    noise: tuple[float, ...]
    needed: float
    feasible: bool

    @property
    def alpha(self) -> tuple[float, ...]:
        """[K] share of each user's power for the gradient."""
        return tuple((self.aligned_power / self.channel.received).tolist())

    @property
    def beta(self) -> tuple[float, ...]:
        """[K] share of each user's power for noise."""
        return tuple((np.array(self.noise) / self.channel.received).tolist())

    @property
    def gain(self) -> float:
        """c: the factor at which gradients arrive."""
        return math.sqrt(self.aligned_power) / self.lipschitz

    @property
    def noise_variance(self) -> float:
        """Variance of all noise in the sum, a channel use."""
        return math.fsum(self.noise) + self.channel.noise_variance

    @property
    def gradient_variance(self) -> float:
        """sigma_z^2: variance of each coordinate of the mean gradient y / (K c), which is unbiased."""
        return self.noise_variance / (self.channel.users * self.gain) ** 2

    @property
    def mu(self) -> float:
        """Of the sum in one round, for the replacement of one user's data: T rounds are mu sqrt(T)."""
        return 2 * math.sqrt(self.aligned_power / self.noise_variance)

    @property
    def epsilon(self) -> float:
        """What the paper's Theorem 1 claims for one round and each user."""
        return claimed_epsilon(self.mu, self.delta)


def allocate(
    channel: Channel, epsilons: Sequence[float], delta: float, lipschitz: float, *, lower: bool = True
) -> Allocation:
    """Powers at which the sum tells the least epsilon that a user asks for, with the strongest signal.

    The noise goes to the users in the order of the power that the gradient leaves them, least first. Which of them add
    it changes nothing for the receiver; the order is the paper's.

    Args:
        epsilons: one a user; the smallest binds all.
        lower: lower A where the users' power does not suffice for the noise; otherwise refuse.

    Guarantees:
        `epsilon` of the allocation is the smallest of `epsilons`; below it where the receiver's noise is more than
        enough.
        alpha + beta <= 1, up to rounding.
        No larger aligned power has these two properties.

    Raises:
        ValueError: an argument out of range, or an infeasible channel and not `lower`.

    Source: Theorem 3. Differs: says what becomes of an infeasible channel, on which the paper is silent.
    """
    positive(lipschitz=lipschitz)
    ratio = min(_ratios(channel, epsilons, delta))
    received, own = channel.received, channel.noise_variance
    weakest = float(received.min())
    # here the users' power is used up by signal and noise
    largest = (math.fsum(received) + own) / (channel.users + 1 / ratio)
    if weakest > largest and not lower:
        raise ValueError(
            f"expected power for noise of variance {weakest / ratio - own:.6g} beside the gradients, "
            f"got {math.fsum(received - weakest):.6g}; lower the aligned power, or take a larger epsilon"
        )
    aligned = min(weakest, largest)
    needed = aligned / ratio - own
    return Allocation(
        channel=channel,
        lipschitz=lipschitz,
        delta=delta,
        aligned_power=aligned,
        noise=tuple(_fill(received - aligned, needed).tolist()),
        needed=needed,
        feasible=weakest <= largest,
    )


def colluding_mu(allocation: Allocation, user: int, *, receiver_noise: bool = True) -> float:
    """mu of one round for `user`, to a receiver that all other users tell their noise; infinite where none is left.

    Args:
        receiver_noise: False takes the receiver's noise away too. What is left is what the user's antenna sends, so
            that this also bounds every eavesdropper, with any gains and any number of antennas.

    Raises:
        ValueError: there is no such user.
    """
    if not 0 <= user < allocation.channel.users:
        raise ValueError(f"expected a user from 0 to {allocation.channel.users - 1}, got user={user}")
    left = allocation.noise[user] + (allocation.channel.noise_variance if receiver_noise else 0.0)
    return 2 * math.sqrt(allocation.aligned_power / left) if left > 0 else math.inf


@dataclass(frozen=True)
class Orthogonal:
    """Who sends what, where each user has channel uses of its own: K d a round, against d for the sum.

    Attributes:
        lipschitz: L, the bound to which gradients are clipped.
        delta: at which `epsilons` are claimed.
        alpha: [K] share of each user's power for the gradient.
        beta: [K] share of each user's power for noise.
    """

    channel: Channel
    lipschitz: float
    delta: float
    alpha: tuple[float, ...]
    beta: tuple[float, ...]

    @property
    def signal(self) -> Floats:
        """[K] the power at which each user's largest gradient arrives."""
        return self.channel.received * self.alpha

    @property
    def noise_variances(self) -> Floats:
        """[K] variance of all noise in each user's channel uses."""
        return self.channel.received * self.beta + self.channel.noise_variance

    @property
    def mus(self) -> Floats:
        """[K] of each user's message in one round."""
        return 2 * np.sqrt(self.signal / self.noise_variances)

    @property
    def epsilons(self) -> tuple[float, ...]:
        """[K] what (15) claims for one round of each user."""
        return tuple(claimed_epsilon(mu, self.delta) for mu in self.mus.tolist())

    @property
    def gradient_variance(self) -> float:
        """Variance of each coordinate of the mean of the decoded gradients."""
        return self.lipschitz**2 * math.fsum(self.noise_variances / self.signal) / self.channel.users**2


def orthogonal(channel: Channel, epsilons: Sequence[float], delta: float, lipschitz: float) -> Orthogonal:
    """Powers at which each user's message tells the epsilon that it asks for, with the strongest signal.

    Args:
        epsilons: one a user.

    Guarantees:
        (15) is a user's epsilon; below it where the receiver's noise is more than enough.
        alpha + beta <= 1, up to rounding, with equality where the user adds noise.

    Raises:
        ValueError: an argument out of range.

    Source: (15). Differs: the paper does not say how a user splits its power; noise is as little as epsilon allows.
    """
    positive(lipschitz=lipschitz)
    received, own = channel.received, channel.noise_variance
    wanted = 1 / np.array(_ratios(channel, epsilons, delta))
    alpha = np.minimum(1.0, (received + own) / (received * (1 + wanted)))
    beta = np.maximum(0.0, wanted * alpha - own / received)
    return Orthogonal(channel, lipschitz, delta, tuple(alpha.tolist()), tuple(beta.tolist()))


def claimed_epsilon(mu: float, delta: float) -> float:
    """mu sqrt(2 ln(1.25 / delta)), what the paper's Theorem 1 claims for one round.

    The classical bound, which was proved below epsilon = 1 and is false above 7.991 at delta = 1e-4.

    Raises:
        ValueError: mu is negative, or delta is outside (0, 1).
    """
    if not mu >= 0:
        raise ValueError(f"expected mu >= 0, got mu={mu}")
    return mu * math.sqrt(2 * _log(delta))


def claimed_mu(epsilon: float, delta: float) -> float:
    """The mu for which `claimed_epsilon` claims `epsilon`.

    Raises:
        ValueError: epsilon is negative, or delta is outside (0, 1).
    """
    if not epsilon >= 0:
        raise ValueError(f"expected epsilon >= 0, got epsilon={epsilon}")
    return epsilon / math.sqrt(2 * _log(delta))


class Composed(NamedTuple):
    """What is claimed for a whole run."""

    epsilon: float
    delta: float


def composed_claim(epsilon: float, delta: float, rounds: int, delta_prime: float) -> Composed:
    """What (16) claims for `rounds` rounds of (epsilon, delta); delta_prime is what it adds to the sum of the deltas.

    | case | claim |
    |---|---|
    | rounds = 1 | above epsilon, as the formula has it |
    | exp(epsilon) above the largest float64 | epsilon infinite |
    | deltas that sum to 1 or more | epsilon infinite, delta 1: nothing is promised |

    Raises:
        ValueError: an argument out of range.
    """
    positive(rounds=rounds)
    for name, value in (("delta", delta), ("delta_prime", delta_prime)):
        if not 0 < value < 1:
            raise ValueError(f"expected 0 < {name} < 1, got {name}={value}")
    if not epsilon >= 0:
        raise ValueError(f"expected epsilon >= 0, got epsilon={epsilon}")
    total = rounds * delta + delta_prime
    if total >= 1:
        return Composed(math.inf, 1.0)
    if epsilon > 709:  # exp overflows
        return Composed(math.inf, total)
    spread = math.sqrt(2 * rounds * -math.log(delta_prime)) * epsilon
    return Composed(spread + rounds * epsilon * math.expm1(epsilon), total)


def rayleigh_gains(key: Key, users: int) -> tuple[float, ...]:
    """|h|^2 of `users` independent h ~ CN(0, 1): exponential of mean 1. One draw of the key.

    Raises:
        ValueError: users is below 1.
    """
    positive(users=users)
    parts = rng.normal(key, (users, 2), torch.float64)
    return tuple((parts.square().sum(1) / 2).tolist())


def _ratios(channel: Channel, epsilons: Sequence[float], delta: float) -> list[float]:
    """Of each epsilon, the most signal power a noise variance for which it is claimed: eps^2 / (8 ln(1.25 / delta))."""
    if len(epsilons) != channel.users:
        raise ValueError(f"expected one epsilon a user, got {len(epsilons)} for {channel.users} users")
    for epsilon in epsilons:
        positive(epsilon=epsilon)
    return [(claimed_mu(epsilon, delta) / 2) ** 2 for epsilon in epsilons]


def _fill(room: Floats, total: float) -> Floats:
    """`total`, given out in order of increasing room until it is gone: none if negative, at most all room."""
    order = np.argsort(room, kind="stable")
    ordered = room[order]
    filled = np.empty_like(room)
    filled[order] = np.clip(total - (np.cumsum(ordered) - ordered), 0.0, ordered)
    return filled


def _log(delta: float) -> float:
    """ln(1.25 / delta)."""
    check_delta(delta)
    return math.log(1.25 / delta)
