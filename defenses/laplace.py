"""The Laplace mechanism on each coordinate of each client's message."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from defenses._budget import epsilon_unless
from defenses._clip import clip_coordinates
from harness import rng
from harness.accounting import repeat
from harness.codec import pack_float32, unpack_float32
from harness.contract import Claim, Defense, Horizon, Likelihood, Relation, Setting, Unit, check_update, positive
from harness.rng import Key
from harness.threats import Threat
from harness.vec import Vector

_SMOOTH = 0.1
"""Width of the rounded tip of |r|/b in the likelihood, in units of b: L-BFGS needs a gradient at zero."""


@dataclass(frozen=True)
class Laplace(Defense[None, None]):
    """The Laplace mechanism: clamp each coordinate to a public bound, add Laplace noise, send float32.

    Args:
        clip: C, bound on the magnitude of each coordinate, in units of the update.
        epsilon: of one coordinate of one message; the noise scale is 2C/epsilon. Default 8 unless `noise_std` is given.
        noise_std: standard deviation of the noise a coordinate (scale times sqrt 2); instead of `epsilon`.

    Guarantees:
        4 * d bytes.
        decode(encode(u)) - clamp(u) is Laplace with scale `scale` in each coordinate, independently, up to float32
        rounding.

    Raises:
        ValueError: a parameter out of range, or both `epsilon` and `noise_std`.

    Source: Dwork, McSherry, Nissim, Smith 2006. The unit is one coordinate, as in the local-DP baselines of JoPEQ
        (Lang et al. 2022, sec. IV): a whole message of d coordinates is d times epsilon.
    """

    clip: float = 1.0
    epsilon: float | None = None
    noise_std: float | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "epsilon", epsilon_unless(self.epsilon, self.noise_std))
        positive(clip=self.clip)

    @property
    def scale(self) -> float:
        """b of the Laplace law: density exp(-|r|/b) / 2b."""
        if self.noise_std is not None:
            return self.noise_std / 2**0.5
        assert self.epsilon is not None  # __post_init__ leaves one of the two
        return 2 * self.clip / self.epsilon

    def encode(self, state: None, memory: None, update: Vector, *, private: Key, shared: Key) -> tuple[bytes, None]:
        """Clamp, add noise from the private key, send float32. Does not use the shared key."""
        check_update(update)
        noise = rng.laplace(private, (update.numel(),), torch.float64)
        noisy = clip_coordinates(update, self.clip).cpu().double() + self.scale * noise
        return pack_float32(noisy.float()), None

    def estimate(self, state: None, received: bytes, *, shared: Key | None, setting: Setting) -> Vector:
        """The noisy clamped update: unbiased for the clamped one."""
        return unpack_float32(received, setting.dim)

    def likelihood(
        self, state: None, received: Sequence[bytes], *, shared: Sequence[Key] | None, setting: Setting
    ) -> Likelihood:
        """sum |y - clamp(u)| / b, with the tip rounded (pseudo-Huber of width 0.1 b)."""
        sent = torch.stack([unpack_float32(wire, setting.dim) for wire in received])
        b = self.scale

        def score(update: Tensor) -> Tensor:
            ratio = (clip_coordinates(update, self.clip) - sent) / b
            return ((ratio.square() + _SMOOTH**2).sqrt() - _SMOOTH).sum(-1)

        return score

    def claim(self, history: Sequence[None], setting: Setting) -> Claim:
        """Pure epsilon for one coordinate; T rounds add up."""
        from dp_accounting import LaplaceDpEvent

        return Claim(
            event=repeat(LaplaceDpEvent(self.scale / (2 * self.clip)), len(history)),
            delta=0.0,
            unit=Unit.COORDINATE,
            relation=Relation.ANY_TWO,
            horizon=Horizon.ONE_ROUND if len(history) == 1 else Horizon.WHOLE_RUN,
            against=frozenset(Threat),
            source="Dwork et al. 2006",
            assumes=("the client takes part in every round",) if len(history) > 1 else (),
            reason=f"Per coordinate; a whole message of {setting.dim} coordinates has {setting.dim} times as much.",
        )
