"""The common base of JoPEQ's defenses: scale, add private noise, quantize with a shared dither.

The text and the reference code of the source differ in the radius gamma and in the step. This module has both; the
reference code reproduces the paper's Table II.

| | reference code | text |
|---|---|---|
| gamma, no noise | 1.5 | 2 R for L = 1, 1.5 for L = 2: the rows below with epsilon infinite, variance 0 |
| gamma, L = 1, Laplace noise of scale 2/epsilon | 1.5 sqrt(1 + variance) | 2 R + 1/epsilon |
| gamma, L = 2, t noise | 1.5 sqrt(1 + variance) | 1.5 (1 + variance) |
| step | 2 gamma / (2^R + 1): 2^R + 1 cells | 2 gamma / 2^R: the outermost points are at +-gamma |

Source: Lang, Sofer, Shaked, Shlezinger 2022, "Joint privacy enhancement and quantization in federated learning", and
    its reference code.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import ClassVar, Literal, TypeAlias

import numpy as np
import torch
from torch import Tensor

from leakgauge.defenses._common.misfit import Misfit, rounded_misfit
from leakgauge.defenses._common.reference import scaled
from leakgauge.defenses._common.scale import ByScale, Scaling
from leakgauge.defenses._jopeq.distribution import leveled
from leakgauge.defenses._jopeq.lattice import Lattice, student_variance
from leakgauge.defenses._jopeq.privacy import SHIPPED, Student
from leakgauge.harness.core import rng
from leakgauge.harness.core.checks import check_update, positive
from leakgauge.harness.core.claim import Arithmetic, Claim, Proof, nothing_promised
from leakgauge.harness.core.codec import width_of
from leakgauge.harness.core.contract import Apart, Likelihood, Link, Links, Setting
from leakgauge.harness.core.distribution import MessageDistribution, Normal
from leakgauge.harness.core.rng import Key
from leakgauge.harness.core.vec import Vector

Radius: TypeAlias = Literal["reference", "paper"] | float
"""gamma by the rule of the reference code, by the rule of the text, or as a number with the reference code's step."""

CLEAR = "the complete message: its scale, a norm of the update, is sent in the clear."


class Dithered(ByScale[None]):
    """A defense that scales an update, adds noise by the private key and quantizes with a dither by the shared key."""

    @property
    @abstractmethod
    def lattice(self) -> Lattice:
        """The lattice to which the noisy numbers are rounded."""

    @property
    def arithmetic(self) -> Arithmetic:  # type: ignore[override]  # it follows from a parameter
        """Levels of a lattice: rounding-safe, unless floats of the update come first."""
        return self.scaling.before_levels

    @abstractmethod
    def perturb(self, values: Tensor, private: Key) -> Tensor:
        """The numbers [n] plus noise."""

    @abstractmethod
    def misfit(self, side: Tensor, *, dithered: bool) -> Misfit:
        """The misfit of candidates minus values [n, count], for levels with this `Lattice.side`.

        Args:
            dithered: whether the dither is known and subtracted from the values; otherwise the values are midpoints of
                levels.
        """

    def encode(self, state: None, memory: None, update: Vector, link: Link, private: Key) -> tuple[bytes, None]:
        """The scales, then the levels of the noisy numbers."""
        check_update(update)
        header, values = self.scaling.normalize(update, link.setting.layout)
        return header + self.lattice.pack(self.perturb(values, private), link.key), None

    def estimate(self, state: None, received: bytes, link: Link) -> Vector:
        """The values minus the dither, scaled back: unbiased except for overload; coarser without the shared key."""
        header, levels = self._read(received, link.setting)
        values = self.lattice.place(levels, len(levels), link.shared)
        return self.scaling.undo(header, values, link.setting.layout)

    def likelihood(self, state: None, received: Sequence[bytes], links: Links) -> Likelihood:
        """A candidate's misfit to the values, by the distribution of noise and quantization error, plus that to the
        scales.

        A value at the edge shows only that the number is at the edge or beyond.
        """
        lattice, scaling = self.lattice, self.scaling
        parts = [self._read(wire, links.setting) for wire in received]
        levels = torch.stack([read for _, read in parts])
        each = zip(parts, links.each(), strict=True)
        sent = torch.stack([lattice.place(read, len(read), link.shared) for (_, read), link in each])
        candidates = scaling.candidates([header for header, _ in parts], links.setting.layout)
        misfit = self.misfit(lattice.side(levels), dithered=links.shared is not None)

        return Apart(lambda update: misfit(candidates.numbers(update) - sent), candidates.penalty)

    @property
    def noisy(self) -> bool:
        """Whether `perturb` adds noise."""
        return True

    def error_variance(self, state: None, received: Sequence[bytes], links: Links) -> Tensor | None:
        """The error variance of a cell, ignoring overload, times the squared scales; None if there is private noise."""
        if self.noisy:
            return None
        layout, dithered = links.setting.layout, links.shared is not None
        ones, size = torch.ones(self.scaling.count(layout)), self.scaling.header_size(layout)
        undone = [[self.scaling.undo(wire[:size], c * ones, layout) for c in (0.0, 1.0)] for wire in received]
        scales = torch.stack([high - low for low, high in undone])
        return self.lattice.error_variance(dithered) * scales.square()

    def _read(self, received: bytes, setting: Setting) -> tuple[bytes, Tensor]:
        size = self.scaling.header_size(setting.layout)
        levels = self.lattice.read(received[size:], self.scaling.count(setting.layout))
        return received[:size], levels


