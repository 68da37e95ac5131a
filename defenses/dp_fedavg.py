"""DP-FedAvg: clients clip, the server adds the noise."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from scipy import optimize, special
from torch import Tensor

from leakgauge.defenses._common.budget import check_delta, epsilon_unless
from leakgauge.defenses._common.clip import clip_l2
from leakgauge.defenses._common.misfit import ROUNDING
from leakgauge.harness.core import rng
from leakgauge.harness.core.accounting import epsilon, gaussian_mu, repeat
from leakgauge.harness.core.checks import check_update, positive
from leakgauge.harness.core.claim import Claim, Horizon, Proof, Relation, Unit
from leakgauge.harness.core.codec import pack_float32, unpack_float32
from leakgauge.harness.core.contract import (
    Defense,
    Likelihood,
    Link,
    Links,
    Setting,
)
from leakgauge.harness.core.rng import Key
from leakgauge.harness.core.threats import Threat
from leakgauge.harness.core.vec import Vector

_MOMENTS = 32
"""Moments of the privacy loss that the source's accountant looks at."""

_MODELS = frozenset({Threat.PARTICIPANT, Threat.PUBLIC})
"""Who sees models and no message."""


@dataclass(frozen=True)
class DPFedAvg(Defense[None, None]):
    """DP-FedAvg: clients clip their update's l2 norm and send it as it is; the server adds normal noise to the mean.

    The mean is (sum of the clipped updates + noise) / U, U the public number of participants of a round, whoever sends.
    Not weighted by numbers of samples: U and one client's share of the sum would depend on the data.

    Args:
        clip: C, bound on the l2 norm of a client's update, in units of the update.
        epsilon: of the whole run of `setting.rounds` rounds, for one client, at `delta`; sets the noise. Default 8
            unless `noise_std` is given.
        delta: of the whole run.
        noise_std: standard deviation of the noise a coordinate of the sum (C times the source's z), in units of the
            update; instead of `epsilon`. The mean has 1 / U of it.

    Guarantees:
        4 * d bytes.
        decode(messages) - sum(clip(u)) / U is normal with standard deviation sigma / U in each coordinate.
        Where all clients take part, one client more or less moves the sum by C: exactly Gaussian.
        Where some do, what is claimed is the source's, for clients who are each drawn independently. Here U of K are
        drawn: without a client another one takes its place, which moves the sum by 2C. What holds, exactly, is a
        sampled Gaussian of that sensitivity: every other client sends -c, this one c.
        Nothing holds against who sees messages.

    Raises:
        ValueError: a parameter out of range, or both `epsilon` and `noise_std`; with the setting, where some clients
            take part, an epsilon below ln(1 / delta) / 32, the least that the source's accountant can tell.

    Source: McMahan et al. 2018, "Learning differentially private recurrent language models", Algorithm 1 with equal
        weights and the estimator of fixed denominator; Abadi et al. 2016, Thm 2 (moments accountant, 32 moments).
        Differs: a fixed number of clients a round; U instead of its expectation; where all take part, the exact trade-
        off instead of moments. Replacing a client's data, instead of taking it away, would be 2C as well.
    """

    randomized = False
    promises = Horizon.WHOLE_RUN

    clip: float = 1.0
    epsilon: float | None = None
    delta: float = 1e-5
    noise_std: float | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "epsilon", epsilon_unless(self.epsilon, self.noise_std))
        positive(clip=self.clip)
        check_delta(self.delta)

    def sigma(self, setting: Setting) -> float:
        """Standard deviation of the noise in each coordinate of the sum."""
        if self.noise_std is not None:
            return self.noise_std
        assert self.epsilon is not None  # __post_init__ leaves one of the two
        if setting.participants == setting.clients:
            return self.clip * math.sqrt(setting.rounds) / gaussian_mu(self.epsilon, self.delta)
        share = setting.participants / setting.clients
        return self.clip * _noise_multiplier(share, setting.rounds, self.epsilon, self.delta)

    def encode(self, state: None, memory: None, update: Vector, link: Link, private: Key) -> tuple[bytes, None]:
        """Clip, send float32. Uses neither key."""
        check_update(update)
        return pack_float32(clip_l2(update, self.clip)), None

    def estimate(self, state: None, received: bytes, link: Link) -> Vector:
        """The clipped update, exactly."""
        return unpack_float32(received, link.setting.dim)

    def decode(self, state: None, received: Sequence[bytes], links: Links, private: Key) -> Vector:
        """The sum of the clipped updates with noise from the server's key, over U."""
        total = self.sigma(links.setting) * rng.normal(private, (links.setting.dim,), torch.float64)
        for wire in received:
            total += unpack_float32(wire, links.setting.dim)
        return (total / links.setting.participants).float()

    def likelihood(self, state: None, received: Sequence[bytes], links: Links) -> Likelihood:
        """Squared distance of the clipped candidate in units of `ROUNDING`: messages have no noise."""
        sent = torch.stack([unpack_float32(wire, links.setting.dim) for wire in received])

        def score(update: Tensor) -> Tensor:
            return 0.5 * ((clip_l2(update, self.clip) - sent) / ROUNDING).square().sum(-1)

        return score

    def claim(self, history: Sequence[None], setting: Setting) -> Claim:
        """(epsilon, delta) for one client over these rounds, against who sees models only."""
        rounds, share = len(history), setting.participants / setting.clients
        multiplier = self.sigma(setting) / self.clip
        proved = _sampled(multiplier, setting, rounds) if share < 1 else _unsampled(multiplier, rounds)
        return Claim(
            epsilon=(
                _moments_epsilon(share, multiplier, rounds, self.delta)
                if share < 1
                else epsilon(proved.event, self.delta)
            ),
            delta=self.delta,
            unit=Unit.CLIENT,
            relation=Relation.ADD_REMOVE,
            horizon=Horizon.of(rounds),
            against=_MODELS,
            source="McMahan et al. 2018, Algorithm 1"
            + ("; Abadi et al. 2016, Thm 2" if share < 1 else "; Balle & Wang 2018, Thm 8"),
            assumes=(
                "the server is honest and tells nobody the messages",
                "the number of participants is fixed beforehand and public",
                *(("the adversary does not know who takes part, nor does so itself",) if share < 1 else ()),
            ),
            proved=proved,
            further=(
                Proof(
                    None,
                    Unit.CLIENT,
                    "by definition",
                    "messages are clipped and sent without noise.",
                    against=frozenset(Threat) - _MODELS,
                ),
            ),
        )


