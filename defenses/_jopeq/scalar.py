"""The common base of `jopeq` and `jopeq-sound`: Laplace noise, then a dithered quantizer of single coordinates."""

from __future__ import annotations

from abc import abstractmethod

from torch import Tensor

from leakgauge.defenses._common.misfit import Misfit, rounded_misfit
from leakgauge.defenses._jopeq.lattice import Lattice
from leakgauge.defenses._jopeq.quantizer import Dithered, Radius, scalar_lattice
from leakgauge.harness.core import rng
from leakgauge.harness.core.checks import positive
from leakgauge.harness.core.rng import Key


class ScalarJoPEQ(Dithered):
    """Laplace noise on single coordinates; each final class defines these fields in its own order."""

    epsilon: float
    bits: int
    gamma: Radius
    clip: float

    def __post_init__(self) -> None:
        positive(epsilon=self.epsilon, clip=self.clip)
        scalar_lattice(self.bits, self.epsilon, self.gamma)

    @property
    def lattice(self) -> Lattice:
        """The multiples of Delta."""
        return scalar_lattice(self.bits, self.epsilon, self.gamma)

    @property
    @abstractmethod
    def noise_scale(self) -> float:
        """b' of the private Laplace noise, in units of the scaled coordinates; 0: no noise."""

    def perturb(self, values: Tensor, private: Key) -> Tensor:
        """Add Laplace(b') in place."""
        if self.noise_scale == 0:
            return values
        return values.add_(rng.signed_exponential(private, (len(values),)), alpha=self.noise_scale)

    def misfit(self, side: Tensor, *, dithered: bool) -> Misfit:
        """The law of Laplace(b') plus the error of the cell, or of cell and dither."""
        return rounded_misfit(side, self.lattice.step, self.noise_scale, dithered=dithered)
