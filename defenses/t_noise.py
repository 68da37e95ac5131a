"""Multivariate t noise on pairs of coordinates of each client's message."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import torch
from scipy import special
from torch import Tensor

from leakgauge.defenses._common.cascade import THRESHOLD, Perturbs
from leakgauge.defenses._common.misfit import student_misfit
from leakgauge.defenses._common.reference import scaled
from leakgauge.defenses._common.scale import Mode
from leakgauge.defenses._jopeq.lattice import Lattice, Rounded, student_variance
from leakgauge.defenses._jopeq.privacy import Student, t_epsilon
from leakgauge.defenses._jopeq.quantizer import draw_student, student
from leakgauge.harness.core.checks import positive
from leakgauge.harness.core.claim import Claim, Proof, Unit, added_up
from leakgauge.harness.core.contract import Apart, Likelihood, Link, Setting
from leakgauge.harness.core.distribution import Additive, MessageDistribution, StudentPairs
from leakgauge.harness.core.rng import Key
from leakgauge.harness.core.vec import Vector


@dataclass(frozen=True)
class TNoise(Perturbs):
    """The t mechanism: scale, add bivariate t noise to pairs of coordinates, send float32.

    Args:
        epsilon: nominal privacy budget of one pair of one message. It sets the noise by the reference code's table:
            0.84, 1, 2, 3 or 4. With `s2` and `nu`, it can be any number and affects the claim only.
        s2: sets the scale matrix s2 I, in units of the scaled coordinates.
        nu: degrees of freedom, above 2.
        scale: `tensor` and `vector`: the baseline of JoPEQ, as for `laplace`. `public`: pairs are scaled down into the
            disc of radius `clip`, in units of the update.

    Guarantees:
        Messages have 4 * n bytes, plus 12 bytes per tensor for `tensor`, or 4 bytes for `vector`. n is d, plus one for
        each tensor of odd length (`tensor`) or for an odd d.
        decode(encode(u)) - u is, for each pair, independent bivariate t noise with scale matrix s2 I and nu degrees of
        freedom, times the scale, up to float32 rounding. For `public`, u is the clipped update.

    Raises:
        ValueError: a parameter is out of range, or an epsilon that is not in the table.

    Source: the baseline FL+t of Lang, Sofer, Shaked, Shlezinger 2022, eq. (11) and the table of the reference code. Eq.
        (11) prints the exponent (nu + d)^2 instead of (nu + d)/2. The table attains the nominal epsilon only for points
        at most 1 apart, but the unit disc has diameter 2.
    """

    lanes: ClassVar[int] = 2

    epsilon: float = 2.0
    s2: float | None = None
    nu: float | None = None
    clip: float = 1.0
    scale: Mode = "tensor"

    def __post_init__(self) -> None:
        positive(clip=self.clip)
        student(self.epsilon, self.s2, self.nu)

    @property
    def noise(self) -> Student:
        """s2 and nu of the noise."""
        return student(self.epsilon, self.s2, self.nu)

    def perturb(self, numbers: Tensor, private: Key) -> Tensor:
        """The numbers plus t noise on each pair."""
        root = math.sqrt(self.noise.s2) * torch.eye(2, dtype=torch.float64)
        return (numbers.double() + draw_student(private, len(numbers) // 2, root, self.noise.nu)).float()

    def noise_variance(self, setting: Setting) -> float:
        """s2 nu / (nu - 2)."""
        return student_variance(*self.noise)

    def attained(self, lattice: Lattice, rounds: int, setting: Setting) -> Proof:
        """What one threshold in [0, edge] attains on the first number of a pair, which is 1 or -1."""
        thresholds = np.linspace(0.0, lattice.edge, 1001)
        std = math.sqrt(self.noise.s2)
        # raising the smaller of two chances keeps their ratio a lower bound
        above, below = (np.maximum(special.stdtr(self.noise.nu, (x - thresholds) / std), 1e-300) for x in (1.0, -1.0))
        shown = float(np.log(above / below).max())
        return Proof.pure(shown, rounds, Unit.SUBVECTOR, THRESHOLD, "closed form for two inputs")

    def longest(self, state: None, link: Link) -> float:
        """For `public`, C plus noise in each pair: P(|r| > x) = (1 + x^2 / (nu s2))^(-nu/2), e^-30 over all pairs."""
        if self.scale != "public":
            return math.inf
        (s2, nu), pairs = self.noise, self.scaling.count(link.setting.layout) // 2
        far = math.sqrt(nu * s2 * math.expm1(2 / nu * (math.log(pairs) + 30)))
        return math.sqrt(pairs) * self.clip * (1 + far)

    def misfit(self, received: Sequence[bytes], *, setting: Setting, rounded: Rounded | None = None) -> Likelihood:
        """The sum over pairs of (nu + 2)/2 ln(1 + |r|^2 / (nu s2)), plus a penalty for scales unlike the sent ones.

        A rounding error widens the distribution.
        """
        parts = [self.split(wire, setting) for wire in received]
        candidates = self.scaling.candidates([header for header, _ in parts], setting.layout)
        sent = torch.stack([numbers for _, numbers in parts])

        def hidden(update: Tensor) -> Tensor:
            residual, extra = candidates.numbers(update) - sent, 0.0
            if rounded is not None:
                residual, extra = rounded.inside(residual), rounded.variance
            return student_misfit(residual, *self.noise, extra)

        return Apart(hidden, candidates.penalty)

    def message_distribution(self, state: None, memory: None, update: Vector, link: Link) -> MessageDistribution:
        """The scales, then bivariate t noise around the scaled pairs."""
        header, center, places = scaled(update, link.setting.layout, self.scale, 2, self.clip)
        return Additive(center, StudentPairs(self.noise.nu), math.sqrt(self.noise.s2), places, header)

    def low_noise_variant(self) -> TNoise:
        """The same mechanism with a noise scale of 0.001 and the same degrees of freedom."""
        return replace(self, s2=1e-6, nu=self.noise.nu)

    def claim(self, history: Sequence[None], setting: Setting) -> Claim:
        """Epsilon for one pair of one message; the epsilons of T rounds add up."""
        rounds = len(history)
        each, near = (t_epsilon(*self.noise, diameter=diameter) for diameter in (2.0, 1.0))
        why = f"the density ratio of t noise at two points of the unit disc, 2 apart; epsilon {near:.4g} at 1 apart."
        proved, source = Proof.pure(each, rounds, Unit.SUBVECTOR, why), "Lang et al. 2022, Thm II.8 and (11)"
        return self.claim_of_each(self.epsilon, each, proved, added_up(source, rounds), rounds, setting)
