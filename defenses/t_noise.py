"""Multivariate t noise on pairs of coordinates of each client's message."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from scipy import special
from torch import Tensor

from leakgauge.defenses._common.cascade import Perturbs, Rounded, split_message
from leakgauge.defenses._common.misfit import student_misfit
from leakgauge.defenses._common.scale import Mode, Scaling
from leakgauge.defenses._jopeq.lattice import student_variance
from leakgauge.defenses._jopeq.privacy import Student, t_epsilon
from leakgauge.defenses._jopeq.quantizer import added_up, draw_student, pairs_unclipped, student
from leakgauge.harness.core.accounting import Pure, repeat
from leakgauge.harness.core.checks import check_update, positive
from leakgauge.harness.core.claim import Claim, Horizon, Proof, Relation, Unit, every_round
from leakgauge.harness.core.codec import pack_float32
from leakgauge.harness.core.contract import (
    Defense,
    Likelihood,
    Link,
    Links,
    Setting,
)
from leakgauge.harness.core.rng import Key
from leakgauge.harness.core.threats import Threat
from leakgauge.harness.core.vec import Parts, Vector


@dataclass(frozen=True)
class TNoise(Defense[None, None], Perturbs):
    """The t mechanism: scale, add bivariate t noise to pairs of coordinates, send float32.

    Args:
        epsilon: nominal, of one pair of one message. Sets the noise by the reference code's table: 0.84, 1, 2, 3 or 4;
            with `s2` and `nu`, any number, which is then only claimed.
        s2: of the scale matrix s2 I, in units of the scaled coordinates.
        nu: degrees of freedom, above 2.
        scale: `tensor` or `vector`: the baseline of JoPEQ, which divides by three times a norm of the update, sends
            that norm in the clear and clips nothing. `public`: pairs are scaled down into the disc of radius `clip`.
        clip: C, for `scale = "public"`, in units of the update.

    Guarantees:
        4 * n bytes for n numbers, d and one more for a tensor (for the whole vector) of odd length; and for `tensor`
        12 a tensor, for `vector` 4 more.
        decode(encode(u)) - u (clipped, for `public`) is bivariate t with scale matrix s2 I and nu degrees of freedom,
        times the scale, for each pair, independently, up to float32 rounding.

    Raises:
        ValueError: a parameter out of range, or an epsilon that is not in the table.

    Source: the baseline FL+t of Lang, Sofer, Shaked, Shlezinger 2022, its eq. (11) and the table of its reference code.
        (11) is printed with the exponent (nu + d)^2 where it is (nu + d)/2, and the table reaches the nominal epsilon
        only for points at most 1 apart: the unit disc has diameter 2.
    """

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
        """s2 and nu."""
        return student(self.epsilon, self.s2, self.nu)

    @property
    def _scaling(self) -> Scaling:
        """By pairs."""
        return Scaling(self.scale, 2, self.clip)

    def header_size(self, setting: Setting) -> int:
        """Of the means and norms."""
        return self._scaling.header_size(setting.layout)

    def count(self, setting: Setting) -> int:
        """d, and one more for each piece of odd length."""
        return self._scaling.count(setting.layout)

    def unit(self, setting: Setting) -> float:
        """1: the numbers are scaled."""
        return 1.0

    def noise_variance(self, setting: Setting) -> float:
        """s2 nu / (nu - 2)."""
        return student_variance(*self.noise)

    def attained(self, edge: float) -> float:
        """Of the first number of a pair, 1 or -1, by whether it exceeds some threshold in [0, edge]."""
        thresholds = np.linspace(0.0, edge, 1001)
        std = math.sqrt(self.noise.s2)
        above, below = (special.stdtr(self.noise.nu, (x - thresholds) / std) for x in (1.0, -1.0))
        # raising the smaller of two chances keeps their ratio a lower bound
        return float(np.log(above / np.maximum(below, 1e-300)).max())

    def parts(self, setting: Setting) -> Parts:
        """Of the first tensor."""
        return self._scaling.parts(setting.layout)

    def encode(self, state: None, memory: None, update: Vector, link: Link, private: Key) -> tuple[bytes, None]:
        """Scale, add noise from the private key, send float32. Does not use the shared key."""
        check_update(update)
        header, numbers = self._scaling.normalize(update, link.setting.layout)
        root = math.sqrt(self.noise.s2) * torch.eye(2, dtype=torch.float64)
        return header + pack_float32(numbers + draw_student(private, len(numbers) // 2, root, self.noise.nu)), None

    def estimate(self, state: None, received: bytes, link: Link) -> Vector:
        """The noisy numbers, scaled back: unbiased (for the clipped update, where it is clipped)."""
        header, numbers = split_message(received, self.header_size(link.setting), self.count(link.setting))
        return self._scaling.undo(header, numbers, link.setting.layout)

    def likelihood(self, state: None, received: Sequence[bytes], links: Links) -> Likelihood:
        """(nu + 2)/2 sum ln(1 + |r|^2 / (nu s2)) over pairs, and how well the scales fit that were sent."""
        return self.misfit(received, setting=links.setting)

    def misfit(self, received: Sequence[bytes], *, setting: Setting, rounded: Rounded | None = None) -> Likelihood:
        """The likelihood; an error of rounding widens the law."""
        parts = [split_message(wire, self.header_size(setting), self.count(setting)) for wire in received]
        candidates = self._scaling.candidates([header for header, _ in parts], setting.layout)
        sent = torch.stack([numbers for _, numbers in parts])

        def score(update: Tensor) -> Tensor:
            residual = candidates.numbers(update) - sent
            kept, extra = (residual, 0.0) if rounded is None else (rounded.inside(residual), rounded.variance)
            return student_misfit(kept, *self.noise, extra) + candidates.penalty(update)

        return score

    def claim(self, history: Sequence[None], setting: Setting) -> Claim:
        """Epsilon for one pair of one message; T rounds add up."""
        rounds, pairs = len(history), self.count(setting) // 2
        each = t_epsilon(*self.noise, diameter=2.0)
        near = t_epsilon(*self.noise, diameter=1.0)
        why = f"the density ratio of t noise between two ends of the unit disc, 2 apart; {near:.4g} for points 1 apart."
        whole = Proof(
            repeat(Pure(each * pairs), rounds), Unit.MESSAGE, "closed form", f"all {pairs} pairs may move at once."
        )
        if self.scale != "public":
            whole = Proof(None, Unit.MESSAGE, "by definition", "a norm of the update is sent in the clear.")
        return Claim(
            epsilon=self.epsilon * rounds,
            delta=0.0,
            unit=Unit.SUBVECTOR,
            relation=Relation.ANY_TWO,
            horizon=Horizon.of(rounds),
            against=frozenset(Threat),
            source=added_up("Lang et al. 2022, Thm II.8 and (11)", rounds),
            assumes=(*every_round(rounds), *pairs_unclipped(self.scale)),
            proved=Proof(repeat(Pure(each), rounds), Unit.SUBVECTOR, "closed form", why),
            further=(whole,),
        )
