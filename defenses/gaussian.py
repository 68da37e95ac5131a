"""The Gaussian mechanism on each client's message."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from defenses._budget import epsilon_unless
from defenses._clip import clip_l2
from harness import rng
from harness.accounting import gaussian_mu, repeat
from harness.codec import pack_float32, unpack_float32
from harness.contract import Claim, Defense, Horizon, Likelihood, Relation, Setting, Unit, check_update, positive
from harness.rng import Key
from harness.threats import Threat
from harness.vec import Vector


@dataclass(frozen=True)
class Gaussian(Defense[None, None]):
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
        if not 0 < self.delta < 1:
            raise ValueError(f"expected 0 < delta < 1, got delta={self.delta}")

    @property
    def sigma(self) -> float:
        """Standard deviation of the noise in each coordinate."""
        if self.noise_std is not None:
            return self.noise_std
        assert self.epsilon is not None  # __post_init__ leaves one of the two
        return 2 * self.clip / gaussian_mu(self.epsilon, self.delta)

    def encode(self, state: None, memory: None, update: Vector, *, private: Key, shared: Key) -> tuple[bytes, None]:
        """Clip, add noise from the private key, send float32. Does not use the shared key."""
        check_update(update)
        noise = rng.normal(private, (update.numel(),), torch.float64)
        noisy = clip_l2(update, self.clip).cpu().double() + self.sigma * noise
        return pack_float32(noisy.float()), None

    def estimate(self, state: None, received: bytes, *, shared: Key | None, setting: Setting) -> Vector:
        """The noisy clipped update: unbiased for the clipped one."""
        return unpack_float32(received, setting.dim)

    def likelihood(
        self, state: None, received: Sequence[bytes], *, shared: Sequence[Key] | None, setting: Setting
    ) -> Likelihood:
        """|y - clip(u)|^2 / (2 sigma^2)."""
        sent = torch.stack([unpack_float32(wire, setting.dim) for wire in received])
        scale = 0.5 / self.sigma**2

        def score(update: Tensor) -> Tensor:
            return scale * (clip_l2(update, self.clip) - sent).square().sum(-1)

        return score

    def claim(self, history: Sequence[None], setting: Setting) -> Claim:
        """(epsilon, delta) for one message; T messages of one client compose to mu sqrt(T)."""
        from dp_accounting import GaussianDpEvent

        return Claim(
            event=repeat(GaussianDpEvent(self.sigma / (2 * self.clip)), len(history)),
            delta=self.delta,
            unit=Unit.MESSAGE,
            relation=Relation.ANY_TWO,
            horizon=Horizon.ONE_ROUND if len(history) == 1 else Horizon.WHOLE_RUN,
            against=frozenset(Threat),
            source="Balle & Wang 2018, Thm 8",
            assumes=("the client takes part in every round",) if len(history) > 1 else (),
            reason="Normal noise on an update clipped to a public l2 bound; rounds compose exactly.",
        )
