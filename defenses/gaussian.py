"""The Gaussian mechanism on each client's message."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from leakgauge.defenses._common.cascade import Perturbs
from leakgauge.defenses._common.clip import Clipped, clip_l2, normal_reach
from leakgauge.defenses._common.misfit import gaussian_misfit
from leakgauge.defenses._common.scale import Scaling
from leakgauge.defenses._jopeq.lattice import Lattice, Rounded
from leakgauge.harness.core import rng
from leakgauge.harness.core.accounting import Quantized
from leakgauge.harness.core.claim import Claim, Proof, Unit, claim_over
from leakgauge.harness.core.contract import Likelihood, Link, Setting
from leakgauge.harness.core.distribution import Additive, MessageDistribution, Normal, projected
from leakgauge.harness.core.gaussian import gaussian_mu
from leakgauge.harness.core.rng import Key
from leakgauge.harness.core.vec import Vector

_REASON = "normal noise on an update clipped to a public l2 bound; rounds compose exactly."


@dataclass(frozen=True)
class Gaussian(Clipped, Perturbs):
    """The Gaussian mechanism: clip the update's l2 norm to a public bound, add normal noise, send float32.

    Args:
        clip: C, bound on the l2 norm, in units of the update.
        epsilon: privacy budget of one message, at `delta`; sets the noise. Default 8 unless `noise_std` is given.
        delta: delta of the guarantee for one message.
        noise_std: standard deviation of the noise in a coordinate, in units of the update; replaces `epsilon`.

    Guarantees:
        Messages have 4 * d bytes.
        decode(encode(u)) - clip(u) is normal with standard deviation `sigma` in each coordinate, independently, up to
        float32 rounding.

    Raises:
        ValueError: a parameter is out of range, or both `epsilon` and `noise_std` are given.

    Source: Balle & Wang 2018, "Improving the Gaussian mechanism for differential privacy", Thm 8 (exact calibration,
        l2 sensitivity 2C, for any two clipped updates). Differs from the textbook formula
        sqrt(2 ln(1.25/delta))/epsilon, which is proved for epsilon < 1 only.
    """

    @property
    def sigma(self) -> float:
        """Standard deviation of the noise in each coordinate."""
        if self.noise_std is not None:
            return self.noise_std
        assert self.epsilon is not None  # __post_init__ sets one of the two
        return 2 * self.clip / gaussian_mu(self.epsilon, self.delta)

    @property
    def scaling(self) -> Scaling:
        """No header: the bound is public."""
        return Scaling("public")

    def normalize(self, update: Vector, setting: Setting) -> tuple[bytes, Tensor]:
        """The clipped update, in its own units."""
        return b"", clip_l2(update, self.clip)

    def perturb(self, numbers: Tensor, private: Key) -> Tensor:
        """The numbers plus normal noise."""
        return (numbers.cpu().double() + self.sigma * rng.normal(private, (len(numbers),), torch.float64)).float()

    def unit(self, setting: Setting) -> float:
        """3C / sqrt(d): the mean square of the clipped numbers is at most 1/9 of the square of this unit."""
        return 3 * self.clip / math.sqrt(setting.dim)

    def noise_variance(self, setting: Setting) -> float:
        """sigma^2, in squared units."""
        return (self.sigma / self.unit(setting)) ** 2

    def estimate(self, state: None, received: bytes, link: Link) -> Vector:
        """The noisy clipped update, which is unbiased for the clipped update."""
        return self.split(received, link.setting)[1]

    def attained(self, lattice: Lattice, rounds: int, setting: Setting) -> Proof | None:
        """What two opposite updates attain that are spread evenly over the first coordinates of all cells.

        None if the noise of a coordinate is smaller than the change: then a cell tells the two apart.
        """
        cells, noise = -(-setting.dim // lattice.dimension), math.sqrt(self.noise_variance(setting))
        shift = self.clip / math.sqrt(cells) / self.sigma
        if shift > 1:
            return None
        event = Quantized(shift, lattice.step / noise, lattice.top, cells * rounds)
        why = f"two updates whose change is spread over {cells} coordinates attain this epsilon."
        return Proof(event, Unit.MESSAGE, "quadrature for two inputs", why)

    def longest(self, state: None, link: Link) -> float:
        """C plus a bound on the norm of the noise."""
        return self.clip + normal_reach(self.sigma, link.setting.dim)

    def misfit(self, received: Sequence[bytes], *, setting: Setting, rounded: Rounded | None = None) -> Likelihood:
        """|y - clip(u)|^2 / (2 sigma^2); a rounding error adds its variance."""
        sent = torch.stack([self.split(wire, setting)[1] for wire in received])
        unit = self.unit(setting)
        if rounded is None:
            return lambda update: gaussian_misfit(clip_l2(update, self.clip) - sent, self.sigma**2)

        def score(update: Tensor) -> Tensor:
            residual = rounded.inside((clip_l2(update, self.clip) - sent) / unit)
            return gaussian_misfit(residual, self.noise_variance(setting), rounded.variance)

        return score

    def message_distribution(self, state: None, memory: None, update: Vector, link: Link) -> MessageDistribution:
        """Normal around the update's projection onto the ball of radius C."""
        return Additive(projected(update, self.clip), Normal(), self.sigma)

    def low_noise_variant(self) -> Gaussian:
        """The same mechanism with a noise of 0.001 C in each coordinate."""
        return replace(self, epsilon=None, noise_std=1e-3 * self.clip)

    def claim(self, history: Sequence[None], setting: Setting) -> Claim:
        """(epsilon, delta) for one message; T messages of one client compose to mu sqrt(T)."""
        proved = Proof.gaussian(self.sigma / (2 * self.clip), len(history), Unit.MESSAGE, _REASON)
        source = "Balle & Wang 2018, Thm 8"
        return claim_over(len(history), proved.epsilon(self.delta), proved, source=source, delta=self.delta)

    def summed_proof(self, history: Sequence[None], setting: Setting, senders: int) -> Proof:
        """Normal noises of n clients add up to sqrt(n) sigma."""
        return Proof.gaussian(math.sqrt(senders) * self.sigma / self.clip, len(history), Unit.CLIENT, _REASON)
