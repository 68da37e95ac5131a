"""JoPEQ with t noise on pairs: quantization on a lattice, and noise that leaves some of its variance to it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from leakgauge.defenses._common.misfit import Misfit, student_misfit
from leakgauge.defenses._common.scale import Mode, Scaling
from leakgauge.defenses._jopeq.lattice import Lattice
from leakgauge.defenses._jopeq.privacy import (
    Student,
    Surrogate,
    surrogate_covariance,
    vector_epsilon,
    vector_epsilon_bound,
)
from leakgauge.defenses._jopeq.quantizer import (
    Carrier,
    Dithered,
    Radius,
    added_up,
    draw_student,
    pair_lattice,
    pairs_unclipped,
    student,
)
from leakgauge.harness.core.accounting import Pure, repeat
from leakgauge.harness.core.checks import positive
from leakgauge.harness.core.claim import Claim, Horizon, Proof, Relation, Unit, every_round
from leakgauge.harness.core.contract import Setting
from leakgauge.harness.core.rng import Key
from leakgauge.harness.core.threats import Threat


@dataclass(frozen=True)
class JoPEQT(Dithered):
    """JoPEQ on pairs of coordinates: scale, add reduced t noise, quantize on a lattice with a shared dither.

    The noise of Theorem III.1 does not exist (see `jopeq`); this is the surrogate of the reference code: t noise of the
    same nu, whose covariance is what it should be less that of the quantization error.

    Args:
        epsilon: nominal, of one pair of one message. Sets the noise by the reference code's table: 0.84, 1, 2, 3 or 4;
            with `s2` and `nu`, any number, which is then only claimed.
        s2: of the scale matrix s2 I that noise and error should amount to, in units of the scaled coordinates.
        nu: degrees of freedom, above 2.
        bits: R, 1 to 16; 2^R + 1 levels a lattice coordinate.
        gamma: radius of the quantizer: `reference` 1.5 sqrt(1 + v) and `paper` 1.5 (1 + v), v = s2 nu/(nu - 2), each
            with its own step, Delta = 2 gamma/(2^R + 1) and 2 gamma/2^R; or a number, with the first step.
        scale: `tensor` (the reference code) or `vector` (the text), by a norm of the update, which is sent; `public`:
            no norm, and pairs are scaled down into the disc of radius `clip`.
        clip: C, for `scale = "public"`, in units of the update.

    Guarantees:
        The scales (12 bytes a tensor, 4 for `vector`, none for `public`), then ceil(n * ceil(log2(2^R + 1)) / 8) bytes
        for n numbers, d and one more for a tensor (for the whole vector) of odd length. An honest rate is
        log2(2^R + 1) bits a number, not R.
        Without overload decode(encode(u)) - u is, for each pair, bivariate t with scale matrix
        s2 I - ((nu - 2)/nu) Delta^2/12 G G^T plus a uniform draw from the cell Delta G [-1/2, 1/2)^2, times the scale,
        independently and of u.

    Raises:
        ValueError: a parameter out of range, an epsilon that is not in the table, or a step so wide that the error
            alone is more than the noise should amount to.

    Source: Lang, Sofer, Shaked, Shlezinger 2022, Algorithm 1 and Thm III.1, with noise, lattice and table of the
        reference code. Its parameters reach the nominal epsilon only for points at most 1 apart: the unit disc has
        diameter 2.
    """

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
                f"expected a step below {(6 * s2 * nu / (nu - 2)) ** 0.5:.6g}, at which the error alone is all of the "
                f"noise, got step={self.lattice.step:.6g}; take more bits, a smaller gamma or more noise"
            )

    @property
    def noise(self) -> Student:
        """What noise and error should amount to."""
        return student(self.epsilon, self.s2, self.nu)

    @property
    def surrogate(self) -> Surrogate:
        """What is drawn."""
        return surrogate_covariance(*self.noise, self.lattice.step)

    @property
    def scaling(self) -> Scaling:
        """By pairs."""
        return Scaling(self.scale, 2, self.clip)

    @property
    def lattice(self) -> Lattice:
        """Delta times the hexagonal lattice."""
        return pair_lattice(self.bits, self.noise, self.gamma)

    def perturb(self, values: Tensor, private: Key) -> Tensor:
        """t noise on each pair more, in place."""
        root = torch.linalg.cholesky(torch.tensor(self.surrogate.scale_matrix))
        return values.add_(draw_student(private, len(values) // 2, root, self.noise.nu))

    def misfit(self, side: Tensor, *, dithered: bool) -> Misfit:
        """As of the t noise that noise and error amount to: of their covariance, but not quite of their law."""
        carrier = Carrier(self.lattice)
        blur = 0.0 if dithered else carrier.error_variance(dithered=True)
        return _AsStudent(carrier, side, self.noise, blur)

    def claim(self, history: Sequence[None], setting: Setting) -> Claim:
        """Epsilon for one pair of one message; T rounds add up, by us."""
        rounds = len(history)
        first, *further = self._proofs(setting, rounds)
        return Claim(
            epsilon=self.epsilon * rounds,
            delta=0.0,
            unit=Unit.SUBVECTOR,
            relation=Relation.ANY_TWO,
            horizon=Horizon.of(rounds),
            against=frozenset(Threat),
            source=added_up("Lang et al. 2022, Thm III.1 and Cor. 1", rounds),
            assumes=(*every_round(rounds), *pairs_unclipped(self.scale)),
            proved=first,
            further=tuple(further),
        )

    def _proofs(self, setting: Setting, rounds: int) -> Sequence[Proof]:
        """Of one pair, that which decides on the claim first, and of a whole message."""
        # in terms of the reference code's step
        gamma = self.lattice.step * (2.0**self.bits + 1) / 2
        found = vector_epsilon(*self.noise, self.bits, gamma)
        bound = vector_epsilon_bound(*self.noise, self.bits, gamma)
        attained = Proof(
            repeat(Pure(found), rounds),
            Unit.SUBVECTOR,
            "search over inputs, dithers and levels",
            "a server knows the dither: two points of the unit disc whose messages are so far apart were found.",
        )
        why = "a server that knows the dither sees a function of the input plus the private t noise."
        above = Proof(repeat(Pure(bound), rounds), Unit.SUBVECTOR, "closed form", why, tight=False)
        pairs, given = self.scaling.count(setting.layout) // 2, "" if self.scale == "public" else "given the scale, "
        why = f"{given}all {pairs} pairs may move at once."
        whole = Proof(repeat(Pure(bound * pairs), rounds), Unit.MESSAGE, "closed form", why, tight=False)
        told = "the complete message: its scale, a norm of the update, is sent in the clear."
        complete = Proof(None, Unit.MESSAGE, "by definition", told)
        # what was found refutes a smaller claim; only the bound proves a larger one
        of_pair = (attained, above) if found > self.epsilon else (above, attained)
        return (*of_pair, whole) if self.scale == "public" else (*of_pair, whole, complete)


@dataclass(frozen=True, eq=False)
class _AsStudent:
    """Pairs that are bivariate t, inside the outermost cells.

    side: of `Carrier.side`; blur: the variance of the dither where it is not known.
    """

    carrier: Carrier
    side: Tensor
    noise: Student
    blur: float

    def __call__(self, residual: Tensor) -> Tensor:
        """Implement `Misfit`."""
        return student_misfit(self.carrier.inside(residual, self.side), *self.noise, self.blur)
