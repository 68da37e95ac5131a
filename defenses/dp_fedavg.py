"""DP-FedAvg: the clients clip, and the server adds the noise."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from scipy import optimize, special

from leakgauge.defenses._common.server_noise import FIXED, HONEST, ServerNoise
from leakgauge.harness.core import rng
from leakgauge.harness.core.accounting import epsilon, gaussian_steps
from leakgauge.harness.core.claim import Claim, Proof, Unit
from leakgauge.harness.core.contract import Links, Setting
from leakgauge.harness.core.distribution import Additive, MessageDistribution, Normal
from leakgauge.harness.core.gaussian import gaussian_mu
from leakgauge.harness.core.rng import Key
from leakgauge.harness.core.vec import Vector

_MOMENTS = 32  # number of moments of the privacy loss that the source's accountant evaluates


@dataclass(frozen=True)
class DPFedAvg(ServerNoise[None]):
    """DP-FedAvg: clients clip their update's l2 norm and add no noise; the server adds normal noise to the mean.

    The mean is (sum of the clipped updates + noise) / U, where U is the public number of participants of a round, even
    if fewer clients send. The mean is not weighted by numbers of samples: U and a client's share of the sum would then
    depend on the data.

    Args:
        clip: C, bound on the l2 norm of a client's update, in units of the update.
        epsilon: privacy budget of the whole run of `setting.rounds` rounds, for one client, at `delta`; sets the noise.
            Default 8 unless `noise_std` is given.
        delta: delta of the guarantee for the whole run.
        noise_std: standard deviation of the noise in a coordinate of the sum (C times the source's z), in units of the
            update; replaces `epsilon`. The mean has 1 / U of this noise.

    Guarantees:
        Messages have 4 * d bytes.
        decode(messages) - sum(clip(u)) / U is normal with standard deviation sigma / U in each coordinate.
        If all clients take part, adding or removing a client moves the sum by C: an exact Gaussian mechanism.
        If only some clients take part, the claim is that of the source, for clients that are drawn independently. Here
        exactly U of K clients are drawn: another client replaces a missing one, which moves the sum by 2C. A sampled
        Gaussian mechanism of that sensitivity gives the exact bound; it is attained if all other clients send -c and
        this client sends c.
        No guarantee holds against an adversary that sees messages.

    Raises:
        ValueError: a parameter is out of range, or both `epsilon` and `noise_std` are given; with the setting, if only
            some clients take part, epsilon is below ln(1 / delta) / 32, the smallest that the source's accountant can
            return.

    Source: McMahan et al. 2018, "Learning differentially private recurrent language models", Algorithm 1 with equal
        weights and the estimator of fixed denominator; Abadi et al. 2016, Thm 2 (moments accountant, 32 moments).
        Differs: a fixed number of clients per round; U instead of its expectation; if all clients take part, the exact
        trade-off instead of moments. Replacing a client's data, instead of removing the client, would also have
        sensitivity 2C.
    """

    def sigma(self, setting: Setting) -> float:
        """Standard deviation of the noise in each coordinate of the sum."""
        if self.noise_std is not None:
            return self.noise_std
        assert self.epsilon is not None  # __post_init__ sets one of the two
        if setting.share == 1:
            return self.clip * math.sqrt(setting.turns) / gaussian_mu(self.epsilon, self.delta)
        solved = _sampled_multiplier if setting.participation == "poisson" else _noise_multiplier
        return self.clip * solved(setting.share, setting.rounds, self.epsilon, self.delta)

    def average(self, updates: Sequence[Vector], links: Links, private: Key) -> Vector:
        """The sum of the clipped updates, plus noise from the server's key, divided by U."""
        total = self.sigma(links.setting) * rng.normal(private, (links.setting.dim,), torch.float64)
        for update in updates:
            total += update
        return (total / links.setting.participants).float()

    def aggregate_distribution(self, state: None, updates: Sequence[Vector], links: Links) -> MessageDistribution:
        """Normal noise of sigma / U around the sum of the projected updates, divided by U."""
        std = self.sigma(links.setting) / links.setting.participants
        return Additive(self.center(updates, links), Normal(), std)

    def claim(self, history: Sequence[None], setting: Setting) -> Claim:
        """(epsilon, delta) for one client over these rounds, against adversaries that see only models."""
        rounds, share, poisson = len(history), setting.share, setting.participation == "poisson"
        multiplier = self.sigma(setting) / self.clip
        assumes: tuple[str, ...] = (HONEST, *([] if poisson else [FIXED]))
        if share == 1:
            reason = "one client moves the sum by the clip, over a fixed denominator; rounds compose exactly."
            proved = Proof.gaussian(multiplier, rounds, Unit.CLIENT, reason)
            claimed, accountant = proved.epsilon(self.delta), "Balle & Wang 2018, Thm 8"
        else:
            proved = _poisson(multiplier, share, rounds) if poisson else _sampled(multiplier, setting, rounds)
            claimed = proved.epsilon(self.delta)
            accountant = "Zhu et al. 2022, Thm 11"
            if not poisson:
                claimed, accountant = (
                    _moments_epsilon(share, multiplier, rounds, self.delta),
                    "Abadi et al. 2016, Thm 2",
                )
            assumes += ("the adversary does not take part and does not know which clients take part",)
        return self.against_models(rounds, claimed, proved, f"McMahan et al. 2018, Algorithm 1; {accountant}", assumes)


def _sampled(multiplier: float, setting: Setting, rounds: int) -> Proof:
    """The proof for U of K clients that are drawn without replacement.

    Let R be U - 1 other clients that are drawn, and j one more. With the client, the sum is that of R and the client
    with probability U / K, else that of R and j. Without the client, it is always that of R and j. Given R and j, this
    is a sampled Gaussian whose means are at most 2C apart. Mixing over R and j adds no divergence.
    """
    share = setting.participants / setting.clients
    event = gaussian_steps(multiplier / 2, share, rounds)
    reason = (
        f"exactly {setting.participants} of {setting.clients} clients are drawn, not each independently: another "
        "client takes the place of a client that is left out, so the sum moves by two clips."
    )
    return Proof(event, Unit.CLIENT, "privacy loss distribution", reason)


def _poisson(multiplier: float, share: float, rounds: int) -> Proof:
    event = gaussian_steps(multiplier, share, rounds)
    reason = "each client is drawn by itself, and moves the sum by the clip: a sampled Gaussian mechanism."
    return Proof(event, Unit.CLIENT, "privacy loss distribution", reason)


@functools.lru_cache(maxsize=64)
def _sampled_multiplier(share: float, rounds: int, target: float, delta: float) -> float:
    """The least z, up to a thousandth, at which clients that are drawn by themselves have the epsilon `target`."""
    low, high = 0.05, 0.1
    while epsilon(gaussian_steps(high, share, rounds), delta) > target:
        low, high = high, 2 * high
    while high > 1.001 * low:
        middle = math.sqrt(low * high)
        above = epsilon(gaussian_steps(middle, share, rounds), delta) > target
        low, high = (middle, high) if above else (low, middle)
    return high


def _moments_epsilon(share: float, multiplier: float, rounds: int, delta: float) -> float:
    """Epsilon by the moments accountant, for clients that are drawn independently with probability `share` below 1.

    It is the minimum over l = 1..32 of (rounds a(l) + ln(1 / delta)) / l, with the l-th log moment of the privacy loss

        a(l) = ln sum over k of C(l+1, k) (1-q)^(l+1-k) q^k exp(k (k-1) / 2 z^2).

    Source: Abadi et al. 2016, Thm 2; Mironov et al. 2019, sec. 3.3, shows the sum and that this direction is larger.
    """
    moment = np.arange(1, _MOMENTS + 1)[:, None]
    k = np.arange(_MOMENTS + 2)
    log_binomial = special.gammaln(moment + 2) - special.gammaln(k + 1) - special.gammaln(moment + 2 - k)
    log_chance = (moment + 1 - k) * math.log1p(-share) + k * math.log(share)
    log_moments = special.logsumexp(log_binomial + log_chance + k * (k - 1) / 2 / multiplier / multiplier, axis=1)
    bounds = (rounds * log_moments.clip(min=0) - math.log(delta)) / moment[:, 0]
    return float(bounds.min())


@functools.lru_cache(maxsize=64)
def _noise_multiplier(share: float, rounds: int, target: float, delta: float) -> float:
    """The z at which the moments accountant returns the epsilon `target`."""
    low, high = 1.0, 1e6
    least = _moments_epsilon(share, high, rounds, delta)
    if target <= least:
        raise ValueError(
            f"expected epsilon > {least:.6g} at delta={delta}, got epsilon={target}; "
            f"the accountant uses only {_MOMENTS} moments"
        )
    while _moments_epsilon(share, low, rounds, delta) < target:
        low /= 2
    return float(optimize.brentq(lambda z: _moments_epsilon(share, z, rounds, delta) - target, low, high, xtol=1e-12))
