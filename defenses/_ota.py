"""Over-the-air aggregation: powers of signal and noise, the privacy of the sum, and the base of both defenses.

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
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, NamedTuple, TypeVar

import numpy as np
import torch

from leakgauge.defenses._common.clip import check_delta, clip_l2
from leakgauge.harness.core import rng
from leakgauge.harness.core.checks import check_update, positive
from leakgauge.harness.core.claim import Claim, Proof, Unit, claim_over
from leakgauge.harness.core.codec import pack_float64
from leakgauge.harness.core.contract import Defense, Link, Sender, Setting
from leakgauge.harness.core.distribution import (
    DistributionError,
    Integers,
    MessageDistribution,
    Normal,
    PairLoss,
    Reading,
    carried,
    expect_size,
    moved_by,
)
from leakgauge.harness.core.gaussian import check_nonnegative
from leakgauge.harness.core.rng import Key, integers, uniform
from leakgauge.harness.core.stats import Numbers
from leakgauge.harness.core.threats import Threat
from leakgauge.harness.core.vec import Vector


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
    """The claims of (13), (15) and (16) if all users spend the share `beta` of their power on noise, at Rayleigh gains.

    The signal is that of the weakest user with the rest of its power; the receiver noise is 1; delta_prime is delta.

    Returns:
        `round_epsilon` of one round; `total_epsilon` and `total_delta` of all; `orthogonal_epsilon` of one round in
        which each user has a slot and spends the rest of its own power on its gradient, the mean over the users.
    """
    gains = np.array(rayleigh_gains(Key(channel_seed).child("gains"), users))
    aligned, noise = (1 - beta) * power * gains.min(), beta * power * gains.sum() + 1.0
    each = claimed_epsilon(2 * math.sqrt(aligned / noise), delta)
    total = composed_claim(each, delta, rounds, delta)
    mus = 2 * np.sqrt((1 - beta) * power * gains / (beta * power * gains + 1.0))
    alone = {"orthogonal_epsilon": claimed_epsilon(float(mus.mean()), delta)}
    return {"round_epsilon": each, "total_epsilon": total.epsilon, "total_delta": total.delta} | alone


def noise_powers(gains: str, power: float, epsilon: float, delta: float) -> dict[str, float | list[float]]:
    """Theorem 3 for comma-separated squared gains: the users' noise, its sum, the needed sum, and the claim."""
    squared = tuple(float(gain) for gain in gains.split(","))
    powers = allocate(Channel(squared, power, 1.0), (epsilon,) * len(squared), delta, 1.0)
    needed = max(0.0, powers.aligned_power / (claimed_mu(epsilon, delta) / 2) ** 2 - 1.0)
    return {"noise": list(powers.noise), "sum": math.fsum(powers.noise), "needed": needed, "claimed": powers.epsilon}


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


def gradient_variance(users: int, power: float, epsilon: float, delta: float, channel_seed: int) -> float:
    """Variance of a coordinate of the decoded gradient by Theorem 3, with L = 1, at the Rayleigh gains of `ota`."""
    channel = Channel(rayleigh_gains(Key(channel_seed).child("gains"), users), power, 1.0)
    return allocate(channel, (epsilon,) * users, delta, 1.0).gradient_variance


FORMULAS = {
    "fixed_noise": fixed_noise,
    "noise_powers": noise_powers,
    "convergence_bound": convergence_bound,
    "gradient_variance": gradient_variance,
}
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


P = TypeVar("P", Allocation, Orthogonal)
Fading = Literal["rayleigh", "equal"]
"""Distribution of the squared gains: exponential with mean 1, or all 1."""

# Relative difference between a waveform without noise and its definition that float64 rounding explains
_ROUNDING = 1e-13


