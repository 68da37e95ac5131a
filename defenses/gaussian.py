"""The Gaussian mechanism on each client's message."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from leakgauge.defenses._common.budget import check_delta, epsilon_unless
from leakgauge.defenses._common.cascade import Perturbs, Rounded, split_message
from leakgauge.defenses._common.clip import clip_l2
from leakgauge.defenses._common.misfit import gaussian_misfit
from leakgauge.harness.core import rng
from leakgauge.harness.core.accounting import epsilon, gaussian_mu, repeat
from leakgauge.harness.core.checks import check_update, positive
from leakgauge.harness.core.claim import Claim, Proof, Unit, claim_over
from leakgauge.harness.core.codec import pack_float32
from leakgauge.harness.core.contract import (
    Defense,
    Likelihood,
    Link,
    Links,
    Setting,
)
from leakgauge.harness.core.rng import Key
from leakgauge.harness.core.vec import Vector


@dataclass(frozen=True)
class Gaussian(Defense[None, None], Perturbs):
    """The Gaussian mechanism: clip the update's l2 norm to a public bound, add normal noise, send float32.

    Args:
        clip: C, bound on the l2 norm, in units of the update.
        epsilon: of one message, at `delta`; sets the noise. Default 8 unless `noise_std` is given.
        delta: of one message.
        noise_std: standard deviation of the noise a coordinate, in units of the update; instead of `epsilon`.

    Guarantees:
        4 * d bytes.
        decode(encode(u)) - clip(u) is normal with standard deviation `sigma` in each coordinate, independently, up to
        float32 rounding.

    Raises:
        ValueError: a parameter out of range, or both `epsilon` and `noise_std`.

    Source: Balle & Wang 2018, "Improving the Gaussian mechanism for differential privacy", Thm 8 (exact calibration,
        l2 sensitivity 2C: any two clipped updates). Differs from the textbook sqrt(2 ln(1.25/delta))/epsilon, which is
        proved for epsilon < 1 only.
    """

    clip: float = 1.0
    epsilon: float | None = None
    delta: float = 1e-5
    noise_std: float | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "epsilon", epsilon_unless(self.epsilon, self.noise_std))
        positive(clip=self.clip)
        check_delta(self.delta)

    @property
    def sigma(self) -> float:
        """Standard deviation of the noise in each coordinate."""
        if self.noise_std is not None:
            return self.noise_std
        assert self.epsilon is not None  # __post_init__ leaves one of the two
        return 2 * self.clip / gaussian_mu(self.epsilon, self.delta)

    def encode(self, state: None, memory: None, update: Vector, link: Link, private: Key) -> tuple[bytes, None]:
        """Clip, add noise from the private key, send float32. Does not use the shared key."""
        check_update(update)
        noise = rng.normal(private, (update.numel(),), torch.float64)
        noisy = clip_l2(update, self.clip).cpu().double() + self.sigma * noise
        return pack_float32(noisy.float()), None

    def header_size(self, setting: Setting) -> int:
        """The bound is public: nothing."""
        return 0

    def count(self, setting: Setting) -> int:
        """d."""
        return setting.dim

    def unit(self, setting: Setting) -> float:
        """3C / sqrt(d): the mean square of the clipped numbers is at most 1/9 of its square."""
        return 3 * self.clip / math.sqrt(setting.dim)

    def noise_variance(self, setting: Setting) -> float:
        """sigma^2, in squared units."""
        return (self.sigma / self.unit(setting)) ** 2

    def estimate(self, state: None, received: bytes, link: Link) -> Vector:
        """The noisy clipped update: unbiased for the clipped one."""
        return split_message(received, 0, link.setting.dim)[1]

    def likelihood(self, state: None, received: Sequence[bytes], links: Links) -> Likelihood:
        """|y - clip(u)|^2 / (2 sigma^2)."""
        return self.misfit(received, setting=links.setting)

    def misfit(self, received: Sequence[bytes], *, setting: Setting, rounded: Rounded | None = None) -> Likelihood:
        """The likelihood; an error of rounding adds its variance."""
        sent = torch.stack([split_message(wire, 0, setting.dim)[1] for wire in received])
        unit = self.unit(setting)
        if rounded is None:
            return lambda update: gaussian_misfit(clip_l2(update, self.clip) - sent, self.sigma**2)

        def score(update: Tensor) -> Tensor:
            residual = rounded.inside((clip_l2(update, self.clip) - sent) / unit)
            return gaussian_misfit(residual, self.noise_variance(setting), rounded.variance)

        return score

    def claim(self, history: Sequence[None], setting: Setting) -> Claim:
        """(epsilon, delta) for one message; T messages of one client compose to mu sqrt(T)."""
        from dp_accounting import GaussianDpEvent

        rounds = len(history)
        event = repeat(GaussianDpEvent(self.sigma / (2 * self.clip)), rounds)
        reason = "normal noise on an update clipped to a public l2 bound; rounds compose exactly."
        return claim_over(
            rounds,
            epsilon(event, self.delta),
            Proof(event, Unit.MESSAGE, "analytic Gaussian", reason),
            source="Balle & Wang 2018, Thm 8",
            delta=self.delta,
        )
