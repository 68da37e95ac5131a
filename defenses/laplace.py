"""The Laplace mechanism on each coordinate of each client's message."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from leakgauge.defenses._common.cascade import THRESHOLD, Perturbs
from leakgauge.defenses._common.clip import Norm, clip_coordinates, clip_l2, delta_for, epsilon_unless
from leakgauge.defenses._common.misfit import TIP, Misfit, laplace_misfit, rounded_misfit
from leakgauge.defenses._common.reference import scaled
from leakgauge.defenses._common.scale import Mode, Scaling
from leakgauge.defenses._jopeq.lattice import Lattice, Rounded
from leakgauge.defenses._jopeq.privacy import scalar_epsilon
from leakgauge.harness.core import rng
from leakgauge.harness.core.accounting import repeat
from leakgauge.harness.core.checks import positive
from leakgauge.harness.core.claim import Claim, Proof, Unit
from leakgauge.harness.core.concentrated import laplace_l2, laplace_l2_scale
from leakgauge.harness.core.contract import Apart, Likelihood, Link, Links, Setting
from leakgauge.harness.core.distribution import Additive, Laplacian, MessageDistribution, clamped, projected
from leakgauge.harness.core.rng import Key
from leakgauge.harness.core.vec import Vector


@dataclass(frozen=True)
class Laplace(Perturbs):
    """The Laplace mechanism: bound each coordinate, or the l2 norm, add Laplace noise, send float32.

    Args:
        clip: C, bound on the magnitude of each coordinate, or on the l2 norm, in units of the update; for
            `scale = "public"`.
        epsilon: privacy budget of one coordinate of one message; the noise scale is 2C/epsilon. For `norm = "l2"`, the
            budget of the message, at `delta`; the noise scale is that of `laplace_l2_scale`. Default 8 unless
            `noise_std` is given.
        noise_std: standard deviation of the noise in a coordinate (scale times sqrt 2); replaces `epsilon`.
        scale: `public`: coordinates are clamped to [-C, C]. `tensor` and `vector`: the baseline of JoPEQ, which divides
            by three times a norm of the update, sends that norm in the clear and does not clamp; C is then 1.
        norm: what `clip` bounds: `entry`, each coordinate; `l2`, the l2 norm of the update, so that the epsilon of a
            message does not depend on its dimension. `l2` is for `scale = "public"`.
        delta: delta of the guarantee for one message, for `norm = "l2"`. Default 1e-5.

    Guarantees:
        Messages have 4 * d bytes, plus 8 bytes per tensor for `tensor`, or 4 bytes for `vector`.
        decode(encode(u)) - clip(u) is Laplace with scale `noise_scale` (times the sent norm) in each coordinate,
        independently, up to float32 rounding.

    Raises:
        ValueError: a parameter is out of range, or both `epsilon` and `noise_std` are given.

    Source: Dwork, McSherry, Nissim, Smith 2006. The unit is one coordinate, as in the local-DP baselines of JoPEQ (Lang
        et al. 2022, sec. IV): a whole message of d coordinates has d times epsilon. The epsilon for `l2` is ours:
        `laplace_l2`.
    """

    clip: float = 1.0
    epsilon: float | None = None
    noise_std: float | None = None
    scale: Mode = "public"
    norm: Norm = "entry"
    delta: float | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "epsilon", epsilon_unless(self.epsilon, self.noise_std))
        object.__setattr__(self, "delta", delta_for(self.norm, self.delta))
        positive(clip=self.clip)
        if self.delta is not None and self.scale != "public":
            raise ValueError(f"expected scale public with norm l2, got scale={self.scale!r}")

    @property
    def noise_scale(self) -> float:
        """b, the scale of the Laplace distribution with density exp(-|r|/b) / 2b."""
        if self.noise_std is not None:
            return self.noise_std / 2**0.5
        assert self.epsilon is not None  # __post_init__ sets one of the two
        if self.delta is not None:
            return laplace_l2_scale(2 * self.clip, self.epsilon, self.delta)
        return 2 * self._bound / self.epsilon

    @property
    def scaling(self) -> Scaling:
        """The scales, if they are not public, and the clip."""
        return Scaling(self.scale, 1, self.clip, self.norm)

    @property
    def _bound(self) -> float:
        return self.clip if self.scale == "public" else 1.0

    def normalize(self, update: Vector, setting: Setting) -> tuple[bytes, Tensor]:
        """The clipped update in its own units for `public`, else the scaled update."""
        if self.delta is not None:
            return b"", clip_l2(update, self.clip)
        if self.scale == "public":
            return b"", clip_coordinates(update, self.clip)
        return super().normalize(update, setting)

    def perturb(self, numbers: Tensor, private: Key) -> Tensor:
        """The numbers plus Laplace noise."""
        noise = rng.laplace(private, (len(numbers),), torch.float64).numpy()
        return torch.from_numpy((numbers.detach().cpu().numpy() + self.noise_scale * noise).astype(np.float32))

    def unit(self, setting: Setting) -> float:
        """The bound on the numbers; for `l2` 3C / sqrt(d), as for normal noise."""
        return self._bound if self.delta is None else 3 * self.clip / math.sqrt(setting.dim)

    def noise_variance(self, setting: Setting) -> float:
        """2 b^2, in squared units."""
        return 2 * (self.noise_scale / self.unit(setting)) ** 2

    def estimate(self, state: None, received: bytes, link: Link) -> Vector:
        """The noisy bounded update, which is unbiased for the bounded update."""
        if self.scale == "public":
            return self.split(received, link.setting)[1]
        return super().estimate(state, received, link)

    def attained(self, lattice: Lattice, rounds: int, setting: Setting) -> Proof | None:
        """What one threshold attains on a number that is 1 or -1, in bounds; not known for `l2`."""
        if self.delta is not None:
            return None
        shown = scalar_epsilon(2 * self._bound / self.noise_scale, 0.0, lattice.edge)
        return Proof.pure(shown, rounds, Unit.COORDINATE, THRESHOLD)

    def longest(self, state: None, link: Link) -> float:
        """For `public`, C plus noise in each coordinate: any of d exceeds b (ln d + 30) with probability e^-30."""
        if self.scale != "public":
            return math.inf
        root = math.sqrt(link.setting.dim)
        return self.clip * (root if self.delta is None else 1) + root * self.noise_scale * (2 * math.log(root) + 30)

    def exact_likelihood(self, state: None, received: Sequence[bytes], links: Links) -> Likelihood:
        """As `likelihood`, with a sharp tip."""
        return self.misfit(received, setting=links.setting, tip=0.0)

    def misfit(
        self, received: Sequence[bytes], *, setting: Setting, rounded: Rounded | None = None, tip: float = TIP
    ) -> Likelihood:
        """The sum of |y - clip(u)| / b with a rounded tip, plus a penalty for norms that differ from the sent ones.

        Numbers that were rounded separately follow the distribution of their cells; pairs in a lattice get a wider tip.
        """
        parts = [self.split(wire, setting) for wire in received]
        candidates = self.scaling.candidates([header for header, _ in parts], setting.layout)
        unit = self.unit(setting)
        sent, b = torch.stack([numbers for _, numbers in parts]) / unit, self.noise_scale / unit
        cells: Misfit | None = None
        if rounded is not None and rounded.lattice.dimension == 1:
            cells = rounded_misfit(rounded.side, rounded.lattice.step, b, dithered=rounded.dithered)

        def hidden(update: Tensor) -> Tensor:
            residual, extra = candidates.numbers(update) * (self._bound / unit) - sent, 0.0
            if cells is not None:
                return cells(residual)
            if rounded is not None:
                residual, extra = rounded.inside(residual), rounded.variance
            return laplace_misfit(residual, b, extra, tip)

        return Apart(hidden, candidates.penalty)

    def message_distribution(self, state: None, memory: None, update: Vector, link: Link) -> MessageDistribution:
        """The scales, then Laplace noise around the clipped or scaled update."""
        if self.delta is not None:
            return Additive(projected(update, self.clip), Laplacian(), self.noise_scale)
        if self.scale == "public":
            return Additive(clamped(update, self.clip), Laplacian(), self.noise_scale)
        header, center, places = scaled(update, link.setting.layout, self.scale)
        return Additive(center, Laplacian(), self.noise_scale, places, header)

    def low_noise_variant(self) -> Laplace:
        """The same mechanism with a noise standard deviation of 0.001 times the bound."""
        return replace(self, epsilon=None, noise_std=1e-3 * self._bound)

    def summed_proof(self, history: Sequence[None], setting: Setting, senders: int) -> Proof | None:
        """For `l2`: a sum of n noises shows no more than n messages with one noise each, of updates C/n apart.

        The sum of these n messages has the same distribution, so it is post-processing. rho is that of one message / n.
        """
        if self.delta is None:
            return None
        each = laplace_l2(1.0 / senders, self.noise_scale / self.clip, setting.dim)
        why = "Laplace noise on an update in a public l2 ball, which splits over these noises."
        return Proof(repeat(each, senders * len(history)), Unit.CLIENT, "Renyi divergence", why, tight=False)

    def claim(self, history: Sequence[None], setting: Setting) -> Claim:
        """Pure epsilon for one coordinate, which adds up over T rounds; (epsilon, delta) of a message for `l2`."""
        if self.delta is not None:
            return self.claim_of_l2(self.noise_scale / self.clip, self.delta, len(history), setting)
        from dp_accounting import LaplaceDpEvent

        pure, rounds = 2 * self._bound / self.noise_scale, len(history)
        why = "coordinates in [-C, C] get noise of scale 2C/epsilon."
        proved = Proof(repeat(LaplaceDpEvent(1 / pure), rounds), Unit.COORDINATE, "closed form", why)
        source = "Dwork et al. 2006" if self.scale == "public" else "Lang et al. 2022, sec. IV"
        return self.claim_of_each(pure, pure, proved, source, rounds, setting)
