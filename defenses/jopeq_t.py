"""JoPEQ with t noise on pairs: quantization on a lattice, and private noise reduced by the error's covariance."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from leakgauge.defenses._common.misfit import Misfit, student_misfit
from leakgauge.defenses._common.reference import scaled
from leakgauge.defenses._common.scale import Mode, unclipped
from leakgauge.defenses._jopeq import privacy
from leakgauge.defenses._jopeq.distribution import leveled
from leakgauge.defenses._jopeq.lattice import Lattice
from leakgauge.defenses._jopeq.quantizer import (
    CLEAR,
    Dithered,
    Radius,
    draw_student,
    message_bits,
    pair_lattice,
    student,
)
from leakgauge.harness.core.checks import positive
from leakgauge.harness.core.claim import Claim, Proof, Unit, added_up, claim_over
from leakgauge.harness.core.contract import Link, Setting
from leakgauge.harness.core.distribution import MessageDistribution, StudentPairs
from leakgauge.harness.core.rng import Key
from leakgauge.harness.core.vec import Vector


@dataclass(frozen=True)
class JoPEQT(Dithered):
    """JoPEQ on pairs of coordinates: scale, add reduced t noise, quantize on a lattice with a shared dither.

    The noise of Theorem III.1 does not exist (see `jopeq`). This class draws the surrogate of the reference code: t
    noise of the same nu, whose covariance is the nominal one minus that of the quantization error.

    Args:
        epsilon, s2, nu: as for `t-noise`; s2 I is the scale matrix of noise plus error.
        bits: R, 1 to 16; the quantizer has 2^R + 1 levels per lattice coordinate.
        gamma: radius of the quantizer, with v = s2 nu/(nu - 2): `reference` is 1.5 sqrt(1 + v) with step Delta = 2
            gamma/(2^R + 1); `paper` is 1.5 (1 + v) with step 2 gamma/2^R; a number has the step of `reference`.
        scale, clip: as for `jopeq`; with `public`, pairs are scaled down into the disc of radius `clip`.

    Guarantees:
        Messages hold the scales (12 bytes per tensor, 4 for `vector`, none for `public`), then ceil(n * ceil(log2(2^R +
        1)) / 8) bytes for n numbers: d, plus one for each tensor of odd length (`tensor`) or for an odd d. The rate of
        2^R + 1 levels is log2(2^R + 1) bits per number, not R.
        Without overload, decode(encode(u)) - u is, for each pair, bivariate t with scale matrix s2 I - ((nu - 2)/nu)
        Delta^2/12 G G^T plus a uniform draw from the cell Delta G [-1/2, 1/2)^2, times the scale, independent of the
        other pairs and of u.

    Raises:
        ValueError: a parameter is out of range, epsilon is not in the table, or the step is so wide that the error
            alone exceeds the nominal noise.

    Source: Lang, Sofer, Shaked, Shlezinger 2022, Algorithm 1 and Thm III.1, with noise, lattice and table of the
        reference code. The table's parameters attain the nominal epsilon only for points at most 1 apart, but the unit
        disc has diameter 2.
    """

    lanes: ClassVar[int] = 2

    epsilon: float = 2.0
    s2: float | None = None
    nu: float | None = None
    bits: int = 2
    gamma: Radius = "reference"
    scale: Mode = "tensor"
    clip: float = 1.0

    def __post_init__(self) -> None:
        positive(clip=self.clip)
        if not self.surrogate.is_proper:
            s2, nu = self.noise
            raise ValueError(
                f"expected a step below {(6 * s2 * nu / (nu - 2)) ** 0.5:.6g}, so that the quantization error is less "
                f"than the whole noise, got step={self.lattice.step:.6g}; use more bits, a smaller gamma or more noise"
            )

    @property
    def noise(self) -> privacy.Student:
        """s2 and nu of the nominal distribution of noise plus error."""
        return student(self.epsilon, self.s2, self.nu)

    @property
    def surrogate(self) -> privacy.Surrogate:
        """The distribution of the drawn noise."""
        return privacy.surrogate_covariance(*self.noise, self.lattice.step)

    @property
    def lattice(self) -> Lattice:
        """Delta times the hexagonal lattice."""
        return pair_lattice(self.bits, self.noise, self.gamma)

    @functools.cached_property
    def _root(self) -> Tensor:
        """[2, 2]: the drawn noise is this matrix times standard t noise; it is the same for every message."""
        root: Tensor = torch.linalg.cholesky(torch.tensor(self.surrogate.scale_matrix))
        return root

    def perturb(self, values: Tensor, private: Key) -> Tensor:
        """Add t noise to each pair, in place."""
        return values.add_(draw_student(private, len(values) // 2, self._root, self.noise.nu).float())

    def misfit(self, side: Tensor, *, dithered: bool) -> Misfit:
        """The distribution of the nominal t noise, which approximates noise plus error and has their covariance."""
        lattice, noise = self.lattice, self.noise
        blur = 0.0 if dithered else lattice.error_variance(dithered=True)
        # only the part inside the outermost cells counts; the blur is the variance of an unknown dither
        return lambda residual: student_misfit(lattice.inside(residual, side), *noise, blur)

    def message_distribution(self, state: None, memory: None, update: Vector, link: Link) -> MessageDistribution:
        """The levels of the scaled pairs plus t noise with the reduced scale matrix, given the dither."""
        (s2, nu), lattice = self.noise, self.lattice
        matrix = s2 * np.eye(2) - (nu - 2) / nu * lattice.step**2 / 12 * privacy.GENERATOR @ privacy.GENERATOR.T
        numbers = scaled(update, link.setting.layout, self.scale, 2, self.clip)
        root = np.asarray(np.linalg.cholesky(matrix), np.float64)
        return leveled(numbers, StudentPairs(nu), root, lattice, link.key)

    def low_noise_variant(self) -> JoPEQT:
        """The same nu with a noise scale of 0.001, and steps small enough that private noise remains."""
        return replace(self, s2=1e-6, nu=self.noise.nu, bits=16, gamma="reference")

    def claim(self, history: Sequence[None], setting: Setting) -> Claim:
        """Epsilon for one pair of one message; we add up the epsilons of T rounds."""
        rounds = len(history)
        # the radius that belongs to the step by the reference code's formula
        gamma = self.lattice.step * (2.0**self.bits + 1) / 2
        epsilon = privacy.vector_epsilon(*self.noise, self.bits, gamma)
        bound = privacy.vector_epsilon_bound(*self.noise, self.bits, gamma)
        why = "the server knows the dither; a search found two points of the unit disc that attain this epsilon."
        attained = Proof.pure(epsilon, rounds, Unit.SUBVECTOR, why, "search over inputs, dithers and levels")
        why = "the server knows the dither and sees a function of the input plus the private t noise."
        above = Proof.pure(bound, rounds, Unit.SUBVECTOR, why, tight=False)
        pairs, given = self.scaling.count(setting.layout) // 2, "" if self.scale == "public" else "given the scale, "
        why = f"{given}all {pairs} pairs may change at once."
        whole = Proof.pure(bound * pairs, rounds, Unit.MESSAGE, why, tight=False)
        complete = () if self.scale == "public" else (Proof.none(Unit.MESSAGE, CLEAR),)
        source, further = added_up("Lang et al. 2022, Thm III.1 and Cor. 1", rounds), (whole, *complete)
        promised, assumes = self.epsilon * rounds, unclipped(self.scale, 2)
        return claim_over(rounds, promised, above, source=source, assumes=assumes, further=further, attained=attained)


FORMULAS = {"message_bits": message_bits}
"""Formulas of the paper that recipes draw."""