@dataclass(frozen=True)
class OverTheAir(Defense[P, None]):
    """Sends clipped updates as waveforms with each client's own noise, over public and constant gains.

    The public state holds the powers and is the same in every round. The noise in a client's waveform depends only on
    the client's private key.
    """

    analog: ClassVar[bool] = True
    source: ClassVar[str]
    """The source of the claim for one round."""

    clip: float = 1.0
    epsilon: float = 1.2
    delta: float = 1e-4
    power: float = 1000.0
    noise_variance: float = 1.0
    fading: Fading = "rayleigh"
    gains: str = ""
    channel_seed: int = 0

    def __post_init__(self) -> None:
        positive(clip=self.clip, epsilon=self.epsilon)
        claimed_mu(self.epsilon, self.delta)
        Channel(_read_gains(self.gains) or (1.0,), self.power, self.noise_variance)
        if self.fading not in ("rayleigh", "equal"):
            raise ValueError(f"expected fading rayleigh or equal, got {self.fading!r}")

    def make_channel(self, setting: Setting) -> Channel:
        """The channel from all clients to the server.

        Raises:
            ValueError: `gains` is for another number of clients.
        """
        squared = _read_gains(self.gains)
        if not squared and self.fading == "rayleigh":
            squared = rayleigh_gains(Key(self.channel_seed).child("gains"), setting.clients)
        squared = squared or (1.0,) * setting.clients
        if len(squared) != setting.clients:
            raise ValueError(f"expected one gain per client, got {len(squared)} for {setting.clients} clients")
        return Channel(squared, self.power, self.noise_variance)

    def encode(self, state: P, memory: None, update: Vector, link: Link, private: Key) -> tuple[bytes, None]:
        """The waveform sqrt(alpha P) clip(u) / L + sqrt(beta P) n, with its phase compensated.

        n comes from the private key. The shared key is unused.
        """
        check_update(update)
        user = user_of(link.sender, link.setting)
        noise = rng.normal(private, (update.numel(),), torch.float64)
        signal = clip_l2(update.detach().cpu().double(), self.clip) / self.clip
        sent = math.sqrt(state.alpha[user] * self.power) * signal + math.sqrt(state.beta[user] * self.power) * noise
        return pack_float64(sent), None

    def low_noise_variant(self) -> OverTheAir[P]:
        """The same with an epsilon that needs no client noise, and receiver noise of 0.001 of a full-power signal."""
        return replace(self, epsilon=1e6, noise_variance=1e-6 * self.power)

    def claim_rounds(self, epsilon: float, rounds: int, *, assumes: tuple[str, ...], proofs: Sequence[Proof]) -> Claim:
        """The claim of `epsilon` per round, by (16) for several rounds; no claim if the deltas of (16) reach 1.

        Args:
            proofs: bounds for these rounds; the first bound is against the adversaries of the claim.
        """
        claimed, delta, source = epsilon, self.delta, self.source
        if rounds > 1:
            claimed, total = composed_claim(epsilon, self.delta, rounds, self.delta)
            delta, source = total if total < 1 else delta, f"{source}, composed by (16)"
        proved, against, further = proofs[0], proofs[0].against, tuple(proofs[1:])
        return claim_over(
            rounds, claimed, proved, source=source, delta=delta, against=against, assumes=assumes, further=further
        )


def user_of(sender: Sender, setting: Setting) -> int:
    """The client whose gain and power a sender has, because a probe may have more victims than there are clients."""
    return sender.number % setting.clients


def exact(mu: float, rounds: int, against: frozenset[Threat], reason: str, *, tight: bool = True) -> Proof:
    """The bound for rounds of N(0, 1) against N(mu, 1), for any two updates; no bound where mu is infinite."""
    if math.isinf(mu):
        return Proof(None, Unit.CLIENT, "analytic Gaussian", reason, tight, against)
    return Proof.gaussian(1 / mu, rounds, Unit.CLIENT, reason, tight=tight, against=against)


def _read_gains(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(gain) for gain in text.split(",")) if text else ()
    except ValueError as error:
        raise ValueError(f"expected comma-separated squared gains, got gains={text!r}") from error


@dataclass(frozen=True, eq=False)
class Waveform(MessageDistribution):
    """Float64 numbers: `center` [k] plus normal noise of standard deviation `spread`.

    A client that relies on the others' noise may send no noise of its own; its numbers are then compared with the
    center. The reading then holds the auditor's own random numbers, because nothing random is left to test.
    """

    center: Numbers
    spread: float

    @property
    def noiseless(self) -> bool:  # type: ignore[override]  # a constant of other distributions
        return self.spread == 0

    @property
    def distinct(self) -> bool:
        """Whether it has noise: a float64 number does not repeat."""
        return self.spread > 0

    def loss(self, other: MessageDistribution, among: Integers | None = None) -> PairLoss | None:
        """That of normal noise at the distance of the centers; unknown if the noise differs."""
        if not isinstance(other, Waveform) or self.spread != other.spread:
            return None
        return moved_by(Normal(), carried(self.center - other.center, None, among), self.spread)

    def read(self, wire: bytes, own: Key) -> Reading:
        """Reads a waveform by the normal cdf."""
        count = len(self.center)
        expect_size(wire, 8 * count)
        sent, places = np.frombuffer(wire, "<f8"), np.arange(count)
        if self.spread > 0:
            # the terms of a float64 sum are no finer than the sum, so its last bits are not fair coins
            grid = np.exp2(np.ceil(np.log2(np.abs(self.center) + 16 * self.spread)) - 48)
            bits = np.rint(sent / grid).astype(np.int64) & 1
            lowest = (np.frombuffer(wire, "<u8") & 1).astype(np.int64)
            return Reading(Normal().uniforms((sent - self.center) / self.spread), places, bits, lowest)
        # not `>`, because a NaN would pass
        if not (np.abs(sent - self.center) <= _ROUNDING * np.abs(self.center)).all():
            raise DistributionError("a waveform without noise is not the projected update at its amplitude")
        drawn = uniform(own.child("noise"), (count,), dtype=torch.float64).numpy()
        coins = integers(own.child("bits"), count, 2)
        return Reading(drawn, places, coins, coins)