def _unsampled(multiplier: float, rounds: int) -> Proof:
    """What holds where all clients take part in every round."""
    from dp_accounting import GaussianDpEvent

    return Proof(
        repeat(GaussianDpEvent(multiplier), rounds),
        Unit.CLIENT,
        "analytic Gaussian",
        "one client moves the sum by the clip, over a fixed denominator; rounds compose exactly.",
    )


def _sampled(multiplier: float, setting: Setting, rounds: int) -> Proof:
    """What holds where U of K clients are drawn without replacement.

    Draw U - 1 of the others, R, and one more of them, j. With the client, the sum is that of R and the client with
    chance U / K, else that of R and j; without it, always the latter. Given R and j this is a sampled Gaussian whose
    means are at most 2C apart, and mixing over R and j adds no divergence.
    """
    from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent

    share = setting.participants / setting.clients
    return Proof(
        repeat(PoissonSampledDpEvent(share, GaussianDpEvent(multiplier / 2)), rounds),
        Unit.CLIENT,
        "privacy loss distribution",
        f"{setting.participants} of {setting.clients} clients are drawn, not each of them independently: "
        "another one takes the place of one that is left out, and the sum moves by two clips.",
    )


def _moments_epsilon(share: float, multiplier: float, rounds: int, delta: float) -> float:
    """Epsilon by the moments accountant, for clients that are each drawn independently with chance `share` below 1.

    min over l = 1..32 of (rounds a(l) + ln(1 / delta)) / l, with the l-th log moment of the privacy loss

        a(l) = ln sum over k of C(l+1, k) (1-q)^(l+1-k) q^k exp(k (k-1) / 2 z^2).

    Source: Abadi et al. 2016, Thm 2; Mironov et al. 2019, sec. 3.3, for the sum and that this direction is the larger.
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
    """The z at which the moments accountant tells this epsilon.

    Raises:
        ValueError: no noise is enough; the message says from which epsilon on some is.
    """
    low, high = 1.0, 1e6
    least = _moments_epsilon(share, high, rounds, delta)
    if target <= least:
        raise ValueError(f"expected epsilon > {least:.6g} at delta={delta}, got epsilon={target}: {_MOMENTS} moments")
    while _moments_epsilon(share, low, rounds, delta) < target:
        low /= 2
    return float(optimize.brentq(lambda z: _moments_epsilon(share, z, rounds, delta) - target, low, high, xtol=1e-12))
