"""The mechanism that all variants of CEPAM share: the layered quantizer turns an update into bits and adds noise.

The variants differ in the distribution of the radii and in the unit of an update: a share of the update's norm, which
is sent, or 1.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from leakgauge.defenses._cepam import claim, wire
from leakgauge.defenses._cepam.distribution import clipped, scaled
from leakgauge.defenses._cepam.wire import gaussian_radii
from leakgauge.defenses._common.clip import clip_l2
from leakgauge.defenses._common.misfit import WALL, ball_misfit
from leakgauge.harness.core.checks import check_update, positive
from leakgauge.harness.core.claim import Violation
from leakgauge.harness.core.codec import Reader, unpack_float32
from leakgauge.harness.core.contract import Defense, Likelihood, Link, Links, Setting
from leakgauge.harness.core.distribution import MessageDistribution, Normal
from leakgauge.harness.core.errors import MessageError
from leakgauge.harness.core.rng import Key
from leakgauge.harness.core.stats import Numbers
from leakgauge.harness.core.vec import Vector

# Relative deviation of a candidate's norm from the norm in the message that counts as one standard deviation. The
# message is exact to 6e-8; an optimizer that starts far away needs a softer wall
_STIFF = 1e-3
_EDGE = 1e-6  # blur of an exact wall, as `WALL`, for the rounding errors of an update
_LEAST = 1e-6  # smallest norm that `_STIFF` multiplies; keeps the slope at a zero update finite


@dataclass(frozen=True)
class Cepam(Defense[None, None]):
    """The client's and the server's part, for any distribution of the radii.

    The update, padded with zeros to N = ceil(d / n) sub-vectors, is quantized with radii proportional to its unit.
    Sub-vector j has the coordinates j, j + N, and so on.
    """

    randomized: ClassVar[bool] = False
    sends_norm: ClassVar[bool] = True
    """Whether the unit is |u| / bound, sent as a float; else the unit is 1 and the update is clipped to the bound."""

    @property
    def lattice_dimension(self) -> int:
        """n, the number of coordinates of a sub-vector; 1 unless a variant has radii for more dimensions."""
        return 1

    @property
    @abstractmethod
    def bound(self) -> float:
        """Largest l2 norm of an update, in units of `unit`."""

    @abstractmethod
    def radii(self, key: Key, count: int, unit: float) -> Numbers:
        """Radii [count] of sub-vectors."""

    def encode(self, state: None, memory: None, update: Vector, link: Link, private: Key) -> tuple[bytes, None]:
        """The norm if it is sent, then attempts and cells. The private key is unused: all noise is shared."""
        check_update(update)
        header, unit, sent = b"", 1.0, update.detach().cpu()
        if self.sends_norm:
            unit = float(torch.linalg.vector_norm(sent, dtype=torch.float64)) / self.bound
            if unit > float(np.finfo(np.float32).max):
                raise ValueError(f"expected an update whose norm in units is a float32, got {unit}")
            unit = float(np.float32(unit))
            header = np.array(unit, "<f4").tobytes()
            if unit == 0:
                return header, None
        else:
            sent = clip_l2(sent, self.bound)
        x = self._padded(sent, link.setting).numpy().reshape(self.lattice_dimension, -1).T
        radii = self.radii(link.key.child("radii"), len(x), unit)
        return header + wire.pack(x, radii, self._spread(unit, link.setting), link.key.child("dithers")), None

    def estimate(self, state: None, received: bytes, link: Link) -> Vector:
        """The noisy update, unbiased for the (clipped) update; zero without the shared key."""
        unit, payload = self._split(received)
        if link.shared is None or unit == 0:
            return torch.zeros(link.setting.dim)
        points, _ = self._points(unit, payload, link.shared, link.setting)
        update = torch.from_numpy(points.reshape(-1)[: link.setting.dim]).float()
        if not np.isfinite(update.numpy()).all():
            low, high = (float(extreme) for extreme in torch.aminmax(update))
            raise MessageError(f"expected a finite update, got coordinates from {low} to {high}")
        return update

    def likelihood(self, state: None, received: Sequence[bytes], links: Links) -> Likelihood:
        """Misfit to errors that are uniform on balls of known radii with blurred walls, plus misfit of the norm.

        Without the shared key, radii and dithers are unknown and the bits have no meaning: only the norm counts.
        """
        return self._likelihood(received, links, WALL)

    def exact_likelihood(self, state: None, received: Sequence[bytes], links: Links) -> Likelihood:
        """As `likelihood`, with walls that are blurred by rounding errors only."""
        return self._likelihood(received, links, _EDGE)

    def _likelihood(self, received: Sequence[bytes], links: Links, wall: float) -> Likelihood:
        split = [self._split(message) for message in received]
        count = self._count(links.setting)
        points, inverse = torch.zeros(len(split), self.lattice_dimension, count), torch.zeros(len(split), count)
        for i, (unit, payload) in enumerate(split):
            if links.shared is not None and unit > 0:
                decoded, radii = self._points(unit, payload, links.shared[i], links.setting)
                points[i], inverse[i] = torch.from_numpy(decoded).float(), torch.from_numpy(1 / radii).float()
        read = inverse[:, 0] > 0
        norms = torch.tensor([self.bound * unit for unit, _ in split], dtype=torch.float32)

        def score(update: Tensor) -> Tensor:
            sent = self._padded(update if self.sends_norm else clip_l2(update, self.bound), links.setting)
            errors = (sent.reshape(points.shape) - points) * inverse[:, None]
            # 1e-30, because the square root has no slope at zero
            misfit = ball_misfit((errors.square().sum(1) + 1e-30).sqrt(), wall) * read
            if not self.sends_norm:
                return misfit
            norm = (update.square().sum(-1) + 1e-30).sqrt()
            return misfit + ((norm - norms) / (_STIFF * norms.clamp(min=_LEAST))).square() / 2

        return score

    def plaintext_statistic(self, updates: Tensor, setting: Setting) -> Tensor:
        """The norm, if it is sent."""
        return updates.norm(dim=1, keepdim=True) if self.sends_norm else super().plaintext_statistic(updates, setting)

    def read_plaintext_statistic(self, received: Sequence[bytes], setting: Setting) -> Tensor:
        """The norm, if it is sent."""
        if not self.sends_norm:
            return super().read_plaintext_statistic(received, setting)
        return torch.tensor([[self.bound * self._split(wire)[0]] for wire in received], dtype=torch.float64)

    def error_variance(self, state: None, received: Sequence[bytes], links: Links) -> Tensor:
        """radius^2 / (n + 2), the variance of the uniform distribution on a ball; infinite without the shared key."""
        rows = torch.full((len(received), links.setting.dim), math.inf)
        for row, (unit, _), shared in zip(rows, map(self._split, received), links.shared or (), strict=False):
            if unit > 0:
                radii = torch.from_numpy(self.radii(shared.child("radii"), self._count(links.setting), unit)).float()
                row[:] = (radii.square() / (self.lattice_dimension + 2)).repeat(self.lattice_dimension)[: len(row)]
        return rows

    def violations(self, updates: Sequence[Vector], links: Links, lr: float) -> dict[str, Violation]:
        """Violations in how records are drawn, and in equal norms and weights; see `_cepam.claim.violations`."""
        return claim.violations(updates, links, sends_norm=self.sends_norm)

    def _padded(self, update: Tensor, setting: Setting) -> Tensor:
        short = self._count(setting) * self.lattice_dimension - setting.dim
        return torch.nn.functional.pad(update, (0, short)) if short else update

    def _count(self, setting: Setting) -> int:
        return -(-setting.dim // self.lattice_dimension)

    def _spread(self, unit: float, setting: Setting) -> float:
        return self.bound * unit / math.sqrt(setting.dim)

    def _split(self, received: bytes) -> tuple[float, bytes]:
        if not self.sends_norm:
            return 1.0, received
        source = Reader(received)
        unit = float(unpack_float32(source.take(4, "the norm"), 1))
        if unit < 0:
            raise MessageError(f"expected a norm >= 0, got {unit}")
        if unit == 0:
            source.done()
        return unit, source.take(source.left, "attempts and cells")

    def _points(self, unit: float, payload: bytes, shared: Key, setting: Setting) -> tuple[Numbers, Numbers]:
        radii, spread = self.radii(shared.child("radii"), self._count(setting), unit), self._spread(unit, setting)
        points = wire.unpack(payload, radii, spread, shared.child("dithers"), self.lattice_dimension)
        return points.T, radii


class NormalCepam(Cepam):
    """CEPAM with normal noise; each concrete class defines these fields in its own order."""

    noise_std: float
    dimension: int
    local_epsilon: float

    def __post_init__(self) -> None:
        positive(noise_std=self.noise_std, local_epsilon=self.local_epsilon)
        if self.dimension not in (1, 2, 3):
            raise ValueError(f"expected dimension 1, 2 or 3, got dimension={self.dimension}")

    @property
    def lattice_dimension(self) -> int:
        """n, the parameter `dimension`."""
        return self.dimension

    @property
    def reach(self) -> float:
        """The bound of the update, in standard deviations of the noise."""
        return self.bound / self.noise_std

    def radii(self, key: Key, count: int, unit: float) -> Numbers:
        """sigma * sqrt(chi-square with n + 2 degrees)."""
        return gaussian_radii(key, count, self.dimension, self.noise_std * unit)

    def message_distribution(self, state: None, memory: None, update: Vector, link: Link) -> MessageDistribution:
        """A normal error around the scaled or the clipped update."""
        stated = scaled if self.sends_norm else clipped
        return stated(update, link, self.bound, Normal(), self.noise_std, self.dimension)
