"""The Laplace mechanism on each coordinate of each client's message."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from leakgauge.defenses._common.cascade import THRESHOLD, Perturbs
from leakgauge.defenses._common.clip import clip_coordinates, epsilon_unless
from leakgauge.defenses._common.misfit import TIP, Misfit, laplace_misfit, rounded_misfit
from leakgauge.defenses._common.reference import scaled
from leakgauge.defenses._common.scale import Mode
from leakgauge.defenses._jopeq.lattice import Lattice, Rounded
from leakgauge.defenses._jopeq.privacy import scalar_epsilon
from leakgauge.harness.core import rng
from leakgauge.harness.core.accounting import repeat
from leakgauge.harness.core.checks import positive
from leakgauge.harness.core.claim import Claim, Proof, Unit
from leakgauge.harness.core.contract import Apart, Likelihood, Link, Links, Setting
from leakgauge.harness.core.distribution import Additive, Laplacian, MessageDistribution, clamped
from leakgauge.harness.core.rng import Key
from leakgauge.harness.core.vec import Vector


@dataclass(frozen=True)
class Laplace(Perturbs):
    """The Laplace mechanism: bound each coordinate, add Laplace noise, send float32.

    Args:
        clip: C, bound on the magnitude of each coordinate, in units of the update; for `scale = "public"`.
        epsilon: privacy budget of one coordinate of one message; the noise scale is 2C/epsilon. Default 8 unless
            `noise_std` is given.
        noise_std: standard deviation of the noise in a coordinate (scale times sqrt 2); replaces `epsilon`.
        scale: `public`: coordinates are clamped to [-C, C]. `tensor` and `vector`: the baseline of JoPEQ, which divides
            by three times a norm of the update, sends that norm in the clear and does not clamp; C is then 1.

    Guarantees:
        Messages have 4 * d bytes, plus 8 bytes per tensor for `tensor`, or 4 bytes for `vector`.
        decode(encode(u)) - clamp(u) is Laplace with scale `noise_scale` (times the sent norm) in each coordinate,
        independently, up to float32 rounding.

    Raises:
        ValueError: a parameter is out of range, or both `epsilon` and `noise_std` are given.

    Source: Dwork, McSherry, Nissim, Smith 2006. The unit is one coordinate, as in the local-DP baselines of JoPEQ (Lang
        et al. 2022, sec. IV): a whole message of d coordinates has d times epsilon.
    """

    clip: float = 1.0
    epsilon: float | None = None
    noise_std: float | None = None
    scale: Mode = "public"

    def __post_init__(self) -> None:
        object.__setattr__(self, "epsilon", epsilon_unless(self.epsilon, self.noise_std))
        positive(clip=self.clip)

    @property
    def noise_scale(self) -> float:
        """b, the scale of the Laplace distribution with density exp(-|r|/b) / 2b."""
        if self.noise_std is not None:
            return self.noise_std / 2**0.5
        assert self.epsilon is not None  # __post_init__ sets one of the two
        return 2 * self._bound / self.epsilon

    @property
    def _bound(self) -> float:
        return self.clip if self.scale == "public" else 1.0

    def normalize(self, update: Vector, setting: Setting) -> tuple[bytes, Tensor]:
        """The clamped update in its own units for `public`, else the scaled update."""
        if self.scale == "public":
            return b"", clip_coordinates(update, self.clip)
        return super().normalize(update, setting)

    def perturb(self, numbers: Tensor, private: Key) -> Tensor:
        """The numbers plus Laplace noise."""
        noise = rng.laplace(private, (len(numbers),), torch.float64).numpy()
        return torch.from_numpy((numbers.detach().cpu().numpy() + self.noise_scale * noise).astype(np.float32))

    def unit(self, setting: Setting) -> float:
        """The bound on the numbers."""
        return self._bound

    def noise_variance(self, setting: Setting) -> float:
        """2 b^2, in squared bounds."""
        return 2 * (self.noise_scale / self._bound) ** 2

    def estimate(self, state: None, received: bytes, link: Link) -> Vector:
        """The noisy bounded update, which is unbiased for the bounded update."""
        if self.scale == "public":
            return self.split(received, link.setting)[1]
        return super().estimate(state, received, link)

    def attained(self, lattice: Lattice, rounds: int, setting: Setting) -> Proof:
        """What one threshold attains on a number that is 1 or -1, in bounds."""
        shown = scalar_epsilon(2 * self._bound / self.noise_scale, 0.0, lattice.edge)
        return Proof.pure(shown, rounds, Unit.COORDINATE, THRESHOLD)

    def longest(self, state: None, link: Link) -> float:
        """For `public`, C plus noise in each coordinate: any of d exceeds b (ln d + 30) with probability e^-30."""
        if self.scale != "public":
            return math.inf
        dim = link.setting.dim
        return math.sqrt(dim) * (self.clip + self.noise_scale * (math.log(dim) + 30))

    def exact_likelihood(self, state: None, received: Sequence[bytes], links: Links) -> Likelihood:
        """As `likelihood`, with a sharp tip."""
        return self.misfit(received, setting=links.setting, tip=0.0)

    def misfit(
        self, received: Sequence[bytes], *, setting: Setting, rounded: Rounded | None = None, tip: float = TIP
    ) -> Likelihood:
        """The sum of |y - clamp(u)| / b with a rounded tip, plus a penalty for norms that differ from the sent ones.

        Numbers that were rounded separately follow the distribution of their cells; pairs in a lattice get a wider tip.
        """
        parts = [self.split(wire, setting) for wire in received]
        candidates = self.scaling.candidates([header for header, _ in parts], setting.layout)
        sent = torch.stack([numbers for _, numbers in parts]) / self._bound
        b = self.noise_scale / self._bound
        cells: Misfit | None = None
        if rounded is not None and rounded.lattice.dimension == 1:
            cells = rounded_misfit(rounded.side, rounded.lattice.step, b, dithered=rounded.dithered)

        def hidden(update: Tensor) -> Tensor:
            residual, extra = candidates.numbers(update) - sent, 0.0
            if cells is not None:
                return cells(residual)
            if rounded is not None:
                residual, extra = rounded.inside(residual), rounded.variance
            return laplace_misfit(residual, b, extra, tip)

        return Apart(hidden, candidates.penalty)

    def message_distribution(self, state: None, memory: None, update: Vector, link: Link) -> MessageDistribution:
        """The scales, then Laplace noise around the clamped or scaled update."""
        if self.scale == "public":
            return Additive(clamped(update, self.clip), Laplacian(), self.noise_scale)
        header, center, places = scaled(update, link.setting.layout, self.scale)
        return Additive(center, Laplacian(), self.noise_scale, places, header)

    def low_noise_variant(self) -> Laplace:
        """The same mechanism with a noise standard deviation of 0.001 times the bound."""
        return replace(self, epsilon=None, noise_std=1e-3 * self._bound)

    def claim(self, history: Sequence[None], setting: Setting) -> Claim:
        """Pure epsilon for one coordinate; the epsilons of T rounds add up."""
        from dp_accounting import LaplaceDpEvent

        pure, rounds = 2 * self._bound / self.noise_scale, len(history)
        why = "coordinates in [-C, C] get noise of scale 2C/epsilon."
        proved = Proof(repeat(LaplaceDpEvent(1 / pure), rounds), Unit.COORDINATE, "closed form", why)
        source = "Dwork et al. 2006" if self.scale == "public" else "Lang et al. 2022, sec. IV"
        return self.claim_of_each(pure, pure, proved, source, rounds, setting)