@dataclass(frozen=True)
class Bare(Dithered):
    """Subtractive dithered quantization without noise or claim; after a '+' it encodes another defense's numbers."""

    randomized: ClassVar[bool] = False
    assumes_range: ClassVar[bool] = False
    dimension: ClassVar[int]

    bits: int = 1
    gamma: Radius | None = None

    def __post_init__(self) -> None:
        self.lattice_for(0.0)

    @property
    def noisy(self) -> bool:
        """False: this class adds no noise."""
        return False

    @property
    def scaling(self) -> Scaling:
        """One scale per tensor."""
        return Scaling("tensor", self.dimension)

    @property
    def lattice(self) -> Lattice:
        """The lattice for numbers without noise."""
        return self.lattice_for(0.0)

    def perturb(self, values: Tensor, private: Key) -> Tensor:
        """The numbers, unchanged."""
        return values

    def misfit(self, side: Tensor, *, dithered: bool) -> Misfit:
        """The `rounded_misfit` of each lattice coordinate, overload included."""
        lattice, distribution = self.lattice, rounded_misfit(side, self.lattice.step, 0.0, dithered=dithered)
        return lambda residual: distribution(lattice.in_cells(residual))

    def message_distribution(self, state: None, memory: None, update: Vector, link: Link) -> MessageDistribution:
        """The levels of the scaled numbers, given the dither."""
        numbers = scaled(update, link.setting.layout, "tensor", self.dimension)
        return leveled(numbers, Normal(), np.zeros((2, 2)), self.lattice, link.key)

    def finer(self) -> Bare:
        """The same with 16 bits: steps so small that an audit detects even little noise."""
        return replace(self, bits=16)

    def lattice_for(self, noise_variance: float) -> Lattice:
        """The lattice for numbers in units that, without noise of this variance, lie in [-1, 1]."""
        gamma = "reference" if self.gamma is None else self.gamma
        return Lattice(_step(gamma, self.bits, noise_variance, self.dimension), self.bits, self.dimension)


class ScalarJoPEQ(Dithered):
    """Laplace noise on single coordinates; each concrete class defines these fields in its own order."""

    epsilon: float
    bits: int
    gamma: Radius
    clip: float

    def __post_init__(self) -> None:
        positive(epsilon=self.epsilon, clip=self.clip)
        scalar_lattice(self.bits, self.nominal, self.gamma)

    @property
    def nominal(self) -> float:
        """The pure epsilon of a coordinate in [-1, 1] that sets the noise: it has scale 2/nominal, also for gamma."""
        return self.epsilon

    @property
    def lattice(self) -> Lattice:
        """The multiples of Delta."""
        return scalar_lattice(self.bits, self.nominal, self.gamma)

    @property
    @abstractmethod
    def noise_scale(self) -> float:
        """b', the scale of the private Laplace noise, in units of the scaled coordinates; 0 means no noise."""

    @property
    def noisy(self) -> bool:
        """Whether there is private noise; large steps leave no noise."""
        return self.noise_scale > 0

    def perturb(self, values: Tensor, private: Key) -> Tensor:
        """Add Laplace(b') noise in place."""
        if self.noise_scale == 0:
            return values
        return values.add_(rng.signed_exponential(private, (len(values),)), alpha=self.noise_scale)

    def misfit(self, side: Tensor, *, dithered: bool) -> Misfit:
        """The misfit by the distribution of Laplace(b') plus the error of the cell, or of cell and dither."""
        return rounded_misfit(side, self.lattice.step, self.noise_scale, dithered=dithered)


