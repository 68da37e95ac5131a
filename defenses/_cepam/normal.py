"""CEPAM with normal noise: the common base of `cepam-gaussian` and `cepam-clip`."""

from __future__ import annotations

from leakgauge.defenses._cepam.claim import Promise, theorem_12
from leakgauge.defenses._cepam.lrsuq import Floats, gaussian_radii
from leakgauge.defenses._cepam.mechanism import Cepam, check_dimension
from leakgauge.harness.core.checks import positive
from leakgauge.harness.core.contract import Setting
from leakgauge.harness.core.rng import Key


class NormalCepam(Cepam):
    """CEPAM with normal noise; each final class defines these fields in its own order."""

    noise_std: float
    dimension: int
    local_epsilon: float

    def __post_init__(self) -> None:
        positive(noise_std=self.noise_std, local_epsilon=self.local_epsilon)
        check_dimension(self.dimension)

    @property
    def lattice_dimension(self) -> int:
        """n."""
        return self.dimension

    @property
    def reach(self) -> float:
        """The bound of the update, in standard deviations of the noise."""
        return self.bound / self.noise_std

    def radii(self, key: Key, count: int, unit: float) -> Floats:
        """sigma * sqrt(chi-square with n + 2 degrees)."""
        return gaussian_radii(key, count, self.dimension, self.noise_std * unit)

    def promise(self, setting: Setting) -> Promise:
        """The claim for one record and one round, by Thm 12."""
        return theorem_12(self.local_epsilon, self.reach, setting)