@lru_cache(maxsize=16)
def scalar_lattice(bits: int, epsilon: float, gamma: Radius) -> Lattice:
    """The lattice for one coordinate with Laplace noise of scale 2/epsilon.

    Raises:
        ValueError: a parameter is out of range.
    """
    positive(epsilon=epsilon)
    return Lattice(_step(gamma, bits, 2 * (2 / epsilon) ** 2, 1), bits)


@lru_cache(maxsize=16)
def pair_lattice(bits: int, noise: Student, gamma: Radius) -> Lattice:
    """The lattice for two coordinates with t noise.

    Raises:
        ValueError: a parameter is out of range.
    """
    return Lattice(_step(gamma, bits, student_variance(*noise), 2), bits, 2)


def student(epsilon: float, s2: float | None, nu: float | None) -> Student:
    """The given t noise, or the first noise in the reference code's table for a nominal epsilon.

    Raises:
        ValueError: only one of s2 and nu is given, a number is out of range, or the table lacks this epsilon.
    """
    positive(epsilon=epsilon)
    if s2 is not None and nu is not None:
        positive(s2=s2)
        student_variance(s2, nu)
        return Student(s2, nu)
    if s2 is not None or nu is not None:
        raise ValueError(f"expected both s2 and nu or neither, got s2={s2} and nu={nu}")
    if epsilon not in SHIPPED:
        known = ", ".join(f"{value:g}" for value in SHIPPED)
        raise ValueError(f"expected epsilon {known}, or another with s2 and nu, got epsilon={epsilon}")
    return SHIPPED[epsilon][0]


def draw_student(private: Key, pairs: int, root: Tensor, nu: float) -> Tensor:
    """[2 pairs] float64: bivariate t draws, pair after pair, with scale matrix root root^T, where root is [2, 2]."""
    drawn = (rng.normal(private.child("normal"), (pairs, 2), torch.float64) @ root.T).numpy()
    drawn /= np.sqrt(rng.chisquare(private.child("chi-square"), nu, (pairs, 1)).numpy() / nu)
    return torch.from_numpy(drawn.reshape(-1))


def bare_claim(rounds: int, leak: Proof) -> Claim:
    """The claim of a quantizer without noise; `leak` is the bound from its dither alone."""
    why = "no noise: given the dither, a message is a function of the update; a norm is sent in the clear."
    return nothing_promised(rounds, why, leak)


def _step(gamma: Radius, bits: int, variance: float, dimension: int) -> float:
    """Delta for noise of this variance per coordinate. See the module's table."""
    # at a higher rate, float32 would round the dither away
    if not 1 <= bits <= 16:
        raise ValueError(f"expected 1 to 16 bits, got bits={bits}")
    cells = 2.0**bits + 1
    printed = 2 * bits + math.sqrt(variance / 8) if dimension == 1 else 1.5 * (1 + variance)
    steps = {"paper": 2 * printed / 2.0**bits, "reference": 2 * (1.5 * math.sqrt(1 + variance)) / cells}
    if isinstance(gamma, str):
        if gamma not in steps:
            raise ValueError(f"expected gamma reference, paper or a number, got gamma={gamma!r}")
        return steps[gamma]
    positive(gamma=gamma)
    return 2 * gamma / cells


def message_bits(dim: int, bits: int) -> int:
    """Bits of the levels of a message for a model of `dim` weights, an even number; the scales are left out."""
    return dim * width_of(2**bits + 1)
